"""What several test files build: small nests, a record, a policy of random weights."""

from __future__ import annotations

import numpy as np

from looptune.construct import TABLE
from looptune.database import Record, key_of
from looptune.ir import Axis, Dim, Nest, Operand
from looptune.models.architecture import Architecture
from looptune.models.gain import GainModel
from looptune.models.gain import shapes as gain_shapes
from looptune.models.inference import Policy
from looptune.schedule import parse_order
from looptune.target import TARGETS
from looptune.workloads import matmul


def nest_of(spec: str, dtype: str = "float32", **sizes: int) -> Nest:
    """`nest_of("mk,kn->mn", m=2, k=3, n=4)`: axes in the order of `sizes`, row-major tensors."""
    reads, out = spec.split("->")
    names = list(sizes)

    def operand(name: str, labels: str) -> Operand:
        dims, stride = [], 1
        for label in reversed(labels):
            unit = tuple(int(label == other) for other in names)
            dims.append(Dim(sizes[label], stride, unit))
            stride *= sizes[label]
        return Operand(name, dtype, tuple(reversed(dims)))  # type: ignore[arg-type]

    axes = tuple(Axis(name, n, name not in out) for name, n in sizes.items())
    inputs = tuple(operand("ab"[i], labels) for i, labels in enumerate(reads.split(",")))
    return Nest(axes, operand("out", out), inputs)


def conv(channels: int, size: int, filters: int) -> Nest:
    """A 3x3 convolution over a padded image, axes o h c r s w."""
    axes = tuple(
        Axis(name, n, name in "crs")
        for name, n in zip("ohcrsw", (filters, size, channels, 3, 3, size), strict=True)
    )
    wide = size + 2
    image = Operand(
        "x",
        "float32",
        (
            Dim(channels, wide * wide, (0, 0, 1, 0, 0, 0)),
            Dim(wide, wide, (0, 1, 0, 1, 0, 0)),
            Dim(wide, 1, (0, 0, 0, 0, 1, 1)),
        ),
    )
    weights = Operand(
        "w",
        "float32",
        (
            Dim(filters, channels * 9, (1, 0, 0, 0, 0, 0)),
            Dim(channels, 9, (0, 0, 1, 0, 0, 0)),
            Dim(3, 3, (0, 0, 0, 1, 0, 0)),
            Dim(3, 1, (0, 0, 0, 0, 1, 0)),
        ),
    )
    out = Operand(
        "out",
        "float32",
        (
            Dim(filters, size * size, (1, 0, 0, 0, 0, 0)),
            Dim(size, size, (0, 1, 0, 0, 0, 0)),
            Dim(size, 1, (0, 0, 0, 0, 0, 1)),
        ),
    )
    return Nest(axes, out, (image, weights))


EXAMPLES = {
    "matmul": (nest_of("mk,kn->mn", m=20, k=50, n=40), "m:6 n:16 k m n"),
    "matmul_unrolled_by_4": (nest_of("mk,kn->mn", m=20, k=50, n=40), "m:6 n:16 k:4 k m n"),
    "untuned": (nest_of("mk,kn->mn", m=64, k=64, n=256), "m k n"),
    "split_reduction": (nest_of("mk,kn->mn", m=12, k=64, n=16), "k:16 m:6 k m n"),
    "conv": (conv(8, 20, 8), "h o:4 c r s o w"),
    "dot": (nest_of("k,k->", k=1003), "k:64 k"),
    "gemv_row_major": (nest_of("mk,k->m", m=20, k=100), "m:8 k:8 m k"),
    "gemv_column_major": (nest_of("km,k->m", m=200, k=30), "m:96 k m"),
    "depthwise": (nest_of("chw,c->chw", c=3, h=4, w=20), "c h w"),
    "outer": (nest_of("m,n->mn", m=3, n=100), "m n:64 n"),
    "batch_innermost": (nest_of("mkb,knb->mnb", m=8, n=8, k=8, b=32), "m:3 n:4 b:8 k m n b"),
    "batch_outermost": (nest_of("bmk,bkn->bmn", b=5, m=8, k=8, n=8), "b k m n"),
}


TUNED = parse_order(matmul(48, 64, 32).nests[0], "m:6 n:16 k m n", "n")
RECORD = Record(key_of(TUNED.nest, TARGETS["avx2"], 1), TUNED.identity, TUNED.actions,
                15, 0.1, 0.0004, 1.0)  # fmt: skip


def policy(gain: float | None = None, seed: int = 0) -> Policy:
    """A random network; beside it a gain model that expects the same of everything."""
    rng = np.random.default_rng(seed)
    architecture = Architecture(TABLE, 8, 1)
    arrays = {
        name: rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in architecture.parameters.items()
    }
    if gain is None:
        return Policy(architecture, arrays)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in gain_shapes().items()}
    zeros |= {"scale": zeros["scale"] + 1, "b3": zeros["b3"] + np.float32(gain)}
    return Policy(architecture, arrays, gain=GainModel(zeros))
