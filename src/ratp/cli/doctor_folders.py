"""The part of ``ratp doctor`` that looks at folders: the disk, the data, the cache, and the runs that are here."""

from __future__ import annotations

import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratp.cli.data_progress import size_text
from ratp.cli.findings import Finding, some
from ratp.data.cache import cache_folder
from ratp.data.decoded_cache import cache_entries, damaged_entries
from ratp.data.manifest import check_domain
from ratp.data.place import VARIABLE, data_folder, find_domain
from ratp.data.sources import data_set
from ratp.data.tree import open_tree
from ratp.errors import RatpError
from ratp.files import is_leftover, is_whole, read_json
from ratp.lock import LOCK_FILE, is_held
from ratp.record import RunRecord, read_run
from ratp.schema import STUDY
from ratp.streams import STREAMS
from ratp.study import ABOUT
from ratp.study_file import usual_folder

LEAST_FREE_DISK = 1 << 30
DATA_SETS = ("digits", "pacs", "domainnet")
_RUNS, _MOST_RUNS = ("*", "runs/*", "runs/*/*", "runs/studies/*/*"), 1000
_HARMLESS = "nothing to do: the next run of the folder clears it away"


def disk(what: str, folder: Path, advice: str, *, needed: bool = True) -> Finding:
    """Whether a folder can be written to and has room; where it is needed, nothing works without."""
    try:
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(what, f"{folder}: {error.strerror}", ok=False, advice=advice, blocks=needed)
    enough = free >= LEAST_FREE_DISK
    room = "make room: at least 1 GiB should be free"
    return Finding(what, f"{folder}: {size_text(free)} free", enough, room, blocks=needed and not enough)


def data(*, thorough: bool) -> Iterator[Finding]:
    """Which domains of the benchmarks are here, and whether they are whole."""
    folder = data_folder()
    named = f"${VARIABLE}" if folder != Path("data") else f"${VARIABLE} is not set"
    if not folder.is_dir():
        found = f"{folder} ({named}) is no folder; the demo and images of your own need none"
        yield Finding("data", found, ok=False, advice=f"ratp data get digits, or set {VARIABLE}")
        return
    yield Finding("data", f"{folder} ({named})")
    for name in DATA_SETS:
        yield from _data_set(folder, name, thorough=thorough)


def _data_set(folder: Path, name: str, *, thorough: bool) -> Iterator[Finding]:
    found: dict[str, Path] = {}
    missing = []
    for domain in data_set(name).domains:
        try:
            found[domain] = find_domain(folder, name, domain)
        except RatpError:
            missing.append(domain)
    looked = [finding for domain, path in found.items() if (finding := _looked_at(name, domain, path, thorough))]
    yield from looked
    if missing:
        here = f"{len(found)} of {len(found) + len(missing)} domains; missing: {', '.join(missing)}"
        yield Finding(name, here, ok=not found, advice=f"ratp data get {name}")
    elif all(finding.ok for finding in looked):
        yield Finding(name, f"all {len(found)} domains" + (", every image checked" if thorough else ""))


def _looked_at(name: str, domain: str, path: Path, thorough: bool) -> Finding | None:
    """What there is to say of a domain. Without being thorough, only how its file ends is read."""
    what = f"{name}/{domain}"
    anew = f"move it away, then ratp data get {what}, or put it back from a copy"
    if not thorough:
        whole = path.is_dir() or zipfile.is_zipfile(path)
        return None if whole else Finding(what, f"{path} is damaged: it is no whole zip", ok=False, advice=anew)
    try:
        manifest = check_domain(open_tree(path))
    except RatpError as error:
        return Finding(what, str(error).splitlines()[0], ok=False, advice=anew)
    if manifest.bad:
        found = f"{len(manifest.bad):,} of {len(manifest.files):,} images cannot be used"
        return Finding(what, found, ok=False, advice=f"ratp data check {shlex.quote(str(path))} names them")
    source = data_set(name).domain(domain)
    published = source.published or source.images()
    if published not in (None, len(manifest.usable)):
        return Finding(what, f"{len(manifest.usable):,} images, where {published:,} were published: a part, or rebuilt")
    return None


def cache(*, thorough: bool) -> Iterator[Finding]:
    """What is kept for the next time, and whether it is whole."""
    folder = cache_folder()
    entries, damaged = cache_entries(folder), damaged_entries(folder)
    total = size_text(sum(entry.bytes for entry in entries))
    found = f"{len(entries)} domains decoded, {total}"
    if damaged:
        found += f"; {len(damaged)} damaged or left half-written, {size_text(sum(e.bytes for e in damaged))}"
    yield Finding("decoded", found, not damaged, "ratp data cache --clear (images are decoded again when needed)")
    networks = folder / "source-models"
    try:
        files = sorted(networks.iterdir())
    except OSError:
        files = []
    kept = [path for path in files if path.suffix == ".safetensors" and not is_leftover(path)]
    useless = [path for path in files if is_leftover(path)] + [p for p in kept if thorough and not is_whole(p)]
    found = f"{len(kept)} source networks kept, {size_text(sum(path.stat().st_size for path in kept))}"
    if useless:
        found += f"; {len(useless)} damaged or left half-written"
    advice = f"rm {shlex.join(str(path) for path in useless[:3])}"
    yield Finding("networks", found, not useless, advice + (" …" if len(useless) > 3 else ""))


def runs(here: Path) -> Iterator[Finding]:
    """What became of the runs below a folder."""
    found = (path.parent for pattern in _RUNS for path in here.glob(f"{pattern}/config.json"))
    places = sorted(set(found))[:_MOST_RUNS]
    finished, running, killed, leftovers = 0, 0, [], []
    for place in places:
        leftovers += [item for item in place.iterdir() if is_leftover(item)]
        if is_held(place):
            running += 1
            continue
        if _text(place / LOCK_FILE):
            killed.append(place.name)
        try:
            record = read_run(place)
        except RatpError as error:
            advice = f"put it back from a copy, or remove {shlex.quote(str(place.relative_to(here)))}"
            yield Finding("run", str(error).splitlines()[0], ok=False, advice=advice)
            continue
        if record.matrix.complete and (place / "weights.safetensors").exists():
            finished += 1
            continue
        stages = f"{record.matrix.stages} of {len(record.matrix.domains)} stages done"
        yield Finding("unfinished", f"{place.relative_to(here)}: {stages}", ok=False, advice=_continued(record, here))
    if places:
        yield Finding("runs", f"{len(places)} here: {finished} finished, {running} running")
    if killed:
        yield Finding("locks", f"left by processes that were killed: {some(killed)}", ok=False, advice=_HARMLESS)
    if leftovers:
        yield Finding("leftovers", f"{len(leftovers)} half-written files in runs", ok=False, advice=_HARMLESS)


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _study_command(about: Path, here: Path) -> str:
    """The command that continues a study, from the file in its folder that says which it is."""
    folder = about.parent
    try:
        name = str(STUDY.read(read_json(about), about)["study"])
    except (RatpError, KeyError):
        name = folder.name
    words = ["ratp", "study", "run", f"{name}.toml"]
    if folder != here / usual_folder(name):
        words += ["--out", str(folder.relative_to(here))]
    return f"{shlex.join(words)} (the study it belongs to)"


def _continued(record: RunRecord, here: Path) -> str:
    """The command that continues a run."""
    config, place = record.config, record.path
    study = place.parent / ABOUT
    if study.exists():
        return _study_command(study, here)
    if record.config["stream"] not in STREAMS or config.get("method_file"):
        return f"the command it was started with, and --out {shlex.quote(str(place.relative_to(here)))}"
    words = ["ratp", "run", config["stream"], "-m", record.method, "--seed", str(record.seed)]
    spec = STREAMS[config["stream"]]
    if tuple(config["order"]) != spec.orders["default"]:
        words += ["--order", ">".join(map(str, config["order"]))]
    words += ["--subset"] if len(config["order"]) < len(spec.domains) else []
    words += ["--guard", str(config["guard"])] if "guard" in config else []
    words += ["--preset", config["preset"]] if config["preset"] != "official" else []
    words += [word for name, value in config["changed"].items() for word in ("--set", f"{name}={_plain(value)}")]
    backbone = config.get("recipe", {}).get("network.backbone", "dtn")
    words += ["--weights", "none"] if backbone != "dtn" and config.get("weights") is None else []
    command = shlex.join([*words, "--out", str(place.relative_to(here))])
    weights = str(config.get("weights_name"))
    further = [f"--weights with the {weights} it had"] if weights.endswith(".safetensors") else []
    further += ["--after with the run it goes on from"] if record.is_continued else []
    return f"{command} (and {', '.join(further)})" if further else command


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
