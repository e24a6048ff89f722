"""The default schedule: a register tile chosen by counting, with no search and no measurement.

Every candidate is a vector axis, the inputs to pack into panels, whether the output is collected
in a write cache, and a register tile. It is priced by the cycles its straight-line body needs on
the target's FMA and load ports, the latency of its accumulator chains, what it reads from beyond
the first-level cache, its stores and tails, and the copies. The cheapest wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from looptune.ir import Nest, Operand
from looptune.lower.form import register_budget, within_reach
from looptune.schedule import Schedule, pack, parallel, reorder, split, vectorize
from looptune.target import Target

# Cycles, by which candidates are compared. Each was fitted to the order that measured kernels of
# the looptune-test and core suites came in on two machines, not to their times.
TILE_OVERHEAD = 15.0  # loop control, switches and first-load latency of a tile
LINE_NEAR = 1.0  # a 64-byte line from the second-level cache, in sequence
LINE_APART = 4.0  # the same, where rows lie apart: the prefetcher sees no stream
LINE_FAR = 4.0  # on top, for an operand beyond the second-level cache
PAGE_MISS = 7.0  # a page that the first-level TLB has not: a look-up in the second
SET_CONFLICT = 8.0  # a line whose neighbours in the walk all fall into one cache set
SWEEP_STEPS = 8  # reduction steps for each visit of the output in a sweep
CHAIN_SLACK = 1.3  # out-of-order issue needs more chains than latency times ports
LOAD_SHARE = 0.15  # a load that its port hides, but not all of the time
STREAM_SHARE = 0.5  # of reading from beyond the first-level cache: the rest is hidden
EVERY_SECOND = 5  # port uses to read every second element: two loads and shuffles
PACK_ROWS = 0.3  # an element of a copy of rows
PACK_BLOCKS = 0.8  # an element of a copy that is transposed in blocks, one vector wide
PACK_WIDE = 1.5  # on top, for wider panels: their lines are written in turns
PACK_GATHER = 2.5  # an element of a copy that is gathered
CACHED_STORE = 5  # a vector written to the cache and transposed on its way out
CACHED_ROW = 2  # a row of a transposed block stored, whole or in part
HORIZONTAL_STORE = 10  # the lanes of an accumulator summed, and one element stored
PAGE_BYTES, LINE_BYTES = 4096, 64
TLB_PAGES = 64  # entries of a first-level data TLB


class Stream(NamedTuple):
    """Cycles a reduction step to read an input from beyond the first-level cache.

    `each` for every vector or element, or where the rows of the tile lie along an axis of
    `across`, what that says; `once` besides. A panel of `panel` bytes a vector is nearer the
    narrower it is.
    """

    across: Mapping[int, float]
    each: float
    once: float
    panel: int = 0
    cache_bytes: tuple[int, ...] = ()

    def cycles(self, reads: int, rows: int | None) -> float:
        """Cycles for so many vectors or elements of a tile with rows along an axis."""
        if self.panel:
            near, far, _ = self.cache_bytes
            size = reads * self.panel
            return 0.0 if size <= near / 2 else reads * self.each * (1 + 4 * size / far)
        return reads * self.across.get(-1 if rows is None else rows, self.each) + self.once


@dataclass(frozen=True)
class Candidate:
    """A vector axis, the inputs packed into panels along it, whether the output goes through a
    write cache, and the tile's extents.

    With `sweep` a few steps of the reductions are done for the whole vector axis before the
    next: what is read once is then read in sequence, and the output is visited again.
    """

    vector: int
    panels: tuple[int, ...] = ()
    cached: bool = False
    sweep: bool = False
    tile: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Prices:
    """What a candidate costs, whatever the tile: counts and cycles.

    `moves[i]` are the axes that input i moves along, `reads[i]` port uses for one vector of it,
    `streams[i]` what it costs a step to bring it from beyond the first-level cache; `steps` the
    reduction steps, `store` the cycles to store one accumulator, `fixed` those of the copies and
    `wide` what panels wider than a vector add. `rows` is the axis along which a write cache is
    transposed, where there is one.
    """

    target: Target
    lanes: int
    moves: tuple[frozenset[int], ...]
    reads: tuple[int, ...]
    streams: tuple[Stream, ...]
    steps: int
    store: float
    fixed: float
    wide: float
    rows: int | None


def default_schedule(nest: Nest, target: Target, threads: int = 1) -> Schedule:
    """The cheapest candidate as a schedule; the untuned nest where there is nothing to choose."""
    schedule = Schedule(nest)
    if nest.points == 0 or all(axis.extent == 1 for axis in nest.axes):
        return schedule
    best = cheapest(nest, target, packs=threads == 1)
    if best is None:
        return schedule
    schedule = vectorize(schedule, best.vector)
    return share(arrange(schedule, target, best), threads)


def cheapest(nest: Nest, target: Target, packs: bool) -> Candidate | None:
    """The candidate of fewest predicted cycles; one whose bound cannot win is not tried.

    None where no axis can be spread over the lanes, so far apart are its elements.
    """
    options = [
        (prices_of(nest, target, option), option)
        for vector, axis in enumerate(nest.axes)
        if axis.extent > 1
        for option in options_of(nest, vector, packs)
        if within_reach(unpacked(nest, option), vector, target)
    ]
    if not options:
        return None
    bounds = sorted(
        (least_cycles(nest, prices, option.vector), i) for i, (prices, option) in enumerate(options)
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


def options_of(nest: Nest, vector: int, packs: bool) -> list[Candidate]:
    """The vector axis with every useful set of panels, and with a write cache if that helps."""
    panels = [i for i, op in enumerate(nest.operands) if i and panelable(op, vector)]
    strided = [i for i in panels if nest.operands[i].stride_of(vector) != 1]
    sets = {(), tuple(strided), tuple(panels)} if packs else {()}
    caches = [False]
    if packs and cacheable(nest, vector):
        caches.append(True)
    found = [Candidate(vector, chosen, cached) for chosen in sorted(sets) for cached in caches]
    return [*found, Candidate(vector, sweep=True)] if sweeps(nest, vector) else found


def panelable(operand: Operand, axis: int) -> bool:
    """Whether a copy of the operand is contiguous along `axis`."""
    moved = [dim.coefficients[axis] for dim in operand.dims if dim.coefficients[axis]]
    return moved == [1] and operand.stride_of(axis) != 0


def cacheable(nest: Nest, vector: int) -> bool:
    """Whether vectors of the output are scattered, and collecting them first is possible."""
    output = nest.output
    single = all(sum(map(bool, dim.coefficients)) <= 1 for dim in output.dims)
    return single and nest.axes[vector].extent > 1 and output.stride_of(vector) not in (0, 1)


def sweeps(nest: Nest, vector: int) -> bool:
    """Whether an input is read along the vectors, and each of its elements just once."""
    once = (
        op.stride_of(vector) == 1
        and all(op.stride_of(a) or nest.axes[a].extent == 1 for a in nest.spatial)
        for op in nest.inputs
    )
    return bool(nest.reductions) and not nest.axes[vector].reduction and any(once)


def unpacked(nest: Nest, option: Candidate) -> Iterator[Operand]:
    """The operands that the register tile reads or writes where they are."""
    for number, operand in enumerate(nest.operands):
        if number not in option.panels and (number or not option.cached):
            yield operand


def prices_of(nest: Nest, target: Target, option: Candidate) -> Prices:
    """Prices of a candidate before its tile is chosen."""
    vector = option.vector
    lanes = target.lanes(nest.dtype)
    moves = tuple(
        frozenset(a for a in range(len(nest.axes)) if op.stride_of(a)) for op in nest.inputs
    )
    gathers = {0: 1, 1: 1, 2: EVERY_SECOND}
    extents = ((a, nest.axes[a].extent) for a in nest.reductions)
    steps = math.prod(math.ceil(n / lanes) if a == vector else n for a, n in extents)
    if nest.axes[vector].reduction:
        store: float = HORIZONTAL_STORE
    else:
        store = 1 if nest.output.stride_of(vector) == 1 else 2 * lanes
    fixed = sum(pack_cycles(nest.operands[i], vector, target) for i in option.panels)
    reads = tuple(
        1 if i in option.panels else gathers.get(op.stride_of(vector), 2 * lanes)
        for i, op in enumerate(nest.inputs, 1)
    )
    streams = tuple(
        stream(nest, op, target, option, i in option.panels) for i, op in enumerate(nest.inputs, 1)
    )
    revisits = 2 * steps / SWEEP_STEPS if option.sweep else 0.0
    turned = [op for i, op in enumerate(nest.operands) if i in option.panels]
    wide = sum(PACK_WIDE * math.prod(op.shape) for op in turned if op.stride_of(vector) != 1)
    unit = [a for a in nest.spatial if nest.output.stride_of(a) == 1]
    rows = unit[0] if option.cached and unit else None
    return Prices(target, lanes, moves, reads, streams, steps, store + revisits, fixed, wide, rows)


def pack_cycles(operand: Operand, vector: int, target: Target) -> float:
    """Cycles to copy an operand once, in panels along `vector`."""
    elements = math.prod(operand.shape)
    if operand.stride_of(vector) == 1:
        each = PACK_ROWS
    else:
        each = PACK_BLOCKS if any(dim.stride == 1 for dim in operand.dims) else PACK_GATHER
    far = elements * operand.item_bytes > target.cache_bytes[1]
    lines = elements * operand.item_bytes / LINE_BYTES
    return elements * each + (lines * LINE_FAR if far else 0.0)


def stream(nest: Nest, operand: Operand, target: Target, option: Candidate, packed: bool) -> Stream:
    """What reading an input costs a reduction step.

    A line is cheap in sequence, dearer where rows lie apart, and dearer still from beyond the
    second-level cache, or where all rows fall into one set. Rows a page apart miss the TLB.
    """
    item = operand.item_bytes
    moved = [(abs(operand.stride_of(a)) * item, nest.axes[a].extent) for a in nest.reductions]
    moved = sorted((stride, extent) for stride, extent in moved if stride and extent > 1)
    size = item * math.prod(operand.shape)
    if not moved or size <= target.cache_bytes[0] / 2:
        return Stream({}, 0.0, 0.0)
    vector, wide = option.vector, target.vector_bytes / LINE_BYTES
    far = LINE_FAR if size > target.cache_bytes[1] else 0.0
    if packed:
        panel = math.prod(extent for _, extent in moved) * target.vector_bytes
        return Stream({}, LINE_NEAR * wide, 0.0, panel, target.cache_bytes)
    if nest.axes[vector].reduction or option.sweep:
        return Stream({}, (LINE_NEAR + far) * wide, 0.0)
    again = math.prod(extent for stride, extent in moved if stride < LINE_BYTES)
    rows = [(stride, extent) for stride, extent in moved if stride >= LINE_BYTES]
    along = operand.stride_of(vector) != 0
    line = LINE_APART + (0.0 if along else far)
    pages = math.prod(max(1.0, extent * min(1.0, stride / PAGE_BYTES)) for stride, extent in rows)
    miss = 0.0
    if rows and pages > TLB_PAGES:
        miss = PAGE_MISS * min(1.0, rows[0][0] / PAGE_BYTES) / again
        line += SET_CONFLICT if rows[0][0] % PAGE_BYTES == 0 else 0.0
    if along:
        return Stream({}, line * wide / again, miss)
    jumps = moved[0][0] >= LINE_BYTES  # to another line with every step
    step = 0.0 if jumps else moved[0][0] / LINE_BYTES
    miss += line / 2 if jumps else 0.0
    across = {
        a: line * max(step, min(LINE_BYTES, abs(operand.stride_of(a)) * item) / LINE_BYTES / again)
        for a in nest.spatial
        if operand.stride_of(a)
    }
    return Stream(across, line * step, miss)


def least_cycles(nest: Nest, prices: Prices, vector: int) -> float:
    """A lower bound over all tiles: multiply-adds and stores at full rate, and the copies."""
    vectors = math.prod(
        math.ceil(nest.axes[a].extent / prices.lanes) if a == vector else nest.axes[a].extent
        for a in nest.spatial
    )
    return vectors * (prices.steps / prices.target.fma_per_cycle + prices.store) + prices.fixed


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
    rows = next((axis for axis in tile if axis != vector), None)
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
        total += count * tile_cycles(prices, {axis: n for axis, n, _ in combination}, rows)
    wide = prices.wide if tile.get(vector, 0) > prices.lanes else 0.0
    return total * repeats + prices.fixed + wide


def tile_cycles(prices: Prices, counts: Mapping[int, int], rows: int | None) -> float:
    """Cycles of one register tile, `counts` accumulators along each axis, all reductions done."""
    target = prices.target
    accumulators = math.prod(counts.values())
    moved = [math.prod(n for a, n in counts.items() if a in moves) for moves in prices.moves]
    vectors = sum(moved)
    if min(moved) >= target.temporaries:  # the smaller operand does not stay in registers
        vectors += accumulators - min(moved)
    port_uses = sum(n * reads for n, reads in zip(moved, prices.reads, strict=True))
    streamed = sum(s.cycles(n, rows) for s, n in zip(prices.streams, moved, strict=True))
    copies = max(1, min(target.accumulators // accumulators, prices.steps, 8))
    step = max(
        accumulators / target.fma_per_cycle,
        max(port_uses, vectors) / target.loads_per_cycle,
        (accumulators + vectors) / 5,
        CHAIN_SLACK * target.fma_latency / copies,
    )
    step += LOAD_SHARE * max(port_uses, vectors) + STREAM_SHARE * streamed
    store = prices.store
    if prices.rows is not None and rows == prices.rows:
        store = CACHED_STORE + CACHED_ROW * prices.lanes / min(prices.lanes, counts.get(rows, 1))
    return prices.steps * step + accumulators * store + TILE_OVERHEAD


def arrange(schedule: Schedule, target: Target, option: Candidate) -> Schedule:
    """Cut the tile, order all loops and put the packs where their panels are used.

    Outermost are the axes that panels depend on and the tiles along the vector axis, then the
    other spatial loops, the reductions, and the tile.
    """
    nest, tile = schedule.nest, dict(option.tile)
    for axis, size in tile.items():
        at = position(schedule, axis)
        if 1 < size < nest.axes[axis].extent:
            schedule = split(schedule, at, size)
    if option.sweep:
        schedule = cut_sweep(schedule)
    else:
        schedule = unroll_innermost(schedule, target, tile)
    tiled = {axis for axis, size in tile.items() if size >= nest.axes[axis].extent}
    loops = schedule.loops
    streamed = {a: stream_bytes(nest, a, tile) for a in nest.spatial}
    around = {
        axis
        for number in option.panels
        for axis in nest.spatial
        if any(dim.coefficients[axis] for dim in nest.operands[number].dims)
    }

    def rank(at: int) -> tuple[int, float, int]:
        loop = loops[at]
        if nest.axes[loop.axis].reduction:
            inputs = sum(abs(op.stride_of(loop.axis)) for op in nest.inputs)
            if option.sweep and (loop.step > 1 or not is_split(schedule, loop.axis)):
                return (0, -inputs, at)
            return (3 if loop.step > 1 or not is_split(schedule, loop.axis) else 4, -inputs, at)
        inner = loop.axis in tiled or (loop.axis in tile and loop.step == 1)
        if inner:
            return (5, float(loop.axis == schedule.vector), at)
        if loop.axis in around:
            return (1 if loop.axis == schedule.vector else 0, -streamed[loop.axis], at)
        return (2, -streamed[loop.axis], at)

    order = sorted(range(len(loops)), key=rank)
    counts = [sum(rank(at)[0] < level for at in order) for level in (2, 3)]
    return with_packs(reorder(schedule, order), option, *counts)


def cut_sweep(schedule: Schedule) -> Schedule:
    """Split the longest reduction, so that a few of its steps are done at a time."""
    nest = schedule.nest
    axis = max(nest.reductions, key=lambda a: nest.axes[a].extent)
    if nest.axes[axis].extent <= SWEEP_STEPS:
        return schedule
    return split(schedule, position(schedule, axis), SWEEP_STEPS)


def with_packs(schedule: Schedule, option: Candidate, panels: int, tiles: int) -> Schedule:
    """Put panels inside the first `panels` loops, and the write cache inside the first `tiles`."""
    nest, vector = schedule.nest, option.vector
    for number in option.panels:
        order = lanes_last(nest.operands[number], vector)
        schedule = pack(schedule, number, order, panels - 1 if panels else "root")
    if option.cached:
        order = lanes_last(nest.output, vector)
        schedule = pack(schedule, 0, order, tiles - 1 if tiles else "root")
    return schedule


def lanes_last(operand: Operand, axis: int) -> tuple[int, ...]:
    """The operand's dimensions with the one that `axis` walks innermost."""
    last = next(d for d, dim in enumerate(operand.dims) if dim.coefficients[axis])
    return (*(d for d in range(len(operand.dims)) if d != last), last)


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
            return parallel(schedule, at)
    return schedule
