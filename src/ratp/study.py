"""Studies: many runs that belong together, and what became of each.

Every run has a directory named by the hash of all that determines it: a run that is asked for twice is made once, and
a changed file (:mod:`ratp.study_file`) finds again what it still asks for. What became of a run is read from its
directory, every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ratp.errors import RatpError, RunDirectoryError
from ratp.files import read_json, safe_name, write_json
from ratp.lock import is_held
from ratp.matrix import Matrix
from ratp.plan import RunPlan
from ratp.record import RunRecord, read_run
from ratp.run import Run
from ratp.side_by_side import Listener, Result, run_all

ABOUT, FAILURES = "study.json", "failures"
State = Literal["finished", "running", "interrupted", "failed", "waiting"]
STATES: tuple[State, ...] = ("finished", "running", "interrupted", "failed", "waiting")


@dataclass(frozen=True)
class Row:
    """What a table of a study calls a run: the variant's name, or the method's.

    Attributes:
        grid: Number of the grid, from 0.
        label: Name of the method or variant.
        sweep: Name and value of the switch that is swept; None: it is not one of a sweep.
    """

    grid: int
    label: str
    sweep: tuple[str, Any] | None = None


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
    """

    title: str
    path: Path
    folder: Path
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        return self.path.stem

    def states(self) -> dict[str, State]:
        """What became of every run, by the name of its directory."""
        return {entry.name: self.state(entry) for entry in self.entries}

    def state(self, entry: Entry) -> State:
        """What became of one run."""
        if entry.result is not None or _is_finished(entry.folder):
            return "finished"
        if is_held(entry.folder):
            return "running"
        if self._failure_file(entry).exists():
            return "failed"
        return "interrupted" if (entry.folder / "config.json").exists() else "waiting"

    def reason(self, entry: Entry) -> str:
        """Why a run failed."""
        try:
            return str(read_json(self._failure_file(entry)).get("error", "no reason was kept"))
        except RatpError:
            return "no reason was kept"

    def record(self, entry: Entry) -> RunRecord | None:
        """A run that came to its end; None if it has not."""
        if entry.result is not None:
            return entry.result
        return read_run(entry.folder) if _is_finished(entry.folder) else None

    def claim(self) -> None:
        """Marks the folder as this study's.

        Raises:
            RunDirectoryError: If it is another's, or cannot be written.
        """
        about = self.folder / ABOUT
        if about.exists():
            other = read_json(about).get("study")
            if other != self.name:
                raise RunDirectoryError(
                    f"{self.folder} belongs to the study {other!r}, not to {self.name!r}. Choose another with --out."
                )
            return
        try:
            present = sorted(item.name for item in self.folder.iterdir()) if self.folder.exists() else []
            if present:
                raise RunDirectoryError(
                    f"{self.folder} holds other files ({', '.join(present[:3])}) and no study. "
                    "Choose an empty or new folder with --out."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot use {self.folder} for a study: {error.strerror}.") from error
        write_json(about, {"study": self.name, "title": self.title})

    def note_failure(self, entry: Entry, error: Exception) -> None:
        """Keeps the reason why a run failed."""
        file = self._failure_file(entry)
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"run": entry.title, "error": str(error)})

    def clear_failure(self, entry: Entry) -> None:
        """Forgets an earlier failure: the run is tried again, or has come to its end."""
        self._failure_file(entry).unlink(missing_ok=True)

    def with_results(self, records: Iterable[RunRecord]) -> Study:
        """The study, knowing results of its runs that were made elsewhere; unfinished ones count for nothing."""
        known = {_decided(record.config): record for record in records if record.matrix.complete}
        return replace(
            self,
            entries=tuple(
                replace(entry, result=known.get(_decided(entry.plan.decisions()), entry.result))
                for entry in self.entries
            ),
        )

    def _failure_file(self, entry: Entry) -> Path:
        return self.folder / FAILURES / f"{entry.name}.json"


def run_study(
    study: Study,
    *,
    at_once: int | None = None,
    on_event: Listener | None = None,
    on_end: Callable[[Entry, Result], None] | None = None,
) -> None:
    """Makes all runs that have not come to their end, side by side; what was interrupted or failed goes on.

    A run that fails does not stop the others. Runs that another process is making are left to it.

    Args:
        study: What to run; its folder must be claimed.
        at_once: As for :func:`ratp.side_by_side.run_all`.
        on_event: Likewise.
        on_end: Told what became of a run, by one thread at a time.
    """
    todo = [entry for entry in study.entries if study.state(entry) not in ("finished", "running")]
    runs = [Run(entry.plan, entry.folder, reuse_source=True, wait=True) for entry in todo]
    by_run = {id(run): entry for run, entry in zip(runs, todo, strict=True)}

    def ended(run: Run, result: Result) -> None:
        entry = by_run[id(run)]
        if isinstance(result, RatpError) and not is_held(entry.folder):  # another process may have been quicker
            study.note_failure(entry, result)
        elif not isinstance(result, RatpError):
            study.clear_failure(entry)
        if on_end is not None:
            on_end(entry, result)

    run_all(runs, at_once=at_once, on_event=on_event, on_end=ended)


def run_name(plan: RunPlan) -> str:
    """Name of a run's directory: what it is, and the hash of all that determines it."""
    return f"{safe_name(plan.title)}-{plan.digest()[:12]}"


def _is_finished(folder: Path) -> bool:
    """Whether a run directory holds a run that came to its end."""
    if not (folder / "weights.safetensors").exists():
        return False
    try:
        return Matrix.from_json(read_json(folder / "matrix.json")).complete
    except (RatpError, KeyError, TypeError, ValueError):
        return False


def _decided(config: Mapping[str, Any]) -> str:
    """What determines a result, but for images and weights, as text to compare."""
    keys = ("stream", "order", "method", "method_file", "seed", "recipe", "switches")
    return repr([_plain(config.get(key)) for key in keys])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((key, _plain(item)) for key, item in value.items())
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
