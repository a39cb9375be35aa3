"""The worker's side: executes runs for a parent process, on one device.

When the socket to the parent closes, whether or not the parent is still alive, all runs stop at their next step and
the process ends.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import torch

from ratp.errors import RatpError, print_plainly
from ratp.executors.lanes import stream_lanes
from ratp.executors.protocol import encoded, encoded_error, memory_error, same_run
from ratp.runs.events import Event, Trained
from ratp.runs.run import Run
from ratp.training.cuda_graphs import RECORDING

# Seconds between two events about steps of a run: reading a loss makes a GPU wait.
SECONDS_BETWEEN_STEPS = 0.25
# Set once this process's device no longer computes.
_lost = threading.Event()


def serve(channel: int, device: str, slots: int) -> None:
    """Executes runs as requested over a socket, until its other end is closed."""
    print_plainly()
    place = torch.device(device)
    if device == "cpu":
        torch.set_num_threads(1)
    free: queue.SimpleQueue[Callable[[Run], Generator[Event, None, None]]] = queue.SimpleQueue()
    shared = device == "cuda" and slots > 1
    for events_of in [lane.events for lane in stream_lanes(place, slots)] if shared else [Run.events] * slots:
        free.put(events_of)

    mine = threading.local()

    def events(work: Mapping[str, Any]) -> Generator[Event, None, None]:
        if not hasattr(mine, "events_of"):
            mine.events_of = free.get()  # one lane per thread, because libraries initialise per thread
        yield from _events(mine.events_of, place, work)

    answer(socket.socket(fileno=channel), events, slots)


def answer(
    connection: socket.socket, events_of: Callable[[Mapping[str, Any]], Generator[Event, None, None]], slots: int = 1
) -> None:
    """Answers requests for runs until the socket is closed at its other end."""
    stops: dict[int, threading.Event] = {}
    sending = threading.Lock()

    def send(number: int, data: Mapping[str, Any]) -> None:
        with sending:
            connection.sendall(json.dumps({"run": number, **data}).encode() + b"\n")

    def make(number: int, work: Mapping[str, Any]) -> None:
        pace = _Pace()
        with suppress(OSError):  # the parent no longer listens
            try:
                with closing(events_of(work)) as events:
                    for event in events:
                        if stops[number].is_set():
                            break
                        if (paced := pace(event)) is not None:
                            send(number, encoded(paced))
                send(number, {"finished": True})
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                send(number, encoded_error(error))

    with connection, ThreadPoolExecutor(slots) as pool:
        with suppress(OSError, ValueError), connection.makefile("rb") as requests:  # a dying parent may cut a line
            for line in requests:
                request = json.loads(line)
                if "stop" in request:
                    stops[request["stop"]].set()
                else:
                    stops[request["run"]] = threading.Event()
                    pool.submit(make, request["run"], request["work"])
        for stop in stops.values():
            stop.set()


def _events(
    events_of: Callable[[Run], Generator[Event, None, None]], device: torch.device, work: Mapping[str, Any]
) -> Generator[Event, None, None]:
    if _lost.is_set():
        os._exit(1)  # every further run would fail here
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
    """Whether the device still works: after some errors a GPU no longer works for the process that caused them."""
    try:
        with RECORDING:
            return bool(torch.ones(1, device=device).item())
    except torch.OutOfMemoryError:  # other runs may use all of it
        return True
    except Exception:
        return False


class _Pace:
    """Passes events on, merging those about steps into a few per second."""

    def __init__(self) -> None:
        self._made, self._passed = 0, -SECONDS_BETWEEN_STEPS

    def __call__(self, event: Event) -> Event | None:
        if not isinstance(event, Trained):
            self._made = 0
            return event
        self._made += event.tick.made
        now = time.monotonic()
        if not event.tick.epoch_done and now - self._passed < SECONDS_BETWEEN_STEPS:
            return None
        made, self._made, self._passed = self._made, 0, now
        return replace(event, tick=replace(event.tick, made=made))
