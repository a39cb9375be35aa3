"""Checks that a custom method fulfils its contract: before training, and after every stage."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ratp._core.environment import Precision, Randomness
from ratp._core.files import hash_of
from ratp._core.state import StateError, Stateful, join_tensors, split_tensors
from ratp.data.domain import LabelledDomain
from ratp.errors import Note, brief
from ratp.networks.network import Network
from ratp.training.device_cache import with_images_on
from ratp.training.method import Method, check_scores
from ratp.training.phase import ContractError, NotYetError, Phase, Progress, Tick, called, load_stage, save_stage, train

# Most images to try a method with; most epochs, and steps per epoch, of a phase.
_IMAGES, _EPOCHS, _STEPS = 32, 2, 2
# How far scores that were computed in the same way may differ, as a share of the largest.
_ROUNDING: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-1}
_FOREIGN = {"torch", "numpy", "triton", "torchvision", *sys.stdlib_module_names}

Phases = Callable[[Method], Sequence[Phase]]


class Leaf(NamedTuple):
    """A value that can be compared."""

    owner: tuple[str, str]  # class and attribute to save it
    is_direct: bool  # whether the attribute holds it itself, or in lists and dicts
    content: str  # the value, or its hash


Values = Mapping[str, Leaf]


class ChanceWarning(Note):
    """A method predicts at random, so its predictions cannot be compared."""


def rehearse(build: Callable[[], Method], source: LabelledDomain, device: torch.device, *, uses_labels: bool) -> None:
    """Tries a method on a few images before training, so that mistakes are reported at once.

    The method must fulfil the contract of every method, and its phases must save their complete state: a source and a
    target stage train for a few steps, and a new method that loads the saved state must equal the one that saved it.
    Errors that arise only because the method has learnt nothing yet are ignored here. Some images of ``source`` serve
    as the target too; ``uses_labels`` says whether the method gets the labels of targets.
    """
    some = torch.arange(min(len(source), _IMAGES))
    domain = with_images_on(replace(source.subset(some), name="rehearsal"), device)

    def source_phases(method: Method) -> Sequence[Phase]:
        give_generators(method, Randomness(0), device, 0)
        return method.source_phases(domain)

    def target_phases(method: Method) -> Sequence[Phase]:
        give_generators(method, Randomness(0), device, 1)
        return method.labelled_target_phases(domain) if uses_labels else method.target_phases(domain.unlabelled())

    with chance_put_back(device):
        method = build()
        questions: Sequence[Callable[[], object]] = (
            lambda: _scores(method, source),
            method.state,
            lambda: source_phases(method),
            lambda: target_phases(method),
            lambda: _rehearse_stages(build, source_phases, target_phases, device),
        )
        for ask in questions:
            try:
                ask()
            except Exception as error:
                if isinstance(error, ContractError) and not isinstance(error, NotYetError):
                    raise


def give_generators(method: Method, randomness: Randomness, device: torch.device, stage: int) -> None:
    """Lets dropout of the method's networks draw from generators of a stage, unless the method binds others.

    Otherwise dropout would draw from torch's global generator, and no run could be repeated.
    """
    for name, value in vars(method).items():
        if isinstance(value, Network):
            value.use_generator(randomness.generator("dropout of", name, stage, device=device))


def check_kept(
    method: Method, build: Callable[[], Method], source: LabelledDomain, device: torch.device, precision: Precision
) -> None:
    """Refuses a method whose predictions of some images change when it is built again and loads its own state."""
    with chance_put_back(device):
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in method.state().items()}
        trained = _scores(method, source)
        if not trained.isfinite().all():  # measuring reports it
            return
        asked = "load_state"
        try:
            another = build()
            another.load_state(kept)
            asked = "predict"
            first, second = _scores(another, source), _scores(another, source)
        except torch.OutOfMemoryError:  # memory suffices for one method, and a run needs no more
            return
        except Exception as error:
            raise _not_kept(method, f"{asked} fails with {type(error).__name__}: {brief(error)}") from error
    rounding = _ROUNDING[precision] * trained.abs().max().item()
    if not torch.allclose(first, second, rtol=0, atol=rounding, equal_nan=True):
        what = "predicts the same images differently each time, so it is unknown whether state holds all it needs"
        warnings.warn(f"{called(method, 'predict')} {what}", ChanceWarning, stacklevel=3)
    elif not torch.allclose(trained, first, rtol=0, atol=rounding):
        raise _not_kept(method, "predict returns other scores for the same images")


def _rehearse_stages(build: Callable[[], Method], source: Phases, target: Phases, device: torch.device) -> None:
    """Trains a source and a target stage for a few steps, stopping once in every phase."""
    start: Mapping[str, Tensor] | None = None
    for phases_of in (source, target):
        begin = partial(_begin, build, phases_of, start)
        method, phases = begin()
        before, progress = values_of(method, phases), Progress()
        for moment in train(phases, progress=progress):
            # within the second epoch, if there is one
            if isinstance(moment, Tick):
                phase = phases[progress.phase]
                if moment.epoch * phase.steps + moment.step == min(_STEPS + 1, phase.epochs * phase.steps):
                    _check_saved(before, method, phases, progress, begin, device)
        if start is None:
            start = {name: tensor.detach().clone() for name, tensor in method.state().items()}


def _begin(
    build: Callable[[], Method], phases_of: Phases, start: Mapping[str, Tensor] | None
) -> tuple[Method, Sequence[Phase]]:
    method = build()
    if start is not None:
        method.load_state(start)
    phases = phases_of(method)
    for phase in phases:
        phase.epochs, phase.steps = min(phase.epochs, _EPOCHS), min(phase.steps, _STEPS)
    return method, phases


def _check_saved(
    before: Values,
    method: Method,
    phases: Sequence[Phase],
    progress: Progress,
    begin: Callable[[], tuple[Method, Sequence[Phase]]],
    device: torch.device,
) -> None:
    """Saves a stage, loads it into another one, and refuses what differs."""
    try:
        plain, tensors = split_tensors(save_stage(method, phases, progress))
    except StateError as error:
        raise ContractError(f"{method.name} cannot be saved within a stage: {error}.") from error
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    other = begin()
    try:
        load_stage(join_tensors(plain, copies, device), *other, Progress())
    except Exception as error:
        what = f"{method.name} cannot be restored within a stage from what it saves"
        raise ContractError(f"{what}: {type(error).__name__}: {brief(error)}.") from error
    if forgotten := unsaved(before, values_of(method, phases), values_of(*other)):
        owner = next(iter(forgotten))[0]
        names = [name for one, name in forgotten if one == owner]
        raise ContractError(
            f"{owner} of {method.name} does not save {', '.join(map(repr, names))}: a run stopped within a stage would "
            f'continue differently. Add to the class {owner}: saved = "{" ".join(names)}"'
        )


def unsaved(before: Values, trained: Values, restored: Values) -> dict[tuple[str, str], None]:
    """Returns what training has changed and loading has not restored: class and attribute, in order.

    Attributes that an object without ``state_dict`` gets only when it is used count as caches.
    """
    return {
        leaf.owner: None
        for path, leaf in trained.items()
        if leaf not in (before.get(path), restored.get(path)) and (leaf.is_direct or path in before or path in restored)
    }


def values_of(method: Method, phases: Sequence[Phase]) -> Values:
    """Returns all tensors, generators, numbers and texts that can be reached, by path."""
    found: dict[str, Leaf] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str, owner: tuple[str, str], is_direct: bool) -> None:
        if isinstance(value, bool | int | float | str):
            found[path] = Leaf(owner, is_direct, repr(value))
        elif isinstance(value, Tensor | torch.Generator):
            content = value if isinstance(value, Tensor) else value.get_state()
            found[path] = Leaf(owner, is_direct, hash_of({"": content}))
        elif id(value) not in seen:
            seen.add(id(value))
            for name, child in _children(value):
                if isinstance(value, Stateful):
                    visit(child, f"{path}.{name}", (type(value).__name__, name), True)
                else:
                    visit(child, f"{path}.{name}", owner, is_direct and isinstance(value, list | tuple | dict))

    visit(method, "method", ("", ""), False)
    visit(list(phases), "phases", ("", ""), False)
    return found


def _children(value: Any) -> list[tuple[str, Any]]:
    """Returns the parts of a value by name; objects of libraries have none."""
    if isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, list | tuple):
        return [(str(index), item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return [(str(name), item) for name, item in value.items()]
    is_foreign = type(value).__module__.partition(".")[0] in _FOREIGN and not isinstance(value, nn.Module)
    attributes = {} if is_foreign or isinstance(value, type) else getattr(value, "__dict__", {})
    computed = {name for name in attributes if isinstance(getattr(type(value), name, None), cached_property)}
    return [(name, item) for name, item in attributes.items() if name not in computed]


def _not_kept(method: Method, what: str) -> ContractError:
    return ContractError(
        f"{called(method, 'state')} does not hold all that predict needs: in a new method that loads that state, "
        f"{what}. Neither `ratp predict` nor a continued run would give this result. Let state return all that predict "
        "uses, and load_state restore it."
    )


def _scores(method: Method, source: LabelledDomain) -> Tensor:
    images = source.images[:_IMAGES].clone()
    scores = method.predict(images)
    check_scores(scores, len(images), len(source.classes), called(method, "predict"))
    return scores.detach().float().cpu()


@contextmanager
def chance_put_back(device: torch.device) -> Iterator[None]:
    """Restores the global generators afterwards: a custom method may draw from them."""
    python, numpys = random.getstate(), np.random.get_state()
    try:
        with Randomness(0).scope("trial"), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
