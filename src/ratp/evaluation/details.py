"""What a model gets wrong on a domain: confusions, calibration, and pictures. Needs no torch, so reports can read it.

A run keeps the counts on its labelled domains after every stage (``details-STAGE.json``) and, of every target after the
last stage, a few pictures (``examples.json``).
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ratp._core.files import DETAILS, EXAMPLES, LostFileError, Schema, read_json, write_text
from ratp.errors import RatpError, RunDirectoryError

if TYPE_CHECKING:
    from torch import Tensor

# Intervals of confidence of equal width.
BINS = 15
PICTURES = 8  # of each kind per domain
_SIDE = 96  # pixels of a picture
_QUALITY = 82
_JPEG = b"\xff\xd8\xff"
_Z = 1.959964  # of a 95 % interval
EXAMPLES_FILE = "examples.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Bin:
    """The predictions whose confidence lies in one interval: how many, how many are right, the sum of confidences."""

    images: int
    right: int
    confidence: float


@dataclass(frozen=True)
class Details:
    """Counts of the predictions on the test images of a domain.

    Attributes:
        confusion: Number of images by true and predicted class, where there are any.
        bins: By confidence, in :data:`BINS` intervals from 0 to 1.
    """

    confusion: Mapping[tuple[int, int], int]
    bins: tuple[Bin, ...]

    @property
    def images(self) -> int:
        """Number of images."""
        return sum(self.confusion.values())

    @property
    def right(self) -> int:
        """Number of right predictions."""
        return sum(count for (true, predicted), count in self.confusion.items() if true == predicted)

    @property
    def by_class(self) -> dict[int, tuple[int, int]]:
        """Images and right predictions of every class that has images."""
        images: Counter[int] = Counter()
        for (true, _), count in self.confusion.items():
            images[true] += count
        return {true: (images[true], self.confusion.get((true, true), 0)) for true in sorted(images)}

    @property
    def calibration_error(self) -> float:
        """Expected calibration error in percent: the mean distance of confidence and accuracy, weighted by images."""
        return 100 * math.fsum(abs(one.right - one.confidence) for one in self.bins) / self.images

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        cells = [[true, predicted, count] for (true, predicted), count in sorted(self.confusion.items())]
        return {"confusion": cells, "bins": [[one.images, one.right, one.confidence] for one in self.bins]}

    @staticmethod
    def from_json(data: Any) -> Details:
        """Reads what :meth:`to_json` wrote."""
        try:
            confusion = {(true, predicted): count for true, predicted, count in data["confusion"]}
            found = Details(confusion, tuple(Bin(*one) for one in data["bins"]))
            sound = found._is_sound()
        except (KeyError, TypeError, ValueError) as error:
            raise RatpError(f"not the counts of a domain: {error!r}.") from error
        if not sound:
            raise RatpError("the counts of a domain are impossible.")
        return found

    def _is_sound(self) -> bool:
        numbers = [*self.confusion.values(), *(number for cell in self.confusion for number in cell)]
        numbers += [number for one in self.bins for number in (one.images, one.right)]
        return (
            all(type(number) is int and number >= 0 for number in numbers)
            and len(self.bins) == BINS
            and all(one.right <= one.images and 0 <= one.confidence <= 1.001 * one.images for one in self.bins)
            and 0 < self.images == sum(one.images for one in self.bins)
            and self.right == sum(one.right for one in self.bins)
        )


@dataclass(frozen=True)
class Example:
    """A picture with its prediction.

    Attributes:
        file: Name of the image's file, or its number.
        predicted: Name of the predicted class.
        true: Name of the true class; None without labels.
        confidence: The model's probability of the predicted class.
        picture: A small JPEG, in base64.
    """

    file: str
    predicted: str
    true: str | None
    confidence: float
    picture: str


@dataclass(frozen=True)
class Examples:
    """Pictures of a domain: the most confident mistakes (none without labels) and the least certain predictions."""

    mistakes: tuple[Example, ...]
    uncertain: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Examples:
        """Reads what :meth:`to_json` wrote."""
        try:
            found = Examples(*(tuple(Example(**one) for one in data[kind]) for kind in ("mistakes", "uncertain")))
            sound = all(map(_is_sound, (*found.mistakes, *found.uncertain)))
        except (KeyError, TypeError, ValueError) as error:
            raise RatpError(f"not the pictures of a domain: {error!r}.") from error
        if not sound or max(len(found.mistakes), len(found.uncertain)) > PICTURES:
            raise RatpError("the pictures of a domain are damaged.")
        return found


class DetailFiles:
    """The files of a run's directory that hold details; ``fingerprint`` is the run's, if it is known."""

    def __init__(self, folder: Path, fingerprint: str | None) -> None:
        self._folder, self._fingerprint = folder, fingerprint

    def read(self, stage: int) -> dict[str, Details]:
        """Reads the counts after a stage by domain; nothing if there is no file."""
        path = self._path(stage)
        return self.read_file(path) if path.is_file() else {}

    def read_file(self, path: Path) -> dict[str, Details]:
        """Reads a file of counts."""
        return self._read(path, DETAILS, Details.from_json)

    def read_examples(self) -> dict[str, Examples]:
        """Reads the pictures by domain; nothing if there is no file."""
        path = self._folder / EXAMPLES_FILE
        return self._read(path, EXAMPLES, Examples.from_json) if path.is_file() else {}

    def write(self, stage: int, found: Mapping[str, Details]) -> None:
        """Writes the counts after a stage."""
        self._write(self._path(stage), DETAILS, found)

    def write_examples(self, found: Mapping[str, Examples]) -> None:
        """Writes the pictures."""
        self._write(self._folder / EXAMPLES_FILE, EXAMPLES, found)

    def keep(self, stage: int, other: DetailFiles, number: int) -> None:
        """Takes over the counts after a stage that another run, or this one, has; nothing if they are damaged."""
        with suppress(RunDirectoryError):
            self.write(stage, other.read(number))

    def _path(self, stage: int) -> Path:
        return self._folder / f"details-{stage}.json"

    def _read(self, path: Path, schema: Schema, read: Callable[[Any], T]) -> dict[str, T]:
        about = schema.read(read_json(path), path)
        if self._fingerprint not in (None, about.get("fingerprint")):
            raise LostFileError(f"{path} belongs to another run.")
        try:
            return {name: read(one) for name, one in about["domains"].items()}
        except (RatpError, KeyError, AttributeError) as error:
            raise LostFileError(f"{path} is damaged: {error}") from error

    def _write(self, path: Path, schema: Schema, found: Mapping[str, Details | Examples]) -> None:
        """Writes a file on one line, because it may hold many numbers; nothing if there is nothing to keep."""
        if found:
            domains = {name: one.to_json() for name, one in found.items()}
            data = schema.marked({"fingerprint": self._fingerprint, "domains": domains})
            write_text(path, json.dumps(data, allow_nan=False) + "\n")


def _is_sound(one: Example) -> bool:
    texts = (one.file, one.predicted, one.picture, *(() if one.true is None else (one.true,)))
    return (
        all(isinstance(text, str) for text in texts)
        and 0 <= one.confidence <= 1.001
        and base64.b64decode(one.picture, validate=True).startswith(_JPEG)
    )


def as_picture(image: Tensor) -> str:
    """Returns a uint8 image of shape (3, height, width) as a small JPEG in base64."""
    from PIL import Image

    picture = Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def interval(percent: float, images: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval (Wilson) of an accuracy in percent that was measured on some images."""
    share, square = percent / 100, _Z**2 / images
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / images + square / (4 * images))
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)


def interval_of_mean(percents: Sequence[float], images: Sequence[int]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a mean of accuracies on different images.

    It joins the intervals of the accuracies by the method of variance estimates recovery (Zou and Donner, 2008).
    """
    mean = math.fsum(percents) / len(percents)
    ends = [(p, *interval(p, n)) for p, n in zip(percents, images, strict=True)]
    below = math.sqrt(math.fsum((p - low) ** 2 for p, low, _ in ends)) / len(ends)
    above = math.sqrt(math.fsum((high - p) ** 2 for p, _, high in ends)) / len(ends)
    return mean - below, mean + above
