"""Writes the generated parts of README and docs: tables from results/, the list of RaTP's switches.

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ratp.config import as_dict, switches
from ratp.methods.ratp import RaTP
from ratp.plan import preset_config
from ratp.record import read_run
from ratp.report.tables import comparison_markdown

ROOT = Path(__file__).parents[1]


def demo_table() -> str:
    """RaTP and source-only on the demo stream."""
    runs = [read_run(path) for path in sorted((ROOT / "results" / "demo").glob("*.json"))]
    order = sorted(runs, key=lambda run: (run.method != "source-only", run.seed))
    return comparison_markdown(order)


def switch_table() -> str:
    """All switches of RaTP with their values in both presets."""
    official, paper = (preset_config(RaTP, name) for name in ("official", "paper"))
    values = as_dict(paper)
    lines = ["| row | switch | official | paper | what it does |", "|---|---|---|---|---|"]
    for item in switches(official):
        cells = [_cell(as_dict(official)[item.name]), _cell(values[item.name])]
        if cells[0] != cells[1]:
            cells[1] = f"**{cells[1]}**"
        lines.append(f"| {item.row or ''} | `{item.name}` | {cells[0]} | {cells[1]} | {item.explanation} |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


PARTS: dict[str, Callable[[], str]] = {"demo table": demo_table, "switches": switch_table}


def generate(text: str) -> str:
    """A document with its generated parts made anew."""
    for name, make in PARTS.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        if re.search(pattern, text, flags=re.S):
            text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make().rstrip()}\n{m[2]}", text, flags=re.S)
    return text


def main() -> None:
    """Brings all documents up to date, or with ``--check`` fails if one is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        new = generate(text)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if stale:
        print(f"{'out of date' if check else 'updated'}: {', '.join(stale)}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
