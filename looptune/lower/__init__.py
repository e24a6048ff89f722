"""From a schedule to Programs: `lower(schedule, target)`.

`form` decides what the loops mean for registers, `region` writes the straight-line code of a
register tile, `nest` the loops around it, `packs` the padded or transposed copies before it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from looptune.ir import IDENTITY, Nest
from looptune.lower.buffers import packed_nest
from looptune.lower.form import Form, form_of
from looptune.lower.nest import Ops, Place, emit_nest
from looptune.lower.packs import emit_pack
from looptune.program import SCRATCH, Program
from looptune.schedule import Loop, Schedule
from looptune.target import Target

GENERATOR_VERSION = 1  # part of every record: raise it when the generated code changes

__all__ = ["GENERATOR_VERSION", "form_of", "lower"]


def lower(schedule: Schedule, target: Target) -> tuple[Program, ...]:
    """Programs to run one after another over the nest's operands (output first) and one scratch.

    One Program, or two where a parallel loop must wait for packs. Raises `LoweringError` for
    schedules over the target's limits.
    """
    nest = schedule.nest
    if any(nest.axes[axis].extent == 0 for axis in nest.spatial):
        return (program(nest, target, (), 2, 0, 1),)
    if any(nest.axes[axis].extent == 0 for axis in nest.reductions):
        return (empty_reduction(nest, target),)
    form = form_of(schedule, target)
    _, buffers = packed_nest(schedule)
    copies: Ops = ()
    scalars = 2
    for buffer in buffers.values():
        ops, used = emit_pack(buffer, target)
        copies += ops
        scalars = max(scalars, used)
    places = tuple(
        Place(SCRATCH, buffers[i].offset) if i in buffers else Place(i, 0)
        for i in range(len(nest.operands))
    )
    main, used = emit_nest(form, places, None)
    size = max((buffer.end for buffer in buffers.values()), default=0)
    trips = trips_of(form)
    if trips > 1 and copies:
        head = program(nest, target, copies, scalars, size, 1)
        return (head, program(nest, target, main, used, size, trips))
    return (program(nest, target, copies + main, max(scalars, used), size, trips),)


def trips_of(form: Form) -> int:
    """Iterations of the parallel loop."""
    if form.parallel is None:
        return 1
    loop = form.loops[form.parallel]
    return math.ceil(form.nest.axes[loop.axis].extent / loop.step)


def program(
    nest: Nest, target: Target, body: Ops, scalars: int, scratch_bytes: int, trips: int
) -> Program:
    """A Program over the nest's operands."""
    count = len(nest.operands)
    return Program(target, nest.dtype, count, scalars, count, scratch_bytes, trips, body)


def empty_reduction(nest: Nest, target: Target) -> Program:
    """A sum of no terms: the identity everywhere, or the old output where it accumulates."""
    if nest.accumulate:
        return program(nest, target, (), 2, 0, 1)
    kept = tuple(axis if not axis.reduction else replace(axis, extent=1) for axis in nest.axes)
    output = replace(nest, axes=kept, inputs=(replace(nest.output, name="unread"),))
    loops = tuple(Loop(axis) for axis in range(len(kept)))
    form = form_of(Schedule(output, loops), target)
    ops, used = emit_nest(form, (Place(0, 0), Place(0, 0)), IDENTITY[nest.reduction])
    return program(nest, target, ops, used, 0, 1)
