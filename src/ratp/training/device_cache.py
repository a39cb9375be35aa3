"""Images on a GPU: one copy of a domain for all runs of this process that train on it at the same time."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ratp.data.domain import LabelledDomain, UnlabelledDomain

D = TypeVar("D", LabelledDomain, UnlabelledDomain)

_lock = threading.Lock()
_copies: dict[tuple[torch.device, torch.Size], list[weakref.ref[Tensor]]] = {}


def with_images_on(domain: D, device: torch.device) -> D:
    """Returns the domain with its images on ``device``, where runs with the same images share them.

    The copy must not be written to; it is freed when nothing refers to it.
    """
    if domain.images.device.type == device.type:
        return domain
    return replace(domain, images=shared_copy(domain.images, device))


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
