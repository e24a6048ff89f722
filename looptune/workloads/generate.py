"""Random problems of the kinds that users run, to train on: none of them is a test.

Sizes are drawn evenly over their logarithms, rounded to what networks use or left as they fall.
What a draw must not be, says `looptune.workloads.held_out`; it is drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from looptune.ir import Nest, Plan
from looptune.workloads.conv import conv1d, conv2d, conv3d
from looptune.workloads.einsum import einsum
from looptune.workloads.epilogue import fuse
from looptune.workloads.held_out import is_held_out
from looptune.workloads.matmul import batched_matmul, matmul

LEAST_POINTS, MOST_POINTS = 1 << 11, 1 << 27  # some 0.2 us to 4 ms of multiply-adds on one core
MOST_BYTES = 64 << 20
ROUNDINGS = (1, 1, 2, 4, 8, 16)
FLOAT64, FUSED = 0.1, 0.15  # how often


def size(rng: np.random.Generator, low: int, high: int) -> int:
    """An extent between two bounds, a multiple of something as often as not."""
    unit = int(rng.choice([u for u in ROUNDINGS if u <= low] or [1]))
    found = math.exp(rng.uniform(math.log(low), math.log(high + 1)))
    return min(high, max(low, unit * round(found / unit)))


def paper_matmul(rng: np.random.Generator, dtype: str) -> Plan:
    """One of LoopTune's 2,197: extents 64 to 256 in steps of 16."""
    m, n, k = (int(16 * rng.integers(4, 17)) for _ in range(3))
    return matmul(m, n, k, dtype=dtype)


def any_matmul(rng: np.random.Generator, dtype: str) -> Plan:
    """Extents from 1 to 4,096, transposed operands among them; skinny ones one time in three."""
    sizes = [size(rng, 8, 1024) for _ in range(3)]
    if rng.random() < 1 / 3:
        sizes[int(rng.integers(3))] = size(rng, 1, 16)
    if rng.random() < 1 / 6:
        sizes[int(rng.integers(3))] = size(rng, 1024, 4096)
    first, second = (bool(flag) for flag in rng.integers(2, size=2))
    return matmul(*sizes, trans_a=first, trans_b=second, dtype=dtype)


def any_batched(rng: np.random.Generator, dtype: str) -> Plan:
    """Stacks of small and middling matmuls."""
    sizes = [size(rng, 4, 512) for _ in range(3)]
    first, second = (bool(flag) for flag in rng.integers(2, size=2))
    count = size(rng, 2, 256)
    return batched_matmul(count, *sizes, trans_a=first, trans_b=second, dtype=dtype)


def any_contraction(rng: np.random.Generator, dtype: str) -> Plan:
    """Two tensors of up to four dimensions each, all dimensions in any order."""
    shared, left, right = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    letters = "abcdefgh"[: shared + left + right]
    reduced, first, second = letters[:shared], letters[shared:][:left], letters[shared + left :]
    words = [reduced + first, reduced + second, first + second]
    a, b, out = ("".join(rng.permutation(list(word))) for word in words)
    sizes = {letter: size(rng, 4, 64) for letter in letters}
    return einsum(f"{a},{b}->{out}", sizes=sizes, dtype=dtype)


def image_shape(layout: str, batch: int, channels: int, extent: int) -> tuple[int, ...]:
    """A square image in a layout."""
    image = (extent, extent)
    return (batch, channels, *image) if layout == "NCHW" else (batch, *image, channels)


def any_conv2d(rng: np.random.Generator, dtype: str) -> Plan:
    """Images of networks: kernels 1 to 7, strided, dilated and grouped ones, both layouts."""
    kernel = int(rng.choice([1, 1, 3, 3, 3, 5, 7]))
    stride, image = int(rng.choice([1, 1, 2])), size(rng, 7, 112)
    groups = int(rng.choice([1, 1, 1, 1, 2, 4, 32]))
    channels, filters = (groups * size(rng, 3, 512 // groups) for _ in range(2))
    if groups == 1 and rng.random() < 1 / 6:  # the first layer of a network
        channels, filters = int(rng.choice([1, 3, 3, 4])), size(rng, 8, 64)
        stride, image = int(rng.choice([1, 2, 2, 4])), size(rng, 28, 224)
    dilation = int(rng.choice([1, 1, 1, 1, 2])) if kernel > 1 else 1
    layout = str(rng.choice(["NCHW", "NHWC"]))
    batch = int(rng.choice([1, 1, 1, 2, 4]))
    x = image_shape(layout, batch, channels, image)
    return conv2d(
        x, (filters, channels // groups, kernel, kernel), stride=stride,
        padding=dilation * (kernel // 2), dilation=dilation, groups=groups, layout=layout,
        dtype=dtype,
    )  # fmt: skip


def any_depthwise(rng: np.random.Generator, dtype: str) -> Plan:
    """One filter a channel."""
    kernel, channels, image = int(rng.choice([3, 3, 5, 7])), size(rng, 8, 512), size(rng, 7, 112)
    layout = str(rng.choice(["NCHW", "NHWC"]))
    x = image_shape(layout, 1, channels, image)
    return conv2d(
        x, (channels, 1, kernel, kernel), stride=int(rng.choice([1, 2])), padding=kernel // 2,
        groups=channels, layout=layout, dtype=dtype,
    )  # fmt: skip


def any_sequence(rng: np.random.Generator, dtype: str) -> Plan:
    """Convolutions over one dimension, and sometimes three."""
    if rng.random() < 0.3:
        kernel, channels = int(rng.choice([1, 3])), size(rng, 3, 64)
        image = tuple(size(rng, 4, 28) for _ in range(3))
        filters = (size(rng, 4, 64), channels, kernel, kernel, kernel)
        return conv3d((1, channels, *image), filters, padding=kernel // 2, dtype=dtype)
    kernel, channels = int(rng.choice([1, 2, 3, 5, 10])), size(rng, 8, 512)
    weights = (size(rng, 8, 512), channels, kernel)
    stride = int(rng.choice([1, 2]))
    x = (1, channels, size(rng, 16, 4096))
    return conv1d(x, weights, stride=stride, padding=kernel // 2, dtype=dtype)


FAMILIES: dict[str, tuple[float, Callable[[np.random.Generator, str], Plan]]] = {
    "paper-matmul": (0.10, paper_matmul),
    "matmul": (0.22, any_matmul),
    "batched": (0.10, any_batched),
    "contraction": (0.20, any_contraction),
    "conv2d": (0.24, any_conv2d),
    "depthwise": (0.07, any_depthwise),
    "sequence": (0.07, any_sequence),
}


def draw(rng: np.random.Generator, family: str | None = None) -> Nest:
    """A problem of a family, or of one drawn by weight, that is not held out."""
    names = list(FAMILIES)
    weights = np.array([weight for weight, _ in FAMILIES.values()])
    while True:
        name = family or str(rng.choice(names, p=weights / weights.sum()))
        dtype = "float64" if rng.random() < FLOAT64 else "float32"
        plan = FAMILIES[name][1](rng, dtype)
        if rng.random() < FUSED:
            plan = fuse(plan, str(rng.choice(["relu", "bias,relu", "bias"])))
        (nest,) = plan.nests
        fits = LEAST_POINTS <= nest.points <= MOST_POINTS and nest.min_bytes <= MOST_BYTES
        if fits and not is_held_out(nest):
            return nest
