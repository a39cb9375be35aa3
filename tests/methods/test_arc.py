"""ARC: RaTP without its additions, each addition alone, and all that a method must withstand."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import ratp.methods.ratp as ratp_module
from helpers import TINY, all_finite, same_tensors, toy_domain, toy_domains, toy_method, toy_plan
from ratp.config import as_dict, switches
from ratp.functional.class_mix import allocate
from ratp.functional.norm import supports_row_masks
from ratp.functional.randmix import Inputs
from ratp.methods.arc import ARC, ARCConfig
from ratp.methods.ratp import RaTP, RaTPConfig
from ratp.networks.backbones import ChannelDropout
from ratp.runs.run import Run
from ratp.training.phase import train
from read_back import ReadBack

BATCH = TINY["batch"]
OFF = {
    "augmentation": "randmix",
    "class_mix": "uniform",
    "replay": 0,
    "consistency.weight": 0,
    "randmix.weights_per": "batch",
}
WHITE = 255


def build_method(domains=None, name="arc", **changes):
    """A method on toy domains with some switches changed (``__`` for the dot), its source and its targets."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    method, source, targets = toy_method(toy_plan(name, domains=domains, changes=dotted))
    return method, source, [target.unlabelled() for target in targets]


def build_trained(domains=None, **changes):
    """The same after its source stage."""
    method, source, targets = build_method(domains, **changes)
    method.fit_source(source)
    return method, targets


def start(method, domain):
    """The phase on a domain, in its first epoch."""
    (phase,) = method.source_phases(domain) if hasattr(domain, "labels") else method.target_phases(domain)
    phase.begin()
    phase.begin_epoch(0)
    return phase


def passes(network):
    """A list that notes every batch the network sees: whether it was training, images and logits."""
    seen = []

    def note(net, given, output):
        seen.append((net.training, given[0].detach().clone(), output.logits.detach().clone()))

    network.register_forward_hook(note)
    return seen


class TestWithoutItsAdditions:
    """ARC is RaTP's published code then."""

    @pytest.mark.parametrize("more", [{}, {"r_con": 0.3, "memory": 0}, {"refresh": 1, "pca.old_weight": 0.5}], ids=str)
    def test_it_trains_as_ratp_does_bit_for_bit(self, more):
        states = []
        for name, changes in (("ratp", {}), ("arc", OFF)):
            sizes = {"r_con": 0.3, "epochs": 3, "steps": 4, "lr": 0.02}
            method, source, targets = toy_method(toy_plan(name, changes={**sizes, **changes, **more}))
            method.fit_source(source)
            for target in targets:
                method.adapt(target.unlabelled())
            states.append(method.state())
        assert same_tensors(*states)

    def test_its_defaults_are_those_of_the_published_code_but_for_its_additions(self):
        mine, its = as_dict(ARCConfig()), as_dict(RaTPConfig())
        renamed = {"distill": "distill.weight"} | {
            n: f"t2pl.{n}" for n in ("r_top", "r_knn", "class_mix", "mix_smoothing")
        }
        shared = {name: value for name, value in mine.items() if renamed.get(name, name) in its}
        assert {name for name, value in shared.items() if its[renamed.get(name, name)] != value} == {
            "randmix.weights_per",
            "class_mix",
        }
        assert {name: value for name, value in mine.items() if name not in shared} == {
            "replay": 0.25,
            "consistency.weight": 1.0,
            "consistency.kind": "kl",
            "augmentation": "both",
            "trust": 0.0,
            "average_old": 0.0,
            "statistics": "trained",
        }

    def test_its_values_for_streams_are_those_of_ratp(self):
        for (stream, preset), values in ARC.stream_values.items():
            assert {f"t2pl.{n}" if n in ("r_top", "r_knn") else n: v for n, v in values.items()} == RaTP.stream_values[
                stream, preset
            ]
        others = {key for key in RaTP.stream_values if key[1] == "official"}
        assert ARC.stream_values.keys() == others


class TestAugment:
    def test_each_copy_of_a_batch_has_its_own_mixture(self, monkeypatch):
        """The clean image's share differs from image to image."""
        method, source, _ = build_method(augmentation="randmix")
        shapes = []
        real = method.randmix.draw
        monkeypatch.setattr(
            method.randmix, "draw", lambda *given: (drawn := real(*given), shapes.append(len(drawn.weights)))[0]
        )
        start(method, source).step()
        assert shapes == [BATCH]

    @pytest.mark.parametrize(("r_con", "share"), [(1.0, 0), (0.0, 1)])
    def test_the_threshold_decides_on_a_target(self, r_con, share):
        method, (target, _) = build_trained(r_con=r_con, replay=0)
        phase = start(method, target)
        seen = passes(method.network)
        assert phase.step()["confident"].item() == share
        (judging, judged, _), (learning, learnt, _) = seen
        assert (judging, learning) == (False, True)
        assert len(learnt) == BATCH * (1 + share)
        assert torch.equal(learnt[:BATCH], judged)


class TestReplay:
    @pytest.mark.parametrize(("share", "added"), [(0, 0), (0.25, 2), (0.5, 4), (1, 8), (4, 24)])
    def test_exemplars_join_every_batch(self, share, added):
        """At most as many as there are: 24 of 32."""
        method, (target, _) = build_trained(replay=share, r_con=1.0)
        assert len(method.memory) == 24
        method.memory.images = torch.full_like(method.memory.images, WHITE)
        phase = start(method, target)
        phase.batches._memory = copy.copy(method.memory)
        seen = passes(method.network)
        for _ in range(3):
            phase.step()
        for training, images, _ in seen:
            white = (images == 1).flatten(1).all(dim=1)
            assert len(images) == BATCH + added
            assert white[BATCH:].all()
            assert training or not white[:BATCH].all()

    def test_they_are_drawn_uniformly(self):
        method, (target, _) = build_trained(replay=4.0, batch=6)
        phase = start(method, target)
        count, draws = len(method.memory), 600
        keys = {image.numpy().tobytes(): k for k, image in enumerate(method.scaling(method.memory.images))}
        assert len(keys) == count
        found = torch.zeros(count)
        for _ in range(draws):
            batch = phase.batches.draw(6, 24)
            assert batch.replayed[6:].all()
            for image, label in zip(batch.images[6:], batch.labels[6:], strict=True):
                k = keys[image.numpy().tobytes()]
                assert label == method.memory.labels[k]
                found[k] += 1
        expected = draws * 24 / count
        assert (found - expected).abs().max() < 5 * expected**0.5

    def test_they_get_copies_and_are_distilled(self):
        method, (target, _) = build_trained(replay=0.5, r_con=0.0)
        seen, old = passes(method.network), passes(method.old)
        start(method, target).step()
        learnt, distilled = seen[-1][1], old[-1][1]
        assert len(learnt) == 2 * (BATCH + 4)
        assert torch.equal(learnt, distilled)

    def test_the_source_has_none(self):
        method, source, _ = build_method(replay=1.0)
        method.fit_source(source)
        seen = passes(method.network)
        start(method, source).step()
        assert [len(images) for _, images, _ in seen] == [2 * BATCH]

    def test_no_more_draws_than_asked_for(self):
        """Without exemplars, a batch is what it would be had the switch never existed."""
        batches = []
        for exemplars in ((), (0,)):
            method, (target, _) = build_trained()
            batches.append(start(method, target).batches.draw(BATCH, *exemplars))
        assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(axis=1)


class TestConsistency:
    @pytest.mark.parametrize("on", ["source", "target"])
    def test_it_is_the_divergence_of_each_copy_from_its_image(self, on):
        method, source, (target, _) = build_method(r_con=0.27, consistency__weight=3.0)
        if on == "target":
            method.fit_source(source)
        phase = start(method, source if on == "source" else target)
        seen = passes(method.network)
        for _ in range(4):
            found = phase.step()["consistency"].item()
            logits = seen[-1][2].double().numpy()
            chosen = np.arange(BATCH)
            if on == "target":
                chosen = np.flatnonzero(softmax(seen[-2][2].double().numpy()).max(axis=1) > 0.27)
            copies = logits[len(logits) - len(chosen) :]
            pairs = kl(softmax(logits[chosen]), softmax(copies)) if len(chosen) else [0]
            assert found == pytest.approx(3 * np.mean(pairs), rel=1e-4, abs=1e-6)

    def test_the_prediction_for_the_image_is_a_constant(self):
        method, source, _ = build_method()
        phase = start(method, source)
        logits = torch.randn(2 * BATCH, 4, requires_grad=True)
        clean, labels = torch.zeros(2 * BATCH, 3, 32, 32), torch.zeros(2 * BATCH, dtype=torch.int64)
        phase._consistency(logits, Inputs(clean, labels)).backward()
        assert (logits.grad[:BATCH] == 0).all()
        assert (logits.grad[BATCH:] != 0).any()

    def test_it_is_nothing_without_copies(self):
        method, (target, _) = build_trained(r_con=1.0)
        assert start(method, target).step()["consistency"].item() == 0

    def test_a_weight_of_zero_leaves_it_out(self):
        method, (target, _) = build_trained(consistency__weight=0)
        assert start(method, target).step().keys() == {"total", "ce", "pca", "distill", "confident"}

    @pytest.mark.slow
    def test_it_makes_copies_agree(self):
        """Trained with it, predictions for copies are closer to those for their images."""
        gaps = []
        for weight in (0.0, 4.0):
            changes = {"network__width": 0.2, "network__hidden": 32, "network__dim": 16, "epochs": 6, "steps": 10}
            method, source, _ = build_method(**changes, batch=24, lr=0.03, consistency__weight=weight)
            method.fit_source(source)
            inputs = method.scaling(source.images)
            chance = torch.Generator().manual_seed(3)
            copies = torch.cat([method.randmix(inputs, chance) for _ in range(8)])
            with torch.no_grad():
                clean, copied = (method.network.eval()(x).logits.double().numpy() for x in (inputs, copies))
            gaps.append(kl(np.tile(softmax(clean), (8, 1)), softmax(copied)).mean())
        assert gaps[1] < 0.95 * gaps[0]


class TestClassMix:
    """An estimate of how frequent each class is in a target."""

    @pytest.mark.parametrize("kind", ["em", "confusion"])
    def test_it_is_estimated_without_labels_and_exemplars_follow_it(self, kind):
        """A target of 40, 10, 5 and 5 images, after a source of equal classes that was learnt well."""
        classes = [0] * 40 + [1] * 10 + [2] * 5 + [3] * 5
        domains = [toy_domain("ink", 80), toy_domain("mud", 60, classes=classes)]
        sizes = {"network__width": 0.2, "network__hidden": 32, "network__dim": 16, "epochs": 4, "steps": 8}
        learning = {"batch": 24, "lr": 0.03, "memory": 40, "r_con": 0.3, "mix_smoothing": 0}
        method, (target,) = build_trained(domains, **sizes, **learning, class_mix=kind)
        (phase,) = method.target_phases(target)
        phase.begin()
        record = phase.begin_epoch(0)
        assert record["mix_min"] < 0.15 < 0.5 < record["mix_max"]
        error = (phase._mix - torch.tensor([40, 10, 5, 5]) / 60).abs().sum()
        assert error < {"em": 0.25, "confusion": 0.5}[kind]  # of equal proportions: 0.83
        phase.step()
        phase.finish()
        memory = method.memory
        kept = memory.labels[memory.domains == 1].bincount(minlength=4)
        wanted = torch.tensor(allocate(20, phase._mix))
        assert kept.equal(wanted.minimum(phase.batches.labels.bincount(minlength=4)))
        assert memory.labels[memory.domains == 0].bincount(minlength=4).tolist() == [5] * 4

    def test_without_it_sizes_are_equal_and_nothing_is_drawn(self):
        method, (target, _) = build_trained(class_mix="uniform")
        phase = start(method, target)
        assert phase._mix is None
        assert len(phase.generators) == 4

    @pytest.mark.parametrize("kind", ["em", "confusion"])
    @pytest.mark.parametrize("changes", [{"memory": 0}, {"memory": 5}, {"t2pl": 1}], ids=["none", "few", "tiny"])
    def test_few_exemplars_or_images_are_tolerated(self, kind, changes):
        domains = [toy_domain("ink"), toy_domain("mud", 3 if "t2pl" in changes else 32)]
        changes.pop("t2pl", None)
        method, (target,) = build_trained(domains, class_mix=kind, **changes)
        method.adapt(target)
        assert all_finite(method.state())

    @pytest.mark.parametrize("kind", ["em", "confusion"])
    def test_ratp_has_it_for_its_labels(self, kind, monkeypatch):
        method, source, (target, _) = build_method(name="ratp", t2pl__class_mix=kind)
        method.fit_source(source)
        mixes = []
        real = ratp_module.t2pl
        monkeypatch.setattr(ratp_module, "t2pl", lambda *given, mix: mixes.append(mix) or real(*given, mix=mix))
        start(method, target)
        (mix,) = mixes
        assert mix.sum().item() == pytest.approx(1)
        assert (mix >= 0.2 / 4 - 1e-9).all()


class TestThreeViews:
    """Jensen-Shannon consistency."""

    @pytest.mark.parametrize("on", ["source", "target"])
    def test_each_image_has_two_copies_and_all_learn(self, on):
        method, source, (target, _) = build_method(r_con=0.27, consistency__kind="js", consistency__weight=2.0)
        if on == "target":
            method.fit_source(source)
        phase = start(method, source if on == "source" else target)
        seen = passes(method.network)
        for _ in range(4):
            found = phase.step()["consistency"].item()
            images, logits = seen[-1][1], seen[-1][2].double().numpy()
            count = BATCH + (2 if on == "target" else 0)
            chosen = np.arange(count)
            if on == "target":
                chosen = np.flatnonzero(softmax(seen[-2][2].double().numpy()).max(axis=1) > 0.27)
            assert len(images) == count + 2 * len(chosen)
            first, second = images[count : count + len(chosen)], images[count + len(chosen) :]
            assert not len(chosen) or not torch.equal(first, second)
            total = 0.0
            for k, i in enumerate(chosen):
                rows = (i, count + k, count + len(chosen) + k)
                views = [softmax(logits[row : row + 1]) for row in rows]
                total += sum(kl(view, sum(views) / 3)[0] for view in views) / 3
            assert found == pytest.approx(2 * total / max(len(chosen), 1), rel=1e-4, abs=1e-6)

    def test_the_prediction_for_the_image_learns_too(self):
        method, source, _ = build_method(consistency__kind="js")
        logits = torch.randn(3 * BATCH, 4, requires_grad=True)
        clean, labels = torch.zeros(3 * BATCH, 3, 32, 32), torch.zeros(3 * BATCH, dtype=torch.int64)
        start(method, source)._consistency(logits, Inputs(clean, labels, rounds=2)).backward()
        assert (logits.grad != 0).any(dim=1).all()

    def test_without_a_weight_there_is_one_copy(self):
        method, source, _ = build_method(consistency__kind="js", consistency__weight=0)
        seen = passes(method.network)
        start(method, source).step()
        assert [len(images) for _, images, _ in seen] == [2 * BATCH]


class TestAugmentation:
    def test_both_is_each_for_half_of_a_batch(self):
        method, source, _ = build_method(augmentation="both")
        inputs = method.scaling(source.images[:1].expand(400, -1, -1, -1))
        chance = torch.Generator().manual_seed(0)
        copies = method.copy(inputs, chance)
        # RandMix copies differ from image to image, those of Pro-RandConv do not
        _, found = copies.flatten(1).round(decimals=4).unique(dim=0, return_counts=True)
        assert found.max() == 200
        assert (found == 1).sum() == 200

    @pytest.mark.parametrize("kind", ["randmix", "prorandconv", "both"])
    def test_rows_select_from_what_all_would_get(self, kind):
        method, source, _ = build_method(augmentation=kind)
        inputs, rows = method.scaling(source.images[:6]), torch.tensor([True, False, True, True, False, False])
        every, some = (method.copy(inputs, torch.Generator().manual_seed(1), selected) for selected in (None, rows))
        torch.testing.assert_close(some, every[rows])

    def test_it_is_what_the_report_shows(self):
        method, source, _ = build_method(augmentation="prorandconv")
        shown = method.show(source.images[:5], torch.Generator().manual_seed(1))
        assert [(t.shape, t.dtype) for t in shown.values()] == [((5, 3, 32, 32), torch.uint8)] * 3


class TestAfterAStage:
    def test_the_network_is_an_average_of_new_and_old(self):
        ends = []
        for share in (0.0, 0.3):
            method, (target, _) = build_trained(average_old=share)
            before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
            method.adapt(target)
            ends.append(dict(method.network.state_dict()))
            assert same_tensors(method.old.state_dict(), method.network.state_dict())
        for name, new in ends[0].items():
            expected = 0.7 * new + 0.3 * before[name] if new.is_floating_point() else new
            torch.testing.assert_close(ends[1][name], expected)

    def test_there_is_nothing_to_average_on_the_source(self):
        plain, averaged = (build_trained(average_old=share)[0] for share in (0.0, 0.5))
        assert same_tensors(plain.state(), averaged.state())

    @pytest.mark.parametrize("memory", [24, 0])
    def test_statistics_become_those_of_target_and_exemplars(self, memory):
        """The first layer's: the mean of its input over half target, half memory."""
        method, (target, _) = build_trained(statistics="reestimated", memory=memory, batch=32)
        source_exemplars = method.memory.images
        method.adapt(target)
        means = [torch.zeros(0)]
        with torch.no_grad():
            layer = method.network.backbone[0]
            for images in (target.images, source_exemplars):
                means.append(layer(method.scaling(images)).mean(dim=(0, 2, 3)) if len(images) else means[-1])
        found = method.network.backbone[1]
        assert found.momentum == 0.1
        torch.testing.assert_close(found.running_mean, (means[1] + means[2]) / 2, rtol=0.05, atol=0.02)

    def test_statistics_alone_are_estimated_anew(self):
        ends = []
        for kind in ("trained", "reestimated"):
            method, (target, _) = build_trained(statistics=kind)
            method.adapt(target)
            ends.append(method.network.state_dict())
        differing = {name.rsplit(".")[-1] for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])}
        assert differing == {"running_mean", "running_var", "num_batches_tracked"}


class TestTrust:
    def test_only_trusted_labels_count_in_the_cross_entropy(self):
        method, (target, _) = build_trained(trust=0.3, r_con=0.27)
        phase = start(method, target)
        seen = passes(method.network)
        taken = []
        real = phase.batches.draw
        phase.batches.draw = lambda *given: taken.append(real(*given)) or taken[-1]
        partly = 0
        for _ in range(6):
            found = phase.step()["ce"].item()
            (_, _, judged), (_, _, logits) = seen[-2:]
            labels = taken[-1].labels
            labels = torch.cat([labels, labels[judged.softmax(dim=1).amax(dim=1) > 0.27]])
            own = logits.double().softmax(dim=1)[torch.arange(len(labels)), labels]
            trusted = own >= 0.3
            partly += 0 < trusted.sum() < len(trusted)
            assert found == pytest.approx(-own[trusted].log().mean().item() if trusted.any() else 0, rel=1e-4, abs=1e-6)
        assert partly

    def test_labels_of_the_source_are_always_trusted(self):
        plain, strict = (build_trained(trust=share)[0] for share in (0.0, 0.9))
        assert same_tensors(plain.state(), strict.state())


class TestTerms:
    def test_names(self):
        method, source, (target, _) = build_method()
        assert start(method, source).step().keys() == {"total", "ce", "pca", "consistency"}
        method.fit_source(source)
        step = start(method, target).step()
        assert step.keys() == {"total", "ce", "pca", "distill", "consistency", "confident"}
        terms = [value for name, value in step.items() if name not in ("total", "confident")]
        torch.testing.assert_close(step["total"], torch.stack(terms).sum())

    @pytest.mark.parametrize(
        ("changes", "left_out"), [({"distill": 0}, "distill"), ({"pca__weight": 0}, "pca")], ids=["distill", "pca"]
    )
    def test_a_weight_of_zero_leaves_a_term_out(self, changes, left_out):
        method, (target, _) = build_trained(**changes)
        assert left_out not in start(method, target).step()

    def test_every_parameter_trains(self):
        method, (target, _) = build_trained()
        before = [parameter.detach().clone() for parameter in method.network.parameters()]
        phase = start(method, target)
        phase.step()
        phase.step()
        for (name, parameter), old in zip(method.network.named_parameters(), before, strict=True):
            assert not torch.equal(parameter, old), name

    @pytest.mark.slow
    def test_it_learns_the_toy(self):
        domains = [toy_domain("ink", 80), toy_domain("mud", 60)]
        changes = {"network__width": 0.2, "network__hidden": 32, "network__dim": 16, "epochs": 4, "steps": 8}
        method, (target,) = build_trained(domains, **changes, batch=24, lr=0.03)
        method.adapt(target)
        for domain in domains:
            assert (method.predict(domain.images).argmax(dim=1) == domain.labels).float().mean() > 0.9


class TestSmallStreams:
    @pytest.mark.parametrize("changes", [{}, {"memory": 0}, {"epochs": 1, "steps": 1}, {"memory": 3}], ids=str)
    def test_one_source_and_one_target(self, changes, tmp_path):
        run = Run(toy_plan("arc", toy_domains(ink=40, mud=32), changes=changes), tmp_path / "run")
        assert run.execute().matrix.complete
        assert all_finite(run.method.state())

    @pytest.mark.parametrize("count", [1, 2, BATCH - 1])
    def test_a_target_smaller_than_a_batch(self, count, tmp_path):
        run = Run(toy_plan("arc", toy_domains(ink=40, mud=count, fog=36)), tmp_path / "run")
        assert run.execute().matrix.complete
        assert all_finite(run.method.state())

    def test_a_single_class(self):
        domains = [toy_domain("ink", classes=(2,)), toy_domain("mud", classes=(2,))]
        method, (target,) = build_trained(domains)
        method.adapt(target)
        assert all_finite(method.state())

    def test_absent_classes_are_tolerated(self):
        domains = [toy_domain("ink"), toy_domain("mud", classes=(0, 2, 3)), toy_domain("fog", classes=(1,))]
        method, targets = build_trained(domains)
        for target in targets:
            method.adapt(target)
        assert all_finite(method.state())


@pytest.mark.parametrize("static", [False, True])
def test_it_trains_in_bfloat16(static):
    """With every ingredient on, static and compact."""
    changes = {"consistency.kind": "js", "augmentation": "both", "class_mix": "em", "average_old": 0.3, "trust": 0.2}
    plan = toy_plan("arc", changes={**changes, "statistics": "reestimated", "r_con": 0.3})
    method, source, targets = toy_method(replace(plan, precision="bf16"))
    assert method.network.precision == "bf16"
    method.fit_source(source)
    for target in targets:
        (phase,) = method.target_phases(target.unlabelled())
        phase._static = static
        for _ in train([phase]):
            pass
    assert all_finite(method.state())
    assert {tensor.dtype for tensor in method.network.parameters()} == {torch.float32}


CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SWITCHES = [
    {},
    {"consistency.kind": "js"},
    {"augmentation": "prorandconv"},
    {"augmentation": "both", "consistency.kind": "js", "trust": 0.4},
    {"trust": 0.5},
    {"memory": 0},
    {"replay": 0},
    {"distill": 0},
    {"pca.weight": 0},
    {"consistency.weight": 0},
    {"randmix.weights_per": "batch"},
]


@pytest.mark.slow
class TestStatic:
    """A captured step leaves out by a mask what a compact one never copies."""

    @pytest.fixture(autouse=True)
    def _double(self, monkeypatch):
        """Everything in double precision: what is left are sums in another order."""
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize("changes", SWITCHES, ids=str)
    def test_both_ways_lead_to_the_same_numbers(self, changes):
        ends = []
        for static in (False, True):
            sizes = {"batch": 12, "memory": 40, "lr": 0.02}
            method, source, targets = toy_method(toy_plan("arc", changes={**sizes, **changes}))
            for layer in method.network.modules():
                if isinstance(layer, ChannelDropout):
                    layer.probability = 0.0  # it draws by row
            method.fit_source(source)
            target = targets[0].unlabelled()
            confidence = method.predict(target.images).softmax(dim=1).amax(dim=1)
            object.__setattr__(method.config, "r_con", confidence.median().item())
            (phase,) = method.target_phases(target)
            phase._static = static
            phase.begin()
            phase.begin_epoch(0)
            records = [phase.step() for _ in range(4)]
            assert any(0 < record["confident"].item() < 1 for record in records)
            ends.append((records, dict(method.network.state_dict())))
        torch.testing.assert_close(*ends, **CLOSE)

    @pytest.mark.parametrize("changes", SWITCHES, ids=str)
    @pytest.mark.parametrize("on", ["source", "target"])
    def test_a_static_step_reads_nothing_back(self, changes, on):
        """As a CUDA graph requires."""
        method, source, targets = toy_method(toy_plan("arc", changes=changes))
        if on == "target":
            method.fit_source(source)
        (phase,) = method.source_phases(source) if on == "source" else method.target_phases(targets[0].unlabelled())
        phase._static = True
        phase.begin()
        phase.begin_epoch(0)
        phase.step()
        with ReadBack():
            phase.step()
        assert method.network.training

    def test_it_is_static_where_it_can_be(self):
        method, source, (target, _) = build_method(class_mix="uniform")
        assert supports_row_masks(method.network)
        method.fit_source(source)
        for phase in (*method.source_phases(source), *method.target_phases(target)):
            assert not phase.captures
            assert len(phase.generators) == len(set(phase.generators)) == 4


def other_values():
    """Every switch with each of its other values; of a number, one or two that matter."""
    numbers = {
        "sgd.momentum": (0.9,),
        "sgd.weight_decay": (0.0,),
        "replay": (0.0, 1.0),
        "consistency.weight": (0.0, 3.0),
        "refresh": (0, 1),
        "r_con": (1.0,),
        "r_top": (1,),
        "r_knn": (1,),
        "mix_smoothing": (0.0,),
        "trust": (0.9,),
        "average_old": (0.5,),
        "randmix.kernel_sizes": ("3",),
        "randmix.input_noise": (0.0,),
        "pca.weight": (0.0, 2.0),
        "pca.scale": (30.0,),
        "pca.old_weight": (0.0,),
        "distill": (0.0, 1.0),
    }
    for item in switches(ARCConfig()):
        if item.kind == "true or false":
            values = (not item.value,)
        elif item.kind.startswith("one of "):
            values = tuple(v for v in item.kind.removeprefix("one of ").split(", ") if v != str(item.value))
        else:
            values = numbers[item.name]
        yield from ((item.name, value) for value in values)


# Values that need not show on a few toy images.
MAY_NOT_SHOW = {
    "class_mix",
    "mix_smoothing",
    "randmix.safe_division",
    "r_top",
    "r_knn",
    "pca.form",
    "refresh",
    "sgd.nesterov",
}


def all_stages(**changes):
    """The method after its source and both targets."""
    method, targets = build_trained(epochs=3, steps=1, **changes)
    for target in targets:
        method.adapt(target)
    return method


@pytest.fixture(scope="module")
def usual():
    return all_stages().state()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), list(other_values()))
def test_every_switch_runs_and_matters(name, value, usual):
    method = all_stages(**{name.replace(".", "__"): value})
    assert as_dict(method.config)[name] != as_dict(ARCConfig())[name]
    assert all_finite(method.state())
    if name not in MAY_NOT_SHOW:
        assert not same_tensors(method.state(), usual)
