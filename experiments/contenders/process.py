"""A contender's own process: `python -m experiments.contenders.process`, JSON lines in and out.

It is told who it is, then a workload to make a kernel for, then how many calls to time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.contenders import Built, Contender, Problem, build, contender_named
from looptune.reference import verify
from looptune.worker import Child, serve
from looptune.workloads.suites import Workload, parse_records

THREADS = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LOOPTUNE_NUM_THREADS",
    "TVM_NUM_THREADS", "LOOP_TOOL_NUM_THREADS",
)  # fmt: skip
PATIENCE_SECONDS, PATIENCE_A_TRIAL = 900.0, 60.0
COMMAND = (sys.executable, "-m", "experiments.contenders.process")


@dataclass(frozen=True)
class State:
    """Who this process is, and what it made last."""

    contender: Contender
    built: Built | None = None


def answered(request: Mapping[str, Any], state: State | None) -> tuple[State, dict[str, Any]]:
    """The next state and the answer to one request."""
    if "contender" in request:
        return State(contender_named(request["contender"])), {"ready": True}
    assert state is not None, "its name comes before workloads"
    if "workload" in request:
        (workload,) = parse_records(json.dumps([request["workload"]]))
        problem = Problem(workload, request["threads"], request["isa"], request["seed"])
        built = build(state.contender, problem)
        verify(problem.plan, problem.arrays, built.result(), seed=problem.seed)
        return State(state.contender, built), {"tune_s": built.tune_s, "note": built.note}
    assert state.built is not None, "a workload comes before samples"
    state.built.sample(1)  # what ran in between has taken the caches
    return state, {"seconds": state.built.sample(request["calls"])}


def seat(contender: Contender, threads: int) -> Child:
    """The process of a contender, not yet started."""
    trials = contender.budget or 0.0 if contender.library == "tvm" else 0.0
    patience = PATIENCE_SECONDS + PATIENCE_A_TRIAL * trials
    return Child(
        {"contender": str(contender)}, COMMAND, patience,
        dict.fromkeys(THREADS, str(threads)) | {"PYTHONHASHSEED": "0"},
    )  # fmt: skip


def problem_of(workload: Workload, threads: int, isa: str | None, seed: int) -> dict[str, Any]:
    """The request to make a kernel."""
    record = dict(workload.record)
    return {"workload": record, "threads": threads, "isa": isa, "seed": seed}


if __name__ == "__main__":
    serve(answered, Exception)  # whatever a library raises is its row's reason
