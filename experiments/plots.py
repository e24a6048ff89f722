"""Plots of the committed results.

python -m experiments.plots [FOLDER]       writes a PNG beside each file that it knows

core180: left our speed over the best peer's, a point a workload, by class; right what ours reaches
of the roofline (FMA peak or copies of that footprint, whichever binds); over 1 a kernel moves its
operands faster than a copy (`looptune.bench.Row`), and triangles stand for what is beyond the edge.
matmul25: bars of every contender's rate, and how the policy's speed over each is distributed.
matmul2197: that distribution over NumPy, and heat maps of it. tuning-curve: speed over the
default's against seconds of tuning. end-to-end and codegen-time: milliseconds. eval: by set, the
default's time over each contender's, with intervals.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from experiments.core180 import CLASSES, SHORT_MICROSECONDS, best_peer
from experiments.curves import COLOURS, written
from experiments.matmul2197 import heat
from experiments.versus import Rows, over
from looptune.measure import geomean
from looptune.models.evaluate import read
from looptune.models.figures import summary
from looptune.workloads.suites import LOOPTUNE_SIZES, load

mpl.use("Agg")
RESULTS = Path(__file__).parent / "results"
EDGE = 1.2  # of the axis of shares
MARKS = "osD^vP*X"  # beside the colours, for those who print in grey


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
        draw_row(left, [ratio for ratio, _ in pairs], place, COLOURS[0])
        draw_row(right, [share for _, share in pairs], place, COLOURS[1], EDGE)
    left.set_xscale("log")
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("our speed over the best peer's")
    right.set_xlabel(f"share of the roofline (triangles: over {EDGE})")
    right.set_xlim(0, 1.04 * EDGE)
    left.set_yticks(range(len(found)), [f"{name} ({len(pairs)})" for name, pairs in found.items()])
    left.invert_yaxis()
    return saved(figure, path, result)


def draw_row(
    axis: Any, values: Sequence[float], place: int, colour: str, edge: float = math.inf
) -> None:
    """Values as points in a row; those beyond the edge as triangles on it."""
    for mark, shown in (
        ("o", [value for value in values if value <= edge]),
        (">", [edge for value in values if value > edge]),
    ):
        axis.plot(shown, [place] * len(shown), mark, color=colour, alpha=0.5, markersize=4)


def saved(figure: Any, path: Path, result: dict[str, Any]) -> Path:
    """The figure beside its result, with threads and date."""
    threads = result["config"]["threads"]
    figure.suptitle(f"{path.stem}: {threads} thread{'s' * (threads > 1)}, {result['date']}")
    return written(figure, path.with_suffix(".png"))


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
            fmt=MARKS[number % len(MARKS)], color=COLOURS[number % len(COLOURS)],
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
    return written(figure, path.with_suffix(".png"))


def names_of(rows: Rows) -> list[str]:
    """Contenders with a figure somewhere, in their order."""
    every = dict.fromkeys(name for row in rows.values() for name in row)
    return [name for name in every if any("gflops" in row.get(name, {}) for row in rows.values())]


def plot_matmul25(path: Path) -> Path:
    """Bars of geometric means, and violins of the policy's speed over the others'."""
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    rows = result["rows"]
    names = names_of(rows)
    rates = [
        geomean(row[name]["gflops"] for row in rows.values() if "gflops" in row.get(name, {}))
        for name in names
    ]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.35 * len(names) + 2), sharey=True)
    left.barh(range(len(names)), rates, color=COLOURS[0])
    left.axvline(result["peak_gflops"], color="black", linewidth=0.8, linestyle="--")
    left.set_xlabel("GFLOPS, geometric mean (dashed: FMA peak)")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    for at, name in enumerate(names):
        ratios = over(rows, "looptune/policy", name)
        if len(ratios) > 1 and name != "looptune/policy":
            parts = right.violinplot([np.log10(ratios)], [at], orientation="horizontal", widths=0.8)
            for body in parts["bodies"]:
                body.set_facecolor(COLOURS[1])
    right.axvline(0, color="black", linewidth=0.8)
    ticks = (0.5, 1, 2, 5, 10, 50)
    right.set_xticks(np.log10(ticks), [f"{tick:g}" for tick in ticks])
    right.set_xlabel("the policy's speed over it")
    return saved(figure, path, result)


def plot_matmul2197(path: Path) -> Path:
    """The ratio to NumPy: its distribution, and heat maps over pairs of extents."""
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    rows = result["rows"]
    ratios = over(rows, "looptune/policy", "numpy/default")
    box = np.ma.masked_invalid(heat(rows))
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 4))
    axes[0].hist(ratios, 60, color=COLOURS[0])
    axes[0].axvline(1, color="black", linewidth=0.8)
    axes[0].set_xlabel("the policy's speed over NumPy's")
    axes[0].set_ylabel("matmuls")
    sizes = list(LOOPTUNE_SIZES)
    for axis, (away, rows_, columns) in zip(
        axes[1:], ((1, "M", "N"), (2, "M", "K"), (0, "K", "N")), strict=True
    ):
        shown = axis.imshow(box.mean(axis=away), origin="lower", cmap="cividis")
        axis.set_xlabel(columns)
        axis.set_ylabel(rows_)
        axis.set_xticks(range(0, 13, 4), sizes[::4])
        axis.set_yticks(range(0, 13, 4), sizes[::4])
        figure.colorbar(shown, ax=axis, shrink=0.7)
    return saved(figure, path, result)


def plot_curve(path: Path) -> Path:
    """A line a strategy."""
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for at, (name, pairs) in enumerate(result["curves"].items()):
        colour, marker = COLOURS[at % len(COLOURS)], MARKS[at % len(MARKS)]
        axis.plot(*zip(*pairs, strict=True), color=colour, marker=marker, label=name)
    axis.set_xscale("log")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xlabel("seconds of tuning (log)")
    axis.set_ylabel("speed over the default schedule's")
    axis.legend(fontsize=7, ncols=2)
    return saved(figure, path, result)


def plot_end_to_end(path: Path) -> Path:
    """Milliseconds of the contractions of each network."""
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    networks = result["totals"]
    figure, axes = pyplot.subplots(1, len(networks), figsize=(12, 3.5), squeeze=False)
    for axis, (network, ways) in zip(axes[0], networks.items(), strict=True):
        axis.barh(list(ways), [each["milliseconds"] for each in ways.values()], color=COLOURS[0])
        axis.set_xscale("log")
        axis.set_xlabel(f"{network}: milliseconds a run (log)")
        axis.invert_yaxis()
    return saved(figure, path, result)


def plot_codegen(path: Path) -> Path:
    """Milliseconds from a problem to a kernel."""
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    figure, axis = pyplot.subplots(figsize=(7, 2.5))
    axis.barh(list(result["milliseconds"]), list(result["milliseconds"].values()), color=COLOURS[0])
    axis.set_xscale("log")
    axis.set_xlabel("milliseconds to a kernel, geometric mean (log)")
    axis.invert_yaxis()
    return saved(figure, path, result)


PLOTS: dict[str, Callable[[Path], Path]] = {
    "matmul25": plot_matmul25,
    "matmul2197": plot_matmul2197,
    "tuning-curve": plot_curve,
    "end-to-end": plot_end_to_end,
    "codegen-time": plot_codegen,
    "core180-policy": lambda path: path,  # its table says it
    "core180": plot,
    "eval": plot_evaluation,
}


def main(argv: Sequence[str] | None = None) -> int:
    """All of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    for path in sorted(parser.parse_args(argv).folder.glob("*.json*")):
        draw = next((draw for stem, draw in PLOTS.items() if path.stem.startswith(stem)), None)
        if draw is not None and draw(path) != path:
            print(path.with_suffix(".png").name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
