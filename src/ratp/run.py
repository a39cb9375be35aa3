"""A run: one method on one stream with one seed, and its directory.

After every stage the whole method is saved, together with the accuracies so far, in one file that is replaced in one
step, and the one before is kept; within a stage there is a checkpoint now and then. Whatever interrupts a run, the same
command continues it, and the result is the one an undisturbed run gives.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ratp.device_copies import with_images_on
from ratp.earlier import ContinuedWarning, EarlierRun, begun_after
from ratp.environment import describe_environment
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.evaluate import accuracy, accuracy_as, embeddings
from ratp.events import Event, Probed, StageFinished, StageStarted, Trained, Waiting
from ratp.files import LostFileError, write_json
from ratp.guard import ACT, Watch
from ratp.journal import Journal
from ratp.keepsakes import FEATURE_COUNT, copy_features, save_features, save_samples
from ratp.lock import exclusive
from ratp.matrix import Matrix, describe_late
from ratp.method import Method, unpack
from ratp.methods.own import check_kept, file_hash, give_generators, rehearse
from ratp.notes import Note
from ratp.numbers import NumbersLostError, find_batch, lost_weights
from ratp.phase import Phase, Tick, train
from ratp.plan import RunPlan
from ratp.precision import Precision, single_precision, use_precision
from ratp.predictions import prediction_files, write_predictions
from ratp.randomness import Randomness
from ratp.record import RunRecord, describe_changes, read_run
from ratp.run_files import RunFiles
from ratp.run_folder import as_begun, check_folder
from ratp.source_models import SourceModels, TakenError
from ratp.stage import Stage, ready
from ratp.states import State, StateWarning
from ratp.stream import Stream

SAVE_EVERY = 120.0
# At a network that another run trains and this one begins with.
SECONDS_BETWEEN_LOOKS = 0.1


class NumbersWarning(Note):
    """A stage is tried once more in single precision."""


class WaitingWarning(Note):
    """A run waits for another that trains the network both begin with."""


class CheckpointWarning(Note):
    """A checkpoint does not fit what goes on from it, another device say: it is passed over."""


class JournalWarning(Note):
    """The journal of a run is damaged or gone: it begins anew."""


class EnvironmentWarning(Note):
    """A run goes on with other versions, or on another device, than it began with."""


@final
class Run:
    """A run and its directory.

    Images are loaded and the method is built before anything is written: a mistake in the plan leaves no trace on
    disk.

    Args:
        plan: What to run.
        folder: Its directory; continued if it holds the same run, refused if it holds anything else.
        after: Directory of a finished run to go on from: the same but for the last domains of the order, which alone
            are trained on. It changes no network; in the stages taken over, new domains were not measured.
        probe: Whether to measure the new domain after every epoch of its stage. It changes no result.
        capture: Whether training steps on a GPU run as CUDA graphs. It changes no result.
        reuse_source: Whether a network that an earlier run trained on the same source in the same way may be taken, and
            this run's be kept. It changes no result.
        save_every: Seconds between two checkpoints within a stage; None: none. It changes no result.
        features: Whether to keep embeddings of some test images after every stage, for the report's picture of them. It
            changes no result.
        wait: Whether to load the images when they are needed first, not here: many runs can then be planned at once.
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
        wait: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.after = None if after is None else Path(after)
        self.plan = as_begun(plan, self.folder)
        if self.after is not None:
            self.plan = as_begun(self.plan, self.after)
            if os.path.realpath(self.after) == os.path.realpath(self.folder):
                raise ConfigError(f"a run cannot go on from {after} in that folder: choose another with --out.")
        self.probe = probe
        self.capture = capture
        self.reuse_source = reuse_source
        self.features = features
        self.save_every = save_every
        self._precision = plan.precision
        self._is_told = plan.method.uses_target_labels(plan.config)
        self._is_own = file_hash(plan.method) is not None
        if not wait:
            _ = self.config, self.method

    @cached_property
    def stream(self) -> Stream:
        """The images."""
        self.plan.look_for_weights()
        stream = self.plan.load_stream()
        if self._is_told and None in stream.answers:
            pairs = zip(stream.targets, stream.answers, strict=True)
            bare = ", ".join(target.name for target, answer in pairs if answer is None)
            raise ConfigError(f"{self.plan.method.name} needs the labels of all targets; {bare} has none.")
        return stream

    @cached_property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        if self.after is None:
            return self.plan.to_json(self.stream)
        begun = begun_after(self.after, self.folder)
        if begun is None:
            earlier = EarlierRun(self.after)
            earlier.check(self.plan.to_json(self.stream))
            begun = earlier.mark
        return self.plan.to_json(self.stream, begun)

    @cached_property
    def _models(self) -> SourceModels | None:
        return self.plan.source_models(self.stream) if self.reuse_source else None

    @cached_property
    def method(self) -> Method:
        """What is trained: until the run goes on, untrained."""
        return self.plan.build_method(self.stream, self._models)

    @cached_property
    def matrix(self) -> Matrix:
        """Accuracies of the stages finished so far."""
        return Matrix(self.stream.order)

    def forget(self, *, images: bool = True) -> None:
        """Lets go of images and networks, or of networks alone; what is needed again is loaded again."""
        for name in ("method", *(("stream", "config", "_models", "matrix") if images else ())):
            self.__dict__.pop(name, None)

    def execute(self) -> RunRecord:
        """Runs to the end, or continues to it."""
        for _ in self.events():
            pass
        return self.record()

    @property
    def predictions(self) -> tuple[Path, ...]:
        """Where the predictions on the domains without labels go, each into a file of its own."""
        return tuple(prediction_files(self.stream, self.folder))

    def record(self) -> RunRecord:
        """The run as its directory tells it."""
        return read_run(self.folder)

    def events(self) -> Generator[Event, None, None]:
        """Runs step by step, handing out what happens. The directory is locked meanwhile.

        Raises:
            RunDirectoryError: If the directory cannot be used.
            TrainingError: If a loss is no longer a number.
        """
        check_folder(self.folder, self.config)
        with exclusive(self.folder):
            check_folder(self.folder, self.config)  # once more: another run may have been quicker
            self._precision = self.plan.precision
            use_precision(self._precision)
            try:
                self._open()
                for stage in range(self.matrix.stages, len(self.stream.order)):
                    yield from self._stage(stage)
            finally:
                if self._models:
                    self._models.release()
            write_predictions(self.method, self.stream, self.folder)
            if not self._files.has_weights:
                state = self.method.state()
                self._files.write_weights(unpack(state).get("network", state), self.stream.classes)
            self._files.settle()

    def _open(self) -> None:
        """Starts the directory, or takes up the run where its last finished stage, or a checkpoint, left it."""
        self._files = RunFiles(self.folder, self.config, self.save_every)
        state, lost = self._files.find_state()
        begins_after = self.after if state is None else None
        if begins_after is not None:
            state = self._begin_after(begins_after)
        is_new = state is None and next(self._files.checkpoints.found(0), None) is None
        if is_new and self._is_own:
            rehearse(self._built(), self.stream.source, self.plan.device, told=self._is_told)
        self._take_up(state)
        if is_new:
            self._start()
        else:
            self._bring_in_line(state)
        if lost:
            self._go_back(state, lost)
        if not is_new and begins_after is None:
            self._note_return()

    def _begin_after(self, folder: Path) -> State:
        """Starts the directory with what an earlier run left, and measures the new domains with that."""
        earlier = EarlierRun(folder)
        earlier.check(self.config)
        state = earlier.state()
        self._take_up(None)
        self._files.begin(self.matrix, earlier.record.environment)
        save_samples(self.folder, self.method, self.stream, self.plan.device)
        state.load_into(self.method)
        stages = state.matrix.stages
        row = {test.name: accuracy(self.method, test) for test in self.stream.tests[stages:] if test is not None}
        matrix = state.matrix.with_domains(self.stream.order, row)
        if self.features:
            copy_features(earlier.record.features, self.folder)
            self._keep_features(stages - 1)
        about: dict[str, Any] = {"after": self.config["after"]["fingerprint"], "finished_stages": stages}
        if changed := self._files.environment_changes(self._environment()):
            about["environment"] = changed
        event = Journal.now("continued", **about, accuracy=row)
        state = self._files.take_over(state, matrix, [*earlier.journal, event])
        told = [describe_late(matrix)] if matrix.late else []
        told += [f"that began in another environment: {describe_changes(changed)}"] if changed else []
        if told:
            where = f"goes on from {folder}, after {self.stream.order[stages - 1]}"
            warnings.warn("; ".join((where, *told)), ContinuedWarning, stacklevel=3)
        return state

    def _start(self) -> None:
        """Writes what a directory begins with."""
        self._files.begin(self.matrix, self._environment())
        save_samples(self.folder, self.method, self.stream, self.plan.device)
        self._files.journal.note("run_started")

    def _bring_in_line(self, state: State | None) -> None:
        """Has all files say what the state says."""
        lost = self._files.bring_in_line(self.matrix, state.finished if state else ())
        if lost:
            told = f"{lost} It begins anew, with the ends of the finished stages"
            warnings.warn(told, JournalWarning, stacklevel=3)

    def _go_back(self, state: State | None, lost: str) -> None:
        """Says that the last state is lost, and removes what came after the one that the run goes on from."""
        self._files.journal.note("state_lost", what=lost, finished_stages=self.matrix.stages)
        self._files.go_back(state, self.matrix.stages, self.predictions)
        stages = f"{self.matrix.stages} of {len(self.stream.order)} stages"
        where = f"from {state.path.name}, after {stages}" if state else "from the start"
        warnings.warn(f"{lost} The run goes on {where}", StateWarning, stacklevel=3)

    def _note_return(self) -> None:
        """Notes that the run goes on, and what has changed around it."""
        changed = self._files.environment_changes(self._environment())
        if self.matrix.complete:
            return
        about = {"environment": changed} if changed else {}
        self._files.journal.note("run_resumed", finished_stages=self.matrix.stages, **about)
        if changed:
            told = describe_changes(changed)
            warnings.warn(f"this run began in another environment: {told}", EnvironmentWarning, stacklevel=3)

    def _environment(self) -> dict[str, Any]:
        return describe_environment(self.plan.device, self.plan.precision)

    def _take_up(self, state: State | None) -> None:
        """Builds the method and brings it to a state; None: it has learnt nothing yet."""
        self.method = self._built()
        if state is not None:
            state.load_into(self.method)
        self.matrix = state.matrix if state else Matrix(self.stream.order)

    def _built(self) -> Method:
        """The method, untrained, for the precision in use."""
        plan, models = self.plan, self._models
        if self._precision != plan.precision:  # what is trained so must not pass for what was asked for
            plan, models = replace(plan, precision=self._precision), None
        return plan.build_method(self.stream, models)

    def _undo(self) -> None:
        """Takes up the state before the stage under way, as it lies on the disk."""
        try:
            self._take_up(self._files.states.latest() if self.matrix.stages else None)
        except LostFileError as error:
            raise RunDirectoryError(f"{error} The same command goes on from what was kept before it.") from error

    def _stage(self, stage: int) -> Iterator[Event]:
        """A stage; if its numbers are lost, once more from where they were last saved, in single precision."""
        if self._was_tried_again(stage):
            batch = self._files.batch(stage)
            yield from self._try_again(stage, batch if batch.exists() else None)
            return
        try:
            yield from self._attempt(stage)
            return
        except NumbersLostError as error:
            lost = error
        found = self._look_for_batch(stage, lost)
        if self.plan.precision == "fp32":
            self._undo()
            raise self._ruined(stage, lost, found)
        told = f"{lost} of stage {stage} ({self.stream.order[stage]}), which is tried once more in fp32"
        warnings.warn(told, NumbersWarning, stacklevel=2)
        yield from self._try_again(stage, found)

    def _was_tried_again(self, stage: int) -> bool:
        """Whether the run was stopped in the second attempt at a stage."""
        checkpoint = next(self._files.checkpoints.found(stage), None)
        return checkpoint is not None and any(event["event"] == "numbers_lost" for event in checkpoint.events)

    def _try_again(self, stage: int, batch: Path | None) -> Iterator[Event]:
        """A stage in single precision; ``batch`` says where its numbers were lost before."""
        try:
            with single_precision():
                self._use("fp32")
                yield from self._attempt(stage)
        except NumbersLostError as error:
            self._use(self.plan.precision)
            raise self._ruined(stage, error, batch, "Neither in fp32 did it go well. ") from error
        self._use(self.plan.precision)

    def _use(self, precision: Precision) -> None:
        """Builds the method for a precision, as the last finished stage left it."""
        self._precision = precision
        if precision != self.plan.precision and self._models:
            self._models.release()  # no network will be kept that others could wait for
        self._undo()

    def _look_for_batch(self, stage: int, error: NumbersLostError) -> Path | None:
        """Makes the stage again up to where its numbers were lost, and writes down the batch it happened with."""
        self._undo()
        work, name = self._prepare(stage), self.stream.order[stage]
        found = find_batch(work.phases, work.progress, error, self._captures, work.weights)
        self._files.lose_numbers(stage, name, str(error), self._precision)
        if found is None:
            return None
        files = self.stream.files.get(name, ()) if stage else ()  # of the source, only a part is trained on
        names = [files[place] for place in found.images if place < len(files)]
        path = self._files.batch(stage)
        write_json(path, {"stage": stage, "domain": name, "what": str(error), **asdict(found), "files": names})
        return path

    def _attempt(self, stage: int) -> Generator[Event, None, None]:
        name = self.stream.order[stage]
        watch = self._watch(stage)
        work = yield from self._prepare_in_turn(stage)
        yield StageStarted(stage, name, work.images, work.total, work.done)
        self._files.begin_stage(work, name)
        started = epoch_started = time.perf_counter()
        if self.probe and not work.done:
            yield from self._measure(stage, 0.0)
        saved, tick = False, None
        try:
            for moment in train(work.phases, capture=self._captures, progress=work.progress):
                saved = False
                if not isinstance(moment, Tick):
                    work.statistics |= {n: value for n, value in moment.items() if math.isfinite(value)}
                    continue
                tick = moment
                work.done += tick.made
                if tick.epoch_done:
                    self._note_epoch(work, tick, epoch_started)
                    epoch_started = time.perf_counter()
                probes = self.probe and tick.epoch_done and work.done < work.total
                saved = probes  # between probes there is nothing to go on with
                yield Trained(stage, name, tick)
                if probes:
                    yield from self._measure(stage, work.done / work.total)
                    epoch_started, saved = time.perf_counter(), False
                if self._files.checkpoints.due:
                    work.check(tick)
                    self._files.save_checkpoint(work, time.perf_counter() - started)
                    saved = True
        except GeneratorExit:
            if self.save_every is not None and not saved and work.is_sound(tick):
                self._files.save_checkpoint(work, time.perf_counter() - started)
            raise
        if bad := lost_weights(self.method.state()):
            raise work.lost_at_the_end(f"{bad[0]} holds values that are no numbers")
        if self._is_own:
            check_kept(self.method, self._built, self.stream.source, self.plan.device, self._precision)
        guard = self._judge(watch) if watch else None
        row = self._row(work)
        if self.probe and name in row:
            yield self._probed(stage, 1.0, {name: row[name]})
        seconds = work.seconds + time.perf_counter() - started
        if self.features:
            self._keep_features(stage)
        self._finish_stage(stage, row, work.statistics, seconds, guard)
        self._files.checkpoints.remove()
        yield StageFinished(stage, name, row, work.statistics, seconds, guard)

    @property
    def _captures(self) -> bool:
        return self.capture and self.plan.device.type == "cuda"

    def _prepare_in_turn(self, stage: int) -> Generator[Event, None, Stage]:
        """As :meth:`_prepare`; if another run trains the network this one begins with, once it has."""
        is_told = False
        while True:
            try:
                return self._prepare(stage)
            except TakenError as error:
                taken = error
            if not is_told:
                told = "waiting for another run that trains the same source network"
                warnings.warn(told, WaitingWarning, stacklevel=2)
                is_told = True
            assert self._models
            while not self._models.is_there_or_claimed(taken.path):
                yield Waiting(stage, self.stream.order[stage])
                time.sleep(SECONDS_BETWEEN_LOOKS)
            self._take_up(None)  # half of what the stage needs had been made

    def _prepare(self, stage: int) -> Stage:
        """The phases of a stage, as its latest usable checkpoint left them, or from the start."""
        for checkpoint in (*self._files.checkpoints.found(stage), None):
            phases, images = self._phases(stage)
            if checkpoint is not None:
                ready(phases, checkpoint)
            work = Stage.begun(stage, phases, images, self.method, self.plan.device)
            if checkpoint is None:
                return work
            try:
                work.go_on(checkpoint)
                return work
            except RatpError as error:
                told = f"what was kept within stage {stage} ({self.stream.order[stage]}) is passed over: {error}"
                warnings.warn(told, CheckpointWarning, stacklevel=2)
                self._undo()  # it may be half restored
        raise AssertionError("unreachable")

    def _watch(self, stage: int) -> Watch | None:
        """What the guard sees of the model before a target stage; None: it does not look."""
        if stage == 0 or self.plan.guard == "off":
            return None
        return Watch(self.method, self.stream.targets[stage - 1], self.stream.source, Randomness(self.plan.seed))

    def _judge(self, watch: Watch) -> dict[str, Any] | None:
        """The guard's verdict on a stage, for the journal. Where the guard acts, a stage that it refuses is undone."""
        verdict = watch.judge(self.method)
        if verdict is None:
            return None
        undone = self.plan.guard == ACT and bool(verdict.reasons)
        if undone:
            self._undo()
        return {"rolled_back": undone, **verdict.to_json()}

    def _row(self, work: Stage) -> dict[str, float]:
        """Accuracies after a stage; of a model that is the same as before it, those before."""
        if work.number and not work.phases and vars(type(self.method)).get("ignores_targets", False):
            before = zip(self.stream.tests, self.matrix.accuracy[-1], strict=True)
            return {test.name: value for test, value in before if test is not None}
        try:
            return {test.name: accuracy(self.method, test) for test in self.stream.tests if test is not None}
        except TrainingError as error:
            raise work.lost_at_the_end(str(error)) from error

    def _keep_features(self, stage: int) -> None:
        found = embeddings(self.method, self.stream.tests, FEATURE_COUNT, Randomness(self.plan.seed))
        save_features(self.folder, found, self.stream, stage)

    def _row_as_told(self, stage: int) -> dict[str, float]:
        """Accuracies on the domains so far if it is told which they are; nothing if that makes no difference."""
        tests = [(number, test) for number, test in enumerate(self.stream.tests[: stage + 1]) if test is not None]
        try:
            found = {test.name: accuracy_as(self.method, test, number) for number, test in tests}
        except TrainingError:
            return {}
        return {name: value for name, value in found.items() if value is not None}

    def _phases(self, stage: int) -> tuple[Sequence[Phase], int]:
        device = self.plan.device
        if self._is_own:
            give_generators(self.method, Randomness(self.plan.seed), device, stage)
        if stage == 0:
            source = self.stream.source
            return self.method.source_phases(with_images_on(source, device)), len(source)
        target, answer = self.stream.targets[stage - 1], self.stream.answers[stage - 1]
        if self._is_told and answer is not None:
            return self.method.told_phases(with_images_on(answer, device)), len(target)
        return self.method.target_phases(with_images_on(target, device)), len(target)

    def _finish_stage(
        self,
        stage: int,
        row: Mapping[str, float],
        statistics: Mapping[str, float],
        seconds: float,
        guard: Mapping[str, Any] | None,
    ) -> None:
        self.matrix = self.matrix.with_row([row.get(name, math.nan) for name in self.stream.order])
        told = self._row_as_told(stage)
        event = Journal.now(
            "stage_finished",
            stage=stage,
            domain=self.stream.order[stage],
            accuracy=dict(row),
            statistics=dict(statistics),
            seconds=round(seconds, 3),
            **({"accuracy_as_told": told} if told else {}),
            **({"guard": guard} if guard else {}),
            **({"precision": self._precision} if self._precision != self.plan.precision else {}),
        )
        self._files.finish_stage(self.method.state(), self.matrix, event)

    def _note_epoch(self, work: Stage, tick: Tick, started: float) -> None:
        work.check(tick)
        means = {name: float(value) for name, value in tick.means.items()}
        self._files.journal.note(
            "epoch",
            stage=work.number,
            domain=self.stream.order[work.number],
            phase=tick.phase.name,
            epoch=tick.epoch,
            means=means,
            statistics=dict(tick.statistics),
            seconds=round(time.perf_counter() - started, 3),  # the device has caught up: its means were read
        )

    def _ruined(self, stage: int, error: NumbersLostError, batch: Path | None, more: str = "") -> TrainingError:
        where = f"It happened with the images that {batch} names. " if batch else ""
        return TrainingError(
            f"{error} of stage {stage} ({self.stream.order[stage]}). {where}{more}"
            f"The stages before it are kept in {self.folder}. A smaller learning rate (--set lr=…) usually helps."
        )

    def _measure(self, stage: int, progress: float) -> Iterator[Probed]:
        """The new domain's accuracy now; nothing if it has none, for a probe must not end a run."""
        test = self.stream.tests[stage]
        if test is None:
            return
        try:
            measured = accuracy(self.method, test)
        except TrainingError:
            return
        yield self._probed(stage, progress, {test.name: measured})

    def _probed(self, stage: int, progress: float, measured: Mapping[str, float]) -> Probed:
        name = self.stream.order[stage]
        self._files.journal.note("probe", stage=stage, domain=name, progress=progress, accuracy=dict(measured))
        return Probed(stage, name, progress, measured)
