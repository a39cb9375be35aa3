"""The cache gives back what was stored, and never anything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ratp._core.files import read_tensors, write_tensors
from ratp.data.cache.folder import cache_folder, cached_domain
from ratp.data.domain import LabelledDomain
from ratp.errors import NotCachedWarning, RatpError


def small(held_out: bool = True) -> LabelledDomain:
    images = torch.arange(4 * 3 * 2 * 2, dtype=torch.uint8).reshape(4, 3, 2, 2)
    part = torch.tensor([True, False, False, True]) if held_out else None
    return LabelledDomain("größe", images, torch.tensor([0, 1, 1, 0]), ("a cat", "ein „Hund“"), part)


def never() -> LabelledDomain:
    raise AssertionError("built although cached")


def same(one: LabelledDomain, other: LabelledDomain) -> bool:
    return (one.held_out is None) == (other.held_out is None) and one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("held_out", [True, False])
def test_second_load_reads_the_file(tmp_path, held_out):
    folder = tmp_path / "deep" / "down"
    assert same(cached_domain(folder, "key", lambda: small(held_out)), small(held_out))
    assert same(cached_domain(folder, "key", never), small(held_out))
    assert [path.name for path in folder.iterdir()] == ["key.safetensors"]


def test_other_key_is_other_domain(tmp_path):
    cached_domain(tmp_path, "one", small)
    with pytest.raises(AssertionError, match="built although cached"):
        cached_domain(tmp_path, "two", never)


def test_build_error_propagates_and_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError):
        cached_domain(tmp_path / "cache", "key", never)
    assert not (tmp_path / "cache").exists()


def test_corruption_is_detected_and_repaired(tmp_path):
    cached_domain(tmp_path, "key", small)
    path = tmp_path / "key.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), 9):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        stays_true = position >= len(whole) - len(small()) and flipped[position] and whole[position]
        for damaged in (whole[:position],) if stays_true else (bytes(flipped), whole[:position]):
            path.write_bytes(damaged)
            assert same(cached_domain(tmp_path, "key", small), small())
            assert path.read_bytes() == whole


def test_a_loaded_domain_outlives_its_file(tmp_path):
    cached_domain(tmp_path, "key", small)
    domain = cached_domain(tmp_path, "key", never)
    (tmp_path / "key.safetensors").write_bytes(b"")
    assert same(domain, small())


def foreign_files() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, object]]]:
    domain = small()
    tensors = {"images": domain.images, "labels": domain.labels, "held_out": domain.held_out}
    right = {
        "key": "key",
        "name": "größe",
        "classes": ["a cat", "ein „Hund“"],
        "fingerprint": domain.fingerprint(),
    }
    return {
        "no metadata": (tensors, {}),
        "metadata without a name": (tensors, {"key": "key"}),
        "classes are no list": (tensors, right | {"classes": 2}),
        "wrong fingerprint": (tensors, right | {"fingerprint": "0"}),
        "other key": (tensors, right | {"key": "other"}),
        "no labels": ({"images": domain.images}, right),
        "wrong type": ({**tensors, "images": domain.images.float()}, right),
        "wrong shape": ({**tensors, "images": domain.images[:, :2]}, right),
        "wrong number": ({**tensors, "labels": domain.labels[:3]}, right),
        "labels beyond the classes": ({**tensors, "labels": domain.labels + 1}, right),
        "other labels": ({**tensors, "labels": 1 - domain.labels}, right),
        "other test part": ({**tensors, "held_out": ~domain.held_out}, right),
    }


@pytest.mark.parametrize("kind", foreign_files())
def test_a_foreign_file_is_replaced(tmp_path, kind):
    tensors, metadata = foreign_files()[kind]
    write_tensors(tmp_path / "key.safetensors", tensors, metadata)
    assert same(cached_domain(tmp_path, "key", small), small())
    assert same(cached_domain(tmp_path, "key", never), small())


def test_foreign_files_differ_in_one_field(tmp_path):
    """Otherwise the test above would pass for the wrong reason."""
    cached_domain(tmp_path, "key", small)
    ours = read_tensors(tmp_path / "key.safetensors")
    tensors, _ = foreign_files()["no metadata"]
    _, metadata = foreign_files()["wrong type"]
    write_tensors(tmp_path / "key.safetensors", tensors, metadata)
    assert same(cached_domain(tmp_path, "key", never), small())
    assert ours[0].keys() == tensors.keys()


def test_renamed_file_is_rejected(tmp_path):
    cached_domain(tmp_path, "old", small)
    (tmp_path / "old.safetensors").rename(tmp_path / "new.safetensors")
    with pytest.raises(AssertionError, match="built although cached"):
        cached_domain(tmp_path, "new", never)


def test_load_works_without_cache_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.warns(NotCachedWarning, match=f"cannot cache drawn images in {folder}: "):
            assert same(cached_domain(folder, "key", small), small())
    assert (tmp_path / "file").read_text() == "in the way"


def test_load_works_with_folder_in_place_of_file(tmp_path):
    (tmp_path / "key.safetensors" / "occupied").mkdir(parents=True)
    with pytest.warns(NotCachedWarning):
        assert same(cached_domain(tmp_path, "key", small), small())
    assert [path.name for path in tmp_path.iterdir()] == ["key.safetensors"]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    for name in ("RATP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda _: tmp_path))
    return monkeypatch


def test_cache_location(bare, tmp_path):
    bare.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "ratp"
    bare.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "ratp"
    bare.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "ratp"
    bare.setenv("RATP_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_empty_and_relative_settings_do_not_count(bare, tmp_path):
    bare.setattr(sys, "platform", "linux")
    bare.setenv("RATP_CACHE", "")
    bare.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == tmp_path / ".cache" / "ratp"


def test_missing_home_error_names_the_setting(bare):
    def lost(_):
        raise RuntimeError("Could not determine home directory.")

    bare.setattr(Path, "home", classmethod(lost))
    with pytest.raises(RatpError, match="Set RATP_CACHE"):
        cache_folder()
