"""The shipped data set: schedules of generated problems, measured beside the default schedule.

python -m experiments.dataset --nests 2700 --output measured.jsonl         adds to what is there
python -m experiments.dataset --pack measured.jsonl --output checkpoints/measured.jsonl.gz

One problem a line with the schedules that were tried on it: the cost model's beam, constructions
of random decisions, default schedules with another register tile, and what the policy that is
shipped advises: where it is wrong, the next one learns it. All of a problem's kernels
are verified and take turns in one run with the default's, which is in it twice: where the two
differ, or the machine was disturbed, the problem is measured again, once, and then left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from looptune.build import build
from looptune.construct import STOP, Construction, decisions_of
from looptune.errors import LooptuneError, LoweringError
from looptune.graph import in_domain
from looptune.host import fingerprint, host_target, runs
from looptune.ir import Nest, plan_of
from looptune.measure import Posterior, interleave, paired, random_arrays, rotating_sampler
from looptune.models.advise import shipped, worth_of
from looptune.oracle import Oracle
from looptune.propose import WIDE, ModelValue, beam, by_model, proposals, random_construction
from looptune.runtime.kernel import Kernel
from looptune.serial import nest_to_json
from looptune.target import TARGETS, Target
from looptune.workloads.generate import draw

SEED = 101
ROUNDS, SAMPLE_SECONDS = 7, 4e-4  # of every kernel; slow ones take one call a round
BEST, LED, RANDOM, TILES = 7, 5, 8, 4  # schedules of a problem, by where they come from
BEAM_WIDTH, BEAM_SECONDS = 3, 0.35
SAME, UNSTEADY = 0.03, 0.15  # most that equal kernels may differ by, and their samples spread
SHARES = {"avx512": 0.6, "avx2": 0.25, "xmm": 0.15}


def targets() -> dict[str, Target]:
    """What this machine runs, with its caches."""
    caches = host_target().cache_bytes
    found = {name: replace(target, cache_bytes=caches) for name, target in TARGETS.items()}
    return {name: target for name, target in found.items() if runs(target)}


def finished(state: Construction) -> Construction:
    """A construction that stops where it is."""
    return state if state.done else state.take(STOP)


def schedules_of(nest: Nest, target: Target, rng: np.random.Generator) -> dict[str, Construction]:
    """Constructions to measure, by the schedule's identity; not the default's."""
    start = Construction(nest, target)
    if not start.offers:
        return {}
    value = ModelValue(nest, target)
    stop = time.perf_counter() + BEAM_SECONDS
    states = beam(start, by_model(value, lambda: time.perf_counter() > stop), BEAM_WIDTH)
    liked = (finished(each.state) for each in sorted(states, key=lambda each: -each.score))
    policy = shipped()
    prior, judge = policy.log_probabilities, partial(worth_of, policy)
    led = (finished(each.state) for each in proposals(start, prior, judge, WIDE))
    walks = (random_construction(rng, start) for _ in range(4 * RANDOM))
    numbers = sorted(
        {min(int(rng.exponential(8)), len(start.offers) - 1) for _ in range(4 * TILES)}
    )
    tiles = (finished(start.take(int(number))) for number in rng.permutation(numbers))
    default = start.schedule.identity
    found: dict[str, Construction] = {}
    for source, count in ((led, LED), (liked, BEST), (walks, RANDOM), (tiles, TILES)):
        most = len(found) + count
        for state in source:
            if len(found) == most:
                break
            if state.schedule.identity != default:
                found.setdefault(state.schedule.identity, state)
    return found


def kernels_of(nest: Nest, target: Target, states: dict[str, Construction]) -> dict[str, Kernel]:
    """Verified kernels by the schedules' identity, the default's under "" and "again"; those of
    equal code once."""
    plan, default = plan_of(nest), Construction(nest, target).schedule
    oracle = Oracle(plan)
    found = {name: build(plan, [default], target) for name in ("", "again")}
    oracle.verify(found[""])
    codes = {found[""].stages}
    for name, state in states.items():
        try:
            kernel = build(plan, [state.schedule], target)
        except LoweringError:
            continue
        if kernel.stages not in codes:
            codes.add(kernel.stages)
            oracle.verify(kernel)
            found[name] = kernel
    return found


def measured(nest: Nest, kernels: dict[str, Kernel]) -> dict[str, Posterior] | None:
    """Each kernel against the default; None where the machine was disturbed."""
    sets = [random_arrays(plan_of(nest), seed) for seed in range(2)]
    samplers = {name: rotating_sampler(kernel, sets) for name, kernel in kernels.items()}
    found = interleave(samplers, rounds=ROUNDS, seconds=ROUNDS * SAMPLE_SECONDS * len(samplers))
    posteriors = {name: paired(found[""], each) for name, each in found.items() if name}
    same = posteriors.pop("again")
    unsteady = found[""].spread > UNSTEADY or abs(same.mean) > SAME
    return None if unsteady else posteriors


def line_of(nest: Nest, target: Target, rng: np.random.Generator) -> dict[str, object] | None:
    """A problem with its measured schedules, as the file has it; None if nothing is to be had."""
    states = schedules_of(nest, target, rng)
    kernels = kernels_of(nest, target, states)
    if len(kernels) < 3:
        return None
    posteriors = measured(nest, kernels) or measured(nest, kernels)
    if posteriors is None:
        return None
    rows = [
        {
            "decisions": decisions_of(states[name]),
            "actions": states[name].schedule.actions,
            "n": each.n, "mean": round(each.mean, 4), "sd": round(each.variance**0.5, 4),
        }
        for name, each in posteriors.items()
    ]  # fmt: skip
    return {"nest": nest_to_json(nest), "target": target.name, "threads": 1, "rows": rows}


def problems(seed: int) -> Iterator[tuple[int, Nest, Target]]:
    """Numbered problems without end, each from a seed of its own."""
    known = targets()
    shares = np.array([SHARES[name] for name in known])
    for number in range(1 << 31):
        rng = np.random.default_rng([seed, number])
        nest = draw(rng)
        target = known[str(rng.choice(list(known), p=shares / shares.sum()))]
        if in_domain(nest):
            yield number, nest, target


def header() -> dict[str, object]:
    """The first line of a file."""
    return {
        "schema": 1, "machine": asdict(fingerprint()), "seed": SEED,
        "caches": list(host_target().cache_bytes),
        "columns": "mean and sd of log(default's seconds / schedule's seconds) over n rounds",
    }  # fmt: skip


def collect(output: Path, nests: int, seed: int) -> None:
    """Append problems to a file until it has tried so many; it goes on where it stopped."""
    done = -1
    if output.exists():
        lines = output.read_text().splitlines()
        if json.loads(lines[0])["machine"] != json.loads(json.dumps(asdict(fingerprint()))):
            sys.exit(f"{output} is of another machine: measure into another file")
        done = max((json.loads(line)["number"] for line in lines[1:]), default=-1)
    else:
        output.write_text(json.dumps(header()) + "\n")
    todo = (each for each in problems(seed) if each[0] > done)
    rows = 0
    with output.open("a") as file, tqdm(total=nests, initial=done + 1, file=sys.stderr) as bar:
        for number, nest, target in todo:
            if number >= nests:
                break
            try:
                line = line_of(nest, target, np.random.default_rng([seed, number, 1]))
            except LooptuneError as reason:
                tqdm.write(f"{number}: {nest}: {type(reason).__name__}: {reason}", file=sys.stderr)
                continue
            if line is not None:
                rows += len(line["rows"])  # type: ignore[arg-type]
                file.write(json.dumps({"number": number, **line}, separators=(",", ":")) + "\n")
                file.flush()
            bar.update(number + 1 - bar.n)
            bar.set_postfix_str(f"{rows} rows", refresh=False)


def main() -> None:
    """Collect or pack."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nests", type=int, default=2500, help="problems to try")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pack", type=Path, help="a finished file to compress")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.pack is None:
        collect(args.output, args.nests, args.seed)
        return
    with gzip.GzipFile(args.output, "wb", mtime=0) as file:
        file.write(args.pack.read_bytes())


if __name__ == "__main__":
    main()
