"""A process that has imported everything and forks a child for every job it receives.

A process of its own takes seconds to start, most of it imports; a fork takes none. It reads a JSON object a line: what
a fork is to do, or which one to wait for. A fork can be made to die, or to find the disk full or gone, at a point: the
n-th time that something is about to be opened for writing, synced, linked, renamed or removed below a folder.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

import helpers
import ratp.reports.tables  # noqa: F401  (imported late by the command line)
from ratp.cli.main import main
from ratp.runs.run import Run

WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = ("os.link", "os.rename", "os.remove", "os.truncate", "os.mkdir")


class Points:
    """Counts the points of a process, and makes something happen at one of them.

    Args:
        within: Folder below which things count.
        at: Number of the point, from 1; 0: none.
        then: ``kill``, ``tear`` (half of what was written is lost, then kill), or the name of an error of the disk,
            which nothing escapes from then on.
        tally: File for the number of points there were, a byte each.
    """

    def __init__(self, within, at, then, tally):
        self.within, self.at, self.then = os.path.realpath(within), at, then
        self.seen = 0
        self.tally = os.open(tally, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if tally else None
        self.fsync, os.fsync = os.fsync, self.sync
        sys.addaudithook(self.hook)

    def sync(self, handle):
        if self.counts(os.readlink(f"/proc/self/fd/{handle}")):
            self.point(handle)
        self.fsync(handle)

    def hook(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and self.counts(path):
                self.point()
        elif event in CHANGES and self.counts(arguments[0]):
            self.point()

    def counts(self, path):
        return isinstance(path, str | os.PathLike) and os.path.realpath(path).startswith(self.within)

    def point(self, handle=None):
        self.seen += 1
        if self.tally is not None:
            os.write(self.tally, b".")
        if self.then.startswith("E") and 0 < self.at <= self.seen:
            number = getattr(errno, self.then)
            raise OSError(number, os.strerror(number))
        if self.seen == self.at:
            if self.then == "tear" and handle is not None:
                with suppress(OSError):  # a folder
                    os.ftruncate(handle, os.fstat(handle).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def jump(offset):
    """Lets the clock on the wall run by another hand: each look at it is elsewhere, forwards and back."""
    plain, real_local, looks = time.time, time.localtime, []

    def now():
        looks.append(None)
        return plain() + offset * (-1) ** len(looks)

    time.time = now
    time.localtime = lambda seconds=None: real_local(now() if seconds is None else seconds)
    strftime = time.strftime
    time.strftime = lambda form, when=None: strftime(form, time.localtime() if when is None else when)


def work(job):
    """What a fork does; returns its exit code."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    torch.set_num_threads(1)
    if "within" in job:
        Points(job["within"], job.get("at", 0), job.get("then", "kill"), job.get("tally"))
    if "largest" in job:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest"], job["largest"]))
    if "clock" in job:
        jump(job["clock"])
    if "method" in job:
        plan = helpers.toy_plan(job["method"], changes=job["changes"])
        Run(plan, Path(job["folder"]), save_every=0.0).execute()
        return 0
    sys.argv = ["ratp", *job["words"]]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def fork(job):
    """Starts a fork; returns its number."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ratp begins
        code = work(job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve():
    """Serves requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        answer = wait_for_exit(job["wait"]) if "wait" in job else fork(job)
        print(json.dumps(answer), file=answers, flush=True)


def wait_for_exit(child):
    """Waits for a fork; returns its exit code, or the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    serve()
