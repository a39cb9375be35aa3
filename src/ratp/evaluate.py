"""Measuring a method. The only place where target labels are read."""

from __future__ import annotations

from ratp.domain import LabelledDomain
from ratp.errors import TrainingError
from ratp.method import Method


def accuracy(method: Method, domain: LabelledDomain) -> float:
    """Accuracy in percent on a labelled domain.

    Raises:
        TrainingError: If predictions are no numbers any more.
    """
    logits = method.predict(domain.images)
    right = (logits.argmax(dim=1) == domain.labels.to(logits.device)).sum()
    # one number comes back from the device
    count = int(right.where(logits.isfinite().all(), -1))
    if count < 0:
        raise TrainingError(f"predictions on {domain.name} are no numbers any more")
    return 100 * count / len(domain)
