"""Names that want to be more than names: markup in a page, orders to a terminal, places outside of a folder."""

from __future__ import annotations

import io
import json
import warnings
from html.parser import HTMLParser

import pytest
from rich.table import Table
from rich.text import Text

from helpers import ratp
from own_images import OPTIONS, image_files, write_files, write_zip
from ratp.cli.console import PlainConsole, stdout
from ratp.errors import Note, print_plainly, printable
from ratp.runs.record import read_run
from tiny_study import grid, study_file

TAG = "<script>alert(1)</script><img src=x onerror=alert(1)>"
ORDERS = "\x1b]0;mine\x07\x1b[2J\x9b31m\x08\r\u202e"


class Tags(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page):
        super().__init__()
        self.seen = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


def assert_no_markup(page):
    seen = Tags(page).seen
    assert not [tag for tag, _ in seen if tag in ("script", "iframe", "object", "link", "form")]
    assert not [name for _, attributes in seen for name in attributes if name.startswith("on")]
    assert all(attributes["src"].startswith("data:image/") for tag, attributes in seen if tag == "img")


def test_classes_domains_and_files_of_own_images(here):
    """From the folders of a user to the page: what was a name is still only that."""
    names = ("<b>x</b>", f"{ORDERS}&amp;")
    write_files(here / "<i>day", image_files(names, count=4))
    write_files(here / f"night{ORDERS.replace('/', '')}", image_files(names, count=4, seed=1))
    targets = f"night{ORDERS}"
    shown = ratp("run", "folders", "--source", "<i>day", "--targets", targets, *OPTIONS, "--method", "source-only",
                 "--weights", "none", "--out", "out", "--features")  # fmt: skip
    assert shown.code == 0, shown
    reported = ratp("report", "out", "--out", "report")
    for text in (shown.out, shown.err, reported.out, reported.err):
        assert text == printable(text)
    page = (here / "report" / "index.html").read_text()
    assert_no_markup(page)
    assert "\x1b" not in page
    assert "<i>day" not in page
    assert "&lt;i&gt;day" in page
    for name in ("report.md", "report.tex"):
        assert "\x1b" not in (here / "report" / name).read_text(), name


def test_all_texts_of_a_run(run, here):
    """A run directory of somebody else."""
    config = json.loads((run / "config.json").read_text())
    del config["fingerprint"]
    order = [f"{name}{TAG}{ORDERS}" for name in config["order"]]
    texts = {"method": TAG, "stream": TAG + ORDERS, "preset": TAG, "changed": {TAG: ORDERS}, "notes": [TAG + ORDERS]}
    (run / "config.json").write_text(json.dumps(config | texts | {"order": order, "origins": {order[0]: TAG}}))
    accuracy = json.loads((run / "matrix.json").read_text())["accuracy"]
    (run / "matrix.json").write_text(json.dumps({"domains": order, "accuracy": accuracy}))
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {TAG: TAG, "device_name": ORDERS}))
    assert read_run(run).method == TAG
    result = ratp("report", "run", "--out", "report", "--export", "results")
    assert result.code == 0, result
    assert result.out == printable(result.out)
    assert_no_markup((here / "report" / "index.html").read_text())
    assert "<script" not in (here / "report" / "report.md").read_text()
    assert len(list((here / "results").iterdir())) == 1


@pytest.mark.parametrize(
    "title", [TAG, *(pytest.param(title, marks=pytest.mark.slow) for title in ("../../outside", "[bold]x[/bold]"))]
)
def test_the_title_of_a_study(title, here):
    file = study_file(here, grid('methods = ["source-only"]'), title=title)
    for words in (("status", file), ("run", file, "--quiet", "--jobs", "1"), ("status", file)):
        result = ratp("study", *words, "--out", "runs")
        assert result.code == 0, result
    assert title in result.out
    assert ratp("study", "report", file, "--out", "runs", "--to", "report").code == 0
    assert_no_markup((here / "report" / "index.html").read_text())
    assert sorted(path.name for path in here.iterdir()) == ["report", "runs", "tiny.toml"]


@pytest.mark.parametrize("words", [f"\x1b[31mred{ORDERS}", "two\nlines\x1b[A"])
def test_console_ignores_markup_in_names(words):
    file = io.StringIO()
    console = PlainConsole(file=file, width=60, color_system=None)
    table = Table("name")
    table.add_row(words)
    table.add_row(Text(words))
    for item in (words, Text(words), table):
        console.print(item)
    assert "red" in file.getvalue() or "lines" in file.getvalue()
    assert file.getvalue() == printable(file.getvalue())


def test_console_keeps_its_own_colours():
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, color_system="standard", width=60)
    console.print("[red]x\x1b[2J[/]")
    assert "\x1b[31mx" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()


def test_command_line_uses_this_console():
    assert isinstance(stdout(), PlainConsole)


def test_warning_ignores_markup_in_names(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    print_plainly()
    text = warnings.formatwarning(Note(f"a class is called {ORDERS}"), Note, "file.py", 1)
    assert text.startswith("note: a class is called ")
    assert text == printable(text)


OPENED = (
    ("run", "folders", "--source", "in.zip", "--targets", "in2.zip", "--weights", "none"),
    ("data", "check", "in.zip"),
    ("data", "import", "pacs/sketch", "in.zip"),
)


@pytest.mark.parametrize("name", ["../outside.png", "/outside.png", "a/../../outside.png", "C:\\outside.png"])
@pytest.mark.parametrize("words", OPENED)
def test_members_with_path_traversal(name, words, here):
    pictures = image_files()
    for zip_ in ("in.zip", "in2.zip"):
        write_zip(here / zip_, {**pictures, name: next(iter(pictures.values()))})
    result = ratp(*words)
    assert result.code in (1, 2), result
    assert "Traceback" not in result.err
    assert "in.zip" in result.err + result.out
    assert not list(here.parent.rglob("outside*"))
    assert sorted(path.name for path in here.iterdir()) == ["in.zip", "in2.zip"]
