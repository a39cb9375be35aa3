"""Embeddings after every stage: kept on request, and plotted."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import ratp.reports.features as module
from helpers import same_tensors, slow, tensors_of, toy_domains, toy_plan
from ratp._core.files import read_tensors, write_tensors
from ratp.errors import RunDirectoryError
from ratp.evaluation.accuracy import Evaluator
from ratp.reports.features import MOST, feature_maps
from ratp.reports.page import write_report
from ratp.reports.style import encode
from ratp.runs.record import read_run
from ratp.runs.run import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run with and without embeddings."""
    folder = tmp_path_factory.mktemp("runs")
    for name, features in (("with", True), ("without", False)):
        Run(toy_plan(), folder / name, features=features).execute()
    return folder


class TestKeeping:
    def test_keeping_features_changes_no_result(self, runs):
        for name in ("state", "weights"):
            assert same_tensors(tensors_of(runs / "with", name), tensors_of(runs / "without", name))
        assert (runs / "with" / "matrix.json").read_bytes() == (runs / "without" / "matrix.json").read_bytes()

    def test_one_file_per_stage_for_the_same_images(self, runs):
        assert [path.name for path in read_run(runs / "with").features] == [
            f"features-{stage}.safetensors" for stage in range(3)
        ]
        assert read_run(runs / "without").features == ()
        (first, about), (last, _) = (read_tensors(runs / "with" / f"features-{k}.safetensors") for k in (0, 2))
        assert about["domains"] == ["ink", "mud", "fog"]
        assert torch.equal(first["labels"], last["labels"]) and torch.equal(first["domains"], last["domains"])
        assert not torch.equal(first["embedding"], last["embedding"])
        assert first["embedding"].shape == (len(first["labels"]), toy_plan().recipe.network.dim)

    def test_features_are_of_the_final_network(self, runs):
        run = Run(toy_plan(), runs / "without")
        run.method.load_state(tensors_of(runs / "with"))
        kept, _ = read_tensors(runs / "with" / "features-2.safetensors")
        again = Evaluator(run.stream, run.plan.seed).embeddings(run.method)
        assert same_tensors(kept, again)

    def test_images_per_domain_are_limited_and_distinct(self, monkeypatch):
        monkeypatch.setattr("ratp.evaluation.accuracy.FEATURE_COUNT", 7)
        run = Run(toy_plan(domains=toy_domains(ink=60, mud=50)), "unused")
        seen = []
        run.method.embed = lambda images: seen.append(images) or torch.zeros(len(images), 2)
        found = Evaluator(run.stream, 1).embeddings(run.method)
        assert found["domains"].bincount().tolist() == [7, 7]
        assert all(len(images.unique(dim=0)) == 7 for images in seen)

    def test_a_domain_without_labels_is_left_out(self):
        run = Run(toy_plan(), "unused")
        tests = run.stream.tests[0], None, run.stream.tests[2]
        found = Evaluator(replace(run.stream, tests=tests), 1).embeddings(run.method)
        assert found["domains"].unique().tolist() == [0, 2]

    def test_a_method_with_nothing_to_show_keeps_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(toy_plan().method, "embed", lambda self, images: None)
        Run(toy_plan(), tmp_path, features=True).execute()
        assert read_run(tmp_path).features == ()


class TestDrawing:
    def test_classes_above_domains_below_a_column_a_stage(self, runs):
        figure = feature_maps(read_run(runs / "with"))
        assert len(figure.axes) == 2 * 3
        assert [ax.get_title(loc="left") for ax in figure.axes[:3]] == ["after ink", "after mud", "after fog"]
        above, below = ([entry.get_text() for entry in figure.axes[k].get_legend().get_texts()] for k in (2, 5))
        assert above == ["north", "east", "south", "west"]
        assert below == ["ink", "mud", "fog"]
        for upper, lower in zip(figure.axes[:3], figure.axes[3:], strict=True):
            points = [np.concatenate([part.get_offsets() for part in ax.collections]) for ax in (upper, lower)]
            assert sorted(map(tuple, points[0])) == sorted(map(tuple, points[1]))

    def test_without_embeddings_there_is_no_picture(self, runs):
        assert feature_maps(read_run(runs / "without")) is None

    def test_classes_far_apart_are_drawn_apart(self, runs, tmp_path):
        """Three tight bundles of directions stay three heaps."""
        record = read_run(runs / "with")
        labels = torch.arange(90) % 3
        embedding = 10 * torch.eye(3, 8)[labels] + 0.1 * torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
        about = {"domains": ["a", "b"], "classes": ["x", "y", "z"], "stage": 0}
        tensors = {"embedding": embedding, "labels": labels, "domains": torch.zeros(90, dtype=torch.int64)}
        write_tensors(tmp_path / "features-0.safetensors", tensors, about)
        figure = feature_maps(replace(record, path=tmp_path))
        heaps = [np.asarray(part.get_offsets()) for part in figure.axes[0].collections]
        centres = np.stack([heap.mean(axis=0) for heap in heaps])
        widest = max(np.linalg.norm(heap - centre, axis=1).max() for heap, centre in zip(heaps, centres, strict=True))
        nearest = min(np.linalg.norm(centres[i] - centres[j]) for i in range(3) for j in range(i))
        assert nearest > 2 * widest

    def test_the_same_run_gives_the_same_file(self, runs):
        one, other = (encode(feature_maps(read_run(runs / "with")), "png") for _ in range(2))
        assert one == other

    @pytest.mark.parametrize("damage", ["cut", "empty", "about"])
    def test_a_damaged_file_is_named(self, damage, runs, tmp_path):
        tensors, about = read_tensors(runs / "with" / "features-0.safetensors")
        path = tmp_path / "features-0.safetensors"
        if damage == "about":
            about = {"domains": [], "classes": []}
        elif damage == "empty":
            del tensors["labels"]
        write_tensors(path, tensors, about)
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:100])
        record = replace(read_run(runs / "with"), path=tmp_path)
        with pytest.raises(RunDirectoryError):
            feature_maps(record)


@pytest.mark.parametrize(("count", "is_shown"), [slow(0, False), slow(1, False), (3, False), (4, True)])
def test_a_report_leaves_out_a_picture_of_too_few_images(count, is_shown, runs, tmp_path):
    shutil.copytree(runs / "with", tmp_path / "run")
    for path in read_run(tmp_path / "run").features:
        tensors, about = read_tensors(path)
        write_tensors(path, {name: tensor[:count].clone() for name, tensor in tensors.items()}, about)
    page = write_report([read_run(tmp_path / "run")], tmp_path / "report")
    assert ("Embeddings of ratp" in page.read_text()) is is_shown
    assert (tmp_path / "report" / "features.png").exists() is is_shown


def test_not_more_points_than_t_sne_can_take(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_layout", lambda embedding: np.zeros((len(embedding), 2)))
    count = 3 * MOST
    tensors = {
        "embedding": torch.randn(count, 4),
        "labels": torch.arange(count) % 3,
        "domains": torch.arange(count) * 2 // count,
    }
    write_tensors(
        tmp_path / "features-0.safetensors", tensors, {"domains": ["a", "b"], "classes": ["x", "y", "z"], "stage": 0}
    )
    figure = module.feature_maps(replace(read_run(runs / "with"), path=tmp_path))
    assert sum(len(part.get_offsets()) for part in figure.axes[0].collections) == MOST
    assert len(figure.axes[1].collections) == 2


def test_the_report_shows_them(runs, tmp_path):
    page = write_report([read_run(runs / "with"), read_run(runs / "without")], tmp_path)
    html = page.read_text()
    assert html.count("Embeddings of ratp") == 1
    assert (tmp_path / "features.png").read_bytes().startswith(b"\x89PNG")
    other = write_report([read_run(runs / "without")], tmp_path / "other")
    assert "Embeddings of ratp" not in other.read_text()
    assert not (tmp_path / "other" / "features.png").exists()
