"""Packed inputs: which box of a tensor is copied, and how the nest reads the copy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from looptune.errors import LoweringError
from looptune.ir import Dim, Nest, Operand
from looptune.schedule import Pack, Schedule

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


def packed_nest(schedule: Schedule) -> tuple[Nest, dict[int, Buffer]]:
    """The schedule's nest reading from its packs, and the packs by operand number."""
    nest = schedule.nest
    if not schedule.packs:
        return nest, {}
    buffers = packed_operands(schedule)
    operands = enumerate(nest.inputs, 1)
    inputs = tuple(buffers[i].operand if i in buffers else op for i, op in operands)
    return replace(nest, inputs=inputs), buffers
