"""Builds the documentation site into build/site: assembles its pages, then runs Sphinx, for which warnings are errors.

The pages are those in docs/, some at the top of the repository, and generated ones (tools/reference_pages.py). Links
between files of the repository become links between pages of the site. The menu has the order of the links in
docs/index.md.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import reference_pages

ROOT = Path(__file__).parents[1]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
# The pages at the top of the repository, and where the site has them.
TOP = {
    name: Path("project", f"{name.lower()}.md") for name in ("CHANGELOG", "CONTRIBUTING", "REPRODUCIBILITY", "SECURITY")
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")  # of a terminal
_NAMED = re.compile(r"`docs/([\w/-]+\.md)`")
_FENCE = re.compile(r"^(```|~~~).*?^\1$", flags=re.M | re.S)


def pages() -> dict[Path, Path]:
    """The site's path of every page that is a file of the repository."""
    found = {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))}
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    found |= {path: path.relative_to(ROOT / "docs").with_suffix(".md") for path in notebooks}
    return found | {ROOT / f"{name}.md": path for name, path in TOP.items()}


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Changes everything but blocks of code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def with_site_links(text: str, path: Path, known: dict[Path, Path]) -> str:
    """A page with its links into the repository turned into links into the site."""
    here = known[path].parent

    def change(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        name, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not name:
            return link[0]
        file = Path(os.path.normpath(path.parent / name))
        if not file.exists():
            raise SystemExit(f"{path.relative_to(ROOT)}: {target} does not exist.")
        if file.is_dir():
            return label
        if file.suffix == ".md" and file not in known:
            raise SystemExit(f"{path.relative_to(ROOT)}: {target} is not a page of the site.")
        if file not in known:  # a picture, or a file to download
            known_as = Path("files") / file.relative_to(ROOT)
            (SOURCE / known_as).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, SOURCE / known_as)
        else:
            known_as = known[file]
        if label.strip("`").endswith(".md") and file in known:  # on the site, pages have titles in place of file names
            label = title_of(file.read_text(encoding="utf-8"))
        return f"{mark}[{label}]({os.path.relpath(known_as, here)}{'#' + anchor if anchor else ''})"

    return outside_fences(text, lambda part: _LINK.sub(change, part))


def with_titles(text: str, at: Path, written: dict[Path, str]) -> str:
    """A page with names of other pages, such as `docs/how-to/python.md`, turned into links."""

    def change(name: re.Match[str]) -> str:
        page = Path(name[1])
        return f"[{title_of(written[page])}]({os.path.relpath(page, at.parent)})" if page in written else name[0]

    return _NAMED.sub(change, text)


def notebook_page(path: Path, known: dict[Path, Path]) -> str:
    """A notebook as Markdown, with its stored outputs, and a link to download it."""
    folder = SOURCE / known[path].parent
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, folder)
    lines = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        lines += [with_site_links(text, path, known) if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"]
        for index, output in enumerate(cell.get("outputs", ())):
            lines += [_output(output, folder / f"{path.stem}-{number}-{index}.png")]
    return "\n\n".join([*lines, f"{{download}}`Download this notebook <{path.name}>`\n"])


def _output(output: dict[str, Any], picture: Path) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        return f"![output]({picture.name})"
    if "text/html" in data:
        return re.sub(r"\n\s*\n", "\n", f'<div class="output">\n{"".join(data["text/html"]).strip()}\n</div>')
    text = "".join(output.get("text", data.get("text/plain", output.get("traceback", ()))))
    return f"```{{code-block}} text\n:class: output\n\n{re.sub(COLOUR, '', text).rstrip()}\n```"


def toctree(paths: Iterable[Path], caption: str = "") -> str:
    """The directive that puts pages into the menu."""
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return "\n".join(["\n```{toctree}", options, *map(str, paths), "```\n"])


def add_menu(written: dict[Path, str]) -> None:
    """Adds the menu to the front page: each section's pages, linked ones first; and links to the generated pages."""
    front = Path("index.md")
    parents = {path: Path(f"{path.parent}.md") for path in sorted(written)}
    tops = [path for path, parent in parents.items() if parent not in written and path != front]
    made = [f"* [{title_of(text)}]({path})" for path, text in reference_pages.top_pages().items()]
    written[front] = written[front].replace("<!-- generated pages -->", "\n".join(made))
    for section in written[front].split("\n## ")[1:]:
        linked = [path for *_, target in _LINK.findall(section) if (path := Path(target.partition("#")[0])) in tops]
        rest = [path for path in tops if path.parts[0] in {found.parts[0] for found in linked}]
        written[front] += toctree(dict.fromkeys([*linked, *rest]), section.splitlines()[0])
    for parent in {*parents.values()} & {*written}:
        below = [path for path, above in parents.items() if above == parent]
        at = parent.relative_to(parent.parent)
        written[parent] += toctree(Path(at.stem) / path.name for path in below)


def title_of(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.*)$", text, flags=re.M)
    assert found
    return found[1]


def assemble() -> None:
    """Writes everything that Sphinx reads."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    known, written = pages(), reference_pages.pages()
    for path, at in known.items():
        if path.suffix == ".ipynb":
            written[at] = notebook_page(path, known)
        else:
            written[at] = with_site_links(path.read_text(encoding="utf-8"), path, known)
    add_menu(written)
    for at, text in written.items():
        text = outside_fences(text, partial(with_titles, at=at, written=written))
        (SOURCE / at).parent.mkdir(parents=True, exist_ok=True)
        (SOURCE / at).write_text(text, encoding="utf-8")


def main() -> None:
    """Builds the site."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    assemble()
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "-d", "build/site-cache"]
    command = [sys.executable, "-m", "sphinx", *options, str(SOURCE), str(SITE)]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
