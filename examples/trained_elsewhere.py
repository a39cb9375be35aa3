"""Makes what a team has that trained a model without ratp: its checkpoint, some labelled images, and new cameras.

    python examples/trained_elsewhere.py shop

The images are scanned digits from ratp's demo, so nothing is downloaded. The new camera is noisy at night, and a broken
one sends nothing but noise. The model is one of timm's smallest, trained in a plain PyTorch loop.
"""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor

import ratp

KIND, SIZE = "test_resnet", 32


def save_images(folder: Path, images: Tensor, names: list[str]) -> None:
    """Writes images as PNG files."""
    for image, name in zip(images, names, strict=True):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def noisy(images: Tensor) -> Tensor:
    """Adds the noise of a camera at night."""
    noise = 20 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + noise).clamp(0, 255).to(torch.uint8)


def trained(images: Tensor, labels: Tensor) -> torch.nn.Module:
    """Trains a classifier."""
    torch.manual_seed(0)
    model = timm.create_model(KIND, num_classes=10)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        rows = torch.randint(len(images), (32,))
        loss = F.cross_entropy(model((images[rows] / 255 - 0.5) / 0.5), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    """Writes everything into the folder that the command names."""
    place = Path(sys.argv[1])
    stream = ratp.resolve(ratp.RunRequest("demo")).load_stream()
    source, held_back = stream.source, stream.tests[0]
    assert held_back is not None
    model = trained(source.images[600:], source.labels[600:])
    with torch.no_grad():
        right = (model((held_back.images / 255 - 0.5) / 0.5).argmax(1) == held_back.labels).float().mean()
    print(f"trained elsewhere: {right:.1%} of held-back scans are right")
    place.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), place / "model.pth")
    half = len(held_back) // 2
    labelled = [f"{held_back.classes[k]}/{n}" for n, k in enumerate(held_back.labels[:half].tolist())]
    save_images(place / "labelled", held_back.images[:half], labelled)
    save_images(place / "usual", held_back.images[half:], [str(n) for n in range(len(held_back) - half)])
    save_images(place / "new-camera", noisy(source.images[:600]), [str(n) for n in range(600)])
    noise = torch.randint(256, (128, 3, SIZE, SIZE), dtype=torch.uint8)
    save_images(place / "broken-camera", noise, [str(n) for n in range(128)])


if __name__ == "__main__":
    main()
