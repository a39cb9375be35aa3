"""PDEN — "Progressive Domain Expansion Network for Single Domain Generalization", CVPR 2021.

Generators create further domains from one, one after another. While a new generator G learns, every step has for its
images x: x⁺ = G(x), x₂ from a random earlier generator, and x₃ between x and x₂, at a random position per image.

* Network: CE(x) + CE(x₂) + CE(x₃) + w·[CE(x⁺) + contrast between the views of each image].
* G: CE(x⁺) − distance of two draws of x⁺ + distance of x from a second generator's reconstruction + an adversarial
  contrast, which makes x⁺ hard to recognise as a view of the same image.

In the last part of its epochs G is frozen; then it joins the pool that all stages share. The source stage uses true
labels; target stages SHOT's pseudo-labels, updated every epoch, with batches from target and memory together.

A generator (section 3.2) has 3×3 convolutions C of 16, 32, 64 and 3 channels, r = ReLU, and images in [0, 1]; the one
that reconstructs has no noise and no A:

    G(x, n) = σ( C₄ r(C₃ A(r(C₂ r(C₁ x)), n)) ),   A(h, n) = (1 + γ)·IN(h) + β,   (γ, β) = linear(n),   n ~ N(0, I)

Among all views but itself, a view recognises another one of the same image with probability

    p = e^{f_i·f_p/τ} / Σ_{a≠i} e^{f_i·f_a/τ}

The network minimises −log p, a generator −log(1 − p).

Deviations from the published code:

* Stages: the source has 10 generators of 3 epochs each, instead of 20 of 30 after a stage of cross-entropy alone; a
  target has one. The network learns by the recipe's SGD, generators by Adam, as published.
* All views pass through the network together and in training mode; the original has no BatchNorm. The projection for
  the contrast applies to the embedding.
* A generator's loss is computed by the network after its update, from x⁺ and one other view. The original reuses the
  pass before it, which today's PyTorch refuses. This pass also moves BatchNorm's running statistics, so x⁺ has more
  weight in them than the other views.
* Contrasts are exact; the original adds 10⁻⁶ to probabilities. Images are drawn from all, not from the first 10 000.
* With large networks, generators are recomputed for the gradient to save memory (``recompute``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ratp.config import switch
from ratp.errors import RatpError
from ratp.functional.losses import supervised_contrastive
from ratp.functional.optim import Adam, SGDConfig
from ratp.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelPhase
from ratp.training.method import Setting, pack, unpack
from ratp.training.phase import Phase

CHANNELS = 3
WIDTH = 16
NOISE_DIM = 10
EPSILON = 1e-5
# Output channels of the last layer on a GPU. For three, cuDNN picks a kernel without tensor cores: a quarter of a
# millisecond for 64 pictures of 32×32 on an H200.
WIDE = 8


class ImageGenerator(nn.Module):
    """A generator G; ``layers`` are C₁ to C₄, ``noise`` is the linear layer of A (None: no A)."""

    def __init__(self, *, noisy: bool = True) -> None:
        """Initialises the generator at random; without ``noisy`` it takes no noise."""
        super().__init__()
        widths = CHANNELS, WIDTH, 2 * WIDTH, 4 * WIDTH, CHANNELS
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size=3, padding=1) for before, after in pairwise(widths)
        )
        self.noise = nn.Linear(NOISE_DIM, 2 * 2 * WIDTH) if noisy else None

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns images in (0, 1) for images in [0, 1] and noise n of shape (n, 10)."""
        return self.draw(self.look(images), noise)

    def look(self, images: Tensor) -> Tensor:
        """Computes IN(r(C₂ r(C₁ x))), which all draws from the same images share; without A, r(C₂ r(C₁ x))."""
        first, second, _, _ = self.layers
        hidden = F.relu(second(F.relu(first(images))))
        if self.noise is None:
            return hidden
        variance, mean = torch.var_mean(hidden, dim=(2, 3), correction=0, keepdim=True)
        return (hidden - mean) * (variance + EPSILON).rsqrt()

    def draw(self, seen: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns images in (0, 1) from the result of :meth:`look` and noise of shape (n, 10)."""
        _, _, third, last = self.layers
        if self.noise is not None and noise is not None:
            scale, shift = self.noise(noise)[:, :, None, None].chunk(2, dim=1)
            seen = (1 + scale) * seen + shift
        hidden = F.relu(third(seen))
        return torch.sigmoid(widened(cast(nn.Conv2d, last), hidden) if hidden.is_cuda else last(hidden))


def widened(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """Applies a convolution of stride 1 with few output channels, padded with channels whose weights are zero."""
    missing = max(0, WIDE - layer.out_channels)
    weight = F.pad(layer.weight, (0, 0, 0, 0, 0, 0, 0, missing))
    bias = None if layer.bias is None else F.pad(layer.bias, (0, missing))
    return F.conv2d(images, weight, bias, padding=layer.padding)[:, : layer.out_channels]


class GeneratorPool:
    """Copies of trained generators; an index on the device chooses the one to apply."""

    def __init__(self, generators: Sequence[ImageGenerator]) -> None:
        if not generators:
            raise RatpError("a pool needs at least one generator.")
        self._shape = generators[0]
        names = [name for name, _ in self._shape.named_parameters()]
        self._numbers = {
            name: torch.stack([generator.get_parameter(name).detach() for generator in generators]) for name in names
        }
        self.size = len(generators)

    def __call__(self, images: Tensor, noise: Tensor, which: Tensor) -> Tensor:
        """Applies generator ``which``, an index of shape (1,), without gradients; arguments as for one generator."""
        with torch.no_grad():
            chosen = {name: numbers.index_select(0, which).squeeze(0) for name, numbers in self._numbers.items()}
            return cast(Tensor, functional_call(self._shape, chosen, (images, noise)))


def diversity(some: Tensor, others: Tensor, limit: float) -> Tensor:
    """Computes the distance of two draws: mean over images of min(mean |x − x′|, δ)."""
    return (some - others).abs().mean(dim=(1, 2, 3)).clamp(max=limit).mean()


def instance_contrastive(views: Sequence[Tensor], temperature: float = 0.07) -> Tensor:
    """Computes −log p, averaged over all views; every other view of the same image counts equally.

    Each view has features (n, d), with the same images in the same rows.
    """
    features = torch.cat(list(views))
    images = torch.arange(len(views[0]), device=features.device).repeat(len(views))
    return supervised_contrastive(features, images, temperature).mean()


def adversarial_contrastive(some: Tensor, others: Tensor, temperature: float = 0.07) -> Tensor:
    """Computes −log(1 − p) between two views (n, d), averaged over both; 0 for a single image."""
    count = len(some)
    if count < 2:
        return (some - some.detach()).sum()
    dtype = torch.promote_types(some.dtype, torch.float32)
    directions = F.normalize(torch.cat([some, others]).to(dtype), dim=1)
    place = torch.arange(2 * count, device=some.device)
    itself = place[:, None] == place[None, :]
    same_image = place[:, None] % count == place[None, :] % count
    similar = directions @ directions.T / temperature
    # −log(1 − p) = log Σ_{a≠i} − log Σ_{a of other images}
    everything = similar.masked_fill(itself, -torch.inf).logsumexp(dim=1)
    strange = similar.masked_fill(same_image, -torch.inf).logsumexp(dim=1)
    return (everything - strange).mean()


@dataclass(frozen=True)
class PDENConfig:
    """Switches of PDEN. Defaults: the published weights."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser of the network")
    source_generators: int = switch(10, "generators trained on the source, at most one per epoch", minimum=1)
    target_generators: int = switch(1, "generators trained on each target, at most one per epoch", minimum=1)
    frozen: float = switch(1 / 3, "share of its epochs in which a generator is frozen", minimum=0, below=1)
    generator_lr: float = switch(1e-4, "learning rate of generators", above=0)
    expansion: float = switch(1.0, "w_t, weight of the network's losses on a new generator's images", minimum=0)
    recognition: float = switch(1.0, "w_cls, weight of a generator's cross-entropy", minimum=0)
    diversity: float = switch(2.0, "w_div, weight of the distance between two draws", minimum=0)
    diversity_limit: float = switch(0.5, "δ, distance of two draws beyond which nothing is gained", above=0)
    cycle: float = switch(20.0, "w_cyc, weight of the reconstruction error", minimum=0)
    adversary: float = switch(0.1, "w_info, weight of the adversarial contrast", minimum=0)
    temperature: float = switch(0.07, "τ of both contrasts", above=0)
    projection: int = switch(128, "dimension of the features that are contrasted", minimum=1)
    recompute: bool = switch(False, "recompute generators for the gradient, to save memory")
    refresh: int = switch(1, "epochs between updates of pseudo-labels", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class Stretch(NamedTuple):
    """Epochs of a stage in which every step does the same work."""

    generator: int  # number of the generator within the stage
    first: int  # first epoch
    epochs: int  # number of epochs
    learns: bool  # whether the generator is trained
    last: bool  # whether the generator is finished afterwards


def stretches(epochs: int, generators: int, frozen: float) -> list[Stretch]:
    """Divides the epochs of a stage among its generators, at most one per epoch.

    Each is trained for at least one epoch, then frozen for the share ``frozen`` of its epochs.
    """
    count = min(generators, epochs)
    found = []
    for index in range(count):
        first, end = index * epochs // count, (index + 1) * epochs // count
        still = min(round(frozen * (end - first)), end - first - 1)
        found.append(Stretch(index, first, end - first - still, True, still == 0))
        if still:
            found.append(Stretch(index, end - still, still, False, True))
    return found


class PDEN(PseudoLabelMethod):
    """Trains a network on domains generated one after another."""

    name = "pden"
    title = "PDEN: progressive domain expansion"
    family = "single domain generalisation"
    paper = "Li et al., Progressive Domain Expansion Network for Single Domain Generalization, CVPR 2021"
    needs = "its own source training, exemplars, generators, many passes over a target"
    config_type = PDENConfig
    large: ClassVar[Mapping[str, Any]] = {"recompute": True}
    config: PDENConfig

    def __init__(self, setting: Setting, config: PDENConfig) -> None:
        super().__init__(setting, config)
        with setting.randomness.scope("projection"):
            self.projection = nn.Linear(setting.recipe.network.dim, config.projection).to(setting.device)
        self.extras = {"projection": self.projection}
        self.generators: list[ImageGenerator] = []

    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns one or two phases per generator."""
        config, stage = self.config, PDENStage(self, images, labels)
        generators = config.target_generators if labels is None else config.source_generators
        return [PDENPhase(stage, part) for part in stretches(self.setting.recipe.epochs, generators, config.frozen)]

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, projection and the pool of generators."""
        pool = nn.ModuleList(self.generators).state_dict()
        return super().state() | pack({"generators": pool})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        pool = unpack(unpack(state).get("generators", {}))
        with self.setting.randomness.scope("generators"):  # random weights, replaced at once
            self.generators = [ImageGenerator().to(self.setting.device).requires_grad_(False) for _ in pool]
        for index, generator in enumerate(self.generators):
            generator.load_state_dict(pool[str(index)])


class PDENStage(PseudoLabelPhase):
    """A whole stage of PDEN; :class:`PDENPhase` runs the parts in which every step does the same work."""

    saved = "_generator _back _adam"

    def __init__(self, method: PDEN, images: Tensor, labels: Tensor | None) -> None:
        setting, config = method.setting, method.config
        optimiser = method.optimiser([*method.network.parameters(), *method.projection.parameters()])
        super().__init__(method, images, labels, optimiser)
        self._pden, self._config, self._number = method, config, method.stage
        self._std, self._mean = (numbers.reshape(-1, 1, 1) for numbers in (method.scaling.std, method.scaling.mean))
        self._noise = setting.generator("generator noise", method.stage)
        self.generators = (*self.generators, self._noise)
        self._pool: GeneratorPool | None = None
        self._learns = False

    def enter(self, stretch: Stretch) -> None:
        """Prepares a stretch; creates the generator at the first of its two."""
        if stretch.learns:
            setting = self._pden.setting
            with setting.randomness.scope("generators", self._number, stretch.generator):
                self._generator, self._back = ImageGenerator(), ImageGenerator(noisy=False)
            learning = [module.to(setting.device) for module in (self._generator, self._back)]
            if self.network.channels_last:  # the layout of the images, so that no layer converts it
                learning = [module.to(memory_format=torch.channels_last) for module in learning]
            self._adam = Adam([p for module in learning for p in module.parameters()], self._config.generator_lr)
            self._pool_finished()
        self._learns = stretch.learns

    def _pool_finished(self) -> None:
        """Builds the pool from the generators finished so far."""
        finished = self._pden.generators
        self._pool = GeneratorPool(finished) if finished else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state, and the pool from the method's generators, which have been restored before."""
        super().load_state_dict(state)
        self._pool_finished()

    def leave(self, stretch: Stretch) -> dict[str, float]:
        """Adds a finished generator to the pool; returns what to record."""
        if stretch.last:
            self._pden.generators.append(self._generator.requires_grad_(False))
        return {"generators": float(len(self._pden.generators))}

    def step(self) -> dict[str, Tensor]:
        """Updates the network, and the generator while it is trained."""
        batch = self.batches.draw(self.batch)
        images = self.network.laid_out(batch.images)
        clean = images * self._std + self._mean
        self.network.train()
        seen = self._compute(self._generator.look, clean)
        made = self._draw(seen)
        others = [images, *(self._normalised(view) for view in self._earlier(clean))]
        terms = self._learn(self._normalised(made.detach()), others, batch.labels)
        return terms | (self._expand(made, seen, clean, others, batch.labels) if self._learns else {})

    def _learn(self, made: Tensor, others: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """Updates the network."""
        config, views = self._config, [made, *others]
        output = self.network(torch.cat(views))
        new, *known = (F.cross_entropy(logits, labels) for logits in output.logits.chunk(len(views)))
        projected = self._pden.projection(output.embedding).chunk(len(views))
        terms = {
            "ce": torch.stack(known).sum(),
            "expansion": config.expansion * new,
            "contrast": config.expansion * instance_contrastive(projected, config.temperature),
        }
        return self.minimise(terms)

    def _expand(
        self, made: Tensor, seen: Tensor, clean: Tensor, others: list[Tensor], labels: Tensor
    ) -> dict[str, Tensor]:
        """Updates the generator, through the network just updated."""
        config, count = self._config, len(clean)
        # the view that x⁺ is compared with, the same for all images
        other = torch.stack(others).index_select(0, self._choose(len(others))).squeeze(0)
        output = self.network(torch.cat([self._normalised(made), other]))
        new, known = self._pden.projection(output.embedding).chunk(2)
        apart = diversity(made, self._draw(seen), config.diversity_limit)
        back = self._compute(self._back, made)
        hidden = adversarial_contrastive(new, known.detach(), config.temperature)
        terms = {
            "recognition": config.recognition * F.cross_entropy(output.logits[:count], labels),
            "diversity": -config.diversity * apart,
            "cycle": config.cycle * F.mse_loss(back, clean),
            "adversary": config.adversary * hidden,
        }
        self._adam.minimise(torch.stack(list(terms.values())).sum())
        return terms

    def _draw(self, seen: Tensor) -> Tensor:
        """Draws x⁺, with values in (0, 1), from the result of ``look``."""
        return self._compute(self._generator.draw, seen, self._draw_noise(seen))

    def _earlier(self, clean: Tensor) -> list[Tensor]:
        """Returns x₂ and x₃, with values in [0, 1]; nothing without earlier generators."""
        if self._pool is None:
            return []
        earlier = self._pool(clean, self._draw_noise(clean), self._choose(self._pool.size))
        place = torch.rand(len(clean), 1, 1, 1, generator=self._noise, device=clean.device)
        return [earlier, place * clean + (1 - place) * earlier]

    def _compute(self, part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Runs a generator or a part of it; gradients are recorded only while it is trained."""
        if not self._learns:
            with torch.no_grad():
                return part(*inputs)
        if self._config.recompute:
            made: Tensor = checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
            return made
        return part(*inputs)

    def _normalised(self, images: Tensor) -> Tensor:
        return self._pden.scaling.unit(images)

    def _draw_noise(self, images: Tensor) -> Tensor:
        return torch.randn(len(images), NOISE_DIM, generator=self._noise, device=images.device)

    def _choose(self, count: int) -> Tensor:
        """Draws one of ``count`` as an index that stays on the device."""
        return torch.randint(count, (1,), generator=self._noise, device=self._noise.device)


class PDENPhase(Phase):
    """A stretch of a stage; all its steps do the same work, so they can be captured."""

    captures = True
    saved = "stage"

    def __init__(self, stage: PDENStage, stretch: Stretch) -> None:
        self.name = f"generator {stretch.generator + 1}{'' if stretch.learns else ' frozen'}"
        self.epochs, self.steps, self.generators = stretch.epochs, stage.steps, stage.generators
        self.stage, self.stretch = stage, stretch

    def begin(self) -> None:
        """Creates a new generator, or freezes it."""
        self.stage.begin()
        self.stage.enter(self.stretch)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Begins the epoch of the stage."""
        return self.stage.begin_epoch(self.stretch.first + epoch)

    def step(self) -> dict[str, Tensor]:
        """Runs one step of the stage."""
        return self.stage.step()

    def finish(self) -> dict[str, float]:
        """Adds a finished generator to the pool; after the last epoch of the stage, chooses exemplars."""
        record = self.stage.leave(self.stretch)
        ends = self.stretch.first + self.stretch.epochs == self.stage.epochs
        return record | (self.stage.finish() if ends else {})
