"""``ratp export``: write a trained model to a file that runs without ratp."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ratp.cli.console import (
    check_out,
    data_options,
    decoding,
    print_json,
    print_note,
    print_text,
    size_text,
    stderr,
    stdout,
)
from ratp.cli.options import Data, Json, MethodFile, OnBadImage, OwnBackbone, Quiet
from ratp.cli.predict import refuse_to_lose
from ratp.errors import ConfigError

if TYPE_CHECKING:
    from ratp.deploy.export import Exported

_IMAGE = """\
import json, numpy as np, {library}
from PIL import Image
image = Image.open("IMAGE.jpg").convert("RGB").resize(({width}, {height}), Image.Resampling.BILINEAR)
batch = np.asarray(image).transpose(2, 0, 1)[None]  # uint8, shape (1, 3, {height}, {width})
"""
_USE = {
    "onnx": """\
session = onnxruntime.InferenceSession({file!r})
probabilities, logits = session.run(None, {{"images": batch}})
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
print(classes[int(probabilities.argmax())], float(probabilities.max()))
""",
    "torch": """\
about = {{"ratp.json": ""}}
model = torch.export.load({file!r}, extra_files=about).module()
probabilities, logits = model(torch.tensor(batch))
classes = json.loads(json.loads(about["ratp.json"])["classes"])
print(classes[int(probabilities.argmax())], float(probabilities.max()))
""",
}
_LIBRARIES = {"onnx": "onnxruntime", "torch": "torch"}


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run or of a deployment.", show_default=False)],
    to: Annotated[str, typer.Option(help="Format: onnx, or torch for a program of torch.export.")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; default: the directory's name with .onnx or .pt2.", show_default=False),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="File, folder or zip of images to compare the file with ratp on; repeatable. Default: those of a "
            "built-in stream or a deployment, else random ones.",
            show_default=False,
        ),
    ] = None,
    labelled: Annotated[
        Path | None,
        typer.Option(help="Folder or zip with one folder per class, to measure accuracies on.", show_default=False),
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Write a second file, in 16-bit floats.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Write a second file, in 8-bit integers.")] = False,
    data: Data = None,
    on_bad_image: OnBadImage = "stop",
    method: MethodFile = None,
    backbone: OwnBackbone = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Write a trained model to a file that runs without ratp, and check that it predicts the same.

    The file takes uint8 images and returns probabilities and logits; the normalisation is part of it.
    """
    from ratp.deploy.export import beside, check_request, default_path
    from ratp.deploy.export import export as write

    check_request(to, half=half, int8=int8)
    path = default_path(run, to) if out is None else out  # type: ignore[arg-type]  # checked above
    for place in (path, *(beside(path, kind) for kind, wanted in (("fp16", half), ("int8", int8)) if wanted)):  # type: ignore[arg-type]
        check_out(place, "text")
        refuse_to_lose(place, run, [*(images or ()), *([labelled] if labelled else [])])
    with decoding(stderr(), quiet=quiet or json_) as progress:
        options, problems = data_options(data, on_bad_image, "stop", progress)
        if problems:
            raise ConfigError(problems)
        found = write(
            run,
            path,
            to=to,  # type: ignore[arg-type]
            images=images or (),
            labelled=labelled,
            half=half,
            int8=int8,
            options=options,
            method=method,
            backbone=backbone,
        )
    if json_:
        print_json([{**asdict(file), "path": str(file.path)} for file in found])
    elif not quiet:
        _print(found, to)


def _print(found: tuple[Exported, ...], to: str) -> None:
    first = found[0]
    print_note(f"compared with ratp on {first.images} images: {first.origin}", stderr())
    table = Table("file", "", "size", "logits differ by", "same class", box=None, header_style="bold")
    for file in found:
        table.add_row(
            escape(str(file.path)),
            file.precision,
            size_text(file.size),
            f"{file.difference:.1e}",
            f"{file.agreement:.1%}",
        )
    stdout().print(table)
    if first.accuracy:
        table = Table("accuracy (%)", "ratp", *(file.precision for file in found), box=None, header_style="bold")
        for name, (before, _) in first.accuracy.items():
            table.add_row(escape(name), f"{before:.1f}", *(f"{file.accuracy[name][1]:.1f}" for file in found))
        stdout().print(table)
    elif len(found) > 1:
        print_note("labelled images would show what the smaller files cost: --labelled FOLDER", stderr())
    print_text(f"\n{_usage(to, str(first.path), *first.image_size)}")


def _usage(to: str, file: str, height: int, width: int) -> str:
    """Returns a program that uses the file."""
    text = _IMAGE + _USE[to]
    return text.format(library=_LIBRARIES[to], file=file, height=height, width=width)
