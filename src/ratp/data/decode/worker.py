"""Decodes images one after another, in this process or in a worker process.

A worker starts quickly because decoding needs no torch. Requests and answers go through a socket as lines of JSON;
the bytes of the files follow their request.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import BinaryIO, NamedTuple


class Outcome(NamedTuple):
    """The outcome of decoding one file: no hash if it could not be read, size 0 and an error if it was not decoded.

    Height and width are those before resizing.
    """

    sha256: str | None
    height: int
    width: int
    conversions: tuple[str, ...]
    error: str | None


def decode_one(data: bytes, size: tuple[int, int] | None, target: int | None, row: int) -> Outcome:
    """Decodes a file and writes its pixels to ``target``, if given; raises MemoryError if memory is too small."""
    from ratp.data.decode.decode import decode_picture
    from ratp.data.decode.pixels import BadImage

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
    """Answers requests until the socket is closed."""
    while header := requests.readline():
        work = json.loads(header)
        files = [requests.read(length) for length in work["sizes"]]  # all, whatever happens: a request follows
        try:
            outcomes = [decode_one(data, size, target, row) for row, data in zip(work["rows"], files, strict=True)]
            answer: object = {"outcomes": outcomes}
        except OSError as error:
            answer = {"errno": error.errno, "reason": error.strerror or str(error)}
        except MemoryError:
            answer = {"no_memory": True}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def main() -> None:
    """Serves requests as the JSON in the first argument says."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a program
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and closes the socket
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    size = None if settings["size"] is None else (int(settings["size"][0]), int(settings["size"][1]))
    with os.fdopen(settings["channel"], "rb") as requests, os.fdopen(os.dup(settings["channel"]), "wb") as answers:
        serve(requests, answers, size, settings["target"])


if __name__ == "__main__":
    main()
