"""From a request to a plan with every value spelled out, or to all mistakes at once."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import textwrap
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchvision.datasets import FakeData

from helpers import TINY, all_finite, toy_domains, toy_plan, toy_spec
from ratp._core.environment import find_device, find_devices, find_precision
from ratp.config import as_dict, override, switches
from ratp.errors import ConfigError, RunDirectoryError
from ratp.methods import METHODS, find_method
from ratp.networks.network import Network, NetworkConfig
from ratp.runs.events import Trained
from ratp.runs.plan import preset_config, resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams import STREAMS, find_stream
from ratp.streams.own import own_stream
from ratp.streams.stream import make_stream
from ratp.training.method import Method
from ratp.training.recipe import Recipe


def mistakes(**request):
    with pytest.raises(ConfigError) as caught:
        resolve(RunRequest(**request))
    return caught.value.problems


class TestResolving:
    def test_empty_request_is_the_demo(self):
        plan = resolve(RunRequest())
        assert (plan.spec.name, plan.method.name, plan.seed, plan.preset) == ("demo", "ratp", 2022, "official")
        assert plan.order == ("scan", "photo", "font", "street")
        assert plan.recipe == find_stream("demo").recipe
        assert plan.config == METHODS["ratp"].config_type()
        assert plan.changed == {}

    def test_changes_are_applied_and_recorded(self):
        plan = resolve(RunRequest(changes={"epochs": "3", "pca.scale": "8", "lr": 0.05, "randmix.tanh": "off"}))
        assert (plan.recipe.epochs, plan.config.pca.scale, plan.config.randmix.tanh) == (3, 8.0, False)
        # 0.05 is what the stream has anyway
        assert plan.changed == {"epochs": 3, "pca.scale": 8.0, "randmix.tanh": False}

    def test_changes_apply_on_top_of_preset(self):
        plan = resolve(RunRequest(preset="paper", changes={"sgd.momentum": 0.5}))
        assert plan.changed == {"sgd.momentum": 0.5}
        assert plan.config.pca.similarity == "dot"

    @pytest.mark.parametrize(("seed", "value"), [(0, 0), ("7", 7), (" 7 ", 7), (2**63 - 1, 2**63 - 1)])
    def test_seeds(self, seed, value):
        assert resolve(RunRequest(seed=seed)).seed == value

    @pytest.mark.parametrize("seed", ["", "x", "1.5", "-1", -1, 2**63, "1e3", True, 2.5])
    def test_invalid_seeds(self, seed):
        (problem,) = mistakes(seed=seed)
        assert "seed must" in problem
        assert repr(seed) in problem
        assert "e.g. 2022" in problem

    def test_an_order_may_be_a_list(self):
        codes = ["font", "scan", "photo"]
        for order in (codes, tuple(codes)):
            assert resolve(RunRequest(order=order, subset=True)).order == tuple(codes)
        assert resolve(RunRequest(order=["default"])).order == resolve(RunRequest()).order

    @pytest.mark.parametrize("name", [item.name for item in fields(RunRequest)])
    def test_none_means_default(self, name):
        assert RunRequest(**{name: None}) == RunRequest()
        assert resolve(RunRequest(**{name: None})).digest() == resolve(RunRequest()).digest()

    def test_paths_and_devices_are_kept_as_texts(self, tmp_path):
        day, night = tmp_path / "day", tmp_path / "night"
        request = RunRequest(tmp_path, tmp_path / "my.py", device=torch.device("cpu"), source=day, targets=night)
        assert (request.stream, request.method, request.device) == (str(tmp_path), f"{tmp_path}/my.py", "cpu")
        assert (request.source, request.targets) == (str(day), (str(night),))
        for targets in ([night], iter([night]), str(night)):
            assert replace(request, targets=targets) == request

    def test_a_plan_loads_its_stream_with_its_own_share_and_seed(self):
        first, second = (toy_plan(seed=seed, changes={"hold_out": 0.25}).load_stream() for seed in (1, 2))
        assert [(len(target), len(test)) for target, test in zip(first.targets, first.tests[1:], strict=True)] == [
            (24, 8),
            (27, 9),
        ]
        assert not torch.equal(first.source.images, second.source.images)
        assert not torch.equal(first.targets[0].images, second.targets[0].images)

    def test_building_a_method_keeps_the_torch_rng(self):
        torch.manual_seed(3)
        before = torch.random.get_rng_state()
        plan = toy_plan()
        plan.build_method(plan.load_stream())
        assert torch.equal(torch.random.get_rng_state(), before)


class TestMistakes:
    def test_all_mistakes_are_reported(self):
        """No mistake hides another: everything that can be checked is."""
        wrong = {"stream": "dmo", "method": "rapt", "preset": "papr", "seed": "x", "device": "gpu"}
        problems = "\n".join(mistakes(**wrong, changes={"pca.scal": 1, "epochs": "many"}))
        for expected in ("'dmo'", "'rapt'", "'papr'", "'x'", "'gpu'", "'pca.scal'", "'many'"):
            assert expected in problems

    def test_all_switch_mistakes_are_reported(self):
        changes = {"pca.scal": 1, "epochs": 0, "pca.form": "exact", "r_con": "high"}
        problems = mistakes(order="scan>scan", seed=-3, device="tpu", changes=changes)
        assert len(problems) == 7
        assert all(problem.endswith(".") for problem in problems)

    @pytest.mark.parametrize("wrong", [{"stream": "dmo"}, {"preset": "papr"}, {"method": "rapt"}])
    def test_bad_switch_is_reported_beside_other_mistakes(self, wrong):
        problems = "\n".join(mistakes(**wrong, changes={"pca.scal": 1, "epochs": "many"}))
        assert "'pca.scal'" in problems
        assert "'many'" in problems

    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            ({"changes": {"learning_rate": 0.1}}, ["unknown switch 'learning_rate'. Did you mean 'lr'?"]),
            ({"stream": "dmo"}, ["unknown stream 'dmo'", "Did you mean 'demo'?", "Valid: demo"]),
            ({"method": "RATP"}, ["unknown method 'RATP'", "Did you mean 'ratp'?", ", source-only", ".py file"]),
            ({"method": "source_only"}, ["unknown method 'source_only'", "Did you mean 'source-only'?"]),
            ({"method": "source-only", "preset": "paper"}, ["of source-only 'paper'", "momentum, official, quick"]),
            ({"preset": "Paper"}, ["preset of ratp 'Paper'", "Did you mean 'paper'?", "Valid: official, paper, quick"]),
            ({"changes": {"momentum": 1}}, ["unknown switch 'momentum'", "Did you mean 'sgd.momentum'?"]),
            ({"changes": {"epoch": 1}}, ["unknown switch 'epoch'", "Did you mean 'epochs'?"]),
            ({"changes": {"pca.form": "stabel"}}, ["pca.form", "'stabel'", "Did you mean 'stable'?", "published, "]),
            ({"changes": {"batch": 1}}, ["batch must be at least 2, got 1"]),
            ({"changes": {"batch": 2.5}}, ["batch must be a whole number, got 2.5"]),
            ({"changes": {"lr": 0}}, ["lr must be above 0, got 0"]),
            ({"changes": {"lr": "nan"}}, ["lr must be a number, got 'nan'"]),
            ({"changes": {"strict": "perhaps"}}, ["strict must be true or false, got 'perhaps'"]),
            ({"changes": {"sgd.momentum": 1}}, ["sgd.momentum must be below 1, got 1"]),
            ({"changes": {"r_con": 1.5}}, ["r_con must be at most 1, got 1.5"]),
            ({"changes": {"r_con": -0.1}}, ["r_con must be at least 0, got -0.1"]),
            ({"changes": {"target_transform.flip": 2}}, ["target_transform.flip must be at most 1, got 2"]),
            ({"changes": {"source_transform.hue": 1}}, ["source_transform.hue must be at most 0.5, got 1"]),
            ({"device": "CPU"}, ["unknown device 'CPU'", "Did you mean 'cpu'?"]),
            ({"device": "xpu"}, ["unknown device 'xpu'", "Valid: auto, cpu, cuda, mps"]),
        ],
    )  # fmt: skip
    def test_each_mistake_lists_valid_values(self, request_, expected):
        (problem,) = mistakes(**request_)
        assert all(words in problem for words in expected), problem

    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            ({"stream": 5}, "stream must be a text, e.g. 'demo'; got 5."),
            ({"method": METHODS["tent"]}, "method must be a name or the path of a .py file"),
            ({"order": 5}, "order must be a text or a list of texts"),
            ({"order": (1, 2)}, "got (1, 2)."),
            ({"preset": 5}, "preset must be a text, e.g. 'official'"),
            ({"changes": ["epochs=6"]}, "changes must be values by name, e.g. {'epochs': 6}"),
            ({"device": []}, "device must be a text, e.g. 'auto'"),
            ({"source": 5, "targets": "night"}, "source must be a path"),
            ({"source": "day", "targets": 5}, "targets must be a list of paths"),
            ({"source": "day", "targets": [None]}, "got (None,)."),
            ({"data": "pictures"}, "data must be DataOptions"),
            ({"weights": 5}, "weights must be a text"),
            ({"precision": 32}, "precision must be a text"),
            ({"guard": False}, "guard must be a text"),
            ({"order": []}, "unknown order ''"),
            ({"order": [], "subset": True}, "unknown order ''"),
            ({"order": ["scan"], "subset": True}, "unknown order 'scan'"),
            ({"order": ["scan", "scan"], "subset": True}, "repeats domain 'scan'"),
            ({"order": ["scan", "phto"], "subset": True}, "Did you mean 'photo'?"),
        ],
    )
    def test_wrong_type_is_reported(self, request_, expected):
        (problem,) = mistakes(**request_)
        assert expected in problem

    def test_missing_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert find_device("cuda") == torch.device("cuda")
        with pytest.raises(ConfigError, match=r"'cuda:1' is not available: 1 CUDA device.*cpu or auto"):
            find_device("cuda:1")

    @pytest.mark.parametrize("instruction", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
    def test_bf16_on_a_processor_that_has_it(self, instruction, monkeypatch):
        cpu = torch.device("cpu")
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda: False)
        assert {find_precision(name, cpu) for name in ("auto", "fp32", "tf32", "bf16")} == {"fp32"}
        monkeypatch.setattr(torch.cpu, instruction, lambda: True)
        assert find_precision("bf16", cpu) == "bf16"
        assert {find_precision(name, cpu) for name in ("auto", "fp32", "tf32")} == {"fp32"}

    def test_apple_gpu_must_be_asked_for_and_computes_in_fp32(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert find_device("mps") == torch.device("mps")
        assert find_device("auto") == torch.device("cpu")
        assert {find_precision(name, torch.device("mps")) for name in ("auto", "fp32", "tf32", "bf16")} == {"fp32"}
        with pytest.raises(ConfigError, match=r"'mps:1' is not available: a Mac has one GPU\. Use mps"):
            find_device("mps:1")
        with pytest.raises(ConfigError, match="an Apple GPU takes one run at a time: use --device mps alone"):
            find_devices("mps,cpu")

    @pytest.mark.parametrize(
        ("system", "sentence"),
        [("Linux", "no Apple GPU found. Use cpu or auto."), ("Darwin", "was built without support for Apple GPUs")],
    )
    def test_missing_apple_gpu(self, monkeypatch, system, sentence):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
        monkeypatch.setattr(platform, "system", lambda: system)
        with pytest.raises(ConfigError, match=f"'mps' is not available: .*{sentence}"):
            find_device("mps")


class TestNames:
    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    def test_recipe_and_switch_names_are_disjoint(self, method):
        """Or ``--set`` could not tell which is meant."""
        assert not as_dict(Recipe()).keys() & as_dict(method.config_type()).keys()

    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    def test_every_switch_has_an_explanation(self, method):
        for switch in [*switches(Recipe()), *switches(method.config_type())]:
            assert switch.explanation, switch.name

    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    def test_shares_and_probabilities_are_bounded(self, method):
        for config in (Recipe(), method.config_type()):
            for switch in switches(config):
                bounded = re.match(r"(τ, )?(mean )?(share|probability|confidence) ", switch.explanation)
                for value in (-0.1, 1.1) if bounded else ():
                    with pytest.raises(ConfigError, match=f"{switch.name} must be .*, got {value}"):
                        override(config, {switch.name: value})

    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    def test_every_method_is_found_under_its_name(self, method):
        assert METHODS[method.name] is find_method(method.name) is method
        assert all(isinstance(text, str) and text for text in (method.title, method.family, method.paper))

    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    def test_every_preset_and_stream_value_exists(self, method):
        for preset in ("official", *method.presets):
            assert isinstance(preset_config(method, preset), method.config_type)
            for stream in STREAMS:
                assert isinstance(
                    resolve(RunRequest(stream, method.name, preset=preset, weights="none")).config, method.config_type
                )
        assert {preset for _, preset in method.stream_values} <= {"official", *method.presets}

    def test_a_value_for_one_stream_and_preset_is_no_change_and_can_be_changed(self):
        plan = resolve(RunRequest(preset="paper"))
        assert (plan.recipe.lr, plan.changed) == (0.005, {})
        again = resolve(RunRequest(preset="paper", changes={"lr": 0.01}))
        assert (again.recipe.lr, again.changed) == (0.01, {"lr": 0.01})


class TestFingerprint:
    @pytest.fixture(scope="class")
    @staticmethod
    def stream():
        return make_stream("toy", toy_domains(), 2022)

    def fingerprint(self, plan, stream):
        return plan.to_json(stream)["fingerprint"]

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_fingerprint_covers_every_value(self, method, stream):
        plan = resolve(RunRequest(method=method, device="cpu"))
        seen = {self.fingerprint(plan, stream)}
        values = {s.name: s for part in (plan.recipe, plan.config) for s in switches(part)}
        if method == "t3a":
            del values["network.bias"]  # refused
        for name, switch in values.items():
            kind = switch.kind.removesuffix(" or none")
            others = kind.removeprefix("one of ").split(", ")
            if kind == "true or false":
                other = not switch.value
            elif kind.startswith("one of "):
                if len(others) == 1:
                    continue
                other = next(o for o in others if o != str(switch.value))
            elif name == "network.backbone":
                other = "resnet18"
            elif name == "missing_classes":
                other = "mud:north"
            elif isinstance(switch.value, tuple):
                other = tuple(v + 1 for v in switch.value)
            elif isinstance(switch.value, int):
                other = switch.value + 1
            else:
                other = (switch.value or 0) / 2 or 0.25  # some may not reach 1
            seen.add(
                self.fingerprint(
                    resolve(RunRequest(method=method, changes={name: other}, device="cpu", weights="none")), stream
                )
            )
        skipped = sum(s.kind.startswith("one of ") and "," not in s.kind for s in values.values())
        assert len(seen) == 1 + len(values) - skipped

    def test_fingerprint_covers_seed_order_method_and_images(self, stream):
        plan = toy_plan()
        spec = toy_spec(toy_domains())
        others = [
            replace(plan, seed=1),
            replace(plan, order=("ink", "fog", "mud")),
            replace(plan, spec=replace(spec, name="other")),
            toy_plan("source-only"),
        ]
        prints = {self.fingerprint(p, stream) for p in [plan, *others]}
        prints.add(self.fingerprint(plan, make_stream("toy", toy_domains(ink=40, mud=32, fog=35), 2022)))
        assert len(prints) == 6

    def test_fingerprint_ignores_device_and_spelling(self, stream):
        plan = toy_plan(changes=TINY)
        assert self.fingerprint(replace(plan, device=torch.device("cuda")), stream) == self.fingerprint(plan, stream)
        assert self.fingerprint(toy_plan(changes={**TINY, "lr": "5e-2"}), stream) == self.fingerprint(plan, stream)
        method = METHODS["ratp"]
        paper = {**method.presets["paper"], **method.stream_values["demo", "paper"]}
        spelled = resolve(RunRequest(changes=paper, device="cpu"))
        named = resolve(RunRequest(preset="paper", device="cpu"))
        assert spelled.digest() == named.digest()

    def test_fingerprint_ignores_measuring(self, tmp_path):
        assert Run(toy_plan(), tmp_path, probe=True).config == Run(toy_plan(), tmp_path, probe=False).config

    def test_the_config_is_plain_json(self, stream):
        config = toy_plan().to_json(stream)
        assert json.loads(json.dumps(config, allow_nan=False)) == config


class TestBackbone:
    """Another feature extractor is run as is usual for it."""

    def recipe(self, stream="demo", **changes):
        named = {name.replace("__", "."): value for name, value in changes.items()}
        return resolve(RunRequest(stream, changes=named, weights="none")).recipe

    def test_backbone_sets_sizes_and_scaling(self):
        recipe = self.recipe(network__backbone="resnet18")
        assert (recipe.size, recipe.network.width, recipe.network.hidden, recipe.network.dim) == (224, 1, 512, 256)
        assert recipe.mean == pytest.approx((0.485, 0.456, 0.406))
        assert recipe.std == pytest.approx((0.229, 0.224, 0.225))
        back = self.recipe("pacs", network__backbone=" dtn ")
        assert (back.size, back.network.hidden, back.network.dim) == (32, 256, 128)
        assert back.mean == back.std == (0.5, 0.5, 0.5)

    def test_other_values_stay_those_of_the_stream(self):
        plain, other = find_stream("pacs").recipe, self.recipe("pacs", network__backbone="resnet18")
        assert other == replace(plain, network=replace(plain.network, backbone="resnet18"))

    def test_explicit_values_override_the_backbones(self):
        recipe = self.recipe(network__backbone="resnet18", size="96", network__dim=9, mean="0,0,0")
        assert (recipe.size, recipe.network.dim, recipe.network.hidden, recipe.mean) == (96, 9, 512, (0, 0, 0))

    def test_default_backbone_changes_nothing(self):
        assert self.recipe(network__backbone="dtn") == find_stream("demo").recipe

    def test_only_the_backbone_is_recorded_as_changed(self):
        """Or a report could not tell its runs from others, nor would they go to a folder of their own."""
        request = RunRequest("pacs", changes={"network.backbone": "resnet18"}, weights="none")
        assert resolve(request).changed == {"network.backbone": "resnet18"}
        request = RunRequest("pacs", changes={"network.backbone": "resnet50"}, weights="none")
        assert resolve(request).changed == {}

    def test_unknown_backbone_is_reported_with_other_mistakes(self):
        changes = {"network.backbone": "resnet81", "epochs": "many", "pca.scal": 1}
        problems = mistakes(changes=changes, seed="x")
        assert len(problems) == 4
        assert any("unknown backbone 'resnet81'. Did you mean 'resnet18'?" in problem for problem in problems)

    @pytest.mark.parametrize("name", ["", "ResNet50", 18, None])
    def test_invalid_backbone(self, name):
        problems = mistakes(changes={"network.backbone": name}, weights="none")
        assert len(problems) == 1, problems


class TestWeights:
    @pytest.fixture
    def file(self, tmp_path):
        def write(name, seed=0):
            torch.manual_seed(seed)
            state = Network(NetworkConfig(width=0.05), 10).backbone.state_dict()
            save_file(state, tmp_path / name)
            return tmp_path / name

        return write

    def config(self, weights):
        plan = resolve(RunRequest(changes=TINY, weights=str(weights), device="cpu"))
        return plan.to_json(make_stream("toy", toy_domains(), 2022))

    def test_weights_hash_is_recorded_and_fingerprinted(self, file):
        path = file("mine.safetensors")
        config = self.config(path)
        assert config["weights"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert config["weights_name"] == "mine.safetensors"
        without = self.config("none")
        assert (without["weights"], without["weights_name"]) == (None, None)
        others = {c["fingerprint"] for c in (config, without, self.config(file("other.safetensors", seed=1)))}
        assert len(others) == 3

    def test_weights_name_and_path_are_not_fingerprinted(self, file):
        first = self.config(file("mine.safetensors"))
        assert self.config(file("renamed.safetensors"))["fingerprint"] == first["fingerprint"]

    def test_default_folder_names_the_weights(self, file, monkeypatch):
        path = file("mine.safetensors")
        monkeypatch.chdir(path.parent)
        spellings = (str(path), "mine.safetensors", str(file("renamed.safetensors")))
        digests = {resolve(RunRequest(changes=TINY, weights=name, device="cpu")).digest() for name in spellings}
        assert len(digests) == 1
        file("mine.safetensors", seed=1)
        assert resolve(RunRequest(changes=TINY, weights="mine.safetensors", device="cpu")).digest() not in digests

    def test_method_starts_from_the_weights(self, file):
        path = file("mine.safetensors")
        plan = resolve(RunRequest(changes=TINY, weights=str(path), device="cpu"))
        method = plan.build_method(make_stream("toy", toy_domains(), 2022))
        for name, tensor in load_file(path).items():
            assert torch.equal(method.state()[f"network.backbone.{name}"], tensor)

    def test_digits_start_from_random_weights_by_default(self):
        assert resolve(RunRequest()).weights is None

    @pytest.mark.parametrize(
        ("weights", "expected"), [("imagnet", "Did you mean 'imagenet'?"), ("no.safetensors", "does not exist")]
    )
    def test_mistakes(self, weights, expected):
        (problem,) = mistakes(weights=weights)
        assert expected in problem


class TestImagesInMemory:
    def planned(self, domains, **changes):
        request = RunRequest(method="source-only", device="cpu", changes={**TINY, **changes})
        return resolve(request, stream=own_stream(domains[0], domains[1:], name="mine"))

    def test_images_in_memory_with_and_without_labels(self, tmp_path):
        day, rain = FakeData(60, (3, 40, 40), 3), FakeData(60, (3, 40, 40), 3, random_offset=1)
        night = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
        stream = own_stream({"day": day}, {"rain": rain, "night": night}, classes=("cat", "cow", "dog"))
        changes = {"epochs": 1, "steps": 1, "randmix.kernel_sizes": "3,5"}
        record = Run(resolve(RunRequest(method="ratp", changes=changes), stream=stream), tmp_path / "mine").execute()
        assert (record.config["stream"], record.matrix.complete) == ("own", True)
        assert [math.isnan(value) for value in record.matrix.accuracy[0]] == [False, False, True]
        assert len((tmp_path / "mine" / "predictions-night.csv").read_text().splitlines()) == 41

    @pytest.mark.parametrize(
        ("options", "mode"), [({}, "act"), ({"guard": "record"}, "record"), ({"guard": "off"}, "off")]
    )
    def test_images_in_memory_are_guarded_like_folders(self, options, mode):
        source, *targets = toy_domains()
        request = RunRequest(method="source-only", device="cpu", **options)
        assert resolve(request).guard == options.get("guard", "record")  # the demo's own images
        assert resolve(request, stream=own_stream(source, targets)).guard == mode

    def test_images_in_memory_can_be_driven_by_hand(self):
        plan = self.planned(toy_domains())
        stream = plan.load_stream()
        method = plan.build_method(stream)
        method.fit_source(stream.source)
        for target in stream.targets:
            method.adapt(target)
        assert all_finite(method.state())

    def test_images_in_memory_are_trained_on(self, tmp_path):
        domains = toy_domains()
        plan = self.planned(domains)
        record = Run(plan, tmp_path / "run").execute()
        assert record.config["data"] == {domain.name: domain.fingerprint() for domain in domains}
        assert Run(plan, tmp_path / "run").execute().matrix == record.matrix
        with pytest.raises(RunDirectoryError, match="Its images have changed"):
            Run(
                self.planned([domains[0], replace(domains[1], labels=domains[1].labels.flip(0)), *domains[2:]]),
                tmp_path / "run",
            ).execute()

    def test_mistakes(self):
        source, target, *_ = toy_domains()
        assert self.planned([source, target], size=48).load_stream().image_size == (48, 48)
        with pytest.raises(ConfigError, match="two domains have the same name"):
            self.planned([source, target, target])
        with pytest.raises(ConfigError, match="at least one target"):
            self.planned([source])


HEAD = '''
"""A method of one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ratp import Method, Phase, pack, switch, unpack


@dataclass(frozen=True)
class CentreConfig:
    """Its switches."""

    pull: float = switch(0.5, "how far a prototype moves", minimum=0)
    which: tuple[int, ...] = switch((0, 1), "classes that move")
'''
CLASS = '''
class Centre(Method):
    """Moves prototypes, trains nothing."""

    name = "centre"
    title = "Prototypes in the middle"
    family = "toy"
    paper = "none"
    config_type = CentreConfig

    def __init__(self, setting, config):
        self.setting, self.config, self.scaling = setting, config, setting.scaling()
        self.network = setting.network()

    def source_phases(self, domain):
        return [Pull(self)]

    def target_phases(self, domain):
        return [Pull(self)]

    def predict(self, images):
        with torch.no_grad():
            return self.network.eval()(self.scaling(images)).logits

    def state(self):
        return pack({"network": self.network.state_dict()})

    def load_state(self, state):
        self.network.load_state_dict(unpack(state)["network"])


class Pull(Phase):
    """One step."""

    name, epochs, steps = "pull", 1, 1

    def __init__(self, method):
        self.method = method

    def begin_epoch(self, epoch):
        return {}

    def step(self):
        with torch.no_grad():
            self.method.network.prototypes.mul_(self.method.config.pull)
        return {"total": self.method.network.prototypes.norm()}

    def finish(self):
        return {}
'''
TEXT = HEAD + CLASS


class TestMethodFile:
    @pytest.fixture
    def file(self, tmp_path):
        def write(text, name="centre.py"):
            path = tmp_path / name
            path.write_text(textwrap.dedent(text))
            return str(path)

        return write

    def error_of(self, path):
        (problem,) = mistakes(method=path)
        assert path in problem
        return problem

    def test_method_file_runs_like_any_method(self, file, tmp_path):
        plan = toy_plan(file(TEXT), changes={"pull": "0.25", "which": "2,3"})
        assert issubclass(plan.method, Method)
        assert plan.changed["pull"] == 0.25
        assert plan.title == "toy-centre-2022"
        run = Run(plan, tmp_path / "run")
        record = run.execute()
        assert record.matrix.complete
        assert record.config["switches"] == {"pull": 0.25, "which": [2, 3]}
        assert all_finite(run.method.state())

    def test_method_file_mistakes_are_reported(self, file):
        problems = mistakes(method=file(TEXT), changes={"pul": 1, "pull": -1, "which": "a"})
        assert len(problems) == 3
        assert "Did you mean 'pull'?" in problems[0]

    def test_method_file_can_extend_a_method(self, file):
        path = file(
            """
            from ratp.methods.source_only import SourceOnly

            class Mine(SourceOnly):
                name = "mine"
            """
        )
        assert resolve(RunRequest(method=path)).method.name == "mine"

    def test_edited_method_file_is_another_run(self, file, tmp_path):
        Run(toy_plan(file(TEXT)), tmp_path / "run").execute()
        digest = toy_plan(file(TEXT)).digest()
        edited = TEXT.replace(".mul_(", ".div_(1e-9 + ")
        assert toy_plan(file(edited)).digest() != digest
        with pytest.raises(Exception, match="has been edited since"):
            Run(toy_plan(file(edited)), tmp_path / "run").execute()

    def test_method_fixed_before_training_restarts_the_run(self, file, tmp_path):
        """As long as nothing else is another."""
        broken = Run(toy_plan(file(TEXT.replace("return {", "return nonsense or {"))), tmp_path / "run")
        with pytest.raises(NameError):
            broken.execute()
        with pytest.raises(RunDirectoryError, match="seed: 2022 there, 3 requested"):
            Run(toy_plan(file(TEXT), seed=3), tmp_path / "run").execute()
        record = Run(toy_plan(file(TEXT)), tmp_path / "run").execute()
        assert record.matrix.complete
        assert [event["event"] for event in record.journal].count("run_started") == 1

    def test_method_fixed_later_is_another_run(self, file, tmp_path):
        events = Run(toy_plan(file(TEXT)), tmp_path / "run").events()
        while not isinstance(next(events), Trained):
            pass
        events.close()  # which keeps a checkpoint
        with pytest.raises(RunDirectoryError, match="has been edited since"):
            Run(toy_plan(file(TEXT.replace(".mul_(", ".div_(1e-9 + "))), tmp_path / "run").execute()

    def test_files_with_equal_names_are_distinct_methods(self, file, tmp_path):
        """The second does not stand for the first because it was read later."""
        (tmp_path / "other").mkdir()
        first = toy_plan(file(TEXT))
        alone = first.digest()
        second = toy_plan(file(TEXT.replace(".mul_(", ".add_("), "other/centre.py"))
        assert first.digest() == alone != second.digest()

    def test_method_file_must_exist(self, tmp_path):
        assert "does not exist" in self.error_of(str(tmp_path / "nowhere.py"))
        (tmp_path / "folder.py").mkdir()
        assert "does not exist" in self.error_of(str(tmp_path / "folder.py"))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("class Mine(Method:\n    pass\n", "SyntaxError"),
            ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
            ("raise RuntimeError('what a day')\n", "RuntimeError: what a day"),
            ("raise SystemExit(3)\n", "SystemExit"),
            ("\0", "cannot be loaded"),
        ],
    )
    def test_method_file_must_load(self, file, text, expected):
        problem = self.error_of(file(text))
        assert expected in problem
        assert "cannot be loaded" in problem

    def test_method_file_must_define_a_method(self, file):
        assert "exactly one Method, found none" in self.error_of(file("from ratp.methods.ratp import RaTP\n"))

    def test_method_file_must_define_one_method(self, file):
        problem = self.error_of(file(TEXT + "\n\nclass Twin(Centre):\n    name = 'twin'\n"))
        assert "exactly one Method, found Centre, Twin" in problem

    def test_abstract_methods_must_be_implemented(self, file):
        lacking = TEXT.replace("def predict(", "def guess(").replace("def load_state(", "def restore(")
        assert "Centre" in self.error_of(file(lacking))
        assert "lacks load_state, predict" in self.error_of(file(lacking))

    def test_description_is_required(self, file):
        lacking = TEXT.replace('    title = "Prototypes in the middle"\n', "").replace(
            "    config_type = CentreConfig\n", ""
        )
        assert "lacks title, config_type" in self.error_of(file(lacking))

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("ratp", "has the name of a built-in one, 'ratp'"), ("", "needs a name"), (" ", "needs a")],
    )
    def test_name_must_be_unique(self, file, name, expected):
        assert expected in self.error_of(file(TEXT.replace('name = "centre"', f'name = "{name}"')))

    def test_switches_must_not_clash_with_the_recipe(self, file):
        """``--set lr=1`` would set both."""
        (problem,) = mistakes(method=file(TEXT.replace("pull: float", "lr: float")))
        assert "switches lr" in problem
        assert "recipe" in problem

    def test_config_must_be_a_dataclass(self, file):
        assert "config_type" in self.error_of(file(TEXT.replace("config_type = CentreConfig", "config_type = dict")))


def test_request_and_plan_are_immutable():
    for item in (RunRequest(), resolve(RunRequest())):
        for entry in fields(item):
            with pytest.raises(AttributeError):
                setattr(item, entry.name, None)
