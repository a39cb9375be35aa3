"""Files that contain only pixels: consecutive uint8 images, channels first."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ratp._core.environment import usable_cores
from ratp.data.decode.worker import write_at
from ratp.errors import RatpError

if TYPE_CHECKING:
    from torch import Tensor

_FLUSH_SECONDS = 0.3
# The mapped files, by the address of their first byte.
_maps: dict[int, weakref.ref[mmap.mmap]] = {}
_BLOCK_BYTES = 2**22


def map_images(handle: int, count: int, height: int, width: int) -> Tensor:
    """Maps the pixels of an open file as a tensor that is read on use.

    The mapping is private: only this process sees changes to the tensor, and they never reach the file.
    """
    import torch

    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(handle, count * 3 * height * width, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    images = torch.frombuffer(memory, dtype=torch.uint8).view(count, 3, height, width)
    _maps[images.data_ptr()] = weakref.ref(memory)
    return images


def check_whole(images: Tensor) -> None:
    """Raises RatpError if the file that images are mapped from has become shorter: reading it would end the process.

    A file that was removed stays readable for as long as it is mapped.
    """
    memory = _maps.get(images.untyped_storage().data_ptr(), lambda: None)()
    if memory is not None and memory.size() < len(memory):
        raise RatpError(
            "a file of decoded images in the cache was cut off while it was in use. Start again: the images are "
            "decoded again, and what was saved is kept."
        )


def hash_of_pixels(handle: int, length: int) -> str:
    """Computes the sha256 of the sha256s of a file's blocks, which are read on all cores."""

    def of_block(start: int) -> bytes:
        return hashlib.sha256(os.pread(handle, min(_BLOCK_BYTES, length - start), start)).digest()

    starts = range(0, length, _BLOCK_BYTES)
    with ThreadPoolExecutor(usable_cores()) as pool:
        return hashlib.sha256(b"".join(pool.map(of_block, starts))).hexdigest()


@contextmanager
def flushed_meanwhile(handle: int) -> Iterator[None]:
    """Flushes a file in the background during the block, so that little is left to flush at its end."""
    over, errors = threading.Event(), list[OSError]()

    def flush() -> None:
        while not over.wait(_FLUSH_SECONDS) and not errors:
            try:
                os.fsync(handle)
            except OSError as error:  # the system reports it only once
                errors.append(error)

    thread = threading.Thread(target=flush, name="flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
    os.fsync(handle)


def close_gaps(handle: int, rows: list[int], length: int) -> None:
    """Moves the given rows of a file to its start, in their order, and cuts off the rest."""
    for place, row in enumerate(rows):
        if place != row:
            write_at(handle, os.pread(handle, length, row * length), place * length)
    os.ftruncate(handle, len(rows) * length)


def memory_file() -> int:
    """Creates a file without a name, in memory where the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ratp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def free_memory() -> int:
    """Returns the bytes of memory that are available without swapping, or half of all memory outside Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
