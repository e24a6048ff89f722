"""What a schedule is worth: log(default's time / its time), predicted or measured.

Measurements are noisy, and a policy finds every lucky sample. So what is known of a schedule is
a posterior, kept over episodes: asked again, it is measured again with a probability that falls
with the samples there are, and the reward is the mean of all of them.
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from looptune.envs.problem import Problem
from looptune.errors import LooptuneError, MeasurementError
from looptune.host import fingerprint
from looptune.measure import Posterior
from looptune.propose import ModelValue
from looptune.schedule import Schedule
from looptune.tuner import Spending, Tuner

LEAST, MOST = -2.0, 2.0  # of a reward
TUNERS = 16  # problems whose operands and default kernels are kept
BATCH = 64  # posteriors a write
Gain = Callable[[Problem, Schedule], float | None]
Measure = Callable[[Problem, Schedule], Posterior]


def clipped(gain: float | None, least: float = LEAST) -> float:
    """A gain as a reward; what has none, because it cannot be built, gets the least."""
    return least if gain is None else max(least, min(MOST, gain))


def modelled(problem: Problem, schedule: Schedule) -> float | None:
    """The gain by the cost model, None for what cannot be lowered: the same anywhere."""
    value = ModelValue(problem.nest, problem.target, problem.threads)(schedule)
    return value if value > -math.inf else None


@dataclass
class Measured:
    """The measured gain, by posteriors that `measure` adds to; kept in `path`, if given.

    Records of another machine are not read. `rng` decides what is measured again. What is sent to
    another machine forgets there what it knew.
    """

    path: Path | None = None
    seed: int = 0
    measure: Measure | None = None
    known: dict[str, Posterior | None] = field(default_factory=dict)
    unwritten: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.measure = self.measure or Bench()
        self.machine = json.dumps(asdict(fingerprint()), sort_keys=True)
        if self.path is not None and self.path.exists():
            self.known.update(read(self.path, self.machine))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, unwritten=[])
        here = json.dumps(asdict(fingerprint()), sort_keys=True)
        if self.machine != here:
            self.machine, self.known = here, {}

    def __call__(self, problem: Problem, schedule: Schedule) -> float | None:
        """The mean of all samples of a schedule, None for one that cannot be built."""
        target = problem.target
        key = f"{target.name} {target.cache_bytes} {problem.threads} {schedule.identity}"
        known = self.known.get(key)
        again = known is not None and self.rng.random() < 1 / (known.n + 1)
        if key not in self.known or again:
            assert self.measure is not None
            try:
                found = self.measure(problem, schedule)
                known = found if known is None else known.merged(found)
            except MeasurementError:  # a time that cannot be: nothing is learnt from it
                return None if known is None else known.mean
            except LooptuneError:
                known = None
            self.known[key] = known
            self.unwritten.append(key)
            if len(self.unwritten) >= BATCH:
                self.flush()
        return None if known is None else known.mean

    def flush(self) -> None:
        """Append what is new to the file, in one write."""
        if self.path is not None and self.unwritten:
            lines = []
            for key in dict.fromkeys(self.unwritten):
                each = self.known[key]
                values = None if each is None else [each.n, each.mean, each.variance]
                lines.append(json.dumps({"machine": self.machine, "key": key, "found": values}))
            self.path.parent.mkdir(parents=True, exist_ok=True)  # on another node
            with self.path.open("a+b") as file:
                torn = file.seek(0, os.SEEK_END) and not ends_line(file)
                file.write(("\n" * bool(torn) + "\n".join(lines) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        self.unwritten.clear()


def ends_line(file: BinaryIO) -> bool:
    """Whether a file's last line is finished: not so if its writer was killed."""
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read(path: Path, machine: str) -> dict[str, Posterior | None]:
    """The posteriors of a file that are of this machine; the later of two counts, and a line that
    was not finished does not."""
    found: dict[str, Posterior | None] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
            if record["machine"] == machine:
                values = record["found"]
                found[record["key"]] = None if values is None else Posterior(*values)
        except (ValueError, KeyError, TypeError):
            continue
    return found


@dataclass
class Bench:
    """Measures a schedule beside its default: verified first. Keeps the latest problems ready."""

    tuners: OrderedDict[Problem, Tuner] = field(default_factory=OrderedDict)

    def __call__(self, problem: Problem, schedule: Schedule) -> Posterior:
        """The posterior of one comparison; raises what is wrong with the schedule."""
        tuner = self.tuners.pop(problem, None)
        if tuner is None:
            spending = Spending(None, None, lambda: 0.0, 0.0)
            tuner = Tuner(problem.nest, problem.target, problem.threads, spending)
        self.tuners[problem] = tuner
        while len(self.tuners) > TUNERS:
            self.tuners.popitem(last=False)
        return tuner.asked(schedule)

    def __getstate__(self) -> dict[str, object]:
        """Nothing: kernels stay in their process, and are made again in another."""
        return {"tuners": OrderedDict()}


REWARDS: dict[str, Callable[[], Gain]] = {"model": lambda: modelled, "measured": Measured}
