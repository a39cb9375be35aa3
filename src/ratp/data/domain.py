"""A domain: a named set of images from one distribution.

Labelled and unlabelled domains are different types. A method that adapts receives an :class:`UnlabelledDomain`, which
has no labels to leak.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratp.data.streamed import LARGE, StreamedImages
from ratp.errors import RatpError


def check_images(images: Tensor, size: tuple[int, int] | None = None, where: str = "") -> None:
    """Refuses anything but a uint8 image tensor, without reading a pixel.

    Args:
        images: What was given.
        size: Height and width they must have; None: any.
        where: The beginning of the message.
    """
    height, width = size or ("height", "width")
    wanted = f"{where}images must be a uint8 tensor of shape (N, 3, {height}, {width})"
    if not isinstance(images, Tensor):
        raise RatpError(f"{wanted}, got {type(images).__name__}.")
    found = f"got {images.dtype} of shape {tuple(images.shape)}"
    if images.ndim != 4 or images.shape[1] != 3:
        grey = images.ndim == 4 and images.shape[1] == 1
        raise RatpError(f"{wanted}, {found}." + (" Grey: images.expand(-1, 3, -1, -1)" if grey else ""))
    if images.dtype != torch.uint8:
        unit = " From values of 0 to 1: (255 * images).round().to(torch.uint8)"
        raise RatpError(f"{wanted}, {found}." + (unit if images.is_floating_point() else ""))
    if size is not None and tuple(images.shape[2:]) != size:
        raise RatpError(f"{wanted}, {found}. Resize them first.")


def _check_domain(name: str, images: Tensor) -> None:
    check_images(images, where=f"domain {name!r}: ")
    if not len(images):
        raise RatpError(f"domain {name!r} is empty: a domain needs at least one image.")


@dataclass(frozen=True, eq=False)
class UnlabelledDomain:
    """Images without labels: the part of a target domain that a method sees.

    Attributes:
        name: Short name, as written in an order.
        images: uint8 tensor of shape (N, 3, height, width).
        manifest: Hash of the files the images come from, if they come from files.
    """

    name: str
    images: Tensor
    manifest: str | None = None

    def __post_init__(self) -> None:
        _check_domain(self.name, self.images)

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        """Identifies the domain: the hash of its files, or else sha256 of name and images."""
        if self.manifest is not None:
            return self.manifest
        digest = hashlib.sha256(repr((self.name, tuple(self.images.shape))).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device) -> UnlabelledDomain:
        """Returns the same domain with its images on ``device``."""
        return replace(self, images=self.images.to(device))


@dataclass(frozen=True, eq=False)
class LabelledDomain:
    """Images with labels: a source domain, or a test set for the evaluator.

    Attributes:
        name: Short name, as written in an order.
        images: uint8 tensor of shape (N, 3, height, width).
        labels: int64 tensor of shape (N,), indices into ``classes``.
        classes: Class names.
        held_out: bool tensor of shape (N,): the data set's own test part, or None if it has none.
        manifest: Hash of the files the images come from, if they come from files.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    held_out: Tensor | None = None
    manifest: str | None = None

    def __post_init__(self) -> None:
        _check_domain(self.name, self.images)
        if not isinstance(self.labels, Tensor):
            raise RatpError(
                f"domain {self.name!r}: labels must be a tensor of whole numbers, one per image, got "
                f"{type(self.labels).__name__}: torch.tensor(labels)"
            )
        if self.labels.shape != (len(self.images),) or self.labels.dtype != torch.int64:
            raise RatpError(
                f"domain {self.name!r}: labels must be int64 of shape ({len(self.images)},), "
                f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}."
            )
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= len(self.classes):
            raise RatpError(
                f"domain {self.name!r}: labels must lie in 0..{len(self.classes) - 1}, "
                f"got {int(self.labels.min())}..{int(self.labels.max())}."
            )
        twice = [name for name, count in Counter(self.classes).items() if count > 1]
        if twice:
            raise RatpError(f"domain {self.name!r}: class names must be unique, {twice[0]!r} is given twice.")
        if self.held_out is not None and (
            self.held_out.shape != self.labels.shape or self.held_out.dtype != torch.bool
        ):
            raise RatpError(f"domain {self.name!r}: held_out must be a bool tensor with one entry per image.")

    def __len__(self) -> int:
        return len(self.images)

    def unlabelled(self) -> UnlabelledDomain:
        """Returns the same images without labels."""
        return UnlabelledDomain(self.name, self.images)

    def subset(self, index: Tensor) -> LabelledDomain:
        """Returns the images at ``index`` (bool mask or positions) as a domain without a test part."""
        return replace(self, images=selected(self.images, index), labels=self.labels[index], held_out=None)

    def to(self, device: torch.device) -> LabelledDomain:
        """Returns the same domain with its tensors on ``device``."""
        held_out = None if self.held_out is None else self.held_out.to(device)
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), held_out=held_out)

    def fingerprint(self) -> str:
        """Identifies the domain: the hash of its files, or else sha256 of names, images, labels and test part."""
        if self.manifest is not None:
            return self.manifest
        digest = hashlib.sha256(repr((self.name, self.classes, tuple(self.images.shape))).encode())
        for tensor in (self.images, self.labels, self.held_out):
            if tensor is not None:
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def selected(images: Tensor, index: Tensor) -> Tensor:
    """Returns the images at ``index`` (bool mask or positions): a copy, or of large domains a stand-in."""
    if not isinstance(images, StreamedImages) and (images.device.type != "cpu" or images.nbytes < LARGE):
        return images[index]
    rows = index.nonzero().squeeze(1) if index.dtype == torch.bool else index
    return StreamedImages(images, images.device, rows.cpu())
