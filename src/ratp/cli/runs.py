"""``ratp run``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratp._core.files import safe_name
from ratp._core.user_code import split_file
from ratp.cli import options as opt
from ratp.cli.console import (
    check_images,
    check_side_by_side,
    data_options,
    decoding,
    parse_devices,
    parse_jobs,
    print_error,
    print_json,
    print_note,
    print_notes,
    say,
    say_layout,
    stderr,
    stdout,
)
from ratp.cli.early import refuse_unknown
from ratp.cli.run_file import save
from ratp.cli.track import problems_of, say_tracked, track_all
from ratp.errors import ConfigError, RatpError
from ratp.methods import METHODS
from ratp.runs import DEFAULT_PRESET, QUICK, SAVE_EVERY
from ratp.runs.record import CONTINUED, RunRecord
from ratp.streams import FOLDERS, STREAMS

if TYPE_CHECKING:
    from ratp.runs.plan import RunPlan
    from ratp.runs.request import RunRequest
    from ratp.runs.run import Run
    from ratp.runs.track import Tracking
    from ratp.studies.execute import Executor

PRESETS = (DEFAULT_PRESET, QUICK, "paper", "momentum", "own-head")


def run(
    context: typer.Context,
    stream: Annotated[
        str,
        typer.Argument(
            help="A stream (`ratp streams` lists them), a .toml file of a stream or a run, a folder of domains, or "
            "`folders`.",
            autocompletion=lambda: [*STREAMS, FOLDERS],
        ),
    ] = "demo",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="A method, a .py file, or all; repeatable. Default ratp.",
            autocompletion=lambda: ["all", *METHODS],
        ),
    ] = None,
    orders: Annotated[
        list[str] | None,
        typer.Option("--order", metavar="NAME", help="Order of the domains: a name, or e.g. 'scan>photo'; repeatable."),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="Values to start from: official, quick for a machine without a GPU, or one of the method's.",
            autocompletion=lambda: PRESETS,
        ),
    ] = DEFAULT_PRESET,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seed", metavar="N", help="Seed of everything random; repeatable. Default 2022."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="NAME=X",
            help="Set a switch, e.g. pca.scale=8 (`ratp switches` lists them); repeatable.",
        ),
    ] = None,
    epochs: opt.Epochs = None,
    steps: opt.Steps = None,
    batch: opt.Batch = None,
    size: opt.Size = None,
    backbone: opt.Backbone = None,
    lr: opt.LearningRate = None,
    memory: opt.Memory = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory; default STREAM-METHOD-SEED in runs, plus a hash if anything is changed. For several "
            "runs: the folder for their directories."
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a finished run to continue with further domains, which --targets names: only these are "
            "trained on, with the method and all settings of that run.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A model that `ratp adopt` took over: the run starts with it instead of training on the source."
        ),
    ] = None,
    subset: Annotated[bool, typer.Option("--subset", help="Allow an order that leaves out domains.")] = False,
    source: Annotated[Path | None, typer.Option(help="For `folders`: folder or zip of the labelled source.")] = None,
    targets: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="For `folders`: folders or zips of the targets, in order of arrival."),
    ] = None,
    unlabelled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="A target of your own, by path or name, to read without labels: all images in it, whatever its "
            "folders; repeatable.",
        ),
    ] = None,
    data: opt.Data = None,
    weights: opt.Weights = "auto",
    on_bad_image: opt.OnBadImage = "stop",
    extra_classes: opt.ExtraClasses = "stop",
    probe: opt.Probe = False,
    online: opt.Online = False,
    features: opt.Features = False,
    images: opt.Images = "auto",
    save_every: opt.SaveEvery = SAVE_EVERY,
    reuse_source: opt.ReuseSource = True,
    guard: opt.Guard = "auto",
    track: opt.Track = None,
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    jobs: opt.Jobs = "auto",
    side_by_side: opt.SideBySide = "auto",
    save_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all options to this .toml file and stop.")
    ] = None,
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    json_: opt.Json = False,
) -> None:
    """Train a method on a stream of domains. The same command continues an interrupted run.

    Several seeds, orders or methods run side by side in all combinations.

    With --after, a finished run continues with the next domain.
    """
    problems: list[str] = []

    def is_default(name: str) -> bool:
        return str(context.get_parameter_source(name)).endswith("DEFAULT")

    given = {"epochs": epochs, "steps": steps, "batch": batch, "size": size, "lr": lr, "memory": memory}
    request_changes = opt.parse_changes(changes, {**given, "backbone": backbone}, problems)
    own_backbone = None
    if (named := request_changes.get("network.backbone")) and split_file(named):
        own_backbone = request_changes.pop("network.backbone")
    at_once = parse_jobs(jobs, problems)
    if not save_every >= 0:
        problems.append(f"--save-every takes seconds, 0 or more, got {save_every:g}; e.g. --save-every 60.")
    methods = [name for given in methods or ["ratp"] for name in (METHODS if given == "all" else [given])]
    combinations = list(product(dict.fromkeys(methods), orders or ["default"], seeds or ["2022"]))
    if after is not None and len(combinations) > 1:
        problems.append("--after continues from one run: give one method, one order and one seed.")
    unchecked = (problems, request_changes, orders, unlabelled, after, preset not in PRESETS, on_bad_image != "stop")
    seeds_are_numbers = all(seed.isdecimal() for seed in seeds or ())
    usual = (guard, precision, extra_classes) == ("auto", "auto", "stop") and seeds_are_numbers
    if not any(unchecked) and usual and (weights in ("auto", "none", "imagenet") or Path(weights).is_file()):
        folders = [path for path in (source, *(targets or ())) if path is not None]
        refuse_unknown(stream, methods, device, folders)

    from ratp.executors.local import find_layout
    from ratp.runs.request import RunRequest
    from ratp.runs.run import Run
    from ratp.studies.execute import find_executor

    problems += problems_of(track) if track else []
    check_side_by_side(side_by_side, problems)
    check_images(images, problems)
    first, devices = parse_devices(device, precision, problems)
    with decoding(stderr(), quiet=quiet or json_) as progress:
        options, wrong = data_options(data, on_bad_image, extra_classes, progress)
        requests = [
            RunRequest(
                stream=stream,
                method=method,
                order=order,
                preset=preset,
                seed=seed,
                changes=request_changes,
                subset=subset,
                device=first,
                precision=precision,
                source=source,
                targets=tuple(targets or ()),
                unlabelled=tuple(unlabelled or ()),
                data=options,
                weights=weights,
                guard=guard,
                online=online,
                model=model,
                backbone=own_backbone,
            )
            for method, order, seed in combinations
        ]
        if after is not None and source is None and not problems and is_default("stream"):
            if not targets:
                raise ConfigError(f"--after {after} needs the new domains: --targets FOG")
            requests = [_inherited(requests[0], after, is_default)]
        plans = resolve_all(requests, [*problems, *wrong])
        is_plain = len(plans) == 1 and side_by_side == "auto"
        layout = None if is_plain else find_layout(plans, devices, at_once, side_by_side)
        if save_config is not None:
            save(save_config, context)
            say(f"Written: {save_config}. Next: ratp run {shlex.quote(str(save_config))}")
            return
        how: dict[str, Any] = {"probe": probe, "features": features, "reuse_source": reuse_source}
        how |= {"save_every": save_every or None, "images": images}
        if len(plans) == 1:
            folder = out or _default_folder(plans[0], continued=after is not None)
            current = Run(plans[0], folder, after=after, **how)
        else:
            folders = [_default_folder(plan) for plan in plans]
            several = prepare_all(plans, [out / folder.name for folder in folders] if out else folders, **how)
    from ratp.cli.planned import show_plan
    from ratp.runs.directory import check_folder

    if len(plans) == 1 and not dry_run:
        check_folder(current.folder, current.config)
    is_heard = not quiet and not json_
    planned = []
    if dry_run or is_heard:
        shown = [current] if len(plans) == 1 else several
        planned = show_plan(
            shown, stderr(), at_once=at_once, apart=not devices, dry=dry_run, json_=json_, layout=layout
        )
    if dry_run:
        return
    if len(plans) > 1:
        with track_all(several, track) if track else nullcontext() as tracking:
            tell = say_layout if is_heard else None
            executor = find_executor(devices=devices, side_by_side=side_by_side, on_layout=tell)
            _run_several(several, out, at_once, executor, quiet=quiet, json_=json_, tracking=tracking)
        return
    if not json_:
        print_notes(current.stream, stderr(), brief=quiet)
    from ratp.cli.progress import follow
    from ratp.runs.plan import with_current_defaults

    weights_of_stages = planned[0].weights if planned else None
    with track_all([current], track) if track else nullcontext() as tracking:
        follow(current, stderr(), quiet=quiet or json_, weights=weights_of_stages, also=tracking and tracking.see)
    record = current.record()
    if json_:
        print_json(record.to_json())
    elif quiet:
        _print_rollbacks([record])
    else:
        from ratp.reports.tables import print_report

        print_report([with_current_defaults(record)], stdout())
        for path in current.predictions:
            say(f"Predictions: {path}")
        say(f"Run directory: {current.folder}")
        say_tracked(tracking)
        place = shlex.quote(str(current.folder))
        own = f", or ratp predict {place} IMAGES" if current.plan.spec.values == FOLDERS else ""
        say(f"Next: ratp report {place}{own}")


def _inherited(request: RunRequest, after: Path, is_default: Callable[[str], bool]) -> RunRequest:
    """Returns a request with everything from an earlier run that was not given."""
    from ratp.runs.continuation import inherited

    found = inherited(request, after)
    given = {"method": "methods", "seed": "seeds", "preset": "preset", "weights": "weights", "guard": "guard"}
    return replace(found, **{name: getattr(request, name) for name, option in given.items() if not is_default(option)})


def _run_several(
    runs: Sequence[Run],
    out: Path | None,
    at_once: int | None,
    on: Executor,
    *,
    quiet: bool,
    json_: bool,
    tracking: Tracking | None,
) -> None:
    """Executes runs side by side, compares them and says where they are; failures come last."""
    from ratp.cli.progress import follow_all

    if not json_:
        said = []
        for current in runs:
            about = (current.stream.notes, current.stream.origins, tuple(current.stream.files))
            if about not in said:
                said.append(about)
                print_notes(current.stream, stderr(), brief=quiet)
    results = follow_all(runs, stderr(), quiet=quiet or json_, at_once=at_once, on=on, also=tracking and tracking.see)
    records, failed = split(runs, results)
    if json_:
        errors = [{"folder": str(current.folder), "error": str(error)} for current, error in failed]
        print_json({"runs": [record.to_json() for record in records], "failed": errors})
    elif quiet:
        _print_rollbacks(records)
    elif records:
        from ratp.reports.tables import print_report

        print_report(records, stdout())
        for path in (path for current in runs for path in current.predictions if path.exists()):
            say(f"Predictions: {path}")
        folders = [out] if out is not None and not failed else [record.path for record in records]
        say_tracked(tracking)
        say(f"Next: ratp report {shlex.join(map(str, folders))}")
    fail(failed)


def _print_rollbacks(records: Sequence[RunRecord]) -> None:
    """Reports what the guard rolled back, even with --quiet."""
    for record in records:
        for what in record.rollbacks:
            print_note(f"{record.path}: the guard rolled back {what}.", stderr())


def split(
    runs: Sequence[Run], results: Sequence[RunRecord | RatpError]
) -> tuple[list[RunRecord], list[tuple[Run, RatpError]]]:
    """Separates the records of finished runs from the errors of the others."""
    from ratp.runs.plan import with_current_defaults

    records = [with_current_defaults(result) for result in results if isinstance(result, RunRecord)]
    failed = [(run, error) for run, error in zip(runs, results, strict=True) if isinstance(error, RatpError)]
    return records, failed


def fail(failed: Sequence[tuple[Run, RatpError]]) -> None:
    """Prints the errors of failed runs and exits with code 2, if there are any."""
    for current, error in failed:
        print_error(f"{current.folder}: {error}")
    if failed:
        raise typer.Exit(2)


def resolve_all(requests: Sequence[RunRequest], problems: Sequence[str] = ()) -> list[RunPlan]:
    """Resolves all requests, or raises the mistakes of all of them together."""
    from ratp.runs.plan import resolve

    plans: list[RunPlan] = []
    found: dict[str, list[RunRequest]] = {problem: [] for problem in problems}
    for request in requests:
        try:
            plans.append(resolve(request))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(request)
    if found:
        known, listed = {request.method for request in requests}, []
        for problem, where in found.items():  # prefixed with its methods, unless it concerns all of them
            methods = {request.method for request in where}
            listed.append(f"{', '.join(sorted(methods))}: {problem}" if methods not in (set(), known) else problem)
        raise ConfigError(listed)
    return plans


def prepare_all(plans: Sequence[RunPlan], folders: Sequence[Path], **how: Any) -> list[Run]:
    """Prepares a run per plan and loads its images, or raises everything that is wrong."""
    from ratp.runs.run import Run

    runs: list[Run] = []
    problems: list[str] = []
    repeated = {str(folder) for folder in folders if list(folders).count(folder) > 1}
    if repeated:
        names = ", ".join(sorted(repeated))
        raise ConfigError(f"the same run is requested twice: {names}. Give every seed, order and method once.")
    for plan, folder in zip(plans, folders, strict=True):
        try:
            runs.append(Run(plan, folder, **how))
        except ConfigError as error:
            problems += error.problems
        except RatpError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def _default_folder(plan: RunPlan, *, continued: bool = False) -> Path:
    """The default run directory: a plain name for a benchmark with default settings, else one with a hash."""
    hashed = f"{safe_name(plan.title)}-{plan.digest()[:8]}"
    if continued:
        return Path("runs") / f"{hashed}-{CONTINUED}"
    usual = not plan.changed and plan.preset == DEFAULT_PRESET and plan.order == plan.spec.orders["default"]
    return Path("runs") / (plan.title if usual and not plan.spec.values else hashed)
