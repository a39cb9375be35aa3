"""Exports a trained model as one file that runs without ratp: ONNX, or a program of ``torch.export``.

The file takes uint8 images, shape (n, 3, height, width), and returns probabilities and logits. Before it is written,
its logits are compared with those of :meth:`ratp.LoadedRun.predict`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ratp import __version__
from ratp._core.environment import Randomness
from ratp._core.files import write_bytes
from ratp.config import override
from ratp.data.cache.manifest import describe_refused
from ratp.data.domain import LabelledDomain
from ratp.data.read.paths import decode_part, list_images
from ratp.deploy.onnx_file import INPUT, check_onnx, in_batches, run_onnx, to_half, to_int8, to_onnx
from ratp.deploy.source import source_images
from ratp.deploy.store import is_deployment, read_current
from ratp.errors import ConfigError, RatpError, RunDirectoryError, brief, unknown
from ratp.networks.own import Given
from ratp.runs.load import LoadedRun, load
from ratp.streams import STREAMS, find_stream
from ratp.streams.files import load_domains
from ratp.streams.stream import DataOptions
from ratp.training.recipe import Recipe, Scaling

Format = Literal["onnx", "torch"]
Kind = Literal["fp32", "fp16", "int8"]
ENDINGS: Mapping[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
# Images that files are compared on, and those of a domain that accuracies are measured on.
COMPARED, MEASURED = 64, 500
# Largest difference of logits between a file and ratp.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Exported:
    """One file that was written, and how it compares with the model in ratp.

    Attributes:
        path: The file.
        precision: ``fp32``, ``fp16`` or ``int8``.
        size: Its bytes.
        image_size: Height and width of the images it takes.
        images: Number of images it was compared on.
        origin: Where these come from.
        difference: Largest difference of logits.
        agreement: Share of these images that get the same class.
        accuracy: Accuracy in percent of the model in ratp, then of the file, by labelled domain.
    """

    path: Path
    precision: Kind
    size: int
    image_size: tuple[int, int]
    images: int
    origin: str
    difference: float
    agreement: float
    accuracy: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class _Trained:
    """A trained model, the metadata of its files, and labelled images of its source that a deployment keeps."""

    run: LoadedRun
    about: Mapping[str, str]
    known: LabelledDomain | None = None


@dataclass(frozen=True)
class _File:
    """A file before it is written, and what computes its logits."""

    path: Path
    precision: Kind
    data: bytes
    logits: Callable[[Tensor], Tensor]


def export(
    run: Path | str,
    out: Path | str | None = None,
    *,
    to: Format = "onnx",
    images: Sequence[Path | str] = (),
    labelled: Path | str | None = None,
    half: bool = False,
    int8: bool = False,
    options: DataOptions | None = None,
    method: Path | str | None = None,
    backbone: Given | None = None,
) -> tuple[Exported, ...]:
    """Exports a trained model; nothing is written unless the file predicts as the model does.

    Args:
        run: Directory of a run or of a deployment.
        out: The file; None: the directory's name in the current folder, with ``.onnx`` or ``.pt2``.
        to: ``onnx``, or ``torch`` for a program of ``torch.export``.
        images: Files, folders and zips of images to compare on; empty: those of a built-in stream or a deployment,
            else random ones.
        labelled: Folder or zip with one folder per class, to measure accuracies on.
        half: Whether to write a second file in 16-bit floats, with ``-fp16`` in its name.
        int8: Whether to write a second file in 8-bit integers, with ``-int8`` in its name.
        options: How to read images.
        method: The file of a custom method, a program that is run only because you name it.
        backbone: The network of your own that the run has, as for :func:`ratp.load`.

    Returns:
        The files, the one in full precision first.
    """
    check_request(to, half=half, int8=int8)
    reading = options or DataOptions()
    trained = _load(Path(run), method, backbone)
    given = None if labelled is None else Path(labelled)
    domains = _labelled(trained, given, reading) if half or int8 or given else []
    pictures, origin = _pictures(trained, [Path(item) for item in images], domains, reading)
    if int8 and origin.startswith(RANDOM):
        raise ConfigError("int8 needs real images, which show the range of every number: give some with --images.")
    expected = trained.run.predict(pictures)
    program = _traced(trained.run, pictures, expected)
    path = default_path(run, to) if out is None else Path(out)
    if to == "torch":
        files = [_File(path, "fp32", _saved(program, trained.about), partial(_run, program))]
    else:
        data = to_onnx(program, trained.about)
        smaller: list[tuple[Kind, bytes]] = [("fp16", to_half(data))] if half else []
        smaller += [("int8", to_int8(data, pictures))] if int8 else []
        files = [_File(path, "fp32", data, partial(run_onnx, data))]
        files += [_File(beside(path, kind), kind, less, partial(run_onnx, less)) for kind, less in smaller]
    difference = _difference(files[0].logits(pictures), expected)
    if not difference <= TOLERANCE:
        raise RatpError(f"the exported model does not predict as ratp does: {_far(difference)} Nothing was written.")
    before = [(domain, trained.run.predict(domain.images)) for domain in domains]
    done = []
    for file in files:
        found = file.logits(pictures)
        same = float((found.argmax(dim=1) == expected.argmax(dim=1)).float().mean())
        pairs = {d.name: (_percent(logits, d), _percent(file.logits(d.images), d)) for d, logits in before}
        far = _difference(found, expected)
        about = file.path, file.precision, len(file.data), trained.run.image_size, len(pictures), origin
        done.append(Exported(*about, far, same, pairs))
    for file in files:
        write_bytes(file.path, file.data)
    return tuple(done)


def check_request(to: str, *, half: bool, int8: bool) -> None:
    """Raises a ConfigError if there is no such format, or its libraries are missing."""
    if to not in get_args(Format):
        raise ConfigError(unknown("format", to, get_args(Format)))
    if to == "torch" and (half or int8):
        raise ConfigError("--half and --int8 are for ONNX: leave them out, or give --to onnx.")
    if to == "onnx":
        check_onnx()


def default_path(run: Path | str, to: Format) -> Path:
    """Returns the name of a run's file in the current folder."""
    return Path(f"{Path(run).resolve().name}{ENDINGS[to]}")


def beside(path: Path, precision: Kind) -> Path:
    """Returns the name of a smaller file next to the one in full precision."""
    return path.with_name(f"{path.stem}-{precision}{path.suffix}")


def _load(folder: Path, method: Path | str | None, backbone: Given | None) -> _Trained:
    """Loads the method of a run, or of the version of a deployment that answers."""
    deployed = read_current(folder) if is_deployment(folder) else None
    run = load(folder / "run" if deployed else folder, device="cpu", method=method, backbone=backbone)
    height, width = run.image_size
    about = {
        "classes": json.dumps(run.classes, ensure_ascii=False),
        "image_size": json.dumps(run.image_size),
        "preprocessing": f"RGB, resized to {width}x{height} without cropping (bilinear with antialiasing), uint8, "
        "channels first; the normalisation is part of the model",
        "method": str(run.config["method"]),
        "stages": json.dumps(run.stages, ensure_ascii=False),
        "fingerprint": str(run.config["fingerprint"]),
        "ratp": __version__,
    }
    known = None
    if deployed:
        version, state, images = deployed
        try:
            run.method.load_state(state)
            if "labels" in images:
                known = LabelledDomain(version.known[0], images["images"], images["labels"], run.classes)
        except (RuntimeError, KeyError, ValueError) as error:
            raise RunDirectoryError(f"version {version.number} of {folder} is damaged: {brief(error)}") from error
        about |= {"version": str(version.number), "stages": json.dumps(version.known, ensure_ascii=False)}
    return _Trained(run, about, known)


def _labelled(trained: _Trained, given: Path | None, options: DataOptions) -> list[LabelledDomain]:
    """Returns labelled images to measure on: the user's, a deployment's or those of a built-in stream; or none."""
    run = trained.run
    side, stream = run.image_size[0], str(run.config["stream"])
    if given is not None:
        loaded = load_domains({given.name: given}, side, options, classes=run.classes)
    elif trained.known is not None:
        return [trained.known]
    elif stream in STREAMS:
        loaded = find_stream(stream).load(run.stages, side, options)
        loaded[0] = replace(loaded[0], domain=source_images(run, None, options))
    else:
        return []
    domains = [item.domain for item in loaded if isinstance(item.domain, LabelledDomain)]
    return [domain.subset(_some(domain, MEASURED)) for domain in domains]


RANDOM = "random images"


def _pictures(
    trained: _Trained, given: Sequence[Path], domains: Sequence[LabelledDomain], options: DataOptions
) -> tuple[Tensor, str]:
    """Returns images to compare on, and where they come from."""
    run, size = trained.run, trained.run.image_size
    if given:
        tree = list_images(given)
        places = torch.linspace(0, len(tree.files) - 1, min(len(tree.files), COMPARED)).long().tolist()
        chosen = replace(tree, files=tuple(tree.files[place] for place in places))
        part = decode_part(chosen, 0, len(chosen.files), size)
        if part.bad and (options.on_bad == "stop" or not part.names):
            raise RatpError(describe_refused(part.bad, len(chosen.files)))
        if not part.names:
            raise RatpError(f"{', '.join(map(str, given))} has no images.")
        return part.images, ", ".join(map(str, given))
    why = "name real ones with --images"
    if not domains and trained.known is None and str(run.config["stream"]) in STREAMS:
        try:
            domains = [source_images(run, None, options)]
        except RatpError as error:
            why = brief(error)
    domains = domains or ([trained.known] if trained.known else [])
    if domains:
        each = -(-COMPARED // len(domains))
        return torch.cat([d.images[_some(d, each)] for d in domains]), ", ".join(d.name for d in domains)
    generator = Randomness(0).generator("export")
    return torch.randint(256, (COMPARED, 3, *size), dtype=torch.uint8, generator=generator), f"{RANDOM} ({why})"


def _some(domain: LabelledDomain, count: int) -> Tensor:
    """Returns the places of some images, the same ones on every call."""
    return torch.randperm(len(domain), generator=Randomness(0).generator("export", domain.name))[:count]


class _Program(nn.Module):
    """What is exported: from uint8 images to probabilities and logits."""

    def __init__(self, run: LoadedRun) -> None:
        super().__init__()
        recipe = override(Recipe(), run.config["recipe"])
        self._scaling = Scaling(recipe.mean, recipe.std, torch.device("cpu"))
        self._compute = run.method.compute_logits  # no submodule, so only the tensors that it uses are exported

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._compute(self._scaling(images))
        assert logits is not None
        return logits.softmax(dim=1), logits


def _traced(run: LoadedRun, images: Tensor, expected: Tensor) -> ExportedProgram:
    """Turns a method's prediction into a program; refuses a method that predicts in another way."""
    for part in vars(run.method).values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    name, program = run.config["method"], _Program(run).eval()
    with torch.no_grad():
        first = run.method.compute_logits(torch.zeros(1, 3, *run.image_size))
        if first is None:
            raise RatpError(f"{name} cannot be exported: its predictions need more than its networks.")
        difference = _difference(_run(program, images), expected)
        if not difference <= TOLERANCE:
            raise RatpError(f"{name} cannot be exported: {_why_not(run)} {_far(difference)}")
        sample = images[:1].expand(2, -1, -1, -1).contiguous()  # a batch of 1 would be taken for a constant
        return torch.export.export(program, (sample,), dynamic_shapes={INPUT: {0: Dim("n")}}, strict=False)


def _why_not(run: LoadedRun) -> str:
    if not run.together:
        return "it predicts by more than what it declares as its logits."
    remedy = " Train it with --set eval_bn=running." if "eval_bn" in run.config["switches"] else ""
    return f"its predictions depend on which images come together, and a file answers each on its own.{remedy}"


def _saved(program: ExportedProgram, about: Mapping[str, str]) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"ratp.json": json.dumps(about, ensure_ascii=False)})
    return file.getvalue()


@torch.no_grad()
def _run(program: nn.Module | ExportedProgram, images: Tensor) -> Tensor:
    """Returns a program's logits."""
    module = program if isinstance(program, nn.Module) else program.module()
    return torch.cat([module(part)[1] for part in in_batches(images)])


def _difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference; NaN if there is any."""
    return float((found - expected.cpu()).abs().max())


def _far(difference: float) -> str:
    return f"Logits differ by up to {difference:.2g}; {TOLERANCE:g} is allowed."


def _percent(logits: Tensor, domain: LabelledDomain) -> float:
    return 100 * float((logits.argmax(dim=1).cpu() == domain.labels).float().mean())
