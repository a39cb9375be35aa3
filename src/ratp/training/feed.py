"""Images of the next batches, fetched before they are drawn.

A copy of the batches' generator draws ahead, in another thread. A batch is handed out only if the generator is in the
state from which the copy drew it, so the images are always those that the generator draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from ratp.data.streamed import Sent, StreamedImages, copying_stream
from ratp.functional.numerics import Draw, drawn
from ratp.training.cuda_graphs import RECORDING, before_replays

# Batches to fetch ahead of single steps.
AHEAD = 3


class Wanted(NamedTuple):
    """A batch.

    Attributes:
        skipped: Draws of the generator since the batch before, which need no images of the domain.
        draws: The draws of its indices.
        own: Number of images in the domain: further indices are the memory's.
    """

    skipped: tuple[Draw, ...]
    draws: tuple[Draw, ...]
    own: int


class _Fetched(NamedTuple):
    state: Tensor  # the generator's state before the batch is drawn
    sent: Sent


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Feed:
    """Fetches the images of the next batches.

    Args:
        images: All images of the domain.
        generator: What draws the batches.
    """

    def __init__(self, images: StreamedImages, generator: torch.Generator) -> None:
        self._images, self._generator = images, generator
        self._copy = torch.Generator(device=generator.device)
        self._skipped: list[Draw] = []
        self._queue: deque[tuple[Wanted, Future[_Fetched]]] = deque()
        self._static: list[tuple[Wanted, Tensor]] = []
        self._thread = ThreadPoolExecutor(1, "batches")

    def skip(self, draw: Draw) -> None:
        """Notes a draw that needs no images of the domain."""
        self._skipped.append(draw)

    def take(self, draws: Sequence[Draw], own: int) -> tuple[Tensor, Tensor]:
        """Draws a batch; returns its indices and, for each, an image: of the memory's, the domain's last.

        While a step is captured, the images are those of a buffer that is filled before every replay.
        """
        wanted, self._skipped = Wanted(tuple(self._skipped), tuple(draws), own), []
        if _is_capturing(self._generator.device):
            place = drawn(draws, own, self._generator)
            buffer = torch.empty(len(place), *self._images.shape[1:], dtype=torch.uint8, device=place.device)
            self._static.append((wanted, buffer))
            before_replays(self._fill)
            return place, buffer
        state = self._generator.get_state()
        place = drawn(draws, own, self._generator)
        images = self._head(wanted, state)
        if images is None:
            self._restart(self._generator.get_state())
            images = self._images[place.clamp(max=own - 1)]
        while len(self._queue) < AHEAD:
            self._fetch(wanted)
        return place, images

    def _head(self, wanted: Wanted, state: Tensor) -> Tensor | None:
        """The batch that was fetched next, if it is the one that is drawn from a state of the generator."""
        if not self._queue or self._queue[0][0][1:] != wanted[1:]:
            return None
        fetched = self._queue.popleft()[1].result()
        return fetched.sent.arrived() if torch.equal(fetched.state, state) else None

    def _restart(self, state: Tensor) -> None:
        """Forgets what was fetched and goes on from a state of the generator."""
        self._queue.clear()
        self._thread.submit(self._copy.set_state, state.clone())

    def _fetch(self, wanted: Wanted) -> None:
        self._queue.append((wanted, self._thread.submit(self._fetched, wanted)))

    def _fetched(self, wanted: Wanted) -> _Fetched:
        """Draws a batch with the copy of the generator and sends its images on their way, in the other thread."""
        with ExitStack() as stack:
            if self._copy.device.type == "cuda":
                stack.enter_context(RECORDING)  # while a graph is captured, nothing is drawn
                stack.enter_context(torch.cuda.stream(copying_stream(self._copy.device)))
            for draw in wanted.skipped:
                drawn([draw], 0, self._copy)
            state = self._copy.get_state()
            place = drawn(wanted.draws, wanted.own, self._copy).clamp(max=wanted.own - 1).cpu()
        return _Fetched(state, self._images.sent(place, len(place)))

    def _fill(self) -> None:
        """Copies the images of the next captured steps into their buffers."""
        steps = [wanted for wanted, _ in self._static]
        if not self._is_next(steps, self._generator.get_state()):
            self._restart(self._generator.get_state())
            self._fetch(steps[0]._replace(skipped=()))
        for wanted in steps[len(self._queue) :]:
            self._fetch(wanted)
        for _, buffer in self._static:
            buffer.copy_(self._queue.popleft()[1].result().sent.arrived())
        for wanted in steps:
            self._fetch(wanted)

    def _is_next(self, steps: Sequence[Wanted], state: Tensor) -> bool:
        """Whether what was fetched is what these steps draw from a state of the generator."""
        if not self._queue or not torch.equal(self._queue[0][1].result().state, state):
            return False
        fetched = [wanted for wanted, _ in self._queue]
        return fetched[0][1:] == steps[0][1:] and fetched[1 : len(steps)] == list(steps[1 : len(fetched)])
