"""Runs on a Ray cluster, a task each.

A worker makes a run in a folder of its own, and after every stage and checkpoint sends what has changed in it
(:mod:`ratp.ray_worker`), which is written into the run's directory here. Nothing but Ray connects the machines. They
need no common file system, but each must have this package, and the images and weights at the places that were given.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ratp.errors import ConfigError, RatpError
from ratp.events import Event, StageFinished
from ratp.files import remove_leftovers
from ratp.lock import exclusive
from ratp.notes import Note
from ratp.ray_worker import PATIENCE, contents, files_of, make_run, write_files
from ratp.run import Run
from ratp.run_folder import prepare_folder
from ratp.run_messages import OtherPlanError, decoded, described, fail, options_of
from ratp.run_process import ONE_THREAD
from ratp.side_by_side import MOST_RETURNS, Listener, Result, check_at_once, usual_at_once

# Seconds between two looks at the head, and how long it may be away: after 60, Ray would end this process.
LOOK_EVERY, MOST_AWAY = 3.0, 20.0
_WORDS = ("auto", "local")
_START = "Start one (ray start --head), or have one started with --ray-address local."
_KEPT = "Finished stages are kept: the same command goes on after them."


class RoomWarning(Note):
    """The cluster has nothing yet to make a run with."""


class GoneWarning(Note):
    """A cluster that was there has died: another one is started."""


def run_all_on_ray(
    runs: Sequence[Run],
    *,
    address: str | None = None,
    at_once: int | None = None,
    one_thread: bool = True,
    on_event: Listener | None = None,
    on_end: Callable[[Run, Result], None] | None = None,
) -> list[Result]:
    """Makes all runs, or continues them, on a Ray cluster.

    As :func:`ratp.side_by_side.run_all`. A run whose worker dies goes on elsewhere, with what it sent last.

    Args:
        runs: What to run, each with a directory of its own, here. Their images are loaded by the workers only.
        address: ``HOST:PORT`` of the cluster, which this machine must be part of; ``auto``: the one that runs here;
            ``local``: one is started. By default ``auto`` if there is one, else ``local``. Where this process uses Ray
            already, that is used.
        at_once: How many to send out at the same time; by default as many as the cluster has room for.
        one_thread: As for ``run_all``; here a run always has one.
        on_event: Told of every stage that begins or ends. What it raises stops all runs.
        on_end: Told what became of a run, likewise.

    Returns:
        For every run its record, or the error that ended it.

    Raises:
        ConfigError: If Ray is not installed, or something was asked for that it cannot do.
        RatpError: If there is no cluster, or no longer.
    """
    del one_thread
    check_at_once(at_once)
    check_ray(address)
    if any(run.plan.device.index is not None for run in runs):
        raise ConfigError("on a cluster Ray chooses the GPU: use --device cuda, without a number.")
    with _joined(_place(address)):
        return _Work(runs, at_once, on_event, on_end).make()


def check_ray(address: str | None = None) -> None:
    """Refuses what cannot be done, before anything is written.

    Raises:
        ConfigError: If Ray is not installed, or no runs can be sent to such an address.
    """
    _ray()
    place = _place(address)
    if "://" in place:
        raise ConfigError(
            f"{place} is an address for clients of Ray, to which a run cannot send its files. Use a machine of the "
            "cluster, and --ray-address HOST:PORT there."
        )
    host, _, port = place.rpartition(":")
    if place and place not in _WORDS and not (host and port.isdecimal()):
        raise ConfigError(f"the address of a Ray cluster is HOST:PORT, auto or local, got {place!r}.")


def _ray() -> Any:
    """Ray, which is imported only when it is needed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("runs on a cluster need Ray: pip install ratp[ray]") from error
    return ray


def _place(address: str | None) -> str:
    """Where the cluster is; empty: wherever Ray finds it, or here."""
    return address or os.environ.get("RAY_ADDRESS", "")


@contextmanager
def _joined(place: str) -> Iterator[None]:
    """Within the block, this process is part of a cluster. One that it joined before it does not leave."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    place = _found(place)
    with _hushed():
        try:
            with _own_handler():
                ray.init(place, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:
            raise RatpError(f"cannot join a Ray cluster: {_line(error).rstrip('.')}.{_hint(place, error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


def _found(place: str) -> str:
    """Where there is a cluster that answers; ``local``: nowhere, and one is to be started.

    Ray itself would wait without end for one that has died without a word.

    Raises:
        RatpError: If there is none where one was asked for.
    """
    if place == "local":
        return place
    services: Any = sys.modules["ray._private.services"]
    try:
        known = services.canonicalize_bootstrap_address(place or None)
    except (ConnectionError, ValueError) as error:
        if place in _WORDS:
            raise RatpError(f"no Ray cluster runs here. {_START}") from error
        raise RatpError(f"no Ray cluster can be at {place}: {_line(error)}") from error
    if known is None:
        return "local"
    if _answers(known):
        return place or "auto"  # by its address Ray would want a token that it has
    if place:
        raise RatpError(f"no Ray cluster answers at {known if place in _WORDS else place}. {_START}")
    warnings.warn(
        f"the Ray cluster that was at {known} is gone: another one is started here", GoneWarning, stacklevel=2
    )
    return "local"


def _hint(place: str, error: Exception) -> str:
    """What may be the cause of an error."""
    if not isinstance(error, ConnectionError) or "RAY_AUTH_MODE" in os.environ or place in _WORDS:
        return ""
    return " If the cluster asks for a token, set RAY_AUTH_MODE=token here."


@contextmanager
def _own_handler() -> Iterator[None]:
    """Within the block Ray may answer SIGTERM in its way, by an exit; afterwards it is this process's own again.

    Where that has no handler of its own, Ray's stays.
    """
    own = signal.getsignal(signal.SIGTERM)
    if not callable(own) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, own)
    except SystemExit:
        signal.raise_signal(signal.SIGTERM)
        raise


@contextmanager
def _hushed() -> Iterator[None]:
    """Within the block, Ray does not print what its machines report. No level of its log keeps that back."""
    worker: Any = sys.modules["ray._private.worker"]
    usual = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = usual


def _answers(place: str) -> bool:
    """Whether something listens at ``HOST:PORT``."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _line(error: Exception) -> str:
    """An error of Ray's in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class _Head:
    """The head of the cluster.

    Attributes:
        resources: What the cluster has, taken or not.
    """

    def __init__(self) -> None:
        self._ray = _ray()
        self._place = self._ray.get_runtime_context().gcs_address
        self._seen = self._looked = time.monotonic()
        self.resources: Mapping[str, float] = self._ray.cluster_resources()

    def look(self) -> None:
        """Looks at it every now and then.

        Raises:
            RatpError: If it has been away for too long.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        if _answers(self._place):
            self._seen, self.resources = now, self._ray.cluster_resources()
        elif now - self._seen > MOST_AWAY:
            raise RatpError(f"the head of the Ray cluster at {self._place} no longer answers. {_KEPT}")


@dataclass(eq=False)
class _Flight:
    """A run that is under way.

    Attributes:
        index: Its number among all.
        run: The run.
        held: Its directory, which is locked.
        replies: What its worker sends, as Ray hands it out.
        deaths: How many workers died since one sent a stage or a checkpoint.
    """

    index: int
    run: Run
    held: ExitStack
    replies: Any
    deaths: int = 0


class _Work:
    """Runs to make, and what became of them."""

    def __init__(
        self,
        runs: Sequence[Run],
        at_once: int | None,
        on_event: Listener | None,
        on_end: Callable[[Run, Result], None] | None,
    ) -> None:
        self._ray = _ray()
        self._task = self._ray.remote(make_run)
        self._runs, self._at_once, self._on_event, self._on_end = runs, at_once, on_event, on_end
        self._head = _Head()
        self._waiting = deque(range(len(runs)))
        self._flights: list[_Flight] = []
        self._results: dict[int, Result] = {}

    def make(self) -> list[Result]:
        self._note_missing()
        try:
            while self._waiting or self._flights:
                while self._waiting and self._has_room():
                    self._begin(self._waiting.popleft())
                self._receive()
                self._head.look()
        finally:
            self._cancel()
        return [self._results[index] for index in range(len(self._runs))]

    def _note_missing(self) -> None:
        wanted = {name for run in self._runs for name in _needs(run)}
        missing = sorted(name for name in wanted if self._head.resources.get(name, 0) <= 0)
        if missing:
            warnings.warn(f"the cluster has no {' and no '.join(missing)}: runs wait until it has", RoomWarning, 4)

    def _has_room(self) -> bool:
        """Whether one more can be sent out; without any under way, always."""
        if self._at_once is not None:
            return len(self._flights) < self._at_once
        wanted = Counter[str]()
        for run in (self._runs[self._waiting[0]], *(flight.run for flight in self._flights)):
            wanted.update(_needs(run))
        fits = all(self._head.resources.get(name, 0) >= amount for name, amount in wanted.items())
        return fits or not self._flights

    def _begin(self, index: int) -> None:
        run = self._runs[index]
        try:
            prepare_folder(run.folder)
            with ExitStack() as stack:
                stack.enter_context(exclusive(run.folder))
                remove_leftovers(run.folder)
                replies = self._send(run)
                self._flights.append(_Flight(index, run, stack.pop_all(), replies))
        except RatpError as error:
            self._end(index, error)

    def _send(self, run: Run) -> Any:
        """Sends a run out, with the files it has so far."""
        try:
            work = {**described(run.plan), "options": options_of(run), "folder": os.fspath(run.folder)}
        except OtherPlanError as error:
            raise RatpError("the plan of this run was made by hand: no worker can make it.") from error
        needs = _needs(run)
        task = self._task.options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_retries=0,  # Ray would begin with the files of the first time
            runtime_env={"env_vars": ONE_THREAD},
        )
        return task.remote(work, contents(files_of(run.folder)))

    def _receive(self) -> None:
        """Waits a moment for the next answer of any worker, and takes it."""
        if not self._flights:
            return
        ready, _ = self._ray.wait([flight.replies for flight in self._flights], timeout=1.0)
        for flight in [flight for flight in self._flights if any(flight.replies is replies for replies in ready)]:
            try:
                answer = self._ray.get(next(flight.replies))
            except (StopIteration, self._ray.exceptions.RayError) as error:
                self._lose(flight, error)
            else:
                self._take(flight, answer)

    def _take(self, flight: _Flight, answer: dict[str, Any]) -> None:
        """Keeps what a worker sent."""
        result: Result | None = None
        event: Event | None = None
        goes_on = "event" in answer or "checkpoint" in answer
        try:
            write_files(flight.run.folder, answer.pop("files"))
            if "event" in answer:
                event = decoded(answer)
            elif "finished" in answer:
                result = flight.run.record()
            elif not goes_on:
                fail(answer)
        except OtherPlanError:
            result = RatpError(
                "its worker would make another run: it needs the same version of ratp and of the method."
            )
        except RatpError as error:
            result = error
        if isinstance(event, StageFinished) or "checkpoint" in answer:
            flight.deaths = 0
        if event is not None and self._on_event is not None:
            self._on_event(flight.run, event)
        if result is not None:
            if goes_on:  # but what it sends cannot be kept
                self._ray.cancel(flight.replies)
            self._land(flight, result)

    def _lose(self, flight: _Flight, error: Exception) -> None:
        """Sends out again what a worker did not finish, unless that leads nowhere."""
        errors = self._ray.exceptions
        if isinstance(error, errors.LocalRayletDiedError):
            raise RatpError(f"Ray has ended on this machine. {_KEPT}") from error
        if isinstance(error, errors.RayTaskError) and not isinstance(error, errors.TaskCancelledError):
            last = str(error).strip().splitlines()[-1]
            self._land(flight, RatpError(f"its worker could not make it ({last}). Every machine needs this ratp."))
            return
        self._ray.cancel(flight.replies)  # it lives on if no more than a reply was lost
        flight.deaths += 1
        if flight.deaths <= MOST_RETURNS:
            try:
                flight.replies = self._send(flight.run)
            except RatpError as failure:
                self._land(flight, failure)
            return
        how = f"its worker died, {flight.deaths} time(s) in one stage ({_line(error)})"
        self._land(flight, RatpError(f"{how}. If memory ran out, run fewer at once (--jobs). {_KEPT}"))

    def _land(self, flight: _Flight, result: Result) -> None:
        self._flights.remove(flight)
        flight.held.close()
        self._end(flight.index, result)

    def _end(self, index: int, result: Result) -> None:
        self._results[index] = result
        if self._on_end is not None:
            self._on_end(self._runs[index], result)
            self._runs[index].forget()

    def _cancel(self) -> None:
        """Stops whatever is under way, and lets go of its directories."""
        with ExitStack() as stack:
            for flight in self._flights:
                stack.enter_context(flight.held)
            for flight in self._flights:
                self._ray.cancel(flight.replies)
            if self._flights:
                ends = [flight.replies.completed() for flight in self._flights]
                self._ray.wait(ends, num_returns=len(ends), timeout=PATIENCE)


def _needs(run: Run) -> dict[str, float]:
    """What a run takes of a cluster: a core, and on GPUs one or its share of one."""
    if run.plan.device.type != "cuda":
        return {"CPU": 1.0}
    return {"CPU": 1.0, "GPU": 1 / usual_at_once([run], run.plan.device)}
