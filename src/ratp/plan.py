"""From what was asked for to a plan with every value spelled out, or to all mistakes at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from ratp.config import as_dict, decisive, override
from ratp.data.cache import cache_folder
from ratp.environment import describe_environment
from ratp.errors import ConfigError, RatpError, unknown
from ratp.guard import ACT, Mode, find_mode
from ratp.method import Method, Setting
from ratp.methods import METHODS, find_method
from ratp.methods.own import file_hash
from ratp.precision import Precision, find_precision
from ratp.randomness import Randomness
from ratp.recipe import Recipe, follow_backbone
from ratp.record import fingerprint_of
from ratp.request import DEFAULT_PRESET, RunRequest, check_kinds
from ratp.schema import CONFIG
from ratp.source_models import SourceModels
from ratp.stream import DataOptions, Domain, LoadedDomain, Stream, StreamSpec, make_stream, parse_order
from ratp.streams import find_stream
from ratp.streams.own import NAME as FOLDERS
from ratp.streams.own import from_paths, without_labels
from ratp.version import __version__
from ratp.weights import Weights, find_weights

T = TypeVar("T")
NO_WEIGHTS, PUBLISHED = "none", "imagenet"

OURS = "ratp.methods."


@dataclass(frozen=True)
class RunPlan:
    """A request resolved: everything that determines the result.

    Attributes:
        spec: The stream.
        order: Codes of its domains in their order of arrival.
        method: The method's class.
        config: Its switches.
        recipe: Sizes shared by all methods on the stream.
        seed: Seed of everything random.
        preset: Name of the preset the switches started from.
        changed: Switches and sizes that differ from preset and recipe.
        device: Where to compute.
        data: How to read images from files.
        weights_from: What the feature extractor starts from: a file, ``imagenet`` or ``none``.
        precision: How exactly to compute.
        guard: Whether stages are judged, and whether those that are refused are undone.
        request: What it was resolved from, for another process to resolve again; None if it was made by hand.
    """

    spec: StreamSpec
    order: tuple[str, ...]
    method: type[Method]
    config: Any
    recipe: Recipe
    seed: int
    preset: str
    changed: Mapping[str, Any]
    device: torch.device
    data: DataOptions = field(default_factory=DataOptions)
    weights_from: str = NO_WEIGHTS
    precision: Precision = "fp32"
    guard: Mode = "record"
    request: RunRequest | None = field(default=None, repr=False, compare=False)

    @cached_property
    def weights(self) -> Weights | None:
        """What the feature extractor starts from; None: random numbers. Downloaded, if need be, once it is needed."""
        return find_weights(self.weights_from, self.recipe.network.backbone)

    @property
    def weights_known(self) -> str:
        """What is known of the weights without a download: the sha256 of a file; else ``imagenet`` or ``none``."""
        is_file = self.weights_from not in (NO_WEIGHTS, PUBLISHED)
        return self.weights.sha256 if is_file and self.weights else self.weights_from

    def look_for_weights(self) -> None:
        """Finds the weights now if there are images to be read: to decode them for nothing would take long."""
        if self.spec.places and all(map(os.path.exists, self.spec.places(self.order, self.data).values())):
            _ = self.weights

    @property
    def title(self) -> str:
        """Method, stream and seed, for file names and headings."""
        return f"{self.spec.name}-{self.method.name}-{self.seed}"

    def on(self, name: str, domains: Sequence[Domain]) -> RunPlan:
        """The same plan on images in memory, in place of its stream's; a run of it is made in this process.

        Unless it was told otherwise, the guard acts, as on all own images.

        Args:
            name: What to call their stream.
            domains: The source first, with labels; then the targets as they arrive, with labels or without.

        Raises:
            ConfigError: If they are of another size than the plan's.
        """
        size = self.recipe.size
        other = [domain for domain in domains if tuple(domain.images.shape[2:]) != (size, size)]
        if other:
            height, width = other[0].images.shape[2:]
            raise ConfigError(
                f"domain {other[0].name!r} has images of {height}×{width}, the plan of {size}×{size}: resize them, or "
                f"ask for another size, e.g. changes={{'size': {height}}}."
            )
        order, title = tuple(domain.name for domain in domains), "images in memory"
        spec = StreamSpec(
            name=name,
            title=title,
            domains=dict.fromkeys(order, title),
            orders={"default": order},
            recipe=self.recipe,
            load=lambda codes, size, options: [LoadedDomain(domain) for domain in domains],
        )
        guard = ACT if self.request is not None and self.request.guard == "auto" else self.guard
        return replace(self, spec=spec, order=order, guard=guard, request=None)

    def load_stream(self) -> Stream:
        """Loads the domains."""
        domains = self.spec.load(self.order, self.recipe.size, self.data)
        return make_stream(self.spec.name, domains, self.seed, hold_out=self.recipe.hold_out)

    def build_method(self, stream: Stream, models: SourceModels | None = None) -> Method:
        """The method, untrained.

        Args:
            stream: What it will be trained on.
            models: What other runs have trained on the source, if it may take that.
        """
        setting = Setting(
            self.recipe,
            stream.classes,
            stream.image_size,
            Randomness(self.seed),
            self.device,
            self.weights,
            self.precision,
            models,
        )
        return self.method(setting, self.config)

    def source_models(self, stream: Stream) -> SourceModels | None:
        """What other runs have trained on the source. None for a method that is not ours: its code may differ."""
        if not self.method.__module__.startswith(OURS):
            return None
        about = {
            "seed": self.seed,
            "recipe": as_dict(self.recipe),
            "classes": list(stream.classes),
            "source": stream.fingerprints[stream.order[0]],
            "weights": self.weights.sha256 if self.weights else None,
            "device": describe_environment(self.device, self.precision),
        }
        return SourceModels(cache_folder() / "source-models", about)

    def decisions(self) -> dict[str, Any]:
        """All that determines the result, but for images and weights, as plain data."""
        acting = {"guard": ACT} if self.guard == ACT else {}
        return {
            "stream": self.spec.name,
            "order": list(self.order),
            "method": self.method.name,
            "method_file": file_hash(self.method),
            "seed": self.seed,
            "recipe": decisive(self.recipe),
            "switches": decisive(self.config),
            **acting,
        }

    def digest(self) -> str:
        """sha256 of the decisions and of a file of weights, for a folder's name.

        The usual guard of a stream is no decision, and where a file lies is none.
        """
        decisions = {name: value for name, value in self.decisions().items() if name != "guard"}
        acts, usually = (mode == ACT for mode in (self.guard, usual_guard(self.spec)))
        unusual = {"guard": acts} if acts != usually else {}
        bare = [code for code in self.order if code in self.spec.unlabelled]
        told = {"unlabelled": bare} if bare else {}  # in config.json the hashes of the images tell it
        return _sha256(decisions | {"weights": self.weights_known} | unusual | told)

    def to_json(self, stream: Stream, after: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The plan as ``config.json`` keeps it, with a hash of decisions, images and weights.

        Args:
            stream: Its images.
            after: What there is to say of the run it goes on from, if it does not begin at the start.
        """
        decisions = self.decisions() | ({"after": dict(after)} if after else {})
        decisions |= {
            "classes": list(stream.classes),
            "data": dict(stream.fingerprints),
            "weights": self.weights.sha256 if self.weights else None,
        }
        about = {
            **CONFIG.mark,
            "ratp": __version__,
            "preset": self.preset,
            "changed": dict(self.changed),
            "origins": dict(stream.origins),
            "notes": list(stream.notes),
            "weights_name": self.weights.name if self.weights else None,
            "evaluation_statistics": self.method.evaluation_statistics(self.config),
            "uses_target_labels": self.method.uses_target_labels(self.config),
        }
        return {**about, **decisions, "fingerprint": fingerprint_of(decisions)}


def _sha256(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def resolve(request: RunRequest) -> RunPlan:
    """Checks a request and fills in every value.

    Raises:
        ConfigError: With one sentence for every mistake in the request.
    """
    check_kinds(request)
    problems: list[str] = []

    def attempt(function: Callable[[], T]) -> T | None:
        try:
            return function()
        except RatpError as error:
            problems.extend(error.problems if isinstance(error, ConfigError) else [str(error)])
            return None

    spec = attempt(lambda: _find_stream(request))
    method = attempt(lambda: find_method(request.method))
    seed = attempt(lambda: _parse_seed(request.seed))
    device = attempt(lambda: find_device(request.device))
    precision = attempt(lambda: find_precision(request.precision, device or torch.device("cpu")))
    guard = attempt(lambda: find_mode(request.guard, usual_guard(spec) if spec else "record"))
    order = attempt(lambda: parse_order(request.order, spec, subset=request.subset)) if spec else None
    source = spec.orders["default"][0] if spec and request.source is not None else None
    if order and source is not None and order[0] != source:
        problems.append(f"the order begins with {order[0]!r}, and the source is {source!r}: name the other one as it.")
    if spec and order and order[0] in spec.unlabelled:
        problems.append(f"the source {order[0]!r} needs its labels: only targets can be without.")
    base = attempt(lambda: preset_config(method, request.preset)) if method else None
    if not method:
        attempt(lambda: _check_preset(request.preset))
    # A mistake above hides none below: what is not known is looked up wherever it could be.
    possible = [base] if base is not None else [m.config_type() for m in ([method] if method else METHODS.values())]
    sizes = spec.recipe if spec else Recipe()
    own_backbone = sizes.network.backbone
    if method and base is not None and str(request.changes.get("network.backbone", own_backbone)).strip() != "dtn":
        base = override(base, method.large)
        possible = [base]
    if spec and method and (values := method.stream_values.get((spec.values or spec.name, request.preset))):
        sizes, base = _change(sizes, possible, values)
        possible = [base]
    sizes = attempt(lambda: follow_backbone(sizes, request.changes)) or sizes
    changed = attempt(lambda: _change(sizes, possible, request.changes))
    backbone = (changed[0] if changed else sizes).network.backbone
    weights = _weights_from(request.weights, backbone)
    if weights != PUBLISHED:  # a file that does not fit is found now; what must be downloaded can wait for the run
        attempt(lambda: find_weights(weights, backbone))
    if problems:
        raise ConfigError(problems)
    assert spec and method and order and changed and device and precision and guard and seed is not None
    recipe, config = changed
    before, after = as_dict(sizes) | as_dict(base), as_dict(recipe) | as_dict(config)
    before["network.backbone"] = own_backbone  # what follows from another is no change of its own, but it is one
    differing = {name: value for name, value in after.items() if value != before[name]}
    return RunPlan(
        spec=spec,
        order=order,
        method=method,
        config=config,
        recipe=recipe,
        seed=seed,
        preset=request.preset,
        changed=differing,
        device=device,
        data=request.data,
        weights_from=weights,
        precision=precision,
        guard=guard,
        request=request,
    )


def usual_guard(spec: StreamSpec) -> Mode:
    """What the guard does unless it is told: it acts on own images; on the others it changes no result."""
    return ACT if spec.values == FOLDERS else "record"


def _find_stream(request: RunRequest) -> StreamSpec:
    """The stream asked for by name, or the one of the source and targets given."""
    own = request.source is not None or bool(request.targets)
    if request.stream == FOLDERS:
        if request.source is None:
            raise ConfigError(f"stream {FOLDERS} needs its images: --source DAY --targets RAIN NIGHT")
        spec = from_paths(Path(request.source), [Path(target) for target in request.targets])
    elif own:
        raise ConfigError(f"a source and targets belong to the stream {FOLDERS}, not to {request.stream!r}.")
    else:
        spec = find_stream(request.stream)
    return without_labels(spec, [str(name) for name in request.unlabelled])


def _weights_from(asked: str, backbone: str) -> str:
    """What was asked for; ``auto`` is what is usual, or ``$RATP_WEIGHTS`` in place of published weights."""
    if asked != "auto":
        return asked
    usual = usual_weights(backbone)
    return os.environ.get("RATP_WEIGHTS") or usual if usual == PUBLISHED else usual


def usual_weights(backbone: str) -> str:
    """What a backbone starts from in the paper: ``none`` if it is trained from scratch, else ``imagenet``."""
    return NO_WEIGHTS if backbone == "dtn" else PUBLISHED


def _check_preset(preset: str) -> None:
    known = {DEFAULT_PRESET, *(name for method in METHODS.values() for name in method.presets)}
    if preset not in known:
        raise ConfigError(unknown("preset", preset, known))


def _change(recipe: Recipe, possible: Sequence[Any], changes: Mapping[str, Any]) -> tuple[Recipe, Any]:
    """Sets values in the recipe or the switches, whichever has them.

    Args:
        recipe: The stream's recipe.
        possible: The method's switches; of every method, if it is not known which.
        changes: Values by dotted name.
    """
    recipe_names = as_dict(recipe).keys()
    config = next((c for c in possible if changes.keys() <= {*as_dict(c), *recipe_names}), possible[0])
    config_names = {name for c in possible for name in as_dict(c)}
    both = sorted(recipe_names & as_dict(config).keys())
    if both:
        raise ConfigError(f"the method's switches {', '.join(both)} are called like sizes of the recipe: rename them.")
    problems = [
        unknown("switch", n, {*recipe_names, *config_names}) for n in changes if n not in {*recipe_names, *config_names}
    ]
    if problems:
        problems[-1] += " `ratp methods show` and `ratp streams show` list them all."
    parts = []
    for part, names in ((recipe, recipe_names), (config, as_dict(config).keys())):
        try:
            parts.append(override(part, {n: v for n, v in changes.items() if n in names}))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return parts[0], parts[1]


def preset_config(method: type[Method], preset: str) -> Any:
    """A method's switches under a preset.

    Raises:
        ConfigError: If the method has no such preset.
    """
    if preset not in (DEFAULT_PRESET, *method.presets):
        raise ConfigError(unknown(f"preset of {method.name}", preset, (DEFAULT_PRESET, *method.presets)))
    return override(method.config_type(), method.presets.get(preset, {}))


def _parse_seed(seed: int | str) -> int:
    try:
        if not isinstance(seed, int | str):
            raise ValueError(seed)
        value = int(seed)
    except ValueError as error:
        raise ConfigError(f"the seed must be a whole number, got {seed!r}; e.g. 2022.") from error
    if isinstance(seed, bool) or not 0 <= value < 2**63:
        raise ConfigError(f"the seed must lie in 0..2^63−1, got {seed!r}; e.g. 2022.")
    return value


def find_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is a GPU if there is one.

    Raises:
        ConfigError: If it does not exist here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(unknown("device", name, ("auto", "cpu", "cuda"))) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(unknown("device", name, ("auto", "cpu", "cuda")))
    available = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= available:
        raise ConfigError(f"device {name!r} is not here: {available} CUDA device(s) found. Use cpu or auto.")
    return device
