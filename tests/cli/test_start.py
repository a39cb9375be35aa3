"""Commands that compute nothing start without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers import slow

CHECK = """
import json, sys
from ratp.cli.main import main
sys.argv = ["ratp", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    code = end.code or 0
print("modules", code, "torch" in sys.modules, "matplotlib" in sys.modules, "sklearn" in sys.modules)
"""


def start(tmp_path, *words):
    """Exit code, whether heavy modules were imported, and what went to standard error."""
    found = subprocess.run(
        [sys.executable, "-c", CHECK, json.dumps(words)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    _, code, *heavy = found.stdout.splitlines()[-1].split()
    return int(code), heavy, found.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        slow(("--version",), 0),
        (("methods",), 0),
        slow(("methods", "--json"), 0),
        slow(("methods", "--for", "one pass"), 0),
        (("streams",), 0),
        slow(("streams", "--json"), 0),
        (("run", "--help"), 0),
        slow(("report", "--help"), 0),
        slow(("predict", "--help"), 0),
        slow(("export", "--help"), 0),
        slow(("watch", "--help"), 0),
        slow(("serve", "--help"), 0),
        (("watch", "nowhere", "-d", "model"), 2),
        slow(("study", "--help"), 0),
        (("study", "status", "--help"), 0),
        slow(("data", "--help"), 0),
        (("doctor", "--help"), 0),
        slow(("rum",), 2),
        slow(("run", "--steps"), 2),
        (("run", "demp"), 2),
        slow(("run", "demo", "-m", "rapt"), 2),
        slow(("run", "demo", "-m", "rapt", "--preset", "quick", "--seed", "1", "--weights", "none"), 2),
        (("run", "demo", "--device", "gpu"), 2),
        (("run", "folders", "--source", "day", "--targets", "rain"), 2),
    ],
)
def test_it_imports_no_torch(tmp_path, words, code):
    assert start(tmp_path, *words)[:2] == (code, ["False"] * 3)


def test_an_unknown_stream_and_method_are_reported_together(tmp_path):
    code, heavy, errors = start(tmp_path, "run", "demp", "-m", "rapt", "-m", "tent")
    assert (code, heavy) == (2, ["False"] * 3)
    assert "Did you mean 'demo'?" in errors
    assert "Did you mean 'ratp'?" in errors


def test_missing_folders_and_an_unknown_device_are_reported_together(tmp_path):
    (tmp_path / "day").mkdir()
    words = ("run", "folders", "--source", "day", "--targets", "rain", "night", "--device", "gpu")
    code, heavy, errors = start(tmp_path, *words)
    assert (code, heavy) == (2, ["False"] * 3)
    assert "Did you mean 'cuda'?" in errors
    assert "rain does not exist" in errors
    assert "night does not exist" in errors
    assert "day does not exist" not in errors


def test_with_further_settings_all_mistakes_are_reported_together(tmp_path):
    code, _, errors = start(tmp_path, "run", "demo", "-m", "rapt", "--set", "epoch=3")
    assert code == 2
    assert "Did you mean 'ratp'?" in errors
    assert "'epoch'" in errors
