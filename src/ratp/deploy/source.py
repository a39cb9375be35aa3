"""Labelled source images that a run did not train on: they calibrate the alarm and show what an adaptation forgets."""

from __future__ import annotations

from pathlib import Path

from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError
from ratp.runs.load import LoadedRun
from ratp.streams import STREAMS, find_stream
from ratp.streams.files import load_domains
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
    """Returns the part of the source that the run held back; all images if they are not those of the run."""
    if loaded.config.get("data", {}).get(name) != source.fingerprint():
        return source
    generator = Randomness(loaded.config["seed"]).generator("source split")
    held_out = source.held_out
    return source.subset(stratified_mask(source.labels, SOURCE_TEST_SHARE, generator) if held_out is None else held_out)
