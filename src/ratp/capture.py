"""Training steps as CUDA graphs: recorded once, then replayed as a whole, without the host's work in between.

A small network's step is hundreds of short kernels, and launching them from Python takes several times as long as
running them. A replay launches all of them at once. It runs the same kernels on the same memory and draws on from
the same generators, so the numbers are those of the step run by hand.

Several threads may train at once, each on a stream of its own and recording on another of its own
(:func:`recording_on`). A process makes one recording at a time; the other threads go on computing meanwhile.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

# Steps before the recording: libraries set themselves up and choose their kernels in these.
WARM_UP = 3

# Held while something is recorded or a recording is given up. Torch makes one recording at a time, waits for the whole
# device and empties its cache before it, none of which another recording survives; and the device's default
# generator keeps a list of all graphs.
RECORDING = threading.RLock()
_thread = threading.local()


class CaptureWarning(RuntimeWarning):
    """Steps that were to be captured run one by one instead."""


@contextmanager
def recording_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within the block, this thread records its steps on ``stream``, which must be no other thread's meanwhile."""
    before = getattr(_thread, "stream", None)
    _thread.stream = stream
    try:
        yield
    finally:
        _thread.stream = before


@contextmanager
def stepper(
    step: Callable[[], None], generators: Sequence[torch.Generator] = (), *, capture: bool = True
) -> Iterator[Callable[[], None]]:
    """What to call once for every step; a graph lives no longer than the block.

    Args:
        step: One step, which obeys what :class:`ratp.method.Phase` asks for with ``captures``.
        generators: All generators on the device that it draws from.
        capture: Whether to capture it; if not, or if it cannot be, every call is one of ``step``.
    """
    reason = _obstacle(generators) if capture else None
    if reason:
        _warn(reason)
    if reason or not capture:
        yield step
        return
    captured = _CapturedStep(step, generators)
    try:
        yield captured
    finally:
        captured.close()


class _CapturedStep:
    """A step that becomes a graph: the first calls run it, one records it, all later ones replay it."""

    def __init__(self, step: Callable[[], None], generators: Sequence[torch.Generator]) -> None:
        self._step = step
        self._generators = list({id(generator): generator for generator in generators}.values())
        self._device = next((g.device for g in self._generators), torch.device("cuda", torch.cuda.current_device()))
        self._stream = _side_stream(self._device)
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gave_up = False

    def __call__(self) -> None:
        """Makes one step."""
        self._calls += 1
        if self._gave_up:
            self._step()
            return
        with torch.cuda.device(self._device):
            if self._calls <= WARM_UP:
                self._run_aside()
                return
            if self._graph is None:
                with RECORDING:
                    self._graph = self._record()
            if self._graph is not None:
                self._graph.replay()
                return
        self._gave_up = True
        self._step()

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
        """The graph of one step, which is not run; None, and everything as before, if it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        # A recording that breaks off leaves its generators unusable: they then get their state from a copy.
        drawn_from = [*self._generators, torch.cuda.default_generators[torch.cuda.current_device()]]
        copies = [(generator, generator.clone_state()) for generator in drawn_from]
        try:
            # The stream is set once more, for torch does not set it back if the recording cannot be ended.
            with torch.cuda.stream(torch.cuda.current_stream()):
                for generator in self._generators:
                    graph.register_generator_state(generator)
                # Only this thread's calls can break it: other threads may go on using the device.
                with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._step()
        except Exception as error:  # whatever it is: if the step itself is wrong, running it says so
            for generator, copy in copies:
                generator.graphsafe_set_state(copy)
            _warn(str(error).strip().partition("\n")[0] or type(error).__name__)
            return None
        return graph


def _obstacle(generators: Sequence[torch.Generator]) -> str | None:
    """Why nothing can be captured here, if so."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    elsewhere = [str(generator.device) for generator in generators if generator.device.type != "cuda"]
    return f"the steps draw from a generator on {elsewhere[0]}" if elsewhere else None


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream all steps of this thread are recorded on.

    Libraries keep a workspace for every stream, and graphs recorded on one stream share it: replays must follow one
    another, as they do on the usual stream, and as those of several threads do not.
    """
    return getattr(_thread, "stream", None) or _common_stream(device)


@cache
def _common_stream(device: torch.device) -> torch.cuda.Stream:
    """The one for threads that were given none of their own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _warn(reason: str) -> None:
    warnings.warn(f"training goes on without CUDA graphs: {reason}", CaptureWarning, stacklevel=3)
