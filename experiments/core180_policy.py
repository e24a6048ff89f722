"""The core workloads with the policy beside the default and the peers, by class.

python -m experiments.core180_policy
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.core180 import CLASSES, SHORT_MICROSECONDS
from experiments.header import command_of
from experiments.versus import (
    Job,
    Rows,
    compare,
    exit_code,
    keep,
    means,
    named,
    parser_of,
    rules_of,
    table,
)
from looptune.errors import UnsupportedError
from looptune.workloads.suites import Workload, load

OURS = ("looptune/default", "looptune/policy", "looptune/policy@0.5")
PEERS = ("numpy/default", "torch/default", "torch/channels-last")


def supported(workload: Workload) -> bool:
    """Whether it has a plan."""
    try:
        workload.plan()
    except UnsupportedError:
        return False
    return True


def with_best(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row with its best peer, unless that one is missing or takes next to no time."""
    cells = [row[name] for name in PEERS if "ratio" in row.get(name, {})]
    best = min(cells, key=lambda cell: float(cell["ratio"]), default=None)
    if best is None or best["microseconds"] < SHORT_MICROSECONDS:
        return None
    return {**row, "best peer": best}


def classes(rows: Rows) -> dict[str, Any]:
    """By class of workload: each of ours over the best peer, and over the default."""
    found: dict[str, Any] = {}
    for name, kinds in CLASSES.items():
        ids = {workload.id for workload in load("core") if workload.kind in kinds}
        long = {key: with_best(row) for key, row in rows.items() if key in ids}
        kept = {key: row for key, row in long.items() if row is not None}
        found[name] = {each: means(kept, each, ("best peer", OURS[0])) for each in OURS}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = parser_of(__doc__ or "", "core180-policy-avx512.json")
    parser.set_defaults(seconds=0.5)
    args = parser.parse_args(argv)
    contenders = named(args, (*OURS, *PEERS))
    pool = [workload for workload in load("core") if supported(workload)][: args.limit]
    jobs: list[Job] = [(workload, contenders) for workload in pool]
    command = command_of("experiments.core180_policy", argv)
    result = compare(jobs, rules_of(args), args.output, command)
    result["classes"] = classes(result["rows"])
    keep(args.output, result)
    print(table(result, tuple(map(str, contenders))))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
