"""Continuing a finished run with domains that came later.

Training never looks ahead, and every stage has its own random generators. So a run that starts from the last state
of an earlier one learns what it would have learnt from scratch; only the new domains were not measured meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ratp._core.files import LostFileError, read_json
from ratp.errors import ConfigError, Note, RunDirectoryError
from ratp.runs.differences import (
    differing_choices,
    differing_images,
    differing_settings,
    is_start_of,
    show_order,
)
from ratp.runs.plan import NO_WEIGHTS, PUBLISHED, RunPlan
from ratp.runs.record import RunRecord, read_run
from ratp.runs.request import RunRequest
from ratp.runs.states import BEFORE, LATEST, State, States
from ratp.streams.folders import EarlierDomains

# The event with what was requested besides the config: paths, which only this machine knows.
REQUESTED = "requested"
_FROM_START = "Without --after, the whole order is trained from the start."


def requested(plan: RunPlan) -> dict[str, Any]:
    """Returns what a later run needs to continue this one without being told again."""
    own_method = plan.request.method if plan.request else ""
    is_file = plan.weights_from not in (NO_WEIGHTS, PUBLISHED)
    return {
        "domains": {code: _absolute(plan.spec.domains[code]) for code in plan.order},
        "unlabelled": sorted(plan.spec.unlabelled),
        "method": plan.method.name if plan.is_built_in else _absolute(own_method),
        "weights": _absolute(plan.weights_from) if is_file else plan.weights_from,
        "guard": plan.request.guard if plan.request else "auto",
        "on_bad": plan.data.on_bad,
        "extra_classes": plan.data.extra_classes,
    }


def inherited(request: RunRequest, after: Path) -> RunRequest:
    """Returns a request with the stream and all settings of the run that it continues; given changes stay."""
    earlier = EarlierRun(after)
    record = earlier.record
    config = record.config
    events = [event for event in record.journal if event["event"] == REQUESTED]
    if not events:
        raise RunDirectoryError(
            f"{after} does not say where its images are: they are not your own, or an earlier version of ratp made it. "
            "Give its stream, with all domains so far, and its settings again."
        )
    told = events[-1]
    order = [str(name) for name in config["order"]]
    domains = EarlierDomains(
        stream=str(config["stream"]),
        paths={name: told["domains"][name] for name in order},
        unlabelled=tuple(told["unlabelled"]),
        classes=tuple(config["classes"]),
        hashes=dict(config["data"]),
        size=int(config["recipe"]["size"]),
    )
    return replace(
        request,
        stream=domains.stream,
        earlier=domains,
        method=told["method"],
        preset=config["preset"],
        seed=config["seed"],
        changes={**config["recipe"], **config["switches"], **request.changes},
        weights=told["weights"],
        guard=told["guard"],
        data=replace(request.data, on_bad=told["on_bad"], extra_classes=told["extra_classes"]),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


class ContinuedWarning(Note):
    """A run starts from the stages of an earlier one, in which the new domains were not measured."""


@final
class EarlierRun:
    """The run in ``folder`` that another one continues. It is only ever read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def record(self) -> RunRecord:
        """The run as read from its directory."""
        record = read_run(self._folder)
        if not self._folder.is_dir() or not isinstance(record.config.get("fingerprint"), str):
            raise RunDirectoryError(f"{self._folder} is not a run directory that a run can continue. {_FROM_START}")
        return record

    @property
    def mark(self) -> dict[str, Any]:
        """The entry ``after`` in the config of a run that continues this one."""
        return {"fingerprint": self.record.config["fingerprint"], "stages": len(self.record.matrix.domains)}

    @property
    def journal(self) -> list[Mapping[str, Any]]:
        """The events but for what it wrote at its end."""
        return [
            event for event in self.record.journal if event["event"] not in ("predicted", "run_finished", REQUESTED)
        ]

    def check(self, config: Mapping[str, Any]) -> None:
        """Checks that the run with this config would have begun like this one."""
        there, matrix, folder = self.record.config, self.record.matrix, self._folder
        problems = []
        requested, known = show_order(config["order"]), show_order(there["order"])
        if requested == known:
            problems.append(f"{folder} has all of {requested}: there is no further domain to train on.")
        elif not is_start_of(there["order"], config["order"]):
            problems.append(f"the requested order, {requested}, does not begin with that of {folder}, {known}.")
        # the state holds the adopted network, which is therefore not needed again
        same = ["stream", "order", "adopted", "after"]
        same += ["guard"] if config["order"][0] in config.get("gone", ()) else []
        choices = [item for item in differing_choices(there, config) if item.name not in same]
        problems += [f"{folder} has another {item.name}: {item}." for item in choices]
        settings = differing_settings(there, config)
        problems += [f"{folder} has another value of {item.name}: {item}." for item in settings]
        if there["method"] == config["method"] and there.get("method_file") != config["method_file"]:
            problems.append(f"the file of the method has been edited since {folder} was made.")
        images = differing_images(there, config)
        problems += [f"the images of {name} are not those that {folder} was trained on." for name in images]
        if config["order"][0] not in images and there.get("classes") != config["classes"]:
            known = ", ".join(map(str, there.get("classes", ())))
            problems.append(f"{folder} has other classes: {known} there, {', '.join(config['classes'])} requested.")
        if problems:
            raise ConfigError(problems)
        if not matrix.complete:
            raise RunDirectoryError(
                f"{folder} is not finished: {matrix.stages} of {len(matrix.domains)} stages. Finish it with the "
                "command that started it."
            )

    def state(self) -> State:
        """Reads the state after the last stage."""
        try:
            state = States(self._folder, self.record.config["fingerprint"]).latest()
        except LostFileError as error:
            raise RunDirectoryError(f"{error} So no run can continue it. {_FROM_START}") from error
        if state.matrix.to_json() != self.record.matrix.to_json():  # as JSON, because NaN differs from itself
            raise RunDirectoryError(
                f"the matrix of {self._folder} does not match its state. The command that started it repairs that."
            )
        return state


def started_after(after: Path, folder: Path) -> dict[str, Any] | None:
    """Returns the entry ``after`` of a run that has started from an earlier one; None if it has not started.

    A run that has started no longer needs the earlier one; but if that is there, it must be the same.
    """
    if not any((folder / name).exists() for name in (LATEST, BEFORE)):
        return None
    try:
        started = read_json(folder / "config.json").get("after")
    except RunDirectoryError:
        return None
    try:
        return EarlierRun(after).mark
    except RunDirectoryError:
        return started if isinstance(started, dict) and isinstance(started.get("stages"), int) else None
