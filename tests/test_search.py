"""Searches on values that the test makes up: exact, seeded, and to the end of their budget."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from builders import nest_of
from random_nests import random_nest

from looptune.cost import COST_VERSION, predict, ranked
from looptune.default import candidates, default_schedule
from looptune.errors import LoweringError, ScheduleError, UnsupportedError
from looptune.ir import Nest
from looptune.lower import lower
from looptune.models.advise import shipped
from looptune.schedule import Schedule, parse_order, replay, split
from looptune.search import (
    ASKED,
    STRATEGIES,
    Search,
    Spent,
    State,
    attempts,
    finite_space,
    neighbours,
    paper_moves,
    run,
    strategy_named,
)
from looptune.target import TARGETS
from looptune.workloads import conv2d, fuse, matmul

AVX2 = TARGETS["avx2"]
MATMUL = matmul(48, 64, 32).nests[0]
SEARCHES = [name for name in STRATEGIES if name != "default"]


def by_cost(nest: Nest) -> Callable[[Schedule], float | None]:
    """Values by the cost model."""

    def value(schedule: Schedule) -> float | None:
        try:
            return -math.log(predict(schedule, AVX2).cycles)
        except LoweringError:
            return None

    return value


def limited(value: Callable[[Schedule], float | None], most: int) -> Callable[..., float | None]:
    """`value` for so many questions."""
    asked = 0

    def evaluate(schedule: Schedule) -> float | None:
        nonlocal asked
        if asked == most:
            raise Spent
        asked += 1
        return value(schedule)

    return evaluate


def search(evaluate: Callable[..., float | None], space: str = "ours", seed: int = 0) -> Search:
    return Search(MATMUL, AVX2, 1, evaluate, space, seed, policy=shipped())


@pytest.mark.parametrize("space", ["paper", "ours"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_end_with_the_budget_and_repeat(name: str, space: str) -> None:
    found = []
    for _ in range(2):
        made = search(limited(by_cost(MATMUL), 40), space, seed=3)
        best = run(name, made)
        assert best is not None
        assert len(made.values) <= 40
        assert max(v for v in made.values.values() if v is not None) == made.value(best)
        found.append((best, list(made.values.items())))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_value_at_all_is_no_answer(name: str) -> None:
    made = search(limited(lambda schedule: None, 25))
    assert run(name, made) is None


@pytest.mark.parametrize("name", SEARCHES)
def test_nothing_to_do_ends(name: str) -> None:
    """One point: no move is legal, and the search must not wait for one."""
    nest = matmul(1, 1, 1).nests[0]
    made = Search(nest, AVX2, 1, limited(lambda schedule: 0.0, 500), "paper", policy=shipped())
    assert run(name, made) is not None


@pytest.mark.parametrize("name", ["greedy2", "beam2dfs", "beam4dfs", "beam2bfs", "beam4bfs"])
def test_a_goal_a_few_moves_away_is_found(name: str) -> None:
    """Each right move is worth one: no search may miss what leads straight up."""
    goal = parse_order(MATMUL, "m:4 n:16 k m n").canonical

    def value(schedule: Schedule) -> float:
        return sum(loop in schedule.canonical for loop in goal) + sum(
            a == b for a, b in zip(goal, schedule.canonical, strict=False)
        )

    made = search(limited(value, 4000), "paper")
    best = run(name, made)
    assert best is not None
    assert value(best) >= value(Schedule(MATMUL)) + 2


def test_exhaustive_is_the_optimum_of_its_space() -> None:
    """Found independently, by the test's own loops over tiles and orders."""
    value = by_cost(MATMUL)
    best = -math.inf
    for rows in range(1, 13):
        for width in range(1, 12 // rows + 1):
            for unroll in (1, 2, 4, 8):
                for outer in (f"m:{rows} n:{8 * width}", f"n:{8 * width} m:{rows}"):
                    words = [w for w in outer.split() if not w.endswith(":1")]
                    words += [f"k:{unroll}"] * (unroll > 1)
                    try:
                        made = parse_order(MATMUL, " ".join([*words, "k m n"]), "n")
                    except ScheduleError:
                        continue
                    best = max(best, value(made) or -math.inf)
    made_search = search(value)
    found = run("exhaustive", made_search)
    assert found is not None
    assert made_search.value(found) == best
    assert all(schedule.vector == 2 for schedule in finite_space(made_search))


def test_the_papers_actions() -> None:
    made = search(lambda schedule: 0.0, "paper")
    start = State(Schedule(MATMUL))
    moves = paper_moves(start, made)
    assert [state.cursor for state in moves[:1]] == [1]  # down; up is illegal at the root
    assert {state.schedule.order for state in moves} == {
        "m k n", "k m n", "m:4 m k n", "m:8 m k n", "m:16 m k n",
    }  # fmt: skip
    full = parse_order(MATMUL, "m:24 m:12 m:6 k:16 n:32 n:16 n:8 m k n")
    assert len(full.loops) == 10
    assert {len(state.schedule.loops) for state in paper_moves(State(full, 3), made)} == {10}


def test_of_ours_only_the_most_promising_are_asked() -> None:
    made = search(lambda schedule: 0.0)
    everything = list(neighbours(made.start().schedule, 1))
    moves = made.moves(made.start())
    assert len(everything) > 40
    assert len(moves) == ASKED
    cheapest = min(predict(s, AVX2).cycles for s in everything)
    assert predict(moves[0].schedule, AVX2).cycles == cheapest
    assert len(attempts(made.start().schedule, 2)) > len(attempts(made.start().schedule, 1))


def test_all_neighbours_replay_and_lower_or_say_why_not() -> None:
    for nest in (MATMUL, conv2d((1, 4, 9, 9), (8, 4, 3, 3), padding=1).nests[0]):
        for schedule in neighbours(default_schedule(nest, AVX2), 2):
            assert replay(nest, schedule.actions) == schedule
            try:
                lower(schedule, AVX2)
            except LoweringError:
                continue


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strategy_named("anneal"), "strategy 'anneal' is none of"),
        (lambda: search(lambda s: 0.0, "tvm"), r"space 'tvm' is none of \['ours', 'paper'\]"),
    ],
)
def test_unknown_names(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make()


def test_costs_are_the_targets_and_not_the_hosts() -> None:
    """The same number anywhere: pinned for one schedule of one version of the model."""
    schedule = parse_order(MATMUL, "m:6 n:16 k m n", "n")
    assert COST_VERSION == 1
    assert predict(schedule, AVX2) == predict(schedule, AVX2)
    assert predict(schedule, TARGETS["avx512"]).cycles < predict(schedule, AVX2).cycles


def test_costs_rank_what_everyone_knows() -> None:
    def cycles(text: str, vector: str = "n", nest: Nest = MATMUL) -> float:
        return predict(parse_order(nest, text, vector), AVX2).cycles

    assert cycles("m:6 n:16 k m n") < cycles("m:2 n:8 k m n") < cycles("m n k", "k")
    assert cycles("m:6 n:16 k m n") < cycles("m k n")
    big = matmul(512, 512, 512).nests[0]
    one, two = (predict(default_schedule(big, AVX2, t), AVX2, t).cycles for t in (1, 2))
    assert 1.6 < one / two < 2.1
    (plain,), (fused,) = matmul(64, 64, 64).nests, fuse(matmul(64, 64, 64), "gelu").nests
    text = "m:4 n:16 k m n"
    assert cycles(text, nest=fused) > 1.1 * cycles(text, nest=plain)


def test_random_nests_have_finite_costs() -> None:
    for seed in range(150):
        nest = random_nest(np.random.default_rng(seed))
        for schedule in (Schedule(nest), *list(candidates(nest, AVX2))[:3]):
            try:
                cost = predict(schedule, AVX2)
            except LoweringError:
                continue
            assert 0 < cost.cycles < math.inf


def test_ranking_drops_twins_and_what_cannot_be_lowered() -> None:
    twin = split(Schedule(MATMUL), 0, 48)
    assert twin.identity == Schedule(MATMUL).identity
    huge = nest_of("mk,kn->mn", m=4096, k=4096, n=4096)
    hostile = parse_order(huge, "m:2048 n:2048 k:2048 k m n")
    order = ranked([Schedule(MATMUL), twin, parse_order(MATMUL, "m:6 n:16 k m n")], AVX2)
    assert [s.order for s in order] == ["m:6 n:16 k m n", "m k n"]
    assert len(ranked([hostile, hostile], AVX2)) <= 1
