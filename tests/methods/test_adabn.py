"""AdaBN takes statistics from the target and learns nothing."""

from __future__ import annotations

import pytest
import torch

from helpers import same_tensors, toy_domain, toy_method, toy_plan
from ratp.functional.norm import batch_norms, by_batch


def build_method(**changes):
    method, source, targets = toy_method(toy_plan("adabn", changes=changes))
    method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def weights(method):
    return {name: tensor.clone() for name, tensor in method.network.state_dict().items()}


def test_no_number_of_the_network_changes():
    method, targets = build_method()
    before = weights(method)
    for target in targets:
        method.adapt(target)
    assert same_tensors(method.network.state_dict(), before)
    assert len(method.memory) == 0
    assert method.stage == 3


def test_it_is_the_source_model_by_batch_statistics():
    method, (target, _) = build_method()
    source_model = method.predict(target.images)
    with torch.no_grad(), by_batch(method.network.eval()):
        expected = method.network(method.scaling(target.images)).logits
    torch.testing.assert_close(method.observe(target.images), expected)
    torch.testing.assert_close(method.predict(target.images), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(source_model, expected)


class TestRunning:
    def test_statistics_are_the_mean_over_the_batches_of_the_last_target(self):
        method, targets = build_method(eval_bn="running")
        before = weights(method)
        method.adapt(targets[0])
        seen = []
        layer = method.network.bottleneck[1]
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        method.adapt(targets[1])
        hook.remove()
        means = torch.stack([x.mean(dim=0) for x in seen]).mean(dim=0)
        variances = torch.stack([x.var(dim=0) for x in seen]).mean(dim=0)
        torch.testing.assert_close(layer.running_mean, means, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.running_var, variances, rtol=1e-4, atol=1e-5)
        after = method.network.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        kinds = ("running_mean", "running_var", "num_batches_tracked")
        assert changed == {f"{name}.{kind}" for name in batch_norms(method.network) for kind in kinds}
        assert all(layer.momentum == 0.1 for layer in batch_norms(method.network).values())

    def test_predictions_use_them_image_by_image(self):
        method, (target, _) = build_method(eval_bn="running")
        before = method.predict(target.images)
        method.adapt(target)
        after = method.predict(target.images)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(method.predict(target.images[:1]), after[:1], rtol=1e-4, atol=1e-5)
        assert not any(module.training for module in method.network.modules())


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_one_image_has_no_statistics(statistics):
    method, _ = build_method(eval_bn=statistics)
    before = weights(method)
    method.adapt(toy_domain("dot", 1).unlabelled())
    assert same_tensors(method.network.state_dict(), before)


def test_it_is_marked_as_a_control_and_says_how_it_is_measured():
    plan = toy_plan("adabn")
    assert plan.method.family == "control"
    assert plan.to_json(plan.load_stream())["evaluation_statistics"] == "batch"
