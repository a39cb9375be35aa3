"""``ratp run`` and ``ratp demo``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ratp.cli.console import print_json, say, stderr, stdout
from ratp.cli.loading import data_options, decoding, print_notes
from ratp.cli.progress import follow
from ratp.errors import ConfigError
from ratp.files import safe_name
from ratp.plan import DEFAULT_PRESET, RunPlan, RunRequest, resolve
from ratp.run import Run

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, to standard output.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of the benchmarks' images; default $RATP_DATA, else data.", show_default=False),
]
OnBadImage = Annotated[
    str, typer.Option("--on-bad-image", help="Files that are no usable images: stop with their names, or skip them.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, … or auto.")]
Probe = Annotated[
    bool,
    typer.Option(
        "--probe/--no-probe", help="Measure the new domain after every epoch of its stage. Changes no result."
    ),
]


def run(
    stream: Annotated[
        str,
        typer.Argument(
            help="Name of the stream (`ratp streams` lists them), a .toml file, a folder of domains, or `folders`."
        ),
    ] = "demo",
    method: Annotated[
        str, typer.Option("--method", "-m", help="Name of the method, or a .py file that defines one.")
    ] = "ratp",
    order: Annotated[
        str, typer.Option(help="Order of the domains: a name, or e.g. 'scan>photo>font>street'.")
    ] = "default",
    preset: Annotated[str, typer.Option(help="Switches to start from.")] = DEFAULT_PRESET,
    seed: Annotated[str, typer.Option(help="Seed of everything random.")] = "2022",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", help="Set a switch, e.g. --set pca.scale=8; repeatable. `ratp methods show NAME` lists them."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/STREAM-METHOD-SEED.")] = None,
    subset: Annotated[bool, typer.Option("--subset", help="Let the order leave domains out.")] = False,
    source: Annotated[Path | None, typer.Option(help="For `folders`: folder or zip of the labelled source.")] = None,
    targets: Annotated[
        list[Path] | None,
        typer.Option(help="For `folders`: folders or zips of the targets, one after another as they arrive."),
    ] = None,
    data: Data = None,
    weights: Annotated[
        str,
        typer.Option(
            help="What the feature extractor starts from: a .safetensors file, imagenet, none, or auto: "
            "$RATP_WEIGHTS if set, else what is usual for it.",
        ),
    ] = "auto",
    on_bad_image: OnBadImage = "stop",
    extra_classes: Annotated[
        str, typer.Option(help="Classes of a target that the source does not have: stop, or drop their images.")
    ] = "stop",
    probe: Probe = False,
    device: Device = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Train a method on a stream of domains. The same command continues an interrupted run."""
    request_changes, problems = _parse_changes(changes or [])
    with decoding(stderr(), quiet=quiet or json_) as progress:
        try:
            options, wrong = data_options(data, on_bad_image, extra_classes, progress)
            problems += wrong
            request = RunRequest(
                stream=stream,
                method=method,
                order=order,
                preset=preset,
                seed=seed,
                changes=request_changes,
                subset=subset,
                device=device,
                source=source,
                targets=tuple(targets or ()),
                data=options,
                weights=weights,
            )
            plan = resolve(request)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from error
        if problems:
            raise ConfigError(problems)
        current = Run(plan, out or _default_folder(plan), probe=probe)
    if not (quiet or json_):
        print_notes(current.stream, stderr())
    follow(current, stderr(), quiet=quiet or json_)
    record = current.record()
    if json_:
        print_json(record.to_json())
    elif not quiet:
        from ratp.report.terminal import print_report

        print_report([record], stdout())
        for path in current.predictions:
            say(f"Predictions: {path}")
        say(f"Run directory: {current.folder}")
        say(f"Next: ratp report {shlex.quote(str(current.folder))}")


def demo(
    seeds: Annotated[list[str] | None, typer.Option("--seed", help="Seed; repeatable. Default 2022.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    probe: Probe = True,
    device: Device = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Run RaTP and source-only on the embedded stream and compare them."""
    from ratp.report.page import write_report
    from ratp.report.terminal import print_report

    requests = [RunRequest(method=m, seed=s, device=device) for s in seeds or ["2022"] for m in ("source-only", "ratp")]
    records = []
    for plan in _resolve_all(requests):
        current = Run(plan, out / f"{plan.method.name}-{plan.seed}", probe=probe)
        follow(current, stderr(), quiet=quiet or json_)
        records.append(current.record())
    page = write_report(records, out / "report")
    if json_:
        print_json({"runs": [record.to_json() for record in records], "report": str(page)})
    elif not quiet:
        print_report(records, stdout())
        say(f"Report: {page}")


def _resolve_all(requests: list[RunRequest]) -> list[RunPlan]:
    """All requests resolved, or the mistakes of all of them."""
    plans: list[RunPlan] = []
    problems: list[str] = []
    for request in requests:
        try:
            plans.append(resolve(request))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return plans


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


def _default_folder(plan: RunPlan) -> Path:
    """A folder of its own for every plan, with a plain name for the usual one of a benchmark."""
    usual = not plan.changed and plan.preset == DEFAULT_PRESET and plan.order == plan.spec.orders["default"]
    if usual and not plan.spec.values:
        return Path("runs") / plan.title
    return Path("runs") / f"{safe_name(plan.title)}-{plan.digest()[:8]}"
