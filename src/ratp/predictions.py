"""What a trained model says about images without labels, and ``predictions-*.csv``, where a run writes it down."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ratp.domain import UnlabelledDomain
from ratp.files import safe_name, write_text
from ratp.method import Method
from ratp.stream import Stream


class Prediction(NamedTuple):
    """What a model says about one image.

    Attributes:
        file: Name of its file.
        label: Name of the class.
        confidence: Probability the model gives it.
    """

    file: str
    label: str
    confidence: float


def predictions_of(logits: Tensor, files: Sequence[str], classes: Sequence[str]) -> list[Prediction]:
    """The likeliest class of every image, from its row of logits."""
    confidence, label = logits.softmax(dim=1).max(dim=1)
    rows = zip(files, label.tolist(), confidence.tolist(), strict=True)
    return [Prediction(file, classes[k], share) for file, k, share in rows]


def as_csv(predictions: Iterable[Prediction]) -> str:
    """Predictions as a table of text: file, class, confidence."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("file", "class", "confidence"))
    writer.writerows((file, label, f"{share:.4f}") for file, label, share in predictions)
    return table.getvalue()


def prediction_files(stream: Stream, folder: Path) -> dict[Path, UnlabelledDomain]:
    """The domains without labels, each with a file of its own."""
    found: dict[Path, UnlabelledDomain] = {}
    names: list[str] = []
    for domain in stream.unlabelled:
        plain = name = safe_name(domain.name)
        again = 1
        while name.lower() in names:  # some file systems know no case
            again += 1
            name = f"{plain}-{again}"
        names.append(name.lower())
        found[folder / f"predictions-{name}.csv"] = domain
    return found


def write_predictions(method: Method, stream: Stream, folder: Path) -> None:
    """Writes what a method says about every image of these domains, unless it is written already."""
    for path, domain in prediction_files(stream, folder).items():
        if path.exists():
            continue
        files = stream.files.get(domain.name) or [str(k) for k in range(len(domain))]
        write_text(path, as_csv(predictions_of(method.predict(domain.images), files, stream.classes)))
