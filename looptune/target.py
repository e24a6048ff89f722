"""What code is generated for: frozen data about a machine, never a question to the host.

Everything the lowering decides, it decides from a `Target`; so Programs for any target can be
made, read and interpreted on any machine. `looptune.host` says which targets run here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from looptune.dtypes import ITEM_BYTES, DType
from looptune.errors import ArgumentError, UnsupportedError

LEAST = {
    "vector_bytes": 8, "vector_registers": 1, "temporaries": 0, "max_displacement": 0,
    "fma_per_cycle": 1, "fma_latency": 1, "loads_per_cycle": 1, "code_instructions": 1, "unroll": 1,
}  # fmt: skip


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

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.vector_bytes & (self.vector_bytes - 1):
            raise ArgumentError(
                f"target {self.name}: vector_bytes={self.vector_bytes}; a power of two would do"
            )
        if self.accumulators < 1:
            raise ArgumentError(
                f"target {self.name}: {self.vector_registers} registers, {self.temporaries} of "
                "them temporaries: one at least must be left"
            )

    def lanes(self, dtype: DType) -> int:
        """Elements of `dtype` in one vector register."""
        return self.vector_bytes // ITEM_BYTES[dtype]

    @property
    def accumulators(self) -> int:
        """Vector registers that may hold output elements."""
        return self.vector_registers - self.temporaries


def check_kinds(target: Target) -> None:
    """Raise `ArgumentError` unless every field is of its kind, and no number too small."""

    def least(value: object, number: int) -> bool:
        return type(value) is int and value >= number

    sizes = target.cache_bytes
    three = type(sizes) is tuple and len(sizes) == 3 and all(least(size, 1) for size in sizes)
    given = {each.name: getattr(target, each.name) for each in fields(target)}
    texts, flags = ("name", "isa"), ("masks", "fold", "fold_splat", "dot")
    found = [
        *((name, isinstance(given[name], str), "a text") for name in texts),
        *((name, isinstance(given[name], bool), "True or False") for name in flags),
        *((name, least(given[name], n), f"a whole number from {n}") for name, n in LEAST.items()),
        ("fma", target.fma in ("fused", "relaxed", "none"), "'fused', 'relaxed' or 'none'"),
        ("cache_bytes", three, "a tuple of three sizes"),
    ]
    for name, right, wanted in found:
        if not right:
            raise ArgumentError(f"target: {name}={given[name]!r:.80}; {wanted} would do")


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
    except (KeyError, TypeError):
        raise UnsupportedError(f"target {name!r} is none of {sorted(TARGETS)}") from None
