"""The second start of a run reads no image again and mistakes no changed image for an old one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers import files_of
from own_images import assert_ok, encode, image_files, make_picture, run_folders, write_files, write_zip
from ratp.data.read.tree import ImageTree


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(Path("day"), image_files())
    write_zip(Path("night.zip"), image_files(seed=1))
    write_files(Path("wild"), image_files(seed=2, flat=True))
    assert_ok(run_folders("day", "night.zip", "wild"))


@pytest.fixture
def reads(monkeypatch):
    """Names of the images that are read."""
    names = []
    original = ImageTree.read
    monkeypatch.setattr(ImageTree, "read", lambda tree, file: names.append(file.name) or original(tree, file))
    return names


def same_look(path, data):
    """Writes other bytes, of the same number and with the same time."""
    about = path.stat()
    assert len(data) == about.st_size
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


class TestUnchanged:
    def test_no_image_is_read(self, reads):
        """Regardless of content: names, sizes and times are unchanged."""
        for path in [*Path("day").rglob("*.png"), *Path("wild").rglob("*.png")]:
            same_look(path, bytes(path.stat().st_size))
        result = assert_ok(run_folders("day", "night.zip", "wild", out="again"))
        assert reads == []
        assert "decoding" not in result.err
        before, after = files_of(Path("run")), files_of(Path("again"))
        assert before["weights.safetensors"] == after["weights.safetensors"]
        assert before["config.json"] == after["config.json"]

    def test_another_size_is_decoded_again(self, reads):
        assert_ok(run_folders("day", "night.zip", "wild", out="again", more=("--set", "size=16")))
        assert len(reads) == 36

    def test_skipped_image_is_not_retried(self, reads):
        write_files(Path("day"), {"north/bad.png": b"x"})
        for out in ("skipping", "again"):
            reads.clear()
            result = assert_ok(run_folders("day", "wild", out=out, more=("--on-bad-image", "skip")))
            assert "north/bad.png" in result.err
        assert reads == []

    def test_skipped_image_still_stops_without_skip(self):
        write_files(Path("day"), {"north/bad.png": b"x"})
        assert_ok(run_folders("day", "wild", out="skipping", more=("--on-bad-image", "skip")))
        result = run_folders("day", "wild", out="stopping")
        assert result.code == 2
        assert "north/bad.png" in result.err
        assert not Path("stopping").exists()


class TestChanged:
    def error_of(self, *targets, source="day"):
        before = files_of(Path("run"))
        result = run_folders(source, *(targets or ("night.zip", "wild")))
        assert (result.code, result.out) == (2, "")
        assert files_of(Path("run")) == before
        return result.err

    @pytest.mark.faults(20, "ratp refuses changed images and names their domain")
    def test_changed_image_of_the_source(self):
        write_files(Path("day"), {"north/0.png": encode(make_picture(0, 777))})
        assert "Its images have changed since: those of day. Choose another folder" in self.error_of()

    def test_changed_image_in_a_zip(self):
        write_zip(Path("night.zip"), {**image_files(seed=1), "west/2.png": encode(make_picture(3, 777))})
        assert "those of night." in self.error_of()

    def test_changed_image_without_a_label(self):
        write_files(Path("wild"), {"north-0.png": encode(make_picture(0, 777))})
        assert "those of wild." in self.error_of()

    def test_added_images_in_two_domains(self):
        write_files(Path("day"), {"north/9.png": encode(make_picture(0, 777))})
        write_files(Path("wild"), {"9.png": encode(make_picture(0, 778))})
        assert "those of day, wild." in self.error_of()

    def test_image_moved_to_another_class(self):
        Path("day/north/0.png").rename("day/south/9.png")
        assert "those of day." in self.error_of()

    def test_labels_for_a_domain_that_had_none(self):
        write_files(Path("labelled/wild"), image_files(seed=2))
        assert "those of wild." in self.error_of("night.zip", "labelled/wild")

    def test_touched_file_is_unchanged(self):
        for path in Path("day").rglob("*.png"):
            os.utime(path)
        assert "complete already" in assert_ok(run_folders("day", "night.zip", "wild")).err

    @pytest.mark.faults(20, "a run continues if its images were moved to another folder")
    def test_moved_folder_is_unchanged(self):
        Path("elsewhere").mkdir()
        Path("day").rename("elsewhere/day")
        assert "complete already" in assert_ok(run_folders("elsewhere/day", "night.zip", "wild")).err
