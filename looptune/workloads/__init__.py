"""Problems by name: each constructor returns a `Plan`.

looptune.workloads.matmul(256, 256, 256)
looptune.workloads.conv2d((1, 64, 56, 56), (64, 64, 3, 3), padding=1)
looptune.workloads.einsum("bmk,bkn->bmn", (8, 64, 32), (8, 32, 48))
"""

from looptune.workloads.conv import conv1d, conv2d, conv3d
from looptune.workloads.einsum import einsum
from looptune.workloads.epilogue import fuse
from looptune.workloads.matmul import batched_matmul, dot, gemv, matmul, outer
from looptune.workloads.transposed import (
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)

__all__ = [
    "batched_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "dot",
    "einsum",
    "fuse",
    "gemv",
    "matmul",
    "outer",
]
