"""T3A replaces the classifier by confident embeddings and trains nothing."""

from __future__ import annotations

import pytest
import torch

from helpers import all_finite, same_tensors, toy_method, toy_plan
from ratp.methods.t3a import Supports, supports_of
from ratp.training.recipe import classify

W = torch.eye(2)
BATCH = torch.tensor([[3.0, 1.0], [1.0, 1.2], [0.5, 4.0]])


def build_method(trained=True, **changes):
    method, source, targets = toy_method(toy_plan("t3a", changes=changes))
    if trained:
        method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def joined(weight=W, batch=BATCH):
    return supports_of(weight, weight, torch.arange(len(weight))).joined(supports_of(batch, weight))


class TestGolden:
    def test_entropies_and_labels(self):
        supports = joined()
        expected = [0.582203, 0.582203, 0.365334, 0.688172, 0.132343]
        assert supports.entropies.tolist() == pytest.approx(expected, abs=1e-6)
        assert supports.labels.tolist() == [0, 1, 0, 1, 1]

    @pytest.mark.parametrize(
        ("count", "rows", "predictions"),
        [
            (1, [[0.948683, 0.316228], [0.124035, 0.992278]], [0, 0, 1]),
            (2, [[0.987087, 0.160182], [0.062137, 0.998068]], [0, 1, 1]),
            (100, [[0.987087, 0.160182], [0.266806, 0.963750]], None),
            (0, [[0.987087, 0.160182], [0.266806, 0.963750]], None),
        ],
    )
    def test_rows_and_predictions(self, count, rows, predictions):
        found = joined().pruned(count).rows(2)
        torch.testing.assert_close(found, torch.tensor(rows), rtol=0, atol=1e-6)
        if predictions:
            assert (BATCH @ found.T).argmax(dim=1).tolist() == predictions

    def test_the_scale_of_embeddings_is_no_matter_for_the_rows(self):
        vectors = supports_of(BATCH * 7, W).vectors
        torch.testing.assert_close(vectors, supports_of(BATCH, W).vectors)


def test_a_bias_gives_labels_and_is_left_out_of_predictions():
    method, targets = build_method(**{"network.bias": True})
    with torch.no_grad():
        method.network.classifier.bias[1] = 100.0
    before = method.state()
    method.observe(targets[0].images[:8])
    assert method.supports.labels[len(method.weight) :].unique().tolist() == [1]
    assert not method.network.classifier.bias.any()
    again, _ = build_method(trained=False, **{"network.bias": True})
    again.load_state(method.state())
    assert same_tensors(again.state(), method.state()) and again.bias[1] == 100.0 and "t3a.bias" not in before


class TestSupports:
    def test_a_class_keeps_the_surest_and_of_equals_the_earlier(self):
        labels = torch.tensor([0, 1, 0, 0, 1, 0])
        entropies = torch.tensor([0.5, 0.1, 0.2, 0.5, 0.0, 0.9])
        supports = Supports(torch.arange(6.0)[:, None], labels, entropies, torch.zeros(6, dtype=torch.bool))
        assert supports.pruned(2).vectors[:, 0].tolist() == [0, 1, 2, 4]
        assert supports.pruned(1).vectors[:, 0].tolist() == [2, 4]
        assert supports.pruned(2).pruned(2).vectors[:, 0].tolist() == [0, 1, 2, 4]

    def test_a_row_of_w_supports_its_own_class_whatever_w_says(self):
        weight = torch.tensor([[1.0, 0.0], [3.0, 0.1], [0.0, 1.0]])  # W takes row 0 for class 1
        assert (weight @ weight.T).argmax(dim=1).tolist() != [0, 1, 2]
        rows = joined(weight, torch.tensor([[2.0, 0.1]])).pruned(1).rows(3)
        assert (rows.norm(dim=1) > 0.99).all()

    def test_all_means_all_on_every_call(self):
        method, (target, _) = build_method(supports=0)
        for count, part in enumerate(target.images.split(8), start=1):
            method.observe(part)
            assert len(method.supports.labels) == 4 + 8 * count


@pytest.mark.parametrize("count", [1, 3])
def test_only_the_classifier_changes_and_supports_are_bounded(count):
    method, targets = build_method(supports=count)
    before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
    for target in targets:
        method.adapt(target)
        assert method.supports.labels.bincount(minlength=4).max() <= count
        assert method.supports.labels.bincount(minlength=4).min() >= 1
    after = method.network.state_dict()
    assert {n for n in before if not torch.equal(before[n], after[n])} == {"classifier.weight"}
    assert torch.equal(method.weight, before["classifier.weight"])
    torch.testing.assert_close(after["classifier.weight"].norm(dim=1), torch.ones(4))
    assert all_finite(method.state())


def test_the_source_is_measured_with_its_own_classifier_and_targets_with_the_adjusted_one():
    method, (target, _) = build_method()
    assert torch.equal(method.predict(target.images), classify(method.network, target.images, method.scaling))
    method.adapt(target)
    rows = method.supports.rows(4)
    with torch.no_grad():
        embedding = method.network.eval()(method.scaling(target.images)).embedding
    torch.testing.assert_close(method.predict(target.images), embedding @ rows.T)


def test_a_batch_is_labelled_by_w_and_predicted_after_it_joined():
    method, (target, _) = build_method(supports=0)
    weight = method.network.prototypes.detach().clone()
    method.observe(target.images[:8])
    logits = method.observe(target.images[8:16])
    with torch.no_grad():
        embedding = method.network.eval()(method.scaling(target.images[:16])).embedding
    expected = joined(weight, embedding)
    assert torch.equal(method.supports.labels, expected.labels)
    torch.testing.assert_close(method.supports.entropies, expected.entropies)
    torch.testing.assert_close(logits, embedding[8:] @ expected.rows(4).T)


def test_supports_are_kept_or_reset():
    kept, targets = build_method(supports=0)
    reset, _ = build_method(supports=0, reset=True)
    for method in (kept, reset):
        for target in targets:
            method.adapt(target)
    assert len(kept.supports.labels) == 4 + len(targets[0]) + len(targets[1])
    assert len(reset.supports.labels) == 4 + len(targets[1])


def test_one_image_is_enough():
    method, (target, _) = build_method()
    assert method.observe(target.images[:1]).isfinite().all()
    assert method.observed == 1


class TestExemplars:
    def test_they_support_with_stored_labels_and_no_entropy_once(self):
        method, targets = build_method(supports=0, exemplars=True)
        for target in targets:
            expected = method.memory.labels.clone()
            method.adapt(target)
            mine = method.supports.remembered
            assert torch.equal(method.supports.labels[mine], expected)
            assert (method.supports.entropies[mine] == 0).all()
        assert len(method.supports.labels) == 4 + len(targets[0]) + len(targets[1]) + len(expected)

    def test_off_there_is_no_memory(self):
        method, (target, _) = build_method()
        method.adapt(target)
        assert len(method.memory) == 0
        assert method.stage == 2

    def test_an_empty_memory_adds_nothing(self):
        one, (target, _) = build_method(exemplars=True, memory=0)
        other, _ = build_method()
        for method in (one, other):
            method.adapt(target)
        assert torch.equal(one.network.prototypes, other.network.prototypes)


def test_it_says_it_is_measured_with_running_statistics():
    plan = toy_plan("t3a")
    assert plan.to_json(plan.load_stream())["evaluation_statistics"] == "running"


def test_state_round_trip_before_and_after_a_target():
    method, (target, _) = build_method(exemplars=True)
    for _ in range(2):
        other, _ = build_method(trained=False, exemplars=True)
        other.load_state(method.state())
        assert same_tensors(other.state(), method.state())
        method.adapt(target)
