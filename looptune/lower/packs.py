"""Packs: operands copied into contiguous scratch, reordered, and padded at the root.

A pack is itself a nest, of moves: one axis for every dimension, with its stride in the tensor and
in the copy. A pack at the root copies the part that lies inside the tensor, and for each
dimension that hangs over fills one part below and one above it. All go through the same lowering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from looptune.dtypes import DType
from looptune.ir import Axis, Dim, Nest, Operand, Reduction
from looptune.lower.buffers import Box, Buffer, Inner
from looptune.lower.form import Form, form_of, within_reach
from looptune.lower.nest import NONE_USED, Ops, Place, Registers, Through, Way, emit_nest
from looptune.lower.region import Access
from looptune.program import SCRATCH
from looptune.schedule import Loop, Schedule, parallel
from looptune.target import Target

COPY_SHARE = 8  # a copy or fill may take this part of a kernel's instructions
SHARED_PACK_BYTES = 1 << 18  # one core copies so many in some 5 microseconds
MANY_TRIPS = 32


class Move(NamedTuple):
    """One dimension of a copy: its extent, and the strides of what is written and read."""

    extent: int
    written: int
    read: int


def emit_pack(
    buffer: Buffer, target: Target, into: Place | None = None, source: Place | None = None
) -> tuple[Ops, Registers]:
    """Code that fills the buffer of a root pack, and the registers it uses.

    The buffer lies in the scratch and the source is its operand, unless other places are given.
    """
    places = into or Place(SCRATCH, buffer.offset), source or Place(buffer.number, 0)

    def emit(part: Box, fill: float | None) -> tuple[Ops, Registers]:
        form, there = part_of(buffer, part, target, fill, places)
        return emit_copy(form, there, fill)

    return emit_padded(buffer.box, inside_of(buffer), buffer.source.fill, emit)


def emit_around(buffer: Buffer, target: Target) -> tuple[Ops, Registers]:
    """Code that fills what a root pack adds around its tensor."""
    places = Place(SCRATCH, buffer.offset), Place(buffer.number, 0)

    def emit(part: Box, fill: float | None) -> tuple[Ops, Registers]:
        if fill is None:
            return (), NONE_USED
        form, there = part_of(buffer, part, target, fill, places)
        return emit_copy(form, there, fill)

    return emit_padded(buffer.box, inside_of(buffer), buffer.source.fill, emit)


def emit_shared(buffer: Buffer, target: Target) -> tuple[Ops, Registers, int]:
    """Code by which threads share the copy that `emit_around` leaves, and its parallel trips."""
    places = Place(SCRATCH, buffer.offset), Place(buffer.number, 0)
    form, there = part_of(buffer, inside_of(buffer), target, None, places, shared=True)
    return *emit_copy(form, there, None), form.trips


def is_shared(buffer: Buffer) -> bool:
    """Whether a copy is worth waking threads for, and holds elements of the tensor at all."""
    size = math.prod(buffer.sizes) * buffer.operand.item_bytes
    return size >= SHARED_PACK_BYTES and all(low < high for low, high in inside_of(buffer))


def inside_of(buffer: Buffer) -> Box:
    """The part of a root pack's box that lies inside the tensor."""
    return tuple(
        (max(low, 0), max(low, 0, min(high, dim.size)))
        for (low, high), dim in zip(buffer.box, buffer.source.dims, strict=True)
    )


def emit_padded(
    box: Box, inside: Box, fill: float, emit: Callable[[Box, float | None], tuple[Ops, Registers]]
) -> tuple[Ops, Registers]:
    """Copy the part of a box that is `inside` the tensor, and fill what lies around it."""
    if any(low >= high for low, high in inside):
        return emit(box, fill)
    ops, used = emit(inside, None)
    remaining = list(box)
    for dim, ((low, high), (first, last)) in enumerate(zip(box, inside, strict=True)):
        for side in ((low, first), (last, high)):
            if side[0] < side[1]:
                more, registers = emit((*remaining[:dim], side, *remaining[dim + 1 :]), fill)
                ops, used = ops + more, used | registers
        remaining[dim] = inside[dim]
    return ops, used


def part_of(
    buffer: Buffer,
    part: Box,
    target: Target,
    fill: float | None,
    places: tuple[Place, Place],
    shared: bool = False,
) -> tuple[Form, tuple[Place, Place]]:
    """The copy of `part` of the tensor into the buffer, or what fills it, and where both begin;
    `places` are of buffer and tensor."""
    source, copy = buffer.source, buffer.operand
    dims = list(zip(part, buffer.box, buffer.strides, source.strides, strict=True))
    moves = [Move(last - first, to, at if fill is None else 0) for (first, last), _, to, at in dims]
    to = sum((first - low) * stride for (first, _), (low, _), stride, _ in dims)
    at = sum(first * stride for (first, _), _, _, stride in dims)
    into, out_of = places
    here = Place(into.operand, into.offset + copy.item_bytes * to)
    there = Place(out_of.operand, out_of.offset + source.item_bytes * at) if fill is None else here
    return copy_form(tuple(moves), copy.dtype, source.dtype, target, shared=shared), (here, there)


def emit_box(
    pack: Inner,
    outside: Access,
    copy: Place | Through,
    sizes: Mapping[int, int],
    way: Way,
    taken: Registers,
    *,
    nest: Nest,
    target: Target,
) -> tuple[Ops, Registers]:
    """Code that copies the box of a pack inside a loop, and the registers used when it ends.

    `outside` points at the tensor where every axis is at the start of its piece, `copy` is where
    the copy begins, `sizes` are the pieces. An input is read into its copy; the output's copy is
    written back, combined ("add") with what is there by the reduction of `nest`, or read first.
    """
    if pack.number:
        return emit_read(pack, outside, copy, sizes, way, target, taken)
    moves = moves_back(pack, sizes)
    there = Through(outside.pointer, outside.bias)
    places: tuple[Place | Through, ...] = (there, copy)
    if way == "in":
        moves, places = [Move(n, read, written) for n, written, read in moves], (copy, there)
        form = copy_form(tuple(moves), pack.operand.dtype, pack.source.dtype, target)
    else:
        add = nest.reduction if way == "add" else None
        form = copy_form(tuple(moves), pack.source.dtype, pack.operand.dtype, target, add)
    return emit_copy(form, places, None, taken)


def emit_read(
    pack: Inner,
    outside: Access,
    copy: Place | Through,
    sizes: Mapping[int, int],
    way: Way,
    target: Target,
    taken: Registers,
) -> tuple[Ops, Registers]:
    """Code that fills the copy of an input: with what lies in the tensor, around it, or both."""
    firsts, extents = [], []
    for source in pack.source.dims:
        reach = [c * (sizes[axis] - 1) for axis, c in enumerate(source.coefficients)]
        firsts.append(sum(r for r in reach if r < 0))
        extents.append(sum(map(abs, reach)) + 1)
    inside = tuple(
        (before, max(before, extent - behind))
        for extent, (before, behind) in zip(extents, pack.margins, strict=True)
    )

    def emit(part: Box, fill: float | None) -> tuple[Ops, Registers]:
        inner, outer, moves = 0, 0, []
        for (low, high), first, dim, source in zip(
            part, firsts, pack.operand.dims, pack.source.dims, strict=True
        ):
            moves.append(Move(high - low, dim.stride, 0 if fill is not None else source.stride))
            inner += (dim.offset + first + low) * dim.stride
            outer += (first + low) * source.stride
        here = copy._replace(offset=copy.offset + pack.operand.item_bytes * inner)
        there = Through(outside.pointer, outside.bias + pack.source.item_bytes * outer)
        places = (here, here if fill is not None else there)
        form = copy_form(tuple(moves), pack.operand.dtype, pack.source.dtype, target)
        return emit_copy(form, places, fill, taken)

    def wanted(part: Box, fill: float | None) -> tuple[Ops, Registers]:
        skipped = "around" if fill is None else "inside"
        return ((), NONE_USED) if way == skipped else emit(part, fill)

    return emit_padded(tuple((0, n) for n in extents), inside, pack.source.fill, wanted)


def moves_back(pack: Inner, sizes: Mapping[int, int]) -> list[Move]:
    """The moves that write a copy back, from where every axis is at the start of its piece."""
    moves = []
    for source, dim in zip(pack.source.dims, pack.operand.dims, strict=True):
        moved = [a for a, c in enumerate(source.coefficients) if c and sizes[a] > 1]
        step = source.coefficients[moved[0]] if moved else 0
        moves.append(Move(sizes[moved[0]] if moved else 1, step * source.stride, dim.stride))
    return moves


def copy_nest(moves: Iterable[Move], written: DType, read: DType) -> Nest:
    """to[i] = from[i] over the moves, those merged that are contiguous on both sides."""
    merged: list[Move] = []
    for move in sorted(moves, key=lambda move: -abs(move.written)):
        outer = merged[-1] if merged else None
        if move.extent == 1:
            continue
        if outer and outer[1:] == (move.written * move.extent, move.read * move.extent):
            merged[-1] = Move(outer.extent * move.extent, move.written, move.read)
        else:
            merged.append(move)
    axes = tuple(Axis(f"d{i}", move.extent) for i, move in enumerate(merged))
    units = [tuple(int(i == other) for other in range(len(merged))) for i in range(len(merged))]

    def operand(name: str, dtype: DType, strides: Sequence[int]) -> Operand:
        dims = zip(merged, strides, units, strict=True)
        return Operand(
            name, dtype, tuple(Dim(move.extent, step, unit) for move, step, unit in dims)
        )

    to = operand("to", written, [move.written for move in merged])
    return Nest(axes, to, (operand("from", read, [move.read for move in merged]),))


@lru_cache(maxsize=256)
def copy_form(
    moves: tuple[Move, ...],
    written: DType,
    read: DType,
    target: Target,
    add: Reduction | None = None,
    shared: bool = False,
) -> Form:
    """A copy in its form for registers, with `add` one that is combined with what is there,
    `shared` one with a parallel loop.

    The two sides of a padding, and the packs of a plan's nests, have the same.
    """
    small = replace(target, code_instructions=target.code_instructions // COPY_SHARE)
    nest = copy_nest(moves, written, read)
    if add is not None:
        nest = replace(nest, accumulate=True, reduction=add)
    schedule = copy_schedule(nest, target)
    if shared and schedule.loops:
        schedule = parallel(schedule, most_trips(schedule))
    return form_of(schedule, small)


def most_trips(schedule: Schedule) -> int:
    """The outermost loop with trips for many threads, or else the one with most."""
    axes = [loop.axis for loop in schedule.loops]
    outermost = [at for at, axis in enumerate(axes) if axis not in axes[:at]]
    return max(outermost, key=lambda at: min(MANY_TRIPS, schedule.trips(at)))


def emit_copy(
    form: Form,
    places: tuple[Place | Through, ...],
    fill: float | None,
    taken: Registers = NONE_USED,
) -> tuple[Ops, Registers]:
    """Code of a copy, or with `fill` of one that reads nothing."""
    if form.nest.output.dtype == "int16x2" and fill is not None:
        fill = int(fill) & 0xFFFF
    return emit_nest(form, places, fill, taken)


def copy_schedule(nest: Nest, target: Target) -> Schedule:
    """The copy in the order it is written in, long rows in strips of eight vectors.

    Where the source is contiguous along another axis, square blocks of both are transposed.
    """
    if not nest.axes:
        return Schedule(nest)
    lanes = target.lanes(nest.dtype)
    *others, along = range(len(nest.axes))
    unit = [
        axis
        for axis in others
        if nest.inputs[0].stride_of(axis) == 1 and within_reach(nest.operands, axis, target)
    ]
    if unit:
        across = unit[0]
        blocks = [Loop(along, lanes), Loop(across, lanes), Loop(along), Loop(across)]
        outer = [Loop(axis) for axis in others if axis != across]
        kept = [x for x in blocks if x.step == 1 or x.step < nest.axes[x.axis].extent]
        return Schedule(nest, (*outer, *kept), vector=across)
    loops = [Loop(axis) for axis in others]
    if nest.axes[along].extent > 8 * lanes:
        loops.append(Loop(along, 8 * lanes))
    return Schedule(nest, (*loops, Loop(along)))
