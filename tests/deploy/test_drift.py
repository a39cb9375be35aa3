"""The drift alarm on predictions with a known distribution."""

from __future__ import annotations

import pytest
import torch

from ratp.deploy.drift import WINDOW, Alarm, Pending, Reference, nearest
from ratp.deploy.observer import FEW, Observer
from ratp.errors import RatpError
from ratp.guard.watch import Predictions

CLASSES, DIM = 5, 16


def predictions(count: int, seed: int, *, shift: float = 0.0, sharp: float = 6.0, only: int | None = None):
    """Predictions of a good classifier whose embeddings scatter around class means."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=generator) if only is None else torch.full((count,), only)
    embedding = means[labels] + 0.5 * torch.randn(count, DIM, generator=generator) + shift
    logits = sharp * torch.eye(CLASSES)[labels] + torch.randn(count, CLASSES, generator=generator)
    return Predictions(logits.softmax(dim=1), embedding)


def reference(count: int = 400, seed: int = 1, name: str = "day") -> Reference:
    return Reference.of(name, predictions(count, seed), torch.Generator().manual_seed(2))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_at_most_one_in_a_hundred_usual_windows_is_beyond_the_limit(seed):
    known = reference(seed=seed)
    scores = [known.judge(predictions(WINDOW, 100 + k)).score for k in range(400)]
    assert sum(score > 1 for score in scores) / len(scores) <= 0.01
    assert known.false_alarms <= 0.03


@pytest.mark.parametrize("strange", [{"shift": 0.6}, {"sharp": 2.0}, {"only": 3}])
def test_other_embeddings_doubts_or_classes_are_beyond_it(strange):
    known = reference()
    scores = [known.judge(predictions(WINDOW, 100 + k, **strange)).score for k in range(50)]
    assert min(scores) > 1


def test_the_least_typical_images_are_named():
    usual, odd = predictions(WINDOW, 5), predictions(WINDOW, 6, shift=3.0)
    odd_ones = [7, 40]
    mixed = Predictions(usual.probabilities, usual.embedding.clone())
    mixed.embedding[odd_ones] = odd.embedding[odd_ones]
    assert set(reference().judge(mixed).causes[:2]) == set(odd_ones)


def test_a_window_is_compared_with_the_most_similar_domain():
    night = Reference.of("night", predictions(400, 3, shift=2.0), torch.Generator().manual_seed(2))
    assert nearest([reference(), night], predictions(WINDOW, 9, shift=2.0)).nearest == "night"
    assert nearest([reference(), night], predictions(WINDOW, 9)).nearest == "day"


def test_it_is_the_same_after_saving():
    known = reference()
    again = Reference.load(known.to_json(), known.tensors())
    window = predictions(WINDOW, 9, shift=0.3)
    assert again.judge(window) == known.judge(window)


def test_too_few_images():
    with pytest.raises(RatpError, match="39 images of 'day' are too few"):
        reference(39)


@pytest.mark.parametrize(
    ("scores", "levels"),
    [
        ([0.5, 0.9], ["fine", "fine"]),
        ([0.5, 1.1, 0.5, 0.5], ["fine", "watch", "watch", "fine"]),
        ([1.1, 0.5, 1.1], ["watch", "watch", "drifted"]),
        ([1.6, 0.5, 0.5], ["drifted", "drifted", "fine"]),
    ],
)
def test_levels(scores, levels):
    alarm = Alarm()
    assert [alarm.update(score) for score in scores] == levels


def test_windows_have_one_size_whatever_arrives():
    images = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    found, pending, cut = predictions(200, 1), Pending(), []
    for rows in torch.arange(200).split(23):
        part = Predictions(found.probabilities[rows], found.embedding[rows])
        cut += pending.add(images[rows], part, [str(k) for k in rows.tolist()])
    assert [part.names for part in cut] == [tuple(map(str, range(k, k + WINDOW))) for k in (0, 64, 128)]
    assert torch.equal(torch.cat([part.images for part in cut]), images[:192])


def test_recognition_is_checked_on_few_images_of_drifted_windows_and_averaged():
    asked, recognised = [], iter([0.5, 0.0, 0.0, 0.0, -0.3])

    def recognition(images, found):
        asked.append((len(images), len(found.probabilities)))
        return next(recognised)

    observer = Observer([reference()], torch.zeros(64, 3, 8, 8, dtype=torch.uint8), recognition)
    levels = []
    for seed, shift in enumerate([0.0, 3.0, 3.0, 3.0, 3.0, 3.0]):
        observer.observe(
            torch.zeros(WINDOW, 3, 8, 8, dtype=torch.uint8), predictions(WINDOW, seed, shift=shift), "x" * 64
        )
        levels.append(observer.level)
    assert levels == ["fine", "drifted", "drifted", "drifted", "drifted", "foreign"]  # of the last four windows
    assert asked == [(FEW, FEW)] * 5
