"""Objects put back into the middle of their work."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ratp.errors import RatpError
from ratp.snapshot import SMALL, Marks, Snapshot


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass(frozen=True)
class Fixed:
    table: torch.Tensor
    size: int


class Unseen:
    transient = True

    def __init__(self):
        self.handle = 7


class Worker:
    """One of each kind of thing that changes."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.generator = torch.Generator().manual_seed(1)
        self.generators = (self.generator,)
        self.rates = [0.1, 0.2]
        self.kept = {"a": torch.zeros(2), 3: "x"}
        self.recent = deque([1, 2], maxlen=3)
        self.pair = Pair(torch.zeros(2), 0)
        self.fixed = Fixed(torch.zeros(2), 2)
        self.labels = torch.zeros(5, dtype=torch.int64)
        self.alias = self.labels
        self.later = None
        self.unseen = Unseen()
        self.loop = self

    def work(self):
        with torch.no_grad():
            self.net[0].weight.add_(1)
        self.net[1].running_mean.data.fill_(4.0)  # behind autograd's back
        self.net.eval()
        torch.rand(3, generator=self.generator)
        self.rates.append(float("nan"))
        self.rates[0] = float("inf")
        self.kept["a"] += 1
        self.kept["b"] = torch.ones(3)
        del self.kept[3]
        self.recent.extend([5, 6])
        self.pair = Pair(torch.ones(2), 1)
        self.fixed.table.fill_(9)
        self.labels = torch.arange(5)
        self.alias = self.labels
        self.later = torch.ones(2, 2)
        self.unseen.handle = 8
        self.count = 3


def through_a_file(snapshot):
    """What is left of it after a file: tensors, and text."""
    return Snapshot(dict(snapshot.tensors), json.loads(json.dumps(snapshot.changes)))


def restored(worker=None):
    one = worker or Worker()
    marks = Marks({"worker": one})
    one.work()
    other = Worker()
    with torch.no_grad():
        for parameter in other.net.parameters():
            parameter.copy_(torch.full_like(parameter, 5.0))  # whatever it was before
    Marks({"worker": other}).restore(through_a_file(marks.snapshot()))
    return one, other


def test_everything_is_as_it_was():
    one, other = restored()
    for name, tensor in one.net.state_dict().items():
        assert torch.equal(other.net.state_dict()[name], tensor), name
    assert not other.net.training and not other.net[1].training
    assert torch.equal(torch.rand(4, generator=one.generator), torch.rand(4, generator=other.generator))
    assert other.rates[0] == float("inf") and other.rates[1] == 0.2 and other.rates[2] != other.rates[2]
    assert list(other.kept) == ["a", "b"]
    assert torch.equal(other.kept["a"], torch.ones(2)) and torch.equal(other.kept["b"], torch.ones(3))
    assert list(other.recent) == [2, 5, 6] and other.recent.maxlen == 3
    assert type(other.pair) is Pair and torch.equal(other.pair.left, torch.ones(2)) and other.pair.right == 1
    assert torch.equal(other.fixed.table, torch.full((2,), 9.0))
    assert torch.equal(other.labels, torch.arange(5)) and other.labels is other.alias
    assert torch.equal(other.later, torch.ones(2, 2)) and other.count == 3


def test_objects_stay_the_same_ones():
    """Whoever holds a network, parameter, list or generator holds it afterwards."""
    other = Worker()
    held = other.net, other.net[0].weight, other.rates, other.generator, other.kept, other.fixed
    one = Worker()
    marks = Marks({"worker": one})
    one.work()
    Marks({"worker": other}).restore(through_a_file(marks.snapshot()))
    now = other.net, other.net[0].weight, other.rates, other.generator, other.kept, other.fixed
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert other.generators[0] is other.generator


def test_what_is_transient_is_left_alone():
    one, other = restored()
    assert (one.unseen.handle, other.unseen.handle) == (8, 7)


def test_nothing_but_changes_and_numbers_that_may_have_changed_is_kept():
    worker = Worker()
    snapshot = Marks({"worker": worker}).snapshot()
    assert "rates" not in json.dumps(snapshot.changes)
    worker = Worker()
    worker.images = torch.zeros(4, 3, dtype=torch.uint8)
    worker.table = torch.zeros(SMALL + 1, dtype=torch.int64)
    marks = Marks({"worker": worker})
    assert not {"images", "table"} & {name.strip(".") for name in parts_of(marks.snapshot())}
    worker.images[0, 0] = 1
    worker.table[0] = 1
    assert {"images", "table"} <= {name.strip(".") for name in parts_of(marks.snapshot())}


def parts_of(snapshot):
    return snapshot.changes["parts"]["['worker']"]["parts"]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_images_that_can_only_be_read_are_not_written_to(tmp_path):
    import numpy as np

    (tmp_path / "labels").write_bytes(np.arange(6).tobytes())
    mapped = np.memmap(tmp_path / "labels", dtype=np.int64, mode="r")

    def worker():
        made = Worker()
        made.data = torch.from_numpy(mapped)
        return made

    one = worker()
    marks = Marks({"worker": one})
    one.work()
    other = worker()
    Marks({"worker": other}).restore(through_a_file(marks.snapshot()))
    assert torch.equal(other.data, torch.arange(6))


def test_a_tensor_that_has_no_place_yet_goes_to_the_device_of_the_run():
    """Which of several GPUs it was on is not kept, and does not matter."""
    one, other = Worker(), Worker()
    marks = Marks({"worker": one})
    one.work()
    snapshot = through_a_file(marks.snapshot())
    parts_of(snapshot)[".later"]["on"] = "cuda"
    Marks({"worker": other}, torch.device("meta")).restore(snapshot)
    assert (other.later.device.type, other.labels.device.type) == ("meta", "cpu")


class TestMisfits:
    @pytest.mark.parametrize("change", ["object", "generator", "tensor", "sequence"])
    def test_what_does_not_fit_is_refused(self, change):
        one = Worker()
        marks = Marks({"worker": one})
        one.work()
        snapshot = through_a_file(marks.snapshot())
        parts = parts_of(snapshot)
        if change == "object":
            parts[".later"] = {"object": "Linear", "parts": {}}
        elif change == "generator":
            snapshot.tensors[parts[".generator"]["generator"]] = torch.zeros(3, dtype=torch.uint8)
        elif change == "tensor":
            parts[".labels"]["tensor"] = "nowhere"
        else:
            parts[".rates"] = {"unknown": 3}
        with pytest.raises(RatpError, match="the checkpoint does not fit at"):
            Marks({"worker": Worker()}).restore(snapshot)

    @pytest.mark.faults(5, "no file of a run makes an object, whatever it says")
    def test_no_file_makes_an_object(self):
        """A class is never looked up by the name a file gives."""

        class Other(Worker):
            def work(self):
                super().work()
                self.later = nn.Linear(2, 2)

        one = Other()
        marks = Marks({"worker": one})
        one.work()
        with pytest.raises(RatpError, match=r"later.*there is no Linear, but NoneType"):
            Marks({"worker": Other()}).restore(through_a_file(marks.snapshot()))
