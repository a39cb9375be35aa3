"""Networks trained on a source are trained once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import ratp.training.phases as training
import ratp.training.source_cache as module
from helpers import journal_of, same_tensors, slow, tensors_of, toy_domains, toy_plan
from ratp.errors import NotCachedWarning, TrainingError
from ratp.runs.events import StageStarted, Waiting
from ratp.runs.run import Run
from ratp.runs.stage_runner import NumbersWarning, StageRunner
from ratp.training.source_cache import SourceModels, TakenError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RATP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "source-models"


def run(folder, method="source-only", **options):
    changes, domains = options.pop("changes", {}), options.pop("domains", None)
    Run(toy_plan(method, domains, changes=changes, **options), folder, reuse_source=True).execute()
    return folder


def steps_of(folder):
    return next(event["steps"] for event in journal_of(folder, "stage_started") if event["stage"] == 0)


def is_reused(folder):
    record = next(event for event in journal_of(folder, "stage_finished") if event["stage"] == 0)
    assert ("from_cache" in record["statistics"]) == (steps_of(folder) == 0)
    return "from_cache" in record["statistics"]


@pytest.mark.parametrize("method", ["source-only", "tent", slow("shot"), slow("eata"), "ratp", slow("arc")])
def test_second_run_reuses_the_network_bit_exactly(method, tmp_path):
    first, second = run(tmp_path / "1", method), run(tmp_path / "2", method)
    alone = tmp_path / "alone"
    Run(toy_plan(method), alone).execute()
    assert [is_reused(folder) for folder in (first, second, alone)] == [False, True, False]
    assert same_tensors(tensors_of(first), tensors_of(second))
    assert same_tensors(tensors_of(alone), tensors_of(second))
    assert (first / "matrix.json").read_bytes() == (second / "matrix.json").read_bytes()


def test_methods_with_the_same_source_stage_share_it(tmp_path):
    run(tmp_path / "1", "source-only")
    assert is_reused(run(tmp_path / "2", "tent"))
    assert not is_reused(run(tmp_path / "3", "shot"))  # smooths its labels
    assert is_reused(run(tmp_path / "4", "bmd"))


def test_every_dependency_makes_another_network(tmp_path):
    run(tmp_path / "1")
    source, *targets = toy_domains()
    other = replace(source, images=255 - source.images)
    assert not is_reused(run(tmp_path / "seed", seed=7))
    assert not is_reused(run(tmp_path / "recipe", changes={"lr": 0.02}))
    assert not is_reused(run(tmp_path / "switch", changes={"sgd.momentum": 0.5}))
    assert not is_reused(run(tmp_path / "images", domains=[other, *targets]))
    assert is_reused(run(tmp_path / "targets", domains=[source, *reversed(targets)]))


@pytest.mark.faults(20, "ratp does not reuse a source network that was trained on another kind of processor")
def test_other_processor_makes_another_network(tmp_path, monkeypatch):
    run(tmp_path / "1")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        assert not is_reused(run(tmp_path / "2"))
    assert is_reused(run(tmp_path / "3"))


def test_ratp_shares_what_targets_do_not_change(tmp_path):
    run(tmp_path / "1", "ratp")
    later = {"labelling": "softmax", "r_con": 0.3, "distill.weight": 1.0, "memory.replay": "none", "t2pl.rounds": 1}
    for name, value in later.items():
        alone = tmp_path / f"alone {name}"
        Run(toy_plan("ratp", changes={name: value}), alone).execute()
        shared = run(tmp_path / name, "ratp", changes={name: value})
        assert is_reused(shared)
        assert same_tensors(tensors_of(alone), tensors_of(shared))
    for name, value in {"alignment": "scl", "augment": False, "randmix.tanh": False, "pca.weight": 0.5}.items():
        assert not is_reused(run(tmp_path / name, "ratp", changes={name: value}))


@pytest.mark.slow
def test_arc_shares_what_targets_do_not_change(tmp_path):
    run(tmp_path / "1", "arc")
    later = {"replay": 0, "r_con": 0.3, "distill": 1.0, "class_mix": "uniform", "average_old": 0.5, "trust": 0.5}
    for name, value in {**later, "statistics": "reestimated"}.items():
        assert is_reused(run(tmp_path / name, "arc", changes={name: value}))
    for name, value in {"consistency.weight": 0, "augmentation": "randmix", "randmix.weights_per": "batch"}.items():
        assert not is_reused(run(tmp_path / name, "arc", changes={name: value}))


def runs_at_once(tmp_path, *methods):
    return [Run(toy_plan(method), tmp_path / str(k), reuse_source=True) for k, method in enumerate(methods)]


def until_trained(run):
    """Brings a run into the middle of its first stage."""
    events = run.events()
    for event in events:
        if type(event).__name__ == "Trained":
            return events
    raise AssertionError("it trained nothing")


def in_a_thread(run, notes):
    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.execute()
        notes.extend(str(warning.message) for warning in caught)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_run_waits_for_the_one_training_the_same(tmp_path, cache):
    first, second = runs_at_once(tmp_path, "source-only", "tent")
    events, notes = until_trained(first), []
    waiting = in_a_thread(second, notes)
    waiting.join(0.5)
    assert waiting.is_alive()
    assert not journal_of(tmp_path / "1", "stage_started")
    for _ in events:
        pass
    waiting.join(60)
    assert is_reused(tmp_path / "1")
    assert notes == ["waiting for another run that trains the same source network"]
    assert [file.suffix for file in cache.iterdir()] == [".safetensors"]


def found_in_turn(models):
    """Looks for a network as a run does, once no other run trains it."""
    try:
        return models.find({})
    except TakenError as taken:
        while not models.is_there_or_claimed(taken.path):
            time.sleep(0.01)
    return models.find({})


def test_one_waiter_trains_after_an_early_end(tmp_path):
    first, second, third = (SourceModels(tmp_path, {}) for _ in range(3))
    assert first.find({}) is None
    got, let_go = [], threading.Event()

    def take(models, name):
        found_in_turn(models)
        got.append(name)
        let_go.wait(10)
        models.release()

    threads = [threading.Thread(target=take, args=(second, "second"))]
    threads[0].start()
    time.sleep(0.2)
    first.release()
    time.sleep(0.2)
    threads.append(threading.Thread(target=take, args=(third, "third")))
    threads[1].start()
    time.sleep(0.2)
    assert got == ["second"]
    let_go.set()
    for thread in threads:
        thread.join(10)
    assert got == ["second", "third"]


def test_waiter_sees_the_network_before_the_lock_is_released(tmp_path):
    """A run that was left standing, holding its lock, while another in the same thread trained the network."""
    first, second, third = (SourceModels(tmp_path, {}) for _ in range(3))
    assert first.find({}) is None
    assert second.find({}) is None  # of the same thread: it does not wait
    got = []
    waiting = threading.Thread(target=lambda: got.append(found_in_turn(third)))
    waiting.start()
    time.sleep(0.1)
    assert not got
    second.keep({}, {"tensor": torch.ones(2)})
    waiting.join(10)
    assert not waiting.is_alive()
    assert got[0] is not None
    first.release()


def test_system_error_while_waiting_is_tolerated(tmp_path, monkeypatch):
    first, second = runs_at_once(tmp_path, "source-only", "tent")
    events = until_trained(first)
    tries, acquire = [], module.try_acquire

    def flaky(lock):
        tries.append(lock)
        if len(tries) == 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return acquire(lock)

    monkeypatch.setattr(module, "try_acquire", flaky)
    waiting = in_a_thread(second, [])
    waiting.join(1.0)
    assert waiting.is_alive()
    assert len(tries) > 3
    for _ in events:
        pass
    waiting.join(60)
    assert is_reused(tmp_path / "1")


@pytest.mark.parametrize("how", ["given up", "failed"])
def test_ended_run_is_not_waited_for(how, tmp_path, monkeypatch):
    first, second = runs_at_once(tmp_path, "source-only", "tent")
    events = until_trained(first)
    waiting = in_a_thread(second, [])
    waiting.join(0.2)
    if how == "given up":
        events.close()
    else:
        real = StageRunner._note_epoch

        def failing(self, *about):
            if self._session.folder == first.folder:
                raise TrainingError("a loss is no number")
            real(self, *about)

        monkeypatch.setattr(StageRunner, "_note_epoch", failing)
        with pytest.raises(TrainingError) as kept:
            list(events)
        assert kept  # with its traceback, which leads to all there was
    waiting.join(60)
    assert not waiting.is_alive()
    assert not is_reused(tmp_path / "1")


@pytest.mark.slow
def test_killed_process_is_not_waited_for(tmp_path, cache):
    models = SourceModels(cache, {})
    code = f"""
import time
from pathlib import Path
from ratp.training.source_cache import SourceModels, TakenError
SourceModels(Path({str(cache)!r}), {{}}).find({{}})
print("held", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        process.kill()
    assert models.find({}) is None
    models.keep({}, {"tensor": torch.ones(2)})
    assert models.find({}) is not None


def test_waiting_run_reports_and_can_be_stopped(tmp_path):
    first, second = runs_at_once(tmp_path, "source-only", "tent")
    training = until_trained(first)

    def wait(seen):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with closing(second.events()) as events:
                seen += [next(events) for _ in range(3)]

    seen = []
    thread = threading.Thread(target=wait, args=(seen,))
    thread.start()
    thread.join(30)
    assert seen == [Waiting(0, "ink")] * 3
    for _ in training:
        pass
    second.execute()  # what was stopped while it waited goes on
    assert is_reused(tmp_path / "1")


def test_non_finite_network_is_not_shared(tmp_path):
    models, other = SourceModels(tmp_path, {}), SourceModels(tmp_path, {})
    assert models.find({}) is None
    models.keep({}, {"tensor": torch.tensor([1.0, torch.inf])})
    assert other.find({}) is None  # immediately: no run has to wait for it either
    other.release()


def test_runs_with_another_source_stage_do_not_wait(tmp_path):
    first, second = runs_at_once(tmp_path, "source-only", "shot")
    events = until_trained(first)
    second.execute()
    events.close()
    assert not is_reused(tmp_path / "1")


def test_other_code_makes_another_network(tmp_path, monkeypatch):
    run(tmp_path / "1")
    monkeypatch.setattr(module, "code_hash", lambda: "edited")
    assert not is_reused(run(tmp_path / "2"))


def test_sharing_is_opt_in(tmp_path, cache):
    Run(toy_plan("source-only"), tmp_path / "1").execute()
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_damaged_file_is_rejected(damage, tmp_path, cache):
    first = run(tmp_path / "1")
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "changed":
        content[-5] ^= 1
    else:
        content = b"<html>"
    file.write_bytes(bytes(content))
    second = run(tmp_path / "2")
    assert not is_reused(second)
    assert same_tensors(tensors_of(first), tensors_of(second))
    assert is_reused(run(tmp_path / "3"))  # written again


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_tolerated(tmp_path, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o500)
    with pytest.warns(NotCachedWarning, match="cannot cache the source network"):
        assert not is_reused(run(tmp_path / "1"))


def test_oldest_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    models = SourceModels(tmp_path / "kept", {})
    for number in range(4):
        models.keep({"number": number}, {"tensor": torch.full((3,), float(number))})
        for age, file in enumerate(sorted((tmp_path / "kept").iterdir(), key=lambda f: f.stat().st_mtime_ns)):
            os.utime(file, ns=(age, age))
    assert [models.find({"number": n}) is not None for n in range(4)] == [False, False, True, True]


def test_leftovers_of_killed_writers_are_removed_after_a_day(tmp_path):
    models = SourceModels(tmp_path, {})
    old, new = tmp_path / ".x.safetensors.part-1", tmp_path / ".x.safetensors.part-2"
    for leftover in (old, new):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    models.keep({}, {"tensor": torch.zeros(3)})
    assert not old.exists() and new.exists()


def test_a_thread_does_not_wait_for_itself(tmp_path):
    """Two runs that one thread makes in turn: the second trains the network, too."""
    both = [Run(toy_plan("source-only", seed=1), tmp_path / name, reuse_source=True).events() for name in "ab"]
    for events in zip(*both, strict=True):
        assert type(events[0]) is type(events[1])
    assert not is_reused(tmp_path / "b")
    assert same_tensors(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))
    assert is_reused(run(tmp_path / "c", seed=1))


def test_network_retried_in_other_precision_is_not_waited_for(tmp_path, cache, monkeypatch):
    step, lost = training.SupervisedPhase.step, [True]

    def poisoned(self):
        loss = step(self)
        return {name: value * float("nan") for name, value in loss.items()} if any(lost) else loss

    monkeypatch.setattr(training.SupervisedPhase, "step", poisoned)
    events = Run(replace(toy_plan("source-only"), precision="tf32"), tmp_path / "run", reuse_source=True).events()
    start_events = (event for event in events if isinstance(event, StageStarted))
    next(start_events)
    assert [*cache.glob("*.lock")]
    with pytest.warns(NumbersWarning):
        next(start_events)
    lost.clear()
    assert not [*cache.glob("*.lock")]
    for _ in events:
        pass
    assert not [*cache.glob("*.safetensors")]


def test_resumed_run_does_not_need_the_network(tmp_path, cache):
    first = Run(toy_plan("tent"), tmp_path / "1", reuse_source=True).events()
    for event in first:
        if type(event).__name__ == "StageFinished":
            break
    first.close()
    for file in cache.iterdir():
        file.unlink()
    run(tmp_path / "1", "tent")
    assert same_tensors(tensors_of(tmp_path / "1"), tensors_of(run(tmp_path / "2", "tent")))
