"""L2D — "Learning to Diversify for Single Domain Generalization", ICCV 2021.

A style module (:mod:`ratp.parts.style`) gives images new styles. Network and module take turns in every step:

* Network: x̃ = 0.6·σ(style(x)) + 0.4·x. Cross-entropy of x̃ and x, + α₁·supervised contrastive loss between them,
  + α₂·misfit of N(μ(x), σ²(x)) to z(x̃). Embeddings are drawn, z = μ + 0.2·σ·ε; to predict, z = μ.
* Style module: with convolutions that stay, class-wise discrepancy of z(x̃) and z(x) + β·a bound from above of
  their mutual information (:mod:`ratp.parts.mmd`, :mod:`ratp.parts.club`). Styles shall differ, classes shall stay.

Source stage by true labels; target stages by SHOT's pseudo labels, anew every epoch, with batches from target and
memory together. All parameters train.

Departures from the published code:

* μ is the bottleneck's output; log σ² = ReLU(linear), a head beside its last layer. The original has both on the
  pooled features, μ through a leaky ReLU.
* Sizes of the style module follow the images; the published ones are for 224 pixels. DTN's rate is the harness's.
* A class with fewer than two images in a batch is left out of the discrepancy, which the original makes NaN, and with
  it the style module from then on.
* The sum of the mixing weights is kept away from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.method import Setting, pack, unpack
from ratp.network import check_two_layers
from ratp.parts.club import information_bound, misfit, random_order
from ratp.parts.mmd import conditional_mmd
from ratp.parts.scl import supervised_contrastive
from ratp.parts.scores import scores
from ratp.parts.sgd import SGDConfig, StageSGD
from ratp.parts.step_decay import StepDecaySGD, check_step_decay
from ratp.parts.style import StyleModule
from ratp.parts.style_draw import Blend
from ratp.phase import Phase
from ratp.pseudo_labels import PseudoLabelPhase
from ratp.training import NetworkMethod

L2D_SGD = SGDConfig(momentum=0.9, weight_decay=5e-4, schedule="constant", nesterov=True)
STYLE_SGD = SGDConfig(momentum=0.0, weight_decay=0.0, schedule="constant")


@dataclass(frozen=True)
class L2DConfig:
    """Switches of L2D. Defaults: the published ones."""

    sgd: SGDConfig = switch(L2D_SGD, "optimiser of the network")
    decay_after: float = switch(0.8, "share of a stage's epochs before the rate falls", above=0, maximum=1)
    decay: float = switch(0.1, "factor on the rate from then on; 1: it does not fall", above=0)
    contrast: float = switch(1.0, "α₁, weight of the supervised contrastive loss", minimum=0)
    temperature: float = switch(0.07, "τ of the contrastive loss", above=0)
    likelihood: float = switch(1.0, "α₂, weight of the misfit of guessed embeddings", minimum=0)
    information: float = switch(0.1, "β, weight of the bound of mutual information, for the style module", minimum=0)
    styled: float = switch(
        0.6, "share of the new style in an image, the rest is the image itself", minimum=0, maximum=1
    )
    kernel_sizes: tuple[int, ...] = switch((9, 13, 17, 5), "kernel sizes of the style module", minimum=1)
    style_lr: float = switch(0.005, "learning rate of the style module", above=0)
    spread: float = switch(0.2, "factor on the deviation of embeddings while training", minimum=0)
    refresh: int = switch(1, "epochs between labellings of a target", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class Encoding(NamedTuple):
    """What the network makes of images while it trains.

    Attributes:
        mean: μ, shape (n, dim).
        log_variance: log σ², shape (n, dim).
        embedding: z, drawn from both, shape (n, dim).
        logits: z Wᵀ, shape (n, classes).
    """

    mean: Tensor
    log_variance: Tensor
    embedding: Tensor
    logits: Tensor


class L2D(NetworkMethod):
    """A network that learns from images in new styles, and a style module that learns to make them differ."""

    name = "l2d"
    title = "L2D: learning to diversify"
    family = "single domain generalisation"
    paper = "Wang et al., Learning to Diversify for Single Domain Generalization, ICCV 2021"
    needs = "source labels, memory, pseudo labels of targets, a style module"
    config_type = L2DConfig
    # The demo's rate is for SGD without momentum, which makes a step ten times as long.
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        ("demo", "official"): {"lr": 0.005},
        ("pacs", "official"): {"lr": 0.001},
        ("domainnet10", "official"): {"lr": 0.001},
        ("folders", "official"): {"lr": 0.001},
    }
    config: L2DConfig

    def __init__(self, setting: Setting, config: L2DConfig) -> None:
        check_step_decay(config.sgd, config.decay)
        check_two_layers(setting.recipe.network, self.name)
        super().__init__(setting, config)
        sizes = setting.recipe.network
        with setting.randomness.scope("style"):
            self.style = StyleModule(setting.image_size, config.kernel_sizes).to(setting.device)
        with setting.randomness.scope("variance"):
            self.variance = nn.Linear(sizes.hidden, sizes.dim).to(setting.device)
        self.blend = Blend(config.styled, self.scaling.mean, self.scaling.std)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase with true labels."""
        return [L2DPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with pseudo labels and memory."""
        return [L2DPhase(self, domain.images, None)]

    def encode(self, images: Tensor, generator: torch.Generator) -> Encoding:
        """Encodes normalised images, with embeddings drawn from the generator."""
        network = self.network
        first, norm, _, last = network.bottleneck
        hidden = norm(first(network.features(images)), relu=True)
        mean, log_variance = last(hidden), F.relu(self.variance(hidden))
        # z = μ + 0.2·σ·ε
        noise = torch.randn(mean.shape, generator=generator, device=generator.device)
        embedding = torch.addcmul(mean, (log_variance / 2).exp(), noise, value=self.config.spread)
        return Encoding(mean, log_variance, embedding, scores(embedding, network.prototypes))

    def state(self) -> dict[str, Tensor]:
        """Network, memory, style module and the head of log σ²."""
        parts = {"style": self.style.state_dict(), "variance": self.variance.state_dict()}
        return super().state() | pack(parts)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts = unpack(state)
        self.style.load_state_dict(parts["style"])
        self.variance.load_state_dict(parts["variance"])


class L2DPhase(PseudoLabelPhase):
    """One stage of L2D."""

    def __init__(self, method: L2D, images: Tensor, labels: Tensor | None) -> None:
        setting, recipe, config = method.setting, method.setting.recipe, method.config
        parameters = [*method.network.parameters(), *method.variance.parameters()]
        optimiser = StepDecaySGD(
            parameters,
            recipe.lr,
            recipe.epochs,
            config.sgd,
            after=config.decay_after,
            factor=config.decay,
            steps=recipe.steps,
        )
        super().__init__(method, images, labels, optimiser, union=config.replay == "union", refresh=config.refresh)
        self._l2d, self._config = method, config
        self._style_optimiser = StageSGD(method.style.parameters(), config.style_lr, recipe.epochs, STYLE_SGD)
        self._styles, self._noise = (setting.generator(name, method.stage) for name in ("styles", "embeddings"))
        self.generators = (*self.generators, self._styles, self._noise)

    def step(self) -> dict[str, Tensor]:
        """One update of the network on a batch in new styles, then one of the style module."""
        batch = self.batches.draw(self.batch)
        self.network.train()
        learnt = self._learn(batch.images, batch.labels)
        return learnt | self._diversify(batch.images, batch.labels)

    def _learn(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The network's turn."""
        config, both = self._config, torch.cat([labels, labels])
        styled = self._l2d.style.restyle(images, self._l2d.blend, self._styles)
        mean, log_variance, z, logits = self._l2d.encode(torch.cat([styled, images]), self._noise)
        terms = {"ce": F.cross_entropy(logits, both)}
        if config.contrast:
            terms["contrast"] = config.contrast * supervised_contrastive(z, both, config.temperature).mean()
        if config.likelihood:
            guess = mean[len(images) :], log_variance[len(images) :]
            terms["likelihood"] = config.likelihood * misfit(*guess, z[: len(images)])
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}

    def _diversify(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The style module's turn, through the network as it now is."""
        styled = self._l2d.style.estimate(images, self._l2d.blend, self._styles)
        mean, log_variance, z, _ = self._l2d.encode(torch.cat([styled, images]), self._noise)
        terms = {"discrepancy": conditional_mmd(z, labels)}
        if self._config.information:
            order = random_order(len(images), self._styles)
            guess = mean[len(images) :], log_variance[len(images) :]
            bound = information_bound(*guess, z[: len(images)], order)
            terms["information"] = self._config.information * bound
        self._style_optimiser.minimise(torch.stack(list(terms.values())).sum())
        return terms
