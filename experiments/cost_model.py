"""How well the cost model ranks schedules: random ones of core workloads, measured.

python -m experiments.cost_model --output experiments/results/cost-model-avx512.json
python -m experiments.cost_model --fit        the same over generated shapes, to fit constants on

For each workload: Spearman's rank correlation of predicted and measured times over random
schedules, that among the schedules above half of the best, and the regret of measuring only the
eight that the model likes best.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic as now

import numpy as np
from tqdm import tqdm

from experiments.header import command_of, header
from looptune.cost import COST_VERSION, predict
from looptune.default import candidates
from looptune.errors import LooptuneError
from looptune.host import host_target
from looptune.ir import Nest
from looptune.schedule import Schedule
from looptune.search import Search, wander
from looptune.target import Target
from looptune.tuner import Spending, Tuner
from looptune.workloads import batched_matmul, conv2d, einsum, gemv, matmul
from looptune.workloads.suites import load

SCHEDULES, WORKLOADS, TOP = 50, 40, 8
MOST_FLOPS = 2.5e7  # so that a bad schedule still takes well under a second
KINDS = ("matmul", "batch_matmul", "conv2d", "depthwise_conv2d", "tensor_contraction", "gemv")


@dataclass(frozen=True)
class Row:
    """One workload: schedules, rank correlations and the regret of the model's top eight."""

    id: str
    schedules: int
    spearman: float
    spearman_good: float
    good: int
    regret: float
    milliseconds: float


def core_nests(count: int) -> Iterator[tuple[str, Nest]]:
    """Core workloads of one nest and modest size, the kinds in turn."""
    by_kind: dict[str, list[tuple[str, Nest]]] = {kind: [] for kind in KINDS}
    for workload in load("core"):
        if workload.kind in by_kind and workload.flops <= MOST_FLOPS:
            plan = workload.plan()
            if len(plan.nests) == 1:
                by_kind[workload.kind].append((workload.id, plan.nests[0]))
    turns = [pair for group in zip(*map(padded, by_kind.values()), strict=True) for pair in group]
    yield from [pair for pair in turns if pair is not None][:count]


def padded(pairs: list[tuple[str, Nest]]) -> list[tuple[str, Nest] | None]:
    """So many entries that all kinds have equally many."""
    return [*pairs, *[None] * (200 - len(pairs))]


def generated_nests(count: int, seed: int) -> Iterator[tuple[str, Nest]]:
    """Shapes drawn at random, none of them from the collection."""
    rng = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    for number in range(count):
        match number % 5:
            case 0:
                plan = matmul(size(8, 300), size(8, 300), size(8, 300), trans_b=rng.random() < 0.3)
            case 1:
                plan = batched_matmul(size(2, 32), size(8, 64), size(8, 64), size(8, 64))
            case 2:
                channels, side = size(4, 64), size(7, 40)
                tap = rng.choice([1, 3, 5])
                layout = rng.choice(["NCHW", "NHWC"])
                image = (channels, side, side) if layout == "NCHW" else (side, side, channels)
                weights = (size(4, 64), channels, tap, tap)
                plan = conv2d((1, *image), weights, padding=tap // 2, layout=layout)
            case 3:
                sizes = {label: size(4, 40) for label in "abcde"}
                spec = rng.choice(["abc,cd->abd", "abcd,dbe->ace", "cab,dc->bda", "ace,bde->abcd"])
                used = {label: sizes[label] for label in sizes if label in spec}
                plan = einsum(spec, sizes=used)
            case _:
                plan = gemv(size(64, 2000), size(64, 2000), trans_a=rng.random() < 0.5)
        yield f"generated/{number}", plan.nests[0]


def schedules_of(nest: Nest, target: Target, seed: int) -> list[Schedule]:
    """Random walks from the untuned nest, from the default and from its rivals."""
    search = Search(nest, target, 1, lambda schedule: None, seed=seed)
    starts = [Schedule(nest), *list(candidates(nest, target))[:24]]
    found: dict[str, Schedule] = {}
    for _ in range(40 * SCHEDULES):
        schedule = search.rng.choice(starts)
        for _ in range(search.rng.randint(0, 6)):
            schedule = wander(schedule, search)
        found.setdefault(schedule.identity, schedule)
        if len(found) == SCHEDULES:
            break
    return list(found.values())


def measured_row(name: str, nest: Nest, target: Target, seed: int) -> Row | None:
    """Predict and measure the schedules of one workload."""
    tuner = Tuner(nest, target, 1, Spending(None, None, now, now()), seed)
    costs, times = [], []
    spent = 0.0
    for schedule in schedules_of(nest, target, seed):
        start = now()
        try:
            cycles = predict(schedule, target).cycles
        except LooptuneError:
            continue
        spent += now() - start
        value = tuner(schedule)
        if value is not None:
            costs.append(cycles)
            times.append(-value)
    if len(costs) < 10:
        return None
    cost, seconds = np.array(costs), np.array(times)
    good = seconds <= seconds.min() + math.log(2)
    top = np.argsort(cost)[:TOP]
    return Row(
        name, len(costs), spearman(cost, seconds),
        spearman(cost[good], seconds[good]) if good.sum() >= 5 else math.nan, int(good.sum()),
        math.expm1(seconds[top].min() - seconds.min()), 1e3 * spent / len(costs),
    )  # fmt: skip


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation."""
    ranks = np.stack([np.argsort(np.argsort(x)).astype(float) for x in (a, b)])
    return float(np.corrcoef(ranks)[0, 1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="generated shapes instead")
    parser.add_argument("--workloads", type=int, default=WORKLOADS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args(argv)
    target = host_target()
    nests = generated_nests(args.workloads, args.seed) if args.fit else core_nests(args.workloads)
    rows = []
    for name, nest in tqdm(list(nests), file=sys.stderr, disable=None):
        row = measured_row(name, nest, target, args.seed)
        if row is not None:
            rows.append(row)
    summary = {
        "workloads": len(rows),
        "schedules": sum(row.schedules for row in rows),
        "spearman_median": float(np.median([row.spearman for row in rows])),
        "spearman_mean": float(np.mean([row.spearman for row in rows])),
        "spearman_good_mean": float(np.nanmean([row.spearman_good for row in rows])),
        "top8_regret_mean": float(np.mean([row.regret for row in rows])),
        "milliseconds_a_prediction": float(np.mean([row.milliseconds for row in rows])),
    }
    for row in rows:
        print(
            f"{row.id:46s} {row.schedules:3d} spearman {row.spearman:5.2f}   "
            f"good ({row.good:2d}) {row.spearman_good:5.2f}   regret {100 * row.regret:5.1f} %"
        )
    print(json.dumps(summary, indent=1))
    if args.output is not None:
        result = {
            **header(command_of("experiments.cost_model", argv), target),
            "cost_version": COST_VERSION,
            "seed": args.seed,
            "summary": summary,
            "rows": [vars(row) for row in rows],
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
