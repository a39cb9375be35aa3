"""Places within groups, against counting by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ratp.functional.numerics import ranks_within


def test_as_they_lie():
    assert ranks_within(torch.tensor([2, 0, 2, 2, 0])).tolist() == [0, 0, 1, 2, 1]
    assert ranks_within(torch.empty(0, dtype=torch.int64)).tolist() == []


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.randoms())
def test_in_any_order(groups, random):
    order = list(range(len(groups)))
    random.shuffle(order)
    counts, expected = dict.fromkeys(range(5), 0), [0] * len(groups)
    for place in order:
        expected[place] = counts[groups[place]]
        counts[groups[place]] += 1
    assert ranks_within(torch.tensor(groups), torch.tensor(order)).tolist() == expected
