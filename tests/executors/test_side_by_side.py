"""Several runs at once: each gives what it gives alone, and none can harm another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ratp.executors.lanes as lanes
import ratp.executors.local as side_by_side
from helpers import TINY, accuracy_of, files_of, journal_of, same_tensors, tensors_of, toy_domains, toy_plan
from own_images import image_files, write_files
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.executors.local import default_at_once, run_all
from ratp.executors.pool import RetryWarning
from ratp.executors.worker import answer
from ratp.networks.network import NetworkConfig
from ratp.runs.events import Probed, StageFinished, StageStarted, Trained
from ratp.runs.plan import resolve
from ratp.runs.record import RunRecord, fingerprint_of
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.runs.stage_runner import StageRunner
from ratp.training.device_cache import shared_copy, with_images_on

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A small stream of files, which another process can load."""
    folder = tmp_path_factory.mktemp("pictures")
    for seed, name in enumerate(("ink", "mud", "fog")):
        write_files(folder / name, image_files(count=6, seed=seed))
    return folder


@pytest.fixture
def plan_of(pictures):
    def make(method="ratp", seed=1, **changes):
        kernels = {"randmix.kernel_sizes": (3, 5)} if method == "ratp" else {}
        sizes = {**TINY, "network.backbone": "dtn", "size": 32, **kernels}
        return resolve(
            RunRequest(
                stream=str(pictures),
                order="ink>mud>fog",
                method=method,
                seed=seed,
                changes={**sizes, **{name.replace("__", "."): value for name, value in changes.items()}},
                device="cpu",
                weights="none",
            )
        )

    return make


def assert_same_result(folder, other):
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(other, name))
    for name in ("matrix.json", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def kinds(events):
    return [type(event).__name__ for event in events]


def paired(there, here):
    """Events of a run elsewhere with those of the same run here; of several steps elsewhere, the last."""
    rest = iter(here)
    for event in there:
        for other, means in rest:
            if type(other) is not type(event):
                continue
            if not isinstance(event, Trained) or place(event) == place(other):
                yield event, other, means
                break
        else:
            pytest.fail(f"no run here has {event}")


def place(event):
    return event.stage, event.tick.phase.name, event.tick.epoch, event.tick.step


class TestProcesses:
    """On a processor."""

    @pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_parallel_results_equal_single_runs(self, count, plan_of, tmp_path):
        choices = [("ratp", 1), ("source-only", 1), ("ratp", 2), ("ratp", 3)][:count]
        runs = [Run(plan_of(*choice), tmp_path / "at-once" / str(k)) for k, choice in enumerate(choices)]
        records = run_all(runs, at_once=count)
        for k, choice in enumerate(choices):
            assert isinstance(records[k], RunRecord)
            assert records[k].path == runs[k].folder
            Run(plan_of(*choice), tmp_path / "alone" / str(k)).execute()
            assert_same_result(tmp_path / "at-once" / str(k), tmp_path / "alone" / str(k))
            assert records[k].environment["threads"] == 1
            assert runs[k].matrix.complete

    @pytest.mark.slow
    def test_events_equal_local_events(self, plan_of, tmp_path):
        events, threads = {}, set()

        def listen(run, event):
            events.setdefault(run.folder.name, []).append(event)
            threads.add(threading.get_ident())

        runs = [Run(plan_of(seed=seed), tmp_path / str(seed), probe=True) for seed in (1, 2)]
        run_all(runs, at_once=2, on_event=listen)
        assert threading.main_thread().ident not in threads
        for seed in (1, 2):
            alone = [
                (event, dict(event.tick.means) if isinstance(event, Trained) else None)
                for event in Run(plan_of(seed=seed), tmp_path / f"alone-{seed}", probe=True).events()
            ]
            untrained = [kind for kind in kinds(events[str(seed)]) if kind != "Trained"]
            assert untrained == [kind for kind in kinds(event for event, _ in alone) if kind != "Trained"]
            steps = [event.tick.made for event in events[str(seed)] if isinstance(event, Trained)]
            assert sum(steps) == sum(event.tick.made for event, _ in alone if isinstance(event, Trained))
            for there, here, means in paired(events[str(seed)], alone):
                if isinstance(here, StageStarted | Probed):
                    assert there == here
                elif isinstance(here, StageFinished):
                    assert replace(there, seconds=0) == replace(here, seconds=0)
                else:
                    assert there.tick.means == means
                    assert (there.stage, there.domain) == (here.stage, here.domain)
                    for name in ("epoch", "step", "statistics", "epoch_done"):
                        assert getattr(there.tick, name) == getattr(here.tick, name)
                    for name in ("name", "epochs", "steps"):
                        assert getattr(there.tick.phase, name) == getattr(here.tick.phase, name)

    @pytest.mark.slow
    def test_failed_run_does_not_affect_others(self, plan_of, tmp_path):
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "thesis.txt").write_text("mine")
        wild = plan_of(seed=3, lr=1e30)
        runs = [Run(plan_of(seed=seed), tmp_path / str(seed)) for seed in (0, 1, 2)] + [Run(wild, tmp_path / "3")]
        runs.append(Run(plan_of(seed=4), tmp_path / "2"))
        first, second, third, fourth, fifth = run_all(runs, at_once=2)
        assert isinstance(first, RunRecord)
        assert isinstance(second, RunDirectoryError)
        assert "thesis.txt" in str(second)
        assert isinstance(third, RunRecord)
        assert isinstance(fourth, TrainingError)
        assert isinstance(fifth, RunDirectoryError)
        assert "seed: 2 there, 4 requested" in str(fifth)
        assert files_of(tmp_path / "1") == {"thesis.txt": b"mine"}

    @pytest.mark.slow
    def test_method_error_is_reported_with_its_location(self, plan_of, tmp_path):
        file = tmp_path / "broken.py"
        file.write_text(
            "from ratp.methods.source_only import SourceOnly\n"
            "class Broken(SourceOnly):\n"
            "    name = 'broken'\n"
            "    def target_phases(self, domain):\n"
            "        return [][0]\n"
        )
        runs = [Run(plan_of(method), tmp_path / str(k)) for k, method in enumerate((str(file), "source-only"))]
        for at_once in (2, 1):
            broken, other = run_all(runs, at_once=at_once)
            assert isinstance(other, RunRecord)
            assert isinstance(broken, RatpError)
            assert "broken.py" in str(broken)
            assert "IndexError" in str(broken)

    @pytest.mark.slow
    def test_dead_process_is_reported(self, plan_of, tmp_path):
        """Both do; new ones go on with their runs, and make the one that is left."""
        killed = []

        def kill(run, event):
            if len(running) == 2 and not killed:
                killed.extend(children())
                for child in killed:
                    os.kill(child, signal.SIGKILL)
            if isinstance(event, Trained):
                running.add(run.plan.seed)

        running = set()
        runs = [Run(plan_of(seed=seed, steps=150), tmp_path / str(seed)) for seed in (1, 2)]
        runs.append(Run(plan_of("source-only"), tmp_path / "3"))
        with pytest.warns(RetryWarning, match=r"\(signal 9\): another continues from what was saved") as notes:
            results = run_all(runs, at_once=2, on_event=kill)
        assert len(killed) == len(notes) == 2
        assert all(isinstance(result, RunRecord) for result in results)

    @pytest.mark.parametrize("sent", [b"", b'{"request": {"str', b"{}]\n"])
    def test_dead_client_is_not_waited_for(self, sent):
        """A request may be cut short."""
        ours, theirs = socket.socketpair()
        server = threading.Thread(target=answer, args=(theirs, None), daemon=True)
        server.start()
        with ours:
            ours.sendall(sent)
        server.join(10)
        assert not server.is_alive()

    @pytest.mark.slow
    def test_handmade_plan_stays_in_this_process(self, plan_of, tmp_path):
        """Its request says something else, and its images are nowhere but in this process; or they have changed."""
        reported = []
        runs = [
            Run(toy_plan(), tmp_path / "toy"),
            Run(plan_of(), tmp_path / "files"),
            Run(toy_plan(seed=3), tmp_path / "t"),
        ]
        runs[2].plan = replace(runs[2].plan, request=None)
        runs.append(Run(plan_of(seed=5), tmp_path / "changed"))
        runs[3].config = {**runs[3].config, "data": {}}
        runs[3].config["fingerprint"] = fingerprint_of(runs[3].config)
        records = run_all(runs, at_once=2, on_event=lambda run, event: reported.append((run, threading.get_ident())))
        assert [record.config["stream"] for record in records[:3]] == ["toy", runs[1].plan.spec.name, "toy"]
        assert records[3].config["data"] == {}
        assert {run for run, thread in reported if thread == threading.get_ident()} == {runs[0], runs[2], runs[3]}
        Run(toy_plan(), tmp_path / "alone").execute()
        assert_same_result(tmp_path / "toy", tmp_path / "alone")

    @pytest.mark.slow
    def test_half_finished_runs_are_continued(self, plan_of, tmp_path):
        events = Run(plan_of(seed=1), tmp_path / "1").events()
        for _ in range(8):
            next(events)
        events.close()
        Run(plan_of(seed=2), tmp_path / "2").execute()
        finished = files_of(tmp_path / "2")
        runs = [Run(plan_of(seed=seed), tmp_path / str(seed)) for seed in (1, 2, 3)]
        run_all(runs, at_once=2)
        assert files_of(tmp_path / "2") == finished
        assert [e["event"] for e in journal_of(tmp_path / "1")].count("run_resumed") == 1
        for seed in (1, 3):
            Run(plan_of(seed=seed), tmp_path / f"alone-{seed}").execute()
            assert_same_result(tmp_path / str(seed), tmp_path / f"alone-{seed}")

    @pytest.mark.slow
    def test_a_listener_that_fails_stops_all(self, plan_of, tmp_path):
        def listen(run, event):
            if isinstance(event, Trained) and run.plan.seed == 2:
                raise ZeroDivisionError

        runs = [Run(plan_of(seed=seed, epochs=200), tmp_path / str(seed)) for seed in (1, 2)]
        with pytest.raises(ZeroDivisionError):
            run_all(runs, at_once=2, on_event=listen)
        assert not children()
        assert not (tmp_path / "1" / "weights.safetensors").exists()


def children(parent=None):
    """Processes that make runs for another, by default for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, owner = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
            if int(owner) == (parent or os.getpid()) and b"ratp.executors.worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
class TestControlC:
    def test_all_runs_stop_at_a_step_and_resume(self, plan_of, tmp_path):
        """Sent to this thread, as a terminal does, once a run has made a step of its second stage."""
        sent = []

        def listen(run, event):
            if isinstance(event, Trained) and event.stage == 1 and not sent:
                sent.append(run.plan.seed)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.2)

        def runs():
            return [Run(plan_of(seed=seed, steps=35), tmp_path / str(seed)) for seed in (1, 2)]

        with pytest.raises(KeyboardInterrupt):
            run_all(runs(), at_once=2, on_event=listen)
        assert not children()
        assert all(len(accuracy_of(tmp_path / str(seed))) < 3 for seed in (1, 2))
        run_all(runs(), at_once=2)
        for seed in (1, 2):
            Run(plan_of(seed=seed, steps=35), tmp_path / f"alone-{seed}").execute()
            assert_same_result(tmp_path / str(seed), tmp_path / f"alone-{seed}")

    def test_workers_exit_when_the_program_is_killed(self, plan_of, pictures, tmp_path):
        """The processes notice that the listener is gone and exit."""
        command = [sys.executable, "-m", "ratp", "run", pictures, "--order", "ink>mud>fog", "--device", "cpu", "-q"]
        command += ["--seed", "1", "--seed", "2", "--jobs", "2", "--out", tmp_path / "out", "--set", "size=32"]
        command += ["--set", "network.backbone=dtn", "--set", "epochs=100000", "--set", "network.width=0.05"]
        program = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            patience = time.monotonic() + 60
            while len(list((tmp_path / "out").glob("*/journal.jsonl"))) < 2 and time.monotonic() < patience:
                time.sleep(0.1)
            workers = children(program.pid)
            assert len(workers) == 2
        finally:
            program.kill()
            program.communicate()
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < patience
            time.sleep(0.1)


class TestInTurn:
    def test_one_at_a_time_is_unchanged(self, tmp_path, monkeypatch):
        """In this thread and process, with all the threads to compute with that there are."""
        monkeypatch.setattr(side_by_side, "WorkerLane", None)
        threads = []
        runs = [Run(toy_plan(seed=seed), tmp_path / str(seed)) for seed in (1, 2)]
        records = run_all(runs, at_once=1, on_event=lambda run, event: threads.append(threading.get_ident()))
        assert {*threads} == {threading.get_ident()}
        for record in records:
            assert record.matrix.complete

    def test_single_run_is_unchanged(self, tmp_path, monkeypatch):
        monkeypatch.setattr(side_by_side, "WorkerLane", None)
        (record,) = run_all([Run(toy_plan(), tmp_path / "run")])
        assert record.matrix.complete

    @pytest.mark.slow
    def test_sequential_runs_use_a_thread_each(self, tmp_path):
        """Threads to compute with decide the last bits."""
        (record,) = run_all([Run(toy_plan(), tmp_path / "run")], at_once=2)
        assert record.environment["threads"] == 1

    def test_nothing_to_run(self):
        assert run_all([]) == []

    def test_control_c(self, tmp_path):
        def listen(run, event):
            if isinstance(event, Trained) and event.stage == 1:
                raise KeyboardInterrupt

        runs = [Run(toy_plan(seed=seed), tmp_path / str(seed)) for seed in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            run_all(runs, at_once=1, on_event=listen)
        assert len(accuracy_of(tmp_path / "1")) == 1
        assert not (tmp_path / "2").exists()

    @pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "4"])
    def test_run_count_must_be_a_number(self, wrong):
        with pytest.raises(ConfigError, match="number of runs at a time"):
            run_all([], at_once=wrong)

    @pytest.mark.faults(16, "if training does not fit into memory, the run stops with an error that says so")
    def test_out_of_memory_is_reported(self, tmp_path, monkeypatch):
        def full(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And a long story.")
            yield

        monkeypatch.setattr(Run, "events", full)
        first, second = run_all([Run(toy_plan(seed=seed), tmp_path / str(seed)) for seed in (1, 2)], at_once=1)
        assert "memory of cpu ran out (CUDA out of memory). Run fewer at once" in str(first)
        assert isinstance(second, RatpError)


class FakeStream:
    """As much of a stream as a lane uses."""

    count = 0

    def __init__(self, device):
        FakeStream.count += 1
        self.cuda_stream = FakeStream.count % 32

    def synchronize(self):
        pass


@pytest.fixture
def _threads(monkeypatch):
    """Lanes of threads, as on a GPU, for runs on the processor."""
    cuda = SimpleNamespace(
        device=lambda device: nullcontext(), stream=lambda stream: nullcontext(), Stream=FakeStream, synchronize=id
    )
    fake = SimpleNamespace(**{name: getattr(torch, name) for name in ("zeros", "OutOfMemoryError")}, cuda=cuda)
    monkeypatch.setattr(lanes, "torch", fake)
    monkeypatch.setattr(side_by_side, "WorkerLane", lambda worker: lanes.stream_lanes(torch.device("cpu"), 1)[0])


@pytest.mark.usefixtures("_threads")
class TestThreads:
    """What happens on a GPU, but for the GPU."""

    @pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_parallel_results_equal_single_runs(self, count, tmp_path):
        """Networks are built at the same time, from torch's one global generator."""
        choices = [("ratp", 1), ("source-only", 1), ("ratp", 2), ("ratp", 3)][:count]
        for repeat in range(3):
            folder = tmp_path / str(repeat)
            runs = [Run(toy_plan(m, seed=s), folder / str(k)) for k, (m, s) in enumerate(choices)]
            assert all(isinstance(record, RunRecord) for record in run_all(runs, at_once=count))
        for k, (method, seed) in enumerate(choices):
            Run(toy_plan(method, seed=seed), tmp_path / "alone" / str(k)).execute()
            for repeat in range(3):
                assert_same_result(tmp_path / str(repeat) / str(k), tmp_path / "alone" / str(k))

    def test_more_runs_than_lanes(self, tmp_path):
        runs = [Run(toy_plan("source-only", seed=seed), tmp_path / str(seed)) for seed in range(5)]
        assert [record.seed for record in run_all(runs, at_once=2)] == [0, 1, 2, 3, 4]

    def test_failed_run_does_not_affect_others(self, tmp_path):
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "thesis.txt").write_text("mine")
        results = run_all([Run(toy_plan(seed=seed), tmp_path / str(seed)) for seed in (0, 1, 2)], at_once=3)
        assert [type(result).__name__ for result in results] == ["RunRecord", "RunDirectoryError", "RunRecord"]

    def test_control_c_stops_all_at_a_step(self, tmp_path):
        sent = []

        def listen(run, event):
            if isinstance(event, Trained) and event.stage == 1 and not sent:
                sent.append(run)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.2)

        def runs():
            return [Run(toy_plan(seed=s, changes={"steps": 60}), tmp_path / str(s)) for s in (1, 2)]

        with pytest.raises(KeyboardInterrupt):
            run_all(runs(), at_once=2, on_event=listen)
        patience = time.monotonic() + 0.1  # all have stopped, though the threads may have a few lines to go
        while any(thread.name.startswith("run-") for thread in threading.enumerate()):
            assert time.monotonic() < patience
        assert not (tmp_path / "1" / "weights.safetensors").exists()
        assert all(isinstance(record, RunRecord) for record in run_all(runs(), at_once=2))

    def test_listeners_are_called_by_one_thread_at_a_time(self, tmp_path):
        inside = []

        def listen(run, event):
            assert not inside
            inside.append(run)
            time.sleep(0.001)
            inside.clear()

        runs = [Run(toy_plan(seed=seed), tmp_path / str(seed)) for seed in (1, 2, 3)]
        assert all(isinstance(result, RunRecord) for result in run_all(runs, at_once=3, on_event=listen))


class TestChoices:
    def test_as_many_as_cores(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
        assert default_at_once([Run(toy_plan(), tmp_path)], torch.device("cpu")) == 3

    @pytest.mark.parametrize(("backbones", "count"), [("dtn dtn", 8), ("dtn resnet50", 1), ("resnet50 resnet50", 1)])
    def test_small_networks_share_a_gpu_and_large_ones_queue(self, backbones, count):
        recipes = [replace(toy_plan().recipe, network=NetworkConfig(name)) for name in backbones.split()]
        plans = [SimpleNamespace(recipe=recipe) for recipe in recipes]
        assert default_at_once([SimpleNamespace(plan=plan) for plan in plans], torch.device("cuda")) == count

    def test_devices_and_precisions_run_in_sequence(self):
        def run(device, precision):
            return SimpleNamespace(plan=SimpleNamespace(device=torch.device(device), precision=precision))

        runs = [run("cuda", "tf32"), run("cpu", "fp32"), run("cuda", "fp32"), run("cuda", "tf32")]
        assert side_by_side._groups(runs) == [[0, 3], [1], [2]]

    def test_streams_are_distinct(self, monkeypatch):
        """Torch has 32, and gives them out over and over."""
        FakeStream.count = 20
        monkeypatch.setattr(lanes, "torch", SimpleNamespace(cuda=SimpleNamespace(Stream=FakeStream)))
        for count in (2, 30, 32):
            assert len({stream.cuda_stream for stream in lanes.distinct_streams("cuda", count)}) == count
        with pytest.raises(RatpError, match="does not have 33 streams"):
            lanes.distinct_streams("cuda", 33)


class TestCopies:
    def test_equal_images_share_one_copy_while_held(self):
        device, one = torch.device("cpu"), torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
        held = shared_copy(one, device)
        assert shared_copy(one.clone(), device) is held
        assert shared_copy(255 - one, device) is not held
        kept = one.clone()
        del held, one
        again = shared_copy(kept, device)
        assert again is kept

    def test_images_that_are_there_already_are_left_alone(self):
        domain = toy_domains()[0]
        assert with_images_on(domain, torch.device("cpu")) is domain
        assert with_images_on(domain.unlabelled(), torch.device("cpu")).images is domain.images


SIZES = {"epochs": 2, "steps": 6, "network.width": 0.25, "network.hidden": 32, "network.dim": 16, "batch": 16}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def gpu_run(folder, method="ratp", seed=1, **changes):
    plan = toy_plan(method, seed=seed, changes={**SIZES, "lr": 0.001, **changes})
    return Run(replace(plan, device=torch.device("cuda")), folder)


@needs_gpu
class TestOnGPU:
    """Warnings are errors: a capture that failed would not pass for one."""

    @pytest.fixture(autouse=True)
    def _repeatable(self):
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield

    @pytest.mark.parametrize("count", [2, 4, 8])
    def test_parallel_results_equal_single_runs(self, count, tmp_path):
        choices = [("source-only" if k % 4 == 3 else "ratp", k) for k in range(count)]
        runs = [gpu_run(tmp_path / "at-once" / str(seed), method, seed) for method, seed in choices]
        assert all(isinstance(result, RunRecord) for result in run_all(runs, at_once=count))
        for method, seed in choices:
            gpu_run(tmp_path / "alone" / str(seed), method, seed).execute()
            alone, beside = (tensors_of(tmp_path / where / str(seed)) for where in ("alone", "at-once"))
            for name, tensor in alone.items():
                if tensor.is_floating_point():
                    torch.testing.assert_close(beside[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)

    def test_concurrent_graph_captures_do_not_conflict(self, tmp_path):
        """Many short stages: somebody records nearly all the time."""
        domains = toy_domains(**{f"d{k}": 24 for k in range(6)})
        for repeat in range(3):
            runs = []
            for seed in range(8):
                plan = toy_plan("ratp", domains, seed=seed, changes={**SIZES, "epochs": 1})
                runs.append(Run(replace(plan, device=torch.device("cuda")), tmp_path / str(repeat) / str(seed)))
            results = run_all(runs, at_once=8)
            assert [result for result in results if not isinstance(result, RunRecord)] == []

    def test_each_run_is_captured_on_its_own_streams(self, tmp_path, monkeypatch):
        import ratp.training.cuda_graphs as capture

        seen, record = [], capture._CapturedSteps._record

        def watched(self):
            seen.append((threading.get_ident(), self._stream.cuda_stream, torch.cuda.current_stream().cuda_stream))
            graph = record(self)
            assert graph is not None
            return graph

        monkeypatch.setattr(capture._CapturedSteps, "_record", watched)
        run_all([gpu_run(tmp_path / str(seed), seed=seed) for seed in range(4)], at_once=4)
        assert len(seen) == 4 * 3
        lanes = {thread: (aside, main) for thread, aside, main in seen}
        assert len(set(seen)) == len(lanes) == 4
        assert len({stream for pair in lanes.values() for stream in pair}) == 8

    def test_images_are_shared_on_the_device(self, tmp_path, monkeypatch):
        """Streams were loaded separately; target images are the same for every seed, a source's part is not."""
        held, barrier, real = {}, threading.Barrier(3, timeout=60), StageRunner._phases

        def watched(self):
            phases, count = real(self)
            held.setdefault(self._number, []).append(phases[0]._images.data_ptr())
            barrier.wait()
            return phases, count

        monkeypatch.setattr(StageRunner, "_phases", watched)
        run_all([gpu_run(tmp_path / str(seed), seed=seed) for seed in range(3)], at_once=3)
        assert [len(set(held[stage])) for stage in (1, 2)] == [1, 1]
        assert len(set(held[0])) == 3

    def test_copies_do_not_outlive_their_users(self):
        images = torch.randint(256, (1000, 3, 64, 64), dtype=torch.uint8)
        device = torch.device("cuda")
        shared_copy(images[:1], device)
        before = torch.cuda.memory_allocated()
        one, other = shared_copy(images, device), shared_copy(images.clone(), device)
        assert one is other
        assert torch.cuda.memory_allocated() - before < 1.5 * images.numel()
        del one, other
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before

    def test_failed_run_does_not_affect_others(self, tmp_path):
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "thesis.txt").write_text("mine")
        results = run_all([gpu_run(tmp_path / str(seed), seed=seed) for seed in range(3)], at_once=3)
        assert [type(result).__name__ for result in results] == ["RunRecord", "RunDirectoryError", "RunRecord"]

    def test_ctrl_c_and_resume(self, tmp_path):
        sent = []

        def listen(run, event):
            if isinstance(event, Trained) and event.stage == 1 and not sent:
                sent.append(run)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.2)

        def runs():
            return [gpu_run(tmp_path / str(seed), seed=seed, steps=400) for seed in range(3)]

        with pytest.raises(KeyboardInterrupt):
            run_all(runs(), at_once=3, on_event=listen)
        assert all(isinstance(result, RunRecord) for result in run_all(runs(), at_once=3))
