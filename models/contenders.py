"""Who competes with a policy: the schedules that others would choose for the same nest.

A fixed register tile, the cost model's favourites of a beam and of random constructions, the best
of the nearest measured problem, and the policy's network without what it learnt from measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from looptune.construct import Construction
from looptune.default import share
from looptune.errors import ScheduleError
from looptune.ir import Nest
from looptune.models.advise import outside
from looptune.models.dataset import MeasuredProblem, load
from looptune.models.inference import Policy
from looptune.propose import (
    ModelValue,
    beam,
    by_model,
    by_worth,
    proposals,
    random_construction,
    rollout,
)
from looptune.schedule import Schedule, parse_order
from looptune.target import Target

ROWS, VECTORS = 6, 2  # of the static tile beside a policy: 6x16 in float32 on AVX2, 6x32 on AVX-512
BEAM_WIDTH = 3
Late = Callable[[], bool]
Family = tuple[object, ...]


@dataclass(frozen=True)
class Task:
    """A nest that somebody is to choose a schedule for."""

    nest: Nest
    target: Target
    threads: int
    policy: Policy

    @cached_property
    def start(self) -> Construction:
        """Nothing decided: the default."""
        return Construction(self.nest, self.target, self.threads)

    @property
    def open(self) -> bool:
        """Whether a policy has a choice."""
        return not outside(self.nest) and bool(self.start.offers)

    @cached_property
    def value(self) -> ModelValue:
        """The cost model's values of its schedules."""
        return ModelValue(self.nest, self.target, self.threads)


def static_name(rows: int = ROWS, vectors: int = VECTORS) -> str:
    """What a static tile is called: `static 6x2v` has six rows of two vectors."""
    return f"static {rows}x{vectors}v"


def static_tile(
    nest: Nest, target: Target, rows: int = ROWS, vectors: int = VECTORS, threads: int = 1
) -> Schedule | None:
    """So many rows by so many vectors around the whole reduction; None but for a plain matmul."""
    if len(nest.spatial) != 2 or len(nest.axes) != 3 or len(nest.inputs) != 2:
        return None
    (down, along), (terms,) = nest.spatial, nest.reductions
    names = [axis.name for axis in nest.axes]
    sizes = {down: rows, along: vectors * target.lanes(nest.dtype)}
    tile = [f"{names[axis]}:{n}" for axis, n in sizes.items() if n < nest.axes[axis].extent]
    order = [*tile, names[terms], names[down], names[along]]
    try:
        return share(parse_order(nest, " ".join(order), names[along]), threads)
    except ScheduleError:
        return None


def by_network(task: Task) -> dict[str, Schedule]:
    """What the network does by itself, and what it leads the cost model to."""
    prior = task.policy.log_probabilities
    alone = rollout(task.start, prior)
    alone = task.start if alone.worth is None else alone
    led = [each.state for each in proposals(task.start, prior, by_worth)[:1]]
    liked = max((task.start, alone, *led), key=lambda state: task.value(state.schedule))
    return {"network alone": alone.schedule, "network and cost model": liked.schedule}


def by_beam(task: Task, late: Late) -> Schedule:
    """The best of a beam that the cost model leads; it may end one expansion too late."""
    states = beam(task.start, by_model(task.value, late), BEAM_WIDTH)
    return max((each.state.schedule for each in states), key=task.value)


def by_chance(task: Task, late: Late) -> Schedule:
    """What the cost model likes best of random constructions; of the default, too."""
    rng = np.random.default_rng(0)
    best = task.start.schedule
    while not late():
        drawn = random_construction(rng, task.start).schedule
        best = max(best, drawn, key=task.value)
    return best


def chosen(task: Task, late: Callable[[], Late]) -> dict[str, Schedule]:
    """What everybody chooses but the policy; each search with a `late()` of its own."""
    static = static_tile(task.nest, task.target, threads=task.threads)
    found = {} if static is None else {static_name(): static}
    if not task.open:
        others = ("network alone", "network and cost model", "cost-model beam",
                  "random by cost model", "nearest neighbour")  # fmt: skip
        return found | dict.fromkeys(others, task.start.schedule)
    found |= by_network(task)
    found["cost-model beam"] = by_beam(task, late())
    found["random by cost model"] = by_chance(task, late())
    found["nearest neighbour"] = by_neighbour(task, shipped_neighbours())
    return found


@dataclass(frozen=True)
class Neighbour:
    """A measured problem: the logarithms of its extents, and its best decisions, none if none of
    them gained."""

    extents: tuple[float, ...]
    decisions: tuple[int, ...]


Neighbours = Mapping[Family, list[Neighbour]]


def family(nest: Nest, target: Target) -> Family:
    """What nests share whose extents alone differ: the axes, who moves along them, the type."""
    moves = tuple(
        tuple(bool(operand.stride_of(axis)) for axis in range(len(nest.axes)))
        for operand in nest.operands
    )
    return target.name, nest.dtype, tuple(axis.reduction for axis in nest.axes), moves


def extents(nest: Nest) -> tuple[float, ...]:
    """The place of a nest within its family."""
    return tuple(math.log(axis.extent) for axis in nest.axes)


def neighbours_of(problems: list[MeasuredProblem]) -> Neighbours:
    """Measured problems by family."""
    found: dict[Family, list[Neighbour]] = {}
    for problem in problems:
        best = max(problem.rows, key=lambda row: row.mean)
        each = Neighbour(extents(problem.nest), best.decisions if best.mean > 0 else ())
        found.setdefault(family(problem.nest, problem.target), []).append(each)
    return found


@lru_cache(maxsize=1)
def shipped_neighbours() -> Neighbours:
    """The shipped measurements, read once."""
    return neighbours_of(list(load()))


def by_neighbour(task: Task, known: Neighbours) -> Schedule:
    """The best decisions of the nearest measured problem, as far as they apply: primitives would
    carry its extents over, and lose twice as much."""
    near = known.get(family(task.nest, task.target), [])
    here = extents(task.nest)
    nearest = min(near, key=lambda each: math.dist(here, each.extents), default=None)
    state = task.start
    for action in () if nearest is None else nearest.decisions:
        if not state.mask[action]:
            break
        state = state.take(action)
    return state.schedule
