"""An earlier run that another one goes on from: the same in all that determines it, up to the domains that came since.

Training never looks ahead, and every stage has chance of its own. So a run that begins with what an earlier one left
after its last stage learns what it would have learnt from the start. Only the new domains were not measured meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ratp.errors import ConfigError, RunDirectoryError
from ratp.files import LostFileError, read_json
from ratp.notes import Note
from ratp.record import RunRecord, read_run
from ratp.run_folder import begins_with, show, show_order, unlike, unlike_images, unlike_settings
from ratp.states import BEFORE, LATEST, State, States

_FROM_START = "Without --after, the whole order is trained from the start."


class ContinuedWarning(Note):
    """A run begins with the stages of an earlier one: new domains were not measured in them."""


@final
class EarlierRun:
    """A run that another one is to go on from. It is only ever read.

    Args:
        folder: Its directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def record(self) -> RunRecord:
        """The run as its directory tells it.

        Raises:
            RunDirectoryError: If it is none, or damaged.
        """
        record = read_run(self._folder)
        if not self._folder.is_dir() or not isinstance(record.config.get("fingerprint"), str):
            raise RunDirectoryError(f"{self._folder} is no run directory that a run can go on from. {_FROM_START}")
        return record

    @property
    def mark(self) -> dict[str, Any]:
        """What the config of a run that goes on from it says of it."""
        return {"fingerprint": self.record.config["fingerprint"], "stages": len(self.record.matrix.domains)}

    @property
    def journal(self) -> list[Mapping[str, Any]]:
        """What happened in it, without its end."""
        return [event for event in self.record.journal if event["event"] != "run_finished"]

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuses to be the beginning of a run that would not have begun so.

        Args:
            config: What the ``config.json`` of the run is to hold.

        Raises:
            ConfigError: With a sentence for everything that differs.
            RunDirectoryError: If it is not finished.
        """
        there, matrix, folder = self.record.config, self.record.matrix, self._folder
        problems = []
        asked, known = show_order(config["order"]), show_order(there["order"])
        if asked == known:
            problems.append(f"{folder} has all of {asked}: there is no further domain to train on.")
        elif not begins_with(config["order"], there["order"]):
            problems.append(f"the order asked for, {asked}, does not begin with that of {folder}, {known}.")
        whole = [pair for pair in unlike(there, config) if pair[0] not in ("stream", "order", "after")]
        named = [(f"another {name}", old, new) for name, old, new in whole]
        named += [(f"another value of {name}", old, new) for name, old, new in unlike_settings(there, config)]
        problems += [f"{folder} has {what}: {show(old)} there, {show(new)} asked for." for what, old, new in named]
        if there["method"] == config["method"] and there.get("method_file") != config["method_file"]:
            problems.append(f"the file of the method has been edited since {folder} was made.")
        images = unlike_images(there, config)
        problems += [f"the images of {name} are not those that {folder} has seen." for name in images]
        if config["order"][0] not in images and there.get("classes") != config["classes"]:
            known = ", ".join(map(str, there.get("classes", ())))
            problems.append(f"{folder} has other classes: {known} there, {', '.join(config['classes'])} asked for.")
        if problems:
            raise ConfigError(problems)
        if not matrix.complete:
            raise RunDirectoryError(
                f"{folder} is not finished: {matrix.stages} of {len(matrix.domains)} stages. The command it was "
                "started with finishes it."
            )

    def state(self) -> State:
        """What it had learnt after its last stage.

        Raises:
            RunDirectoryError: If that is lost, or is not this run's.
        """
        try:
            state = States(self._folder, self.record.config["fingerprint"]).latest()
        except LostFileError as error:
            raise RunDirectoryError(f"{error} So no run can go on from it. {_FROM_START}") from error
        if state.matrix.to_json() != self.record.matrix.to_json():  # NaN is not itself
            raise RunDirectoryError(
                f"{self._folder} is not in line with its state. The command it was started with puts that right."
            )
        return state


def begun_after(after: Path, folder: Path) -> dict[str, Any] | None:
    """What a run that has begun says of the one it goes on from; None: it has not begun so.

    Once it has begun, it needs the earlier run no more; but if that is there, it must be the same.

    Args:
        after: Directory of the earlier run.
        folder: That of the run.
    """
    if not any((folder / name).exists() for name in (LATEST, BEFORE)):
        return None
    try:
        begun = read_json(folder / "config.json").get("after")
    except RunDirectoryError:
        return None
    try:
        return EarlierRun(after).mark
    except RunDirectoryError:
        return begun if isinstance(begun, dict) and isinstance(begun.get("stages"), int) else None
