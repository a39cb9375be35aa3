"""The parent's side of a worker process: starting it, sending it runs and noticing its death.

The two exchange JSON objects, one per line, over a socket (:mod:`ratp.executors.protocol`). Requests and answers carry
the number of their run, because one process executes several runs at once.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from ratp.errors import RatpError
from ratp.executors.protocol import decoded, raise_error, work_of
from ratp.runs.events import Event
from ratp.runs.run import Run

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# A signal to the process group reaches workers, too; they ignore it, because the parent decides.
_START = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings.pop("path")
from ratp.executors.worker import serve
serve(**settings)
"""
# Seconds to wait for the exit code of a process that closed its socket, and for an idle process to end.
_PATIENCE, _LAST_SECONDS = 5.0, 30.0


class ProcessGoneError(RatpError):
    """The process of a run died.

    Attributes:
        how: How it ended, as far as known.
    """

    def __init__(self, how: str) -> None:
        super().__init__(
            f"the process of this run ended unexpectedly ({how}). If memory ran out, run fewer at once. "
            "Finished stages are kept: the same run continues after them."
        )
        self.how = how


class Worker:
    """Executes runs in another process, which starts with the first run and again after it died."""

    def __init__(self, device: torch.device, slots: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self.device = torch.device(device.type)  # the process sees one GPU only
        self._settings = {"device": device.type, "slots": slots}
        self._environment = {"CUDA_VISIBLE_DEVICES": visible(device)} if device.type == "cuda" else ONE_THREAD
        self._first: Mapping[str, str] = environment or {}  # the first process has it; if it dies, no other
        self._lock = threading.Lock()
        self._users = 0
        self._process: _Process | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1

    def __exit__(self, *_: object) -> None:
        """Ends the process once nobody uses it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._process is not None:
                self._process.close()
                self._process = None

    def events(self, run: Run) -> Generator[Event, None, None]:
        """Like :meth:`ratp.runs.run.Run.events`. Closing it stops the run at its next step."""
        work = work_of(run, self.device)
        with self._lock:
            if self._process is not None and self._process.gone:
                self._process.close()
                self._process, self._first = None, {}
            if self._process is None:
                self._process = _Process(self._settings, {**self._environment, **self._first})
            process = self._process
        yield from process.events(work)


class _Process:
    """A started worker process, and the answers of its runs."""

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._process, self._socket = start_process(settings, environment)
        self._requests = self._socket.makefile("wb")
        self._lock = threading.Lock()
        self._numbers = count()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self.gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def events(self, work: Mapping[str, Any]) -> Generator[Event, None, None]:
        answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answers
            if self.gone:
                answers.put(None)
        ended = False
        try:
            self._send({"run": number, "work": work})
            while True:
                answer = answers.get()
                if answer is None:
                    ended = True
                    raise ProcessGoneError(self._how())
                if "event" in answer:
                    yield decoded(answer)
                    continue
                ended = True
                if "finished" in answer:
                    return
                raise_error(answer)
        finally:
            if not ended:
                self._send({"stop": number})
                while (answer := answers.get()) is not None and "event" in answer:
                    pass
            with self._lock:
                del self._answers[number]

    def _send(self, request: Mapping[str, Any]) -> None:
        with suppress(OSError, ValueError), self._lock:  # the reader notices if the process is gone
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as lines:  # a dying process may cut a line
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    answers = self._answers.get(answer.pop("run"))
                if answers is not None:
                    answers.put(answer)
        with self._lock:
            self.gone = True
            for answers in self._answers.values():
                answers.put(None)

    def _how(self) -> str:
        """How the process ended; kills it if it hangs."""
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.close()
            return "it no longer answers"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Waits for the process to end after its current step; kills it if it hangs."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        with suppress(OSError):
            self._requests.close()
        self._socket.close()


def start_process(
    settings: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts another process of this Python, which calls :func:`serve` and does not import the user's main script."""
    ours, theirs = socket.socketpair()
    with theirs:
        argument = json.dumps({**settings, "channel": theirs.fileno(), "path": sys.path})
        try:
            process = subprocess.Popen(  # noqa: S603 - this Python, no shell
                [sys.executable, "-P", "-c", _START, argument],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
            )
        except OSError as error:
            ours.close()
            raise RatpError(f"cannot start another process: {error.strerror}. Run fewer at once.") from error
    return process, ours


def visible(device: torch.device) -> str:
    """The value of CUDA_VISIBLE_DEVICES for one GPU; it may already hide some from this process."""
    shown, index = os.environ.get("CUDA_VISIBLE_DEVICES"), device.index or 0
    return shown.split(",")[index].strip() if shown else str(index)
