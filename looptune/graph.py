"""A schedule as a graph of fixed-shape arrays: what a policy sees, in training and in use.

Nodes are the nest's axes, the schedule's loops and the operands, each in slots of its own; edges
say which loop is inside which, which axis a loop walks, and in which strides operands move. The
register tiles on offer and the machine stand beside them. Schedules that do not fit the slots
are outside of a policy's domain.

An action is a number: first the candidates, then so many kinds of action for every slot of axes,
loops and operands, then those of the whole nest (`ActionTable`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex

import numpy as np

from looptune.dtypes import ITEM_BYTES, is_whole
from looptune.errors import ArgumentError, ArgumentTypeError, ScheduleError
from looptune.ir import Nest, Operand
from looptune.outlook import FEATURES as OUTLOOK
from looptune.schedule import Schedule
from looptune.target import Target

OBSERVATION_VERSION = 2  # of the features and of what actions mean, counted together
AXES, LOOPS, OPERANDS = 10, 20, 6
NODES = AXES + LOOPS + OPERANDS
NODE_FEATURES = 32
EDGES = 192
PAIRS = (EDGES - 4 * LOOPS + 2) // 2  # of an axis and an operand, joined both ways
EDGE_FEATURES = 8
CANDIDATES = 64
CANDIDATE_FEATURES = 16
MACHINE_FEATURES = 32
WORLD_FEATURES = MACHINE_FEATURES + OUTLOOK
TARGET_FEATURES = slice(0, 14)  # of the world: those that name the target and the threads

Observation = dict[str, np.ndarray]


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


def action_number(action: SupportsIndex) -> int:
    """An action as an int, of any kind of whole numbers; raises `ArgumentTypeError`."""
    try:
        return operator.index(action)
    except TypeError as reason:
        raise ArgumentTypeError(f"action={action!r}; a whole number would do") from reason


def known_action(action: SupportsIndex, count: int) -> int:
    """An action as an int; raises `ArgumentError` unless it is one of `count`."""
    number = action_number(action)
    if not 0 <= number < count:
        raise ArgumentError(f"action {number}; 0 to {count - 1} would do")
    return number


def legal_action(mask: np.ndarray, action: SupportsIndex) -> int:
    """An action as an int; raises `ScheduleError` unless `mask` allows it."""
    number = action_number(action)
    if not 0 <= number < len(mask) or not mask[number]:
        raise ScheduleError(f"action {number}; one of {np.flatnonzero(mask).tolist()} would do")
    return number


def in_domain(nest: Nest) -> bool:
    """Whether a nest fits the slots of axes, operands and edges."""
    axes, operands = len(nest.axes), len(nest.operands)
    return axes <= AXES and operands <= OPERANDS and axes * operands <= PAIRS


def shapes(table: ActionTable) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of an observation."""
    return {
        "nodes": ((NODES, NODE_FEATURES), "float32"),
        "node_mask": ((NODES,), "int8"),
        "edges": ((2, EDGES), "int64"),
        "edge_features": ((EDGES, EDGE_FEATURES), "float32"),
        "edge_mask": ((EDGES,), "int8"),
        "candidates": ((CANDIDATES, CANDIDATE_FEATURES), "float32"),
        "world": ((WORLD_FEATURES,), "float32"),
        "action_mask": ((table.size,), "int8"),
    }


@dataclass(frozen=True)
class Fixed:
    """What all schedules of a nest on a target share: the nodes of axes and operands, the edges
    between them, and the machine. `moved` is 1 where an operand moves along an axis."""

    nodes: np.ndarray
    node_mask: np.ndarray
    edges: np.ndarray
    edge_features: np.ndarray
    count: int
    world: np.ndarray
    moved: np.ndarray
    item_bits: np.ndarray


@lru_cache(maxsize=512)
def fixed(nest: Nest, target: Target, threads: int) -> Fixed:
    """The part of an observation that no decision changes."""
    nodes = np.zeros((NODES, NODE_FEATURES), np.float32)
    mask = np.zeros(NODES, np.int8)
    edges = np.zeros((2, EDGES), np.int64)
    features = np.zeros((EDGES, EDGE_FEATURES), np.float32)
    lanes = target.lanes(nest.dtype)
    first = nest.operands[:3]
    for number, axis in enumerate(nest.axes):
        strides = [operand.stride_of(number) for operand in first]
        described = [value for stride in strides for value in stride_features(stride)]
        rest = axis.extent % lanes / lanes
        nodes[number, : 6 + len(described)] = (
            1.0, log(axis.extent) / 10, axis.extent > 1, axis.reduction, rest,
            math.gcd(axis.extent, 64) / 64, *described,
        )  # fmt: skip
        mask[number] = 1
    count = 0
    for number, operand in enumerate(nest.operands):
        slot = AXES + LOOPS + number
        nodes[slot, :12] = operand_features(nest, target, number, operand)
        mask[slot] = 1
        for at in range(len(nest.axes)):
            stride = stride_features(operand.stride_of(at))
            for back, pair in enumerate(((at, slot), (slot, at))):
                edges[:, count] = pair
                features[count, [0, 1, 2, 3]] = (1.0, *stride)
                features[count, 4] = back
                count += 1
    rows = [[op.stride_of(at) != 0 for op in nest.operands] for at in range(len(nest.axes))]
    moved = np.array(rows).reshape(len(nest.axes), -1).astype(np.float32)
    bits = np.array([log(operand.item_bytes) for operand in nest.operands], np.float32)
    world = machine_features(nest, target, threads)
    return Fixed(nodes, mask, edges, features, count, world, moved, bits)


def log(value: float) -> float:
    """The binary logarithm, of 0 as of 1."""
    return math.log2(max(1.0, value))


def stride_features(stride: int) -> tuple[float, float, float]:
    """Whether it does not move, whether it is of unit stride, and how far it moves."""
    return float(stride == 0), float(abs(stride) == 1), log(abs(stride)) / 20


def operand_features(
    nest: Nest, target: Target, number: int, operand: Operand
) -> tuple[float, ...]:
    """What an operand is, and how large beside the caches."""
    size = log(math.prod(operand.shape) * operand.item_bytes)
    caches = (size - log(level) for level in target.cache_bytes)
    inner = sum(abs(operand.stride_of(axis)) == 1 for axis in range(len(nest.axes)))
    return (
        float(number == 0), float(0 < number <= len(nest.inputs)), float(number > len(nest.inputs)),
        number / OPERANDS, size / 30, *(level / 10 for level in caches),
        float(number in nest.padded), operand.item_bytes / 8, len(operand.dims) / 8,
        float(inner),
    )  # fmt: skip


def machine_features(nest: Nest, target: Target, threads: int) -> np.ndarray:
    """The target, the threads, and the nest's size: float32 (MACHINE_FEATURES,)."""
    found = np.zeros(MACHINE_FEATURES, np.float32)
    intensity = nest.flops / max(1, nest.min_bytes)
    caches = (log(size) / 30 for size in target.cache_bytes)
    kinds = ("float32", "float64", "float16", "bfloat16", "int8")
    described = (
        target.lanes(nest.dtype) / 16, target.vector_registers / 32, target.temporaries / 8,
        target.fma_per_cycle / 2, target.fma_latency / 8, target.loads_per_cycle / 2, *caches,
        float(target.masks), float(target.fold), float(target.fold_splat),
        float(target.dot and is_whole(nest.dtype)),
        log(threads) / 4, ITEM_BYTES[nest.dtype] / 8,
        *(float(nest.inputs[0].dtype == kind) for kind in kinds),
        log(nest.points) / 30, log(intensity) / 10, len(nest.axes) / AXES,
        len(nest.reductions) / 4, float(len(nest.inputs)), float(len(nest.epilogue)) / 4,
        float(nest.accumulate), float(nest.reduction == "add"),
    )  # fmt: skip
    found[: len(described)] = described
    return found


NO_CANDIDATES = np.zeros((CANDIDATES, CANDIDATE_FEATURES), np.float32)
NO_CANDIDATES.flags.writeable = False
STEPS_LEFT = MACHINE_FEATURES - 1  # where `observe` says how much of the horizon is left
TREE = 24  # the features of an axis from here on depend on the schedule


def observe(
    schedule: Schedule,
    target: Target,
    threads: int,
    mask: np.ndarray,
    *,
    steps_left: float = 1.0,
    reach: Sequence[int] | None = None,
    candidates: np.ndarray | None = None,
    outlook: np.ndarray | None = None,
) -> Observation:
    """An observation of a schedule: arrays as `shapes` says.

    `mask` is the action mask, `steps_left` a share of the horizon. A construction says how far
    its loops so far `reach` along each axis; loops beyond are marked as not decided. `candidates`
    and `outlook` are those of `looptune.offers` and `looptune.outlook`, zeros where there are
    none.
    """
    nest = schedule.nest
    base = fixed(nest, target, threads)
    nodes, node_mask = base.nodes.copy(), base.node_mask.copy()
    edges, features = base.edges.copy(), base.edge_features.copy()
    ranges = [axis.extent for axis in nest.axes]
    for axis, extent in enumerate(ranges):
        until = extent if reach is None else reach[axis]
        left = math.ceil(extent / until)
        nodes[axis, TREE : TREE + 3] = schedule.vector == axis, log(until) / 10, log(left) / 10
    loops = schedule.loops[:LOOPS]
    below = np.empty((len(loops), len(ranges)), np.float32)
    count, previous = base.count, -1
    for at, loop in enumerate(loops):
        slot = AXES + at
        extent = ranges[loop.axis]
        trips = math.ceil(extent / loop.step)
        decided = reach is None or extent <= reach[loop.axis]
        ranges[loop.axis] = min(extent, loop.step)
        below[at] = ranges
        reduction = nest.axes[loop.axis].reduction
        nodes[slot, :13] = (
            1.0, log(loop.step) / 10, log(trips) / 10, log(extent) / 10,
            extent % loop.step / loop.step, reduction, loop.axis == schedule.vector,
            at == schedule.parallel, at / LOOPS, (len(loops) - at) / LOOPS, trips > 1,
            decided, loop.step == 1,
        )  # fmt: skip
        node_mask[slot] = 1
        pairs = [(slot, loop.axis, 1), (loop.axis, slot, 1)]
        pairs += [] if previous < 0 else [(previous, slot, 2), (slot, previous, 2)]
        for turn, (source, to, kind) in enumerate(pairs):
            edges[0, count], edges[1, count] = source, to
            features[count, 4] = turn % 2
            features[count, 4 + kind] = 1.0
            count += 1
        previous = slot
    if loops:
        used = slice(AXES, AXES + len(loops))
        sizes = np.log2(below) @ base.moved + base.item_bits
        footprint = np.log2(np.exp2(sizes).sum(1))
        levels = (target.vector_bytes * target.vector_registers, *target.cache_bytes)
        for column, size in enumerate(levels, 13):
            nodes[used, column] = np.clip((footprint - log(size)) / 8, -2, 2)
        moved = base.moved[[loop.axis for loop in loops]]
        nodes[used, 17 : 17 + min(3, moved.shape[1])] = moved[:, :3]
    for pack in schedule.packs:
        operand = AXES + LOOPS + pack.operand
        nodes[operand, 12 + isinstance(pack.at, int)] = 1.0
        if isinstance(pack.at, int) and pack.at < len(loops):
            nodes[operand, 14] = (pack.at + 1) / LOOPS
            nodes[AXES + pack.at, 20 + min(pack.operand, 3)] = 1.0
    world = np.zeros(WORLD_FEATURES, np.float32)
    world[:MACHINE_FEATURES] = base.world
    world[STEPS_LEFT] = steps_left
    if outlook is not None:
        world[MACHINE_FEATURES:] = outlook
    edge_mask = np.zeros(EDGES, np.int8)
    edge_mask[:count] = 1
    return {
        "nodes": nodes, "node_mask": node_mask, "edges": edges, "edge_features": features,
        "edge_mask": edge_mask,
        "candidates": NO_CANDIDATES if candidates is None else candidates,
        "world": world, "action_mask": mask,
    }  # fmt: skip
