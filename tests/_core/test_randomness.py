import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratp._core.environment import Randomness

NAMES = st.tuples() | st.lists(st.text(max_size=4) | st.integers(0, 9), max_size=3).map(tuple)


def numbers(generator):
    return torch.rand(4, generator=generator).tolist()


@given(seed=st.integers(0, 2**40), name=NAMES)
def test_same_name_gives_same_numbers(seed, name):
    assert numbers(Randomness(seed).generator(*name)) == numbers(Randomness(seed).generator(*name))


@given(seed=st.integers(0, 100), name=NAMES, other_seed=st.integers(0, 100), other_name=NAMES)
def test_different_names_and_seeds_differ(seed, name, other_seed, other_name):
    one, other = Randomness(seed).derive(*name), Randomness(other_seed).derive(*other_name)
    assert (one == other) == ((seed, name) == (other_seed, other_name))


@given(seed=st.integers(-(2**70), 2**70), name=NAMES)
def test_derived_seeds_suit_any_generator(seed, name):
    assert 0 <= Randomness(seed).derive(*name) < 2**63


def test_derived_seeds_are_stable():
    """Results of earlier versions can be repeated only as long as these do not change."""
    assert Randomness(2022).derive("network") == 6690508533535477500
    assert Randomness(2022).derive("batches", 1) == 257546010047125075


def test_uses_are_independent():
    randomness = Randomness(0)
    expected = numbers(randomness.generator("b"))
    torch.rand(100, generator=randomness.generator("a"))
    torch.rand(100)
    assert numbers(randomness.generator("b")) == expected


class TestScope:
    def test_it_makes_global_numbers_repeatable(self):
        draws = []
        for _ in range(2):
            torch.rand(3)
            with Randomness(1).scope("network"):
                draws.append(torch.rand(4).tolist())
        assert draws[0] == draws[1]
        with Randomness(2).scope("network"):
            assert torch.rand(4).tolist() != draws[0]

    def test_it_leaves_the_global_generator_as_it_was(self):
        before = torch.get_rng_state()
        with Randomness(1).scope("network"):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)

    def test_global_generator_is_restored_after_error(self):
        def fail():
            with Randomness(1).scope("network"):
                torch.rand(3)
                raise ZeroDivisionError

        before = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            fail()
        assert torch.equal(torch.get_rng_state(), before)

    def test_it_seeds_no_accelerator(self, monkeypatch):
        """Their generators are not put back afterwards, so they must not be touched."""
        seeded = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        with Randomness(1).scope("network"):
            torch.rand(1)
        assert seeded == []

    def test_threads_are_independent(self):
        def alone(seed):
            with Randomness(seed).scope("network"):
                return [torch.rand(3).tolist() for _ in range(5)]

        def beside(seed):
            start.wait()
            with Randomness(seed).scope("network"):
                for _ in range(5):
                    draws[seed].append(torch.rand(3).tolist())
                    time.sleep(0.001)

        before = torch.get_rng_state()
        start, draws = threading.Barrier(4), {seed: [] for seed in range(4)}
        threads = [threading.Thread(target=beside, args=(seed,)) for seed in draws]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert draws == {seed: alone(seed) for seed in draws}
        assert torch.equal(torch.get_rng_state(), before)

    def test_scopes_nest(self):
        with Randomness(1).scope("a"), Randomness(2).scope("b"):
            inside = torch.rand(3).tolist()
        with Randomness(2).scope("b"):
            assert torch.rand(3).tolist() == inside
