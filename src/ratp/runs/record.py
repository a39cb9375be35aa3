"""Reads a run from disk, for reports and the command line. Needs no torch.

A run directory is readable without this package::

    config.json              the request with every value spelled out
    environment.json         versions, device or processor, threads
    journal.jsonl            one line per epoch, stage, probe, pass; of an earlier run too, up to the line ``continued``
    matrix.json              accuracies and metrics, one row per finished stage; with --online the scores of the passes
    samples.safetensors      a few images and what the method turned them into (if it augments images)
    features-*.safetensors   embeddings of some test images after each stage (if requested)
    state.safetensors        the method after its last finished stage
    state-before.safetensors the method after the stage before; removed when the run is finished
    checkpoint*.safetensors  snapshots within the current stage; removed when it is finished
    weights.safetensors      the final network, once the run is complete
    predictions-*.csv        predictions for the images of unlabelled domains, and of all targets of one's own images
    details-*.json           confusions and calibration on every labelled domain after each stage
    examples.json            pictures of the most confident mistakes and the least certain predictions on every target
    bad-batch-*.json         the batch at which the losses of a stage became non-finite, if that happened
    checksums.json           the sha256 of all these files, once the run is complete (:mod:`ratp.runs.verify`)

A *result* is the same without the tensors, in one small JSON file that can be committed to a repository.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratp._core.files import (
    CHECKSUMS,
    CONFIG,
    ENVIRONMENT,
    JOURNAL,
    MATRIX,
    RESULT,
    LostFileError,
    UnreadableFileError,
    is_leftover,
    parse_json,
    read_about,
    read_bytes,
    read_json,
    write_json,
)
from ratp._core.locks import LOCK_FILE
from ratp.errors import RatpError, RunDirectoryError
from ratp.evaluation.details import DetailFiles, Details, Examples
from ratp.evaluation.matrix import Matrix
from ratp.evaluation.online import with_scores

RESULT_KIND = "ratp result"
CHECKSUMS_FILE = "checksums.json"
START_OVER = "Remove the folder to start over, or choose another with --out."
NEW_FOLDER = "Choose an empty or new folder with --out."
_REPAIR = "The command that started the run writes it again."

# Mark of methods that use true labels of targets.
ORACLE = "knows target labels"
# Mark of runs that continue an earlier run, in whose stages the new domains were not measured.
CONTINUED = "continued"
# The values of a recipe that thin targets by class; the source stays as it is.
LABEL_SHIFT = ("label_shift", "label_shift_seed", "missing_classes")
# The entries of a config that determine the result; the fingerprint is their hash.
DECIDED = ("stream", "order", "method", "method_file", "seed", "recipe", "switches", "guard", "adopted", "after")
_FOUND = ("classes", "data", "weights")
# Events that a result keeps.
_KEPT = ("stage_finished", "probe", "continued")
_MAX_SECONDS = 1e12  # of a stage


@dataclass(frozen=True)
class RunRecord:
    """One run, finished or not.

    Attributes:
        path: Run directory or result file it was read from.
        config: Contents of ``config.json``, migrated to the present schema.
        environment: Contents of ``environment.json``, likewise.
        matrix: Accuracies of the finished stages.
        journal: Events in order.
        name: Name in tables; None for method and changed switches.
        differing: Switches and sizes that differ from the defaults; None for those listed in its config.
        apart: Further marks in the label, to distinguish it from other runs in the same table.
    """

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    matrix: Matrix
    journal: tuple[Mapping[str, Any], ...]
    name: str | None = None
    differing: Mapping[str, Any] | None = None
    apart: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.config["method"])

    @property
    def stream(self) -> str:
        """Name of the stream, with the label shift of its targets if there is one."""
        return ", ".join(filter(None, (str(self.config["stream"]), label_shift_of(self.config))))

    @property
    def label(self) -> str:
        """Method with non-default preset and switches, and marks such as that of oracles."""
        return self.label_without(())

    def label_without(self, switches: Collection[str]) -> str:
        """Returns the label without the given switches."""
        marks = [ORACLE] * self.is_oracle + [CONTINUED] * self.is_continued + list(self.apart)
        if self.name is not None:
            return f"{self.name} ({', '.join(marks)})" if marks else self.name
        preset = self.config["preset"]
        extra = [*marks, preset] if preset != "official" else marks
        extra += [f"{name}={value}" for name, value in self.changed.items() if name not in switches]
        return f"{self.method} ({', '.join(extra)})" if extra else self.method

    @property
    def changed(self) -> Mapping[str, Any]:
        """Switches and sizes that differ from the defaults."""
        return self.config["changed"] if self.differing is None else self.differing

    @property
    def is_oracle(self) -> bool:
        """Whether the method uses true labels of targets."""
        return bool(self.config.get("uses_target_labels"))

    @property
    def is_continued(self) -> bool:
        """Whether it continues an earlier run."""
        return bool(self.config.get("after"))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.config["seed"])

    @property
    def samples(self) -> Path | None:
        """File with sample images, if there is one."""
        path = self.path / "samples.safetensors"
        return path if path.is_file() else None

    @property
    def features(self) -> tuple[Path, ...]:
        """Files with embeddings of some test images, one per stage."""
        found = (self.path / f"features-{stage}.safetensors" for stage in range(self.matrix.stages))
        return tuple(path for path in found if path.is_file())

    @property
    def details(self) -> dict[int, dict[str, Details]]:
        """The counts on the labelled domains, by stage; none in results and runs of earlier versions."""
        return {stage: found for stage in range(self.matrix.stages) if (found := self._details.read(stage))}

    @property
    def examples(self) -> dict[str, Examples]:
        """Pictures of the targets after the last stage; none in results and runs of earlier versions."""
        return self._details.read_examples()

    @property
    def _details(self) -> DetailFiles:
        return DetailFiles(self.path, self.config.get("fingerprint"))

    @property
    def test_images(self) -> dict[str, int]:
        """Number of test images of the labelled domains; earlier versions did not record it."""
        counts = {name: about.get("tested") for name, about in self._images.items()}
        return {name: count for name, count in counts.items() if type(count) is int and count > 0}

    @property
    def tested_as_trained(self) -> dict[str, bool]:
        """Whether a target is tested on the images that it trains on, by labelled target."""
        targets = (name for name in self.matrix.domains[1:] if name in self.test_images)
        return {name: bool(self._images[name].get("same")) for name in targets}

    @property
    def _images(self) -> dict[str, dict[str, Any]]:
        known = self.config.get("images")
        return {n: about for n, about in known.items() if isinstance(about, dict)} if isinstance(known, dict) else {}

    @property
    def seconds(self) -> float:
        """Training time of the finished stages."""
        return sum(float(e["seconds"]) for e in self.events("stage_finished"))

    @property
    def moves(self) -> tuple[str, ...]:
        """Changes of versions or device when it was resumed or continued, in words, each once."""
        returns = (event for event in self.journal if event.get("event") in ("continued", "run_resumed"))
        found = (describe_changes(event.get("environment")) for event in returns)
        return tuple(dict.fromkeys(text for text in found if text))

    @property
    def guarded(self) -> list[Mapping[str, Any]]:
        """The ``stage_finished`` events of the stages that the guard judged."""
        return [event for event in self.events("stage_finished") if isinstance(event.get("guard"), dict)]

    @property
    def rollbacks(self) -> tuple[str, ...]:
        """The stages that the guard undid, each with its reasons."""
        undone = filter(is_undone, self.guarded)
        return tuple(f"{event.get('domain')}: {'; '.join(event['guard'].get('reasons', ()))}" for event in undone)

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """Returns the journal's events of one kind, in order."""
        return [event for event in self.journal if event.get("event") == kind]

    def to_json(self) -> dict[str, Any]:
        """Returns the run as a result: everything but the tensors."""
        result = {
            "kind": RESULT_KIND,
            **RESULT.mark,
            "config": CONFIG.marked(self.config),
            "environment": dict(self.environment),
            "matrix": {**self.matrix.to_json(), **with_scores(self.journal)},
            "journal": [e for e in self.journal if e.get("event") in _KEPT or e.get("environment")],
        }
        return {**result, "sha256": hash_of_content(result)}

    def export(self, path: Path) -> None:
        """Writes the run as a result file."""
        write_json(path, self.to_json())


def label_shift_of(config: Mapping[str, Any]) -> str:
    """Returns the values of a config that thin targets by class, as text; empty if there are none."""
    recipe = config.get("recipe")
    return ", ".join(f"{n}={recipe[n]}" for n in LABEL_SHIFT if n in recipe) if isinstance(recipe, dict) else ""


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """Hashes the entries of a config that determine the result."""
    decisive = {name: config[name] for name in (*DECIDED, *_FOUND) if name in config}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def hash_of_content(data: Mapping[str, Any]) -> str:
    """Hashes the entries of a JSON file but for its own hash and version."""
    content = {name: value for name, value in data.items() if name not in ("sha256", "schema")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_checksums(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Reads the sha256 of every file of a finished run, by name."""
    path = folder / CHECKSUMS_FILE
    about = CHECKSUMS.read(read_json(path), path)
    check_owner(about, config, path)
    found = about.get("files")
    if not isinstance(found, dict) or about.get("sha256") != hash_of_content(about) or any(map(_is_path, found)):
        raise LostFileError(f"{path} is damaged: its contents are not what was written.")
    return found


def _is_path(name: str) -> bool:
    return Path(name).name != name


def check_owner(about: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> None:
    """Raises LostFileError if a file names another run than the config does; earlier versions named none."""
    if {"fingerprint"} <= about.keys() & config.keys() and about["fingerprint"] != config["fingerprint"]:
        raise LostFileError(
            f"{path} belongs to another run than config.json: two runs have written to this folder, so repeat both in "
            "folders of their own."
        )


def describe_changes(found: object) -> str:
    """Describes the changes of environment that a journal event lists."""
    pairs = found.items() if isinstance(found, dict) else ()
    return ", ".join(f"{name} {v[0]} → {v[1]}" for name, v in pairs if isinstance(v, list) and len(v) == 2)


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return (path / "config.json").is_file()


def with_advice(error: RunDirectoryError, otherwise: str = START_OVER) -> RunDirectoryError:
    """Adds what to do about a file: make it readable if it may be intact, ``otherwise`` if it is lost or damaged."""
    readable = "Make it readable, or choose another folder with --out."
    return RunDirectoryError(f"{error} {readable if isinstance(error, UnreadableFileError) else otherwise}")


def files_in(folder: Path) -> set[str]:
    """Returns the names in a folder but for lock and temporary files; none if it does not exist."""
    try:
        return {item.name for item in folder.iterdir() if not is_leftover(item)} - {LOCK_FILE}
    except FileNotFoundError:
        return set()


def holds_others(folder: Path, names: Collection[str], lacks: str, advice: str = NEW_FOLDER) -> RunDirectoryError:
    """Builds the error for a folder that holds other files and lacks what makes it a run or a study."""
    return RunDirectoryError(f"{folder} holds other files ({', '.join(sorted(names)[:3])}) and no {lacks}. {advice}")


def read_run(path: Path | str) -> RunRecord:
    """Reads a run directory or a result file.

    Args:
        path: The directory, or the file that :meth:`RunRecord.export` wrote.

    Returns:
        The run, finished or not.

    Raises:
        RunDirectoryError: If it is no run, or is damaged.

    Examples:
        >>> ratp.read_run("runs/mine").matrix.average("TDA")
    """
    path = Path(path)
    config, environment, matrix, journal = _read_result(path) if path.is_file() else _read_folder(path)
    if not isinstance(config, dict) or not _CONFIG_KEYS.keys() <= config.keys():
        raise RunDirectoryError(f"{path} was not written by ratp: its config lacks some of {', '.join(_CONFIG_KEYS)}.")
    odd = [name for name, kind in _CONFIG_KEYS.items() if not isinstance(config[name], kind)]
    wrong = [f"{name} {reprlib.repr(config[name])}" for name in odd]
    parts = {"environment": (environment, dict), "matrix": (matrix, dict), "journal": (journal, list)}
    wrong += [name for name, (value, kind) in parts.items() if not isinstance(value, kind)]
    if "fingerprint" in config and config["fingerprint"] != fingerprint_of(config):
        wrong.append("config")
    if wrong or not all(is_event(event) for event in journal):
        raise RunDirectoryError(f"{path} is damaged: invalid {', '.join(wrong) or 'journal'}.")
    try:
        parsed = Matrix.from_json(matrix)
    except RatpError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    if list(parsed.domains) != config["order"]:
        raise RunDirectoryError(f"{path} is damaged: the matrix's domains are not those of the config's order.")
    return RunRecord(path, config, environment, parsed, tuple(journal))


_CONFIG_KEYS: dict[str, type] = {
    "stream": str,
    "order": list,
    "method": str,
    "preset": str,
    "seed": int,
    "changed": dict,
}


def _read_result(path: Path) -> tuple[Any, Any, Any, Any]:
    try:
        data = read_json(path)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{error} Give a run directory or an exported result.") from error
    if data.get("kind") != RESULT_KIND:
        raise RunDirectoryError(f"{path} is not a ratp result file; give a run directory or an exported result.")
    if "sha256" in data and data["sha256"] != hash_of_content(data):
        raise RunDirectoryError(f"{path} is damaged: its contents are not what was exported.")
    data = RESULT.read(data, path)
    config = data.get("config")
    if isinstance(config, dict):
        config = CONFIG.read(config, f"the config in {path}")
    return config, data.get("environment"), data.get("matrix"), data.get("journal")


def read_config(path: Path) -> dict[str, Any]:
    """Reads the ``config.json`` of a run directory."""
    if not path.exists():
        raise RunDirectoryError(f"{path} does not exist. `ratp run` creates run directories.")
    if not is_run(path):
        inside = sorted(path.glob("*/config.json"))
        advice = f"It contains some, e.g. {inside[0].parent}." if inside else "`ratp run` creates run directories."
        raise RunDirectoryError(f"{path} is not a run directory: it has no config.json. {advice}")
    return CONFIG.read(read_json(path / "config.json"), path / "config.json")


def _read_folder(path: Path) -> tuple[Any, Any, Any, Any]:
    config = read_config(path)
    forms = {"environment.json": ENVIRONMENT, "matrix.json": MATRIX}
    try:
        environment, matrix = (form.read(read_json(path / name), path / name) for name, form in forms.items())
    except LostFileError as error:
        raise LostFileError(f"{error} {_REPAIR if (path / 'state.safetensors').exists() else START_OVER}") from error
    check_owner(matrix, config, path / "matrix.json")
    weights = path / "weights.safetensors"
    with suppress(UnreadableFileError):
        check_owner(read_about(weights) if weights.exists() else {}, config, weights)
    return config, environment, matrix, read_journal(path / "journal.jsonl", config)


def is_event(event: Any) -> bool:
    """Whether an item of a journal has the form that its readers rely on."""
    return (
        isinstance(event, dict)
        and isinstance(event.get("event"), str)
        and isinstance(event.get("stage", 0), int)
        and isinstance(event.get("seconds", 0), int | float)
        and abs(event.get("seconds", 0)) < _MAX_SECONDS
        and _is_verdict(event.get("guard"))
    )


def _is_verdict(guard: Any) -> bool:
    """Whether it has the form of what the guard says of a stage, if it says anything."""
    reasons = guard.get("reasons", []) if isinstance(guard, dict) else []
    are_texts = isinstance(reasons, list) and all(isinstance(reason, str) for reason in reasons)
    return are_texts and (not isinstance(guard, dict) or isinstance(guard.get("signs", {}), dict))


def is_undone(event: Mapping[str, Any]) -> bool:
    """Whether a ``stage_finished`` event says that the guard undid the stage."""
    guard = event.get("guard")
    return isinstance(guard, dict) and bool(guard.get("rolled_back"))


def read_journal(path: Path, config: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Reads a journal, without a last line that a crash cut short; all must be of the run with ``config``, if given."""
    lines = read_bytes(path).decode(errors="replace").removesuffix("\n").split("\n")
    if lines == [""]:
        return []
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise LostFileError(f"{path}:{number} is damaged: {error}.") from error
        if not is_event(event):
            raise LostFileError(f"{path}:{number} is damaged: it is not an event of a run.")
        if config is not None:
            check_owner(event, config, path)
        event.pop("fingerprint", None)
        events.append(JOURNAL.read(event, f"{path}:{number}"))
    return events
