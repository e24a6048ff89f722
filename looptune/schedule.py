"""In which order a nest is computed: a pure value, changed only by the primitives below.

A schedule is a list of loops, outermost first, each `(axis, step)`; `m:6` below `m:48` means
that the inner loop walks at most 48 rows in steps of 6. Steps of one axis decrease inward and
the last is 1. What the order means for registers, unrolling and tails is the lowering's part
(ARCHITECTURE.md). Split any axis by any factor: what is left over is a tail.

Provenance is the nest and its list of actions (`replay`); identity is the loop tree without
loops that make one trip.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from looptune.errors import ScheduleError
from looptune.ir import Axis, Nest

MOST_BOUNDARIES = 512


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over axis number `axis` in steps of `step`."""

    axis: int
    step: int = 1

    def __post_init__(self) -> None:
        if type(self.axis) is not int or type(self.step) is not int:
            raise ScheduleError(f"loop over axis {self.axis!r} in steps of {self.step!r}")
        if self.axis < 0 or self.step < 1:
            raise ScheduleError(
                f"loop over axis {self.axis} in steps of {self.step}; 0 and 1 are least"
            )


@dataclass(frozen=True, slots=True)
class Pack:
    """A contiguous copy of the box of an operand that lies below a loop.

    `operand` is 0 for the output, 1 and 2 for the inputs. `at` is the position of the loop in
    whose body the copy is made, or "root": before all loops. `order` lists the operand's
    dimensions, outermost first, in the copy. Elements outside the tensor hold the operand's fill.
    """

    operand: int
    order: tuple[int, ...]
    at: int | str = "root"

    def __post_init__(self) -> None:
        whole = type(self.order) is tuple and all(type(dim) is int for dim in self.order)
        if type(self.operand) is not int or not whole or not is_place(self.at):
            raise ScheduleError(
                f"a pack of operand {self.operand!r:.80} in order {self.order!r:.80} at "
                f"{self.at!r:.80}; a number, a tuple of numbers, and a loop's number or 'root' "
                "would do"
            )


def is_place(at: object) -> bool:
    """Whether a pack may be made there: in a loop, by number, or at the root."""
    return type(at) is int or (isinstance(at, str) and at == "root")


Action = tuple[str, tuple[object, ...]]


@dataclass(frozen=True)
class Schedule:
    """`Schedule(nest)` is the untuned nest in its written order, padding packed at the root.

    `vector` is the axis spread over vector lanes (None: chosen by the lowering); `parallel` the
    loop position whose iterations threads may share. Build one with the primitives, which check.
    """

    nest: Nest
    loops: tuple[Loop, ...] = ()
    packs: tuple[Pack, ...] = ()
    vector: int | None = None
    parallel: int | None = None
    actions: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.nest, Nest):
            raise ScheduleError(f"a schedule of {self.nest!r}; a Nest would do")
        check_kinds(self)
        if not self.loops and not self.actions:
            object.__setattr__(self, "loops", tuple(Loop(a) for a in range(len(self.nest.axes))))
        check_loops(self)
        check_packs(self)
        padded = self.nest.padded
        packed = {p.operand for p in self.packs if p.operand in padded and self.pads(p)}
        required = tuple(
            Pack(number, tuple(range(len(self.nest.operands[number].dims))))
            for number in padded
            if number not in packed
        )
        if required:
            object.__setattr__(self, "packs", (*self.packs, *required))

    def pads(self, pack: Pack) -> bool:
        """Whether a pack can hold the padding of its operand: at the root, or inside loops none of
        which moves along a dimension that the nest reads beyond."""
        if isinstance(pack.at, str):
            return True
        operand, axes = self.nest.operands[pack.operand], self.nest.axes
        outside = {self.loops[at].axis for at in range(pack.at + 1) if self.trips(at) > 1}
        return not any(
            dim.coefficients[axis] for dim in operand.padded_dims(axes) for axis in outside
        )

    def range_below(self, at: int) -> int:
        """Most elements of its axis that one run of loop `at` walks over."""
        return self.ranges[at]

    @cached_property
    def ranges(self) -> tuple[int, ...]:
        """`range_below` of every loop."""
        left = [axis.extent for axis in self.nest.axes]
        found = []
        for loop in self.loops:
            found.append(left[loop.axis])
            left[loop.axis] = min(left[loop.axis], loop.step)
        return tuple(found)

    def trips(self, at: int) -> int:
        """Most iterations of loop `at`."""
        return -(-self.ranges[at] // self.loops[at].step)

    def name(self, at: int) -> str:
        """`m:6`, or `m` for a step of 1."""
        loop = self.loops[at]
        axis = self.nest.axes[loop.axis].name
        return axis if loop.step == 1 else f"{axis}:{loop.step}"

    @property
    def boundaries(self) -> dict[int, tuple[int, ...]]:
        """Positions, by axis, where pieces of its loops meet: some `MOST_BOUNDARIES` a loop."""
        found: dict[int, tuple[int, ...]] = {}
        for loop in self.loops:
            if loop.step > 1:
                every = range(loop.step, self.nest.axes[loop.axis].extent, loop.step)
                thin = max(1, len(every) // MOST_BOUNDARIES)
                found[loop.axis] = (*found.get(loop.axis, ()), *every[::thin], *every[-1:])
        return found

    @property
    def order(self) -> str:
        """The loops in one line, `m:6 n:16 k m n`."""
        return " ".join(self.name(at) for at in range(len(self.loops)))

    @cached_property
    def canonical(self) -> tuple[Loop, ...]:
        """The loops without those that never make a second trip."""
        return tuple(loop for at, loop in enumerate(self.loops) if self.trips(at) > 1)

    def depth(self, pack: Pack) -> int:
        """How many loops of the canonical order a pack inside a loop lies in.

        None of them is the innermost reduction: inside it there is nothing left to copy for.
        """
        if isinstance(pack.at, str):
            return 0
        inside = sum(self.trips(at) > 1 for at in range(pack.at + 1))
        reduces = [at for at, x in enumerate(self.canonical) if self.nest.axes[x.axis].reduction]
        return min(inside, reduces[-1]) if reduces else inside

    @cached_property
    def identity(self) -> str:
        """Digest of nest, canonical loop tree, packs, vector axis and parallel loop."""
        parallel = None
        if self.parallel is not None and self.trips(self.parallel) > 1:
            loop = self.loops[self.parallel]
            parallel = [loop.axis, loop.step]
        packs = sorted(
            (p.operand, p.order, -1 if p.at == "root" else self.depth(p)) for p in self.packs
        )
        loops = [[loop.axis, loop.step] for loop in self.canonical]
        text = json.dumps([self.nest.key, loops, packs, self.vector, parallel])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        lines = [str(self.nest)]
        for pack in self.packs:
            operand = self.nest.operands[pack.operand]
            lines.append(f"pack {operand.name} order={list(pack.order)} at={pack.at}")
        for at in range(len(self.loops)):
            axis = self.nest.axes[self.loops[at].axis]
            marks = [f"{self.trips(at)} trips"]
            rest = self.range_below(at) % self.loops[at].step
            marks += [f"tail {rest}"] if rest else []
            marks += ["reduction"] if axis.reduction else []
            marks += ["vector"] if self.vector == self.loops[at].axis else []
            marks += ["parallel"] if self.parallel == at else []
            lines.append("  " * at + f"for {self.name(at)}  ({', '.join(map(str, marks))})")
        return "\n".join(lines)


def check_kinds(schedule: Schedule) -> None:
    """Raise `ScheduleError` for fields of other kinds, quickly: a search makes many schedules."""
    for values, kind, name in (
        (schedule.loops, Loop, "loops"),
        (schedule.packs, Pack, "packs"),
        (schedule.actions, tuple, "actions"),
    ):
        if type(values) is not tuple or not {*map(type, values)} <= {kind}:
            raise ScheduleError(
                f"a schedule with {name} {values!r:.80}; a tuple of {kind.__name__} would do"
            )
    if not {*map(len, schedule.actions)} <= {2}:
        raise ScheduleError(
            f"a schedule with actions {schedule.actions!r:.80}; (primitive, arguments) would do"
        )
    for number, name in ((schedule.vector, "vector"), (schedule.parallel, "parallel")):
        if number is not None and type(number) is not int:
            raise ScheduleError(f"a schedule with {name}={number!r:.80}; a number or None would do")


def check_loops(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every axis is walked in shrinking steps down to 1, and the
    parallel loop is the outermost over a spatial axis."""
    axes = schedule.nest.axes
    last = [0] * len(axes)  # step of the innermost loop so far over each axis
    for at, loop in enumerate(schedule.loops):
        if loop.axis >= len(axes):
            raise ScheduleError(f"loop {at} is over axis {loop.axis}; the nest has {len(axes)}")
        outer = last[loop.axis]
        if at == schedule.parallel and (outer or axes[loop.axis].reduction):
            raise ScheduleError(f"parallel loop {at} is a reduction or not outermost over its axis")
        if outer and loop.step >= outer:
            raise wrong_steps(schedule, loop.axis)
        last[loop.axis] = loop.step
    for axis, step in enumerate(last):
        if step != 1:
            raise wrong_steps(schedule, axis)
    if schedule.parallel is not None and not 0 <= schedule.parallel < len(schedule.loops):
        raise ScheduleError(f"no loop {schedule.parallel} to run in parallel")
    if schedule.vector is not None and schedule.vector not in range(len(axes)):
        raise ScheduleError(f"no axis {schedule.vector} to spread over lanes")


def wrong_steps(schedule: Schedule, axis: int) -> ScheduleError:
    """What is wrong with the loops over an axis."""
    steps = [loop.step for loop in schedule.loops if loop.axis == axis]
    name = schedule.nest.axes[axis].name
    return ScheduleError(f"the loops over {name} have steps {steps}; they shrink to 1")


def check_packs(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless each pack is of an operand, in an order of its dimensions, at
    the root or in a loop."""
    operands = schedule.nest.operands[: 1 + len(schedule.nest.inputs)]
    for pack in schedule.packs:
        if pack.operand not in range(len(operands)):
            raise ScheduleError(f"{pack}: there are operands 0..{len(operands) - 1}")
        if sorted(pack.order) != list(range(len(operands[pack.operand].dims))):
            raise ScheduleError(
                f"{pack}: {operands[pack.operand].name} has {len(operands[pack.operand].dims)} "
                "dimensions"
            )
        if pack.at != "root" and pack.at not in range(len(schedule.loops)):
            raise ScheduleError(f"{pack}: there are loops 0..{len(schedule.loops) - 1}")


def loop_at(schedule: Schedule, at: int, primitive: str) -> Loop:
    """The loop at position `at`; raises `ScheduleError` with the loops there are."""
    if type(at) is not int or not 0 <= at < len(schedule.loops):
        raise ScheduleError(
            f"{primitive}: no loop {at!r}; the loops are 0..{len(schedule.loops) - 1} "
            f"({schedule.order})"
        )
    return schedule.loops[at]


def axis_named(schedule: Schedule, axis: int | str, primitive: str) -> int:
    """Number of an axis given by number or name."""
    names = [a.name for a in schedule.nest.axes]
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if type(axis) is int and 0 <= axis < len(names):
        return axis
    raise ScheduleError(f"{primitive}: no axis {axis!r}; the axes are {names}")


def permutation(order: Iterable[int], count: int, what: str) -> tuple[int, ...]:
    """`order` as a tuple; raises `ScheduleError` unless it holds 0..count - 1 once each."""
    found = tuple(order) if isinstance(order, Iterable) else (order,)
    if any(type(n) is not int for n in found) or sorted(found) != list(range(count)):
        raise ScheduleError(f"{what} {order!r}: a permutation of 0..{count - 1} would do")
    return found


def after(schedule: Schedule, name: str, *arguments: object, **changes: object) -> Schedule:
    """`schedule` with `changes`, its history longer by one action."""
    actions = (*schedule.actions, (name, arguments))
    return replace(schedule, actions=actions, **changes)  # type: ignore[arg-type]


def split(schedule: Schedule, at: int, factor: int) -> Schedule:
    """Split loop `at` in two; the inner one makes `factor` trips, or what is left of them.

    for i in 0..n:        for i_o in 0..n by factor:
        s(i)        ->        for i in i_o..min(i_o + factor, n): s(i)
    """
    loop = loop_at(schedule, at, "split")
    trips = schedule.trips(at)
    if type(factor) is not int or not 2 <= factor <= trips:
        raise ScheduleError(
            f"split: loop {at} ({schedule.name(at)}) makes {trips} trips; "
            f"a factor of {factor!r} is not in 2..{trips}"
        )
    outer = replace(loop, step=loop.step * factor)
    loops = (*schedule.loops[:at], outer, *schedule.loops[at:])
    parallel = schedule.parallel
    if parallel is not None and parallel > at:
        parallel += 1
    packs = moved_packs(schedule, at, 1)
    return after(schedule, "split", at, factor, loops=loops, parallel=parallel, packs=packs)


def reorder(schedule: Schedule, order: Iterable[int]) -> Schedule:
    """Put the loops in a new order, given as their present positions, outermost first.

    for i: for j: s(i, j)    -- reorder([1, 0]) -->    for j: for i: s(i, j)
    """
    order = permutation(order, len(schedule.loops), "reorder: loops")
    loops = tuple(schedule.loops[at] for at in order)
    for axis in {loop.axis for loop in loops}:
        steps = [loop.step for loop in loops if loop.axis == axis]
        if steps != sorted(steps, reverse=True):
            name = schedule.nest.axes[axis].name
            raise ScheduleError(f"reorder: steps {steps} over {name} must not grow inward")
    parallel = None if schedule.parallel is None else order.index(schedule.parallel)
    return after(schedule, "reorder", order, loops=loops, parallel=parallel)


def swap(schedule: Schedule, at: int) -> Schedule:
    """Swap loop `at` with the one inside it."""
    loop_at(schedule, at, "swap")
    if at + 1 == len(schedule.loops):
        raise ScheduleError(f"swap: loop {at} ({schedule.name(at)}) is innermost")
    outer, inner = schedule.loops[at : at + 2]
    if outer.axis == inner.axis:
        name = schedule.nest.axes[outer.axis].name
        raise ScheduleError(f"swap: loops {at} and {at + 1} both run over {name}")
    loops = (*schedule.loops[:at], inner, outer, *schedule.loops[at + 2 :])
    moved = {at: at + 1, at + 1: at}
    parallel = schedule.parallel
    parallel = None if parallel is None else moved.get(parallel, parallel)
    return after(schedule, "swap", at, loops=loops, parallel=parallel)


def merge(schedule: Schedule, at: int) -> Schedule:
    """Undo a split: drop loop `at`; the next loop inward over the same axis takes its trips.

    for i_o in 0..n by 4: for i in i_o..i_o + 4: s(i)    ->    for i in 0..n: s(i)
    """
    loop = loop_at(schedule, at, "merge")
    if loop.axis not in {inner.axis for inner in schedule.loops[at + 1 :]}:
        raise ScheduleError(f"merge: no loop inside {at} ({schedule.name(at)}) is over its axis")
    parallel = schedule.parallel
    if parallel == at:
        parallel = None
    elif parallel is not None and parallel > at:
        parallel -= 1
    if at == 0 and any(pack.at == 0 for pack in schedule.packs):
        raise ScheduleError("merge: loop 0 holds a pack, and no loop outside could take it")
    loops = schedule.loops[:at] + schedule.loops[at + 1 :]
    packs = moved_packs(schedule, at, -1)
    return after(schedule, "merge", at, loops=loops, parallel=parallel, packs=packs)


def moved_packs(schedule: Schedule, at: int, by: int) -> tuple[Pack, ...]:
    """The packs, those in loop `at` or further inside `by` positions further in."""
    return tuple(
        replace(pack, at=pack.at + by) if isinstance(pack.at, int) and pack.at >= at else pack
        for pack in schedule.packs
    )


def vectorize(schedule: Schedule, axis: int | str) -> Schedule:
    """Spread `axis` over the vector lanes: a reduction gets an accumulator in every lane."""
    number = axis_named(schedule, axis, "vectorize")
    return after(schedule, "vectorize", number, vector=number)


def pack(
    schedule: Schedule,
    operand: int,
    order: Iterable[int] | None = None,
    at: int | str = "root",
) -> Schedule:
    """Copy operand number `operand` into contiguous scratch: an input before it is read, the
    output (number 0) after it is computed.

    for i: for j: s(A[i, j])  -- pack(1, at=0) -->  for i: { P[:] = A[i, :]; for j: s(P[j]) }

    `at` is the loop in whose body the box that the loops inside touch is copied, or "root":
    the whole of it, once. `order` lists the tensor's dimensions, outermost first (None: as
    they are). What the nest reads outside the tensor is filled in the copy: in the one at the
    root, or instead in one in a loop, if that reads all of a padded dimension. When loops are
    reordered later, the pack stays as deep as it is.
    """
    operands = schedule.nest.operands[: 1 + len(schedule.nest.inputs)]
    if type(operand) is not int or not 0 <= operand < len(operands):
        names = ", ".join(f"{i} ({op.name})" for i, op in enumerate(operands))
        raise ScheduleError(f"pack: no operand number {operand!r}; there are {names}")
    if at != "root":
        loop_at(schedule, at, "pack")  # type: ignore[arg-type]
    rank = len(operands[operand].dims)
    what = f"pack: dimensions of {operands[operand].name}"
    order = tuple(range(rank)) if order is None else permutation(order, rank, what)
    made = Pack(operand, order, at)
    plain = Pack(operand, tuple(range(rank)))
    instead = {plain} if operand in schedule.nest.padded and schedule.pads(made) else set()
    packs = tuple(
        p for p in schedule.packs if (p.operand, p.at) != (operand, at) and p not in instead
    )
    return after(schedule, "pack", operand, order, at, packs=(*packs, made))


def parallel(schedule: Schedule, at: int) -> Schedule:
    """Let threads share the iterations of loop `at`, the outermost over a spatial axis."""
    loop = loop_at(schedule, at, "parallel")
    spatial = [
        i for i, inner in enumerate(schedule.loops)
        if not schedule.nest.axes[inner.axis].reduction
        and inner.axis not in {outer.axis for outer in schedule.loops[:i]}
    ]  # fmt: skip
    if at not in spatial:
        kind = "a reduction" if schedule.nest.axes[loop.axis].reduction else "an inner loop"
        raise ScheduleError(
            f"parallel: loop {at} ({schedule.name(at)}) is {kind}; loops {spatial} would do"
        )
    return after(schedule, "parallel", at, parallel=at)


PRIMITIVES: dict[str, Callable[..., Schedule]] = {
    f.__name__: f for f in (split, swap, reorder, merge, vectorize, pack, parallel)
}


def replay(nest: Nest, actions: Iterable[Action]) -> Schedule:
    """Apply recorded actions to the untuned nest; the same list gives the same schedule."""
    schedule = Schedule(nest)
    if not isinstance(actions, Iterable):
        raise ScheduleError(f"replay: {actions!r} is no list of actions")
    for number, action in enumerate(actions):
        match action:
            case (str(name), tuple() | list() as arguments):
                schedule = applied(schedule, number, name, arguments)
            case _:
                raise ScheduleError(
                    f"replay: action {number} is {action!r}; (primitive, arguments) would do"
                )
    return schedule


def applied(schedule: Schedule, number: int, name: str, arguments: Sequence[object]) -> Schedule:
    """`schedule` after the recorded action of this number."""
    if name not in PRIMITIVES:
        raise ScheduleError(f"replay: no primitive {name!r}; there are {sorted(PRIMITIVES)}")
    primitive = PRIMITIVES[name]
    try:
        inspect.signature(primitive).bind(schedule, *arguments)
    except TypeError as reason:
        raise ScheduleError(
            f"replay: action {number}, {name}{tuple(arguments)}: {reason}"
        ) from None
    return primitive(schedule, *arguments)


def parse_order(nest: Nest, text: str, vector: str | None = None) -> Schedule:
    """The schedule whose loops read `m:6 n:16 k m n`, by the primitives that lead to it.

    Raises `ScheduleError` for an unknown axis, a missing innermost loop, or steps that do not
    divide one another.
    """
    if not isinstance(nest, Nest):
        raise ScheduleError(f"the order of a {type(nest).__name__}; a Nest would do (plan.nests)")
    names = [axis.name for axis in nest.axes]
    if not isinstance(text, str):
        raise ScheduleError(f"order {text!r} is no string such as 'm:6 n:16 k m n'")
    wanted = []
    for word in text.split():
        name, colon, step = word.partition(":")
        if name not in names or (colon and not re.fullmatch("[0-9]{1,18}", step)):
            raise ScheduleError(f"order {text!r}: {word!r} is no `axis:step` over {names}")
        wanted.append(Loop(names.index(name), int(step or 1)))
    schedule = with_loops(Schedule(nest), wanted)
    return schedule if vector is None else vectorize(schedule, vector)


def with_loops(schedule: Schedule, wanted: Sequence[Loop]) -> Schedule:
    """A schedule with one loop an axis, split and reordered to have these loops, outermost first.

    Raises `ScheduleError` for a missing innermost loop, or steps that do not divide one another.
    """
    for number, axis in enumerate(schedule.nest.axes):
        steps = [loop.step for loop in wanted if loop.axis == number]
        schedule = split_to(schedule, number, steps, axis)
    position = {loop: at for at, loop in enumerate(schedule.loops)}
    return reorder(schedule, [position[loop] for loop in wanted])


def split_to(schedule: Schedule, number: int, steps: list[int], axis: Axis) -> Schedule:
    """Split axis `number` into loops of `steps`, outermost first, the last of them 1."""
    if not steps:
        raise ScheduleError(f"there is no loop over {axis.name}; every axis needs one")
    if steps[-1] != 1:
        raise ScheduleError(f"the loops over {axis.name} have steps {steps}; the last must be 1")
    at = next(i for i, loop in enumerate(schedule.loops) if loop.axis == number)
    for outer, inner in pairwise(steps):
        if outer == inner:
            raise ScheduleError(f"two loops over {axis.name} have a step of {inner}; one would do")
        if outer % inner:
            raise ScheduleError(
                f"step {outer} over {axis.name} is no multiple of {inner} inside it"
            )
    for step in reversed(steps[:-1]):
        inner_step = schedule.loops[at].step
        schedule = split(schedule, at, step // inner_step)
    return schedule
