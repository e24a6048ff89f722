"""The oracle against plain loops, and its verdicts on wrong results."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from builders import conv, nest_of

from looptune import reference as oracle
from looptune import workloads
from looptune.errors import ArgumentError, VerificationError
from looptune.ir import IDENTITY, Activation, Axis, Dim, Nest, Operand, Plan, Tensor, plan_of
from looptune.reference import check, reference, sampled_reference, verify


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
    assert not check(nest, arrays, wrong, boundaries=[{0: [3]}]).ok


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


def inputs_of(plan: Plan, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {t.name: rng.uniform(-1, 1, t.shape).astype(dtype) for t in plan.inputs}


@pytest.mark.parametrize("phase", range(4))
def test_samples_fall_in_every_nest_that_writes_the_output(phase, monkeypatch):
    plan = workloads.conv_transpose2d((1, 3, 9, 9), (3, 2, 3, 3), stride=2, padding=1)
    arrays = inputs_of(plan)
    result = reference(plan, arrays)
    monkeypatch.setattr(oracle, "whole_is_cheap", lambda plan: False)
    assert check(plan, arrays, result).ok
    oracle.written(plan.nests[phase], result)[...] += 0.1
    found = check(plan, arrays, result)
    assert not found.ok
    assert result[found.where] == found.found


def test_samples_of_large_problems_are_taken():
    plan = workloads.matmul(1025, 1025, 1025)
    arrays = inputs_of(plan)
    assert not oracle.whole_is_cheap(plan)
    result = arrays["a"] @ arrays["b"]
    found = check(plan, arrays, result)
    assert found.ok
    assert found.points >= oracle.SAMPLES
    result[:, 512] = 0  # one column of a thousand, at a boundary
    assert not check(plan, arrays, result, boundaries=[{2: [512]}]).ok


def reversed_output() -> Nest:
    return Nest(
        (Axis("i", 4), Axis("j", 3), Axis("k", 2, True)),
        Operand("out", "float64", (Dim(3, 5, (0, -1, 0), 2), Dim(9, -20, (2, 0, 0), 1))),
        (
            Operand(
                "x", "float64", (Dim(4, 6, (1, 0, 0)), Dim(3, 2, (0, 1, 0)), Dim(2, 1, (0, 0, 1)))
            ),
        ),
    )


def overlapping() -> Plan:
    """The second nest adds to half of what the first wrote, and writes nothing else."""

    def nest(extent: int, step: int, name: str, accumulate: bool) -> Nest:
        return Nest(
            (Axis("i", extent), Axis("k", 3, True)),
            Operand("out", "float64", (Dim(8, 1, (step, 0)),)),
            (Operand(name, "float64", (Dim(extent, 3, (1, 0)), Dim(3, 1, (0, 1)))),),
            accumulate=accumulate,
        )

    inputs = (Tensor("x", "float64", (8, 3), (3, 1)), Tensor("y", "float64", (4, 3), (3, 1)))
    nests = (nest(8, 1, "x", False), nest(4, 2, "y", True))
    return Plan(nests, inputs, Tensor("out", "float64", (8,), (1,)))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(reversed_output()),
        overlapping(),
        workloads.dot(9),
        workloads.matmul(3, 4, 0),
        workloads.einsum("ij,jk,kl->il", (3, 4), (4, 5), (5, 6)),
        workloads.conv_transpose1d((2, 2, 4), (2, 2, 2), stride=3, padding=1),
    ],
    ids=["reversed", "overlapping", "scalar", "empty_sum", "temporaries", "phases"],
)
def test_the_reference_at_points_is_the_whole_at_points(plan):
    arrays = inputs_of(plan, "float64")
    whole = reference(plan, arrays)
    index = np.array(list(np.ndindex(*plan.output.shape)), np.int64)
    at = sampled_reference(plan, arrays, index)
    np.testing.assert_allclose(at, whole.reshape(-1), rtol=1e-12)


@pytest.mark.parametrize("cheap", [True, False])
def test_the_callers_arrays_are_never_written(cheap, monkeypatch):
    monkeypatch.setattr(oracle, "whole_is_cheap", lambda plan: cheap)
    plan = workloads.conv_transpose1d((1, 2, 9), (2, 2, 3), stride=2, dtype="float64")
    plan = replace(plan, nests=tuple(replace(nest, accumulate=True) for nest in plan.nests))
    arrays = inputs_of(plan, "float64") | {"out": np.ones(plan.output.shape)}
    result = reference(plan, arrays)
    assert check(plan, arrays, result).ok
    assert not check(plan, arrays, result - 1).ok
    assert (arrays["out"] == 1).all()


def test_infinite_data_does_not_widen_the_bound():
    nest = replace(NESTS["unused_reduction"], reduction="max")
    arrays = arrays_of(nest)
    arrays["a"][0, 0] = -np.inf
    result = reference(nest, arrays)
    assert np.isfinite(result).all()
    assert check(nest, arrays, result).ok
    result[0] = 77
    assert not check(nest, arrays, result).ok


def test_a_minimum_is_bounded_by_its_largest_product():
    nest = NESTS["product_min"]
    arrays = arrays_of(nest)
    off = reference(nest, arrays) * (1 + 3e-7)
    assert check(nest, arrays, off).ok
    assert not check(nest, arrays, off * (1 + 1e-3)).ok


@pytest.mark.parametrize("shape", [(3,), (), (1, 3), (3, 4)])
def test_results_of_another_shape_are_refused(shape):
    plan = workloads.matmul(3, 3, 3)
    with pytest.raises(ArgumentError, match=r"out has shape .*; the plan has \(3, 3\)"):
        check(plan, inputs_of(plan), np.zeros(shape))


def test_arrays_that_do_not_fit_are_named():
    plan = workloads.matmul(3, 3, 3)
    with pytest.raises(ArgumentError, match=r"no array for b; there are \['a'\]"):
        reference(plan, {"a": np.ones((3, 3))})
    with pytest.raises(ArgumentError, match=r"b has shape \(5, 5\)"):
        reference(plan, {"a": np.ones((3, 3)), "b": np.ones((5, 5))})


def test_what_an_infinity_saturates_is_compared_like_any_other() -> None:
    """The largest of nothing but padding is -inf, and its tanh -1, to a rounding or two."""
    axis, window = Axis("i", 3), Axis("k", 2, True)
    out = Operand("out", "float32", (Dim(3, 1, (1, 0)),))
    a = Operand("a", "float32", (Dim(2, 1, (1, 1), 5),), fill=-math.inf)
    nest = Nest((axis, window), out, (a,), "max", epilogue=(Activation("tanh"),) * 2)
    arrays = {"a": np.zeros(2, np.float32)}
    exact = np.tanh(np.tanh(np.full(3, -np.inf))).astype(np.float32)
    assert check(nest, arrays, exact).ok
    assert check(nest, arrays, np.nextafter(exact, np.float32(0))).ok
    assert not check(nest, arrays, exact * np.float32(1.001)).ok
