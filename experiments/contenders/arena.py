"""The controller: contenders in their processes, timed in turns on one workload after another."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from experiments.contenders import Contender
from experiments.contenders.process import problem_of, seat
from looptune.errors import MeasurementError
from looptune.measure import Sampler, Samples, interleave, ratio
from looptune.worker import Child
from looptune.workloads.suites import Workload

SETTLE_SECONDS = 0.25  # until the threads of the one before spin no more, where there are several


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for all: saved beside the rows. `seconds` of timing are for one workload."""

    threads: int = 1
    isa: str | None = None
    rounds: int = 15
    seconds: float = 1.0
    seed: int = 0


@dataclass
class Arena(AbstractContextManager["Arena"]):
    """Processes by contender, started when first asked and ended together."""

    rules: Rules
    seats: dict[Contender, Child] = field(default_factory=dict)

    def __exit__(self, *_: object) -> None:
        for child in self.seats.values():
            child.close()

    def __enter__(self) -> Self:
        return self

    def row(self, workload: Workload, contenders: Sequence[Contender]) -> dict[str, Any]:
        """By contender: GFLOPS, microseconds, spread, seconds of tuning, and how many times as
        fast the first one that works is; or the reason why there is nothing."""
        found: dict[str, dict[str, Any]] = {}
        ready: dict[str, Sampler] = {}
        for contender in contenders:
            try:
                found[str(contender)] = self.made(contender, workload)
                ready[str(contender)] = self.sampler(contender)
            except MeasurementError as reason:
                found[str(contender)] = {"error": str(reason)}
        samples = self.timed(ready, found)
        return found | {
            name: found[name] | figures(samples, name, workload.flops) for name in samples
        }

    def made(self, contender: Contender, workload: Workload) -> dict[str, Any]:
        """Have a contender make its kernel; raises `MeasurementError` with its reason."""
        rules = self.rules
        if contender not in self.seats:
            self.seats[contender] = seat(contender, rules.threads)
        request = problem_of(workload, rules.threads, rules.isa, rules.seed)
        return answer_of(self.seats[contender], request)

    def sampler(self, contender: Contender) -> Sampler:
        """Asks a contender's process for a sample."""

        def sample(calls: int) -> float:
            try:
                return float(answer_of(self.seats[contender], {"calls": calls})["seconds"])
            except MeasurementError as reason:
                raise Lost(str(contender), reason) from reason

        return sample

    def timed(
        self, ready: Mapping[str, Sampler], found: dict[str, dict[str, Any]]
    ) -> dict[str, Samples]:
        """Samples in turns of all that can be called; the others' reasons go into `found`."""
        able, rules = dict(ready), self.rules
        rest = partial(time.sleep, SETTLE_SECONDS) if rules.threads > 1 else None
        while able:
            try:
                return interleave(able, rounds=rules.rounds, seconds=rules.seconds, rest=rest)
            except Lost as lost:
                found[lost.name] = {"error": str(lost)}
                del able[lost.name]
        return {}


class Lost(MeasurementError):
    """A contender that failed while it was timed, by name."""

    def __init__(self, name: str, reason: MeasurementError) -> None:
        super().__init__(str(reason))
        self.name = name


def figures(samples: Mapping[str, Samples], name: str, flops: int) -> dict[str, float]:
    """What is kept of a contender's samples; its ratio is within rounds, to the first of all."""
    own, anchor = samples[name], next(iter(samples.values()))
    found = {
        "gflops": flops / own.median / 1e9,
        "microseconds": 1e6 * own.median,
        "spread": own.spread,
        "ratio": ratio(own, anchor),
    }
    return {key: float(f"{value:.5g}") for key, value in found.items()}


def answer_of(child: Child, request: Mapping[str, Any]) -> dict[str, Any]:
    """A process's answer; raises `MeasurementError` for an error in it."""
    answer = child.ask(request)
    if "error" in answer:
        raise MeasurementError(answer["error"])
    return answer
