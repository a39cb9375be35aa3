"""JSON that is no run's, no study's and no result's, however it is broken."""

from __future__ import annotations

import io
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from helpers import ratp
from ratp._core.locks import LOCK_FILE, exclusive
from ratp.data.cache.manifest import read_manifest
from ratp.errors import RatpError
from ratp.reports.markup import csv_report, latex_report, markdown_report
from ratp.reports.page import page_html
from ratp.reports.summary import group_runs, sections
from ratp.reports.tables import print_report
from ratp.runs.record import read_run
from tiny_study import grid, study_file

NESTED = 100_000
BOMBS = {
    "lists": "[" * NESTED,
    "closed lists": "[" * NESTED + "]" * NESTED,
    "objects": '{"a":' * NESTED + "1" + "}" * NESTED,
    "as deep as can be parsed": '{"a":' * 500 + "1" + "}" * 500,
    "a number without end": '{"seed": ' + "9" * 100_000 + "}",
    "no number": '{"seed": NaN}',
    "infinity": '{"seed": -Infinity}',
    "too large a number": '{"seed": 1e999}',
    "a text": '"config"',
    "nothing": "null",
    "half a letter": '{"a": "\udcff"}',
    "zeros": "\0" * 100,
}
FILES = ("config.json", "matrix.json", "environment.json")


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", FILES)
def test_run_file(bomb, name, run, assert_error):
    write(run / name, BOMBS[bomb])
    assert_error("report", "run", expected=[f"run/{name}", "damaged"])


@pytest.mark.parametrize("bomb", BOMBS)
def test_journal_line(bomb, run, assert_error):
    lines = (run / "journal.jsonl").read_text().splitlines()
    write(run / "journal.jsonl", "\n".join([lines[0], BOMBS[bomb], *lines[1:]]))
    assert_error("report", "run", expected=["journal.jsonl:2 is damaged"])


@pytest.mark.parametrize("bomb", BOMBS)
def test_result_file(bomb, here, assert_error):
    write(here / "result.json", BOMBS[bomb])
    assert_error("report", "result.json", expected=["result.json"])


@pytest.mark.parametrize("bomb", BOMBS)
def test_manifest(bomb, here):
    write(here / "manifest.json", BOMBS[bomb])
    with pytest.raises(RatpError, match=r"manifest\.json"):
        read_manifest(here / "manifest.json")


@pytest.mark.parametrize("bomb", BOMBS)
def test_study_marker(bomb, here, assert_error):
    file = study_file(here, grid('methods = ["source-only"]'))
    (here / "runs").mkdir()
    write(here / "runs" / "study.json", BOMBS[bomb])
    assert_error("study", "run", file, "--out", "runs", expected=["study.json"])


@pytest.mark.parametrize("bomb", BOMBS)
def test_lock_holder(bomb, here):
    """What a lock's file says is only for the message."""
    with exclusive(here):
        write(here / LOCK_FILE, BOMBS[bomb])
        with pytest.raises(RatpError, match="in use by another process"), exclusive(here):
            pass


@pytest.mark.parametrize("name", [*FILES, "journal.jsonl"])
def test_pipe_without_writer(name, run, assert_error):
    (run / name).unlink()
    os.mkfifo(run / name)
    assert_error("report", "run", expected=[name])


@pytest.mark.parametrize("name", [*FILES[1:], "journal.jsonl"])
def test_endless_device(name, run, assert_error):
    (run / name).unlink()
    (run / name).symlink_to("/dev/zero")
    assert_error("report", "run", expected=[f"{name}: it is a pipe or a device"])


def test_oversized_file(run):
    with (run / "matrix.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RatpError, match="1,099,511,627,776 bytes"):
        read_run(run)


ODD = (None, True, -1, 10**30, 10**400, 1e308, "\x1b[31m<b>", [], {}, [[]], {"a": [1]}, ["x"] * 3)


def places(value, at=()):
    """Every place in plain data; of a list the first two."""
    yield at
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*at, name))
    elif isinstance(value, list):
        for number in range(min(2, len(value))):
            yield from places(value[number], (*at, number))


def replace_at(value, at, new):
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replace_at(value[at[0]], at[1:], new)
    return copy


def report(run):
    """All of a report but its pictures."""
    records = [read_run(run)]
    console = Console(file=io.StringIO(), width=100)
    print_report(records, console)
    images = dict.fromkeys(("matrix", "curves"), "data:")
    page = page_html(sections(group_runs(records)), [images])
    texts = [console.file.getvalue(), page, csv_report(records), markdown_report(records), latex_report(records)]
    json.dumps(records[0].to_json(), allow_nan=False)
    assert not [text for text in texts if "\x1b" in text]
    assert "<b>" not in page


@pytest.mark.parametrize("name", [*FILES, "journal.jsonl"])
def test_wrong_value_anywhere_is_refused_or_shown(name, run):
    whole = (run / name).read_text()
    lines = name == "journal.jsonl"
    data = {e["event"]: e for e in map(json.loads, whole.splitlines())} if lines else json.loads(whole)
    tried = list(places(data))[1:]
    for number, at in enumerate(tried):
        changed = replace_at(data, at, ODD[number % len(ODD)])
        text = "\n".join(map(json.dumps, changed.values())) if lines else json.dumps(changed)
        (run / name).write_text(text)
        with suppress(RatpError):
            report(run)
    assert len(tried) > 5


def test_report_pictures_survive_odd_numbers(run):
    """A probe of a domain that is none, a stage beyond the last, a time before the first."""
    with (run / "journal.jsonl").open("a") as file:
        for event in (
            {"event": "probe", "stage": 10**30, "domain": ["x"], "progress": 1e308, "accuracy": {"ink": -5}},
            {"event": "probe", "stage": 1, "domain": "mud", "progress": "half", "accuracy": [1, 2]},
            {"event": "probe", "stage": 1, "domain": "mud", "progress": 0.5, "accuracy": {"mud": None}},
            {"event": "stage_finished", "stage": -7, "seconds": -1e9},
        ):
            file.write(json.dumps(event) + "\n")
    result = ratp("report", "run", "--quiet")
    assert result.code in (0, 2), result
    assert "Traceback" not in result.err
