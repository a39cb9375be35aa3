"""Methods made of a loss: what it may take, from Python and from a file, interrupted, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ratp
from helpers import TINY, toy_domains
from helpers import ratp as command
from ratp._core.files import read_tensors
from ratp.errors import ConfigError, RatpError

SIZES = {**TINY, "steps": 3}


def entropy(network, images, *, weight: float = 1.0):
    """Entropy minimisation."""
    logits = network(images).logits
    return -weight * (logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def consistency(network, images, view):
    target = network(images).logits.detach().softmax(1)
    assert not torch.equal(images, view)
    return -(target * network(view).logits.log_softmax(1)).sum(1).mean()


def pseudo_labels(network, images, labels, confidence):
    assert labels.dtype == torch.int64 and 0 < confidence.min() <= confidence.max() <= 1
    return (confidence * F.cross_entropy(network(images).logits, labels, reduction="none")).mean()


def replay(network, images, memory):
    noise = torch.randn(images.shape)
    moved = (network(images + 0.1 * noise).embedding - network(images).embedding.detach()).square().mean()
    return {"moved": moved, "replay": F.cross_entropy(network(memory.images).logits, memory.labels)}


LOSSES = [entropy, consistency, pseudo_labels, replay]


def run(loss, folder, **changes):
    source, *targets = toy_domains()
    request = ratp.RunRequest(changes=SIZES | changes, device="cpu", guard="off")
    plan = ratp.resolve(request, stream=ratp.own_stream(source, targets), method=ratp.loss_method(loss))
    return ratp.Run(plan, folder)


def weights(loss, folder, **changes):
    run(loss, folder, **changes).execute()
    return read_tensors(folder / "weights.safetensors")[0]


def same(some, others):
    return all(some[name].equal(others[name]) for name in some)


@pytest.mark.parametrize("loss", LOSSES)
def test_interrupted_anywhere_it_ends_like_an_undisturbed_one(loss, tmp_path):
    whole = weights(loss, tmp_path / "whole")
    events = run(loss, tmp_path / "cut").events()
    for _ in range(13):  # within the second epoch of the first target
        next(events)
    events.close()
    torch.rand(3)
    assert same(whole, weights(loss, tmp_path / "cut"))


def test_it_changes_the_model_and_its_switch_counts(tmp_path):
    some, more = weights(entropy, tmp_path / "a"), weights(entropy, tmp_path / "b", weight=3.0)
    assert not same(some, more)
    with pytest.raises(RatpError, match="holds another run"):
        weights(entropy, tmp_path / "a", weight=3.0)
    config = ratp.read_run(tmp_path / "b").config
    assert (config["method"], config["switches"]["weight"]) == ("entropy", 3.0)


def test_an_edited_loss_is_another_method(tmp_path):
    run(entropy, tmp_path / "run").execute()
    other = ratp.loss_method(pseudo_labels)
    with pytest.raises(RatpError, match="from another file than"):
        ratp.load(tmp_path / "run", method=other)
    with pytest.raises(RatpError, match=r"In Python, ratp\.load\(path, method=…\)"):
        ratp.load(tmp_path / "run")
    images = toy_domains()[1].images
    found = ratp.load(tmp_path / "run", method=ratp.loss_method(entropy)).predict(images)
    assert found.shape == (32, 4)


def test_from_a_file_on_the_command_line(tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text(
        '"""A loss."""\nimport ratp\n\n\n@ratp.loss_method\ndef sharp(network, images, *, power: int = 2):\n'
        '    """Makes predictions sharp."""\n    return -network(images).logits.softmax(1).pow(power).sum(1).mean()\n'
    )
    options = [word for name, value in {**SIZES, "power": 3}.items() for word in ("--set", f"{name}={value}")]
    done = command("run", "demo", "--method", file, *options, "--device", "cpu", "--out", tmp_path / "run")
    assert done.code == 0, done
    assert ratp.load(tmp_path / "run", method=file).config["switches"]["power"] == 3
    shown = command("methods", "show", file)
    assert "Makes predictions sharp." in shown.out and "power" in shown.out


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda network, imgs: 0, r"unknown parameter of the loss .*: 'imgs'\. Did you mean 'images'\?"),
        (lambda images: 0, "must take the network"),
        (lambda network, sgd=1: 0, "its name not sgd"),
        (lambda network, rate=None: 0, "its default must be a number"),
        (Path, "loss_method takes a function"),
    ],
)
def test_wrong_signatures(loss, expected):
    with pytest.raises(ConfigError, match=expected):
        ratp.loss_method(loss)


def vector(network, images):
    return network(images).logits.sum(1)


def number(network, images):
    return 1.0


def constant(network, images):
    return images.mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (vector, r"got torch.float32 of shape \(8,\)"),
        (number, r"got 1\.0"),
        (constant, "depends on none of its weights"),
    ],
)
def test_wrong_results_are_reported_before_training(loss, expected, tmp_path):
    with pytest.raises(RatpError, match=expected):
        run(loss, tmp_path / "run").execute()
    assert not (tmp_path / "run" / "config.json").exists()


def tent(network, images):
    return network(images).logits.mean()


def test_names_of_built_in_methods_are_taken():
    with pytest.raises(ConfigError, match="name of a built-in method, 'tent'"):
        ratp.loss_method(tent)


def test_a_loss_with_memory_needs_some(tmp_path):
    with pytest.raises(ConfigError, match="empty with memory=0"):
        run(replay, tmp_path / "run", memory=0)
