"""Docstrings as text for a terminal."""

from __future__ import annotations

import inspect
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratp.cli.lists import reflow
from ratp.methods import METHODS

DOC = """A method that does things
in two lines, see :mod:`ratp.functional.some` and :class:`~ratp.training.phase.Phase`.

    loss = a + b
      where b is long

* One item that is
  wrapped, with ``a_switch``.
* **Another**: short.

The end."""


def test_paragraphs_items_and_formulas():
    assert reflow(DOC, 30).splitlines() == [
        "A method that does things in",
        "two lines, see",
        "ratp.functional.some and",
        "ratp.training.phase.Phase.",
        "",
        "    loss = a + b",
        "      where b is long",
        "",
        "* One item that is wrapped,",
        "  with a_switch.",
        "* Another: short.",
        "",
        "The end.",
    ]


@given(st.integers(20, 200), st.lists(st.text("abc d", min_size=1).map(str.strip).filter(bool), min_size=1))
def test_no_word_is_lost(width, paragraphs):
    text = reflow("\n\n".join(f"* {paragraph}" for paragraph in paragraphs), width)
    assert text.replace("*", "").split() == " ".join(paragraphs).split()


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_no_line_of_a_method_is_too_wide(method):
    """Except formulas, which stay as they are."""
    text = reflow(inspect.getdoc(sys.modules[method.__module__]), 80)
    assert max(len(line) for line in text.splitlines() if not line.startswith("    ")) <= 80
    assert "`" not in text
    assert "**" not in text
