"""The look of figures: fonts, colours, panels, reproducible files."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import numpy as np
from matplotlib import font_manager
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from ratp.reports.tables import clean

INK = "#1f2933"
QUIET = "#66727f"
FAINT = "#e3e7eb"
SHADE = "#f3f5f7"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#4d4d4d")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (3.5, 1.5)), (0, (1.2, 1.2)), (0, (4, 1.2, 1.2, 1.2)))

_COLOURS = 96  # of a PNG
_OTHER_SCRIPTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Noto Sans Devanagari",
)


@contextmanager
def house_style() -> Iterator[None]:
    """Applies the package's style to everything drawn inside, overriding the user's own."""
    settings: dict[str, Any] = {
        "font.family": list(_families()),
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 8.5,
        "axes.labelcolor": QUIET,
        "axes.edgecolor": "#9aa5b1",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "text.color": INK,
        "axes.titlecolor": INK,
        "xtick.color": "#9aa5b1",
        "ytick.color": "#9aa5b1",
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "grid.color": FAINT,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.handlelength": 2.6,
        "lines.linewidth": 1.7,
        "lines.solid_capstyle": "round",
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "savefig.facecolor": "white",
        "svg.fonttype": "path",
        "svg.hashsalt": "ratp",
        "text.usetex": False,
    }
    with mpl_style.context(["default", settings]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@cache
def _families() -> tuple[str, ...]:
    """Matplotlib's own font, then installed ones for other scripts."""
    installed = set(font_manager.get_font_names())
    return ("DejaVu Sans", *(name for name in _OTHER_SCRIPTS if name in installed))


def encode(figure: Figure, kind: Literal["png", "svg"], dpi: int = 200, *, photos: bool = False) -> bytes:
    """Encodes a figure as a file; the same figure gives the same bytes. It is laid out once, at the first encoding.

    A PNG without photographs has a palette, which makes it three times smaller.
    """
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    figure.set_layout_engine("none")
    if kind == "svg" or photos:
        return buffer.getvalue()
    with Image.open(buffer) as image:
        drawn = image.convert("RGB").quantize(_COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    smaller = io.BytesIO()
    drawn.save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


def panels(count: int, width: float, height: float, columns: int, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """Makes a figure of ``count`` panels in even rows of at most ``columns``; sizes are inches per panel."""
    rows = math.ceil(count / columns)
    columns = math.ceil(count / rows)
    figure = Figure(figsize=(columns * width + 0.6, rows * height + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    axes = [ax for row in grid for ax in row]
    for ax in axes[count:]:
        ax.remove()
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    return figure, axes[:count]


def plain(name: str, width: int | None = None, lines: int = 2) -> str:
    """Prepares a name for a figure: never typeset as mathematics, wrapped and shortened to the width if given."""
    name = clean(name)
    if width is not None:
        wrapped = textwrap.wrap(name, width, break_on_hyphens=False) if lines > 1 else [name]
        rest = "".join(wrapped[lines - 1 :])
        name = "\n".join([*wrapped[: lines - 1], _shortened(rest, width)]) if rest else "\n".join(wrapped)
    return name.replace("$", r"\$")


def _shortened(name: str, width: int) -> str:
    """Cuts a name in the middle, so that names that differ at the end stay distinct."""
    if len(name) <= width:
        return name
    tail = width // 3
    return f"{name[: width - tail - 1]}…{name[-tail:]}"


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the n-th method, distinguishable without colour."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def method_legend(figure: Figure, names: Mapping[int, str]) -> None:
    """Adds one legend above all panels and makes the figure taller by its height."""
    labels = {index: plain(name, 44) for index, name in names.items()}
    handles = [Line2D([], [], markersize=4.5, label=label, **line_style(i)) for i, label in labels.items()]
    inches = [0.065 * max(map(len, label.split("\n"))) + 0.6 for label in labels.values()]
    room = figure.get_figwidth()
    columns = len(inches) if sum(inches) <= room else max(1, int(room / max(inches)))
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, borderaxespad=0.2)


def percent_axis(axes: Sequence[Axes], foot: float = 0.03) -> None:
    """Gives all panels one accuracy axis from 0 to 100, with a margin of ``foot`` below."""
    for ax in axes:
        ax.set_ylim(-100 * foot, 103)
        ax.set_yticks(np.arange(0, 101, 20))
        ax.grid(axis="y")
        if first_column(ax):
            ax.set_ylabel("accuracy (%)")
        else:
            ax.tick_params(axis="y", length=0)


def first_column(ax: Axes) -> bool:
    """Whether a panel is the leftmost of its row."""
    place = ax.get_subplotspec()
    return place is None or place.is_first_col()


def domain_ticks(ax: Axes, names: Sequence[str], width: int) -> None:
    """Labels the x axis with domain names, slanted where they would touch."""
    labels = [plain(name, width, lines=1) for name in names]
    if long_names(names):
        ax.set_xticks(range(len(names)), labels, rotation=35, ha="right", rotation_mode="anchor")
    else:
        ax.set_xticks(range(len(names)), labels)


def long_names(names: Sequence[str]) -> bool:
    """Whether domain names need slanting to fit side by side."""
    return max(map(len, names)) > 8 or sum(map(len, names)) > 28


def label_edges(axes: Sequence[Axes], x: str, y: str) -> None:
    """Names the x axis of every panel and the y axis of the leftmost ones."""
    for ax in axes:
        ax.set_xlabel(x)
        if first_column(ax):
            ax.set_ylabel(y)
