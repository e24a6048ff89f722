"""The oracle: what a plan means, in float64 NumPy, sharing nothing with the lowering.

An operand becomes a strided view over the nest's axes of a copy padded with its fill; NumPy's
einsum does the rest. Where the whole is too costly, seeded points of the output and the
boundaries that the caller names are computed instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType

import numpy as np

from looptune.dtypes import DType, is_narrow, is_whole, numpy_dtype, poison
from looptune.errors import ArgumentError, VerificationError
from looptune.ir import (
    IDENTITY,
    Activation,
    Combine,
    Nest,
    Operand,
    Plan,
    Reduction,
    Scale,
    Step,
    plan_of,
)

Arrays = Mapping[str, np.ndarray]
Boundaries = Mapping[int, Sequence[int]]  # positions along an axis, by its number
WHOLE_POINTS = 1 << 30  # multiply-adds that BLAS does in a fraction of a second
WHOLE_ELEMENTS = 1 << 25  # of an array that is made for it
SAMPLES = 4096
REDUCE: dict[str, np.ufunc] = {"add": np.add, "max": np.maximum, "min": np.minimum}
CHUNK_ELEMENTS = 1 << 22
WRAP = 2.0**32  # sums of whole numbers are those of int32, modulo this
# Unit roundoff, least normal number and largest number of the narrow types.
NARROW = {"float16": (2.0**-11, 2.0**-14, 65504.0), "bfloat16": (2.0**-8, 2.0**-126, 3.39e38)}
ACTIVATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "gelu": lambda x: np.where(x == -np.inf, 0.0, 0.5 * x * erfc(-x / math.sqrt(2))),
}
# How errors grow: bounds on the derivative, and roundings of the result that the method adds.
SLOPE = {"relu": (1.0, 0.0), "sigmoid": (0.25, 8.0), "tanh": (1.0, 8.0), "gelu": (1.13, 16.0)}


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
        * (nest.axes[a].extent > 1)  # else it means nothing, and may be too large for NumPy
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


def erfc(x: np.ndarray) -> np.ndarray:
    """The complementary error function, elementwise."""
    found: np.ndarray = np.vectorize(math.erfc, otypes=[np.float64])(x)
    return found


def stepped(step: Step, values: np.ndarray, extra: np.ndarray | None) -> np.ndarray:
    """One step of an epilogue; `extra` is its operand over the same points."""
    match step:
        case Activation(kind):
            return ACTIVATE[kind](values)
        case Scale(factor):
            return np.asarray(values * factor)
        case Combine(kind):
            assert extra is not None
            return np.asarray(values + extra if kind == "add" else values * extra)


def stepped_size(step: Step, sizes: np.ndarray, extra: np.ndarray | None) -> np.ndarray:
    """What the errors of a step's result scale with, from that for its argument.

    An activation adds roundings of its own; its result is at most 1, even of an infinity, or at
    most its argument.
    """
    match step:
        case Activation(kind):
            slope, added = SLOPE[kind]
            most = 1.0 if kind in ("sigmoid", "tanh") else sizes
            return np.asarray(slope * sizes + added * most)
        case Scale(factor):
            return np.asarray(sizes * abs(factor))
        case Combine(kind):
            assert extra is not None
            extra = np.where(np.isfinite(extra), np.abs(extra), 0.0)
            return np.asarray(sizes + extra if kind == "add" else sizes * extra)


def finished(
    nest: Nest, values: np.ndarray, arrays: Arrays, points: np.ndarray | None, sizes: bool
) -> np.ndarray:
    """The epilogue over all spatial axes, or at rows of spatial points; with `sizes`, see above."""
    apply = stepped_size if sizes else stepped
    for step in nest.epilogue:
        extra = None
        if isinstance(step, Combine):
            strided, axes = view(step.operand, nest, arrays[step.operand.name])
            if points is None:
                shape = [nest.axes[a].extent for a in nest.spatial]
                extra = np.broadcast_to(over(strided, axes, nest.spatial), shape)
            else:
                place = {axis: i for i, axis in enumerate(nest.spatial)}
                index = tuple(points[:, place[a]] for a in axes)
                extra = np.broadcast_to(strided[index], len(points))
        values = apply(step, values, extra)
    return values


def over(array: np.ndarray, axes: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """`array` over `axes`, broadcast to the axes `order`."""
    moved = array.transpose([axes.index(a) for a in order if a in axes])
    sizes = iter(moved.shape)
    return moved.reshape([next(sizes) if a in axes else 1 for a in order])


def combine(nest: Nest, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What an accumulating nest leaves in the output."""
    result: np.ndarray = REDUCE[nest.reduction](old, new)
    return result


def written(nest: Nest, output: np.ndarray) -> np.ndarray:
    """The elements that the nest writes, as a writable view over its spatial axes."""
    shape = [nest.axes[a].extent for a in nest.spatial]
    if 0 in shape:
        return np.empty(shape)
    strides = [
        sum(d.coefficients[a] * s for d, s in zip(nest.output.dims, output.strides, strict=True))
        for a in nest.spatial
    ]
    # The ellipsis keeps a result of no dimensions a view.
    start: tuple[slice | EllipsisType, ...] = (
        *(slice(dim.offset, None) for dim in nest.output.dims),
        ...,
    )
    return np.lib.stride_tricks.as_strided(output[start], shape, strides)


def write(nest: Nest, output: np.ndarray, values: np.ndarray, arrays: Arrays, sizes: bool) -> None:
    """Put values over the spatial axes, epilogue done, where the nest's output access says."""
    target = written(nest, output)
    total = combine(nest, target, values) if nest.accumulate else values
    target[...] = finished(nest, total, arrays, None, sizes)


def float64_arrays(plan: Plan, arrays: Arrays) -> dict[str, np.ndarray]:
    """Float64 inputs, and the output to start from: the old one, copied, if it is read, else NaN.

    Raises `ArgumentError` for an array that is missing or of another shape.
    """
    known = {}
    for tensor in (plan.output, *plan.inputs) if plan.accumulates else plan.inputs:
        if tensor.name not in arrays:
            raise ArgumentError(f"no array for {tensor.name}; there are {sorted(arrays)}")
        array = np.asarray(arrays[tensor.name])
        check_shape(tensor.name, array, tensor.shape)
        known[tensor.name] = array.astype(np.float64, copy=tensor is plan.output)
    if not plan.accumulates:
        known[plan.output.name] = np.full(plan.output.shape, np.nan)
    return known


def check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise `ArgumentError` unless the array has this shape."""
    if array.shape != shape:
        raise ArgumentError(f"{name} has shape {array.shape}; the plan has {shape}")


def reference(problem: Plan | Nest, arrays: Arrays) -> np.ndarray:
    """The plan's whole output in float64; `arrays` by tensor name, the output's if accumulated.

    Elements that no nest writes are NaN (or the old ones).
    """
    plan = plan_of(problem) if isinstance(problem, Nest) else problem
    return evaluate(plan, float64_arrays(plan, arrays))


def evaluate(plan: Plan, known: dict[str, np.ndarray], sizes: bool = False) -> np.ndarray:
    """Run the nests over float64 arrays; those of the output and temporaries are written.

    With `sizes` the arrays, and the result, are what errors scale with (`absolute`).
    """
    with np.errstate(all="ignore"):
        for nest in plan.nests:
            write(nest, target(plan, nest, known), reduce_nest(nest, known), known, sizes)
    return known[plan.output.name]


def target(plan: Plan, nest: Nest, known: dict[str, np.ndarray]) -> np.ndarray:
    """The array that a nest writes, made on its first use."""
    name = nest.output.name
    if name not in known:
        (shape,) = (tensor.shape for tensor in plan.temporaries if tensor.name == name)
        known[name] = np.full(shape, np.nan)
    return known[name]


def absolute(plan: Plan, known: Mapping[str, np.ndarray]) -> tuple[Plan, dict[str, np.ndarray]]:
    """The plan and arrays whose result is what rounding errors scale with.

    That is the sum, or the largest, of the products' absolute values. Infinities and NaN count
    as 0: a finite result owes nothing to them, and any other must match exactly. Whole numbers
    have no errors.
    """
    if is_whole(plan.dtype):
        return plan, {name: array.copy() for name, array in known.items()}
    nests = []
    for nest in plan.nests:
        fills = (abs(op.fill) if math.isfinite(op.fill) else 0.0 for op in nest.inputs)
        inputs = tuple(replace(op, fill=f) for op, f in zip(nest.inputs, fills, strict=True))
        reduction: Reduction = "add" if nest.reduction == "add" else "max"
        nests.append(replace(nest, inputs=inputs, reduction=reduction))
    sizes = {name: np.where(np.isfinite(a), np.abs(a), 0.0) for name, a in known.items()}
    return replace(plan, nests=tuple(nests)), sizes


def roundings(plan: Plan) -> int:
    """Most roundings behind one output element, one operation each."""
    return sum(
        math.prod(nest.axes[a].extent for a in nest.reductions) + 2 + len(nest.epilogue)
        for nest in plan.nests
    )


def error_bound(plan: Plan, magnitude: np.ndarray) -> np.ndarray:
    """Largest error of a correct result in the plan's dtype, elementwise.

    Whole numbers have none.

    gamma_n * sum |a||b| with gamma_n = n u / (1 - n u) for n roundings of unit u (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1), doubled for temporaries that
    are rounded to the dtype, and the smallest normal number for underflow.
    """
    if is_whole(plan.dtype):
        return np.zeros_like(magnitude)
    info = np.finfo(plan.nests[-1].dtype)
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


def representable(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Values as the output's type holds them: rounded, or modulo 2 ** 32."""
    if is_whole(dtype):
        found: np.ndarray = (values + WRAP / 2) % WRAP - WRAP / 2
        return found
    return values.astype(numpy_dtype(dtype)).astype(np.float64)


def compare(plan: Plan, result: np.ndarray, expected: np.ndarray, magnitude: np.ndarray) -> Check:
    """Compare elementwise: NaN with NaN, infinities exactly, the rest within the bound."""
    with np.errstate(all="ignore"):
        bound = error_bound(plan, magnitude)
        if is_whole(plan.dtype):  # what no nest writes is poisoned, and they have no NaN
            expected = np.where(np.isnan(expected), poison(plan.dtype), expected)
        rounded = representable(expected, plan.dtype)
        if is_narrow(plan.dtype):
            unit, tiny, largest = NARROW[plan.dtype]
            near = (np.abs(expected) + bound) * (1 + unit) >= largest  # may round to infinity
            result = np.where(near & np.isinf(result), np.copysign(largest, result), result)
            expected = np.where(near & np.isinf(rounded), np.copysign(largest, expected), expected)
            bound = bound + unit * (np.abs(expected) + bound + tiny)
        error = np.abs(result - expected) / bound
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
    nest: Nest, boundaries: Boundaries, seed: int, count: int = SAMPLES
) -> np.ndarray:
    """Spatial points to check, one a row: `count` seeded ones (all, where there are fewer), and
    both sides of every boundary.

    `boundaries` are positions along an axis, by its number, where tiles, tails or packs meet.
    """
    rng = np.random.default_rng(seed)
    extents = [nest.axes[a].extent for a in nest.spatial]
    total = math.prod(extents)
    flat = rng.choice(total, min(count, total), replace=False, shuffle=False)
    points = np.empty((len(flat), len(extents)), np.int64)
    for place in reversed(range(len(extents))):
        flat, points[:, place] = np.divmod(flat, extents[place])
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


def output_points(
    plan: Plan, boundaries: Sequence[Boundaries], seed: int, count: int = SAMPLES
) -> np.ndarray:
    """Indices of output elements to check, one a row: a fair share from every nest that writes."""
    nests = [
        (nest, edges)
        for nest, edges in zip(plan.nests, boundaries, strict=True)
        if nest.output.name == plan.output.name and all(nest.axes[a].extent for a in nest.spatial)
    ]
    found = [np.empty((0, len(plan.output.shape)), np.int64)]
    for number, (nest, edges) in enumerate(nests):
        points = sample_points(nest, edges, seed + number, -(-count // len(nests)))
        found.append(output_index(nest, points))
    return np.unique(np.concatenate(found), axis=0)


def spatial_points(nest: Nest, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of spatial points that write the rows of `index`, and which of them are written at all.

    Writes are injective with strides that each clear what the smaller ones reach (`check_output`
    of `looptune.ir`), so the largest stride first, division gives back the point.
    """
    axes, output = list(nest.spatial), nest.output
    rest = index @ np.array(output.strides, np.int64) - output.base
    points = np.zeros((len(index), len(axes)), np.int64)
    extents = [nest.axes[a].extent for a in axes]
    moves = [(output.stride_of(a), extents[place], place) for place, a in enumerate(axes)]
    rest = rest - sum(stride * (extent - 1) for stride, extent, _ in moves if stride < 0)
    for stride, extent, place in sorted(moves, key=lambda move: -abs(move[0])):
        if extent > 1:
            steps, rest = np.divmod(rest, abs(stride))
            points[:, place] = np.clip(steps if stride > 0 else extent - 1 - steps, 0, extent - 1)
    same = (output_index(nest, points) == index).all(axis=1)
    return points, same & all(extents)


def sampled_reference(problem: Plan | Nest, arrays: Arrays, index: np.ndarray) -> np.ndarray:
    """The plan's output in float64 at the rows of `index`; temporaries are computed whole."""
    plan = plan_of(problem) if isinstance(problem, Nest) else problem
    return evaluate_at(plan, float64_arrays(plan, arrays), index)


def evaluate_at(
    plan: Plan, known: dict[str, np.ndarray], index: np.ndarray, sizes: bool = False
) -> np.ndarray:
    """`evaluate` at the rows of `index` only; whole if a nest reads the output back."""
    name, where = plan.output.name, tuple(index.T)
    reads = (operand for nest in plan.nests for operand in (*nest.inputs, *nest.extras))
    if any(operand.name == name for operand in reads):
        return np.broadcast_to(evaluate(plan, known, sizes)[where], len(index))
    values = np.array(np.broadcast_to(known[name][where], len(index)))
    with np.errstate(all="ignore"):
        for nest in plan.nests:
            if nest.output.name != name:
                whole = reduce_nest(nest, known)
                write(nest, target(plan, nest, known), whole, known, sizes)
                continue
            points, hit = spatial_points(nest, index)
            if hit.any():
                new = at_points(nest, known, points[hit])
                total = combine(nest, values[hit], new) if nest.accumulate else new
                values[hit] = finished(nest, total, known, points[hit], sizes)
    return values


def expectation(plan: Plan, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The plan's whole output, and what its errors scale with: for `compare`, again and again."""
    known = float64_arrays(plan, arrays)
    sizes = absolute(plan, known)
    return evaluate(plan, known), evaluate(*sizes, True)


def check(
    problem: Plan | Nest,
    arrays: Arrays,
    result: np.ndarray,
    *,
    boundaries: Sequence[Boundaries] | None = None,
    seed: int = 0,
) -> Check:
    """Compare a result with the reference, whole where cheap, else at sampled points.

    The points are at least 4,096 seeded ones, shared among the nests that write the output, and
    both sides of every boundary, given one mapping a nest. Raises `ArgumentError` for arrays
    that are missing or of another shape.
    """
    plan = plan_of(problem) if isinstance(problem, Nest) else problem
    found = np.asarray(result, np.float64)
    check_shape(plan.output.name, found, plan.output.shape)
    known = float64_arrays(plan, arrays)
    sizes = absolute(plan, known)
    if whole_is_cheap(plan):
        return compare(plan, found, evaluate(plan, known), evaluate(*sizes, True))
    index = output_points(plan, boundaries or [{}] * len(plan.nests), seed)
    at = np.broadcast_to(found[tuple(index.T)], len(index))
    magnitude = evaluate_at(*sizes, index, True)
    checked = compare(plan, at, evaluate_at(plan, known, index), magnitude)
    where = index[checked.where[0]] if checked.points else ()
    return replace(checked, where=tuple(int(i) for i in where))


def output_index(nest: Nest, points: np.ndarray) -> np.ndarray:
    """Indices of the output elements that rows of spatial points write, one a row."""
    dims, axes = nest.output.dims, nest.spatial
    matrix = np.array([[dim.coefficients[a] for dim in dims] for a in axes], np.int64)
    offsets = np.array([dim.offset for dim in dims], np.int64)
    return points @ matrix.reshape(len(axes), len(dims)) + offsets


def verify(
    problem: Plan | Nest,
    arrays: Arrays,
    result: np.ndarray,
    *,
    boundaries: Sequence[Boundaries] | None = None,
    seed: int = 0,
) -> Check:
    """`check`, raising `VerificationError` with the worst element."""
    return insist(check(problem, arrays, result, boundaries=boundaries, seed=seed))


def insist(found: Check) -> Check:
    """`found` if it is good; raises `VerificationError` with the worst element."""
    if not found.ok:
        raise VerificationError(
            f"element {list(found.where)} is {found.found!r}, the reference is "
            f"{found.expected!r}: {found.worst:.3g} times the error bound"
        )
    return found
