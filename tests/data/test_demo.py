"""The embedded stream is what it says: balanced, shuffled, reproducible, with an honest test part."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ratp.data import demo
from ratp.data.demo import CLASSES, DOMAINS, demo_domain, scan_ids
from ratp.data.demo.drawing import faces, has_figures, heavy
from ratp.errors import NotCachedWarning, RatpError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def domains(cache):
    return {code: demo_domain(code, cache) for code in DOMAINS}


def test_names():
    assert DOMAINS == ("scan", "photo", "font", "street")
    assert tuple("0123456789") == CLASSES


@pytest.mark.parametrize(("code", "size", "held_out"), [("scan", 1797, 450), *((c, 2400, 600) for c in DOMAINS[1:])])
def test_sizes(domains, code, size, held_out):
    domain = domains[code]
    assert domain.name == code
    assert domain.classes == CLASSES
    assert domain.images.shape == (size, 3, 32, 32)
    assert int(domain.held_out.sum()) == held_out


@pytest.mark.parametrize("code", DOMAINS)
def test_classes_are_balanced_in_both_parts(domains, code):
    domain = domains[code]
    for part in (domain.held_out, ~domain.held_out):
        counts = domain.labels[part].bincount(minlength=10).float()
        assert counts.max() / counts.min() < 1.1


@pytest.mark.parametrize("code", DOMAINS)
def test_every_slice_has_all_classes_and_both_parts(domains, code):
    domain = domains[code]
    for start in range(0, len(domain) - 300, 300):
        assert domain.labels[start : start + 300].bincount(minlength=10).min() > 8
        assert 40 < int(domain.held_out[start : start + 300].sum()) < 110


def test_no_scan_is_in_both_parts(domains):
    train, test = set(), set()
    for code in ("scan", "photo"):
        scans, held_out = scan_ids(code), domains[code].held_out.numpy()
        assert scans.shape == held_out.shape
        train |= set(scans[~held_out].tolist())
        test |= set(scans[held_out].tolist())
    assert not train & test
    assert train | test == set(range(1797))
    assert 0.2 <= len(test) / 1797 <= 0.26


def test_images_match_their_scan_ids(domains):
    from sklearn.datasets import load_digits

    data = load_digits()
    scans = scan_ids("scan")
    assert sorted(scans.tolist()) == list(range(1797))
    ink = domains["scan"].images[:, 0].float()
    back = torch.nn.functional.adaptive_avg_pool2d(ink[:, 3:-3, 3:-3], 8).flatten(1).numpy()
    for code in ("scan", "photo"):
        assert (domains[code].labels.numpy() == data.target[scan_ids(code)]).all()
    for k in range(0, 1797, 29):
        assert np.corrcoef(back[k], data.data[scans[k]])[0, 1] > 0.9
    # Where there is no ink, the photograph is untouched; full ink shows its negative. Laying the ink on again
    # makes the negative positive: the image gets smoother. A wrong scan would leave extra edges.
    by_scan = torch.empty_like(ink)
    by_scan[torch.from_numpy(scans)] = ink
    photo = domains["photo"].images.float()
    expected_ids = torch.from_numpy(scan_ids("photo"))
    right = (photo - by_scan[expected_ids][:, None]).abs()
    wrong = (photo - by_scan[expected_ids.roll(1)][:, None]).abs()

    def edges(images):
        return images.diff(dim=3).abs().mean((1, 2, 3)) + images.diff(dim=2).abs().mean((1, 2, 3))

    assert (edges(right) < edges(wrong)).float().mean() > 0.9


@pytest.mark.parametrize("code", DOMAINS)
def test_no_duplicate_images(domains, code):
    images = domains[code].images.flatten(1).numpy()
    assert len({image.tobytes() for image in images}) == len(images)


def test_domains_look_different(domains):
    scan = domains["scan"].images
    assert (scan == scan[:, :1]).all(), "scans are grey"
    assert (scan[:, :, 0] == 0).all(), "with a black frame"
    colour = {code: d.images.float().std(dim=1).mean() for code, d in domains.items()}
    assert colour["font"] > 1.5 * colour["photo"] > 0
    assert colour["font"] > 2 * colour["street"] > 0
    for code in ("photo", "font", "street"):
        spread = domains[code].images.float().mean((1, 2, 3)).std()
        assert spread > 20, "bright and dark images alike"


def test_building_is_deterministic(domains, monkeypatch):
    assert demo._BUILDERS["scan"]().fingerprint() == domains["scan"].fingerprint()
    monkeypatch.setattr(demo, "_TRAIN_PER_CLASS", 15)
    monkeypatch.setattr(demo, "_TEST_PER_CLASS", 5)
    first = {code: demo._BUILDERS[code]().fingerprint() for code in DOMAINS}
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    second = {code: demo._BUILDERS[code]().fingerprint() for code in reversed(DOMAINS)}
    assert first == second
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_the_second_load_reads_the_cache_and_is_quick(domains, cache, monkeypatch):
    for code in DOMAINS:
        monkeypatch.setitem(demo._BUILDERS, code, None)
    start = time.perf_counter()
    again = {code: demo_domain(code, cache) for code in DOMAINS}
    assert time.perf_counter() - start < 1
    assert {c: d.fingerprint() for c, d in again.items()} == {c: d.fingerprint() for c, d in domains.items()}


def test_a_damaged_cache_is_rebuilt(domains, tmp_path, monkeypatch):
    monkeypatch.setitem(demo._BUILDERS, "scan", lambda: domains["scan"])
    demo_domain("scan", tmp_path)
    (path,) = (tmp_path / "demo").iterdir()
    assert path.name.startswith("scan-")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert demo_domain("scan", tmp_path).fingerprint() == domains["scan"].fingerprint()
    assert path.read_bytes() == whole


def test_unwritable_cache_is_tolerated(domains, tmp_path, monkeypatch):
    monkeypatch.setitem(demo._BUILDERS, "scan", lambda: domains["scan"])
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RATP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(NotCachedWarning):
        assert demo_domain("scan") is domains["scan"]


def test_the_key_follows_code_and_libraries(monkeypatch, tmp_path):
    """An image is never taken from the cache after the code that draws it was changed."""

    def key():
        demo._recipe_key.cache_clear()
        return demo._recipe_key()

    keys = [key(), key()]
    assert keys[0] == keys[1]
    folder = Path(demo.__file__).parent
    for edited in ("__init__.py", "drawing.py", "street.py"):
        for name in ("__init__.py", "drawing.py", "street.py"):
            (tmp_path / name).write_bytes((folder / name).read_bytes() + (b"#" if name == edited else b""))
        with monkeypatch.context() as patch:
            patch.setattr(demo, "__file__", str(tmp_path / "__init__.py"))
            keys.append(key())
    for library in ("pillow", "scikit-learn", "matplotlib", "numpy"):
        with monkeypatch.context() as patch:
            patch.setattr(demo, "version", lambda name, changed=library: "0" if name == changed else "1")
            keys.append(key())
    assert len(set(keys)) == 8
    assert key() == keys[0]


def test_unknown_code_suggests_the_nearest():
    with pytest.raises(RatpError, match=r"unknown demo domain 'streat'\. Did you mean 'street'\?"):
        demo_domain("streat")
    with pytest.raises(RatpError, match="Valid: photo, scan"):
        scan_ids("font")


def test_only_fonts_that_can_write_digits_are_used():
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    used = {face.name: face for face in faces()}
    assert len(used) > 15
    assert {path.name for path in fonts.glob("*.ttf") if has_figures(path)} == used.keys()
    assert {"DejaVuSans.ttf", "DejaVuSerif-Bold.ttf", "STIXGeneral.ttf", "cmr10.ttf"} <= used.keys()
    assert not used.keys() & {"cmex10.ttf", "cmsy10.ttf", "STIXSizThreeSymReg.ttf", "LastResortHE-Regular.ttf"}
    for face in used.values():
        shapes = {glyph.resize((8, 16)).tobytes() for glyph in face.glyphs}
        assert len(shapes) == 10, "ten figures, all different"
        assert abs(face.glyphs[0].height - 64) <= 2
    strong = {face.name for face in heavy(list(used.values()))}
    assert {"DejaVuSans-Bold.ttf", "STIXGeneralBol.ttf"} <= strong
    assert not strong & {"DejaVuSerif.ttf", "STIXGeneral.ttf", "cmr10.ttf"}


@pytest.mark.slow
def test_import_is_light():
    code = (
        "import sys, ratp.data.demo, ratp.data.cache.folder, ratp.data.contact_sheet;"
        "print([m for m in ('matplotlib', 'sklearn', 'PIL', 'torchvision') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
