"""A trained method that several threads may ask at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ratp.errors import RatpError
from ratp.guard.watch import Predictions
from ratp.training.method import Method, OnlineMethod


class AnswerError(RatpError):
    """The model's answer to some images is not a finite number."""


class Model:
    """Predicts with a method, one thread at a time.

    Attributes:
        version: Number of its version.
        method: The method.
    """

    def __init__(self, method: Method, version: int) -> None:
        self.method, self.version = method, version
        self._lock = threading.Lock()

    def logits(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images, on the CPU."""
        with self._lock, torch.no_grad():
            return self._checked(self.method.predict(images))

    def predictions(self, images: Tensor) -> Predictions:
        """Returns probabilities and embeddings of uint8 images, from one forward pass where the network allows."""
        with self._lock, torch.no_grad():
            with _embeddings_of(self.method) as collected:
                logits = self.method.predict(images)
            found = collected(len(images))
            if found is None:
                found = self.method.embed(images)
        embedding = None if found is None else found.float().cpu()
        return Predictions(self._checked(logits).softmax(dim=1), embedding)

    def learn(self, images: Tensor) -> Predictions:
        """Lets an online method adapt to uint8 images; returns what it predicted for them meanwhile."""
        assert isinstance(self.method, OnlineMethod)
        with self._lock, torch.enable_grad(), _embeddings_of(self.method) as collected:
            logits = self.method.observe(images)
            embedding = collected(len(images), first=True)
        return Predictions(self._checked(logits).softmax(dim=1), None if embedding is None else embedding.float().cpu())

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of the method's state."""
        with self._lock:
            return {name: tensor.clone() for name, tensor in self.method.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        with self._lock:
            self.method.load_state(state)

    def _checked(self, logits: Tensor) -> Tensor:
        """Returns the logits on the CPU; raises AnswerError if some are not finite."""
        found = logits.float().cpu()
        bad = int((~found.isfinite()).any(dim=1).sum())
        if bad:
            raise AnswerError(
                f"version {self.version} of the model answers {bad} of {len(found)} images with NaN or infinity. "
                "Roll back to another version, or train the model again."
            )
        return found


@contextmanager
def _embeddings_of(method: Method) -> Iterator[Callable[..., Tensor | None]]:
    """Collects what the network's bottleneck returns in the block; None unless that is one row per image.

    A step of an online method has several forward passes, of which the ``first`` is that of its images.
    """
    bottleneck = getattr(getattr(method, "network", None), "bottleneck", None)
    rows: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del module, inputs
        rows.append(output.detach())

    def collected(count: int, *, first: bool = False) -> Tensor | None:
        if first:
            return next((part for part in rows if len(part) == count), None)
        return torch.cat(rows) if rows and sum(map(len, rows)) == count else None

    handle = bottleneck.register_forward_hook(keep) if isinstance(bottleneck, nn.Module) else None
    try:
        yield collected
    finally:
        if handle is not None:
            handle.remove()
