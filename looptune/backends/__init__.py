"""Machine code from legalized Programs: one function a backend, each behind a loader.

A backend decides nothing: it encodes what `looptune.legalize` left. Loaders keep
`import looptune` free of encoders.
"""

from __future__ import annotations

from collections.abc import Callable

from looptune.errors import UnsupportedError
from looptune.program import Program
from looptune.target import Target

Backend = Callable[[Program], bytes]


def x86() -> Backend:
    """AVX2 with FMA, in 256 or 128 bits, and AVX-512."""
    from looptune.backends.x86 import emit

    return emit


BACKENDS: dict[str, Callable[[], Backend]] = {"x86": x86}
BACKEND_OF_ISA = {"avx2": "x86", "avx512": "x86"}


def backend_for(target: Target) -> Backend:
    """The backend that encodes for `target`; raises `UnsupportedError` where there is none."""
    name = BACKEND_OF_ISA.get(target.isa)
    if name is None:
        raise UnsupportedError(
            f"target {target.name} has instruction set {target.isa!r}; "
            f"backends encode {sorted(BACKEND_OF_ISA)}"
        )
    return BACKENDS[name]()


def disassemble(code: bytes) -> str:
    """Assembly text of a kernel, one line an instruction: offset, then Intel syntax.

    The constants behind the code are counted, not shown.
    """
    from looptune.backends.x86_encode import listing

    return listing(code)
