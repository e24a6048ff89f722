"""The oracle against plain loops, and its verdicts on wrong results."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from test_lower import conv, nest_of

from looptune import reference as oracle
from looptune.errors import VerificationError
from looptune.ir import IDENTITY, Axis, Dim, Nest, Operand, plan_of
from looptune.reference import check, reference, verify


def by_loops(nest: Nest, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The nest, point by point."""
    out = np.full(nest.output.shape, np.nan)
    if nest.accumulate:
        out = arrays[nest.output.name].astype(float)

    def index(operand: Operand, point: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            d.offset + sum(c * p for c, p in zip(d.coefficients, point, strict=True))
            for d in operand.dims
        )

    first = set()
    for point in itertools.product(*(range(axis.extent) for axis in nest.axes)):
        value = 1.0
        for operand in nest.inputs:
            at = index(operand, point)
            inside = all(0 <= i < n for i, n in zip(at, operand.shape, strict=True))
            value *= float(arrays[operand.name][at]) if inside else operand.fill
        where = index(nest.output, point)
        if where not in first and not nest.accumulate:
            out[where] = IDENTITY[nest.reduction]
        first.add(where)
        join = {"add": np.add, "max": np.maximum, "min": np.minimum}[nest.reduction]
        out[where] = join(out[where], value)
    return out


def arrays_of(nest: Nest) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {op.name: rng.uniform(-1, 1, op.shape).astype(np.float32) for op in nest.operands}


PADDED = Nest(
    (Axis("i", 7), Axis("r", 3, True)),
    Operand("out", "float32", (Dim(15, 1, (2, 0), 1),)),
    (Operand("x", "float32", (Dim(5, 1, (1, 1), -2),), fill=0.5),),
)
NESTS = {
    "matmul": nest_of("mk,kn->mn", m=4, k=5, n=6),
    "dot": nest_of("k,k->", k=9),
    "outer": nest_of("m,n->mn", m=3, n=4),
    "unused_reduction": replace(
        nest_of("mk,k->m", m=3, k=4), inputs=(nest_of("mk,k->m", m=3, k=4).inputs[0],)
    ),
    "padded": PADDED,
    "padded_max": replace(PADDED, reduction="max"),
    "product_min": replace(nest_of("mk,kn->mn", m=4, k=5, n=3), reduction="min"),
    "accumulate": replace(nest_of("mk,kn->mn", m=4, k=5, n=6), accumulate=True),
    "conv": conv(2, 5, 3),
}


@pytest.mark.parametrize("name", NESTS)
def test_agrees_with_plain_loops(name):
    nest = NESTS[name]
    arrays = arrays_of(nest)
    np.testing.assert_allclose(reference(nest, arrays), by_loops(nest, arrays), rtol=1e-12)


@pytest.mark.parametrize("name", NESTS)
def test_samples_agree_with_the_whole(name, monkeypatch):
    nest = NESTS[name]
    arrays = arrays_of(nest)
    result = reference(nest, arrays)
    monkeypatch.setattr(oracle, "whole_is_cheap", lambda plan: False)
    assert check(nest, arrays, result).ok
    written = np.argwhere(~np.isnan(by_loops(nest, arrays)))
    wrong = result.copy()
    wrong[tuple(written[-1])] += 0.1
    assert not check(nest, arrays, wrong, boundaries={0: [3]}).ok


def test_empty_reductions_give_the_identity():
    nest = nest_of("mk,kn->mn", m=2, k=0, n=3)
    arrays = {"a": np.ones((2, 0)), "b": np.ones((0, 3))}
    assert (reference(nest, arrays) == 0).all()
    assert (reference(replace(nest, reduction="max"), arrays) == -np.inf).all()


def test_the_bound_follows_length_and_dtype():
    short, long = (nest_of("k,k->", k=k) for k in (10, 1000))
    one = np.ones(())
    assert oracle.error_bound(plan_of(long), one) > 50 * oracle.error_bound(plan_of(short), one)
    double = nest_of("k,k->", "float64", k=10)
    assert oracle.error_bound(plan_of(double), one) < 1e-14


def test_wrong_results_are_told_with_their_place():
    nest = NESTS["matmul"]
    arrays = arrays_of(nest)
    result = reference(nest, arrays).astype(np.float32)
    assert verify(nest, arrays, result).ok
    result[2, 3] += 1e-3
    with pytest.raises(VerificationError, match=r"element \[2, 3\] is .* times the error bound"):
        verify(nest, arrays, result)
    result[2, 3] = np.nan
    assert not check(nest, arrays, result).ok


def test_nan_and_infinity_are_data():
    nest = NESTS["matmul"]
    arrays = arrays_of(nest)
    arrays["a"][1] = np.nan
    arrays["b"][0, 2] = np.inf
    with np.errstate(all="ignore"):
        result = (arrays["a"] @ arrays["b"]).astype(np.float32)
    assert check(nest, arrays, result).ok
    assert not check(nest, arrays, np.nan_to_num(result)).ok
