"""``ratp deploy`` and ``ratp versions``: put a trained model into use, and list or restore its versions."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.table import Table

from ratp.cli.console import data_options, decoding, print_json, print_note, say, stderr, stdout
from ratp.cli.options import Data, Json, OnBadImage, OwnBackbone, Quiet
from ratp.errors import ConfigError

Deployed = Annotated[Path, typer.Argument(help="Directory of the deployment.", show_default=False)]


def deploy(
    run: Annotated[
        Path, typer.Argument(help="Directory of a trained run, or a file of `ratp adopt`.", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(help="New directory for the deployment.", show_default=False)],
    source: Annotated[
        Path | None,
        typer.Option(
            help="Folder or zip with labelled source images: the run's source, of which only the part held back for "
            "testing is used, or other images of its kind. They calibrate the alarm. Built-in streams need none. "
            "Without any, an adopted model takes the first images that it sees.",
            show_default=False,
        ),
    ] = None,
    adapt: Annotated[
        str,
        typer.Option(
            help="When to adapt to new kinds of images: never, ask (on request), auto (after an alarm), online "
            "(to every batch, with a method that can)."
        ),
    ] = "ask",
    at_least: Annotated[int, typer.Option(help="With --adapt auto: images a stage needs.")] = 256,
    save_every: Annotated[
        int, typer.Option(metavar="N", help="With --adapt online: windows of 64 images between two versions.")
    ] = 50,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of a stage; default: the run's.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per epoch; default: the run's.", show_default=False)] = None,
    data: Data = None,
    on_bad_image: OnBadImage = "stop",
    method: Annotated[
        str | None,
        typer.Option(
            help="For an adopted model: the method that adapts it. For a run of a custom method: its .py file, whose "
            "code is executed.",
            show_default=False,
        ),
    ] = None,
    backbone: OwnBackbone = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, mps or auto.")] = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Put a trained model into use: predict, watch for drift, adapt, go back.

    The deployment has a directory of its own, with every version of the model. Then: ratp watch, ratp serve.
    """
    from ratp.deploy.deployment import BASELINE, Deployment
    from ratp.deploy.settings import Settings
    from ratp.deploy.source import run_of_adopted, source_images
    from ratp.runs.load import load
    from ratp.streams.folders import NO_SOURCE

    changes = {name: value for name, value in {"epochs": epochs, "steps": steps}.items() if value is not None}
    settings = Settings(adapt, at_least, changes, save_every)  # type: ignore[arg-type]  # checked there
    with TemporaryDirectory() as place, decoding(stderr(), quiet=quiet or json_) as progress:
        options, problems = data_options(data, on_bad_image, "stop", progress)
        if run.is_file() and method is None:
            problems.append("an adopted model needs --method, the method that adapts it, e.g. tent.")
        if problems:
            raise ConfigError(problems)
        if run.is_file() and method:
            run_of_adopted(run, source, method, Path(place) / "run", options, device, backbone)
            trained, file = Path(place) / "run", Path(method) if method.endswith(".py") else None
        else:
            trained, file = run, Path(method) if method else None
        loaded = load(trained, device=device, method=file, backbone=backbone)
        has_none = source is None and loaded.config["order"][0] == NO_SOURCE
        images = None if has_none else source_images(loaded, source, options)
        how: dict[str, Any] = {"device": device, "method": file, "backbone": backbone}
        with Deployment.create(trained, folder, images, settings=settings, **how) as model:
            alarms = model.false_alarms
        if loaded.together:
            name = loaded.config["method"]
            text = f"{name} predicts from the statistics of all images given together: give it batches, never one image"
            print_note(text, stderr())
    if json_:
        known = {"images": len(images), "false_alarms": alarms} if images else {"images": 0, "false_alarms": None}
        print_json({"deployment": str(folder), "version": 1, **known})
    elif not quiet:
        say(f"{folder} holds version 1 of the model, from {run}.")
        if images is None:
            say(
                f"There are no source images: the first {BASELINE} images that it observes show what is usual. Until "
                "then, the alarm is off and nothing adapts. The guard then compares with the model's answers to them."
            )
        else:
            say(
                f"The alarm is calibrated on {len(images):,} source images that the run did not train on; "
                f"{alarms:.1%} of windows of such images raise it."
            )
        say(f"Next: ratp watch IMAGES --deployment {folder}")


def versions(
    folder: Deployed,
    rollback: Annotated[
        int | None, typer.Option(metavar="N", help="Let version N answer again.", show_default=False)
    ] = None,
    json_: Json = False,
) -> None:
    """List the versions of a deployed model, or let an earlier one answer again."""
    from ratp.deploy.store import Store, read_contents

    if rollback is not None:
        with closing(Store(folder)) as store:
            store.choose(rollback, "requested")
    contents = read_contents(folder)
    if json_:
        print_json({"current": contents.current, "versions": [asdict(version) for version in contents.versions]})
        return
    table = Table("", "version", "made", "images", "why", box=None, header_style="bold")
    for version in contents.versions:
        mark = "→" if version.number == contents.current else ""
        table.add_row(mark, str(version.number), version.made, _count(version.images), version.why)
    stdout().print(table)


def _count(images: int) -> Any:
    return f"{images:,}" if images else ""
