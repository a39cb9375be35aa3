"""``ratp doctor``: is this machine ready, and what to do if not."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.markup import escape
from rich.table import Table

from ratp.cli.console import print_json, stdout
from ratp.cli.runs import Json
from ratp.data.cache import cache_folder
from ratp.environment import PACKAGES, device_name, package_version
from ratp.version import __version__

LEAST_FREE_DISK = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: What was looked at.
        found: What was found.
        ok: Whether it is as it should be.
        advice: What to do if not.
    """

    what: str
    found: str
    ok: bool = True
    advice: str = ""


def examine() -> list[Finding]:
    """Looks at versions, devices, disk and cache."""
    findings = [Finding("ratp", f"{__version__}, Python {platform.python_version()}, {platform.system()}")]
    for name in PACKAGES:
        version = package_version(name)
        findings.append(Finding(name, version or "missing", bool(version), f"pip install {name}"))
    findings.append(Finding("processor", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
            size = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {bf16}"
            findings.append(Finding(f"cuda:{index}", f"{device_name(torch.device('cuda', index))}, {size}"))
    else:
        findings.append(Finding("gpu", "none; runs use the processor"))
    cache = cache_folder()
    findings.append(_folder("cache", cache, "set RATP_CACHE to a folder you may write to"))
    findings.append(_folder("runs", Path.cwd(), "change to a folder you may write to, or use --out"))
    return findings


def _folder(what: str, folder: Path, advice: str) -> Finding:
    """Whether a folder can be written to and has room."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(what, f"{folder}: {error.strerror}", ok=False, advice=advice)
    enough = free >= LEAST_FREE_DISK
    return Finding(what, f"{folder}: {free / 2**30:.1f} GiB free", enough, "make room: at least 1 GiB should be free")


def doctor(json_: Json = False) -> None:
    """Check versions, devices, disk and cache, and say what to do about each finding."""
    findings = examine()
    if json_:
        print_json({"findings": [asdict(f) for f in findings], "ok": all(f.ok for f in findings)})
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for f in findings:
            advice = "" if f.ok else f"  [yellow]→ {escape(f.advice)}[/]"
            mark = "[green]✓[/]" if f.ok else "[red]✗[/]"
            table.add_row(mark, f"[bold]{f.what}[/]", escape(f.found) + advice)
        stdout().print(table)
    if not all(f.ok for f in findings):
        raise typer.Exit(1)
