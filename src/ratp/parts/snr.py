"""Style normalisation and restitution (SNR), IEEE Transactions on Multimedia 2021, section III.

After a block with feature maps F, instance normalisation takes the style out, and a gate puts back what of the
removed part helps to tell classes:

    I = InstanceNorm(F),  R = F − I,  a = σ(W₂ ReLU(W₁ GAP(R))),  F⁺ = I + a⊙R,  F⁻ = I + (1 − a)⊙R

F⁺ goes on to the next block. The dual restitution loss wants what is put back to make predictions surer, and what is
left out to make them less sure:

    softplus(H(F⁺) − H(I)) + softplus(H(I) − H(F⁻))

with H the mean entropy of what a linear head makes of the pooled feature maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.parts.information import logit_entropy

EPSILON = 1e-5
REDUCTION = 16


class Restitution(NamedTuple):
    """What SNR makes of feature maps, or the same pooled over space.

    Attributes:
        normalised: I, without style.
        plus: F⁺, with what helps.
        minus: F⁻, with what does not.
    """

    normalised: Tensor
    plus: Tensor
    minus: Tensor


class StyleRestitution(nn.Module):
    """Style normalisation and restitution of feature maps.

    Attributes:
        weight: Scale of the instance normalisation, shape (channels,).
        bias: Shift of the instance normalisation, shape (channels,).
        squeeze: W₁, from the channels to a sixteenth of them.
        excite: W₂, back to the channels.
    """

    _kept: list[Restitution] | None = None

    def __init__(self, channels: int) -> None:
        """Makes a module with random gates, drawn from torch's generator.

        Args:
            channels: Channels of the feature maps.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        hidden = max(1, channels // REDUCTION)
        self.squeeze, self.excite = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        for layer in (self.squeeze, self.excite):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, maps: Tensor) -> Tensor:
        """F⁺ of feature maps, shape (n, channels, height, width)."""
        if self._kept is None:
            normalised, removed, gate = self._split(maps)
            return normalised + gate * removed
        result = self.restitute(maps)
        self._kept.append(Restitution(*(part.mean(dim=(2, 3)) for part in result)))
        return result.plus

    def restitute(self, maps: Tensor) -> Restitution:
        """All three results."""
        normalised, removed, gate = self._split(maps)
        returned = gate * removed
        return Restitution(normalised, normalised + returned, normalised + (removed - returned))

    def _split(self, maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """I, R and a."""
        wide = maps.to(torch.promote_types(maps.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dim=(2, 3), correction=0, keepdim=True)
        scale = self.weight[:, None, None] * (variance + EPSILON).rsqrt()
        normalised = ((wide - mean) * scale + self.bias[:, None, None]).to(maps.dtype)
        removed = maps - normalised
        gate = self.excite(self.squeeze(removed.mean(dim=(2, 3))).relu()).sigmoid()
        return normalised, removed, gate[:, :, None, None].to(maps.dtype)


@contextmanager
def restitutions(module: nn.Module, kept: list[Restitution]) -> Iterator[None]:
    """Within the block, SNR modules inside ``module`` append what they make of feature maps, pooled over space."""
    layers = [layer for layer in module.modules() if isinstance(layer, StyleRestitution)]
    for layer in layers:
        layer._kept = kept
    try:
        yield
    finally:
        for layer in layers:
            layer._kept = None


def dual_restitution(logits: Restitution) -> Tensor:
    """The dual restitution loss of what a head makes of the three pooled results, each of shape (n, classes)."""
    normalised, plus, minus = (logit_entropy(part.float()).mean() for part in logits)
    return F.softplus(plus - normalised) + F.softplus(normalised - minus)
