"""One go at a run, for as long as its directory is locked: where it goes on from, and what it leaves in the end.

A directory is begun anew, taken up where its last finished stage or a checkpoint left it, or begun with what an earlier
run left. :mod:`ratp.attempts` makes the stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from ratp.earlier import ContinuedWarning, EarlierRun
from ratp.environment import describe_environment
from ratp.errors import RunDirectoryError
from ratp.files import LostFileError
from ratp.journal import Journal
from ratp.keepsakes import copy_features, save_features, save_samples
from ratp.matrix import Matrix, describe_late
from ratp.measures import Measures
from ratp.method import Method, unpack
from ratp.methods.own import file_hash, rehearse
from ratp.notes import Note
from ratp.plan import RunPlan
from ratp.precision import Precision, use_precision
from ratp.predictions import prediction_files, write_predictions
from ratp.record import describe_changes
from ratp.run_files import RunFiles
from ratp.states import State, StateWarning
from ratp.stream import Stream


class JournalWarning(Note):
    """The journal of a run is damaged or gone: it begins anew."""


class EnvironmentWarning(Note):
    """A run goes on with other versions, or on another device, than it began with."""


@dataclass(frozen=True)
class Options:
    """How a run is made. It changes no result.

    Attributes:
        probe: Whether to measure the new domain after every epoch of its stage.
        capture: Whether training steps on a GPU run as CUDA graphs.
        reuse_source: Whether a network that an earlier run trained on the same source in the same way may be taken, and
            this run's be kept.
        save_every: Seconds between two checkpoints within a stage; None: none.
        features: Whether to keep embeddings of some test images after every stage.
    """

    probe: bool
    capture: bool
    reuse_source: bool
    save_every: float | None
    features: bool


@final
class Session:
    """One go at a run; whoever has it holds the lock of the directory.

    Args:
        plan: What to run.
        stream: Its images.
        folder: Its directory.
        config: What ``config.json`` is to hold.
        after: Directory of a finished run to begin with, if nothing was begun yet.
        options: How it is made.

    Attributes:
        plan: As given.
        stream: As given.
        folder: As given.
        options: As given.
        method: What is trained.
        matrix: Accuracies of the stages finished so far.
        files: What is in the directory.
        measures: What is measured.
        models: Networks that were trained on this source before; None: they are neither taken nor kept.
        is_told: Whether the method knows the labels of targets.
        is_own: Whether the method is from a user's file.
        precision: What is computed in.
    """

    def __init__(
        self,
        plan: RunPlan,
        stream: Stream,
        folder: Path,
        config: Mapping[str, Any],
        after: Path | None,
        options: Options,
    ) -> None:
        self.plan, self.stream, self.folder, self.options = plan, stream, folder, options
        self._config, self._after = config, after
        self.files = RunFiles(folder, config, options.save_every)
        self.measures = Measures(stream, plan.seed)
        self.models = plan.source_models(stream) if options.reuse_source else None
        self.is_told = plan.method.uses_target_labels(plan.config)
        self.is_own = file_hash(plan.method) is not None
        self.precision: Precision = plan.precision
        self.method: Method  # once it is open
        self.matrix = Matrix(stream.order)

    def open(self) -> None:
        """Starts the directory, or takes up the run where its last finished stage, or a checkpoint, left it."""
        use_precision(self.precision)
        state, lost = self.files.find_state()
        begins_after = self._after if state is None else None
        if begins_after is not None:
            state = self._begin_after(begins_after)
        is_new = state is None and next(self.files.checkpoints.found(0), None) is None
        if is_new and self.is_own:
            rehearse(self.built(), self.stream.source, self.plan.device, told=self.is_told)
        self.take_up(state)
        if is_new:
            self._start()
        else:
            self._bring_in_line(state)
        if lost:
            self._go_back(state, lost)
        if not is_new and begins_after is None:
            self._note_return()

    def release(self) -> None:
        """Lets go of a source network that others may wait for."""
        if self.models:
            self.models.release()

    def finish(self) -> None:
        """Writes what a finished run has, and removes what it no longer needs."""
        method = self.method
        write_predictions(method, self.stream, self.folder)
        if not self.files.has_weights:
            state = method.state()
            self.files.write_weights(unpack(state).get("network", state), self.stream.classes)
        self.files.settle()

    def take_up(self, state: State | None) -> None:
        """Builds the method and brings it to a state; None: it has learnt nothing yet."""
        self.method = self.built()
        if state is not None:
            state.load_into(self.method)
        self.matrix = state.matrix if state else Matrix(self.stream.order)

    def built(self) -> Method:
        """The method, untrained, for the precision in use."""
        plan, models = self.plan, self.models
        if self.precision != plan.precision:  # what is trained so must not pass for what was asked for
            plan, models = replace(plan, precision=self.precision), None
        return plan.build_method(self.stream, models)

    def undo(self) -> None:
        """Takes up the state before the stage under way, as it lies on the disk."""
        try:
            self.take_up(self.files.states.latest() if self.matrix.stages else None)
        except LostFileError as error:
            raise RunDirectoryError(f"{error} The same command goes on from what was kept before it.") from error

    def use(self, precision: Precision) -> None:
        """Builds the method for a precision, as the last finished stage left it."""
        self.precision = precision
        if precision != self.plan.precision:
            self.release()  # no network will be kept that others could wait for
        self.undo()

    def keep_features(self, stage: int) -> None:
        """Keeps embeddings of some test images after a stage, if they are wanted."""
        if self.options.features:
            save_features(self.folder, self.measures.embeddings(self.method), self.stream, stage)

    def _begin_after(self, folder: Path) -> State:
        """Starts the directory with what an earlier run left, and measures the new domains with that."""
        earlier = EarlierRun(folder)
        earlier.check(self._config)
        state = earlier.state()
        self.take_up(None)
        self.files.begin(self.matrix, earlier.record.environment)
        save_samples(self.folder, self.method, self.stream, self.plan.device)
        state.load_into(self.method)
        stages = state.matrix.stages
        row = self.measures.row(self.method, stages)
        matrix = state.matrix.with_domains(self.stream.order, row)
        if self.options.features:
            copy_features(earlier.record.features, self.folder)
        self.keep_features(stages - 1)
        about: dict[str, Any] = {"after": self._config["after"]["fingerprint"], "finished_stages": stages}
        if changed := self.files.environment_changes(self._environment()):
            about["environment"] = changed
        event = Journal.now("continued", **about, accuracy=row)
        state = self.files.take_over(state, matrix, [*earlier.journal, event])
        told = [describe_late(matrix)] if matrix.late else []
        told += [f"that began in another environment: {describe_changes(changed)}"] if changed else []
        if told:
            where = f"goes on from {folder}, after {self.stream.order[stages - 1]}"
            warnings.warn("; ".join((where, *told)), ContinuedWarning, stacklevel=2)
        return state

    def _start(self) -> None:
        """Writes what a directory begins with."""
        self.files.begin(self.matrix, self._environment())
        save_samples(self.folder, self.method, self.stream, self.plan.device)
        self.files.journal.note("run_started")

    def _bring_in_line(self, state: State | None) -> None:
        """Has all files say what the state says."""
        lost = self.files.bring_in_line(self.matrix, state.finished if state else ())
        if lost:
            told = f"{lost} It begins anew, with the ends of the finished stages"
            warnings.warn(told, JournalWarning, stacklevel=2)

    def _go_back(self, state: State | None, lost: str) -> None:
        """Says that the last state is lost, and removes what came after the one that the run goes on from."""
        finished = self.matrix.stages
        self.files.journal.note("state_lost", what=lost, finished_stages=finished)
        self.files.go_back(state, finished, prediction_files(self.stream, self.folder))
        where = (
            f"from {state.path.name}, after {finished} of {len(self.stream.order)} stages"
            if state
            else "from the start"
        )
        warnings.warn(f"{lost} The run goes on {where}", StateWarning, stacklevel=2)

    def _note_return(self) -> None:
        """Notes that the run goes on, and what has changed around it."""
        changed = self.files.environment_changes(self._environment())
        if self.matrix.complete:
            return
        about = {"environment": changed} if changed else {}
        self.files.journal.note("run_resumed", finished_stages=self.matrix.stages, **about)
        if changed:
            told = describe_changes(changed)
            warnings.warn(f"this run began in another environment: {told}", EnvironmentWarning, stacklevel=2)

    def _environment(self) -> dict[str, Any]:
        return describe_environment(self.plan.device, self.plan.precision)
