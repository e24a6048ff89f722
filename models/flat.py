"""A plain network over rows of numbers: for the paper's observation, and to compare graphs with."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TransformObservation
from torch import Tensor, nn

from looptune.envs.looptune_v0 import ACTIONS, FEATURES, ROWS, LoopTuneEnv
from looptune.graph import Observation
from looptune.models.architecture import ILLEGAL


class FlatNetwork(nn.Module):
    """A multi-layer perceptron over some arrays of an observation side by side.

    `inputs` are their names and sizes. Logits (batch, actions), the illegal ones at `ILLEGAL`
    where the observation has an `action_mask`, and values (batch,). Numbers enter as the
    logarithm of 1 + their size, with their sign.
    """

    def __init__(
        self, inputs: Mapping[str, int], actions: int, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        self.inputs = dict(inputs)
        sizes = [sum(inputs.values()), *[hidden] * layers]
        self.trunk = nn.Sequential(
            *(part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh()))
        )
        self.policy, self.worth = nn.Linear(sizes[-1], actions), nn.Linear(sizes[-1], 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)
        nn.init.zeros_(self.policy.bias)

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits and values."""
        rows = torch.cat([observation[name].flatten(1).float() for name in self.inputs], 1)
        h = self.trunk(rows.sign() * torch.log1p(rows.abs()))
        logits, mask = self.policy(h), observation.get("action_mask")
        if mask is not None:
            logits = logits.masked_fill(~mask.bool(), ILLEGAL)
        return logits, self.worth(h)[:, 0]


def paper_network(hidden: int = 256, layers: int = 2) -> FlatNetwork:
    """For what `paper_rows` shows: ten rows of twenty, seven actions."""
    return FlatNetwork({"rows": ROWS * FEATURES}, len(ACTIONS), hidden, layers)


def paper_rows(
    environment: LoopTuneEnv, masked: bool = False
) -> gymnasium.Env[Observation, np.int64]:
    """`looptune/LoopTune-v0` with its observation as {"rows": float32 (200,)}, for the trainers.

    The paper does not mask; `masked` adds "action_mask", int8 (7,).
    """

    def seen(rows: np.ndarray) -> dict[str, Any]:
        mask = {"action_mask": environment.state.mask} if masked else {}
        return {"rows": rows, **mask}

    wrapped: gymnasium.Env[Observation, np.int64] = TransformObservation(environment, seen, None)
    return wrapped
