"""Images on the device: one copy of a domain for all runs of this process that train on it at the same time."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ratp.domain import LabelledDomain, UnlabelledDomain

D = TypeVar("D", LabelledDomain, UnlabelledDomain)

_lock = threading.Lock()
_copies: dict[tuple[torch.device, torch.Size], list[weakref.ref[Tensor]]] = {}


def with_images_on(domain: D, device: torch.device) -> D:
    """The same domain with its images on ``device``, where runs that have the same images share them.

    The copy lives as long as somebody holds it. Nobody may write to it.
    """
    if domain.images.device.type == device.type:
        return domain
    return replace(domain, images=shared_copy(domain.images, device))


def shared_copy(images: Tensor, device: torch.device) -> Tensor:
    """Images on ``device``: a copy somebody holds already, if it has the same contents, else a new one.

    It is complete when it is handed out, whichever stream the caller uses it on.
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
            found.record_stream(stream)  # the memory is given to nobody else before this stream is done with it
    return found
