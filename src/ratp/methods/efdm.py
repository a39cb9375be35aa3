"""EFDM — "Exact Feature Distribution Matching for Arbitrary Style Transfer and Domain Generalization", CVPR 2022.

Half the batches have the feature maps of their images mixed with the style of others (:mod:`ratp.parts.efdm`), after
some blocks of the feature extractor, each on its own. Nothing happens when the network predicts.

* Source stage: cross-entropy; styles are those of other images of the batch.
* Target stage: as many exemplars as target images pass beside them and lend them their styles, one to one, layer by
  layer; cross-entropy of the target images by SHOT's labels, anew every epoch, and of the exemplars, unmixed, by their
  stored ones. Without a memory, styles come from the batch as before.

Departures: the harness's SGD and schedule instead of a cosine over 50 epochs; DTN, unknown to the paper, is mixed
after its first two blocks. Equal values, such as the zeros a ReLU makes, keep their order when they are ranked; the
published code leaves it open. On Digits it falls to chance, or near it, on every target after its own stage, as in
RaTP's table: its labels drift away from the classes (``docs/benchmarks.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.drawn import drew
from ratp.insertion import insert_after
from ratp.method import Setting
from ratp.parts.efdm import ExactMixing, Styles
from ratp.parts.sgd import SGDConfig, StageSGD
from ratp.phase import Phase
from ratp.pseudo_labels import PseudoLabelPhase
from ratp.training import NetworkMethod


@dataclass(frozen=True)
class EFDMConfig:
    """Switches of EFDM."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    blocks: tuple[int, ...] = switch((1, 2), "blocks of the feature extractor it acts after, from 1", minimum=1)
    probability: float = switch(0.5, "share of batches that are mixed, for each block", minimum=0, maximum=1)
    alpha: float = switch(0.1, "α of the mixing weight's distribution Beta(α, α)", above=0, below=2)
    refresh: int = switch(1, "epochs between labellings of a target", minimum=1)
    memory_weight: float = switch(1.0, "weight of the exemplars' own cross-entropy", minimum=0)


class EFDM(NetworkMethod):
    """Cross-entropy on feature maps of mixed styles, by SHOT's labels on targets."""

    name = "efdm"
    title = "EFDM: exact feature distribution mixing"
    family = "multiple domain generalisation"
    paper = (
        "Zhang et al., Exact Feature Distribution Matching for Arbitrary Style Transfer and Domain Generalization, "
        "CVPR 2022"
    )
    needs = "source labels, memory, pseudo labels of targets"
    config_type = EFDMConfig
    large: ClassVar[Mapping[str, Any]] = {"blocks": (1, 2, 3)}
    config: EFDMConfig

    def __init__(self, setting: Setting, config: EFDMConfig) -> None:
        super().__init__(setting, config)
        made = insert_after(
            self.network, config.blocks, "efdm", lambda _: ExactMixing(config.probability, config.alpha)
        )
        self.layers = list(made.values())

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase with true labels and styles from the batch."""
        return [EFDMPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with pseudo labels and styles from the memory."""
        return [EFDMPhase(self, domain.images, None)]


class EFDMPhase(PseudoLabelPhase):
    """One stage of EFDM."""

    def __init__(self, method: EFDM, images: Tensor, labels: Tensor | None) -> None:
        setting, recipe, config = method.setting, method.setting.recipe, method.config
        optimiser = StageSGD(method.network.parameters(), recipe.lr, recipe.epochs, config.sgd, recipe.steps)
        super().__init__(method, images, labels, optimiser, union=False, refresh=config.refresh)
        self._memory, self._weight = method.memory, config.memory_weight
        self._inputs = setting.training_inputs(self.name)
        self._exemplars, mixing = (setting.generator(name, method.stage) for name in ("styles", "mixing"))
        self._replays = self.is_target and len(self._memory) > 0
        styles: Styles = "second half" if self._replays else "batch"
        for layer in method.layers:
            layer.generator, layer.styles = mixing, styles
        self.generators = (*self.generators, self._exemplars, mixing)

    def step(self) -> dict[str, Tensor]:
        """One update on a batch, on a target with as many exemplars beside it."""
        batch = self.batches.draw(self.batch)
        self.network.train()
        if self._replays:
            images, labels = self._draw_exemplars()
            logits, of_exemplars = self.network(torch.cat([batch.images, images])).logits.chunk(2)
            terms = {
                "ce": F.cross_entropy(logits, batch.labels),
                "replay": self._weight * F.cross_entropy(of_exemplars, labels),
            }
        else:
            terms = {"ce": F.cross_entropy(self.network(batch.images).logits, batch.labels)}
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}

    def _draw_exemplars(self) -> tuple[Tensor, Tensor]:
        """Images and labels, with replacement: there may be fewer than a batch."""
        memory, generator = self._memory, self._exemplars
        index = torch.randint(len(memory), (self.batch,), generator=generator, device=memory.images.device)
        drew(index, 0)
        return self._inputs(memory.images[index], generator), memory.labels[index]
