"""How the tensors of a file fit those of a backbone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ratp.backbones import NAMES, expected_tensors
from ratp.errors import RatpError

# Ratp's own networks hold their backbone under this name.
OWN_PREFIX = "backbone."
# What libraries call the layers after the features: of no use to a backbone, and no sign of a wrong file.
HEADS = frozenset(
    {"fc", "classifier", "classif", "head", "heads", "head_dist", "heads_dist", "aux_head", "last_linear", "linear"}
    | {"logits", "output", "projector", "projection_head", "predictor"}
)
_MOST_NAMED = 3


@dataclass(frozen=True)
class Fit:
    """How the tensors of a file fit those of a backbone.

    Attributes:
        expected: How many tensors the backbone has.
        found: How many the file has.
        names: From the backbone's names to the file's, where both agree.
        missing: Names only the backbone has.
        strange: Names only the file has, that are none of a classifier.
        misshapen: Sentences on tensors of another shape or kind.
        ignored: Names in the file that are not needed.
    """

    expected: int
    found: int
    names: Mapping[str, str]
    missing: Sequence[str]
    strange: Sequence[str]
    misshapen: Sequence[str]
    ignored: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the backbone gets all it needs, and the file is not that of a larger one."""
        return not (self.missing or self.strange or self.misshapen)

    def explain(self) -> str:
        """What was expected, what was found."""
        told = [f"Expected {self.expected} tensors, found {self.found}"]
        for what, names in (("missing", self.missing), ("of another shape", self.misshapen), ("unknown", self.strange)):
            if names:
                told.append(f"{len(names)} {what} ({abbreviate(names, '; ' if names is self.misshapen else ', ')})")
        return ", ".join(told) + "."


def best_fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], prefixes: Iterable[str]) -> Fit:
    """The first way to take a prefix off the names of ``found`` that fits, or else the one that fits most."""
    fits: list[Fit] = []
    for prefix in prefixes:
        fit = _fit(expected, found, prefix)
        if fit.fits:
            return fit
        fits.append(fit)
    return max(fits, key=lambda fit: (len(fit.names) + len(fit.misshapen), -len(fit.strange)))


def _fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], prefix: str) -> Fit:
    inside = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
    names, missing, misshapen = {}, [], []
    for name, wanted in expected.items():
        optional = name.endswith("num_batches_tracked")
        problem = _differ(wanted, found[inside[name]]) if name in inside else None
        if name in inside and problem is None:
            names[name] = inside[name]
        elif not optional and problem is None:
            missing.append(name)
        elif not optional:
            misshapen.append(f"{name}: expected {problem}")
    extra = [name for name in inside if name not in expected]
    heads = [inside[name] for name in extra if name.split(".")[0] in HEADS]
    strange = [name for name in extra if name.split(".")[0] not in HEADS]
    outside = [name for name in found if not name.startswith(prefix)]
    return Fit(len(expected), len(found), names, missing, strange, misshapen, (*heads, *outside))


def _differ(wanted: Tensor, found: Tensor) -> str | None:
    """What was wanted and what was found, if the one cannot take the place of the other."""
    if wanted.shape == found.shape and wanted.is_floating_point() == found.is_floating_point():
        return None
    shapes = ["×".join(map(str, tensor.shape)) or "a number" for tensor in (wanted, found)]
    if wanted.shape == found.shape:
        shapes = [f"{shape} {tensor.dtype}" for shape, tensor in zip(shapes, (wanted, found), strict=True)]
    return f"{shapes[0]}, found {shapes[1]}"


def fitting_backbone(found: Mapping[str, Tensor], prefixes: Sequence[str]) -> str | None:
    """The name of a backbone that the tensors fit, of those that need no timm."""
    return next((name for name in NAMES if best_fit(expected_tensors(name), found, prefixes).fits), None)


def refuse_non_numbers(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises an error if there is a NaN or an infinity among the weights.

    Args:
        name: What the weights are called.
        tensors: The tensors by name.

    Raises:
        RatpError: With the names of those tensors.
    """
    bad = [key for key, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise RatpError(f"the weights {name} hold NaN or infinities: {abbreviate(bad)}. Get them anew.")


def abbreviate(names: Sequence[str], separator: str = ", ") -> str:
    """The first few names, and how many more there are."""
    rest = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return separator.join([*names[:_MOST_NAMED], *rest])
