"""Studies: runs that belong together, and the state of each.

The name of a run's directory contains a hash of everything that determines the run. So a run that is requested twice is
executed once, and an edited study file finds the runs it still requests. States are always read from the directories.
Imports no torch: :mod:`ratp.studies.file` plans a study, :mod:`ratp.studies.execute` runs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ratp._core.files import (
    CONFIG,
    FAILURE,
    STUDY,
    NewerFileError,
    UnreadableFileError,
    is_leftover,
    read_json,
    safe_name,
    write_json,
    writing,
)
from ratp._core.locks import is_held
from ratp.errors import RatpError, RunDirectoryError
from ratp.runs.record import RunRecord, files_in, holds_others, label_shift_of, read_run, with_advice
from ratp.studies.record import AskedRun, Row, StudyRecord
from ratp.studies.reuse import Identity

if TYPE_CHECKING:
    from ratp.runs.plan import RunPlan

ABOUT, FAILURES, REPORT = "study.json", "failures", "report"
# Where `ratp report` puts its own report on a study's runs.
COMPARISON = "comparison"
State = Literal["finished", "running", "interrupted", "failed", "waiting"]
STATES: tuple[State, ...] = ("finished", "running", "interrupted", "failed", "waiting")


def usual_folder(name: str) -> Path:
    """The default folder of a study's runs."""
    return Path("runs") / "studies" / safe_name(name)


@dataclass(frozen=True)
class Entry:
    """One run of a study.

    Attributes:
        folder: Its directory.
        rows: Where tables show it; the first is its first appearance in the file.
        identity: What determines its result.
        result: A result from elsewhere; then it need not be run.
        planned: What to run; None if the study was read from ``study.json``.
    """

    folder: Path
    rows: tuple[Row, ...]
    identity: Identity
    result: RunRecord | None = None
    planned: RunPlan | None = field(default=None, repr=False, compare=False)

    @property
    def plan(self) -> RunPlan:
        """What to run."""
        if self.planned is None:
            raise ValueError("only `read_study` plans runs")
        return self.planned

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self.folder.name

    @property
    def stream(self) -> str:
        """Name of its stream."""
        return str(self.identity.decisions["stream"])

    @property
    def order(self) -> tuple[str, ...]:
        """Codes of its domains in their order of arrival."""
        return tuple(self.identity.decisions["order"])

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.identity.decisions["seed"])

    @property
    def settings(self) -> str:
        """Its method and all values except order and seed, as text to compare."""
        values = {name: value for name, value in self.identity.decisions.items() if name not in ("order", "seed")}
        return json.dumps(values, sort_keys=True)

    @property
    def title(self) -> str:
        """Label, stream, order and seed."""
        return f"{self.rows[0].label}, {self.stream} {'>'.join(self.order)}, seed {self.seed}"

    def record(self) -> RunRecord | None:
        """Its result; None if it is unfinished or damaged."""
        return self.read()[0] or self.result

    def read(self) -> tuple[RunRecord | None, str]:
        """The result in its directory, if that run is this one and complete; and how the directory is damaged."""
        if not _exists(self.folder / "weights.safetensors"):
            return None, ""
        try:
            record = read_run(self.folder)
        except RatpError as error:
            return None, str(error)
        return (record if record.matrix.complete and self.identity.matches(record.config) else None), ""

    def obstacle(self) -> RunDirectoryError | None:
        """Why its directory or config cannot be read, so that the run can neither start nor continue."""
        path = self.folder / "config.json"
        way_out = f"Move {self.folder} away or remove it, and `ratp study run` starts this run over."
        try:
            present = files_in(self.folder)
            if not present:
                return None
            if path.name not in present:
                return holds_others(self.folder, present, path.name, way_out)
            CONFIG.read(read_json(path), path)
        except OSError as error:
            return RunDirectoryError(f"cannot read {self.folder}: {error.strerror}. Make it readable, or move it away.")
        except (NewerFileError, UnreadableFileError):  # the run itself reports these
            return None
        except RunDirectoryError as error:
            return with_advice(error, way_out)
        return None


@dataclass(frozen=True)
class Study:
    """All runs of a study and their folder.

    Attributes:
        title: Its title, one line.
        path: The study file.
        folder: Folder of its runs.
        entries: Its runs, each once, in the order of the file.
        titles: Titles of grids, by number.
        usual: The unswept value of every swept switch, by grid and switch.
        sources: What the plans were made from (:mod:`ratp.studies.saved`).
    """

    title: str
    path: Path
    folder: Path
    entries: tuple[Entry, ...]
    titles: Mapping[int, str] = field(default_factory=dict)
    usual: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    sources: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        return self.path.stem

    def states(self) -> dict[str, State]:
        """The state of every run, by the name of its directory."""
        return {entry.name: self.state(entry) for entry in self.entries}

    def remaining(self) -> list[Entry]:
        """The runs to execute: neither finished nor running."""
        return [entry for entry in self.entries if self.state(entry) not in ("finished", "running")]

    def state(self, entry: Entry) -> State:
        """The state of one run."""
        return "finished" if entry.record() is not None else self._unfinished(entry)

    def _unfinished(self, entry: Entry) -> State:
        if is_held(entry.folder):
            return "running"
        if _exists(self._failure_file(entry)):
            return "failed"
        return "interrupted" if _exists(entry.folder / "config.json") else "waiting"

    def reason(self, entry: Entry, state: State) -> str:
        """Why a run failed, or how its directory is damaged; empty if there is nothing to say."""
        if state == "failed":
            return self._failure(entry)
        if state not in ("interrupted", "waiting"):
            return ""
        return str(entry.obstacle() or entry.read()[1])

    def _failure(self, entry: Entry) -> str:
        try:
            file = self._failure_file(entry)
            kept = str(FAILURE.read(read_json(file), file).get("error", ""))
        except RatpError:
            kept = ""
        return kept.strip() or "no reason was kept"

    def results(self) -> StudyRecord:
        """The study as its report sees it: every run, with its result if it is finished."""
        asked = []
        for entry in self.entries:
            known = entry.record()
            record = replace(known, differing=entry.identity.changed) if known else None  # by today's defaults
            state: State = "finished" if record else self._unfinished(entry)
            reason = "" if record else self.reason(entry, state)
            about = entry.stream, entry.order, entry.seed
            shift = label_shift_of(entry.identity.decisions)
            asked.append(AskedRun(entry.rows, *about, state, reason, record, entry.settings, shift))
        return StudyRecord(self.title, tuple(asked), self.usual, self.titles)

    def with_results(self, records: Iterable[RunRecord]) -> Study:
        """The study with results of its runs from elsewhere; incomplete ones do not count."""
        complete = [record for record in records if record.matrix.complete]
        found = [entry.identity.result_among(complete) or entry.result for entry in self.entries]
        entries = (replace(entry, result=result) for entry, result in zip(self.entries, found, strict=True))
        return replace(self, entries=tuple(entries))

    def to_json(self) -> dict[str, Any]:
        """The contents of ``study.json``, for :func:`ratp.studies.saved.open_study`; shared settings occur once."""
        settings: dict[str, int] = {}
        runs = []
        for entry in self.entries:
            identity = asdict(entry.identity)
            about = {name: identity["decisions"].pop(name) for name in ("order", "seed")}
            number = settings.setdefault(json.dumps(identity), len(settings))
            rows = [[row.grid, row.label, row.sweep, row.is_variant] for row in entry.rows]
            runs.append({"folder": entry.name, "rows": rows, "settings": number, **about})
        return {
            "study": self.name,
            "title": self.title,
            "file": Path(os.path.relpath(self.path, self.folder)).as_posix(),  # both can be moved together
            "sources": dict(self.sources),
            "plan": {
                "settings": [json.loads(text) for text in settings],
                "runs": runs,
                "titles": {str(grid): title for grid, title in self.titles.items()},
                "usual": [[grid, name, value] for (grid, name), value in self.usual.items()],
            },
        }

    def claim(self) -> None:
        """Marks the folder as this study's. It may already hold directories of its runs, copied from elsewhere."""
        if not self.check_folder():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                own = {entry.folder.name for entry in self.entries} | {REPORT, COMPARISON, FAILURES}
                found = (item for item in self.folder.iterdir() if not is_leftover(item))
                present = [item.name for item in found if item.name not in own]
            except OSError as error:
                raise self._unusable(error) from error
            if present:
                raise holds_others(self.folder, present, "study")
        path = self.folder / ABOUT
        about = json.loads(json.dumps(STUDY.marked(self.to_json())))  # tuples as lists
        if not path.exists() or read_json(path) != about:
            write_json(path, about)

    def check_folder(self) -> bool:
        """Whether the folder is marked as this study's."""
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
        other = ""
        if there.get("study") != self.name:
            other = f"the study {there.get('study')!r}, not to {self.name!r}"
        file = self.folder / str(there.get("file", ""))
        if not other and "file" in there and file.is_file() and not file.samefile(self.path):
            other = f"another study of that name, {os.path.relpath(file)}"
        if other:
            raise RunDirectoryError(f"{self.folder} belongs to {other}. Choose another with --out.")
        return True

    def _unusable(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(f"cannot use {self.folder} for a study: {error.strerror}. Choose another with --out.")

    def note_failure(self, entry: Entry, error: Exception) -> None:
        """Keeps the reason why a run failed."""
        file = self._failure_file(entry)
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as failure:
            lost = f"It should hold the reason why this run failed: {entry.title}: {error}"
            raise RunDirectoryError(f"cannot write {file.parent}: {failure.strerror}. {lost}") from failure
        write_json(file, FAILURE.marked({"run": entry.title, "error": str(error)}))

    def clear_failure(self, entry: Entry) -> None:
        """Removes the reason of an earlier failure, because the run continues or has finished."""
        file = self._failure_file(entry)
        with writing(file):
            file.unlink(missing_ok=True)

    def _failure_file(self, entry: Entry) -> Path:
        return self.folder / FAILURES / f"{entry.name}.json"


def how_many(titles: Sequence[str]) -> str:
    """One run by its title; several by their number and the first."""
    return titles[0] if len(titles) == 1 else f"{len(titles)} runs, {titles[0]} among them"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # name too long, or no permission
        return False
