"""A run: one method on one stream with one seed, and its directory.

After every stage the whole method is saved together with the accuracies so far, in one file that is replaced
atomically; the previous one is kept. Within a stage there are checkpoints. The same command resumes an interrupted run,
with the result of an uninterrupted one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch

from ratp._core.environment import Precision, Randomness, describe_environment, use_precision
from ratp._core.files import LostFileError, read_json
from ratp._core.locks import exclusive
from ratp.errors import ConfigError, Note, RunDirectoryError
from ratp.evaluation.accuracy import Evaluator
from ratp.evaluation.details import DetailFiles, Examples
from ratp.evaluation.matrix import Matrix, describe_late
from ratp.methods.rehearsal import give_generators, rehearse
from ratp.runs import SAVE_EVERY
from ratp.runs.continuation import REQUESTED, ContinuedWarning, EarlierRun, requested, started_after
from ratp.runs.directory import Journal, RunFiles, check_folder, prediction_files
from ratp.runs.events import Event
from ratp.runs.plan import RunPlan
from ratp.runs.predictions import as_csv, predictions_of
from ratp.runs.record import RunRecord, describe_changes, is_run, read_run
from ratp.runs.stage_runner import StageRunner
from ratp.runs.states import State, StateWarning
from ratp.streams import FOLDERS
from ratp.streams.stream import Stream
from ratp.training.device_cache import Placement, check_placement
from ratp.training.method import Method, unpack


class JournalWarning(Note):
    """The journal of a run was damaged or missing and has been rewritten."""


class EnvironmentWarning(Note):
    """A run resumes with other versions, or on another device or processor, than it began with."""


@dataclass(frozen=True)
class Options:
    """How to execute a run; see :class:`ratp.runs.run.Run`. None of it changes a result."""

    probe: bool
    capture: bool
    reuse_source: bool
    save_every: float | None
    features: bool
    images: Placement


@final
class Session:
    """One execution of a run, by the holder of the directory's lock.

    Attributes:
        method: The method in training.
        matrix: Accuracies of the finished stages.
        files: The files of the directory.
        measures: Measures the method on the stream's test sets.
        models: Source networks shared with other runs; None if they are neither reused nor saved.
        uses_labels: Whether the method may use labels of targets.
        is_own: Whether the method is defined in a user's file.
        precision: The precision in use.
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
        self.measures = Evaluator(stream, plan.seed)
        self.models = plan.source_models(stream) if options.reuse_source else None
        self.uses_labels = plan.method.uses_target_labels(plan.config)
        self.is_own = plan.method_hash is not None
        self.precision: Precision = plan.precision
        self.method: Method  # set by open()
        self.matrix = Matrix(stream.order)

    def open(self) -> None:
        """Starts the directory, or resumes from the last finished stage or checkpoint."""
        use_precision(self.precision)
        state, lost = self.files.find_state()
        starts_from = self._after if state is None else None
        if starts_from is not None:
            state = self._start_from(starts_from)
        is_new = state is None and next(self.files.checkpoints.found(0), None) is None
        if is_new and self.is_own:
            build = partial(self.plan.build_method, self.stream, None)  # what it trains here is not for other runs
            rehearse(build, self.stream.source, self.plan.device, uses_labels=self.uses_labels)
        self.take_up(state)
        if is_new:
            self._start()
            self.files.journal.note("run_started")
            self._note_request()
        elif journal_lost := self.files.bring_in_line(self.matrix, state.finished if state else ()):
            message = f"{journal_lost} A new journal begins with the results of the finished stages"
            warnings.warn(message, JournalWarning, stacklevel=2)
        if lost:
            self._go_back(state, lost)
        if not is_new and starts_from is None:
            self._note_return()

    def release(self) -> None:
        """Releases the claim on a source network that other runs may be waiting for."""
        if self.models:
            self.models.release()

    def finish(self) -> None:
        """Writes predictions and weights, and removes the files that only an unfinished run needs."""
        self._write_results()
        if not self.files.has_weights:
            state = self.method.state()
            self.files.write_weights(unpack(state).get("network", state), self.stream.classes)
        self.files.settle()

    def take_up(self, state: State | None) -> None:
        """Builds the method and loads a state into it; None leaves it untrained."""
        self.method = self.built()
        if state is not None:
            state.load_into(self.method)
        self.matrix = state.matrix if state else Matrix(self.stream.order)

    def built(self) -> Method:
        """Builds the untrained method for the precision in use."""
        plan, models = self.plan, self.models
        if self.precision != plan.precision:  # other runs must not reuse what is trained in another precision
            plan, models = replace(plan, precision=self.precision), None
        return plan.build_method(self.stream, models)

    def undo(self) -> None:
        """Goes back to the state on disk from before the current stage."""
        try:
            self.take_up(self.files.states.latest() if self.matrix.stages else None)
        except LostFileError as error:
            raise RunDirectoryError(f"{error} The same command resumes from the state before it.") from error

    def earlier_methods(self) -> Callable[[], Method]:
        """Returns a function that builds the method as it was before the current stage, apart from the one in training.

        What such a method does changes nothing in this run.
        """
        try:
            state = self.files.states.latest()
        except LostFileError as error:
            raise RunDirectoryError(f"{error} The same command resumes from the state before it.") from error
        stage = self.matrix.stages

        def build() -> Method:
            method = self.built()
            state.load_into(method)
            if self.is_own:
                give_generators(method, Randomness(self.plan.seed), self.plan.device, stage)
            return method

        return build

    def use(self, precision: Precision) -> None:
        """Rebuilds the method in another precision, from the last finished stage."""
        self.precision = precision
        if precision != self.plan.precision:
            self.release()  # this run will not save the source network that others may be waiting for
        self.undo()

    @property
    def prediction_files(self) -> dict[str, Path]:
        """The paths of the predictions, by target."""
        return prediction_files(self.stream, self.folder, labelled=self.plan.has_own_images)

    def keep_features(self, stage: int) -> None:
        """Saves embeddings of some test images after a stage, if requested."""
        if self.options.features:
            self.files.save_features(self.measures.embeddings(self.method), self.stream, stage)

    def _start_from(self, folder: Path) -> State:
        """Starts the directory from the last state of an earlier run, and measures the new domains with it."""
        earlier = EarlierRun(folder)
        earlier.check(self._config)
        state = earlier.state()
        self.take_up(None)
        self._start(earlier.record.environment)
        state.load_into(self.method)
        stages = state.matrix.stages
        row = self.measures.row(self.method, stages)
        details = DetailFiles(folder, earlier.record.config["fingerprint"])
        for stage in range(stages):
            self.files.details.keep(stage, details, stage)
        self.files.details.write(stages - 1, {**self.files.details.read(stages - 1), **self.measures.details()})
        matrix = state.matrix.with_domains(self.stream.order, row)
        if self.options.features:
            self.files.copy_features(earlier.record.features)
        self.keep_features(stages - 1)
        about: dict[str, Any] = {"after": self._config["after"]["fingerprint"], "finished_stages": stages}
        if changed := self.files.environment_changes(self._environment()):
            about["environment"] = changed
        event = Journal.now("continued", **about, accuracy=row)
        state = self.files.take_over(state, matrix, [*earlier.journal, event])
        self._note_request()
        notes = [describe_late(matrix)] if matrix.late else []
        notes += [f"that began in another environment: {describe_changes(changed)}"] if changed else []
        if notes:
            where = f"continues {folder}, after {self.stream.order[stages - 1]}"
            warnings.warn("; ".join((where, *notes)), ContinuedWarning, stacklevel=2)
        return state

    def _note_request(self) -> None:
        """Notes where the images are, if they are the user's own, for a run that continues this one."""
        if self.plan.spec.values == FOLDERS:
            self.files.journal.note(REQUESTED, **requested(self.plan))

    def _start(self, environment: Mapping[str, Any] | None = None) -> None:
        """Writes the first files of the directory; the environment is the present one if None."""
        self.files.begin(self.matrix, self._environment() if environment is None else environment)
        self.files.save_samples(self.method, self.stream, self.plan.device)

    def _go_back(self, state: State | None, lost: str) -> None:
        """Removes what came after the state that the run resumes from, because the last state is lost."""
        finished = self.matrix.stages
        self.files.journal.note("state_lost", what=lost, finished_stages=finished)
        self.files.go_back(state, finished, self.prediction_files.values())
        where = f"{state.path.name}, after {finished} of {len(self.stream.order)} stages" if state else "the start"
        warnings.warn(f"{lost} The run resumes from {where}", StateWarning, stacklevel=2)

    def _note_return(self) -> None:
        """Notes that the run resumes, and what has changed in its environment."""
        changed = self.files.environment_changes(self._environment())
        if self.matrix.complete:
            return
        about = {"environment": changed} if changed else {}
        self.files.journal.note("run_resumed", finished_stages=self.matrix.stages, **about)
        if changed:
            message = f"this run began in another environment: {describe_changes(changed)}"
            warnings.warn(message, EnvironmentWarning, stacklevel=2)

    def _write_results(self) -> None:
        """Writes predictions for the images of targets and pictures of some, unless they are there already."""
        paths, is_new = self.prediction_files, not self.files.has_ended
        shown: dict[str, Examples] = {}
        for target in (target for target in self.stream.targets if target.name not in self.stream.gone):
            path, labelled = paths.get(target.name), target.name in self.measures.names
            missing = path is not None and not self.files.has_predictions(path, labelled=labelled)
            if not is_new and not missing:
                continue
            found = self.measures.outcome(self.method, target)
            if path is not None and missing:
                predictions = predictions_of(found.guesses, found.files, self.stream.classes)
                self.files.write_predictions(path, as_csv(predictions, found.true))
            if is_new:
                shown[target.name] = found.examples()
        self.files.details.write_examples(shown)

    def _environment(self) -> dict[str, Any]:
        return describe_environment(self.plan.device, self.plan.precision)


@final
class Run:
    """A run and its directory.

    Images are loaded and the method is built before anything is written, so a mistake in the plan leaves no trace on
    disk. None of the options changes a result.

    Args:
        plan: What to run.
        folder: Its directory; resumed if it holds the same run, refused if it holds anything else.
        after: Directory of a finished run to continue: the same one but for the last domains of the order. Only these
            are trained on, and in the stages taken over they were not measured.
        probe: Whether to measure the new domain after every epoch of its stage.
        capture: Whether to run training steps on a GPU as CUDA graphs.
        reuse_source: Whether to reuse a network that an earlier run trained on the same source in the same way, and to
            save this run's for others.
        save_every: Seconds between two checkpoints within a stage; None disables them.
        features: Whether to save embeddings of some test images after every stage, for the report.
        images: Where the images of the domain in training are: ``resident`` on the device, ``streamed`` to it batch by
            batch, or ``auto``: streamed if they do not fit.
        wait: Whether to postpone loading images until they are needed, so that many runs can be planned at once.

    Attributes:
        plan: What to run; for an existing run with the guard it began with.
    """

    def __init__(
        self,
        plan: RunPlan,
        folder: Path | str,
        *,
        after: Path | str | None = None,
        probe: bool = False,
        capture: bool = True,
        reuse_source: bool = False,
        save_every: float | None = SAVE_EVERY,
        features: bool = False,
        images: Placement = "auto",
        wait: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.after = None if after is None else Path(after)
        self.plan = _with_guard_of(self.folder, plan)
        if self.after is not None:
            self.plan = _with_guard_of(self.after, self.plan)
            if os.path.realpath(self.after) == os.path.realpath(self.folder):
                raise ConfigError(f"a run cannot continue {after} in the same folder: choose another with --out.")
        check_placement(images)
        self.options = Options(probe, capture, reuse_source, save_every, features, images)
        self._session: Session | None = None
        if not wait:
            _ = self.config, self.method

    @cached_property
    def stream(self) -> Stream:
        """The images."""
        self.plan.prefetch_weights()
        stream = self.plan.load_stream()
        if stream.order[0] in stream.gone:  # it judges by images of the source
            self.plan = replace(self.plan, guard="off")
        if self.plan.method.uses_target_labels(self.plan.config) and stream.unlabelled:
            missing = ", ".join(target.name for target in stream.unlabelled)
            raise ConfigError(f"{self.plan.method.name} needs the labels of all targets; {missing} has none.")
        return stream

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        if self.after is None:
            return self.plan.to_json(self.stream)
        mark = started_after(self.after, self.folder)
        if mark is None:
            earlier = EarlierRun(self.after)
            earlier.check(self.plan.to_json(self.stream))
            mark = earlier.mark
        return self.plan.to_json(self.stream, mark)

    @cached_property
    def _untrained(self) -> Method:
        """For checks: on the CPU, so that a GPU is free until the run is executed, perhaps by another process."""
        return replace(self.plan, device=torch.device("cpu")).build_method(self.stream)

    @property
    def method(self) -> Method:
        """The method in training; untrained until the run is executed here."""
        return self._session.method if self._session else self._untrained

    @property
    def matrix(self) -> Matrix:
        """Accuracies of the finished stages."""
        if self._session:
            return self._session.matrix
        return self.record().matrix if is_run(self.folder) else Matrix(self.plan.order)

    def forget(self, *, images: bool = True) -> None:
        """Frees networks and, unless told otherwise, images; both are loaded again when needed."""
        self._session = None
        for name in ("_untrained", *(("stream", "config") if images else ())):
            self.__dict__.pop(name, None)

    def execute(self) -> RunRecord:
        """Runs or resumes to the end."""
        for _ in self.events():
            pass
        return self.record()

    @property
    def predictions(self) -> tuple[Path, ...]:
        """Files for the predictions on unlabelled domains, and on all targets of the user's own images."""
        return tuple(prediction_files(self.stream, self.folder, labelled=self.plan.has_own_images).values())

    def record(self) -> RunRecord:
        """Reads the run from its directory."""
        return read_run(self.folder)

    def events(self) -> Generator[Event, None, None]:
        """Runs step by step and yields what happens, with the directory locked."""
        check_folder(self.folder, self.config)
        with exclusive(self.folder):
            check_folder(self.folder, self.config)  # again, because another process may have been faster
            self.forget(images=False)
            session = Session(self.plan, self.stream, self.folder, self.config, self.after, self.options)
            try:
                session.open()
                self._session = session
                for stage in range(session.matrix.stages, len(self.stream.order)):
                    yield from StageRunner(session, stage).events()
            finally:
                session.release()
            session.finish()


def _with_guard_of(folder: Path, plan: RunPlan) -> RunPlan:
    """Returns the plan with the guard of the run in a folder, unless the user chose one.

    Runs that began before there was a guard continue without one.
    """
    if plan.guard != "act" or plan.request is None or plan.request.guard != "auto":
        return plan
    try:
        there = read_json(folder / "config.json")
    except RunDirectoryError:
        return plan
    return plan if "guard" in there else replace(plan, guard="record")
