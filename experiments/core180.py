"""The core workloads against the best peer of each: geometric means by class.

python -m experiments.core180 --output experiments/results/core180-avx512.json

Peers are NumPy (OpenBLAS) and torch (oneDNN, MKL) on as many threads; a convolution counts the
better of torch's memory formats. Rows whose peer takes under `SHORT_MICROSECONDS` measure the
overhead of a call and are reported apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.header import command_of, header
from looptune.bench import BenchConfig, bench, render
from looptune.host import host_target
from looptune.measure import geomean
from looptune.workloads.suites import load

SHORT_MICROSECONDS = 8.0
PEERS = ("numpy", "torch", "torch-channels-last")
CLASSES = {
    "matmul": ("matmul",),
    "batched matmul": ("batch_matmul",),
    "convolution": (
        "conv1d", "conv2d", "conv3d", "grouped_conv1d", "grouped_conv2d", "dilated_conv2d",
        "conv_transpose2d", "capsule_conv2d",
    ),
    "depthwise": ("depthwise_conv2d",),
    "tensor contraction": ("tensor_contraction",),
    "mttkrp": ("mttkrp",),
    "gemv": ("gemv",),
    "einsum": ("einsum",),
}  # fmt: skip


def best_peer(row: dict[str, Any], flops: int) -> tuple[float, float] | None:
    """Our speed over the best peer's, and the microseconds of that peer; None without peers."""
    if not row["peers"]:
        return None
    ratio = min(peer["ratio"] for peer in row["peers"].values())
    gflops = max(peer["gflops"] for peer in row["peers"].values())
    return ratio, flops / gflops / 1e3 if gflops else 0.0


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per class: geometric mean over the best peer, of how many rows, the least, and short rows."""
    found: dict[str, dict[str, Any]] = {}
    kinds = {kind: name for name, kinds in CLASSES.items() for kind in kinds}
    ratios: dict[str, list[tuple[float, str]]] = defaultdict(list)
    short: dict[str, list[float]] = defaultdict(list)
    flops = {workload.id: workload.flops for workload in load("core")}
    for row in rows:
        peer = best_peer(row, flops[row["id"]])
        if peer is None:
            continue
        name = kinds[row["kind"]]
        if peer[1] < SHORT_MICROSECONDS:
            short[name].append(peer[0])
        else:
            ratios[name].append((peer[0], row["id"]))
    for name in CLASSES:
        values = sorted(ratios[name])
        found[name] = {
            "n": len(values),
            "geomean": geomean(ratio for ratio, _ in values),
            "below_0.9": {each: round(ratio, 3) for ratio, each in values if ratio < 0.9},
            "short_n": len(short[name]),
            "short_geomean": geomean(short[name]),
        }
    return found


def text(classes: dict[str, dict[str, Any]]) -> str:
    """The summary as a table."""
    lines = [
        f"{'class':20s} {'n':>3s} {'over best peer':>15s} {'below 0.9':>10s} {'short rows':>16s}"
    ]
    for name, each in classes.items():
        mean = f"{each['geomean']:.2f}x" if each["geomean"] else "-"
        brief = f"{each['short_n']}: {each['short_geomean']:.2f}x" if each["short_n"] else "-"
        below = len(each["below_0.9"])
        lines.append(f"{name:20s} {each['n']:3d} {mean:>15s} {below:10d} {brief:>16s}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="timing a workload, in all")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    config = BenchConfig(
        suite="core", against=PEERS, threads=args.threads, target=args.target, seconds=args.seconds
    )
    target = host_target(args.target)
    head = header(command_of("experiments.core180", argv), target)
    result: dict[str, Any] = {**head, **bench(load("core"), config, target)}
    result["classes"] = summary(result["rows"])
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(render(result))
    print()
    print(text(result["classes"]))
    return 0 if all(row["correct"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
