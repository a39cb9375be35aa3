"""``ratp verify``: every stored byte is read; what it says is wrong can be mended as it says."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from helpers import TINY, TINY_OPTIONS, ratp
from own_images import assert_error, assert_ok, image_files, write_files
from ratp import Run, RunRequest, resolve
from ratp._core.locks import exclusive
from ratp.runs.events import Trained
from ratp.runs.record import hash_of_content

MENDED_BY_REPEATING = ("environment.json", "matrix.json", "journal.jsonl", "weights.safetensors", "predictions-new.csv")
FILES = ("config.json", "state.safetensors", "samples.safetensors", "features-0.safetensors", *MENDED_BY_REPEATING)


def flip(path, share):
    """Flips one bit at a share of a file's length."""
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with images and, in ``run``, a finished run on them, and the words that repeat it."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate(("day", "rain")):
        write_files(folder / name, image_files(count=8, seed=seed))
    write_files(folder / "new", image_files(count=8, seed=5, flat=True))
    domains = ("--source", folder / "day", "--targets", folder / "rain", folder / "new")
    backbone = ("--set", "network.backbone=dtn")
    words = ("run", "folders", *domains, *TINY_OPTIONS, *backbone, "--guard", "off", "--features", "--quiet")
    assert_ok(ratp(*words, "--out", folder / "run"))
    return folder / "run", words


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained[0], "run"))


def verified(*places):
    outcome = ratp("verify", *places, "--json")
    assert outcome.code in (0, 1)
    answer = json.loads(outcome.out)
    assert answer["intact"] == (outcome.code == 0)
    return [damage for check in answer["checked"] for damage in check["damaged"]]


def test_a_finished_run_is_intact(run):
    assert set(FILES) < {path.name for path in run.iterdir()}
    outcome = ratp("verify", run)
    assert (outcome.code, outcome.err) == (0, "")
    assert "none damaged" in outcome.out


@pytest.mark.faults(2, "`ratp verify` names the damaged file and says what to do, and its exit code is 1")
@pytest.mark.parametrize("name", [*FILES, "checksums.json"])
def test_every_flipped_bit_is_found(run, name):
    whole = (run / name).read_bytes()
    for share in (0, 0.1, 0.5, 0.9, 1):
        flip(run / name, share)
        assert [Path(damage["file"]).name for damage in verified(run)] == [name], share
        (run / name).write_bytes(whole)
    assert not verified(run)


@pytest.mark.parametrize("name", FILES)
def test_every_missing_file_is_found(run, name):
    (run / name).unlink()
    assert [Path(damage["file"]).name for damage in verified(run)] == [name]


@pytest.mark.faults(2, "deleting the damaged file and repeating the command mends the run")
@pytest.mark.parametrize("name", MENDED_BY_REPEATING)
@pytest.mark.filterwarnings("ignore:run/journal.jsonl is missing")
def test_the_advice_helps(run, trained, name):
    flip(run / name, 0.5)
    (damage,) = verified(run)
    assert damage["advice"].startswith("Delete it and repeat the run's command")
    (run / name).unlink()
    assert_ok(ratp(*trained[1], "--out", run))
    assert not verified(run)


def test_repeating_the_command_does_not_hide_damage(run, trained):
    flip(run / "environment.json", 0.5)
    assert_ok(ratp(*trained[1], "--out", run))
    assert [Path(damage["file"]).name for damage in verified(run)] == ["environment.json"]


def test_files_of_another_run_are_found(run, trained, tmp_path):
    words = (*trained[1], "--seed", "3", "--out", "other")
    assert_ok(ratp(*words))
    (run / "checksums.json").unlink()  # as in a run that has not ended
    for name in ("matrix.json", "state.safetensors", "weights.safetensors"):
        whole = (run / name).read_bytes()
        shutil.copy(Path("other") / name, run / name)
        assert any("another run" in damage["problem"] for damage in verified(run)), name
        (run / name).write_bytes(whole)
    assert not verified(run)


def test_a_matrix_that_was_edited_is_found_without_checksums(run):
    (run / "checksums.json").unlink()
    matrix = json.loads((run / "matrix.json").read_text())
    matrix["accuracy"][0][0] = 12.5
    del matrix["metrics"]
    (run / "matrix.json").write_text(json.dumps(matrix))
    (damage,) = verified(run)
    assert "accuracies" in damage["problem"]


def test_checkpoints_of_an_unfinished_run_are_read(tmp_path):
    plan = resolve(RunRequest(stream="demo", method="source-only", changes=TINY))
    with closing(Run(plan, tmp_path / "within", save_every=1e-6).events()) as events:
        for event in events:
            if isinstance(event, Trained) and event.tick.epoch == 1:
                break
    assert not verified(tmp_path / "within")
    flip(tmp_path / "within" / "checkpoint.safetensors", 0.9)
    assert [Path(damage["file"]).name for damage in verified(tmp_path / "within")] == ["checkpoint.safetensors"]


@pytest.mark.parametrize("form", ["versioned", "unversioned"])
def test_runs_of_earlier_versions_are_intact(form):
    folder = Path(__file__).parents[1] / "fixtures" / "runs" / form
    assert not verified(folder)


def test_a_run_that_is_being_written_is_left_alone(run):
    flip(run / "matrix.json", 0.5)
    with exclusive(run):
        outcome = ratp("verify", run)
    assert outcome.code == 0
    assert "being written" in outcome.out


def test_a_damaged_state_is_given_up_only_if_there_is_one_before(run):
    whole = (run / "state.safetensors").read_bytes()
    flip(run / "state.safetensors", 0.5)
    (damage,) = verified(run)
    assert damage["advice"].startswith("Restore it from a copy")
    (run / "state-before.safetensors").write_bytes(whole)
    (damage,) = verified(run)
    assert damage["advice"].startswith("Delete it and repeat")


def test_what_cannot_be_read_is_named(run):
    for make in (os.mkfifo, os.mkdir):
        (run / "weights.safetensors").unlink(missing_ok=True)
        make(run / "weights.safetensors")
        assert [Path(damage["file"]).name for damage in verified(run)] == ["weights.safetensors"]


def test_checksums_lead_nowhere_else(run):
    about = json.loads((run / "checksums.json").read_text())
    about["files"]["../secret"] = "0"
    (run / "checksums.json").write_text(json.dumps(about | {"sha256": hash_of_content(about)}))
    assert [Path(damage["file"]).name for damage in verified(run)] == ["checksums.json"]


def test_leftovers_and_foreign_files_are_named(run):
    (run / ".matrix.json.part-1").write_text("{")
    (run / "notes.txt").write_text("mine")
    outcome = ratp("verify", run)
    assert outcome.code == 0
    assert ".matrix.json.part-1 was left by a killed run" in outcome.out
    assert "notes.txt was not checked" in outcome.out


def test_results_have_a_hash(run):
    assert_ok(ratp("report", run, "--export", "results", "--quiet"))
    (result,) = Path("results").iterdir()
    assert not verified("results")
    data = json.loads(result.read_text())
    data["journal"][-1]["seconds"] = 1.5
    result.write_text(json.dumps(data))
    (damage,) = verified("results")
    assert "not what was exported" in damage["problem"]
    assert_error(ratp("report", result), "not what was exported", out="none")
    del data["sha256"]
    result.write_text(json.dumps(data))
    assert "only its form was checked" in ratp("verify", result).out


def test_a_cache_is_read(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("RATP_CACHE", str(tmp_path / "cache"))
    assert_ok(ratp(*trained[1], "--out", tmp_path / "run", "--method", "source-only"))
    cache = tmp_path / "cache"
    assert not verified(cache)
    for pattern in ("decoded/*.images", "decoded/*.manifest.json", "source-models/*.safetensors"):
        file = sorted(cache.glob(pattern))[0]
        whole = file.read_bytes()
        flip(file, 0.5)
        assert [damage["file"] for damage in verified(cache)] == [str(file)]
        file.write_bytes(whole)
    assert not verified(cache)


def test_a_folder_of_runs_is_read_run_by_run(run, tmp_path):
    shutil.copytree(run, "other")
    flip(Path("other") / "weights.safetensors", 0.5)
    outcome = ratp("verify", tmp_path)
    assert outcome.code == 1
    assert outcome.out.count("run ") >= 2
    assert "1 damaged" in outcome.out


def test_mistakes_are_refused(run, tmp_path):
    assert_error(ratp("verify", "nowhere"), "nowhere does not exist", out="none")
    os.mkdir("empty")
    assert_error(ratp("verify", "empty"), "empty holds nothing to verify", "cache folder", out="none")
    Path("some.json").write_text("[]")
    assert [Path(damage["file"]).name for damage in verified("some.json")] == ["some.json"]
