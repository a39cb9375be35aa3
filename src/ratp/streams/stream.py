"""A stream: one labelled source domain, then unlabelled targets in their order of arrival.

Written ``scan>photo>font>street``. Labels of targets are in :attr:`Stream.tests`, which only the evaluator reads, and
in :attr:`Stream.answers`, for methods that declare that they use target labels.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.data.cache.decoded import OnBad
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, unknown
from ratp.streams.catalogue import StreamInfo
from ratp.training.recipe import Recipe

SOURCE_TEST_SHARE = 0.2

Domain = LabelledDomain | UnlabelledDomain
ExtraClasses = Literal["stop", "drop"]
# Called with a domain's name, the number of its decoded files and that of all its files.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DataOptions:
    """How to read images from files.

    Attributes:
        folder: Folder of the benchmarks; by default ``$RATP_DATA``, else ``data`` in the working folder.
        on_bad: What to do about unusable image files.
        extra_classes: What to do about classes of a target that the source lacks.
        progress: Called with a domain's name, the number of its decoded files and that of all its files.
        classes: Class names in the order of the logits, for own images; None: the source's folders in their order.
    """

    folder: Path | None = None
    on_bad: OnBad = "stop"
    extra_classes: ExtraClasses = "stop"
    progress: Report | None = None
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class LoadedDomain:
    """A domain with its provenance."""

    domain: Domain  # its images, with labels where there are any
    origin: str | None = None  # how it differs from the published data, e.g. that it was rebuilt
    files: tuple[str, ...] = ()  # file name of every image, if they come from files
    notes: tuple[str, ...] = ()  # what the user should know
    test: LabelledDomain | None = None  # its test set, if it is no part of the domain
    is_gone: bool = False  # whether its images are gone, and blank ones stand for them

    def fingerprint(self) -> str:
        """Identifies the domain and its test set."""
        own = self.domain.fingerprint()
        return own if self.test is None else hashlib.sha256(f"{own} {self.test.fingerprint()}".encode()).hexdigest()


@dataclass(frozen=True)
class StreamSpec(StreamInfo):
    """A stream with all that is needed to load it and train on it."""

    recipe: Recipe  # sizes that all methods share on it
    # loads domains from their codes, the source first, and the side of the images
    load: Callable[[Sequence[str], int, DataOptions], list[LoadedDomain]]
    # maps codes to the folders or zips that ``load`` reads; None if it generates its images
    places: Callable[[Sequence[str], DataOptions], Mapping[str, Path]] | None = None
    values: str = ""  # name under which methods list their values for the stream; empty for the stream's own name
    needs_order: bool = False  # whether the user must give an order, because there is no natural one
    unlabelled: frozenset[str] = frozenset()  # codes of domains to read without labels, whatever folders they have


@dataclass(frozen=True)
class Stream:
    """Domains in their order of arrival.

    Attributes:
        name: Name of the benchmark it comes from.
        order: Names of the domains, the source first.
        source: Training part of the labelled source.
        targets: Training images of the targets, without labels.
        tests: Test set of every domain, the source first: for the evaluator only. None for a domain without labels.
        answers: Training images of the targets with labels, for oracles only; None for a domain without labels.
        fingerprints: By domain, the hash of its files, or of its images and labels if there are no files.
        origins: By domain, how it differs from the published data.
        files: File names of the domains without labels.
        test_files: By domain with labels, the file names of its test images, if they come from files.
        image_counts: By domain, its images for training and for testing (None without labels), and whether both are
            the same images.
        notes: What the user should know about the images.
        gone: Domains of an earlier run whose images are gone: they can be neither trained on nor measured.
    """

    name: str
    order: tuple[str, ...]
    source: LabelledDomain
    targets: tuple[UnlabelledDomain, ...]
    tests: tuple[LabelledDomain | None, ...]
    fingerprints: Mapping[str, str]
    answers: tuple[LabelledDomain | None, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    test_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    image_counts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return self.source.classes

    @property
    def test_counts(self) -> list[int | None]:
        """How many images every domain is tested on; None for a domain without labels."""
        return [None if test is None else len(test) for test in self.tests]

    @property
    def unlabelled(self) -> tuple[UnlabelledDomain, ...]:
        """The targets without labels."""
        pairs = zip(self.targets, self.tests[1:], strict=True)
        return tuple(target for target, test in pairs if test is None and target.name not in self.gone)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self.source.images.shape[2:]
        return int(height), int(width)


def parse_order(asked: str | Sequence[str], spec: StreamSpec, *, subset: bool = False) -> tuple[str, ...]:
    """Parses an order of domains: its name, its spelling, e.g. ``scan>photo>font>street``, or a list of codes.

    Codes are joined by ``>``, ``→`` or commas. Domains may be left out only if ``subset``.
    """
    text = asked if isinstance(asked, str) else ">".join(asked)
    if spec.needs_order and text.strip() == "default":
        example = ">".join(spec.domains)
        raise ConfigError(f"give the order in which the domains arrive, the source first, e.g. --order '{example}'.")
    if text.strip() in spec.orders:
        return spec.orders[text.strip()]
    codes = _split(asked, spec) if isinstance(asked, str) else list(asked)
    example = ">".join(spec.orders["default"])
    if len(codes) < 2:
        raise ConfigError(
            unknown("order", text, spec.orders)
            + f" Or write the domains one after another, e.g. '{example}', in quotes, because a shell interprets >."
        )
    problems = [f"the order {text!r} has an empty place: write e.g. {example!r}."] if "" in codes else []
    problems += [
        unknown("domain", code, spec.domains) for code in dict.fromkeys(codes) if code not in spec.domains and code
    ]
    problems += [
        f"the order {text!r} repeats domain {code!r}: each may come once."
        for code in dict.fromkeys(codes)
        if code in spec.domains and codes.count(code) > 1
    ]
    missing = [code for code in spec.domains if code not in codes]
    if missing and not subset and not problems:
        problems.append(
            f"the order {text!r} leaves out {', '.join(missing)}: name every domain, e.g. {example!r}, "
            "or allow a subset (--subset; in a study, subset = true)."
        )
    if problems:
        raise ConfigError(problems)
    return tuple(codes)


def _split(text: str, spec: StreamSpec) -> list[str]:
    """Splits a spelling into codes, also at commas unless a name contains one."""
    plain = text.replace("→", ">")
    codes, further = ([code.strip() for code in t.split(">")] for t in (plain, plain.replace(",", ">")))
    return codes if all(code in spec.domains for code in codes) else further


def make_stream(name: str, domains: Sequence[Domain | LoadedDomain], seed: int, *, hold_out: float = 0.0) -> Stream:
    """Builds a stream from domains: splits them and removes the labels of the targets.

    A domain with a test part is split by it. Otherwise a fifth of the source, stratified by class, is held out; a
    target is both trained on (without labels) and tested on as a whole, as in the paper, unless ``hold_out`` is set:
    the share of every target to test on and not train on. The source comes first; ``seed`` determines the splits.
    """
    loaded = [item if isinstance(item, LoadedDomain) else LoadedDomain(item) for item in domains]
    parts = [item.domain for item in loaded]
    source = _checked(parts)
    fingerprints = {item.domain.name: item.fingerprint() for item in loaded}  # of the domains as given
    randomness = Randomness(seed)
    if source.held_out is None and loaded[0].test is None and not loaded[0].is_gone:
        held_out = stratified_mask(source.labels, SOURCE_TEST_SHARE, randomness.generator("source split"))
        loaded[0] = replace(loaded[0], domain=replace(source, held_out=held_out))
    loaded[1:] = [_held_out(item, hold_out, randomness) if hold_out else item for item in loaded[1:]]
    seen, tests = zip(*map(_train_and_test, loaded), strict=True)
    answers = [part if isinstance(part, LabelledDomain) else None for part in seen[1:]]
    test_files = {item.domain.name: _test_files(item) for item in loaded}
    return Stream(
        name=name,
        order=tuple(part.name for part in parts),
        source=seen[0],
        targets=tuple(part.unlabelled() if isinstance(part, LabelledDomain) else part for part in seen[1:]),
        tests=tests,
        answers=tuple(answers),
        fingerprints=fingerprints,
        origins={item.domain.name: item.origin for item in loaded if item.origin},
        files={
            item.domain.name: item.files
            for item in loaded
            if isinstance(item.domain, UnlabelledDomain) and not item.is_gone
        },
        notes=tuple(note for item in loaded for note in item.notes),
        test_files={name: files for name, files in test_files.items() if files},
        image_counts={
            item.domain.name: _counts(trained, test)
            for item, trained, test in zip(loaded, seen, tests, strict=True)
            if not item.is_gone
        },
        gone=tuple(item.domain.name for item in loaded if item.is_gone),
    )


def _held_out(item: LoadedDomain, share: float, randomness: Randomness) -> LoadedDomain:
    """Chooses images of a target to test on, if it has labels and no test images yet."""
    target = item.domain
    if isinstance(target, UnlabelledDomain) or target.held_out is not None or item.test is not None:
        return item
    # independent of the labels, which a target does not have
    chance = torch.rand(len(target), generator=randomness.generator("target split", target.name))
    return replace(item, domain=replace(target, held_out=chance.argsort().argsort() < round(share * len(target))))


def _counts(trained: Domain, tested: LabelledDomain | None) -> dict[str, Any]:
    return {
        "trained": len(trained),
        "tested": None if tested is None else len(tested),
        "same": tested is not None and trained is tested,
    }


def _test_files(item: LoadedDomain) -> tuple[str, ...]:
    """Returns the file names of a domain's test images, if it has labels and they are known."""
    if isinstance(item.domain, UnlabelledDomain) or item.test is not None:
        return ()
    held_out = item.domain.held_out
    return item.files if held_out is None else tuple(compress(item.files, held_out.tolist()))


def _checked(parts: Sequence[Domain]) -> LabelledDomain:
    """Checks that the domains fit together and returns the source, which may wait for its first target."""
    if not parts:
        raise ConfigError("a stream needs a source, got no domain.")
    source, *targets = parts
    if not isinstance(source, LabelledDomain):
        raise ConfigError(f"the source {source.name!r} has no labels: put its images into one folder per class.")
    problems = [
        f"domain {t.name!r} has other classes than the source {source.name!r}: {', '.join(t.classes)}."
        for t in targets
        if isinstance(t, LabelledDomain) and t.classes != source.classes
    ]
    problems += [
        f"domain {t.name!r} has images of {tuple(t.images.shape[2:])}, the source of {tuple(source.images.shape[2:])}."
        for t in targets
        if t.images.shape[2:] != source.images.shape[2:]
    ]
    problems += [
        f"two domains are called {name!r}: give each its own name."
        for name, count in Counter(part.name for part in parts).items()
        if count > 1
    ]
    if len(source.classes) < 2:
        problems.append(f"the source {source.name!r} has a single class ({source.classes[0]}): it needs at least two.")
    if problems:
        raise ConfigError(problems)
    return source


def _train_and_test(item: LoadedDomain) -> tuple[Domain, LabelledDomain | None]:
    """Returns what to train on and what to test on."""
    domain = item.domain
    if isinstance(domain, UnlabelledDomain) or item.test is not None or item.is_gone:
        return domain, item.test
    if domain.held_out is None:
        return domain, domain
    tests = int(domain.held_out.sum())
    if tests in (0, len(domain)):
        raise ConfigError(
            f"domain {domain.name!r} with {len(domain)} images cannot be split: {tests} would be for testing, "
            f"{len(domain) - tests} for training. Both need at least one; add images to every class."
        )
    return domain.subset(~domain.held_out), domain.subset(domain.held_out)


def stratified_mask(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Returns a random bool mask that is true for about ``share`` of every class."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels):
        members = (labels == label).nonzero().squeeze(1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        mask[shuffled[: round(share * len(members))]] = True
    return mask
