"""A trained policy in NumPy alone: what `network` computes, for a few observations at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from looptune.errors import ArgumentError
from looptune.graph import NODES, shapes

from .architecture import ILLEGAL, SLOTS, Architecture
from .header import Header

Observation = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Policy:
    """An architecture with its parameters; `extra` are arrays of other models shipped with it.

    Raises `CheckpointError` if the arrays are not the architecture's.
    """

    architecture: Architecture
    arrays: Mapping[str, np.ndarray]
    header: Header = field(default_factory=Header)
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.architecture.check(self.arrays)

    def evaluate(self, observations: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
        """Log probabilities (B, actions), near `ILLEGAL` where masked, and values (B,), float32.

        Raises `ArgumentError` for arrays that are not of an observation for these actions.
        """
        logits, values = self.forward(observations)
        if not len(logits):
            return logits, values
        shifted = logits - logits.max(1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True)), values

    def log_probabilities(self, observations: Sequence[Observation]) -> np.ndarray:
        """Log probabilities (B, actions) float32, as `evaluate` has them."""
        return self.evaluate(observations)[0]

    def values(self, observations: Sequence[Observation]) -> np.ndarray:
        """Values (B,) float32, as `evaluate` has them."""
        return self.evaluate(observations)[1]

    def forward(self, observations: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
        """Logits (B, actions), `ILLEGAL` where masked, and values (B,), float32."""
        for name, (shape, _) in self.expected.items():
            for observation in observations:
                if observation[name].shape != shape:
                    raise ArgumentError(
                        f"observation: {name} has shape {observation[name].shape}; {shape} would do"
                    )
        if not observations:
            empty = np.zeros((0, self.architecture.table.size), np.float32)
            return empty, np.zeros(0, np.float32)
        nodes, graphs = self.encode(observations)
        hidden = np.maximum(self.linear("value_first", graphs), 0)
        return self.logits(observations, nodes, graphs), self.linear("value_second", hidden)[:, 0]

    @cached_property
    def expected(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the arrays of an observation."""
        return shapes(self.architecture.table)

    @cached_property
    def transposed(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By linear map, its weight as a product with rows from the left wants it, and its bias."""
        return {
            name: (
                np.ascontiguousarray(self.arrays[f"{name}.weight"].T),
                self.arrays[f"{name}.bias"],
            )
            for name in self.architecture.linears
        }

    def linear(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Apply a linear map to the last axis, by one product for all rows."""
        weight, bias = self.transposed[name]
        flat: np.ndarray = rows.reshape(-1, rows.shape[-1]) @ weight
        flat += bias
        return flat.reshape(*rows.shape[:-1], len(bias))

    def encode(self, observations: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
        """States of the nodes (B, NODES, hidden), zero where there is none, and of the graphs
        (B, hidden); all work is on the slots and edges that some observation uses."""
        alive = np.stack([each["node_mask"] for each in observations]) > 0
        used = np.flatnonzero(alive.any(0))
        if not used.size:
            used = np.zeros(1, np.intp)
        present = alive[:, used, None].astype(np.float32)
        world = np.stack([each["world"] for each in observations])
        world = np.maximum(self.linear("world_input", world), 0)
        features = np.stack([each["nodes"][used] for each in observations])
        parts = [
            self.linear(
                f"{kind}_input", features[:, slice(*np.searchsorted(used, (at.start, at.stop)))]
            )
            for kind, at in SLOTS.items()
        ]
        nodes = (np.concatenate(parts, 1) + world[:, None]) * present
        if self.architecture.layers:
            nodes = self.convolve(observations, nodes, present, used, alive)

        count = np.maximum(present.sum(1), 1)
        highest = np.where(present > 0, nodes, -np.inf).max(1)
        highest[~alive.any(1)] = 0
        pooled = np.concatenate([nodes.sum(1) / count, highest, world], 1)
        whole = np.zeros((len(observations), NODES, nodes.shape[2]), np.float32)
        whole[:, used] = nodes
        return whole, np.maximum(self.linear("graph", pooled), 0)

    def convolve(
        self,
        observations: Sequence[Observation],
        nodes: np.ndarray,
        present: np.ndarray,
        used: np.ndarray,
        alive: np.ndarray,
    ) -> np.ndarray:
        """The states after all layers; sums over edges are products with an incidence matrix."""
        batch, slots, wide = nodes.shape
        kept = np.stack([each["edge_mask"] for each in observations]) > 0
        last = int(np.flatnonzero(kept.any(0)).max(initial=-1)) + 1
        ends = np.stack([each["edges"][:, :last] for each in observations])
        each_batch = np.arange(batch)[:, None, None]
        kept = kept[:, :last] & alive[each_batch, ends].all(1)
        local = np.zeros(NODES, np.intp)
        local[used] = np.arange(len(used))
        ends = local[ends]
        sources = ends[:, 0] + slots * each_batch[:, 0]
        incidence = (ends[:, 1, None] == np.arange(slots)[:, None]) & kept[:, None]
        incidence = incidence.astype(np.float32)
        features = np.stack([each["edge_features"][:last] for each in observations])
        for at in range(self.architecture.layers):
            messages = self.linear(f"layer{at}_edge", features)
            messages += nodes.reshape(-1, wide)[sources]
            np.maximum(messages, 0, out=messages)
            found = incidence @ messages
            found += nodes
            found = self.linear(f"layer{at}_first", found)
            np.maximum(found, 0, out=found)
            found = self.linear(f"layer{at}_second", found)
            np.maximum(found, 0, out=found)
            found *= present
            nodes = nodes + found
        return nodes

    def logits(
        self, observations: Sequence[Observation], nodes: np.ndarray, graphs: np.ndarray
    ) -> np.ndarray:
        """Logits (B, actions) float32 of encoded observations, `ILLEGAL` where masked."""
        legal = np.stack([each["action_mask"] for each in observations]) > 0
        whole = np.full(legal.shape, ILLEGAL, np.float32)
        table = self.architecture.table
        rows, slots = np.nonzero(legal[:, : table.candidates])
        if rows.size:
            offered = np.stack([each["candidates"] for each in observations])[rows, slots]
            offered = np.maximum(self.linear("candidate_input", offered), 0)
            whole[rows, slots] = self.head("candidate", offered, graphs, rows)[:, 0]
        for kind, (first, actions) in self.architecture.node_heads.items():
            at = SLOTS[kind]
            count = at.stop - at.start
            allowed = legal[:, first : first + count * actions].reshape(-1, count, actions)
            rows, slots = np.nonzero(allowed.any(2))
            if rows.size:
                found = self.head(kind, nodes[rows, at.start + slots], graphs, rows)
                columns = first + slots[:, None] * actions + np.arange(actions)
                whole[rows[:, None], columns] = found
        if table.world:
            whole[:, table.world_at :] = self.linear("world_second", graphs)
        whole[~legal] = ILLEGAL
        return whole

    def head(
        self, kind: str, states: np.ndarray, graphs: np.ndarray, graph_of: np.ndarray
    ) -> np.ndarray:
        """Logits (rows, actions) of states (rows, hidden), each of the graph that is named."""
        weight, bias = self.transposed[f"{kind}_first"]
        wide = graphs.shape[1]
        hidden = states @ weight[:wide]
        hidden += (graphs @ weight[wide:] + bias)[graph_of]
        np.maximum(hidden, 0, out=hidden)
        return self.linear(f"{kind}_second", hidden)
