"""Measures methods on test sets. The only module that reads the labels of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain
from ratp.errors import TrainingError
from ratp.streams.stream import Stream
from ratp.training.method import Method, check_scores
from ratp.training.phase import called

FEATURE_COUNT = 200  # images per domain


def accuracy(method: Method, domain: LabelledDomain) -> float:
    """Returns the accuracy in percent on a labelled domain."""
    return _percent_correct(method.predict(domain.images), domain, called(method, "predict"))


def _percent_correct(logits: Tensor, domain: LabelledDomain, giver: str) -> float:
    check_scores(logits, len(domain), len(domain.classes), giver)
    correct = (logits.argmax(dim=1) == domain.labels.to(logits.device)).sum()
    count = int(correct.where(logits.isfinite().all(), -1))  # one transfer from the device
    if count < 0:
        raise TrainingError(f"predictions on {domain.name} are not finite")
    return 100 * count / len(domain)


@final
class Evaluator:
    """Measures a method on the test sets of a stream. It changes no method and uses no generator of the training.

    ``names`` are the domains with labels; the seed selects the images for embeddings.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self._tests, self._seed = stream.tests, seed
        self.names = tuple(test.name for test in self._tests if test is not None)

    def row(self, method: Method, first: int = 0) -> dict[str, float]:
        """Returns the accuracy by domain, from place ``first`` of the order on."""
        return {test.name: accuracy(method, test) for test in self._tests[first:] if test is not None}

    def row_by_domain(self, method: Method, learnt: Sequence[int]) -> dict[str, float]:
        """Returns the accuracy on each learnt domain when the method is told which domain it is, if that matters.

        ``learnt`` are the places of these domains in the order, without those whose stages were undone.
        """
        tests = [(stage, test) for stage, place in enumerate(learnt) if (test := self._tests[place]) is not None]
        giver = called(method, "predict_for_domain")
        try:
            logits = ((test, method.predict_for_domain(test.images, stage)) for stage, test in tests)
            return {test.name: _percent_correct(found, test, giver) for test, found in logits if found is not None}
        except TrainingError:
            return {}

    def probe(self, method: Method, stage: int) -> dict[str, float]:
        """Returns the accuracy on the domain of a stage; nothing if it cannot be measured, as probes must not fail."""
        test = self._tests[stage]
        try:
            return {} if test is None else {test.name: accuracy(method, test)}
        except TrainingError:
            return {}

    def embeddings(self, method: Method) -> dict[str, Tensor]:
        """Embeds up to :data:`FEATURE_COUNT` test images per domain, the same ones on every call.

        Returns ``embedding`` (n, dim), ``labels`` (n,) and ``domains`` (n,), places in the order; nothing if the method
        has no embedding.
        """
        randomness = Randomness(self._seed)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for place, test in enumerate(self._tests):
            if test is None:
                continue
            generator = randomness.generator("features", test.name)
            chosen = torch.randperm(len(test), generator=generator)[:FEATURE_COUNT]
            embedding = method.embed(test.images[chosen])
            if embedding is None:
                return {}
            parts.append((embedding.float().cpu(), test.labels[chosen].cpu(), torch.full((len(chosen),), place)))
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return dict(zip(("embedding", "labels", "domains"), columns, strict=True))
