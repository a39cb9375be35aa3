"""Trains and measures a stage of a run; if values become non-finite, it retries the stage in fp32."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from ratp._core.environment import Randomness, single_precision
from ratp._core.files import write_json
from ratp.errors import ConfigError, Note, RatpError, RunDirectoryError, TrainingError, brief
from ratp.evaluation.online import Counts, Score
from ratp.guard.watch import ACT, Watch
from ratp.methods.rehearsal import chance_put_back, check_kept, give_generators
from ratp.runs.directory import Journal
from ratp.runs.events import Event, Probed, StageFinished, StageStarted, Streamed, Trained, Waiting
from ratp.runs.record import is_undone
from ratp.runs.states import Stage
from ratp.training.device_cache import D, with_images_on
from ratp.training.finite import NonFiniteError, find_batch, lost_weights
from ratp.training.phase import Phase, Tick, train
from ratp.training.phases import NetworkMethod
from ratp.training.source_cache import TakenError

if TYPE_CHECKING:
    from ratp.runs.run import Session

# Between checks whether another run has trained the source network.
SECONDS_BETWEEN_CHECKS = 0.1


class NumbersWarning(Note):
    """A stage is retried in fp32."""


class WaitingWarning(Note):
    """A run waits for another that trains the same source network."""


class OnlineWarning(Note):
    """A domain could not be measured while it streamed past a copy of the model."""


class CheckpointWarning(Note):
    """A stage starts again because its checkpoint does not fit, or has no checkpoint because none can be saved."""


@final
class StageRunner:
    """Runs one stage, with one retry."""

    def __init__(self, session: Session, number: int) -> None:
        self._session, self._number = session, number
        self._plan, self._stream, self._files = session.plan, session.stream, session.files
        self._options = session.options
        self._name = session.stream.order[number]
        self._captures = session.options.capture and session.plan.device.type == "cuda"

    def events(self) -> Iterator[Event]:
        """Runs the stage; if values become non-finite, retries it in fp32 from what was saved last."""
        if self._was_tried_again():
            batch = self._files.batch(self._number)
            yield from self._try_again(batch if batch.exists() else None)
            return
        try:
            yield from self._attempt()
            return
        except NonFiniteError as error:
            lost = error
        found = self._look_for_batch(lost)
        if self._plan.precision == "fp32":
            self._session.undo()
            raise self._ruined(lost, found)
        text = f"{lost} of stage {self._number} ({self._name}), which is retried in fp32"
        warnings.warn(text, NumbersWarning, stacklevel=2)
        yield from self._try_again(found)

    def _was_tried_again(self) -> bool:
        """Whether the run was stopped during the retry."""
        checkpoint = next(self._files.checkpoints.found(self._number), None)
        return checkpoint is not None and any(event["event"] == "numbers_lost" for event in checkpoint.events)

    def _try_again(self, batch: Path | None) -> Iterator[Event]:
        """Runs the stage in fp32; ``batch`` names the batch of the first failure."""
        try:
            with single_precision():
                self._session.use("fp32")
                yield from self._attempt()
        except NonFiniteError as error:
            self._session.use(self._plan.precision)
            raise self._ruined(error, batch, "The fp32 retry also failed. ") from error
        self._session.use(self._plan.precision)

    def _look_for_batch(self, error: NonFiniteError) -> Path | None:
        """Repeats the stage up to the failure and writes a file about the batch that caused it."""
        self._session.undo()
        work = self._prepare()
        found = find_batch(work.phases, work.progress, error, self._captures, work.weights)
        self._files.lose_numbers(self._number, self._name, str(error), self._session.precision)
        if found is None:
            return None
        files = self._stream.files.get(self._name, ()) if self._number else ()  # part of the source is held out
        names = [files[place] for place in found.images if place < len(files)]
        about = {"stage": self._number, "domain": self._name, "what": str(error), **asdict(found), "files": names}
        path = self._files.batch(self._number)
        write_json(path, about)
        return path

    def _ruined(self, error: NonFiniteError, batch: Path | None, more: str = "") -> TrainingError:
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
        yield from self._stream_past()
        started = time.perf_counter()
        yield from self._train(work, started)
        if bad := lost_weights(session.method.state()):
            raise work.lost_at_the_end(f"{bad[0]} holds non-finite values")
        if session.is_own:
            check_kept(session.method, session.built, self._stream.source, self._plan.device, session.precision)
        guard = self._judge(watch, work) if watch else None
        row = self._row(work)
        if self._options.probe and name in row:
            yield self._probed(1.0, {name: row[name]})
        seconds = work.seconds + time.perf_counter() - started
        session.keep_features(number)
        details = self._files.details
        if self._is_unchanged(work):
            details.keep(number, details, number - 1)
        else:
            details.write(number, session.measures.details())
        self._finish(row, work.statistics, seconds, guard)
        self._files.checkpoints.remove()
        yield StageFinished(number, name, row, work.statistics, seconds, guard)

    def _train(self, work: Stage, started: float) -> Generator[Event, None, None]:
        """Makes the remaining steps, with probes between epochs and checkpoints at intervals and when stopped."""
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
                saved = probes  # a stage that is stopped between probes repeats them
                yield Trained(self._number, self._name, tick)
                if probes:
                    yield from self._measure(work.done / work.total)
                    epoch_started, saved = time.perf_counter(), False
                if self._files.checkpoints.due:
                    work.check(tick)
                    self._save(work, started)
                    saved = True
        except GeneratorExit:
            if self._options.save_every is not None and not saved and work.is_sound(tick):
                self._save(work, started)
            raise

    def _save(self, work: Stage, started: float) -> None:
        """Saves a checkpoint, unless a custom method has no state before its stage ends."""
        try:
            self._files.save_checkpoint(work, time.perf_counter() - started)
        except RunDirectoryError:
            raise
        except Exception as error:
            if not self._session.is_own:
                raise
            name = self._session.method.name
            text = f"{name} cannot be saved within a stage, so an interrupted stage starts again: {brief(error)}"
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    def _prepare_in_turn(self) -> Generator[Event, None, Stage]:
        """As :meth:`_prepare`, but first waits for another run that trains the same source network."""
        is_waiting = False
        while True:
            try:
                return self._prepare()
            except TakenError as error:
                taken = error
            if not is_waiting:
                text = "waiting for another run that trains the same source network"
                warnings.warn(text, WaitingWarning, stacklevel=2)
                is_waiting = True
            models = self._session.models
            assert models
            while not models.is_there_or_claimed(taken.path):
                yield Waiting(self._number, self._name)
                time.sleep(SECONDS_BETWEEN_CHECKS)
            self._session.take_up(None)  # the stage is half prepared

    def _prepare(self) -> Stage:
        """Builds the stage, and continues it from its latest usable checkpoint if there is one."""
        skipped = ""
        for checkpoint in self._files.checkpoints.found(self._number):
            if checkpoint.state is None:
                skipped = "an earlier version of ratp wrote it"
                continue
            work = Stage(self._number, *self._phases(), self._session.method)
            try:
                work.resume(checkpoint, self._plan.device)
                return work
            except RatpError as error:
                skipped = str(error)
                self._session.undo()  # it may be half restored
        if skipped:
            text = f"stage {self._number} ({self._name}) starts again: its checkpoint does not fit ({skipped})"
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        return Stage(self._number, *self._phases(), self._session.method)

    def _phases(self) -> tuple[Sequence[Phase], int]:
        """Returns the phases of the stage and the number of its images."""
        method, device, number = self._session.method, self._plan.device, self._number
        if self._session.is_own:
            give_generators(method, Randomness(self._plan.seed), device, number)
        if number == 0:
            source = self._stream.source
            if source.name in self._stream.gone and self._plan.adopted and isinstance(method, NetworkMethod):
                method.start_from(self._plan.adopted.tensors)
                return [], 0
            phases = method.source_phases(self._shared(source))
            if (adopted := self._plan.adopted_source) and not adopted.used:
                raise ConfigError(
                    f"{method.name} trains on the source in its own way, so it cannot start with an adopted model; "
                    "ratp, shot, tent and others can."
                )
            return phases, len(source)
        target, answer = self._stream.targets[number - 1], self._stream.answers[number - 1]
        if self._session.uses_labels and answer is not None:
            return method.labelled_target_phases(self._shared(answer)), len(target)
        return method.target_phases(self._shared(target)), len(target)

    def _shared(self, domain: D) -> D:
        """Returns the domain with its images on the run's GPU, where runs share them, or streamed to it."""
        return with_images_on(domain, self._plan.device, self._options.images)

    def _watch(self) -> Watch | None:
        """Shows the guard the model before a target stage; None: the guard is off."""
        if self._number == 0 or self._plan.guard == "off":
            return None
        target = self._stream.targets[self._number - 1]
        return Watch(self._session.method, target, self._stream.source, Randomness(self._plan.seed))

    def _judge(self, watch: Watch, work: Stage) -> dict[str, Any] | None:
        """Returns the guard's verdict for the journal; an acting guard undoes what it rejects, if anything changed."""
        verdict = watch.judge(self._session.method)
        if verdict is None:
            return None
        undone = self._plan.guard == ACT and bool(verdict.reasons) and not self._is_unchanged(work)
        if undone:
            self._session.undo()
        return {"rolled_back": undone, **verdict.to_json()}

    def _is_unchanged(self, work: Stage) -> bool:
        """Whether the model is the one from before the stage, so that there is nothing to measure."""
        ignores_targets = vars(type(self._session.method)).get("ignores_targets", False)
        return bool(work.number and not work.phases and ignores_targets)

    def _row(self, work: Stage) -> dict[str, float]:
        """Returns accuracies after the stage; those before it if the model has not changed."""
        method, measures = self._session.method, self._session.measures
        if self._is_unchanged(work):
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
        by_domain = session.measures.row_by_domain(session.method, self._learnt(guard))
        event = Journal.now(
            "stage_finished",
            stage=self._number,
            domain=self._name,
            accuracy=dict(row),
            statistics=dict(statistics),
            seconds=round(seconds, 3),
            **({"accuracy_as_told": by_domain} if by_domain else {}),
            **({"online": online} if (online := self._online(row)) else {}),
            **({"guard": guard} if guard else {}),
            **({"precision": precision} if precision != self._plan.precision else {}),
        )
        self._files.finish_stage(session.method.state(), session.matrix, event)

    def _learnt(self, guard: Mapping[str, Any] | None) -> list[int]:
        """Returns the stages up to this one that were not undone; ``guard`` is the verdict on this one."""
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
            seconds=round(time.perf_counter() - started, 3),  # reading the means has waited for the device
        )

    def _stream_past(self) -> Iterator[Streamed]:
        """Streams the new domain past copies of the model, unless the plan or an interrupted attempt says otherwise."""
        if not self._plan.online or self._number == 0 or self._counts():
            return
        session, number, started = self._session, self._number, time.perf_counter()
        batch, device = self._plan.recipe.batch, self._plan.device
        with chance_put_back(device) if session.is_own else nullcontext():
            try:
                counts = session.measures.passes(session.earlier_methods(), number, batch, device)
            except (TrainingError, torch.OutOfMemoryError) as error:  # a measurement must not end a run
                text = f"{self._name} was not measured while it streamed past: {brief(error)}"
                warnings.warn(text, OnlineWarning, stacklevel=2)
                return
        if counts:
            found = {order: one.to_json() for order, one in counts.items()}
            seconds = round(time.perf_counter() - started, 3)
            self._files.journal.note("online", stage=number, domain=self._name, orders=found, seconds=seconds)
            accuracy = {order: 100 * sum(one.correct) / one.images for order, one in counts.items()}
            yield Streamed(number, self._name, accuracy)

    def _counts(self) -> dict[str, Counts]:
        """Returns what the journal says of the pass over the new domain; a stage that is continued has it too."""
        events = [event for event in self._files.journal.of_stage(self._number) if event["event"] == "online"]
        with suppress(RatpError, AttributeError, KeyError, IndexError):  # none, or a damaged one
            return {order: Counts.from_json(one) for order, one in events[-1]["orders"].items()}
        return {}

    def _online(self, row: Mapping[str, float]) -> dict[str, Any]:
        """Returns the scores of the pass over the new domain by order, now that its TDA is known."""
        counts = self._counts() if self._name in row else {}
        return {order: Score.of(one, row[self._name]).to_json() for order, one in counts.items()}

    def _measure(self, progress: float) -> Iterator[Probed]:
        """Measures the new domain now, if it has labels."""
        if measured := self._session.measures.probe(self._session.method, self._number):
            yield self._probed(progress, measured)

    def _probed(self, progress: float, measured: Mapping[str, float]) -> Probed:
        about = {"stage": self._number, "domain": self._name, "progress": progress}
        self._files.journal.note("probe", **about, accuracy=dict(measured))
        return Probed(self._number, self._name, progress, measured)
