"""Draws a study: variants as bars, sweeps as curves, one panel per order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ratp.evaluation.matrix import METRICS, NOTHING
from ratp.reports.plots import plot_spread
from ratp.reports.study_parts import Order, Sweep, Variants, name_in
from ratp.reports.style import COLOURS, INK, QUIET, house_style, method_legend, panels, percent_axis, plain
from ratp.reports.summary import as_text
from ratp.reports.tables import number, order_text
from ratp.runs.record import ORACLE

_BAR = 0.26
_CLOSE = 0.1  # share of the range; values closer than this are spaced evenly


def variant_bars(variants: Variants) -> Figure:
    """The averages of all methods and variants of a grid as bars, with standard deviations over seeds."""
    labels = list(variants.lines)
    with house_style():
        width = 3.4 if len(variants.orders) > 1 else 5.4
        figure, axes = panels(len(variants.orders), width, 0.5 * len(labels) + 0.9, columns=3)
        for ax, order in zip(axes, variants.orders, strict=True):
            for place, label in enumerate(labels):
                _bars(ax, place, variants, label, order)
            ax.set_title(plain(order_text(order), _title_width(variants.orders)))
            ax.set_ylim(len(labels) - 0.5, -0.5)
            ax.set_xlim(0, 118)
            ax.set_xticks(range(0, 101, 20))
            ax.set_xlabel("accuracy (%)")
            ax.grid(axis="x")
            names = {label: name_in(variants.lines, label) for label in labels}  # oracles need a third line
            rows = [plain(name, 24, lines=2 if name == label else 3) for label, name in names.items()]
            ax.set_yticks(range(len(labels)), rows)
            ax.tick_params(axis="y", length=0)
        handles = [Patch(color=COLOURS[index], label=metric) for index, metric in enumerate(METRICS)]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.2)
    return figure


def sweep_curves(sweep: Sweep) -> Figure:
    """The averages over the values of a switch; a vertical line marks its usual value."""
    values = [sweep.values[label] for label in sweep.labels]
    places = _places(sweep, values)
    with house_style():
        figure, axes = panels(len(sweep.orders), 3.4 if len(sweep.orders) > 1 else 4.6, 2.9, columns=3)
        for ax, order in zip(axes, sweep.orders, strict=True):
            for index, metric in enumerate(METRICS):
                groups = [sweep.lines.get(label, {}).get(order) for label in sweep.labels]
                spreads = [group.spread(metric) if group else NOTHING for group in groups]
                plot_spread(ax, places, spreads, index, crowd=len(METRICS))
            _value_axis(ax, sweep, values, places)
            ax.set_title(plain(order_text(order), _title_width(sweep.orders)))
        percent_axis(axes, foot=0.1)
        method_legend(figure, dict(enumerate(METRICS)))
    return figure


def _bars(ax: Axes, place: int, variants: Variants, label: str, order: Order) -> None:
    group = variants.lines[label].get(order)
    if group is None:
        ax.text(1.5, place, "missing", va="center", color=QUIET, fontsize=7.5)
        return
    for index, metric in enumerate(METRICS):
        spread = group.spread(metric)
        if not spread.n:
            continue
        height = place + (index - 1) * _BAR
        ax.barh(height, spread.mean, 0.88 * _BAR, color=COLOURS[index], linewidth=0)
        end = spread.mean
        if not math.isnan(spread.deviation):
            ax.errorbar(spread.mean, height, xerr=spread.deviation, color=INK, linewidth=0.9, capsize=1.8, capthick=0.9)
            end += spread.deviation
        ax.text(end + 1.2, height, number(spread.mean), va="center", fontsize=6.5, color=INK)


def _title_width(orders: Sequence[Order]) -> int:
    return 34 if len(orders) > 1 else 60


def _places(sweep: Sweep, values: Sequence[Any]) -> list[float]:
    """Places values on the axis: to scale, or evenly if they are not numbers or would overlap."""
    gaps = [later - earlier for earlier, later in pairwise(values)] if sweep.numeric else []
    even = not sweep.numeric or (gaps and min(gaps) < _CLOSE * sum(gaps))
    return [float(place) if even else float(value) for place, value in enumerate(values)]


def _value_axis(ax: Axes, sweep: Sweep, values: Sequence[Any], places: Sequence[float]) -> None:
    """Labels the axis with the values of the switch; oracles are marked."""
    names = []
    for label in sweep.labels:
        value = plain(as_text(sweep.values[label]), 12)
        names.append(f"{value}\n{plain(f'({ORACLE})', 12, lines=3)}" if sweep.is_oracle(label) else value)
    ax.set_xticks(places, names)
    ax.set_xlabel(plain(sweep.switch, 42))
    if sweep.usual in values:
        usual = places[values.index(sweep.usual)]
        ax.axvline(usual, color="#9aa5b1", linewidth=0.9, zorder=1)
        frame = ax.get_xaxis_transform()
        ax.annotate("default", (usual, 0.02), (3, 0), frame, "offset points", color=QUIET, fontsize=7)
