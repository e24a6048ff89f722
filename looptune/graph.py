"""A schedule as a graph of fixed-shape arrays: what a policy sees, in training and in use.

Nodes are the nest's axes, the schedule's loops and the operands, each in slots of its own; edges
say which loop is inside which, which axis a loop walks, and in which strides operands move. The
register tiles on offer and the machine stand beside them. Schedules that do not fit the slots
are outside of a policy's domain.

An action is a number: first the candidates, then so many kinds of action for every slot of axes,
loops and operands, then those of the whole nest (`ActionTable`).
"""

from __future__ import annotations

from dataclasses import dataclass

OBSERVATION_VERSION = 1
AXES, LOOPS, OPERANDS = 10, 20, 6
NODES = AXES + LOOPS + OPERANDS
NODE_FEATURES = 32
EDGES = 192
EDGE_FEATURES = 8
CANDIDATES = 64
CANDIDATE_FEATURES = 16
WORLD_FEATURES = 32


@dataclass(frozen=True, slots=True)
class ActionTable:
    """How many kinds of action there are for each candidate, axis, loop, operand and nest."""

    candidates: int
    axis: int
    loop: int
    operand: int
    world: int

    @property
    def axis_at(self) -> int:
        """Number of the first action on an axis."""
        return self.candidates

    @property
    def loop_at(self) -> int:
        """Number of the first action on a loop."""
        return self.axis_at + AXES * self.axis

    @property
    def operand_at(self) -> int:
        """Number of the first action on an operand."""
        return self.loop_at + LOOPS * self.loop

    @property
    def world_at(self) -> int:
        """Number of the first action on the whole nest."""
        return self.operand_at + OPERANDS * self.operand

    @property
    def size(self) -> int:
        """How many actions there are."""
        return self.world_at + self.world
