"""The report's folder and its page."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ratp.errors import RatpError, RunDirectoryError
from ratp.reports.page import page_html, write_report
from ratp.reports.summary import flatten, group_runs, sections
from ratp.runs.record import read_run

GOLDEN = ((99.0, 60.0, 40.0), (95.0, 90.0, 50.0), (92.0, 85.0, 80.0))
SECOND = ((98.0, 62.0, 44.0), (94.0, 88.0, 52.0), (90.0, 83.0, 84.0))
PROBES = {"photo": [(0.0, 40.0), (1.0, 80.0)]}
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags nest."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def full(run_in, tmp_path_factory):
    """Two seeds with probes and samples, an unfinished third, and another method."""
    folder = tmp_path_factory.mktemp("runs")
    samples = {name: np.zeros((2, 3, 8, 8), dtype=np.uint8) for name in ("original", "RandMix")}
    return [
        run_in(folder / "0", probes=PROBES, samples=samples),
        run_in(folder / "1", SECOND, seed=1, probes=PROBES),
        run_in(folder / "2", GOLDEN[:2], seed=2),
        run_in(folder / "3", ((99.0, 50.0, 30.0),) * 3, method="source-only"),
    ]


@pytest.fixture(scope="module")
def written(full, tmp_path_factory):
    """The page of a full report, and the console output."""
    output = io.StringIO()
    folder = tmp_path_factory.mktemp("reports") / "a" / "report"
    page = write_report(full, folder, Console(file=output, width=200))
    assert page == folder / "index.html"
    return page, output.getvalue()


@pytest.fixture(scope="module")
def page(written):
    return Page(written[0].read_text())


def test_every_file_is_written_and_readable(written):
    folder = written[0].parent
    figures = {f"{name}.{kind}" for name in ("matrix", "curves", "unfamiliar") for kind in ("png", "svg")}
    expected = {"report.md", "metrics.csv", "report.tex", "index.html", "randmix.png"} | figures
    assert {path.name for path in folder.iterdir()} == expected
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            image.verify()
    for path in folder.glob("*.svg"):
        assert ET.fromstring(path.read_bytes()).tag.endswith("svg")
    assert all(name in written[1] for name in expected)


def test_page_shows_the_numbers_and_says_what_was_left_out(page):
    assert "53.8 ± 1.8" in page.text
    assert "ratp, seed 2 (2 of 3 stages)" in page.text
    assert "recipe.epochs 30" in page.text
    assert "torch 2.10.0" in page.text
    assert "10.0 s" in page.text
    for words in ("Target domain generalisation", "Target domain adaptation", "Forgetting alleviation"):
        assert words in page.text


def html_of(runs):
    """The page of one section, without its pictures."""
    return page_html(sections(group_runs(runs)), [{"matrix": "", "curves": ""}])


def card(runs):
    """The words of the card of TDA."""
    (found,) = re.findall(r'<div class="tile">\n<h3><span>TDA</span>.*?</div>', html_of(runs), re.DOTALL)
    return Page(found).text


@pytest.mark.parametrize(
    ("equal", "worse", "expected"),
    [
        (1, 1, "89.7 best: method0 "),
        (2, 0, "89.7 shared by method0, method1 "),
        (2, 1, "89.7 shared by method0, method1 "),
        (4, 1, "89.7 shared by 4 methods "),
        (4, 0, "89.7 shared by all 4 methods "),
    ],
)
def test_cards_name_the_best_number_and_its_method(make_run, equal, worse, expected):
    runs = [make_run(method=f"method{i}") for i in range(equal)]
    runs += [make_run(((99.0, 50.0, 30.0),) * 3, method=f"worse{i}") for i in range(worse)]
    assert expected in card(runs)


def test_a_card_marks_a_best_number_from_a_single_seed_where_others_have_more(make_run):
    several = [make_run(seed=0), make_run(SECOND, seed=1)]
    top = make_run(((99.9, 99.9, 99.9),) * 3, method="once")
    assert "99.9 1 best: once 1 from a single seed." in card([*several, top])
    assert "single" not in card([several[0], top])
    assert "89.8 ± 0.2 ratp " in card([*several, make_run(GOLDEN[:1], method="new")])


def test_the_table_by_domain_explains_its_marks(page, make_run):
    assert "each domain? Mean ± sample standard deviation over seeds. Without ±: from a single seed. Best" in page.text
    assert "Best in bold" not in html_of([make_run(), make_run(method="copy")])


def test_page_shows_every_setting_of_every_run(page, full):
    for run in full:
        for name, value in flatten(run.config).items():
            assert name in page.text
            assert value in page.text


def test_settings_are_folded(page):
    """They are collapsed and not printed by default."""
    assert page.of("details")
    assert not any("open" in details for details in page.of("details"))


def test_settings_of_several_lines_keep_them(make_run, tmp_path):
    run = make_run(notes=["photo: left out 1:\n  a\x07.png: empty", "font: left out 1:\r\n  b.png: empty"])
    html = write_report([run], tmp_path / "report").read_text(encoding="utf-8")
    assert "<td>photo: left out 1:\n  a\ufffd.png: empty\nfont: left out 1:\n  b.png: empty</td>" in html


def test_page_is_one_file_that_loads_nothing(written, page):
    assert not re.search(r"https?://|url\(|@import", written[0].read_text())
    assert not page.of("script")
    assert not page.of("link")
    assert not page.of("a")
    assert len(page.of("img")) == 4
    assert all(image["src"].startswith("data:image/") for image in page.of("img"))


def test_page_is_accessible(page):
    assert all(image["alt"] for image in page.of("img"))
    assert all(head.get("scope") for head in page.of("th"))
    assert page.of("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_figures_scroll_where_the_page_is_narrow(page):
    """Scaled to the width of a telephone, their letters could not be read."""
    before = [attributes for (_, attributes), (tag, _) in pairwise(page.tags) if tag == "img"]
    assert [each["class"] for each in before] == ["sheet"] * 4
    assert all(each["tabindex"] == "0" and each["aria-label"] for each in before)


def test_images_keep_their_colours_in_the_dark(page):
    """What is drawn is turned round there, black for white; samples are shown as they are."""
    assert [figure["class"] for figure in page.of("figure")] == ["drawn", "drawn", "drawn", "photos"]


def test_hostile_names_are_text_and_never_markup(hostile, tmp_path):
    page = Page(write_report([hostile], tmp_path).read_text())
    assert not page.of("script")
    assert not page.of("b")
    assert all(image["src"].startswith("data:image/") for image in page.of("img"))
    for name in ("<script>alert(1)</script>", "a_b & 100%", "[bold]<b>m_1</b>", "<img src=x>"):
        assert name in page.text
    assert "\x1b" not in page.text


def test_without_probes_and_samples_their_parts_are_absent(golden, tmp_path):
    page = write_report([golden], tmp_path)
    assert not list(tmp_path.glob("unfamiliar*")) + list(tmp_path.glob("randmix*"))
    assert "Unfamiliar" not in Page(page.read_text()).text


@pytest.mark.slow
def test_every_stream_and_order_has_its_own_section_and_figures(make_run, tmp_path):
    runs = [make_run(), make_run(order=("photo", "scan", "font")), make_run(stream="other", method="tent")]
    page = Page(write_report(runs, tmp_path).read_text())
    assert len(page.of("section")) == 3
    assert {path.name for path in tmp_path.glob("matrix*.svg")} == {"matrix.svg", "matrix-2.svg", "matrix-3.svg"}


def test_the_same_runs_give_the_same_folder(full, written, tmp_path):
    write_report(full, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (written[0].parent / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_result_files_report_like_their_run_directories(golden, tmp_path):
    golden.export(tmp_path / "golden.json")
    write_report([golden], tmp_path / "run")
    write_report([read_run(tmp_path / "golden.json")], tmp_path / "result")
    for name in ("report.md", "metrics.csv", "report.tex", "matrix.svg"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "result" / name).read_bytes()


def test_uncreatable_folder_is_an_error(golden, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RunDirectoryError, match="cannot create"):
        write_report([golden], tmp_path / "taken" / "report")


def test_unwritable_file_is_an_error(golden, tmp_path):
    (tmp_path / "index.html").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot write"):
        write_report([golden], tmp_path)


def test_no_runs_is_an_error_and_creates_no_folder(tmp_path):
    with pytest.raises(RatpError, match="no runs"):
        write_report([], tmp_path / "report")
    assert not (tmp_path / "report").exists()
