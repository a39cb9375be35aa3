"""Orders as users write them, and domains split into what is trained on and what is tested on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import toy_domain, toy_domains, toy_spec
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, RatpError
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams import STREAMS, find_stream
from ratp.streams.stream import DataOptions, make_stream, parse_order, stratified_mask

DEMO = find_stream("demo")
CODES = list(DEMO.domains)
separators = st.sampled_from([">", "→", ",", " > ", " → ", ", ", "\t>", " ,"])


class TestOrder:
    @given(
        order=st.permutations(CODES),
        between=st.lists(separators, min_size=3, max_size=3),
        around=st.sampled_from(["", " ", "\n"]),
    )
    def test_any_permutation_with_any_separators_is_one(self, order, between, around):
        text = around + "".join(code + mark for code, mark in zip(order, [*between, ""], strict=True)) + around
        assert parse_order(text, DEMO) == tuple(order)

    @given(order=st.permutations(CODES), length=st.integers(2, 3))
    def test_partial_order_is_a_subset(self, order, length):
        text = ">".join(order[:length])
        assert parse_order(text, DEMO, subset=True) == tuple(order[:length])
        with pytest.raises(ConfigError, match="--subset") as caught:
            parse_order(text, DEMO)
        assert all(code in str(caught.value) for code in order[length:])

    @given(text=st.text() | st.lists(st.sampled_from([*CODES, ">", ",", "→", " ", "", "scn"])).map("".join))
    def test_any_text_is_an_order_or_a_mistake(self, text):
        for subset in (False, True):
            try:
                order = parse_order(text, DEMO, subset=subset)
            except ConfigError as error:
                problems = error.problems
            else:
                assert set(order) <= set(CODES)
                assert len(set(order)) == len(order) >= 2
                assert subset or len(order) == len(CODES)
                continue
            assert problems
            assert all(problem.endswith(".") for problem in problems)

    @pytest.mark.parametrize(
        ("name", "order"), [("default", CODES), ("reverse", CODES[::-1]), (" reverse ", CODES[::-1])]
    )
    def test_it_may_be_a_name(self, name, order):
        assert parse_order(name, DEMO) == tuple(order)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("scan>scan>photo>font>street", ["repeats domain 'scan'"]),
            ("scan>photo>font", ["leaves out street", "'scan>photo>font>street'", "--subset"]),
            ("scan>photo>font>stret", ["unknown domain 'stret'", "Did you mean 'street'?"]),
            ("Scan>photo>font>street", ["unknown domain 'Scan'", "Did you mean 'scan'?"]),
            ("scan>>font>street", ["empty place", "'scan>photo>font>street'"]),
            ("scan>photo>font>street>", ["empty place"]),
            ("revers", ["unknown order 'revers'", "Did you mean 'reverse'?", "'scan>photo>font>street'"]),
            ("", ["unknown order ''", "'scan>photo>font>street'"]),
            ("scan", ["unknown order 'scan'", "'scan>photo>font>street'"]),
            ("scan photo font street", ["unknown order 'scan photo font street'", "'scan>photo>font>street'"]),
        ],
    )
    def test_a_mistake_is_explained(self, text, expected):
        with pytest.raises(ConfigError) as caught:
            parse_order(text, DEMO)
        assert all(words in str(caught.value) for words in expected)

    def test_all_mistakes_are_reported(self):
        with pytest.raises(ConfigError) as caught:
            parse_order("scan>scan>>fnt>stret", DEMO)
        assert len(caught.value.problems) == 4

    def test_shell_redirection_is_suspected(self):
        """``--order scan>photo`` without quotes arrives as ``scan``."""
        with pytest.raises(ConfigError, match=r"(?i)quot"):
            parse_order("scan", DEMO)


class TestFinding:
    def test_demo_is_a_stream(self):
        assert find_stream("demo") is DEMO

    @pytest.mark.parametrize(
        ("name", "expected"), [("dmo", "Did you mean 'demo'"), ("DEMO", "Did you mean 'demo'"), ("", "Valid: ")]
    )
    def test_unknown_streams_are_refused(self, name, expected):
        with pytest.raises(ConfigError, match="unknown stream") as caught:
            find_stream(name)
        assert expected in str(caught.value)

    @pytest.mark.parametrize("spec", STREAMS.values(), ids=list(STREAMS))
    def test_orders_name_the_domains_they_have(self, spec):
        assert "default" in spec.orders
        for order in spec.orders.values():
            assert len(set(order)) == len(order) >= 2
            assert set(order) <= set(spec.domains)

    def test_domains_are_loaded_in_order(self):
        stream = resolve(RunRequest("demo", order="font>scan", subset=True)).load_stream()
        assert (stream.order, stream.source.name, [t.name for t in stream.targets]) == (
            ("font", "scan"),
            "font",
            ["scan"],
        )
        assert stream.image_size == (32, 32)
        assert stream.classes == tuple("0123456789")


class TestSplit:
    @given(
        labels=st.lists(st.integers(0, 5), min_size=1, max_size=200),
        share=st.floats(0, 1),
        seed=st.integers(0, 2**31),
    )
    def test_split_takes_a_share_of_every_class(self, labels, share, seed):
        labels = torch.tensor(labels)
        mask = stratified_mask(labels, share, torch.Generator().manual_seed(seed))
        assert mask.dtype == torch.bool
        assert mask.shape == labels.shape
        for label in labels.unique():
            members = labels == label
            assert abs(int((mask & members).sum()) - share * int(members.sum())) <= 0.5

    @given(seed=st.integers(0, 1000))
    def test_it_depends_on_nothing_but_the_generator(self, seed):
        labels = torch.arange(60) % 4
        masks = [stratified_mask(labels, 0.2, torch.Generator().manual_seed(seed)) for _ in range(2)]
        assert torch.equal(*masks)

    def test_any_image_may_be_chosen(self):
        labels = torch.arange(20) % 2
        generator = torch.Generator().manual_seed(0)
        chosen = torch.stack([stratified_mask(labels, 0.2, generator) for _ in range(100)]).sum(dim=0)
        assert chosen.min() > 5
        assert chosen.max() < 45


class TestMaking:
    def test_a_source_without_a_test_part_gives_a_fifth(self):
        stream = make_stream("toy", toy_domains(), seed=1)
        source, test = stream.source, stream.tests[0]
        assert (len(source), len(test)) == (32, 8)
        assert source.labels.bincount().tolist() == [8] * 4
        assert test.labels.bincount().tolist() == [2] * 4
        assert not {i.numpy().tobytes() for i in source.images} & {i.numpy().tobytes() for i in test.images}

    def test_the_seed_decides_which(self):
        a, b, c = (make_stream("toy", toy_domains(), seed).tests[0].images for seed in (1, 2, 1))
        assert torch.equal(a, c)
        assert not torch.equal(a, b)

    def test_a_target_without_a_test_part_is_both(self):
        """As the paper measures: on the images it adapted to, whose labels it never saw."""
        domains = toy_domains()
        stream = make_stream("toy", domains, seed=1)
        for given_, target, test in zip(domains[1:], stream.targets, stream.tests[1:], strict=True):
            assert torch.equal(target.images, given_.images)
            assert torch.equal(test.images, given_.images)
            assert torch.equal(test.labels, given_.labels)

    def test_a_test_part_of_its_own_is_kept(self):
        domains = [toy_domain("ink", 40, held_out=10), toy_domain("mud", 30, held_out=6)]
        for seed in (1, 2):
            stream = make_stream("toy", domains, seed)
            assert torch.equal(stream.source.images, domains[0].images[:30])
            assert torch.equal(stream.tests[0].images, domains[0].images[30:])
            assert torch.equal(stream.targets[0].images, domains[1].images[:24])
            assert torch.equal(stream.tests[1].labels, domains[1].labels[24:])

    def test_targets_have_no_labels_and_tests_have(self):
        stream = make_stream("toy", toy_domains(), seed=1)
        assert isinstance(stream.source, LabelledDomain)
        assert all(type(target) is UnlabelledDomain for target in stream.targets)
        assert all(isinstance(test, LabelledDomain) for test in stream.tests)
        assert stream.order == ("ink", "mud", "fog")

    def test_fingerprints_are_of_the_domains_as_given(self):
        domains = toy_domains()
        stream = make_stream("toy", domains, seed=1)
        assert stream.fingerprints == {d.name: d.fingerprint() for d in domains}
        changed = replace(domains[1], labels=(domains[1].labels + 1) % 4)
        other = make_stream("toy", [domains[0], changed, domains[2]], seed=1)
        assert [n for n in other.fingerprints if other.fingerprints[n] != stream.fingerprints[n]] == ["mud"]

    def test_it_needs_a_source_which_may_wait_for_its_first_target(self):
        with pytest.raises(ConfigError, match="needs a source"):
            make_stream("toy", [], seed=1)
        assert make_stream("toy", toy_domains()[:1], seed=1).targets == ()

    def test_domains_must_fit_together(self):
        source, target, third = toy_domains()
        other = replace(target, classes=("a", "b", "c", "d"))
        small = replace(third, images=third.images[:, :, :16, :16])
        with pytest.raises(ConfigError) as caught:
            make_stream("toy", [source, other, small], seed=1)
        assert len(caught.value.problems) == 2
        assert "'mud' has other classes" in str(caught.value)
        assert "'fog' has images of (16, 16), the source of (32, 32)" in str(caught.value)

    def test_two_domains_of_one_name_are_refused(self):
        with pytest.raises(RatpError, match="ink"):
            make_stream("toy", [toy_domain("ink"), toy_domain("ink", 20)], seed=1)

    @pytest.mark.parametrize("count", [4, 8])
    def test_a_source_too_small_to_split_is_explained(self, count):
        """No class has enough images to spare one: say so, not that the domain is empty."""
        with pytest.raises(RatpError, match=r"(?i)split|test") as caught:
            make_stream("toy", [toy_domain("ink", count), toy_domain("mud")], seed=1)
        assert "ink" in str(caught.value)

    def test_a_spec_loads_what_it_names(self):
        spec = toy_spec(toy_domains())
        loaded = spec.load(list(spec.domains), 32, DataOptions())
        assert [item.domain.name for item in loaded] == ["ink", "mud", "fog"]
