"""What a policy advises, and what `optimize` makes of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import policy
from harness import needs_host

import looptune
from looptune.construct import Construction
from looptune.default import default_schedule
from looptune.errors import ArgumentTypeError, CheckpointError
from looptune.host import host_target
from looptune.models.advise import SECONDS, advise, outside, policy_of, shipped, taken
from looptune.models.checkpoint import load, save
from looptune.models.gain import GainModel
from looptune.models.inference import Policy
from looptune.target import target_named
from looptune.workloads import einsum, matmul

AVX2 = target_named("avx2")
PLAN = matmul(96, 80, 112)
(NEST,) = PLAN.nests


def test_advice_is_distinct_and_not_the_default() -> None:
    found = advise(policy(0.1), NEST, AVX2)
    names = [each.schedule.identity for each in found]
    assert found
    assert len(set(names)) == len(names)
    assert default_schedule(NEST, AVX2).identity not in names
    assert all(each.gain == pytest.approx(0.1) for each in found)


def test_an_expected_loss_is_said() -> None:
    assert {round(each.gain, 5) for each in advise(policy(-0.1), NEST, AVX2)} == {-0.1}


def test_without_a_gain_model_the_cost_model_ranks() -> None:
    found = advise(policy(), NEST, AVX2)
    gains = [each.gain for each in found]
    assert gains == sorted(gains, reverse=True)
    assert all(gain != 0.1 for gain in gains)


def test_what_members_differ_by_is_taken_off() -> None:
    spread = policy(0.1)
    assert spread.gain is not None
    arrays = dict(spread.gain.arrays)
    arrays["b3"] = np.linspace(0, 0.2, len(arrays["b3"]), dtype=np.float32).reshape(-1, 1, 1)
    state = Construction(NEST, AVX2)
    cautious = GainModel(arrays).cautious([state])
    assert cautious[0] == pytest.approx(0.1 - arrays["b3"].std(), abs=1e-6)


def test_no_time_still_gives_a_schedule() -> None:
    now = iter(range(1000))
    assert advise(policy(0.1), NEST, AVX2, seconds=0.0, clock=lambda: float(next(now)))


LONG = 4 * SECONDS  # time enough on a busy machine, too


class Delayed(Policy):
    """A policy whose process has to wait for a core, once and for long."""

    waited = False

    def log_probabilities(self, states: Sequence[Construction]) -> np.ndarray:
        if not self.waited:
            time.sleep(LONG)
            self.waited = True
        return super().log_probabilities(states)


def test_waiting_for_a_core_changes_no_advice() -> None:
    fast = policy(0.1)
    slow = Delayed(fast.architecture, fast.arrays, gain=fast.gain)
    said = [
        [(each.gain, each.schedule.actions) for each in advise(asked, NEST, AVX2, seconds=LONG)]
        for asked in (fast, slow)
    ]
    assert slow.waited
    assert said[0] == said[1]


def test_what_a_nest_has_no_use_for_changes_no_advice() -> None:
    """Pairs of whole numbers multiplied at once: no floating-point nest does that."""
    twin = replace(AVX2, dot=not AVX2.dot)
    for nest in (NEST, einsum("abc,cd->adb", sizes={"a": 9, "b": 20, "c": 31, "d": 40}).nests[0]):
        said = [
            [(each.gain, each.schedule.actions) for each in advise(shipped(), nest, target)]
            for target in (AVX2, twin)
        ]
        assert said[0] == said[1]
        assert said[0]


@pytest.mark.parametrize(
    ("nest", "reason"),
    [
        (matmul(0, 4, 5).nests[0], "nothing to compute"),
        (matmul(4, 4, 5, dtype="float16").nests[0], "not trained on float16"),
        (
            einsum("abcdefghijk,k->abcdefghij", sizes=dict.fromkeys("abcdefghijk", 2)).nests[0],
            "11 axes and 3 operands are more",
        ),
    ],
)
def test_outside_of_its_domain_there_is_a_reason(nest: looptune.Nest, reason: str) -> None:
    assert reason in outside(nest)
    assert advise(policy(0.1), nest, AVX2) == []


def test_the_shipped_policy_is_read_once_and_others_anew(tmp_path: Path) -> None:
    assert policy_of(None) is shipped()
    assert policy_of(shipped()) is shipped()
    path = tmp_path / "policy.npz"
    save(path, policy(0.1))
    first = policy_of(path)
    save(path, policy(0.2, seed=1))
    again = policy_of(str(path))
    assert not np.array_equal(first.arrays["graph.weight"], again.arrays["graph.weight"])


@needs_host
class TestOptimize:
    """`optimize(strategy="policy")`."""

    def test_the_best_advice_is_taken_without_a_measurement(self) -> None:
        kernel = looptune.optimize(PLAN, strategy="policy", policy=policy(0.1), database=None)
        assert kernel.origin == "policy"
        assert kernel.report.verified

    def test_an_expected_loss_leaves_the_default_with_the_reason(self) -> None:
        kernel = looptune.optimize(PLAN, strategy="policy", policy=policy(-0.1), database=None)
        (choice,) = kernel.report.choices
        assert kernel.origin == choice.origin == "default"
        assert "is expected to beat the default" in choice.note

    def test_with_a_budget_the_advice_is_measured(self) -> None:
        budget = looptune.Budget(measurements=3)
        kernel = looptune.optimize(
            PLAN, strategy="policy", policy=policy(0.1), budget=budget, database=None
        )
        assert 1 <= kernel.report.tried <= 3
        assert kernel.report.choices[0].note == ""

    def test_with_a_budget_an_expected_loss_is_measured_all_the_same(self) -> None:
        budget = looptune.Budget(measurements=3)
        kernel = looptune.optimize(
            PLAN, strategy="policy", policy=policy(-0.1), budget=budget, database=None
        )
        assert kernel.report.tried == 3

    def test_with_a_budget_there_is_a_reason_too(self) -> None:
        budget = looptune.Budget(measurements=3)
        kernel = looptune.optimize(
            matmul(8, 8, 8, dtype="float16"), strategy="policy", policy=policy(0.1),
            budget=budget, database=None,
        )  # fmt: skip
        assert "not trained on float16" in kernel.report.choices[0].note

    def test_the_shipped_policy_is_asked_unless_told_otherwise(self) -> None:
        kernel = looptune.optimize(PLAN, database=None)
        assert kernel.report.strategy == "policy"
        led = taken(advise(shipped(), NEST, host_target()))
        expected = default_schedule(NEST, host_target()) if led is None else led.schedule
        assert kernel.schedules == (expected,)

    def test_a_policy_is_read_once_a_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "policy.npz"
        save(path, policy(0.1))
        read: list[object] = []

        def counted(place: object) -> Policy:
            read.append(place)
            return load(path)

        monkeypatch.setattr("looptune.models.advise.load", counted)
        plan = einsum("ij,jk,kl->il", sizes={"i": 9, "j": 8, "k": 7, "l": 6})
        looptune.optimize(plan, policy=path, database=None)
        looptune.optimize(plan, policy=path, budget=looptune.Budget(measurements=2), database=None)
        assert read == [path, path]

    def test_a_policy_is_for_its_strategy(self) -> None:
        with pytest.raises(ArgumentTypeError, match="strategy='policy', not 'default'"):
            looptune.optimize(PLAN, strategy="default", policy=policy(0.1))

    def test_what_is_no_policy_is_refused(self) -> None:
        with pytest.raises(ArgumentTypeError, match="policy=7"):
            looptune.optimize(PLAN, strategy="policy", policy=7)

    def test_a_file_that_is_none_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no checkpoint"):
            looptune.optimize(PLAN, strategy="policy", policy=tmp_path / "no.npz")
