"""Images on a GPU: one copy of a domain for all runs of this process; a domain that is too large is streamed."""

from __future__ import annotations

import threading
import warnings
import weakref
from dataclasses import replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.data.streamed import StreamedImages
from ratp.errors import ConfigError, Note, unknown

D = TypeVar("D", LabelledDomain, UnlabelledDomain)
Placement = Literal["auto", "resident", "streamed"]

# Share of the free memory of a GPU that images may take; the rest is for training.
MOST = 0.6
_lock = threading.Lock()
_copies: dict[tuple[torch.device, torch.Size], list[weakref.ref[Tensor]]] = {}


class StreamedWarning(Note):
    """A domain is too large for its device."""


def check_placement(images: str) -> None:
    """Raises a ConfigError unless this says where images are."""
    if images not in get_args(Placement):
        raise ConfigError(unknown("place for images", images, get_args(Placement)))


def with_images_on(domain: D, device: torch.device, images: Placement = "auto") -> D:
    """Returns the domain with its images on ``device``, where runs with the same images share them.

    The copy must not be written to; it is freed when nothing refers to it. Images that are ``streamed``, or do not fit,
    stay in host memory, and batches of them are copied to the device.
    """
    if images == "streamed" or (images == "auto" and not _fits(domain, device)):
        return replace(domain, images=StreamedImages(domain.images, device))
    if domain.images.device.type == device.type:
        return domain
    return replace(domain, images=shared_copy(domain.images, device))


def _fits(domain: LabelledDomain | UnlabelledDomain, device: torch.device) -> bool:
    """Whether the images fit on the device beside the training; a note says so if not."""
    if device.type != "cuda" or domain.images.device.type == "cuda":
        return True
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, needed = torch.cuda.mem_get_info(device)[0] + unused, domain.images.nbytes
    if needed <= MOST * free:
        return True
    sizes = f"take {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free on {device}"
    text = f"the images of {domain.name} {sizes}: they stay in host memory and are copied batch by batch"
    warnings.warn(text, StreamedWarning, stacklevel=3)
    return False


def shared_copy(images: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of images on ``device``, an existing one if its contents are the same.

    The copy is complete on return, whichever stream the caller uses.
    """
    key = (device, images.shape)
    with _lock:
        copy = images.to(device)
        held = [tensor for reference in _copies.get(key, ()) if (tensor := reference()) is not None]
        found = next((tensor for tensor in held if torch.equal(tensor, copy)), copy)
        _copies[key] = [weakref.ref(tensor) for tensor in (held if found is not copy else [*held, copy])]
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            stream.synchronize()
            found.record_stream(stream)  # the memory is not reused before this stream has finished with it
    return found
