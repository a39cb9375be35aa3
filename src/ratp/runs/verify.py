"""Reads every stored byte of runs, exported results and caches, and says what is damaged and what to do about it.

A finished run has ``checksums.json``, with the sha256 of all its files. What an unfinished run has saved is checked by
the hashes inside its tensor files, and by the run that each file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from ratp._core.files import (
    CHECKPOINT,
    DRAWN_DOMAIN,
    ENVIRONMENT,
    FEATURES,
    SAMPLES,
    SOURCE_MODEL,
    STATE,
    STUDY,
    WEIGHTS,
    LostFileError,
    OutdatedFileError,
    Schema,
    is_leftover,
    read_about,
    read_bytes,
    read_json,
    read_tensors,
    sha256_of,
)
from ratp._core.locks import LOCK_FILE, is_held
from ratp.data.cache import store
from ratp.errors import RatpError, RunDirectoryError, brief
from ratp.evaluation.matrix import Matrix
from ratp.runs.record import (
    CHECKSUMS_FILE,
    RESULT_KIND,
    check_owner,
    is_run,
    read_checksums,
    read_config,
    read_journal,
    read_run,
)

CACHES, STUDY_FILE = ("decoded", "demo", "source-models"), "study.json"
AGAIN = "Delete it and repeat the run's command, which writes it again."
COPY = "Restore it from a copy; without one, remove the folder and repeat the run's command."
EARLIER = "Delete it and repeat the run's command, which continues from an earlier stage or step."
WITHOUT = "Delete it; reports leave it out."


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file, and what to do."""

    path: Path
    problem: str
    advice: str


@dataclass
class Check:
    """What checking a place has found: how many files were read, which are damaged, and what was not checked."""

    path: Path
    kind: str
    files: int = 0
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, path: Path, read: Callable[[Path], object], advice: str) -> bool:
        """Reads a file and keeps what is wrong with it; returns whether it is intact."""
        self.files += 1
        try:
            read(path)
        except OutdatedFileError:
            self.notes.append(f"{path.name} is of an earlier version, and no longer read")
        except (RatpError, OSError, KeyError, TypeError, ValueError) as error:
            problem = brief(error) if isinstance(error, RatpError) else f"{type(error).__name__}: {error}"
            self.damaged.append(Damage(path, problem, advice))
            return False
        return True


def tensors_of(path: Path, schema: Schema, **expected: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Reads a tensor file that ratp wrote: its hash must be there and fit, and so must some entries about it."""
    tensors, written = read_tensors(path)
    about = schema.read(written, path)
    if schema.key in written and "sha256" not in read_about(path):  # files without a version may have none
        raise LostFileError(f"{path} is damaged: it has lost its hash.")
    for name, value in expected.items():
        if about.get(name) != value:
            raise LostFileError(f"{path} is of another run, stage or kind: its {name} differs.")
    return tensors, about


def check_result(path: Path) -> Check:
    """Checks an exported result."""
    found = Check(path, "result")
    if found.read(path, read_run, "Restore it from a copy, or export the run again.") and "sha256" not in read_json(
        path
    ):
        found.notes.append("only its form was checked: an earlier version wrote it, without a hash")
    return found


def check_run(folder: Path) -> Check:
    """Checks a run directory, unless a run is writing there."""
    found = Check(folder, "run")
    if is_held(folder):
        found.notes.append("not checked, because the run is being written; repeat this when it has ended")
        return found
    if not found.read(folder / "config.json", lambda _: read_config(folder), COPY):
        return found
    config = read_config(folder)
    readers = _readers(config)
    for path in sorted(folder.iterdir()):
        name = path.name
        if is_leftover(path):
            found.notes.append(f"{name} was left by a killed run; the next call of its command removes it")
        elif reader := next((readers[pattern] for pattern in readers if fnmatch(name, pattern)), None):
            found.read(path, *reader)
        elif name not in ("config.json", LOCK_FILE, CHECKSUMS_FILE) and path.is_file():
            found.notes.append(f"{name} was not checked: it is not a file of the run")
    damaged = {damage.path.name for damage in found.damaged}
    found.damaged += [damage for damage in _unlike_checksums(folder, config, found) if damage.path.name not in damaged]
    if not found.damaged:
        found.read(folder, lambda _: _agree(folder, config), COPY)
        found.files -= 1
    return found


def _readers(config: Mapping[str, Any]) -> dict[str, tuple[Callable[[Path], object], str]]:
    """How to read each kind of file, and what to do if that fails."""
    run = {"fingerprint": config["fingerprint"]} if "fingerprint" in config else {}

    def tensors(schema: Schema, **expected: Any) -> Callable[[Path], object]:
        return partial(tensors_of, schema=schema, **expected)

    return {
        "environment.json": (lambda path: ENVIRONMENT.read(read_json(path), path), AGAIN),
        "matrix.json": (lambda path: Matrix.from_json(_own(read_json(path), config, path)), AGAIN),
        "journal.jsonl": (lambda path: read_journal(path, config), AGAIN),
        "state.safetensors": (tensors(STATE, **run), EARLIER),
        "state-before.safetensors": (tensors(STATE, **run), "Delete it; only a damaged state would need it."),
        "checkpoint*.safetensors": (tensors(CHECKPOINT, **run), EARLIER),
        "weights.safetensors": (tensors(WEIGHTS), AGAIN),
        "samples.safetensors": (tensors(SAMPLES), WITHOUT),
        "features-*.safetensors": (tensors(FEATURES), WITHOUT),
        "predictions-*.csv": (read_bytes, AGAIN),
        "bad-batch-*.json": (read_json, WITHOUT),
    }


def _own(about: dict[str, Any], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    check_owner(about, config, path)
    return about


def _unlike_checksums(folder: Path, config: Mapping[str, Any], found: Check) -> Iterator[Damage]:
    """Yields the files of a finished run that are missing or not as they were when it ended."""
    path = folder / CHECKSUMS_FILE
    if not path.exists():
        found.notes.append("only hashes inside files were checked: the run is unfinished or of an earlier version")
        return
    if not found.read(path, lambda _: read_checksums(folder, config), "Delete it and repeat the run's command."):
        return
    readers = _readers(config)
    for name, expected in read_checksums(folder, config).items():
        file = folder / name
        advice = next((readers[pattern][1] for pattern in readers if fnmatch(name, pattern)), COPY)
        if not file.exists():
            yield Damage(file, f"{file} is missing.", advice.replace("Delete it and repeat", "Repeat"))
        elif sha256_of(file) != expected:
            yield Damage(file, f"{file} has changed since the run ended.", advice)


def _agree(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises an error unless config, matrix, journal and state, intact each, are of the same run and stage."""
    record = read_run(folder)
    state = folder / "state.safetensors"
    if not state.exists():
        if record.matrix.stages:
            raise RunDirectoryError(f"{state} is missing, though stages are finished.")
        return
    about = tensors_of(state, STATE)[1]
    if Matrix.from_json(about["matrix"]).to_json()["accuracy"] != record.matrix.to_json()["accuracy"]:
        raise RunDirectoryError(f"{folder / 'matrix.json'} and {state.name} have other accuracies.")
    ended = bool(record.journal) and record.journal[-1].get("event") == "run_finished"
    if ended and not (folder / "weights.safetensors").exists():
        raise RunDirectoryError(f"{folder / 'weights.safetensors'} is missing, though the run is finished.")


def check_cache(folder: Path) -> Check:
    """Checks a cache folder: decoded images, drawn domains and source networks."""
    found = Check(folder, "cache")
    again = "Delete it; it is made again when needed."
    found.files = sum(path.suffix in (".images", ".json") for path in (folder / "decoded").glob("*"))
    for path, problem in store.check_cache(folder):
        found.damaged.append(Damage(path, f"{path} {problem}.", again))
    for name, schema in (("demo", DRAWN_DOMAIN), ("source-models", SOURCE_MODEL)):
        for path in sorted((folder / name).glob("*.safetensors")):
            if is_leftover(path):
                found.notes.append(f"{path.name} was left by a killed writer; it does no harm")
            else:
                found.read(path, partial(tensors_of, schema=schema, key=path.stem), again)
    return found


def _may_be_result(path: Path) -> bool:
    try:
        return read_json(path).get("kind") == RESULT_KIND
    except RunDirectoryError:
        return True


def check_place(path: Path) -> list[Check]:
    """Checks a run, an exported result, a cache, or all runs and results in a folder."""
    if path.is_file():
        return [check_result(path)]
    if is_run(path) or (path / "journal.jsonl").exists():
        return [check_run(path)]
    if any((path / name).is_dir() for name in CACHES):
        return [check_cache(path)]
    runs = [check_run(item) for item in sorted(path.glob("*")) if is_run(item)]
    results = [check_result(item) for item in sorted(path.glob("*.json")) if _may_be_result(item)]
    if (path / STUDY_FILE).is_file():
        study = Check(path, "study")
        study.read(
            path / STUDY_FILE, lambda file: STUDY.read(read_json(file), file), "Delete it and repeat the command."
        )
        runs.insert(0, study)
    if not runs and not results:
        raise RunDirectoryError(
            f"{path} holds nothing to verify. Give a run directory, a study, an exported result, or a cache folder."
            if path.is_dir()
            else f"{path} does not exist."
        )
    return runs + results
