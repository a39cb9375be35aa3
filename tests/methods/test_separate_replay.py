"""Exemplars in a batch of their own move BatchNorm's running statistics beside the target's."""

from __future__ import annotations

import pytest

from ratp.functional.norm import batch_norms
from source_free_checks import build_method


@pytest.mark.parametrize(
    ("name", "switch"),
    [*((name, "replay") for name in ("aucid", "shot", "shot+", "shot++", "bmd", "gsfda")), ("ratp", "memory.replay")],
)
def test_running_statistics_are_those_of_both(name, switch):
    """Every layer has seen more batches than without replay: those of earlier domains too, which it is measured on."""
    seen = []
    for replay in ("none", "separate"):
        method, source, targets = build_method(name, **{switch: replay})
        method.fit_source(source)
        method.adapt(targets[0])
        seen.append([layer.num_batches_tracked.item() for layer in batch_norms(method.network).values()])
    assert all(beside > without for without, beside in zip(*seen, strict=True))
