"""Signs of what a stage did to a model, told without any label of a target, and the verdict they lead to.

Pure functions over what models predict: :mod:`ratp.guard` asks the models. ``docs/guard.md`` has the measurements that
the limits are from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# Less skill is nothing to lose.
LEAST_SKILL = 0.2
# A model that is hardly surer of whole source images than of broken ones does not go by what images show as a whole.
LEAST_GAIN = 0.1


@dataclass(frozen=True)
class Sight:
    """What a model makes of some images.

    Attributes:
        probabilities: Of the classes, shape (n, classes).
        embedding: Shape (n, dim); None: the method has none to show.
    """

    probabilities: Tensor
    embedding: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """The classes it predicts."""
        return self.probabilities.argmax(dim=1)

    @property
    def confidence(self) -> float:
        """Mean probability of the predicted classes."""
        return self.probabilities.amax(dim=1).mean().item()

    def agreement(self, labels: Tensor) -> float:
        """Share of images predicted as ``labels`` has it."""
        return (self.labels == labels).double().mean().item()


@dataclass(frozen=True)
class View:
    """What a model makes of all the images that the guard looks at.

    Attributes:
        domain: Images of the domain of the stage.
        source: Images of the source.
        memory: Exemplars; None: there are none.
    """

    domain: Sight
    source: Sight
    memory: Sight | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all predictions are numbers."""
        sights = [sight for sight in (self.domain, self.source, self.memory) if sight is not None]
        return all(bool(sight.probabilities.isfinite().all()) for sight in sights)


@dataclass(frozen=True)
class Signs:
    """What can be told of a stage without labels of its domain. Shares lie in 0..1; None: there is nothing to tell.

    Attributes:
        images: How many images of the domain were looked at.
        structure: Correlation of neighbouring pixels in them, relative to that in source images; 0 in noise and blank
            images.
        recognition: How much surer the model before the stage is of them than of their pieces, relative to source
            images; 0: it sees nothing in them that it knows. None if it is hardly surer of source images either.
        variety_before: Entropy of the mean probabilities on them, relative to that of the source's labels; 0: the model
            before the stage takes all for one class.
        variety: Likewise after the stage.
        largest_before: Share of the class predicted most often, before.
        largest: Likewise after.
        missing_before: Number of classes that are never predicted, before.
        missing: Likewise after.
        confidence_before: Mean probability of the predicted classes, before.
        confidence: Likewise after.
        agreement: Share of the domain's images on which the models before and after agree.
        source_before: Share of source images that are classified rightly, before.
        source: Likewise after.
        source_agreement: Share of source images on which both models agree.
        source_skill: How much the model knew of the source before: 1 all, 0 no more than chance.
        source_kept: How much of that it knows after: 1 all, 0 nothing; None if there was hardly anything to keep.
        memory_before: Share of exemplars that are classified as they are labelled, before.
        memory: Likewise after.
        memory_agreement: Share of exemplars on which both models agree.
        memory_kept: As ``source_kept``, of the exemplars.
        memory_confidence_before: Mean probability of the predicted classes on exemplars, before.
        memory_confidence: Likewise after.
        spread_before: Mean cosine distance between the mean embeddings of the source's classes, before.
        spread: Likewise after.
    """

    images: int
    structure: float
    variety_before: float
    variety: float
    largest_before: float
    largest: float
    missing_before: int
    missing: int
    confidence_before: float
    confidence: float
    agreement: float
    source_before: float
    source: float
    source_agreement: float
    source_skill: float
    recognition: float | None = None
    source_kept: float | None = None
    memory_before: float | None = None
    memory: float | None = None
    memory_agreement: float | None = None
    memory_kept: float | None = None
    memory_confidence_before: float | None = None
    memory_confidence: float | None = None
    spread_before: float | None = None
    spread: float | None = None


@dataclass(frozen=True)
class Limits:
    """What signs must not fall below.

    Attributes:
        structure: Of the domain's images.
        recognition: Of the domain's images by the model before the stage.
        variety_before: By the model before the stage; less of it if the model has less than ``source_skill``.
        variety: By the model after it.
        source_kept: Of the source.
        memory_kept: Of the exemplars.
        images: Of the domain, for recognition and variety to mean anything.
        source_skill: Of the model, for the variety that it sees before the stage to mean all it can.
    """

    structure: float = 0.3
    recognition: float = 0.1
    variety_before: float = 0.6
    variety: float = 0.3
    source_kept: float = 0.5
    memory_kept: float = 0.4
    images: int = 20
    source_skill: float = 0.7


LIMITS = Limits()


@dataclass(frozen=True)
class Verdict:
    """What the guard makes of a stage.

    Attributes:
        signs: What it saw.
        limits: What it went by.
        reasons: Why it refuses the stage; none: it accepts it.
    """

    signs: Signs
    limits: Limits
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"reasons": list(self.reasons), "signs": _plain(asdict(self.signs)), "limits": asdict(self.limits)}


def decide(signs: Signs, limits: Limits = LIMITS) -> Verdict:
    """The verdict on a stage."""
    reasons = []
    if signs.structure < limits.structure:
        reasons.append(
            "its images are noise or blank: neighbouring pixels correlate "
            f"{signs.structure:.2f} times as much as in the source, limit {limits.structure:g}"
        )
    tells = signs.images >= limits.images and signs.source_kept is not None
    if tells and _is_below(signs.recognition, limits.recognition):
        reasons.append(
            "the model before it sees nothing in its images that it knows: recognition "
            f"{signs.recognition:.2f} (source images: 1), limit {limits.recognition:g}"
        )
    usual = limits.variety_before * min(1.0, signs.source_skill / limits.source_skill)
    if tells and signs.variety_before < usual:
        reasons.append(
            "the model before it takes its images for one class, or nearly so: "
            f"variety {signs.variety_before:.2f}, limit {usual:.2g}"
        )
    if tells and signs.variety < limits.variety:
        reasons.append(
            "the model after it takes its images for one class, or nearly so: "
            f"variety {signs.variety:.2f}, limit {limits.variety:g}"
        )
    if _is_below(signs.source_kept, limits.source_kept):
        reasons.append(
            f"the model forgot the source: {signs.source:.0%} of its images right, {signs.source_before:.0%} before"
        )
    if _is_below(signs.memory_kept, limits.memory_kept):
        reasons.append(
            f"the model forgot its exemplars: {signs.memory:.0%} of them as labelled, {signs.memory_before:.0%} before"
        )
    return Verdict(signs, limits, tuple(reasons))


def compare(
    before: View,
    after: View,
    *,
    structure: float,
    source_labels: Tensor,
    recognition: float | None = None,
    memory_labels: Tensor | None = None,
) -> Signs:
    """The signs of a stage.

    Args:
        before: What the model before the stage makes of the images.
        after: What the model after it makes of them.
        structure: Of the domain's images, relative to the source's (:func:`ratp.parts.pictures.picture_structure`).
        source_labels: Labels of the source images.
        recognition: Of the domain's images, by the model before the stage (:func:`recognition`).
        memory_labels: Labels of the exemplars.
    """
    domains = before.domain, after.domain
    varieties = [variety(sight.probabilities, source_labels) for sight in domains]
    shares = [class_shares(sight.labels, sight.probabilities.shape[1]) for sight in domains]
    right = [view.source.agreement(source_labels) for view in (before, after)]
    spreads = [class_spread(view.source.embedding, source_labels) for view in (before, after)]
    known: dict[str, float | None] = {}
    if before.memory is not None and after.memory is not None and memory_labels is not None:
        remembered = [sight.agreement(memory_labels) for sight in (before.memory, after.memory)]
        known = {
            "memory_before": remembered[0],
            "memory": remembered[1],
            "memory_agreement": after.memory.agreement(before.memory.labels),
            "memory_kept": kept(remembered[0], remembered[1], memory_labels),
            "memory_confidence_before": before.memory.confidence,
            "memory_confidence": after.memory.confidence,
        }
    return Signs(
        images=len(before.domain.probabilities),
        structure=structure,
        recognition=recognition,
        variety_before=varieties[0],
        variety=varieties[1],
        largest_before=shares[0].max().item(),
        largest=shares[1].max().item(),
        missing_before=int((shares[0] == 0).sum()),
        missing=int((shares[1] == 0).sum()),
        confidence_before=before.domain.confidence,
        confidence=after.domain.confidence,
        agreement=after.domain.agreement(before.domain.labels),
        source_before=right[0],
        source=right[1],
        source_agreement=after.source.agreement(before.source.labels),
        source_skill=skill(right[0], source_labels),
        source_kept=kept(right[0], right[1], source_labels),
        spread_before=spreads[0],
        spread=spreads[1],
        **known,
    )


def class_shares(labels: Tensor, classes: int) -> Tensor:
    """Share of every class among labels."""
    return labels.bincount(minlength=classes).double() / len(labels)


def variety(probabilities: Tensor, labels: Tensor) -> float:
    """Entropy of the mean of predicted probabilities, relative to that of the shares of the classes among labels.

    Few images cannot be of many classes: then it is relative to what so many can have. It is 0 where all images are
    taken for the same class with certainty. Doubt counts as variety: a model that knows nothing of a domain may prefer
    one class throughout, but not with certainty.
    """
    usual = torch.special.entr(class_shares(labels, probabilities.shape[1])).sum().item()
    usual = min(usual, math.log(len(probabilities)))
    found = torch.special.entr(probabilities.double().mean(dim=0)).sum().item()
    return found / usual if usual > 0 else 1.0


def skill(right: float, labels: Tensor) -> float:
    """A share of right answers, such that 1 is all and 0 no more than to always give the most frequent one.

    Args:
        right: The share.
        labels: The right answers.
    """
    chance = (labels.bincount().max() / len(labels)).item()
    return (right - chance) / (1 - chance) if chance < 1 else 0.0


def kept(before: float, after: float, labels: Tensor) -> float | None:
    """Skill after a stage, relative to that before; None if there was hardly any to keep.

    Args:
        before: Share of right answers before.
        after: Likewise after.
        labels: The right answers.
    """
    known = skill(before, labels)
    return skill(after, labels) / known if known > LEAST_SKILL else None


def class_spread(embedding: Tensor | None, labels: Tensor) -> float | None:
    """Mean cosine distance between the mean embeddings of classes; None without an embedding or a second class."""
    present = labels.bincount().nonzero().flatten().tolist()
    if embedding is None or len(present) < 2:
        return None
    means = F.normalize(torch.stack([embedding[labels == k].double().mean(dim=0) for k in present]), dim=1)
    count = len(present)
    return ((count * count - (means @ means.T).sum()) / (count * (count - 1))).item()


def recognition(domain_gain: float, source_gain: float) -> float | None:
    """What a model sees in images as a whole, relative to what it sees in source images.

    A model that knows what an image shows is surer of it than of its pieces. One that does not is as sure of these: its
    guess goes by colours and strokes, which pieces have as well.

    Args:
        domain_gain: How much surer it is of the images than of the same ones broken
            (:func:`ratp.parts.pictures.broken`).
        source_gain: Likewise, of source images.

    Returns:
        Their ratio; None if it is hardly surer of source images either.
    """
    return domain_gain / source_gain if source_gain > LEAST_GAIN else None


def _is_below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def _plain(signs: Mapping[str, Any]) -> dict[str, Any]:
    """Signs as they are kept: rounded, and without those there are none of or that are no numbers."""
    return {n: round(value, 4) for n, value in signs.items() if value is not None and math.isfinite(value)}
