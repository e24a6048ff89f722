"""What a machine can do at most: multiply-adds a second by type, bytes a second by footprint.

These are the two lines of the roofline model (Williams, Waterman and Patterson, 2009), measured on
so many threads at once, and kept in the database with the machine's fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Barrier

import numpy as np

from looptune.build import build
from looptune.database import Database
from looptune.default import default_schedule
from looptune.dtypes import DType
from looptune.host import fingerprint
from looptune.measure import Sampler, interleave, kernel_sampler, peak_sampler, python_sampler
from looptune.target import Target
from looptune.workloads.einsum import einsum

FOOTPRINTS = (16 << 10, 512 << 10, 8 << 20, 256 << 20)  # one for each level of most machines
LEAST_FOOTPRINT = 4 << 10
DTYPES: tuple[DType, ...] = ("float32", "float64")
ROUNDS = 30
BRIEF = 0.02  # seconds: of one bandwidth among many


@dataclass(frozen=True)
class Roofline:
    """Of `threads` cores together: FLOPS by dtype, and bytes a second that copies read and write,
    by the bytes that all of them touch."""

    target: str
    threads: int
    flops: Mapping[str, float]
    bandwidth: Mapping[int, float]


def measure_roofline(target: Target, threads: int = 1, seconds: float = 0.2) -> Roofline:
    """Measure a roofline, about `seconds` for each number: the best of many short samples."""
    with ThreadPoolExecutor(threads) as pool:
        flops: dict[str, float] = {
            dtype: peak(target, dtype, threads, pool, seconds) for dtype in DTYPES
        }
        bandwidth = {size: copying(target, size, threads, pool, seconds) for size in FOOTPRINTS}
    return Roofline(target.name, threads, flops, bandwidth)


def peak(
    target: Target, dtype: DType, threads: int, pool: ThreadPoolExecutor, seconds: float
) -> float:
    """FLOPS of so many threads that do nothing but multiply-adds."""
    sample, flops = peak_sampler(target, dtype)
    found = interleave({"peak": together([sample] * threads, pool)}, rounds=ROUNDS, seconds=seconds)
    return threads * flops / min(found["peak"].seconds)


def copying(
    target: Target, nbytes: int, threads: int, pool: ThreadPoolExecutor, seconds: float
) -> float:
    """Bytes a second that copies by so many threads, each of its part of `nbytes`, read and write:
    NumPy's, which goes around the caches where that is faster, or ours, which starts sooner."""
    count = max(1, nbytes // (8 * threads))
    plan = einsum("i->i", sizes={"i": count})
    kernel = build(plan, [default_schedule(plan.nests[0], target)], target)
    contenders: dict[str, list[Sampler]] = {"numpy": [], "kernel": []}
    for _ in range(threads):
        source, copy = np.ones(count, np.float32), np.empty(count, np.float32)
        arrays = {plan.output.name: copy, plan.inputs[0].name: source}
        contenders["kernel"].append(kernel_sampler(kernel, arrays))
        contenders["numpy"].append(python_sampler(partial(np.copyto, copy, source)))
    samplers = {name: together(each, pool) for name, each in contenders.items()}
    found = interleave(samplers, rounds=ROUNDS, seconds=seconds)
    return 8 * count * threads / min(min(each.seconds) for each in found.values())


def bandwidth_at(target: Target, nbytes: int, threads: int = 1) -> float:
    """Bytes a second that copies of a footprint like `nbytes` read and write: of the nearest power
    of two, from `LEAST_FOOTPRINT` to the largest of `FOOTPRINTS`, measured once in a process."""
    nearest = 1 << round(math.log2(max(1, nbytes)))
    return copied(target, min(max(LEAST_FOOTPRINT, nearest), FOOTPRINTS[-1]), threads)


@lru_cache(maxsize=64)
def copied(target: Target, nbytes: int, threads: int) -> float:
    """`copying`, measured briefly and kept."""
    with ThreadPoolExecutor(threads) as pool:
        return copying(target, nbytes, threads, pool, BRIEF)


def together(samplers: Sequence[Sampler], pool: ThreadPoolExecutor) -> Sampler:
    """Time all of them at once, each in a thread of its own: the slowest."""
    if len(samplers) == 1:
        return samplers[0]
    start = Barrier(len(samplers))

    def sample(calls: int) -> float:
        def one(each: Sampler) -> float:
            start.wait()
            return each(calls)

        return max(pool.map(one, samplers))

    return sample


def keep(database: Database, found: Roofline) -> None:
    """Keep a roofline of this machine, instead of what was kept before."""
    rates = {f"flops {dtype}": rate for dtype, rate in found.flops.items()}
    rates |= {f"bytes {size}": rate for size, rate in found.bandwidth.items()}
    database.keep_rates(fingerprint().digest, found.target, found.threads, rates)


def kept(database: Database, target: Target, threads: int = 1) -> Roofline | None:
    """The roofline of this machine that was kept, if there is one."""
    rates = database.rates(fingerprint().digest, target.name, threads)
    if not rates:
        return None
    flops: dict[str, float] = {}
    bandwidth: dict[int, float] = {}
    for kind, rate in rates.items():
        what, _, name = kind.partition(" ")
        if what == "flops":
            flops[name] = rate
        elif name.isdecimal():
            bandwidth[int(name)] = rate
    return Roofline(target.name, threads, flops, dict(sorted(bandwidth.items())))
