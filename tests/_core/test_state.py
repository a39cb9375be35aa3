"""State by name: saved, written to a file, and restored in place."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ratp._core.files import read_tensors, write_tensors
from ratp._core.state import Stateful, join_tensors, save, split_tensors
from ratp.errors import RatpError


class Counter(Stateful):
    saved = "count"

    def __init__(self):
        self.count = 0


class Worker(Stateful):
    """One of each kind of thing that changes."""

    saved = "net _generator rates kept labels alias later counter count pairs"

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout())
        self._generator = self.net[2].generator = torch.Generator().manual_seed(1)
        self.rates = [0.1, 0.2]
        self.kept = {"a": torch.zeros(2), 3: "x"}
        self.labels = torch.zeros(5, dtype=torch.int64)
        self.alias = self.labels
        self.later = None
        self.counter = Counter()
        self.pairs = (torch.zeros(2), None)
        self.optimiser = torch.optim.Adam(self.net.parameters())

    def work(self):
        self.optimiser.zero_grad()
        torch.manual_seed(0)  # torch's own dropout draws from the global generator
        self.net(torch.ones(4, 3)).square().sum().backward()
        self.optimiser.step()
        self.net[1].eval()
        torch.rand(3, generator=self._generator)
        self.rates += [float("nan"), float("inf")]
        self.kept = {"a": torch.ones(2), 3: "y", "b": torch.ones(3)}
        self.labels += torch.arange(5)
        self.later = torch.ones(2, 2)
        self.counter.count = 7
        self.pairs = (torch.ones(2), 1)
        self.count = 3


class Optimising(Worker):
    saved = "optimiser"


def through_a_file(state, folder, device="cpu"):
    plain, tensors = split_tensors(state)
    write_tensors(folder / "state", tensors, {"state": json.dumps(plain)})
    tensors, about = read_tensors(folder / "state")
    return join_tensors(json.loads(about["state"]), tensors, torch.device(device))


@pytest.fixture(params=[Worker, Optimising])
def pair(tmp_path, request):
    """A worker, and one that took its state from a file."""
    one, other = request.param(), request.param()
    one.work()
    held = other.net[0].weight, other._generator, other.labels, other.counter
    with torch.no_grad():
        other.load_state_dict(through_a_file(one.state_dict(), tmp_path))
    now = other.net[0].weight, other._generator, other.labels, other.counter
    assert all(a is b for a, b in zip(held, now, strict=True))
    return one, other


def test_everything_is_restored_in_place(pair):
    one, other = pair
    for name, tensor in one.net.state_dict().items():
        assert torch.equal(other.net.state_dict()[name], tensor), name
    assert [layer.training for layer in other.net] == [True, False, True]
    assert other.rates[:2] == [0.1, 0.2] and other.rates[2] != other.rates[2] and other.rates[3] == float("inf")
    assert list(other.kept) == ["a", 3, "b"] and torch.equal(other.kept["b"], torch.ones(3))
    assert torch.equal(other.labels, torch.arange(5)) and other.alias is other.labels
    assert torch.equal(other.later, torch.ones(2, 2))
    assert (other.counter.count, other.count) == (7, 3)
    assert torch.equal(other.pairs[0], torch.ones(2)) and other.pairs[1] == 1
    assert torch.equal(torch.rand(4, generator=one._generator), torch.rand(4, generator=other._generator))


def test_original_and_restored_continue_alike(pair):
    for worker in pair:
        worker.work()
    if isinstance(pair[0], Optimising):
        assert torch.equal(pair[0].net[0].weight, pair[1].net[0].weight)
    assert torch.equal(pair[0].labels, pair[1].labels)


def test_shared_tensors_are_written_once():
    plain, tensors = split_tensors(
        {"a": torch.ones(3), "b": {"c": (one := torch.ones(2)), "d": one.detach()}, "e": one[:1]}
    )
    assert list(tensors) == ["a", "b.c", "e"]
    assert plain["b"]["d"] == {"@tensor": "b.c", "on": "cpu"}


def test_tensor_names_are_unique():
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "c": torch.ones(0), "d": torch.zeros(0)}
    plain, tensors = split_tensors(state)
    assert len(tensors) == 4
    assert join_tensors(plain, tensors, torch.device("cpu"))["a"]["b"] == 0


def test_tensors_of_a_gpu_go_to_the_device_of_the_run(tmp_path):
    """Which of several GPUs it was is not written, and does not matter."""
    plain, tensors = split_tensors({"one": torch.ones(2), "other": torch.ones(3)})
    plain["one"]["on"] = "cuda"
    restored = join_tensors(plain, tensors, torch.device("meta"))
    assert (restored["one"].device.type, restored["other"].device.type) == ("meta", "cpu")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_labels_are_not_written(tmp_path):
    import numpy as np

    (tmp_path / "labels").write_bytes(np.arange(6).tobytes())
    worker = Worker()
    worker.labels = torch.from_numpy(np.memmap(tmp_path / "labels", dtype=np.int64, mode="r"))
    state = worker.state_dict()
    worker.load_state_dict(state | {"labels": torch.arange(6)})


class TestMisfits:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"generator": torch.zeros(3, dtype=torch.uint8)}, r"Worker.generator: .*"),
            ({"net": {"tensors": {}}}, "Worker.net: RuntimeError.*"),
            ({"counter": {"size": 1}}, "Counter: count, size is saved or expected, but not both"),
            ({"nonsense": 1}, "Worker: nonsense is saved or expected, but not both"),
        ],
    )
    def test_mismatched_state_is_refused(self, change, expected):
        with pytest.raises(RatpError, match=expected):
            Worker().load_state_dict(Worker().state_dict() | change)

    def test_incomplete_state_is_refused(self):
        state = Worker().state_dict()
        del state["labels"]
        with pytest.raises(RatpError, match="labels"):
            Worker().load_state_dict(state)

    @pytest.mark.faults(5, "no file of a run can create Python objects, whatever it contains")
    def test_state_file_never_creates_objects(self):
        """What is none when it is built is plain data afterwards, whatever the file says."""
        worker = Worker()
        worker.load_state_dict(worker.state_dict() | {"later": {"object": "os", "parts": {}}})
        assert worker.later == {"object": "os", "parts": {}}

    def test_objects_without_state_are_named(self):
        worker = Worker()
        worker.counter = object()
        with pytest.raises(RatpError, match=r"Worker.counter: an object of type object needs state_dict and"):
            worker.state_dict()


def test_generator_of_earlier_stage_can_be_missing():
    one, other = Worker(), Worker()
    other.net[2].generator = None
    other.load_state_dict(one.state_dict())
    assert save(one.net)["training"] == "1111"
