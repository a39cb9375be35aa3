"""``ratp data check``: every image decoded once, and what is wrong with the data said by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len

from ratp.cli.console import print_json, say, stdout
from ratp.cli.data_progress import Data, interruptible, shown
from ratp.cli.output import check_out, write_out
from ratp.cli.runs import Json, Quiet
from ratp.data.listing import quoted
from ratp.data.manifest import Duplicate, Manifest, check_domain, describe, duplicates_between
from ratp.data.manifest_file import manifest_to_json
from ratp.data.origins import origin_of
from ratp.data.place import VARIABLE, data_folder
from ratp.data.published import Step
from ratp.data.survey import find_domains
from ratp.data.tree import ImageTree, open_tree, remarks_on
from ratp.errors import ConfigError, RatpError

_STEP = Step("images", "images")


@dataclass
class Group:
    """Domains that are looked at together: those of a folder, or those that were given by themselves.

    Attributes:
        folder: The folder; None for those given.
        trees: The domains that can be opened.
        broken: Those that cannot, each with the reason.
        manifests: What was found in each, in the order of ``trees``.
    """

    folder: Path | None
    trees: list[ImageTree] = field(default_factory=list)
    broken: list[tuple[Path, str]] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)

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
    workers: Annotated[int | None, typer.Option(help="Processes to decode in; default: one a core.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write what was found of every file to this JSON file.")] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Decode every image once, and say what there is and what is wrong with it.

    A zip is a domain. A folder is a domain if it holds images, or folders
    with images below them: its classes. It is one of domains, up to two
    folders deep, if it holds zips, or folders that hold folders of the same
    names (FOLDER/DOMAIN/CLASS/IMAGE).

    The exit code is 1 if there is an image or a zip that cannot be used.
    """
    if out is not None:
        check_out(out, "what --json prints" if json_ else "what was found")
    with interruptible("Nothing was written; start again to check all."):
        groups = _groups(paths or [], data_folder(data))
        _decode(groups, workers, quiet=quiet or json_)
        if out is not None:
            _write(groups, out)
    if json_:
        print_json(_to_json(groups))
    elif not quiet:
        for group in groups:
            _print(group)
        stdout().print(_totals(groups), markup=False)
        if out is not None:
            say(f"Manifests: {out}")
    if not all(group.is_sound for group in groups):
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
            if domain.resolve() not in seen:
                seen.add(domain.resolve())
                parent = None if domain == path else domain.parent
                _open(groups.setdefault(parent, Group(parent)), domain)
    if problems:
        raise ConfigError(problems)
    return list(groups.values())


def _open(group: Group, path: Path) -> None:
    try:
        group.trees.append(open_tree(path))
    except RatpError as error:
        group.broken.append((path, str(error)))


def _decode(groups: Sequence[Group], workers: int | None, *, quiet: bool) -> None:
    total, before = sum(len(tree.files) for group in groups for tree in group.trees), 0
    with shown("checking images", quiet=quiet) as show:
        for group in groups:
            for tree in group.trees:

                def told(done: int, _: int, start: int = before) -> None:
                    if show:
                        show(_STEP, start + done, total)

                group.manifests.append(check_domain(tree, None, workers, told))
                before += len(tree.files)


def _print(group: Group) -> None:
    indent = 0
    if group.folder is not None:
        _line(str(group.folder), 0, "bold cyan")
        indent = 2
    for tree, manifest in zip(group.trees, group.manifests, strict=True):
        first, *lines, last = describe(manifest)
        _line(first, indent, "bold")
        made = [f"{made}, not the published images"] if (made := origin_of(tree.path, manifest)) else []
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
    """A line or, where it is too long, several: broken after commas if it has some, else between words."""
    console = stdout()
    room = max(20, console.width - indent - 2)
    breaks = re.split("(?<=,) ", text)
    shown_as = [""]
    for piece in breaks if max(map(cell_len, breaks)) <= room else text.split(" "):
        if shown_as[-1] and cell_len(shown_as[-1]) + 1 + cell_len(piece) > room:
            shown_as.append("")
        shown_as[-1] += f" {piece}" if shown_as[-1] else piece
    for number, part in enumerate(shown_as):
        console.print(" " * (indent + 2 * bool(number)) + part, style=style or None, markup=False, soft_wrap=True)


def _totals(groups: Sequence[Group]) -> str:
    numbers = _numbers(groups)
    unusable = f"{numbers['unusable']:,} unusable" if numbers["unusable"] else "none unusable"
    domains = "1 domain" if numbers["domains"] == 1 else f"{numbers['domains']} domains"
    return f"{domains}, {numbers['images']:,} images, {unusable}"


def _numbers(groups: Sequence[Group]) -> dict[str, int]:
    manifests = [manifest for group in groups for manifest in group.manifests]
    return {
        "domains": len(manifests),
        "images": sum(len(manifest.usable) for manifest in manifests),
        "unusable": sum(len(manifest.bad) for manifest in manifests) + sum(len(group.broken) for group in groups),
        "duplicates_within": sum(len(group) - 1 for manifest in manifests for group in manifest.duplicates),
        "duplicates_between": sum(len(group.duplicates) for group in groups),
    }


def _to_json(groups: Sequence[Group]) -> dict[str, Any]:
    sets = [
        {
            "folder": None if group.folder is None else str(group.folder),
            "domains": [_domain(tree, manifest) for tree, manifest in zip(group.trees, group.manifests, strict=True)],
            "unreadable": [{"path": str(path), "reason": reason} for path, reason in group.broken],
            "duplicates": [
                {"sha256": found.sha256, "places": [f"{domain}/{name}" for domain, name in found.places]}
                for found in group.duplicates
            ],
        }
        for group in groups
    ]
    return {"sets": sets, "totals": _numbers(groups), "ok": all(group.is_sound for group in groups)}


def _domain(tree: ImageTree, manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "path": str(tree.path),
        "origin": origin_of(tree.path, manifest),
        "images": len(manifest.usable),
        "classes": manifest.counts if manifest.classes is not None else None,
        "height": manifest.heights._asdict(),
        "width": manifest.widths._asdict(),
        "conversions": manifest.conversions,
        "unusable": [{"name": name, "reason": reason} for name, reason in manifest.bad],
        "duplicates": [[file.name for file in group] for group in manifest.duplicates],
        "ignored": manifest.ignored_count,
        "passed_over": list(tree.passed_over),
        "hash": manifest.hash,
    }


def _write(groups: Sequence[Group], out: Path) -> None:
    manifests = [
        {"path": str(tree.path), **manifest_to_json(manifest)}
        for group in groups
        for tree, manifest in zip(group.trees, group.manifests, strict=True)
    ]
    write_out(out, json.dumps({"manifests": manifests}, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
