"""What a run keeps for the pictures of its report: some images as the method changes them, and embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ratp.files import read_bytes, write_bytes, write_tensors
from ratp.method import Method
from ratp.schema import FEATURES, SAMPLES
from ratp.stream import Stream

SAMPLE_COUNT = 10
FEATURE_COUNT = 200  # of a domain


def save_samples(folder: Path, method: Method, stream: Stream, device: torch.device) -> None:
    """Keeps a few source images and what the method makes of them, if it shows anything."""
    images = stream.source.images
    some = torch.linspace(0, len(images) - 1, min(len(images), SAMPLE_COUNT)).long()  # folders come class by class
    images = images[some]
    shown = method.show(images, torch.Generator(device).manual_seed(0))
    if shown:
        write_tensors(folder / "samples.safetensors", {"original": images, **shown}, SAMPLES.mark)


def save_features(folder: Path, found: Mapping[str, Tensor], stream: Stream, stage: int) -> None:
    """Keeps the embeddings of some test images after a stage, if there are any."""
    if found:
        about = {"domains": list(stream.order), "classes": list(stream.classes), "stage": stage}
        write_tensors(folder / f"features-{stage}.safetensors", found, FEATURES.marked(about))


def copy_features(files: Iterable[Path], folder: Path) -> None:
    """Keeps the embeddings that another run has kept."""
    for path in files:
        write_bytes(folder / path.name, read_bytes(path))
