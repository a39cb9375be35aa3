"""Executes runs side by side on this machine, so that small networks fill a GPU, or all cores of a CPU.

On a GPU runs share the device as :mod:`ratp.executors.layout` chooses: each has its own process, or its own thread and
streams. On a CPU every run has a process that computes with one thread. Of several devices, each has processes that see
only that device. No run affects another's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from ratp._core.environment import usable_cores
from ratp.errors import ConfigError
from ratp.executors.lanes import Lane, stream_lanes
from ratp.executors.layout import Gpu, Layout, check_way, choose, most_in_process, threads_by_default
from ratp.executors.mps import MpsError, mps
from ratp.executors.pool import Listener, Pool, Result
from ratp.executors.process import ProcessGoneError, Worker, visible
from ratp.runs.events import Event
from ratp.runs.plan import RunPlan
from ratp.runs.run import Run

# Deaths in a row after which a lane of one of several devices gives up and leaves its runs to the others.
MOST_DEATHS = 2
_APPLE = "an Apple GPU takes one run at a time"


def run_all(
    runs: Sequence[Run],
    *,
    devices: Sequence[torch.device] = (),
    at_once: int | None = None,
    side_by_side: str = "auto",
    one_thread: bool = False,
    on_layout: Callable[[Layout], None] | None = None,
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
        at_once: How many at the same time on each device: by default one per core, and on a GPU as many as its size
            and the networks allow. With 1, runs follow one another in this thread, unless devices are given.
        side_by_side: How runs share a GPU: ``threads`` of one process, ``processes``, processes under ``mps``, ``off``
            (one after another), or ``auto``.
        one_thread: Whether runs on a CPU compute with one thread even if they follow one another, so that the result
            does not depend on how many run at once; otherwise such runs use all threads.
        on_layout: Called with the way in which runs share a GPU.
        on_event: Called with every event of every run, by one thread at a time; other processes send events about
            steps a few times per second. What it raises stops all runs.
        on_end: Called with the result of every run, likewise; the run then drops its images and networks.

    Returns:
        For every run its record, or the error that ended it.
    """
    check_at_once(at_once)
    check_way(side_by_side)
    pool = Pool(runs, on_event, on_end)
    devices = devices if len(runs) > 1 else ()
    for group in _groups(runs):
        members = [runs[index] for index in group]
        layout = find_layout([run.plan for run in members], devices, at_once, side_by_side)
        places = devices or [members[0].plan.device]
        with _started(layout, places, on_layout) as (layout, environment):
            if devices or (layout and layout.has_processes):
                for run in members:
                    run.forget(images=False)  # networks are built where they are trained
                torch.cuda.empty_cache()
            at_most = layout.count if layout else at_once
            if layout and layout.has_processes:
                lanes: Sequence[Lane] = _process_lanes(places, layout.count, len(members), environment)
            else:
                lanes = _device_lanes(members, devices, at_most) if devices else _lanes(members, at_most, one_thread)
            if lanes:
                pool.at_once(group, lanes)
            else:
                pool.in_turn(group)
    return pool.results()


def find_layout(
    plans: Sequence[RunPlan], devices: Sequence[torch.device], at_once: int | None, side_by_side: str = "auto"
) -> Layout | None:
    """How some runs share their GPU; None on a CPU, for a single run, and for devices whose processes are listed."""
    check_way(side_by_side)
    if not plans:
        return None
    if plans[0].device.type == "mps" and not devices:
        if side_by_side not in ("auto", "off"):
            raise ConfigError(
                f"--side-by-side {side_by_side} needs an NVIDIA GPU; an Apple GPU takes one run at a time."
            )
        return Layout("off", 1, "an Apple GPU takes one run at a time") if len(plans) > 1 else None
    gpus = [device for device in (devices or [plans[0].device]) if device.type == "cuda"]
    if not gpus:
        if side_by_side not in ("auto", "off", "processes"):
            raise ConfigError(f"--side-by-side {side_by_side} needs a GPU; on a CPU each run has its own process.")
        return Layout("off", 1, "as requested") if side_by_side == "off" else None
    most = max(Counter(devices).values(), default=1)
    if len(plans) == 1 or (side_by_side == "auto" and (most > 1 or len(gpus) < len(devices))):
        return None
    return choose(plans, Gpu.of(gpus[0]), side_by_side, most if most > 1 and side_by_side != "threads" else at_once)


@contextmanager
def _started(
    layout: Layout | None, devices: Sequence[torch.device], on_layout: Callable[[Layout], None] | None
) -> Iterator[tuple[Layout | None, Mapping[str, str]]]:
    """Starts MPS for the block if the layout needs it; yields the layout that is possible, and an environment."""
    environment: Mapping[str, str] = {}
    with ExitStack() as stack:
        if layout is not None and layout.way == "mps":
            try:
                environment = stack.enter_context(mps(visible(devices[0])))
            except MpsError as error:
                layout = layout.without_mps(str(error))
        if layout is not None and on_layout is not None:
            on_layout(layout)
        yield layout, environment


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
    if device.type == "cpu":  # the number of threads affects the last bits, so it depends only on what was requested
        is_alone = (at_once or count) == 1 and not one_thread
        return [] if is_alone else [WorkerLane(Worker(device)) for _ in range(count)]
    count = min(count, most_in_process([run.plan for run in runs]))
    if count == 1:
        return []
    torch.cuda.synchronize(device)  # what was built so far was built on another stream
    return stream_lanes(device, count)


def _device_lanes(runs: Sequence[Run], devices: Sequence[torch.device], at_once: int | None) -> list[WorkerLane]:
    """Lanes on several devices: one of each in turn, until each has its share or there are enough."""
    cpus = sum(device.type == "cpu" for device in devices)  # entries for the CPU share its cores
    shares = [max(default_at_once(runs, d) // (cpus if d.type == "cpu" else 1), 1) for d in devices]
    counts = [min(at_once or share, most_in_process([run.plan for run in runs])) for share in shares]
    places = [k for turn in range(max(counts)) for k, count in enumerate(counts) if turn < count][: len(runs)]
    workers = {k: Worker(devices[k], slots) for k, slots in Counter(places).items()}
    return [WorkerLane(workers[k], MOST_DEATHS) for k in places]


def _process_lanes(
    devices: Sequence[torch.device], count: int, most: int, environment: Mapping[str, str]
) -> list[WorkerLane]:
    """At most ``most`` lanes with a process each: ``count`` on every device, or those that are listed."""
    is_listed = len({*devices}) < len(devices)
    places = devices if is_listed else [device for _ in range(count) for device in devices]
    return [WorkerLane(Worker(device, environment=environment), MOST_DEATHS) for device in places[:most]]


def check_at_once(at_once: int | None) -> None:
    """Raises a ConfigError unless ``at_once`` is a positive number or None."""
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise ConfigError(f"the number of runs at a time must be a whole number, 1 or more, got {at_once!r}; e.g. 4.")


def default_at_once(runs: Sequence[Run], device: torch.device) -> int:
    """How many runs to execute at once: one per core; on a GPU, several threads if their networks are small."""
    return threads_by_default([run.plan for run in runs]) if device.type == "cuda" else usable_cores()


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of runs of one device and precision: the precision is partly a setting of the whole process."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((str(run.plan.device), run.plan.precision), []).append(index)
    return list(groups.values())
