"""Seeded random nests and legal schedules: the input of the property tests.

A nest mixes what real workloads do (products of plain tensors, sliding windows with stride,
dilation and padding) with what they rarely do (diagonals, mixed-radix outputs, reversed and
broadcast strides, empty axes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looptune.default import default_schedule
from looptune.errors import NestError, ScheduleError
from looptune.ir import (
    ACTIVATIONS,
    Activation,
    Axis,
    Combine,
    Dim,
    Nest,
    Operand,
    Scale,
    Step,
)
from looptune.schedule import PRIMITIVES, Schedule
from looptune.target import Target

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 67, 100, 129)
MAX_POINTS = 4000
MAX_ELEMENTS = 20_000  # of an operand: a wide gap must not cost a second
ATTEMPTS = 100

Rng = np.random.Generator
Index = tuple[tuple[int, ...], int, int, bool]  # coefficients, lowest and highest index, exact?


@dataclass(frozen=True)
class Case:
    """A problem; whether its schedule is the default one, its numbers small integers, one NaN."""

    seed: int
    nest: Nest
    schedule: Schedule
    default: bool
    exact: bool
    nan: bool


def chance(rng: Rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def random_case(seed: int, target: Target) -> Case:
    """The case of a seed; `target` only serves the default schedule."""
    rng = np.random.default_rng(seed)
    nest = random_nest(rng)
    exact, default = chance(rng, 0.5) and is_exact(nest), chance(rng, 0.1)
    schedule = default_schedule(nest, target) if default else random_schedule(nest, rng)
    return Case(seed, nest, schedule, default, exact, chance(rng, 0.2))


def is_exact(nest: Nest) -> bool:
    """Whether small whole numbers give a result without any rounding but that to the output."""
    return all(not isinstance(s, Activation) or s.kind == "relu" for s in nest.epilogue)


def random_nest(rng: Rng) -> Nest:
    """A nest of at most `MAX_POINTS` points."""
    for _ in range(ATTEMPTS):
        try:
            return draw_nest(rng)
        except NestError:  # two points meet in the output: draw again
            continue
    raise AssertionError(f"no legal nest in {ATTEMPTS} attempts")


def draw_nest(rng: Rng) -> Nest:
    """A nest, or `NestError` if its parts do not fit."""
    axes = random_axes(rng)
    dtypes = ["float32", "float64", "float16", "bfloat16", "int8"]
    dtype = str(rng.choice(dtypes, p=[0.45, 0.25, 0.1, 0.1, 0.1]))
    reduction = "add" if dtype == "int8" else str(rng.choice(["add", "add", "add", "max", "min"]))
    reads = 2 if chance(rng, 0.7) else 1
    written = {"int8": "int32", "float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    written = dtype if dtype.endswith("16") and chance(rng, 0.5) else written
    spatial = [a for a, axis in enumerate(axes) if not axis.reduction]
    output = operand("out", written, output_indices(axes, spatial, rng), rng, output=True)
    limit = {"add": 0.0, "max": -math.inf, "min": math.inf}[reduction]
    inputs = []
    for name in "ab"[:reads]:
        fill = limit if reads == 1 else float(rng.integers(-1, 2))
        indices = input_indices(axes, rng)
        inputs.append(operand(name, dtype, indices, rng, output=False, fill=fill))
    steps = () if dtype == "int8" else random_epilogue(axes, output, rng)
    nest = Nest(axes, output, tuple(inputs), reduction, chance(rng, 0.3), steps)  # type: ignore[arg-type]
    if max(span(op) for op in nest.operands) > MAX_ELEMENTS:
        raise NestError("an operand is too large to be quick")
    return nest


def random_epilogue(axes: Sequence[Axis], output: Operand, rng: Rng) -> tuple[Step, ...]:
    """None as a rule; else up to three steps, with biases, residuals and activations."""
    if not chance(rng, 0.3):
        return ()
    steps: list[Step] = []
    for number in range(int(rng.integers(1, 4))):
        match str(rng.choice(["activation", "scale", "add", "mul"])):
            case "activation":
                steps.append(Activation(str(rng.choice(ACTIVATIONS))))  # type: ignore[arg-type]
            case "scale":
                steps.append(Scale(float(rng.choice([2.0, -1.0, 0.5]))))
            case kind:
                extra = random_extra(f"e{number}", axes, output, rng)
                steps.append(Combine(kind, extra))  # type: ignore[arg-type]
    return tuple(steps)


def random_extra(name: str, axes: Sequence[Axis], output: Operand, rng: Rng) -> Operand:
    """An epilogue's operand over some of the spatial axes: a bias where they are few."""
    chosen = [a for a, axis in enumerate(axes) if not axis.reduction and chance(rng, 0.6)]
    rng.shuffle(chosen)
    return operand(name, output.dtype, [index_of(axes, [(a, 1)]) for a in chosen], rng, output=True)


def random_axes(rng: Rng) -> tuple[Axis, ...]:
    """Up to four spatial and four reduction axes, in any order."""
    kinds = [False] * int(rng.choice(5, p=[0.06, 0.24, 0.35, 0.25, 0.1]))
    kinds += [True] * int(rng.choice(5, p=[0.15, 0.4, 0.25, 0.15, 0.05]))
    rng.shuffle(kinds)
    axes, points = [], 1
    for number, reduction in enumerate(kinds):
        extent = int(rng.choice([n for n in EXTENTS if n * points <= MAX_POINTS]))
        points *= extent
        axes.append(Axis("ijklmnop"[number], extent, reduction))
    rng.shuffle(axes)
    if axes and chance(rng, 0.03):
        at = int(rng.integers(len(axes)))
        axes[at] = Axis(axes[at].name, 0, axes[at].reduction)
    return tuple(axes)


def index_of(axes: Sequence[Axis], terms: Sequence[tuple[int, int]]) -> Index:
    """The index with (axis, coefficient) terms and its range."""
    coefficients = [0] * len(axes)
    for axis, coefficient in terms:
        coefficients[axis] += coefficient
    ends = [c * max(axis.extent - 1, 0) for c, axis in zip(coefficients, axes, strict=True)]
    return tuple(coefficients), sum(min(0, e) for e in ends), sum(max(0, e) for e in ends), True


def output_indices(axes: Sequence[Axis], spatial: list[int], rng: Rng) -> list[Index]:
    """One dimension an axis as a rule; merged, scaled, reversed or repeated ones at times."""
    order = [int(a) for a in rng.permutation(spatial)]
    found: list[Index] = []
    while order:
        terms = [(order.pop(), int(rng.choice([1, 2, -1], p=[0.85, 0.08, 0.07])))]
        if order and chance(rng, 0.08):  # mixed radix: i * extent_j + j
            terms.append((order.pop(), (axes[terms[0][0]].extent or 1) * abs(terms[0][1])))
        found.append(index_of(axes, terms))
        if chance(rng, 0.04):
            found.append(found[-1])
    if chance(rng, 0.05):
        found.append(index_of(axes, ()))
    return found


def input_indices(axes: Sequence[Axis], rng: Rng) -> list[Index]:
    """Plain dimensions, sliding windows and diagonals over a random choice of axes."""
    order = [int(a) for a in rng.permutation(len(axes)) if chance(rng, 0.75)]
    found: list[Index] = []
    while order:
        scale = int(rng.choice([1, 1, 1, 1, 1, 2, 3, -1]))
        terms = [(order.pop(), scale)]
        while order and chance(rng, 0.3):  # stride * i + dilation * r
            terms.append((order.pop(), int(rng.choice([1, 1, 1, 2, 3, -1]))))
        coefficients, low, high, _ = index_of(axes, terms)
        found.append((coefficients, low, high, chance(rng, 0.75)))
        if chance(rng, 0.06):
            found.append(found[-1])
    return found


def operand(
    name: str, dtype: str, indices: list[Index], rng: Rng, output: bool, fill: float = 0.0
) -> Operand:
    """An operand whose tensor holds the indices, or for padding only some of them."""
    shape, offsets = [], []
    for _, low, high, covered in indices:
        before = int(rng.integers(0, 3)) if chance(rng, 0.15) else 0
        behind = int(rng.integers(0, 3)) if chance(rng, 0.15) else 0
        if not (covered or output):  # padding: parts of the window lie outside
            before, behind = -int(rng.integers(0, 3)), -int(rng.integers(0, 3))
        shape.append(max(1, high - low + 1 + before + behind))
        offsets.append(before - low)
    strides = random_strides(shape, rng, broadcast=not output)
    dims = (
        Dim(size, stride, coefficients, offset)
        for size, stride, offset, (coefficients, *_) in zip(
            shape, strides, offsets, indices, strict=True
        )
    )
    return Operand(name, dtype, tuple(dims), fill)  # type: ignore[arg-type]


def random_strides(shape: Sequence[int], rng: Rng, broadcast: bool) -> list[int]:
    """Row-major as a rule; else transposed, with gaps, reversed or broadcast."""
    order = list(range(len(shape)))
    if chance(rng, 0.25):
        rng.shuffle(order)
    gaps, reverse = chance(rng, 0.25), chance(rng, 0.1)
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        if gaps and chance(rng, 0.5):
            step = step + int(rng.integers(1, 6)) if step > 1 else int(rng.integers(2, 4))
        if broadcast and chance(rng, 0.04):
            continue
        strides[dim] = -step if reverse and chance(rng, 0.5) else step
        step *= shape[dim]
    return strides


def span(operand: Operand) -> int:
    """Elements from the first to the last of an operand, gaps included."""
    return 1 + sum(abs(dim.stride) * max(dim.size - 1, 0) for dim in operand.dims)


def random_schedule(nest: Nest, rng: Rng) -> Schedule:
    """A schedule that a few random primitives lead to; those that do not apply are skipped."""
    schedule = Schedule(nest)
    for _ in range(int(rng.integers(0, 10))):
        schedule = random_step(schedule, rng)
    if chance(rng, 0.3):
        schedule = attempt(schedule, "parallel", int(rng.integers(0, len(schedule.loops) + 1)))
    return schedule


def random_step(schedule: Schedule, rng: Rng) -> Schedule:
    """One random primitive."""
    loops = len(schedule.loops)
    at = int(rng.integers(0, loops + 1))
    name = str(rng.choice(["split"] * 4 + ["swap"] * 3 + ["reorder", "merge", "vectorize", "pack"]))
    match name:
        case "split":
            return attempt(schedule, name, at, int(rng.choice([2, 3, 4, 5, 6, 7, 8, 13, 16, 17])))
        case "reorder":
            order = rng.permutation(loops).tolist()
            return attempt(schedule, name, legal_order(schedule, order))
        case "vectorize":
            return attempt(schedule, name, at)
        case "pack":
            operand = int(rng.integers(0, len(schedule.nest.operands)))
            rank = len(schedule.nest.operands[operand].dims)
            place = "root" if rng.random() < 0.3 else at
            return attempt(schedule, name, operand, rng.permutation(rank).tolist(), place)
        case _:
            return attempt(schedule, name, at)


def attempt(schedule: Schedule, name: str, *arguments: object) -> Schedule:
    """The primitive's result, or the schedule as it was where it does not apply."""
    try:
        return PRIMITIVES[name](schedule, *arguments)
    except ScheduleError:
        return schedule


def legal_order(schedule: Schedule, order: list[int]) -> list[int]:
    """`order` with the loops of each axis put back into their own order."""
    axes = [schedule.loops[at].axis for at in order]
    queues = {axis: iter(sorted(at for at in order if schedule.loops[at].axis == axis))
              for axis in axes}  # fmt: skip
    return [next(queues[axis]) for axis in axes]


def random_chunks(seed: int, trips: int) -> list[tuple[int, int]]:
    """The parallel loop cut at random points, in random order, some pieces empty.

    One trip means that there is no such loop: every call would do the whole job.
    """
    if trips == 1:
        return [(0, 1)]
    rng = np.random.default_rng(seed)
    cuts = sorted(int(c) for c in rng.integers(0, trips + 1, int(rng.integers(0, 4))))
    pieces = list(zip([0, *cuts], [*cuts, trips], strict=True))
    rng.shuffle(pieces)
    return [(int(begin), int(end)) for begin, end in pieces]
