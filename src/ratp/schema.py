"""The forms of the files that are written and read again later, and how older files become like new ones.

A file says of which version its form is; one that does not is of version 1, for the first ones did not. A change that a
reader would misunderstand makes a new version: a step is added here that turns a file of the version before, as plain
data, into one of the new, and run directories of the version before are kept in ``tests/fixtures/runs``. A file of a
version that is not known yet is never guessed at.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratp.errors import RunDirectoryError
from ratp.version import __version__

Step = Callable[[dict[str, Any]], dict[str, Any]]


class NewerFileError(RunDirectoryError):
    """A file was written by a later version of this package."""


@dataclass(frozen=True)
class Form:
    """What a kind of file looks like.

    Attributes:
        steps: For every version but the last, what turns its data into the next one's.
        key: Under which name a file says its version.
    """

    steps: tuple[Step, ...] = ()
    key: str = "schema"

    @property
    def version(self) -> int:
        """The present version."""
        return 1 + len(self.steps)

    @property
    def mark(self) -> dict[str, int]:
        """How a file says its version."""
        return {self.key: self.version}

    def marked(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Data as they are written: with the present version."""
        return {**self.mark, **data, **self.mark}

    def read(self, data: Mapping[str, Any], place: Path | str) -> dict[str, Any]:
        """Data as this version has them, without the mark, whichever version they were written by.

        Args:
            data: What a file holds.
            place: The file, to be named.

        Raises:
            NewerFileError: If they are of a later version.
            RunDirectoryError: If they are of none.
        """
        version = data.get(self.key, 1)
        if type(version) is not int or version < 1:
            raise RunDirectoryError(f"{place} is damaged: {self.key} {reprlib.repr(version)} is no version of a file.")
        if version > self.version:
            raise NewerFileError(
                f"{place} has {self.key} {version}, and ratp {__version__} reads {self.key} {self.version}: a later "
                "version wrote it. Update ratp: pip install --upgrade ratp"
            )
        found = {name: value for name, value in data.items() if name != self.key}
        for step in self.steps[version - 1 :]:
            found = step(found)
        return found


def _without_hash(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints of version 1 have a hash of their own; since then all files of tensors have one."""
    return {name: value for name, value in checkpoint.items() if name != "hash"}


# A run directory.
CONFIG = Form()
ENVIRONMENT = Form()
MATRIX = Form()
JOURNAL = Form()  # each line
STATE = Form()  # with the matrix and the lines of the journal in it
CHECKPOINT = Form((_without_hash,))
WEIGHTS = Form()
SAMPLES = Form()
FEATURES = Form()
# A run as one file: with all in it but the config, which has a version of its own.
RESULT = Form()
# A study.
STUDY = Form()
FAILURE = Form()
# The cache and the data.
MANIFEST = Form(key="format")
DECODED = Form(key="format")
SOURCE_MODEL = Form()
DRAWN_DOMAIN = Form()
