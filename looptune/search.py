"""Searches over schedules, one interface: each calls `search.value(schedule)` until it is told
to stop, and the best that it saw is the answer.

A value is the logarithm of the anchor's time over the schedule's, higher is better, or None for
one that fails. What it costs to ask, and when there is nothing left to spend, the caller of
`run` decides; an answer that is known is free. Two action spaces: `paper`, the seven actions of
LoopTune (arXiv 2309.01825) with its cursor, and `ours`, every primitive at every place, of which
the cost model picks the few that are worth a question.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING

from looptune.cost import ranked
from looptune.default import candidates, default_schedule
from looptune.errors import ScheduleError, UnsupportedError
from looptune.ir import Nest
from looptune.lower.form import register_budget
from looptune.schedule import (
    Schedule,
    merge,
    pack,
    parallel,
    parse_order,
    split,
    swap,
    vectorize,
)
from looptune.target import Target

if TYPE_CHECKING:
    from looptune.models.inference import Policy

HORIZON = 10  # actions from the start, as in the paper
PAPER_LOOPS = 10
PAPER_SPLITS = (4, 8, 16)
SPLITS = (2, 3, 4, 5, 6, 8, 12, 14, 16, 24, 32, 48, 64, 128, 256)
ASKED = 8  # of the candidates that the cost model ranks
POPULATION, OFFSPRING = 12, 48
MODEL_BEAM = 24
MODEL_DEPTH = 8
MODEL_SHARE = 0.6  # of the time, left for measuring when a beam on the model ends
EXHAUSTIVE = 256
ADVISING, MOST_ADVISING = 0.2, 0.25  # share of the time, and seconds, to ask a policy in
# The strategy of choice: without a measurement it is ahead of the default schedule on every set of
# shapes that is held out (checkpoints/policy.md).
STRATEGY = "policy"
BARREN = 100  # steps without a new schedule, before a random search gives up

Evaluate = Callable[[Schedule], float | None]


class Spent(Exception):
    """Nothing is left of the budget."""


@dataclass(frozen=True)
class State:
    """A schedule, and for the paper's actions the loop that the cursor is at."""

    schedule: Schedule
    cursor: int = 0


@dataclass
class Search:
    """What a strategy works with: the problem, whom to ask, and what it has seen.

    `evaluate` may raise `Spent`. `values` and `schedules` are by the schedules' identity, in the
    order asked; `left` says how many seconds there are. `policy` is whom the strategy of that name
    asks.
    """

    nest: Nest
    target: Target
    threads: int
    evaluate: Evaluate
    space: str = "ours"
    seed: int = 0
    values: dict[str, float | None] = field(default_factory=dict)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    left: Callable[[], float] = lambda: math.inf
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise UnsupportedError(f"space {self.space!r} is none of {sorted(SPACES)}")
        self.rng = random.Random(self.seed)

    def value(self, schedule: Schedule) -> float | None:
        """The value of a schedule, asked for once; of equal ones the first seen stays the best."""
        known = schedule.identity
        if known not in self.values:
            self.values[known] = self.evaluate(schedule)
            self.schedules[known] = schedule
        return self.values[known]

    def leaders(self, count: int) -> list[Schedule]:
        """The schedules of highest value, the best first; of equal ones the first seen."""
        known = [(value, name) for name, value in self.values.items() if value is not None]
        order = sorted(known, key=lambda pair: -pair[0])
        return [self.schedules[name] for _, name in order[:count]]

    def start(self) -> State:
        """Where a walk begins: the untuned nest for the paper's actions, the default for ours."""
        if self.space == "paper":
            return State(Schedule(self.nest))
        return State(self.default)

    @cached_property
    def default(self) -> Schedule:
        """The schedule that is chosen without a search."""
        return default_schedule(self.nest, self.target, self.threads)

    def moves(self, state: State) -> list[State]:
        """The states one action away; of ours only those that the cost model finds best."""
        found = SPACES[self.space](state, self)
        if self.space == "paper":
            return found
        best = ranked((each.schedule for each in found), self.target, self.threads)
        return [State(schedule) for schedule in best[:ASKED]]

    def score(self, state: State) -> float:
        """The value of a state's schedule, the least of all if it fails."""
        value = self.value(state.schedule)
        return -math.inf if value is None else value


def paper_moves(state: State, search: Search) -> list[State]:
    """up, down, swap_up, swap_down, split_4, split_8, split_16, where they apply."""
    schedule, at = state.schedule, state.cursor
    last = len(schedule.loops) - 1
    moves: list[tuple[Callable[[], Schedule], int]] = []
    moves += [(lambda: schedule, to) for to in (at - 1, at + 1) if 0 <= to <= last]
    moves += [
        (partial(swap, schedule, first), to) for first, to in ((at - 1, at - 1), (at, at + 1))
    ]
    if last + 1 < PAPER_LOOPS:
        moves += [(partial(split, schedule, at, factor), at) for factor in PAPER_SPLITS]
    found = []
    for attempt, to in moves:
        try:
            found.append(State(attempt(), to))
        except ScheduleError:
            continue
    return found


def our_moves(state: State, search: Search) -> list[State]:
    """Every primitive at every place where it applies."""
    return [State(schedule) for schedule in neighbours(state.schedule, search.threads)]


def neighbours(schedule: Schedule, threads: int) -> Iterator[Schedule]:
    """The schedules one primitive away."""
    for attempt in attempts(schedule, threads):
        try:
            yield attempt()
        except ScheduleError:
            continue


def attempts(schedule: Schedule, threads: int) -> list[Callable[[], Schedule]]:
    """Every primitive at every place, applied when called; some do not apply."""
    count = len(schedule.loops)
    found: list[Callable[[], Schedule]] = []
    for at in range(count):
        found += [partial(split, schedule, at, factor) for factor in SPLITS]
        found += [partial(swap, schedule, at), partial(merge, schedule, at)]
        if threads > 1:
            found.append(partial(parallel, schedule, at))
    found += [partial(vectorize, schedule, axis) for axis in range(len(schedule.nest.axes))]
    for operand in range(1 + len(schedule.nest.inputs)):
        for order in sorted(pack_orders(schedule, operand)):
            found += [partial(pack, schedule, operand, order, at) for at in ("root", *range(count))]
    return found


def wander(schedule: Schedule, search: Search) -> Schedule:
    """The schedule after one random primitive that applies, or as it is if none does."""
    options = attempts(schedule, search.threads)
    search.rng.shuffle(options)
    for attempt in options:
        try:
            return attempt()
        except ScheduleError:
            continue
    return schedule


def pack_orders(schedule: Schedule, operand: int) -> set[tuple[int, ...]]:
    """Orders of an operand's dimensions worth a copy: as they are, or the vector axis last."""
    dims = schedule.nest.operands[operand].dims
    plain = tuple(range(len(dims)))
    found = {plain}
    if schedule.vector is not None:
        last = [d for d, dim in enumerate(dims) if dim.coefficients[schedule.vector]]
        if last:
            found.add((*(d for d in plain if d != last[0]), last[0]))
    return found


SPACES: dict[str, Callable[[State, Search], list[State]]] = {
    "paper": paper_moves,
    "ours": our_moves,
}


def default(search: Search) -> None:
    """The schedule that is chosen without a search."""
    search.value(search.default)


def random_walks(search: Search) -> None:
    """Walks of ten random actions from the start, every state valued, again and again."""
    barren = 0
    while barren < BARREN:
        state = search.start()
        before = len(search.values)
        search.value(state.schedule)
        for _ in range(HORIZON):
            state = random_move(state, search)
            search.value(state.schedule)
        barren = 0 if len(search.values) > before else barren + 1


def random_move(state: State, search: Search) -> State:
    """A random action of the search's space, or none where none is legal."""
    if search.space == "ours":
        return State(wander(state.schedule, search))
    options = paper_moves(state, search)
    return search.rng.choice(options) if options else state


def greedy(ahead: int) -> Callable[[Search], None]:
    """Take the first step towards the best state at most `ahead` actions away, while it gains."""

    def strategy(search: Search) -> None:
        state = search.start()
        value = search.score(state)
        for _ in range(HORIZON):
            best, step = value, state
            for first in search.moves(state):
                reached = [first]
                if ahead > 1:
                    search.score(first)
                    reached += search.moves(first)
                for each in reached:
                    found = search.score(each)
                    if found > best:
                        best, step = found, first
            if step is state:
                return
            state, value = step, search.score(step)

    return strategy


def depth_first(width: int) -> Callable[[Search], None]:
    """From every state the `width` best moves, the best of them followed to the end first."""

    def strategy(search: Search) -> None:
        seen: set[tuple[str, int]] = set()

        def visit(state: State, depth: int) -> None:
            place = (state.schedule.identity, state.cursor)
            if depth == HORIZON or place in seen:
                return
            seen.add(place)
            options = sorted(search.moves(state), key=search.score, reverse=True)
            for option in options[:width]:
                visit(option, depth + 1)

        start = search.start()
        search.score(start)
        visit(start, 0)

    return strategy


def breadth_first(width: int) -> Callable[[Search], None]:
    """Level by level, the `width` best states of the whole level kept.

    LoopTune's published beams kept `width` moves of every state, ranked by the action's name.
    """

    def strategy(search: Search) -> None:
        level = [search.start()]
        search.score(level[0])
        seen: set[tuple[str, int]] = set()
        for _ in range(HORIZON):
            options: list[State] = []
            for state in level:
                for option in search.moves(state):
                    place = (option.schedule.identity, option.cursor)
                    if place not in seen:
                        seen.add(place)
                        options.append(option)
            level = sorted(options, key=search.score, reverse=True)[:width]
            if not level:
                return

    return strategy


def evolution(search: Search) -> None:
    """Random changes of the best so far; the cost model thins each generation out."""
    population = starting_points(search)[:POPULATION]
    for schedule in population:
        search.value(schedule)
    barren = 0
    while barren < BARREN // 10:
        before = len(search.values)
        children = [mutated(search, search.rng.choice(population)) for _ in range(OFFSPRING)]
        fresh = [child for child in children if child.identity not in search.values]
        for schedule in ranked(fresh, search.target, search.threads)[:ASKED]:
            search.value(schedule)
            population.append(schedule)
        kept = {schedule.identity: schedule for schedule in population}
        order = sorted(kept.values(), key=lambda s: search.score(State(s)), reverse=True)
        population = order[:POPULATION]
        barren = 0 if len(search.values) > before else barren + 1


def mutated(search: Search, schedule: Schedule) -> Schedule:
    """One to three random primitives later."""
    for _ in range(search.rng.randint(1, 3)):
        schedule = wander(schedule, search)
    return schedule


def starting_points(search: Search) -> list[Schedule]:
    """The default, and what else it was chosen from, the most promising first."""
    others = candidates(search.nest, search.target, search.threads)
    best = ranked(others, search.target, search.threads)
    return [search.default, *best[:MODEL_BEAM]]


def model_beam(search: Search) -> None:
    """A beam by the cost model alone; its best are asked for at the end."""
    for schedule in modelled(search, ASKED):
        search.value(schedule)


def modelled(search: Search, count: int) -> list[Schedule]:
    """The `count` cheapest schedules that a beam on the cost model comes by."""
    level = starting_points(search)
    stop = MODEL_SHARE * search.left()
    seen = {schedule.identity: schedule for schedule in level}
    for _ in range(MODEL_DEPTH):
        for schedule in level[: MODEL_BEAM // 4]:
            if search.left() < stop:
                break
            options = neighbours(schedule, search.threads)
            fresh = ranked(
                (each for each in options if each.identity not in seen),
                search.target,
                search.threads,
            )
            seen.update((each.identity, each) for each in fresh[:MODEL_BEAM])
        order = ranked(seen.values(), search.target, search.threads)[:MODEL_BEAM]
        if [s.identity for s in order] == [s.identity for s in level]:
            break
        level = order
    return ranked(seen.values(), search.target, search.threads)[:count]


def exhaustive(search: Search) -> None:
    """Every schedule of a finite space: see `finite_space`."""
    for schedule in finite_space(search):
        search.value(schedule)


def finite_space(search: Search) -> list[Schedule]:
    """For a plain matmul all register tiles, orders around them and unrolls by 1, 2, 4 and 8;
    otherwise the 256 schedules that the cost model likes best."""
    nest = search.nest
    if len(nest.spatial) == 2 and len(nest.reductions) == 1 and len(nest.inputs) == 2:
        return list(matmul_space(nest, search.target))
    return modelled(search, EXHAUSTIVE)


def matmul_space(nest: Nest, target: Target) -> Iterator[Schedule]:
    """Register tiles of rows by vectors that fit, in both orders of the outer loops."""
    lanes = target.lanes(nest.dtype)
    budget = register_budget(nest, target)
    (first, second), (k,) = nest.spatial, nest.reductions
    vector = second if nest.output.stride_of(second) == 1 else first
    rows = first if vector == second else second
    names = [axis.name for axis in nest.axes]
    for width in range(1, budget + 1):
        if (width - 1) * lanes >= nest.axes[vector].extent:
            break
        for height in range(1, min(budget // width, nest.axes[rows].extent) + 1):
            for unroll, flipped in product((1, 2, 4, 8), (False, True)):
                sizes = {rows: height, vector: width * lanes, k: unroll}
                outer = [a for a, n in sizes.items() if 1 < n < nest.axes[a].extent and a != k]
                outer = outer[::-1] if flipped else outer
                words = [f"{names[a]}:{sizes[a]}" for a in outer]
                words += [f"{names[k]}:{unroll}"] * (1 < unroll < nest.axes[k].extent)
                words += [names[k], names[rows], names[vector]]
                try:
                    yield parse_order(nest, " ".join(words), names[vector])
                except ScheduleError:
                    continue


def policy(search: Search) -> None:
    """The default, then what a policy advises (`looptune.models.advise`), the best first."""
    from looptune.models.advise import advise
    from looptune.propose import WIDE

    assert search.policy is not None, "the strategy 'policy' asks one"
    search.value(search.default)
    found = advise(
        search.policy, search.nest, search.target, search.threads,
        min(ADVISING * search.left(), MOST_ADVISING), WIDE,
    )  # fmt: skip
    for advice in found[:ASKED]:
        search.value(advice.schedule)


STRATEGIES: dict[str, Callable[[Search], None]] = {
    "default": default,
    "random": random_walks,
    "greedy1": greedy(1),
    "greedy2": greedy(2),
    "beam2dfs": depth_first(2),
    "beam4dfs": depth_first(4),
    "beam2bfs": breadth_first(2),
    "beam4bfs": breadth_first(4),
    "evolution": evolution,
    "model-beam": model_beam,
    "exhaustive": exhaustive,
    "policy": policy,
}


def strategy_named(name: str) -> Callable[[Search], None]:
    """The strategy called `name`; raises `UnsupportedError` with the list."""
    if name not in tuple(STRATEGIES):
        raise UnsupportedError(f"strategy {name!r} is none of {sorted(STRATEGIES)}")
    return STRATEGIES[name]


def run(name: str, search: Search) -> Schedule | None:
    """Run a strategy to its end, or to that of the budget; the best schedule it saw, if any."""
    strategy = strategy_named(name)
    try:
        strategy(search)
    except Spent:
        pass
    return next(iter(search.leaders(1)), None)
