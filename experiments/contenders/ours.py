"""looptune: every strategy of `optimize` without a database, the untuned nest and fixed tiles."""

from __future__ import annotations

import re
import time

from experiments.contenders import Built, Contender, Problem
from looptune.build import build as compiled
from looptune.errors import UnsupportedError
from looptune.ir import Nest
from looptune.measure import python_sampler
from looptune.models.contenders import static_tile
from looptune.oracle import Oracle
from looptune.runtime.kernel import Kernel
from looptune.schedule import Schedule
from looptune.target import Target
from looptune.tune import optimize
from looptune.workloads import matmul

TILE = re.compile(r"([1-9]\d*)x([1-9]\d*)v")  # rows and vectors


def build(contender: Contender, problem: Problem) -> Built:
    """A kernel, called from Python as users call it."""
    warm_up(contender, problem)
    start = time.perf_counter()
    kernel = made(contender, problem)
    tune_s = time.perf_counter() - start
    plan, arrays = problem.plan, problem.arrays
    inputs, out = [arrays[tensor.name] for tensor in plan.inputs], arrays[plan.output.name]
    return Built(
        python_sampler(lambda: kernel(*inputs, out=out)),
        lambda: Oracle(plan, problem.seed).run(kernel),
        tune_s,
        "; ".join([kernel.origin, *(schedule.order for schedule in kernel.schedules)]),
    )


def made(contender: Contender, problem: Problem) -> Kernel:
    """The kernel of a strategy or of a fixed schedule."""
    plan, target = problem.plan, problem.target
    if contender.way != "untuned" and not TILE.fullmatch(contender.way):
        return optimize(
            plan, strategy=contender.way, budget=contender.budget, threads=problem.threads,
            target=target, database=None, verify=False, seed=problem.seed,
        )  # fmt: skip
    schedules = [fixed(contender.way, nest, target, problem.threads) for nest in plan.nests]
    found = [schedule for schedule in schedules if schedule is not None]
    if len(found) < len(schedules):
        raise UnsupportedError(f"{contender} is a tile for matmuls, not for {problem.workload.id}")
    return compiled(plan, found, target, threads=problem.threads)


def fixed(way: str, nest: Nest, target: Target, threads: int) -> Schedule | None:
    """The nest as written, or a static tile; None where a nest has none."""
    size = TILE.fullmatch(way)
    if size is None:
        return Schedule(nest)
    rows, vectors = map(int, size.groups())
    found: Schedule | None = static_tile(nest, target, rows, vectors, threads)
    return found


def warm_up(contender: Contender, problem: Problem) -> None:
    """Load the encoder, and a policy's weights: imports, which `tune_s` leaves out."""
    strategy = "policy" if contender.way == "policy" else "default"
    optimize(matmul(16, 16, 16), strategy=strategy, target=problem.target, database=None)
