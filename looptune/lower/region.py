"""Straight-line code for one register tile: accumulators, operand loads and multiply-adds.

Registers 0.. hold the accumulators (`copies` of each, to hide the latency of the FMA); the rest
are temporaries. Loads are placed by furthest next use (Belady), single-use vectors are folded
into the FMA. Where a target has no masks its last register is left to `legalize` for masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from looptune.errors import LoweringError
from looptune.ir import IDENTITY, Operand
from looptune.lower.form import Form
from looptune.program import (
    Add,
    Const,
    Extremum,
    Fma,
    FmaLoad,
    FmaSplat,
    Gather,
    Keep,
    Load,
    Mul,
    Op,
    Reduce,
    Scatter,
    Splat,
    Store,
)

Extents = Mapping[int, int]


# One vector of an operand: its pointer, the bytes from there, its lanes. A plain tuple, because
# two are made for every multiply-add and a NamedTuple costs ten times as much.
Read = tuple[int, int, int]


@dataclass(frozen=True)
class Access:
    """How an operand is addressed: its pointer and byte strides, all offsets made positive.

    `kind` says what a vector of it is: "unit", "splat" or "strided" lanes.
    """

    pointer: int
    strides: tuple[int, ...]
    lane_stride: int
    bias: int
    kind: str


@dataclass(frozen=True)
class Tile:
    """A register tile of static extents: one accumulator per point, `copies` of each."""

    form: Form
    accesses: tuple[Access, ...]
    points: tuple[tuple[Extents, int], ...]
    copies: int
    limit: int

    @property
    def temporaries(self) -> tuple[int, ...]:
        """Registers that hold no accumulator."""
        return tuple(range(len(self.points) * self.copies, self.limit))


def access_of(operand: Operand, pointer: int, form: Form, reach: Extents) -> Access:
    """The access of `operand`; `reach` is how far unrolled code moves along each axis."""
    size = operand.item_bytes
    strides = tuple(size * operand.stride_of(axis) for axis in range(len(form.nest.axes)))
    bias = sum(-strides[axis] * (n - 1) for axis, n in reach.items() if strides[axis] < 0)
    furthest = bias + sum(strides[axis] * (n - 1) for axis, n in reach.items() if strides[axis] > 0)
    if furthest > form.target.max_displacement - form.target.vector_bytes:
        raise LoweringError(
            f"unrolled code reaches {furthest} bytes past a pointer to {operand.name}; "
            f"{form.target.name} addresses {form.target.max_displacement}: use a smaller tile"
        )
    lane_stride = 0 if form.vector is None else strides[form.vector]
    kind = {0: "splat", size: "unit"}.get(lane_stride, "strided")
    if form.vector is None:
        kind = "unit"
    return Access(pointer, strides, lane_stride, bias, kind)


def offset_of(access: Access, point: Extents) -> int:
    """Bytes from the pointer to an operand's element at `point`, relative to the bias."""
    return sum(access.strides[axis] * at for axis, at in point.items())


def tile_points(form: Form, extents: Extents) -> tuple[tuple[Extents, int], ...]:
    """Every accumulator of the tile: its offsets along the axes, and its lanes."""
    points: list[tuple[Extents, int]] = [({}, 1 if form.vector is None else form.lanes)]
    for axis in form.tile:
        if axis == form.vector:
            leaves = form.leaves(extents[axis])
            points = [({**p, axis: at}, lanes) for p, _ in points for at, lanes in leaves]
        else:
            points = [({**p, axis: i}, lanes) for p, lanes in points for i in range(extents[axis])]
    return tuple(points)


def make_tile(form: Form, accesses: tuple[Access, ...], extents: Extents, terms: int) -> Tile:
    """The tile for static `extents`; `terms` is the least of terms a body gives each point."""
    target = form.target
    points = tile_points(form, extents)
    partial = any(lanes < form.lanes for _, lanes in points) or form.reduces_lanes
    limit = target.vector_registers - (1 if partial and not target.masks else 0)
    room = (limit - (target.vector_registers - budget_of(form))) // len(points)
    wanted = math.ceil(target.fma_per_cycle * target.fma_latency / len(points))
    return Tile(form, accesses, points, max(1, min(room, wanted, terms)), limit)


def budget_of(form: Form) -> int:
    """Registers for accumulators, their copies included."""
    return form.target.accumulators - (0 if form.nest.reduction == "add" else 3)


def start(tile: Tile, load: bool) -> tuple[Op, ...]:
    """Set the accumulators to the identity, or the first copies to the old output."""
    value = IDENTITY[tile.form.nest.reduction]
    count = len(tile.points)
    if not load or tile.form.reduces_lanes:
        return tuple(Const(r, value) for r in range(count * tile.copies))
    (reads,) = reads_at(tile, 0, [({}, 0)])
    loads = (read_vector(tile, tile.accesses[0], r, read) for r, read in enumerate(reads))
    return (*loads, *(Const(r, value) for r in range(count, count * tile.copies)))


def reads_at(tile: Tile, operand: int, terms: Iterable[tuple[Extents, int]]) -> list[list[Read]]:
    """The vectors of an operand, per reduction term and then per point of the tile."""
    form, access = tile.form, tile.accesses[operand]
    pointer = access.pointer
    whole = access.kind == "splat" and not form.reduces_lanes
    points = [
        (access.bias + offset_of(access, point), form.lanes if whole else lanes)
        for point, lanes in tile.points
    ]
    if form.reduces_lanes and operand:
        return [
            [(pointer, at + moved, width) for at, _ in points]
            for moved, width in ((offset_of(access, term), width) for term, width in terms)
        ]
    moves = (offset_of(access, term) for term, _ in terms)
    return [[(pointer, at + moved, lanes) for at, lanes in points] for moved in moves]


def read_vector(tile: Tile, access: Access, dst: int, read: Read) -> Op:
    """Load, splat or gather one vector."""
    pointer, offset, lanes = read
    if lanes == 1 or access.kind == "unit":
        return Load(dst, pointer, offset, lanes)
    if access.kind == "splat":
        return Splat(dst, pointer, offset, lanes)
    return Gather(dst, pointer, offset, access.lane_stride, lanes, tile.temporaries[-1])


def reduction_terms(form: Form, extents: Extents) -> tuple[tuple[Extents, int], ...]:
    """The terms a straight-line body adds to every accumulator, with their lanes."""
    axes = dict.fromkeys(loop.axis for loop in form.unrolled)
    terms: list[tuple[Extents, int]] = [({}, form.lanes)]
    for axis in axes:
        if axis != form.vector:
            terms = [({**t, axis: i}, lanes) for t, lanes in terms for i in range(extents[axis])]
    if not form.reduces_lanes:
        return tuple(terms)
    assert form.vector is not None
    leaves = form.leaves(extents[form.vector])
    return tuple(({**t, form.vector: at}, lanes) for t, _ in terms for at, lanes in leaves)


def body(tile: Tile, extents: Extents, first: bool = False) -> tuple[Op, ...]:
    """Add every term of the body to every accumulator; `first`: set instead of add.

    Terms run outermost, so that neighbours use different accumulators.
    """
    nest = tile.form.nest
    terms = reduction_terms(tile.form, extents)
    count = len(tile.points)
    reads = [reads_at(tile, i + 1, terms) for i in range(len(nest.inputs))]
    registers = [
        range(number % tile.copies * count, (number % tile.copies + 1) * count)
        for number in range(len(terms))
    ]
    if len(nest.inputs) == 2 and nest.reduction == "add":
        jobs = [
            job for rows in zip(registers, *reads, strict=True) for job in zip(*rows, strict=True)
        ]
        return tuple(multiply_add(tile, jobs, first))
    return tuple(
        op
        for rows in zip(registers, *reads, strict=True)
        for register, *vectors in zip(*rows, strict=True)
        for op in combine(tile, register, vectors, first)
    )


def multiply_add(tile: Tile, jobs: list[tuple[int, Read, Read]], first: bool) -> Iterable[Op]:
    """Products summed into accumulators, operands kept in registers by furthest next use."""
    target, lanes = tile.form.target, tile.form.lanes
    access = {a.pointer: a for a in tile.accesses}
    strided = any(a.kind == "strided" for a in tile.accesses[1:])
    free = list(reversed(tile.temporaries[:-1] if strided else tile.temporaries))
    uses: dict[Read, list[int]] = {}  # positions of the uses to come, the next one last
    for number in range(len(jobs) - 1, -1, -1):
        _, a, b = jobs[number]
        uses.setdefault(a, []).append(number)
        uses.setdefault(b, []).append(number)
    held: dict[Read, int] = {}
    ops: list[Op] = []

    def fetch(read: Read, other: Read) -> int:
        if read not in held:
            if not free:
                victim = max((r for r in held if r != other), key=lambda r: uses[r][-1])
                free.append(held.pop(victim))
            held[read] = free.pop()
            ops.append(read_vector(tile, access[read[0]], held[read], read))
        return held[read]

    def folded(read: Read) -> type[FmaLoad] | type[FmaSplat] | None:
        if len(uses[read]) > 1 or first or read[2] < lanes or read in held:
            return None
        kind = access[read[0]].kind
        if kind == "unit":
            return FmaLoad if target.fold else None
        return FmaSplat if kind == "splat" and target.fold_splat else None

    for register, a, b in jobs:
        if fused := folded(b):
            ops.append(fused(register, fetch(a, b), b[0], b[1]))
        elif fused := folded(a):
            ops.append(fused(register, fetch(b, a), a[0], a[1]))
        else:
            left, right = fetch(a, b), fetch(b, a)
            ops.append(Mul(register, left, right) if first else Fma(register, left, right))
        for read in (a, b):
            uses[read].pop()
            if not uses[read] and read in held:
                free.append(held.pop(read))
    return ops


def combine(tile: Tile, register: int, reads: Sequence[Read], first: bool) -> Iterable[Op]:
    """One term of a bare sum or of a maximum: read, multiply if there are two, reduce."""
    form = tile.form
    by_pointer = {a.pointer: a for a in tile.accesses}
    value, second, fill, scratch = (*tile.temporaries, -1, -1, -1)[:4]
    into = register if first else value
    yield read_vector(tile, by_pointer[reads[0][0]], into, reads[0])
    if len(reads) == 2:
        yield read_vector(tile, by_pointer[reads[1][0]], second, reads[1])
        yield Mul(into, into, second)
    if first:
        return
    if form.nest.reduction == "add":
        yield Add(register, register, value)
        return
    if form.reduces_lanes and reads[0][2] < form.lanes:
        yield Const(fill, IDENTITY[form.nest.reduction])
        yield Keep(value, value, fill, reads[0][2])
    yield Extremum(form.nest.reduction, register, register, value, scratch)


def merge_copies(tile: Tile) -> Iterable[Op]:
    """Add the copies of each accumulator into the first."""
    count = len(tile.points)
    kind = tile.form.nest.reduction
    for number in range(count, count * tile.copies):
        index = number % count
        if kind == "add":
            yield Add(index, index, number)
        else:
            yield Extremum(kind, index, index, number, tile.temporaries[0])


def finish(tile: Tile) -> Iterable[Op]:
    """Store the accumulators."""
    access = tile.accesses[0]
    scratch = tile.temporaries[0]
    for register, (point, lanes) in enumerate(tile.points):
        offset = access.bias + offset_of(access, point)
        if lanes == 1 or tile.form.reduces_lanes:
            yield Store(register, access.pointer, offset, 1, scratch)
        elif access.kind == "unit":
            yield Store(register, access.pointer, offset, lanes, scratch)
        else:
            yield Scatter(register, access.pointer, offset, access.lane_stride, lanes, scratch)


def across_lanes(tile: Tile) -> Iterable[Op]:
    """Reduce the lanes of every accumulator into its lane 0."""
    for register in range(len(tile.points)):
        yield Reduce(tile.form.nest.reduction, register, register, tile.temporaries[:2])  # type: ignore[arg-type]


def add_old(tile: Tile) -> Iterable[Op]:
    """Combine lane 0 with the old output, for sums that were kept in lanes."""
    access = tile.accesses[0]
    kind = tile.form.nest.reduction
    value, scratch = tile.temporaries[:2]
    for register, (point, _) in enumerate(tile.points):
        yield Load(value, access.pointer, access.bias + offset_of(access, point), 1)
        if kind == "add":
            yield Add(register, register, value)
        else:
            yield Extremum(kind, register, register, value, scratch)
