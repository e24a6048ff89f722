"""All 2,197 matmuls of LoopTune's data set: how the policy fares, and where it fares worst.

python -m experiments.matmul2197
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.header import command_of
from experiments.versus import (
    Rows,
    compare,
    exit_code,
    keep,
    means,
    named,
    over,
    parser_of,
    rules_of,
    table,
)
from looptune.host import host_target
from looptune.tune import optimize
from looptune.workloads.suites import LOOPTUNE_SIZES, load, looptune_matmul

NAMES = ("looptune/default", "looptune/policy", "numpy/default", "torch/default")
WORST = 10


def sizes_of(name: str) -> tuple[int, int, int]:
    """M, K and N of `looptune-all/mm64_80_96`."""
    m, k, n = (int(size) for size in name.rpartition("mm")[2].split("_"))
    return m, k, n


def worst(rows: Rows, isa: str | None) -> list[dict[str, Any]]:
    """The rows where the policy's speed over NumPy's is least, each with what its kernel does."""
    both = {name: over({name: row}, NAMES[1], NAMES[2]) for name, row in rows.items()}
    order = sorted((ratios[0], name) for name, ratios in both.items() if ratios)
    found = []
    for ratio, name in order[:WORST]:
        kernel = optimize(
            looptune_matmul(*sizes_of(name)).plan(), strategy="policy",
            target=host_target(isa), database=None, verify=False,
        )  # fmt: skip
        why = str(kernel.explain()).splitlines()[:3]
        found.append({"id": name, "over NumPy": ratio, "order": rows[name][NAMES[1]]["note"],
                      "why": why})  # fmt: skip
    return found


def heat(rows: Rows) -> np.ndarray:
    """The policy's speed over NumPy's by (M, K, N), NaN where there is no row."""
    place = {size: at for at, size in enumerate(LOOPTUNE_SIZES)}
    found = np.full((len(place),) * 3, np.nan)
    for name, row in rows.items():
        for ratio in over({name: row}, NAMES[1], NAMES[2]):
            found[tuple(place[size] for size in sizes_of(name))] = ratio
    return found


def summary(rows: Rows, isa: str | None) -> dict[str, Any]:
    """Geometric means, quantiles of the ratio to NumPy, and the worst rows."""
    ratios = over(rows, NAMES[1], NAMES[2])
    points = (0, 1, 5, 25, 50, 75, 95, 99, 100)
    quantiles = np.percentile(ratios, points).tolist() if ratios else []
    return {
        "policy": means(rows, NAMES[1], NAMES[2:]),
        "default": means(rows, NAMES[0], NAMES[2:]),
        "policy over default": means(rows, NAMES[1], NAMES[:1]),
        "percentiles over NumPy": dict(zip(map(str, points), quantiles, strict=False)),
        "worst": worst(rows, isa),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = parser_of(__doc__ or "", "matmul2197-avx512.json")
    parser.set_defaults(rounds=7, seconds=0.1)
    args = parser.parse_args(argv)
    contenders = named(args, NAMES)
    every = load("looptune-all")
    step = 1 if args.limit is None else max(1, len(every) // args.limit)
    jobs = [(workload, contenders) for workload in every[::step]]
    command = command_of("experiments.matmul2197", argv)
    result = compare(jobs, rules_of(args), args.output, command)
    result["summary"] = summary(result["rows"], args.target)
    keep(args.output, result)
    print(table(result, NAMES))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
