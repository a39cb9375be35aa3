"""The directory of a deployment: numbered versions of a model, one of which answers.

```
deployment.json        the list of versions, which one answers, and the settings; replaced in one step
run/                   what the model is built from: config, environment and first state of its run
versions/N.safetensors state of the method and references of the alarm, for every version
known/NAME.safetensors images of a known domain; those of the source have labels
journal.jsonl          windows, alarms and decisions, one per line
```

``deployment.json`` decides: a version exists once it is listed there, and until then the one before answers. A writer
that is killed leaves at most a file that nothing refers to.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ratp._core.files import (
    DEPLOYMENT,
    make_folder,
    read_json,
    read_tensors,
    remove_leftovers,
    safe_name,
    write_json,
    write_tensors,
    writing,
)
from ratp._core.locks import exclusive
from ratp.deploy.drift import Reference
from ratp.errors import ConfigError, RatpError, RunDirectoryError
from ratp.training.method import pack, unpack

# Versions that were adapted online and are kept; there may be many, and each is as large as the model.
KEPT_ONLINE = 10
_RUN_FILES = "config.json", "environment.json", "state.safetensors"


@dataclass(frozen=True)
class Version:
    """One version of the model.

    Attributes:
        number: Its number, from 1.
        why: How it came about.
        made: When, in local time.
        images: Number of images it was adapted to.
        verdict: What the guard said of the adaptation; None for the first version.
        known: Names of the domains it knows, for the alarm.
        online: Whether it was adapted window by window.
    """

    number: int
    why: str
    made: str
    images: int = 0
    verdict: Mapping[str, Any] | None = None
    known: tuple[str, ...] = ()
    online: bool = False


@dataclass(frozen=True)
class Contents:
    """What ``deployment.json`` holds.

    Attributes:
        current: Number of the version that answers.
        versions: All versions, oldest first.
        classes: Names of the classes.
        settings: How the deployment adapts, as plain data.
    """

    current: int
    versions: tuple[Version, ...]
    classes: tuple[str, ...]
    settings: Mapping[str, Any]

    def version(self, number: int) -> Version:
        """Returns a version by its number."""
        for version in self.versions:
            if version.number == number:
                return version
        valid = ", ".join(str(version.number) for version in self.versions)
        raise ConfigError(f"there is no version {number}. Valid: {valid}.")


class Store:
    """Reads and writes the directory of a deployment, as its only writer until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        read_contents(folder)
        self.folder = folder
        self._held = ExitStack()
        self._held.enter_context(exclusive(folder, "Only one process at a time can use a deployment: end it first."))
        try:
            remove_leftovers(folder)
            self.contents = read_contents(folder)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, run: Path, folder: Path, classes: Sequence[str], settings: Mapping[str, Any]) -> Store:
        """Starts a directory with what the model is built from; it has no version yet."""
        if folder.exists() and any(folder.iterdir()):
            raise RunDirectoryError(f"{folder} is not empty: choose a new folder for the deployment.")
        make_folder(folder)
        with writing(folder):
            for part in ("run", "versions", "known"):
                (folder / part).mkdir(exist_ok=True)
            for name in _RUN_FILES:
                if (run / name).exists():
                    shutil.copyfile(run / name, folder / "run" / name)
        write_json(
            folder / "deployment.json",
            DEPLOYMENT.marked({"current": 0, "versions": [], "classes": list(classes), "settings": dict(settings)}),
        )
        return cls(folder)

    def close(self) -> None:
        """Lets another process open the deployment."""
        self._held.close()

    def add(self, tensors: Mapping[str, Tensor], references: Sequence[Reference], why: str, **about: Any) -> Version:
        """Writes a version and makes it the one that answers."""
        number = 1 + max((version.number for version in self.contents.versions), default=0)
        known = tuple(reference.name for reference in references)
        version = Version(number, why, _now(), known=known, **about)
        parts = {f"known{k}": reference.tensors() for k, reference in enumerate(references)}
        written = {"known": [reference.to_json() for reference in references], "number": number}
        write_tensors(self._path(number), pack({"state": tensors, **parts}), DEPLOYMENT.marked(written))
        versions = (*self.contents.versions, version)
        surplus = [item.number for item in versions if item.online][:-KEPT_ONLINE]
        versions = tuple(item for item in versions if item.number not in surplus)
        self._write(replace(self.contents, current=number, versions=versions))
        for old in surplus:
            self._path(old).unlink(missing_ok=True)
        self.note("version", number=number, why=why, images=version.images)
        return version

    def read(self, number: int) -> tuple[dict[str, Tensor], list[Reference]]:
        """Reads the state of the method and the references of a version."""
        path = self._path(self.contents.version(number).number)
        tensors, about = read_tensors(path)
        parts = unpack(tensors)
        try:
            written = DEPLOYMENT.read(about, path)["known"]
            known = [Reference.load(item, parts[f"known{k}"]) for k, item in enumerate(written)]
            return parts["state"], known
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error!r}. Roll back to another version.") from error

    def choose(self, number: int, why: str) -> Version:
        """Makes an earlier version the one that answers."""
        version = self.contents.version(number)
        self._write(replace(self.contents, current=number))
        self.note("rollback", number=number, why=why)
        return version

    def keep_images(self, name: str, images: Tensor, **about: Tensor) -> None:
        """Writes images of a known domain, with their ``labels``, or the ``answers`` that the model gave."""
        write_tensors(self._known(name), {"images": images, **about}, DEPLOYMENT.marked({"name": name}))

    def images(self, name: str) -> dict[str, Tensor]:
        """Reads images of a known domain, and their labels if it has them."""
        return read_tensors(self._known(name))[0]

    def note(self, event: str, **values: Any) -> None:
        """Appends a line to the journal."""
        line = json.dumps({"time": _now(), "event": event, **values}, ensure_ascii=False)
        path = self.folder / "journal.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _path(self, number: int) -> Path:
        return _version_file(self.folder, number)

    def _known(self, name: str) -> Path:
        return _known_file(self.folder, name)

    def _write(self, contents: Contents) -> None:
        data = {
            "current": contents.current,
            "versions": [asdict(version) for version in contents.versions],
            "classes": list(contents.classes),
            "settings": dict(contents.settings),
        }
        write_json(self.folder / "deployment.json", DEPLOYMENT.marked(data))
        self.contents = contents


def is_deployment(folder: Path) -> bool:
    """Whether a folder is a deployment."""
    return (folder / "deployment.json").is_file()


def read_contents(folder: Path) -> Contents:
    """Reads what ``deployment.json`` holds; every file is replaced in one step, so readers need no lock."""
    path = folder / "deployment.json"
    if not is_deployment(folder):
        raise RunDirectoryError(f"{folder} is not a deployment: create one with ratp deploy RUN {folder}")
    data = DEPLOYMENT.read(read_json(path), path)
    try:
        versions = tuple(Version(**{**item, "known": tuple(item["known"])}) for item in data["versions"])
        contents = Contents(int(data["current"]), versions, tuple(data["classes"]), dict(data["settings"]))
        if versions:
            contents.version(contents.current)
        return contents
    except (KeyError, TypeError, ValueError, RatpError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}. Restore it from a copy.") from error


def read_current(folder: Path) -> tuple[Version, dict[str, Tensor], dict[str, Tensor]]:
    """Reads the version that answers: about it, the state of its method, and images of the source, if there are any."""
    contents = read_contents(folder)
    version = contents.version(contents.current)
    path = _version_file(folder, version.number)
    state = unpack(read_tensors(path)[0]).get("state")
    if state is None:
        raise RunDirectoryError(f"{path} is damaged. Roll back to another version.")
    return version, state, read_tensors(_known_file(folder, version.known[0]))[0] if version.known else {}


def _version_file(folder: Path, number: int) -> Path:
    return folder / "versions" / f"{number}.safetensors"


def _known_file(folder: Path, name: str) -> Path:
    return folder / "known" / f"{safe_name(name)}.safetensors"


def read_journal(folder: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the lines of a deployment's journal, or only the last ones; a half-written last one is left out."""
    try:
        with (folder / "journal.jsonl").open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0 if last_bytes is None else max(0, length - last_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
