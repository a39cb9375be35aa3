"""A queue of runs and the lanes that execute them, each in its own thread."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial

import torch

from ratp.errors import Note, RatpError
from ratp.executors.lanes import Lane
from ratp.executors.process import ProcessGoneError
from ratp.executors.protocol import OtherPlanError, memory_error, unexpected
from ratp.runs.events import Event, StageFinished, Waiting
from ratp.runs.record import RunRecord
from ratp.runs.run import Run

# How often a run continues in another process after its own died, within one stage.
MOST_RETRIES = 3
Result = RunRecord | RatpError
Listener = Callable[[Run, Event], None]
EventsOf = Callable[[Run], Generator[Event, None, None]]


class RetryWarning(Note):
    """The process of a run died: the run continues in another."""


class _PostponedError(Exception):
    """A run waits for another to train its source network, and a run that need not wait can have its place."""


class Pool:
    """Runs to execute, and their results."""

    def __init__(
        self, runs: Sequence[Run], on_event: Listener | None, on_end: Callable[[Run, Result], None] | None
    ) -> None:
        self._runs, self._on_event, self._on_end = runs, on_event, on_end
        self._results: dict[int, Result] = {}
        self._todo = deque[int]()
        self._postponed: set[int] = set()
        self._retries = Counter[int]()
        self._deaths: dict[int, str] = {}
        self._calling = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def results(self) -> list[Result]:
        """All results, in the order of the runs."""
        return [self._results[index] for index in range(len(self._runs))]

    def in_turn(self, indices: Iterable[int]) -> None:
        """Executes runs one after another in this thread."""
        for index in indices:
            self._execute(index, Run.events)
            self._raise_failure()

    def at_once(self, indices: Sequence[int], lanes: Sequence[Lane]) -> None:
        """Executes as many runs at once as there are lanes."""
        todo, left = deque(self._spread(indices) if len(lanes) > 1 else indices), deque[int]()
        self._todo = todo
        while todo and (usable := [lane for lane in lanes if not lane.gave_up]):
            self._share(todo, left, usable)  # again, if a lane gave up after the others had finished
        for index in todo:
            how = self._deaths.get(index)
            why = f"its process ended unexpectedly ({how})" if how else "see the notes above"
            name = self._runs[index].folder.name
            self._end(index, RatpError(f"no process is left to execute {name}: {why}. The same command continues."))
            self._raise_failure()
        self.in_turn(sorted(left))

    def _spread(self, indices: Sequence[int]) -> list[int]:
        """The runs in an order in which those that may share a source network do not start together."""
        seen = Counter[tuple[object, ...]]()
        turns: dict[int, int] = {}
        for index in indices:
            plan = self._runs[index].plan
            source = plan.spec.name, plan.order[0], plan.seed
            turns[index] = seen[source]
            seen[source] += self._runs[index].options.reuse_source
        return sorted(indices, key=turns.__getitem__)

    def _share(self, todo: deque[int], left: deque[int], lanes: Sequence[Lane]) -> None:
        """Has each lane execute runs until none is left or it gives up.

        ``left`` receives the runs that only this process can execute.
        """
        ends = [threading.Event() for _ in lanes]
        threads = [
            threading.Thread(target=self._serve, args=(lane, todo, left, end), name=f"run-{k}", daemon=True)
            for k, (lane, end) in enumerate(zip(lanes, ends, strict=True))
        ]
        try:
            for thread in threads:
                thread.start()
            for end in ends:  # not join(): a thread whose join is interrupted by Ctrl-C counts as ended
                end.wait()
        except BaseException:
            self._stop.set()
            for thread, end in zip(threads, ends, strict=True):
                if thread.ident is not None:
                    end.wait()
            raise
        self._raise_failure()

    def _serve(self, lane: Lane, todo: deque[int], left: deque[int], end: threading.Event) -> None:
        try:
            with lane.held:
                while todo and not self._stop.is_set() and not lane.gave_up:
                    try:
                        index = todo.popleft()
                    except IndexError:  # another lane was quicker
                        break
                    try:
                        self._execute(index, lane.events)
                    except OtherPlanError:
                        left.append(index)
                    except (ProcessGoneError, _PostponedError):
                        todo.append(index)
        except BaseException as error:
            self._fail(error)
        finally:
            end.set()

    def _execute(self, index: int, events_of: EventsOf) -> None:
        """Executes one run and keeps its result, unless all runs must stop."""
        run = self._runs[index]
        event: Event | None = None
        try:
            with closing(events_of(run)) as events:
                for event in events:
                    self._report(run, event)
                    if isinstance(event, Waiting) and not self._postponed.issuperset(tuple(self._todo)):
                        self._postponed.add(index)
                        raise _PostponedError
                    if isinstance(event, StageFinished):
                        del self._retries[index]
                    if self._stop.is_set():
                        return
            result: Result = run.record()
        except ProcessGoneError as error:
            if self._may_retry(index, error):
                raise
            result = error
        except RatpError as error:
            result = error
        except (OtherPlanError, _PostponedError):
            raise
        except torch.OutOfMemoryError as error:
            result = memory_error(run, error)
        except Exception as error:
            result = RatpError(unexpected(error))
            result.__cause__ = error
        event = None  # an error keeps this frame, and the event the method and its images
        self._end(index, result)

    def _report(self, run: Run, event: Event) -> None:
        if self._on_event is not None:
            self._call(partial(self._on_event, run, event))

    def _end(self, index: int, result: Result) -> None:
        self._results[index] = result
        if self._on_end is not None:
            self._call(partial(self._on_end, self._runs[index], result))
            self._runs[index].forget()
            _clear_frames(result)

    def _may_retry(self, index: int, error: ProcessGoneError) -> bool:
        self._retries[index] += 1
        self._deaths[index] = error.how
        if self._retries[index] > MOST_RETRIES:
            return False
        if not self._stop.is_set():
            name = self._runs[index].folder.name
            note = f"the process of {name} ended unexpectedly ({error.how}): another continues from what was saved"
            warnings.warn(note, RetryWarning, stacklevel=2)
        return True

    def _call(self, listener: Callable[[], None]) -> None:
        """Calls a listener, one at a time; what it raises stops all runs."""
        try:
            with self._calling:
                listener()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _clear_frames(result: Result) -> None:
    """Drops the variables an error keeps alive: images and networks are among them."""
    error: BaseException | None = result if isinstance(result, RatpError) else None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
