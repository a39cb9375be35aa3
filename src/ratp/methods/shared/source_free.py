"""What SHOT and its relatives share: the source stage, and target phases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain
from ratp.functional.losses import cross_entropy, information_maximisation
from ratp.functional.optim import Group, Schedule, SGDConfig
from ratp.methods.shared.pseudo_labels import Finish, PseudoLabelPhase
from ratp.methods.shared.randmix_copies import Copies, CopyingMethod
from ratp.methods.shared.rotation import RotationPhase, RotationTask
from ratp.networks.network import Network, Output
from ratp.training.memory import Batch
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, SupervisedPhase

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

    source_free = True
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


class TargetPhase(PseudoLabelPhase):
    """Trains on a target with a frozen classifier: labels at the start of every epoch, one update per batch.

    ``groups`` are the parameters to train, and the loss draws from ``generators``.
    """

    def __init__(
        self,
        method: NetworkMethod,
        images: Tensor,
        groups: Sequence[Group],
        *,
        generators: Sequence[torch.Generator] = (),
        finish: Finish | None = None,
        network: Network | None = None,
    ) -> None:
        optimiser = method.optimiser(groups)
        super().__init__(method, images, None, optimiser, generators=generators, finish=finish, network=network)
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


class SHOTPhase(TargetPhase):
    """SHOT's target stage: β·cross-entropy with its labels, information maximisation, and the rotation task if any.

    It trains ``network`` (None: the method's) on images and their ``copies`` (None: the method's).
    """

    saved = "_rotation"

    def __init__(
        self,
        method: SourceFreeMethod | CopyingMethod,
        images: Tensor,
        beta: float,
        *,
        rotation: RotationTask | None = None,
        finish: Finish | None = None,
        network: Network | None = None,
        copies: Copies | None = None,
    ) -> None:
        groups = extractor_groups(network or method.network, method.config.backbone_rate)
        if rotation is not None:
            groups.append((rotation.head.parameters(), 1.0))
        drawn = () if rotation is None else (rotation.generator,)
        self._copies = copies or method.copies()
        generators = (*drawn, *self._copies.generators)
        super().__init__(method, images, groups, generators=generators, finish=finish, network=network)
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
