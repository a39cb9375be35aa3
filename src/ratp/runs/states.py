"""What a run continues from: the state after its last finished stage, and checkpoints within the current stage.

``state.safetensors`` is authoritative. When a stage finishes, the previous file becomes ``state-before.safetensors``
before the new one takes its place, so one of the two is always intact. If the last one is damaged or missing, the run
goes back to the one before; a finished run keeps its last state only.

A run that is stopped within a stage continues with the next step from ``checkpoint.safetensors`` or, if that is
damaged, ``checkpoint-before.safetensors``. Checkpoints of another run or stage are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratp._core.files import (
    CHECKPOINT,
    STATE,
    LostFileError,
    NewerFileError,
    OutdatedFileError,
    keep_as,
    read_json,
    read_tensors,
    write_tensors,
    writing,
)
from ratp._core.locks import check_claim
from ratp._core.state import join_tensors, split_tensors
from ratp.errors import Note, RatpError, RunDirectoryError
from ratp.evaluation.matrix import Matrix
from ratp.runs.record import START_OVER, is_event, with_advice
from ratp.training.finite import NonFiniteError, WeightWatch, check_numbers
from ratp.training.method import Method
from ratp.training.phase import Phase, Progress, Tick, load_stage, save_stage

LATEST, BEFORE = "state.safetensors", "state-before.safetensors"
CHECKPOINT_LATEST, CHECKPOINT_BEFORE = "checkpoint.safetensors", "checkpoint-before.safetensors"
_MISFITS = RatpError, KeyError, TypeError, ValueError, RuntimeError


class StateWarning(Note):
    """The last state of a run is damaged or missing, so the run continues from the one before."""


@dataclass(frozen=True)
class State:
    """The state of a run after a finished stage.

    Attributes:
        path: The file it was read from.
        tensors: What the method's ``state`` returned.
        matrix: Accuracies of the stages so far.
        finished: The journal's ``stage_finished`` events of these stages.
        advice: What to do if it does not fit.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    matrix: Matrix
    finished: Sequence[dict[str, Any]]
    advice: str = START_OVER

    def load_into(self, method: Method) -> None:
        """Loads the state into a method that was just built."""
        try:
            method.load_state(self.tensors)
        except _MISFITS as error:
            raise _misfit(self.path, error, self.advice) from error


class States:
    """The states in a run's directory."""

    def __init__(self, folder: Path, fingerprint: str, given: int = 0, advice: str = START_OVER) -> None:
        self._fingerprint, self._given, self._advice = fingerprint, given, advice
        self._latest, self._before = folder / LATEST, folder / BEFORE
        self._matrix = folder / "matrix.json"

    def latest(self) -> State:
        """Returns the state after the last finished stage."""
        return self._read(self._latest)

    def before(self) -> State:
        """Returns the state after the stage before that; raises what :meth:`latest` does."""
        return self._read(self._before)

    def find(self) -> tuple[State | None, str]:
        """The state to continue from (None: the start), and how a later one was lost, if one was."""
        try:
            return self.latest(), ""
        except LostFileError as error:
            lost = str(error)
        try:
            return self.before(), lost
        except LostFileError as error:
            both = f"{lost} {error}"
        had_one = self._latest.exists() or self._before.exists()
        rows = self._results() if had_one or self._matrix.exists() else []
        if not isinstance(rows, list) or len(rows) > max(self._given, 1):
            raise RunDirectoryError(f"{both} Restore one of them to continue. {START_OVER}")
        return None, lost if had_one or rows else ""

    def save(self, tensors: Mapping[str, Tensor], matrix: Matrix, finished: Sequence[Mapping[str, Any]]) -> None:
        """Writes the state after a stage; the latest becomes the one before."""
        about = {"fingerprint": self._fingerprint, "matrix": matrix.to_json(), "stage_events": list(finished)}
        if self._latest.exists():
            keep_as(self._latest, self._before)
        write_tensors(self._latest, tensors, STATE.marked(about))

    def go_back(self, state: State | None) -> None:
        """Makes a state from :meth:`find` the latest; None: removes all."""
        with writing(self._latest):
            if state is not None:
                state.path.replace(self._latest)
                return
            for path in (self._latest, self._before):
                path.unlink(missing_ok=True)

    def settle(self) -> None:
        """Removes the state before, once the run has finished."""
        check_claim(self._before)
        with suppress(OSError):  # it does no harm
            self._before.unlink(missing_ok=True)

    def _results(self) -> Any:
        """Returns the rows of the matrix, one per finished stage."""
        try:
            return read_json(self._matrix).get("accuracy")
        except RunDirectoryError as error:
            raise with_advice(error) from error

    def _read(self, path: Path) -> State:
        tensors, about = read_tensors(path)
        try:
            about = STATE.read(about, path)
            if about["fingerprint"] != self._fingerprint:
                raise RunDirectoryError("it belongs to another run")
            matrix, finished = Matrix.from_json(about["matrix"]), list(about["stage_events"])
            state = State(path, tensors, matrix, finished, self._advice)
            if not all(map(is_event, state.finished)):
                raise RunDirectoryError("it holds something that is not an event of a run")
            return state
        except NewerFileError:
            raise
        except _MISFITS as error:
            raise _misfit(path, error, self._advice) from error


@dataclass
class Checkpoint:
    """A snapshot within a stage.

    Attributes:
        stage: Number of the stage.
        state: State of progress, method and begun phases, packed; None: an earlier version wrote it.
        tensors: The tensors of that state.
        done: Steps made in the stage.
        seconds: Time the stage had taken.
        statistics: What its finished phases had recorded.
        events: Its events in the journal.
    """

    stage: int
    state: Any = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    done: int = 0
    seconds: float = 0.0
    statistics: dict[str, float] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, fingerprint: str, every: float | None) -> None:
        self._folder, self._fingerprint, self._every = folder, fingerprint, every
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self._every is not None and time.monotonic() - self._last >= self._every

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; the latest becomes the one before."""
        about = {
            **CHECKPOINT.mark,
            "fingerprint": self._fingerprint,
            "stage": checkpoint.stage,
            "done": checkpoint.done,
            "seconds": checkpoint.seconds,
            # as text, because numbers may be infinite
            "state": json.dumps([checkpoint.state, checkpoint.statistics, list(checkpoint.events)]),
        }
        latest = self._folder / CHECKPOINT_LATEST
        with writing(latest), suppress(FileNotFoundError):
            latest.replace(self._folder / CHECKPOINT_BEFORE)
        write_tensors(latest, checkpoint.tensors, about)
        self._last = time.monotonic()

    def found(self, stage: int) -> Iterator[Checkpoint]:
        """Yields the intact checkpoints of a stage, latest first."""
        for name in (CHECKPOINT_LATEST, CHECKPOINT_BEFORE):
            if checkpoint := self._read(self._folder / name, stage):
                yield checkpoint

    def remove(self) -> None:
        """Removes all, once their stage has finished."""
        check_claim(self._folder)
        for name in (CHECKPOINT_LATEST, CHECKPOINT_BEFORE):
            with suppress(OSError):  # a checkpoint of a finished stage is ignored
                (self._folder / name).unlink()
        self._last = time.monotonic()

    def _read(self, path: Path, stage: int) -> Checkpoint | None:
        if not path.exists():
            return None
        try:
            tensors, written = read_tensors(path)
            if (written.get("fingerprint"), written.get("stage")) != (self._fingerprint, stage):
                return None
            about = CHECKPOINT.read(written, path)
            state, statistics, events = json.loads(about["state"])
            return Checkpoint(stage, state, tensors, about["done"], about["seconds"], statistics, events)
        except NewerFileError:
            raise
        except OutdatedFileError:
            return Checkpoint(stage)
        except (RatpError, KeyError, TypeError, ValueError, RecursionError):
            return None


def _misfit(path: Path, error: Exception, advice: str) -> RunDirectoryError:
    return RunDirectoryError(f"{path} does not fit this run ({error}). {advice}")


@dataclass
class Stage:
    """A stage while it trains.

    Attributes:
        number: Its number.
        phases: Its phases.
        images: Number of its images.
        method: The method that trains.
        progress: Where it is in its phases.
        weights: Watches the method's weights.
        done: Steps done.
        seconds: Time it took in earlier processes.
        statistics: What its finished phases recorded.
        events: Its events in the journal of earlier processes.
    """

    number: int
    phases: Sequence[Phase]
    images: int
    method: Method
    progress: Progress = field(default_factory=Progress)
    weights: WeightWatch = field(init=False)
    done: int = 0
    seconds: float = 0.0
    statistics: dict[str, float] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        """Starts to watch the weights."""
        self.weights = WeightWatch(self.method)

    @property
    def total(self) -> int:
        """Steps of the whole stage."""
        return sum(phase.epochs * phase.steps for phase in self.phases)

    def resume(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Continues the stage from a checkpoint."""
        try:
            state = join_tensors(checkpoint.state, checkpoint.tensors, device)
            load_stage(state, self.method, self.phases, self.progress)
        except RatpError:
            raise
        except Exception as error:  # of any kind: the method may be a custom one
            raise RatpError(f"{type(error).__name__}: {error}") from error
        self.done, self.seconds = checkpoint.done, checkpoint.seconds
        self.statistics, self.events = dict(checkpoint.statistics), checkpoint.events

    def checkpoint(self, seconds: float, events: list[Mapping[str, Any]]) -> Checkpoint:
        """Returns a checkpoint after ``seconds`` in this process; ``events`` are the stage's events so far."""
        state, tensors = split_tensors(save_stage(self.method, self.phases, self.progress))
        seconds += self.seconds
        return Checkpoint(self.number, state, tensors, self.done, seconds, dict(self.statistics), events)

    def check(self, tick: Tick) -> None:
        """Raises a NonFiniteError if losses, statistics of the epoch or weights are not finite."""
        check_numbers(tick.means, self.progress)
        check_numbers(tick.statistics, self.progress)
        self.weights.check(self.progress)

    def is_sound(self, tick: Tick | None) -> bool:
        """Whether :meth:`check` passes; None means that there was no step."""
        try:
            if tick is not None:
                self.check(tick)
        except NonFiniteError:
            return False
        return True

    def lost_at_the_end(self, what: str) -> NonFiniteError:
        """Returns an error for values that are not finite after the last step."""
        last = max(len(self.phases) - 1, 0)
        epoch = self.phases[last].epochs - 1 if self.phases else 0
        return NonFiniteError(f"{what} after the last step", last, epoch, in_weights=True)
