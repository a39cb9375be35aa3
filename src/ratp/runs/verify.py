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
from typing import Any, TypeVar

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
from ratp.evaluation.details import DetailFiles
from ratp.evaluation.matrix import Matrix
from ratp.runs.record import (
    CHECKSUMS_FILE,
    RESULT_KIND,
    RunRecord,
    check_owner,
    is_run,
    read_checksums,
    read_config,
    read_journal,
    read_run,
)

CACHES, STUDY_FILE = ("decoded", "demo", "source-models"), "study.json"
REPEAT = "Repeat the run's command, which writes it again."
AGAIN = "Delete it and repeat the run's command, which writes it again."
COPY = "Restore it from a copy; without one, remove the folder and repeat the run's command."
EARLIER = "Delete it and repeat the run's command, which continues from an earlier stage or step."
WITHOUT = "Delete it; reports leave it out."


# How to read each kind of file, by a pattern for its name, and what to do if that fails.
Readers = dict[str, tuple[Callable[[Path], object], str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file, and what to do."""

    path: Path
    problem: str
    advice: str


@dataclass
class Check:
    """What checking a place has found: which files were read, which are damaged, and what was not checked."""

    path: Path
    kind: str
    read_files: set[Path] = field(default_factory=set)
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, path: Path, read: Callable[[Path], T], advice: str) -> T | None:
        """Reads a file; if something is wrong with it, keeps that and returns None."""
        self.read_files.add(path)
        try:
            return read(path)
        except OutdatedFileError:
            self.notes.append(f"{path.name} is of an earlier version, and no longer read")
        except FileNotFoundError:
            self.damaged.append(Damage(path, f"{path} is missing.", advice.replace("Delete it and repeat", "Repeat")))
        except (RatpError, OSError, KeyError, TypeError, ValueError) as error:
            problem = brief(error) if isinstance(error, RatpError) else f"cannot read {path}: {error}."
            self.damaged.append(Damage(path, problem, advice))
        return None


def about_tensors(path: Path, schema: Schema, **expected: Any) -> dict[str, Any]:
    """Reads a tensor file that ratp wrote and returns its metadata; its hash and the given entries must fit."""
    written = read_tensors(path)[1]
    about = schema.read(written, path)
    if schema.key in written and "sha256" not in read_about(path):  # files without a version may have none
        raise LostFileError(f"{path} is damaged: it has lost its hash.")
    for name, value in expected.items():
        if about.get(name) != value:
            raise LostFileError(f"{path} is of another run, stage or kind: its {name} differs.")
    return about


def check_result(path: Path) -> Check:
    """Checks an exported result."""
    found = Check(path, "result")
    record = found.read(path, read_run, "Restore it from a copy, or export the run again.")
    if record and "sha256" not in read_json(path):
        found.notes.append("only its form was checked: an earlier version wrote it, without a hash")
    return found


def check_run(folder: Path) -> Check:
    """Checks a run directory, unless a run is writing there."""
    found = Check(folder, "run")
    if is_held(folder):
        found.notes.append("not checked, because the run is being written; repeat this when it has ended")
        return found
    config = found.read(folder / "config.json", lambda _: read_config(folder), COPY)
    if config is None:
        return found
    readers = _readers(folder, config)
    for path in sorted(folder.iterdir()):
        name = path.name
        if is_leftover(path):
            found.notes.append(f"{name} was left by a killed run; the next call of its command removes it")
        elif reader := next((readers[pattern] for pattern in readers if fnmatch(name, pattern)), None):
            found.read(path, *reader)
        elif name not in ("config.json", LOCK_FILE, CHECKSUMS_FILE) and path.is_file():
            found.notes.append(f"{name} was not checked: it is not a file of the run")
    _compare_checksums(folder, config, readers, found)
    if not found.damaged and (record := found.read(folder / "config.json", lambda _: read_run(folder), COPY)):
        found.damaged += _disagreements(folder, record)
    return found


def _readers(folder: Path, config: Mapping[str, Any]) -> Readers:
    run = {"fingerprint": config["fingerprint"]} if "fingerprint" in config else {}

    before = folder / "state-before.safetensors"
    details = DetailFiles(folder, config.get("fingerprint"))

    def tensors(schema: Schema, **expected: Any) -> Callable[[Path], object]:
        return partial(about_tensors, schema=schema, **expected)

    return {
        "environment.json": (lambda path: ENVIRONMENT.read(read_json(path), path), AGAIN),
        "matrix.json": (lambda path: Matrix.from_json(_own(read_json(path), config, path)), AGAIN),
        "journal.jsonl": (lambda path: read_journal(path, config), AGAIN),
        "state.safetensors": (tensors(STATE, **run), EARLIER if before.exists() else COPY),
        before.name: (tensors(STATE, **run), "Delete it; only a damaged state would need it."),
        "checkpoint*.safetensors": (tensors(CHECKPOINT, **run), EARLIER),
        "weights.safetensors": (tensors(WEIGHTS), AGAIN),
        "samples.safetensors": (tensors(SAMPLES), WITHOUT),
        "features-*.safetensors": (tensors(FEATURES), WITHOUT),
        "predictions-*.csv": (read_bytes, AGAIN),
        "bad-batch-*.json": (read_json, WITHOUT),
        "details-*.json": (details.read_file, WITHOUT),
        "examples.json": (lambda _: details.read_examples(), WITHOUT),
    }


def _own(about: dict[str, Any], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    check_owner(about, config, path)
    return about


def _compare_checksums(folder: Path, config: Mapping[str, Any], readers: Readers, found: Check) -> None:
    """Finds the files of a finished run that are missing or not as they were when it ended."""
    path = folder / CHECKSUMS_FILE
    if not path.exists():
        found.notes.append("only hashes inside files were checked: the run is unfinished or of an earlier version")
        return
    checksums = found.read(path, lambda _: read_checksums(folder, config), AGAIN)
    damaged = {damage.path.name for damage in found.damaged}
    for name, expected in (checksums or {}).items():
        if name not in damaged:
            advice = next((readers[pattern][1] for pattern in readers if fnmatch(name, pattern)), COPY)
            found.read(folder / name, partial(_check_hash, expected=expected), advice)


def _check_hash(path: Path, expected: str) -> None:
    if sha256_of(path) != expected:
        raise LostFileError(f"{path} has changed since the run ended.")


def _disagreements(folder: Path, record: RunRecord) -> Iterator[Damage]:
    """Yields the files, intact each, that do not fit the others of the run."""
    state, matrix, weights = (folder / name for name in ("state.safetensors", "matrix.json", "weights.safetensors"))
    if record.journal and record.journal[-1]["event"] == "run_finished" and not weights.exists():
        yield Damage(weights, f"{weights} is missing, though the run is finished.", REPEAT)
    if state.exists():
        saved = Matrix.from_json(about_tensors(state, STATE)["matrix"])
        if saved.to_json()["accuracy"] != record.matrix.to_json()["accuracy"]:
            yield Damage(matrix, f"{matrix} and {state.name} have other accuracies.", REPEAT)
    elif record.matrix.stages:
        yield Damage(state, f"{state} is missing, though stages are finished.", COPY)


def check_cache(folder: Path) -> Check:
    """Checks a cache folder: decoded images, drawn domains and source networks."""
    found = Check(folder, "cache")
    again = "Delete it; it is made again when needed."
    found.read_files |= {path for path in (folder / "decoded").glob("*") if path.suffix in (".images", ".json")}
    for path, problem in store.check_cache(folder):
        found.damaged.append(Damage(path, f"{path} {problem}.", again))
    for name, schema in (("demo", DRAWN_DOMAIN), ("source-models", SOURCE_MODEL)):
        for path in sorted((folder / name).glob("*.safetensors")):
            if is_leftover(path):
                found.notes.append(f"{path.name} was left by a killed writer; it does no harm")
            else:
                found.read(path, partial(about_tensors, schema=schema, key=path.stem), again)
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
