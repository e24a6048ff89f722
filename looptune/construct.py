"""A schedule built from the inside out: the decisions a policy takes, some ten for a nest.

First the register tile with its vector axis, from a list of candidates that fits the target, the
cheapest by counting (`looptune.prices`) first. Then which loop comes next outward, and how many
trips it makes: all that are left, or a part of them, which unrolls a reduction or blocks an axis
for the caches. Last, which operands are packed, and which loop threads share.

At any time `schedule` is complete: what is not decided is as `default_schedule` would have it. A
construction that stops at once is therefore the default, and every one replays as primitives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from looptune.default import (
    arrange,
    cacheable,
    lanes_last,
    padded_in,
    panelable,
    reread_at,
    share,
    stream_bytes,
)
from looptune.graph import CANDIDATES, ActionTable, Observation, legal_action, observe
from looptune.ir import Nest
from looptune.offers import Tile, features, tiles_on_offer
from looptune.outlook import outlook, worth
from looptune.prices import Candidate
from looptune.schedule import (
    Loop,
    Pack,
    Schedule,
    pack,
    parallel,
    vectorize,
    with_loops,
)
from looptune.target import Target

TRIPS = (2, 3, 4, 8, 16, 32, 64, 128)  # of a loop that leaves some to another further out
ALL, SHARE = len(TRIPS), len(TRIPS) + 1
TABLE = ActionTable(candidates=CANDIDATES, axis=len(TRIPS) + 2, loop=0, operand=1, world=1)
STOP = TABLE.world_at
PARTS = 2  # loops over an axis that leave something to another
HORIZON = 16
Tree = tuple[tuple[Loop, ...], tuple[Pack, ...], int | None, int | None]


@dataclass(frozen=True)
class Construction:
    """The decisions so far; `take` gives the next state, and `mask` says what may be taken.

    `placed` lists the loops outside of the tile from the inside out, each as the axis, the step
    and how far it reaches: the step times its trips, or the extent. `toggled` operands are packed
    if the tile's candidate leaves them, and left if it packs them. `known` are the outlooks of the
    schedules that constructions from one start came by: most share theirs with others.
    """

    nest: Nest
    target: Target
    threads: int = 1
    tile: int | None = None
    placed: tuple[tuple[int, int, int], ...] = ()
    toggled: tuple[int, ...] = ()
    shared: int | None = None
    steps: int = 0
    done: bool = False
    known: dict[Tree, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def offers(self) -> tuple[Tile, ...]:
        """The tiles to choose from; none where the nest leaves no choice."""
        nest = self.nest
        if nest.points == 0 or all(axis.extent == 1 for axis in nest.axes):
            return ()
        return tiles_on_offer(nest, self.target)

    @cached_property
    def option(self) -> Candidate:
        """The chosen candidate, else the one that would be."""
        return self.offers[self.tile or 0].option

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """By axis, how many elements the tile and the loops placed so far walk over."""
        found = [1] * len(self.nest.axes)
        for axis, size in self.option.tile:
            found[axis] = min(size, self.nest.axes[axis].extent)
        for axis, _, until in self.placed:
            found[axis] = until
        return tuple(found)

    def left(self, axis: int) -> int:
        """Trips that loops over an axis have still to make."""
        return math.ceil(self.nest.axes[axis].extent / (self.reach[axis] * self.unit(axis)))

    def unit(self, axis: int) -> int:
        """Elements that one trip stands for: a whole vector in the innermost loop over a
        reduction that is spread over the lanes."""
        lanes = axis == self.option.vector and self.nest.axes[axis].reduction
        return self.target.lanes(self.nest.dtype) if lanes and self.reach[axis] == 1 else 1

    @property
    def open_axes(self) -> tuple[int, ...]:
        """Axes with elements that no loop walks over yet."""
        return tuple(a for a, axis in enumerate(self.nest.axes) if self.reach[a] < axis.extent)

    @cached_property
    def mask(self) -> np.ndarray:
        """Which actions may be taken, int8 (TABLE.size,): at least one, `STOP`."""
        found = np.zeros(TABLE.size, np.int8)
        found[STOP] = 1
        if self.done or not self.offers or self.steps + 1 >= HORIZON:
            return found
        if self.tile is None:
            found[: len(self.offers)] = 1
        elif self.open_axes:
            for axis in self.open_axes:
                kinds = self.kinds(axis)
                at = TABLE.axis_at + axis * TABLE.axis
                found[at : at + TABLE.axis] = kinds
        else:
            for operand in range(max(self.toggled, default=-1) + 1, 1 + len(self.nest.inputs)):
                found[TABLE.operand_at + operand] = self.packable(operand)
            if self.shared is None and self.threads > 1:
                for axis in self.nest.spatial:
                    at = TABLE.axis_at + axis * TABLE.axis + SHARE
                    found[at] = any(a == axis for a, _, _ in self.placed)
        return found

    def kinds(self, axis: int) -> list[int]:
        """Which loops over an axis may come next.

        A spatial axis cut in two with nothing between the halves is one not cut at all.
        """
        reduction = self.nest.axes[axis].reduction
        last = self.placed[-1][0] if self.placed else None
        others = len(self.open_axes) > 1
        parts = sum(a == axis for a, _, _ in self.placed)
        if last == axis and (not reduction or parts > 1):
            return [0] * (len(TRIPS) + 2) if others else [0] * ALL + [1, 0]
        room = parts < PARTS and (others or (reduction and parts == 0)) and last != axis
        return [*(int(room and trips < self.left(axis)) for trips in TRIPS), 1, 0]

    def packable(self, operand: int) -> int:
        """Whether packing an operand, or not packing it, may be chosen."""
        vector = self.option.vector
        if operand == 0:
            return int(cacheable(self.nest, vector))
        if operand in self.option.panels:
            return 1
        found = self.nest.operands[operand]
        axis = vector if found.stride_of(vector) else self.rows(operand)
        reused = any(
            not self.nest.axes[a].reduction and not found.stride_of(a) for a, _, _ in self.placed
        )
        return int(reused and axis is not None and panelable(self.nest, found, axis, 2))

    def rows(self, operand: int) -> int | None:
        """The axis of the tile's rows, if the operand moves along it."""
        vector = self.option.vector
        moved = (a for a, _ in self.option.tile if a != vector)
        return next((a for a in moved if self.nest.operands[operand].stride_of(a)), None)

    def take(self, action: int) -> Construction:
        """The state after an action; raises `ScheduleError` unless `mask` allows it."""
        action = legal_action(self.mask, action)
        if action == STOP:
            stopped = replace(self, done=True, steps=self.steps + 1)
            stopped.__dict__["schedule"] = self.schedule  # no decision was added
            return stopped
        if action < TABLE.axis_at:
            return replace(self, tile=action, steps=self.steps + 1)
        if action >= TABLE.operand_at:
            toggled = (*self.toggled, action - TABLE.operand_at)
            return replace(self, toggled=toggled, steps=self.steps + 1)
        axis, kind = divmod(action - TABLE.axis_at, TABLE.axis)
        if kind == SHARE:
            return replace(self, shared=axis, steps=self.steps + 1)
        trips = self.left(axis) if kind == ALL else TRIPS[kind]
        return replace(self, placed=(*self.placed, self.loop(axis, trips)), steps=self.steps + 1)

    def loop(self, axis: int, trips: int) -> tuple[int, int, int]:
        """The next loop outward over an axis: the axis, its step, and how far it reaches."""
        step = self.reach[axis]
        until = min(self.nest.axes[axis].extent, step * trips * self.unit(axis))
        return axis, step, until

    @cached_property
    def schedule(self) -> Schedule:
        """All decisions as primitives; those not taken yet as the default would take them."""
        schedule = Schedule(self.nest)
        if not self.offers:
            return schedule
        schedule = vectorize(schedule, self.option.vector)
        if not self.placed and not self.toggled:
            return share(arrange(schedule, self.target, self.option, self.threads), self.threads)
        whole = self.completed()
        schedule = whole.packed(whole.ordered(schedule))
        if self.shared is None:
            return share(schedule, self.threads)
        at = next(i for i, loop in enumerate(schedule.loops) if loop.axis == self.shared)
        return parallel(schedule, at)

    def completed(self) -> Construction:
        """With all loops placed: reductions inside, and inside of them those that move least."""
        found = self
        ranks = {axis: self.rank(axis) for axis in self.open_axes}
        while found.open_axes:
            axis = min(found.open_axes, key=ranks.__getitem__)
            first = found.reach[axis] == 1 and not any(
                found.nest.axes[a].reduction for a, _, _ in found.placed
            )
            trips = found.left(axis)
            if found.nest.axes[axis].reduction and first and trips > found.unrolled > 1:
                trips = found.unrolled
            found = replace(found, placed=(*found.placed, found.loop(axis, trips)))
        return found

    @property
    def unrolled(self) -> int:
        """Terms of a reduction that the default's body has."""
        lanes = self.target.lanes(self.nest.dtype)
        vector = self.option.vector
        sizes = [math.ceil(n / lanes) if a == vector else n for a, n in self.option.tile]
        points = math.prod(sizes)
        chains = math.ceil(self.target.fma_latency * self.target.fma_per_cycle / points)
        return max(4, chains) if 4 * points <= self.target.unroll else 1

    def rank(self, axis: int) -> tuple[int, float, int]:
        """The order in which open axes are completed, inside first."""
        if self.nest.axes[axis].reduction:
            return 0, float(sum(abs(op.stride_of(axis)) for op in self.nest.inputs)), -axis
        panels = [self.nest.operands[number] for number in self.option.panels]
        around = any(op.stride_of(axis) for op in panels)
        return 1 + around, float(stream_bytes(self.nest, axis, dict(self.option.tile))), -axis

    def ordered(self, schedule: Schedule) -> Schedule:
        """The loops split and put in order: those placed, and the tile inside of them."""
        tile = [Loop(a) for a, size in self.option.tile if a != self.option.vector and size > 1]
        tile += [Loop(a) for a, size in self.option.tile if a == self.option.vector and size > 1]
        wanted = [Loop(axis, step) for axis, step, _ in reversed(self.placed)]
        wanted += [loop for loop in tile if loop not in wanted]
        missing = {loop.axis for loop in schedule.loops} - {loop.axis for loop in wanted}
        wanted = [Loop(axis) for axis in sorted(missing)] + wanted
        return with_loops(schedule, wanted)

    def packed(self, schedule: Schedule) -> Schedule:
        """The packs that were chosen, each at the loop around the outermost one that reads its
        box again; padding as close to its use as one copy allows."""
        nest = schedule.nest
        chosen = set(self.option.panels) ^ {number for number in self.toggled if number}
        for number in range(1, 1 + len(nest.inputs)):
            operand = nest.operands[number]
            if number in chosen:
                axis = self.option.vector if operand.stride_of(self.option.vector) else None
                axis = self.rows(number) if axis is None else axis
                order = None if axis is None else lanes_last(operand, axis)
                schedule = pack(schedule, number, order, reread_at(schedule, number))
            elif number in nest.padded:
                loops = padded_in(schedule, operand)
                schedule = pack(schedule, number, None, loops - 1) if loops else schedule
        if self.option.cached != (0 in self.toggled):
            order = lanes_last(nest.output, self.option.vector)
            schedule = pack(schedule, 0, order, reread_at(schedule, 0))
        return schedule

    def observe(self) -> Observation:
        """What a policy sees (`looptune.graph`): the schedule as it would be completed, how far
        it is decided, the tiles on offer, and what the cost model makes of it."""
        reach = (1,) * len(self.nest.axes) if self.tile is None else self.reach
        return observe(
            self.schedule, self.target, self.threads, self.mask,
            steps_left=1 - self.steps / HORIZON, reach=reach,
            candidates=features(self.nest, self.target) if self.offers else None,
            outlook=self.outlook,
        )  # fmt: skip

    @cached_property
    def outlook(self) -> np.ndarray:
        """What is known of the schedule without running it (`looptune.outlook`)."""
        schedule = self.schedule
        tree = (schedule.loops, schedule.packs, schedule.vector, schedule.parallel)
        if tree not in self.known:
            self.known[tree] = outlook(schedule, self.target, self.threads)
        return self.known[tree]

    @property
    def worth(self) -> float | None:
        """log(default's / schedule's predicted time); None if it cannot be lowered."""
        return worth(self.outlook)

    def name_of(self, action: int) -> str:
        """An action in words, such as `tile n:16 m:6`, `k x4`, `pack b`, `leave b`, `stop`."""
        if action == STOP:
            return "stop"
        names = [axis.name for axis in self.nest.axes]
        if action < TABLE.axis_at:
            option = self.offers[action].option
            return "tile " + " ".join(f"{names[a]}:{size}" for a, size in option.tile)
        if action >= TABLE.operand_at:
            number = action - TABLE.operand_at
            packed = number in self.option.panels or (number == 0 and self.option.cached)
            return f"{'leave' if packed else 'pack'} {self.nest.operands[number].name}"
        axis, kind = divmod(action - TABLE.axis_at, TABLE.axis)
        if kind == SHARE:
            return f"share {names[axis]}"
        return f"{names[axis]}" if kind == ALL else f"{names[axis]} x{TRIPS[kind]}"


def decisions_of(state: Construction) -> tuple[int, ...]:
    """Actions that lead from nothing to what is decided in `state`, without the one to stop."""
    walked = Construction(state.nest, state.target, state.threads)
    found = [] if state.tile is None else [state.tile]
    walked = walked if state.tile is None else walked.take(state.tile)
    for placed in state.placed:
        first = TABLE.axis_at + placed[0] * TABLE.axis
        legal = (kind for kind in reversed(range(ALL + 1)) if walked.mask[first + kind])
        found.append(next(first + k for k in legal if walked.take(first + k).placed[-1] == placed))
        walked = walked.take(found[-1])
    found += [TABLE.operand_at + operand for operand in state.toggled]
    if state.shared is not None:
        found.append(TABLE.axis_at + state.shared * TABLE.axis + SHARE)
    return tuple(found)
