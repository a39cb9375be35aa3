"""Files that are passed over although they may be meant as images, and what to say about them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from ratp.data.decode import image_kind
from ratp.data.listing import IMAGE_ENDINGS, BadImage, ending_of

FIRST_BYTES = 16  # of a file: enough to tell an image by
_WITHOUT = "without ending"
_LISTED = 5
# Endings of formats that pictures come in and that are not read: of phones, the web, programs and cameras.
_OTHER_FORMATS = frozenset(
    {".heic", ".heif", ".hif", ".avif", ".jxl", ".jp2", ".j2k", ".jpx", ".jxr", ".svg", ".psd", ".xcf", ".tga", ".dib"}
    | {".pcx", ".pfm", ".exr", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw", ".raw"}
)
_NEARLY = re.compile(rf"({'|'.join(map(re.escape, sorted(IMAGE_ENDINGS)))})[^a-z]")


def may_be_image(name: str, first_bytes: Callable[[], bytes]) -> bool:
    """Whether a file that is no image by its ending may be meant as one.

    It may if it ends like a picture of another format, or like an image with something behind that is no letter
    (``.jpg_large``), or if it has no ending and begins like an image.

    Args:
        name: Its name.
        first_bytes: Gives the first bytes of the file; asked only if its name has no ending.
    """
    if ending := ending_of(name):
        return ending in _OTHER_FORMATS or bool(_NEARLY.match(ending))
    try:
        image_kind(first_bytes())
    except BadImage:
        return False
    return True


def why_passed_over(name: str) -> str:
    """Why such a file is not read, to be put after its name."""
    return f"passed over, as ratp does not read it: {ending_of(name) or _WITHOUT}"


def describe_passed_over(names: Iterable[str]) -> str:
    """How many such files there are, how they end, and what to do."""
    endings = Counter(ending_of(name) or _WITHOUT for name in names)
    which = ", ".join(f"{ending} ({count:,})" for ending, count in endings.most_common(_LISTED))
    more = ", …" if len(endings) > _LISTED else ""
    count = endings.total()
    told = f"{count:,} files are passed over, as ratp does not read them"
    if count == 1:
        told = "1 file is passed over, as ratp does not read it"
    return f"{told}: {which}{more}. Save as .jpg or .png what is meant to be read."
