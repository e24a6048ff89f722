"""Whether a kernel is right: run on random operands, its output poisoned, against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from looptune.dtypes import poison
from looptune.errors import ReferenceMemoryError
from looptune.ir import Plan
from looptune.measure import random_arrays
from looptune.reference import Check, check, compare, expectation, insist, whole_is_cheap
from looptune.runtime.call import empty_output
from looptune.runtime.kernel import Kernel


class Oracle:
    """Verifies kernels of one plan; the reference's result is computed once where it is cheap.

    `arrays` are the operands, uniform in [-1, 1) or over all int8, drawn from `seed`. Raises
    `ReferenceMemoryError` where there is no room for them.
    """

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.seed = seed
        with room_for(plan):
            self.arrays = random_arrays(plan, seed)
            self.whole = expectation(plan, self.arrays) if whole_is_cheap(plan) else None

    def verify(self, kernel: Kernel) -> None:
        """Raise `VerificationError` unless the kernel's result is the reference's."""
        with room_for(self.plan):
            insist(self.checked(kernel, self.run(kernel)))

    def run(self, kernel: Kernel) -> np.ndarray:
        """What the kernel, called as users do, makes of a poisoned output."""
        out = empty_output(self.plan.output)
        given = self.arrays[self.plan.output.name]
        out[...] = given if self.plan.accumulates else poison(self.plan.dtype)
        kernel(*(self.arrays[tensor.name] for tensor in self.plan.inputs), out=out)
        return out

    def checked(self, kernel: Kernel, result: np.ndarray) -> Check:
        """The result against the reference; where that is sampled, at the kernel's boundaries."""
        if self.whole is not None:
            return compare(self.plan, np.asarray(result, np.float64), *self.whole)
        at = kernel.boundaries
        return check(self.plan, self.arrays, result, boundaries=at, seed=self.seed)


@contextmanager
def room_for(plan: Plan) -> Iterator[None]:
    """Say what a verification takes where memory for it is refused."""
    try:
        yield
    except MemoryError as reason:
        operands = sum(tensor.bytes for tensor in (plan.output, plan.output, *plan.inputs))
        doubles = 8 * max(math.prod(tensor.shape) for tensor in plan.tensors)
        raise ReferenceMemoryError(
            f"verification takes some {(operands + doubles) / 2**30:.1f} GiB, for random operands "
            f"and float64 references ({reason}); verify=False makes a kernel without it"
        ) from reason
