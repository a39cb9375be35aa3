"""Feature extractors by name."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch import nn

from ratp.errors import ConfigError
from ratp.networks.backbones import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    NAMES,
    ChannelDropout,
    check_backbone,
    expected_tensors,
    make_backbone,
    pretrained_input,
)

SMALL_TIMM = "timm:mobilenetv3_small_050"


def features(backbone, *size, count=2):
    with torch.no_grad():
        return backbone.eval()(torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0)))


def problems(name, *rest):
    with pytest.raises(ConfigError) as caught:
        check_backbone(name, *rest)
    return caught.value.problems


class TestDTN:
    def test_it_has_4096_features_of_32x32_images(self):
        assert make_backbone("dtn")[1] == make_backbone("dtn", (32, 32), 1.0)[1] == 4096

    @pytest.mark.parametrize("size", [(8, 8), (9, 15), (28, 28), (33, 16), (64, 64)])
    def test_its_features_follow_the_image_size(self, size):
        backbone, dimension = make_backbone("dtn", size, 0.1)
        assert features(backbone, *size).shape == (2, dimension)

    @pytest.mark.parametrize("size", [(7, 32), (32, 7), (0, 0), (257, 32), (32, 1024)])
    def test_sizes_it_cannot_work_on_are_refused(self, size):
        with pytest.raises(ConfigError, match=f"from 8×8 to 256×256.*these are {size[0]}×{size[1]}"):
            make_backbone("dtn", size)
        assert problems("dtn", 1.0, size)

    def test_its_tensors_do_not_depend_on_the_image_size(self):
        small, large = (make_backbone("dtn", (side, side), 0.1)[0].state_dict() for side in (8, 64))
        assert {n: t.shape for n, t in small.items()} == {n: t.shape for n, t in large.items()}


class TestResNets:
    @pytest.mark.parametrize(("name", "dimension"), [("resnet18", 512), ("resnet50", 2048), ("resnet101", 2048)])
    def test_features_after_pooling(self, name, dimension):
        backbone, given = make_backbone(name, (32, 48))
        assert given == dimension
        assert features(backbone, 32, 48).shape == (2, dimension)

    @pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet101"])
    def test_names_are_torchvisions_without_fc(self, name):
        import torchvision

        with torch.device("meta"):
            whole = getattr(torchvision.models, name)()
        shapes = {n: t.shape for n, t in whole.state_dict().items() if not n.startswith("fc.")}
        assert {n: t.shape for n, t in expected_tensors(name).items()} == shapes
        assert list(make_backbone(name)[0].state_dict()) == list(shapes)

    @pytest.mark.parametrize("name", ["resnet18", "resnet50"])
    def test_a_seed_gives_the_weights_of_torchvision(self, name):
        import torchvision

        torch.manual_seed(7)
        found, after = make_backbone(name)[0].state_dict(), torch.rand(1)
        torch.manual_seed(7)
        expected = getattr(torchvision.models, name)().state_dict()
        assert after == torch.rand(1)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

    def test_building_one_does_not_import_torchvision(self):
        code = "import sys; from ratp.networks.backbones import make_backbone; make_backbone('resnet18'); "
        code += "print([name for name in ('torchvision', 'torch._dynamo') if name in sys.modules])"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]"

    def test_features_are_what_torchvision_classifies(self):
        import torchvision

        backbone, dimension = make_backbone("resnet18")
        whole = torchvision.models.resnet18().eval()
        whole.load_state_dict(backbone.state_dict(), strict=False)
        images = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(whole.fc(backbone.eval()(images)), whole(images))
        assert whole.fc.in_features == dimension


class TestTimm:
    @pytest.fixture(autouse=True)
    def _timm(self):
        pytest.importorskip("timm")

    @pytest.mark.parametrize("size", [(32, 32), (64, 48)])
    def test_features(self, size):
        backbone, dimension = make_backbone(SMALL_TIMM, size)
        assert backbone.training
        # timm calls 288 its number of features, and gives the 1024 of the layer after
        assert features(backbone, *size).shape == (2, dimension) == (2, 1024)

    def test_a_model_of_fixed_size_says_which(self):
        with pytest.raises(ConfigError, match=r"vit_tiny_patch16_224 cannot work on 32×32 .*made for 224×224"):
            make_backbone("timm:vit_tiny_patch16_224", (32, 32))

    def test_measuring_draws_no_random_numbers(self):
        import timm

        torch.manual_seed(3)
        make_backbone(SMALL_TIMM, (32, 32))
        after = torch.rand(1)
        torch.manual_seed(3)
        timm.create_model(SMALL_TIMM.removeprefix("timm:"), num_classes=0)
        assert torch.equal(torch.rand(1), after)

    def test_an_unknown_model_gets_the_nearest_names(self):
        (problem,) = problems("timm:mobilnetv3_small_050")
        assert "Did you mean 'mobilenetv3_small_050'?" in problem

    def test_an_unknown_pretraining_is_refused(self):
        check_backbone("timm:resnet50.a1_in1k")
        (problem,) = problems("timm:resnet50.a1_in2k")
        assert "Did you mean 'a1_in1k'?" in problem

    @pytest.mark.parametrize("name", ["timm:", "timm:hf-hub:some/model", "timm:local-dir:/tmp", "timm:../x"])
    def test_nothing_but_a_name_is_taken(self, name):
        (problem,) = problems(name)
        assert problem.startswith("unknown model of timm")

    def test_inputs_are_those_of_the_published_weights(self):
        half = (0.5, 0.5, 0.5)
        assert pretrained_input("timm:tf_efficientnet_lite0") == (224, half, half)
        assert pretrained_input("timm:mobilenetv3_small_050") == (224, IMAGENET_MEAN, IMAGENET_STD)


def test_without_timm_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    (problem,) = problems("timm:resnet18")
    assert 'pip install "ratp-cdsl[timm]"' in problem


class TestCheck:
    @pytest.mark.parametrize("name", NAMES)
    def test_what_there_is_passes(self, name):
        check_backbone(name)
        check_backbone(name, 1.0, (32, 32))

    @pytest.mark.parametrize(("name", "meant"), [("resnt50", "resnet50"), ("DTN", "dtn"), ("resnet-18", "resnet18")])
    def test_a_wrong_name_gets_the_nearest(self, name, meant):
        (problem,) = problems(name)
        assert f"Did you mean {meant!r}?" in problem
        assert "timm:NAME" in problem

    def test_width_belongs_to_dtn(self):
        check_backbone("dtn", 0.25)
        (problem,) = problems("resnet50", 0.25)
        assert "network.width belongs to dtn" in problem
        with pytest.raises(ConfigError):
            make_backbone("resnet50", width=2.0)

    @pytest.mark.parametrize("name", NAMES)
    def test_expecting_draws_no_random_numbers(self, name):
        before = torch.get_rng_state()
        assert expected_tensors(name)
        assert torch.equal(torch.get_rng_state(), before)

    def test_inputs_of_torchvisions_weights(self):
        assert pretrained_input("resnet50") == (224, IMAGENET_MEAN, IMAGENET_STD)

    def test_inputs_of_an_unknown_backbone(self):
        with pytest.raises(ConfigError, match="unknown backbone"):
            pretrained_input("resnet5")


def test_a_copied_dropout_holds_no_generator():
    module = nn.Sequential(ChannelDropout(0.3)).eval()
    module[0].generator = torch.Generator()
    copy = deepcopy(module)
    assert copy[0].generator is None
    assert (copy[0].probability, copy[0].training) == (0.3, False)
    assert module[0].generator is not None


@pytest.mark.slow
def test_importing_the_package_imports_no_library_of_models():
    script = "import sys, ratp, ratp.networks.weights; print([m for m in ('torchvision', 'timm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
