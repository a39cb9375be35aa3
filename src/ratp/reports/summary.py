"""The numbers of a report: runs grouped over their seeds, means and spreads, and notes on their limits.

Means are over complete runs only, each seed once. An unfinished run gets its own line (:meth:`Group.parts`), so it is
neither lost nor averaged with complete ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from ratp.errors import RatpError, RunDirectoryError
from ratp.evaluation.matrix import METRICS, NOTHING, Summary, describe_late, mean_of, summarise
from ratp.evaluation.online import PARTS, Score
from ratp.runs.record import RunRecord

Curve = list[tuple[float, float]]


def probed_curves(run: RunRecord) -> dict[str, Curve]:
    """(progress, accuracy in percent) of each target domain during its own stage.

    Of a stage that was restarted, only the last attempt counts.
    """
    curves: dict[str, Curve] = {}
    for probe in run.events("probe"):
        try:
            stage, domain, accuracy = int(probe["stage"]), str(probe["domain"]), probe["accuracy"]
            if stage == 0 or domain not in accuracy:
                continue
            point = (round(float(probe["progress"]), 9), round(float(accuracy[domain]), 9))
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"{run.path} is damaged: a probe of its journal is unreadable ({error!r})."
            ) from error
        if not (0 <= point[0] <= 1 and 0 <= point[1] <= 100):
            raise RunDirectoryError(f"{run.path} is damaged: a probe at {point[0]} of {domain} reads {point[1]} %.")
        curves[domain] = [p for p in curves.get(domain, []) if p[0] < point[0]] + [point]
    return {domain: curves[domain] for domain in run.matrix.domains if domain in curves}


def area(curve: Curve) -> float:
    """Integrates a curve over progress 0 to 1 by the trapezoid rule, its ends held constant."""
    held = [(0.0, curve[0][1]), *curve, (1.0, curve[-1][1])]
    return math.fsum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(held))


# What a score of a pass over a new domain has, by column head.
ONLINE: Mapping[str, Callable[[Score], float]] = {
    **{name: lambda score, name=name: score.parts.get(name, math.nan) for name in PARTS},  # type: ignore[misc]
    "all": lambda score: score.accuracy,
    "lost": lambda score: score.lost,
    "T95": lambda score: math.nan if score.t95 is None else score.t95,
    "harm": lambda score: score.harm,
}


def online_scores(run: RunRecord) -> dict[str, dict[str, Score]]:
    """The scores of the passes over new domains before their stages, by order of the images and domain."""
    found: dict[str, dict[str, Score]] = {}
    for event in run.events("stage_finished"):
        measured = event.get("online") or {}
        try:
            for order, score in measured.items():
                found.setdefault(str(order), {})[str(event["domain"])] = Score.from_json(score)
        except (RatpError, AttributeError, KeyError) as error:
            raise RunDirectoryError(f"{run.path} is damaged: a pass of its journal is unreadable ({error}).") from error
    return found


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Turns nested settings into texts under dotted names such as ``recipe.epochs``."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = as_text(value)
    return flat


def differing(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose values differ between tables, in order of first appearance."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [name for name in names if len({table.get(name) for table in tables}) > 1]


def as_text(value: object) -> str:
    """Formats a setting; list items of several lines start a new line each."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "none"
    if isinstance(value, Sequence):
        texts = [as_text(item) for item in value]
        return ("\n" if any("\n" in text for text in texts) else ", ").join(texts) or "none"
    return json.dumps(value, ensure_ascii=False, default=str)


def forgetting_with_domains_given(run: RunRecord) -> float:
    """FA in percent if the run knew the domain of every test image; NaN unless measured in a complete run."""
    found: dict[str, list[float]] = {domain: [] for domain in run.matrix.domains[:-1]}
    for event in run.events("stage_finished"):
        measured = event.get("accuracy_as_told")
        for domain, value in measured.items() if isinstance(measured, dict) else ():
            is_accuracy = isinstance(value, int | float) and 0 <= value <= 100
            if is_accuracy and domain in found and domain != event.get("domain"):
                found[domain].append(value)
    if not run.matrix.complete:
        return math.nan
    return mean_of([mean_of(values) for values in found.values() if values])


Measure = Literal["TDG", "TDA", "FA", "Unfamiliar"]


def summarise_known(values: Iterable[float]) -> Summary:
    """Summarises values, leaving out NaN: the accuracy on a domain without labels."""
    known = [value for value in values if not math.isnan(value)]
    return summarise(known) if known else NOTHING


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed, finished or not."""

    label: str
    stream: str
    order: tuple[str, ...]
    runs: tuple[RunRecord, ...]

    @cached_property
    def counted(self) -> tuple[RunRecord, ...]:
        """The runs the means are over: the complete ones, each seed once; or the only run."""
        if len(self.runs) == 1:
            return self.runs
        first: dict[int, RunRecord] = {}
        for run in self.runs:
            if run.matrix.complete:
                first.setdefault(run.seed, run)
        return tuple(first.values())

    @property
    def finished(self) -> bool:
        """Whether the means are over complete runs."""
        return bool(self.counted) and all(run.matrix.complete for run in self.counted)

    @property
    def competes(self) -> bool:
        """Whether it may be marked best: finished, measured from the start, without target labels."""
        return self.finished and not any(run.is_oracle or run.is_continued for run in self.runs)

    def parts(self) -> list[Group]:
        """Splits it into lines of a table: the complete runs together, then each unfinished one alone."""
        complete = tuple(run for run in self.runs if run.matrix.complete)
        alone = [(run,) for run in self.runs if not run.matrix.complete]
        return [replace(self, runs=runs) for runs in (complete, *alone) if runs]

    @property
    def name(self) -> str:
        """The label, with the seed if it is an unfinished run."""
        return self.label if self.finished else f"{self.label}, seed {self.runs[0].seed}"

    @property
    def status(self) -> str:
        """How many seeds the means are over, or how far an unfinished run got."""
        if self.finished:
            return f"{len(self.counted)} seed{'s' if len(self.counted) > 1 else ''}"
        return f"{self.runs[0].matrix.stages} of {len(self.order)} stages"

    def spread(self, measure: Measure, domain: str | None = None) -> Summary:
        """A measure over the seeds, on one domain or averaged over those that have it."""
        if measure not in self._measured:
            self._measured[measure] = [by_domain(run, measure) for run in self.counted]
        if domain is None:
            return summarise_known(mean_of(list(values.values())) for values in self._measured[measure])
        return summarise_known(values[domain] for values in self._measured[measure] if domain in values)

    def online(self, order: str, column: str, domain: str | None = None) -> Summary:
        """A column of :data:`ONLINE` over the seeds, on one domain or averaged over those that have it.

        Nothing for T95 where it was not always reached: a mean over the rest would flatter.
        """
        values = []
        for run in self.counted:
            scores = online_scores(run).get(order, {})
            found = [ONLINE[column](score) for name, score in scores.items() if domain in (None, name)]
            known = [value for value in found if not math.isnan(value)]
            if found and column == "T95" and len(known) < len(found):
                return NOTHING
            values.append(mean_of(known))
        return summarise_known(values)

    @cached_property
    def _measured(self) -> dict[Measure, list[dict[str, float]]]:
        return {}

    @cached_property
    def accuracy(self) -> tuple[tuple[Summary, ...], ...]:
        """The accuracy matrix over the seeds, cell by cell."""
        stages = min((run.matrix.stages for run in self.counted), default=0)
        columns = range(len(self.order))
        return tuple(
            tuple(summarise_known(run.matrix.accuracy[stage][domain] for run in self.counted) for domain in columns)
            for stage in range(stages)
        )


@dataclass(frozen=True)
class Section:
    """The groups that may be compared with each other: one stream in one order.

    ``shared`` holds the switches that all of them changed alike, which no label repeats.
    """

    stream: str
    order: tuple[str, ...]
    groups: tuple[Group, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def parts(self) -> list[Group]:
        """The lines of its tables, unfinished runs last."""
        lines = [part for group in self.groups for part in group.parts()]
        return sorted(lines, key=lambda part: not part.finished)

    @property
    def runs(self) -> list[RunRecord]:
        """Every run of the section."""
        return [run for group in self.groups for run in group.runs]

    def name_of(self, run: RunRecord) -> str:
        """The label of a run within the section."""
        return run.label_without(self.shared)

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """The metrics, and Unfamiliar if any run measured it."""
        probed = any(by_domain(run, "Unfamiliar") for run in self.runs)
        return (*METRICS, "Unfamiliar") if probed else METRICS

    @property
    def several_seeds(self) -> bool:
        """Whether any mean is over several seeds."""
        return any(len(part.counted) > 1 for part in self.parts)

    @property
    def unlike_seeds(self) -> bool:
        """Whether some numbers are from a single seed and others are not."""
        return self.several_seeds and any(len(part.counted) == 1 for part in self.parts)

    @property
    def spread_note(self) -> str:
        """What ± means in its tables; empty if no mean is over several seeds."""
        if not self.several_seeds:
            return ""
        single = " Without ±: from a single seed." if self.unlike_seeds else ""
        return f"Mean ± sample standard deviation over seeds.{single}"

    @property
    def label_notes(self) -> list[str]:
        """A sentence on the domains that have no labels in any run, if there are any."""
        rows = [run.matrix.accuracy[-1] for run in self.runs if run.matrix.stages]
        measured = zip(self.order, zip(*rows, strict=True), strict=True) if rows else ()
        names = [domain for domain, values in measured if all(map(math.isnan, values))]
        return [f"No labels, so no accuracy: {', '.join(names)}. Averages are over the others."] if names else []

    def columns(self, measure: Measure) -> tuple[str, ...]:
        """The domains a measure is defined on."""
        if measure in ("TDG", "Unfamiliar"):
            return self.order[1:]
        return self.order[:-1] if measure == "FA" else self.order

    def notes(self) -> list[str]:
        """What a reader must know to interpret the means."""
        notes = self.label_notes
        waiting = [part for part in self.parts if not part.finished]
        if waiting:
            listed = "; ".join(f"{part.name} ({part.status})" for part in waiting)
            notes.append(f"Unfinished, shown as far as they got, in no mean and never marked best: {listed}.")
        oracles = [part.name for part in self.parts if part.finished and any(run.is_oracle for run in part.runs)]
        if oracles:
            notes.append(f"Uses target labels: an upper bound, never marked best: {'; '.join(oracles)}.")
        if self.shared:
            notes.append(f"Changed in every run: {_listed(self.shared)}.")
        for group in self.groups:
            own = {name: value for name, value in _changed_in_all(group.runs).items() if name not in self.shared}
            if group.runs[0].name is not None and own and _listed(own) not in group.label:
                notes.append(f"Changed in {group.label}: {_listed(own)}.")
        for group in self.groups:
            notes += _group_notes(group)
        made = {f"{name}: {what}" for run in self.runs for name, what in _texts(run.config.get("origins")).items()}
        if made:
            notes.append(f"Images as they were used: {'; '.join(sorted(made))}.")
        known = dict.fromkeys(line for run in self.runs for line in _first_lines(run.config.get("notes")))
        if known:
            notes.append(f"About the images: {'; '.join(known)}.")
        precisions: dict[str, list[str]] = {}
        for group in self.groups:
            for run in group.runs:
                if precision := run.environment.get("precision"):
                    precisions.setdefault(str(precision), []).append(group.label)
        if len(precisions) > 1:
            listed = "; ".join(f"{name}: {', '.join(dict.fromkeys(who))}" for name, who in sorted(precisions.items()))
            notes.append(f"Not every run was computed in the same precision: {listed}.")
        images = differing([flatten({"data": run.config.get("data", {})}) for run in self.runs])
        if images:
            names = ", ".join(key.removeprefix("data.") for key in images)
            notes.append(f"Not every run saw the same images of {names}: the comparison is not like for like.")
        return notes


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups runs that differ only in seed, in order of first appearance."""
    runs = [replace(run, apart=()) for run in runs]
    called: dict[_Key, list[RunRecord]] = {}
    for run in runs:
        called.setdefault(_key(run), []).append(run)
    names = {key: differing([_unnamed(run) for run in same]) for key, same in called.items()}
    found: dict[_Key, list[RunRecord]] = {}
    for run in runs:
        apart = tuple(f"{name} {_unnamed(run)[name]}" for name in names[_key(run)])
        named = replace(run, apart=apart)
        found.setdefault(_key(named), []).append(named)
    return [Group(*key, tuple(members)) for key, members in found.items()]


_Key = tuple[str, str, tuple[str, ...]]


def _key(run: RunRecord) -> _Key:
    return run.label, run.stream, run.matrix.domains


def _unnamed(run: RunRecord) -> dict[str, str]:
    """What sets runs of one label apart: method file, weights, images, guard."""
    config = run.config
    images = hashlib.sha256(json.dumps(config.get("data"), sort_keys=True).encode()).hexdigest()
    hashes = {"file": config.get("method_file"), "weights": config.get("weights"), "images": images}
    texts = {name: str(value)[:8] if value else "none" for name, value in hashes.items()}
    return {**texts, "guard": str(config.get("guard", "record"))}


def sections(groups: Sequence[Group]) -> list[Section]:
    """Splits groups by stream and order, in order of first appearance."""
    if not groups:
        raise RatpError("no runs to report. Give at least one run directory or result file.")
    found: dict[tuple[str, tuple[str, ...]], list[Group]] = {}
    for group in groups:
        found.setdefault((group.stream, group.order), []).append(group)
    made = []
    for (stream, order), members in found.items():
        runs = [run for group in members for run in group.runs]
        named = any(run.name is not None for run in runs)
        shared = _changed_in_all(runs) if named or len(members) > 1 else {}
        if len(members) > 1 and not named:  # labels leave out what all groups share
            members = [replace(group, label=group.runs[0].label_without(shared)) for group in members]
        made.append(Section(stream, order, tuple(members), shared))
    return made


def _changed_in_all(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The switches that all runs changed alike."""
    first, *others = (_texts(run.changed) for run in runs)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _listed(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def by_domain(run: RunRecord, measure: Measure) -> dict[str, float]:
    """A measure of one run on every domain that has it so far.

    Unfamiliar is the area under the accuracy curve of a target domain during its own stage, in percent, over progress
    0 to 1, held constant before the first and after the last point.
    """
    if measure != "Unfamiliar":
        return run.matrix.metric(measure)
    trained = run.matrix.domains[: run.matrix.stages]
    return {domain: area(curve) for domain, curve in probed_curves(run).items() if domain in trained}


def _group_notes(group: Group) -> list[str]:
    notes = []
    seeds = Counter(run.seed for run in group.runs if run.matrix.complete)
    repeated = ", ".join(str(seed) for seed, count in seeds.items() if count > 1)
    if repeated:
        notes.append(f"{group.label}: seed {repeated} appears more than once and is counted once.")
    unlike = [
        key
        for key in differing([flatten(run.config) for run in group.runs])
        if key not in ("seed", "ratp", "fingerprint", "notes", "after.fingerprint")
        # Images have their own note; what counts as changed depends on the defaults at the time.
        and key.partition(".")[0] not in ("data", "changed", "images")
    ]
    if unlike:
        notes.append(f"{group.label}: its runs differ in more than their seed: {', '.join(unlike)}.")
    late = "; ".join(dict.fromkeys(filter(None, (describe_late(run.matrix) for run in group.runs))))
    if any(run.is_continued for run in group.runs):
        notes.append(f"{group.label}: begins with an earlier run, never marked best{f'; {late}' if late else ''}.")
    for run in group.runs:
        notes += [f"{group.label}, seed {run.seed}: continued in another environment: {move}." for move in run.moves]
    for run in group.runs:
        notes += [f"{group.label}, seed {run.seed}: the guard rolled back {text}." for text in run.rollbacks]
    given = summarise_known(forgetting_with_domains_given(run) for run in group.counted)
    if given.n:
        over = f" over {given.n} of {len(group.counted)} seeds" if given.n < len(group.counted) else ""
        notes.append(f"{group.label}: given the domain of every image, its FA would be {given.mean:.1f}{over}.")
    probed = sum(bool(by_domain(run, "Unfamiliar")) for run in group.counted)
    if 0 < probed < len(group.counted):
        notes.append(f"{group.label}: Unfamiliar is over {probed} of {len(group.counted)} seeds, the ones measured.")
    return notes


def _first_lines(notes: object) -> list[str]:
    """The first lines of the notes in a config, without the files they list."""
    texts = [note.strip() for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    return [text.splitlines()[0].rstrip(":. ") for text in texts if text]


def _texts(value: object) -> dict[str, str]:
    """A mapping from a file as texts; empty if it is no mapping."""
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}
