"""What a method gives, looked at where it is taken: a mistake is told as a sentence, and not found much later.

What a phase gives while it trains is looked at by the loop (:mod:`ratp.phase`). A method is named here by a text of the
form ``predict of shot``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ratp.errors import RatpError
from ratp.phase import Phase


class ContractError(RatpError):
    """A method gives something else than is asked of every method."""


class NotYetError(ContractError):
    """A method gives nothing where it may have something once it has learnt."""


def called(method: object, function: str) -> str:
    """What a function of a method is called in messages."""
    return f"{function} of {getattr(method, 'name', type(method).__name__)}"


def check_phases(phases: object, giver: str) -> None:
    """Refuses what is no list of phases, and phases that do not say how long they are.

    Raises:
        ContractError: With what was asked for and what was given.
    """
    wanted = f"{giver} must return a list of phases, [] if there is nothing to do"
    if not isinstance(phases, Sequence):
        raise ContractError(f"{wanted}; got {_shown(phases)}.")
    for phase in phases:
        if not isinstance(phase, Phase):
            raise ContractError(f"{wanted}; got one that holds {_shown(phase)}.")
        kind = type(phase).__name__
        if not isinstance(getattr(phase, "name", None), str):
            raise ContractError(f"{giver}: the phase {kind} needs a name, a text.")
        for size in ("epochs", "steps"):
            value = getattr(phase, size, None)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                asked = f"the phase {kind} needs {size}, a whole number from 0"
                raise ContractError(f"{giver}: {asked}; got {_shown(value)}.")


def check_state(state: object, giver: str) -> None:
    """Refuses what is not all tensors, by name.

    Raises:
        ContractError: With what was asked for and what was given.
    """
    wanted = f"{giver} must return tensors by name"
    if not isinstance(state, Mapping):
        raise ContractError(f"{wanted}; got {_shown(state)}.")
    for name, value in state.items():
        if not isinstance(name, str):
            raise ContractError(f"{wanted}; the name {name!r} is no text.")
        if value is None:
            raise NotYetError(f"{wanted}; {name!r} is None. Leave out what there is not.")
        if not isinstance(value, Tensor):
            hint = "pack({…}) joins parts" if isinstance(value, Mapping) else "torch.tensor(…) makes one of numbers"
            raise ContractError(f"{wanted}; {name!r} is {_shown(value)}. {hint}.")


def check_scores(scores: object, images: int, classes: int, giver: str) -> None:
    """Refuses what is no table with a row an image and a column a class. No value is looked at.

    Raises:
        ContractError: With what was asked for and what was given.
    """
    wanted = f"{giver} must return a score for every image and class, floating-point of shape ({images}, {classes})"
    if not isinstance(scores, Tensor):
        raise ContractError(f"{wanted}; got {_shown(scores)}.")
    if scores.shape != (images, classes) or not scores.is_floating_point():
        kind = str(scores.dtype).removeprefix("torch.")
        hint = " Return the scores, not the best class." if scores.shape == (images,) else ""
        raise ContractError(f"{wanted}; got {kind} of shape {tuple(scores.shape)}.{hint}")


def _shown(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain else f"an object of type {type(value).__name__}"
