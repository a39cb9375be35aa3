"""How often the guard refuses good stages, and how often bad ones, on real images.

Every method goes through a stream of real domains, whose stages are the good ones. Beside them, from the same model, it
is given bad ones, and the state before is put back after each:

* noise: pixels drawn at random; blank: images of one random colour each;
* unrelated: photographs and paintings for digits, street numbers for objects;
* one class: only the images of the domain's most frequent class;
* hot: the domain itself, with a learning rate many times too large.

Whether a stage did harm is measured with labels, which the guard does not see: half of what the model knew beyond
chance of the domains before is gone. Networks are narrow and stages short, for CPUs (``CASES``). Needs the images of
``digits`` and ``pacs`` (``$RATP_DATA``).

Prints a table and writes ``benchmarks/guard.json``, of which ``tools/docs.py`` makes the tables in ``docs/guard.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import as_dict, override
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.environment import describe_environment
from ratp.errors import RatpError
from ratp.evaluate import accuracy
from ratp.files import write_json
from ratp.guard import Watch
from ratp.method import Method
from ratp.plan import RunPlan, RunRequest, resolve
from ratp.randomness import Randomness
from ratp.stream import DataOptions, LoadedDomain, Stream
from ratp.streams import STREAMS as SPECS

IMAGES, TEST_IMAGES, BAD_IMAGES = 2000, 400, 1500
HOT_TRAINING, HOT_STEPS = 40, 300  # times the usual learning rate: of training, and of single passes
_DTN = {"network.backbone": "dtn", "network.width": 0.25, "epochs": 6, "steps": 40, "lr": 0.05}


@dataclass(frozen=True)
class Case:
    """A stream to go through.

    Attributes:
        stream: Its name.
        order: Its order.
        changes: Sizes.
        unrelated: Stream and domains of unrelated images.
    """

    stream: str
    order: str
    changes: Mapping[str, Any]
    unrelated: tuple[str, tuple[str, ...]]


PICTURES = ("pacs", ("P", "A"))
CASES = {
    "demo": Case("demo", "default", {"epochs": 6, "steps": 30}, PICTURES),
    "digits": Case("digits", "default", _DTN, PICTURES),
    "digits-far": Case("digits", "MT>SN>US", _DTN, PICTURES),
    "pacs": Case("pacs", "default", _DTN, ("digits", ("SN",))),
}
METHODS = ("ratp", "shot", "tent", "bmd", "pcl", "cotta")
MORE_METHODS = ("source-only", "adabn", "t3a", "eata", "adacon", "gsfda", "shot+")


def some(images: int, most: int, *name: str) -> Tensor:
    """Positions of some images, the same ones every time."""
    return torch.randperm(images, generator=Randomness(0).generator(*name))[:most]


def planned(case: Case, method: str) -> RunPlan:
    """The plan, with a part of the images of every domain."""
    changes = dict(case.changes)
    request = RunRequest(case.stream, method, case.order, changes=changes, subset=True, device="cpu", weights="none")
    plan = resolve(request)

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        return [LoadedDomain(part(item.domain)) for item in plan.spec.load(codes, size, options)]

    return replace(plan, spec=replace(plan.spec, load=load))


def part(domain: LabelledDomain | UnlabelledDomain, most: int = IMAGES) -> LabelledDomain:
    """A part of a domain."""
    assert isinstance(domain, LabelledDomain)
    return domain if len(domain) <= most else domain.subset(some(len(domain), most, domain.name))


def bad_domains(case: Case, size: int, real: LabelledDomain) -> Iterator[UnlabelledDomain]:
    """Domains to be refused, beside a real one."""
    generator = Randomness(0).generator("bad")
    shape = (BAD_IMAGES, 3, size, size)
    yield UnlabelledDomain("noise", torch.randint(256, shape, generator=generator, dtype=torch.uint8))
    colours = torch.randint(256, (BAD_IMAGES, 3, 1, 1), generator=generator, dtype=torch.uint8)
    yield UnlabelledDomain("blank", colours.expand(shape).contiguous())
    stream, codes = case.unrelated
    found = SPECS[stream].load(codes, size, DataOptions())
    pictures = torch.cat([part(item.domain, BAD_IMAGES // len(codes)).images for item in found])
    if pictures.shape[-1] != size:
        pictures = F.interpolate(pictures.float(), (size, size), mode="bilinear", antialias=True).byte()
    yield UnlabelledDomain("unrelated", pictures)
    yield one_class(real)


def one_class(real: LabelledDomain) -> UnlabelledDomain:
    """The images of a domain's most frequent class."""
    return UnlabelledDomain("one class", real.images[real.labels == real.labels.bincount().argmax()])


def hot(plan: RunPlan) -> RunPlan:
    """The plan with learning rates that are far too large."""
    switches = as_dict(plan.config)
    steps = {name: switches[name] * HOT_STEPS for name in ("step.rate", "rate") if name in switches}
    recipe = override(plan.recipe, {"lr": plan.recipe.lr * HOT_TRAINING})
    return replace(plan, recipe=recipe, config=override(plan.config, steps))


def measured(method: Method, tests: Sequence[LabelledDomain | None]) -> list[float]:
    """Accuracies on a part of every domain."""
    return [accuracy(method, part(test, TEST_IMAGES)) for test in tests if test is not None]


class Trials:
    """All stages of one method on one stream."""

    def __init__(self, name: str, method: str) -> None:
        self.name, self.case = name, CASES[name]
        self.plan = planned(self.case, method)
        self.stream: Stream = self.plan.load_stream()
        self.method = self.plan.build_method(self.stream, self.plan.source_models(self.stream))
        self.hot = hot(self.plan).build_method(self.stream)
        self.state: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """Goes through the stream, with bad stages beside the first two targets."""
        self.method.fit_source(self.stream.source)
        self.state = copied(self.method)
        for stage, target in enumerate(self.stream.targets, start=1):
            real = self.stream.answers[stage - 1]
            assert real is not None
            bad = [*bad_domains(self.case, self.stream.image_size[0], real)] if stage == 1 else [one_class(real)]
            for domain in bad if stage <= 2 else []:
                self.trial(stage, domain.name, self.method, domain)
            if stage <= 2:
                self.trial(stage, "hot", self.hot, target)
            self.trial(stage, "good", self.method, target)
            self.state = copied(self.method)
        return self.rows

    def trial(self, stage: int, kind: str, method: Method, domain: UnlabelledDomain) -> None:
        """One stage, from the state before it."""
        method.load_state(self.state)
        tests = self.stream.tests[: stage + 1]
        before = measured(method, tests)
        watch = Watch(method, domain, self.stream.source, Randomness(0))
        try:
            method.adapt(domain)
            after = measured(method, tests)
        except RatpError as error:  # no numbers any more: a run ends there, guarded or not
            print(f"{self.name} {self.plan.method.name} {kind}: {error}", file=sys.stderr)
            return
        verdict = watch.judge(method)
        assert verdict is not None
        chance = 100 / len(self.stream.classes)
        earlier = [sum(row[:-1]) / stage for row in (before, after)]
        self.rows.append(
            {
                "stream": self.name,
                "method": self.plan.method.name,
                "stage": stage,
                "domain": self.stream.order[stage],
                "kind": kind,
                "earlier": [round(value, 1) for value in earlier],
                "own": [round(row[-1], 1) for row in (before, after)],
                "harmful": earlier[1] - chance < (earlier[0] - chance) / 2,
                "reasons": list(verdict.reasons),
                "signs": verdict.to_json()["signs"],
            }
        )


def copied(method: Method) -> dict[str, Tensor]:
    """A state that later training does not change."""
    return {name: tensor.clone() for name, tensor in method.state().items()}


def trials(name: str, method: str) -> list[dict[str, Any]]:
    """All stages of one method on one stream, with one thread."""
    torch.set_num_threads(1)
    return Trials(name, method).run()


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--more-methods", nargs="*", default=list(MORE_METHODS), help="on the first stream only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    work = [(name, method) for method in options.methods for name in options.streams]
    work += [(options.streams[0], method) for method in options.more_methods]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(trials, *item) for item in work]):
            rows += done.result()
            rows.sort(key=lambda row: (work.index((row["stream"], row["method"])), row["stage"]))
            write_json(options.out, {"trials": rows, "environment": describe_environment(torch.device("cpu"))})
            for row in done.result():
                told = "; ".join(row["reasons"]) or "accepted"
                print(
                    f"{row['stream']:10} {row['method']:11} {row['stage']} {row['kind']:9} "
                    f"earlier {row['earlier'][0]:5.1f} -> {row['earlier'][1]:5.1f}  {told}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
