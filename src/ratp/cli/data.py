"""``ratp data``: data sets downloaded, imported, built and checked, and the cache of decoded images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.table import Table

from ratp.cli.console import print_json, say, stdout
from ratp.cli.data_cache import cache
from ratp.cli.data_check import check
from ratp.cli.data_outcome import Outcome, finish, obtain, there
from ratp.cli.data_progress import Data, interruptible, shown
from ratp.cli.runs import Json, Quiet
from ratp.data.formats.canonical import ImportReport, OnBadImage, origin
from ratp.data.place import DOWNLOADS, data_folder, find_domain
from ratp.data.published import Step, StepProgress, domains_in, fetch_domain, import_published
from ratp.data.sources import CATALOGUE, DomainSource, find_sources
from ratp.errors import ConfigError, RatpError, unknown

Replace = Annotated[bool, typer.Option("--replace", help="Replace what is there already.")]
Bad = Annotated[
    str, typer.Option("--on-bad-image", help="Images that cannot be read: stop with their names, or skip them.")
]

_START_AGAIN = "Nothing half-made is left behind; the same command makes it."

app = typer.Typer(help="Get, import, build and check data sets.")


def _on_bad(value: str) -> OnBadImage:
    if value not in get_args(OnBadImage):
        raise ConfigError(unknown("value of --on-bad-image:", value, get_args(OnBadImage)))
    return cast(OnBadImage, value)


@app.callback(invoke_without_command=True)
def overview(context: typer.Context, data: Data = None, json_: Json = False) -> None:
    """Get, import, build and check data sets. Without a command: what is there, and how to get the rest."""
    if context.invoked_subcommand:
        return
    folder = data_folder(data)
    rows = [(entry, source) for entry in CATALOGUE.values() for source in entry.domains.values()]
    if json_:
        outcomes = [Outcome(f"{entry.name}/{source.name}", there(folder, entry, source)) for entry, source in rows]
        print_json({"data": str(folder), "domains": [outcome.to_json() for outcome in outcomes]})
        return
    table = Table("domain", "images", "in the data folder", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for entry, source in rows:
        path, images = there(folder, entry, source), source.published or source.images()
        made = f" ({made})" if path and (made := origin(path)) else ""
        state = f"[green]yes[/]{made}" if path else f"[dim]no: {_way(source)}[/]"
        table.add_row(f"{entry.name}/[bold cyan]{source.name}[/]", f"{images:,}" if images else "", state)
    stdout().print(table)
    say(f"Data folder: {folder}")


def _way(source: DomainSource) -> str:
    if source.rebuilds:
        return "ratp data build, or by hand"
    return "ratp data get" if source.files else "by hand; ratp data get says how"


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set (digits, pacs, domainnet) or a domain (mnist, pacs/sketch).")],
    data: Data = None,
    on_bad_image: Bad = "stop",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Download a data set or a domain, check it and convert it to FOLDER/DATASET/DOMAIN.zip.

    What is there already is left alone, and what broke off is taken up
    again. Where a file can only be had with a browser, the way is printed.
    The exit code is 1 if a domain is not there in the end.
    """
    chosen, sources = find_sources(name)
    folder, quiet, on_bad = data_folder(data), quiet or json_, _on_bad(on_bad_image)

    def fetch(source: DomainSource, show: StepProgress | None) -> ImportReport:
        if not source.files:
            raise RatpError(f"cannot be downloaded by a program.\n{source.manual}")
        return fetch_domain(chosen.name, source.name, folder, show, on_bad_image=on_bad)

    if any(source.files and not there(folder, chosen, source) for source in sources):
        _make(folder)
    with interruptible("The same command goes on where it stopped."):
        outcomes = obtain(chosen, sources, folder, fetch, keep=True, quiet=quiet)
    if any(outcome.report for outcome in outcomes) and not quiet:
        say(f"The files as downloaded stay in {folder / DOWNLOADS / chosen.name}; they may be removed.")
    finish(outcomes, json_=json_)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RatpError(
            f"cannot make the data folder {folder}: {error.strerror}. Choose one you may write to with --data."
        ) from error


@app.command("import")
def import_files(
    name: Annotated[str, typer.Argument(help="A domain (mnist, pacs/sketch) or a data set (digits, pacs, domainnet).")],
    files: Annotated[list[Path], typer.Argument(help="Files, zips and folders it is made from.", show_default=False)],
    data: Data = None,
    at_most: Annotated[
        int | None,
        typer.Option(min=1, help="Images of a domain to keep, chosen by chance, the same every time; default: all."),
    ] = None,
    replace: Replace = False,
    on_bad_image: Bad = "stop",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Convert files of a published data set to FOLDER/DATASET/DOMAIN.zip.

    Read are idx, MATLAB, HDF5, libsvm and npz files, zips and folders of
    images, and lists of labels. Of a data set, every domain found in the
    files is imported; those in the data folder already are left alone. The
    folder of Digits-Five is one that holds all five domains of digits.

    Images of your own need no import: a folder or zip with class/image
    below it is read as it is.
    """
    chosen, sources = find_sources(name)
    missing = [f"{path} does not exist." for path in files if not path.exists()]
    if missing:
        raise ConfigError(missing)
    folder, quiet, on_bad = data_folder(data), quiet or json_, _on_bad(on_bad_image)
    single = len(sources) == 1

    def convert(source: DomainSource, show: StepProgress | None) -> ImportReport:
        given = parts[source.name]
        return import_published(
            chosen.name, source.name, given, folder, show, at_most=at_most, on_bad_image=on_bad, replace=replace
        )

    with interruptible(_START_AGAIN):
        parts = {sources[0].name: files} if single else domains_in(chosen.name, files)
        found = [source for source in sources if source.name in parts]
        outcomes = obtain(chosen, found, folder, convert, keep=not single and not replace, quiet=quiet)
    if single and outcomes[0].problem:
        raise RatpError(outcomes[0].problem)
    if len(found) < len(sources) and not quiet:
        say(f"Not in these files: {', '.join(source.name for source in sources if source not in found)}.")
    finish(outcomes, json_=json_)


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(help="mnist-m or syn.")],
    data: Data = None,
    seed: Annotated[int, typer.Option(help="Determines every image.")] = 0,
    count: Annotated[
        int | None, typer.Option(help="Number of images; default: all of MNIST for mnist-m, 20,000 for syn.")
    ] = None,
    photographs: Annotated[
        list[Path] | None,
        typer.Option(
            help="For mnist-m: a photograph or a folder of them; repeatable. Default: two that scikit-learn brings."
        ),
    ] = None,
    fonts: Annotated[
        Path | None, typer.Option(help="For syn: a folder of fonts, besides those that matplotlib brings.")
    ] = None,
    replace: Replace = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Build MNIST-M or SYN after their published recipes, for want of the originals.

    mnist-m needs MNIST in the data folder: ratp data get mnist. A set that
    was built says so wherever it is shown.
    """
    from ratp.data.rebuild import build_mnist_m, build_syn

    kind = name.lower().replace("_", "-")
    if kind not in ("mnist-m", "syn"):
        raise RatpError(unknown("set that can be built", name, ("mnist-m", "syn")))
    if photographs and kind == "syn":
        raise ConfigError("--photographs is for mnist-m: syn has flat backgrounds.")
    if fonts and kind == "mnist-m":
        raise ConfigError("--fonts is for syn: mnist-m has the digits of MNIST.")
    chosen, (source,) = find_sources(kind)
    folder, quiet = data_folder(data), quiet or json_
    with interruptible(_START_AGAIN), shown(f"{chosen.name}/{source.name}", quiet=quiet) as show:

        def told(done: int, total: int | None) -> None:
            if show:
                show(Step(source.name, "images"), done, total)

        out = folder / chosen.name
        if kind == "syn":
            report = build_syn(out, seed, 20_000 if count is None else count, told, fonts=fonts, replace=replace)
        else:
            mnist = find_domain(folder, chosen.name, "mnist")
            report = build_mnist_m(mnist, photographs or None, out, seed, count, told, replace=replace)
    outcome = Outcome(f"{chosen.name}/{source.name}", report.path, report)
    if not quiet:
        outcome.print()
    finish([outcome], json_=json_)


app.command("check")(check)
app.command("cache")(cache)
