"""Sets of images: in memory, or image files that are opened at every access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


class ImagesInMemory(Dataset):
    """Images of a uint8 tensor (n, 3, height, width)."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


class ImageFiles(Dataset):
    """Image files, decoded by Pillow on access."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths, self.size = list(paths), size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as file:
            picture = file.convert("RGB")
        if picture.size != (self.size, self.size):
            picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read_folder(folder: Path, classes: Sequence[str], size: int) -> tuple[ImageFiles, Tensor]:
    """The images of ``folder/CLASS/NAME`` in the order of their names, and their labels."""
    paths = sorted(folder.glob("*/*"), key=lambda path: path.name)
    return ImageFiles(paths, size), torch.tensor([classes.index(path.parent.name) for path in paths])


def write_folder(folder: Path, images: Tensor, labels: Tensor, classes: Sequence[str]) -> None:
    """Writes images as ``folder/CLASS/NUMBER.png``, without loss; :func:`read_folder` gives them in the same order."""
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        path = folder / classes[label] / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


class Examples(Dataset):
    """Images with a label each: those of a domain, then exemplars of earlier ones."""

    def __init__(self, items: Sequence[tuple[Dataset, int, int, bool]]) -> None:
        """Takes for each example the set its image is in, the place there, the label, and whether it is replayed."""
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int, bool]:
        images, place, label, replayed = self.items[index]
        return images[place], label, replayed


class WithReplacement:
    """Batches of positions drawn independently, each position as likely as any other every time."""

    def __init__(self, population: int, batch: int, count: int, generator: torch.Generator) -> None:
        self.population, self.batch, self.count, self.generator = population, batch, count, generator

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.count):
            drawn = torch.randint(
                self.population, (self.batch,), generator=self.generator, device=self.generator.device
            )
            yield drawn.tolist()
