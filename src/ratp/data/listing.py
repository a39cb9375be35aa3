"""What lies in a folder or an archive, before anything is made of its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ratp.errors import RatpError

# Endings of the formats that are decoded, in all their spellings.
IMAGE_ENDINGS = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp", ".mpo", ".webp", ".bmp", ".gif"}
    | {".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"}
)
MAX_FILE_BYTES = 512 * 2**20  # of one image: what a hundred million pixels need in any usual format
_NAMED = 5  # names a message gives
_CLUTTER = frozenset(
    {"__macosx", "thumbs.db", "desktop.ini", "lost+found", "system volume information", "$recycle.bin"}
)


class BadImage(RatpError):  # noqa: N818
    """A file that is not a usable image; the message is the reason, to be put after the file's name."""


class FoundFile(NamedTuple):
    """An image file.

    Attributes:
        name: Relative name with ``/``.
        size: Bytes.
        stamp: What changes with the content: time of the last change in ns, or the archive's checksum.
    """

    name: str
    size: int
    stamp: int


class Unreadable(NamedTuple):
    """Something that could not be looked into.

    Attributes:
        name: Relative name with ``/``.
        reason: Why, in a few words.
    """

    name: str
    reason: str


class UnreadableFolder(Unreadable):
    """A folder that could not be looked into: whatever lies in it is missing."""

    __slots__ = ()


class Listing(NamedTuple):
    """Files of a folder or an archive.

    Attributes:
        files: Images by their ending, sorted by name.
        ignored: Names of other files, and of links to folders that are listed already.
        passed_over: Those of them that may be meant as images.
        unreadable: Folders and links that could not be followed.
        read: From the name of a file to its bytes; raises BadImage.
    """

    files: tuple[FoundFile, ...]
    ignored: tuple[str, ...]
    passed_over: tuple[str, ...]
    unreadable: tuple[Unreadable, ...]
    read: Callable[[str], bytes]


def ending_of(name: str) -> str:
    """How the name of a file ends, from its last dot on and in lower case; empty if it has none."""
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return dot and dot + ending.lower()


def is_image_name(name: str) -> bool:
    """Whether the name ends like that of an image, in any case."""
    return ending_of(name) in IMAGE_ENDINGS


def is_clutter(part: str) -> bool:
    """Whether a file or folder of that name is hidden or left behind by a desktop."""
    return part.startswith(".") or part.lower() in _CLUTTER


def escaped(text: str, encoding: str = "utf-8") -> str:
    """The text with escapes for what an encoding does not have, such as bytes of a file's name that are no Unicode."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def quoted(names: Sequence[str]) -> str:
    """The first names of many, for a message."""
    return ", ".join(repr(name) for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
