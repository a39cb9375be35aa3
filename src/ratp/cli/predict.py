"""``ratp predict``: what a trained run says about other images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ratp.cli.console import print_json, say, stderr
from ratp.cli.loading import data_options, decoding, print_note
from ratp.cli.output import check_out, print_text, write_out
from ratp.cli.runs import Json, OnBadImage, Quiet
from ratp.data.given import is_given
from ratp.data.manifest import describe_left_out
from ratp.data.passed_over import describe_passed_over
from ratp.errors import ConfigError, RatpError
from ratp.loaded import FilePredictions, LoadedRun, load
from ratp.lock import LOCK_FILE
from ratp.online import SMALLEST_BATCH
from ratp.predictions import as_csv

# What the files of a run are called; a table of that name would be lost, or taken for one of them.
_OF_A_RUN = ("*.safetensors", "*.json", "*.jsonl", "predictions-*.csv", LOCK_FILE)


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    images: Annotated[
        list[Path], typer.Argument(help="Files, folders with all that is below them, and zips.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="CSV file to write; default, and -: standard output.", show_default=False)
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
    if out is not None:
        check_out(out, "what --json prints" if json_ else "")
        _refuse_to_lose(out, run, images if method is None else [*images, method])
    loaded = load(run, device=device, method=method)
    with decoding(stderr(), quiet=quiet or json_) as report:
        progress = None if report is None else partial(report, "images")
        found = loaded.predict_files(images, on_bad=options.on_bad, progress=progress)
    if not json_:
        _print_notes(loaded, found)
    table = as_csv(found.predictions)
    if out is not None:
        write_out(out, table)
    if json_:
        print_json(_as_json(loaded, found))
    elif out is not None and not quiet:
        say(f"Predictions: {out}")
    elif out is None and not quiet:
        print_text(table)


def _refuse_to_lose(out: Path, run: Path, given: Sequence[Path]) -> None:
    """Refuses to write over what the command reads.

    Raises:
        RatpError: With the reason.
    """
    folder, name = os.path.split(os.path.realpath(out))
    if folder == os.path.realpath(run) and any(fnmatch(name.lower(), pattern) for pattern in _OF_A_RUN):
        raise RatpError(f"cannot write {out}: files of the run {run} are called so. Choose another file with --out.")
    if is_given(out, given):
        raise RatpError(
            f"cannot write {out}: it is one of the files given, and would be lost. Choose another with --out."
        )


def _print_notes(loaded: LoadedRun, found: FilePredictions) -> None:
    if found.left_out:
        print_note(describe_left_out(found.left_out), stderr())
    if found.passed_over:
        print_note(describe_passed_over(name for name, _ in found.passed_over), stderr())
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
        "left_out": [{"file": name, "reason": reason} for name, reason in (*found.left_out, *found.passed_over)],
    }
