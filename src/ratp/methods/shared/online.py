"""What online methods share: they adapt while they predict, in one pass over each target."""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain, check_images
from ratp.errors import ConfigError, Note
from ratp.functional.norm import affine_parameters, batch_norms, by_batch
from ratp.functional.optim import Adam, SGDConfig, StageSGD
from ratp.networks.network import Network
from ratp.training.finite import log_draw
from ratp.training.memory import Batches
from ratp.training.method import OnlineMethod, Setting, Statistics, pack, unpack
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, SupervisedPhase
from ratp.training.recipe import Scaling, classify

# Fewest images whose statistics represent a domain.
SMALLEST_BATCH = 64


@dataclass(frozen=True)
class StepConfig:
    """Switches of the steps on targets; defaults are for DTN."""

    optimiser: Literal["adam", "sgd"] = switch("adam", "optimiser on targets, without weight decay")
    rate: float = switch(1e-3, "learning rate on targets, constant", minimum=0, below=3.4e38)
    momentum: float = switch(0.9, "momentum of sgd", minimum=0, below=1)

    def steps_on(self, parameters: Iterable[nn.Parameter], *, nesterov: bool = False) -> Adam | StageSGD:
        """Returns the optimiser for the given parameters."""
        if self.optimiser == "adam":
            return Adam(parameters, self.rate)
        sgd = SGDConfig(self.momentum, weight_decay=0.0, schedule="constant", nesterov=nesterov)
        return StageSGD(parameters, self.rate, 1, sgd)


@dataclass(frozen=True)
class AdaptationConfig:
    """Switches of methods that take gradient steps on targets and normalise by the batch."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    step: StepConfig = switch(StepConfig(), "steps on targets")
    replay: Literal["separate", "none"] = switch("separate", "a memory batch with each batch, or no replay")
    eval_bn: Statistics = switch("batch", "BatchNorm statistics in evaluations after adaptation: batch or running")


class FewLayersWarning(Note):
    """The feature extractor has no layer of the kind that a method adapts."""


# Values for ResNet-50, by their names among a method's switches.
LARGE_STEPS: Mapping[str, Any] = {"step.optimiser": "sgd", "step.rate": 2.5e-4}


def in_batches(order: Tensor, size: int, smallest: int | None = None) -> list[Tensor]:
    """Splits an order into batches; a last one of fewer than ``smallest`` (None: ``size``) joins the one before."""
    parts = list(torch.split(order, size))
    if len(parts) > 1 and len(parts[-1]) < (smallest or size):
        last = parts.pop()
        parts[-1] = torch.cat([parts[-1], last])
    return parts


@torch.no_grad()
def classify_by_batch(
    network: Network,
    images: Tensor,
    scaling: Scaling,
    size: int,
    generator: torch.Generator,
    correct: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Tensor:
    """Returns logits of uint8 images; BatchNorm uses the statistics of batches of at least ``size`` images.

    Batches are drawn at random with the CPU ``generator``: images often come class by class, and a batch of one class
    has untypical statistics. A single image has none; it is classified with the running statistics. ``correct`` changes
    the logits of each batch.
    """
    check_images(images, network.image_size)
    if len(images) < 2:
        return classify(network, images, scaling)
    order = torch.randperm(len(images), generator=generator)
    was_training = network.training
    network.eval()
    try:
        with by_batch(network):
            parts = [
                correct(network(scaling(images[part.to(images.device)])).logits) for part in in_batches(order, size)
            ]
    finally:
        network.train(was_training)
    logits = torch.cat(parts)
    return torch.empty_like(logits).index_copy_(0, order.to(logits.device), logits)


def logits_by_batch(network: Network, inputs: Tensor, batches: int = 1) -> Tensor:
    """Returns logits of one or more concatenated batches, each normalised by its own statistics."""
    with by_batch(network, batches):
        return network(inputs).logits


def augmented(
    inputs: Tensor, view: Callable[[Tensor, torch.Generator], Tensor], scaling: Scaling, generator: torch.Generator
) -> Tensor:
    """Returns views of normalised images, normalised too; ``view`` takes and returns images in [0, 1]."""
    return scaling.unit(view(scaling.invert(inputs).float() / 255, generator))


@contextmanager
def tracking(network: Network) -> Iterator[None]:
    """Has BatchNorm normalise by the batch and update its running statistics within the block; dropout stays off."""
    layers = batch_norms(network).values()
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


class SinglePass(Phase):
    """Shows every image of a domain to an online method once, batch by batch in random order."""

    name = "pass"
    epochs = 1
    saved = "_next"

    def __init__(
        self,
        method: OnlineMethod,  # observes
        setting: Setting,
        domain: UnlabelledDomain,  # shown
        stage: int,  # number of the stage; it seeds the order
        # called at the end with the domain's images; its result is recorded
        finish: Callable[[Tensor], dict[str, float]] | None = None,
    ) -> None:
        self._method, self._finish = method, finish
        self._images = domain.images.to(setting.device)
        order = torch.randperm(len(self._images), generator=setting.randomness.generator("pass", stage))
        # One image has no batch statistics.
        self._parts = in_batches(order.to(setting.device), setting.recipe.batch, smallest=2)
        self.steps = len(self._parts)
        self._next = 0

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Goes to the first batch."""
        del epoch
        self._next = 0
        return {}

    def step(self) -> dict[str, Tensor]:
        """Lets the method observe one batch."""
        part = self._parts[self._next]
        log_draw(part)
        logits = self._method.observe(self._images[part])
        self._next += 1
        return {"entropy": torch.special.entr(logits.softmax(dim=1)).sum(dim=1).mean()}

    def finish(self) -> dict[str, float]:
        """Calls ``finish``."""
        return self._finish(self._images) if self._finish else {}


class OnlineNetwork(OnlineMethod, NetworkMethod):
    """Trains by cross-entropy on the source, then in one pass over each target; nothing is ever reset.

    ``observe`` also takes images that belong to no domain: a stage then starts with the first call.
    """

    smallest: ClassVar[int] = 1  # fewest images to learn from; a smaller batch is only predicted
    saved = "_begun"
    source_free = True

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self.observed = 0  # number of batches learned from so far, over all targets
        self._begun = False

    @property
    def keeps_exemplars(self) -> bool:
        """Returns whether the method replays exemplars."""
        return getattr(self.config, "replay", "none") == "separate"

    @abstractmethod
    def begin_stage(self) -> None:
        """Creates what every target starts with."""

    @abstractmethod
    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch of normalised images, and adapts to it."""

    @final
    def observe(self, images: Tensor) -> Tensor:
        """Returns logits of a batch of uint8 images, and adapts to it."""
        check_images(images, self.network.image_size)
        if not self._begun:
            self._begin()
        if len(images) < self.smallest:
            return classify(self.network, images, self.scaling)
        self.network.eval()
        logits = self.learn(self.scaling(images)).detach()
        self.observed += 1
        return logits

    def _begin(self) -> None:
        self.begin_stage()
        self._begun = True

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy."""
        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd, finish=self.finish_source)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one pass in random order."""
        self._begin()
        return [SinglePass(self, self.setting, domain, self.stage, self.finish_target)]

    def finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        """Takes exemplars with their true labels."""
        return self.keep(domain.images, domain.labels)

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars with the adapted network's predictions as labels."""
        return self.keep(images, self.predict(images).argmax(dim=1) if self.keeps_exemplars else None)

    def keep(self, images: Tensor, labels: Tensor | None) -> dict[str, float]:
        """Ends a stage: counts the domain, and stores exemplars if they are used."""
        self._begun = False
        if self.keeps_exemplars and labels is not None:
            return self.remember(images, labels)
        self.memory.seen += 1
        return {}

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory and the number of observed batches."""
        return super().state() | pack({"online": {"observed": torch.tensor(self.observed)}})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        self._begun = False
        self.observed = int(unpack(state)["online"]["observed"])


class BatchStatistics(OnlineNetwork):
    """An online method that normalises by the batch; its config has ``eval_bn``.

    Before the first target it is evaluated with running statistics, like any source model; afterwards as ``eval_bn``
    says. A batch of one image has no statistics, so it is predicted with the running ones. Only BatchNorm uses
    statistics of a batch: of a network with a vision transformer, they affect the bottleneck alone.
    """

    smallest = 2
    saved = "_exemplars"

    def begin_stage(self) -> None:
        """Creates replay, from the memory at the start of the stage."""
        memory = self.memory
        self._exemplars: Batches | None = None
        if self.keeps_exemplars and min(len(memory), self.setting.recipe.batch) > 1:  # one image has no statistics
            self._exemplars = Batches(self.setting, "target", self.stage, memory.images, memory.labels)

    def with_replay(self, loss: Tensor, network: Network) -> Tensor:
        """Adds a network's cross-entropy on a memory batch, as large as the recipe's or of all there are."""
        if self._exemplars is None:
            return loss
        exemplars = self._exemplars.draw(min(self.setting.recipe.batch, len(self._exemplars.images)))
        return loss + F.cross_entropy(logits_by_batch(network, exemplars.images), exemplars.labels)

    @classmethod
    def evaluation_statistics(cls, config: Any) -> Statistics:
        """Returns ``eval_bn``."""
        return cast(Statistics, config.eval_bn)

    def predict(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images; with batch statistics they depend on which images come together."""
        return self.predict_by(self.network, images)

    def predict_by(self, network: Network, images: Tensor) -> Tensor:
        """Predicts like :meth:`predict`, by one of the method's networks."""
        if not self.observed or self.config.eval_bn == "running":
            return classify(network, images, self.scaling)
        size = max(SMALLEST_BATCH, self.setting.recipe.batch)
        generator = self.setting.randomness.generator("evaluation")
        return classify_by_batch(network, images, self.scaling, size, generator, self.correct)

    def correct(self, logits: Tensor) -> Tensor:
        """Returns the logits of a batch as the method predicts them from those of the network."""
        return logits


class AffineMethod(BatchStatistics):
    """Trains γ and β of normalisation layers on targets; its config is an :class:`AdaptationConfig`.

    The network is in evaluation mode, because dropout would make predictions random, but normalises by the batch.
    """

    saved = "_optimiser"

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        if not self.adapted():
            left_out = bool(affine_parameters(self.network))
            raise ConfigError(
                f"{self.name} adapts scale and shift of normalisation layers (BatchNorm, LayerNorm, GroupNorm), and "
                f"{self._backbone} has none{' below its last blocks' * left_out}: set network.backbone to another one, "
                f"such as resnet18{', or freeze_top=false to adapt those above too' * left_out}."
            )

    @property
    def _backbone(self) -> str:
        return self.setting.recipe.network.backbone

    def adapted(self) -> dict[str, nn.Parameter]:
        """Returns what it trains on targets, by name."""
        return affine_parameters(self.network)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy; says so first if nothing of the feature extractor will adapt."""
        if not any(name.startswith("backbone.") for name in self.adapted()):
            text = f"{self.name} adapts scale and shift of normalisation layers, and {self._backbone} has none"
            warnings.warn(f"{text}: only those of the bottleneck will change", FewLayersWarning, stacklevel=2)
        return super().source_phases(domain)

    def begin_stage(self) -> None:
        """Creates optimiser and replay."""
        super().begin_stage()
        self._trained = self.adapted()
        self._restart_optimiser()

    def _restart_optimiser(self) -> None:
        parameters, nesterov = list(self._trained.values()), getattr(self.config, "nesterov", False)
        self._optimiser = self.config.step.steps_on(parameters, nesterov=nesterov) if parameters else None

    def minimise(self, loss: Tensor) -> None:
        """Takes one step on a loss and that of a memory batch."""
        if self._optimiser is not None:
            self._optimiser.minimise(self.with_replay(loss, self.network))


class SelectiveMethod(AffineMethod):
    """Learns from some images of a batch only; counts them."""

    saved = "_shown _learnt"

    def begin_stage(self) -> None:
        """Creates optimiser and replay; resets the counts."""
        super().begin_stage()
        self._shown = self._learnt = 0

    def count(self, shown: int, learnt: int) -> None:
        """Counts the images of a batch, and those among them that the method learns from."""
        self._shown, self._learnt = self._shown + shown, self._learnt + learnt

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars; records the share of images learned from."""
        return {"learnt_from": self._learnt / max(self._shown, 1)} | super().finish_target(images)


class AnchoredMethod(SelectiveMethod):
    """Keeps the source's values of what it trains, from the first target on."""

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self.anchors: dict[str, Tensor] = {}  # by parameter; empty before the first target

    def begin_stage(self) -> None:
        """Creates optimiser and replay; on the first target, stores the source's values."""
        super().begin_stage()
        self.anchors = self.anchors or {name: p.detach().clone() for name, p in self._trained.items()}

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory and the source's values."""
        return super().state() | pack({"anchors": self.anchors})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        kept = unpack(state).get("anchors", {})
        self.anchors = {name: tensor.to(self.setting.device) for name, tensor in kept.items()}


def lower_affine_parameters(network: Network) -> dict[str, nn.Parameter]:
    """Finds γ and β of normalisation layers, as :func:`affine_parameters`, below the last quarter of the blocks.

    That quarter, at least one block, and all that follows are left out, the bottleneck included.
    """
    blocks = blocks_of(network.backbone)
    first = f"backbone.{blocks[-max(1, len(blocks) // 4)]}." if blocks else "bottleneck."
    found: dict[str, nn.Parameter] = {}
    for name, parameter in affine_parameters(network).items():
        if name.startswith(first):
            break
        found[name] = parameter
    return found


def blocks_of(backbone: nn.Module) -> list[str]:
    """Names the blocks of a feature extractor, in their order; only what has normalisation layers counts.

    They are numbered siblings (layer1 … layer4 of a ResNet) or the members of a list or sequence (a transformer's
    blocks, DTN's layers): of all these groups, the one with most normalisation layers. Without any, they are the
    single layers.
    """
    groups: dict[str, list[str]] = {}
    for name, child in backbone.named_children():
        if (match := re.fullmatch(r"(\D+)\d+", name)) and affine_parameters(child):
            groups.setdefault(match[1], []).append(name)
    for path, module in backbone.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            members = (name for name, child in module.named_children() if affine_parameters(child))
            groups[f"{path}."] = [f"{path}.{name}".lstrip(".") for name in members]
    several = [names for names in groups.values() if len(names) > 1]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in affine_parameters(backbone)))
    return max(
        several, key=lambda names: sum(len(affine_parameters(backbone.get_submodule(n))) for n in names), default=layers
    )
