"""Self-training: the network's own confident predictions become labels (Lee, 2013); see docs/how-to/add-a-method.md."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from ratp import LabelledDomain, NetworkMethod, NetworkPhase, Phase, SGDConfig, UnlabelledDomain, switch


@dataclass(frozen=True)
class SelfTrainingConfig:
    """Switches of self-training."""

    threshold: float = switch(0.9, "confidence from which a prediction counts as a label", minimum=0, below=1)
    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class SelfTraining(NetworkMethod):
    """Trains on true labels, then on confident predictions and exemplars."""

    name = "self-training"
    title = "Self-training on confident predictions"
    family = "example"
    paper = "Lee, Pseudo-Label, ICML 2013 workshop on challenges in representation learning"
    config_type = SelfTrainingConfig

    def source_phases(self, domain: LabelledDomain) -> list[Phase]:
        """Returns one phase with true labels."""
        return [SelfTrainingPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> list[Phase]:
        """Returns one phase with predicted labels."""
        return [SelfTrainingPhase(self, domain.images, None)]


class SelfTrainingPhase(NetworkPhase):
    """Trains on one domain; on a target, labels are predicted before every epoch."""

    saved = "confidence"
    confidence: torch.Tensor | None = None

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate and, on a target, labels all images."""
        record = super().begin_epoch(epoch)
        if self.is_target:
            self.confidence, labels = self.method.predict(self.batches.images).softmax(dim=1).max(dim=1)
            self.batches.labels.copy_(labels)
        return record

    def step(self) -> dict[str, torch.Tensor]:
        """Updates the network once, by the confident images and the exemplars of a batch."""
        batch = self.batches.draw(self.batch)
        losses = F.cross_entropy(self.network.train()(batch.images).logits, batch.labels, reduction="none")
        if self.confidence is not None:
            confident = self.confidence[batch.places] >= self.method.config.threshold
            losses = losses * (confident | batch.replayed)
        return self.minimise({"cross-entropy": losses.mean()})
