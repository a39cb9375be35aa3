"""``ratp import-weights``: converts a checkpoint to a file that is safe to read."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ratp.cli.console import print_json, say, stdout
from ratp.cli.options import Json


def import_weights(
    file: Annotated[Path, typer.Argument(help="The checkpoint: .pth, .pt, .bin, …", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.", show_default=False)],
    backbone: Annotated[
        str | None,
        typer.Option(help="Backbone it is for: dtn, resnet18, resnet50, resnet101 or timm:NAME.", show_default="found"),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite the file if it exists.")] = False,
    json_: Json = False,
) -> None:
    """Take a backbone's weights out of a checkpoint, without running anything in it."""
    from ratp.networks.torch_checkpoint import import_checkpoint
    from ratp.networks.weight_matching import abbreviate

    result = import_checkpoint(file, out, backbone, replace=replace)
    if json_:
        print_json({"file": str(out), **asdict(result)})
        return
    ignored = f"{len(result.ignored)} ({abbreviate(result.ignored)})" if result.ignored else "none"
    kept = f"{len(result.kept)} tensors"
    lines = {"backbone": result.backbone, "kept": kept, "ignored": ignored, "sha256": result.sha256}
    for what, text in {**lines, "written": str(out)}.items():
        stdout().print(f"{what:<9}{text}", markup=False, soft_wrap=True)
    say(f"Train from it: --set network.backbone={result.backbone} --weights {shlex.quote(str(out))}")
