"""The default schedule: a register tile chosen by counting, with no search and no measurement.

Every candidate tile is priced by the cycles its straight-line body needs on the target's FMA
and load ports, the latency of its accumulator chains, its stores, and its tails; reading an
input along the lanes with a stride costs a gather, or one pack at the root. The cheapest wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from looptune.ir import Nest, Operand
from looptune.lower.form import register_budget, within_reach
from looptune.schedule import PRIMITIVES, Schedule, pack, reorder, split, vectorize
from looptune.target import Target

TILE_OVERHEAD = 15.0  # cycles of loop control, switches and first-load latency a tile
LINE_CYCLES = 4.0  # cycles to bring a 64-byte line from the second-level cache, sustained
CHAIN_SLACK = 1.3  # out-of-order issue needs more chains than latency times ports
PACK_CYCLES = 2.0  # cycles an element of a reordering copy


@dataclass(frozen=True)
class Candidate:
    """A vector axis, the inputs packed to make it contiguous, and the tile's extents."""

    vector: int
    packed: tuple[int, ...]
    tile: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Prices:
    """What a vector axis costs, whatever the tile: counts and cycles of `Candidate.vector`.

    `moves[i]` are the axes that input i moves along, `reads[i]` port uses for one vector of it,
    `streams[i]` cycles to bring it from the second-level cache; `steps` the reduction steps,
    `store` the cycles to store one accumulator, `fixed` those of the packs.
    """

    target: Target
    lanes: int
    moves: tuple[frozenset[int], ...]
    reads: tuple[int, ...]
    streams: tuple[float, ...]
    steps: int
    store: int
    fixed: float


def default_schedule(nest: Nest, target: Target, threads: int = 1) -> Schedule:
    """The cheapest candidate as a schedule; the untuned nest where there is nothing to choose."""
    schedule = Schedule(nest)
    if nest.points == 0 or all(axis.extent == 1 for axis in nest.axes):
        return schedule
    best = cheapest(nest, target)
    if best is None:
        return schedule
    for number in best.packed:
        schedule = pack(schedule, number, packed_order(nest.operands[number], best.vector))
    schedule = vectorize(schedule, best.vector)
    schedule = arrange(schedule, target, dict(best.tile))
    return share(schedule, threads)


def cheapest(nest: Nest, target: Target) -> Candidate | None:
    """The candidate of fewest predicted cycles; a vector axis that cannot win is not tried.

    None where no axis can be spread over the lanes, so far apart are its elements.
    """
    options = [
        (prices_of(nest, target, vector, packed), Candidate(vector, packed))
        for vector, axis in enumerate(nest.axes)
        if axis.extent > 1
        for packed in pack_options(nest, vector)
        if within_reach(
            (op for i, op in enumerate(nest.operands) if i not in packed), vector, target
        )
    ]
    if not options:
        return None
    bounds = sorted(
        (
            (least_cycles(nest, prices, option.vector), i)
            for i, (prices, option) in enumerate(options)
        )
    )
    best, least = options[bounds[0][1]][1], math.inf
    for bound, number in bounds:
        if bound >= least:
            break
        prices, option = options[number]
        for tile in tiles(nest, target, option.vector):
            found = cycles(nest, prices, option.vector, dict(tile))
            if found < least:
                best, least = replace(option, tile=tile), found
    return best


def pack_options(nest: Nest, vector: int) -> list[tuple[int, ...]]:
    """No pack, and packing all the inputs that a copy would make contiguous."""
    fixable = tuple(i for i, op in enumerate(nest.operands) if i and packable(op, vector))
    return [(), fixable] if fixable else [()]


def prices_of(nest: Nest, target: Target, vector: int, packed: tuple[int, ...]) -> Prices:
    """Prices of spreading `vector` over the lanes with `packed` inputs copied first."""
    lanes = target.lanes(nest.dtype)
    moves = tuple(
        frozenset(a for a in range(len(nest.axes)) if op.stride_of(a)) for op in nest.inputs
    )
    strided = (
        i not in packed and op.stride_of(vector) not in (0, 1)
        for i, op in enumerate(nest.inputs, 1)
    )
    extents = ((a, nest.axes[a].extent) for a in nest.reductions)
    steps = math.prod(math.ceil(n / lanes) if a == vector else n for a, n in extents)
    unit = nest.output.stride_of(vector) == 1
    store = 10 if nest.axes[vector].reduction else 1 if unit else 2 * lanes
    fixed = sum(PACK_CYCLES * math.prod(nest.operands[i].shape) for i in packed)
    reads = tuple(2 * lanes if s else 1 for s in strided)
    streams = tuple(stream_cycles(nest, op, target, vector) for op in nest.inputs)
    return Prices(target, lanes, moves, reads, streams, steps, store, fixed)


def stream_cycles(nest: Nest, operand: Operand, target: Target, vector: int) -> float:
    """Cycles to refill one vector of an operand too large to stay in the first-level cache.

    Reductions that move by less than a vector (a convolution's s) use what is there again.
    """
    size = operand.item_bytes * math.prod(operand.shape)
    if operand.stride_of(vector) == 0 or nest.axes[vector].reduction:
        return 0.0
    if size <= target.cache_bytes[0] / 2:
        return 0.0
    near = (a for a in nest.reductions if 0 < abs(operand.stride_of(a)) < target.lanes(nest.dtype))
    again = math.prod(nest.axes[a].extent for a in near)
    return LINE_CYCLES * target.vector_bytes / 64 / again


def least_cycles(nest: Nest, prices: Prices, vector: int) -> float:
    """A lower bound over all tiles: multiply-adds and stores at full rate, and the packs."""
    vectors = math.prod(
        math.ceil(nest.axes[a].extent / prices.lanes) if a == vector else nest.axes[a].extent
        for a in nest.spatial
    )
    return vectors * (prices.steps / prices.target.fma_per_cycle + prices.store) + prices.fixed


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


def cycles(nest: Nest, prices: Prices, vector: int, tile: Mapping[int, int]) -> float:
    """Predicted cycles of the whole nest with this tile, tails and packs included."""
    pieces = []
    repeats = 1
    for axis in nest.spatial:
        extent = nest.axes[axis].extent
        step = tile.get(axis, prices.lanes if axis == vector else 1)
        full, rest = divmod(extent, step)
        if step == 1:
            repeats *= extent
        else:
            lanes = prices.lanes if axis == vector else 1
            both = ((math.ceil(step / lanes), full), (math.ceil(rest / lanes), 1))
            pieces.append([(axis, n, count) for n, count in both if n and count])
    total = 0.0
    for combination in product(*pieces):
        count = math.prod(c for _, _, c in combination)
        total += count * tile_cycles(prices, {axis: n for axis, n, _ in combination})
    return total * repeats + prices.fixed


def tile_cycles(prices: Prices, counts: Mapping[int, int]) -> float:
    """Cycles of one register tile, `counts` accumulators along each axis, all reductions done."""
    target = prices.target
    accumulators = math.prod(counts.values())
    moved = [math.prod(n for a, n in counts.items() if a in moves) for moves in prices.moves]
    vectors = sum(moved)
    if min(moved) >= target.temporaries:  # the smaller operand does not stay in registers
        vectors += accumulators - min(moved)
    port_uses = sum(n * reads for n, reads in zip(moved, prices.reads, strict=True))
    streamed = sum(n * cost for n, cost in zip(moved, prices.streams, strict=True))
    copies = max(1, min(target.accumulators // accumulators, prices.steps, 8))
    step = max(
        accumulators / target.fma_per_cycle,
        max(port_uses, vectors) / target.loads_per_cycle,
        streamed,
        (accumulators + vectors) / 5,
        CHAIN_SLACK * target.fma_latency / copies,
    )
    return prices.steps * step + accumulators * prices.store + TILE_OVERHEAD


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
