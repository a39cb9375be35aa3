"""A run in another process, which has one thread to compute with.

The process gets the request and resolves it again; a plan holds functions that cannot be sent. It answers with what
happens, a JSON object a line, and stops at the next step when nobody listens any more.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

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
_START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); settings = json.loads(sys.argv[1]); "
    "sys.path[:] = settings['path']; from ratp.run_process import serve; serve(settings['channel'])"
)
_ERRORS: Mapping[str, type[RatpError]] = {kind.__name__: kind for kind in (RunDirectoryError, TrainingError, RatpError)}
_EVENTS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in (StageStarted, Probed, StageFinished)}


class OtherPlanError(Exception):
    """A plan is not what its request resolves to, so that no other process can make the run."""


class RunProcess:
    """A process that makes runs, one after another; it is started with the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._channel: Any = None

    def events(self, run: Run) -> Generator[Event, None, None]:
        """As :meth:`ratp.run.Run.events`. To close it stops the run at its next step, and waits for that.

        Raises:
            OtherPlanError: If the run cannot be made elsewhere; nothing has been done then.
            RatpError: As in this process, or if the other one ends unexpectedly.
        """
        work = json.dumps(_work(run)).encode()
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
        """Lets the process end, after the step it is at."""
        if self._process is None or self._socket is None:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(OSError, ValueError):
            while self._channel.readline():
                pass
        with suppress(OSError):
            self._channel.close()
        self._socket.close()
        self._process.wait()
        self._process = self._socket = None

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            settings = json.dumps({"channel": theirs.fileno(), "path": sys.path})
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this Python, no shell
                    [sys.executable, "-P", "-c", _START, settings],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **ONE_THREAD},
                )
            except OSError as error:
                ours.close()
                raise RatpError(f"cannot start another process: {error.strerror}. Run fewer at once.") from error
        self._socket, self._channel = ours, ours.makefile("rwb")

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

    def _gone(self) -> RatpError:
        assert self._process is not None
        process = self._process
        self.close()
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RatpError(
            f"the process of this run ended unexpectedly ({how}). If memory ran out, run fewer at once. "
            "Finished stages are kept: the same run goes on after them."
        )


def _work(run: Run) -> dict[str, Any]:
    """All another process needs to make the same run, and to know that it is the same.

    Raises:
        OtherPlanError: If the plan was made by hand.
    """
    return {
        **described(run.plan),
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
        "source": None if request.source is None else os.fspath(request.source),
        "targets": _paths(request.targets),
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


def _paths(targets: Sequence[Path | str] | Path | str) -> list[str]:
    """Targets as texts; one alone may be given without a list."""
    return [os.fspath(path) for path in ([targets] if isinstance(targets, str | Path) else targets)]


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process decides
    torch.set_num_threads(1)
    print_plainly()
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    nobody = threading.Event()
    with socket.socket(fileno=channel) as connection, suppress(BrokenPipeError, ConnectionResetError):
        requests, answers = connection.makefile("rb"), connection.makefile("wb")
        threading.Thread(target=_listen, args=(requests, inbox, nobody), daemon=True).start()

        def send(answer: Mapping[str, Any]) -> None:
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()

        while (work := inbox.get()) is not None and not nobody.is_set():
            _make(work, send, nobody)


def _listen(requests: BinaryIO, inbox: queue.SimpleQueue[dict[str, Any] | None], nobody: threading.Event) -> None:
    with suppress(OSError):
        for line in requests:
            inbox.put(json.loads(line))
    nobody.set()
    inbox.put(None)


def _make(work: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None], nobody: threading.Event) -> None:
    """Makes one run and tells all about it."""
    try:
        run = _same_run(work)
        with closing(run.events()) as events:
            for event in events:
                send(encoded(event))
                if nobody.is_set():
                    return
        send({"finished": True})
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        send(told(error))


def _same_run(work: Mapping[str, Any]) -> Run:
    """The run asked for.

    Raises:
        OtherPlanError: If it is another than in the process that asks.
    """
    try:
        plan = planned(work)
    except ConfigError as error:
        raise OtherPlanError from error
    run = Run(plan, work["folder"], **work["options"])
    if run.config["fingerprint"] != work["fingerprint"]:
        raise OtherPlanError
    return run


def unexpected(error: Exception) -> str:
    """What to say of an error that is none of the user's: all that is known of it."""
    return f"an unexpected error ended the run:\n{''.join(traceback.format_exception(error)).rstrip()}"
