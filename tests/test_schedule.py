"""Schedules: primitives, their messages, loop trees, replay and identity."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import pytest
from builders import conv, nest_of

from looptune.backends import backend_for
from looptune.errors import ScheduleError
from looptune.ir import Axis, Dim, Nest, Operand
from looptune.legalize import legalize
from looptune.lower import lower
from looptune.schedule import (
    PRIMITIVES,
    Loop,
    Pack,
    Schedule,
    merge,
    pack,
    parallel,
    parse_order,
    reorder,
    replay,
    split,
    swap,
    vectorize,
)
from looptune.target import TARGETS

MATMUL = Schedule(nest_of("mk,kn->mn", m=20, k=50, n=40))  # loops m k n
EXTENTS = (1, 2, 7, 13, 30, 97)


def row(extent: int) -> Schedule:
    return Schedule(nest_of("i->i", i=extent))


def padded() -> Nest:
    """A 1-d convolution over x padded by one on both sides."""
    axes = (Axis("i", 8), Axis("r", 3, True))
    x = Operand("x", "float32", (Dim(8, 1, (1, 1), -1),))
    w = Operand("w", "float32", (Dim(3, 1, (0, 1)),))
    return Nest(axes, Operand("out", "float32", (Dim(8, 1, (1, 0)),)), (x, w))


def test_golden_tree_matmul(golden: Callable[[str], None]) -> None:
    golden(str(parallel(vectorize(parse_order(MATMUL.nest, "m:6 n:16 k m n"), "n"), 0)))


def test_golden_tree_conv(golden: Callable[[str], None]) -> None:
    golden(str(parse_order(conv(3, 8, 4), "o:4 h w:4 c r s o w")))


def test_golden_tree_padded(golden: Callable[[str], None]) -> None:
    golden(str(pack(split(Schedule(padded()), 0, 3), 2)))


def test_untuned_schedule_is_the_written_order() -> None:
    assert MATMUL.loops == (Loop(0), Loop(1), Loop(2))
    assert MATMUL.order == "m k n"
    assert MATMUL.actions == ()


def test_padding_is_packed_at_the_root() -> None:
    assert Schedule(padded()).packs == (Pack(1, (0,)),)


def test_a_nest_without_axes_has_no_loops() -> None:
    schedule = Schedule(nest_of(",->"))
    assert schedule.loops == ()
    assert schedule.order == ""


# What each primitive does


def test_split_makes_trips_and_a_tail() -> None:
    schedule = split(MATMUL, 0, 6)
    assert schedule.order == "m:6 m k n"
    assert [schedule.trips(at) for at in range(2)] == [4, 6]


def test_split_of_a_split() -> None:
    assert split(split(MATMUL, 0, 6), 1, 3).order == "m:6 m:3 m k n"
    assert split(split(MATMUL, 0, 6), 0, 2).order == "m:12 m:6 m k n"


def test_reorder_and_swap() -> None:
    assert reorder(MATMUL, [2, 0, 1]).order == "n m k"
    assert swap(MATMUL, 1).order == "m n k"


def test_vectorize_takes_a_name_or_a_number() -> None:
    assert vectorize(MATMUL, "n").vector == vectorize(MATMUL, 2).vector == 2


def test_pack_replaces_the_pack_of_the_same_operand() -> None:
    assert pack(pack(MATMUL, 1), 1, [1, 0]).packs == (Pack(1, (1, 0)),)


def test_parallel_follows_its_loop() -> None:
    schedule = parallel(MATMUL, 2)
    assert split(schedule, 0, 4).parallel == 3
    assert swap(schedule, 1).parallel == 1
    assert swap(schedule, 0).parallel == 2
    assert reorder(schedule, [2, 0, 1]).parallel == 0
    assert merge(split(schedule, 0, 4), 0).parallel == 2
    assert merge(parallel(split(MATMUL, 0, 4), 0), 0).parallel is None


# Messages


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: split(MATMUL, 3, 2), r"split: no loop 3; the loops are 0\.\.2 \(m k n\)"),
    (lambda: split(MATMUL, True, 2), "split: no loop True"),
    (lambda: swap(MATMUL, -1), "swap: no loop -1"),
    (lambda: merge(MATMUL, "m"), "merge: no loop 'm'"),  # type: ignore[arg-type]
    (lambda: split(MATMUL, 0, 21), r"loop 0 \(m\) makes 20 trips; a factor of 21 is not in 2..20"),
    (lambda: split(MATMUL, 0, 1), "a factor of 1 is not in 2..20"),
    (lambda: split(MATMUL, 0, True), "a factor of True"),
    (lambda: reorder(MATMUL, [0, 1]), r"reorder: loops \[0, 1\]: a permutation of 0..2"),
    (lambda: reorder(split(MATMUL, 0, 4), [1, 0, 2, 3]), r"steps \[1, 4\] over m must not grow"),
    (lambda: swap(MATMUL, 2), r"swap: loop 2 \(n\) is innermost"),
    (lambda: swap(split(MATMUL, 0, 4), 0), "swap: loops 0 and 1 both run over m"),
    (lambda: merge(MATMUL, 0), r"merge: no loop inside 0 \(m\) is over its axis"),
    (lambda: vectorize(MATMUL, "x"), r"vectorize: no axis 'x'; the axes are \['m', 'k', 'n'\]"),
    (lambda: vectorize(MATMUL, 3), "vectorize: no axis 3"),
    (lambda: pack(MATMUL, 3), "no operand number 3; there are 0 .out., 1 "),
    (lambda: pack(MATMUL, 1, at="k"), "pack: no loop 'k'"),
    (lambda: pack(MATMUL, 1, [0, 0]), r"pack: dimensions of a \[0, 0\]: a permutation of 0..1"),
    (lambda: parallel(MATMUL, 1), r"parallel: loop 1 \(k\) is a reduction; loops \[0, 2\] would"),
    (lambda: parallel(split(MATMUL, 0, 4), 1), r"loop 1 \(m\) is an inner loop; loops \[0, 3\]"),
    (lambda: replay(MATMUL.nest, [("fuse", (0,))]), "replay: no primitive 'fuse'; there are"),
    (lambda: parse_order(MATMUL.nest, "m x k n"), "'x' is no `axis:step`"),
    (lambda: parse_order(MATMUL.nest, "m:y k n"), "'m:y' is no `axis:step`"),
    (lambda: parse_order(MATMUL.nest, "m k"), "no loop over n; every axis needs one"),
    (
        lambda: parse_order(MATMUL.nest, "m k n:4"),
        r"loops over n have steps \[4\]; the last must be",
    ),
    (lambda: parse_order(MATMUL.nest, "m k n n"), "two loops over n have a step of 1"),
    (lambda: parse_order(MATMUL.nest, "m:4 k n"), r"over m have steps \[4\]"),
    (lambda: parse_order(MATMUL.nest, "m:4 m:3 m k n"), "step 4 over m is no multiple of 3"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        act()


# Properties


@pytest.mark.parametrize("factor", [2, 3, 6, 19, 20])
def test_split_then_merge_is_the_identity(factor: int) -> None:
    back = merge(split(MATMUL, 0, factor), 0)
    assert back.loops == MATMUL.loops
    assert back.identity == MATMUL.identity


@pytest.mark.parametrize("extent", EXTENTS)
def test_parts_of_a_split_cover_the_axis_case_07(extent: int) -> None:
    for factor in range(2, min(extent, 64) + 1):
        schedule = split(row(extent), 0, factor)
        outer, inner = schedule.trips(0), schedule.trips(1)
        assert (outer, inner) == (ceil(extent / factor), factor)
        assert (outer - 1) * inner < extent <= outer * inner


@pytest.mark.parametrize("extent", EXTENTS)
def test_factors_beyond_the_axis_are_refused_case_07(extent: int) -> None:
    for factor in range(max(2, extent + 1), 65):
        with pytest.raises(ScheduleError, match=f"a factor of {factor} is not in"):
            split(row(extent), 0, factor)


def test_parallel_reductions_are_refused_case_01() -> None:
    schedule = Schedule(nest_of("mk,kn->mn", m=2, k=4, n=2))
    for tried, at in ((schedule, 1), (split(schedule, 1, 2), 1), (split(schedule, 1, 2), 2)):
        with pytest.raises(ScheduleError, match="is a reduction"):
            parallel(tried, at)


def test_replay_gives_the_same_schedule() -> None:
    schedule = parse_order(MATMUL.nest, "m:6 n:16 k:4 k m n", vector="n")
    schedule = parallel(pack(schedule, 2, [1, 0]), 0)
    assert replay(MATMUL.nest, schedule.actions) == schedule


def test_identity_ignores_the_road_and_loops_of_one_trip() -> None:
    one = split(split(MATMUL, 0, 6), 0, 2)
    other = split(split(MATMUL, 0, 12), 1, 6)
    whole = split(MATMUL, 0, 20)
    assert one.actions != other.actions
    assert one.identity == other.identity != MATMUL.identity
    assert whole.order == "m:20 m k n"
    assert whole.identity == MATMUL.identity


def test_identity_sees_all_that_changes_the_code() -> None:
    changed = [
        swap(MATMUL, 0),
        split(MATMUL, 0, 3),
        vectorize(MATMUL, "k"),
        pack(MATMUL, 1),
        pack(MATMUL, 1, [1, 0]),
        parallel(MATMUL, 0),
        parallel(MATMUL, 2),
        Schedule(replace(MATMUL.nest, accumulate=True)),
    ]
    assert len({schedule.identity for schedule in (MATMUL, *changed)}) == len(changed) + 1


def fingerprint() -> str:
    """Identity of a schedule reached by replay, and digests of its machine code."""
    schedule = pack(parse_order(MATMUL.nest, "m:6 n:16 k:4 k m n", vector="n"), 2, [1, 0])
    again = replay(MATMUL.nest, schedule.actions)
    digests = [
        hashlib.sha256(backend_for(target)(legalize(program))).hexdigest()
        for target in TARGETS.values()
        for program in lower(again, target)
    ]
    return " ".join([again.identity, *digests])


def test_identity_is_the_same_in_every_process_case_50() -> None:
    code = "import test_schedule; print(test_schedule.fingerprint())"
    found = {fingerprint()}
    for seed in ("0", "1", "random"):
        path = os.pathsep.join(sys.path)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        found.add(done.stdout.strip())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(MATMUL.nest, parallel=1), "parallel loop 1 is a reduction"),
        (lambda: Schedule(MATMUL.nest, parallel=99), "no loop 99"),
        (lambda: Schedule(MATMUL.nest, vector=9), "no axis 9"),
        (lambda: Schedule(MATMUL.nest, (Loop(9),)), "loop 0 is over axis 9"),
        (lambda: Schedule(MATMUL.nest, (Loop(0), Loop(1))), r"have steps \[\]; they shrink to 1"),
        (lambda: Loop(0, 0), "in steps of 0"),
    ],
)
def test_schedules_cannot_be_ill_formed(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()


def test_the_table_names_every_primitive() -> None:
    names = {"split", "swap", "reorder", "merge", "vectorize", "pack", "parallel"}
    assert set(PRIMITIVES) == names
    assert all(PRIMITIVES[name].__name__ == name for name in names)


def test_boundaries_are_where_pieces_meet():
    schedule = parse_order(nest_of("mk,kn->mn", m=100, k=8, n=64), "m:48 n:16 m:6 k m n")
    found = schedule.boundaries
    assert set(found) == {0, 2}
    assert {48, 96, 6, 54} <= set(found[0])
    assert found[2] == (16, 32, 48, 48)
    far = parse_order(nest_of("mk,kn->mn", m=10**6, k=1, n=1), "m:2 n k m").boundaries[0]
    assert len(far) < 1100
    assert far[-1] == 10**6 - 2
