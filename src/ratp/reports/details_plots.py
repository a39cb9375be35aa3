"""Draws how well confidence matches accuracy, and the losses of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ratp.evaluation.details import Details
from ratp.reports.style import COLOURS, INK, QUIET, SHADE, house_style, line_style, panels, plain
from ratp.runs.record import RunRecord

MOST_PANELS = 20
_MOST_LOSSES = 5
_LARGEST = 1e30
_WIDE_RANGE = 30.0  # from which losses are on a logarithmic axis

# By stage, the epochs of a run in order, each with the means of its losses.
Losses = dict[int, list[Mapping[str, float]]]


def reliability(last: Mapping[str, Details]) -> Figure:
    """Accuracy over confidence, one line per domain; a calibrated model is on the diagonal."""
    with house_style():
        figure = Figure(figsize=(5.4, 3.1), layout="constrained")
        ax = figure.subplots()
        ax.plot([0, 100], [0, 100], color=QUIET, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        for index, (name, found) in enumerate(last.items()):
            bins = [one for one in found.bins if one.images]
            x = [100 * one.confidence / one.images for one in bins]
            y = [100 * one.right / one.images for one in bins]
            label = f"{plain(name, 26, lines=1)}, error {found.calibration_error:.1f}"
            style = line_style(index)
            ax.plot(x, y, label=label, **style | {"linewidth": 1, "markersize": 3})
            areas = [160 * one.images / found.images for one in bins]
            ax.scatter(x, y, s=areas, color=style["color"], alpha=0.35, linewidths=0)
        ax.set_xlim(-2, 102)
        ax.set_ylim(-2, 102)
        ax.grid(True)
        ax.set_xlabel("confidence (%)")
        ax.set_ylabel("accuracy (%)")
        columns = math.ceil(len(last) / 12)
        ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=7.5, ncols=columns)
    return figure


def losses_of(run: RunRecord) -> Losses:
    """The mean losses of every epoch that the journal has; of a repeated epoch only the last."""
    found: dict[tuple[int, str, int], Mapping[str, float]] = {}
    for event in run.events("epoch"):
        means = event.get("means")
        key = int(event.get("stage", 0)), str(event.get("phase")), event.get("epoch", 0)
        if isinstance(means, dict) and means and isinstance(key[2], int) and 0 <= key[0] < len(run.matrix.domains):
            found[key] = {
                name: value for name, value in means.items() if isinstance(value, int | float) and abs(value) < _LARGEST
            }
    stages: Losses = {}
    for stage, _, _ in sorted(found, key=lambda key: key[0]):
        stages.setdefault(stage, [])
    for (stage, _, _), means in found.items():
        stages[stage].append(means)
    return stages


def loss_curves(runs: Sequence[tuple[str, RunRecord]]) -> Figure | None:
    """The losses over the epochs of all stages, one panel per run; None if no journal has any."""
    known = [(name, run, losses) for name, run in runs if (losses := losses_of(run))][:MOST_PANELS]
    if not known:
        return None
    few = len(known) <= 3
    with house_style():
        columns = len(known) if few else 4 if len(known) > 6 else 3
        figure, axes = panels(len(known), 3.4 if few else 2.6, 2.3 if few else 1.9, columns=columns, share_y=False)
        for ax, (name, run, losses) in zip(axes, known, strict=True):
            _loss_panel(ax, run, losses)
            beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 7}
            ax.legend(handlelength=1.2, labelspacing=0.2, **(beside if few else {"fontsize": 5.5}))
            ax.set_title(plain(name, 36 if few else 28, lines=1), pad=13)
    return figure


def _loss_panel(ax: Axes, run: RunRecord, losses: Losses) -> None:
    names = dict.fromkeys(name for epochs in losses.values() for means in epochs for name in means)
    shown = [*(name for name in names if name == "total"), *(name for name in names if name != "total")][:_MOST_LOSSES]
    start, values = 0, []
    for number, (stage, epochs) in enumerate(losses.items()):
        x = [start + k + 0.5 for k in range(len(epochs))]
        for place, name in enumerate(shown):
            y = [float(means.get(name, math.nan)) for means in epochs]
            values += [value for value in y if not math.isnan(value)]
            colour, width = (INK, 1.6) if name == "total" else (COLOURS[place % len(COLOURS)], 1.0)
            mark = "o" if len(epochs) < 3 else ""
            ax.plot(
                x, y, color=colour, linewidth=width, marker=mark, markersize=2.5, label="" if number else plain(name)
            )
        if number % 2:
            ax.axvspan(start, start + len(epochs), color=SHADE, linewidth=0, zorder=0)
        middle = start + len(epochs) / 2
        label = plain(run.matrix.domains[stage], 10, lines=1)
        ax.text(
            middle, 1.0, label, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=6, color=QUIET
        )
        start += len(epochs)
    ax.set_xlim(0, start)
    if values and min(values) > 0 and max(values) > _WIDE_RANGE * min(values):
        ax.set_yscale("log")
    ax.tick_params(labelsize=7)
    ax.set_xlabel("epoch", fontsize=7.5)
