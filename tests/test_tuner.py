"""Measured searches with clocks and samples that the test makes up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import needs_host

import looptune
from looptune import choose as choosing
from looptune import tuner as tuning
from looptune.choose import Budget
from looptune.database import Database
from looptune.errors import ArgumentTypeError, UnsupportedHostError
from looptune.host import host_target
from looptune.measure import (
    ROUNDS,
    Posterior,
    Samples,
    compare,
    compare_samplers,
    rotating_arrays,
    student,
)
from looptune.runtime.kernel import Kernel
from looptune.schedule import Schedule, parse_order, split
from looptune.search import STRATEGIES
from looptune.target import TARGETS
from looptune.tuner import Interrupted, Spending, Trial, Tuner, simplicity
from looptune.workloads import matmul

pytestmark = needs_host
PLAN = matmul(24, 32, 16)
(NEST,) = PLAN.nests


class Ticks:
    """A clock that moves by itself, a step a look."""

    def __init__(self, step: float = 0.01) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def drawn(rng: np.random.Generator, ratio: float, noise: float) -> Callable[[int], float]:
    """A sampler of calls that take `ratio` microseconds, more or less."""
    return lambda calls: calls * 1e-6 * ratio * math.exp(noise * rng.standard_normal())


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (4, 2.776), (14, 2.145), (60, 2.0)])
def test_students_quantile(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=0.03)


def test_an_a_a_test_says_within_noise() -> None:
    """The same distribution twice, through all that `compare` does: 95 % of intervals hold 0."""
    told = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        twins = {"anchor": drawn(rng, 1.0, 0.02), "twin": drawn(rng, 1.0, 0.02)}
        told += compare_samplers(twins, seconds=0.0)["twin"].verdict != "within noise"
    assert 8 <= told <= 34


def test_of_many_equals_few_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finalists of a search, all as fast as the anchor: the best of them is timed alone."""
    rng = np.random.default_rng(0)
    tuner = Tuner(NEST, host_target(), 1, Spending(1.0, None, Ticks(0.0), 0.0))
    monkeypatch.setattr(tuning, "rotating_sampler", lambda *_: drawn(rng, 1.0, 0.02))
    quick = tuning.compare_samplers
    monkeypatch.setattr(tuning, "compare_samplers", lambda s, **_: quick(s, seconds=0.0))
    leaders = [parse_order(NEST, f"m:{rows} n:16 k m n", "n") for rows in (2, 4, 8)]
    wins = sum(tuner.final(leaders)[1] is not None for _ in range(100))
    assert wins <= 9  # 2.5 % of them, as good as surely


def test_faster_slower_and_noisy() -> None:
    rng = np.random.default_rng(0)
    found = compare_samplers(
        {
            "anchor": drawn(rng, 1.0, 0.01), "fast": drawn(rng, 0.8, 0.01),
            "slow": drawn(rng, 1.3, 0.01), "same": drawn(rng, 1.0, 0.01),
            "wild": drawn(rng, 1.0, 2.0),
        },
        seconds=0.05,
    )  # fmt: skip
    assert [found[name].verdict for name in ("fast", "slow")] == ["faster", "slower"]
    assert found["fast"].mean == pytest.approx(math.log(1 / 0.8), abs=0.02)
    assert found["wild"].noisy
    assert not found["fast"].noisy
    assert Posterior(1, 0.5, 0.0).verdict == "within noise"


def test_the_rounds_are_fixed_beforehand() -> None:
    rng = np.random.default_rng(1)
    for ratio in (0.5, 1.0):
        pair = {"a": drawn(rng, 1.0, 0.05), "b": drawn(rng, ratio, 0.05)}
        assert compare_samplers(pair, seconds=0)["b"].n == ROUNDS


def test_compare_kernels() -> None:
    slow = looptune.compile(NEST, Schedule(NEST))
    fast = looptune.optimize(PLAN)
    for cache in ("hot", "cold"):
        found = compare({"default": fast, "untuned": slow}, seconds=0.05, cache=cache)  # type: ignore[arg-type]
        assert found["untuned"].verdict in ("faster", "slower", "within noise")
    with pytest.raises(looptune.errors.ArgumentError, match="at least two kernels"):
        compare({"a": fast})
    with pytest.raises(looptune.errors.ArgumentError, match="kernels by name"):
        compare({"a": 1, "b": 2})  # type: ignore[dict-item]
    with pytest.raises(looptune.errors.ArgumentError, match="cache='warm'"):
        compare({"a": fast, "b": slow}, cache="warm")  # type: ignore[arg-type]
    assert len(rotating_arrays(PLAN, host_target(), cold=False)) == 2
    assert len(rotating_arrays(PLAN, host_target(), cold=True)) > 2


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times come from the test: log gains by a schedule's order, 0 where none is given."""
    gains: dict[str, float] = {}

    def timed(self: Tuner, kernel: Kernel) -> Posterior:
        (schedule,) = kernel.schedules
        return Posterior(5, gains.get(schedule.order, -1.0), 1e-6)

    def compared(samplers: dict[str, object], **_: object) -> dict[str, Posterior]:
        _, *names = samplers
        return {name: Posterior(15, gains.get(name, -1.0), 1e-6) for name in names}

    monkeypatch.setattr(Tuner, "timed", timed)
    monkeypatch.setattr(tuning, "compare_samplers", compared)
    return gains


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "default"])
def test_every_strategy_measures_within_its_budget(strategy: str) -> None:
    kernel = looptune.optimize(
        PLAN, strategy=strategy, budget=Budget(measurements=6), database=None, threads=1
    )
    report = kernel.report
    assert report.tried <= 6
    assert report.verified
    assert kernel.origin == strategy
    (choice,) = report.choices
    won = choice.schedule != looptune.default.default_schedule(NEST, host_target())
    assert (choice.posterior is not None) == won


def test_a_deadline_ends_a_search_with_the_best_so_far() -> None:
    clock = Ticks(0.05)
    options = choosing.Options(
        target=host_target(), threads=1, strategy="random", budget=Budget(seconds=2.0), clock=clock
    )
    chosen = choosing.choose(NEST, options)
    assert 0 < chosen.tried < 60
    assert clock.now < 4.0


def test_no_time_at_all_gives_the_default() -> None:
    options = choosing.Options(
        target=host_target(), threads=1, strategy="random", budget=Budget(seconds=1e-9),
        clock=Ticks(),
    )  # fmt: skip
    chosen = choosing.choose(NEST, options)
    assert chosen.tried == 0
    assert chosen.schedule == looptune.default.default_schedule(NEST, host_target())


def test_the_winner_is_recorded_with_fresh_samples(
    tmp_path: Path, scripted: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = parse_order(NEST, "m:4 n:16 k m n", "n")
    scripted[winner.order] = 0.3  # by what a trial says
    scripted[winner.identity] = 0.2  # by fresh samples
    monkeypatch.setitem(STRATEGIES, "greedy1", lambda search: search.value(winner))
    path = tmp_path / "found.sqlite3"
    kernel = looptune.optimize(PLAN, strategy="greedy1", budget=1.0, database=path, threads=1)
    assert kernel.schedule == winner
    (record,) = Database(path).records()
    assert (record.mean, record.n) == (0.2, 15)
    again = looptune.optimize(PLAN, database=path, threads=1)
    assert again.origin == "database"
    retuned = looptune.optimize(
        PLAN, strategy="greedy1", budget=1.0, database=path, retune=True, threads=1
    )
    assert retuned.origin == "greedy1"
    (merged,) = Database(path).records()
    assert merged.n == 30


def test_what_does_not_beat_the_default_is_neither_used_nor_recorded(
    tmp_path: Path, scripted: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lucky = parse_order(NEST, "m:4 n:16 k m n", "n")
    scripted[lucky.order] = 0.5
    scripted[lucky.identity] = -0.1
    monkeypatch.setitem(STRATEGIES, "greedy1", lambda search: search.value(lucky))
    path = tmp_path / "found.sqlite3"
    kernel = looptune.optimize(PLAN, strategy="greedy1", budget=1.0, database=path, threads=1)
    assert kernel.schedule == looptune.default.default_schedule(NEST, host_target())
    assert Database(path).records() == []


def test_ties_go_to_the_simpler_schedule(
    scripted: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = parse_order(NEST, "m:4 n:16 k m n", "n")
    fancy = parse_order(NEST, "m:8 n:16 m:4 k m n", "n")
    for schedule, gain in ((plain, 0.2), (fancy, 0.2001)):
        scripted[schedule.order] = scripted[schedule.identity] = gain
    monkeypatch.setitem(
        STRATEGIES, "greedy1", lambda search: [search.value(s) for s in (fancy, plain)]
    )
    kernel = looptune.optimize(PLAN, strategy="greedy1", budget=1.0, database=None, threads=1)
    assert kernel.schedule == plain
    assert simplicity(plain) < simplicity(fancy)


def test_operands_keep_their_strides() -> None:
    """Views with gaps, transposed, and an output that is added to."""
    plan = matmul(
        12, 16, 8, strides_a=(11, 1), strides_b=(1, 9), strides_out=(40, 2), accumulate=True
    )
    kernel = looptune.optimize(
        plan, strategy="random", budget=Budget(measurements=3), database=None
    )
    assert kernel.report.tried == 3
    assert "VerificationError" not in kernel.report.rejected


def test_a_fast_but_wrong_candidate_has_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that skips its work is the fastest of all."""
    real = tuning.build
    lazy = parse_order(NEST, "m:4 n:16 k m n", "n")

    def build(
        plan: looptune.Plan, schedules: list[Schedule], *args: object, **kw: object
    ) -> object:
        kernel = real(plan, schedules, *args, **kw)  # type: ignore[arg-type]
        return Lazy(kernel) if schedules[0].identity == lazy.identity else kernel

    monkeypatch.setattr(tuning, "build", build)
    monkeypatch.setitem(STRATEGIES, "greedy1", lambda search: search.value(lazy))
    path = tmp_path / "found.sqlite3"
    kernel = looptune.optimize(PLAN, strategy="greedy1", budget=1.0, database=path, threads=1)
    assert kernel.report.rejected == {"VerificationError": 1}
    assert kernel.report.choices[0].trials[0].value is None
    assert Database(path).records() == []


class Lazy:
    """A kernel that does nothing, in no time."""

    def __init__(self, kernel: Kernel) -> None:
        self.plan, self.boundaries, self.stages = kernel.plan, kernel.boundaries, kernel.stages

    def __call__(self, *inputs: object, out: object) -> object:
        return out


def test_what_has_the_anchors_code_is_the_anchor() -> None:
    """Two identities, one code: a loop around whole vectors of the tile, and the tile itself."""
    target = replace(host_target("avx2"), cache_bytes=(1 << 15, 1 << 20, 1 << 25))
    nest = matmul(4, 8, 64).nests[0]
    tuner = Tuner(nest, target, 1, Spending(None, None, Ticks(), 0.0))
    tuner.anchor_schedule = parse_order(nest, "k m n", "n")
    tuner.anchor = tuning.build(tuner.plan, [tuner.anchor_schedule], target)
    twin = parse_order(nest, "m k n", "n")
    other = parse_order(nest, "k:16 k m n", "n")
    assert tuner.kernel_of(tuner.anchor_schedule) is tuner.anchor
    assert tuner.kernel_of(other) is not tuner.anchor
    assert twin.identity != tuner.anchor_schedule.identity
    assert tuner.kernel_of(twin) is tuner.anchor
    assert tuner(twin) == 0.0
    assert tuner.final([twin, tuner.anchor_schedule]) == (tuner.anchor_schedule, None)


def test_a_time_under_the_roofline_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spending = Spending(None, None, Ticks(), 0.0)
    tuner = Tuner(NEST, host_target(), 1, spending)
    fast = {"anchor": Samples((1e-6,) * 5), "candidate": Samples((tuner.floor() / 2,) * 5)}
    monkeypatch.setattr(tuning, "interleave", lambda *_, **__: fast)
    assert tuner(parse_order(NEST, "m:4 n:16 k m n", "n")) is None
    assert "under the roofline's" in tuner.trials[0].reason


def test_an_interrupt_is_raised_again_after_the_best_is_recorded(
    tmp_path: Path, scripted: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = parse_order(NEST, "m:4 n:16 k m n", "n")
    scripted[winner.order] = scripted[winner.identity] = 0.2

    def interrupted(search: looptune.search.Search) -> None:
        search.value(winner)
        raise KeyboardInterrupt

    monkeypatch.setitem(STRATEGIES, "greedy1", interrupted)
    path = tmp_path / "found.sqlite3"
    with pytest.raises(KeyboardInterrupt) as caught:
        looptune.optimize(PLAN, strategy="greedy1", budget=1.0, database=path, threads=1)
    assert isinstance(caught.value, Interrupted)
    assert caught.value.schedule == winner
    assert [record.identity for record in Database(path).records()] == [winner.identity]


def test_progress_hears_of_every_trial(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[Trial] = []
    kernel = looptune.optimize(
        PLAN, strategy="random", budget=Budget(measurements=4), database=None,
        progress=heard.append,
    )  # fmt: skip
    assert len(heard) == kernel.report.tried == 4
    looptune.optimize(
        PLAN, strategy="random", budget=Budget(measurements=2), database=None, progress=True
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "candidates" in captured.err


def test_without_a_budget_the_model_chooses_and_nothing_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "found.sqlite3"
    kernel = looptune.optimize(PLAN, strategy="greedy1", database=path)
    assert kernel.report.choices[0].posterior is None
    assert kernel.report.tried > 1
    assert Database(path).records() == []


def test_what_cannot_run_here_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "runs", lambda target: False)
    with pytest.raises(UnsupportedHostError, match="nothing can be measured"):
        looptune.optimize(PLAN, strategy="random", budget=1.0, database=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retune": 1}, "retune=1; True or False"),
        ({"progress": "yes"}, "progress='yes'"),
        ({"database": 3}, "database=3"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        looptune.optimize(PLAN, **arguments)  # type: ignore[arg-type]


def test_all_of_a_plans_nests_share_the_budget() -> None:
    plan = looptune.workloads.einsum("ij,jk,kl->il", (8, 9), (9, 10), (10, 16))
    kernel = looptune.optimize(
        plan, strategy="random", budget=Budget(measurements=4), database=None
    )
    assert [choice.tried for choice in kernel.report.choices] == [2, 2]
    assert Budget(seconds=1.0, measurements=5).share(2) == Budget(seconds=0.5, measurements=3)


def test_schedules_of_the_widest_kind_are_simple_last() -> None:
    plain = Schedule(NEST)
    assert simplicity(plain) < simplicity(split(plain, 0, 4))
    assert TARGETS["avx2"].name == "avx2"
