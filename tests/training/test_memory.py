import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratp._core.files import read_tensors, write_tensors
from ratp.training.memory import Memory
from ratp_reference import herding as reference


def domain(index, per_class, seed=0):
    """Images whose first pixel is their domain, second their position; labels; random unit features."""
    labels = torch.tensor([k for k, count in enumerate(per_class) for _ in range(count)])
    generator = torch.Generator().manual_seed(1000 * seed + index)
    order = torch.randperm(len(labels), generator=generator)
    labels = labels[order]
    images = torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = index
    images[:, 0, 0, 1] = torch.arange(len(labels)) % 256
    images[:, 0, 1, 0] = torch.arange(len(labels)) // 256
    features = torch.randn(len(labels), 5, generator=generator)
    return images, labels, features / features.norm(dim=1, keepdim=True)


def positions(memory, index, label):
    """Where in their domain the stored images of one domain and class stood, in order of storage."""
    kept = (memory.domains == index) & (memory.labels == label)
    return [int(image[0, 0, 1]) + 256 * int(image[0, 1, 0]) for image in memory.images[kept]]


def fill(memory, sizes, selection="herding"):
    for index, per_class in enumerate(sizes):
        memory.add(*domain(index, per_class), selection)


@pytest.mark.parametrize(
    ("classes", "per_class", "totals"),
    [
        (10, (20, 10, 6, 5, 4, 3), (200, 200, 180, 200, 200, 180)),
        (7, (28, 14, 9, 7), (196, 196, 189, 196)),
    ],
    ids=["ten classes", "seven classes"],
)
def test_published_sizes(classes, per_class, totals):
    memory = Memory(200, classes)
    for stage, (quota, total) in enumerate(zip(per_class, totals, strict=True)):
        memory.add(*domain(stage, [30] * classes), "herding")
        assert len(memory) == total
        assert memory.quota(stage + 1) == quota
        for index in range(stage + 1):
            for label in range(classes):
                assert len(positions(memory, index, label)) == quota


@pytest.mark.parametrize("selection", ["herding", "nearest"])
def test_each_domain_keeps_its_first_picks(selection):
    memory = Memory(60, 3)
    cases = [domain(index, [25, 25, 25]) for index in range(4)]
    for stage, case in enumerate(cases):
        memory.add(*case, selection)
        quota = 60 // (3 * (stage + 1))
        for index in range(stage + 1):
            _, labels, features = cases[index]
            for label in range(3):
                members = (labels == label).nonzero().squeeze(1)
                picks = getattr(reference, selection)(features[members], quota)
                assert positions(memory, index, label) == members[picks].tolist()


def test_stored_values_belong_together():
    images, labels, features = domain(0, [8, 8])
    memory = Memory(10, 2)
    memory.add(images, labels, features, "herding")
    for image, label in zip(memory.images, memory.labels, strict=True):
        position = int(image[0, 0, 1])
        assert torch.equal(images[position], image)
        assert labels[position] == label


@given(
    capacity=st.integers(0, 60),
    sizes=st.integers(1, 5).flatmap(
        lambda classes: st.lists(
            st.lists(st.integers(0, 9), min_size=classes, max_size=classes).filter(any), min_size=1, max_size=6
        )
    ),
)
def test_it_never_exceeds_its_capacity_and_repeats_nothing(capacity, sizes):
    classes = len(sizes[0])
    memory = Memory(capacity, classes)
    for stage, per_class in enumerate(sizes):
        memory.add(*domain(stage, per_class), "herding")
        assert len(memory) <= capacity
        assert len(memory.images) == len(memory.labels) == len(memory.domains)
        assert memory.seen == stage + 1
        quota = capacity // (classes * (stage + 1))
        for index in range(stage + 1):
            for label in range(classes):
                stored = positions(memory, index, label)
                assert len(stored) == len(set(stored)) == min(quota, sizes[index][label])


def test_a_memory_smaller_than_the_number_of_classes_stays_empty():
    memory = Memory(3, 4)
    fill(memory, [[5] * 4, [5] * 4])
    assert len(memory) == 0
    assert memory.seen == 2


def test_a_class_without_images_is_skipped():
    memory = Memory(20, 4)
    fill(memory, [[5, 0, 5, 0]])
    assert sorted(set(memory.labels.tolist())) == [0, 2]


def test_unused_class_slots_are_not_redistributed():
    memory = Memory(20, 2)
    fill(memory, [[2, 30]])
    assert memory.labels.bincount().tolist() == [2, 10]


def test_storing_leaves_the_domain_alone():
    images, labels, features = domain(0, [4, 4])
    memory = Memory(4, 2)
    memory.add(images, labels, features, "herding")
    stored = memory.images.clone()
    images.zero_()
    labels.fill_(1)
    assert torch.equal(memory.images, stored)
    assert memory.labels.tolist() == [0, 0, 1, 1]


def test_saved_memory_continues_where_it_stopped(tmp_path):
    straight, resumed = Memory(60, 3), Memory(60, 3)
    for index in range(3):
        case = domain(index, [12, 12, 12])
        straight.add(*case, "herding")
        write_tensors(tmp_path / "memory.safetensors", straight.state())
        resumed = Memory(60, 3)
        resumed.load_state(read_tensors(tmp_path / "memory.safetensors")[0])
    last = domain(3, [12, 12, 12])
    for memory in (straight, resumed):
        memory.add(*last, "herding")
    for name, tensor in straight.state().items():
        assert torch.equal(tensor, resumed.state()[name])
        assert tensor.dtype == resumed.state()[name].dtype


def test_an_empty_memory_can_be_saved(tmp_path):
    write_tensors(tmp_path / "memory.safetensors", Memory(10, 2).state())
    memory = Memory(10, 2)
    memory.load_state(read_tensors(tmp_path / "memory.safetensors")[0])
    fill(memory, [[8, 8]])
    assert len(memory) == 10


class TestClassMix:
    """Exemplars in proportion to how frequent classes are."""

    def test_a_domain_divides_its_share_by_them(self):
        memory = Memory(60, 3)
        memory.add(*domain(0, [30, 30, 30]), "herding")
        memory.add(*domain(1, [30, 30, 30]), "herding", torch.tensor([0.5, 0.3, 0.2]))
        kept = [[len(positions(memory, index, label)) for label in range(3)] for index in range(2)]
        assert kept == [[10, 10, 10], [15, 9, 6]]

    def test_earlier_domains_keep_theirs_and_their_first_picks(self):
        memory, mixes = Memory(120, 3), ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3])
        picks = {}
        for index, mix in enumerate(mixes):
            memory.add(*domain(index, [80, 80, 80]), "herding", torch.tensor(mix))
            assert len(memory) <= 120
            for earlier in range(index + 1):
                share = 120 // (index + 1)
                for label, part in enumerate(mixes[earlier]):
                    kept = positions(memory, earlier, label)
                    assert abs(len(kept) - part * share) <= 1.5
                    picks.setdefault((earlier, label), kept)
                    assert kept == picks[earlier, label][: len(kept)]

    def test_every_class_has_an_exemplar_if_there_is_room(self):
        memory = Memory(20, 4)
        memory.add(*domain(0, [9, 9, 9, 9]), "herding", torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert [len(positions(memory, 0, label)) for label in range(4)] == [9, 1, 1, 1]

    def test_equal_proportions_give_what_none_give(self):
        memories = Memory(96, 4), Memory(96, 4)
        for index in range(3):
            memories[0].add(*domain(index, [30] * 4), "herding")
            memories[1].add(*domain(index, [30] * 4), "herding", torch.full((4,), 0.25))
        states = [memory.state() for memory in memories]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
