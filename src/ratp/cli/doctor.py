"""``ratp doctor``: checks the machine, the disk, data, cache and runs, and says how to fix what is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.markup import escape
from rich.table import Table

from ratp import __version__
from ratp._core.environment import Precision, code_hash, device_name, find_precision, package_version
from ratp._core.files import STUDY, is_leftover, is_whole, read_json
from ratp._core.locks import LOCK_FILE, is_held
from ratp.cli.console import print_json, say, size_text, stdout
from ratp.cli.options import Json
from ratp.data.cache.folder import cache_folder
from ratp.data.cache.manifest import check_domain
from ratp.data.cache.store import cache_entries, damaged_entries
from ratp.data.catalogue import data_set
from ratp.data.catalogue.locate import VARIABLE, data_folder, find_domain
from ratp.data.decode.pixel_file import free_memory
from ratp.data.read.tree import open_tree
from ratp.errors import RatpError
from ratp.runs.record import RunRecord, read_run
from ratp.streams import STREAMS
from ratp.studies.study import ABOUT, usual_folder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    ``blocks`` means that nothing runs until it is fixed, ``absent`` that something optional is not there.
    """

    what: str
    found: str
    ok: bool = True
    advice: str = ""
    blocks: bool = False
    absent: bool = False


LEAST_FREE_MEMORY = 1 << 30
QUICKLY_READ = 1 << 31  # bytes; more are only read if thorough
_SOURCE = Path(__file__).parents[3]
_DRIVER = Path("/proc/driver/nvidia/version")
_NEEDED = re.compile(r"([A-Za-z0-9_.-]+)>=([\d.]+)$")


def machine() -> Iterator[Finding]:
    """Checks versions, processor, memory and GPUs."""
    import torch

    python = f"Python {platform.python_version()}, {platform.system()}"
    yield Finding("ratp", f"{__version__} (code {code_hash()[:12]}), {python}")
    yield from versions(requirements())
    found = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads, {_precisions(torch.device('cpu'))}"
    yield Finding("processor", found)
    free = free_memory()
    advice = "close other programs, or run fewer at once: --jobs 1"
    yield Finding("memory", f"{size_text(free)} free", free >= LEAST_FREE_MEMORY, advice)
    driver = _driver()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield _gpu(torch.device("cuda", index), driver)
    if torch.backends.mps.is_available():
        yield Finding("mps", f"{device_name(torch.device('mps'))}; runs use it only with --device mps")
    elif not torch.cuda.is_available() and driver is None:
        yield Finding("gpu", "none; runs use the processor")
    elif not torch.cuda.is_available():
        found = f"driver {driver} is installed, but torch {torch.__version__} finds no GPU"
        yield Finding("gpu", found, ok=False, advice="install a CUDA build of torch: https://pytorch.org")


def requirements() -> list[str]:
    """Lists what ratp needs, as installed or, in a source tree that is not installed, as pyproject.toml declares it."""
    try:
        return importlib.metadata.requires("ratp-cdsl") or []
    except importlib.metadata.PackageNotFoundError:
        declared = tomllib.loads((_SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = declared["optional-dependencies"]
    marked = [f'{need}; extra == "{extra}"' for extra, needs in extras.items() for need in needs]
    return [*declared["dependencies"], *marked]


def versions(needs: list[str]) -> Iterator[Finding]:
    """Checks requirements such as ``torch>=2.10``; lists extras without requiring them."""
    good = []
    for name, least in (match.groups() for need in needs if (match := _NEEDED.match(need))):
        version = package_version(name)
        if version is None:
            yield Finding(name, "missing", ok=False, advice=f"pip install '{name}>={least}'", blocks=True)
        elif _numbers(version) < _numbers(least):
            found = f"{version}, too old: {least} is needed"
            yield Finding(name, found, ok=False, advice=f"pip install --upgrade '{name}>={least}'", blocks=True)
        else:
            good.append(f"{name} {version}")
    if good:
        yield Finding("packages", ", ".join(good))
    for_users = (need for need in needs if "extra ==" in need and not need.endswith(('"dev"', '"docs"')))
    extras = [need.partition(";")[0].strip() for need in for_users]
    if extras:
        there = [f"{name} {version}" for name in extras if (version := package_version(name))]
        lacking = [name for name in extras if not package_version(name)]
        missing = f"; not installed: {', '.join(lacking)}" * bool(lacking)
        yield Finding("optional", f"{', '.join(there) or 'none'}{missing}")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    return tuple(int(part) for part in re.match(r"\d*(\.\d+)*", version)[0].split(".") if part)  # type: ignore[index]


def _precisions(device: torch.device) -> str:
    return "/".join(dict.fromkeys(find_precision(asked, device) for asked in get_args(Precision)))


def _gpu(device: torch.device, driver: str | None) -> Finding:
    import torch

    from ratp.functional import kernels

    name = f"cuda:{device.index}"
    try:
        free, total = torch.cuda.mem_get_info(device)
        parts = [
            device_name(device),
            f"driver {driver}" if driver else "",
            f"{size_text(free)} of {size_text(total)} free",
            _precisions(device),
            "CUDA graphs" if _captures(device) else "no CUDA graphs: slower",
            "kernels" if kernels.usable(device) else "no Triton kernels: slower",
        ]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return Finding(name, reason, ok=False, advice="use another with --device, or update the driver")
    return Finding(name, ", ".join(part for part in parts if part))


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph can be recorded and replayed."""
    import torch

    try:
        with torch.cuda.device(device):
            value = torch.zeros(1, device=device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value += 1
            graph.replay()
            return float(value) == 1.0
    except RuntimeError:
        return False


def _driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else "of an unknown version"


LEAST_FREE_DISK = 1 << 30
DATA_SETS = ("digits", "pacs", "domainnet")
_RUNS, _MOST_RUNS = ("*", "runs/*", "runs/*/*", "runs/studies/*/*"), 1000
_CLEARED = "nothing: the next run in the folder clears it"


def disk(what: str, folder: Path, advice: str, *, needed: bool = True) -> Finding:
    """Checks that a folder is writable and has room; a problem blocks if the folder is needed."""
    try:
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(what, f"{folder}: {error.strerror}", ok=False, advice=advice, blocks=needed)
    enough = free >= LEAST_FREE_DISK
    room = "free some space: at least 1 GiB"
    return Finding(what, f"{folder}: {size_text(free)} free", enough, room, blocks=needed and not enough)


def data(*, thorough: bool) -> Iterator[Finding]:
    """Checks which domains of the benchmarks are present and intact."""
    folder = data_folder()
    named = f"${VARIABLE}" if folder != Path("data") else f"${VARIABLE} is not set"
    if not folder.is_dir():
        given = VARIABLE in os.environ
        found = f"{folder} ({named}) is not a folder" if given else "no images of benchmarks; nothing else needs them"
        advice = f"ratp data get digits, or set {VARIABLE}"
        yield Finding("data", found, ok=False, advice=advice, absent=not given)
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
    findings = [finding for domain, path in found.items() if (finding := _domain(name, domain, path, thorough))]
    yield from findings
    if missing:
        here = f"{len(found)} of {len(found) + len(missing)} domains; missing: {', '.join(missing)}"
        yield Finding(name, here, ok=not found, advice=f"ratp data get {name}", absent=not found)
    elif all(finding.ok for finding in findings):
        yield Finding(name, f"all {len(found)} domains" + (", every image checked" if thorough else ""))


def _domain(name: str, domain: str, path: Path, thorough: bool) -> Finding | None:
    """Checks a domain: all its images if thorough, else only that its zip is complete; None if all is well."""
    what = f"{name}/{domain}"
    restore = f"move it away and run ratp data get {what}, or restore it from a copy"
    if not thorough:
        whole = path.is_dir() or zipfile.is_zipfile(path)
        return None if whole else Finding(what, f"{path} is damaged: not a complete zip", ok=False, advice=restore)
    try:
        manifest = check_domain(open_tree(path))
    except RatpError as error:
        return Finding(what, str(error).splitlines()[0], ok=False, advice=restore)
    if manifest.bad:
        found = f"{len(manifest.bad):,} of {len(manifest.files):,} images cannot be used"
        return Finding(what, found, ok=False, advice=f"ratp data check {shlex.quote(str(path))} names them")
    source = data_set(name).domain(domain)
    published = source.published or source.images()
    if published not in (None, len(manifest.usable)):
        return Finding(what, f"{len(manifest.usable):,} of {published:,} published images: incomplete, or rebuilt")
    return None


def cache(*, thorough: bool) -> Iterator[Finding]:
    """Checks the cached images and source networks."""
    folder = cache_folder()
    entries = cache_entries(folder)
    total = sum(entry.bytes for entry in entries)
    pixels = thorough or total <= QUICKLY_READ
    damaged = damaged_entries(folder, pixels=pixels)
    found = f"{len(entries)} domains decoded, {size_text(total)}" + (", every byte checked" if pixels else "")
    if damaged:
        found += f"; {len(damaged)} damaged or incomplete, {size_text(sum(e.bytes for e in damaged))}"
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
        found += f"; {len(useless)} damaged or incomplete"
    advice = f"rm {shlex.join(str(path) for path in useless[:3])}"
    yield Finding("networks", found, not useless, advice + (" …" if len(useless) > 3 else ""))


def runs(here: Path) -> Iterator[Finding]:
    """Checks the runs below a folder."""
    found = (path.parent for pattern in _RUNS for path in here.glob(f"{pattern}/config.json"))
    places = sorted(set(found))[:_MOST_RUNS]
    finished, running, killed, leftovers = 0, 0, [], []
    for place in places:
        leftovers += [item for item in place.iterdir() if is_leftover(item)]
        if is_held(place):
            running += 1
            continue
        with suppress(OSError):
            if (place / LOCK_FILE).stat().st_size:
                killed.append(place.name)
        try:
            record = read_run(place)
        except RatpError as error:
            advice = f"restore it from a copy, or remove {shlex.quote(str(place.relative_to(here)))}"
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
        more = f" and {len(killed) - 3} more" if len(killed) > 3 else ""
        yield Finding("locks", f"left by killed processes: {', '.join(killed[:3])}{more}", ok=False, advice=_CLEARED)
    if leftovers:
        yield Finding("leftovers", f"{len(leftovers)} incomplete files in runs", ok=False, advice=_CLEARED)


def _continued(record: RunRecord, here: Path) -> str:
    """The command that continues a run."""
    config, place = record.config, record.path
    folder, about = place.parent, place.parent / ABOUT
    if about.exists():
        name = folder.name
        with suppress(RatpError, KeyError):
            name = str(STUDY.read(read_json(about), about)["study"])
        elsewhere = folder != here / usual_folder(name)
        out = ["--out", str(folder.relative_to(here))] if elsewhere else []
        return f"{shlex.join(['ratp', 'study', 'run', f'{name}.toml', *out])} (its study)"
    if record.config["stream"] not in STREAMS or config.get("method_file"):
        return f"the original command with --out {shlex.quote(str(place.relative_to(here)))}"
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
    further = [f"--weights with its {weights}"] if weights.endswith(".safetensors") else []
    further += ["--after with the run it continues"] if record.is_continued else []
    return f"{command} (and {', '.join(further)})" if further else command


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def examine(*, thorough: bool = False) -> Iterator[Finding]:
    """Runs all checks; thorough ones read every image and cached network, which takes long."""
    here = Path.cwd()
    yield from machine()
    yield disk("cache", cache_folder(), "set RATP_CACHE to a folder you may write to", needed=False)
    yield from cache(thorough=thorough)
    yield disk("folder", here, "change to a folder you may write to, or use --out")
    yield from data(thorough=thorough)
    yield from runs(here)


def doctor(
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also decode every benchmark image and read every cached network.")
    ] = False,
    json_: Json = False,
) -> None:
    """Check versions, devices, memory, disk, data, cache and runs, and say how to fix what is wrong.

    The exit code is 1 if something keeps ratp from working.
    """
    findings = list(examine(thorough=thorough))
    blocked = any(finding.blocks and not finding.ok for finding in findings)
    if json_:
        listed = [asdict(f) | {"advice": "" if f.ok else f.advice} for f in findings]
        print_json({"findings": listed, "ok": not blocked})
    else:
        _print(findings)
    if blocked:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        wrong = "[red]✗[/]" if finding.blocks else "[yellow]![/]"
        mark = "[dim]–[/]" if finding.absent else "[green]✓[/]" if finding.ok else wrong
        colour = "dim" if finding.absent else "yellow"
        advice = "" if finding.ok else f"\n[{colour}]→ {escape(finding.advice)}[/]"
        table.add_row(mark, escape(finding.what), escape(finding.found) + advice)
    stdout().print(table)
    bad = [finding for finding in findings if not (finding.ok or finding.absent)]
    blocking = sum(finding.blocks for finding in bad)
    verdict = f"{blocking} of them must be fixed first." if blocking else "None keeps ratp from working."
    well = "All is well. ratp demo shows what ratp does."
    say(f"{len(bad)} of {len(findings)} need attention. {verdict}" if bad else well)
