"""What a finished construction gains over the default, learnt from measurements.

An ensemble of small networks corrects the cost model: their input is what is known of a schedule
without running it (`looptune.outlook`), the machine and the chosen tile; the output is
log(default's time / its time). Where the members differ, the model does not know; a choice goes
by the mean less a multiple of their spread. NumPy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from looptune.construct import Construction
from looptune.graph import CANDIDATE_FEATURES, MACHINE_FEATURES, fixed
from looptune.offers import features as tile_features
from looptune.outlook import FEATURES as OUTLOOK

FEATURES = OUTLOOK + MACHINE_FEATURES + CANDIDATE_FEATURES + 4
MEMBERS, HIDDEN = 16, 64
FARTHEST = 6.0  # standard deviations: beyond, nothing was learnt
CAUTION = 1.0  # spreads that are taken off a prediction
Arrays = Mapping[str, np.ndarray]


def shapes() -> dict[str, tuple[int, ...]]:
    """The arrays of an ensemble: members first."""
    return {
        "shift": (FEATURES,),
        "scale": (FEATURES,),
        "w1": (MEMBERS, FEATURES, HIDDEN),
        "b1": (MEMBERS, 1, HIDDEN),
        "w2": (MEMBERS, HIDDEN, HIDDEN),
        "b2": (MEMBERS, 1, HIDDEN),
        "w3": (MEMBERS, HIDDEN, 1),
        "b3": (MEMBERS, 1, 1),
    }


def described(state: Construction) -> np.ndarray:
    """What the model is told of a construction, float32 (FEATURES,)."""
    found = np.zeros(FEATURES, np.float32)
    found[:OUTLOOK] = state.outlook
    machine = OUTLOOK + MACHINE_FEATURES
    found[OUTLOOK:machine] = fixed(state.nest, state.target, state.threads).world
    if state.offers:
        tiles = tile_features(state.nest, state.target)
        found[machine : machine + CANDIDATE_FEATURES] = tiles[state.tile or 0]
    found[-4:] = (
        state.tile is not None, len(state.placed) / 8, 0 in state.toggled,
        sum(number > 0 for number in state.toggled),
    )  # fmt: skip
    return found


@dataclass(frozen=True)
class GainModel:
    """An ensemble with its arrays, as `shapes` names them."""

    arrays: Arrays

    def predictions(self, features: np.ndarray) -> np.ndarray:
        """What each member says: (rows, FEATURES) to (MEMBERS, rows)."""
        found = self.arrays
        inputs = np.clip((features - found["shift"]) / found["scale"], -FARTHEST, FARTHEST)
        hidden = np.maximum(inputs @ found["w1"] + found["b1"], 0)
        hidden = np.maximum(hidden @ found["w2"] + found["b2"], 0)
        return np.asarray((hidden @ found["w3"] + found["b3"])[..., 0])

    def gains(self, states: Sequence[Construction]) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the spread of the predicted gain of every construction."""
        rows = np.stack([described(state) for state in states])
        found = self.predictions(rows)
        return found.mean(0), found.std(0)

    def cautious(self, states: Sequence[Construction]) -> np.ndarray:
        """Predicted gains less what the members differ by: what a choice goes by."""
        mean, spread = self.gains(states)
        return mean - CAUTION * spread
