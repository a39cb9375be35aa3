"""Logs the events of a run to TensorBoard, MLflow, Weights & Biases or Trackio; changes no result.

Losses are logged per epoch, accuracies, metrics and the guard's verdict per stage. A run has the same name and id every
time, from its fingerprint, so a run that is resumed continues there. A tracker that fails is dropped with a note.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import os
import shlex
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, final

from ratp._core.environment import quietly
from ratp._core.files import safe_name
from ratp.errors import ConfigError, Note, RatpError, brief, unknown
from ratp.evaluation.matrix import Matrix
from ratp.runs.events import Event, Probed, StageFinished, Streamed, Trained
from ratp.runs.run import Run

PROJECT = "ratp"
T = TypeVar("T")


class TrackerWarning(Note):
    """A tracker failed; the run goes on without it."""


@dataclass(frozen=True)
class Tracked:
    """A run as trackers know it.

    Attributes:
        name: Its directory's name and the first letters of its id.
        id: From the fingerprint, so the same whenever the run is resumed.
        config: Everything that determines its result, as plain values by name.
    """

    name: str
    id: str
    config: Mapping[str, Any]


class Tracker(ABC):
    """Writes what a run logs to one place. ``show`` says how to look at it."""

    package = ""
    show = ""

    @abstractmethod
    def __init__(self, run: Tracked, folder: Path | None) -> None:
        """Starts the tracker's run, or continues it; ``folder`` is where, if the user said so."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes numbers of one epoch or stage."""

    @abstractmethod
    def note(self, name: str, text: str) -> None:
        """Writes a text."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Ends the tracker's run."""


class _TensorBoard(Tracker):
    package = "tensorboard"

    def __init__(self, run: Tracked, folder: Path | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder or Path("tensorboard")
        self._writer: Any = SummaryWriter(str(place / run.name))
        self.show = f"tensorboard --logdir {shlex.quote(str(place))}"
        self.note("config", f"```\n{json.dumps(dict(run.config), indent=2, ensure_ascii=False)}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def note(self, name: str, text: str) -> None:
        self._writer.add_text(name, text)

    def close(self, *, finished: bool) -> None:
        del finished
        self._writer.close()


class _MLflow(Tracker):
    package = "mlflow"

    def __init__(self, run: Tracked, folder: Path | None) -> None:
        from mlflow import MlflowClient

        uri = files = None
        if folder is not None or "MLFLOW_TRACKING_URI" not in os.environ:
            place = (folder or Path("mlflow")).resolve()
            place.mkdir(parents=True, exist_ok=True)
            uri, files = f"sqlite:///{place}/mlflow.db", (place / "artifacts").as_uri()
            self.show = shlex.join(["mlflow", "ui", "--backend-store-uri", uri])
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client: Any = MlflowClient(uri)
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT, files)
        earlier = self._client.search_runs([experiment], f"tags.ratp_id = '{run.id}'")
        tags = {"ratp_id": run.id}
        one = earlier[0] if earlier else self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._run = one.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        for name, value in run.config.items():
            self._client.log_param(self._run, name, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def note(self, name: str, text: str) -> None:
        self._client.set_tag(self._run, name, text)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


class _WandB(Tracker):
    package = "wandb"

    def __init__(self, run: Tracked, folder: Path | None) -> None:
        import wandb

        place = folder or Path("wandb")
        place.mkdir(parents=True, exist_ok=True)
        mode = None if "WANDB_MODE" in os.environ else "offline"
        about = {"project": PROJECT, "id": run.id, "name": run.name, "config": dict(run.config), "dir": str(place)}
        settings = wandb.Settings(silent=True, console="off")
        again = None if mode else "allow"  # offline, the parts of a resumed run only share their id
        self._run: Any = wandb.init(**about, mode=mode, resume=again, reinit="create_new", settings=settings)
        self._run.define_metric("*", step_metric="step")
        self.show = "" if mode is None else f"wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class _Trackio(Tracker):
    package = "trackio"
    show = f"trackio show --project {PROJECT}"

    def __init__(self, run: Tracked, folder: Path | None) -> None:
        del folder
        import trackio

        about = {"project": PROJECT, "name": run.name, "config": dict(run.config), "resume": "allow", "embed": False}
        self._context = copy_context()  # of several runs at once, each is trackio's current one in its own context
        self._run: Any = self._context.run(lambda: trackio.init(**about, auto_log_gpu=False, auto_log_cpu=False))
        self._finish = trackio.finish

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def note(self, name: str, text: str) -> None:
        self._run.log({name: text})

    def close(self, *, finished: bool) -> None:
        del finished
        self._context.run(self._finish)


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
    "trackio": _Trackio,
}


def check_trackers(given: Sequence[str]) -> list[str]:
    """Returns a sentence for every tracker that does not exist, or whose package is missing."""
    problems = []
    for text in given:
        name, _, folder = text.partition(":")
        if name not in TRACKERS:
            problems.append(unknown("tracker", name, TRACKERS))
        elif name == "trackio" and folder:
            problems.append("trackio writes where $TRACKIO_DIR says: give --track trackio, without a folder.")
        elif importlib.util.find_spec(package := TRACKERS[name].package) is None:
            problems.append(f"--track {name} needs {package}, which is not installed: pip install {package}")
    return problems


def track(run: Run, *trackers: str) -> Generator[Event, None, None]:
    """Executes a run step by step like :meth:`ratp.Run.events`, and logs it meanwhile.

    Args:
        run: The run.
        trackers: ``tensorboard``, ``mlflow``, ``wandb`` or ``trackio``; but for the last, a colon and a folder may
            follow. Without a folder, they write to one in the current folder that has their name. MLflow follows
            ``MLFLOW_TRACKING_URI`` if that is set, and W&B is offline unless ``WANDB_MODE`` is set.

    Yields:
        The events of the run.

    Examples:
        >>> for event in ratp.track(ratp.Run(plan, "runs/mine"), "tensorboard", "mlflow:logs"):
        ...     print(event)
    """
    with Tracking([run], trackers) as tracking, closing(run.events()) as events:
        for event in events:
            tracking.see(run, event)
            yield event


@final
class Tracking:
    """Logs the events of runs to trackers, within a block."""

    def __init__(self, runs: Sequence[Run], trackers: Sequence[str]) -> None:
        if problems := check_trackers(trackers):
            raise ConfigError(problems)
        self._logs = {id(run): _Log(run, trackers) for run in runs}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs.values():
            log.close()

    @property
    def shows(self) -> list[str]:
        """Commands that show what was logged."""
        return list(dict.fromkeys(show for log in self._logs.values() for show in log.shows))

    def see(self, run: Run, event: Event) -> None:
        """Logs an event."""
        self._logs[id(run)].see(event)


class _Log:
    """Logs one run, from its first event on."""

    def __init__(self, run: Run, trackers: Sequence[str]) -> None:
        self._run, self._config = run, run.config
        self._waiting = list(dict.fromkeys(trackers))
        self._open: dict[str, Tracker] = {}
        self._finished = False
        self.shows: list[str] = []

    def see(self, event: Event) -> None:
        """Logs an event."""
        while self._waiting:
            self._start(self._waiting.pop(0))
        if not self._open:
            return
        if isinstance(event, Trained):
            if event.tick.epoch_done:
                means = {name: float(value) for name, value in event.tick.means.items()}
                self._log(event, event.tick.phase.name, {**means, **event.tick.statistics}, 1 + event.tick.epoch)
        elif isinstance(event, Probed):
            self._log(event, "probe", event.accuracy, round(100 * event.progress))
        elif isinstance(event, Streamed):
            self._log(event, "online", event.accuracy, 0)
        elif isinstance(event, StageFinished):
            self._end_stage(event)

    def close(self) -> None:
        """Ends all trackers."""
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.close, finished=self._finished))
        self._open.clear()

    def _start(self, text: str) -> None:
        name, _, folder = text.partition(":")
        fingerprint = str(self._config["fingerprint"])
        about = Tracked(f"{self._run.folder.resolve().name}-{fingerprint[:8]}", fingerprint[:16], _flat(self._config))
        tracker = self._try(text, lambda: TRACKERS[name](about, Path(folder) if folder else None))
        if tracker is not None:
            self._open[text] = tracker
            self.shows += [tracker.show] if tracker.show else []

    def _end_stage(self, event: StageFinished) -> None:
        self._finished = event.stage + 1 == len(self._run.plan.order)
        values = {f"accuracy/{name}": value for name, value in event.accuracy.items()}
        if matrix := self._matrix():
            values |= {f"metrics/{name}": value for name, value in matrix.averages().items()}
        if event.guard is not None:
            values |= {f"guard/{name}": value for name, value in event.guard["signs"].items()}
            values["guard/rolled_back"] = float(event.guard["rolled_back"])
            verdict = "; ".join(event.guard["reasons"]) or "accepted"
            self._each(lambda tracker: tracker.note(f"{_place(event)}/guard", verdict))
        self._write({**values, "seconds": event.seconds}, event.stage)

    def _matrix(self) -> Matrix | None:
        """Returns the accuracies so far; None if another process has not brought them yet."""
        with suppress(RatpError):
            return self._run.matrix
        return None

    def _log(self, event: Trained | Probed | Streamed, kind: str, values: Mapping[str, float], step: int) -> None:
        self._write({f"{_place(event)}/{kind}/{name}": value for name, value in values.items()}, step)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        finite = {_valid(name): float(value) for name, value in values.items() if math.isfinite(value)}
        self._each(lambda tracker: tracker.log(finite, step))

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, partial(action, tracker))

    def _try(self, name: str, action: Callable[[], T]) -> T | None:
        """Calls a tracker, whose failure must not end the run; what it prints would mix with the results."""
        try:
            with quietly, redirect_stdout(io.StringIO()):
                return action()
        except Exception as error:
            self._open.pop(name, None)
            text = f"--track {name} failed; the run goes on without it: {brief(error)}"
            warnings.warn(text, TrackerWarning, stacklevel=2)
            return None


def _place(event: Trained | Probed | Streamed | StageFinished) -> str:
    return f"{event.stage + 1}-{safe_name(event.domain)}"


def _valid(name: str) -> str:
    """Makes a name that all trackers take."""
    return "/".join(map(safe_name, name.split("/")))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what determines a run's result as plain values by name."""
    found = {name: config[name] for name in ("stream", "method", "preset", "seed", "fingerprint")}
    found["order"] = ">".join(config["order"])
    values = {**config["recipe"], **config["switches"]}
    return found | {name: str(value) if isinstance(value, list) else value for name, value in values.items()}
