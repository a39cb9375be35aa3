"""Versions of files: older ones are read as new ones are, later ones are refused."""

from __future__ import annotations

import json

import pytest

from ratp._core.files import CHECKPOINT, NewerFileError, OutdatedFileError, Schema
from ratp.errors import RunDirectoryError


def renamed(data):
    return {"colour" if name == "color" else name: value for name, value in data.items()}


def doubled(data):
    return {**data, "size": 2 * data["size"]}


THIRD = Schema((renamed, doubled))


@pytest.mark.parametrize(
    "data",
    [
        {"color": "red", "size": 1},
        {"schema": 1, "color": "red", "size": 1},
        {"schema": 2, "colour": "red", "size": 1},
        {"schema": 3, "colour": "red", "size": 2},
    ],
)
def test_older_versions_read_the_same(data):
    before = json.dumps(data)
    assert THIRD.read(data, "file") == {"colour": "red", "size": 2}
    assert json.dumps(data) == before


def test_round_trip():
    data = {"colour": "red", "size": 2}
    assert THIRD.marked(data) == {"schema": 3, **data}
    assert THIRD.read(THIRD.marked(data), "file") == data
    assert THIRD.marked({"schema": 1, **data}) == {"schema": 3, **data}


def test_later_version_is_refused_with_advice():
    with pytest.raises(NewerFileError) as refusal:
        THIRD.read({"schema": 4}, "runs/a/config.json")
    message = str(refusal.value)
    assert "runs/a/config.json has schema 4" in message
    assert "reads schema 3" in message
    assert "pip install --upgrade ratp-cdsl" in message
    assert "\n" not in message


@pytest.mark.parametrize("version", [0, -1, 1.0, True, "1", None, [], {}, 10**40])
def test_invalid_version_is_refused(version):
    with pytest.raises(RunDirectoryError, match="schema"):
        THIRD.read({"schema": version, "color": "red", "size": 1}, "file")


def test_version_key_can_differ():
    form = Schema(key="format")
    assert form.marked({"schema": "mine"}) == {"format": 1, "schema": "mine"}
    with pytest.raises(NewerFileError, match="has format 2"):
        form.read({"format": 2}, "file")


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_that_name_private_attributes_are_not_read(version):
    with pytest.raises(OutdatedFileError, match="an earlier version of ratp wrote it"):
        CHECKPOINT.read({"schema": version, "stage": 2}, "file")
