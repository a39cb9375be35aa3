"""A deployment that adapts to every window: saved, judged, brought back; and one without source images."""

from __future__ import annotations

import threading

import pytest
import torch
from deployments import deploy, feed, held_back, strange, trained

import ratp
from helpers import journal_of, same_tensors, toy_domain
from ratp._core.files import read_tensors
from ratp.deploy import deployment, stages, store
from ratp.deploy import deployment as module
from ratp.deploy.deployment import BASELINE
from ratp.deploy.page import Counts, html_page
from ratp.deploy.settings import Settings
from ratp.errors import ConfigError, RatpError, RunDirectoryError
from ratp.guard.watch import Predictions
from ratp.methods import METHODS
from ratp.training.method import OnlineMethod, unpack

NOISE = torch.randint(256, (128, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MUD = toy_domain("mud", 512).images


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "tent")


@pytest.fixture
def model(run, tmp_path):
    with deploy(run, tmp_path / "deployed", adapt="online", save_every=2) as opened:
        yield opened


def state_of(model):
    return {name: tensor.clone() for name, tensor in model._model.method.state().items()}


def saved(model, number):
    return unpack(read_tensors(model.folder / "versions" / f"{number}.safetensors")[0])["state"]


class TestOnline:
    def test_it_predicts_and_adapts_as_the_method_does(self, run, model):
        alone = ratp.load(run, device="cpu").method
        assert isinstance(alone, OnlineMethod)
        for part in MUD[:128].split(64):
            expected = alone.observe(part).softmax(dim=1).max(dim=1)
            seen = model.observe(part)
            assert seen.confidence == pytest.approx(expected.values.tolist(), abs=1e-6)
        assert same_tensors(state_of(model), alone.state())

    def test_batches_do_not_matter_for_what_it_becomes(self, run, model, tmp_path):
        with deploy(run, tmp_path / "other", adapt="online", save_every=2) as other:
            for part in MUD[:200].split(17):
                other.observe(part)
            model.observe(MUD[:200])
            assert same_tensors(state_of(model), state_of(other)) and model.version == other.version == 2

    def test_every_so_many_windows_are_a_version_bit_for_bit(self, model):
        seen = [model.observe(part) for part in MUD[:256].split(64)]
        assert [found.version for found in seen] == [1, 1, 2, 2] and model.version == 3
        assert "adapted online to 128 images" in seen[1].events[0]
        assert same_tensors(saved(model, 3), state_of(model))
        version = model.history()[-1]
        assert version.online and version.images == 128 and version.verdict["reasons"] == []

    def test_closing_saves_the_rest_and_it_goes_on_from_there(self, model):
        model.observe(MUD[:64])
        expected = state_of(model)
        model.close()
        with ratp.Deployment(model.folder, device="cpu") as again:
            assert again.version == 2 and same_tensors(state_of(again), expected)
            assert again.save() is None  # nothing new

    def test_noise_is_not_learned_from(self, model):
        model.observe(MUD[:64])
        before = state_of(model)
        assert model.observe(NOISE).level == "foreign"
        assert same_tensors(state_of(model), before)

    def test_a_bad_window_brings_the_last_version_back(self, model, monkeypatch):
        model.observe(MUD[:192])
        monkeypatch.setattr(module.Online, "judge", lambda *_: ["it is bad"])
        seen = model.observe(MUD[192:256])
        assert "version 2 answers again, 64 images are forgotten: it is bad" in seen.events[0]
        assert same_tensors(state_of(model), saved(model, 2))
        (event,) = journal_of(model.folder, "restored")
        assert (event["number"], event["images"], event["reasons"]) == (2, 64, ["it is bad"])

    def test_windows_of_one_answer_are_bad(self, model):
        answers = torch.nn.functional.one_hot(torch.zeros(64, dtype=torch.int64), len(model.classes)).float()
        (reason,) = model._online.judge(Predictions(answers), "drifted")
        assert "one class: variety 0.00, limit 0.3" in reason
        assert model._online.judge(Predictions(answers), "foreign") == ["the images are foreign"]

    def test_a_model_that_forgot_the_source_is_no_version(self, model):
        model.observe(MUD[:64])
        with torch.no_grad():
            rows = model._model.method.network.classifier.weight
            rows.copy_(rows.roll(1, dims=0))
        seen = model.observe(MUD[64:128])
        assert "forgot the source" in seen.events[0] and model.version == 1
        assert same_tensors(state_of(model), saved(model, 1))

    def test_nan_weights_never_answer(self, model):
        with torch.no_grad():
            model._model.method.network.classifier.weight[0] = torch.nan
        seen = model.observe(MUD[:64])
        assert all(share == share for share in seen.confidence)
        assert same_tensors(state_of(model), saved(model, 1))

    def test_rolled_back_it_adapts_from_there(self, model):
        model.observe(MUD[:256])
        model.rollback(1)
        assert same_tensors(state_of(model), saved(model, 1))
        model.observe(MUD[:64])
        assert not same_tensors(state_of(model), saved(model, 1))

    def test_off_unless_asked_for_and_only_for_methods_that_can(self, run, model, tmp_path):
        with deploy(run, tmp_path / "asking") as other:
            before = state_of(other)
            other.observe(MUD[:256])
            assert same_tensors(state_of(other), before)
        model.settings = Settings("never")
        before = state_of(model)
        model.observe(MUD[:128])
        assert same_tensors(state_of(model), before)
        with pytest.raises(ConfigError, match="save_every"):
            Settings("online", save_every=0)

    def test_a_full_disk_is_named_and_it_goes_on(self, model, monkeypatch):
        model.observe(MUD[:64])
        with monkeypatch.context() as patch:
            patch.setattr(store.Store, "add", lambda *_, **__: (_ for _ in ()).throw(RunDirectoryError("No space")))
            with pytest.raises(RunDirectoryError, match="No space"):
                model.observe(MUD[64:128])
        model.observe(MUD[128:256])
        assert model.version == 2 and model.history()[-1].images == 256

    def test_threads_predict_while_it_adapts(self, model):
        stop, errors = threading.Event(), []

        def ask():
            while not stop.is_set():
                try:
                    assert model.predict(MUD[:8]).isfinite().all()
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        feed(model, MUD, 50)
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors and model.version == 5

    def test_old_versions_give_way_but_for_others(self, model, monkeypatch):
        monkeypatch.setattr(store, "KEPT_ONLINE", 2)
        model.observe(MUD)
        assert [version.number for version in model.history()] == [1, 4, 5]
        assert {path.stem for path in (model.folder / "versions").iterdir()} == {"1", "4", "5"}

    def test_the_alarm_is_silent_on_the_source_and_rises(self, model):
        assert set(feed(model, held_back().images[:384])) == {"fine"}
        assert feed(model, strange(128))[-1] in ("drifted", "foreign")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if issubclass(kind, OnlineMethod)])
def test_every_online_method_comes_back_bit_for_bit(name, tmp_path):
    with deploy(trained(tmp_path / "run", name), tmp_path / "new", adapt="online", save_every=2) as model:
        model.observe(MUD[:128])
        assert model.version == 2 and same_tensors(saved(model, 2), state_of(model))
    with ratp.Deployment(tmp_path / "new", device="cpu") as again:
        assert same_tensors(saved(again, 2), state_of(again))


class TestWithoutSource:
    @pytest.fixture
    def bare(self, run, tmp_path):
        how = {"settings": Settings(save_every=2), "device": "cpu"}
        with ratp.Deployment.create(run, tmp_path / "bare", None, **how) as opened:
            yield opened

    def test_the_first_images_are_what_is_usual(self, bare):
        images = held_back().images
        with pytest.raises(RatpError, match=f"observe {BASELINE} images first"):
            bare.adapt(MUD)
        assert feed(bare, NOISE) == ["foreign", "foreign"] and bare.waiting == 0
        assert set(feed(bare, images[:BASELINE])) == {"fine"} and bare.is_calibrated
        assert bare.version == 2 and same_tensors(saved(bare, 1), saved(bare, 2))
        assert set(feed(bare, images[BASELINE:448])) == {"fine"}
        assert feed(bare, strange(256))[-1] in ("drifted", "foreign")

    def test_the_guard_compares_with_its_own_answers(self, bare, monkeypatch):
        feed(bare, held_back().images[:BASELINE])
        assert bare.adapt(MUD[:200], name="mud").accepted

        def ruined(*given):
            method = stages.copy_of(*given)

            def phases(domain):
                with torch.no_grad():
                    rows = method.network.classifier.weight
                    rows.copy_(rows.roll(1, dims=0))
                return []

            monkeypatch.setattr(method, "target_phases", phases)
            return method

        monkeypatch.setattr(deployment, "copy_of", ruined)
        found = bare.adapt(MUD[200:400], name="more")
        assert not found.accepted and "forgot its first images, by its own answers" in found.reasons[0]

    def test_opened_again_it_knows_them(self, bare):
        feed(bare, held_back().images[:BASELINE])
        assert "first 256 images" in html_page(bare, Counts(), "")
        bare.close()
        with ratp.Deployment(bare.folder, device="cpu") as again:
            assert again.is_calibrated and again.version == 2
            again.settings = Settings("online", save_every=1)
            again.observe(MUD[:64])
            again.observe(MUD[:64])
            assert again.version == 4 and "0 images since version 4" in html_page(again, Counts(), "")
            again.settings = Settings("online")
            again.observe(MUD[64:128])
            assert "64 images since version 4" in html_page(again, Counts(), "")
