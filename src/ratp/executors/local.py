"""Runs side by side on this machine, so that small networks fill a GPU, or all cores of a CPU.

On a GPU every run has a thread and streams of its own: a training step is one replay of a graph, which hardly needs the
interpreter. On a CPU every run has a process that computes with one thread. With several devices, each has a process
that sees no other, because recording a graph stalls all runs of its process. No run sees another: each gives what it
gives alone.
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
    """Makes or continues all runs, several at once.

    A failing run does not stop the others. A run whose process dies continues in another, at most three times within a
    stage. Ctrl-C stops all runs at their next step, and the same call continues them.

    Args:
        runs: What to run, each with a directory of its own.
        devices: Several devices to share the runs (:func:`ratp._core.environment.find_devices`); one that occurs twice
            has two processes. By default each run's own device. A run alone is made here, on its own.
        at_once: How many at the same time on each device: by default as many as cores, on a GPU eight with DTN and one
            with larger networks. With 1, runs follow one another in this thread, unless devices are given.
        one_thread: Whether runs on a CPU compute with one thread however many there are, so that each ends with the
            same bits whatever is made beside it; otherwise those that follow one another in this thread use all.
        on_event: Called with every event of every run, by one thread at a time; events about steps come a few times a
            second from other processes. What it raises stops all runs.
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
    """Makes runs in a worker process, which other lanes may share."""

    def __init__(self, worker: Worker, most_deaths: float = float("inf")) -> None:
        self.worker, self._most_deaths = worker, most_deaths
        self._deaths = 0

    @property
    def gave_up(self) -> bool:  # type: ignore[override]
        """Whether too many of its processes died in a row."""
        return self._deaths >= self._most_deaths

    def events(self, run: Run) -> Generator[Event, None, None]:
        """Like :meth:`ratp.executors.worker.Worker.events`."""
        try:
            yield from self.worker.events(run)
            self._deaths = 0
        except ProcessGoneError:
            self._deaths += 1
            raise

    def __enter__(self) -> None:
        """Joins the users of the worker."""
        self.worker.__enter__()

    def __exit__(self, *_: object) -> None:
        """Leaves them; the last ends the process."""
        self.worker.__exit__()


def _lanes(runs: Sequence[Run], at_once: int | None, one_thread: bool) -> Sequence[Lane]:
    """Lanes for runs on one device; none if they follow one another in this thread."""
    device = runs[0].plan.device
    count = min(len(runs), at_once or default_at_once(runs, device))
    if device.type != "cuda":  # the number of threads decides the last bits, so it depends only on what was asked for
        is_alone = (at_once or count) == 1 and not one_thread
        return [] if is_alone else [WorkerLane(Worker(device)) for _ in range(count)]
    count = min(count, most_in_process(runs))
    if count == 1:
        return []
    torch.cuda.synchronize(device)  # what was built so far was built on another stream
    return stream_lanes(device, count)


def _device_lanes(runs: Sequence[Run], devices: Sequence[torch.device], at_once: int | None) -> list[WorkerLane]:
    """Lanes on several devices: one of each in turn, until each has its share or there are enough."""
    counts = [min(at_once or _share(runs, device, devices), most_in_process(runs)) for device in devices]
    places = [k for turn in range(max(counts)) for k, count in enumerate(counts) if turn < count][: len(runs)]
    workers = {k: Worker(devices[k], slots) for k, slots in Counter(places).items()}
    return [WorkerLane(workers[k], MOST_DEATHS) for k in places]


def _share(runs: Sequence[Run], device: torch.device, devices: Sequence[torch.device]) -> int:
    """How many runs to make at once on one of several devices; entries for the CPU share its cores."""
    alike = sum(other.type == "cpu" for other in devices) if device.type == "cpu" else 1
    return max(default_at_once(runs, device) // alike, 1)


def check_at_once(at_once: int | None) -> None:
    """Raises a ConfigError unless ``at_once`` is a positive number or None."""
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise ConfigError(f"at least one run must go on at a time, got {at_once!r}; e.g. 4.")


def default_at_once(runs: Sequence[Run], device: torch.device) -> int:
    """How many runs to make at once: as many as cores; on a GPU, several if their networks are small."""
    if device.type == "cuda":
        return SMALL_ON_GPU if all(run.plan.recipe.network.backbone == "dtn" for run in runs) else 1
    return usable_cores()


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of runs of one device and precision: the precision is partly a setting of the whole process."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((str(run.plan.device), run.plan.precision), []).append(index)
    return list(groups.values())


def most_in_process(runs: Sequence[Run]) -> int:
    """How many of these runs may share a process: one if layers may draw from its default generator."""
    return 1 if any(run.plan.recipe.network.backbone.startswith(TIMM) for run in runs) else MOST_ON_GPU
