"""Resolves a request into a plan with every value spelled out, or reports all mistakes at once."""

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

from ratp import __version__
from ratp._core.environment import Precision, Randomness, describe_environment, find_device, find_precision
from ratp._core.files import CONFIG
from ratp.config import as_dict, decisive, override
from ratp.data.cache.folder import cache_folder
from ratp.errors import ConfigError, RatpError, nearest, unknown
from ratp.guard.watch import ACT, MODES, Mode
from ratp.methods import METHODS, find_method
from ratp.methods.custom import file_hash
from ratp.networks.adopted import Adopted
from ratp.networks.backbones import is_pretrained
from ratp.networks.own import Given, OwnBackbone, find_own, plain_name, register_own
from ratp.networks.weights import Weights, find_weights
from ratp.runs import DEFAULT_PRESET, QUICK
from ratp.runs.record import LABEL_SHIFT, RunRecord, fingerprint_of
from ratp.runs.request import RunRequest, check_types
from ratp.streams import FOLDERS, STREAMS, find_stream
from ratp.streams.files import problems_listed
from ratp.streams.folders import NO_SOURCE, after_earlier, from_paths, without_labels
from ratp.streams.label_shift import shift_labels
from ratp.streams.stream import DataOptions, Stream, StreamSpec, make_stream, parse_order
from ratp.training.method import Method, Setting
from ratp.training.recipe import Recipe, follow_backbone, quick_values
from ratp.training.source_cache import AdoptedSource, SourceModels

T = TypeVar("T")
NO_WEIGHTS, PUBLISHED = "none", "imagenet"
# What other libraries call the sizes of a recipe.
_OTHER_NAMES = {"learning_rate": "lr", "batch_size": "batch", "image_size": "size", "num_epochs": "epochs"}


@dataclass(frozen=True)
class RunPlan:
    """A resolved request: everything that determines the result.

    Attributes:
        spec: The stream.
        order: Codes of its domains in their order of arrival.
        method: The method's class.
        config: Its switches.
        recipe: Sizes shared by all methods on the stream.
        seed: Seed of everything random.
        preset: Preset that the switches started from.
        changed: Switches and sizes that differ from preset and recipe.
        device: Where to compute.
        data: How to read images from files.
        weights_from: Initial weights of the backbone: a file, ``imagenet`` or ``none``.
        precision: Numerical precision.
        guard: Whether to judge stages, and whether to undo those that are refused.
        online: Whether to measure every target as it streams past before its stage; it changes no other result.
        request: The request it was resolved from, so that another process can resolve it again; None if it cannot.
        own_weights: Initial weights of a backbone that was given as a module.
        adopted: A network trained elsewhere, with which the run starts instead of training on the source.
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
    online: bool = False
    request: RunRequest | None = field(default=None, repr=False, compare=False)
    own_weights: Weights | None = field(default=None, repr=False)
    adopted: Adopted | None = field(default=None, repr=False)

    @cached_property
    def weights(self) -> Weights | None:
        """Initial weights of the backbone, downloaded on first use if need be; None for random ones."""
        if self.own_weights is not None:
            return self.own_weights
        return (
            None if self.weights_from == NO_WEIGHTS else find_weights(self.weights_from, self.recipe.network.backbone)
        )

    @property
    def weights_known(self) -> str:
        """The weights as far as known without a download: the sha256 of a file, ``imagenet`` or ``none``."""
        is_file = self.own_weights is not None or self.weights_from not in (NO_WEIGHTS, PUBLISHED)
        return self.weights.sha256 if is_file and self.weights else self.weights_from

    def prefetch_weights(self) -> None:
        """Loads the weights now if there are images to read, because decoding them in vain would take long."""
        if self.spec.places:
            places = self.spec.places(self.order, self.data)
            if places and not problems_listed(places, unlabelled=self.spec.unlabelled):
                _ = self.weights

    @property
    def is_built_in(self) -> bool:
        """Whether the method comes with this package."""
        return self.method.__module__.startswith("ratp.methods.")

    @property
    def method_hash(self) -> str | None:
        """sha256 of the method's file; None for a built-in method."""
        return None if self.is_built_in else file_hash(self.method)

    @property
    def has_own_images(self) -> bool:
        """Whether the images are the user's own, in files or in memory."""
        return self.spec.values == FOLDERS or self.request is None

    @property
    def title(self) -> str:
        """Stream with its label shift, method and seed, for file names and headings."""
        kind = self.recipe.label_shift
        shift = kind if kind != "none" else "missing" if self.recipe.shifts_labels else ""
        return "-".join(filter(None, (self.spec.name, shift, self.method.name, str(self.seed))))

    def load_stream(self) -> Stream:
        """Loads the domains."""
        domains = self.spec.load(self.order, self.recipe.size, self.data)
        if self.recipe.shifts_labels:
            domains = shift_labels(self.spec.name, domains, self.recipe)
        stream = make_stream(self.spec.name, domains, self.seed, hold_out=self.recipe.hold_out)
        if self.adopted and self.adopted.classes != stream.classes:
            raise ConfigError(
                f"the adopted model has the classes {', '.join(self.adopted.classes)}, and the stream "
                f"{', '.join(stream.classes)}: both need the same, in the same order."
            )
        return stream

    @cached_property
    def adopted_source(self) -> AdoptedSource | None:
        """What the source stage takes the adopted network from."""
        return AdoptedSource(self.adopted.tensors) if self.adopted else None

    def build_method(self, stream: Stream, models: SourceModels | None = None) -> Method:
        """Builds the untrained method, which may reuse source networks of other runs."""
        setting = Setting(
            self.recipe,
            stream.classes,
            stream.image_size,
            Randomness(self.seed),
            self.device,
            self.weights,
            self.precision,
            self.adopted_source or models,
        )
        return self.method(setting, self.config)

    def source_models(self, stream: Stream) -> SourceModels | None:
        """Returns the cache of source networks; None for a custom method, whose code may differ."""
        if not self.is_built_in or self.adopted:
            return None
        about = {
            "seed": self.seed,
            "recipe": {name: value for name, value in as_dict(self.recipe).items() if name not in LABEL_SHIFT},
            "classes": list(stream.classes),
            "source": stream.fingerprints[stream.order[0]],
            "weights": self.weights.sha256 if self.weights else None,
            "device": describe_environment(self.device, self.precision),
        }
        return SourceModels(cache_folder() / "source-models", about)

    def decisions(self) -> dict[str, Any]:
        """Everything that determines the result but for images and weights, as plain data."""
        acting = {"guard": ACT} if self.guard == ACT else {}
        adopted = {"adopted": self.adopted.sha256} if self.adopted else {}
        return {
            "stream": self.spec.name,
            "order": list(self.order),
            "method": self.method.name,
            "method_file": self.method_hash,
            "seed": self.seed,
            "recipe": decisive(self.recipe),
            "switches": decisive(self.config),
            **acting,
            **adopted,
        }

    def digest(self) -> str:
        """Hashes the decisions and the weights, for a folder's name.

        It ignores the paths of files, and the guard if it is in the stream's default mode.
        """
        decisions = {name: value for name, value in self.decisions().items() if name != "guard"}
        acts, by_default = (mode == ACT for mode in (self.guard, _default_guard(self.spec)))
        guard = {"guard": acts} if acts != by_default else {}
        bare = [code for code in self.order if code in self.spec.unlabelled]
        unlabelled = {"unlabelled": bare} if bare else {}  # in config.json the hashes of the images imply it
        text = json.dumps(decisions | {"weights": self.weights_known} | guard | unlabelled, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self, stream: Stream, after: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the contents of ``config.json``, with a hash of decisions, images and weights.

        Args:
            stream: The images.
            after: Fingerprint and stages of the run it continues, if any.
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
            "images": dict(stream.image_counts),
            **({"gone": list(stream.gone)} if stream.gone else {}),
            "weights_name": self.weights.name if self.weights else None,
            "evaluation_statistics": self.method.evaluation_statistics(self.config),
            "uses_target_labels": self.method.uses_target_labels(self.config),
        }
        return {**about, **decisions, "fingerprint": fingerprint_of(decisions)}


def resolve(
    request: RunRequest,
    *,
    stream: StreamSpec | None = None,
    method: type[Method] | None = None,
    backbone: Given | None = None,
) -> RunPlan:
    """Checks a request and fills in every value.

    Args:
        request: The request.
        stream: A stream to use instead of the one that the request names, from :func:`ratp.own_stream`.
        method: A method to use instead of the one that the request names, from :func:`ratp.loss_method`.
        backbone: A backbone of your own: a module, a class or function that builds one, or ``FILE.py:NAME``.

    Returns:
        The plan, from which :class:`ratp.Run` makes a run.

    Raises:
        ConfigError: If the request has mistakes; it lists all of them.

    Examples:
        >>> plan = ratp.resolve(ratp.RunRequest("demo", "shot", changes={"epochs": 2}))
        >>> record = ratp.Run(plan, "runs/mine").execute()
    """
    check_types(request)
    problems: list[str] = []

    def attempt(function: Callable[[], T]) -> T | None:
        try:
            return function()
        except RatpError as error:
            problems.extend(error.problems if isinstance(error, ConfigError) else [str(error)])
            return None

    spec = stream or attempt(lambda: _find_stream(request))
    given = request.backbone if backbone is None else backbone
    own = attempt(lambda: _own_backbone(request, given)) if request.model is None else None
    changes = {**request.changes, "network.backbone": own.name} if own else request.changes
    adopted = attempt(lambda: _adopted(request, given)) if request.model is not None else None
    changes = {**changes, **adopted.recipe_values} if adopted else changes
    is_plain = stream is None and method is None and backbone is None
    method = attempt(lambda: find_method(request.method) if method is None else _checked_loss(method))
    seed = attempt(lambda: _parse_seed(request.seed))
    device = attempt(lambda: find_device(request.device))
    precision = attempt(lambda: find_precision(request.precision, device or torch.device("cpu")))
    guard = attempt(lambda: _find_guard(request.guard, spec))
    order = attempt(lambda: parse_order(request.order, spec, subset=request.subset)) if spec else None
    source = spec.orders["default"][0] if spec and request.source is not None else None
    if order and source is not None and order[0] != source:
        problems.append(f"the order begins with {order[0]!r}, and the source is {source!r}: name the other one as it.")
    if spec and order and order[0] in spec.unlabelled:
        problems.append(f"the source {order[0]!r} needs its labels: only targets can be unlabelled.")
    base = attempt(lambda: preset_config(method, request.preset)) if method else None
    if not method:
        attempt(lambda: _check_preset(request.preset))
    # To report all mistakes at once, an unknown method must not hide misspelt switches: look them up in all methods.
    possible = [base] if base is not None else [m.config_type() for m in ([method] if method else METHODS.values())]
    sizes = spec.recipe if spec else Recipe()
    default_backbone = sizes.network.backbone
    named = str(changes.get("network.backbone", default_backbone)).strip()
    if method and base is not None and is_pretrained(named):
        base = override(base, method.large)
        possible = [base]
    if (
        spec
        and method
        and (values := method.stream_values.get((spec.values or spec.name, _switches_of(request.preset))))
    ):
        sizes, base = _change(sizes, possible, values)
        possible = [base]
    sizes = attempt(lambda: follow_backbone(sizes, changes)) or sizes
    if method and base is not None:
        sizes = attempt(lambda: override(sizes, preset_sizes(method, request.preset))) or sizes
    if request.preset == QUICK:
        sizes = override(sizes, quick_values(sizes))
    changed = attempt(lambda: _change(sizes, possible, changes))
    if method and changed:
        attempt(lambda: method.check_recipe(changed[0]))
    named = (changed[0] if changed else sizes).network.backbone
    weights = NO_WEIGHTS if adopted else _weights_from(request.weights, named)
    if weights not in (NO_WEIGHTS, PUBLISHED):  # check a file now; a download can wait for the run
        attempt(lambda: find_weights(weights, named))
    if method and order and order[0] == NO_SOURCE and not method.source_free:
        problems.append(describe_need(method))
    if problems:
        raise ConfigError(problems)
    assert spec and method and order and changed and device and precision and guard and seed is not None
    recipe, config = changed
    before, after = as_dict(sizes) | as_dict(base), as_dict(recipe) | as_dict(config)
    before["network.backbone"] = default_backbone  # the backbone counts as changed; what follows from it does not
    return RunPlan(
        spec=spec,
        order=order,
        method=method,
        config=config,
        recipe=recipe,
        seed=seed,
        preset=request.preset,
        changed={name: value for name, value in after.items() if value != before[name]},
        device=device,
        data=replace(request.data, classes=adopted.classes) if adopted else request.data,
        weights_from=weights,
        precision=precision,
        guard=guard,
        online=request.online,
        request=request if is_plain else None,
        own_weights=own.weights if own else None,
        adopted=adopted,
    )


def describe_need(method: type[Method]) -> str:
    """Says that a method cannot start without source images, and which methods can."""
    able = ", ".join(name for name, other in METHODS.items() if other.source_free)
    return f"{method.name} needs source images: give --source, or take a method that needs none ({able})."


def _adopted(request: RunRequest, given: Given | None) -> Adopted:
    """Reads an adopted model, which may need the user's own class, and refuses what would change its network."""
    found = Adopted.load(str(request.model), backbone=given)
    fixed = [name for name in request.changes if name in found.recipe_values]
    fixed += ["weights"] if request.weights not in ("auto", NO_WEIGHTS) else []
    if fixed:
        raise ConfigError(
            f"the adopted model has a network and preprocessing of its own: leave out {', '.join(fixed)}."
        )
    return found


def _checked_loss(method: type[Method]) -> type[Method]:
    if getattr(method, "code_hash", None) is None:
        shown = getattr(method, "__name__", repr(method))
        raise ConfigError(f"a method must be a name, a .py file that defines one, or a ratp.loss_method; got {shown}.")
    return method


def _own_backbone(request: RunRequest, given: Given | None) -> OwnBackbone | None:
    """Registers a backbone of the user's own, if there is one."""
    recorded = str(request.changes.get("network.backbone", ""))
    if given is None:
        find_own("the run to continue", recorded, None)
        return None
    if plain_name(recorded) != recorded:  # a run is continued
        return replace(register_own(given, recorded), weights=None)
    own = register_own(given)
    if recorded:
        raise ConfigError(f"two backbones are given: {plain_name(own.name)} and network.backbone. Leave one out.")
    if own.weights and request.weights not in ("auto", NO_WEIGHTS):
        raise ConfigError(f"the backbone {plain_name(own.name)} has weights of its own: leave out the weights.")
    return own


def with_current_defaults(record: RunRecord) -> RunRecord:
    """Returns a run with ``changed`` relative to the present defaults, not to those of its time.

    The record stays as it is if its method or stream is not built in, or if a switch of it no longer exists.
    """
    config = record.config
    method, stream = record.method, config["stream"]
    if method not in METHODS or stream not in STREAMS or config.get("method_file") is not None:
        return record
    try:
        values = {**config["recipe"], **config["switches"]}
        request = RunRequest(
            stream, method, preset=config["preset"], changes=values, device="cpu", weights=NO_WEIGHTS, precision="fp32"
        )
        return replace(record, differing=resolve(request).changed)
    except (ConfigError, KeyError, TypeError):
        return record


def _default_guard(spec: StreamSpec) -> Mode:
    """The guard acts on a user's own images and only records on built-in streams, so that it changes no result."""
    return ACT if spec.values == FOLDERS or spec.name not in STREAMS else "record"


def _find_guard(name: str, spec: StreamSpec | None) -> Mode:
    if name == "auto":
        return _default_guard(spec) if spec else "record"
    if (mode := next((mode for mode in MODES if mode == name), None)) is None:
        raise ConfigError(unknown("guard", name, ("auto", *MODES)))
    return mode


def _find_stream(request: RunRequest) -> StreamSpec:
    """Finds the stream by name, or builds the one of the given source and targets."""
    if request.earlier is not None:
        return after_earlier(request.earlier, [Path(target) for target in request.targets], request.unlabelled)
    if request.stream == FOLDERS:
        if request.source is None and request.model is None:
            raise ConfigError(f"stream {FOLDERS} needs its images: --source DAY --targets RAIN NIGHT")
        source = None if request.source is None else Path(request.source)
        spec = from_paths(source, [Path(target) for target in request.targets])
    elif request.source is not None or request.targets:
        raise ConfigError(f"a source and targets belong to the stream {FOLDERS}, not to {request.stream!r}.")
    else:
        spec = find_stream(request.stream)
    return without_labels(spec, [str(name) for name in request.unlabelled]) if request.unlabelled else spec


def _weights_from(name: str, backbone: str) -> str:
    """Resolves ``auto`` to the backbone's default, where ``$RATP_WEIGHTS`` replaces published weights."""
    if name != "auto":
        return name
    default = default_weights(backbone)
    return os.environ.get("RATP_WEIGHTS") or default if default == PUBLISHED else default


def default_weights(backbone: str) -> str:
    """Returns the initial weights that the paper uses: ``none`` for the DTN, ``imagenet`` for larger backbones."""
    return PUBLISHED if is_pretrained(backbone) else NO_WEIGHTS


def _check_preset(preset: str) -> None:
    known = {DEFAULT_PRESET, QUICK, *(name for method in METHODS.values() for name in method.presets)}
    if preset not in known:
        raise ConfigError(unknown("preset", preset, known))


def _change(recipe: Recipe, possible: Sequence[Any], changes: Mapping[str, Any]) -> tuple[Recipe, Any]:
    """Sets values in the recipe or the switches, whichever has the name."""
    recipe_names = as_dict(recipe).keys()
    config = next((c for c in possible if changes.keys() <= {*as_dict(c), *recipe_names}), possible[0])
    config_names = {name for c in possible for name in as_dict(c)}
    both = sorted(recipe_names & as_dict(config).keys())
    if both:
        raise ConfigError(f"the method's switches {', '.join(both)} have the names of recipe sizes: rename them.")
    valid = sorted({*recipe_names, *config_names})
    problems = [_unknown_switch(name, valid) for name in changes if name not in valid]
    if problems:
        problems[-1] += " `ratp switches STREAM METHOD` lists them all."
    parts = []
    for part, names in ((recipe, recipe_names), (config, as_dict(config).keys())):
        try:
            parts.append(override(part, {n: v for n, v in changes.items() if n in names}))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return parts[0], parts[1]


def _unknown_switch(name: str, valid: Sequence[str]) -> str:
    """Says that there is no such switch; suggests the nearest, or those with a last part like that of the name."""
    if name in _OTHER_NAMES:
        return f"unknown switch {name!r}. Did you mean {_OTHER_NAMES[name]!r}?"
    by_last: dict[str, list[str]] = {}
    for known in valid:
        by_last.setdefault(known.rpartition(".")[2], []).append(known)
    near = None if nearest(name, valid) else nearest(name.rpartition(".")[2], list(by_last))
    if near is None:
        return unknown("switch", name, valid)
    return f"unknown switch {name!r}. Did you mean {' or '.join(map(repr, by_last[near]))}?"


def preset_config(method: type[Method], preset: str) -> Any:
    """Returns a method's switches under a preset."""
    known = (DEFAULT_PRESET, QUICK, *method.presets)
    if preset not in known:
        raise ConfigError(unknown(f"preset of {method.name}", preset, known))
    values, sizes = method.presets.get(preset, {}), preset_sizes(method, preset)
    return override(method.config_type(), {name: value for name, value in values.items() if name not in sizes})


def _switches_of(preset: str) -> str:
    """The preset with the same switches: ``quick`` changes only the recipe."""
    return DEFAULT_PRESET if preset == QUICK else preset


def preset_sizes(method: type[Method], preset: str) -> dict[str, Any]:
    """Returns what a preset changes in every stream's recipe, by name."""
    names = as_dict(Recipe()).keys()
    return {name: value for name, value in method.presets.get(preset, {}).items() if name in names}


def _parse_seed(seed: int | str) -> int:
    try:
        if not isinstance(seed, int | str):
            raise ValueError(seed)
        value = int(seed)
    except ValueError as error:
        raise ConfigError(f"the seed must be a whole number, got {seed!r}; e.g. 2022.") from error
    if isinstance(seed, bool) or not 0 <= value < 2**63:
        raise ConfigError(f"the seed must be in 0..2^63−1, got {seed!r}; e.g. 2022.")
    return value
