"""The default schedule: legal, deterministic, and what one would pick by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from builders import conv, nest_of
from random_nests import random_nest

from looptune.default import cheapest, default_schedule, priced_options, tiles
from looptune.ir import Axis, Dim, Nest, Operand
from looptune.lower import form_of, lower
from looptune.lower.form import tile_size
from looptune.prices import cycles
from looptune.program import Fma, FmaLoad, FmaSplat, walk
from looptune.schedule import Schedule, replay
from looptune.target import TARGETS
from looptune.workloads import conv2d, einsum, matmul

NESTS = {
    "matmul": nest_of("mk,kn->mn", m=112, k=208, n=256),
    "transposed_b": nest_of("mk,nk->mn", m=128, k=128, n=128),
    "batch": nest_of("bmk,bkn->bmn", b=12, m=128, k=64, n=128),
    "batch_innermost": nest_of("mkb,knb->mnb", m=8, n=8, k=8, b=256),
    "gemv": nest_of("mk,k->m", m=1000, k=333),
    "gemv_column_major": nest_of("km,k->m", m=1000, k=333),
    "dot": nest_of("k,k->", k=4096),
    "outer": nest_of("m,n->mn", m=256, n=256),
    "conv": conv(64, 56, 64),
    "small_image": conv(512, 7, 512),
    "one_point": nest_of("mk,kn->mn", m=1, k=1, n=1),
    "empty": nest_of("mk,kn->mn", m=0, k=3, n=4),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", NESTS)
def test_defaults_lower_within_the_limits(name, target):
    schedule = default_schedule(NESTS[name], target)
    size = sum(1 for program in lower(schedule, target) for _ in walk(program.body))
    assert size <= target.code_instructions
    assert replay(NESTS[name], schedule.actions).identity == schedule.identity


@pytest.mark.parametrize(
    ("name", "vector", "least_accumulators"),
    [
        ("matmul", "n", 12),
        ("batch", "n", 12),
        ("gemv", "k", 8),
        ("gemv_column_major", "m", 2),  # a sweep, whose rows advance side by side
        ("conv", "o", 12),
        ("batch_innermost", "b", 8),
    ],
)
def test_defaults_fill_the_registers(name, vector, least_accumulators):
    nest, target = NESTS[name], TARGETS["avx2"]
    form = form_of(default_schedule(nest, target), target)
    ranges = form.tile_ranges()
    tile = tile_size(form, {axis: max(ranges[axis]) for axis in form.tile})
    assert form.vector is not None
    assert nest.axes[form.vector].name == vector
    assert tile >= least_accumulators


def test_strided_weights_are_packed_once_they_pay():
    nest = nest_of("mk,nk->mn", m=128, k=128, n=128)
    (found,) = default_schedule(nest, TARGETS["avx2"]).packs
    assert (found.operand, found.order) == (2, (1, 0))
    few_rows = nest_of("mk,nk->mn", m=2, k=128, n=128)
    assert default_schedule(few_rows, TARGETS["avx2"]).packs == ()


def test_threads_share_the_outermost_spatial_loop():
    schedule = default_schedule(NESTS["matmul"], TARGETS["avx2"], threads=2)
    assert schedule.parallel == 0
    assert default_schedule(NESTS["dot"], TARGETS["avx2"], threads=2).parallel is None
    assert default_schedule(NESTS["matmul"], TARGETS["avx2"], threads=1).parallel is None


def test_the_choice_repeats():
    first, second = (default_schedule(NESTS["conv"], TARGETS["avx512"]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("stride", [2**25, 2**29, 2**33])
@pytest.mark.parametrize("spec", ["mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn"])
def test_rows_far_apart_are_lowered(spec, stride, target):
    """No vector and no tile of the default reaches over more than an address can."""
    shapes = [tuple({"m": 33, "n": 34, "k": 35}[label] for label in labels)
              for labels in spec.split("->")[0].split(",")]  # fmt: skip
    far = [(stride, 1), (stride, 1)]
    for out in (None, (stride, 1)):
        (nest,) = einsum(spec, *shapes, strides=far, out_strides=out).nests
        lower(default_schedule(nest, target), target)


def test_nothing_to_spread_over_lanes():
    (nest,) = einsum("ij->ij", (4, 4), strides=[(2**33, 2**35)], out_strides=(2**33, 2**35)).nests
    for target in TARGETS.values():
        lower(Schedule(nest), target)
        lower(default_schedule(nest, target), target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_outputs_that_no_write_cache_can_hold(target):
    """Vectors along a diagonal of the output are scattered, and between its elements are others."""
    axes = (Axis("i", 31), Axis("k", 12, True), Axis("j", 2))
    dims = (Dim(31, 62, (1, 0, 0)), Dim(31, 2, (1, 0, 0)), Dim(2, 1, (0, 0, 1)))
    a = Operand("a", "float32", (Dim(12, 31, (0, 1, 0)), Dim(31, 1, (1, 0, 0))))
    b = Operand("b", "float32", (Dim(12, 2, (0, 1, 0)), Dim(2, 1, (0, 0, 1))))
    nest = Nest(axes, Operand("out", "float32", dims), (a, b))
    schedule = default_schedule(nest, target)
    assert schedule.vector == 0
    lower(schedule, target)


def test_random_nests_have_a_default():
    for seed in range(500, 700):
        nest = random_nest(np.random.default_rng(seed))
        for target in TARGETS.values():
            lower(default_schedule(nest, target), target)


def test_little_work_is_not_shared():
    small = nest_of("mk,kn->mn", m=16, k=16, n=64)
    assert default_schedule(small, TARGETS["avx2"], threads=2).parallel is None


@pytest.mark.parametrize(
    ("spec", "extents", "threads", "shared"),
    [
        ("k,kn->n", {"k": 8192, "n": 23}, 2, False),  # too little of it
        ("k,kn->n", {"k": 100_000, "n": 23}, 2, False),  # both would write to one line
        ("mk,k->m", {"m": 20, "k": 50_000}, 2, False),
        ("mk,kn->mn", {"m": 6, "k": 20_000, "n": 32}, 2, False),
        ("mk,kn->mn", {"m": 64, "k": 20_000, "n": 64}, 2, True),
        ("k,kn->n", {"k": 768, "n": 2304}, 2, True),
        ("k,kn->n", {"k": 768, "n": 2304}, 8, True),
        ("hwk,ko->hwo", {"h": 64, "w": 64, "k": 64, "o": 3}, 2, True),
    ],
)
def test_threads_do_not_share_what_they_would_contend_for(spec, extents, threads, shared):
    schedule = default_schedule(nest_of(spec, **extents), TARGETS["avx512"], threads)
    assert (schedule.parallel is not None) == shared
    if schedule.parallel is not None:
        assert schedule.nest.axes[schedule.loops[schedule.parallel].axis].name != "o"  # 12 bytes


@pytest.mark.parametrize("k", [1000, 1024, 2048])
def test_rows_that_share_a_cache_set_are_no_more_than_it_has_ways(k: int) -> None:
    """Rows of 4,096 bytes begin in one set: a ninth displaces the first before the next step."""
    (nest,) = matmul(128, 128, k).nests
    option = cheapest(nest, TARGETS["avx512"])
    assert option is not None
    rows = dict(option.tile)[0]
    assert rows <= 8 if k % 1024 == 0 else rows > 8


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("mk,kn->mn", {"m": 1, "k": 2909, "n": 48}),
        ("bkm,bk->bm", {"b": 1, "k": 2999, "m": 46}),
        ("kjm,j->km", {"k": 77, "j": 134, "m": 61}),
        ("km,k->m", {"k": 999, "m": 100}),
        ("mk,kn->mn", {"m": 100, "k": 200, "n": 300}),
    ],
)
def test_threads_never_share_partial_sums_of_a_narrow_output(spec, sizes, dtype, target):
    (nest,) = einsum(spec, sizes=sizes, dtype=dtype).nests
    for threads in (2, 3, 7):
        assert lower(default_schedule(nest, target, threads), target)


def test_threads_share_a_narrow_output_that_is_visited_once():
    (nest,) = einsum("mk,kn->mn", sizes={"m": 100, "k": 200, "n": 300}, dtype="bfloat16").nests
    assert default_schedule(nest, TARGETS["avx2"], 2).parallel == 0


def depthwise(channels: int, size: int, kernel: int = 3, stride: int = 1) -> Nest:
    """The nest of a depthwise convolution of square images, padded to keep their size."""
    shapes = (1, channels, size, size), (channels, 1, kernel, kernel)
    plan = conv2d(*shapes, stride=stride, padding=kernel // 2, groups=channels)
    (nest,) = plan.nests
    return nest


@pytest.mark.parametrize("size", [28, 56, 112])
def test_a_window_is_loaded_once_for_all_its_rows(size: int) -> None:
    """Of rows of the tile and taps of the kernel, each vector of the image is read once a shift."""
    nest = depthwise(64, size)
    target = TARGETS["avx512"]
    schedule = default_schedule(nest, target)
    form = form_of(schedule, target)
    (h,) = (a for a, axis in enumerate(nest.axes) if axis.name == "h")
    rows = form.tile_ranges()[h][0]
    (program,) = lower(schedule, target)
    products = [op for op in walk(program.body) if isinstance(op, Fma | FmaLoad | FmaSplat)]
    loads = [op for op in walk(program.body) if isinstance(op, FmaLoad)]
    assert rows > 3
    assert len(loads) < len(products) / 3, "most products read registers"


@pytest.mark.parametrize(("channels", "size", "kernel"), [(960, 7, 3), (384, 14, 7), (64, 9, 3)])
def test_small_images_take_channels_for_lanes(channels: int, size: int, kernel: int) -> None:
    nest = depthwise(channels, size, kernel)
    best = cheapest(nest, TARGETS["avx512"])
    assert best is not None
    assert nest.axes[best.vector].name == "g"
    assert best.panels == (1, 2)
    assert best.cached
    schedule = default_schedule(nest, TARGETS["avx512"])
    packed = {pack.operand: pack.at for pack in schedule.packs}
    outer = {nest.axes[loop.axis].name for loop in schedule.loops[: int(packed[1]) + 1]}
    assert not outer & {"h", "w"}, "one panel of the image is copied for all its positions"


def test_prices_that_differ_by_rounding_alone_are_equal() -> None:
    """So the first of equal tiles is taken, in whatever order their cycles were summed."""
    (nest,) = matmul(64, 64, 64).nests
    target = TARGETS["avx512"]
    found = {
        cycles(nest, prices, option.vector, dict(tile))
        for _, prices, option in priced_options(nest, target)
        for tile in tiles(nest, target, option)
    }
    assert len(found) > 10
    assert all(after - before > 1e-4 for before, after in pairwise(sorted(found)))
