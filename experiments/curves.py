"""Curves of training runs, from the log.jsonl in their folders.

python -m experiments.curves RUN... --output curves.png

A panel a figure of a stage: of PPO over environment steps, of cloning over epochs. A colour and a
dash pattern a run. Of steps that a resumed run logged twice, the later count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
# Okabe and Ito's colours, which everyone tells apart, with dashes for those who print in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")
FIGURES = {
    "return": "return (log of speed-up)",
    "entropy": "entropy (nats)",
    "length": "episode length (decisions)",
    "cross_entropy": "cross-entropy, unseen (nats)",
    "agreement": "agreement, unseen (share)",
}
PLACES = {"steps": "environment steps", "epoch": "epochs"}
Curve = list[tuple[float, float]]


def curves_of(folder: Path) -> dict[tuple[str, str, str], Curve]:
    """Points of a run by stage, figure and what they are over; an unfinished line is left out."""
    found: dict[tuple[str, str, str], dict[float, float]] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        for place in PLACES.keys() & row.keys():
            for figure in FIGURES.keys() & row.keys():
                found.setdefault((row["stage"], figure, place), {})[row[place]] = row[figure]
    return {key: sorted(points.items()) for key, points in found.items()}


def plot(folders: Sequence[Path], output: Path) -> None:
    """Write the panels of all runs; raises `SystemExit` for runs that logged nothing to plot."""
    from matplotlib import pyplot

    runs = {folder.name: curves_of(folder) for folder in folders}
    order = list(FIGURES)
    keys = {key for run in runs.values() for key in run}
    panels = sorted(keys, key=lambda key: (key[0], order.index(key[1])))
    if not panels:
        raise SystemExit(f"nothing to plot in {', '.join(map(str, folders))}")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.6 * columns, 3.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis, key in zip(axes.flat, panels, strict=False):
        stage, name, place = key
        for number, (run, curves) in enumerate(runs.items()):
            if key in curves:
                style = DASHES[number % len(DASHES)]
                colour = COLOURS[number % len(COLOURS)]
                axis.plot(*zip(*curves[key], strict=True), style, color=colour, label=run)
        axis.set_title(stage)
        axis.set_xlabel(PLACES[place])
        axis.set_ylabel(FIGURES[name])
        axis.legend(fontsize="small")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    written(figure, output)


def written(figure: Any, path: Path) -> Path:
    """Write a figure, and let go of it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def main() -> int:
    """Plot the runs that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of looptune train")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    plot(args.runs, args.output)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
