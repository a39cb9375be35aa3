"""Imports of small real files of every format are exact to the pixel; wrong and hostile ones leave nothing behind."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import pickle
import shutil
import struct
import sys
import warnings
import zipfile
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from ratp.data.catalogue import (
    CATALOGUE,
    DIGITS,
    DOMAINNET_10,
    PACS_CLASSES,
    DomainSource,
    SourceFile,
    data_set,
    find_sources,
)
from ratp.data.catalogue.fetch import fetch_domain
from ratp.data.catalogue.import_ import import_domain
from ratp.data.catalogue.rebuild import provenance
from ratp.data.formats import matlab
from ratp.data.formats.canonical import write_domain
from ratp.data.formats.pictures import Pictures
from ratp.errors import RatpError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (12, 28, 28), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (12, 9, 7, 3), dtype=np.uint8)
LABELS = np.array([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 0, 9], dtype=np.uint8)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def png(array, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


def image_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def read_zip(path):
    """Of a canonical zip, by number: class, ending and bytes."""
    with zipfile.ZipFile(path) as archive:
        found = {}
        for name in archive.namelist():
            domain, label, file = name.split("/")
            assert domain == path.stem
            number, dot, ending = file.partition(".")
            found[int(number)] = (label, dot + ending, archive.read(name))
    return found


def contents(path):
    """Of a canonical zip, by number: class and pixels."""
    return {k: (label, np.asarray(Image.open(io.BytesIO(data)))) for k, (label, _, data) in read_zip(path).items()}


def assert_holds(path, images, labels):
    found = contents(path)
    assert sorted(found) == list(range(len(images)))
    for k, (image, label) in enumerate(zip(images, labels, strict=True)):
        assert found[k][0] == str(label)
        np.testing.assert_array_equal(found[k][1], image)


def assert_error(tmp_path, match, name, *inputs, **options):
    out = tmp_path / "out"
    with pytest.raises(RatpError, match=match):
        import_domain(name, inputs, out, **options)
    assert not out.exists() or not list(out.iterdir())


@pytest.fixture
def mnist(tmp_path):
    files = {
        "train-images-idx3-ubyte": idx(GREY[:8]),
        "train-labels-idx1-ubyte": idx(LABELS[:8]),
        "t10k-images-idx3-ubyte.gz": gzip.compress(idx(GREY[8:])),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(idx(LABELS[8:])),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in files]


# --- the canonical form


def test_canonical_form(tmp_path, mnist):
    report = import_domain("mnist", mnist, tmp_path / "out")
    assert report.path == tmp_path / "out" / "mnist.zip"
    assert report.total == 12
    assert report.images == {"0": 2, "1": 3, "2": 1, "3": 1, "4": 2, "5": 1, "9": 2}
    with zipfile.ZipFile(report.path) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert names[0] == "mnist/0/00001.png"
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        assert all(info.date_time == (1980, 1, 1, 0, 0, 0) for info in archive.infolist())
    assert [path.name for path in report.path.parent.iterdir()] == ["mnist.zip"]
    assert provenance(report.path) is None


def test_same_input_same_bytes(tmp_path, mnist):
    first = import_domain("mnist", mnist, tmp_path / "a").path.read_bytes()
    for path in mnist:
        os.utime(path, (1, 1))
    assert import_domain("mnist", mnist, tmp_path / "b").path.read_bytes() == first


def test_existing_zip_is_replaced_only_on_request(tmp_path, mnist):
    import_domain("mnist", mnist[:2], tmp_path / "out")
    with pytest.raises(RatpError, match="exists already"):
        import_domain("mnist", mnist, tmp_path / "out")
    assert import_domain("mnist", mnist, tmp_path / "out", replace=True).total == 12


def test_failed_replacement_keeps_the_old_zip(tmp_path, mnist):
    path = import_domain("mnist", mnist, tmp_path / "out").path
    before = path.read_bytes()
    pictures = Pictures(["0"], lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_domain("mnist", pictures, path.parent, replace=True)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_progress(tmp_path, mnist):
    seen = []
    import_domain("mnist", mnist, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == [(k, 12) for k in range(1, 13)]


@pytest.mark.parametrize("name", ["", "..", ".x", "a/b", "a\\b", "c:d", "a\nb"])
def test_invalid_names(tmp_path, mnist, name):
    assert_error(tmp_path, "cannot be the name of a domain", name, *mnist)


def test_unwritable_folder(tmp_path, mnist):
    (tmp_path / "file").write_text("")
    with pytest.raises(RatpError, match="cannot write"):
        import_domain("mnist", mnist, tmp_path / "file" / "sub")


def test_expected_image_count_is_checked(tmp_path, mnist):
    assert_error(tmp_path, r"should have 70,000 images, found 12", "mnist", *mnist, expected=70_000)


def test_no_inputs(tmp_path):
    assert_error(tmp_path, "nothing to import", "mnist")


# --- idx


def test_idx_pairs_by_name_in_any_order(tmp_path, mnist):
    shuffled = [mnist[0], mnist[3], mnist[2], mnist[1]]
    assert_holds(import_domain("mnist", shuffled, tmp_path / "out").path, GREY, LABELS)


def test_idx_pairs_by_order_without_names(tmp_path, mnist):
    renamed = [path.rename(tmp_path / f"file{k}") for k, path in enumerate(mnist)]
    assert_holds(import_domain("mnist", renamed, tmp_path / "out").path, GREY, LABELS)


def test_folder_of_idx_files(tmp_path, mnist):
    raw = tmp_path / "raw"
    raw.mkdir()
    for path in mnist:
        shutil.copy(path, raw)
    (raw / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(GREY[:8])))  # as torchvision leaves it
    report = import_domain("mnist", [raw], tmp_path / "out")
    found = contents(report.path)
    assert len(found) == 12
    assert sorted(label for label, _ in found.values()) == sorted(map(str, LABELS))


@pytest.mark.parametrize("length", [3, 10, 15, 16, 17, 1000, -1])
def test_truncated_idx(tmp_path, mnist, length):
    mnist[0].write_bytes(mnist[0].read_bytes()[:length])
    assert_error(tmp_path, "train-images", "mnist", *mnist)


def test_idx_with_surplus(tmp_path, mnist):
    mnist[0].write_bytes(mnist[0].read_bytes() + b"!")
    assert_error(tmp_path, r"8 × 28 × 28, 6,272 bytes, found more", "mnist", *mnist)


def test_truncated_gzip(tmp_path, mnist):
    mnist[2].write_bytes(mnist[2].read_bytes()[:-20])
    assert_error(tmp_path, r"t10k-images.* is damaged or truncated", "mnist", *mnist)


def test_wrong_magic(tmp_path, mnist):
    mnist[0].write_bytes(b"\0\0\x0d\x03" + mnist[0].read_bytes()[4:])
    assert_error(
        tmp_path, r"train-images.*cannot be imported: expected an idx.*found a file beginning", "mnist", *mnist
    )


def test_idx_that_claims_too_much(tmp_path, mnist):
    mnist[0].write_bytes(b"\0\0\x08\x03" + b"\xff" * 12)
    assert_error(tmp_path, "more than the 4,294,967,296 allowed", "mnist", *mnist)


def test_counts_that_do_not_match(tmp_path, mnist):
    mnist[1].write_bytes(idx(LABELS[:7]))
    assert_error(tmp_path, r"8 images, and .*train-labels.* has 7 labels", "mnist", *mnist)


def test_images_without_labels(tmp_path, mnist):
    assert_error(tmp_path, r"found 2 of images .* and 1 of labels", "mnist", *mnist[:3])


def test_labels_out_of_range(tmp_path, mnist):
    mnist[1].write_bytes(idx(LABELS[:8] + 8))
    assert_error(tmp_path, r"has the classes 0\.\.9, found 10, 11", "mnist", *mnist)
    assert import_domain("letters", mnist[:2], tmp_path / "out").images["13"] == 1


# --- MATLAB


@pytest.mark.parametrize("axes", [(1, 2, 3, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.float64])
def test_svhn(tmp_path, axes, compressed, kind):
    path = tmp_path / "train_32x32.mat"
    labels = np.where(LABELS == 0, 10, LABELS).astype(kind)[:, None]
    savemat(path, {"X": COLOUR.transpose(axes).astype(kind), "y": labels}, do_compression=compressed)
    assert_holds(import_domain("svhn", [path], tmp_path / "out").path, COLOUR, LABELS)


def test_several_mat_files_are_concatenated(tmp_path):
    for name, part in (("b", slice(0, 7)), ("a", slice(7, 12))):
        savemat(tmp_path / f"{name}.mat", {"X": COLOUR[part].transpose(1, 2, 3, 0), "y": LABELS[part]})
    paths = [tmp_path / "b.mat", tmp_path / "a.mat"]
    assert_holds(import_domain("syn", paths, tmp_path / "out").path, COLOUR, LABELS)


def test_mat_with_fractions_is_scaled(tmp_path):
    savemat(tmp_path / "x.mat", {"X": COLOUR / 255, "y": LABELS})
    assert_holds(import_domain("mnist_m", [tmp_path / "x.mat"], tmp_path / "out").path, COLOUR, LABELS)


def test_mat_of_digit_five(tmp_path):
    one_hot = np.eye(10)[LABELS]
    data = {"train": COLOUR[:8], "label_train": one_hot[:8], "test": COLOUR[8:], "label_test": one_hot[8:]}
    savemat(tmp_path / "mnistm_with_label.mat", data)
    path = import_domain("mnist_m", [tmp_path / "mnistm_with_label.mat"], tmp_path / "out").path
    assert_holds(path, COLOUR, LABELS)


def test_original_size_is_preferred_over_resized(tmp_path):
    resized = np.pad(GREY, ((0, 0), (2, 2), (2, 2)))
    one_hot = np.eye(10)[LABELS]
    train = {"train_32": resized[:8], "train_28": GREY[:8, :, :, None], "label_train": one_hot[:8]}
    test = {"test_32": resized[8:], "test_28": GREY[8:, :, :, None], "label_test": one_hot[8:]}
    savemat(tmp_path / "mnist_data.mat", {**train, **test})
    path = import_domain("mnist", [tmp_path / "mnist_data.mat"], tmp_path / "out").path
    assert_holds(path, GREY, LABELS)
    savemat(tmp_path / "mnist_data.mat", {"train_32": resized, "label_train": one_hot})
    path = import_domain("mnist", [tmp_path / "mnist_data.mat"], tmp_path / "out", replace=True).path
    assert_holds(path, resized, LABELS)


def usps_cells(path, images=GREY[:, None] / 255, labels=LABELS[:, None], compressed=True):
    """USPS as Digits-Five has it."""
    cells = np.empty((2, 2), dtype=object)
    for row, part in enumerate((slice(0, 8), slice(8, 12))):
        cells[row, 0], cells[row, 1] = images[part], labels[part]
    savemat(path, {"dataset": cells}, do_compression=compressed)
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_cells_of_usps(tmp_path, compressed):
    path = usps_cells(tmp_path / "usps_28x28.mat", compressed=compressed)
    assert_holds(import_domain("usps", [path], tmp_path / "out").path, GREY, LABELS)


@pytest.mark.parametrize(
    ("images", "labels", "match"),
    [
        (GREY / 255, LABELS[:, None], r"row 1 of dataset: expected N × 1 × height × width numbers, found \(8, 28, 28"),
        (np.full((12, 1, 2, 2), "a"), LABELS[:, None], r"row 1 of dataset: expected N × 1"),
        (GREY[:, None] / 255, LABELS[:, None] + 9, r"row 1 of dataset: expected the digits 0\.\.9"),
        (GREY[:, None] / 255, LABELS[:5, None], r"row 1 of dataset: expected as many images as labels"),
    ],
)
def test_invalid_cells(tmp_path, images, labels, match):
    assert_error(tmp_path, match, "usps", usps_cells(tmp_path / "x.mat", images, labels))


def test_cells_that_unpack_to_more_than_is_allowed(tmp_path, monkeypatch):
    path = usps_cells(tmp_path / "x.mat", np.zeros((12, 1, 400, 400)))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(matlab, "MOST_BYTES", 10_000_000)
    assert_error(tmp_path, "holds more than the 10,000,000 bytes allowed", "usps", path)


def test_damaged_cells(tmp_path):
    whole = usps_cells(tmp_path / "x.mat").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(40):
        noisy = bytearray(whole)
        for place in rng.integers(124, len(whole), 8):
            noisy[place] = rng.integers(256)
        (tmp_path / "x.mat").write_bytes(noisy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_error(tmp_path, r"x\.mat", "usps", tmp_path / "x.mat")


def test_only_requested_variables_are_read(tmp_path, mnist):
    whole = sorted(read_zip(import_domain("mnist", mnist, tmp_path / "whole").path).items())
    report = import_domain("mnist", mnist, tmp_path / "some", at_most=7)
    assert report.total == 7
    assert report.notes == ("7 of 12 images were chosen by chance.",)
    some = [picture for _, picture in sorted(read_zip(report.path).items())]
    assert [picture for _, picture in whole if picture in some] == some  # in their order
    again = import_domain("mnist", mnist, tmp_path / "again", at_most=7)
    assert again.path.read_bytes() == report.path.read_bytes()
    everything = import_domain("mnist", mnist, tmp_path / "all", at_most=12)
    assert (everything.total, everything.notes) == (12, ())


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"A": COLOUR, "y": LABELS}, r"expected images and labels under X and y .*found A, y"),
        ({"X": COLOUR, "y": LABELS[:5]}, r"12, 9, 7, 3"),
        ({"X": COLOUR, "y": LABELS + 8}, r"expected the digits 0\.\.9 .* found 8 to 17"),
        ({"X": COLOUR, "y": np.where(LABELS == 9, 10, LABELS)}, r"10 for 0, found 0 to 10"),
        ({"X": COLOUR, "y": LABELS - 1.5}, "whole numbers"),
        ({"X": COLOUR * 2.0, "y": LABELS}, r"pixels in 0\.\.255 or fractions in 0\.\.1"),
        ({"X": np.full(COLOUR.shape, np.nan), "y": LABELS}, "not finite"),
        ({"X": {"a": 1}, "y": LABELS}, "expected X to be an array of numbers, found a struct"),
        ({"X": np.array([[1], "b"], dtype=object), "y": LABELS}, "found a cell"),
        ({"X": "text", "y": LABELS}, "found a char"),
        ({"X": COLOUR[:, :, 0, 0], "y": LABELS}, "expected N images of height × width"),
    ],
)
def test_invalid_mat(tmp_path, data, match):
    savemat(tmp_path / "x.mat", data)
    assert_error(tmp_path, match, "svhn", tmp_path / "x.mat")


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_mat(tmp_path, compressed):
    path = tmp_path / "x.mat"
    savemat(path, {"X": COLOUR, "y": LABELS}, do_compression=compressed)
    whole = path.read_bytes()
    for length in (128, 136, 200, 1000, len(whole) - 9):
        path.write_bytes(whole[:length])
        assert_error(tmp_path, r"x\.mat", "svhn", path)
    rng = np.random.default_rng(0)
    for _ in range(40):
        noisy = bytearray(whole)
        for place in rng.integers(124, len(whole), 8):
            noisy[place] = rng.integers(256)
        path.write_bytes(noisy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import_domain("svhn", [path], tmp_path / "out", replace=True)
            except RatpError:
                continue


# --- HDF5


def test_hdf5_without_h5py_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "usps.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert_error(
        tmp_path,
        r"usps\.h5 is an HDF5 file, and reading it needs h5py: pip install h5py$",
        "usps",
        tmp_path / "usps.h5",
    )


def test_usps_h5(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "usps.h5"
    images = GREY[:, :16, :16]
    with h5py.File(path, "w") as file:
        for part, some in (("train", slice(0, 8)), ("test", slice(8, 12))):
            file[f"{part}/data"] = images[some].reshape(-1, 256) / 255
            file[f"{part}/target"] = LABELS[some].astype(np.int64)
    assert_holds(import_domain("usps", [path], tmp_path / "out").path, images, LABELS)


def test_new_mat(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["X"] = COLOUR.transpose(1, 2, 3, 0).T
        file["y"] = np.where(LABELS == 0, 10, LABELS).astype(np.float64)[:, None].T
    with path.open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file")
    assert_holds(import_domain("svhn", [path], tmp_path / "out").path, COLOUR, LABELS)


def test_hdf5_with_external_links(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.mat"
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["X"] = COLOUR
    with h5py.File(path, "w") as file:
        file["X"] = h5py.ExternalLink("other.h5", "X")
        file["y"] = LABELS
    assert_error(tmp_path, "array of numbers within the file", "svhn", path)
    path.write_bytes(path.read_bytes()[:900])
    assert_error(tmp_path, "not a readable HDF5 file", "svhn", path)


# --- libsvm


def libsvm(images, labels):
    rows = images.reshape(len(images), -1) / 127.5 - 1
    return "".join(
        f"{label + 1} " + " ".join(f"{k}:{value:.5f}" for k, value in enumerate(row, start=1)) + " \n"
        for label, row in zip(labels, rows, strict=True)
    ).encode()


@pytest.mark.parametrize("pack", [bz2.compress, bytes])
def test_usps_libsvm(tmp_path, pack):
    images = GREY[:, :16, :16]
    (tmp_path / "usps.bz2").write_bytes(pack(libsvm(images[:8], LABELS[:8])))
    (tmp_path / "usps.t.bz2").write_bytes(pack(libsvm(images[8:], LABELS[8:])))
    report = import_domain("usps", [tmp_path / "usps.bz2", tmp_path / "usps.t.bz2"], tmp_path / "out")
    assert_holds(report.path, images, LABELS)


def test_libsvm_leaves_out_zeros(tmp_path):
    (tmp_path / "x").write_bytes(b"1 1:-1 256:1\n")
    image = contents(import_domain("usps", [tmp_path / "x"], tmp_path / "out").path)[0][1]
    assert image.ravel()[[0, 1, 255]].tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"11 1:0.5\n", r"line 1: expected a label in 1\.\.10, found 11"),
        (b"1 1:0\n0 1:0.5\n", r"line 2: expected a label in 1\.\.10, found 0"),
        (b"1 257:0.5\n", r"positions in 1\.\.256, found 257"),
        (b"1 0:0.5\n", r"positions in 1\.\.256, found 0"),
        (b"1 1:1.5\n", r"values in -1\.\.1"),
        (b"1 1:nan\n", r"values in -1\.\.1"),
        (b"1 1:0.5 2:x\n", "expected 'label index:value"),
        (b"1 " + b"1:0.5 " * 20000, "line of more than"),
    ],
)
def test_wrong_libsvm(tmp_path, text, match):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(text))
    assert_error(tmp_path, match, "usps", tmp_path / "usps.bz2")


def test_truncated_bz2(tmp_path):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(libsvm(GREY[:, :16, :16], LABELS))[:-30])
    assert_error(tmp_path, r"usps\.bz2 is damaged or truncated", "usps", tmp_path / "usps.bz2")


# --- npz


def test_npz(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=GREY[:8], y_train=LABELS[:8], x_test=GREY[8:], y_test=LABELS[8:])
    assert_holds(import_domain("mnist", [tmp_path / "mnist.npz"], tmp_path / "out").path, GREY, LABELS)


# --- folders, zips and lists of images


def place(root, files):
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def as_folder(tmp_path, files):
    return place(tmp_path / "given", files)


def as_zip(tmp_path, files):
    return image_zip(tmp_path / "given.zip", files)


FORMS = pytest.mark.parametrize("form", [as_folder, as_zip])
LAYOUTS = {
    "classes at the root": "{label}/{k}.png",
    "one folder around them": "whatever/{label}/{k}.png",
    "named domain": "photo/{label}/{k}.png",
    "PACS": "PACS/kfold/photo/{label}/{k}.png",
    "parts": "photo/train/{label}/{k}.png",
}


@FORMS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_layouts(tmp_path, form, layout):
    labels = ["dog", "dog", "house", "train"]
    files = {LAYOUTS[layout].format(label=label, k=k): png(COLOUR[k]) for k, label in enumerate(labels)}
    files |= {".DS_Store": b"x", "__MACOSX/dog/._1.png": b"x", f"{next(iter(files)).rsplit('/', 1)[0]}/Thumbs.db": b"x"}
    report = import_domain("photo", [form(tmp_path, files)], tmp_path / "out")
    assert_holds(report.path, COLOUR[:4], labels)
    assert report.notes == ()


@FORMS
def test_one_domain_of_several(tmp_path, form):
    files = {
        f"kfold/{domain}/{label}/pic.png": png(COLOUR[k])
        for k, (domain, label) in enumerate([("photo", "dog"), ("Art Painting", "dog"), ("Art Painting", "elephant")])
    }
    files["kfold/readme.txt"] = b"hello"
    given = form(tmp_path, files)
    report = import_domain("art_painting", [given], tmp_path / "out")
    assert_holds(report.path, COLOUR[1:3], ["dog", "elephant"])
    assert "2 of 4 files are not images in a class folder of art_painting" in report.notes[0]
    assert_error(tmp_path / "x", r"several domains.*unknown domain 'cartoon'.*Art Painting, photo", "cartoon", given)


def test_classes_to_keep(tmp_path):
    files = {f"real/{label}/{k}.png": png(COLOUR[k % 12]) for k, label in enumerate([*DOMAINNET_10, "zebra", "axe"])}
    given = as_folder(tmp_path, files)
    report = import_domain("real", [given], tmp_path / "out", classes=DOMAINNET_10)
    assert list(report.images) == sorted(DOMAINNET_10)
    assert report.notes[-1] == "2 images of 2 other classes were left out."
    assert_error(tmp_path / "x", r"unknown class 'zebras'\. Did you mean 'zebra'", "real", given, classes=["zebras"])


@FORMS
def test_domainnet_lists_select_images(tmp_path, form):
    files = {f"clipart/{label}/clipart_{k}.png": png(COLOUR[k]) for k, label in enumerate(["dog", "dog", "tree"])}
    given = form(tmp_path, files)
    (tmp_path / "clipart_train.txt").write_text("clipart/dog/clipart_1.png 91\n")
    (tmp_path / "clipart_test.txt").write_text("clipart/tree/clipart_2.png 315\n")
    lists = [tmp_path / "clipart_train.txt", tmp_path / "clipart_test.txt"]
    assert_holds(import_domain("clipart", [given, *lists], tmp_path / "out").path, COLOUR[1:3], ["dog", "tree"])


def mnist_m(root):
    parts = {"train": range(8), "test": range(8, 12)}
    files = {f"mnist_m_{part}/{k - some[0]:08d}.png": png(COLOUR[k]) for part, some in parts.items() for k in some}
    for part, some in parts.items():
        lines = [f"{k - some[0]:08d}.png {LABELS[k]}\n" for k in some]
        files[f"mnist_m_{part}_labels.txt"] = "".join(lines).encode()
    return place(root, files)


def by_label(images, labels):
    return sorted((str(label), image.tobytes()) for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        (["."], 12),
        (["mnist_m_train", "mnist_m_train_labels.txt"], 8),
        (["mnist_m_train_labels.txt"], 8),
        (["mnist_m_train_labels.txt", "mnist_m_test_labels.txt"], 12),
    ],
)
def test_mnist_m_as_released(tmp_path, inputs, count):
    root = mnist_m(tmp_path / "mnist_m")
    report = import_domain("mnist_m", [root / name for name in inputs], tmp_path / "out")
    found = [(label, image.tobytes()) for label, image in contents(report.path).values()]
    assert sorted(found) == by_label(COLOUR[:count], LABELS[:count])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("00000000.png 5\nmissing.png 3\n", r"2 images, and 1 of them are not in .*missing\.png"),
        ("nowhere.png 5\n", "found in 0: nowhere"),
        ("00000000.png 5\n../../secret.png 3\n", "line 2: '../../secret.png' leads out of the folder"),
        ("00000000.png 5\n00000001.png\n", "line 2: expected an image's name and its label"),
        ("00000000.png 5\n00000000.png 6\n", "names 1 images more than once"),
        ("00000000.png ../../5\n", r"has the classes 0\.\.9, found \.\./\.\./5"),
        ("00000000.png cat\n", r"has the classes 0\.\.9, found cat"),
    ],
)
def test_wrong_lists(tmp_path, text, match):
    root = mnist_m(tmp_path / "mnist_m")
    (root / "mnist_m_train_labels.txt").write_text(text)
    assert_error(tmp_path, match, "mnist_m", root / "mnist_m_train", root / "mnist_m_train_labels.txt")


def test_lists_with_commas_and_names_with_spaces(tmp_path):
    given = as_folder(tmp_path, {"my dog.png": png(COLOUR[0]), "tree.png": png(COLOUR[1])})
    (tmp_path / "labels.csv").write_text("my dog.png, dog\n\ntree.png,tree\n")
    path = import_domain("own", [given, tmp_path / "labels.csv"], tmp_path / "out").path
    assert_holds(path, COLOUR[:2], ["dog", "tree"])


def test_flat_folder_without_a_list(tmp_path):
    given = as_folder(tmp_path, {"1.png": png(GREY[0]), "2.png": png(GREY[1])})
    assert_error(tmp_path, r"no class folders.*Also give the list of their labels", "mnist", given)


def test_digits_are_digits(tmp_path):
    given = as_folder(tmp_path, {"cat/1.png": png(GREY[0]), "1/2.png": png(GREY[1])})
    assert_error(tmp_path, r"'usps' has the classes 0\.\.9, found cat", "usps", given)


@pytest.mark.parametrize("name", ["画像", "naïve ü", "x" * 200])
def test_unusual_names(tmp_path, name):
    given = as_folder(tmp_path, {f"{name}/{name}.png": png(COLOUR[0])})
    assert_holds(import_domain(name[:100], [given], tmp_path / "out").path, COLOUR[:1], [name])


def test_links_are_followed_but_not_in_circles(tmp_path):
    given = as_folder(tmp_path, {"dog/1.png": png(COLOUR[0])})
    place(tmp_path / "elsewhere", {"1.png": png(COLOUR[1])})
    (given / "tree").symlink_to(tmp_path / "elsewhere")
    (given / "dog" / "circle").symlink_to(given)
    assert_holds(import_domain("own", [given], tmp_path / "out").path, COLOUR[:2], ["dog", "tree"])


# --- images


@FORMS
def test_image_files_are_kept_as_they_are(tmp_path, form):
    """No pixel changes, no file grows, and whatever else is in it stays, such as how to hold the picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    alpha = np.concatenate([COLOUR[0], GREY[0, :9, :7, None]], axis=2)
    deep = (np.arange(63, dtype=np.uint16) * 1000).reshape(9, 7)
    files = {
        "a/1.bmp": png(COLOUR[0], "BMP"),
        "a/2.webp": png(COLOUR[0], "WEBP", quality=50),
        "a/3.png": png(alpha),
        "a/4.png": png(deep),
        "a/5.tif": png(GREY[0], "TIFF"),
        "a/6.jpeg": png(COLOUR[0], "JPEG", exif=exif),
        "a/7.gif": png(GREY[0], "GIF"),
        "a/8.pgm": png(GREY[0], "PPM"),
    }
    found = read_zip(import_domain("own", [form(tmp_path, files)], tmp_path / "out").path)
    assert [(ending, data) for _, ending, data in (found[k] for k in range(8))] == [
        (name[3:], data) for name, data in files.items()
    ]


def test_endings_follow_the_content(tmp_path):
    files = {"a/1.png": png(COLOUR[0], "JPEG"), "a/2.JPG": png(COLOUR[1], "JPEG"), "a/3.jpeg": png(COLOUR[2], "WEBP")}
    found = read_zip(import_domain("own", [as_folder(tmp_path, files)], tmp_path / "out").path)
    assert [ending for _, ending, _ in found.values()] == [".jpg", ".jpg", ".webp"]
    assert [data for _, _, data in found.values()] == list(files.values())


def test_members_are_sorted_whatever_their_endings(tmp_path):
    kinds = ["PNG", "BMP", "WEBP", "JPEG"]
    files = {f"{label}/{k}.png": png(COLOUR[k], kinds[k % 4]) for k in range(8) for label in ("a", "a b")}
    with zipfile.ZipFile(import_domain("own", [as_folder(tmp_path, files)], tmp_path / "out").path) as archive:
        assert archive.namelist() == sorted(archive.namelist())


def bad_images():
    whole = png(COLOUR[0])
    return {
        "dog/empty.png": b"",
        "dog/text.png": b"no image",
        "dog/cut.png": whole[: len(whole) // 2],
        "dog/cut.jpg": png(GREY[0], "JPEG")[:200],
        "dog/page.png": b"<html></html>",
        "dog/script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }


@FORMS
def test_bad_images_stop_the_import_and_are_all_named(tmp_path, form):
    given = form(tmp_path, {"dog/good.png": png(COLOUR[0]), **bad_images()})
    out = tmp_path / "out"
    with pytest.raises(RatpError) as caught:
        import_domain("photo", [given], out)
    text = str(caught.value)
    assert "6 of 7 images of 'photo' cannot be read, and nothing was imported" in text
    assert all(name in text for name in bad_images())
    assert "--on-bad-image skip" in text
    assert not list(out.iterdir())


@FORMS
def test_bad_images_are_skipped_on_request(tmp_path, form):
    given = form(tmp_path, {"dog/a.png": png(COLOUR[0]), **bad_images(), "dog/z.png": png(COLOUR[1])})
    report = import_domain("photo", [given], tmp_path / "out", on_bad_image="skip")
    assert report.images == {"dog": 2}
    assert len(report.skipped) == 6
    found = contents(report.path)
    np.testing.assert_array_equal(found[0][1], COLOUR[0])
    np.testing.assert_array_equal(found[7][1], COLOUR[1])


def test_only_bad_images(tmp_path):
    given = as_folder(tmp_path, bad_images())
    assert_error(tmp_path, "6 of 6 images", "photo", given, on_bad_image="skip")


def test_enormous_image(tmp_path):
    file = io.BytesIO()
    Image.new("1", (20_000, 6_000)).save(file, "PNG")
    given = as_folder(tmp_path, {"dog/huge.png": file.getvalue()})
    assert_error(tmp_path, r"huge\.png: too many pixels: 20,000×6,000, at most 100 million", "photo", given)


def test_special_file(tmp_path):
    given = as_folder(tmp_path, {"dog/1.png": png(COLOUR[0])})
    os.mkfifo(given / "dog" / "pipe.png")
    assert_error(tmp_path, r"pipe\.png: is a pipe or a device", "photo", given)


# --- hostile and foreign files


@pytest.mark.parametrize(
    "name", ["../evil.png", "/etc/evil.png", "a/../../evil.png", "C:/evil.png", "dog\\..\\evil.png"]
)
def test_zip_with_path_traversal(tmp_path, name):
    given = image_zip(tmp_path / "evil.zip", {"dog/1.png": png(COLOUR[0]), name: png(COLOUR[1])})
    assert_error(tmp_path, r"evil\.zip is refused", "photo", given)


def test_zip_with_a_link(tmp_path):
    info = zipfile.ZipInfo("dog/1.png")
    info.external_attr = 0o120777 << 16
    assert_error(tmp_path, "a link instead of a file", "photo", image_zip(tmp_path / "x.zip", {info: b"/etc/hostname"}))


def test_zip_with_one_name_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("dog/1.png", png(COLOUR[0]))
        archive.writestr("dog//1.png", png(COLOUR[1]))
    assert_error(tmp_path, "the same name twice", "photo", tmp_path / "x.zip")


def test_damaged_zip(tmp_path):
    path = image_zip(tmp_path / "x.zip", {f"dog/{k}.png": png(COLOUR[k]) for k in range(5)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert_error(tmp_path, r"x\.zip is not a readable zip file", "photo", path)
    path.write_bytes(whole[:100] + b"!" + whole[101:])
    assert_error(tmp_path, r"1 of 5 images .*\n.*dog/0\.png: damaged in the archive", "photo", path)


def test_empty_zip(tmp_path):
    assert_error(tmp_path, "holds no images", "photo", image_zip(tmp_path / "x.zip", {}))


def test_pickles_are_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    files = {
        "x.pkl": pickle.dumps(Bomb()),
        "x.npy": None,
        "x.npz": None,
        "x.pt": None,
    }
    np.save(tmp_path / "x.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", X=np.array([Bomb()], dtype=object), y=LABELS[:1])
    image_zip(tmp_path / "x.pt", {"archive/data.pkl": pickle.dumps(Bomb()), "archive/version": b"3"})
    (tmp_path / "x.pkl").write_bytes(files["x.pkl"])
    for name, match in {
        "x.pkl": "it is a pickle",
        "x.npy": "single array",
        "x.npz": "never pickled objects",
        "x.pt": "holds pickled objects",
    }.items():
        assert_error(tmp_path, match, "mnist", tmp_path / name)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "the file is empty"),
        (b"\n<!doctype HTML>", "it is a web page"),
        (b"whatever", "found a file beginning with b'whatever'"),
        (gzip.compress(b"whatever", mtime=0), "holds no idx file"),
        (gzip.compress(bytes(257) + b"ustar", mtime=0), "Unpack it first"),
        (bytes(257) + b"ustar", "tar archive"),
        (b"PK\x03\x04 no zip", "not a readable zip file"),
    ],
)
def test_foreign_files(tmp_path, data, match):
    (tmp_path / "file").write_bytes(data)
    assert_error(tmp_path, match, "mnist", tmp_path / "file")


def test_missing_file(tmp_path):
    assert_error(tmp_path, "cannot read .*gone: No such file", "mnist", tmp_path / "gone")


def test_zip_around_a_mat(tmp_path):
    given = image_zip(tmp_path / "SynthDigits.zip", {"synth_train_32x32.mat": b"x"})
    assert_error(tmp_path, r"holds synth_train_32x32\.mat: unpack it first", "syn", given)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\0\0\x08\x03", b"MATLAB 5.0 MAT-file", b"BZh9", b"PK\x03\x04"]))
def test_arbitrary_bytes_are_refused(tmp_path_factory, data, head):
    folder = tmp_path_factory.mktemp("any")
    (folder / "file").write_bytes(head + data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RatpError):
            import_domain("mnist", [folder / "file"], folder / "out")
    assert not (folder / "out").exists()


# --- real data


def needs(path):
    return pytest.mark.skipif(not path.exists(), reason=f"no {path.name} in {path.parent}")


def part_of(source, target, keep):
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as part:
        for name in archive.namelist():
            if keep(name):
                part.writestr(name, archive.read(name))
    return target


@needs(SHARED / "digits" / "usps.zip")
def test_real_usps(tmp_path):
    given = part_of(SHARED / "digits" / "usps.zip", tmp_path / "usps.zip", lambda name: name.endswith("7.png"))
    report = import_domain("usps", [given], tmp_path / "out")
    assert list(report.images) == list(DIGITS)
    with zipfile.ZipFile(given) as archive:
        wanted = [
            (name.split("/")[1], np.asarray(Image.open(io.BytesIO(archive.read(name))))) for name in archive.namelist()
        ]
    found = [(label, image.tobytes()) for label, image in contents(report.path).values()]
    assert sorted(found) == sorted((label, image.tobytes()) for label, image in wanted)


@needs(SHARED / "digits" / "usps.zip")
def test_real_usps_as_libsvm(tmp_path):
    with zipfile.ZipFile(SHARED / "digits" / "usps.zip") as archive:
        names = archive.namelist()[:200]
        images = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in names])
    labels = [int(name.split("/")[1]) for name in names]
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(libsvm(images, labels)))
    assert_holds(import_domain("usps", [tmp_path / "usps.bz2"], tmp_path / "out").path, images, labels)


@needs(SHARED / "pacs" / "photo.zip")
def test_real_pacs(tmp_path):
    given = part_of(SHARED / "pacs" / "photo.zip", tmp_path / "given.zip", lambda name: name.endswith("3.webp"))
    report = import_domain("photo", [given], tmp_path / "out", classes=PACS_CLASSES[:3])
    assert list(report.images) == ["dog", "elephant", "giraffe"]
    assert {image.shape for _, image in contents(report.path).values()} == {(227, 227, 3)}


# --- the catalogue


def test_catalogue():
    assert list(CATALOGUE) == ["digits", "pacs", "domainnet", "domainnet_original"]
    assert set(data_set("digits").domains) == {"mnist", "mnist_m", "svhn", "syn", "usps"}
    assert set(data_set("pacs").domains) == {"photo", "art_painting", "cartoon", "sketch"}
    assert set(data_set("domainnet").domains) == {"clipart", "infograph", "painting", "quickdraw", "real", "sketch"}
    assert sum(source.published for source in data_set("domainnet").domains.values()) == 26_013
    assert sum(source.published for source in data_set("pacs").domains.values()) == 9_991
    assert [data_set("digits").domain(name).images() for name in ("mnist", "svhn", "usps")] == [60_000, 73_257, 9_298]
    for entry in CATALOGUE.values():
        for source in entry.domains.values():
            assert source.manual.startswith("By hand: download ")
            commands = [line.split() for line in source.manual.splitlines() if line.startswith("  ratp data ")]
            assert [words[2] for words in commands] == ["import", "build"] if source.rebuilds else ["import"]
            for words in commands:
                found, domains = find_sources(words[3])
                assert found is entry
                assert source in domains
            for file in source.files:
                assert all(url.startswith(("https://", "http://")) for url in file.urls)
                assert all(url.endswith(file.name) for url in file.urls)
                assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32


def test_unknown_names():
    with pytest.raises(RatpError, match="Did you mean 'digits'"):
        data_set("digit")
    with pytest.raises(RatpError, match="Did you mean 'mnist_m'"):
        data_set("digits").domain("mnist-m")


@pytest.mark.parametrize(
    ("name", "data", "domains"),
    [
        ("mnist", "digits", ["mnist"]),
        ("MNIST-M", "digits", ["mnist_m"]),
        ("digits/syn", "digits", ["syn"]),
        ("pacs/sketch", "pacs", ["sketch"]),
        ("domainnet/sketch", "domainnet", ["sketch"]),
        ("pacs", "pacs", ["photo", "art_painting", "cartoon", "sketch"]),
        ("domainnet-original", "domainnet_original", ["clipart", "painting"]),
    ],
)
def test_names_resolve_to_domains(name, data, domains):
    found, sources = find_sources(name)
    assert (found.name, [source.name for source in sources]) == (data, domains)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sketch", "'sketch' is a domain of 2 data sets. Write pacs/sketch or domainnet/sketch."),
        ("mnits", "unknown data set or domain 'mnits'. Did you mean 'mnist'?"),
        ("pacs/phto", "unknown domain of pacs 'phto'. Did you mean 'photo'?"),
        ("pcas/photo", "unknown data set 'pcas'. Did you mean 'pacs'?"),
        ("", "unknown data set or domain ''"),
    ],
)
def test_unknown_or_ambiguous_name(name, expected):
    with pytest.raises(RatpError) as caught:
        find_sources(name)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(("data", "domain"), [("digits", "syn"), ("digits", "mnist_m"), ("pacs", "photo")])
def test_domains_without_an_address_say_how_to_get_them(tmp_path, data, domain):
    with pytest.raises(RatpError, match=rf"(?s)no address.*\n  https://.*\n  ratp data import ({domain}|{data}) "):
        fetch_domain(data, domain, tmp_path)


class Response(io.BytesIO):
    status = 200

    def __init__(self, data):
        super().__init__(data)
        self.headers = Message()
        self.headers["Content-Length"] = str(len(data))


def test_fetch(tmp_path, monkeypatch):
    web = {"images": idx(GREY), "labels": idx(LABELS), "test": b"never asked for"}
    files = [SourceFile(name, (f"https://host/{name}",), len(web[name]), None, "train", 0) for name in ("labels",)]
    files += [SourceFile("images", ("https://host/images",), None, None, "train", 12)]
    files += [SourceFile("test", ("https://host/test",), None, None, "test", 5)]
    source = DomainSource("mnist", tuple(files), ("train",), terms="for tests only", published=13)
    monkeypatch.setitem(data_set("digits").domains, "mnist", source)
    requests = []

    def opener(request, timeout):
        requests.append(request.full_url)
        return Response(web[request.full_url.rsplit("/", 1)[1]])

    report = fetch_domain("digits", "mnist", tmp_path, opener=opener)
    assert_holds(tmp_path / "digits" / "mnist.zip", GREY, LABELS)
    assert requests == ["https://host/labels", "https://host/images"]
    assert report.notes == ("mnist has 12 images; it was published with 13.", "mnist: for tests only.")
    assert sorted(path.name for path in (tmp_path / "downloads" / "digits").iterdir()) == ["images", "labels"]
    with pytest.raises(RatpError, match="exists already"):
        fetch_domain("digits", "mnist", tmp_path, opener=opener)
    fetch_domain("digits", "mnist", tmp_path, opener=opener, replace=True)
    assert len(requests) == 2


def test_fetch_counts(tmp_path, monkeypatch):
    web = {"images": idx(GREY[:3]), "labels": idx(LABELS[:3])}
    files = [SourceFile(name, (f"https://host/{name}",), images=60_000 * (name == "images")) for name in web]
    monkeypatch.setitem(data_set("digits").domains, "mnist", DomainSource("mnist", tuple(files)))
    with pytest.raises(RatpError, match="should have 60,000 images, found 3"):
        fetch_domain(
            "digits", "mnist", tmp_path, opener=lambda request, _: Response(web[request.full_url.rsplit("/", 1)[1]])
        )
    assert not (tmp_path / "digits").exists()
