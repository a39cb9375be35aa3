"""``ratp study`` as it is meant to be used, stopped in the middle, and by a careless user."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from helpers import files_of, journal_of, no_processes, ratp
from own_images import image_files, write_files
from ratp._core.locks import exclusive
from ratp.cli.study_progress import StudyWatcher, follow_study
from ratp.errors import Note
from ratp.evaluation.matrix import Matrix
from ratp.executors.local import run_all
from ratp.runs.events import StageFinished, StageStarted, Trained
from ratp.runs.record import RunRecord, read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.stream import DataOptions
from ratp.studies.file import read_study
from ratp.training.phase import Tick
from tiny_study import grid, study_file, traces

pytestmark = pytest.mark.usefixtures("_no_processes")

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OPTIONS = ["--device", "cpu", "--jobs", "1", "--trust-methods"]
METHODS = ["source-only", "shot"]
FOUR = grid('methods = ["source-only", "shot"]', "seeds = [1, 2]")
WILD = grid('variant = [{ name = "wild", method = "source-only", set = { lr = 1e30 } }]')
# A method that waits before its third stage until it may go on.
GATE = """
import os, time
from pathlib import Path
from ratp.methods.shot import SHOT

class Gate(SHOT):
    name = "gate"

    def target_phases(self, domain):
        if domain.name == "font":
            Path(f"waiting-{os.getpid()}").touch()
            while not Path("go").exists():
                time.sleep(0.02)
        return super().target_phases(domain)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In an empty folder, with 80 columns and no terminal."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


def is_plain_text(text):
    """Whether a file or a pipe can take the text."""
    return not CONTROL.search(text)


def narrow(text):
    return all(len(line) <= 80 for line in text.splitlines())


def states(*words):
    """What ``ratp study status`` says, by run."""
    result = ratp("study", "status", *words, "--json")
    assert (result.code, result.err) == (0, "")
    return [run["state"] for run in json.loads(result.out)["runs"]]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished study of four runs, its file beside it, and the command's output."""
    folder = tmp_path_factory.mktemp("done")
    path = study_file(folder, FOUR)
    with pytest.MonkeyPatch.context() as patch, no_processes():
        patch.setenv("COLUMNS", "80")
        result = ratp("study", "run", path, "--out", folder / "runs", *OPTIONS)
    return folder, result


@pytest.fixture
def study(done):
    """A copy of it, in the current folder: the words that name it."""
    shutil.copytree(done[0], "made")
    return ["made/tiny.toml", "--out", "made/runs"]


def folders(place, pattern="*"):
    return sorted(path.parent for path in Path(place).glob(f"{pattern}/config.json"))


class TestRun:
    def test_console_output(self, done):
        folder, result = done
        assert result.code == 0
        assert is_plain_text(result.out + result.err)
        assert narrow(result.out)
        lines = result.err.splitlines()
        assert lines[0] == "Tiny runs: 4 of 4 runs to execute"
        ends = [line for line in lines if re.search(r"TDG \d+\.\d  TDA \d+\.\d  FA \d+\.\d  \(.* s\)", line)]
        assert [line.split(":")[0] for line in ends] == [
            f"{method}, seed {seed}" for method in METHODS for seed in (1, 2)
        ]
        assert " left" in ends[0]
        assert " left" not in ends[-1]
        assert lines[-1] == f"Runs: {folder / 'runs'}"
        assert [line.split() for line in result.out.splitlines() if line.strip()] == [
            ["Tiny", "runs"], ["finished"], ["─" * 24], ["demo"], ["source-only", "2"], ["shot", "2"],
            ["4", "runs", "4"],
        ]  # fmt: skip

    def test_online_measures_what_streams_past(self, tmp_path, done):
        path = study_file(tmp_path, grid('methods = ["source-only"]', "seeds = [1]"))
        assert ratp("study", "run", path, "--out", "runs", "--online", *OPTIONS).code == 0
        (run,) = folders("runs")
        events = [event for event in journal_of(run) if event["event"] == "online"]
        assert len(events) == len(read_run(run).matrix.domains) - 1
        (plain,) = (f for f in folders(done[0] / "runs") if f.name == run.name)
        assert read_run(run).matrix.accuracy == read_run(plain).matrix.accuracy

    def test_files_written(self, done):
        folder, _ = done
        assert len(folders(folder / "runs")) == 4
        assert json.loads((folder / "runs" / "study.json").read_text())["study"] == "tiny"
        assert not (folder / "runs" / "failures").exists()
        assert all(read_run(run).matrix.complete for run in folders(folder / "runs"))

    def test_second_run_has_nothing_to_do(self, study):
        before = traces(Path("made"))
        again = ratp("study", "run", *study, *OPTIONS)
        assert again.code == 0
        assert "0 of 4 runs to execute" in again.err
        assert traces(Path("made")) == before

    def test_json_output_is_one_document(self, study):
        shutil.rmtree(folders("made/runs")[0])
        result = ratp("study", "run", *study, *OPTIONS, "--json")
        assert (result.code, result.err) == (0, "")
        data = json.loads(result.out)
        assert {run["state"] for run in data["runs"]} == {"finished"}
        assert [Path(run["folder"]) for run in data["runs"]] != sorted(Path(run["folder"]) for run in data["runs"])
        assert {Path(run["folder"]) for run in data["runs"]} == {*folders("made/runs")}

    def test_quiet_is_silent(self, study):
        shutil.rmtree(folders("made/runs")[0])
        result = ratp("study", "run", *study, *OPTIONS, "--quiet")
        assert (result.code, result.out, result.err) == (0, "", "")
        assert len(folders("made/runs")) == 4

    def test_default_folder_is_per_study(self, done):
        shutil.copy(done[0] / "tiny.toml", "my study.toml")
        shutil.copytree(done[0] / "runs", "runs/studies/my_study")
        Path("runs/studies/my_study/study.json").unlink()
        result = ratp("study", "run", "my study.toml", *OPTIONS)
        assert result.code == 0
        assert "0 of 4 runs to execute" in result.err
        shutil.rmtree("runs")
        assert ratp("study", "status", "my study.toml").err == "Runs: runs/studies/my_study\n"
        assert not Path("runs").exists()

    def test_an_edited_file_finds_its_runs_again(self, study):
        before = {run: traces(run) for run in folders("made/runs")}
        study_file(Path("made"), FOUR.replace("[1, 2]", "[2, 3]"), title="Other seeds")
        assert states(*study) == ["finished", "waiting", "finished", "waiting"]
        assert ratp("study", "run", *study, *OPTIONS, "-q").code == 0
        assert len(folders("made/runs")) == 6
        assert {run: traces(run) for run in before} == before

    def test_failed_run_is_reported(self, study):
        """It stops no other run, is reported last and sets the exit code, with --quiet too."""
        study_file(Path("made"), WILD, FOUR)
        shutil.rmtree(folders("made/runs")[0])
        result = ratp("study", "run", *study, *OPTIONS)
        assert result.code == 2
        assert "Traceback" not in result.err
        assert "2 of 5 runs to execute" in result.err
        (message,) = [line for line in result.err.splitlines() if line.startswith("failed: ")]
        assert message.startswith("failed: wild, demo scan>photo>font>street, seed 2022: ")
        assert "A smaller learning rate" in message
        assert states(*study) == ["failed", *["finished"] * 4]
        quiet = ratp("study", "run", *study, *OPTIONS, "--quiet")
        assert (quiet.code, quiet.out, quiet.err) == (2, "", f"{message}\n")
        data = json.loads(ratp("study", "run", *study, *OPTIONS, "--json").out)
        assert "A smaller learning rate" in data["runs"][0]["reason"]
        listed = ratp("study", "status", *study)
        assert listed.code == 0
        assert message in listed.err
        assert re.search(r"(?m)^5 runs +4 +1$", listed.out)
        study_file(Path("made"), FOUR)
        assert ratp("study", "run", *study, *OPTIONS, "-q").code == 0

    @pytest.mark.parametrize("terminal", [False, True])
    def test_skipped_images_are_reported_once_per_stream(self, terminal):
        for seed, name in enumerate(("day", "rain")):
            write_files(Path("yard", name), image_files(count=4, seed=seed))
        Path("yard/rain/north/bad.png").touch()
        lines = ('methods = ["source-only"]', "seeds = [1, 2]")
        path = study_file(Path(), grid('orders = ["day>rain"]', *lines, stream="yard"), grid("subset = true", *lines))
        path.write_text(path.read_text().replace("set = {", 'set = { "network.backbone" = "dtn",'))
        study = read_study(path, Path("out"), RunRequest(device="cpu", data=DataOptions(on_bad="skip")))
        study.claim()
        file = io.StringIO()
        follow_study(study, Console(file=file, force_terminal=terminal, width=80), quiet=False, at_once=1)
        output = ESCAPE.sub("", file.getvalue())
        assert output.count("note: yard, rain: skipped 1 unusable image:\n  north/bad.png: empty") == 1
        assert output.count("note:") == 1
        assert "source-only, yard day>rain, seed 2: TDG" in output
        result = ratp("study", "report", path, "--out", "out")
        assert "About the images: rain: skipped 1 unusable image." in result.out

    def test_shared_problem_is_reported_once(self, tmp_path):
        file = study_file(tmp_path, grid('methods = ["source-only"]', "seeds = [1, 2, 3]", stream="digits"))
        result = ratp("study", "run", file, "--out", tmp_path / "runs", "--data", tmp_path)
        assert result.code == 2
        assert result.err.count("are not in") == 2  # when it happens, and in the end
        assert "failed: 3 runs, source-only, digits MT>MM>SN>SD>US, seed 1 among them: domains mnist" in result.err
        assert ratp("study", "status", file, "--out", tmp_path / "runs").err.count("are not in") == 1


class TestStatus:
    def test_before_and_after(self, study):
        assert ratp("study", "status", "made/tiny.toml", "--out", "new").out.splitlines()[1].split() == ["waiting"]
        assert not Path("new").exists()
        result = ratp("study", "status", *study)
        assert result.code == 0
        assert is_plain_text(result.out + result.err)
        assert narrow(result.out)
        assert "finished" in result.out

    def test_run_in_several_rows_is_counted_once(self):
        same = '[[grid.variant]]\nname = "same"\nmethod = "ratp"\n'
        study_file(Path(), grid('methods = ["ratp", "tent"]') + same)
        *rows, total, note = [line for line in ratp("study", "status", "tiny.toml").out.splitlines() if line.strip()]
        assert sorted(row.split() for row in rows[-3:]) == [["ratp", "1"], ["same", "1"], ["tent", "1"]]
        assert (total.split(), note) == (["2", "runs", "2"], "1 run is in several rows.")

    def test_paper_studies_fit_a_terminal(self):
        file = Path(__file__).parents[2] / "configs" / "paper" / "stationary.toml"
        result = ratp("study", "status", file, "--weights", "none")
        assert result.code == 0
        assert narrow(result.out)
        assert re.search(r"(?m)^84 runs +84$", result.out)

    def test_runs_are_matched_by_initial_weights(self):
        """They are part of what determines a run, and of its directory's name."""
        Path("study.toml").write_text('[[grid]]\nstream = "pacs"\nmethods = ["source-only"]\n')
        names = [
            {run["folder"] for run in json.loads(ratp("study", "status", "study.toml", *words, "--json").out)["runs"]}
            for words in ([], ["--weights", "none"])
        ]
        assert names[0] != names[1]


class TestReport:
    def test_missing_runs_are_named(self, study):
        shutil.rmtree(folders("made/runs", "*shot-2*")[0])
        result = ratp("study", "report", *study)
        assert result.code == 0
        assert is_plain_text(result.out + result.err)
        assert Path("made/runs/report/index.html").exists()
        assert re.search(r"shot.*seed 2", result.out)
        assert ratp("study", "run", *study, *OPTIONS, "-q").code == 0  # the report does not interfere

    @pytest.mark.slow
    def test_a_comparison_of_its_runs_leaves_it_alone(self, study):
        ratp("study", "report", *study, "-q")
        before = traces(Path("made/runs/report"))
        result = ratp("report", "made/runs", "--export", "exported")
        assert result.code == 0 and "made/runs/comparison/index.html" in result.out + result.err
        assert traces(Path("made/runs/report")) == before
        Path("made/runs/study.json").unlink()
        assert ratp("study", "run", *study, *OPTIONS, "-q").code == 0  # nor is the comparison in anybody's way

    def test_quiet_report_in_another_folder(self, study):
        before = traces(Path("made"))
        result = ratp("study", "report", *study, "--to", "report", "--quiet")
        assert (result.code, result.out, result.err) == (0, "", "")
        assert traces(Path("made")) == before
        assert Path("report/index.html").exists()

    def test_nothing_to_report(self):
        study_file(Path(), FOUR)
        result = ratp("study", "report", "tiny.toml")
        assert (result.code, result.out) == (2, "")
        assert result.err == (
            "error: no run of tiny is finished in runs/studies/tiny. If you ran it with --weights or --known, give "
            "them here, too. Next: ratp study run tiny.toml\n"
        )
        assert os.listdir() == ["tiny.toml"]


class TestKnown:
    @pytest.fixture(scope="class")
    @staticmethod
    def once(done, tmp_path_factory):
        folder = tmp_path_factory.mktemp("exported")
        words = ["--export", folder / "results", "--out", folder / "report", "--quiet"]
        assert ratp("report", *folders(done[0] / "runs"), *words).code == 0
        return folder / "results"

    @pytest.fixture
    def exported(self, once):
        shutil.copytree(once, "results")
        return "results"

    def test_known_results_are_not_run_again(self, done, exported):
        words = [done[0] / "tiny.toml", "--out", "new", "--known", exported]
        assert states(*words) == ["finished"] * 4
        result = ratp("study", "run", *words, *OPTIONS)
        assert result.code == 0
        assert "0 of 4 runs to execute" in result.err
        assert os.listdir("new") == ["study.json"]
        one = next(file for file in Path(exported).iterdir() if "shot-1" in file.name)
        words[-1] = one
        assert states(*words) == ["waiting", "waiting", "finished", "waiting"]
        first, _, known, _ = json.loads(ratp("study", "status", *words, "--json").out)["runs"]
        assert (known["folder"], known["known"]) == (None, str(one))
        assert Path(first["folder"]).parent == Path("new") and "known" not in first
        assert ratp("study", "report", *words, "-q").code == 0

    def test_folder_of_results_is_read_with_subfolders(self, done, exported):
        Path("kept/tiny/trials").mkdir(parents=True)
        first, second, *_ = sorted(Path(exported).iterdir())
        first.rename("kept/tiny/first.json")
        second.rename("kept/tiny/trials/second.json")
        found = states(done[0] / "tiny.toml", "--out", "new", "--known", "kept")
        assert sorted(found) == ["finished", "waiting", "waiting", "waiting"]

    def test_conflicting_results_are_reported(self, done, exported):
        file = sorted(Path(exported).iterdir())[0]
        other = json.loads(file.read_text())
        rows = [[0.0, *row[1:]] for row in other["matrix"]["accuracy"]]
        other["matrix"] |= Matrix(tuple(other["matrix"]["domains"]), tuple(map(tuple, rows))).to_json()
        other["journal"][-1]["time"] = "2999-01-01T00:00:00+0000"
        del other["sha256"]
        Path(exported, "later.json").write_text(json.dumps(other))
        with pytest.warns(Note, match=r"later.json and \S+json are results of the same run and differ"):
            found = states(done[0] / "tiny.toml", "--out", "new", "--known", exported)
        assert found == ["finished"] * 4

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "ratp result"}', '{"compilerOptions": {}}'])
    def test_damaged_result_is_named_and_skipped(self, content, done, exported):
        Path(exported, "zzz.json").write_text(content)
        Path(exported, "study.json").write_text("{}")
        words = ["study", "run", done[0] / "tiny.toml", "--out", "new", *OPTIONS, "--known"]
        alone = ratp(*words, Path(exported, "zzz.json"))
        assert (alone.code, alone.out) == (2, "")
        assert alone.err.startswith("error: results/zzz.json ")
        assert len(alone.err.splitlines()) == 1
        assert not Path("new").exists()
        among_others = ratp(*words, exported)
        assert among_others.code == 0
        assert among_others.err.startswith("note: left out: results/zzz.json ")
        assert "0 of 4 runs to execute" in among_others.err
        assert "study.json" not in among_others.err

    def test_run_directories(self, done):
        words = [done[0] / "tiny.toml", "--out", "new", "--known"]
        assert states(*words, done[0] / "runs") == ["finished"] * 4
        found = json.loads(ratp("study", "status", *words, done[0] / "runs", "--json").out)["runs"]
        assert {Path(run["known"]) for run in found} == {*folders(done[0] / "runs")}
        assert sorted(states(*words, folders(done[0] / "runs")[0])) == ["finished", "waiting", "waiting", "waiting"]

    @pytest.mark.parametrize("path", ["nowhere", "x" * 300, "empty"])
    def test_no_known_results(self, path, done):
        Path("empty").mkdir()
        result = ratp("study", "status", done[0] / "tiny.toml", "--known", path)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: ")
        assert "--known takes exported results" in result.err


def start(*words):
    """Starts the program in a separate process, which computes as these tests do."""
    return subprocess.Popen(
        [sys.executable, "-m", "ratp", "study", "run", *map(str, words), "--device", "cpu", "--trust-methods"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for(pattern, count, process):
    """Until so many files are there."""
    patience = time.monotonic() + 120
    while len(list(Path().glob(pattern))) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < patience
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A study of a quick run and two that wait in their third stage; and how it ends if nothing happens to it."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "gate.py").write_text(GATE)
    path = study_file(folder, grid('methods = ["source-only"]'), grid('methods = ["gate.py"]', "seeds = [1, 2]"))
    (folder / "go").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert ratp("study", "run", path.name, "--out", "undisturbed", *OPTIONS, "-q").code == 0
    return folder


@pytest.fixture
def gate(undisturbed):
    """It, in the current folder, with the gate closed."""
    shutil.copytree(undisturbed, ".", dirs_exist_ok=True)
    for mark in ("go", *Path().glob("waiting-*")):
        Path(mark).unlink()
    return "tiny.toml"


def results(place):
    """The matrices and weights of all runs of a folder."""
    kept = ("matrix.json", "weights.safetensors")
    return {name: data for name, data in files_of(Path(place)).items() if Path(name).name in kept}


@pytest.mark.slow
class TestInterruption:
    def test_killed_in_the_middle(self, gate):
        """While it runs, others see it running; killed, it goes on where it was, and ends as if nothing had been."""
        process = start(gate, "--out", "out", "--jobs", "1")
        try:
            wait_for("waiting-*", 1, process)
            assert states(gate, "--out", "out") == ["finished", "running", "waiting"]
            listed = ratp("study", "status", gate, "--out", "out")
            assert re.search(r"gate.py +1 +1$", listed.out, flags=re.M)
            assert "running" in listed.out
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with the process that makes the run
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert states(gate, "--out", "out") == ["finished", "interrupted", "waiting"]
        (finished,) = folders("out", "*source-only*")
        before = traces(finished)
        Path("go").touch()
        result = ratp("study", "run", gate, "--out", "out", *OPTIONS)
        assert result.code == 0
        assert "2 of 3 runs to execute" in result.err
        assert traces(finished) == before
        assert results("out") == results("undisturbed")
        assert [len(journal_of(run, "run_resumed")) for run in folders("out")].count(1) == 1

    def test_ctrl_c(self, gate):
        """With runs in separate processes, the default: all stop, and the message says how to resume."""
        process = start(gate, "--out", "out", "--jobs", "2")
        try:
            wait_for("waiting-*", 2, process)
            process.send_signal(signal.SIGINT)
            time.sleep(1)
            Path("go").touch()  # they stop after the step they are at
            _, output = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, output
        assert re.search(r"\nInterrupted. The same command .*\n$", output)
        assert "Traceback" not in output
        assert states(gate, "--out", "out") == ["finished", "interrupted", "interrupted"]
        assert ratp("study", "run", gate, "--out", "out", *OPTIONS, "-q").code == 0
        assert results("out") == results("undisturbed")
        assert not Path("out/failures").exists()

    @pytest.mark.faults(18, "a stopped study continues with the same command")
    def test_ctrl_c_during_a_run(self, gate):
        """One run after another; the signal comes to the process that started it."""
        Path("gate.py").write_text(
            GATE.replace("while not", "import signal\n            if not").replace(
                "time.sleep(0.02)", "os.kill(os.getppid(), signal.SIGINT); time.sleep(1)"
            )
        )
        result = ratp("study", "run", gate, "--out", "out", *OPTIONS)
        assert result.code == 130
        assert "Interrupted" in result.err
        assert "same command" in result.err
        assert "Traceback" not in result.err
        assert states(gate, "--out", "out") == ["finished", "interrupted", "waiting"]


def test_progress_when_a_stage_restarts():
    """Its process ended in the second stage, at half of it; a third of the stage had been kept."""
    study = read_study(study_file(Path(), grid('methods = ["source-only"]')), Path("out"), RunRequest(device="cpu"))
    (entry,) = study.entries
    watcher, run = StudyWatcher([entry]), Run(entry.plan, entry.folder, wait=True)
    watcher.see(run, StageStarted(0, "scan", 8, 12, 6))
    assert watcher.done == 0.5
    watcher.see(run, StageFinished(0, "scan", {}, {}, 1.0, None))
    for steps_before, steps_made in ((0, 6), (4, 8)):
        watcher.see(run, StageStarted(1, "photo", 8, 12, steps_before))
        assert watcher.done == pytest.approx(1 + steps_before / 12)
        watcher.see(run, Trained(1, "photo", Tick(None, 0, steps_made, steps_made, dict, {}, False)))
        assert watcher.done == pytest.approx(1 + (steps_before + steps_made) / 12)
    watcher.see(run, StageFinished(1, "photo", {}, {}, 1.0, None))
    assert watcher.done == 2


def test_a_domain_without_labels_has_a_dash():
    """As in the tables."""
    study = read_study(study_file(Path(), grid('methods = ["source-only"]')), Path("out"), RunRequest(device="cpu"))
    (entry,) = study.entries
    order, nan = entry.plan.order, float("nan")
    matrix = Matrix(order, ((90.0, *[nan] * (len(order) - 1)),) * len(order))
    line = StudyWatcher([entry]).ended(entry, RunRecord(Path("nowhere"), {}, {}, matrix, ()))
    assert line.startswith("source-only, seed 2022: TDG –  TDA 90.0  FA 90.0  (")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_run_claimed_by_another_process_is_skipped(is_terminal):
    path = study_file(Path(), grid('methods = ["source-only"]', "seeds = [1, 2]"))
    study = read_study(path, Path("out"), RunRequest(device="cpu"))
    study.claim()

    def taken(runs, **options):
        runs[0].folder.mkdir()
        with exclusive(runs[0].folder):
            return run_all(runs, **options)

    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80, highlight=False, legacy_windows=False)
    follow_study(study, console, quiet=False, at_once=1, on=taken)
    output = [ESCAPE.sub("", line).strip() for line in file.getvalue().splitlines()]
    (line,) = [line for line in output if "seed 1" in line]
    assert line == f"{'– ' if is_terminal else ''}source-only, seed 1: left to process {os.getpid()}"
    assert [study.state(entry) for entry in study.entries] == ["waiting", "finished"]


class TestTerminal:
    @pytest.fixture
    def written(self):
        path = study_file(Path(), WILD, grid('methods = ["source-only"]', "seeds = [1, 2]"))
        study = read_study(path, Path("out"), RunRequest(device="cpu"))
        study.claim()
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=80, highlight=False, legacy_windows=False)
        follow_study(study, console, quiet=False, at_once=1)
        return file.getvalue()

    def test_one_mark_per_run(self, written):
        lines = [ESCAPE.sub("", line).strip() for line in written.splitlines()]
        (failed,) = [line for line in lines if "✗" in line]
        assert failed.endswith("usually helps.")
        assert len([line for line in lines if re.match(r"✓ source-only, seed \d: TDG", line)]) == 2
        assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1


def assert_error(*words, expected=()):
    """Runs a command that must fail cleanly; returns its lines."""
    before = traces(Path())
    result = ratp("study", *words)
    assert (result.code, result.out) == (2, ""), result
    assert all(line.startswith("error: ") for line in result.err.splitlines()), result.err
    assert "Traceback" not in result.err
    for part in expected:
        assert part in result.err, result.err
    assert traces(Path()) == before
    return result.err.splitlines()


DIGITS = '[[grid]]\nstream = "digits"\nmethods = ["ratp"]\n'


class TestMistakes:
    @pytest.mark.parametrize("command", ["run", "status", "report"])
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", ["error: study.toml: it has no runs"]),
            ("[[grid]\n", ["study.toml is not valid TOML", "line 1"]),
            (DIGITS.replace("ratp", "rapt"), ["unknown method 'rapt'. Did you mean 'ratp'?"]),
            (DIGITS + "set = { pca.wieght = 1 }", ["Did you mean 'pca.weight'?"]),
            (DIGITS + 'seeds = ["1"]', ["seeds must be whole numbers, got '1'"]),
            (DIGITS + f"seeds = [1{'0' * 5000}]", ["not valid TOML"]),
            (DIGITS + '[[grid.variant]]\nname = "[/x]"\nmethod = "[red]"', ["grid 1, [/x]: unknown method '[red]'"]),
        ],
    )
    def test_mistakes_in_the_file(self, command, text, expected):
        Path("study.toml").write_text(text)
        (line,) = assert_error(command, "study.toml", expected=expected)
        assert "study.toml" in line

    def test_all_come_at_once(self):
        Path("study.toml").write_text('titel = "x"\n' + DIGITS.replace("ratp", "rapt") + "seeds = [true, -1]\nset = 5")
        lines = assert_error("run", "study.toml", "--device", "gpu", "--jobs", "many")
        assert lines == ["error: --jobs takes auto or a number of runs, 1 or more, got 'many'; e.g. --jobs 4."]
        lines = assert_error("run", "study.toml", "--device", "gpu", "--precision", "half")
        assert len(lines) == 7
        assert lines[0].startswith("error: unknown device 'gpu'")
        assert lines[1].startswith("error: unknown precision 'half'")

    @pytest.mark.parametrize("command", ["run", "status", "report"])
    def test_missing_file(self, command):
        Path("folder").mkdir()
        Path("latin.toml").write_bytes(b'title = "\xe9"')
        assert_error(command, "nowhere.toml", expected=["nowhere.toml", "No such file"])
        assert_error(command, "folder", expected=["folder", "Is a directory" if command == "run" else "holds no study"])
        assert_error(command, "latin.toml", expected=["latin.toml is not UTF-8 text"])

    def test_a_folder_of_another_study(self, study):
        study_file(Path("made"), FOUR, name="other.toml")
        for command, options in (("run", OPTIONS), ("status", ()), ("report", ())):
            (line,) = assert_error(command, "made/other.toml", *study[1:], *options)
            assert line == "error: made/runs belongs to the study 'tiny', not to 'other'. Choose another with --out."

    def test_a_folder_with_other_files(self):
        study_file(Path(), FOUR)
        Path("photos").mkdir()
        Path("photos/a.jpg").write_text("mine")
        assert_error(
            "run", "tiny.toml", "--out", "photos", *OPTIONS, expected=["photos holds other files (a.jpg)", "--out"]
        )

    @pytest.mark.parametrize("out", ["tiny.toml", "tiny.toml/x", "x" * 300])
    def test_unusable_folder(self, out):
        study_file(Path(), FOUR)
        for command, options in (("run", OPTIONS), ("status", ()), ("report", ())):
            assert_error(
                command, "tiny.toml", "--out", out, *options, expected=[f"cannot use {out} for a study", "--out"]
            )

    def test_folder_that_cannot_be_created(self):
        study_file(Path(), FOUR)
        assert_error("run", "tiny.toml", "--out", "/proc/ratp", *OPTIONS, expected=["/proc/ratp", "--out"])
        assert states("tiny.toml", "--out", "/proc/ratp") == ["waiting"] * 4

    def test_unreadable_folder(self, study, monkeypatch):
        def locked(path):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "iterdir", locked)
        for command in ("status", "report"):
            (line,) = assert_error(command, *study)
            assert line == "error: cannot use made/runs for a study: Permission denied. Choose another with --out."

    @pytest.mark.parametrize("words", [["rnu"], ["run"], ["run", "a", "b"], ["status"], ["run", "a", "--sed", "1"]])
    def test_unknown_command(self, words):
        result = ratp("study", *words)
        assert (result.code, result.out) == (2, "")
        assert "Traceback" not in result.err

    @pytest.mark.parametrize("words", [[], ["run"], ["status"], ["report"]])
    def test_every_command_has_help(self, words):
        result = ratp("study", *words, "--help")
        assert result.code == 0
        assert "Usage: " in result.out
        assert is_plain_text(result.out)


class TestImages:
    """Results belong to the images they were computed from."""

    YARD = (
        '[[grid]]\nstream = "yard"\norders = ["ink>mud"]\nmethods = ["source-only"]\nseeds = [1, 2]\n'
        'set = { network.backbone = "dtn", network.width = 0.25, size = 32, epochs = 1, steps = 1, batch = 8 }\n'
    )

    @pytest.fixture
    def made_study(self):
        for seed, name in enumerate(("ink", "mud")):
            write_files(Path("yard") / name, image_files(count=3, seed=seed))
        words = [study_file(Path(), self.YARD), "--weights", "none"]
        assert ratp("study", "run", *words, *OPTIONS).code == 0
        return words

    @pytest.mark.slow
    def test_runs_on_other_images_are_refused(self, made_study):
        folder = Path("runs/studies/tiny")
        before = traces(folder)
        write_files(Path("yard/mud"), image_files(count=3, seed=7))
        result = ratp("study", "run", *made_study, *OPTIONS)
        assert (result.code, traces(folder)) == (2, before)
        message = " ".join(result.err.split())
        assert "used other images than there are now (2 runs, source-only, yard ink>mud, seed 1 among them" in message
        assert "those of mud). Restore those images, or execute all runs again in another folder with --out." in message
        assert ratp("study", "run", *made_study, *OPTIONS, "--out", "new").code == 0
        assert len(folders("new")) == 2
        write_files(Path("yard/mud"), image_files(count=3, seed=1))
        assert "0 of 2 runs to execute" in ratp("study", "run", *made_study, *OPTIONS).err

    @pytest.mark.slow
    def test_known_results_on_other_images_are_ignored(self, made_study):
        known = [*made_study, "--out", "new", "--known", "runs/studies/tiny"]
        write_files(Path("yard/mud"), image_files(count=3, seed=7))
        with pytest.warns(Note, match=r"2 runs, .*: known results used other images of mud and do not count"):
            result = ratp("study", "run", *known, *OPTIONS)
        assert result.code == 0 and len(folders("new")) == 2

    def test_known_results_count_without_images(self, made_study):
        for file in Path("yard/mud").rglob("*.png"):
            file.unlink()
        result = ratp("study", "run", *made_study, *OPTIONS, "--out", "new", "--known", "runs/studies/tiny")
        assert result.code == 0 and "0 of 2 runs to execute" in result.err


def test_status_reports_unreadable_folder(monkeypatch):
    file = study_file(Path(), FOUR)
    closed = read_study(file).entries[0].folder
    closed.mkdir(parents=True)
    usual = Path.iterdir

    def iterdir(path):
        if path.name == closed.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    message = " ".join(ratp("study", "status", file).err.split())
    assert f"cannot read {closed}: Permission denied. Make it readable, or move it away" in message


def test_grids_sharing_a_label_are_distinguished():
    other = grid('methods = ["shot"]').replace('"steps" = 2', '"steps" = 3')
    file = study_file(Path(), grid('methods = ["shot"]') + other)
    found = json.loads(ratp("study", "status", file, "--json").out)["runs"]
    assert [run["run"].split(", demo")[0] for run in found] == ["shot, grid 1", "shot, grid 2"]
    assert "shot, grid 2" in ratp("study", "status", file).out
