"""A share of every target is held out for testing, chosen without looking at the labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import journal_of, toy_domain, toy_domains
from own_images import assert_error, assert_ok, config_of, image_files, run_folders, write_files
from ratp.errors import ConfigError
from ratp.streams.stream import make_stream


def contents(images_):
    return [image.numpy().tobytes() for image in images_]


def parts(hold_out, seed=1, domains=None):
    stream = make_stream("toy", domains or toy_domains(), seed, hold_out=hold_out)
    return [
        (contents(t.images), contents(test.images)) for t, test in zip(stream.targets, stream.tests[1:], strict=True)
    ]


class TestShare:
    @pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
    def test_test_images_are_not_trained_on(self, share):
        for (train, test), domain in zip(parts(share), toy_domains()[1:], strict=True):
            assert not set(train) & set(test)
            assert set(train) | set(test) == set(contents(domain.images))
            assert len(test) == round(share * len(domain))

    def test_labels_stay_with_their_images(self):
        domain = toy_domains()[1]
        label = dict(zip(contents(domain.images), domain.labels.tolist(), strict=True))
        test = make_stream("toy", toy_domains(), 1, hold_out=0.3).tests[1]
        assert [label[content] for content in contents(test.images)] == test.labels.tolist()

    def test_zero_share_is_the_papers_protocol(self):
        for (train, test), domain in zip(parts(0.0), toy_domains()[1:], strict=True):
            assert train == test == contents(domain.images)

    def test_split_ignores_labels(self):
        source, *targets = toy_domains()
        scrambled = [replace(t, labels=t.labels.flip(0)) for t in targets]
        assert parts(0.3) == parts(0.3, domains=[source, *scrambled])

    def test_the_seed_and_the_domain_decide(self):
        first, again, other = parts(0.3, 1), parts(0.3, 1), parts(0.3, 2)
        assert first == again
        assert all(one[1] != two[1] for one, two in zip(first, other, strict=True))
        twins = [replace(toy_domain("a", 20), name=name) for name in ("ink", "mud", "fog")]
        (_, mud), (_, fog) = parts(0.3, domains=twins)
        assert mud != fog

    def test_source_split_is_unchanged(self):
        plain, held = (make_stream("toy", toy_domains(), 1, hold_out=share) for share in (0.0, 0.4))
        assert torch.equal(plain.source.images, held.source.images)

    def test_a_test_part_of_its_own_comes_first(self):
        domains = [toy_domain("ink", 40), toy_domain("mud", 30, held_out=6)]
        ((train, test),) = parts(0.5, domains=domains)
        assert (len(train), len(test)) == (24, 6)

    def test_unlabelled_target_is_not_split(self):
        source, target, _ = toy_domains()
        stream = make_stream("toy", [source, target.unlabelled()], 1, hold_out=0.5)
        assert torch.equal(stream.targets[0].images, target.images)
        assert stream.tests[1] is None

    @pytest.mark.parametrize("share", [0.01, 0.99])
    def test_a_target_too_small_to_split(self, share):
        with pytest.raises(ConfigError, match="'mud' with 8 images cannot be split"):
            parts(share, domains=[toy_domain("ink", 40), toy_domain("mud", 8)])


class TestRun:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_files(Path("day"), image_files())
        write_files(Path("night"), image_files(seed=1))

    def test_share_is_a_recipe_value(self):
        assert_ok(run_folders("day", "night", more=("--set", "hold_out=0.25")))
        assert config_of()["recipe"]["hold_out"] == 0.25
        assert config_of()["changed"]["hold_out"] == 0.25
        assert [e["images"] for e in journal_of(Path("run"), "stage_started")] == [8, 9]

    def test_another_share_is_another_run(self):
        assert_ok(run_folders("day", "night"))
        result = run_folders("day", "night", more=("--set", "hold_out=0.5"))
        assert result.code == 2
        assert "hold_out: 0.0 there, 0.5 requested" in result.err

    @pytest.mark.parametrize("value", ["1", "-0.1", "half"])
    def test_invalid_share(self, value):
        assert_error(run_folders("day", "night", more=("--set", f"hold_out={value}")), "hold_out must be")
