"""``ratp data check``: everything there is and everything wrong with it, in one reading and at any width."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from data.made_images import closed, encode, make_picture, make_small_domain, png, real_data, write_files, write_zip
from helpers import files_of, ratp
from ratp.data.cache.manifest import manifest_from_json

TWIN = png(seed=7)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In an empty folder, without a terminal or a data folder, at 80 columns."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "RATP_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def data():
    """A domain, and a set with a twin within a domain and one between domains."""
    os.makedirs("data/pets")
    write_zip(Path("data/pets/photo.zip"), {**make_small_domain(), "cat/twin.png": TWIN, "dog/twin.png": TWIN})
    write_files(Path("data/pets/sketch"), {"cat/1.jpg": encode(make_picture(seed=3), "JPEG"), "dog/also.png": TWIN})
    write_files(Path("data/new"), {"1.png": png(1), "2.png": png(2), "notes.txt": b"hello"})
    write_files(Path("data/downloads/pets"), {"raw.zip": b"half of it"})
    return Path("data")


class TestReport:
    def test_a_data_folder(self, data):
        before = files_of(data)
        result = ratp("data", "check")
        assert result.code == 0
        lines = result.out.splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line != line.rstrip()]
        assert lines[:3] == ["data", "  new: 2 images, no classes", "    all of height 12 and width 20"]
        assert "  photo: 8 images, 2 classes" in lines
        assert "    images per class: cat 4, dog 4" in lines
        assert "    height 8 to 12, median 9, width 10 to 20, median 10" in lines
        assert "    exact duplicates: 1, e.g. 'cat/twin.png', 'dog/twin.png'" in lines
        assert "    duplicates across classes: 1, e.g. 'cat/twin.png', 'dog/twin.png'" in lines
        assert "  sketch: 2 images, 2 classes" in lines
        assert any(line.startswith("  images in several domains: 1, e.g. 'photo/cat/twin.png'") for line in lines)
        assert lines[-1] == "3 domains, 12 images, none unusable"
        assert "downloads" not in result.out
        assert files_of(data) == before

    def test_each_path_is_checked_once(self, data):
        result = ratp("data", "check", "data/pets/photo.zip", "data/new", "data/pets", "data/pets/sketch")
        assert result.code == 0
        assert re.findall(r"^ *(\w+): \d+ images", result.out, re.MULTILINE) == ["photo", "new", "sketch"]

    def test_domains_given_by_themselves_are_compared_wherever_they_lie(self, data):
        write_files(Path("elsewhere"), {"cat/1.png": TWIN})
        result = ratp("data", "check", "data/pets/photo.zip", "elsewhere")
        assert "images in several domains: 1" in result.out

    def test_domains_of_different_sets_are_not_compared(self, data):
        write_files(Path("data/third/wild"), {"cat/1.png": TWIN})
        assert "wild/cat/1.png" not in ratp("data", "check").out

    def test_long_class_lists_wrap_between_classes(self):
        names = [f"class number {k}" for k in range(30)]
        write_files(Path("many"), {f"{name}/1.png": png(k) for k, name in enumerate(names)})
        lines = ratp("data", "check", "many").out.splitlines()
        assert max(map(len, lines)) <= 80
        listed = [line for line in lines if "class number" in line]
        assert len(listed) > 1
        assert all(line.rstrip(",").endswith(" 1") for line in listed)

    @pytest.mark.parametrize("name", ["[red]x", "画像" * 20, "a b" * 40])
    def test_names_are_printed_literally(self, name):
        write_files(Path("own"), {f"{name}/1.png": png()})
        result = ratp("data", "check", "own")
        assert result.code == 0
        assert name.replace(" ", "") in re.sub(r"\s", "", result.out)

    def test_built_set_is_labelled(self):
        assert ratp("data", "build", "syn", "--count", 10, "--seed", 3, "-q").code == 0
        result = ratp("data", "check")
        assert "    rebuilt, not the published data: syn 2, seed 3" in result.out.splitlines()

    def test_quiet_and_progress(self, data):
        assert (ratp("data", "check", "-q").out, ratp("data", "check", "-q").err) == ("", "")
        assert ratp("data", "check").err == "checking images: 12 images\n"

    def test_unreadable_folder_hides_no_domain(self, monkeypatch):
        for name in ("day", "rain", "fog"):
            write_files(Path("pics", name), make_small_domain())
        closed(monkeypatch, "fog")
        result = ratp("data", "check", "pics")
        assert result.code == 1
        lines = result.out.splitlines()
        assert {"  day: 6 images, 2 classes", "  rain: 6 images, 2 classes", "  fog: cannot be read"} <= {*lines}
        assert "    cannot read the folder pics/fog: Permission denied." in lines

    def test_unreadable_class_is_named(self, monkeypatch):
        write_files(Path("pics"), make_small_domain(("cat", "cow", "dog")))
        closed(monkeypatch, "cow")
        result = ratp("data", "check", "pics")
        assert result.code == 1
        assert "    cow: is a folder that cannot be read: Permission denied" in result.out.splitlines()

    def test_classes_with_folders_are_classes(self):
        """As they are for ``ratp run``."""
        names = ["dog/2024/1.png", "dog/2025/2.png", "guitar/3.png", "house/4.png"]
        write_files(Path("pics"), {name: png(k) for k, name in enumerate(names)})
        lines = ratp("data", "check", "pics").out.splitlines()
        assert lines[:2] == ["pics: 4 images, 3 classes", "  images per class: dog 2, guitar 1, house 1"]
        assert "folders within a class belong to it: 'dog/2024', 'dog/2025'." in " ".join(" ".join(lines).split())

    def test_possible_images_are_reported(self):
        write_files(Path("pics"), {**make_small_domain(), "cat/1.heic": b"x", "dog/2.HEIC": b"x", "cat/0.txt": b"x"})
        result = ratp("data", "check", "pics")
        assert result.code == 0
        expected = "2 files skipped, unsupported format: .heic (2)."
        assert expected in " ".join(result.out.split())
        (domain,) = json.loads(ratp("data", "check", "pics", "--json").out)["sets"][0]["domains"]
        assert domain["passed_over"] == ["cat/1.heic", "dog/2.HEIC"]


class TestDamage:
    @pytest.fixture
    def damaged(self, data):
        write_files(data, {"pets/sketch/cat/cut.png": png()[:-40], "pets/sketch/dog/empty.jpg": b""})
        (data / "pets" / "broken.zip").write_bytes(b"PK no zip")
        return data

    def test_damage_is_named_and_sets_exit_code(self, damaged):
        result = ratp("data", "check")
        assert result.code == 1
        lines = result.out.splitlines()
        assert max(map(len, lines)) <= 80
        assert "    unusable: 2" in lines
        assert "      cat/cut.png: truncated: the PNG data ends too early" in lines
        assert "      dog/empty.jpg: empty (0 bytes)" in lines
        assert "  broken.zip: cannot be read" in lines
        assert lines[-1] == "3 domains, 12 images, 3 unusable"
        assert "Traceback" not in result.err

    def test_quiet_keeps_exit_code(self, damaged):
        result = ratp("data", "check", "--quiet")
        assert (result.code, result.out, result.err) == (1, "", "")

    def test_json(self, damaged):
        result = ratp("data", "check", "--json")
        assert (result.code, result.err) == (1, "")
        found = json.loads(result.out)
        assert found["ok"] is False
        assert found["totals"] == {
            "domains": 3,
            "images": 12,
            "unusable": 3,
            "duplicates_within": 1,
            "duplicates_between": 1,
        }
        data, pets = found["sets"]
        assert (data["folder"], pets["folder"]) == ("data", "data/pets")
        photo, sketch = pets["domains"]
        assert photo["classes"] == {"cat": 4, "dog": 4}
        assert photo["duplicates"] == [["cat/twin.png", "dog/twin.png"]]
        assert [row["name"] for row in sketch["unusable"]] == ["cat/cut.png", "dog/empty.jpg"]
        assert pets["duplicates"][0]["places"] == ["photo/cat/twin.png", "photo/dog/twin.png", "sketch/dog/also.png"]
        assert pets["unreadable"][0]["path"] == "data/pets/broken.zip"
        assert data["domains"][0]["classes"] is None


def test_number_of_processes_does_not_matter(data):
    results = [ratp("data", "check", "--json", "--workers", workers).out for workers in (1, 2)]
    assert results[0] == results[1]


def test_manifests_are_written(data):
    result = ratp("data", "check", "--out", "found.json")
    assert (result.code, result.err.splitlines()[-1]) == (0, "Manifests: found.json")
    rows = json.loads(Path("found.json").read_text())["manifests"]
    assert [row["path"] for row in rows] == ["data/new", "data/pets/photo.zip", "data/pets/sketch"]
    assert manifest_from_json(rows[1]).counts == {"cat": 4, "dog": 4}


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_manifest_cannot_go_to_stdout_with_output(data, more):
    result = ratp("data", "check", "--out", "-", *more)
    assert (result.code, result.out) == (2, "")
    assert "goes to standard output. Choose another file with --out." in result.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["there is no data folder data", "--data FOLDER", "RATP_DATA", "ratp data get digits"]),
        (["--data", "nowhere"], ["there is no data folder nowhere"]),
        (["gone", "empty", "lost.zip"], ["gone does not exist", "empty holds no domains", "lost.zip does not exist"]),
        (["pets", "--workers", "0"], ["at least one process"]),
        (["pets", "--out", "no/such/file.json"], ["cannot write no/such/file.json"]),
        (["pets", "--out", "empty"], ["cannot write empty: it is a folder"]),
    ],
)
def test_invalid_arguments(words, expected):
    os.mkdir("empty")
    write_files(Path("pets"), make_small_domain())
    result = ratp("data", "check", *words)
    assert (result.code, result.out) == (2, "")
    assert all(line.startswith("error: ") for line in result.err.splitlines()), result.err
    for text in expected:
        assert text in result.err


def test_file_that_is_not_a_domain():
    Path("notes.txt").write_text("hello")
    result = ratp("data", "check", "notes.txt")
    assert result.code == 1
    assert "notes.txt is neither a folder nor a .zip" in " ".join(result.out.split())


def test_ctrl_c(data, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ratp.cli.data_check.check_domain", interrupted)
    result = ratp("data", "check")
    assert (result.code, result.out) == (130, "")
    assert result.err.strip() == "Interrupted. Nothing was written; run the same command again."


def test_real_domains():
    """The smallest of the real ones; their counts are known."""
    folder = real_data()
    result = ratp("data", "check", folder / "digits" / "usps.zip", folder / "pacs" / "photo.zip", "--json")
    assert result.code == 0
    usps, photo = json.loads(result.out)["sets"][0]["domains"]
    assert (usps["images"], usps["classes"]["0"], usps["height"]["most"]) == (9298, 1553, 16)
    assert (photo["images"], photo["classes"]["person"], photo["width"]["least"]) == (1670, 432, 227)
