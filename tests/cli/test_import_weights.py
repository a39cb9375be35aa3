"""``ratp import-weights``: what it keeps of a checkpoint, and what it refuses without running it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import ratp
from pretrained import resnet50_file
from ratp._core.files import read_tensors
from ratp.networks.backbones import make_backbone
from ratp.networks.weights import find_weights, load_backbone

OUT = Path("out.safetensors")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def dtn():
    """The tensors of a DTN, with statistics of a batch."""
    backbone, _ = make_backbone("dtn")
    backbone.train()(torch.randn(4, 3, 32, 32))
    return backbone.state_dict()


def save(data, name="in.pth", **options):
    torch.save(data, name, **options)
    return name


def run_import(*arguments):
    result = ratp("import-weights", *arguments)
    assert result.code == 0, result
    return result


def assert_error(*arguments, expected=(), leaves=False):
    result = ratp("import-weights", *arguments)
    assert (result.code, result.out) == (2, ""), result
    assert "Traceback" not in result.err
    assert result.err.startswith("error: ")
    assert all(line.startswith("error: ") for line in result.err.splitlines()), result.err
    for words in expected:
        assert words in result.err, result.err
    assert OUT.exists() == leaves
    return result.err


def wrapped(tensors, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


class TestKept:
    def test_written_weights_equal_saved_ones(self, dtn):
        result = run_import(save(dtn), OUT)
        tensors, about = read_tensors(OUT)
        assert tensors.keys() == dtn.keys()
        assert all(torch.equal(tensors[name], dtn[name]) for name in dtn)
        assert about["backbone"] == "dtn"
        assert about["source"] == "in.pth"
        assert hashlib.sha256(OUT.read_bytes()).hexdigest() in result.out
        assert "dtn" in result.out
        assert f"{len(dtn)} tensors" in result.out
        target, _ = make_backbone("dtn")
        load_backbone(target, find_weights(str(OUT), "dtn"))
        assert torch.equal(target[1].running_mean, dtn["1.running_mean"])

    @pytest.mark.parametrize(
        ("prefix", "keys"),
        [
            *(
                (prefix, ("state_dict",))
                for prefix in ("", "module.", "backbone.", "encoder.", "module.encoder.", "_orig_mod.model.")
            ),
            *(("module.", keys) for keys in ((), ("model",), ("net",), ("odd name",), ("model", "state_dict"))),
        ],
    )
    def test_state_dict_is_found_when_nested(self, dtn, prefix, keys):
        data = OrderedDict(wrapped(dtn, prefix))
        for key in keys:
            data = {"epoch": 3, "optimizer": {"state": {0: {"momentum": torch.zeros(3)}}}, key: data, "best": 0.5}
        run_import(save(data), OUT)
        assert read_tensors(OUT)[0].keys() == dtn.keys()

    def test_ignored_parts_are_reported(self, dtn):
        data = wrapped(dtn, "backbone.") | {"head.weight": torch.zeros(2, 2), "backbone.fc.bias": torch.zeros(2)}
        result = run_import(save(data), OUT, "--json")
        about = json.loads(result.out)
        assert set(about["ignored"]) == {"head.weight", "backbone.fc.bias"}
        assert about["kept"] == list(dtn)
        assert about["sha256"] == hashlib.sha256(OUT.read_bytes()).hexdigest()
        assert result.err == ""

    def test_the_backbone_is_found(self):
        torch.manual_seed(0)
        whole = make_backbone("resnet18")[0].state_dict() | {
            "fc.weight": torch.zeros(9, 512),
            "fc.bias": torch.zeros(9),
        }
        result = run_import(save(whole), OUT)
        assert "resnet18" in result.out
        assert "2 (fc.weight, fc.bias)" in result.out
        assert "--set network.backbone=resnet18 --weights out.safetensors" in result.err

    def test_parameters_and_views_are_copied_out(self, dtn):
        large = torch.zeros(1000, *dtn["0.weight"].shape)
        data = dtn | {"0.weight": large[3], "0.bias": nn.Parameter(dtn["0.bias"])}
        run_import(save(data), OUT)
        assert OUT.stat().st_size < 2 * sum(t.numel() * t.element_size() for t in dtn.values())

    def test_legacy_torch_format(self, dtn):
        run_import(save(dtn, _use_new_zipfile_serialization=False), OUT)
        assert read_tensors(OUT)[0].keys() == dtn.keys()

    def test_a_safetensors_file_with_other_names(self, dtn):
        from safetensors.torch import save_file

        save_file(wrapped(dtn, "module."), "in.safetensors")
        run_import("in.safetensors", OUT)
        assert read_tensors(OUT)[0].keys() == dtn.keys()

    def test_a_model_of_timm(self):
        timm = pytest.importorskip("timm")
        model = timm.create_model("mobilenetv3_small_050")
        result = run_import(save(model.state_dict()), OUT, "--backbone", "timm:mobilenetv3_small_050")
        assert "2 (classifier.weight, classifier.bias)" in result.out

    def test_the_real_weights(self):
        tensors, _ = read_tensors(resnet50_file())
        run_import(save({"state_dict": wrapped(tensors, "module.")}), OUT, "--backbone", "resnet50")
        kept, _ = read_tensors(OUT)
        assert kept.keys() == tensors.keys()
        assert all(torch.equal(kept[name], tensors[name]) for name in tensors)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch was-run",)


class Own:
    pass


class TestRefused:
    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.faults(5, "`ratp import-weights` copies the tensors from a checkpoint and runs nothing in it")
    def test_a_hostile_pickle_is_never_run(self, dtn, old, monkeypatch):
        # the variable by which users tell torch to trust everything
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        data = {"state_dict": dtn, "more": Hostile()}
        message = assert_error(
            save(data, _use_new_zipfile_serialization=not old), OUT, expected=["Nothing in it was run"]
        )
        assert len(message.splitlines()) == 1
        assert "system" in message
        assert "weights_only" not in message
        assert os.listdir() == ["in.pth"]

    def test_a_bare_hostile_pickle_is_never_run(self):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            Path("in.pth").write_bytes(pickle.dumps(Hostile(), protocol))
            message = assert_error("in.pth", OUT)
            assert len(message.splitlines()) == 1
            assert "weights_only" not in message
        assert os.listdir() == ["in.pth"]

    def test_a_whole_model(self):
        assert_error(save({"model": Own()}), OUT, expected=["holds more than tensors", "Own'", "model.state_dict()"])

    @pytest.mark.filterwarnings("ignore:.torch.jit")
    def test_a_program(self):
        class Doubled(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * x

        traced = torch.jit.trace(Doubled(), torch.zeros(1))
        traced.save("in.pth")
        assert_error("in.pth", OUT, expected=["TorchScript", "Nothing in it was run"])

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
    @pytest.mark.parametrize("new", [True, False])
    def test_a_truncated_file(self, dtn, share, new):
        path = Path(save(dtn, _use_new_zipfile_serialization=new))
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        assert_error(path, OUT, expected=["damaged"])

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"", "is empty"),
            (b"  <html><body>404", "is a web page"),
            (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
            (b"hello there", "no checkpoint"),
            (bytes(range(256)), "no checkpoint"),
            (b"PK\x03\x04" + bytes(100), "truncated or damaged"),
        ],
    )
    def test_not_a_checkpoint(self, data, expected):
        Path("in.pth").write_bytes(data)
        assert_error("in.pth", OUT, expected=[expected])

    @pytest.mark.parametrize("data", [{}, [], 3, {"state_dict": {}}, [torch.zeros(3)], {"a": [torch.zeros(3)]}])
    def test_no_tensors(self, data):
        assert_error(save(data), OUT, expected=["no tensors under names"])

    def test_wrong_shapes(self, dtn):
        data = dtn | {"0.weight": torch.zeros(64, 1, 5, 5)}
        assert_error(save(data), OUT, expected=["nearest is dtn", "0.weight: expected 64×3×5×5, found 64×1×5×5"])
        assert_error(save(data), OUT, "--backbone", "dtn", expected=["does not fit dtn", "1 of another shape"])

    def test_another_backbone(self, dtn):
        expected = ["does not fit resnet18", "100 missing", "use --backbone dtn"]
        assert_error(save(dtn), OUT, "--backbone", "resnet18", expected=expected)

    def test_an_unknown_backbone(self, dtn):
        assert_error(save(dtn), OUT, "--backbone", "resnet81", expected=["Did you mean 'resnet18'?"])

    def test_non_finite_values(self, dtn):
        data = dtn | {"1.weight": torch.full((64,), float("nan"))}
        assert_error(save(data), OUT, expected=["NaN or infinities: 1.weight"])

    def test_tensors_without_data(self, dtn):
        assert_error(save(dtn | {"1.weight": torch.zeros(64, device="meta")}), OUT, expected=["without data: 1.weight"])
        assert_error(save(dtn | {"1.weight": torch.zeros(64).to_sparse()}), OUT, expected=["sparse", "1.weight"])

    def test_tensor_with_huge_claimed_size(self, dtn):
        assert_error(save(dtn | {"1.weight": torch.zeros(1).expand(2**50)}), OUT, expected=["1 of another shape"])

    def test_existing_file_is_replaced_only_on_request(self, dtn):
        OUT.write_text("mine")
        assert_error(save(dtn), OUT, expected=["out.safetensors exists", "--replace"], leaves=True)
        assert OUT.read_text() == "mine"
        run_import("in.pth", OUT, "--replace")
        assert read_tensors(OUT)[0].keys() == dtn.keys()

    def test_refusal_replaces_nothing(self):
        OUT.write_text("mine")
        assert_error(save({}), OUT, "--replace", expected=["no tensors"], leaves=True)
        assert OUT.read_text() == "mine"

    @pytest.mark.parametrize(
        ("source", "target", "expected"),
        [
            ("nosuch.pth", "out.safetensors", "nosuch.pth does not exist"),
            (".", "out.safetensors", "is a folder"),
            ("in.pth", "out.pth", "must end in .safetensors"),
            ("in.pth", "no/folder/out.safetensors", "no/folder does not exist"),
            ("in.pth", "a" * 300 + ".safetensors", "File name too long"),
            ("in.safetensors", "in.safetensors", "cannot be replaced"),
        ],
    )
    def test_unusable_paths(self, dtn, source, target, expected):
        save(dtn)
        save(dtn, "in.safetensors")
        assert_error(source, target, "--replace", expected=[expected])

    def test_all_mistakes_at_once(self):
        assert len(assert_error("nosuch.pth", "out.pth").splitlines()) == 2
