"""Runs on several devices of this machine, all GPUs say, with a process for each.

Runs of one GPU share a process: their steps are replays of graphs, and they go on side by side as in
:mod:`ratp.side_by_side`. Recording a graph stalls all runs of its process, so another GPU has another one. It sees that
GPU only and knows it as ``cuda``. Whoever is free takes the next run.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ratp.capture import RECORDING
from ratp.errors import ConfigError, RatpError
from ratp.events import Event, Trained
from ratp.notes import print_plainly
from ratp.plan import find_device
from ratp.precision import find_precision
from ratp.run import Run
from ratp.run_messages import same_run
from ratp.run_process import ONE_THREAD, Process, ProcessGoneError, RunProcess, answer, let_end, start_process
from ratp.side_by_side import (
    EventsOf,
    Lane,
    Listener,
    Result,
    check_at_once,
    make_all,
    memory_error,
    most_in_process,
    run_all,
    stream_lanes,
    usual_at_once,
)

# Of processes in a row under one lane; then it takes no more runs, and they are left to other devices.
MOST_DEATHS = 2
# Between two events about steps of a run: to read a loss makes a GPU wait.
SECONDS_BETWEEN_STEPS = 0.25
_ALL = ("auto", "cuda")
# Of a process: its device does nothing more for it.
_lost = threading.Event()


def find_devices(names: str, precision: str = "auto") -> tuple[torch.device, ...]:
    """The devices asked for, if they are several.

    Args:
        names: Devices separated by commas, of which one may occur twice. ``auto`` or ``cuda`` alone: all GPUs that
            compute in the precision of the first.
        precision: The precision asked for.

    Returns:
        The devices; none if it is one, which is the plan's.

    Raises:
        ConfigError: If one of them does not exist here, or they differ in precision.
    """
    if "," not in names:
        return _all_gpus(precision) if names in _ALL else ()
    devices: list[torch.device] = []
    problems: list[str] = []
    for name in names.split(","):
        try:
            devices.append(_one_of_several(name.strip(), names))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    precisions = {find_precision(precision, device): device for device in devices}
    if len(precisions) > 1:
        differing = " and ".join(f"{device} in {name}" for name, device in precisions.items())
        raise ConfigError(f"the devices differ, {differing}: choose some of a kind, or --precision fp32.")
    return tuple(devices)


def _one_of_several(name: str, names: str) -> torch.device:
    if name in ("", "auto"):
        what = "auto" if name else "an empty place"
        raise ConfigError(f"the devices {names!r} have {what} among them: name every one, e.g. cuda:0,cuda:1.")
    return find_device(name)


def _all_gpus(precision: str) -> tuple[torch.device, ...]:
    """All GPUs that compute as the first does, if they are several."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    alike = [gpu for gpu in gpus if find_precision(precision, gpu) == find_precision(precision, gpus[0])]
    return tuple(alike) if len(alike) > 1 else ()


def run_all_on_devices(
    runs: Sequence[Run],
    *,
    devices: Sequence[torch.device],
    at_once: int | None = None,
    one_thread: bool = False,
    on_event: Listener | None = None,
    on_end: Callable[[Run, Result], None] | None = None,
) -> list[Result]:
    """Makes all runs, or continues them, on several devices; one run alone is made here, on the device of its plan.

    As :func:`ratp.side_by_side.run_all`. The runs of a process that dies go on in a new one, or on another device; once
    that has died, too, the device gets no more.

    Args:
        runs: What to run, each with a directory of its own.
        devices: Where; one that occurs twice has two processes.
        at_once: How many at the same time on each device; by default as many as on one device, where those that are the
            processor share its cores.
        one_thread: As for ``run_all``; of several runs, each has one thread anyway.
        on_event: As for ``run_all``; steps are told of a few times a second, as one event.
        on_end: As for ``run_all``.

    Returns:
        For every run its record, or the error that ended it.

    Raises:
        ConfigError: If ``at_once`` is no number of runs.
    """
    check_at_once(at_once)
    if len(runs) < 2:
        return run_all(runs, at_once=at_once, one_thread=one_thread, on_event=on_event, on_end=on_end)
    for run in runs:
        run.forget(images=False)  # networks are built where they are trained
    torch.cuda.empty_cache()
    return make_all(runs, partial(_lanes, devices=devices, at_once=at_once), on_event, on_end)


def _lanes(runs: Sequence[Run], devices: Sequence[torch.device], at_once: int | None) -> list[Lane]:
    """Lanes in processes for the devices: one of each in turn, until each has all it takes or there are enough."""
    counts = [min(at_once or _share(runs, device, devices), most_in_process(runs)) for device in devices]
    places = [k for turn in range(max(counts)) for k, count in enumerate(counts) if turn < count][: len(runs)]
    processes = {k: _DeviceProcess(devices[k], count) for k, count in Counter(places).items()}
    return [_DeviceLane(processes[k]) for k in places]


def _share(runs: Sequence[Run], device: torch.device, devices: Sequence[torch.device]) -> int:
    """How many runs to make at once on a device among others."""
    beside = sum(other.type == "cpu" for other in devices) if device.type == "cpu" else 1
    return max(usual_at_once(runs, device) // beside, 1)


class _DeviceProcess:
    """A process for a device, with some lanes. It is started for the first that joins, and ends with the last."""

    def __init__(self, device: torch.device, lanes: int) -> None:
        self.device = torch.device(device.type)  # as it is called there
        self._settings = {"device": device.type, "lanes": lanes}
        self._environment = {"CUDA_VISIBLE_DEVICES": _shown(device)} if device.type == "cuda" else ONE_THREAD
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._door: socket.socket | None = None
        self._joined = 0

    def join(self) -> tuple[Process, socket.socket]:
        """The process, a new one if the last has died, and a socket to a thread of it."""
        with self._lock:
            if self._process is None or self._door is None or self._process.poll() is not None:
                self._close_door()
                self._process, self._door = start_process(__name__, self._settings, self._environment)
            ours, theirs = socket.socketpair()
            with theirs, suppress(OSError):  # where it has died a moment ago, nobody answers
                socket.send_fds(self._door, [b"."], [theirs.fileno()])
            self._joined += 1
            return self._process, ours

    def leave(self) -> None:
        """Counts one less; without any, the process ends."""
        with self._lock:
            self._joined -= 1
            if self._joined == 0 and self._process is not None:
                self._close_door()
                let_end(self._process)
                self._process = None

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None


def _shown(device: torch.device) -> str:
    """What the environment calls a GPU: some may be hidden from this process."""
    shown, index = os.environ.get("CUDA_VISIBLE_DEVICES"), device.index or 0
    return shown.split(",")[index].strip() if shown else str(index)


class _DeviceLane:
    """Makes runs in a thread of a device's process, one after another."""

    def __init__(self, process: _DeviceProcess) -> None:
        self._runs = RunProcess(process, process.device)
        self._deaths = 0

    @property
    def gave_up(self) -> bool:
        return self._deaths >= MOST_DEATHS

    def events(self, run: Run) -> Generator[Event, None, None]:
        try:
            yield from self._runs.events(run)
            self._deaths = 0
        except ProcessGoneError:
            self._deaths += 1
            raise

    def close(self) -> None:
        self._runs.close()


def serve(channel: int, device: str, lanes: int) -> None:
    """Makes runs, in a thread for every socket that comes over another, until all are closed at the other end.

    Args:
        channel: The socket over which the others come.
        device: What to compute on.
        lanes: How many others there are at most.
    """
    print_plainly()
    place = torch.device(device)
    if device == "cpu":
        torch.set_num_threads(1)
    free: queue.SimpleQueue[EventsOf] = queue.SimpleQueue()
    shared = device == "cuda" and lanes > 1
    for events_of in [lane.events for lane in stream_lanes(place, lanes)] if shared else [Run.events] * lanes:
        free.put(events_of)
    with socket.socket(fileno=channel) as door, suppress(OSError):
        while received := socket.recv_fds(door, 1, 1)[1]:
            line = socket.socket(fileno=received[0])
            threading.Thread(target=_serve_one, args=(line, place, free)).start()


def _serve_one(line: socket.socket, device: torch.device, free: queue.SimpleQueue[EventsOf]) -> None:
    events_of = free.get()
    try:
        answer(line, partial(_events, events_of, device), _Pace())
    finally:
        free.put(events_of)


def _events(events_of: EventsOf, device: torch.device, work: Mapping[str, Any]) -> Generator[Event, None, None]:
    if _lost.is_set():
        os._exit(1)  # this run would fail here, and so would all after it
    run = same_run(work, wait=True)
    try:
        yield from events_of(run)
    except torch.OutOfMemoryError as error:
        raise memory_error(run, error) from error
    except RatpError:
        raise
    except Exception:
        if not _computes(device):
            _lost.set()
        raise


def _computes(device: torch.device) -> bool:
    """Whether a device still does: after some errors a GPU does nothing more for the process that met them."""
    try:
        with RECORDING:
            return bool(torch.ones(1, device=device).item())
    except torch.OutOfMemoryError:  # other runs may have it
        return True
    except Exception:
        return False


class _Pace:
    """Passes events on, those of steps together and only now and then."""

    def __init__(self) -> None:
        self._made, self._told = 0, -SECONDS_BETWEEN_STEPS

    def __call__(self, event: Event) -> Event | None:
        if not isinstance(event, Trained):
            self._made = 0
            return event
        self._made += event.tick.made
        now = time.monotonic()
        if not event.tick.epoch_done and now - self._told < SECONDS_BETWEEN_STEPS:
            return None
        made, self._made, self._told = self._made, 0, now
        return replace(event, tick=replace(event.tick, made=made))
