"""Draws runs. Each function returns a figure; ``style.encode`` turns it into a file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from torch import Tensor

from ratp._core.files import SAMPLES, read_tensors
from ratp.errors import RatpError, RunDirectoryError
from ratp.evaluation.matrix import Summary
from ratp.reports.style import (
    INK,
    QUIET,
    SHADE,
    domain_ticks,
    house_style,
    label_edges,
    line_style,
    long_names,
    method_legend,
    panels,
    percent_axis,
    plain,
)
from ratp.reports.summary import Curve, Group, probed_curves, summarise_known
from ratp.reports.tables import number, with_deviation
from ratp.runs.record import RunRecord

_HEAT = ListedColormap(colormaps["Blues"](np.linspace(0.04, 0.88, 256)))
_SAMPLE_COLUMNS = 10
_SAMPLE_INCHES = 0.85


def matrix_heatmap(groups: Sequence[Group]) -> Figure:
    """The accuracy matrix of every group, one panel each; the diagonal (TDA) is outlined."""
    parts = _parts(groups)
    side = max(1.7, 0.56 * max(len(part.order) for part in parts))
    names = [name for part in parts for name in part.order]
    width = side + 0.55 + 0.075 * min(14, max(map(len, names)))
    height = side + (1.2 if any(long_names(part.order) for part in parts) else 0.9)
    colours = Normalize(0, 100)
    with house_style():
        figure, axes = panels(len(parts), width, height, columns=max(1, int(11 / width)), share_y=False)
        for ax, part in zip(axes, parts, strict=True):
            _heat_panel(ax, part, colours, title_width=int(9 * side))
        image = axes[0].images[0]
        rows = len({ax.get_position().y0 for ax in axes})
        bar = figure.colorbar(image, ax=axes, aspect=18, shrink=0.75 / rows, pad=0.02, anchor=(0.0, 0.9))
        bar.set_ticks(list(range(0, 101, 20)))
        bar.set_label("accuracy (%)")
        bar.outline.set_visible(False)
        label_edges(axes, "accuracy on", "after training on")
    return figure


def accuracy_curves(groups: Sequence[Group]) -> Figure:
    """Accuracy over the stages, one panel per domain, shaded before the domain's own stage."""
    parts = _comparable(groups)
    order = parts[0].order
    with house_style():
        figure, axes = panels(len(order), 2.5, 2.6 if long_names(order) else 2.15, columns=_columns(len(order)))
        for domain, ax in enumerate(axes):
            _stage_backdrop(ax, domain, order)
            for index, part in enumerate(parts):
                spreads = [row[domain] for row in part.accuracy]
                plot_spread(ax, range(len(spreads)), spreads, index, crowd=len(parts))
                if domain < len(part.accuracy):
                    own = {**line_style(index), "linestyle": "", "zorder": 5 - 0.01 * index}
                    ax.plot(domain, part.accuracy[domain][domain].mean, ms=7, mec="white", mew=1.0, **own)
        percent_axis(axes, foot=0.12)
        for ax in axes:
            ax.set_xlabel("after training on")
        method_legend(figure, {index: _named(part) for index, part in enumerate(parts)})
    return figure


def unfamiliar_curves(groups: Sequence[Group]) -> Figure | None:
    """Accuracy on every target domain during its own stage, one panel per domain; None without probes."""
    parts = _comparable(groups)
    curves = [[probed_curves(run) for run in part.counted] for part in parts]
    probed = [d for d in parts[0].order if any(d in found for seeds in curves for found in seeds)]
    if not probed:
        return None
    with house_style():
        lines = sum(any(seeds) for seeds in curves)
        figure, axes = panels(len(probed), 2.7, 2.3 + 0.18 * lines, columns=_columns(len(probed)))
        for ax, domain in zip(axes, probed, strict=True):
            areas = []
            for index, part in enumerate(parts):
                seeds = [found[domain] for found in curves[index] if domain in found]
                if seeds:
                    grid, spreads = _over_seeds(seeds)
                    plot_spread(ax, grid, spreads, index, crowd=lines)
                    label = f"area {with_deviation(part.spread('Unfamiliar', domain))}"
                    areas.append(Line2D([], [], ms=4, label=label, **line_style(index)))
            ax.legend(handles=areas, loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=8)
            ax.set_title(plain(domain, 26))
            ax.set_xlim(-0.03, 1.03)
            ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
            ax.set_xlabel("its stage's training done (%)")
        percent_axis(axes)
        method_legend(figure, {index: _named(parts[index]) for index in range(len(parts)) if any(curves[index])})
    return figure


def sample_sheet(run: RunRecord) -> Figure | None:
    """The sample images of a run, originals on top, augmented versions below; None if it kept none."""
    if run.samples is None:
        return None
    tensors, about = read_tensors(run.samples)
    SAMPLES.read(about, run.samples)
    rows = {name: _strip(run, name, tensors[name]) for name in sorted(tensors, key=_sample_order)}
    if not rows:
        return None
    labels = {name: plain(name, 16) for name in rows}
    beside = 0.075 * max(len(line) for label in labels.values() for line in label.split("\n")) + 0.3
    widest = max(strip.shape[1] / strip.shape[0] for strip in rows.values())
    with house_style():
        size = (_SAMPLE_INCHES * widest + beside, (_SAMPLE_INCHES + 0.08) * len(rows))
        figure = Figure(figsize=size, layout="compressed")
        axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
        for ax, (name, strip) in zip(axes, rows.items(), strict=True):
            ax.imshow(strip, interpolation="nearest" if strip.shape[0] < 128 else None)
            ax.set_ylabel(labels[name], rotation=0, ha="right", va="center", color=INK, labelpad=6)
            ax.set_xticks([])
            ax.set_yticks([])
            for spine in ax.spines.values():
                spine.set_visible(False)
    return figure


def _heat_panel(ax: Axes, part: Group, colours: Normalize, title_width: int) -> None:
    size = len(part.order)
    means = np.full((size, size), np.nan)
    for stage, row in enumerate(part.accuracy):
        means[stage] = [cell.mean for cell in row]
        for domain, cell in enumerate(row):
            ink = "white" if colours(cell.mean) > 0.62 else INK
            weight = "bold" if stage == domain else "normal"
            sd = not math.isnan(cell.deviation)
            ax.text(domain, stage - 0.1 * sd, number(cell.mean), ha="center", va="center", color=ink, weight=weight)
            if sd:
                small = {"ha": "center", "va": "center", "color": ink, "fontsize": 6.5, "alpha": 0.85}
                ax.text(domain, stage + 0.24, f"±{number(cell.deviation)}", **small)  # type: ignore[arg-type]
    ax.imshow(np.ma.masked_invalid(means), cmap=_HEAT, norm=colours, aspect="equal")
    for stage in range(size):
        if stage < len(part.accuracy):
            ax.add_patch(Rectangle((stage - 0.47, stage - 0.47), 0.94, 0.94, fill=False, ec=INK, lw=1.5, zorder=3))
        else:
            ax.axhspan(stage - 0.5, stage + 0.5, color=SHADE, linewidth=0)
            ax.text((size - 1) / 2, stage, "not yet trained", ha="center", va="center", color=QUIET, fontsize=7.5)
    ax.set_xticks(np.arange(-0.5, size), minor=True)
    ax.set_yticks(np.arange(-0.5, size), minor=True)
    ax.grid(which="minor", color="white", linewidth=1.5)
    ax.tick_params(which="both", length=0)
    domain_ticks(ax, part.order, 12)
    ax.set_yticks(range(size), [plain(domain, 14) for domain in part.order])
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(f"{plain(part.name, title_width)}\n", pad=2)
    ax.annotate(part.status, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", color=QUIET, size=8)


def _stage_backdrop(ax: Axes, domain: int, order: Sequence[str]) -> None:
    last = len(order) - 1
    left, right = -0.35, last + 0.35
    ax.set_xlim(left, right)
    ax.set_title(plain(order[domain], 26))
    domain_ticks(ax, order, 12)
    ax.axvline(domain, color="#9aa5b1", linewidth=0.9, zorder=1)
    small = {"transform": ax.get_xaxis_transform(), "fontsize": 7, "color": QUIET, "va": "bottom"}
    if domain > 0:
        ax.axvspan(left, domain, color=SHADE, linewidth=0, zorder=0)
        ax.text(domain - 0.08, 0.02, "before", ha="right", **small)  # type: ignore[arg-type]
    if domain < last:
        ax.text(domain + 0.08, 0.02, "after", ha="left", **small)  # type: ignore[arg-type]


def plot_spread(ax: Axes, x: Sequence[float] | range, spreads: Sequence[Summary], index: int, crowd: int) -> None:
    """Draws means as a line with a band of one standard deviation; ``crowd`` is how many bands share the panel."""
    means = np.array([spread.mean for spread in spreads])
    sd = np.array([spread.deviation for spread in spreads])
    style = line_style(index)
    ax.plot(list(x), means, markersize=3.6, zorder=4 - 0.01 * index, **style)
    if len(sd) and not np.isnan(sd).all():
        low, high = np.clip(means - sd, 0, 100), np.clip(means + sd, 0, 100)
        ax.fill_between(list(x), low, high, color=style["color"], alpha=min(0.16, 0.5 / crowd), linewidth=0, zorder=2)


def _over_seeds(seeds: Sequence[Curve]) -> tuple[list[float], list[Summary]]:
    """Mean and spread of several curves, at every progress at which one was measured."""
    grid = sorted({progress for curve in seeds for progress, _ in curve})
    values = [np.interp(grid, [p for p, _ in curve], [a for _, a in curve]) for curve in seeds]
    return grid, [summarise_known(float(v[i]) for v in values) for i in range(len(grid))]


def _parts(groups: Sequence[Group]) -> list[Group]:
    if not groups:
        raise RatpError("no runs to plot. Give at least one run.")
    return sorted((part for group in groups for part in group.parts()), key=lambda part: not part.finished)


def _comparable(groups: Sequence[Group]) -> list[Group]:
    if len({(group.stream, group.order) for group in groups}) > 1:
        raise RatpError("runs of different streams or orders share no curves: plot each stream and order by itself.")
    return _parts(groups)


def _columns(count: int) -> int:
    return 4 if count in (4, 7, 8) or count > 9 else 3


def _named(part: Group) -> str:
    return part.name if part.finished else f"{part.name} ({part.status})"


def _sample_order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    pieces = re.split(r"(\d+)", name)
    return name != "original", [(int(p), "") if p.isdigit() else (-1, p) for p in pieces]


def _strip(run: RunRecord, name: str, tensor: Tensor) -> np.ndarray:
    """Joins the images of one row, with white between them."""
    if tensor.ndim != 4 or tensor.shape[1] != 3 or str(tensor.dtype) != "torch.uint8" or not len(tensor):
        raise RunDirectoryError(
            f"{run.samples} is damaged: {name!r} should hold uint8 images of shape (n, 3, height, width), "
            f"it holds {tensor.dtype} of shape {tuple(tensor.shape)}."
        )
    images = tensor[:_SAMPLE_COLUMNS].permute(0, 2, 3, 1).numpy()
    gap = np.full((images.shape[1], max(1, images.shape[2] // 14), 3), 255, dtype=np.uint8)
    pieces = [piece for image in images for piece in (image, gap)]
    return np.concatenate(pieces[:-1], axis=1)
