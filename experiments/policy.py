"""What the shipped policy gains over the default schedule, on problems that are held out.

python -m experiments.policy --output experiments/results/policy-avx512.json

Contenders take turns in one run a nest: the default schedule, the policy without a measurement,
the policy with 0.1 and with 0.5 s, the network's own first choice without the gain model, the cost
model's beam at the policy's own milliseconds, and random constructions ranked by the cost model.
Geometric means of default's time / contender's time, 95 % bootstrap intervals over nests.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tqdm import tqdm

import looptune
from experiments.dataset import BEAM_WIDTH, random_construction
from looptune.build import build
from looptune.choose import Options, choose
from looptune.construct import Construction
from looptune.errors import UnsupportedError
from looptune.host import fingerprint, host_target
from looptune.ir import Nest, plan_of
from looptune.measure import interleave, paired, random_arrays, rotating_sampler
from looptune.models.advise import SECONDS, policy_of
from looptune.models.inference import Policy
from looptune.oracle import Oracle
from looptune.propose import ModelValue, beam, by_model, proposals
from looptune.schedule import Schedule
from looptune.target import Target
from looptune.workloads.suites import Workload, load, shipped

ROUNDS, SECONDS_A_NEST = 15, 0.4
BUDGETS = (0.1, 0.5)
MOST_FLOPS = 1e8
LOSS = 0.05
SETS = {
    "matmul, LoopTune's 25": ("looptune-test", ("matmul",)),
    "matmul, others": ("core", ("matmul",)),
    "convolution": ("core", ("conv2d", "conv1d", "depthwise_conv2d")),
    "contraction and batched": ("core", ("tensor_contraction", "batch_matmul", "einsum")),
}


@dataclass(frozen=True)
class Row:
    """One nest: log(default's time / contender's), and the milliseconds that a choice took."""

    id: str
    gains: dict[str, float]
    milliseconds: float


def nests_of(name: str, most: int) -> Iterator[tuple[str, Nest]]:
    """Float32 nests of a set, of modest size."""
    suite, kinds = SETS[name]
    pool: tuple[Workload, ...] = load(suite)
    if suite == "core":
        pool = (*pool, *(w for w in shipped() if not w.core))
    found = 0
    for workload in pool:
        fits = workload.kind in kinds and workload.flops <= MOST_FLOPS
        if suite == "core" and workload.suite.startswith("looptune-mm"):
            continue
        if not fits or workload.dtype != "float32" or found == most:
            continue
        try:
            plan = workload.plan()
        except UnsupportedError:
            continue
        if len(plan.nests) == 1:
            found += 1
            yield workload.id, plan.nests[0]


def contenders(nest: Nest, target: Target, policy: Policy) -> tuple[dict[str, Schedule], float]:
    """Schedules by who chose them, and the milliseconds that the policy took."""
    start = Construction(nest, target)
    options = Options("policy", target, 1, None, None, None, policy=policy)
    began = time.perf_counter()
    found = {"policy": choose(nest, options).schedule}
    took = time.perf_counter() - began
    for budget in BUDGETS:
        with_budget = Options("policy", target, 1, budget, None, None, policy=policy)
        found[f"policy with {budget} s"] = choose(nest, with_budget).schedule
    if not start.offers:
        return found, 1e3 * took
    led = proposals(start, policy.log_probabilities, SECONDS)
    found["network alone"] = led[0].schedule
    value = ModelValue(nest, target)
    stop = time.perf_counter() + took
    states = beam(start, by_model(value, lambda: time.perf_counter() > stop), BEAM_WIDTH)
    found["cost-model beam"] = max(states, key=lambda each: each.score).state.schedule
    rng = np.random.default_rng(0)
    walks, stop = [start], time.perf_counter() + took
    while time.perf_counter() < stop:
        walks.append(random_construction(rng, start))
        value(walks[-1].schedule)
    found["random by cost model"] = max((w.schedule for w in walks), key=value)
    return found, 1e3 * took


def row_of(name: str, nest: Nest, target: Target, policy: Policy) -> Row:
    """Measure the contenders' kernels, each distinct one once, and verify them."""
    chosen, milliseconds = contenders(nest, target, policy)
    plan, default = plan_of(nest), Construction(nest, target).schedule
    oracle = Oracle(plan)
    distinct = {schedule.identity: schedule for schedule in (default, *chosen.values())}
    kernels = {identity: build(plan, [s], target) for identity, s in distinct.items()}
    for kernel in kernels.values():
        oracle.verify(kernel)
    sets = [random_arrays(plan, seed) for seed in range(2)]
    samplers = {identity: rotating_sampler(kernel, sets) for identity, kernel in kernels.items()}
    times = interleave(samplers, rounds=ROUNDS, seconds=SECONDS_A_NEST)
    anchor = times[default.identity]
    gains = {who: paired(anchor, times[s.identity]).mean for who, s in chosen.items()}
    return Row(name, gains, milliseconds)


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By contender: geometric mean, its interval, and the rate and mean size of losses."""
    rng = np.random.default_rng(0)
    found = {}
    for who in rows[0].gains:
        gains = np.array([row.gains.get(who, 0.0) for row in rows])
        means = rng.choice(gains, (2000, len(gains))).mean(1)
        low, high = np.percentile(means, [2.5, 97.5])
        lost = gains[gains < -LOSS]
        found[who] = {
            "n": float(len(gains)), "ratio": float(np.exp(gains.mean())),
            "low": float(np.exp(low)), "high": float(np.exp(high)),
            "losses": float(len(lost) / len(gains)),
            "loss": float(np.exp(lost.mean())) if len(lost) else 1.0,
        }  # fmt: skip
    times = np.array([row.milliseconds for row in rows])
    median, most = np.quantile(times, [0.5, 0.99])
    found["milliseconds"] = {"median": float(median), "p99": float(most)}
    return found


def main() -> None:
    """Measure all sets, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--most", type=int, default=60, help="nests of a set")
    parser.add_argument("--policy", help="a checkpoint; the shipped one otherwise")
    args = parser.parse_args()
    target, policy = host_target(), policy_of(args.policy)
    result: dict[str, object] = {
        "schema": 1, "version": looptune.__version__, "machine": asdict(fingerprint()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "target": target.name,
        "threads": 1, "header": dict(policy.header), "sets": {},
    }  # fmt: skip
    sets: dict[str, object] = {}
    for name in SETS:
        pairs = list(nests_of(name, args.most))
        rows = [
            row_of(label, nest, target, policy)
            for label, nest in tqdm(pairs, desc=name, file=sys.stderr)
        ]
        sets[name] = {"summary": summary(rows), "rows": [asdict(row) for row in rows]}
        print(name)
        for who, each in summary(rows).items():
            print(f"  {who:22}", "  ".join(f"{key} {value:.3f}" for key, value in each.items()))
    args.output.write_text(json.dumps({**result, "sets": sets}, indent=1) + "\n")


if __name__ == "__main__":
    main()
