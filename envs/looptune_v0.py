"""`looptune/LoopTune-v0`: the environment of LoopTune (Grubisic et al., arXiv 2309.01825).

A cursor walks over the loops; seven actions move it, swap its loop, or split it by 4, 8 or 16.
Observation, legality and reward are those of the public code (loopstack/looptune, commit
f85c832), its limits included; `looptune/LoopNest-v0` is the one without them. As in LoopNest,
the innermost loop's axis is spread over the lanes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from looptune.build import build
from looptune.cost import predict
from looptune.envs.problem import (
    Problem,
    Problems,
    check_problems,
    check_render_mode,
    chosen,
    named,
    warn_of_the_end,
)
from looptune.errors import LooptuneError, LoweringError
from looptune.graph import known_action
from looptune.host import host_target
from looptune.ir import Nest, Operand, plan_of
from looptune.measure import highest_peak, measure
from looptune.oracle import Oracle
from looptune.schedule import Loop, Schedule, vectorize, with_loops
from looptune.workloads.generate import paper_matmul
from looptune.workloads.held_out import is_held_out

ACTIONS = ("up", "down", "swap_up", "swap_down", "split_4", "split_8", "split_16")
FACTORS = {"split_4": 4, "split_8": 8, "split_16": 16}
HORIZON = 10
ROWS, FEATURES, BINS = 10, 20, 16
LARGEST = 1e6  # of an observation
MULTIPLE = 8  # of the innermost loop's trips
REMEMBERED = 4096  # rates
Rate = Callable[[Problem, Schedule], float]
Info = dict[str, Any]


@dataclass(frozen=True)
class CursorWalk:
    """The loops of the compute nest, outermost first, and the one that the cursor is at.

    Unlike a schedule's, loops of one axis may have equal steps: the inner makes one trip.
    """

    nest: Nest
    loops: tuple[Loop, ...]
    cursor: int = 0

    def reach(self, at: int) -> int:
        """Elements of its axis that loop `at` walks over."""
        axis = self.loops[at].axis
        outer = (loop.step for loop in self.loops[:at] if loop.axis == axis)
        return min([self.nest.axes[axis].extent, *outer])

    def size(self, at: int) -> int:
        """Full trips of loop `at`; what is left over is its tail."""
        return self.reach(at) // self.loops[at].step

    @property
    def is_legal(self) -> bool:
        """The rule of the public code: the innermost loop makes one trip or a multiple of 8, and
        with those that write the output there are at most ten."""
        innermost = self.size(len(self.loops) - 1)
        fits = len(self.loops) + len(self.nest.spatial) <= ROWS
        return fits and (innermost == 1 or innermost % MULTIPLE == 0)

    def after(self, action: int) -> CursorWalk | None:
        """The state that an action leads to; None if it is illegal."""
        found = self.tried(ACTIONS[action]) if 0 <= action < len(ACTIONS) else None
        return found if found is not None and found.is_legal else None

    def tried(self, name: str) -> CursorWalk | None:
        """The state that an action leads to, by the rule that it must exist alone."""
        at = self.cursor
        if name in FACTORS:
            factor, loop = FACTORS[name], self.loops[at]
            if self.size(at) < factor:
                return None
            outer = Loop(loop.axis, loop.step * factor)
            return replace(self, loops=(*self.loops[:at], outer, *self.loops[at:]))
        to = at - 1 if name.endswith("up") else at + 1
        if not 0 <= to < len(self.loops):
            return None
        loops = list(self.loops)
        if name.startswith("swap") and loops[at].axis != loops[to].axis:
            loops[at], loops[to] = loops[to], loops[at]
        return replace(self, loops=tuple(loops), cursor=to)

    @property
    def mask(self) -> np.ndarray:
        """Which actions are legal, int8 (7,); now and then none is."""
        return np.array([self.after(a) is not None for a in range(len(ACTIONS))], np.int8)

    @cached_property
    def schedule(self) -> Schedule:
        """The loops as a schedule, without those that never make a second trip."""
        wanted = [
            loop
            for at, loop in enumerate(self.loops)
            if loop.step == 1 or self.reach(at) > loop.step
        ]
        schedule = with_loops(Schedule(self.nest), wanted)
        return vectorize(schedule, wanted[-1].axis) if wanted else schedule

    def observe(self) -> np.ndarray:
        """What the paper's network saw, float32 (200,): ten rows of twenty, outermost loop first.

        A row: whether the cursor is here, size, tail, whether the loop computes (or writes the
        output), and the share of the moving operands by the logarithm of their stride.
        """
        found = np.zeros((ROWS, FEATURES), np.float32)
        rows = min(ROWS, len(self.loops))
        for at, loop in enumerate(self.loops[:rows]):
            reach = self.reach(at)
            found[at, :4] = at == self.cursor, reach // loop.step, reach % loop.step, 1.0
            found[at, 4:] = histogram(loop, self.nest.operands[: 1 + len(self.nest.inputs)])
        for at, axis in zip(range(rows, ROWS), self.nest.spatial, strict=False):
            found[at, 1] = self.nest.axes[axis].extent
            found[at, 4:] = histogram(Loop(axis), (self.nest.output,))
        return np.clip(found, 0.0, LARGEST).reshape(-1)


def histogram(loop: Loop, operands: tuple[Operand, ...]) -> list[float]:
    """By ceil(log2(stride)), the share of the operands that move that far in a trip.

    Those that do not move are not counted; those that move further than 2**15 are in the total.
    """
    moves = [operand.stride_of(loop.axis) * loop.step for operand in operands]
    strides = [stride for stride in moves if stride > 0]
    found = [0.0] * BINS
    for stride in strides:
        place = (stride - 1).bit_length()
        if place < BINS:
            found[place] += 1 / len(strides)
    return found


def paper_problems(rng: np.random.Generator) -> Problem:
    """LoopTune's matmuls, extents 64 to 256 in steps of 16, none that is held out."""
    while True:
        (nest,) = paper_matmul(rng, "float32").nests
        if not is_held_out(nest):
            return Problem(nest, host_target())


def modelled_rate(problem: Problem, schedule: Schedule) -> float:
    """The share of the target's peak by the cost model; 0 for what cannot be lowered."""
    nest, target = problem.nest, problem.target
    try:
        cycles = predict(schedule, target, problem.threads).cycles
    except LoweringError:
        return 0.0
    peak = 2 * target.lanes(nest.dtype) * target.fma_per_cycle * problem.threads
    return nest.flops / cycles / peak


@dataclass
class MeasuredRate:
    """The share of the measured peak: the best of short samples, remembered; 0 for what fails."""

    seconds: float = 0.01
    known: dict[tuple[str, str, int], float] = field(default_factory=dict)

    def __call__(self, problem: Problem, schedule: Schedule) -> float:
        """Build, verify and time the schedule, unless its rate is known."""
        key = (schedule.identity, problem.target.name, problem.threads)
        if key not in self.known:
            if len(self.known) >= REMEMBERED:
                del self.known[next(iter(self.known))]
            self.known[key] = self.asked(problem, schedule)
        return self.known[key]

    def asked(self, problem: Problem, schedule: Schedule) -> float:
        """The rate of a schedule that is not known."""
        plan = plan_of(problem.nest)
        try:
            kernel = build(plan, [schedule], problem.target, threads=problem.threads)
            Oracle(plan, 0).verify(kernel)
        except LooptuneError:
            return 0.0
        best = min(measure(kernel, seconds=self.seconds).seconds)
        peak = highest_peak(problem.target, problem.nest.dtype)
        return kernel.flops / best / (peak * problem.threads)


RATES: dict[str, Callable[[], Rate]] = {"model": lambda: modelled_rate, "measured": MeasuredRate}


class LoopTuneEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Ten steps from the untuned nest; the reward is the change of GFLOPS over the peak.

    | number | action |
    |---|---|
    | 0, 1 | up, down: move the cursor |
    | 2, 3 | swap_up, swap_down: swap its loop, and move along; two loops of one axis stay |
    | 4, 5, 6 | split_4, split_8, split_16: a new loop of so many trips inside of this one |

    Observations are float32 (200,): see `CursorWalk.observe`. An illegal action changes nothing,
    earns nothing, and spends a step. `reward` is "model", "measured", or a function of problem
    and schedule that gives a share of the peak.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        problems: Problems = paper_problems,
        reward: str | Rate = "model",
        render_mode: str | None = None,
    ) -> None:
        check_problems(problems)
        check_render_mode(render_mode)
        self.problems = problems
        self.rate: Rate = named(reward, RATES)
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(len(ACTIONS))
        self.observation_space = spaces.Box(0.0, LARGEST, (ROWS * FEATURES,), np.float32)
        self.past: list[tuple[CursorWalk, float]] = []

    @property
    def state(self) -> CursorWalk:
        """Where the episode is."""
        return self.past[-1][0]

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, Info]:
        """A new episode; raises `ArgumentError` for unknown options."""
        super().reset(seed=seed)
        self.problem = chosen({} if options is None else options, (), self.problems, self.np_random)
        nest = self.problem.nest
        walk = CursorWalk(nest, tuple(Loop(axis) for axis in range(len(nest.axes))))
        self.past = [(walk, self.rate(self.problem, walk.schedule))]
        return walk.observe(), self.info(illegal=False)

    def info(self, *, illegal: bool) -> Info:
        """What is said beside an observation."""
        walk, rate = self.past[-1]
        return {
            "action_mask": walk.mask, "illegal": illegal, "rate": rate,
            "schedule": walk.schedule.order,
        }  # fmt: skip

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        """Take an action; the tenth step truncates the episode.

        Raises `ArgumentError` for one outside of the space; behind the end nothing happens, with a
        warning.
        """
        walk, before = self.past[-1]
        number, spent = known_action(action, len(ACTIONS)), len(self.past) > HORIZON
        if spent:
            warn_of_the_end()
        found = None if spent else walk.after(number)
        if found is None:
            reached = (walk, before)
        elif found.loops == walk.loops:
            reached = (found, before)
        else:
            reached = (found, self.rate(self.problem, found.schedule))
        if not spent:
            self.past.append(reached)
        info = self.info(illegal=found is None)
        over = len(self.past) > HORIZON
        return reached[0].observe(), reached[1] - before, False, over, info

    def action_masks(self) -> np.ndarray:
        """bool (7,): the legal actions, under the name that sb3-contrib asks for."""
        return self.state.mask.astype(bool)

    def undo(self) -> np.ndarray:
        """One step back; nothing at the start."""
        if len(self.past) > 1:
            self.past.pop()
        return self.state.observe()

    def fork(self) -> Self:
        """A copy that goes on independently; states are shared, they do not change."""
        twin = copy.copy(self)
        twin.past = list(self.past)
        twin._np_random = copy.deepcopy(self._np_random)
        return twin

    def render(self) -> str | None:  # type: ignore[override]
        """The loops with the cursor, and the share of the peak."""
        if self.render_mode is None:
            return None
        walk, rate = self.past[-1]
        return "\n".join([*lines(walk), f"{rate:.3f} of the peak"])


def lines(walk: CursorWalk) -> Iterator[str]:
    """A loop a line; `>` is the cursor."""
    for at, loop in enumerate(walk.loops):
        name, rest = walk.nest.axes[loop.axis].name, walk.reach(at) % loop.step
        tail = f", tail {rest}" if rest else ""
        yield f"{'>' if at == walk.cursor else ' '}{'  ' * at}{name} {walk.size(at)}{tail}"
