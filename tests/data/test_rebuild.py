"""Rebuilt sets follow their recipes to the pixel, say that they are rebuilt, and can be read."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from ratp.data.catalogue.import_ import import_domain
from ratp.data.catalogue.rebuild import (
    build_mnist_m,
    build_syn,
    common_faces,
    further_faces,
    origin,
    provenance,
    syn_image,
    writes_figures,
)
from ratp.data.contact_sheet import contact_sheet
from ratp.data.domain import LabelledDomain
from ratp.errors import RatpError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def handwriting(count=40, side=28):
    """Black squares with a grey-edged white stroke each, three channels, as a labelled domain has them."""
    images = np.zeros((count, 3, side, side), np.uint8)
    for k in range(count):
        images[k, :, 5:20, 4 + k % 15] = 255
        images[k, :, 5:20, 5 + k % 15] = 90
    return SimpleNamespace(images=images, labels=np.arange(count) % 10)


def read(path):
    """Images and labels of a canonical zip, by number."""
    with zipfile.ZipFile(path) as archive:
        found = {
            int(Path(name).stem): (np.asarray(Image.open(io.BytesIO(archive.read(name)))), int(name.split("/")[1]))
            for name in archive.namelist()
        }
    return np.stack([found[k][0] for k in sorted(found)]), np.array([found[k][1] for k in sorted(found)])


def position(patch, photograph):
    """Where in the photograph the patch is from: row and column, or None."""
    windows = np.lib.stride_tricks.sliding_window_view(photograph, patch.shape)[:, :, 0]
    for row, column in np.argwhere((windows[:, :, 0, 0] == patch[0, 0]).all(axis=2)):
        if (windows[row, column] == patch).all():
            return row, column
    return None


def is_patch(patch, photograph):
    return position(patch, photograph) is not None


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photographs"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40 + 7 * k, 50, 3), dtype=np.uint8) for k in range(3)]
    for k, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{k}.png")
    return folder, images


# --- MNIST-M


def test_mnist_m_is_the_difference_to_a_patch(tmp_path, photographs):
    folder, images = photographs
    digits = handwriting()
    report = build_mnist_m(digits, [folder], tmp_path / "out", seed=1, size=32)
    found, labels = read(report.path)
    assert found.shape == (40, 32, 32, 3)
    np.testing.assert_array_equal(labels, digits.labels)
    ink = np.pad(digits.images.transpose(0, 2, 3, 1), ((0, 0), (2, 2), (2, 2), (0, 0)))
    patches = np.where(ink > 0, 255 - found, found)
    sources = [[is_patch(patch, image) for image in images] for patch in patches]
    assert all(any(row) for row in sources)
    assert all(any(row[k] for row in sources) for k in range(3))


def test_mnist_m_by_the_formula(tmp_path, photographs):
    folder, images = photographs
    digits = handwriting()
    found, _ = read(build_mnist_m(digits, [folder], tmp_path / "out", seed=1, solid=False).path)
    assert found.shape == (40, 28, 28, 3)
    for image, digit in zip(found, digits.images.transpose(0, 2, 3, 1).astype(int), strict=True):
        places = [(photograph, position(image[20:], photograph)) for photograph in images]  # no ink below row 20
        photograph, (row, column) = next((photograph, place) for photograph, place in places if place)
        patch = photograph[row - 20 : row + 8, column : column + 28].astype(int)
        np.testing.assert_array_equal(image, np.abs(patch - digit))


def test_default_photographs(tmp_path):
    digits = handwriting(4)
    report = build_mnist_m(digits, None, tmp_path / "out", seed=0, size=32)
    assert any("less varied" in note for note in report.notes)
    found, _ = read(report.path)
    ink = np.pad(digits.images.transpose(0, 2, 3, 1), ((0, 0), (2, 2), (2, 2), (0, 0)))
    photos = load_sample_images().images
    assert all(any(is_patch(patch, photo) for photo in photos) for patch in np.where(ink > 0, 255 - found, found))


def test_mnist_m_from_a_zip_and_from_memory_agree(tmp_path, photographs):
    digits = handwriting()
    order = np.argsort(digits.labels, kind="stable")
    digits = SimpleNamespace(images=digits.images[order], labels=digits.labels[order])
    np.savez(tmp_path / "x.npz", X=digits.images[:, 0], y=digits.labels)
    mnist = import_domain("mnist", [tmp_path / "x.npz"], tmp_path / "data").path
    found = [
        read(build_mnist_m(given, [photographs[0]], tmp_path / str(k), seed=3, count=17).path)
        for k, given in enumerate([mnist, digits])
    ]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_mnist_m_from_a_labelled_domain(tmp_path, photographs):
    digits = handwriting()
    domain = LabelledDomain(
        "mnist", torch.from_numpy(digits.images), torch.from_numpy(digits.labels), tuple("0123456789")
    )
    first = build_mnist_m(domain, [photographs[0]], tmp_path / "a", seed=5).path.read_bytes()
    assert build_mnist_m(digits, [photographs[0]], tmp_path / "b", seed=5).path.read_bytes() == first


def test_mnist_m_depends_on_the_seed_alone(tmp_path, photographs):
    def build(name, seed):
        return build_mnist_m(handwriting(), [photographs[0]], tmp_path / name, seed, count=20).path.read_bytes()

    assert build("a", 1) == build("b", 1)
    assert build("a2", 1) != build("c", 2)


def test_unusable_photographs_are_named(tmp_path, photographs):
    folder, _ = photographs
    (folder / "broken.jpg").write_bytes(b"no image")
    Image.new("RGB", (27, 100)).save(folder / "small.png")
    (folder / "readme.txt").write_text("hello")
    notes = build_mnist_m(handwriting(5), [folder], tmp_path / "out", seed=0).notes
    assert [note for note in notes if "left out" in note] == [
        note for note in notes if "broken.jpg" in note or "27×100 pixels are too few" in note
    ]
    assert len([note for note in notes if "left out" in note]) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"photographs": []}, "no photograph of at least 28×28 pixels in no folder"),
        ({"photographs": [Path("gone.png")]}, r"no photograph .*\n.*gone\.png: No such file"),
        ({"count": 41}, "from 1 to the 40 digits there are, found 41"),
        ({"count": 0}, "found 0"),
        ({"size": 20}, "28×28 pixels do not fit into 20×20"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_impossible_mnist_m_requests(tmp_path, photographs, change, match):
    options = {"photographs": [photographs[0]], "seed": 0, **change}
    with pytest.raises(RatpError, match=match):
        build_mnist_m(handwriting(), out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_mnist_m_from_a_zip_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("mnist/cat/1.png", b"x")
    with pytest.raises(RatpError, match="holds no digits: its classes are cat"):
        build_mnist_m(tmp_path / "x.zip", None, tmp_path / "out", seed=0)


@pytest.mark.skipif(not (SHARED / "digits").exists(), reason=f"no digits in {SHARED}")
def test_mnist_m_is_built_like_the_release(tmp_path):
    """Of the released images, the ink is exactly the negative of a smooth patch; so is that of ours."""
    report = build_mnist_m(SHARED / "digits" / "mnist.zip", None, tmp_path / "out", seed=0, count=300, size=32)
    ours, _ = read(report.path)
    with zipfile.ZipFile(SHARED / "digits" / "mnist_m.zip") as archive:
        theirs = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(n)))) for n in archive.namelist()[:300]])
    assert ours.shape == theirs.shape

    def roughness(images, rows):
        return np.abs(np.diff(images[:, rows].astype(float), axis=2)).mean()

    for images in (ours, theirs):  # no digit reaches the margin, all cross the middle
        assert roughness(images, slice(0, 2)) < 0.8 * roughness(images, slice(10, 22))


# --- SYN


def test_syn(tmp_path):
    report = build_syn(tmp_path / "out", seed=0, count=200)
    images, labels = read(report.path)
    assert images.shape == (200, 32, 32, 3)
    np.testing.assert_array_equal(labels, np.arange(200) % 10)
    assert report.images == {str(digit): 20 for digit in range(10)}
    assert report.notes == (f"syn is rebuilt with {len(common_faces())} fonts, not the original release.",)
    spread = images.reshape(200, -1, 3).astype(float).std(axis=1).max(axis=1)
    assert spread.min() > 8
    assert len({image.tobytes() for image in images}) == 200


def test_syn_depends_on_the_seed_alone_and_grows_at_its_end(tmp_path):
    small, _ = read(build_syn(tmp_path / "a", seed=4, count=20).path)
    large, _ = read(build_syn(tmp_path / "b", seed=4, count=40).path)
    other, _ = read(build_syn(tmp_path / "c", seed=5, count=20).path)
    np.testing.assert_array_equal(large[:20], small)
    assert (other != small).any(axis=(1, 2, 3)).all()


def test_syn_has_numbers_of_one_to_three_figures_and_the_label_in_the_middle(monkeypatch):
    counts = []

    def counting(*args, **kwargs):
        row = number(*args, **kwargs)
        columns = np.asarray(row.image).any(axis=0)
        middle = round(row.middle[0])
        half = row.width // 2 + 1
        counts.append(1 + bool(columns[: middle - half].any()) + bool(columns[middle + half :].any()))
        return row

    from ratp.data.catalogue import rebuild

    number = rebuild._number
    monkeypatch.setattr(rebuild, "_number", counting)
    typefaces = common_faces()
    for k in range(300):
        syn_image(np.random.default_rng(k), typefaces, k % 10)
    shares = np.bincount(counts, minlength=4)[1:] / 300
    assert shares.min() > 0.1
    assert shares.argmax() == 1  # most numbers have two figures


def test_syn_has_strong_contrast_soft_edges_and_the_digit_near_the_middle():
    """What the first recipe had wrong; the ranges hold the calibration set, whose values are in the comments."""
    typefaces = common_faces()
    images = np.stack([syn_image(np.random.default_rng([k, 9]), typefaces, k % 10) for k in range(200)]).astype(float)
    luma = images.mean(axis=3)
    clipped = ((images == 0) | (images == 255)).all(axis=3).mean(axis=(1, 2))  # in black or white to the last channel
    assert 0.02 < clipped.mean() < 0.08  # 0.043
    assert 0.25 < (clipped > 0.01).mean() < 0.6  # 0.41
    assert 50 < luma.std(axis=(1, 2)).mean() < 70  # 59
    steps = np.abs(np.diff(luma, axis=2)).max(axis=(1, 2)) / np.ptp(luma, axis=(1, 2))
    assert 0.3 < np.median(steps) < 0.45  # 0.37
    paper = np.median(luma[:, [0, 1, -2, -1]].reshape(200, -1), axis=1)
    ink = np.abs(luma - paper[:, None, None])
    ink /= ink.sum(axis=(1, 2), keepdims=True)
    across, down = (ink.sum(axis=axis) @ np.arange(32) for axis in (1, 2))
    assert np.abs([across.mean() - 15.5, down.mean() - 15]).max() < 1  # 15.8 and 15.1
    assert across.std() < 4  # 3.2
    assert down.std() < 2.6  # 2.1


@pytest.mark.slow
def test_rebuilt_syn_is_recognisable():
    """Nearest class mean of blurred contrast, trained and tested on different images, beats chance by far."""
    typefaces = common_faces()

    def features(seeds):
        rows = []
        for k in seeds:
            image = syn_image(np.random.default_rng(k), typefaces, k % 10).astype(float).mean(axis=2)
            contrast = np.abs(image - np.median(image))
            rows.append((contrast / contrast.max()).reshape(16, 2, 16, 2).mean(axis=(1, 3)).ravel())
        return np.stack(rows)

    train, test = features(range(1500)), features(range(1500, 2000))
    means = np.stack([train[np.arange(1500) % 10 == digit].mean(axis=0) for digit in range(10)])
    guess = np.square(test[:, None] - means).sum(axis=2).argmin(axis=1)
    assert (guess == np.arange(2000)[1500:] % 10).mean() > 0.3


def test_further_fonts(tmp_path):
    folder = tmp_path / "fonts"
    folder.mkdir()
    (folder / "sub").mkdir()
    import matplotlib

    shipped = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    (folder / "sub" / "mine.TTF").write_bytes((shipped / "cmtt10.ttf").read_bytes())
    (folder / "broken.otf").write_bytes(b"no font")
    (folder / "readme.txt").write_text("hello")
    found, notes = further_faces(folder)
    assert [face.name for face in found] == ["mine.TTF"]
    assert notes == (f"Font left out: {folder / 'broken.otf'} does not write the ten figures.",)
    report = build_syn(tmp_path / "out", seed=0, count=10, fonts=folder)
    assert provenance(report.path)["fonts"] == len(common_faces()) + 1
    assert report.notes[1:] == notes


def test_fonts_without_figures(tmp_path):
    import matplotlib

    shipped = Path(matplotlib.get_data_path()) / "fonts"
    assert not writes_figures(shipped / "ttf" / "STIXSizOneSymReg.ttf")
    assert writes_figures(shipped / "ttf" / "DejaVuSans.ttf")
    with pytest.raises(RatpError, match="no font that writes the ten figures"):
        build_syn(tmp_path / "out", seed=0, count=10, fonts=tmp_path)


@pytest.mark.parametrize(("count", "seed", "match"), [(0, 0, "positive number"), (10, -1, "must not be negative")])
def test_impossible_syn_requests(tmp_path, count, seed, match):
    with pytest.raises(RatpError, match=match):
        build_syn(tmp_path, seed, count)


# --- both


def test_provenance(tmp_path, photographs):
    mnist_m = build_mnist_m(handwriting(), [photographs[0]], tmp_path / "out", seed=7, count=12).path
    syn = build_syn(tmp_path / "out", seed=8, count=10).path
    for path, recipe, seed in ((mnist_m, "mnist_m 1", 7), (syn, "syn 2", 8)):
        origin_text = provenance(path)
        assert origin_text["rebuilt"] is True
        assert (origin_text["recipe"], origin_text["seed"]) == (recipe, seed)
        with zipfile.ZipFile(path) as archive:
            assert json.loads(archive.comment) == origin_text
    assert provenance(mnist_m)["count"] == 12


def test_provenance_of_anything_else(tmp_path):
    (tmp_path / "text").write_text("hello")
    for name, comment in {"a": b"", "b": b"hello", "c": b"[1]", "d": b'{"author": "me"}', "e": b"[" * 60_000}.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.comment = comment
    assert [provenance(tmp_path / name) for name in ("text", "gone", *"abcde")] == [None] * 7


def test_origin_is_a_phrase(tmp_path, photographs):
    mnist_m = build_mnist_m(handwriting(), [photographs[0]], tmp_path / "out", seed=3, count=12).path
    syn = build_syn(tmp_path / "out", seed=8, count=10).path
    for path, recipe in ((mnist_m, "mnist_m 1, seed 3"), (syn, "syn 2, seed 8")):
        assert origin(path) == f"rebuilt, not the published data: {recipe}"


@pytest.mark.parametrize(
    ("comment", "origin_text"),
    [
        (b"", None),
        (b'{"author": "me"}', None),
        (b'{"rebuilt": true}', "rebuilt, not the published data"),
        (b'{"rebuilt": true, "recipe": "a\\nb", "seed": 1}', "rebuilt, not the published data"),
        (b'{"rebuilt": true, "recipe": "syn 2", "seed": "PK\\u0005"}', "rebuilt, not the published data"),
        (b'{"rebuilt": true, "recipe": "PK\x05\x06 is no end", "seed": 1}', None),
    ],
)
def test_origin_of_other_zips(tmp_path, comment, origin_text):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("syn/0/1.png", b"x")
        archive.comment = comment
    assert origin(tmp_path / "x.zip") == origin_text


def test_origin_of_what_is_no_zip(tmp_path):
    (tmp_path / "short").write_bytes(b"PK\5\6")
    (tmp_path / "empty").write_bytes(b"")
    assert [origin(tmp_path / name) for name in ("short", "empty", "gone", ".")] == [None] * 4


def test_origin_reads_the_end_of_the_file_only(tmp_path):
    """A stream of large zips asks for it whenever it is opened."""
    path = build_syn(tmp_path, seed=2, count=10).path
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole) - 1000) + whole[-1000:])
    assert origin(path) == "rebuilt, not the published data: syn 2, seed 2"


def test_importing_a_rebuilt_set_keeps_the_label(tmp_path):
    path = build_syn(tmp_path / "a", seed=0, count=20).path
    again = import_domain("syn", [path], tmp_path / "b").path
    assert provenance(again) == provenance(path)


def test_published_sets_are_not_overwritten(tmp_path):
    (tmp_path / "syn.zip").write_bytes(b"the original")
    with pytest.raises(RatpError, match="exists already"):
        build_syn(tmp_path, seed=0, count=10)
    build_syn(tmp_path, seed=0, count=10, replace=True)


def test_rebuilt_sets_can_be_shown(tmp_path, photographs):
    domains = []
    for path in (
        build_syn(tmp_path, seed=0, count=30).path,
        build_mnist_m(handwriting(), [photographs[0]], tmp_path, seed=0).path,
    ):
        images, labels = read(path)
        pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        domains.append(LabelledDomain(path.stem, pixels, torch.from_numpy(labels), tuple("0123456789")))
    contact_sheet(domains, tmp_path / "sheet.png", columns=3)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 300
