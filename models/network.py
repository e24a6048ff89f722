"""The policy's network in torch, its layers from torch-geometric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv

from looptune.graph import NODES
from looptune.models.architecture import ILLEGAL, PLACES, SLOTS, Architecture

SMALL = 0.01  # of the last layer's weights: a new policy is nearly even


class PolicyNetwork(nn.Module):
    """Logits (batch, actions), the illegal ones at `ILLEGAL`, and values (batch,).

    Observations are those of `looptune.graph`, stacked, as tensors.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        sizes = architecture.parameters
        self.linears = nn.ModuleDict()
        for name in sizes:
            if name.endswith(".weight"):
                outputs, inputs = sizes[name]
                self.linears[name[:-7].replace(".", "_")] = nn.Linear(inputs, outputs)
        for name in architecture.heads:
            outer = self.linears[f"{name}_outer"]
            assert isinstance(outer, nn.Linear)
            scale = 1.0 if name == "value" else SMALL
            nn.init.orthogonal_(outer.weight, scale)
            nn.init.zeros_(outer.bias)
        self.layers = nn.ModuleList(
            GINEConv(
                nn.Sequential(
                    self.linears[f"layer{layer}_inner"],
                    nn.ReLU(),
                    self.linears[f"layer{layer}_outer"],
                ),
                edge_dim=None,
            )
            for layer in range(architecture.layers)
        )

    def two(self, name: str, x: Tensor) -> Tensor:
        """A head: two layers."""
        hidden = torch.relu(self.linears[f"{name}_inner"](x))
        found: Tensor = self.linears[f"{name}_outer"](hidden)
        return found

    def encode(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Nodes (batch, NODES, hidden) and graphs (batch, hidden)."""
        nodes = observation["nodes"].float()
        batch = nodes.shape[0]
        world = torch.relu(self.linears["encode_world"](observation["world"].float()))
        parts = [self.linears[f"encode_{kind}"](nodes[:, PLACES[kind]]) for kind in SLOTS]
        mask = observation["node_mask"].bool()
        h = torch.relu(torch.cat(parts, 1) + world[:, None]) * mask[..., None]
        flat = h.reshape(batch * NODES, -1)
        graph, edge = observation["edge_mask"].bool().nonzero(as_tuple=True)
        pairs = observation["edges"].long()[graph, :, edge].T + graph * NODES
        features = observation["edge_features"].float()[graph, edge]
        for number, layer in enumerate(self.layers):
            told = self.linears[f"layer{number}_edge"](features)
            flat = flat + torch.relu(layer(flat, pairs, told))
        h = flat.reshape(batch, NODES, -1)
        there = mask[..., None]
        mean = (h * there).sum(1) / there.sum(1).clamp(min=1)
        most = h.masked_fill(~there, -1e4).amax(1)
        return h, torch.relu(self.linears["graph"](torch.cat([mean, most, world], 1)))

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits and values."""
        h, graph = self.encode(observation)
        return self.logits(observation, h, graph), self.value(graph)

    def logits(self, observation: Mapping[str, Tensor], h: Tensor, graph: Tensor) -> Tensor:
        """Logits (batch, actions) of encoded observations."""
        heads = self.architecture.heads
        found = []
        if "candidate" in heads:
            tiles = torch.relu(self.linears["encode_candidate"](observation["candidates"].float()))
            wide = graph[:, None].expand(-1, tiles.shape[1], -1)
            found.append(self.two("candidate", torch.cat([tiles, wide], -1)).flatten(1))
        for kind in SLOTS:
            if kind in heads:
                mine = h[:, PLACES[kind]]
                wide = graph[:, None].expand(-1, mine.shape[1], -1)
                found.append(self.two(kind, torch.cat([mine, wide], -1)).flatten(1))
        if "world" in heads:
            found.append(self.two("world", graph))
        return torch.cat(found, 1).masked_fill(~observation["action_mask"].bool(), ILLEGAL)

    def value(self, graph: Tensor) -> Tensor:
        """Values (batch,) of encoded graphs."""
        return self.two("value", graph)[:, 0]

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of all parameters, as `Architecture.parameters` names them, float32."""
        state = self.state_dict()
        return {
            name: state[torch_name(name)].detach().numpy().astype(np.float32).copy()
            for name in self.architecture.parameters
        }

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take parameters as `state_arrays` gives them."""
        with torch.no_grad():
            own = self.state_dict()
            for name in self.architecture.parameters:
                own[torch_name(name)].copy_(torch.from_numpy(np.array(arrays[name])))


def torch_name(name: str) -> str:
    """Where the module keeps a parameter."""
    layer, _, kind = name.rpartition(".")
    return f"linears.{layer.replace('.', '_')}.{kind}"


def stacked(observations: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """Observations as one batch of tensors."""
    return {
        name: torch.from_numpy(np.stack([each[name] for each in observations]))
        for name in observations[0]
    }
