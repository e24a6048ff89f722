"""The policy's network in NumPy: what a shipped checkpoint is asked with, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from looptune.construct import Construction
from looptune.graph import NODES, Observation
from looptune.models.architecture import ILLEGAL, PLACES, SLOTS, Architecture
from looptune.models.gain import GainModel

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Policy:
    """A trained network, what it was trained for, and the gain model beside it, if any."""

    architecture: Architecture
    arrays: Arrays
    header: Mapping[str, object] = field(default_factory=dict)
    gain: GainModel | None = None

    @cached_property
    def transposed(self) -> Arrays:
        """Weights as (inputs, outputs), contiguous, and biases as they are."""
        return {
            name: np.ascontiguousarray(array.T) if array.ndim == 2 else array
            for name, array in self.arrays.items()
        }

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """One layer."""
        found = x @ self.transposed[f"{name}.weight"]
        found += self.transposed[f"{name}.bias"]
        return found

    def two(self, name: str, x: np.ndarray) -> np.ndarray:
        """A head: two layers."""
        return self.linear(f"{name}.outer", relu(self.linear(f"{name}.inner", x)))

    def beside(self, name: str, x: np.ndarray, graph: np.ndarray) -> np.ndarray:
        """A head over slots beside their graph, the graph's part computed once."""
        weight = self.transposed[f"{name}.inner.weight"]
        width = x.shape[-1]
        hidden = x @ weight[:width]
        hidden += (graph @ weight[width:] + self.transposed[f"{name}.inner.bias"])[:, None]
        return self.linear(f"{name}.outer", relu(hidden)).reshape(len(x), -1)

    def evaluate(self, observations: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
        """Logits (rows, actions), the illegal ones at `ILLEGAL`, and values (rows,)."""
        stack = {
            name: np.stack([each[name] for each in observations])
            for name in ("nodes", "node_mask", "world", "action_mask")
        }
        world = relu(self.linear("encode.world", stack["world"]))
        parts = [self.linear(f"encode.{kind}", stack["nodes"][:, PLACES[kind]]) for kind in SLOTS]
        mask = stack["node_mask"][..., None] != 0
        h = relu(np.concatenate(parts, 1) + world[:, None]) * mask
        h = self.passed(h.reshape(-1, h.shape[-1]), observations).reshape(h.shape)
        mean = np.where(mask, h, 0).sum(1) / np.maximum(1, mask.sum(1))
        most = np.where(mask, h, -1e4).max(1)
        graph = relu(self.linear("graph", np.concatenate([mean, most, world], 1)))
        heads = self.architecture.heads
        found = []
        if "candidate" in heads:
            tiles = np.stack([each["candidates"] for each in observations])
            found.append(
                self.beside("candidate", relu(self.linear("encode.candidate", tiles)), graph)
            )
        found += [self.beside(kind, h[:, PLACES[kind]], graph) for kind in SLOTS if kind in heads]
        if "world" in heads:
            found.append(self.two("world", graph))
        logits = np.where(stack["action_mask"] != 0, np.concatenate(found, 1), ILLEGAL)
        return logits.astype(np.float32), self.two("value", graph)[:, 0]

    def passed(self, flat: np.ndarray, observations: Sequence[Observation]) -> np.ndarray:
        """Nodes after all layers. Messages are summed by sorted runs of their destinations."""
        counts = [int(np.count_nonzero(each["edge_mask"])) for each in observations]
        used = [each["edge_mask"] != 0 for each in observations]
        pairs = np.concatenate(
            [each["edges"][:, on] + NODES * at
             for at, (each, on) in enumerate(zip(observations, used, strict=True))], 1,
        )  # fmt: skip
        if not sum(counts):
            pairs = np.zeros((2, 0), np.int64)
        features = np.concatenate(
            [each["edge_features"][on] for each, on in zip(observations, used, strict=True)]
        )
        order = np.argsort(pairs[1], kind="stable")
        source, to = pairs[0][order], pairs[1][order]
        starts = np.flatnonzero(np.diff(to, prepend=-1))
        features = features[order]
        for layer in range(self.architecture.layers):
            told = relu(flat[source] + self.linear(f"layer{layer}.edge", features))
            total = flat.copy()
            if len(starts):
                total[to[starts]] += np.add.reduceat(told, starts, axis=0)
            flat = flat + relu(self.two(f"layer{layer}", total))
        return flat

    def log_probabilities(self, states: Sequence[Construction]) -> np.ndarray:
        """Of every action in every state, float32 (states, actions)."""
        logits, _ = self.evaluate([state.observe() for state in states])
        high = logits.max(1, keepdims=True)
        return np.asarray(logits - high - np.log(np.exp(logits - high).sum(1, keepdims=True)))


def relu(x: np.ndarray) -> np.ndarray:
    """The positive part, in place."""
    np.maximum(x, 0, out=x)
    return x
