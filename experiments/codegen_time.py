"""How long a kernel takes to make: ours against LLVM and gcc on the same loops, and a TVM build.

python -m experiments.codegen_time

`tune_s` is from the problem to something callable: for looptune the choice of the default schedule,
lowering and encoding; for gcc and llvmlite the text of that schedule's loops and its compilation,
the schedule given. The speeds stand beside, since a compiler that makes less is soon done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.header import command_of
from experiments.versus import (
    Job,
    compare,
    exit_code,
    keep,
    named,
    parser_of,
    rules_of,
    table,
    tuning,
)
from looptune.workloads.suites import load

NAMES = ("looptune/default", "llvmlite/default", "gcc/default", "tvm/default")
CONTRACTIONS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = parser_of(__doc__ or "", "codegen-time-avx512.json")
    parser.set_defaults(rounds=5, seconds=0.5)
    args = parser.parse_args(argv)
    contenders = named(args, NAMES)
    others = [w for w in load("core") if w.kind == "tensor_contraction" and w.dtype == "float32"]
    pool = [*load("looptune-test"), *others[:CONTRACTIONS]][: args.limit]
    jobs: list[Job] = [(workload, contenders) for workload in pool]
    command = command_of("experiments.codegen_time", argv)
    result = compare(jobs, rules_of(args), args.output, command)
    result["milliseconds"] = {
        str(each): 1e3 * seconds
        for each in contenders
        if (seconds := tuning(result["rows"], str(each))) is not None
    }
    keep(args.output, result)
    print(table(result, tuple(map(str, contenders))))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
