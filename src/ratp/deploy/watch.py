"""Watches image files as they appear: answers each once, and adapts to new kinds of images.

The file of answers says which files are done. After every window of the alarm, ``watch.json`` in the deployment says
what the alarm remembers, by the number of answers so far. So a process that was killed at any moment goes on with the
same images: it decodes those of a possible stage once more, and observes those of the unfinished window again. A stage
starts at the end of a window and the next images wait for its end, which makes its images, and so its weights, the same
with and without the interruption.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ratp._core.files import DEPLOYMENT, read_json, write_json
from ratp.deploy.answers import Answers
from ratp.deploy.arrivals import Arrival, GoneError, Intake, Source
from ratp.deploy.deployment import Adaptation, Deployment, Observation
from ratp.deploy.drift import Alarm
from ratp.errors import RatpError, RunDirectoryError

SECONDS_BETWEEN_LOOKS = 0.5
# Listing a large folder takes at most this share of the time.
_SHARE_OF_LOOKS = 0.2
_STATE = "watch.json"


@dataclass(frozen=True)
class Recalled:
    """An earlier process was continued: numbers of images that the alarm knows again, and of those that are gone."""

    images: int
    gone: int


@dataclass(frozen=True)
class Answered:
    """Answers were written.

    Attributes:
        count: Number of images.
        seen: What the deployment said of them; None if there were only broken files.
        broken: Files that were given up, each with the reason.
    """

    count: int
    seen: Observation | None
    broken: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Waiting:
    """Nothing to do for a moment; ``note`` says what is wrong or ignored, if that is new."""

    note: str = ""


@dataclass(frozen=True)
class StageStarted:
    """A stage begins."""

    images: int


@dataclass(frozen=True)
class StageRunning:
    """A stage is under way."""


@dataclass(frozen=True)
class StageEnded:
    """A stage has ended; ``error`` says why if it failed."""

    result: Adaptation | None
    error: str = ""


Event = Recalled | Answered | Waiting | StageStarted | StageRunning | StageEnded


class FolderWatch:
    """Answers the images of a source with a deployment.

    Args:
        model: The deployment; its setting ``adapt`` decides whether stages start.
        source: Where images appear.
        answers: The file to append to.
        latency: Seconds that a complete image waits at most for others, to be predicted together.
        patience: Seconds for which a file that cannot be decoded is tried again.
    """

    def __init__(
        self, model: Deployment, source: Source, answers: Answers, *, latency: float = 2.0, patience: float = 10.0
    ) -> None:
        self._model, self._source, self._answers, self._latency = model, source, answers, latency
        self._is_gone = False
        self._adapts = model.settings.adapt == "auto"
        if self._adapts:
            model.settings = replace(model.settings, adapt="never")  # stages start here, between two windows
        self._intake = Intake(source, answers.is_done, model.image_size, patience)

    def events(self) -> Generator[Event, None, None]:
        """Works until no more images can come, and yields what happens."""
        try:
            yield from self._recall()
            yield from self._adapt()  # a stage that was interrupted starts again
            while not self._intake.finished:
                started = time.monotonic()
                yield Waiting(self._look())
                pause = max(SECONDS_BETWEEN_LOOKS, (time.monotonic() - started) / _SHARE_OF_LOOKS)
                while self._intake.is_due(self._model.room, self._latency):
                    if (answered := self._answer()) is not None:
                        yield answered
                    yield from self._adapt()
                if not self._intake.finished:
                    time.sleep(max(0.0, started + pause - time.monotonic()))
        finally:
            self._intake.close()

    def _look(self) -> str:
        try:
            self._intake.look()
        except GoneError as error:
            if not self._source.open:
                raise
            was_gone, self._is_gone = self._is_gone, True
            return "" if was_gone else f"{error} Waiting for it to return."
        was_gone, self._is_gone = self._is_gone, False
        return "It has returned." if was_gone else self._source.note

    def _answer(self) -> Answered | None:
        """Predicts images up to the end of the window, so that a stage can begin right after it."""
        files, broken = self._intake.take(self._model.room)
        if not (files or broken):
            return None
        seen = self._model.observe(_stacked(files), [file.path for file, _ in files]) if files else None
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        records = [] if seen is None else [_record(file, seen, k, now) for k, (file, _) in enumerate(files)]
        self._answers.append([*records, *(_failure(file, reason, now) for file, reason in broken)])
        if seen is not None and seen.windows:
            self._save()
        return Answered(len(files), seen, tuple((file.path, reason) for file, reason in broken))

    def _adapt(self) -> Iterator[Event]:
        if not (self._adapts and self._model.ready):
            return
        yield StageStarted(self._model.waiting)
        self._model.adapt(background=True)  # so that a signal is noticed meanwhile
        try:
            while (result := self._model.wait(0.2)) is None and self._model.adapting:
                yield StageRunning()
            ended = StageEnded(result or self._model.wait())
        except RatpError as error:
            ended = StageEnded(None, str(error))
        self._save()
        yield ended

    def _place(self) -> dict[str, Any]:
        """Says to what the alarm's state belongs: another output or version begins anew."""
        output = str(self._answers.path.resolve())
        return {"output": output, "version": self._model.version, "versions": len(self._model.history())}

    def _save(self) -> None:
        """Writes what the alarm remembers; between two windows only."""
        state = {
            **self._place(),
            "answers": self._answers.count,
            "waiting": self._model.waiting,
            "alarm": self._model.alarm_state(),
        }
        write_json(self._model.folder / _STATE, DEPLOYMENT.marked(state))

    def _recall(self) -> Iterator[Event]:
        """Continues where an earlier process ended."""
        state = self._read_state()
        if state is None:
            self._save()
            return
        done, files = state["answers"], self._answers.answered
        recent, unfinished = files[done - state["waiting"] : done], files[done:]
        known, seen = self._decode(recent), self._decode(unfinished)
        self._model.restore_alarm(state["alarm"], _stacked(known))
        windows = (
            self._model.observe(_stacked(seen), [file.path for file, _ in seen], again=True).windows if seen else ()
        )
        if windows:  # the process was killed between the answers and this
            self._save()
        found, asked = len(known) + len(seen), len(recent) + len(unfinished)
        if asked:
            yield Recalled(found, asked - found)

    def _read_state(self) -> dict[str, Any] | None:
        """Reads what the alarm remembered; None if that is not about these answers and this version."""
        path = self._model.folder / _STATE
        with suppress(RunDirectoryError, KeyError, TypeError, ValueError):
            state = DEPLOYMENT.read(read_json(path), path)
            is_same = all(state[name] == value for name, value in self._place().items())
            if is_same and 0 <= state["waiting"] <= state["answers"] <= self._answers.count:
                Alarm.load(state["alarm"])
                return state
        return None

    def _decode(self, files: Sequence[Arrival]) -> list[tuple[Arrival, Tensor]]:
        """Decodes files that were answered before; leaves out those that are gone."""
        pairs = zip(files, self._intake.decode(files), strict=True)
        return [(file, image) for file, image in pairs if isinstance(image, Tensor)]


def _stacked(images: Sequence[tuple[Arrival, Tensor]]) -> Tensor:
    return torch.stack([image for _, image in images]) if images else torch.empty(0, dtype=torch.uint8)


def _record(file: Arrival, seen: Observation, row: int, now: str) -> dict[str, Any]:
    return {
        "file": file.path,
        "class": seen.labels[row],
        "confidence": round(seen.confidence[row], 6),
        "version": seen.version,
        "level": seen.level,
        "time": now,
        "size": file.size,
        "modified": file.modified,
    }


def _failure(file: Arrival, reason: str, now: str) -> dict[str, Any]:
    return {"file": file.path, "error": reason, "time": now, "size": file.size, "modified": file.modified}
