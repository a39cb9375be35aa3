"""Runs, events and errors as plain data for another process.

A plan holds functions, which cannot be sent, so its request is sent and resolved again. If that gives a different plan,
the other process refuses the run.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from ratp._core.locks import InUseError
from ratp.config import as_dict
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.methods.custom import own_traceback
from ratp.runs.events import Event, Probed, StageFinished, StageStarted, Streamed, Trained, Waiting
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.stream import DataOptions
from ratp.training.phase import Tick

_ERRORS: Mapping[str, type[RatpError]] = {kind.__name__: kind for kind in (RunDirectoryError, TrainingError, RatpError)}
_EVENTS: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (Waiting, StageStarted, Streamed, Probed, StageFinished)
}


class OtherPlanError(Exception):
    """The request resolves to a different plan in the other process, which therefore cannot execute the run."""


def work_of(run: Run, device: torch.device | None) -> dict[str, Any]:
    """Describes what another process needs to execute the same run, and to verify that it is the same."""
    return {
        **described(run.plan if device is None else replace(run.plan, device=device)),
        "fingerprint": run.config["fingerprint"],
        "folder": os.fspath(run.folder),
        "options": options_of(run),
    }


def described(plan: RunPlan) -> dict[str, Any]:
    """A plan as plain data, for another process to resolve."""
    request = plan.request
    if request is None:
        raise OtherPlanError
    values = as_dict(plan.recipe) | as_dict(plan.config)
    asked = {item.name: getattr(request, item.name) for item in fields(request)}
    asked |= {
        "changes": {name: values[name] for name in request.changes},  # texts and numbers, as in config.json
        "device": str(plan.device),
        "data": {
            "folder": None if plan.data.folder is None else os.fspath(plan.data.folder),
            "on_bad": plan.data.on_bad,
            "extra_classes": plan.data.extra_classes,
        },
        "weights": plan.weights_from,  # auto may be something else there
        "precision": plan.precision,
        "guard": plan.guard,
    }
    return {"request": asked, "same": _identity(plan)}


def options_of(run: Run) -> dict[str, Any]:
    """Options of a run that change no result."""
    return asdict(run.options) | {"after": None if run.after is None else os.fspath(run.after)}


def planned(work: Mapping[str, Any]) -> RunPlan:
    """Resolves a plan that another process described."""
    asked = dict(work["request"])
    data = asked.pop("data")
    folder = None if data["folder"] is None else Path(data["folder"])
    plan = resolve(RunRequest(**asked, data=DataOptions(folder, data["on_bad"], data["extra_classes"])))
    if _identity(plan) != work["same"]:
        raise OtherPlanError
    return plan


def same_run(work: Mapping[str, Any], *, wait: bool = False) -> Run:
    """Builds the requested run, or raises OtherPlanError if it would be another one."""
    try:
        plan = planned(work)
    except ConfigError as error:
        raise OtherPlanError from error
    run = Run(plan, work["folder"], **work["options"], wait=wait)
    if run.config["fingerprint"] != work["fingerprint"]:
        raise OtherPlanError
    return run


def _identity(plan: RunPlan) -> list[str]:
    """Returns what plans with the same result have in common."""
    return [plan.digest(), str(plan.device), plan.precision, plan.preset]


def encoded_error(error: Exception) -> dict[str, Any]:
    """An error as plain data."""
    if isinstance(error, OtherPlanError):
        return {"other": True}
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "problems": error.problems}
    if isinstance(error, InUseError):
        return {"kind": "InUseError", "message": str(error), "process": error.process}
    if isinstance(error, RatpError):
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "RatpError", "message": unexpected(error)}


def raise_error(answer: Mapping[str, Any]) -> NoReturn:
    """Raises the error that another process sent."""
    if "other" in answer:
        raise OtherPlanError
    if "problems" in answer:
        raise ConfigError(answer["problems"])
    if "process" in answer:
        raise InUseError(answer["message"], answer["process"])
    raise _ERRORS.get(answer["kind"], RatpError)(answer["message"])


def unexpected(error: Exception) -> str:
    """The message for an error that ratp does not raise: its traceback; within a user's file, only its own lines."""
    if own := own_traceback(error):
        return own
    return f"an unexpected error ended the run:\n{''.join(traceback.format_exception(error)).rstrip()}"


@dataclass
class _PhaseElsewhere:
    """The description of a phase in another process."""

    name: str
    epochs: int
    steps: int


def encoded(event: Event) -> dict[str, Any]:
    """An event as plain data."""
    if not isinstance(event, Trained):
        return {"event": type(event).__name__, **asdict(event)}
    tick = event.tick
    return {
        "event": "Trained",
        "stage": event.stage,
        "domain": event.domain,
        "phase": [tick.phase.name, tick.phase.epochs, tick.phase.steps],
        "tick": [tick.epoch, tick.step, tick.made, dict(tick.statistics), tick.epoch_done],
        "means": {name: float(value) for name, value in tick.means.items()},
    }


def decoded(answer: dict[str, Any]) -> Event:
    """Returns the event that plain data describes."""
    kind = answer.pop("event")
    if kind != "Trained":
        return _EVENTS[kind](**answer)
    epoch, step, made, statistics, epoch_done = answer["tick"]
    means = {name: torch.tensor(value) for name, value in answer["means"].items()}
    tick = Tick(_PhaseElsewhere(*answer["phase"]), epoch, step, made, lambda: means, statistics, epoch_done)
    return Trained(answer["stage"], answer["domain"], tick)


def memory_error(run: Run, error: Exception) -> RatpError:
    """An out-of-memory error as one message; it keeps no tensor of the run alive."""
    reason = str(error).partition(". ")[0]
    return RatpError(
        f"the memory of {run.plan.device} ran out ({reason}). Run fewer at once (--jobs). "
        f"The finished stages are kept in {run.folder}."
    )
