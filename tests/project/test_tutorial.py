"""Every command of the tutorial runs, in the order of the page, and does what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "keep-a-model-alive.md"


def blocks():
    """The kinds and texts of the page's blocks of code."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.slow
def test_keeping_a_model_alive(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    said = ""
    for kind, text in blocks():
        command = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        said += done.stdout + done.stderr
    for expected in ("fine → drifted", "accepted: version 2", "foreign", "noise or blank", "model.onnx", "tent"):
        assert expected in said, f"{expected!r} is not in\n{said}"
    answers = [json.loads(line) for line in (tmp_path / "shop/deployed/predictions.jsonl").read_text().splitlines()]
    assert len(answers) == len({answer["file"] for answer in answers}) == 225 + 600 + 128
    assert {answer["version"] for answer in answers} == {1, 2}
    assert len(list((tmp_path / "shop" / "runs").iterdir())) >= 3
