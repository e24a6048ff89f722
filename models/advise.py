"""What a policy advises: schedules for a nest, the most promising first, without running any.

The network says which decisions a beam over constructions tries (`looptune.propose`); the gain
model, which learnt from measurements, which of them it keeps: by what each is worth, less what its
members differ by. Without a measurement, what is not expected to gain is not worth its risk; with
one it may be asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from looptune.construct import Construction
from looptune.graph import in_domain
from looptune.ir import Nest
from looptune.models.checkpoint import load
from looptune.models.inference import Policy
from looptune.propose import NARROW, Reach, by_worth, proposals
from looptune.schedule import Schedule
from looptune.target import Target

SECONDS = 0.25  # of computing that the beam takes at most, many times what it should take
# The cautious gain to leave the default for: on problems unseen, a third fewer losses than at 0.
WORTHWHILE = 0.02
DTYPES = ("float32", "float64")  # that it was trained on


@dataclass(frozen=True)
class Advice:
    """A schedule, and the logarithm of what it is expected to gain over the default: cautiously,
    so that what is uncertain counts less."""

    schedule: Schedule
    gain: float


def taken(found: Sequence[Advice]) -> Advice | None:
    """The advice to follow without a measurement, None where the default is the better bet."""
    return found[0] if found and found[0].gain > WORTHWHILE else None


@lru_cache(maxsize=1)
def shipped() -> Policy:
    """The policy that comes with looptune, read once; raises `CheckpointError`."""
    return load()


def policy_of(policy: Policy | str | os.PathLike[str] | None) -> Policy:
    """A policy as it is, or that of a path, read anew, or the shipped one for None."""
    if isinstance(policy, Policy):
        return policy
    return shipped() if policy is None else load(policy)


def outside(nest: Nest) -> str:
    """Why a nest is outside of the policy's domain, or nothing."""
    if nest.points == 0:
        return "there is nothing to compute"
    if not in_domain(nest):
        return f"{len(nest.axes)} axes and {len(nest.operands)} operands are more than it observes"
    strange = sorted({op.dtype for op in nest.operands} - set(DTYPES))
    if strange:
        return f"it was not trained on {', '.join(strange)}"
    return ""


def advise(
    policy: Policy,
    nest: Nest,
    target: Target,
    threads: int = 1,
    seconds: float = SECONDS,
    reach: Reach = NARROW,
    clock: Callable[[], float] = time.thread_time,
) -> list[Advice]:
    """Schedules other than the default with what the policy expects of them, the best first; none
    if there are none, or the nest is `outside`.

    `reach` bounds the beam, and after `seconds` of this thread's own time it goes straight on: what
    else runs on the machine does not change the advice.
    """
    start = Construction(nest, target, threads)
    if outside(nest) or not start.offers:
        return []
    stop = clock() + seconds
    found = proposals(
        start, policy.log_probabilities, partial(worth_of, policy), reach, lambda: clock() >= stop
    )
    return [Advice(each.state.schedule, each.score) for each in found]


def worth_of(policy: Policy, states: Sequence[Construction]) -> np.ndarray:
    """The cautious gain of each construction; by the cost model where no gain model came along."""
    return by_worth(states) if policy.gain is None else policy.gain.cautious(states)
