"""The numbers the paper prints, cell by cell, under our names of methods, streams, orders and domains.

``deja-vu.json`` holds them table by table, as they are printed: mistakes of rounding are the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ratp.evaluation.matrix import AVERAGE, Metric

Experiment = Literal["main", "orders", "stationary"]

# Our names of the methods the paper compares, and how it spells them; in its order.
SPELLING: dict[str, str] = {
    "cotta": "CoTTA",
    "aucid": "AuCID",
    "shot": "SHOT",
    "shot+": "SHOT+",
    "shot++": "SHOT++",
    "gsfda": "GSFDA",
    "bmd": "BMD",
    "tent": "Tent",
    "t3a": "T3A",
    "adacon": "AdaCon",
    "eata": "EATA",
    "l2d": "L2D",
    "pden": "PDEN",
    "snr": "SNR",
    "pcl": "PCL",
    "efdm": "EFDM",
    "ratp": "RaTP",
}


@dataclass(frozen=True)
class Published:
    """A cell of a table of the paper.

    Attributes:
        experiment: ``main``, ``orders`` (ten orders) or ``stationary`` (one source, one target).
        table: Number of the table.
        stream: Name of the stream.
        order: Codes of the domains in their order of arrival; empty for a mean over all orders of the table.
        order_name: Name of the order in the stream, if it has one.
        metric: What is measured.
        domain: Code of the domain, or ``average``.
        method: Name of the method.
        value: Accuracy in percent.
    """

    experiment: Experiment
    table: int
    stream: str
    order: tuple[str, ...]
    order_name: str | None
    metric: Metric
    domain: str
    method: str
    value: float


@cache
def cells() -> tuple[Published, ...]:
    """All cells, table by table, method by method."""
    text = Path(__file__).with_name("deja-vu.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return tuple(cell for table in data["tables"] for cell in _read(table, data["orders"][table["stream"]]))


def printed(
    stream: str, order: tuple[str, ...], metric: Metric, domain: str, method: str, experiment: Experiment = "main"
) -> float | None:
    """What the paper prints in one cell; None if it has no such cell."""
    return _values().get((experiment, stream, order, metric, domain, method))


@cache
def _values() -> dict[tuple[object, ...], float]:
    return {(c.experiment, c.stream, c.order, c.metric, c.domain, c.method): c.value for c in cells()}


def _read(table: Mapping[str, Any], orders: Mapping[str, str]) -> Iterator[Published]:
    """The cells of one table of the file."""
    for method, row in table["rows"].items():
        for column, value in zip(table["columns"], row, strict=True):
            name, order, domain = _place(table, column, orders)
            yield Published(
                experiment=table["experiment"],
                table=table["table"],
                stream=table["stream"],
                order=tuple(order.split(">")) if order else (),
                order_name=name,
                metric=table["metric"],
                domain=domain,
                method=method,
                value=value,
            )


def _place(table: Mapping[str, Any], column: str, orders: Mapping[str, str]) -> tuple[str | None, str, str]:
    """Name and spelling of the order, and the domain, that a column stands for."""
    if table["experiment"] == "main":
        return table["order"], orders[table["order"]], column
    if column == AVERAGE:
        return None, "", AVERAGE
    if table["experiment"] == "orders":
        return column, orders[column], AVERAGE
    return None, column, column.split(">")[-1]
