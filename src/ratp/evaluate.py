"""Measuring a method. The only place where target labels are read."""

from __future__ import annotations

from ratp.domain import LabelledDomain
from ratp.method import Method


def accuracy(method: Method, domain: LabelledDomain) -> float:
    """Accuracy in percent on a labelled domain."""
    predicted = method.predict(domain.images).argmax(dim=1).cpu()
    return 100 * int((predicted == domain.labels.cpu()).sum()) / len(domain)
