"""What a candidate for the default schedule costs, in predicted cycles.

A register tile is priced by the cycles its straight-line body needs on the target's FMA and load
ports, the latency of its accumulator chains, what it reads from beyond the first-level cache, and
its stores; a candidate by its tiles, tails included, and its copies. Only the order of candidates
matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from looptune.ir import Dim, Nest, Operand
from looptune.lower.form import register_budget
from looptune.target import Target

# Cycles, by which candidates are compared. Each was fitted to the order that measured kernels of
# the looptune-test and core suites came in on one AVX-512 machine, not to their times.
ROW_SWITCH = 6.0  # another row of a tile: a stream more to follow from tile to tile
TILE_OVERHEAD = 15.0  # loop control, switches and first-load latency of a tile
LINE_NEAR = 1.0  # a 64-byte line from the second-level cache, in sequence
LINE_APART = 4.0  # the same, where rows lie apart: the prefetcher sees no stream
LINE_FAR = 4.0  # on top, for an operand beyond the second-level cache
PAGE_MISS = 7.0  # a page that the first-level TLB has not: a look-up in the second
SET_CONFLICT = 8.0  # a line whose neighbours in the walk all fall into one cache set
CROWDED = 1.5  # a line that others in its cache set have displaced since the last step
WAY_BYTES = 4096  # of the first-level cache: lines so far apart share a set
SWEEP_STEPS = 8  # reduction steps for each visit of the output in a sweep
CHAIN_SLACK = 1.3  # out-of-order issue needs more chains than latency times ports
LOAD_SHARE = 0.15  # a load that its port hides, but not all of the time
STREAM_SHARE = 0.5  # of reading from beyond the first-level cache: the rest is hidden
EVERY_SECOND = 5  # port uses to read every second element: two loads and shuffles
PACK_ROWS = 0.3  # an element of a copy of rows
PACK_ROW = 4.0  # a row of a padded copy, however short
PACK_BLOCKS = 0.8  # an element of a copy that is transposed in blocks, one vector wide
PACK_WIDE = 1.5  # on top, for wider panels: their lines are written in turns
PACK_GATHER = 2.5  # an element of a copy that is gathered
CACHED_STORE = 5  # a vector written to the cache and transposed on its way out
CACHED_ROW = 2  # a row of a transposed block stored, whole or in part
HORIZONTAL_STORE = 10  # the lanes of an accumulator summed, and one element stored
PAGE_BYTES, LINE_BYTES = 4096, 64
TLB_PAGES = 64  # entries of a first-level data TLB
ISSUED = 5  # instructions a cycle, sustained


class Stream(NamedTuple):
    """Cycles a reduction step to read an input from beyond the first-level cache.

    `each` for every vector or element, or where the rows of the tile lie along an axis of
    `across`, what that says; `once` besides. A panel of `panel` bytes a vector is nearer the
    narrower it is. Along an axis of `room`, so many rows keep their lines in the first-level cache
    until the next step reads them again.
    """

    across: Mapping[int, float]
    each: float
    once: float
    panel: int = 0
    cache_bytes: tuple[int, ...] = ()
    room: Mapping[int, int] = {}

    def cycles(self, reads: int, rows: int | None) -> float:
        """Cycles for so many vectors or elements of a tile with rows along an axis."""
        if self.panel:
            near, far, _ = self.cache_bytes
            size = reads * self.panel
            return 0.0 if size <= near / 2 else reads * self.each * (1 + 4 * size / far)
        axis = -1 if rows is None else rows
        crowded = min(reads, 2 * max(0, reads - self.room.get(axis, reads)))
        return reads * self.across.get(axis, self.each) + CROWDED * crowded + self.once


class Window(NamedTuple):
    """Rows of a tile along an axis that a reduction of `taps` walks, too, in input `number`.

    Where a body of `terms` unrolls and the other input's vectors all stay in registers, each
    vector of this one is loaded for all taps at once (`lower.region.regrouped`). A row moves it by
    `row` elements of the dimension, a tap by `tap`.
    """

    number: int
    terms: int
    taps: int
    row: int
    tap: int

    def share(self, count: int) -> float:
        """How much of what so many rows read, tap by tap, is left to load."""
        reads = {self.row * i + self.tap * j for i in range(count) for j in range(self.taps)}
        return len(reads) / (count * self.taps)


@dataclass(frozen=True)
class Candidate:
    """A vector axis, the inputs packed into panels along it, whether the output goes through a
    write cache, and the tile's extents.

    Input `constant` was packed before. With `sweep` a few steps of the reductions are done for
    the whole vector axis before the next: what is read once is then read in sequence, and the
    output is visited again.
    """

    vector: int
    panels: tuple[int, ...] = ()
    cached: bool = False
    sweep: bool = False
    tile: tuple[tuple[int, int], ...] = ()
    constant: int | None = None


@dataclass(frozen=True)
class Prices:
    """What a candidate costs, whatever the tile: counts and cycles.

    `moves[i]` are the axes that input i moves along, `reads[i]` port uses for one vector of it,
    `streams[i]` what it costs a step to bring it from beyond the first-level cache; `steps` the
    reduction steps, `store` the cycles to store one accumulator, `fixed` those of the copies and
    `wide` what panels wider than a vector add. `rows` is the axis along which a write cache is
    transposed, where there is one. `windows` are by the axis of a tile's rows.
    """

    target: Target
    lanes: int
    moves: tuple[frozenset[int], ...]
    reads: tuple[float, ...]
    streams: tuple[Stream, ...]
    steps: int
    store: float
    fixed: float
    wide: float
    rows: int | None
    windows: Mapping[int, Window]


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
    copied = [nest.operands[i] for i in option.panels if i != option.constant]
    fixed = sum(pack_cycles(operand, vector, target) for operand in copied)
    padded = (i for i in nest.padded if i not in option.panels and i != option.constant)
    fixed += sum(padding_cycles(nest.operands[i], target) for i in padded)
    reads: tuple[float, ...] = tuple(
        1 if i in option.panels else gathers.get(op.stride_of(vector), 2 * lanes)
        for i, op in enumerate(nest.inputs, 1)
    )
    # A window that slides along the vectors crosses lines: two port uses for a part of the loads.
    across = 1 + target.vector_bytes / LINE_BYTES
    shifted = [shifts(op, vector, nest) for op in nest.inputs]
    reads = tuple(across if s and r == 1 else r for s, r in zip(shifted, reads, strict=True))
    streams = tuple(
        stream(nest, op, target, option, i in option.panels) for i, op in enumerate(nest.inputs, 1)
    )
    revisits = 2 * steps / SWEEP_STEPS if option.sweep else 0.0
    wide = sum(PACK_WIDE * math.prod(op.shape) for op in copied if op.stride_of(vector) != 1)
    unit = [a for a in nest.spatial if nest.output.stride_of(a) == 1]
    rows = unit[0] if option.cached and unit else None
    return Prices(
        target, lanes, moves, reads, streams, steps, store + revisits, fixed, wide, rows,
        windows(nest, vector),
    )  # fmt: skip


def windows(nest: Nest, vector: int) -> dict[int, Window]:
    """By spatial axis, the window that slides along it, if just one does."""
    strides = {a: sum(abs(op.stride_of(a)) for op in nest.inputs) for a in nest.reductions}
    found: dict[int, list[Window]] = {}
    for number, operand in enumerate(nest.inputs):
        for dim in operand.dims:
            rows = [a for a in nest.spatial if dim.coefficients[a] and a != vector]
            taps = [a for a in nest.reductions if dim.coefficients[a] and nest.axes[a].extent > 1]
            if len(nest.inputs) != 2 or len(rows) != 1 or len(taps) != 1 or vector in taps:
                continue
            # Reductions that move less in memory lie inside (`default.arrange`).
            inside = (nest.axes[a].extent for a in strides if strides[a] <= strides[taps[0]])
            slide = map(abs, (dim.coefficients[rows[0]], dim.coefficients[taps[0]]))
            made = Window(number, math.prod(inside), nest.axes[taps[0]].extent, *slide)
            found.setdefault(rows[0], []).append(made)
    return {axis: made[0] for axis, made in found.items() if len(made) == 1}


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


def padding_cycles(operand: Operand, target: Target) -> float:
    """Cycles to copy an operand once, row by row."""
    elements = math.prod(operand.shape)
    row = min(operand.dims, key=lambda dim: abs(dim.stride) or math.inf, default=None)
    rows = elements / max(1, row.size if row else 1)
    far = elements * operand.item_bytes > target.cache_bytes[1]
    lines = elements * operand.item_bytes / LINE_BYTES
    return elements * PACK_ROWS + rows * PACK_ROW + (lines * LINE_FAR if far else 0.0)


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
        near, beyond, _ = target.cache_bytes
        taps = [a for a in nest.reductions if operand.stride_of(a) and nest.axes[a].extent > 1]
        if all(slides(operand, axis, nest) for axis in taps):
            # Every tile reads much of the box that the tiles before it have read.
            others = (dim for dim in operand.dims if not dim.coefficients[vector])
            box = math.prod(reached(dim, nest) for dim in others) * target.vector_bytes
            again = math.prod(nest.axes[a].extent for a in taps)
            line = 0.0 if box <= near / 2 else LINE_NEAR * wide * (1 + 4 * box / beyond) / again
            return Stream({}, line, 0.0)
        panel = math.prod(extent for _, extent in moved) * target.vector_bytes
        return Stream({}, LINE_NEAR * wide, 0.0, panel, target.cache_bytes)
    if nest.axes[vector].reduction or option.sweep:
        return Stream({}, (LINE_NEAR + far) * wide, 0.0)
    again = math.prod(extent for stride, extent in moved if stride < LINE_BYTES)
    if all(slides(operand, axis, nest) for axis in nest.reductions if operand.stride_of(axis)):
        again = math.prod(extent for _, extent in moved)
    rows = [(stride, extent) for stride, extent in moved if stride >= LINE_BYTES]
    along = operand.stride_of(vector) != 0
    reused = any(nest.axes[a].extent > 1 and not operand.stride_of(a) for a in nest.spatial)
    # Vectors that are whole lines come from the second level about as fast as in sequence.
    hidden = wide >= 1 and operand.stride_of(vector) == 1 and not far
    line = (LINE_NEAR if hidden else LINE_APART) + (0.0 if along and reused else far)
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
    room = {} if jumps else {a: room_along(operand, a, target) for a in across}
    return Stream(across, line * step, miss, room=room)


def room_along(operand: Operand, axis: int, target: Target) -> int:
    """Rows along an axis whose lines the first-level cache holds at once, where each takes one."""
    sets = sets_apart(abs(operand.stride_of(axis)) * operand.item_bytes)
    return sets * (target.cache_bytes[0] // WAY_BYTES)


def sets_apart(distance: int) -> int:
    """Sets of the first-level cache that lines at multiples of a distance in bytes fall into."""
    return min(WAY_BYTES // LINE_BYTES, WAY_BYTES // math.gcd(distance, WAY_BYTES))


def reached(dim: Dim, nest: Nest) -> int:
    """Elements along a dimension from the first to the last that the nest reads."""
    low, high = dim.bounds(nest.axes)
    return high + 1 - low


def shifts(operand: Operand, axis: int, nest: Nest) -> bool:
    """Whether a reduction moves along the same dimension of an operand as a spatial axis."""
    taps = [a for a in nest.reductions if nest.axes[a].extent > 1]
    return any(
        dim.coefficients[axis] and any(dim.coefficients[a] for a in taps) for dim in operand.dims
    )


def slides(operand: Operand, axis: int, nest: Nest) -> bool:
    """Whether a reduction walks a window along a dimension that a spatial axis walks, too."""
    return any(
        dim.coefficients[axis] and any(dim.coefficients[a] for a in nest.spatial)
        for dim in operand.dims
    )


def least_cycles(nest: Nest, prices: Prices, option: Candidate) -> float:
    """A lower bound over all tiles: multiply-adds, the loads of the squarest tile, stores and
    copies."""
    target = prices.target
    vectors = math.prod(
        -(-nest.axes[a].extent // prices.lanes) if a == option.vector else nest.axes[a].extent
        for a in nest.spatial
    )
    budget = register_budget(nest, target)
    loads = 2 / math.sqrt(budget) if len(nest.inputs) == 2 else 1.0
    gathers = max(prices.reads)  # of a strided vector: one for a whole tile at best
    loads = max(loads, gathers / budget if gathers > 1 else 0.0)
    step = max(1 / target.fma_per_cycle, loads / target.loads_per_cycle) + LOAD_SHARE * loads
    store = CACHED_STORE + CACHED_ROW if prices.rows is not None else prices.store
    return vectors * (prices.steps * step + store) + prices.fixed


def cycles(nest: Nest, prices: Prices, vector: int, tile: Mapping[int, int]) -> float:
    """Predicted cycles of the whole nest with this tile, tails and packs included."""
    lanes = prices.lanes
    rows = next((axis for axis in tile if axis != vector), None)
    spread = [(1, 1)] if nest.axes[vector].reduction else []
    lines, repeats = [(1, 1)], 1
    for axis in nest.spatial:
        extent = nest.axes[axis].extent
        if axis == vector:
            spread = pieces(extent, tile.get(axis, lanes), lanes)
        elif axis == rows:
            lines = pieces(extent, tile[axis], 1)
        else:
            repeats *= extent
    flags = [(vector in moves, rows in moves) for moves in prices.moves]
    total = 0.0
    for vectors, many in spread:
        for count, times in lines:
            total += many * times * tile_cycles(prices, flags, vectors, count, rows)
    wide = prices.wide if tile.get(vector, 0) > lanes else 0.0
    # Rounded, so that equal prices are equal in whatever order they were summed.
    return round(total * repeats + prices.fixed + wide, 3)


def pieces(extent: int, step: int, unit: int) -> list[tuple[int, int]]:
    """Units in whole steps and in the rest, and how many there are of each."""
    full, rest = divmod(extent, step)
    found = [(-(-step // unit), full)] if full else []
    return [*found, (-(-rest // unit), 1)] if rest else found


def tile_cycles(
    prices: Prices, flags: list[tuple[bool, bool]], vectors: int, count: int, rows: int | None
) -> float:
    """Cycles of one register tile of `vectors` by `count` accumulators, all reductions done.

    `flags` say of each input whether it moves along the vectors and along the rows. This runs
    some hundred times for a nest: it is written out plainly.
    """
    target = prices.target
    accumulators = vectors * count
    loads = ports = 0.0
    streamed, fewest = 0.0, accumulators
    for (along, across), reads, source in zip(flags, prices.reads, prices.streams, strict=True):
        moved = (vectors if along else 1) * (count if across else 1)
        loads += moved
        ports += moved * reads
        streamed += source.cycles(moved, rows)
        fewest = min(fewest, moved)
    window = None if rows is None else prices.windows.get(rows)
    if window is not None and reuses(prices, window, flags, vectors, count):
        saved = (vectors if flags[window.number][0] else 1) * count * (1 - window.share(count))
        loads -= saved
        ports -= saved * prices.reads[window.number]
    elif fewest >= target.temporaries:  # the smaller operand does not stay in registers
        loads += accumulators - fewest
    ports = max(ports, loads)
    copies = max(1, min(target.accumulators // accumulators, prices.steps, 8))
    step = max(
        accumulators / target.fma_per_cycle,
        ports / target.loads_per_cycle,
        (accumulators + loads) / ISSUED,
        CHAIN_SLACK * target.fma_latency / copies,
    )
    step += LOAD_SHARE * ports + STREAM_SHARE * streamed
    store = prices.store
    if rows is not None and rows == prices.rows:
        store = CACHED_STORE + CACHED_ROW * prices.lanes / min(prices.lanes, count)
    return prices.steps * step + accumulators * store + ROW_SWITCH * count + TILE_OVERHEAD


def reuses(
    prices: Prices, window: Window, flags: list[tuple[bool, bool]], vectors: int, count: int
) -> bool:
    """Whether a tile of `vectors` by `count` loads what slides along its rows for all taps at
    once: its body unrolls, and the other input's vectors fit the registers it leaves."""
    target, accumulators = prices.target, vectors * count
    along, across = flags[1 - window.number]
    held = window.terms * (vectors if along else 1) * (count if across else 1)
    chains = math.ceil(target.fma_per_cycle * target.fma_latency / accumulators)
    copies = max(1, min(target.accumulators // accumulators, chains))
    free = target.vector_registers - accumulators * copies
    return accumulators * window.terms <= target.unroll and held + 2 <= free
