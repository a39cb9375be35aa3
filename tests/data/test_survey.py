"""Which folders and zips are domains, for everything a user may point at."""

from __future__ import annotations

import os

import pytest
from made_images import closed, make_small_domain, write_files, write_zip

from ratp.data.read.layout import find_domains
from ratp.data.read.tree import open_tree
from ratp.errors import RatpError


def layout(root, *names):
    """Empty files of these names."""
    return write_files(root, dict.fromkeys(names, b"x"))


@pytest.mark.parametrize(
    ("files", "domains"),
    [
        (["1.png", "2.jpg"], ["."]),
        (["cat/1.png", "dog/2.png"], ["."]),
        (["cat/1.png", "dog/readme.txt"], ["."]),
        (["cat/1.png", "cat/.cache/2.png", "dog/2.png"], ["."]),
        (["1.png", "dog/2.png"], ["."]),
        (["a.zip", "b.ZIP", "notes.txt"], ["a.zip", "b.ZIP"]),
        (["a.zip", "b/cat/1.png", "c/2.png"], ["a.zip", "b", "c"]),
        (["photo/cat/1.png", "photo/dog/1.png", "sketch/cat/1.png", "sketch/dog/1.png"], ["photo", "sketch"]),
        (["day/cat/1.png", "day/dog/1.png", "rain/cat/1.png", "rain/dog/1.png", "new/1.png"], ["day", "new", "rain"]),
        (["day/cat/1.png", "day/dog/1.png", "day/1.png", "rain/cat/1.png", "rain/dog/1.png"], ["day", "rain"]),
        (["cat/images/1.png", "dog/images/1.png"], ["."]),
        (["photo/cat/1.png"], ["photo"]),
        (
            ["digits/mnist.zip", "pacs/photo.zip", "pacs/sketch.zip"],
            ["digits/mnist.zip", "pacs/photo.zip", "pacs/sketch.zip"],
        ),
        (["digits/mnist/0/1.png", "digits/usps.zip"], ["digits/mnist", "digits/usps.zip"]),
        (["digits/mnist/0/1.png", "mine.zip"], ["digits/mnist", "mine.zip"]),
        (["set/photo/train/cat/1.png"], ["set/photo"]),
        (["digits/mnist.zip", "downloads/digits/train.zip", "downloads/x/1.png"], ["digits/mnist.zip"]),
        (["digits/mnist.zip", ".hidden/cat/1.png", "__MACOSX/cat/1.png"], ["digits/mnist.zip"]),
        (["cat/1.png", "dog/black/2.png"], ["."]),
        (["cat/1.png", "dog/1.png", "dog/backup.zip"], ["."]),
        (["new/1.png", "downloads/pets/photo/1.png"], ["new"]),
        (["cat/1.png", "downloads/1.png"], ["."]),
        (["cat/1.png", "dog/2024/01/1.png", "dog/2024/02/1.png", "dog/2025/01/1.png", "dog/2025/02/1.png"], ["."]),
        (["a/x/0/1.png", "a/x/1/1.png", "a/y/0/1.png", "a/y/1/1.png", "b/z.zip"], ["a/x", "a/y", "b/z.zip"]),
        (
            [f"{place}/{label}/1.png" for place in ("a/x", "a/y", "b/v", "b/w") for label in "01"],
            ["a/x", "a/y", "b/v", "b/w"],
        ),
    ],
)
def test_layouts(tmp_path, files, domains):
    layout(tmp_path, *files)
    assert [os.path.relpath(path, tmp_path) for path in find_domains(tmp_path)] == domains


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        (["dog/2024/1.png", "dog/2025/1.png", "guitar/1.png", "house/1.png"], True),
        (["day/dog/1.png", "day/cat/1.png", "rain/dog/1.png", "rain/cat/1.png"], False),
        ([f"{label}/{part}/1.png" for label in ("dog", "guitar", "house") for part in ("train", "Val")], True),
        (
            [
                "dog/1.png",
                "dog/a/1.png",
                "dog/b/1.png",
                "guitar/1.png",
                "guitar/a/1.png",
                "guitar/b/1.png",
                "house/1.png",
            ],
            True,
        ),
        (["dog/a/1.png", "dog/b/1.png", "guitar/a/1.png", "guitar/b/1.png", "house/1.png", "house/a/1.png"], False),
    ],
)
def test_folder_readable_as_domain_is_one_domain(tmp_path, files, is_one):
    layout(tmp_path, *files)
    assert (find_domains(tmp_path) == (tmp_path,)) == is_one
    if is_one:
        assert open_tree(tmp_path).classes == ("dog", "guitar", "house")
    else:
        with pytest.raises(RatpError, match="looks like several domains"):
            open_tree(tmp_path)


@pytest.mark.parametrize(
    ("files", "domains"),
    [
        (["day/cat/1.png", "day/dog/1.png", "rain/cat/1.png", "rain/dog/1.png"], ["closed", "day", "rain"]),
        (["day/cat/1.png", "day/dog/1.png"], ["closed", "day"]),
        (["a.zip"], ["a.zip", "closed"]),
        (["cat/1.png"], ["."]),
        ([], ["closed"]),
    ],
)
def test_unreadable_folder_hides_no_other(tmp_path, files, domains, monkeypatch):
    layout(tmp_path, *files, "closed/cat/1.png")
    closed(monkeypatch, "closed")
    assert [os.path.relpath(path, tmp_path) for path in find_domains(tmp_path)] == domains


def test_every_zip_is_a_domain(tmp_path):
    path = write_zip(tmp_path / "x.zip", make_small_domain())
    assert find_domains(path) == (path,)


@pytest.mark.parametrize("files", [[], ["readme.txt"], ["a/b/readme.txt"], ["a/b/c/x.zip"], ["downloads/a/1.png"]])
def test_empty_folder(tmp_path, files):
    layout(tmp_path, *files)
    with pytest.raises(RatpError, match="holds no domains: expected zips, or folders with class/image"):
        find_domains(tmp_path)


def test_missing_path(tmp_path):
    with pytest.raises(RatpError, match="nowhere does not exist"):
        find_domains(tmp_path / "nowhere")


def test_links_in_a_circle(tmp_path):
    layout(tmp_path, "photo/cat/1.png")
    (tmp_path / "photo" / "cat" / "again").symlink_to(tmp_path)
    assert find_domains(tmp_path) == (tmp_path / "photo",)
