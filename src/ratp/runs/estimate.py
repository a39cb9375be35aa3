"""Estimates time and memory of a run before it starts, from a few steps of its real phases.

The steps are made by a method of their own, on a few images, at a rate of practically zero: nothing of the run is
touched. What they cost is kept in the cache folder, so that the same settings on the same device are measured once.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ratp._core.environment import Randomness, describe_environment
from ratp._core.files import read_json, write_json
from ratp.data.cache.folder import cache_folder
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.guard.watch import DOMAIN_IMAGES, KNOWN_IMAGES, Watch
from ratp.networks.network import Network
from ratp.runs.plan import RunPlan
from ratp.streams.stream import Stream
from ratp.training.method import Method
from ratp.training.phase import Phase, Tick, train

# A step of at most this many seconds is measured as it is, a longer one with a smaller batch; what is done per image
# is measured on as many images as are predicted in this time.
LONGEST_STEP, LONGEST_PASS = 0.6, 0.3
LEAST_BATCH, LEAST_IMAGES, MOST_IMAGES = 8, 32, 512
# Forward passes that a step of the most expensive methods is worth, per image of the batch.
_PASSES_OF_A_STEP = 8
# The rate of the measured steps; and the lead of the likeliest class that makes an untrained network as confident as
# a trained one, because methods do more work for confident images.
_NO_RATE, _LEAD = 1e-12, 5.0


@dataclass(frozen=True)
class Cost:
    """Time in seconds: of the clock, and of all processor cores together."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.wall * factor, self.cpu * factor)


@dataclass(frozen=True)
class PhaseCost:
    """What a phase costs: a step, and per image of the domain the starts of its epochs and its end."""

    step: Cost
    first: Cost
    later: Cost
    finish: Cost

    def total(self, epochs: int, steps: int, images: int) -> Cost:
        """Returns the cost of the whole phase."""
        begins = (self.first + self.later * max(epochs - 1, 0)) * images if epochs else Cost()
        return self.step * (epochs * steps) + begins + self.finish * images


@dataclass(frozen=True)
class Costs:
    """What a run's parts cost: its phases on the source and on a target; prediction and guard per image."""

    source: tuple[PhaseCost, ...]
    target: tuple[PhaseCost, ...]
    predict: Cost
    guard: Cost
    memory: int  # bytes


@dataclass(frozen=True)
class StageEstimate:
    """What a stage does and how long it takes."""

    domain: str
    images: int
    tests: int | None  # None: the domain has no labels
    steps: int
    cost: Cost


@dataclass(frozen=True)
class Estimate:
    """What a run does, how long it takes and how much memory it needs."""

    stages: tuple[StageEstimate, ...]
    memory: int
    reused: bool  # whether the source network of an earlier run is reused

    @property
    def steps(self) -> int:
        """All its steps."""
        return sum(stage.steps for stage in self.stages)

    @property
    def cost(self) -> Cost:
        """Its whole time."""
        return sum((stage.cost for stage in self.stages), Cost())


def estimate(
    plan: RunPlan,
    stream: Stream,
    *,
    probe: bool = False,
    reuse_source: bool = False,
    first: int = 0,
    measuring: bool = True,
) -> Estimate:
    """Estimates a run on loaded images.

    Args:
        plan: What is run.
        stream: Its images.
        probe: Whether the new domain is measured after every epoch.
        reuse_source: Whether the source network of an earlier run may be reused.
        first: The first stage that is trained; those before it are taken from an earlier run.
        measuring: Whether to make steps on the device if these settings have not been measured yet; else it is not
            used, and RatpError is raised.
    """
    costs = _kept(plan, stream)
    if costs is None:
        if not measuring:
            raise RatpError("not measured yet; --dry-run measures it")
        costs = _measured_and_kept(plan, stream)
    lengths, reused = _lengths(plan, stream, reuse_source=reuse_source)
    tests = stream.test_counts
    measured = sum(count or 0 for count in tests)
    known = min(len(stream.source), KNOWN_IMAGES)
    stages = []
    domains: list[LabelledDomain | UnlabelledDomain] = [stream.source, *stream.targets]
    for number, domain in enumerate(domains):
        if number < first:
            continue
        images, kinds = len(domain), costs.target if number else costs.source
        cost = costs.predict * (measured if tests[number] is not None else measured + images)
        for kind, (epochs, steps) in zip(kinds, lengths[number], strict=False):
            cost += kind.total(epochs, steps, images)
        if number and plan.guard != "off":
            cost += costs.guard * (min(images, DOMAIN_IMAGES) + known)
        if probe:
            cost += costs.predict * ((tests[number] or 0) * sum(epochs for epochs, _ in lengths[number]))
        if plan.online and number:
            cost += costs.predict * (3 * (tests[number] or 0))
        total = sum(epochs * steps for epochs, steps in lengths[number])
        stages.append(StageEstimate(domain.name, images, tests[number], total, cost))
    return Estimate(tuple(stages), costs.memory, reused)


def _lengths(plan: RunPlan, stream: Stream, *, reuse_source: bool) -> tuple[list[list[tuple[int, int]]], bool]:
    """Returns epochs and steps of every phase of every stage, and whether a source network is reused."""
    models = plan.source_models(stream) if reuse_source else None
    plan = replace(plan, device=torch.device("cpu"))  # nothing is computed
    with torch.random.fork_rng(devices=[]):
        method = plan.build_method(stream, models)
        try:
            phases = method.source_phases(stream.source)
        except RatpError:  # another run trains the same network
            method = plan.build_method(stream)
            phases = method.source_phases(stream.source)
        finally:
            if models:
                models.release()
        lengths = [[(phase.epochs, phase.steps) for phase in phases]]
        for target, answer in zip(stream.targets, stream.answers, strict=True):
            found = _target_phases(plan, method, target, answer)
            lengths.append([(phase.epochs, phase.steps) for phase in found])
    return lengths, any(not phase.epochs for phase in phases)


def _target_phases(
    plan: RunPlan, method: Method, target: UnlabelledDomain, answer: LabelledDomain | None
) -> Sequence[Phase]:
    if answer is not None and plan.method.uses_target_labels(plan.config):
        return method.labelled_target_phases(answer)
    return method.target_phases(target)


class _Clock:
    """Measures the time since it was asked last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._then = self._now()

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter(), time.process_time()

    def lap(self) -> Cost:
        """Returns the time since the last lap."""
        before, self._then = self._then, self._now()
        return Cost(*(now - then for now, then in zip(self._then, before, strict=True)))


def measure(plan: RunPlan, stream: Stream) -> Costs:
    """Measures what the parts of a run cost, with a method of its own."""
    device, clock = plan.device, _Clock(plan.device)
    before = _memory(device)
    with torch.random.fork_rng(devices=[]):
        method = plan.build_method(stream)
        method.predict(stream.source.images[:LEAST_BATCH])  # the first is slower
        clock.lap()
        method.predict(stream.source.images[:LEAST_IMAGES])
        seconds = clock.lap().wall / min(LEAST_IMAGES, len(stream.source))
        count = min(max(int(LONGEST_PASS / max(seconds, 1e-9)), LEAST_IMAGES), MOST_IMAGES)
        full = plan.recipe.batch
        batch = max(min(int(LONGEST_STEP / (_PASSES_OF_A_STEP * max(seconds, 1e-9))), full), min(LEAST_BATCH, full))
        small = replace(plan, recipe=replace(plan.recipe, batch=batch, lr=_NO_RATE))
        method = small.build_method(stream)
        source, target = stream.source, stream.targets[-1]
        source = source.subset(_some(source, count, plan.seed))
        chosen = _some(target, count, plan.seed)
        target = UnlabelledDomain(target.name, target.images[chosen])
        answer = stream.answers[-1].subset(chosen) if stream.answers[-1] is not None else None
        rounds = 2 if batch < full else 3
        on_source = _measured(method.source_phases(source), clock, rounds, len(source), full / batch)
        _make_confident(method, target.images)
        clock.lap()
        watch = None if plan.guard == "off" else Watch(method, target, source, Randomness(plan.seed))
        guard = clock.lap()
        phases = _target_phases(plan, method, target, answer)
        on_target = _measured(phases, clock, rounds, len(target), full / batch)
        clock.lap()
        if watch:
            watch.judge(method)
            guard += clock.lap()
        guarded = min(len(target), DOMAIN_IMAGES) + min(len(source), KNOWN_IMAGES)
        clock.lap()
        method.predict(target.images)
        predict = clock.lap() * (1 / len(target))
    used = _memory(device)
    memory = round(used + (used - before) * (full / batch - 1))
    return Costs(tuple(on_source), tuple(on_target), predict, guard * (1 / guarded), memory)


def _some(domain: LabelledDomain | UnlabelledDomain, count: int, seed: int) -> torch.Tensor:
    """Selects some images of a domain."""
    return torch.randperm(len(domain), generator=Randomness(seed).generator("estimate", domain.name))[:count]


def _make_confident(method: Method, images: torch.Tensor) -> None:
    """Scales the classifiers so that half of some images have a lead of :data:`_LEAD` logits."""
    first, second = method.predict(images).topk(2, dim=1).values.unbind(dim=1)
    lead = float((first - second).median())
    for value in vars(method).values():
        if isinstance(value, Network) and lead > 0:
            value.set_prototypes(value.prototypes * (_LEAD / lead))


def _measured(phases: Sequence[Phase], clock: _Clock, rounds: int, images: int, larger: float) -> list[PhaseCost]:
    """Makes a few steps of every phase in a few epochs; ``larger`` is the factor on the batch of the run."""
    found = []
    for phase in phases:
        phase.epochs, phase.steps = min(phase.epochs, rounds), min(phase.steps, rounds)
        firsts: list[Cost] = []
        steps: list[Cost] = []
        finish = Cost()
        clock.lap()
        for moment in train([phase]):
            lap = clock.lap()
            if not isinstance(moment, Tick):
                finish = lap
            elif moment.step == 1:
                firsts.append(lap)
            else:
                steps.append(lap)
        step = sum(steps, Cost()) * (1 / len(steps)) if steps else min(firsts, key=lambda c: c.wall, default=Cost())
        begins = [Cost(max(c.wall - step.wall, 0.0), max(c.cpu - step.cpu, 0.0)) for c in firsts] or [Cost()]
        later = sum(begins[1:], Cost()) * (1 / max(len(begins) - 1, 1))
        each = 1 / images
        found.append(PhaseCost(step * larger, begins[0] * each, later * each, finish * each))
    return found


def _memory(device: torch.device) -> int:
    """Most bytes used so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _file(plan: RunPlan, stream: Stream) -> Path:
    """The file for what was measured with these settings on this device and as many images."""
    decisions = {name: value for name, value in plan.decisions().items() if name not in ("seed", "order", "stream")}
    images = [len(stream.source), len(stream.targets[-1]), *stream.image_size, len(stream.classes)]
    about = [decisions, images, plan.guard, describe_environment(plan.device, plan.precision)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "estimates" / f"{digest[:32]}.json"


def _kept(plan: RunPlan, stream: Stream) -> Costs | None:
    """Reads what was measured before; None if nothing was."""
    try:
        data = read_json(_file(plan, stream))
        phases = [
            tuple(
                PhaseCost(*(Cost(**item[name]) for name in ("step", "first", "later", "finish"))) for item in data[kind]
            )
            for kind in ("source", "target")
        ]
        return Costs(phases[0], phases[1], Cost(**data["predict"]), Cost(**data["guard"]), int(data["memory"]))
    except (RatpError, KeyError, TypeError, ValueError):
        return None


def _measured_and_kept(plan: RunPlan, stream: Stream) -> Costs:
    costs = measure(plan, stream)
    with suppress(RatpError, OSError):
        path = _file(plan, stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(costs))
    return costs
