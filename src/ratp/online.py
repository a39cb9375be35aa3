"""What methods share that adapt while they predict: one pass over a target, batch statistics, replay beside it.

* :class:`OnlineNetwork` learns the source by cross-entropy and shows every target to ``observe`` once.
* :class:`BatchStatistics` is one whose BatchNorm, once it has adapted, uses the statistics of the batch at hand.
* :class:`AffineMethod` is one that trains BatchNorm's γ and β alone, with a memory batch beside each batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain, check_images
from ratp.inference import classify
from ratp.method import OnlineMethod, Setting, Statistics, pack, unpack
from ratp.network import Network
from ratp.parts.adam import Adam
from ratp.parts.batch_norm import affine_parameters, by_batch
from ratp.parts.sgd import SGDConfig, StageSGD
from ratp.phase import Phase
from ratp.recipe import Scaling
from ratp.replay import Exemplars
from ratp.training import NetworkMethod, SinglePass, SupervisedPhase

# Fewest images whose statistics stand for a domain.
SMALLEST_BATCH = 64


@dataclass(frozen=True)
class StepConfig:
    """Switches of the steps on targets; defaults are for DTN."""

    optimiser: Literal["adam", "sgd"] = switch("adam", "what makes the steps, without weight decay")
    rate: float = switch(1e-3, "learning rate on targets, constant", minimum=0, below=3.4e38)
    momentum: float = switch(0.9, "momentum of sgd", minimum=0, below=1)

    def steps_on(self, parameters: Iterable[nn.Parameter], *, nesterov: bool = False) -> Adam | StageSGD:
        """What makes them on some parameters."""
        if self.optimiser == "adam":
            return Adam(parameters, self.rate)
        sgd = SGDConfig(self.momentum, weight_decay=0.0, schedule="constant", nesterov=nesterov)
        return StageSGD(parameters, self.rate, 1, sgd)


# The same for ResNet-50, by the names they have in a method's switches.
LARGE_STEPS: Mapping[str, Any] = {"step.optimiser": "sgd", "step.rate": 2.5e-4}


def in_batches(order: Tensor, size: int) -> list[Tensor]:
    """An order cut into batches of ``size``; a shorter last one is added to the one before."""
    parts = list(torch.split(order, size))
    if len(parts) > 1 and len(parts[-1]) < size:
        last = parts.pop()
        parts[-1] = torch.cat([parts[-1], last])
    return parts


@torch.no_grad()
def classify_by_batch(
    network: Network, images: Tensor, scaling: Scaling, size: int, generator: torch.Generator
) -> Tensor:
    """Logits of uint8 images, with BatchNorm using the statistics of the images it sees together.

    Batches are drawn at random: images often come class by class, and a batch of one class has statistics of its own.
    A single image has none; it is classified by the running statistics.

    Args:
        network: Left as it was.
        images: uint8, in any order.
        scaling: From stored images to what the network sees.
        size: Images in a batch, at least.
        generator: On the CPU; decides who is seen together.

    Raises:
        RatpError: If they are no uint8 images of the network's size.
    """
    check_images(images, network.image_size)
    if len(images) < 2:
        return classify(network, images, scaling)
    order = torch.randperm(len(images), generator=generator)
    was_training = network.training
    network.eval()
    try:
        with by_batch(network):
            parts = [network(scaling(images[part.to(images.device)])).logits for part in in_batches(order, size)]
    finally:
        network.train(was_training)
    logits = torch.cat(parts)
    return torch.empty_like(logits).index_copy_(0, order.to(logits.device), logits)


class OnlineNetwork(OnlineMethod, NetworkMethod):
    """Cross-entropy on the source, then one pass over each target; nothing is ever reset.

    ``observe`` may be called by hand, for images that belong to no domain: a stage then begins with the first call.

    Attributes:
        smallest: Images it takes to learn from a batch; fewer are predicted only.
        observed: Batches learnt from so far, over all targets.
    """

    smallest: ClassVar[int] = 1

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self.observed = 0
        self._begun = False

    @property
    def keeps_exemplars(self) -> bool:
        """Whether the memory is of use to it: whether it replays."""
        return getattr(self.config, "replay", "none") == "separate"

    @abstractmethod
    def begin_stage(self) -> None:
        """What is made anew for every target."""

    @abstractmethod
    def learn(self, inputs: Tensor) -> Tensor:
        """Logits of a batch of normalised images; adapts to it."""

    @final
    def observe(self, images: Tensor) -> Tensor:
        """Logits of a batch of uint8 images; the method adapts to it."""
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
        """One phase of cross-entropy."""
        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd, finish=self.finish_source)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One pass in random order."""
        self._begin()
        return [SinglePass(self, self.setting, domain, self.stage, self.finish_target)]

    def finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        """Takes exemplars with their true labels."""
        return self.keep(domain.images, domain.labels)

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars with the labels the adapted network gives them."""
        return self.keep(images, self.predict(images).argmax(dim=1) if self.keeps_exemplars else None)

    def keep(self, images: Tensor, labels: Tensor | None) -> dict[str, float]:
        """Ends a stage: puts exemplars into the memory if it is of use, and counts the domain.

        Images shown by hand from now on begin a stage of their own.
        """
        self._begun = False
        if self.keeps_exemplars and labels is not None:
            return self.remember(images, labels)
        self.memory.seen += 1
        return {}

    def state(self) -> dict[str, Tensor]:
        """Network, memory and how much was observed."""
        return super().state() | pack({"online": {"observed": torch.tensor(self.observed)}})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        self._begun = False
        self.observed = int(unpack(state)["online"]["observed"])


class BatchStatistics(OnlineNetwork):
    """An online method that normalises by the batch at hand; its switches have ``eval_bn``.

    Before its first target it is measured with running statistics, as any source model is; from then on as
    ``eval_bn`` says. A batch of one image has no statistics: it is predicted by the running ones.
    """

    smallest = 2

    @classmethod
    def evaluation_statistics(cls, config: Any) -> Statistics:
        """What ``eval_bn`` says."""
        return cast(Statistics, config.eval_bn)

    def predict(self, images: Tensor) -> Tensor:
        """Logits of uint8 images; with batch statistics they depend on which images are asked about together."""
        if not self.observed or self.config.eval_bn == "running":
            return super().predict(images)
        size = max(SMALLEST_BATCH, self.setting.recipe.batch)
        return classify_by_batch(
            self.network, images, self.scaling, size, self.setting.randomness.generator("evaluation")
        )


class AffineMethod(BatchStatistics):
    """Trains BatchNorm's γ and β on targets; its switches have ``step``, ``replay`` and ``eval_bn``.

    The network is in evaluation mode, for dropout would make a prediction a matter of chance, but normalises by the
    batch. Optimiser and replay are made anew for every target.
    """

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self._optimiser: Adam | StageSGD | None = None
        self._exemplars = Exemplars(setting, 0, None)

    def begin_stage(self) -> None:
        """A new optimiser; the memory as it is now."""
        parameters = list(affine_parameters(self.network).values())
        self._optimiser = self.config.step.steps_on(parameters) if parameters else None
        self._exemplars = Exemplars(self.setting, self.stage, self.memory if self.keeps_exemplars else None)

    def by_batch(self, inputs: Tensor) -> Tensor:
        """Logits of normalised images, by their own statistics."""
        with by_batch(self.network):
            return self.network(inputs).logits

    def minimise(self, loss: Tensor) -> None:
        """One step; the memory's cross-entropy is added, from a forward pass of its own."""
        if self._optimiser is None:
            return
        exemplars = self._exemplars.draw()
        if exemplars is not None:
            loss = loss + F.cross_entropy(self.by_batch(exemplars.images), exemplars.labels)
        self._optimiser.minimise(loss)
