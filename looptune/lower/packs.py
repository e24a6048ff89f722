"""Packs at the root: an input copied into contiguous scratch, padded and reordered.

A pack is itself nests: one copy of the part that lies inside the tensor, and for each dimension
that hangs over one fill below and one above it. They go through the same lowering.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from looptune.errors import LoweringError
from looptune.ir import Axis, Dim, Nest, Operand
from looptune.lower.form import form_of
from looptune.lower.nest import Ops, Place, emit_nest
from looptune.program import SCRATCH
from looptune.schedule import Loop, Pack, Schedule
from looptune.target import Target

ALIGNMENT = 64
MAX_SCRATCH = 1 << 34

Box = tuple[tuple[int, int], ...]  # per dimension, first index and one past the last


@dataclass(frozen=True)
class Buffer:
    """A packed operand: `box` of `source` (operand number `number`) at `offset` in the scratch."""

    number: int
    source: Operand
    box: Box
    order: tuple[int, ...]
    offset: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each dimension of the box."""
        return tuple(high - low for low, high in self.box)

    @property
    def strides(self) -> tuple[int, ...]:
        """Element strides of the copy, contiguous in `order`."""
        found = [0] * len(self.box)
        step = 1
        for dim in reversed(self.order):
            found[dim] = step
            step *= self.sizes[dim]
        return tuple(found)

    @property
    def end(self) -> int:
        """First aligned byte behind the copy."""
        size = math.prod(self.sizes) * self.source.item_bytes
        return self.offset + -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def operand(self) -> Operand:
        """The operand as the nest reads it from the copy."""
        dims = tuple(
            Dim(size, stride, dim.coefficients, dim.offset - low)
            for size, stride, dim, (low, _) in zip(
                self.sizes, self.strides, self.source.dims, self.box, strict=True
            )
        )
        return replace(self.source, dims=dims)


def packed_operands(schedule: Schedule) -> dict[int, Buffer]:
    """The buffers of a schedule's root packs, by operand number, laid out in the scratch."""
    nest = schedule.nest
    buffers: dict[int, Buffer] = {}
    offset = 0
    for pack in sorted(schedule.packs, key=lambda p: p.operand):
        buffer = buffer_of(nest, pack, offset)
        buffers[pack.operand] = buffer
        offset = buffer.end
    if offset > MAX_SCRATCH:
        raise LoweringError(f"packs need {offset} bytes of scratch; the limit is {MAX_SCRATCH}")
    return buffers


def buffer_of(nest: Nest, pack: Pack, offset: int) -> Buffer:
    """The box of the operand that the whole nest reads."""
    source = nest.operands[pack.operand]
    bounds = (dim.bounds(nest.axes) for dim in source.dims)
    box = tuple((low, high + 1) for low, high in bounds)
    return Buffer(pack.operand, source, box, pack.order, offset)


def emit_pack(buffer: Buffer, target: Target) -> tuple[Ops, int]:
    """Code that fills the buffer, and the scalars it uses."""
    inside = tuple(
        (max(low, 0), min(high, dim.size))
        for (low, high), dim in zip(buffer.box, buffer.source.dims, strict=True)
    )
    if any(low >= high for low, high in inside):
        return emit_copy(buffer, buffer.box, target, fill=True)
    ops, scalars = emit_copy(buffer, inside, target, fill=False)
    remaining = list(buffer.box)
    for dim, ((low, high), (first, last)) in enumerate(zip(buffer.box, inside, strict=True)):
        for side in ((low, first), (last, high)):
            if side[0] < side[1]:
                border = (*remaining[:dim], side, *remaining[dim + 1 :])
                more, used = emit_copy(buffer, border, target, fill=True)
                ops, scalars = ops + more, max(scalars, used)
        remaining[dim] = inside[dim]
    return ops, scalars


def emit_copy(buffer: Buffer, part: Box, target: Target, fill: bool) -> tuple[Ops, int]:
    """Copy `part` of the tensor into the buffer, or fill it."""
    nest = copy_nest(buffer, part)
    source = nest.inputs[0]
    if fill:
        nest = replace(nest, inputs=(replace(nest.output, name="unread"),))
    form = form_of(copy_schedule(nest, buffer.order, target), target)
    here = Place(SCRATCH, buffer.offset)
    there = here if fill else Place(buffer.number, 0)
    return emit_nest(form, (here, there), source.fill if fill else None)


def copy_nest(buffer: Buffer, part: Box) -> Nest:
    """buffer[i - box] = source[i] for i in `part`; one axis a dimension."""
    rank = len(part)
    axes = tuple(Axis(f"d{d}", high - low) for d, (low, high) in enumerate(part))
    unit = [tuple(int(d == other) for other in range(rank)) for d in range(rank)]
    written = tuple(
        Dim(size, stride, unit[d], first - low)
        for d, (size, stride, (first, _), (low, _)) in enumerate(
            zip(buffer.sizes, buffer.strides, part, buffer.box, strict=True)
        )
    )
    read = tuple(
        Dim(dim.size, dim.stride, unit[d], first)
        for d, (dim, (first, _)) in enumerate(zip(buffer.source.dims, part, strict=True))
    )
    output = Operand("packed", buffer.source.dtype, written)
    return Nest(axes, output, (replace(buffer.source, dims=read),))


def copy_schedule(nest: Nest, order: tuple[int, ...], target: Target) -> Schedule:
    """The copy in buffer order, long rows in strips of eight vectors."""
    strip = 8 * target.lanes(nest.dtype)
    loops = [Loop(dim) for dim in order]
    inner = order[-1] if order else None
    if inner is not None and nest.axes[inner].extent > strip:
        loops.insert(-1, Loop(inner, strip))
    return Schedule(nest, tuple(loops), actions=(("copy", ()),))
