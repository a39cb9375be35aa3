"""Options that several commands share. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

# Options for the switches that people look for first; --set takes all others.
SHORTHANDS: Mapping[str, str] = {
    **{name: name for name in ("epochs", "steps", "batch", "size", "lr", "memory")},
    "backbone": "network.backbone",
}
Epochs = Annotated[str | None, typer.Option(metavar="N", help="Epochs of a stage; short for --set epochs=N.")]
Steps = Annotated[str | None, typer.Option(metavar="N", help="Steps of an epoch.")]
Batch = Annotated[str | None, typer.Option(metavar="N", help="Images in a batch.")]
Size = Annotated[str | None, typer.Option(metavar="N", help="Side of the images, in pixels.")]
Backbone = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Feature extractor: dtn, resnet18, resnet50, resnet101, timm:NAME, torchvision:NAME, or FILE.py:NAME of "
        "your own.",
    ),
]
LearningRate = Annotated[str | None, typer.Option("--lr", metavar="X", help="Initial learning rate of a stage.")]
Memory = Annotated[str | None, typer.Option(metavar="N", help="Images of all domains to keep for replay.")]

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print neither progress nor results, only warnings and errors.")
]
Json = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON, to standard output.")]
MethodFile = Annotated[
    Path | None,
    typer.Option(help="The .py file of a custom method. Its code is executed.", show_default=False),
]
OwnBackbone = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="A network of your own that the model was trained with. Its code is executed.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of the benchmarks' images; default $RATP_DATA, else data.", show_default=False),
]
OnBadImage = Annotated[
    str, typer.Option("--on-bad-image", help="If files are not usable images: stop and name them, or skip them.")
]
ExtraClasses = Annotated[
    str, typer.Option(help="If a target has classes the source lacks: stop, or drop their images.")
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, cuda:1, cuda:0,cuda:2, …, mps (Apple) or auto. Several runs share all GPUs with cuda and auto."
    ),
]
Jobs = Annotated[
    str, typer.Option("--jobs", "-j", help="Runs at once per device; auto: one per core, on a GPU as many as fit.")
]
SideBySide = Annotated[
    str,
    typer.Option(
        metavar="WAY",
        help="How several runs share a GPU: threads, processes, mps (processes under NVIDIA's MPS), off, or auto. "
        "Changes no result.",
    ),
]
Precision = Annotated[
    str, typer.Option(help="Precision of matrix products: fp32, tf32, bf16, or auto: tf32 on a GPU, else fp32.")
]
Weights = Annotated[
    str,
    typer.Option(
        help="Initial weights: a .safetensors file, imagenet, none, or auto: $RATP_WEIGHTS, else the backbone's."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done and how long it takes, and stop; writes nothing.")
]
Probe = Annotated[
    bool,
    typer.Option("--probe/--no-probe", help="Measure the new domain after every epoch. Changes no result."),
]
Online = Annotated[
    bool,
    typer.Option(
        "--online",
        help="Before each target stage, stream the target past a copy of the model once and measure its accuracy "
        "meanwhile. Changes no other result.",
    ),
]
SaveEvery = Annotated[
    float,
    typer.Option(metavar="SEC", help="Seconds between checkpoints; 0: only after each stage. Changes no result."),
]
Features = Annotated[
    bool,
    typer.Option("--features", help="Keep embeddings of test images for the report to draw. Changes no result."),
]
Images = Annotated[
    str,
    typer.Option(
        metavar="WHERE",
        help="Images of the domain in training: resident on the GPU, streamed to it batch by batch, or auto: streamed "
        "if they do not fit. Changes no result.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:DIR]",
        help="Log to tensorboard, mlflow, wandb or trackio, in a local folder; repeatable. Changes no result.",
    ),
]
Guard = Annotated[
    str,
    typer.Option(
        "--guard",
        help="Judge every target stage without labels: act rolls back one that ruins the model or has unusable images, "
        "record only notes it, off does neither; auto: act on your own images, record on benchmarks.",
    ),
]
ReuseSource = Annotated[
    bool,
    typer.Option(help="Reuse the source network of an earlier run with the same settings. Changes no result."),
]


def parse_changes(
    items: Iterable[str] | None, shorthands: Mapping[str, str | None], problems: list[str]
) -> dict[str, str]:
    """Returns the values of switches given by --set and by options of their own; adds mistakes to ``problems``."""
    changes = {SHORTHANDS[option]: value for option, value in shorthands.items() if value is not None}
    options = {SHORTHANDS[option]: f"--{option}" for option, value in shorthands.items() if value is not None}
    for item in items or ():
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or not name:
            problems.append(f"--set takes NAME=VALUE, got {item!r}; e.g. --set pca.scale=8.")
        elif name in options:
            problems.append(f"{options[name]} {changes[name]} and --set {item} set the same: give one of them.")
        elif name in changes:
            problems.append(f"--set gives {name!r} twice.")
        else:
            changes[name] = value
    return changes
