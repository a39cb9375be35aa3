"""Images that stay in host memory, mostly in a mapped file, and reach the device only where they are used.

They stand in for a tensor of images on the device, so that code need not know where the images are. Consecutive slices
are read ahead: while one is in use, a thread copies the next through pinned memory on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ratp.data.decode.pixel_file import check_whole

# From this size on, a part of a domain is not copied in host memory.
LARGE = 4 * 2**30
# Bytes of a part of all images.
_PART = 2**25
# What a stand-in knows without its images.
_ABOUT = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "nbytes", "layout", "requires_grad")} | {
    Tensor.__len__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
}


class Sent(NamedTuple):
    """Images on their way to a device.

    Attributes:
        images: The images, which must not be used before ``event``.
        event: The end of the copy; None unless the device is an NVIDIA GPU.
    """

    images: Tensor
    event: torch.cuda.Event | None

    def arrived(self) -> Tensor:
        """Returns the images, for use on the current stream."""
        if self.event is not None:
            current = torch.cuda.current_stream(self.images.device)
            current.wait_event(self.event)
            self.images.record_stream(current)
        return self.images


class StreamedImages(Tensor):
    """Stands in for uint8 images on a device. Indexing returns images there; anything else first copies all of them.

    Args:
        images: The images, in host memory.
        device: Where they are needed.
        rows: Indices of those that count, int64; None: all.
    """

    _host: Tensor
    _rows: Tensor | None
    _device: torch.device
    _ahead: tuple[range, Future[Sent]] | None

    def __new__(cls, images: Tensor, device: torch.device, rows: Tensor | None = None) -> StreamedImages:
        """Makes a stand-in, which takes no memory."""
        if isinstance(images, StreamedImages):
            rows = images._rows if rows is None else rows if images._rows is None else images._rows[rows]
            images = images._host
        count = len(images) if rows is None else len(rows)
        blank = torch.empty((), dtype=torch.uint8).expand(count, *images.shape[1:])
        self: StreamedImages = Tensor._make_subclass(cls, blank)
        self._host, self._rows, self._device, self._ahead = images, rows, torch.device(device), None
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers for the images on the device."""
        kwargs = kwargs or {}
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        first = args[0] if args and isinstance(args[0], StreamedImages) else None
        if first is not None:
            if func is Tensor.device.__get__:
                return first._device
            if func is Tensor.__getitem__:
                return first._at(args[1])
            if func is Tensor.to and len(args) == 2 and not kwargs and isinstance(args[1], torch.device):
                return first if args[1].type == first._device.type else first.resident(args[1])
        return func(*map(_whole, args), **{name: _whole(value) for name, value in kwargs.items()})

    def gathered(self, rows: Tensor | slice, out: Tensor | None = None) -> Tensor:
        """Returns images in host memory, perhaps in ``out``; a mapped file is read now.

        Raises:
            RunDirectoryError: If the file has become shorter.
        """
        check_whole(self._host)
        if isinstance(rows, slice):
            if self._rows is None:
                return self._host[rows] if out is None else out.copy_(self._host[rows])
            rows = self._rows[rows]
        else:
            rows = torch.where(rows < 0, rows + len(self), rows)
            rows = rows if self._rows is None else self._rows[rows]
        return torch.index_select(self._host, 0, rows, out=out) if out is not None else self._host[rows]

    def resident(self, device: torch.device) -> Tensor:
        """Copies all images to a device, part by part."""
        if device.type == "cpu":
            return self.gathered(slice(None))
        whole, parts = torch.empty(self.shape, dtype=torch.uint8, device=device), StreamedImages(self, device)
        each = max(_PART // max(self[:1].nbytes, 1), 1)
        for start in range(0, len(self), each):
            whole[start : start + each] = parts[start : start + each]
        return whole

    def sent(self, rows: Tensor | slice, count: int) -> Sent:
        """Begins to copy ``count`` images to the device, on a stream of its own if it is an NVIDIA GPU."""
        if self._device.type != "cuda":
            return Sent(self.gathered(rows).to(self._device), None)
        with torch.cuda.stream(copying_stream(self._device)):
            pinned = torch.empty(count, *self.shape[1:], dtype=torch.uint8, pin_memory=True)
            self.gathered(rows, pinned)
            images = pinned.to(self._device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Sent(images, event)

    def _at(self, index: Any) -> Tensor:
        if isinstance(index, slice):
            return self._slice(range(*index.indices(len(self))))
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim == 1:
            index = index.nonzero().squeeze(1)
        if isinstance(index, int):
            return self.sent(torch.tensor([index]), 1).arrived()[0]
        if isinstance(index, Tensor) and index.ndim == 1 and not index.is_floating_point():
            return self.sent(index.cpu().long(), len(index)).arrived()
        whole: Tensor = _whole(self)[index]
        return whole

    def _slice(self, rows: range) -> Tensor:
        """Returns consecutive images and, on an NVIDIA GPU, has the next as many read meanwhile."""
        if self._device.type != "cuda" or rows.step != 1:
            return self.gathered(slice(rows.start, rows.stop, rows.step)).to(self._device)
        ahead, self._ahead = self._ahead, None
        sent = ahead[1].result() if ahead and ahead[0] == rows else self._send(rows)
        following = range(rows.stop, min(rows.stop + len(rows), len(self)))
        if following:
            self._ahead = following, _reader().submit(self._send, following)
        return sent.arrived()

    def _send(self, rows: range) -> Sent:
        return self.sent(slice(rows.start, rows.stop), len(rows))


def _whole(value: Any) -> Any:
    """Copies all images of a stand-in to its device."""
    if isinstance(value, StreamedImages):
        return value.resident(value._device)
    if isinstance(value, list | tuple) and any(isinstance(item, StreamedImages) for item in value):
        return type(value)(map(_whole, value))
    return value


@cache
def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which images are copied to a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "read-ahead")
