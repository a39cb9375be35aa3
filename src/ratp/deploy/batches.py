"""Collects images of several clients into batches for the one thread that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ratp.deploy.deployment import Deployment, Observation
from ratp.deploy.model import AnswerError
from ratp.errors import RunDirectoryError, brief

MOST, SECONDS = 16, 0.005


class Answer(NamedTuple):
    """The answer for one image."""

    label: str
    confidence: float
    version: int
    level: str


class _Job(NamedTuple):
    image: Tensor
    name: str | None  # of an image to observe; None: to predict only
    answer: asyncio.Future[Answer]


class Batches:
    """Predicts images in batches of up to 16; an image waits at most 5 ms for others.

    Attributes:
        thread: The thread that computes.
        problem: Why the last observation could not be journalled; empty if it was.
    """

    def __init__(self, model: Deployment) -> None:
        self._model = model
        self._jobs = asyncio.Queue[_Job]()
        self.thread = ThreadPoolExecutor(1, "model")
        self.problem = ""

    async def ask(self, image: Tensor, name: str | None = None) -> Answer:
        """Returns the answer for an image; with a name, the deployment observes it."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(image, name, answer))
        return await answer

    async def work(self) -> None:
        """Computes batches until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            jobs = [await self._jobs.get()]
            self._collect(jobs)
            if len(jobs) < MOST:
                await asyncio.sleep(SECONDS)
                self._collect(jobs)
            found = await loop.run_in_executor(self.thread, self._compute, jobs)
            for job, outcome in zip(jobs, found, strict=True):
                if job.answer.done():  # its client has gone
                    continue
                if isinstance(outcome, Answer):
                    job.answer.set_result(outcome)
                else:
                    job.answer.set_exception(outcome)

    def _collect(self, jobs: list[_Job]) -> None:
        while len(jobs) < MOST and not self._jobs.empty():
            jobs.append(self._jobs.get_nowait())

    def _compute(self, jobs: Sequence[_Job]) -> list[Answer | Exception]:
        found: dict[int, Answer | Exception] = {}
        for observed in (True, False):
            rows = [k for k, job in enumerate(jobs) if (job.name is not None) is observed]
            if rows:
                found |= zip(rows, self._outcomes([jobs[k] for k in rows]), strict=True)
        return [found[k] for k in range(len(jobs))]

    def _outcomes(self, jobs: Sequence[_Job]) -> Sequence[Answer | Exception]:
        """Answers images together, or each alone if there is no answer to one of them."""
        try:
            return self._answers(jobs)
        except AnswerError as error:
            return [error] if len(jobs) == 1 else [self._outcomes([job])[0] for job in jobs]
        except Exception as error:  # for the clients; the next batch may succeed
            return [error] * len(jobs)

    def _answers(self, jobs: Sequence[_Job]) -> list[Answer]:
        images = torch.stack([job.image for job in jobs])
        names = [job.name for job in jobs if job.name is not None]
        seen = self._observe(images, names) if names else self._model.answer(images)
        pairs = zip(seen.labels, seen.confidence, strict=True)
        return [Answer(label, share, seen.version, seen.level) for label, share in pairs]

    def _observe(self, images: Tensor, names: Sequence[str]) -> Observation:
        """Observes images; if that cannot be journalled, for example on a full disk, answers them anyway."""
        try:
            seen = self._model.observe(images, names)
            self.problem = ""
        except RunDirectoryError as error:
            self.problem = brief(error)
            seen = self._model.answer(images)
        return seen
