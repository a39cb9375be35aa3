"""A store of fixed size forgets its oldest rows."""

from __future__ import annotations

import torch

from ratp.methods.adacontrast import Ring


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_the_pointer_wraps():
    ring = Ring(numbers(0, 0, 0, 0, 0), torch.zeros(5, dtype=torch.int64))
    ring.put(numbers(1, 2, 3), torch.tensor([1, 2, 3]))
    assert ring.pointer == 3
    ring.put(numbers(4, 5, 6), torch.tensor([4, 5, 6]))
    assert ring.pointer == 1
    assert ring.columns[0].tolist() == [6, 2, 3, 4, 5]
    assert ring.columns[1].tolist() == [6, 2, 3, 4, 5]


def test_it_fills_up():
    ring = Ring(numbers(0, 0, 0), filled=0)
    assert len(ring.rows[0]) == 0
    ring.put(numbers(1, 2))
    assert ring.rows[0].tolist() == [1, 2]
    ring.put(numbers(3, 4))
    assert ring.rows[0].tolist() == [4, 2, 3]
    assert (ring.filled, ring.pointer) == (3, 1)


def test_of_more_than_there_is_room_for_the_last_are_kept():
    """Where each would have been written, had they come one by one."""
    at_once, in_turn = Ring(numbers(0, 0, 0), pointer=2), Ring(numbers(0, 0, 0), pointer=2)
    at_once.put(numbers(1, 2, 3, 4, 5, 6, 7))
    for value in range(1, 8):
        in_turn.put(numbers(value))
    assert at_once.columns[0].tolist() == in_turn.columns[0].tolist()
    assert at_once.pointer == in_turn.pointer


def test_nothing_changes_nothing():
    ring = Ring(numbers(1, 2, 3), pointer=1)
    ring.put(numbers())
    assert ring.columns[0].tolist() == [1, 2, 3]
    assert ring.pointer == 1
