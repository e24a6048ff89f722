"""Rewards: posteriors that grow, their file, and what cannot be measured."""

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import needs_host

pytest.importorskip("gymnasium")

from looptune.default import default_schedule
from looptune.envs import rewards
from looptune.envs.construct import ConstructEnv
from looptune.envs.problem import Problem
from looptune.envs.rewards import BATCH, Bench, Measured, clipped, modelled, read
from looptune.errors import LoweringError, MeasurementError
from looptune.measure import Posterior
from looptune.schedule import Schedule, split, swap
from looptune.target import target_named
from looptune.workloads import matmul

PROBLEM = Problem(matmul(48, 32, 16).nests[0], target_named("avx2"))
DEFAULT = default_schedule(PROBLEM.nest, PROBLEM.target)
UNTUNED = Schedule(PROBLEM.nest)


def always(*means: float, n: int = 5) -> Callable[[Problem, Schedule], Posterior]:
    """A measurement that gives these means in turn, then the last one for ever."""
    left = list(means)

    def measure(problem: Problem, schedule: Schedule) -> Posterior:
        return Posterior(n, left.pop(0) if len(left) > 1 else left[0], 0.01)

    return measure


def raising(*errors: Exception) -> Callable[[Problem, Schedule], Posterior]:
    """A measurement that fails in these ways, then succeeds."""
    left = list(errors)

    def measure(problem: Problem, schedule: Schedule) -> Posterior:
        if left:
            raise left.pop(0)
        return Posterior(5, 0.5, 0.01)

    return measure


def posterior(samples: Sequence[float]) -> Posterior:
    return Posterior(len(samples), float(np.mean(samples)), float(np.var(samples)))


def schedules(count: int) -> list[Schedule]:
    """So many schedules of different identity."""
    found = [UNTUNED, swap(UNTUNED, 0), swap(UNTUNED, 1)]
    found += [split(UNTUNED, at, factor) for at in range(3) for factor in range(2, 16)]
    found += [split(found[1], at, factor) for at in range(3) for factor in range(2, 16)]
    assert len({schedule.identity for schedule in found}) >= count
    return found[:count]


def test_a_gain_is_bounded_on_both_sides_and_none_is_the_least() -> None:
    assert [clipped(gain) for gain in (-3.0, -1.0, 0.0, 1.5, 9.0, None)] == [
        -2.0, -1.0, 0.0, 1.5, 2.0, -2.0
    ]  # fmt: skip


def test_the_default_gains_nothing_over_itself() -> None:
    assert modelled(PROBLEM, DEFAULT) == 0.0
    worse = modelled(PROBLEM, swap(UNTUNED, 1))
    assert worse is not None
    assert worse < 0


def test_merging_is_pooling_the_samples() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=5), rng.normal(1.0, 2.0, size=9)
    both, pooled = posterior(first).merged(posterior(second)), posterior([*first, *second])
    assert both.n == pooled.n
    assert (both.mean, both.variance) == pytest.approx((pooled.mean, pooled.variance))


def test_a_lucky_sample_does_not_stay_the_truth() -> None:
    gain = Measured(measure=always(1.0, 0.0))
    values = [gain(PROBLEM, UNTUNED) for _ in range(400)]
    assert values[0] == 1.0
    assert values[-1] is not None
    assert values[-1] < 0.1


def test_what_is_well_known_is_seldom_asked_again() -> None:
    asked = []
    inner = always(0.0)

    def measure(problem: Problem, schedule: Schedule) -> Posterior:
        asked.append(schedule)
        return inner(problem, schedule)

    gain = Measured(measure=measure)
    for _ in range(1000):
        gain(PROBLEM, UNTUNED)
    # With n = 5, 10, 15 ... the expected number of asks after t is about sqrt(2 t / 5).
    assert 8 < len(asked) < 40


def test_a_seed_decides_what_is_asked_again() -> None:
    def values(seed: int) -> list[float | None]:
        gain = Measured(seed=seed, measure=always(*np.linspace(1, 0, 50)))
        return [gain(PROBLEM, UNTUNED) for _ in range(100)]

    assert values(1) == values(1)
    assert values(1) != values(2)


def test_schedules_targets_and_threads_are_told_apart() -> None:
    gain = Measured(measure=always(1.0, 2.0, 3.0, 4.0))
    others = [
        Problem(PROBLEM.nest, PROBLEM.target, threads=2),
        Problem(PROBLEM.nest, target_named("avx512")),
    ]
    first = [gain(PROBLEM, UNTUNED), gain(PROBLEM, DEFAULT), *(gain(p, UNTUNED) for p in others)]
    assert first == [1.0, 2.0, 3.0, 4.0]


def test_what_cannot_be_built_is_not_tried_again() -> None:
    gain = Measured(measure=raising(LoweringError("too large")))
    assert [gain(PROBLEM, UNTUNED) for _ in range(3)] == [None] * 3


def test_a_time_that_cannot_be_teaches_nothing() -> None:
    gain = Measured(measure=raising(MeasurementError("too fast")))
    assert gain(PROBLEM, UNTUNED) is None
    assert gain(PROBLEM, UNTUNED) == 0.5


def test_posteriors_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    gain = Measured(path, measure=always(0.25))
    gain(PROBLEM, UNTUNED)
    assert not path.exists()
    gain.flush()
    again = Measured(path, measure=raising(AssertionError("asked")))
    again.rng = np.random.default_rng(1)
    assert list(again.known.values()) == [Posterior(5, 0.25, 0.01)]
    gain.flush()
    assert len(path.read_text().splitlines()) == 1


def test_full_batches_are_written_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    gain = Measured(path, measure=always(0.25))
    for schedule in schedules(BATCH):
        gain(PROBLEM, schedule)
    assert len(path.read_text().splitlines()) == BATCH


def test_a_failure_is_kept_too(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    gain = Measured(path, measure=raising(LoweringError("too large")))
    gain(PROBLEM, UNTUNED)
    gain.flush()
    assert Measured(path, measure=always(1.0))(PROBLEM, UNTUNED) is None


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    gain = Measured(path, measure=always(0.25))
    for schedule in schedules(3):
        gain(PROBLEM, schedule)
    gain.flush()
    path.write_bytes(path.read_bytes()[:-30])
    again = Measured(path, measure=always(0.5))
    assert len(again.known) == 2
    again(PROBLEM, schedules(3)[2])
    again.flush()
    found = Measured(path)
    assert sorted(each.mean for each in found.known.values() if each) == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("line", ["", "{}", "[1]", "nonsense", '{"machine": 1}', "\x00"])
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "posteriors.jsonl"
    path.write_text(line + "\n")
    assert Measured(path).known == {}


def test_another_machine_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    gain = Measured(path, measure=always(0.25))
    gain(PROBLEM, UNTUNED)
    gain.flush()
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "machine": "another"}) + "\n")
    assert Measured(path).known == {}
    assert len(read(path, "another")) == 1


def test_the_later_of_two_records_counts(tmp_path: Path) -> None:
    path = tmp_path / "posteriors.jsonl"
    gain = Measured(path, measure=always(1.0, 0.0))
    gain(PROBLEM, UNTUNED)
    gain.flush()
    while next(iter(gain.known.values())) == Posterior(5, 1.0, 0.01):
        gain(PROBLEM, UNTUNED)
    gain.flush()
    assert Measured(path).known == gain.known
    assert len(path.read_text().splitlines()) == 2


class Idle:
    """Stands for a tuner."""

    made: list[Problem]

    def __init__(self, nest: object, target: object, threads: int, spending: object) -> None:
        self.threads = threads
        Idle.made.append(Problem(nest, target, threads))  # type: ignore[arg-type]

    def asked(self, schedule: Schedule) -> Posterior:
        return Posterior(5, float(self.threads), 0.0)


def test_the_latest_problems_stay_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "Tuner", Idle)
    Idle.made = []
    bench = Bench()
    problems = [
        Problem(PROBLEM.nest, PROBLEM.target, threads) for threads in range(1, rewards.TUNERS + 2)
    ]
    for problem in (problems[0], problems[1], problems[0], *problems[2:], problems[0]):
        assert bench(problem, UNTUNED).mean == problem.threads
    assert len(bench.tuners) == rewards.TUNERS
    assert Idle.made == problems
    bench(problems[1], UNTUNED)
    assert Idle.made == [*problems, problems[1]]


def test_benches_are_pickled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "Tuner", Idle)
    Idle.made = []
    gain = Measured()
    gain(PROBLEM, UNTUNED)
    twin = pickle.loads(pickle.dumps(gain))
    assert twin.known == gain.known
    assert twin.measure.tuners == {}


def test_another_machine_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = Measured(measure=always(0.25))
    gain(PROBLEM, UNTUNED)
    gain.measure = None
    sent = pickle.dumps(gain)
    assert pickle.loads(sent).known == gain.known
    assert pickle.loads(sent).unwritten == []
    here = rewards.fingerprint()
    monkeypatch.setattr(rewards, "fingerprint", lambda: replace(here, cpu="another"))
    found = pickle.loads(sent)
    assert found.known == {}
    assert "another" in found.machine


def test_environments_write_what_was_measured_when_they_close(tmp_path: Path) -> None:
    gain = Measured(tmp_path / "new" / "posteriors.jsonl", measure=always(0.25))
    gain(PROBLEM, UNTUNED)
    ConstructEnv(reward=gain).close()
    assert len(read(gain.path, gain.machine)) == 1


@needs_host
def test_the_default_measures_as_itself() -> None:
    gain = Measured()
    assert gain(PROBLEM, DEFAULT) == 0.0
    assert gain(PROBLEM, UNTUNED) is not None
