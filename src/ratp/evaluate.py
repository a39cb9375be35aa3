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
    if not bool(logits.isfinite().all()):
        raise TrainingError(f"predictions on {domain.name} are no numbers any more")
    return 100 * int((logits.argmax(dim=1).cpu() == domain.labels.cpu()).sum()) / len(domain)
