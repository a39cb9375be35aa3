"""Terminal, Markdown, CSV and LaTeX tables."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ratp.evaluation.matrix import Matrix
from ratp.reports.markup import comparison_markdown, csv_report, latex_report, markdown_report
from ratp.reports.tables import duration, print_report

GOLDEN = ((99.0, 60.0, 40.0), (95.0, 90.0, 50.0), (92.0, 85.0, 80.0))
SECOND = ((98.0, 62.0, 44.0), (94.0, 88.0, 52.0), (90.0, 83.0, 84.0))
FLAT = ((99.0, 50.0, 30.0),) * 3


def print_tables(runs, width=80, **options):
    file = io.StringIO()
    print_report(runs, Console(file=file, width=width, **options))
    return file.getvalue()


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def cells_of(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_terminal_shows_matrix_and_metrics_of_one_run(golden):
    text = print_tables([golden])
    assert line_of(text, "after photo").split() == ["after", "photo", "95.0", "[90.0]", "50.0"]
    assert line_of(text, "TDG ").split() == ["TDG", "–", "60.0", "45.0", "52.5"]
    assert line_of(text, "TDA ").split() == ["TDA", "99.0", "90.0", "80.0", "89.7"]
    assert line_of(text, "FA ").split() == ["FA", "93.5", "85.0", "–", "89.2"]
    assert "Unfamiliar" not in text


def test_terminal_explains_the_measures_in_a_sentence(golden):
    text = print_tables([golden])
    explained = (
        "Accuracy: TDG before a domain is learned, TDA right after it is learned, FA once later domains are learned."
    )
    assert " ".join(text.splitlines()[-2:]) == explained
    assert "\n\n\n" not in text


def test_terminal_compares_methods_and_marks_the_best(make_run):
    text = print_tables([make_run(seed=0), make_run(SECOND, seed=1), make_run(FLAT, method="source-only")])
    comparison = text[text.index("Comparison") :]
    assert "53.8 ± 1.8*" in line_of(comparison, "ratp")
    assert line_of(comparison, "source-only").split() == ["source-only", "1", "40.0", "59.7", "74.5"]
    assert "Mean ± sample standard deviation over seeds. Without ±: from a single seed." in text
    assert "single seed" not in print_tables([make_run(seed=0), make_run(SECOND, seed=1)])


def several_and_single_seeds(make_run):
    """Two methods with two seeds and one with a single one, on more domains than 80 columns have room for."""
    order = tuple(f"domain{i}" for i in range(8))

    def rows(best):
        return tuple(tuple(best - abs(s - d) for d in range(8)) for s in range(8))

    runs = [make_run(rows(90.0 + s - m), order, method=f"method{m}", seed=s) for m in range(2) for s in range(2)]
    return [*runs, make_run(rows(95.0), order, method="single")]


def test_where_deviations_have_no_room_the_terminal_says_so_and_marks_single_seeds(make_run):
    runs = several_and_single_seeds(make_run)
    text = print_tables(runs)
    domains = text[text.index("TDA, right after") :]
    assert domains.splitlines()[0].endswith("means only")
    assert line_of(domains, "method0").split()[1:3] == ["90.5", "90.5"]
    assert line_of(domains, "single").split()[1:3] == ["95.0¹*", "95.0¹*"]
    notes = text[text.index("Mean ±") :].splitlines()
    assert notes[:2] == [
        "Mean ± sample standard deviation over seeds. Without ±: from a single seed.",
        "Means only: no room for deviations over seeds. With ¹: from a single seed.",
    ]
    assert "¹" not in print_tables(runs, 200)
    assert "Means only" not in print_tables(runs, 200)


def test_where_no_table_has_room_for_deviations_none_is_explained(make_run):
    text = print_tables(several_and_single_seeds(make_run), 30)
    assert "±" not in text
    assert "Means only: no room for deviations over seeds. With ¹: from a single seed." in " ".join(text.split())
    assert "¹" not in print_tables(several_and_single_seeds(make_run)[:-1], 30)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(make_run, hostile, width):
    order = tuple(f"a-long-domain-{i}" for i in range(7))
    rows = tuple(tuple(90.0 - abs(s - d) for d in range(7)) for s in range(7))
    runs = [make_run(rows, order, method=f"method-{m}", seed=s) for m in range(3) for s in range(2)]
    text = print_tables([*runs, hostile], width)
    assert max(map(len, text.splitlines())) <= width
    assert all(f"{90.0 - abs(s - 6):.1f}" in text for s in range(7))


def test_terminal_output_has_no_escape_codes_when_piped(hostile):
    text = print_tables([hostile])
    assert "\x1b" not in text
    assert "[bold]<b>m_1</b>" in text


def test_terminal_of_a_small_encoding_gets_plain_marks(make_run):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_report(
        [make_run(order=("scan", "фото", "font")), make_run(SECOND, seed=1, method="tent")],
        Console(file=file, width=80),
    )
    file.flush()
    assert b"[99.0]" in file.buffer.getvalue()
    print_report(several_and_single_seeds(make_run), Console(file=file, width=80))
    file.flush()
    assert b" 95.0^1* " in file.buffer.getvalue()
    assert b"With ^1: from a single seed." in file.buffer.getvalue()


def test_terminal_marks_unfinished_runs(make_run):
    text = print_tables([make_run(), make_run(GOLDEN[:2], seed=1)])
    comparison = text[text.index("Comparison") :]
    assert "2 of 3 stages" in line_of(comparison, "ratp, seed 1")
    assert line_of(comparison, "ratp ").split() == ["ratp", "1", "52.5", "89.7", "89.2"]
    assert "in no mean" in " ".join(text.split())


@pytest.mark.parametrize("rows", [0, 1])
def test_runs_barely_begun_are_shown_with_dashes(make_run, rows):
    run = make_run(GOLDEN[:rows])
    assert "–" in print_tables([run])
    assert f"{rows} of 3 stages" in markdown_report([run])
    assert "--" in latex_report([run])
    assert len(csv_report([run]).splitlines()) == (1 if rows == 0 else 1 + 3 + 3 + 2)


def test_domains_without_labels_are_named(make_run):
    """Their cells are dashes, and averages are over the others."""
    known = ((99.0, math.nan, 40.0), (95.0, math.nan, 50.0), (92.0, math.nan, 80.0))
    note = "No labels, so no accuracy: photo. Averages are over the others."
    runs = [replace(make_run(method=m), matrix=Matrix(("scan", "photo", "font"), known)) for m in ("ratp", "tent")]
    for text in (print_tables(runs), markdown_report(runs), comparison_markdown(runs), latex_report(runs)):
        assert text.count(note) == 1
    assert "No labels" not in print_tables([make_run(), make_run(GOLDEN[:1], seed=1)])


def test_different_orders_never_share_a_table(make_run):
    text = markdown_report([make_run(), make_run(FLAT, order=("photo", "scan", "font"), method="tent")])
    first, second = text.split("## demo: ")[1:]
    assert first.startswith("scan > photo > font")
    assert "tent" not in first
    assert "ratp" not in second


def test_comparison_markdown_has_a_row_per_method_with_best_in_bold(make_run):
    text = comparison_markdown([make_run(seed=0), make_run(SECOND, seed=1), make_run(FLAT, method="source-only")])
    head, _, ratp, source = text.splitlines()[:4]
    assert cells_of(head) == ["Method", "Seeds", "TDG (%)", "TDA (%)", "FA (%)"]
    assert cells_of(ratp) == ["ratp", "2", "**53.8** ± 1.8", "**89.8** ± 0.2", "**88.4** ± 1.2"]
    assert cells_of(source) == ["source-only", "1", "40.0", "59.7", "74.5"]


def test_comparison_markdown_shows_the_unfamiliar_area_where_measured(make_run):
    probes = {"photo": [(0.0, 40.0), (1.0, 80.0)], "font": [(0.0, 50.0), (1.0, 50.0)]}
    text = comparison_markdown([make_run(probes=probes), make_run(FLAT, method="source-only")])
    head, _, ratp, source = text.splitlines()[:4]
    assert cells_of(head)[-1] == "Unfamiliar (%)"
    assert cells_of(ratp)[-1] == "55.0"
    assert cells_of(source)[-1] == "–"


def test_equal_numbers_share_the_mark_and_an_all_equal_column_has_none(make_run):
    runs = [make_run(), make_run(method="copy"), make_run(FLAT, method="flat")]
    rows = [cells_of(row) for row in comparison_markdown(runs).splitlines()[2:5]]
    assert rows[0][2] == rows[1][2] == "**52.5**"
    assert "**" not in comparison_markdown(runs[:2])


def test_two_best_leave_no_second_place(make_run):
    runs = [make_run(), make_run(method="copy"), make_run(((90.0, 50.0, 30.0),) * 3, method="flat")]
    markdown = markdown_report(runs)
    assert cells_of(line_of(markdown, "| flat"))[2] == "40.0"
    assert "Best in bold." in markdown
    latex = latex_report(runs)
    assert r"TDG & photo & $\mathbf{60.0}$ & $\mathbf{60.0}$ & $50.0$ \\" in latex
    assert "Best in bold." in latex
    assert "second best" not in markdown + latex


def test_no_table_explains_marks_that_none_has(make_run):
    runs = [make_run(), make_run(method="copy")]
    for text in (print_tables(runs), markdown_report(runs), latex_report(runs)):
        assert "best" not in text.lower()


def test_marks_of_the_domains_are_explained_though_all_averages_are_equal(make_run):
    rows = ((99.0, 40.0, 60.0), (95.0, 90.0, 60.0), (92.0, 85.0, 80.0))
    runs = [make_run(((99.0, 60.0, 40.0), (95.0, 90.0, 40.0), (92.0, 85.0, 80.0))), make_run(rows, method="other")]
    assert "Best in bold." in markdown_report(runs)
    assert "**" not in comparison_markdown(runs)
    assert "bold" not in comparison_markdown(runs)


def test_an_unfinished_run_is_never_the_best(make_run):
    runs = [make_run(), make_run(FLAT, method="flat"), make_run(((100.0, 100.0, 100.0),), method="new")]
    row = line_of(comparison_markdown(runs), "| new")
    assert "**" not in row
    assert "1 of 3 stages" in row


def test_an_oracle_is_named_and_never_marked_best(make_run):
    top = ((100.0, 100.0, 100.0),) * 3
    oracle = make_run(top, method="oracle", uses_target_labels=True)
    text = comparison_markdown([make_run(), make_run(FLAT, method="flat"), oracle])
    row = line_of(text, "| oracle (knows target labels)")
    assert "100.0" in row and "**" not in row
    assert "**" in line_of(text, "| ratp")
    assert "Uses target labels: an upper bound, never marked best: oracle (knows target labels)." in text
    assert "**" not in comparison_markdown([make_run(), oracle])


def test_csv_parses_back_to_the_same_numbers(make_run):
    run = make_run(((99.123456789, 60.1, 40.0), *GOLDEN[1:]), seed=7, probes={"photo": [(0.0, 40.0), (1.0, 80.0)]})
    rows = list(csv.DictReader(io.StringIO(csv_report([run]))))
    matrix = {(int(r["stage"]), r["domain"]): float(r["value"]) for r in rows if r["metric"] == "accuracy"}
    assert [[matrix[s, d] for d in run.matrix.domains] for s in range(3)] == [list(r) for r in run.matrix.accuracy]
    metrics = {(r["metric"], r["domain"]): float(r["value"]) for r in rows if r["metric"] != "accuracy"}
    for metric in ("TDG", "TDA", "FA"):
        assert metrics[metric, "average"] == run.matrix.average(metric)
        assert {d: v for (m, d), v in metrics.items() if m == metric and d != "average"} == run.matrix.metric(metric)
    assert metrics["Unfamiliar", "photo"] == 60.0
    assert {(r["label"], r["stream"], r["order"], r["seed"], r["complete"]) for r in rows} == {
        ("ratp", "demo", "scan>photo>font", "7", "true")
    }


def test_csv_survives_hostile_names(hostile):
    rows = list(csv.DictReader(io.StringIO(csv_report([hostile]))))
    assert rows[0]["label"] == hostile.label
    spelled = {name.replace("\x1b", "\\x1b") for name in hostile.matrix.domains}
    assert {r["domain"] for r in rows} == {*spelled, "average"}


def test_latex_has_blocks_of_metrics_with_best_and_second_best_marked(make_run):
    runs = [make_run(), make_run(SECOND, method="shot"), make_run(FLAT, method="flat_line")]
    text = latex_report(runs)
    assert r"& Domain & ratp & shot & flat\_line \\" in text
    assert r"TDG & photo & $\underline{60.0}$ & $\mathbf{62.0}$ & $50.0$ \\" in text
    assert r"TDA & scan & $\mathbf{99.0}$ & $98.0$ & $\mathbf{99.0}$ \\" in text
    assert r"& average & $\underline{89.7}$ & $\mathbf{90.0}$ & $59.7$ \\" in text
    assert text.index("TDG &") < text.index("TDA &") < text.index("FA &")
    assert text.count(r"\midrule") == 3


def test_latex_has_a_row_for_each_of_many_methods(make_run):
    runs = [make_run(), make_run(SECOND, method="shot"), *(make_run(FLAT, method=f"flat{i}") for i in range(5))]
    text = latex_report(runs)
    assert r"& Method & scan & photo & font & average \\" in text
    assert r"TDG & ratp & -- & $\underline{60.0}$ & " in text
    assert r"TDA & ratp & $\mathbf{99.0}$ & " in text
    assert text.count(r" & shot & ") == 3


def test_latex_shows_seed_spread(make_run):
    text = latex_report([make_run(), make_run(SECOND, seed=1), make_run(FLAT, method="flat")])
    assert r"$\mathbf{53.8} \pm 1.8$" in text


def test_latex_escapes_every_special(hostile):
    text = latex_report([hostile])
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{}" in body
    assert r"a\_b \& 100\%" in body
    assert r"\$x\textasciicircum{}2\$ \textbar{} \{y\}" in body
    names = re.sub(r"\\[a-z]+\{[^{}]*\}|\$[^$\\]*\$|\\[_&%$#{}]", "", body)
    assert not re.search(r"(?<!\\)[%#_^~]", names.replace(r"\\", ""))


def test_markdown_escapes_names(hostile):
    text = markdown_report([hostile])
    assert "<script" not in text
    assert "<b>" not in text
    assert r"\[bold\]" in text
    table = [line for line in text.splitlines() if line.startswith("| after")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5}


def test_readable_names_stay_readable_in_markdown(make_run):
    assert "| ratp (use_pca=False) |" in comparison_markdown([make_run(changed={"use_pca": False})])


@pytest.mark.parametrize(
    ("seconds", "shown"), [(float("nan"), "–"), (1.25, "1.2 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")]
)
def test_durations_are_human_readable(seconds, shown):
    assert duration(seconds) == shown
