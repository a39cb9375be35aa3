"""Restores a planned study from ``study.json``, so that ``ratp study status`` need not plan it again.

The file keeps the identity of every planned run and the state of everything the plans were made from. As long as none
of that has changed, no code of the study is run: neither torch nor a user's method file is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratp._core.files import STUDY, read_json
from ratp.errors import RatpError, RunDirectoryError
from ratp.studies.record import Row
from ratp.studies.reuse import Identity
from ratp.studies.sources import sources_of
from ratp.studies.study import ABOUT, Entry, Study, usual_folder


def open_study(path: Path | str, folder: Path | None = None, weights: str = "auto") -> Study:
    """The study of a file, or of the folder of its runs: restored if nothing has changed, else planned again.

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

    return read_study(path, folder, RunRequest(weights=weights))


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
    try:
        about = STUDY.read(read_json(folder / ABOUT), folder / ABOUT)
        kept, sources = about["plan"], about["sources"]
        files = [str(path.parent / name) for name in sources["files"]]
        if about["study"] != path.stem or sources != sources_of(path, weights, files):
            return None
        entries = tuple(_entry(folder, kept["settings"], run) for run in kept["runs"])
        titles = {int(grid): str(title) for grid, title in kept["titles"].items()}
        usual = {(int(grid), str(name)): _hashable(value) for grid, name, value in kept["usual"]}
        return Study(str(about["title"]), path, folder, entries, titles, usual, sources)
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
