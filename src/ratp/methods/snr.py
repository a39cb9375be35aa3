"""SNR — "Style Normalization and Restitution for Domain Generalization and Adaptation", IEEE T. Multimedia 2021.

Modules after blocks of the feature extractor take the style out of feature maps and put back what of it helps to tell
classes (:mod:`ratp.parts.snr`). As in RaTP's comparison the network is trained the way SHOT (ICML 2020) trains it.

* Source stage: cross-entropy with smoothed labels.
* Target stage: the classifier is frozen; β·cross-entropy by SHOT's pseudo labels, anew every epoch, and information
  maximisation; batches mix target and memory.

Departures: the dual restitution loss is off, because RaTP's comparison speaks of the modules and SHOT only; set
``dual_weight`` to 0.01 for the original's. It has the optimiser of SHOT here and trained BatchNorm,
not the original's rate of 0.001 and frozen statistics. The new modules start from random numbers and learn as fast as
the bottleneck, whatever the rate of the pretrained layers. DTN, unknown to the paper, has them after all its blocks.
Labels are those of SHOT's version for objects, on digits too: the version for digits gives all images one class once a
class goes unpredicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.insertion import insert_after
from ratp.method import Setting, pack, unpack
from ratp.parts.information import information_maximisation
from ratp.parts.sgd import Group, SGDConfig, StageSGD
from ratp.parts.snr import Restitution, StyleRestitution, dual_restitution, restitutions
from ratp.phase import Phase
from ratp.pseudo_labels import PseudoLabelPhase
from ratp.training import NetworkMethod


@dataclass(frozen=True)
class SNRConfig:
    """Switches of SNR. Defaults: those SHOT has here for DTN."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    backbone_rate: float = switch(
        1.0, "factor on the rate of the feature extractor, but for SNR's own modules", minimum=0
    )
    blocks: tuple[int, ...] = switch((1, 2, 3), "blocks of the feature extractor it acts after, from 1", minimum=1)
    smoothing: float = switch(0.1, "ε of label smoothing on the source", minimum=0, below=1)
    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo labels", minimum=0)
    dual_weight: float = switch(0.0, "weight of the dual restitution loss; the original has 0.01", minimum=0)
    refresh: int = switch(1, "epochs between labellings of a target", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class SNR(NetworkMethod):
    """Feature maps with normalised style, trained as SHOT."""

    name = "snr"
    title = "SNR: style normalisation and restitution, trained as SHOT"
    family = "unified adaptation and generalisation"
    paper = "Jin et al., Style Normalization and Restitution for Domain Generalization and Adaptation, IEEE TMM 2021"
    needs = "source labels, memory, pseudo labels of targets"
    config_type = SNRConfig
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "backbone_rate": 0.1}
    config: SNRConfig

    def __init__(self, setting: Setting, config: SNRConfig) -> None:
        super().__init__(setting, config)
        with setting.randomness.scope("snr"):
            modules = insert_after(self.network, config.blocks, "snr", StyleRestitution)
            self.modules = list(modules.values())
            self.heads: nn.ModuleList | None = None
            if config.dual_weight:
                classes = len(setting.classes)
                heads = (nn.Linear(len(module.weight), classes) for module in self.modules)
                self.heads = nn.ModuleList(heads).to(setting.device)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase with true labels."""
        return [SNRPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with pseudo labels, information maximisation and memory."""
        return [SNRPhase(self, domain.images, None)]

    def groups(self, *, classifier: bool) -> list[Group]:
        """What trains, and how fast; on targets without the classifier."""
        fresh = [parameter for module in self.modules for parameter in module.parameters()]
        known = {id(parameter) for parameter in fresh}
        head = [*fresh, *self.network.bottleneck.parameters()]
        head += self.network.classifier.parameters() if classifier else []
        head += self.heads.parameters() if self.heads is not None else []
        pretrained = [parameter for parameter in self.network.backbone.parameters() if id(parameter) not in known]
        return [(pretrained, self.config.backbone_rate), (head, 1.0)]

    def dual_loss(self, results: Sequence[Restitution], labels: Tensor) -> Tensor:
        """The dual restitution loss of all modules, and cross-entropy by the last one's head."""
        assert self.heads is not None
        terms, last = [], results[-1].plus
        for head, result in zip(self.heads, results, strict=True):
            logits = Restitution(*(head(part.float()) for part in result))
            terms.append(dual_restitution(logits))
            last = logits.plus
        return torch.stack([*terms, F.cross_entropy(last, labels)]).sum()

    def state(self) -> dict[str, Tensor]:
        """Network, memory and the heads of the dual restitution loss."""
        return super().state() | ({} if self.heads is None else pack({"heads": self.heads.state_dict()}))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        if self.heads is not None:
            self.heads.load_state_dict(unpack(state)["heads"])


class SNRPhase(PseudoLabelPhase):
    """One stage of SNR."""

    def __init__(self, method: SNR, images: Tensor, labels: Tensor | None) -> None:
        recipe, config = method.setting.recipe, method.config
        groups = method.groups(classifier=labels is not None)
        optimiser = StageSGD(groups, recipe.lr, recipe.epochs, config.sgd, recipe.steps)
        super().__init__(method, images, labels, optimiser, union=config.replay == "union", refresh=config.refresh)
        self._config, self._dual_loss = config, method.dual_loss

    def step(self) -> dict[str, Tensor]:
        """One update on a batch."""
        config = self._config
        batch = self.batches.draw(self.batch)
        self.network.train()
        results: list[Restitution] = []
        with restitutions(self.network, results) if config.dual_weight else nullcontext():
            logits = self.network(batch.images).logits
        if self.is_target:
            terms = {
                "ce": config.beta * F.cross_entropy(logits, batch.labels),
                "im": information_maximisation(logits),
            }
        else:
            terms = {"ce": F.cross_entropy(logits, batch.labels, label_smoothing=config.smoothing)}
        if config.dual_weight:
            terms["dual"] = config.dual_weight * self._dual_loss(results, batch.labels)
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}
