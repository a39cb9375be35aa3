"""RaTP's stages: what is augmented, labelled, distilled, remembered and frozen, under every switch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import ratp.methods.ratp as module
from helpers import TINY, all_finite, same_tensors, toy_domain, toy_domains, toy_method, toy_plan
from ratp.config import as_dict, switches
from ratp.errors import ConfigError
from ratp.functional.pseudo_labels import PseudoLabels
from ratp.methods.ratp import RaTPConfig
from ratp.runs.run import Run

BATCH = TINY["batch"]


def build_method(domains=None, **changes):
    """RaTP on toy domains with some switches changed (``__`` for the dot), its source and its targets."""
    method, source, targets = toy_method(toy_plan(domains=domains, changes=_dotted(changes)))
    return method, source, [target.unlabelled() for target in targets]


def _dotted(changes):
    return {name.replace("__", "."): value for name, value in changes.items()}


def build_trained(domains=None, **changes):
    """The same after its source stage."""
    method, source, targets = build_method(domains, **changes)
    method.fit_source(source)
    return method, targets


def start(method, domain):
    """The phase on a domain, in its first epoch."""
    phases = method.source_phases(domain) if hasattr(domain, "labels") else method.target_phases(domain)
    (phase,) = phases
    phase.begin()
    phase.begin_epoch(0)
    return phase


def passes(network):
    """A list that notes every batch the network sees: its images, and whether it was training."""
    seen = []
    network.register_forward_pre_hook(lambda net, inputs: seen.append((net.training, inputs[0].detach().clone())))
    return seen


def cloned(network):
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


class TestOldModel:
    def test_there_is_none_on_the_source(self):
        method, _, _ = build_method()
        assert method.old is None
        assert not any(name.startswith("old.") for name in method.state())

    def test_it_is_the_network_as_the_stage_left_it(self):
        method, targets = build_trained()
        for target in targets:
            assert same_tensors(method.old.state_dict(), method.network.state_dict())
            assert not method.old.training
            method.adapt(target)
        assert same_tensors(method.old.state_dict(), method.network.state_dict())

    def test_it_does_not_change_during_the_next_stage(self):
        method, (target, _) = build_trained()
        old, before = method.old, cloned(method.old)
        phase = start(method, target)
        for _ in range(5):
            phase.step()
            assert all(parameter.grad is None for parameter in old.parameters())
        assert method.old is old
        assert same_tensors(cloned(old), before)
        assert not any(torch.equal(p, q) for p, q in zip(method.network.parameters(), old.parameters(), strict=True))

    def test_no_gradient_could_enter_it(self):
        method, _ = build_trained()
        assert not any(parameter.requires_grad for parameter in method.old.parameters())
        shared = {p.data_ptr() for p in method.network.parameters()} & {p.data_ptr() for p in method.old.parameters()}
        assert not shared


class TestTerms:
    def test_the_source_has_no_distillation(self):
        method, source, _ = build_method()
        assert start(method, source).step().keys() == {"total", "ce", "pca"}

    def test_a_target_has(self):
        method, (target, _) = build_trained()
        assert start(method, target).step().keys() == {"total", "ce", "pca", "distill", "confident"}

    @pytest.mark.parametrize(
        ("changes", "terms"),
        [
            ({"distill__weight": 0}, {"ce", "pca"}),
            ({"pca__weight": 0}, {"ce", "distill"}),
            ({"pca__weight": 0, "distill__weight": 0}, {"ce"}),
            ({"memory__replay": "separate"}, {"ce", "pca", "distill", "replay"}),
            ({"memory__replay": "separate", "memory": 0}, {"ce", "pca", "distill"}),
        ],
    )
    def test_a_weight_of_zero_leaves_a_term_out(self, changes, terms):
        method, (target, _) = build_trained(**changes)
        assert start(method, target).step().keys() == terms | {"total", "confident"}

    @pytest.mark.parametrize(
        "changes", [{}, {"memory__replay": "separate"}, {"pca__weight": 0.3, "distill__weight": 2}]
    )
    def test_the_total_is_their_sum(self, changes):
        method, (target, _) = build_trained(**changes)
        record = start(method, target).step()
        terms = [value for name, value in record.items() if name not in ("total", "confident")]
        torch.testing.assert_close(record["total"], torch.stack(terms).sum())

    def test_a_weight_is_a_factor(self):
        records = {}
        for weight in (1.0, 3.0):
            method, (target, _) = build_trained()
            config = method.config
            method.config = replace(
                config, pca=replace(config.pca, weight=weight), distill=replace(config.distill, weight=weight)
            )
            records[weight] = start(method, target).step()
        for term in ("pca", "distill"):
            torch.testing.assert_close(records[3.0][term], 3 * records[1.0][term])
        torch.testing.assert_close(records[3.0]["ce"], records[1.0]["ce"])

    def test_distillation_is_nothing_while_new_and_old_are_one(self):
        method, (target, _) = build_trained(distill__student="eval", distill__weight=1)
        for layer in method.network.modules():
            if isinstance(layer, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
                layer.momentum = 0.0  # statistics stay as the old model has them
        phase = start(method, target)
        first, later = phase.step()["distill"].item(), phase.step()["distill"].item()
        assert abs(first) < 1e-6
        assert later > 1e-5

    def test_a_student_in_training_never_quite_agrees(self):
        method, (target, _) = build_trained()
        assert start(method, target).step()["distill"].item() > 1e-5

    def test_confidence_is_recorded_on_targets_only(self):
        method, source, (target, _) = build_method()
        assert "confident" not in start(method, source).step()
        method.fit_source(source)
        assert 0 <= start(method, target).step()["confident"].item() <= 1


class TestAugmentation:
    def test_the_source_is_doubled(self):
        method, source, _ = build_method()
        seen = passes(method.network)
        start(method, source).step()
        assert [(training, len(images)) for training, images in seen] == [(True, 2 * BATCH)]

    @pytest.mark.parametrize(("r_con", "share"), [(1.0, 0), (0.0, 1)])
    def test_the_threshold_decides_on_a_target(self, r_con, share):
        method, (target, _) = build_trained(r_con=r_con)
        phase = start(method, target)
        seen = passes(method.network)
        assert phase.step()["confident"].item() == share
        (judging, judged), (learning, learnt) = seen
        assert (judging, learning) == (False, True)
        assert len(judged) == BATCH
        assert len(learnt) == BATCH * (1 + share)
        assert torch.equal(learnt[:BATCH], judged)

    @pytest.mark.parametrize("strict", [True, False])
    def test_reaching_the_threshold_is_enough_unless_strict(self, strict):
        """A classifier of zeros gives every class of four exactly a quarter."""
        method, (target, _) = build_trained(strict=strict, r_con=0.25)
        torch.nn.init.zeros_(method.network.classifier.weight)
        assert start(method, target).step()["confident"].item() == (0 if strict else 1)

    def test_copies_keep_their_labels(self, monkeypatch):
        method, source, _ = build_method()
        phase = start(method, source)
        taken = []
        real = module.F.cross_entropy
        monkeypatch.setattr(
            module.F, "cross_entropy", lambda logits, labels: taken.append(labels) or real(logits, labels)
        )
        phase.step()
        (labels,) = taken
        assert torch.equal(labels[:BATCH], labels[BATCH:])

    def test_copies_differ_from_the_images_and_from_each_other(self):
        method, source, _ = build_method()
        seen = passes(method.network)
        phase = start(method, source)
        phase.step()
        phase.step()
        for _, images in seen:
            assert not torch.equal(images[:BATCH], images[BATCH:])
        assert not torch.equal(seen[0][1][BATCH:], seen[1][1][BATCH:])

    def test_apart_they_pass_in_two_batches(self):
        method, source, _ = build_method(joint_batch=False)
        seen = passes(method.network)
        start(method, source).step()
        assert [(training, len(images)) for training, images in seen] == [(True, BATCH), (True, BATCH)]

    def test_apart_a_single_confident_image_is_not_a_batch(self):
        method, (target, _) = build_trained(joint_batch=False)
        phase = start(method, target)
        with torch.no_grad():
            confidence = [
                method.network.eval()(method.scaling(image[None])).logits.softmax(dim=1).amax()
                for image in target.images
            ]
        method.config = replace(method.config, r_con=sorted(c.item() for c in confidence)[-2])
        phase = start(method, target)
        for _ in range(6):
            assert torch.isfinite(phase.step()["total"])

    def test_showing_it_leaves_training_as_it_was(self):
        ends = []
        for shown in (False, True):
            method, source, _ = build_method()
            if shown:
                draws = method.show(source.images[:5], torch.Generator().manual_seed(1))
                assert [(t.shape, t.dtype) for t in draws.values()] == [((5, 3, 32, 32), torch.uint8)] * 3
                assert len({t.numpy().tobytes() for t in draws.values()}) == 3
            method.fit_source(source)
            ends.append(method.state())
        assert same_tensors(*ends)

    def test_a_kernel_larger_than_the_images_is_refused(self):
        with pytest.raises(ConfigError, match=r"kernel of 33 does not fit into images of 32×32"):
            build_method(randmix__kernel_sizes="5,33")


class TestMemory:
    def test_it_holds_an_equal_share_of_every_domain_and_class(self, monkeypatch):
        """24 images, 4 classes: 6 a class of one domain, 3 of two, 2 of three."""

        def in_turn(embedding, probabilities, config, mix):
            labels = torch.arange(len(embedding)) % 4
            return PseudoLabels(labels, embedding[:4], embedding[:4], torch.ones(4, dtype=torch.bool))

        monkeypatch.setattr(module, "t2pl", in_turn)
        method, targets = build_trained()
        for domains, quota in ((1, 6), (2, 3), (3, 2)):
            groups = (method.memory.domains * 4 + method.memory.labels).bincount(minlength=4 * domains)
            assert groups.tolist() == [quota] * 4 * domains
            if domains < 3:
                method.adapt(targets[domains - 1])

    def test_it_holds_images_of_the_domains_with_their_labels(self):
        method, source, _ = build_method()
        method.fit_source(source)
        for image, label in zip(method.memory.images, method.memory.labels, strict=True):
            (position,) = (source.images == image).flatten(1).all(dim=1).nonzero().squeeze(1).tolist()
            assert source.labels[position] == label

    def test_it_never_outgrows_its_size(self):
        method, targets = build_trained()
        for target in targets:
            method.adapt(target)
            assert len(method.memory) <= TINY["memory"]
            assert set(method.memory.domains.tolist()) <= {0, 1, 2}
        assert method.memory.seen == 3

    def test_it_may_be_empty(self):
        method, targets = build_trained(memory=0)
        for target in targets:
            method.adapt(target)
        assert len(method.memory) == 0
        assert all_finite(method.state())

    @pytest.mark.parametrize(
        ("replay", "joint", "apart"), [("union", True, False), ("separate", False, True), ("none", False, False)]
    )
    def test_replay(self, replay, joint, apart):
        """White images stand for the memory, and are looked for in what the network is trained on."""
        method, (target, _) = build_trained(memory__replay=replay, r_con=1.0)
        method.memory.images = torch.full_like(method.memory.images, 255)
        phase = start(method, target)
        seen = passes(method.network)
        for _ in range(4):
            phase.step()
        batches = [images for training, images in seen if training]
        white = [(images == 1).flatten(1).all(dim=1) for images in batches]
        assert any(0 < rows.sum() < len(rows) for rows in white) == joint
        assert any(rows.all() for rows in white) == apart
        assert any(rows.any() for rows in white) == (joint or apart)

    def test_source_is_never_mixed_with_memory(self):
        method, source, _ = build_method()
        method.fit_source(source)
        method.memory.images = torch.full_like(method.memory.images, 255)
        seen = passes(method.network)
        start(method, source).step()
        assert not any((images[:BATCH] == 1).flatten(1).all(dim=1).any() for _, images in seen)

    @pytest.mark.parametrize("augmented", [True, False])
    def test_replayed_images_get_copies_by_default(self, augmented):
        method, (target, _) = build_trained(augment_replay=augmented, r_con=0.0)
        method.memory.images = torch.full_like(method.memory.images, 255)
        phase = start(method, target)
        seen = passes(method.network)
        for _ in range(3):
            phase.step()
        replayed = 0
        for (_, judged), (_, learnt) in zip(seen[::2], seen[1::2], strict=True):
            white = int((judged == 1).flatten(1).all(dim=1).sum())
            replayed += white
            assert len(learnt) == 2 * BATCH - (0 if augmented else white)
        assert replayed

    def test_a_domain_with_few_images_of_a_class_gives_all_it_has(self):
        method, _ = build_trained([toy_domain("ink", 10), toy_domain("mud")])
        assert method.memory.quota(1) == 6
        assert len(method.memory) == 8  # what the split left of ten images
        assert len({image.numpy().tobytes() for image in method.memory.images}) == 8


class TestLabels:
    @pytest.mark.parametrize(
        ("refresh", "due"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])]
    )
    def test_they_are_refreshed_when_due(self, refresh, due):
        method, (target, _) = build_trained(refresh=refresh, epochs=5, steps=1)
        (phase,) = method.target_phases(target)
        refreshed = []
        for epoch in range(5):
            if "labels_as_predicted" in phase.begin_epoch(epoch):
                refreshed.append(epoch)
            phase.step()
        assert refreshed == due

    def test_their_record_is_a_set_of_shares(self):
        method, (target, _) = build_trained()
        record = method.target_phases(target)[0].begin_epoch(0)
        assert record.keys() == {"lr", "labels_changed", "labels_as_predicted", "smallest_class", "largest_class"}
        assert record["labels_changed"] == 1
        assert 0 <= record["smallest_class"] <= 0.25 <= record["largest_class"] <= 1

    def test_they_are_made_of_what_the_model_thinks_at_rest(self, monkeypatch):
        """In evaluation mode, of all images, with the switches as set."""
        method, (target, _) = build_trained(t2pl__r_top=7, t2pl__classes="all")
        modes = []
        real = module.t2pl
        monkeypatch.setattr(module, "t2pl", lambda *given, mix: modes.append((*given, mix)) or real(*given))
        start(method, target)
        ((embedding, probabilities, config, mix),) = modes
        assert mix is None
        with torch.no_grad():
            output = method.network.eval()(method.scaling(target.images))
        torch.testing.assert_close(embedding, output.embedding)
        torch.testing.assert_close(probabilities, output.logits.softmax(dim=1))
        assert (config.r_top, config.classes) == (7, "all")

    def test_labels_of_the_final_model_may_be_stored(self, monkeypatch):
        calls = []

        def changing(embedding, probabilities, config, mix):
            calls.append(len(calls))
            labels = torch.full((len(embedding),), len(calls) % 4)
            return PseudoLabels(labels, embedding[:4], embedding[:4], torch.ones(4, dtype=torch.bool))

        monkeypatch.setattr(module, "t2pl", changing)
        stored = {}
        for which in ("last", "final"):
            calls.clear()
            method, (target, _) = build_trained(memory__labels=which)
            method.adapt(target)
            stored[which] = set(method.memory.labels[method.memory.domains == 1].tolist())
        assert stored == {"last": {1}, "final": {2}}

    def test_absent_class_is_tolerated(self):
        domains = [toy_domain("ink"), toy_domain("mud", classes=(0, 2, 3)), toy_domain("fog", classes=(1,))]
        method, targets = build_trained(domains)
        for target in targets:
            method.adapt(target)
        assert all_finite(method.state())
        assert 0 <= int(method.memory.labels.min()) <= int(method.memory.labels.max()) < 4

    def test_class_missing_from_the_source_is_tolerated(self):
        method, targets = build_trained([toy_domain("ink", classes=(0, 1, 2)), toy_domain("mud")])
        method.adapt(targets[0])
        assert all_finite(method.state())


class TestSmallDomains:
    @pytest.mark.parametrize("count", [1, 2, BATCH - 1])
    @pytest.mark.parametrize("preset", ["official", "paper"])
    def test_a_target_smaller_than_a_batch(self, count, preset, tmp_path):
        plan = toy_plan(domains=toy_domains(ink=40, mud=count, fog=36), preset=preset)
        record = Run(plan, tmp_path / "run").execute()
        assert record.matrix.complete

    @pytest.mark.parametrize("student", ["train", "eval"])
    def test_a_batch_that_is_all_memory_distils_nothing(self, student):
        """One target image among many exemplars: a batch may hold none of it."""
        domains = [toy_domain("ink", 80), toy_domain("mud", 1)]
        method, (target,) = build_trained(domains, memory=48, batch=2, distill__data="target", distill__student=student)
        phase = start(method, target)
        distilled = [phase.step()["distill"].item() for _ in range(8)]
        assert 0.0 in distilled
        assert all_finite(method.state())

    def test_a_source_smaller_than_a_batch(self):
        method, targets = build_trained([toy_domain("ink", 12), toy_domain("mud")], batch=64)
        method.adapt(targets[0])
        assert all_finite(method.state())


class TestLearning:
    @pytest.mark.parametrize("on", ["source", "target"])
    def test_every_parameter_trains(self, on):
        method, source, (target, _) = build_method()
        if on == "target":
            method.fit_source(source)
        before = [parameter.detach().clone() for parameter in method.network.parameters()]
        phase = start(method, source if on == "source" else target)
        phase.step()
        phase.step()
        for (name, parameter), old in zip(method.network.named_parameters(), before, strict=True):
            assert not torch.equal(parameter, old), name

    def test_the_prototypes_are_pulled_to_their_class(self):
        """With alignment alone, the rows of the classifier move."""
        method, source, _ = build_method()
        before = method.network.prototypes.detach().clone()
        start(method, source).step()
        assert (method.network.prototypes - before).norm(dim=1).min() > 0

    def test_it_learns_the_toy(self):
        domains = [toy_domain("ink", 80), toy_domain("mud", 60)]
        changes = {"network__width": 0.2, "network__hidden": 32, "network__dim": 16, "epochs": 4, "steps": 8}
        method, (target,) = build_trained(domains, **changes, batch=24, lr=0.03)
        right = (method.predict(domains[0].images).argmax(dim=1) == domains[0].labels).float().mean()
        assert right > 0.9
        method.adapt(target)
        assert (method.predict(domains[1].images).argmax(dim=1) == domains[1].labels).float().mean() > 0.9

    @pytest.mark.parametrize(
        ("count", "which"), [(32, slice(0, BATCH)), (1, slice(BATCH, None))], ids=["batches", "copies"]
    )
    def test_no_stage_repeats_the_draws_of_another(self, count, which):
        """The same images twice give other batches; the same image twice, other copies."""
        method, (target,) = build_trained([toy_domain("ink"), toy_domain("mud", count)], memory=0, r_con=0.0)
        firsts = []
        for _ in range(2):
            seen = passes(method.network)
            start(method, target).step()
            firsts.append(next(images for training, images in seen if training)[which])
            method.adapt(target)
        assert len(firsts[0]) == len(firsts[1]) == BATCH
        assert not torch.equal(*firsts)

    def test_a_stage_starts_from_its_own_chance(self):
        """Only network, old network and memory carry over, not the random state."""
        method, (target, _) = build_trained()
        fresh, _, _ = build_method()
        fresh.load_state(copy.deepcopy(method.state()))
        for each in (method, fresh):
            each.adapt(target)
        assert same_tensors(method.state(), fresh.state())


def other_values():
    """Every switch with each of its other values; of a number, one or two that matter."""
    numbers = {
        "sgd.momentum": (0.9,),
        "sgd.weight_decay": (0.0, 0.1),
        "refresh": (0, 1),
        "r_con": (0.0, 0.3, 1.0),
        "randmix.kernel_sizes": ("3", "1,32"),
        "randmix.input_noise": (0.0, 0.5),
        "t2pl.r_top": (1, 7),
        "t2pl.r_knn": (1, 3),
        "t2pl.mix_smoothing": (0.0,),
        "temperature": (0.5,),
        "pca.weight": (0.0, 2.0),
        "pca.scale": (1.0, 30.0),
        "pca.old_weight": (0.0, 0.5),
        "distill.weight": (0.0, 1.0),
    }
    for item in switches(RaTPConfig()):
        if item.kind == "true or false":
            values = (not item.value,)
        elif item.kind.startswith("one of "):
            values = tuple(v for v in item.kind.removeprefix("one of ").split(", ") if v != str(item.value))
            values = tuple(v for v in values if (item.name, v) != ("labelling", "truth"))  # needs labels
        else:
            values = numbers[item.name]
        yield from ((item.name, value) for value in values)


THREE_STEPS = {"epochs": 3, "steps": 1}
# Values that need not show on a few toy images: they speak of exact ties, of rare draws, of more samples a class
# than there are, or of a different way to the same number.
MAY_NOT_SHOW = {"strict", "randmix.safe_division", "t2pl.r_top", "t2pl.r_knn", "t2pl.normalise", "t2pl.rounds"}
MAY_NOT_SHOW |= {
    "t2pl.class_mix",
    "t2pl.mix_smoothing",
    "temperature",
    "labelling",
    "t2pl.top_set",
    "pca.form",
    "memory.labels",
    "refresh",
    "sgd.nesterov",
}


def all_stages(**changes):
    """The method after its source and both targets."""
    method, targets = build_trained(**THREE_STEPS, **changes)
    for target in targets:
        method.adapt(target)
    return method


@pytest.fixture(scope="module")
def usual():
    return all_stages().state()


@pytest.mark.parametrize(("name", "value"), list(other_values()))
def test_every_switch_runs_and_matters(name, value, usual):
    method = all_stages(**{name.replace(".", "__"): value})
    assert as_dict(method.config)[name] != as_dict(RaTPConfig())[name]
    assert all_finite(method.state())
    assert all_finite({"logits": method.predict(toy_domain("mud").images)})
    if name not in MAY_NOT_SHOW:
        assert not same_tensors(method.state(), usual)


@pytest.mark.parametrize("changes", [{}, {"epochs": 3, "steps": 4, "batch": 16}])
def test_the_paper_preset_runs(changes, tmp_path):
    run = Run(toy_plan(preset="paper", changes=changes), tmp_path / "run")
    assert run.execute().matrix.complete
    assert all_finite(run.method.state())
