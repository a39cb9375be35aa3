"""SNR — "Style Normalization and Restitution for Domain Generalization and Adaptation", IEEE T. Multimedia 2021.

Modules after blocks of the feature extractor remove the style from feature maps M and put back the part of it that
helps to recognise classes (section III). Instance normalisation removes the style, and a gate a decides what returns:

    I = InstanceNorm(M),  R = M − I,  a = σ(W₂ ReLU(W₁ GAP(R))),  M⁺ = I + a⊙R,  M⁻ = I + (1 − a)⊙R

M⁺ enters the next block. The dual restitution loss, with H the mean entropy that a linear head predicts from the
pooled maps, makes predictions more certain with what returns and less certain with what does not:

    softplus(H(M⁺) − H(I)) + softplus(H(I) − H(M⁻))

As in RaTP's comparison, the network is trained the way SHOT (ICML 2020) trains it:

* Source stage: cross-entropy with smoothed labels.
* Target stage: the classifier is frozen. Loss: β·cross-entropy with SHOT's pseudo-labels, updated every epoch, and
  information maximisation; batches mix target and memory.
* ``augment`` adds RandMix, as RaTP's ablation does for other methods: copies of all source images, and of target images
  that the model is confident about, learn by cross-entropy. The other losses are those of the images alone.

Deviations: the dual restitution loss is off, because RaTP's comparison mentions the modules and SHOT only
(``dual_weight``; the original has 0.01). Optimiser and trained BatchNorm are those of SHOT here, not the original's
rate of 0.001 and frozen statistics. The new modules start at random and learn as fast as the bottleneck, whatever the
rate of the pretrained layers. DTN, which the paper lacks, has them after all blocks. Labels come from SHOT's version
for objects on digits too: the version for digits gives all images one class once a class is predicted for none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.functional.losses import cross_entropy, information_maximisation, logit_entropy
from ratp.functional.optim import Group, SGDConfig
from ratp.methods.shared.insertion import insert_after
from ratp.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelPhase
from ratp.methods.shared.randmix_copies import CopyingMethod, LaterCopiesConfig
from ratp.training.method import Setting
from ratp.training.phase import Phase

EPSILON = 1e-5
REDUCTION = 16


class Restitution(NamedTuple):
    """The results of SNR for feature maps, or the same pooled over space."""

    normalised: Tensor  # I, without style
    plus: Tensor  # M⁺, with the useful part of the style
    minus: Tensor  # M⁻, with the other part


class StyleRestitution(nn.Module):
    """Style normalisation and restitution of feature maps.

    ``weight`` and ``bias`` (channels,) belong to the instance normalisation; ``squeeze`` and ``excite`` are W₁ and W₂.
    """

    _kept: list[Restitution] | None = None

    def __init__(self, channels: int) -> None:
        """Initialises the gate at random, from torch's generator."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        hidden = max(1, channels // REDUCTION)
        self.squeeze, self.excite = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        for layer in (self.squeeze, self.excite):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, maps: Tensor) -> Tensor:
        """Computes M⁺ of feature maps (n, channels, height, width)."""
        if self._kept is None:
            normalised, removed, gate = self._split(maps)
            return normalised + gate * removed
        result = self.restitute(maps)
        self._kept.append(Restitution(*(part.mean(dim=(2, 3)) for part in result)))
        return result.plus

    def restitute(self, maps: Tensor) -> Restitution:
        """Computes all three results."""
        normalised, removed, gate = self._split(maps)
        returned = gate * removed
        return Restitution(normalised, normalised + returned, normalised + (removed - returned))

    def _split(self, maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes I, R and a."""
        wide = maps.to(torch.promote_types(maps.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
        scale = self.weight[:, None, None] * (variance + EPSILON).rsqrt()
        normalised = ((wide - mean) * scale + self.bias[:, None, None]).to(maps.dtype)
        removed = maps - normalised
        gate = self.excite(self.squeeze(removed.mean(dim=(2, 3))).relu()).sigmoid()
        return normalised, removed, gate[:, :, None, None].to(maps.dtype)


@contextmanager
def restitutions(module: nn.Module, kept: list[Restitution]) -> Iterator[None]:
    """Within the block, the SNR modules of ``module`` append their results, pooled over space, to ``kept``."""
    layers = [layer for layer in module.modules() if isinstance(layer, StyleRestitution)]
    for layer in layers:
        layer._kept = kept
    try:
        yield
    finally:
        for layer in layers:
            layer._kept = None


def dual_restitution(logits: Restitution) -> Tensor:
    """Computes the dual restitution loss from a head's logits (n, classes) of the three pooled results."""
    normalised, plus, minus = (logit_entropy(part.float()).mean() for part in logits)
    return F.softplus(plus - normalised) + F.softplus(normalised - minus)


@dataclass(frozen=True)
class SNRConfig(LaterCopiesConfig):
    """Switches of SNR. Defaults: those SHOT has here for DTN."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    backbone_rate: float = switch(1.0, "factor on the feature extractor's rate, except SNR's modules", minimum=0)
    blocks: tuple[int, ...] = switch((1, 2, 3), "blocks of the feature extractor that it follows, from 1", minimum=1)
    smoothing: float = switch(0.1, "ε of label smoothing on the source", minimum=0, below=1)
    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo-labels", minimum=0)
    dual_weight: float = switch(0.0, "weight of the dual restitution loss; the original has 0.01", minimum=0)
    refresh: int = switch(1, "epochs between updates of pseudo-labels", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class SNR(CopyingMethod, PseudoLabelMethod):
    """Normalises the style of feature maps; trains as SHOT."""

    name = "snr"
    title = "SNR: style normalisation and restitution, trained as SHOT"
    family = "unified adaptation and generalisation"
    paper = "Jin et al., Style Normalization and Restitution for Domain Generalization and Adaptation, IEEE TMM 2021"
    needs = "its own source training, exemplars, many passes over a target"
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
                self.extras = {"heads": self.heads, **self.extras}

    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns one phase."""
        return [SNRPhase(self, images, labels)]

    def groups(self, *, classifier: bool) -> list[Group]:
        """Returns the parameters to train, each group with the factor on its rate; on targets not the classifier."""
        fresh = [parameter for module in self.modules for parameter in module.parameters()]
        known = {id(parameter) for parameter in fresh}
        head = [*fresh, *self.network.bottleneck.parameters()]
        head += self.network.classifier.parameters() if classifier else []
        head += self.heads.parameters() if self.heads is not None else []
        pretrained = [parameter for parameter in self.network.backbone.parameters() if id(parameter) not in known]
        return [(pretrained, self.config.backbone_rate), (head, 1.0)]

    def dual_loss(self, results: Sequence[Restitution], labels: Tensor) -> Tensor:
        """Sums the dual restitution losses of all modules and the cross-entropy of the last one's head.

        ``results`` are those of one or more passes; of the last one, the rows that have labels count.
        """
        assert self.heads is not None
        terms, last = [], results[-1].plus
        for head, result in zip(self.heads, results[-len(self.heads) :], strict=True):
            logits = Restitution(*(head(part[: len(labels)].float()) for part in result))
            terms.append(dual_restitution(logits))
            last = logits.plus
        return torch.stack([*terms, F.cross_entropy(last, labels)]).sum()


class SNRPhase(PseudoLabelPhase):
    """Trains SNR on one domain."""

    def __init__(self, method: SNR, images: Tensor, labels: Tensor | None) -> None:
        config, optimiser = method.config, method.optimiser(method.groups(classifier=labels is not None))
        self._copies = method.copies()
        super().__init__(method, images, labels, optimiser, generators=self._copies.generators)
        self._config, self._dual_loss = config, method.dual_loss

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch and its RandMix copies, if any."""
        config = self._config
        batch = self.batches.draw(self.batch)
        results: list[Restitution] = []
        with restitutions(self.network, results) if config.dual_weight else nullcontext():
            if self.is_target:
                output, valid = self._copies.learn_confident(batch.images)
            else:
                output, valid = self._copies.learn_all(batch.images), None
        logits, count = output.logits, len(batch.labels)
        labels = batch.labels.repeat(len(logits) // count)
        if self.is_target:
            ce = config.beta * cross_entropy(logits, labels, valid)
            terms = {"ce": ce, "im": information_maximisation(logits[:count])}
        else:
            terms = {"ce": F.cross_entropy(logits, labels, label_smoothing=config.smoothing)}
        if config.dual_weight:
            terms["dual"] = config.dual_weight * self._dual_loss(results, batch.labels)
        return self.minimise(terms)
