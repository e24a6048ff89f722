"""How good a policy is on what is held out: `looptune eval`.

Two tracks. Measured: all contenders' kernels, verified, take turns in one run a shape; the first
half of the rounds says who is the best known, the second what everybody gains, so that no luck
goes into it. By the cost model: nothing is timed and nothing of the host enters, so that the same
policy has the same figures everywhere; there the policy's beam has no time limit and its network
computes in float64.

Rows are lines of JSON, written as they come after a header; a run that was killed goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from looptune.build import build
from looptune.choose import Budget, Options, choose
from looptune.errors import ArgumentError, LooptuneError, LoweringError
from looptune.files import append_text, write_text
from looptune.host import fingerprint, host_target, thread_count
from looptune.ir import plan_of
from looptune.lower import GENERATOR_VERSION
from looptune.measure import Sampler, interleave, paired, random_arrays, rotating_sampler
from looptune.models.advise import advise, taken
from looptune.models.contenders import Late, Task, chosen, shipped_neighbours, static_name
from looptune.models.figures import POLICY, Row
from looptune.models.gain import GainModel
from looptune.models.inference import Policy
from looptune.models.sets import SETS, problems
from looptune.oracle import Oracle
from looptune.provenance import commit
from looptune.runtime.kernel import Kernel
from looptune.schedule import Schedule
from looptune.search import STRATEGIES
from looptune.target import TARGETS, Target, target_named
from looptune.tune import optimize
from looptune.workloads.matmul import matmul

SCHEMA = 1
ROUNDS = 15  # of each half of a shape's timing
QUESTIONS = 64  # that a search may ask where nothing is timed
SEARCHES = tuple(name for name in STRATEGIES if name not in ("default", POLICY))
LEAST = math.log(1e-3)  # what a schedule gains that cannot be lowered, by the cost model
FREE = ("command", "date", "commit")  # of a header: what may differ where a run goes on


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to evaluate on. `budgets` are seconds that a policy may measure for, beside none: a 0
    among them is dropped. `best` are seconds a shape that all searches share to find the best
    known.

    `model` asks the cost model alone, for the targets as they are named (all of them unless one is
    chosen); otherwise one target is measured, the host's widest unless another is chosen.
    """

    sets: tuple[str, ...] = tuple(SETS)
    most: int | None = None
    threads: int = 1
    target: str | None = None
    budgets: tuple[float, ...] = (0.1,)
    best: float = 0.0
    model: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.sets if name not in SETS]
        if unknown or not self.sets:
            raise ArgumentError(f"sets {unknown}; some of {list(SETS)} would do")
        if not all(0 <= value < math.inf for value in (*self.budgets, self.best)):
            raise ArgumentError(
                f"budgets={self.budgets}, best={self.best}: seconds of at least 0 would do"
            )
        object.__setattr__(self, "budgets", tuple(filter(None, self.budgets)))
        if self.model and self.best:
            raise ArgumentError(
                f"best={self.best} with model=True: the cost model takes no time; best=0 would do"
            )
        if not self.model and thread_count(self.threads) != self.threads:
            raise ArgumentError(
                f"threads={self.threads}, but this process may use {thread_count(self.threads)}"
            )

    @property
    def targets(self) -> tuple[Target, ...]:
        """What kernels are for."""
        if not self.model:
            return (host_target(self.target),)
        names = sorted(TARGETS) if self.target is None else [self.target]
        return tuple(target_named(name) for name in names)


@dataclass(frozen=True)
class Timing:
    """How time is told, for tests to tell another."""

    sampler: Callable[[Kernel, Sequence[Mapping[str, np.ndarray]]], Sampler] = rotating_sampler
    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.3  # of each half of a shape's timing


def evaluate(
    config: EvalConfig,
    policy: Policy,
    output: Path | None = None,
    *,
    resume: bool = False,
    command: str = "",
    timing: Timing | None = None,
) -> tuple[dict[str, Any], list[Row]]:
    """The header and the rows of an evaluation, those that `output` held already among them.

    Raises `ArgumentError` for a file that exists unless it is to `resume`, or that is of another
    machine, policy or configuration; `UnsupportedHostError` where a target cannot be measured.
    """
    header = header_of(config, policy, command)
    rows = begun(output, header, resume)
    done = {(row.set, row.target, row.id) for row in rows}
    todo = [job for job in jobs(config, policy) if job.place not in done]
    if todo and not config.model:
        warm(todo[0].task)
    for job in tqdm(todo, file=sys.stderr, disable=None):
        try:
            row = by_model(job) if config.model else by_time(job, config, timing or Timing())
        except LooptuneError as reason:
            row = Row(*job.place, error=f"{type(reason).__name__}: {reason}")
        rows.append(row)
        if output is not None:
            append_text(output, json.dumps(asdict(row)) + "\n")
    return header, rows


@dataclass(frozen=True)
class Job:
    """A row to make."""

    set: str
    id: str
    task: Task

    @property
    def place(self) -> tuple[str, str, str]:
        """What tells a row: its set, target and problem."""
        return self.set, self.task.target.name, self.id


def jobs(config: EvalConfig, policy: Policy) -> list[Job]:
    """All rows that a configuration asks for."""
    asked = exact(policy) if config.model else policy
    found = {name: problems(name, config.most) for name in config.sets}
    return [
        Job(name, each.id, Task(each.nest, target, config.threads, asked))
        for target in config.targets
        for name, listed in found.items()
        for each in listed
    ]


def by_model(job: Job) -> Row:
    """What the cost model says of everybody's choice."""
    task = job.task
    advice = advise(task.policy, task.nest, task.target, task.threads, clock=stopped)
    best = taken(advice)
    found = {POLICY: task.start.schedule if best is None else best.schedule}
    found |= chosen(task, lambda: counted(QUESTIONS))
    gains = {"default": 0.0}
    gains |= {who: max(LEAST, task.value(schedule)) for who, schedule in found.items()}
    return Row(*job.place, rounded(gains), best_of(gains))


def by_time(job: Job, config: EvalConfig, timing: Timing) -> Row:
    """What everybody's kernel takes, and how long the policy took. `optimize` comes first, so that
    nothing of the nest is known to it."""
    task, clock, plan = job.task, timing.clock, plan_of(job.task.nest)
    began = clock()
    kernel = optimize(
        plan, strategy=POLICY, policy=task.policy, threads=task.threads, target=task.target,
        database=None,
    )  # fmt: skip
    took, report = clock() - began, kernel.report
    assert report is not None, "optimize always leaves one"
    choice = report.schedule_seconds
    found = {POLICY: kernel.schedules[0]}
    for budget in config.budgets:
        found[f"{POLICY}, {budget:g} s"] = searched(task, POLICY, budget)
    found |= chosen(task, lambda: expired(clock, choice))
    for name in SEARCHES if config.best else ():
        found[f"search: {name}"] = searched(task, name, config.best / len(SEARCHES))
    first, second = timed(task, found, timing)
    spent = {"optimize": 1e3 * took, "choice": 1e3 * choice}
    return Row(*job.place, rounded(second), best_of(first), rounded(spent))


def searched(task: Task, strategy: str, seconds: float) -> Schedule:
    """What a strategy finds in so many seconds, in this process, from no database."""
    options = Options(
        target=task.target,
        threads=task.threads,
        strategy=strategy,
        policy=task.policy,
        budget=Budget(seconds=seconds),
    )
    return choose(task.nest, options).schedule


def timed(
    task: Task, found: Mapping[str, Schedule], timing: Timing
) -> tuple[dict[str, float], dict[str, float]]:
    """Everybody beside the default, twice; equal code is timed once.

    What cannot be lowered leaves its contender with the default. Raises `VerificationError`.
    """
    plan = plan_of(task.nest)
    kernels = {"default": build(plan, [task.start.schedule], task.target, threads=task.threads)}
    for who, schedule in found.items():
        try:
            kernels[who] = build(plan, [schedule], task.target, threads=task.threads)
        except LoweringError:
            kernels[who] = kernels["default"]
    distinct = {kernel.stages: kernel for kernel in reversed(kernels.values())}
    oracle = Oracle(plan)
    for kernel in distinct.values():
        oracle.verify(kernel)
    sets = [random_arrays(plan, seed) for seed in range(2)]
    numbers = {stages: str(number) for number, stages in enumerate(distinct)}
    samplers = {numbers[code]: timing.sampler(each, sets) for code, each in distinct.items()}

    def half() -> dict[str, float]:
        times = interleave(samplers, rounds=ROUNDS, seconds=timing.seconds)
        anchor = times[numbers[kernels["default"].stages]]
        return {who: paired(anchor, times[numbers[k.stages]]).mean for who, k in kernels.items()}

    return half(), half()


def best_of(gains: Mapping[str, float]) -> str:
    """Who gains most; of equal ones the first, which is the default."""
    return max(gains, key=lambda who: gains[who])


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """To six places: a file holds no more than is known."""
    return {name: round(value, 6) for name, value in values.items()}


def exact(policy: Policy) -> Policy:
    """The same policy in float64, where no rounding of a machine's BLAS turns a choice."""
    gain = policy.gain
    if gain is not None:
        gain = GainModel({name: each.astype(np.float64) for name, each in gain.arrays.items()})
    arrays = {name: each.astype(np.float64) for name, each in policy.arrays.items()}
    return replace(policy, arrays=arrays, gain=gain)


def stopped() -> float:
    """A clock that stands still."""
    return 0.0


def counted(questions: int) -> Late:
    """Late after so many times that it was asked."""
    left = iter(range(questions))
    return lambda: next(left, None) is None


def expired(clock: Callable[[], float], seconds: float) -> Late:
    """Late after so many seconds from now."""
    stop = clock() + seconds
    return lambda: clock() > stop


def warm(task: Task) -> None:
    """What a process does once: read the policy's data, load the encoder, touch the code."""
    shipped_neighbours()
    for plan in (matmul(48, 40, 56), matmul(33, 65, 17)):
        optimize(plan, strategy=POLICY, policy=task.policy, threads=task.threads,
                 target=task.target, database=None)  # fmt: skip


def digest(policy: Policy) -> str:
    """Short name of a policy's weights."""
    found = hashlib.sha256()
    for arrays in (policy.arrays, {} if policy.gain is None else policy.gain.arrays):
        for name in sorted(arrays):
            found.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()[:12]


def header_of(config: EvalConfig, policy: Policy, command: str) -> dict[str, Any]:
    """What tells an evaluation from others; date, commit and machine of a measured one."""
    from looptune import __version__

    measured: dict[str, Any] = {}
    if not config.model:
        measured = {
            "machine": asdict(fingerprint()), "budgets": config.budgets, "best": config.best,
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(),
        }  # fmt: skip
    found = {
        "schema": SCHEMA, "track": "model" if config.model else "measured",
        "looptune": __version__, "generator": GENERATOR_VERSION,
        "targets": [asdict(target) for target in config.targets], "threads": config.threads,
        "policy": digest(policy), "static": static_name(), "command": command, **measured,
    }  # fmt: skip
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def begun(output: Path | None, header: Mapping[str, Any], resume: bool) -> list[Row]:
    """The rows of a file that is to go on, less one that was cut off; a new file's header is
    written."""
    if output is None:
        return []
    if not output.exists():
        write_text(output, json.dumps(header) + "\n")
        return []
    if not resume:
        raise ArgumentError(f"{output} exists: --resume goes on with it, or name another file")
    old, rows = read(output)
    for name in (*header, *old):
        if name not in FREE and old.get(name) != header.get(name):
            raise ArgumentError(
                f"{output} is of another {name}: {old.get(name)!r}, not {header.get(name)!r}; "
                "name another file"
            )
    whole = output.read_bytes().rpartition(b"\n")[0]
    os.truncate(output, len(whole) + 1)
    return rows


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The header and the whole rows of a file; raises `ArgumentError` for one that is none."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
        if not first:
            raise ValueError("it has no header; a new file would do")
        header = json.loads(first)
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema {header['schema']!r}; {SCHEMA} would do")
        return header, [row_of(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise ArgumentError(f"{path} is no evaluation: {reason}") from reason


def row_of(value: Mapping[str, Any]) -> Row:
    """A row from its line; raises `ValueError` or `TypeError` for what no evaluation writes."""
    row = Row(**value)
    for name, text in asdict(row).items():
        if name not in ("gains", "milliseconds") and not isinstance(text, str):
            raise ValueError(f"{name} is {text!r}; a text would do")
    for who, number in [*row.gains.items(), *row.milliseconds.items()]:
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{who!r} has {number!r}; a finite number would do")
    if not row.error and row.best not in row.gains:
        raise ValueError(f"best is {row.best!r}; one of {list(row.gains)} would do")
    return row
