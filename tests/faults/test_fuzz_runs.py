"""Damage of every kind to every file of a run: it is noticed, or it makes no difference."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warm import assert_same, attempt

from helpers import files_of, toy_domains, toy_plan
from ratp._core.files import read_tensors
from ratp.errors import RatpError
from ratp.runs.events import Trained
from ratp.runs.record import read_run
from ratp.runs.run import Run

pytestmark = pytest.mark.slow

EXAMPLES = 50
UNDER_WAY = (
    "checkpoint.safetensors",
    "checkpoint-before.safetensors",
    "state.safetensors",
    "state-before.safetensors",
    "config.json",
    "environment.json",
    "journal.jsonl",
    "matrix.json",
)
FINISHED = ("state.safetensors", "weights.safetensors", "config.json", "journal.jsonl", "matrix.json")


def plan():
    return toy_plan("shot", toy_domains(ink=24, mud=20, fog=16), changes={"epochs": 1, "steps": 3})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was stopped with two checkpoints in its third stage, and the same, finished."""
    folder = tmp_path_factory.mktemp("runs")
    events, seen = Run(plan(), folder / "under-way", save_every=0.0).events(), 0
    for event in events:
        seen += isinstance(event, Trained)
        if seen == 8:
            break
    events.close()
    assert set(UNDER_WAY) <= files_of(folder / "under-way").keys()
    shutil.copytree(folder / "under-way", folder / "finished")
    Run(plan(), folder / "finished").execute()
    return folder


@st.composite
def damages(draw):
    """A change of a file's contents: a flipped bit, an end cut off, junk, or a stretch of zeros."""
    kind = draw(st.sampled_from(["flip", "flip", "cut", "junk", "zeros"]))
    place, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))
    junk = draw(st.binary(min_size=1, max_size=20))

    def change(content):
        data, at = bytearray(content), int(place * len(content))
        if kind == "flip" and data:
            data[at] ^= 1 << bit
        elif kind == "cut":
            del data[at:]
        elif kind == "junk":
            data[at:at] = junk
        else:
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        return bytes(data)

    return change


def damaged_copy(folder, tmp_path_factory, name, damage):
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(damage((copy / name).read_bytes()))
    return copy


@pytest.mark.faults(2, "ratp detects damage to a file of a run by its hash, or the result does not change")
@pytest.mark.filterwarnings(
    "ignore::ratp.runs.run.EnvironmentWarning"
)  # the file that records it may be the damaged one
@pytest.mark.filterwarnings("ignore::ratp.runs.states.StateWarning")
@pytest.mark.filterwarnings("ignore::ratp.runs.run.JournalWarning")
@settings(max_examples=EXAMPLES)
@given(name=st.sampled_from(UNDER_WAY), damage=damages())
def test_resuming_a_damaged_run(runs, tmp_path_factory, name, damage):
    copy = damaged_copy(runs / "under-way", tmp_path_factory, name, damage)
    record, error = attempt(Run(plan(), copy).execute)
    if record is None:
        assert name != "state-before.safetensors"  # not needed
        assert name in error or "another run" in error or "later" in error, error
    else:
        assert_same(runs / "finished", copy)


@pytest.mark.faults(6, "ratp refuses weights with a wrong hash, and continuing their run writes them again")
@pytest.mark.filterwarnings("ignore::ratp.runs.run.JournalWarning")
@settings(max_examples=EXAMPLES)
@given(name=st.sampled_from(FINISHED), damage=damages())
def test_reading_a_damaged_run(runs, tmp_path_factory, name, damage):
    copy = damaged_copy(runs / "finished", tmp_path_factory, name, damage)
    if name.endswith(".safetensors"):
        with suppress(RatpError):
            tensors, _ = read_tensors(copy / name)
            assert all(tensor.equal(read_tensors(runs / "finished" / name)[0][key]) for key, tensor in tensors.items())
    with suppress(RatpError):
        record = read_run(copy)
        assert record.matrix == read_run(runs / "finished").matrix
        for key in ("seed", "order", "method", "switches", "recipe", "data"):
            assert record.config[key] == read_run(runs / "finished").config[key]
    with suppress(RatpError):
        Run(plan(), copy).execute()
        assert_same(runs / "finished", copy)
