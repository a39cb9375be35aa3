"""What a trained model predicts for the images of a domain, and ``predictions-*.csv``, where a run saves it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ratp.errors import csv_cell
from ratp.evaluation.accuracy import Guesses


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


def predictions_of(guesses: Guesses, files: Sequence[str], classes: Sequence[str]) -> list[Prediction]:
    """Names the file and the class of every prediction."""
    rows = zip(files, guesses.labels.tolist(), guesses.confidence.tolist(), strict=True)
    return [Prediction(file, classes[k], share) for file, k, share in rows]


def as_csv(predictions: Iterable[Prediction], true: Sequence[str] | None = None) -> str:
    """Renders predictions as CSV with the columns file, class, confidence and, if they are known, true_class.

    A file name that a spreadsheet would take for a formula begins with ``./``.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("file", "class", "confidence", *(() if true is None else ("true_class",))))
    for place, (file, label, share) in enumerate(predictions):
        name = f"./{file}" if file.startswith(("=", "+", "-", "@")) else file
        known = () if true is None else (csv_cell(true[place]),)
        writer.writerow((csv_cell(name), csv_cell(label), f"{share:.4f}", *known))
    return table.getvalue()
