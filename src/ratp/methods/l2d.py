"""L2D — "Learning to Diversify for Single Domain Generalization", ICCV 2021.

A style module (:mod:`ratp.functional.style`) gives images new styles. Network and module take turns in every step:

* Network: x̃ = 0.6·σ(style(x)) + 0.4·x. Cross-entropy of x̃ and x + α₁·supervised contrastive loss between them +
  α₂·negative log-likelihood of z(x̃) under N(μ(x), σ²(x)). Embeddings are sampled, z = μ + 0.2·σ·ε; predictions use μ.
* Style module, with frozen convolutions: class-wise MMD of z(x̃) and z(x) + β·upper bound on their mutual information.
  Styles should differ, classes should not.

The source stage uses true labels, target stages SHOT's pseudo-labels, updated every epoch, with batches from target and
memory together. All parameters learn.

The bound on the mutual information is CLUB (Cheng et al., ICML 2020), with a random permutation π:

    I ≤ ½ · mean_i Σ_d [ (μ_i − z_π(i))²/σ_i² − (μ_i − z_i)²/σ_i² ]

The maximum mean discrepancy of the n pairs (a_i, b_i) of one class uses Gaussian kernels of several widths,

    MMD = 1/n² · Σ_ij [k(a_i, a_j) + k(b_i, b_j) − 2·k(a_i, b_j)],   k(x, y) = Σ_{m=0..4} exp(−‖x − y‖² / (w·2^m))

where 4w, a constant, is the mean squared distance between two different ones of the 2n features.

Deviations from the published code:

* μ is the bottleneck's output and log σ² = ReLU(linear), a head parallel to its last layer. The original has both on
  the pooled features, μ through a leaky ReLU; with ``network.bottleneck`` one, both are on the features here too.
* The style module is sized to the images; the published sizes are for 224 pixels. DTN has the recipe's rate.
* A class with fewer than two images in a batch is left out of the MMD. In the original such a class makes the MMD NaN,
  and the style module from then on.
* The sum of the mixing weights is kept away from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.functional.losses import supervised_contrastive
from ratp.functional.optim import SGDConfig, StageSGD, StepDecaySGD, check_step_decay
from ratp.functional.style import Blend, StyleModule
from ratp.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelPhase
from ratp.training.method import Setting
from ratp.training.phase import Phase


def misfit(mean: Tensor, log_variance: Tensor, samples: Tensor) -> Tensor:
    """Computes the mean of (μ − z)²/σ² + log σ², which is −2·log p of the samples under N(μ, σ²) plus a constant."""
    return ((mean - samples).square() * (-log_variance).exp() + log_variance).mean()


def information_bound(mean: Tensor, log_variance: Tensor, samples: Tensor, order: Tensor) -> Tensor:
    """Computes the bound for μ, log σ² and z of shape (n, d); ``order`` is π. 0 if π is the identity."""
    # by a matrix product, because the gradient of indexing sorts
    rows = (order[:, None] == torch.arange(len(order), device=order.device)).to(samples.dtype)
    own, strange = (mean - samples).square(), (mean - rows @ samples).square()
    return ((strange - own) * (-log_variance).exp()).sum(dim=1).mean() / 2


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """Draws a permutation on the generator's device."""
    return torch.rand(count, generator=generator, device=generator.device).argsort()


KERNELS, STEP = 5, 2.0
# Fewest pairs of a class that count.
FEWEST = 2


def conditional_mmd(features: Tensor, labels: Tensor) -> Tensor:
    """Averages the MMD over the classes with at least two pairs; 0 if there are none.

    ``features``, shape (2n, d), holds all a, then all b; a_i and b_i have the class ``labels[i]``. No shape depends on
    labels.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    features, both = features.to(dtype), torch.cat([labels, labels])
    same = (both[:, None] == both[None, :]).to(dtype)
    count = same.sum(dim=1)  # of the class of each row, 2n
    squares = (features[:, None] - features[None, :]).square().sum(dim=2)
    # w = Σ‖x − y‖² / (2n·(2n − 1)) / 2²
    total = same @ (squares.detach() * same).sum(dim=1)
    width = (total / (count * (count - 1) * STEP ** (KERNELS // 2))).clamp_min(torch.finfo(dtype).tiny ** 0.5)
    kernel = (squares * (_factors(features.device, dtype) / width[:, None])).exp().sum(dim=0)
    # each class divided by its own n², if it has enough pairs
    enough = (count >= 2 * FEWEST).to(dtype)
    weights = same * _signs(len(labels), features.device, dtype) * (enough / (count / 2).square())[:, None]
    # each of a class's 2n rows counts for 1/2n of the class
    return (kernel * weights).sum() / (enough / count).sum().clamp_min(1)


@cache
def _factors(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns −1/2^m, shape (kernels, 1, 1)."""
    return (-(STEP ** -torch.arange(KERNELS, dtype=dtype)))[:, None, None].to(device)


@cache
def _signs(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns +1 within a and within b, −1 between them, shape (2n, 2n)."""
    side = torch.ones(2 * count, dtype=dtype)
    side[count:] = -1
    return (side[:, None] * side[None, :]).to(device)  # a blocking copy, so any stream may use it


L2D_SGD = SGDConfig(momentum=0.9, weight_decay=5e-4, schedule="constant", nesterov=True)
STYLE_SGD = SGDConfig(momentum=0.0, weight_decay=0.0, schedule="constant")


@dataclass(frozen=True)
class L2DConfig:
    """Switches of L2D. Defaults: the published ones."""

    sgd: SGDConfig = switch(L2D_SGD, "optimiser of the network")
    decay_after: float = switch(0.8, "share of a stage's epochs before the rate falls", above=0, maximum=1)
    decay: float = switch(0.1, "factor on the rate afterwards; 1: constant rate", above=0)
    contrast: float = switch(1.0, "α₁, weight of the supervised contrastive loss", minimum=0)
    temperature: float = switch(0.07, "τ of the contrastive loss", above=0)
    likelihood: float = switch(1.0, "α₂, weight of the negative log-likelihood", minimum=0)
    information: float = switch(
        0.1, "β, weight of the bound on mutual information in the style module's loss", minimum=0
    )
    styled: float = switch(0.6, "share of the restyled image, mixed with the original", minimum=0, maximum=1)
    kernel_sizes: tuple[int, ...] = switch((9, 13, 17, 5), "kernel sizes of the style module", minimum=1)
    style_lr: float = switch(0.005, "learning rate of the style module", above=0)
    spread: float = switch(0.2, "factor on the standard deviation of embeddings while training", minimum=0)
    refresh: int = switch(1, "epochs between updates of pseudo-labels", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class Encoding(NamedTuple):
    """The network's output while it trains."""

    mean: Tensor  # μ, shape (n, dim)
    log_variance: Tensor  # log σ², shape (n, dim)
    embedding: Tensor  # z, sampled from both, shape (n, dim)
    logits: Tensor  # z Wᵀ, shape (n, classes)


class L2D(PseudoLabelMethod):
    """Trains a network on images in new styles, and a style module to vary the styles."""

    name = "l2d"
    title = "L2D: learning to diversify"
    family = "single domain generalisation"
    paper = "Wang et al., Learning to Diversify for Single Domain Generalization, ICCV 2021"
    needs = "its own source training, exemplars, a style module, many passes over a target"
    config_type = L2DConfig
    # The demo's rate is for SGD without momentum; momentum 0.9 makes a step ten times as long.
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        ("demo", "official"): {"lr": 0.005},
        ("pacs", "official"): {"lr": 0.001},
        ("domainnet10", "official"): {"lr": 0.001},
        ("folders", "official"): {"lr": 0.001},
    }
    needs_bottleneck = True
    config: L2DConfig

    def __init__(self, setting: Setting, config: L2DConfig) -> None:
        check_step_decay(config.sgd, config.decay)
        super().__init__(setting, config)
        sizes = setting.recipe.network
        with setting.randomness.scope("style"):
            self.style = StyleModule(setting.image_size, config.kernel_sizes).to(setting.device)
        with setting.randomness.scope("variance"):
            first = cast(nn.Linear, self.network.bottleneck[0])
            inputs = first.out_features if sizes.bottleneck == "two" else first.in_features
            self.variance = nn.Linear(inputs, sizes.dim).to(setting.device)
        self.extras = {"style": self.style, "variance": self.variance}
        self.blend = Blend(config.styled, self.scaling.mean, self.scaling.std)

    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns one phase."""
        return [L2DPhase(self, images, labels)]

    def encode(self, images: Tensor, generator: torch.Generator) -> Encoding:
        """Encodes normalised images; embeddings are sampled from the generator."""
        network = self.network
        hidden = network.features(images)
        last: nn.Module = network.bottleneck
        if network.config.bottleneck == "two":
            first, norm, _, last = network.bottleneck
            hidden = norm(first(hidden), relu=True)
        mean, log_variance = last(hidden), F.relu(self.variance(hidden))
        # z = μ + 0.2·σ·ε
        noise = torch.randn(mean.shape, generator=generator, device=generator.device)
        embedding = torch.addcmul(mean, (log_variance / 2).exp(), noise, value=self.config.spread)
        return Encoding(mean, log_variance, embedding, network.classify(embedding))


class L2DPhase(PseudoLabelPhase):
    """Trains L2D on one domain."""

    saved = "_style_optimiser"

    def __init__(self, method: L2D, images: Tensor, labels: Tensor | None) -> None:
        setting, recipe, config = method.setting, method.setting.recipe, method.config
        parameters = [*method.network.parameters(), *method.variance.parameters()]
        optimiser = StepDecaySGD(
            parameters,
            recipe.lr,
            recipe.epochs,
            config.sgd,
            recipe.steps,
            after=config.decay_after,
            factor=config.decay,
        )
        super().__init__(method, images, labels, optimiser)
        self._l2d, self._config = method, config
        self._style_optimiser = StageSGD(method.style.parameters(), config.style_lr, recipe.epochs, STYLE_SGD)
        self._styles, self._noise = (setting.generator(name, method.stage) for name in ("styles", "embeddings"))
        self.generators = (*self.generators, self._styles, self._noise)

    def step(self) -> dict[str, Tensor]:
        """Updates the network on a batch in new styles, then the style module."""
        batch = self.batches.draw(self.batch)
        self.network.train()
        learned = self._learn(batch.images, batch.labels)
        return learned | self._diversify(batch.images, batch.labels)

    def _learn(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Updates the network."""
        config, both = self._config, torch.cat([labels, labels])
        styled = self._l2d.style.restyle(images, self._l2d.blend, self._styles)
        mean, log_variance, z, logits = self._l2d.encode(torch.cat([styled, images]), self._noise)
        terms = {"ce": F.cross_entropy(logits, both)}
        if config.contrast:
            terms["contrast"] = config.contrast * supervised_contrastive(z, both, config.temperature).mean()
        if config.likelihood:
            guess = mean[len(images) :], log_variance[len(images) :]
            terms["likelihood"] = config.likelihood * misfit(*guess, z[: len(images)])
        return self.minimise(terms)

    def _diversify(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Updates the style module, through the network just updated."""
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
