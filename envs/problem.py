"""What an episode is about, and where training takes its problems from."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import gymnasium
import numpy as np

from looptune.errors import ArgumentError, ArgumentTypeError
from looptune.graph import in_domain
from looptune.host import host_target, runs
from looptune.ir import Nest, Plan
from looptune.target import TARGETS, Target
from looptune.workloads.generate import draw

Reward = TypeVar("Reward")
MOST_THREADS = 8
CACHE_FACTORS = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Problem:
    """A nest to be scheduled for a target, with so many threads. Raises `ArgumentTypeError` for
    anything else."""

    nest: Nest
    target: Target
    threads: int = 1

    def __post_init__(self) -> None:
        for name, kind in (("nest", Nest), ("target", Target)):
            value = getattr(self, name)
            if isinstance(value, Plan):
                raise ArgumentTypeError(f"{name} is a Plan; its plan.nests[0] would do")
            if not isinstance(value, kind):
                found = reprlib.repr(value)
                raise ArgumentTypeError(f"{name}={found}; a {kind.__name__} would do")
        if not isinstance(self.threads, int) or self.threads < 1:
            raise ArgumentTypeError(f"threads={self.threads!r}; a whole number from 1 would do")


Problems = Callable[[np.random.Generator], Problem]
GIVEN = ("nest", "target", "threads")  # options of a reset that say what a problem is


def drawn(rng: np.random.Generator, family: str | None = None) -> Nest:
    """A training nest that fits the observation."""
    while True:
        nest = draw(rng, family)
        if in_domain(nest):
            return nest


def on_this_machine(rng: np.random.Generator, family: str | None = None) -> Problem:
    """Training problems for what this machine runs, on one thread."""
    found = [target for target in TARGETS.values() if runs(target)]
    target = found[int(rng.integers(len(found)))]
    nest = drawn(rng, family)
    return Problem(nest, replace(target, cache_bytes=host_target().cache_bytes))


def on_any_machine(rng: np.random.Generator) -> Problem:
    """Training problems for machines that differ in lanes, registers, caches and threads, so that
    the features of a target mean something. They are priced by the cost model, never run."""
    base = list(TARGETS.values())[int(rng.integers(len(TARGETS)))]
    sizes = [int(size * rng.choice(CACHE_FACTORS)) for size in base.cache_bytes]
    caches = sizes[0], max(sizes[:2]), max(sizes)
    registers = int(rng.choice((16, 32)))
    target = replace(base, vector_registers=registers, cache_bytes=caches)
    threads = int(rng.choice((1, 1, 2, MOST_THREADS)))
    return Problem(drawn(rng), target, threads)


def listed(problems: Sequence[Problem]) -> Problems:
    """One of a list."""
    return lambda rng: problems[int(rng.integers(len(problems)))]


def chosen(
    options: Mapping[str, Any], others: Sequence[str], problems: Problems, rng: np.random.Generator
) -> Problem:
    """The problem of an episode: given by the options, or drawn and changed as far as it is given.

    Raises `ArgumentError` for options that are neither of a problem nor among `others`.
    """
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(f"options={options!r:.80}; a mapping or None would do")
    known = (*GIVEN, *others)
    unknown = sorted(set(options) - set(known), key=str)
    if unknown:
        raise ArgumentError(f"options {unknown}; {list(known)} would do")
    given = {name: options[name] for name in GIVEN if name in options}
    if "nest" in given and "target" in given:
        return Problem(**given)
    return replace(problems(rng), **given)


def pooled(problems: Problems, count: int, seed: int) -> list[Problem]:
    """So many problems, drawn once."""
    rng = np.random.default_rng(seed)
    return [problems(rng) for _ in range(count)]


def named(reward: str | Reward, rewards: Mapping[str, Callable[[], Reward]]) -> Reward:
    """A reward as it is, or by its name; raises `ArgumentError` with the names there are."""
    if callable(reward):
        return reward
    if not isinstance(reward, str) or reward not in rewards:
        raise ArgumentError(f"reward={reward!r}; one of {sorted(rewards)} would do")
    return rewards[reward]()


def check_problems(problems: object) -> None:
    """Raise `ArgumentTypeError` for what draws no problems."""
    if not callable(problems):
        raise ArgumentTypeError(
            f"problems={problems!r}; a function of a generator, as listed([...]) is, would do"
        )


def warn_of_the_end() -> None:
    """Warn of a step behind an episode's end, as Gymnasium's own environments do."""
    gymnasium.logger.warn("the episode is over: this step does nothing, and reset() begins another")


def check_render_mode(mode: str | None) -> None:
    """Raise `ArgumentError` for a way to render that there is not."""
    if mode not in (None, "ansi"):
        raise ArgumentError(f"render_mode={mode!r}; 'ansi' or None would do")
