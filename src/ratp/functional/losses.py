"""Losses over the rows of a batch that count.

A batch of fixed size may hold padding rows. The mask ``valid`` says which rows count; the others influence neither
the loss nor its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratp.config import switch
from ratp.functional import kernels

# Largest number of products that are summed elementwise instead of by a matrix product.
FEW = 2**20
# Largest dimension and number of vectors for which kernels compute scores.
MOST = 1024
# Added inside every logarithm by SHOT.
EPSILON = 1e-5
# Pairs of samples count as negatives only from this cosine on (published code).
NEGATIVE_THRESHOLD = 1e-6


def scores(features: Tensor, vectors: Tensor) -> Tensor:
    """Computes f·Wᵀ, shape (n, k), for features of shape (n, d) and class vectors of shape (k, d)."""
    if not features.is_cuda:
        return features @ vectors.T
    product: Tensor = _Scores.apply(features, vectors)
    return product


class _Scores(torch.autograd.Function):
    """Sums few products by kernels, or at least dW elementwise: cuBLAS takes 52 µs for 128 × 10 on an H200."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(features, vectors)
        if _has_kernels(features, vectors):
            from ratp.functional.kernels.losses import score

            return score(features, vectors)
        return features @ vectors.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        features, vectors = ctx.saved_tensors
        needs_features, needs_vectors = ctx.needs_input_grad
        if _has_kernels(features, vectors):
            from ratp.functional.kernels.losses import score_gradient

            return score_gradient(gradient, features, vectors)
        d_features = gradient @ vectors if needs_features else None
        d_vectors = None
        if needs_vectors and gradient.numel() * features.shape[1] <= FEW:
            d_vectors = (gradient[:, :, None] * features[:, None, :]).sum(dim=0)
        elif needs_vectors:
            d_vectors = gradient.T @ features
        return d_features, d_vectors


def _has_kernels(features: Tensor, vectors: Tensor) -> bool:
    """Whether kernels compute the scores of features."""
    few = len(features) * vectors.numel() <= FEW and max(vectors.shape) <= MOST
    return few and features.dtype == vectors.dtype == torch.float32 and kernels.usable(features.device)


def mean_over(losses: Tensor, valid: Tensor | None = None) -> Tensor:
    """Averages the losses (n,) of the rows that count; 0 if there are none. ``valid`` None: all count."""
    if valid is None:
        return losses.sum() / max(len(losses), 1)
    return losses.masked_fill(~valid, 0).sum() / valid.sum().clamp_min(1)


def cross_entropy(logits: Tensor, labels: Tensor, valid: Tensor | None = None) -> Tensor:
    """Averages the cross-entropy of logits (n, k) and labels (n,) over the rows that count."""
    if valid is None:
        return F.cross_entropy(logits, labels)
    return mean_over(F.cross_entropy(logits, labels, reduction="none"), valid)


def entropy(probabilities: Tensor) -> Tensor:
    """Computes SHOT's entropy −Σ p·log(p + 10⁻⁵) over the last dimension."""
    return -(probabilities * (probabilities + EPSILON).log()).sum(dim=-1)


def information_maximisation(logits: Tensor) -> Tensor:
    """Computes the information-maximisation loss of SHOT (ICML 2020) for logits (n, k).

    Each prediction should be certain, all together should be diverse: the mean entropy, less the entropy of the mean.
    """
    probabilities = logits.softmax(dim=1)
    # H̄ − H(p̄)
    return entropy(probabilities).mean() - entropy(probabilities.mean(dim=0))


def logit_entropy(logits: Tensor) -> Tensor:
    """Computes the entropy of each row of logits (n, k); exact and finite however certain it is."""
    logs = F.log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(dim=1)


def mean_prediction_entropy(logits: Tensor) -> Tensor:
    """Computes the entropy of the mean prediction of logits (n, k); exact and finite however certain all are."""
    # log p̄ = logsumexp over rows of log p − log n
    logs = torch.logsumexp(F.log_softmax(logits, dim=1), dim=0) - math.log(len(logits))
    return -(logs.exp() * logs).sum()


def logit_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Computes −Σ softmax(target)·log softmax(logits) of each row of logits (n, k)."""
    return -(target.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)


def symmetric_cross_entropy(some: Tensor, others: Tensor) -> Tensor:
    """Computes ½·CE(others → some) + ½·CE(some → others) of each row of logits (n, k)."""
    return 0.5 * logit_cross_entropy(some, others) + 0.5 * logit_cross_entropy(others, some)


def distillation(student: Tensor, teacher: Tensor, valid: Tensor | None = None) -> Tensor:
    """Averages KL(teacher ‖ student) of logits (or features), shape (n, k), over the rows that count; 0 without any.

    The temperature is 1, and the teacher receives no gradient.
    """
    target = F.softmax(teacher.detach().float(), dim=1)
    # KL(q ‖ p) = Σ_k q_k (log q_k − log p_k)
    divergence = F.kl_div(F.log_softmax(student.float(), dim=1), target, reduction="none")
    return mean_over(divergence.sum(dim=1), valid)


def jensen_shannon(views: Sequence[Tensor], valid: Tensor | None = None) -> Tensor:
    """Averages the Jensen-Shannon divergence of several predictions of each sample over the rows that count.

    AugMix (ICLR 2020): 1/V · Σ_v KL(p_v ‖ p̄) for the V views' predictions p_v and their mean p̄. All views learn.

    Args:
        views: The logits of each view, shape (n, k).
        valid: Which rows count, shape (n,); None: all.
    """
    logs = torch.stack([F.log_softmax(view.float(), dim=1) for view in views])
    mean = logs.logsumexp(dim=0) - math.log(len(views))
    return mean_over((logs.exp() * (logs - mean)).sum(dim=2).mean(dim=0), valid)


@dataclass(frozen=True)
class PCAConfig:
    """Switches of the prototype contrastive alignment loss; defaults are the published code's."""

    weight: float = switch(1.0, "weight of the loss; 0 leaves it out", minimum=0)
    similarity: Literal["cosine", "dot"] = switch(
        "cosine", "cosine × scale (published code) or the raw dot product (paper)", doc_ref=3
    )
    scale: float = switch(12.0, "factor s on the cosine; unused with 'dot'", doc_ref=3, above=0)
    negatives: Literal["positive", "all"] = switch(
        "positive",
        "samples of other classes that repel: those with positive similarity (published code) or all",
        doc_ref=4,
    )
    old_weight: float = switch(
        1.0, "weight m of the old model's prototypes; published: 0.5 on PACS", doc_ref=5, minimum=0
    )
    form: Literal["stable", "published"] = switch(
        "stable", "log-sum-exp, safe in low precision, or the quotient of sums as printed"
    )


def prototype_contrastive(
    features: Tensor,  # f, shape (n, d)
    labels: Tensor,  # y, shape (n,)
    prototypes: Tensor,  # p, the classifier's rows, shape (k, d)
    old_prototypes: Tensor | None,  # q, constants, or None on the source domain
    config: PCAConfig,
    # which samples count, bool of shape (n,); None: all. The others repel none and have no loss.
    valid: Tensor | None = None,
) -> Tensor:
    """Computes the prototype contrastive alignment (PCA) loss of every sample, shape (n,).

    Deja Vu (ICLR 2023), section 2.4. The rows of the bias-free classifier are the class prototypes. A sample is pulled
    towards the prototype of its class, in the current and in the old model, and pushed from the other prototypes and
    from samples of other classes:

        −log ( [e^{s·f·p_y} + m·e^{s·f·q_y}] / [Σ_c e^{s·f·p_c} + m·Σ_c e^{s·f·q_c} + Σ_{j: y_j≠y_i} e^{s·f_i·f_j}] )

    with prototypes p, old prototypes q, old weight m and scale s. On the source domain there is no old model: every
    term with q is absent.
    """
    if config.form == "stable":  # keeps exponentials and their sums in single precision
        features, prototypes = features.float(), prototypes.float()
    old = None if old_prototypes is None or config.old_weight == 0 else old_prototypes.detach().to(features.dtype)
    scale = 1.0
    if config.similarity == "cosine":
        scale = config.scale
        features, prototypes = F.normalize(features, dim=1), F.normalize(prototypes, dim=1)
        old = None if old is None else F.normalize(old, dim=1)
    to_prototypes = scale * scores(features, prototypes)
    to_samples = _to_negatives(features, labels, scale, valid, only_positive=config.negatives == "positive")
    near = [to_prototypes.gather(1, labels[:, None])]
    everything = [to_prototypes, to_samples]
    if old is not None:
        # m·e^a = e^{a + log m}
        to_old = scale * features @ old.T + math.log(config.old_weight)
        near.append(to_old.gather(1, labels[:, None]))
        everything.append(to_old)
    numerator, denominator = torch.cat(near, dim=1), torch.cat(everything, dim=1)
    if config.form == "published":
        losses = -(numerator.exp().sum(dim=1) / denominator.exp().sum(dim=1)).log()
    else:
        losses = denominator.logsumexp(dim=1) - numerator.logsumexp(dim=1)
    return losses if valid is None else losses.masked_fill(~valid, 0)


def _to_negatives(
    features: Tensor, labels: Tensor, scale: float, valid: Tensor | None, *, only_positive: bool
) -> Tensor:
    """s·f_i·f_j (n, n) where j is a valid sample of another class, −∞ elsewhere."""
    products = features @ features.T
    repels = labels[:, None] != labels[None, :]
    if only_positive:
        repels = repels & (products >= NEGATIVE_THRESHOLD)
    if valid is not None:
        repels = repels & valid[None, :]
    return (scale * products).masked_fill(~repels, -math.inf)


def fused_terms(
    output: tuple[Tensor, Tensor],  # embedding and logits
    labels: Tensor,
    valid: Tensor | None,
    prototypes: Tensor,
    old_prototypes: Tensor | None,
    teacher: Tensor | None,  # logits to distil from; None: nothing is distilled
    pca: PCAConfig,
    weights: tuple[float, float],  # of distillation and consistency
) -> dict[str, Tensor]:
    """Computes ``ce``, ``pca``, ``distill`` and ``consistency`` in a few kernels; empty where these do not apply.

    They are weighted averages over the rows that count. Consistency, absent if its weight is 0, is the distillation
    from the first half of the batch, which are images, to the second half, their copies.
    """
    if not pca.weight or pca.form != "stable" or not kernels.usable(labels.device):
        return {}
    from ratp.functional.kernels.losses import Terms, fits

    if not fits(*output):
        return {}
    old = old_prototypes if pca.old_weight else None
    scale = pca.scale if pca.similarity == "cosine" else None
    threshold = NEGATIVE_THRESHOLD if pca.negatives == "positive" else None
    switches = scale, threshold, pca.old_weight or 1.0, (pca.weight, *weights)
    names = ["ce", "pca", *(["distill"] if teacher is not None else []), *(["consistency"] if weights[1] else [])]
    found = Terms.apply(*output, prototypes, old, teacher, labels, valid, *switches)
    return dict(zip(names, found, strict=True))


def supervised_contrastive(
    features: Tensor, labels: Tensor, temperature: float = 0.07, valid: Tensor | None = None
) -> Tensor:
    """Computes the supervised contrastive loss (Khosla et al., NeurIPS 2020) of every sample, shape (n,).

    Samples of the same class attract each other, all others repel:

        −mean_{p: y_p=y_i, p≠i} log ( e^{f_i·f_p/τ} / Σ_{a≠i} e^{f_i·f_a/τ} )

    with features f, shape (n, d), scaled to unit length here, and temperature τ. A sample alone in its class has no
    loss. Samples that do not count neither attract nor repel.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    directions = F.normalize(features.to(dtype), dim=1)
    # Finite instead of −∞: a sample without others must not turn the gradient into NaN.
    similar = (directions @ directions.T / temperature).fill_diagonal_(torch.finfo(dtype).min / 2)
    attracts = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
    if valid is not None:
        both = valid[None, :] & valid[:, None]
        similar, attracts = similar.masked_fill(~both, torch.finfo(dtype).min / 2), attracts & both
    count = attracts.sum(dim=1)
    # log Σ_a e^{s_ia} − mean_p s_ip, if there is a p
    return similar.logsumexp(dim=1) * (count > 0) - (similar * (attracts / count.clamp_min(1)[:, None])).sum(dim=1)


def proxy_contrastive(
    features: Tensor, labels: Tensor, proxies: Tensor, scale: float = 12.0, valid: Tensor | None = None
) -> Tensor:
    """Computes the proxy-based contrastive loss (PCL, CVPR 2022, section 3) of every sample, shape (n,).

    A sample is pulled towards the proxy of its class and pushed from samples of other classes:

        −log ( e^{s·f·w_y} / [e^{s·f·w_y} + Σ_{j: y_j≠y_i} e^{s·f_i·f_j}] )

    with features f, shape (n, d), and proxies w of all classes, shape (k, d), both scaled to unit length here, and
    scale s; 0 where no sample of another class is near. Unlike in :func:`prototype_contrastive`, other proxies do not
    repel; unlike in :func:`supervised_contrastive`, samples of the same class do not attract. As in the published code,
    only pairs with a positive cosine repel. Its positives are in the order of classes and its negatives in that of the
    batch, so the two fit only if labels are sorted; here they always do. Samples that do not count repel none and have
    no loss.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    features, proxies = F.normalize(features.to(dtype), dim=1), F.normalize(proxies.to(dtype), dim=1)
    to_own = (features * proxies[labels]).sum(dim=1, keepdim=True)
    to_samples = _to_negatives(features, labels, scale, valid, only_positive=True)
    losses = torch.cat([scale * to_own, to_samples], dim=1).logsumexp(dim=1) - scale * to_own.squeeze(1)
    return losses if valid is None else losses.masked_fill(~valid, 0)
