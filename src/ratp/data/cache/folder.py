"""Caches generated domains on disk.

The cache is a convenience: a missing, damaged or foreign file is rebuilt, and an unwritable folder stops nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ratp._core.files import DRAWN_DOMAIN, read_tensors, write_tensors
from ratp.errors import RatpError, RunDirectoryError, warn_not_cached

if TYPE_CHECKING:
    from ratp.data.domain import LabelledDomain


def cache_folder() -> Path:
    """Returns ``$RATP_CACHE`` if set, else ``ratp`` in the user's cache folder; it may not exist yet."""
    try:
        chosen = os.environ.get("RATP_CACHE")
        return Path(chosen).expanduser() if chosen else _user_cache() / "ratp"
    except RuntimeError as error:
        raise RatpError(f"no cache folder: {error} Set RATP_CACHE to a folder you may write to.") from error


def _user_cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and Path(xdg).is_absolute():
        return Path(xdg)
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def cached_domain(folder: Path, key: str, build: Callable[[], LabelledDomain]) -> LabelledDomain:
    """Loads the domain stored under ``key``, or builds and stores it; the key must change with the domain."""
    path = folder / f"{key}.safetensors"
    with suppress(RatpError, KeyError, TypeError, ValueError):
        return _load(path, key)
    domain = build()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _store(path, key, domain)
    except (OSError, RunDirectoryError) as error:
        warn_not_cached("drawn images", folder, error)
    return domain


def _store(path: Path, key: str, domain: LabelledDomain) -> None:
    tensors = {"images": domain.images, "labels": domain.labels}
    if domain.held_out is not None:
        tensors["held_out"] = domain.held_out
    about = {"key": key, "name": domain.name, "classes": domain.classes, "fingerprint": domain.fingerprint()}
    write_tensors(path, tensors, DRAWN_DOMAIN.marked(about))


def _load(path: Path, key: str) -> LabelledDomain:
    """Reads what :func:`_store` wrote, and refuses it if the fingerprint is wrong."""
    from ratp.data.domain import LabelledDomain

    tensors, about = read_tensors(path)
    about = DRAWN_DOMAIN.read(about, path)
    domain = LabelledDomain(
        about["name"], tensors["images"], tensors["labels"], tuple(about["classes"]), tensors.get("held_out")
    )
    if about["key"] != key or about["fingerprint"] != domain.fingerprint():
        raise RatpError(f"{path} is damaged: its contents are not what was written.")
    return domain
