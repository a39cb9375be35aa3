"""Matches the tensors of a file with those of a backbone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ratp.errors import RatpError
from ratp.networks.backbones import NAMES, expected_tensors

# Names that libraries give to layers after the features, which a backbone ignores.
HEADS = frozenset(
    {"fc", "classifier", "classif", "head", "heads", "head_dist", "heads_dist", "aux_head", "last_linear", "linear"}
    | {"logits", "output", "projector", "projection_head", "predictor"}
)
_MOST_NAMED = 3


@dataclass(frozen=True)
class Match:
    """How the tensors of a file match those of a backbone."""

    counts: tuple[int, int]  # how many tensors the backbone and the file have
    names: Mapping[str, str]  # from the backbone's names to the file's, where both agree
    missing: Sequence[str]  # names only the backbone has
    strange: Sequence[str]  # names only the file has, other than a classifier's
    misshapen: Sequence[str]  # one phrase per tensor of another shape or kind
    ignored: tuple[str, ...]  # names in the file that are not needed

    @property
    def complete(self) -> bool:
        """Whether the backbone gets all it needs, and the file is not that of a larger one."""
        return not (self.missing or self.strange or self.misshapen)

    @property
    def score(self) -> tuple[int, int]:
        """Larger for a better match."""
        return len(self.names) + len(self.misshapen), -len(self.strange)

    def explain(self) -> str:
        """Describes in a sentence what was expected and what was found."""
        parts = ["Expected {} tensors, found {}".format(*self.counts)]
        for what, names in (("missing", self.missing), ("of another shape", self.misshapen), ("unknown", self.strange)):
            if names:
                parts.append(f"{len(names)} {what} ({abbreviate(names, '; ' if names is self.misshapen else ', ')})")
        return ", ".join(parts) + "."


def best_match(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], prefixes: Iterable[str]) -> Match:
    """Removes each prefix from the names of ``found``; returns the first complete match, or else the best one."""
    matches = []
    for prefix in prefixes:
        matches.append(_match(expected, found, prefix))
        if matches[-1].complete:
            return matches[-1]
    return max(matches, key=lambda match: match.score)


def _match(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], prefix: str) -> Match:
    inside = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
    names, missing, misshapen = {}, [], []
    for name, wanted in expected.items():
        given = found[inside[name]] if name in inside else None
        if given is not None and _kind(given) == _kind(wanted):
            names[name] = inside[name]
        elif name.endswith("num_batches_tracked"):
            continue
        elif given is None:
            missing.append(name)
        else:
            misshapen.append(f"{name}: expected {_describe(wanted, given)}, found {_describe(given, wanted)}")
    extra = [name for name in inside if name not in expected]
    strange = [name for name in extra if name.split(".")[0] not in HEADS]
    heads = [inside[name] for name in extra if name not in strange]
    outside = [name for name in found if not name.startswith(prefix)]
    return Match((len(expected), len(found)), names, missing, strange, misshapen, (*heads, *outside))


def _kind(tensor: Tensor) -> tuple[object, bool]:
    return tensor.shape, tensor.is_floating_point()


def _describe(tensor: Tensor, other: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "a number"
    return f"{shape} {tensor.dtype}" if tensor.shape == other.shape else shape


def matching_backbone(found: Mapping[str, Tensor], prefixes: Sequence[str]) -> str | None:
    """Returns the name of the built-in backbone that the tensors belong to, if any."""
    return next((name for name in NAMES if best_match(expected_tensors(name), found, prefixes).complete), None)


def refuse_non_finite(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises a RatpError if there is a NaN or an infinity among the weights called ``name``."""
    bad = [key for key, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise RatpError(f"the weights {name} hold NaN or infinities: {abbreviate(bad)}. Download or export them again.")


def abbreviate(names: Sequence[str], separator: str = ", ") -> str:
    """Lists the first few names, and how many more there are."""
    rest = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return separator.join([*names[:_MOST_NAMED], *rest])
