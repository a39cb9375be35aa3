"""``ratp data check`` decodes every image once and names what is wrong; ``ratp data cache`` manages decoded images."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from ratp.cli.console import check_out, interruptible, print_json, say, show_steps, size_text, stdout, write_out
from ratp.cli.options import Data, Json, Quiet
from ratp.data.cache.folder import cache_folder
from ratp.data.cache.manifest import Duplicate, Manifest, check_domain, describe, duplicates_between, manifest_to_json
from ratp.data.cache.store import CacheEntry, cache_entries, evict
from ratp.data.catalogue.fetch import Step
from ratp.data.catalogue.locate import VARIABLE, data_folder
from ratp.data.formats.canonical import origin_of
from ratp.data.read.layout import find_domains
from ratp.data.read.listing import quoted
from ratp.data.read.tree import ImageTree, open_tree, remarks_on
from ratp.errors import ConfigError, RatpError


@dataclass
class Group:
    """Domains to check together: those of a folder, or, without one, those given by themselves."""

    folder: Path | None
    trees: list[ImageTree] = field(default_factory=list)
    broken: list[tuple[Path, str]] = field(default_factory=list)  # domains that cannot be opened, and why
    manifests: list[Manifest] = field(default_factory=list)  # one per tree

    @property
    def is_sound(self) -> bool:
        """Whether every image can be used."""
        return not self.broken and not any(manifest.bad for manifest in self.manifests)

    @property
    def duplicates(self) -> tuple[Duplicate, ...]:
        """Images that are in more than one of the domains."""
        return duplicates_between(self.manifests)


def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Domains, or folders of them; default: the data folder.")
    ] = None,
    data: Data = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode; default: one per core.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the findings on every file to this JSON file.")] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Decode every image once, and report what was found and what is wrong.

    A zip is a domain. So is a folder that holds images, or folders with
    images below them, which are its classes. A folder of domains, up to two
    folders deep, holds zips, or folders that hold folders of the same names
    (FOLDER/DOMAIN/CLASS/IMAGE).

    The exit code is 1 if there is an image or a zip that cannot be used.
    """
    if out is not None:
        check_out(out, "what --json prints" if json_ else "what was found")
    with interruptible("Nothing was written; run the same command again."):
        groups = _groups(paths or [], data_folder(data))
        _decode(groups, workers, quiet=quiet or json_)
        if out is not None:
            manifests = [
                {"path": str(tree.path), **manifest_to_json(manifest)}
                for group in groups
                for tree, manifest in zip(group.trees, group.manifests, strict=True)
            ]
            text = json.dumps({"manifests": manifests}, indent=2, ensure_ascii=False, allow_nan=False)
            write_out(out, f"{text}\n")
    numbers, is_sound = _numbers(groups), all(group.is_sound for group in groups)
    if json_:
        print_json({"sets": list(map(_as_json, groups)), "totals": numbers, "ok": is_sound})
    elif not quiet:
        for group in groups:
            _print(group)
        unusable = f"{numbers['unusable']:,} unusable" if numbers["unusable"] else "none unusable"
        domains = f"{numbers['domains']} domain{'s' if numbers['domains'] != 1 else ''}"
        stdout().print(f"{domains}, {numbers['images']:,} images, {unusable}", markup=False)
        if out is not None:
            say(f"Manifests: {out}")
    if not is_sound:
        raise typer.Exit(1)


def _groups(paths: Sequence[Path], folder: Path) -> list[Group]:
    """The domains to check, each once, by the folder they were found in."""
    if not paths and not folder.exists():
        raise RatpError(
            f"there is no data folder {folder}. Give the paths to check, the data folder with --data FOLDER or "
            f"{VARIABLE}, or get a data set: ratp data get digits"
        )
    groups: dict[Path | None, Group] = {}
    seen, problems = set[Path](), []
    for path in paths or [folder]:
        try:
            found = find_domains(path)
        except RatpError as error:
            problems.append(str(error))
            continue
        for domain in found:
            if domain.resolve() in seen:
                continue
            seen.add(domain.resolve())
            parent = None if domain == path else domain.parent
            group = groups.setdefault(parent, Group(parent))
            try:
                group.trees.append(open_tree(domain))
            except RatpError as error:
                group.broken.append((domain, str(error)))
    if problems:
        raise ConfigError(problems)
    return list(groups.values())


def _decode(groups: Sequence[Group], workers: int | None, *, quiet: bool) -> None:
    total, before = sum(len(tree.files) for group in groups for tree in group.trees), 0
    with show_steps("checking images", quiet=quiet) as show:
        for group in groups:
            for tree in group.trees:

                def progress(done: int, _: int, start: int = before) -> None:
                    if show:
                        show(Step("images", "images"), start + done, total)

                group.manifests.append(check_domain(tree, None, workers, progress))
                before += len(tree.files)


def _print(group: Group) -> None:
    indent = 0
    if group.folder is not None:
        _line(str(group.folder), 0, "bold cyan")
        indent = 2
    for tree, manifest in zip(group.trees, group.manifests, strict=True):
        first, *lines, last = describe(manifest)
        _line(first, indent, "bold")
        made = [made] if (made := origin_of(tree.path, manifest)) else []
        for line in (*made, *lines, *remarks_on(tree), last):
            depth = len(line) - len(line.lstrip())
            _line(line.strip(), indent + 2 + depth, "red" if depth else "")
    for path, reason in group.broken:
        _line(f"{path.name}: cannot be read", indent, "bold")
        for line in reason.splitlines():
            _line(line.strip(), indent + 2, "red")
    if group.duplicates:
        example = [f"{domain}/{name}" for domain, name in group.duplicates[0].places]
        _line(f"images in several domains: {len(group.duplicates):,}, e.g. {quoted(example)}", indent, "yellow")
    stdout().print()


def _line(text: str, indent: int, style: str = "") -> None:
    """Prints a line, broken where it is too long: after commas if that suffices, else between words."""
    console = stdout()
    room = max(20, console.width - indent - 2)
    pieces = re.split("(?<=,) ", text)
    lines = [""]
    for piece in pieces if max(map(cell_len, pieces)) <= room else text.split(" "):
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(piece) > room:
            lines.append("")
        lines[-1] += f" {piece}" if lines[-1] else piece
    for number, line in enumerate(lines):
        console.print(" " * (indent + 2 * bool(number)) + line, style=style or None, markup=False, soft_wrap=True)


def _numbers(groups: Sequence[Group]) -> dict[str, int]:
    manifests = [manifest for group in groups for manifest in group.manifests]
    return {
        "domains": len(manifests),
        "images": sum(len(manifest.usable) for manifest in manifests),
        "unusable": sum(len(manifest.bad) for manifest in manifests) + sum(len(group.broken) for group in groups),
        "duplicates_within": sum(len(group) - 1 for manifest in manifests for group in manifest.duplicates),
        "duplicates_between": sum(len(group.duplicates) for group in groups),
    }


def _as_json(group: Group) -> dict[str, Any]:
    domains = [
        {
            "name": manifest.name,
            "path": str(tree.path),
            "origin": origin_of(tree.path, manifest),
            "images": len(manifest.usable),
            "classes": manifest.counts if manifest.classes is not None else None,
            "height": manifest.heights._asdict(),
            "width": manifest.widths._asdict(),
            "conversions": manifest.conversions,
            "unusable": [{"name": name, "reason": reason} for name, reason in manifest.bad],
            "duplicates": [[file.name for file in same] for same in manifest.duplicates],
            "ignored": manifest.ignored_count,
            "passed_over": list(tree.unsupported),
            "hash": manifest.hash,
        }
        for tree, manifest in zip(group.trees, group.manifests, strict=True)
    ]
    shared = ((found.sha256, [f"{domain}/{name}" for domain, name in found.places]) for found in group.duplicates)
    return {
        "folder": None if group.folder is None else str(group.folder),
        "domains": domains,
        "unreadable": [{"path": str(path), "reason": reason} for path, reason in group.broken],
        "duplicates": [{"sha256": sha256, "places": places} for sha256, places in shared],
    }


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything.")] = False,
    keep: Annotated[
        float | None, typer.Option(metavar="GIB", help="Remove the least recently used until this much is left.")
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Show the decoded images that are kept for the next run, and remove some or all.

    Removed images are decoded again when they are needed. The folder is
    $RATP_CACHE if that is set.
    """
    if clear and keep is not None:
        raise ConfigError("--clear removes everything, --keep only some: give one of the two.")
    if keep is not None and not 0 <= keep < float("inf"):
        raise ConfigError(f"--keep takes the number of GiB that may stay, 0 or more, got {keep}.")
    folder = cache_folder()
    removed: list[CacheEntry] = []
    with interruptible("Some entries may be removed; the others are intact."):
        if clear or keep is not None:
            removed = evict(folder, 0 if keep is None else int(keep * 2**30))
        entries = cache_entries(folder)
    total = sum(entry.bytes for entry in entries)
    if json_:
        listed = {"entries": list(map(_entry_json, entries)), "removed": list(map(_entry_json, removed))}
        print_json({"cache": str(folder), "bytes": total, **listed})
    elif not quiet:
        table = Table("domain", "images", "pixels", "size", "last used", box=None, header_style="bold", pad_edge=False)
        for column in table.columns[1:4]:
            column.justify = "right"
        for entry in reversed(entries):
            pixels, size = f"{entry.height}×{entry.width}", size_text(entry.bytes)
            table.add_row(f"[bold cyan]{escape(entry.name)}[/]", f"{entry.images:,}", pixels, size, _used(entry))
        if entries:
            stdout().print(table)
        stdout().print(f"{len(entries)} in all, {size_text(total)}" if entries else "No decoded images are kept.")
        if clear or keep is not None:
            say(f"Removed: {len(removed)}, {size_text(sum(entry.bytes for entry in removed))}")
        say(f"Cache: {folder}")


def _entry_json(entry: CacheEntry) -> dict[str, object]:
    about = {"domain": entry.name, "images": entry.images, "height": entry.height, "width": entry.width}
    return {**about, "bytes": entry.bytes, "used": _used(entry), "key": entry.key}


def _used(entry: CacheEntry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
