"""Domains of published sets found in what a user has, and imported as the benchmark has them."""

from __future__ import annotations

import os

import pytest
from made_images import png, write_files, write_zip

from ratp.data.catalogue import DOMAINNET_10
from ratp.data.catalogue.fetch import Step, domains_in, import_published
from ratp.errors import RatpError


def pictures(*domains, around="", classes=("dog", "tree")):
    return {
        f"{around}{domain}/{label}/pic.png": png(seed=k)
        for k, (domain, label) in enumerate((domain, label) for domain in domains for label in classes)
    }


def found(root, data, *inputs):
    return {
        name: [os.path.relpath(path, root) for path in paths]
        for name, paths in domains_in(data, [root / given for given in inputs]).items()
    }


@pytest.mark.parametrize("around", ["", "pacs_data/", "PACS/kfold/"])
@pytest.mark.parametrize("packed", [True, False])
def test_all_domains_of_one_folder_or_zip(tmp_path, around, packed):
    files = pictures("photo", "Art Painting", "sketch", around=around)
    given = write_zip(tmp_path / "given.zip", files) if packed else write_files(tmp_path / "given", files)
    assert found(tmp_path, "pacs", given.name) == {name: [given.name] for name in ("photo", "art_painting", "sketch")}


def test_a_folder_of_zips_and_the_lists_beside_them(tmp_path):
    """As a browser leaves them."""
    files = {"clipart_train.txt": b"clipart/dog/pic.png 91\n", "clipart_test.txt": b"clipart/tree/pic.png 315\n"}
    given = write_files(tmp_path / "given", {**files, "other.zip": b"", "readme.txt": b"hello"})
    for domain in ("clipart", "real"):
        write_zip(given / f"{domain}.zip", pictures(domain))
    assert found(tmp_path, "domainnet", "given") == {
        "clipart": ["given/clipart.zip", "given/clipart_test.txt", "given/clipart_train.txt"],
        "real": ["given/real.zip"],
    }


def test_zips_with_classes_at_root_are_named_by_file(tmp_path):
    write_zip(tmp_path / "photo.zip", {"dog/1.png": png()})
    assert found(tmp_path, "pacs", "photo.zip") == {"photo": ["photo.zip"]}


def test_no_domain_of_the_set(tmp_path):
    write_zip(tmp_path / "given.zip", pictures("clipart", "quickdraw"))
    with pytest.raises(RatpError, match=r"nothing of pacs is there.*photo, .*found clipart, quickdraw"):
        domains_in("pacs", [tmp_path / "given.zip"])


def test_unrecognised_files(tmp_path):
    (tmp_path / "train_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    with pytest.raises(RatpError, match=r"one domain at a time, e\.g\. ratp data import digits/mnist train_32x32\.mat"):
        domains_in("digits", [tmp_path / "train_32x32.mat"])


def test_collection_files_are_matched_by_name(tmp_path):
    names = ("mnist_data", "mnistm_with_label", "svhn_train_32x32", "svhn_test_32x32", "usps_28x28", "readme")
    write_files(tmp_path / "given", {f"Digit-Five/{name}.mat": b"MATLAB 5.0 MAT-file" for name in names})
    expected = {
        "mnist": ["given/Digit-Five/mnist_data.mat"],
        "mnist_m": ["given/Digit-Five/mnistm_with_label.mat"],
        "svhn": ["given/Digit-Five/svhn_train_32x32.mat", "given/Digit-Five/svhn_test_32x32.mat"],
        "usps": ["given/Digit-Five/usps_28x28.mat"],
    }
    assert found(tmp_path, "digits", "given") == expected
    assert found(tmp_path, "digits", "given/Digit-Five/usps_28x28.mat") == {"usps": expected["usps"]}


def test_only_the_classes_of_the_benchmark(tmp_path):
    given = write_files(tmp_path / "given", pictures("real", classes=(*DOMAINNET_10, "zebra")))
    reported = []
    report = import_published(
        "domainnet", "real", [given], tmp_path / "data", lambda *progress: reported.append(progress)
    )
    assert report.path == tmp_path / "data" / "domainnet" / "real.zip"
    assert set(report.images) == set(DOMAINNET_10)
    assert "1 images of 1 other classes were left out." in report.notes
    assert report.notes[-1] == "real has 10 images; it was published with 5,856."
    assert reported[-1] == (Step("real", "images"), 10, 10)
