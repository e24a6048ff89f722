"""What a policy's network is made of: the names and shapes of its parameters, and of its heads.

Torch (`network`) and NumPy (`inference`) both follow this one description.

    input     h = linear of its kind (node features) + w,   w = relu(linear(world))
    layers    h = h + relu(second(relu(first(h + sum over in-edges of relu(h_source + edge)))))
    graph     g = relu(linear([mean of h, maximum of h, w])) over the nodes in use
    heads     second(relu(first([h, g]))) for axes, loops and operands, the same with an encoded
              candidate in the place of h, linear(g) for the nest, second(relu(first(g))) the value
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

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

ILLEGAL = -1e9  # the logit of an action that may not be taken; finite, so that entropies are
SLOTS = {
    "axis": slice(0, AXES),
    "loop": slice(AXES, AXES + LOOPS),
    "operand": slice(AXES + LOOPS, NODES),
}
MOST = {"candidates": CANDIDATES, "axis": 256, "loop": 256, "operand": 256, "world": 256}
WIDEST, DEEPEST = 1024, 16


@dataclass(frozen=True)
class Architecture:
    """Sizes of a network for the actions of `table`; no head where a kind has no actions.

    Raises `CheckpointError` for sizes that are not whole numbers in their range.
    """

    table: ActionTable
    hidden: int = 48
    layers: int = 2

    def __post_init__(self) -> None:
        for field in fields(self.table):
            found = getattr(self.table, field.name)
            check_size(f"actions of kind {field.name}", found, 0, MOST[field.name])
        check_size("number of actions", self.table.size, 1, 1 << 16)
        check_size("hidden width", self.hidden, 1, WIDEST)
        check_size("number of layers", self.layers, 0, DEEPEST)

    @property
    def node_heads(self) -> dict[str, tuple[int, int]]:
        """By kind of node with actions: the first action's number, and how many a slot has."""
        table = self.table
        found = {
            "axis": (table.axis_at, table.axis),
            "loop": (table.loop_at, table.loop),
            "operand": (table.operand_at, table.operand),
        }
        return {kind: head for kind, head in found.items() if head[1]}

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Every linear map in order: its name, width of its result and of its argument."""
        wide, table = self.hidden, self.table
        found = {f"{kind}_input": (wide, NODE_FEATURES) for kind in SLOTS}
        found["world_input"] = wide, WORLD_FEATURES
        for at in range(self.layers):
            found[f"layer{at}_edge"] = wide, EDGE_FEATURES
            found[f"layer{at}_first"] = found[f"layer{at}_second"] = wide, wide
        found["graph"] = wide, 3 * wide
        for kind, (_, actions) in self.node_heads.items():
            found[f"{kind}_first"] = wide, 2 * wide
            found[f"{kind}_second"] = actions, wide
        if table.candidates:
            found["candidate_input"] = wide, CANDIDATE_FEATURES
            found["candidate_first"] = wide, 2 * wide
            found["candidate_second"] = 1, wide
        if table.world:
            found["world_second"] = table.world, wide
        return {**found, "value_first": (wide, wide), "value_second": (1, wide)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by name, in order; all are float32."""
        found: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns) in self.linears.items():
            found[f"{name}.weight"] = rows, columns
            found[f"{name}.bias"] = (rows,)
        return found

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise `CheckpointError` unless `arrays` are this network's: names, shapes, finite."""
        shapes = self.shapes
        if odd := sorted(set(arrays) ^ set(shapes)):
            kind = "missing" if odd[0] in shapes else "not a parameter"
            raise CheckpointError(f"{odd[0]} is {kind}; {len(shapes)} arrays would do")
        for name, shape in shapes.items():
            found = arrays[name]
            if found.shape != shape or found.dtype != np.float32:
                raise CheckpointError(
                    f"{name} is {found.dtype} {found.shape}; float32 {shape} would do"
                )
            if not np.isfinite(found).all():
                raise CheckpointError(f"{name} has values that are not finite")

    def to_json(self) -> dict[str, object]:
        """As JSON has it; `from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(value: object) -> Architecture:
        """Read what `to_json` wrote; raises `CheckpointError` for anything else."""
        whole = check_keys("architecture", value, {"table", "hidden", "layers"})
        table = check_keys("action table", whole["table"], set(MOST))
        for name, size in (
            *table.items(),
            ("hidden", whole["hidden"]),
            ("layers", whole["layers"]),
        ):
            check_size(name, size, 0, 1 << 16)
        return Architecture(ActionTable(**table), whole["hidden"], whole["layers"])


def check_size(what: str, value: object, least: int, most: int) -> None:
    """Raise `CheckpointError` unless a value is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"{what} is {value!r}; a number from {least} to {most} would do")


def check_keys(what: str, value: object, keys: set[str]) -> dict[str, Any]:
    """A JSON object with just these keys; raises `CheckpointError` for any other."""
    if not isinstance(value, dict) or set(value) != keys:
        found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise CheckpointError(f"{what} is {found}; an object of {sorted(keys)} would do")
    return value
