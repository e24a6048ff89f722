"""`looptune/Construct-v0`: the nest is built from the inside out (`looptune.construct`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looptune.construct import TABLE, Construction
from looptune.envs.episode import GraphEnv, State
from looptune.envs.problem import Problem


class ConstructEnv(GraphEnv):
    """Some ten decisions an episode, none of them illegal: the register tile with its vector axis,
    the loops from the inside out with their trips, the packs, the shared loop.

    To stop at once is the default schedule. Observations and actions are described in
    `looptune.graph` and `looptune.construct`; the horizon is 16.
    """

    table = TABLE

    def started(self, problem: Problem, options: Mapping[str, Any]) -> State:
        """Nothing is decided."""
        return Construction(problem.nest, problem.target, problem.threads)
