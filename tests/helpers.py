"""Small inputs for tests: plans of a few steps, and domains generated in a millisecond."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from ratp._core import files
from ratp._core.environment import Randomness
from ratp.cli.main import main
from ratp.data.domain import LabelledDomain
from ratp.executors import local
from ratp.methods import METHODS
from ratp.runs.events import Event
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.stream import DataOptions, LoadedDomain, StreamSpec, make_stream
from ratp.training.method import Method

TINY: dict[str, Any] = {
    "epochs": 2,
    "steps": 2,
    "batch": 8,
    "network.width": 0.05,
    "network.hidden": 12,
    "network.dim": 6,
    "memory": 24,
}
TINY_OPTIONS = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
# One per mechanism: memory and RandMix, a second phase, several networks, trained generators, no gradient.
REPRESENTATIVES = ("ratp", "shot++", "cotta", "pden", "t3a")
CLASSES = ("north", "east", "south", "west")
CORNERS = ((0, 0), (0, 16), (16, 16), (16, 0))


def slow(*values: Any, unless: bool = False, name: str | None = None) -> Any:
    """A case for ``parametrize`` that is slow, unless a condition holds."""
    return pytest.param(*values, marks=() if unless else pytest.mark.slow, id=name)


def each_method(*, without: Sequence[str] = ()) -> list[Any]:
    """All methods, for ``parametrize``; those that are no representatives are slow."""
    return [slow(name, unless=name in REPRESENTATIVES) for name in METHODS if name not in without]


def load_tool(name: str) -> ModuleType:
    """A program of the folder ``tools``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "tools" / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    sys.modules[name] = tool  # dataclasses look their module up
    spec.loader.exec_module(tool)
    return tool


def toy_domain(
    name: str, count: int = 40, *, classes: Sequence[int] = (0, 1, 2, 3), held_out: int = 0
) -> LabelledDomain:
    """Noise with a bright quarter that shows the class, in colours that show the domain.

    Args:
        name: Name of the domain; all its chance comes from it.
        count: Number of images.
        classes: Classes that occur, in turn.
        held_out: How many of the last images are its own test part; 0: it has none.
    """
    generator = Randomness(0).generator("toy", name)
    labels = torch.tensor([classes[i % len(classes)] for i in range(count)])
    images = torch.randint(120, (count, 3, 32, 32), generator=generator)
    tint = torch.randint(40, 130, (3, 1, 1), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        y, x = CORNERS[label]
        image[:, y : y + 16, x : x + 16] += tint
    test_part = torch.arange(count) >= count - held_out if held_out else None
    return LabelledDomain(name, images.to(torch.uint8), labels, CLASSES, test_part)


def toy_domains(**sizes: int) -> list[LabelledDomain]:
    """A source and targets, by name and size; three domains by default."""
    return [toy_domain(name, count) for name, count in (sizes or {"ink": 40, "mud": 32, "fog": 36}).items()]


def toy_spec(domains: Sequence[LabelledDomain]) -> StreamSpec:
    """A stream of given domains, called ``toy``."""
    by_name = {domain.name: domain for domain in domains}

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        del size, options
        return [LoadedDomain(by_name[code]) for code in codes]

    return StreamSpec(
        name="toy",
        title="Bright quarters",
        domains=dict.fromkeys(by_name, "noise with a bright quarter"),
        orders={"default": tuple(by_name)},
        recipe=tiny_plan().recipe,
        load=load,
    )


# What single passes over the whole embedded stream would take too long without.
QUICK = {"cotta": {"views": 2}}


def tiny_plan(
    method: str = "ratp", *, seed: int = 2022, preset: str = "official", changes: Mapping[str, Any] | None = None
) -> RunPlan:
    """A few steps on the embedded stream, on the processor."""
    tiny = {**TINY, **QUICK.get(method, {}), **(changes or {})}
    return resolve(RunRequest(method=method, seed=seed, preset=preset, changes=tiny, device="cpu"))


def toy_plan(
    method: str = "ratp",
    domains: Sequence[LabelledDomain] | None = None,
    *,
    seed: int = 2022,
    preset: str = "official",
    changes: Mapping[str, Any] | None = None,
) -> RunPlan:
    """A few steps on toy domains, with small kernels where there are kernels."""
    spec = toy_spec(domains or toy_domains())
    kernels = {"randmix.kernel_sizes": "3,5"} if method in ("arc", "ratp") else {}
    plan = tiny_plan(method, seed=seed, preset=preset, changes={**kernels, **(changes or {})})
    return replace(plan, spec=spec, order=spec.orders["default"])


def domains_of(plan: RunPlan) -> list[LabelledDomain]:
    """The domains of a plan, with their labels."""
    loaded = [item.domain for item in plan.spec.load(plan.order, plan.recipe.size, plan.data)]
    assert all(isinstance(domain, LabelledDomain) for domain in loaded)
    return loaded  # type: ignore[return-value]


def toy_method(plan: RunPlan) -> tuple[Method, LabelledDomain, list[LabelledDomain]]:
    """The method of a toy plan, untrained, with the source's training part and the targets as generated."""
    domains = domains_of(plan)
    stream = make_stream("toy", domains, plan.seed)
    return plan.build_method(stream), stream.source, domains[1:]


def tensors_of(folder: Path, name: str = "state") -> dict[str, torch.Tensor]:
    """The tensors in a file of a run directory."""
    return load_file(folder / f"{name}.safetensors")


def same_tensors(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are the same, bit by bit."""
    return some.keys() == others.keys() and all(
        some[name].dtype == others[name].dtype and torch.equal(some[name], others[name]) for name in some
    )


def all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every number is one."""
    return all(bool(tensor.double().isfinite().all()) for tensor in tensors.values())


def journal_of(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The journal's events, all or those of one kind."""
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [e for e in events if event in (None, e["event"])]


def accuracy_of(folder: Path) -> list[list[float]]:
    """The accuracies in ``matrix.json``."""
    return json.loads((folder / "matrix.json").read_text())["accuracy"]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file under a folder but the lock, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes files of a name unreadable for the package, even if root runs the tests."""
    usual = files.open_file

    def opened(path: Path) -> IO[bytes]:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(path)

    monkeypatch.setattr(files, "open_file", opened)


class NoProcess:
    """Executes runs here, in the place of :class:`ratp.executors.process.Worker`."""

    def __init__(self, device: torch.device, slots: int = 1) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def events(self, run: Run) -> Generator[Event, None, None]:
        return run.events()


@contextmanager
def no_processes() -> Iterator[None]:
    """Executes the runs of studies in this process: to start another takes seconds, and tests use one thread anyway."""
    with patch.object(local, "Worker", NoProcess):
        yield


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


def ratp(*arguments: object) -> Outcome:
    """Runs the command line in this process; an exception it lets out is the test's failure."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with patch.object(sys, "argv", ["ratp", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Outcome(code, out.getvalue(), err.getvalue())
