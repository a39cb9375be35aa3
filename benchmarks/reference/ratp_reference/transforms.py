"""The transforms image by image with torchvision."""

from __future__ import annotations

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V  # noqa: N812

ADJUST = {
    "brightness": V.adjust_brightness,
    "contrast": V.adjust_contrast,
    "saturation": V.adjust_saturation,
    "hue": V.adjust_hue,
}


def crop(image, box, size):
    """Cuts out (top, left, height, width) and resizes it."""
    top, left, height, width = box
    return V.resized_crop(image, top, left, height, width, [size, size], antialias=True)


def transform(images, draw, operations, size):
    """Every image with its row of the random numbers, step by step."""
    results = []
    for row, image in enumerate(images):
        result = image
        if draw.boxes is not None:
            result = crop(result, draw.boxes[row].tolist(), size)
        elif tuple(image.shape[1:]) != (size, size):
            result = V.resize(result, [size, size], antialias=True)
        if draw.flip is not None and draw.flip[row]:
            result = V.horizontal_flip(result)
        if draw.order is not None:
            for column in draw.order[row].tolist():
                result = ADJUST[operations[column]](result, draw.factors[row, column].item())
        if draw.grey is not None and draw.grey[row]:
            result = V.rgb_to_grayscale(result, num_output_channels=3)
        results.append(result)
    return torch.stack(results)


def random_crop(config, size):
    """The random crop of torchvision."""
    return v2.RandomResizedCrop(
        size,
        scale=(config.crop_scale_min, config.crop_scale_max),
        ratio=(config.crop_ratio_min, config.crop_ratio_max),
        antialias=True,
    )


def colour_jitter(config):
    """The colour jitter of torchvision."""
    return v2.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)


def pipeline(config, size):
    """All of torchvision's random transforms."""
    return v2.Compose(
        [
            random_crop(config, size),
            v2.RandomHorizontalFlip(config.flip),
            colour_jitter(config),
            v2.RandomGrayscale(config.greyscale),
        ]
    )
