"""Studies: what a file asks for, what became of every run, and whose folder it is."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import re
import shutil
import textwrap
import threading
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import ratp.studies.file
from helpers import accuracy_of, files_of, no_processes, unreadable
from own_images import image_files, write_files
from ratp._core.files import write_tensors
from ratp._core.locks import LOCK_FILE, exclusive, is_held
from ratp.config import as_dict
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.reports.study import missing_table
from ratp.runs.events import StageStarted
from ratp.runs.plan import resolve
from ratp.runs.record import RunRecord, read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.studies.execute import run_study
from ratp.studies.file import read_study
from ratp.studies.study import Study
from tiny_study import grid, study_file, traces

pytestmark = pytest.mark.usefixtures("_no_processes")

CONFIGS = Path(__file__).parents[2] / "configs"
NO_WEIGHTS = RunRequest(device="cpu", weights="none")


def plan_study(text, folder=None, name="study.toml"):
    """The study of a text, in the current folder."""
    Path(name).write_text(text, encoding="utf-8")
    return read_study(name, folder, NO_WEIGHTS)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


class TestFiles:
    def test_the_examples_of_the_documentation(self):
        blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", ratp.studies.file.__doc__, flags=re.M)
        (example,) = [textwrap.dedent(block) for block in blocks if block.strip()]
        study = plan_study(example)
        assert study.title == "RaTP and SHOT, two orders"
        # two methods and a variant in two orders with two seeds; of the second grid, one is among them
        assert len(study.entries) == 3 * 2 * 2 + 2
        assert {row.label for entry in study.entries for row in entry.rows} == {
            "ratp", "shot", "without RandMix", "ratp, r_con 0.5", "ratp, r_con 0.9",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "runs"),
        {
            "paper/ablations": 45,
            "paper/digits": 186,
            "paper/digits-ten-orders": 80,
            "paper/domainnet10": 93,
            "paper/domainnet10-ten-orders": 80,
            "paper/pacs": 186,
            "paper/pacs-ten-orders": 80,
            "paper/sensitivity": 13,
            "paper/stationary": 84,
            "demo": 24,
        }.items(),
    )
    def test_the_files_of_the_repository(self, name, runs):
        """Planned without an image, and each opens with the command that runs it."""
        path = CONFIGS / f"{name}.toml"
        study = read_study(path, base=NO_WEIGHTS)
        assert len(study.entries) == runs
        assert study.folder == Path("runs/studies") / path.stem
        opening = path.read_text(encoding="utf-8").splitlines()[0]
        assert opening == f"# ratp study run configs/{name}.toml"
        assert {*study.states().values()} == {"waiting"}

    def test_there_are_no_other_files(self):
        known = self.test_the_files_of_the_repository.pytestmark[0].args[1]
        assert {str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.toml")} == {n for n, _ in known}

    def test_the_demo_has_its_own_sizes(self):
        study = read_study(CONFIGS / "demo.toml", base=NO_WEIGHTS)
        assert all(not entry.plan.changed for entry in study.entries)
        assert len({entry.plan.method for entry in study.entries}) == 4
        assert len({entry.plan.order for entry in study.entries}) == 2
        assert len({entry.plan.seed for entry in study.entries}) == 3

    def test_tables_within_tables_are_dotted_names(self):
        text = '[[grid]]\nstream = "digits"\nmethods = ["ratp"]\n'
        spellings = ["set = { pca.weight = 0.5 }", 'set = { "pca.weight" = 0.5 }', "[grid.set]\npca.weight = 0.5"]
        names = {plan_study(text + spelling).entries[0].name for spelling in spellings}
        assert len(names) == 1
        assert as_dict(plan_study(text + spellings[0]).entries[0].plan.config)["pca.weight"] == 0.5

    def test_lists_are_values_too(self):
        """Of a switch, and of a sweep."""
        study = plan_study(
            grid('methods = ["ratp"]', "sweep = { randmix.kernel_sizes = [[3, 5], [7]] }")
            + grid('methods = ["ratp"]').replace("set = {", "set = { randmix.kernel_sizes = [3, 5],")
        )
        sizes = [entry.plan.config.randmix.kernel_sizes for entry in study.entries]
        assert sizes == [(5, 9, 13, 17), (3, 5), (7,)]
        assert [row.label for row in study.entries[1].rows] == ["ratp, randmix.kernel_sizes 3,5", "ratp, grid 2"]

    def test_all_methods(self):
        from ratp.methods import METHODS

        study = plan_study(grid('methods = ["all"]'))
        assert [entry.plan.method.name for entry in study.entries] == list(METHODS)

    def test_a_variant_changes_what_its_grid_says(self):
        study = plan_study(grid('variant = [{ name = "more", method = "ratp", set = { steps = 9, pca.scale = 8 } }]'))
        assert (study.entries[0].plan.recipe.steps, study.entries[0].plan.recipe.batch) == (9, 8)

    def test_files_are_named_as_seen_from_the_study(self, tmp_path):
        example = Path(__file__).parents[2] / "examples" / "self_training.py"
        (tmp_path / "far").mkdir()
        shutil.copy(example, tmp_path / "far" / "mine.py")
        (tmp_path / "far" / "ratp").mkdir()  # a folder that is called as a method is
        file = study_file(tmp_path / "far", grid('methods = ["mine.py", "ratp"]'))
        mine, ours = read_study(file, base=NO_WEIGHTS, trust_methods=True).entries
        assert (mine.plan.method.name, mine.rows[0].label) == ("self-training", "mine.py")
        assert ours.plan.method.name == "ratp"
        (tmp_path / "far" / "yard.toml").write_text("")
        with pytest.raises(ConfigError, match=r"yard\.toml: \[domains\] must name"):
            read_study(study_file(tmp_path / "far", grid('methods = ["ratp"]', stream="yard.toml")))

    def test_byte_order_mark(self):
        Path("study.toml").write_bytes(b"\xef\xbb\xbf" + grid('methods = ["ratp"]').encode())
        assert len(read_study("study.toml").entries) == 1

    def test_names_are_single_lines(self):
        study = plan_study('title = "one\\ntwo"\n' + grid('variant = [{ name = "a\\n  b", method = "ratp" }]'))
        assert (study.title, study.entries[0].rows[0].label) == ("one two", "a b")

    def test_grids_may_have_titles(self):
        study = plan_study(grid('methods = ["ratp"]') + grid('title = "three\\nfour"\nmethods = ["tent"]'))
        assert study.titles == study.results().titles == {1: "three four"}
        with pytest.raises(ConfigError, match="grid 1: title must be a text"):
            plan_study(grid('title = 3\nmethods = ["ratp"]'))


DIGITS = '[[grid]]\nstream = "digits"\nmethods = ["ratp"]\n'


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('titel = "x"\n' + DIGITS, ["unknown key 'titel'", "'title'"]),
            ("title = 5\n" + DIGITS, ["title must be a text, got 5"]),
            ("", ["no runs", "[[grid]]"]),
            ('title = "x"', ["no runs"]),
            ("grid = []", ["no runs"]),
            ("grid = 5", ["grid must be a list, got 5"]),
            ("grid = [5]", ["grid 1 must be a table, [[grid]]"]),
            (DIGITS.replace("[[grid]]", "[grid]"), ["[[grid]], with two brackets"]),
            ("[[grid]]", ["grid 1 is empty"]),
            ('[[grid]]\nmethods = ["ratp"]', ['grid 1 names no stream, e.g. stream = "digits"']),
            ('[[grid]]\nstream = "digits"', ["grid 1 has no runs", "methods, variants or a sweep"]),
            (DIGITS + "sed = [1]", ["grid 1: unknown key 'sed'", "'seeds'"]),
            (DIGITS.replace('"digits"', "5"), ["grid 1: stream must be a text, got 5"]),
            (DIGITS.replace("digits", "digts"), ["grid 1: unknown stream 'digts'", "'digits'"]),
            (DIGITS.replace("digits", ""), ["grid 1: unknown stream ''"]),
            (DIGITS.replace("ratp", "rapt"), ["grid 1: unknown method 'rapt'", "'ratp'"]),
            (DIGITS.replace('"ratp"', "1, 2"), ["grid 1: methods must be texts, got 1, 2"]),
            (DIGITS.replace('"ratp"', ""), ["grid 1: methods is empty"]),
            (DIGITS + 'orders = "reverse"', ["grid 1: orders must be a list, got 'reverse'"]),
            (DIGITS + 'orders = ["revers"]', ["grid 1: ", "'revers'", "'reverse'"]),
            (DIGITS + "orders = []", ["grid 1: orders is empty"]),
            (DIGITS + 'orders = ["MT>MM"]', ["grid 1: ", "SN"]),
            (DIGITS + 'seeds = ["1", 2, "3"]', ["grid 1: seeds must be whole numbers, got '1', '3'"]),
            (DIGITS + "seeds = [true]", ["grid 1: seeds must be whole numbers, got True"]),
            (DIGITS + "seeds = [1.0]", ["grid 1: seeds must be whole numbers, got 1.0"]),
            (DIGITS + "seeds = [[1]]", ["grid 1: seeds must be whole numbers, got a list"]),
            (DIGITS + "seeds = 1", ["grid 1: seeds must be a list, got 1"]),
            (DIGITS + "seeds = []", ["grid 1: seeds is empty"]),
            (DIGITS + "seeds = [9223372036854775808]", ["grid 1: the seed must be in", "9223372036854775808"]),
            (DIGITS + "seeds = [-1]", ["grid 1: the seed must be in", "-1"]),
            (DIGITS + f"seeds = [1{'0' * 5000}]", ["not valid TOML"]),
            (DIGITS + f"seeds = {'[' * 5000}", ["not valid TOML"]),
            (DIGITS + 'preset = "papr"', ["grid 1: unknown preset of ratp 'papr'", "'paper'"]),
            (DIGITS + "preset = true", ["grid 1: preset must be a text, got True"]),
            (DIGITS + 'subset = "yes"', ["grid 1: subset must be true or false, got 'yes'"]),
            (DIGITS + 'precision = "bf61"', ["grid 1: unknown precision 'bf61'", "'bf16'"]),
            (DIGITS + "set = 5", ["grid 1: set must be a table, got 5"]),
            (DIGITS + "set = { pca.wieght = 1 }", ["grid 1: unknown switch 'pca.wieght'", "'pca.weight'"]),
            (DIGITS + 'set = { augment = "perhaps" }', ["grid 1: augment must be true or false, got 'perhaps'"]),
            (DIGITS + "set = { lr = nan }", ["grid 1: lr must be a number, got nan"]),
            (DIGITS + "set = { lr = 2020-02-02 }", ["grid 1: lr must be a number"]),
            (DIGITS + "set = { randmix.kernel_sizes = [] }", ["grid 1: randmix.kernel_sizes must be a list"]),
            (DIGITS + 'variant = ["x"]', ["grid 1, variant 1 must be a table, [[grid.variant]]"]),
            (DIGITS + '[grid.variant]\nname = "x"\nmethod = "ratp"', ["[[grid.variant]], with two brackets"]),
            (DIGITS + '[[grid.variant]]\nname = "x"', ["grid 1, variant 1 has no method"]),
            (DIGITS + '[[grid.variant]]\nmethod = "ratp"', ["grid 1, variant 1 has no name"]),
            (DIGITS + '[[grid.variant]]\nname = " "\nmethod = "ratp"', ["grid 1, variant 1 has no name"]),
            (DIGITS + '[[grid.variant]]\nname = "x"\nmethod = "rapt"', ["grid 1, x: unknown method 'rapt'", "'ratp'"]),
            (DIGITS + 'variant = [{name = "x", method = "ratp", sett = 1}]', ["unknown key 'sett'", "'set'"]),
            (DIGITS + 'variant = [{name = 5, method = "ratp"}]', ["variant 1: name must be a text, got 5"]),
            (
                DIGITS + 2 * '[[grid.variant]]\nname = "x"\nmethod = "ratp"\n',
                ["grid 1 has two rows called 'x'"],
            ),
            (
                DIGITS + 'variant = [{name = "ratp", method = "ratp", set = {augment = false}}]',
                ["grid 1 has two rows called 'ratp'"],
            ),
            (DIGITS + "seeds = [1, 2, 1]", ["grid 1: seeds has 1 more than once"]),
            (DIGITS.replace('["ratp"]', '["ratp", "ratp"]'), ["grid 1: methods has ratp more than once"]),
            (DIGITS + 'orders = ["reverse", "reverse"]', ["grid 1: orders has reverse more than once"]),
            (DIGITS + "sweep = 5", ["grid 1: sweep must be a table, got 5"]),
            (DIGITS + "sweep = { r_con = 0.5 }", ["sweep of r_con must list values"]),
            (DIGITS + "sweep = { r_con = [] }", ["sweep of r_con must list values"]),
            (DIGITS + "sweep = { r_con = [0.5, 0.5] }", ["grid 1: sweep of r_con has 0.5 more than once"]),
            (DIGITS + 'sweep = { r_con = [0.5, "much"] }', ["grid 1, ratp, r_con much: r_con must be a number"]),
            (DIGITS + "sweep = { r_cn = [1, 2] }", ["grid 1, ratp, r_cn 1; ratp, r_cn 2: unknown switch", "'r_con'"]),
            (DIGITS.replace('["ratp"]', '["ratp", "shot"]') + "sweep = { lr = [1] }", ["just that one"]),
            (DIGITS.replace('["ratp"]', '["all"]') + "sweep = { lr = [1] }", ["just that one"]),
            ('[[grid]]\nstream = "digits"\nsweep = { lr = [1] }', ["just that one"]),
            ("[[grid]\n", ["not valid TOML", "line 1"]),
            ("seeds = [1]\nseeds = [2]", ["not valid TOML"]),
        ],
    )
    def test_each_mistake_is_reported(self, text, expected):
        with pytest.raises(ConfigError) as error:
            plan_study(text)
        (problem,) = error.value.problems
        assert problem.startswith("study.toml")
        for part in expected:
            assert part in problem, problem
        assert "\n" not in problem

    @pytest.mark.faults(19, "a study of more than 10,000 runs is refused at once")
    @pytest.mark.parametrize(
        ("parts", "expected"),
        [([range(100_000)], "grid 1 has 100,000"), ([range(6000), range(6000, 12_000)], "it has 12,000")],
    )
    def test_too_many_runs_are_refused(self, parts, expected):
        with pytest.raises(ConfigError, match=f"{expected} runs, and a study at most 10,000: split it"):
            plan_study("\n".join(f"{DIGITS}seeds = {list(part)}" for part in parts))

    def test_runs_that_differ_in_the_seed_are_checked_once(self, monkeypatch):
        checked = []
        monkeypatch.setattr(ratp.studies.file, "resolve", lambda request: checked.append(request) or resolve(request))
        plans = [entry.plan for entry in plan_study(f"{DIGITS}seeds = {list(range(50))}").entries]
        assert len(checked) == 1
        assert all(plan == resolve(plan.request) for plan in plans)
        with pytest.raises(ConfigError, match="the seed must be in"):
            plan_study(f"{DIGITS}seeds = [1, -2]")

    def test_all_mistakes_are_reported(self):
        """A mistake hides no other, and one shared by many runs is reported once."""
        text = """
            titel = "x"
            [[grid]]
            stream = "digts"
            methods = ["ratp", "shot", "rapt"]
            seeds = ["1", 2]
            orders = "default"
            sede = 5
            [[grid.variant]]
            name = "x"
            methd = "ratp"
            [[grid.variant]]
            nme = "y"
            method = "shto"
            preset = 3
            set = { augmnt = false }
            [[grid]]
            stream = "digits"
            orders = ["default", "sideways"]
            methods = ["ratp", "shot"]
            preset = "paper"
            set = { pca.scale = 8, lrr = 1, epochs = "many" }
            seeds = [1, 2, -3]
            [[grid]]
            methods = ["tnt"]
        """
        with pytest.raises(ConfigError) as error:
            plan_study(textwrap.dedent(text))
        found = list(error.value.problems)
        parts = (
            "unknown key 'titel'",
            "grid 1: unknown key 'sede'",
            "grid 1: orders must be a list",
            "grid 1: seeds must be whole numbers, got '1'",
            "grid 1, variant 1: unknown key 'methd'. Did you mean 'method'?",
            "grid 1, variant 1 has no method",
            "grid 1, variant 2: unknown key 'nme'. Did you mean 'name'?",
            "grid 1, variant 2 has no name",
            "grid 1, variant 2: preset must be a text, got 3",
            "grid 1, variant 2: unknown method 'shto'. Did you mean 'shot'?",
            "grid 1, variant 2: unknown switch 'augmnt'. Did you mean 'augment'?",
            "grid 1: unknown stream 'digts'. Did you mean 'digits'?",
            "grid 1, rapt: unknown method 'rapt'",
            "grid 2: unknown order 'sideways'",
            "grid 2, shot (paper): unknown preset of shot 'paper'",
            "grid 2, shot (paper): unknown switch 'pca.scale'",
            "grid 2, ratp (paper): unknown switch 'lrr'",
            "grid 2, shot (paper): unknown switch 'lrr'",
            "grid 2: the seed must be in",
            "grid 2: epochs must be a whole number, got 'many'",
            "grid 3 names no stream",
            "grid 3: unknown method 'tnt'. Did you mean 'tent'?",
        )
        for part in parts:
            assert len([problem for problem in found if part in problem]) == 1, (part, found)
        assert len(found) == len(parts)

    def test_rows_of_a_preset_are_named_after_it(self):
        own = DIGITS.replace('"ratp"', '"shot"') + 'preset = "own-head"'
        study = plan_study(DIGITS.replace('"ratp"', '"shot"') + own)
        assert [row.label for entry in study.entries for row in entry.rows] == ["shot", "shot (own-head)"]

    def test_mistakes_outside_the_file_are_not_blamed_on_it(self):
        Path("study.toml").write_text(DIGITS + "sed = 1")
        with pytest.raises(ConfigError) as error:
            read_study("study.toml", base=RunRequest(device="gpu", precision="half"))
        device, precision, file = error.value.problems
        assert device.startswith("unknown device 'gpu'")
        assert precision.startswith("unknown precision 'half'")
        assert file.startswith("study.toml: grid 1: unknown key 'sed'")

    def test_one_run_in_two_precisions(self, monkeypatch):
        """Their runs would get the same directory, and tables one number for both."""
        monkeypatch.setattr("ratp.runs.plan.find_precision", lambda requested, device: requested)
        both = (f'{DIGITS}precision = "{name}"\n' for name in ("tf32", "bf16"))
        with pytest.raises(ConfigError, match="grid 2: two grids request the same run in tf32 and bf16"):
            plan_study("".join(both))

    def test_two_streams_of_one_name(self):
        """Their runs would get the same directory."""
        for folder in ("a", "b"):
            for seed, name in enumerate(("ink", "mud")):
                write_files(Path(folder) / "yard" / name, image_files(count=1, seed=seed))
        line = 'methods = ["ratp"]\norders = ["ink>mud"]\n'
        with pytest.raises(ConfigError, match="grid 2: two streams are called 'yard'"):
            plan_study(f'[[grid]]\nstream = "a/yard"\n{line}[[grid]]\nstream = "b/yard"\n{line}')
        assert len(plan_study(f'[[grid]]\nstream = "a/yard"\n{line}' * 2).entries) == 1

    def test_invalid_files(self):
        Path("folder").mkdir()
        Path("latin").write_bytes('title = "\xe9"'.encode("latin-1"))
        for name, expected in {
            "nowhere.toml": "cannot read the study nowhere.toml: No such file",
            "folder": "cannot read the study folder: Is a directory",
            "latin": "latin is not UTF-8 text",
            "x" * 300: "File name too long",
        }.items():
            with pytest.raises(ConfigError, match=expected):
                read_study(name)


class TestNames:
    """A run's directory is named after all that determines it, and after nothing else."""

    BASE = 'seeds = [1]\nmethods = ["ratp"]\norders = ["default"]'

    def name(self, old="", new="", text=None):
        (entry,) = plan_study(grid(self.BASE).replace(old, new) if text is None else text).entries
        return entry.name

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("seeds = [1]", "seeds = [2]"),
            ('"default"', '"reverse"'),
            ('"default"', '"scan>photo>street>font"'),
            ("set = {", "set = { pca.weight = 0.5,"),
            ("set = {", "set = { lr = 0.5,"),
            ("seeds", 'preset = "paper"\nseeds'),
            ('"ratp"', '"shot"'),
            ('"demo"', '"digits"'),
        ],
    )
    def test_changes_that_rename_a_run(self, old, new):
        assert self.name(old, new) != self.name()

    @pytest.mark.parametrize(
        "text",
        [
            f'title = "Another"\n# why not\n{grid(BASE)}',
            grid(BASE) * 2,
            grid('variant = [{ name = "mine", method = "ratp" }]', "seeds = [1]"),
            grid(BASE).replace('"default"', '"scan > photo > font > street"'),
            grid(BASE).replace("set = {", "set = { pca.weight = 1.0,"),
        ],
    )
    def test_changes_that_keep_a_run_name(self, text):
        usual = plan_study(grid(self.BASE)).entries[0]
        assert as_dict(usual.plan.config)["pca.weight"] == 1.0
        assert self.name(text=text) == usual.name

    def test_order_of_grids_keeps_run_names(self):
        first, second = grid(self.BASE), grid('methods = ["shot", "tent"]')
        there, back = plan_study(first + second), plan_study(second + first)
        assert {entry.name for entry in there.entries} == {entry.name for entry in back.entries}
        assert [entry.name for entry in there.entries] != [entry.name for entry in back.entries]

    def test_run_of_two_grids_runs_once_and_shows_twice(self):
        study = plan_study(
            grid('methods = ["ratp", "shot"]', "seeds = [1, 2]")
            + grid('variant = [{ name = "baseline", method = "shot" }]', "seeds = [2, 3]")
        )
        assert len(study.entries) == 5
        assert [[(row.grid, row.label) for row in entry.rows] for entry in study.entries] == [
            [(0, "ratp")], [(0, "ratp")], [(0, "shot")], [(0, "shot"), (1, "baseline")], [(1, "baseline")],
        ]  # fmt: skip
        assert study.entries[3].title == "shot, demo scan>photo>font>street, seed 2"

    def test_the_file_names_the_folder(self):
        text = grid(self.BASE)
        assert plan_study(text, name="my study.toml").folder == Path("runs/studies/my_study")
        assert plan_study(text, Path("elsewhere")).entries[0].folder.parent == Path("elsewhere")


WILD = 'variant = [{ name = "wild", method = "source-only", set = { lr = 1e30 } }]'
TWO = grid('methods = ["source-only"]', "seeds = [1, 2]")


def runs_of(study):
    """All its runs that are planned or under way in this process."""
    return [item for item in gc.get_objects() if type(item) is Run and item.folder.parent == study.folder]


@dataclass
class FinishedStudy:
    """A finished study, the result reported for every run, and how many runs held images at once."""

    study: Study
    ends: dict[str, RunRecord | RatpError] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory):
    """A study of three runs; the first fails."""
    folder = tmp_path_factory.mktemp("made")
    path = study_file(folder, grid(WILD, "seeds = [1]"), TWO)
    finished = FinishedStudy(read_study(path, folder / "runs", NO_WEIGHTS))
    finished.study.claim()

    def look(run, event):
        if isinstance(event, StageStarted):
            finished.held.append(sum("stream" in item.__dict__ for item in runs_of(finished.study)))

    with no_processes():
        run_study(
            finished.study,
            at_once=1,
            on_event=look,
            on_end=lambda entry, result: finished.ends.update({entry.name: result}),
        )
    return finished


@pytest.fixture
def study(finished_study, tmp_path):
    """A copy of it, to do with as one likes."""
    shutil.copytree(finished_study.study.folder, tmp_path / "runs")
    return read_study(finished_study.study.path, tmp_path / "runs", NO_WEIGHTS)


class TestStates:
    def test_failed_run_does_not_stop_the_others(self, finished_study):
        study, ends = finished_study.study, finished_study.ends
        assert list(study.states().values()) == ["failed", "finished", "finished"]
        wild, first, second = (ends[entry.name] for entry in study.entries)
        assert isinstance(wild, TrainingError)
        assert isinstance(first, RunRecord)
        assert second.matrix.complete
        assert "A smaller learning rate" in study.reason(study.entries[0], "failed")
        assert study.entries[0].record() is None
        assert study.entries[1].record() == first

    def test_no_results_yet(self, tmp_path, finished_study):
        study = read_study(finished_study.study.path, tmp_path / "new", NO_WEIGHTS)
        assert {*study.states().values()} == {"waiting"}
        assert not (tmp_path / "new").exists()

    def test_a_finished_run_is_never_repeated(self, study):
        """Its directory does not change, and its end is not reported."""
        before = {entry.name: traces(entry.folder) for entry in study.entries[1:]}
        reported = []
        for _ in range(2):
            run_study(study, at_once=1, on_end=lambda entry, result: reported.append(entry.name))
        assert {entry.name: traces(entry.folder) for entry in study.entries[1:]} == before
        assert {*reported} == {study.entries[0].name}

    def test_run_in_progress(self, study):
        """The other process keeps it; once that stops, the run resumes from there."""
        entry = study.entries[1]
        undisturbed = files_of(entry.folder)
        shutil.rmtree(entry.folder)
        assert study.state(entry) == "waiting"
        current = Run(entry.plan, entry.folder).events()
        for _ in range(8):
            next(current)
        assert study.state(entry) == "running"
        before = traces(entry.folder)
        run_study(study, at_once=1)
        assert traces(entry.folder) == before
        assert study.state(entry) == "running"
        current.close()
        assert study.state(entry) == "interrupted"
        run_study(study, at_once=1)
        assert study.state(entry) == "finished"
        for name in ("matrix.json", "weights.safetensors"):
            assert files_of(entry.folder)[name] == undisturbed[name]

    @pytest.mark.faults(17, "two processes that work on the same study share its runs")
    def test_two_processes_share_a_study(self, study):
        """The second finds a run under way that was waiting when it looked; that is no failure."""
        entry, other = study.entries[1:]
        for gone in (entry, other):
            shutil.rmtree(gone.folder)
        reported = {}
        current = Run(other.plan, other.folder).events()

        def begin(run, event):
            if run.folder == entry.folder and not is_held(other.folder):
                next(current)

        run_study(study, at_once=1, on_event=begin, on_end=lambda entry, result: reported.update({entry.name: result}))
        assert "in use by" in str(reported[other.name])
        assert list(study.states().values()) == ["failed", "finished", "running"]
        current.close()
        assert list(study.states().values()) == ["failed", "finished", "interrupted"]

    @pytest.mark.parametrize(
        ("left", "at_once"), [(1, 1), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((1, 2), (2, 1), (2, 2)))]
    )
    def test_result_is_independent_of_other_runs(self, study, left, at_once):
        """On a processor each has one thread: threads decide the last bits."""
        kept = [(entry.folder / "weights.safetensors").read_bytes() for entry in study.entries[1 : 1 + left]]
        for entry in study.entries[1 : 1 + left]:
            shutil.rmtree(entry.folder)
        run_study(study, at_once=at_once)
        assert [(entry.folder / "weights.safetensors").read_bytes() for entry in study.entries[1 : 1 + left]] == kept
        environments = [json.loads((entry.folder / "environment.json").read_text()) for entry in study.entries[1:]]
        assert {about["threads"] for about in environments} == {1}

    @pytest.mark.parametrize("content", ["{", None])
    def test_a_run_that_lost_its_config_says_which_folder_to_remove(self, study, content):
        entry = study.entries[1]
        path = entry.folder / "config.json"
        path.unlink()
        if content is not None:
            path.write_text(content)
        message = study.reason(entry, study.state(entry))
        assert f"Move {entry.folder} away or remove it" in message
        run_study(study, at_once=1)
        assert (study.state(entry), study.reason(entry, "failed")) == ("failed", message)
        shutil.rmtree(entry.folder)
        run_study(study, at_once=1)
        assert study.state(entry) == "finished"

    def test_failed_run_is_retried_and_failure_cleared(self, study):
        entry = study.entries[1]
        kept = accuracy_of(entry.folder)
        shutil.rmtree(entry.folder)
        entry.folder.mkdir()
        (entry.folder / "thesis.txt").write_text("mine")
        run_study(study, at_once=1)
        assert study.state(entry) == "failed"
        assert "thesis.txt" in study.reason(entry, "failed")
        assert files_of(entry.folder) == {"thesis.txt": b"mine"}
        (entry.folder / "thesis.txt").unlink()
        assert study.state(entry) == "failed"
        run_study(study, at_once=1)
        assert study.state(entry) == "finished"
        assert accuracy_of(entry.folder) == kept
        shutil.rmtree(entry.folder)
        assert study.state(entry) == "waiting"

    def test_failure_that_cannot_be_cleared(self, study):
        (file,) = (study.folder / "failures").iterdir()
        file.unlink()
        file.mkdir()
        with pytest.raises(RunDirectoryError, match=f"cannot write {re.escape(str(file))}"):
            study.clear_failure(study.entries[0])

    def test_missing_failure_reason(self, study):
        (file,) = (study.folder / "failures").iterdir()
        for content in ("", "{}", "[]", '{"error": " "}'):
            file.write_text(content)
            assert study.state(study.entries[0]) == "failed"
            assert study.reason(study.entries[0], "failed") == "no reason was kept"

    def test_only_the_final_file_makes_a_run_finished(self, study):
        entry = study.entries[1]
        (entry.folder / "weights.safetensors").unlink()
        assert study.state(entry) == "interrupted"
        run_study(study, at_once=1)
        assert study.state(entry) == "finished"

    @pytest.mark.parametrize("name", ["matrix.json", "config.json"])
    @pytest.mark.parametrize("content", ["", "{}", "[]", '{"domains": 5, "accuracy": [[1]]}'])
    def test_a_damaged_run_is_not_finished(self, study, name, content):
        (study.entries[1].folder / name).write_text(content)
        assert study.state(study.entries[1]) == "interrupted"
        assert study.entries[1].record() is None

    @pytest.mark.parametrize("name", ["journal.jsonl", "environment.json"])
    @pytest.mark.parametrize("content", [None, "[]\n[]\n", "broken\n{}\n"])
    @pytest.mark.filterwarnings("ignore::ratp.runs.run.JournalWarning")
    def test_damaged_finished_run_is_reported_missing_and_rerun(self, study, name, content):
        entry, whole = study.entries[1:]
        before = accuracy_of(entry.folder)
        (entry.folder / name).unlink() if content is None else (entry.folder / name).write_text(content)
        assert study.state(entry) == "interrupted"
        _, damaged, other = study.results().runs
        assert damaged.record is None and name in damaged.reason
        assert replace(other.record, differing=None) == whole.record() and not other.reason
        assert f"interrupted: {damaged.reason}" in str(missing_table(study.results()).rows)
        run_study(study, at_once=1)
        assert study.state(entry) == "finished"
        assert accuracy_of(entry.folder) == before
        assert entry.record().seconds > 0

    def test_a_run_that_needs_images_fails_alone(self, study, tmp_path):
        both = read_study(
            study_file(tmp_path, '[[grid]]\nstream = "pacs"\nmethods = ["source-only"]\n', TWO),
            study.folder,
            replace(NO_WEIGHTS, data=ratp.DataOptions(tmp_path / "nowhere")),
        )
        shutil.rmtree(both.entries[1].folder)
        run_study(both, at_once=1)
        assert list(both.states().values()) == ["failed", "finished", "finished"]
        assert "nowhere" in both.reason(both.entries[0], "failed")

    def test_resumed_and_stopped_run_has_not_failed(self, study, monkeypatch):
        wild = study.entries[0]

        def stop(run, event):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_study(study, at_once=1, on_event=stop)
        assert study.state(wild) == "interrupted"


class TestClaim:
    def test_a_folder_that_is_claimed_stays_as_it_is(self, study):
        study.claim()
        before = traces(study.folder)
        study.claim()
        assert traces(study.folder) == before
        replace(study, title="Another title").claim()
        after = traces(study.folder)
        assert '"Another title"' in after.pop("study.json")[-1].decode()
        assert before.keys() - after.keys() == {"study.json"} and after.items() <= before.items()

    def test_another_file_of_that_name_is_another_study(self, study, tmp_path):
        study.claim()
        (tmp_path / "elsewhere").mkdir()
        other = read_study(study_file(tmp_path / "elsewhere", TWO), study.folder, NO_WEIGHTS)
        assert other.name == study.name
        before = traces(study.folder)
        with pytest.raises(RunDirectoryError, match=r"another study of that name, .*tiny.toml.*--out"):
            other.claim()
        with pytest.raises(RunDirectoryError, match="another study"):
            other.check_folder()
        assert traces(study.folder) == before

    def test_file_and_folder_can_be_copied_or_moved(self, tmp_path):
        (tmp_path / "first").mkdir()
        read_study(study_file(tmp_path / "first", TWO), tmp_path / "first" / "runs", NO_WEIGHTS).claim()
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
        read_study(tmp_path / "copy" / "tiny.toml", tmp_path / "copy" / "runs", NO_WEIGHTS).claim()
        (tmp_path / "copy" / "tiny.toml").rename(tmp_path / "tiny.toml")
        moved = read_study(tmp_path / "tiny.toml", tmp_path / "copy" / "runs", NO_WEIGHTS)
        moved.claim()
        assert json.loads((moved.folder / "study.json").read_text())["file"] == "../../tiny.toml"

    def test_new_folder_is_created(self, finished_study, tmp_path):
        study = read_study(finished_study.study.path, tmp_path / "a" / "b", NO_WEIGHTS)
        study.claim()
        about = json.loads((tmp_path / "a" / "b" / "study.json").read_text())
        assert (study.folder / about.pop("file")).samefile(study.path)
        assert about.keys() == {"schema", "study", "title", "sources", "plan"}
        assert (about["schema"], about["study"], about["title"]) == (1, "tiny", "Tiny runs")

    def test_folder_of_another_study(self, study, tmp_path):
        other = read_study(study_file(tmp_path, TWO, name="other.toml"), study.folder, NO_WEIGHTS)
        before = traces(study.folder)
        with pytest.raises(RunDirectoryError, match=r"belongs to the study 'tiny', not to 'other'.*--out"):
            other.claim()
        assert traces(study.folder) == before

    def test_a_folder_with_runs_of_its_own(self, study, tmp_path):
        """Brought from elsewhere, they count; anything beside them is somebody else's."""
        there = tmp_path / "brought"
        there.mkdir()
        finished = next(entry for entry in study.entries if study.state(entry) == "finished")
        shutil.copytree(finished.folder, there / finished.folder.name)
        moved = read_study(study.path, there, NO_WEIGHTS)
        moved.claim()
        assert (there / "study.json").exists()
        states = {entry.folder.name: moved.state(entry) for entry in moved.entries}
        assert states.pop(finished.folder.name) == "finished"
        assert set(states.values()) == {"waiting"}
        (there / "study.json").unlink()
        write_files(there, {"a.jpg": b"mine"})
        with pytest.raises(RunDirectoryError, match=r"holds other files \(a.jpg\) and no study"):
            moved.claim()

    def test_a_folder_with_a_report(self, finished_study, tmp_path):
        """It can be written from known results before any run starts."""
        folder = write_files(tmp_path / "runs", {"report/index.html": b"<p>"})
        read_study(finished_study.study.path, folder, NO_WEIGHTS).claim()
        assert (folder / "study.json").exists()

    def test_a_folder_with_other_files(self, finished_study, tmp_path):
        folder = write_files(tmp_path / "photos", {"a.jpg": b"mine", "b/c.jpg": b"mine"})
        before = traces(folder)
        with pytest.raises(RunDirectoryError, match=r"holds other files \(a.jpg, b\) and no study.*--out"):
            read_study(finished_study.study.path, folder, NO_WEIGHTS).claim()
        assert traces(folder) == before

    def test_leftovers_of_killed_writer_are_not_foreign(self, finished_study, tmp_path):
        folder = write_files(tmp_path / "runs", {".study.json.part-x1y2": b"{"})
        read_study(finished_study.study.path, folder, NO_WEIGHTS).claim()
        assert (folder / "study.json").exists()

    @pytest.mark.parametrize("content", ["", "{", "[]"])
    def test_damaged_marker(self, study, content):
        (study.folder / "study.json").write_text(content)
        with pytest.raises(RunDirectoryError, match=r"study.json is damaged: .*Remove that file: the runs of"):
            study.claim()
        before = study.states()
        (study.folder / "study.json").unlink()
        study.claim()
        assert study.states() == before

    def test_unreadable_marker(self, study, monkeypatch):
        unreadable(monkeypatch, "study.json")
        with pytest.raises(RunDirectoryError, match=r"study.json: Permission denied\. Make it readable, or choose"):
            study.claim()

    def test_unusable_folder(self, finished_study, tmp_path):
        (tmp_path / "file").write_text("mine")
        for folder in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("x" * 300), Path("/proc/ratp")):
            study = read_study(finished_study.study.path, folder, NO_WEIGHTS)
            assert {*study.states().values()} == {"waiting"}
            with pytest.raises(RunDirectoryError, match=r"cannot use .* for a study.*--out"):
                study.claim()
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.parametrize("is_finished", [True, False])
    def test_foreign_run_under_a_run_name(self, study, is_finished):
        """Copied there: it is not taken for the run, and not touched either."""
        _, entry, other = study.entries
        shutil.rmtree(entry.folder)
        shutil.copytree(other.folder, entry.folder)
        if not is_finished:
            (entry.folder / "weights.safetensors").unlink()
        shutil.rmtree(other.folder)
        before = traces(entry.folder)
        assert entry.record() is None
        run_study(study, at_once=1)
        assert list(study.states().values()) == ["failed", "failed", "finished"]
        assert "holds another run. It differs in seed: 2 there, 1 requested." in study.reason(entry, "failed")
        assert traces(entry.folder) == before


class TestKnownResults:
    @pytest.fixture
    def records(self, finished_study, tmp_path):
        """What was exported from finished runs, read again."""
        study = finished_study.study
        for entry in study.entries[1:]:
            entry.record().export(tmp_path / f"{entry.name}.json")
        return [read_run(tmp_path / f"{entry.name}.json") for entry in study.entries[1:]]

    def elsewhere(self, tmp_path, text=TWO):
        return read_study(study_file(tmp_path, text), tmp_path / "elsewhere", NO_WEIGHTS)

    def test_known_results_replace_runs(self, records, tmp_path):
        study = self.elsewhere(tmp_path).with_results(records)
        assert {*study.states().values()} == {"finished"}
        study.claim()
        run_study(study, at_once=1)
        assert list(files_of(study.folder)) == ["study.json"]
        assert [entry.record() for entry in study.entries] == records

    def test_remaining_runs_are_run(self, records, tmp_path):
        study = self.elsewhere(tmp_path).with_results(records[1:])
        study.claim()
        assert list(study.states().values()) == ["waiting", "finished"]
        run_study(study, at_once=1)
        assert list(study.states().values()) == ["finished", "finished"]
        assert [entry.folder.exists() for entry in study.entries] == [True, False]
        assert study.entries[0].record().matrix == records[0].matrix

    @pytest.mark.parametrize(
        "text",
        [
            TWO.replace("[1, 2]", "[3, 4]"),
            TWO.replace("seeds", 'orders = ["reverse"]\nseeds'),
            TWO.replace('"epochs" = 2', '"epochs" = 3'),
            TWO.replace("source-only", "shot"),
            TWO.replace("set = {", "set = { lr = 0.25,"),
        ],
    )
    def test_results_of_other_runs_do_not_count(self, text, records, tmp_path):
        assert {*self.elsewhere(tmp_path, text).with_results(records).states().values()} == {"waiting"}

    def begun_from(self, record, sha256):
        """A record as a run would have left it that started from some weights."""
        return replace(record, config={**record.config, "weights": sha256})

    @pytest.mark.parametrize(
        ("weights", "standing_in"),
        [("none", [True, False, False]), ("imagenet", [False, True, True]), ("mine", [False, True, False])],
    )
    def test_initial_weights_count(self, weights, standing_in, records, tmp_path):
        """Random numbers are no weights, a file is no other file; the published weights may have come as a file."""
        write_tensors(tmp_path / "mine", {"weight": torch.zeros(1)}, {})
        base = replace(NO_WEIGHTS, weights=weights if weights != "mine" else str(tmp_path / "mine"))
        study = read_study(study_file(tmp_path, TWO), tmp_path / "elsewhere", base)
        mine = hashlib.sha256((tmp_path / "mine").read_bytes()).hexdigest()
        found = [study.with_results([self.begun_from(records[0], there)]) for there in (None, mine, "a" * 64)]
        assert [known.entries[0].result is not None for known in found] == standing_in

    @pytest.mark.parametrize(
        ("requested", "standing_in"), [("", [True, True, True]), ('precision = "fp32"\n', [True, False, True])]
    )
    def test_explicit_precision_counts(self, requested, standing_in, records, tmp_path):
        study = self.elsewhere(tmp_path, TWO.replace("seeds", f"{requested}seeds"))
        unknown = {name: value for name, value in records[0].environment.items() if name != "precision"}
        environments = unknown | {"precision": "fp32"}, unknown | {"precision": "bf16"}, unknown
        found = [study.with_results([replace(records[0], environment=there)]) for there in environments]
        assert [known.entries[0].result is not None for known in found] == standing_in

    def older(self, record, **changes):
        """A record as it would have been written before there was a switch for momentum."""
        switches = {name: value for name, value in record.config["switches"].items() if name != "sgd.momentum"}
        return replace(record, config={**record.config, "switches": switches, **changes})

    def test_results_older_than_a_switch_count(self, records, tmp_path):
        older = [self.older(record) for record in records]
        study = self.elsewhere(tmp_path).with_results(older)
        assert [entry.record() for entry in study.entries] == older

    def test_results_are_labelled_by_differences_from_defaults(self, records, tmp_path):
        changed_records = [
            replace(record, config={**record.config, "changed": {"sgd.momentum": 0.125}}) for record in records
        ]
        study = self.elsewhere(tmp_path).with_results(changed_records)
        changed = [run.changed for run in study.results().records()]
        assert changed == [entry.plan.changed for entry in study.entries]

    def test_older_results_do_not_count_for_changed_runs(self, records, tmp_path):
        changed = TWO.replace("set = {", 'set = { "sgd.momentum" = 0.125,')
        older = [self.older(record) for record in records]
        assert {*self.elsewhere(tmp_path, changed).with_results(older).states().values()} == {"waiting"}
        older = [self.older(record, preset="paper") for record in records]
        assert {*self.elsewhere(tmp_path).with_results(older).states().values()} == {"waiting"}

    def test_unfinished_results_do_not_count(self, records, tmp_path):
        half = [replace(r, matrix=replace(r.matrix, accuracy=r.matrix.accuracy[:2])) for r in records]
        assert {*self.elsewhere(tmp_path).with_results(half).states().values()} == {"waiting"}

    def test_local_results_take_precedence(self, study, records):
        known = study.with_results([replace(record, path=Path("elsewhere")) for record in records])
        assert [entry.record().path for entry in known.entries[1:]] == [e.folder for e in study.entries[1:]]

    def test_newest_of_several_counts(self, records, tmp_path):
        newer = [replace(r, journal=({"event": "stage_finished", "time": "2999-01-01"},)) for r in records]
        study = self.elsewhere(tmp_path).with_results([*newer, *records])
        assert [entry.record() for entry in study.entries] == newer

    @pytest.mark.parametrize("earlier", ["2025-01-01T10:00:00+0200", "2025-01-01", "soon", ""])
    def test_newest_is_independent_of_time_zone(self, earlier, records, tmp_path):
        at = {time: replace(records[0], journal=({"time": time},)) for time in (earlier, "2025-01-01T09:00:00+0000")}
        for found in ([*at.values()], [*at.values()][::-1]):
            assert self.elsewhere(tmp_path).with_results(found).entries[0].result is at["2025-01-01T09:00:00+0000"]

    def test_local_results_need_no_known_ones(self, study):
        assert list(study.with_results([]).states().values()) == ["failed", "finished", "finished"]


class TestImages:
    """Of many planned runs, only those under way hold images."""

    @pytest.mark.slow
    def test_one_after_another(self, tmp_path):
        """Also when one fails: its error keeps none of them."""
        study = read_study(study_file(tmp_path, grid(WILD), TWO), tmp_path / "runs", NO_WEIGHTS)
        study.claim()
        held = {}

        def look(run, event):
            assert [item for item in runs_of(study) if "stream" in item.__dict__] == [run]
            if run.folder.name not in held:
                gc.collect()
                assert not alive()
                things = (run.stream, run.stream.source.images, run.method, run.method.network)
                held[run.folder.name] = [weakref.ref(thing) for thing in things]

        def alive():
            return {name for name, things in held.items() if any(thing() is not None for thing in things)}

        def count(entry, result):
            assert len(runs_of(study)) == 3

        run_study(study, at_once=1, on_event=look, on_end=count)
        assert list(study.states().values()) == ["failed", "finished", "finished"]
        assert len(held) == 3
        gc.collect()
        assert not alive()

    def test_two_at_once(self, finished_study):
        assert 1 <= max(finished_study.held) <= 2


class TestIsHeld:
    def test_checking_does_not_lock(self, tmp_path):
        assert not is_held(tmp_path / "nowhere")
        assert not is_held(tmp_path)
        assert list(tmp_path.iterdir()) == [tmp_path / "here"]
        with exclusive(tmp_path):
            assert is_held(tmp_path)
        assert not is_held(tmp_path)

    def test_read_only_user_can_check(self, tmp_path):
        with exclusive(tmp_path):
            (tmp_path / LOCK_FILE).chmod(0o444)
            assert is_held(tmp_path)

    def test_checking_excludes_nobody(self, tmp_path):
        """Who asks has the lock for an instant; who wants to run then is not refused for that."""
        handle = os.open(tmp_path / LOCK_FILE, os.O_RDONLY | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_SH)  # as is_held does
        timer = threading.Timer(0.03, os.close, [handle])
        timer.start()
        with exclusive(tmp_path):
            assert is_held(tmp_path)
        timer.join()
