"""Decodes images one after another, in this process or as a process of its own.

As a process it is started by path, without importing the package: that would load torch, which takes seconds
and which no decoder needs. Requests and answers go through a socket, each a line of JSON; a request is followed by
the bytes of its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple


class Outcome(NamedTuple):
    """What became of one file.

    Attributes:
        sha256: Of its bytes, None if they could not be read.
        height: Height before resizing, 0 if it could not be decoded.
        width: Width before resizing, 0 if it could not be decoded.
        conversions: What was done to its pixels.
        error: Why it could not be decoded, or None.
    """

    sha256: str | None
    height: int
    width: int
    conversions: tuple[str, ...]
    error: str | None


def decode_one(data: bytes, size: tuple[int, int] | None, target: int | None, row: int) -> Outcome:
    """Decodes a file and writes its pixels, if there is a place for them.

    Args:
        data: The file.
        size: Height and width to resize to, or None.
        target: Descriptor of a file of images of that size, channels first, or None.
        row: Which of the images in ``target`` this is.

    Raises:
        OSError: If the pixels cannot be written.
    """
    from ratp.data.decode import decode_picture
    from ratp.data.listing import BadImage

    sha256 = hashlib.sha256(data).hexdigest()
    try:
        picture = decode_picture(data, size)
    except BadImage as error:
        return Outcome(sha256, 0, 0, (), str(error))
    if target is not None:
        pixels = picture.planes()
        write_at(target, pixels, row * len(pixels))
    return Outcome(sha256, *picture.original_size, picture.conversions, None)


def write_at(target: int, data: bytes, offset: int) -> None:
    """Writes all of ``data`` at ``offset``."""
    while data:
        written = os.pwrite(target, data, offset)
        data, offset = data[written:], offset + written


def serve(requests: BinaryIO, answers: BinaryIO, size: tuple[int, int] | None, target: int | None) -> None:
    """Answers requests until there are no more."""
    while header := requests.readline():
        work = json.loads(header)
        files = [requests.read(length) for length in work["sizes"]]  # all, whatever happens: a request follows
        try:
            outcomes = [decode_one(data, size, target, row) for row, data in zip(work["rows"], files, strict=True)]
            answer: object = {"outcomes": outcomes}
        except OSError as error:
            answer = {"errno": error.errno, "reason": error.strerror or str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def main() -> None:
    """Serves on the descriptor, and as the settings say, that the first argument names in JSON."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a program
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and closes the socket
    package = ModuleType("ratp")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["ratp"] = package
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    size = None if settings["size"] is None else (int(settings["size"][0]), int(settings["size"][1]))
    with os.fdopen(settings["channel"], "rb") as requests, os.fdopen(os.dup(settings["channel"]), "wb") as answers:
        serve(requests, answers, size, settings["target"])


if __name__ == "__main__":
    main()
