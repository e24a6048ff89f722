"""Packed operands: which box of a tensor is copied where, and how the nest reads the copy.

Packs at the root are copied once, whole, before the nest, and padded where the nest reads outside
the tensor. Packs inside a loop hold the box that one iteration of it touches; a pack of the output
is a write cache, computed from nothing and written back. All lie one after another in the scratch.
Copies hold elements of the accumulator's type: narrow ones are widened on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from looptune.dtypes import ACCUMULATOR, DType
from looptune.errors import LoweringError
from looptune.ir import Dim, Nest, Operand
from looptune.schedule import Pack, Schedule

ALIGNMENT = 64
MAX_SCRATCH = 1 << 34
MAX_INNER = 4  # each takes a pointer, of which machines have ten

Ranges = Mapping[int, tuple[int, ...]]  # per axis, every length its current piece can have

Box = tuple[tuple[int, int], ...]  # per dimension, first index and one past the last


@dataclass(frozen=True)
class Buffer:
    """A packed operand: `box` of `source` (operand number `number`) at `offset` in the scratch, in
    elements of `dtype`."""

    number: int
    source: Operand
    box: Box
    order: tuple[int, ...]
    offset: int
    dtype: DType

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each dimension of the box."""
        return tuple(high - low for low, high in self.box)

    @property
    def strides(self) -> tuple[int, ...]:
        """Element strides of the copy, contiguous in `order`."""
        return strides_in(self.order, self.sizes)

    @property
    def end(self) -> int:
        """First aligned byte behind the copy."""
        return aligned_end(self.offset, self.operand)

    @cached_property
    def operand(self) -> Operand:
        """The operand as the nest reads it from the copy."""
        dims = tuple(
            Dim(size, stride, dim.coefficients, dim.offset - low)
            for size, stride, dim, (low, _) in zip(
                self.sizes, self.strides, self.source.dims, self.box, strict=True
            )
        )
        return replace(self.source, dims=dims, dtype=self.dtype)


@dataclass(frozen=True)
class Inner:
    """A pack inside `depth` loops: the box of operand `number` that they leave to the others.

    `source` is the operand outside, `operand` its copy, whose element 0 belongs to the point
    where every axis is at the start of its piece. `offset` is the copy's place in the scratch.
    `margins` are, per dimension, the elements before and behind the tensor that are filled.
    """

    depth: int
    number: int
    source: Operand
    operand: Operand
    offset: int
    margins: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """First aligned byte behind the copy."""
        return aligned_end(self.offset, self.operand)


@dataclass(frozen=True)
class Packed:
    """A schedule's nest with its packs: `nest` reads from the root's, `operands` from all."""

    nest: Nest
    root: Mapping[int, Buffer]
    inner: tuple[Inner, ...]
    operands: tuple[Operand, ...]

    @property
    def scratch_bytes(self) -> int:
        """Bytes that all copies take."""
        packs: tuple[Buffer | Inner, ...] = (*self.root.values(), *self.inner)
        return packs[-1].end if packs else 0


def strides_in(order: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous array whose dimensions lie in `order`."""
    found = [0] * len(sizes)
    step = 1
    for dim in reversed(order):
        found[dim] = step
        step *= sizes[dim]
    return tuple(found)


def aligned_end(offset: int, copy: Operand) -> int:
    """First aligned byte behind a copy at `offset`."""
    size = math.prod(copy.shape) * copy.item_bytes
    return offset + -(-size // ALIGNMENT) * ALIGNMENT


def at_root(pack: Pack) -> bool:
    """Whether a pack is copied before the nest; a write cache of the whole output is not."""
    return pack.at == "root" and pack.operand > 0


def packed(schedule: Schedule) -> Packed:
    """The schedule's packs at the root, laid out in the scratch."""
    nest = schedule.nest
    packs = tuple([pack for pack in schedule.packs if at_root(pack)])
    return packed_at_root(nest, packs) if packs else Packed(nest, {}, (), nest.operands)


@lru_cache(maxsize=256)
def packed_at_root(nest: Nest, packs: tuple[Pack, ...]) -> Packed:
    """A nest with packs at the root; most schedules of a nest have the same."""
    root: dict[int, Buffer] = {}
    offset = 0
    for pack in sorted(packs, key=lambda p: p.operand):
        root[pack.operand] = buffer_of(nest, pack, offset)
        offset = root[pack.operand].end
    inputs = (root[i].operand if i in root else op for i, op in enumerate(nest.inputs, 1))
    nest = replace(nest, inputs=tuple(inputs))
    return checked(Packed(nest, root, (), nest.operands))


def with_inner(
    outer: Packed, packs: Sequence[tuple[int, Pack]], ranges: Sequence[Ranges]
) -> Packed:
    """`outer` with packs inside so many loops; `ranges[d]` are the range sets below d loops."""
    if not packs:
        return outer
    operands = list(outer.operands)
    inner: list[Inner] = []
    offset = outer.scratch_bytes
    for depth, pack in sorted(packs, key=lambda pair: (pair[0], pair[1].operand)):
        extents = [values[0] for values in ranges[depth].values()]
        source = operands[pack.operand]
        copied = source is not outer.operands[pack.operand]
        margins = outer.nest.margins[pack.operand]
        margins = ((0, 0),) * len(source.dims) if copied else margins
        dtype = copied_dtype(outer.nest, pack.operand)
        copy = copied_box(pack, source, extents, dtype)
        made = Inner(depth, pack.operand, source, copy, offset, margins)
        operands[pack.operand] = made.operand
        offset = made.end
        inner.append(made)
    return checked(Packed(outer.nest, outer.root, tuple(inner), tuple(operands)))


def checked(made: Packed) -> Packed:
    """`made`; raises `LoweringError` over the limits of scratch and of pointers."""
    if made.scratch_bytes > MAX_SCRATCH:
        raise LoweringError(
            f"packs need {made.scratch_bytes} bytes of scratch; the limit is {MAX_SCRATCH}"
        )
    if len(made.inner) > MAX_INNER:
        raise LoweringError(
            f"{len(made.inner)} packs inside loops; at most {MAX_INNER} are lowered"
        )
    return made


def buffer_of(nest: Nest, pack: Pack, offset: int) -> Buffer:
    """The box of the operand that the whole nest reads."""
    source = nest.operands[pack.operand]
    bounds = (dim.bounds(nest.axes) for dim in source.dims)
    box = tuple((low, high + 1) for low, high in bounds)
    return Buffer(pack.operand, source, box, pack.order, offset, copied_dtype(nest, pack.operand))


def copied_dtype(nest: Nest, number: int) -> DType:
    """The type of a copy: the accumulator's, but for factors of products of whole numbers."""
    return "int16x2" if number and multiplies_pairs(nest) else ACCUMULATOR[nest.dtype]


def multiplies_pairs(nest: Nest) -> bool:
    """Whether products are of int8, which registers hold as pairs of int16."""
    return nest.dtype == "int32" and len(nest.inputs) == 2


def copied_box(pack: Pack, source: Operand, extents: Sequence[int], dtype: DType) -> Operand:
    """A copy of the box of `source` that lies below loops which leave pieces of at most
    `extents`, by axis."""
    if pack.operand == 0:
        sides = written_box(source, extents)
    else:
        sides = [read_box(dim, extents) for dim in source.dims]
    return copy_of(source, pack.order, tuple(sides), dtype)


Side = tuple[int, tuple[int, ...], int]  # size, coefficients and offset of a box's dimension


@lru_cache(maxsize=1 << 10)
def copy_of(
    source: Operand, order: tuple[int, ...], sides: tuple[Side, ...], dtype: DType
) -> Operand:
    """A contiguous copy of a box; the same come again while schedules of a nest are tried."""
    strides = strides_in(order, tuple(size for size, _, _ in sides))
    dims = tuple(
        Dim(size, stride, coefficients, offset)
        for (size, coefficients, offset), stride in zip(sides, strides, strict=True)
    )
    return replace(source, dims=dims, dtype=dtype)


def read_box(dim: Dim, extents: Sequence[int]) -> Side:
    """One side of the box that pieces of these extents read."""
    reach, low = 0, 0
    for c, extent in zip(dim.coefficients, extents, strict=True):
        if c:
            moved = c * (extent - 1)
            reach += abs(moved)
            low += min(moved, 0)
    return reach + 1, dim.coefficients, -low


def written_box(output: Operand, extents: Sequence[int]) -> list[Side]:
    """The sides of the box that pieces of these extents write, without the gaps.

    Raises `LoweringError` unless each axis walks one dimension and each dimension one axis:
    the box of a diagonal, or of two axes in one dimension, has holes.
    """
    found: list[Side] = []
    seen = set[int]()
    still = (0,) * len(extents)
    for dim in output.dims:
        moved = [axis for axis, c in enumerate(dim.coefficients) if c and extents[axis] > 1]
        if not moved:
            found.append((1, still, 0))
            continue
        axis = moved[0]
        if len(moved) > 1 or axis in seen:
            raise LoweringError(f"the box that a write cache of {output.name} covers has holes")
        seen.add(axis)
        found.append((extents[axis], (*still[:axis], 1, *still[axis + 1 :]), 0))
    return found
