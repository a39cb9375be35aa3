"""``ratp data cache``: what is kept, and what goes."""

from __future__ import annotations

import json
import os

import pytest

from data.made_images import make_small_domain, write_files
from helpers import ratp
from ratp.data.cache.decoded import open_decoded
from ratp.data.cache.store import cache_entries


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with two domains, the second of which was used last."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RATP_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "80")
    for number, name in enumerate(("[old]", "new")):
        open_decoded(write_files(tmp_path / name, make_small_domain()), 64, cache=folder)
        entry = next(entry for entry in cache_entries(folder) if entry.name == name)
        os.utime(folder / "decoded" / f"{entry.key}.json", (1e9 + 86_400 * number,) * 2)
    return folder


def names(cache):
    return [entry.name for entry in cache_entries(cache)]


def test_entries_are_listed_most_recent_first(cache):
    result = ratp("data", "cache")
    assert result.code == 0
    header, first, second, last = result.out.splitlines()
    assert header.split() == ["domain", "images", "pixels", "size", "last", "used"]
    assert first.split()[:3] == ["new", "6", "64×64"]
    assert first.rstrip()[-16:].startswith("2001-09-1")
    assert second.startswith("[old]")
    assert last.startswith("2 in all, ")
    assert f"Cache: {cache}" in result.err
    assert names(cache) == ["[old]", "new"]


def test_clear(cache):
    result = ratp("data", "cache", "--clear")
    assert (result.code, result.out) == (0, "No decoded images are kept.\n")
    assert "Removed: 2, " in result.err
    assert os.listdir(cache / "decoded") == []


def test_clear_removes_leftovers(cache):
    assert ratp("data", "cache", "--clear").code == 0
    for name in ("abc.lock", "abc.part-1"):
        (cache / "decoded" / name).touch()
    assert "Removed: 1, " in ratp("data", "cache", "--clear").err
    assert os.listdir(cache / "decoded") == []


def test_keep_drops_least_recently_used(cache):
    one = cache_entries(cache)[1].bytes
    result = ratp("data", "cache", "--keep", (one + 1000) / 2**30)
    assert result.code == 0
    assert names(cache) == ["new"]
    assert "Removed: 1, " in result.err
    assert ratp("data", "cache", "--keep", 1).code == 0
    assert names(cache) == ["new"]


def test_json(cache):
    found = json.loads(ratp("data", "cache", "--json").out)
    assert [row["domain"] for row in found["entries"]] == ["[old]", "new"]
    assert found["bytes"] == sum(row["bytes"] for row in found["entries"])
    assert found["removed"] == []
    found = json.loads(ratp("data", "cache", "--clear", "--json").out)
    assert (found["entries"], len(found["removed"])) == ([], 2)


def test_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RATP_CACHE", str(tmp_path / "none"))
    for words in ([], ["--clear"], ["--keep", "0"]):
        result = ratp("data", "cache", *words)
        assert (result.code, result.out) == (0, "No decoded images are kept.\n")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--clear", "--keep", "1"], "one of the two"), (["--keep=-1"], "0 or more"), (["--keep", "nan"], "0 or more")],
)
def test_invalid_arguments(cache, words, expected):
    result = ratp("data", "cache", *words)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert len(names(cache)) == 2


def test_ctrl_c(cache, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ratp.cli.data_check.evict", interrupted)
    result = ratp("data", "cache", "--clear")
    assert (result.code, result.out) == (130, "")
    assert result.err.strip().startswith("Interrupted. ")
