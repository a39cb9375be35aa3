"""A decoded domain is the same from the files and from the cache, and nothing spoils the cache for good."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_images import closed, make_small_domain, pixels, png, real_data, write_files, write_zip
from PIL import Image, ImageFile

from ratp._core import locks as file_lock
from ratp.data.cache import decoded
from ratp.data.cache import store as decoded_cache
from ratp.data.cache.decoded import open_decoded
from ratp.data.cache.store import cache_entries, check_cache, evict
from ratp.data.decode import parallel, worker
from ratp.data.decode import pixel_file as image_file
from ratp.data.decode.decode import decode
from ratp.data.domain import LabelledDomain
from ratp.data.read.tree import ImageTree
from ratp.errors import RatpError

FILES = make_small_domain(("cat", "dog", "画像"), 4)
BAD = {"cat/0.png": b"", "cat/zz.jpg": b"<html>", "dog/1.png": png()[:-40]}


@pytest.fixture
def source(tmp_path):
    return write_files(tmp_path / "photo", FILES)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def expected(files, size=(8, 9)):
    rows = [decode(files[name], size).image.transpose(2, 0, 1) for name in sorted(files)]
    return torch.from_numpy(np.stack(rows))


def never(*_, **__):
    raise AssertionError("an image was read although it is cached")


@pytest.fixture
def no_reading(monkeypatch):
    """From now on, opening an image fails."""

    def forbid():
        monkeypatch.setattr(ImageTree, "read", never)
        monkeypatch.setattr(zipfile.ZipFile, "open", never)
        monkeypatch.setattr(decoded, "decode_all", never)

    return forbid


def is_same(one, other):
    return (
        torch.equal(one.images, other.images)
        and one.manifest == other.manifest
        and (one.class_names, one.skipped) == (other.class_names, other.skipped)
        and (one.class_index is None) == (other.class_index is None)
        and (one.class_index is None or torch.equal(one.class_index, other.class_index))
    )


class TestOpening:
    def test_images_and_classes(self, source, cache):
        domain = open_decoded(source, (8, 9), cache=cache)
        assert torch.equal(domain.images, expected(FILES))
        assert domain.images.dtype == torch.uint8 and domain.images.shape == (12, 3, 8, 9) and len(domain) == 12
        assert (domain.name, domain.class_names) == ("photo", ("cat", "dog", "画像"))
        assert domain.class_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert domain.class_index.dtype == torch.int64
        assert (domain.skipped, domain.notes) == ((), ())
        LabelledDomain(domain.name, domain.images, domain.class_index, domain.class_names)

    def test_second_open_reads_no_image(self, source, cache, no_reading):
        first = open_decoded(source, 8, cache=cache)
        no_reading()
        assert is_same(open_decoded(source, 8, cache=cache), first)

    def test_second_open_of_moved_archive_reads_no_image(self, tmp_path, cache, no_reading):
        path = write_zip(tmp_path / "photo.zip", FILES)
        first = open_decoded(path, 8, cache=cache)
        no_reading()
        (tmp_path / "moved").mkdir()
        moved = path.rename(tmp_path / "moved" / "picture.zip")
        second = open_decoded(moved, 8, cache=cache)
        assert (second.name, second.manifest.name) == ("picture", "picture")
        assert torch.equal(first.images, second.images) and first.manifest.hash == second.manifest.hash

    def test_a_flat_domain(self, tmp_path, cache, no_reading):
        write_files(tmp_path / "new", {"1.png": png(1), "2.png": png(2)})
        first = open_decoded(tmp_path / "new", 8, cache=cache)
        assert (first.class_names, first.class_index, len(first)) == (None, None, 2)
        no_reading()
        assert is_same(open_decoded(tmp_path / "new", 8, cache=cache), first)

    def test_each_size_has_its_own_entry(self, source, cache):
        shapes = {open_decoded(source, size, cache=cache).images.shape[2:] for size in (8, (8, 9), (9, 8), 8)}
        assert shapes == {(8, 8), (8, 9), (9, 8)}
        assert len(cache_entries(cache)) == 3

    def test_default_cache_is_the_users(self, source, cache, monkeypatch):
        monkeypatch.setenv("RATP_CACHE", str(cache))
        open_decoded(source, 8)
        assert len(cache_entries(cache)) == 1

    def test_progress_is_reported_only_when_working(self, source, cache):
        reported = []
        for _ in range(2):
            open_decoded(source, 8, cache=cache, progress=lambda *numbers: reported.append(numbers))
        assert reported == [(12, 12)]

    def test_process_count_does_not_matter(self, source, tmp_path, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 2)
        domains = [open_decoded(source, 8, cache=tmp_path / str(n), workers=n) for n in (1, 2)]
        assert is_same(*domains)

    def test_writes_to_images_do_not_reach_cache(self, source, cache):
        first = open_decoded(source, (8, 9), cache=cache)
        first.images.fill_(7)
        second = open_decoded(source, (8, 9), cache=cache)
        second.images[0] = 9
        assert torch.equal(open_decoded(source, (8, 9), cache=cache).images, expected(FILES))

    def test_invalid_arguments(self, source, cache):
        for size in (0, (3, -1)):
            with pytest.raises(RatpError, match="the size must be 1 or more"):
                open_decoded(source, size, cache=cache)
        with pytest.raises(RatpError, match="Did you mean 'skip'"):
            open_decoded(source, 8, cache=cache, on_bad="skipp")
        assert not cache.exists()

    def test_memory_stays_flat(self, tmp_path, cache):
        """Images of 60 MB are opened, and one of them is looked at."""
        image = Image.fromarray(pixels(4, 4)).resize((8, 8))
        image.save(tmp_path / "one.png")
        data = (tmp_path / "one.png").read_bytes()
        path = write_zip(tmp_path / "many.zip", {f"a/{k}.png": data for k in range(80)})
        open_decoded(path, 512, cache=cache)

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before = resident()
        domain = open_decoded(path, 512, cache=cache)
        assert domain.images.nbytes > 60e6
        domain.images[40].float().mean()
        assert resident() - before < 15e6


class TestBadImages:
    def test_bad_images_stop_by_default_and_cache_nothing(self, source, cache):
        write_files(source, BAD)
        for _ in range(2):
            with pytest.raises(RatpError) as caught:
                open_decoded(source, 8, cache=cache)
            assert str(caught.value).splitlines() == [
                f"{source} has 3 bad among 13 images:",
                "  cat/0.png: empty (0 bytes)",
                "  cat/zz.jpg: a web page, not an image",
                "  dog/1.png: truncated: the PNG data ends too early",
                "Repair or remove them, or skip them with --on-bad-image skip.",
            ]
        assert os.listdir(cache / "decoded") == []

    def test_at_most_twenty_are_named(self, tmp_path, cache):
        write_files(tmp_path / "d", {f"a/{k:03}.png": b"" for k in range(50)})
        with pytest.raises(RatpError, match="50 bad among 50") as caught:
            open_decoded(tmp_path / "d", 8, cache=cache)
        assert len(str(caught.value).splitlines()) == 23
        assert "and 30 more" in str(caught.value)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_skipped_images_are_named(self, source, cache, no_reading, workers, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 3)
        write_files(source, BAD)
        first = open_decoded(source, (8, 9), cache=cache, on_bad="skip", workers=workers)
        good = {name: data for name, data in FILES.items() if name not in BAD}
        assert torch.equal(first.images, expected(good))
        assert first.class_index.tolist() == [0] * 3 + [1] * 3 + [2] * 4
        assert [name for name, _ in first.skipped] == sorted(BAD)
        assert len(first.notes) == 1 and "skipped 3" in first.notes[0] and "cat/zz.jpg: a web page" in first.notes[0]
        assert len(first.manifest.files) == 13
        no_reading()
        assert is_same(open_decoded(source, (8, 9), cache=cache, on_bad="skip"), first)
        with pytest.raises(RatpError, match="3 bad among 13"):
            open_decoded(source, (8, 9), cache=cache)

    def test_last_files_can_be_bad(self, tmp_path, cache):
        write_files(tmp_path / "d", {"a/1.png": png(1), "a/2.png": b"", "b/3.png": b""})
        domain = open_decoded(tmp_path / "d", (8, 9), cache=cache, on_bad="skip")
        assert torch.equal(domain.images, expected({"a/1.png": png(1)}))
        assert domain.class_names == ("a", "b")
        assert cache_entries(cache)[0].images == 1

    def test_only_bad_files(self, tmp_path, cache):
        write_files(tmp_path / "d", {"a/1.png": b"", "a/2.png": b""})
        expected = r"d has 2 images, none of them usable:\n  a/1\.png: empty \(0 bytes\)"
        with pytest.raises(RatpError, match=expected):
            open_decoded(tmp_path / "d", 8, cache=cache, on_bad="skip")

    def test_unreachable_folder_stops(self, source, cache):
        (source / "elephant").symlink_to("nowhere")
        with pytest.raises(RatpError, match="elephant: is a link to nothing"):
            open_decoded(source, 8, cache=cache)
        assert open_decoded(source, 8, cache=cache, on_bad="skip").skipped == (("elephant", "is a link to nothing"),)

    @pytest.mark.parametrize("on_bad", ["stop", "skip"])
    def test_unreadable_folder_is_never_skipped(self, source, cache, monkeypatch, on_bad):
        """It is a whole class."""
        closed(monkeypatch, "dog")
        with pytest.raises(RatpError, match="dog is a folder that cannot be read: Permission denied") as caught:
            open_decoded(source, 8, cache=cache, on_bad=on_bad)
        assert "A whole class may be missing: make these folders readable" in str(caught.value)
        assert "skip" not in str(caught.value)

    def test_unreadable_file_is_retried_next_time(self, source, cache, monkeypatch):
        read = Path.open

        def refusing(path, *arguments, **options):
            if path.name == "3.png":
                raise PermissionError(13, "Permission denied")
            return read(path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refusing)
            domain = open_decoded(source, (8, 9), cache=cache, on_bad="skip")
        assert len(domain) == 9 and domain.skipped[0] == ("cat/3.png", "cannot be read: Permission denied")
        assert domain.images.float().mean() > 0
        assert cache_entries(cache) == []
        assert torch.equal(open_decoded(source, (8, 9), cache=cache).images, expected(FILES))


class TestMemory:
    @pytest.mark.faults(26, "the run stops and names the image, which is never cached as damaged")
    @pytest.mark.parametrize("error", [MemoryError(), OSError("out of memory when reading image file")])
    def test_too_little_memory_is_no_damage(self, source, cache, monkeypatch, error):
        load = ImageFile.ImageFile.load

        def scarce(image):
            raise error

        monkeypatch.setattr(ImageFile.ImageFile, "load", scarce)
        with pytest.raises(RatpError, match=r"memory ran out while cat/0.png of .* was decoded. Close other programs"):
            open_decoded(source, (8, 9), cache=cache, on_bad="skip")
        assert cache_entries(cache) == []
        monkeypatch.setattr(ImageFile.ImageFile, "load", load)
        assert torch.equal(open_decoded(source, (8, 9), cache=cache, on_bad="skip").images, expected(FILES))

    def test_damage_is_no_lack_of_memory(self, source, cache):
        write_files(source, BAD)
        assert len(open_decoded(source, (8, 9), cache=cache, on_bad="skip").skipped) == len(BAD)


class TestChanges:
    def test_a_changed_source_is_decoded_again(self, source, cache):
        open_decoded(source, (8, 9), cache=cache)
        write_files(source, {"cat/1.png": png(50)})
        assert torch.equal(open_decoded(source, (8, 9), cache=cache).images, expected({**FILES, "cat/1.png": png(50)}))
        (source / "dog").rename(source / "cow")
        assert open_decoded(source, (8, 9), cache=cache).class_names == ("cat", "cow", "画像")

    def test_ignored_files_are_listed_every_time(self, source, cache, no_reading):
        open_decoded(source, 8, cache=cache)
        no_reading()
        write_files(source, {"notes.txt": b""})
        assert open_decoded(source, 8, cache=cache).manifest.ignored == ("notes.txt",)

    def test_skipped_files_are_reported_every_time(self, source, cache, no_reading):
        write_files(source, {"cat/new.heic": b"", "dog/also.heic": b""})
        expected = f"{source.name}: 2 files skipped, unsupported format: .heic (2)"
        (note,) = open_decoded(source, 8, cache=cache).notes
        assert note.startswith(expected)
        no_reading()
        assert open_decoded(source, 8, cache=cache).notes == (note,)

    def test_similar_folders_are_not_confused(self, tmp_path, cache):
        """Names, sizes and times agree; only the pixels differ."""
        looks = []
        for k, name in enumerate(("one", "two")):
            folder = tmp_path / name / "d"
            (folder / "a").mkdir(parents=True)
            Image.fromarray(pixels(seed=k)).save(folder / "a/1.bmp")
            os.utime(folder / "a/1.bmp", ns=(0, 0))
            looks.append(open_decoded(folder, 8, cache=cache).images)
        assert not torch.equal(*looks)

    def test_new_decoder_version_makes_new_entry(self, source, cache, monkeypatch):
        open_decoded(source, 8, cache=cache)
        monkeypatch.setattr(decoded, "package_version", lambda _: "99.0")
        open_decoded(source, 8, cache=cache)
        assert len(cache_entries(cache)) == 2

    def test_source_changed_while_reading_is_refused(self, source, cache):
        def download(*_):
            write_files(source, {"cat/new.png": png(9)})

        with pytest.raises(RatpError, match="changed while it was being read"):
            open_decoded(source, 8, cache=cache, progress=download)
        assert cache_entries(cache) == []


def only(folder, ending):
    (path,) = folder.glob(f"*{ending}")
    return path


def cut(folder, ending):
    path = only(folder, ending)
    os.truncate(path, path.stat().st_size - 1)


def replaced(folder, ending, old, new):
    path = only(folder, ending)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


IMAGES, MANIFEST, INDEX = ".images", "manifest.json", "[0-9a-f].json"


def flipped(folder, ending, every=1):
    """Flips one bit of every so-many-th byte."""
    path = only(folder, ending)
    path.write_bytes(bytes(byte ^ (k % every == 0) for k, byte in enumerate(path.read_bytes())))


def of_earlier_version(folder):
    """An entry without a hash of the pixels."""
    path = only(folder, INDEX)
    index = json.loads(path.read_text())
    del index["pixels_sha256"]
    path.write_text(json.dumps(index))


DAMAGES = {
    "flipped bits": lambda folder: flipped(folder, IMAGES, every=7),
    "one flipped bit": lambda folder: flipped(folder, IMAGES, every=10**9),
    "no hash of the pixels": of_earlier_version,
    "other hash of the pixels": lambda folder: replaced(folder, INDEX, '"pixels_sha256": "', '"pixels_sha256": "0'),
    "no pixels": lambda folder: only(folder, IMAGES).unlink(),
    "fewer pixels": lambda folder: cut(folder, IMAGES),
    "more pixels": lambda folder: os.truncate(only(folder, IMAGES), 10**6),
    "empty pixels": lambda folder: os.truncate(only(folder, IMAGES), 0),
    "no manifest": lambda folder: only(folder, MANIFEST).unlink(),
    "half a manifest": lambda folder: cut(folder, MANIFEST),
    "another manifest": lambda folder: replaced(folder, MANIFEST, "cat/1.png", "cat/7.png"),
    "manifest without files": lambda folder: only(folder, MANIFEST).write_text("{}"),
    "no index": lambda folder: only(folder, INDEX).unlink(),
    "half an index": lambda folder: os.truncate(only(folder, INDEX), 50),
    "empty index": lambda folder: os.truncate(only(folder, INDEX), 0),
    "index is no JSON": lambda folder: only(folder, INDEX).write_bytes(b"\xff\xfe"),
    "index is a list": lambda folder: only(folder, INDEX).write_text("[]"),
    "other format": lambda folder: replaced(folder, INDEX, '"format": 1', '"format": 2'),
    "other height": lambda folder: replaced(folder, INDEX, '"height": 8', '"height": 9'),
    "other key": lambda folder: replaced(folder, INDEX, '"key": "', '"key": "0'),
}


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGES)
    def test_damaged_entry_is_rebuilt(self, source, cache, kind, no_reading):
        first = open_decoded(source, (8, 9), cache=cache)
        first = replace(first, images=first.images.clone())
        DAMAGES[kind](cache / "decoded")
        assert is_same(open_decoded(source, (8, 9), cache=cache), first)
        no_reading()
        assert is_same(open_decoded(source, (8, 9), cache=cache), first)
        assert len(os.listdir(cache / "decoded")) == 3

    @pytest.mark.faults(25, "ratp decodes damaged images in the cache again and names the damaged file")
    def test_changed_pixels_are_never_used(self, source, cache):
        first = open_decoded(source, (8, 9), cache=cache).images.clone()
        damaged = only(cache / "decoded", IMAGES)
        flipped(cache / "decoded", IMAGES, every=7)
        problem = "has changed since it was written"
        assert check_cache(cache) == [(damaged, problem)]
        again = open_decoded(source, (8, 9), cache=cache)
        assert torch.equal(again.images, first)
        (note,) = again.notes
        assert note == f"photo: its images were decoded again, as the cached file {damaged.name} {problem}."
        assert open_decoded(source, (8, 9), cache=cache).notes == ()
        assert check_cache(cache) == []

    @pytest.mark.parametrize("kind", DAMAGES)
    def test_check_names_the_damaged_file(self, source, cache, kind):
        open_decoded(source, (8, 9), cache=cache)
        open_decoded(source, (9, 8), cache=cache / "other")
        (entry,) = cache_entries(cache)
        assert check_cache(cache) == []
        DAMAGES[kind](cache / "decoded")
        ((path, problem),) = check_cache(cache)
        assert path.parent == cache / "decoded" and path.name.startswith(entry.key)
        assert problem
        assert check_cache(cache / "other") == []

    def test_hash_is_of_every_byte(self, tmp_path, monkeypatch):
        monkeypatch.setattr(image_file, "_BLOCK_BYTES", 4)
        hashes = set()
        for place in range(11):
            (tmp_path / "pixels").write_bytes(bytes(k == place for k in range(10)))
            with (tmp_path / "pixels").open("rb") as file:
                hashes.add(image_file.hash_of_pixels(file.fileno(), 10))
        assert len(hashes) == 11

    def test_an_open_domain_outlives_its_entry(self, source, cache):
        domain = open_decoded(source, (8, 9), cache=cache)
        shutil.rmtree(cache)
        assert torch.equal(domain.images, expected(FILES))

    def test_leftovers_of_killed_writer_are_removed(self, source, cache):
        open_decoded(source, (8, 9), cache=cache)
        (entry,) = cache_entries(cache)
        folder = cache / "decoded"
        (folder / f"{entry.key}.json").unlink()
        write_files(
            folder, {f"{entry.key}.part-abc": bytes(99), f".{entry.key}.json.abc": b"{", f"{entry.key}.lock": b""}
        )
        open_decoded(source, (8, 9), cache=cache)
        assert sorted(os.listdir(folder)) == sorted(f"{entry.key}.{end}" for end in ("images", "json", "manifest.json"))


class TestWithoutACache:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_folder_that_cannot_be_created(self, source, tmp_path, workers, monkeypatch):
        monkeypatch.setattr(parallel, "_BATCH_FILES", 3)
        (tmp_path / "file").write_text("in the way")
        domain = open_decoded(source, (8, 9), cache=tmp_path / "file", workers=workers)
        assert torch.equal(domain.images, expected(FILES))
        assert "cannot be used" in domain.notes[0] and "kept in memory" in domain.notes[0]
        assert len(domain.notes) == 1

    def test_unwritable_folder(self, source, cache, monkeypatch):
        def refused(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(decoded_cache.os, "open", refused)
        domain = open_decoded(source, (8, 9), cache=cache)
        assert torch.equal(domain.images, expected(FILES))
        assert "(Permission denied)" in domain.notes[0]

    def test_read_only_cache(self, source, cache, monkeypatch, no_reading):
        first = open_decoded(source, 8, cache=cache)

        def refused(*_, **__):
            raise PermissionError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(decoded_cache.os, "utime", refused)
        monkeypatch.setattr(decoded_cache, "new_file", refused)
        no_reading()
        assert is_same(open_decoded(source, 8, cache=cache), first)

    def test_no_home(self, source, monkeypatch):
        def lost():
            raise RatpError("no cache folder: who are you? Set RATP_CACHE to a folder you may write to.")

        monkeypatch.setattr(decoded, "cache_folder", lost)
        domain = open_decoded(source, (8, 9))
        assert torch.equal(domain.images, expected(FILES))
        assert "no cache folder" in domain.notes[0]

    @pytest.mark.faults(4, "ratp keeps images that do not fit into the cache in memory")
    def test_full_disk_leaves_nothing_behind(self, source, cache, monkeypatch):
        write, written = os.pwrite, []

        def full(handle, data, offset):
            written.append(offset)
            if len(written) == 5:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(handle, data, offset)

        monkeypatch.setattr(worker.os, "pwrite", full)
        domain = open_decoded(source, (8, 9), cache=cache)
        assert torch.equal(domain.images, expected(FILES))
        assert "(No space left on device)" in domain.notes[0]
        assert os.listdir(cache / "decoded") == []

    @pytest.mark.parametrize("pause", [0.0001, 100])
    def test_late_write_error_is_handled(self, source, cache, monkeypatch, pause):
        def broken(_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(image_file, "_FLUSH_SECONDS", pause)
        monkeypatch.setattr(image_file.os, "fsync", broken)
        domain = open_decoded(source, (8, 9), cache=cache)
        assert torch.equal(domain.images, expected(FILES))
        assert "(Input/output error)" in domain.notes[0]
        assert os.listdir(cache / "decoded") == []

    @pytest.mark.parametrize("manifest_fits", [False, True])
    def test_full_disk_while_writing_index(self, source, cache, monkeypatch, manifest_fits):
        write = decoded_cache.write_json

        def full(path, data):
            if not (manifest_fits and path.name.endswith(".manifest.json")):
                raise decoded_cache.RunDirectoryError(f"cannot write {path}: No space left on device.")
            write(path, data)

        monkeypatch.setattr(decoded_cache, "write_json", full)
        domain = open_decoded(source, (8, 9), cache=cache)
        assert torch.equal(domain.images, expected(FILES))
        assert os.listdir(cache / "decoded") == []

    def test_a_full_disk_and_too_little_memory(self, source, cache, monkeypatch):
        monkeypatch.setattr(decoded_cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        monkeypatch.setattr(decoded, "free_memory", lambda: 3000)
        monkeypatch.setattr(decoded, "decode_all", never)
        with pytest.raises(RatpError, match=r"No space left on device.*memory is too small.*Set RATP_CACHE"):
            open_decoded(source, (8, 9), cache=cache)
        assert os.listdir(cache / "decoded") == []

    def test_memory_runs_out_while_decoding(self, source, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        (tmp_path / "file").write_text("in the way")
        monkeypatch.setattr(worker.os, "pwrite", full)
        with pytest.raises(RatpError, match=r"memory cannot take them either \(Cannot allocate memory\)"):
            open_decoded(source, 8, cache=tmp_path / "file")

    def test_unnamed_files_replace_memory_files(self, source, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.delattr(os, "memfd_create", raising=False)
        assert torch.equal(open_decoded(source, (8, 9), cache=tmp_path / "file").images, expected(FILES))

    def test_free_memory_is_known(self, monkeypatch):
        assert 2**20 < image_file.free_memory() < 2**50

        def missing(*_, **__):
            raise FileNotFoundError

        monkeypatch.setattr(Path, "read_text", missing)
        monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 2**14}.__getitem__)  # as on macOS
        assert image_file.free_memory() == 2**33


OPEN = """
import hashlib, sys, time
from pathlib import Path
from ratp.data.cache.decoded import open_decoded
assert "PIL" not in sys.modules
path, cache, mine, other = map(Path, sys.argv[1:5])
mine.touch()
while not other.exists():
    time.sleep(0.001)
domain = open_decoded(path, 64, cache=cache, workers=int(sys.argv[5]))
print(hashlib.sha256(domain.images.numpy()).hexdigest(), len(domain), domain.notes)
"""


class TestSeveralProcesses:
    @pytest.mark.slow
    def test_concurrent_opens_agree(self, tmp_path, cache):
        path = write_zip(tmp_path / "d.zip", {f"a/{k}.png": png(k, 40, 40) for k in range(300)})
        ready = [str(tmp_path / name) for name in ("one", "two")]
        started = [
            subprocess.Popen(
                [sys.executable, "-c", OPEN, str(path), str(cache), *places, workers],
                stdout=subprocess.PIPE,
                text=True,
            )
            for places, workers in ((ready, "1"), (ready[::-1], "2"))
        ]
        answers = {process.communicate(timeout=300)[0] for process in started}
        assert [process.returncode for process in started] == [0, 0]
        assert len(answers) == 1 and answers.pop().endswith(" 300 ()\n")
        assert len(os.listdir(cache / "decoded")) == 3

    def test_second_process_waits_and_reuses_entry(self, source, cache, monkeypatch):
        """The other writer finishes between our look into the cache and our turn to write."""
        first = open_decoded(source, (8, 9), cache=cache)
        load, looks = decoded_cache.Slot.load, []

        def late(slot):
            looks.append(slot)
            return load(slot) if len(looks) > 1 else None

        monkeypatch.setattr(decoded_cache.Slot, "load", late)
        monkeypatch.setattr(decoded, "decode_all", never)
        assert is_same(open_decoded(source, (8, 9), cache=cache), first)
        assert len(looks) == 2

    def test_file_system_without_locks(self, source, cache, monkeypatch):
        def unsupported(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(file_lock.fcntl, "flock", unsupported)
        assert torch.equal(open_decoded(source, (8, 9), cache=cache).images, expected(FILES))
        assert len(cache_entries(cache)) == 1


class TestEviction:
    def three(self, source, cache):
        for age, size in ((300, 8), (200, 9), (100, 10)):
            open_decoded(source, size, cache=cache)
            newest = max(cache_entries(cache), key=lambda entry: entry.used)
            moment = time.time() - age
            os.utime(cache / "decoded" / f"{newest.key}.json", (moment, moment))
        return cache_entries(cache)

    def test_entries_are_listed_by_their_last_use(self, source, cache):
        assert cache_entries(cache) == []
        entries = self.three(source, cache)
        assert [(entry.name, entry.images, entry.height, entry.width) for entry in entries] == [
            ("photo", 12, side, side) for side in (8, 9, 10)
        ]
        assert all(entry.bytes > 12 * 3 * entry.height * entry.width for entry in entries)
        open_decoded(source, 8, cache=cache)
        assert [entry.height for entry in cache_entries(cache)] == [9, 10, 8]

    def test_least_recently_used_is_evicted_first(self, source, cache):
        oldest, middle, newest = self.three(source, cache)
        total = sum(entry.bytes for entry in (oldest, middle, newest))
        assert evict(cache, total) == []
        assert evict(cache, total - 1) == [oldest]
        assert cache_entries(cache) == [middle, newest]
        assert evict(cache, 0) == [middle, newest]
        assert os.listdir(cache / "decoded") == []
        assert evict(cache, 0) == [] == evict(cache / "nowhere", 0)

    def test_entry_being_written_is_kept(self, source, cache):
        oldest, middle, newest = self.three(source, cache)
        with decoded_cache.Slot.of(cache, oldest.key, 8, 8).writing():
            assert evict(cache, 0) == [middle, newest]
        assert cache_entries(cache) == [oldest]

    def test_leftovers_are_evicted_before_entries(self, source, cache):
        entries = self.three(source, cache)
        write_files(cache / "decoded", {"0123.part-xyz": bytes(50), ".4567.json.abc": b"{", "89ab.images": bytes(9)})
        removed = evict(cache, sum(entry.bytes for entry in entries))
        assert sorted(entry.key for entry in removed) == ["0123", "4567", "89ab"]
        assert cache_entries(cache) == entries

    def test_unwritable_folder(self, source, cache, monkeypatch):
        self.three(source, cache)

        def refused(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(decoded_cache.os, "open", refused)
        with pytest.raises(RatpError, match=r"cannot remove files from .*: Permission denied"):
            evict(cache, 0)

    def test_eviction_makes_enough_room(self, source, cache, monkeypatch):
        oldest, *others = self.three(source, cache)
        needed = 12 * 3 * 11 * 11
        usage = shutil.disk_usage(cache)

        def nearly_full(folder):
            gone = sum(e.bytes for e in (oldest, *others)) - sum(e.bytes for e in cache_entries(folder.parent))
            return usage._replace(free=needed - 1 + gone)

        monkeypatch.setattr(decoded_cache.shutil, "disk_usage", nearly_full)
        domain = open_decoded(source, 11, cache=cache)
        assert domain.notes == ()
        assert [entry.height for entry in cache_entries(cache)] == [9, 10, 11]


def test_a_real_domain(cache, no_reading):
    path = real_data() / "digits" / "usps.zip"
    first = open_decoded(path, 32, cache=cache)
    assert first.images.shape == (9298, 3, 32, 32)
    assert first.class_names == tuple("0123456789")
    assert torch.bincount(first.class_index).tolist() == list(first.manifest.counts.values())
    assert first.manifest.conversions == {"greyscale": 9298}
    no_reading()
    assert is_same(open_decoded(path, 32, cache=cache), first)
