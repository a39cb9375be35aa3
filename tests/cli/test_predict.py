"""``ratp predict``: a run used on other images, from nothing but its directory."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from helpers import TINY, each_method, ratp
from own_images import assert_error, assert_ok, encode, image_files, make_picture, write_files, write_zip
from ratp._core.files import read_tensors, write_tensors
from ratp.errors import Note
from ratp.evaluation.matrix import Matrix
from ratp.runs import load as loaded
from ratp.runs.load import UnfinishedWarning
from ratp.runs.record import fingerprint_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "self_training.py"
SIZES = {**TINY, "epochs": 3, "steps": 10, "lr": 0.05, "network.width": 0.1, "network.backbone": "dtn"}
OPTIONS = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")] + ["--guard", "off"]
NEW = image_files(count=20, seed=5, flat=True)


def rows(text):
    """The rows of a table of predictions, without the folder that a name begins with."""
    header, *found = csv.reader(io.StringIO(text))
    assert header == ["file", "class", "confidence"]
    return [(Path(file).name, label, share) for file, label, share in found]


def train(folder, method, *more):
    write_files(folder / "day", image_files(count=8))
    write_files(folder / "rain", image_files(count=8, seed=1))
    write_files(folder / "new", NEW)
    out, where = folder / "run", ("--source", folder / "day", "--targets", folder / "rain", folder / "new")
    assert_ok(ratp("run", "folders", *where, "--out", out, "--method", method, *OPTIONS, *more))
    for name in ("day", "rain"):  # nothing but the run is needed from now on
        shutil.rmtree(folder / name)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), "source-only")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return train(tmp_path_factory.mktemp("own"), EXAMPLE)


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(Path("new"), NEW)
    return Path(shutil.copytree(trained, "run"))


@pytest.mark.parametrize("method", each_method(without=["oracle", "source-only"]))
def test_every_method_predicts_like_its_run(method, tmp_path, monkeypatch):
    """By batch statistics, by another classifier, by the mask of the last domain: whatever its rule is."""
    folder = train(tmp_path, method, *(["--set", "views=2"] if method == "cotta" else []))
    monkeypatch.setattr(loaded, "_CHUNK_BYTES", 1)  # the smallest chunks there are
    found = assert_ok(ratp("predict", folder, tmp_path / "new", "--device", "cpu"))
    expected = rows((folder / "predictions-new.csv").read_text())
    assert rows(found.out) == expected
    assert max(float(share) for _, _, share in expected) > 0.3  # it has learnt something that could be lost


class TestOutput:
    def test_table_matches_the_run(self, run):
        found = assert_ok(ratp("predict", run, "new"))
        kept = (run / "predictions-new.csv").read_text()
        assert found.out == kept.replace("\n", "\nnew/").removesuffix("new/")

    def test_run_folder_is_unchanged(self, run):
        before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
        assert_ok(ratp("predict", run, "new"))
        assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()} == before

    def test_into_a_file(self, run):
        found = assert_ok(ratp("predict", run, "new", "--out", "found.csv"))
        assert found.out == ""
        assert "Predictions: found.csv" in found.err
        assert rows(Path("found.csv").read_text()) == rows((run / "predictions-new.csv").read_text())

    def test_quiet(self, run):
        assert assert_ok(ratp("predict", run, "new", "--out", "found.csv", "--quiet")).err == ""

    def test_json(self, run):
        result = json.loads(assert_ok(ratp("predict", run, "new", "--json")).out)
        assert result["classes"] == json.loads((run / "config.json").read_text())["classes"]
        assert result["stages"] == ["day", "rain", "new"]
        first = rows((run / "predictions-new.csv").read_text())[0]
        assert result["predictions"][0]["class"] == first[1]
        assert f"{result['predictions'][0]['confidence']:.4f}" == first[2]

    @pytest.mark.parametrize("room", [1, 2**28])
    def test_predictions_keep_argument_order(self, run, room, monkeypatch):
        monkeypatch.setattr(loaded, "_CHUNK_BYTES", room)
        write_files(Path("deep/b/north"), image_files(count=2, seed=6, flat=True))
        write_files(Path("deep/a"), image_files(count=1, seed=7, flat=True))
        Path("odd.ending").write_bytes(encode(make_picture(0, 9)))
        packed = write_zip(Path("rain.zip"), image_files(count=1, seed=8))
        first = "new/west-3.png"
        with pytest.warns(Note, match="named more than once, read once: 'new/west-3.png'"):
            found = assert_ok(ratp("predict", run, first, "odd.ending", packed, "deep", first))
        names = [line.partition(",")[0] for line in found.out.splitlines()[1:]]
        below = sorted(str(path) for path in Path("deep").rglob("*.png"))
        zipped_names = [f"rain.zip/{name}/0.png" for name in ("east", "north", "south", "west")]
        assert names == [first, "odd.ending", *zipped_names, *below]
        assert found.out.splitlines()[1] == assert_ok(ratp("predict", run, first)).out.splitlines()[1]

    def test_folder_names_do_not_matter(self, run):
        """Those of classes the run does not know, either."""
        write_files(Path("zoo"), image_files(["gnu", "yak"]))
        labels = {label for _, label, _ in rows(assert_ok(ratp("predict", run, "zoo")).out)}
        assert labels <= {"north", "east", "south", "west"}

    def test_batch_method_warns_on_few_images(self, tmp_path):
        folder = train(tmp_path, "tent")
        found = assert_ok(ratp("predict", folder, tmp_path / "new" / "north-0.png"))
        assert "tent predicts from the statistics of all images given, and 1 are few" in found.err
        assert "few" not in assert_ok(ratp("predict", folder, tmp_path / "new")).err

    def test_names_cannot_send_escape_codes(self, run, monkeypatch):
        name = "new/\x1b[31mred.png"
        Path(name).write_bytes(encode(make_picture(0, 9)))
        assert r"\x1b[31m" in assert_ok(ratp("predict", run, name)).out  # spelled, so that names stay distinct

        class Terminal(io.StringIO):
            def isatty(self):
                return True

        monkeypatch.setattr("helpers.io.StringIO", Terminal)
        assert "\x1b[31m" not in assert_ok(ratp("predict", run, name)).out

    def test_non_text_names_stay_distinct(self, run):
        write_files(
            Path("odd"), {os.fsdecode(byte + b".png"): encode(make_picture(0, 9)) for byte in (b"\xfe", b"\xff")}
        )
        assert_ok(ratp("predict", run, "odd", "--out", "found.csv"))
        shown = ascii(assert_ok(ratp("predict", run, "odd")).out)
        assert shown == ascii(Path("found.csv").read_text(encoding="utf-8"))
        assert r"odd/\\udcfe.png" in shown and r"odd/\\udcff.png" in shown
        Path("odd", os.fsdecode(b"\xfd.png")).touch()
        assert r"odd/\\udcfd.png: empty" in ascii(ratp("predict", run, "odd").err)

    def test_skipped_files_are_reported(self, run):
        write_zip(Path("more.zip"), {"a.png": encode(make_picture(0, 9)), "b.avif": b"x"})
        write_files(
            Path("new"), {"1.heic": b"x", "camera": encode(make_picture(0, 9)), "notes.txt": b"x", ".DS_Store": b"x"}
        )
        found = assert_ok(ratp("predict", run, "new", "more.zip", "--quiet"))
        expected = "3 files skipped, unsupported format: .heic (1), without ending (1), .avif (1)."
        assert (found.out, found.err.count(expected), found.err.count("note:")) == ("", 1, 1)
        left_out = json.loads(assert_ok(ratp("predict", run, "new", "more.zip", "--json")).out)["left_out"]
        assert [item["file"] for item in left_out] == ["new/1.heic", "new/camera", "more.zip/b.avif"]
        assert left_out[0]["reason"] == "unsupported format: .heic"


class TestOut:
    """Nothing that is read is lost, and only files are replaced."""

    def check(self, out, *expected, run, images=("new",)):
        before = Path(out).read_bytes() if os.path.isfile(out) else None
        result = ratp("predict", run, *images, "--out", out)
        assert_error(result, f"cannot write {out}: ", *expected, out="nowhere")
        assert "decoding" not in result.err
        assert (Path(out).read_bytes() if os.path.isfile(out) else None) == before

    def test_output_cannot_be_an_input_image(self, run):
        os.link("new/west-3.png", "same.png")
        Path("link.csv").symlink_to("new/west-3.png")
        for out in ("new/west-3.png", "same.png", "link.csv"):
            self.check(out, "it is one of the files to read", run=run)
        write_zip(Path("more.zip"), NEW)
        self.check("more.zip", "it is one of the files to read", run=run, images=("new", "more.zip"))

    @pytest.mark.parametrize("name", ["state.safetensors", "config.json", "predictions-new.csv", "predictions-x.csv"])
    def test_output_cannot_be_a_run_file(self, run, name):
        self.check(run / name, "a file of the run run has that name", run=run)
        Path("link").symlink_to(run)
        self.check(f"link/{name}", "a file of the run run has that name", run=run)

    def test_unwritable_outputs(self, run):
        self.check("new", "it is a folder", run=run)
        self.check("no/found.csv", "there is no folder no", run=run)
        self.check("new/west-3.png/found.csv", "there is no folder", run=run)
        self.check("x" * 300, "File name too long", run=run)

    def test_earlier_table_is_replaced(self, run):
        for _ in range(2):
            assert_ok(ratp("predict", run, "new", "--out", run / "found.csv"))
        assert len(rows((run / "found.csv").read_text())) == len(NEW)

    def test_links_are_followed(self, run):
        Path("kept.csv").write_text("x" * 100_000)
        Path("link.csv").symlink_to("kept.csv")
        Path("new.csv").symlink_to("fresh.csv")
        for out, place in (("link.csv", "kept.csv"), ("new.csv", "fresh.csv")):
            assert_ok(ratp("predict", run, "new", "--out", out))
            assert Path(out).is_symlink()
            assert rows(Path(place).read_text()) == rows((run / "predictions-new.csv").read_text())

    def test_devices_and_pipes_are_written_in_place(self, run):
        Path("null").symlink_to("/dev/null")  # nothing but the link is lost if this fails
        assert_ok(ratp("predict", run, "new", "--out", "null"))
        assert Path("null").is_symlink() and Path("null").is_char_device()
        os.mkfifo("pipe")
        reading = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
        assert_ok(ratp("predict", run, "new/west-3.png", "--out", "pipe"))
        assert rows(os.read(reading, 10_000).decode())[0][0] == "west-3.png"
        os.close(reading)

    @pytest.mark.parametrize("out", ["-", "stdout"])
    def test_standard_output(self, run, out):
        Path("stdout").symlink_to("/dev/fd/1")  # what /dev/stdout is
        expected = assert_ok(ratp("predict", run, "new")).out
        assert assert_ok(ratp("predict", run, "new", "--out", out, "--quiet")).out == expected
        assert Path("stdout").is_symlink() and not Path("-").exists()
        mixed = ratp("predict", run, "new", "--out", out, "--json")
        assert_error(mixed, "what --json prints goes to standard output", out="found.csv")


class TestBadImages:
    @pytest.fixture(autouse=True)
    def _broken(self, run):
        Path("new/broken.png").write_bytes(b"\x89PNG")
        Path("new/page.jpg").write_bytes(b"<html>")

    def test_bad_images_stop_with_names(self, run, monkeypatch):
        monkeypatch.setattr(loaded, "_CHUNK_BYTES", 1)
        expected = (
            "2 bad among 82 images",
            "new/broken.png: a damaged",
            "new/page.jpg: a web page",
            "--on-bad-image skip",
        )
        assert_error(ratp("predict", run, "new", "--out", "found.csv"), *expected, out="found.csv")

    def test_bad_images_can_be_skipped(self, run):
        found = assert_ok(ratp("predict", run, "new", "--on-bad-image", "skip"))
        assert "skipped 2 unusable images" in found.err
        assert "new/page.jpg: a web page" in found.err
        assert rows(found.out) == rows((run / "predictions-new.csv").read_text())

    def test_no_usable_image(self, run):
        result = ratp("predict", run, "new/broken.png", "new/page.jpg", "--on-bad-image", "skip")
        expected = ("2 images, none of them usable:\n  new/broken.png: a damaged", "new/page.jpg: a web page")
        assert_error(result, *expected, out="found.csv")

    def test_only_image_is_bad(self, run):
        result = ratp("predict", run, "new/page.jpg", "--on-bad-image", "skip")
        assert_error(result, "asked about 1 image, and it is unusable:\n  new/page.jpg: a web page", out="found.csv")

    def test_no_such_option(self, run):
        assert_error(ratp("predict", run, "new", "--on-bad-image", "mend"), "--on-bad-image", "skip", out="found.csv")

    def test_all_invalid_paths_are_named(self, run):
        Path("empty").mkdir()
        write_files(Path("texts"), {"notes.txt": b"x"})
        Path("odd.zip").write_bytes(b"PK")
        os.mkfifo("pipe")
        result = ratp("predict", run, "new", "gone.png", "empty", "texts", "odd.zip", "pipe")
        expected = (
            "gone.png does not exist",
            "empty has no images",
            "'notes.txt'",
            "odd.zip is damaged",
            "pipe is a pipe",
        )
        assert_error(result, *expected, out="found.csv")


class TestBadRuns:
    def check(self, run, *expected):
        assert_error(ratp("predict", run, "new"), *expected, out="found.csv")

    def test_no_run(self, run):
        self.check("gone", "gone does not exist")
        self.check("new", "new is not a run directory")
        self.check(".", "It contains some, e.g. run.")
        assert_ok(ratp("report", run, "--export", "kept", "--quiet"))
        self.check(next(Path("kept").iterdir()), "is a file: give a run directory")

    def test_no_such_device(self, run):
        assert_error(ratp("predict", run, "new", "--device", "cuda:99"), "cuda:99", out="found.csv")

    def test_damaged_weights(self, run):
        state = run / "state.safetensors"
        state.write_bytes(state.read_bytes()[:-8] + b"\x01" * 8)
        self.check(run, "state.safetensors is damaged", "Restore it from a copy")

    def test_state_of_another_run(self, run, tmp_path):
        other = train(tmp_path / "other", "source-only", "--seed", "3")
        shutil.copy(other / "state.safetensors", run)
        self.check(run, "belongs to another run", "Use an unmodified run directory.")

    def test_other_classes(self, run):
        config = json.loads((run / "config.json").read_text())
        config["classes"] = ["cat", "dog"]
        (run / "config.json").write_text(json.dumps(config))
        self.check(run, "config.json is damaged")
        (run / "config.json").write_text(json.dumps({**config, "fingerprint": fingerprint_of(config)}))
        self.check(run, "belongs to another run")

    @pytest.mark.parametrize(
        "change", [{"recipe": None}, {"classes": [1, 2]}, {"recipe": {"size": -1}}, {"switches": {"odd": 1}}]
    )
    def test_invalid_config(self, run, change):
        config = json.loads((run / "config.json").read_text()) | change
        (run / "config.json").write_text(json.dumps({**config, "fingerprint": fingerprint_of(config)}))
        result = ratp("predict", run, "new")
        assert (result.code, result.out) == (2, "")
        assert "Traceback" not in result.err

    def test_missing_optional_files(self, run):
        expected = assert_ok(ratp("predict", run, "new")).out
        for name in ("weights.safetensors", "environment.json", "matrix.json", "journal.jsonl"):
            (run / name).unlink()
        assert assert_ok(ratp("predict", run, "new")).out == expected


class TestUnfinished:
    def test_no_finished_stage(self, run):
        (run / "state.safetensors").unlink()
        assert_error(ratp("predict", run, "new"), "no stage is finished", "continues it", out="found.csv")

    @pytest.mark.parametrize("name", ["state.safetensors", "state-before.safetensors"])
    def test_last_finished_stage_is_used(self, run, name):
        """``run`` was stopped after its second stage, or its last state was damaged since."""
        tensors, about = read_tensors(run / "state.safetensors")
        matrix = Matrix.from_json(about["matrix"])
        half = Matrix(matrix.domains, matrix.accuracy[:2]).to_json()
        (run / "state.safetensors").write_bytes(b"")
        write_tensors(run / name, tensors, {**about, "matrix": half})
        with pytest.warns(UnfinishedWarning) as warned:
            found = assert_ok(ratp("predict", run, "new"))
        *lost, unfinished = (str(warning.message) for warning in warned)
        assert unfinished == "run is unfinished: using its method after 2 of 3 stages, the last rain"
        assert ["Using the state before it" in text for text in lost] == [True] * (name != "state.safetensors")
        assert len(rows(found.out)) == len(NEW)


class TestOwnMethods:
    def test_method_file_must_be_given(self, own):
        found = assert_ok(ratp("predict", own, own.parent / "new", "--method", EXAMPLE))
        assert rows(found.out) == rows((own / "predictions-new.csv").read_text())

    def test_recorded_method_file_is_never_run(self, own):
        assert_error(ratp("predict", own, own.parent / "new"), "'self-training'", "--method FILE.py", out="found.csv")

    def test_edited_method_file_is_refused(self, own, tmp_path):
        edited = tmp_path / "edited.py"
        edited.write_text(EXAMPLE.read_text() + "\n")
        result = ratp("predict", own, own.parent / "new", "--method", edited)
        assert_error(result, "has been edited since", out="found.csv")

    def test_installed_methods_need_no_file(self, run):
        result = ratp("predict", run, "new", "--method", EXAMPLE)
        assert_error(result, "is a run of source-only, which is built in", out="found.csv")
