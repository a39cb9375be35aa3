"""Draws the figures of the explanations into docs/images: the accuracy matrix, a stage of RaTP and its three parts."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import Tensor

import ratp
from docs import demo_runs
from ratp.functional.pseudo_labels import T2PLConfig, t2pl
from ratp.functional.randmix import RandMix, RandMixConfig
from ratp.reports.style import COLOURS, FAINT, INK, QUIET, house_style

FOLDER = Path(__file__).parents[1] / "docs" / "images"
BLUE, RED, GREEN = COLOURS[:3]


def main() -> None:
    """Draws all figures."""
    with house_style():
        for name, draw in {"matrix": matrix, "stage": stage, "randmix": randmix, "t2pl": top_twice, "pca": pca}.items():
            figure = draw()
            figure.savefig(FOLDER / f"explained-{name}.png", dpi=170, facecolor="white", bbox_inches="tight")
            plt.close(figure)


def matrix() -> Figure:
    """The mean accuracies of RaTP on the demo stream, by metric."""
    runs = [run.matrix for run in demo_runs() if run.method == "ratp"]
    mean = np.mean([run.accuracy for run in runs], axis=0)
    figure, axes = plt.subplots(figsize=(5.2, 3))
    for row, column in np.ndindex(mean.shape):
        colour = GREEN if row < column else RED if row == column else BLUE
        axes.add_patch(plt.Rectangle((column, row), 1, 1, facecolor=colour, alpha=0.22, edgecolor="white", linewidth=3))
        axes.text(column + 0.5, row + 0.5, f"{mean[row, column]:.1f}", ha="center", va="center", color=INK, fontsize=11)
    count = len(mean)
    axes.set(xlim=(0, count), ylim=(count, 0), xticks=np.arange(count) + 0.5, yticks=np.arange(count) + 0.5)
    axes.set_xticklabels([f"on {name}" for name in runs[0].domains])
    axes.set_yticklabels([f"after {name}" for name in runs[0].domains])
    axes.tick_params(length=0, labelsize=9)
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    for height, name, colour in ((0.8, "TDG: before", GREEN), (2.0, "TDA: right after", RED), (3.2, "FA: later", BLUE)):
        axes.text(count + 0.15, height, name, color=colour, fontsize=10, fontweight="bold", va="center")
    return figure


def _box(axes: Axes, x: float, y: float, text: str, colour: str = QUIET, width: float = 2.05) -> None:
    shape = FancyBboxPatch(
        (x - width / 2, y - 0.36),
        width,
        0.72,
        boxstyle="round,pad=0.03",
        facecolor=colour,
        alpha=0.16,
        edgecolor="none",
    )
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = QUIET) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.1))


def stage() -> Figure:
    """The path of images through a target stage of RaTP."""
    figure, axes = plt.subplots(figsize=(8.6, 3.4))
    axes.set(xlim=(0, 12.6), ylim=(0, 4.6))
    axes.axis("off")
    _box(axes, 1, 3.6, "target images\n(no labels)", BLUE)
    _box(axes, 1, 1.0, "memory: images of\nearlier domains", BLUE)
    _box(axes, 3.4, 3.6, "T2PL:\npseudo-labels", GREEN)
    _box(axes, 3.4, 2.3, "batch")
    _box(axes, 5.8, 2.3, "RandMix copies of\nconfident images", GREEN)
    _box(axes, 8.2, 2.3, "network\n$z = f(x)$")
    _box(axes, 8.2, 1.0, "old network, from\nbefore the stage")
    _box(axes, 11.2, 3.6, "cross-entropy\nwith the labels", RED, 2.35)
    _box(axes, 11.2, 2.3, "PCA: align $z$\nwith prototypes", RED, 2.35)
    _box(axes, 11.2, 1.0, "distillation\nfrom the old outputs", RED, 2.35)
    for start, end in (
        *(((2.05, 3.6), (2.35, 3.6)), ((1.9, 3.2), (2.5, 2.7)), ((1.9, 1.4), (2.5, 1.9)), ((3.4, 3.2), (3.4, 2.7))),
        *(((4.45, 2.3), (4.75, 2.3)), ((6.85, 2.3), (7.15, 2.3)), ((6.5, 1.9), (7.1, 1.3)), ((9.25, 2.6), (9.95, 3.4))),
        *(
            ((9.25, 2.3), (9.95, 2.3)),
            ((9.25, 2.0), (9.95, 1.2)),
            ((9.25, 1.0), (9.95, 1.0)),
            ((9.25, 1.2), (9.95, 2.0)),
        ),
    ):
        _arrow(axes, start, end)
    axes.text(0.1, 4.35, "every few epochs: labels; every step: a batch and three losses", fontsize=8.5, color=QUIET)
    after = "after the stage: exemplars enter the memory; the network becomes the old network"
    axes.text(0.1, 0.1, after, fontsize=8.5, color=QUIET)
    return figure


def _demo_source(count: int) -> Tensor:
    plan = ratp.resolve(ratp.RunRequest(stream="demo", method="ratp", device="cpu"))
    source = plan.load_stream().source
    rows = [int((source.labels == label).nonzero()[0]) for label in (2, 3, 5, 7, 8)]
    return source.images[rows[:count]]


def randmix() -> Figure:
    """Images of the demo's source, and what RandMix makes of them in six batches."""
    images, generator = _demo_source(5), torch.Generator().manual_seed(5)
    half = torch.full((3,), 0.5)
    mix = RandMix(RandMixConfig(), half, half, generator)
    normalised = images.float() / 255 * 2 - 1
    columns = [normalised, *(mix(normalised, generator) for _ in range(8))]
    figure, axes = plt.subplots(len(images), len(columns), figsize=(6.6, 3.7))
    for column, batch in enumerate(columns):
        for row, image in enumerate(batch):
            panel = axes[row, column]
            panel.imshow(((image + 1) / 2).clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
    axes[0, 0].set_title("image", fontsize=8.5)
    for column in range(1, len(columns)):
        axes[0, column].set_title(f"batch {column}", fontsize=8.5, fontweight="normal")
    figure.subplots_adjust(wspace=0.06, hspace=0.06)
    return figure


def _toy_domain() -> tuple[Tensor, Tensor, Tensor]:
    """Features of three overlapping classes, softmax rows of a classifier that is off, and the true labels."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(3).repeat_interleave(60)
    angles = torch.tensor([0.1, 1.15, 2.2])[labels] + 0.27 * torch.randn(len(labels), generator=generator)
    radius = 0.75 + 0.55 * torch.rand(len(labels), generator=generator)
    features = torch.stack([radius * angles.cos(), radius * angles.sin()], dim=1)
    tilted = torch.tensor([-0.45, 0.75, 1.75])
    rows = torch.stack([tilted.cos(), tilted.sin()], dim=1)
    return features, (5 * features @ rows.T).softmax(dim=1), labels


def top_twice() -> Figure:
    """The three steps of T2PL on a toy domain."""
    features, probabilities, truth = _toy_domain()
    config = T2PLConfig()
    found = t2pl(features, probabilities, config)
    size = len(features) // (3 * config.r_top)
    top = probabilities.topk(size, dim=0).indices
    directions = torch.nn.functional.normalize(features, dim=1)
    fit = (directions @ torch.nn.functional.normalize(found.centroids, dim=1).T).topk(size, dim=0).indices
    predicted = probabilities.argmax(dim=1)
    figure, grid = plt.subplots(2, 2, figsize=(6.4, 4.7))
    panels = [*grid.flat]
    titles = (
        f"1. predictions: {_right(predicted, truth)} right",
        "2. most confident samples, centroids (★)",
        "3. samples nearest to the centroids",
        f"4. labels by their vote: {_right(found.labels, truth)} right",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set(xticks=[], yticks=[], aspect="equal")
        panel.set_title(title, fontsize=8.5, fontweight="normal")
        panel.spines[:].set_visible(False)
    for panel, labels in ((panels[0], predicted), (panels[3], found.labels)):
        panel.scatter(*features.T, c=[COLOURS[label] for label in labels], s=9)
        wrong = features[labels != truth]
        panel.scatter(*wrong.T, facecolors="none", edgecolors=INK, s=30, linewidths=0.7)
    for panel, chosen in ((panels[1], top), (panels[2], fit)):
        panel.scatter(*features.T, c=FAINT, s=9)
        for label in range(3):
            panel.scatter(*features[chosen[:, label]].T, c=COLOURS[label], s=9)
            centre = 1.1 * torch.nn.functional.normalize(found.centroids[label], dim=0)
            panel.scatter(*centre, c=COLOURS[label], marker="*", s=130, edgecolors="white", linewidths=0.8)
    return figure


def _right(labels: Tensor, truth: Tensor) -> str:
    return f"{100 * (labels == truth).float().mean():.0f} %"


def pca() -> Figure:
    """What attracts and what repels an embedding."""
    figure, axes = plt.subplots(figsize=(5.6, 2.9))
    axes.set(xlim=(-2.3, 3.9), ylim=(-0.35, 1.6), aspect="equal")
    axes.axis("off")
    angle = np.linspace(-0.2, np.pi + 0.2, 200)
    axes.plot(1.25 * np.cos(angle), 1.25 * np.sin(angle), color=FAINT, linewidth=1.5)
    point = {name: 1.25 * np.array([np.cos(at), np.sin(at)]) for name, at in _PLACES.items()}
    z = point["z"]
    for name, mark, size in (
        ("own", "*", 190),
        ("old", "*", 190),
        ("other", "*", 190),
        ("sample", "o", 40),
        ("z", "o", 70),
    ):
        colour = BLUE if name in ("own", "old", "z") else COLOURS[1]
        face = "white" if name == "old" else colour
        axes.scatter(*point[name], marker=mark, s=size, facecolor=face, edgecolor=colour, linewidths=1.3, zorder=3)
        axes.annotate(_NAMES[name], point[name] * 1.13, ha=_SIDES[name], va="center", fontsize=8.5, color=INK)
    for name in ("own", "old"):
        _arrow(axes, tuple(z + 0.1 * (point[name] - z)), tuple(z + 0.82 * (point[name] - z)), BLUE)
    for name in ("other", "sample"):
        away = (z - point[name]) / np.linalg.norm(z - point[name])
        _arrow(axes, tuple(z - 0.28 * away), tuple(z - 0.28 * away + 0.22 * away), COLOURS[1])
        axes.plot(*zip(point[name], z, strict=True), color=COLOURS[1], linewidth=0.8, linestyle=":", zorder=1)
    return figure


_PLACES = {"z": 1.35, "own": 1.95, "old": 2.35, "other": 0.25, "sample": 0.75}
_NAMES = {
    "z": "embedding $z$",
    "own": "prototype of its class",
    "old": "the same in the old network",
    "other": "prototype of another class",
    "sample": "sample of another class",
}
_SIDES = {"z": "center", "own": "right", "old": "right", "other": "left", "sample": "left"}


if __name__ == "__main__":
    main()
