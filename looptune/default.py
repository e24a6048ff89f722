"""The default schedule: a register tile chosen by counting, with no search and no measurement.

Every candidate is a vector axis, the inputs to pack into panels, whether the output is collected
in a write cache, and a register tile. `looptune.prices` says what it costs; the cheapest wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from looptune.dtypes import is_narrow
from looptune.ir import Nest, Operand
from looptune.lower.form import register_budget, within_reach
from looptune.prices import (
    SWEEP_STEPS,
    Candidate,
    Prices,
    cycles,
    least_cycles,
    prices_of,
    shifts,
    windows,
)
from looptune.schedule import Schedule, pack, parallel, reorder, split, vectorize
from looptune.target import Target

# What one core does in some 10 microseconds, out of its second-level cache.
SHARED_FLOPS, SHARED_BYTES = 1_000_000, 1_000_000
# Cores that write to one line of 64 bytes wait for each other, some 200 nanoseconds a visit, and a
# prefetcher asks for lines beyond its own core's. They rarely meet where the outputs of a chunk lie
# on so many bytes in a row: halves of 512 took 2.4 to 4 times as long as whole rows.
UNCONTENDED_BYTES = 1024
CONTENDED_VISITS = 25  # take half of those 10 microseconds: two threads do not gain more
CHUNKS_EACH = 4  # of a thread (`run_shared` of the native pool)
TILES_EACH = 4  # of an option, where many candidates are wanted
PANEL_READS = 8  # of every element, before a copy of it pays
# Vectors of a sweep's tile: few, so that the rows it reads advance side by side, as prefetchers
# follow them. A gemv of 64 MB took 2.9 ms with 2 and 3.1 ms with 12, on two threads 2.0 and 2.6.
SWEEP_VECTORS = 2


def default_schedule(
    nest: Nest, target: Target, threads: int = 1, constant: int | None = None
) -> Schedule:
    """The cheapest candidate as a schedule; the untuned nest where there is nothing to choose.

    Operand number `constant` is packed, by exactly one pack, which costs nothing.
    """
    schedule = Schedule(nest)
    empty = nest.points == 0 or all(axis.extent == 1 for axis in nest.axes)
    best = None if empty else cheapest(nest, target, constant)
    if best is None:
        return schedule if constant is None else pack(schedule, constant)
    schedule = vectorize(schedule, best.vector)
    return share(arrange(schedule, target, best, threads), threads)


def priced_options(
    nest: Nest, target: Target, constant: int | None = None
) -> list[tuple[float, Prices, Candidate]]:
    """The candidates before their tiles are chosen, with a lower bound of their cycles, the least
    first; without those whose lanes no pointer reaches."""
    options = [
        (prices_of(nest, target, option), option)
        for vector, axis in enumerate(nest.axes)
        if axis.extent > 1
        for option in options_of(nest, vector, constant)
        if within_reach(unpacked(nest, option), vector, target)
    ]
    bounds = sorted(
        (least_cycles(nest, prices, option), i) for i, (prices, option) in enumerate(options)
    )
    return [(bound, *options[number]) for bound, number in bounds]


def cheapest(nest: Nest, target: Target, constant: int | None = None) -> Candidate | None:
    """The candidate of fewest predicted cycles; one whose bound cannot win is not tried.

    None where no axis can be spread over the lanes, so far apart are its elements.
    """
    best, least = None, math.inf
    for bound, prices, option in priced_options(nest, target, constant):
        if bound >= least:
            break
        best = best or option
        for tile in tiles(nest, target, option):
            found = cycles(nest, prices, option.vector, dict(tile))
            if found < least:
                best, least = replace(option, tile=tile), found
    return best


def candidates(nest: Nest, target: Target, threads: int = 1) -> Iterator[Schedule]:
    """Schedules that the default is chosen from: the `TILES_EACH` best tiles of every option."""
    schedule = Schedule(nest)
    if nest.points == 0 or all(axis.extent == 1 for axis in nest.axes):
        return
    for _, prices, option in priced_options(nest, target):
        found = [
            (cycles(nest, prices, option.vector, dict(tile)), tile)
            for tile in tiles(nest, target, option)
        ]
        for _, tile in sorted(found)[:TILES_EACH]:
            made = arrange(
                vectorize(schedule, option.vector), target, replace(option, tile=tile), threads
            )
            yield share(made, threads)


def options_of(nest: Nest, vector: int, constant: int | None = None) -> list[Candidate]:
    """The vector axis with every useful set of panels, and with a write cache if that helps."""
    least = {i: PANEL_READS for i in range(1, 1 + len(nest.inputs))}
    for number in nest.padded:  # which is copied in any case
        operand = nest.operands[number]
        if operand.stride_of(vector) != 1 and not shifts(operand, vector, nest):
            least[number] = 0
    if constant is not None:
        least[constant] = 0
        if constant in nest.padded:  # which a pack at the root does
            del least[constant]
    panels = [i for i, reads in least.items() if panelable(nest, nest.operands[i], vector, reads)]
    strided = [i for i in panels if nest.operands[i].stride_of(vector) != 1]
    sets = {(), tuple(strided), tuple(panels)}
    if constant in panels:
        sets = {tuple(sorted({*chosen, constant})) for chosen in sets}
    caches = [False]
    if cacheable(nest, vector):
        caches.append(True)
    found = [
        Candidate(vector, chosen, cached, constant=constant)
        for chosen in sorted(sets)
        for cached in caches
    ]
    swept = Candidate(vector, sweep=True, constant=constant)
    return [*found, swept] if sweeps(nest, vector) else found


def panelable(nest: Nest, operand: Operand, axis: int, least: int) -> bool:
    """Whether a copy of the operand is contiguous along `axis`, and read often enough to pay."""
    moved = [dim.coefficients[axis] for dim in operand.dims if dim.coefficients[axis]]
    again = math.prod(nest.axes[a].extent for a in nest.spatial if not operand.stride_of(a))
    return moved == [1] and operand.stride_of(axis) != 0 and again >= least


def cacheable(nest: Nest, vector: int) -> bool:
    """Whether vectors of the output are scattered, and collecting them first is possible."""
    output = nest.output
    real = [a for a, axis in enumerate(nest.axes) if axis.extent > 1]
    walks = [[dim.coefficients[a] for a in real] for dim in output.dims]
    single = all(sum(map(bool, each)) <= 1 for each in (*walks, *zip(*walks, strict=True)))
    return single and nest.axes[vector].extent > 1 and output.stride_of(vector) not in (0, 1)


def sweeps(nest: Nest, vector: int) -> bool:
    """Whether an input is read along the vectors, and each of its elements just once."""
    once = (
        op.stride_of(vector) == 1
        and all(op.stride_of(a) or nest.axes[a].extent == 1 for a in nest.spatial)
        for op in nest.inputs
    )
    steps = math.prod(nest.axes[a].extent for a in nest.reductions)
    return steps >= SWEEP_STEPS**2 and not nest.axes[vector].reduction and any(once)


def unpacked(nest: Nest, option: Candidate) -> Iterator[Operand]:
    """The operands that the register tile reads or writes where they are."""
    for number, operand in enumerate(nest.operands):
        if number not in option.panels and (number or not option.cached):
            yield operand


def tiles(nest: Nest, target: Target, option: Candidate) -> Iterator[tuple[tuple[int, int], ...]]:
    """Register tiles: vectors along the vector axis times rows of one other spatial axis.

    The row axes come in the order of how near their rows lie in an input: at the same price the
    nearer are better.
    """
    vector = option.vector
    budget = register_budget(nest, target)
    lanes = target.lanes(nest.dtype)
    others = (a for a in nest.spatial if a != vector and nest.axes[a].extent > 1)
    spatial = sorted(others, key=lambda a: nearest(nest, a))
    if nest.axes[vector].reduction:
        widths: list[int | None] = [None]
    else:
        room = min(budget, SWEEP_VECTORS) if option.sweep else budget
        most = min(math.ceil(nest.axes[vector].extent / lanes), room)
        widths = [n for n in (1, 2, 3, 4, 6, 8, 12) if n <= most]
    sliding = {} if nest.axes[vector].reduction else windows(nest, vector)
    columns = math.ceil(nest.axes[vector].extent / lanes)
    for width in widths:
        head = () if width is None else ((vector, width * lanes),)
        yield head
        for axis in spatial:
            extent, most = nest.axes[axis].extent, budget // (width or 1)
            counts = row_counts(extent, most)
            if axis not in sliding or width is None:
                yield from ((*head, (axis, rows)) for rows in sorted(counts))
                continue
            unrolled = target.unroll // (sliding[axis].terms * width)
            for rows in sorted(counts | row_counts(extent, min(most, unrolled))):
                # Registers left free take in the loop around the tile (`form.first_fit`).
                whole = rows * columns <= budget and not option.panels
                yield ((vector, (columns if whole else width) * lanes), (axis, rows))


def nearest(nest: Nest, axis: int) -> float:
    """The least distance, in elements, that a step along an axis moves an input that it moves."""
    return min(
        (abs(op.stride_of(axis)) for op in nest.inputs if op.stride_of(axis)), default=math.inf
    )


def row_counts(extent: int, most: int) -> set[int]:
    """Row counts of a tile worth trying: the largest few, and those that leave no tail."""
    top = min(extent, most)
    exact = [n for n in range(2, top + 1) if extent % n == 0]
    return {n for n in (*range(max(2, top - 2), top + 1), *exact[-2:]) if n > 1}


def arrange(schedule: Schedule, target: Target, option: Candidate, threads: int = 1) -> Schedule:
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
        schedule = cut_sweep(schedule, option, threads)
    else:
        schedule = unroll_innermost(schedule, target, tile)
    tiled = {axis for axis, size in tile.items() if size >= nest.axes[axis].extent}
    loops = schedule.loops
    streamed = {a: stream_bytes(nest, a, tile) for a in nest.spatial}
    around = {
        axis
        for number in option.panels
        for axis in nest.spatial
        # All positions of a window share one panel.
        if nest.operands[number].stride_of(axis)
        and (axis == option.vector or not shifts(nest.operands[number], axis, nest))
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
        if option.sweep and loop.step > tile.get(loop.axis, 1):
            return (-1, 0.0, at)
        if loop.axis in around:
            return (1 if loop.axis == schedule.vector else 0, -streamed[loop.axis], at)
        return (2, -streamed[loop.axis], at)

    order = sorted(range(len(loops)), key=rank)
    counts = [sum(rank(at)[0] < level for at in order) for level in (2, 3)]
    return with_packs(reorder(schedule, order), option, *counts)


def cut_sweep(schedule: Schedule, option: Candidate, threads: int) -> Schedule:
    """Split the longest reduction, so that a few of its steps are done at a time, and the vector
    axis into one long stretch for each thread."""
    nest = schedule.nest
    axis = max(nest.reductions, key=lambda a: nest.axes[a].extent)
    if nest.axes[axis].extent > SWEEP_STEPS:
        schedule = split(schedule, position(schedule, axis), SWEEP_STEPS)
    at = position(schedule, option.vector)
    stretch = -(-schedule.trips(at) // threads)
    return split(schedule, at, stretch) if threads > 1 and stretch > 1 else schedule


def with_packs(schedule: Schedule, option: Candidate, panels: int, tiles: int) -> Schedule:
    """Put panels inside the first `panels` loops, and the write cache inside the first `tiles`."""
    nest, vector = schedule.nest, option.vector
    for number in option.panels:
        order = lanes_last(nest.operands[number], vector)
        schedule = pack(schedule, number, order, panels - 1 if panels else "root")
    for number in nest.padded:
        if number not in (*option.panels, option.constant):
            loops = padded_in(schedule, nest.operands[number])
            schedule = pack(schedule, number, None, loops - 1) if loops else schedule
    if option.constant is not None and option.constant not in option.panels:
        operand = nest.operands[option.constant]
        rows = [a for a, _ in option.tile if a != vector and operand.stride_of(a)]
        schedule = pack(schedule, option.constant, lanes_last(operand, rows[0]) if rows else None)
    if option.cached:
        order = lanes_last(nest.output, vector)
        schedule = pack(schedule, 0, order, tiles - 1 if tiles else "root")
    return schedule


def padded_in(schedule: Schedule, operand: Operand) -> int:
    """How many outermost loops each pick a part of the operand that can be padded by itself.

    One plane of an image at a time stays in cache where the whole padded copy would not.
    """
    nest = schedule.nest
    beyond = operand.padded_dims(nest.axes)
    count = 0
    for at, loop in enumerate(schedule.loops):
        if any(dim.coefficients[loop.axis] for dim in beyond) and schedule.trips(at) > 1:
            break
        if nest.axes[loop.axis].reduction:
            break
        if operand.stride_of(loop.axis):
            count = at + 1
        elif schedule.trips(at) > 1:
            break
    return count


def reread_at(schedule: Schedule, number: int) -> int | str:
    """Where to pack an operand: around the outermost loop that reads (of the output: adds to) its
    box again; "root" if that is outermost, or there is none."""
    nest, operand = schedule.nest, schedule.nest.operands[number]
    for at, loop in enumerate(schedule.loops):
        still = nest.axes[loop.axis].reduction if number == 0 else not operand.stride_of(loop.axis)
        if still and schedule.trips(at) > 1:
            return at - 1 if at else "root"
    return "root"


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
    """Mark the outermost spatial loop with enough trips for the threads as parallel.

    Not one whose chunks would often write to the same line: then the next. A nest of less work than
    it takes to wake a thread stays with one; so does one whose narrow output is visited again,
    since its partial sums lie in a write cache around all reductions.
    """
    nest = schedule.nest
    narrow = is_narrow(nest.output.dtype)
    work = max(nest.flops / SHARED_FLOPS, nest.min_bytes / SHARED_BYTES)
    if threads < 2 or work < 1:
        return schedule
    caches = [pack.at for pack in schedule.packs if pack.operand == 0]
    last = min((at if isinstance(at, int) else -1 for at in caches), default=len(schedule.loops))
    seen: set[int] = set()
    for at, loop in enumerate(schedule.loops[: last + 1]):
        reduction = nest.axes[loop.axis].reduction
        if reduction and narrow and schedule.trips(at) > 1:
            break
        enough = loop.axis not in seen and not reduction and schedule.trips(at) >= threads
        seen.add(loop.axis)
        if enough and contended_visits(schedule, at, threads) <= CONTENDED_VISITS * work:
            return parallel(schedule, at)
    return schedule


def contended_visits(schedule: Schedule, at: int, threads: int) -> int:
    """How often a chunk of loop `at` comes to a line that another one writes, too.

    Once for every point of the axes whose strides in the output are larger, and again whenever the
    reductions around the loop come back to it.
    """
    nest, loop = schedule.nest, schedule.loops[at]
    stride = abs(nest.output.stride_of(loop.axis))
    chunk = max(1, schedule.trips(at) // (CHUNKS_EACH * threads)) * loop.step
    if chunk * stride * nest.output.item_bytes >= UNCONTENDED_BYTES:
        return 0
    again = math.prod(
        schedule.trips(outer)
        for outer in range(at)
        if nest.axes[schedule.loops[outer].axis].reduction
    )
    rows = math.prod(
        axis.extent
        for number, axis in enumerate(nest.axes)
        if abs(nest.output.stride_of(number)) > stride
    )
    return again * rows
