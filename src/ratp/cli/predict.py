"""``ratp predict``: what a trained run says about other images."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ratp.cli.console import print_json, say, stderr
from ratp.cli.loading import data_options, decoding, print_note
from ratp.cli.runs import Json, OnBadImage, Quiet
from ratp.data.manifest import describe_left_out
from ratp.errors import ConfigError
from ratp.files import write_text
from ratp.loaded import FilePredictions, LoadedRun, load
from ratp.notes import harmless
from ratp.online import SMALLEST_BATCH
from ratp.predictions import as_csv


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    images: Annotated[
        list[Path], typer.Argument(help="Files, folders with all that is below them, and zips.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="CSV file to write; default: standard output.", show_default=False)
    ] = None,
    method: Annotated[
        Path | None,
        typer.Option(help="The .py file of the method, if it is one of your own. It is run.", show_default=False),
    ] = None,
    on_bad_image: OnBadImage = "stop",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, … or auto.")] = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Classify images by what a run has trained: file, class and confidence, in the order given.

    Nothing but the run directory is needed. Images are read as in the run, and its method predicts as it did there.
    """
    options, problems = data_options(None, on_bad_image, "stop", None)
    if problems:
        raise ConfigError(problems)
    loaded = load(run, device=device, method=method)
    with decoding(stderr(), quiet=quiet or json_) as report:
        progress = None if report is None else partial(report, "images")
        found = loaded.predict_files(images, on_bad=options.on_bad, progress=progress)
    if not (quiet or json_):
        _print_notes(loaded, found)
    table = as_csv(found.predictions)
    if out is not None:
        write_text(out, table)
    if json_:
        print_json(_as_json(loaded, found))
    elif out is not None and not quiet:
        say(f"Predictions: {out}")
    elif out is None and not quiet:
        print(harmless(table) if sys.stdout.isatty() else table, end="")


def _print_notes(loaded: LoadedRun, found: FilePredictions) -> None:
    if found.left_out:
        print_note(describe_left_out(found.left_out), stderr())
    count = len(found.predictions)
    if loaded.together and count < SMALLEST_BATCH:
        told = f"{loaded.config['method']} predicts by the statistics of the images it is asked about"
        print_note(f"{told}, and {count} are few: ask about {SMALLEST_BATCH} or more at once.", stderr())


def _as_json(loaded: LoadedRun, found: FilePredictions) -> dict[str, object]:
    rows = ({"file": file, "class": label, "confidence": share} for file, label, share in found.predictions)
    return {
        "run": str(loaded.path),
        "method": loaded.config["method"],
        "stages": list(loaded.stages),
        "classes": list(loaded.classes),
        "predictions": list(rows),
        "left_out": [{"file": name, "reason": reason} for name, reason in found.left_out],
    }
