"""How good a kernel is after so many seconds: every strategy, and MetaSchedule by trials.

python -m experiments.tuning_curve

Each budget is a run of its own from nothing, and all kernels of a workload are timed in turns at
the end: a point is what a user gets who stops there, not the luckiest sample of a search.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.header import command_of
from experiments.versus import (
    Job,
    Rows,
    compare,
    exit_code,
    keep,
    named,
    parser_of,
    rules_of,
    table,
)
from looptune.measure import geomean
from looptune.search import STRATEGIES
from looptune.workloads.suites import Workload, load

BUDGETS = (0.1, 0.3, 1.0, 3.0, 10.0)
TRIALS = (16, 64)
MATMULS = 5
CONVOLUTIONS = (
    "resnet18/layer2.0.conv1", "resnet18/layer3.0.downsample", "resnet18/layer4.0.conv2",
    "mobilenet_v2/block1.project", "mobilenet_v2/block6.dw",
)  # fmt: skip
SEARCHES = tuple(name for name in STRATEGIES if name != "default")
NAMES = (
    "looptune/default", "looptune/policy", "numpy/default", "torch/default",
    *(f"looptune/{name}@{budget:g}" for name in SEARCHES for budget in BUDGETS),
    *(f"tvm/metaschedule@{trials}" for trials in TRIALS),
)  # fmt: skip


def workloads() -> Iterator[Workload]:
    """A matmul and a convolution in turns, so that a few of them are of both kinds."""
    convolutions = [w for w in load("core") if w.id in CONVOLUTIONS]
    for matmul, convolution in zip(load("looptune-test")[::5][:MATMULS], convolutions, strict=True):
        yield from (matmul, convolution)


def curves(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """By strategy, a point a budget: seconds of tuning and speed over the default's, both
    geometric means over the rows that have them."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    found: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        cells = [row[name] for row in rows.values() if "ratio" in row.get(name, {})]
        seconds = geomean(cell["tune_s"] for cell in cells)
        speed = geomean(1 / cell["ratio"] for cell in cells)
        if seconds and speed:
            found.setdefault(name.partition("@")[0], []).append((seconds, speed))
    return {name: sorted(points) for name, points in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    args = parser_of(__doc__ or "", "tuning-curve-avx512.json").parse_args(argv)
    contenders = named(args, NAMES)
    jobs: list[Job] = [(workload, contenders) for workload in [*workloads()][: args.limit]]
    command = command_of("experiments.tuning_curve", argv)
    result: dict[str, Any] = compare(jobs, rules_of(args), args.output, command)
    result["curves"] = curves(result["rows"])
    keep(args.output, result)
    print(table(result, tuple(map(str, contenders))))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
