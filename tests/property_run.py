"""The big property run: random nests x random legal schedules x every target that runs here.

    PYTHONPATH=. python tests/property_run.py --cases 100000 --seed 0 --jobs 2

A case is its seed. It runs as machine code on each target of this host, and every
`--interpret`-th case in the interpreter too, for all targets, before and after legalization.
Failures print the lines that repeat them. A kernel that kills its process or never ends costs
one worker, and is the failure of the seed it was at.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
from features import features
from harness import Call, interpreted, native, run_once, run_poisoned, values
from random_nests import Case, random_case, random_chunks
from tqdm import tqdm

from looptune.dtypes import is_whole, numpy_dtype, poison
from looptune.errors import LoweringError
from looptune.host import runs
from looptune.interpret import Chunks
from looptune.ir import plan_of
from looptune.legalize import legalize
from looptune.lower import GENERATOR_VERSION, lower
from looptune.program import Program, walk
from looptune.provenance import commit
from looptune.target import TARGETS, Target

INTERPRETED_SCRATCH = 1 << 19
SILENCE_SECONDS = 60  # far beyond any case: a kernel that loops for ever is killed


@dataclass(frozen=True)
class Failure:
    """What went wrong with a seed on a target, and which stage is to blame."""

    seed: int
    target: str
    error: str
    stage: str = "unknown"

    def __str__(self) -> str:
        return (
            f"seed {self.seed} on {self.target}, {self.stage}: {self.error}\n"
            f"    from property_run import TARGETS, check_case, random_case\n"
            f"    target = TARGETS[{self.target!r}]\n"
            f"    print(random_case({self.seed}, target).schedule)\n"
            f"    check_case({self.seed}, target, interpret_too=True)"
        )


@dataclass
class Report:
    """What a run saw: how often each feature occurred, and what failed."""

    cases: int = 0
    refused: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Count another run's cases into this one."""
        self.cases += other.cases
        self.refused += other.refused
        self.coverage.update(other.coverage)
        self.failures += other.failures


def check_case(seed: int, target: Target, interpret_too: bool) -> list[str]:
    """Run one case on one target; the features it covers. Raises what goes wrong."""
    case = random_case(seed, target)
    raw = lower(case.schedule, target)
    programs = tuple(legalize(program) for program in raw)
    chunks = partial(random_chunks, seed)
    tags = [*features(case, target), *(f"op {name}" for name in operations(raw + programs))]
    results = []
    if runs(target):
        results.append(run(case, native(programs, chunks)))
        tags.append(f"machine code {target.name}")
    # A copy of a million elements takes the interpreter minutes.
    if interpret_too and programs[-1].scratch_bytes <= INTERPRETED_SCRATCH:
        results += [run(case, interpreted(each, chunks)) for each in (programs, raw)]
        tags.append(f"interpreter {target.name}")
    if programs[-1].trips > 1 and not case.nest.accumulate:
        make = native if runs(target) else interpreted
        check_shares(case, partial(make, programs))
    if case.exact:
        same = all(np.array_equal(results[0], other, equal_nan=True) for other in results)
        assert same, "machine code and interpreter differ on exact numbers"
    return tags


def check_shares(case: Case, make: Callable[[Chunks], Call]) -> None:
    """Pieces of the parallel loop write different elements, since threads run them at once."""
    tensors = plan_of(case.nest).tensors
    rng = np.random.default_rng(case.seed)
    junk = poison(tensors[0].dtype)
    poisoned = np.full(tensors[0].shape, junk, numpy_dtype(tensors[0].dtype))
    data = [poisoned, *(values(t, rng, True) for t in tensors[1:])]
    writes = np.zeros(tensors[0].shape, int)
    for part in range(3):
        call = make(partial(third, part))
        found = run_once(tensors, data, call, end=True)
        writes += found != junk if is_whole(tensors[0].dtype) else found == found
    assert writes.max(initial=0) <= 1, "two pieces of the parallel loop write one element"


def third(part: int, trips: int) -> list[tuple[int, int]]:
    """A third of the iterations of a loop, all of them where there is no loop to share."""
    return [(part * trips // 3, (part + 1) * trips // 3)] if trips > 1 else [(0, 1)]


def run(case: Case, call: Call) -> np.ndarray:
    """Run a case's kernel on the numbers of its seed."""
    rng = np.random.default_rng(case.seed)
    return run_poisoned(case.nest, call, rng, case.exact, nan=case.nan)


def operations(programs: Sequence[Program]) -> set[str]:
    """Names of the operations that occur."""
    return {type(op).__name__ for program in programs for op in walk(program.body)}


def blame(seed: int, target: Target) -> str:
    """The first stage after which the interpreter's result is wrong, if any is."""
    case = random_case(seed, target)
    stages: dict[str, Callable[[Program], Program]] = {
        "lowering": lambda p: p,
        "legalize": legalize,
    }
    for name, stage in stages.items():
        try:
            programs = [stage(program) for program in lower(case.schedule, target)]
            run(case, interpreted(programs, partial(random_chunks, seed)))
        except Exception:
            return name
    return "encoding"


def run_seed(seed: int, targets: Sequence[str], interpret_every: int) -> Report:
    """Run one case on the targets; what fails is reported, not raised."""
    report = Report(cases=1)
    for name in targets:
        try:
            # Groups of eight, so that every worker of a stride gets its share of the slow ones.
            tags = check_case(seed, TARGETS[name], seed // 8 % interpret_every == 0)
            report.coverage.update({*tags, f"target {name}"})
        except LoweringError:
            report.refused += 1
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            report.failures.append(Failure(seed, name, text, blame(seed, TARGETS[name])))
    return report


def worker(link: Connection, seeds: range, targets: Sequence[str], interpret_every: int) -> None:
    """Report one seed after another."""
    for seed in seeds:
        link.send(run_seed(seed, targets, interpret_every))


@dataclass
class Lane:
    """A worker, the connection to it and the seeds it has still to report."""

    seeds: range
    options: tuple[Sequence[str], int]

    def start(self) -> None:
        """Start a process for the seeds left."""
        self.link, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=worker, args=(theirs, self.seeds, *self.options))
        self.process.start()
        theirs.close()
        self.heard = time.monotonic()

    def receive(self) -> Report:
        """The report of the next seed; if the worker died, that is what it says."""
        seed, self.seeds = self.seeds[0], self.seeds[1:]
        self.heard = time.monotonic()
        try:
            report: Report = self.link.recv()
            return report
        except EOFError:
            self.process.join()
            error = f"the process ended with code {self.process.exitcode}"
            failures = [Failure(seed, ",".join(self.options[0]), error)]
            if self.seeds:
                self.start()
            return Report(cases=1, failures=failures)


def campaign(
    seeds: range, targets: Sequence[str], interpret_every: int, jobs: int, quiet: bool | None = True
) -> Report:
    """Run the seeds in `jobs` processes (0: in this one); a progress bar unless `quiet`."""
    total = Report()
    with tqdm(total=len(seeds), disable=quiet, unit="case") as progress:
        if not jobs:
            for seed in seeds:
                total.add(run_seed(seed, targets, interpret_every))
                progress.update()
            return total
        lanes = [Lane(seeds[job::jobs], (targets, interpret_every)) for job in range(jobs)]
        lanes = [lane for lane in lanes if lane.seeds]
        for lane in lanes:
            lane.start()
        turn = time.monotonic()
        while lanes:
            ready = wait([lane.link for lane in lanes], timeout=1)
            paused, turn = time.monotonic() - turn > SILENCE_SECONDS / 2, time.monotonic()
            if paused:  # the whole run was stopped and continued: nobody was silent
                for lane in lanes:
                    lane.heard = turn
            for lane in lanes:
                if lane.link in ready:
                    total.add(lane.receive())
                    progress.update()
                elif time.monotonic() - lane.heard > SILENCE_SECONDS:
                    lane.process.kill()
            lanes = [lane for lane in lanes if lane.seeds]
    return total


def stop_at_failure(seeds: range) -> None:
    """Run seeds in this process on all targets; exits with the first failure, if there is one."""
    for seed in seeds:
        for name in sorted(TARGETS):
            try:
                check_case(seed, TARGETS[name], interpret_too=seed % 16 == 0)
            except LoweringError:
                continue
            except Exception as error:
                sys.exit(f"seed {seed} on {name}: {type(error).__name__}: {error}")


def table(report: Report) -> str:
    """The coverage table and the failures, as text."""
    rows = [f"{count:9d}  {name}" for name, count in sorted(report.coverage.items())]
    head = f"{report.cases} cases, {report.refused} refused, {len(report.failures)} failures"
    return "\n".join([head, *rows, *map(str, report.failures[:20])])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    found.add_argument("--cases", type=int, default=1000)
    found.add_argument("--seed", type=int, default=0, help="the first case")
    found.add_argument("--jobs", type=int, default=2, help="processes; 0: this one")
    found.add_argument("--interpret", type=int, default=10, help="interpret every N-th case")
    found.add_argument("--targets", nargs="+", default=sorted(TARGETS), choices=sorted(TARGETS))
    found.add_argument("--output", type=Path, help="write JSON here")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if anything failed."""
    args = parser().parse_args(argv)
    print(f"seeds {args.seed} to {args.seed + args.cases - 1}", file=sys.stderr)
    seeds = range(args.seed, args.seed + args.cases)
    start = time.monotonic()
    report = campaign(seeds, args.targets, args.interpret, args.jobs, quiet=None)
    print(table(report))
    if args.output:
        options = {k: v for k, v in vars(args).items() if k != "output"}
        seconds = round(time.monotonic() - start)
        found = {
            "schema": 1, "generator": GENERATOR_VERSION, "commit": commit(), "options": options,
            "seconds": seconds, **vars(report),
        }  # fmt: skip
        found["failures"] = [asdict(failure) for failure in report.failures]
        args.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
