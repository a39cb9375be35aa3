"""What every method costs on a benchmark, by the second: a stage on the source and one on a target, each method alone.

Two epochs of every phase are trained, with all their steps, labelling and recording of graphs; the second one counts,
times the number of epochs the phase has. An order is then the source's stage and as many of the target's as there are
targets; measuring on the test images comes on top. With ``--repeat``, the shortest time of every part counts. On a
CPU, it is the processor's time on one core, so other programs disturb it little.

The memory of a training step is what autograd keeps for the gradient, in MiB: the most that is kept at one time in the
first steps of either stage. It depends on no clock and no other program. Weights and what is computed without a
gradient come on top.

Benchmarks need their images (``--data`` or ``$RATP_DATA``). Prints a table; ``--out`` keeps the numbers with device and
versions, and ``tools/docs.py`` makes the columns and tables of costs in ``docs/reference/methods.md`` of them. If the
file has other methods, measured with the same device and versions, they stay in it.
"""

from __future__ import annotations

import argparse
import json
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ratp._core.environment import changes, describe_environment, use_precision
from ratp._core.files import write_json
from ratp.errors import RatpError
from ratp.evaluation.accuracy import accuracy
from ratp.methods import METHODS
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.streams.stream import DataOptions, Stream
from ratp.training.device_cache import with_images_on
from ratp.training.method import Method
from ratp.training.phase import Phase, Tick, train

EPOCHS = 2  # trained of every phase
STEPS = 2  # trained of every phase to measure memory


def now(device: torch.device) -> float:
    """The time when the GPU has caught up; on a CPU, the time that this process has used."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def stage_seconds(phases: Sequence[Phase], device: torch.device) -> float:
    """Time of a stage, from the last of two epochs of each of its phases."""
    whole = {id(phase): phase.epochs for phase in phases}
    for phase in phases:
        phase.epochs = min(phase.epochs, EPOCHS)
    seconds, started = 0.0, now(device)
    for moment in train(phases, capture=device.type == "cuda"):
        if isinstance(moment, Tick) and not moment.epoch_done:
            continue
        ended = now(device)
        if not isinstance(moment, Tick):
            seconds += ended - started  # what comes after the last epoch
        elif moment.epoch + 1 == moment.phase.epochs:
            seconds += (ended - started) * whole[id(moment.phase)]
        started = ended
    return seconds


def target_phases(method: Method, plan: RunPlan, stream: Stream) -> Sequence[Phase]:
    """The phases of the first target."""
    answer = stream.answers[0]
    if plan.method.uses_target_labels(plan.config) and answer is not None:
        return method.labelled_target_phases(with_images_on(answer, plan.device))
    return method.target_phases(with_images_on(stream.targets[0], plan.device))


class _Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedMemory:
    """Counts the bytes that autograd keeps; tensors that share memory count once."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        self._now = self.peak = 0

    def keep(self, tensor: torch.Tensor) -> _Saved:
        """Counts a tensor until autograd drops it."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self._now += 0 if self._uses[address] else size
        self._uses[address] += 1
        self.peak = max(self.peak, self._now)
        saved = _Saved(tensor)
        weakref.finalize(saved, self._drop, address, size)
        return saved

    def _drop(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        self._now -= 0 if self._uses[address] else size


def step_memory(plan: RunPlan, stream: Stream) -> float:
    """The most MiB that a training step of one method keeps for its gradient."""
    method, memory = plan.build_method(stream, None), SavedMemory()
    with torch.autograd.graph.saved_tensors_hooks(memory.keep, lambda saved: saved.tensor):
        for target in (False, True):
            phases = target_phases(method, plan, stream) if target else method.source_phases(stream.source)
            for phase in phases:
                phase.epochs, phase.steps = min(phase.epochs, 1), min(phase.steps, STEPS)
            for _ in train(phases):
                pass
    return round(memory.peak / (1 << 20), 2)


def measure(plan: RunPlan, stream: Stream) -> dict[str, float]:
    """Times of one method."""
    device = plan.device
    method = plan.build_method(stream, None)
    numbers = {"source": stage_seconds(method.source_phases(with_images_on(stream.source, device)), device)}
    numbers["target"] = stage_seconds(target_phases(method, plan, stream), device)
    started = now(device)
    for test in stream.tests:
        if test is not None:
            accuracy(method, test)
    numbers["measuring"] = now(device) - started
    return numbers


def shortest(trials: Sequence[Mapping[str, float]], targets: int) -> dict[str, float]:
    """The shortest time of every part, and an order's, which consists of these."""
    numbers = {part: min(trial[part] for trial in trials) for part in trials[0]}
    numbers["order"] = numbers["source"] + targets * numbers["target"] + (1 + targets) * numbers["measuring"]
    return {name: round(value, 2) for name, value in numbers.items()}


def others(path: Path, content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Numbers a file has that were measured in the same way on the same machine, be it with other code."""
    if not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text())
    differing = changes(kept["environment"], content["environment"]).keys() - {"code"}
    same = kept["options"] == content["options"] and not differing
    return dict(kept["numbers"]) if same else {}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", default="digits")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names; default: all")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="measure the time N times; 0: memory alone")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    heads = ("source", "target", "measuring", "order", "memory")
    print(f"{'s, MiB':12} {' '.join(f'{head:>10}' for head in heads)}")
    for name in options.methods:
        request = RunRequest(
            options.stream,
            method=name,
            device=options.device,
            precision=options.precision,
            data=DataOptions(options.data),
        )
        plan = resolve(request)
        use_precision(plan.precision)
        if plan.device.type == "cpu":
            torch.set_num_threads(1)
        try:
            stream = plan.load_stream()
            times = [measure(plan, stream) for _ in range(options.repeat)]
            memory = {"memory": step_memory(plan, stream)} if plan.device.type == "cpu" else {}
        except RatpError as error:
            print(f"{name:12} {error}")
            continue
        row = (shortest(times, len(stream.targets)) if times else {}) | memory
        print(f"{name:12} {' '.join(f'{row[h]:10.1f}' if h in row else ' ' * 10 for h in heads)}", flush=True)
        if options.out:
            arguments = {key: getattr(options, key) for key in ("stream", "precision")}
            environment = describe_environment(plan.device, plan.precision)
            content = {"options": arguments, "environment": environment}
            known = others(options.out, content)
            known[name] = known.get(name, {}) | row
            write_json(options.out, {"numbers": known, **content})


if __name__ == "__main__":
    main()
