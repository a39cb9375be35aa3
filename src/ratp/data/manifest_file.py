"""A manifest as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratp.data.listing import Unreadable
from ratp.data.manifest import FileRecord, Manifest
from ratp.errors import RatpError
from ratp.files import read_json, write_json
from ratp.schema import MANIFEST


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest.

    Raises:
        RunDirectoryError: If the file cannot be written.
    """
    write_json(path, manifest_to_json(manifest))


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        RatpError: If the file is missing or holds no manifest.
    """
    data = MANIFEST.read(read_json(path), path)
    try:
        return manifest_from_json(data)
    except RatpError as error:
        raise RatpError(f"{path}: {error}") from error


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON, a list a column, since there may be very many files."""
    ways = list(dict.fromkeys(file.conversions for file in manifest.files))
    way_index = {way: k for k, way in enumerate(ways)}
    class_index = {name: k for k, name in enumerate(manifest.classes or ())}
    return {
        **MANIFEST.mark,
        "name": manifest.name,
        "classes": manifest.classes,
        "conversions": ways,
        "unreadable": manifest.unreadable,
        "ignored": manifest.ignored,
        "ignored_count": manifest.ignored_count,
        "errors": {str(k): file.error for k, file in enumerate(manifest.files) if file.error is not None},
        "files": {
            "name": [file.name for file in manifest.files],
            "class": [None if file.class_name is None else class_index[file.class_name] for file in manifest.files],
            "sha256": [file.sha256 for file in manifest.files],
            "height": [file.height for file in manifest.files],
            "width": [file.width for file in manifest.files],
            "conversions": [way_index[file.conversions] for file in manifest.files],
        },
    }


def manifest_from_json(data: Mapping[str, Any]) -> Manifest:
    """The manifest that :func:`manifest_to_json` described, in the present form.

    Raises:
        RatpError: If it is anything else.
    """
    try:
        ways = [tuple(way) for way in data["conversions"]]
        classes = None if data["classes"] is None else tuple(data["classes"])
        columns = data["files"]
        class_names = [None if k is None else (classes or ())[k] for k in columns["class"]]
        errors: list[str | None] = [None] * len(class_names)
        for k, reason in data["errors"].items():
            errors[int(k)] = reason
        files = tuple(
            map(
                FileRecord._make,
                zip(
                    columns["name"],
                    class_names,
                    columns["sha256"],
                    columns["height"],
                    columns["width"],
                    [ways[k] for k in columns["conversions"]],
                    errors,
                    strict=True,
                ),
            )
        )
        unreadable = tuple(Unreadable(name, reason) for name, reason in data["unreadable"])
        return Manifest(data["name"], classes, files, unreadable, tuple(data["ignored"]), int(data["ignored_count"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RatpError(f"this is no manifest, or a damaged one ({error!r}). Check the data again.") from error
