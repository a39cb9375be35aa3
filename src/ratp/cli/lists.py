"""``ratp methods`` and ``ratp streams``: lists, and the details of one method or stream."""

from __future__ import annotations

import re
import sys
import textwrap
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ratp._core.files import safe_name
from ratp.cli.console import data_options, decoding, print_json, print_note, stderr, stdout
from ratp.cli.method_tables import described, print_choice, print_methods
from ratp.cli.options import Data, Json, OnBadImage
from ratp.config import as_dict, switches
from ratp.errors import ConfigError, RatpError
from ratp.methods import METHODS, find_method
from ratp.runs import DEFAULT_PRESET
from ratp.streams import STREAMS, find_stream

if TYPE_CHECKING:
    from ratp.data.domain import LabelledDomain
    from ratp.streams.stream import Domain
    from ratp.training.method import Method

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")
_STRONG = re.compile(r"\*\*(\S[^*]*)\*\*")
_ITEM = re.compile(r"( *)\* ")


def reflow(doc: str, width: int) -> str:
    """Fills the paragraphs and lists of a docstring to a width, without markup.

    List items begin with an asterisk. Other indented lines continue an item or, after a paragraph, are a formula that
    stays as it is.
    """
    for markup in (_LITERAL, _ROLE, _STRONG):
        doc = markup.sub(r"\1", doc)
    filler = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip("\n")):
        if block.startswith(" ") and not _ITEM.match(block):  # a formula
            blocks.append(block)
            continue
        filled = []
        for part in re.split(r"\n(?= *\* )", block):
            item = _ITEM.match(part)
            filler.initial_indent = item[1] if item else ""
            filler.subsequent_indent = " " * len(item[0]) if item else ""
            filled.append(filler.fill(" ".join(line.strip() for line in part.splitlines())))
        blocks.append("\n".join(filled))
    return "\n\n".join(blocks)


# Streams with a small and with a large network, as examples.
SMALL, LARGE = "digits", "pacs"
methods = typer.Typer(help="List methods and their switches.")
streams = typer.Typer(help="List streams and show their images.")


For = Annotated[
    str | None,
    typer.Option("--for", metavar="PHRASES", help="What you have, such as 'own model, one pass'; help: all phrases."),
]


@methods.callback(invoke_without_command=True)
def list_methods(context: typer.Context, for_: For = None, json_: Json = False) -> None:
    """List the methods, or with --for those that suit what you have."""
    if context.invoked_subcommand:
        return
    if for_ is not None:
        print_choice(for_, json_=json_)
    elif json_:
        print_json({"methods": list(map(described, METHODS))})
    else:
        print_methods()


@methods.command("show")
def show_method(
    name: Annotated[str, typer.Argument(help="Name of the method, or a .py file that defines one.")],
    preset: Annotated[str, typer.Option(help="Preset whose values to show.")] = DEFAULT_PRESET,
    stream: Annotated[str, typer.Option(help="Stream whose values to show; large networks have other ones.")] = SMALL,
    json_: Json = False,
) -> None:
    """Explain a method: paper, what it does, deviations from the original, presets and every switch."""
    from ratp.runs.plan import preset_sizes

    method = find_method(name)
    config = _values(name, preset, stream)
    if json_:
        about = {"name": method.name, "paper": method.paper, "preset": preset, "stream": stream}
        print_json({**about, "switches": as_dict(config), "sizes": preset_sizes(method, preset)})
        return
    console = stdout()
    paper = f"{escape(method.paper)}\n" if method.paper != "none" else ""
    console.print(f"[bold]{escape(method.title)}[/]\n{paper}[dim]{escape(method.family)}[/]\n")
    console.print(f"{reflow(_explained(method), console.width)}\n", markup=False)
    other = stream == SMALL and config != _values(name, preset, LARGE)
    more = f" --stream {LARGE} shows those for large networks." if other else ""
    presets = ", ".join((DEFAULT_PRESET, *method.presets))
    console.print(f"Presets: {presets}. Values below: [bold]{escape(preset)}[/], on {escape(stream)}.{more}\n")
    if sizes := preset_sizes(method, preset):
        console.print(f"It also sets {', '.join(f'{size}={value}' for size, value in sizes.items())}.\n", markup=False)
    print_switches(config, _values(name, DEFAULT_PRESET, stream))
    console.print("[dim]#n: row n of docs/explanation/paper-and-code.md, where RaTP's paper and its code differ.[/]")


def _values(name: str, preset: str, stream: str) -> Any:
    """A method's switches under a preset, with the values for a stream."""
    from ratp.runs.plan import resolve
    from ratp.runs.request import RunRequest

    return resolve(RunRequest(stream=stream, method=name, preset=preset, device="cpu", weights="none")).config


def _explained(method: type[Method]) -> str:
    """The docstring of its module, without a first line that only names the method and its paper."""
    first, _, rest = (getdoc(sys.modules[method.__module__]) or "").partition("\n\n")
    return rest if re.match(r'.* — .*"', first) else f"{first}\n\n{rest}".rstrip()


def print_switches(config: Any, default: Any, word: str = "") -> None:
    """Prints the switches of a configuration with a word in their names, highlighting what is not the default."""
    usual = as_dict(default)
    table = Table("switch", "value", "what it does", box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True  # --set needs the whole name
    for item in (item for item in switches(config) if word in item.name):
        text = ",".join(map(_shortly, item.value)) if isinstance(item.value, tuple) else _shortly(item.value)
        mark = "yellow" if as_dict(config)[item.name] != usual[item.name] else "green"
        row = f" [dim]#{item.doc_ref}[/]" if item.doc_ref else ""
        options = f" [dim]({escape(item.kind.removeprefix('one of '))})[/]" if item.kind.startswith("one of") else ""
        name, value = f"[cyan]{escape(item.name)}[/]", f"[{mark}]{escape(text)}[/]"
        table.add_row(name, value, f"{escape(item.explanation)}{options}{row}")
    stdout().print(table)
    stdout().print()


def _shortly(value: Any) -> str:
    """A value as text; long fractions with six digits."""
    text = str(value)
    return f"{value:.6g}" if isinstance(value, float) and len(text) > len("0.000123456") else text


@streams.callback(invoke_without_command=True)
def list_streams(context: typer.Context, json_: Json = False) -> None:
    """List the streams."""
    if context.invoked_subcommand:
        return
    if json_:
        rows = []
        for spec in STREAMS.values():
            orders = {name: list(order) for name, order in spec.orders.items()}
            rows.append({"name": spec.name, "title": spec.title, "domains": dict(spec.domains), "orders": orders})
        print_json({"streams": rows})
        return
    console = stdout()
    for spec in STREAMS.values():
        console.print(f"[bold cyan]{escape(spec.name)}[/]  {escape(spec.title)}")
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
        for code, description in spec.domains.items():
            table.add_row(f"[bold]{escape(code)}[/]", escape(description))
        console.print(table)
        for name, order in spec.orders.items():
            console.print(f"  [dim]order {escape(name)}:[/] {escape('>'.join(order))}")
    stderr().print("[dim]ratp streams show NAME lists its settings and writes a sheet of sample images.[/]")


@streams.command("show")
def show_stream(
    name: Annotated[str, typer.Argument(help="Name of the stream, a .toml file or a folder of domains.")],
    order: Annotated[str, typer.Option(help="Domains to show, in their order.")] = "default",
    out: Annotated[Path | None, typer.Option(help="PNG file to write; default NAME.png.")] = None,
    data: Data = None,
    on_bad_image: OnBadImage = "stop",
    json_: Json = False,
) -> None:
    """Show a stream's settings and write a contact sheet: sample images of every domain, class by class."""
    from ratp.data.contact_sheet import check_sheet, contact_sheet
    from ratp.streams.stream import parse_order

    spec = find_stream(name)
    path = out or Path(f"{safe_name(spec.name)}.png")
    check_sheet(path)
    with decoding(stderr(), quiet=json_) as progress:
        options, problems = data_options(data, on_bad_image, "drop", progress)
        if problems:
            raise ConfigError(problems)
        codes = spec.orders["default"] if order == "default" else parse_order(order, spec, subset=True)
        try:
            loaded = spec.load(codes, spec.recipe.size, options)
        except RatpError:
            if spec.name in STREAMS and not json_:  # a benchmark has settings without its images
                print_switches(spec.recipe, spec.recipe)
            raise
    for note in [note for item in loaded for note in item.notes] if not json_ else []:
        print_note(note, stderr())
    domains = [_shown(item.domain) for item in loaded]
    contact_sheet(domains, path, descriptions=spec.domains)
    if json_:
        rows = [{"domain": d.name, "images": len(d), "held_out": _test_part(d)} for d in domains]
        print_json({"stream": name, "sheet": str(path), "domains": rows})
        return
    print_switches(spec.recipe, spec.recipe)
    table = Table("domain", "images", "test part", "what it is", box=None, header_style="bold", pad_edge=False)
    for domain in domains:
        test = str(_test_part(domain)) if _test_part(domain) else "–"
        table.add_row(f"[bold cyan]{escape(domain.name)}[/]", str(len(domain)), test, escape(spec.domains[domain.name]))
    stdout().print(table)
    stdout().print(f"Contact sheet: {path}", markup=False)


def _shown(domain: Domain) -> LabelledDomain:
    """A labelled domain as it is, an unlabelled one as if it had a single class."""
    import torch

    from ratp.data.domain import LabelledDomain

    if isinstance(domain, LabelledDomain):
        return domain
    return LabelledDomain(domain.name, domain.images, torch.zeros(len(domain), dtype=torch.int64), ("no label",))


def _test_part(domain: LabelledDomain) -> int:
    return 0 if domain.held_out is None else int(domain.held_out.sum())
