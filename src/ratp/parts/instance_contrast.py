"""Contrast between images, whatever their classes: views of an image attract, those of other images repel.

Of all views but itself, a view takes another one for that of the same image with the probability

    p = e^{f_i·f_p/τ} / Σ_{a≠i} e^{f_i·f_a/τ}

A network learns by −log p to know views again. A generator of views learns by −log(1 − p) to make them hard to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.scl import supervised_contrastive


def instance_contrastive(views: Sequence[Tensor], temperature: float = 0.07) -> Tensor:
    """−log p, mean over all views; of several views of the same image each counts as much.

    Args:
        views: Features of any length, one tensor (n, d) a view, with the same images in the same places.
        temperature: τ.
    """
    features = torch.cat(list(views))
    images = torch.arange(len(views[0]), device=features.device).repeat(len(views))
    return supervised_contrastive(features, images, temperature).mean()


def adversarial_contrastive(some: Tensor, others: Tensor, temperature: float = 0.07) -> Tensor:
    """−log(1 − p) between two views, mean over both; 0 for a single image, which nothing can be taken for.

    Args:
        some: Features of one view, shape (n, d).
        others: Features of the other, shape (n, d).
        temperature: τ.
    """
    count = len(some)
    if count < 2:
        return (some - some.detach()).sum()
    dtype = torch.promote_types(some.dtype, torch.float32)
    directions = F.normalize(torch.cat([some, others]).to(dtype), dim=1)
    place = torch.arange(2 * count, device=some.device)
    itself = place[:, None] == place[None, :]
    same_image = place[:, None] % count == place[None, :] % count
    similar = directions @ directions.T / temperature
    # −log(1 − p) = log Σ_{a≠i} − log Σ_{a of other images}
    everything = similar.masked_fill(itself, -torch.inf).logsumexp(dim=1)
    strange = similar.masked_fill(same_image, -torch.inf).logsumexp(dim=1)
    return (everything - strange).mean()
