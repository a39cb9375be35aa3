"""Self-training: the network's own confident predictions become labels (Lee, 2013).

An example of a method in one file. Run it with

    ratp run demo --method examples/self_training.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp import LabelledDomain, Method, Phase, Setting, UnlabelledDomain, classify, pack, switch, unpack
from ratp.parts.sgd import SGDConfig, StageSGD


@dataclass(frozen=True)
class SelfTrainingConfig:
    """Switches of self-training."""

    threshold: float = switch(0.9, "confidence from which a prediction counts as a label", minimum=0, below=1)
    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class SelfTraining(Method):
    """Cross-entropy on true labels, then on confident predictions."""

    name = "self-training"
    title = "Self-training on confident predictions"
    family = "example"
    paper = "Lee, Pseudo-Label, ICML 2013 workshop on challenges in representation learning"
    config_type = SelfTrainingConfig

    def __init__(self, setting: Setting, config: SelfTrainingConfig) -> None:
        self.setting, self.config = setting, config
        self.scaling = setting.scaling()
        self.stage = 0
        self.network = setting.network()

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Learns from true labels."""
        return [SelfTrainingPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Learns from its own predictions."""
        return [SelfTrainingPhase(self, domain.images, None)]

    def predict(self, images: Tensor) -> Tensor:
        """Logits of uint8 images."""
        return classify(self.network, images, self.scaling)

    def state(self) -> dict[str, Tensor]:
        """The network and the number of stages behind it."""
        return pack({"network": self.network.state_dict(), "progress": {"stage": torch.tensor(self.stage)}})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what state() gave."""
        parts = unpack(state)
        self.network.load_state_dict(parts["network"])
        self.stage = int(parts["progress"]["stage"])


class SelfTrainingPhase(Phase):
    """One stage: labels before every epoch, a batch of labelled images a step."""

    def __init__(self, method: SelfTraining, images: Tensor, labels: Tensor | None) -> None:
        setting = method.setting
        self.name = "source" if labels is not None else "target"
        self.epochs, self.steps = setting.recipe.epochs, setting.recipe.steps
        self._method = method
        self._images = images.to(setting.device)
        self._true_labels = None if labels is None else labels.to(setting.device)
        self._batches = setting.generator("batches", method.stage)
        method.network.use_generator(setting.generator("dropout", method.stage))
        self._optimiser = StageSGD(method.network.parameters(), setting.recipe.lr, self.epochs, method.config.sgd)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate and, on a target, labels the confident images."""
        record = {"lr": self._optimiser.begin_epoch(epoch)}
        if self._true_labels is not None:
            self._labels, self._usable = self._true_labels, torch.arange(len(self._images), device=self._images.device)
            return record
        confidence, self._labels = self._method.predict(self._images).softmax(dim=1).max(dim=1)
        self._usable = (confidence >= self._method.config.threshold).nonzero().squeeze(1)
        return record | {"labelled": len(self._usable) / len(self._images)}

    def step(self) -> dict[str, Tensor]:
        """One update, or none while nothing is confident."""
        if not len(self._usable):
            return {"total": torch.zeros(())}
        batch = self._method.setting.recipe.batch
        drawn = torch.randint(len(self._usable), (batch,), generator=self._batches, device=self._images.device)
        index = self._usable[drawn]
        logits = self._method.network.train()(self._method.scaling(self._images[index])).logits
        loss = F.cross_entropy(logits, self._labels[index])
        self._optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Counts the stage."""
        self._method.stage += 1
        return {}
