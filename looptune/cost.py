"""What a schedule costs on a target, in predicted cycles: no code is made, nothing is timed.

The loops are those of `looptune.lower.form`. A register tile is priced by the ports and latencies
that its straight-line body occupies, weighted over full tiles and tails; every level of cache by
the lines that must come from beyond it, each operand's footprint being refetched by the loops
outside the outermost position where everything fits; copies, epilogues, loop overhead and
threads are added. Deterministic, and a function of the Target alone: the same anywhere.

`COST_VERSION` is raised when predictions change. The constants were fitted to measured schedules
of generated shapes (`experiments/cost_model.py`), never to the collection of real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, product

from looptune.errors import LoweringError
from looptune.ir import Operand
from looptune.lower.form import STEP_SIZE, Form, form_of, step_kind
from looptune.lower.packs import is_shared
from looptune.schedule import Schedule
from looptune.target import Target

COST_VERSION = 1
LINE_BYTES = 64
ISSUED = 4.5  # instructions a cycle, sustained
SECONDARY = 0.15  # of what a busier port hides
TILE_OVERHEAD = 12.0  # cycles to enter a register tile: control, switches, first loads
LOOP_OVERHEAD = 3.0  # cycles of an iteration of a real loop
ROLL_OVERHEAD = 1.5  # of a rolled reduction around the accumulators
LINE_CYCLES = (1.2, 5.0, 11.0)  # a line from the second level, the third, and memory
APART = 2.0  # times as much where lines do not follow each other
STORE = 1.5  # a vector stored
LANES_SUMMED = 10.0  # the lanes of an accumulator summed and one element stored
EVERY_SECOND = 3.0  # port uses to read every second element
WIDENED = 1.5  # on top, for a vector that is converted
COPIED = {"unit": 0.35, "turned": 0.9, "gathered": 2.5}  # cycles an element of a copy
COPIED_OUT = 1.0  # times as much for a write cache, copied to where the output is
PIECES = 0.0  # cycles of a tile for every further length of its pieces: mispredicted branches
SPLIT = 0.0  # port uses of a vector that straddles two cache lines, on top
SEEN = 0.4  # of the shorter of arithmetic and traffic: the rest hides behind the longer
HELD = 0.8  # of a cache is for the operands: other data is in it, too
WAKE = 8000.0  # cycles to share a loop among threads

Lines = tuple[float, bool]  # how many, and whether they lie apart


@dataclass(frozen=True)
class Cost:
    """Predicted cycles of one call, and where they go."""

    compute: float
    traffic: float
    copies: float
    overhead: float

    @property
    def cycles(self) -> float:
        """All of it; part of the traffic hides behind the arithmetic."""
        busy = max(self.compute, self.traffic) + SEEN * min(self.compute, self.traffic)
        return busy + self.copies + self.overhead


def predict(schedule: Schedule, target: Target, threads: int = 1) -> Cost:
    """The cost of a schedule; raises `LoweringError` where it is over a limit of the target."""
    if schedule.nest.points == 0:
        return Cost(0.0, 0.0, 0.0, 1.0)
    return cost_of(form_of(schedule, target), threads)


def cost_of(form: Form, threads: int = 1) -> Cost:
    """The cost of a schedule in its form for registers."""
    pieces = pieces_at_scope(form)
    compute, overhead = tiles_cost(form, pieces)
    traffic = traffic_cost(form)
    overhead += loops_cost(form)
    if form.trips == 1 or threads < 2:
        return Cost(compute, traffic, copies_cost(form, 1.0), overhead)
    share = math.ceil(form.trips / threads) / form.trips
    copies = copies_cost(form, share)
    return Cost(compute * share, traffic * share, copies, overhead * share + WAKE)


def pieces_at_scope(form: Form) -> dict[int, dict[int, int]]:
    """Per axis, how often a piece of each length is left to the register tile."""
    found = {axis: {whole.extent: 1} for axis, whole in enumerate(form.nest.axes)}
    for loop in form.loops[: form.scope]:
        found[loop.axis] = cut(found[loop.axis], loop.step)
    return found


def cut(lengths: Mapping[int, int], step: int) -> dict[int, int]:
    """Pieces of at most `step`, from pieces of these lengths."""
    found: dict[int, int] = {}
    for length, count in lengths.items():
        full, rest = divmod(length, step)
        if full:
            found[step] = found.get(step, 0) + full * count
        if rest:
            found[rest] = found.get(rest, 0) + count
    return found


def tiles_cost(form: Form, pieces: Mapping[int, Mapping[int, int]]) -> tuple[float, float]:
    """Cycles of all register tiles: arithmetic with its loads and stores, and entering them."""
    nest = form.nest
    inputs = form.operands[1 : 1 + len(nest.inputs)]
    uses = [
        (vector_uses(form, operand), [operand.stride_of(axis) != 0 for axis in form.tile])
        for operand in inputs
    ]
    body = max(1.0, math.prod(unrolled_terms(form)))
    reductions = {loop.axis for loop in (*form.rolled, *form.unrolled)}
    terms, visits = 1.0, 1.0
    for axis in nest.reductions:
        count = sum(pieces[axis].values())
        visits *= count
        if axis in reductions:
            length = nest.axes[axis].extent / count
            terms *= math.ceil(length / form.lanes) if axis == form.vector else length
    others = [a for a in nest.spatial if a not in form.tile]
    outside = math.prod([sum(pieces[a].values()) for a in others])
    compute = overhead = 0.0
    kinds = math.prod([len(pieces[axis]) for axis in nest.spatial])
    rolling = ROLL_OVERHEAD * terms / body if form.rolled else 0.0
    finish = finish_cycles(form, revisited=visits > 1)
    for lengths in product(*[pieces[axis].items() for axis in form.tile]):
        times = outside * visits * math.prod([many for _, many in lengths])
        points, term = term_cycles(form, [length for length, _ in lengths], uses)
        compute += times * (terms * term + rolling + points * finish)
        overhead += times * (TILE_OVERHEAD + PIECES * (kinds - 1))
    return compute, overhead


def term_cycles(
    form: Form, extents: Sequence[int], uses: Sequence[tuple[float, Sequence[bool]]]
) -> tuple[int, float]:
    """Accumulators of a register tile of these `extents`, and cycles of a term of each; `uses` are
    port uses to read a vector of every input, and which axes of the tile move it."""
    nest, target = form.nest, form.target
    sizes = [
        len(form.leaves(n)) if axis == form.vector else n
        for axis, n in zip(form.tile, extents, strict=True)
    ]
    points = math.prod(sizes)
    reads = []
    for each, moves in uses:
        moved = math.prod(compress(sizes, moves))
        reads.append((moved, moved * each))
    spare = target.vector_registers - points
    if len(reads) == 2 and min(reads[0][0], reads[1][0]) > max(1, spare - 1):
        reads[0] = (points, points * uses[0][0])
    loads = sum([used for _, used in reads])
    folded = points if any([count == used == points for count, used in reads]) else 0
    copies = max(1, min(spare // max(1, points), 8))
    chain = target.fma_latency / copies if nest.reductions else 0.0
    ports = [
        points / target.fma_per_cycle,
        loads / target.loads_per_cycle,
        (points + loads - folded) / ISSUED,
    ]
    busiest = max(ports)
    return points, max(busiest, chain) + SECONDARY * (sum(ports) - busiest)


def unrolled_terms(form: Form) -> list[float]:
    """Terms of a straight-line body, by axis."""
    found: dict[int, float] = {}
    longest = {axis: lengths[0] for axis, lengths in form.tile_ranges().items()}
    for loop in form.rolled:
        longest[loop.axis] = min(loop.step, longest[loop.axis])
    for loop in form.unrolled:
        length = longest[loop.axis]
        found[loop.axis] = length / form.lanes if loop.axis == form.vector else length
    return list(found.values())


def vector_uses(form: Form, operand: Operand) -> float:
    """Port uses to read one vector of an operand."""
    stride = 0 if form.vector is None else operand.stride_of(form.vector)
    uses = {0: 1.0, 1: 1.0, 2: EVERY_SECOND}.get(stride, 1.5 * form.lanes)
    if SPLIT and stride == 1 and straddles(form, operand):
        uses += SPLIT * form.target.vector_bytes / LINE_BYTES
    return uses + (WIDENED if form.format_of(operand) else 0.0)


def straddles(form: Form, operand: Operand) -> bool:
    """Whether some vectors of an operand begin inside a cache line."""
    line = LINE_BYTES // operand.item_bytes
    return any(
        operand.stride_of(axis) % line for axis in range(len(form.nest.axes)) if axis != form.vector
    )


def finish_cycles(form: Form, revisited: bool) -> float:
    """Cycles to start, finish and store one accumulator of a tile."""
    nest = form.nest
    output = form.operands[0]
    if form.reduces_lanes:
        store = LANES_SUMMED
    elif form.vector is None or output.stride_of(form.vector) in (0, 1):
        store = STORE
    else:
        store = 2.0 if form.transposed is not None else 1.5 * form.lanes
    steps = sum([STEP_SIZE[step_kind(step)] for step in nest.epilogue])
    extras = sum([vector_uses(form, operand) for operand in nest.extras])
    loaded = 1.0 if revisited or nest.accumulate else 0.3
    return store + loaded + steps / 2 + extras / 2


def traffic_cost(form: Form) -> float:
    """Cycles that lines take from beyond each level of cache."""
    inward = lines_inward(form)
    total = 0.0
    for level, size in enumerate(form.target.cache_bytes):
        fits = (p for p, (_, touched) in enumerate(inward) if touched <= HELD * size)
        at = next(fits, len(form.loops))
        if at == 0 and level > 0:
            break  # all of it fits here: nothing comes from further away
        for number, operand in enumerate(form.operands):
            count, apart = inward[at][0][number]
            fetched = count * refetches(form, operand, at)
            writes = 2.0 if number == 0 else 1.0
            cycles = LINE_CYCLES[level] * (APART if apart else 1.0)
            total += fetched * writes * cycles
    return total


def lines_inward(form: Form) -> list[tuple[list[Lines], float]]:
    """By position from the outside, the lines of every operand that lie below, and the bytes of
    all: up to the position where the nearest cache holds them, or to the innermost."""
    near = HELD * form.target.cache_bytes[0]
    lines = [lines_below(operand, form.ranges[0]) for operand in form.operands]
    found = [(lines, bytes_of(lines))]
    for loop, ranges in zip(form.loops, form.ranges[1:], strict=True):
        if found[-1][1] <= near:
            break
        lines = [
            lines_below(operand, ranges) if operand.stride_of(loop.axis) else before
            for operand, before in zip(form.operands, lines, strict=True)
        ]
        found.append((lines, bytes_of(lines)))
    return found


def bytes_of(lines: Iterable[Lines]) -> float:
    """Bytes of so many cache lines of every operand."""
    return LINE_BYTES * sum([count for count, _ in lines])


def refetches(form: Form, operand: Operand, at: int) -> float:
    """How often the lines below position `at` are fetched: not for loops just outside of it that
    do not move the operand."""
    factor, again = 1.0, False
    for position in range(at - 1, -1, -1):
        loop = form.loops[position]
        again = again or operand.stride_of(loop.axis) != 0
        if again:
            factor *= -(-form.ranges[position][loop.axis][0] // loop.step)
    return max(1.0, factor)


def lines_below(operand: Operand, ranges: Mapping[int, tuple[int, ...]]) -> Lines:
    """Cache lines that pieces of these lengths touch, and whether they lie apart."""
    size = operand.item_bytes
    run, rows = 1, 1.0
    for stride, axis in nearest_first(operand.moves):
        extent = ranges[axis][0]
        if stride <= run:  # continues the run, or overlaps it
            run = max(run, stride * (extent - 1) + run)
        else:
            rows *= extent
    per_row = max(1.0, run * size / LINE_BYTES)
    return rows * per_row, rows > 1 and run * size < 4 * LINE_BYTES


@lru_cache(maxsize=1 << 10)
def nearest_first(moves: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """How far an operand moves along the axes that move it, and which they are."""
    return tuple(sorted((abs(stride), axis) for axis, stride in enumerate(moves) if stride))


def copies_cost(form: Form, share: float) -> float:
    """Cycles of all packs, one thread's `share` of those that threads share."""
    total = 0.0
    for number, buffer in form.packed.root.items():
        times = COPIED_OUT if number == 0 else 1.0
        times *= share if is_shared(buffer) else 1.0
        total += times * copy_cycles(form, form.packed.nest.operands[number], buffer.source)
    for pack in form.packed.inner:
        times = COPIED_OUT if pack.number == 0 else 1.0
        if form.parallel is not None and pack.depth > form.parallel:
            times *= share
        for position, loop in enumerate(form.loops[: pack.depth]):
            times *= -(-form.ranges[position][loop.axis][0] // loop.step)
        total += times * copy_cycles(form, pack.operand, pack.source)
    return total


def copy_cycles(form: Form, copy: Operand, source: Operand) -> float:
    """Cycles to copy all of `copy` once."""
    elements = math.prod(copy.shape)
    walked = [
        (dim.stride, outside.stride)
        for dim, outside in zip(copy.dims, source.dims, strict=True)
        if dim.size > 1
    ]
    along = min(walked, default=(1, 1))[1]  # how far the source moves where the copy is contiguous
    if along in (0, 1):
        each = COPIED["unit"]
    else:
        each = COPIED["turned" if 1 in source.strides else "gathered"]
    return elements * each * form.target.vector_bytes / 64 * copy.item_bytes / 4 + 20.0


def loops_cost(form: Form) -> float:
    """Cycles of the iterations of all real loops."""
    total, times = 0.0, 1.0
    for position, loop in enumerate(form.loops[: form.scope]):
        times *= -(-form.ranges[position][loop.axis][0] // loop.step)
        total += times * LOOP_OVERHEAD
    return total


def ranked(schedules: Iterable[Schedule], target: Target, threads: int = 1) -> list[Schedule]:
    """Those of the schedules that can be lowered, the cheapest first; equal ones once."""
    found: dict[str, tuple[float, Schedule]] = {}
    for schedule in schedules:
        if schedule.identity not in found:
            try:
                cycles = predict(schedule, target, threads).cycles
            except LoweringError:
                continue
            found[schedule.identity] = (cycles, schedule)
    order = sorted(found.items(), key=lambda item: (item[1][0], item[0]))
    return [schedule for _, (_, schedule) in order]
