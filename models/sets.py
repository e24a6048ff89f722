"""The sets that a policy is evaluated on: float32 nests, all of them held out.

LoopTune's 25 test matmuls with others of its range, matmuls of any other size, convolutions, and
contractions with batched matmuls. `looptune.workloads.held_out` keeps them out of training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from looptune.errors import ArgumentError, UnsupportedError
from looptune.graph import in_domain
from looptune.ir import Nest
from looptune.workloads.einsum import einsum
from looptune.workloads.held_out import SEED, is_held_out, paper_matmuls, unlike_matmuls
from looptune.workloads.matmul import matmul
from looptune.workloads.suites import Workload, load, shipped

FLOPS = range(1 << 12, 10**9)
PAPER, SUITES = 100, 72  # of LoopTune's held-out matmuls, and of each of the other sets
CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv2d_bn_relu", "conv2d_winograd", "depthwise_conv2d",
    "dilated_conv2d", "grouped_conv1d", "grouped_conv2d", "capsule_conv2d",
)  # fmt: skip
CONTRACTIONS = ("tensor_contraction", "batch_matmul", "einsum")
T = TypeVar("T")


@dataclass(frozen=True)
class NamedNest:
    """A nest with the name that tells where it comes from."""

    id: str
    nest: Nest


def evenly(items: Sequence[T], most: int | None) -> list[T]:
    """At most so many of them, evenly spread over their order."""
    if most is None or most >= len(items):
        return list(items)
    return [items[at * len(items) // most] for at in range(most)]


def of_suites(workloads: Iterable[Workload], kinds: Sequence[str]) -> list[NamedNest]:
    """Those of modest size that are one nest which a policy can see; no nest twice."""
    found: dict[str, NamedNest] = {}
    for workload in workloads:
        fits = workload.kind in kinds and workload.flops in FLOPS
        if not fits or workload.dtype != "float32":
            continue
        try:
            nests = workload.plan().nests
        except UnsupportedError:
            continue
        if len(nests) == 1 and in_domain(nests[0]):
            found.setdefault(nests[0].key, NamedNest(workload.id, nests[0]))
    return list(found.values())


def paper_set() -> list[NamedNest]:
    """LoopTune's 25, then some of the fifth of its others."""
    named = {workload.id: workload for workload in load("looptune-all")}
    others = [named[name] for name in evenly(paper_matmuls(), PAPER)]
    return of_suites((*load("looptune-test"), *others), ["matmul"])


def unlike_set() -> list[NamedNest]:
    """Matmuls of other sizes."""
    return [
        NamedNest(f"unlike/mm{m}_{k}_{n}", matmul(m, n, k).nests[0]) for m, n, k in unlike_matmuls()
    ]


def convolution_set() -> list[NamedNest]:
    """Convolutions of networks and benchmarks, of all kinds."""
    return evenly(of_suites(shipped(), CONVOLUTIONS), SUITES)


def contraction_set() -> list[NamedNest]:
    """Contractions, as they are and in other sizes, batched matmuls and other einsums."""
    return evenly([*of_suites(shipped(), CONTRACTIONS), *resized()], SUITES)


def resized() -> list[NamedNest]:
    """The contractions of held-out patterns in sizes of their own, drawn from a seed."""
    found = []
    for number, workload in enumerate(w for w in shipped() if w.suite == "tccg-small"):
        rng = random.Random(SEED + number)
        labels = workload.record["shape"]["sizes"]
        flops = 0
        while flops not in FLOPS:
            sizes = {label: rng.randint(4, 48) for label in labels}
            (nest,) = einsum(workload.record["einsum"], sizes=sizes).nests
            flops = nest.flops
        if is_held_out(nest):
            found.append(NamedNest(f"{workload.id}/resized", nest))
    return found


SETS: dict[str, Callable[[], list[NamedNest]]] = {
    "matmul": paper_set,
    "unlike-matmul": unlike_set,
    "convolution": convolution_set,
    "contraction": contraction_set,
}


def problems(name: str, most: int | None = None) -> list[NamedNest]:
    """The problems of a set, or so many of them; raises `ArgumentError` for an unknown set."""
    if name not in SETS:
        raise ArgumentError(f"set {name!r} is none of {list(SETS)}")
    return evenly(SETS[name](), most)
