"""A run's directory: checks whether a folder can serve as one, and writes its files.

:mod:`ratp.runs.record` lists the files. The state after the last finished stage is authoritative
(:mod:`ratp.runs.states`); config, matrix and journal are made to agree with it.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ratp._core.environment import Precision, changes
from ratp._core.files import (
    CHECKSUMS,
    CONFIG,
    ENVIRONMENT,
    FEATURES,
    JOURNAL,
    MATRIX,
    SAMPLES,
    WEIGHTS,
    LostFileError,
    NewerFileError,
    make_folder,
    read_bytes,
    read_json,
    read_tensors,
    remove_leftovers,
    safe_name,
    sha256_of,
    write_bytes,
    write_json,
    write_tensors,
    write_text,
    writing,
)
from ratp.errors import Note, RunDirectoryError
from ratp.evaluation.details import DetailFiles
from ratp.evaluation.matrix import Matrix
from ratp.evaluation.online import with_scores
from ratp.runs.differences import describe_differences
from ratp.runs.record import (
    CHECKSUMS_FILE,
    check_owner,
    files_in,
    fingerprint_of,
    hash_of_content,
    holds_others,
    read_journal,
    with_advice,
)
from ratp.runs.states import Checkpoints, Stage, State, States
from ratp.streams.stream import Stream
from ratp.training.method import Method

SAMPLE_COUNT = 10
# Names of all files of a finished run.
FINISHED = (
    *("config.json", "environment.json", "matrix.json", "journal.jsonl", "state.safetensors", "weights.safetensors"),
    *("samples.safetensors", "features-*.safetensors", "predictions-*.csv", "bad-batch-*.json"),
    *("details-*.json", "examples.json"),
)


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses a folder that holds anything but this run, before anything is written to it."""
    if not prepare_folder(folder):
        return
    try:
        there = CONFIG.read(read_json(folder / "config.json"), folder / "config.json")
    except NewerFileError:
        raise
    except RunDirectoryError as error:
        raise with_advice(error) from error
    if "fingerprint" not in there or "method" not in there:
        raise RunDirectoryError(
            f"{folder} holds a config.json that ratp did not write. Choose another folder with --out."
        )
    if there["fingerprint"] != config["fingerprint"] and not _only_method_file_edited(folder, there, config):
        raise RunDirectoryError(f"{folder} holds another run. {describe_differences(folder, there, config)}")


def _only_method_file_edited(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether the run differs in its method's file alone and has saved nothing yet, so that it can start over."""
    if None in (there.get("method_file"), here["method_file"]):
        return False
    if fingerprint_of({**there, "method_file": here["method_file"]}) != here["fingerprint"]:
        return False
    saved = [path for name in ("state", "checkpoint", "weights") for path in folder.glob(f"{name}*.safetensors")]
    try:
        return not saved and read_json(folder / "matrix.json").get("accuracy") == []
    except RunDirectoryError:
        return False


def prepare_folder(folder: Path) -> bool:
    """Creates a folder if needed and returns whether it holds a run."""
    try:
        make_folder(folder)
        present = files_in(folder)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot use {folder} as a run directory: {error.strerror}. Choose another folder with --out."
        ) from error
    if present and "config.json" not in present:
        raise holds_others(folder, present, "run")
    return bool(present)


class PredictionsWarning(Note):
    """A file of predictions was changed after the run had written it."""


class Journal:
    """The journal of a run, ``journal.jsonl``: one line per event."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.path, self._config = folder / "journal.jsonl", config

    def note(self, event: str, **values: Any) -> None:
        """Appends an event that happens now."""
        self.append(self.now(event, **values))

    @staticmethod
    def now(event: str, **values: Any) -> dict[str, Any]:
        """Returns an event with the present time."""
        return {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}

    def append(self, event: Mapping[str, Any]) -> None:
        """Appends an event; the run is no longer as its checksums say."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            self.path.with_name(CHECKSUMS_FILE).unlink(missing_ok=True)
            file.write(self._line(event))
            if event["event"] in ("stage_finished", "run_finished"):
                file.flush()
                os.fsync(file.fileno())

    def events(self) -> list[dict[str, Any]]:
        """Reads all events."""
        return read_journal(self.path, self._config)

    def of_stage(self, stage: int) -> list[Mapping[str, Any]]:
        """Reads the events of a stage."""
        return [event for event in self.events() if event.get("stage") == stage]

    def finished(self) -> list[dict[str, Any]]:
        """Reads the ``stage_finished`` events."""
        return [event for event in self.events() if event["event"] == "stage_finished"]

    def before(self, stage: int) -> list[dict[str, Any]]:
        """Reads the events before a stage began."""
        return [event for event in self.events() if event.get("stage", -1) < stage]

    def rewrite(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all events."""
        write_text(self.path, "".join(map(self._line, events)))

    def _line(self, event: Mapping[str, Any]) -> str:
        """Returns an event as a line, which names the run."""
        named = {**event, "fingerprint": self._config["fingerprint"]}
        return json.dumps(JOURNAL.marked(named), allow_nan=False) + "\n"


@final
class RunFiles:
    """The files of a run's directory, for the holder of its lock.

    Args:
        folder: The directory.
        config: The contents of ``config.json``.
        save_every: Seconds between two checkpoints within a stage; None disables them.

    Attributes:
        journal: The events so far.
        states: The method after the last finished stage and after the one before.
        checkpoints: Snapshots within the current stage.
        details: What the model gets wrong after every stage.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], save_every: float | None) -> None:
        self._folder, self._config = folder, config
        self._weights = folder / "weights.safetensors"
        self.journal = Journal(folder, config)
        self.states = States(folder, config["fingerprint"], config.get("after", {}).get("stages", 0))
        self.checkpoints = Checkpoints(folder, config["fingerprint"], save_every)
        self.details = DetailFiles(folder, config["fingerprint"])

    @property
    def has_ended(self) -> bool:
        """Whether the run has noted its end."""
        return _has_ended(self.journal.events())

    def find_state(self) -> tuple[State | None, str]:
        """Removes temporary files of killed writers and finds the state, as :meth:`States.find` does."""
        remove_leftovers(self._folder)
        return self.states.find()

    def begin(self, matrix: Matrix, environment: Mapping[str, Any]) -> None:
        """Writes the first files of a new run."""
        write_json(self._folder / "config.json", self._config)  # first, because it marks the folder as a run
        write_json(self._folder / "environment.json", ENVIRONMENT.marked(environment))
        self._write_matrix(matrix, ())
        self.journal.rewrite(())

    def take_over(self, state: State, matrix: Matrix, journal: Iterable[Mapping[str, Any]]) -> State:
        """Starts the directory from another run's last state; writes the state last, because it is authoritative.

        Args:
            state: The other run's last state.
            matrix: Its accuracies, extended by the domains of this run.
            journal: The first events of this run's journal.
        """
        self.journal.rewrite(journal)
        self.states.go_back(None)
        self.states.save(state.tensors, matrix, state.finished)
        return self.states.latest()

    def bring_in_line(self, matrix: Matrix, finished: Sequence[Mapping[str, Any]]) -> str:
        """Makes config, matrix and journal agree with the state.

        Args:
            matrix: Accuracies of the finished stages.
            finished: Their ``stage_finished`` events.

        Returns:
            What is wrong with the journal, if it is lost; it is then rewritten from ``finished``.
        """
        if fingerprint_of(read_json(self._folder / "config.json")) != self._config["fingerprint"]:
            write_json(self._folder / "config.json", self._config)
        self._write_matrix(matrix, finished)
        try:
            kept = self.journal.before(matrix.stages)
        except LostFileError as error:
            self.journal.rewrite(finished)
            self.journal.note("journal_lost", what=str(error))
            return str(error)
        known = sum(event["event"] == "stage_finished" for event in kept)
        self.journal.rewrite([*kept, *finished[known:]])
        return ""

    def go_back(self, state: State | None, stages: int, results: Iterable[Path]) -> None:
        """Makes an earlier state the latest one and removes what came after it.

        Args:
            state: The state; None if there is none left.
            stages: Number of stages finished at that state.
            results: Files that only a finished run has, besides the weights.
        """
        with writing(self._folder):
            for path in (self._weights, *results):
                path.unlink(missing_ok=True)
        if next(self.checkpoints.found(stages), None) is None:
            self.checkpoints.remove()
        self.states.go_back(state)

    def environment_changes(self, now: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Compares the environment with the one the run began in; records the present one if that file is lost."""
        path = self._folder / "environment.json"
        try:
            return changes(ENVIRONMENT.read(read_json(path), path), now)
        except NewerFileError:
            raise
        except RunDirectoryError:
            write_json(path, ENVIRONMENT.marked(now))
            with writing(path):
                path.with_name(CHECKSUMS_FILE).unlink(missing_ok=True)
            return {}

    def begin_stage(self, work: Stage, domain: str) -> None:
        """Notes the start of a stage, or restores the events it had logged before an interruption."""
        if work.done:
            for event in work.events:
                self.journal.append(event)
            self.journal.note("stage_resumed", stage=work.number, domain=domain, done=work.done)
        else:
            self.journal.note("stage_started", stage=work.number, domain=domain, images=work.images, steps=work.total)

    def save_checkpoint(self, work: Stage, seconds: float) -> None:
        """Saves the progress of a stage that has taken ``seconds`` in this process."""
        self.checkpoints.save(work.checkpoint(seconds, self.journal.of_stage(work.number)))

    def lose_numbers(self, stage: int, domain: str, what: str, precision: Precision) -> None:
        """Notes non-finite numbers in a stage, in place of the events it had logged."""
        self.journal.rewrite(self.journal.before(stage))
        self.journal.note("numbers_lost", stage=stage, domain=domain, what=what, precision=precision)

    def finish_stage(self, tensors: Mapping[str, Tensor], matrix: Matrix, event: Mapping[str, Any]) -> None:
        """Saves the method's state after a stage first, because it is authoritative; then matrix and event."""
        finished = [*self.journal.finished(), event]
        self.states.save(tensors, matrix, finished)
        self._write_matrix(matrix, finished)
        self.journal.append(event)

    def batch(self, stage: int) -> Path:
        """Returns the path for the batch at which the numbers of a stage became non-finite."""
        return self._folder / f"bad-batch-{stage}.json"

    @property
    def has_weights(self) -> bool:
        """Whether the final network of this run is saved and undamaged."""
        with suppress(RunDirectoryError):
            check_owner(read_tensors(self._weights)[1], self._config, self._weights)
            return True
        return False

    def write_weights(self, network: Mapping[str, Tensor], classes: Sequence[str]) -> None:
        """Saves the final network."""
        about = {"fingerprint": self._config["fingerprint"], "classes": list(classes)}
        write_tensors(self._weights, network, WEIGHTS.marked(about))

    def has_predictions(self, path: Path, *, labelled: bool) -> bool:
        """Whether this run has written a file of predictions; of finished runs, earlier versions did not note it.

        They wrote none for labelled domains, and so a finished run that noted none has all it needs.
        """
        events = self.journal.events()
        noted = [event for event in events if event["event"] == "predicted" and event.get("file") == path.name]
        if labelled and not noted and _has_ended(events):
            return True
        if not path.exists() or not (noted or _has_ended(events)):
            return False
        written = noted[-1].get("sha256") if noted else None  # earlier versions noted no hash
        if written is not None and not _is_as_written(path, written):
            advice = "To have this run's predictions, move it away and repeat the command"
            warnings.warn(f"{path} has changed since this run wrote it. {advice}", PredictionsWarning, stacklevel=2)
        return True

    def write_predictions(self, path: Path, table: str) -> None:
        """Writes a file of predictions, and notes it."""
        write_text(path, table)
        self.journal.note("predicted", file=path.name, sha256=sha256_of(path))

    def settle(self) -> None:
        """Notes the end of the run, once, hashes its files and removes those that only an unfinished run needs."""
        if not self.has_ended:
            self.journal.note("run_finished")
        self.states.settle()
        self.checkpoints.remove()
        path = self._folder / CHECKSUMS_FILE
        if not path.exists():  # or a file damaged since would be taken for intact
            files = sorted(file for pattern in FINISHED for file in self._folder.glob(pattern))
            hashes = {file.name: sha256_of(file) for file in files}
            about = {"fingerprint": self._config["fingerprint"], "files": hashes}
            write_json(path, CHECKSUMS.marked({**about, "sha256": hash_of_content(about)}))

    def save_samples(self, method: Method, stream: Stream, device: torch.device) -> None:
        """Saves a few source images and what the method turns them into, if it augments images."""
        if stream.order[0] in stream.gone:
            return
        images = stream.source.images
        spread = torch.linspace(0, len(images) - 1, min(len(images), SAMPLE_COUNT)).long()  # images come class by class
        images = images[spread]
        shown = method.show(images, torch.Generator(device).manual_seed(0))
        if shown:
            write_tensors(self._folder / "samples.safetensors", {"original": images, **shown}, SAMPLES.mark)

    def save_features(self, found: Mapping[str, Tensor], stream: Stream, stage: int) -> None:
        """Saves the embeddings of some test images after a stage, if there are any."""
        if found:
            about = {"domains": list(stream.order), "classes": list(stream.classes), "stage": stage}
            write_tensors(self._folder / f"features-{stage}.safetensors", found, FEATURES.marked(about))

    def copy_features(self, files: Iterable[Path]) -> None:
        """Copies the embeddings that another run has saved."""
        for path in files:
            write_bytes(self._folder / path.name, read_bytes(path))

    def _write_matrix(self, matrix: Matrix, finished: Sequence[Mapping[str, Any]]) -> None:
        """Writes the matrix, and what the ``stage_finished`` events say of the passes over new domains."""
        about = {**matrix.to_json(), **with_scores(finished), "fingerprint": self._config["fingerprint"]}
        write_json(self._folder / "matrix.json", MATRIX.marked(about))


def _has_ended(events: Sequence[Mapping[str, Any]]) -> bool:
    return bool(events) and events[-1]["event"] == "run_finished"


def _is_as_written(path: Path, sha256: str) -> bool:
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def prediction_files(stream: Stream, folder: Path, *, labelled: bool) -> dict[str, Path]:
    """Returns the paths of the predictions by target: of those without labels or, if ``labelled``, of all."""
    bare = [domain.name for domain in stream.unlabelled]
    others = [target.name for target in stream.targets if labelled and target.name not in (*bare, *stream.gone)]
    found: dict[str, tuple[str, Path]] = {}  # by name in lower case: some file systems ignore case
    for domain in (*bare, *others):
        plain = safe_name(domain)
        names = (plain if number == 1 else f"{plain}-{number}" for number in count(1))
        name = next(name for name in names if name.lower() not in found)
        found[name.lower()] = domain, folder / f"predictions-{name}.csv"
    return dict(found.values())
