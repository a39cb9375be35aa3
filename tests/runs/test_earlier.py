"""A run that goes on from a finished one learns what it would have learnt from the start, and says where it began."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace

import pytest

from helpers import TINY, accuracy_of, files_of, journal_of, load_tool, same_tensors, tensors_of, toy_domain, toy_plan
from ratp._core.environment import changes
from ratp.errors import ConfigError, RunDirectoryError
from ratp.evaluation.matrix import Matrix
from ratp.executors.local import run_all
from ratp.reports.page import write_report
from ratp.reports.summary import group_runs, sections
from ratp.runs.continuation import ContinuedWarning
from ratp.runs.events import StageStarted, Trained
from ratp.runs.plan import resolve
from ratp.runs.record import fingerprint_of, read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.runs.states import BEFORE, LATEST, StateWarning
from ratp.streams.stream import LoadedDomain
from ratp.studies.reuse import Identity

NAMES = ("ink", "mud", "fog", "ice")
DOMAINS = [toy_domain(name, count) for name, count in zip(NAMES, (40, 32, 36, 28), strict=True)]
SHORT = 2
# RaTP, single passes, one that replaces the classifier, one that attends, several networks, generators, no phase.
METHODS = ("ratp", "shot", "tent", "t3a", "gsfda", "cotta", "adacon", "pden", "source-only")


def plan(count=4, method="shot", **how):
    changes = {"epochs": 1, "steps": 3, **how.pop("changes", {})}
    return toy_plan(method, DOMAINS[:count], changes=changes, **how)


def go_on(folder, after, run_plan=None, **how):
    """Continues from an earlier run; returns the stages that run."""
    with pytest.warns(ContinuedWarning, match=r"TDG of .* is over the stages from"):
        events = list(Run(run_plan or plan(), folder, after=after, **how).events())
    return [event.stage for event in events if isinstance(event, StageStarted)]


def stop_in(run, stage, steps=2):
    """Stops a run after so many steps of a stage."""
    events, steps_made = run.events(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContinuedWarning)
        for event in events:
            steps_made += isinstance(event, Trained) and event.stage == stage
            if steps_made == steps:
                break
    events.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An earlier run, one that goes on from it, and one of the whole order."""
    root = tmp_path_factory.mktemp("runs")
    Run(plan(SHORT), root / "early").execute()
    before = files_of(root / "early")
    assert go_on(root / "late", root / "early") == [2, 3]
    assert files_of(root / "early") == before
    Run(plan(), root / "whole").execute()
    return root


@pytest.fixture
def early(runs, tmp_path):
    return shutil.copytree(runs / "early", tmp_path / "early")


def test_what_the_model_gets_wrong_is_that_of_the_whole_run(runs):
    late, whole = (read_run(runs / name).details for name in ("late", "whole"))
    assert [[*late[stage]] for stage in range(4)] == [["ink", "mud"], *[list(NAMES)] * 3]
    assert all(counts == whole[stage][name] for stage, domains in late.items() for name, counts in domains.items())


def assert_same(folder, whole, short=SHORT):
    """The same network and state; the same accuracies, but for those of new domains in the stages before."""
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(whole, name))
    found, expected = accuracy_of(folder), accuracy_of(whole)
    for stage, (row, other) in enumerate(zip(found, expected, strict=True)):
        measured = len(row) if stage >= short - 1 else short
        assert row == [*other[:measured], *([None] * (len(row) - measured))]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name == "ratp" else pytest.mark.slow) for name in METHODS]
)
def test_equals_the_run_of_the_whole_order(method, tmp_path):
    Run(plan(SHORT, method), tmp_path / "early").execute()
    assert go_on(tmp_path / "late", tmp_path / "early", plan(method=method)) == [2, 3]
    Run(plan(method=method), tmp_path / "whole").execute()
    assert_same(tmp_path / "late", tmp_path / "whole")


def test_chained_runs(runs, tmp_path):
    assert go_on(tmp_path / "three", runs / "early", plan(3)) == [2]
    assert go_on(tmp_path / "four", tmp_path / "three") == [3]
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(tmp_path / "four", name), tensors_of(runs / "whole", name))
    matrix = read_run(tmp_path / "four").matrix
    assert matrix.late == {"fog": "mud", "ice": "fog"}
    expected = accuracy_of(runs / "whole")
    assert matrix.metric("TDG")["ice"] == expected[2][3]


class TestDirectory:
    def test_the_files_are_those_of_any_run(self, runs):
        assert files_of(runs / "late").keys() == files_of(runs / "whole").keys()

    def test_journal_is_complete(self, runs):
        kinds = [e["event"] for e in journal_of(runs / "late")]
        assert kinds.count("run_started") == kinds.count("run_finished") == kinds.count("continued") == 1
        assert "run_resumed" not in kinds
        assert [e["stage"] for e in journal_of(runs / "late", "stage_finished")] == [0, 1, 2, 3]
        (event,) = journal_of(runs / "late", "continued")
        config = json.loads((runs / "early" / "config.json").read_text())
        assert (event["after"], event["finished_stages"]) == (config["fingerprint"], SHORT)
        assert event["accuracy"] == dict(zip(NAMES[SHORT:], accuracy_of(runs / "late")[SHORT - 1][SHORT:], strict=True))

    def test_config_names_the_earlier_run_and_its_hash(self, runs):
        late, whole = (json.loads((runs / name / "config.json").read_text()) for name in ("late", "whole"))
        assert late.pop("after")["stages"] == SHORT
        assert late.pop("fingerprint") != whole["fingerprint"] == fingerprint_of(late)

    def test_result_is_not_of_the_whole_order(self, runs):
        records = {name: read_run(runs / name) for name in ("late", "whole")}
        assert [Identity.of(plan()).matches(record.config) for record in records.values()] == [False, True]
        assert not load_tool("reproducibility").counts(records["late"])

    def test_earlier_features_are_copied(self, tmp_path):
        Run(plan(SHORT), tmp_path / "early", features=True).execute()
        go_on(tmp_path / "late", tmp_path / "early", features=True)
        assert len(read_run(tmp_path / "late").features) == len(NAMES)
        assert write_report([read_run(tmp_path / "late")], tmp_path / "report").exists()

    def test_changed_environment_is_reported(self, early, tmp_path):
        path = early / "environment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"python": "2.7"}))
        with pytest.warns(ContinuedWarning, match=r"another environment: python 2\.7"):
            Run(plan(), tmp_path / "late", after=early).execute()
        assert "python 2.7" in read_run(tmp_path / "late").moves[0]

    def test_gpu_index_does_not_matter(self):
        was = {"device": "cuda:0", "python": "3.11"}
        assert changes(was, {"device": "cuda", "python": "3.11"}) == {}
        assert changes(was, {"device": "cpu", "python": "3.11"}) == {"device": ["cuda", "cpu"]}

    def test_targets_without_labels(self, tmp_path):
        """Some of the stages before and some new; predictions are those of the whole order."""

        def bare(count, *names):
            domains = [d.unlabelled() if d.name in names else d for d in DOMAINS[:count]]
            files = tuple(f"{i}.png" for i in range(100))
            loaded = [LoadedDomain(d, files=files[: len(d.images)]) for d in domains]
            return replace(bare_plan := plan(count), spec=replace(bare_plan.spec, load=lambda *_: loaded))

        Run(bare(SHORT, "mud"), tmp_path / "early").execute()
        go_on(tmp_path / "late", tmp_path / "early", bare(4, "mud", "ice"))
        Run(bare(4, "mud", "ice"), tmp_path / "whole").execute()
        late, whole = (read_run(tmp_path / name).matrix for name in ("late", "whole"))
        assert late.late == {"fog": "mud"}
        assert late.metric("TDA") == whole.metric("TDA")
        assert late.metric("TDG").keys() == whole.metric("TDG").keys() == {"fog"}
        predictions = [files_of(tmp_path / name) for name in ("late", "whole")]
        for name in ("predictions-mud.csv", "predictions-ice.csv"):
            assert predictions[0][name] == predictions[1][name]

    def test_the_guard_judges_new_stages(self, tmp_path):
        acting = [replace(plan(count), guard="act") for count in (SHORT, 4)]
        Run(acting[0], tmp_path / "early").execute()
        go_on(tmp_path / "late", tmp_path / "early", acting[1])
        Run(acting[1], tmp_path / "whole").execute()
        assert_same(tmp_path / "late", tmp_path / "whole")
        verdicts = [[e["guard"] for e in read_run(tmp_path / name).guarded] for name in ("late", "whole")]
        assert len(verdicts[0]) == 3 and verdicts[0] == verdicts[1]


class TestReport:
    def test_continued_runs_are_marked_and_kept_apart(self, runs):
        (section,) = sections(group_runs([read_run(runs / name) for name in ("late", "whole")]))
        labels = [group.label for group in section.groups]
        assert labels == ["shot (continued)", "shot"]
        assert [group.competes for group in section.groups] == [False, True]
        notes = " ".join(section.notes())
        assert "TDG of fog, ice is over the stages from mud on." in notes
        assert "labels of targets" not in notes

    def test_seeds_are_one_group(self, runs, tmp_path):
        Run(plan(SHORT, seed=1), tmp_path / "early").execute()
        go_on(tmp_path / "late", tmp_path / "early", plan(seed=1))
        (group,) = group_runs([read_run(runs / "late"), read_run(tmp_path / "late")])
        (section,) = sections([group])
        assert len(group.counted) == 2 and "differ in more" not in " ".join(section.notes())

    @pytest.mark.slow
    def test_every_table_and_picture(self, runs, tmp_path):
        page = write_report([read_run(runs / name) for name in ("late", "whole")], tmp_path / "report")
        assert "is over the stages from mud on" in page.read_text(encoding="utf-8")
        written = read_run(runs / "late")
        written.export(tmp_path / "late.json")
        assert read_run(tmp_path / "late.json").matrix.to_json() == written.matrix.to_json()
        assert read_run(tmp_path / "late.json").is_continued


class TestStopped:
    @pytest.mark.parametrize("gone", [False, True])
    def test_same_call_resumes(self, gone, early, runs, tmp_path):
        """Works without the earlier run too: its state was copied."""
        stop_in(Run(plan(), tmp_path / "late", after=early), stage=2)
        if gone:
            shutil.rmtree(early)
        events = list(Run(plan(), tmp_path / "late", after=early).events())
        started = [(event.stage, event.done) for event in events if isinstance(event, StageStarted)]
        assert started == [(2, 2), (3, 0)]
        assert_same(tmp_path / "late", runs / "whole")
        assert len(journal_of(tmp_path / "late", "continued")) == 1

    @pytest.mark.parametrize("left", [(), ("config.json",), ("config.json", "matrix.json", "environment.json")])
    def test_stopped_before_the_state_was_copied(self, left, early, runs, tmp_path, monkeypatch):
        with monkeypatch.context() as killed:
            killed.setattr("ratp.runs.directory.States.save", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                Run(plan(), tmp_path / "late", after=early).execute()
        for path in (tmp_path / "late").iterdir():
            if path.name not in left:
                path.unlink()
        assert go_on(tmp_path / "late", early) == [2, 3]
        assert_same(tmp_path / "late", runs / "whole")

    def test_only_state_is_lost(self, early, runs, tmp_path):
        stop_in(Run(plan(), tmp_path / "late", after=early), stage=2)
        (tmp_path / "late" / LATEST).write_bytes(b"")
        with pytest.warns(StateWarning), pytest.warns(ContinuedWarning):
            Run(plan(), tmp_path / "late", after=early).execute()
        assert_same(tmp_path / "late", runs / "whole")

    def test_previous_state_is_used_later_on(self, early, runs, tmp_path):
        stop_in(Run(plan(), tmp_path / "late", after=early), stage=3)
        (tmp_path / "late" / LATEST).write_bytes(b"")
        shutil.rmtree(early)
        with pytest.warns(StateWarning, match="after 2 of 4"):
            Run(plan(), tmp_path / "late", after=early).execute()
        assert_same(tmp_path / "late", runs / "whole")

    def test_all_states_are_lost(self, early, tmp_path):
        stop_in(Run(plan(), tmp_path / "late", after=early), stage=3)
        for name in (LATEST, BEFORE):
            (tmp_path / "late" / name).write_bytes(b"")
        with pytest.raises(RunDirectoryError, match="Restore one of them"):
            Run(plan(), tmp_path / "late", after=early).execute()

    def test_finished_run_has_nothing_to_do(self, runs):
        before = files_of(runs / "late")
        assert list(Run(plan(), runs / "late", after=runs / "gone").events()) == []
        assert files_of(runs / "late") == before

    @pytest.mark.slow
    def test_in_other_processes(self, tmp_path):
        def begin_run(name, order, after=None):
            requests = [
                RunRequest("demo", "shot", order, seed=s, changes=small, subset=True, device="cpu") for s in (1, 2)
            ]
            befores = [after and tmp_path / f"{after}-{request.seed}" for request in requests]
            pairs = zip(requests, befores, strict=True)
            runs = [Run(resolve(asked), tmp_path / f"{name}-{asked.seed}", after=before) for asked, before in pairs]
            assert all(result.matrix.complete for result in run_all(runs, at_once=2))
            return runs

        small = {**TINY, "epochs": 1}
        begin_run("early", "scan>font")
        late, whole = begin_run("late", "scan>font>street", "early"), begin_run("whole", "scan>font>street")
        for run, other in zip(late, whole, strict=True):
            assert_same(run.folder, other.folder)


class TestRefused:
    def assert_error(self, tmp_path, early, other, *expected):
        """Nothing is written, and every difference has its sentence."""
        before = files_of(early)
        with pytest.raises(ConfigError) as caught:
            Run(other, tmp_path / "late", after=early)
        assert not (tmp_path / "late").exists() and files_of(early) == before
        assert len(caught.value.problems) == len(expected)
        for part, problem in zip(expected, caught.value.problems, strict=True):
            assert part in problem

    @pytest.mark.parametrize(
        ("other", "expected"),
        [
            (plan(seed=7), "another seed: 2022 there, 7 requested"),
            (plan(method="tent"), "another method: shot there, tent requested"),
            (plan(changes={"epochs": 2}), "another value of epochs: 1 there, 2 requested"),
            (replace(plan(), guard="act", request=None), "another guard: off or record there, act requested"),
            (replace(plan(), order=("ink", "fog", "mud", "ice")), "does not begin with that of"),
            (replace(plan(), order=("mud", "ink", "fog")), "does not begin with that of"),
            (plan(SHORT), "has all of ink>mud: there is no further domain"),
        ],
    )
    def test_another_run(self, other, expected, early, tmp_path):
        self.assert_error(tmp_path, early, other, expected)

    def test_all_differences_are_reported(self, early, tmp_path):
        others = [DOMAINS[0], toy_domain("mud", 30), *DOMAINS[2:]]
        other = toy_plan("shot", others, seed=7, changes={"epochs": 2, "steps": 3})
        self.assert_error(tmp_path, early, other, "another seed", "another value of epochs", "the images of mud")

    def test_unfinished_earlier_run(self, tmp_path):
        stop_in(Run(plan(SHORT), tmp_path / "early"), stage=1)
        with pytest.raises(RunDirectoryError, match="is not finished: 1 of 2 stages"):
            Run(plan(), tmp_path / "late", after=tmp_path / "early")

    def test_not_a_run(self, tmp_path):
        with pytest.raises(RunDirectoryError, match="does not exist"):
            Run(plan(), tmp_path / "late", after=tmp_path / "early")
        with pytest.raises(RunDirectoryError, match="not a run directory"):
            Run(plan(), tmp_path / "late", after=tmp_path)

    def test_a_result_without_its_state(self, early, tmp_path):
        read_run(early).export(tmp_path / "early.json")
        with pytest.raises(RunDirectoryError, match="not a run directory that a run can continue"):
            Run(plan(), tmp_path / "late", after=tmp_path / "early.json")

    def test_earlier_run_is_the_run_itself(self, early):
        with pytest.raises(ConfigError, match="choose another with --out"):
            Run(plan(), early, after=early.parent / "." / "early")

    @pytest.mark.parametrize("content", [None, b"", b"<html>"])
    def test_a_state_that_is_lost(self, content, early, tmp_path):
        (early / LATEST).unlink()
        if content is not None:
            (early / LATEST).write_bytes(content)
        with pytest.raises(RunDirectoryError, match=r"state\.safetensors is .*no run can continue it.*Without --after"):
            Run(plan(), tmp_path / "late", after=early).execute()
        assert not files_of(tmp_path / "late")

    def test_different_earlier_run_on_resume(self, early, tmp_path):
        Run(plan(3), tmp_path / "three").execute()
        stop_in(Run(plan(), tmp_path / "late", after=early), stage=2)
        with pytest.raises(RunDirectoryError, match=r"differs in after: run .* there, run .* requested"):
            Run(plan(), tmp_path / "late", after=tmp_path / "three").execute()

    def test_earlier_run_must_be_given_again(self, early, tmp_path):
        stop_in(Run(plan(), tmp_path / "late", after=early), stage=2)
        with pytest.raises(RunDirectoryError, match="name that with --after"):
            Run(plan(), tmp_path / "late").execute()

    def test_in_place_the_option_is_named(self, early):
        with pytest.raises(RunDirectoryError, match=r"only goes further.*with --after .*early"):
            Run(plan(), early).execute()
        with pytest.raises(RunDirectoryError) as caught:
            Run(plan(seed=7), early).execute()
        assert "--after" not in str(caught.value)


class TestMatrix:
    EARLY = Matrix(("S", "A"), ((99.0, 60.0), (95.0, 90.0)))

    def test_worked_example(self):
        matrix = self.EARLY.with_domains(("S", "A", "B", "C"), {"B": 50.0})
        matrix = matrix.with_row((92.0, 85.0, 80.0, float("nan"))).with_row((91.0, 84.0, 79.0, float("nan")))
        assert matrix.complete and matrix.late == {"B": "A"}
        assert matrix.metric("TDG") == {"A": 60, "B": 50}
        assert matrix.metric("TDA") == {"S": 99, "A": 90, "B": 80}
        assert matrix.metric("FA") == {"S": (95 + 92 + 91) / 3, "A": 84.5, "B": 79}
        assert Matrix.from_json(matrix.to_json()).to_json() == matrix.to_json()
