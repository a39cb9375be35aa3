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

A grid is all its methods, variants and swept values, in all its orders, with all its seeds. Its title, if it has one,
stands above its figures of variants and sweeps in the report. Files and folders are named as seen from the study file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ratp.errors import ConfigError, unknown
from ratp.files import safe_name
from ratp.methods import METHODS
from ratp.plan import find_device, resolve
from ratp.precision import find_precision
from ratp.request import DEFAULT_PRESET, RunRequest
from ratp.streams import STREAMS, is_folder
from ratp.study import Entry, Study, run_name
from ratp.study_record import Row, told_apart

Values = Mapping[str, Any]
# Row, method, preset and switches.
_Case = tuple[Row, str, str, Values]

_TOP = {"title": str, "grid": list}
_GRID: Mapping[str, type] = {
    "title": str,
    "stream": str,
    "orders": list,
    "methods": list,
    "seeds": list,
    "preset": str,
    "subset": bool,
    "precision": str,
    "guard": str,
    "set": dict,
    "sweep": dict,
    "variant": list,
}
_VARIANT: Mapping[str, type] = {"name": str, "method": str, "preset": str, "set": dict}
_KINDS: Mapping[type, str] = {str: "a text", list: "a list", bool: "true or false", dict: "a table"}
_TABLES = {"grid": "[[grid]]", "variant": "[[grid.variant]]"}
# A message names at most so many rows.
_MOST_ROWS = 3


def usual_folder(name: str) -> Path:
    """Where the runs of a study lie unless another folder is asked for."""
    return Path("runs") / "studies" / safe_name(name)


def read_study(path: Path | str, folder: Path | None = None, base: RunRequest | None = None) -> Study:
    """Reads a study file and plans all its runs.

    Args:
        path: The file.
        folder: Folder of its runs; by default ``runs/studies/NAME``.
        base: What the file does not say: device, precision, images, weights.

    Raises:
        ConfigError: With one sentence for every mistake in the file.
    """
    path = Path(path)
    content = _parsed(path)
    base, asked_wrongly = _checked(base or RunRequest())
    problems = _wrong_keys(content, _TOP, "")
    grids = content.get("grid", [])
    if not grids:
        problems.append("it has no runs: it needs a [[grid]] with a stream and methods.")
    cases: list[tuple[Row, RunRequest]] = []
    titles: dict[int, str] = {}
    for number, grid in enumerate(grids if isinstance(grids, list) else []):
        reader = _GridReader(number, grid, base, path.parent)
        cases += reader.cases()
        problems += reader.problems
        if reader.title:
            titles[number] = reader.title
    place = folder or usual_folder(path.stem)
    entries, wrong = _entries(cases, place)
    if asked_wrongly or problems or wrong:
        raise ConfigError([*asked_wrongly, *(f"{path.name}: {p}" for p in dict.fromkeys([*problems, *wrong]))])
    return Study(_line(content.get("title", path.stem)), path, place, entries, titles)


def _checked(base: RunRequest) -> tuple[RunRequest, list[str]]:
    """What the file does not say, without what is wrong with it; that is no mistake of the file."""
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


class _GridReader:
    """Reads one grid. A mistake hides no other: what is wrong is left out, and the rest is read."""

    def __init__(self, number: int, grid: Any, base: RunRequest, folder: Path) -> None:
        self._number, self._base, self._folder = number, base, folder
        self._where = f"grid {number + 1}"
        given: dict[str, Any] = grid if isinstance(grid, dict) else {}
        self.problems: list[str] = [] if isinstance(grid, dict) else [f"{self._where} must be a table, [[grid]]."]
        self.problems += _wrong_keys(given, _GRID, f"{self._where}: ")
        self._given = given.keys()
        self._grid: dict[str, Any] = {
            key: value for key, value in given.items() if isinstance(value, _GRID.get(key, ()))
        }

    @property
    def title(self) -> str:
        """What it is about, if it says so."""
        return _line(self._grid.get("title", ""))

    def cases(self) -> list[tuple[Row, RunRequest]]:
        """Every run asked for, in the order of the file."""
        if not self._given:
            self.problems = self.problems or [f"{self._where} is empty: it needs a stream and methods."]
            return []
        if "stream" not in self._given:
            self.problems.append(f'{self._where} names no stream, e.g. stream = "digits".')
        rows = [*self._methods(), *self._variants(), *self._sweep()]
        self.problems += [f"{self._where} has two rows called {name!r}." for name in _repeated(rows)]
        if not rows and not self._given & {"methods", "variant", "sweep"}:
            self.problems.append(f"{self._where} has no runs: it needs methods, variants or a sweep.")
        orders = self._listed("orders", ["default"], str, "texts")
        seeds = self._listed("seeds", [2022], int, "whole numbers")
        stream = self._grid.get("stream")
        request = replace(
            self._base,
            stream=self._base.stream if stream is None else self._stream(stream),
            subset=self._grid.get("subset", False),
            precision=self._grid.get("precision", self._base.precision),
            guard=self._grid.get("guard", "record"),  # a study compares methods, not what was done about them
        )
        return [
            (row, replace(request, method=method, preset=preset, changes=changes, order=order, seed=seed))
            for (row, method, preset, changes), order, seed in product(
                rows, orders if stream is not None else ["default"], seeds
            )
        ]

    def _methods(self) -> list[_Case]:
        names = self._listed("methods", [], str, "texts")
        names = [name for given in names for name in (METHODS if given == "all" else [given])]
        return [
            (Row(self._number, name), self._method(name), self._preset, self._changes) for name in dict.fromkeys(names)
        ]

    def _variants(self) -> list[_Case]:
        found: list[_Case] = []
        for number, variant in enumerate(self._grid.get("variant", [])):
            where = f"{self._where}, variant {number + 1}"
            if not isinstance(variant, dict):
                self.problems.append(f"{where} must be a table, [[grid.variant]].")
                continue
            wrong = _wrong_keys(variant, _VARIANT, f"{where}: ")
            texts = {key: _line(variant.get(key, "")) for key in ("name", "method")}
            wrong += [f"{where} has no {key}." for key, text in texts.items() if not text]
            self.problems += wrong
            right: dict[str, Any] = {
                key: value for key, value in variant.items() if isinstance(value, _VARIANT.get(key, ()))
            }
            if "method" in right and texts["method"]:
                changes = {**self._changes, **_switches(right.get("set", {}))}
                row = Row(self._number, texts["name"] or f"variant {number + 1}", is_variant=True)
                found.append((row, self._method(texts["method"]), right.get("preset", self._preset), changes))
        return found

    def _sweep(self) -> list[_Case]:
        """The values of each swept switch, one switch at a time, with the grid's only method."""
        swept = _flat(self._grid.get("sweep", {}))
        methods = self._grid.get("methods", [])
        if not swept:
            return []
        if len(methods) != 1 or methods == ["all"]:
            self.problems.append(f"{self._where} sweeps switches of one method: it must name just that one.")
            return []
        found: list[_Case] = []
        for name, values in swept.items():
            if not isinstance(values, list) or not values:
                self.problems.append(f"{self._where}: sweep of {name} must list values, e.g. [0.5, 0.9].")
                continue
            given = [_hashable(value) for value in values]
            if twice := [_written(value) for value in dict.fromkeys(given) if given.count(value) > 1]:
                self.problems.append(f"{self._where}: sweep of {name} has {', '.join(twice)} more than once.")
            for value in dict.fromkeys(given):
                row = Row(self._number, f"{methods[0]}, {name} {_written(value)}", (name, value))
                found.append((row, self._method(str(methods[0])), self._preset, {**self._changes, name: value}))
        return found

    def _stream(self, name: str) -> str:
        """The name of a stream, or its file or folder, which is named as seen from the study file."""
        path = self._folder / name
        is_path = name not in STREAMS and name.strip() and (name.endswith(".toml") or is_folder(path))
        return str(path) if is_path else name

    def _method(self, name: str) -> str:
        """The name of a method, or its file, likewise."""
        return str(self._folder / name) if name.endswith(".py") else name

    @cached_property
    def _preset(self) -> str:
        return str(self._grid.get("preset", DEFAULT_PRESET))

    @cached_property
    def _changes(self) -> Values:
        return _switches(self._grid.get("set", {}))

    def _listed(self, key: str, usual: list[Any], kind: type, kinds: str) -> list[Any]:
        """The values of a list that are what they should be; the usual ones if there are none."""
        values = self._grid.get(key, usual)
        right = [value for value in values if isinstance(value, kind) and not isinstance(value, bool)]
        wrong = [_shown(value) for value in values if not isinstance(value, kind) or isinstance(value, bool)]
        if wrong:
            self.problems.append(f"{self._where}: {key} must be {kinds}, got {', '.join(wrong)}.")
        if not values and key in self._grid:
            self.problems.append(f"{self._where}: {key} is empty.")
        if twice := [value for value in dict.fromkeys(right) if right.count(value) > 1]:
            self.problems.append(f"{self._where}: {key} has {', '.join(map(str, twice))} more than once.")
        return right or usual


def _repeated(rows: Sequence[_Case]) -> list[str]:
    """What several rows are called, so that no table could tell them apart."""
    labels = [row.label for row, *_ in rows]
    return sorted({label for label in labels if labels.count(label) > 1})


def _entries(cases: Sequence[tuple[Row, RunRequest]], folder: Path) -> tuple[tuple[Entry, ...], list[str]]:
    """Plans of all cases, the same run once; and what hinders them, the same mistake of several rows once."""
    wrong: dict[tuple[int, str], dict[str, None]] = {}
    labels: dict[int, dict[str, None]] = {}
    streams: dict[str, Mapping[str, str]] = {}
    found: dict[str, Entry] = {}
    for row, request in cases:
        labels.setdefault(row.grid, {})[row.label] = None
        try:
            plan = resolve(request)
            name = run_name(plan)
            known = found.get(name)
            if known and known.plan.precision != plan.precision:
                both = f"{known.plan.precision} and {plan.precision}"
                raise ConfigError(f"two grids ask for the same run in {both}: give each precision a study of its own.")
            if streams.setdefault(plan.spec.name, plan.spec.domains) != plan.spec.domains:
                raise ConfigError(
                    f"two streams are called {plan.spec.name!r}: give one another name, in a .toml file of its own."
                )
        except ConfigError as error:
            for problem in error.problems:
                wrong.setdefault((row.grid, problem), {})[row.label] = None
            continue
        rows = (*known.rows, row) if known else (row,)
        found[name] = Entry(plan, folder / name, tuple(dict.fromkeys(rows)))
    entries = found.values()
    clear = told_apart([(entry.rows, entry.plan.spec.name, entry.settings) for entry in entries])
    problems = []
    for (grid, problem), affected in wrong.items():
        some = [*list(affected)[:_MOST_ROWS], *(["…"] if len(affected) > _MOST_ROWS else [])]
        where = "" if len(affected) == len(labels[grid]) else f", {'; '.join(some)}"
        problems.append(f"grid {grid + 1}{where}: {problem}")
    return tuple(replace(entry, rows=rows) for entry, rows in zip(entries, clear, strict=True)), problems


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a mark
    except OSError as error:
        raise ConfigError(f"cannot read the study {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8.") from error
    except (ValueError, RecursionError) as error:  # too long a number, too deep a list
        raise ConfigError(f"{path} is no TOML: {error}.") from error


def _wrong_keys(table: Values, known: Mapping[str, type], where: str) -> list[str]:
    """A sentence for every name that does not exist and every value of another kind."""
    wrong = []
    for key, value in table.items():
        if key not in known:
            wrong.append(f"{where}{unknown('key', key, known)}")
        elif key in _TABLES and isinstance(value, dict):
            wrong.append(f"{where}{key} must be written {_TABLES[key]}, with two brackets.")
        elif not isinstance(value, known[key]):
            wrong.append(f"{where}{key} must be {_KINDS[known[key]]}, got {_shown(value)}.")
    return wrong


def _shown(value: Any) -> str:
    """A value in a message: lists and tables by their kind, for they may be long."""
    return _KINDS[type(value)] if isinstance(value, list | dict) else repr(value)


def _line(text: Any) -> str:
    """A text on one line."""
    return " ".join(str(text).split())


def _flat(table: Values, prefix: str = "") -> dict[str, Any]:
    """Values by dotted name: TOML reads ``randmix.tanh = false`` as a table within a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _switches(table: Values) -> dict[str, Any]:
    """Values of switches by dotted name."""
    return {name: _hashable(value) for name, value in _flat(table).items()}


def _hashable(value: Any) -> Any:
    """A list as a tuple."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _written(value: Any) -> str:
    """A value of a switch, as one gives it to ``--set``."""
    return ",".join(map(_written, value)) if isinstance(value, tuple) else str(value)
