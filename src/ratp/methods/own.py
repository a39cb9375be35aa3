"""Methods of a user's own, each from one Python file, and what is tried with them that ours are tested for."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ratp.contract import ContractError, NotYetError, called, check_scores
from ratp.device_copies import with_images_on
from ratp.domain import LabelledDomain
from ratp.errors import ConfigError, brief
from ratp.method import Method
from ratp.network import Network
from ratp.notes import Note
from ratp.precision import Precision
from ratp.randomness import Randomness

_MODULE = "ratp_user_method_"
_DESCRIPTION = ("name", "title", "family", "paper", "config_type")
# Images that are tried, at most.
_SOME = 32
# How far scores may lie apart that were computed in the same way, as a share of the largest.
_ROUNDING: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-1}


class ChanceWarning(Note):
    """What a method predicts is a matter of chance, so that it cannot be compared."""


def from_file(path: Path) -> type[Method]:
    """The method a Python file defines.

    Raises:
        ConfigError: If the file cannot be loaded, or does not define exactly one whole method.
    """
    module = _loaded(path)
    own = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, Method) and item.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(item.__name__ for item in own) or "none"
        raise ConfigError(f"method file {str(path)!r} must define exactly one Method, found {names}.")
    method = own[0]
    lacking = [*(name for name in _DESCRIPTION if not hasattr(method, name)), *sorted(method.__abstractmethods__)]
    if lacking:
        raise ConfigError(f"method {method.__name__} in {str(path)!r} lacks {', '.join(lacking)}.")
    if not isinstance(method.name, str) or not method.name.strip():
        raise ConfigError(f"method {method.__name__} in {str(path)!r} needs a name, got {method.name!r}.")
    if not is_dataclass(method.config_type):
        raise ConfigError(f"config_type of {method.__name__} in {str(path)!r} must be a dataclass of switches.")
    return method


def file_hash(method: type[Method]) -> str | None:
    """sha256 of the file of a user's own method: once it is edited, it is another method. None for ours."""
    _, marker, digest = method.__module__.partition(_MODULE)
    return digest if marker else None


def own_traceback(error: Exception) -> str | None:
    """An error that came out of a user's own method, with the lines of its file alone; None for any other error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = {f.f_code.co_filename for f in frames if str(f.f_globals.get("__name__")).startswith(_MODULE)}
    if not files:
        return None
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        part.stack = traceback.StackSummary.from_list([line for line in part.stack if line.filename in files])
        part = part.__cause__ or part.__context__
    return f"the run ended with an error in the file of its method:\n{''.join(told.format()).rstrip()}"


def rehearse(method: Method, source: LabelledDomain, device: torch.device, *, told: bool) -> None:
    """Asks a method for all that it can give before training, so that mistakes are told then.

    What it cannot give as long as it has learnt nothing is looked at in the run.

    Args:
        method: Built for this, and not to be used afterwards: nobody knows what a user's file changes when it is asked.
        source: Some of its images are shown, as a target too.
        device: What it computes on.
        told: Whether it is told the labels of targets.

    Raises:
        ContractError: If it gives something else than is asked of every method.
    """
    some = torch.arange(min(len(source), _SOME))
    domain = with_images_on(replace(source.subset(some), name="rehearsal"), device)
    questions: tuple[Callable[[], object], ...] = (
        lambda: _scores(method, source),
        method.state,
        lambda: method.source_phases(domain),
        lambda: method.told_phases(domain) if told else method.target_phases(domain.unlabelled()),
    )
    with _chance_put_back(device):
        for ask in questions:
            try:
                ask()
            except Exception as error:
                if isinstance(error, ContractError) and not isinstance(error, NotYetError):
                    raise


def give_generators(method: Method, randomness: Randomness, device: torch.device, stage: int) -> None:
    """Lets dropout of the method's networks draw from generators of a stage, unless the method gives it others.

    Without, it would draw from the one that all of torch shares, and no run could be repeated.
    """
    for name, value in vars(method).items():
        if isinstance(value, Network):
            value.use_generator(randomness.generator("dropout of", name, stage, device=device))


def check_kept(
    method: Method, build: Callable[[], Method], source: LabelledDomain, device: torch.device, precision: Precision
) -> None:
    """Refuses a method that predicts something else once it is built anew and has taken back its state.

    The method itself is asked for its state and to predict once, which changes nothing.

    Args:
        method: After a stage.
        build: Builds another one.
        source: Some of its images are predicted.
        device: What is computed on.
        precision: How exactly.

    Raises:
        ContractError: If so.
    """
    with _chance_put_back(device):
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in method.state().items()}
        trained = _scores(method, source)
        if not trained.isfinite().all():  # who measures it will tell
            return
        asked = "load_state"
        try:
            another = build()
            another.load_state(kept)
            asked = "predict"
            first, second = _scores(another, source), _scores(another, source)
        except torch.OutOfMemoryError:  # there is room for one, which is all that a run needs
            return
        except Exception as error:
            raise _not_kept(method, f"{asked} fails with {type(error).__name__}: {brief(error)}") from error
    rounding = _ROUNDING[precision] * trained.abs().max().item()
    if not torch.allclose(first, second, rtol=0, atol=rounding, equal_nan=True):
        told = "says something else of the same images each time, so it is unknown whether state holds all it needs"
        warnings.warn(f"{called(method, 'predict')} {told}", ChanceWarning, stacklevel=3)
    elif not torch.allclose(trained, first, rtol=0, atol=rounding):
        raise _not_kept(method, "predict says something else of the same images")


def _not_kept(method: Method, what: str) -> ContractError:
    return ContractError(
        f"{called(method, 'state')} does not hold all that predict needs: in a method built anew and given that state, "
        f"{what}. Neither `ratp predict` nor a run that goes on would give this result. Let state return all that "
        "predict uses, and load_state take it back."
    )


def _scores(method: Method, source: LabelledDomain) -> Tensor:
    images = source.images[:_SOME].clone()
    scores = method.predict(images)
    check_scores(scores, len(images), len(source.classes), called(method, "predict"))
    return scores.detach().float().cpu()


@contextmanager
def _chance_put_back(device: torch.device) -> Iterator[None]:
    """Leaves the generators that all share as they were: a user's method may draw from them while it trains."""
    python, numpys = random.getstate(), np.random.get_state()
    try:
        with Randomness(0).scope("trial"), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


def _loaded(path: Path) -> ModuleType:
    """The file as a module, named by its contents."""
    if not path.is_file():
        raise ConfigError(f"method file {str(path)!r} does not exist.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{_MODULE}{digest}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ConfigError(f"method file {str(path)!r} cannot be loaded: {type(error).__name__}: {error}.") from error
    return module
