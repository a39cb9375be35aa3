"""Loads a trained method from its run directory, for predictions on other images.

It needs neither the training images nor the original request: ``config.json`` has every value and
``state.safetensors`` the method. So the method predicts exactly as it did in the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, overload

import torch
from torch import Tensor

from ratp._core.environment import Precision, Randomness, find_device, find_precision, use_precision
from ratp._core.files import ENVIRONMENT, LostFileError, read_json
from ratp.config import override
from ratp.data.cache.decoded import OnBad
from ratp.data.cache.manifest import describe_all_bad, describe_refused
from ratp.data.decode.parallel import Progress
from ratp.data.in_memory import read_images
from ratp.data.read.listing import Unreadable, why_unsupported
from ratp.data.read.paths import decode_part, list_images
from ratp.errors import ConfigError, Note, RatpError, RunDirectoryError, unknown
from ratp.evaluation.accuracy import Guesses
from ratp.methods import METHODS
from ratp.methods.custom import file_hash, from_file
from ratp.networks.own import Given, find_own
from ratp.runs.predictions import Prediction, predictions_of
from ratp.runs.record import fingerprint_of, read_config
from ratp.runs.states import State, States
from ratp.training.method import Method, Setting
from ratp.training.recipe import Recipe, chunk_size

_CHUNK_BYTES = 2**28  # decoded images in memory at a time
_ADVICE = "Use an unmodified run directory."
_NEEDED: dict[str, type] = {
    "method": str,
    "seed": int,
    "order": list,
    "classes": list,
    "recipe": dict,
    "switches": dict,
    "fingerprint": str,
}
_MISFITS = RatpError, KeyError, TypeError, ValueError, RuntimeError, MemoryError


class UnfinishedWarning(Note):
    """A run is used before its end, or in an earlier state than its last one."""


@dataclass(frozen=True)
class FilePredictions(Sequence[Prediction]):
    """A model's predictions for image files: a sequence of file, label and confidence.

    Attributes:
        predictions: One for every usable image, in the order of the files.
        left_out: Unusable files, each with the reason.
        unsupported: Files in folders and zips that look like images of other formats, each with the reason.
    """

    predictions: tuple[Prediction, ...]
    left_out: tuple[Unreadable, ...] = ()
    unsupported: tuple[Unreadable, ...] = ()

    def __len__(self) -> int:
        return len(self.predictions)

    @overload
    def __getitem__(self, place: int) -> Prediction: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Prediction]: ...
    def __getitem__(self, place: int | slice) -> Prediction | Sequence[Prediction]:
        """Returns one prediction, or some of them."""
        return self.predictions[place]


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A trained method from a run directory.

    Attributes:
        path: The directory.
        config: The contents of its ``config.json``.
        method: The method after the last finished stage.
        classes: Names of the classes, in the order of the logits.
        image_size: Height and width of its input.
        stages: Names of the domains whose stages are finished, the source first.
        together: Whether it normalises with the statistics of the images it predicts: predictions then depend on the
            batch, which should be large.
    """

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    method: Method = field(repr=False)
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    stages: tuple[str, ...]
    together: bool
    _device: torch.device

    def predict(self, images: Any) -> Tensor:
        """Returns logits of images, shape (N, classes).

        Args:
            images: A batch of images (tensor or array; uint8, or floats of 0 to 1), a map-style data set, a
                ``DataLoader``, or a list of PIL images. They are resized to :attr:`image_size`; labels are ignored.
        """
        return self.method.predict(read_images(images, self.image_size, "the images to predict").images)

    def predict_files(
        self, paths: Iterable[Path | str] | Path | str, *, on_bad: OnBad = "stop", progress: Progress | None = None
    ) -> FilePredictions:
        """Predicts the class of every image in files, folders and zips, resized as in the run.

        Images are decoded and predicted in chunks, unless the method needs them all at once.

        Args:
            paths: Files, zips, or folders, which are searched recursively; their names mean nothing.
            on_bad: Whether to ``"stop"`` at unusable files or to ``"skip"`` them.
            progress: Called with the number of decoded files and that of all files.
        """
        if on_bad not in get_args(OnBad):
            raise ConfigError(unknown("way to handle bad images", on_bad, get_args(OnBad)))
        tree = list_images([Path(path) for path in ([paths] if isinstance(paths, Path | str) else paths)])
        count, found, bad = len(tree.files), list[Prediction](), list(tree.unreadable)
        at_once = count if self.together else self._at_once()
        for start in range(0, count, at_once):
            part = decode_part(tree, start, min(start + at_once, count), self.image_size, progress)
            bad += part.bad
            if part.names and not (bad and on_bad == "stop"):
                found += predictions_of(Guesses.of(self.predict(part.images)), part.names, self.classes)
        if bad and on_bad == "stop":
            raise RatpError(describe_refused(bad, count))
        if not found:
            raise RatpError(f"asked about {describe_all_bad(bad, count)}")
        unsupported = (Unreadable(name, why_unsupported(name)) for name in tree.unsupported)
        return FilePredictions(tuple(found), tuple(bad), tuple(unsupported))

    def _at_once(self) -> int:
        """Returns how many images to decode at a time: whole chunks of the network, so that no result changes."""
        height, width = self.image_size
        chunk = chunk_size(torch.Size((3, height, width)), self._device)
        return chunk * max(1, _CHUNK_BYTES // (chunk * 3 * height * width))


def load(
    path: Path | str,
    *,
    device: str = "auto",
    method: Path | str | type[Method] | None = None,
    backbone: Given | None = None,
) -> LoadedRun:
    """Loads a trained method for predictions on other images.

    For an unfinished run, it takes the last finished stage, with a warning.

    Args:
        path: The run directory; nothing else is read, and nothing is written.
        device: Where to compute: ``cpu``, ``cuda``, ``cuda:1``, …, ``mps``, or ``auto``.
        method: The ``ratp.loss_method``, or the file of a custom method, which is run only because you name it.
        backbone: The backbone of your own that the run has: a module, a class or function that builds one, or
            ``FILE.py:NAME``. It needs the same layers; its weights come from the run. Not needed in the process that
            trained the run.

    Returns:
        The method, with what its predictions need.

    Raises:
        RatpError: If the directory is damaged, or needs a method or backbone that is not given.

    Examples:
        >>> run = ratp.load("runs/a")
        >>> for file, label, confidence in run.predict_files("new-pictures"):
        ...     print(file, label, confidence)
    """
    folder = Path(path)
    config = _read_config(folder)
    kind = _find_method(folder, config, method)
    find_own(folder, str(config["recipe"].get("network.backbone")), backbone)
    where = find_device(device)
    precision = find_precision(_precision_of(folder), where)
    state = _last_state(folder, config)
    classes = tuple(config["classes"])
    try:
        recipe, switches = override(Recipe(), config["recipe"]), override(kind.config_type(), config["switches"])
        size = recipe.size, recipe.size
        setting = Setting(recipe, classes, size, Randomness(config["seed"]), where, precision=precision)
        built = kind(setting, switches)
    except _MISFITS as error:
        raise RunDirectoryError(f"the method of {folder} cannot be built: {error}") from error
    use_precision(precision)
    state.load_into(built)
    stages = tuple(config["order"][: state.matrix.stages])
    together = kind.evaluation_statistics(switches) == "batch"
    return LoadedRun(folder, config, built, classes, size, stages, together, where)


def _read_config(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        raise RunDirectoryError(f"{folder} is a file: give a run directory, which holds the trained method.")
    config = read_config(folder)
    odd = [name for name, kind in _NEEDED.items() if not isinstance(config.get(name), kind)]
    texts = all(isinstance(name, str) for names in ("classes", "order") if names not in odd for name in config[names])
    if odd or not texts or config["fingerprint"] != fingerprint_of(config):
        what = f"invalid {', '.join(odd)}" if odd else "its contents have changed"
        raise RunDirectoryError(f"{folder / 'config.json'} is damaged: {what}. {_ADVICE}")
    return config


def _find_method(folder: Path, config: Mapping[str, Any], given: Path | str | type[Method] | None) -> type[Method]:
    """Returns the class of a run's method. The file of a custom method is never searched for: the user must name it."""
    name, digest = config["method"], config.get("method_file")
    if digest is None and given is not None:
        raise ConfigError(f"{folder} is a run of {name}, which is built in: leave out --method.")
    if digest is None and name not in METHODS:
        raise RunDirectoryError(f"{folder} uses a method that this version lacks: {unknown('method', name, METHODS)}")
    if digest is None:
        return METHODS[name]
    if given is None:
        raise ConfigError(
            f"{folder} is a run of {name!r}, a custom method. Give its file, whose code then runs: --method FILE.py. "
            "In Python, ratp.load(path, method=…) also takes the ratp.loss_method itself."
        )
    method = given if isinstance(given, type) else from_file(Path(given))
    if file_hash(method) != digest:
        raise RunDirectoryError(
            f"{folder} is a run of {name!r} from another file than {given}, or the file has been edited "
            "since. Give the file as it was."
        )
    return method


def _precision_of(folder: Path) -> str:
    """Returns the precision of the run, if known."""
    path = folder / "environment.json"
    try:
        found = ENVIRONMENT.read(read_json(path), path).get("precision")
    except RunDirectoryError:
        return "auto"
    return str(found) if found in get_args(Precision) else "auto"


def _last_state(folder: Path, config: Mapping[str, Any]) -> State:
    """Reads the state after the last finished stage, or the one before if that is lost."""
    states = States(folder, config["fingerprint"], advice=_ADVICE)
    try:
        state = states.latest()
    except LostFileError as error:
        state = _before(folder, states, error)
    done, of = state.matrix.stages, len(config["order"])
    if not 0 < done <= of:
        raise RunDirectoryError(f"{state.path} is damaged: it has {done} finished stages of {of}. {_ADVICE}")
    if done < of:
        last = config["order"][done - 1]
        text = f"{folder} is unfinished: using its method after {done} of {of} stages, the last {last}"
        warnings.warn(text, UnfinishedWarning, stacklevel=3)
    return state


def _before(folder: Path, states: States, lost: LostFileError) -> State:
    try:
        state = states.before()
    except LostFileError as error:
        if isinstance(lost.__cause__, FileNotFoundError):
            raise RunDirectoryError(
                f"{folder} has nothing to predict with: no stage is finished, or {lost} The command that started the "
                "run continues it."
            ) from error
        raise RunDirectoryError(f"{lost} Restore it from a copy, or train again.") from lost
    warnings.warn(f"{lost} Using the state before it", UnfinishedWarning, stacklevel=4)
    return state
