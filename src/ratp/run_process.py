"""A run in another process, which has one thread to compute with.

The process is asked for runs, and answers with what happens, as :mod:`ratp.run_messages` has it, a JSON object a line.
It stops at the next step when nobody listens any more.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from typing import Any, BinaryIO, Protocol

import torch

from ratp.errors import RatpError
from ratp.events import Event
from ratp.notes import print_plainly
from ratp.run import Run
from ratp.run_messages import decoded, encoded, fail, same_run, told, work_of

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
# Seconds in which a process that is gone can be asked how it ended, and those one with nothing left to do has to end.
_PATIENCE = 5.0
_LAST_SECONDS = 30.0
Process = subprocess.Popen[bytes]


class ProcessGoneError(RatpError):
    """The process that made a run has ended, and did not say why.

    Attributes:
        how: What is known of its end.
    """

    def __init__(self, how: str) -> None:
        super().__init__(
            f"the process of this run ended unexpectedly ({how}). If memory ran out, run fewer at once. "
            "Finished stages are kept: the same run goes on after them."
        )
        self.how = how


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
            let_end(self._process)


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
        work = json.dumps(work_of(run, self._device)).encode()
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
        try:
            code = self._process.wait(_PATIENCE)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "it no longer answers"
        self.close()
        return ProcessGoneError(how)


def let_end(process: Process) -> None:
    """Waits for a process that has nothing left to do; one that hangs is killed."""
    try:
        process.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
