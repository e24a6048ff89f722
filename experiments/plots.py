"""Plots of the committed results, each beside its file.

python -m experiments.plots        writes experiments/results/core180-*.png and eval-*.png

Core workloads: left our speed over the best peer's, a point a workload, by class; right the share
of the roofline (FMA peak or streaming bandwidth at that footprint, whichever binds) that ours
reaches. Evaluations of a policy: by set, the default's time over each contender's, with intervals.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from experiments.core180 import CLASSES, SHORT_MICROSECONDS, best_peer
from looptune.models.evaluate import read
from looptune.models.figures import summary
from looptune.workloads.suites import load

mpl.use("Agg")
RESULTS = Path(__file__).parent / "results"
COLOURS = ("#0072b2", "#d55e00")  # blue and vermilion: told apart by everyone
# The palette of Okabe and Ito less its yellow, each colour with a mark of its own.
PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#888888")
MARKS = "osD^vP*X"


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


def sets_of(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By set, the figures of every contender but the default and the searches for the best."""
    found = {}
    for name, figures in summary(read(path)[1]).items():
        contenders: dict[str, dict[str, Any]] = figures["contenders"]
        found[name] = {
            who: each
            for who, each in contenders.items()
            if who != "default" and not who.startswith("search: ")
        }
    return {name: each for name, each in found.items() if each}


def plot_evaluation(path: Path) -> Path:
    """Contenders side by side, set under set, of one evaluation."""
    from matplotlib import pyplot

    found = sets_of(path)
    names = list(dict.fromkeys(who for contenders in found.values() for who in contenders))
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.9 * len(found)))
    for number, who in enumerate(names):
        offset = 0.8 * ((number + 0.5) / len(names) - 0.5)
        at = [place + offset for place, each in enumerate(found.values()) if who in each]
        mine = [each[who] for each in found.values() if who in each]
        axis.errorbar(
            [each["ratio"] for each in mine], at,
            xerr=[[each["ratio"] - each["low"] for each in mine],
                  [each["high"] - each["ratio"] for each in mine]],
            fmt=MARKS[number % len(MARKS)], color=PALETTE[number % len(PALETTE)],
            markersize=5, linewidth=1, label=who,
        )  # fmt: skip
    axis.set_xscale("log")
    for which in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        which("{x:g}")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("the default's time over the contender's, 95 % intervals over shapes")
    axis.set_yticks(range(len(found)), list(found))
    axis.invert_yaxis()
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target


def main() -> int:
    """All of them."""
    for path in sorted(RESULTS.glob("core180-*.json")):
        print(plot(path))
    for path in sorted(RESULTS.glob("eval-*.jsonl")):
        print(plot_evaluation(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
