"""`looptune/LoopNest-v0`: every primitive of `looptune.schedule` at every place, one at a time.

The schedule is always complete, and any may be the last. What an action would not change, or
would change back to a schedule of the same episode, is masked along with what does not apply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from looptune.default import default_schedule, reread_at
from looptune.envs.episode import GraphEnv
from looptune.envs.problem import Problem
from looptune.errors import ArgumentError, ScheduleError
from looptune.graph import LOOPS, ActionTable, Observation, legal_action, observe
from looptune.outlook import outlook, worth
from looptune.schedule import Pack, Schedule, merge, pack, parallel, split, swap, vectorize
from looptune.search import SPLITS

MERGE, PARALLEL = 1 + len(SPLITS), 2 + len(SPLITS)  # kinds of a loop: swap, the splits, these
PLACES = ("at root", "at root, lanes last", "inside")
TABLE = ActionTable(candidates=0, axis=1, loop=3 + len(SPLITS), operand=len(PLACES), world=1)
STOP = TABLE.world_at
HORIZON = 24
STARTS = ("default", "untuned")
GROUNDS, REMEMBERED = 64, 2048  # problems, and schedules of each, that are remembered

Loops = tuple[tuple[int, int], ...]
Packs = tuple[tuple[int, tuple[int, ...], int], ...]


class Key(NamedTuple):
    """What the identity of a nest's schedules is the digest of, quick to compare."""

    loops: Loops
    packs: Packs
    vector: int | None
    parallel: tuple[int, int] | None


@dataclass(frozen=True)
class Tree:
    """The loops of a schedule, counted once: their trips, and how many loops of more than one
    trip lie outside of each (and of a position behind the last)."""

    trips: tuple[int, ...]
    inside: tuple[int, ...]
    reduces: int

    def depth(self, pack: Pack) -> int:
        """How deep a pack lies in the canonical loops, as `Schedule.depth`; -1 at the root."""
        return -1 if isinstance(pack.at, str) else min(self.inside[pack.at + 1], self.reduces)


def tree_of(schedule: Schedule) -> Tree:
    """Count the loops of a schedule."""
    axes = schedule.nest.axes
    ranges = [axis.extent for axis in axes]
    trips, inside, count, reduces = [], [0], 0, -1
    for loop in schedule.loops:
        reach = ranges[loop.axis]
        times = -(-reach // loop.step)
        ranges[loop.axis] = min(reach, loop.step)
        trips.append(times)
        if times > 1:
            reduces = count if axes[loop.axis].reduction else reduces
            count += 1
        inside.append(count)
    return Tree(tuple(trips), tuple(inside), count if reduces < 0 else reduces)


def key_of(schedule: Schedule, tree: Tree) -> Key:
    """Equal for two schedules of a nest exactly if their identities are."""
    pairs = zip(schedule.loops, tree.trips, strict=True)
    loops = tuple((loop.axis, loop.step) for loop, times in pairs if times > 1)
    packs = sorted((p.operand, p.order, tree.depth(p)) for p in schedule.packs)
    shared = schedule.parallel
    if shared is None or tree.trips[shared] <= 1:
        return Key(loops, tuple(packs), schedule.vector, None)
    loop = schedule.loops[shared]
    return Key(loops, tuple(packs), schedule.vector, (loop.axis, loop.step))


@dataclass(frozen=True, eq=False)
class Ground:
    """What the walks of a problem share: what is constant, and what they have found out."""

    problem: Problem
    known: dict[Key, np.ndarray] = field(default_factory=dict)

    def outlook(self, schedule: Schedule, key: Key) -> np.ndarray:
        """`looptune.outlook` of a schedule; the last few are remembered."""
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= REMEMBERED:
                del self.known[next(iter(self.known))]
            found = outlook(schedule, self.problem.target, self.problem.threads)
            self.known[key] = found
        return found


@lru_cache(maxsize=GROUNDS)
def ground_of(problem: Problem) -> Ground:
    """The ground of a problem, of the last few still with what is known there."""
    return Ground(problem)


@dataclass(frozen=True, eq=False)
class Walk:
    """A schedule after some primitives; `seen` holds the keys of the episode's, this one's too."""

    ground: Ground
    schedule: Schedule
    tree: Tree
    key: Key
    seen: frozenset[Key]
    steps: int = 0
    done: bool = False

    @property
    def problem(self) -> Problem:
        """The problem that the schedule is for."""
        return self.ground.problem

    @cached_property
    def mask(self) -> np.ndarray:
        """Which actions may be taken, int8 (TABLE.size,): at least one, `STOP`."""
        found = np.zeros(TABLE.size, np.int8)
        found[STOP] = 1
        if self.done or self.steps + 1 >= HORIZON:
            return found
        for axis, each in enumerate(self.problem.nest.axes):
            found[TABLE.axis_at + axis] = each.extent > 1 and self.is_new(vector=axis)
        loops = self.schedule.loops
        last = {loop.axis: at for at, loop in enumerate(loops)}
        begun: set[int] = set()
        for at, loop in enumerate(loops[:LOOPS]):
            first = TABLE.loop_at + at * TABLE.loop
            if at + 1 < len(loops) and loop.axis != loops[at + 1].axis:
                found[first] = self.swaps(at)
            self.splits(at, found)
            if last[loop.axis] > at:
                found[first + MERGE] = self.merges(at)
            if self.problem.threads > 1 and loop.axis not in begun:
                found[first + PARALLEL] = self.shares(at)
            begun.add(loop.axis)
        for operand in range(1 + len(self.problem.nest.inputs)):
            first = TABLE.operand_at + operand * TABLE.operand
            for place, made in self.packs(operand):
                found[first + place] = self.is_new(packs=self.packs_with(made))
        return found

    @cached_property
    def seen_loops(self) -> frozenset[Loops]:
        """The loops of the episode's schedules."""
        return frozenset(key.loops for key in self.seen)

    @cached_property
    def seen_counts(self) -> frozenset[int]:
        """How many loops the episode's schedules have."""
        return frozenset(map(len, self.seen_loops))

    def is_new(self, **changes: Any) -> bool:
        """Whether no schedule of the episode has this one's key with these changes."""
        return self.key._replace(**changes) not in self.seen

    def leads_on(self, action: int, loops: Loops) -> bool:
        """Whether an action that leads to these canonical loops leads to a new schedule.

        Few lead back, so only where the loops have been seen is the schedule made.
        """
        if loops not in self.seen_loops:
            return True
        schedule = self.applied(action)
        return key_of(schedule, tree_of(schedule)) not in self.seen

    def swaps(self, at: int) -> bool:
        """Whether to swap loop `at` with the one inside it, of another axis, changes something."""
        known, first = self.key.loops, self.tree.inside[at]
        if min(self.tree.trips[at : at + 2]) > 1:
            known = (*known[:first], known[first + 1], known[first], *known[first + 2 :])
        elif all(pack.at != at for pack in self.schedule.packs):
            return False
        return self.leads_on(TABLE.loop_at + at * TABLE.loop, known)

    def splits(self, at: int, mask: np.ndarray) -> None:
        """Mark in the mask by which of `SPLITS` loop `at` may be split: both parts repeat."""
        if len(self.schedule.loops) >= LOOPS:
            return
        known, first, loop = self.key.loops, self.tree.inside[at], self.schedule.loops[at]
        action = TABLE.loop_at + at * TABLE.loop + 1
        fits = bisect_left(SPLITS, self.tree.trips[at])
        mask[action : action + fits] = 1
        if len(known) + 1 in self.seen_counts:
            for kind in range(fits):
                outer = (loop.axis, loop.step * SPLITS[kind])
                loops = (*known[:first], outer, *known[first:])
                mask[action + kind] = self.leads_on(action + kind, loops)

    def merges(self, at: int) -> bool:
        """Whether loop `at`, which has another over its axis inside, may be left out: a pack in it
        finds a loop further out."""
        if at == 0 and any(pack.at == 0 for pack in self.schedule.packs):
            return False
        known, first = self.key.loops, self.tree.inside[at]
        if self.tree.trips[at] > 1:
            known = (*known[:first], *known[first + 1 :])
        return self.leads_on(TABLE.loop_at + at * TABLE.loop + MERGE, known)

    def shares(self, at: int) -> bool:
        """Whether threads may share loop `at`, the outermost over its axis: a spatial one."""
        loop = self.schedule.loops[at]
        if self.problem.nest.axes[loop.axis].reduction:
            return False
        return self.is_new(parallel=(loop.axis, loop.step) if self.tree.trips[at] > 1 else None)

    def packs(self, operand: int) -> Iterator[tuple[int, Pack]]:
        """The packs on offer for an operand, by place: each one different."""
        dims = self.problem.nest.operands[operand].dims
        plain = tuple(range(len(dims)))
        yield 0, Pack(operand, plain)
        order, vector = plain, self.schedule.vector
        last = () if vector is None else [d for d in plain if dims[d].coefficients[vector]]
        if last:
            order = (*(d for d in plain if d != last[0]), last[0])
        if order != plain:
            yield 1, Pack(operand, order)
        at = reread_at(self.schedule, operand)
        if at != "root":
            yield 2, Pack(operand, order, at)

    def packs_with(self, made: Pack) -> Packs:
        """The key's packs after one more, as `looptune.schedule.pack` would have them."""
        schedule = self.schedule
        instead = None
        if made.operand in self.problem.nest.padded and schedule.pads(made):
            instead = Pack(made.operand, tuple(range(len(made.order))))
        kept = [
            each
            for each in schedule.packs
            if (each.operand, each.at) != (made.operand, made.at) and each != instead
        ]
        return tuple(sorted((p.operand, p.order, self.tree.depth(p)) for p in (*kept, made)))

    def applied(self, action: int) -> Schedule:
        """The schedule after an action; raises `ScheduleError` where it does not apply."""
        if action == STOP:
            return self.schedule
        if action < TABLE.loop_at:
            return vectorize(self.schedule, action - TABLE.axis_at)
        if action < TABLE.operand_at:
            at, kind = divmod(action - TABLE.loop_at, TABLE.loop)
            if kind == 0:
                return swap(self.schedule, at)
            if kind == MERGE:
                return merge(self.schedule, at)
            if kind == PARALLEL:
                return parallel(self.schedule, at)
            return split(self.schedule, at, SPLITS[kind - 1])
        operand, place = divmod(action - TABLE.operand_at, TABLE.operand)
        made = dict(self.packs(operand)).get(place)
        if made is None:
            raise ScheduleError(f"no pack of operand {operand} {PLACES[place]}")
        return pack(self.schedule, made.operand, made.order, made.at)

    def take(self, action: int) -> Walk:
        """The state after an action; raises `ScheduleError` unless `mask` allows it."""
        action = legal_action(self.mask, action)
        if action == STOP:
            return replace(self, steps=self.steps + 1, done=True)
        schedule = self.applied(action)
        tree = tree_of(schedule)
        key = key_of(schedule, tree)
        return Walk(self.ground, schedule, tree, key, self.seen | {key}, self.steps + 1)

    @property
    def outlook(self) -> np.ndarray:
        """What is known of the schedule without running it (`looptune.outlook`)."""
        return self.ground.outlook(self.schedule, self.key)

    @property
    def worth(self) -> float | None:
        """log(default's / schedule's predicted time); None if it cannot be lowered."""
        return worth(self.outlook)

    def observe(self) -> Observation:
        """What a policy sees (`looptune.graph`); there are no candidates."""
        return observe(
            self.schedule, self.problem.target, self.problem.threads, self.mask,
            steps_left=1 - self.steps / HORIZON, outlook=self.outlook,
        )  # fmt: skip

    def name_of(self, action: int) -> str:
        """An action in words, such as `split m by 4`, `swap k, n`, `pack b inside`, `stop`."""
        nest = self.problem.nest
        if action == STOP:
            return "stop"
        if action < TABLE.loop_at:
            return f"vectorize {nest.axes[action - TABLE.axis_at].name}"
        if action >= TABLE.operand_at:
            operand, place = divmod(action - TABLE.operand_at, TABLE.operand)
            return f"pack {nest.operands[operand].name} {PLACES[place]}"
        at, kind = divmod(action - TABLE.loop_at, TABLE.loop)
        name = self.schedule.name(at)
        if kind == 0:
            return f"swap {name}, {self.schedule.name(at + 1)}"
        named = {MERGE: f"merge {name}", PARALLEL: f"share {name}"}
        return named.get(kind) or f"split {name} by {SPLITS[kind - 1]}"


def walk_from(problem: Problem, start: str = "default") -> Walk:
    """The first state of a walk: from the default schedule, or the untuned nest.

    Raises `ArgumentError` for another start.
    """
    if start not in STARTS:
        raise ArgumentError(f"start={start!r}; one of {list(STARTS)} would do")
    nest = problem.nest
    untuned = start == "untuned"
    found = Schedule(nest) if untuned else default_schedule(nest, problem.target, problem.threads)
    tree = tree_of(found)
    key = key_of(found, tree)
    return Walk(ground_of(problem), found, tree, key, frozenset({key}))


class LoopNestEnv(GraphEnv):
    """Up to 24 primitives from the default schedule, or from the untuned nest.

    Actions, by slot (`looptune.graph.ActionTable`), 389 in all:

    | slot | actions |
    |---|---|
    | axis | spread it over the lanes |
    | loop | swap with the one inside; split by one of 15 factors; merge; share among threads |
    | operand | pack at the root, there with the lanes last, or inside the loops that reuse it |
    | nest | stop |

    Observations are those of `looptune.graph`, without candidates.
    `reset(options={"start": "untuned"})` begins with the written order of loops instead of the
    default schedule ("default").
    """

    table = TABLE
    others = ("start",)

    def started(self, problem: Problem, options: Mapping[str, Any]) -> Walk:
        """The default schedule, or the untuned nest."""
        return walk_from(problem, options.get("start", "default"))
