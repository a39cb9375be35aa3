"""PDEN — "Progressive Domain Expansion Network for Single Domain Generalization", CVPR 2021.

Generators (:mod:`ratp.parts.image_generator`) make further domains out of one, one after another. While a new one, G,
learns, every step has for its images x: x⁺ = G(x), x₂ from an earlier generator chosen at random, and x₃ between x
and x₂, each image at its own place.

* Network: CE(x) + CE(x₂) + CE(x₃) + w·[CE(x⁺) + contrast between the views of each image].
* G: CE(x⁺) − how far two draws of x⁺ are apart + distance of x from a second generator's way back + being hard to
  know again as a view of the same image (:mod:`ratp.parts.instance_contrast`).

G stands still for the last part of its epochs, then joins the pool, which all stages share. Source stage by true
labels; target stages by SHOT's pseudo labels, anew every epoch, with batches from target and memory together.

Departures from the published code:

* The stages of the harness: the source has 10 generators of 3 epochs each instead of 20 of 30 after a stage of
  cross-entropy alone, a target has one. The network learns by the harness's SGD; generators by Adam, as published.
* All views pass the network together and in training mode; the original's has no BatchNorm. The projection for the
  contrast is on the embedding.
* A generator's loss is computed by the network after its update, from x⁺ and one other view. The original uses
  what is left of the pass before it, which today's PyTorch refuses. This pass, too, moves BatchNorm's running
  statistics, so that x⁺ has more weight in them than the other views.
* Contrasts are exact where the original adds 10⁻⁶ to probabilities. Images are drawn from all there are, not from
  the first 10 000.
* With large networks generators are computed twice rather than kept in memory for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.method import Setting, pack, unpack
from ratp.parts.adam import Adam
from ratp.parts.image_generator import NOISE_DIM, GeneratorPool, ImageGenerator, diversity
from ratp.parts.instance_contrast import adversarial_contrastive, instance_contrastive
from ratp.parts.sgd import SGDConfig, StageSGD
from ratp.phase import Phase
from ratp.pseudo_labels import PseudoLabelPhase
from ratp.training import NetworkMethod


@dataclass(frozen=True)
class PDENConfig:
    """Switches of PDEN. Defaults: the published weights."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser of the network")
    source_generators: int = switch(10, "generators made on the source, at most one an epoch", minimum=1)
    target_generators: int = switch(1, "generators made on each target, at most one an epoch", minimum=1)
    frozen: float = switch(1 / 3, "share of its epochs in which a generator stands still", minimum=0, below=1)
    generator_lr: float = switch(1e-4, "learning rate of generators", above=0)
    expansion: float = switch(1.0, "w_t, weight of what the network learns from a new generator", minimum=0)
    recognition: float = switch(1.0, "w_cls, weight of a generator's cross-entropy", minimum=0)
    diversity: float = switch(2.0, "w_div, weight of the distance between two draws", minimum=0)
    diversity_limit: float = switch(0.5, "δ, distance of two draws that is enough", above=0)
    cycle: float = switch(20.0, "w_cyc, weight of the way back to the image", minimum=0)
    adversary: float = switch(0.1, "w_info, weight of being hard to know again", minimum=0)
    temperature: float = switch(0.07, "τ of both contrasts", above=0)
    projection: int = switch(128, "dimension the contrasts are made in", minimum=1)
    recompute: bool = switch(False, "compute generators twice instead of keeping what their gradient needs")
    refresh: int = switch(1, "epochs between labellings of a target", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class Stretch(NamedTuple):
    """Epochs in which all steps do the same work.

    Attributes:
        generator: Number of the generator within the stage.
        first: First epoch.
        epochs: How many.
        learns: Whether the generator learns.
        last: Whether the generator is finished after them.
    """

    generator: int
    first: int
    epochs: int
    learns: bool
    last: bool


def stretches(epochs: int, generators: int, frozen: float) -> list[Stretch]:
    """The epochs of a stage, shared out among generators: for each some in which it learns, some in which it does not.

    Args:
        epochs: Of the stage.
        generators: How many; no more than one an epoch.
        frozen: Share of a generator's epochs in which it does not learn; it learns in one at least.
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


class PDEN(NetworkMethod):
    """A network that learns from domains generated one after another."""

    name = "pden"
    title = "PDEN: progressive domain expansion"
    family = "single domain generalisation"
    paper = "Li et al., Progressive Domain Expansion Network for Single Domain Generalization, CVPR 2021"
    needs = "source labels, memory, pseudo labels of targets, generators"
    config_type = PDENConfig
    large: ClassVar[Mapping[str, Any]] = {"recompute": True}
    config: PDENConfig

    def __init__(self, setting: Setting, config: PDENConfig) -> None:
        super().__init__(setting, config)
        with setting.randomness.scope("projection"):
            self.projection = nn.Linear(setting.recipe.network.dim, config.projection).to(setting.device)
        self.generators: list[ImageGenerator] = []

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """A phase or two for each generator, with true labels."""
        return self._phases(PDENStage(self, domain.images, domain.labels), self.config.source_generators)

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """A phase or two for each generator, with pseudo labels and memory."""
        return self._phases(PDENStage(self, domain.images, None), self.config.target_generators)

    def _phases(self, stage: PDENStage, generators: int) -> list[Phase]:
        parts = stretches(self.setting.recipe.epochs, generators, self.config.frozen)
        return [PDENPhase(stage, part) for part in parts]

    def state(self) -> dict[str, Tensor]:
        """Network, memory, projection and the pool of generators."""
        pool = nn.ModuleList(self.generators).state_dict()
        return super().state() | pack({"projection": self.projection.state_dict(), "generators": pool})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts = unpack(state)
        self.projection.load_state_dict(parts["projection"])
        pool = unpack(parts.get("generators", {}))
        with self.setting.randomness.scope("generators"):  # their first numbers are drawn, and at once replaced
            self.generators = [ImageGenerator().to(self.setting.device).requires_grad_(False) for _ in pool]
        for index, generator in enumerate(self.generators):
            generator.load_state_dict(pool[str(index)])


class PDENStage(PseudoLabelPhase):
    """One stage of PDEN as a whole. What a step does changes with its generators: :class:`PDENPhase` cuts it up."""

    def __init__(self, method: PDEN, images: Tensor, labels: Tensor | None) -> None:
        setting, recipe, config = method.setting, method.setting.recipe, method.config
        trained = [*method.network.parameters(), *method.projection.parameters()]
        optimiser = StageSGD(trained, recipe.lr, recipe.epochs, config.sgd, recipe.steps)
        super().__init__(method, images, labels, optimiser, union=config.replay == "union", refresh=config.refresh)
        self._pden, self._config, self._number = method, config, method.stage
        self._std, self._mean = (numbers.reshape(-1, 1, 1) for numbers in (method.scaling.std, method.scaling.mean))
        self._noise = setting.generator("generator noise", method.stage)
        self.generators = (*self.generators, self._noise)
        self._pool: GeneratorPool | None = None
        self._learns = False

    def enter(self, stretch: Stretch) -> None:
        """Makes ready for the steps of some epochs; makes the generator if they are its first."""
        if stretch.learns:
            setting = self._pden.setting
            with setting.randomness.scope("generators", self._number, stretch.generator):
                self._generator, self._back = ImageGenerator(), ImageGenerator(noisy=False)
            learning = [module.to(setting.device) for module in (self._generator, self._back)]
            if self.network.channels_last:  # as the images come: nothing is turned round between layers
                learning = [module.to(memory_format=torch.channels_last) for module in learning]
            self._adam = Adam([p for module in learning for p in module.parameters()], self._config.generator_lr)
            finished = self._pden.generators
            self._pool = GeneratorPool(finished) if finished else None
        self._learns = stretch.learns

    def leave(self, stretch: Stretch) -> dict[str, float]:
        """Puts a finished generator into the pool; returns what to record."""
        if stretch.last:
            self._pden.generators.append(self._generator.requires_grad_(False))
        return {"generators": float(len(self._pden.generators))}

    def step(self) -> dict[str, Tensor]:
        """One update of the network, and one of the generator if it learns."""
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
        """The network's turn."""
        config, views = self._config, [made, *others]
        output = self.network(torch.cat(views))
        new, *known = (F.cross_entropy(logits, labels) for logits in output.logits.chunk(len(views)))
        projected = self._pden.projection(output.embedding).chunk(len(views))
        terms = {
            "ce": torch.stack(known).sum(),
            "expansion": config.expansion * new,
            "contrast": config.expansion * instance_contrastive(projected, config.temperature),
        }
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}

    def _expand(
        self, made: Tensor, seen: Tensor, clean: Tensor, others: list[Tensor], labels: Tensor
    ) -> dict[str, Tensor]:
        """The generator's turn, through the network as it now is."""
        config, count = self._config, len(clean)
        # the view x⁺ is compared with, one for all images
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
        """One draw of x⁺, with values in (0, 1), from what the generator has seen."""
        return self._compute(self._generator.draw, seen, self._draw_noise(seen))

    def _earlier(self, clean: Tensor) -> list[Tensor]:
        """x₂ and x₃, with values in [0, 1]; none without earlier generators."""
        if self._pool is None:
            return []
        earlier = self._pool(clean, self._draw_noise(clean), self._choose(self._pool.size))
        place = torch.rand(len(clean), 1, 1, 1, generator=self._noise, device=clean.device)
        return [earlier, place * clean + (1 - place) * earlier]

    def _compute(self, part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What a generator, or a part of its way, makes of images; gradients are wanted while it learns."""
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
        """One of ``count``, by a number that stays on the device."""
        return torch.randint(count, (1,), generator=self._noise, device=self._noise.device)


class PDENPhase(Phase):
    """Some epochs of a stage, whose steps all do the same work and may so be captured.

    Args:
        stage: Whose.
        stretch: Which.
    """

    captures = True

    def __init__(self, stage: PDENStage, stretch: Stretch) -> None:
        self.name = f"generator {stretch.generator + 1}{'' if stretch.learns else ' frozen'}"
        self.epochs, self.steps, self.generators = stretch.epochs, stage.steps, stage.generators
        self.stage, self.stretch = stage, stretch

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """What the stage does at the start of the epoch; before the first, it makes a new generator or stops it."""
        if epoch == 0:
            self.stage.enter(self.stretch)
        return self.stage.begin_epoch(self.stretch.first + epoch)

    def step(self) -> dict[str, Tensor]:
        """One step of the stage."""
        return self.stage.step()

    def make_ready(self, begun: int, finished: bool) -> None:
        """Makes the generators of this stretch, and puts a finished one into the pool."""
        if begun:
            self.stage.enter(self.stretch)
        if finished:
            self.stage.leave(self.stretch)

    def finish(self) -> dict[str, float]:
        """A finished generator joins the pool; after the last epoch of the stage, exemplars are chosen."""
        record = self.stage.leave(self.stretch)
        ends = self.stretch.first + self.stretch.epochs == self.stage.epochs
        return record | (self.stage.finish() if ends else {})
