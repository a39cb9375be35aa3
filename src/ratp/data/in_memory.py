"""Images in memory as uint8 tensors: from tensors, arrays, map-style data sets and data loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data._utils.collate import default_collate, default_convert

from ratp._core.environment import Randomness
from ratp.data.decode.pixels import to_rgb
from ratp.errors import RatpError

_CHANNELS = (1, 3)
_ROUNDING = 1e-3  # by which resizing may push a float beyond 0..1


@dataclass(frozen=True)
class Given:
    """Images with the labels they came with.

    Attributes:
        images: uint8 tensor of shape (N, 3, height, width).
        labels: A number or a class name per image; None: there are none.
        classes: Class names by number, if the data set has them.
    """

    images: Tensor
    labels: tuple[int | str, ...] | None = None
    classes: tuple[str, ...] | None = None


def is_pair(data: object) -> bool:
    """Whether this is a tuple of a batch of images and their labels."""
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | np.ndarray) and data[0].ndim > 2


def read_images(data: Any, size: tuple[int, int], where: str) -> Given:
    """Reads all images, in their order, each resized to ``size``.

    Every item of a data set is read once. Random numbers that it draws from torch, numpy or ``random`` are the same
    each time, so that the images are.

    Args:
        data: A batch of images (tensor or array), a tuple of such a batch and its labels, or a map-style data set or
            list of images or (image, label) pairs. Of a ``DataLoader``, its data set is read.
        size: Height and width.
        where: The beginning of messages, such as ``"domain 'rain'"``.
    """
    if is_pair(data):
        images, labels = data
        found = _resized(_batch(images, where), size)
        return Given(found, _labels(labels, len(found), where))
    if isinstance(data, Tensor | np.ndarray):
        return Given(_resized(_batch(data, where), size))
    return _read_items(_data_set(data, where), size, where)


def longest_side(data: Any, where: str) -> int:
    """Returns the longest side of the first image, in pixels."""
    if is_pair(data):
        data = data[0]
    if isinstance(data, Tensor | np.ndarray):
        first = data[:1, None] if data.ndim == 3 and data.shape[0] not in _CHANNELS else data[:1]
        return max(_batch(first, where).shape[2:])
    items = _data_set(data, where)
    with _repeatable():
        return max(_split(_item(items, 0, where), where)[0].shape[1:])


def _data_set(data: Any, where: str) -> Any:
    """Returns what the items are read from, after checking that it has a length and no order of its own."""
    if isinstance(data, DataLoader):
        _check_loader(data, where)
        data = data.dataset
    wanted = f"{where}: give a tensor, a tuple (images, labels), or a data set with a length and items by number"
    if isinstance(data, str | bytes | dict) or not hasattr(data, "__getitem__") or isinstance(data, IterableDataset):
        endless = " It can only be iterated over: turn it into a list first." if hasattr(data, "__iter__") else ""
        raise RatpError(f"{wanted}; got {type(data).__name__}.{'' if isinstance(data, str | dict) else endless}")
    try:
        count = len(data)
    except (TypeError, NotImplementedError) as error:
        raise RatpError(f"{wanted}; {type(data).__name__} has no length.") from error
    if count == 0:
        raise RatpError(f"{where} is empty: it needs at least one image.")
    return data


def _check_loader(loader: DataLoader[Any], where: str) -> None:
    """Refuses a loader that gives other images than its data set."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if not isinstance(loader.dataset, IterableDataset) and (
        type(sampler) not in (SequentialSampler, RandomSampler) or type(batches) not in (BatchSampler, type(None))
    ):
        kind = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise RatpError(
            f"{where}: the loader's {kind} chooses images, and ratp draws its own batches: give the data set, or "
            "torch.utils.data.Subset(dataset, indices) for a part of it."
        )
    if loader.collate_fn not in (default_collate, default_convert):
        raise RatpError(
            f"{where}: the loader has a collate_fn, which ratp does not call: give the data set, and let its items be "
            "images or (image, label) pairs."
        )


def _read_items(items: Any, size: tuple[int, int], where: str) -> Given:
    images = torch.empty((len(items), 3, *size), dtype=torch.uint8)
    labels: list[Any] = []
    with _repeatable():
        for index in range(len(items)):
            place = f"{where}, item {index}"
            image, *label = _split(_item(items, index, where), place)
            images[index] = _resized(image[None], size)[0]
            labels += label
            if labels and len(labels) != index + 1:
                raise RatpError(f"{place}: some items have a label and some have none: all or none must have one.")
    found = _labels(labels, len(items), where) if labels else None
    return Given(images, found, _class_names(items))


def _item(items: Any, index: int, where: str) -> Any:
    try:
        return items[index]
    except Exception as error:  # of any kind: the data set is the user's
        reason = f"{type(error).__name__}: {error}"
        raise RatpError(f"{where}: item {index} of {len(items)} cannot be read ({reason}).") from error


def _split(item: Any, where: str) -> tuple[Tensor] | tuple[Tensor, Any]:
    """Returns the image of an item, uint8 of shape (3, height, width), and its label if it has one."""
    if isinstance(item, tuple | list):
        if len(item) not in (1, 2):
            raise RatpError(f"{where}: an item must be an image or (image, label), got {len(item)} values.")
        return (_image(item[0], where), *item[1:])
    return (_image(item, where),)


def _image(value: Any, where: str) -> Tensor:
    if isinstance(value, Image.Image):
        value = np.array(to_rgb(value, False, []))
    if not isinstance(value, Tensor | np.ndarray):
        raise RatpError(f"{where}: an image must be a PIL image, an array or a tensor, got {type(value).__name__}.")
    if value.ndim == 2:
        value = value[None]
    if value.ndim != 3:
        raise RatpError(f"{where}: an image must have three dimensions, got shape {tuple(value.shape)}.")
    # arrays usually have their channels last, tensors first
    last_first = isinstance(value, np.ndarray) and value.shape[-1] in _CHANNELS
    image = torch.as_tensor(value).permute(2, 0, 1) if last_first else torch.as_tensor(value)
    return _batch(image[None], where)[0]


def _batch(images: Tensor | np.ndarray[Any, Any], where: str) -> Tensor:
    """Returns a batch as uint8 of shape (N, 3, height, width)."""
    given = torch.as_tensor(images).detach().cpu()
    shape = tuple(given.shape)
    if not shape or not shape[0]:
        raise RatpError(f"{where} is empty: it needs at least one image.")
    if given.ndim == 3 and shape[0] not in _CHANNELS:
        given = given[:, None]
    if given.ndim != 4 or 0 in shape:
        one = " For a single image: images[None]; for grey ones: images[:, None]" if given.ndim == 3 else ""
        raise RatpError(f"{where}: images must have the shape (N, 3, height, width), got {shape}.{one}")
    if given.shape[1] not in _CHANNELS and given.shape[3] in _CHANNELS:
        given = given.permute(0, 3, 1, 2)
    if given.shape[1] not in _CHANNELS:
        alpha = " Without the alpha channel: images[:, :3]" if given.shape[1] == 4 else ""
        raise RatpError(f"{where}: images must have 1 or 3 channels, got shape {shape}.{alpha}")
    return _bytes(given, where).expand(-1, 3, -1, -1).contiguous()


def _bytes(images: Tensor, where: str) -> Tensor:
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise RatpError(f"{where}: images must be uint8 or floats of 0 to 1, got {images.dtype}: .to(torch.uint8)")
    low, high = images.min().item(), images.max().item()
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):  # also NaN
        raise RatpError(
            f"{where}: float images must lie within 0..1, got {low:.3g}..{high:.3g}. ratp normalises images itself: "
            "leave out Normalize, and divide values of 0 to 255 by 255."
        )
    return (255 * images.float()).round().clamp(0, 255).to(torch.uint8)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes uint8 images, each as image files are: bilinear with antialiasing and without cropping."""
    if tuple(images.shape[2:]) == size:
        return images
    shape = (size[1], size[0])
    small = torch.empty((len(images), 3, *size), dtype=torch.uint8)
    for row, image in zip(small, images, strict=True):
        pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        row.copy_(torch.from_numpy(np.array(pixels.resize(shape, Image.Resampling.BILINEAR))).permute(2, 0, 1))
    return small


def _labels(labels: Any, count: int, where: str) -> tuple[int | str, ...]:
    listed = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise RatpError(f"{where}: labels must be a list or tensor with one per image, got {type(labels).__name__}.")
    if len(listed) != count:
        raise RatpError(f"{where}: {count} images, but {len(listed)} labels: each image needs one.")
    plain = tuple(_label(label, where) for label in listed)
    if len({type(label) for label in plain}) > 1:
        raise RatpError(f"{where}: labels must be all whole numbers or all class names, got both.")
    return plain


def _label(label: Any, where: str) -> int | str:
    if isinstance(label, Tensor | np.generic) and getattr(label, "ndim", 0) == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise RatpError(f"{where}: a label must be a whole number or a class name, got {label!r}.")
    return label


def _class_names(items: Any) -> tuple[str, ...] | None:
    """Returns the class names of a data set, as those of torchvision have them, also of a part of one."""
    while not hasattr(items, "classes") and hasattr(items, "dataset"):
        items = items.dataset
    names = getattr(items, "classes", None)
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list and names and len(set(names)) == len(names) else None


@contextmanager
def _repeatable() -> Iterator[None]:
    """Seeds the global generators within the block and restores them afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    try:
        with Randomness(0).scope("reading"):
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
