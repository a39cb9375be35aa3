"""Reads the images of a zip archive in place; nothing is ever extracted.

Members that no normal tool writes are refused before anything is read. They cannot do harm here, but they show that the
archive is malicious or damaged.
"""

from __future__ import annotations

import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from ratp.data.decode.pixels import BadImage
from ratp.data.read.listing import (
    FIRST_BYTES,
    MAX_FILE_BYTES,
    FoundFile,
    Listing,
    is_clutter,
    is_image_name,
    may_be_image,
    quoted,
)
from ratp.errors import RatpError

_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_UTF8 = 0x800
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    IndexError,
)


@dataclass(frozen=True)
class ArchiveLimits:
    """Limits of an archive. The defaults leave room for any data set this package can train on."""

    members: int = 2_000_000
    file_bytes: int = MAX_FILE_BYTES  # uncompressed size of one image
    total_bytes: int = 2**40  # uncompressed size of all images
    ratio: int = 200  # compression ratio above which images count as a bomb if they are large; plain ones pack well
    ratio_from_bytes: int = 32 * 2**20  # uncompressed size of one such image
    ratio_total_bytes: int = 256 * 2**20  # or of all of them together


def list_archive(path: Path, limits: ArchiveLimits | None = None) -> Listing:
    """Lists the images in a zip archive."""
    limits = limits or ArchiveLimits()
    try:
        archive = zipfile.ZipFile(path)
    except PermissionError as error:
        raise RatpError(f"cannot read {path}: {error.strerror}.") from error
    except _DAMAGE as error:
        raise RatpError(
            f"{path} is damaged or not a zip archive ({_short(error)}). Download it or make it again."
        ) from error
    infos = archive.infolist()
    names = [_name(info) for info in infos]
    members = {name: info for name, info in zip(names, infos, strict=True) if name and not info.is_dir()}
    images = {name: info for name, info in members.items() if is_image_name(name)}
    problems = [*_unsafe(infos, names, limits), *_too_much(images, limits)]
    if problems:
        archive.close()
        raise RatpError(
            f"{path} is refused:\n" + "\n".join(f"  {problem}" for problem in problems) + "\nMake the archive again"
            " from a plain folder of images, or unpack it yourself if you trust it, and give the folder."
        )
    files = sorted(FoundFile(name, info.file_size, info.CRC) for name, info in images.items())
    ignored = sorted(name for name in members if name not in images)
    unsupported = (name for name in ignored if may_be_image(name, partial(_first_bytes, archive, members[name])))
    return Listing(tuple(files), tuple(ignored), tuple(unsupported), (), _Reader(archive, images).read)


def _first_bytes(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Returns the first bytes of a member; none if it cannot be read."""
    if info.compress_type not in _PACKED:
        return b""
    try:
        with archive.open(info) as member:
            return member.read(FIRST_BYTES)
    except _DAMAGE:
        return b""


def _name(info: zipfile.ZipInfo) -> str:
    """Returns the name as text, without empty and ``.`` parts; empty for clutter."""
    path, _, name = _text(info).rstrip("/").rpartition("/")
    folder = _folder(path)
    return "" if folder is None or is_clutter(name) else folder + name


@lru_cache(maxsize=10_000)
def _folder(path: str) -> str | None:
    """Returns the path of a folder, without empty and ``.`` parts; None for clutter."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return None if any(is_clutter(part) for part in parts) else "".join(f"{part}/" for part in parts)


def _text(info: zipfile.ZipInfo) -> str:
    """Returns the intended name; many tools write UTF-8 without setting the flag for it."""
    if info.flag_bits & _UTF8 or info.filename.isascii():
        return info.filename
    try:
        return info.filename.encode("cp437").decode()
    except UnicodeError:
        return info.filename


def _unsafe(infos: list[zipfile.ZipInfo], names: list[str], limits: ArchiveLimits) -> Iterator[str]:
    if len(infos) > limits.members:
        yield f"it has {len(infos):,} members, and at most {limits.members:,} are read."
        return
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for info, name in zip(infos, names, strict=True):
        what = _unsafe_name(info.orig_filename) or _unsafe_kind(info) or ("the same name twice" if name in seen else "")
        if what:
            found.setdefault(what, []).append(info.orig_filename)
        elif name and not info.is_dir():
            seen.add(name)
    for what, members in found.items():
        yield f"{len(members):,} member(s) with {what}: {quoted(members)}."


def _unsafe_name(name: str) -> str | None:
    if name.startswith("/"):
        return "an absolute path"
    if "\\" in name:
        return "a backslash in the name"
    if "\0" in name:
        return "a zero byte in the name"
    if ".." in name.split("/"):
        return "'..' in the path"
    if name[1:2] == ":":
        return "a drive letter"
    return None


def _unsafe_kind(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "a link instead of a file"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a device or a pipe instead of a file"
    return None


def _too_much(images: dict[str, zipfile.ZipInfo], limits: ArchiveLimits) -> Iterator[str]:
    locked = [name for name, info in images.items() if info.flag_bits & _ENCRYPTED]
    if locked:
        yield f"{len(locked):,} image(s) are encrypted: {quoted(locked)}."
    foreign = [name for name, info in images.items() if info.compress_type not in _PACKED]
    if foreign:
        yield f"{len(foreign):,} image(s) are packed in a way other than 'store' and 'deflate': {quoted(foreign)}."
    large = [name for name, info in images.items() if info.file_size > limits.file_bytes]
    if large:
        yield f"{len(large):,} image(s) larger than {limits.file_bytes / 2**20:,.0f} MiB: {quoted(large)}."
    tight = {
        name: info.file_size for name, info in images.items() if info.file_size > limits.ratio * info.compress_size
    }
    least = 0 if sum(tight.values()) > limits.ratio_total_bytes else limits.ratio_from_bytes
    bombs = [name for name, size in tight.items() if size >= least]
    if bombs:
        yield f"{len(bombs):,} image(s) packed more than {limits.ratio}:1, as only bombs are: {quoted(bombs)}."
    total = sum(info.file_size for info in images.values())
    if total > limits.total_bytes:
        most = limits.total_bytes / 2**30
        yield f"its images take {total / 2**30:,.1f} GiB unpacked, and at most {most:,.1f} GiB are read."


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


class _Reader:
    """Reads members one at a time; threads may share it."""

    def __init__(self, archive: zipfile.ZipFile, images: dict[str, zipfile.ZipInfo]) -> None:
        self._archive = archive
        self._images = images
        self._lock = threading.Lock()

    def read(self, name: str) -> bytes:
        """Returns the bytes of a member, as many as its entry declares, after checking the declared checksum."""
        info = self._images[name]
        try:
            with self._lock, self._archive.open(info) as member:
                data = member.read(info.file_size)
        except _DAMAGE as error:
            raise BadImage(f"damaged in the archive ({_short(error)})") from error
        if len(data) != info.file_size:
            raise BadImage("damaged in the archive (it ends too early)")
        return data
