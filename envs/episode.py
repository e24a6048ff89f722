"""What the environments over graphs share: episodes, masks, rewards, fork and undo.

The reward is that of the last state, log(default's time / schedule's time) within [-2, 2], and on
the way the change of the same by the cost model, the potential of Ng, Harada and Russell (ICML
1999): at the end it is zero, so it moves no optimum.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from looptune.envs.problem import (
    Problem,
    Problems,
    check_problems,
    check_render_mode,
    chosen,
    named,
    on_this_machine,
    warn_of_the_end,
)
from looptune.envs.rewards import LEAST, REWARDS, Gain, Measured, clipped, modelled
from looptune.errors import ArgumentError
from looptune.graph import (
    AXES,
    OPERANDS,
    PAIRS,
    ActionTable,
    Observation,
    in_domain,
    known_action,
    shapes,
)
from looptune.schedule import Schedule

ILLEGAL_PENALTY = -0.05
PATIENCE = 64  # illegal actions, after which an episode is cut off
Info = dict[str, Any]


class State(Protocol):
    """A schedule on its way, and what may be done to it."""

    @property
    def mask(self) -> np.ndarray:
        """int8 (actions,): which may be taken."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The schedule if nothing else is done."""
        ...

    @property
    def worth(self) -> float | None:
        """The cost model's log(default / schedule); None if it cannot be lowered."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        ...

    def take(self, action: int) -> Self:
        """The next state."""
        ...

    def observe(self) -> Observation:
        """What a policy sees."""
        ...

    def name_of(self, action: int) -> str:
        """An action in words."""
        ...


def observation_space(table: ActionTable) -> spaces.Dict:
    """The space of `looptune.graph`'s observations."""
    found: dict[str, spaces.Space[Any]] = {}
    for name, (shape, dtype) in shapes(table).items():
        low, high = (0, 63) if dtype == "int64" else (0, 1) if dtype == "int8" else (-64.0, 64.0)
        found[name] = spaces.Box(low, high, shape, np.dtype(dtype).type)
    return spaces.Dict(found)


class GraphEnv(gymnasium.Env[Observation, np.int64], ABC):
    """Base of `looptune/Construct-v0` and `looptune/LoopNest-v0`.

    `problems` draws a `Problem` from a generator; `reset(options={"nest": ..., "target": ...,
    "threads": ...})` sets one. `reward` is "model", "measured", or a function of problem and
    schedule. An action that the mask forbids changes nothing and costs a little; an episode of 64
    of them is truncated. `gamma` is the discount that the learner uses. `least` is the least
    reward of a schedule: at 0 the better of it and the default counts, which is what `optimize`
    keeps; with the losses counted, a beginner learns to stop before it has learnt to win.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012
    table: ClassVar[ActionTable]
    others: ClassVar[tuple[str, ...]] = ()  # options of a reset beside those of a problem

    def __init__(
        self,
        problems: Problems = on_this_machine,
        reward: str | Gain = "model",
        shaping: bool = True,
        gamma: float = 1.0,
        render_mode: str | None = None,
        least: float = LEAST,
    ) -> None:
        check_problems(problems)
        check_render_mode(render_mode)
        if not LEAST <= least <= 0:
            raise ArgumentError(f"least={least!r}; {LEAST} to 0 would do")
        self.problems = problems
        self.gain: Gain = named(reward, REWARDS)
        self.shaping, self.gamma, self.least = shaping, gamma, least
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(self.table.size)
        self.observation_space = observation_space(self.table)
        self.past: list[State] = []
        self.taken: list[str] = []
        self.refused = 0

    @abstractmethod
    def started(self, problem: Problem, options: Mapping[str, Any]) -> State:
        """The first state of an episode."""

    @property
    def state(self) -> State:
        """Where the episode is."""
        return self.past[-1]

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """A new episode. Raises `ArgumentError` for unknown options and nests without slots."""
        super().reset(seed=seed)
        options = {} if options is None else options
        self.problem = chosen(options, self.others, self.problems, self.np_random)
        if not in_domain(self.problem.nest):
            nest = self.problem.nest
            raise ArgumentError(
                f"{nest} has {len(nest.axes)} axes and {len(nest.operands)} operands; up to {AXES} "
                f"and {OPERANDS}, and {PAIRS} pairs of both, would do"
            )
        self.past, self.taken, self.refused = [self.started(self.problem, options)], [], 0
        return self.seen(), {"action_mask": self.state.mask}

    def seen(self) -> Observation:
        """The observation: arrays that nothing else holds, and that may be written to."""
        found = self.state.observe()
        return {**found, **{name: found[name].copy() for name in ("candidates", "action_mask")}}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, Info]:
        """Take an action. Raises `ArgumentError` for one outside of the space; behind the end of an
        episode nothing happens, with a warning."""
        number, before = known_action(action, self.table.size), self.state
        if before.done or self.refused >= PATIENCE:
            warn_of_the_end()
        if before.done or not before.mask[number]:
            self.refused += 1
            info = {"action_mask": before.mask, "illegal": True}
            return self.seen(), ILLEGAL_PENALTY, before.done, self.refused >= PATIENCE, info
        self.taken.append(before.name_of(number))
        self.past.append(before.take(number))
        info = {"action_mask": self.state.mask, "illegal": False}
        reward = -self.potential(before)
        if self.state.done:
            gain = self.final_gain()
            reward += clipped(gain, self.least)
            info |= {"gain": gain, "schedule": self.state.schedule.order}
        else:
            reward += self.gamma * self.potential(self.state)
        return self.seen(), reward, self.state.done, False, info

    def final_gain(self) -> float | None:
        """What the finished schedule is worth."""
        if self.gain is modelled:
            return self.state.worth
        return self.gain(self.problem, self.state.schedule)

    def potential(self, state: State) -> float:
        """The cost model's opinion, zero without shaping."""
        return clipped(state.worth, self.least) if self.shaping else 0.0

    def close(self) -> None:
        """Write what was measured, if a file keeps it."""
        if isinstance(self.gain, Measured):
            self.gain.flush()

    def action_masks(self) -> np.ndarray:
        """bool (actions,): the mask under the name that sb3-contrib asks for."""
        return self.state.mask.astype(bool)

    def undo(self) -> Observation:
        """One step back; nothing at the start."""
        if len(self.past) > 1:
            self.past.pop()
            self.taken.pop()
        return self.seen()

    def fork(self) -> Self:
        """A copy that goes on independently; states are shared, they do not change."""
        twin = copy.copy(self)
        twin.past, twin.taken = list(self.past), list(self.taken)
        twin._np_random = copy.deepcopy(self._np_random)
        return twin

    def render(self) -> str | None:  # type: ignore[override]
        """The loop tree and the actions so far."""
        if self.render_mode is None:
            return None
        worth = self.state.worth
        value = "cannot be lowered" if worth is None else f"{np.exp(worth):.3f}x the default"
        return f"{self.state.schedule}\n{', '.join(self.taken) or 'start'}: {value} by the model"
