"""The states of a run: the whole method after its last finished stage, and after the one before.

``state.safetensors`` is what counts. When a stage is finished, the state so far gets the name
``state-before.safetensors``, and then the new one takes its place: at every moment one of the two is whole. If the last
one is damaged or gone, a run goes back to the one before. A run that has come to its end keeps its last state alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ratp.errors import RatpError, RunDirectoryError
from ratp.files import LostFileError, keep_as, read_json, read_tensors, write_tensors, writing
from ratp.matrix import Matrix
from ratp.method import Method
from ratp.notes import Note
from ratp.record import is_event
from ratp.run_folder import START_ANEW, with_advice
from ratp.schema import STATE, NewerFileError

LATEST, BEFORE = "state.safetensors", "state-before.safetensors"
_MISFITS = RatpError, KeyError, TypeError, ValueError, RuntimeError


class StateWarning(Note):
    """The last state of a run is damaged or gone: the run goes on from the one before."""


@dataclass(frozen=True)
class State:
    """A run after a finished stage.

    Attributes:
        path: The file it is read from.
        tensors: What the method says of itself.
        matrix: Accuracies of the stages so far.
        finished: The ends of these stages, as the journal has them.
        advice: What to do if it does not fit.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    matrix: Matrix
    finished: Sequence[dict[str, Any]]
    advice: str = START_ANEW

    def load_into(self, method: Method) -> None:
        """Brings a method that was just built to this state.

        Raises:
            RunDirectoryError: If it does not fit.
        """
        try:
            method.load_state(self.tensors)
        except _MISFITS as error:
            raise _misfit(self.path, error, self.advice) from error


class States:
    """The states in a run's directory.

    Args:
        folder: The directory.
        fingerprint: Hash of all that determines the run.
        given: How many stages it has from another run, if it does not begin at the start.
        advice: What to do if they do not fit.
    """

    def __init__(self, folder: Path, fingerprint: str, given: int = 0, advice: str = START_ANEW) -> None:
        self._fingerprint, self._given, self._advice = fingerprint, given, advice
        self._latest, self._before = folder / LATEST, folder / BEFORE
        self._matrix = folder / "matrix.json"

    def latest(self) -> State:
        """The state after the last finished stage.

        Raises:
            LostFileError: If it is missing or damaged.
            RunDirectoryError: If it is whole, and not this run's.
        """
        return self._read(self._latest)

    def before(self) -> State:
        """The state after the stage before that; raises what :meth:`latest` does."""
        return self._read(self._before)

    def find(self) -> tuple[State | None, str]:
        """The state to go on from, None: the start; and how a later one was lost, in words, if one was.

        Raises:
            RunDirectoryError: If there is none that fits, and more was finished than the first stage or those given.
        """
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
            raise RunDirectoryError(f"{both} Put one of them back to go on. {START_ANEW}")
        return None, lost if had_one or rows else ""

    def save(self, tensors: Mapping[str, Tensor], matrix: Matrix, finished: Sequence[Mapping[str, Any]]) -> None:
        """Writes the state after a stage; the latest one becomes the one before."""
        about = {"fingerprint": self._fingerprint, "matrix": matrix.to_json(), "stage_events": list(finished)}
        if self._latest.exists():
            keep_as(self._latest, self._before)
        write_tensors(self._latest, tensors, STATE.marked(about))

    def go_back(self, state: State | None) -> None:
        """Makes a state that was found the latest one; None: there is no state any more."""
        with writing(self._latest):
            if state is not None:
                state.path.replace(self._latest)
                return
            for path in (self._latest, self._before):
                path.unlink(missing_ok=True)

    def settle(self) -> None:
        """Removes the state before: the run has come to its end."""
        with suppress(OSError):  # it harms nobody
            self._before.unlink(missing_ok=True)

    def _results(self) -> Any:
        """The rows of the matrix: they tell how many stages were finished."""
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
                raise RunDirectoryError("it holds what is no event of a run")
            return state
        except NewerFileError:
            raise
        except _MISFITS as error:
            raise _misfit(path, error, self._advice) from error


def _misfit(path: Path, error: Exception, advice: str) -> RunDirectoryError:
    return RunDirectoryError(f"{path} does not fit this run ({error}). {advice}")
