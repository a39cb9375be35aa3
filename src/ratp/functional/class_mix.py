"""Class proportions of unlabelled images, from a classifier that knows some labelled ones.

Under label shift, classes look alike everywhere, but some are more frequent here than there. Then the classifier's
predictions, calibrated on labelled images, tell how frequent each class is among others:

* ``em``: the proportions that make the predictions most likely, Saerens et al. (Neural Computation, 2002);
* ``confusion``: those that explain the predicted classes, given how often the classifier takes each class for which
  other, Lipton et al. (ICML 2018), called BBSE there.

With few labelled images or other-looking ones, both err; ``smoothing`` moves them towards equal proportions, by default
as James and Stein shrink an estimate: the farther, the smaller its distance from them is beside its error. Both use
predictions of the form softmax(β·z + b) for logits z, with the inverse temperature β and a bias b per class:
Alexandari et al. (ICML 2020) found EM most exact with these. All numbers are computed in double precision.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.functional.numerics import doubled, sum_type

Estimate = Literal["uniform", "em", "confusion"]

# Weight of the pull towards β = 1 and b = 0; without it, labelled images that are all right let β grow for ever.
RIDGE = 1e-2
NEWTON_STEPS, HALVINGS = 50, 30
EM_ROUNDS = 1000
CLOSE = 1e-9
# How much more often predictions err on images of another kind than they say, on digits.
OVERCONFIDENCE = 1.3


class Calibration(NamedTuple):
    """Inverse temperature β, a scalar, and bias b, shape (k,)."""

    scale: Tensor
    bias: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns calibrated probabilities, shape (n, k)."""
        return (self.scale * logits.double() + self.bias).softmax(dim=1)


def calibrate(logits: Tensor, labels: Tensor) -> Calibration:
    """Finds the β and b that make the labels (n,) of some logits (n, k) most likely; a convex problem.

    Minimises the mean cross-entropy + ½·RIDGE·((β − 1)² + ‖b‖²) by Newton's method with halved steps.
    """
    logits = logits.double()
    # A constant per row changes no prediction; this one keeps the numbers small.
    logits = logits - logits.mean(dim=1, keepdim=True)
    classes = logits.shape[1]
    truth = F.one_hot(labels, classes).double()
    start = torch.cat([logits.new_ones(1), logits.new_zeros(classes)])
    found = start.clone()

    def loss(point: Tensor) -> Tensor:
        likelihood = F.cross_entropy(point[0] * logits + point[1:], labels)
        return likelihood + RIDGE / 2 * (point - start).square().sum()

    value = loss(found)
    for _ in range(NEWTON_STEPS):
        p = (found[0] * logits + found[1:]).softmax(dim=1)
        mean = (p * logits).sum(dim=1, keepdim=True)
        surplus, spread = p - truth, p * (logits - mean)
        gradient = torch.cat([(surplus * logits).sum(dim=1).mean()[None], surplus.mean(dim=0)])
        gradient = gradient + RIDGE * (found - start)
        # second derivatives: by β, by β and b, by b
        hessian = RIDGE * torch.eye(classes + 1, dtype=logits.dtype, device=logits.device)
        hessian[0, 0] += (spread * logits).sum(dim=1).mean()
        hessian[0, 1:] += spread.mean(dim=0)
        hessian[1:, 0] += spread.mean(dim=0)
        hessian[1:, 1:] += p.mean(dim=0).diag() - p.T @ p / len(p)
        step = torch.linalg.solve(hessian, gradient)
        for _ in range(HALVINGS):
            if loss(found - step) <= value:
                break
            step = step / 2
        found = found - step
        value = loss(found)
        if step.abs().max() < CLOSE:
            break
    return Calibration(found[0], found[1:])


def em_proportions(probabilities: Tensor, prior: Tensor) -> Tensor:
    """Estimates class proportions, shape (k,), by expectation maximisation.

    Each prediction is corrected by how much more frequent its classes are than where the classifier was calibrated;
    the mean of the corrected predictions is the next estimate:

        p'_i ∝ p_i · q/π,    q ← mean_i p'_i

    Args:
        probabilities: Calibrated predictions p, shape (n, k).
        prior: Class proportions π of the images that it was calibrated on, shape (k,); a class without any stays
            without.
    """
    probabilities, prior = probabilities.double(), prior.double()
    ratios = probabilities / prior.clamp_min(torch.finfo(torch.float64).tiny) * (prior > 0)
    # A prediction of nothing but classes that the prior does not have counts for none.
    ratios = ratios[ratios.sum(dim=1) > 0]
    if not len(ratios):
        return prior
    found = prior
    for _ in range(EM_ROUNDS):
        corrected = ratios * found
        last, found = found, (corrected / corrected.sum(dim=1, keepdim=True)).mean(dim=0)
        if (found - last).abs().max() < CLOSE:
            break
    return found


def confusion_proportions(probabilities: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """Estimates class proportions, shape (k,), from the confusion matrix of images with known labels.

    With C_jy the share of the known images of class y that are predicted as j, and μ_j the share of all images that
    are, it solves C·q = μ in the least-squares sense, leaves out negative proportions and scales to a sum of 1.

    Args:
        probabilities: Predictions for the images whose proportions are wanted, shape (n, k).
        known: Predictions for the known images, shape (m, k).
        labels: Their labels, shape (m,).
    """
    classes = probabilities.shape[1]
    truth = F.one_hot(labels, classes).double()
    predicted = F.one_hot(known.argmax(dim=1), classes).double()
    confusion = predicted.T @ truth / truth.sum(dim=0).clamp_min(1)
    shares = F.one_hot(probabilities.argmax(dim=1), classes).double().mean(dim=0)
    # On the processor, whose solver allows a matrix without full rank; it is small.
    solution = torch.linalg.lstsq(confusion.cpu(), shares.cpu()[:, None], driver="gelsd").solution[:, 0]
    found = solution.to(shares.device).clamp_min(0)
    total = found.sum()
    return found / total if total > 0 else shares


def estimate_proportions(
    kind: Literal["em", "confusion"], logits: Tensor, known: Tensor, labels: Tensor, smoothing: float | None
) -> Tensor:
    """Estimates class proportions, shape (k,), from logits of images without labels and of others with them.

    Args:
        kind: Which of the two estimates.
        logits: Of the images whose proportions are wanted, shape (n, k).
        known: Of the images with labels, shape (m, k); m > 0.
        labels: Their labels, shape (m,).
        smoothing: How far the estimate moves towards equal proportions: 0 not at all, 1 all the way; None: as far as
            :func:`shrinkage` says.
    """
    classes = logits.shape[1]
    device, logits, known = logits.device, doubled(logits), doubled(known)
    labels = labels.to(known.device)
    calibration = calibrate(known, labels)
    probabilities = calibration(logits)
    if kind == "em":
        found = em_proportions(probabilities, labels.bincount(minlength=classes) / len(labels))
    else:
        found = confusion_proportions(probabilities, calibration(known), labels)
    share = shrinkage(found, probabilities) if smoothing is None else smoothing
    return ((1 - share) * found + share / classes).to(device, sum_type(device))


def shrinkage(found: Tensor, probabilities: Tensor) -> Tensor:
    """Returns how far estimated proportions (k,) should move towards equal ones, between 0 and 1.

    With d the distance to them in total variation and e the expected error, it is min(1, (e/d)²). Estimates on digits
    were off by about the share of images on which the predictions (n, k) err, so e is what they say of that,
    1 − mean max p, times :data:`OVERCONFIDENCE`.
    """
    distance = (found - 1 / len(found)).abs().sum() / 2
    error = OVERCONFIDENCE * (1 - probabilities.amax(dim=1).mean())
    return (error / distance.clamp_min(CLOSE)).square().clamp_max(1)


def allocate(total: int, shares: Tensor) -> list[int]:
    """Divides ``total`` among classes by their shares (k,); what is left after rounding goes to the largest remainders.

    Every class gets at least one if there are enough.

    Examples:
        >>> allocate(10, torch.tensor([0.62, 0.27, 0.11]))
        [5, 3, 2]
    """
    least = min(total // len(shares), 1)
    exact = (total - least * len(shares)) * doubled(shares) / doubled(shares.sum().clamp_min(CLOSE))
    whole = (exact + CLOSE).floor()
    rest = total - least * len(shares) - int(whole.sum())
    whole[(exact - whole).argsort(descending=True, stable=True)[:rest]] += 1
    return [int(number) + least for number in whole]
