"""The policy's network as data: which arrays it has, the same for training and inference.

Nodes are encoded by kind, and the world is added to each. Layers of GINE (Hu et al., "Strategies
for pre-training graph neural networks", ICLR 2020) pass messages along the edges; their mean and
maximum, with the world, are the graph. Every slot's actions are scored from its node and the
graph, every candidate from its features and the graph, and the graph alone has a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from looptune.errors import CheckpointError
from looptune.graph import (
    AXES,
    CANDIDATE_FEATURES,
    CANDIDATES,
    EDGE_FEATURES,
    LOOPS,
    NODE_FEATURES,
    NODES,
    WORLD_FEATURES,
    ActionTable,
)

ILLEGAL = -1e9  # a finite logit, so that entropies stay finite, too
PLACES = {  # of the slots in an observation's nodes
    "axis": slice(0, AXES),
    "loop": slice(AXES, AXES + LOOPS),
    "operand": slice(AXES + LOOPS, NODES),
}
SLOTS = tuple(PLACES)
LARGEST = 1024  # of a width


@dataclass(frozen=True)
class Architecture:
    """The sizes of a network for the actions of a table."""

    table: ActionTable
    hidden: int = 48
    layers: int = 2

    @property
    def heads(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of every head that there is."""
        wide = 2 * self.hidden
        found = {kind: (wide, getattr(self.table, kind)) for kind in SLOTS}
        found["candidate"] = (wide, min(1, self.table.candidates))
        found["world"] = (self.hidden, self.table.world)
        found["value"] = (self.hidden, 1)
        return {name: sizes for name, sizes in found.items() if sizes[1]}

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every array by name; matrices are (outputs, inputs), as torch has them."""
        found: dict[str, tuple[int, ...]] = {}

        def linear(name: str, inputs: int, outputs: int) -> None:
            found[f"{name}.weight"] = (outputs, inputs)
            found[f"{name}.bias"] = (outputs,)

        width = self.hidden
        for kind in SLOTS:
            linear(f"encode.{kind}", NODE_FEATURES, width)
        linear("encode.world", WORLD_FEATURES, width)
        if self.table.candidates:
            linear("encode.candidate", CANDIDATE_FEATURES, width)
        for layer in range(self.layers):
            linear(f"layer{layer}.edge", EDGE_FEATURES, width)
            linear(f"layer{layer}.inner", width, width)
            linear(f"layer{layer}.outer", width, width)
        linear("graph", 3 * width, width)
        for name, (inputs, outputs) in self.heads.items():
            linear(f"{name}.inner", inputs, width)
            linear(f"{name}.outer", width, outputs)
        return found

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


def architecture_from_json(value: Any) -> Architecture:
    """What `Architecture.to_json` gave; raises `CheckpointError` for anything else."""
    try:
        check_numbers(value, {"hidden": 0, "layers": 0, "table": {}})
        table = ActionTable(**value["table"])
        check_numbers(value["table"], dict.fromkeys(asdict(table), 0))
        if not (value["hidden"] and table.size and table.candidates in (0, CANDIDATES)):
            raise ValueError(f"a width of 0, no action, or not {CANDIDATES} candidates")
        return Architecture(table, value["hidden"], value["layers"])
    except (TypeError, KeyError, ValueError) as reason:
        raise CheckpointError(f"architecture {value!r}: {reason}; sizes would do") from reason


def check_numbers(value: Any, like: Mapping[str, object]) -> None:
    """Raise `ValueError` unless a mapping has just these keys, with small whole numbers."""
    if not isinstance(value, Mapping) or set(value) != set(like):
        raise ValueError(f"it has not just {sorted(like)}")
    for name, kind in like.items():
        if isinstance(kind, int) and not (type(value[name]) is int and 0 <= value[name] <= LARGEST):
            raise ValueError(f"{name} is {value[name]!r}")
