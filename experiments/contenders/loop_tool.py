"""loop_tool's C++ backend, on the loop tree that it makes by itself."""

from __future__ import annotations

import time

import numpy as np

from experiments.contenders import Built, Contender, Problem
from looptune.errors import UnsupportedError
from looptune.interop import contraction
from looptune.measure import python_sampler


def build(contender: Contender, problem: Problem) -> Built:
    """The tensor of a contraction, compiled; a call computes it anew."""
    if contender.way != "default" or contender.budget is not None:
        raise UnsupportedError(f"{contender}: loop_tool has one way, loop_tool/default")
    import loop_tool

    loop_tool.set_default_backend("cpp")
    start = time.perf_counter()
    inputs = [problem.arrays[tensor.name] for tensor in problem.plan.inputs]
    tensor = contraction(problem.plan.spec, *inputs)
    tensor.compile()
    tune_s = time.perf_counter() - start

    def call() -> None:
        tensor.force_recompute()
        tensor.resolve()

    def result() -> np.ndarray:
        call()
        return np.asarray(tensor.numpy())

    return Built(python_sampler(call), result, tune_s, "its own loop tree")
