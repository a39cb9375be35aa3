"""Labelled source images that a run did not train on: they calibrate the alarm and show what an adaptation forgets."""

from __future__ import annotations

from pathlib import Path

from ratp._core.environment import Randomness
from ratp.config import as_dict
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError
from ratp.methods import find_method
from ratp.runs.load import LoadedRun
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams import STREAMS, find_stream
from ratp.streams.files import load_domains
from ratp.streams.folders import domain_name, from_names, without_source
from ratp.streams.stream import SOURCE_TEST_SHARE, DataOptions, stratified_mask


def source_images(loaded: LoadedRun, given: Path | None, options: DataOptions) -> LabelledDomain:
    """Returns the source images that a run held back for testing.

    Args:
        loaded: The run.
        given: Folder or zip with one folder per class: the run's source, of which the test part is taken, or other
            labelled images of the same kind, of which all are. None: a built-in stream loads its own.
        options: How to read images.
    """
    name = str(loaded.config["order"][0])
    if given is not None:
        read = load_domains({name: given}, loaded.image_size[0], options, classes=loaded.classes)[0].domain
        assert isinstance(read, LabelledDomain)
        return _test_part(loaded, name, read)
    stream = str(loaded.config["stream"])
    if stream not in STREAMS:
        raise ConfigError(
            f"{loaded.path} is a run on your own images: name the folder of its source, e.g. --source pictures/day. "
            "Its labelled images calibrate the alarm."
        )
    read = find_stream(stream).load((name,), loaded.image_size[0], options)[0].domain
    assert isinstance(read, LabelledDomain)
    return _test_part(loaded, name, read)


def _test_part(loaded: LoadedRun, name: str, source: LabelledDomain) -> LabelledDomain:
    """Returns the part of the source that the run held back; all images if the run did not train on any of them."""
    if loaded.config.get("adopted") or loaded.config.get("data", {}).get(name) != source.fingerprint():
        return source
    generator = Randomness(loaded.config["seed"]).generator("source split")
    held_out = source.held_out
    return source.subset(stratified_mask(source.labels, SOURCE_TEST_SHARE, generator) if held_out is None else held_out)


def run_of_adopted(
    model: Path,
    source: Path | None,
    method: str,
    folder: Path,
    options: DataOptions,
    device: str,
    backbone: str | None = None,
) -> None:
    """Writes the run of an adopted model that has seen no target yet.

    Args:
        model: The adopted model.
        source: Labelled images of the kind it was trained on; methods with a memory take exemplars from them. None:
            there are none.
        method: Name or file of the method that will adapt it.
        folder: Directory of the run.
        options: How to read images.
        device: Where to compute.
        backbone: The class of a model of the user's own.
    """
    # A deployed model answers single images, too, so its answers must not depend on the batch.
    by_image = {"eval_bn": "running"} if "eval_bn" in as_dict(find_method(method).config_type()) else {}
    request = RunRequest(
        "folders", method, model=model, changes=by_image, data=options, device=device, backbone=backbone
    )
    stream = without_source() if source is None else from_names({domain_name(source): source})
    Run(resolve(request, stream=stream), folder).execute()
