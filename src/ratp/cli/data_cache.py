"""``ratp data cache``: what the cache of decoded images holds, and how to make it smaller."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ratp.cli.console import print_json, say, stdout
from ratp.cli.data_progress import interruptible, size_text
from ratp.cli.runs import Json, Quiet
from ratp.data.cache import cache_folder
from ratp.data.decoded_cache import CacheEntry, cache_entries, evict
from ratp.errors import ConfigError


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything.")] = False,
    keep: Annotated[
        float | None, typer.Option(metavar="GIB", help="Remove what was used longest ago until this much is left.")
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Show the decoded images that are kept for the next run, and remove some or all.

    Whatever is removed is decoded again when it is needed. The folder is
    $RATP_CACHE if that is set.
    """
    if clear and keep is not None:
        raise ConfigError("--clear removes everything, --keep only some: give one of the two.")
    if keep is not None and not 0 <= keep < float("inf"):
        raise ConfigError(f"--keep takes the number of GiB that may stay, 0 or more, got {keep}.")
    folder = cache_folder()
    removed: list[CacheEntry] = []
    with interruptible("What was removed so far is gone; the rest is whole."):
        if clear or keep is not None:
            removed = evict(folder, 0 if keep is None else int(keep * 2**30))
        entries = cache_entries(folder)
    if json_:
        listed = {"entries": [_row(entry) for entry in entries], "removed": [_row(entry) for entry in removed]}
        print_json({"cache": str(folder), "bytes": sum(entry.bytes for entry in entries), **listed})
    elif not quiet:
        _print(entries)
        if clear or keep is not None:
            say(f"Removed: {len(removed)}, {size_text(sum(entry.bytes for entry in removed))}")
        say(f"Cache: {folder}")


def _row(entry: CacheEntry) -> dict[str, object]:
    about = {"domain": entry.name, "images": entry.images, "height": entry.height, "width": entry.width}
    return {**about, "bytes": entry.bytes, "used": _when(entry), "key": entry.key}


def _when(entry: CacheEntry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))


def _print(entries: list[CacheEntry]) -> None:
    if not entries:
        stdout().print("No decoded images are kept.")
        return
    table = Table("domain", "images", "pixels", "size", "last used", box=None, header_style="bold", pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for entry in reversed(entries):
        pixels, size = f"{entry.height}×{entry.width}", size_text(entry.bytes)
        table.add_row(f"[bold cyan]{escape(entry.name)}[/]", f"{entry.images:,}", pixels, size, _when(entry))
    stdout().print(table)
    stdout().print(f"{len(entries)} in all, {size_text(sum(entry.bytes for entry in entries))}")
