"""The guard: judges after each target stage whether the model is still fit for use, without any label of a target.

Before and after the stage, :class:`Watch` asks the model about the same images: some of the domain, some of the source
and the exemplars in its memory. The answers give *indicators*; comparing them with *limits* gives a *verdict*. Where
the guard acts, a refused stage is undone, and the run continues with the model from before it.

It works with every method: it calls ``predict`` and ``embed`` and reads the exemplars in ``state``. Its own
generators choose the images, so that watching changes no result. ``docs/explanation/guard.md`` has the measurements
behind the limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.numerics import doubled
from ratp.training.method import Method, unpack

Mode = Literal["off", "record", "act"]
MODES: tuple[Mode, ...] = get_args(Mode)
ACT: Mode = "act"

# Maximum number of images to ask about: of a domain; of the source and of the memory, each.
DOMAIN_IMAGES, KNOWN_IMAGES = 500, 300
# Sources whose neighbouring pixels correlate less than this are no basis for comparing structure.
LEAST_STRUCTURE = 0.1
# Images converted to float64 at a time.
IMAGES_AT_ONCE = 64
# Standard deviation of pixels, of 255, below which an image counts as blank.
LEAST_CONTRAST = 1.0
# Images are cut into this many pieces per side, of at least so many pixels per side.
PIECES, LEAST_PIECE = (2, 4, 8), 6
# Below this skill there is nothing to forget.
LEAST_SKILL = 0.2
# Below this gain in confidence, the model does not recognise whole source images better than pieces of them.
LEAST_GAIN = 0.1
# From this recognition on, the confidence of the model before a stage says how often it is right.
RECOGNISED = 0.3
# Share of images that the model before a stage gets wrong at least, however confident it is.
LEAST_DOUBT = 0.02


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for some images."""

    probabilities: Tensor  # shape (n, classes)
    embedding: Tensor | None = None  # shape (n, dim); None if the method has none or it was not requested

    @property
    def labels(self) -> Tensor:
        """The predicted classes."""
        return self.probabilities.argmax(dim=1)

    @property
    def confidence(self) -> float:
        """Mean probability of the predicted classes."""
        return self.probabilities.amax(dim=1).mean().item()

    def agreement(self, labels: Tensor) -> float:
        """Returns the share of images predicted as ``labels``."""
        return (self.labels == labels).double().mean().item()


@dataclass(frozen=True)
class View:
    """What a model predicts for the domain of the stage, the source, and the exemplars, if there are any."""

    domain: Predictions
    source: Predictions
    memory: Predictions | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all predictions are finite."""
        found = [item for item in (self.domain, self.source, self.memory) if item is not None]
        return all(bool(item.probabilities.isfinite().all()) for item in found)


@dataclass(frozen=True)
class Indicators:
    """What a stage did to a model, without labels of its domain. Shares lie in 0..1; None means not applicable.

    Names that end in ``_before`` refer to the model before the stage, their counterparts to the model after it.
    """

    images: int  # number of images of the domain
    structure: float  # correlation of neighbouring pixels, relative to source images; 0 in noise and blank images
    variety_before: float
    # entropy of the mean probabilities on the domain, relative to that of the source's labels; 0 if the model
    # puts all images into one class
    variety: float
    largest_before: float
    largest: float  # share of the most frequently predicted class
    missing_before: int
    missing: int  # number of classes that are never predicted
    confidence_before: float
    confidence: float  # mean probability of the predicted classes
    agreement: float  # share of the domain's images on which both models agree
    source_before: float
    source: float  # share of source images classified correctly
    source_agreement: float  # share of source images on which both models agree
    source_skill: float  # skill on the source before the stage: 1 if all are correct, 0 at chance level
    # how much more confident the model before the stage is of whole images than of their pieces, relative to
    # source images; 0 if it recognises nothing. None if that fails on source images, too.
    recognition: float | None = None
    # skill on the source after the stage, relative to before; None if there was hardly any
    source_kept: float | None = None
    memory_before: float | None = None
    memory: float | None = None  # share of exemplars classified as they are labelled
    memory_agreement: float | None = None  # share of exemplars on which both models agree
    memory_kept: float | None = None  # like ``source_kept``, for the exemplars
    memory_confidence_before: float | None = None
    memory_confidence: float | None = None  # mean probability of the predicted classes on exemplars
    spread_before: float | None = None
    spread: float | None = None  # mean cosine distance between the class means of source embeddings

    @property
    def overturned(self) -> float | None:
        """How many answers the stage changed, relative to how many the model before it doubted.

        None if that model hardly recognises the domain: its confidence then says little.
        """
        if self.recognition is None or self.recognition < RECOGNISED:
            return None
        return (1 - self.agreement) / max(1 - self.confidence_before, LEAST_DOUBT)


@dataclass(frozen=True)
class Limits:
    """Lower limits of indicators, but for ``overturned``, which has an upper one."""

    structure: float = 0.3
    recognition: float = 0.1
    variety_before: float = 0.6
    variety: float = 0.3
    source_kept: float = 0.5
    memory_kept: float = 0.4
    overturned: float = 1.7
    images: int = 20  # number of images of the domain that recognition and variety need to be meaningful
    source_skill: float = 0.7  # skill below which the limit of ``variety_before`` shrinks in proportion


LIMITS = Limits()


@dataclass(frozen=True)
class Verdict:
    """The guard's judgement of a stage, which it accepts if there are no ``reasons`` against it."""

    indicators: Indicators
    limits: Limits
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as plain data, with indicators rounded and those that are None or NaN left out."""
        signs = {
            name: round(value, 4)
            for name, value in asdict(self.indicators).items()
            if value is not None and math.isfinite(value)
        }
        return {"reasons": list(self.reasons), "signs": signs, "limits": asdict(self.limits)}


class Watch:
    """Watches one stage: created before it, with the model it starts from; gives a verdict after it.

    ``source`` is the training part of the source, whose labels are known to the run anyway; messages call it ``known``.
    """

    def __init__(
        self,
        method: Method,
        domain: UnlabelledDomain,
        source: LabelledDomain,
        randomness: Randomness,
        known: str = "the source",
    ) -> None:
        self._known = known
        self._domain = domain.images[_sample(len(domain), DOMAIN_IMAGES, randomness, "domain", domain.name)]
        chosen = _sample(len(source), KNOWN_IMAGES, randomness, "source")
        self._source, self._source_labels = source.images[chosen], source.labels[chosen].cpu()
        self._memory: Tensor | None = None
        self._memory_labels: Tensor | None = None
        memory = unpack(method.state()).get("memory", {})
        if len(memory.get("images", ())) and "labels" in memory:
            chosen = _sample(len(memory["images"]), KNOWN_IMAGES, randomness, "memory").to(memory["labels"].device)
            self._memory, self._memory_labels = memory["images"][chosen], memory["labels"][chosen].cpu()
        in_source = picture_structure(self._source)
        self._structure = picture_structure(self._domain) / in_source if in_source > LEAST_STRUCTURE else 1.0
        self._before = self._view(method)
        in_domain = gain(method, self._domain, randomness, self._before.domain)
        self._recognition = recognition(in_domain, gain(method, self._source, randomness, self._before.source))

    def judge(self, method: Method) -> Verdict | None:
        """Returns the verdict on the stage, after it; None if predictions are not finite, which others report."""
        after = self._view(method)
        if not after.is_finite:
            return None
        return decide(
            compare(
                self._before,
                after,
                structure=self._structure,
                recognition=self._recognition,
                source_labels=self._source_labels,
                memory_labels=self._memory_labels,
            ),
            known=self._known,
        )

    def _view(self, method: Method) -> View:
        memory = None if self._memory is None else _predict(method, self._memory)
        domain = _predict(method, self._domain)
        return View(domain, _predict(method, self._source, embed=True), memory)


def _sample(count: int, most: int, randomness: Randomness, *name: str) -> Tensor:
    """Selects up to ``most`` of ``count`` images, the same ones on every call."""
    return torch.randperm(count, generator=randomness.generator("guard", *name))[:most]


@torch.no_grad()
def _predict(method: Method, images: Tensor, *, embed: bool = False) -> Predictions:
    probabilities = method.predict(images).float().softmax(dim=1).cpu()
    embedding = method.embed(images) if embed else None
    return Predictions(probabilities, None if embedding is None else embedding.float().cpu())


def gain(method: Method, images: Tensor, randomness: Randomness, whole: Predictions | None = None) -> float:
    """Returns how much more confident a model is of whole images than of the same images broken.

    ``whole`` is what it predicts for them, if that is known.
    """
    whole = whole or _predict(method, images)
    pieces = broken(images, randomness.generator("guard", "pieces"))
    parts = [_predict(method, part).confidence for part in pieces]
    return whole.confidence - sum(parts) / len(parts) if parts else 0.0


def decide(found: Indicators, limits: Limits = LIMITS, known: str = "the source") -> Verdict:
    """Compares indicators with their limits; ``known`` is what the source is called."""
    reasons = []
    if found.structure < limits.structure:
        reasons.append(
            "its images are noise or blank: neighbouring pixels correlate "
            f"{found.structure:.2f} times as much as in the source, limit {limits.structure:g}"
        )
    is_meaningful = found.images >= limits.images and found.source_kept is not None
    if is_meaningful and _is_below(found.recognition, limits.recognition):
        reasons.append(
            "the previous model recognises nothing in its images: recognition "
            f"{found.recognition:.2f} (1 on source images), limit {limits.recognition:g}"
        )
    variety_before = limits.variety_before * min(1.0, found.source_skill / limits.source_skill)
    # A model that recognises nothing as a whole may prefer one class throughout on images of any kind.
    varieties = [("previous", found.variety_before, variety_before)] if found.recognition is not None else []
    for model, value, limit in (*varieties, ("new", found.variety, limits.variety)):
        if is_meaningful and value < limit:
            reasons.append(
                f"the {model} model puts nearly all its images into one class: variety {value:.2f}, limit {limit:.2g}"
            )
    if is_meaningful and found.overturned is not None and found.overturned > limits.overturned:
        reasons.append(
            f"the new model contradicts what the previous one was sure of: it changed {1 - found.agreement:.0%} of the "
            f"answers, and only {1 - found.confidence_before:.0%} were in doubt"
        )
    if _is_below(found.source_kept, limits.source_kept):
        reasons.append(f"the model forgot {known}: {found.source:.0%} correct, {found.source_before:.0%} before")
    if _is_below(found.memory_kept, limits.memory_kept):
        reasons.append(
            f"the model forgot its exemplars: {found.memory:.0%} as labelled, {found.memory_before:.0%} before"
        )
    return Verdict(found, limits, tuple(reasons))


def _is_below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def compare(
    before: View,
    after: View,
    *,
    structure: float,
    source_labels: Tensor,
    recognition: float | None = None,
    memory_labels: Tensor | None = None,
) -> Indicators:
    """Computes the indicators of a stage from the predictions before and after it."""
    domains = before.domain, after.domain
    varieties = [variety(item.probabilities, source_labels) for item in domains]
    shares = [class_shares(item.labels, item.probabilities.shape[1]) for item in domains]
    correct = [view.source.agreement(source_labels) for view in (before, after)]
    spreads = [class_spread(view.source.embedding, source_labels) for view in (before, after)]
    memory: dict[str, float | None] = {}
    if before.memory is not None and after.memory is not None and memory_labels is not None:
        remembered = [item.agreement(memory_labels) for item in (before.memory, after.memory)]
        memory = {
            "memory_before": remembered[0],
            "memory": remembered[1],
            "memory_agreement": after.memory.agreement(before.memory.labels),
            "memory_kept": kept(remembered[0], remembered[1], memory_labels),
            "memory_confidence_before": before.memory.confidence,
            "memory_confidence": after.memory.confidence,
        }
    return Indicators(
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
        source_before=correct[0],
        source=correct[1],
        source_agreement=after.source.agreement(before.source.labels),
        source_skill=skill(correct[0], source_labels),
        source_kept=kept(correct[0], correct[1], source_labels),
        spread_before=spreads[0],
        spread=spreads[1],
        **memory,
    )


def class_shares(labels: Tensor, classes: int) -> Tensor:
    """Returns the share of every class among labels."""
    return labels.bincount(minlength=classes).double() / len(labels)


def variety(probabilities: Tensor, labels: Tensor) -> float:
    """Returns the entropy of the mean probabilities, relative to that of the class shares among labels.

    The reference is at most the entropy that so few images can have. The result is 0 if all images are put into one
    class with certainty. Doubt counts as variety: a model that knows nothing of a domain may prefer one class
    throughout, but not with certainty.
    """
    reference = torch.special.entr(class_shares(labels, probabilities.shape[1])).sum().item()
    reference = min(reference, math.log(len(probabilities)))
    found = torch.special.entr(probabilities.double().mean(dim=0)).sum().item()
    return found / reference if reference > 0 else 1.0


def skill(correct: float, labels: Tensor) -> float:
    """Rescales a share of correct answers so that 0 is as good as always naming the most frequent label."""
    chance = (labels.bincount().max() / len(labels)).item()
    return (correct - chance) / (1 - chance) if chance < 1 else 0.0


def kept(before: float, after: float, labels: Tensor) -> float | None:
    """Returns the skill after a stage relative to that before, from shares of correct answers; None if hardly any."""
    known = skill(before, labels)
    return skill(after, labels) / known if known > LEAST_SKILL else None


def class_spread(embedding: Tensor | None, labels: Tensor) -> float | None:
    """Returns the mean cosine distance between class means; None without an embedding or a second class."""
    present = labels.bincount().nonzero().flatten().tolist()
    if embedding is None or len(present) < 2:
        return None
    means = F.normalize(torch.stack([embedding[labels == k].double().mean(dim=0) for k in present]), dim=1)
    count = len(present)
    return ((count * count - (means @ means.T).sum()) / (count * (count - 1))).item()


def recognition(domain_gain: float, source_gain: float) -> float | None:
    """Returns the ratio of two gains in confidence of whole images over broken ones; None if the source's is tiny.

    A model that recognises an image is more confident of it than of its pieces. One that does not goes by colours and
    strokes, which pieces have as well.
    """
    return domain_gain / source_gain if source_gain > LEAST_GAIN else None


def picture_structure(images: Tensor) -> float:
    """Returns the mean correlation of neighbouring pixels over uint8 images and both directions.

    It is near 1 in pictures and 0 in noise; images of one colour count as 0.
    """
    found = []
    for part in torch.split(images, IMAGES_AT_ONCE):
        grey = doubled(part).mean(dim=1)
        pairs = (grey[:, :, 1:], grey[:, :, :-1]), (grey[:, 1:], grey[:, :-1])
        found += [_correlation(a.flatten(1), b.flatten(1)) for a, b in pairs if a.numel()]
    return torch.cat(found).mean().item() if found else 0.0


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Correlates the rows of ``a`` with those of ``b``; 0 for constant rows."""
    a, b = a - a.mean(dim=1, keepdim=True), b - b.mean(dim=1, keepdim=True)
    size = (a.square().mean(dim=1) * b.square().mean(dim=1)).sqrt()
    return torch.where(size > LEAST_CONTRAST, (a * b).mean(dim=1) / size.clamp_min(LEAST_CONTRAST), 0.0)


def broken(images: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields images (n, channels, height, width) shuffled in 4, 16 and 64 pieces, and turned on their side.

    Small images are not cut into pieces too small to show anything. ``generator``, on the CPU, shuffles the pieces.
    """
    height, width = images.shape[2:]
    for pieces in PIECES:
        if min(height, width) >= pieces * LEAST_PIECE:
            yield _shuffled(images, pieces, generator)
    if height == width:
        yield images.rot90(1, (2, 3))


def _shuffled(images: Tensor, pieces: int, generator: torch.Generator) -> Tensor:
    """Shuffles the ``pieces`` × ``pieces`` pieces of every image; what is left over at the edge stays."""
    count, channels, height, width = images.shape
    height, width = height // pieces, width // pieces
    inner = images[..., : height * pieces, : width * pieces]
    grid = inner.reshape(count, channels, pieces, height, pieces, width).permute(0, 2, 4, 1, 3, 5)
    order = torch.rand(count, pieces**2, generator=generator).argsort(dim=1).to(images.device)
    mixed = grid.flatten(1, 2)[torch.arange(count, device=images.device)[:, None], order].view_as(grid)
    result = images.clone()
    result[..., : height * pieces, : width * pieces] = mixed.permute(0, 3, 1, 4, 2, 5).reshape_as(inner)
    return result
