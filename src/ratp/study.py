"""Studies: many runs that belong together, and what became of each.

Every run has a directory named by the hash of all that determines it: a run that is asked for twice is made once, and
a changed file (:mod:`ratp.study_file`) finds again what it still asks for. What became of a run is read from its
directory, every time.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ratp.config import as_dict
from ratp.errors import ConfigError, RatpError, RunDirectoryError, unknown
from ratp.events import Event
from ratp.files import UnreadableFileError, is_leftover, read_json, safe_name, write_json, writing
from ratp.known_results import ImagesAtHand, is_config_of, result_of
from ratp.lock import is_held
from ratp.notes import Note
from ratp.on_devices import run_all_on_devices
from ratp.on_ray import check_ray, run_all_on_ray
from ratp.plan import RunPlan
from ratp.record import RunRecord, read_run
from ratp.run import Run
from ratp.run_folder import files_in, holds_others, with_advice
from ratp.schema import CONFIG, FAILURE, STUDY, NewerFileError
from ratp.side_by_side import Listener, Result, run_all
from ratp.stream import Report
from ratp.study_record import AskedRun, Row, StudyRecord

ABOUT, FAILURES, REPORT = "study.json", "failures", "report"
# Of its runs as any others, by `ratp report`.
COMPARISON = "comparison"
State = Literal["finished", "running", "interrupted", "failed", "waiting"]
# Makes runs as run_all does.
Executor = Callable[..., list[Result]]
STATES: tuple[State, ...] = ("finished", "running", "interrupted", "failed", "waiting")


@dataclass(frozen=True)
class Entry:
    """One run of a study.

    Attributes:
        plan: What to run.
        folder: Its directory.
        rows: Where tables show it; the first is its first appearance in the file.
        result: A result that was known before, if it need not be run.
    """

    plan: RunPlan
    folder: Path
    rows: tuple[Row, ...]
    result: RunRecord | None = None

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self.folder.name

    @property
    def settings(self) -> str:
        """Its method and all values, but for order and seed, as text to compare."""
        values = {name: value for name, value in self.plan.decisions().items() if name not in ("order", "seed")}
        return json.dumps(values, sort_keys=True)

    @property
    def title(self) -> str:
        """Label, stream, order and seed."""
        order = ">".join(self.plan.order)
        return f"{self.rows[0].label}, {self.plan.spec.name} {order}, seed {self.plan.seed}"


@dataclass(frozen=True)
class Study:
    """All runs of a study and where they are.

    Attributes:
        title: What it is, in a line.
        path: The file it was read from.
        folder: Folder of its runs.
        entries: Its runs, each once, in the order of the file.
        titles: What its grids are about, by their number, of those that say so.
    """

    title: str
    path: Path
    folder: Path
    entries: tuple[Entry, ...]
    titles: Mapping[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        return self.path.stem

    def states(self) -> dict[str, State]:
        """What became of every run, by the name of its directory."""
        return {entry.name: self.state(entry) for entry in self.entries}

    def state(self, entry: Entry) -> State:
        """What became of one run."""
        return "finished" if self.record(entry) is not None else self._unfinished(entry)

    def _unfinished(self, entry: Entry) -> State:
        """What became of a run that has not come to its end."""
        if is_held(entry.folder):
            return "running"
        if _exists(self._failure_file(entry)):
            return "failed"
        return "interrupted" if _exists(entry.folder / "config.json") else "waiting"

    def reason(self, entry: Entry, state: State) -> str:
        """Why a run is in some state, if there is more to say: why it failed, or how what it left is damaged."""
        if state == "failed":
            return self._failure(entry)
        if state not in ("interrupted", "waiting"):
            return ""
        return str(self.obstacle(entry) or _find_record(entry)[1])

    def obstacle(self, entry: Entry) -> RunDirectoryError | None:
        """Why a run cannot begin or go on in its directory, if that or its config cannot be read; and what to do."""
        path = entry.folder / "config.json"
        way_out = f"Move {entry.folder} away or remove it, and `ratp study run` makes this run anew."
        try:
            present = files_in(entry.folder)
            if not present:
                return None
            if path.name not in present:
                return RunDirectoryError(f"{holds_others(entry.folder, present)} and no {path.name}. {way_out}")
            CONFIG.read(read_json(path), path)
        except OSError as error:
            return RunDirectoryError(
                f"cannot read {entry.folder}: {error.strerror}. Make it readable, or move it away."
            )
        except (NewerFileError, UnreadableFileError):  # which the run itself tells
            return None
        except RunDirectoryError as error:
            return with_advice(error, way_out)
        return None

    def _failure(self, entry: Entry) -> str:
        try:
            file = self._failure_file(entry)
            kept = str(FAILURE.read(read_json(file), file).get("error", ""))
        except RatpError:
            kept = ""
        return kept.strip() or "no reason was kept"

    def record(self, entry: Entry) -> RunRecord | None:
        """A run that came to its end; None if it has not, or what it left is damaged."""
        return _find_record(entry)[0] or entry.result

    def results(self) -> StudyRecord:
        """The study as its report sees it: every run asked for, with its result if it came to its end."""
        asked = []
        for entry in self.entries:
            plan = entry.plan
            known = self.record(entry)
            record = replace(known, differing=plan.changed) if known else None  # as `changed.by_now` would find it
            state: State = "finished" if record else self._unfinished(entry)
            reason = "" if record else self.reason(entry, state)
            about = plan.spec.name, plan.order, plan.seed
            asked.append(AskedRun(entry.rows, *about, state, reason, record, entry.settings))
        return StudyRecord(self.title, tuple(asked), self._usual(), self.titles)

    def _usual(self) -> dict[tuple[int, str], Any]:
        """The value of every swept switch in the grid's plain run."""
        swept = {(row.grid, row.sweep[0]) for entry in self.entries for row in entry.rows if row.sweep}
        usual: dict[tuple[int, str], Any] = {}
        for entry in self.entries:
            plain = {row.grid for row in entry.rows if row.sweep is None and not row.is_variant}
            values = as_dict(entry.plan.recipe) | as_dict(entry.plan.config)
            usual |= {(grid, name): values[name] for grid, name in swept if grid in plain}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in usual.items()}

    def claim(self) -> None:
        """Marks the folder as this study's. It may hold directories of its runs already, brought from elsewhere.

        Raises:
            RunDirectoryError: If it is another's, or cannot be written.
        """
        if self.check_folder():
            self._mark()
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            own = {entry.folder.name for entry in self.entries} | {REPORT, COMPARISON, FAILURES}
            found = (item for item in self.folder.iterdir() if not is_leftover(item))
            present = [item.name for item in found if item.name not in own]
            if present:
                told = f"{holds_others(self.folder, present)} and no study"
                raise RunDirectoryError(f"{told}. Choose an empty or new folder with --out.")
        except OSError as error:
            raise self._unusable(error) from error
        self._mark()

    def check_folder(self) -> bool:
        """Whether the folder is marked as this study's.

        Raises:
            RunDirectoryError: If it is another's, or cannot be read.
        """
        about = self.folder / ABOUT
        try:
            next(self.folder.iterdir(), None)
            about.stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unusable(error) from error
        try:
            there = STUDY.read(read_json(about), about)
        except NewerFileError:
            raise
        except RunDirectoryError as error:
            raise with_advice(error, "Remove that file: the runs of this study are found without it.") from error
        if there.get("study") != self.name:
            other = f"belongs to the study {there.get('study')!r}, not to {self.name!r}"
            raise RunDirectoryError(f"{self.folder} {other}. Choose another with --out.")
        file = self.folder / str(there.get("file", ""))
        if "file" in there and file.is_file() and not file.samefile(self.path):
            other = f"belongs to another study of that name, {os.path.relpath(file)}"
            raise RunDirectoryError(f"{self.folder} {other}. Choose another with --out.")
        return True

    def _mark(self) -> None:
        """Says in the folder whose it is, unless it is said."""
        path = self.folder / ABOUT
        about = STUDY.marked({"study": self.name, "title": self.title, "file": self._file_as_seen()})
        if not path.exists() or read_json(path) != about:
            write_json(path, about)

    def _file_as_seen(self) -> str:
        """The study's file as seen from its folder, so that both can be moved or copied together."""
        return Path(os.path.relpath(self.path, self.folder)).as_posix()

    def _unusable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(f"cannot use {self.folder} for a study: {error.strerror}. Choose another with --out.")

    def note_failure(self, entry: Entry, error: Exception) -> None:
        """Keeps the reason why a run failed.

        Raises:
            RunDirectoryError: If the folder cannot be written.
        """
        file = self._failure_file(entry)
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as failure:
            told = f"cannot write {file.parent}: {failure.strerror}. What was to be kept there: {entry.title}: {error}"
            raise RunDirectoryError(told) from failure
        write_json(file, FAILURE.marked({"run": entry.title, "error": str(error)}))

    def clear_failure(self, entry: Entry) -> None:
        """Forgets an earlier failure: the run goes on, or has come to its end.

        Raises:
            RunDirectoryError: If the folder cannot be written.
        """
        file = self._failure_file(entry)
        with writing(file):
            file.unlink(missing_ok=True)

    def with_results(self, records: Iterable[RunRecord]) -> Study:
        """The study, knowing results of its runs that were made elsewhere; unfinished ones count for nothing."""
        complete = [record for record in records if record.matrix.complete]
        entries = (replace(entry, result=result_of(entry.plan, complete) or entry.result) for entry in self.entries)
        return replace(self, entries=tuple(entries))

    def with_images_at_hand(self, progress: Report | None = None) -> Study:
        """The study without those known results that were made from other images than there are now; a note tells.

        Results are taken as they are where images cannot be read, or are not read from files.

        Args:
            progress: As of :class:`ratp.stream.DataOptions`, if images have to be decoded for it.

        Raises:
            RunDirectoryError: If runs in its folder were made from others: new ones would stand beside them.
        """
        at_hand = ImagesAtHand(progress)
        ours: dict[str, list[str]] = {}
        known: dict[str, list[str]] = {}
        entries = []
        for entry in self.entries:
            finished = _find_record(entry)[0]
            record = finished or entry.result
            changed = at_hand.unlike(entry.plan, record.config) if record else []
            if changed:
                (ours if finished else known).setdefault(", ".join(changed), []).append(entry.title)
            entries.append(replace(entry, result=None) if changed else entry)
        if ours:
            told = "; ".join(f"{how_many(titles)}: those of {names}" for names, titles in ours.items())
            raise RunDirectoryError(
                f"runs in {self.folder} were made from other images than there are now ({told}). Bring those back, or "
                "make all runs anew in another folder with --out."
            )
        for names, titles in known.items():
            told = f"{how_many(titles)}: what is known was made from other images of {names}, and does not count"
            warnings.warn(told, Note, stacklevel=2)
        return replace(self, entries=tuple(entries))

    def _failure_file(self, entry: Entry) -> Path:
        return self.folder / FAILURES / f"{entry.name}.json"


def run_study(
    study: Study,
    *,
    at_once: int | None = None,
    on_event: Listener | None = None,
    on_end: Callable[[Entry, Result], None] | None = None,
    on: Executor = run_all,
) -> None:
    """Makes all runs that have not come to their end, side by side; what was interrupted or failed goes on.

    A run that fails does not stop the others. Runs that another process is making are left to it. On a processor every
    run has one thread to compute with, so that a study gives the same wherever and in whatever company it is made.

    Args:
        study: What to run; its folder must be claimed.
        at_once: As for :func:`ratp.side_by_side.run_all`.
        on_event: Likewise.
        on_end: Told what became of a run, by one thread at a time.
        on: What makes the runs, as :func:`find_executor` names it.
    """
    todo = []
    for entry in study.entries:
        if study.state(entry) not in ("finished", "running"):
            if obstacle := study.obstacle(entry):
                study.note_failure(entry, obstacle)
                if on_end is not None:
                    on_end(entry, obstacle)
            else:
                todo.append(entry)
    runs = [Run(entry.plan, entry.folder, reuse_source=True, wait=True) for entry in todo]
    by_run = {id(run): entry for run, entry in zip(runs, todo, strict=True)}

    going: set[int] = set()

    def seen(run: Run, event: Event) -> None:
        if id(run) not in going:
            going.add(id(run))
            study.clear_failure(by_run[id(run)])  # whatever stops it now is another reason
        if on_event is not None:
            on_event(run, event)

    def ended(run: Run, result: Result) -> None:
        entry = by_run[id(run)]
        if not isinstance(result, RatpError):
            study.clear_failure(entry)
        elif study.state(entry) not in ("finished", "running"):  # another process may have been quicker
            study.note_failure(entry, result)
        if on_end is not None:
            on_end(entry, result)

    on(runs, at_once=at_once, one_thread=True, on_event=seen, on_end=ended)


def find_executor(on: str = "local", ray_address: str | None = None, devices: Sequence[torch.device] = ()) -> Executor:
    """What makes runs: ``local`` for this machine, ``ray`` for a cluster (:mod:`ratp.on_ray`).

    Args:
        on: Its name.
        ray_address: Address of the cluster, if Ray is not to look for one.
        devices: Those of this machine, if they are several (:mod:`ratp.on_devices`).

    Raises:
        ConfigError: If there is no such, or it cannot be used.
    """
    if on not in ("local", "ray"):
        raise ConfigError(unknown("place to run on", on, ("local", "ray")))
    if on == "ray":
        check_ray(ray_address)
        return partial(run_all_on_ray, address=ray_address)
    if ray_address is not None:
        raise ConfigError("an address of a Ray cluster needs --on ray.")
    return partial(run_all_on_devices, devices=devices) if devices else run_all


def run_name(plan: RunPlan) -> str:
    """Name of a run's directory: what it is, and the hash of all that determines it."""
    return f"{safe_name(plan.title)}-{plan.digest()[:12]}"


def _find_record(entry: Entry) -> tuple[RunRecord | None, str]:
    """What a run's directory holds, if it is that run, not another, and came to its end; else how it is damaged."""
    if not _exists(entry.folder / "weights.safetensors"):
        return None, ""
    try:
        record = read_run(entry.folder)
    except RatpError as error:
        return None, str(error)
    return (record if record.matrix.complete and is_config_of(entry.plan, record.config) else None), ""


def how_many(titles: Sequence[str]) -> str:
    """One run by its title, several by their number and the first."""
    return titles[0] if len(titles) == 1 else f"{len(titles)} runs, {titles[0]} among them"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long a name, or no permission
        return False
