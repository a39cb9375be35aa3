"""Attention masks over the channels of an embedding, one a domain: HAT (ICML 2018), as G-SFDA (ICCV 2021) uses it.

A domain t has a vector e_t. Its mask a_t = σ(s·e_t) is nearly binary for a large s and says which channels the domain
uses. While masks are learnt, s grows from 1/s_max to s_max; the gradient of e is then too small at both ends, which
:func:`compensation` makes up for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SHARPEST = 100.0
LARGEST_EXPONENT = 10.0


def domain_masks(vectors: Tensor, scale: Tensor | float = SHARPEST) -> Tensor:
    """Masks a = σ(s·e), of the shape of e."""
    return (scale * vectors).sigmoid()


def annealed_scale(progress: Tensor, sharpest: float = SHARPEST) -> Tensor:
    """s, from 1/s_max at progress 0 to s_max at progress 1, linear."""
    return 1 / sharpest + (sharpest - 1 / sharpest) * progress


def compensation(vectors: Tensor, scale: Tensor, sharpest: float = SHARPEST) -> Tensor:
    """What the gradient of e is multiplied by, so that it does not depend on s."""
    # s_max/s · (cosh(s·e) + 1)/(cosh(e) + 1), with s·e within ±10
    exponents = (scale * vectors).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return sharpest / scale * (exponents.cosh() + 1) / (vectors.cosh() + 1)


def used_elsewhere(masks: Tensor, slot: int) -> Tensor:
    """How much each channel is used by any other domain: max over the other masks, shape (d,); 0 if there is none.

    Args:
        masks: One a domain, shape (slots, d).
        slot: The domain it is asked for.
    """
    others = torch.cat([masks[:slot], masks[slot + 1 :]])
    return others.amax(dim=0) if len(others) else torch.zeros_like(masks[0])


class MaskedLinear(nn.Linear):
    """A linear layer whose output is multiplied by the mask of one domain.

    Attributes:
        domains: e, one row a domain, shape (slots, d).
        slot: Whose mask is in force, an index of shape (1,).
    """

    slot: Tensor

    def __init__(self, linear: nn.Linear, slots: int) -> None:
        """Takes over a layer; masks are drawn from torch's generator, on the host.

        Args:
            linear: Whose weights it has from now on.
            slots: Number of domains.
        """
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.domains = nn.Parameter(torch.randn(slots, linear.out_features).to(device))
        self.register_buffer("slot", torch.zeros(1, dtype=torch.int64, device=device))
        self._masked = True

    @property
    def mask(self) -> Tensor:
        """The mask in force, shape (1, d)."""
        return domain_masks(self.domains.index_select(0, self.slot))

    def forward(self, x: Tensor) -> Tensor:
        """(x·Wᵀ + b) ⊙ a."""
        output = F.linear(x, self.weight, self.bias)
        return output * self.mask if self._masked else output

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Within the block, the output is that of a plain linear layer."""
        self._masked = False
        try:
            yield
        finally:
            self._masked = True

    @contextmanager
    def using(self, slot: int) -> Iterator[None]:
        """Within the block, another domain's mask is in force."""
        before = self.slot.clone()
        self.slot.fill_(slot)
        try:
            yield
        finally:
            self.slot.copy_(before)
