"""``ratp study``: a grid of runs from one TOML file."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ratp.cli import options as opt
from ratp.cli.console import (
    check_images,
    check_side_by_side,
    data_options,
    decoding,
    parse_devices,
    parse_jobs,
    print_json,
    say,
    say_layout,
    stderr,
    stdout,
)
from ratp.cli.reports import read_whole
from ratp.errors import ConfigError, RunDirectoryError, brief
from ratp.runs.record import RunRecord, is_run
from ratp.studies.saved import open_study
from ratp.studies.study import ABOUT, FAILURES, STATES, Entry, State, Study, how_many

app = typer.Typer(help="Studies: a grid of methods, orders, seeds and switches in a TOML file.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="The study, a TOML file.")]
Out = Annotated[Path | None, typer.Option(help="Folder of its runs; default runs/studies/NAME.")]
Known = Annotated[
    list[Path] | None,
    typer.Option(
        help="Results that need not be run again: exported results, run directories, or folders of either, at most "
        "two deep; repeatable."
    ),
]
On = Annotated[str, typer.Option(help="Where to execute the runs: local, or ray for a Ray cluster.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="The cluster: HOST:PORT, auto for one running here, local to start one; default: auto, else local."
    ),
]
TrustMethods = Annotated[
    bool,
    typer.Option("--trust-methods", help="Run the .py files that the study names as methods: read them first."),
]
_RESULTS = "exported results, run directories, or folders of either"
_STYLES: dict[State, str] = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


@app.command()
def run(
    file: File,
    out: Out = None,
    known: Known = None,
    data: opt.Data = None,
    weights: opt.Weights = "auto",
    on_bad_image: opt.OnBadImage = "stop",
    extra_classes: opt.ExtraClasses = "stop",
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    trust_methods: TrustMethods = False,
    jobs: opt.Jobs = "auto",
    side_by_side: opt.SideBySide = "auto",
    images: opt.Images = "auto",
    online: opt.Online = False,
    on: On = "local",
    ray_address: RayAddress = None,
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    json_: opt.Json = False,
) -> None:
    """Execute all unfinished runs of a study. The same command continues it."""
    from ratp.cli.study_progress import follow_study
    from ratp.executors.local import find_layout
    from ratp.runs.request import RunRequest
    from ratp.studies.execute import find_executor, without_stale_results
    from ratp.studies.file import read_study

    problems: list[str] = []
    at_once = parse_jobs(jobs, problems)
    check_side_by_side(side_by_side, problems)
    check_images(images, problems)
    first, devices = parse_devices(device, precision, problems)
    options, wrong = data_options(data, on_bad_image, extra_classes, None)
    problems += wrong
    if on == "ray" and "," in device:
        problems.append("on a cluster Ray chooses the devices: use --device cuda or cpu, not a list.")
    try:
        tell = None if quiet or json_ else say_layout
        executor = find_executor(on, ray_address, devices, "auto" if problems else side_by_side, tell)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    base = RunRequest(device=first, precision=precision, weights=weights, data=options, online=online)
    study = _with_known(read_study(file, out, base, trust_methods=trust_methods), known)
    with decoding(stderr(), quiet=quiet or json_) as progress:
        study = without_stale_results(study, progress)
    plans = [entry.plan for entry in study.remaining()]
    layout = find_layout(plans, devices, at_once, side_by_side) if on == "local" else None
    if not dry_run:
        study.claim()
    if dry_run or not (quiet or json_):
        from ratp.cli.study_plan import show_study_plan

        apart = on == "local" and not devices
        show_study_plan(study, stderr(), at_once=at_once, apart=apart, dry=dry_run, json_=json_, layout=layout)
    if dry_run:
        return
    how: dict[str, Any] = {"at_once": at_once, "images": images, "on": executor, "between_steps": on == "local"}
    follow_study(study, stderr(), quiet=quiet or json_, **how)
    _print_study(study, json_=json_, quiet=quiet)
    if any(state != "finished" for state in study.states().values()):
        raise typer.Exit(2)


@app.command()
def status(
    file: File, out: Out = None, known: Known = None, weights: opt.Weights = "auto", json_: opt.Json = False
) -> None:
    """Show the state of every run of a study."""
    _print_study(_open(file, out, known, weights), json_=json_, quiet=False)


@app.command()
def report(
    file: File,
    out: Out = None,
    known: Known = None,
    to: Annotated[Path | None, typer.Option(help="Folder for the report; default `report` in the study's.")] = None,
    weights: opt.Weights = "auto",
    quiet: opt.Quiet = False,
) -> None:
    """Compare the finished runs of a study; missing ones are named, never filled in."""
    from ratp.reports.study import print_study, write_study

    study = _open(file, out, known, weights)
    results = study.results()
    if not results.records():
        where = f" --out {shlex.quote(str(out))}" if out else ""
        raise RunDirectoryError(
            f"no run of {study.name} is finished in {study.folder}. If you ran it with --weights or --known, give "
            f"them here, too. Next: ratp study run {shlex.quote(str(file))}{where}"
        )
    page = write_study(results, to or study.folder / "report")
    if not quiet:
        print_study(results, stdout())
        say(f"Report: {page}")


def _open(file: Path, out: Path | None, known: Sequence[Path] | None, weights: str) -> Study:
    return _with_known(open_study(file, out, weights), known)


def _with_known(study: Study, known: Sequence[Path] | None) -> Study:
    study.check_folder()
    return study.with_results([record for path in known or [] for record in _results(path)])


def _results(path: Path) -> list[RunRecord]:
    """Reads the result at a path or, of a folder, its run directories or else exported results, two deep."""
    try:
        if not path.exists():
            raise ConfigError(f"{path} does not exist. --known takes {_RESULTS}.")
        places = [path]
        if path.is_dir() and not is_run(path):
            exported = (file for file in (*path.glob("*.json"), *path.glob("*/*.json")) if file.name != ABOUT)
            places = sorted(filter(is_run, path.iterdir())) or sorted(exported)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. --known takes {_RESULTS}.") from error
    if not places:
        raise ConfigError(f"{path} holds no results. --known takes {_RESULTS}.")
    return read_whole(places)


def _print_study(study: Study, *, json_: bool, quiet: bool) -> None:
    """Prints the states of all runs as a table or JSON. Failures print even with --quiet."""
    states = study.states()
    reasons = {entry.name: study.reason(entry, states[entry.name]) for entry in study.entries}
    if json_:
        runs = [
            {"run": entry.title, **_place(study, entry, states[entry.name]), "state": states[entry.name]}
            | ({"reason": reasons[entry.name]} if reasons[entry.name] else {})
            for entry in study.entries
        ]
        print_json({"study": study.name, "title": study.title, "folder": str(study.folder), "runs": runs})
        return
    if not quiet:
        _print_states(study.title, study.entries, states, stdout())
    for (state, reason), titles in _by_reason(study, states, reasons).items():
        style = _STYLES.get(state, "yellow")
        stderr().print(f"[bold {style}]{state}:[/] {escape(f'{how_many(titles)}: {reason}')}", soft_wrap=True)
    if any("Traceback " in reason for reason in reasons.values()):
        say(f"Full errors: {study.folder / FAILURES}")
    if not quiet:
        say(f"Runs: {study.folder}")


def _place(study: Study, entry: Entry, state: State) -> dict[str, str | None]:
    """The folder of a run, or the path of a result from elsewhere."""
    known = entry.record() if state == "finished" and entry.result is not None else None
    if known is None or known.path == entry.folder:
        return {"folder": str(entry.folder)}
    return {"folder": None, "known": str(known.path)}


def _by_reason(
    study: Study, states: Mapping[str, State], reasons: Mapping[str, str]
) -> dict[tuple[State, str], list[str]]:
    """The runs with a reason, grouped by state and reason, so that each reason is printed once."""
    found: dict[tuple[State, str], list[str]] = {}
    for entry in study.entries:
        if reasons[entry.name]:
            found.setdefault((states[entry.name], brief(reasons[entry.name])), []).append(entry.title)
    return found


def _print_states(title: str, entries: Sequence[Entry], states: dict[str, State], console: Console) -> None:
    seen = [state for state in STATES if state in states.values()]
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for state in seen:
        table.add_column(state, justify="right", style=_STYLES.get(state, ""))
    stream = None
    for (where, label), counts in _counted(entries, states).items():
        if where != stream:
            stream = where
            table.add_row(Text(where, style="bold"))
        table.add_row(Text(f"  {label}"), *(str(counts[state] or "") for state in seen))
    totals = Counter(states.values())
    table.add_section()
    table.add_row("1 run" if len(entries) == 1 else f"{len(entries)} runs", *(str(totals[state]) for state in seen))
    console.print(table)
    shared = sum(len({row.label for row in entry.rows}) > 1 for entry in entries)
    if shared:
        console.print(Text(f"{shared} {'run is' if shared == 1 else 'runs are'} in several rows.", style="dim"))


def _counted(entries: Sequence[Entry], states: dict[str, State]) -> dict[tuple[str, str], Counter[State]]:
    """Counts runs by state, for every stream and label in the order of the file."""
    found: dict[tuple[str, str], Counter[State]] = {}
    for entry in entries:
        for label in dict.fromkeys(row.label for row in entry.rows):
            found.setdefault((entry.stream, label), Counter())[states[entry.name]] += 1
    return dict(sorted(found.items(), key=lambda item: list(dict.fromkeys(k[0] for k in found)).index(item[0][0])))
