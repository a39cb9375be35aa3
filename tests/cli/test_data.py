"""``ratp data``: sets are downloaded, imported and built as they are meant to be, and mistakes cost nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import struct
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.made_images import encode, make_picture, png, write_files, write_zip
from helpers import files_of, ratp
from loopback import Answer, running
from ratp.data import catalogue as sources
from ratp.data.catalogue import PACS_CLASSES, DomainSource, SourceFile, data_set
from ratp.data.formats import layouts

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (1000, 28, 28), dtype=np.uint8)
LABELS = (np.arange(1000) % 10).astype(np.uint8)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


WEB = {"images": idx(IMAGES), "labels": idx(LABELS)}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In an empty folder, without a terminal, a proxy or a data folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "RATP_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server():
    with running() as server:
        yield server


@pytest.fixture
def mnist(server, monkeypatch):
    """MNIST of the catalogue, on a server here; gives a function that changes what the server does with a file."""

    def serve(name, *answers):
        server.serve(f"/{name}", *answers)

    files = []
    for name, body in WEB.items():
        url = server.serve(f"/{name}", Answer(body))
        count = len(LABELS) if name == "images" else 0
        files.append(SourceFile(name, (url,), len(body), hashlib.sha256(body).hexdigest(), "all", count))
    source = DomainSource("mnist", tuple(files), manual="By hand: from X\n  ratp data import mnist F --data FOLDER")
    digits(monkeypatch, **{**data_set("digits").domains, "mnist": source})
    return serve


@pytest.fixture
def only_mnist(mnist, monkeypatch):
    """The catalogue's digits without svhn and usps, whose servers are out of reach."""
    known = data_set("digits").domains
    digits(monkeypatch, **{name: known[name] for name in ("mnist", "mnist_m", "syn")})
    return mnist


def digits(monkeypatch, **domains):
    """Has the catalogue list these domains as the digits."""
    monkeypatch.setitem(sources.CATALOGUE, "digits", replace(data_set("digits"), domains=domains))


def classes_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name.split("/")[1] for name in archive.namelist()}


class TestGet:
    def test_a_domain(self, mnist):
        result = ratp("data", "get", "mnist")
        assert (result.code, result.out) == (0, "digits/mnist: 1,000 images in 10 classes, data/digits/mnist.zip\n")
        assert "digits/mnist images: 765.6 KiB" in result.err
        assert "data/downloads/digits; you may remove them" in result.err
        assert classes_of("data/digits/mnist.zip") == set("0123456789")
        with zipfile.ZipFile("data/digits/mnist.zip") as archive:
            first = Image.open(io.BytesIO(archive.read("mnist/0/00000.png")))
        assert (np.asarray(first) == IMAGES[0]).all()

    def test_present_domain_is_reported_and_kept(self, mnist, server):
        assert ratp("data", "get", "mnist").code == 0
        before, request_count = files_of(Path("data")), len(server.log)
        result = ratp("data", "get", "digits/mnist")
        assert (result.code, result.out) == (0, "digits/mnist: there already, data/digits/mnist.zip\n")
        assert files_of(Path("data")) == before
        assert len(server.log) == request_count

    def test_folder_of_images_counts_as_present(self, mnist, server):
        write_files(Path("data/digits/mnist"), {"0/1.png": png()})
        assert ratp("data", "get", "mnist").out == "digits/mnist: there already, data/digits/mnist\n"
        assert not server.log

    @pytest.mark.parametrize("way", ["option", "variable"])
    def test_the_folder_can_be_chosen(self, mnist, way, monkeypatch):
        monkeypatch.setenv("RATP_DATA", "elsewhere")
        assert ratp("data", "get", "mnist", *(["--data", "mine"] if way == "option" else [])).code == 0
        assert os.listdir() == ["mine" if way == "option" else "elsewhere"]

    def test_manual_downloads_are_explained_and_rest_fetched(self, only_mnist):
        result = ratp("data", "get", "digits", "--data", "my data")
        assert result.code == 1
        assert Path("my data/digits/mnist.zip").exists()
        assert result.out.startswith("digits/mnist: 1,000 images")
        assert "digits/mnist_m: cannot be downloaded by a program" in result.err
        assert "  https://drive.google.com/" in result.err
        assert "\n  ratp data build mnist-m --data 'my data'\n" in result.err
        assert "FOLDER" not in result.err

    def test_shared_instructions_are_printed_once(self):
        result = ratp("data", "get", "pacs")
        assert result.code == 1
        assert "pacs/photo, pacs/art_painting, pacs/cartoon, pacs/sketch: cannot be downloaded" in result.err
        assert result.err.count("ratp data import pacs pacs_data.zip --data data") == 1
        assert os.listdir() == []

    def test_built_set_is_reported_as_built(self, only_mnist):
        assert ratp("data", "build", "syn", "--count", 10, "--seed", 3, "-q").code == 0
        result = ratp("data", "get", "syn")
        origin = "rebuilt, not the published data: syn 2, seed 3"
        assert result.out == f"digits/syn: there already, data/digits/syn.zip ({origin})\n"

    def test_failed_download(self, mnist):
        mnist("labels", Answer(status=404))
        result = ratp("data", "get", "mnist")
        assert (result.code, result.out) == (1, "")
        assert "error: digits/mnist: could not download labels:" in result.err
        assert "HTTP 404" in result.err
        assert "ratp data import mnist F --data data" in result.err
        assert not Path("data/digits").exists()

    def test_failed_download_does_not_stop_others(self, mnist, monkeypatch):
        broken = DomainSource("svhn", (SourceFile("x", ("http://127.0.0.1:1/x",)),), manual="By hand: so")
        monkeypatch.setattr("ratp.data.catalogue.download.time.sleep", lambda _: None)
        digits(monkeypatch, svhn=broken, mnist=data_set("digits").domains["mnist"])
        result = ratp("data", "get", "digits")
        assert result.code == 1
        assert result.out.startswith("digits/mnist: 1,000 images")
        assert "digits/svhn: could not download x" in result.err

    def test_wrong_bytes_are_rejected(self, mnist):
        mnist("images", Answer(WEB["images"][:-1] + b"!"))
        result = ratp("data", "get", "mnist")
        assert result.code == 1
        assert "expected a file with sha256" in result.err
        assert not Path("data/digits").exists()

    def test_ctrl_c_prints_a_line_and_next_call_resumes(self, mnist, server):
        """A real signal in the middle of the file."""

        part = Path("data/downloads/digits/images.part").absolute()

        def interrupt():
            give_up = time.monotonic() + 10
            while part.stat().st_size < 500_000 and time.monotonic() < give_up:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        mnist("images", Answer(WEB["images"], stop_after=600_000, then=interrupt), Answer(WEB["images"]))
        result = ratp("data", "get", "mnist")
        assert result.code == 130
        assert result.err.splitlines()[-1] == "Interrupted. The same command continues where it stopped."
        assert "Traceback" not in result.err
        kept = part.stat().st_size
        assert 500_000 <= kept <= 600_000
        server.released.set()
        assert ratp("data", "get", "mnist", "-q").code == 0
        ranges = [headers.get("Range") for path, headers in server.log if path == "/images"]
        assert ranges == [None, f"bytes={kept}-"]

    def test_json(self, only_mnist):
        result = ratp("data", "get", "digits", "--json")
        assert (result.code, result.err) == (1, "")
        found = json.loads(result.out)
        assert found["ok"] is False
        by_name = {row["domain"]: row for row in found["domains"]}
        assert by_name["digits/mnist"]["images"] == 1000
        assert by_name["digits/mnist"]["classes"]["3"] == 100
        assert by_name["digits/syn"]["path"] is None
        assert "By hand" in by_name["digits/syn"]["problem"]

    def test_quiet(self, mnist):
        result = ratp("data", "get", "mnist", "--quiet")
        assert (result.code, result.out, result.err) == (0, "", "")

    def test_folder_that_cannot_be_created(self, mnist):
        Path("file").write_text("mine")
        result = ratp("data", "get", "mnist", "--data", "file/x")
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: cannot create the data folder file/x: Not a directory.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["get", "mnits"], ["unknown data set or domain 'mnits'", "Did you mean 'mnist'?"]),
        (["get", "sketch"], ["2 data sets", "pacs/sketch or domainnet/sketch"]),
        (["get", "pacs/skech"], ["unknown domain of pacs", "'sketch'"]),
        (["import", "phto", "x.zip"], ["unknown data set or domain 'phto'", "'photo'"]),
        (["import", "mnist", "gone.gz", "lost.gz"], ["gone.gz does not exist", "lost.gz does not exist"]),
        (["get", "usps", "--on-bad-image", "skp"], ["unknown value of --on-bad-image: 'skp'", "'skip'"]),
        (["build", "mnist"], ["unknown set that can be built 'mnist'", "'mnist-m'", "Valid: mnist-m, syn"]),
        (["build", "mnist-m"], ["domain mnist of digits is not in data", "ratp data get digits"]),
        (["build", "syn", "--photographs", "x"], ["--photographs is for mnist-m"]),
        (["build", "mnist-m", "--fonts", "x"], ["--fonts is for syn"]),
        (["build", "syn", "--seed=-1"], ["seed must not be negative"]),
        (["build", "syn", "--count", "0"], ["positive number of images"]),
        (["build", "syn", "--fonts", "nowhere"], ["no font that writes the ten figures in nowhere"]),
    ],
)
def test_invalid_arguments(words, expected):
    result = ratp("data", *words)
    assert (result.code, result.out) == (2, "")
    assert all(line.startswith("error: ") for line in result.err.splitlines()), result.err
    for text in expected:
        assert text in result.err
    assert os.listdir() == []


class TestImport:
    @pytest.fixture
    def files(self):
        write_files(Path(), {f"{name}-idx": body for name, body in WEB.items()})
        return [f"{name}-idx" for name in WEB]

    @pytest.fixture
    def pacs(self, tmp_path):
        """PACS as it is published, small: a zip with a folder around it."""
        members = {
            f"PACS/kfold/{domain}/{label}/pic.jpg": encode(make_picture(seed=k), "JPEG")
            for k, (domain, label) in enumerate(
                (domain, label) for domain in data_set("pacs").domains for label in PACS_CLASSES
            )
        }
        return write_zip(tmp_path / "PACS.zip", members), members

    def test_a_domain(self, files):
        result = ratp("data", "import", "mnist", *files, "--data", "d")
        assert (result.code, result.out) == (0, "digits/mnist: 1,000 images in 10 classes, d/digits/mnist.zip\n")
        assert "mnist has 1,000 images; it was published with 60,000." in result.err

    def test_existing_domain_is_replaced_only_on_request(self, files):
        assert ratp("data", "import", "mnist", *files, "-q").code == 0
        before = files_of(Path("data"))
        result = ratp("data", "import", "mnist", *files)
        assert (result.code, result.out) == (2, "")
        assert result.err == (
            "error: data/digits/mnist.zip exists already. Remove it first, or replace it with --replace.\n"
        )
        assert files_of(Path("data")) == before
        assert ratp("data", "import", "mnist", *files, "--replace").code == 0

    def test_a_whole_set_with_its_bytes_as_they_are(self, pacs):
        path, members = pacs
        result = ratp("data", "import", "pacs", path)
        assert result.code == 0
        assert [line.split(",")[0] for line in result.out.splitlines()] == [
            f"pacs/{domain}: 7 images in 7 classes" for domain in data_set("pacs").domains
        ]
        for domain in data_set("pacs").domains:
            with zipfile.ZipFile(f"data/pacs/{domain}.zip") as archive:
                found = {name.split("/")[1]: archive.read(name) for name in archive.namelist()}
                assert all(name.endswith(".jpg") for name in archive.namelist())
            assert found == {label: members[f"PACS/kfold/{domain}/{label}/pic.jpg"] for label in PACS_CLASSES}

    def test_present_domains_of_a_set_are_kept(self, pacs):
        assert ratp("data", "import", "pacs/photo", pacs[0], "-q").code == 0
        os.utime("data/pacs/photo.zip", (1, 1))
        result = ratp("data", "import", "pacs", pacs[0])
        assert result.code == 0
        assert "pacs/photo: there already" in result.out
        assert os.path.getmtime("data/pacs/photo.zip") == 1
        assert ratp("data", "import", "pacs", pacs[0], "--replace", "-q").code == 0
        assert os.path.getmtime("data/pacs/photo.zip") != 1

    def test_missing_domains_of_a_set_are_reported(self, tmp_path):
        given = write_files(tmp_path / "given", {"photo/dog/1.png": png(), "cartoon/dog/1.png": png(1)})
        result = ratp("data", "import", "pacs", given)
        assert result.code == 0
        assert sorted(os.listdir("data/pacs")) == ["cartoon.zip", "photo.zip"]
        assert "Not in these files: art_painting, sketch." in result.err

    def test_damaged_images_are_named_or_left_out(self, tmp_path):
        given = write_files(
            tmp_path / "given", {"photo/dog/1.png": png(), "photo/dog/2.png": b"", "sketch/dog/1.png": png(1)}
        )
        result = ratp("data", "import", "pacs", given)
        assert result.code == 1
        assert "pacs/photo: 1 of 2 images of 'photo' cannot be read" in result.err
        assert "photo/dog/2.png: empty (0 bytes)" in result.err
        assert os.listdir("data/pacs") == ["sketch.zip"]
        result = ratp("data", "import", "pacs/photo", given, "--on-bad-image", "skip")
        assert result.code == 0
        assert "Left out: " in result.err
        assert sorted(os.listdir("data/pacs")) == ["photo.zip", "sketch.zip"]

    def test_no_domain_of_the_set(self, tmp_path):
        given = write_files(tmp_path / "given", {"cats/dog/1.png": png()})
        result = ratp("data", "import", "pacs", given)
        assert (result.code, os.listdir()) == (2, [])
        assert "nothing of pacs is there" in result.err

    def test_unwritable_folder(self, files):
        Path("file").write_text("mine")
        result = ratp("data", "import", "mnist", *files, "--data", "file")
        assert result.code == 2
        assert "cannot write file/digits/mnist.zip: Not a directory" in result.err

    def test_ctrl_c_leaves_no_partial_files(self, pacs, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        assert ratp("data", "import", "pacs/photo", pacs[0], "-q").code == 0
        monkeypatch.setattr(layouts, "whole_file", interrupted)
        result = ratp("data", "import", "pacs", pacs[0])
        assert result.code == 130
        assert result.err.splitlines()[-1].startswith("Interrupted. ")
        assert os.listdir("data/pacs") == ["photo.zip"]

    def test_json(self, files):
        result = ratp("data", "import", "mnist", *files, "--json")
        assert (result.code, result.err) == (0, "")
        (row,) = json.loads(result.out)["domains"]
        assert (row["domain"], row["path"], row["images"]) == ("digits/mnist", "data/digits/mnist.zip", 1000)


class TestBuild:
    @pytest.fixture
    def imported(self):
        write_files(Path(), {f"{name}-idx": body for name, body in WEB.items()})
        assert ratp("data", "import", "mnist", "images-idx", "labels-idx", "-q").code == 0

    @pytest.mark.parametrize("name", ["mnist-m", "mnist_m", "MNIST-M"])
    def test_mnist_m(self, imported, name):
        result = ratp("data", "build", name, "--count", 50, "--seed", 3)
        origin = "rebuilt, not the published data: mnist_m 1, seed 3"
        where = "data/digits/mnist_m.zip"
        assert (result.code, result.out) == (0, f"digits/mnist_m: 50 images in 10 classes, {where} ({origin})\n")
        assert "not the original release" in result.err

    def test_own_photographs(self, imported):
        write_files(Path("photos"), {"1.png": png(height=40, width=50)})
        arguments = ["--count", 20, "--photographs", "photos", "--photographs", "photos/1.png", "--json"]
        result = ratp("data", "build", "mnist-m", *arguments)
        assert (result.code, result.err) == (0, "")
        (row,) = json.loads(result.out)["domains"]
        assert (row["images"], row["origin"]) == (20, "rebuilt, not the published data: mnist_m 1, seed 0")
        assert row["notes"] == ["mnist_m is rebuilt, not the original release."]

    def test_syn_does_not_overwrite_existing(self):
        write_files(Path("data/digits"), {"syn.zip": b"the original"})
        result = ratp("data", "build", "syn", "--count", 10)
        assert (result.code, result.out) == (2, "")
        assert "data/digits/syn.zip exists already" in result.err
        assert Path("data/digits/syn.zip").read_bytes() == b"the original"
        assert ratp("data", "build", "syn", "--count", 10, "--replace").code == 0

    def test_ctrl_c(self, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("ratp.data.catalogue.rebuild.syn_image", interrupted)
        result = ratp("data", "build", "syn", "--count", 10)
        assert result.code == 130
        assert result.err.strip().startswith("Interrupted. ")
        assert os.listdir("data/digits") == []


class TestOverview:
    def test_overview_lists_present_and_missing_domains(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert ratp("data", "build", "syn", "--count", 10, "--seed", 3, "-q").code == 0
        result = ratp("data")
        assert result.code == 0
        rows = {line.split()[0]: line for line in result.out.splitlines() if line[0] != " "}
        assert "yes (rebuilt, not the published data: syn" in rows["digits/syn"]
        assert "no: ratp data get" in rows["digits/mnist"]
        assert "by hand" in rows["pacs/sketch"]
        assert len(rows) == 1 + sum(len(entry.domains) for entry in sources.CATALOGUE.values())

    def test_json(self):
        rows = json.loads(ratp("data", "--json").out)["domains"]
        assert {"domain": "pacs/sketch", "path": None, "origin": None, "problem": None} in rows
