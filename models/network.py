"""The policy's network in torch, for training: GINE convolutions over the graphs of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from torch_geometric.nn import GINEConv, global_max_pool, global_mean_pool

from looptune.graph import EDGE_FEATURES

from .architecture import ILLEGAL, SLOTS, Architecture

Encoded = tuple[Tensor, Tensor]


class PolicyNetwork(nn.Module):
    """Logits of the actions and the value of a batch of observations.

    Observations are dicts of tensors as `looptune.graph.shapes` says, with a leading axis of the
    batch, of any numeric dtype; arrays of edges may be shorter than EDGES. `seed` decides on the
    initial parameters.
    """

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        self.architecture = architecture
        layered = {f"layer{at}" for at in range(architecture.layers)}
        self.dense = nn.ModuleDict(
            {
                name: nn.Linear(columns, rows)
                for name, (rows, columns) in architecture.linears.items()
                if name.partition("_")[0] not in layered
            }
        )
        wide = architecture.hidden
        self.convolutions = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide)),
                edge_dim=EDGE_FEATURES,
            )
            for _ in range(architecture.layers)
        )
        self.initialise(seed)

    def linears(self) -> dict[str, nn.Linear]:
        """The linear maps by the architecture's names."""
        found: dict[str, Any] = dict(self.dense.items())
        for at, layer in enumerate(cast("list[Any]", self.convolutions)):
            found[f"layer{at}_edge"] = layer.lin
            found[f"layer{at}_first"], found[f"layer{at}_second"] = layer.nn[0], layer.nn[2]
        return {name: found[name] for name in self.architecture.linears}

    def linear(self, name: str) -> nn.Linear:
        """A linear map outside of the layers."""
        return cast(nn.Linear, self.dense[name])

    def initialise(self, seed: int) -> None:
        """Orthogonal weights, and policy heads so small that all legal actions start alike."""
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.linears().items():
            policy = name.endswith("_second") and not name.startswith(("layer", "value"))
            gain = 0.01 if policy else 1.0 if name == "value_second" else math.sqrt(2)
            nn.init.orthogonal_(module.weight, gain, generator=generator)
            nn.init.zeros_(module.bias)

    def encode(self, observations: Mapping[str, Tensor]) -> Encoded:
        """States of the nodes (B, NODES, hidden), zero where there is none, and of the graphs
        (B, hidden)."""
        alive = observations["node_mask"] > 0
        batch, slots = alive.shape
        world = relu(self.linear("world_input")(observations["world"].float()))
        features = observations["nodes"].float()
        inputs = [self.linear(f"{kind}_input")(features[:, at]) for kind, at in SLOTS.items()]
        graph_of, _ = alive.nonzero(as_tuple=True)
        nodes = torch.cat(inputs, 1)[alive] + world[graph_of]

        offsets = slots * torch.arange(batch, device=alive.device)
        ends = observations["edges"].long() + offsets[:, None, None]
        flat = alive.flatten()
        kept = (observations["edge_mask"] > 0) & flat[ends].all(1)
        number = flat.cumsum(0) - 1
        pairs = number[ends.transpose(0, 1)[:, kept]]
        edges = observations["edge_features"][kept].float()
        for layer in self.convolutions:
            nodes = nodes + relu(layer(nodes, pairs, edges))

        pooled = [
            global_mean_pool(nodes, graph_of, batch),
            global_max_pool(nodes, graph_of, batch),
        ]
        graphs = relu(self.linear("graph")(torch.cat([*pooled, world], 1)))
        padded = nodes.new_zeros((batch, slots, nodes.shape[1]))
        padded[alive] = nodes
        return padded, graphs

    def logits(self, observations: Mapping[str, Tensor], encoded: Encoded) -> Tensor:
        """Logits (B, actions) of observations encoded before, `ILLEGAL` where masked."""
        nodes, graphs = encoded
        legal = observations["action_mask"] > 0
        table = self.architecture.table
        parts = []
        if table.candidates:
            offered = observations["candidates"][:, : table.candidates].float()
            allowed = legal[:, : table.candidates, None]
            parts.append(self.head("candidate", offered, graphs, allowed))
        for kind, (first, actions) in self.architecture.node_heads.items():
            states = nodes[:, SLOTS[kind]]
            slots = states.shape[1]
            allowed = legal[:, first : first + slots * actions].view(-1, slots, actions)
            parts.append(self.head(kind, states, graphs, allowed))
        if table.world:
            parts.append(self.linear("world_second")(graphs))
        return torch.cat(parts, 1).masked_fill(~legal, ILLEGAL)

    def head(self, kind: str, states: Tensor, graphs: Tensor, allowed: Tensor) -> Tensor:
        """Logits (B, slots * actions) of what is `allowed` (B, slots, actions), others any."""
        graph_of, slot = allowed.any(2).nonzero(as_tuple=True)
        chosen = states[graph_of, slot]
        if kind == "candidate":
            chosen = relu(self.linear("candidate_input")(chosen))
        first, wide = self.linear(f"{kind}_first"), graphs.shape[1]
        around = linear(graphs, first.weight[:, wide:], first.bias)
        hidden = relu(linear(chosen, first.weight[:, :wide]) + around[graph_of])
        whole = graphs.new_zeros(allowed.shape)
        whole[graph_of, slot] = self.linear(f"{kind}_second")(hidden)
        return whole.flatten(1)

    def value(self, graphs: Tensor) -> Tensor:
        """Values (B,) of encoded graphs (B, hidden)."""
        hidden = relu(self.linear("value_first")(graphs))
        return cast(Tensor, self.linear("value_second")(hidden)).squeeze(1)

    def logits_and_value(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (B, actions), `ILLEGAL` where masked, and values (B,), both float32."""
        encoded = self.encode(observations)
        return self.logits(observations, encoded), self.value(encoded[1])

    def state_arrays(self) -> dict[str, np.ndarray]:
        """A copy of the parameters as the architecture names them."""
        found = {}
        for name, module in self.linears().items():
            found[f"{name}.weight"] = module.weight.detach().cpu().numpy().copy()
            found[f"{name}.bias"] = module.bias.detach().cpu().numpy().copy()
        return found

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over parameters; raises `CheckpointError` if they are another architecture's."""
        self.architecture.check(arrays)
        with torch.no_grad():
            for name, module in self.linears().items():
                module.weight.copy_(torch.from_numpy(arrays[f"{name}.weight"].copy()))
                module.bias.copy_(torch.from_numpy(arrays[f"{name}.bias"].copy()))
