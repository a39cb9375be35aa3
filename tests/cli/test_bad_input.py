"""What a careless user gives: one clear message, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from helpers import TINY_OPTIONS, files_of, journal_of, ratp, unreadable
from ratp._core.files import read_tensors, write_tensors
from ratp.reports.page import PictureWarning
from ratp.runs.run import JournalWarning

EXAMPLE = "'scan>photo>font>street'"
TINY_RUN = ["run", "--method", "source-only", "--device", "cpu", *TINY_OPTIONS]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A complete run."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    assert ratp(*TINY_RUN, "--out", folder, "--quiet").code == 0
    return folder


@pytest.fixture
def run(complete):
    """A copy of a complete run, in the current folder, to be damaged."""
    shutil.copytree(complete, "run")
    return Path("run")


def assert_error(*arguments, expected=()):
    """Runs a command that must fail cleanly; returns the message."""
    before = files_of_here()
    result = ratp(*arguments)
    assert result.code == 2, result
    assert result.out == ""
    plan, _, errors = result.err.partition("error: ")  # the plan is printed before a damaged run fails to go on
    assert errors and (not plan or plan.startswith("domains "))
    assert "Traceback" not in result.err
    assert all(line.startswith("error: ") for line in f"error: {errors}".splitlines()), result.err
    for words in expected:
        assert words in result.err, result.err
    assert files_of_here() == before
    return result.err


def files_of_here():
    return files_of(Path()) | {f"{folder}/": b"" for folder, _, _ in os.walk(".")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--method", "rapt"], ["'rapt'", "'ratp'", "Valid: ", ", source-only", ".py file"]),
        (["--method", "mine.py"], ["'mine.py' does not exist"]),
        (["--method", ""], ["unknown method ''", "Valid: ", ", source-only"]),
        (["dmo"], ["unknown stream 'dmo'", "'demo'", "Valid: demo"]),
        (["./demo"], ["unknown stream './demo'", "Valid: demo"]),
        (["--order", "scn>photo>font>street"], ["unknown domain 'scn'", "'scan'", "Valid: font, photo, scan, street"]),
        (["--order", "revers"], ["unknown order 'revers'", "'reverse'", "Valid: default, reverse", EXAMPLE]),
        (["--order", "scan"], ["unknown order 'scan'", EXAMPLE]),
        (["--order", ""], ["unknown order ''", EXAMPLE]),
        (["--order", "scan>scan>photo>font>street"], ["repeats domain 'scan'", "once"]),
        (["--order", "scan>photo"], ["leaves out font, street", EXAMPLE, "--subset"]),
        (["--order", "scan>photo>", "--subset"], ["empty place", EXAMPLE]),
        (["--preset", "papr"], ["preset of ratp 'papr'", "'paper'", "Valid: official, paper"]),
        (["--set", "pca.scal=3"], ["unknown switch 'pca.scal'", "'pca.scale'", "Valid: "]),
        (["--set", "pca.scale=big"], ["pca.scale must be a number", "'big'"]),
        (["--set", "pca.scale=-1"], ["pca.scale must be above 0", "-1"]),
        (["--set", "pca.form=exact"], ["pca.form", "'exact'", "published, stable"]),
        (["--set", "epochs=2.5"], ["epochs must be a whole number", "'2.5'"]),
        (["--set", "batch=1"], ["batch must be at least 2", "1"]),
        (["--set", "mean=0.5"], ["mean must be", "'0.5'"]),
        (["--set", "randmix.kernel_sizes=40"], ["kernel of 40", "32×32", "smaller kernels"]),
        (["--set", "epochs"], ["NAME=VALUE", "'epochs'", "--set pca.scale=8"]),
        (["--set", "=3"], ["NAME=VALUE", "'=3'"]),
        (["--set", "epochs=1", "--set", "epochs=2"], ["'epochs' twice"]),
        (["--seed", "lucky"], ["seed must be a whole number", "'lucky'", "2022"]),
        (["--seed", "1.5"], ["seed must be a whole number", "'1.5'"]),
        (["--seed=-1"], ["seed must be in", "'-1'"]),
        (["--device", "gpu"], ["unknown device 'gpu'", "Valid: auto, cpu, cuda"]),
    ],
)
def test_invalid_request(options, expected):
    assert_error("run", *options, expected=expected)


@pytest.mark.faults(19, "ratp reports all mistakes at once and suggests what you meant")
def test_all_mistakes_come_at_once():
    changes = ["--set", "batch=1", "--set", "r_con=hi", "--set", "nonsense"]
    message = assert_error("run", "--order", "foo", "--seed", "x", "--device", "gpu", "--save-every", "-1", *changes)
    assert len(message.splitlines()) == 7
    message = assert_error("run", "--weights", "nope.safetensors", "--set", "epochs=0", "--seed", "x")
    assert [word in message for word in ("weights file 'nope.safetensors'", "epochs", "seed")] == [True] * 3


OWN = """
from ratp.methods.source_only import SourceOnly


class Mine(SourceOnly):
    name = "mine"

    def source_phases(self, domain):
        try:
            return {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
"""


@pytest.mark.parametrize("seeds", [["1"], ["1", "2"]])
def test_error_in_own_method_shows_its_traceback(seeds):
    """The error shows lines of the user's file, not ours; each of several runs reports its own."""
    Path("mine.py").write_text(OWN)
    words = [word for seed in seeds for word in ("--seed", seed)]
    result = ratp(
        "run", "--method", "mine.py", "--device", "cpu", *TINY_OPTIONS, *words, "--out", "runs", "--jobs", "1"
    )
    assert (result.code, result.out) == (1 if len(seeds) == 1 else 2, "")
    assert result.err.count("error in the file of its method") == len(seeds)
    for expected in ('mine.py", line 10', "KeyError: 'first'", 'mine.py", line 12', "ValueError: second"):
        assert result.err.count(expected) == len(seeds)
    assert not {line for line in result.err.splitlines() if "File " in line and "mine.py" not in line}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["methods", "show", "rapt"], ["unknown method 'rapt'", "'ratp'"]),
        (["methods", "show", "ratp", "--preset", "papr"], ["'papr'", "'paper'"]),
        (["streams", "show", "dmo"], ["unknown stream 'dmo'", "'demo'"]),
        (
            ["streams", "show", "demo", "--out", "no/such/folder/sheet.png"],
            ["no/such/folder/sheet.png", "No such file"],
        ),
        (["streams", "show", "demo", "--out", "."], ["cannot write"]),
        (["demo", "--seed", "x"], ["seed must be a whole number", "'x'"]),
        (["demo", "--device", "gpu"], ["unknown device 'gpu'"]),
    ],
)
def test_lists_and_demo(words, expected):
    assert_error(*words, expected=expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rnu"], "'rnu'"),
        (["run", "--sed", "1"], "--sed"),
        (["run", "--seed"], "--seed"),
        (["run", "demo", "ratp"], "ratp"),
        (["report"], "runs"),
        (["methods", "shwo"], "'shwo'"),
    ],
)
def test_unknown_command(words, expected):
    result = ratp(*words)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert "Traceback" not in result.err
    assert os.listdir() == []


class TestOutput:
    @pytest.mark.parametrize("out", ["file/x", "file", "/proc/ratp", "file/x/y/z"])
    @pytest.mark.faults(3, "if the output folder is not writable, the command stops before training")
    def test_unusable_output_folder(self, out):
        with open("file", "w") as file:
            file.write("mine")
        assert_error(*TINY_RUN, "--out", out, expected=[out, "--out"])

    @pytest.mark.parametrize("out", ["file/x", "/proc/ratp"])
    def test_unusable_demo_output_folder(self, out):
        with open("file", "w") as file:
            file.write("mine")
        assert_error("demo", "--out", out, expected=[out, "--out"])

    def test_a_folder_with_other_files(self):
        os.mkdir("photos")
        for name in ("a.jpg", "b.jpg"):
            with open(f"photos/{name}", "w") as file:
                file.write("mine")
        assert_error(*TINY_RUN, "--out", "photos", expected=["photos", "a.jpg, b.jpg", "no run", "--out"])

    def test_a_folder_with_another_run(self, run):
        message = assert_error(
            *TINY_RUN, "--out", run, "--seed", "3", "--set", "lr=0.5", expected=["another run", "--out"]
        )
        assert "seed: 2022 there, 3 requested; lr: 0.05 there, 0.5 requested" in message

    def test_a_folder_with_a_run_of_another_method(self, run):
        assert_error(
            "run", *TINY_OPTIONS, "--out", run, expected=["method: source-only there, ratp requested", "--out"]
        )

    def test_unrelated_project_folder(self):
        os.mkdir("project")
        with open("project/config.json", "w") as file:
            json.dump({"compilerOptions": {"strict": True}}, file)
        message = assert_error(*TINY_RUN, "--out", "project", expected=["project", "--out"])
        assert "None" not in message

    def test_name_too_long(self):
        assert_error(*TINY_RUN, "--out", "x" * 300, expected=["File name too long", "--out"])


def cut(path, share=0.5):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


class TestDamagedRun:
    """``ratp run`` on a run directory that something has been at."""

    @pytest.mark.parametrize("name", ["state.safetensors", "config.json"])
    @pytest.mark.parametrize("share", [0.0, 0.6])
    def test_truncated_required_file_is_named(self, run, name, share):
        """The file is named, and what to do about it."""
        cut(run / name, share)
        message = assert_error(*TINY_RUN, "--out", run, expected=[name, "damaged"])
        assert "--out" in message or "Remove" in message

    def test_unreadable_config(self, run, monkeypatch):
        """It may be whole."""
        unreadable(monkeypatch, "config.json")
        message = assert_error(
            *TINY_RUN, "--out", run, expected=["config.json: Permission denied. Make it readable, or choose"]
        )
        assert "Remove" not in message

    @pytest.mark.parametrize("name", ["matrix.json", "environment.json", "weights.safetensors"])
    def test_missing_optional_files_are_tolerated(self, run, name, complete):
        (run / name).unlink()
        assert ratp(*TINY_RUN, "--out", run, "-q").code == 0
        if name != "environment.json":
            assert files_of(run).keys() == files_of(complete).keys()

    def test_truncated_matrix_is_rebuilt(self, run, complete):
        cut(run / "matrix.json")
        assert ratp(*TINY_RUN, "--out", run, "-q").code == 0
        assert (run / "matrix.json").read_bytes() == (complete / "matrix.json").read_bytes()

    def test_truncated_journal_is_completed(self, run, complete):
        cut(run / "journal.jsonl", 0.9)
        assert ratp(*TINY_RUN, "--out", run, "-q").code == 0
        assert journal_of(run, "stage_finished") == journal_of(complete, "stage_finished")

    @pytest.mark.parametrize(
        "content", ["broken\n{}\n", '{"a": 1}\n{"b": 2}\n', '{"event": "epoch", "stage": "two"}\n']
    )
    def test_foreign_journal_is_restarted(self, run, complete, content):
        (run / "journal.jsonl").write_text(content)
        with pytest.warns(JournalWarning, match=r"journal\.jsonl:1 is damaged"):
            assert ratp(*TINY_RUN, "--out", run, "-q").code == 0
        assert journal_of(run, "stage_finished") == journal_of(complete, "stage_finished")

    def test_journal_of_half_a_line_is_completed(self, run, complete):
        (run / "journal.jsonl").write_text("\0")
        assert ratp(*TINY_RUN, "--out", run, "-q").code == 0
        assert journal_of(run, "stage_finished") == journal_of(complete, "stage_finished")

    def test_missing_journal_is_restarted(self, run, complete):
        (run / "journal.jsonl").unlink()
        with pytest.warns(JournalWarning, match=r"journal\.jsonl is missing"):
            assert ratp(*TINY_RUN, "--out", run, "-q").code == 0
        assert journal_of(run, "stage_finished") == journal_of(complete, "stage_finished")

    def test_complete_run_without_state_is_kept(self, run):
        """Deleted to save room, say: its results stay, whether the command is refused or has nothing to do."""
        (run / "state.safetensors").unlink()
        before = files_of(run)
        assert ratp(*TINY_RUN, "--out", run, "-q").code in (0, 2)
        assert {name: files_of(run)[name] for name in before} == before

    def test_foreign_state(self, run):
        from safetensors.torch import save_file
        from torch import zeros

        save_file({"x": zeros(2)}, run / "state.safetensors")
        assert_error(
            *TINY_RUN, "--out", run, expected=["state.safetensors", "does not fit this run", "Remove the folder"]
        )

    @pytest.mark.parametrize("metadata", ["matrix", "stage_events"])
    @pytest.mark.parametrize("value", [{}, "[", 5])
    def test_state_with_invalid_metadata(self, run, metadata, value):
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(run / "state.safetensors", framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert metadata in about
        save_file(tensors, run / "state.safetensors", {"about": json.dumps({**about, metadata: value})})
        result = ratp(*TINY_RUN, "--out", run, "-q")
        assert result.code == 0 or (result.code == 2 and "state.safetensors" in result.err)

    @pytest.mark.faults(6, "ratp refuses a state with tensors of the wrong shape and names its file")
    def test_state_of_another_shape_is_refused(self, run):
        """Hand-edited: everything says it belongs, but the tensors do not fit."""
        tensors, about = read_tensors(run / "state.safetensors")
        tensors["network.classifier.weight"] = torch.zeros(3, 3)
        write_tensors(run / "state.safetensors", tensors, about)
        result = ratp(*TINY_RUN, "--out", run)
        assert (result.code, result.out) == (2, "")
        assert "state.safetensors does not fit this run" in result.err
        assert "[3, 3]" in result.err


class TestReport:
    @pytest.mark.parametrize("path", ["nowhere", "runs/demo"])
    def test_missing_path(self, path):
        assert_error("report", path, expected=[path, "does not exist", "ratp run"])

    def test_an_empty_folder(self):
        os.mkdir("empty")
        assert_error("report", "empty", expected=["empty", "no run"])

    @pytest.mark.parametrize("content", [b"just text\n", b"\x89PNG\r\n\x1a\n\0", b'{"name": "x"}'])
    def test_file_that_is_not_a_result(self, content):
        """The message always says what can be reported."""
        with open("notes.txt", "wb") as file:
            file.write(content)
        assert_error("report", "notes.txt", expected=["notes.txt", "run directory"])

    @pytest.mark.parametrize("name", ["config.json", "environment.json", "matrix.json"])
    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_truncated_run_file_is_named(self, run, name, share):
        cut(run / name, share)
        assert_error("report", run, expected=[f"run/{name}", "damaged"])

    @pytest.mark.parametrize("name", ["environment.json", "matrix.json", "journal.jsonl"])
    def test_missing_run_file_is_named(self, run, name):
        (run / name).unlink()
        assert_error("report", run, expected=[f"run/{name}"])

    def test_a_journal_damaged_in_the_middle(self, run):
        lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
        (run / "journal.jsonl").write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
        assert_error("report", run, expected=["journal.jsonl:2", "damaged"])

    @pytest.mark.parametrize("seconds", ["soon", None])
    def test_journal_with_invalid_events(self, run, seconds):
        lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        for line in lines:
            if line["event"] == "stage_finished":
                line["seconds"] = seconds
        (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = ratp("report", run, "-q")
        assert result.code == 0 or (result.code == 2 and "journal" in result.err)

    def test_truncated_samples_only_drop_the_picture(self, run):
        (run / "samples.safetensors").write_bytes(b"\0" * 20)
        with pytest.warns(PictureWarning, match="a picture is left out: run/samples.safetensors is damaged"):
            assert ratp("report", run, "-q").code == 0

    def test_another_schema(self, run):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "schema": 99}))
        assert_error("report", run, expected=["schema 99"])

    def test_one_bad_run_among_good_ones(self, complete):
        assert_error(
            "report", complete, "nowhere", "--out", "report", "--export", "results", expected=["nowhere does not exist"]
        )

    def test_unwritable_report_folder(self, complete):
        with open("file", "w") as file:
            file.write("mine")
        assert_error("report", complete, "--out", "file/report", expected=["file/report", "Not a directory"])
        assert_error("report", complete, "--out", "file", expected=["file"])
        assert_error(
            "report",
            complete,
            "--export",
            "file/results",
            "--out",
            "report",
            expected=["file/results", "Not a directory"],
        )
