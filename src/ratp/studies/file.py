"""Study files: many runs as a grid of methods, orders, seeds and switches, in TOML.

    title = "RaTP and SHOT, two orders"

    [[grid]]
    title = "RandMix"
    stream = "digits"
    orders = ["default", "reverse"]
    methods = ["ratp", "shot"]
    seeds = [2022, 2023]

    [[grid.variant]]
    name = "without RandMix"
    method = "ratp"
    set = { augment = false }

    [[grid]]
    stream = "digits"
    methods = ["ratp"]
    sweep = { r_con = [0.5, 0.9] }

A grid runs all its methods, variants and swept values in all its orders with all its seeds. Its title, if it has one,
heads its figures in the report. Files and folders are relative to the study file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ratp._core.environment import find_device, find_precision
from ratp._core.files import safe_name
from ratp._core.toml import check_table, flat, read_toml, shown
from ratp.config import as_dict
from ratp.errors import ConfigError
from ratp.methods import METHODS
from ratp.runs import DEFAULT_PRESET
from ratp.runs.plan import NO_WEIGHTS, PUBLISHED, RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.streams import STREAMS, is_folder
from ratp.studies.record import Row, distinct_labels
from ratp.studies.reuse import Identity
from ratp.studies.sources import sources_of
from ratp.studies.study import Entry, Study, usual_folder

_TOP = {"title": str, "grid": list}
_GRID = {
    **dict.fromkeys(("title", "stream", "preset", "precision", "guard"), str),
    **dict.fromkeys(("orders", "methods", "seeds", "variant"), list),
    **dict.fromkeys(("set", "sweep"), dict),
    "subset": bool,
}
_VARIANT = {"name": str, "method": str, "preset": str, "set": dict}
_LISTS_OF_TABLES = {"grid": "[[grid]]", "variant": "[[grid.variant]]"}
# Runs in a study; planning that many takes some ten seconds.
MOST_RUNS = 10_000
# A message names at most this many rows.
_MOST_ROWS = 3


def read_study(
    path: Path | str,
    folder: Path | None = None,
    base: RunRequest | None = None,
    *,
    trust_methods: bool = False,
    left_out: list[str] | None = None,
) -> Study:
    """Reads a study file and plans all its runs.

    Args:
        path: The file.
        folder: Folder of its runs; by default ``runs/studies/NAME``.
        base: What the file does not say: device, precision, images, weights.
        trust_methods: Whether to load the ``.py`` files it names as methods, which runs their code.
        left_out: Collects those files, whose runs are left out. By default they are refused.
    """
    path = Path(path)
    content = read_toml(path, "study")
    base, option_problems = _usable_options(base or RunRequest())
    problems: list[str] = []
    check_table(content, _TOP, "", problems, _LISTS_OF_TABLES)
    tables = content.get("grid", [])
    if not tables:
        problems.append("it has no runs: it needs a [[grid]] with a stream and methods.")
    tables = tables if isinstance(tables, list) else []
    grids = [_Grid(number, table, base, path.parent, problems) for number, table in enumerate(tables)]
    cases = [case for grid in grids for case in grid.cases()]
    if len(cases) > MOST_RUNS:
        problems.append(_too_many("it", len(cases)))
        cases = []
    programs = [] if trust_methods else list(dict.fromkeys(r.method for _, r in cases if r.method.endswith(".py")))
    cases = [case for case in cases if case[1].method not in programs]
    if left_out is not None:
        left_out += programs
    elif programs:
        names = ", ".join(programs[:_MOST_ROWS]) + (", …" if len(programs) > _MOST_ROWS else "")
        problems.append(f"it names programs as methods: {names}. Read them: they run only with --trust-methods.")
    place = folder or usual_folder(path.stem)
    entries = _entries(cases, place, problems)
    if option_problems or problems:
        raise ConfigError([*option_problems, *(f"{path.name}: {p}" for p in dict.fromkeys(problems))])
    titles = {grid.number: grid.title for grid in grids if grid.title}
    sources = sources_of(path, base.weights, _files(entries))
    return Study(_line(content.get("title", path.stem)), path, place, entries, titles, _usual(entries), sources)


def _usable_options(base: RunRequest) -> tuple[RunRequest, list[str]]:
    """The options without those that are wrong, which are not mistakes in the file; and a sentence for each."""
    problems: list[str] = []
    device = torch.device("cpu")
    try:
        device = find_device(base.device)
    except ConfigError as error:
        problems += error.problems
        base = replace(base, device="auto")
    try:
        find_precision(base.precision, device)
    except ConfigError as error:
        problems += error.problems
        base = replace(base, precision="auto")
    return base, problems


class _Grid:
    """One grid. Wrong values are left out and the rest is read, so that no mistake hides another."""

    def __init__(self, number: int, table: Any, base: RunRequest, folder: Path, problems: list[str]) -> None:
        self.number, self._base, self._folder, self._problems = number, base, folder, problems
        self._where = f"grid {number + 1}"
        self._given = table.keys() if isinstance(table, dict) else None
        self._values = self._table(table, _GRID, self._where, "[[grid]]")
        self.title = _line(self._values.get("title", ""))
        self._preset = self._values.get("preset", DEFAULT_PRESET)
        self._changes = _switches(self._values.get("set", {}))

    def _table(self, table: Any, kinds: Mapping[str, type], where: str, brackets: str) -> dict[str, Any]:
        if isinstance(table, dict):
            return check_table(table, kinds, where, self._problems, _LISTS_OF_TABLES)
        self._problems.append(f"{where} must be a table, {brackets}.")
        return {}

    def cases(self) -> list[tuple[Row, RunRequest]]:
        """Every requested run, in the order of the file."""
        if not self._given:
            if self._given is not None:
                self._problems.append(f"{self._where} is empty: it needs a stream and methods.")
            return []
        if "stream" not in self._given:
            self._problems.append(f'{self._where} names no stream, e.g. stream = "digits".')
        rows = [*self._methods(), *self._variants(), *self._sweep()]
        repeated = sorted(label for label, times in Counter(row.label for row, _ in rows).items() if times > 1)
        self._problems += [f"{self._where} has two rows called {label!r}." for label in repeated]
        if not rows and not self._given & {"methods", "variant", "sweep"}:
            self._problems.append(f"{self._where} has no runs: it needs methods, variants or a sweep.")
        orders = self._list("orders", ["default"], str, "texts")
        seeds = self._list("seeds", [2022], int, "whole numbers")
        if (count := len(rows) * len(orders) * len(seeds)) > MOST_RUNS:
            self._problems.append(_too_many(self._where, count))
            return []
        shared: dict[str, Any] = {key: self._values[key] for key in ("subset", "precision") if key in self._values}
        shared["guard"] = self._values.get("guard", "record")  # a study compares methods, not the guard's rollbacks
        if "stream" in self._values:
            shared["stream"] = self._stream(self._values["stream"])
        else:
            orders = ["default"]
        return [
            (row, replace(request, order=order, seed=seed, **shared))
            for (row, request), order, seed in product(rows, orders, seeds)
        ]

    def _row(
        self, label: str, method: str, changes: Mapping[str, Any], preset: str | None = None, **about: Any
    ) -> tuple[Row, RunRequest]:
        file = str(self._folder / method) if method.endswith(".py") else method
        request = replace(self._base, method=file, preset=preset or self._preset, changes={**self._changes, **changes})
        return Row(self.number, label, **about), request

    def _methods(self) -> list[tuple[Row, RunRequest]]:
        names = self._list("methods", [], str, "texts")
        names = [name for given in names for name in (METHODS if given == "all" else [given])]
        preset = "" if self._preset == DEFAULT_PRESET else f" ({self._preset})"
        return [self._row(f"{name}{preset}", name, {}) for name in dict.fromkeys(names)]

    def _variants(self) -> list[tuple[Row, RunRequest]]:
        rows = []
        for number, table in enumerate(self._values.get("variant", []), start=1):
            where = f"{self._where}, variant {number}"
            variant = self._table(table, _VARIANT, where, "[[grid.variant]]")
            given = table if isinstance(table, dict) else {"name": table, "method": table}
            for key in ("name", "method"):
                if not _line(given.get(key, "")):
                    self._problems.append(f"{where} has no {key}.")
            if method := _line(variant.get("method", "")):
                label = _line(variant.get("name", "")) or f"variant {number}"
                changes = _switches(variant.get("set", {}))
                rows.append(self._row(label, method, changes, variant.get("preset"), is_variant=True))
        return rows

    def _sweep(self) -> list[tuple[Row, RunRequest]]:
        """The values of each swept switch, one switch at a time, with the grid's only method."""
        swept = flat(self._values.get("sweep", {}))
        methods = self._values.get("methods", [])
        if not swept:
            return []
        if len(methods) != 1 or methods == ["all"]:
            self._problems.append(f"{self._where} sweeps switches of one method: it must name just that one.")
            return []
        rows = []
        for name, values in swept.items():
            where = f"{self._where}: sweep of {name}"
            if not isinstance(values, list) or not values:
                self._problems.append(f"{where} must list values, e.g. [0.5, 0.9].")
                continue
            for value in self._unique([_hashable(value) for value in values], where):
                label = f"{methods[0]}, {name} {_written(value)}"
                rows.append(self._row(label, str(methods[0]), {name: value}, sweep=(name, value)))
        return rows

    def _stream(self, name: str) -> str:
        """The name of a stream; a file or folder is relative to the study file."""
        path = self._folder / name
        is_path = name not in STREAMS and name.strip() and (name.endswith(".toml") or is_folder(path))
        return str(path) if is_path else name

    def _list(self, key: str, default: list[Any], kind: type, kinds: str) -> list[Any]:
        """The valid values of a list; the default if there are none."""
        values = self._values.get(key, default)
        right = [value for value in values if isinstance(value, kind) and not isinstance(value, bool)]
        wrong = [shown(value) for value in values if not isinstance(value, kind) or isinstance(value, bool)]
        if wrong:
            self._problems.append(f"{self._where}: {key} must be {kinds}, got {', '.join(wrong)}.")
        if not values and key in self._values:
            self._problems.append(f"{self._where}: {key} is empty.")
        return self._unique(right, f"{self._where}: {key}") or default

    def _unique(self, values: Sequence[Any], where: str) -> list[Any]:
        if twice := [_written(value) for value, times in Counter(values).items() if times > 1]:
            self._problems.append(f"{where} has {', '.join(twice)} more than once.")
        return list(dict.fromkeys(values))


def _entries(cases: Sequence[tuple[Row, RunRequest]], folder: Path, problems: list[str]) -> tuple[Entry, ...]:
    """Plans all cases, the same run once. A mistake that several rows share is reported once."""
    wrong: dict[tuple[int, str], dict[str, None]] = {}
    labels: dict[int, dict[str, None]] = {}
    streams: dict[str, Mapping[str, str]] = {}
    found: dict[str, Entry] = {}
    plan: RunPlan | None = None
    for row, request in cases:
        labels.setdefault(row.grid, {})[row.label] = None
        try:
            plan = _planned(request, plan)
            name = run_name(plan)
            known = found.get(name)
            if known and known.plan.precision != plan.precision:
                both = f"{known.plan.precision} and {plan.precision}"
                raise ConfigError(f"two grids request the same run in {both}: use one study per precision.")
            if streams.setdefault(plan.spec.name, plan.spec.domains) != plan.spec.domains:
                raise ConfigError(
                    f"two streams are called {plan.spec.name!r}: rename one of them in its own .toml file."
                )
        except ConfigError as error:
            for problem in error.problems:
                wrong.setdefault((row.grid, problem), {})[row.label] = None
            continue
        if known:
            found[name] = replace(known, rows=tuple(dict.fromkeys((*known.rows, row))))
        else:
            found[name] = Entry(folder / name, (row,), Identity.of(plan), planned=plan)
    for (grid, problem), affected in wrong.items():
        some = [*list(affected)[:_MOST_ROWS], *(["…"] if len(affected) > _MOST_ROWS else [])]
        where = "" if len(affected) == len(labels[grid]) else f", {'; '.join(some)}"
        problems.append(f"grid {grid + 1}{where}: {problem}")
    entries = found.values()
    rows = distinct_labels([(entry.rows, entry.stream, entry.settings) for entry in entries])
    return tuple(replace(entry, rows=clear) for entry, clear in zip(entries, rows, strict=True))


def _planned(request: RunRequest, similar: RunPlan | None) -> RunPlan:
    """Plans a request; what differs from a plan in the seed alone need not be checked again."""
    if similar and replace(request, seed=similar.seed) == similar.request and 0 <= int(request.seed) < 2**63:
        return replace(similar, seed=int(request.seed), request=request)
    return resolve(request)


def run_name(plan: RunPlan) -> str:
    """Name of a run's directory: what it is, and the hash of everything that determines it."""
    return f"{safe_name(plan.title)}-{plan.digest()[:12]}"


def _files(entries: Sequence[Entry]) -> set[str]:
    """Files and folders that the plans depend on, besides the study file."""
    plans = [entry.plan for entry in entries]
    names = {name for p in plans if p.request for name in (p.request.stream, p.request.method, p.weights_from)}
    return names - {NO_WEIGHTS, PUBLISHED, *METHODS, *STREAMS}


def _usual(entries: Sequence[Entry]) -> dict[tuple[int, str], Any]:
    """The value of every swept switch in its grid's plain run."""
    swept = {(row.grid, row.sweep[0]) for entry in entries for row in entry.rows if row.sweep}
    usual: dict[tuple[int, str], Any] = {}
    for entry in entries:
        plain = {row.grid for row in entry.rows if row.sweep is None and not row.is_variant}
        values = as_dict(entry.plan.recipe) | as_dict(entry.plan.config)
        usual |= {(grid, name): _hashable(values[name]) for grid, name in swept if grid in plain}
    return usual


def _too_many(where: str, runs: int) -> str:
    return f"{where} has {runs:,} runs, and a study at most {MOST_RUNS:,}: split it into several studies."


def _line(text: Any) -> str:
    """A text on one line."""
    return " ".join(str(text).split())


def _switches(table: Mapping[str, Any]) -> dict[str, Any]:
    """Values of switches by dotted name."""
    return {name: _hashable(value) for name, value in flat(table).items()}


def _hashable(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _written(value: Any) -> str:
    """A value of a switch as ``--set`` takes it."""
    return ",".join(map(_written, value)) if isinstance(value, tuple) else str(value)
