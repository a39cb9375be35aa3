"""Weak and strong views of images for contrastive learning, sampled separately for each image of a batch.

A view is a transform of :mod:`ratp.functional.transforms` whose colour jitter applies to some images only, then a
shift by a few pixels, then a blur of some images. Nothing is read back from the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratp.config import as_dict, override, switch
from ratp.errors import ConfigError
from ratp.functional.colour import blur
from ratp.functional.transforms import NONE, Transform, TransformConfig, TransformDraw

# The radius of a blur, in multiples of σ.
REACH = 3


@dataclass(frozen=True)
class ViewConfig:
    """Switches of a view; the defaults leave images unchanged."""

    transform: TransformConfig = switch(NONE, "crop, flip, colours and greyscale")
    jitter: float = switch(1.0, "probability that the colours change", minimum=0, maximum=1)
    shift: int = switch(0, "images move by up to this many pixels each way, edges are repeated", minimum=0)
    blur: float = switch(0.0, "probability of a blur", minimum=0, maximum=1)
    blur_min: float = switch(0.1, "smallest width σ of a blur, in pixels", minimum=0)
    blur_max: float = switch(2.0, "largest width σ of a blur, in pixels", minimum=0, below=100)


class View:
    """Random views of images, with height and width ``size``."""

    def __init__(self, config: ViewConfig, size: int) -> None:
        override(config, as_dict(config))  # checks the range of every value
        if config.blur_min > config.blur_max:
            raise ConfigError(f"blur_min must be at most blur_max, got {config.blur_min} and {config.blur_max}.")
        self.config = config
        self._transform = Transform(config.transform, size)
        self._radius = math.ceil(REACH * config.blur_max)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws one view of each image; arguments and result as for :class:`Transform`."""
        count, _, height, width = images.shape
        draw = self._spare_some(self._transform.draw(count, height, width, generator), count, generator)
        views = self._transform.apply(images, draw)
        if self.config.shift:
            views = shifted(views, self._draw_shifts(count, generator))
        if self.config.blur:
            views = blur(views, self._draw_widths(count, generator), self._radius).clamp_(0, 1)
        return views

    def _spare_some(self, draw: TransformDraw, count: int, generator: torch.Generator) -> TransformDraw:
        """Neutralises the colour jitter of some images."""
        if draw.factors is None or self.config.jitter == 1:
            return draw
        hit = torch.rand(count, 1, generator=generator, device=generator.device) < self.config.jitter
        neutral = [0.0 if operation == "hue" else 1.0 for operation in self._transform.operations]
        return replace(draw, factors=torch.where(hit, draw.factors, draw.factors.new_tensor(neutral)))

    def _draw_shifts(self, count: int, generator: torch.Generator) -> Tensor:
        most = self.config.shift
        return torch.randint(-most, most + 1, (count, 2), generator=generator, device=generator.device)

    def _draw_widths(self, count: int, generator: torch.Generator) -> Tensor:
        hit, width = torch.rand(2, count, generator=generator, device=generator.device)
        sigmas = self.config.blur_min + (self.config.blur_max - self.config.blur_min) * width
        return torch.where(hit < self.config.blur, sigmas, 0)


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Moves images down and right by whole pixels (n, 2), repeating the edge they leave behind."""
    count, channels, height, width = images.shape
    down, right = shifts[:, :, None].unbind(dim=1)
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    moved = images.gather(2, rows[:, None, :, None].expand(count, channels, height, width))
    return moved.gather(3, columns[:, None, None, :].expand(count, channels, height, width))
