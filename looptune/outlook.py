"""What is known of a schedule without running it, as numbers: its predicted cost and its form.

A policy's value learns from these what measurements make of them; relative to the default's cost,
so that they mean the same for all nests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from looptune.cost import (
    LINE_BYTES,
    Cost,
    cost_of,
    pieces_at_scope,
    straddles,
    unrolled_terms,
)
from looptune.default import default_schedule
from looptune.errors import LoweringError
from looptune.ir import Nest, Operand
from looptune.lower.form import Form, form_of
from looptune.prices import sets_apart
from looptune.schedule import Schedule
from looptune.target import Target

LEAST = 1e-3  # of the base, added to a part of a cost so that none is zero
COSTS = ("all", "compute", "traffic", "copies", "overhead")
FORM = (
    "accumulators", "axes in the tile", "log tiles", "lengths of tiles", "log visits",
    "lanes are summed", "output still", "first still", "second still", "output of unit stride",
    "first of unit stride", "second of unit stride", "lanes in the tail", "log vectors",
    "terms of a body", "rolled", "unrolled", "loops outside", "write cache", "write cache at root",
    "packs at root", "packs inside", "least extent of the tile", "vectors straddle lines",
    "crowding of the output's tile", "of the first's", "of the second's",
    "crowding of the first's terms", "of the second's",
)  # fmt: skip
FEATURES = 1 + 2 * len(COSTS) + 2 * len(FORM)  # "can be lowered", then this one and the default


def outlook(schedule: Schedule, target: Target, threads: int = 1) -> np.ndarray:
    """float32 (FEATURES,): zeros for a schedule that cannot be lowered."""
    found = np.zeros(FEATURES, np.float32)
    base, default = reference(schedule.nest, target, threads)
    try:
        form = form_of(schedule, target)
    except LoweringError:
        return found
    costs = relative(cost_of(form, threads), base)
    found[:] = (1.0, *costs, *relative(base, base), *described(form, schedule), *default)
    return np.clip(found, -6.0, 6.0, out=found)


def worth(found: np.ndarray) -> float | None:
    """The cost model's log(default's time / schedule's time) in an outlook; None for zeros."""
    return -math.log(max(LEAST, math.exp(found[1]) - LEAST)) if found[0] else None


@lru_cache(maxsize=1024)
def reference(nest: Nest, target: Target, threads: int) -> tuple[Cost, tuple[float, ...]]:
    """The default schedule's cost and form."""
    schedule = default_schedule(nest, target, threads)
    form = form_of(schedule, target)
    return cost_of(form, threads), described(form, schedule)


def relative(cost: Cost, base: Cost) -> tuple[float, ...]:
    """A cost's parts as logarithms, relative to all of the base."""
    parts = (cost.cycles, cost.compute, cost.traffic, cost.copies, cost.overhead)
    return tuple(math.log(part / base.cycles + LEAST) for part in parts)


def described(form: Form, schedule: Schedule) -> tuple[float, ...]:
    """The features named `FORM`."""
    nest, target, vector = form.nest, form.target, form.vector
    pieces = pieces_at_scope(form)
    sizes = {axis: max(pieces[axis]) for axis in form.tile}
    counts = (len(form.leaves(n)) if a == vector else n for a, n in sizes.items())
    tiles = math.prod(sum(pieces[axis].values()) for axis in nest.spatial)
    visits = math.prod(sum(pieces[axis].values()) for axis in nest.reductions)
    operands = (*form.operands, None, None)[:3]
    strides = [0 if op is None or vector is None else op.stride_of(vector) for op in operands]
    extent = 1 if vector is None else nest.axes[vector].extent
    output = [pack for pack in schedule.packs if pack.operand == 0]
    inputs = [pack.at == "root" for pack in schedule.packs if pack.operand]
    tile = {axis: size for axis, size in sizes.items() if axis != vector}
    ranges = form.tile_ranges()
    terms = tile | {loop.axis: ranges[loop.axis][0] for loop in (*form.rolled, *form.unrolled)}
    return (
        math.prod(counts) / target.accumulators, float(len(form.tile)), math.log(tiles) / 4,
        float(math.prod(len(pieces[axis]) for axis in nest.spatial)), math.log(visits) / 4,
        float(form.reduces_lanes), *(float(stride == 0) for stride in strides),
        *(float(stride == 1) for stride in strides), extent % form.lanes / form.lanes,
        math.log(extent / form.lanes + 0.1), math.prod(unrolled_terms(form)) / 8,
        float(len(form.rolled)), float(len(form.unrolled)), form.scope / 4, float(bool(output)),
        float(any(pack.at == "root" for pack in output)), float(sum(inputs)),
        float(len(inputs) - sum(inputs)), min(sizes.values(), default=1) / 8,
        float(any(straddles(form, operand) for operand in form.operands[1:])),
        *(crowding(operand, tile) for operand in operands),
        *(crowding(operand, terms) for operand in operands[1:]),
    )  # fmt: skip


def crowding(operand: Operand | None, sizes: Mapping[int, int]) -> float:
    """The logarithm of how many lines of an operand compete for one set of a cache, among those
    that axes of these lengths reach; 0 where all have places of their own."""
    if operand is None:
        return 0.0
    lines, places = 1, 1
    for axis, size in sizes.items():
        apart = abs(operand.stride_of(axis)) * operand.item_bytes
        if apart < LINE_BYTES:
            reached = -(-size * apart // LINE_BYTES) or 1
            lines, places = lines * reached, places * reached
        else:
            lines *= size
            places *= min(size, sets_apart(apart))
    return math.log2(lines / min(places, sets_apart(LINE_BYTES))) / 4
