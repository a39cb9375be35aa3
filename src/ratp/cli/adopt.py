"""``ratp adopt``: takes over a classifier that was trained elsewhere."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ratp._core.user_code import split_file
from ratp.cli.console import print_json, say
from ratp.cli.options import Json
from ratp.errors import ConfigError


def adopt(
    checkpoint: Annotated[
        Path, typer.Argument(help="Its checkpoint: .safetensors, or .pth and the like.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.", show_default=False)],
    backbone: Annotated[
        str,
        typer.Option(
            help="The kind of model: timm:NAME, torchvision:NAME, or FILE.py:NAME of your own class, whose code is "
            "executed.",
            show_default=False,
        ),
    ],
    classes: Annotated[
        str,
        typer.Option(
            help="Names of its classes in the order of its outputs, separated by commas; or a text file with one per "
            "line; or a folder with a folder per class, in alphabetical order.",
            show_default=False,
        ),
    ],
    head: Annotated[
        str | None,
        typer.Option(help="Name of its last layer, if that is not found by itself.", show_default=False),
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Side of its images, if not its kind's usual one. Your own class needs one.")
    ] = None,
    mean: Annotated[
        tuple[float, float, float] | None, typer.Option(help="Channel means, if not its kind's usual ones.")
    ] = None,
    std: Annotated[
        tuple[float, float, float] | None, typer.Option(help="Channel deviations, if not its kind's usual ones.")
    ] = None,
    json_: Json = False,
) -> None:
    """Take over a classifier that was trained elsewhere, head and preprocessing included.

    The result starts runs instead of training on the source: ratp run folders --model FILE.
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"the file to write must end in .safetensors, got {str(out)!r}.")
    from ratp.networks.adopted import adopt as take_over

    found = take_over(checkpoint, _names(classes), backbone=backbone, size=size, mean=mean, std=std, head=head)
    found.save(out)
    if json_:
        about = {"classes": list(found.classes), "size": found.size, "mean": found.mean, "std": found.std}
        print_json({"model": str(out), **about, "difference": found.difference})
        return
    say(f"{out}: {backbone}, {len(found.classes)} classes, images of {found.size}×{found.size}.")
    say(f"Its answers differ from the original's by at most {found.difference:.0e} of the largest logit.")
    own = f" --backbone {shlex.quote(backbone)}" if split_file(backbone) else ""
    say(f"Next: ratp run folders --model {shlex.quote(str(out))}{own} --source LABELLED --targets RAIN NIGHT -m tent")


def _names(given: str) -> list[str]:
    path = Path(given)
    if path.is_dir():
        return sorted(item.name for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))
    if path.is_file():
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [name.strip() for name in given.split(",")]
