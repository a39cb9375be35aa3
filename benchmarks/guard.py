"""How often the guard refuses good stages, and how often bad ones, on real images.

Every method goes through a stream of real domains, whose stages are the good ones. Beside them, from the same model, it
is given bad ones, and the state before is put back after each:

* noise: pixels drawn at random; blank: images of one random colour each;
* unrelated: photographs and paintings for digits, street numbers for objects, at the size of the stream;
* one class: only the images of the domain's most frequent class;
* known class: the same of the source, images it was not trained on: a single class that the model does recognise;
* hot: the domain itself, with a learning rate many times too large.

Whether a stage did harm is measured with labels, which the guard does not see: half of what the model knew beyond
chance of the domains before is gone. Networks are narrow and stages short, for CPUs (``CASES``). Needs the images of
``digits`` and ``pacs`` (``$RATP_DATA``).

Prints a table and writes ``benchmarks/guard.json``, of which ``tools/docs.py`` makes the tables in
``docs/explanation/guard.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratp._core.environment import Randomness, describe_environment
from ratp._core.files import read_json, write_json
from ratp.config import as_dict, override
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.evaluation.accuracy import accuracy
from ratp.guard.watch import Indicators, Watch, decide
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.streams import find_stream
from ratp.streams.stream import DataOptions, LoadedDomain, Stream
from ratp.training.method import Method

IMAGES, TEST_IMAGES = 1200, 300  # of a target, and of any domain to measure with
SOURCE_IMAGES = 8000
HOT_TRAINING, HOT_STEPS = 40, 300  # times the usual learning rate: of training, and of single passes
_NETWORK = {"network.backbone": "dtn", "network.width": 0.25}
_SOURCE, _STAGE = {"epochs": 10, "steps": 150}, {"epochs": 6, "steps": 40}
RATE = 0.05  # a tenth of it with momentum, which makes steps ten times as long
_QUICK = {"ratp": {"randmix.kernel_sizes": "3,5"}, "cotta": {"views": 4}}


@dataclass(frozen=True)
class Case:
    """A stream to go through.

    Attributes:
        stream: Its name.
        order: Its order.
        unrelated: Stream and domains of unrelated images.
        bad: Bad stages beside the first target and beside the second.
    """

    stream: str
    order: str
    unrelated: tuple[str, tuple[str, ...]]
    bad: tuple[tuple[str, ...], tuple[str, ...]]


_PICTURES, _NUMBERS = ("pacs", ("P", "A")), ("digits", ("SN",))
CASES = {
    "digits": Case(
        "digits",
        "default",
        _PICTURES,
        (
            ("noise", "blank", "unrelated", "one class", "known class", "hot"),
            ("noise", "unrelated", "one class", "hot"),
        ),
    ),
    "demo": Case("demo", "default", _PICTURES, (("unrelated", "one class", "known class", "hot"), ("hot",))),
    "pacs": Case("pacs", "default", _NUMBERS, (("unrelated", "one class", "known class", "hot"), ("hot",))),
}
METHODS = ("tent", "shot", "ratp", "bmd", "pcl", "cotta")
MORE_METHODS = ("source-only", "adabn", "t3a", "eata", "adacon", "gsfda", "shot+")


def some(images: int, most: int, *name: str) -> Tensor:
    """Positions of some images, the same ones every time."""
    return torch.randperm(images, generator=Randomness(0).generator(*name))[:most]


def make_plan(case: Case, method: str, length: Mapping[str, int]) -> RunPlan:
    """The plan, with a part of the images of every domain and stages of some length."""
    changes = {**_NETWORK, **length, **_QUICK.get(method, {})}
    request = RunRequest(case.stream, method, case.order, changes=changes, subset=True, device="cpu", weights="none")
    plan = resolve(request)
    momentum = as_dict(plan.config).get("sgd.momentum", 0.0)
    plan = replace(plan, recipe=override(plan.recipe, {"lr": RATE / 10 if momentum else RATE}))

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        found = (item.domain for item in plan.spec.load(codes, size, options))
        return [LoadedDomain(part(domain, IMAGES if at else SOURCE_IMAGES)) for at, domain in enumerate(found)]

    return replace(plan, spec=replace(plan.spec, load=load))


def part(domain: LabelledDomain | UnlabelledDomain, most: int = IMAGES) -> LabelledDomain:
    """A part of a domain."""
    assert isinstance(domain, LabelledDomain)
    return domain if len(domain) <= most else domain.subset(some(len(domain), most, domain.name))


def bad_images(kind: str, case: Case, real: LabelledDomain) -> Tensor:
    """Bad images, derived from a real domain or in place of one."""
    if kind == "hot":
        return real.images
    if kind.endswith("class"):
        return real.images[real.labels == real.labels.bincount().argmax()]
    size = real.images.shape[-1]
    if kind == "unrelated":
        stream, codes = case.unrelated
        found = find_stream(stream).load(codes, size, DataOptions())
        return torch.cat([part(item.domain, IMAGES // len(codes)).images for item in found])
    generator, colours = Randomness(0).generator("bad"), 1 if kind == "blank" else size
    noise = torch.randint(256, (IMAGES, 3, colours, colours), generator=generator, dtype=torch.uint8)
    return noise.expand(-1, -1, size, size).contiguous()


def hot(plan: RunPlan) -> RunPlan:
    """The plan with learning rates that are far too large."""
    switches = as_dict(plan.config)
    steps = {name: switches[name] * HOT_STEPS for name in ("step.rate", "rate") if name in switches}
    recipe = override(plan.recipe, {"lr": plan.recipe.lr * HOT_TRAINING})
    return replace(plan, recipe=recipe, config=override(plan.config, steps))


def measure_accuracy(method: Method, tests: Sequence[LabelledDomain | None]) -> list[float]:
    """Accuracies on a part of every domain."""
    return [accuracy(method, part(test, TEST_IMAGES)) for test in tests if test is not None]


class Trials:
    """All stages of one method on one stream."""

    def __init__(self, name: str, method: str) -> None:
        self.name, self.case = name, CASES[name]
        self.plan, self.first = make_plan(self.case, method, _STAGE), make_plan(self.case, method, _SOURCE)
        self.stream: Stream = self.plan.load_stream()
        self.method = self.plan.build_method(self.stream)
        self.hot = hot(self.plan).build_method(self.stream)
        self.state: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """Goes through the stream, with bad stages beside the first two targets."""
        learner = self.first.build_method(self.stream, self.first.source_models(self.stream))
        learner.fit_source(self.stream.source)
        self.state = copy_state(learner)
        for stage, target in enumerate(self.stream.targets, start=1):
            real = self.stream.answers[stage - 1]
            assert real is not None
            for kind in self.case.bad[stage - 1] if stage <= len(self.case.bad) else ():
                like = self.stream.tests[0] if kind == "known class" else real
                assert like is not None
                domain = UnlabelledDomain(kind, bad_images(kind, self.case, like))
                self.trial(stage, kind, self.hot if kind == "hot" else self.method, domain)
            self.trial(stage, "good", self.method, target)
            self.state = copy_state(self.method)
        return self.rows

    def trial(self, stage: int, kind: str, method: Method, domain: UnlabelledDomain) -> None:
        """One stage, from the state before it."""
        method.load_state(self.state)
        tests = self.stream.tests[: stage + 1]
        before = measure_accuracy(method, tests)
        watch = Watch(method, domain, self.stream.source, Randomness(0))
        try:
            method.adapt(domain)
            after = measure_accuracy(method, tests)
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


def copy_state(method: Method) -> dict[str, Tensor]:
    """A state that later training does not change."""
    return {name: tensor.clone() for name, tensor in method.state().items()}


def trials(name: str, method: str) -> list[dict[str, Any]]:
    """All stages of one method on one stream, with one thread."""
    torch.set_num_threads(1)
    return Trials(name, method).run()


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """A stage that was kept, judged by present limits."""
    return {**row, "reasons": list(decide(Indicators(**row["signs"])).reasons)}


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--more-methods", nargs="*", default=list(MORE_METHODS), help="on the first stream only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--judge", action="store_true", help="train nothing: judge what is kept by present limits")
    options = parser.parse_args()
    if options.judge:
        kept = read_json(options.out)
        write_json(options.out, {**kept, "trials": [judge(row) for row in kept["trials"]]})
        return
    work = [(name, method) for method in options.methods for name in options.streams]
    work += [(options.streams[0], method) for method in options.more_methods]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(trials, *item) for item in work]):
            rows += done.result()
            rows.sort(key=lambda row: (work.index((row["stream"], row["method"])), row["stage"]))
            write_json(options.out, {"trials": rows, "environment": describe_environment(torch.device("cpu"))})
            for row in done.result():
                verdict = "; ".join(row["reasons"]) or "accepted"
                print(
                    f"{row['stream']:10} {row['method']:11} {row['stage']} {row['kind']:9} "
                    f"earlier {row['earlier'][0]:5.1f} -> {row['earlier'][1]:5.1f}  {verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
