"""The oracle: what a plan means, in float64 NumPy, sharing nothing with the lowering.

An operand becomes a strided view over the nest's axes of a copy padded with its fill; NumPy's
einsum does the rest. Where the whole is too costly, seeded points of the output and the
boundaries that the caller names are computed instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from looptune.errors import VerificationError
from looptune.ir import IDENTITY, Nest, Operand, Plan, plan_of

Arrays = Mapping[str, np.ndarray]
WHOLE_POINTS = 1 << 30  # multiply-adds that BLAS does in a fraction of a second
WHOLE_ELEMENTS = 1 << 25  # of an array that is made for it
SAMPLES = 4096
REDUCE: dict[str, np.ufunc] = {"add": np.add, "max": np.maximum, "min": np.minimum}
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Check:
    """How a result compares: `worst` is the largest error over its bound, at index `where`."""

    ok: bool
    points: int
    worst: float
    where: tuple[int, ...]
    found: float
    expected: float


def view(operand: Operand, nest: Nest, array: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The operand as a read-only float64 array over the axes it depends on, and their numbers."""
    bounds = [dim.bounds(nest.axes) for dim in operand.dims]
    padded = np.full([high - low + 1 for low, high in bounds], operand.fill, np.float64)
    inside, source = [], []
    for (low, high), dim in zip(bounds, operand.dims, strict=True):
        first, last = max(low, 0), max(min(high + 1, dim.size), max(low, 0))
        inside.append(slice(first - low, last - low))
        source.append(slice(first, last))
    padded[tuple(inside)] = array[tuple(source)]
    axes = [a for a in range(len(nest.axes)) if any(d.coefficients[a] for d in operand.dims)]
    strides = [
        sum(d.coefficients[a] * s for d, s in zip(operand.dims, padded.strides, strict=True))
        for a in axes
    ]
    starts = (dim.offset - low for dim, (low, _) in zip(operand.dims, bounds, strict=True))
    base = padded[tuple(slice(start, None) for start in starts)]
    shape = [nest.axes[a].extent for a in axes]
    strided = np.lib.stride_tricks.as_strided(base, shape, strides, writeable=False)
    return strided, axes


def reduce_nest(nest: Nest, arrays: Arrays) -> np.ndarray:
    """The reduced products over the spatial axes, in their order; nothing accumulated yet."""
    spatial = list(nest.spatial)
    shape = [nest.axes[a].extent for a in spatial]
    if nest.points == 0:
        return np.full(shape, IDENTITY[nest.reduction])
    views = [view(operand, nest, arrays[operand.name]) for operand in nest.inputs]
    seen = {a for _, axes in views for a in axes}
    repeats = math.prod(nest.axes[a].extent for a in nest.reductions if a not in seen)
    if nest.reduction == "add":
        kept = [a for a in spatial if a in seen]
        operands = [part for pair in views for part in pair]
        summed = np.einsum(*operands, kept, optimize=len(views) > 1) * repeats
    else:
        kept = [a for a in spatial if a in seen]
        order = [*kept, *(a for a in nest.reductions if a in seen)]
        product = np.ones(())
        for strided, moved in views:
            product = product * over(strided, moved, order)
        axes = tuple(range(len(kept), len(order)))
        summed = REDUCE[nest.reduction].reduce(product, axis=axes)
    return np.broadcast_to(over(np.asarray(summed), kept, spatial), shape)


def over(array: np.ndarray, axes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """`array` over `axes`, broadcast to the axes `order`."""
    moved = array.transpose([axes.index(a) for a in order if a in axes])
    sizes = iter(moved.shape)
    return moved.reshape([next(sizes) if a in axes else 1 for a in order])


def combine(nest: Nest, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What an accumulating nest leaves in the output."""
    result: np.ndarray = REDUCE[nest.reduction](old, new)
    return result


def write(nest: Nest, output: np.ndarray, values: np.ndarray) -> None:
    """Put values over the spatial axes where the nest's output access says."""
    if values.size == 0:
        return
    index = []
    for dim in nest.output.dims:
        position = np.full([1] * len(nest.spatial), dim.offset)
        for place, axis in enumerate(nest.spatial):
            steps = [1] * len(nest.spatial)
            steps[place] = -1
            position = position + dim.coefficients[axis] * np.arange(
                nest.axes[axis].extent
            ).reshape(steps)
        index.append(position)
    where = tuple(np.broadcast_arrays(*index)) if index else ()
    if nest.accumulate:
        values = combine(nest, output[where], values.reshape(np.shape(output[where])))
    output[where] = values.reshape(np.shape(output[where]))


def reference(problem: Plan | Nest, arrays: Arrays) -> np.ndarray:
    """The plan's whole output in float64; `arrays` by tensor name, the output's if accumulated.

    Elements that no nest writes are NaN (or the old ones).
    """
    plan = plan_of(problem) if isinstance(problem, Nest) else problem
    known = {t.name: np.asarray(arrays[t.name], np.float64) for t in plan.inputs}
    for tensor in (plan.output, *plan.temporaries):
        if tensor.name == plan.output.name and plan.accumulates:
            known[tensor.name] = np.array(arrays[tensor.name], np.float64)
        else:
            known[tensor.name] = np.full(tensor.shape, np.nan)
    with np.errstate(all="ignore"):
        for nest in plan.nests:
            write(nest, known[nest.output.name], reduce_nest(nest, known))
    return known[plan.output.name]


def magnitudes(plan: Plan, arrays: Arrays) -> np.ndarray:
    """The sums of absolute values behind each output element: what rounding errors scale with."""
    return reference(absolute(plan), {name: np.abs(array) for name, array in arrays.items()})


def absolute(plan: Plan) -> Plan:
    """The plan with the sizes of its fills; infinite ones leave a maximum as it is, and stay."""
    nests = []
    for nest in plan.nests:
        fills = (abs(op.fill) if math.isfinite(op.fill) else op.fill for op in nest.inputs)
        inputs = (replace(op, fill=fill) for op, fill in zip(nest.inputs, fills, strict=True))
        nests.append(replace(nest, inputs=tuple(inputs)))
    return replace(plan, nests=tuple(nests))


def roundings(plan: Plan) -> int:
    """Most roundings behind one output element, one operation each."""
    lengths = (math.prod(nest.axes[a].extent for a in nest.reductions) for nest in plan.nests)
    return sum(length + 2 for length in lengths)


def error_bound(plan: Plan, magnitude: np.ndarray) -> np.ndarray:
    """Largest error of a correct result in the plan's dtype, elementwise.

    gamma_n * sum |a||b| with gamma_n = n u / (1 - n u) for n roundings of unit u (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1), doubled for temporaries that
    are rounded to the dtype, and the smallest normal number for underflow.
    """
    info = np.finfo(plan.dtype)
    total = roundings(plan) * float(info.eps) / 2
    gamma = total / (1 - total) if total < 0.5 else 1.0
    bound: np.ndarray = 2 * gamma * np.abs(magnitude) + 4 * roundings(plan) * float(info.tiny)
    return bound


def whole_is_cheap(plan: Plan) -> bool:
    """Whether the whole reference takes a fraction of a second and modest memory."""
    for nest in plan.nests:
        if nest.points > (WHOLE_POINTS if nest.reduction == "add" else WHOLE_ELEMENTS):
            return False
        for operand in nest.inputs:
            axes = (a for a in range(len(nest.axes)) if operand_moves(operand, a))
            if math.prod(nest.axes[a].extent for a in axes) > WHOLE_ELEMENTS:
                return False
    return True


def operand_moves(operand: Operand, axis: int) -> bool:
    """Whether the operand's index depends on the axis."""
    return any(dim.coefficients[axis] for dim in operand.dims)


def compare(plan: Plan, result: np.ndarray, expected: np.ndarray, magnitude: np.ndarray) -> Check:
    """Compare elementwise: NaN with NaN, infinities exactly, the rest within the bound."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(plan.dtype).astype(np.float64)
        error = np.abs(result - expected) / error_bound(plan, magnitude)
        error = np.where(np.isfinite(magnitude), error, 0.0)
    same = (result == rounded) | (np.isnan(result) & np.isnan(expected))
    error = np.where(
        same, 0.0, np.where(np.isfinite(expected) & np.isfinite(result), error, np.inf)
    )
    if error.size == 0:
        return Check(True, 0, 0.0, (), 0.0, 0.0)
    flat = int(np.argmax(error))
    where = tuple(int(i) for i in np.unravel_index(flat, error.shape))
    worst = float(error[where])
    return Check(worst <= 1, error.size, worst, where, float(result[where]), float(expected[where]))


def sample_points(
    nest: Nest, boundaries: Mapping[int, Sequence[int]], seed: int, count: int = SAMPLES
) -> np.ndarray:
    """Spatial points to check, one a row: seeded ones, and both sides of every boundary.

    `boundaries` are positions along an axis, by its number, where tiles, tails or packs meet.
    """
    rng = np.random.default_rng(seed)
    extents = [nest.axes[a].extent for a in nest.spatial]
    points = rng.integers(0, extents, (count, len(extents)))
    near: list[np.ndarray] = []
    for place, axis in enumerate(nest.spatial):
        edges = {0, extents[place]} | set(boundaries.get(axis, ()))
        sides = {e + d for e in edges for d in (-1, 0) if 0 <= e + d < extents[place]}
        copies = rng.integers(0, extents, (len(sides), len(extents)))
        copies[:, place] = sorted(sides)
        near.append(copies)
    return np.unique(np.concatenate([points, *near]), axis=0)


def at_points(nest: Nest, arrays: Arrays, points: np.ndarray) -> np.ndarray:
    """The reduced products of a nest at rows of spatial points."""
    if nest.points == 0:
        return np.full(len(points), IDENTITY[nest.reduction])
    place = {axis: i for i, axis in enumerate(nest.spatial)}
    views = [view(operand, nest, arrays[operand.name]) for operand in nest.inputs]
    length = math.prod(nest.axes[a].extent for a in nest.reductions)
    rows = max(1, CHUNK_ELEMENTS // max(1, length))
    found = []
    for first in range(0, len(points), rows):
        chunk = points[first : first + rows]
        product = np.ones((len(chunk), *([1] * len(nest.reductions))))
        for strided, axes in views:
            spatial = [a for a in axes if a in place]
            inner = [a for a in axes if a not in place]
            moved = strided.transpose([axes.index(a) for a in (*spatial, *inner)])
            picked = moved[tuple(chunk[:, place[a]] for a in spatial)]
            if not spatial:
                picked = picked[None]
            shape = [nest.axes[a].extent if a in inner else 1 for a in nest.reductions]
            product = product * picked.reshape((-1, *shape))
        full = (len(chunk), *(nest.axes[a].extent for a in nest.reductions))
        product = np.broadcast_to(product, full)
        found.append(REDUCE[nest.reduction].reduce(product, axis=tuple(range(1, product.ndim))))
    return np.concatenate(found)


def check(
    problem: Plan | Nest,
    arrays: Arrays,
    result: np.ndarray,
    *,
    boundaries: Mapping[int, Sequence[int]] | None = None,
    seed: int = 0,
) -> Check:
    """Compare a result with the reference, whole where cheap, else at sampled points."""
    plan = plan_of(problem) if isinstance(problem, Nest) else problem
    found = np.asarray(result, np.float64)
    if whole_is_cheap(plan):
        return compare(plan, found, reference(plan, arrays), magnitudes(plan, arrays))
    last = plan.nests[-1]
    known = {t.name: np.asarray(arrays[t.name], np.float64) for t in plan.inputs}
    sizes = {name: np.abs(array) for name, array in known.items()}
    for values, nests in ((known, plan.nests), (sizes, absolute(plan).nests)):
        for tensor in (plan.output, *plan.temporaries):
            values[tensor.name] = np.full(tensor.shape, np.nan)
        if plan.accumulates:
            old = np.asarray(arrays[plan.output.name], np.float64)
            values[plan.output.name] = old if values is known else np.abs(old)
        for nest in nests[:-1]:
            write(nest, values[nest.output.name], reduce_nest(nest, values))
    points = sample_points(last, boundaries or {}, seed)
    where = output_index(last, points)
    values_at = at_points(last, known, points)
    sizes_at = at_points(absolute(plan).nests[-1], sizes, points)
    if last.accumulate:
        values_at = combine(last, known[plan.output.name][where], values_at)
        sizes_at = combine(last, sizes[plan.output.name][where], sizes_at)
    return compare(plan, np.atleast_1d(found[where]), values_at, sizes_at)


def output_index(nest: Nest, points: np.ndarray) -> tuple[np.ndarray, ...]:
    """The output elements that rows of spatial points write."""
    return tuple(
        points @ np.array([dim.coefficients[a] for a in nest.spatial], np.int64) + dim.offset
        for dim in nest.output.dims
    )


def verify(
    problem: Plan | Nest,
    arrays: Arrays,
    result: np.ndarray,
    *,
    boundaries: Mapping[int, Sequence[int]] | None = None,
    seed: int = 0,
) -> Check:
    """`check`, raising `VerificationError` with the worst element."""
    found = check(problem, arrays, result, boundaries=boundaries, seed=seed)
    if not found.ok:
        raise VerificationError(
            f"element {list(found.where)} is {found.found!r}, the reference is "
            f"{found.expected!r}: {found.worst:.3g} times the error bound"
        )
    return found
