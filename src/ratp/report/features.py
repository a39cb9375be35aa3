"""A picture of what a method makes of images: its embeddings after every stage, laid out in a plane by t-SNE.

Above by class, below by domain: good features keep classes apart and the domains of a class together. Every stage is
laid out on its own; distances mean something between near points only, and axes mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ratp.errors import RunDirectoryError
from ratp.files import read_tensors
from ratp.record import RunRecord
from ratp.report.style import COLOURS, MARKERS, QUIET, house_style, plain
from ratp.schema import FEATURES

# Points of a stage: t-SNE takes a second or two for so many.
MOST = 1000
PERPLEXITY = 30.0
# Of fewer points, none has neighbours and others.
_FEWEST = 4
_INCHES = 2.3
_KEYS = "embedding", "labels", "domains"


def feature_maps(run: RunRecord) -> Figure | None:
    """The embeddings a run kept, a column a stage; None if it kept none, or of too few images to lay out.

    Raises:
        RunDirectoryError: If a file of them is damaged.
    """
    stages = [_read(path) for path in run.features]
    stages = [(tensors, about) for tensors, about in stages if len(tensors["embedding"]) >= _FEWEST]
    if not stages:
        return None
    last = stages[-1][1]  # an earlier one may be of a run that knew fewer domains
    domains, classes = last["domains"], last["classes"]
    with house_style():
        figure = Figure(figsize=(_INCHES * len(stages) + 1.6, 2 * _INCHES + 0.5), layout="constrained")
        axes = figure.subplots(2, len(stages), squeeze=False)
        for column, (tensors, about) in enumerate(stages):
            places = _laid_out(tensors["embedding"])
            for row, key in enumerate(("labels", "domains")):
                _scatter(axes[row][column], places, tensors[key][: len(places)])
            axes[0][column].set_title(f"after {plain(about['domains'][about['stage']], 16)}")
        for row, (what, kinds) in enumerate((("by class", classes), ("by domain", domains))):
            axes[row][0].set_ylabel(what)
            marks = [_mark(number, plain(kind, 16, lines=1)) for number, kind in enumerate(kinds[:20])]
            axes[row][-1].legend(handles=marks, loc="center left", bbox_to_anchor=(1.02, 0.5), handletextpad=0.2)
    return figure


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The tensors of a file, at most so many points of it, drawn evenly, and what is said about them."""
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
    """Refuses what cannot be drawn.

    Raises:
        KeyError, TypeError, ValueError: If it cannot.
    """
    points, names = found["embedding"], {"labels": about["classes"], "domains": about["domains"]}
    if points.ndim != 2 or not points.shape[1] or not np.isfinite(points).all():
        raise ValueError("they are no rows of numbers")
    for key, texts in names.items():
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("it does not say of what")
        kinds = found[key]
        if kinds.dtype.kind not in "iu" or kinds.ndim != 1 or not ((kinds >= 0) & (kinds < len(texts))).all():
            raise ValueError(f"{key} are not those it names")
    if type(about["stage"]) is not int or not 0 <= about["stage"] < len(about["domains"]):
        raise ValueError("it does not say of which stage")


def _laid_out(embedding: NDArray[Any]) -> NDArray[Any]:
    """Places in a plane, the same every time."""
    from sklearn.manifold import TSNE  # takes seconds

    lengths = np.linalg.norm(embedding, axis=1, keepdims=True)
    unit = embedding / np.maximum(lengths, 1e-12)
    perplexity = min(PERPLEXITY, (len(unit) - 1) / 3)
    places: NDArray[Any] = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    return places


def _scatter(ax: Axes, places: NDArray[Any], kinds: NDArray[Any]) -> None:
    for kind in np.unique(kinds):
        x, y = places[kinds == kind].T
        colour, marker = _look(int(kind))
        ax.scatter(x, y, s=7, color=colour, marker=marker, linewidths=0, alpha=0.75)
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ("left", "bottom", "top", "right"):
        ax.spines[side].set_visible(True)
        ax.spines[side].set_color(QUIET)


def _look(kind: int) -> tuple[str, str]:
    """Colour and marker, different for the first 49 kinds."""
    return COLOURS[kind % len(COLOURS)], MARKERS[(kind // len(COLOURS)) % len(MARKERS)]


def _mark(kind: int, name: str) -> Line2D:
    colour, marker = _look(kind)
    return Line2D([], [], linestyle="none", color=colour, marker=marker, markersize=5, label=name)
