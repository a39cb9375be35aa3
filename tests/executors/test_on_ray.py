"""Runs on a Ray cluster equal local runs, whatever happens to its workers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

import ratp.executors.ray as on_ray
import ratp.executors.ray_worker as ray_worker
from helpers import files_of, journal_of, ratp, same_tensors, tensors_of, tiny_plan
from ratp._core.files import write_bytes
from ratp._core.locks import exclusive, is_held
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.executors.layout import SMALL_ON_GPU
from ratp.executors.local import run_all
from ratp.executors.protocol import described, options_of
from ratp.executors.ray import RoomWarning, run_all_on_ray
from ratp.executors.ray_worker import WORKPLACE, make_run
from ratp.networks.network import NetworkConfig
from ratp.runs.events import StageFinished, StageStarted, Trained
from ratp.runs.plan import RunPlan
from ratp.runs.record import RunRecord
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.runs.states import BEFORE
from ratp.runs.states import CHECKPOINT_LATEST as LATEST
from ratp.studies.execute import find_executor, run_study
from ratp.studies.file import read_study
from tiny_study import grid, study_file

ray = pytest.importorskip("ray")
BASE = RunRequest(device="cpu", weights="none")
GRID = grid('methods = ["ratp", "source-only"]', "seeds = [1, 2]")
FRAIL = """
import os, signal
from pathlib import Path
from unittest.mock import Mock
from ratp.methods.ratp import RaTP

class Frail(RaTP):
    name = "frail"

    def target_phases(self, domain):
        if (mark := next(Path({marks!r}).glob(f"{{domain.name}}*"), None)):
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().target_phases(domain)
"""
WRONG = """
from ratp.methods.source_only import SourceOnly

class Wrong(SourceOnly):
    name = "wrong"

    def target_phases(self, domain):
        return [][0]
"""


@pytest.fixture(scope="module")
def cluster(_own_cache, tmp_path_factory):
    """Two workers. Gives the folder that theirs are in."""
    folder = tmp_path_factory.mktemp("workers")
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        runtime_env={"env_vars": {"TMPDIR": str(folder)}},
    )
    yield folder
    ray.shutdown()


@pytest.fixture
def on_workers(cluster, monkeypatch):
    """Makes a study on the cluster; this process loads no images for it."""

    def make(study, **options):
        with monkeypatch.context() as patch:
            patch.setattr(RunPlan, "load_stream", property(lambda plan: pytest.fail("images are loaded here")))
            run_study(study, on=find_executor("ray"), **options)

    return make


@pytest.fixture(scope="module")
def here(_own_cache, tmp_path_factory):
    """Makes a study in this process, with nothing that workers have kept."""

    def make(path):
        study = read_study(path, tmp_path_factory.mktemp("here"), BASE, trust_methods=True)
        for entry in study.entries:
            Run(entry.plan, entry.folder).execute()
        return study

    return make


@pytest.fixture(scope="module")
def four(tmp_path_factory, here):
    """A study of four runs, run locally."""
    return here(study_file(tmp_path_factory.mktemp("four"), GRID, name="four.toml"))


@pytest.fixture
def frail_method(tmp_path):
    """The file of a method that kills its process on a domain for every mark there is; and where to put marks."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "frail.py").write_text(FRAIL.format(marks=str(marks)))
    path = study_file(tmp_path, grid(f'methods = ["{tmp_path / "frail.py"}"]', "seeds = [1]"), name="frail.toml")
    return path, marks


def claim(path, folder):
    study = read_study(path, folder, BASE, trust_methods=True)
    study.claim()
    return study


def assert_same_results(study, other):
    assert {*study.states().values()} == {"finished"}
    for entry in study.entries:
        assert_same_result(entry.folder, other.folder / entry.name)


def assert_same_result(folder, other):
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(other, name))
    for name in ("matrix.json", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()
    finished, same = journal_of(folder, "stage_finished"), journal_of(other, "stage_finished")
    assert [(e["stage"], e["accuracy"]) for e in finished] == [(e["stage"], e["accuracy"]) for e in same]


def wait_until(condition, seconds=20):
    for _ in range(10 * seconds):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("it never happened")


def all_idle():
    return ray.available_resources().get("CPU") == 2


@pytest.mark.slow
class TestResults:
    def test_results_equal_local_ones(self, four, cluster, on_workers, tmp_path):
        events, ends = {}, []
        study = claim(four.path, tmp_path / "runs")
        on_workers(
            study,
            on_event=lambda run, event: events.setdefault(run.folder.name, []).append(event),
            on_end=lambda entry, result: ends.append((entry.name, result, is_held(entry.folder))),
        )
        assert_same_results(study, four)
        assert {name for name, *_ in ends} == {entry.name for entry in study.entries}
        assert all(isinstance(result, RunRecord) and not held for _, result, held in ends)
        for entry in study.entries:
            kinds = [(type(event), event.stage) for event in events[entry.name]]
            assert kinds == [(kind, stage) for stage in range(4) for kind in (StageStarted, StageFinished)]
            assert entry.record().environment["threads"] == 1
            assert files_of(entry.folder).keys() == files_of(four.folder / entry.name).keys()
        wait_until(lambda: not list(cluster.glob(f"{WORKPLACE}*")))  # workers tidy up after their last word

    def test_command_line_reports_progress(self, four, cluster, tmp_path):
        options = ("--out", tmp_path / "runs", "--device", "cpu", "--weights", "none", "--on", "ray", "--jobs", 1)
        done = ratp("study", "run", four.path, *options)
        assert (done.code, done.out.count("finished")) == (0, 1)
        told = [line.partition(":")[0].partition(",")[0] for line in done.err.splitlines()]  # the plan comes second
        assert (told[0], told[-5:]) == ("Tiny runs", ["ratp", "ratp", "source-only", "source-only", "Runs"])
        assert_same_results(read_study(four.path, tmp_path / "runs", BASE), four)

    def test_one_at_a_time(self, four, on_workers, tmp_path):
        seen = []
        study = claim(four.path, tmp_path / "runs")
        study = replace(study, entries=study.entries[2:])
        on_workers(study, at_once=1, on_event=lambda run, event: seen.append(run.folder.name))
        assert [name for k, name in enumerate(seen) if seen[:k][-1:] != [name]] == [e.name for e in study.entries]

    def test_cluster_without_required_resources(self, four, on_workers, monkeypatch, tmp_path):
        """One run is sent nevertheless: it may come."""
        monkeypatch.setattr(on_ray, "_needs", lambda run: {"CPU": 1.0, "TPU": 1.0})
        study = claim(four.path, tmp_path / "runs")
        study = replace(study, entries=study.entries[2:3])
        with pytest.warns(RoomWarning, match="has no TPU"):
            on_workers(study)
        assert_same_results(study, four)


@pytest.mark.slow
class TestDeaths:
    def test_run_resumes_after_its_last_stage(self, frail_method, here, on_workers, monkeypatch, tmp_path):
        """One death is one too many at first; then one is allowed, and every finished stage allows another."""
        path, marks = frail_method
        study = claim(path, tmp_path / "runs")
        (entry,) = study.entries
        monkeypatch.setattr(on_ray, "MOST_RETRIES", 0)
        (marks / f"{entry.plan.order[1]}-1").touch()
        on_workers(study)
        assert not list(marks.iterdir())
        assert study.state(entry) == "failed"
        assert "its worker died, 1 time(s) in one stage" in study.reason(entry, "failed")
        assert "WorkerCrashedError" in study.reason(entry, "failed")
        assert [e["stage"] for e in journal_of(entry.folder, "stage_finished")] == [0]

        monkeypatch.setattr(on_ray, "MOST_RETRIES", 1)
        for name in entry.plan.order[2:]:
            (marks / f"{name}-1").touch()
        on_workers(study)
        assert not list(marks.iterdir())
        assert_same_results(study, here(path))
        assert [e["finished_stages"] for e in journal_of(entry.folder, "run_resumed")] == [1, 2, 3]

    def test_lost_head_node(self, four, on_workers, monkeypatch, tmp_path):
        monkeypatch.setattr(on_ray, "_answers", lambda place: False)
        monkeypatch.setattr(on_ray, "LOOK_EVERY", 0.0)
        monkeypatch.setattr(on_ray, "MOST_AWAY", 0.0)
        study = claim(four.path, tmp_path / "runs")
        with pytest.raises(RatpError, match=r"no longer answers\. Finished stages are kept"):
            on_workers(study)
        assert "running" not in study.states().values()
        assert "failed" not in study.states().values()
        wait_until(all_idle)


@pytest.mark.slow
class TestInterruption:
    def test_all_stop_and_can_be_continued(self, four, cluster, on_workers, tmp_path):
        def interrupt(run, event):
            assert is_held(run.folder)
            if isinstance(event, StageFinished) and event.stage == 1:
                raise KeyboardInterrupt

        for folder in cluster.glob(f"{WORKPLACE}*"):
            shutil.rmtree(folder, ignore_errors=True)  # the worker may be at it, too
        study = claim(four.path, tmp_path / "runs")
        with pytest.raises(KeyboardInterrupt):
            on_workers(study, on_event=interrupt)
        states = [*study.states().values()]
        assert states.count("interrupted") >= 1
        assert {*states} <= {"interrupted", "waiting"}
        wait_until(all_idle)
        wait_until(lambda: not list(cluster.glob(f"{WORKPLACE}*")))  # workers tidy up after their last word
        interrupted = [entry for entry in study.entries if study.state(entry) == "interrupted"]
        on_workers(study)
        assert_same_results(study, four)
        assert any(journal_of(entry.folder, "run_resumed") for entry in interrupted)

    def test_sigterm(self, cluster, tmp_path):
        """Ray has its own handler with its own message."""
        endless = '[[grid.variant]]\nname = "endless"\nmethod = "ratp"\nset = { epochs = 100000 }\n'
        path = study_file(tmp_path, grid('methods = ["source-only"]', "seeds = [1]") + endless)
        place = ray.get_runtime_context().gcs_address
        words = ["study", "run", path, "--out", tmp_path / "runs", "--device", "cpu", "--on", "ray"]
        process = subprocess.Popen(
            [sys.executable, "-m", "ratp", *map(str, words), "--ray-address", place],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        study = read_study(path, tmp_path / "runs", BASE, trust_methods=True)
        try:
            wait_until(lambda: [*study.states().values()] == ["finished", "running"], seconds=120)
            wait_until((study.entries[1].folder / "config.json").exists, seconds=120)
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=60)[1]
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 128 + signal.SIGTERM, output
        assert output.endswith("Interrupted. The same command continues from there.\n") and "SIGTERM" not in output
        assert [*study.states().values()] == ["finished", "interrupted"]
        wait_until(all_idle)

    def test_local_checkpoint_is_used_remotely(self, four, on_workers, tmp_path):
        study = claim(four.path, tmp_path / "runs")
        study = replace(study, entries=study.entries[:1])
        (entry,) = study.entries
        events = Run(entry.plan, entry.folder).events()
        for event in events:
            if isinstance(event, Trained) and event.stage == 1:
                break
        events.close()
        assert (entry.folder / LATEST).exists()
        on_workers(study)
        assert_same_results(study, four)
        assert [e["stage"] for e in journal_of(entry.folder, "stage_resumed")] == [1]
        assert not (entry.folder / LATEST).exists()


@pytest.mark.slow
class TestFailures:
    def test_failed_run_is_noted_and_others_finish(self, four, on_workers, tmp_path):
        (tmp_path / "wrong.py").write_text(WRONG)
        lost = f'{{ name = "lost", method = "{tmp_path / "wrong.py"}" }}'
        wild = '{ name = "wild", method = "source-only", set = { lr = 1e30 } }'
        path = study_file(tmp_path, grid('methods = ["source-only"]', "seeds = [1]", f"variant = [{lost}, {wild}]"))
        study = claim(path, tmp_path / "runs")
        results = {}
        on_workers(study, on_end=lambda entry, result: results.setdefault(entry.rows[0].label, []).append(result))
        assert [*study.states().values()] == ["finished", "failed", "failed"]
        assert all(len(ended) == 1 for ended in results.values())
        _, lost, wild = study.entries
        assert "wrong.py" in study.reason(lost, "failed")
        assert study.reason(lost, "failed").endswith("IndexError: list index out of range")
        assert isinstance(results["wild"][0], TrainingError)
        assert f"are kept in {wild.folder}" in study.reason(wild, "failed")
        assert len(journal_of(wild.folder, "run_started")) == 1

    def test_foreign_folders(self, four, cluster, tmp_path):
        plans = [entry.plan for entry in four.entries]
        folders = [tmp_path / name for name in ("thesis", "taken", "another", "hand")]
        for folder in folders[:3]:
            folder.mkdir()
        (folders[0] / "thesis.txt").write_text("mine")
        runs = [Run(plan, folder, wait=True) for plan, folder in zip(plans, folders, strict=True)]
        runs[3].plan = replace(runs[3].plan, request=None)
        results = list(make_run(work_of(four.entries[3].plan, folders[2]), {}))
        for answer in results[:2]:
            keep(folders[2], answer["files"])
        with exclusive(folders[1]):
            thesis, taken, another, hand = run_all_on_ray(runs)
        assert all(isinstance(error, RunDirectoryError) for error in (thesis, taken, another))
        assert "thesis.txt" in str(thesis)
        assert "in use by process" in str(taken)
        assert str(another).startswith(f"{folders[2]} holds another run. It differs in seed: 2 there")
        assert "does not come from a request" in str(hand)
        assert files_of(folders[0]) == {"thesis.txt": b"mine"}
        assert files_of(folders[1]) == files_of(folders[3]) == {}

    def test_a_worker_with_another_method(self, tmp_path, cluster):
        """The file was edited since the study was read."""
        (tmp_path / "wrong.py").write_text(WRONG)
        path = study_file(tmp_path, grid(f'methods = ["{tmp_path / "wrong.py"}"]'))
        (entry,) = read_study(path, tmp_path / "runs", BASE, trust_methods=True).entries
        (tmp_path / "wrong.py").write_text(WRONG + "\n")
        (error,) = run_all_on_ray([Run(entry.plan, entry.folder, wait=True)])
        assert "its worker resolves another plan" in str(error)
        (tmp_path / "wrong.py").unlink()
        (error,) = run_all_on_ray([Run(entry.plan, entry.folder, wait=True)])
        assert isinstance(error, ConfigError)
        assert "does not exist" in str(error)

    def test_a_disk_that_is_full(self, four, on_workers, monkeypatch, tmp_path):
        def write(path, data):
            if path.name == "state.safetensors" and path.parent == study.entries[0].folder:
                raise RunDirectoryError("no space left")
            write_bytes(path, data)

        monkeypatch.setattr(ray_worker, "write_bytes", write)
        study = claim(four.path, tmp_path / "runs")
        study = replace(study, entries=study.entries[1:3])
        on_workers(study)
        assert [*study.states().values()] == ["failed", "finished"]
        assert study.reason(study.entries[0], "failed") == "no space left"
        wait_until(all_idle)


def work_of(plan, folder, **options):
    run = Run(plan, folder, wait=True, **options)
    return {**described(plan), "options": options_of(run), "folder": os.fspath(folder)}


def keep(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).unlink(missing_ok=True) if data is None else (folder / name).write_bytes(data)


@pytest.mark.slow
def test_folder_resumes_wherever_writing_stopped(four, tmp_path):
    """Every file of the answers is written by itself, and then somebody goes on there."""
    entry = four.entries[2]
    answers = list(make_run(work_of(entry.plan, "elsewhere"), {}))
    steps = [(k, name) for k, answer in enumerate(answers) for name in answer["files"]]
    so_far = {}
    for k, (answer, name) in enumerate(steps):
        so_far[name] = answers[answer]["files"][name]
        if answer in (0, 1, len(answers) - 2, len(answers) - 1):
            folder = tmp_path / str(k)
            keep(folder, so_far)
            Run(entry.plan, folder).execute()
            assert_same_result(folder, four.folder / entry.name)
    assert {name for _, name in steps} == {BEFORE, *files_of(four.folder / entry.name)}


def test_unusable_folder_only_fails_its_run(tmp_path):
    """Any other error would stop all runs."""
    (tmp_path / LATEST).mkdir()
    with pytest.raises(RunDirectoryError, match=f"cannot write {tmp_path / LATEST}: Is a directory"):
        ray_worker.write_files(tmp_path, {LATEST: None})
    with pytest.raises(RunDirectoryError, match=f"cannot read {tmp_path / 'gone'}: No such file"):
        ray_worker.files_of(tmp_path / "gone")


@pytest.mark.slow
def test_checkpoints_are_sent_too(four, tmp_path):
    """Resuming starts from the latest."""
    entry, sent = four.entries[0], []
    for answer in make_run(work_of(entry.plan, "elsewhere", save_every=0.0), {}):
        keep(tmp_path / "run", answer["files"])
        assert (LATEST in answer["files"]) == ("checkpoint" in answer or answer.get("event") == "StageFinished")
        sent += [files_of(tmp_path / "run")] if "checkpoint" in answer else []
    assert not (tmp_path / "run" / LATEST).exists()
    assert_same_result(tmp_path / "run", four.folder / entry.name)
    keep(tmp_path / "again", sent[-1])
    for answer in make_run(work_of(entry.plan, "elsewhere"), sent[-1]):
        keep(tmp_path / "again", answer["files"])
    assert_same_result(tmp_path / "again", four.folder / entry.name)
    assert [e["stage"] for e in journal_of(tmp_path / "again", "stage_resumed")] == [3]


@pytest.mark.slow
def test_folders_of_dead_workers_are_removed(four, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("dead", "busy", "new"):
        (tmp_path / f"{WORKPLACE}{name}" / "run").mkdir(parents=True)
    with exclusive(tmp_path / f"{WORKPLACE}busy"):
        for name in ("dead", "busy"):
            os.utime(tmp_path / f"{WORKPLACE}{name}", (0, 0))
        *_, last = make_run(work_of(four.entries[2].plan, "elsewhere"), {})
    assert "finished" in last
    assert {path.name for path in tmp_path.iterdir()} == {f"{WORKPLACE}busy", f"{WORKPLACE}new"}


class TestChecks:
    """Before anything is written."""

    def assert_error(self, tmp_path, *options):
        path = study_file(tmp_path, GRID)
        done = ratp("study", "run", path, "--out", tmp_path / "runs", *options)
        assert (done.code, done.out) == (2, "")
        assert not (tmp_path / "runs").exists()
        return done.err

    def test_ray_is_not_installed(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ConfigError, match=r'pip install "ratp-cdsl\[ray\]"'):
            find_executor("ray")
        assert 'pip install "ratp-cdsl[ray]"' in self.assert_error(tmp_path, "--on", "ray")
        assert find_executor().func is run_all

    def test_a_typing_mistake(self, tmp_path):
        message = self.assert_error(tmp_path, "--on", "rai", "--jobs", "many")
        assert "unknown place to run on 'rai'. Did you mean 'ray'?" in message
        assert "--jobs takes auto" in message

    def test_addresses(self, monkeypatch, tmp_path):
        assert "needs --on ray" in self.assert_error(tmp_path, "--ray-address", "auto")
        assert "HOST:PORT" in self.assert_error(tmp_path, "--on", "ray", "--ray-address", "nonsense")
        monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:1")
        assert "for Ray clients" in self.assert_error(tmp_path, "--on", "ray")

    def test_no_answer_from_cluster(self, monkeypatch, tmp_path):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        run = Run(tiny_plan(), tmp_path / "run", wait=True)
        with pytest.raises(RatpError, match="no Ray cluster answers at localhost:1"):
            run_all_on_ray([run], address="localhost:1")
        assert not run.folder.exists()

    def test_dead_cluster_is_not_waited_for(self, monkeypatch, tmp_path):
        """It leaves a file behind that says where it was, and Ray would knock there without end."""
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        with pytest.warns(on_ray.GoneWarning, match=r"at \S+:1 has died: starting another one here"):
            assert on_ray._found("") == "local"
        (tmp_path / "ray" / "ray_current_cluster").unlink()
        assert on_ray._found("") == "local"

    def test_missing_cluster(self, monkeypatch):
        """Ray looks among all processes of the machine, where other tests may have one."""
        found = Mock(return_value="127.0.0.1:1")
        monkeypatch.setattr(sys.modules["ray._private.services"], "canonicalize_bootstrap_address", found)
        with pytest.raises(RatpError, match=r"no Ray cluster answers at 127\.0\.0\.1:1\. Start one"):
            on_ray._found("auto")
        found.side_effect = ConnectionError("Could not find any running Ray instance.")
        with pytest.raises(RatpError, match=r"no Ray cluster runs here\. Start one"):
            on_ray._found("auto")

    def test_job_count_and_placement(self, tmp_path):
        run = Run(tiny_plan(), tmp_path / "run", wait=True)
        with pytest.raises(ConfigError, match="number of runs at a time"):
            run_all_on_ray([run], at_once=0)
        run.plan = replace(run.plan, device=torch.device("cuda", 1))
        with pytest.raises(ConfigError, match="Ray chooses the GPU"):
            run_all_on_ray([run])

    def test_resources_per_run(self, tmp_path):
        plan = tiny_plan()
        run = Run(plan, tmp_path, wait=True)
        assert on_ray._needs(run) == {"CPU": 1.0}
        run.plan = replace(plan, device=torch.device("cuda"))
        assert on_ray._needs(run) == {"CPU": 1.0, "GPU": 1 / SMALL_ON_GPU}
        run.plan = replace(run.plan, recipe=replace(plan.recipe, network=NetworkConfig(backbone="resnet50")))
        assert on_ray._needs(run) == {"CPU": 1.0, "GPU": 1.0}
