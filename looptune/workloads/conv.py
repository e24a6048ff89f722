"""Convolutions as plans, with torch's argument names and semantics.

out[n, o, i] = sum over c, r of x[n, c, stride * i + dilation * r - padding] * w[o, c, r], per
spatial dimension; what lies outside the image is 0. Axes are written n, (g), o, h, c, r, s, w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypedDict, Unpack

from looptune.dtypes import DType
from looptune.errors import NestError, SpecError, UnsupportedError
from looptune.ir import LARGEST, Axis, Dim, Nest, Operand, Plan, Tensor, contiguous
from looptune.workloads.einsum import Shape, check_dtype, result_dtype, whole_numbers

SPATIAL = ("w", "hw", "dhw")  # axis names by rank
TAPS = ("s", "rs", "trs")
LAYOUTS = (("NCL", "NLC"), ("NCHW", "NHWC"), ("NCDHW", "NDHWC"))

Numbers = int | Sequence[int]


class Options(TypedDict, total=False):
    """What every convolution takes; `strides` are of x and w, in elements."""

    stride: Numbers
    dilation: Numbers
    groups: int
    layout: str | None
    dtype: str
    strides: Sequence[Shape | None] | None
    out_strides: Shape | None
    out_dtype: str | None


class ConvOptions(Options, total=False):
    """`padding`: a number, one a dimension, (before, after) pairs, "same" or "valid"."""

    padding: object  # so many kinds that `pad_pairs` tells them apart


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution over `rank` dimensions; all tuples are per dimension.

    `pads` are before each dimension (a transposed convolution crops as much).
    """

    batch: int
    groups: int
    channels: int
    filters: int
    image: Shape
    kernel: Shape
    result: Shape
    stride: Shape
    dilation: Shape
    pads: Shape
    channels_last: bool

    @property
    def rank(self) -> int:
        """Spatial dimensions."""
        return len(self.image)


def conv1d(x_shape: Shape, w_shape: Shape, **options: Unpack[ConvOptions]) -> Plan:
    """`conv2d` over one dimension, layouts NCL and NLC."""
    return convolution(1, x_shape, w_shape, **options)


def conv2d(x_shape: Shape, w_shape: Shape, **options: Unpack[ConvOptions]) -> Plan:
    """`torch.nn.functional.conv2d` of x by w.

    `x_shape` is in `layout` (NCHW or NHWC), `w_shape` (out, in / groups, height, width). Options:
    `stride`, `padding` (a number, one a dimension, (before, after) pairs, "same" or "valid"),
    `dilation`, `groups`, `layout`, `dtype`, `strides` (of x and w, in elements), `out_strides`,
    `out_dtype` (as in `einsum`).
    Raises `SpecError` for sizes that do not fit, `UnsupportedError` for other dtypes.
    """
    return convolution(2, x_shape, w_shape, **options)


def conv3d(x_shape: Shape, w_shape: Shape, **options: Unpack[ConvOptions]) -> Plan:
    """`conv2d` over three dimensions, layouts NCDHW and NDHWC."""
    return convolution(3, x_shape, w_shape, **options)


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` as an int; raises `SpecError` unless it is whole (True is not) and large enough."""
    try:
        found = None if isinstance(value, bool) else index(value)
    except TypeError:
        found = None
    if found is None or not least <= found <= LARGEST:
        raise SpecError(f"{name}={value!r}: a whole number of at least {least} would do")
    return found


def numbers(name: str, value: Any, rank: int, least: int) -> Shape:
    """One whole number a dimension, from a number or a sequence; raises `SpecError`."""
    values = value if isinstance(value, Sequence) else (value,) * rank
    if isinstance(values, str) or len(values) not in (1, rank):
        raise SpecError(f"{name}={value!r}: a number or {rank} of them would do")
    return tuple(whole_number(name, number, least) for number in values) * (rank // len(values))


def pad_pairs(value: object, kernel: Shape, stride: Shape, dilation: Shape) -> tuple[Shape, Shape]:
    """Padding before and after each dimension."""
    rank = len(kernel)
    if isinstance(value, str) and value == "valid":
        return (0,) * rank, (0,) * rank
    if isinstance(value, str) and value == "same":
        if any(step != 1 for step in stride):
            raise SpecError(f"padding='same' needs a stride of 1, not {stride}, as in torch")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    if isinstance(value, Sequence) and not isinstance(value, str):
        pairs = [numbers("padding", pair, 2, 0) for pair in value if isinstance(pair, Sequence)]
        if pairs:
            if len(pairs) != rank or len(pairs) != len(value):
                raise SpecError(f"padding={value!r}: {rank} pairs (before, after) would do")
            return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    try:
        both = numbers("padding", value, rank, 0)
    except SpecError:
        raise SpecError(
            f"padding={value!r}: a number, {rank} of them, {rank} pairs (before, after), 'same' or "
            "'valid' would do"
        ) from None
    return both, both


def channels_last(rank: int, layout: str | None) -> bool:
    """Whether the layout ends in channels; raises `UnsupportedError` with those there are."""
    first, last = LAYOUTS[rank - 1]
    if layout not in (None, first, last):
        raise UnsupportedError(f"layout {layout!r} is not supported; {first!r} and {last!r} are")
    return layout == last


def whole_shape(name: str, rank: int, shape: Shape) -> Shape:
    """`shape` if it is of whole numbers, `rank` of them; raises `SpecError`."""
    found = whole_numbers(f"the shape of {name}", shape, 0)
    if len(found) != rank:
        raise SpecError(f"{name} has {len(found)} dimensions {found}; {rank} would do")
    return found


def split_shape(shape: Shape, last: bool) -> tuple[int, int, Shape]:
    """Batch, channels and image of a shape with channels last or second."""
    return (shape[0], shape[-1], shape[1:-1]) if last else (shape[0], shape[1], shape[2:])


def check_groups(groups: object, *channels: int) -> int:
    """`groups` if it divides every number of channels."""
    count = whole_number("groups", groups, 1)
    if any(channel % count for channel in channels):
        counts = " and ".join(map(str, channels))
        raise SpecError(f"groups={count} does not divide {counts} channels")
    return count


def shapes_of(
    rank: int, x_shape: Shape, w_shape: Shape, layout: str | None
) -> tuple[Shape, Shape, bool]:
    """Checked shapes of x and w, and whether the channels are last."""
    last = channels_last(rank, layout)
    return whole_shape("x", rank + 2, x_shape), whole_shape("w", rank + 2, w_shape), last


def convolution(
    rank: int,
    x_shape: Shape,
    w_shape: Shape,
    *,
    stride: Numbers = 1,
    padding: object = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    layout: str | None = None,
    dtype: str = "float32",
    strides: Sequence[Shape | None] | None = None,
    out_strides: Shape | None = None,
    out_dtype: str | None = None,
) -> Plan:
    """The plan of a convolution over `rank` dimensions."""
    kind = check_dtype(dtype)
    x_shape, w_shape, last = shapes_of(rank, x_shape, w_shape, layout)
    batch, channels, image = split_shape(x_shape, last)
    filters, depth, kernel = split_shape(w_shape, False)
    count = check_groups(groups, channels, filters)
    if depth * count != channels:
        raise SpecError(f"w has {depth} input channels a group; x has {channels} in {count} groups")
    steps, spread = numbers("stride", stride, rank, 1), numbers("dilation", dilation, rank, 1)
    before, after = pad_pairs(padding, kernel, steps, spread)
    result = []
    for dim in range(rank):
        reach = spread[dim] * (kernel[dim] - 1) + 1
        room = image[dim] + before[dim] + after[dim] - reach
        if room < 0 or kernel[dim] < 1:
            raise SpecError(
                f"the kernel reaches over {reach} elements of dimension {SPATIAL[rank - 1][dim]}, "
                f"padded to {image[dim] + before[dim] + after[dim]}"
            )
        result.append(room // steps[dim] + 1)
    shape = Geometry(
        batch, count, channels, filters, image, kernel, tuple(result), steps, spread, before, last
    )
    written = result_dtype(kind, out_dtype)
    channel = -1 if last else 1
    try:
        tensors = conv_tensors(shape, x_shape, w_shape, (kind, written), strides, out_strides)
        return Plan((direct_nest(shape, *tensors),), tensors[:2], tensors[2], channel=channel)
    except NestError as reason:
        raise SpecError(
            f"x of shape {x_shape} with padding={padding!r}, stride={stride!r}, "
            f"dilation={dilation!r}: {reason}"
        ) from reason


def conv_tensors(
    shape: Geometry,
    x_shape: Shape,
    w_shape: Shape,
    dtypes: tuple[DType, DType],
    strides: Sequence[Shape | None] | None,
    out_strides: Shape | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x and w, of the first of the dtypes, and out, of the second."""
    out = (shape.batch, shape.filters, *shape.result)
    if shape.channels_last:
        out = (shape.batch, *shape.result, shape.filters)
    layouts = (None, None) if strides is None else strides
    if not isinstance(layouts, Sequence) or len(layouts) != 2:
        raise SpecError(f"strides={strides!r}: those of x and those of w would do, None row-major")
    found = []
    for name, size, layout in zip(
        ("x", "w", "out"), (x_shape, w_shape, out), (*layouts, out_strides), strict=True
    ):
        steps = contiguous(size)
        if layout is not None:
            steps = whole_numbers(f"the strides of {name}", layout)
        if len(steps) != len(size):
            raise SpecError(f"{name} has {len(size)} dimensions and strides {layout}")
        found.append(Tensor(name, dtypes[name == "out"], size, steps))
    return found[0], found[1], found[2]


class Access:
    """Builds operands by axis name, for axes given once."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.number = {axis.name: i for i, axis in enumerate(axes)}

    def dim(self, size: int, stride: int, offset: int = 0, **coefficients: int) -> Dim:
        """A dimension; coefficients by axis name, those of absent axes are dropped."""
        found = [0] * len(self.number)
        for name, coefficient in coefficients.items():
            if name in self.number:
                found[self.number[name]] = coefficient
        return Dim(size, stride, tuple(found), offset)

    def operand(self, tensor: Tensor, places: Sequence[tuple[int, dict[str, int]]]) -> Operand:
        """An operand from one (offset, coefficients) a dimension."""
        dims = tuple(
            self.dim(size, stride, offset, **coefficients)
            for size, stride, (offset, coefficients) in zip(
                tensor.shape, tensor.strides, places, strict=True
            )
        )
        return Operand(tensor.name, tensor.dtype, dims)


Place = tuple[int, dict[str, int]]


def ordered_axes(shape: Geometry, extents: Shape, taps: Shape) -> tuple[Axis, ...]:
    """n, (g), o, the spatial axes but the last, c, the taps, the last spatial axis."""
    groups = [Axis("g", shape.groups)] * (shape.groups > 1)
    outer = [Axis("n", shape.batch), *groups, Axis("o", shape.filters // shape.groups)]
    space = [Axis(a, n) for a, n in zip(SPATIAL[shape.rank - 1], extents, strict=True)]
    inner = [Axis("c", shape.channels // shape.groups, True)]
    inner += [Axis(a, n, True) for a, n in zip(TAPS[shape.rank - 1], taps, strict=True)]
    return (*outer, *space[:-1], *inner, space[-1])


def in_layout(shape: Geometry, channel: Place, space: Sequence[Place]) -> list[Place]:
    """Places of batch, channel and spatial dimensions, in the layout's order."""
    batch: Place = (0, {"n": 1})
    return [batch, *space, channel] if shape.channels_last else [batch, channel, *space]


def direct_nest(shape: Geometry, x: Tensor, w: Tensor, out: Tensor) -> Nest:
    """The nest of a convolution."""
    axes = ordered_axes(shape, shape.result, shape.kernel)
    access = Access(axes)
    names, taps = SPATIAL[shape.rank - 1], TAPS[shape.rank - 1]
    per_group, filters = shape.channels // shape.groups, shape.filters // shape.groups
    reads = [
        (-shape.pads[d], {names[d]: shape.stride[d], taps[d]: shape.dilation[d]})
        for d in range(shape.rank)
    ]
    image = in_layout(shape, (0, {"g": per_group, "c": 1}), reads)
    weights = [(0, {"g": filters, "o": 1}), (0, {"c": 1}), *((0, {tap: 1}) for tap in taps)]
    written = in_layout(shape, (0, {"g": filters, "o": 1}), [(0, {name: 1}) for name in names])
    return Nest(
        axes,
        access.operand(out, written),
        (access.operand(x, image), access.operand(w, weights)),
    )
