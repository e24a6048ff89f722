"""The default schedule: a register tile chosen by counting, with no search and no measurement.

Every candidate tile is priced by the cycles its straight-line body needs on the target's FMA
and load ports, the latency of its accumulator chains, its stores, and its tails; reading an
input along the lanes with a stride costs a gather, or one pack at the root. The cheapest wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from looptune.ir import Nest, Operand
from looptune.lower.form import register_budget
from looptune.schedule import PRIMITIVES, Schedule, pack, reorder, split, vectorize
from looptune.target import Target

TILE_OVERHEAD = 15.0  # cycles of loop control, switches and first-load latency a tile
PACK_CYCLES = 2.0  # cycles an element of a reordering copy


@dataclass(frozen=True)
class Candidate:
    """A vector axis, the inputs packed to make it contiguous, and the tile's extents."""

    vector: int
    packed: tuple[int, ...]
    tile: tuple[tuple[int, int], ...]
    cycles: float


def default_schedule(nest: Nest, target: Target, threads: int = 1) -> Schedule:
    """The cheapest candidate as a schedule; the untuned nest where there is nothing to choose."""
    schedule = Schedule(nest)
    if nest.points == 0 or all(axis.extent == 1 for axis in nest.axes):
        return schedule
    best = min(candidates(nest, target), key=lambda c: c.cycles)
    for number in best.packed:
        schedule = pack(schedule, number, packed_order(nest.operands[number], best.vector))
    schedule = vectorize(schedule, best.vector)
    schedule = arrange(schedule, target, dict(best.tile))
    return share(schedule, threads)


def candidates(nest: Nest, target: Target) -> Iterator[Candidate]:
    """Vector axes, packs and tiles worth pricing."""
    for vector, axis in enumerate(nest.axes):
        if axis.extent == 1:
            continue
        options = [()]
        fixable = tuple(
            i for i, op in enumerate(nest.operands) if i and packable(op, vector)
        )
        options += [fixable] if fixable else []
        for packed in options:
            for tile in tiles(nest, target, vector):
                yield Candidate(
                    vector, packed, tile, cycles(nest, target, vector, packed, dict(tile))
                )


def packable(operand: Operand, axis: int) -> bool:
    """Whether a copy of the operand could be contiguous along `axis`, and it is not yet."""
    moved = [dim for dim in operand.dims if dim.coefficients[axis]]
    return len(moved) == 1 and moved[0].coefficients[axis] == 1 and moved[0].stride != 1


def packed_order(operand: Operand, axis: int) -> tuple[int, ...]:
    """The operand's dimensions with the one that `axis` walks innermost."""
    last = next(d for d, dim in enumerate(operand.dims) if dim.coefficients[axis])
    return (*(d for d in range(len(operand.dims)) if d != last), last)


def tiles(nest: Nest, target: Target, vector: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Register tiles: vectors along the vector axis times rows of one other spatial axis."""
    budget = register_budget(nest, target)
    lanes = target.lanes(nest.dtype)
    spatial = [a for a in nest.spatial if a != vector and nest.axes[a].extent > 1]
    if nest.axes[vector].reduction:
        widths: list[int | None] = [None]
    else:
        most = math.ceil(nest.axes[vector].extent / lanes)
        widths = [n for n in (1, 2, 3, 4, 6, 8, 12) if n <= min(most, budget)]
    for width in widths:
        head = () if width is None else ((vector, width * lanes),)
        yield head
        for axis in spatial:
            for rows in row_counts(nest.axes[axis].extent, budget // (width or 1)):
                yield (*head, (axis, rows))


def row_counts(extent: int, most: int) -> list[int]:
    """Row counts of a tile worth trying: the largest few, and those that leave no tail."""
    top = min(extent, most)
    exact = [n for n in range(2, top + 1) if extent % n == 0]
    return sorted({n for n in (*range(max(2, top - 2), top + 1), *exact[-2:]) if n > 1})


def cycles(
    nest: Nest, target: Target, vector: int, packed: tuple[int, ...], tile: Mapping[int, int]
) -> float:
    """Predicted cycles of the whole nest with this tile, tails and packs included."""
    pieces = []
    for axis in nest.spatial:
        extent = nest.axes[axis].extent
        step = tile.get(axis, target.lanes(nest.dtype) if axis == vector else 1)
        full, rest = divmod(extent, step)
        pieces.append([(axis, n, count) for n, count in ((step, full), (rest, 1)) if n and count])
    total = sum(PACK_CYCLES * math.prod(nest.operands[i].shape) for i in packed)
    for combination in product(*pieces):
        count = math.prod(c for _, _, c in combination)
        sizes = {axis: n for axis, n, _ in combination}
        total += count * tile_cycles(nest, target, vector, packed, sizes)
    return total


def tile_cycles(
    nest: Nest, target: Target, vector: int, packed: tuple[int, ...], sizes: Mapping[int, int]
) -> float:
    """Cycles of one register tile through all its reductions."""
    lanes = target.lanes(nest.dtype)
    counts = {a: math.ceil(n / lanes) if a == vector else n for a, n in sizes.items()}
    accumulators = math.prod(counts.values())
    steps = math.prod(
        math.ceil(nest.axes[a].extent / lanes) if a == vector else nest.axes[a].extent
        for a in nest.reductions
    )
    vectors, port_uses = 0, 0
    for number, operand in enumerate(nest.inputs, 1):
        moved = math.prod(n for a, n in counts.items() if operand.stride_of(a))
        strided = number not in packed and operand.stride_of(vector) not in (0, 1)
        vectors += moved
        port_uses += moved * (2 * lanes if strided else 1)
    copies = max(1, min(target.accumulators // accumulators, steps, 8))
    step = max(
        accumulators / target.fma_per_cycle,
        port_uses / target.loads_per_cycle,
        (accumulators + vectors) / 5,
        target.fma_latency / copies,
    )
    if nest.axes[vector].reduction:
        store = 10
    else:
        store = 1 if nest.output.stride_of(vector) == 1 else 2 * lanes
    return steps * step + accumulators * store + TILE_OVERHEAD


def arrange(schedule: Schedule, target: Target, tile: Mapping[int, int]) -> Schedule:
    """Cut the tile and order all loops: tile loops, reductions, then the tile itself."""
    nest = schedule.nest
    for axis, size in tile.items():
        at = position(schedule, axis)
        if 1 < size < nest.axes[axis].extent:
            schedule = split(schedule, at, size)
    schedule = unroll_innermost(schedule, target, tile)
    tiled = {axis for axis, size in tile.items() if size >= nest.axes[axis].extent}
    loops = schedule.loops
    streamed = {a: stream_bytes(nest, a, tile) for a in nest.spatial}

    def rank(at: int) -> tuple[int, float, int]:
        loop = loops[at]
        if nest.axes[loop.axis].reduction:
            inputs = sum(abs(op.stride_of(loop.axis)) for op in nest.inputs)
            return (1 if loop.step > 1 or not is_split(schedule, loop.axis) else 2, -inputs, at)
        inner = loop.axis in tiled or (loop.axis in tile and loop.step == 1)
        if inner:
            return (3, float(loop.axis == schedule.vector), at)
        return (0, -streamed[loop.axis], at)

    return reorder(schedule, sorted(range(len(loops)), key=rank))


def is_split(schedule: Schedule, axis: int) -> bool:
    """Whether more than one loop runs over `axis`."""
    return sum(loop.axis == axis for loop in schedule.loops) > 1


def position(schedule: Schedule, axis: int) -> int:
    """Position of the outermost loop over `axis`."""
    return next(at for at, loop in enumerate(schedule.loops) if loop.axis == axis)


def stream_bytes(nest: Nest, axis: int, tile: Mapping[int, int]) -> int:
    """Bytes of the operands' panels that change when the tile moves along `axis`."""
    total = 0
    for operand in nest.operands:
        if operand.stride_of(axis):
            touched = (a for a in range(len(nest.axes)) if operand.stride_of(a))
            sizes = (
                nest.axes[a].extent if nest.axes[a].reduction else tile.get(a, 1) for a in touched
            )
            total += operand.item_bytes * math.prod(sizes)
    return total


def unroll_innermost(schedule: Schedule, target: Target, tile: Mapping[int, int]) -> Schedule:
    """Split the reduction that moves least in memory, so that its inner part unrolls."""
    nest = schedule.nest
    axes = [a for a in nest.reductions if nest.axes[a].extent > 1]
    if not axes:
        return schedule
    lanes = target.lanes(nest.dtype)
    vector = schedule.vector
    sizes = [math.ceil(n / lanes) if a == vector else n for a, n in tile.items()]
    accumulators = math.prod(sizes)
    axis = vector if vector in axes else min(
        axes, key=lambda a: (sum(abs(op.stride_of(a)) for op in nest.inputs), -a)
    )  # fmt: skip
    assert axis is not None
    unit = lanes if axis == vector else 1
    if accumulators * math.ceil(nest.axes[axis].extent / unit) <= target.unroll:
        return schedule
    chains = math.ceil(target.fma_latency * target.fma_per_cycle / accumulators)
    terms = max(4, chains) if accumulators * 4 <= target.unroll else 1
    factor = terms * unit
    if not 2 <= factor < nest.axes[axis].extent:
        return schedule
    return split(schedule, position(schedule, axis), factor)


def share(schedule: Schedule, threads: int) -> Schedule:
    """Mark the outermost spatial loop with enough trips for the threads as parallel."""
    if threads < 2:
        return schedule
    nest = schedule.nest
    seen: set[int] = set()
    for at, loop in enumerate(schedule.loops):
        outermost = loop.axis not in seen and not nest.axes[loop.axis].reduction
        seen.add(loop.axis)
        if outermost and schedule.trips(at) >= threads:
            return PRIMITIVES["parallel"](schedule, at)
    return schedule
