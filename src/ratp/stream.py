"""A stream: one labelled source domain, then unlabelled targets in their order of arrival.

Written ``scan>photo>font>street``. The labels of the targets stay in :attr:`Stream.tests`, which only the
evaluator reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratp.data import demo
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, unknown
from ratp.network import NetworkConfig
from ratp.randomness import Randomness
from ratp.recipe import Recipe

SOURCE_TEST_SHARE = 0.2


@dataclass(frozen=True)
class StreamSpec:
    """A stream by name: what it consists of and how it is trained on.

    Attributes:
        name: As written on the command line.
        title: What it is, in a line.
        domains: Codes of its domains, each with a description.
        orders: Orders by name; the one called ``default`` is used unless another is asked for.
        recipe: Sizes all methods share on it.
        load: From a code to the domain.
    """

    name: str
    title: str
    domains: Mapping[str, str]
    orders: Mapping[str, tuple[str, ...]]
    recipe: Recipe
    load: Callable[[str], LabelledDomain]


STREAMS: dict[str, StreamSpec] = {
    spec.name: spec
    for spec in (
        StreamSpec(
            name="demo",
            title="Embedded digits, 32×32: real scans, then photographs, fonts and street numbers",
            domains=demo.DOMAINS,
            orders={"default": tuple(demo.DOMAINS), "reverse": tuple(reversed(demo.DOMAINS))},
            recipe=Recipe(network=NetworkConfig(width=0.25), epochs=12, steps=50, lr=0.05),
            load=demo.demo_domain,
        ),
    )
}


@dataclass(frozen=True)
class Stream:
    """Domains in their order of arrival.

    Attributes:
        name: Name of the benchmark it comes from.
        source: Training part of the labelled source.
        targets: Training images of the targets, without labels.
        tests: Test set of every domain, the source first: for the evaluator only.
        fingerprints: sha256 of each domain's images, labels and split.
    """

    name: str
    source: LabelledDomain
    targets: tuple[UnlabelledDomain, ...]
    tests: tuple[LabelledDomain, ...]
    fingerprints: Mapping[str, str]

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the domains."""
        return tuple(test.name for test in self.tests)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return self.source.classes

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self.source.images.shape[2:]
        return int(height), int(width)


def find_stream(name: str) -> StreamSpec:
    """The stream called ``name``.

    Raises:
        ConfigError: If there is none, with the nearest name.
    """
    if name not in STREAMS:
        raise ConfigError(unknown("stream", name, STREAMS))
    return STREAMS[name]


def parse_order(text: str, spec: StreamSpec, *, subset: bool = False) -> tuple[str, ...]:
    """An order of domains from its name or from its spelling, e.g. ``scan>photo>font>street``.

    Args:
        text: Name of an order of the stream, or codes joined by ``>``, ``→`` or commas.
        spec: The stream.
        subset: Whether domains may be left out.

    Raises:
        ConfigError: With every mistake: unknown, repeated and missing domains.
    """
    if text.strip() in spec.orders:
        return spec.orders[text.strip()]
    codes = [code.strip() for code in text.replace("→", ">").replace(",", ">").split(">")]
    example = ">".join(spec.orders["default"])
    if len(codes) == 1:
        raise ConfigError(
            unknown("order", text, spec.orders)
            + f" Or write the domains one after another, e.g. '{example}', in quotes: a shell takes > for itself."
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
            "or ask for a subset (--subset)."
        )
    if problems:
        raise ConfigError(problems)
    return tuple(codes)


def make_stream(name: str, domains: list[LabelledDomain], seed: int) -> Stream:
    """A stream from labelled domains: splits them and takes the labels off the targets.

    A domain with a test part of its own is split by it. Otherwise a fifth of the source, stratified by
    class, is held out, and a target is both trained on (without labels) and tested on as a whole, as the
    paper does.

    Raises:
        ConfigError: If there are fewer than two domains, or the domains do not fit together.
    """
    if len(domains) < 2:
        raise ConfigError(f"a stream needs a source and at least one target, got {len(domains)} domain(s).")
    source, *targets = domains
    problems = [
        f"domain {t.name!r} has other classes than the source {source.name!r}: {', '.join(t.classes)}."
        for t in targets
        if t.classes != source.classes
    ]
    problems += [
        f"domain {t.name!r} has images of {tuple(t.images.shape[2:])}, the source of {tuple(source.images.shape[2:])}."
        for t in targets
        if t.images.shape[2:] != source.images.shape[2:]
    ]
    problems += [
        f"two domains are called {name!r}: give each its own name."
        for name, count in Counter(domain.name for domain in domains).items()
        if count > 1
    ]
    if problems:
        raise ConfigError(problems)
    if source.held_out is None:
        generator = Randomness(seed).generator("source split")
        source = replace(source, held_out=stratified_mask(source.labels, SOURCE_TEST_SHARE, generator))
    parts = [_train_and_test(domain) for domain in (source, *targets)]
    return Stream(
        name=name,
        source=parts[0][0],
        targets=tuple(train.unlabelled() for train, _ in parts[1:]),
        tests=tuple(test for _, test in parts),
        fingerprints={domain.name: domain.fingerprint() for domain in domains},
    )


def _train_and_test(domain: LabelledDomain) -> tuple[LabelledDomain, LabelledDomain]:
    if domain.held_out is None:
        return domain, domain
    tests = int(domain.held_out.sum())
    if tests in (0, len(domain)):
        raise ConfigError(
            f"domain {domain.name!r} with {len(domain)} images cannot be split: {tests} would be for testing, "
            f"{len(domain) - tests} for training. Both need at least one; give it more images a class."
        )
    return domain.subset(~domain.held_out), domain.subset(domain.held_out)


def stratified_mask(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A random bool mask that is true for about ``share`` of every class."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels):
        members = (labels == label).nonzero().squeeze(1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        mask[shuffled[: round(share * len(members))]] = True
    return mask


def load_stream(name: str, order: str = "default", seed: int = 2022, *, subset: bool = False) -> Stream:
    """Loads a stream by name.

    Args:
        name: Name of the stream, e.g. ``"demo"``.
        order: Name or spelling of the order of its domains.
        seed: Seed of the split, where the data has no test part of its own.
        subset: Whether the order may leave domains out.

    Raises:
        ConfigError: If stream, domain or order do not exist.
    """
    spec = find_stream(name)
    codes = parse_order(order, spec, subset=subset)
    return make_stream(name, [spec.load(code) for code in codes], seed)
