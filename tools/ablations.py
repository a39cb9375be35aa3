"""The paper's ablations and its study of sensitivity, as tables, from the files in results/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratp.evaluation.matrix import METRICS, Metric, Paired, paired
from ratp.reports.summary import summarise_known
from ratp.reports.tables import with_deviation
from ratp.runs.plan import NO_WEIGHTS
from ratp.runs.record import RunRecord, read_run
from ratp.runs.request import RunRequest
from ratp.studies.file import read_study
from ratp.studies.study import Study

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "configs" / "paper"
FULL = "ratp"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Line:
    """A line of a table: a method or a variant.

    Attributes:
        label: What the study calls it.
        method: Name of its method.
        is_variant: Whether it is a variant of that method.
        runs: Its finished runs by seed.
        asked: How many runs the study asks for.
    """

    label: str
    method: str
    is_variant: bool
    runs: Mapping[int, RunRecord]
    asked: int

    def averages(self, metric: Metric) -> dict[int, float]:
        """The average of a metric by seed."""
        return {seed: run.matrix.average(metric) for seed, run in self.runs.items()}


def known_study(name: str, results: Path = ROOT / "results") -> Study:
    """A study of the paper, with the results of its runs: all made from the same images.

    Args:
        name: Of its file, and of the folder of its results.
        results: The folder of all results.
    """
    study = read_study(STUDIES / f"{name}.toml", ROOT / "runs", RunRequest(device="cpu", weights=NO_WEIGHTS))
    return study.with_results(map(read_run, sorted((results / name).glob("*.json"))))


def lines(study: Study, grid: int) -> list[Line]:
    """The lines of a grid, in the order of the file; swept values have none."""
    found: dict[str, list[tuple[str, bool, int, RunRecord | None]]] = {}
    for entry in study.entries:
        for row in entry.rows:
            if row.grid == grid and row.sweep is None:
                about = (entry.plan.method.name, row.is_variant, entry.plan.seed, entry.result)
                found.setdefault(row.label, []).append(about)
    return [
        Line(label, some[0][0], some[0][1], {seed: run for *_, seed, run in some if run is not None}, len(some))
        for label, some in found.items()
    ]


def ablation_tables(study: Study | None = None) -> str:
    """A table a group, with what the paper says of it and whether that is so here."""
    study = study or known_study("ablations")
    blocks = []
    for grid, group in study.titles.items():
        found = lines(study, grid)
        rows = [_row(line, _base(line, found)) for line in found]
        head = [f"| {group} | seeds | TDG | TDA | FA |", "|---|---:|---:|---:|---:|"]
        blocks.append("\n".join([*head, *rows]) + "\n\n" + _best(found))
    return "\n\n".join(blocks)


def _base(line: Line, found: Sequence[Line]) -> Line | None:
    """What a variant is a variant of."""
    return next((other for other in found if line.is_variant and other.label == line.method), None)


def _row(line: Line, base: Line | None) -> str:
    name = line.label if line.is_variant else f"`{line.label}`"
    if not line.runs:
        return f"| {name} | {NOT_RUN} | – | – | – |"
    seeds = f"{len(line.runs)}" if len(line.runs) == line.asked else f"{len(line.runs)} of {line.asked}"
    return f"| {name} | {seeds} | {' | '.join(_cell(line, base, metric) for metric in METRICS)} |"


def _cell(line: Line, base: Line | None, metric: Metric) -> str:
    """Mean and deviation and, of a variant, how far it lies from what it is a variant of, over the seeds both have."""
    values = line.averages(metric)
    found = with_deviation(summarise_known(values.values()))
    if base is None or not values.keys() & base.runs.keys():
        return found
    return f"{found} ({_signed(paired(values, base.averages(metric)))})"


def _signed(difference: Paired) -> str:
    reach = "" if difference.is_single else f" ± {difference.half_width:.1f}"
    return f"{round(difference.mean, 1) + 0.0:+.1f}".replace("-", "−") + reach


def _best(found: Sequence[Line]) -> str:
    """Whether the full RaTP leads its group, metric by metric, and what is missing to say so."""
    full = next(line for line in found if line.label == FULL)
    leads = [lead for metric in METRICS if (lead := _lead(full, found, metric))]
    missing = [line.label for line in found if len(line.runs) < line.asked]
    if missing:
        leads.append(f"not all run yet: {', '.join(missing)}")
    return f"Is the full RaTP best? {'; '.join(leads)}."


def _lead(full: Line, found: Sequence[Line], metric: Metric) -> str:
    """How far the full RaTP lies from the best of the others, over the seeds both have."""
    ours = full.averages(metric)
    others = [(line, line.averages(metric)) for line in found if line is not full and line.runs.keys() & ours.keys()]
    if not others:
        return ""
    line, difference = min(((line, paired(ours, theirs)) for line, theirs in others), key=lambda pair: pair[1].mean)
    return f"{metric}: {verdict(difference)} ({_signed(difference)} to {line.label})"


def verdict(difference: Paired) -> str:
    """What the differences ours − theirs say of the claim that ours is better."""
    if difference.is_single:
        lead = round(difference.mean, 1)
        return f"{'so' if lead > 0 else 'not so' if lead < 0 else 'a tie'} with one seed"
    if difference.low > 0:
        return "confirmed"
    if difference.high < 0:
        return "refuted"
    return "within the spread"


def sensitivity_tables(study: Study | None = None) -> str:
    """A table a switch: TDG, TDA and FA over the values it was given."""
    study = study or known_study("sensitivity")
    usual = study.results().usual
    swept: dict[str, dict[float, RunRecord | None]] = {}
    for entry in study.entries:
        for row in entry.rows:
            if row.sweep:
                swept.setdefault(row.sweep[0], {})[float(row.sweep[1])] = entry.result
    blocks = []
    for name, unsorted in swept.items():
        runs = dict(sorted(unsorted.items()))
        values = [f"**{value:g}**" if value == usual.get((0, name)) else f"{value:g}" for value in runs]
        table = [f"| `{name}` | {' | '.join(values)} |", "|---|" + "---:|" * len(runs)]
        for metric in METRICS:
            cells = [f"{run.matrix.average(metric):.1f}" if run else NOT_RUN for run in runs.values()]
            table.append(f"| {metric} | {' | '.join(cells)} |")
        blocks.append("\n".join(table))
    return "\n\n".join(blocks)
