"""The paper's benchmarks: its orders and sizes, and its images wherever a user has put them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from helpers import ratp
from own_images import OPTIONS, assert_error, assert_ok, config_of, image_files, write_files, write_zip
from ratp.errors import ConfigError, RatpError
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams import find_stream
from ratp.streams.benchmarks import DIGITS, DOMAINNET10, PACS
from ratp.streams.stream import DataOptions

SHARED = Path(__file__).parents[3] / "shared"
TEN = tuple("0123456789")
DIGIT_DOMAINS = ("mnist", "mnist_m", "svhn", "syn", "usps")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RATP_DATA", raising=False)


def shared(name):
    path = SHARED / name
    return path if path.exists() else pytest.skip(f"no {path}")


def load_digits(order="default", **requested):
    return resolve(RunRequest("digits", order=order, **requested)).load_stream()


class TestOrders:
    @pytest.mark.parametrize(("spec", "paper"), [(DIGITS, "Digits"), (PACS, "PACS"), (DOMAINNET10, "DomainNet")])
    def test_orders_are_the_papers(self, spec, paper):
        tables = json.loads(shared("paper/tables.json").read_text())
        main = dict(zip(("default", "reverse"), (table["order"] for table in tables["main"][paper]), strict=False))
        assert {name: list(order) for name, order in spec.orders.items()} == {**main, **tables["domain_orders"][paper]}

    @pytest.mark.parametrize("spec", [DIGITS, PACS, DOMAINNET10], ids=lambda spec: spec.name)
    def test_each_order_has_all_domains_and_is_found_by_name(self, spec):
        for name, order in spec.orders.items():
            assert sorted(order) == sorted(spec.domains)
            assert resolve(RunRequest(spec.name, order=name, weights="none")).order == order


class TestWeights:
    @pytest.fixture(autouse=True)
    def _no_connection(self, monkeypatch):
        def find_none(*_):
            raise RatpError("no connection")

        self.decoded = []
        monkeypatch.setattr("ratp.streams.files.open_decoded", lambda path, *_, **__: self.decoded.append(path))
        monkeypatch.setattr("ratp.runs.plan.find_weights", find_none)

    def test_unavailable_weights_are_reported_before_decoding(self):
        for name in ("photo", "art_painting", "cartoon", "sketch"):
            write_files(Path("data/pacs", name), image_files())
        assert_error(ratp("run", "pacs", "--out", "run"), "no connection")
        assert not self.decoded and not Path("run").exists()

    def test_missing_images_are_reported_before_weights(self):
        result = ratp("run", "pacs", "--out", "run")
        assert_error(result, "photo, art_painting, cartoon, sketch", "ratp data get pacs")
        assert "no connection" not in result.err


class TestRecipes:
    @pytest.mark.parametrize(
        ("spec", "row"), [(DIGITS, "Digits"), (PACS, "PACS"), (DOMAINNET10, "DomainNet-10")], ids=["d", "p", "n"]
    )
    def test_sizes_are_the_papers(self, spec, row):
        text = shared("docs/METHODS.md").read_text()
        (cells,) = re.findall(rf"^\| {row} \|(.+)\|$", text, flags=re.M)
        _, size, _, hidden, dim, classes, batch, length, lr = (cell.strip() for cell in cells.split("|"))
        recipe = spec.recipe
        assert f"3×{recipe.size}×{recipe.size}" == size
        assert (recipe.network.hidden, recipe.network.dim, recipe.batch) == (int(hidden), int(dim), int(batch))
        assert (f"{recipe.epochs} × {recipe.steps}", recipe.lr) == (length, float(lr))
        assert len(CLASSES[spec.name]) == int(classes)
        assert recipe.network.backbone == ("dtn" if row == "Digits" else "resnet50")
        assert (recipe.memory, recipe.hold_out) == (200, 0)

    def test_training_images_change_as_in_the_published_code(self):
        colours = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.3, "greyscale": 0.1}
        shapes = {"crop": True, "crop_scale_min": 0.7, "crop_scale_max": 1.0, "flip": 0.5}
        off = dict.fromkeys(colours, 0)
        expected = [
            (DIGITS, ({**off, "crop": False, "flip": 0},) * 2),
            (PACS, ({**colours, **shapes},) * 2),
            (DOMAINNET10, ({**colours, **shapes}, {**off, **shapes})),
        ]
        for spec, both in expected:
            for transform, values in zip(
                (spec.recipe.source_transform, spec.recipe.target_transform), both, strict=True
            ):
                assert {name: getattr(transform, name) for name in values} == values


CLASSES = {
    "digits": TEN,
    "pacs": ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    "domainnet10": (
        *("dog", "golf_club", "shoe", "snowman", "spreadsheet"),
        *("squirrel", "table", "tiger", "tree", "whale"),
    ),
}
FILES = {
    "digits": ("digits", dict(zip(("MT", "MM", "SN", "SD", "US"), DIGIT_DOMAINS, strict=True))),
    "pacs": ("pacs", {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"}),
    "domainnet10": (
        "domainnet",
        {"Qu": "quickdraw", "Cl": "clipart", "Pa": "painting", "In": "infograph", "Sk": "sketch", "Re": "real"},
    ),
}


def make_benchmark(stream, layout, root="data", classes=None):
    """Small images of all domains of a benchmark in its layout."""
    data_set, domains = FILES[stream]
    for k, (code, name) in enumerate(domains.items()):
        files = image_files(classes or CLASSES[stream], seed=k)
        if layout == "zips":
            write_zip(Path(root) / data_set / f"{name}.zip", files, inside=f"{name}/")
        elif layout == "folders":
            write_files(Path(root) / data_set / name, files)
        elif layout == "beside":
            write_files(Path(root) / name, files)
        else:
            write_zip(Path(root) / f"{name}.zip", files)
        del code


class TestLoading:
    @pytest.mark.parametrize(
        ("stream", "layout"),
        [("digits", layout) for layout in ("zips", "folders", "beside", "zips beside")]
        + [("pacs", "zips"), ("domainnet10", "folders")],
    )
    def test_images_are_found_in_every_layout(self, stream, layout):
        make_benchmark(stream, layout)
        spec = find_stream(stream)
        order = spec.orders["default"]
        loaded = spec.load(order, 16, DataOptions())
        assert tuple(item.domain.name for item in loaded) == order
        for item in loaded:
            assert item.domain.classes == CLASSES[stream]
            assert item.domain.labels.tolist() == [k for k in range(len(CLASSES[stream])) for _ in range(3)]
            assert item.domain.images.shape[2:] == (16, 16)
            framed = {"MM": "original frame of 32×32 pixels; Digits-Five has 28×28"}  # as these images are
            assert (item.notes, item.origin) == ((), framed.get(item.domain.name))

    def test_codes_name_their_domains(self):
        make_benchmark("digits", "folders")
        source, *_, last = load_digits("US>MT", subset=True).fingerprints.items()
        direct = find_stream("digits").load(["MT", "US"], 32, DataOptions())
        assert source == ("US", direct[1].domain.fingerprint())
        assert last == ("MT", direct[0].domain.fingerprint())

    def test_zip_takes_precedence(self):
        make_benchmark("digits", "zips")
        write_files(Path("data/mnist"), image_files(("north",)))
        assert load_digits().order[0] == "MT"

    def test_order_can_name_some_domains(self):
        for name in ("mnist", "usps"):
            write_files(Path("data") / name, image_files(TEN))
        stream = load_digits("US>MT", subset=True)
        assert (stream.order, len(stream.source), len(stream.targets[0])) == (("US", "MT"), 20, 30)

    def test_class_without_images(self):
        make_benchmark("digits", "folders", classes=TEN[:9])
        stream = load_digits()
        assert stream.classes == TEN
        assert "MT: no images of 9, which the model therefore cannot learn." in stream.notes

    def test_all_345_classes_of_domainnet(self):
        """As published and unpacked by hand: the ten of the paper can be taken."""
        make_benchmark("domainnet10", "folders", classes=("aircraft_carrier", *CLASSES["domainnet10"], "zigzag"))
        with pytest.raises(ConfigError) as caught:
            find_stream("domainnet10").load(["Qu", "Sk"], 16, DataOptions())
        assert len(caught.value.problems) == 2
        assert "'aircraft_carrier' (3 images)" in caught.value.problems[0]
        assert "--extra-classes drop" in caught.value.problems[0]
        loaded = find_stream("domainnet10").load(["Qu", "Sk"], 16, DataOptions(extra_classes="drop"))
        for item in loaded:
            assert item.domain.classes == CLASSES["domainnet10"]
            assert item.domain.labels.bincount().tolist() == [3] * 10
            assert "aircraft_carrier (3), zigzag (3)" in item.notes[0]

    def test_a_flat_source(self):
        make_benchmark("digits", "folders")
        write_files(Path("flat/mnist"), image_files(TEN, flat=True))
        write_files(Path("flat/usps"), image_files(TEN))
        with pytest.raises(RatpError, match="'MT' has no labels"):
            load_digits("MT>US", subset=True, data=DataOptions(Path("flat")))


class TestFolder:
    def run(self, *words):
        return ratp("run", "digits", "--order", "MT>US", "--subset", "--out", "run", *OPTIONS, *words)

    @pytest.fixture
    def elsewhere(self):
        for k, name in enumerate(("mnist", "usps")):
            write_files(Path("elsewhere/digits") / name, image_files(TEN, seed=k))
        return "elsewhere"

    def test_folder_is_given(self, elsewhere):
        assert_ok(self.run("--method", "source-only", "--data", elsewhere))

    def test_folder_is_in_the_environment(self, elsewhere, monkeypatch):
        monkeypatch.setenv("RATP_DATA", elsewhere)
        assert_ok(self.run("--method", "source-only"))
        assert_error(self.run("--out", "other", "--data", "nowhere"), "not in nowhere", out="other")

    def test_string_path_from_python(self, elsewhere):
        assert load_digits("MT>US", subset=True, data=DataOptions(elsewhere)).order == ("MT", "US")

    def test_empty_folder(self):
        message = assert_error(self.run(), "domains mnist, usps of digits are not in data")
        for expected in ("digits/mnist.zip", "--data FOLDER", "RATP_DATA", "ratp data get digits"):
            assert expected in message

    def test_missing_domain(self, elsewhere):
        message = assert_error(ratp("run", "digits", "--data", elsewhere, "--out", "run", "--device", "cpu"))
        assert "domains mnist_m, svhn, syn of digits are not in" in message
        assert message.count("ratp data get digits") == 1

    def test_moved_images_and_the_run_resumes(self, elsewhere):
        assert_ok(self.run("--method", "source-only", "--data", elsewhere))
        Path(elsewhere).rename("moved")
        assert "complete already" in assert_ok(self.run("--method", "source-only", "--data", "moved")).err

    def test_it_can_be_shown(self, elsewhere):
        words = ("--order", "US>MT", "--data", elsewhere, "--out", "sheet.png", "--json")
        shown = json.loads(assert_ok(ratp("streams", "show", "digits", *words)).out)
        assert [(d["domain"], d["images"]) for d in shown["domains"]] == [("US", 30), ("MT", 30)]


class TestRebuilt:
    def test_rebuilt_set_is_labelled_everywhere(self):
        from ratp.data.formats.canonical import origin

        make_benchmark("digits", "zips")
        path = Path("data/digits/usps.zip")
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = json.dumps({"rebuilt": True, "recipe": "usps 1", "seed": 3}).encode()
        assert origin(path) == "rebuilt, not the published data: usps 1, seed 3"
        result = assert_ok(
            ratp("run", "digits", "--order", "MT>US", "--subset", "--out", "run", "-m", "source-only", *OPTIONS)
        )
        assert "note: US: rebuilt, not the published data: usps 1, seed 3" in result.err
        assert config_of()["origins"] == {"US": "rebuilt, not the published data: usps 1, seed 3"}
        report = assert_ok(ratp("report", "run"))
        for text in (result.out, report.out, Path("run/report/report.md").read_text()):
            assert "US: rebuilt, not the published data: usps 1, seed 3" in " ".join(text.split())


class TestRealImages:
    @pytest.mark.parametrize("name", DIGIT_DOMAINS)
    def test_numbers_of_images(self, name):
        from ratp.data.catalogue.locate import archives
        from ratp.data.read.tree import open_tree

        trees = [open_tree(path) for path in archives(shared("data/digits"), name)]
        assert sum(len(tree.files) for tree in trees) == (9_298 if name == "usps" else 34_000)
        assert {tree.classes for tree in trees} == {TEN}

    @pytest.mark.slow
    def test_rebuilt_syn_is_recognised(self):
        """By the hash of its files, since nothing in it says so."""
        folder = shared("data/digits")
        data = fake_with(folder / "syn.zip")
        words = ("--order", "SD>MT", "--subset", "--data", data, "--out", "run", "-m", "source-only")
        result = assert_ok(ratp("run", "digits", *words, *OPTIONS))
        assert "note: SD: regenerated SYN, not the published data" in result.err
        assert "regenerated SYN" in config_of()["origins"]["SD"]
        assert "regenerated SYN" in " ".join(result.out.split())


def fake_with(archive):
    """A data folder with one real and one synthetic domain."""
    folder = Path("real/digits")
    folder.mkdir(parents=True)
    (folder / archive.name).symlink_to(archive)
    write_zip(folder / "mnist.zip", image_files(TEN))
    return folder.parent
