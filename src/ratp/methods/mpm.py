"""MPM — "Multi-Prototype Modeling for Unsupervised Continual Domain Shift Learning", CVPR 2025.

One classifier for all domains fits none of them, so every domain has its own: head k, whose rows are the prototypes of
the classes in domain k. All heads share the feature extractor and the bottleneck. Their predictions p_k are fused; one
of low entropy weighs more:

    p = Σ_k ω_k·p_k,  ω = softmax_k(−H(p_k))

* Source stage: extractor and head 0 learn by cross-entropy, on images and a RandMix copy of each.
* Target stage, adaptation: a new head learns by SHOT's loss, β·CE + H̄ − H(p̄), with everything else frozen. Labels are
  SHOT's, from embeddings and the fused p, updated every epoch.
* Target stage, generalisation: the labels of p are fixed, heads are frozen, and extractor and bottleneck learn from
  images with RandMix copies: SelNLPL with these labels (:mod:`ratp.functional.negative_learning`) + cross-entropy of
  exemplars, each through the head of its domain + λ·KL(old p ‖ p) on exemplars, with old p that of the model before the
  stage.
* After a stage: exemplars enter the memory with the labels; a class without labelled images gives none.

A target stage has two phases of the recipe's length, so twice the steps of other methods; the first one trains a head
alone and takes less time.

BiGE (``bige``) also uses the exemplars when it predicts (:mod:`ratp.functional.propagation`). Domain labels spread over
a graph of images with similar styles; how much an image belongs to domain k replaces ω_k. Class labels spread over a
graph of images with similar features to a second prediction q, and p and q are fused like two heads. With ``batch``,
graphs consist of exemplars and a random test batch of at least 64 images, so a prediction depends on other test images:
it is transductive, and results record this as ``evaluation_statistics`` batch. With ``single``, each image has graphs
with the exemplars alone. A domain without exemplars gets no weight, and while there are none at all, ω counts.

``weights.safetensors`` has the extractor and head 0, ``state.safetensors`` all heads. The journal's
``accuracy_as_told`` is that of each domain's own head alone.

There is no public code, and we know the paper from summaries. These are guesses:

* The weights ω (``fusion``); SHOT's β, 0.1, and 0.3 for large networks (``beta``), whose extractor learns at a tenth of
  the rate, as in SHOT (``backbone_rate``). The optimiser is RaTP's (``sgd``).
* Adaptation: a new head begins as the last one (``new_head``), the frozen network normalises by its running statistics
  (``adaptation_statistics``), and labels are centroids (``adaptation_labelling``).
* Generalisation: labels are the most probable classes (``labelling``); target images learn through their own head too
  (``learns_through``); as many epochs as the adaptation (``length``), and as many exemplars in a batch as target
  images (``replay_memory.batch``), all in one pass; λ 1 (``replay_memory.distill``); herding
  (``replay_memory.selection``). RandMix is CoDAG's and may not be part of MPM (``augment``).
* SelNLPL: its three kinds of learning for a third of the epochs each (``selnlpl.order``); predictions averaged over 3
  epochs (``selnlpl.history``; published: 10), those of all images at the start of each; γ 0.5 (``selnlpl.threshold``).
  The loss on a copy is that on its image. Other switches are those of NLNL's published code.
* BiGE: styles are means and deviations of the first block's channels, features are the channels' means after the last
  block, both of unit length. Prototypes are means of exemplars, by domain or by class. In a test batch, they move once
  towards the images that belong to them (``graph.moves``, ``graph.keep``); the next batch begins with the means again.
  The 25 rounds in which labels spread are replaced by their limit. p and q are fused by their entropies. Distances of
  such features are small, so shares in domains are nearly equal; ``graph.scale`` sets them further apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.data.domain import UnlabelledDomain, check_images
from ratp.errors import ConfigError
from ratp.functional.fusion import fuse
from ratp.functional.losses import information_maximisation
from ratp.functional.norm import by_batch
from ratp.functional.propagation import GraphConfig, group_shares
from ratp.methods.shared.insertion import block_outputs
from ratp.methods.shared.online import SMALLEST_BATCH, in_batches
from ratp.methods.shared.pseudo_labels import PseudoLabelPhase
from ratp.methods.shared.selnlpl import Labelling, NoisyLabelConfig, NoisyLabelMethod, SelNLPLPhase, labels_from
from ratp.methods.shared.source_free import extractor_groups
from ratp.networks.network import Output, WeightNormLinear
from ratp.training.method import Setting, Statistics, pack, unpack
from ratp.training.phase import Phase
from ratp.training.recipe import run_in_chunks

Head = nn.Linear | WeightNormLinear
FIRST, LAST = 1, -1


@dataclass(frozen=True)
class MPMConfig(NoisyLabelConfig):
    """Switches of MPM. Defaults: guesses where the paper's values are unknown."""

    fusion: Literal["entropy", "mean"] = switch("entropy", "weights of the heads: by certainty, or equal")
    new_head: Literal["last", "source"] = switch("last", "a new head begins as the last one, or as the source's")
    adaptation_statistics: Statistics = switch(
        "running", "BatchNorm statistics of the frozen network while a head learns: running or batch"
    )
    adaptation_labelling: Labelling = switch(
        "centroids", "labels while a head learns: the model's predictions, or SHOT's centroids of them"
    )
    learns_through: Literal["own", "fused"] = switch(
        "own", "what images and exemplars learn through in the generalisation: their domain's head, or all heads fused"
    )
    bige: Literal["off", "single", "batch"] = switch(
        "off", "prediction by graphs: none, of each image with the exemplars, or of test batches (transductive)"
    )
    graph: GraphConfig = switch(GraphConfig(), "graphs, unless bige is off")


class MPM(NoisyLabelMethod):
    """Gives every domain a classifier of its own, and fuses their predictions."""

    name = "mpm"
    title = "MPM: multi-prototype modelling"
    family = "continual domain shift learning"
    paper = "Sun et al., Multi-Prototype Modeling for Unsupervised Continual Domain Shift Learning, CVPR 2025"
    config_type = MPMConfig
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "backbone_rate": 0.1}
    needs = "its own source training, exemplars, a classifier per domain, many passes over a target, further phases"
    config: MPMConfig

    def __init__(self, setting: Setting, config: MPMConfig) -> None:
        super().__init__(setting, config)
        self.heads = nn.ModuleList([self.network.classifier])  # one per domain, the source's first
        if config.bige == "off":
            return
        if not setting.recipe.memory:
            raise ConfigError(f"bige={config.bige} compares images with exemplars: set memory above 0, or bige to off.")
        with block_outputs(self.network, (FIRST, LAST)):  # refuses feature extractors without known blocks
            pass

    @classmethod
    def evaluation_statistics(cls, config: Any) -> Statistics:
        """Returns batch if a prediction depends on the images of a test batch."""
        return "batch" if config.bige == "batch" else "running"

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Adds a head; returns the adaptation, then the generalisation."""
        self._set_heads(max(self.stage, 1))
        self.heads.append(deepcopy(self.heads[LAST if self.config.new_head == "last" else 0]))
        images = domain.images.to(self.setting.device)
        return [AdaptationPhase(self, images), GeneralisationPhase(self, images)]

    def _set_heads(self, count: int) -> None:
        """Keeps the first heads, or adds copies."""
        del self.heads[count:]
        while len(self.heads) < count:
            self.heads.append(deepcopy(self.heads[0]))

    def logs(self, embedding: Tensor, heads: Sequence[nn.Module] | None = None) -> Tensor:
        """Returns log p_k of all heads, or of some, shape (heads, n, k)."""
        some = self.heads if heads is None else heads
        logits = [self.network.classify(embedding, cast(Head, head)) for head in some]
        return torch.stack(logits).log_softmax(dim=2)

    def fused(self, logs: Tensor) -> Tensor:
        """Returns log p, shape (n, k), from all log p_k."""
        equal = logs.new_zeros(logs.shape[:2]).log_softmax(dim=0)
        return fuse(logs, None if self.config.fusion == "entropy" else equal)

    def predict(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images."""
        check_images(images, self.network.image_size)
        if self.config.bige == "off" or not len(self.memory):
            fused = run_in_chunks(self.network, lambda x: (self.fused(self._logs_of(x)),), images, self.scaling)
            return fused[0]
        return self._predict_by_graphs(images)

    def compute_logits(self, inputs: Tensor) -> Tensor | None:
        """Computes logits of normalised images by all heads; None if it predicts by graphs."""
        return self.fused(self._logs_of(inputs)) if self.config.bige == "off" or not len(self.memory) else None

    def predict_for_domain(self, images: Tensor, stage: int) -> Tensor:
        """Returns logits of uint8 images known to be from a stage's domain, from its own head."""
        check_images(images, self.network.image_size)
        return run_in_chunks(self.network, lambda x: (self._logs_of(x)[stage],), images, self.scaling)[0]

    def _logs_of(self, inputs: Tensor) -> Tensor:
        return self.logs(self.network(inputs).embedding)

    def _predict_by_graphs(self, images: Tensor) -> Tensor:
        """Returns logits by BiGE."""
        memory, together = self.memory, self.config.bige == "batch"
        images = images.to(memory.images.device)
        logs, styles, features = self._read(images)
        _, known_styles, known_features = self._read(memory.images)
        parts = [torch.arange(len(images))]
        if together:
            # As for statistics of the batch: images often come class by class.
            order = torch.randperm(len(images), generator=self.setting.randomness.generator("evaluation"))
            parts = in_batches(order, max(SMALLEST_BATCH, self.setting.recipe.batch))
        result = torch.empty_like(logs[:, 0])
        for part in parts:
            rows = part.to(images.device)
            domains = self._shares(styles[rows], known_styles, memory.domains, len(self.heads))
            classes = self._shares(features[rows], known_features, memory.labels, self.network.classes)
            own = logs[rows].transpose(0, 1)
            # p = Σ_k y_k·p_k;  (p·e^{−H(p)} + q·e^{−H(q)}) / (e^{−H(p)} + e^{−H(q)})
            result[rows] = fuse(torch.stack([fuse(own, domains.T), classes]))
        return result

    def _shares(self, features: Tensor, known: Tensor, groups: Tensor, count: int) -> Tensor:
        """Returns logarithms of the shares that images have in groups; finite, as entropies need them."""
        together = self.config.bige == "batch"
        shares = group_shares(features, known, groups, count, self.config.graph, together=together)
        shares = shares.clamp_min(torch.finfo(shares.dtype).tiny)
        return (shares / shares.sum(dim=1, keepdim=True)).log()

    def _read(self, images: Tensor) -> tuple[Tensor, ...]:
        """Returns log p_k (n, heads, k), styles and features of uint8 images."""

        def read(inputs: Tensor) -> tuple[Tensor, ...]:
            with block_outputs(self.network, (FIRST, LAST)) as maps:
                logs = self._logs_of(inputs)
            deviation, mean = torch.std_mean(maps[FIRST].float(), dim=(2, 3), correction=0)
            return logs.transpose(0, 1), torch.cat([mean, deviation], dim=1), maps[LAST].float().mean(dim=(2, 3))

        return run_in_chunks(self.network, read, images, self.scaling)

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, the fixed layers of RandMix and the heads; head 0 is the network's classifier."""
        return super().state() | pack({"heads": self.heads[1:].state_dict()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned, with as many heads."""
        super().load_state(state)
        heads = unpack(state).get("heads", {})
        self._set_heads(1 + len({name.partition(".")[0] for name in heads}))
        self.heads[1:].load_state_dict(heads)


class AdaptationPhase(PseudoLabelPhase):
    """Trains the newest head on a target by SHOT's loss."""

    def __init__(self, method: MPM, images: Tensor) -> None:
        self._method, self._config, self._head = method, method.config, method.heads[LAST]
        optimiser = method.optimiser(self._head.parameters())
        super().__init__(method, images, None, optimiser, finish=lambda *_: {})
        self.name = "adaptation"

    def predict_all(self) -> tuple[Tensor, Tensor]:
        """Returns embeddings and fused predictions of all images."""
        return predict_all(self._method, self.batches.images)

    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """Returns labels of all images, as the switch says."""
        return labels_from(embedding, probabilities, self._config.adaptation_labelling)

    def step(self) -> dict[str, Tensor]:
        """Updates the head once."""
        batch = self.batches.draw(self.batch)
        by_running = self._config.adaptation_statistics == "running"
        with torch.no_grad(), nullcontext() if by_running else by_batch(self.network):
            embedding = self.network.eval()(batch.images).embedding
        logits = self.network.classify(embedding, cast(Head, self._head))
        ce = self._config.beta * F.cross_entropy(logits, batch.labels)
        return self.minimise({"ce": ce, "im": information_maximisation(logits)})


class GeneralisationPhase(SelNLPLPhase):
    """Trains the extractor on fused labels of a target."""

    def __init__(self, method: MPM, images: Tensor) -> None:
        groups = extractor_groups(method.network, method.config.backbone_rate)
        super().__init__(method, images, groups, "generalisation")
        self._method, self._old = method, method.network.frozen_copy().folded()
        self._old_heads = list(method.heads)[:LAST]
        self._through_own = method.config.learns_through == "own"

    def label(self) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Returns labels from the fused predictions."""
        embedding, probabilities = predict_all(self._method, self.images)
        return labels_from(embedding, probabilities, self.config.labelling), probabilities, {}

    def probabilities(self) -> Tensor:
        """Returns the predictions that target images learn through."""
        scaling = self.method.scaling
        return run_in_chunks(
            self.network, lambda x: (self.target_logits(self.network(x)).softmax(dim=1),), self.images, scaling
        )[0]

    def target_logits(self, output: Output) -> Tensor:
        """Returns log p of the newest head, or the fused log p."""
        logs = self._method.logs(output.embedding)
        return logs[LAST] if self._through_own else self._method.fused(logs)

    def memory_logits(self, output: Output, domains: Tensor) -> Tensor:
        """Returns log p of the head of each exemplar's domain, or the fused log p."""
        logs = self._method.logs(output.embedding)
        if not self._through_own:
            return self._method.fused(logs)
        return logs.gather(0, domains[None, :, None].expand(1, -1, logs.shape[2])).squeeze(0)

    def student(self, output: Output) -> Tensor:
        """Returns the fused log p."""
        return self._method.fused(self._method.logs(output.embedding))

    def teacher(self, images: Tensor) -> Tensor:
        """Returns the fused log p of the model before the stage."""
        return self._method.fused(self._method.logs(self._old(images).embedding, self._old_heads))


def predict_all(method: MPM, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns embeddings and fused predictions of uint8 images."""

    def predict(inputs: Tensor) -> tuple[Tensor, ...]:
        embedding = method.network(inputs).embedding
        return embedding, method.fused(method.logs(embedding)).exp()

    embedding, probabilities = run_in_chunks(method.network, predict, images, method.scaling)
    return embedding, probabilities
