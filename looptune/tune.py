"""`optimize()`: strategy, verification, kernel."""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from looptune.build import build
from looptune.default import default_schedule
from looptune.dtypes import poison
from looptune.errors import ArgumentTypeError, SpecError, UnsupportedError
from looptune.host import host_target, thread_count
from looptune.ir import Nest, Plan, plan_of
from looptune.measure import random_arrays
from looptune.reference import verify as verify_result
from looptune.runtime.call import as_array, is_tensor
from looptune.runtime.kernel import Kernel
from looptune.schedule import Schedule
from looptune.target import Target, target_named
from looptune.workloads import einsum, fuse
from looptune.workloads.einsum import check_dtype, whole_numbers

Strategy = Callable[[Nest, Target, int], Schedule]
STRATEGIES: dict[str, Strategy] = {"default": default_schedule}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a search may spend: wall-clock seconds, measurements, or both (None: no limit)."""

    seconds: float | None = None
    measurements: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "measurements"):
            value = getattr(self, name)
            kinds = (int, float) if name == "seconds" else (int,)
            if value is not None and not (type(value) in kinds and value >= 0):
                raise SpecError(f"budget: {name}={value!r}; a number of at least 0 would do")


@dataclass(frozen=True)
class Report:
    """How a kernel came about; seconds are wall-clock."""

    strategy: str
    schedule_seconds: float
    codegen_seconds: float
    verify_seconds: float
    verified: bool
    budget: Budget = field(default_factory=Budget)


def optimize(
    spec: str | Nest | Plan,
    *,
    shapes: Sequence[object] | None = None,
    sizes: Mapping[str, int] | None = None,
    dtype: str | None = None,
    epilogue: str | Sequence[str] | None = None,
    strategy: str = "default",
    policy: object = None,
    budget: float | Budget | None = None,
    threads: int | None = None,
    target: str | Target | None = None,
    database: object = "default",
    retune: bool = False,
    verify: bool = True,
    seed: int = 0,
    progress: object = None,
    **labels: int,
) -> Kernel:
    """A verified kernel for an einsum, a nest or a plan.

    `spec` is an einsum string, with `shapes` (tuples, or example arrays and tensors whose strides
    and dtype count, too; otherwise `dtype` is "float32"), `sizes={label: extent}` or the labels as
    keywords: `optimize("mk,kn->mn", m=64, k=64, n=64)`; or a Nest or Plan from
    `looptune.workloads`. `epilogue` names what follows: "bias,relu" (`looptune.workloads.fuse`);
    its arrays are further inputs. The strategy "default" measures nothing: `budget`, `database`,
    `retune` and `progress` are for searches. `kernel.report` says how long each part took.

    Raises `SpecError` for a spec without meaning, `ArgumentTypeError` for an unknown keyword,
    `UnsupportedError` for an unknown strategy or dtype, `UnsupportedHostError` where the kernel
    cannot be run to verify it, `VerificationError` if the kernel is wrong.
    """
    chosen = strategy_named(strategy)
    refuse("policy", policy)
    check_options(verify, seed)
    limits = budget if isinstance(budget, Budget) else Budget(seconds=budget)
    plan = plan_for(spec, shapes, sizes, dtype, labels)
    plan = plan if epilogue is None else fuse(plan, epilogue)
    machine = resolve_target(target)
    workers = thread_count(threads)
    start = time.perf_counter()
    schedules = tuple(chosen(nest, machine, workers) for nest in plan.nests)
    scheduled = time.perf_counter()
    kernel = build(plan, schedules, machine, origin=strategy, threads=workers)
    built = time.perf_counter()
    if verify:
        check(kernel, seed)
    done = time.perf_counter()
    kernel.report = Report(
        strategy, scheduled - start, built - scheduled, done - built, verify, limits
    )
    return kernel


def compile(
    nest: Nest | Plan,
    schedule: Schedule | Sequence[Schedule],
    *,
    target: str | Target | None = None,
    verify: bool = True,
    seed: int = 0,
) -> Kernel:
    """A kernel for a nest (or a plan) with a schedule of your own (one a nest).

    Raises `ScheduleError` for a schedule of another nest, `LoweringError` over a limit of the
    target, `VerificationError` if the kernel is wrong.
    """
    if not isinstance(nest, Nest | Plan):
        raise ArgumentTypeError(f"nest is a {type(nest).__name__}; a Nest or a Plan would do")
    check_options(verify, seed)
    schedules = (schedule,) if isinstance(schedule, Schedule) else schedule
    if not isinstance(schedules, Sequence) or not all(isinstance(s, Schedule) for s in schedules):
        raise ArgumentTypeError(f"schedule is {schedule!r}; a Schedule, or one a nest, would do")
    kernel = build(nest, schedules, resolve_target(target))
    if verify:
        check(kernel, seed)
    return kernel


def resolve_target(target: str | Target | None) -> Target:
    """A target as it is, by name, or the widest one this machine runs."""
    if isinstance(target, Target):
        return target
    if not isinstance(target, str | None):
        raise ArgumentTypeError(f"target={target!r}; a Target or its name would do")
    return host_target() if target is None else target_named(target)


def check(kernel: Kernel, seed: int = 0) -> None:
    """Run the kernel on random operands, its output poisoned; raises `VerificationError`."""
    plan = kernel.plan
    arrays = random_arrays(plan, seed)
    out = arrays[plan.output.name]
    given = {**arrays, plan.output.name: out.copy()}
    if not plan.accumulates:
        out[...] = poison(plan.dtype)
    run_kernel(kernel, [arrays[tensor.name] for tensor in plan.inputs], out)
    verify_result(plan, given, out, boundaries=kernel.boundaries, seed=seed)


def run_kernel(kernel: Kernel, inputs: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Call the kernel as users do."""
    kernel(*inputs, out=out)


def strategy_named(name: str) -> Strategy:
    """The strategy called `name`; raises `UnsupportedError` with the list."""
    if name not in tuple(STRATEGIES):
        raise UnsupportedError(f"strategy {name!r} is none of {sorted(STRATEGIES)}")
    return STRATEGIES[name]


def check_options(verify: object, seed: object) -> None:
    """Raise `ArgumentTypeError` for a `verify` that is no bool or a bad `seed`."""
    if not isinstance(verify, bool):
        raise ArgumentTypeError(f"verify={verify!r}; True or False would do")
    if type(seed) is not int or seed < 0:
        raise ArgumentTypeError(f"seed={seed!r}; a whole number of at least 0 would do")


def refuse(name: str, value: object) -> None:
    """Raise `UnsupportedError` for an argument whose feature is not there yet."""
    if value is not None:
        raise UnsupportedError(f"{name}={value!r}: not supported yet; leave it out")


def plan_for(
    spec: str | Nest | Plan,
    shapes: Sequence[object] | None,
    sizes: Mapping[str, int] | None,
    dtype: str | None,
    labels: Mapping[str, int],
) -> Plan:
    """The plan that the arguments of `optimize` describe."""
    if isinstance(spec, str):
        if not isinstance(shapes, Sequence | None) or isinstance(shapes, str):
            raise ArgumentTypeError(f"shapes={shapes!r}; a shape or an array an operand would do")
        if not isinstance(sizes, Mapping | None):
            raise ArgumentTypeError(f"sizes={sizes!r}; {{label: extent}} would do")
        return einsum_plan(spec, shapes, sizes, dtype, labels)
    if labels:
        raise unknown_keyword(next(iter(labels)), "a Nest or Plan has no labels to size")
    if shapes is not None or sizes is not None or dtype is not None:
        raise SpecError(
            "shapes, sizes and dtype belong to an einsum string; a Nest or Plan has its own"
        )
    if isinstance(spec, Nest):
        return plan_of(spec)
    if isinstance(spec, Plan):
        return spec
    raise SpecError(f"spec is a {type(spec).__name__}; an einsum string, a Nest or a Plan would do")


def shape_of(shape: object) -> tuple[int, ...]:
    """A shape given as a sequence of numbers; raises `SpecError` for anything else."""
    if isinstance(shape, Iterable) and not isinstance(shape, str):
        return whole_numbers("a shape", shape, 0)
    raise SpecError(f"shapes: {shape!r} is neither a shape nor an array")


def unknown_keyword(name: str, otherwise: str) -> ArgumentTypeError:
    """The error for a keyword that `optimize` has not, with the near name or a hint."""
    known = [word for word in inspect.signature(optimize).parameters if word != "labels"]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else otherwise
    return ArgumentTypeError(f"optimize() got an unexpected keyword argument {name!r}; {hint}")


def einsum_plan(
    spec: str,
    shapes: Sequence[object] | None,
    sizes: Mapping[str, int] | None,
    dtype: str | None,
    labels: Mapping[str, int],
) -> Plan:
    """The plan of an einsum string with shapes, example arrays or label sizes."""
    for name in labels:
        if len(name) != 1 or name not in spec:
            raise unknown_keyword(name, f"the labels of {spec!r} would do")
    if shapes is None:
        return einsum(spec, sizes={**(sizes or {}), **labels}, dtype=dtype or "float32")
    if labels or sizes:
        raise SpecError("give shapes or sizes of the labels, not both")
    arrays = [hasattr(operand, "__array_interface__") or is_tensor(operand) for operand in shapes]
    if not any(arrays):
        return einsum(spec, *map(shape_of, shapes), dtype=dtype or "float32")
    if not all(arrays):
        raise SpecError("shapes mixes example arrays and tuples; give one kind")
    examples = [as_array(array, number) for number, array in enumerate(shapes)]
    found = {example.dtype.name for example in examples}
    if len(found) > 1 or (dtype is not None and check_dtype(dtype) not in found):
        wanted = "" if dtype is None else f" and dtype={dtype!r}"
        raise SpecError(f"shapes of example arrays of {sorted(found)}{wanted}: one dtype would do")
    for number, example in enumerate(examples):
        if any(stride % example.itemsize for stride in example.strides):
            raise SpecError(
                f"example array {number} has strides {example.strides}, no multiples of its "
                f"{example.itemsize}-byte elements; a copy would do"
            )
    return einsum(
        spec,
        *(example.shape for example in examples),
        dtype=found.pop(),
        strides=[tuple(s // e.itemsize for s in e.strides) for e in examples],
    )
