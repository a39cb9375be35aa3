"""What all hostile files are held to: refused in clear words, nothing run, nothing written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from helpers import files_of, ratp

FINISHED = Path(__file__).parents[1] / "fixtures" / "runs" / "versioned" / "finished"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder, with room around it in which nothing must appear."""
    folder = tmp_path / "around" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(here):
    """A finished run, to be spoilt."""
    return shutil.copytree(FINISHED, here / "run")


def is_harmless(text: str) -> bool:
    """Whether a terminal shows a text and does nothing else."""
    return all(sign.isprintable() or sign in "\n " for sign in text)


@pytest.fixture
def assert_error(here):
    """Runs a command that must fail; returns its message."""
    around = here.parent

    def run_it(*arguments, expected=()):
        before = {**files_of(around), **{folder: b"" for folder, _, _ in os.walk(around)}}
        result = ratp(*arguments)
        assert result.code == 2, result
        assert result.out == ""
        assert result.err.startswith("error: ")
        assert "Traceback" not in result.err
        assert len(result.err) < 3000
        assert is_harmless(result.err)
        for words in expected:
            assert words in result.err
        assert {**files_of(around), **{folder: b"" for folder, _, _ in os.walk(around)}} == before
        return result.err

    return run_it
