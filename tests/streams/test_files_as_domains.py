"""Folders and zips of images as a merciless user has them, from class folders to labels and to a run."""

from __future__ import annotations

import csv
import os
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.made_images import closed
from helpers import CLASSES, journal_of, ratp
from own_images import (
    assert_error,
    assert_ok,
    config_of,
    encode,
    image_files,
    make_picture,
    run_folders,
    write_files,
    write_zip,
)
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError
from ratp.streams.files import load_domains
from ratp.streams.stream import DataOptions, make_stream

ZOO = ("ant", "bee", "cow")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def day():
    return write_files(Path("day"), image_files())


def load(*paths, **options):
    return load_domains({path.stem: path for path in paths}, 32, DataOptions(**options))


def problems_of(*paths, **options):
    with pytest.raises(ConfigError) as caught:
        load(*paths, **options)
    return caught.value.problems


class TestLabels:
    """They go by the names of the class folders, never by their order."""

    @pytest.fixture
    def zoo(self):
        return write_files(Path("zoo"), image_files(ZOO))

    def check(self, item):
        domain = item.domain
        assert isinstance(domain, LabelledDomain)
        assert [domain.classes[k] for k in domain.labels.tolist()] == [file.split("/")[0] for file in item.files]
        for image, file in zip(domain.images, item.files, strict=True):
            assert torch.equal(image, as_tensor(Image.open(Path(domain.name) / file)))

    @pytest.mark.faults(12, "ratp matches classes by name, so a class that a target lacks does not shift the others")
    def test_a_target_without_the_first_class(self, zoo):
        """Sorted on its own, its cows would be bees."""
        loaded = load(zoo, write_files(Path("farm"), image_files(("cow", "bee"), seed=1)))
        self.check(loaded[0])
        self.check(loaded[1])
        assert loaded[1].domain.classes == ZOO
        assert loaded[1].domain.labels.tolist() == [1, 1, 1, 2, 2, 2]
        assert loaded[1].notes == ("farm: no images of ant.",)

    def test_missing_classes_are_reported_before_training(self, zoo):
        write_files(Path("farm"), image_files(("cow",), seed=1))
        result = assert_ok(run_folders(zoo, "farm"))
        assert "note: farm: no images of ant, bee." in result.err
        assert result.err.index("note: ") < result.err.index("stage 1/2")

    @pytest.mark.faults(12, "ratp refuses a class that the source lacks and suggests which class was renamed")
    def test_another_class_is_refused_and_a_renamed_one_suspected(self, zoo):
        write_files(Path("farm"), image_files(("ants", "cow", "yak"), seed=1))
        message = assert_error(run_folders(zoo, "farm"), "'farm'", "'ants' (3 images, perhaps 'ant' renamed)")
        assert "'yak' (3 images)" in message
        assert "ant, bee, cow" in message
        assert "--extra-classes drop" in message
        assert "'cow'" not in message

    def test_upper_case_is_another_class_and_suspected(self, zoo):
        (problem,) = problems_of(zoo, write_files(Path("farm"), image_files(("ant", "BEE", "cow"))))
        assert "'BEE' (3 images, perhaps 'bee' renamed)" in problem

    def test_other_classes_can_be_left_out(self, zoo):
        write_files(Path("farm"), image_files(("aardvark", "cow", "yak"), seed=1))
        result = assert_ok(run_folders(zoo, "farm", more=("--extra-classes", "drop")))
        assert "aardvark (3), yak (3)" in result.err
        assert [e["images"] for e in journal_of(Path("run"), "stage_started")] == [9 - 3, 3]
        loaded = load(zoo, Path("farm"), extra_classes="drop")
        self.check(loaded[1])
        assert loaded[1].files == ("cow/0.png", "cow/1.png", "cow/2.png")

    def test_all_other_classes_cannot_be_left_out(self, zoo):
        (problem,) = problems_of(zoo, write_files(Path("farm"), image_files(("yak",))), extra_classes="drop")
        assert "yak" in problem

    def test_a_flat_target_has_none(self, zoo):
        _, target = load(zoo, write_files(Path("wild"), image_files(ZOO, flat=True, seed=1)))
        assert isinstance(target.domain, UnlabelledDomain)
        assert target.files == tuple(sorted(f"{name}-{k}.png" for name in ZOO for k in range(3)))

    def test_a_flat_source_is_refused(self, day):
        write_files(Path("wild"), image_files(flat=True))
        assert_error(run_folders("wild", day), "'wild' has no labels", "one folder per class")

    def test_single_target_folder_is_a_class_with_advice(self, zoo):
        write_files(Path("wild/all"), image_files(ZOO, flat=True))
        assert_error(run_folders(zoo, "wild"), "'all' (9 images", "--unlabelled wild", "unlabelled = true")

    def test_empty_class_folder_is_reported(self, day):
        for name in ("northwest", ".hidden", "__MACOSX"):
            (day / name).mkdir()
        result = assert_ok(run_folders(day, write_files(Path("night"), image_files(seed=1))))
        assert "note: day: no images in northwest: not a class." in result.err
        assert config_of()["classes"] == sorted(CLASSES)

    def test_class_of_one_image_is_trained_on_and_reported(self, day):
        write_files(day, {"up/0.png": encode(make_picture(0, 7))})
        source = load(day, write_files(Path("night"), image_files(seed=1)))[0]
        assert "day: a single image of up." in source.notes
        stream = make_stream("own", [source, toy_unlabelled()], 1)
        assert stream.classes[int(stream.source.labels.max())] == "west"
        assert stream.classes.index("up") in stream.source.labels

    def test_source_of_one_class_is_refused(self):
        write_files(Path("day"), image_files(("north",), count=5))
        write_files(Path("night"), image_files(("north",), seed=1))
        assert_error(run_folders("day", "night"), "'day'", "a single class (north)")

    def test_a_source_too_small_to_be_split(self):
        write_files(Path("day"), image_files(count=2))
        write_files(Path("night"), image_files(seed=1))
        assert_error(run_folders("day", "night"), "'day' with 8 images", "add images")

    def test_unicode_forms_of_a_class_are_equal(self, day):
        write_files(day, image_files((unicodedata.normalize("NFC", "übel"),), seed=3))
        write_files(Path("night"), image_files((unicodedata.normalize("NFD", "übel"),), seed=4))
        domain = load(day, Path("night"))[1].domain
        assert [domain.classes[k] for k in domain.labels.tolist()] == ["übel"] * 3

    def test_all_problems_of_all_domains_come_at_once(self, day):
        """Those that a list of the files shows come before any image is decoded."""
        write_files(Path("rain"), image_files(("north", "up"), seed=1))
        write_files(Path("fog"), {**image_files(seed=2), "west/9.png": b""})
        (Path("empty")).mkdir()
        write_files(Path("mixed"), {**image_files(seed=3), "stray.png": encode(make_picture(0, 1))})
        message = assert_error(run_folders(day, "rain", "nowhere", "fog", "empty", "mixed"))
        assert message.count("error: ") == 3
        for expected in ("nowhere does not exist", "empty has no images", "'stray.png'"):
            assert expected in message
        message = assert_error(run_folders(day, "rain", "fog"))
        assert message.count("error: ") == 2
        for expected in ("'up'", "west/9.png"):
            assert expected in message


def as_tensor(image):
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def toy_unlabelled():
    return UnlabelledDomain("other", torch.zeros(4, 3, 32, 32, dtype=torch.uint8))


class TestZips:
    @pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
    def test_a_zip_is_the_folder_it_was_made_from(self, ending):
        files = image_files(ending=ending)
        write_files(Path("day"), files)
        write_zip(Path("zips/day.zip"), files)
        write_zip(Path("wrapped/day.zip"), files, inside="day/")
        places = ("day", "zips/day.zip", "wrapped/day.zip")
        plain, packed, wrapped = (load(Path(place), write_files(Path("night"), files))[0].domain for place in places)
        assert plain.fingerprint() == packed.fingerprint() == wrapped.fingerprint()
        assert torch.equal(plain.images, packed.images)
        assert torch.equal(plain.images, wrapped.images)
        assert torch.equal(plain.labels, packed.labels)

    def test_run_resumes_with_the_zip(self, day):
        night = write_files(Path("night"), image_files(seed=1))
        assert_ok(run_folders(day, night))
        write_zip(Path("packed/day.zip"), image_files())
        assert "complete already" in assert_ok(run_folders("packed/day.zip", night)).err


class TestSharedImages:
    def test_shared_images_are_reported(self, day):
        files = image_files(seed=1)
        write_files(Path("night"), {**files, "south/again.png": image_files()["south/1.png"]})
        result = assert_ok(run_folders(day, "night"))
        assert "1 image(s) are in more than one domain" in result.err
        assert "day: south/1.png and night: south/again.png" in result.err

    def test_no_shared_images_report_nothing(self, day):
        assert load(day, write_files(Path("night"), image_files(seed=1)))[0].notes == ()


def truncate(data):
    return data[: len(data) * 2 // 3]


BAD = {
    "empty.png": b"",
    "cut.jpg": truncate(encode(make_picture(0, 1), "JPEG")),
    "cut.webp": truncate(encode(make_picture(0, 1), "WEBP")),
    "page.jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "notes.png": b"remember the milk\n" * 10,
}


class TestDamagedFiles:
    """FAULTS 10: none reaches training, and none is ever replaced by another."""

    @pytest.fixture
    def night(self):
        return write_files(
            Path("night"), {**image_files(seed=1), **{f"south/{name}": data for name, data in BAD.items()}}
        )

    @pytest.mark.faults(10, "files that are not images stop the run before training, and each one is named")
    def test_damaged_files_stop_the_run_before_it_begins(self, day, night):
        message = assert_error(run_folders(day, night), "night has 5 bad among 17 images", "--on-bad-image skip")
        for name in BAD:
            assert f"south/{name}: " in message
        assert "web page" in message.split("page.jpg: ")[1].splitlines()[0]
        assert "stage" not in message

    @pytest.mark.faults(10, "files that you tell ratp to skip are named and counted, and never replaced")
    def test_skipped_files_are_named_and_counted(self, day, night):
        result = assert_ok(run_folders(day, night, more=("--on-bad-image", "skip")))
        assert "note: night: skipped 5" in result.err
        assert [e["images"] for e in journal_of(Path("run"), "stage_started")] == [8, 12]
        (note,) = config_of()["notes"]
        for name in BAD:
            assert f"south/{name}" in result.err
            assert f"south/{name}" in note

    def test_remaining_images_equal_a_clean_folder(self, day, night):
        clean = load(day, write_files(Path("clean"), image_files(seed=1)))[1].domain
        skipped = load(day, night, on_bad="skip")[1].domain
        assert torch.equal(skipped.images, clean.images)
        assert torch.equal(skipped.labels, clean.labels)

    def test_in_a_flat_target_the_rest_keep_their_names(self, day):
        files = image_files(seed=1, flat=True)
        write_files(Path("wild"), {**files, **BAD})
        assert_ok(run_folders(day, "wild", more=("--on-bad-image", "skip")))
        rows = Path("run/predictions-wild.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == sorted(files)

    def test_damaged_files_in_the_source(self, night, day):
        assert_error(run_folders(night, day), "domain 'night'", "south/empty.png")

    def test_class_of_only_bad_files(self, day):
        write_files(day, {"up/0.png": b"", "up/1.png": b"x"})
        result = assert_ok(
            run_folders(day, write_files(Path("night"), image_files(seed=1)), more=("--on-bad-image", "skip"))
        )
        assert "day: no images of up, which the model therefore cannot learn." in result.err

    def test_domain_of_only_bad_files(self, day):
        write_files(Path("night"), {f"south/{name}": data for name, data in BAD.items()})
        assert_error(run_folders(day, "night", more=("--on-bad-image", "skip")), "'night'", "none of them usable")

    @pytest.mark.parametrize("value", ["ignore", "", "Skip"])
    def test_unknown_bad_image_option(self, day, night, value):
        assert_error(run_folders(day, night, more=("--on-bad-image", value)), "--on-bad-image", "Valid: skip, stop")


def sixteen_bits(image):
    return encode(Image.fromarray(np.array(image.convert("L")).astype(np.uint16) * 257))


def rotate(image):
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image.transpose(Image.Transpose.ROTATE_90), exif=exif)


def animate(kind):
    return lambda image: encode(image, kind, save_all=True, append_images=[make_picture(2, 5)], lossless=True)


class TestUnusualFiles:
    """FAULTS 11: they are what they show, or what is shown first."""

    @pytest.mark.parametrize(
        ("name", "make", "mode", "tolerance"),
        [
            ("deep.png", sixteen_bits, "L", 1),
            ("print.jpg", lambda image: encode(image.convert("CMYK"), "JPEG", quality=100, subsampling=0), "RGB", 25),
            ("turned.png", rotate, "RGB", 0),
            ("moving.gif", animate("GIF"), "RGB", 60),
            ("moving.webp", animate("WEBP"), "RGB", 0),
            ("clear.png", lambda image: encode(image.convert("RGBA")), "RGB", 0),
            ("grey.png", lambda image: encode(image.convert("L")), "L", 0),
        ],
    )
    @pytest.mark.faults(11, "ratp reads 16-bit, CMYK, palette, transparent, animated and rotated images as displayed")
    def test_unusual_images_are_read_as_displayed(self, day, name, make, mode, tolerance):
        plain = make_picture(1, 99)
        write_files(Path("night"), {**image_files(seed=1), f"east/{name}": make(plain)})
        item = load(day, Path("night"))[1]
        seen, shown = item.domain.images[item.files.index(f"east/{name}")].int(), as_tensor(plain.convert(mode)).int()
        assert (seen - shown).abs().max() <= tolerance
        assert (seen.float().mean() - shown.float().mean()).abs() < 5

    def test_one_pixel_image(self, day):
        write_files(
            Path("night"), {**image_files(seed=1), "east/dot.png": encode(Image.new("RGB", (1, 1), (9, 99, 199)))}
        )
        item = load(day, Path("night"))[1]
        seen = item.domain.images[item.files.index("east/dot.png")]
        assert torch.equal(seen, torch.tensor([9, 99, 199]).view(3, 1, 1).expand(3, 32, 32))

    @pytest.mark.faults(11, "ratp reads the size of an image first and refuses it if it is far too large")
    def test_too_many_pixels(self, day):
        """A small file that unpacks to gigabytes."""
        bomb = encode(Image.new("1", (12_000, 12_000)))
        write_files(Path("night"), {**image_files(seed=1), "east/huge.png": bomb})
        assert_error(run_folders(day, "night"), "east/huge.png: too many pixels", "100 million")


class TestNames:
    """FAULTS 13: they may be anything."""

    ANY = ("画像", "naïve ü", "n" * 200, "画" * 80, "a, b;'c\"", "[bold]x", "50%", "-x", "<script>&", "a\nb", "x>y")

    @pytest.mark.faults(13, "ratp reads and prints names in any script, with spaces and of any length")
    def test_names_of_domains_classes_and_files(self):
        source = {
            f"{name}/{name[:180]}{n}.png": d for k, name in enumerate(self.ANY) for n, d in enumerate(quarters(k))
        }
        write_files(Path("source"), source)
        for k, name in enumerate(self.ANY):
            write_files(Path(f"./{name}"), {f"{name[:180]}{n}.png": data for n, data in enumerate(quarters(20 + k))})
        result = assert_ok(run_folders("source", *(f"./{name}" for name in self.ANY)))
        config = config_of()
        assert config["order"] == ["source", *self.ANY]
        assert config["classes"] == sorted(self.ANY)
        found = [str(Path(row["file"])) for path in Path("run").glob("predictions-*.csv") for row in rows_of(path)]
        assert sorted(found) == sorted(f"{name[:180]}{n}.png" for name in self.ANY for n in range(3))
        assert result.err.count("Predictions: run/predictions-") == len(self.ANY)

    def test_names_in_a_report(self):
        source, *targets = "<script>x", "画像" * 30, "[bold]a, b>c", "a\nb\t%_$"
        write_files(Path(source), image_files((source, "[/]<b>&amp;"), count=5))
        for k, name in enumerate(targets):
            write_files(Path(name), image_files((source,), seed=k + 1, flat=k == 0))
        assert_ok(run_folders(source, *targets))
        assert_ok(ratp("report", "run"))
        page = Path("run/report/index.html").read_text()
        assert "<script>" not in page
        assert "<b>&amp;" not in page
        assert "画像" in page

    def test_non_text_names(self):
        name = os.fsdecode(b"bad\xff")
        write_files(Path("ok"), image_files())
        try:
            write_files(Path(name), {os.fsdecode(b"x\xfe.png"): encode(make_picture(0, 3))})
        except OSError:
            pytest.skip("a file system of Unicode names")
        assert_ok(run_folders("ok", name))
        assert_ok(ratp("report", "run", "--quiet"))
        (predictions,) = Path("run").glob("predictions-*.csv")
        assert "x\\udcfe.png" in predictions.read_text(encoding="utf-8")

    def test_predictions_of_domains_with_similar_file_names(self, day):
        write_files(Path("a b"), image_files(seed=1, flat=True))
        write_files(Path("a_b"), image_files(seed=2, flat=True))
        write_files(Path("A_B"), image_files(seed=3, flat=True, count=2))
        assert_ok(run_folders(day, "a b", "a_b", "A_B"))
        found = {path.name: len(path.read_text().splitlines()) for path in Path("run").glob("predictions-*.csv")}
        assert found == {"predictions-a_b.csv": 13, "predictions-a_b-2.csv": 13, "predictions-A_B-3.csv": 9}


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def quarters(seed):
    return [encode(make_picture(seed, 100 * seed + k)) for k in range(3)]


def damage(archive):
    data = bytearray(archive.read_bytes())
    data[data.index(b"south/1.png") + 400] ^= 1
    archive.write_bytes(data)


class TestPlaces:
    """What a folder or a zip can be besides a folder or a zip of images."""

    def test_hidden_files_and_clutter_are_ignored(self, day):
        write_files(
            day,
            {
                ".x.png": b"",
                "lost+found/0.png": b"x",
                "north/.DS_Store": b"x",
                "north/._0.png": b"x",
                "__MACOSX/n/0.png": b"x",
            },
        )
        assert_ok(run_folders(day, write_files(Path("night"), image_files(seed=1))))
        assert config_of()["classes"] == sorted(CLASSES)

    def test_skipped_files_are_reported_once(self, day):
        meant = {"north/1.heic": b"x", "north/2.HEIC": b"x", "south/camera": encode(make_picture(0, 5), "JPEG")}
        write_files(
            Path("night"), {**image_files(seed=1), **meant, "north/0.txt": b"x", "labels.csv": b"x", "Thumbs.db": b"x"}
        )
        expected = "night: 3 files skipped, unsupported format: .heic (2), without ending (1)"
        assert assert_ok(run_folders(day, "night")).err.count(expected) == 1
        assert expected in config_of()["notes"][0]

    @pytest.mark.parametrize("ending", ["jfif", "jpe", "JPE"])
    def test_other_endings_of_known_formats_are_read(self, day, ending):
        files = {name.replace(".jpg", f".{ending}"): data for name, data in image_files(seed=1, ending="jpg").items()}
        item = load(day, write_files(Path("night"), files))[1]
        assert (len(item.domain), item.notes) == (12, ())

    def test_several_domains_given_as_one_are_refused(self, day):
        """Or the names of the domains would be the classes."""
        write_files(Path("pics/rain"), image_files(seed=1))
        write_files(Path("pics/fog"), image_files(seed=2))
        expected = ("domain 'pics'", "looks like several domains", "'fog', 'rain'", "give one of them, e.g. pics/fog")
        assert_error(run_folders("pics", day), *expected)
        assert_error(run_folders(day, "pics"), *expected, "--unlabelled")

    def test_domains_with_the_same_folders_have_them_as_classes(self, day):
        """Both eyes of the ill and of the well, in two clinics."""
        for clinic in ("a", "b"):
            for side in ("left", "right"):
                files = image_files(seed=len(clinic + side))
                write_files(Path(clinic), {name.replace("/", f"/{side}/", 1): data for name, data in files.items()})
        source, target = load(Path("a"), Path("b"))
        assert source.domain.classes == target.domain.classes == tuple(sorted(CLASSES))
        assert "is not a class but a domain" in source.notes[0]
        assert load(Path("a"), day)[0].notes == source.notes[:1]
        flat = write_files(Path("flat"), {"0.png": encode(make_picture(0, 5))})
        assert_error(run_folders("a", flat), "looks like several domains")

    def test_nested_folders_are_read_and_reported(self, day):
        for name in ("north", "south"):
            (day / name).rename(day / f"{name}-2024")
            (day / name).mkdir()
            (day / f"{name}-2024").rename(day / name / f"{name}-2024")
        source = load(day, write_files(Path("night"), image_files(seed=1)))[0]
        assert source.domain.classes == tuple(sorted(CLASSES))
        assert source.notes[0].startswith("day: folders within a class belong to it: 'north/north-2024', 'south/south")

    @pytest.mark.parametrize("on_bad", ["stop", "skip"])
    def test_unreadable_class_stops_the_run(self, day, monkeypatch, on_bad):
        write_files(Path("night"), image_files(seed=1))
        closed(monkeypatch, "east")
        more = ("--on-bad-image", on_bad)
        assert_error(
            run_folders(day, "night", more=more), "domain 'day'", "east is a folder that cannot be read", "class"
        )

    @pytest.mark.faults(13, "ratp stops following links that lead in circles")
    def test_link_cycles(self, day):
        write_files(Path("night"), image_files(seed=1))
        Path("night/north/again").symlink_to(Path("night").resolve())
        assert_ok(run_folders(day, "night"))
        assert journal_of(Path("run"), "stage_started")[1]["images"] == 12

    def test_broken_link_is_named(self, day):
        write_files(Path("night"), image_files(seed=1))
        Path("night/north/gone.png").symlink_to("nowhere.png")
        assert_error(run_folders(day, "night"), "north/gone.png", "link to nothing")

    def test_a_domain_that_links_to_itself(self, day):
        Path("a").symlink_to("b")
        Path("b").symlink_to("a")
        assert_error(run_folders(day, "a"), "'a'", "Too many levels of symbolic links")
        assert_error(run_folders("a", day), "Too many levels of symbolic links")

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
    def test_unreachable_folder(self, day):
        write_files(Path("night"), image_files(seed=1))
        Path("night/north").chmod(0)
        try:
            assert_error(run_folders(day, "night"), "north", "Permission denied")
        finally:
            Path("night/north").chmod(0o755)

    def test_file_that_is_neither_folder_nor_zip(self, day):
        Path("night.rar").write_bytes(b"Rar!\x1a\x07")
        assert_error(run_folders(day, "night.rar"), "night.rar is neither a folder nor a .zip")

    def test_an_image(self, day):
        assert_error(run_folders(day, day / "north" / "0.png"), "neither a folder nor a .zip")

    def test_path_too_long(self, day):
        assert_error(run_folders(day, "x" * 300), "File name too long")

    @pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"<html></html>"])
    def test_not_a_zip(self, day, data):
        Path("night.zip").write_bytes(data)
        assert_error(run_folders(day, "night.zip"), "night.zip is damaged or not a zip archive")

    def test_truncated_zip(self, day):
        whole = write_zip(Path("night.zip"), image_files(seed=1)).read_bytes()
        Path("night.zip").write_bytes(truncate(whole))
        assert_error(run_folders(day, "night.zip"), "night.zip is damaged")

    @pytest.mark.parametrize("name", ["../../evil.png", "/etc/evil.png", "north\\..\\evil.png", "C:/evil.png"])
    def test_zip_with_path_traversal(self, day, name):
        write_zip(Path("night.zip"), {**image_files(seed=1), name: encode(make_picture(0, 1))})
        assert_error(run_folders(day, "night.zip"), "night.zip is refused", "evil.png")
        assert not list(Path().rglob("evil*"))

    def test_decompression_bomb(self, day):
        write_zip(
            Path("night.zip"),
            {**image_files(seed=1), "north/9.png": bytes(33 * 2**20)},
            compression=zipfile.ZIP_DEFLATED,
        )
        assert_error(run_folders(day, "night.zip"), "as only bombs are: 'north/9.png'")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_duplicate_name_in_a_zip(self, day):
        with zipfile.ZipFile("night.zip", "w") as archive:
            for seed in (1, 2):
                archive.writestr("north/0.png", encode(make_picture(0, seed)))
        assert_error(run_folders(day, "night.zip"), "the same name twice: 'north/0.png'")

    def test_a_zip_with_one_damaged_picture(self, day):
        damage(write_zip(Path("night.zip"), image_files(seed=50)))
        assert_error(run_folders(day, "night.zip"), "south/1.png: damaged in the archive")
        result = assert_ok(run_folders(day, "night.zip", more=("--on-bad-image", "skip")))
        assert "skipped 1" in result.err
        assert journal_of(Path("run"), "stage_started")[1]["images"] == 11

    def test_zip_is_read_once_repaired(self, day):
        """Downloaded again, say: what was left out of the damaged one is there."""
        whole = write_zip(Path("night.zip"), image_files(seed=51)).read_bytes()
        damage(Path("night.zip"))
        assert_ok(run_folders(day, "night.zip", out="first", more=("--on-bad-image", "skip")))
        Path("night.zip").write_bytes(whole)
        assert_ok(run_folders(day, "night.zip"))
        assert journal_of(Path("run"), "stage_started")[1]["images"] == 12

    def test_no_domains(self, day):
        Path("night/north").mkdir(parents=True)
        write_files(Path("night"), {"north/readme.txt": b"soon"})
        assert_error(run_folders(day, "night"), "night has no images", "north/readme.txt")
