"""``ratp run`` and ``ratp demo``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ratp.changed import by_now
from ratp.cli.console import print_json, say, stderr, stdout
from ratp.cli.loading import data_options, decoding, print_note, print_notes
from ratp.cli.progress import follow, follow_all
from ratp.errors import ConfigError, RatpError
from ratp.files import safe_name
from ratp.methods import METHODS
from ratp.on_devices import find_devices
from ratp.plan import RunPlan, resolve
from ratp.record import CONTINUED, RunRecord
from ratp.request import DEFAULT_PRESET, RunRequest
from ratp.run import SAVE_EVERY, Run
from ratp.streams.own import NAME as FOLDERS
from ratp.study import Executor, find_executor

DEMO_METHODS = ("source-only", "ratp")

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print neither progress nor results, only what may be amiss.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, to standard output.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of the benchmarks' images; default $RATP_DATA, else data.", show_default=False),
]
OnBadImage = Annotated[
    str, typer.Option("--on-bad-image", help="Files that are no usable images: stop with their names, or skip them.")
]
ExtraClasses = Annotated[
    str, typer.Option(help="Classes of a target that the source does not have: stop, or drop their images.")
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, cuda:1, … or auto. Several runs use all GPUs with cuda and auto, or those of a list: "
        "cuda:0,cuda:2.",
    ),
]
Jobs = Annotated[
    str,
    typer.Option(
        "--jobs",
        "-j",
        help="How many runs to make at once, with several devices on each; auto: all cores, on a GPU 8 with DTN.",
    ),
]
Precision = Annotated[
    str, typer.Option(help="How a GPU multiplies: fp32, tf32, bf16, or auto: tf32 where there is one.")
]
Weights = Annotated[
    str,
    typer.Option(
        help="What the feature extractor starts from: a .safetensors file, imagenet, none, or auto: "
        "$RATP_WEIGHTS if set, else what is usual for it.",
    ),
]
Probe = Annotated[
    bool,
    typer.Option(
        "--probe/--no-probe", help="Measure the new domain after every epoch of its stage. Changes no result."
    ),
]
SaveEvery = Annotated[
    float,
    typer.Option(
        "--save-every",
        metavar="SEC",
        help="Seconds between two checkpoints within a stage; 0: stages are the only ones. Changes no result.",
    ),
]
Features = Annotated[
    bool,
    typer.Option(
        "--features",
        help="Keep embeddings of some test images after every stage; the report draws them. Changes no result.",
    ),
]
Guard = Annotated[
    str,
    typer.Option(
        "--guard",
        help="Judge every target stage without labels: act undoes one that ruins the model or whose images are none, "
        "record only notes it, off does neither; auto: act on own images, else record.",
    ),
]
ReuseSource = Annotated[
    bool,
    typer.Option(
        "--reuse-source/--no-reuse-source",
        help="Take the network an earlier run trained on the same source in the same way. Changes no result.",
    ),
]


def run(
    stream: Annotated[
        str,
        typer.Argument(
            help="Name of the stream (`ratp streams` lists them), a .toml file, a folder of domains, or `folders`."
        ),
    ] = "demo",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="Name of the method, a .py file that defines one, or all; repeatable. Default ratp.",
        ),
    ] = None,
    orders: Annotated[
        list[str] | None,
        typer.Option(
            "--order",
            metavar="NAME",
            help="Order of the domains: a name, or e.g. 'scan>photo>font>street'; repeatable.",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="Switches to start from.")] = DEFAULT_PRESET,
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
            help="Set a switch, e.g. --set pca.scale=8; repeatable. `ratp methods show NAME` lists them.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory; default runs/STREAM-METHOD-SEED, with a hash if anything is changed. Of several runs: "
            "the folder for their directories."
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a finished run to go on from: its order is the beginning of this one's, and only the "
            "new domains are trained on.",
        ),
    ] = None,
    subset: Annotated[bool, typer.Option("--subset", help="Let the order leave domains out.")] = False,
    source: Annotated[Path | None, typer.Option(help="For `folders`: folder or zip of the labelled source.")] = None,
    targets: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="For `folders`: folders or zips of the targets, one after another as they arrive."
        ),
    ] = None,
    unlabelled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Target of your own, by path or name, whose folders are no classes: all images below it, without "
            "labels; repeatable.",
        ),
    ] = None,
    data: Data = None,
    weights: Weights = "auto",
    on_bad_image: OnBadImage = "stop",
    extra_classes: ExtraClasses = "stop",
    probe: Probe = False,
    features: Features = False,
    save_every: SaveEvery = SAVE_EVERY,
    reuse_source: ReuseSource = True,
    guard: Guard = "auto",
    device: Device = "auto",
    precision: Precision = "auto",
    jobs: Jobs = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Train a method on a stream of domains. The same command continues an interrupted run.

    Several seeds, orders or methods are run side by side in all their combinations.

    A finished run takes the next domain with --after.
    """
    request_changes, problems = _parse_changes(changes or [])
    at_once = parse_jobs(jobs, problems)
    first, devices = parse_devices(device, precision, problems)
    if not save_every >= 0:
        problems.append(f"--save-every takes seconds, 0 or more, got {save_every:g}; e.g. --save-every 60.")
    methods = [name for given in methods or ["ratp"] for name in (METHODS if given == "all" else [given])]
    combinations = list(product(dict.fromkeys(methods), orders or ["default"], seeds or ["2022"]))
    if after is not None and len(combinations) > 1:
        problems.append("--after names one run to go on from: give one method, one order and one seed.")
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
            )
            for method, order, seed in combinations
        ]
        plans = _resolve_all(requests, [*problems, *wrong])
        how: dict[str, Any] = {
            "probe": probe,
            "features": features,
            "reuse_source": reuse_source,
            "save_every": save_every or None,
        }
        if len(plans) == 1:
            folder = out or _default_folder(plans[0], continued=after is not None)
            current = Run(plans[0], folder, after=after, **how)
        else:
            several = _prepare_all(plans, _folders(plans, out), **how)
    if len(plans) > 1:
        _run_several(several, out, at_once, find_executor(devices=devices), quiet=quiet, json_=json_)
        return
    if not json_:
        print_notes(current.stream, stderr(), brief=quiet)
    follow(current, stderr(), quiet=quiet or json_)
    record = current.record()
    if json_:
        print_json(record.to_json())
    elif quiet:
        _tell_rollbacks([record])
    else:
        from ratp.report.terminal import print_report

        print_report([by_now(record)], stdout())
        for path in current.predictions:
            say(f"Predictions: {path}")
        say(f"Run directory: {current.folder}")
        place = shlex.quote(str(current.folder))
        own = f", or ratp predict {place} IMAGES" if current.plan.spec.values == FOLDERS else ""
        say(f"Next: ratp report {place}{own}")


def _run_several(
    runs: Sequence[Run], out: Path | None, at_once: int | None, on: Executor, *, quiet: bool, json_: bool
) -> None:
    """Makes runs side by side, compares them and says where they are; those that failed come last."""
    if not json_:
        said = []
        for current in runs:
            about = (current.stream.notes, current.stream.origins, tuple(current.stream.files))
            if about not in said:
                said.append(about)
                print_notes(current.stream, stderr(), brief=quiet)
    records, failed = _sorted_out(runs, follow_all(runs, stderr(), quiet=quiet or json_, at_once=at_once, on=on))
    if json_:
        errors = [{"folder": str(current.folder), "error": str(error)} for current, error in failed]
        print_json({"runs": [record.to_json() for record in records], "failed": errors})
    elif quiet:
        _tell_rollbacks(records)
    elif records:
        from ratp.report.terminal import print_report

        print_report(records, stdout())
        for path in (path for current in runs for path in current.predictions if path.exists()):
            say(f"Predictions: {path}")
        folders = [out] if out is not None and not failed else [record.path for record in records]
        say(f"Next: ratp report {shlex.join(map(str, folders))}")
    _tell_failures(failed)


def _tell_rollbacks(records: Sequence[RunRecord]) -> None:
    """Says what the guard undid, where nothing else does."""
    for record in records:
        for what in record.rollbacks:
            print_note(f"{record.path}: the guard rolled back {what}.", stderr())


def _sorted_out(
    runs: Sequence[Run], results: Sequence[RunRecord | RatpError]
) -> tuple[list[RunRecord], list[tuple[Run, RatpError]]]:
    """Records of the runs that came to their end, and the others with their errors."""
    records = [by_now(result) for result in results if isinstance(result, RunRecord)]
    failed = [(run, error) for run, error in zip(runs, results, strict=True) if isinstance(error, RatpError)]
    return records, failed


def _tell_failures(failed: Sequence[tuple[Run, RatpError]]) -> None:
    """Ends the program with an error for every run that failed, if any did."""
    for current, error in failed:
        stderr().print(f"[bold red]error:[/] {escape(f'{current.folder}: {error}')}", soft_wrap=True)
    if failed:
        raise typer.Exit(2)


def demo(
    seeds: Annotated[
        list[str] | None, typer.Option("--seed", metavar="N", help="Seed; repeatable. Default 2022.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    probe: Probe = True,
    device: Device = "auto",
    jobs: Jobs = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Run RaTP and source-only on the embedded stream and compare them. Several seeds are run side by side."""
    from ratp.report.page import write_report
    from ratp.report.terminal import print_report

    problems: list[str] = []
    at_once = parse_jobs(jobs, problems)
    first, devices = parse_devices(device, "auto", problems)
    requests = [RunRequest(method=m, seed=s, device=first) for s in seeds or ["2022"] for m in DEMO_METHODS]
    plans = _resolve_all(requests, problems)
    runs = _prepare_all(plans, [out / f"{plan.method.name}-{plan.seed}" for plan in plans], probe=probe)
    if len(runs) == len(DEMO_METHODS) and at_once is None and "," not in device:
        for current in runs:
            follow(current, stderr(), quiet=quiet or json_)
        results: list[RunRecord | RatpError] = [current.record() for current in runs]
    else:
        executor = find_executor(devices=devices)
        results = follow_all(runs, stderr(), quiet=quiet or json_, at_once=at_once, on=executor)
    records, failed = _sorted_out(runs, results)
    page = write_report(records, out / "report") if records else None
    if json_:
        print_json({"runs": [record.to_json() for record in records], "report": str(page) if page else None})
    elif not quiet and records:
        print_report(records, stdout())
        say(f"Report: {page}")
    _tell_failures(failed)


def _resolve_all(requests: Sequence[RunRequest], problems: Sequence[str] = ()) -> list[RunPlan]:
    """All requests resolved, or the mistakes of all of them, after those known already."""
    plans: list[RunPlan] = []
    found: dict[str, list[RunRequest]] = {problem: [] for problem in problems}
    for request in requests:
        try:
            plans.append(resolve(request))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(request)
    if found:
        known = {request.method for request in requests}
        raise ConfigError([_of_method(problem, {r.method for r in where}, known) for problem, where in found.items()])
    return plans


def _of_method(problem: str, methods: set[str], known: set[str]) -> str:
    """A mistake, with the methods it is one of if it is not one of all."""
    return f"{', '.join(sorted(methods))}: {problem}" if methods and methods != known else problem


def _prepare_all(plans: Sequence[RunPlan], folders: Sequence[Path], **how: Any) -> list[Run]:
    """A run for every plan, made as ``how`` says, with its images loaded; or all that hinders them."""
    runs: list[Run] = []
    problems: list[str] = []
    repeated = {str(folder) for folder in folders if list(folders).count(folder) > 1}
    if repeated:
        names = ", ".join(sorted(repeated))
        raise ConfigError(f"the same run is asked for twice: {names}. Give every seed, order and method once.")
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


def _folders(plans: Sequence[RunPlan], out: Path | None) -> list[Path]:
    """A folder for each of several plans: as for one, or inside the one asked for."""
    folders = [_default_folder(plan) for plan in plans]
    return folders if out is None else [out / folder.name for folder in folders]


def parse_jobs(jobs: str, problems: list[str]) -> int | None:
    """How many runs at once; None: as many as the device takes. A mistake is added to ``problems``."""
    if jobs.strip() == "auto":
        return None
    if jobs.strip().isdecimal() and int(jobs) > 0:
        return int(jobs)
    problems.append(f"--jobs takes auto or a number of runs, 1 or more, got {jobs!r}; e.g. --jobs 4.")
    return None


def parse_devices(device: str, precision: str, problems: list[str]) -> tuple[str, tuple[torch.device, ...]]:
    """The device that plans are made for, and all of them if they are several. Mistakes are added to ``problems``."""
    try:
        return device.partition(",")[0].strip(), find_devices(device, precision)
    except ConfigError as error:
        problems += error.problems
        return "auto", ()


def _parse_changes(items: list[str]) -> tuple[dict[str, str], list[str]]:
    changes: dict[str, str] = {}
    problems = []
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set takes NAME=VALUE, got {item!r}; e.g. --set pca.scale=8.")
        elif name.strip() in changes:
            problems.append(f"--set gives {name.strip()!r} twice.")
        else:
            changes[name.strip()] = value
    return changes, problems


def _default_folder(plan: RunPlan, *, continued: bool = False) -> Path:
    """A folder of its own for every plan, with a plain name for the usual one of a benchmark."""
    if continued:
        return Path("runs") / f"{safe_name(plan.title)}-{plan.digest()[:8]}-{CONTINUED}"
    usual = not plan.changed and plan.preset == DEFAULT_PRESET and plan.order == plan.spec.orders["default"]
    if usual and not plan.spec.values:
        return Path("runs") / plan.title
    return Path("runs") / f"{safe_name(plan.title)}-{plan.digest()[:8]}"
