"""Candidates of one nest, measured: each is generated, verified, and timed beside the anchor.

The anchor is the nest's default schedule. What is fast but wrong, what cannot be lowered and
what beats the roofline has no value, and the search goes on. The winner of a search is timed
again, with samples that had no part in choosing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from looptune.build import build
from looptune.default import default_schedule
from looptune.errors import LooptuneError, MeasurementError
from looptune.ir import Nest, Plan, plan_of
from looptune.measure import (
    Clock,
    Posterior,
    compare_samplers,
    highest_peak,
    interleave,
    paired,
    random_arrays,
    roofline_seconds,
    rotating_sampler,
)
from looptune.oracle import Oracle
from looptune.runtime.kernel import Kernel
from looptune.schedule import Action, Schedule
from looptune.search import Search, Spent, run
from looptune.target import Target

if TYPE_CHECKING:
    from looptune.models.inference import Policy

TRIAL_SECONDS = 0.012  # of timing a candidate beside its anchor
TRIAL_ROUNDS = 5
FINALISTS = 3
FINAL_SHARE = 0.25  # of the time, kept for the finalists
FLOOR_SLACK = 0.8  # of the roofline's time: the peak was measured at another moment


@dataclass(frozen=True)
class Trial:
    """One candidate: what it was, what came of it, and why it has no value."""

    actions: tuple[Action, ...]
    order: str
    value: float | None
    reason: str = ""


@dataclass
class Spending:
    """What may be spent, and what has been: seconds since `start` and measurements."""

    seconds: float | None
    measurements: int | None
    clock: Clock
    start: float
    measured: int = 0

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        if self.seconds is None:
            return float("inf")
        return self.start + self.seconds - self.clock()

    def spend(self) -> None:
        """Count a measurement; raises `Spent` when there is none left, or no time."""
        kept = 0.0 if self.seconds is None else FINAL_SHARE * self.seconds
        if self.left <= kept or (
            self.measurements is not None and self.measured >= self.measurements
        ):
            raise Spent
        self.measured += 1


@dataclass
class Tuner:
    """The measured value of a nest's schedules; `progress` hears of every trial.

    `remote` measures in another process.
    """

    nest: Nest
    target: Target
    threads: int
    spending: Spending
    seed: int = 0
    progress: Callable[[Trial], None] | None = None
    remote: Callable[[Schedule], Posterior] | None = None
    trials: list[Trial] = field(default_factory=list)
    posteriors: dict[str, Posterior] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)  # of kernels that are kept

    def __post_init__(self) -> None:
        self.plan: Plan = plan_of(self.nest)
        self.sets = [random_arrays(self.plan, self.seed + i) for i in range(2)]
        self.anchor_schedule = default_schedule(self.nest, self.target, self.threads)
        self.anchor = build(self.plan, [self.anchor_schedule], self.target, threads=self.threads)
        self.oracle = Oracle(self.plan, self.seed)
        self.oracle.verify(self.anchor)
        self.kernels = {self.anchor_schedule.identity: self.anchor}

    def floor(self, again: bool = False) -> float:
        """Seconds that a call takes at least; the peak measured `again` may make them fewer."""
        peak = highest_peak(self.target, again=again)  # that of int8 is no higher
        return FLOOR_SLACK * roofline_seconds(self.anchor, peak)

    @property
    def rejected(self) -> dict[str, int]:
        """How many trials had no value, by the kind of reason."""
        return dict(
            Counter(trial.reason.partition(":")[0] for trial in self.trials if trial.reason)
        )

    def __call__(self, schedule: Schedule) -> float | None:
        """The value of a schedule; raises `Spent`."""
        self.spending.spend()
        try:
            posterior = self.asked(schedule)
        except LooptuneError as reason:
            self.note(Trial(schedule.actions, schedule.order, None, explained(reason)))
            return None
        self.posteriors[schedule.identity] = posterior
        self.note(Trial(schedule.actions, schedule.order, posterior.mean))
        return posterior.mean

    def asked(self, schedule: Schedule) -> Posterior:
        """The posterior of a schedule, measured here or elsewhere; raises what is wrong with it."""
        if self.remote is None:
            kernel = self.kernel_of(schedule)
            posterior = self.timed(kernel)
            if kernel is not self.anchor:
                self.keep(schedule, kernel, posterior.mean)
            return posterior
        return self.remote(schedule)

    def note(self, trial: Trial) -> None:
        """Keep a trial, and tell of it."""
        self.trials.append(trial)
        if self.progress is not None:
            self.progress(trial)

    def kernel_of(self, schedule: Schedule) -> Kernel:
        """A verified kernel, the anchor for what has the anchor's code; raises what is wrong."""
        if schedule.identity in self.kernels:
            return self.kernels[schedule.identity]
        kernel = build(self.plan, [schedule], self.target, threads=self.threads)
        if kernel.stages == self.anchor.stages:
            return self.anchor
        self.oracle.verify(kernel)
        return kernel

    def keep(self, schedule: Schedule, kernel: Kernel, value: float) -> None:
        """Remember the kernel while its schedule may still be among the finalists."""
        self.kernels[schedule.identity] = kernel
        self.values[schedule.identity] = value
        if len(self.values) > FINALISTS:
            worst = min(self.values, key=self.values.__getitem__)
            del self.values[worst], self.kernels[worst]

    def timed(self, kernel: Kernel) -> Posterior:
        """The kernel beside the anchor; raises `MeasurementError` for a time that cannot be."""
        if kernel is self.anchor:
            return Posterior(1, 0.0, 0.0)
        samplers = {
            "anchor": rotating_sampler(self.anchor, self.sets),
            "candidate": rotating_sampler(kernel, self.sets),
        }
        found = interleave(samplers, rounds=TRIAL_ROUNDS, seconds=TRIAL_SECONDS)
        best = min(found["candidate"].seconds)
        if best < self.floor() and best < self.floor(again=True):
            raise MeasurementError(
                f"{best:.3g} s a call, under the roofline's {self.floor():.3g} s: the kernel "
                "cannot have done its work"
            )
        return paired(found["anchor"], found["candidate"])

    def final(self, leaders: list[Schedule]) -> tuple[Schedule, Posterior | None]:
        """The best of the leaders if it surely beats the anchor, with the samples that say so; else
        the anchor.

        One set of samples picks it, the simplest of those that cannot be told from the fastest;
        another, of that one alone, decides.
        """
        kernels = {schedule.identity: self.kernel_of(schedule) for schedule in leaders}
        samplers = {
            name: rotating_sampler(kernel, self.sets)
            for name, kernel in kernels.items()
            if kernel is not self.anchor
        }
        if not samplers:
            return self.anchor_schedule, None
        samplers = {"anchor": rotating_sampler(self.anchor, self.sets), **samplers}
        share = min(max(self.spending.left, 0.04), 1.0) / 2
        found = compare_samplers(samplers, seconds=share)
        lead = max(posterior.mean - posterior.half_width for posterior in found.values())
        level = [name for name, each in found.items() if each.mean + each.half_width >= lead]
        schedules = {schedule.identity: schedule for schedule in leaders}
        chosen = min(level, key=lambda name: simplicity(schedules[name]))
        alone = {name: samplers[name] for name in ("anchor", chosen)}
        posterior = compare_samplers(alone, seconds=share)[chosen]
        if posterior.verdict != "faster":
            return self.anchor_schedule, None
        return schedules[chosen], posterior


def simplicity(schedule: Schedule) -> tuple[int, int, str]:
    """Fewer loops and packs come first; then an order that does not change."""
    return len(schedule.canonical), len(schedule.packs), schedule.identity


def explained(reason: LooptuneError) -> str:
    """The kind of an error, and its words."""
    return f"{type(reason).__name__}: {reason}"


def search_nest(
    strategy: str, tuner: Tuner, *, space: str = "ours", policy: Policy | None = None
) -> tuple[Schedule, Posterior | None]:
    """Run a strategy on measurements; the schedule to use, with fresh samples of it unless it is
    the anchor."""
    search = Search(
        tuner.nest, tuner.target, tuner.threads, tuner, space, tuner.seed,
        left=lambda: tuner.spending.left, policy=policy,
    )  # fmt: skip
    search.default = tuner.anchor_schedule
    search.values[tuner.anchor_schedule.identity] = 0.0
    search.schedules[tuner.anchor_schedule.identity] = tuner.anchor_schedule
    try:
        run(strategy, search)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(*tuner.final(search.leaders(FINALISTS))) from interrupt
    return tuner.final(search.leaders(FINALISTS))


class Interrupted(KeyboardInterrupt):
    """An interrupt in the middle of a search, with the best so far and its samples."""

    def __init__(self, schedule: Schedule, posterior: Posterior | None) -> None:
        super().__init__("interrupted")
        self.schedule = schedule
        self.posterior = posterior
