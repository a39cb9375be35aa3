"""The files of a run's directory: what it begins with, what a stage leaves, and how they come to agree again.

What counts is the state after the last finished stage (:mod:`ratp.states`); config, matrix and journal follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ratp.environment import changes
from ratp.errors import RunDirectoryError
from ratp.files import LostFileError, is_whole, read_json, remove_leftovers, write_json, write_tensors, writing
from ratp.journal import Journal
from ratp.matrix import Matrix
from ratp.midstage import Checkpoints
from ratp.precision import Precision
from ratp.record import fingerprint_of
from ratp.schema import ENVIRONMENT, MATRIX, WEIGHTS, NewerFileError
from ratp.stage import Stage
from ratp.states import State, States


@final
class RunFiles:
    """The files of a run's directory; whoever has them holds the directory's lock.

    Args:
        folder: The directory.
        config: What ``config.json`` is to hold.
        save_every: Seconds between two checkpoints within a stage; None: none.

    Attributes:
        journal: What happened.
        states: The method after the last finished stage, and after the one before.
        checkpoints: Where the stage under way is.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], save_every: float | None) -> None:
        self._folder, self._config = folder, config
        self._weights = folder / "weights.safetensors"
        self.journal = Journal(folder)
        self.states = States(folder, config["fingerprint"], config.get("after", {}).get("stages", 0))
        self.checkpoints = Checkpoints(folder, config["fingerprint"], save_every)

    def find_state(self) -> tuple[State | None, str]:
        """As :meth:`ratp.states.States.find`, once what killed writers left is gone."""
        remove_leftovers(self._folder)
        return self.states.find()

    def begin(self, matrix: Matrix, environment: Mapping[str, Any]) -> None:
        """Writes what a directory begins with."""
        write_json(self._folder / "config.json", self._config)  # first: it makes the folder recognisable
        write_json(self._folder / "environment.json", ENVIRONMENT.marked(environment))
        self._write_matrix(matrix)
        self.journal.keep(())

    def take_over(self, state: State, matrix: Matrix, journal: Iterable[Mapping[str, Any]]) -> State:
        """Has the directory begin with what another run left: the state last, which counts.

        Args:
            state: The other run's last one.
            matrix: Its accuracies, with the domains of this run.
            journal: What to begin the journal with.

        Returns:
            The state as this run has it.
        """
        self.journal.keep(journal)
        self.states.go_back(None)
        self.states.save(state.tensors, matrix, state.finished)
        return self.states.latest()

    def bring_in_line(self, matrix: Matrix, finished: Sequence[Mapping[str, Any]]) -> str:
        """Has config, matrix and journal say what the state says.

        Args:
            matrix: Accuracies of the stages so far.
            finished: The ends of these stages.

        Returns:
            How the journal was lost, in words, if it was: then it begins anew, with the ends of the finished stages.
        """
        if fingerprint_of(read_json(self._folder / "config.json")) != self._config["fingerprint"]:
            write_json(self._folder / "config.json", self._config)
        self._write_matrix(matrix)
        try:
            kept = self.journal.before(matrix.stages)
        except LostFileError as error:
            self.journal.keep(finished)
            self.journal.note("journal_lost", what=str(error))
            return str(error)
        known = sum(event["event"] == "stage_finished" for event in kept)
        self.journal.keep([*kept, *finished[known:]])
        return ""

    def go_back(self, state: State | None, stages: int, later: Iterable[Path]) -> None:
        """Makes a state that was found the latest one, and removes what came after it.

        Args:
            state: The state; None: there is none any more.
            stages: How many stages were finished then.
            later: Files that a finished run has, beside its weights.
        """
        with writing(self._folder):
            for path in (self._weights, *later):
                path.unlink(missing_ok=True)
        if next(self.checkpoints.found(stages), None) is None:
            self.checkpoints.remove()
        self.states.go_back(state)

    def environment_changes(self, now: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What differs from the environment the run began with; if nothing tells of that, it is this one."""
        path = self._folder / "environment.json"
        try:
            return changes(ENVIRONMENT.read(read_json(path), path), now)
        except NewerFileError:
            raise
        except RunDirectoryError:
            write_json(path, ENVIRONMENT.marked(now))
            return {}

    def begin_stage(self, work: Stage, domain: str) -> None:
        """Notes the start of a stage, or what the journal had said of it before it was interrupted."""
        if work.done:
            for event in work.events:
                self.journal.append(event)
            self.journal.note("stage_resumed", stage=work.number, domain=domain, done=work.done)
        else:
            self.journal.note("stage_started", stage=work.number, domain=domain, images=work.images, steps=work.total)

    def save_checkpoint(self, work: Stage, seconds: float) -> None:
        """Keeps where a stage is.

        Args:
            work: The stage.
            seconds: Time it took in this process.
        """
        self.checkpoints.save(work.checkpoint(seconds, self.journal.of_stage(work.number)))

    def lose_numbers(self, stage: int, domain: str, what: str, precision: Precision) -> None:
        """Notes that the numbers of a stage were lost; what the journal said of it goes."""
        self.journal.keep(self.journal.before(stage))
        self.journal.note("numbers_lost", stage=stage, domain=domain, what=what, precision=precision)

    def finish_stage(self, tensors: Mapping[str, Tensor], matrix: Matrix, event: Mapping[str, Any]) -> None:
        """Keeps what a stage leaves: the state first, which counts.

        Args:
            tensors: What the method says of itself.
            matrix: Accuracies of the stages so far.
            event: The end of the stage, for the journal.
        """
        self.states.save(tensors, matrix, [*self.journal.finished(), event])
        self._write_matrix(matrix)
        self.journal.append(event)

    def batch(self, stage: int) -> Path:
        """Where the batch is written down that the numbers of a stage were lost with."""
        return self._folder / f"bad-batch-{stage}.json"

    @property
    def has_weights(self) -> bool:
        """Whether the final network is there, as it was written."""
        return is_whole(self._weights)

    def write_weights(self, network: Mapping[str, Tensor], classes: Sequence[str]) -> None:
        """Writes the final network."""
        about = {"fingerprint": self._config["fingerprint"], "classes": list(classes)}
        write_tensors(self._weights, network, WEIGHTS.marked(about))

    def settle(self) -> None:
        """Notes that the run has come to its end, if nothing says so yet, and removes what only one under way needs."""
        if [event["event"] for event in self.journal.events()[-1:]] != ["run_finished"]:
            self.journal.note("run_finished")
        self.states.settle()
        self.checkpoints.remove()

    def _write_matrix(self, matrix: Matrix) -> None:
        write_json(self._folder / "matrix.json", MATRIX.marked(matrix.to_json()))
