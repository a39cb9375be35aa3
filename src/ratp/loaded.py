"""A run used: the method as its last finished stage left it, rebuilt from the run's directory alone.

Neither the images it was trained on nor the request it was made by are needed: ``config.json`` has every value, and
``state.safetensors`` the method. So it predicts as it did in the run, whatever its rule is: by running statistics or by
those of the images at hand, by its classifier or by what has taken its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ratp.config import override
from ratp.data.decoded import OnBad
from ratp.data.given import decode_part, given_images
from ratp.data.listing import Unreadable
from ratp.data.manifest import describe_refused, describe_useless
from ratp.data.parallel import Progress
from ratp.data.passed_over import why_passed_over
from ratp.domain import check_images
from ratp.errors import ConfigError, RatpError, RunDirectoryError, unknown
from ratp.files import LostFileError, read_json
from ratp.inference import chunk_size
from ratp.method import Method, Setting
from ratp.methods import METHODS
from ratp.methods.own import file_hash, from_file
from ratp.notes import Note
from ratp.plan import find_device
from ratp.precision import Precision, find_precision, use_precision
from ratp.predictions import Prediction, predictions_of
from ratp.randomness import Randomness
from ratp.recipe import Recipe
from ratp.record import fingerprint_of, read_config
from ratp.schema import ENVIRONMENT
from ratp.states import State, States

_ROOM = 2**28  # bytes of decoded images at a time
_ADVICE = "Give a run directory as the run left it."
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
    """A run is used before its end, or not as its last stage left it."""


@dataclass(frozen=True)
class FilePredictions:
    """What a model says about the images in some files.

    Attributes:
        predictions: One for every usable image, in the order the files were given in.
        left_out: Files that are no usable images, each with the reason.
        passed_over: Files in folders and zips that may be meant as images and are not read, each with the reason.
    """

    predictions: tuple[Prediction, ...]
    left_out: tuple[Unreadable, ...] = ()
    passed_over: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A trained method, taken from the directory of its run.

    Attributes:
        path: The directory.
        config: What its ``config.json`` holds.
        method: The method after the last finished stage.
        classes: Names of the classes, in the order of the logits.
        image_size: Height and width of the images it takes.
        stages: Names of the domains whose stages are finished, the source first.
        together: Whether it predicts by the statistics of the images it is asked about: then many should be asked
            about at once, and the answers depend on which.
    """

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    method: Method = field(repr=False)
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    stages: tuple[str, ...]
    together: bool
    _device: torch.device

    def predict(self, images: Tensor) -> Tensor:
        """Logits of images, shape (N, classes).

        Args:
            images: uint8 tensor of shape (N, 3, height, width), of the size of :attr:`image_size`.

        Raises:
            RatpError: If they are anything else.
        """
        check_images(images, self.image_size)
        return self.method.predict(images)

    def predict_files(
        self, paths: Iterable[Path | str] | Path | str, *, on_bad: OnBad = "stop", progress: Progress | None = None
    ) -> FilePredictions:
        """The likeliest class of every image in files, folders and zips, which are resized as in the run.

        They are decoded and predicted some at a time, all together only if the method needs that.

        Args:
            paths: Where they lie; folders are looked through to the bottom, and what they are called means nothing.
            on_bad: What to do if there are files that are no usable images: ``"stop"`` or ``"skip"`` them.
            progress: Called with the number of files decoded and that of all.

        Raises:
            ConfigError: With every path that leads to no image.
            RatpError: If there are bad files and ``on_bad`` is ``"stop"``, or no usable image.
        """
        if on_bad not in get_args(OnBad):
            raise ConfigError(unknown("way to deal with bad images", on_bad, get_args(OnBad)))
        tree = given_images([Path(path) for path in ([paths] if isinstance(paths, Path | str) else paths)])
        count, found, bad = len(tree.files), list[Prediction](), list(tree.unreadable)
        at_once = count if self.together else self._at_once()
        for start in range(0, count, at_once):
            part = decode_part(tree, start, min(start + at_once, count), self.image_size, progress)
            bad += part.bad
            if part.names and not (bad and on_bad == "stop"):
                found += predictions_of(self.predict(part.images), part.names, self.classes)
        if bad and on_bad == "stop":
            raise RatpError(describe_refused(bad, count))
        if not found:
            raise RatpError(f"asked about {describe_useless(bad, count)}")
        passed_over = (Unreadable(name, why_passed_over(name)) for name in tree.passed_over)
        return FilePredictions(tuple(found), tuple(bad), tuple(passed_over))

    def _at_once(self) -> int:
        """Images to decode at a time: whole chunks, as the network sees them, so that the numbers are those of all."""
        height, width = self.image_size
        chunk = chunk_size(torch.Size((3, height, width)), self._device)
        return chunk * max(1, _ROOM // (chunk * 3 * height * width))


def load(path: Path | str, *, device: str = "auto", method: Path | str | None = None) -> LoadedRun:
    """Loads what a run has trained, to be used on other images.

    A run that is not finished is taken as its last finished stage left it, with a warning.

    Args:
        path: The run's directory; nothing else is read, and nothing is written.
        device: Where to compute: ``cpu``, ``cuda``, ``cuda:1``, …, or ``auto``.
        method: The file of the method, if it is one of your own: it is a program, and run because you name it.

    Raises:
        ConfigError: If there is no such device, or the file of the method is not named or cannot be loaded.
        RunDirectoryError: If it is no run directory, no stage is finished, or what it holds is damaged.
    """
    folder = Path(path)
    config = _read_config(folder)
    kind = _find_method(folder, config, method)
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
        raise RunDirectoryError(f"{folder} is a file: give a run directory, which has the trained method in it.")
    config = read_config(folder)
    odd = [name for name, kind in _NEEDED.items() if not isinstance(config.get(name), kind)]
    texts = all(isinstance(name, str) for names in ("classes", "order") if names not in odd for name in config[names])
    if odd or not texts or config["fingerprint"] != fingerprint_of(config):
        what = f"{', '.join(odd)} is not what it should be" if odd else "it is not as it was written"
        raise RunDirectoryError(f"{folder / 'config.json'} is damaged: {what}. {_ADVICE}")
    return config


def _find_method(folder: Path, config: Mapping[str, Any], given: Path | str | None) -> type[Method]:
    """The class of a run's method. A method of the user's own is never looked for: its file must be named."""
    name, digest = config["method"], config.get("method_file")
    if digest is None and given is not None:
        raise ConfigError(f"{folder} is a run of {name}, which comes along: name no file of a method for it.")
    if digest is None and name not in METHODS:
        raise RunDirectoryError(f"{folder} is a run of a method that is not here: {unknown('method', name, METHODS)}")
    if digest is None:
        return METHODS[name]
    if given is None:
        raise ConfigError(
            f"{folder} is a run of {name!r}, a method from a file of your own. Name the file, which is then run: "
            "--method FILE.py"
        )
    method = from_file(Path(given))
    if file_hash(method) != digest:
        raise RunDirectoryError(
            f"{folder} is a run of {name!r} from another file than {given}, or that has been edited since. "
            "Name the file as it was."
        )
    return method


def _precision_of(folder: Path) -> str:
    """How exactly the run computed, if that is known."""
    path = folder / "environment.json"
    try:
        found = ENVIRONMENT.read(read_json(path), path).get("precision")
    except RunDirectoryError:
        return "auto"
    return str(found) if found in get_args(Precision) else "auto"


def _last_state(folder: Path, config: Mapping[str, Any]) -> State:
    """The method after the last finished stage that is whole."""
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
        told = f"{folder} is unfinished: what predicts is its method after {done} of {of} stages, the last {last}"
        warnings.warn(told, UnfinishedWarning, stacklevel=3)
    return state


def _before(folder: Path, states: States, lost: LostFileError) -> State:
    try:
        state = states.before()
    except LostFileError as error:
        if isinstance(lost.__cause__, FileNotFoundError):
            raise RunDirectoryError(
                f"{folder} has nothing to predict with: no stage is finished, or {lost} The command of the run goes on "
                "with it."
            ) from error
        raise RunDirectoryError(f"{lost} Put it back from a copy, or train again.") from lost
    warnings.warn(f"{lost} The state before it is taken", UnfinishedWarning, stacklevel=4)
    return state
