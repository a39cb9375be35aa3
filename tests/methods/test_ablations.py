"""The tables of the ablations: what is compared with what, what counts as confirmed, what is missing."""

from pathlib import Path

import pytest

from helpers import load_tool
from ratp.evaluation.matrix import Matrix, paired
from ratp.runs.record import RunRecord
from ratp.streams.benchmarks import DIGITS

tool = load_tool("ablations")

ORDER = DIGITS.orders["reverse"]


@pytest.fixture
def study(tmp_path):
    """Of the ablations, nothing known."""
    return tool.known_study("ablations", tmp_path)


def result(entry, level):
    """A finished run whose accuracies are all the same."""
    config = {**entry.plan.decisions(), "preset": entry.plan.preset, "changed": dict(entry.plan.changed)}
    return RunRecord(Path("x.json"), config, {}, Matrix(ORDER, ((level,) * len(ORDER),) * len(ORDER)), ())


def with_levels(study, levels):
    """The study with results: accuracy by label and seed."""
    found = []
    for entry in study.entries:
        level = levels.get(entry.rows[0].label, {}).get(entry.plan.seed)
        found += [] if level is None else [result(entry, level)]
    return study.with_results(found)


def row(text, label, table=0):
    """The cells of a line of a group's table."""
    block = text.split("\n\n")[2 * table]
    (line,) = [line for line in block.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def verdict_line(text, table):
    return text.split("\n\n")[2 * table + 1]


def test_the_page_holds_every_line_of_the_study(study):
    text = tool.ablation_tables(study)
    assert row(text, "`ratp`") == row(text, "`ratp`", 2) == ["not run", "–", "–", "–"]
    assert row(text, "SHOT's labels", 1)[0] == row(text, "without PCA", 2)[0] == "not run"
    assert verdict_line(text, 1).endswith("not all run yet: ratp, softmax labels, SHOT's labels, BMD's labels.")


def test_a_variant_is_compared_with_its_own_method_over_common_seeds(study):
    levels = {
        "ratp": {2022: 80.0, 2023: 82.0, 2024: 84.0},
        "ratp without RandMix": {2022: 70.0, 2023: 71.0, 2024: 72.0},
        "shot": {2022: 30.0},
        "shot with RandMix": {2022: 50.0, 2023: 40.0, 2024: 30.0},
    }
    text = tool.ablation_tables(with_levels(study, levels))
    assert row(text, "`ratp`") == ["3", *["82.0 ± 2.0"] * 3]
    # −10, −11, −12: standard deviation 1, half the interval 4.303 / √3
    assert row(text, "ratp without RandMix") == ["3", *["71.0 ± 1.0 (−11.0 ± 2.5)"] * 3]
    assert row(text, "`shot`") == ["1 of 3", *["30.0"] * 3]
    assert row(text, "shot with RandMix") == ["3", *["40.0 ± 10.0 (+20.0)"] * 3]


def test_what_is_said_of_a_group(study):
    full = {2022: 80.0, 2023: 81.0, 2024: 82.0}
    others = {
        "softmax labels": {2022: 70.0, 2023: 71.0, 2024: 72.1},
        "SHOT's labels": {2022: 78.0, 2023: 79.1, 2024: 80.0},
        "BMD's labels": {2022: 60.0, 2023: 61.0, 2024: 62.0},
    }
    text = verdict_line(tool.ablation_tables(with_levels(study, {"ratp": full, **others})), 1)
    assert text.startswith("Is the full RaTP best? TDG: confirmed (+2.0 ± 0.1 to SHOT's labels); TDA: confirmed")
    assert "not all run" not in text


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ((2.0, 2.1, 1.9), "confirmed"),
        ((-2.0, -2.1, -1.9), "refuted"),
        ((2.0, -1.0, 1.0), "within the spread"),
        ((0.0, 0.0, 0.0), "within the spread"),
        ((1.0,), "so with one seed"),
        ((-1.0,), "not so with one seed"),
        ((-0.03,), "a tie with one seed"),
    ],
)
def test_verdicts(differences, expected):
    assert tool.verdict(paired(dict(enumerate(differences)), dict.fromkeys(range(3), 0.0))) == expected


def test_swept_values_are_sorted_and_the_usual_one_is_bold(tmp_path):
    study = tool.known_study("sensitivity", tmp_path)
    chosen = next(e for e in study.entries if ("t2pl.r_top", 5) in [row.sweep for row in e.rows])
    text = tool.sensitivity_tables(study.with_results([result(chosen, 55.0)]))
    assert "| `r_con` | 0.5 | 0.6 | 0.7 | **0.8** | 0.9 |" in text
    block = next(part for part in text.split("\n\n") if "r_top" in part)
    assert block.splitlines()[0] == "| `t2pl.r_top` | 1 | **2** | 3 | 4 | 5 |"
    assert block.splitlines()[2] == "| TDG | not run | not run | not run | not run | 55.0 |"
