"""NVIDIA's MPS, which lets kernels of several processes run on a GPU at the same time.

A control daemon is started for one command, in a private folder, and stopped with it. A daemon that already runs for
this user is used and left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ratp.errors import RatpError

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - where the control program looks
# Seconds for an answer of the control program, for a first process on the GPU, and for the end of the daemon.
_ANSWER, _FIRST_PROCESS, _END = 10.0, 60.0, 20.0
# How often, and after how many seconds, a daemon that has just been started is asked again.
_TRIES, _PAUSE = 10, 0.1
# Waits until its input ends, which it also does if this process is killed, and stops the daemon.
_WATCH = "import subprocess, sys; sys.stdin.read(); subprocess.run([sys.argv[1]], input=b'quit\\n')"
# Computes on the GPU without torch, which takes seconds to import.
_TRY = """
import ctypes, sys
def check(code):
    if code:
        sys.exit(f"CUDA error {code}")
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
"""


class MpsError(RatpError):
    """MPS cannot be used; the message says why."""


@contextmanager
def mps(gpu: str) -> Iterator[dict[str, str]]:
    """Starts MPS for the block, unless it runs already.

    Args:
        gpu: A GPU to try it on, as a value of CUDA_VISIBLE_DEVICES.

    Yields:
        Environment variables for the processes that are to use it.

    Raises:
        MpsError: If it is not installed, is refused, does not answer, or belongs to another user.
    """
    control = shutil.which(_CONTROL)
    if control is None:
        raise MpsError(f"{_CONTROL} is not installed")
    if _runs_already(control):
        yield {}
        return
    with TemporaryDirectory(prefix="ratp-mps-", ignore_cleanup_errors=True) as folder:
        ours = {_PIPES: f"{folder}/pipes", _LOGS: f"{folder}/logs"}
        for place in ours.values():
            Path(place).mkdir()
        # The daemon sees all GPUs, so that processes name theirs as without it.
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | ours
        with _stopped_at_the_end(control, environment):
            _ask(["-d"], control, environment)
            _await(control, environment)
            _try(gpu, ours)
            yield ours


def _runs_already(control: str) -> bool:
    """Whether a daemon of this user, or of the system, answers where programs look for one."""
    pipes = Path(os.environ.get(_PIPES, _USUAL_PIPES))
    try:
        owner = (pipes / "control").stat().st_uid
    except OSError:
        return False
    if owner not in (0, os.getuid()):
        raise MpsError("it belongs to another user of this machine")
    try:
        _ask([], control, os.environ)
    except subprocess.TimeoutExpired:
        raise MpsError("the control daemon that runs does not answer") from None
    except MpsError:  # left behind by a daemon that has ended
        return False
    return True


def _ask(arguments: list[str], control: str, environment: Mapping[str, str]) -> None:
    """Calls the control program: starts the daemon (``-d``), or else asks it for its servers."""
    try:
        with TemporaryDirectory() as folder, Path(folder, "output").open("w+", errors="replace") as output:
            done = subprocess.run(  # noqa: S603 - no shell; the daemon keeps a pipe open, so a file takes the output
                [control, *arguments],
                input=None if arguments else b"get_server_list\n",
                stdin=subprocess.DEVNULL if arguments else None,
                stdout=output,
                stderr=output,
                env=environment,
                timeout=_ANSWER,
                check=False,
            )
            output.seek(0)
            said = output.read().strip()
    except OSError as error:
        raise MpsError(f"{_CONTROL} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise MpsError(said.splitlines()[-1] if said else f"{_CONTROL} ended with exit code {done.returncode}")


def _await(control: str, environment: Mapping[str, str]) -> None:
    """Waits until a daemon that has just been started answers."""
    for _ in range(_TRIES):
        with suppress(MpsError):
            return _ask([], control, environment)
        time.sleep(_PAUSE)
    return _ask([], control, environment)


def _try(gpu: str, ours: Mapping[str, str]) -> None:
    """Has a process use the GPU under MPS, which also starts its server."""
    environment = {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run(  # noqa: S603 - this Python, no shell
        [sys.executable, "-c", _TRY],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=_FIRST_PROCESS,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise MpsError(f"a process cannot use the GPU under it ({said[-1] if said else done.returncode})")


@contextmanager
def _stopped_at_the_end(control: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Stops the daemon after the block, also if this process is killed within it."""
    watch = subprocess.Popen(  # noqa: S603 - this Python, no shell
        [sys.executable, "-S", "-c", _WATCH, control],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the block
    )
    assert watch.stdin
    try:
        yield
    except subprocess.TimeoutExpired as error:
        raise MpsError(f"it does not answer within {error.timeout:.0f} s") from None
    finally:
        watch.stdin.close()
        try:
            watch.wait(_END)
        except subprocess.TimeoutExpired:
            os.killpg(watch.pid, signal.SIGKILL)
            watch.wait()
        with suppress(OSError, ValueError):  # it is gone, unless it ignored the request
            os.kill(int(Path(environment[_PIPES], f"{_CONTROL}.pid").read_text()), signal.SIGKILL)
