"""The generated part of "Which method?": accuracy against cost, from whatever results/ has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ratp.cli.choose import SITUATIONS, choose, relative_costs
from ratp.evaluation.matrix import METRICS
from ratp.methods import METHODS
from ratp.reports.style import COLOURS, INK, MARKERS, encode, house_style, panels
from ratp.runs.record import read_run
from ratp.streams import STREAMS
from reproducibility import SAME_NETWORK, counts

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "images" / "choose-a-method.png"
SHOWN = ("demo", "digits", "pacs")
GENERALISATION = "domain generalisation"
MARK = r"\*"  # of methods that need an option
# Combinations of phrases, from having everything to having little.
ASKED = (
    "",
    *(phrase for phrase in SITUATIONS if phrase != "target labels"),
    "own model, one pass",
    "one pass, no source images",
)


@cache
def measured(stream: str) -> tuple[tuple[str, ...], Mapping[str, float]]:
    """The order of a stream on which most methods were run, and the mean of TDG, TDA and FA of each over its seeds."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {order: {} for order in STREAMS[stream].orders.values()}
    for run in map(read_run, sorted((ROOT / "results" / stream).glob("*.json"))):
        if run.matrix.domains in found and run.config["preset"] == SAME_NETWORK and counts(run):
            accuracy = mean(run.matrix.average(metric) for metric in METRICS)
            found[run.matrix.domains].setdefault(run.method, []).append(accuracy)
    order = max(found, key=lambda order: len(found[order]))
    return order, {name: mean(found[order][name]) for name in METHODS if name in found[order]}


def averages(stream: str) -> Mapping[str, float]:
    """The mean accuracy of every method that was run on a stream."""
    return measured(stream)[1]


def family(name: str) -> str:
    """The family of a method, with the kinds of domain generalisation as one."""
    full = METHODS[name].family
    return GENERALISATION if full.endswith("generalisation") else full


def best_methods() -> str:
    """For every situation, the methods that suit it and reached most, on every stream."""
    streams = [stream for stream in SHOWN if averages(stream)]
    lines = [f"| what you have | {' | '.join(map(_named, streams))} |", f"|---|{'---|' * len(streams)}"]
    for asked in ASKED:
        phrases = [phrase for phrase in asked.split(", ") if phrase]
        options = {one.name: one.options for one in choose(phrases) if not one.reasons}
        cells = [_best(averages(stream), options) for stream in streams]
        lines.append(f"| {f'`{asked}`' if asked else 'no restriction'} | {' | '.join(cells)} |")
    missing = {s: [f"`{name}`" for name in METHODS if name not in averages(s)] for s in SHOWN}
    notes = [f"* Not measured on {stream}: {', '.join(names)}." for stream, names in missing.items() if names]
    return "\n".join([*lines, "", *notes])


def _named(stream: str) -> str:
    return f"{stream}, {'>'.join(measured(stream)[0])}"


def _best(found: Mapping[str, float], options: Mapping[str, Sequence[str]], count: int = 3) -> str:
    names = sorted(found.keys() & options.keys(), key=found.__getitem__, reverse=True)[:count]
    return ", ".join(f"`{name}`{MARK * bool(options[name])}&nbsp;{found[name]:.1f}" for name in names) or "–"


def draw() -> bytes:
    """Accuracy against time, one panel per stream, one colour per family."""
    streams = [stream for stream in SHOWN if averages(stream)]
    families = list(dict.fromkeys(map(family, METHODS)))
    time = relative_costs()["time"]
    with house_style():
        figure, axes = panels(len(streams), 4.2, 4.4, columns=3, share_y=False)
        for ax, stream in zip(axes, streams, strict=True):
            ax.set_title(_named(stream))
            ax.set_xscale("log")
            ax.grid()
            points = {name: (time[name], y) for name, y in averages(stream).items() if name in time}
            for name, (x, y) in points.items():
                index = families.index(family(name))
                ax.plot(x, y, MARKERS[index], color=COLOURS[index], markersize=5)
            ax.set_xlim(0.25, 3 * max(time.values()))
            ax.set_xticks([1, 10, 100], ["1×", "10×", "100×"])
            ax.margins(y=0.12)
            ax.set_xlabel("time of a run, relative to source-only")
        axes[0].set_ylabel("mean of TDG, TDA and FA (%)")
        handles = [
            Line2D([], [], marker=MARKERS[i], color=COLOURS[i], linestyle="", markersize=5, label=name)
            for i, name in enumerate(families)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(families))
        figure.canvas.draw()
        figure.set_layout_engine("none")
        for ax, stream in zip(axes, streams, strict=True):
            _label(ax, {name: (time[name], y) for name, y in averages(stream).items() if name in time})
    return encode(figure, "png", dpi=150)


def _label(ax: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Names every point, at a place near it where the name covers neither a point nor another name."""
    scale = ax.figure.dpi / 72  # pixels of a point of type
    pixels = {name: ax.transData.transform(point) for name, point in points.items()}
    taken = [(x, y, 3 * scale, 3 * scale) for x, y in pixels.values()]
    for name, (x, y) in sorted(pixels.items(), key=lambda item: -item[1][1]):
        half_width, half_height = (2.2 * len(name) + 1) * scale, 4.2 * scale
        places = [
            (
                x + side * (half_width + (4 + 4 * reach) * scale),
                y + up * (4 + 8 * reach) * scale,
                half_width,
                half_height,
            )
            for reach in range(12)
            for side, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
        ]
        place = next((place for place in places if not any(_overlap(place, other) for other in taken)), places[0])
        taken.append(place)
        offset = ((place[0] - x) / scale, (place[1] - y) / scale)
        far = abs(offset[1]) > 12
        line = {"arrowstyle": "-", "color": "#9aa5b1", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        style = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": INK}
        ax.annotate(name, points[name], offset, textcoords="offset points", arrowprops=line if far else None, **style)


def _overlap(some: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two boxes, by centre and half sizes, overlap."""
    return all(abs(some[axis] - other[axis]) < some[axis + 2] + other[axis + 2] for axis in (0, 1))
