"""The command line as it is meant to be used: results on standard output, everything else on standard error."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from unittest.mock import Mock

import pytest

from helpers import TINY, TINY_OPTIONS, accuracy_of, files_of, journal_of, ratp
from ratp import __version__
from ratp.cli import doctor as doctor_folders
from ratp.cli import lists, method_tables
from ratp.cli.main import main
from ratp.config import as_dict, switches
from ratp.methods import METHODS, Description
from ratp.methods.ratp import RaTPConfig
from ratp.runs import plan
from ratp.runs.record import fingerprint_of, read_run
from ratp.runs.run import Run
from ratp.streams import find_stream

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
SOURCE_ONLY = ["--method", "source-only", "--device", "cpu", *TINY_OPTIONS]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In an empty folder, without a terminal."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two complete runs and one under way, made by the command line."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        assert ratp("run", *SOURCE_ONLY, "--seed", seed, "--out", folder / f"seed-{seed}", "--quiet").code == 0
    shutil.copytree(folder / "seed-1", folder / "under-way")
    for name in ("state.safetensors", "weights.safetensors"):
        (folder / "under-way" / name).unlink()
    matrix = json.loads((folder / "under-way" / "matrix.json").read_text())
    (folder / "under-way" / "matrix.json").write_text(
        json.dumps({"domains": matrix["domains"], "accuracy": matrix["accuracy"][:1]})
    )
    config = json.loads((folder / "under-way" / "config.json").read_text()) | {"seed": 3}
    journal = (folder / "under-way" / "journal.jsonl").read_text()
    (folder / "under-way" / "journal.jsonl").write_text(journal.replace(config["fingerprint"], fingerprint_of(config)))
    config["fingerprint"] = fingerprint_of(config)
    (folder / "under-way" / "config.json").write_text(json.dumps(config))
    return folder


def is_plain_text(text):
    """Whether a file or a pipe can take the text: no colours, no moving about."""
    return not CONTROL.search(text)


class TestRun:
    def test_it_shows_its_stages_and_its_matrix(self):
        result = ratp("run", *SOURCE_ONLY)
        assert result.code == 0
        assert is_plain_text(result.out + result.err)
        (folder,) = os.listdir("runs")
        assert re.fullmatch(r"demo-source-only-2022-[0-9a-f]{8}", folder)
        for stage, domain in enumerate(("scan", "photo", "font", "street"), start=1):
            assert f"source-only stage {stage}/4 {domain}: " in result.err
            assert f"source-only {stage}/4 {domain}" in result.err
            assert f"after {domain}" in result.out
        assert f"Run directory: runs/{folder}" in result.err
        assert "TDG" in result.out

    def test_ratp_itself(self, tmp_path):
        result = ratp(
            "run", "demo", *TINY_OPTIONS, "--out", tmp_path / "run", "--order", "font > scan", "--subset", "--probe"
        )
        assert (result.code, os.listdir()) == (0, [])
        assert read_run(tmp_path / "run").matrix.domains == ("font", "scan")
        assert journal_of(tmp_path / "run", "probe")
        assert "Unfamiliar" in result.out

    def test_json_output_is_one_document(self, tmp_path):
        result = ratp("run", *SOURCE_ONLY, "--json", "--out", tmp_path / "run")
        assert (result.code, result.err) == (0, "")
        data = json.loads(result.out)
        assert data["matrix"]["accuracy"] == accuracy_of(tmp_path / "run")
        assert data == read_run(tmp_path / "run").to_json()

    def test_quiet_is_silent(self, tmp_path):
        result = ratp("run", *SOURCE_ONLY, "--quiet", "--out", tmp_path / "run")
        assert (result.code, result.out, result.err) == (0, "", "")
        assert (tmp_path / "run" / "weights.safetensors").exists()

    def test_each_plan_has_its_own_folder(self):
        for extra in ([], ["--seed", "7"], ["--set", "lr=0.5"], ["--order", "reverse"]):
            assert ratp("run", *SOURCE_ONLY, *extra, "-q").code == 0
        assert len(os.listdir("runs")) == 4

    def test_same_command_finds_its_run(self):
        for _ in range(2):
            assert ratp("run", *SOURCE_ONLY, "-q").code == 0
        assert len(os.listdir("runs")) == 1

    def test_default_run_has_a_short_name(self, monkeypatch):
        monkeypatch.setattr(Run, "events", lambda self: (event for event in ()))
        monkeypatch.setattr(Run, "record", lambda self: print(self.folder) or Mock(rollbacks=()))
        assert ratp("run", "--method", "source-only", "-q").out == "runs/demo-source-only-2022\n"

    def test_complete_run_is_reported_as_complete(self, done):
        result = ratp("run", *SOURCE_ONLY, "--seed", 1, "--out", done / "seed-1")
        assert result.code == 0
        assert "complete already" in result.err
        assert "after street" in result.out

    def test_a_method_from_a_file(self):
        with open("mine.py", "w") as file:
            file.write("from ratp.methods.source_only import SourceOnly\nclass Mine(SourceOnly):\n    name = 'mine'\n")
        assert ratp("run", "--method", "mine.py", *TINY_OPTIONS, "--out", "run", "-q").code == 0
        assert read_run("run").method == "mine"

    @pytest.mark.parametrize("name", ["two words", "画像", "a[/b]c", "[bold]x[/bold]", "%s {x}", "-"])
    def test_any_folder_name_works(self, name, done):
        """It is printed literally."""
        shutil.copytree(done / "seed-1", name)
        result = ratp("run", *SOURCE_ONLY, "--seed", 1, f"--out={name}")
        assert result.code == 0
        assert name in result.err

    @pytest.mark.parametrize("length", [20, 30, 45, 70, 120])
    def test_the_suggested_command_can_be_copied(self, length, done, monkeypatch):
        """However long the name, nothing breaks the command in two."""
        monkeypatch.setenv("COLUMNS", "80")
        name = f"{'x' * (length // 2)}/{'y' * (length // 2)}"
        shutil.copytree(done / "seed-1", name)
        assert f"ratp report {name}" in ratp("run", *SOURCE_ONLY, "--seed", 1, "--out", name).err


class TestDemo:
    def test_it_compares_two_methods(self, monkeypatch):
        """With the sizes of a test in place of the demo's."""
        real = plan.resolve
        monkeypatch.setattr(plan, "resolve", lambda request: real(replace(request, changes=TINY)))
        result = ratp("demo", "--out", "out", "--seed", "1", "--device", "cpu")
        assert result.code == 0
        assert sorted(os.listdir("out")) == ["ratp-1", "report", "source-only-1"]
        assert "Comparison" in result.out
        assert "out/report/index.html" in result.err
        assert re.search(r"In short.*\n  source-only +\d+ % before.*\n  ratp +\d+ % before", result.err)
        assert is_plain_text(result.out + result.err)
        again = ratp("demo", "--out", "out", "--seed", "1", "--device", "cpu", "--json")
        assert [r["config"]["method"] for r in json.loads(again.out)["runs"]] == ["source-only", "ratp"]
        assert again.err == ""

    def test_all_bad_seeds_are_reported_before_running(self):
        result = ratp("demo", "--seed", "one", "--seed", "1", "--seed", "two")
        assert result.code == 2
        assert "'one'" in result.err
        assert "'two'" in result.err
        assert os.listdir() == []


class TestReport:
    @pytest.fixture(scope="class")
    @staticmethod
    def reported(done, tmp_path_factory):
        out = tmp_path_factory.mktemp("report")
        runs = [done / "seed-1", done / "seed-2", done / "under-way"]
        return out, ratp("report", *runs, "--out", out / "report", "--export", out / "results")

    def test_several_runs_are_compared(self, reported):
        out, result = reported
        assert result.code == 0
        assert "source-only" in result.out
        assert "2 seeds" in result.out
        assert "Unfinished" in result.out
        assert {"index.html", "report.md", "metrics.csv", "report.tex"} <= set(os.listdir(out / "report"))
        assert f"{out / 'report' / 'index.html'}" in result.err.replace("\n", "")
        assert is_plain_text(result.out + result.err)

    def test_damaged_run_does_not_hide_the_others(self, done, tmp_path):
        folder = shutil.copytree(done, tmp_path / "runs")
        (folder / "seed-2" / "matrix.json").write_text("{")
        result = ratp("report", folder)
        assert result.code == 0 and "after street" in result.out
        assert f"note: left out: {folder / 'seed-2' / 'matrix.json'} is damaged" in result.err.replace("\n", " ")
        assert ratp("report", folder / "seed-2").code == 2  # one that is named is meant

    def test_results_are_exported_and_can_be_reported(self, reported):
        out, _ = reported
        exported = sorted(os.listdir(out / "results"))
        assert len(exported) == 3
        assert all(name.startswith("demo-source-only-") for name in exported)
        again = ratp("report", *(out / "results" / name for name in exported), "--quiet", "--out", "again")
        assert (again.code, again.out, again.err) == (0, "", "")
        folder = ratp("report", out / "results", "--json", "--out", "folder")
        assert [run["config"]["seed"] for run in json.loads(folder.out)["runs"]] == [1, 2, 3]

    def test_exporting_one_after_another_overwrites_nothing_but_the_same_run(self, done, tmp_path):
        """Another order, another switch: each has its own file, and the same run twice has one."""
        kept = read_run(done / "seed-1")
        reverse = replace(kept.matrix, domains=kept.matrix.domains[::-1])
        others = [
            replace(kept, config=kept.config | {"order": list(reverse.domains)}, matrix=reverse),
            replace(kept, config=kept.config | {"recipe": {**kept.config["recipe"], "lr": 0.5}}),
            replace(kept, config=kept.config | {"classes": ["other", "images"]}),
        ]
        for record in [kept, *others, kept]:
            record.config["fingerprint"] = fingerprint_of(record.config)
            record.export(tmp_path / "one.json")
            assert ratp("report", tmp_path / "one.json", "--export", "results", "--out", "report", "-q").code == 0
        assert len(os.listdir("results")) == 4

    def test_two_runs_of_one_plan_do_not_overwrite_each_other(self, done, tmp_path):
        """Say, from two machines: both are exported, or the export is refused."""
        shutil.copytree(done / "seed-1", tmp_path / "copy")
        result = ratp("report", done / "seed-1", tmp_path / "copy", "--export", "results", "--out", "report", "-q")
        assert result.code == 2 or len(os.listdir("results")) == 2

    def test_folder_of_runs_reports_all_of_them(self, done):
        result = ratp("report", done, "--json", "--out", "report")
        data = json.loads(result.out)
        assert (result.code, result.err) == (0, "")
        assert [run["config"]["seed"] for run in data["runs"]] == [1, 2, 3]
        assert data["report"] == "report/index.html"

    def test_report_goes_into_first_folder(self, done, tmp_path):
        shutil.copytree(done / "seed-1", tmp_path / "run")
        before = files_of(tmp_path / "run")
        assert ratp("report", tmp_path / "run", "-q").code == 0
        after = files_of(tmp_path / "run")
        assert {name: after[name] for name in before} == before
        assert "report/index.html" in after
        # and the run goes on as if it were not there
        assert ratp("run", *SOURCE_ONLY, "--seed", 1, "--out", tmp_path / "run", "-q").code == 0


class TestLists:
    def test_methods(self):
        result = ratp("methods")
        assert result.code == 0
        assert all(name in result.out for name in METHODS)
        assert "ratp methods show NAME" in result.err
        assert {m["name"] for m in json.loads(ratp("methods", "--json").out)["methods"]} == set(METHODS)

    @pytest.mark.parametrize("preset", ["official", "paper"])
    def test_a_method_and_its_switches(self, preset):
        result = ratp("methods", "show", "ratp", "--preset", preset)
        assert result.code == 0
        assert is_plain_text(result.out + result.err)
        for name in as_dict(RaTPConfig()):
            assert name in result.out
        assert METHODS["ratp"].paper.split(",")[0] in result.out
        values = json.loads(ratp("methods", "show", "ratp", "--preset", preset, "--json").out)["switches"]
        assert values["pca.similarity"] == {"official": "cosine", "paper": "dot"}[preset]

    def test_streams(self):
        result = ratp("streams")
        assert result.code == 0
        assert "scan>photo>font>street" in result.out
        demo, *_ = json.loads(ratp("streams", "--json").out)["streams"]
        assert demo["orders"]["reverse"] == ["street", "font", "photo", "scan"]

    def test_a_stream_and_its_sheet(self):
        result = ratp("streams", "show", "demo", "--out", "sheet.png")
        assert result.code == 0
        assert "1797" in result.out
        assert "Contact sheet: sheet.png" in result.out
        with open("sheet.png", "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
        data = json.loads(ratp("streams", "show", "demo", "--out", "sheet.png", "--json").out)
        assert [d["images"] for d in data["domains"]] == [1797, 2400, 2400, 2400]

    def test_every_stream_setting_is_listed(self):
        """Epochs, steps and rate are set like switches: somewhere they must be listed with their values."""
        output = ratp("streams", "show", "demo", "--out", "sheet.png").out + ratp("methods", "show", "ratp").out
        for name in ("epochs", "steps", "lr", "batch", "network.width"):
            assert re.search(rf"(?m)^\s*{name}\s", output), name

    def test_stream_values_are_listed_without_images(self):
        result = ratp("streams", "show", "pacs", "--data", "nowhere")
        assert result.code == 2
        assert re.search(r"(?m)^network.backbone +resnet50 ", result.out)
        assert "not in nowhere" in result.err

    def test_method_values_can_be_shown_for_a_stream(self):
        small, large = (ratp("methods", "show", "tent", *more).out for more in ([], ["--stream", "pacs"]))
        assert re.search(r"(?m)^step.optimiser +adam ", small)
        assert "--stream pacs shows those for large networks" in " ".join(small.split())
        assert re.search(r"(?m)^step.optimiser +sgd ", large)
        assert "official, on pacs" in large
        assert json.loads(ratp("methods", "show", "tent", "--stream", "pacs", "--json").out)["stream"] == "pacs"
        assert "unknown stream 'pacz'" in ratp("methods", "show", "tent", "--stream", "pacz").err

    def test_switch_names_are_not_cut_in_narrow_terminal(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        shown = ratp("methods", "show", "adacon").out
        assert all(f"\nstrong.transform.crop_{name} " in shown for name in ("scale_min", "scale_max", "ratio_max"))

    def test_no_text_is_lost_in_narrow_terminal(self, monkeypatch):
        """The values are listed even if the images are missing."""
        monkeypatch.setenv("COLUMNS", "80")
        output = ratp("streams", "show", "pacs").out
        for item in switches(find_stream("pacs").recipe):
            assert all(word in output for word in item.explanation.split()), item.name

    def test_nothing_in_a_list_is_markup(self, monkeypatch):
        method = type(
            "Odd", (METHODS["source-only"],), {"name": "[/odd]", "title": "[/t]", "family": "[/f]", "paper": "[/p]"}
        )
        monkeypatch.setattr(method_tables, "METHODS", ("[/odd]",))
        monkeypatch.setattr(method_tables, "describe", lambda name: Description(name, "[/t]", "[/f]", "[/p]"))
        assert "[/f]" in ratp("methods").out
        for module in (lists, plan):
            monkeypatch.setattr(module, "find_method", lambda name: method)
        assert "[/f]" in ratp("methods", "show", "odd").out


class TestHelp:
    def test_the_version(self):
        assert ratp("--version") == ratp("--version")
        assert (ratp("--version").code, ratp("--version").out) == (0, f"ratp {__version__}\n")

    def test_no_arguments_print_help(self):
        result = ratp()
        assert result.code == 0
        for command in ("demo", "run", "report", "methods", "streams", "doctor"):
            assert command in result.out
        assert is_plain_text(result.out + result.err)

    @pytest.mark.parametrize(
        "words", [["run"], ["demo"], ["report"], ["methods"], ["methods", "show"], ["streams"], ["doctor"]]
    )
    def test_every_command_has_help(self, words):
        result = ratp(*words, "--help")
        assert result.code == 0
        assert "Usage: " in result.out
        assert is_plain_text(result.out)

    def test_option_names_are_not_cut_in_narrow_terminal(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        output = ratp("run", "--help").out
        assert "--no-reuse-source" in output
        assert "cuda:0,cuda:2, …" in output
        assert output.count("…") == 1


class TestInterruption:
    def test_ctrl_c_says_how_to_continue(self, monkeypatch):
        def interrupted(self):
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(Run, "events", interrupted)
        result = ratp("run", *SOURCE_ONLY)
        assert result.code == 130
        assert "Interrupted" in result.err
        assert "same command" in result.err
        assert "Traceback" not in result.err


def _stopped(*_):
    raise KeyboardInterrupt


def _stopped_in_a_class(words):
    type("Loaded", (), {"part": type("Part", (), {"__set_name__": _stopped})()})


@pytest.mark.parametrize("stopped", [_stopped, _stopped_in_a_class])
def test_ctrl_c_before_command_starts(stopped, monkeypatch):
    """While modules are still being loaded, say."""
    monkeypatch.setattr(sys.modules[main.__module__], "spread_targets", stopped)
    ended = ratp("run")
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_runs_as_module():
    command = [sys.executable, "-m", "ratp", "run", "dmo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown stream 'dmo'. Did you mean 'demo'? Valid: demo, ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["methods", "show", "ratp"], ["streams"], ["doctor"], ["methods", "--json"]])
def test_ascii_pipe_gets_replacements(words, monkeypatch):
    """An encoding without × or ✓ gets something else in their place."""
    taken = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["ratp", *words])
    monkeypatch.setattr(doctor_folders, "LEAST_FREE_DISK", 0)
    with redirect_stdout(taken), pytest.raises(SystemExit) as end:
        main()
    taken.flush()
    assert (end.value.code or 0) == 0
    assert taken.buffer.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"]])
@pytest.mark.faults(4, "if the output cannot be written, a one-line error says so")
def test_full_disk_on_stdout(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ratp", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write to standard output: No space left on device.")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
