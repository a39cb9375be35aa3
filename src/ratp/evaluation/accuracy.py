"""Measures methods on test sets. The only module that reads the labels of targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import TrainingError
from ratp.evaluation.details import BINS, PICTURES, Bin, Details, Example, Examples, as_picture
from ratp.evaluation.online import BLOCK, ORDERS, Counts
from ratp.streams.stream import Stream
from ratp.training.method import Method, OnlineMethod, check_scores
from ratp.training.phase import called

FEATURE_COUNT = 200  # images per domain
# Concentration of the order of images that come class by class to a large degree.
CLUSTERING = 0.1


def accuracy(method: Method, domain: LabelledDomain) -> float:
    """Returns the accuracy in percent on a labelled domain.

    Args:
        method: The method, which has been trained.
        domain: The images, and the labels to compare with.

    Raises:
        TrainingError: If predictions are not finite.
    """
    return _percent_correct(method.predict(domain.images), domain, called(method, "predict"))


def _percent_correct(logits: Tensor, domain: LabelledDomain, giver: str) -> float:
    check_scores(logits, len(domain), len(domain.classes), giver)
    correct = (logits.argmax(dim=1) == domain.labels.to(logits.device)).sum()
    count = int(correct.where(logits.isfinite().all(), -1))  # one transfer from the device
    if count < 0:
        raise TrainingError(f"predictions on {domain.name} are not finite")
    return 100 * count / len(domain)


def _predicted(method: Method, domain: LabelledDomain) -> Tensor:
    """Returns which images a method predicts right."""
    return _hits(method.predict(domain.images), domain, called(method, "predict"))


def _observed(method: Method, batch: LabelledDomain, device: torch.device) -> Tensor:
    """Returns which images of a batch a method predicts right; an online method adapts to them."""
    if not isinstance(method, OnlineMethod):
        return _predicted(method, batch)
    return _hits(method.observe(batch.images.to(device)), batch, called(method, "observe"))


def _hits(logits: Tensor, domain: LabelledDomain, giver: str) -> Tensor:
    check_scores(logits, len(domain), len(domain.classes), giver)
    right = logits.argmax(dim=1) == domain.labels.to(logits.device)
    return (right & logits.isfinite().all(dim=1)).cpu()


@dataclass(frozen=True, eq=False)
class Guesses:
    """What a method predicts for some images: class and confidence of each."""

    labels: Tensor
    confidence: Tensor

    @staticmethod
    def of(logits: Tensor) -> Guesses:
        """Returns the predictions that logits mean."""
        return Guesses(logits.argmax(dim=1).cpu(), logits.softmax(dim=1).amax(dim=1).cpu())

    def details(self, test: LabelledDomain) -> Details:
        """Counts the predictions on a test set."""
        true, predicted = test.labels.cpu().numpy(), self.labels.numpy()
        confidence = self.confidence.double().numpy()
        cells, counts = np.unique(np.stack([true, predicted], axis=1), axis=0, return_counts=True)
        confusion = {(t, p): n for (t, p), n in zip(cells.tolist(), counts.tolist(), strict=True)}
        place = np.clip((confidence * BINS).astype(int), 0, BINS - 1)
        weights = (None, true == predicted, confidence)
        images, right, sums = (np.bincount(place, weight, minlength=BINS).tolist() for weight in weights)
        return Details(confusion, tuple(map(Bin, images, map(int, right), sums)))


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a method predicts for the images on which a target is tested, or for all images of one without labels.

    Attributes:
        guesses: The predictions.
        files: Name of every image's file, or else its number.
        labels: The true classes; None if they are unknown.
        images: The images.
        classes: Names of the classes.
    """

    guesses: Guesses
    files: Sequence[str]
    labels: Tensor | None
    images: Tensor
    classes: Sequence[str]

    @property
    def true(self) -> list[str] | None:
        """Names of the true classes; None if they are unknown."""
        return None if self.labels is None else [self.classes[k] for k in self.labels.tolist()]

    def examples(self) -> Examples:
        """Chooses pictures of the most confident mistakes and of the least certain predictions."""
        order = self.guesses.confidence.argsort(stable=True)
        wrong = order[:0] if self.labels is None else order[(self.guesses.labels != self.labels.cpu())[order]]
        return Examples(*(tuple(map(self._example, places[:PICTURES].tolist())) for places in (wrong.flip(0), order)))

    def _example(self, place: int) -> Example:
        return Example(
            self.files[place],
            self.classes[int(self.guesses.labels[place])],
            None if self.labels is None else self.classes[int(self.labels[place])],
            float(self.guesses.confidence[place]),
            as_picture(self.images[place]),
        )


@final
class Evaluator:
    """Measures a method on the test sets of a stream. It changes no method and uses no generator of the training.

    The seed selects the images for embeddings.

    Attributes:
        names: The domains with labels.
        guesses: By domain, what the method predicted when :meth:`row` last measured it.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self._stream, self._tests, self._seed = stream, stream.tests, seed
        self.names = tuple(test.name for test in self._tests if test is not None)
        self.guesses: dict[str, Guesses] = {}

    def row(self, method: Method, first: int = 0) -> dict[str, float]:
        """Returns the accuracy by domain, from place ``first`` of the order on."""
        self.guesses = {}
        row, giver = {}, called(method, "predict")
        for test in self._tests[first:]:
            if test is not None:
                logits = method.predict(test.images)
                row[test.name] = _percent_correct(logits, test, giver)
                self.guesses[test.name] = Guesses.of(logits)
        return row

    def outcome(self, method: Method, target: UnlabelledDomain) -> Outcome:
        """Returns what a method predicts for a target, which :meth:`row` may have found out already."""
        test = next((test for test in self._tests if test is not None and test.name == target.name), None)
        images, labels = (target.images, None) if test is None else (test.images, test.labels)
        known = self._stream.files if test is None else self._stream.test_files
        files = known.get(target.name) or [str(k) for k in range(len(images))]
        guesses = self.guesses.get(target.name) or Guesses.of(method.predict(images))
        return Outcome(guesses, files, labels, images, self._stream.classes)

    def details(self) -> dict[str, Details]:
        """Returns the counts of what :meth:`row` last measured, by domain."""
        tests = {test.name: test for test in self._tests if test is not None}
        return {name: guesses.details(tests[name]) for name, guesses in self.guesses.items()}

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

    def passes(self, build: Callable[[], Method], stage: int, batch: int, device: torch.device) -> dict[str, Counts]:
        """Streams the domain of a stage once in every order past methods that ``build`` returns.

        Those that learn while they predict do so, batch by batch; others only predict. Predictions that are not finite
        count as wrong.

        Args:
            build: Builds the method as it was before the stage; what it returns is used up.
            stage: Number of the stage.
            batch: Images in a batch; a single last image joins the batch before.
            device: Where online methods get their images.

        Returns:
            Right predictions by order; nothing if the domain has no labels.
        """
        test = self._tests[stage]
        if test is None:
            return {}
        frozen, found = _predicted(build(), test), {}
        for name in ORDERS:
            method = build()
            order = self._order(name, test)
            parts = list(torch.split(order, batch))
            if len(parts) > 1 and len(parts[-1]) == 1:
                parts[-2:] = [torch.cat(parts[-2:])]
            hits = torch.cat([_observed(method, test.subset(part), device) for part in parts])
            counts = ([int(block.sum()) for block in torch.split(one, BLOCK)] for one in (hits, frozen[order]))
            found[name] = Counts(len(test), *map(tuple, counts))
        return found

    def _order(self, name: str, test: LabelledDomain) -> Tensor:
        """Returns the order in which the images of a domain arrive, the same for all methods.

        ``clustered``: there are as many slots as classes, and the images of every class are spread over the slots by a
        Dirichlet distribution of concentration :data:`CLUSTERING`. Slot follows slot, and within a slot, class follows
        class in random order.
        """
        randomness = Randomness(self._seed)
        if name == "shuffled":
            return torch.randperm(len(test), generator=randomness.generator("online", name, test.name))
        rng = np.random.default_rng(randomness.derive("online", name, test.name))
        labels = test.labels.cpu().numpy()
        classes = np.unique(labels)
        spread = []
        for label in classes:
            members = rng.permutation(np.flatnonzero(labels == label))
            ends = np.cumsum(rng.dirichlet([CLUSTERING] * len(classes)))[:-1]
            spread.append(np.split(members, np.round(ends * len(members)).astype(int)))
        slots = ([spread[k][slot] for k in rng.permutation(len(classes))] for slot in range(len(classes)))
        return torch.from_numpy(np.concatenate([part for slot in slots for part in slot]))

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
