"""Capsule convolutions: each channel is a small square matrix (Ansor's CAP workloads)."""

from __future__ import annotations

from looptune.errors import SpecError
from looptune.ir import Axis, Nest, Plan, Tensor, contiguous
from looptune.workloads.conv import Access, Numbers, Place, numbers, whole_number, whole_shape
from looptune.workloads.einsum import check_dtype, result_dtype


def capsule_conv2d(
    x_shape: tuple[int, int, int, int],
    w_shape: tuple[int, int, int],
    *,
    capsule: int,
    stride: Numbers = 1,
    padding: Numbers = 0,
    dtype: str = "float32",
) -> Plan:
    """A convolution of capsules: each channel is a small square matrix (Ansor's CAP workloads).

    `x_shape` is (batch, height, width, in), `w_shape` (height, width, out) of the kernel; x has
    shape (n, h, w, i, k, c) and w (r, q, k, j, c, o), with i, j and k of size `capsule`:
    out[n, h, w, i, j, o] = sum over r, q, k, c of x[n, h', w', i, k, c] * w[r, q, k, j, c, o].
    """
    kind = check_dtype(dtype)
    batch, height, width, channels = whole_shape("x", 4, x_shape)
    rows, columns, filters = whole_shape("w", 3, w_shape)
    size = whole_number("capsule", capsule, 1)
    steps, pads = numbers("stride", stride, 2, 1), numbers("padding", padding, 2, 0)
    sizes = [
        (n + 2 * pad - tap) // step + 1
        for n, tap, step, pad in zip((height, width), (rows, columns), steps, pads, strict=True)
    ]
    if min(sizes) < 1:
        raise SpecError(f"the kernel {rows}x{columns} is larger than the padded image")
    extents = {
        "n": batch, "h": sizes[0], "w": sizes[1], "i": size, "j": size,
        "r": rows, "q": columns, "k": size, "c": channels, "o": filters,
    }  # fmt: skip
    axes = tuple(Axis(name, extent, name in "rqkc") for name, extent in extents.items())
    shapes = {
        "x": (batch, height, width, size, size, channels),
        "w": (rows, columns, size, size, channels, filters),
        "out": (batch, *sizes, size, size, filters),
    }
    dtypes = {"out": result_dtype(kind, None)}
    tensors = [
        Tensor(name, dtypes.get(name, kind), shape, contiguous(shape))
        for name, shape in shapes.items()
    ]
    access = Access(axes)
    unit = {name: (0, {name: 1}) for name in extents}
    reads: list[Place] = [
        (-pads[0], {"h": steps[0], "r": 1}),
        (-pads[1], {"w": steps[1], "q": 1}),
    ]
    x = access.operand(tensors[0], [unit["n"], *reads, unit["i"], unit["k"], unit["c"]])
    w = access.operand(tensors[1], [unit[name] for name in "rqkjco"])
    out = access.operand(tensors[2], [unit[name] for name in "nhwijo"])
    return Plan((Nest(axes, out, (x, w)),), (tensors[0], tensors[1]), tensors[2])
