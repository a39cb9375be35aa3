"""Domains kept on disk, so that what took work to make is made once.

The cache is a convenience: a file that is missing, damaged or not ours is made anew, and a folder that cannot
be written is no reason to stop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ratp.domain import LabelledDomain
from ratp.errors import RatpError, RunDirectoryError
from ratp.files import read_tensors, write_tensors
from ratp.notes import note_not_kept
from ratp.schema import DRAWN_DOMAIN


def cache_folder() -> Path:
    """``$RATP_CACHE`` if set, else ``ratp`` in the user's cache folder; it need not exist.

    Raises:
        RatpError: If the user has no home folder to look in.
    """
    try:
        chosen = os.environ.get("RATP_CACHE")
        return Path(chosen).expanduser() if chosen else _user_cache() / "ratp"
    except RuntimeError as error:
        raise RatpError(f"no cache folder: {error} Set RATP_CACHE to a folder you may write to.") from error


def _user_cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and Path(xdg).is_absolute():
        return Path(xdg)
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local)
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def cached_domain(folder: Path, key: str, build: Callable[[], LabelledDomain]) -> LabelledDomain:
    """The domain stored under ``key``, or the one ``build`` makes, stored for the next time.

    Args:
        folder: Where the file lies; made if need be.
        key: Name of the file without its ending. It must change with whatever changes the domain.
        build: Makes the domain.
    """
    path = folder / f"{key}.safetensors"
    with suppress(RatpError, KeyError, TypeError, ValueError):
        return _load(path, key)
    domain = build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _store(path, key, domain)
    except (OSError, RunDirectoryError) as error:
        note_not_kept("drawn images", folder, error)
    return domain


def _store(path: Path, key: str, domain: LabelledDomain) -> None:
    tensors = {"images": domain.images, "labels": domain.labels}
    if domain.held_out is not None:
        tensors["held_out"] = domain.held_out
    about = {"key": key, "name": domain.name, "classes": domain.classes, "fingerprint": domain.fingerprint()}
    write_tensors(path, tensors, DRAWN_DOMAIN.marked(about))


def _load(path: Path, key: str) -> LabelledDomain:
    """Reads what :func:`_store` wrote, and believes it only if the fingerprint is right.

    Raises:
        RatpError, KeyError, TypeError, ValueError: If it is anything else.
    """
    tensors, about = read_tensors(path)
    about = DRAWN_DOMAIN.read(about, path)
    domain = LabelledDomain(
        about["name"], tensors["images"], tensors["labels"], tuple(about["classes"]), tensors.get("held_out")
    )
    if about["key"] != key or about["fingerprint"] != domain.fingerprint():
        raise RatpError(f"{path} does not hold what it was written with.")
    return domain
