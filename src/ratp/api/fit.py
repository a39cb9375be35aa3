"""Trains on a source and its targets in one call."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratp._core.user_code import split_file
from ratp.api.result import FitResult, RollbackWarning
from ratp.cli.console import decoding, print_notes, stderr
from ratp.cli.progress import shown
from ratp.networks.own import Given
from ratp.runs import DEFAULT_PRESET
from ratp.runs.events import StageFinished
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.own import own_stream
from ratp.streams.stream import DataOptions
from ratp.training.method import Method


def fit(
    source: Any,
    targets: Any,
    method: str | Path | type[Method] = "ratp",
    *,
    backbone: Given | None = None,
    seed: int = 2022,
    preset: str = DEFAULT_PRESET,
    out: Path | str | None = None,
    device: str = "auto",
    tests: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    weights: Path | str = "auto",
    guard: str = "auto",
    progress: bool = True,
    **switches: Any,
) -> FitResult:
    """Trains on a labelled source, then adapts to unlabelled targets one after another.

    ``source`` and ``targets`` are what :func:`ratp.own_stream` takes: folders, tensors, data sets, loaders, domains.
    If the guard undoes the training on a target, there is a :class:`RollbackWarning`.

    Args:
        source: The labelled domain to begin with.
        targets: A domain, a list of domains in their order of arrival, or a dict of them by name. Labels of targets
            only serve to measure accuracies.
        method: Name of a method, path of a file that defines one, or a :func:`ratp.loss_method`.
        backbone: Name of a backbone, or one of your own: a module, a class or function that builds one, or
            ``FILE.py:NAME``. By default ResNet-50 as for folders, and DTN for images in memory of up to 64 pixels.
        seed: Seed of everything random.
        preset: Preset of switches to start from.
        out: Run directory. An interrupted run in it is continued, a finished one is read. By default, the run is in a
            temporary folder, which is removed with the result.
        device: ``cpu``, ``cuda``, ``cuda:1``, …, ``mps``, or ``auto``.
        tests: Labelled images to measure accuracies on, by the name of their domain.
        classes: Class names by number, for labels that are numbers.
        weights: Initial weights of a backbone that has a name: a file, ``imagenet`` or ``none``.
        guard: ``off``, ``record``, ``act``, or ``auto``, which acts on your own images.
        progress: Whether to show progress.
        **switches: Switches of the method and sizes of the recipe, such as ``epochs=5``; names with a dot as
            ``**{"network.dim": 64}``.

    Returns:
        The trained model, with its accuracies.

    Raises:
        ConfigError: If something that is given cannot be used; it lists all mistakes.
        TrainingError: If the losses become NaN or infinite.

    Examples:
        >>> result = ratp.fit("pictures/day", ["pictures/rain", "pictures/night"], epochs=5)
        >>> result = ratp.fit((images, labels), {"rain": rain_images}, method="shot", backbone=TinyNet)
    """
    stream = own_stream(source, targets, tests=tests, classes=classes)
    own = backbone
    if isinstance(backbone, str) and split_file(backbone) is None:
        own, switches = None, {**switches, "network.backbone": backbone}
    loss = method if isinstance(method, type) else None
    request = RunRequest(
        method="ratp" if loss else str(method),
        preset=preset,
        seed=seed,
        changes=switches,
        device=device,
        weights=str(weights),
        guard=guard,
    )
    plan = resolve(request, stream=stream, method=loss, backbone=own)
    console = stderr()
    with _folder(out) as folder:
        with decoding(console, quiet=not progress) as report:
            run = Run(replace(plan, data=DataOptions(progress=report)), folder)
        if progress:
            print_notes(run.stream, console)
        with shown(run, console, quiet=not progress) as see, closing(run.events()) as events:
            for event in events:
                see(event)
                if isinstance(event, StageFinished):
                    _warn(event)
    path_or_loss = method if loss or not plan.is_built_in else None
    return FitResult(run.record(), device, path_or_loss, is_temporary=out is None)


@contextmanager
def _folder(out: Path | str | None) -> Iterator[Path]:
    """Yields the run directory; a temporary one is removed if an error occurs."""
    folder = Path(tempfile.mkdtemp(prefix="ratp-") if out is None else out)
    try:
        yield folder
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _warn(event: StageFinished) -> None:
    if event.guard and event.guard["rolled_back"]:
        text = (
            f"the training on {event.domain!r} was undone: {'; '.join(event.guard['reasons'])}. The previous model "
            "continues. Look at its images; with guard='off' the model learns from them anyway."
        )
        warnings.warn(text, RollbackWarning, stacklevel=3)
