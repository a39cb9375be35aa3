import errno
import json
import math
import os
import stat
import struct
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from helpers import same_tensors
from ratp._core.files import (
    UnreadableFileError,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
    write_text,
)
from ratp.errors import RunDirectoryError

DOCUMENT = {
    "name": "naïve ü 画像",
    "numbers": [1, 2.5, -1e-9],
    "nested": {"none": None, "flag": True, "text": 'a "b"\n'},
}
TENSORS = {
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16),
    "labels": torch.arange(5),
    "images": torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    "mask": torch.tensor([True, False]),
    "seen": torch.tensor(3),
    "empty": torch.zeros(0, 3, 1, 1, dtype=torch.uint8),
}
JSON = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


class TestWriting:
    def test_file_is_replaced(self, tmp_path):
        for text in ("old and longer", "new"):
            write_text(tmp_path / "file", text)
            assert (tmp_path / "file").read_text() == text
        assert os.listdir(tmp_path) == ["file"]

    def test_non_file_is_left_alone(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(RunDirectoryError, match=r"pipe: it exists and is not a file\."):
            write_text(tmp_path / "pipe", "text")
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)

    @pytest.mark.parametrize("broken", ["fsync", "fdopen"])
    @pytest.mark.parametrize("old", [b"old", None], ids=["over an old file", "for the first time"])
    def test_failed_write_keeps_old_file(self, tmp_path, monkeypatch, broken, old):
        path = tmp_path / "file"
        if old is not None:
            path.write_bytes(old)
        monkeypatch.setattr(os, broken, fail_with(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(RunDirectoryError, match=r"file: No space left on device\."):
            write_bytes(path, b"new")
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ([] if old is None else ["file"])
        assert old is None or path.read_bytes() == old

    @pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()])
    def test_failed_rename_keeps_old_file(self, tmp_path, monkeypatch, error):
        path = tmp_path / "file"
        path.write_bytes(b"old")
        monkeypatch.setattr(Path, "replace", fail_with(error))
        monkeypatch.setattr(os, "replace", fail_with(error))
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RunDirectoryError):
            write_bytes(path, b"new")
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["file"]
        assert path.read_bytes() == b"old"

    @pytest.mark.faults(2, "ratp writes a temporary file, syncs it, renames it and syncs the folder")
    def test_contents_are_synced_before_rename(self, tmp_path, monkeypatch):
        order = []
        fsync, replace = os.fsync, Path.replace

        def noting_fsync(handle):
            order.append("fsync")
            fsync(handle)

        def noting_replace(self, target):
            order.append("rename")
            return replace(self, target)

        monkeypatch.setattr(os, "fsync", noting_fsync)
        monkeypatch.setattr(Path, "replace", noting_replace)
        write_bytes(tmp_path / "file", b"new")
        assert order == ["fsync", "rename", "fsync"]

    def test_missing_folder_is_named(self, tmp_path):
        with pytest.raises(RunDirectoryError, match=r"missing.file.*No such file"):
            write_bytes(tmp_path / "missing" / "file", b"new")

    def test_folder_at_target_path_is_named(self, tmp_path):
        (tmp_path / "file").mkdir()
        with pytest.raises(RunDirectoryError, match="cannot write"):
            write_bytes(tmp_path / "file", b"new")
        assert os.listdir(tmp_path) == ["file"]

    def test_written_file_is_readable_by_others(self, tmp_path):
        write_bytes(tmp_path / "file", b"new")
        assert (tmp_path / "file").stat().st_mode & 0o444 == 0o444


class TestJson:
    @given(JSON)
    def test_round_trip(self, folder, data):
        write_json(folder / "data.json", data)
        assert read_json(folder / "data.json") == data

    def test_it_is_readable_text(self, tmp_path):
        write_json(tmp_path / "data.json", DOCUMENT)
        assert "naïve ü 画像" in (tmp_path / "data.json").read_text(encoding="utf-8")

    def test_non_unicode_folder_names_are_writable(self, tmp_path):
        """On Linux a path may hold any bytes; Python hands the odd ones over as lone surrogates."""
        data = {"folder": os.fsdecode(b"/data/caf\xe9")}
        write_json(tmp_path / "data.json", data)
        assert read_json(tmp_path / "data.json") == data

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_non_json_values_are_rejected(self, tmp_path, value):
        write_json(tmp_path / "data.json", DOCUMENT)
        with pytest.raises(ValueError, match="JSON"):
            write_json(tmp_path / "data.json", {"accuracy": value})
        assert read_json(tmp_path / "data.json") == DOCUMENT

    def test_truncated_file_is_damaged(self, tmp_path):
        path = tmp_path / "cut.json"
        write_json(path, DOCUMENT)
        whole = path.read_bytes().rstrip()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(RunDirectoryError, match=r"cut\.json is damaged"):
                read_json(path)

    @given(st.binary())
    def test_arbitrary_bytes_are_json_or_damaged(self, folder, data):
        path = folder / "any.json"
        path.write_bytes(data)
        try:
            found = read_json(path)
        except RunDirectoryError:
            return
        assert isinstance(found, dict)

    @pytest.mark.parametrize(
        "text", ["[]", "3", "null", '"text"', "", "{", '{"a": 1} x', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
    )
    def test_non_object_is_damaged(self, tmp_path, text):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(RunDirectoryError, match="damaged"):
            read_json(tmp_path / "data.json")

    def test_missing_and_unreadable_files_differ(self, tmp_path):
        with pytest.raises(RunDirectoryError, match=r"data\.json is missing"):
            read_json(tmp_path / "data.json")
        with pytest.raises(RunDirectoryError, match="cannot read"):
            read_json(tmp_path)


class TestTensors:
    def test_round_trip(self, tmp_path):
        write_tensors(tmp_path / "state.safetensors", TENSORS, {"stage": "2"})
        tensors, metadata = read_tensors(tmp_path / "state.safetensors")
        assert metadata == {"stage": "2"}
        assert tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(tensors[name], tensor)
            assert tensors[name].dtype == tensor.dtype

    def test_metadata_may_be_absent(self, tmp_path):
        write_tensors(tmp_path / "state.safetensors", {})
        assert read_tensors(tmp_path / "state.safetensors") == ({}, {})

    def test_parameters_and_views_are_written_by_value(self, tmp_path):
        base = torch.arange(12.0).reshape(3, 4)
        views = {"turned": base.T, "column": base[:, 1], "parameter": torch.nn.Parameter(base)}
        write_tensors(tmp_path / "state.safetensors", views)
        tensors, _ = read_tensors(tmp_path / "state.safetensors")
        for name, view in views.items():
            assert torch.equal(tensors[name], view.detach())

    def test_tensors_may_share_their_storage(self, tmp_path):
        """Two networks of a method may start out as one."""
        base = torch.arange(4.0)
        write_tensors(tmp_path / "state.safetensors", {"student": base, "teacher": base, "head": base[:2]})
        tensors, _ = read_tensors(tmp_path / "state.safetensors")
        assert torch.equal(tensors["teacher"], base)
        assert torch.equal(tensors["head"], base[:2])

    def test_failed_write_keeps_old_tensors(self, tmp_path, monkeypatch):
        path = tmp_path / "state.safetensors"
        write_tensors(path, TENSORS)
        monkeypatch.setattr(os, "fsync", fail_with(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(RunDirectoryError):
            write_tensors(path, {"labels": torch.zeros(1)})
        monkeypatch.undo()
        assert torch.equal(read_tensors(path)[0]["labels"], TENSORS["labels"])

    def test_truncated_file_is_damaged(self, tmp_path):
        path = tmp_path / "cut.safetensors"
        write_tensors(path, TENSORS, {"stage": "2"})
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(RunDirectoryError, match=r"cut\.safetensors is damaged"):
                read_tensors(path)

    @given(st.binary(max_size=200))
    def test_foreign_bytes_are_damaged(self, folder, data):
        path = folder / "foreign.safetensors"
        path.write_bytes(data)
        with pytest.raises(RunDirectoryError, match="damaged or not a safetensors"):
            read_tensors(path)

    @given(position=st.integers(0, 2000), bit=st.integers(0, 7))
    def test_flipped_bit_is_detected_or_harmless(self, folder, position, bit):
        path = folder / "changed.safetensors"
        write_tensors(path, TENSORS, {"stage": "2"})
        data = bytearray(path.read_bytes())
        data[position % len(data)] ^= 1 << bit
        path.write_bytes(bytes(data))
        try:
            tensors, _ = read_tensors(path)
        except RunDirectoryError:
            return
        assert same_tensors(tensors, TENSORS)

    def test_foreign_files_without_hash_are_read(self, tmp_path):
        (tmp_path / "foreign.safetensors").write_bytes(save(TENSORS, metadata={"format": "pt"}))
        tensors, metadata = read_tensors(tmp_path / "foreign.safetensors")
        assert same_tensors(tensors, TENSORS) and metadata == {}

    @pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F8_E8M0", "C64", "X9"])
    def test_foreign_dtypes_are_refused_or_read(self, tmp_path, dtype):
        header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}).encode()
        path = tmp_path / "foreign.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        try:
            tensors, _ = read_tensors(path)
        except RunDirectoryError:
            return
        assert isinstance(tensors["a"], torch.Tensor)

    def test_missing_files_and_folders_are_named(self, tmp_path):
        with pytest.raises(RunDirectoryError, match=r"state\.safetensors is missing"):
            read_tensors(tmp_path / "state.safetensors")
        with pytest.raises(RunDirectoryError):
            read_tensors(tmp_path)

    def test_pickles_are_not_read(self, tmp_path):
        torch.save({"a": torch.zeros(2)}, tmp_path / "model.pth")
        with pytest.raises(RunDirectoryError):
            read_tensors(tmp_path / "model.pth")


def test_inaccessible_folder_is_reported(tmp_path, monkeypatch):
    """Nothing says then whether the file is there."""
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UnreadableFileError, match=r"cannot read .*tensors: Permission denied\."):
        read_tensors(tmp_path / "tensors")
