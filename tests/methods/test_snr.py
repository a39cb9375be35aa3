"""SNR: modules in the feature extractor, trained as SHOT trains."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain
from ratp.functional.losses import information_maximisation
from ratp.methods.snr import SNR, StyleRestitution
from ratp.networks.network import Network
from ratp.networks.weights import Weights
from ratp.training.method import Setting
from read_back import ReadBack


def build_method(**changes):
    method, source, targets = toy_method(toy_plan("snr", changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def snapshot(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def places(method):
    return [n for n, module in method.network.backbone.named_modules() if isinstance(module, StyleRestitution)]


def test_it_acts_after_every_block_of_dtn_and_draws_its_numbers_from_the_seed():
    method, _, _ = build_method()
    assert places(method) == ["3.snr", "7.snr", "11.snr"]
    again, _, _ = build_method()
    assert same_tensors(method.network.state_dict(), again.network.state_dict())
    plain, _, _ = toy_method(toy_plan("source-only"))
    own = {n: t for n, t in method.network.state_dict().items() if ".snr." not in n}
    assert same_tensors(own, plain.network.state_dict())


def test_pretrained_resnets_still_load_and_learn():
    changes = {"network.backbone": "resnet18", "network.width": 1, "batch": 4, "steps": 1, "epochs": 1}
    plan = toy_plan("snr", changes=changes)
    assert (plan.config.backbone_rate, plan.config.beta) == (0.1, 0.3)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        tensors = Network(plan.recipe.network, 4, (64, 64)).backbone.state_dict()
    setting = Setting(
        plan.recipe, ("a", "b", "c", "d"), (64, 64), Randomness(1), torch.device("cpu"), Weights("given", "0", tensors)
    )
    method = SNR(setting, plan.config)
    assert places(method) == ["layer1.snr", "layer2.snr", "layer3.snr"]
    assert same_tensors({n: t for n, t in method.network.backbone.state_dict().items() if ".snr." not in n}, tensors)
    images = torch.randint(256, (8, 3, 64, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    source = LabelledDomain("made", images, torch.arange(8) % 4, setting.classes)
    method.fit_source(source)
    method.adapt(source.unlabelled())
    assert all_finite(method.state())


def test_open_gates_predict_as_a_network_without():
    method, source, _ = build_method()
    plain, _, _ = toy_method(toy_plan("source-only"))
    before = plain.predict(source.images)
    assert not torch.allclose(method.predict(source.images), before, atol=1e-4)
    with torch.no_grad():
        for module in method.modules:
            module.excite.weight.zero_()
            module.excite.bias.fill_(99)
    torch.testing.assert_close(method.predict(source.images), before, rtol=1e-3, atol=1e-5)


def test_the_source_loss_is_cross_entropy_of_smoothed_labels():
    method, source, _ = build_method()
    (phase,) = method.source_phases(source)
    twin, _, _ = build_method()
    (other,) = twin.source_phases(source)
    other.begin()
    other.begin_epoch(0)
    batch = other.batches.draw(TINY["batch"])
    log_p = twin.network.train()(batch.images).logits.log_softmax(dim=1)
    targets = 0.9 * F.one_hot(batch.labels, 4) + 0.1 / 4
    phase.begin()
    phase.begin_epoch(0)
    step = phase.step()
    assert step.keys() == {"total", "ce"}
    torch.testing.assert_close(step["total"], -(targets * log_p).sum(dim=1).mean())


def test_a_target_step_is_shots_and_leaves_the_classifier_alone():
    pair = []
    for _ in range(2):
        method, source, targets = build_method()
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        pair.append((method, phase))
    (method, phase), (twin, other) = pair
    before = snapshot(method.network.state_dict())
    batch = other.batches.draw(TINY["batch"])
    logits = twin.network.train()(batch.images).logits
    step = phase.step()
    torch.testing.assert_close(step["ce"], 0.1 * F.cross_entropy(logits, batch.labels))
    torch.testing.assert_close(step["im"], information_maximisation(logits))
    torch.testing.assert_close(step["total"], step["ce"] + step["im"])
    after = method.network.state_dict()
    assert torch.equal(after["classifier.weight"], before["classifier.weight"])
    changed = [name for name in after if name.endswith(("weight", "bias")) and name != "classifier.weight"]
    assert sum(".snr." in name for name in changed) == 18
    # a convolution's bias before BatchNorm moves nothing but by rounding and decay
    assert not any(torch.equal(after[n], before[n]) for n in changed if after[n].ndim > 1)


def test_the_classifier_stays_over_whole_target_stages():
    method, source, targets = build_method()
    before = method.network.prototypes.clone()
    method.fit_source(source)
    source_model = method.network.prototypes.clone()
    assert not torch.equal(before, source_model)
    for target in targets:
        method.adapt(target)
    assert torch.equal(method.network.prototypes, source_model)


def test_every_parameter_is_in_one_group():
    method, _, _ = build_method(dual_weight=0.01, backbone_rate=0.1)
    for classifier in (True, False):
        (backbone, slow), (head, fast) = method.groups(classifier=classifier)
        assert (slow, fast) == (0.1, 1.0)
        ids = [id(p) for p in (*backbone, *head)]
        wanted = {*map(id, method.network.parameters()), *map(id, method.heads.parameters())}
        if not classifier:
            wanted.discard(id(method.network.classifier.weight))
        assert sorted(ids) == sorted(wanted)
        assert {id(p) for m in method.modules for p in m.parameters()} <= set(map(id, head))


class TestDual:
    def test_it_is_off_by_default(self):
        method, _, _ = build_method()
        assert method.heads is None
        assert {name.partition(".")[0] for name in method.state()} == {"network", "memory"}

    def test_it_adds_to_both_losses_and_its_heads_are_kept(self):
        method, source, targets = build_method(dual_weight=0.01)
        (phase,) = method.source_phases(source)
        assert phase.step().keys() == {"total", "ce", "dual"}
        before = snapshot(method.heads.state_dict())
        method.fit_source(source)
        assert not any(torch.equal(t, before[n]) for n, t in method.heads.state_dict().items())
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        assert phase.step().keys() == {"total", "ce", "im", "dual"}
        other, _, _ = build_method(dual_weight=0.01)
        other.load_state(method.state())
        assert same_tensors(other.state(), method.state())

    def test_it_costs_the_modules_no_number_when_it_weighs_nothing(self):
        """Heads alone change nothing of the network but through the loss."""
        method, source, _ = build_method(dual_weight=1e-30)
        method.fit_source(source)
        plain, _, _ = build_method()
        plain.fit_source(source)
        for name, tensor in plain.network.state_dict().items():
            torch.testing.assert_close(method.network.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def plain_dual_loss(method, count):
    """The method's dual loss, after a check of its value: that of the last pass, of its first rows alone."""

    def checked(results, labels):
        assert len(results) == 6  # three of the pass that asks for confidence
        expected = F.cross_entropy(method.heads[2](results[5].plus[:count]), labels)
        for head, result in zip(method.heads, results[3:], strict=True):
            predictions = [head(part[:count]).softmax(dim=1) for part in result]
            own, plus, minus = (-(p * p.log()).sum(dim=1).mean() for p in predictions)
            expected = expected + F.softplus(plus - own) + F.softplus(own - minus)
        torch.testing.assert_close(method.dual_loss(results, labels), expected)
        return expected

    return checked


class TestCopies:
    """RandMix, off by default."""

    CHANGES: ClassVar = {"augment": True, "r_con": 0.3, "dual_weight": 0.01}

    def begin(self, *, target):
        """A phase that has begun, and what its network was given and gave in its passes in training mode."""
        method, source, targets = build_method(**self.CHANGES)
        (phase,) = method.target_phases(targets[0]) if target else method.source_phases(source)
        phase.begin()
        phase.begin_epoch(0)
        passes, draw, batches = [], phase.batches.draw, []
        method.network.register_forward_hook(
            lambda module, inputs, output: passes.append((inputs[0], output)) if module.training else None
        )
        phase.batches.draw = lambda count: batches.append(draw(count)) or batches[-1]
        return method, phase, passes, batches

    def test_all_images_of_the_source_have_one_with_their_label(self):
        _, phase, passes, batches = self.begin(target=False)
        step = phase.step()
        ((images, output),), (batch,) = passes, batches
        assert torch.equal(images[: TINY["batch"]], batch.images)
        assert not torch.equal(images[TINY["batch"] :], batch.images)
        targets = 0.9 * F.one_hot(torch.cat([batch.labels, batch.labels]), 4) + 0.1 / 4
        torch.testing.assert_close(step["ce"], -(targets * output.logits.log_softmax(dim=1)).sum(dim=1).mean())

    def test_confident_target_images_have_one_that_counts_for_cross_entropy_alone(self, monkeypatch):
        method, phase, passes, batches = self.begin(target=True)
        confidence = method.network.eval()(method.scaling(phase.batches.images)).logits.softmax(dim=1).amax(dim=1)
        phase._copies._r_con = confidence.median().item()
        monkeypatch.setattr(phase, "_dual_loss", plain_dual_loss(method, TINY["batch"]))
        step = phase.step()
        ((rows, output),), (batch,) = passes, batches
        count, p = TINY["batch"], output.logits.softmax(dim=1)
        some = confidence[batch.places] > phase._copies._r_con
        assert 0 < some.sum() < count
        assert torch.equal((rows[count:] != batch.images).flatten(1).any(dim=1), some)
        own = -p[:count].log()[torch.arange(count), batch.labels]
        copied = -p[count:].log()[torch.arange(count), batch.labels][some]
        torch.testing.assert_close(step["ce"], 0.1 * torch.cat([own, copied]).mean())
        torch.testing.assert_close(step["im"], information_maximisation(output.logits[:count]))

    def test_a_step_can_be_captured(self):
        """It reads nothing back and draws from the generators that it lists, and from no other."""
        for target in (False, True):
            _, phase, _, _ = self.begin(target=target)
            phase.step()
            before, chance = [g.get_state() for g in phase.generators], torch.random.get_rng_state()
            with ReadBack():
                phase.step()
            assert phase.captures and torch.equal(torch.random.get_rng_state(), chance)
            moved = [not torch.equal(g.get_state(), b) for g, b in zip(phase.generators, before, strict=True)]
            assert moved == [True, False, True, True]  # batches, no transforms, dropout, RandMix

    def test_runs_without_have_the_hash_they_had(self):
        plain = toy_plan("snr")
        assert not any(name.startswith(("augment", "r_con", "randmix")) for name in plain.decisions()["switches"])
        changed = toy_plan("snr", changes={"augment": True, "randmix.tanh": False})
        assert changed.decisions()["switches"].items() >= {"augment": True, "randmix.tanh": False}.items()
        assert "randmix.init" not in changed.decisions()["switches"]
        assert changed.digest() != plain.digest()


@pytest.mark.parametrize(("replay", "some"), [("union", True), ("none", False)])
def test_the_memory_is_in_the_batches(replay, some):
    method, source, targets = build_method(replay=replay)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    assert phase.batches.draw(200).replayed.any().item() is some


@pytest.mark.slow
def test_it_learns_the_toy():
    sizes = {"network.width": 0.25, "network.hidden": 32, "network.dim": 16, "epochs": 5, "steps": 12, "batch": 32}
    method, source, targets = build_method(**sizes, lr=0.02)
    method.fit_source(source)
    method.adapt(targets[0])
    for name in ("ink", "mud"):
        unseen = toy_domain(name, 200).subset(torch.arange(40, 200))
        assert (method.predict(unseen.images).argmax(dim=1) == unseen.labels).float().mean() > 0.9
