"""``ratp predict``: classify images with a trained run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratp._core.locks import LOCK_FILE
from ratp.cli import console
from ratp.cli.console import check_out, data_options, decoding, print_json, print_note, say, stderr, write_out
from ratp.cli.options import Json, MethodFile, OnBadImage, OwnBackbone, Quiet
from ratp.data.cache.manifest import describe_skipped
from ratp.data.read.listing import describe_unsupported
from ratp.data.read.paths import is_given
from ratp.errors import ConfigError, RatpError

if TYPE_CHECKING:
    from ratp.runs.load import FilePredictions, LoadedRun

# Names of a run's own files, which --out must not overwrite or imitate.
_OF_A_RUN = ("*.safetensors", "*.json", "*.jsonl", "predictions-*.csv", LOCK_FILE)


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    images: Annotated[
        list[Path], typer.Argument(help="Files, folders with all that is below them, and zips.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="CSV file to write; default, and -: standard output.", show_default=False)
    ] = None,
    method: MethodFile = None,
    backbone: OwnBackbone = None,
    on_bad_image: OnBadImage = "stop",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, mps or auto.")] = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Classify images with a trained run: file, class and confidence, in the order given.

    Only the run directory is needed. Images are read, and the method predicts, as in the run.
    """
    options, problems = data_options(None, on_bad_image, "stop", None)
    if problems:
        raise ConfigError(problems)
    if out is not None:
        check_out(out, "what --json prints" if json_ else "")
        refuse_to_lose(out, run, images if method is None else [*images, method])
    from ratp.runs.load import load
    from ratp.runs.predictions import as_csv

    loaded = load(run, device=device, method=method, backbone=backbone)
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
        console.print_text(table)


def refuse_to_lose(out: Path, run: Path, given: Sequence[Path]) -> None:
    """Raises RatpError if ``out`` is a file the command reads."""
    folder, name = os.path.split(os.path.realpath(out))
    if folder == os.path.realpath(run) and any(fnmatch(name.lower(), pattern) for pattern in _OF_A_RUN):
        raise RatpError(f"cannot write {out}: a file of the run {run} has that name. Choose another with --out.")
    if is_given(out, given):
        raise RatpError(f"cannot write {out}: it is one of the files to read. Choose another with --out.")


def _print_notes(loaded: LoadedRun, found: FilePredictions) -> None:
    from ratp.methods.shared.online import SMALLEST_BATCH

    if found.left_out:
        print_note(describe_skipped(found.left_out), stderr())
    if found.unsupported:
        print_note(describe_unsupported(name for name, _ in found.unsupported), stderr())
    count = len(found.predictions)
    if loaded.together and count < SMALLEST_BATCH:
        why = f"{loaded.config['method']} predicts from the statistics of all images given"
        print_note(f"{why}, and {count} are few: give {SMALLEST_BATCH} or more at once.", stderr())


def _as_json(loaded: LoadedRun, found: FilePredictions) -> dict[str, object]:
    rows = ({"file": file, "class": label, "confidence": share} for file, label, share in found.predictions)
    return {
        "run": str(loaded.path),
        "method": loaded.config["method"],
        "stages": list(loaded.stages),
        "classes": list(loaded.classes),
        "predictions": list(rows),
        "left_out": [{"file": name, "reason": reason} for name, reason in (*found.left_out, *found.unsupported)],
    }
