"""Which folders and zips are domains, for everything a user may point at."""

from __future__ import annotations

import os

import pytest
from made_images import put, small_domain, zipped

from ratp.data.survey import find_domains
from ratp.errors import RatpError


def layout(root, *names):
    """Empty files of these names."""
    return put(root, dict.fromkeys(names, b"x"))


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
        (["photo/cat/1.png", "sketch/cat/1.png"], ["photo", "sketch"]),
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
        (["cat/1.png", "dog/black/2.png"], ["cat", "dog"]),
    ],
)
def test_layouts(tmp_path, files, domains):
    layout(tmp_path, *files)
    assert [os.path.relpath(path, tmp_path) for path in find_domains(tmp_path)] == domains


def test_a_zip_is_a_domain_whatever_is_in_it(tmp_path):
    path = zipped(tmp_path / "x.zip", small_domain())
    assert find_domains(path) == (path,)


@pytest.mark.parametrize("files", [[], ["readme.txt"], ["a/b/readme.txt"], ["a/b/c/x.zip"], ["downloads/a/1.png"]])
def test_nothing_there(tmp_path, files):
    layout(tmp_path, *files)
    with pytest.raises(RatpError, match="holds no domains: expected zips, or folders with class/image"):
        find_domains(tmp_path)


def test_no_such_path(tmp_path):
    with pytest.raises(RatpError, match="nowhere does not exist"):
        find_domains(tmp_path / "nowhere")


def test_links_in_a_circle(tmp_path):
    layout(tmp_path, "photo/cat/1.png")
    (tmp_path / "photo" / "cat" / "again").symlink_to(tmp_path)
    assert find_domains(tmp_path) == (tmp_path / "photo",)
