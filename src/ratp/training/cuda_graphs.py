"""Training steps as CUDA graphs: captured once, then replayed as a whole, without work on the host in between.

A small network's step is hundreds of short kernels, and launching them from Python takes several times as long as
running them. A replay launches the kernels of several steps at once, on the same memory and with the same generators,
so the results equal those of eager steps.

Several threads may train at once, each on its own stream and capturing on another (:func:`recording_on`). A process
captures one graph at a time; the other threads continue to compute.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar

import torch

from ratp.errors import Note

# Eager steps before the capture, in which libraries initialise themselves and choose kernels.
WARM_UP = 3
# Most steps in a graph: enough to make the host's cost of a replay, some ten kernels for generators, negligible.
BUNCH = 10
# Share of a GPU's memory that must be free to capture while other runs use it; with less, caches are emptied first.
ENOUGH = 0.25

# Held while a graph is captured or freed. Torch captures one graph at a time, freeing cached memory breaks a capture,
# and the device's default generator keeps a list of all graphs.
RECORDING = threading.RLock()
_thread = threading.local()
T = TypeVar("T")
U = TypeVar("U")


class CaptureWarning(Note):
    """Steps that should be captured run eagerly instead."""


@contextmanager
def recording_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within the block, this thread captures its steps on ``stream``, which no other thread may use."""
    before = _own_stream()
    _thread.stream = stream
    try:
        yield
    finally:
        _thread.stream = before


def before_replays(prepare: Callable[[], None]) -> None:
    """Has ``prepare`` called before every replay of the graph that this thread is capturing."""
    if prepare not in _thread.prepare:
        _thread.prepare.append(prepare)


class Stepper(Protocol):
    """Makes steps."""

    def __call__(self, most: int = 1) -> int:
        """Makes one or several steps, at most ``most``; returns how many."""


@contextmanager
def stepper(
    step: Callable[[], None], generators: Sequence[torch.Generator] = (), *, bunch: int = 1
) -> Iterator[Stepper]:
    """Yields a function that makes steps, eagerly if they cannot be captured; frees the graph at the end of the block.

    The step meets the conditions of :class:`ratp.training.phase.Phase` for ``captures``; ``generators`` are all that it
    uses. A graph holds ``bunch`` steps.
    """

    def once(most: int = 1) -> int:
        del most
        step()
        return 1

    if reason := _obstacle(generators):
        _warn(reason)
        yield once
        return
    captured = _CapturedSteps(step, generators, bunch)
    try:
        yield captured
    finally:
        captured.close()


def bunches(steps: int) -> int:
    """Returns steps per graph, so that an epoch of ``steps`` is a whole number of graphs."""
    return max(size for size in range(1, BUNCH + 1) if steps % size == 0)


class _CapturedSteps:
    """Makes the first steps eagerly, captures the next ones, and replays the graph from then on."""

    def __init__(self, step: Callable[[], None], generators: Sequence[torch.Generator], bunch: int) -> None:
        self._step, self._bunch = step, bunch
        self._generators = list({id(generator): generator for generator in generators}.values())
        self._device = next((g.device for g in self._generators), torch.device("cuda", torch.cuda.current_device()))
        self._alone = _own_stream() is None
        self._stream = _side_stream(self._device)
        self._made = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gave_up = False
        self._prepare: list[Callable[[], None]] = []

    def __call__(self, most: int = 1) -> int:
        """Replays the graph, or makes one eager step where that is not possible."""
        with torch.cuda.device(self._device):
            if not self._gave_up and self._made >= WARM_UP and most >= self._bunch:
                if self._graph is None:
                    with RECORDING:
                        self._graph = self._record()
                    self._gave_up = self._graph is None
                if self._graph is not None:
                    for prepare in self._prepare:
                        prepare()
                    self._graph.replay()
                    return self._bunch
            self._made += 1
            if self._gave_up:
                self._step()
            else:
                self._run_aside()
            return 1

    def close(self) -> None:
        """Frees the graph and its memory, once the device has finished."""
        if self._graph is not None:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream().synchronize()
                with RECORDING:
                    self._graph.reset()
            self._graph = None

    def _run_aside(self) -> None:
        """Makes an eager step on the stream of the capture, ordered between earlier and later work."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step()
        current.wait_stream(self._stream)

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """Captures a graph without running it; None, and nothing has changed, if it cannot be captured.

        Cached memory is freed first, as ``torch.cuda.graph`` does. If other runs use the GPU, this happens only when
        memory is short, because it waits for the work of all of them.
        """
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its generators unusable: they then get their state from a copy.
        drawn_from = [*self._generators, torch.cuda.default_generators[torch.cuda.current_device()]]
        copies = [(generator, generator.clone_state()) for generator in drawn_from]
        try:
            free, total = torch.cuda.mem_get_info()
            if self._alone or free < ENOUGH * total:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            for generator in self._generators:
                graph.register_generator_state(generator)
            with torch.cuda.stream(self._stream):
                # Only this thread's calls can break the capture; other threads may use the device.
                _thread.prepare = self._prepare
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(self._bunch):
                        self._step()
                finally:
                    graph.capture_end()
        except Exception as error:  # of any kind: if the step itself is wrong, the eager step raises it
            for generator, copy in copies:
                generator.graphsafe_set_state(copy)
            _warn(str(error).strip().partition("\n")[0] or type(error).__name__)
            return None
        return graph


def on_two_streams(device: torch.device, one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
    """Calls ``one`` on a second stream while ``other`` uses the current one; in turn where runs share the GPU."""
    if _own_stream() is not None:
        return one(), other()
    current, beside = torch.cuda.current_stream(device), _common_stream(device, "beside")
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        first = one()
    second = other()
    current.wait_stream(beside)
    return first, second


def _obstacle(generators: Sequence[torch.Generator]) -> str | None:
    """Returns why nothing can be captured here; None: it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    elsewhere = [str(generator.device) for generator in generators if generator.device.type != "cuda"]
    return f"the steps draw from a generator on {elsewhere[0]}" if elsewhere else None


def _own_stream() -> torch.cuda.Stream | None:
    """Returns the stream from :func:`recording_on`; None: this thread is the only one that computes."""
    return getattr(_thread, "stream", None)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which this thread captures.

    Libraries keep one workspace per stream, which all graphs captured on it share. Their replays must not overlap:
    those of one thread do not, those of several threads may.
    """
    return _own_stream() or _common_stream(device, "captures")


@cache
def _common_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """Returns the stream for a use by all threads without a private one."""
    del use
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _warn(reason: str) -> None:
    warnings.warn(f"training continues without CUDA graphs: {reason}", CaptureWarning, stacklevel=3)
