"""Constructions: every decision that the mask allows leads to a schedule, and stopping at once to
the default."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness import needs_host
from random_nests import random_nest

from looptune.construct import (
    ALL,
    HORIZON,
    SHARE,
    STOP,
    TABLE,
    TRIPS,
    Construction,
    decisions_of,
)
from looptune.cost import predict
from looptune.default import default_schedule
from looptune.errors import LoweringError, ScheduleError, UnsupportedError
from looptune.graph import AXES, CANDIDATES, in_domain
from looptune.host import host_isas
from looptune.ir import Nest
from looptune.offers import tiles_on_offer
from looptune.schedule import replay
from looptune.target import TARGETS
from looptune.tune import compile
from looptune.workloads import batched_matmul, conv2d, einsum, gemv, matmul
from looptune.workloads.suites import load

AVX2 = TARGETS["avx2"]


def axis_action(axis: int, kind: int) -> int:
    return TABLE.axis_at + axis * TABLE.axis + kind


def walk(nest: Nest, rng: random.Random, target=AVX2, threads=1) -> list[Construction]:
    """A random episode, all of its states; it stops early now and then."""
    states = [Construction(nest, target, threads)]
    while not states[-1].done:
        legal = np.flatnonzero(states[-1].mask).tolist()
        go_on = [action for action in legal if action != STOP]
        action = rng.choice(go_on) if go_on and rng.random() < 0.9 else STOP
        states.append(states[-1].take(action))
    return states


def nests() -> list[Nest]:
    plans = [
        matmul(37, 53, 29), matmul(64, 64, 64, trans_b=True), batched_matmul(3, 8, 20, 9),
        gemv(100, 300), conv2d((1, 8, 14, 14), (12, 8, 3, 3), padding=1),
        conv2d((1, 9, 9, 8), (8, 1, 3, 3), layout="NHWC", groups=8, stride=2, padding=1),
        einsum("abcd,dbe->ace", sizes=dict(zip("abcde", (5, 4, 6, 7, 9), strict=True))),
        einsum("ij->ji", sizes={"i": 40, "j": 30}),
        einsum("i,i->", sizes={"i": 1000}), matmul(1, 1, 1),
    ]  # fmt: skip
    return [nest for plan in plans for nest in plan.nests]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_stopping_at_once_gives_the_default(target) -> None:
    for number, workload in enumerate(load("core")[::9]):
        try:
            plan = workload.plan()
        except UnsupportedError:
            continue
        threads = 1 + number % 2
        for nest in plan.nests:
            start = Construction(nest, target, threads)
            default = default_schedule(nest, target, threads)
            assert start.schedule == default, workload.id
            assert start.take(STOP).schedule.identity == default.identity


@pytest.mark.parametrize("seed", range(12))
def test_every_state_has_a_schedule_that_replays(seed: int) -> None:
    rng = random.Random(seed)
    for nest in [*nests(), *(random_nest(np.random.default_rng([seed, i])) for i in range(6))]:
        states = walk(nest, rng, rng.choice(list(TARGETS.values())), rng.choice([1, 2]))
        assert len(states) <= HORIZON + 1
        for state in states:
            again = replay(nest, state.schedule.actions)
            assert again.identity == state.schedule.identity
            assert state.mask.shape == (TABLE.size,)
            assert state.mask[STOP]
            assert state.steps == states.index(state)


@needs_host
@pytest.mark.parametrize("seed", range(4))
def test_what_is_constructed_computes_the_right_thing(seed: int) -> None:
    rng = random.Random(seed)
    target = TARGETS[rng.choice(host_isas())]
    for nest in nests():
        schedule = walk(nest, rng, target)[-1].schedule
        try:
            predict(schedule, target)
        except LoweringError:
            continue
        compile(nest, schedule, target=target, seed=seed)


def test_a_matmul_from_the_inside_out() -> None:
    (nest,) = matmul(96, 128, 256).nests
    m, k, n = (next(i for i, a in enumerate(nest.axes) if a.name == name) for name in "mkn")
    state = Construction(nest, AVX2)
    tile = next(i for i, tile in enumerate(state.offers) if dict(tile.option.tile) == {n: 16, m: 6})
    decisions = [
        tile, axis_action(k, TRIPS.index(4)), axis_action(k, ALL), axis_action(m, TRIPS.index(4)),
        axis_action(n, ALL), axis_action(m, ALL), TABLE.operand_at + 2, STOP,
    ]  # fmt: skip
    names = []
    for action in decisions:
        names.append(state.name_of(action))
        state = state.take(action)
    assert names == ["tile n:16 m:6", "k x4", "k", "m x4", "n", "m", "leave b", "stop"]
    assert state.schedule.order == "m:24 n:16 m:6 k:4 k m n"
    assert state.schedule.packs == ()
    packed = Construction(nest, AVX2)
    for action in (*decisions[:-2], STOP):
        packed = packed.take(action)
    assert [(pack.operand, pack.at) for pack in packed.schedule.packs] == [(2, "root")]


def test_threads_share_the_loop_that_was_chosen() -> None:
    (nest,) = matmul(64, 64, 64).nests
    state = Construction(nest, AVX2, threads=2).take(0)
    while state.open_axes:
        state = state.take(axis_action(state.open_axes[-1], ALL))
    outer = next(a for a, _, _ in state.placed if not nest.axes[a].reduction)
    assert Construction(nest, AVX2, threads=1).take(0).mask[axis_action(outer, SHARE)] == 0
    shared = state.take(axis_action(outer, SHARE)).schedule
    assert shared.parallel is not None
    assert shared.loops[shared.parallel].axis == outer


def test_decisions_that_do_not_apply_are_refused() -> None:
    state = Construction(matmul(64, 64, 64).nests[0], AVX2)
    for action in (-1, TABLE.size, axis_action(0, ALL), TABLE.operand_at, CANDIDATES - 1):
        with pytest.raises(ScheduleError, match=rf"action {action}; one of \["):
            state.take(action)
    with pytest.raises(ScheduleError, match=r"one of \[170\] would do"):
        state.take(STOP).take(0)


def test_an_axis_cut_in_two_has_another_loop_between() -> None:
    """m:6 m:24 with nothing between is m alone; only a reduction may unroll a part of itself."""
    rng = random.Random(0)
    for nest in nests():
        for _ in range(5):
            for state in walk(nest, rng):
                pairs = zip(state.placed, state.placed[1:], strict=False)
                same = [a for (a, _, _), (b, _, _) in pairs if a == b]
                closing = state.placed[-1][0] if state.placed and not state.open_axes else None
                assert all(nest.axes[a].reduction or a == closing for a in same)


def test_tiles_are_offered_cheapest_first_and_once() -> None:
    for nest in nests()[:7]:
        offers = tiles_on_offer(nest, AVX2)
        assert 1 <= len(offers) <= CANDIDATES
        prices = [tile.cycles for tile in offers]
        assert prices == sorted(prices)
        pairs = [(tile.option.vector, tile.option.tile) for tile in offers]
        assert len(set(pairs)) == len(pairs)


def test_a_nest_without_a_choice_may_only_stop() -> None:
    state = Construction(matmul(1, 1, 1).nests[0], AVX2)
    assert np.flatnonzero(state.mask).tolist() == [STOP]


def test_what_does_not_fit_is_outside_of_the_domain() -> None:
    assert in_domain(matmul(3, 4, 5).nests[0])
    labels = "abcdefghijk"
    wide = einsum(f"{labels},{labels}->a", sizes=dict.fromkeys(labels, 2)).nests[0]
    assert len(wide.axes) > AXES
    assert not in_domain(wide)


def test_decisions_lead_to_what_was_decided():
    rng = random.Random(5)
    for nest in nests():
        for threads in (1, 4):
            for state in walk(nest, rng, threads=threads)[:-1]:
                found = Construction(nest, AVX2, threads)
                for action in decisions_of(state):
                    found = found.take(action)
                assert found == state
