"""Study files: many runs as a grid of methods, orders, seeds and switches, in TOML.

    title = "RaTP and SHOT, two orders"

    [[grid]]
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

A grid is all its methods, variants and swept values, in all its orders, with all its seeds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ratp.errors import ConfigError, unknown
from ratp.files import safe_name
from ratp.methods import METHODS
from ratp.plan import DEFAULT_PRESET, RunRequest, resolve
from ratp.study import Entry, Row, Study, run_name

Values = Mapping[str, Any]
# Row, method, preset and switches.
_Case = tuple[Row, str, str, Values]

_TOP = {"title": str, "grid": list}
_GRID: Mapping[str, type | tuple[type, ...]] = {
    "stream": str,
    "orders": list,
    "methods": list,
    "seeds": list,
    "preset": str,
    "subset": bool,
    "precision": str,
    "set": dict,
    "sweep": dict,
    "variant": list,
}
_VARIANT: Mapping[str, type | tuple[type, ...]] = {"name": str, "method": str, "preset": str, "set": dict}
_KINDS = {str: "a text", list: "a list", bool: "true or false", dict: "a table"}


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
    problems = _wrong_keys(content, _TOP, "")
    grids = content.get("grid", [])
    if not grids:
        problems.append(f"{path.name} has no runs: it needs a [[grid]] with a stream and methods.")
    cases: list[tuple[Row, RunRequest]] = []
    for number, grid in enumerate(grids if isinstance(grids, list) else []):
        reader = _GridReader(number, grid, base or RunRequest())
        cases += reader.cases()
        problems += reader.problems
    if problems:
        raise ConfigError([f"{path.name}: {problem}" for problem in dict.fromkeys(problems)])
    place = folder or Path("runs") / "studies" / safe_name(path.stem)
    return Study(str(content.get("title", path.stem)), path, place, _entries(cases, place, path.name))


class _GridReader:
    """Reads one grid."""

    def __init__(self, number: int, grid: Any, base: RunRequest) -> None:
        self._number, self._base = number, base
        self._where = f"grid {number + 1}"
        self._grid: dict[str, Any] = grid if isinstance(grid, dict) else {}
        self.problems: list[str] = [] if isinstance(grid, dict) else [f"{self._where} must be a table, [[grid]]."]
        self.problems += _wrong_keys(self._grid, _GRID, f"{self._where}: ")

    def cases(self) -> list[tuple[Row, RunRequest]]:
        """Every run asked for, in the order of the file; none if something is wrong."""
        if self.problems:
            return []
        if "stream" not in self._grid:
            self.problems.append(f'{self._where} names no stream, e.g. stream = "digits".')
        rows = [*self._methods(), *self._variants(), *self._sweep()]
        if not rows and not self.problems:
            self.problems.append(f"{self._where} is empty: it needs methods, variants or a sweep.")
        orders = self._listed("orders", ["default"], (str,))
        seeds = self._listed("seeds", [2022], (int,))
        if self.problems:
            return []
        stream = replace(
            self._base,
            stream=self._grid["stream"],
            subset=self._grid.get("subset", False),
            precision=self._grid.get("precision", self._base.precision),
        )
        return [
            (row, replace(stream, method=method, preset=preset, changes=changes, order=order, seed=seed))
            for (row, method, preset, changes), order, seed in product(rows, orders, seeds)
        ]

    def _methods(self) -> list[_Case]:
        names = self._listed("methods", [], (str,))
        names = [name for given in names for name in (METHODS if given == "all" else [given])]
        return [(Row(self._number, name), name, self._preset, self._changes) for name in dict.fromkeys(names)]

    def _variants(self) -> list[_Case]:
        found: list[_Case] = []
        for number, variant in enumerate(self._grid.get("variant", [])):
            where = f"{self._where}, variant {number + 1}"
            if not isinstance(variant, dict):
                self.problems.append(f"{where} must be a table, [[grid.variant]].")
                continue
            wrong = _wrong_keys(variant, _VARIANT, f"{where}: ")
            wrong += [f"{where} has no {key}." for key in ("name", "method") if key not in variant]
            self.problems += wrong
            if not wrong:
                changes = {**self._changes, **_switches(variant.get("set", {}))}
                row = Row(self._number, variant["name"])
                found.append((row, variant["method"], variant.get("preset", self._preset), changes))
        repeated = sorted({row.label for row, *_ in found if [r.label for r, *_ in found].count(row.label) > 1})
        self.problems += [f"{self._where} has two variants called {name!r}." for name in repeated]
        return found

    def _sweep(self) -> list[_Case]:
        """The values of each swept switch, one switch at a time, with the grid's only method."""
        swept = _flat(self._grid.get("sweep", {}))
        if not swept:
            return []
        methods = self._grid.get("methods", [])
        if len(methods) != 1 or methods == ["all"]:
            self.problems.append(f"{self._where} sweeps switches of one method: it must name just that one.")
            return []
        found: list[_Case] = []
        for name, values in swept.items():
            if not isinstance(values, list) or not values:
                self.problems.append(f"{self._where}: sweep of {name} must list values, e.g. [0.5, 0.9].")
                continue
            for value in values:
                row = Row(self._number, f"{methods[0]}, {name} {value}", (name, value))
                found.append((row, methods[0], self._preset, {**self._changes, name: value}))
        return found

    @cached_property
    def _preset(self) -> str:
        return str(self._grid.get("preset", DEFAULT_PRESET))

    @cached_property
    def _changes(self) -> Values:
        return _switches(self._grid.get("set", {}))

    def _listed(self, key: str, usual: list[Any], kinds: tuple[type, ...]) -> list[Any]:
        values = self._grid.get(key, usual)
        wrong = [value for value in values if not isinstance(value, kinds) or isinstance(value, bool)]
        if wrong:
            self.problems.append(f"{self._where}: {key} lists {wrong[0]!r}, which is no {kinds[0].__name__}.")
        if not values and key in self._grid and key != "methods":
            self.problems.append(f"{self._where}: {key} is empty.")
        return list(values)


def _entries(cases: Sequence[tuple[Row, RunRequest]], folder: Path, file: str) -> tuple[Entry, ...]:
    """Plans of all cases, the same run once."""
    problems: dict[str, None] = {}
    found: dict[str, Entry] = {}
    for row, request in cases:
        try:
            plan = resolve(request)
        except ConfigError as error:
            problems.update(dict.fromkeys(f"{file}: grid {row.grid + 1}, {row.label}: {p}" for p in error.problems))
            continue
        name = run_name(plan)
        known = found.get(name)
        rows = (*known.rows, row) if known else (row,)
        found[name] = Entry(plan, folder / name, tuple(dict.fromkeys(rows)))
    if problems:
        raise ConfigError(list(problems))
    return tuple(found.values())


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the study {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}.") from error


def _wrong_keys(table: Values, known: Mapping[str, Any], where: str) -> list[str]:
    """A sentence for every name that does not exist and every value of another kind."""
    wrong = []
    for key, value in table.items():
        if key not in known:
            wrong.append(f"{where}{unknown('key', key, known)}")
        elif not isinstance(value, known[key]):
            wrong.append(f"{where}{key} must be {_KINDS[known[key]]}, got {value!r}.")
    return wrong


def _flat(table: Values, prefix: str = "") -> dict[str, Any]:
    """Values by dotted name: TOML reads ``randmix.tanh = false`` as a table within a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _switches(table: Values) -> dict[str, Any]:
    """Values of switches by dotted name."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in _flat(table).items()}
