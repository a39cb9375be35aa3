"""What a run gets wrong, for the page: intervals, classes, confusions, calibration and pictures of mistakes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ratp.errors import Note, RunDirectoryError
from ratp.evaluation.details import Details, Examples, interval, interval_of_mean
from ratp.reports.summary import Group, Measure, Section, by_domain
from ratp.reports.tables import MEANING, MISSING, Table, Value, clean, number
from ratp.runs.record import RunRecord

BASELINE = "source-only"
# Of more classes than these only the worst and the most frequent confusions are shown.
MOST_CLASSES, SHOWN = 30, 15
INTERVAL = (
    "In brackets: the 95 % confidence interval (Wilson) that follows from the number of test images, for one run."
)


class DetailsWarning(Note):
    """A file with what a run gets wrong is damaged."""


@dataclass(frozen=True)
class Confusions:
    """A confusion matrix: a row per true class with its counts and their shares of the row in percent."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True)
class DomainDetails:
    """What a run gets wrong on one domain; tables and matrix are None without labels or with too many classes."""

    name: str
    classes: Table | None
    confusions: Confusions | Table | None
    examples: Examples | None


@dataclass(frozen=True)
class RunDetails:
    """What a run gets wrong after its last stage, by domain."""

    run: RunRecord
    last: dict[str, Details]
    table: Table
    domains: tuple[DomainDetails, ...]


def detailed(section: Section, most: int) -> list[RunDetails]:
    """What the method with the best TDA and the baseline get wrong, each by its first run; up to ``most`` domains."""
    found = {}
    for part in (best_part(section), baseline(section)):
        run = next((run for run in part.counted if run.matrix.stages), None) if part else None
        if run is None:
            continue
        try:
            if run.details:
                found[run.path] = _details(run, most)
        except RunDirectoryError as error:  # no number depends on it
            warnings.warn(f"what a run gets wrong is left out: {error}", DetailsWarning, stacklevel=2)
    return list(found.values())


def best_part(section: Section) -> Group | None:
    """The line with the best TDA of those that compete; of a single line that one."""
    rivals = [part for part in section.parts if part.competes] or section.parts
    known = [part for part in rivals if part.spread("TDA").n]
    return max(known, key=lambda part: part.spread("TDA").mean, default=None)


def baseline(section: Section) -> Group | None:
    """The line of the method that never adapts, if it is there."""
    return next((part for part in section.parts if part.finished and part.name == BASELINE), None)


def baseline_of(section: Section, measure: Measure) -> tuple[str, float] | None:
    """A measure without adaptation, and whose it is: the baseline's, or that of the model before the first target."""
    part = baseline(section)
    if part is not None and part.spread(measure).n:
        return BASELINE, part.spread(measure).mean
    best = best_part(section)
    if best is None or len(section.parts) > 1 or not best.counted[0].matrix.stages or best.counted[0].matrix.late:
        return None
    known = dict(zip(section.order, (cell.mean for cell in best.accuracy[0]), strict=True))
    values = [known[name] for name in section.columns(measure) if not math.isnan(known[name])]
    return ("before adaptation", math.fsum(values) / len(values)) if values else None


def interval_of(part: Group, measure: Measure, domain: str | None = None) -> tuple[float, float] | None:
    """The confidence interval of a single run's measure that follows from the number of its test images.

    A mean over stages is taken for one accuracy: the same images are tested at every stage.
    """
    if len(part.counted) != 1:
        return None
    counts = part.counted[0].test_images
    values = {name: value for name, value in by_domain(part.counted[0], measure).items() if domain in (None, name)}
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known or not known.keys() <= counts.keys():
        return None
    return interval_of_mean(list(known.values()), [counts[name] for name in known])


def with_intervals(section: Section, table: Table) -> Table:
    """The table with a confidence interval after every number, if all are from a single seed."""
    if section.several_seeds:
        return table
    rows = []
    for part, (name, entries) in zip(section.parts, table.rows, strict=True):
        cells = list(entries)
        for place, (head, cell) in enumerate(zip(table.heads[1:], entries, strict=True)):
            measure = next((m for m in section.measures if m == (table.kind if table.kind in MEANING else head)), None)
            if measure is None or not isinstance(cell, Value) or cell.summary is None:
                continue
            if ends := interval_of(part, measure, head if head in section.order else None):
                cells[place] = replace(cell, spread=f" [{number(ends[0])}, {number(ends[1])}]")
        rows.append((name, tuple(cells)))
    return replace(table, rows=tuple(rows))


def test_images(section: Section) -> dict[str, str]:
    """How many images of every domain are tested, in words; nothing of domains of which runs differ or did not say."""
    found = {}
    for name in section.order:
        counts = {run.test_images.get(name) for run in section.runs}
        if len(counts) == 1 and (count := counts.pop()):
            found[name] = f"{count:,} test images"
    return found


def tested_on(section: Section) -> list[str]:
    """Says whether targets are tested on the images that the model adapted to; nothing if runs did not record it."""
    said: dict[str, dict[str, None]] = {}
    for run in section.runs:
        if same := run.tested_as_trained:
            said.setdefault(_tested_on(run, same), {})[section.name_of(run)] = None
    if len(said) < 2:
        return list(said)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in said.items()]


def _tested_on(run: RunRecord, same: dict[str, bool]) -> str:
    seen = ", ".join(name for name, both in same.items() if both)
    if not seen:
        return "The targets are tested on images that the model did not adapt to."
    some = "" if all(same.values()) else f" The other targets are tested on images that {run.method} did not adapt to."
    return (
        f"{seen}: tested on the same images that the model adapted to without their labels, as in the paper.{some} "
        "To hold out a fifth of every target for testing: --set hold_out=0.2."
    )


def _details(run: RunRecord, most: int) -> RunDetails:
    known = run.config.get("classes")
    classes = list(map(str, known)) if isinstance(known, list) else []
    stages, examples = run.details, run.examples
    last = stages.get(run.matrix.stages - 1, {})
    shown = [name for name in run.matrix.domains if name in last or name in examples][:most]
    domains = tuple(
        DomainDetails(
            name,
            _class_table(run, stages, name, classes) if name in last else None,
            _confusions(last[name], classes) if name in last else None,
            examples.get(name),
        )
        for name in shown
    )
    return RunDetails(run, last, _domain_table(last, run.matrix.domains, classes), domains)


def _domain_table(last: dict[str, Details], order: Sequence[str], classes: Sequence[str]) -> Table:
    heads = ("Domain", "Test images", "Accuracy", "Calibration error", "Worst class", "Most frequent mistake")
    rows = []
    for name in order:
        if found := last.get(name):
            low, high = interval(100 * found.right / found.images, found.images)
            accuracy = Value(100 * found.right / found.images, number(100 * found.right / found.images))
            accuracy = replace(accuracy, spread=f" [{number(low)}, {number(high)}]")
            error = Value(found.calibration_error, number(found.calibration_error))
            worst, (images, right) = min(found.by_class.items(), key=lambda item: item[1][1] / item[1][0])
            wrong = _mistakes(found)[:1]
            frequent = f"{_name(classes, wrong[0][0])} taken for {_name(classes, wrong[0][1])}" if wrong else MISSING
            cells = f"{_name(classes, worst)}, {number(100 * right / images)} %", frequent
            rows.append((name, (Value.count(found.images), accuracy, error, *cells)))
    return Table("By domain, after the last stage (%)", heads, tuple(rows))


def _class_table(run: RunRecord, stages: dict[int, dict[str, Details]], domain: str, classes: Sequence[str]) -> Table:
    """The accuracy on every class of a domain: before its stage, after it, and after the last one."""
    stage, last = run.matrix.domains.index(domain), run.matrix.stages - 1
    moments = {"before its stage": stage - 1, "after its stage": stage, "after the last stage": last}
    moments = {
        head: at for head, at in moments.items() if domain in stages.get(at, {}) and (at < last or head[-5:] == "stage")
    }
    if stage == last:
        moments.pop("after its stage", None)
    counts = {head: stages[at][domain].by_class for head, at in moments.items()}
    final = stages[last][domain].by_class
    worst_first = sorted(final, key=lambda label: final[label][1] / final[label][0])
    rows = []
    for label in worst_first[: SHOWN if len(final) > MOST_CLASSES else None]:
        cells = [Value.count(final[label][0])]
        for found in counts.values():
            images, right = found.get(label, (0, 0))
            share = 100 * right / images if images else math.nan
            cells.append(Value(share, number(share)))
        rows.append((_name(classes, label), tuple(cells)))
    some = f", the {SHOWN} worst of {len(final)} classes" if len(final) > MOST_CLASSES else ", worst first"
    return Table(f"Accuracy by class (%){some}", ("Class", "Images", *counts), tuple(rows))


def _confusions(found: Details, classes: Sequence[str]) -> Confusions | Table:
    """The confusion matrix; of many classes a table of the most frequent confusions."""
    kinds = sorted({label for cell in found.confusion for label in cell})
    if len(kinds) > MOST_CLASSES:
        rows = []
        for true, predicted, count in _mistakes(found)[:SHOWN]:
            share = 100 * count / found.by_class[true][0]
            cells = _name(classes, predicted), Value.count(count), Value(share, number(share))
            rows.append((_name(classes, true), cells))
        heads = ("True class", "Predicted", "Images", "% of the class")
        return Table(f"The {SHOWN} most frequent mistakes", heads, tuple(rows))
    lines = []
    for true in (kind for kind in kinds if kind in found.by_class):
        images = found.by_class[true][0]
        counts = [found.confusion.get((true, predicted), 0) for predicted in kinds]
        lines.append((_name(classes, true), tuple((count, round(100 * count / images)) for count in counts)))
    return Confusions(tuple(_name(classes, kind) for kind in kinds), tuple(lines))


def _mistakes(found: Details) -> list[tuple[int, int, int]]:
    """True class, predicted class and count of all mistakes, the most frequent first."""
    wrong = [(true, predicted, count) for (true, predicted), count in found.confusion.items() if true != predicted]
    return sorted(wrong, key=lambda item: -item[2])


def _name(classes: Sequence[str], label: int) -> str:
    return clean(classes[label]) if label < len(classes) else f"class {label}"
