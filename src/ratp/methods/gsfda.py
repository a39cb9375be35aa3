"""GSFDA — G-SFDA, "Generalized Source-free Domain Adaptation", ICCV 2021.

Every domain uses some channels of the embedding, selected by its own mask. On a target, images learn to agree with
their neighbours.

A domain t has a vector e_t; its mask a_t = σ(s·e_t) is nearly binary for a large s (HAT, ICML 2018). While masks are
learned, s grows from 1/s_max to s_max; :func:`compensation` makes up for the gradient of e, too small at both ends. A
bank holds the last embedding and prediction of every image; a prediction p should agree with those q of its nearest
images by cosine (section 3.2):

    −Σ_{j ∈ kNN(i)} log(p_i · q_j)

* Source stage: Σ over the masks of all domains of the smoothed cross-entropy of masked embeddings + ρ·(mean of the
  masks). Masks of future targets are learned here too, so their number is fixed beforehand (``slots``).
* Target stage, under its mask: agreement with the k nearest images − H(p̄). γ and β of the feature extractor's
  normalisation layers, the bottleneck and the classifier learn; updates of a channel are multiplied by 1 − a, with a
  the largest mask any other domain has on it.
* After a stage: exemplars enter the memory with the model's predictions. All domains are predicted under the mask of
  the latest stage; :meth:`GSFDA.predict_for_domain` uses the mask of a known stage instead, and the journal and reports
  show what that would give.
* ``augment`` adds RandMix: copies of all source images, and of target images that the model is confident about. A copy
  learns from the neighbours of its image, or from the label of its exemplar; diversity is that of the images alone.

Deviations from the published code:

* The sharpness s goes from 1/s_max to s_max over an epoch; the original counts data sets, not batches, and overshoots.
  Its code for several targets computes source masks with s_max at once, and only the compensation follows s
  (``source_masks=sharp``).
* An image is not its own neighbour. In the original, the line that should ensure this changes a copy, so an image's
  own last entry is mostly its first neighbour (``self_neighbour``).
* The bottleneck has two layers: the mask applies to the last one's output, and 1 − a to the last one's rows and the
  classifier's columns. It scales weight decay as well: a channel used elsewhere does not change. With
  ``network.bottleneck`` one, mask and 1 − a apply to linear layer and BatchNorm, as in the original; with
  ``network.weight_norm``, 1 − a applies to the directions of prototypes, not to their lengths, as in the original.
* Normalisation layers are selected by type (the original selects by name and misses some). Masks do not learn on
  targets, where their gradient is close to zero.
* Agreement is computed from logarithms, which are finite for any prediction.
* The preset ``own-head`` has the head and the optimisers of the published code for several targets.
* Epochs, steps and batches come from the recipe. On digits, which the paper does not use, all parameters
  have RaTP's optimiser.
* The exemplar memory is added: exemplars have cross-entropy with their stored labels instead of neighbours, under the
  current mask, and are not in the bank. Domains beyond the last slot share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp._core.state import Stateful
from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.losses import entropy, mean_over
from ratp.functional.norm import affine_parameters
from ratp.functional.optim import Group
from ratp.methods.shared.pseudo_labels import PseudoLabelPhase
from ratp.methods.shared.randmix_copies import CopiesConfig, CopyingMethod
from ratp.methods.shared.source_free import OWN_HEAD, SHOT_LARGE, SHOT_RATE, SourceFreeConfig, all_groups
from ratp.training.memory import Batch
from ratp.training.method import Setting
from ratp.training.phase import Phase
from ratp.training.phases import embed_all
from ratp.training.recipe import run_in_chunks


def clip_norm(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """Scales gradients so that their joint norm is at most ``largest``."""
    length = torch.stack(torch._foreach_norm(gradients)).norm()
    # min(1, largest/‖g‖)
    return list(torch._foreach_mul(gradients, (largest / length.clamp_min(1e-30)).clamp(max=1)))


SHARPEST = 100.0
LARGEST_EXPONENT = 10.0


def domain_masks(vectors: Tensor, scale: Tensor | float = SHARPEST) -> Tensor:
    """Computes masks a = σ(s·e), of the shape of e."""
    return (scale * vectors).sigmoid()


def annealed_scale(progress: Tensor, sharpest: float = SHARPEST) -> Tensor:
    """Computes s, which grows linearly from 1/s_max at progress 0 to s_max at progress 1."""
    return 1 / sharpest + (sharpest - 1 / sharpest) * progress


def compensation(vectors: Tensor, scale: Tensor, sharpest: float = SHARPEST) -> Tensor:
    """Computes the factor on the gradient of e that makes it independent of s."""
    # s_max/s · (cosh(s·e) + 1)/(cosh(e) + 1), with s·e within ±10
    exponents = (scale * vectors).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return sharpest / scale * (exponents.cosh() + 1) / (vectors.cosh() + 1)


def used_elsewhere(masks: Tensor, slot: int) -> Tensor:
    """Computes each channel's use by other domains: the maximum of all masks (slots, d) but ``slot``, shape (d,)."""
    others = torch.cat([masks[:slot], masks[slot + 1 :]])
    return others.amax(dim=0) if len(others) else torch.zeros_like(masks[0])


class Gate(nn.Module):
    """Multiplies an embedding by a domain's mask."""

    slot: Tensor  # index of the mask in use, shape (1,)

    def __init__(self, dim: int, slots: int, device: torch.device) -> None:
        """Draws masks from torch's generator, on the host."""
        super().__init__()
        self._add_masks(dim, slots, device)

    def _add_masks(self, dim: int, slots: int, device: torch.device) -> None:
        # e, one row per domain, shape (slots, d)
        self.domains = nn.Parameter(torch.randn(slots, dim).to(device))
        self.register_buffer("slot", torch.zeros(1, dtype=torch.int64, device=device))
        self._masked = True

    @property
    def mask(self) -> Tensor:
        """Returns the mask in use, shape (1, d)."""
        return domain_masks(self.domains.index_select(0, self.slot))

    def forward(self, x: Tensor) -> Tensor:
        """Computes x ⊙ a."""
        return x * self.mask if self._masked else x

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Turns masks off within the block."""
        self._masked = False
        try:
            yield
        finally:
            self._masked = True

    @contextmanager
    def using(self, slot: int) -> Iterator[None]:
        """Uses the mask of ``slot`` within the block."""
        before = self.slot.clone()
        self.slot.fill_(slot)
        try:
            yield
        finally:
            self.slot.copy_(before)


class MaskedLinear(Gate):
    """A linear layer whose output is multiplied by a domain's mask."""

    def __init__(self, linear: nn.Linear, slots: int) -> None:
        """Takes over the weights of ``linear``; draws masks like :class:`Gate`."""
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self._add_masks(linear.out_features, slots, linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Computes (x·Wᵀ + b) ⊙ a."""
        return super().forward(F.linear(x, self.weight, self.bias))


def disagreement(logs: Tensor, neighbours: Tensor) -> Tensor:
    """Computes −Σ_j log(p·q_j) for every sample, shape (n,); 0 without neighbours.

    ``logs`` is log p, shape (n, classes); ``neighbours`` holds the constants log q, shape (n, k, classes).
    """
    # log(p·q) = logsumexp over classes of log p + log q
    return -torch.logsumexp(logs[:, None] + neighbours.detach(), dim=2).sum(dim=1)


class Bank(Stateful):
    """The last embeddings (n, d) and log-predictions (n, classes) of all samples of a domain."""

    saved = "size _directions _logs"

    def __init__(self, embeddings: Tensor, logs: Tensor) -> None:
        self.size = len(embeddings)
        # The extra row takes writes that belong to no sample.
        self._directions = F.pad(F.normalize(embeddings.detach(), dim=1), (0, 0, 0, 1))
        self._logs = F.pad(logs.detach(), (0, 0, 0, 1))

    @property
    def directions(self) -> Tensor:
        """Returns embeddings of unit length, shape (n, d)."""
        return self._directions[: self.size]

    @property
    def logs(self) -> Tensor:
        """Returns log-predictions, shape (n, classes)."""
        return self._logs[: self.size]

    @torch.no_grad()
    def nearest(self, embeddings: Tensor, places: Tensor, count: int, *, own: bool = False) -> Tensor:
        """Returns the rows nearest to embeddings (m, d) of the samples at ``places``, nearest first.

        The shape is (m, count), or (m, n − 1) if that is smaller: a sample is not its own neighbour, unless ``own``.
        """
        count = min(count, self.size if own else self.size - 1)
        if count < 1:
            return places.new_zeros(len(places), 0)
        cosines = F.normalize(embeddings, dim=1) @ self.directions.T
        if not own:
            cosines.scatter_(1, places[:, None], -torch.inf)
        return cosines.topk(count, dim=1).indices

    @torch.no_grad()
    def write(self, places: Tensor, embeddings: Tensor, logs: Tensor, counts: Tensor) -> None:
        """Replaces the rows at ``places`` where ``counts`` is true; if a sample occurs twice, its later row stays."""
        places = places.where(counts, self.size)
        # All rows of one sample write the same values, the last one's, so their order does not matter.
        order = torch.arange(1, len(places) + 1, device=places.device)
        last = ((places[:, None] == places[None, :]) * order).argmax(dim=1)
        self._directions.index_copy_(0, places, F.normalize(embeddings, dim=1)[last])
        self._logs.index_copy_(0, places, logs[last])


LONGEST_GRADIENT = 10_000.0


@dataclass(frozen=True)
class GSFDAConfig(CopiesConfig, SourceFreeConfig):
    """Switches of G-SFDA. Defaults: published for several targets, except the optimiser of small networks."""

    slots: int = switch(5, "domains with their own mask, including the source; later ones share the last", minimum=1)
    sparsity: float = switch(0.1, "ρ, weight of the masks' mean on the source", minimum=0)
    neighbours: int = switch(3, "k, nearest images to agree with; 0: diversity alone", minimum=0)
    source_masks: Literal["annealed", "sharp"] = switch(
        "annealed", "scale s of masks on the source: growing, or 100 at once (published code)", hash_default=False
    )
    self_neighbour: bool = switch(
        False, "an image's own last entry may be its neighbour (published code)", hash_default=False
    )


class GSFDA(CopyingMethod):
    """Gives every domain its own channels, and lets neighbours agree."""

    name = "gsfda"
    title = "GSFDA: domain attention and local structure clustering"
    family = "source-free domain adaptation"
    paper = "Yang et al., Generalized Source-free Domain Adaptation, ICCV 2021"
    config_type = GSFDAConfig
    large = SHOT_LARGE
    # of the published code for several targets, which trains on the source at a constant rate
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "own-head": {
            **OWN_HEAD,
            "network.dim": 512,
            "source_sgd.weight_decay": 5e-4,
            "source_sgd.schedule": "constant",
        }
    }
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        (stream, preset): values
        for preset in ("official", "own-head")
        for stream, values in (
            ("demo", {"slots": 4}),
            ("digits", {"slots": 5}),
            ("pacs", {**SHOT_RATE, "slots": 4, "r_con": 0.5}),
            ("domainnet10", {**SHOT_RATE, "slots": 6}),
            ("folders", {**SHOT_RATE, "r_con": 0.5}),
        )
    }
    needs = "its own source training, exemplars, many passes over a target, number of domains"
    needs_bottleneck = True
    config: GSFDAConfig

    def __init__(self, setting: Setting, config: GSFDAConfig) -> None:
        super().__init__(setting, config)
        bottleneck, is_one = self.network.bottleneck, setting.recipe.network.bottleneck == "one"
        with setting.randomness.scope("domain attention"):
            # the masks of all domains: behind the bottleneck's only layer, or in the last of two
            self.gate: Gate = (
                Gate(setting.recipe.network.dim, config.slots, setting.device)
                if is_one
                else MaskedLinear(cast(nn.Linear, bottleneck[3]), config.slots)
            )
        if is_one:
            bottleneck.append(self.gate)
        else:
            bottleneck[3] = self.gate

    def slot_of(self, stage: int) -> int:
        """Returns the mask index of a stage's domain."""
        return min(stage, self.config.slots - 1)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase that trains all masks."""
        return [GSFDASourcePhase(self, domain)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase with a bank of all images."""
        return [GSFDAPhase(self, domain.images)]

    def predict_for_domain(self, images: Tensor, stage: int) -> Tensor:
        """Returns logits of uint8 images known to be from a stage's domain, under its own mask."""
        with self.gate.using(self.slot_of(stage)):
            return self.predict(images)


class GSFDASourcePhase(PseudoLabelPhase):
    """Trains with smoothed cross-entropy under every mask."""

    saved = "_done"

    def __init__(self, method: GSFDA, domain: LabelledDomain) -> None:
        config, network = method.config, method.network
        groups = [(list(parameters), factor) for parameters, factor in all_groups(network, config.backbone_rate)]
        self._copies, optimiser = method.copies(), method.optimiser(groups, config.sgd_on_source)
        super().__init__(method, domain.images, domain.labels, optimiser, generators=self._copies.generators)
        self._config, self._gate = config, method.gate
        self._parameters = [
            parameter for parameters, _ in groups for parameter in parameters if parameter.requires_grad
        ]
        self._done = torch.zeros((), device=method.setting.device)  # steps of this epoch

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; resets the sharpness of the masks."""
        self._done.zero_()
        return super().begin_epoch(epoch)

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch and its RandMix copies, if any."""
        config, vectors = self._config, self._gate.domains
        batch = self.batches.draw(self.batch)
        with self._gate.unmasked():
            embedding = self._copies.learn_all(batch.images).embedding
        labels = batch.labels.repeat(len(embedding) // self.batch)
        scale = annealed_scale(self._done / max(self.steps - 1, 1))
        masks = domain_masks(vectors, scale if config.source_masks == "annealed" else SHARPEST)
        logits = self.network.classify((masks[:, None] * embedding).flatten(0, 1))
        # Σ_t CE(W(z ⊙ a_t), y) + ρ·mean(a)
        ce = F.cross_entropy(logits, labels.repeat(config.slots), label_smoothing=config.smoothing)
        terms = {"ce": config.slots * ce, "sparsity": config.sparsity * masks.mean()}
        total = torch.stack(list(terms.values())).sum()
        gradients = [
            gradient * compensation(parameter.detach(), scale) if parameter is vectors else gradient
            for parameter, gradient in zip(self._parameters, torch.autograd.grad(total, self._parameters), strict=True)
        ]
        self.optimiser.update(clip_norm(gradients, LONGEST_GRADIENT))
        self._done += 1
        return {"total": total, **terms}


class GSFDAPhase(PseudoLabelPhase):
    """Trains with agreement among neighbours, in the channels the domain has to itself."""

    saved = "_bank"

    def __init__(self, method: GSFDA, images: Tensor) -> None:
        config, memory = method.config, method.memory
        network, gate, self._slot = method.network, method.gate, method.slot_of(method.stage)
        with torch.no_grad():
            free = 1 - used_elsewhere(domain_masks(gate.domains), self._slot)
        # rows and biases of the layers that make the embedding, columns of the classifier, but neither its bias nor
        # the lengths of weight norm
        last = [gate] if isinstance(gate, MaskedLinear) else [network.bottleneck[0], network.bottleneck[1]]
        own = [parameter for layer in last for parameter in layer.parameters() if parameter is not gate.domains]
        shares = {p: free[:, None] if p.ndim == 2 else free for p in own}
        shares |= {p: free[None, :] for p in network.classifier.parameters() if p.ndim == 2}
        slow = list(affine_parameters(network.backbone).values())
        fast = [p for p in network.bottleneck.parameters() if p is not gate.domains]
        fast += network.classifier.parameters()
        self._parameters = [*slow, *fast]
        # The share of its update that each parameter takes.
        self._shares = [shares.get(parameter, torch.ones_like(free[0])) for parameter in self._parameters]
        self._free = free.mean()
        # _update adds weight decay before the factor 1 − a, so channels of other domains do not decay.
        plain = replace(config.sgd, weight_decay=0.0)
        groups: list[Group] = [(slow, config.backbone_rate), (fast, 1.0)]
        self._copies, optimiser = method.copies(), method.optimiser(groups, plain)
        super().__init__(method, images, None, optimiser, generators=self._copies.generators)
        self._config, self._gate = config, gate
        self._union = config.replay == "union" and len(memory) > 0
        self._beside = config.replay == "separate" and len(memory) > 1  # one image has no batch statistics
        self._bank = Bank(*torch.zeros(2, 1, 1, device=method.setting.device))

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; before the first epoch, selects the mask and fills the bank."""
        lr = {"lr": self.optimiser.begin_epoch(epoch)}
        if epoch:
            return lr
        self._gate.slot.fill_(self._slot)

        def embed_and_classify(inputs: Tensor) -> tuple[Tensor, ...]:
            output = self.network(inputs)
            return output.embedding, output.logits.log_softmax(dim=1)

        self._bank = Bank(*run_in_chunks(self.network, embed_and_classify, self.batches.images, self.method.scaling))
        return lr | {"free_channels": self._free.item()}

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch and the RandMix copies of its confident images, if any."""
        batch = self.batches.draw(self.batch)
        output, valid = self._copies.learn_confident(batch.images)
        logs = output.logits.log_softmax(dim=1)
        embedding = output.embedding[: self.batch].detach()
        config = self._config
        near = self._bank.nearest(embedding, batch.places, config.neighbours, own=config.self_neighbour)
        terms = self._losses(batch, logs, self._bank.logs[near], valid)
        if self._beside:
            stored = self.batches.draw_memory(self.memory, self.batch)
            terms["replay"] = F.cross_entropy(self.network(stored.images).logits, stored.labels)
        total = torch.stack(list(terms.values())).sum()
        self._update(total)
        self._bank.write(batch.places, embedding, logs[: self.batch].detach(), ~batch.replayed)
        return {"total": total, **terms} | ({} if valid is None else {"confident": valid[self.batch :].float().mean()})

    def _losses(self, batch: Batch, logs: Tensor, near: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Computes the loss terms: neighbours of target images, labels of exemplars, diversity of all images."""
        copies = 1 if valid is None else 2
        replayed, near = batch.replayed.repeat(copies), near.repeat(copies, 1, 1)
        terms = {"neighbours": mean_over(disagreement(logs, near).masked_fill(replayed, 0), valid)}
        if self._union:
            ce = F.nll_loss(logs, batch.labels.repeat(copies), reduction="none")
            terms["replay"] = mean_over(ce.masked_fill(~replayed, 0), valid)
        # Σ_c p̄_c·log(p̄_c + 10⁻⁵)
        return terms | {"diversity": -entropy(logs[: self.batch].exp().mean(dim=0))}

    def _update(self, total: Tensor) -> None:
        """Updates the parameters, each by its share."""
        gradients = list(torch.autograd.grad(total, self._parameters))
        with torch.no_grad():
            gradients = clip_norm([g * s for g, s in zip(gradients, self._shares, strict=True)], LONGEST_GRADIENT)
            # (1 − a)·(∇L + λθ)
            for gradient, share, parameter in zip(gradients, self._shares, self._parameters, strict=True):
                gradient.add_(share * parameter, alpha=self._config.sgd.weight_decay)
        self.optimiser.update(gradients)

    def finish(self) -> dict[str, float]:
        """Chooses exemplars by the model's predictions."""
        images = self.batches.images
        predicted = embed_all(self.network, self.method.setting, images)[1].argmax(dim=1)
        return self.method.remember(images, predicted)
