"""Straight-line code for one register tile: accumulators, operand loads and multiply-adds.

Registers 0.. hold the accumulators (`copies` of each, to hide the latency of the FMA); the rest
are temporaries. Loads are placed by furthest next use (Belady), single-use vectors are folded
into the FMA. Where a target has no masks its last register is left to `legalize` for masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from looptune.dtypes import ITEM_BYTES
from looptune.errors import LoweringError
from looptune.ir import IDENTITY, Operand
from looptune.lower.buffers import multiplies_pairs
from looptune.lower.form import Form, register_budget
from looptune.lower.transpose import PART_BYTES, transpose
from looptune.program import (
    Add,
    Const,
    Extremum,
    Fma,
    FmaLoad,
    FmaSplat,
    Format,
    Gather,
    GatherAs,
    Keep,
    Load,
    LoadAs,
    Mul,
    Op,
    Reduce,
    Scatter,
    ScatterAs,
    Splat,
    SplatAs,
    Store,
    StoreAs,
)

Extents = Mapping[int, int]
Pieces = list[tuple[int, Sequence[int]]]  # per axis, the positions visited along it


# One vector of an operand: its pointer, the bytes from there, its lanes. A plain tuple, because
# two are made for every multiply-add and a NamedTuple costs ten times as much.
Read = tuple[int, int, int]
Job = tuple[int, Read, Read]  # accumulator += product of two vectors
Reading = Load | Splat | Gather | LoadAs | SplatAs | GatherAs
Product = Reading | Fma | FmaLoad | FmaSplat | Mul


@dataclass(frozen=True)
class Access:
    """How an operand is addressed: its pointer and byte strides, all offsets made positive.

    `kind` says what a vector of it is: "unit", "splat" or "strided" lanes; `dense` that what lies
    between strided lanes is the operand's, too. `form` is the format in memory where that is not
    the registers'. With `slots` the pointer walks boxes that were packed before: the bytes from
    box to box of every loop, by axis and step.
    """

    pointer: int
    strides: tuple[int, ...]
    lane_stride: int
    bias: int
    kind: str
    dense: bool
    form: Format | None = None
    slots: Mapping[tuple[int, int], int] | None = None

    def step_of(self, axis: int, step: int) -> int:
        """Bytes that the pointer moves with an iteration of the loop over `axis` by `step`."""
        if self.slots is not None:
            return self.slots.get((axis, step), 0)
        return self.strides[axis] * step

    def load(self, dst: int, offset: int, lanes: int) -> Load | LoadAs:
        """Load lanes that lie side by side."""
        if self.form is None:
            return Load(dst, self.pointer, offset, lanes)
        return LoadAs(dst, self.pointer, offset, lanes, self.form)

    def store(self, src: int, offset: int, lanes: int, scratch: Sequence[int]) -> Store | StoreAs:
        """Store lanes that lie side by side; what src holds is no longer wanted."""
        if self.form is None:
            return Store(src, self.pointer, offset, lanes, scratch[0])
        return StoreAs(src, self.pointer, offset, lanes, (scratch[0], scratch[1]), self.form)

    def scatter(
        self, src: int, offset: int, lanes: int, scratch: Sequence[int]
    ) -> Scatter | ScatterAs:
        """Store lanes that lie apart; what src holds is no longer wanted."""
        if self.form is None:
            return Scatter(src, self.pointer, offset, self.lane_stride, lanes, scratch[0])
        pair = (scratch[0], scratch[1])
        return ScatterAs(src, self.pointer, offset, self.lane_stride, lanes, pair, self.form)


@dataclass(frozen=True)
class Tile:
    """A register tile of static extents: one accumulator per point, `copies` of each.

    Per point the lanes it fills, and per operand the bytes from its pointer.
    """

    form: Form
    accesses: tuple[Access, ...]
    lanes: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    copies: int
    limit: int

    @property
    def count(self) -> int:
        """Points of the tile."""
        return len(self.lanes)

    @property
    def temporaries(self) -> tuple[int, ...]:
        """Registers that hold no accumulator."""
        return tuple(range(len(self.lanes) * self.copies, self.limit))


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
    dense = is_dense(operand, form.vector)
    return Access(pointer, strides, lane_stride, bias, kind, dense, form.format_of(operand))


def is_dense(operand: Operand, vector: int | None) -> bool:
    """Whether lanes along the vector axis are elements of one contiguous dimension."""
    if vector is None:
        return False
    moved = [dim for dim in operand.dims if dim.coefficients[vector]]
    return len(moved) == 1 and moved[0].stride == 1


def grid(start: int, strides: Sequence[int], pieces: Pieces) -> list[int]:
    """Offsets of all combinations of positions along the axes, the last axis fastest."""
    found = [start]
    for axis, positions in pieces:
        stride = strides[axis]
        found = [at + stride * position for at in found for position in positions]
    return found


def make_tile(form: Form, accesses: tuple[Access, ...], extents: Extents, terms: int) -> Tile:
    """The tile for static `extents`; `terms` is the least of terms a body gives each point."""
    target = form.target
    pieces: Pieces = []
    lanes = [1 if form.vector is None else form.lanes]
    for axis in form.tile:
        if axis == form.vector:
            positions, widths = zip(*form.leaves(extents[axis]), strict=True)
            lanes = [width for _ in lanes for width in widths]
        else:
            positions = tuple(range(extents[axis]))
            lanes = [width for width in lanes for _ in positions]
        pieces.append((axis, positions))
    offsets = tuple(tuple(grid(access.bias, access.strides, pieces)) for access in accesses)
    partial = form.reduces_lanes or min(lanes) < form.lanes
    stepwise = multiplies_pairs(form.nest) and not target.dot
    limit = target.vector_registers - (1 if (partial and not target.masks) or stepwise else 0)
    reserved = target.vector_registers - register_budget(form.nest, target)
    wanted = math.ceil(target.fma_per_cycle * target.fma_latency / len(lanes))
    copies = max(1, min((limit - reserved) // len(lanes), wanted, terms))
    return Tile(form, accesses, tuple(lanes), offsets, copies, limit)


def start(tile: Tile, load: bool) -> tuple[Op, ...]:
    """Set the accumulators to the identity, or the first copies to the old output."""
    value = IDENTITY[tile.form.nest.reduction]
    count = tile.count
    if not load or tile.form.reduces_lanes:
        return tuple(Const(r, value) for r in range(count * tile.copies))
    (reads,) = reads_of(tile, 0, [0], ())
    loads = (read_vector(tile, tile.accesses[0], r, read) for r, read in enumerate(reads))
    return (*loads, *(Const(r, value) for r in range(count, count * tile.copies)))


def reads_of(
    tile: Tile, operand: int, moves: Sequence[int], widths: Sequence[int]
) -> list[list[Read]]:
    """The vectors of an operand, per reduction term and then per point of the tile.

    `moves` are the bytes each term adds; `widths` its lanes, where lanes are summed.
    """
    access = tile.accesses[operand]
    pointer, offsets = access.pointer, tile.offsets[operand]
    if widths:
        return [
            [(pointer, at + moved, width) for at in offsets]
            for moved, width in zip(moves, widths, strict=True)
        ]
    if access.kind == "splat":
        whole = tile.form.lanes
        return [[(pointer, at + moved, whole) for at in offsets] for moved in moves]
    points = list(zip(offsets, tile.lanes, strict=True))
    return [[(pointer, at + moved, lanes) for at, lanes in points] for moved in moves]


def read_vector(tile: Tile, access: Access, dst: int, read: Read) -> Reading:
    """Load, splat or gather one vector."""
    pointer, offset, lanes = read
    if lanes == 1 or access.kind == "unit":
        return access.load(dst, offset, lanes)
    form = access.form
    if access.kind == "splat":
        if form is None:
            return Splat(dst, pointer, offset, lanes)
        return SplatAs(dst, pointer, offset, lanes, form)
    scratch, stride = tile.temporaries[-1], access.lane_stride
    if form is None:
        return Gather(dst, pointer, offset, stride, lanes, scratch, access.dense)
    return GatherAs(dst, pointer, offset, stride, lanes, scratch, form)


def term_pieces(form: Form, extents: Extents) -> tuple[Pieces, tuple[int, ...]]:
    """Positions along the reduction axes inside a body; widths of its terms if lanes are summed."""
    pieces: Pieces = [
        (axis, range(extents[axis]))
        for axis in dict.fromkeys(loop.axis for loop in form.unrolled)
        if axis != form.vector
    ]
    if not form.reduces_lanes or form.vector is None:
        return pieces, ()
    positions, widths = zip(*form.leaves(extents[form.vector]), strict=True)
    terms = math.prod(len(p) for _, p in pieces)
    return [*pieces, (form.vector, positions)], widths * terms


def count_terms(form: Form, extents: Extents) -> int:
    """Terms that a straight-line body adds to every accumulator."""
    return math.prod(len(positions) for _, positions in term_pieces(form, extents)[0])


def body(tile: Tile, extents: Extents, first: bool = False) -> tuple[Op, ...]:
    """Add every term of the body to every accumulator; `first`: set instead of add.

    Terms run outermost, so that neighbours use different accumulators.
    """
    nest = tile.form.nest
    pieces, widths = term_pieces(tile.form, extents)
    reads = [
        reads_of(tile, i, grid(0, tile.accesses[i].strides, pieces), widths)
        for i in range(1, 1 + len(nest.inputs))
    ]
    if len(nest.inputs) == 2 and nest.reduction == "add":
        left, right = reads
        return tuple(products(tile, left, right, first))
    return tuple(
        op
        for number, rows in enumerate(zip(*reads, strict=True))
        for index, vectors in enumerate(zip(*rows, strict=True))
        for op in combine(tile, number % tile.copies * tile.count + index, vectors, first)
    )


def products(
    tile: Tile, left: list[list[Read]], right: list[list[Read]], first: bool
) -> list[Product]:
    """The products of all terms; what one term has worked out is repeated for those alike.

    Terms that share no vector and load equally wide ones differ by their offsets alone.
    """
    count = tile.count
    order = point_order(left[0], right[0])
    if len(left) > 1 and not (alike(left) and alike(right)):
        jobs = [
            (number % tile.copies * count + i, a[i], b[i])
            for number, (a, b) in enumerate(zip(left, right, strict=True))
            for i in order
        ]
        return multiply_add(tile, jobs if first else regrouped(tile, jobs), first)
    ops = multiply_add(tile, [(i, left[0][i], right[0][i]) for i in order], first)
    found = list(ops)
    for number in range(1, len(left)):
        moved = {rows[0][0][0]: rows[number][0][1] - rows[0][0][1] for rows in (left, right)}
        shift = number % tile.copies * count
        found += [moved_op(op, shift, moved) for op in ops]
    return found


def regrouped(tile: Tile, jobs: list[Job]) -> list[Job]:
    """Jobs in an order in which vectors that several terms read are loaded once.

    A window that slides over an image reads each of its vectors for several taps. Where the other
    operand's vectors all fit the temporaries, the jobs of one vector follow each other. Of two
    halves the groups take turns, so that a sum waits for its last term.
    """
    left, right = {a for _, a, _ in jobs}, {b for _, _, b in jobs}
    most, fewest = max(len(left), len(right)), min(len(left), len(right))
    if most == len(jobs) or fewest + 2 > len(tile.temporaries):
        return jobs
    groups: dict[Read, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job[1] if len(left) == most else job[2], []).append(job)
    ordered = list(groups.values())
    half = -(-len(ordered) // 2)
    none: list[Job] = []
    turns = zip_longest(ordered[:half], ordered[half:], fillvalue=none)
    return [job for pair in turns for group in pair for job in group]


def point_order(left: list[Read], right: list[Read]) -> Sequence[int]:
    """Points by the operand with more vectors, so that registers hold the other one's."""
    if len(set(left)) >= len(set(right)):
        return range(len(left))
    return sorted(range(len(right)), key=right.__getitem__)


def alike(rows: list[list[Read]]) -> bool:
    """Whether no vector is read by two terms, and all terms have the same lanes."""
    total = sum(len(set(row)) for row in rows)
    return len(set().union(*rows)) == total and len({row[0][2] for row in rows}) == 1


def moved_op(op: Product, shift: int, moved: Mapping[int, int]) -> Product:
    """`op` on accumulators `shift` further, its memory `moved` bytes by pointer.

    Compares types instead of matching: this runs for most instructions of a kernel.
    """
    if type(op) is Fma:
        return Fma(op[0] + shift, op[1], op[2]) if shift else op
    if type(op) is Load:
        return Load(op[0], op[1], op[2] + moved[op[1]], op[3])
    if type(op) is Splat:
        return Splat(op[0], op[1], op[2] + moved[op[1]], op[3])
    if type(op) is FmaLoad:
        return FmaLoad(op[0] + shift, op[1], op[2], op[3] + moved[op[2]])
    if type(op) is FmaSplat:
        return FmaSplat(op[0] + shift, op[1], op[2], op[3] + moved[op[2]])
    assert isinstance(op, Reading), f"{op} is not part of a sum of products"
    return op._replace(offset=op.offset + moved[op.pointer])


class Holding:
    """Which vectors the temporaries hold while a list of products is written out.

    On a miss with no register free, the vector used again last gives its register up (Belady).
    """

    def __init__(self, tile: Tile, jobs: list[Job]) -> None:
        inputs = tile.accesses[1 : 1 + len(tile.form.nest.inputs)]
        strided = any(access.kind == "strided" for access in inputs)
        self.tile = tile
        self.access = {access.pointer: access for access in tile.accesses}
        self.free = list(reversed(tile.temporaries[:-1] if strided else tile.temporaries))
        self.held: dict[Read, int] = {}
        self.uses: dict[Read, list[int]] = {}  # positions still to come, the next one last
        for number in range(len(jobs) - 1, -1, -1):
            _, a, b = jobs[number]
            self.uses.setdefault(a, []).append(number)
            self.uses.setdefault(b, []).append(number)
        self.lanes = tile.form.lanes
        kinds = foldable(tile.form)
        self.folds = {
            access.pointer: kinds[access.kind]
            for access in inputs
            if access.form is None and access.kind in kinds
        }

    def fetch(self, read: Read, other: Read, ops: list[Product]) -> int:
        """The register that holds `read`, loaded if need be, `other` kept."""
        held = self.held
        register = held.get(read)
        if register is None:
            if not self.free:
                victim = max((r for r in held if r != other), key=lambda r: self.uses[r][-1])
                self.free.append(held.pop(victim))
            held[read] = register = self.free.pop()
            ops.append(read_vector(self.tile, self.access[read[0]], register, read))
        return register

    def folded(self, read: Read) -> type[FmaLoad | FmaSplat] | None:
        """The multiply-add that reads `read` from memory, if it is wanted just this once."""
        if len(self.uses[read]) > 1 or read[2] < self.lanes or read in self.held:
            return None
        return self.folds.get(read[0])

    def release(self, read: Read) -> None:
        """Count one use of `read`; its register is free after the last."""
        uses = self.uses[read]
        uses.pop()
        if not uses and read in self.held:
            self.free.append(self.held.pop(read))


def foldable(form: Form) -> dict[str, type[FmaLoad | FmaSplat]]:
    """The multiply-adds that read a vector from memory, by its kind."""
    target = form.target
    found: dict[str, type[FmaLoad | FmaSplat]] = {}
    if multiplies_pairs(form.nest) and not target.dot:  # products take two steps
        return found
    if target.fold:
        found["unit"] = FmaLoad
    if target.fold_splat:
        found["splat"] = FmaSplat
    return found


def multiply_add(tile: Tile, jobs: list[Job], first: bool) -> list[Product]:
    """Products summed into accumulators; `first`: the products themselves."""
    holding = Holding(tile, jobs)
    ops: list[Product] = []
    for register, a, b in jobs:
        if not first and (fused := holding.folded(b)):
            ops.append(fused(register, holding.fetch(a, b, ops), b[0], b[1]))
        elif not first and (fused := holding.folded(a)):
            ops.append(fused(register, holding.fetch(b, a, ops), a[0], a[1]))
        else:
            left, right = holding.fetch(a, b, ops), holding.fetch(b, a, ops)
            ops.append(Mul(register, left, right) if first else Fma(register, left, right))
        holding.release(a)
        holding.release(b)
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
    count = tile.count
    kind = tile.form.nest.reduction
    for number in range(count, count * tile.copies):
        index = number % count
        if kind == "add":
            yield Add(index, index, number)
        else:
            yield Extremum(kind, index, index, number, tile.temporaries[0])


def store(tile: Tile) -> Iterable[Op]:
    """Store the accumulators, which hold junk afterwards."""
    access, scratch = tile.accesses[0], tile.temporaries
    for register, (offset, lanes) in enumerate(zip(tile.offsets[0], tile.lanes, strict=True)):
        if lanes == 1 or tile.form.reduces_lanes:
            yield access.store(register, offset, 1, scratch)
        elif access.kind == "unit":
            yield access.store(register, offset, lanes, scratch)
        else:
            yield access.scatter(register, offset, lanes, scratch)


def transposed_copy(tile: Tile, extents: Extents) -> Iterator[Op]:
    """Copy a tile from an input contiguous along the lanes to an output that is not, in blocks.

    A block is a register for each position along `form.transposed`, transposed in between.
    """
    form = tile.form
    across, along = form.transposed, form.vector
    assert across is not None
    assert along is not None
    into, source = tile.accesses
    size = form.lanes
    others: Pieces = [(a, range(extents[a])) for a in form.tile if a not in (across, along)]
    starts = (grid(access.bias, access.strides, others) for access in (into, source))
    for to, at in zip(*starts, strict=True):
        for first in range(0, extents[across], size):
            rows = min(size, extents[across] - first)
            for start, lanes in form.leaves(extents[along]):
                read = at + source.strides[across] * first + source.strides[along] * start
                for row in range(rows):
                    yield source.load(row, read + row * source.strides[across], lanes)
                here, there = range(size), range(size, 2 * size)
                part = PART_BYTES // ITEM_BYTES[form.nest.dtype]
                shuffles, columns = transpose(here, there, part, rows, lanes)
                yield from shuffles
                free = there if columns is here else here
                write = to + into.strides[across] * first + into.strides[along] * start
                for lane in range(lanes):
                    offset = write + lane * into.strides[along]
                    yield into.store(columns[lane], offset, rows, free)


def across_lanes(tile: Tile) -> Iterable[Op]:
    """Reduce the lanes of every accumulator into its lane 0."""
    for register in range(tile.count):
        yield Reduce(tile.form.nest.reduction, register, register, tile.temporaries[:2])  # type: ignore[arg-type]


def add_old(tile: Tile) -> Iterable[Op]:
    """Combine lane 0 with the old output, for sums that were kept in lanes."""
    access = tile.accesses[0]
    kind = tile.form.nest.reduction
    value, scratch = tile.temporaries[:2]
    for register, offset in enumerate(tile.offsets[0]):
        yield access.load(value, offset, 1)
        if kind == "add":
            yield Add(register, register, value)
        else:
            yield Extremum(kind, register, register, value, scratch)
