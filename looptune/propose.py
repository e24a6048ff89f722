"""Constructions worth trying, found by a beam: on the cost model alone, or where a policy leads.

The beam goes level by level over the decisions of `looptune.construct`. What each decision is
worth, an `Expand` says: the cost model prices the schedule as it would be completed; a policy
adds up the logarithms of its probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from looptune.construct import STOP, Construction
from looptune.cost import predict
from looptune.default import default_schedule
from looptune.errors import LoweringError
from looptune.ir import Nest
from looptune.schedule import Schedule
from looptune.target import Target

EXPERT_WIDTH, EXPERT_TILES = 6, 24
Prior = Callable[[Sequence[Construction]], np.ndarray]  # (states, TABLE.size) log-probabilities
Worths = Callable[[Sequence[Construction]], np.ndarray]  # (states,) of their schedules


@dataclass(frozen=True)
class Reach:
    """How far a beam looks around: states of a level, tiles tried, decisions tried of a state."""

    width: int
    tiles: int
    branch: int


NARROW, WIDE = Reach(1, 8, 3), Reach(3, 24, 4)


@dataclass(frozen=True)
class Scored:
    """A state and what leads to rank it."""

    score: float
    state: Construction


Expand = Callable[[Sequence[Scored]], Iterable[Scored]]


@dataclass
class ModelValue:
    """log(default / schedule) by the cost model, -inf for what cannot be lowered; remembered."""

    nest: Nest
    target: Target
    threads: int = 1
    known: dict[str, float] = field(default_factory=dict)

    @cached_property
    def base(self) -> float:
        """Predicted cycles of the default schedule."""
        default = default_schedule(self.nest, self.target, self.threads)
        return predict(default, self.target, self.threads).cycles

    def __call__(self, schedule: Schedule) -> float:
        """The value of a schedule."""
        identity = schedule.identity
        if identity not in self.known:
            try:
                cycles = predict(schedule, self.target, self.threads).cycles
            except LoweringError:
                cycles = math.inf
            self.known[identity] = math.log(self.base / cycles) if cycles < math.inf else -math.inf
        return self.known[identity]


def beam(start: Construction, expand: Expand, width: int) -> list[Scored]:
    """All states that a beam of `width` comes by, the best of each level expanded."""
    level = [Scored(0.0, start)]
    found = list(level)
    while level:
        options = list(expand([each for each in level if not each.state.done]))
        found += options
        level = sorted(options, key=lambda each: -each.score)[:width]
    return found


def by_model(value: ModelValue, late: Callable[[], bool] = lambda: False) -> Expand:
    """Every decision but to stop, worth what the cost model says of the completed schedule; none
    once it is `late`."""

    def expand(level: Sequence[Scored]) -> list[Scored]:
        found: dict[str, Scored] = {}
        for each in () if late() else level:
            legal = np.flatnonzero(each.state.mask[:-1])
            for action in legal[:EXPERT_TILES] if each.state.tile is None else legal:
                state = each.state.take(int(action))
                schedule = state.schedule
                key = f"{schedule.identity} {state.placed} {state.toggled}"
                if key not in found:
                    found[key] = Scored(value(schedule), state)
        return list(found.values())

    return expand


def by_policy(prior: Prior, value: Worths, reach: Reach, late: Callable[[], bool]) -> Expand:
    """The decisions that a policy finds most probable, to stop apart, worth what `value` says of
    the schedules as they would be completed; what cannot be lowered is left out.

    Once it is `late`, the most probable decision of the best state alone is followed.
    """

    def expand(level: Sequence[Scored]) -> list[Scored]:
        hurried = late()
        open_ = [each.state for each in level if each.state.mask[:STOP].any()]
        open_ = open_[:1] if hurried else open_
        if not open_:
            return []
        found = []
        for state, row in zip(open_, prior(open_), strict=True):
            legal = np.flatnonzero(state.mask[:STOP])
            count = 1 if hurried else reach.tiles if state.tile is None else reach.branch
            best = legal[np.argsort(-row[legal], kind="stable")[:count]]
            found += [state.take(int(action)) for action in best]
        found = [state for state in found if state.worth is not None]
        worths = value(found) if found else ()
        return [Scored(float(each), state) for each, state in zip(worths, found, strict=True)]

    return expand


def expert(start: Construction, value: ModelValue, width: int = EXPERT_WIDTH) -> list[Scored]:
    """Constructions by the cost model, the best first; of equal schedules the shortest."""
    shortest: dict[str, Scored] = {}
    for each in beam(start, by_model(value), width):
        identity = each.state.schedule.identity
        known = shortest.get(identity)
        if known is None or each.state.steps < known.state.steps:
            shortest[identity] = Scored(value(each.state.schedule), each.state)
    return sorted(shortest.values(), key=lambda each: (-each.score, each.state.steps))


def by_worth(states: Sequence[Construction]) -> np.ndarray:
    """What the cost model says of constructions, -inf for what cannot be lowered."""
    return np.array([-math.inf if state.worth is None else state.worth for state in states])


def proposals(
    start: Construction,
    prior: Prior,
    value: Worths,
    reach: Reach = NARROW,
    late: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """What a beam of `reach` finds where a policy leads: constructions by what `value` says of
    them, the best first, the default left out, no schedule twice."""
    found: dict[str, Scored] = {}
    states = beam(start, by_policy(prior, value, reach, late), reach.width)[1:]
    for each in sorted(states, key=lambda each: -each.score):
        found.setdefault(each.state.schedule.identity, each)
    found.pop(start.schedule.identity, None)
    return list(found.values())


def rollout(start: Construction, prior: Prior) -> Construction:
    """The most probable decisions of a policy, to the end."""
    state = start
    while not state.done:
        (row,) = prior([state])
        state = state.take(int(np.argmax(np.where(state.mask, row, -np.inf))))
    return state


def random_construction(rng: np.random.Generator, start: Construction) -> Construction:
    """Random decisions, cheap tiles more often than others; sometimes stopped early."""
    state = start
    while not state.done:
        legal = np.flatnonzero(state.mask)
        if state.tile is None and len(legal) > 1:
            action = min(int(rng.exponential(6)), len(legal) - 2)
        elif state.placed and rng.random() < 0.25:
            action = STOP
        else:
            action = int(rng.choice(legal))
        state = state.take(action)
    return state
