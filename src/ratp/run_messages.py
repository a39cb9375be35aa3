"""What processes tell one another of runs: what to make, what happens and what went wrong, all as plain data.

A plan holds functions that cannot be sent, so it is described by its request, which the other process resolves again;
if that gives another plan there, no run is made.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from ratp.config import as_dict
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.events import Event, Probed, StageFinished, StageStarted, Trained, Waiting
from ratp.lock import InUseError
from ratp.methods.own import own_traceback
from ratp.phase import Tick
from ratp.plan import RunPlan, resolve
from ratp.request import RunRequest
from ratp.run import Run
from ratp.stream import DataOptions

_ERRORS: Mapping[str, type[RatpError]] = {kind.__name__: kind for kind in (RunDirectoryError, TrainingError, RatpError)}
_EVENTS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in (Waiting, StageStarted, Probed, StageFinished)}


class OtherPlanError(Exception):
    """A plan is not what its request resolves to, so that no other process can make the run."""


def work_of(run: Run, device: torch.device | None) -> dict[str, Any]:
    """All another process needs to make the same run, and to know that it is the same.

    Raises:
        OtherPlanError: If the plan was made by hand.
    """
    return {
        **described(run.plan if device is None else replace(run.plan, device=device)),
        "fingerprint": run.config["fingerprint"],
        "folder": os.fspath(run.folder),
        "options": options_of(run),
    }


def described(plan: RunPlan) -> dict[str, Any]:
    """A plan as another process can be told of it: plain data, to resolve again.

    Raises:
        OtherPlanError: If the plan was made by hand.
    """
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
    """How a run is made, beside its plan; it changes no network."""
    return asdict(run.options) | {"after": None if run.after is None else os.fspath(run.after)}


def planned(work: Mapping[str, Any]) -> RunPlan:
    """The plan that another process describes.

    Raises:
        ConfigError: If it cannot be made here.
        OtherPlanError: If it is another here.
    """
    asked = dict(work["request"])
    data = asked.pop("data")
    folder = None if data["folder"] is None else Path(data["folder"])
    plan = resolve(RunRequest(**asked, data=DataOptions(folder, data["on_bad"], data["extra_classes"])))
    if _identity(plan) != work["same"]:
        raise OtherPlanError
    return plan


def same_run(work: Mapping[str, Any], *, wait: bool = False) -> Run:
    """The run asked for.

    Args:
        work: What was sent.
        wait: As for :class:`ratp.run.Run`.

    Raises:
        OtherPlanError: If it is another than in the process that asks.
    """
    try:
        plan = planned(work)
    except ConfigError as error:
        raise OtherPlanError from error
    run = Run(plan, work["folder"], **work["options"], wait=wait)
    if run.config["fingerprint"] != work["fingerprint"]:
        raise OtherPlanError
    return run


def _identity(plan: RunPlan) -> list[str]:
    """What two plans of one result have in common."""
    return [plan.digest(), str(plan.device), plan.precision, plan.preset]


def told(error: Exception) -> dict[str, Any]:
    """An error as another process can be told of it."""
    if isinstance(error, OtherPlanError):
        return {"other": True}
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "problems": error.problems}
    if isinstance(error, InUseError):
        return {"kind": "InUseError", "message": str(error), "process": error.process}
    if isinstance(error, RatpError):
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "RatpError", "message": unexpected(error)}


def fail(answer: Mapping[str, Any]) -> NoReturn:
    """Raises what a process reports."""
    if "other" in answer:
        raise OtherPlanError
    if "problems" in answer:
        raise ConfigError(answer["problems"])
    if "process" in answer:
        raise InUseError(answer["message"], answer["process"])
    raise _ERRORS.get(answer["kind"], RatpError)(answer["message"])


def unexpected(error: Exception) -> str:
    """What to say of an error that ratp does not raise: all that is known of it; of one in a user's file, its lines."""
    if own := own_traceback(error):
        return own
    return f"an unexpected error ended the run:\n{''.join(traceback.format_exception(error)).rstrip()}"


@dataclass
class _PhaseElsewhere:
    """What is known of a phase in another process."""

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
    """The event that plain data describe."""
    kind = answer.pop("event")
    if kind != "Trained":
        return _EVENTS[kind](**answer)
    epoch, step, made, statistics, epoch_done = answer["tick"]
    means = {name: torch.tensor(value) for name, value in answer["means"].items()}
    tick = Tick(_PhaseElsewhere(*answer["phase"]), epoch, step, made, lambda: means, statistics, epoch_done)
    return Trained(answer["stage"], answer["domain"], tick)
