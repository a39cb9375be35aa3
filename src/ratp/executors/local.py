"""Executes runs side by side on this machine, so that small networks fill a GPU, or all cores of a CPU.

On a GPU every run has its own thread and streams: a training step is one replay of a graph, which hardly needs the
interpreter. On a CPU every run has a process that computes with one thread. Several devices have a process each, which
sees only that device, because recording a graph stalls all runs of its process. No run affects another's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence

import torch

from ratp._core.environment import usable_cores
from ratp.errors import ConfigError
from ratp.executors.lanes import Lane, stream_lanes
from ratp.executors.pool import Listener, Pool, Result
from ratp.executors.process import ProcessGoneError, Worker
from ratp.networks.backbones import TIMM
from ratp.runs.events import Event
from ratp.runs.run import Run

# Torch has 32 streams per device, and a run needs two.
MOST_ON_GPU = 15
# Default for runs of small networks that share a GPU; large networks fill it alone.
SMALL_ON_GPU = 8
# Deaths in a row after which a lane of one of several devices gives up and leaves its runs to the others.
MOST_DEATHS = 2


def run_all(
    runs: Sequence[Run],
    *,
    devices: Sequence[torch.device] = (),
    at_once: int | None = None,
    one_thread: bool = False,
    on_event: Listener | None = None,
    on_end: Callable[[Run, Result], None] | None = None,
) -> list[Result]:
    """Executes or continues all runs, several at once.

    A failing run does not stop the others. A run whose process dies continues in another, at most three times within a
    stage. Ctrl-C stops all runs at their next step, and the same call continues them.

    Args:
        runs: What to run, each with its own directory.
        devices: Several devices to share the runs (:func:`ratp._core.environment.find_devices`); one that occurs twice
            has two processes. By default each run's own device. A single run always executes here, on its own device.
        at_once: How many at the same time on each device: by default one per core, and on a GPU eight with DTN, one
            with larger networks. With 1, runs follow one another in this thread, unless devices are given.
        one_thread: Whether runs on a CPU compute with one thread even if they follow one another, so that the result
            does not depend on how many run at once; otherwise such runs use all threads.
        on_event: Called with every event of every run, by one thread at a time; other processes send events about
            steps a few times per second. What it raises stops all runs.
        on_end: Called with the result of every run, likewise; the run then drops its images and networks.

    Returns:
        For every run its record, or the error that ended it.
    """
    check_at_once(at_once)
    pool = Pool(runs, on_event, on_end)
    shared = bool(devices) and len(runs) > 1
    if shared:
        for run in runs:
            run.forget(images=False)  # networks are built where they are trained
        torch.cuda.empty_cache()
    for group in _groups(runs):
        members = [runs[index] for index in group]
        lanes = _device_lanes(members, devices, at_once) if shared else _lanes(members, at_once, one_thread)
        if lanes:
            pool.at_once(group, lanes)
        else:
            pool.in_turn(group)
    return pool.results()


class WorkerLane(Lane):
    """Executes runs in a worker process, which other lanes may share."""

    def __init__(self, worker: Worker, most_deaths: float = float("inf")) -> None:
        self.worker = self.held = worker
        self._most_deaths, self._deaths = most_deaths, 0

    def events(self, run: Run) -> Generator[Event, None, None]:
        """Like :meth:`ratp.executors.worker.Worker.events`."""
        try:
            yield from self.worker.events(run)
            self._deaths = 0
        except ProcessGoneError:
            self._deaths += 1
            self.gave_up = self._deaths >= self._most_deaths
            raise


def _lanes(runs: Sequence[Run], at_once: int | None, one_thread: bool) -> Sequence[Lane]:
    """Lanes for runs on one device; none if they follow one another in this thread."""
    device = runs[0].plan.device
    count = min(len(runs), at_once or default_at_once(runs, device))
    if device.type != "cuda":  # the number of threads affects the last bits, so it depends only on what was requested
        is_alone = (at_once or count) == 1 and not one_thread
        return [] if is_alone else [WorkerLane(Worker(device)) for _ in range(count)]
    count = min(count, most_in_process(runs))
    if count == 1:
        return []
    torch.cuda.synchronize(device)  # what was built so far was built on another stream
    return stream_lanes(device, count)


def _device_lanes(runs: Sequence[Run], devices: Sequence[torch.device], at_once: int | None) -> list[WorkerLane]:
    """Lanes on several devices: one of each in turn, until each has its share or there are enough."""
    cpus = sum(device.type == "cpu" for device in devices)  # entries for the CPU share its cores
    shares = [max(default_at_once(runs, d) // (cpus if d.type == "cpu" else 1), 1) for d in devices]
    counts = [min(at_once or share, most_in_process(runs)) for share in shares]
    places = [k for turn in range(max(counts)) for k, count in enumerate(counts) if turn < count][: len(runs)]
    workers = {k: Worker(devices[k], slots) for k, slots in Counter(places).items()}
    return [WorkerLane(workers[k], MOST_DEATHS) for k in places]


def check_at_once(at_once: int | None) -> None:
    """Raises a ConfigError unless ``at_once`` is a positive number or None."""
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise ConfigError(f"the number of runs at a time must be a whole number, 1 or more, got {at_once!r}; e.g. 4.")


def default_at_once(runs: Sequence[Run], device: torch.device) -> int:
    """How many runs to execute at once: one per core; on a GPU, several if their networks are small."""
    if device.type != "cuda":
        return usable_cores()
    return SMALL_ON_GPU if all(run.plan.recipe.network.backbone == "dtn" for run in runs) else 1


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of runs of one device and precision: the precision is partly a setting of the whole process."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((str(run.plan.device), run.plan.precision), []).append(index)
    return list(groups.values())


def most_in_process(runs: Sequence[Run]) -> int:
    """How many of these runs may share a process: one if their layers may use the process's default generator."""
    return 1 if any(run.plan.recipe.network.backbone.startswith(TIMM) for run in runs) else MOST_ON_GPU
