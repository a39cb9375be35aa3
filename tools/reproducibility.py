"""Writes REPRODUCIBILITY.md: every number of the paper, ours beside it as far as it has been run, from results/."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

from published import SPELLING, Published, cells
from ratp.errors import RatpError
from ratp.evaluation.matrix import AVERAGE, Metric, Summary, summarise, verdict
from ratp.runs.plan import RunPlan, default_weights, resolve
from ratp.runs.record import RunRecord, read_run
from ratp.runs.request import RunRequest
from ratp.streams import find_stream
from ratp.studies.reuse import Identity

ROOT = Path(__file__).parents[1]
PAGE = "REPRODUCIBILITY.md"
TOLERANCE = 2.0
MISSING = "–"
RATP = "ratp"
SYN, DAGGER = "SD", "†"
NOT_RUN = "not run"
MARKS = {"close": "", "within spread": " ~", "above": " ▲", "below": " ▼"}
TITLES = {"main": "Main orders", "orders": "Ten orders", "stationary": "One source, one target"}

# What the paper takes away from RaTP for one source and one target: replay, distillation, old prototypes.
STATIONARY = {"memory.replay": "none", "distill.weight": 0, "pca.old_weight": 0}

# How a method was run, by the preset that says so. The first is the one that the summary counts.
PROTOCOLS = {"official": "same network", "own-head": "own head", "momentum": "momentum"}
SAME_NETWORK = "official"

# Methods whose numbers in the paper do not follow from its description.
UNEXPLAINED = {"snr": "‡"}

# Runs by stream, order, method and preset, then by seed.
Key = tuple[str, tuple[str, ...], str, str]
Results = Mapping[Key, Mapping[int, RunRecord]]


def snr_rows() -> str:
    """How far the paper's main numbers of SNR are from those of three other methods, in words."""
    main = {(c.stream, c.order, c.metric, c.domain, c.method): c.value for c in cells() if c.experiment == "main"}
    pairs = {
        other: [(value, main[(*key[:-1], other)]) for key, value in main.items() if key[-1] == "snr"]
        for other in ("pden", "l2d", "shot")
    }
    gaps = [f"{mean(abs(a - b) for a, b in found):.1f} points from {SPELLING[name]}'s" for name, found in pairs.items()]
    return f"its {len(pairs['shot'])} main numbers are on average {', '.join(gaps[:-1])} and {gaps[-1]}"


OPENING = f"""\
# Reproducibility

Every number in "Deja Vu: Continual Model Generalization for Unseen Domains" (Liu et al., ICLR 2023), tables 1 to 3 and
6 to 9, next to the result of this code. `make docs` writes this page from the files in `results/digits` and
`results/pacs`. These commands make such files:

```sh
ratp run digits --method shot --order default --seed 2022 --seed 2023 --seed 2024 --out runs/shot
ratp report runs/shot --export results/digits
```

There are three protocols, which differ only in how a baseline is set up:

* **same network**: all methods share RaTP's published network, head and optimiser (preset `official`). It is the
  protocol that the summary counts.
* **own head**: SHOT, SHOT+, SHOT++, GSFDA and BMD each have the head and the optimiser that they were published with
  (preset `own-head`, [which values](docs/reference/methods.md#source-free-methods-with-their-own-head)); feature
  extractor, images, steps and memory stay the same.
* **momentum**: the source model of the methods that adapt one at test time is trained with momentum 0.9 and Nesterov
  (preset `momentum`), as the paper's appendix says and its published code does not do.

These presets follow published values. We checked them on MT>MM of Digits and P>A of PACS with seed 2022, which looks at
the labels of those two targets, and changed nothing after that.

A file is used for a cell if it has the stream, order and method of the cell, the run is finished, and all its settings
are those of a protocol's preset today. There is one exception: for one source and one target (`--order 'P>A' --subset`)
the paper removes replay, distillation and the old prototypes from RaTP. For these cells RaTP's files are used only with
`{" ".join(f"--set {name}={value}" for name, value in STATIONARY.items())}`.

A cell reads `ours (paper) gap`: our mean over n seeds, ± the standard deviation if n > 1, the paper's number, and the
difference. A cell without a mark is *close*: our mean is at most {TOLERANCE:g} points away. ~ is *within spread*: our
mean is farther away, but with several seeds its 95 % confidence interval includes the paper's number, so the two may
agree. ▲ is above, ▼ below; all before rounding. {DAGGER} marks what depends on SYN, which is regenerated here: domain
{SYN}, everything measured after training on it, and every mean of such numbers. {UNEXPLAINED["snr"]} marks SNR, which
is not reproducible from its description: the paper describes SNR trained with SHOT, but {snr_rows()}.
`{MISSING} (paper)` has not been run. A mean over all orders uses the seeds with which every order was run.

## What differs from the paper

* Digits: 34,000 images each of MNIST, MNIST-M, SVHN and SYN and all 9,298 of USPS, as many as in Digits-Five, but a
  random choice of our own.
* MNIST-M and USPS have the frames of Digits-Five: MNIST-M without its margin of 2 pixels, USPS with one of 3.
* SYN ({SYN}) is regenerated from the published recipe, and calibrated against the originals shown in publications.
* PACS is re-encoded as WebP, and its images are resized before they are cropped. ResNet-50 starts from ImageNet weights
  whose convolutions are rounded to 16 bits.
* DomainNet has not been run, because we do not have its images.

[Benchmarks](docs/explanation/benchmarks.md) has the details, and says which runs used earlier code.
"""

TWICE = "Main orders are among the ten: their averages are printed in two tables, and counted in both."


@dataclass(frozen=True)
class Compared:
    """A cell of the paper, and what our runs give for it.

    Attributes:
        cell: What the paper prints.
        ours: Our values in short; None if it was not run.
        preset: How ours was run, by its preset.
    """

    cell: Published
    ours: Summary | None
    preset: str = SAME_NETWORK

    @property
    def verdict(self) -> str:
        """Whether ours is close, within the spread of our seeds, above or below, or not run."""
        return verdict(self.cell.value, self.ours, TOLERANCE) if self.ours else NOT_RUN

    def __str__(self) -> str:
        if not self.ours:
            return f"{MISSING} ({self.cell.value:.1f})"
        spread = "" if self.ours.is_single else f" ± {self.ours.deviation:.1f}"
        gap = f"{round(self.ours.mean - self.cell.value, 1) + 0.0:+.1f}".replace("-", "−")
        dagger = f" {DAGGER}" if depends_on_syn(self.cell) else ""
        return f"{self.ours.mean:.1f}{spread} ({self.cell.value:.1f}) {gap}{MARKS[self.verdict]}{dagger}"


def depends_on_syn(cell: Published) -> bool:
    """Whether a number would be another one with other images of SYN.

    On Digits that is the column of SYN and every row from its stage on. TDG and TDA of a domain are read off rows
    up to its own, so they are free of SYN on domains that come before it. FA always reads the last row, and an
    average always reads the column of SYN.
    """
    if cell.stream != "digits":
        return False
    if cell.metric == "FA" or cell.domain == AVERAGE:
        return True
    return cell.order.index(cell.domain) >= cell.order.index(SYN)


def counts(run: RunRecord) -> bool:
    """Whether a run is in the paper's setting: it came to its end, and all its values are those of today's preset."""
    preset = run.config["preset"] if run.config["preset"] in PROTOCOLS else SAME_NETWORK
    try:
        plan = planned(run.config["stream"], run.matrix.domains, run.method, run.seed, preset)
    except RatpError:  # no stream, order, method or preset of ours
        return False
    return run.matrix.complete and Identity.of(plan).matches(run.config)


@cache
def planned(stream: str, order: tuple[str, ...], method: str, seed: int, preset: str) -> RunPlan:
    """What to run for a cell of the paper."""
    changes = STATIONARY if method == RATP and len(order) == 2 else {}
    weights = default_weights(find_stream(stream).recipe.network.backbone)
    request = RunRequest(
        stream, method, ">".join(order), preset, seed=seed, changes=changes, subset=True, device="cpu", weights=weights
    )
    return resolve(request)


def collect(runs: Iterable[RunRecord]) -> Results:
    """The runs that count.

    Raises:
        RatpError: If two are of one stream, order, method, preset and seed, or two of one stream have other images or
            weights.
    """
    found: dict[Key, dict[int, RunRecord]] = {}
    made_from: dict[tuple[str, str], tuple[str | None, RunRecord]] = {}
    for run in filter(counts, runs):
        stream = run.config["stream"]
        seeds = found.setdefault((stream, run.matrix.domains, run.method, run.config["preset"]), {})
        if run.seed in seeds:
            raise RatpError(
                f"{run.path} and {seeds[run.seed].path} have the same stream, order, method, preset and seed."
            )
        seeds[run.seed] = run
        for name, sha256 in inputs(run).items():
            known, other = made_from.setdefault((stream, name), (sha256, run))
            if known != sha256:
                raise RatpError(f"{run.path} and {other.path} do not share {name}: put one into a folder of its own.")
    return found


def inputs(run: RunRecord) -> dict[str, str | None]:
    """Hashes of a run's images, by domain, and of the weights it started from."""
    return {**run.config["data"], "weights": run.config["weights"]}


def values(cell: Published, results: Results, preset: str = SAME_NETWORK) -> dict[int, float]:
    """What our runs give for a cell, by seed. A mean over orders takes the seeds that all of them were run with."""
    if cell.order:
        runs = results.get((cell.stream, cell.order, cell.method, preset), {})
        return {seed: _measured(run, cell.metric, cell.domain) for seed, run in runs.items()}
    kind = (cell.table, cell.metric, cell.method)
    orders = [part for part in cells() if part.order and (part.table, part.metric, part.method) == kind]
    parts = [values(part, results, preset) for part in orders]
    seeds = sorted(set.intersection(*map(set, parts)))
    return {seed: mean(part[seed] for part in parts) for seed in seeds}


def _measured(run: RunRecord, metric: Metric, domain: str) -> float:
    return run.matrix.average(metric) if domain == AVERAGE else run.matrix.metric(metric)[domain]


def compare(results: Results) -> list[Compared]:
    """All cells of the paper with our numbers: once on the same network, and once per further protocol that was run."""
    found = []
    for cell, preset in product(cells(), PROTOCOLS):
        ours = values(cell, results, preset)
        if ours or preset == SAME_NETWORK:
            found.append(Compared(cell, summarise(ours.values()) if ours else None, preset))
    return found


def page(folder: Path) -> str:
    """The whole page, from a folder with a folder of results a stream."""
    streams = dict.fromkeys(cell.stream for cell in cells())
    runs = [read_run(path) for stream in streams for path in sorted((folder / stream).glob("*.json"))]
    results = collect(runs)
    compared = compare(results)
    blocks = [OPENING.rstrip(), "## Summary", summary(compared), TWICE]
    for experiment, title in TITLES.items():
        blocks.append(f"## {title}")
        items = [item for item in compared if item.cell.experiment == experiment]
        blocks += by_order(items) if experiment == "main" else by_table(items)
    blocks += ["## Where our numbers come from", *provenance(runs, results)]
    return "\n\n".join(blocks) + "\n"


def summary(compared: Sequence[Compared]) -> str:
    """How many cells there are, how many were run, and how ours lie to them."""
    rows = []
    for preset, protocol in PROTOCOLS.items():
        items = [item for item in compared if item.preset == preset]
        for group in _groups(items, lambda item: (item.cell.experiment, item.cell.stream)):
            cell = group[0].cell
            rows.append([protocol, TITLES[cell.experiment], cell.stream, *_tally(group)])
        if preset == SAME_NETWORK:
            rows.append([protocol, "all", "", *_tally(items)])
            of_ratp = [item for item in items if item.cell.method == RATP]
            rows.append([protocol, "all of RaTP", "", *_tally(of_ratp)])
    head = ["protocol", "experiment", "stream", "cells in the paper", "cells with our number", *MARKS]
    return _table(head, rows)


def _tally(items: Sequence[Compared]) -> list[str]:
    found = Counter(item.verdict for item in items)
    return [str(count) for count in (len(items), len(items) - found[NOT_RUN], *(found[name] for name in MARKS))]


def by_order(items: Sequence[Compared]) -> list[str]:
    """A table per order: a row per method, protocol and metric, a column per domain."""
    blocks = []
    for here in _groups(items, lambda item: (item.cell.stream, item.cell.order)):
        first = here[0].cell
        columns = [*first.order, AVERAGE]
        rows = []
        for of_method in _groups(here, lambda item: item.cell.method):
            for line in _groups(of_method, lambda item: (item.preset, item.cell.metric)):
                found = {item.cell.domain: str(item) for item in line}
                about = [_name(line[0].cell.method), PROTOCOLS[line[0].preset], _seeds(line[0]), line[0].cell.metric]
                rows.append([*about, *(found.get(name, MISSING) for name in columns)])
        blocks += [f"### {first.stream}, {'>'.join(first.order)} (table {first.table})", _command(first)]
        blocks.append(_table(["method", "protocol", "n", "metric", *columns], rows, text=4))
    return blocks


def by_table(items: Sequence[Compared]) -> list[str]:
    """A table for each of the paper's: a row per order and metric, a column per method; n is that of each method."""
    blocks = []
    for here in _groups([item for item in items if item.preset == SAME_NETWORK], lambda item: item.cell.table):
        first = here[0].cell
        methods = list(dict.fromkeys(item.cell.method for item in here))
        rows = []
        for of_order in _groups(here, lambda item: _order(item.cell)):
            for line in _groups(of_order, lambda item: item.cell.metric):
                found = {item.cell.method: item for item in line}
                n = (
                    " / ".join(_seeds(found[method]) for method in methods)
                    if any(item.ours for item in line)
                    else MISSING
                )
                about = [_order(line[0].cell), line[0].cell.metric, n]
                rows.append([*about, *(str(found[method]) for method in methods)])
        blocks += [f"### {first.stream} (table {first.table})", _command(first)]
        blocks.append(_table(["order", "metric", "n", *map(_name, methods)], rows))
    return blocks


def _command(cell: Published) -> str:
    """What makes the runs of a table."""
    files = {"main": cell.stream, "orders": f"{cell.stream}-ten-orders", "stationary": "stationary"}
    return f"`ratp study run configs/paper/{files[cell.experiment]}.toml --known results` runs what is missing."


def _groups(items: Iterable[Compared], key: Callable[[Compared], object]) -> list[list[Compared]]:
    """Cells that agree in something, group by group, in the order they first occur."""
    groups: dict[object, list[Compared]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _name(method: str) -> str:
    """A method as the paper spells it, marked if its numbers there are unexplained."""
    return f"{SPELLING[method]} {UNEXPLAINED[method]}" if method in UNEXPLAINED else SPELLING[method]


def _order(cell: Published) -> str:
    """An order as it is called and spelled."""
    return " ".join(filter(None, (cell.order_name, ">".join(cell.order)))) or "average of all"


def _seeds(item: Compared) -> str:
    return str(item.ours.n) if item.ours else MISSING


def provenance(runs: Sequence[RunRecord], results: Results) -> list[str]:
    """What the numbers were made from and with, and which files no number is from."""
    printed = {(cell.stream, cell.order, cell.method) for cell in cells()}
    used = {key: seeds for key, seeds in results.items() if key[:3] in printed}
    made_from: dict[str, dict[str, str | None]] = {}
    made_with: dict[tuple[str, ...], dict[str, list[RunRecord]]] = {}
    for (stream, order, method, _), seeds in used.items():
        for run in seeds.values():
            made_from.setdefault(stream, {}).update(inputs(run))
            orders = made_with.setdefault((SPELLING[method], stream, *_made_with(run)), {})
            orders.setdefault(">".join(order), []).append(run)
    hashes = [
        f"* {stream}: {', '.join(f'{name} `{sha256[:12]}`' for name, sha256 in found.items() if sha256)}"
        for stream, found in made_from.items()
    ]
    rows = [
        [*about, "; ".join(f"{order}: {', '.join(map(_seed_and_file, found))}" for order, found in orders.items())]
        for about, orders in made_with.items()
    ]
    head = ["method", "stream", "preset", "precision", "device", "torch", "ratp", "order: seed and file"]
    about = "First digits of the sha256 of each domain's images and of the initial weights:"
    code = (
        "After a version come the first digits of the hash of the package's code, if the file has it; `ratp doctor` "
        "prints those of the installed version. The other files are older: `git log FILE` names their commit."
    )
    blocks = [about, "\n".join(hashes), _table(head, rows, text=len(head)), code]
    files = {run.path for seeds in used.values() for run in seeds.values()}
    others = [f"`{run.path.parent.name}/{run.path.name}`" for run in runs if run.path not in files]
    return [*blocks, f"Files used for no cell: {', '.join(others) or 'none'}."]


def _made_with(run: RunRecord) -> tuple[str, ...]:
    """Preset, precision, device, and the versions of torch and of this package, with the hash of its code."""
    about = run.environment
    recorded = (about.get("precision"), about.get("device_name"), about.get("packages", {}).get("torch"))
    version = run.config["ratp"] + (f" `{about['code']}`" if about.get("code") else "")
    return (run.config["preset"], *(value or "not recorded" for value in recorded), version)


def _seed_and_file(run: RunRecord) -> str:
    return f"{run.seed} `{run.path.name}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 3) -> str:
    """A table, whose columns are numbers after the first ones of text."""
    rule = ["---"] * text + ["---:"] * (len(head) - text)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def main() -> None:
    """Brings the page up to date, or with ``--check`` fails if it is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    check = parser.parse_args().check
    path = ROOT / PAGE
    new = page(ROOT / "results")
    stale = not path.exists() or path.read_text(encoding="utf-8") != new
    if stale:
        print(f"{'out of date' if check else 'updated'}: {PAGE}")
        if not check:
            path.write_text(new, encoding="utf-8")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
