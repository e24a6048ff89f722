"""`optimize()`: a schedule for every nest, verification, kernel."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from looptune.build import build
from looptune.choose import Budget, Chosen, Options, Progress, choose
from looptune.database import Database, default_database, default_exists
from looptune.errors import (
    ArgumentTypeError,
    VerificationError,
)
from looptune.host import host_target, thread_count
from looptune.ir import Nest, Plan
from looptune.oracle import Oracle
from looptune.runtime.kernel import Kernel
from looptune.scalars import whole
from looptune.schedule import Schedule
from looptune.search import STRATEGY, strategy_named
from looptune.spec import plan_for
from looptune.target import Target, target_named
from looptune.workloads import fuse

if TYPE_CHECKING:
    from looptune.models.inference import Policy

logger = logging.getLogger("looptune")


@dataclass(frozen=True)
class Report:
    """How a kernel came about; seconds are wall-clock.

    `choices` are one a nest: where its schedule comes from, what was tried and what was rejected
    for which reason, and how it compares with the default if it was measured. `schedule_seconds`
    hold all of that, `codegen_seconds` and `verify_seconds` are of the kernel itself.
    """

    strategy: str
    schedule_seconds: float
    codegen_seconds: float
    verify_seconds: float
    verified: bool
    budget: Budget = field(default_factory=Budget)
    choices: tuple[Chosen, ...] = ()

    @property
    def tried(self) -> int:
        """Candidates that a search asked for."""
        return sum(choice.tried for choice in self.choices)

    @property
    def rejected(self) -> dict[str, int]:
        """Candidates without a value, by the kind of reason."""
        return dict(sum((Counter(choice.rejected) for choice in self.choices), Counter()))


def optimize(
    spec: str | Nest | Plan,
    *,
    shapes: Sequence[object] | None = None,
    sizes: Mapping[str, int] | None = None,
    dtype: str | None = None,
    epilogue: str | Sequence[str] | None = None,
    strategy: str = STRATEGY,
    policy: Policy | str | os.PathLike[str] | None = None,
    budget: float | Budget | None = None,
    threads: int | None = None,
    target: str | Target | None = None,
    database: str | os.PathLike[str] | Database | None = "default",
    retune: bool = False,
    verify: bool = True,
    seed: int = 0,
    progress: Progress = None,
    isolate: bool = False,
    **labels: int,
) -> Kernel:
    """A verified kernel for an einsum, a nest or a plan.

    `spec` is an einsum string, with `shapes` (tuples, or example arrays and tensors whose strides
    and dtype count, too; otherwise `dtype` is "float32"), `sizes={label: extent}` or the labels as
    keywords: `optimize("mk,kn->mn", m=64, k=64, n=64)`; or a Nest or Plan from
    `looptune.workloads`. `epilogue` names what follows: "bias,relu" (`looptune.workloads.fuse`);
    its arrays are further inputs.

    `strategy` is one of `looptune.search.STRATEGIES`. That of choice, "policy", asks a trained
    policy: the shipped one, or `policy`, a checkpoint's path or a
    `looptune.models.inference.Policy`; it leaves the schedule at the default where it knows nothing
    better, and `kernel.report` says why. "default" asks no policy. With a `budget`
    (seconds, or a `Budget`) its candidates are verified and timed beside the default schedule, and
    the kernel is not slower than that beyond noise; without one they are ranked by the cost model
    (a policy's by what it learnt from measurements), and nothing is measured. What was measured is
    kept in `database` ("default": the user's; None: nowhere; or a path), and what is found there
    wins over every strategy, "default" too, unless `retune`; None asks nobody. `kernel.origin` says
    where the schedule comes from, `kernel.report` what was tried and how long each part took.
    `progress` is True for a bar on stderr, or called with every trial. With `isolate` candidates
    run in a process of their own, which a crash or a hang costs, and nothing else; the budget's
    clock starts when it is ready, half a second or so later. An interrupt is raised again after
    what was found has been recorded.

    Raises `SpecError` for a spec without meaning, `ArgumentTypeError` for an unknown keyword,
    `UnsupportedError` for an unknown strategy or dtype, `UnsupportedHostError` where the kernel
    cannot be run to verify it, `DatabaseError` for a path that is no database, `CheckpointError`
    for a policy's file that is no use, `VerificationError` if the kernel is wrong,
    `ReferenceMemoryError` where there is no memory to verify it (`verify=False` does without).
    """
    strategy_named(strategy)
    asked = resolve_policy(policy, strategy)
    seed = check_options(verify, seed)
    if not isinstance(retune, bool):
        raise ArgumentTypeError(f"retune={retune!r}; True or False would do")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ArgumentTypeError(f"progress={progress!r}; True, False or a function would do")
    limits = budget if isinstance(budget, Budget) else Budget(seconds=budget)
    plan = plan_for(spec, shapes, sizes, dtype, labels)
    plan = plan if epilogue is None else fuse(plan, epilogue)
    machine = resolve_target(target)
    workers = thread_count(threads)
    start = time.perf_counter()
    measures = strategy != "default" and limits.spends
    options = Options(
        target=machine,
        threads=workers,
        strategy=strategy,
        policy=asked,
        budget=limits.share(len(plan.nests)),
        database=resolve_database(database, for_records=measures),
        retune=retune,
        seed=seed,
        progress=progress,
        isolate=isolate,
    )
    choices = tuple(choose(nest, options) for nest in plan.nests)
    scheduled = time.perf_counter()
    kernel = made(plan, choices, machine, workers)
    built = time.perf_counter()
    if verify:
        kernel, choices = verified(kernel, choices, options, seed)
    done = time.perf_counter()
    kernel.report = Report(
        strategy, scheduled - start, built - scheduled, done - built, verify, limits, choices
    )
    return kernel


def made(plan: Plan, choices: Sequence[Chosen], target: Target, threads: int) -> Kernel:
    """The kernel of the chosen schedules."""
    origins = dict.fromkeys(choice.origin for choice in choices)
    origin = "+".join(origins) or "default"
    return build(plan, [c.schedule for c in choices], target, origin=origin, threads=threads)


def verified(
    kernel: Kernel, choices: tuple[Chosen, ...], options: Options, seed: int
) -> tuple[Kernel, tuple[Chosen, ...]]:
    """The kernel if it is right. A wrong one from the database gives way to the default, with a
    warning; any other raises `VerificationError`."""
    try:
        Oracle(kernel.plan, seed).verify(kernel)
    except VerificationError as reason:
        if all(choice.origin != "database" for choice in choices):
            raise
        logger.warning("a schedule of the database gives wrong results (%s): not used", reason)
        plain = replace(options, database=None, strategy="default", policy=None)
        choices = tuple(choose(nest, plain) for nest in kernel.plan.nests)
        kernel = made(kernel.plan, choices, kernel.target, kernel.threads)
        Oracle(kernel.plan, seed).verify(kernel)
    return kernel, choices


def resolve_database(
    database: str | os.PathLike[str] | Database | None, for_records: bool
) -> Database | None:
    """The database that an argument means; the user's is not made before there is a record."""
    match database:
        case None | Database():
            return database
        case "default":
            return default_database() if for_records or default_exists() else None
        case str() | os.PathLike():
            return Database(os.fspath(database))
        case _:
            raise ArgumentTypeError(f"database={database!r}; 'default', None or a path would do")


def compile(
    nest: Nest | Plan,
    schedule: Schedule | Sequence[Schedule],
    *,
    target: str | Target | None = None,
    threads: int = 1,
    verify: bool = True,
    seed: int = 0,
) -> Kernel:
    """A kernel for a nest (or a plan) with a schedule of your own (one a nest).

    Raises `ArgumentTypeError` for arguments of a wrong kind, `ScheduleError` for a schedule of
    another nest, `LoweringError` over a limit of the target, `UnsupportedError` for a target of an
    unknown name, `UnsupportedHostError` where the kernel cannot be run to verify it,
    `VerificationError` if it is wrong.
    """
    if not isinstance(nest, Nest | Plan):
        raise ArgumentTypeError(f"nest is a {type(nest).__name__}; a Nest or a Plan would do")
    seed = check_options(verify, seed)
    schedules = (schedule,) if isinstance(schedule, Schedule) else schedule
    if not isinstance(schedules, Sequence) or not all(isinstance(s, Schedule) for s in schedules):
        raise ArgumentTypeError(f"schedule is {schedule!r}; a Schedule, or one a nest, would do")
    start = time.perf_counter()
    kernel = build(nest, schedules, resolve_target(target), threads=thread_count(threads))
    built = time.perf_counter()
    if verify:
        Oracle(kernel.plan, seed).verify(kernel)
    done = time.perf_counter()
    kernel.report = Report("schedule", 0.0, built - start, done - built, verify)
    return kernel


def resolve_target(target: str | Target | None) -> Target:
    """A target as it is, by name, or the widest one this machine runs."""
    if isinstance(target, Target):
        return target
    if not isinstance(target, str | None):
        raise ArgumentTypeError(f"target={target!r}; a Target or its name would do")
    return host_target() if target is None else target_named(target)


def check_options(verify: object, seed: object) -> int:
    """The seed; raises `ArgumentTypeError` for a `verify` that is no bool or a bad `seed`."""
    if not isinstance(verify, bool):
        raise ArgumentTypeError(f"verify={verify!r}; True or False would do")
    found = whole(seed)
    if found is None or found < 0:
        raise ArgumentTypeError(f"seed={seed!r}; a whole number of at least 0 would do")
    return found


def resolve_policy(policy: object, strategy: str) -> Policy | None:
    """The policy that the strategy of that name asks; None for other strategies.

    Raises `ArgumentTypeError` for a policy that is none, or that nobody would ask, and
    `CheckpointError` for a file that holds none.
    """
    if policy is not None and strategy != "policy":
        raise ArgumentTypeError(f"policy=... is for strategy='policy', not {strategy!r}")
    if strategy != "policy":
        return None
    from looptune.models.advise import policy_of
    from looptune.models.inference import Policy

    if not isinstance(policy, str | os.PathLike | Policy | None):
        raise ArgumentTypeError(
            f"policy={policy!r}; a checkpoint's path, a looptune.models.inference.Policy or None "
            "for the shipped one would do"
        )
    return policy_of(policy)
