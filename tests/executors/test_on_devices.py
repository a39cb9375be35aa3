"""Several devices of one machine: they share the runs, each gives what it gives on one, and none can harm another.

Two processes on the processor stand for two GPUs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ratp.executors.local as local
import ratp.executors.pool as pool
import ratp.executors.process as process_module
import ratp.executors.worker as worker
from helpers import TINY, files_of, journal_of, no_processes, ratp, toy_plan
from own_images import image_files, write_files
from ratp._core.environment import find_devices
from ratp.errors import ConfigError
from ratp.executors.local import run_all
from ratp.executors.pool import RetryWarning
from ratp.executors.process import ProcessGoneError
from ratp.runs.events import StageFinished, StageStarted, Trained
from ratp.runs.record import RunRecord
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.studies.execute import find_executor, run_study
from ratp.studies.file import read_study
from ratp.training.phase import Tick
from tiny_study import traces

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
SEEDS = (1, 2, 3, 4, 5)
TRUSTED = ["--trust-methods"]
# A method that says who makes it, and waits before its second stage for as long as it is held.
GATE = """
import os, time
from pathlib import Path
from ratp.methods.shot import SHOT

class Gate(SHOT):
    name = "gate"

    def target_phases(self, domain):
        seed = self.setting.randomness.seed
        if domain.name == "mud":
            Path(f"made-{seed}-{os.getpid()}").touch()
            while Path(f"hold-{seed}").exists():
                time.sleep(0.02)
        return super().target_phases(domain)
"""

# The same, but one loses its device.
LOST = (
    f"""
import ratp.executors.worker
{GATE}
        if seed == 1:
            ratp.executors.worker._computes = lambda device: False
            raise RuntimeError("the GPU has fallen off the bus")
""".replace("        return super().target_phases(domain)\n", "", 1)
    + "        return super().target_phases(domain)\n"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A study of five runs on one device, one after the other."""
    folder = tmp_path_factory.mktemp("gate")
    for seed, name in enumerate(("ink", "mud", "fog")):
        write_files(folder / "pictures" / name, image_files(count=4, seed=seed))
    (folder / "gate.py").write_text(GATE)
    sizes = {**TINY, "steps": 4, "size": 32}
    settings = ", ".join(f'"{name}" = {value}' for name, value in sizes.items())
    (folder / "tiny.toml").write_text(
        '[[grid]]\nstream = "pictures"\norders = ["ink>mud>fog"]\nmethods = ["gate.py"]\n'
        f'seeds = {list(SEEDS)}\nset = {{ {settings}, "network.backbone" = "dtn" }}\n'
    )
    with pytest.MonkeyPatch.context() as patch, no_processes():
        patch.chdir(folder)
        result = ratp(
            "study", "run", "tiny.toml", "--out", "undisturbed", *TRUSTED, "--device", "cpu", "--jobs", "1", "-q"
        )
        assert result.code == 0, result.err
    return folder


@pytest.fixture
def gate(undisturbed, tmp_path, monkeypatch):
    """It, in the current folder."""
    shutil.copytree(undisturbed, tmp_path / "here", ignore=shutil.ignore_patterns("made-*"))
    monkeypatch.chdir(tmp_path / "here")
    return "tiny.toml"


def results(place):
    """The matrices and weights of all runs of a folder."""
    kept = ("matrix.json", "weights.safetensors")
    return {name: data for name, data in files_of(Path(place)).items() if Path(name).name in kept}


def hold(*seeds):
    for seed in seeds:
        Path(f"hold-{seed}").touch()


def let_go():
    for mark in Path().glob("hold-*"):
        mark.unlink()


def makers():
    """The process that runs, or ran, each seed."""
    return {int(mark.name.split("-")[1]): int(mark.name.split("-")[2]) for mark in Path().glob("made-*")}


def wait_for(count, process=None):
    """Until so many runs have come to their second stage."""
    patience = time.monotonic() + 120
    while len(makers()) < count:
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < patience
        time.sleep(0.05)
    return makers()


def resumed(folder):
    return journal_of(folder, "run_resumed")


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def run_on_two(path, place="out", **how):
    """Runs or resumes a study on two devices; returns the results by seed."""
    study = read_study(path, Path(place), RunRequest(device="cpu"), trust_methods=True)
    study.claim()
    ends, on_end = {}, how.pop("on_end", lambda ends: None)

    def end(entry, result):
        ends[entry.plan.seed] = result
        on_end(ends)

    run_study(study, on=find_executor(devices=find_devices("cpu,cpu")), on_end=end, **how)
    return ends


class TestSharing:
    @pytest.mark.slow
    def test_free_device_takes_next_run_with_equal_results(self, gate):
        """One run is held until all others have ended: its process makes one, the other all the rest."""
        events = {}
        hold(1)
        ends = run_on_two(
            gate,
            at_once=1,
            on_event=lambda run, event: events.setdefault(run.plan.seed, []).append(event),
            on_end=lambda ends: let_go() if len(ends) == 4 else None,
        )
        assert all(isinstance(result, RunRecord) for result in ends.values())
        assert sorted(Counter(makers().values()).values()) == [1, 4]
        assert os.getpid() not in makers().values()
        assert not alive(makers().values())
        assert results("out") == results("undisturbed")
        for seed in SEEDS:
            assert sum(event.tick.made for event in events[seed] if isinstance(event, Trained)) == 24
            assert [event.stage for event in events[seed] if isinstance(event, StageFinished)] == [0, 1, 2]

    @pytest.mark.slow
    def test_several_at_once_in_a_process(self, gate):
        """From the command line: four go on at the same time, in two processes."""
        hold(*SEEDS)

        def watch():
            seen.update(wait_for(4))
            let_go()

        seen = {}
        watcher = threading.Thread(target=watch)
        watcher.start()
        result = ratp("study", "run", gate, *TRUSTED, "--out", "out", "--device", "cpu, cpu", "--jobs", 2)
        watcher.join()
        assert result.code == 0, result.err
        assert sorted(Counter(seen.values()).values()) == [2, 2]
        assert "5 of 5 runs to execute" in result.err
        assert results("out") == results("undisturbed")

    def test_single_run_stays_in_this_process(self, tmp_path, monkeypatch):
        monkeypatch.setattr(local, "WorkerLane", None)
        (record,) = run_all([Run(toy_plan(), tmp_path / "run")], devices=[CPU, CPU])
        assert record.matrix.complete

    def test_handmade_plan_stays_in_this_process(self, tmp_path):
        runs = [Run(replace(toy_plan(seed=seed), request=None), tmp_path / str(seed)) for seed in (1, 2)]
        reported = set()
        records = run_all(
            runs, devices=[CPU, CPU], at_once=1, on_event=lambda run, event: reported.add(threading.get_ident())
        )
        assert all(record.matrix.complete for record in records)
        assert reported == {threading.get_ident()}

    def test_places(self, tmp_path, monkeypatch):
        """No more lanes than runs, as many on each device; those on the processor share its cores."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
        runs = [Run(toy_plan(seed=seed), tmp_path / str(seed), wait=True) for seed in range(30)]

        def lanes(count, *devices, at_once=None):
            results = local._device_lanes(runs[:count], [torch.device(name) for name in devices], at_once)
            processes = [lane.worker for lane in results]
            return [list(map(id, processes)).count(id(p)) for p in {id(p): p for p in processes}.values()]

        assert lanes(30, "cuda:0", "cuda:1") == [8, 8]
        assert lanes(3, "cuda:0", "cuda:1") == [2, 1]
        assert lanes(2, "cuda:0", "cuda:1", "cuda:2") == [1, 1]
        assert lanes(30, "cuda:0", "cuda:0", at_once=3) == [3, 3]
        assert lanes(30, "cpu", "cpu") == [3, 3]
        assert lanes(30, "cuda:0", "cpu") == [8, 6]
        network = replace(runs[0].plan.recipe.network, backbone="timm:resnet18")
        runs[0].plan = replace(runs[0].plan, recipe=replace(runs[0].plan.recipe, network=network))
        assert lanes(30, "cuda:0", "cuda:1", at_once=4) == [1, 1]


class TestTrouble:
    @pytest.mark.slow
    @pytest.mark.faults(1, "if a process with several runs is killed, another one finishes them with the same results")
    def test_killed_process_is_replaced(self, gate):
        """Its two runs go on in another, and all end as if nothing had been."""
        hold(*SEEDS)

        def kill():
            pids = wait_for(4)
            killed.update(seed for seed, pid in pids.items() if pid == pids[1])
            os.kill(pids[1], signal.SIGKILL)
            let_go()

        killed = set()
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.warns(RetryWarning, match=r"ended unexpectedly \(signal 9\): another continues") as notes:
            ends = run_on_two(gate, at_once=2)
        killer.join()
        assert len(killed) == len(notes) == 2
        assert all(isinstance(ends[seed], RunRecord) for seed in SEEDS)
        assert results("out") == results("undisturbed")
        assert {seed for seed in SEEDS if resumed(ends[seed].path)} == killed

    @pytest.mark.slow
    def test_process_that_loses_its_device(self, gate):
        """The affected run reports why; a new process runs the next one and the others."""
        Path("gate.py").write_text(LOST)
        study = read_study(gate, Path("out"), RunRequest(device="cpu"), trust_methods=True)
        study.claim()
        mine = study.entries[4].folder
        write_files(mine, {"thesis.txt": b"mine"})
        hold(2)
        with pytest.warns(RetryWarning, match=r"exit code 1") as notes:
            ends = run_on_two(gate, at_once=1, on_end=lambda ends: let_go() if len(ends) == 4 else None)
        assert len(notes) == 1
        assert "the GPU has fallen off the bus" in str(ends[1])
        assert "thesis.txt" in str(ends[5])
        assert [seed for seed in SEEDS if isinstance(ends[seed], RunRecord)] == [2, 3, 4]
        assert files_of(mine) == {"thesis.txt": b"mine"}

    def test_failing_device_leaves_runs_to_others(self, tmp_path, monkeypatch):
        broken = [torch.device("cuda", 1)]

        class Doomed:
            def __init__(self, device, slots):
                self.device = device

            def events(self, run):
                if self.device.type in {device.type for device in broken}:
                    raise ProcessGoneError("signal 9")
                yield from run.events()

            def __enter__(self):
                pass

            def __exit__(self, *_):
                pass

        monkeypatch.setattr(local, "Worker", Doomed)
        runs = [Run(toy_plan("source-only", seed=seed), tmp_path / str(seed)) for seed in range(6)]
        with pytest.warns(RetryWarning) as notes:
            results = run_all(runs, devices=[CPU, *broken], at_once=1)
        assert all(isinstance(result, RunRecord) for result in results)
        assert len(notes) == local.MOST_DEATHS
        broken.append(CPU)
        ended = []
        with pytest.warns(RetryWarning) as notes:
            results = run_all(runs, devices=[CPU, CPU], at_once=1, on_end=lambda run, result: ended.append(result))
        assert len(notes) == 2 * local.MOST_DEATHS
        assert all("no process is left to execute" in str(result) for result in results)
        assert len([result for result in results if "ended unexpectedly (signal 9)" in str(result)]) == len(notes)
        assert len(ended) == 6

    def test_run_moves_to_a_working_device(self, tmp_path, monkeypatch):
        """The other has found nothing more to do by then."""
        others = threading.Event()

        class Doomed:
            def __init__(self, device, slots):
                self._broken = device.type == "cuda"

            def events(self, run):
                if self._broken:
                    assert others.wait(60)
                    raise ProcessGoneError("exit code 1")
                yield from run.events()

            def __enter__(self):
                pass

            def __exit__(self, *_):
                if not self._broken:
                    others.set()

        monkeypatch.setattr(local, "Worker", Doomed)
        runs = [Run(toy_plan("source-only", seed=seed), tmp_path / str(seed)) for seed in range(3)]
        with pytest.warns(RetryWarning):
            results = run_all(runs, devices=[CPU, torch.device("cuda", 1)], at_once=1)
        assert all(isinstance(result, RunRecord) for result in results)

    def test_run_that_kills_every_process_is_given_up(self, tmp_path, monkeypatch):
        """Every finished stage allows it as many deaths again."""

        class Doomed:
            def __init__(self, device, slots):
                pass

            def events(self, run):
                for event in run.events():
                    yield event
                    if run.plan.seed == 1 and isinstance(event, StageFinished) and event.stage < 2:
                        raise ProcessGoneError("signal 11")
                    if run.plan.seed == 2:
                        raise ProcessGoneError("signal 11")

            def __enter__(self):
                pass

            def __exit__(self, *_):
                pass

        monkeypatch.setattr(local, "Worker", Doomed)
        monkeypatch.setattr(local, "MOST_DEATHS", 100)
        monkeypatch.setattr(pool, "MOST_RETRIES", 1)
        runs = [Run(toy_plan(seed=seed), tmp_path / str(seed)) for seed in (1, 2, 3)]
        with pytest.warns(RetryWarning):
            first, second, third = run_all(runs, devices=[CPU, CPU], at_once=1)
        assert first.matrix.complete and third.matrix.complete
        assert [e["finished_stages"] for e in resumed(first.path)] == [1, 2]
        assert isinstance(second, ProcessGoneError) and "(signal 11)" in str(second)


def start(*words):
    """Starts the program in a separate process, which computes as these tests do."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ratp",
            "study",
            "run",
            *map(str, words),
            *TRUSTED,
            "--device",
            "cpu,cpu",
            "--jobs",
            "2",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
class TestInterruption:
    def test_all_runs_stop_at_a_step_and_resume(self, gate):
        hold(*SEEDS)
        process = start(gate, "--out", "out")
        try:
            workers = {*wait_for(4, process).values()}
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            let_go()
            _, output = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, output
        assert output.endswith("\nInterrupted. The same command continues from there.\n")
        assert "Traceback" not in output
        assert not alive(workers)
        assert not list(Path("out").glob("*/weights.safetensors"))
        assert not Path("out/failures").exists()
        again = ratp("study", "run", gate, *TRUSTED, "--out", "out", "--device", "cpu", "--jobs", "1", "-q")
        assert again.code == 0, again.err
        assert results("out") == results("undisturbed")
        returns = [len(resumed(file.parent)) for file in Path("out").glob("*/journal.jsonl")]
        assert sorted(returns) == [0, 1, 1, 1, 1]

    def test_workers_exit_when_the_program_is_killed(self, gate):
        hold(*SEEDS)
        process = start(gate, "--out", "out")
        try:
            workers = {*wait_for(4, process).values()}
        finally:
            process.kill()
            let_go()
            process.communicate()
        assert len(workers) == 2
        patience = time.monotonic() + 60
        while alive(workers):
            assert time.monotonic() < patience
            time.sleep(0.1)
        assert not list(Path("out").glob("*/weights.safetensors"))


@pytest.fixture
def _three_gpus(monkeypatch):
    """Of which the second is an old one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7, 0) if gpu.index == 1 else (9, 0))


@pytest.mark.usefixtures("_three_gpus")
class TestDevices:
    @pytest.mark.parametrize("names", ["cpu", "cuda:1", "abacus", ""])
    def test_single_device_is_left_to_the_plan(self, names):
        assert find_devices(names) == ()

    def test_a_list(self):
        assert find_devices("cuda:0, cuda:2") == (torch.device("cuda", 0), torch.device("cuda", 2))
        assert find_devices("cpu,cpu") == (CPU, CPU)
        assert find_devices("cuda:2,cuda:2") == (torch.device("cuda", 2),) * 2

    @pytest.mark.parametrize("names", ["auto", "cuda"])
    def test_all_gpus(self, names, monkeypatch):
        """But for those that would compute in another precision than the first."""
        gpus = [torch.device("cuda", index) for index in range(3)]
        assert find_devices(names, "fp32") == (*gpus,)
        assert find_devices(names) == (gpus[0], gpus[2])
        for count in (0, 1):
            monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
            assert find_devices(names) == ()

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ("cuda:0,cuda:7", ["device 'cuda:7' is not available: 3 CUDA device(s) found. Use cpu or auto."]),
            ("cpu,", ["the devices 'cpu,' have an empty place among them: name every one, e.g. cuda:0,cuda:1."]),
            (",", ["the devices ',' have an empty place among them: name every one, e.g. cuda:0,cuda:1."]),
            ("auto,cpu", ["the devices 'auto,cpu' have auto among them: name every one, e.g. cuda:0,cuda:1."]),
            ("gpu,gpu,cuda:9", ["unknown device 'gpu'. Did you mean 'cuda'?", "device 'cuda:9' is not available"]),
            ("cuda:0,cuda:1", ["cuda:0 in tf32 and cuda:1 in fp32: choose some of a kind, or --precision fp32."]),
        ],
    )
    def test_invalid_devices(self, names, expected):
        with pytest.raises(ConfigError) as caught:
            find_devices(names)
        assert len(caught.value.problems) == len(expected)
        for problem, part in zip(caught.value.problems, expected, strict=True):
            assert part in problem

    @pytest.mark.parametrize(
        ("shown", "names"), [(None, "0 2"), ("4,5,7", "4 7"), ("GPU-a, GPU-b, GPU-c", "GPU-a GPU-c")]
    )
    def test_process_sees_only_its_gpu(self, shown, names, monkeypatch):
        if shown:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert [process_module.visible(torch.device("cuda", index)) for index in (0, 2)] == names.split()


class TestMistakes:
    @pytest.mark.parametrize("words", [["run", "--seed", "1", "--seed", "2"], ["demo"], ["study", "run", "tiny.toml"]])
    @pytest.mark.parametrize("names", ["cpu,,cpu", "cpu,abacus", "cpu,cuda:99"])
    def test_mistakes_are_reported_before_start(self, words, names, gate):
        before = traces(Path())
        result = ratp(*words, "--device", names)
        assert (result.code, result.out) == (2, "")
        assert len(result.err.splitlines()) == 1
        assert result.err.startswith("error: ")
        assert traces(Path()) == before

    def test_a_cluster_has_its_own(self, gate):
        result = ratp("study", "run", gate, "--on", "ray", "--device", "cpu,cpu")
        assert result.code == 2
        assert "error: on a cluster Ray chooses the devices" in result.err


def test_steps_are_reported_periodically(monkeypatch):
    """No step is lost: unreported ones are counted in the next report."""
    now = iter([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(now))
    pace = worker._Pace()

    def trained(step, done=False):
        return Trained(0, "ink", Tick(None, 0, step, 10, dict, {}, done))

    begin = StageStarted(0, "ink", 40, 60)
    assert pace(begin) is begin
    passed = [pace(trained(step, done=step == 50)) for step in (10, 20, 30, 40, 50)]
    assert [(event.tick.step, event.tick.made) if event else None for event in passed] == [
        (10, 10), None, None, (40, 30), (50, 10),
    ]  # fmt: skip


# A method whose second stage breaks the GPU for its process.
BREAKS = """
import os
from pathlib import Path
import torch
from ratp.methods.shot import SHOT

class Breaks(SHOT):
    name = "breaks"

    def target_phases(self, domain):
        Path(f"made-{self.setting.randomness.seed}-{os.getpid()}").touch()
        if self.setting.randomness.seed == 1:
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()
        return super().target_phases(domain)
"""


@needs_gpu
class TestOnGPU:
    """Two processes on one."""

    def test_a_study(self, gate):
        assert ratp("study", "run", gate, *TRUSTED, "--out", "one", "--device", "cuda:0", "-q").code == 0
        for mark in Path().glob("made-*"):
            mark.unlink()
        result = ratp("study", "run", gate, *TRUSTED, "--out", "two", "--device", "cuda:0,cuda:0", "--jobs", "2")
        assert result.code == 0, result.err
        assert len({*makers().values()}) == 2
        assert {*results("two")} == {*results("one")}
        for file in Path("two").glob("*/environment.json"):
            assert '"device": "cuda"' in file.read_text()

    @pytest.mark.filterwarnings("ignore:the process of")
    def test_a_gpu_that_fails(self, gate):
        """All runs of its process fail too, and one says why; the others finish."""
        Path("gate.py").write_text(BREAKS)
        result = ratp("study", "run", gate, *TRUSTED, "--out", "out", "--device", "cuda:0,cuda:0", "--jobs", "1")
        assert result.code == 2
        assert "device-side assert" in "".join(file.read_text() for file in Path("out/failures").iterdir())
        assert len(list(Path("out").glob("*/weights.safetensors"))) >= 3
        assert not alive(makers().values())
