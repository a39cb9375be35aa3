"""Self-training: the network's own confident predictions become labels (Lee, 2013); see docs/add-a-method.md."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from ratp import LabelledDomain, NetworkMethod, Phase, SGDConfig, StageSGD, UnlabelledDomain, switch


@dataclass(frozen=True)
class SelfTrainingConfig:
    """Switches of self-training."""

    threshold: float = switch(0.9, "confidence from which a prediction counts as a label", minimum=0, below=1)
    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class SelfTraining(NetworkMethod):
    """Trains on true labels, then on confident predictions."""

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


class SelfTrainingPhase(Phase):
    """Trains on one domain; on a target, labels are predicted before every epoch."""

    saved = "optimiser labels usable"

    def __init__(self, method: SelfTraining, images: torch.Tensor, labels: torch.Tensor | None) -> None:
        setting, recipe = method.setting, method.setting.recipe
        self.name, self.epochs, self.steps = "target" if labels is None else "source", recipe.epochs, recipe.steps
        self.method, self.batch, self.images = method, recipe.batch, images.to(setting.device)
        self.labels = torch.zeros(0) if labels is None else labels.to(setting.device)
        self.usable = torch.arange(len(images), device=setting.device)
        self.generators = [setting.generator(name, method.stage) for name in ("batches", "dropout")]
        method.network.use_generator(self.generators[1])  # for dropout
        self.optimiser = StageSGD(method.network.parameters(), recipe.lr, recipe.epochs, method.config.sgd)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate and, on a target, labels the confident images."""
        record = {"lr": self.optimiser.begin_epoch(epoch)}
        if self.name == "target":
            confidence, self.labels = self.method.predict(self.images).softmax(dim=1).max(dim=1)
            self.usable = (confidence >= self.method.config.threshold).nonzero().squeeze(1)
            record["labelled"] = len(self.usable) / len(self.images)
        return record

    def step(self) -> dict[str, torch.Tensor]:
        """Updates the network once, or not at all while no image is labelled."""
        if not len(self.usable):
            return {"total": torch.zeros(())}
        drawn = torch.randint(len(self.usable), (self.batch,), generator=self.generators[0], device=self.usable.device)
        index = self.usable[drawn]
        logits = self.method.network.train()(self.method.scaling(self.images[index])).logits
        loss = F.cross_entropy(logits, self.labels[index])
        self.optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Ends the stage, keeping no exemplars."""
        self.method.memory.seen += 1
        return {}
