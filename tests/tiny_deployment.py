"""A deployed tiny model, and images that it knows, that a stage ruins, and that it can adapt to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from PIL import Image

from helpers import toy_domain, toy_plan
from ratp.deploy.deployment import Deployment
from ratp.deploy.settings import Settings
from ratp.runs.run import Run

SOURCE, TARGET = toy_domain("ink", 240), toy_domain("mud", 64)
KNOWN = SOURCE.images
NEGATIVE = 255 - KNOWN  # the guard refuses to adapt to them
DARK = KNOWN // 2  # the guard accepts
STAGE = {"epochs": 1, "steps": 3}


def make_deployment(folder: Path, method: str = "shot", adapt: str = "ask", *, bare: bool = False) -> Path:
    """Trains a tiny model and deploys it, perhaps without source images; a stage in the background needs 64 images."""
    changes = {"epochs": 4, "steps": 10, "lr": 0.05, "network.width": 0.1}
    Run(toy_plan(method, [SOURCE, TARGET], changes=changes), folder / "run", reuse_source=False).execute()
    settings = Settings(adapt, 64, STAGE, save_every=1)
    Deployment.create(folder / "run", folder / "deployed", None if bare else SOURCE, settings=settings).close()
    return folder / "deployed"


def copy_of(deployed: Path, to: Path) -> Path:
    """Copies a deployment."""
    return Path(shutil.copytree(deployed, to))


def put(folder: Path, name: str, images: torch.Tensor, at: float = 1.0e9) -> list[Path]:
    """Writes images as PNG files; the file system says that they came one second after another from ``at`` on."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{k:03}.png" for k in range(len(images))]
    for k, (path, image) in enumerate(zip(paths, images, strict=True)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        os.utime(path, (at + k, at + k))
    return paths
