"""Measuring a method. The only place where target labels are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ratp.contract import called, check_scores
from ratp.domain import LabelledDomain
from ratp.errors import TrainingError
from ratp.method import Method
from ratp.randomness import Randomness


def embeddings(
    method: Method, tests: Sequence[LabelledDomain | None], count: int, randomness: Randomness
) -> dict[str, Tensor]:
    """What a method makes of some images of every domain with labels, for pictures of them.

    Args:
        method: Whose embedding.
        tests: Test sets in the order of the stream.
        count: Images of a domain, at most; the same ones whenever it is asked.
        randomness: Decides which.

    Returns:
        ``embedding`` (n, dim), ``labels`` (n,) and ``domains`` (n,), numbers of test sets; nothing if the method has no
        embedding to show.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, test in enumerate(tests):
        if test is None:
            continue
        chosen = torch.randperm(len(test), generator=randomness.generator("features", test.name))[:count]
        embedding = method.embed(test.images[chosen])
        if embedding is None:
            return {}
        parts.append((embedding.float().cpu(), test.labels[chosen].cpu(), torch.full((len(chosen),), number)))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return dict(zip(("embedding", "labels", "domains"), columns, strict=True))


def accuracy(method: Method, domain: LabelledDomain) -> float:
    """Accuracy in percent on a labelled domain.

    Raises:
        ContractError: If predictions are of another form.
        TrainingError: If they are no numbers any more.
    """
    return _share_right(method.predict(domain.images), domain, called(method, "predict"))


def accuracy_as(method: Method, domain: LabelledDomain, stage: int) -> float | None:
    """Accuracy in percent on the labelled domain of a stage if the method is told which it is.

    Returns:
        The accuracy; None: to know the domain makes no difference to the method.

    Raises:
        ContractError: If predictions are of another form.
        TrainingError: If they are no numbers any more.
    """
    logits = method.predict_as(domain.images, stage)
    return None if logits is None else _share_right(logits, domain, called(method, "predict_as"))


def _share_right(logits: Tensor, domain: LabelledDomain, giver: str) -> float:
    check_scores(logits, len(domain), len(domain.classes), giver)
    right = (logits.argmax(dim=1) == domain.labels.to(logits.device)).sum()
    # one number comes back from the device
    count = int(right.where(logits.isfinite().all(), -1))
    if count < 0:
        raise TrainingError(f"predictions on {domain.name} are no numbers any more")
    return 100 * count / len(domain)
