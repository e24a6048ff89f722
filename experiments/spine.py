"""Untuned nests, code generation time, import time and call overhead, in one run each.

python -m experiments.spine --output experiments/results/spine-avx512.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.header import command_of, header
from looptune.build import build, generate
from looptune.default import default_schedule
from looptune.errors import UnsupportedError
from looptune.host import host_target
from looptune.ir import Plan
from looptune.measure import (
    geomean,
    interleave,
    kernel_sampler,
    peak_flops,
    peer_threads,
    python_sampler,
    random_arrays,
    ratio,
)
from looptune.runtime.call import call_path
from looptune.schedule import Schedule
from looptune.target import Target
from looptune.tune import optimize
from looptune.workloads import matmul
from looptune.workloads.suites import load


def untuned(target: Target) -> dict[str, object]:
    """Share of peak of the written order m, k, n, and of the default, on the 25 matmuls."""
    peak = peak_flops(target)
    rows = []
    for workload in tqdm(load("looptune-test"), desc="untuned", disable=None):
        plan = workload.plan()
        arrays = random_arrays(plan)
        kernels = {
            "untuned": build(plan, [Schedule(plan.nests[0])], target),
            "default": build(plan, [default_schedule(plan.nests[0], target)], target),
        }
        samplers = {name: kernel_sampler(kernel, arrays) for name, kernel in kernels.items()}
        found = interleave(samplers, seconds=0.5)
        rows.append({name: plan.flops / found[name].median / peak for name in kernels})
    shares = {name: geomean([row[name] for row in rows]) for name in ("untuned", "default")}
    return {"peak_gflops": peak / 1e9, "geomean_share_of_peak": shares, "rows": rows}


def codegen(target: Target, repeats: int = 7) -> dict[str, object]:
    """Milliseconds to lower, legalize and encode, warm; and to choose the default schedule."""
    found: dict[str, list[dict[str, Any]]] = {"matmul": [], "conv": []}
    suites = (*load("looptune-test"), *load("core"))
    for workload in tqdm(suites, desc="codegen", disable=None):
        kind = "conv" if "conv" in workload.kind else workload.kind
        if kind not in found:
            continue
        try:
            plan = workload.plan()
        except UnsupportedError:
            continue
        found[kind].append(codegen_row(workload.id, plan, target, repeats))
    return {
        kind: {
            "median_ms": statistics.median(row["codegen_ms"] for row in rows),
            "median_schedule_ms": statistics.median(row["schedule_ms"] for row in rows),
            "most_instructions": max(row["instructions"] for row in rows),
            "rows": rows,
        }
        for kind, rows in found.items()
    }


def codegen_row(name: str, plan: Plan, target: Target, repeats: int) -> dict[str, object]:
    """The median of a few repeats for one plan."""
    schedule_s, codegen_s = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        schedules = [default_schedule(nest, target) for nest in plan.nests]
        schedule_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        made = [generate(schedule, target) for schedule in schedules]
        codegen_s.append(time.perf_counter() - start)
    kernel = build(plan, schedules, target)
    return {
        "id": name,
        "codegen_ms": 1e3 * statistics.median(codegen_s),
        "schedule_ms": 1e3 * statistics.median(schedule_s),
        "instructions": sum(kernel.explain().instructions.values()),
        "code_bytes": sum(len(code) for part in made for code in part.codes),
    }


def import_time(repeats: int = 15) -> dict[str, float]:
    """Milliseconds that `import looptune` adds to `import numpy`, in fresh interpreters."""
    script = (
        "import time, numpy; t = time.perf_counter(); import looptune; "
        "looptune.optimize; print(time.perf_counter() - t)"
    )
    bare = script.replace("looptune.optimize; ", "")
    times = {"import": bare, "import_and_optimize": script}
    found: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(repeats):
        for name, code in times.items():
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            found[name].append(1e3 * float(done.stdout))
    return {f"{name}_ms": statistics.median(values) for name, values in found.items()}


def call_overhead() -> dict[str, object]:
    """A 1x1x1 matmul with out=, against `numpy.matmul`, in one interleaved run."""
    a = np.ones((1, 1), np.float32)
    b, out = a.copy(), a.copy()
    kernel = optimize(matmul(1, 1, 1))
    contenders = {
        "numpy": python_sampler(lambda: np.matmul(a, b, out=out)),
        "kernel": python_sampler(lambda: kernel(a, b, out=out)),
    }
    fallback = kernel.with_path(native=False)
    contenders["ctypes"] = python_sampler(lambda: fallback(a, b, out=out))
    with peer_threads(1):
        found = interleave(contenders, rounds=31, seconds=2)
    return {
        "nanoseconds": {name: 1e9 * samples.median for name, samples in found.items()},
        "kernel_over_numpy": 1 / ratio(found["numpy"], found["kernel"]),
        "ctypes_over_numpy": 1 / ratio(found["numpy"], found["ctypes"]),
        "call_path": call_path(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=None)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args(argv)
    target = host_target(args.target)
    result = {
        **header(command_of("experiments.spine", argv), target),
        "untuned": untuned(target),
        "codegen": codegen(target),
        "import": import_time(),
        "call": call_overhead(),
    }
    text = json.dumps(result, indent=1)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
