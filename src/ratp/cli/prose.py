"""Docstrings as text for a terminal: paragraphs and lists as wide as it is, without markup."""

from __future__ import annotations

import re
import textwrap

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")
_STRONG = re.compile(r"\*\*(\S[^*]*)\*\*")
_ITEM = re.compile(r"( *)\* ")


def reflow(doc: str, width: int) -> str:
    """The text of a docstring.

    Paragraphs stand between empty lines, items of a list begin with an asterisk. What is indented and no item is part
    of the item before it or, after a paragraph, a formula, which stays as it is.

    Args:
        doc: The docstring, without the indentation of the code.
        width: Columns of the terminal.
    """
    for markup in (_LITERAL, _ROLE, _STRONG):
        doc = markup.sub(r"\1", doc)
    blocks = re.split(r"\n\s*\n", doc.strip("\n"))
    return "\n\n".join(_block(block, width) for block in blocks)


def _block(block: str, width: int) -> str:
    lines = block.splitlines()
    if lines and lines[0].startswith(" ") and not _ITEM.match(lines[0]):
        return block
    parts: list[list[str]] = []
    for line in lines:
        if not parts or _ITEM.match(line):
            parts.append([])
        parts[-1].append(line)
    return "\n".join(_filled(part, width) for part in parts)


def _filled(lines: list[str], width: int) -> str:
    """A paragraph or an item, the latter with its text below its text."""
    item = _ITEM.match(lines[0])
    hanging = " " * len(item[0]) if item else ""
    text = " ".join(line.strip() for line in lines)
    return textwrap.fill(
        text,
        width,
        initial_indent=item[1] if item else "",
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
