"""Label shift: targets whose classes are unbalanced or missing, as in real streams.

The recipe's ``label_shift`` and ``missing_classes`` thin the images of targets by class, before a test part is split
off, so what a target trains on and what it is tested on are shifted alike. Each class keeps a share of its images:

==========  ============================================================================================
half        all of a random half of the classes, of an odd number the larger half; nothing of the others
few         all of a fifth of the classes, but of at least two, and never of all; nothing of the others
long-tail   1 for the first class, 1/50 for the last, falling exponentially; in a random order of classes
90/10       all of a random half; of the others as many as make up a tenth of what remains
==========  ============================================================================================

A class with a share keeps at least one image. A fresh generator chooses classes and images of every target. It is
seeded by ``label_shift_seed`` and the names of stream and target, and not by the run's seed, so all methods and seeds
see the same images. Methods get no label from this: it only decides which images there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain, selected
from ratp.errors import ConfigError, unknown
from ratp.streams.files import some
from ratp.streams.stream import LoadedDomain
from ratp.training.recipe import LabelShift, Recipe

# Fewest images that must remain of a target.
FEWEST = 8
# Share of the last class of a long tail.
TAIL = 1 / 50


def shift_labels(stream: str, domains: Sequence[LoadedDomain], recipe: Recipe) -> list[LoadedDomain]:
    """Returns the domains of a stream, the source first, with the targets thinned; reports all mistakes at once."""
    source, *targets = domains
    missing, problems = _missing(recipe.missing_classes, [target.domain.name for target in targets])
    thinned = [source]
    for target in targets:
        try:
            thinned.append(_thinned(stream, target, recipe, missing.get(target.domain.name, ())))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return thinned


def _missing(text: str, targets: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Parses ``missing_classes`` into class names by target, and what is wrong with them."""
    found: dict[str, list[str]] = {}
    problems = []
    for part in text.split(";") if text not in ("", "none") else ():
        target, colon, classes = part.strip().partition(":")
        named = [name.strip() for name in classes.split(",")]
        if not colon or not all(named):
            problems.append(f"missing_classes must name targets and classes, e.g. {targets[-1]}:A,B; got {part!r}.")
        elif target.strip() not in targets:
            problems.append(unknown("target in missing_classes:", target.strip(), targets))
        else:
            found[target.strip()] = found.get(target.strip(), []) + named
    return found, problems


def _thinned(stream: str, loaded: LoadedDomain, recipe: Recipe, missing: Sequence[str]) -> LoadedDomain:
    """Returns a target without the images that the shift leaves out, and says so in its notes."""
    domain, kind = loaded.domain, recipe.label_shift
    if kind == "none" and not missing:
        return loaded
    asked = f"label_shift={kind}" if kind != "none" else "missing_classes"
    if not isinstance(domain, LabelledDomain):
        raise ConfigError(
            f"domain {domain.name!r} has no labels, and {asked} chooses images by their labels. Put its images into "
            "one folder per class, or leave it out of the order."
        )
    if wrong := [name for name in missing if name not in domain.classes]:
        raise ConfigError([unknown(f"class in missing_classes of {domain.name!r}:", n, domain.classes) for n in wrong])
    gone = {domain.classes.index(name) for name in missing}
    present = [label for label in torch.unique(domain.labels).tolist() if label not in gone]
    if kind != "none" and len(present) < 2:
        raise ConfigError(f"domain {domain.name!r} has images of {len(present)} class(es), and {asked} needs two.")
    generator = Randomness(recipe.label_shift_seed).generator("label shift", stream, domain.name)
    kept = _choose(domain, _shares(kind, domain.labels, present, generator), generator)
    if (count := int(kept.sum())) < FEWEST:
        raise ConfigError(
            f"domain {domain.name!r}: {asked} leaves {count} of its {len(domain)} images, and at least {FEWEST} must "
            "stay. Add images, or choose another shift."
        )
    thinned = replace(
        domain,
        images=selected(domain.images, kept),
        labels=domain.labels[kept],
        held_out=None if domain.held_out is None else domain.held_out[kept],
        manifest=None if domain.manifest is None else _manifest(domain.manifest, kept),
    )
    files = tuple(file for file, keep in zip(loaded.files, kept.tolist(), strict=False) if keep)
    return replace(loaded, domain=thinned, files=files, notes=(*loaded.notes, _note(asked, domain, thinned)))


def _shares(kind: LabelShift, labels: Tensor, present: Sequence[int], generator: torch.Generator) -> dict[int, float]:
    """Returns the share of its images that each of the given classes keeps."""
    order = [present[place] for place in torch.randperm(len(present), generator=generator).tolist()]
    last = len(order) - 1
    half = len(order) - len(order) // 2
    if kind == "none":
        return dict.fromkeys(order, 1.0)
    if kind == "long-tail":
        return {label: TAIL ** (place / last) for place, label in enumerate(order)}
    if kind == "90/10":
        counts = torch.bincount(labels)
        often, seldom = (int(counts[part].sum()) for part in (order[:half], order[half:]))
        parts = min(1.0, 9 * seldom / often), min(1.0, often / (9 * seldom))
        return {label: parts[place >= half] for place, label in enumerate(order)}
    stay = half if kind == "half" else min(max(2, round(len(order) / 5)), last)
    return dict.fromkeys(order[:stay], 1.0)


def _choose(domain: LabelledDomain, shares: dict[int, float], generator: torch.Generator) -> Tensor:
    """Returns a mask of the images that remain; a test part of the domain's own is thinned like the rest."""
    kept = torch.zeros(len(domain), dtype=torch.bool)
    parts = (torch.ones_like(kept),) if domain.held_out is None else (~domain.held_out, domain.held_out)
    for part in parts:
        for label, share in sorted(shares.items()):
            members = ((domain.labels == label) & part).nonzero().squeeze(1)
            shuffled = members[torch.randperm(len(members), generator=generator)]
            kept[shuffled[: max(round(share * len(members)), 1)]] = True
    return kept


def _manifest(manifest: str, kept: Tensor) -> str:
    """Returns the hash of the files that remain."""
    return hashlib.sha256(manifest.encode() + kept.numpy().tobytes()).hexdigest()


def _note(asked: str, before: LabelledDomain, after: LabelledDomain) -> str:
    """Says what remains of a target."""
    names = before.classes
    counts = torch.bincount(after.labels, minlength=len(names)).tolist()
    absent = [name for name, count in zip(names, counts, strict=True) if not count]
    most, fewest = max(counts), min(filter(None, counts))
    spread = f"{most:,} to {fewest:,} per class" if most > fewest else f"{most:,} per class"
    lacks = f", none of {some(absent)}" if absent else ""
    return f"{before.name}: {asked} leaves {len(after):,} of {len(before):,} images, {spread}{lacks}."
