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
    preset: Annotated[str, typer.Option(help="Preset whose values to show.")] = DEFAULT_PRESET,
    backbone: Annotated[str | None, typer.Option(metavar="NAME", help="Feature extractor to show values for.")] = None,
    json_: Json = False,
) -> None:
    """List all switches of a stream and a method, with their values: what --set takes."""
    from ratp.runs.plan import resolve
    from ratp.runs.request import RunRequest

    own = {"source": "SOURCE", "targets": ["TARGET"]} if stream == FOLDERS else {}
    changes = {} if backbone is None else {"network.backbone": backbone}
    plan = resolve(
        RunRequest(stream, method, preset=preset, changes=changes, device="cpu", weights="none", **own)  # type: ignore[arg-type]
    )
    parts = {"recipe": plan.recipe, plan.method.name: plan.config}
    if json_:
        rows = [{"of": name, **asdict(item)} for name, part in parts.items() for item in switches(part)]
        for row in rows:
            del row["is_decision"]
        print_json({"stream": stream, "method": plan.method.name, "preset": preset, "switches": rows})
        return
    short = ", ".join(f"--{option}" for option in SHORTHANDS)
    stdout().print(f"[bold]All methods, on {escape(plan.spec.name)}[/] [dim](also {short})[/]")
    print_switches(plan.recipe, plan.recipe)
    stdout().print(f"[bold]{escape(plan.method.name)}[/]")
    print_switches(plan.config, plan.config)
    say("Set one with --set NAME=VALUE.")
