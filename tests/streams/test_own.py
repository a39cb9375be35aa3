"""Streams of one's own: paths on the command line, a folder of domains, a TOML file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers import TINY, ratp
from own_images import (
    DTN,
    OPTIONS,
    assert_error,
    assert_ok,
    config_of,
    image_files,
    run_folders,
    write_files,
    write_zip,
)
from ratp.cli.console import spread_targets
from ratp.errors import ConfigError, RatpError
from ratp.executors.protocol import described, planned
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams import find_stream
from ratp.streams.folders import RECIPE, from_file, from_paths, from_root


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("day", "rain", "night")):
        write_files(Path(name), image_files(seed=k))


def run(*words):
    return ratp("run", *words, "--out", "run", "--method", "source-only", *OPTIONS)


def find_none(*_):
    raise RatpError("no connection")


def order():
    return config_of()["order"]


class TestPaths:
    def test_targets_can_be_several_arguments(self):
        assert_ok(run("folders", "--source", "day", "--targets", "night", "rain"))
        assert order() == ["day", "night", "rain"]

    @pytest.mark.parametrize(
        "words",
        [
            ["folders", "--targets", "night", "rain", "--source", "day"],
            ["--source", "day", "--targets", "night", "--targets", "rain", "--seed", "1", "folders"],
            ["folders", "--source=day", "--targets=night", "--targets=rain"],
            ["folders", "--source", "./day/", "--targets", "./night/", "../{here}/rain"],
        ],
    )
    def test_any_way_of_passing_paths(self, words, tmp_path):
        assert_ok(run(*(word.format(here=tmp_path.name) for word in words)))
        assert order() == ["day", "night", "rain"]

    @pytest.mark.parametrize(
        ("words", "spread"),
        [
            ("--targets a b c", "--targets a --targets b --targets c"),
            ("--targets a b --seed 1 x", "--targets a --targets b --seed 1 x"),
            ("--targets a --targets b c", "--targets a --targets b --targets c"),
            ("--targets --seed 1", "--targets --seed 1"),
            ("--targets=a b --seed 1", "--targets=a --targets b --seed 1"),
            ("run folders --source a", "run folders --source a"),
            ("", ""),
        ],
    )
    def test_arguments_are_parsed(self, words, spread):
        assert spread_targets(words.split()) == spread.split()

    def test_order_can_be_requested(self):
        assert_ok(run("folders", "--source", "day", "--targets", "night", "rain", "--order", "day>rain>night"))
        assert order() == ["day", "rain", "night"]

    def test_an_order_does_not_make_another_domain_the_source(self):
        words = ["folders", "--source", "day", "--targets", "night", "rain", "--order", "night>day>rain"]
        assert_error(run(*words), "the order begins with 'night', and the source is 'day'")

    def test_unavailable_weights_are_reported_before_decoding(self, monkeypatch):
        decoded = []
        monkeypatch.setattr("ratp.streams.files.open_decoded", lambda path, *_, **__: decoded.append(path))
        monkeypatch.setattr("ratp.runs.plan.find_weights", find_none)
        result = ratp("run", "folders", "--source", "day", "--out", "run", "--targets", "rain")
        assert (result.code, decoded) == (2, [])
        assert "no connection" in result.err

    def test_missing_folders_are_reported_before_weights(self, monkeypatch):
        monkeypatch.setattr("ratp.runs.plan.find_weights", find_none)
        result = ratp("run", "folders", "--source", "day", "--out", "run", "--targets", "rian")
        assert result.code == 2 and "rian" in result.err and "no connection" not in result.err

    def test_no_target(self):
        assert_error(run("folders", "--source", "day"), "at least one target", "--targets RAIN NIGHT")
        assert run("folders", "--source", "day", "--targets").code == 2

    def test_no_source(self):
        assert_error(run("folders", "--targets", "day"), "--source DAY --targets")
        assert_error(run("folders"), "--source DAY --targets")

    @pytest.mark.parametrize("words", [["--source", "day"], ["--targets", "night"]])
    def test_paths_belong_to_no_other_stream(self, words):
        assert_error(run("demo", *words), "belong to the stream folders", "'demo'")

    @pytest.mark.parametrize("again", ["day", "./day", "day/../day", "link"])
    def test_the_same_folder_twice(self, again):
        Path("link").symlink_to("day")
        assert_error(run("folders", "--source", "day", "--targets", "night", again), "day is given twice")

    def test_equal_names_in_different_parents(self):
        for k, name in enumerate(("yard/night", "roof/night", "yard/dusk")):
            write_files(Path(name), image_files(seed=5 + k))
        assert_ok(run("folders", "--source", "yard/dusk", "--targets", "yard/night", "roof/night", "day"))
        assert order() == ["dusk", "yard/night", "roof/night", "day"]

    def test_equal_names_in_equal_parents(self):
        for k, name in enumerate(("a/yard/night", "b/yard/night")):
            write_files(Path(name), image_files(seed=5 + k))
        assert_error(run_folders("day", "a/yard/night", "b/yard/night"), "'yard/night'", ".toml")

    def test_folder_and_zip_have_the_same_name(self):
        write_zip(Path("day.zip"), image_files())
        assert_error(run_folders("day", "day.zip"), "two domains would be called", ".toml")

    def test_names_are_as_written(self):
        """What a link is called, not what it leads to."""
        Path("today").symlink_to("day")
        assert_ok(run("folders", "--source", "today", "--targets", "night"))
        assert order() == ["today", "night"]

    def test_current_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir("day")
        assert_ok(run("folders", "--source", ".", "--targets", "../night"))
        assert order() == ["day", "night"]

    @pytest.mark.parametrize("name", ["a>b", "a, b", "a → b", " "])
    def test_names_that_look_like_an_order(self, name):
        write_files(Path(f"./{name}"), image_files(seed=7))
        assert_ok(run("folders", "--source", "day", "--targets", f"./{name}"))
        assert order() == ["day", name]

    def test_a_comma_in_a_name_can_be_ordered(self):
        write_files(Path("a, b"), image_files(seed=7))
        assert_ok(run("folders", "--source", "day", "--targets", "a, b", "night", "--order", "day > night > a, b"))
        assert order() == ["day", "night", "a, b"]

    def test_string_paths_from_python(self):
        request = RunRequest("folders", source="day", targets=["night", "rain"], weights="none")
        assert resolve(request).order == ("day", "night", "rain")
        assert resolve(RunRequest("folders", source="day", targets="night", weights="none")).order == ("day", "night")

    def test_paths_can_be_sent_to_another_process(self):
        order, targets = ["day", "rain", "night"], (Path("night"), Path("rain"))
        request = RunRequest("folders", order=order, source=Path("day"), targets=targets, weights="none")
        plan = planned(json.loads(json.dumps(described(resolve(request)))))
        assert (plan.order, plan.request.source, plan.request.targets) == (tuple(order), "day", ("night", "rain"))

    def test_each_request_has_its_own_folder(self):
        words = ["--method", "source-only", *OPTIONS, "--quiet"]
        for targets in (["night"], ["rain"], ["night", "rain"]):
            assert_ok(ratp("run", "folders", "--source", "day", "--targets", *targets, *words))
        assert len(list(Path("runs").iterdir())) == 3

    def test_all_mistakes_come_at_once(self):
        message = assert_error(
            run("folders", "--source", "day", "--on-bad-image", "x", "--extra-classes", "y", "--seed", "z")
        )
        assert len(message.splitlines()) == 4


class TestRoot:
    @pytest.fixture
    def yard(self):
        write_files(Path("yard/.git"), {"x": b""})
        write_files(Path("yard"), {"notes.txt": b"x"})
        write_files(Path("yard/rain"), image_files(seed=2))
        write_files(Path("yard/day"), image_files())
        write_zip(Path("yard/night.zip"), image_files(seed=1))
        return Path("yard")

    def test_it_needs_an_order(self, yard):
        assert_error(run("yard"), "give the order in which", "--order 'day>night>rain'")

    def test_root_with_order_is_a_stream(self, yard):
        assert_ok(run("./yard/", "--order", "rain>day>night"))
        assert (order(), config_of()["stream"]) == (["rain", "day", "night"], "yard")

    def test_domains_may_be_left_out(self, yard):
        assert_error(run("yard", "--order", "day>rain"), "leaves out night", "--subset")
        assert_ok(run("yard", "--order", "day>rain", "--subset"))
        assert order() == ["day", "rain"]

    def test_a_misspelt_domain(self, yard):
        assert_error(run("yard", "--order", "day>night>rian"), "unknown domain 'rian'", "Did you mean 'rain'?")

    def test_too_few_domains(self):
        Path("one/day").mkdir(parents=True)
        assert_error(run("one"), "one holds 1 folder(s) or zip(s)", "at least one target")

    def test_one_domain_is_not_a_root(self, yard):
        write_files(yard / "day", {"east/notes.txt": b"x", "empty/.hidden": b""})
        words = ["yard/day looks like one domain", "(east, north, south, west)", "folders --source yard/day --targets"]
        assert_error(run("yard/day", "--order", "east>north"), *words)
        write_files(yard, {"preview.png": image_files()["north/0.png"]})
        assert_error(run("yard"), "give the order in which")

    def test_current_folder(self, yard, monkeypatch):
        monkeypatch.chdir(yard)
        assert from_root(Path()).name == "yard"

    def test_root_can_be_shown(self, yard):
        result = assert_ok(ratp("streams", "show", "yard", "--out", "sheet.png"))
        assert all(name in result.out for name in ("rain", "day", "night"))
        assert Path("sheet.png").read_bytes().startswith(b"\x89PNG")

    def test_a_domain_without_labels_can_be_shown(self, yard):
        write_files(Path("yard/wild"), image_files(seed=4, flat=True))
        shown = json.loads(assert_ok(ratp("streams", "show", "yard", "--json")).out)["domains"]
        assert [(d["domain"], d["images"]) for d in shown] == [("day", 12), ("night", 12), ("rain", 12), ("wild", 12)]

    def test_some_domains_can_be_shown(self, yard):
        """The first one without labels is no source, so another must come first."""
        write_files(Path("yard/a"), image_files(seed=4, flat=True))
        assert_error(ratp("streams", "show", "yard"), "'a' has no labels")
        shown = json.loads(assert_ok(ratp("streams", "show", "yard", "--order", "rain>a", "--json")).out)["domains"]
        assert [d["domain"] for d in shown] == ["rain", "a"]

    def test_omitted_images_of_a_sheet_are_reported(self, yard):
        write_files(yard, {"rain/cloud/0.png": image_files()["north/0.png"]})
        assert "cloud (1)" in assert_ok(ratp("streams", "show", "yard")).err

    @pytest.mark.parametrize("name", ["folders", "x" * 300, "nowhere", "day/north/0.png"])
    def test_not_a_stream(self, name):
        assert_error(ratp("streams", "show", name), "folder of domains")


def toml(text, path="yard.toml"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    return path


GOOD = """
order = ["day", "night"]
[domains]
day = "day"
night = "night"
"""


def mistakes(text):
    with pytest.raises(ConfigError) as caught:
        from_file(Path(toml(text)))
    return caught.value.problems


class TestFile:
    def test_stream_file_runs(self):
        toml('name = "garden"\n' + GOOD)
        assert_ok(run("yard.toml"))
        assert (order(), config_of()["stream"]) == (["day", "night"], "garden")

    def test_paths_are_relative_to_the_file(self, monkeypatch, tmp_path):
        toml(GOOD.replace('"day"\n', '"../day"\n').replace('"night"\n', f'"{tmp_path}/night"\n'), "etc/yard.toml")
        assert_ok(run("etc/yard.toml"))
        Path("elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        spec = find_stream("../etc/yard.toml")
        assert [item.domain.name for item in spec.load(["day", "night"], 32, resolve(RunRequest()).data)] == [
            "day",
            "night",
        ]

    def test_names_are_those_of_the_user(self):
        toml('order = ["sun", "a > b"]\n[domains]\nsun = "day"\n"a > b" = "night"\n')
        assert_ok(run("yard.toml"))
        assert order() == ["sun", "a > b"]

    def test_domains_can_be_left_out_of_the_order(self):
        """Named, and not in the order: they need not even exist."""
        toml(GOOD + 'later = "nowhere"\n')
        assert_ok(run("yard.toml"))
        assert order() == ["day", "night"]

    def test_another_order_can_be_requested(self):
        toml(GOOD + 'rain = "rain"\n')
        assert_ok(run("yard.toml", "--order", "rain>day>night"))
        assert order() == ["rain", "day", "night"]

    def test_byte_order_mark(self):
        assert from_file(Path(toml("\ufeff" + GOOD))).name == "yard"

    def test_values_of_the_recipe(self):
        toml(
            GOOD
            + """
            [recipe]
            size = 48
            lr = 0.25
            std = [1, 2, 3]
            network.hidden = 7
            [recipe.target_transform]
            flip = 0.25
            """
        )
        recipe = from_file(Path("yard.toml")).recipe
        assert (recipe.size, recipe.lr, recipe.std) == (48, 0.25, (1.0, 2.0, 3.0))
        assert (recipe.network.hidden, recipe.target_transform.flip) == (7, 0.25)
        assert recipe.batch == RECIPE.batch

    def test_a_backbone_brings_its_usual_values(self):
        toml(GOOD + '[recipe]\nnetwork.backbone = "dtn"\nnetwork.dim = 9\n')
        recipe = from_file(Path("yard.toml")).recipe
        assert (recipe.size, recipe.mean, recipe.network.hidden) == (32, (0.5, 0.5, 0.5), 256)
        assert recipe.network.dim == 9
        assert resolve(RunRequest("yard.toml")).changed == {}

    def test_explicit_values_override_the_file(self):
        toml(GOOD + '[recipe]\nnetwork.backbone = "dtn"\nepochs = 9\nsteps = 8\n')
        plan = resolve(RunRequest("yard.toml", changes={"epochs": 2}))
        assert (plan.recipe.epochs, plan.recipe.steps, plan.changed) == (2, 8, {"epochs": 2})

    def test_every_mistake_is_reported(self):
        message = mistakes(
            """
            nmae = "x"
            name = 3
            order = ["day", "nihgt", "day"]
            [domains]
            day = "day"
            night = "~nobody-of-that-name/x"
            again = "./day"
            [recipe]
            size = 0
            epoch = 3
            mean = [1, 2]
            lr = 2024-05-05
            network.backbone = "resnet51"
            network.width = "wide"
            """
        )
        assert len(message) == 12
        text = "\n".join(message)
        for words in (
            "key in yard.toml 'nmae'. Did you mean 'name'?",
            "name must be a text",
            "'nihgt'. Did you mean 'night'?",
            "names 'day' twice",
            "'~nobody-of-that-name/x' is not the path",
            "two domains lie in",
            "size must be at least 1",
            "Did you mean 'epochs'?",
            "mean must be a list of 3",
            "lr must be a number",
            "Did you mean 'resnet50'?",
            "network.width must be a number",
        ):
            assert words in text, text

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", ["[domains] must name", "order must list"]),
            ('order = "day>night"\n[domains]\nday = "day"\nnight = "night"', ["order must list"]),
            ('order = ["day"]\n[domains]\nday = "day"\nnight = "night"', ["order must list at least two"]),
            ('order = ["day", 3]\n[domains]\nday = "day"\nnight = "night"', ["order must list"]),
            ('order = ["day", "night"]\ndomains = ["day", "night"]', ["[domains] must name"]),
            ('order = ["day", "night"]\n[domains]\nday = 1\nnight = "night"', ["'day': its path must be a text"]),
            ('order = ["day", "night"]\n[domains.day]\npath = "day"\n[domains.night]\n', ["'night': it needs a path"]),
            (GOOD.replace('"day"\n', '{ path = "day", unlabelled = "yes" }\n'), ["'day': unlabelled must be true or"]),
            (GOOD.replace('"day"\n', '{ pth = "day" }\n'), ["'day': unknown key 'pth'. Did you mean 'path'?"]),
            (GOOD.replace('"day"\n', '{ path = "day", label = true }\n'), ["'day': unknown key 'label'"]),
            (GOOD.replace('"day"\n', "{ path = 1, unlabelled = 2 }\n"), ["got 1", "got 2"]),
            ('order = ["day", "night"]\n[domains]\nday = { pth = "day" }', ["must name", "unknown key", "'night'"]),
            (f"recipe = 3\n{GOOD}", ["[recipe] must be a table"]),
            (f"name = ' '\n{GOOD}", ["name must be a text"]),
            (GOOD.replace('"day"\n', '""\n'), ["'' is not the path"]),
            (GOOD.replace('"day"\n', '"a\\u0000b"\n'), ["is not the path"]),
            (f"{GOOD}[recipe]\nnetwork = 3", ["unknown switch 'network'"]),
            (f"{GOOD}[recipe]\nsize.x = 3", ["unknown switch 'size.x'"]),
        ],
    )
    def test_mistakes(self, text, expected):
        problems = mistakes(text)
        assert len(problems) == len(expected), problems
        for problem, words in zip(problems, expected, strict=True):
            assert words in problem

    def test_mistakes_of_file_and_command_line_come_at_once(self):
        toml(GOOD + "[recipe]\nsize = 0\n")
        message = assert_error(run("yard.toml", "--seed", "x"), "size must be", "seed must be")
        assert len(message.splitlines()) == 2

    @pytest.mark.parametrize("data", [b"order = [", b"\xff\xfe\x00", b"a = 1\na = 2", b"PK\x03\x04"])
    def test_invalid_toml(self, data):
        Path("yard.toml").write_bytes(data)
        assert_error(run("yard.toml"), "yard.toml is not ")

    def test_missing_file(self):
        assert_error(run("yrad.toml"), "yrad.toml", "No such file")

    def test_folder_with_the_name_of_a_file(self):
        Path("yard.toml").mkdir()
        assert_error(run("yard.toml"), "yard.toml", "Is a directory")

    def test_missing_domain(self):
        toml(GOOD.replace('"night"\n', '"pictures/night"\n'))
        assert_error(run("yard.toml"), "pictures/night does not exist")

    def test_a_name_that_is_a_path(self):
        toml('name = "../../out [x]"\n' + GOOD)
        assert_ok(ratp("run", "yard.toml", "--method", "source-only", *OPTIONS))
        (folder,) = Path("runs").iterdir()
        assert folder.name.startswith("_.._out__x_-source-only-2022-")
        assert_ok(ratp("report", folder, "--export", "results", "--quiet"))
        (result,) = Path("results").iterdir()
        assert re.fullmatch(r"_\.\._out__x_-source-only-2022-[0-9a-f]{12}\.json", result.name)

    def test_it_loads_from_python(self):
        toml(GOOD + "[recipe]\nsize = 16\n")
        stream = resolve(RunRequest("yard.toml", device="cpu")).load_stream()
        assert (stream.order, stream.image_size) == (("day", "night"), (16, 16))


class TestRecipe:
    def test_default_recipe_is_for_photographs(self):
        spec = from_paths(Path("day"), [Path("night")])
        assert (spec.recipe.size, spec.recipe.network.backbone) == (224, "resnet50")

    def test_values_of_methods_are_those_for_own_folders(self):
        plan = resolve(RunRequest("folders", source="day", targets=["night"], changes=TINY_DTN))
        assert plan.spec.values == "folders"
        assert plan.recipe.size == 32


TINY_DTN = {"network.backbone": DTN[1].partition("=")[2], **TINY}
