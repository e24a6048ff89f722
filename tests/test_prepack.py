"""Snapshots of constant operands: what they hold, which kernel takes them, and who is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from harness import Call, compiled, interpreted, native, needs_host, programs_of, run_poisoned
from random_nests import random_case, random_chunks

import looptune
from looptune.default import default_schedule
from looptune.dtypes import ITEM_BYTES, numpy_dtype, poison
from looptune.errors import (
    ArgumentError,
    ArgumentTypeError,
    LoweringError,
    UnsupportedError,
)
from looptune.host import runs
from looptune.ir import Nest
from looptune.legalize import legalize
from looptune.lower import form_of, lower, lower_snapshot
from looptune.measure import random_arrays
from looptune.runtime.kernel import Snapshot
from looptune.schedule import Schedule, pack, parse_order
from looptune.target import TARGETS, Target
from looptune.workloads import batched_matmul, conv2d, einsum, fuse, matmul

Run = Callable[..., Call]


def with_snapshot(schedule: Schedule, target: Target, operand: int, run: Run, seed: int) -> Call:
    """A call that packs an operand, poisons the scratch it used, and goes on without it."""
    packing, size = lower_snapshot(schedule, target, operand)
    programs = tuple(legalize(p) for p in lower(schedule, target, operand))
    dtype = schedule.nest.dtype
    if schedule.nest.points:
        dtype = form_of(schedule, target).operands[operand].dtype

    def call(arrays: list[np.ndarray]) -> None:
        snapshot = np.full(size // ITEM_BYTES[dtype], poison(dtype), numpy_dtype(dtype))
        run([legalize(packing)])([snapshot, arrays[operand]])
        given = list(arrays)
        given[operand] = snapshot
        run(programs, lambda trips: random_chunks(seed, trips))(given)

    return call


def test_random_schedules_take_snapshots() -> None:
    made = 0
    for seed in range(250):
        for target in TARGETS.values():
            case = random_case(seed, target)
            operands = [p.operand for p in case.schedule.packs if p.operand]
            for operand in {o for o in operands if operands.count(o) == 1}:
                if len({op.name for op in case.nest.operands}) < len(case.nest.operands):
                    continue
                try:
                    lower(case.schedule, target)
                except LoweringError:
                    continue
                for run in (interpreted, native) if runs(target) and seed % 5 else (interpreted,):
                    if run is interpreted and seed % 5:
                        continue
                    call = with_snapshot(case.schedule, target, operand, run, seed)
                    run_poisoned(case.nest, call, np.random.default_rng(seed), case.exact)
                    made += 1
    assert made > 100


BOXES = {
    "one box": ("m:4 n:16 k m n", 2, (1, 0), "root"),
    "a box a panel": ("n:16 m:4 k m n", 2, (0, 1), 0),
    "panels of panels": ("n:32 k:8 n:16 m:4 k m n", 2, (1, 0), 2),
    "the other operand": ("m:8 k:4 m:4 n:16 k m n", 1, (1, 0), 2),
    "around all loops that walk it": ("m:3 n:16 k:3 m n k", 2, (0, 1), 2),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("order", "operand", "dims", "at"), BOXES.values(), ids=BOXES)
def test_boxes_follow_the_loops_around_them(
    order: str, operand: int, dims: tuple[int, ...], at: int | str, dtype: str, target: Target
) -> None:
    (nest,) = matmul(13, 37, 11, dtype=dtype).nests
    schedule = pack(parse_order(nest, order, "n"), operand, dims, at)
    for run in (interpreted, native) if runs(target) else (interpreted,):
        call = with_snapshot(schedule, target, operand, run, 0)
        run_poisoned(nest, call, np.random.default_rng(0), exact=True)


def test_no_copy_is_left_in_the_kernel() -> None:
    (nest,) = matmul(64, 64, 64).nests
    target = TARGETS["avx2"]
    schedule = default_schedule(nest, target, constant=2)
    assert [p.operand for p in schedule.packs].count(2) == 1
    plain, constant = (programs_of(schedule, target), lower(schedule, target, 2))
    assert len(str(constant[0])) < len(str(plain[0]))


PROBLEMS = {
    "matmul": matmul(50, 70, 90),
    "transposed": matmul(50, 70, 90, trans_b=True),
    "accumulated": matmul(50, 70, 90, accumulate=True),
    "batched": batched_matmul(3, 20, 30, 40),
    "convolution": conv2d((1, 16, 14, 14), (24, 16, 3, 3), padding=1),
    "channels last": conv2d((1, 14, 14, 16), (24, 16, 3, 3), padding=1, layout="NHWC", stride=2),
    "depthwise": conv2d((1, 16, 14, 14), (16, 1, 3, 3), padding=1, groups=16),
    "fused": fuse(conv2d((1, 16, 14, 14), (24, 16, 1, 1)), "bias,relu"),
    "narrow": matmul(50, 70, 90, dtype="float16"),
    "whole": matmul(50, 70, 90, dtype="int8"),
    "three operands": einsum("ij,jk,kl->il", (20, 30), (30, 40), (40, 50)),
    "empty": matmul(5, 0, 7),
}


@needs_host
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("plan", PROBLEMS.values(), ids=PROBLEMS)
def test_kernels_take_their_snapshots(plan: looptune.Plan, threads: int) -> None:
    kernel = looptune.optimize(plan, threads=threads)
    arrays = random_arrays(plan)
    inputs = [arrays[tensor.name] for tensor in plan.inputs]
    old = arrays[plan.output.name]
    expected = old.copy()
    kernel(*inputs, out=expected)
    for operand in (0, 1):
        source = inputs[operand].copy()
        snapshot = kernel.prepack(source, operand)
        source[...] = 0  # what is taken is taken
        given = [snapshot if i == operand else array for i, array in enumerate(inputs)]
        out = old.copy()
        kernel(*given, out=out)
        scale = np.abs(expected.astype(np.float64)).max(initial=1)
        error = np.abs(out.astype(np.float64) - expected.astype(np.float64)).max(initial=0)
        assert error <= 2e-3 * scale if plan.dtype == "float16" else error <= 1e-5 * scale


@needs_host
def test_snapshots_belong_to_one_kernel() -> None:
    kernel = looptune.optimize("mk,kn->mn", m=8, k=9, n=10)
    a, b = np.ones((8, 9), np.float32), np.ones((9, 10), np.float32)
    snapshot = kernel.prepack(b)
    assert isinstance(snapshot, Snapshot)
    assert not snapshot.array.flags.writeable
    np.testing.assert_array_equal(np.asarray(kernel(a, snapshot)), a @ b)
    again = pickle.loads(pickle.dumps(kernel))
    np.testing.assert_array_equal(np.asarray(again(a, snapshot)), a @ b)
    other = looptune.optimize("mk,kn->mn", m=9, k=9, n=10)
    with pytest.raises(ArgumentTypeError, match="snapshot of another kernel"):
        other(np.ones((9, 9), np.float32), snapshot)
    square = looptune.optimize("mk,kn->mn", m=9, k=9, n=9)
    with pytest.raises(ArgumentTypeError, match="or of its input 1"):
        square(square.prepack(np.ones((9, 9), np.float32)), b[:, :9])
    with pytest.raises(ArgumentTypeError, match="two snapshots in one call"):
        kernel(kernel.prepack(a, 0), snapshot)


@needs_host
def test_calls_with_snapshots_are_checked() -> None:
    kernel = looptune.optimize("mk,kn->mn", m=8, k=9, n=10)
    a, b = np.ones((8, 9), np.float32), np.ones((9, 10), np.float32)
    snapshot = kernel.prepack(b)
    with pytest.raises(ArgumentError, match=r"input 0 \(a\) has shape \(9, 8\)"):
        kernel(a.T, snapshot)
    with pytest.raises(ArgumentTypeError, match="out is dtype"):
        kernel(a, snapshot, out=np.empty((8, 10), np.float64))
    with pytest.raises(ArgumentError, match=r"input 1 \(b\) has shape"):
        kernel.prepack(b[:5])
    with pytest.raises(ArgumentError, match=r"operand=2; 0\.\.1 would do"):
        kernel.prepack(b, 2)
    torch = pytest.importorskip("torch")
    assert isinstance(kernel(torch.ones(8, 9), snapshot), torch.Tensor)


@needs_host
def test_only_factors_are_packed() -> None:
    kernel = looptune.optimize("mk,kn->mn", m=8, k=9, n=10, epilogue="bias")
    with pytest.raises(UnsupportedError, match="bias is read 1 times by the plan, or by an epi"):
        kernel.prepack(np.ones(10, np.float32), 2)


@needs_host
def test_a_schedule_of_ones_own_is_kept() -> None:
    (nest,) = matmul(13, 37, 11).nests
    schedule = parse_order(nest, "m:4 n:16 k m n", "n")
    kernel = looptune.compile(nest, schedule)
    snapshot = kernel.prepack(np.ones((11, 37), np.float32))
    variant = kernel.variants[1]
    assert variant.schedules[0] == pack(schedule, 2)  # type: ignore[attr-defined]
    found = kernel(np.ones((13, 11), np.float32), snapshot)
    assert (np.asarray(found) == 11).all()


def test_an_operand_with_two_packs_has_no_snapshot() -> None:
    nest: Nest = matmul(13, 37, 11).nests[0]
    schedule = pack(pack(parse_order(nest, "n:16 m k n"), 2), 2, None, 0)
    for made, count in ((schedule, 2), (Schedule(nest), 0)):
        with pytest.raises(LoweringError, match=f"operand 2 has {count} packs"):
            lower_snapshot(made, TARGETS["avx2"], 2)


@needs_host
def test_a_compiled_nest_agrees_with_its_snapshot() -> None:
    (nest,) = conv2d((1, 8, 9, 9), (16, 8, 3, 3), padding=1).nests
    target = TARGETS["avx2"]
    schedule = default_schedule(nest, target, constant=2)
    rng = np.random.default_rng(0)
    plain = run_poisoned(nest, compiled(schedule, target), rng, exact=True)
    call = with_snapshot(schedule, target, 2, native, 0)
    again = run_poisoned(nest, call, np.random.default_rng(0), exact=True)
    np.testing.assert_array_equal(plain, again)
