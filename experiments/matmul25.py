"""LoopTune's 25 test matmuls, every contender: speed, share of peak and tuning time.

python -m experiments.matmul25

MetaSchedule gets 64 trials on all of them and 256 on two. The first contender anchors the ratios;
`looptune/policy` over `looptune/default` is what the policy adds by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.contenders import contender_named
from experiments.header import command_of
from experiments.versus import (
    Job,
    compare,
    exit_code,
    failures,
    keep,
    means,
    named,
    parser_of,
    rules_of,
    table,
    tuning,
)
from looptune.workloads.suites import load

OURS = (
    "looptune/default", "looptune/policy", "looptune/policy@0.1", "looptune/model-beam",
    "looptune/evolution@1", "looptune/beam4bfs@1", "looptune/random@1",
)  # fmt: skip
FIXED = ("looptune/untuned", "looptune/4x2v", "looptune/6x2v")
OTHERS = (
    "numpy/default",
    "torch/default",
    "tvm/default",
    "tvm/metaschedule@64",
    "loop_tool/default",
)
LONG, LONG_ROWS = "tvm/metaschedule@256", 2
# LoopTune's abstract (arXiv 2309.01825): its policy over each, on its authors' machine. TVM has had
# no AutoTVM since 0.20, so that ratio is the paper's alone.
PAPER = {
    "looptune/untuned": 3.2, "tvm/default": 10.0, "tvm/metaschedule@64": 2.8, "AutoTVM": 1.08,
    "numpy/default": 1.0,
}  # fmt: skip


def jobs(names: Sequence[str], limit: int | None, long: bool) -> list[Job]:
    """Workloads with their contenders, the first ones with MetaSchedule's long run, too."""
    contenders = tuple(map(contender_named, names))
    found = []
    for number, workload in enumerate(load("looptune-test")[:limit]):
        extra = (contender_named(LONG),) if long and number < LONG_ROWS else ()
        found.append((workload, (*contenders, *extra)))
    return found


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """What the policy and the default gain over the others, beside the paper's ratios."""
    others = (*FIXED, *OTHERS, LONG)
    found: dict[str, Any] = {
        name: means(rows, name, others) for name in ("looptune/policy", "looptune/default")
    }
    found["policy over default"] = means(rows, "looptune/policy", ["looptune/default"])
    ours, theirs = tuning(rows, "looptune/policy"), tuning(rows, "tvm/metaschedule@64")
    found["tuning, MetaSchedule's over the policy's"] = theirs / ours if ours and theirs else None
    return found | {"paper": PAPER, "failures": failures(rows)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    args = parser_of(__doc__ or "", "matmul25-avx512.json").parse_args(argv)
    names = tuple(map(str, named(args, (*OURS, *FIXED, *OTHERS))))
    work = jobs(names, args.limit, long=args.contenders is None)
    command = command_of("experiments.matmul25", argv)
    result = compare(work, rules_of(args), args.output, command)
    result["summary"] = summary(result["rows"])
    keep(args.output, result)
    print(table(result, (*names, LONG)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
