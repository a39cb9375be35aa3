"""How often the guard refuses good stages, and how often bad ones, on real images.

Every method goes through a stream of real domains, whose stages are the good ones. Beside them, from the same model, it
is given bad ones, and the state before is put back after each:

* noise: pixels drawn at random; blank: images of one random colour each;
* unrelated: photographs and paintings for digits, street numbers for objects, at the size of the stream;
* one class: only the images of the domain's most frequent class;
* known class: the same of the source, images it was not trained on: a single class that the model does recognise;
* hot: the domain itself, with a learning rate many times too large;
* half, few, long-tail, 90/10: the domain without some of its classes, or with some much rarer than others.

Whether a stage did harm is measured with labels, which the guard does not see: half of what the model knew beyond
chance of the domains before is gone. Whether it made the model worse on the domain's own images is measured too. The
cases ``digits``, ``demo`` and ``pacs`` have narrow networks and short stages, for CPUs; those that begin with
``trained`` have the streams' own networks, trained well on the source, for GPUs (``CASES``). Needs the images of
``digits`` and ``pacs`` (``$RATP_DATA``), and ``trained-pacs`` weights (``$RATP_WEIGHTS``).

Prints a table and writes ``benchmarks/guard.json``, of which ``tools/docs.py`` makes the tables in
``docs/explanation/guard.md``. With ``--predictions FOLDER`` it also keeps what the models predicted, for setting limits
without training again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratp._core.environment import Randomness, describe_environment, use_precision
from ratp._core.files import read_json, write_json
from ratp.config import as_dict, override
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.evaluation.accuracy import accuracy
from ratp.guard.watch import DOMAIN_IMAGES, KNOWN_IMAGES, Indicators, Watch, decide
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.streams import find_stream
from ratp.streams.stream import DataOptions, LoadedDomain, Stream
from ratp.training.device_cache import with_images_on
from ratp.training.method import Method
from ratp.training.phase import Phase, train

UNREAL = 1200  # images of noise, blank or unrelated
HOT_TRAINING, HOT_STEPS = 40, 300  # times the usual learning rate: of training, and of single passes
SHIFTS = ("half", "few", "long-tail", "90/10")


@dataclass(frozen=True)
class Size:
    """How large networks are, how long stages, and how many images they have.

    Attributes:
        network: Changes to the stream's network.
        source: Length of the source stage.
        stage: Length of a target stage.
        source_images: Images of the source.
        images: Images of a target.
        test_images: Images of any domain to measure with.
        rate: Learning rate, a tenth of it with momentum, which makes steps ten times as long; None: the stream's.
        switches: Changes to methods.
        weights: Initial weights.
        precision: Numerical precision.
    """

    network: Mapping[str, Any]
    source: Mapping[str, int]
    stage: Mapping[str, int]
    source_images: int = 100_000
    images: int = 100_000
    test_images: int = 1000
    rate: float | None = None
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    weights: str = "none"
    precision: str = "auto"


SMALL = Size(
    {"network.backbone": "dtn", "network.width": 0.25},
    {"epochs": 10, "steps": 150},
    {"epochs": 6, "steps": 40},
    source_images=8000,
    images=1200,
    test_images=300,
    rate=0.05,
    switches={"ratp": {"randmix.kernel_sizes": "3,5"}, "cotta": {"views": 4}},
)
DTN = Size({}, {"epochs": 8, "steps": 800}, {"epochs": 3, "steps": 200})
RESNET = Size({}, {"epochs": 12, "steps": 50}, {"epochs": 3, "steps": 40}, weights="auto", precision="bf16")
VIT = Size(
    {"network.backbone": "timm:vit_tiny_patch16_224", "lr": 0.01, "sgd.momentum": 0.9},
    {"epochs": 20, "steps": 100},
    {"epochs": 3, "steps": 50},
)


@dataclass(frozen=True)
class Case:
    """A stream to go through.

    Attributes:
        stream: Its name.
        order: Its order.
        unrelated: Stream and domains of unrelated images.
        bad: Bad stages beside the first target and beside the second.
        size: Networks and stages.
    """

    stream: str
    order: str
    unrelated: tuple[str, tuple[str, ...]]
    bad: tuple[tuple[str, ...], ...]
    size: Size = SMALL


_PICTURES, _NUMBERS = ("pacs", ("P", "A")), ("digits", ("SN",))
_ALL = ("unrelated", "one class", "hot", *SHIFTS)
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
    "trained-digits": Case("digits", "default", _PICTURES, (_ALL, _ALL), DTN),
    "trained-digits-reverse": Case("digits", "reverse", _PICTURES, (_ALL, SHIFTS), DTN),
    "trained-vit": Case("demo", "default", _NUMBERS, (_ALL,), VIT),
    "trained-pacs": Case("pacs", "default", _NUMBERS, (_ALL, SHIFTS), RESNET),
    "trained-pacs-art": Case("pacs", "A>P>C>S", _NUMBERS, (SHIFTS,), RESNET),
}
METHODS = ("tent", "shot", "ratp", "bmd", "pcl", "cotta")
MORE_METHODS = ("source-only", "adabn", "t3a", "eata", "adacon", "gsfda", "shot+")


def some(images: int, most: int, *name: str) -> Tensor:
    """Positions of some images, the same ones every time."""
    return torch.randperm(images, generator=Randomness(0).generator(*name))[:most]


def make_plan(case: Case, method: str, length: Mapping[str, int], device: str) -> RunPlan:
    """The plan, with a part of the images of every domain and stages of some length."""
    size = case.size
    changes = {**size.network, **length, **size.switches.get(method, {})}
    request = RunRequest(
        case.stream,
        method,
        case.order,
        changes=changes,
        subset=True,
        device=device,
        weights=size.weights,
        precision=size.precision,
    )
    plan = resolve(request)
    if size.rate is not None:
        momentum = as_dict(plan.config).get("sgd.momentum", 0.0)
        plan = replace(plan, recipe=override(plan.recipe, {"lr": size.rate / 10 if momentum else size.rate}))

    def load(codes: Sequence[str], side: int, options: DataOptions) -> list[LoadedDomain]:
        found = (item.domain for item in plan.spec.load(codes, side, options))
        return [
            LoadedDomain(part(domain, size.images if at else size.source_images)) for at, domain in enumerate(found)
        ]

    return replace(plan, spec=replace(plan.spec, load=load))


def part(domain: LabelledDomain | UnlabelledDomain, most: int) -> LabelledDomain:
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
        return torch.cat([part(item.domain, UNREAL // len(codes)).images for item in found])
    generator, colours = Randomness(0).generator("bad"), 1 if kind == "blank" else size
    noise = torch.randint(256, (UNREAL, 3, colours, colours), generator=generator, dtype=torch.uint8)
    return noise.expand(-1, -1, size, size).contiguous()


def hot(plan: RunPlan) -> RunPlan:
    """The plan with learning rates that are far too large."""
    switches = as_dict(plan.config)
    steps = {name: switches[name] * HOT_STEPS for name in ("step.rate", "rate") if name in switches}
    recipe = override(plan.recipe, {"lr": plan.recipe.lr * HOT_TRAINING})
    return replace(plan, recipe=recipe, config=override(plan.config, steps))


def measure_accuracy(method: Method, tests: Sequence[LabelledDomain | None], most: int) -> list[float]:
    """Accuracies on a part of every domain."""
    return [accuracy(method, part(test, most)) for test in tests if test is not None]


class Trials:
    """All stages of one method on one stream."""

    def __init__(self, name: str, method: str, device: str) -> None:
        self.name, self.case = name, CASES[name]
        self.plan = make_plan(self.case, method, self.case.size.stage, device)
        self.first = make_plan(self.case, method, self.case.size.source, device)
        use_precision(self.plan.precision)
        self.stream: Stream = self.plan.load_stream()
        self.method = self.plan.build_method(self.stream)
        self.hot = hot(self.plan).build_method(self.stream)
        self.state: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []
        self.predictions: dict[str, np.ndarray] = {}

    def run(self) -> list[dict[str, Any]]:
        """Goes through the stream, with bad stages beside the first targets."""
        learner = self.first.build_method(self.stream, self.first.source_models(self.stream))
        learn(learner.source_phases(with_images_on(self.stream.source, self.plan.device)), self.plan.device)
        self.state = copy_state(learner)
        shifted = {kind: self.shifted(kind) for kind in SHIFTS if any(kind in kinds for kinds in self.case.bad)}
        for stage, target in enumerate(self.stream.targets, start=1):
            real = self.stream.answers[stage - 1]
            assert real is not None
            for kind in self.case.bad[stage - 1] if stage <= len(self.case.bad) else ():
                like = self.stream.tests[0] if kind == "known class" else real
                assert like is not None
                if kind in SHIFTS:
                    self.trial(stage, kind, self.method, *shifted[kind][stage - 1])
                else:
                    images = bad_images(kind, self.case, like)
                    answers = real if kind == "hot" else None
                    self.trial(
                        stage, kind, self.hot if kind == "hot" else self.method, UnlabelledDomain(kind, images), answers
                    )
            self.trial(stage, "good", self.method, target, real)
            self.state = copy_state(self.method)
        return self.rows

    def shifted(self, kind: str) -> list[tuple[UnlabelledDomain, LabelledDomain]]:
        """The targets under a label shift, with their labels."""
        stream = replace(self.plan, recipe=override(self.plan.recipe, {"label_shift": kind})).load_stream()
        answers = [answer for answer in stream.answers if answer is not None]
        return list(zip(stream.targets, answers, strict=True))

    def trial(
        self, stage: int, kind: str, method: Method, domain: UnlabelledDomain, answers: LabelledDomain | None
    ) -> None:
        """One stage, from the state before it."""
        method.load_state(self.state)
        tests, most = self.stream.tests[: stage + 1], self.case.size.test_images
        own = None if answers is None else part(answers, most)
        before = measure_accuracy(method, [*tests, own], most)
        images = {"domain": domain.images[some(len(domain), DOMAIN_IMAGES)]}
        images["source"] = self.stream.source.images[some(len(self.stream.source), KNOWN_IMAGES)]
        predicted = {f"{name} before": predict(method, found) for name, found in images.items()}
        watch = Watch(method, domain, self.stream.source, Randomness(0))
        try:
            learn(method.target_phases(with_images_on(domain, self.plan.device)), self.plan.device)
            after = measure_accuracy(method, [*tests, own], most)
        except RatpError as error:  # no numbers any more: a run ends there, guarded or not
            print(f"{self.name} {self.plan.method.name} {kind}: {error}", file=sys.stderr)
            return
        verdict = watch.judge(method)
        assert verdict is not None
        chance = 100 / len(self.stream.classes)
        earlier = [sum(row[:stage]) / stage for row in (before, after)]
        measured = {} if own is None else {"images": [round(row[-1], 1) for row in (before, after)]}
        predicted |= {f"{name} after": predict(method, found) for name, found in images.items()}
        if answers is not None:
            predicted["domain labels"] = answers.labels[some(len(domain), DOMAIN_IMAGES)].cpu().numpy()
        predicted["source labels"] = (
            self.stream.source.labels[some(len(self.stream.source), KNOWN_IMAGES)].cpu().numpy()
        )
        self.predictions |= {f"{stage}/{kind}/{name}": values for name, values in predicted.items()}
        self.rows.append(
            {
                "stream": self.name,
                "method": self.plan.method.name,
                "stage": stage,
                "domain": self.stream.order[stage],
                "kind": kind,
                "earlier": [round(value, 1) for value in earlier],
                "own": [round(row[stage], 1) for row in (before, after)],
                **measured,
                "harmful": earlier[1] - chance < (earlier[0] - chance) / 2,
                "reasons": list(verdict.reasons),
                "signs": verdict.to_json()["signs"],
            }
        )


def predict(method: Method, images: Tensor) -> np.ndarray:
    """Logits, in half the precision."""
    with torch.no_grad():
        found: np.ndarray = method.predict(images).half().cpu().numpy()
    return found


def learn(phases: Sequence[Phase], device: torch.device) -> None:
    """Trains to the end."""
    for _ in train(phases, capture=device.type == "cuda"):
        pass


def copy_state(method: Method) -> dict[str, Tensor]:
    """A state that later training does not change."""
    return {name: tensor.clone() for name, tensor in method.state().items()}


def trials(name: str, method: str, device: str, folder: Path | None) -> list[dict[str, Any]]:
    """All stages of one method on one stream, with one thread."""
    torch.set_num_threads(1)
    found = Trials(name, method, device)
    rows = found.run()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / f"{name}-{method}.npz", **found.predictions)
    return rows


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """A stage that was kept, judged by present limits."""
    return {**row, "reasons": list(decide(Indicators(**row["signs"])).reasons)}


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    usual = [name for name, case in CASES.items() if case.size is SMALL]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=usual)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--more-methods", nargs="*", default=list(MORE_METHODS), help="on the first case only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--predictions", type=Path, metavar="FOLDER", help="where to keep what models predicted")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--judge", action="store_true", help="train nothing: judge what is kept by present limits")
    options = parser.parse_args()
    if options.judge:
        kept = read_json(options.out)
        write_json(options.out, {**kept, "trials": [judge(row) for row in kept["trials"]]})
        return
    work = [(name, method) for method in options.methods for name in options.cases]
    work += [(options.cases[0], method) for method in options.more_methods]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(trials, *item, options.device, options.predictions) for item in work]):
            rows += done.result()
            rows.sort(key=lambda row: (work.index((row["stream"], row["method"])), row["stage"]))
            write_json(options.out, {"trials": rows, "environment": describe_environment(torch.device(options.device))})
            for row in done.result():
                verdict = "; ".join(row["reasons"]) or "accepted"
                print(
                    f"{row['stream']:22} {row['method']:11} {row['stage']} {row['kind']:9} "
                    f"earlier {row['earlier'][0]:5.1f} -> {row['earlier'][1]:5.1f}  {verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
