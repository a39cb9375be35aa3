"""Lanes that execute runs one after another; on a GPU each lane has its own streams."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812

from ratp.errors import RatpError
from ratp.runs.events import Event
from ratp.runs.run import Run
from ratp.training.cuda_graphs import RECORDING, recording_on


class Lane:
    """Executes runs one after another, within the context ``held``."""

    held: AbstractContextManager[object] = nullcontext()
    gave_up = False

    def events(self, run: Run) -> Generator[Event, None, None]:
        """Like :meth:`ratp.runs.run.Run.events`."""
        raise NotImplementedError


class StreamLane(Lane):
    """Executes runs in the calling thread, on its own two CUDA streams."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, recording: torch.cuda.Stream) -> None:
        self._device, self._stream, self._recording = device, stream, recording
        self._ready = False

    def events(self, run: Run) -> Generator[Event, None, None]:
        """Like :meth:`ratp.runs.run.Run.events`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), recording_on(self._recording):
            self._warm_up()
            try:
                yield from run.events()
            finally:
                self._stream.synchronize()  # its memory may go to others from now on

    def _warm_up(self) -> None:
        """Lets libraries initialise for this thread while nobody records a graph."""
        if self._ready:
            return
        with RECORDING:
            images = torch.zeros(1, 3, 8, 8, device=self._device)
            kernels, matrix = torch.zeros(4, 3, 3, 3, device=self._device), torch.zeros(144, 2, device=self._device)
            _ = F.conv2d(images, kernels).flatten(1) @ matrix
            self._stream.synchronize()
        self._ready = True


def stream_lanes(device: torch.device, count: int) -> list[StreamLane]:
    """Lanes on one GPU that share no stream."""
    streams = distinct_streams(device, 2 * count)
    return [StreamLane(device, *pair) for pair in zip(streams[::2], streams[1::2], strict=True)]


def distinct_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Distinct streams; torch hands out the same 32 in turn."""
    found: dict[int, torch.cuda.Stream] = {}
    for _ in range(8 * count):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        found.setdefault(stream.cuda_stream, stream)
        if len(found) == count:
            return list(found.values())
    raise RatpError(f"{device} does not have {count} streams. Run fewer at once (--jobs).")
