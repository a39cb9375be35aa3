"""Images in memory, of every kind that a program may have them in."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from helpers import toy_domain
from ratp.data.in_memory import longest_side, read_images
from ratp.errors import RatpError

IMAGES = toy_domain("ink", 10).images
LABELS = toy_domain("ink", 10).labels
FLOATS = IMAGES / 255
PICTURES = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in IMAGES]


def read(data, size=(32, 32)):
    return read_images(data, size, "domain 'ink'")


class Pairs(Dataset):
    """A map-style data set."""

    def __init__(self, items, classes=None):
        self.items = items
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


PAIRS = Pairs([(image, int(label)) for image, label in zip(FLOATS, LABELS, strict=True)], ["n", "e", "s", "w"])


@pytest.mark.parametrize(
    "data",
    [
        IMAGES,
        FLOATS,
        IMAGES.numpy(),
        IMAGES.permute(0, 2, 3, 1).numpy(),
        list(IMAGES),
        PICTURES,
        TensorDataset(FLOATS),
        (IMAGES, LABELS),
        PAIRS,
        Subset(PAIRS, range(10)),
        DataLoader(PAIRS, batch_size=3, shuffle=True),
        [(np.array(picture), "x") for picture in PICTURES],
    ],
)
def test_all_kinds_are_the_same_images(data):
    assert torch.equal(read(data).images, IMAGES)
    assert longest_side(data, "") == 32


def test_labels_and_class_names_come_along():
    assert read((IMAGES, LABELS)).labels == read((IMAGES, LABELS.numpy())).labels == tuple(LABELS.tolist())
    found = read(DataLoader(Subset(PAIRS, [3, 1]), shuffle=True))
    assert (found.labels, found.classes) == ((3, 1), ("n", "e", "s", "w"))
    assert read((IMAGES, ["a"] * 10)).labels == ("a",) * 10
    assert read(IMAGES).labels is None


def test_grey_images_get_three_channels():
    for grey in (IMAGES[:, :1], IMAGES[:, 0], [image[0] for image in IMAGES], [p.convert("L") for p in PICTURES]):
        found = read(grey).images
        assert longest_side(grey, "") == 32
        assert found.shape == IMAGES.shape and torch.equal(found[:, 0], found[:, 2])


def test_images_of_differing_sizes_are_resized_like_files():
    pictures = [picture.resize((20 + place, 40)) for place, picture in enumerate(PICTURES)]
    expected = np.array(pictures[4].resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(read(pictures).images[4].permute(1, 2, 0).numpy(), expected)
    assert longest_side(pictures, "") == 40


def test_random_data_sets_give_the_same_images_each_time():
    class Random(Pairs):
        def __getitem__(self, index):
            return self.items[index] * (torch.rand(()) + random.random() + np.random.rand()) / 3

    states = torch.get_rng_state(), random.getstate()
    first = read(Random(FLOATS))
    torch.rand(1)
    assert torch.equal(first.images, read(Random(FLOATS)).images)
    assert states[1] == random.getstate()


class Endless(IterableDataset):
    def __iter__(self):
        yield IMAGES[0]


class Broken(Pairs):
    def __getitem__(self, index):
        raise KeyError("gone")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (IMAGES[:0], "is empty"),
        ([], "is empty"),
        (
            IMAGES[0],
            r"\(N, 3, height, width\), got \(3, 32, 32\)\. For a single image: images\[None\]",
        ),
        (IMAGES[:, :2], r"1 or 3 channels, got shape \(10, 2, 32, 32\)"),
        (torch.zeros(2, 4, 8, 8), r"Without the alpha channel: images\[:, :3\]"),
        (FLOATS * 2 - 1, r"float images must lie within 0\.\.1, got -1\.\.0.*leave out Normalize"),
        (FLOATS * torch.nan, r"got nan\.\.nan"),
        (IMAGES.long(), r"uint8 or floats of 0 to 1, got torch\.int64"),
        ((IMAGES, LABELS[:4]), "10 images, but 4 labels"),
        ((IMAGES, LABELS.float()), "a whole number or a class name, got 0.0"),
        ((IMAGES, [0, "a"] * 5), "all whole numbers or all class names"),
        ([(image, 0, 0) for image in IMAGES], r"item 0: an item must be an image or \(image, label\), got 3 values"),
        ([*PAIRS.items[:2], IMAGES[0]], "item 2: some items have a label and some have none"),
        ([{"image": 1}], "must be a PIL image, an array or a tensor, got dict"),
        ([3], "got int"),
        (Endless(), "It can only be iterated over"),
        (iter([1]), "It can only be iterated over"),
        (DataLoader(Endless()), "It can only be iterated over"),
        (3, "give a tensor, a tuple"),
        (Broken([0]), r"item 0 of 1 cannot be read \(KeyError: 'gone'\)"),
        (DataLoader(PAIRS, sampler=SubsetRandomSampler([1])), "the loader's SubsetRandomSampler chooses images"),
        (DataLoader(PAIRS, collate_fn=list), "has a collate_fn, which ratp does not call"),
    ],
)
def test_mistakes(data, expected):
    with pytest.raises(RatpError, match=f"^domain 'ink'.*{expected}"):
        read(data)
