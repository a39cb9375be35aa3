"""What training returns: accuracies as a table, the guard's verdicts, and the trained model."""

from __future__ import annotations

import math
import shutil
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from ratp.data.cache.decoded import OnBad
from ratp.errors import RunDirectoryError
from ratp.evaluation.matrix import Matrix
from ratp.runs.load import FilePredictions, LoadedRun, load
from ratp.runs.record import RunRecord, is_undone
from ratp.training.method import Method


class RollbackWarning(UserWarning):
    """The guard has undone the training on a target."""


@dataclass(frozen=True)
class StageResult:
    """The training on one domain.

    Accuracies are in percent, and NaN where there are no labels.

    Attributes:
        domain: Name of the domain.
        before: Accuracy on it just before; NaN for the source.
        after: Accuracy on it just after.
        at_end: Accuracy on it after the last stage.
        seconds: Duration.
        rolled_back: Whether the guard undid the stage.
        reasons: What the guard objects to.
    """

    domain: str
    before: float
    after: float
    at_end: float
    seconds: float
    rolled_back: bool = False
    reasons: tuple[str, ...] = ()


class FitResult:
    """A trained model with its accuracies. Prints as a table, in notebooks too.

    Attributes:
        record: The run as it is on disk.
    """

    def __init__(
        self, record: RunRecord, device: str, method: Path | str | type[Method] | None, *, is_temporary: bool
    ) -> None:
        self.record = record
        self._device, self._method = device, method
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, record.path, ignore_errors=True)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.record.path

    @property
    def matrix(self) -> Matrix:
        """The accuracy on every domain after every stage, with TDG, TDA and FA."""
        return self.record.matrix

    @property
    def stages(self) -> tuple[StageResult, ...]:
        """The training on each domain, with the guard's verdict."""
        rows, found = self.matrix.accuracy, []
        for event in self.record.events("stage_finished"):
            place = event["stage"]
            before = rows[place - 1][place] if place else math.nan
            reasons = tuple((event.get("guard") or {}).get("reasons", ()))
            after, at_end = rows[place][place], rows[-1][place]
            undone = is_undone(event)
            found.append(StageResult(event["domain"], before, after, at_end, event["seconds"], undone, reasons))
        return tuple(found)

    @cached_property
    def model(self) -> LoadedRun:
        """The trained model, as :func:`ratp.load` returns it."""
        return load(self.path, device=self._device, method=self._method)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of the logits."""
        return tuple(self.record.config["classes"])

    def predict(self, images: Any) -> Tensor:
        """Returns logits of images in memory, shape (N, classes); see :meth:`LoadedRun.predict`."""
        return self.model.predict(images)

    def predict_files(self, paths: Iterable[Path | str] | Path | str, *, on_bad: OnBad = "stop") -> FilePredictions:
        """Predicts the class of every image in files, folders and zips; see :meth:`LoadedRun.predict_files`."""
        return self.model.predict_files(paths, on_bad=on_bad)

    def save(self, path: Path | str) -> Path:
        """Copies the run directory, from which :func:`ratp.load` and ``ratp predict`` take the model."""
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunDirectoryError(f"{folder} exists already: choose another path, or remove it.")
        try:
            shutil.copytree(self.path, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise RunDirectoryError(f"cannot save the run in {folder}: {error}.") from error
        return folder

    def __repr__(self) -> str:
        """Returns the table."""
        return str(self)

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *lines = ("  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows)
        table = [first, "-" * len(first), *lines]
        return "\n".join([self._title(), "", *table, "", self._metrics(), *self._undone()])

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._rows())
        notes = "".join(f"<p>{escape(text)}</p>" for text in (self._metrics(), *self._undone()))
        return f"<p>{escape(self._title())}</p><table>{row(_HEADER, 'th')}{body}</table>{notes}"

    def _title(self) -> str:
        return f"{self.record.method}, seed {self.record.seed}: accuracy in %"

    def _rows(self) -> list[tuple[str, ...]]:
        stages = self.stages
        return [(s.domain, *map(_number, (s.before, s.after, s.at_end))) for s in stages]

    def _metrics(self) -> str:
        return "   ".join(f"{name} {_number(value)}" for name, value in self.matrix.averages().items())

    def _undone(self) -> list[str]:
        return [f"{s.domain} was rolled back: {'; '.join(s.reasons)}" for s in self.stages if s.rolled_back]


_HEADER = ("domain", "before", "after", "at the end")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"
