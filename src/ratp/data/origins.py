"""Whether a domain is the published data, or else what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ratp.data.formats.canonical import origin
from ratp.data.manifest import Manifest

# Copies in circulation that are not the published data, by the hash of their files.
KNOWN_COPIES: Mapping[str, str] = {
    "dd4705ae995524d653d8f39f039b72afa3b84ea132bbed4fd5811c5f196f1936": (
        "regenerated SYN: rendered after the published recipe with about 700 fonts, harder than the original"
    ),
}


def origin_of(path: Path, manifest: Manifest) -> str | None:
    """What a domain is if it is known not to be the published data: rebuilt, or a copy known by its hash."""
    return KNOWN_COPIES.get(manifest.hash) or origin(path)
