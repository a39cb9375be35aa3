"""Domains of the published data sets on their way into the data folder: from the web, or from files of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Literal, NamedTuple

from ratp.data.catalogue import DataSet, data_set
from ratp.data.catalogue.download import PATIENCE, Opener, Patience, download, open_web
from ratp.data.catalogue.import_ import import_domain
from ratp.data.catalogue.locate import DOWNLOADS, archives, domain_file
from ratp.data.formats.canonical import ImportReport, OnBadImage, free_path
from ratp.data.formats.frames import DIGITS_FIVE, FrameName
from ratp.data.formats.layouts import Place, domain_folders, plain
from ratp.data.formats.recognition import read_list, recognised
from ratp.errors import RatpError


class Step(NamedTuple):
    """A step of a download or import: the file downloaded or domain imported, and the unit that is counted."""

    what: str
    unit: Literal["bytes", "images"]


StepProgress = Callable[[Step, int, int | None], None]


def fetch_domain(
    data: str,
    domain: str,
    folder: Path,
    progress: StepProgress | None = None,
    *,
    opener: Opener = open_web,
    patience: Patience = PATIENCE,
    at_most: int | None = None,
    frame: FrameName = DIGITS_FIVE,
    on_bad_image: OnBadImage = "stop",
    replace: bool = False,
) -> ImportReport:
    """Downloads a domain of the catalogue and imports it to ``folder/DATA/DOMAIN.zip``.

    Downloads stay in ``folder/downloads/DATA``; the user may remove them afterwards. For a domain without a reliable
    address, the error says how to get it.
    """
    chosen = data_set(data)
    source = chosen.domain(domain)
    if not source.files:
        raise RatpError(f"{domain} of {data} has no address it can be downloaded from.\n{source.manual}")
    free_path(folder / data, domain, replace=replace)
    files = [
        download(
            file.urls,
            folder / DOWNLOADS / data / file.name,
            file.sha256,
            _of_step(progress, Step(file.name, "bytes")),
            opener,
            size=file.size,
            manual=source.manual,
            patience=patience,
        )
        for file in source.chosen()
    ]
    report = import_published(
        data,
        domain,
        files,
        folder,
        progress,
        at_most=at_most,
        frame=frame,
        on_bad_image=on_bad_image,
        replace=replace,
        expected=source.images(),
    )
    notes = [f"{domain}: {source.terms}."] if source.terms else []
    return changed(report, notes=(*report.notes, *notes))


def import_published(
    data: str,
    domain: str,
    inputs: Sequence[Path],
    folder: Path,
    progress: StepProgress | None = None,
    *,
    at_most: int | None = None,
    frame: FrameName = DIGITS_FIVE,
    on_bad_image: OnBadImage = "stop",
    replace: bool = False,
    expected: int | None = None,
) -> ImportReport:
    """Imports a domain of the catalogue to ``folder/DATA/DOMAIN.zip`` from files that the user has.

    ``at_most`` is the number of images to keep: by default as many as the benchmark uses; 0 keeps all.
    """
    chosen = data_set(data)
    source = chosen.domain(domain)
    at_most = chosen.most if at_most is None else at_most or None
    report = import_domain(
        domain,
        inputs,
        domain_file(folder, data, domain).parent,
        _of_step(progress, Step(domain, "images")),
        classes=chosen.classes if chosen.is_selection else None,
        at_most=at_most,
        frame=source.frame if frame == DIGITS_FIVE else None,
        on_bad_image=on_bad_image,
        replace=replace,
        expected=expected,
    )
    published = source.published or source.images()
    if published in (None, report.total) or at_most == report.total:
        return report
    note = f"{domain} has {report.total:,} images; it was published with {published:,}."
    return changed(report, notes=(*report.notes, note))


def _of_step(progress: StepProgress | None, step: Step) -> Callable[[int, int | None], None] | None:
    return None if progress is None else lambda done, total: progress(step, done, total)


def domains_in(data: str, inputs: Sequence[Path]) -> Mapping[str, Sequence[Path]]:
    """Sorts inputs by the domain of a data set they belong to.

    A domain is a folder of class folders with its name, anywhere in a folder or zip, or a zip with its name, or files
    with the names they have in a collection of all domains. Lists of labels belong to the domain whose folder their
    names begin with.
    """
    chosen = data_set(data)
    found: dict[str, list[Path]] = {name: [] for name in chosen.domains}
    others: set[str] = set()
    rest: list[Path] = []
    for given in inputs:
        pairs = _collected(chosen, given)
        rest += [] if pairs else _unfolded(chosen, given)
        for name, path in pairs:
            found[name].append(path)
    for path in rest:
        names = _names(chosen, path)
        others |= names - found.keys()
        for name in names & found.keys():
            found[name].append(path)
    known = {name: paths for name, paths in found.items() if _has_images(paths)}
    if not known:
        collected = f", or files called {', '.join(files)}" if (files := _collection(chosen)) else ""
        seen = f"; found {', '.join(sorted(others)[:10])}" if others else ""
        raise RatpError(
            f"{', '.join(map(str, inputs))}: nothing of {data} is there. Expected folders or zips called "
            f"{', '.join(chosen.domains)}, with one folder per class{collected}{seen}."
        )
    return known


def _collection(chosen: DataSet) -> dict[str, str]:
    """The domains by what their files are called in a collection of all of them."""
    return {name: source.name for source in chosen.domains.values() for name in source.collected}


def _collected(chosen: DataSet, path: Path) -> list[tuple[str, Path]]:
    """The files in a folder, or the file itself, that are called as in a collection, each once and with its domain."""
    found: dict[str, Path] = {}
    for file in sorted(path.rglob("*.mat")) if path.is_dir() else [path]:
        found.setdefault(file.name, file)
    return [(domain, found[name]) for name, domain in _collection(chosen).items() if name in found]


def _unfolded(chosen: DataSet, path: Path) -> list[Path]:
    """Returns the path or, for a folder with archives of domains, those and the lists next to them."""
    if not path.is_dir():
        return [path]
    parts = [part for name in chosen.domains for part in (*archives(path, name), *sorted(path.glob(f"{name}_*.txt")))]
    zips = [part for part in parts if part.is_file()]
    return [*zips, path] if not zips or any(entry.is_dir() for entry in path.iterdir()) else zips


def _names(chosen: DataSet, path: Path) -> set[str]:
    kind, _ = recognised(path)[0]
    if kind == "list":
        first, _ = read_list(path).entries[0]
        return {plain(first.parts[-3])} if len(first.parts) > 2 else set()
    if kind not in ("folder", "zip"):
        example = next(iter(chosen.domains))
        raise RatpError(
            f"{path} does not say which domain of {chosen.name} it is. Import one domain at a time, e.g. "
            f"ratp data import {chosen.name}/{example} {path.name}"
        )
    place = Place.at(path)
    at_root = {plain(path.stem if kind == "zip" else path.resolve().name)} if place.files else set()
    return set(domain_folders(place)) or at_root


def _has_images(paths: Sequence[Path]) -> bool:
    return any(path.suffix != ".txt" for path in paths)
