"""How runs share a GPU: chosen from the GPU and the networks; MPS is started and stopped, or done without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ratp.executors.local as local
import ratp.executors.mps as mps_module
from helpers import TINY, ratp, same_tensors, tensors_of
from own_images import image_files, write_files
from ratp.errors import ConfigError
from ratp.executors.layout import Gpu, Layout, choose
from ratp.executors.local import run_all
from ratp.executors.mps import MpsError, mps
from ratp.executors.pool import Pool, RetryWarning
from ratp.networks.network import NetworkConfig
from ratp.runs.events import StageStarted, Trained
from ratp.runs.plan import resolve
from ratp.runs.record import RunRecord
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.training.recipe import Recipe

H200 = Gpu("NVIDIA H200", 132, 140.0, 9)
T4 = Gpu("Tesla T4", 40, 15.0, 7)

# Stands for the control program: a daemon is a background process whose number it keeps, as the real one does.
CONTROL = """#!/bin/sh
pipes=${CUDA_MPS_PIPE_DIRECTORY:-none}
echo "$pipes $*" >> "$MPS_LOG"
case $MPS_ACTS in
  refuses) echo "Cannot start: insufficient permissions"; exit 1;;
  hangs) exec sleep 100;;
esac
if [ "$1" = -d ]; then
  sleep 1000 >/dev/null 2>&1 &
  echo $! > "$pipes/nvidia-cuda-mps-control.pid"; echo $! >> "$MPS_DAEMONS"; touch "$pipes/control"; exit 0
fi
read -r line
echo "$line" >> "$MPS_LOG"
[ -e "$pipes/nvidia-cuda-mps-control.pid" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
if [ "$line" = quit ] && [ "$MPS_ACTS" != stays ]; then
  kill "$(cat "$pipes/nvidia-cuda-mps-control.pid")"; rm "$pipes/nvidia-cuda-mps-control.pid"
fi
exit 0
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program on the path; no process can try a GPU here, so the trial does nothing."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    (tmp_path / "usual").mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("MPS_DAEMONS", str(tmp_path / "daemons"))
    monkeypatch.setenv("MPS_ACTS", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(mps_module, "_USUAL_PIPES", str(tmp_path / "usual"))
    monkeypatch.setattr(mps_module, "_TRY", "pass")
    monkeypatch.setattr(mps_module, "_ANSWER", 2.0)
    monkeypatch.setattr(mps_module, "_END", 1.0)
    yield tmp_path
    for daemon in alive(tmp_path):
        os.kill(daemon, signal.SIGKILL)


def alive(place):
    """The daemons that run."""
    started = (place / "daemons").read_text().split() if (place / "daemons").exists() else []
    return [int(pid) for pid in started if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:  # it has just gone
        return True


def all_end(place):
    """Whether no daemon runs any more, within some seconds: a killed one takes a moment."""
    deadline = time.monotonic() + 20
    while alive(place) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(place)


class TestMps:
    def test_started_in_a_private_folder_and_stopped(self, control):
        with mps("0") as environment:
            assert len(alive(control)) == 1
            folders = [Path(place) for place in environment.values()]
            assert all(folder.is_dir() for folder in folders)
        assert all_end(control)
        assert not any(folder.exists() for folder in folders)

    def test_stopped_after_an_error(self, control):
        with pytest.raises(KeyboardInterrupt), mps("0"):
            raise KeyboardInterrupt
        assert all_end(control)

    def test_stopped_by_force_if_it_ignores_the_request(self, control, monkeypatch):
        monkeypatch.setenv("MPS_ACTS", "stays")
        with mps("0"):
            assert alive(control)
        assert all_end(control)

    def test_stopped_if_the_program_is_killed(self, control):
        script = (
            "import time, ratp.executors.mps as m; m._TRY = 'pass'; m._USUAL_PIPES = '/nowhere'\n"
            "with m.mps('0'): print('ready', flush=True); time.sleep(100)"
        )
        program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert program.stdout.readline() == b"ready\n"
        assert alive(control)
        program.kill()
        program.communicate()
        patience = time.monotonic() + 10
        while alive(control):
            assert time.monotonic() < patience
            time.sleep(0.05)

    def test_a_running_daemon_is_used_and_left_alone(self, control, monkeypatch):
        usual = control / "usual"
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(usual))
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        with mps("0") as environment:
            assert environment == {}
        assert len(alive(control)) == 1

    def test_a_left_over_pipe_is_no_daemon(self, control):
        (control / "usual" / "control").touch()
        with mps("0") as environment:
            assert environment
        assert all_end(control)

    @pytest.mark.parametrize(
        ("acts", "why"),
        [("refuses", "Cannot start: insufficient permissions"), ("hangs", "does not answer within 2 s")],
    )
    def test_refused(self, control, monkeypatch, acts, why):
        monkeypatch.setenv("MPS_ACTS", acts)
        with pytest.raises(MpsError, match=why), mps("0"):
            pytest.fail("it did not start")
        assert all_end(control)

    def test_of_another_user(self, control, monkeypatch):
        (control / "usual" / "control").touch()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        os.chown(control / "usual" / "control", 54321, -1) if os.geteuid() == 0 else None
        with pytest.raises(MpsError, match="another user"), mps("0"):
            pytest.fail("it is not ours")

    def test_a_process_that_cannot_use_it(self, control, monkeypatch):
        monkeypatch.setattr(mps_module, "_TRY", "import sys; sys.exit('CUDA error 805')")
        with pytest.raises(MpsError, match=r"a process cannot use the GPU under it \(CUDA error 805\)"), mps("0"):
            pytest.fail("no process can use it")
        assert all_end(control)

    def test_not_installed(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MpsError, match="nvidia-cuda-mps-control is not installed"), mps("0"):
            pytest.fail("there is none")


def plans_with(count=10, request="yes", epochs=30, order="abcde", **recipe):
    network = NetworkConfig(recipe.pop("backbone", "dtn"))
    return [
        SimpleNamespace(recipe=Recipe(network=network, epochs=epochs, **recipe), request=request, order=order)
    ] * count


class TestChoice:
    @pytest.fixture(autouse=True)
    def sixteen_cores(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)

    @pytest.mark.parametrize(
        ("runs", "gpu", "way", "count"),
        [
            (plans_with(10), H200, "mps", 10),
            (plans_with(60), H200, "mps", 14),
            (plans_with(60), T4, "mps", 4),
            (plans_with(60), replace(H200, gib=11.0), "mps", 3),
            (plans_with(60), replace(H200, major=6), "threads", 8),
            (plans_with(60, epochs=1), H200, "threads", 8),
            (plans_with(60, request=None), H200, "threads", 8),
            (plans_with(10, backbone="resnet50", size=224), H200, "off", 1),
            (plans_with(10, backbone="timm:resnet18", size=64), H200, "off", 1),
            (plans_with(10, backbone="resnet18", size=64), H200, "mps", 2),
        ],
    )
    def test_by_gpu_networks_and_runs(self, runs, gpu, way, count):
        layout = choose(runs, gpu)
        assert (layout.way, layout.count) == (way, count)
        assert layout.text.startswith("side by side: ")

    def test_cores(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
        assert choose(plans_with(60), H200).count == 3

    def test_as_requested(self):
        large = plans_with(10, backbone="resnet50", size=224)
        for way, at_once, expected in (
            ("off", None, ("off", 1)),
            ("auto", 1, ("off", 1)),
            ("auto", 5, ("mps", 5)),
            ("threads", None, ("threads", 8)),
            ("processes", None, ("processes", 10)),
            ("mps", 4, ("mps", 4)),
        ):
            layout = choose(plans_with(10), H200, way, at_once)
            assert (layout.way, layout.count) == expected
        assert choose(large, H200, "mps").count == 2

    def test_without_mps(self):
        assert choose(plans_with(10), H200).without_mps("it is off").text == (
            "side by side: 8 threads of one process: no MPS: it is off"
        )
        assert choose(plans_with(10), H200, "mps").without_mps("it is off").way == "processes"

    def test_apple_gpu_takes_one_run_at_a_time(self):
        plans = [SimpleNamespace(device=torch.device("mps"))] * 3
        for way, at_once in (("auto", None), ("auto", 4), ("off", None)):
            assert local.find_layout(plans, (), at_once, way).count == 1
        assert local.find_layout(plans[:1], (), None) is None
        with pytest.raises(ConfigError, match="--side-by-side threads needs an NVIDIA GPU; an Apple GPU takes one run"):
            local.find_layout(plans, (), None, "threads")

    def test_mistakes(self, tmp_path):
        with pytest.raises(ConfigError, match="Did you mean 'threads'"):
            run_all([], side_by_side="thread")
        result = ratp("run", "demo", "--side-by-side", "treads", "--seed", "x", "--out", tmp_path / "out")
        assert result.code == 2
        assert "Did you mean 'threads'" in result.err and "seed" in result.err
        for wrong in ("mps", "threads"):
            result = ratp("run", "demo", "--device", "cpu", "--side-by-side", wrong, "--out", tmp_path / "out", "-q")
            assert result.code == 2
            assert f"--side-by-side {wrong} needs a GPU" in result.err
        assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for seed, name in enumerate(("ink", "mud", "fog")):
        write_files(folder / name, image_files(count=6, seed=seed))
    return folder


@pytest.fixture
def plan_of(pictures):
    def make(method="source-only", seed=1, **changes):
        sizes = {**TINY, "network.backbone": "dtn", "size": 32, **changes}
        return resolve(
            RunRequest(str(pictures), method, "ink>mud>fog", seed=seed, changes=sizes, device="cpu", weights="none")
        )

    return make


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Runs on the processor choose as on a GPU."""
    monkeypatch.setattr(local, "find_layout", lambda *_: Layout("mps", 2, "small networks"))


def same_results(runs, folder):
    for run in runs:
        Run(run.plan, folder / run.folder.name).execute()
        for name in ("state", "weights"):
            assert same_tensors(tensors_of(run.folder, name), tensors_of(folder / run.folder.name, name))


class TestProcessesUnderMps:
    """With processes on the processor, and a stand-in for MPS."""

    @pytest.mark.slow
    def test_results_equal_single_runs(self, control, as_on_a_gpu, plan_of, tmp_path):
        seen, layouts = set(), []

        def listen(run, event):
            seen.update(alive(control))
            assert not run.__dict__.keys() & {"_untrained"}

        runs = [Run(plan_of(seed=seed), tmp_path / "at-once" / str(seed)) for seed in (1, 2, 3)]
        results = run_all(runs, on_event=listen, on_layout=layouts.append)
        assert all(isinstance(result, RunRecord) for result in results)
        assert [layout.text for layout in layouts] == ["side by side: 2 processes under MPS: small networks"]
        assert len(seen) == 1 and not alive(control)
        same_results(runs[:2], tmp_path / "alone")

    @pytest.mark.slow
    def test_without_mps_runs_are_the_same(self, control, as_on_a_gpu, plan_of, tmp_path, monkeypatch):
        monkeypatch.setenv("MPS_ACTS", "refuses")
        layouts = []
        runs = [Run(plan_of(seed=seed), tmp_path / str(seed)) for seed in (1, 2)]
        results = run_all(runs, on_layout=layouts.append)
        assert all(isinstance(result, RunRecord) for result in results)
        assert "no MPS: Cannot start" in layouts[0].text

    @pytest.mark.slow
    def test_stopped_with_the_runs(self, control, as_on_a_gpu, plan_of, tmp_path):
        def listen(run, event):
            if isinstance(event, Trained):
                raise KeyboardInterrupt

        runs = [Run(plan_of(seed=seed, epochs=200), tmp_path / str(seed)) for seed in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            run_all(runs, on_event=listen)
        assert all_end(control)

    @pytest.mark.slow
    def test_process_that_dies_is_replaced_by_one_without_mps(self, control, as_on_a_gpu, plan_of, tmp_path):
        killed = []

        def listen(run, event):
            if isinstance(event, Trained) and not killed:
                killed.extend(workers())
                for pid in killed:
                    assert b"CUDA_MPS_PIPE_DIRECTORY" in Path(f"/proc/{pid}/environ").read_bytes()
                    os.kill(pid, signal.SIGKILL)
            elif killed:
                for pid in set(workers()) - {*killed}:
                    assert b"CUDA_MPS_PIPE_DIRECTORY" not in Path(f"/proc/{pid}/environ").read_bytes()

        runs = [Run(plan_of(seed=seed, steps=50), tmp_path / "at-once" / str(seed)) for seed in (1, 2)]
        with pytest.warns(RetryWarning):
            results = run_all(runs, on_event=listen)
        assert all(isinstance(result, RunRecord) for result in results)
        same_results(runs, tmp_path / "alone")


def workers():
    command = ["pgrep", "-P", str(os.getpid()), "-f", "executors.worker"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, check=False).stdout.split()]


class TestSharedSources:
    def test_runs_with_other_sources_go_first(self):
        """Unless they train every source themselves."""

        def run(seed, reuse_source=True):
            plan = SimpleNamespace(spec=SimpleNamespace(name="toy"), order="abc", seed=seed)
            return SimpleNamespace(plan=plan, options=SimpleNamespace(reuse_source=reuse_source))

        assert Pool([run(seed) for seed in (1, 1, 1, 2, 2, 3)], None, None)._spread(range(6)) == [0, 3, 5, 1, 4, 2]
        assert Pool([run(seed, False) for seed in (1, 1, 2)], None, None)._spread(range(3)) == [0, 1, 2]

    def test_waiting_run_gives_up_its_place(self, plan_of, tmp_path, monkeypatch):
        """Another program trains its source, and it has one place with a run that need not wait."""
        monkeypatch.setenv("RATP_CACHE", str(tmp_path / "cache"))
        begun = []
        first = Run(plan_of(steps=40), tmp_path / "first", reuse_source=True).events()
        next(event for event in first if isinstance(event, Trained))

        def listen(run, event):
            if isinstance(event, StageStarted) and event.stage == 0:
                begun.append(run.folder.name)
                first.close()

        runs = [Run(plan_of(seed=seed, steps=40), tmp_path / str(seed), reuse_source=True) for seed in (1, 2)]
        monkeypatch.setattr(local, "_lanes", lambda *_: [HereLane()])
        results = run_all(runs, on_event=listen)
        assert begun == ["2", "1"]
        assert all(isinstance(result, RunRecord) for result in results)


class HereLane(local.Lane):
    """A lane in this process."""

    def events(self, run):
        yield from run.events()
