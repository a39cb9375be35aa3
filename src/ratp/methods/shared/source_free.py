"""What SHOT and its relatives share: the source stage, a target phase, and the rotation task that SHOT+ adds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp._core.state import Stateful
from ratp.config import switch
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError
from ratp.functional.losses import cross_entropy, information_maximisation
from ratp.functional.numerics import in_chunks
from ratp.functional.optim import Group, Schedule, SGDConfig
from ratp.methods.shared.pseudo_labels import Finish, PseudoLabelPhase
from ratp.methods.shared.randmix_copies import Copies
from ratp.networks.network import Network, Output
from ratp.training.finite import log_draw
from ratp.training.memory import Batch
from ratp.training.method import Setting
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, SupervisedPhase, embed_all

TURNS = 4


def rotate(images: Tensor, turns: Tensor) -> Tensor:
    """Rotates each image (n, c, s, s) by its number of quarter turns, from 0 to 3."""
    turns = turns[:, None, None, None]
    turned = images
    for number in range(1, TURNS):
        turned = torch.where(turns == number, torch.rot90(images, number, (2, 3)), turned)
    return turned


def draw_turns(count: int, generator: torch.Generator) -> Tensor:
    """Draws numbers of quarter turns, shape (count,)."""
    return torch.randint(TURNS, (count,), generator=generator, device=generator.device)


def rotation_input(upright: Tensor, turned: Tensor) -> Tensor:
    """Returns the rotation head's input [sg(z(x)); z(rot x)]; no gradient reaches the upright half."""
    return torch.cat([upright.detach(), turned], dim=1)


# Number of images to rotate at once: rotating a whole domain would need several copies of it.
ROTATED = 1024

# SHOT's published optimiser for large networks, and its rate, meant for a bottleneck that ends in BatchNorm. Methods
# that freeze convolutions on targets use it here; methods that train them degrade the network with it.
SHOT_LARGE: Mapping[str, Any] = {
    "backbone_rate": 0.1,
    "sgd.momentum": 0.9,
    "sgd.weight_decay": 1e-3,
    "sgd.schedule": "per-step",
    "sgd.nesterov": True,
}
SHOT_RATE: Mapping[str, Any] = {"lr": 0.01}
# The head and the optimiser SHOT was published with, on digits and, with ``large``, on objects.
OWN_HEAD: Mapping[str, Any] = {
    "network.bottleneck": "one",
    "network.dim": 256,
    "network.bias": True,
    "network.weight_norm": True,
    **SHOT_RATE,
    **{name: value for name, value in SHOT_LARGE.items() if name.startswith("sgd.")},
}
SHOT_RATES = {(stream, "official"): SHOT_RATE for stream in ("pacs", "domainnet10", "folders")}


@dataclass(frozen=True)
class SourceSGDConfig:
    """Switches of the optimiser that differ on the source; none: as on targets."""

    momentum: float | None = switch(
        None, "momentum on the source; none: sgd.momentum", minimum=0, below=1, hash_default=False
    )
    weight_decay: float | None = switch(
        None, "weight decay on the source; none: sgd.weight_decay", minimum=0, hash_default=False
    )
    schedule: Schedule | None = switch(None, "rate over the source stage; none: as sgd.schedule", hash_default=False)
    nesterov: bool | None = switch(None, "Nesterov's momentum on the source; none: sgd.nesterov", hash_default=False)


@dataclass(frozen=True)
class SourceFreeConfig:
    """Switches that these methods share. Defaults: SHOT's for digits, with RaTP's optimiser."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    source_sgd: SourceSGDConfig = switch(SourceSGDConfig(), "optimiser on the source, where it differs")
    backbone_rate: float = switch(1.0, "factor on the rate of the feature extractor", minimum=0)
    smoothing: float = switch(0.1, "ε of label smoothing on the source", minimum=0, below=1)
    replay: Literal["union", "separate", "none"] = switch(
        "union", "batches from target and memory together, a memory batch with each, or no replay"
    )

    @property
    def sgd_on_source(self) -> SGDConfig:
        """The optimiser of the source stage."""
        given = {name: value for name, value in asdict(self.source_sgd).items() if value is not None}
        return replace(self.sgd, **given)


class SourceFreeMethod(NetworkMethod):
    """Learns the source by smoothed cross-entropy and keeps the classifier frozen on targets."""

    config: SourceFreeConfig

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy with smoothed labels; the feature extractor has its own rate."""
        config, copies = self.config, self.copies()
        phase = SupervisedPhase(
            self.setting,
            self.network,
            domain,
            config.sgd_on_source,
            smoothing=config.smoothing,
            groups=all_groups(self.network, config.backbone_rate),
            forward=copies.learn_all if copies.generators else None,
            generators=copies.generators,
            finish=lambda learned: self.remember(learned.images, learned.labels),
        )
        return [phase]

    def copies(self) -> Copies:
        """Returns the RandMix copies of the stage's images: none."""
        return Copies(self)


def extractor_groups(network: Network, backbone_rate: float) -> list[Group]:
    """Returns all parameters but the classifier's, each group with the factor on its rate."""
    return [(network.backbone.parameters(), backbone_rate), (network.bottleneck.parameters(), 1.0)]


def all_groups(network: Network, backbone_rate: float) -> list[Group]:
    """Returns all parameters, each group with the factor on its rate."""
    return [*extractor_groups(network, backbone_rate), (network.classifier.parameters(), 1.0)]


class Views:
    """Draws images with replacement and transforms them, with generators named after the phase."""

    def __init__(self, setting: Setting, name: str, stage: int) -> None:
        self._inputs = setting.training_inputs("target")
        self._places = setting.generator(f"{name} batches", stage)
        self._changes = setting.generator(f"{name} transforms", stage)
        self.generators = self._places, self._changes

    def places(self, population: int, count: int) -> Tensor:
        """Draws ``count`` indices into a population."""
        return torch.randint(population, (count,), generator=self._places, device=self._places.device)

    def change(self, images: Tensor) -> Tensor:
        """Returns uint8 images transformed and normalised as for training on a target."""
        return self._inputs(images, self._changes)


class TargetPhase(PseudoLabelPhase):
    """Trains on a target with a frozen classifier: labels at the start of every epoch, one update per batch.

    ``groups`` are the parameters to train, and the loss draws from ``generators``.
    """

    def __init__(
        self,
        method: SourceFreeMethod,
        images: Tensor,
        groups: Sequence[Group],
        *,
        generators: Sequence[torch.Generator] = (),
        finish: Finish | None = None,
    ) -> None:
        super().__init__(method, images, None, method.optimiser(groups), generators=generators, finish=finish)
        self._replays = method.config.replay == "separate"

    @abstractmethod
    def losses(self, batch: Batch, output: Output) -> dict[str, Tensor]:
        """Returns the weighted loss terms of a batch."""

    def forward(self, images: Tensor) -> Output:
        """Passes a batch through the network in training mode."""
        return self.network.train()(images)

    def after_update(self, batch: Batch, output: Output) -> None:
        """Runs at the end of a step."""

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch drawn with replacement."""
        batch = self.batches.draw(self.batch)
        output = self.forward(batch.images)
        terms = self.losses(batch, output)
        if self._replays and len(self.memory):
            stored = self.batches.draw_memory(self.memory, self.batch)
            if len(stored.images) > 1:  # one image has no batch statistics
                terms["replay"] = F.cross_entropy(self.network(stored.images).logits, stored.labels)
        result = self.minimise(terms)
        self.after_update(batch, output)
        return result


class RotationTask(Stateful):
    """Predicts by how many quarter turns an image was rotated, from its embedding and that of the rotated image."""

    saved = "head generator"

    def __init__(self, setting: Setting, stage: int, weight: float) -> None:
        """Creates a new head; refuses images that are not square."""
        height, width = setting.image_size
        if height != width:
            raise ConfigError(f"images of {height}×{width} cannot be rotated by quarter turns: make them square.")
        with setting.randomness.scope("rotation head", stage):
            head = nn.Linear(2 * setting.recipe.network.dim, TURNS)  # R, from both embeddings to the four turns
        self.head = head.to(setting.device)
        self.generator = setting.generator("rotation", stage)  # the generator of the turns
        self.weight = weight  # γ, the weight of the loss

    def loss(self, network: Network, images: Tensor, upright: Tensor) -> Tensor:
        """Computes γ·cross-entropy of the turns; the gradient flows through the rotated images only."""
        turns = draw_turns(len(images), self.generator)
        turned = network(rotate(images, turns)).embedding
        return self.weight * F.cross_entropy(self.head(rotation_input(upright, turned)), turns)


class RotationPhase(Phase):
    """Trains a rotation head with the network frozen, and keeps the head of the best epoch (the last if several)."""

    name = "rotation"
    captures = True
    saved = "_optimiser _head _measuring _pairs _best _kept"

    def __init__(self, method: SourceFreeMethod, images: Tensor, task: RotationTask) -> None:
        setting, recipe, stage = method.setting, method.setting.recipe, method.stage
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._setting, self._network, self._images, self._head = setting, method.network, images, task.head
        self._views = Views(setting, "rotation", stage)
        self._turns, self._measuring = (setting.generator(f"rotation {use}", stage) for use in ("turns", "measuring"))
        self.generators = *self._views.generators, self._turns
        self._optimiser = method.optimiser(task.head.parameters())
        self._pairs: tuple[Tensor, Tensor] | None = None
        self._best = -1.0
        self._kept: dict[str, Tensor] = {}

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; measures the head after the previous epoch."""
        lr = self._optimiser.begin_epoch(epoch)
        return {"lr": lr} | ({"rotation_accuracy": self._measure()} if epoch else {})

    def step(self) -> dict[str, Tensor]:
        """Updates the head on randomly rotated images."""
        network = self._network.eval()
        place = self._views.places(len(self._images), self._setting.recipe.batch)
        log_draw(place)
        images = self._views.change(self._images[place])
        turns = draw_turns(len(images), self._turns)
        with torch.no_grad():
            pairs = rotation_input(network(images).embedding, network(rotate(images, turns)).embedding)
        loss = F.cross_entropy(self._head(pairs), turns)
        self._optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Restores the best head."""
        self._measure()
        self._pairs = None
        self._head.load_state_dict(self._kept)
        return {"rotation_accuracy": self._best}

    @torch.no_grad()
    def _measure(self) -> float:
        """Measures the head's accuracy on every image, each rotated once for the whole phase; keeps the best."""
        if self._pairs is None:
            turns = draw_turns(len(self._images), self._measuring)
            upright = embed_all(self._network, self._setting, self._images)[0]
            rotated = in_chunks(lambda rows: (rotate(self._images[rows], turns[rows]),), len(turns), ROTATED)[0]
            turned = embed_all(self._network, self._setting, rotated)[0]
            self._pairs = rotation_input(upright, turned), turns
        pairs, turns = self._pairs
        accuracy = float((self._head(pairs).argmax(dim=1) == turns).float().mean())
        if accuracy >= self._best:
            self._best = accuracy
            self._kept = {name: tensor.clone() for name, tensor in self._head.state_dict().items()}
        return accuracy


class SHOTPhase(TargetPhase):
    """SHOT's target stage: β·cross-entropy with its labels, information maximisation, and the rotation task if any."""

    saved = "_rotation"

    def __init__(
        self,
        method: SourceFreeMethod,
        images: Tensor,
        beta: float,
        *,
        rotation: RotationTask | None = None,
        finish: Finish | None = None,
    ) -> None:
        groups = extractor_groups(method.network, method.config.backbone_rate)
        if rotation is not None:
            groups.append((rotation.head.parameters(), 1.0))
        drawn = () if rotation is None else (rotation.generator,)
        self._copies = method.copies()
        super().__init__(method, images, groups, generators=(*drawn, *self._copies.generators), finish=finish)
        self._beta, self._rotation = beta, rotation
        self._counts: Tensor | None = None

    def forward(self, images: Tensor) -> Output:
        """Passes images, then copies of the confident ones if ``augment`` is on, through the network."""
        output, self._counts = self._copies.learn_confident(images)
        return output

    def losses(self, batch: Batch, output: Output) -> dict[str, Tensor]:
        """Computes β·CE + H̄ − H(p̄) + the rotation loss; copies count for the cross-entropy alone."""
        count = len(batch.labels)
        labels = batch.labels.repeat(len(output.logits) // count)
        terms = {
            "ce": self._beta * cross_entropy(output.logits, labels, self._counts),
            "im": information_maximisation(output.logits[:count]),
        }
        if self._rotation is not None:
            terms["rotation"] = self._rotation.loss(self.network, batch.images, output.embedding[:count])
        return terms


@dataclass(frozen=True)
class RotationConfig(SourceFreeConfig):
    """Switches of SHOT with a rotation task. Defaults: the published ones for digits, except for the optimiser."""

    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo-labels", minimum=0)
    gamma: float = switch(0.2, "γ, weight of the rotation task; 0: none", minimum=0)


def rotation_phases(
    method: SourceFreeMethod, images: Tensor, config: RotationConfig, finish: Finish | None = None
) -> list[Phase]:
    """Returns the training of the rotation head, then SHOT's phase with its task; without γ, SHOT's phase alone."""
    if not config.gamma:
        return [SHOTPhase(method, images, config.beta, finish=finish)]
    task = RotationTask(method.setting, method.stage, config.gamma)
    return [RotationPhase(method, images, task), SHOTPhase(method, images, config.beta, rotation=task, finish=finish)]
