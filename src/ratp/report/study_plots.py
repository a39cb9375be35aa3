"""Figures of a study: variants as bars, sweeps as curves; a panel an order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ratp.matrix import METRICS
from ratp.record import ORACLE
from ratp.report.cells import number, order_text
from ratp.report.plots import plot_spread
from ratp.report.settings import as_text
from ratp.report.study_parts import Order, Sweep, Variants, name_in
from ratp.report.style import (
    COLOURS,
    INK,
    QUIET,
    house_style,
    method_legend,
    panels,
    percent_axis,
    plain,
)
from ratp.statistics import NOTHING

_BAR = 0.26
# Values that are closer, as a share of their range, stand at even distances.
_CLOSE = 0.1


def variant_bars(variants: Variants) -> Figure:
    """The averages of all methods and variants of a grid as bars, with a standard deviation over seeds."""
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
            ax.set_yticks(range(len(labels)), [_row_name(variants, label) for label in labels])
            ax.tick_params(axis="y", length=0)
        handles = [Patch(color=COLOURS[index], label=metric) for index, metric in enumerate(METRICS)]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.2)
    return figure


def sweep_curves(sweep: Sweep) -> Figure:
    """The averages over the values of a switch; a line marks the value it has unless it is swept."""
    values = [sweep.values[label] for label in sweep.labels]
    places = _places(sweep, values)
    with house_style():
        figure, axes = panels(len(sweep.orders), 3.4 if len(sweep.orders) > 1 else 4.6, 2.9, columns=3)
        heights = []
        for ax, order in zip(axes, sweep.orders, strict=True):
            for index, metric in enumerate(METRICS):
                groups = [sweep.lines.get(label, {}).get(order) for label in sweep.labels]
                spreads = [group.spread(metric) if group else NOTHING for group in groups]
                plot_spread(ax, places, spreads, index, crowd=len(METRICS))
                heights += [spread.mean for spread in spreads]
            _value_axis(ax, sweep, values, places)
            ax.set_title(plain(order_text(order), _title_width(sweep.orders)))
        percent_axis(axes, heights, foot=0.1)
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


def _row_name(variants: Variants, label: str) -> str:
    """A label beside its bars, with a line more for the mark of an oracle."""
    name = name_in(variants.lines, label)
    return plain(name, 24, lines=2 if name == label else 3)


def _title_width(orders: Sequence[Order]) -> int:
    return 34 if len(orders) > 1 else 60


def _places(sweep: Sweep, values: Sequence[Any]) -> list[float]:
    """Where the values stand: as numbers, or at even distances if they are none or would crowd."""
    gaps = [later - earlier for earlier, later in pairwise(values)] if sweep.numeric else []
    even = not sweep.numeric or (gaps and min(gaps) < _CLOSE * sum(gaps))
    return [float(place) if even else float(value) for place, value in enumerate(values)]


def _value_axis(ax: Axes, sweep: Sweep, values: Sequence[Any], places: Sequence[float]) -> None:
    """The values of the switch under a panel; what knows target labels is marked."""
    ax.set_xticks(places, [_value_name(sweep, label) for label in sweep.labels])
    ax.set_xlabel(plain(sweep.switch, 42))
    if sweep.usual in values:
        usual = places[values.index(sweep.usual)]
        ax.axvline(usual, color="#9aa5b1", linewidth=0.9, zorder=1)
        ax.annotate(
            "default",
            (usual, 0.02),
            (3, 0),
            xycoords=ax.get_xaxis_transform(),
            textcoords="offset points",
            color=QUIET,
            fontsize=7,
        )


def _value_name(sweep: Sweep, label: str) -> str:
    value = plain(as_text(sweep.values[label]), 12)
    return f"{value}\n{plain(f'({ORACLE})', 12, lines=3)}" if sweep.is_oracle(label) else value
