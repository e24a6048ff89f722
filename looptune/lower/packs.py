"""Packs at the root: an input copied into contiguous scratch, padded and reordered.

A pack is itself nests: one copy of the part that lies inside the tensor, and for each dimension
that hangs over one fill below and one above it. They go through the same lowering.
"""

from __future__ import annotations

from dataclasses import replace

from looptune.ir import Axis, Dim, Nest, Operand
from looptune.lower.buffers import Box, Buffer
from looptune.lower.form import form_of
from looptune.lower.nest import Ops, Place, emit_nest
from looptune.program import SCRATCH
from looptune.schedule import Loop, Schedule
from looptune.target import Target

COPY_SHARE = 8  # a copy or fill may take this part of a kernel's instructions


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
    small = replace(target, code_instructions=target.code_instructions // COPY_SHARE)
    form = form_of(copy_schedule(nest, buffer.order, target), small)
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


def contiguous_dim(source: Operand) -> int | None:
    """The dimension along which the source is contiguous, where it has more than one element."""
    unit = [dim.coefficients.index(1) for dim in source.dims if dim.stride == 1 and dim.size > 1]
    return unit[0] if unit else None


def copy_schedule(nest: Nest, order: tuple[int, ...], target: Target) -> Schedule:
    """The copy in buffer order, long rows in strips of eight vectors.

    Where the source is contiguous along another dimension, square blocks of both are transposed.
    """
    lanes = target.lanes(nest.dtype)
    across = contiguous_dim(nest.inputs[0])
    if order and across not in (None, order[-1]) and nest.axes[order[-1]].extent > 1:
        assert across is not None
        along = order[-1]
        outer = [Loop(dim) for dim in order if dim not in (across, along)]
        block = (Loop(along, lanes), Loop(across, lanes), Loop(along), Loop(across))
        loops = (*outer, *(loop for loop in block if loop.step < nest.axes[loop.axis].extent))
        return Schedule(nest, loops, vector=across, actions=(("copy", ()),))
    strip = 8 * lanes
    loops = [Loop(dim) for dim in order]
    inner = order[-1] if order else None
    if inner is not None and nest.axes[inner].extent > strip:
        loops.insert(-1, Loop(inner, strip))
    return Schedule(nest, tuple(loops), actions=(("copy", ()),))
