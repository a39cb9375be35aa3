"""The files of a folder or an archive, before their layout is interpreted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ratp.data.decode.decode import image_kind
from ratp.data.decode.pixels import BadImage

# Endings of the formats that are decoded, in all their spellings.
IMAGE_ENDINGS = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp", ".mpo", ".webp", ".bmp", ".gif"}
    | {".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"}
)
MAX_FILE_BYTES = 512 * 2**20  # of one image: what a hundred million pixels need in any usual format
_NAMED = 5  # the most names that a message lists
_CLUTTER = frozenset(
    {"__macosx", "thumbs.db", "desktop.ini", "lost+found", "system volume information", "$recycle.bin"}
)
FIRST_BYTES = 16  # of a file: enough to recognise an image
_WITHOUT = "without ending"
# Endings of image formats that are not supported: of phones, the web, programs and cameras.
_OTHER_FORMATS = frozenset(
    {".heic", ".heif", ".hif", ".avif", ".jxl", ".jp2", ".j2k", ".jpx", ".jxr", ".svg", ".psd", ".xcf", ".tga", ".dib"}
    | {".pcx", ".pfm", ".exr", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw", ".raw"}
)
_NEARLY = re.compile(rf"({'|'.join(map(re.escape, sorted(IMAGE_ENDINGS)))})[^a-z]")


class FoundFile(NamedTuple):
    """An image file; ``stamp`` changes with its content: its time of change in ns, or the checksum in the archive."""

    name: str
    size: int
    stamp: int


class Unreadable(NamedTuple):
    """Something that could not be read, and the reason in a few words."""

    name: str
    reason: str


class UnreadableFolder(Unreadable):
    """A folder that could not be read: everything in it is missing."""

    __slots__ = ()


class Listing(NamedTuple):
    """Files of a folder or an archive."""

    files: tuple[FoundFile, ...]  # images by their ending, sorted by name
    ignored: tuple[str, ...]  # names of other files, and of links to folders that are listed already
    unsupported: tuple[str, ...]  # those among the ignored files that may be images
    unreadable: tuple[Unreadable, ...]  # folders and links that could not be followed
    read: Callable[[str], bytes]  # from the name of a file to its bytes; raises BadImage


def ending_of(name: str) -> str:
    """Returns the ending of a file name in lower case, with its dot; empty if it has none."""
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return dot and dot + ending.lower()


def is_image_name(name: str) -> bool:
    """Whether the name ends like that of an image, in any case."""
    return ending_of(name) in IMAGE_ENDINGS


def is_clutter(part: str) -> bool:
    """Whether a file or folder is hidden or was left by a desktop environment."""
    return part.startswith(".") or part.lower() in _CLUTTER


def escaped(text: str, encoding: str = "utf-8") -> str:
    """Escapes what an encoding cannot represent, such as bytes of a file name that are not Unicode."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def quoted(names: Sequence[str]) -> str:
    """Formats the first few names for a message."""
    return ", ".join(repr(name) for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def may_be_image(name: str, first_bytes: Callable[[], bytes]) -> bool:
    """Whether a file without a supported ending looks like an image.

    That is the case for endings of other formats, for an image ending followed by something other than a letter
    (``.jpg_large``), and for files without an ending that begin like an image.
    """
    if ending := ending_of(name):
        return ending in _OTHER_FORMATS or bool(_NEARLY.match(ending))
    try:
        image_kind(first_bytes())
    except BadImage:
        return False
    return True


def why_unsupported(name: str) -> str:
    """Returns the reason to put after the name of an unsupported file."""
    return f"unsupported format: {ending_of(name) or _WITHOUT}"


def describe_unsupported(names: Iterable[str]) -> str:
    """Counts unsupported files by their endings and says what to do."""
    endings = Counter(ending_of(name) or _WITHOUT for name in names)
    which = ", ".join(f"{ending} ({count:,})" for ending, count in endings.most_common(_NAMED))
    more = ", …" if len(endings) > _NAMED else ""
    files = f"{endings.total():,} file{'s' if endings.total() > 1 else ''}"
    return f"{files} skipped, unsupported format: {which}{more}. Convert them to .jpg or .png to use them."
