"""A stage of a run, made: trained and measured, and if its numbers are lost, tried once more in single precision."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from ratp.device_copies import with_images_on
from ratp.errors import RatpError, TrainingError
from ratp.events import Event, Probed, StageFinished, StageStarted, Trained, Waiting
from ratp.files import write_json
from ratp.guard import ACT, Watch
from ratp.journal import Journal
from ratp.methods.own import check_kept, give_generators
from ratp.notes import Note
from ratp.numbers import NumbersLostError, find_batch, lost_weights
from ratp.phase import Phase, Tick, train
from ratp.precision import single_precision
from ratp.randomness import Randomness
from ratp.record import is_undone
from ratp.session import Session
from ratp.source_models import TakenError
from ratp.stage import Stage, ready

# At a network that another run trains and this one begins with.
SECONDS_BETWEEN_LOOKS = 0.1


class NumbersWarning(Note):
    """A stage is tried once more in single precision."""


class WaitingWarning(Note):
    """A run waits for another that trains the network both begin with."""


class CheckpointWarning(Note):
    """A checkpoint does not fit what goes on from it, another device say: it is passed over."""


@final
class Attempts:
    """The attempts at a stage.

    Args:
        session: The run, with its method as the stage before left it.
        number: Which stage, from 0.
    """

    def __init__(self, session: Session, number: int) -> None:
        self._session, self._number = session, number
        self._plan, self._stream, self._files = session.plan, session.stream, session.files
        self._options = session.options
        self._name = session.stream.order[number]
        self._captures = session.options.capture and session.plan.device.type == "cuda"

    def events(self) -> Iterator[Event]:
        """The stage; if its numbers are lost, once more from where they were last saved, in single precision."""
        if self._was_tried_again():
            batch = self._files.batch(self._number)
            yield from self._try_again(batch if batch.exists() else None)
            return
        try:
            yield from self._attempt()
            return
        except NumbersLostError as error:
            lost = error
        found = self._look_for_batch(lost)
        if self._plan.precision == "fp32":
            self._session.undo()
            raise self._ruined(lost, found)
        told = f"{lost} of stage {self._number} ({self._name}), which is tried once more in fp32"
        warnings.warn(told, NumbersWarning, stacklevel=2)
        yield from self._try_again(found)

    def _was_tried_again(self) -> bool:
        """Whether the run was stopped in the second attempt."""
        checkpoint = next(self._files.checkpoints.found(self._number), None)
        return checkpoint is not None and any(event["event"] == "numbers_lost" for event in checkpoint.events)

    def _try_again(self, batch: Path | None) -> Iterator[Event]:
        """The stage in single precision; ``batch`` says where its numbers were lost before."""
        try:
            with single_precision():
                self._session.use("fp32")
                yield from self._attempt()
        except NumbersLostError as error:
            self._session.use(self._plan.precision)
            raise self._ruined(error, batch, "Neither in fp32 did it go well. ") from error
        self._session.use(self._plan.precision)

    def _look_for_batch(self, error: NumbersLostError) -> Path | None:
        """Makes the stage again up to where its numbers were lost, and writes down the batch it happened with."""
        self._session.undo()
        work = self._prepare()
        found = find_batch(work.phases, work.progress, error, self._captures, work.weights)
        self._files.lose_numbers(self._number, self._name, str(error), self._session.precision)
        if found is None:
            return None
        files = self._stream.files.get(self._name, ()) if self._number else ()  # a part of the source is for testing
        names = [files[place] for place in found.images if place < len(files)]
        about = {"stage": self._number, "domain": self._name, "what": str(error), **asdict(found), "files": names}
        path = self._files.batch(self._number)
        write_json(path, about)
        return path

    def _ruined(self, error: NumbersLostError, batch: Path | None, more: str = "") -> TrainingError:
        where = f"It happened with the images that {batch} names. " if batch else ""
        return TrainingError(
            f"{error} of stage {self._number} ({self._name}). {where}{more}The stages before it are kept in "
            f"{self._session.folder}. A smaller learning rate (--set lr=…) usually helps."
        )

    def _attempt(self) -> Generator[Event, None, None]:
        session, number, name = self._session, self._number, self._name
        watch = self._watch()
        work = yield from self._prepare_in_turn()
        yield StageStarted(number, name, work.images, work.total, work.done)
        self._files.begin_stage(work, name)
        started = time.perf_counter()
        yield from self._train(work, started)
        if bad := lost_weights(session.method.state()):
            raise work.lost_at_the_end(f"{bad[0]} holds values that are no numbers")
        if session.is_own:
            check_kept(session.method, session.built, self._stream.source, self._plan.device, session.precision)
        guard = self._judge(watch) if watch else None
        row = self._row(work)
        if self._options.probe and name in row:
            yield self._probed(1.0, {name: row[name]})
        seconds = work.seconds + time.perf_counter() - started
        session.keep_features(number)
        self._finish(row, work.statistics, seconds, guard)
        self._files.checkpoints.remove()
        yield StageFinished(number, name, row, work.statistics, seconds, guard)

    def _train(self, work: Stage, started: float) -> Generator[Event, None, None]:
        """All steps that are left, with probes between epochs; a checkpoint now and then, and where it is stopped."""
        epoch_started = started
        if self._options.probe and not work.done:
            yield from self._measure(0.0)
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
                probes = self._options.probe and tick.epoch_done and work.done < work.total
                saved = probes  # between probes there is nothing to go on with
                yield Trained(self._number, self._name, tick)
                if probes:
                    yield from self._measure(work.done / work.total)
                    epoch_started, saved = time.perf_counter(), False
                if self._files.checkpoints.due:
                    work.check(tick)
                    self._files.save_checkpoint(work, time.perf_counter() - started)
                    saved = True
        except GeneratorExit:
            if self._options.save_every is not None and not saved and work.is_sound(tick):
                self._files.save_checkpoint(work, time.perf_counter() - started)
            raise

    def _prepare_in_turn(self) -> Generator[Event, None, Stage]:
        """As :meth:`_prepare`; if another run trains the network this one begins with, once it has."""
        is_told = False
        while True:
            try:
                return self._prepare()
            except TakenError as error:
                taken = error
            if not is_told:
                told = "waiting for another run that trains the same source network"
                warnings.warn(told, WaitingWarning, stacklevel=2)
                is_told = True
            models = self._session.models
            assert models
            while not models.is_there_or_claimed(taken.path):
                yield Waiting(self._number, self._name)
                time.sleep(SECONDS_BETWEEN_LOOKS)
            self._session.take_up(None)  # half of what the stage needs had been made

    def _prepare(self) -> Stage:
        """The phases of the stage, as its latest usable checkpoint left them, or from the start."""
        for checkpoint in (*self._files.checkpoints.found(self._number), None):
            phases, images = self._phases()
            if checkpoint is not None:
                ready(phases, checkpoint)
            work = Stage.begun(self._number, phases, images, self._session.method, self._plan.device)
            if checkpoint is None:
                return work
            try:
                work.go_on(checkpoint)
                return work
            except RatpError as error:
                told = f"what was kept within stage {self._number} ({self._name}) is passed over: {error}"
                warnings.warn(told, CheckpointWarning, stacklevel=2)
                self._session.undo()  # it may be half restored
        raise AssertionError("unreachable")

    def _phases(self) -> tuple[Sequence[Phase], int]:
        """What the stage trains, and on how many images."""
        method, device, number = self._session.method, self._plan.device, self._number
        if self._session.is_own:
            give_generators(method, Randomness(self._plan.seed), device, number)
        if number == 0:
            source = self._stream.source
            return method.source_phases(with_images_on(source, device)), len(source)
        target, answer = self._stream.targets[number - 1], self._stream.answers[number - 1]
        if self._session.is_told and answer is not None:
            return method.told_phases(with_images_on(answer, device)), len(target)
        return method.target_phases(with_images_on(target, device)), len(target)

    def _watch(self) -> Watch | None:
        """What the guard sees of the model before a target stage; None: it does not look."""
        if self._number == 0 or self._plan.guard == "off":
            return None
        target = self._stream.targets[self._number - 1]
        return Watch(self._session.method, target, self._stream.source, Randomness(self._plan.seed))

    def _judge(self, watch: Watch) -> dict[str, Any] | None:
        """The guard's verdict on the stage, for the journal. Where the guard acts, what it refuses is undone."""
        verdict = watch.judge(self._session.method)
        if verdict is None:
            return None
        undone = self._plan.guard == ACT and bool(verdict.reasons)
        if undone:
            self._session.undo()
        return {"rolled_back": undone, **verdict.to_json()}

    def _row(self, work: Stage) -> dict[str, float]:
        """Accuracies after the stage; of a model that is the same as before it, those before."""
        method, measures = self._session.method, self._session.measures
        if work.number and not work.phases and vars(type(method)).get("ignores_targets", False):
            before = dict(zip(self._stream.order, self._session.matrix.accuracy[-1], strict=True))
            return {name: before[name] for name in measures.names}
        try:
            return measures.row(method)
        except TrainingError as error:
            raise work.lost_at_the_end(str(error)) from error

    def _finish(
        self,
        row: Mapping[str, float],
        statistics: Mapping[str, float],
        seconds: float,
        guard: Mapping[str, Any] | None,
    ) -> None:
        session, precision = self._session, self._session.precision
        session.matrix = session.matrix.with_row([row.get(name, math.nan) for name in self._stream.order])
        told = session.measures.row_as_told(session.method, self._learnt(guard))
        event = Journal.now(
            "stage_finished",
            stage=self._number,
            domain=self._name,
            accuracy=dict(row),
            statistics=dict(statistics),
            seconds=round(seconds, 3),
            **({"accuracy_as_told": told} if told else {}),
            **({"guard": guard} if guard else {}),
            **({"precision": precision} if precision != self._plan.precision else {}),
        )
        self._files.finish_stage(session.method.state(), session.matrix, event)

    def _learnt(self, guard: Mapping[str, Any] | None) -> list[int]:
        """Stages up to this one that were not undone; ``guard`` is what it says of this one."""
        ends = [*self._files.journal.finished(), {"stage": self._number, "guard": guard}]
        undone = {end.get("stage") for end in ends if is_undone(end)}
        return [number for number in range(self._number + 1) if number not in undone]

    def _note_epoch(self, work: Stage, tick: Tick, started: float) -> None:
        work.check(tick)
        means = {name: float(value) for name, value in tick.means.items()}
        self._files.journal.note(
            "epoch",
            stage=self._number,
            domain=self._name,
            phase=tick.phase.name,
            epoch=tick.epoch,
            means=means,
            statistics=dict(tick.statistics),
            seconds=round(time.perf_counter() - started, 3),  # the device has caught up: its means were read
        )

    def _measure(self, progress: float) -> Iterator[Probed]:
        """The new domain's accuracy now, if it has one."""
        if measured := self._session.measures.probe(self._session.method, self._number):
            yield self._probed(progress, measured)

    def _probed(self, progress: float, measured: Mapping[str, float]) -> Probed:
        about = {"stage": self._number, "domain": self._name, "progress": progress}
        self._files.journal.note("probe", **about, accuracy=dict(measured))
        return Probed(self._number, self._name, progress, measured)
