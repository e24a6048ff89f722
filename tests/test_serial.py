"""Nests, targets and actions as JSON: there and back, and every way in which it can be wrong."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_nests import random_nest, random_schedule

from looptune.errors import SerialError
from looptune.ir import Nest
from looptune.models.dataset import load
from looptune.schedule import replay
from looptune.serial import (
    MOST_ACTIONS,
    actions_from_json,
    nest_from_json,
    nest_to_json,
    target_from_json,
    target_to_json,
)
from looptune.target import TARGETS, Target
from looptune.workloads import conv2d, fuse, matmul

FUSED = fuse(matmul(3, 4, 5, dtype="bfloat16"), "bias,gelu,scale:2,residual").nests[0]
WHOLE = matmul(3, 4, 5, dtype="int8").nests[0]
PADDED = conv2d((1, 4, 8, 8), (6, 4, 3, 3), padding=1).nests[0]
JUNK = [None, True, -1, 0, 10**30, 10**5000, 1.5, float("nan"), float("inf"), "", "x", [], {},
        [[]], [None], ["Activation", {}], {"kind": "relu"}]  # fmt: skip


def test_nests_travel_as_json() -> None:
    nests = [random_nest(np.random.default_rng(seed)) for seed in range(60)]
    for nest in [*nests, FUSED, WHOLE, PADDED]:
        again = nest_from_json(json.loads(json.dumps(nest_to_json(nest))))
        assert again == nest
        assert again.key == nest.key


def test_targets_travel_as_json() -> None:
    for target in (*TARGETS.values(), replace(TARGETS["avx2"], cache_bytes=(1, 2, 3))):
        assert target_from_json(json.loads(json.dumps(target_to_json(target)))) == target


def test_actions_travel_as_json() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        schedule = random_schedule(random_nest(rng), rng)
        again = actions_from_json(json.loads(json.dumps(schedule.actions)))
        assert again == schedule.actions == actions_from_json(schedule.actions)


def test_the_shipped_actions_are_tuples() -> None:
    problem = next(load())
    row = problem.rows[-1]
    assert replay(problem.nest, actions_from_json(json.loads(json.dumps(row.actions))))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to every value inside of one."""
    inside: Any = ()
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
    below = [found for key, each in inside for found in places(each, (*path, key))]
    return [path, *below] if path else below


def spoiled(value: Any, place: tuple[Any, ...], junk: object, drop: bool) -> Any:
    """A copy with something else, or nothing, in a place."""
    found = copy.deepcopy(value)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    if drop:
        del inner[place[-1]]
    else:
        inner[place[-1]] = junk
    return found


@pytest.mark.parametrize(
    ("read", "value", "kind"),
    [
        *((nest_from_json, json.loads(json.dumps(nest_to_json(nest))), Nest)
          for nest in (FUSED, WHOLE, PADDED)),
        (target_from_json, json.loads(json.dumps(target_to_json(TARGETS["avx512"]))), Target),
        (actions_from_json, [["split", [0, 4]], ["reorder", [[1, 0]]], ["pack", [1, None]]], tuple),
    ],
    ids=["fused", "whole", "padded", "target", "actions"],
)  # fmt: skip
def test_what_is_spoiled_anywhere_is_one_error_or_something_whole(
    read: Any, value: Any, kind: type
) -> None:
    rng, refused = random.Random(0), 0
    assert isinstance(read(value), kind)
    spoilt = [
        spoiled(value, place, junk, drop)
        for place in places(value)
        for junk, drop in [*((junk, False) for junk in JUNK), (None, True)]
    ]
    for each in [*rng.sample(spoilt, min(len(spoilt), 1500)), *JUNK]:
        try:
            assert isinstance(read(each), kind)
        except SerialError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (nest_from_json, [], r"\[\] is no nest"),
        (nest_from_json, nest_to_json(FUSED) | {"axes": 5}, "is no nest"),
        (nest_from_json, nest_to_json(FUSED) | {"axes": [5]}, "5 is no axis"),
        (nest_from_json, nest_to_json(FUSED) | {"reduction": "mean"}, "a nest: reduction 'mean'"),
        (nest_from_json, nest_to_json(FUSED) | {"epilogue": [["Divide", {}]]}, "no step of an epi"),
        (nest_from_json, nest_to_json(FUSED) | {"epilogue": [["Scale", {"factor": 10**30}]]},
         "is too large a number"),
        (nest_from_json, nest_to_json(FUSED) | {"output": {}}, r"\{\} is no operand"),
        (target_from_json, {"name": "avx2"}, r"is no target with the fields \['cache_bytes'"),
        (target_from_json, target_to_json(TARGETS["avx2"]) | {"fma": "slow"}, "no fma of a target"),
        (target_from_json, target_to_json(TARGETS["avx2"]) | {"unroll": 1 << 60}, "no unroll of"),
        (target_from_json, target_to_json(TARGETS["avx2"]) | {"cache_bytes": [1, 2]}, "no cache"),
        (actions_from_json, "split", "a list of at most 256"),
        (actions_from_json, [["swap", [0]]] * (MOST_ACTIONS + 1), "a list of at most 256"),
        (actions_from_json, [["swap", 0]], r"is no \[name, arguments\]"),
        (actions_from_json, [["split", [0, True]]], "True is no argument of an action"),
        (actions_from_json, [["reorder", [[0, [1]]]]], r"\[1\] is no argument of an action"),
        (actions_from_json, [["split", [0, 10**5000]]], "a int is too large for an argument"),
    ],
)  # fmt: skip
def test_the_error_says_what_was_found(read: Any, value: object, message: str) -> None:
    with pytest.raises(SerialError, match=message):
        read(value)
