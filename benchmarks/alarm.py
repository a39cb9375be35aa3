"""Measures the drift alarm on real images: false alarms, delay, and what observing costs.

A network is trained on a source alone. Of the source images held back, some calibrate the alarm, as in a deployment,
and the others stream past it. Repeated with several such splits and orders (``--splits``, ``--shuffles``):

* false alarms: windows of held-back source images, by level;
* delay: images of a target after a switch, at any point of a window, until the level is ``drifted`` or ``foreign``;
* gradual: the share of target images rises from 0 to 1 over 1,000 images; at which share the level rises;
* unbalanced: windows of source images of one class, and of one half of the classes.

Needs the images of ``digits`` and ``pacs`` (``$RATP_DATA``), and weights of ResNet-50 (``--weights``). Prints a summary
and writes ``benchmarks/alarm.json``, from which ``tools/docs.py`` makes the table in ``docs/explanation/alarm.md``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ratp import Deployment, Run
from ratp._core.environment import Randomness, describe_environment
from ratp._core.files import read_json, write_json
from ratp.data.domain import LabelledDomain
from ratp.deploy.drift import WINDOW, Reference
from ratp.deploy.model import Model
from ratp.deploy.observer import Observer
from ratp.deploy.stages import KNOWN_IMAGES
from ratp.evaluation.accuracy import accuracy
from ratp.guard.watch import Predictions, gain, recognition
from ratp.methods.shared.online import OnlineNetwork
from ratp.runs.load import load as load_run
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams.stream import DataOptions, LoadedDomain, make_stream, stratified_mask
from ratp.training.method import Method

SEED = 0
SOURCE_IMAGES, TARGET_IMAGES = 12_000, 600
HELD_BACK = 0.4  # share of the source that is not trained on; photographs are few
BEFORE, GRADUAL = 2 * WINDOW, 1000  # source images before a switch; length of a gradual change
_NARROW = {"network.backbone": "dtn", "network.width": 0.25, "epochs": 5, "steps": 150, "lr": 0.05}
_RESNET = {"network.backbone": "resnet50", "network.frozen": 5, "size": 64, "epochs": 3, "steps": 25, "lr": 0.01}


@dataclass(frozen=True)
class Case:
    """A source and targets, as codes of a stream's domains, and the values of training."""

    stream: str
    source: str
    targets: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "digits": Case("digits", "MT", ("MM", "SN", "SD", "US"), _NARROW),
    "pacs photo": Case("pacs", "P", ("A", "C", "S"), _RESNET),
    "pacs sketch": Case("pacs", "S", ("P", "A", "C"), _RESNET),
}


@dataclass(frozen=True)
class Known:
    """Images of a domain and what the model predicts for them."""

    images: Tensor
    labels: Tensor
    found: Predictions

    @classmethod
    def of(cls, model: Model, domain: LabelledDomain) -> Known:
        """Predicts a domain."""
        return cls(domain.images, domain.labels, model.predictions(domain.images))

    def rows(self, chosen: Tensor) -> Known:
        """Selects some images."""
        assert self.found.embedding is not None
        found = Predictions(self.found.probabilities[chosen], self.found.embedding[chosen])
        return Known(self.images[chosen], self.labels[chosen], found)


def shuffled(count: int, *name: object) -> Tensor:
    """Returns a random order, the same one on every run."""
    return torch.randperm(count, generator=Randomness(SEED).generator("alarm", *map(str, name)))


def train_source(case: Case, weights: str) -> tuple[Method, LabelledDomain, list[LabelledDomain]]:
    """Trains on the source; returns the network, the source images held back, and the targets."""
    kind = weights if case.values["network.backbone"] == "resnet50" else "none"
    order = (case.source, *case.targets)
    request = RunRequest(
        case.stream, "source-only", order, seed=SEED, changes=case.values, subset=True, device="cpu", weights=kind
    )
    plan = resolve(request)
    source, *targets = (
        part(item, SOURCE_IMAGES if at == 0 else TARGET_IMAGES)
        for at, item in enumerate(plan.spec.load(plan.order, plan.recipe.size, DataOptions()))
    )
    mask = stratified_mask(source.labels, HELD_BACK, Randomness(SEED).generator("held back"))
    stream = make_stream(case.stream, [LoadedDomain(replace(source, held_out=mask)), *targets], SEED)
    method = plan.build_method(stream)
    method.fit_source(stream.source)
    return method, source.subset(mask), targets


def part(item: LoadedDomain, most: int) -> LabelledDomain:
    """Selects a random part of a domain."""
    assert isinstance(item.domain, LabelledDomain)
    return item.domain.subset(shuffled(len(item.domain), item.domain.name)[:most])


class Trials:
    """Streams past the alarm of one trained network."""

    def __init__(self, name: str, weights: str, splits: int, shuffles: int) -> None:
        self._splits, self._shuffles, self._name = splits, shuffles, name
        method, held_back, targets = train_source(CASES[name], weights)
        self._method, model = method, Model(method, 1)
        self._source = Known.of(model, held_back)
        self._targets = {target.name: Known.of(model, target) for target in targets}
        self._source_gain = gain(method, held_back.images[:WINDOW], Randomness(SEED))
        self._accuracy = {domain.name: accuracy(method, domain) for domain in (held_back, *targets)}

    def run(self) -> dict[str, Any]:
        """Returns all numbers of the case."""
        levels: Counter[str] = Counter()
        estimates: list[float] = []
        switches: dict[str, list[int | None]] = {name: [] for name in self._targets}
        foreign: dict[str, list[bool]] = {name: [] for name in self._targets}
        shares: dict[str, list[float | None]] = {name: [] for name in self._targets}
        unbalanced: dict[str, list[bool]] = {"one class": [], "half of the classes": []}
        for known, others, reference in self._calibrations():
            estimates.append(reference.false_alarms)
            for shuffle in range(self._shuffles):
                stream = others.rows(shuffled(len(others.images), "stream", len(estimates), shuffle))
                levels.update(self._levels(reference, known, stream))
                for name, target in self._targets.items():
                    at = (len(estimates), shuffle, name)
                    delay, last = self._switch(reference, known, stream, target, at)
                    switches[name].append(delay)
                    if shuffle == 0:  # only there, because recognition is slow
                        foreign[name].append(last == "foreign")
                    shares[name].append(self._gradual(reference, known, stream, target, at))
            for kind, found in self._unbalanced(reference, others):
                unbalanced[kind].append(found)
        return {
            "case": self._name,
            **asdict(CASES[self._name]),
            "accuracy": self._accuracy,
            "calibration_images": len(known.images),
            "held_back_images": len(self._source.images),
            "estimated_false_alarms": sum(estimates) / len(estimates),
            "source_windows": dict(levels),
            "delay": switches,
            "foreign": {name: sum(found) / len(found) for name, found in foreign.items()},
            "gradual": shares,
            "unbalanced": {kind: sum(found) / len(found) for kind, found in unbalanced.items()},
        }

    def _calibrations(self) -> Iterator[tuple[Known, Known, Reference]]:
        """Splits the source images held back; yields those that calibrate, the others, and the reference."""
        count = len(self._source.images)
        for split in range(self._splits):
            order = shuffled(count, "split", split)
            known, others = order[: min(KNOWN_IMAGES, count // 2)], order[min(KNOWN_IMAGES, count // 2) :]
            generator = Randomness(SEED).generator("calibration", str(split))
            chosen = self._source.rows(known)
            yield chosen, self._source.rows(others), Reference.of("source", chosen.found, generator)

    def _recognised(self, images: Tensor, found: Predictions) -> float | None:
        return recognition(gain(self._method, images, Randomness(SEED), found), self._source_gain)

    def _levels(self, reference: Reference, known: Known, stream: Known, *, recognising: bool = True) -> Iterator[str]:
        """Yields the level after every window; recognition, which is slow, may be left out."""
        observer = Observer([reference], known.images, self._recognised if recognising else lambda *_: None)
        for start in range(0, len(stream.images) - WINDOW + 1, WINDOW):
            window = stream.rows(torch.arange(start, start + WINDOW))
            observer.observe(window.images, window.found, [""] * WINDOW)
            yield observer.level

    def _switch(
        self, reference: Reference, known: Known, stream: Known, target: Known, at: Sequence[object]
    ) -> tuple[int | None, str]:
        """Returns images of the target until the alarm, None if it stays silent; and the level four windows later."""
        before = BEFORE - WINDOW + int(shuffled(WINDOW, "switch", *at)[0])
        mixed = joined(stream.rows(torch.arange(before)), target.rows(shuffled(len(target.images), "target", *at)))
        delay, level = None, "fine"
        levels = self._levels(reference, known, mixed, recognising=at[1] == 0)
        for window, level in enumerate(levels, start=1):
            arrived = window * WINDOW - before
            if arrived > 0 and delay is None and level in ("drifted", "foreign"):
                delay = arrived
            if arrived >= 5 * WINDOW and delay is not None:
                break
        return delay, level

    def _gradual(
        self, reference: Reference, known: Known, stream: Known, target: Known, at: Sequence[object]
    ) -> float | None:
        """Returns the share of target images at which the alarm rises while this share grows; None if it does not."""
        generator = Randomness(SEED).generator("gradual", *map(str, at))
        is_target = torch.rand(GRADUAL, generator=generator) < torch.arange(GRADUAL) / GRADUAL
        source = torch.randint(len(stream.images), (GRADUAL,), generator=generator)
        shifted = torch.randint(len(target.images), (GRADUAL,), generator=generator) + len(stream.images)
        mixed = joined(stream, target).rows(torch.where(is_target, shifted, source))
        for window, level in enumerate(self._levels(reference, known, mixed, recognising=False), start=1):
            if level in ("drifted", "foreign"):
                return window * WINDOW / GRADUAL
        return None

    def _unbalanced(self, reference: Reference, others: Known) -> Iterator[tuple[str, bool]]:
        """Yields for windows of some classes whether they are beyond the limit; images may repeat."""
        classes = others.labels.unique()
        halves = [classes[: len(classes) // 2], classes[len(classes) // 2 :]]
        for kind, groups in (("one class", classes.split(1)), ("half of the classes", halves)):
            for group in groups:
                members = torch.isin(others.labels, group).nonzero().flatten()
                drawn = members[shuffled(10 * len(members), kind, group) % len(members)][:WINDOW]
                yield kind, reference.judge(others.rows(drawn).found).score > 1


def joined(first: Known, second: Known) -> Known:
    """Joins images."""
    assert first.found.embedding is not None and second.found.embedding is not None
    found = Predictions(
        torch.cat([first.found.probabilities, second.found.probabilities]),
        torch.cat([first.found.embedding, second.found.embedding]),
    )
    return Known(torch.cat([first.images, second.images]), torch.cat([first.labels, second.labels]), found)


def measure_costs(rounds: int) -> dict[str, Any]:
    """Measures Tent with ResNet-50 on 64 images of 96×96 pixels; returns ratios of CPU seconds."""
    values = {"network.backbone": "resnet50", "size": 96, "epochs": 1, "steps": 1, "batch": WINDOW}
    tent = {"replay": "none", "eval_bn": "running"}
    request = RunRequest("demo", "tent", seed=SEED, changes=values | tent, device="cpu", weights="none", guard="off")
    plan = resolve(request)
    whole = plan.spec.load

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        parts = zip(whole(codes, size, options), (5 * WINDOW, WINDOW), strict=True)
        return [LoadedDomain(part(item, most)) for item, most in parts]

    plan = replace(plan, spec=replace(plan.spec, load=load), order=plan.order[:2])
    source = plan.load_stream().tests[0]
    assert source is not None
    with tempfile.TemporaryDirectory() as name:
        Run(plan, Path(name) / "run").execute()
        with Deployment.create(Path(name) / "run", Path(name) / "deployed", source, device="cpu") as model:
            method = load_run(Path(name) / "run", device="cpu").method
            assert isinstance(method, OnlineNetwork)
            return ratios(model, method, source.images[:WINDOW], rounds)


def ratios(model: Deployment, method: OnlineNetwork, images: Tensor, rounds: int) -> dict[str, float]:
    """Measures a deployment, the method's own step and the bare network in turns; returns medians of the ratios."""

    def bare() -> Tensor:
        with torch.no_grad():
            return method.network(method.scaling(images)).logits

    step, network = partial(method.observe, images), bare
    usual = timed({"step": step, "network": network, "predict": partial(model.predict, images)}, rounds)
    watching = timed({"step": step, "observe": partial(model.observe, images)}, rounds)
    drifted = timed({"step": step, "observe": partial(model.observe, 255 - images)}, rounds)
    assert model.level in ("drifted", "foreign"), "images in negative must raise the alarm"
    return {
        "predict / network": ratio(usual, "predict", "network"),
        "observe / step": ratio(watching, "observe", "step"),
        "observe while drifted / step": ratio(drifted, "observe", "step"),
        "step / network": ratio(usual, "step", "network"),
    }


def timed(works: Mapping[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Measures CPU seconds of several things in turns, after one round to warm up."""
    found = []
    for _ in range(rounds + 1):
        taken = {}
        for name, work in works.items():
            start = time.process_time()
            work()
            taken[name] = time.process_time() - start
        found.append(taken)
    return found[1:]


def ratio(found: Sequence[Mapping[str, float]], name: str, by: str) -> float:
    """Returns the median ratio of two of them."""
    return round(median(row[name] / row[by] for row in found), 3)


def summarise(row: Mapping[str, Any]) -> str:
    """Returns a case's numbers in one line for each target."""
    windows = row["source_windows"]
    lines = [f"{row['case']}: source {row['accuracy']}, windows {windows}, unbalanced {row['unbalanced']}"]
    for name, delays in row["delay"].items():
        seen = [value for value in delays if value is not None]
        rose = [value for value in row["gradual"][name] if value is not None]
        late = f"median {median(seen)}, worst {max(seen)}" if seen else "never"
        lines.append(
            f"  {name}: {len(seen)} of {len(delays)} noticed, {late}; foreign {row['foreign'][name]:.2f}; "
            f"gradual {len(rose)} at {median(rose) if rose else '-'}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--weights", default="imagenet", help="of ResNet-50: a safetensors file")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--shuffles", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="of measuring costs; 0: do not")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = read_json(options.out) if options.out.exists() else {"cases": {}}
    for name in options.cases:
        kept["cases"][name] = Trials(name, options.weights, options.splits, options.shuffles).run()
        print(summarise(kept["cases"][name]), flush=True)
    if options.rounds:
        kept["costs"] = measure_costs(options.rounds)
        print(kept["costs"])
    kept |= {"seed": SEED, "window": WINDOW, "splits": options.splits, "shuffles": options.shuffles}
    write_json(options.out, kept | {"environment": describe_environment(torch.device("cpu"))})


if __name__ == "__main__":
    main()
