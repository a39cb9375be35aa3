"""Whether a folder can be a run's directory: it is new, or holds that run, and never anything else."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratp.errors import RunDirectoryError
from ratp.files import UnreadableFileError, is_leftover, read_json
from ratp.guard import ACT
from ratp.lock import LOCK_FILE
from ratp.plan import RunPlan
from ratp.record import fingerprint_of
from ratp.schema import CONFIG, NewerFileError

START_ANEW = "Remove the folder to start anew, or choose another with --out."
_MAKE_READABLE = "Make it readable, or choose another folder with --out."


def with_advice(error: RunDirectoryError, otherwise: str = START_ANEW) -> RunDirectoryError:
    """An error about a file, with what to do about it: one that cannot be read may be whole.

    Args:
        error: What is wrong with it.
        otherwise: What to do if it is lost or damaged.
    """
    return RunDirectoryError(f"{error} {_MAKE_READABLE if isinstance(error, UnreadableFileError) else otherwise}")


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses a folder that is not this run's, before anything is written to it.

    Args:
        folder: The folder; made if it does not exist.
        config: What the run's ``config.json`` is to hold.

    Raises:
        RunDirectoryError: If it is not.
    """
    if not prepare_folder(folder):
        return
    try:
        there = CONFIG.read(read_json(folder / "config.json"), folder / "config.json")
    except NewerFileError:
        raise
    except RunDirectoryError as error:
        raise with_advice(error) from error
    if "fingerprint" not in there or "method" not in there:
        raise RunDirectoryError(
            f"{folder} holds a config.json that ratp did not write. Choose another folder with --out."
        )
    if there.get("fingerprint") != config["fingerprint"] and not _was_mended(folder, there, config):
        told = f"{folder} holds another run. {_differences(there, config)}"
        raise RunDirectoryError(f"{told} {_advice(folder, there, config)}")


def _was_mended(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether nothing but the file of its method differs from a run that left nothing to go on with: it begins anew."""
    if None in (there.get("method_file"), here["method_file"]):
        return False
    if fingerprint_of({**there, "method_file": here["method_file"]}) != here["fingerprint"]:
        return False
    kept = [path for name in ("state", "checkpoint", "weights") for path in folder.glob(f"{name}*.safetensors")]
    try:
        return not kept and read_json(folder / "matrix.json").get("accuracy") == []
    except RunDirectoryError:
        return False


def as_begun(plan: RunPlan, folder: Path) -> RunPlan:
    """The plan with the guard that the run in a folder began with, unless one was asked for.

    The guard acts on own images since there is one: runs that began before it go on without.
    """
    if plan.guard != ACT or plan.request is None or plan.request.guard != "auto":
        return plan
    try:
        there = read_json(folder / "config.json")
    except RunDirectoryError:
        return plan
    return plan if "guard" in there else replace(plan, guard="record")


def prepare_folder(folder: Path) -> bool:
    """Makes a folder if it does not exist, and refuses one that no run can have; returns whether it holds a run.

    Raises:
        RunDirectoryError: If it cannot be used, or holds other files and no run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = files_in(folder)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot use {folder} as a run directory: {error.strerror}. Choose another folder with --out."
        ) from error
    if present and "config.json" not in present:
        raise RunDirectoryError(
            f"{holds_others(folder, present)} and no run. Choose an empty or new folder with --out."
        )
    return bool(present)


def files_in(folder: Path) -> set[str]:
    """Names of what lies in a folder, but for what every run leaves; none if there is no such folder.

    Raises:
        OSError: If it cannot be read.
    """
    try:
        return {item.name for item in folder.iterdir() if not is_leftover(item)} - {LOCK_FILE}
    except FileNotFoundError:
        return set()


def holds_others(folder: Path, names: Collection[str]) -> str:
    """That a folder holds other files, some of them by name: the beginning of a sentence."""
    return f"{folder} holds other files ({', '.join(sorted(names)[:3])})"


def _advice(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What to do about another run in a folder."""
    if here.get("after") is None and there.get("after") is not None:
        return "It goes on from an earlier run: name that with --after, or choose another folder with --out."
    same = not [pair for pair in (*unlike(there, here), *unlike_settings(there, here)) if pair[0] != "order"]
    if same and begins_with(here["order"], there.get("order")):
        return (
            "The order asked for only goes further: choose another folder with --out, and begin there with what this "
            f"run has learnt with --after {shlex.quote(str(folder))}."
        )
    return "Choose another folder with --out."


def begins_with(order: Sequence[str], other: object) -> bool:
    """Whether an order has another one at its beginning, and goes further."""
    return isinstance(other, list) and len(other) < len(order) and list(order[: len(other)]) == other


def unlike(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What two configurations disagree about, but for settings and images: name and both values, in words."""
    pairs = [(key, there.get(key), here.get(key)) for key in ("stream", "order", "method", "seed", "weights", "guard")]
    pairs.append(("after", _shortened(there.get("after")), _shortened(here.get("after"))))
    return [(key, _in_words(key, old), _in_words(key, new)) for key, old, new in pairs if old != new]


def unlike_settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The sizes and switches of one method that two configurations disagree about: name and both values."""
    found: list[tuple[str, Any, Any]] = []
    if there.get("method") == here["method"]:
        for key in ("recipe", "switches"):
            old = there.get(key)
            known = old if isinstance(old, dict) else {}
            found += [(name, known.get(name), here[key].get(name)) for name in dict.fromkeys((*here[key], *known))]
    return [pair for pair in found if pair[1] != pair[2]]


def unlike_images(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Domains of both configurations whose images are not the same."""
    data = there.get("data")
    return [n for n, value in here["data"].items() if isinstance(data, dict) and data.get(n, value) != value]


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What two configurations disagree about, in a sentence or two."""
    others, settings = unlike(there, here), unlike_settings(there, here)
    parts = [f"{name}: {show(old)} there, {show(new)} asked for" for name, old, new in (*others, *settings)]
    if parts:
        told = f"It differs in {'; '.join(parts)}."
        can_go_on = not others and all(old is not None for _, old, _ in settings)
        return f"{told} To go on with it: {_as_options(settings)}." if can_go_on else told
    if there.get("method_file") != here["method_file"]:
        return "The file of its method has been edited since."
    changed = unlike_images(there, here)
    return "Its images have changed since" + (f": those of {', '.join(changed)}." if changed else ".")


def _as_options(settings: Sequence[tuple[str, Any, Any]]) -> str:
    """What to add to a command so that it asks for the old values, which may have been the usual ones then."""
    values = ((name, ",".join(map(str, old)) if isinstance(old, list) else old) for name, old, _ in settings)
    return " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in values)


def show(value: Any) -> str:
    """A value of a configuration in a sentence."""
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


# What it means that a configuration says nothing of something.
_UNSAID = {"weights": "random numbers", "guard": "off or record", "after": "the start"}


def _in_words(key: str, value: Any) -> str:
    """A value of what :func:`unlike` compares, in a sentence."""
    if value is None:
        return _UNSAID.get(key, "none")
    return show_order(value) if key == "order" and isinstance(value, list) else show(value)


def show_order(order: Sequence[str]) -> str:
    """An order of domains in a sentence."""
    return ">".join(map(str, order))


def _shortened(after: Any) -> str | None:
    """The run that another one goes on from, in a sentence; None: it begins at the start."""
    return f"run {str(after.get('fingerprint'))[:12]}" if isinstance(after, dict) else None
