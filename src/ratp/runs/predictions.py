"""What a trained model predicts for images without labels, and ``predictions-*.csv``, where a run saves it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ratp.errors import csv_cell


class Prediction(NamedTuple):
    """What a model predicts for one image.

    Attributes:
        file: Name of the image's file.
        label: Name of the class.
        confidence: The model's probability of the class.
    """

    file: str
    label: str
    confidence: float


def predictions_of(logits: Tensor, files: Sequence[str], classes: Sequence[str]) -> list[Prediction]:
    """Turns rows of logits into the likeliest classes."""
    confidence, label = logits.softmax(dim=1).max(dim=1)
    rows = zip(files, label.tolist(), confidence.tolist(), strict=True)
    return [Prediction(file, classes[k], share) for file, k, share in rows]


def as_csv(predictions: Iterable[Prediction]) -> str:
    """Renders predictions as CSV with the columns file, class, confidence.

    A file name that a spreadsheet would take for a formula begins with ``./``.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("file", "class", "confidence"))
    for file, label, share in predictions:
        name = f"./{file}" if file.startswith(("=", "+", "-", "@")) else file
        writer.writerow((csv_cell(name), csv_cell(label), f"{share:.4f}"))
    return table.getvalue()
