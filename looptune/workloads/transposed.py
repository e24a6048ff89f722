"""Transposed convolutions as plans: one nest per phase of the stride, with torch's names.

Each nest writes every stride-th element of the result, and reads the taps that reach it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from looptune.errors import SpecError
from looptune.ir import Nest, Plan, Tensor
from looptune.workloads.conv import (
    SPATIAL,
    TAPS,
    Access,
    Geometry,
    Numbers,
    Options,
    Place,
    check_groups,
    conv_tensors,
    in_layout,
    numbers,
    ordered_axes,
    shapes_of,
    split_shape,
)
from looptune.workloads.einsum import Shape, check_dtype, result_dtype


class TransposeOptions(Options, total=False):
    """`padding` crops the result, `output_padding` extends its end, as in torch."""

    padding: Numbers
    output_padding: Numbers


def conv_transpose1d(x_shape: Shape, w_shape: Shape, **options: Unpack[TransposeOptions]) -> Plan:
    """`conv_transpose2d` over one dimension."""
    return transposed(1, x_shape, w_shape, **options)


def conv_transpose2d(x_shape: Shape, w_shape: Shape, **options: Unpack[TransposeOptions]) -> Plan:
    """`torch.nn.functional.conv_transpose2d`; `w_shape` is (in, out / groups, height, width).

    Options as for `conv2d`, and `output_padding`.
    """
    return transposed(2, x_shape, w_shape, **options)


def conv_transpose3d(x_shape: Shape, w_shape: Shape, **options: Unpack[TransposeOptions]) -> Plan:
    """`conv_transpose2d` over three dimensions."""
    return transposed(3, x_shape, w_shape, **options)


def transposed(
    rank: int,
    x_shape: Shape,
    w_shape: Shape,
    *,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    layout: str | None = None,
    dtype: str = "float32",
    strides: Sequence[Shape | None] | None = None,
    out_strides: Shape | None = None,
    out_dtype: str | None = None,
) -> Plan:
    """The plan of a transposed convolution over `rank` dimensions."""
    kind = check_dtype(dtype)
    x_shape, w_shape, last = shapes_of(rank, x_shape, w_shape, layout)
    batch, channels, image = split_shape(x_shape, last)
    inputs, per_group, kernel = split_shape(w_shape, False)
    count = check_groups(groups, channels)
    if inputs != channels:
        raise SpecError(f"w has {inputs} input channels; x has {channels}")
    steps, spread = numbers("stride", stride, rank, 1), numbers("dilation", dilation, rank, 1)
    crop = numbers("padding", padding, rank, 0)
    extra = numbers("output_padding", output_padding, rank, 0)
    result = []
    for dim in range(rank):
        if extra[dim] >= max(steps[dim], spread[dim]):
            raise SpecError(
                f"output_padding={extra[dim]} must be below stride {steps[dim]} or "
                f"dilation {spread[dim]}"
            )
        reach = spread[dim] * (kernel[dim] - 1) + 1
        size = (image[dim] - 1) * steps[dim] - 2 * crop[dim] + reach + extra[dim]
        if min(size, kernel[dim], image[dim]) < 1:
            raise SpecError(
                f"dimension {SPATIAL[rank - 1][dim]} of the result would have size {size}, "
                f"from {image[dim]} elements and a kernel of {kernel[dim]}; at least 1 would do"
            )
        result.append(size)
    shape = Geometry(
        batch, count, channels, per_group * count, image, kernel, tuple(result), steps, spread,
        crop, last,
    )  # fmt: skip
    written = result_dtype(kind, out_dtype)
    tensors = conv_tensors(shape, x_shape, w_shape, (kind, written), strides, out_strides)
    phases = (dim_phases(shape, dim) for dim in range(rank))
    nests = tuple(phase_nest(shape, combo, *tensors) for combo in itertools.product(*phases))
    return Plan(nests, tensors[:2], tensors[2], channel=-1 if last else 1)


@dataclass(frozen=True)
class Phase:
    """Output elements `first`, first + stride, ... (`count` of them) of one dimension.

    Element number i gets taps `tap`, tap + `tap_step`, ... (`taps` of them), tap number t
    reading x at `start + i - t * back`.
    """

    first: int
    count: int
    tap: int
    tap_step: int
    taps: int
    start: int
    back: int


def dim_phases(shape: Geometry, dim: int) -> list[Phase]:
    """The phases of one dimension that have elements.

    Output i gets x[j] * w[r] where i + crop = stride * j + dilation * r: for a phase of i the
    taps r that make it solvable are every (stride / gcd)-th one.
    """
    step, spread, kernel = shape.stride[dim], shape.dilation[dim], shape.kernel[dim]
    crop, size = shape.pads[dim], shape.result[dim]
    found = []
    for first in range(min(step, size)):
        fitting = [r for r in range(kernel) if (first + crop - spread * r) % step == 0]
        count = -(-(size - first) // step)
        if not fitting:
            found.append(Phase(first, count, 0, 1, 0, 0, 0))
            continue
        tap_step = fitting[1] - fitting[0] if len(fitting) > 1 else 1
        start = (first + crop - spread * fitting[0]) // step
        back = spread * tap_step // step if len(fitting) > 1 else 0
        found.append(Phase(first, count, fitting[0], tap_step, len(fitting), start, back))
    return found


def phase_nest(shape: Geometry, phases: Sequence[Phase], x: Tensor, w: Tensor, out: Tensor) -> Nest:
    """The nest of one phase in every dimension; without taps, its sum is empty."""
    axes = ordered_axes(shape, tuple(p.count for p in phases), tuple(p.taps for p in phases))
    access = Access(axes)
    names, taps = SPATIAL[shape.rank - 1], TAPS[shape.rank - 1]
    per_group, filters = shape.channels // shape.groups, shape.filters // shape.groups
    reads = [
        (p.start, {name: 1, tap: -p.back}) for p, name, tap in zip(phases, names, taps, strict=True)
    ]
    image = in_layout(shape, (0, {"g": per_group, "c": 1}), reads)
    weights: list[Place] = [(0, {"g": per_group, "c": 1}), (0, {"o": 1})]
    weights += [(p.tap, {tap: p.tap_step}) for p, tap in zip(phases, taps, strict=True)]
    strided = [
        (p.first, {name: step}) for p, name, step in zip(phases, names, shape.stride, strict=True)
    ]
    written = in_layout(shape, (0, {"g": filters, "o": 1}), strided)
    return Nest(
        axes,
        access.operand(out, written),
        (access.operand(x, image), access.operand(w, weights)),
    )
