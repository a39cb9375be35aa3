import threading

import pytest
import torch

from ratp.functional.numerics import full_precision

CPU = torch.device("cpu")
BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def allowed():
    return [backend.fp32_precision for backend in BACKENDS]


@pytest.fixture(autouse=True)
def _as_before():
    before = allowed()
    yield
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_nothing_less_is_allowed_inside_and_all_is_as_it_was_afterwards(precision):
    torch.set_float32_matmul_precision(precision)
    before = allowed()
    with full_precision(CPU):
        assert set(allowed()) <= {"ieee", "none"}
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    assert allowed() == before
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_the_newer_interface_is_heeded_too(precision):
    torch.backends.cuda.matmul.fp32_precision = precision
    before = allowed()
    with full_precision(CPU):
        assert set(allowed()) <= {"ieee", "none"}
    assert allowed() == before


def test_an_error_inside_changes_nothing():
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ValueError, match="inside"), full_precision(CPU), full_precision(CPU):
        raise ValueError("inside")
    assert torch.get_float32_matmul_precision() == "high"


def test_the_last_thread_to_leave_puts_it_back():
    torch.set_float32_matmul_precision("high")
    first_may_leave, second_may_leave, entered = threading.Event(), threading.Event(), threading.Barrier(3, timeout=10)

    def work(may_leave):
        with full_precision(CPU):
            entered.wait()
            may_leave.wait(10)

    threads = [threading.Thread(target=work, args=(event,)) for event in (first_may_leave, second_may_leave)]
    for thread in threads:
        thread.start()
    entered.wait()
    first_may_leave.set()
    threads[0].join()
    assert torch.get_float32_matmul_precision() == "highest"
    second_may_leave.set()
    threads[1].join()
    assert torch.get_float32_matmul_precision() == "high"


def test_autocast_does_not_reach_inside():
    matrix = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        with full_precision(CPU):
            assert torch.equal(matrix @ matrix, matrix.mm(matrix))
            assert (matrix @ matrix).dtype == torch.float32
        assert (matrix @ matrix).dtype == torch.bfloat16
