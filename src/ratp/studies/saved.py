"""Restores a planned study from ``study.json``, so that ``ratp study status`` need not plan it again.

The file keeps the identity of every planned run and the state of everything the plans were made from. As long as none
of that has changed, torch is not imported. A user's method file never is: its runs are as the file keeps them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratp._core.files import STUDY, read_json, sha256_of
from ratp.errors import Note, RatpError, RunDirectoryError
from ratp.studies.record import Row
from ratp.studies.reuse import Identity
from ratp.studies.sources import sources_of
from ratp.studies.study import ABOUT, Entry, Study, usual_folder


def open_study(path: Path | str, folder: Path | None = None, weights: str = "auto") -> Study:
    """The study of a file, or of the folder of its runs: restored if nothing has changed, else planned again.

    The methods it names by file are programs, and none is run: a study planned again has their runs as last recorded.

    Args:
        path: A study file, or a folder with a ``study.json``.
        folder: Folder of the runs, if ``path`` is a file; by default ``runs/studies/NAME``.
        weights: As for :class:`ratp.runs.request.RunRequest`.
    """
    path = Path(path)
    if path.is_dir():
        folder, path = path, _file_of(path)
    folder = folder or usual_folder(path.stem)
    if study := _restored(path, folder, weights):
        return study
    from ratp.runs.request import RunRequest
    from ratp.studies.file import read_study

    left_out: list[str] = []
    study = read_study(path, folder, RunRequest(weights=weights), left_out=left_out)
    return _with_recorded(study, left_out) if left_out else study


def _with_recorded(study: Study, programs: Sequence[str]) -> Study:
    """Adds the recorded runs of the programs that a study names, as long as they are the same; a note says so."""
    digests = {_digest(Path(program)) for program in programs}
    recorded = _recorded(study.path, study.folder)
    own = [e for e in (recorded.entries if recorded else ()) if str(e.identity.decisions.get("method_file")) in digests]
    warnings.warn(
        f"{study.path.name} names programs as methods ({', '.join(map(os.path.relpath, programs))}), which only "
        f"`ratp study run --trust-methods` runs: {len(own) or 'none'} of their runs are shown, as recorded by it",
        Note,
        stacklevel=3,
    )
    usual = {**recorded.usual, **study.usual} if recorded else study.usual
    return replace(study, entries=(*study.entries, *own), usual=usual)


def _digest(path: Path) -> str:
    """The sha256 of a file, empty if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError:
        return ""


def _file_of(folder: Path) -> Path:
    """The study file of a folder of runs, as seen from here."""
    if not (folder / ABOUT).is_file():
        raise RunDirectoryError(f"{folder} holds no study: it has no {ABOUT}. `ratp study run FILE.toml` creates one.")
    file = STUDY.read(read_json(folder / ABOUT), folder / ABOUT).get("file")
    path = Path(os.path.relpath(folder / str(file)))
    if not file or not path.is_file():
        raise RunDirectoryError(f"the study file of {folder} is not at {path}: give the file instead of the folder.")
    return path


def _restored(path: Path, folder: Path, weights: str) -> Study | None:
    """The study that ``study.json`` keeps; None if it keeps none, or has to be planned again."""
    study = _recorded(path, folder)
    try:
        if study and study.sources == sources_of(path, weights, [str(path.parent / f) for f in study.sources["files"]]):
            return study
    except (RatpError, OSError, LookupError, TypeError, ValueError):
        pass
    return None


def _recorded(path: Path, folder: Path) -> Study | None:
    """The study that ``study.json`` keeps, whatever has changed since; None if it keeps none of that name."""
    try:
        about = STUDY.read(read_json(folder / ABOUT), folder / ABOUT)
        kept = about["plan"]
        if about["study"] != path.stem:
            return None
        entries = tuple(_entry(folder, kept["settings"], run) for run in kept["runs"])
        titles = {int(grid): str(title) for grid, title in kept["titles"].items()}
        usual = {(int(grid), str(name)): _hashable(value) for grid, name, value in kept["usual"]}
        return Study(str(about["title"]), path, folder, entries, titles, usual, about["sources"])
    except (RatpError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _entry(folder: Path, settings: list[Any], run: Mapping[str, Any]) -> Entry:
    identity = Identity(**settings[run["settings"]])
    decisions = {**identity.decisions, "order": [str(code) for code in run["order"]], "seed": int(run["seed"])}
    rows = tuple(Row(int(grid), str(label), _hashable(sweep), bool(own)) for grid, label, sweep, own in run["rows"])
    if Path(run["folder"]).name != run["folder"] or not rows:
        raise ValueError
    identity = Identity(decisions, str(identity.weights), identity.preset, dict(identity.changed), identity.precision)
    for group in ("recipe", "switches"):
        dict(decisions[group])
    return Entry(folder / run["folder"], rows, identity)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
