import gc
import itertools
import weakref

import pytest
import torch

from ratp.functional.numerics import in_chunks


class SmallDevice:
    """Squares numbers, and runs out of memory above a number of rows."""

    def __init__(self, rows):
        self.numbers = torch.arange(100.0)
        self.rows = rows
        self.asked = []

    def __call__(self, rows):
        self.asked.append(rows.stop - rows.start)
        part = self.numbers[rows]
        if len(part) > self.rows:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return part.square(), part[:, None] > 50


def squares(device, chunk):
    return in_chunks(device, 100, chunk)


@pytest.mark.parametrize("chunk", [1, 7, 50, 99, 100, 101, 1000])
def test_all_rows_are_done_in_order(chunk):
    square, large = squares(SmallDevice(1000), chunk)
    assert torch.equal(square, torch.arange(100.0).square())
    assert torch.equal(large.squeeze(1), torch.arange(100) > 50)


@pytest.mark.parametrize("rows", [1, 2, 3, 12, 49, 99])
@pytest.mark.parametrize("chunk", [64, 100, 4096])
def test_too_large_a_chunk_is_halved_until_it_fits(rows, chunk):
    device = SmallDevice(rows)
    expected = squares(SmallDevice(1000), 1000)
    assert all(torch.equal(*pair) for pair in zip(squares(device, chunk), expected, strict=True))
    failed = [size for size in device.asked if size > rows]
    assert all(later == earlier // 2 for earlier, later in itertools.pairwise(failed))
    assert sum(size for size in device.asked if size <= rows) == 100


def test_finished_chunks_are_not_repeated():
    """The memory becomes scarce after the first chunk."""

    class Shrinking(SmallDevice):
        def __call__(self, rows):
            self.rows = 60 if rows.start == 0 else 20
            return super().__call__(rows)

    device = Shrinking(60)
    assert torch.equal(squares(device, 60)[0], torch.arange(100.0).square())
    assert device.asked == [60, 40, 20, 20]


def test_memory_that_does_not_suffice_for_one_row_is_an_error():
    device = SmallDevice(0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        squares(device, 16)
    assert device.asked == [16, 8, 4, 2, 1]


def test_other_errors_are_not_taken_for_out_of_memory():
    def broken(rows):
        raise RuntimeError(f"no such rows: {rows}")

    with pytest.raises(RuntimeError, match="no such rows"):
        in_chunks(broken, 10, 4)


def test_what_a_failed_attempt_held_is_free_before_the_next():
    held = []
    gc.freeze()  # what other tests left need not be searched

    def function(rows):
        gc.collect()
        assert all(reference() is None for reference in held)
        large = torch.zeros(rows.stop - rows.start)
        held.append(weakref.ref(large))
        if len(large) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return (large + 1,)

    try:
        assert in_chunks(function, 10, 8)[0].tolist() == [1.0] * 10
    finally:
        gc.unfreeze()


def test_no_rows_give_empty_results_of_the_right_kind():
    square, large = in_chunks(lambda rows: SmallDevice(10)(slice(0, rows.stop)), 0, 16)
    assert (square.shape, large.shape, large.dtype) == ((0,), (0, 1), torch.bool)
