"""Loops around register tiles: pointers, counters, tails and first visits.

Scalars are numbered from the inside out, so that a backend short of registers spills the outer
ones. A loop whose range is not a multiple of its step computes `current = min(rest, step)` and
keeps one body; only register tiles are specialised, by a switch over their range sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from looptune.lower.buffers import Inner, multiplies_pairs
from looptune.lower.epilogue import epilogue
from looptune.lower.form import Form, inner_ranges, range_sets
from looptune.lower.region import (
    Access,
    Tile,
    access_of,
    across_lanes,
    add_old,
    body,
    count_terms,
    make_tile,
    merge_copies,
    start,
    store,
    transposed_copy,
)
from looptune.program import (
    BEGIN,
    END,
    SCRATCH,
    Advance,
    Base,
    Case,
    Const,
    Copy,
    IfZero,
    Loop,
    Min,
    Op,
    Restore,
    Save,
    Scale,
    Set,
    Step,
    Subtract,
    Switch,
    While,
)
from looptune.schedule import Loop as ScheduleLoop


class Dynamic(NamedTuple):
    """A range known only at run time: the scalar that holds it and the values it can have."""

    scalar: int
    values: tuple[int, ...]


Extent = int | Dynamic
Extents = Mapping[int, Extent]
Flag = int | Dynamic  # 0 or not, or the scalar that knows
Ops = tuple[Op, ...]


class Visit(NamedTuple):
    """Whether the output has been visited before, and whether it will be again (not 0)."""

    before: Flag
    again: Flag = 0


class Place(NamedTuple):
    """Where an operand lives: operand number (or SCRATCH) and byte offset of its element 0."""

    operand: int
    offset: int


class Through(NamedTuple):
    """Where an operand lives, seen from a pointer: its number and the bytes to element 0."""

    pointer: int
    offset: int


@dataclass(frozen=True)
class Registers:
    """How many scalars and pointers are in use: the numbers below are taken."""

    scalars: int = 2
    pointers: int = 0

    def __or__(self, other: Registers) -> Registers:
        return Registers(max(self.scalars, other.scalars), max(self.pointers, other.pointers))


NONE_USED = Registers()

# A box into its copy, all of it or just what lies inside the tensor or around it; back from the
# copy, or added to what is there.
Way = Literal["in", "inside", "around", "out", "add"]
Copier = Callable[
    [Inner, Access, Place | Through, Mapping[int, int], Way, Registers], tuple[Ops, Registers]
]


@dataclass(frozen=True)
class Frame:
    """A form with its addresses and scalar numbers; `constant` replaces all reads and sums.

    `accesses` are the operands as the loops at hand see them, `packs` what is still to be packed
    further inside, with the access to each copy, and `copier` writes the code that copies. Operand
    number `prepacked` is in boxes already. With `packs_only` nothing but copying is done.
    Scalars of loop i: counter, range below it, whether the output was visited; with an epilogue,
    whether it will be again and a spare one for that; then one to save each pointer.
    """

    form: Form
    accesses: tuple[Access, ...]
    constant: float | None
    first: Registers
    packs: tuple[tuple[Inner, Access], ...] = ()
    copier: Copier | None = None
    prepacked: int | None = None
    packs_only: bool = False

    @property
    def each(self) -> int:
        """Scalars of one loop."""
        return (5 if self.form.nest.epilogue else 3) + len(self.accesses)

    def scalars_of(self, loop: int) -> range:
        """The scalars of loop number `loop` among real and rolled loops."""
        last = self.form.scope + len(self.form.rolled) - 1
        first = self.first.scalars + (last - loop) * self.each
        return range(first, first + self.each)

    @property
    def spare(self) -> int:
        """A scalar that no loop has."""
        return self.first.scalars + (self.form.scope + len(self.form.rolled)) * self.each

    @property
    def used(self) -> Registers:
        """The registers in use, those before the first included."""
        pointers = self.first.pointers + len(self.accesses) + len(self.form.packed.inner)
        return Registers(self.spare + (self.prepacked is not None), pointers)


def emit_nest(
    form: Form,
    places: tuple[Place | Through, ...],
    constant: float | None,
    first: Registers = NONE_USED,
    copier: Copier | None = None,
    prepacked: int | None = None,
) -> tuple[Ops, Registers]:
    """Code for one nest, and the registers used when it ends; `first` are taken already.

    Operand number `prepacked` is a snapshot: the boxes of its pack, one after another.
    """
    ranges = form.tile_ranges()
    below = {axis: max(ranges[axis], default=0) for axis in form.tile}
    inner = dict(ranges)
    for loop in form.rolled:
        inner[loop.axis] = inner_ranges(inner[loop.axis], loop.step)
    below |= {loop.axis: max(inner[loop.axis]) for loop in form.unrolled}
    if form.vector is not None:
        below.setdefault(form.vector, max(inner[form.vector]))
    deep = {pack.number for pack in form.packed.inner}
    operands = form.nest.operands
    accesses = tuple(
        access_of(operand, first.pointers + i, form, {} if i in deep else below)
        for i, operand in enumerate(operands)
    )
    copies = tuple(
        (pack, access_of(pack.operand, first.pointers + len(operands) + i, form, below))
        for i, pack in enumerate(form.packed.inner)
    )
    accesses = tuple(
        boxed(access, form, pack)
        if (pack := boxes_of(form, prepacked)) and i == prepacked
        else access
        for i, access in enumerate(accesses)
    )
    frame = Frame(form, accesses, constant, first, copies, copier, prepacked)
    bases: Ops = ()
    for access, place, operand in zip(accesses, places, operands, strict=True):
        start = place.offset
        if access.slots is None:
            start += operand.base * operand.item_bytes - access.bias
        bases += pointed(access.pointer, place, start, first.scalars)
    extents: dict[int, Extent] = {a: axis.extent for a, axis in enumerate(form.nest.axes)}
    fills, used = fills_ahead(frame)
    ops, more = outer_loop(frame, 0, extents, Visit(1 if form.nest.accumulate else 0))
    return (*bases, *fills, *ops), used | more | frame.used | Registers(first.scalars + 1)


def filled_ahead(form: Form, pack: Inner) -> bool:
    """Whether what is copied around a tensor is the same in all iterations: it is filled once."""
    ranges = form.ranges[pack.depth]
    walked_axes = {a for dim in pack.source.dims for a, c in enumerate(dim.coefficients) if c}
    padded = pack.number > 0 and any(map(any, pack.margins))
    return padded and pack.depth > 0 and all(len(ranges[axis]) == 1 for axis in walked_axes)


def fills_ahead(frame: Frame) -> tuple[Ops, Registers]:
    """Code that fills copies around the tensors, before all loops, where it stays as it is."""
    ops: Ops = ()
    used = Registers()
    for pack, _ in frame.packs:
        if filled_ahead(frame.form, pack) and pack.number != frame.prepacked:
            ranges = frame.form.ranges[pack.depth]
            extents = {axis: values[0] for axis, values in ranges.items()}
            outside = frame.accesses[pack.number]
            more, registers = copied_box(frame, pack, outside, extents, "around")
            ops, used = ops + more, used | registers
    return ops, used


def boxes_of(form: Form, number: int | None) -> Inner | None:
    """The pack inside loops of operand number `number`, if it has one."""
    return next((pack for pack in form.packed.inner if pack.number == number), None)


def walked(form: Form, pack: Inner) -> list[int]:
    """The loops around a pack whose iterations each have a box of their own."""
    dims = pack.source.dims
    return [
        at
        for at, loop in enumerate(form.loops[: pack.depth])
        if any(dim.coefficients[loop.axis] for dim in dims)
    ]


def slots_of(form: Form, pack: Inner) -> tuple[dict[tuple[int, int], int], int]:
    """Bytes from box to box for every loop around a pack, and bytes of all boxes."""
    found: dict[tuple[int, int], int] = {}
    size = pack.end - pack.offset
    for at in reversed(walked(form, pack)):
        loop = form.loops[at]
        found[loop.axis, loop.step] = size
        size *= -(-form.ranges[at][loop.axis][0] // loop.step)
    return found, size


def boxed(access: Access, form: Form, pack: Inner) -> Access:
    """`access` to a snapshot: its pointer walks the boxes of a pack."""
    return replace(access, slots=slots_of(form, pack)[0], bias=0)


def emit_boxes(
    form: Form, pack: Inner, source: Place, into: Place, copier: Copier
) -> tuple[Ops, Registers]:
    """Code that copies all boxes of a pack one after another, and the registers it uses."""
    loops = tuple(form.loops[at] for at in walked(form, pack))
    ranges = range_sets(form.nest, loops)
    alone = replace(form, loops=loops, scope=len(loops), ranges=ranges, rolled=(), parallel=None)
    alone = replace(alone, packed=replace(form.packed, inner=()))
    read = access_of(pack.source, 1, form, {})
    write = boxed(replace(read, pointer=0), form, pack)
    made = replace(pack, depth=len(loops), number=1)
    frame = Frame(alone, (write, read), None, NONE_USED, ((made, write),), copier, packs_only=True)
    start = source.offset + pack.source.base * pack.source.item_bytes - read.bias
    bases = (Base(0, into.operand, into.offset), Base(1, source.operand, start))
    extents: dict[int, Extent] = {a: axis.extent for a, axis in enumerate(form.nest.axes)}
    ops, used = outer_loop(frame, 0, extents, Visit(0))
    return (*bases, *ops), used | frame.used


def pointed(pointer: int, place: Place | Through, offset: int, scalar: int) -> Ops:
    """Set a pointer to `offset` bytes from a place's operand or pointer."""
    match place:
        case Place(operand):
            return (Base(pointer, operand, offset),)
        case Through(other):
            step = (Step(pointer, offset),) if offset else ()
            return (Save(scalar, other), Restore(pointer, scalar), *step)


def outer_loop(frame: Frame, at: int, extents: Extents, visit: Visit) -> tuple[Ops, Registers]:
    """Real loop number `at` and all inside it, and the registers that copies inside it use."""
    form = frame.form
    if any(pack.depth == at for pack, _ in frame.packs):
        return with_packs(frame, at, extents, visit)
    if at == form.scope:
        if frame.packs_only:
            return (), Registers()
        return specialised(form.tile, extents, lambda e: tile_code(frame, e, visit)), Registers()
    loop = form.loops[at]
    scalars = frame.scalars_of(at)
    counter, current, visited = scalars[:3]
    whole = extents[loop.axis]
    values = inner_ranges(values_of(whole), loop.step)
    below = values[0] if len(values) == 1 else Dynamic(current, values)
    inner = visit
    before: Ops = ()
    after: Ops = ()
    tail: Ops = () if isinstance(below, int) else (Min(current, counter, loop.step),)
    if form.nest.axes[loop.axis].reduction and visit.before != 1:
        inner = inner._replace(before=Dynamic(visited, (0, 1)))
        before = (assigned(visited, visit.before),)
        after = (Set(visited, 1),)
    if form.nest.axes[loop.axis].reduction and form.nest.epilogue:
        # again = visit.again + (counter - min(counter, step)): 0 in the last iteration of all.
        again, spare = scalars[3:5]
        rest = (Min(spare, counter, loop.step), Subtract(spare, counter), Subtract(again, spare))
        tail = (*tail, assigned(again, visit.again), *rest)
        inner = inner._replace(again=Dynamic(again, (0, 1)))
    inside, used = outer_loop(frame, at + 1, {**extents, loop.axis: below}, inner)
    steps = pointer_steps(frame.accesses, loop)
    work = (*tail, *inside, *after, *steps)
    if at == form.parallel:
        return (*before, *shared_loop(frame, loop, at, work)), used
    return (*before, *counted_loop(frame, loop, scalars, whole, work, undo=at > 0)), used


def assigned(scalar: int, flag: Flag) -> Op:
    """Set a scalar to a flag."""
    return Set(scalar, flag) if isinstance(flag, int) else Copy(scalar, flag.scalar)


def with_packs(frame: Frame, at: int, extents: Extents, visit: Visit) -> tuple[Ops, Registers]:
    """Copy the boxes that the loops from number `at` on touch, run these on the copies, and
    write the output's copy back.

    The output's starts from nothing and is added to what is there, unless the epilogue wants
    the sum: then it starts from what is there.
    """
    here = [pair for pair in frame.packs if pair[0].depth == at]
    later = tuple(pair for pair in frame.packs if pair[0].depth != at)
    accesses = list(frame.accesses)
    before: Ops = ()
    after: Ops = ()
    used = Registers()
    for pack, access in here:
        outside = accesses[pack.number]
        if pack.number == frame.prepacked:
            start = pack.operand.base * pack.operand.item_bytes - access.bias
            before += pointed(access.pointer, Through(outside.pointer, 0), start, frame.spare)
            accesses[pack.number] = access
            continue
        loaded = pack.number == 0 and bool(frame.form.nest.epilogue) and visit.before == 1
        before_write: Flag = 0 if loaded else visit.before
        if loaded:
            ops, more = copied_box(frame, pack, outside, extents, "in")
            before, used = before + ops, used | more
        way: Way | Flag = before_write
        if pack.number:
            ahead = filled_ahead(frame.form, pack) and not frame.packs_only
            way = "inside" if ahead else "in"
        copies, more = copied_box(frame, pack, outside, extents, way)
        if frame.packs_only:
            return copies, more
        start = pack.offset + pack.operand.base * pack.operand.item_bytes - access.bias
        base = Base(access.pointer, SCRATCH, start)
        if pack.number:
            before += copies
        else:
            after, visit = copies + after, visit._replace(before=int(loaded))
        before += (base,)
        accesses[pack.number] = access
        used |= more
    inner = replace(frame, accesses=tuple(accesses), packs=later)
    ops, more = outer_loop(inner, at, extents, visit)
    return (*before, *ops, *after), used | more


def copied_box(
    frame: Frame, pack: Inner, outside: Access, extents: Extents, way: Way | Flag
) -> tuple[Ops, Registers]:
    """Code that fills a copy, or writes back that of the output: added to what is there if the
    flag is set."""
    copier = frame.copier
    assert copier is not None, "a copy does not hold packs"
    used = Registers()

    into: Place | Through = Place(SCRATCH, pack.offset)
    if frame.packs_only:
        into = Through(frame.accesses[0].pointer, 0)

    def copy(sizes: Mapping[int, int], way: Way) -> Ops:
        nonlocal used
        ops, more = copier(pack, outside, into, sizes, way, frame.used)
        used |= more
        return ops

    def make(extents: Extents) -> Ops:
        sizes = {axis: values_of(extent)[0] for axis, extent in extents.items()}
        match way:
            case str():
                return copy(sizes, way)
            case int():
                return copy(sizes, "add" if way else "out")
            case Dynamic():
                return by_flag(way, copy(sizes, "out"), copy(sizes, "add"))

    dims = pack.source.dims
    axes = tuple(axis for axis in extents if any(dim.coefficients[axis] for dim in dims))
    ops = specialised(axes, extents, make)
    return ops, used


def specialised(axes: tuple[int, ...], extents: Extents, make: Callable[[Extents], Ops]) -> Ops:
    """`make` for extents that are static along `axes`, chosen at run time where they vary."""
    for axis in axes:
        extent = extents[axis]
        if not isinstance(extent, int):
            cases = ((v, specialised(axes, {**extents, axis: v}, make)) for v in extent.values)
            return (Switch(extent.scalar, tuple(Case(v, ops) for v, ops in cases)),)
    return make(extents)


def values_of(extent: Extent) -> tuple[int, ...]:
    """The values an extent can have."""
    return (extent,) if isinstance(extent, int) else extent.values


def pointer_steps(accesses: tuple[Access, ...], loop: ScheduleLoop, trips: int = 1) -> Ops:
    """Move every pointer that the loop's axis moves by `trips` iterations."""
    moves = ((a.pointer, a.step_of(loop.axis, loop.step) * trips) for a in accesses)
    return tuple(Step(pointer, bytes_) for pointer, bytes_ in moves if bytes_)


def saves(accesses: tuple[Access, ...], loop: ScheduleLoop, scalars: range) -> tuple[Ops, Ops]:
    """Operations that save and restore the pointers that the loop moves."""
    pairs = zip(scalars[-len(accesses) :], accesses, strict=True)
    moved = [
        (slot, access.pointer) for slot, access in pairs if access.step_of(loop.axis, loop.step)
    ]
    save = tuple(Save(slot, pointer) for slot, pointer in moved)
    return save, tuple(Restore(pointer, slot) for slot, pointer in moved)


def counted_loop(
    frame: Frame, loop: ScheduleLoop, scalars: range, whole: Extent, work: Ops, undo: bool
) -> Ops:
    """A loop over `whole`, pointers put back afterwards if `undo`."""
    counter = scalars[0]
    if isinstance(whole, int):
        trips = -(-whole // loop.step)
        back = pointer_steps(frame.accesses, loop, -trips) if undo else ()
        return (Set(counter, whole), Loop(counter, loop.step, work), *back)
    save, restore = saves(frame.accesses, loop, scalars) if undo else ((), ())
    return (*save, Copy(counter, whole.scalar), Loop(counter, loop.step, work), *restore)


def shared_loop(frame: Frame, loop: ScheduleLoop, at: int, work: Ops) -> Ops:
    """The parallel loop: iterations BEGIN to END of it, possibly none."""
    scalars = frame.scalars_of(at)
    counter, current = scalars[:2]
    extent = frame.form.nest.axes[loop.axis].extent
    save, restore = saves(frame.accesses, loop, scalars)
    strides = ((a.pointer, a.step_of(loop.axis, loop.step)) for a in frame.accesses)
    return (
        *save,
        *(Advance(pointer, BEGIN, bytes_) for pointer, bytes_ in strides if bytes_),
        Scale(counter, END, loop.step),
        Min(counter, counter, extent),
        Scale(current, BEGIN, loop.step),
        Subtract(counter, current),
        Loop(counter, loop.step, work, guarded=True),
        *restore,
    )


def tile_code(frame: Frame, extents: Extents, visit: Visit) -> Ops:
    """One register tile: start, all reductions inside the scope, epilogue, store."""
    form = frame.form
    static = static_extents(extents)
    if frame.constant is not None:
        tile = make_tile(form, frame.accesses, static, 1)
        constants = (Const(r, frame.constant) for r in range(tile.count))
        return (*constants, *finish(tile, visit.again))
    tile = make_tile(form, frame.accesses, static, full_terms(form, extents))
    if form.transposed is not None:
        return tuple(transposed_copy(tile, static))
    if not form.nest.reductions and visit.before == 0 and not multiplies_pairs(form.nest):
        return (*body(tile, static, first=True), *finish(tile, visit.again))
    inside = rolled_loop(frame, tile, 0, extents)
    ops = (*by_flag(visit.before, start(tile, load=False), start(tile, load=True)), *inside)
    ops = (*ops, *merge_copies(tile))
    if form.reduces_lanes:
        ops = (*ops, *across_lanes(tile), *by_flag(visit.before, (), tuple(add_old(tile))))
    return (*ops, *finish(tile, visit.again))


def finish(tile: Tile, again: Flag) -> Ops:
    """The epilogue, unless the output is visited again, and the stores."""
    return (*by_flag(again, tuple(epilogue(tile)), ()), *store(tile))


def static_extents(extents: Extents) -> dict[int, int]:
    """Those of the extents that are known when code is made."""
    return {axis: extent for axis, extent in extents.items() if isinstance(extent, int)}


def full_terms(form: Form, extents: Extents) -> int:
    """Terms of the largest straight-line body of a tile."""
    inner = {axis: values_of(extent) for axis, extent in extents.items()}
    for loop in form.rolled:
        inner[loop.axis] = inner_ranges(inner[loop.axis], loop.step)
    return count_terms(form, {axis: values[0] for axis, values in inner.items()})


def by_flag(flag: Flag, unset: Ops, set_: Ops) -> Ops:
    """`unset` where the flag is 0, `set_` otherwise."""
    if isinstance(flag, int):
        return set_ if flag else unset
    return unset if unset == set_ else (IfZero(flag.scalar, unset, set_),)


def rolled_loop(frame: Frame, tile: Tile, number: int, extents: Extents) -> Ops:
    """Reduction loop number `number` around the accumulators, or the body inside all of them."""
    form = frame.form
    if number == len(form.rolled):
        return specialised(body_axes(form), extents, lambda e: body(tile, static_extents(e)))
    loop = form.rolled[number]
    scalars = frame.scalars_of(form.scope + number)
    inputs = frame.accesses[1:]
    whole = extents[loop.axis]

    def inside(extent: int) -> Ops:
        return rolled_loop(frame, tile, number + 1, {**extents, loop.axis: extent})

    step = pointer_steps(inputs, loop)
    if not isinstance(whole, int):
        save, restore = saves(inputs, loop, scalars)
        rests = tuple(dict.fromkeys(value % loop.step for value in whole.values))
        again = (While(scalars[0], loop.step, (*inside(loop.step), *step)),)
        work = again if any(value >= loop.step for value in whole.values) else ()
        tails = switch_rest(scalars[0], rests, inside)
        return (*save, Copy(scalars[0], whole.scalar), *work, *tails, *restore)
    trips, rest = divmod(whole, loop.step)
    back = pointer_steps(inputs, loop, -trips)
    tail = inside(rest) if rest else ()
    if trips == 0:
        return tail
    if trips == 1:
        return (*inside(loop.step), *step, *tail, *back) if rest else inside(loop.step)
    counted = Loop(scalars[0], loop.step, (*inside(loop.step), *step))
    return (Set(scalars[0], trips * loop.step), counted, *tail, *back)


def switch_rest(scalar: int, rests: tuple[int, ...], inside: Callable[[int], Ops]) -> Ops:
    """The tails of a rolled loop with a dynamic range."""
    if rests == (0,):
        return ()
    cases = tuple(Case(rest, inside(rest) if rest else ()) for rest in rests)
    return cases[0].body if len(cases) == 1 else (Switch(scalar, cases),)


def body_axes(form: Form) -> tuple[int, ...]:
    """Reduction axes with a range inside the straight-line body."""
    axes = [loop.axis for loop in form.unrolled]
    if form.reduces_lanes and form.vector is not None:
        axes.append(form.vector)
    return tuple(dict.fromkeys(axes))
