"""The guard: whether a stage left a model fit for use, told without any label of a target.

Before a target stage and after it, the model is asked about the same images: some of the domain, some of the source
and those in its memory. From what it says come *signs*, numbers that need no label of a target, and from signs and
*limits* a *verdict*. Where the guard acts, a stage that is refused is undone: the run goes on with the model before it.

Every method can be guarded: the guard calls ``predict`` and ``embed`` and reads the exemplars in ``state``. Its images
are chosen by generators of its own, so that looking changes no result. ``docs/guard.md`` has the measurements that the
limits are from.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, unknown
from ratp.method import Method, unpack
from ratp.parts.pictures import broken, picture_structure
from ratp.randomness import Randomness
from ratp.signs import Sight, Verdict, View, compare, decide, recognition

Mode = Literal["off", "record", "act"]
MODES: tuple[Mode, ...] = get_args(Mode)
ACT: Mode = "act"

# Images to look at, at most: of a domain; of the source and of the memory, each.
DOMAIN_IMAGES, KNOWN_IMAGES = 500, 300
# A source whose neighbouring pixels correlate by less has no pictures to compare with.
LEAST_STRUCTURE = 0.1


def find_mode(asked: str, usual: Mode) -> Mode:
    """The mode asked for; ``auto`` is the usual one.

    Raises:
        ConfigError: If there is no such mode.
    """
    found = usual if asked == "auto" else next((mode for mode in MODES if mode == asked), None)
    if found is None:
        raise ConfigError(unknown("guard", asked, ("auto", *MODES)))
    return found


class Watch:
    """One stage under guard: made before it, from the model it begins with, and asked after it."""

    def __init__(
        self, method: Method, domain: UnlabelledDomain, source: LabelledDomain, randomness: Randomness
    ) -> None:
        """Chooses images and looks at them.

        Args:
            method: As it is before the stage.
            domain: The domain of the stage.
            source: Training part of the source. Its labels are known to the run anyway.
            randomness: Decides which images are looked at.
        """
        self._domain = domain.images[_some(len(domain), DOMAIN_IMAGES, randomness, "domain", domain.name)]
        chosen = _some(len(source), KNOWN_IMAGES, randomness, "source")
        self._source, self._source_labels = source.images[chosen], source.labels[chosen].cpu()
        self._memory: Tensor | None = None
        self._memory_labels: Tensor | None = None
        memory = unpack(method.state()).get("memory", {})
        if len(memory.get("images", ())) and "labels" in memory:
            chosen = _some(len(memory["images"]), KNOWN_IMAGES, randomness, "memory").to(memory["labels"].device)
            self._memory, self._memory_labels = memory["images"][chosen], memory["labels"][chosen].cpu()
        usual = picture_structure(self._source)
        self._structure = picture_structure(self._domain) / usual if usual > LEAST_STRUCTURE else 1.0
        self._before = self._view(method)
        looked_at = (self._before.domain, self._domain), (self._before.source, self._source)
        gains = (_gain(method, *item, randomness.generator("guard", "pieces")) for item in looked_at)
        self._recognition = recognition(*gains)

    def judge(self, method: Method) -> Verdict | None:
        """The verdict on the stage; None if predictions are no numbers any more, which is for others to tell.

        Args:
            method: As it is after the stage.
        """
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
            )
        )

    def _view(self, method: Method) -> View:
        memory = None if self._memory is None else _look(method, self._memory, embeds=False)
        domain = _look(method, self._domain, embeds=False)
        return View(domain, _look(method, self._source, embeds=True), memory)


def _some(count: int, most: int, randomness: Randomness, *name: str) -> Tensor:
    """Positions of some of ``count`` images, the same ones whenever it is asked."""
    return torch.randperm(count, generator=randomness.generator("guard", *name))[:most]


@torch.no_grad()
def _look(method: Method, images: Tensor, *, embeds: bool) -> Sight:
    probabilities = method.predict(images).float().softmax(dim=1).cpu()
    embedding = method.embed(images) if embeds else None
    return Sight(probabilities, None if embedding is None else embedding.float().cpu())


def _gain(method: Method, whole: Sight, images: Tensor, generator: torch.Generator) -> float:
    """How much surer a model is of images, of which it has seen the whole ones, than of the same ones broken."""
    parts = [_look(method, part, embeds=False).confidence for part in broken(images, generator)]
    return whole.confidence - sum(parts) / len(parts) if parts else 0.0
