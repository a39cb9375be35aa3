"""A check finds everything that is wrong with a domain, and says the same on any number of processes."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from made_images import encode, make_picture, make_small_domain, png, real_data, write_files, write_zip
from PIL import Image

from ratp._core.files import write_json
from ratp.data.cache.manifest import (
    check_domain,
    describe,
    duplicates_between,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
)
from ratp.data.decode import parallel
from ratp.data.decode.decode import decode
from ratp.data.decode.parallel import decode_all
from ratp.data.decode.worker import decode_one
from ratp.data.read.tree import open_tree
from ratp.errors import RatpError

TROUBLED = {
    **make_small_domain(count=4),
    "cat/empty.jpg": b"",
    "cat/page.jpg": b"<!DOCTYPE html><html></html>",
    "dog/cut.png": png()[:-40],
    "dog/deep.png": encode(Image.fromarray(np.full((30, 40), 40000, dtype=np.uint16)), "PNG"),
    "dog/print.jpg": encode(Image.new("CMYK", (16, 24)), "JPEG"),
    "dog/twin.png": make_small_domain()["cat/0.png"],
    "dog/same.png": make_small_domain()["dog/1.png"],
    "notes.txt": b"",
}


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    return open_tree(write_files(tmp_path_factory.mktemp("data") / "troubled", TROUBLED))


@pytest.fixture(scope="module")
def manifest(troubled):
    return check_domain(troubled, workers=1)


class TestCheck:
    def test_every_file_is_listed_in_order(self, manifest):
        assert [file.name for file in manifest.files] == sorted(name for name in TROUBLED if name != "notes.txt")
        assert (manifest.name, manifest.classes) == ("troubled", ("cat", "dog"))

    def test_bad_files_have_reasons(self, manifest):
        assert manifest.bad == (
            ("cat/empty.jpg", "empty (0 bytes)"),
            ("cat/page.jpg", "a web page, not an image"),
            ("dog/cut.png", "truncated: the PNG data ends too early"),
        )
        assert len(manifest.usable) == 12

    def test_only_usable_images_are_counted(self, manifest):
        assert manifest.counts == {"cat": 4, "dog": 8}
        assert manifest.heights == (8, 9, 30)
        assert manifest.widths == (10, 10, 40)
        assert manifest.conversions == {"16-bit": 1, "cmyk": 1, "greyscale": 1}

    def test_duplicates(self, manifest):
        groups = [[file.name for file in group] for group in manifest.duplicates]
        assert groups == [["cat/0.png", "dog/twin.png"], ["dog/1.png", "dog/same.png"]]

    def test_class_without_usable_images_counts_zero(self, tmp_path):
        tree = open_tree(write_files(tmp_path, {"cat/1.png": png(), "dog/1.png": b""}))
        assert check_domain(tree).counts == {"cat": 1, "dog": 0}

    def test_unfollowable_link_is_bad(self, tmp_path):
        write_files(tmp_path, {"cat/1.png": png()})
        (tmp_path / "dog").symlink_to("nowhere")
        assert check_domain(open_tree(tmp_path)).bad == (("dog", "is a link to nothing"),)

    def test_unreadable_file_is_bad(self, tmp_path):
        tree = open_tree(write_files(tmp_path, make_small_domain()))
        (tmp_path / "cat/1.png").unlink()
        manifest = check_domain(tree)
        assert manifest.bad == (("cat/1.png", "cannot be read: No such file or directory"),)
        assert manifest.files[1].sha256 is None

    def test_a_flat_domain(self, tmp_path):
        manifest = check_domain(open_tree(write_files(tmp_path / "new", {"1.png": png(), "2.png": png(1)})))
        assert (manifest.classes, manifest.counts) == (None, {})
        assert describe(manifest)[0] == "new: 2 images, no classes"

    def test_sizes_without_images(self, tmp_path):
        manifest = check_domain(open_tree(write_files(tmp_path, {"cat/1.png": b""})))
        assert manifest.heights == (0, 0, 0)
        assert describe(manifest)[0].endswith(": 0 images, 1 class")


class TestHash:
    def hash(self, path, files):
        return check_domain(open_tree(write_zip(path, files))).hash

    def test_hash_identifies_the_data(self, tmp_path):
        files = make_small_domain()
        one = self.hash(tmp_path / "one.zip", files)
        assert self.hash(tmp_path / "two.zip", dict(reversed(files.items()))) == one
        assert check_domain(open_tree(write_files(tmp_path / "three", files))).hash == one
        others = [
            {**files, "cat/0.png": png(99)},
            {**files, "cat/9.png": png(99)},
            {name.replace("dog", "cow"): data for name, data in files.items()},
            {name: data for name, data in files.items() if name != "cat/0.png"},
            {**files, "cat/0.png": files["cat/1.png"], "cat/1.png": files["cat/0.png"]},
        ]
        assert len({one, *(self.hash(tmp_path / f"{k}.zip", other) for k, other in enumerate(others))}) == 6


class TestDuplicatesBetween:
    def test_duplicates_are_only_those_across_domains(self, tmp_path):
        a = check_domain(
            open_tree(write_files(tmp_path / "a", {"x/1.png": png(1), "x/2.png": png(2), "x/22.png": png(2)}))
        )
        b = check_domain(
            open_tree(write_files(tmp_path / "b", {"y/one.png": png(1), "y/3.png": png(3), "y/bad.png": b""}))
        )
        c = check_domain(open_tree(write_files(tmp_path / "c", {"1.png": png(1), "4.png": png(4), "bad.png": b""})))
        found = duplicates_between([a, b, c])
        assert [each.places for each in found] == [(("a", "x/1.png"), ("b", "y/one.png"), ("c", "1.png"))]
        assert found[0].sha256 == a.files[0].sha256
        assert duplicates_between([a]) == () == duplicates_between([])

    def test_domains_with_equal_names_are_distinct(self, tmp_path):
        trees = [open_tree(write_files(tmp_path / place / "d", {"x/1.png": png()})) for place in "ab"]
        assert len(duplicates_between([check_domain(tree) for tree in trees])) == 1


class TestDescription:
    def test_description_lists_everything(self, manifest):
        lines = describe(manifest)
        assert lines[:2] == ["troubled: 12 images, 2 classes", "images per class: cat 4, dog 8"]
        text = "\n".join(lines)
        for part in (
            "height 8 to 30, median 9, width 10 to 40, median 10",
            "converted: 16-bit 1, cmyk 1, greyscale 1",
            "ignored, no image ending: 1 ('notes.txt')",
            "exact duplicates: 2, e.g. 'cat/0.png', 'dog/twin.png'",
            "duplicates across classes: 1",
            "unusable: 3",
            "  cat/empty.jpg: empty (0 bytes)",
            f"hash: {manifest.hash}",
        ):
            assert part in text

    def test_clean_domain_has_short_description(self, tmp_path):
        files = {f"cat/{k}.png": png(k) for k in range(3)}
        assert len(describe(check_domain(open_tree(write_files(tmp_path / "d", files))))) == 4

    def test_at_most_twenty_bad_files_are_named(self, tmp_path):
        tree = open_tree(write_files(tmp_path, {f"cat/{k:02}.png": b"" for k in range(33)}))
        lines = describe(check_domain(tree))
        assert sum("empty" in line for line in lines) == 20
        assert "  and 13 more" in lines


class TestFile:
    def test_round_trip(self, tmp_path, manifest):
        write_json(tmp_path / "m.json", manifest_to_json(manifest))
        assert read_manifest(tmp_path / "m.json") == manifest
        assert read_manifest(tmp_path / "m.json").hash == manifest.hash

    def test_round_trip_of_flat_domain_and_odd_names(self, tmp_path):
        write_files(tmp_path / "d", {"画像 <b>.png": png()})
        with open(os.fsencode(tmp_path) + b"/d/\xff.png", "wb") as file:
            file.write(png(1))
        manifest = check_domain(open_tree(tmp_path / "d"))
        write_json(tmp_path / "m.json", manifest_to_json(manifest))
        assert read_manifest(tmp_path / "m.json") == manifest

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data.clear(),
            lambda data: data.update(format=2),
            lambda data: data["files"].pop("width"),
            lambda data: data["files"]["width"].pop(),
            lambda data: data["files"].update({"class": [9] * 15}),
            lambda data: data.update(errors={"x": "?"}),
            lambda data: data.update(errors={"99": "?"}),
            lambda data: data.update(unreadable=[1]),
            lambda data: data.update(files=None),
        ],
    )
    def test_invalid_manifest_is_refused(self, tmp_path, manifest, damage):
        data = json.loads(json.dumps(manifest_to_json(manifest)))
        assert manifest_from_json(data) == manifest
        damage(data)
        (tmp_path / "m.json").write_text(json.dumps(data))
        with pytest.raises(RatpError, match=r"m\.json"):
            read_manifest(tmp_path / "m.json")


class TestProcesses:
    def test_process_count_does_not_matter(self, troubled, manifest, tmp_path, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        for workers in (2, 3):
            assert check_domain(troubled, (8, 8), workers) == manifest
        monkeypatch.setattr(parallel, "_BATCH_FILES", 5)
        written = []
        for workers in (1, 2):
            with (tmp_path / "pixels").open("wb+") as file:
                decode_all(troubled, (8, 9), workers=workers, target=file.fileno())
                written.append(file.read())
        assert written[0] == written[1]
        rows = np.frombuffer(written[0], dtype=np.uint8).reshape(-1, 3, 8, 9)
        assert len(rows) == len(troubled.files)
        for row, file in zip(rows, manifest.files, strict=True):
            expected = 0 if file.error else decode(TROUBLED[file.name], (8, 9)).image.transpose(2, 0, 1)
            assert (row == expected).all()

    def test_progress_is_reported_to_the_caller(self, troubled, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 4)
        for workers in (1, 2):
            reported = []

            def note(*progress, to=reported):
                to.append((*progress, threading.current_thread()))

            check_domain(troubled, None, workers, note)
            assert reported == [(done, 15, threading.main_thread()) for done in (4, 8, 12, 15)]

    def test_batches_are_bounded_by_files_and_bytes(self, tmp_path, monkeypatch):
        tree = open_tree(
            write_files(tmp_path, {f"{k}.png": bytes(size) for k, size in enumerate([10, 10, 10, 90, 200, 10, 10])})
        )
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        monkeypatch.setattr(parallel, "_BATCH_BYTES", 100)
        batches = list(parallel._batches(tree.files))
        assert [(first, len(files)) for first, files in batches] == [(0, 2), (2, 2), (4, 1), (5, 2)]

    def test_few_images_are_decoded_in_process(self, troubled, monkeypatch):
        def never(*_):
            raise AssertionError("a process was started")

        monkeypatch.setattr(parallel, "_Worker", never)
        check_domain(troubled)

    def test_zero_processes_are_refused(self, troubled):
        with pytest.raises(RatpError, match="at least one process, got workers=0"):
            check_domain(troubled, None, 0)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_full_disk_is_an_os_error(self, troubled, workers, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        with open("/dev/full", "wb") as full, pytest.raises(OSError, match="No space left") as caught:
            decode_all(troubled, (8, 8), workers=workers, target=full.fileno())
        assert caught.value.errno == errno.ENOSPC

    def test_process_survives_failed_write(self, troubled):
        """Whichever batch hits the full disk first, all of them fail."""
        files = [troubled.read(file) for file in troubled.files if file.name.startswith("cat/")][:1] * 3
        with open("/dev/full", "wb") as full, parallel._Worker((8, 8), full.fileno()) as worker:
            for _ in range(3):
                with pytest.raises(OSError, match="No space left"):
                    worker.decode([0, 1, 2], files)

    @pytest.mark.faults(26, "an image for which a worker process has too little memory is decoded again, alone")
    def test_too_little_memory_in_a_process(self, tmp_path, monkeypatch):
        images = {**make_small_domain(("a",), 4), "a/1.png": encode(Image.new("L", (5000, 5000), 90), "PNG")}
        tree = open_tree(write_files(tmp_path / "large", images))
        monkeypatch.setattr(parallel, "_BATCH_FILES", 1)
        start, tried = parallel._Worker.__init__, []

        def small(self, *arguments):
            start(self, *arguments)
            resource.prlimit(self._process.pid, resource.RLIMIT_AS, (120 * 2**20, 120 * 2**20))

        def noted(*arguments):
            tried.append(arguments)
            return decode_one(*arguments)

        monkeypatch.setattr(parallel._Worker, "__init__", small)
        monkeypatch.setattr(parallel, "decode_one", noted)
        reported = []
        found = decode_all(tree, (8, 8), workers=2, progress=lambda *numbers: reported.append(numbers))
        assert [outcome.error for outcome in found] == [None] * 4
        assert found[1].height == 5000
        assert reported == [(k, 4) for k in range(1, 5)]
        assert len(tried) == 3  # from the image on that failed

    def test_dead_process_error_names_the_files(self, troubled, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        start = parallel._Worker.__init__

        def doomed(self, *arguments):
            start(self, *arguments)
            self._process.kill()

        monkeypatch.setattr(parallel._Worker, "__init__", doomed)
        with pytest.raises(RatpError, match=r"ended unexpectedly \(signal 9\).*'cat/0.png' on"):
            check_domain(troubled, None, 2)

    def test_caller_error_ends_the_processes(self, troubled, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        started = []
        start = parallel._Worker.__init__

        def noted(self, *arguments):
            start(self, *arguments)
            started.append(self._process)

        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(parallel._Worker, "__init__", noted)
        with pytest.raises(KeyboardInterrupt):
            check_domain(troubled, None, 2, stop)
        assert [process.poll() is not None for process in started] == [True, True]

    def test_unstartable_process_is_an_error(self, troubled, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(RatpError, match="cannot start a process to decode in: No such file"):
            check_domain(troubled, None, 2)

    def test_they_load_neither_torch_nor_numpy(self):
        """Otherwise starting them takes longer than most domains."""
        code = (
            "import sys\n"
            "from ratp.data.decode.worker import decode_one\n"
            f"assert decode_one({encode(make_picture(), 'WEBP')!r}, (8, 8), None, 0).error is None\n"
            "assert not {'torch', 'numpy'} & sys.modules.keys(), 'too much'\n"
        )
        subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_a_real_domain(tmp_path):
    tree = open_tree(real_data() / "pacs" / "photo.zip")
    some = replace(tree, files=tree.files[::25])
    manifest = check_domain(some, (32, 32), 2)
    assert manifest == check_domain(some, None, 1)
    assert not manifest.bad and manifest.heights == manifest.widths == (227, 227, 227)
    write_json(tmp_path / "m.json", manifest_to_json(manifest))
    assert read_manifest(tmp_path / "m.json") == manifest
