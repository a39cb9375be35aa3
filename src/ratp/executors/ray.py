"""Executes runs on a Ray cluster, one task per run.

A worker executes a run in a temporary folder and sends the files that changed after every stage and checkpoint
(:mod:`ratp.executors.ray_worker`); this process writes them to the run's directory. The machines need no common file
system, but each needs this package, and the images and weights at the given paths.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ratp._core.files import remove_leftovers
from ratp._core.locks import exclusive
from ratp.errors import ConfigError, Note, RatpError
from ratp.executors.local import check_at_once, default_at_once
from ratp.executors.pool import MOST_RETRIES, Listener, Pool, Result
from ratp.executors.process import ONE_THREAD
from ratp.executors.protocol import OtherPlanError, decoded, described, options_of, raise_error
from ratp.executors.ray_worker import PATIENCE, contents, files_of, make_run, write_files
from ratp.runs.directory import prepare_folder
from ratp.runs.events import Event, StageFinished
from ratp.runs.run import Run

# Seconds between checks of the head node, and how long it may be unreachable: after 60, Ray would end this process.
LOOK_EVERY, MOST_AWAY = 3.0, 20.0
_WORDS = ("auto", "local")
_START = "Start one (ray start --head), or have one started with --ray-address local."
_KEPT = "Finished stages are kept: the same command continues after them."


class RoomWarning(Note):
    """The cluster does not have the resources for a run yet."""


class GoneWarning(Note):
    """A cluster has died: another one is started."""


def run_all_on_ray(
    runs: Sequence[Run],
    *,
    address: str | None = None,
    at_once: int | None = None,
    one_thread: bool = True,
    on_event: Listener | None = None,
    on_end: Callable[[Run, Result], None] | None = None,
) -> list[Result]:
    """Executes or continues all runs on a Ray cluster, like :func:`ratp.executors.local.run_all`.

    A run whose worker dies continues elsewhere from the files it sent last.

    Args:
        runs: What to run, each with its own local directory. Only the workers load images.
        address: ``HOST:PORT`` of the cluster, which this machine must be part of; ``auto`` for the one running here;
            ``local`` to start one. By default ``auto`` if there is one, else ``local``. If this process already uses
            Ray, that cluster is used.
        at_once: How many runs to submit at the same time; by default as many as the cluster has room for.
        one_thread: Always true here.
        on_event: Called with the start and end of every stage. What it raises stops all runs.
        on_end: Called with every result, likewise.

    Returns:
        For every run its record, or the error that ended it.
    """
    del one_thread
    check_at_once(at_once)
    check_ray(address)
    if any(run.plan.device.index is not None for run in runs):
        raise ConfigError("on a cluster Ray chooses the GPU: use --device cuda, without a number.")
    if any(run.plan.device.type == "mps" for run in runs):
        raise ConfigError("Ray gives no run an Apple GPU: use --device cpu or cuda.")
    with _joined(_place(address)):
        return _Cluster(runs, at_once, on_event, on_end).execute()


def check_ray(address: str | None = None) -> None:
    """Checks Ray and the address before anything is written."""
    _ray()
    place = _place(address)
    if "://" in place:
        raise ConfigError(
            f"{place} is an address for Ray clients, to which workers cannot send files. Run this command on a machine "
            "of the cluster, with --ray-address HOST:PORT."
        )
    host, _, port = place.rpartition(":")
    if place and place not in _WORDS and not (host and port.isdecimal()):
        raise ConfigError(f"the address of a Ray cluster is HOST:PORT, auto or local, got {place!r}.")


def _ray() -> Any:
    """Ray, imported only when needed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError('runs on a cluster need Ray: pip install "ratp-cdsl[ray]"') from error
    return ray


def _place(address: str | None) -> str:
    """The address of the cluster; empty to let Ray look for one or start one here."""
    return address or os.environ.get("RAY_ADDRESS", "")


@contextmanager
def _joined(place: str) -> Iterator[None]:
    """Joins a cluster for the block, unless this process has joined one already."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    place = _found(place)
    with _hushed():
        try:
            with _own_handler():
                job = ray.job_config.JobConfig()
                job._py_driver_sys_path = _NoFolders()
                quietly = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
                ray.init(place, job_config=job, **quietly)
        except (OSError, RuntimeError, ValueError) as error:
            raise RatpError(f"cannot join a Ray cluster: {_line(error).rstrip('.')}.{_hint(place, error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


class _NoFolders(list[str]):
    """Where workers look for modules first: nowhere, although Ray would add the current folder."""

    def extend(self, folders: Iterable[str]) -> None:
        """Adds nothing."""


def _found(place: str) -> str:
    """The address of a cluster that answers, or ``local`` to start one.

    Ray itself would wait forever for a cluster that died without cleaning up.
    """
    if place == "local":
        return place
    services: Any = sys.modules["ray._private.services"]
    try:
        known = services.canonicalize_bootstrap_address(place or None)
    except (ConnectionError, ValueError) as error:
        if place in _WORDS:
            raise RatpError(f"no Ray cluster runs here. {_START}") from error
        raise RatpError(f"{place} cannot be the address of a Ray cluster: {_line(error)}") from error
    if known is None:
        return "local"
    if _answers(known):
        return place or "auto"  # given the address, Ray would ask for a token
    if place:
        raise RatpError(f"no Ray cluster answers at {known if place in _WORDS else place}. {_START}")
    warnings.warn(f"the Ray cluster at {known} has died: starting another one here", GoneWarning, stacklevel=2)
    return "local"


def _hint(place: str, error: Exception) -> str:
    """A hint at the likely cause of an error."""
    if not isinstance(error, ConnectionError) or "RAY_AUTH_MODE" in os.environ or place in _WORDS:
        return ""
    return " If the cluster requires a token, set RAY_AUTH_MODE=token here."


@contextmanager
def _own_handler() -> Iterator[None]:
    """Restores this process's own SIGTERM handler, if it has one, after Ray replaced it within the block."""
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
    """Keeps Ray from printing what its machines report; no log level does."""
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
    """An error of Ray's on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class _Head:
    """The head node of the cluster.

    Attributes:
        resources: All resources of the cluster, in use or not.
    """

    def __init__(self) -> None:
        self._ray = _ray()
        self._place = self._ray.get_runtime_context().gcs_address
        self._seen = self._looked = time.monotonic()
        self.resources: Mapping[str, float] = self._ray.cluster_resources()

    def check(self) -> None:
        """Checks from time to time that the head answers."""
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
    """A submitted run.

    Attributes:
        index: Its position among all runs.
        run: The run.
        held: The lock on its directory.
        replies: Ray's generator of what its worker sends.
        deaths: Workers that died since the last stage or checkpoint arrived.
    """

    index: int
    run: Run
    held: ExitStack
    replies: Any
    deaths: int = 0


class _Cluster(Pool):
    """Runs to execute on the cluster that this process has joined, and their results."""

    def __init__(
        self,
        runs: Sequence[Run],
        at_once: int | None,
        on_event: Listener | None,
        on_end: Callable[[Run, Result], None] | None,
    ) -> None:
        super().__init__(runs, on_event, on_end)
        self._ray, self._at_once = _ray(), at_once
        self._task = self._ray.remote(make_run)
        self._head = _Head()
        self._waiting = deque(range(len(runs)))
        self._flights: list[_Flight] = []

    def execute(self) -> list[Result]:
        self._note_missing()
        try:
            while self._waiting or self._flights:
                while self._waiting and self._has_room():
                    self._begin(self._waiting.popleft())
                self._receive()
                self._head.check()
        finally:
            self._cancel()
        return self.results()

    def _call(self, listener: Callable[[], None]) -> None:
        listener()  # in the only thread: what it raises ends execute()

    def _note_missing(self) -> None:
        wanted = {name for run in self._runs for name in _needs(run)}
        missing = sorted(name for name in wanted if self._head.resources.get(name, 0) <= 0)
        if missing:
            what = " and no ".join(missing)
            warnings.warn(f"the cluster has no {what}: runs wait until it does", RoomWarning, stacklevel=4)

    def _has_room(self) -> bool:
        """Whether one more run can be submitted; always if none is in progress."""
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
        """Submits a run with the files it has so far."""
        try:
            work = {**described(run.plan), "options": options_of(run), "folder": os.fspath(run.folder)}
        except OtherPlanError as error:
            raise RatpError("no worker can execute this run: its plan does not come from a request.") from error
        needs = _needs(run)
        task = self._task.options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_retries=0,  # Ray would start again from the first files
            runtime_env={"env_vars": ONE_THREAD},
        )
        return task.remote(work, contents(files_of(run.folder)))

    def _receive(self) -> None:
        """Waits a moment for the next answers of any workers, and takes them."""
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
        """Writes the files a worker sent and handles its answer."""
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
                raise_error(answer)
        except OtherPlanError:
            result = RatpError("its worker resolves another plan: install the same ratp and method on every machine.")
        except RatpError as error:
            result = error
        if isinstance(event, StageFinished) or "checkpoint" in answer:
            flight.deaths = 0
        if event is not None:
            self._report(flight.run, event)
        if result is not None:
            if goes_on:  # its files cannot be written
                self._ray.cancel(flight.replies)
            self._land(flight, result)

    def _lose(self, flight: _Flight, error: Exception) -> None:
        """Submits a run again whose worker died, unless too many have."""
        errors = self._ray.exceptions
        if isinstance(error, errors.LocalRayletDiedError):
            raise RatpError(f"Ray has ended on this machine. {_KEPT}") from error
        if isinstance(error, errors.RayTaskError) and not isinstance(error, errors.TaskCancelledError):
            last = str(error).strip().splitlines()[-1]
            self._land(flight, RatpError(f"its worker failed ({last}). Every machine needs this version of ratp."))
            return
        self._ray.cancel(flight.replies)  # it may be alive if only a reply was lost
        flight.deaths += 1
        if flight.deaths <= MOST_RETRIES:
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

    def _cancel(self) -> None:
        """Cancels all submitted runs and unlocks their directories."""
        with ExitStack() as stack:
            for flight in self._flights:
                stack.enter_context(flight.held)
            for flight in self._flights:
                self._ray.cancel(flight.replies)
            if self._flights:
                ends = [flight.replies.completed() for flight in self._flights]
                self._ray.wait(ends, num_returns=len(ends), timeout=PATIENCE)


def _needs(run: Run) -> dict[str, float]:
    """The resources of a run: one core, and on a GPU its share of one."""
    if run.plan.device.type != "cuda":
        return {"CPU": 1.0}
    return {"CPU": 1.0, "GPU": 1 / default_at_once([run], run.plan.device)}
