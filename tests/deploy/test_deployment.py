"""A deployed model: the same answers, an alarm, guarded adaptation, and versions that survive anything."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest
import timm
import torch
from deployments import deploy, feed, held_back, strange, trained
from safetensors.torch import save_file

import ratp
from helpers import CLASSES, toy_domain
from helpers import ratp as command
from own_images import OPTIONS, image_files, write_files
from ratp._core import files
from ratp.deploy import deployment as module
from ratp.errors import ConfigError, RatpError, RunDirectoryError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "tent")


@pytest.fixture
def model(run, tmp_path):
    with deploy(run, tmp_path / "deployed") as opened:
        yield opened


def answers(model):
    return model.predict(held_back().images[:50])


class TestAnswers:
    def test_as_the_run(self, run, model):
        assert torch.equal(answers(model), ratp.load(run, device="cpu").predict(held_back().images[:50]))

    def test_observing_names_classes_and_version(self, model):
        images = held_back().images[:10]
        seen = model.observe(images)
        expected = model.predict(images).softmax(dim=1).max(dim=1)
        assert seen.labels == tuple(model.classes[k] for k in expected.indices.tolist())
        assert seen.confidence == pytest.approx(expected.values.tolist())
        assert (seen.version, seen.level, seen.windows) == (1, "fine", ())

    def test_wrong_images_are_refused_and_the_model_goes_on(self, model):
        with pytest.raises(RatpError, match="32"):
            model.observe(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
        with pytest.raises(RatpError, match="1 names are given for 2 images"):
            model.observe(held_back().images[:2], ["a.png"])
        assert len(answers(model)) == 50


class TestAlarm:
    def test_silent_on_the_source(self, model):
        assert set(feed(model, held_back().images[:448])) == {"fine"}
        assert model.waiting == 0

    def test_rises_within_256_images_of_something_else_and_names_some(self, model):
        feed(model, held_back().images[:128])
        seen = [model.observe(part, [f"new{k}" for k in range(32)]) for part in strange().split(32)]
        assert seen[-1].level in ("drifted", "foreign")
        assert any(found.causes and found.causes[0].startswith("new") for found in seen)
        assert model.waiting == 256

    def test_noise_is_foreign(self, model):
        assert feed(model, torch.randint(256, (128, 3, 32, 32), dtype=torch.uint8))[-1] == "foreign"

    def test_it_falls_silent_again(self, model):
        feed(model, strange(128))
        assert feed(model, held_back().images[:256])[-1] == "fine"

    def test_batches_do_not_matter(self, model, run, tmp_path):
        with deploy(run, tmp_path / "other") as other:
            assert feed(model, strange(), 17) == feed(other, strange(), 64)

    def test_too_few_source_images(self, run, tmp_path):
        with pytest.raises(RatpError, match="too few to calibrate"):
            ratp.Deployment.create(run, tmp_path / "new", held_back().subset(torch.arange(20)), device="cpu")
        assert not (tmp_path / "new").exists()


class TestAdapting:
    def test_an_accepted_stage_is_the_next_version(self, model):
        before = answers(model)
        mud = toy_domain("mud", 200).images
        found = model.adapt(mud, name="mud")
        assert found == module.Adaptation(True, 2, 160)
        assert model.version == 2 and not torch.equal(answers(model), before)
        assert model.history()[-1].known == ("ink", "mud")
        assert model.history()[-1].verdict["reasons"] == []
        assert "drifted" not in feed(model, mud[:128])

    def test_a_refused_stage_changes_nothing(self, model):
        before = answers(model)
        found = model.adapt(torch.randint(256, (200, 3, 32, 32), dtype=torch.uint8), name="noise")
        assert not found.accepted and "noise" in found.reasons[0]
        assert model.version == 1 and torch.equal(answers(model), before)

    def test_equal_images_give_equal_weights(self, run, tmp_path):
        results = []
        for name in "ab":
            with deploy(run, tmp_path / name) as model:
                model.adapt(toy_domain("mud", 200).images, name="mud")
                results.append(answers(model))
        assert torch.equal(*results)

    def test_only_what_is_unlike_the_source_is_kept_for_it(self, model):
        feed(model, held_back().images[:128])
        with pytest.raises(RatpError, match="nothing to adapt to"):
            model.adapt()

    def test_in_the_background_the_old_version_answers(self, run, tmp_path, monkeypatch):
        with deploy(run, tmp_path / "new", adapt="auto", at_least=128) as model:
            go_on = threading.Event()
            judge = module.Watch.judge

            def wait_and_judge(watch, method):
                go_on.wait(30)
                return judge(watch, method)

            monkeypatch.setattr(module.Watch, "judge", wait_and_judge)
            before = answers(model)
            feed(model, strange(448))
            assert model.adapting and torch.equal(answers(model), before)
            go_on.set()
            assert model.wait(60).accepted
            assert model.version == 2 and not torch.equal(answers(model), before)

    def test_never_two_at_once(self, model, monkeypatch):
        go_on = threading.Event()
        monkeypatch.setattr(module, "train", lambda phases: iter(lambda: go_on.wait(30), True))
        model.adapt(strange(), background=True)
        with pytest.raises(RatpError, match="under way"):
            model.adapt(strange())
        go_on.set()
        model.wait(30)

    def test_settings_change_the_stage_only(self, run, tmp_path):
        with deploy(run, tmp_path / "short", changes={"batch": 16}) as model:
            assert model.adapt(toy_domain("mud", 200).images).accepted
        with pytest.raises(ConfigError, match=r"memory.*epochs"):
            deploy(run, tmp_path / "other", changes={"memory": 3})
        with pytest.raises(ConfigError, match="'sometimes'"):
            deploy(run, tmp_path / "other", adapt="sometimes")


class TestVersions:
    def test_any_can_answer_again_bit_for_bit(self, model):
        first = answers(model)
        model.adapt(toy_domain("mud", 200).images)
        second = answers(model)
        assert model.rollback().number == 1 and torch.equal(answers(model), first)
        assert model.rollback(2).number == 2 and torch.equal(answers(model), second)
        with pytest.raises(ConfigError, match=r"no version 9. Valid: 1, 2"):
            model.rollback(9)
        assert torch.equal(answers(model), second)

    def test_the_first_has_none_before_it(self, model):
        with pytest.raises(RatpError, match="is the first"):
            model.rollback()

    def test_opened_again(self, model):
        model.adapt(toy_domain("mud", 200).images)
        expected, history = answers(model), model.history()
        model.close()
        with ratp.Deployment(model.folder, device="cpu") as again:
            assert (again.version, again.history()) == (2, history)
            assert torch.equal(answers(again), expected)

    @pytest.mark.parametrize("at", ["2.safetensors", "deployment.json"])
    def test_a_full_disk_keeps_the_last_version(self, model, at, monkeypatch):
        before = answers(model)
        replacing = files.replacing

        def full(path):
            if path.name == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return replacing(path)

        monkeypatch.setattr(files, "replacing", full)
        with pytest.raises(RunDirectoryError, match="No space left"):
            model.adapt(toy_domain("mud", 200).images)
        monkeypatch.undo()
        assert torch.equal(answers(model), before)
        model.close()
        with ratp.Deployment(model.folder, device="cpu") as again:
            assert again.version == 1 and torch.equal(answers(again), before)
            assert again.adapt(toy_domain("mud", 200).images).version == 2

    def test_one_process_at_a_time(self, model):
        with pytest.raises(RunDirectoryError, match="in use by"):
            ratp.Deployment(model.folder)

    def test_a_damaged_version_is_named_and_another_can_answer(self, model):
        model.adapt(toy_domain("mud", 200).images)
        model.close()
        (model.folder / "versions" / "2.safetensors").write_bytes(b"nothing")
        with pytest.raises(RunDirectoryError, match=r"2\.safetensors is damaged"):
            ratp.Deployment(model.folder)
        assert command("versions", model.folder, "--rollback", "1").code == 0
        with ratp.Deployment(model.folder, device="cpu") as again:
            assert again.version == 1


class TestCommands:
    def test_from_a_run_on_folders_to_versions(self, tmp_path):
        source = write_files(tmp_path / "day", image_files(count=60))
        rain = write_files(tmp_path / "rain", image_files(count=4, seed=1))
        out = tmp_path / "run"
        assert command("run", "folders", "--source", source, "--targets", rain, "--out", out, *OPTIONS).code == 0
        refused = command("deploy", out, tmp_path / "new")
        assert refused.code == 2 and "--source" in refused.err
        made = command("deploy", out, tmp_path / "new", "--source", source, "--json")
        about = json.loads(made.out)
        assert (about["version"], about["images"]) == (1, 48)  # a fifth of the source was held back
        listed = json.loads(command("versions", tmp_path / "new", "--json").out)
        assert listed["current"] == 1 and len(listed["versions"]) == 1

    def test_no_deployment(self, tmp_path):
        assert "is not a deployment" in command("versions", tmp_path).err

    def test_an_adopted_model(self, tmp_path):
        torch.manual_seed(0)
        original = timm.create_model("test_resnet", num_classes=4).eval()
        save_file(original.state_dict(), tmp_path / "checkpoint.safetensors")
        kind = ["--backbone", "timm:test_resnet", "--classes", ",".join(CLASSES), "--size", "32"]
        assert command("adopt", tmp_path / "checkpoint.safetensors", tmp_path / "m.safetensors", *kind).code == 0
        source = write_files(tmp_path / "day", image_files(count=12))
        refused = command("deploy", tmp_path / "m.safetensors", tmp_path / "new")
        assert refused.code == 2 and "needs --method" in refused.err
        asked = ["--source", source, "--method", "tent", "--device", "cpu"]
        assert command("deploy", tmp_path / "m.safetensors", tmp_path / "new", *asked).code == 0
        with ratp.Deployment(tmp_path / "new", device="cpu") as model:
            images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
            inputs = (images / 255 - 0.5) / 0.5  # as this kind is usually given them
            with torch.no_grad():
                assert torch.allclose(model.predict(images), original(inputs), atol=1e-4)
            assert model.classes == CLASSES
