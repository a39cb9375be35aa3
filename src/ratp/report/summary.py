"""The numbers of a report: runs grouped over their seeds, means and spreads, the Unfamiliar Period.

Means are over complete runs only, each seed once. An unfinished run is kept and shown as a line of
its own (:meth:`Group.parts`), so that it is neither lost nor averaged with complete ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ratp.errors import RatpError
from ratp.matrix import METRICS, describe_late, mean_of
from ratp.record import RunRecord
from ratp.report.probes import area, probed_curves
from ratp.report.settings import differing, flatten
from ratp.report.told import forgetting_as_told
from ratp.statistics import NOTHING, Summary, summarise

Measure = Literal["TDG", "TDA", "FA", "Unfamiliar"]


def summarise_known(values: Iterable[float]) -> Summary:
    """The values in short; NaN, the accuracy of a domain without labels, does not count."""
    known = [value for value in values if not math.isnan(value)]
    return summarise(known) if known else NOTHING


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed.

    Attributes:
        label: Method, preset and switches of the runs.
        stream: Name of their stream.
        order: Its domains in order of arrival.
        runs: The runs, finished or not.
    """

    label: str
    stream: str
    order: tuple[str, ...]
    runs: tuple[RunRecord, ...]

    @cached_property
    def counted(self) -> tuple[RunRecord, ...]:
        """The runs the means are over: complete ones, each seed once; or the only run there is."""
        if len(self.runs) == 1:
            return self.runs
        first: dict[int, RunRecord] = {}
        for run in self.runs:
            if run.matrix.complete:
                first.setdefault(run.seed, run)
        return tuple(first.values())

    @property
    def unfinished(self) -> tuple[RunRecord, ...]:
        """Runs that have not trained on every domain."""
        return tuple(run for run in self.runs if not run.matrix.complete)

    @property
    def finished(self) -> bool:
        """Whether the means are over complete runs."""
        return bool(self.counted) and all(run.matrix.complete for run in self.counted)

    @property
    def competes(self) -> bool:
        """Whether it can be the best: finished, measured from the start, and not told what no method may know."""
        return self.finished and not any(run.is_oracle or run.is_continued for run in self.runs)

    def parts(self) -> list[Group]:
        """The lines of a table: the complete runs together, then each unfinished one alone."""
        complete = tuple(run for run in self.runs if run.matrix.complete)
        lines = [complete] if complete else []
        lines += [(run,) for run in self.unfinished]
        return [Group(self.label, self.stream, self.order, runs) for runs in lines]

    @property
    def name(self) -> str:
        """The label; of an unfinished run, with its seed."""
        return self.label if self.finished else f"{self.label}, seed {self.runs[0].seed}"

    @property
    def status(self) -> str:
        """How many seeds the means are over; of an unfinished run, how far it has come."""
        if self.finished:
            return f"{len(self.counted)} seed{'s' if len(self.counted) > 1 else ''}"
        return f"{self.runs[0].matrix.stages} of {len(self.order)} stages"

    def spread(self, measure: Measure, domain: str | None = None) -> Summary:
        """A measure over the seeds: on one domain, or averaged over the domains that have it."""
        if measure not in self._measured:
            self._measured[measure] = [by_domain(run, measure) for run in self.counted]
        if domain is None:
            return summarise_known(mean_of(list(values.values())) for values in self._measured[measure])
        return summarise_known(values[domain] for values in self._measured[measure] if domain in values)

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

    Attributes:
        stream: Name of the stream.
        order: Its domains in order of arrival.
        groups: The groups.
        shared: Switches that were changed in the same way in all of them, and are in none of their labels.
    """

    stream: str
    order: tuple[str, ...]
    groups: tuple[Group, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def parts(self) -> list[Group]:
        """Every line of the section's tables; the unfinished runs come last."""
        lines = [part for group in self.groups for part in group.parts()]
        return sorted(lines, key=lambda part: not part.finished)

    @property
    def runs(self) -> list[RunRecord]:
        """Every run of the section."""
        return [run for group in self.groups for run in group.runs]

    def name_of(self, run: RunRecord) -> str:
        """What a run of the section is called in it."""
        return run.label_without(self.shared)

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """The metrics, and the Unfamiliar area where a run measured it."""
        probed = any(by_domain(run, "Unfamiliar") for run in self.runs)
        return (*METRICS, "Unfamiliar") if probed else METRICS

    @property
    def several_seeds(self) -> bool:
        """Whether a mean is over more than one seed."""
        return any(len(part.counted) > 1 for part in self.parts)

    @property
    def unlike_seeds(self) -> bool:
        """Whether some of its numbers are from a single seed, and others not."""
        return self.several_seeds and any(len(part.counted) == 1 for part in self.parts)

    @property
    def spread_note(self) -> str:
        """What ± means in its tables, and what a number without it is; empty where no mean is over several seeds."""
        if not self.several_seeds:
            return ""
        single = " Without ±: from a single seed." if self.unlike_seeds else ""
        return f"Mean ± sample standard deviation over seeds.{single}"

    @property
    def label_notes(self) -> list[str]:
        """Which domains have no labels in any run, and thus no numbers: a sentence, or none."""
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
        """What a reader must know before believing a mean: no labels; unfinished, repeated or unlike runs."""
        notes = self.label_notes
        waiting = [part for part in self.parts if not part.finished]
        if waiting:
            listed = "; ".join(f"{part.name} ({part.status})" for part in waiting)
            notes.append(f"Unfinished, shown as far as they have come, in no mean and never marked best: {listed}.")
        told = [part.name for part in self.parts if part.finished and any(run.is_oracle for run in part.runs)]
        if told:
            notes.append(f"Told the labels of targets, a bound and never marked best: {'; '.join(told)}.")
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
            notes.append(f"Not the published data: {'; '.join(sorted(made))}.")
        known = dict.fromkeys(line for run in self.runs for line in _first_lines(run.config.get("notes")))
        if known:
            notes.append(f"Of the images: {'; '.join(known)}.")
        notes += _precision_notes(self.groups)
        images = differing([flatten({"data": run.config.get("data", {})}) for run in self.runs])
        if images:
            names = ", ".join(key.removeprefix("data.") for key in images)
            notes.append(f"Not every run saw the same images of {names}: the comparison is not like for like.")
        return notes


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Puts runs that differ only in seed together, in the order they first appear."""
    runs = [replace(run, apart=()) for run in runs]
    called: dict[_Key, list[RunRecord]] = {}
    for run in runs:
        called.setdefault(_key(run), []).append(run)
    names = {key: differing([_unnamed(run) for run in same]) for key, same in called.items()}
    found: dict[_Key, list[RunRecord]] = {}
    for run in runs:
        apart = tuple(f"{name} {_unnamed(run)[name]}" for name in names[_key(run)])
        told = replace(run, apart=apart)
        found.setdefault(_key(told), []).append(told)
    return [Group(*key, tuple(members)) for key, members in found.items()]


_Key = tuple[str, str, tuple[str, ...]]


def _key(run: RunRecord) -> _Key:
    return run.label, str(run.config["stream"]), run.matrix.domains


def _unnamed(run: RunRecord) -> dict[str, str]:
    """What makes another method of it, another start or another task, and is in no label."""
    config = run.config
    images = hashlib.sha256(json.dumps(config.get("data"), sort_keys=True).encode()).hexdigest()
    hashes = {"file": config.get("method_file"), "weights": config.get("weights"), "images": images}
    texts = {name: str(value)[:8] if value else "none" for name, value in hashes.items()}
    return {**texts, "guard": str(config.get("guard", "record"))}


def sections(groups: Sequence[Group]) -> list[Section]:
    """Splits groups by stream and order, in the order they first appear.

    Raises:
        RatpError: If there is nothing to report.
    """
    if not groups:
        raise RatpError("no runs to report. Give at least one run directory or result file.")
    found: dict[tuple[str, tuple[str, ...]], list[Group]] = {}
    for group in groups:
        found.setdefault((group.stream, group.order), []).append(group)
    return [_section(*key, members) for key, members in found.items()]


def _section(stream: str, order: tuple[str, ...], groups: Sequence[Group]) -> Section:
    """A section of groups, whose labels need not repeat what all of them have."""
    runs = [run for group in groups for run in group.runs]
    named = any(run.name is not None for run in runs)
    if len(groups) < 2 and not named:
        return Section(stream, order, tuple(groups))
    shared = _changed_in_all(runs)
    if named:
        return Section(stream, order, tuple(groups), shared)
    short = (replace(group, label=group.runs[0].label_without(shared)) for group in groups)
    return Section(stream, order, tuple(short), shared)


def _changed_in_all(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Switches that were changed in the same way in all runs."""
    first, *others = (_texts(run.changed) for run in runs)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _listed(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def by_domain(run: RunRecord, measure: Measure) -> dict[str, float]:
    """A measure of one run on every domain that has it so far.

    Unfamiliar is the area under the accuracy curve of a target domain while its own stage trains, in percent, over
    progress 0 to 1. The curve is held constant before its first and after its last point: a constant 50 gives 50.
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
        notes.append(f"{group.label}: seed {repeated} was given more than once and is counted once.")
    unlike = [
        key
        for key in differing([flatten(run.config) for run in group.runs])
        if key not in ("seed", "ratp", "fingerprint", "notes", "after.fingerprint")
        # Images have a note of their own; what counts as changed depends on the defaults of its time.
        and key.partition(".")[0] not in ("data", "changed")
    ]
    if unlike:
        notes.append(f"{group.label}: its runs differ in more than their seed: {', '.join(unlike)}.")
    late = "; ".join(dict.fromkeys(filter(None, (describe_late(run.matrix) for run in group.runs))))
    if any(run.is_continued for run in group.runs):
        notes.append(f"{group.label}: begins with an earlier run, never marked best{f'; {late}' if late else ''}.")
    for run in group.runs:
        notes += [f"{group.label}, seed {run.seed}: went on in another environment: {move}." for move in run.moves]
    for run in group.runs:
        notes += [f"{group.label}, seed {run.seed}: the guard rolled back {text}." for text in run.rollbacks]
    told = summarise_known(forgetting_as_told(run) for run in group.counted)
    if told.n:
        over = f" over {told.n} of {len(group.counted)} seeds" if told.n < len(group.counted) else ""
        notes.append(f"{group.label}: told the domain of every image, it would have FA {told.mean:.1f}{over}.")
    probed = sum(bool(by_domain(run, "Unfamiliar")) for run in group.counted)
    if 0 < probed < len(group.counted):
        notes.append(f"{group.label}: Unfamiliar is over {probed} of {len(group.counted)} seeds, the ones measured.")
    return notes


def _precision_notes(groups: Sequence[Group]) -> list[str]:
    """What was computed in which precision, if not all in the same."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            if precision := run.environment.get("precision"):
                found.setdefault(str(precision), []).append(group.label)
    if len(found) < 2:
        return []
    listed = "; ".join(f"{precision}: {', '.join(dict.fromkeys(names))}" for precision, names in sorted(found.items()))
    return [f"Not every run was computed in the same precision: {listed}."]


def _first_lines(notes: object) -> list[str]:
    """The first lines of notes as found in a file, without the files they list; nothing if it is something else."""
    texts = [note.strip() for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    return [text.splitlines()[0].rstrip(":. ") for text in texts if text]


def _texts(value: object) -> dict[str, str]:
    """A mapping of texts as found in a file, or nothing if it is something else."""
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}
