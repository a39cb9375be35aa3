"""Draws a run's embeddings after every stage, laid out by t-SNE: above by class, below by domain.

Good features keep classes apart and the domains of a class together. Every stage is laid out on its own: only short
distances mean anything, and the axes mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ratp._core.files import FEATURES, read_tensors
from ratp.errors import RunDirectoryError
from ratp.reports.style import COLOURS, MARKERS, QUIET, house_style, plain
from ratp.runs.record import RunRecord

MOST = 1000  # points per stage, for which t-SNE takes a second or two
PERPLEXITY = 30.0
_FEWEST = 4  # points that t-SNE can lay out
_INCHES = 2.3
_KEYS = "embedding", "labels", "domains"


def feature_maps(run: RunRecord) -> Figure | None:
    """The embeddings a run kept, one column per stage; None if it kept none, or too few to lay out."""
    stages = [_read(path) for path in run.features]
    stages = [(tensors, about) for tensors, about in stages if len(tensors["embedding"]) >= _FEWEST]
    if not stages:
        return None
    last = stages[-1][1]  # earlier ones may be from a run with fewer domains
    domains, classes = last["domains"], last["classes"]
    with house_style():
        figure = Figure(figsize=(_INCHES * len(stages) + 1.6, 2 * _INCHES + 0.5), layout="constrained")
        axes = figure.subplots(2, len(stages), squeeze=False)
        for column, (tensors, about) in enumerate(stages):
            places = _layout(tensors["embedding"])
            for row, key in enumerate(("labels", "domains")):
                _scatter(axes[row][column], places, tensors[key][: len(places)])
            axes[0][column].set_title(f"after {plain(about['domains'][about['stage']], 16)}")
        for row, (what, kinds) in enumerate((("by class", classes), ("by domain", domains))):
            axes[row][0].set_ylabel(what)
            marks = [_mark(number, plain(kind, 16, lines=1)) for number, kind in enumerate(kinds[:20])]
            axes[row][-1].legend(handles=marks, loc="center left", bbox_to_anchor=(1.02, 0.5), handletextpad=0.2)
    return figure


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Reads a file: an even choice of at most ``MOST`` points, and its metadata."""
    tensors, about = read_tensors(path)
    about = FEATURES.read(about, path)
    try:
        count = len(tensors["embedding"])
        chosen = np.linspace(0, count - 1, min(count, MOST)).round().astype(int)
        kept = {name: tensors[name].numpy()[chosen] for name in _KEYS}
        _check(kept, about)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RunDirectoryError(f"{path} holds no embeddings ({error}).") from error
    return kept, about


def _check(found: dict[str, NDArray[Any]], about: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for what cannot be drawn."""
    points, names = found["embedding"], {"labels": about["classes"], "domains": about["domains"]}
    if points.ndim != 2 or not points.shape[1] or not np.isfinite(points).all():
        raise ValueError("they are not rows of numbers")
    for key, texts in names.items():
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("their names are missing")
        kinds = found[key]
        if kinds.dtype.kind not in "iu" or kinds.ndim != 1 or not ((kinds >= 0) & (kinds < len(texts))).all():
            raise ValueError(f"{key} are out of range")
    if type(about["stage"]) is not int or not 0 <= about["stage"] < len(about["domains"]):
        raise ValueError("their stage is missing")


def _layout(embedding: NDArray[Any]) -> NDArray[Any]:
    """Lays embeddings out in a plane, always the same way."""
    from sklearn.manifold import TSNE  # takes seconds

    lengths = np.linalg.norm(embedding, axis=1, keepdims=True)
    unit = embedding / np.maximum(lengths, 1e-12)
    perplexity = min(PERPLEXITY, (len(unit) - 1) / 3)
    places: NDArray[Any] = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    return places


def _scatter(ax: Axes, places: NDArray[Any], kinds: NDArray[Any]) -> None:
    for kind in np.unique(kinds):
        x, y = places[kinds == kind].T
        colour, marker = _colour_and_marker(int(kind))
        ax.scatter(x, y, s=7, color=colour, marker=marker, linewidths=0, alpha=0.75)
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ("left", "bottom", "top", "right"):
        ax.spines[side].set_visible(True)
        ax.spines[side].set_color(QUIET)


def _colour_and_marker(kind: int) -> tuple[str, str]:
    """Colour and marker, unique for the first 49 kinds."""
    return COLOURS[kind % len(COLOURS)], MARKERS[(kind // len(COLOURS)) % len(MARKERS)]


def _mark(kind: int, name: str) -> Line2D:
    colour, marker = _colour_and_marker(kind)
    return Line2D([], [], linestyle="none", color=colour, marker=marker, markersize=5, label=name)
