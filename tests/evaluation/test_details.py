"""Confusions, calibration, intervals and pictures: what a run keeps of its predictions."""

from __future__ import annotations

import base64
import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import files_of, ratp, same_tensors, tensors_of, toy_domain, toy_plan
from ratp.errors import RatpError
from ratp.evaluation.accuracy import Evaluator, Guesses, Outcome
from ratp.evaluation.details import BINS, PICTURES, Bin, DetailFiles, Details, Examples, interval, interval_of_mean
from ratp.runs.load import load
from ratp.runs.record import read_run
from ratp.runs.run import Run


@pytest.fixture(scope="module")
def guessed():
    """A test set, logits for it, and what is counted."""
    domain = toy_domain("ink", 40)
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) * 3
    return domain, logits, Guesses.of(logits)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    run = Run(toy_plan("ratp"), tmp_path_factory.mktemp("details") / "run")
    run.execute()
    return run


class TestCounts:
    def test_every_image_is_counted_by_its_true_and_its_predicted_class(self, guessed):
        domain, logits, guesses = guessed
        found = guesses.details(domain)
        for true in range(4):
            for predicted in range(4):
                count = int(((domain.labels == true) & (logits.argmax(1) == predicted)).sum())
                assert found.confusion.get((true, predicted), 0) == count
        assert found.images == 40
        assert found.right == int((logits.argmax(1) == domain.labels).sum())
        assert found.by_class == {
            k: (int((domain.labels == k).sum()), int((logits.argmax(1)[domain.labels == k] == k).sum()))
            for k in range(4)
        }

    def test_calibration_error_by_its_definition(self, guessed):
        domain, logits, guesses = guessed
        confidence, predicted = logits.double().softmax(1).max(1)
        right = (predicted == domain.labels).double()
        expected = 0.0
        for k in range(BINS):
            inside = (confidence >= k / BINS) & ((confidence < (k + 1) / BINS) | (k == BINS - 1))
            if inside.any():
                expected += inside.double().mean() * (right[inside].mean() - confidence[inside].mean()).abs()
        assert guesses.details(domain).calibration_error == pytest.approx(100 * float(expected), abs=1e-4)

    def test_counts_survive_their_file(self, guessed, tmp_path):
        domain, _, guesses = guessed
        files, found = DetailFiles(tmp_path, "f" * 64), guesses.details(domain)
        files.write(2, {"ink": found})
        assert files.read(2) == {"ink": found}
        assert files.read(1) == {}
        with pytest.raises(RatpError, match="belongs to another run"):
            DetailFiles(tmp_path, "0" * 64).read(2)

    @pytest.mark.parametrize(
        "damage",
        [
            {"confusion": [[0, 0, 41]]},
            {"confusion": [[0, -1, 40]]},
            {"confusion": [[0, 0, "40"]]},
            {"confusion": [[[], 0, 40]]},
            {"confusion": []},
            {"bins": []},
            {"bins": [[40, 40, None]] + [[0, 0, 0.0]] * (BINS - 1)},
            {"bins": [[40, 40, 41.0]] + [[0, 0, 0.0]] * (BINS - 1)},
            {"bins": None},
        ],
    )
    def test_impossible_counts_are_refused(self, damage):
        sound = Details({(0, 0): 40}, (Bin(40, 40, 39.0), *[Bin(0, 0, 0.0)] * (BINS - 1))).to_json()
        assert Details.from_json(sound).images == 40
        with pytest.raises(RatpError, match="counts of a domain"):
            Details.from_json({**sound, **damage})


class TestInterval:
    @pytest.mark.parametrize(
        ("percent", "images", "low", "high"),
        [(50, 100, 40.383, 59.617), (100, 20, 83.887, 100), (0, 20, 0, 16.113), (63.2, 2400, 61.249, 65.107)],
    )
    def test_of_one_accuracy(self, percent, images, low, high):
        """The values are those of R's ``prop.test(correct=FALSE)``."""
        assert interval(percent, images) == pytest.approx((low, high), abs=0.01)

    def test_of_a_mean_covers_it_as_often_as_it_says(self):
        rng, shares, sizes = np.random.default_rng(0), (0.9, 0.6, 0.4), (80, 200, 120)
        covered = 0
        for _ in range(1000):
            found = [100 * rng.binomial(n, p) / n for p, n in zip(shares, sizes, strict=True)]
            low, high = interval_of_mean(found, sizes)
            covered += low <= 100 * np.mean(shares) <= high
        assert 930 <= covered <= 970

    def test_of_a_mean_of_one(self):
        assert interval_of_mean([70.0], [50]) == pytest.approx(interval(70.0, 50))


class TestExamples:
    def test_most_confident_mistakes_and_least_certain_predictions(self, guessed):
        domain, _, guesses = guessed
        files = [f"{k}.png" for k in range(40)]
        found = Outcome(guesses, files, domain.labels, domain.images, domain.classes).examples()
        wrong = sorted(float(guesses.confidence[k]) for k in (guesses.labels != domain.labels).nonzero().flatten())
        assert [one.confidence for one in found.mistakes] == wrong[::-1][:PICTURES]
        assert [one.confidence for one in found.uncertain] == sorted(guesses.confidence.tolist())[:PICTURES]
        for one in (*found.mistakes, *found.uncertain):
            k = int(one.file.removesuffix(".png"))
            assert one.true == domain.classes[domain.labels[k]]
            assert one.predicted == domain.classes[guesses.labels[k]]
            with Image.open(io.BytesIO(base64.b64decode(one.picture))) as picture:
                shown = np.asarray(picture).astype(float)
            assert np.abs(shown - domain.images[k].permute(1, 2, 0).numpy()).mean() < 12

    def test_without_labels_there_are_no_mistakes(self, guessed):
        domain, _, guesses = guessed
        found = Outcome(guesses, [str(k) for k in range(40)], None, domain.images, domain.classes).examples()
        assert found.mistakes == ()
        assert {one.true for one in found.uncertain} == {None}
        assert Examples.from_json(json.loads(json.dumps(found.to_json()))) == found

    def test_large_images_become_small(self):
        domain = toy_domain("ink", 12)
        large = torch.randint(256, (12, 3, 300, 300), dtype=torch.uint8)
        found = Outcome(Guesses.of(torch.rand(12, 4)), ["a"] * 12, domain.labels, large, domain.classes).examples()
        assert len(json.dumps(found.to_json())) < 200_000
        with Image.open(io.BytesIO(base64.b64decode(found.uncertain[0].picture))) as picture:
            assert picture.size == (96, 96)

    @pytest.mark.parametrize("damage", [{"picture": "PHNjcmlwdD4="}, {"confidence": 7}, {"file": 3}, {"more": 1}])
    def test_damaged_pictures_are_refused(self, guessed, damage):
        domain, _, guesses = guessed
        found = Outcome(guesses, ["a"] * 40, None, domain.images, domain.classes).examples()
        data = json.loads(json.dumps(found.to_json()))
        data["uncertain"][0] |= damage
        with pytest.raises(RatpError, match="pictures of a domain"):
            Examples.from_json(data)


class TestRuns:
    def test_counts_are_those_of_the_loaded_model(self, finished):
        record, loaded = finished.record(), load(finished.folder)
        last = record.details[record.matrix.stages - 1]
        assert last.keys() == {*finished.stream.order}
        for test in finished.stream.tests:
            predicted = loaded.predict(test.images).argmax(1)
            pairs = list(zip(test.labels.tolist(), predicted.tolist(), strict=True))
            assert last[test.name].confusion == {pair: pairs.count(pair) for pair in set(pairs)}

    def test_counts_have_the_accuracies_of_the_matrix(self, finished):
        record = finished.record()
        for stage, row in enumerate(record.matrix.accuracy):
            counts = record.details[stage]
            assert row == tuple(100 * counts[name].right / counts[name].images for name in record.matrix.domains)

    def test_run_records_how_many_images_it_tests_on(self, finished):
        record = finished.record()
        assert record.test_images == {test.name: len(test) for test in finished.stream.tests}
        assert record.tested_as_trained == {"mud": True, "fog": True}

    def test_keeping_details_changes_no_result(self, finished, tmp_path, monkeypatch):
        monkeypatch.setattr(DetailFiles, "_write", lambda *_: None)
        plain = Run(toy_plan("ratp"), tmp_path / "plain")
        plain.execute()
        assert "examples.json" not in files_of(plain.folder)
        for name in ("state", "weights"):
            assert same_tensors(tensors_of(plain.folder, name), tensors_of(finished.folder, name))
        assert plain.record().matrix == finished.record().matrix

    def test_a_finished_run_of_an_earlier_version_stays_as_it_is(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(DetailFiles, "_write", lambda *_: None)
            Run(toy_plan("source-only"), tmp_path / "run").execute()
        before = files_of(tmp_path / "run")
        Run(toy_plan("source-only"), tmp_path / "run").execute()
        assert files_of(tmp_path / "run") == before
        assert read_run(tmp_path / "run").details == {}
        assert read_run(tmp_path / "run").examples == {}

    def test_a_model_that_ignores_targets_keeps_its_counts(self, tmp_path):
        run = Run(toy_plan("source-only"), tmp_path / "run")
        record = run.execute()
        assert [record.details[stage] for stage in range(3)] == [record.details[0]] * 3

    def test_verify_reads_them(self, finished, tmp_path):
        import shutil

        shutil.copytree(finished.folder, tmp_path / "run")
        for name in ("details-1.json", "examples.json"):
            path = tmp_path / "run" / name
            path.write_text(path.read_text().replace(": 1", ": 9", 1).replace("[0, ", "[1, ", 1))
        result = ratp("verify", tmp_path / "run")
        assert result.code == 1
        assert "details-1.json" in result.out + result.err
        assert "examples.json" in result.out + result.err


def test_rows_keep_what_was_guessed_and_drop_what_was_before():
    plan = toy_plan("source-only")
    stream = plan.load_stream()
    method = plan.build_method(stream)
    method.fit_source(stream.source)
    measures = Evaluator(stream, 0)
    assert measures.row(method).keys() == measures.guesses.keys() == {*stream.order}
    assert measures.row(method, 2).keys() == measures.details().keys() == {stream.order[2]}
    assert math.isclose(
        sum(one.confidence for one in measures.details()[stream.order[2]].bins),
        float(measures.guesses[stream.order[2]].confidence.double().sum()),
    )
