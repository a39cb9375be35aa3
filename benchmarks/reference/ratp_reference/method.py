"""RaTP from one end to the other, stage after stage and step after step.

    method = PlainRaTP(setting, config)
    method.source_stage(images, labels).run()
    method.target_stage(images).run()
    method.accuracy(images, labels)

The numbered rows of ``docs/explanation/paper-and-code.md`` say where paper and published code differ; ``config`` says
which to follow.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ratp.functional.randmix import RandMix
from ratp.functional.transforms import NONE, Transform
from ratp.methods.ratp import RaTPConfig
from ratp.networks.weights import load_backbone
from ratp.training.method import Setting

from .distill import distillation
from .herding import herding, nearest
from .images import Examples, WithReplacement
from .network import PlainNetwork
from .pca import prototype_contrastive
from .randmix import randmix
from .sgd import learning_rate
from .t2pl import Labelling, t2pl
from .transforms import transform

Batch = tuple[Tensor, Tensor, Tensor]


class PlainRaTP:
    """RaTP, written for reading.

    Attributes:
        network: The model that learns.
        old: The model before the stage; None on the source.
        memory: Exemplars by domain and class, the most representative first: a set of images and a place in it.
        randmix: The fast path's, asked for random numbers only.

    Args:
        setting: Recipe, classes, seed and device, as the fast path takes them.
        config: The switches; all values of both presets are there, others are refused.
        workers: Processes that load images beside this one.
    """

    def __init__(self, setting: Setting, config: RaTPConfig, workers: int = 0) -> None:
        _check(config)
        self.setting, self.config, self.recipe, self.workers = setting, config, setting.recipe, workers
        self.classes, self.device = len(setting.classes), setting.device
        self.mean = torch.tensor(self.recipe.mean, device=self.device)
        self.std = torch.tensor(self.recipe.std, device=self.device)
        with setting.randomness.scope("network"):
            self.network = PlainNetwork(self.recipe.network, self.classes, setting.image_size)
        if setting.weights is not None:
            load_backbone(self.network.backbone, setting.weights)
        self.network.to(self.device)
        self.old: PlainNetwork | None = None
        self.memory: list[list[list[tuple[Dataset, int]]]] = []
        self.randmix = RandMix(config.randmix, self.mean, self.std, setting.generator("randmix layers"))

    def source_stage(self, images: Dataset, labels: Tensor) -> Stage:
        """Training on the labelled source."""
        return Stage(self, images, labels.tolist())

    def target_stage(self, images: Dataset) -> Stage:
        """Training on one more domain without labels."""
        return Stage(self, images, None)

    def accuracy(self, images: Dataset, labels: Tensor) -> float:
        """Accuracy in percent."""
        self.network.eval()
        right, at = 0, 0
        with torch.no_grad():
            for batch in self.in_order(images):
                predicted = self.network(batch)[1].argmax(dim=1).cpu()
                right += int((predicted == labels[at : at + len(batch)].cpu()).sum())
                at += len(batch)
        return 100 * right / at

    def in_order(self, images: Dataset) -> Iterator[Tensor]:
        """All images, normalised, batch after batch, without any random change."""
        loader = DataLoader(
            images, self.recipe.batch, num_workers=self.workers, generator=torch.Generator().manual_seed(0)
        )
        for batch in loader:
            yield self.normalise(batch.to(self.device).to(torch.get_default_dtype()) / 255)

    def normalise(self, images: Tensor) -> Tensor:
        """From values in [0, 1] to what the network sees."""
        return (images - self.mean[:, None, None]) / self.std[:, None, None]


class Stage:
    """The training on one domain.

    Attributes:
        labels: True labels on the source; on a target those T2PL gave last.
        labelling: All that T2PL found then; None on the source.
    """

    def __init__(self, method: PlainRaTP, images: Dataset, labels: list[int] | None) -> None:
        self.method, self.config, self.recipe, self.network = method, method.config, method.recipe, method.network
        self.images, self.is_target = images, labels is None
        self.labels = [0] * len(images) if labels is None else labels
        self.labelling: Labelling | None = None
        stage, setting = len(method.memory), method.setting
        self.batch_numbers = setting.generator("batches", stage)
        self.randmix_numbers = setting.generator("randmix", stage)
        self.transform_numbers = setting.generator("transforms", stage)
        self.network.draw_dropout_from(setting.generator("dropout", stage))
        changes = self.recipe.target_transform if self.is_target else self.recipe.source_transform
        self.transform = None if changes == NONE else Transform(changes, self.recipe.size)
        sgd = self.config.sgd
        self.optimiser = torch.optim.SGD(
            self.network.parameters(), lr=self.recipe.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay
        )

    def run(self) -> None:
        """All epochs, then the memory."""
        for epoch in range(self.recipe.epochs):
            self.begin_epoch(epoch)
            for batch in self.batches(self.recipe.steps):
                self.step(batch)
        self.finish()

    def begin_epoch(self, epoch: int) -> None:
        """Sets the learning rate; on a target, relabels all images when due."""
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.recipe.lr, self.config.sgd.schedule, epoch, self.recipe.epochs)
        due = epoch % self.config.refresh == 0 if self.config.refresh else epoch == 0
        if self.is_target and due:
            self.label()

    def label(self) -> None:
        """T2PL on all images of the target, as the network sees them without any random change."""
        features, probabilities = [], []
        self.network.eval()
        with torch.no_grad():
            for images in self.method.in_order(self.images):
                embedding, logits = self.network(images)
                features.append(embedding.cpu())
                probabilities.append(logits.softmax(dim=1).cpu())
        config = self.config.t2pl
        names = ("r_top", "r_knn", "normalise", "rounds", "top_set", "classes")  # the paper's: no class mix
        switches = {name: getattr(config, name) for name in names}
        self.labelling = t2pl(torch.cat(features), torch.cat(probabilities), **switches)
        self.labels = self.labelling.labels.tolist()

    def batches(self, count: int) -> Iterator[Batch]:
        """Stored images, labels, and which come from the memory: drawn with replacement from domain and memory."""
        examples = [(self.images, place, label, False) for place, label in enumerate(self.labels)]
        if self.is_target:
            for domain in self.method.memory:
                for label, exemplars in enumerate(domain):
                    examples += [(images, place, label, True) for images, place in exemplars]
        sampler = WithReplacement(len(examples), self.recipe.batch, count, self.batch_numbers)
        loader = DataLoader(
            Examples(examples),
            batch_sampler=sampler,
            num_workers=self.method.workers,
            generator=torch.Generator().manual_seed(0),
        )
        yield from loader

    def step(self, batch: Batch) -> dict[str, float]:
        """One update; returns the losses and the share of images that got a copy."""
        images, labels, replayed = self.prepare(batch)
        confident = self.confident(images, replayed)
        copies = self.augment(images, confident)
        images, labels = torch.cat([images, copies]), torch.cat([labels, labels[confident]])
        losses = self.losses(images, labels, replayed)
        total = sum(losses.values())
        self.update(total)
        report = {"total": total.item()} | {name: loss.item() for name, loss in losses.items()}
        return report | ({"confident": confident.float().mean().item()} if self.is_target else {})

    def prepare(self, batch: Batch) -> Batch:
        """The batch on the device: its images changed at random, one after another, and normalised."""
        stored, labels, replayed = (tensor.to(self.method.device) for tensor in batch)
        images = [image.to(torch.get_default_dtype()) / 255 for image in stored]
        if self.transform is not None:
            draw = self.transform.draw(len(images), *stored.shape[2:], self.transform_numbers)
            images = transform(images, draw, self.transform.operations, self.recipe.size)
        return torch.stack([self.method.normalise(image) for image in images]), labels, replayed

    def confident(self, images: Tensor, replayed: Tensor) -> Tensor:
        """Which images get a RandMix copy: all on the source, those the model is sure of on a target."""
        if not self.is_target:
            return torch.ones_like(replayed)
        self.network.eval()
        with torch.no_grad():
            confidence = self.network(images)[1].softmax(dim=1).max(dim=1).values
        chosen = confidence > self.config.r_con if self.config.strict else confidence >= self.config.r_con
        return chosen if self.config.augment_replay else chosen & ~replayed

    def augment(self, images: Tensor, chosen: Tensor) -> Tensor:
        """RandMix copies of the chosen images; random numbers are drawn for the others too, and not used."""
        method = self.method
        draw = method.randmix.draw(images.shape, self.randmix_numbers)
        if not chosen.any():
            return images[chosen]
        with torch.no_grad():
            return randmix(images[chosen], draw[chosen], self.config.randmix, method.mean, method.std)

    def losses(self, images: Tensor, labels: Tensor, replayed: Tensor) -> dict[str, Tensor]:
        """Cross-entropy, alignment and distillation of clean images and copies, which pass in one batch."""
        config, old = self.config, self.method.old
        self.network.train()
        embedding, logits = self.network(images)
        losses = {"ce": F.cross_entropy(logits, labels)}
        if config.pca.weight:
            switches = {name: getattr(config.pca, name) for name in ("similarity", "scale", "negatives", "old_weight")}
            old_prototypes = None if old is None else old.classifier.weight
            alignment = prototype_contrastive(
                embedding, labels, self.network.classifier.weight, old_prototypes, **switches
            )
            losses["pca"] = config.pca.weight * alignment.mean()
        if old is not None and config.distill.weight:
            if config.distill.data == "target":
                clean = len(replayed)
                images, logits = images[:clean][~replayed], logits[:clean][~replayed]
            with torch.no_grad():
                teacher = old(images)[1]
            losses["distill"] = config.distill.weight * distillation(logits, teacher)
        return losses

    def update(self, loss: Tensor) -> None:
        """One step of SGD."""
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()

    def finish(self) -> None:
        """Exemplars of this domain go to the memory, earlier ones make room; the model becomes the old model."""
        method = self.method
        self.network.eval()
        with torch.no_grad():
            parts = [self.network.backbone(images).cpu() for images in method.in_order(self.images)]
        features = F.normalize(torch.cat(parts), dim=1).numpy()
        labels = torch.tensor(self.labels).numpy()
        choose = herding if self.config.memory.selection == "herding" else nearest

        quota = self.recipe.memory // (method.classes * (len(method.memory) + 1))
        method.memory = [[exemplars[:quota] for exemplars in domain] for domain in method.memory]
        new = []
        for k in range(method.classes):
            (members,) = (labels == k).nonzero()
            picks = members[choose(features[members], quota)] if len(members) else []
            new.append([(self.images, int(pick)) for pick in picks])
        method.memory.append(new)
        method.old = self.network.frozen_copy()


def _check(config: RaTPConfig) -> None:
    """Refuses what is not here: switches that neither preset turns."""
    here, there = RaTPConfig(), config
    fixed = {
        "joint_batch": (there.joint_batch, here.joint_batch),
        "distill.on": (there.distill.on, here.distill.on),
        "distill.student": (there.distill.student, here.distill.student),
        "memory.features": (there.memory.features, here.memory.features),
        "memory.labels": (there.memory.labels, here.memory.labels),
        "memory.replay": (there.memory.replay, here.memory.replay),
    }
    other = [f"{name}={asked}" for name, (asked, has) in fixed.items() if asked != has]
    if other:
        raise ValueError(f"the reference does not have {', '.join(other)}.")
