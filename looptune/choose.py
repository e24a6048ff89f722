"""Which schedule a nest gets: a record of the database, a search's winner, or the default.

Without a budget a strategy asks the cost model alone, and nothing is recorded. With one it
measures, and what was found is kept unless it does not beat the default.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tqdm import tqdm

from looptune.cost import predict
from looptune.database import Database, Record, key_of, schedule_of
from looptune.default import default_schedule
from looptune.errors import (
    DatabaseError,
    LoweringError,
    MeasurementError,
    SpecError,
    UnsupportedHostError,
)
from looptune.host import runs
from looptune.ir import Nest
from looptune.measure import Posterior
from looptune.scalars import real, whole
from looptune.schedule import Schedule
from looptune.search import Search, Spent, run
from looptune.target import Target
from looptune.tuner import Interrupted, Spending, Trial, Tuner, search_nest
from looptune.worker import Worker

if TYPE_CHECKING:
    from looptune.models.inference import Policy

MODEL_QUESTIONS = 2000  # that a search may ask the cost model, if nothing else limits it
logger = logging.getLogger("looptune")
Progress = bool | None | Callable[[Trial], None]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a search may spend: wall-clock seconds, measurements, or both (None: no limit)."""

    seconds: float | None = None
    measurements: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "measurements"):
            value = getattr(self, name)
            if value is None:
                continue
            found = real(value) if name == "seconds" else whole(value)
            if found is None or found < 0:
                raise SpecError(f"budget: {name}={value!r:.80}; a number of at least 0 would do")
            object.__setattr__(self, name, found)

    @property
    def spends(self) -> bool:
        """Whether anything may be measured."""
        return bool(self.seconds or self.measurements)

    def share(self, parts: int) -> Budget:
        """What one of so many nests may spend."""
        seconds = None if self.seconds is None else self.seconds / max(1, parts)
        count = None if self.measurements is None else -(-self.measurements // max(1, parts))
        return Budget(seconds=seconds, measurements=count)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `optimize` was asked for a nest; `policy` is whom the strategy of that name asks."""

    target: Target
    threads: int
    strategy: str
    policy: Policy | None = None
    budget: Budget = field(default_factory=Budget)
    database: Database | None = None
    retune: bool = False
    seed: int = 0
    progress: Progress = None
    isolate: bool = False
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Chosen:
    """A schedule and where it comes from; `posterior` of its gain over the default, None where it
    is the default or nothing was measured.

    `tried` candidates were asked for, `rejected` counts those that failed by reason. `note` says
    why a strategy left it at the default.
    """

    schedule: Schedule
    origin: str
    posterior: Posterior | None = None
    tried: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    note: str = ""


def choose(nest: Nest, options: Options) -> Chosen:
    """The schedule of one nest.

    Raises `UnsupportedHostError` where a search would measure and the target does not run here;
    on an interrupt, what was found is recorded first.
    """
    known = None if options.retune else looked_up(nest, options)
    if known is not None:
        return known
    if options.strategy == "default" or nest.points == 0:
        schedule = default_schedule(nest, options.target, options.threads)
        return Chosen(schedule, "default")
    if not options.budget.spends:
        ask = advised if options.strategy == "policy" else predicted
        return ask(nest, options)
    if not runs(options.target):
        raise UnsupportedHostError(
            f"this machine does not run {options.target.isa} code, so nothing can be measured; "
            "without a budget the search asks the cost model"
        )
    return measured(nest, options)


def looked_up(nest: Nest, options: Options) -> Chosen | None:
    """The database's schedule, if it has one that is surely faster than the default."""
    if options.database is None:
        return None
    try:
        record = options.database.best(key_of(nest, options.target, options.threads))
    except (sqlite3.Error, DatabaseError) as reason:
        logger.warning("the database could not be read: %s", reason)
        return None
    if record is None:
        return None
    schedule = schedule_of(nest, record)
    if schedule is None:
        return None
    return Chosen(schedule, "database", record.posterior)


def advised(nest: Nest, options: Options) -> Chosen:
    """What a policy expects most of; the default, with the reason, where it expects nothing."""
    from looptune.models.advise import advise, taken

    assert options.policy is not None, "the strategy 'policy' asks one"
    found = advise(options.policy, nest, options.target, options.threads)
    best = taken(found)
    if best is not None:
        return Chosen(best.schedule, "policy", None, len(found))
    default = default_schedule(nest, options.target, options.threads)
    return Chosen(default, "default", note=unadvised(nest))


def unadvised(nest: Nest) -> str:
    """Why a policy proposes nothing for a nest."""
    from looptune.models.advise import outside

    reason = outside(nest) or "nothing that it proposes is expected to beat the default"
    return f"policy: {reason}"


def predicted(nest: Nest, options: Options) -> Chosen:
    """What a strategy finds by asking the cost model."""
    target, threads = options.target, options.threads
    anchor = default_schedule(nest, target, threads)
    least = predict(anchor, target, threads).cycles
    asked = 0

    def evaluate(schedule: Schedule) -> float | None:
        nonlocal asked
        if asked >= MODEL_QUESTIONS:
            raise Spent
        asked += 1
        try:
            return math.log(least / predict(schedule, target, threads).cycles)
        except LoweringError:
            return None

    search = Search(nest, target, threads, evaluate, seed=options.seed)
    search.value(anchor)
    best = run(options.strategy, search)
    failed = sum(value is None for value in search.values.values())
    rejected = {"LoweringError": failed} if failed else {}
    return Chosen(best or anchor, options.strategy, None, len(search.values), rejected)


def measured(nest: Nest, options: Options) -> Chosen:
    """What a strategy finds by measuring, recorded if it beats the default."""
    budget = options.budget
    worker = Worker(nest, options.target, options.threads, options.seed)
    if options.isolate:
        with suppress(MeasurementError):  # it is started again for each candidate
            worker.begin()
    # Only now: to start a process takes half a second, which finds nothing.
    spending = Spending(budget.seconds, budget.measurements, options.clock, options.clock())
    bar = bar_of(options)
    hear = options.progress if callable(options.progress) else None
    best = 0.0

    def progress(trial: Trial) -> None:
        nonlocal best
        best = max(best, trial.value or 0.0)
        if hear is not None:
            hear(trial)
        left = "" if budget.seconds is None else f", {max(spending.left, 0.0):.1f} s left"
        bar.set_postfix_str(f"best {math.exp(best):.2f}x the default{left}", refresh=False)
        bar.update()

    with bar, closing(worker):
        remote = worker.posterior if options.isolate else None
        tuner = Tuner(
            nest, options.target, options.threads, spending, options.seed, progress, remote
        )
        try:
            schedule, posterior = search_nest(options.strategy, tuner, policy=options.policy)
        except Interrupted as interrupt:
            record(nest, interrupt.schedule, interrupt.posterior, options)
            raise
    record(nest, schedule, posterior, options)
    return Chosen(
        schedule, options.strategy, posterior, len(tuner.trials), tuner.rejected,
        tuple(tuner.trials),
        unadvised(nest) if options.strategy == "policy" and not tuner.trials else "",
    )  # fmt: skip


def bar_of(options: Options) -> tqdm[None]:
    """A progress bar on stderr: where asked for, or on a terminal for what takes over a second."""
    budget = options.budget
    long = (budget.seconds or 0.0) > 1 or (budget.measurements or 0) > 50
    shown = options.progress is True or (options.progress is None and long and sys.stderr.isatty())
    return tqdm(
        total=budget.measurements, desc=options.strategy, unit=" candidates",
        disable=not shown, file=sys.stderr,
    )  # fmt: skip


def record(nest: Nest, schedule: Schedule, posterior: Posterior | None, options: Options) -> None:
    """Keep what beats the default; a database that fails costs a warning, not the result."""
    if options.database is None or posterior is None:
        return
    key = key_of(nest, options.target, options.threads)
    found = Record(
        key, schedule.identity, schedule.actions,
        posterior.n, posterior.mean, posterior.variance, time.time(),
    )  # fmt: skip
    try:
        options.database.add([found])
    except (sqlite3.Error, DatabaseError) as reason:
        logger.warning("the result could not be recorded: %s", reason)
