"""Several runs at once, so that small networks fill a GPU, or all cores of a processor.

On a GPU every run has a thread and streams of its own. A training step is one replay of a graph, which hardly needs
the interpreter, and who waits for the device lets the others go on. On a processor every run has a process with one
thread to compute with. Either way no run sees another: each gives what it gives alone.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from ratp.backbones import TIMM
from ratp.capture import RECORDING, recording_on
from ratp.errors import ConfigError, RatpError
from ratp.events import Event, StageFinished
from ratp.notes import Note
from ratp.record import RunRecord
from ratp.run import Run
from ratp.run_messages import OtherPlanError, unexpected
from ratp.run_process import ProcessGoneError, RunProcess

# Torch has 32 streams a device, and a run needs two.
MOST_ON_GPU = 15
# Runs of small networks that share a GPU if nobody says how many; large networks fill it alone.
SMALL_ON_GPU = 8
# How often a run goes on in another process because the one that made it ended, unless it finished a stage meanwhile.
MOST_RETURNS = 3
Result = RunRecord | RatpError
Listener = Callable[[Run, Event], None]
EventsOf = Callable[[Run], Generator[Event, None, None]]


class ReturnWarning(Note):
    """The process of a run has ended: the run goes on in another."""


def run_all(
    runs: Sequence[Run],
    *,
    at_once: int | None = None,
    one_thread: bool = False,
    on_event: Listener | None = None,
    on_end: Callable[[Run, Result], None] | None = None,
) -> list[Result]:
    """Makes all runs, or continues them, several at once.

    A run that fails does not stop the others. One whose process ends unexpectedly is taken up again after the others.
    Ctrl-C stops all at their next step, and the same call continues them.

    Args:
        runs: What to run, each with a directory of its own.
        at_once: How many at the same time; by default as many as cores, on a GPU eight with DTN and one with larger
            networks. With 1, runs follow one another in this thread, each as by ``execute``; so does one alone.
        one_thread: Whether runs on a processor have one thread to compute with, however many there are: then each ends
            with the same bits whatever is made beside it. Else those that follow one another in this thread have all.
        on_event: Told what happens in which run, by one thread at a time. What it raises stops all runs.
        on_end: Told what became of a run, likewise; the run is then made to forget its images and networks.

    Returns:
        For every run its record, or the error that ended it.

    Raises:
        ConfigError: If ``at_once`` is no number of runs.
    """
    check_at_once(at_once)
    return make_all(runs, partial(_lanes, at_once=at_once, one_thread=one_thread), on_event, on_end)


def make_all(
    runs: Sequence[Run],
    lanes_for: Callable[[Sequence[Run]], Sequence[Lane]],
    on_event: Listener | None = None,
    on_end: Callable[[Run, Result], None] | None = None,
) -> list[Result]:
    """As :func:`run_all`, by whatever lanes.

    Args:
        runs: What to run.
        lanes_for: Lanes for runs that may share a process; none if they are to follow one another in this thread.
        on_event: As for ``run_all``.
        on_end: Likewise.
    """
    work = _Work(runs, on_event, on_end)
    for group in _groups(runs):
        lanes = lanes_for([runs[index] for index in group])
        if lanes:
            work.at_once(group, lanes)
        else:
            work.in_turn(group)
    return work.done()


def _lanes(runs: Sequence[Run], at_once: int | None, one_thread: bool) -> Sequence[Lane]:
    """Lanes for runs on one device; none if they follow one another in this thread."""
    device = runs[0].plan.device
    count = min(len(runs), at_once or usual_at_once(runs, device))
    if device.type == "cuda":
        count = min(count, most_in_process(runs))
    if device.type != "cuda":  # threads to compute with decide the last bits: they depend on what was asked for alone
        is_alone = (at_once or count) == 1 and not one_thread
        return [] if is_alone else [_ProcessLane() for _ in range(count)]
    if count == 1:
        return []
    torch.cuda.synchronize(device)  # what was built so far was built on another stream
    return stream_lanes(device, count)


def stream_lanes(device: torch.device, count: int) -> list[_StreamLane]:
    """So many lanes on a GPU, of which each has streams of its own."""
    streams = distinct_streams(device, 2 * count)
    return [_StreamLane(device, *pair) for pair in zip(streams[::2], streams[1::2], strict=True)]


def check_at_once(at_once: int | None) -> None:
    """Refuses what is no number of runs.

    Raises:
        ConfigError: If it is none.
    """
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise ConfigError(f"at least one run must go on at a time, got {at_once!r}; e.g. 4.")


def usual_at_once(runs: Sequence[Run], device: torch.device) -> int:
    """How many runs to make at once on a device: as many as cores; on a GPU, several if their networks are small."""
    if device.type == "cuda":
        return SMALL_ON_GPU if all(run.plan.recipe.network.backbone == "dtn" for run in runs) else 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """Runs that can share a device: of one precision, for some of it is a setting of the whole process."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((str(run.plan.device), run.plan.precision), []).append(index)
    return list(groups.values())


def most_in_process(runs: Sequence[Run]) -> int:
    """How many of these runs may share a process: one if layers may draw from its default generator."""
    return 1 if any(run.plan.recipe.network.backbone.startswith(TIMM) for run in runs) else MOST_ON_GPU


def distinct_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Streams of which no two are the same one. Torch hands out those it has in turn, over and over."""
    found: dict[int, torch.cuda.Stream] = {}
    for _ in range(8 * count):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        found.setdefault(stream.cuda_stream, stream)
        if len(found) == count:
            return list(found.values())
    raise RatpError(f"{device} has no {count} streams. Run fewer at once.")


class Lane(Protocol):
    """Makes runs, one after another."""

    def events(self, run: Run) -> Generator[Event, None, None]:
        """As :meth:`ratp.run.Run.events`."""

    @property
    def gave_up(self) -> bool:
        """Whether it can make no more."""

    def close(self) -> None:
        """Ends whatever it has."""


class _ProcessLane:
    """Makes runs in another process, one after another."""

    gave_up = False

    def __init__(self) -> None:
        self._process = RunProcess()

    def events(self, run: Run) -> Generator[Event, None, None]:
        return self._process.events(run)

    def close(self) -> None:
        self._process.close()


class _StreamLane:
    """Makes runs in the thread that asks, on streams of its own, one after another."""

    gave_up = False

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, aside: torch.cuda.Stream) -> None:
        self._device, self._stream, self._aside = device, stream, aside
        self._ready = False

    def events(self, run: Run) -> Generator[Event, None, None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), recording_on(self._aside):
            self._get_ready()
            try:
                yield from run.events()
            finally:
                self._stream.synchronize()  # its memory may go to others from now on

    def _get_ready(self) -> None:
        """Lets libraries set themselves up for this thread while nobody records."""
        if self._ready:
            return
        with RECORDING:
            images = torch.zeros(1, 3, 8, 8, device=self._device)
            F.conv2d(images, torch.zeros(4, 3, 3, 3, device=self._device)).flatten(1) @ torch.zeros(
                144, 2, device=self._device
            )
            self._stream.synchronize()
        self._ready = True

    def close(self) -> None:
        """Nothing is left open."""


class _Work:
    """Runs to make, and what became of them."""

    def __init__(
        self, runs: Sequence[Run], on_event: Listener | None, on_end: Callable[[Run, Result], None] | None
    ) -> None:
        self._runs, self._on_event, self._on_end = runs, on_event, on_end
        self._results: dict[int, Result] = {}
        self._returns = Counter[int]()
        self._how: dict[Run, str] = {}
        self._telling = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def done(self) -> list[Result]:
        return [self._results[index] for index in range(len(self._runs))]

    def in_turn(self, indices: Iterable[int], events_of: EventsOf | None = None) -> None:
        """Makes runs one after another, here."""
        for index in indices:
            self._make(index, events_of or Run.events)
            self._raise_failure()

    def at_once(self, indices: Sequence[int], lanes: Sequence[Lane]) -> None:
        """Makes as many runs at once as there are lanes."""
        todo, left = deque(indices), deque[int]()
        while todo and (usable := [lane for lane in lanes if not lane.gave_up]):
            self._share(todo, left, usable)  # again, if one gave up when the others had gone
        self.in_turn(todo, self._nobody)
        self.in_turn(sorted(left))

    def _share(self, todo: deque[int], left: deque[int], lanes: Sequence[Lane]) -> None:
        """Has lanes make runs until each gave up or found no more; ``left`` gets what no other process can make."""
        ends = [threading.Event() for _ in lanes]
        threads = [
            threading.Thread(target=self._serve, args=(lane, todo, left, end), name=f"run-{k}", daemon=True)
            for k, (lane, end) in enumerate(zip(lanes, ends, strict=True))
        ]
        try:
            for thread in threads:
                thread.start()
            for end in ends:  # not by join: a thread whose join Ctrl-C breaks off counts as ended from then on
                end.wait()
        except BaseException:
            self._stop.set()
            for thread, end in zip(threads, ends, strict=True):
                if thread.ident is not None:
                    end.wait()
            raise
        self._raise_failure()

    def _serve(self, lane: Lane, todo: deque[int], left: deque[int], end: threading.Event) -> None:
        """Makes runs until there are no more, in a thread of its own."""
        try:
            while not self._stop.is_set() and not lane.gave_up:
                try:
                    index = todo.popleft()
                except IndexError:
                    break
                try:
                    self._make(index, lane.events)
                except OtherPlanError:
                    left.append(index)
                except ProcessGoneError:
                    todo.append(index)
            lane.close()
        except BaseException as error:
            self._fail(error)
        finally:
            end.set()

    def _make(self, index: int, events_of: EventsOf) -> None:
        """Makes one run, keeps its result and tells of it, unless all have to stop."""
        run = self._runs[index]
        self._attempt(index, run, events_of)
        if self._on_end is not None and index in self._results:
            self._guarded(partial(self._on_end, run, self._results[index]))
            run.forget()
            _forget_frames(self._results[index])

    def _attempt(self, index: int, run: Run, events_of: EventsOf) -> None:
        try:
            with closing(events_of(run)) as events:
                for event in events:
                    self._tell(run, event)
                    if isinstance(event, StageFinished):
                        del self._returns[index]
                    if self._stop.is_set():
                        return
            self._results[index] = run.record()
        except ProcessGoneError as error:
            if self._may_return(index, run, error):
                raise
            self._results[index] = error
        except RatpError as error:
            self._results[index] = error
        except OtherPlanError:
            raise
        except torch.OutOfMemoryError as error:
            self._results[index] = memory_error(run, error)
        except Exception as error:
            failed = RatpError(unexpected(error))
            failed.__cause__ = error
            self._results[index] = failed

    def _may_return(self, index: int, run: Run, error: ProcessGoneError) -> bool:
        """Whether a run goes on in another process."""
        self._returns[index] += 1
        self._how[run] = error.how
        if self._returns[index] > MOST_RETURNS:
            return False
        if not self._stop.is_set():
            told = f"the process of {run.folder.name} ended unexpectedly ({error.how}): it goes on with what was kept"
            warnings.warn(told, ReturnWarning, stacklevel=2)
        return True

    def _nobody(self, run: Run) -> Generator[Event, None, None]:
        """Makes no run: whoever could have, gave up."""
        why = f"its process ended unexpectedly ({self._how[run]})" if run in self._how else "see the notes before"
        raise RatpError(f"nothing is left to make {run.folder.name} with: {why}. The same command goes on.")
        yield

    def _tell(self, run: Run, event: Event) -> None:
        if self._on_event is not None:
            self._guarded(partial(self._on_event, run, event))

    def _guarded(self, tell: Callable[[], None]) -> None:
        """Tells somebody something, one at a time; what that raises stops all runs."""
        try:
            with self._telling:
                tell()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _forget_frames(result: Result) -> None:
    """Lets an error forget the variables of all it passed through: images and networks are among them."""
    error: BaseException | None = result if isinstance(result, RatpError) else None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def memory_error(run: Run, error: Exception) -> RatpError:
    """Too little memory, in a sentence; it holds on to no tensor of the run."""
    reason = str(error).partition(". ")[0]
    return RatpError(
        f"the memory of {run.plan.device} ran out ({reason}). Run fewer at once (--jobs). "
        f"The stages before are kept in {run.folder}."
    )
