"""``ratp switches``: every value that a run on a stream with a method may set, and its default."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ratp.cli.console import print_json, say, stdout
from ratp.cli.lists import print_switches
from ratp.cli.options import SHORTHANDS, Json
from ratp.config import switches
from ratp.errors import ConfigError, unknown
from ratp.methods import METHODS
from ratp.runs import DEFAULT_PRESET
from ratp.streams import FOLDERS, STREAMS


def list_switches(
    stream: Annotated[
        str,
        typer.Argument(
            help="A stream, a .toml file, a folder of domains, or `folders`.",
            autocompletion=lambda: [*STREAMS, FOLDERS],
        ),
    ] = "demo",
    method: Annotated[
        str, typer.Argument(help="A method, or a .py file.", autocompletion=lambda: list(METHODS))
    ] = "ratp",
    word: Annotated[str, typer.Argument(help="Show only switches whose names contain this.", show_default=False)] = "",
    preset: Annotated[str, typer.Option(help="Preset whose values to show.")] = DEFAULT_PRESET,
    backbone: Annotated[str | None, typer.Option(metavar="NAME", help="Feature extractor to show values for.")] = None,
    json_: Json = False,
) -> None:
    """List all switches of a stream and a method, with their values: what --set takes.

    To look one up: ratp switches folders ratp hold_out
    """
    from ratp.runs.plan import resolve
    from ratp.runs.request import RunRequest

    own = {"source": "SOURCE", "targets": ["TARGET"]} if stream == FOLDERS else {}
    changes = {} if backbone is None else {"network.backbone": backbone}
    plan = resolve(
        RunRequest(stream, method, preset=preset, changes=changes, device="cpu", weights="none", **own)  # type: ignore[arg-type]
    )
    parts = {"recipe": plan.recipe, plan.method.name: plan.config}
    found = {name: [item for item in switches(part) if word in item.name] for name, part in parts.items()}
    if not any(found.values()):
        raise ConfigError(unknown("switch", word, [item.name for part in parts.values() for item in switches(part)]))
    if json_:
        rows = [{"of": name, **asdict(item)} for name, items in found.items() for item in items]
        for row in rows:
            del row["is_decision"]
        print_json({"stream": stream, "method": plan.method.name, "preset": preset, "switches": rows})
        return
    short = ", ".join(f"--{option}" for option in SHORTHANDS)
    titles = f"All methods, on {escape(plan.spec.name)}[/] [dim](also {short})[/]", f"{escape(plan.method.name)}[/]"
    for title, name, part in zip(titles, parts, parts.values(), strict=True):
        if found[name]:
            stdout().print(f"[bold]{title}")
            print_switches(part, part, word)
    say("Set one with --set NAME=VALUE.")
