"""Random image transforms on whole batches: crop, flip, colour jitter and greyscale, sampled for each image.

In distribution they equal torchvision's ``RandomResizedCrop`` (bilinear, antialiased), ``RandomHorizontalFlip``,
``ColorJitter`` and ``RandomGrayscale`` in this order, applied image by image to float tensors; no step rounds to
whole grey levels. All work is in float32 on the device of the images, with shapes that depend on the batch's shape
alone and without reading a value back, so a CUDA graph can capture a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import as_dict, override, switch
from ratp.errors import ConfigError, RatpError
from ratp.functional.colour import Operation, apply_colours_, plan_colours


@dataclass(frozen=True)
class Taps:
    """Source pixels of each position of a resized axis (n, size, taps), with their weights."""

    index: Tensor
    weight: Tensor

    def __getitem__(self, rows: slice) -> Taps:
        return Taps(self.index[rows], self.weight[rows])


@dataclass(frozen=True)
class ResizePlan:
    """Source pixels of the columns and rows of the results."""

    columns: Taps
    rows: Taps

    def __getitem__(self, rows: slice) -> ResizePlan:
        return ResizePlan(self.columns[rows], self.rows[rows])


def plan_resize(boxes: Tensor, flip: Tensor | None, height: int, width: int, size: int) -> ResizePlan:
    """Plans antialiased bilinear resizing with a separate box per image.

    The result equals cutting out each box and resizing it alone. Along each axis, a position of the result is a
    weighted sum of the few pixels under a triangle, two pixels wide when enlarging and growing with the box otherwise.
    """
    top, left, box_height, box_width = boxes[:, :, None].unbind(dim=1)
    rows = torch.arange(size, device=boxes.device)[None]
    columns = rows if flip is None else torch.where(flip[:, None], size - 1 - rows, rows)
    return ResizePlan(_taps(columns, left, box_width, size, width), _taps(rows, top, box_height, size, height))


def resize(images: Tensor, plan: ResizePlan) -> Tensor:
    """Resizes images (n, channels, height, width) of any real type to float32 (n, channels, size, size)."""
    return _sum_rows(_sum_rows(images.transpose(2, 3), plan.columns).transpose(2, 3), plan.rows)


def _taps(position: Tensor, start: Tensor, length: Tensor, size: int, extent: int) -> Taps:
    """The filter at each ``position`` of an axis of ``extent`` pixels, of which ``length`` from ``start`` are used.

    Distances are integers, in units of half a pixel over ``size``, so that all devices find the same weights.
    """
    # centre c = (i + ½)·length/size, in pixels from the start; half the triangle's width s = max(1, length/size)
    centre = ((2 * position + 1) * length)[:, :, None]  # 2·size·c
    reach = (2 * length.clamp_min(size))[:, :, None]  # 2·size·s
    # the pixels p with |p + ½ − c| < s, never more than 2·s of them, from ⌊c − s + ½⌋ on
    count = math.ceil(2 * max(size, extent) / size)
    first = (centre - reach + size).div(2 * size, rounding_mode="floor")
    pixel = first + torch.arange(count, device=position.device)
    last = length[:, :, None] - 1
    inside = (pixel >= 0) & (pixel <= last)
    # w = max(0, 1 − |p + ½ − c|/s) inside, and Σw = 1
    weight = (1 - ((2 * pixel + 1) * size - centre).abs() / reach).clamp_min(0) * inside
    index = start[:, :, None] + torch.minimum(pixel.clamp_min(0), last)
    return Taps(index, weight / weight.sum(dim=2, keepdim=True))


def _sum_rows(images: Tensor, taps: Taps) -> Tensor:
    """Replaces the rows of each image by weighted sums of a few of them, as embedding bags compute them.

    On CPUs this is several times faster than multiplying by interpolation matrices, which are nearly all zero.
    """
    count, channels, height, width = images.shape
    size, depth = taps.index.shape[1:]
    table = images.to(torch.float32, memory_format=torch.contiguous_format).reshape(-1, width)
    offset = torch.arange(0, count * channels * height, height, device=images.device).view(count, channels, 1, 1)
    index = (taps.index[:, None] + offset).view(-1, depth)
    weight = taps.weight[:, None].expand(-1, channels, -1, -1).reshape(-1, depth)
    return F.embedding_bag(index, table, per_sample_weights=weight, mode="sum").view(count, channels, size, width)


CHANNELS = 3
CROP_ATTEMPTS = 10
OPERATIONS: tuple[Operation, ...] = ("brightness", "contrast", "saturation", "hue")
# CPUs process a few images at a time, so that intermediate results stay in the cache: twice as fast as all at once.
BLOCK_VALUES = 2**20


@dataclass(frozen=True)
class TransformConfig:
    """Switches of the transforms; defaults are the published code's for object images."""

    crop: bool = switch(True, "cut out a random box and resize it")
    crop_scale_min: float = switch(0.7, "smallest area of the box, as a share of the image", above=0, maximum=1)
    crop_scale_max: float = switch(1.0, "largest area of the box, as a share of the image", above=0, maximum=1)
    crop_ratio_min: float = switch(3 / 4, "smallest ratio of the box's width to its height", above=0)
    crop_ratio_max: float = switch(4 / 3, "largest ratio of the box's width to its height", above=0)
    flip: float = switch(0.5, "probability of mirroring left and right", minimum=0, maximum=1)
    brightness: float = switch(0.3, "brightness factors lie within this of 1; 0: off", minimum=0)
    contrast: float = switch(0.3, "contrast factors lie within this of 1; 0: off", minimum=0)
    saturation: float = switch(0.3, "saturation factors lie within this of 1; 0: off", minimum=0)
    hue: float = switch(
        0.3, "hue rotations lie within this of 0, in full circles, at most 0.5; 0: off", minimum=0, maximum=0.5
    )
    greyscale: float = switch(0.1, "probability of turning an image grey", minimum=0, maximum=1)


OBJECTS = TransformConfig()
CROP_FLIP = TransformConfig(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, greyscale=0.0)
NONE = replace(CROP_FLIP, crop=False, flip=0.0)


@dataclass(frozen=True)
class TransformDraw:
    """All random numbers of one call, one row per image; None for what is switched off."""

    boxes: Tensor | None  # top, left, height and width of the crops (n, 4), integers
    flip: Tensor | None  # which images to mirror (n,)
    order: Tensor | None  # the colour operation at each position (n, operations), as a column of ``factors``
    factors: Tensor | None  # the factor of each colour operation in use (n, operations); for the hue its rotation
    grey: Tensor | None  # which images turn grey (n,)

    def __getitem__(self, rows: slice) -> TransformDraw:
        return TransformDraw(*(None if numbers is None else numbers[rows] for numbers in vars(self).values()))


class Transform:
    """Random transforms to square images of side ``size``; without a crop, others are resized as a whole."""

    def __init__(self, config: TransformConfig, size: int) -> None:
        override(config, as_dict(config))  # checks the range of every value
        problems = [] if size >= 1 else [f"size must be at least 1, got {size}."]
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(config, f"{name}_min"), getattr(config, f"{name}_max")
            if low > high:
                problems.append(f"{name}_min must be at most {name}_max, got {low} and {high}.")
        if problems:
            raise ConfigError(problems)
        self.config = config
        self.size = size
        self.operations = tuple(name for name in OPERATIONS if getattr(config, name))

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Transforms a batch with fresh random numbers; records no gradient and leaves ``images`` unchanged.

        They are (n, 3, height, width), uint8, or of any float type with values in [0, 1], on the generator's device.
        The result is (n, 3, size, size), float32, with values in [0, 1].
        """
        _check(images)
        if images.device.type != generator.device.type:
            raise RatpError(f"images and generator must share a device, got {images.device} and {generator.device}.")
        count, _, height, width = images.shape
        return self.apply(images, self.draw(count, height, width, generator))

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> TransformDraw:
        """Samples all random numbers of one call for ``count`` images of ``height`` × ``width``."""
        if count < 0 or height < 1 or width < 1:
            raise RatpError(f"expected images of 1×1 or more, got {count} of {height}×{width}.")
        config, device = self.config, generator.device
        boxes = flip = order = factors = grey = None
        if config.crop:
            boxes = self._draw_boxes(count, height, width, generator)
        if config.flip:
            flip = torch.rand(count, generator=generator, device=device) < config.flip
        if self.operations:
            shape = count, len(self.operations)
            order = torch.rand(shape, generator=generator, device=device).argsort(dim=1)
            uniform = torch.rand(shape, generator=generator, device=device).unbind(dim=1)
            ranges = [self._factor_range(operation) for operation in self.operations]
            factors = torch.stack([_between(u, *bounds) for u, bounds in zip(uniform, ranges, strict=True)], dim=1)
        if config.greyscale:
            grey = torch.rand(count, generator=generator, device=device) < config.greyscale
        return TransformDraw(boxes, flip, order, factors, grey)

    def apply(self, images: Tensor, draw: TransformDraw) -> Tensor:
        """Transforms ``images`` with numbers sampled for their size; each row depends only on its own numbers."""
        _check(images)
        rows = {len(numbers) for numbers in vars(draw).values() if numbers is not None}
        if rows - {len(images)}:
            raise RatpError(f"expected random numbers for {len(images)} images, got them for {sorted(rows)}.")
        with torch.no_grad():
            return self._apply(images, draw)

    def _apply(self, images: Tensor, draw: TransformDraw) -> Tensor:
        height, width = images.shape[2:]
        boxes, sizes = draw.boxes, None
        if boxes is None and (height, width) != (self.size, self.size):
            boxes = torch.zeros(len(images), 4, dtype=torch.long, device=images.device)
            boxes[:, 2], boxes[:, 3] = height, width
        if boxes is not None:
            sizes = plan_resize(boxes, draw.flip, height, width, self.size)
        colours = plan_colours(self.operations, draw.order, draw.factors, draw.grey)
        result = torch.empty(len(images), CHANNELS, self.size, self.size, device=images.device)
        for rows in self._blocks(images):
            if sizes is not None:
                block = resize(images[rows], sizes[rows])
            else:
                block = images[rows].to(torch.float32, copy=True)
                if draw.flip is not None:
                    block = torch.where(draw.flip[rows, None, None, None], block.flip(3), block)
            if images.dtype == torch.uint8:
                block.div_(255)
            block.clamp_(0, 1)
            result[rows] = block if colours is None else apply_colours_(block, colours[rows])
        return result

    def _blocks(self, images: Tensor) -> Iterator[slice]:
        count, _, height, width = images.shape
        step = max(1, count)
        if images.device.type == "cpu":
            step = max(1, BLOCK_VALUES // (CHANNELS * max(height * width, self.size**2)))
        return (slice(start, start + step) for start in range(0, count, step))

    def _factor_range(self, operation: Operation) -> tuple[float, float]:
        spread = getattr(self.config, operation)
        return (-spread, spread) if operation == "hue" else (max(0.0, 1 - spread), 1 + spread)

    def _draw_boxes(self, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
        """Takes the first of ten random boxes that fits the image, randomly placed; else the largest central one."""
        config = self.config
        attempts = torch.rand(2, count, CROP_ATTEMPTS, generator=generator, device=generator.device)
        place = torch.rand(2, count, generator=generator, device=generator.device)
        area = height * width * _between(attempts[0], config.crop_scale_min, config.crop_scale_max)
        ratio = _between(attempts[1], math.log(config.crop_ratio_min), math.log(config.crop_ratio_max)).exp()
        # width = √(area·ratio),  height = √(area/ratio)
        widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first, found = fits.int().argmax(dim=1, keepdim=True), fits.any(dim=1)
        high, wide = _central_box(height, width, config)
        box_height = heights.gather(1, first)[:, 0].where(found, high)
        box_width = widths.gather(1, first)[:, 0].where(found, wide)
        # uniform over the places where the box fits: ⌊u·(places)⌋
        top = (place[0] * (height + 1 - box_height)).floor().where(found, (height - high) // 2)
        left = (place[1] * (width + 1 - box_width)).floor().where(found, (width - wide) // 2)
        return torch.stack((top, left, box_height, box_width), dim=1).long()


def _central_box(height: int, width: int, config: TransformConfig) -> tuple[int, int]:
    """Height and width of the largest box whose ratio is allowed."""
    if width / height < config.crop_ratio_min:
        return round(width / config.crop_ratio_min), width
    if width / height > config.crop_ratio_max:
        return height, round(height * config.crop_ratio_max)
    return height, width


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform


def _check(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != CHANNELS or 0 in images.shape[2:]:
        raise RatpError(f"expected images of shape (n, {CHANNELS}, height, width), got {tuple(images.shape)}.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise RatpError(f"expected images of type uint8, or float with values in [0, 1], got {images.dtype}.")
