"""Training steps as CUDA graphs: recorded once, then replayed as a whole, without the host's work in between.

A small network's step is hundreds of short kernels, and launching them from Python takes several times as long as
running them. A replay launches all of them at once, for several steps in a row. It runs the same kernels on the same
memory and draws on from the same generators, so the numbers are those of the steps run by hand.

Several threads may train at once, each on a stream of its own and recording on another of its own
(:func:`recording_on`). A process makes one recording at a time; the other threads go on computing meanwhile.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar

import torch

from ratp.notes import Note

# Steps before the recording: libraries set themselves up and choose their kernels in these.
WARM_UP = 3
# Steps of a graph, at most: what a replay costs the host, some ten kernels for its generators among it, is then little.
BUNCH = 10
# Share of a GPU's memory that must be free for a recording beside other runs; if less is, caches are emptied first.
ENOUGH = 0.25

# Held while something is recorded or a recording is given up. Torch makes one recording at a time, giving back cached
# memory is nothing a recording survives, and the device's default generator keeps a list of all graphs.
RECORDING = threading.RLock()
_thread = threading.local()
T = TypeVar("T")
U = TypeVar("U")


class CaptureWarning(Note):
    """Steps that were to be captured run one by one instead."""


@contextmanager
def recording_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within the block, this thread records its steps on ``stream``, which must be no other thread's meanwhile."""
    before = _own_stream()
    _thread.stream = stream
    try:
        yield
    finally:
        _thread.stream = before


class Stepper(Protocol):
    """Makes steps when called."""

    def __call__(self, most: int = 1) -> int:
        """Makes one step or several, ``most`` at most; returns how many."""


@contextmanager
def stepper(
    step: Callable[[], None], generators: Sequence[torch.Generator] = (), *, capture: bool = True, bunch: int = 1
) -> Iterator[Stepper]:
    """What to call for steps; a graph lives no longer than the block.

    Args:
        step: One step, which obeys what :class:`ratp.phase.Phase` asks for with ``captures``.
        generators: All generators on the device that it draws from.
        capture: Whether to capture it; if not, or if it cannot be, every call is one of ``step``.
        bunch: Steps that become a graph together.
    """

    def once(most: int = 1) -> int:
        del most
        step()
        return 1

    reason = _obstacle(generators) if capture else None
    if reason:
        _warn(reason)
    if reason or not capture:
        yield once
        return
    captured = _CapturedSteps(step, generators, bunch)
    try:
        yield captured
    finally:
        captured.close()


def bunches(steps: int) -> int:
    """How many steps to put into a graph so that an epoch of ``steps`` consists of whole ones."""
    return max(size for size in range(1, BUNCH + 1) if steps % size == 0)


class _CapturedSteps:
    """Steps that become a graph: the first are run, some are recorded, and all later ones replay these."""

    def __init__(self, step: Callable[[], None], generators: Sequence[torch.Generator], bunch: int) -> None:
        self._step, self._bunch = step, bunch
        self._generators = list({id(generator): generator for generator in generators}.values())
        self._device = next((g.device for g in self._generators), torch.device("cuda", torch.cuda.current_device()))
        self._alone = _own_stream() is None
        self._stream = _side_stream(self._device)
        self._made = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gave_up = False

    def __call__(self, most: int = 1) -> int:
        """Makes a graph's steps, or one where that is not possible."""
        with torch.cuda.device(self._device):
            if not self._gave_up and self._made >= WARM_UP and most >= self._bunch:
                if self._graph is None:
                    with RECORDING:
                        self._graph = self._record()
                    self._gave_up = self._graph is None
                if self._graph is not None:
                    self._graph.replay()
                    return self._bunch
            self._made += 1
            if self._gave_up:
                self._step()
            else:
                self._run_aside()
            return 1

    def close(self) -> None:
        """Frees the graph and its memory, once the device is done with them."""
        if self._graph is not None:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream().synchronize()
                with RECORDING:
                    self._graph.reset()
            self._graph = None

    def _run_aside(self) -> None:
        """Runs the step on the stream it will be recorded on, after all work before and before all work to come."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step()
        current.wait_stream(self._stream)

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """The graph of a bunch, which is not run; None, and everything as before, if it cannot be recorded.

        Memory that torch only keeps is given back first, as ``torch.cuda.graph`` does, but beside other runs only if
        it is needed: that waits for the work of all of them, and all who want to record wait for it.
        """
        graph = torch.cuda.CUDAGraph()
        # A recording that breaks off leaves its generators unusable: they then get their state from a copy.
        drawn_from = [*self._generators, torch.cuda.default_generators[torch.cuda.current_device()]]
        copies = [(generator, generator.clone_state()) for generator in drawn_from]
        try:
            if self._alone or _memory_is_short():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            for generator in self._generators:
                graph.register_generator_state(generator)
            with torch.cuda.stream(self._stream):
                # Only this thread's calls can break it: other threads may go on using the device.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(self._bunch):
                        self._step()
                finally:
                    graph.capture_end()
        except Exception as error:  # whatever it is: if the step itself is wrong, running it says so
            for generator, copy in copies:
                generator.graphsafe_set_state(copy)
            _warn(str(error).strip().partition("\n")[0] or type(error).__name__)
            return None
        return graph


def at_once(device: torch.device, one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
    """Does two things that do not depend on each other, on a GPU at the same time.

    Small kernels leave most of a GPU idle. Where several runs share it they fill it anyway, and it is done in turn.

    Args:
        device: What both compute on.
        one: Done on a stream of its own; what it draws, the other must not draw from.
        other: Done on the usual one.
    """
    if device.type != "cuda" or _own_stream() is not None:
        return one(), other()
    current, beside = torch.cuda.current_stream(device), _stream_beside(device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        first = one()
    second = other()
    current.wait_stream(beside)
    return first, second


def _obstacle(generators: Sequence[torch.Generator]) -> str | None:
    """Why nothing can be captured here, if so."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    elsewhere = [str(generator.device) for generator in generators if generator.device.type != "cuda"]
    return f"the steps draw from a generator on {elsewhere[0]}" if elsewhere else None


def _memory_is_short() -> bool:
    """Whether a recording might not find the memory it needs."""
    free, total = torch.cuda.mem_get_info()
    return free < ENOUGH * total


def _own_stream() -> torch.cuda.Stream | None:
    """What :func:`recording_on` gave this thread; None: it is the only one that computes."""
    return getattr(_thread, "stream", None)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream all steps of this thread are recorded on.

    Libraries keep a workspace for every stream, and graphs recorded on one stream share it: replays must follow one
    another, as they do on the usual stream, and as those of several threads do not.
    """
    return _own_stream() or _common_stream(device)


@cache
def _common_stream(device: torch.device) -> torch.cuda.Stream:
    """The one for threads that were given none of their own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Where :func:`at_once` does what it does beside."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _warn(reason: str) -> None:
    warnings.warn(f"training goes on without CUDA graphs: {reason}", CaptureWarning, stacklevel=3)
