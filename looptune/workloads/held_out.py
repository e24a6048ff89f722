"""What is only ever tested on: the shipped suites, a fifth of LoopTune's matmuls, matmuls unlike
those, and the index patterns of the tensor contractions.

The split is the committed `held_out.json`; `python -m looptune.workloads.held_out` writes it. A
problem is told by its canonical key, so names and duplicates do not matter; an epilogue or a
change of strides makes another problem, but not another pattern.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from looptune.errors import UnsupportedError
from looptune.ir import Nest
from looptune.workloads.matmul import matmul
from looptune.workloads.suites import load, shipped

SEED = 2197
SHARE = 0.2  # of LoopTune's matmuls, its 25 test shapes beside
KEY = 16  # digits of a nest's key that tell it
CONTRACTIONS = ("tensor_contraction", "mttkrp")
PLAIN = 3  # axes of a matmul: its patterns are not held out
UNLIKE = 35  # matmuls of each kind that LoopTune's data set has not
UNLIKE_POINTS = range(1 << 11, 1 << 29)


@dataclass(frozen=True)
class Split:
    """Keys of nests, and patterns of contractions, that nobody may train on."""

    keys: frozenset[str]
    patterns: frozenset[str]


@lru_cache(maxsize=1)
def split() -> Split:
    """The committed split."""
    found = json.loads((files("looptune.workloads") / "held_out.json").read_text())
    return Split(frozenset(found["keys"]), frozenset(found["patterns"]))


def is_held_out(nest: Nest) -> bool:
    """Whether a nest is for tests alone."""
    return nest.key[:KEY] in split().keys or pattern(nest) in split().patterns


def pattern(nest: Nest) -> str:
    """The axes in each operand in the order of its strides, the axes named by their place in the
    output and the inputs: `ac,cb->ab` for every matmul; two inputs in an order of their own."""
    orders = [
        sorted(
            (axis for axis in range(len(nest.axes)) if operand.stride_of(axis)),
            key=lambda axis: (-abs(operand.stride_of(axis)), axis),
        )
        for operand in (nest.output, *nest.inputs)
    ]
    words = [[orders[0], *inputs] for inputs in (orders[1:], orders[:0:-1])]
    return min(spelled(*word) for word in words)


def spelled(output: list[int], *inputs: list[int]) -> str:
    """A pattern with letters."""
    letters = {axis: chr(97 + at) for at, axis in enumerate(dict.fromkeys(sum(inputs, output)))}
    words = ["".join(letters[axis] for axis in word) for word in (*inputs, output)]
    return f"{','.join(words[:-1])}->{words[-1]}"


def paper_matmuls() -> tuple[str, ...]:
    """Names of the held-out fifth of LoopTune's matmuls, its 25 test shapes not among them."""
    test = {workload.plan().key for workload in load("looptune-test")}
    names = [w.id for w in load("looptune-all") if w.plan().key not in test]
    return tuple(sorted(random.Random(SEED).sample(names, round(SHARE * len(names)))))


def extent(rng: random.Random) -> int:
    """From 8 to 1,024, small ones as likely as large ones."""
    least = 1 << rng.randint(3, 9)
    return rng.randint(least, 2 * least)


def prime(most: int) -> int:
    """The largest prime that is no larger."""
    return next(n for n in range(most, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))


def unlike_matmuls() -> tuple[tuple[int, int, int], ...]:
    """M, N, K of matmuls outside of LoopTune's range: primes, 8 to 1,024, and skinny ones."""
    rng, found = random.Random(SEED), set[tuple[int, int, int]]()
    for kind in range(3):
        while len(found) < (kind + 1) * UNLIKE:
            sizes = [extent(rng) for _ in range(3)]
            if kind == 0:
                sizes = [prime(size) for size in sizes]
            if kind == 2:
                sizes[rng.randrange(3)] = rng.randint(1, 16)
            m, n, k = sizes
            if m * n * k in UNLIKE_POINTS:
                found.add((m, n, k))
    return tuple(sorted(found))


def computed() -> dict[str, object]:
    """The split's contents, from the suites."""
    named = {workload.id: workload for workload in load("looptune-all")}
    training = {"looptune-mm-train"}  # LoopTune's own, of which some fall into the fifth
    workloads = [w for w in shipped() if w.suite not in training]
    workloads += [named[name] for name in paper_matmuls()]
    keys: set[str] = set()
    patterns: set[str] = set()
    keys.update(matmul(*sizes).nests[0].key[:KEY] for sizes in unlike_matmuls())
    for workload in workloads:
        try:
            nests = workload.plan().nests
        except UnsupportedError:
            continue
        keys.update(nest.key[:KEY] for nest in nests)
        if workload.kind in CONTRACTIONS:
            patterns.update(pattern(nest) for nest in nests if len(nest.axes) > PLAIN)
    return {"seed": SEED, "keys": sorted(keys), "patterns": sorted(patterns)}


if __name__ == "__main__":
    text = json.dumps(computed(), indent=0)
    Path(__file__).with_name("held_out.json").write_text(text + "\n", encoding="utf-8")
