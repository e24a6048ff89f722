"""Who is compared: one small adapter a library, each contender in a process of its own.

A contender's name is `library/way` or `library/way@budget`; `default` may be left out:

| name | what it is |
|---|---|
| `looptune/default`, `looptune/policy`, `looptune/evolution@1` | a strategy and its seconds |
| `looptune/untuned`, `looptune/6x2v` | the nest as written; a tile of six rows by two vectors |
| `numpy`, `torch`, `torch/channels-last` | `matmul` or `einsum` into an array; a convolution |
| `tvm` | the compute definition, compiled without a schedule |
| `tvm/metaschedule@64` | MetaSchedule's best of so many trials |
| `loop_tool` | its C++ backend, on its own loop tree |
| `gcc`, `llvmlite` | the default schedule's loops as C and as LLVM IR, at -O3 |

looptune never uses a database here. TVM has no AutoTVM since 0.20, so there is no adapter for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

import numpy as np

from looptune.errors import ArgumentError
from looptune.host import host_target
from looptune.ir import Plan
from looptune.measure import Sampler, random_arrays
from looptune.target import Target
from looptune.workloads.suites import Workload

ADAPTERS = {
    "looptune": "ours", "numpy": "peers", "torch": "peers", "tvm": "tvm", "loop_tool": "loop_tool",
    "gcc": "loops", "llvmlite": "loops",
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A library, the way it is used, and what that may spend (seconds, or trials)."""

    library: str
    way: str = "default"
    budget: float | None = None

    def __str__(self) -> str:
        return f"{self.library}/{self.way}" + ("" if self.budget is None else f"@{self.budget:g}")


@dataclass(frozen=True)
class Problem:
    """What is to be computed, on operands that are equal for every contender."""

    workload: Workload
    threads: int = 1
    isa: str | None = None
    seed: int = 0

    @cached_property
    def plan(self) -> Plan:
        """The workload's plan."""
        return self.workload.plan()

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Operands by name, the output among them, drawn from `seed`."""
        return random_arrays(self.plan, self.seed)

    @property
    def target(self) -> Target:
        """This machine, or the instruction set asked for."""
        return host_target(self.isa)


@dataclass(frozen=True)
class Built:
    """What a contender made: `sample` times so many calls, `result` computes once; `tune_s` are
    the seconds from the problem to something callable, imports excepted."""

    sample: Sampler
    result: Callable[[], np.ndarray]
    tune_s: float
    note: str = ""


def contender_named(name: str) -> Contender:
    """The contender of a name; raises `ArgumentError` for an unknown library or a bad budget."""
    head, _, budget = name.partition("@")
    library, _, way = head.partition("/")
    if library not in ADAPTERS:
        raise ArgumentError(f"contender {name!r}: no library {library!r}; {list(ADAPTERS)} are")
    try:
        return Contender(library, way or "default", float(budget) if budget else None)
    except ValueError:
        raise ArgumentError(f"contender {name!r}: budget {budget!r}; a number would do") from None


def build(contender: Contender, problem: Problem) -> Built:
    """Have the contender's adapter make a kernel.

    Raises `UnsupportedError` for what a library cannot compute, `ImportError` where it is absent,
    and whatever the library itself raises.
    """
    adapter = import_module(f"experiments.contenders.{ADAPTERS[contender.library]}")
    problem.arrays  # noqa: B018, so that nobody's tuning pays for drawing them
    found: Built = adapter.build(contender, problem)
    return found
