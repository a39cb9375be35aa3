"""The pages of the documentation: their links lead somewhere, on GitHub and on the site, and nothing is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import build_site
import ratp
import reference_pages
from ratp.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(path for path in build_site.pages() if path.suffix == ".md")]


def headings(path):
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []

    def check(text):
        for target in re.findall(r"\]\(([^()\s]+)\)", text):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            if "://" not in target and not (file.exists() and (not anchor or anchor in headings(file))):
                broken.append(target)
        return text

    build_site.outside_fences(page.read_text(encoding="utf-8"), check)
    assert not broken


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The assembled pages by their path on the site."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_site, "SOURCE", tmp_path_factory.mktemp("site"))
        build_site.assemble()
        yield {str(path.relative_to(build_site.SOURCE)): path.read_text() for path in build_site.SOURCE.rglob("*.md")}


def test_every_page_is_in_the_menu(site):
    listed = {Path(page).parent / line for page, text in site.items() for menu in menus(text) for line in menu}
    assert listed == {Path(page) for page in site} - {Path("index.md")}


def menus(text):
    return [block.split("\n\n")[1].splitlines() for block in re.findall(r"```\{toctree\}\n(.*?)```", text, flags=re.S)]


def test_every_name_and_command_is_in_the_reference(site):
    pages = "\n".join(text for page, text in site.items() if page.startswith("reference/api/"))
    documented = {*re.findall(r"^\.\. auto(?:class|function):: (\w+)$", pages, flags=re.M)}
    assert documented == {*ratp.__all__} - {"__version__"}
    commands = site["reference/command-line.md"]
    for command in app.registered_commands:
        assert f"\n## ratp {command.name or command.callback.__name__}\n" in commands
    assert "`--targets PATH`\n: For `folders`" in commands
    assert "--set" in commands


def test_every_setting_is_in_the_reference(site):
    text = site["reference/methods/shot.md"]
    assert "`sgd.momentum` = `0.0`\n" in text
    assert "own-head: `0.9`" in text
    assert "`hold_out` = `0.0`\n" in site["reference/streams.md"]


def test_links_of_the_repository_become_links_of_the_site(site):
    assert "](../project/security.md)" in site["how-to/python.md"]
    assert "[Reliability](../explanation/reliability.md)" in site["project/changelog.md"]
    assert "[Reproducibility](../project/reproducibility.md)" in site["how-to/reproduce.md"]
    assert (
        "[RaTP: the paper and its published code](../../explanation/paper-and-code.md)"
        in site["reference/methods/ratp.md"]
    )
    assert not re.findall(r"\[`?[\w/-]+\.md`?\]\(", "".join(site.values())), "pages have titles, not file names"
    assert "](../files/examples/own_parts.py)" in site["how-to/python.md"]
    assert "](explanation/ratp.md)" in site["index.md"]
    assert reference_pages.markdown("see :func:`ratp.load` and ``x``") == "see `ratp.load` and `x`"


def test_notebooks_become_pages_with_their_outputs(tmp_path, monkeypatch):
    monkeypatch.setattr(build_site, "SOURCE", tmp_path)
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "See [this](index.md)."]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [
                {"data": {"text/plain": ["\x1b[1m2\x1b[0m"]}},
                {"data": {"image/png": "aGk=", "text/plain": ["<Figure>"]}},
                {"data": {"text/html": ["<table>\n", "\n", "</table>"]}},
            ],
        },
    ]
    book, index = tmp_path / "book.ipynb", tmp_path / "index.md"
    book.write_text(json.dumps({"cells": cells}))
    index.touch()
    page = build_site.notebook_page(book, {book: Path("a/book.md"), index: Path("index.md")})
    assert "# Title\nSee [this](../index.md)." in page
    assert "```python\n1 + 1\n```\n\n```{code-block} text\n:class: output\n\n2\n```" in page
    assert "![output](book-1-1.png)" in page
    assert (tmp_path / "a" / "book.ipynb").read_text() == book.read_text()
    assert (tmp_path / "a" / "book-1-1.png").read_bytes() == b"hi"
    assert "<table>\n</table>" in page
