"""A run: one method on one stream with one seed, and its directory.

After every stage the whole method is saved, together with the accuracies so far, in one file that is replaced in one
step, and the one before is kept; within a stage there is a checkpoint now and then. Whatever interrupts a run, the same
command continues it, and the result is the one an undisturbed run gives.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ratp.attempts import Attempts
from ratp.earlier import EarlierRun, begun_after
from ratp.errors import ConfigError
from ratp.events import Event
from ratp.lock import exclusive
from ratp.matrix import Matrix
from ratp.method import Method
from ratp.plan import RunPlan
from ratp.predictions import prediction_files
from ratp.record import RunRecord, is_run, read_run
from ratp.run_folder import as_begun, check_folder
from ratp.session import Options, Session
from ratp.stream import Stream

SAVE_EVERY = 120.0


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

    Attributes:
        plan: What is run; a run that was begun goes on as it began.
        folder: As given.
        after: As given.
        options: How it is made.
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
        self.options = Options(probe, capture, reuse_source, save_every, features)
        self._session: Session | None = None
        if not wait:
            _ = self.config, self.method

    @cached_property
    def stream(self) -> Stream:
        """The images."""
        self.plan.look_for_weights()
        stream = self.plan.load_stream()
        if self.plan.method.uses_target_labels(self.plan.config) and None in stream.answers:
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
    def _untrained(self) -> Method:
        return self.plan.build_method(self.stream)

    @property
    def method(self) -> Method:
        """What is trained: until the run goes on here, untrained."""
        return self._session.method if self._session else self._untrained

    @property
    def matrix(self) -> Matrix:
        """Accuracies of the stages finished so far."""
        if self._session:
            return self._session.matrix
        return self.record().matrix if is_run(self.folder) else Matrix(self.plan.order)

    def forget(self, *, images: bool = True) -> None:
        """Lets go of images and networks, or of networks alone; what is needed again is loaded again."""
        self._session = None
        for name in ("_untrained", *(("stream", "config") if images else ())):
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
            self.forget(images=False)
            session = Session(self.plan, self.stream, self.folder, self.config, self.after, self.options)
            try:
                session.open()
                self._session = session
                for stage in range(session.matrix.stages, len(self.stream.order)):
                    yield from Attempts(session, stage).events()
            finally:
                session.release()
            session.finish()
