"""The Python in docs/how-to/python.md and the README runs as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from ratp.networks.backbones import NAMES, REGISTRY

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ratp.RollbackWarning")  # the images are noise
def test_all_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert len(blocks) == 5
    page = Path("page.py")  # a file, as losses need their source
    page.write_text("\n".join(blocks), encoding="utf-8")
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(page.read_text(encoding="utf-8"), str(page.resolve()), "exec"), vars(module))
    for name in set(REGISTRY) - set(NAMES):
        del REGISTRY[name]
    assert module.record.matrix.complete
