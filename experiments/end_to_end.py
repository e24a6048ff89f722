"""All contractions of ResNet-50 and of BERT-base: what a run of the network takes in them.

python -m experiments.end_to_end

Times of unique layers, each as often as the network has it. MetaSchedule gets the ten costliest
unique layers of each network; its other layers count with TVM's default, and the sum says so. A
run breaks even when what it saves has paid for the tuning.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from experiments.contenders import contender_named
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
from looptune.workloads.suites import Workload, load

NAMES = (
    "looptune/default", "looptune/policy", "looptune/policy@0.5", "torch/default",
    "torch/channels-last", "tvm/default",
)  # fmt: skip
SCHEDULED, COSTLIEST = "tvm/metaschedule@64", 10
BERT_LAYERS = 12
NETWORKS = {"resnet50": "resnet50/", "bert-base, 128 tokens": "bert-base/s128."}


def layers(prefix: str) -> list[Workload]:
    """The unique layers of a network."""
    return [
        workload for workload in load(prefix.partition("/")[0]) if workload.id.startswith(prefix)
    ]


def repeats(workload: Workload) -> int:
    """How often the network has a layer: 12 identical blocks in BERT-base, a note in ResNet-50."""
    if workload.suite == "bert-base":
        return BERT_LAYERS
    found = re.search(r"used (\d+)x", str(workload.record.get("notes", "")))
    return int(found[1]) if found else 1


def jobs(names: Sequence[str], limit: int | None, scheduled: bool) -> list[Job]:
    """All unique layers, the costliest of each network with MetaSchedule, too."""
    contenders = tuple(map(contender_named, names))
    found: list[Job] = []
    for prefix in NETWORKS.values():
        pool = layers(prefix)
        costly = sorted(pool, key=lambda w: -w.flops * repeats(w))[:COSTLIEST]
        for workload in pool[:limit]:
            extra = (contender_named(SCHEDULED),) if scheduled and workload in costly else ()
            found.append((workload, (*contenders, *extra)))
    return found


def cell_of(row: dict[str, Any], ways: Sequence[str]) -> dict[str, Any] | None:
    """The fastest of several ways that have a figure."""
    cells = [row[way] for way in ways if "microseconds" in row.get(way, {})]
    return min(cells, key=lambda cell: float(cell["microseconds"])) if cells else None


WAYS = {
    "looptune/default": ("looptune/default",),
    "looptune/policy": ("looptune/policy",),
    "looptune/policy@0.5": ("looptune/policy@0.5",),
    "torch, the better format": ("torch/default", "torch/channels-last"),
    "tvm/default": ("tvm/default",),
    "tvm, MetaSchedule on the costliest": (SCHEDULED, "tvm/default"),
}  # fmt: skip


def totals(rows: Rows, prefix: str) -> dict[str, dict[str, float]]:
    """By way: milliseconds of a run, seconds of tuning, layers that are missing, and how many runs
    it takes to earn its tuning back against torch."""
    found: dict[str, dict[str, float]] = {}
    pool = [workload for workload in layers(prefix) if workload.id in rows]
    for name, ways in WAYS.items():
        cells = [(repeats(w), cell_of(rows[w.id], ways)) for w in pool]
        there = [(count, cell) for count, cell in cells if cell is not None]
        if not there:
            continue
        found[name] = {
            "milliseconds": sum(count * cell["microseconds"] for count, cell in there) / 1e3,
            "tune_s": sum(cell["tune_s"] for _, cell in there),
            "missing": len(cells) - len(there),
        }
    torch = found.get("torch, the better format")
    if torch is None:
        return found
    for each in found.values():
        saved = (torch["milliseconds"] - each["milliseconds"]) / 1e3
        spent = each["tune_s"] - torch["tune_s"]
        if not each["missing"] and not torch["missing"] and saved > 0:
            each["break_even_runs"] = max(0.0, spent / saved)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = parser_of(__doc__ or "", "end-to-end-avx512.json")
    parser.set_defaults(rounds=7)
    args = parser.parse_args(argv)
    names = tuple(map(str, named(args, NAMES)))
    work = jobs(names, args.limit, scheduled=args.contenders is None)
    command = command_of("experiments.end_to_end", argv)
    result = compare(work, rules_of(args), args.output, command)
    result["totals"] = {name: totals(result["rows"], at) for name, at in NETWORKS.items()}
    keep(args.output, result)
    print(table(result, (*names, SCHEDULED)))
    for network, ways in result["totals"].items():
        print(f"\n{network}")
        for name, each in ways.items():
            runs = each.get("break_even_runs")
            even = "" if runs is None else f", even with torch after {runs:.0f} runs"
            print(
                f"  {name:36s} {each['milliseconds']:9.2f} ms, tuned {each['tune_s']:.3g} s{even}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
