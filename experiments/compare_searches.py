"""Searches at equal budgets: LoopTune's 25 test matmuls and 12 convolutions and contractions.

python -m experiments.compare_searches --seconds 1 --output experiments/results/searches-avx512.json

Every strategy runs in the paper's seven actions (to be set beside LoopTune's own figures) and in
ours. At the end all winners of a workload, the default, the untuned nest and static tiles of four
and six rows by two vectors are timed again, twice: the first samples say which is the best known,
the second what it and all others gain, so that no luck goes into the share. Resumable: what the
output holds is not run again, on the same machine and by the same versions.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any

from tqdm import tqdm

from experiments.header import command_of, header
from experiments.versus import exit_code, keep, resumed
from looptune.build import build
from looptune.default import default_schedule
from looptune.errors import LooptuneError
from looptune.host import host_target
from looptune.ir import Nest
from looptune.measure import compare_samplers, geomean, rotating_sampler
from looptune.models.advise import shipped
from looptune.models.contenders import static_name, static_tile
from looptune.schedule import Schedule, replay
from looptune.search import STRATEGIES
from looptune.serial import actions_from_json
from looptune.target import Target
from looptune.tuner import Spending, Tuner, search_nest
from looptune.workloads.suites import load

SEEDED = ("random", "evolution")
TILES = ((4, 2), (6, 2))  # rows and vectors
OTHERS = (
    "resnet18/layer4.0.downsample", "resnet18/layer3.0.downsample", "mobilenet_v2/stem",
    "mobilenet_v2/block1.project", "mobilenet_v2/block4.dw", "mlperf-tiny/resnet8.conv1",
    "mlperf-tiny/dscnn.pw", "ansor/C1D.1", "tccg-small/intensli.abc-bda-dc",
    "tccg-small/intensli.abcd-dbea-ec", "tccg-small/ao2mo.abcd-ea-ebcd",
    "tccg-small/intensli.abc-dca-bd",
)  # fmt: skip


def workloads() -> Iterator[tuple[str, Nest]]:
    """The 25 matmuls, then the others."""
    for workload in load("looptune-test"):
        yield workload.id, workload.plan().nests[0]
    for workload in load("core"):
        if workload.id in OTHERS:
            yield workload.id, workload.plan().nests[0]


def statics(nest: Nest, target: Target) -> dict[str, Schedule]:
    """What is set beside the searches: the untuned nest and, for matmuls, static tiles."""
    tiles = {static_name(*size): static_tile(nest, target, *size) for size in TILES}
    return {"untuned": Schedule(nest)} | {k: tile for k, tile in tiles.items() if tile is not None}


def searched(
    nest: Nest, target: Target, strategy: str, space: str, seconds: float, seed: int
) -> dict[str, Any]:
    """One search: its winner, how many candidates, and the seconds it took.

    In the paper's actions the winner is the best that it came to by itself; in ours `optimize`'s,
    which is the default where nothing surely beats that.
    """
    start = monotonic()
    tuner = Tuner(nest, target, 1, Spending(seconds, None, monotonic, start), seed)
    policy = shipped() if strategy == "policy" else None
    schedule, _ = search_nest(strategy, tuner, space=space, policy=policy)
    if space == "paper":
        own = [t for t in tuner.trials if t.value is not None]
        best = max(own, key=lambda trial: trial.value or 0.0, default=None)
        schedule = schedule if best is None else replay(nest, best.actions)
    return {
        "actions": schedule.actions, "order": schedule.order, "tried": len(tuner.trials),
        "rejected": tuner.rejected, "seconds": monotonic() - start,
    }  # fmt: skip


def rated(
    nest: Nest, target: Target, runs: dict[str, Any], seconds: float
) -> tuple[dict[str, float], str]:
    """log(default / schedule) of every distinct winner and static schedule, and the best known's
    name: each by samples of its own."""
    schedules = {
        name: replay(nest, actions_from_json(run["actions"])) for name, run in runs.items()
    }
    schedules |= statics(nest, target)
    distinct = {schedule.identity: schedule for schedule in schedules.values()}
    anchor = default_schedule(nest, target)
    distinct.pop(anchor.identity, None)
    tuner = Tuner(nest, target, 1, Spending(None, None, monotonic, monotonic()))
    samplers = {"default": rotating_sampler(tuner.anchor, tuner.sets)}
    for identity, schedule in distinct.items():
        try:
            kernel = build(tuner.plan, [schedule], target)
        except LooptuneError:
            continue
        samplers[identity] = rotating_sampler(kernel, tuner.sets)
    first, second = (
        {name: each.mean for name, each in compare_samplers(samplers, seconds=seconds).items()}
        if len(samplers) > 1
        else {}
        for _ in range(2)
    )
    gain = {name: second.get(schedule.identity, 0.0) for name, schedule in schedules.items()}
    seen = {name: first.get(schedule.identity, 0.0) for name, schedule in schedules.items()}
    return {**gain, "default": 0.0}, max({"default": 0.0, **seen}.items(), key=itemgetter(1))[0]


def summary(rows: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Per strategy: share of the best known, and speed-up over the untuned nest."""
    shares: dict[str, list[float]] = {}
    gains: dict[str, list[float]] = {}
    for row in rows.values():
        gained = row["gain"]
        best = gained[row["best"]]
        for name, gain in gained.items():
            shares.setdefault(name, []).append(math.exp(gain - best))
            gains.setdefault(name, []).append(math.exp(gain - gained["untuned"]))
    return {
        name: {
            "share_of_best_known": geomean(shares[name]),
            "over_untuned": geomean(gains[name]),
            "n": float(len(shares[name])),
        }
        for name in shares
    }


def labels(seeds: int) -> Iterator[tuple[str, str, str, int]]:
    """Name, strategy, action space and seed of every search."""
    for space in ("paper", "ours"):
        for strategy in STRATEGIES:
            for seed in range(seeds if strategy in SEEDED else 1):
                if strategy != "default":
                    name = f"{strategy}/{space}" + (f"/{seed}" if seed else "")
                    yield name, strategy, space, seed


def row_of(nest: Nest, target: Target, seconds: float, seeds: int) -> dict[str, Any]:
    """All searches of one workload, what their winners gain, and the best known."""
    runs = {
        name: searched(nest, target, strategy, space, seconds, seed)
        for name, strategy, space, seed in labels(seeds)
    }
    gain, best = rated(nest, target, runs, 2 * seconds)
    return {"runs": runs, "gain": gain, "best": best}


def table(found: dict[str, dict[str, float | None]]) -> str:
    """The summary, the best first."""
    ordered = sorted(found.items(), key=lambda item: -(item[1]["share_of_best_known"] or 0))
    return "\n".join(
        f"{name:22s} {each['share_of_best_known']:.3f} of best known   "
        f"{each['over_untuned']:.2f}x untuned   ({each['n']:.0f} workloads)"
        for name, each in ordered
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=1, help="for random and evolution")
    parser.add_argument("--only", default=None, help="workloads whose id begins with this")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    target = host_target()
    head = header(command_of("experiments.compare_searches", argv), target)
    head["config"] = {"seconds": args.seconds, "seeds": args.seeds}
    result = resumed(args.output, head)
    jobs = [(name, nest) for name, nest in workloads() if name.startswith(args.only or "")]
    for name, nest in tqdm(jobs, file=sys.stderr, disable=None):
        if name not in result["rows"]:
            result["rows"][name] = row_of(nest, target, args.seconds, args.seeds)
            result["summary"] = summary(result["rows"])
            keep(args.output, result)
    print(table(summary(result["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
