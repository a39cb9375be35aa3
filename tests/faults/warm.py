"""The other side of :mod:`warm_server`: processes that start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from helpers import same_tensors, tensors_of
from ratp.errors import RatpError


@dataclass
class Ended:
    """What a process left behind."""

    code: int
    out: str
    err: str


class Warm:
    """Starts processes by forking one that has imported everything."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job):
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, *words, cwd=None, env=None, **job):
        """Starts a command of ratp, or what ``job`` says; returns its process."""
        self.started += 1
        place = {name: str(self.folder / f"{self.started}.{name}") for name in ("out", "err")}
        more = {"words": list(map(str, words))} if words else {}
        where = {"cwd": str(cwd or self.folder), "env": {**os.environ, **(env or {})}}
        pid = self.ask({**place, **where, **more, **{name: _plain(value) for name, value in job.items()}})
        return Process(self, pid, place)

    def run(self, *words, **job):
        """The same, and waits for its end."""
        return self.start(*words, **job).wait()


@dataclass
class Process:
    """A process that was started."""

    warm: Warm
    pid: int
    place: dict[str, str]

    def kill(self, number):
        os.kill(self.pid, number)

    def wait(self):
        code = self.warm.ask({"wait": self.pid})
        return Ended(code, *(Path(path).read_text(errors="replace") for path in self.place.values()))


def attempt(make):
    """Returns the result, or the message of an error that a user can fix; any other error fails the test."""
    try:
        return make(), ""
    except RatpError as error:
        words = str(error)
    assert words.strip() and "Traceback" not in words
    return None, words


def _plain(value):
    return str(value) if isinstance(value, Path) else value


def assert_same(folder, other):
    """Two runs came to the same bits."""
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(other, name))
    assert (folder / "matrix.json").read_bytes() == (other / "matrix.json").read_bytes()
    for place in (folder, other):
        assert not [*place.glob("checkpoint*"), *place.glob("*-before*"), *place.glob(".*.part-*")]
