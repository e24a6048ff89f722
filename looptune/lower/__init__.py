"""From a schedule to Programs: `lower(schedule, target)`.

`form` decides what the loops mean for registers, `region` writes the straight-line code of a
register tile, `nest` the loops around it, `packs` the padded or transposed copies before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from looptune.errors import LoweringError
from looptune.ir import IDENTITY, Nest, without_reductions
from looptune.lower.form import form_of
from looptune.lower.nest import (
    Ops,
    Place,
    Registers,
    boxes_of,
    emit_boxes,
    emit_nest,
    slots_of,
)
from looptune.lower.packs import emit_around, emit_box, emit_pack, emit_shared, is_shared
from looptune.program import SCRATCH, Program
from looptune.schedule import Loop, Schedule
from looptune.target import Target

GENERATOR_VERSION = 9  # of every record: raise it when generated code or defaults change

__all__ = ["GENERATOR_VERSION", "form_of", "lower", "lower_snapshot"]


def lower(schedule: Schedule, target: Target, prepacked: int | None = None) -> tuple[Program, ...]:
    """Programs to run one after another over the nest's operands (output first) and one scratch.

    One Program, or more where a parallel loop must wait for packs: threads share the large ones.
    Operand number `prepacked` is instead the snapshot that `lower_snapshot` makes of it. Raises
    `LoweringError` for schedules over the target's limits.
    """
    nest = schedule.nest
    if any(nest.axes[axis].extent == 0 for axis in nest.spatial):
        return (program(nest, target, (), Registers(), 0, 1),)
    if any(nest.axes[axis].extent == 0 for axis in nest.reductions):
        return (empty_reduction(nest, target),)
    form = form_of(schedule, target)
    root = {i: buffer for i, buffer in form.packed.root.items() if i != prepacked}
    trips = form.trips
    copies: Ops = ()
    taken = Registers()
    shared_copies: list[Program] = []
    for buffer in root.values():
        apart = trips > 1 and is_shared(buffer)
        ops, used = emit_around(buffer, target) if apart else emit_pack(buffer, target)
        copies += ops
        taken |= used
        if apart:
            ops, used, many = emit_shared(buffer, target)
            made = program(nest, target, ops, used, form.packed.scratch_bytes, many)
            shared_copies.append(made)
    private = trips > 1 and bool(form.packed.inner)
    copied = len(nest.operands) if private else SCRATCH
    places = tuple(
        Place(copied, root[i].offset) if i in root else Place(i, 0)
        for i in range(len(nest.operands))
    )
    copier = partial(emit_box, nest=nest, target=target)
    main, used = emit_nest(form, places, None, copier=copier, prepacked=prepacked)
    size = form.packed.scratch_bytes
    if trips == 1:
        return (program(nest, target, copies + main, taken | used, size, trips),)
    shared = program(nest, target, main, used, size, trips)
    if private:
        shared = replace(shared, operands=shared.operands + 1, private_scratch=True)
    alone = (program(nest, target, copies, taken, size, 1),) if copies else ()
    return (*alone, *shared_copies, shared)


def lower_snapshot(schedule: Schedule, target: Target, number: int) -> tuple[Program, int]:
    """The Program that writes operand number `number` into a snapshot, and the snapshot's bytes.

    Its operands are the snapshot and the operand: the pack at the root, or all boxes of the pack
    inside loops, one after another. Raises `LoweringError` unless there is exactly one of them.
    """
    if schedule.nest.points == 0:
        return replace(program(schedule.nest, target, (), Registers(), 0, 1), operands=2), 64
    form = form_of(schedule, target)
    root, inner = form.packed.root.get(number), boxes_of(form, number)
    into, source = Place(0, 0), Place(1, 0)
    if root is not None and inner is None:
        ops, used = emit_pack(root, target, into, source)
        size = root.end - root.offset
    elif inner is not None and root is None:
        copier = partial(emit_box, nest=schedule.nest, target=target)
        ops, used = emit_boxes(form, inner, source, into, copier)
        size = slots_of(form, inner)[1]
    else:
        count = 0 if root is None else 2
        raise LoweringError(f"operand {number} has {count} packs; a snapshot is made of one")
    made = program(schedule.nest, target, ops, used, 0, 1)
    return replace(made, operands=2, pointers=max(2, used.pointers)), size


def program(
    nest: Nest, target: Target, body: Ops, used: Registers, scratch_bytes: int, trips: int
) -> Program:
    """A Program over the nest's operands."""
    count = len(nest.operands)
    pointers = max(used.pointers, count)
    return Program(target, nest.dtype, count, used.scalars, pointers, scratch_bytes, trips, body)


def empty_reduction(nest: Nest, target: Target) -> Program:
    """A sum of no terms: the identity everywhere, or the old output where it accumulates; and then
    the epilogue."""
    if nest.accumulate and not nest.epilogue:
        return program(nest, target, (), Registers(), 0, 1)
    kept = without_reductions(nest.axes)
    old = replace(nest.output, name="old")
    alone = replace(nest, axes=kept, inputs=(old,), accumulate=False)
    loops = tuple(Loop(axis) for axis in range(len(kept)))
    form = form_of(Schedule(alone, loops), target)
    first = 1 + len(nest.inputs)
    places = (Place(0, 0), Place(0, 0), *(Place(first + i, 0) for i in range(len(nest.extras))))
    constant = None if nest.accumulate else IDENTITY[nest.reduction]
    ops, used = emit_nest(form, places, constant)
    return program(nest, target, ops, used, 0, 1)
