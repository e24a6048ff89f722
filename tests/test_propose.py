"""Proposals: beams over constructions, by the cost model and where a policy leads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from looptune.construct import HORIZON, STOP, TABLE, Construction
from looptune.cost import predict
from looptune.default import default_schedule
from looptune.graph import CANDIDATE_FEATURES, CANDIDATES
from looptune.ir import Nest
from looptune.offers import features, tiles_on_offer
from looptune.outlook import FEATURES, outlook
from looptune.propose import ModelValue, Reach, beam, by_model, expert, proposals, rollout
from looptune.schedule import pack, parse_order
from looptune.target import TARGETS
from looptune.workloads import conv2d, gemv, matmul

AVX2 = TARGETS["avx2"]
NESTS = [
    matmul(61, 67, 64).nests[0],
    conv2d((1, 8, 14, 14), (12, 8, 3, 3), padding=1).nests[0],
    gemv(100, 300).nests[0],
]


def towards(wanted: Sequence[int]):
    """A prior that goes through the wanted actions and stops; all else is equally improbable."""

    def prior(states: Sequence[Construction]) -> np.ndarray:
        rows = np.full((len(states), TABLE.size), -20.0)
        for row, state in zip(rows, states, strict=True):
            row[state.mask == 0] = -1e9
            row[(*wanted, STOP)[min(state.steps, len(wanted))]] = -0.01
        return rows

    return prior


@pytest.mark.parametrize("nest", NESTS, ids=str)
def test_the_expert_never_predicts_a_loss_and_lists_no_schedule_twice(nest: Nest) -> None:
    value = ModelValue(nest, AVX2)
    found = expert(Construction(nest, AVX2), value)
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= 0.0
    assert len({each.state.schedule.identity for each in found}) == len(found)
    base = predict(default_schedule(nest, AVX2), AVX2).cycles
    best = predict(found[0].state.schedule, AVX2).cycles
    assert scores[0] == pytest.approx(math.log(base / best))


def test_a_beam_on_the_model_finds_the_best_two_decisions() -> None:
    """Every pair of decisions, tried one by one, is no better than what the beam comes by."""
    nest = matmul(20, 24, 16).nests[0]
    value = ModelValue(nest, AVX2)
    start = Construction(nest, AVX2)
    best = max(
        value(first.take(int(b)).schedule)
        for first in (start.take(int(a)) for a in np.flatnonzero(start.mask[:-1])[:24])
        for b in np.flatnonzero(first.mask[:-1])
    )
    found = beam(start, by_model(value), width=1000)
    pairs = [each.score for each in found if each.state.steps == 2]
    assert max(pairs) == pytest.approx(best)


def alike(states: Sequence[Construction]) -> np.ndarray:
    """Longer constructions are worth more, whatever they are."""
    return np.array([float(state.steps) for state in states])


def test_a_policy_leads_to_what_it_finds_probable() -> None:
    start = Construction(NESTS[0], AVX2)
    wanted = [3]
    state = start.take(3)
    while state.open_axes:
        wanted.append(int(np.flatnonzero(state.mask)[-2]))
        state = state.take(wanted[-1])
    found = proposals(start, towards(wanted), alike, Reach(1, 1, 1))
    assert state.schedule.identity in {each.state.schedule.identity for each in found}
    wide = proposals(start, towards(wanted), alike, Reach(2, 4, 3))
    assert len(found) < len(wide) <= 4 + 2 * 3 * HORIZON
    assert state.schedule.identity in {each.state.schedule.identity for each in wide}
    assert len({each.state.schedule.identity for each in wide}) == len(wide)
    assert start.schedule.identity not in {each.state.schedule.identity for each in wide}
    assert [each.score for each in wide] == sorted((e.score for e in wide), reverse=True)


def test_of_what_a_policy_finds_probable_the_valuable_is_kept() -> None:
    """The last of the tiles that it tries is the only one worth anything."""
    start = Construction(NESTS[0], AVX2)

    def value(states: Sequence[Construction]) -> np.ndarray:
        return np.array([float(state.tile == 2) for state in states])

    found = proposals(start, towards([0]), value, Reach(1, 3, 1))
    kept = [each for each in found if each.state.steps > 1]
    assert kept
    assert {each.state.tile for each in kept} == {2}


def test_past_the_deadline_only_the_most_probable_decision_is_followed() -> None:
    start = Construction(NESTS[0], AVX2)
    found = proposals(start, towards([5]), alike, Reach(2, 4, 3), late=lambda: True)
    assert {each.state.tile for each in found} == {5}
    steps = [each.state.steps for each in found]
    assert len(set(steps)) == len(steps)


def test_a_rollout_takes_the_most_probable_decisions_to_the_end() -> None:
    start = Construction(NESTS[0], AVX2)
    found = rollout(start, towards([5]))
    assert (found.tile, found.steps, found.done) == (5, 2, True)


def test_what_cannot_be_lowered_has_no_value() -> None:
    nest = matmul(64, 64, 64).nests[0]
    packed = parse_order(nest, "n:32 n:16 n:8 n:4 n:2 m k n")
    for at in range(5):
        packed = pack(packed, 2, at=at)
    assert ModelValue(nest, AVX2)(packed) == -math.inf
    assert not outlook(packed, AVX2).any()


@pytest.mark.parametrize("nest", NESTS, ids=str)
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_features_are_small_finite_and_say_which_tiles_there_are(nest: Nest, target) -> None:
    tiles = features(nest, target)
    assert tiles.shape == (CANDIDATES, CANDIDATE_FEATURES)
    assert tiles[:, 0].sum() == len(tiles_on_offer(nest, target))
    assert np.isfinite(tiles).all()
    assert abs(tiles).max() <= 6
    assert not tiles.flags.writeable
    seen = outlook(Construction(nest, target).schedule, target)
    assert seen.shape == (FEATURES,)
    assert np.isfinite(seen).all()
    assert abs(seen).max() <= 6


def test_the_default_seen_from_the_default_costs_the_same() -> None:
    seen = outlook(default_schedule(NESTS[0], AVX2), AVX2)
    assert seen[1:6] == pytest.approx(seen[6:11])
    other = outlook(Construction(NESTS[0], AVX2).take(7).schedule, AVX2)
    assert other[6:11] == pytest.approx(seen[6:11])
    assert other[1] > other[6]
