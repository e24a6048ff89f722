"""`looptune bench`: contenders interleaved on a suite of workloads, every result checked."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from looptune.errors import UnsupportedError, VerificationError
from looptune.host import fingerprint
from looptune.ir import Nest, Operand, Plan
from looptune.lower import GENERATOR_VERSION
from looptune.measure import (
    Sampler,
    Samples,
    geomean,
    interleave,
    kernel_sampler,
    peak_flops,
    peer_threads,
    python_sampler,
    random_arrays,
    ratio,
    until_idle,
)
from looptune.oracle import Oracle
from looptune.provenance import commit
from looptune.roofline import bandwidth_at
from looptune.runtime.call import call_path
from looptune.runtime.kernel import Kernel
from looptune.target import Target
from looptune.tune import optimize
from looptune.workloads.suites import PLANS, Workload, tupled

CONVOLUTIONS = {kind for kind in PLANS if "conv" in kind and "capsule" not in kind}
Arrays = dict[str, np.ndarray]
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is compared and how long: saved beside the rows."""

    suite: str
    against: tuple[str, ...] = ("numpy",)
    threads: int = 1
    target: str | None = None
    rounds: int = 15
    seconds: float = 0.5


@dataclass(frozen=True)
class Row:
    """One workload. GFLOPS are medians; `ratio` is per peer, from Python, in one run.

    `fraction_of_bandwidth` is how fast the operands, each counted once, pass through the kernel,
    over what copies of as many bytes by as many threads read and write (`bandwidth_at`). It is over
    1 where a kernel reads more than it writes, since half of a copy is writes, which cost more, and
    where strides leave part of an operand unread.
    """

    id: str
    kind: str
    dtype: str
    order: str
    gflops: float
    kernel_gflops: float
    fraction_of_peak: float
    fraction_of_bandwidth: float
    spread: float
    codegen_s: float
    tune_s: float
    instructions: int
    correct: bool
    peers: dict[str, dict[str, float]]
    error: str = ""


def matrix_views(nest: Nest, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Left, right and result of the matrix product, or stack of them, that a nest is."""
    if len(nest.inputs) != 2 or nest.accumulate or not all(map(plain, nest.operands)):
        return None
    out, a, b = ([axis_of(dim.coefficients) for dim in op.dims] for op in nest.operands)
    batch = [x for x in out if x in a and x in b]
    m = [x for x in out if x in a and x not in b]
    n = [x for x in out if x in b and x not in a]
    k = [x for x in a if x in b and x not in out]
    if max(len(m), len(n), len(k)) > 1 or len(out) != len(batch + m + n):
        return None
    sides = ((a, batch + m + k), (b, batch + k + n), (out, batch + m + n))
    if any(set(have) != set(want) for have, want in sides):
        return None
    if not k or (batch and not (m and n)):
        return None
    names = (nest.inputs[0].name, nest.inputs[1].name, nest.output.name)
    left, right, result = (
        arrays[name].transpose([have.index(x) for x in want])
        for name, (have, want) in zip(names, sides, strict=True)
    )
    return left, right, result


def plain(operand: Operand) -> bool:
    """Whether every dimension is walked by one axis, from index 0 in steps of one."""
    return all(
        dim.offset == 0 and [c for c in dim.coefficients if c] == [1] for dim in operand.dims
    )


def axis_of(coefficients: tuple[int, ...]) -> int:
    """The axis of a plain dimension."""
    return coefficients.index(1)


def numpy_call(plan: Plan, arrays: Arrays) -> Call:
    """NumPy's best way for a contraction; it has none for convolutions and what follows one, and
    none that accumulates in a wider type."""
    refuse_unlike(plan, "NumPy", ("float32", "float64"))
    sides = matrix_views(plan.nests[0], arrays) if len(plan.nests) == 1 else None
    if sides:
        left, right, result = sides
        if result.ndim == 0:
            return lambda: np.dot(left, right)
        return lambda: np.matmul(left, right, out=result)
    if not plan.spec:
        raise UnsupportedError("NumPy has no call for what is no matmul and no einsum")
    inputs = [arrays[tensor.name] for tensor in plan.inputs]
    out = arrays[plan.output.name]
    path = np.einsum_path(plan.spec, *inputs, optimize="optimal")[0]
    return lambda: np.einsum(plan.spec, *inputs, out=out, optimize=path)


def refuse_unlike(plan: Plan, peer: str, dtypes: Sequence[str]) -> None:
    """Raise `UnsupportedError` for a plan that a peer has no one call for."""
    if plan.dtype not in dtypes or any(nest.epilogue for nest in plan.nests):
        raise UnsupportedError(f"{peer} has no one call for {plan.dtype} or for an epilogue")


def torch_call(workload: Workload, plan: Plan, arrays: Arrays) -> Call:
    """Torch's way: `matmul` into views, `einsum`, or its convolution."""
    import torch

    refuse_unlike(plan, "torch", ("float32", "float64"))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inputs = [tensors[tensor.name] for tensor in plan.inputs]
    if workload.kind in CONVOLUTIONS:
        return torch_convolution(workload, inputs)
    sides = matrix_views(plan.nests[0], arrays) if len(plan.nests) == 1 else None
    if sides:
        left, right, result = map(torch.from_numpy, sides)
        if result.ndim == 0:
            return lambda: torch.dot(left, right)
        return lambda: torch.matmul(left, right, out=result)
    if not plan.spec:
        raise UnsupportedError(f"torch has no call for {workload.kind}")
    return lambda: torch.einsum(plan.spec, *inputs)


def torch_channels_last(workload: Workload, plan: Plan, arrays: Arrays) -> Call:
    """Torch's 2-D convolution with image and weights already in its channels-last format."""
    import torch

    refuse_unlike(plan, "torch", ("float32", "float64"))
    if workload.kind not in CONVOLUTIONS or len(plan.output.shape) != 4:
        raise UnsupportedError(f"torch has no channels-last call for {workload.kind}")
    image, weights = (torch.from_numpy(arrays[tensor.name]) for tensor in plan.inputs)
    if str(workload.record.get("layout", "NC")).endswith("C"):
        image = torch.movedim(image, -1, 1)
    image = image.contiguous(memory_format=torch.channels_last)
    weights = weights.contiguous(memory_format=torch.channels_last)
    return torch_convolution(workload, [image, weights], moved=True)


def as_list(value: Any) -> list[Any]:
    """A JSON number or list as a list."""
    return value if isinstance(value, list) else [value]


def torch_convolution(workload: Workload, inputs: Sequence[Any], moved: bool = False) -> Call:
    """`torch.nn.functional.conv*d` on the workload's layout, padded asymmetrically if need be.

    `moved` says that the channels are already where torch wants them.
    """
    from torch.nn import functional

    shape = workload.record["shape"]
    image, weights = inputs
    if not moved and str(workload.record.get("layout", "NC")).endswith("C"):
        image = image.movedim(-1, 1)
    rank = image.ndim - 2
    padding = [p if isinstance(p, list) else [p, p] for p in as_list(shape["padding"])]
    padding = padding * (rank // len(padding))
    flat = [side for pair in reversed(padding) for side in pair]
    options = {
        "stride": tupled(shape["stride"]),
        "dilation": tupled(shape.get("dilation", 1)),
        "groups": shape.get("groups", 1),
    }
    before = [pair[0] for pair in padding]
    if "transpose" in workload.kind:
        call = getattr(functional, f"conv_transpose{rank}d")
        return lambda: call(image, weights, padding=before, **options)
    call = getattr(functional, f"conv{rank}d")
    if all(first == last for first, last in padding):
        return lambda: call(image, weights, padding=before, **options)
    return lambda: call(functional.pad(image, flat), weights, **options)


PEERS: dict[str, Callable[[Workload, Plan, Arrays], Call]] = {
    "numpy": lambda workload, plan, arrays: numpy_call(plan, arrays),
    "torch": torch_call,
    "torch-channels-last": torch_channels_last,
}


@dataclass(frozen=True)
class Comparison:
    """Times of a kernel, from Python ("looptune") and alone ("kernel"), and of its peers, in one
    interleaved run; `peak` are the operations a second of one core at most."""

    kernel: Kernel
    times: dict[str, Samples]
    peak: float

    @property
    def rate(self) -> float:
        """Operations a second of the kernel alone."""
        return self.kernel.flops / self.times["kernel"].median

    @property
    def fraction_of_peak(self) -> float:
        """Share of what its threads' cores can do."""
        return self.rate / self.peak / self.kernel.threads

    def ratio(self, peer: str) -> float | None:
        """A peer's time over the kernel's, both from Python; None for a peer without a call."""
        return ratio(self.times[peer], self.times["looptune"]) if peer in self.times else None


def compared(
    kernel: Kernel, peers: Mapping[str, Callable[[Arrays], Call]], peak: float,
    *, rounds: int = 15, seconds: float = 0.5,
) -> Comparison:  # fmt: skip
    """Time a kernel beside peers on its arrays and threads; those that raise `UnsupportedError` are
    left out."""
    arrays = random_arrays(kernel.plan)
    inputs = [arrays[tensor.name] for tensor in kernel.plan.inputs]
    out = arrays[kernel.plan.output.name]
    contenders: dict[str, Sampler] = {
        "looptune": python_sampler(lambda: kernel(*inputs, out=out)),
        "kernel": kernel_sampler(kernel, arrays),
    }
    for name, call in peers.items():
        with suppress(UnsupportedError):
            contenders[name] = python_sampler(call(arrays))
    with peer_threads(kernel.threads):
        rest = until_idle if kernel.threads > 1 else None
        times = interleave(contenders, rounds=rounds, seconds=seconds, rest=rest)
    return Comparison(kernel, times, peak)


def bench_row(workload: Workload, config: BenchConfig, target: Target, peak: float) -> Row:
    """Build, check and time one workload against the peers; `peak` is of one core."""
    plan = workload.plan()
    start = time.perf_counter()
    kernel = optimize(plan, strategy="default", target=target, threads=config.threads, verify=False)
    tuned = time.perf_counter() - start
    report = kernel.report
    assert report is not None, "optimize always leaves one"
    error = ""
    try:
        Oracle(plan).verify(kernel)
    except VerificationError as wrong:
        error = str(wrong)
    calls = {name: partial(PEERS[name], workload, plan) for name in config.against}
    found = compared(kernel, calls, peak, rounds=config.rounds, seconds=config.seconds)
    ours = found.times["looptune"]
    peers = {
        name: {
            "gflops": plan.flops / found.times[name].median / 1e9,
            "ratio": versus,
            "spread": found.times[name].spread,
        }
        for name in config.against
        if (versus := found.ratio(name)) is not None
    }
    bandwidth = bandwidth_at(target, plan.min_bytes, config.threads)
    return Row(
        id=workload.id,
        kind=workload.kind,
        dtype=plan.dtype,
        order="; ".join(schedule.order for schedule in kernel.schedules),
        gflops=plan.flops / ours.median / 1e9,
        kernel_gflops=found.rate / 1e9,
        fraction_of_peak=found.fraction_of_peak,
        fraction_of_bandwidth=plan.min_bytes / found.times["kernel"].median / bandwidth,
        spread=ours.spread,
        codegen_s=report.codegen_seconds,
        tune_s=tuned,
        instructions=sum(kernel.explain().instructions.values()),
        correct=not error,
        peers=peers,
        error=error,
    )


def bench(
    workloads: Sequence[Workload], config: BenchConfig, target: Target, progress: bool = True
) -> dict[str, object]:
    """Bench every workload; those that are not supported are listed, not dropped."""
    peaks = {dtype: peak_flops(target, dtype) for dtype in ("float32", "float64")}
    rows, skipped = [], []
    bar = tqdm(workloads, desc=config.suite, disable=None if progress else True, file=sys.stderr)
    for workload in bar:
        try:
            peak = peaks.get(workload.dtype, peaks["float32"])
            rows.append(bench_row(workload, config, target, peak))
        except UnsupportedError as reason:
            skipped.append({"id": workload.id, "reason": str(reason)})
    return result_json(rows, skipped, config, target, peaks)


def result_json(
    rows: Sequence[Row],
    skipped: Sequence[dict[str, str]],
    config: BenchConfig,
    target: Target,
    peaks: dict[str, float],
) -> dict[str, object]:
    """The form that later checks read: schema 1."""
    versus = {
        name: geomean([row.peers[name]["ratio"] for row in rows if name in row.peers])
        for name in config.against
    }
    return {
        "schema": 1,
        "generator": GENERATOR_VERSION,
        "commit": commit(),
        "machine": {
            **asdict(fingerprint()),
            "digest": fingerprint().digest,
            "target": target.name,
            "call_path": call_path(),
            "peak_gflops": {dtype: flops / 1e9 for dtype, flops in peaks.items()},
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "config": asdict(config),
        "rows": [asdict(row) for row in rows],
        "skipped": list(skipped),
        "geomean": {
            "fraction_of_peak": geomean([row.fraction_of_peak for row in rows]),
            "vs": versus,
        },
    }


def render(result: dict[str, object]) -> str:
    """The rows as a table, geometric means below."""
    rows: list[dict[str, object]] = result["rows"]  # type: ignore[assignment]
    config: dict[str, object] = result["config"]  # type: ignore[assignment]
    machine: dict[str, object] = result["machine"]  # type: ignore[assignment]
    means: dict[str, object] = result["geomean"]  # type: ignore[assignment]
    peers: tuple[str, ...] = config["against"]  # type: ignore[assignment]
    head = f"{'workload':44s} {'GFLOPS':>8s} {'peak':>6s} {'bw':>6s} {'spread':>7s} {'codegen':>8s}"
    lines = [f"{machine['target']} on {machine['cpu']}, calls: {machine['call_path']}", ""]
    lines.append(head + "".join(f" {'x ' + peer:>9s}" for peer in peers))
    for row in rows:
        cells: dict[str, dict[str, float]] = row["peers"]  # type: ignore[assignment]
        ratios = (
            f"{cells[peer]['ratio']:8.2f}x" if peer in cells else f"{'-':>9s}" for peer in peers
        )
        lines.append(
            f"{row['id']:44.44s} {row['gflops']:8.1f} {row['fraction_of_peak']:6.2f} "
            f"{row['fraction_of_bandwidth']:6.2f} {row['spread']:7.1%} "
            f"{1e3 * float(str(row['codegen_s'])):6.2f}ms " + " ".join(ratios)
            + ("" if row["correct"] else "  WRONG: " + str(row["error"]))
        )  # fmt: skip
    versus: dict[str, float | None] = means["vs"]  # type: ignore[assignment]
    found = [f"{means['fraction_of_peak']:.3f} of peak"] if means["fraction_of_peak"] else []
    found += [f"{value:.3f}x {name}" for name, value in versus.items() if value]
    lines += ["", f"geometric mean: {', '.join(found) or 'nothing was timed'}"]
    skipped: list[dict[str, str]] = result["skipped"]  # type: ignore[assignment]
    lines += [f"not supported: {item['id']}: {item['reason']}" for item in skipped]
    return "\n".join(lines)
