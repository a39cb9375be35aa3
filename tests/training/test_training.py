"""What methods share: batches with replay, learning from labels, one pass, exemplars."""

from dataclasses import replace

import pytest
import torch

from helpers import CLASSES, same_tensors, toy_domain, toy_plan
from ratp._core.environment import Randomness
from ratp.functional.norm import by_batch
from ratp.functional.optim import SGDConfig
from ratp.functional.transforms import OBJECTS
from ratp.methods.shared.online import SinglePass
from ratp.training.memory import Batches, Memory
from ratp.training.method import OnlineMethod, Setting
from ratp.training.phase import train
from ratp.training.phases import NetworkMethod, SupervisedPhase


@pytest.fixture
def setting():
    recipe = toy_plan("source-only").recipe
    return Setting(recipe, CLASSES, (32, 32), Randomness(3), torch.device("cpu"))


def filled(count=6):
    memory = Memory(count, len(CLASSES))
    domain = toy_domain("old", count)
    memory.images, memory.labels, memory.seen = domain.images, domain.labels, 1
    memory.domains = torch.zeros(count, dtype=torch.int64)
    return memory


class TestBatches:
    def test_images_come_with_their_labels(self, setting):
        domain = toy_domain("mud", 30)
        batches = Batches(setting, "target", 1, domain.images, domain.labels)
        batch = batches.draw(200)
        assert torch.equal(batch.images, setting.scaling()(domain.images[batch.places]))
        assert torch.equal(batch.labels, domain.labels[batch.places])
        assert not batch.replayed.any()
        assert set(batch.places.tolist()) == set(range(30))

    def test_the_memory_has_its_share_of_the_union(self, setting):
        domain, memory = toy_domain("mud", 30), filled(10)
        memory.labels = torch.full((10,), 3)
        batches = Batches(setting, "target", 1, domain.images, torch.zeros(30, dtype=torch.int64), memory)
        batch = batches.draw(4000)
        assert batch.replayed.float().mean().item() == pytest.approx(10 / 40, abs=0.03)
        assert torch.equal(batch.labels == 3, batch.replayed)
        known = {tuple(image.flatten().tolist()) for image in setting.scaling()(memory.images)}
        assert {tuple(image.flatten().tolist()) for image in batch.images[batch.replayed][:20]} <= known

    def test_new_labels_written_in_place_are_drawn(self, setting):
        domain = toy_domain("mud", 30)
        batches = Batches(setting, "target", 1, domain.images, domain.labels.clone())
        batches.labels.fill_(2)
        assert (batches.draw(20).labels == 2).all()

    def test_a_memory_batch_is_no_larger_than_the_memory(self, setting):
        domain, memory = toy_domain("mud", 30), filled(6)
        batch = Batches(setting, "target", 1, domain.images, domain.labels).draw_memory(memory, 64)
        assert len(batch.images) == 6
        assert batch.replayed.all()

    def test_random_changes_are_those_of_the_recipe(self, setting):
        domain = toy_domain("mud", 30)
        changed = replace(setting, recipe=replace(setting.recipe, target_transform=OBJECTS))
        one, other = (Batches(s, "target", 1, domain.images, domain.labels).draw(8) for s in (setting, changed))
        assert torch.equal(one.places, other.places)
        assert not torch.equal(one.images, other.images)

    def test_the_same_stage_draws_the_same(self, setting):
        domain = toy_domain("mud", 30)
        one, again, later = (Batches(setting, "target", s, domain.images, domain.labels).draw(9) for s in (1, 1, 2))
        assert torch.equal(one.places, again.places)
        assert not torch.equal(one.places, later.places)


class TestSupervised:
    def learnt(self, setting, **options):
        network = setting.network()
        phase = SupervisedPhase(setting, network, toy_domain("ink"), SGDConfig(), **options)
        for _ in train([phase]):
            pass
        return network

    def test_smoothing_changes_what_is_learnt(self, setting):
        plain, same, smooth = (self.learnt(setting, smoothing=s).state_dict() for s in (0.0, 0.0, 0.1))
        assert same_tensors(plain, same)
        assert not same_tensors(plain, smooth)

    def test_end_record_is_the_methods(self, setting):
        seen = []

        def finish(domain):
            seen.append(len(domain))
            return {"answer": 42.0}

        phase = SupervisedPhase(setting, setting.network(), toy_domain("ink"), SGDConfig(), finish=finish)
        records = [item for item in train([phase]) if isinstance(item, dict)]
        assert (records, seen) == ([{"answer": 42.0}], [40])


class Watcher(OnlineMethod, NetworkMethod):
    """Notes what it is shown."""

    def __init__(self, setting):
        super().__init__(setting, None)
        self.shown = []

    def source_phases(self, domain):
        return []

    def target_phases(self, domain):
        return [SinglePass(self, self.setting, domain, 1)]

    def observe(self, images):
        self.shown.append(images.clone())
        return self.predict(images)


class TestSinglePass:
    @pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 30])
    def test_every_image_is_shown_once(self, setting, count):
        domain = toy_domain("mud", count)
        watcher = Watcher(setting)
        watcher.fit_source(toy_domain("ink"))
        watcher.adapt(domain.unlabelled())
        shown = torch.cat(watcher.shown)
        assert sorted(map(hash, map(bytes, shown.numpy()))) == sorted(map(hash, map(bytes, domain.images.numpy())))
        assert all(2 <= len(part) <= 9 for part in watcher.shown) or count == 1

    def test_in_random_order_the_same_every_time(self, setting):
        domain = toy_domain("mud", 30).unlabelled()
        one, other = Watcher(setting), Watcher(setting)
        for watcher in (one, other):
            watcher.fit_source(toy_domain("ink"))
            watcher.adapt(domain)
        assert torch.equal(torch.cat(one.shown), torch.cat(other.shown))
        assert not torch.equal(torch.cat(one.shown), domain.images)


class TestStatisticsOfTheBatch:
    def test_running_statistics_are_neither_used_nor_changed(self, setting):
        network = setting.network().eval()
        images = setting.scaling()(toy_domain("mud", 16).images)
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        with torch.no_grad(), by_batch(network):
            output = network(images).logits
        assert same_tensors(network.state_dict(), before)
        with torch.no_grad():
            for layer in network.modules():
                if hasattr(layer, "running_mean"):
                    layer.running_mean += 1
            assert not torch.equal(network(images).logits, output)
            with by_batch(network):
                assert torch.equal(network(images).logits, output)


def test_exemplars_are_of_every_class(setting):
    method, domain = Watcher(setting), toy_domain("ink")
    method.memory = Memory(8, len(CLASSES))
    assert method.remember(domain.images, domain.labels) == {"exemplars": 8.0}
    assert sorted(method.memory.labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_network_method_restores_its_state(setting):
    one, other = Watcher(setting), Watcher(replace(setting, randomness=Randomness(9)))
    domain = toy_domain("ink")
    one.remember(domain.images, domain.labels)
    other.load_state(one.state())
    assert same_tensors(one.state(), other.state())
    assert other.stage == 1
