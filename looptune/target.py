"""What code is generated for: frozen data about a machine, never a question to the host.

Everything the lowering decides, it decides from a `Target`; so Programs for any target can be
made, read and interpreted on any machine. `looptune.host` says which targets run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from looptune.dtypes import ITEM_BYTES, DType
from looptune.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Target:
    """A vector machine. Bytes are bytes, cycles are cycles of one core.

    `dot`: products of pairs of int16 are added to a sum by one instruction (VNNI).
    `temporaries` vector registers are kept for operands; the rest may hold accumulators.
    `masks`: partial loads and stores at the price of full ones. `fold`: an FMA may read one
    operand from memory; `fold_splat`: it may broadcast it, too.
    """

    name: str
    isa: str
    vector_bytes: int
    vector_registers: int
    temporaries: int = 4
    fma: Literal["fused", "relaxed", "none"] = "fused"
    masks: bool = False
    fold: bool = True
    fold_splat: bool = False
    dot: bool = False
    max_displacement: int = 2**31 - 1
    fma_per_cycle: int = 2
    fma_latency: int = 4
    loads_per_cycle: int = 2
    cache_bytes: tuple[int, int, int] = (32 << 10, 1 << 20, 32 << 20)
    code_instructions: int = 1500
    unroll: int = 160

    def lanes(self, dtype: DType) -> int:
        """Elements of `dtype` in one vector register."""
        return self.vector_bytes // ITEM_BYTES[dtype]

    @property
    def accumulators(self) -> int:
        """Vector registers that may hold output elements."""
        return self.vector_registers - self.temporaries


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("avx2", "avx2", vector_bytes=32, vector_registers=16),
        Target(
            "avx512", "avx512", vector_bytes=64, vector_registers=32, masks=True, fold_splat=True
        ),
        Target("xmm", "avx2", vector_bytes=16, vector_registers=16),
    )
}


def target_named(name: str) -> Target:
    """The target called `name`; raises `UnsupportedError` with the list."""
    try:
        return TARGETS[name]
    except KeyError:
        raise UnsupportedError(f"target {name!r} is none of {sorted(TARGETS)}") from None
