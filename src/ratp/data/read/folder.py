"""Lists the images below a folder, follows each link once, and reports everything that cannot be read."""

from __future__ import annotations

import heapq
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ratp.data.decode.pixels import BadImage
from ratp.data.read.listing import (
    FIRST_BYTES,
    MAX_FILE_BYTES,
    FoundFile,
    Listing,
    Unreadable,
    UnreadableFolder,
    is_clutter,
    is_image_name,
    may_be_image,
)
from ratp.errors import RatpError


def list_folder(root: Path) -> Listing:
    """Lists the images below ``root``.

    Each folder is entered once: by its own path if it is below ``root``, else by the first link to it. Links back into
    the tree are therefore not followed.
    """
    try:
        with os.scandir(root):
            pass
    except OSError as error:
        raise RatpError(f"cannot read the folder {root}: {error.strerror or error}.") from error
    walk = _Walk(root)
    walk.enter("")
    while walk.links:
        walk.enter(heapq.heappop(walk.links))
    return Listing(
        tuple(sorted(walk.files)),
        tuple(sorted(walk.ignored)),
        tuple(sorted(walk.unsupported)),
        tuple(sorted(walk.unreadable)),
        walk.read_file,
    )


@dataclass
class _Walk:
    root: Path
    files: list[FoundFile] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    entered: set[tuple[int, int]] = field(default_factory=set)

    def enter(self, name: str) -> None:
        """Lists a folder and the folders in it, leaving links to folders for later."""
        pending = [name]
        while pending:
            folder = pending.pop()
            try:
                if self._is_new(folder):
                    with os.scandir(self.root / folder) as entries:
                        pending += [sub for entry in entries if (sub := self._visit(folder, entry)) is not None]
            except OSError as error:
                reason = f"is a folder that cannot be read: {error.strerror or error}"
                self.unreadable.append(UnreadableFolder(folder, reason))

    def _is_new(self, folder: str) -> bool:
        about = (self.root / folder).stat()
        if (about.st_dev, about.st_ino) in self.entered and about.st_ino:
            self.ignored.append(f"{folder} (leads to a folder that is listed already)")
            return False
        self.entered.add((about.st_dev, about.st_ino))
        return True

    def _visit(self, folder: str, entry: os.DirEntry[str]) -> str | None:
        """Notes a file, or returns the name of a folder to list."""
        if is_clutter(entry.name):
            return None
        name = f"{folder}/{entry.name}" if folder else entry.name
        try:
            if entry.is_dir(follow_symlinks=False):
                return name
            about = entry.stat()
        except FileNotFoundError:
            self.unreadable.append(Unreadable(name, "is a link to nothing" if entry.is_symlink() else "has vanished"))
            return None
        except OSError as error:
            self.unreadable.append(Unreadable(name, f"cannot be read: {error.strerror or error}"))
            return None
        if stat.S_ISDIR(about.st_mode):
            heapq.heappush(self.links, name)
        elif not is_image_name(name):
            self.ignored.append(name)
            if stat.S_ISREG(about.st_mode) and may_be_image(name, lambda: _first_bytes(self.root / name)):
                self.unsupported.append(name)
        elif stat.S_ISREG(about.st_mode):
            self.files.append(FoundFile(name, about.st_size, about.st_mtime_ns))
        else:
            self.unreadable.append(Unreadable(name, "is a pipe or a device, not a file"))
        return None

    def read_file(self, name: str) -> bytes:
        """Returns the bytes of a file below the folder."""
        return read_file(self.root / name)


def _first_bytes(path: Path) -> bytes:
    """Returns the first bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(FIRST_BYTES)
    except OSError:
        return b""


def read_file(path: Path) -> bytes:
    """Reads a file, up to the size limit."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                raise BadImage(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror or error}") from error
