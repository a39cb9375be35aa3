"""A run as read from disk: what the report and the command line know of it.

A run directory is readable without this package::

    config.json              what was asked for, every value spelled out
    environment.json         versions, device, threads
    journal.jsonl            one line an epoch, a stage, a probe; of an earlier run too, up to the line ``continued``
    matrix.json              accuracies and metrics, a row a finished stage
    samples.safetensors      a few images and what the method made of them (if it augments)
    features-*.safetensors   embeddings of some test images after each stage (if asked for)
    state.safetensors        the method after its last finished stage
    state-before.safetensors the method after the stage before; gone when the run is finished
    checkpoint*.safetensors  where the stage under way is; gone when it is finished
    weights.safetensors      the final network, once the run is complete
    predictions-*.csv        what it says about the images of domains without labels
    bad-batch-*.json         images with which the losses of a stage stopped being numbers, if that happened

A *result* is the same without the tensors, in one small JSON file that can be kept in a repository.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratp.errors import RatpError, RunDirectoryError
from ratp.files import LostFileError, parse_json, read_bytes, read_json, write_json
from ratp.matrix import Matrix
from ratp.schema import CONFIG, ENVIRONMENT, JOURNAL, MATRIX, RESULT

RESULT_KIND = "ratp result"

# Mark of results that true labels of targets went into.
ORACLE = "knows target labels"
# Mark of results that begin with those of an earlier run: new domains were not measured in its stages.
CONTINUED = "continued"
# What of a config determines the result; the fingerprint is its hash.
DECIDED = ("stream", "order", "method", "method_file", "seed", "recipe", "switches", "guard", "after")
_FOUND = ("classes", "data", "weights")
# Events of a journal that a result keeps.
_KEPT = ("stage_finished", "probe", "continued")
_LONGEST = 1e12  # seconds of a stage


@dataclass(frozen=True)
class RunRecord:
    """One run, as far as it has come.

    Attributes:
        path: Run directory or result file it was read from.
        config: Contents of ``config.json``, in the present form.
        environment: Contents of ``environment.json``, likewise.
        matrix: Accuracies of the finished stages.
        journal: Events in order.
        name: What to call it in tables; None: after its method and what was changed.
        differing: Switches and sizes that are not the usual ones; None: those that its config says were changed.
        apart: What tells it apart from other runs beside it that would be called the same.
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
    def label(self) -> str:
        """Method, with its preset and switches where they are not the default ones; oracles and the like are marked."""
        return self.label_without(())

    def label_without(self, switches: Collection[str]) -> str:
        """The label, without switches that go without saying."""
        marks = [ORACLE] * self.is_oracle + [CONTINUED] * self.is_continued + list(self.apart)
        if self.name is not None:
            return f"{self.name} ({', '.join(marks)})" if marks else self.name
        preset = self.config["preset"]
        extra = [*marks, preset] if preset != "official" else marks
        extra += [f"{name}={value}" for name, value in self.changed.items() if name not in switches]
        return f"{self.method} ({', '.join(extra)})" if extra else self.method

    @property
    def changed(self) -> Mapping[str, Any]:
        """Switches and sizes that are not the usual ones."""
        return self.config["changed"] if self.differing is None else self.differing

    @property
    def is_oracle(self) -> bool:
        """Whether it was told the true labels of targets."""
        return bool(self.config.get("uses_target_labels"))

    @property
    def is_continued(self) -> bool:
        """Whether it begins with the stages of an earlier run."""
        return bool(self.config.get("after"))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.config["seed"])

    @property
    def samples(self) -> Path | None:
        """File with sample images, if the run kept one."""
        path = self.path / "samples.safetensors"
        return path if path.is_file() else None

    @property
    def features(self) -> tuple[Path, ...]:
        """Files with the embeddings of some test images, a stage each, as far as the run kept them."""
        found = (self.path / f"features-{stage}.safetensors" for stage in range(self.matrix.stages))
        return tuple(path for path in found if path.is_file())

    @property
    def seconds(self) -> float:
        """Training time of the finished stages."""
        return sum(float(e["seconds"]) for e in self.events("stage_finished"))

    @property
    def moves(self) -> tuple[str, ...]:
        """What it went on with that it did not begin with: versions, device; a text a time, each once."""
        returns = (event for event in self.journal if event.get("event") in ("continued", "run_resumed"))
        found = (describe_changes(event.get("environment")) for event in returns)
        return tuple(dict.fromkeys(text for text in found if text))

    @property
    def guarded(self) -> list[Mapping[str, Any]]:
        """The ends of the stages that the guard judged, with what it made of them."""
        return [event for event in self.events("stage_finished") if isinstance(event.get("guard"), dict)]

    @property
    def rollbacks(self) -> tuple[str, ...]:
        """What the guard undid, and why; a text a stage."""
        undone = filter(is_undone, self.guarded)
        return tuple(f"{event.get('domain')}: {'; '.join(event['guard'].get('reasons', ()))}" for event in undone)

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """The journal's events of one kind, in order."""
        return [event for event in self.journal if event.get("event") == kind]

    def to_json(self) -> dict[str, Any]:
        """The run as a result: everything but the tensors."""
        return {
            "kind": RESULT_KIND,
            **RESULT.mark,
            "config": CONFIG.marked(self.config),
            "environment": dict(self.environment),
            "matrix": self.matrix.to_json(),
            "journal": [e for e in self.journal if e.get("event") in _KEPT or e.get("environment")],
        }

    def export(self, path: Path) -> None:
        """Writes the run as a result file."""
        write_json(path, self.to_json())


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """The hash of what in a config determines the result."""
    decisive = {name: config[name] for name in (*DECIDED, *_FOUND) if name in config}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def describe_changes(found: object) -> str:
    """What changed in the environment of a run, as its journal has it, in words."""
    pairs = found.items() if isinstance(found, dict) else ()
    return ", ".join(f"{name} {v[0]} → {v[1]}" for name, v in pairs if isinstance(v, list) and len(v) == 2)


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return (path / "config.json").is_file()


def read_run(path: Path | str) -> RunRecord:
    """Reads a run directory or a result file.

    Raises:
        RunDirectoryError: If there is nothing of the kind, or it is damaged.
    """
    path = Path(path)
    config, environment, matrix, journal = _read_result(path) if path.is_file() else _read_folder(path)
    if not isinstance(config, dict) or not _CONFIG_KEYS.keys() <= config.keys():
        raise RunDirectoryError(f"{path} was not written by ratp: its config lacks {', '.join(_CONFIG_KEYS)}.")
    odd = [name for name, kind in _CONFIG_KEYS.items() if not isinstance(config[name], kind)]
    wrong = [f"{name} {reprlib.repr(config[name])}" for name in odd]
    parts = {"environment": (environment, dict), "matrix": (matrix, dict), "journal": (journal, list)}
    wrong += [name for name, (value, kind) in parts.items() if not isinstance(value, kind)]
    if "fingerprint" in config and config["fingerprint"] != fingerprint_of(config):
        wrong.append("config")
    if wrong or not all(is_event(event) for event in journal):
        raise RunDirectoryError(f"{path} is damaged: {', '.join(wrong) or 'the journal'} is not what it should be.")
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
        raise RunDirectoryError(f"{path} is no ratp result file; give a run directory or an exported result.")
    data = RESULT.read(data, path)
    config = data.get("config")
    if isinstance(config, dict):
        config = CONFIG.read(config, f"the config in {path}")
    return config, data.get("environment"), data.get("matrix"), data.get("journal")


def read_config(path: Path) -> dict[str, Any]:
    """Reads the ``config.json`` of a run directory.

    Raises:
        RunDirectoryError: If there is none, or it cannot be read.
    """
    if not path.exists():
        raise RunDirectoryError(f"{path} does not exist. `ratp run` makes run directories.")
    if not is_run(path):
        inside = sorted(path.glob("*/config.json"))
        advice = f"It holds some: name one, e.g. {inside[0].parent}." if inside else "`ratp run` makes run directories."
        raise RunDirectoryError(f"{path} is no run directory: it has no config.json. {advice}")
    return CONFIG.read(read_json(path / "config.json"), path / "config.json")


def _read_folder(path: Path) -> tuple[Any, Any, Any, Any]:
    config = read_config(path)
    forms = {"environment.json": ENVIRONMENT, "matrix.json": MATRIX}
    environment, matrix = (form.read(read_json(path / name), path / name) for name, form in forms.items())
    return config, environment, matrix, read_journal(path / "journal.jsonl")


def is_event(event: Any) -> bool:
    """Whether an item of a journal is what a run writes, as far as its readers rely on it."""
    return (
        isinstance(event, dict)
        and isinstance(event.get("event"), str)
        and isinstance(event.get("stage", 0), int)
        and isinstance(event.get("seconds", 0), int | float)
        and abs(event.get("seconds", 0)) < _LONGEST
    )


def is_undone(event: Mapping[str, Any]) -> bool:
    """Whether the end of a stage says that the guard undid it."""
    guard = event.get("guard")
    return isinstance(guard, dict) and bool(guard.get("rolled_back"))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Reads a journal; a last line cut short by a crash is dropped.

    Raises:
        LostFileError: If the file is missing or damaged before its last line.
        RunDirectoryError: If it cannot be read.
    """
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
            raise LostFileError(f"{path}:{number} is damaged: it is no event of a run.")
        events.append(JOURNAL.read(event, f"{path}:{number}"))
    return events
