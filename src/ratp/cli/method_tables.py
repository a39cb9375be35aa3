"""The tables of ``ratp methods``: all methods, or with ``--for`` those that suit what the user has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from ratp.cli.choose import SITUATIONS, choose, parse_situations, relative_costs
from ratp.cli.console import print_json, stderr, stdout
from ratp.methods import METHODS, describe

HELP = "help"  # asks for the list of phrases
_COSTS = ("time", "memory")


def described(name: str) -> dict[str, Any]:
    """Returns what is known about a method without importing it."""
    about = describe(name)
    return {**about._asdict(), "needs": about.needs or "nothing", **_costs(name)}


def _costs(name: str) -> dict[str, float | None]:
    return {kind: relative_costs()[kind].get(name) for kind in _COSTS}


def print_methods() -> None:
    """Prints all methods by family."""
    rows = [described(name) for name in METHODS]
    console = stdout()
    for number, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        members = [row for row in rows if row["family"] == family]
        console.print("\n" * bool(number) + f"[bold]{escape(family.capitalize())}[/]")
        cells = [(row["name"], row["needs"], _cited(row["paper"])) for row in members]
        console.print(_table(cells, "needs besides images", "paper", head=not number))
    stderr().print(
        "\n[dim]Time of a run and memory of a training step are relative to source-only, on the demo stream. Exemplars "
        "are images that a method stores. ratp methods show NAME explains a method; ratp methods --for help finds "
        "those that suit you.[/]"
    )


def _cited(paper: str) -> str:
    """First author, venue and year of a paper given as "Author et al., Title, VENUE YEAR"."""
    parts = paper.split(", ")
    return f"{parts[0].removesuffix(' et al.')}, {parts[-1]}" if len(parts) > 2 else paper


def _table(rows: Iterable[tuple[str, str, str]], first: str, second: str, *, head: bool = True) -> Table:
    """Returns a table of methods with their costs and two further columns."""
    table = Table(box=None, show_header=head, header_style="dim", pad_edge=False, expand=True)
    table.add_column("method", width=max(map(len, METHODS)), no_wrap=True, style="bold cyan")
    for kind in _COSTS:
        table.add_column(kind, width=len("139.0×"), justify="right")
    table.add_column(first, ratio=5)
    table.add_column(second, ratio=3)
    for name, *cells in rows:
        costs = ("–" if cost is None else f"{cost:.1f}×" for cost in _costs(name).values())
        table.add_row(escape(name), *costs, *map(escape, cells))
    return table


def print_choice(asked: str, *, json_: bool) -> None:
    """Prints which methods suit the phrases asked for, and why the others do not."""
    if asked.strip().lower() == HELP:
        _print_phrases(json_=json_)
        return
    phrases = parse_situations(asked)
    found = choose(phrases)
    suitable, others = [one for one in found if not one.reasons], [one for one in found if one.reasons]
    if json_:
        fit = [{"name": one.name, "options": one.options, **_costs(one.name)} for one in suitable]
        unfit = [{"name": one.name, "reasons": one.reasons} for one in others]
        print_json({"for": phrases, "suitable": fit, "unsuitable": unfit})
        return
    console = stdout()
    asked = f"[bold]{escape(', '.join(phrases))}[/]"
    if suitable:
        console.print(f"Suitable for {asked}:\n")
        rows = [(one.name, describe(one.name).title.split(": ")[-1], " ".join(one.options)) for one in suitable]
        console.print(_table(rows, "what it is", "with"))
        console.print()
    console.print("Not suitable:\n" if suitable else f"No method is suitable for {asked}:\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold", min_width=max(map(len, METHODS)))
    for one in others:
        table.add_row(escape(one.name), escape("; ".join(one.reasons)))
    console.print(table)
    stderr().print(
        "\n[dim]Time and memory are relative to source-only. To compare methods: ratp run … -m NAME -m NAME.\n"
        "docs/how-to/choose-a-method.md has accuracies.[/]"
    )


def _print_phrases(*, json_: bool) -> None:
    if json_:
        print_json({"phrases": {phrase: situation.meaning for phrase, situation in SITUATIONS.items()}})
        return
    table = Table("phrase", "meaning", box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for phrase, situation in SITUATIONS.items():
        also = f" [dim](or: {escape(', '.join(situation.aliases))})[/]" if situation.aliases else ""
        table.add_row(f"[bold cyan]{escape(phrase)}[/]", f"{escape(situation.meaning)}{also}")
    stdout().print(table)
    stderr().print("\n[dim]Separate phrases by commas: ratp methods --for 'own model, one pass'[/]")
