"""Decodes all images of a domain on all cores, in bounded memory, with the same outcome on any number of cores.

Processes rather than threads: on 16 cores they are over three times as fast for WebP and JPEG, as threads stop scaling
at 4 to 8. A worker is a fresh interpreter, as a process with torch's threads must not fork; multiprocessing's own
would import the user's script again, and torch with it.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType

from ratp._core.environment import usable_cores
from ratp.data.decode import worker
from ratp.data.decode.pixels import BadImage
from ratp.data.decode.worker import Outcome, decode_one
from ratp.data.read.listing import escaped
from ratp.data.read.tree import ImageFile, ImageTree
from ratp.errors import RatpError

Progress = Callable[[int, int], None]

_BATCH_FILES, _BATCH_BYTES = 64, 2**17  # about 20 ms of work: short waits at the end, little overhead
_SECONDS_A_FILE, _SECONDS_A_BYTE = 1e-4, 5e-8  # roughly what decoding takes
_SECONDS_A_WORKER = 0.4  # for less work, starting another interpreter takes longer than decoding


def decode_all(
    tree: ImageTree,
    size: tuple[int, int] | None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    target: int | None = None,
) -> list[Outcome]:
    """Decodes every image of a domain and returns one outcome per file, in its order.

    Uses as many processes as there are cores by default, fewer for few images, none for ``workers=1``. The pixels of
    file k go to place k of the file with descriptor ``target``, uint8 with channels first; places of files that cannot
    be decoded stay as they are.
    """
    if workers is not None and workers < 1:
        raise RatpError(f"decoding needs at least one process, got workers={workers}.")
    batches = list(_batches(tree.files))
    count = min(len(batches), workers or _worthwhile(tree.files))
    outcomes: list[Outcome] = []
    done = 0
    while done < len(batches):
        rest = batches[done:]
        answers = _in_turn(tree, rest, size, target) if count == 1 else _at_once(tree, rest, size, target, count)
        try:
            with closing(answers):
                for answer in answers:
                    outcomes += answer
                    done += 1
                    if progress:
                        progress(len(outcomes), len(tree.files))
        except MemoryError:
            if count == 1:
                raise
            count = 1  # the rest one image at a time, which needs least memory
    return outcomes


def _worthwhile(files: Sequence[ImageFile]) -> int:
    work = _SECONDS_A_FILE * len(files) + _SECONDS_A_BYTE * sum(file.size for file in files)
    return max(1, min(usable_cores(), int(work / _SECONDS_A_WORKER)))


Batch = tuple[int, list[ImageFile]]


def _batches(files: Sequence[ImageFile]) -> Iterator[Batch]:
    """Yields consecutive files with the index of the first."""
    first, total = 0, 0
    for k, file in enumerate(files):
        if k > first and (k - first == _BATCH_FILES or total + file.size > _BATCH_BYTES):
            yield first, list(files[first:k])
            first, total = k, 0
        total += file.size
    yield first, list(files[first:])


def _in_turn(
    tree: ImageTree, batches: list[Batch], size: tuple[int, int] | None, target: int | None
) -> Generator[list[Outcome], None, None]:
    for first, files in batches:
        outcomes = []
        for row, file in enumerate(files, first):
            try:
                data = _read(tree, file)
                outcomes.append(_unread(data) if isinstance(data, BadImage) else decode_one(data, size, target, row))
            except MemoryError as error:
                raise RatpError(
                    f"memory ran out while {escaped(file.name)} of {tree.path} was decoded. "
                    "Close other programs or start fewer runs at once. If it is always this image, make it smaller."
                ) from error
        yield outcomes


def _at_once(
    tree: ImageTree, batches: list[Batch], size: tuple[int, int] | None, target: int | None, count: int
) -> Generator[list[Outcome], None, None]:
    """Uses twice as many threads as processes, so that the next batch is ready when a process becomes idle."""
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def work(batch: Batch) -> list[Outcome]:
        first, files = batch
        read = [_read(tree, file) for file in files]
        rows = [first + k for k, data in enumerate(read) if not isinstance(data, BadImage)]
        process = idle.get()
        try:
            decoded = iter(process.decode(rows, [data for data in read if not isinstance(data, BadImage)]))
        except _EndedError as error:
            raise RatpError(
                f"a process ended unexpectedly ({error}) while it decoded {len(files)} file(s) of {tree.path} from "
                f"{files[0].name!r} on. If memory ran out, use fewer processes."
            ) from error
        finally:
            idle.put(process)
        return [_unread(data) if isinstance(data, BadImage) else next(decoded) for data in read]

    with ExitStack() as running:
        try:
            for _ in range(count):
                idle.put(running.enter_context(_Worker(size, target)))
        except OSError as error:
            raise RatpError(f"cannot start a process to decode in: {error.strerror}. Use fewer of them.") from error
        pool = running.enter_context(ThreadPoolExecutor(2 * count, "decode"))
        yield from pool.map(work, batches)


def _read(tree: ImageTree, file: ImageFile) -> bytes | BadImage:
    try:
        return tree.read(file)
    except BadImage as error:
        return error


def _unread(error: BadImage) -> Outcome:
    return Outcome(None, 0, 0, (), str(error))


class _EndedError(Exception):
    """A worker process has died."""


class _Worker:
    """A process that decodes, from its start to the end of the block."""

    def __init__(self, size: tuple[int, int] | None, target: int | None) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = theirs.fileno()
            settings = json.dumps({"size": size, "target": target, "channel": channel, "path": sys.path})
            self._process = subprocess.Popen(  # noqa: S603 - this Python, no shell
                [sys.executable, "-S", "-P", str(Path(worker.__file__)), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(channel,) if target is None else (channel, target),
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            self._channel = ours.makefile("rwb")

    def __enter__(self) -> _Worker:
        return self

    def decode(self, rows: list[int], files: list[bytes]) -> list[Outcome]:
        """Sends files to the process and returns their outcomes."""
        try:
            request = json.dumps({"rows": rows, "sizes": [len(data) for data in files]}).encode()
            self._channel.write(b"".join([request, b"\n", *files]))
            self._channel.flush()
            line = self._channel.readline()
        except (OSError, ValueError):
            line = b""
        if not line.endswith(b"\n"):
            code = self._process.wait()
            raise _EndedError(f"signal {-code}" if code < 0 else f"exit code {code}")
        answer = json.loads(line)
        if "no_memory" in answer:
            raise MemoryError
        if "errno" in answer:
            raise OSError(answer["errno"], answer["reason"])
        return [Outcome(sha, h, w, tuple(conversions), error) for sha, h, w, conversions, error in answer["outcomes"]]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        with suppress(OSError):
            self._channel.close()
        self._process.wait()
