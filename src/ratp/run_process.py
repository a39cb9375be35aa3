"""A run in another process, which has one thread to compute with.

The process gets the request and resolves it again; a plan holds functions that cannot be sent. It answers with what
happens, a JSON object a line, and stops at the next step when nobody listens any more.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import torch

from ratp.config import as_dict
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.events import Event, Probed, StageFinished, StageStarted, Trained
from ratp.method import Tick
from ratp.notes import print_plainly
from ratp.plan import RunPlan, RunRequest, resolve
from ratp.run import Run
from ratp.stream import DataOptions

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Signals to all processes of a program reach this one, too; its parent decides, and closes the socket.
_START = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings.pop("path")
from {module} import serve
serve(**settings)
"""
# Seconds in which a process that is gone can be asked how it ended.
_PATIENCE = 5.0
_ERRORS: Mapping[str, type[RatpError]] = {kind.__name__: kind for kind in (RunDirectoryError, TrainingError, RatpError)}
_EVENTS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in (StageStarted, Probed, StageFinished)}
Process = subprocess.Popen[bytes]


class OtherPlanError(Exception):
    """A plan is not what its request resolves to, so that no other process can make the run."""


class ProcessGoneError(RatpError):
    """The process that made a run has ended, and did not say why."""


class Host(Protocol):
    """Has a process that makes runs, started when it is needed."""

    def join(self) -> tuple[Process, socket.socket]:
        """The process, and a socket over which it takes runs."""

    def leave(self) -> None:
        """To be called for every ``join``, once the socket is closed at both ends."""


class _OwnProcess:
    """A process for one who sends it runs, which ends with him."""

    def __init__(self) -> None:
        self._process: Process | None = None

    def join(self) -> tuple[Process, socket.socket]:
        self._process, ours = start_process("ratp.run_process", {}, ONE_THREAD)
        return self._process, ours

    def leave(self) -> None:
        if self._process is not None:
            self._process.wait()


class RunProcess:
    """A process that makes runs, one after another; it is started with the first.

    Args:
        host: Has the process; by default it is one of its own.
        device: What the device is called there; by default as here.
    """

    def __init__(self, host: Host | None = None, device: torch.device | None = None) -> None:
        self._host, self._device = host or _OwnProcess(), device
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._channel: Any = None

    def events(self, run: Run) -> Generator[Event, None, None]:
        """As :meth:`ratp.run.Run.events`. To close it stops the run at its next step, and waits for that.

        Raises:
            OtherPlanError: If the run cannot be made elsewhere; nothing has been done then.
            RatpError: As in this process, or if the other one ends unexpectedly.
        """
        work = json.dumps(_work(run, self._device)).encode()
        self._start()
        ended = False
        try:
            self._write(work + b"\n")
            while True:
                answer = self._read()
                if "event" in answer:
                    yield decoded(answer)
                    continue
                ended = True
                if "finished" in answer:
                    return
                fail(answer)
        finally:
            if not ended:
                self.close()

    def close(self) -> None:
        """Lets the process end, after the step it is at, unless others send it runs too."""
        if self._socket is None:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(OSError, ValueError):
            while self._channel.readline():
                pass
        with suppress(OSError):
            self._channel.close()
        self._socket.close()
        self._process = self._socket = None
        self._host.leave()

    def _start(self) -> None:
        if self._socket is None:
            self._process, self._socket = self._host.join()
            self._channel = self._socket.makefile("rwb")

    def _write(self, data: bytes) -> None:
        try:
            self._channel.write(data)
            self._channel.flush()
        except OSError as error:
            raise self._gone() from error

    def _read(self) -> dict[str, Any]:
        try:
            line = self._channel.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self) -> ProcessGoneError:
        assert self._process is not None
        process = self._process
        self.close()
        try:
            code = process.wait(_PATIENCE)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "it no longer answers"
        return ProcessGoneError(
            f"the process of this run ended unexpectedly ({how}). If memory ran out, run fewer at once. "
            "Finished stages are kept: the same run goes on after them."
        )


def start_process(
    module: str, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[Process, socket.socket]:
    """Starts this Python once more, to call the function ``serve`` of a module.

    Args:
        module: Name of the module.
        settings: Arguments of the function, as plain data; ``channel`` is added, its end of a socket.
        environment: What its environment has beside this process's.

    Returns:
        The process, and the other end of the socket.

    Raises:
        RatpError: If that is not possible.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        told = json.dumps({**settings, "channel": theirs.fileno(), "path": sys.path})
        try:
            process = subprocess.Popen(  # noqa: S603 - this Python, no shell
                [sys.executable, "-P", "-c", _START.format(module=module), told],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
            )
        except OSError as error:
            ours.close()
            raise RatpError(f"cannot start another process: {error.strerror}. Run fewer at once.") from error
    return process, ours


def _work(run: Run, device: torch.device | None) -> dict[str, Any]:
    """All another process needs to make the same run, and to know that it is the same.

    Raises:
        OtherPlanError: If the plan was made by hand.
    """
    return {
        **described(run.plan if device is None else replace(run.plan, device=device)),
        "fingerprint": run.config["fingerprint"],
        "folder": os.fspath(run.folder),
        "options": options_of(run),
    }


def described(plan: RunPlan) -> dict[str, Any]:
    """A plan as another process can be told of it: plain data, to resolve again.

    Raises:
        OtherPlanError: If the plan was made by hand.
    """
    request = plan.request
    if request is None:
        raise OtherPlanError
    values = as_dict(plan.recipe) | as_dict(plan.config)
    asked = {item.name: getattr(request, item.name) for item in fields(request)}
    asked |= {
        "changes": {name: values[name] for name in request.changes},  # texts and numbers, as in config.json
        "device": str(plan.device),
        "data": {
            "folder": None if plan.data.folder is None else os.fspath(plan.data.folder),
            "on_bad": plan.data.on_bad,
            "extra_classes": plan.data.extra_classes,
        },
        "weights": plan.weights_from,  # auto may be something else there
        "precision": plan.precision,
        "guard": plan.guard,
    }
    return {"request": asked, "same": _identity(plan)}


def options_of(run: Run) -> dict[str, Any]:
    """How a run is made, beside its plan; it changes no result."""
    return {name: getattr(run, name) for name in ("probe", "capture", "reuse_source", "features", "save_every")}


def planned(work: Mapping[str, Any]) -> RunPlan:
    """The plan that another process describes.

    Raises:
        ConfigError: If it cannot be made here.
        OtherPlanError: If it is another here.
    """
    asked = dict(work["request"])
    data = asked.pop("data")
    folder = None if data["folder"] is None else Path(data["folder"])
    plan = resolve(RunRequest(**asked, data=DataOptions(folder, data["on_bad"], data["extra_classes"])))
    if _identity(plan) != work["same"]:
        raise OtherPlanError
    return plan


def _identity(plan: RunPlan) -> list[str]:
    """What two plans of one result have in common."""
    return [plan.digest(), str(plan.device), plan.precision, plan.preset]


def told(error: Exception) -> dict[str, Any]:
    """An error as another process can be told of it."""
    if isinstance(error, OtherPlanError):
        return {"other": True}
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "problems": error.problems}
    if isinstance(error, RatpError):
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "RatpError", "message": unexpected(error)}


def fail(answer: Mapping[str, Any]) -> NoReturn:
    """Raises what a process reports."""
    if "other" in answer:
        raise OtherPlanError
    if "problems" in answer:
        raise ConfigError(answer["problems"])
    raise _ERRORS.get(answer["kind"], RatpError)(answer["message"])


@dataclass
class _PhaseElsewhere:
    """What is known of a phase in another process."""

    name: str
    epochs: int
    steps: int


def encoded(event: Event) -> dict[str, Any]:
    """An event as plain data."""
    if not isinstance(event, Trained):
        return {"event": type(event).__name__, **asdict(event)}
    tick = event.tick
    return {
        "event": "Trained",
        "stage": event.stage,
        "domain": event.domain,
        "phase": [tick.phase.name, tick.phase.epochs, tick.phase.steps],
        "tick": [tick.epoch, tick.step, tick.made, dict(tick.statistics), tick.epoch_done],
        "means": {name: float(value) for name, value in tick.means.items()},
    }


def decoded(answer: dict[str, Any]) -> Event:
    """The event that plain data describe."""
    kind = answer.pop("event")
    if kind != "Trained":
        return _EVENTS[kind](**answer)
    epoch, step, made, statistics, epoch_done = answer["tick"]
    means = {name: torch.tensor(value) for name, value in answer["means"].items()}
    tick = Tick(_PhaseElsewhere(*answer["phase"]), epoch, step, made, lambda: means, statistics, epoch_done)
    return Trained(answer["stage"], answer["domain"], tick)


def serve(channel: int) -> None:
    """Makes runs as asked for over a socket, until it is closed at the other end."""
    torch.set_num_threads(1)
    print_plainly()
    answer(socket.socket(fileno=channel), lambda work: same_run(work).events())


def answer(
    connection: socket.socket,
    events_of: Callable[[Mapping[str, Any]], Generator[Event, None, None]],
    passed: Callable[[Event], Event | None] = lambda event: event,
) -> None:
    """Makes runs as asked for over a socket, in this thread, until it is closed at the other end.

    Args:
        connection: The socket; it is closed in the end.
        events_of: Begins a run that is asked for.
        passed: What to tell of an event; None: nothing. By default all is told.
    """
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    nobody = threading.Event()

    def send(told_of: Mapping[str, Any]) -> None:
        answers.write(json.dumps(told_of).encode() + b"\n")
        answers.flush()

    def make(work: Mapping[str, Any]) -> None:
        """Makes one run and tells all about it."""
        with closing(events_of(work)) as events:
            for event in events:
                if (telling := passed(event)) is not None:
                    send(encoded(telling))
                if nobody.is_set():
                    return
        send({"finished": True})

    with suppress(BrokenPipeError, ConnectionResetError), connection:
        requests, answers = connection.makefile("rb"), connection.makefile("wb")
        threading.Thread(target=_listen, args=(requests, inbox, nobody), daemon=True).start()
        try:
            while (work := inbox.get()) is not None and not nobody.is_set():
                try:
                    make(work)
                except (BrokenPipeError, ConnectionResetError):
                    raise
                except Exception as error:
                    send(told(error))
        finally:
            with suppress(OSError):  # the files above keep the socket open, though nobody will answer any more
                connection.shutdown(socket.SHUT_RDWR)


def _listen(requests: BinaryIO, inbox: queue.SimpleQueue[dict[str, Any] | None], nobody: threading.Event) -> None:
    try:
        with suppress(OSError, ValueError):  # who dies while asking leaves half a line
            for line in requests:
                inbox.put(json.loads(line))
    finally:
        nobody.set()
        inbox.put(None)


def same_run(work: Mapping[str, Any], *, wait: bool = False) -> Run:
    """The run asked for.

    Args:
        work: What was sent.
        wait: As for :class:`ratp.run.Run`.

    Raises:
        OtherPlanError: If it is another than in the process that asks.
    """
    try:
        plan = planned(work)
    except ConfigError as error:
        raise OtherPlanError from error
    run = Run(plan, work["folder"], **work["options"], wait=wait)
    if run.config["fingerprint"] != work["fingerprint"]:
        raise OtherPlanError
    return run


def unexpected(error: Exception) -> str:
    """What to say of an error that is none of the user's: all that is known of it."""
    return f"an unexpected error ended the run:\n{''.join(traceback.format_exception(error)).rstrip()}"
