"""What is measured in a run: its method on the test sets of its stream, which nothing else of a run looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from ratp.errors import TrainingError
from ratp.evaluate import accuracy, accuracy_as, embeddings
from ratp.keepsakes import FEATURE_COUNT
from ratp.method import Method
from ratp.randomness import Randomness
from ratp.stream import Stream


@final
class Measures:
    """The measures of a run. They change no method and draw from no generator of the training.

    Args:
        stream: Its stream.
        seed: Its seed, which decides whose embeddings are shown.

    Attributes:
        names: The domains that can be measured.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self._tests, self._seed = stream.tests, seed
        self.names = tuple(test.name for test in self._tests if test is not None)

    def row(self, method: Method, first: int = 0) -> dict[str, float]:
        """Accuracies on all domains, or on those from a place in the order on.

        Raises:
            TrainingError: If predictions are no numbers any more.
        """
        return {test.name: accuracy(method, test) for test in self._tests[first:] if test is not None}

    def row_as_told(self, method: Method, learnt: Sequence[int]) -> dict[str, float]:
        """Accuracies on the domains it has learnt if it is told which they are; nothing if that makes no difference.

        Args:
            method: What is measured.
            learnt: Their places in the order; a domain whose stage was undone is not among them.
        """
        tests = [(stage, test) for stage, place in enumerate(learnt) if (test := self._tests[place]) is not None]
        try:
            found = {test.name: accuracy_as(method, test, stage) for stage, test in tests}
        except TrainingError:
            return {}
        return {name: value for name, value in found.items() if value is not None}

    def probe(self, method: Method, stage: int) -> dict[str, float]:
        """The accuracy on the domain of a stage; nothing if there is none, for a probe must not end a run."""
        test = self._tests[stage]
        try:
            return {} if test is None else {test.name: accuracy(method, test)}
        except TrainingError:
            return {}

    def embeddings(self, method: Method) -> dict[str, Tensor]:
        """As :func:`ratp.evaluate.embeddings`, the same images whenever it is asked."""
        return embeddings(method, self._tests, FEATURE_COUNT, Randomness(self._seed))
