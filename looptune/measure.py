"""Time: contenders interleaved in one run, and the machine's peak to set them against.

Machines are shared and noisy, so nothing is compared across runs: every round times each
contender once, in rotating order, and ratios are taken within rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from looptune.backends import backend_for
from looptune.dtypes import DType, is_whole
from looptune.errors import ArgumentError
from looptune.ir import Plan
from looptune.legalize import legalize
from looptune.program import Const, Fma, Loop, Op, Program, Set
from looptune.runtime.call import empty_output, seconds_of, seconds_of_code
from looptune.runtime.kernel import Kernel
from looptune.scalars import real
from looptune.target import Target

Clock = Callable[[], float]
Sampler = Callable[[int], float]  # calls -> seconds for all of them
ROUNDS = 21  # of a comparison
NOISE = 0.05  # of the logarithm: an interval wider than that tells nothing
MOST_COPIES = 64  # sets of operands that are cold
LONGEST_REST, REST = 1.0, 0.005  # seconds: of `until_idle`, and of its steps
PEAK_ITERATIONS = 20_000
PEAK_FMAS = 240


@dataclass(frozen=True)
class Samples:
    """Seconds a call of one contender, one entry a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle of the rounds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float((high - low) / self.median)


def python_sampler(call: Callable[[], object], clock: Clock = time.perf_counter) -> Sampler:
    """Time `call` as a user calls it, from Python."""

    def sample(calls: int) -> float:
        start = clock()
        for _ in range(calls):
            call()
        return clock() - start

    return sample


def interleave(
    contenders: Mapping[str, Sampler],
    *,
    rounds: int = 15,
    seconds: float = 0.5,
    rest: Callable[[], None] | None = None,
) -> dict[str, Samples]:
    """Time the contenders in turn, `rounds` times, about `seconds` in all.

    Calls per sample are set once, from a first timing, so that each contender gets an equal
    share of the time. With `rest` that is called before each sample, and then a sample is taken
    that does not count: idle threads of the contender before spin for a while, on cores that this
    one needs, and the scheduler takes milliseconds to spread those that wake.
    """
    given = real(seconds)
    timed = given is not None and 0 <= given < math.inf
    if not contenders or rounds < 1 or not timed:
        raise ArgumentError(
            f"{len(contenders)} contenders, rounds={rounds}, seconds={seconds!r}: "
            "at least one contender, one round and 0 seconds would do"
        )
    share = seconds / rounds / len(contenders)
    calls = {}
    for name, sample in contenders.items():
        if rest:
            rest()
        sample(1)
        once = min(sample(1) for _ in range(3))
        calls[name] = max(1, min(1_000_000, round(share / max(once, 1e-8))))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if rest:
                rest()
                contenders[name](calls[name])
            found[name].append(contenders[name](calls[name]) / calls[name])
    return {name: Samples(tuple(values)) for name, values in found.items()}


def until_idle(
    cpu_clock: Clock = time.process_time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until this process uses no processor time, but `LONGEST_REST` at most.

    Idle threads of OpenBLAS spin for 2**28 cycles, some 110 ms, on a core that the next contender
    needs.
    """
    for _ in range(round(LONGEST_REST / REST)):
        before = cpu_clock()
        sleep(REST)
        if cpu_clock() - before < REST / 10:
            return


def ratio(other: Samples, ours: Samples) -> float:
    """How many times faster ours is: the median over rounds of other / ours."""
    rounds = zip(other.seconds, ours.seconds, strict=True)
    return float(np.median([theirs / mine for theirs, mine in rounds]))


@dataclass(frozen=True)
class Posterior:
    """Samples of log(anchor / candidate), one a round: how many, their mean and variance."""

    n: int
    mean: float
    variance: float

    @property
    def half_width(self) -> float:
        """Half of the mean's 95 % interval, by Student's distribution; infinite for one sample."""
        if self.n < 2:
            return math.inf
        return student(self.n - 1) * math.sqrt(self.variance / (self.n - 1))

    @property
    def lower(self) -> float:
        """What the mean is at least, by its interval: above 0 the candidate is surely faster."""
        return self.mean - self.half_width

    @property
    def verdict(self) -> Literal["faster", "slower", "within noise"]:
        """Whether the candidate is faster than the anchor: not if the interval holds 0."""
        if self.lower > 0:
            return "faster"
        return "slower" if self.mean + self.half_width < 0 else "within noise"

    @property
    def noisy(self) -> bool:
        """Whether the machine is too noisy to tell `NOISE` apart."""
        return self.half_width > NOISE

    def merged(self, other: Posterior) -> Posterior:
        """The posterior of both's samples (Chan, Golub and LeVeque's update of moments, 1983)."""
        n = self.n + other.n
        apart = other.mean - self.mean
        mean = self.mean + apart * other.n / n
        squares = self.n * self.variance + other.n * other.variance
        return Posterior(n, mean, (squares + apart**2 * self.n * other.n / n) / n)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, to about 2 % from 3 degrees of freedom on
    (the first terms of its expansion in their inverse, Abramowitz and Stegun 26.7.5)."""
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def paired(anchor: Samples, candidate: Samples) -> Posterior:
    """The posterior of a candidate that was timed in the same rounds as its anchor."""
    pairs = zip(anchor.seconds, candidate.seconds, strict=True)
    logs = np.log([theirs / ours for theirs, ours in pairs])
    return Posterior(len(logs), float(logs.mean()), float(logs.var()))


def compare_samplers(
    contenders: Mapping[str, Sampler], *, seconds: float, rounds: int = ROUNDS
) -> dict[str, Posterior]:
    """Each contender but the first against the first.

    The number of rounds is fixed beforehand: to look in between, and to stop once an interval
    leaves 0 out, finds a difference between equals one time in three.
    """
    anchor, *others = contenders
    found = interleave(contenders, rounds=rounds, seconds=seconds)
    return {name: paired(found[anchor], found[name]) for name in others}


def compare(
    kernels: Mapping[str, Kernel],
    *,
    seconds: float = 0.5,
    cache: Literal["hot", "cold"] = "hot",
    seed: int = 0,
) -> dict[str, Posterior]:
    """How kernels of one plan compare with the first of them, timed in turns: a posterior for each
    of the others, by name; the first, the baseline, has none.

    Samples are paired by rounds, because what disturbs one disturbs its neighbour, too. With
    `cache="cold"` calls rotate through so many operands that none is found in cache. Raises
    `ArgumentError` for fewer than two kernels, or of different plans.
    """
    if not isinstance(kernels, Mapping) or not all(isinstance(k, Kernel) for k in kernels.values()):
        raise ArgumentError(f"compare wants kernels by name, not {kernels!r}")
    if len(kernels) < 2 or len({kernel.plan.key for kernel in kernels.values()}) > 1:
        raise ArgumentError("compare wants at least two kernels, all of one plan")
    if cache not in ("hot", "cold"):
        raise ArgumentError(f"cache={cache!r}; 'hot' or 'cold' would do")
    first = next(iter(kernels.values()))
    sets = rotating_arrays(first.plan, first.target, cold=cache == "cold", seed=seed)
    contenders = {name: rotating_sampler(kernel, sets) for name, kernel in kernels.items()}
    return compare_samplers(contenders, seconds=seconds)


def rotating_arrays(
    plan: Plan, target: Target, *, cold: bool, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Two sets of operands, or where they are to be cold, twice what the last cache holds."""
    copies = 2
    if cold:
        wanted = 2 * target.cache_bytes[2] // max(1, plan.min_bytes)
        copies = max(2, min(MOST_COPIES, wanted))
    return [random_arrays(plan, seed + number) for number in range(copies)]


def rotating_sampler(kernel: Kernel, sets: Sequence[Mapping[str, np.ndarray]]) -> Sampler:
    """Time the kernel alone, each call on the next set of operands."""
    plan = kernel.plan
    pointers = [
        kernel.pointers([arrays[t.name] for t in plan.inputs], arrays[plan.output.name])
        for arrays in sets
    ]
    entry = kernel.entry_or_raise()
    return lambda calls: entry.seconds(pointers, calls, kernel.threads)


def roofline_seconds(kernel: Kernel, peak: float) -> float:
    """The time that no call can undercut: all operations at the peak of all threads."""
    return kernel.flops / (peak * kernel.threads)


@contextmanager
def peer_threads(threads: int) -> Iterator[None]:
    """Let NumPy's BLAS and every OpenMP runtime in the process use as many threads as we do."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads):
        yield


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean of those that are positive (an empty kernel has no rate); None of none."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def random_arrays(plan: Plan, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs, uniform in [-1, 1) or over all int8, and the output with the old values it
    accumulates to."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for tensor in (plan.output, *plan.inputs):
        array = empty_output(tensor)
        if is_whole(tensor.dtype):
            array[...] = rng.integers(-128, 128, tensor.shape)
        else:
            array[...] = rng.uniform(-1, 1, tensor.shape)
        arrays[tensor.name] = array
    return arrays


def kernel_sampler(kernel: Kernel, arrays: Mapping[str, np.ndarray]) -> Sampler:
    """Time the kernel alone, on its threads and without Python, where the extension is there."""
    inputs = [arrays[tensor.name] for tensor in kernel.plan.inputs]
    out = arrays[kernel.plan.output.name]
    return lambda calls: seconds_of(kernel, inputs, out, calls, kernel.threads)


def measure(kernel: Kernel, *, seconds: float = 0.2, seed: int = 0) -> Samples:
    """Seconds a call of the kernel alone, on random operands, the same in every call, that stay in
    cache if they fit. It takes some `seconds` in all."""
    arrays = random_arrays(kernel.plan, seed)
    found = interleave({"kernel": kernel_sampler(kernel, arrays)}, seconds=seconds)
    return found["kernel"]


def peak_program(target: Target, dtype: DType) -> Program:
    """A loop of independent register-only multiply-adds."""
    chains = target.vector_registers - 2
    one, zero = chains, chains + 1
    body: tuple[Op, ...] = tuple(Fma(i % chains, one, zero) for i in range(PEAK_FMAS))
    setup = (*(Const(i, 0.0) for i in range(chains)), Const(one, 1.0), Const(zero, 0.0))
    counter = 2
    ops: tuple[Op, ...] = (
        *setup,
        Set(counter, PEAK_ITERATIONS),
        Loop(counter, 1, body),
    )
    return Program(target, dtype, 0, 3, 0, 0, 1, ops)


@lru_cache(maxsize=16)
def peak_sampler(target: Target, dtype: DType) -> tuple[Sampler, int]:
    """A sampler of the peak loop, and the operations one call makes."""
    program = legalize(peak_program(target, dtype))
    code = backend_for(target)(program)
    flops = 2 * program.lanes * PEAK_FMAS * PEAK_ITERATIONS
    return (lambda calls: seconds_of_code(code, calls)), flops


def peak_flops(target: Target, dtype: DType = "float32", *, seconds: float = 0.2) -> float:
    """Most multiply-add operations a second of one core: the best of many short samples.

    In the type that sums of `dtype` are kept in; whole numbers count as float32.
    """
    sample, flops = peak_sampler(target, "float64" if dtype == "float64" else "float32")
    found = interleave({"peak": sample}, rounds=30, seconds=seconds)
    return flops / min(found["peak"].seconds)


PEAKS: dict[tuple[Target, DType], float] = {}  # the highest seen in this process


def highest_peak(target: Target, dtype: DType = "float32", *, again: bool = False) -> float:
    """`peak_flops`, asked for once in a process, or `again`; the highest answer so far.

    A clock that was low when the peak was measured makes it too low; never too high.
    """
    known = PEAKS.get((target, dtype), 0.0)
    if again or not known:
        known = max(known, peak_flops(target, dtype, seconds=0.02))
        PEAKS[target, dtype] = known
    return known
