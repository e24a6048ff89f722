"""Generated problems, and what may only be tested on."""

import json
from importlib.resources import files

import numpy as np
import pytest

from looptune.graph import in_domain
from looptune.workloads import batched_matmul, einsum, fuse, matmul
from looptune.workloads.generate import FAMILIES, LEAST_POINTS, MOST_POINTS, draw
from looptune.workloads.held_out import (
    computed,
    is_held_out,
    pattern,
    prime,
    split,
    unlike_matmuls,
)
from looptune.workloads.suites import load


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_draws_problems_that_are_not_held_out(family: str) -> None:
    nests = [draw(np.random.default_rng(seed), family) for seed in range(20)]
    assert len({nest.key for nest in nests}) > 10
    for nest in nests:
        assert LEAST_POINTS <= nest.points <= MOST_POINTS
        assert not is_held_out(nest)
        assert in_domain(nest)


def test_draws_are_those_of_the_seed() -> None:
    first, again = ([draw(np.random.default_rng(7)).key for _ in range(3)] for _ in range(2))
    assert first == again


def test_every_suite_is_held_out() -> None:
    for suite in ("core", "looptune-test"):
        for workload in load(suite):
            contracts = workload.kind not in ("norm", "softmax") and workload.dtype == "float32"
            if contracts and workload.suite != "looptune-mm-train":
                assert all(is_held_out(nest) for nest in workload.plan().nests), workload.id


def test_the_committed_split_is_what_the_suites_give() -> None:
    committed = json.loads((files("looptune.workloads") / "held_out.json").read_text())
    assert committed == computed()


def test_a_fifth_of_the_papers_matmuls_is_held_out() -> None:
    held = sum(is_held_out(w.plan().nests[0]) for w in load("looptune-all"))
    assert 25 + round(0.2 * (2197 - 25)) <= held <= 500  # real shapes of other suites beside


def test_an_epilogue_makes_another_problem_but_not_another_pattern() -> None:
    (nest,) = load("looptune-test")[0].plan().nests
    (fused,) = fuse(load("looptune-test")[0].plan(), "relu").nests
    assert is_held_out(nest)
    assert not is_held_out(fused)
    assert pattern(nest) == pattern(fused)


def test_a_pattern_has_no_names_sizes_or_order_of_inputs() -> None:
    first = pattern(einsum("abcd,de->abce", sizes=dict.fromkeys("abcde", 8)).nests[0])
    sizes = dict(zip("pqrst", (3, 5, 7, 9, 11), strict=True))
    second = pattern(einsum("st,pqrs->pqrt", sizes=sizes).nests[0])
    assert first == second
    assert pattern(matmul(3, 4, 5).nests[0]) == pattern(matmul(9, 8, 7).nests[0]) != first
    assert pattern(matmul(3, 4, 5, trans_b=True).nests[0]) != pattern(matmul(3, 4, 5).nests[0])
    assert pattern(batched_matmul(2, 3, 4, 5).nests[0]) not in split().patterns


def test_matmuls_unlike_the_papers() -> None:
    sizes = unlike_matmuls()
    assert len(sizes) == 105
    primes = [each for each in sizes if all(size == prime(size) for size in each)]
    assert len(primes) >= 35
    assert sum(min(each) <= 16 for each in sizes) >= 35
    assert max(map(max, sizes)) > 900
    assert all(is_held_out(matmul(*each).nests[0]) for each in sizes)


def test_primes() -> None:
    assert [prime(n) for n in (2, 4, 9, 1024)] == [2, 3, 7, 1021]
