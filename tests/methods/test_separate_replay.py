"""Exemplars in a batch of their own leave BatchNorm's running statistics to the target."""

from __future__ import annotations

import pytest
import torch

from ratp.parts.batch_norm import batch_norms
from source_free_checks import built


@pytest.mark.parametrize(
    ("name", "switch"),
    [*((name, "replay") for name in ("aucid", "shot", "shot+", "shot++", "bmd", "gsfda")), ("ratp", "memory.replay")],
)
def test_running_statistics_are_the_target_s(name, switch):
    """Every layer has seen as many batches as without replay."""
    seen = []
    for replay in ("none", "separate"):
        method, source, targets = built(name, **{switch: replay})
        method.fit_source(source)
        weights = method.network.bottleneck[0].weight.detach().clone()
        method.adapt(targets[0])
        seen.append([layer.num_batches_tracked.item() for layer in batch_norms(method.network).values()])
        seen.append(weights)
        seen.append(method.network.bottleneck[0].weight.detach().clone())
    (without, start, end), (beside, other_start, other_end) = seen[:3], seen[3:]
    assert beside == without
    assert torch.equal(start, other_start)
    assert not torch.equal(end, other_end)
