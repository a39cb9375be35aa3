"""The Unfamiliar Period as a deployed model lives it: a new domain streams past once, before anything trained on it.

A method that adapts while it predicts does so here; any other stays as it is until its stage. This module needs no
torch: it turns the numbers of right predictions into scores. :mod:`ratp.evaluation.accuracy` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ratp.errors import RatpError

# The orders in which a domain's images arrive: at random, and class by class to a large degree.
ORDERS = ("shuffled", "clustered")
# Right predictions are counted per block; windows consist of whole blocks, but for the last.
BLOCK, WINDOW = 64, 256
# Parts of the stream that have an accuracy of their own, by the number of their last image.
PARTS = {"1-64": 64, "65-256": 256, "257-1024": 1024}
# A model is as good as after its stage once a window reaches this share of the accuracy after it.
REACHED = 0.95


@dataclass(frozen=True)
class Counts:
    """Right predictions during one pass over a domain.

    Attributes:
        images: Number of images.
        correct: Right predictions in every block.
        frozen: Those of the model from before the pass, on the same images.
    """

    images: int
    correct: tuple[int, ...]
    frozen: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [min(BLOCK, self.images - start) for start in range(0, self.images, BLOCK)]
        for found in (self.correct, self.frozen):
            if len(found) != len(sizes) or not all(0 <= n <= size for n, size in zip(found, sizes, strict=True)):
                raise RatpError(f"{list(found)} are not numbers of right predictions on {self.images} images.")

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"images": self.images, "correct": list(self.correct), "frozen": list(self.frozen)}

    @staticmethod
    def from_json(data: Any) -> Counts:
        """Reads what :meth:`to_json` wrote."""
        try:
            return Counts(data["images"], tuple(data["correct"]), tuple(data["frozen"]))
        except (KeyError, TypeError) as error:
            raise RatpError(f"not the counts of a pass: {error!r}.") from error


@dataclass(frozen=True)
class Score:
    """What one pass over a domain was like.

    Attributes:
        images: Number of images.
        parts: Accuracy in percent on every part of the stream that has images, by its name in :data:`PARTS`.
        accuracy: Accuracy in percent on all images.
        frozen: That of the model from before the pass.
        lost: Images predicted wrong that the model after the stage would have predicted right: the sum over windows
            of their images times TDA, less their right predictions, where that is positive.
        t95: Number of images after which a window first reached 95 % of TDA, in blocks; None if none did.
        harm: Share of windows, in percent, in which the model of before the pass would have been better.
    """

    images: int
    parts: Mapping[str, float]
    accuracy: float
    frozen: float
    lost: float
    t95: int | None
    harm: float

    @staticmethod
    def of(counts: Counts, tda: float) -> Score:
        """Returns the score of a pass, given the accuracy in percent on the domain after its stage."""
        ends = [0, *PARTS.values()]
        parts = {}
        for name, (first, last) in zip(PARTS, pairwise(ends), strict=True):
            if size := min(last, counts.images) - min(first, counts.images):
                parts[name] = 100 * sum(counts.correct[first // BLOCK : last // BLOCK]) / size
        wide = WINDOW // BLOCK
        starts = range(0, len(counts.correct), wide)
        windows = [(sum(counts.correct[k : k + wide]), sum(counts.frozen[k : k + wide])) for k in starts]
        sizes = [min(WINDOW, counts.images - k * BLOCK) for k in starts]
        lost = sum(max(0.0, tda / 100 * size - right) for size, (right, _) in zip(sizes, windows, strict=True))
        full = counts.images // BLOCK  # blocks
        sliding = ((k + wide, sum(counts.correct[k : k + wide])) for k in range(full - wide + 1))
        t95 = next((k * BLOCK for k, right in sliding if 100 * right >= REACHED * tda * WINDOW), None)
        harm = 100 * sum(right < frozen for right, frozen in windows) / len(windows)
        accuracy, frozen = (100 * sum(found) / counts.images for found in (counts.correct, counts.frozen))
        return Score(counts.images, parts, accuracy, frozen, lost, t95, harm)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Score:
        """Reads what :meth:`to_json` wrote."""
        try:
            score = Score(**data)
            numbers = [score.accuracy, score.frozen, score.harm, *score.parts.values()]
            amounts = [score.images, score.lost, *([] if score.t95 is None else [score.t95])]
            valid = all(0 <= n <= 100 for n in numbers) and all(0 <= n <= score.images for n in amounts)
        except (TypeError, AttributeError) as error:
            raise RatpError(f"not the score of a pass: {error!r}.") from error
        if not valid or not score.parts.keys() <= PARTS.keys():
            raise RatpError("the score of a pass holds impossible values.")
        return score


def with_scores(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entry ``online`` of ``matrix.json``: scores by domain and order, as its journal has them.

    It is left out if no pass was measured.
    """
    ends = (event for event in events if event.get("event") == "stage_finished" and event.get("online"))
    found = {str(event.get("domain")): event["online"] for event in ends}
    return {"online": found} if found else {}
