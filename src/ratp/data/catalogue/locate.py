"""Finds the domains of a data set: ``FOLDER/DATASET/DOMAIN.zip``, or a folder of the same name.

The data set's own folder may be left out: ``FOLDER/DOMAIN.zip`` is found as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ratp.errors import ConfigError

VARIABLE = "RATP_DATA"
DOWNLOADS = "downloads"  # the folder in the data folder where files from the web are kept; it holds no domains
_DEFAULT = "data"


def data_folder(given: Path | None = None) -> Path:
    """The folder of all data: as given, else ``$RATP_DATA``, else ``data`` here. It need not exist."""
    return given or Path(os.environ.get(VARIABLE) or _DEFAULT).expanduser()


def domain_file(folder: Path, data_set: str, domain: str) -> Path:
    """Where a domain is put by ``ratp data``."""
    return folder / data_set / f"{domain}.zip"


def archives(folder: Path, domain: str) -> list[Path]:
    """Lists the zips of a domain in a folder: ``NAME.zip``, and ``NAME-*.zip`` if it comes in several."""
    return [path for path in (folder / f"{domain}.zip", *sorted(folder.glob(f"{domain}-*.zip"))) if path.exists()]


def find_domain(folder: Path, data_set: str, domain: str) -> Path:
    """Finds the zip or folder of a domain."""
    return find_all(folder, data_set, [domain])[domain]


def find_all(folder: Path, data_set: str, domains: Sequence[str]) -> dict[str, Path]:
    """Finds the zips or folders of several domains, by name."""
    found = {
        name: next((place for place in _places(folder, data_set, name) if place.exists()), None) for name in domains
    }
    missing = [name for name, place in found.items() if place is None]
    if missing:
        places = ", ".join(str(place.relative_to(folder)) for place in _places(folder, data_set, missing[0]))
        one = len(missing) == 1
        raise ConfigError(
            f"domain{'' if one else 's'} {', '.join(missing)} of {data_set} {'is' if one else 'are'} not in {folder}: "
            f"looked for {places}{'' if one else ' and so on'}. Say where the images lie with --data FOLDER or "
            f"{VARIABLE}, or get them: ratp data get {data_set}"
        )
    return {name: place for name, place in found.items() if place is not None}


def _places(folder: Path, data_set: str, domain: str) -> list[Path]:
    """Where a domain may lie."""
    return [parent / name for parent in (folder / data_set, folder) for name in (f"{domain}.zip", domain)]
