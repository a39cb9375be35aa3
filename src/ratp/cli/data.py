"""``ratp data``: gets, imports, builds and checks data sets, and manages the cache of decoded images."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.markup import escape
from rich.table import Table

from ratp.cli.console import interruptible, print_json, say, show_steps, stderr, stdout
from ratp.cli.data_check import cache, check
from ratp.cli.options import Data, Json, OnBadImage, Quiet
from ratp.data.catalogue import CATALOGUE, DataSet, DomainSource, find_sources
from ratp.data.catalogue.fetch import Step, StepProgress, domains_in, fetch_domain, import_published
from ratp.data.catalogue.locate import DOWNLOADS, data_folder, domain_file, find_domain
from ratp.data.formats import canonical
from ratp.data.formats.canonical import ImportReport, origin, provenance
from ratp.data.formats.frames import DIGITS_FIVE, FrameName
from ratp.errors import ConfigError, RatpError, unknown

AtMost = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Images to keep per domain, the same random choice every time; 0: all. Default: 34,000 of digits, as in "
        "the paper, else all.",
    ),
]
FrameOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Frame of MNIST-M and USPS: digits-five (the paper's: MNIST-M without margin, USPS with one) or original.",
    ),
]
Replace = Annotated[bool, typer.Option("--replace", help="Replace existing files.")]
_MOST_NAMED = 20  # files a message names
_START_AGAIN = "Nothing incomplete is left behind; run the same command again."

app = typer.Typer(help="Get, import, build and check data sets.")
app.command("check")(check)
app.command("cache")(cache)


@app.callback(invoke_without_command=True)
def overview(context: typer.Context, data: Data = None, json_: Json = False) -> None:
    """Get, import, build and check data sets. Without a command: what is there, and how to get the rest."""
    if context.invoked_subcommand:
        return
    folder = data_folder(data)
    rows = [(entry, source) for entry in CATALOGUE.values() for source in entry.domains.values()]
    if json_:
        outcomes = [Outcome(f"{entry.name}/{source.name}", _there(folder, entry, source)) for entry, source in rows]
        print_json({"data": str(folder), "domains": [outcome.to_json() for outcome in outcomes]})
        return
    table = Table("domain", "images", "in the data folder", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for entry, source in rows:
        path, images = _there(folder, entry, source), source.published or source.images()
        way = "ratp data get" if source.files else "by hand; ratp data get says how"
        way = "ratp data build, or by hand" if source.rebuilds else way
        state = f"[green]yes[/]{_made(path)}" if path else f"[dim]no: {way}[/]"
        table.add_row(f"{entry.name}/[bold cyan]{source.name}[/]", f"{images:,}" if images else "", state)
    stdout().print(table)
    say(f"Data folder: {folder}")


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set (digits, pacs, domainnet) or a domain (mnist, pacs/sketch).")],
    data: Data = None,
    at_most: AtMost = None,
    frame: FrameOption = DIGITS_FIVE,
    on_bad_image: OnBadImage = "stop",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Download a data set or a domain, check it and convert it to FOLDER/DATASET/DOMAIN.zip.

    Domains that are there already are left alone, and interrupted downloads
    continue. If a file needs a browser, the steps are printed. The exit code
    is 1 if a domain is missing at the end.
    """
    chosen, sources = find_sources(name)
    folder, quiet, on_bad = data_folder(data), quiet or json_, _on_bad(on_bad_image)
    kept: dict[str, Any] = {"at_most": at_most, "frame": _frame(frame)}

    def fetch(source: DomainSource, show: StepProgress | None) -> ImportReport:
        if not source.files:
            raise RatpError(f"cannot be downloaded by a program.\n{source.manual}")
        return fetch_domain(chosen.name, source.name, folder, show, on_bad_image=on_bad, **kept)

    if any(source.files and not _there(folder, chosen, source) for source in sources):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot create the data folder {folder}: {error.strerror}"
            raise RatpError(f"{problem}. Choose one you may write to with --data.") from error
    with interruptible("The same command continues where it stopped."):
        outcomes = _obtain(chosen, sources, folder, fetch, keep=True, quiet=quiet)
    if any(outcome.report for outcome in outcomes) and not quiet:
        say(f"The downloaded files stay in {folder / DOWNLOADS / chosen.name}; you may remove them.")
    _finish(outcomes, json_=json_)


@app.command("import")
def import_files(
    name: Annotated[str, typer.Argument(help="A domain (mnist, pacs/sketch) or a data set (digits, pacs, domainnet).")],
    files: Annotated[list[Path], typer.Argument(help="Its files, zips and folders.", show_default=False)],
    data: Data = None,
    at_most: AtMost = None,
    frame: FrameOption = DIGITS_FIVE,
    replace: Replace = False,
    on_bad_image: OnBadImage = "stop",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Convert files of a published data set to FOLDER/DATASET/DOMAIN.zip.

    Reads idx, MATLAB, HDF5, libsvm and npz files, zips and folders of images,
    and lists of labels. Given a data set, imports every domain found in the
    files, except those already in the data folder. The folder of Digits-Five
    holds all five domains of digits.

    Images of your own need no import: a folder or zip with class/image
    below it is read as it is.
    """
    chosen, sources = find_sources(name)
    missing = [f"{path} does not exist." for path in files if not path.exists()]
    if missing:
        raise ConfigError(missing)
    folder, quiet, on_bad = data_folder(data), quiet or json_, _on_bad(on_bad_image)
    single, framing = len(sources) == 1, _frame(frame)

    def convert(source: DomainSource, show: StepProgress | None) -> ImportReport:
        how: dict[str, Any] = {"at_most": at_most, "frame": framing, "on_bad_image": on_bad, "replace": replace}
        return import_published(chosen.name, source.name, parts[source.name], folder, show, **how)

    with interruptible(_START_AGAIN):
        parts = {sources[0].name: files} if single else domains_in(chosen.name, files)
        found = [source for source in sources if source.name in parts]
        outcomes = _obtain(chosen, found, folder, convert, keep=not single and not replace, quiet=quiet)
    if single and outcomes[0].problem:
        raise RatpError(outcomes[0].problem)
    if len(found) < len(sources) and not quiet:
        say(f"Not in these files: {', '.join(source.name for source in sources if source not in found)}.")
    _finish(outcomes, json_=json_)


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(help="mnist-m or syn.")],
    data: Data = None,
    seed: Annotated[int, typer.Option(help="Determines every image.")] = 0,
    count: Annotated[
        int | None, typer.Option(help="Number of images; default: all of MNIST for mnist-m, 34,000 for syn.")
    ] = None,
    photographs: Annotated[
        list[Path] | None,
        typer.Option(help="For mnist-m: a photograph or a folder of them; repeatable. Default: two of scikit-learn's."),
    ] = None,
    fonts: Annotated[Path | None, typer.Option(help="For syn: a folder of fonts besides matplotlib's.")] = None,
    frame: FrameOption = DIGITS_FIVE,
    replace: Replace = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Build MNIST-M or SYN by their published recipes, if you lack the originals.

    mnist-m needs MNIST in the data folder: ratp data get mnist. Data that
    was built is labelled as such wherever it is shown.
    """
    from ratp.data.catalogue.rebuild import SIZE, build_mnist_m, build_syn

    kind = name.lower().replace("_", "-")
    if kind not in ("mnist-m", "syn"):
        raise RatpError(unknown("set that can be built", name, ("mnist-m", "syn")))
    if photographs and kind == "syn":
        raise ConfigError("--photographs is for mnist-m: syn has flat backgrounds.")
    if fonts and kind == "mnist-m":
        raise ConfigError("--fonts is for syn: mnist-m has the digits of MNIST.")
    chosen, (source,) = find_sources(kind)
    folder, quiet = data_folder(data), quiet or json_
    with interruptible(_START_AGAIN), show_steps(f"{chosen.name}/{source.name}", quiet=quiet) as show:

        def progress(done: int, total: int | None) -> None:
            if show:
                show(Step(source.name, "images"), done, total)

        out = folder / chosen.name
        if kind == "syn":
            report = build_syn(out, seed, 34_000 if count is None else count, progress, fonts=fonts, replace=replace)
        else:
            mnist = find_domain(folder, chosen.name, "mnist")
            size = SIZE if _frame(frame) == "original" else None
            report = build_mnist_m(mnist, photographs or None, out, seed, count, progress, size=size, replace=replace)
    outcome = Outcome(f"{chosen.name}/{source.name}", report.path, report)
    if not quiet:
        outcome.print()
    _finish([outcome], json_=json_)


@dataclass(frozen=True)
class Outcome:
    """What became of a domain (``set/domain``): its zip or folder and the report on writing it, or the problem."""

    name: str
    path: Path | None
    report: ImportReport | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        path, report = self.path, self.report
        found = {"path": str(path) if path else None, "origin": origin(path) if path else None}
        about = {"domain": self.name, **found, "problem": self.problem}
        if report is None:
            return about
        numbers = {"images": report.total, "classes": dict(report.images)}
        return {**about, **numbers, "notes": list(report.notes), "skipped": list(report.skipped)}

    def print(self) -> None:
        """Prints one line on a domain that is there, and the notes on it."""
        if self.path is None:
            return
        where = f"{self.path}{_made(self.path)}"
        notes: list[str] = []
        skipped: Sequence[str] = ()
        if self.report is None:
            line = f"{self.name}: there already, {where}"
        else:
            count, skipped = len(self.report.images), self.report.skipped
            line = f"{self.name}: {self.report.total:,} images in {count} class{'es' if count != 1 else ''}, {where}"
            notes = [*self.report.notes, *(f"Left out: {problem}" for problem in skipped[:_MOST_NAMED])]
        stdout().print(line, markup=False, soft_wrap=True)
        if len(skipped) > _MOST_NAMED:
            notes.append(f"… and {len(skipped) - _MOST_NAMED:,} more")
        for note in notes:
            say(f"  {note}")


def _made(path: Path) -> str:
    """How a domain's images were made or framed, in parentheses, if they are not as published."""
    framed = "framed as in Digits-Five" if (provenance(path) or {}).get("frame") == DIGITS_FIVE else None
    about = "; ".join(text for text in (origin(path), framed) if text)
    return f" ({about})" if about else ""


def _there(folder: Path, chosen: DataSet, source: DomainSource) -> Path | None:
    """The zip or folder of a domain in the data folder, if it exists."""
    path = domain_file(folder, chosen.name, source.name)
    return next((place for place in (path, path.with_suffix("")) if place.exists()), None)


def _on_bad(value: str) -> canonical.OnBadImage:
    if value not in get_args(canonical.OnBadImage):
        raise ConfigError(unknown("value of --on-bad-image:", value, get_args(canonical.OnBadImage)))
    return cast(canonical.OnBadImage, value)


def _frame(value: str) -> FrameName:
    if value not in get_args(FrameName):
        raise ConfigError(unknown("value of --frame:", value, get_args(FrameName)))
    return cast(FrameName, value)


def _obtain(
    chosen: DataSet,
    sources: Sequence[DomainSource],
    folder: Path,
    make: Callable[[DomainSource, StepProgress | None], ImportReport],
    *,
    keep: bool,
    quiet: bool,
) -> list[Outcome]:
    """Produces domains one after another, even if some fail; ``keep`` leaves existing ones alone."""
    outcomes = []
    for source in sources:
        name = f"{chosen.name}/{source.name}"
        outcome = Outcome(name, _there(folder, chosen, source) if keep else None)
        if outcome.path is None:
            try:
                with show_steps(name, quiet=quiet) as show:
                    report = make(source, show)
                outcome = Outcome(name, report.path, report)
            except RatpError as error:
                problem = str(error).replace("--data FOLDER", f"--data {shlex.quote(str(folder))}")
                outcome = Outcome(name, None, problem=problem)
        outcomes.append(outcome)
        if not quiet:
            outcome.print()
    return outcomes


def _finish(outcomes: Sequence[Outcome], *, json_: bool) -> None:
    """Prints the result as JSON or the problems, and exits with code 1 if there are any."""
    failed = [outcome for outcome in outcomes if outcome.problem is not None]
    if json_:
        print_json({"domains": [outcome.to_json() for outcome in outcomes], "ok": not failed})
    else:
        for problem in dict.fromkeys(outcome.problem for outcome in failed):
            names = ", ".join(outcome.name for outcome in failed if outcome.problem == problem)
            stderr().print(f"[bold red]error:[/] {escape(names)}: {escape(problem or '')}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
