"""``--online``: what a target is like as it streams past before its stage. It changes no other result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import each_method, journal_of, ratp, same_tensors, tensors_of, tiny_plan, toy_domains, toy_plan
from own_images import OPTIONS, assert_ok, image_files, write_files
from ratp._core.environment import Randomness
from ratp.errors import ConfigError
from ratp.evaluation.accuracy import accuracy
from ratp.evaluation.online import Score
from ratp.executors.protocol import decoded, described, encoded, planned
from ratp.runs.continuation import ContinuedWarning
from ratp.runs.events import Streamed
from ratp.runs.plan import resolve
from ratp.runs.record import read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import JournalWarning, Run

# An online method that draws from torch's global generator while it observes.
NOISY = """
import torch
from dataclasses import dataclass
import ratp
from ratp.functional.optim import SGDConfig
from ratp.config import switch
from ratp.methods.shared.online import OnlineNetwork


@dataclass(frozen=True)
class NoisyConfig:
    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class Noisy(OnlineNetwork):
    name = "noisy"
    title = "Noise on the classifier"
    family = "test"
    paper = "none"
    config_type = NoisyConfig

    def begin_stage(self):
        pass

    def learn(self, inputs):
        logits = self.network(inputs).logits
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape))
        return logits
"""


def plan_of(method="tent", *, online=True, domains=None, **changes):
    return replace(toy_plan(method, domains, changes=changes), online=online)


def online_events(folder):
    return [{k: v for k, v in e.items() if k not in ("time", "seconds")} for e in journal_of(folder, "online")]


def matrix_of(folder):
    return json.loads((folder / "matrix.json").read_text())


def results_of(folder):
    ends = journal_of(folder, "stage_finished")
    return [{k: v for k, v in end.items() if k not in ("time", "seconds", "online")} for end in ends]


@pytest.mark.parametrize("method", each_method())
def test_it_changes_no_bit_of_the_stages(method, tmp_path):
    for online in (False, True):
        Run(plan_of(method, online=online), tmp_path / str(online)).execute()
    assert same_tensors(tensors_of(tmp_path / "False"), tensors_of(tmp_path / "True"))
    assert results_of(tmp_path / "False") == results_of(tmp_path / "True")
    assert [event["domain"] for event in online_events(tmp_path / "True")] == ["mud", "fog"]
    assert (tmp_path / "False" / "config.json").read_bytes() == (tmp_path / "True" / "config.json").read_bytes()


def test_a_custom_method_that_draws_from_the_global_generator(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    states = []
    for online in (False, True):
        torch.manual_seed(3)
        Run(plan_of(str(tmp_path / "noisy.py"), online=online), tmp_path / str(online)).execute()
        states.append(tensors_of(tmp_path / str(online)))
    assert same_tensors(*states)
    counts = online_events(tmp_path / "True")[0]["orders"]["shuffled"]
    assert counts["correct"] != counts["frozen"]  # it did learn while it predicted


class TestMeasure:
    @pytest.fixture(scope="class")
    @staticmethod
    def run(tmp_path_factory):
        run = Run(
            plan_of("tent", domains=toy_domains(ink=40, mud=200, fog=300)), tmp_path_factory.mktemp("run") / "run"
        )
        return run, list(run.events())

    def test_a_method_that_learns_is_observed_batch_by_batch(self, run):
        """The shuffled pass, done by hand with the model after the source stage."""
        plan, stream = run[0].plan, run[0].stream
        method = plan.build_method(stream)
        method.fit_source(stream.source)
        test = stream.tests[1]
        before = accuracy(method, test)
        generator = Randomness(plan.seed).generator("online", "shuffled", "mud")
        right = []
        for part in torch.randperm(200, generator=generator).split(plan.recipe.batch):
            right += (method.observe(test.images[part]).argmax(1) == test.labels[part]).tolist()
        found = online_events(run[0].folder)[0]["orders"]["shuffled"]
        assert found["correct"] == [sum(right[k : k + 64]) for k in range(0, 200, 64)]
        assert sum(found["frozen"]) == pytest.approx(before * 2)

    def test_the_model_from_before_has_the_accuracy_of_the_matrix(self, run):
        scores, rows = matrix_of(run[0].folder)["online"], run[0].matrix.accuracy
        for stage, name in ((1, "mud"), (2, "fog")):
            for score in scores[name].values():
                assert score["frozen"] == pytest.approx(rows[stage - 1][stage])

    def test_events_journal_matrix_and_json_agree(self, run):
        current, events = run
        streamed = [event for event in events if isinstance(event, Streamed)]
        scores = matrix_of(current.folder)["online"]
        ends = {end["domain"]: end.get("online") for end in journal_of(current.folder, "stage_finished")}
        assert scores == {"mud": ends["mud"], "fog": ends["fog"]} and ends["ink"] is None
        assert {e.domain: dict(e.accuracy) for e in streamed} == {
            name: {order: score["accuracy"] for order, score in found.items()} for name, found in scores.items()
        }
        record = read_run(current.folder)
        assert record.to_json()["matrix"]["online"] == scores
        record.export(current.folder.parent / "result.json")
        assert read_run(current.folder.parent / "result.json").to_json() == record.to_json()
        for found in scores.values():
            for score in found.values():
                assert Score.from_json(score).to_json() == score

    def test_another_process_knows_the_event_and_the_wish(self, run):
        streamed = next(event for event in run[1] if isinstance(event, Streamed))
        assert decoded(json.loads(json.dumps(encoded(streamed)))) == streamed
        request = RunRequest(method="tent", changes={"epochs": 1}, device="cpu", online=True)
        assert planned(json.loads(json.dumps(described(resolve(request))))).online

    def test_it_is_no_part_of_what_a_run_is(self):
        plain, online = (resolve(RunRequest(device="cpu", online=value)) for value in (False, True))
        assert plain.digest() == online.digest() and online.online
        with pytest.raises(ConfigError, match="online must be True or False; got 'yes'"):
            resolve(RunRequest(online="yes"))


class TestInterruptions:
    @pytest.mark.slow
    @pytest.mark.parametrize("save_every", [None, 120.0])
    def test_measured_once_wherever_it_stops(self, save_every, tmp_path):
        def run(folder, online=True):
            return Run(plan_of("adabn", online=online, epochs=1), folder, save_every=save_every)

        whole = run(tmp_path / "whole")
        total = sum(1 for _ in whole.events())
        for after in range(1, total):
            folder = tmp_path / str(after)
            events = run(folder).events()
            for _ in range(after):
                event = next(events)
            events.close()
            measured = isinstance(event, Streamed)
            run(folder).execute()
            assert online_events(folder) == online_events(whole.folder), (after, measured)
            assert matrix_of(folder) == matrix_of(whole.folder)
            assert same_tensors(tensors_of(folder), tensors_of(whole.folder))

    def test_a_measure_stays_if_the_run_goes_on_without(self, tmp_path):
        events = Run(plan_of("ratp"), tmp_path / "run").events()
        while not isinstance(next(events), Streamed):
            pass
        next(events)  # one step, after which a checkpoint is saved
        events.close()
        Run(plan_of("ratp", online=False), tmp_path / "run").execute()
        assert list(matrix_of(tmp_path / "run")["online"]) == ["mud"]

    def test_a_finished_run_is_not_measured_again(self, tmp_path):
        Run(plan_of("tent", online=False), tmp_path / "run").execute()
        before = (tmp_path / "run" / "matrix.json").read_bytes()
        Run(plan_of("tent"), tmp_path / "run").execute()
        assert (tmp_path / "run" / "matrix.json").read_bytes() == before

    def test_a_lost_journal_leaves_the_scores(self, tmp_path):
        events = Run(plan_of("tent"), tmp_path / "run").events()
        while not isinstance(event := next(events), Streamed) or event.domain != "fog":
            pass
        events.close()
        scores = matrix_of(tmp_path / "run")["online"]
        (tmp_path / "run" / "journal.jsonl").write_text("damaged\n\n")
        with pytest.warns(JournalWarning):
            Run(plan_of("tent"), tmp_path / "run").execute()
        assert matrix_of(tmp_path / "run")["online"]["mud"] == scores["mud"]
        assert set(matrix_of(tmp_path / "run")["online"]) == {"mud", "fog"}


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "80")
        for seed, name in enumerate(("day", "rain", "night")):
            write_files(Path(name), image_files(count=3, seed=seed))

    def run(self, *more):
        words = ("run", "folders", "--source", "day", "--targets", "rain", "night", "--method", "tent", *OPTIONS)
        return assert_ok(ratp(*words, "--out", "run", "--online", *more))

    def test_terminal(self):
        lines = self.run().out.splitlines()
        assert "Before its stage, images shuffled" in lines
        assert "Before its stage, images mostly class by class" in lines
        assert max(map(len, lines)) <= 80
        (head,) = {" ".join(line.split()) for line in lines if line.startswith("Domain ")}
        assert head == "Domain 1-64 65-256 257-1024 all lost T95 harm"

    def test_json(self):
        found = json.loads(self.run("--json").out)["matrix"]["online"]
        assert {name: set(orders) for name, orders in found.items()} == {
            name: {"shuffled", "clustered"} for name in ("rain", "night")
        }

    def test_targets_without_labels_are_left_out(self):
        self.run("--unlabelled", "rain")
        assert list(matrix_of(Path("run"))["online"]) == ["night"]

    def test_a_continued_run_keeps_what_was_measured(self, tmp_path):
        words = ("run", "folders", "--source", "day", "--method", "tent", *OPTIONS, "--online")
        assert_ok(ratp(*words, "--targets", "rain", "--out", "first"))
        with pytest.warns(ContinuedWarning):
            ratp(*words, "--targets", "rain", "night", "--out", "run", "--after", "first")
        assert list(matrix_of(Path("run"))["online"]) == ["rain", "night"]
        assert matrix_of(Path("run"))["online"]["rain"] == matrix_of(Path("first"))["online"]["rain"]


def test_unknown_to_the_default_plan():
    assert not tiny_plan().online
