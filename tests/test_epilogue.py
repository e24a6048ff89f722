"""Biases, residuals and activations: what they compute, where they stand, and who refuses them."""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
from builders import nest_of
from harness import compiled, interpreted, programs_of, run_poisoned

import looptune
from looptune.default import default_schedule
from looptune.errors import LoweringError, NestError, SpecError, UnsupportedError
from looptune.host import runs
from looptune.ir import Activation, Axis, Combine, Dim, Nest, Operand, Plan, Scale, Step
from looptune.lower import lower
from looptune.reference import check, reference
from looptune.schedule import Schedule, pack, parse_order, vectorize
from looptune.target import TARGETS, Target
from looptune.workloads import conv2d, conv_transpose2d, einsum, fuse, matmul

STEPS = (
    "relu", "gelu", "sigmoid", "tanh", "scale:-0.5", "bias", "bias:row", "bias:column",
    "batchnorm", "residual", "bias,relu", "bias,gelu,residual", "batchnorm,relu,scale:2",
)  # fmt: skip
AVX2 = TARGETS["avx2"]
ULPS = {"relu": 0, "sigmoid": 3, "tanh": 3, "gelu": 8}
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)


def nest_with(order: str, *, steps: str = "bias,gelu", dtype: str = "float32") -> Schedule:
    (nest,) = fuse(matmul(13, 21, 11, dtype=dtype), steps).nests
    return parse_order(nest, order, "n")


def calls(schedule: Schedule, target: Target) -> list[Callable[..., object]]:
    found = [interpreted(programs_of(schedule, target)), interpreted(lower(schedule, target))]
    return [*found, compiled(schedule, target)] if runs(target) else found


@every_target
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_step_on_every_target(steps: str, dtype: str, target: Target) -> None:
    schedule = nest_with("m:4 n:16 k m n", steps=steps, dtype=dtype)
    for call in calls(schedule, target):
        run_poisoned(schedule.nest, call, np.random.default_rng(0))


@every_target
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "order",
    [
        "m n k", "k m n", "k:4 m n k", "k:4 m:4 k:2 n:16 k m n", "m:4 k:3 n:8 m n k",
        "n m k:2 k", "k:5 n k m",
    ],
)  # fmt: skip
def test_the_last_visit_finishes_and_no_other(order: str, accumulate: bool, target: Target) -> None:
    plan = fuse(matmul(13, 21, 11, accumulate=accumulate), "bias,relu,scale:2")
    schedule = parse_order(plan.nests[0], order)
    for call in calls(schedule, target):
        run_poisoned(schedule.nest, call, np.random.default_rng(1), exact=True)


@every_target
def test_lanes_of_a_reduction_are_summed_before(target: Target) -> None:
    plan = fuse(einsum("mk,k->m", sizes={"m": 5, "k": 37}), "bias,sigmoid")
    for order in ("m k", "k:16 m k"):
        schedule = vectorize(parse_order(plan.nests[0], order), "k")
        for call in calls(schedule, target):
            run_poisoned(schedule.nest, call, np.random.default_rng(2))


@every_target
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_nothing_are_finished_too(accumulate: bool, target: Target) -> None:
    (nest,) = fuse(matmul(5, 9, 0, accumulate=accumulate), "bias,residual,relu").nests
    for call in calls(Schedule(nest), target):
        run_poisoned(nest, call, np.random.default_rng(3), exact=True)


@every_target
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_write_cache_holds_finished_elements(accumulate: bool, target: Target) -> None:
    (nest,) = fuse(matmul(13, 21, 11, accumulate=accumulate), "bias:row,relu,bias").nests
    schedule = pack(parse_order(nest, "m:4 n:16 k:4 k m n", "m"), 0, (1, 0), 1)
    for call in calls(schedule, target):
        run_poisoned(nest, call, np.random.default_rng(4), exact=True)


def test_a_write_cache_in_a_reduction_is_refused() -> None:
    (nest,) = fuse(matmul(13, 21, 11), "relu").nests
    with pytest.raises(LoweringError, match="lies inside a reduction loop"):
        lower(pack(parse_order(nest, "k:4 m n k"), 0, None, 0), TARGETS["avx2"])


@pytest.mark.skipif(not runs(AVX2), reason="the interpreter does not fuse float64")
@pytest.mark.parametrize("kind", ULPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_activations_are_as_exact_as_stated(kind: str, dtype: str) -> None:
    """Where the exact value is known to far more digits than are compared."""
    mp.mp.dps = 40
    exact = {
        "relu": lambda x: max(x, 0),
        "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
        "tanh": mp.tanh,
        "gelu": lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
    }[kind]
    x = np.concatenate([np.linspace(-12, 12, 1201), [1e-30, -1e-30, 1e-4, 3e-8]]).astype(dtype)
    (nest,) = fuse(einsum("i->i", x.shape, dtype=dtype), kind).nests
    out = np.empty_like(x)
    compiled(default_schedule(nest, AVX2), AVX2)([out, x])
    for found, value in zip(out, x, strict=True):
        wanted = exact(mp.mpf(float(value)))
        unit = max(float(np.spacing(abs(np.asarray(float(wanted), dtype)))), np.finfo(dtype).tiny)
        assert abs(mp.mpf(float(found)) - wanted) <= ULPS[kind] * unit, value


@every_target
@pytest.mark.parametrize("kind", ULPS)
def test_activations_of_special_values(kind: str, target: Target) -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, -1e38, 100, -100], np.float32)
    limits = {
        "relu": [np.inf, 0, np.nan, 0, 0, 1e38, 0, 100, 0],
        "gelu": [np.inf, 0, np.nan, 0, 0, 1e38, 0, 100, 0],
        "sigmoid": [1, 0, np.nan, 0.5, 0.5, 1, 0, 1, 0],
        "tanh": [1, -1, np.nan, 0, 0, 1, -1, 1, -1],
    }
    (nest,) = fuse(einsum("i->i", x.shape), kind).nests
    schedule = Schedule(nest)
    for call in calls(schedule, target):
        out = np.empty_like(x)
        call([out, x])
        np.testing.assert_allclose(out, np.array(limits[kind], np.float32), atol=1e-37)


def test_a_bias_belongs_to_the_channels() -> None:
    for layout, shape, broadcast in (
        ("NCHW", (2, 3, 8, 8), (1, -1, 1, 1)), ("NHWC", (2, 8, 8, 3), (1, 1, 1, -1)),
    ):  # fmt: skip
        plain = conv2d(shape, (5, 3, 3, 3), layout=layout, padding=1)
        plan = fuse(plain, "bias")
        arrays = looptune.measure.random_arrays(plan)
        expected = reference(plain, arrays) + arrays["bias"].reshape(broadcast)
        np.testing.assert_allclose(reference(plan, arrays), expected)


def test_every_phase_of_a_transposed_convolution_is_finished() -> None:
    """With a stride over the kernel some phases are sums of nothing: their bias is all there is."""
    plan = fuse(conv_transpose2d((1, 2, 4, 4), (2, 3, 2, 2), stride=3), "bias,tanh")
    kernel = looptune.optimize(plan)
    arrays = looptune.measure.random_arrays(plan)
    out = np.asarray(kernel(*(arrays[tensor.name] for tensor in plan.inputs)))
    assert check(plan, arrays, out).ok
    hole = np.tanh(arrays["bias"].astype(np.float64))
    np.testing.assert_allclose(out[0, :, 2, 2], hole, rtol=1e-6)


def test_the_last_of_several_nests_has_the_epilogue() -> None:
    plan = fuse(einsum("ij,jk,kl->il", (3, 4), (4, 5), (5, 6)), "bias,relu")
    assert [len(nest.epilogue) for nest in plan.nests] == [0, 2]
    assert looptune.optimize(plan).report.verified


def test_steps_of_one_kind_have_inputs_of_their_own() -> None:
    plan = fuse(fuse(matmul(2, 3, 4), "bias,residual"), ["bias", " residual "])
    names = [tensor.name for tensor in plan.inputs]
    assert names == ["a", "b", "bias", "residual", "bias1", "residual1"]


def test_the_epilogue_is_part_of_the_key_and_the_text() -> None:
    plain = matmul(2, 3, 4).nests[0]
    keys = {plain.key, *(fuse(matmul(2, 3, 4), steps).nests[0].key for steps in STEPS)}
    assert len(keys) == len(STEPS)  # a bias and one of columns are the same for a matmul
    (nest,) = fuse(matmul(2, 3, 4), "bias:row,scale:2,gelu,batchnorm").nests
    assert "| + bias[m] | * 2.0 | gelu | * factor[n] | + shift[n]  [" in str(nest)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fuse(matmul(2, 3, 4), "swish"), SpecError, "'swish' is none of"),
        (lambda: fuse(matmul(2, 3, 4), "relu:3"), SpecError, "'relu:3' is none of"),
        (lambda: fuse(matmul(2, 3, 4), "scale:x"), SpecError, "'x' is no finite number"),
        (lambda: fuse(matmul(2, 3, 4), "scale:inf"), SpecError, "'inf' is no finite number"),
        (lambda: fuse(matmul(2, 3, 4), 3), SpecError, "a string or a sequence"),  # type: ignore[arg-type]
        (lambda: fuse(einsum("i->", (3,)), "bias"), UnsupportedError, "has 0 dimensions"),
        (lambda: fuse(einsum("i->i", (3,)), "bias:row"), UnsupportedError, "has 1 dimensions"),
        (lambda: fuse(matmul(2, 3, 4, dtype="int8"), "relu"), UnsupportedError, "take none"),
        (lambda: twice(), UnsupportedError, "several nests add to"),
        (lambda: Activation("swish"), NestError, "'swish' is none of"),  # type: ignore[arg-type]
        (lambda: Scale("2"), NestError, "scale by '2'"),  # type: ignore[arg-type]
        (lambda: Combine("div", extra()), NestError, "combining by 'div'"),  # type: ignore[arg-type]
        (lambda: Combine("add", "bias"), NestError, "a tuple of Operand"),  # type: ignore[arg-type]
        (lambda: with_steps("relu"), NestError, "a tuple of steps"),  # type: ignore[arg-type]
        (lambda: with_steps((Combine("add", extra(9)),)), NestError, "outside its shape"),
        (lambda: with_steps((Combine("add", extra(4, 0, 1)),)), NestError, "reduction axis k"),
        (lambda: with_steps((Activation("relu"),), "int8"), NestError, "without an epilogue"),
    ],
)  # fmt: skip
def test_bad_epilogues_are_named(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def extra(reach: int = 3, *coefficients: int) -> Operand:
    """An operand of three elements, walked by the first axis, or as the coefficients say."""
    return Operand("bias", "float32", (Dim(3, 1, coefficients or (1, 0), reach - 3),))


def with_steps(steps: tuple[Step, ...], dtype: str = "float32") -> Nest:
    nest = nest_of("mk,k->m", m=3, k=4)
    if dtype == "int8":
        plan = einsum("mk,k->m", sizes={"m": 3, "k": 4}, dtype="int8")
        nest = plan.nests[0]
    return Nest(nest.axes, nest.output, nest.inputs, epilogue=steps)


def twice() -> Plan:
    """A plan whose second nest adds to what the first has written."""
    first = einsum("i->i", (4,))
    axis = (Axis("i", 4),)
    operand = Operand("a", "float32", (Dim(4, 1, (1,)),))
    again = Nest(axis, Operand("out", "float32", operand.dims), (operand,), accumulate=True)
    return fuse(Plan((first.nests[0], again), first.inputs, first.output), "relu")
