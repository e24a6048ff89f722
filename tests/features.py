"""What a property case exercises, as tags to count: the rows of the coverage table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from random_nests import Case

from looptune.ir import Nest, Operand
from looptune.lower import form_of
from looptune.schedule import Schedule
from looptune.target import Target


def features(case: Case, target: Target) -> Iterator[str]:
    """What a case exercises, one tag a feature."""
    nest, schedule = case.nest, case.schedule
    yield from nest_features(nest)
    for number, op in enumerate(nest.operands):
        yield from operand_features(nest, op, "output" if number == 0 else "input")
    yield from schedule_features(schedule)
    yield "schedule " + ("default" if case.default else "random")
    if case.nan:
        yield "numbers with a NaN"
    yield "numbers " + ("exact integers" if case.exact else "normal")
    if nest.points:
        yield from form_features(schedule, target)


def nest_features(nest: Nest) -> Iterator[str]:
    """Axes, dtype, combination."""
    extents = {axis.extent for axis in nest.axes}
    yield from (f"extent {n}" for n in extents & {0, 1})
    if extents & {2, 3, 5, 7, 13, 17, 31, 67}:
        yield "extent prime"
    yield f"spatial axes {len(nest.spatial)}"
    yield f"reduction axes {len(nest.reductions)}"
    yield f"dtype {nest.dtype}"
    yield f"inputs {len(nest.inputs)}"
    yield f"reduction {nest.reduction}" if nest.reductions else "no reduction"
    yield "accumulate" if nest.accumulate else "overwrite"


def operand_features(nest: Nest, op: Operand, role: str) -> Iterator[str]:
    """Layout and access of one operand."""
    strides = [d.stride for d in op.dims if d.size > 1]
    dense = 1
    for dim in reversed(op.dims):
        if dim.size > 1 and dim.stride != dense:
            yield f"{role} not row-major"
            break
        dense *= dim.size
    rows = [dim.coefficients for dim in op.dims]
    uses = [sum(map(bool, column)) for column in zip(*rows, strict=True)]
    found = {
        "stride zero": 0 in strides,
        "stride negative": any(stride < 0 for stride in strides),
        "diagonal": any(count > 1 for count in uses),
        "several axes in a dimension": any(np.count_nonzero(row) > 1 for row in rows),
        "coefficient over 1": any(abs(c) > 1 for row in rows for c in row),
        "coefficient negative": any(c < 0 for row in rows for c in row),
        "padding": role == "input" and op.needs_fill(nest.axes),
    }
    yield from (f"{role} {name}" for name, present in found.items() if present)


def schedule_features(schedule: Schedule) -> Iterator[str]:
    """Loops, tails, packs, threads."""
    nest, loops = schedule.nest, schedule.loops
    kinds = [nest.axes[loop.axis].reduction for loop in loops]
    if any(schedule.range_below(at) % loop.step for at, loop in enumerate(loops)):
        yield "order with tail"
    if any(a and not b for a, b in pairwise(kinds)):
        yield "order reduction outside spatial"
    if any(a.axis == b.axis for a in loops for b in loops if a is not b):
        yield "order with split"
    if kinds and kinds[-1]:
        yield "order reduction innermost"
    if schedule.parallel is not None:
        yield "parallel"
    if schedule.vector is not None:
        yield "vector axis chosen"
    yield f"packs {len(schedule.packs)}"
    for pack in schedule.packs:
        where = "root" if pack.at == "root" else "loop"
        yield f"pack at {where}" if pack.operand else "write cache"
    yield f"loops {len(schedule.canonical)}"


def form_features(schedule: Schedule, target: Target) -> Iterator[str]:
    """Which rules of the lowering applied."""
    form = form_of(schedule, target)
    reduces = {i for i, loop in enumerate(form.loops) if form.nest.axes[loop.axis].reduction}
    if form.vector is None:
        yield "vector none"
    else:
        yield "vector " + ("reduction" if form.reduces_lanes else "spatial")
        stride = form.nest.output.stride_of(form.vector)
        if stride not in (0, 1):
            yield "vector output scattered"
    scope = "all" if form.scope == 0 else "none" if form.scope == len(form.loops) else "some"
    yield f"scope {scope}"
    if any(i < form.scope for i in reduces):
        yield "rule revisit"
    if form.rolled:
        yield "rule rolled reduction"
    if form.unrolled:
        yield "rule unrolled reduction"
    if len(form.loops) > len(schedule.canonical):
        yield "rule strip-mined"
    if any(len(values) > 1 for values in form.tile_ranges().values()):
        yield "rule range sets"
