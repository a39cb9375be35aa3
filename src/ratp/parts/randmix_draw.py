"""The random numbers of RandMix: see :mod:`ratp.parts.randmix`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

COLOUR_DROPOUT = 0.2
# |Σw| below this is taken as this, with its sign. Such a batch is saturated by σ either way.
SMALLEST_WEIGHT_SUM = 1e-3


@dataclass(frozen=True)
class Linear:
    """Weight and bias of a random layer."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Branch:
    """The random numbers of one autoencoder."""

    encoder: Linear
    decoder: Linear
    adain: Linear
    noise: Tensor


@dataclass(frozen=True)
class Draw:
    """All random numbers of one call of RandMix.

    Indexed like a batch, it gives the numbers of some of its images: theirs are the same whichever others there are.
    """

    input_noise: Tensor | None
    colour: Linear | None
    colour_keep: Tensor | None
    branches: tuple[Branch, ...]
    weights: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Draw:
        branches = tuple(replace(branch, noise=_rows(branch.noise, rows)) for branch in self.branches)
        noise = None if self.input_noise is None else _rows(self.input_noise, rows)
        keep = None if self.colour_keep is None else _rows(self.colour_keep, rows)
        return Draw(noise, self.colour, keep, branches, _rows(self.weights, rows))


def _rows(numbers: Tensor, rows: Tensor | slice) -> Tensor:
    """Some rows; a single one serves all images anyway."""
    return numbers if len(numbers) == 1 else numbers[rows]
