"""Plots of the committed results of the core workloads.

python -m experiments.plots        writes experiments/results/core180-*.png beside each JSON

Left: our speed over the best peer's, a point a workload, by class. Right: the share of the
roofline (FMA peak or streaming bandwidth at that footprint, whichever binds) that ours reaches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from experiments.core180 import CLASSES, SHORT_MICROSECONDS, best_peer
from looptune.workloads.suites import load

mpl.use("Agg")
RESULTS = Path(__file__).parent / "results"
COLOURS = ("#0072b2", "#d55e00")  # blue and vermilion: told apart by everyone


def points(result: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """By class, the ratio to the best peer and the share of the roofline of every long row."""
    flops = {workload.id: workload.flops for workload in load("core")}
    kinds = {kind: name for name, kinds in CLASSES.items() for kind in kinds}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CLASSES}
    for row in result["rows"]:
        peer = best_peer(row, flops[row["id"]])
        if peer is not None and peer[1] >= SHORT_MICROSECONDS:
            share = max(row["fraction_of_peak"], row["fraction_of_bandwidth"])
            found[kinds[row["kind"]]].append((peer[0], share))
    return {name: pairs for name, pairs in found.items() if pairs}


def plot(path: Path) -> Path:
    """One figure of one result."""
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    found = points(result)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for place, pairs in enumerate(found.values()):
        for axis, colour, column in ((left, COLOURS[0], 0), (right, COLOURS[1], 1)):
            values = [pair[column] for pair in pairs]
            axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.5, markersize=4)
    left.set_xscale("log")
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("our speed over the best peer's")
    right.set_xlabel("share of the roofline")
    right.set_xlim(0, 1.2)
    left.set_yticks(range(len(found)), [f"{name} ({len(pairs)})" for name, pairs in found.items()])
    left.invert_yaxis()
    threads = result["config"]["threads"]
    figure.suptitle(f"{path.stem}: {threads} thread{'s' * (threads > 1)}, {result['date']}")
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target


def main() -> int:
    """All of them."""
    for path in sorted(RESULTS.glob("core180-*.json")):
        print(plot(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
