"""What the order of loops means: golden forms and Programs for the examples of the design."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import EXAMPLES, nest_of
from harness import interpreted, native, run_poisoned

from looptune.errors import LoweringError
from looptune.host import runs
from looptune.ir import Axis, Dim, Nest, Operand
from looptune.legalize import legalize
from looptune.lower import form_of, lower
from looptune.lower.form import inner_ranges, vector_leaves
from looptune.program import Fma, FmaLoad, Load, Loop, Step, Store, Switch, While, walk
from looptune.schedule import (
    Schedule,
    pack,
    parallel,
    parse_order,
    reorder,
    split,
    vectorize,
)
from looptune.target import TARGETS
from looptune.workloads import conv2d, einsum

AVX2, AVX512 = TARGETS["avx2"], TARGETS["avx512"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_program(name, golden):
    nest, order = EXAMPLES[name]
    schedule = parse_order(nest, order)
    (program,) = lower(schedule, AVX2)
    golden(f"{schedule}\n\n{program}")


def test_vector_axis_is_the_cheapest_by_default():
    row_major = nest_of("mk,k->m", m=20, k=100)
    assert form_of(Schedule(row_major), AVX2).vector == 1
    assert form_of(Schedule(nest_of("km,k->m", m=200, k=30)), AVX2).vector == 0
    assert form_of(vectorize(Schedule(row_major), "m"), AVX2).vector == 0


def test_scope_is_the_outermost_that_fits():
    form = form_of(parse_order(nest_of("mk,kn->mn", m=64, k=64, n=64), "m:6 n:16 k m n"), AVX2)
    assert (form.scope, form.tile) == (2, (0, 2))
    assert [loop.axis for loop in form.rolled] == [1]


def test_untuned_order_is_strip_mined_by_the_register_budget():
    nest = nest_of("mk,kn->mn", m=64, k=64, n=256)
    loops = form_of(Schedule(nest), AVX2).loops
    assert [(loop.axis, loop.step) for loop in loops] == [(0, 1), (2, 96), (1, 1), (2, 8)]
    assert [loop.axis for loop in form_of(Schedule(nest), AVX512).loops] == [0, 1, 2]


def test_small_kernels_unroll_whole():
    (program,) = lower(Schedule(nest_of("mk,kn->mn", m=4, k=4, n=8)), AVX2)
    assert not any(isinstance(op, Loop | Switch) for op in walk(program.body))
    assert sum(isinstance(op, Fma | FmaLoad) for op in walk(program.body)) == 16


def test_short_accumulator_chains_are_split():
    (program,) = lower(parse_order(nest_of("k,k->", k=4096), "k:64 k"), AVX2)
    loop = next(op for op in walk(program.body) if isinstance(op, Loop))
    targets = {op.dst for op in walk(loop.body) if isinstance(op, Fma | FmaLoad)}
    assert len(targets) == 8


def test_tails_share_one_body_above_the_registers():
    (program,) = lower(
        parse_order(nest_of("mk,kn->mn", m=100, k=64, n=64), "m:36 n:16 m:6 k:4 k m n"), AVX2
    )
    assert sum(isinstance(op, Switch) for op in walk(program.body)) == 1
    switch = next(op for op in walk(program.body) if isinstance(op, Switch))
    assert sorted(case.value for case in switch.cases) == [4, 6]


@pytest.mark.parametrize(
    ("extent", "overlap", "leaves"),
    [
        (16, True, ((0, 8), (8, 8))),
        (19, True, ((0, 8), (8, 8), (11, 8))),
        (19, False, ((0, 8), (8, 8), (16, 3))),
        (5, True, ((0, 5),)),
    ],
)
def test_last_vector(extent, overlap, leaves):
    assert vector_leaves(extent, (8,), 8, overlap) == leaves


def test_vectors_cut_by_a_smaller_step():
    assert vector_leaves(7, (3, 8), 8) == ((0, 3), (3, 3), (6, 1))


def test_range_sets():
    assert inner_ranges((100,), 36) == (36, 28)
    assert inner_ranges((36, 28), 6) == (6, 4)
    assert inner_ranges((4,), 8) == (4,)


def test_overwrite_reads_no_output_and_zero_extents_write_what_is_left():
    nothing = nest_of("mk,kn->mn", m=0, k=4, n=4)
    assert lower(Schedule(nothing), AVX2)[0].body == ()
    empty = nest_of("mk,kn->mn", m=2, k=0, n=8)
    (program,) = lower(Schedule(empty), AVX2)
    assert sum(isinstance(op, Store) for op in walk(program.body)) == 2
    (program,) = lower(Schedule(replace(empty, accumulate=True)), AVX2)
    assert program.body == ()


def test_parallel_programs_wait_for_packs():
    nest = nest_of("mk,kn->mn", m=64, k=8, n=16)
    schedule = parallel(pack(parse_order(nest, "m:4 k m n"), 2), 0)
    packs, main = lower(schedule, AVX2)
    assert (packs.trips, main.trips) == (1, 16)
    assert packs.scratch_bytes == main.scratch_bytes == 8 * 16 * 4


def test_threads_share_large_packs_and_what_surrounds_them_is_filled_before():
    (nest,) = conv2d((1, 40, 40, 64), (64, 1, 3, 3), padding=1, groups=64, layout="NHWC").nests
    schedule = pack(vectorize(Schedule(nest), "g"), 1)
    at = next(i for i, loop in enumerate(schedule.loops) if nest.axes[loop.axis].name == "h")
    around, copied, main = lower(parallel(schedule, at), AVX512)
    assert (around.trips, copied.trips, main.trips) == (1, 40, 40)
    assert not any(isinstance(op, Load) for op in walk(around.body))
    assert any(isinstance(op, Load) for op in walk(copied.body))
    assert len(lower(schedule, AVX512)) == 1


def test_hostile_unrolling_is_refused():
    nest = nest_of("mk,kn->mn", m=4096, k=4096, n=4096)
    schedule = Schedule(nest)
    for axis in range(3):
        at = next(i for i, loop in enumerate(schedule.loops) if loop.axis == axis)
        for factor in (2,) * 11:
            schedule = split(schedule, at, factor)
    lower(schedule, AVX512)
    many = nest_of("bmk,bkn->bmn", **dict.fromkeys("bmkn", 2**17))
    schedule = Schedule(many)
    for axis in range(4):
        at = next(i for i, loop in enumerate(schedule.loops) if loop.axis == axis)
        for _ in range(17):
            schedule = split(schedule, at, 2)
    with pytest.raises(LoweringError, match=r"68 loops; at most 64"):
        lower(schedule, AVX2)


def test_displacements_over_the_target_become_pointer_steps():
    near = nest_of("mk,kn->mn", m=4, k=4, n=8)
    rows = Operand("a", "float32", (Dim(4, 2**30, (1, 0, 0)), Dim(4, 1, (0, 1, 0))))
    columns = Operand("a", "float32", (Dim(4, 1, (1, 0, 0)), Dim(4, 2**30, (0, 1, 0))))
    for a in (rows, columns):
        (program,) = lower(Schedule(replace(near, inputs=(a, near.inputs[1]))), AVX2)
        assert 2**32 in [op.bytes for op in walk(program.body) if isinstance(op, Step)]


def test_a_vector_over_the_displacements_is_refused():
    far = Operand("a", "float32", (Dim(8, 2**28, (1,)),))
    nest = Nest((Axis("i", 8),), Operand("out", "float32", (Dim(8, 1, (1,)),)), (far,))
    with pytest.raises(LoweringError, match=r"pointer to a; avx2 addresses 2147483647"):
        lower(vectorize(Schedule(nest), "i"), AVX2)


def test_scratch_over_the_limit_is_refused():
    nest = nest_of("mk,kn->mn", m=2, k=2**20, n=2**13)
    with pytest.raises(LoweringError, match=r"bytes of scratch; the limit is"):
        lower(pack(Schedule(nest), 2), AVX2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("spec", ["ij->ij", "ij->i", "ij->", "ik,kj->ij"])
def test_vectors_of_one_lane_where_no_axis_is_near(spec, target, monkeypatch):
    monkeypatch.setattr("looptune.lower.form.within_reach", lambda *_: False)
    sizes = {"i": 3, "j": 21, "k": 5}
    nest = nest_of(spec, **{label: sizes[label] for label in set(spec) & set(sizes)})
    programs = tuple(legalize(program) for program in lower(Schedule(nest), target))
    rng = np.random.default_rng(0)
    for make in (interpreted, native) if runs(target) else (interpreted,):
        run_poisoned(nest, make(programs), rng, exact=True)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("order", ["k:30 m:2 n:16 k m n", "k:42 m:2 n:16 k:7 k m n",
                                   "k:84 k:42 m:2 n:16 k:7 k m n"])  # fmt: skip
def test_rolled_reductions_of_two_lengths(order, target):
    """The pieces of k are of two lengths: a loop on a register, then a switch over the rests."""
    nest = nest_of("mk,kn->mn", m=11, k=103, n=48)
    programs = tuple(legalize(p) for p in lower(parse_order(nest, order, vector="n"), target))
    assert any(isinstance(op, While) for op in walk(programs[-1].body))
    rng = np.random.default_rng(0)
    for make in (interpreted, native) if runs(target) else (interpreted,):
        run_poisoned(nest, make(programs), rng, exact=True)


PACKED = {
    "panel": ("n:16 m:6 k:5 k m n", [(2, None, 0)]),
    "transposed panel": ("n:16 m:6 k:5 k m n", [(2, (1, 0), 0)]),
    "two packs": ("n:16 m:6 k:5 k m n", [(1, (1, 0), 1), (2, None, 0)]),
    "pack of a pack": ("n:32 n:16 m:6 k m n", [(2, None, 0), (2, (1, 0), 1)]),
    "write cache": ("n:16 m:6 k:5 k m n", [(0, None, 1)]),
    "write cache of a part of a sum": ("k:7 n:16 m:6 k m n", [(2, None, 0), (0, (1, 0), 2)]),
    "cache of everything": ("n:16 m:6 k:5 k m n", [(0, (1, 0), "root")]),
    "cache of a cache": ("n:32 n:16 m:6 k m n", [(0, None, 0), (0, None, 2)]),
    "as deep as a reduction": ("m n:16 k n", [(1, None, 2), (2, None, 3)]),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packs_inside_loops(name, accumulate, target):
    order, packs = PACKED[name]
    nest = replace(nest_of("mk,kn->mn", m=13, k=17, n=41), accumulate=accumulate)
    schedule = parse_order(nest, order, vector="n")
    for operand, dims, at in packs:
        schedule = pack(schedule, operand, dims, at)
    run_everywhere(nest, schedule, target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_channels_in_the_lanes(layout, target):
    """Weights packed, image in a padded copy, the output transposed on its way out."""
    x = (1, 3, 7, 9) if layout == "NCHW" else (1, 7, 9, 3)
    options = {"padding": 1, "stride": 2, "layout": layout}
    nest = conv2d(x, (19, 3, 3, 3), **options).nests[0]
    schedule = parse_order(nest, "n o:16 h w:3 c r s w o", vector="o")
    schedule = pack(schedule, 2, (1, 2, 3, 0), at=1)
    order = (0, 2, 3, 1) if layout == "NCHW" else (0, 1, 2, 3)
    run_everywhere(nest, pack(schedule, 0, order, at=3), target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_padding_in_a_loop(layout, target):
    """One plane of a depthwise convolution at a time, as wide as its padding."""
    x = (2, 5, 6, 7) if layout == "NCHW" else (2, 6, 7, 5)
    options = {"padding": ((1, 2), (0, 1)), "groups": 5, "layout": layout}
    nest = conv2d(x, (5, 1, 3, 3), **options).nests[0]
    schedule = pack(parse_order(nest, "n g o h w c r s", vector="w"), 1, (1, 0, 3, 2), at=1)
    assert [each.at for each in schedule.packs] == [1]
    run_everywhere(nest, schedule, target)
    moved = reorder(schedule, [3, 0, 1, 2, 4, 5, 6, 7])
    assert [each.at for each in moved.packs] == [1, "root"]
    run_everywhere(nest, moved, target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_transposed_copies(dtype, target):
    lanes = target.lanes(dtype)
    for rows, columns in ((lanes, lanes), (lanes + 1, 2 * lanes - 1), (3 * lanes, lanes + 3)):
        nest = einsum("ij->ji", (rows, columns), dtype=dtype).nests[0]
        order = f"j:{lanes} i:{lanes} i j" if columns > lanes and rows > lanes else "i j"
        schedule = parse_order(nest, order, vector="j")
        assert form_of(schedule, target).transposed == 1
        run_everywhere(nest, schedule, target)


def run_everywhere(nest, schedule, target):
    """Machine code and interpreter, before and after legalization, on exact numbers."""
    raw = lower(schedule, target)
    programs = tuple(legalize(program) for program in raw)
    rng = np.random.default_rng(0)
    makes = [interpreted(raw), interpreted(programs)]
    for call in [*makes, native(programs)] if runs(target) else makes:
        run_poisoned(nest, call, rng, exact=True)


def test_too_many_packs_are_refused():
    schedule = parse_order(nest_of("mk,kn->mn", m=64, k=64, n=64), "n:32 n:16 n:8 n:4 n:2 m k n")
    for at in range(5):
        schedule = pack(schedule, 2, at=at)
    with pytest.raises(LoweringError, match="5 packs inside loops; at most 4"):
        lower(schedule, AVX2)


def test_write_caches_with_holes_are_refused():
    out = Operand("out", "float32", (Dim(40, 1, (1, 5)),))
    a = Operand("a", "float32", (Dim(4, 1, (1, 0)), Dim(7, 1, (0, 1))))
    nest = Nest((Axis("i", 4), Axis("j", 7)), out, (a,))
    with pytest.raises(LoweringError, match="a write cache of out covers has holes"):
        lower(pack(split(Schedule(nest), 1, 3), 0, at=0), AVX2)
