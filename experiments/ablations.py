"""What each part of the learner is worth, at equal steps on the cost model.

python -m experiments.ablations --steps 200000 --seeds 5 --output ablations.jsonl

Every cell trains with the single-file PPO and is asked greedily on problems that it has not seen:
the score is log(default's / schedule's cycles) by the cost model, within [-2, 2]. Printed are
interquartile means over seeds and problems with 95 % bootstrap intervals over both. A row a cell
and seed; those that the output holds are not run again.

graph            Construct-v0, two layers of messages, masked, targets of all kinds
no messages      the same network without its layers of messages
flat             a perceptron over the same arrays, flattened; it sees no edges
unmasked         illegal actions may be chosen: nothing happens, 0.05 is lost, 64 end the episode
untold           without the features that name target and threads; what is relative to them stays
x lanes [untold] trained on AVX2 (8 lanes) or its 128-bit half (4), asked on both
paper: ...       LoopTune's matmuls in its own space (flat, unmasked, from the untuned nest), in
                 LoopNest-v0 from both starts, and in Construct-v0
cloned [+ PPO]   a clone of the cost model's beam on one problem for every 100 steps, which are
                 not counted as steps; [the same, then PPO]
beam             the cost model's beam itself, without a network
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TransformObservation
from tqdm import tqdm

from looptune.construct import Construction
from looptune.envs.construct import ConstructEnv
from looptune.envs.loopnest import LoopNestEnv
from looptune.envs.looptune_v0 import LoopTuneEnv, paper_problems
from looptune.envs.problem import Problem, Problems, drawn, listed, on_any_machine, pooled
from looptune.envs.rewards import clipped, modelled
from looptune.graph import TARGET_FEATURES, ActionTable, Observation, shapes
from looptune.lower import GENERATOR_VERSION
from looptune.models.architecture import Architecture
from looptune.models.clone import CloneConfig, clone, from_beam
from looptune.models.flat import FlatNetwork, paper_network, paper_rows
from looptune.models.network import PolicyNetwork, stacked
from looptune.models.ppo import PPOConfig, train
from looptune.propose import ModelValue, expert
from looptune.provenance import commit
from looptune.target import TARGETS, Target

POOL, ASKED = 1000, 32  # problems to train on, and to be asked
ASKED_SEED = 1_000_000
WIDTH = 2  # of the cost model's beam
SAMPLES = 2000  # of a bootstrap
FLAT = ("nodes", "candidates", "world")
Environment = gymnasium.Env[Observation, Any]


def on(target: Target) -> Problems:
    """Training problems for one target and thread."""
    return lambda rng: Problem(drawn(rng), target)


SOURCES: dict[str, Problems] = {
    "any": on_any_machine,
    "8 lanes": on(TARGETS["avx2"]),
    "4 lanes": on(TARGETS["xmm"]),
    "paper": lambda rng: Problem(paper_problems(rng).nest, TARGETS["avx2"]),
}


@dataclass(frozen=True)
class Cell:
    """What is trained, how, on what, and asked on what."""

    space: Literal["construct", "loopnest", "looptune"] = "construct"
    network: Literal["graph", "no messages", "flat"] = "graph"
    masked: bool = True
    told: bool = True
    untuned: bool = False
    learns: tuple[str, ...] = ("ppo",)
    source: str = "any"
    asked: tuple[str, ...] = ("any",)


LANES = ("8 lanes", "4 lanes")
PAPER = ("paper",)
CELLS = {
    "graph": Cell(),
    "no messages": Cell(network="no messages"),
    "flat": Cell(network="flat"),
    "unmasked": Cell(masked=False),
    "untold": Cell(told=False),
    **{lanes: Cell(source=lanes, asked=LANES) for lanes in LANES},
    **{f"{lanes} untold": Cell(told=False, source=lanes, asked=LANES) for lanes in LANES},
    "paper: LoopTune-v0": Cell("looptune", "flat", False, source="paper", asked=PAPER),
    "paper: LoopNest-v0, untuned": Cell("loopnest", untuned=True, source="paper", asked=PAPER),
    "paper: LoopNest-v0": Cell("loopnest", source="paper", asked=PAPER),
    "paper: Construct-v0": Cell(source="paper", asked=PAPER),
    "cloned": Cell(learns=("cloning",)),
    "cloned + PPO": Cell(learns=("cloning", "ppo")),
}


class Untuned(gymnasium.Wrapper[Observation, Any, Observation, Any]):
    """Episodes begin with the nest as it is written."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new episode."""
        return self.env.reset(seed=seed, options={**(options or {}), "start": "untuned"})


def environment_of(cell: Cell, problems: Problems) -> Environment:
    """An environment as the cell sees it."""
    if cell.space == "looptune":
        rows: Environment = paper_rows(LoopTuneEnv(problems), cell.masked)
        return rows
    found: Environment = {"construct": ConstructEnv, "loopnest": LoopNestEnv}[cell.space](problems)
    found = Untuned(found) if cell.untuned else found

    def seen(observation: Observation) -> Observation:
        changed = dict(observation)
        if not cell.masked:
            changed["action_mask"] = np.ones_like(observation["action_mask"])
        if not cell.told:
            changed["world"] = observation["world"].copy()
            changed["world"][TARGET_FEATURES] = 0.0
        return changed

    wrapped: Environment = TransformObservation(found, seen, None)
    return wrapped


def network_of(cell: Cell) -> torch.nn.Module:
    """The cell's network, with new weights."""
    made: torch.nn.Module
    if cell.space == "looptune":
        made = paper_network()
        return made
    table: ActionTable = {"construct": ConstructEnv, "loopnest": LoopNestEnv}[cell.space].table
    if cell.network == "flat":
        sizes = {name: int(np.prod(shapes(table)[name][0])) for name in FLAT}
        made = FlatNetwork(sizes, table.size)
    else:
        made = PolicyNetwork(Architecture(table, layers=2 if cell.network == "graph" else 0))
    return made


def trained(
    cell: Cell, steps: int, seed: int, report: Callable[[Mapping[str, float]], object]
) -> torch.nn.Module:
    """The cell's network after its stages."""
    torch.manual_seed(seed)
    network = network_of(cell)
    if "cloning" in cell.learns:
        assert isinstance(network, PolicyNetwork)
        pool = pooled(SOURCES[cell.source], max(8, steps // 100), seed + 2)
        starts = [Construction(each.nest, each.target, each.threads) for each in pool]
        clone(network, from_beam(starts, WIDTH), CloneConfig(epochs=20, seed=seed), report)
    if "ppo" in cell.learns:
        problems = listed(pooled(SOURCES[cell.source], POOL, seed + 1))
        settings = PPOConfig(steps=steps, seed=seed)
        environments = [environment_of(cell, problems) for _ in range(settings.environments)]
        train(network, environments, settings, report)
    return network


def scores(cell: Cell, network: torch.nn.Module, problems: Sequence[Problem]) -> list[float]:
    """Of the most probable decisions on each problem, float in [-2, 2]."""
    environments = [environment_of(cell, listed([problem])) for problem in problems]
    seen = [environment.reset(seed=0)[0] for environment in environments]
    going = list(range(len(problems)))
    while going:
        with torch.no_grad():
            logits, _ = network(stacked([seen[at] for at in going]))
        for at, action in zip(list(going), logits.argmax(1).tolist(), strict=True):
            seen[at], _, done, cut, info = environments[at].step(np.int64(action))
            # The same state would be answered by the same illegal action, for ever.
            if done or cut or info["illegal"]:
                going.remove(at)
    schedules = [environment.unwrapped.state.schedule for environment in environments]  # type: ignore[attr-defined]
    return [clipped(modelled(*pair)) for pair in zip(problems, schedules, strict=True)]


def beam_scores(problems: Sequence[Problem]) -> list[float]:
    """What the cost model's beam finds."""
    found = []
    for each in problems:
        start = Construction(each.nest, each.target, each.threads)
        value = ModelValue(each.nest, each.target, each.threads)
        found.append(clipped(expert(start, value, WIDTH)[0].score))
    return found


def interquartile(values: np.ndarray) -> float:
    """The mean of the middle half."""
    ordered, cut = np.sort(values, axis=None), values.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Interquartile mean of scores (seeds, problems), and its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    means = []
    for _ in range(SAMPLES):
        rows, columns = (rng.integers(size, size=size) for size in values.shape)
        means.append(interquartile(values[np.ix_(rows, columns)]))
    low, high = np.percentile(means, [2.5, 97.5])
    return interquartile(values), float(low), float(high)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that there are; one that was not finished is not."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def row_of(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Train and ask one cell."""
    cell = CELLS[name]
    began = time.monotonic()
    with tqdm(total=steps, desc=f"{name}, seed {seed}", file=sys.stderr, disable=None) as bar:
        network = trained(cell, steps, seed, lambda v: bar.update(v.get("steps", bar.n) - bar.n))
    seconds = time.monotonic() - began
    asked = {
        each: scores(cell, network, pooled(SOURCES[each], ASKED, ASKED_SEED)) for each in cell.asked
    }  # fmt: skip
    return {"cell": name, "seed": seed, "steps": steps, "seconds": round(seconds, 1),
            "scores": asked}  # fmt: skip


def beam_row(steps: int) -> dict[str, Any]:
    """The beam on all problems that are asked."""
    began = time.monotonic()
    asked = {each: beam_scores(pooled(SOURCES[each], ASKED, ASKED_SEED)) for each in SOURCES}
    seconds = round(time.monotonic() - began, 1)
    return {"cell": "beam", "seed": 0, "steps": steps, "seconds": seconds, "scores": asked}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Interquartile means by cell and set."""
    lines = [
        "| cell | asked on | seeds | score | 95 % | seconds a seed |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["cell"] for row in rows):
        mine = [row for row in rows if row["cell"] == name]
        seconds = float(np.mean([row["seconds"] for row in mine]))
        for asked in mine[0]["scores"]:
            values = np.array([row["scores"][asked] for row in mine])
            mean, low, high = interval(values)
            lines.append(
                f"| {name} | {asked} | {len(mine)} | {mean:.3f} | {low:.3f} to {high:.3f} "
                f"| {seconds:.0f} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="rows, one JSON a line")
    parser.add_argument("--cells", help="comma-separated; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(CELLS) if args.cells is None else args.cells.split(",")
    same = (args.steps, GENERATOR_VERSION)
    rows = [r for r in rows_of(args.output) if (r["steps"], r.get("generator")) == same]
    done = {(row["cell"], row["seed"]) for row in rows}
    wanted: list[Callable[[], dict[str, Any]]] = []
    if ("beam", 0) not in done:
        wanted.append(partial(beam_row, args.steps))
    for seed in range(args.seeds):
        for name in names:
            if (name, seed) not in done:
                wanted.append(partial(row_of, name, args.steps, seed))
    for made in wanted:
        rows.append({**made(), "generator": GENERATOR_VERSION, "commit": commit()})
        with args.output.open("a") as file:
            file.write("\n" + json.dumps(rows[-1]) + "\n")  # after a line that was not finished
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
