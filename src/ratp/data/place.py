"""Where the domains of a data set lie: ``FOLDER/DATASET/DOMAIN.zip``, or a folder of the same name.

The data set's own folder may be left out: ``FOLDER/DOMAIN.zip`` is found as well.
"""

from __future__ import annotations

import os
from pathlib import Path

from ratp.errors import RatpError

VARIABLE = "RATP_DATA"
DOWNLOADS = "downloads"  # the folder in the data folder where files from the web are kept; it holds no domains
_DEFAULT = "data"


def data_folder(given: Path | None = None) -> Path:
    """The folder of all data: as given, else ``$RATP_DATA``, else ``data`` here. It need not exist."""
    return given or Path(os.environ.get(VARIABLE) or _DEFAULT).expanduser()


def domain_file(folder: Path, data_set: str, domain: str) -> Path:
    """Where a domain is put by ``ratp data``."""
    return folder / data_set / f"{domain}.zip"


def find_domain(folder: Path, data_set: str, domain: str) -> Path:
    """The zip or folder of a domain.

    Raises:
        RatpError: If there is none, with the places looked at and what to do.
    """
    places = [parent / name for parent in (folder / data_set, folder) for name in (f"{domain}.zip", domain)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise RatpError(
            f"domain {domain} of {data_set} is not in {folder}: looked for "
            f"{', '.join(str(place.relative_to(folder)) for place in places)}. Say where the images lie with "
            f"--data FOLDER or {VARIABLE}, or get them: ratp data get {data_set}"
        )
    return found
