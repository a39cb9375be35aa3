"""GSFDA — G-SFDA, "Generalized Source-free Domain Adaptation", ICCV 2021.

Every domain uses some channels of the embedding, by a mask of its own (:mod:`ratp.parts.domain_attention`). On a
target, images learn to agree with their neighbours (:mod:`ratp.parts.neighbourhood`).

* Source stage: Σ over all domains' masks of the smoothed cross-entropy of masked embeddings + ρ·(mean of the masks).
  The masks of targets to come are learnt here too, so their number is fixed beforehand (``slots``).
* Target stage: its mask is in force. Loss −Σ log(p·q) over the k nearest images of the target, by a bank that follows
  the batches, − H(p̄). BatchNorm's γ and β of the feature extractor, the bottleneck and the classifier learn; what a
  channel learns is multiplied by 1 − a, a the largest mask any other domain has on it.
* After a stage: exemplars go to the memory, with what the model predicts for them. All domains are predicted with the
  mask of the latest stage; :meth:`GSFDA.predict_as` takes the mask of a known stage instead, and what that would give
  is in the journal and, as a note, in reports.
* ``augment`` adds RandMix: copies of all source images, and of target images the model is confident about. A copy
  learns from the neighbours of its image, or from the label of its exemplar; diversity is that of the images alone.

Departures from the published code:

* The masks' sharpness s goes from 1/s_max to s_max over an epoch; there it is counted in data sets instead of batches,
  and overshoots.
* An image is no neighbour of itself. There the line that should see to it changes a copy, and an image's own last entry
  is mostly its first neighbour.
* The bottleneck has two layers: the mask is on the last one's output, and 1 − a on the last one's rows and the
  classifier's columns. It holds back weight decay as well: a channel used elsewhere stays as it is.
* BatchNorm layers are found by type (by name there, which misses some), and masks do not learn on targets, where
  their gradient is next to nothing.
* Agreement is computed from logarithms, finite for any prediction.
* Epochs, steps and batches are the recipe's. Digits, unknown to the paper, have RaTP's optimiser for all parameters.
* The exemplar memory, which it has not: exemplars have cross-entropy with their stored labels in place of neighbours,
  under the mask in force, and are not in the bank. Domains beyond the last slot share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.copies import CopiesConfig, CopyingMethod
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.inference import run_in_chunks
from ratp.method import Setting
from ratp.network import Output, check_two_layers
from ratp.parts.batch_norm import affine_parameters
from ratp.parts.clip import clip_norm
from ratp.parts.domain_attention import MaskedLinear, annealed_scale, compensation, domain_masks, used_elsewhere
from ratp.parts.information import entropy
from ratp.parts.losses import mean_over
from ratp.parts.neighbourhood import Bank, disagreement
from ratp.parts.scores import scores
from ratp.parts.sgd import Group, SGDConfig, StageSGD
from ratp.phase import Phase
from ratp.source_free import SHOT_LARGE, SHOT_RATE, SourceFreeConfig, extractor_groups
from ratp.training import Batch, Batches, look

LONGEST_GRADIENT = 10_000.0


@dataclass(frozen=True)
class GSFDAConfig(CopiesConfig, SourceFreeConfig):
    """Switches of GSFDA. Defaults: the published ones for several targets, but for the optimiser of small networks."""

    slots: int = switch(5, "domains with a mask of their own, the source among them; more share the last", minimum=1)
    sparsity: float = switch(0.1, "ρ, weight of the masks' mean on the source", minimum=0)
    neighbours: int = switch(3, "k, nearest images to agree with; 0: diversity alone", minimum=0)


class GSFDA(CopyingMethod):
    """Channels of one's own for every domain, and agreement among neighbours.

    Attributes:
        gate: The bottleneck's last layer, with the masks of all domains.
    """

    name = "gsfda"
    title = "GSFDA: domain attention and local structure clustering"
    family = "source-free domain adaptation"
    paper = "Yang et al., Generalized Source-free Domain Adaptation, ICCV 2021"
    config_type = GSFDAConfig
    large = SHOT_LARGE
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        ("demo", "official"): {"slots": 4},
        ("digits", "official"): {"slots": 5},
        ("pacs", "official"): {**SHOT_RATE, "slots": 4, "r_con": 0.5},
        ("domainnet10", "official"): {**SHOT_RATE, "slots": 6},
        ("folders", "official"): {**SHOT_RATE, "r_con": 0.5},
    }
    needs = "memory, many passes over a target, number of domains"
    config: GSFDAConfig

    def __init__(self, setting: Setting, config: GSFDAConfig) -> None:
        check_two_layers(setting.recipe.network, self.name)
        super().__init__(setting, config)
        with setting.randomness.scope("domain attention"):
            self.gate = MaskedLinear(cast(nn.Linear, self.network.bottleneck[3]), config.slots)
        self.network.bottleneck[3] = self.gate

    def slot_of(self, stage: int) -> int:
        """Which mask the domain of a stage has."""
        return min(stage, self.config.slots - 1)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase that learns all masks."""
        return [GSFDASourcePhase(self, domain)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with a bank of all images."""
        return [GSFDAPhase(self, domain.images)]

    def predict_as(self, images: Tensor, stage: int) -> Tensor:
        """Logits of uint8 images known to be of the domain of a stage: by its mask, not the latest."""
        with self.gate.using(self.slot_of(stage)):
            return self.predict(images)


class GSFDASourcePhase(Phase):
    """Smoothed cross-entropy under every mask.

    Args:
        method: Whose network, masks and memory.
        domain: What to learn.
    """

    name = "source"
    captures = True

    def __init__(self, method: GSFDA, domain: LabelledDomain) -> None:
        setting, recipe, config, network = method.setting, method.setting.recipe, method.config, method.network
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._method, self._config, self._network, self._gate = method, config, network, method.gate
        self._batch = recipe.batch
        self._batches = Batches(setting, "source", 0, domain.images, domain.labels)
        self._dropout, self._copies = setting.generator("dropout", 0), method.copies()
        self.generators = *self._batches.generators, self._dropout
        if self._copies is not None:
            self.generators = *self.generators, *self._copies.generators
        groups = [*extractor_groups(network, config.backbone_rate), (network.classifier.parameters(), 1.0)]
        groups = [(list(parameters), factor) for parameters, factor in groups]
        self._parameters = [parameter for parameters, _ in groups for parameter in parameters]
        self._optimiser = StageSGD(groups, recipe.lr, recipe.epochs, config.sgd, recipe.steps)
        self._done = torch.zeros((), device=setting.device)  # steps of this epoch

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; masks are soft again."""
        if epoch == 0:
            self._network.use_generator(self._dropout)
        self._done.zero_()
        return {"lr": self._optimiser.begin_epoch(epoch)}

    def step(self) -> dict[str, Tensor]:
        """One update on a batch, with copies of all its images if copies are made."""
        config, vectors = self._config, self._gate.domains
        batch = self._batches.draw(self._batch)
        learn = self._network.train() if self._copies is None else self._copies.learn_all
        with self._gate.unmasked():
            embedding = learn(batch.images).embedding
        labels = batch.labels.repeat(len(embedding) // self._batch)
        scale = annealed_scale(self._done / max(self.steps - 1, 1))
        masks = domain_masks(vectors, scale)
        logits = scores((masks[:, None] * embedding).flatten(0, 1), self._network.prototypes)
        # Σ_t CE(W(z ⊙ a_t), y) + ρ·mean(a)
        ce = F.cross_entropy(logits, labels.repeat(config.slots), label_smoothing=config.smoothing)
        terms = {"ce": config.slots * ce, "sparsity": config.sparsity * masks.mean()}
        total = torch.stack(list(terms.values())).sum()
        gradients = [
            gradient * compensation(parameter.detach(), scale) if parameter is vectors else gradient
            for parameter, gradient in zip(self._parameters, torch.autograd.grad(total, self._parameters), strict=True)
        ]
        self._optimiser.update(clip_norm(gradients, LONGEST_GRADIENT))
        self._done += 1
        return {"total": total, **terms}

    def finish(self) -> dict[str, float]:
        """Chooses exemplars."""
        return self._method.remember(self._batches.images, self._batches.labels)


class GSFDAPhase(Phase):
    """Agreement with neighbours, in the channels the domain has for itself.

    Args:
        method: Whose network, masks and memory.
        images: All training images of the domain, uint8.
    """

    name = "target"
    captures = True

    def __init__(self, method: GSFDA, images: Tensor) -> None:
        setting, recipe, config, stage = method.setting, method.setting.recipe, method.config, method.stage
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._method, self._config, self._network, self._gate = method, config, method.network, method.gate
        self._slot, self._count = method.slot_of(stage), recipe.batch
        self._memory = method.memory
        self._union = config.replay == "union" and len(self._memory) > 0
        self._beside = config.replay == "separate" and len(self._memory) > 1  # one image has no batch statistics
        unknown = torch.zeros(len(images), dtype=torch.int64)
        self._batches = Batches(setting, "target", stage, images, unknown, self._memory if self._union else None)
        self._dropout, self._copies = setting.generator("dropout", stage), method.copies()
        self.generators = *self._batches.generators, self._dropout
        if self._copies is not None:
            self.generators = *self.generators, *self._copies.generators
        self._make_optimiser(recipe.lr, config.sgd)
        self._bank: Bank | None = None

    def _make_optimiser(self, lr: float, config: SGDConfig) -> None:
        network, gate = self._network, self._gate
        with torch.no_grad():
            free = 1 - used_elsewhere(domain_masks(gate.domains), self._slot)
        shares = {gate.weight: free[:, None], gate.bias: free, network.classifier.weight: free[None, :]}
        slow = list(affine_parameters(network.backbone).values())
        fast = [p for p in network.bottleneck.parameters() if p is not gate.domains]
        fast += network.classifier.parameters()
        self._parameters = [*slow, *fast]
        # How much of what it learns each parameter takes.
        self._shares = [shares.get(parameter, torch.ones_like(free[0])) for parameter in self._parameters]
        self._free = free.mean()
        self._decay = config.weight_decay
        groups: list[Group] = [(slow, self._config.backbone_rate), (fast, 1.0)]
        # Weight decay is added before it is multiplied: by 1 − a, so that a channel of others does not decay.
        plain = SGDConfig(config.momentum, 0.0, config.schedule, config.nesterov)
        self._optimiser = StageSGD(groups, lr, self.epochs, plain, self.steps)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; before the first epoch, the domain's mask and its bank."""
        lr = {"lr": self._optimiser.begin_epoch(epoch)}
        if epoch:
            return lr
        self._network.use_generator(self._dropout)
        self._gate.slot.fill_(self._slot)

        def embed_and_classify(inputs: Tensor) -> tuple[Tensor, ...]:
            output = self._network(inputs)
            return output.embedding, output.logits.log_softmax(dim=1)

        self._bank = Bank(*run_in_chunks(self._network, embed_and_classify, self._batches.images, self._method.scaling))
        return lr | {"free_channels": self._free.item()}

    def make_ready(self, begun: int, finished: bool) -> None:
        """Makes the bank."""
        if begun or finished:
            self._bank = Bank(*torch.zeros(2, 1, 1, device=self._free.device))

    def step(self) -> dict[str, Tensor]:
        """One update on a batch, with copies of its confident images if copies are made."""
        assert self._bank is not None
        batch = self._batches.draw(self._count)
        output, valid = self._learn(batch.images)
        logs = output.logits.log_softmax(dim=1)
        embedding = output.embedding[: self._count].detach()
        near = self._bank.nearest(embedding, batch.places, self._config.neighbours)
        terms = self._losses(batch, logs, self._bank.logs[near], valid)
        if self._beside:
            stored = self._batches.draw_memory(self._memory, self._count)
            terms["replay"] = F.cross_entropy(self._network(stored.images).logits, stored.labels)
        total = torch.stack(list(terms.values())).sum()
        self._update(total)
        self._bank.write(batch.places, embedding, logs[: self._count].detach(), ~batch.replayed)
        return {"total": total, **terms} | ({} if valid is None else {"confident": valid[self._count :].float().mean()})

    def _losses(self, batch: Batch, logs: Tensor, near: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """The terms of a batch: neighbours of target images, labels of exemplars, diversity of all images."""
        copies = 1 if valid is None else 2
        replayed, near = batch.replayed.repeat(copies), near.repeat(copies, 1, 1)
        terms = {"neighbours": mean_over(disagreement(logs, near).masked_fill(replayed, 0), valid)}
        if self._union:
            ce = F.nll_loss(logs, batch.labels.repeat(copies), reduction="none")
            terms["replay"] = mean_over(ce.masked_fill(~replayed, 0), valid)
        # Σ_c p̄_c·log(p̄_c + 10⁻⁵)
        return terms | {"diversity": -entropy(logs[: self._count].exp().mean(dim=0))}

    def _learn(self, images: Tensor) -> tuple[Output, Tensor | None]:
        """What the network makes of images and copies, and which of them count; None: all do."""
        return (self._network.train()(images), None) if self._copies is None else self._copies.learn_confident(images)

    def _update(self, total: Tensor) -> None:
        """One update in which a parameter takes its share."""
        gradients = list(torch.autograd.grad(total, self._parameters))
        with torch.no_grad():
            gradients = clip_norm([g * s for g, s in zip(gradients, self._shares, strict=True)], LONGEST_GRADIENT)
            # (1 − a)·(∇L + λθ)
            for gradient, share, parameter in zip(gradients, self._shares, self._parameters, strict=True):
                gradient.add_(share * parameter, alpha=self._decay)
        self._optimiser.update(gradients)

    def finish(self) -> dict[str, float]:
        """Chooses exemplars, by what the model now predicts."""
        images = self._batches.images
        predicted = look(self._network, self._method.setting, images)[1].argmax(dim=1)
        return self._method.remember(images, predicted)
