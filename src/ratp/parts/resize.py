"""Antialiased bilinear resizing in which every image of a batch has a box of its own.

The result equals cutting out each box and resizing it alone: nothing outside of the box is seen. Along each
axis a position of the result is a weighted sum of the few pixels under a triangle, which is as wide as the
distance of two pixels when enlarging and grows with the box when shrinking it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class Taps:
    """The pixels each position of a resized axis is made of (n, size, taps), and their weights."""

    index: Tensor
    weight: Tensor

    def __getitem__(self, rows: slice) -> Taps:
        return Taps(self.index[rows], self.weight[rows])


@dataclass(frozen=True)
class ResizePlan:
    """What the columns and the rows of the results are made of."""

    columns: Taps
    rows: Taps

    def __getitem__(self, rows: slice) -> ResizePlan:
        return ResizePlan(self.columns[rows], self.rows[rows])


def plan_resize(boxes: Tensor, flip: Tensor | None, height: int, width: int, size: int) -> ResizePlan:
    """Where the pixels of the results come from.

    Args:
        boxes: Top, left, height and width (n, 4), within the images.
        flip: Which results to mirror left and right (n,), or None.
        height: Height of the images.
        width: Width of the images.
        size: Height and width of the results.
    """
    top, left, box_height, box_width = boxes[:, :, None].unbind(dim=1)
    rows = torch.arange(size, device=boxes.device)[None]
    columns = rows if flip is None else torch.where(flip[:, None], size - 1 - rows, rows)
    return ResizePlan(_taps(columns, left, box_width, size, width), _taps(rows, top, box_height, size, height))


def resize(images: Tensor, plan: ResizePlan) -> Tensor:
    """Resizes images (n, channels, height, width) of any real type to float32 (n, channels, size, size)."""
    return _sum_rows(_sum_rows(images.transpose(2, 3), plan.columns).transpose(2, 3), plan.rows)


def _taps(position: Tensor, start: Tensor, length: Tensor, size: int, extent: int) -> Taps:
    """The filter at each ``position`` of an axis of ``extent`` pixels, of which ``length`` from ``start`` are seen.

    Distances are whole multiples of half a pixel over ``size``, so that all devices find the same weights.
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
    """Replaces the rows of each image by weighted sums of a few of them, which is what embedding bags compute.

    On CPUs this is several times faster than products with interpolation matrices, which are nearly all zero.
    """
    count, channels, height, width = images.shape
    size, depth = taps.index.shape[1:]
    table = images.to(torch.float32, memory_format=torch.contiguous_format).reshape(-1, width)
    offset = torch.arange(0, count * channels * height, height, device=images.device).view(count, channels, 1, 1)
    index = (taps.index[:, None] + offset).view(-1, depth)
    weight = taps.weight[:, None].expand(-1, channels, -1, -1).reshape(-1, depth)
    return F.embedding_bag(index, table, per_sample_weights=weight, mode="sum").view(count, channels, size, width)
