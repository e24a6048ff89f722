"""Numbers that people give: NumPy's are numbers, truth values are not."""

import math

import numpy as np
import pytest

from looptune.errors import ArgumentError, SpecError
from looptune.host import thread_count
from looptune.scalars import real, whole
from looptune.tune import Budget, optimize
from looptune.workloads import matmul


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_whole(value):
    found = whole(value)
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.True_, np.float64(3), [3]])
def test_not_whole(value):
    assert whole(value) is None


@pytest.mark.parametrize("value", [3, 3.0, np.float64(3), np.float32(3), np.int8(3), np.float16(3)])
def test_real(value):
    assert real(value) == 3
    assert type(real(value)) in (int, float)


@pytest.mark.parametrize("value", ["3", None, True, np.True_, math.nan, 10**400, -(10**400), 3j])
def test_not_real(value):
    assert real(value) is None


def test_budgets_threads_and_seeds_of_numpy():
    assert Budget(seconds=np.float64(0.5)) == Budget(seconds=0.5)
    found = Budget(measurements=np.int64(3))
    assert type(found.measurements) is int
    assert thread_count(np.int64(1)) == 1
    plan = matmul(4, 4, 4)
    kernel = optimize(
        plan, budget=np.float32(0.0), threads=np.int64(1), seed=np.int64(2), target="avx2",
        verify=False,
    )  # fmt: skip
    assert kernel.threads == 1
    for call in (lambda: Budget(seconds=True), lambda: Budget(measurements=np.True_),
                 lambda: Budget(measurements=2.0)):  # fmt: skip
        with pytest.raises(SpecError, match="budget: "):
            call()
    with pytest.raises(ArgumentError, match="threads is True"):
        thread_count(True)
