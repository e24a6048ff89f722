"""Observations: shapes, slots, what changes with a schedule and what does not."""

import numpy as np
import pytest

from looptune.construct import STOP, TABLE, Construction
from looptune.graph import (
    AXES,
    LOOPS,
    MACHINE_FEATURES,
    NODES,
    OPERANDS,
    ActionTable,
    in_domain,
    observe,
    shapes,
)
from looptune.schedule import Schedule, pack, parallel, split, vectorize
from looptune.target import target_named
from looptune.workloads import conv2d, einsum, fuse, matmul
from looptune.workloads.generate import draw

AVX2 = target_named("avx2")


def seen(schedule: Schedule, **options: object) -> dict[str, np.ndarray]:
    return observe(schedule, AVX2, 1, np.ones(TABLE.size, np.int8), **options)  # type: ignore[arg-type]


def test_the_outlook_stands_behind_the_machine() -> None:
    state = Construction(matmul(64, 64, 64).nests[0], AVX2)
    world = state.observe()["world"]
    np.testing.assert_array_equal(world[MACHINE_FEATURES:], state.outlook)
    assert world[MACHINE_FEATURES:].any()


def test_an_action_table_lays_its_kinds_out_one_after_another() -> None:
    table = ActionTable(candidates=3, axis=2, loop=1, operand=4, world=5)
    assert table.axis_at == 3
    assert table.loop_at == 3 + 2 * AXES
    assert table.operand_at == table.loop_at + LOOPS
    assert table.world_at == table.operand_at + 4 * OPERANDS
    assert table.size == table.world_at + 5


@pytest.mark.parametrize("seed", range(30))
def test_every_state_of_a_construction_has_finite_arrays_of_the_stated_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    name = str(rng.choice(["avx2", "avx512", "xmm"]))
    state = Construction(draw(rng), target_named(name), threads=int(rng.integers(1, 3)))
    while not state.done:
        found = state.observe()
        assert {k: (v.shape, v.dtype.name) for k, v in found.items()} == shapes(TABLE)
        assert all(np.isfinite(array).all() for array in found.values())
        assert np.abs(found["nodes"]).max() < 12
        assert found["edges"].max() < NODES
        ends = found["edges"][:, found["edge_mask"] == 1]
        assert found["node_mask"][ends].all()
        state = state.take(int(rng.choice(np.flatnonzero(state.mask))))


def test_one_array_is_not_another_observations() -> None:
    state = Construction(matmul(64, 64, 64).nests[0], AVX2)
    first = state.observe()
    before = {name: array.copy() for name, array in first.items()}
    state.take(0).observe()["nodes"][:] = 7.0
    again = state.observe()
    for name, array in before.items():
        np.testing.assert_array_equal(array, again[name])
        np.testing.assert_array_equal(array, first[name])


def test_loops_are_told_apart_by_step_trips_and_place() -> None:
    schedule = split(Schedule(matmul(60, 32, 16).nests[0]), 0, 8)
    nodes = seen(schedule)["nodes"]
    loops = nodes[AXES : AXES + 4]
    assert loops[:, 1].tolist() == pytest.approx([0.3, 0, 0, 0])
    assert loops[0, 4] == pytest.approx(4 / 8)
    assert loops[:, 8].tolist() == pytest.approx([0, 1 / LOOPS, 2 / LOOPS, 3 / LOOPS])
    assert not nodes[AXES + 4 : AXES + LOOPS].any()


def test_packs_lanes_and_threads_are_seen() -> None:
    plain = Schedule(matmul(64, 32, 16).nests[0])
    changed = [vectorize(plain, "n"), pack(plain, 2, None, "root"), pack(plain, 1, None, 0)]
    changed.append(parallel(plain, 0))
    arrays = [seen(each)["nodes"].tobytes() for each in (plain, *changed)]
    assert len(set(arrays)) == 5


def test_strides_of_zero_and_one_stand_on_the_edges() -> None:
    nest = matmul(64, 32, 16).nests[0]
    found = seen(Schedule(nest))
    m, n = ([axis.name for axis in nest.axes].index(name) for name in "mn")
    b = AXES + LOOPS + 2
    rows = {
        int(source): features
        for source, to, features in zip(*found["edges"], found["edge_features"], strict=True)
        if to == b and features[0] == 1
    }
    assert rows[m][1] == 1  # m does not move b
    assert rows[n][2] == 1  # n moves it by one


def test_what_is_not_decided_is_marked() -> None:
    state = Construction(matmul(96, 96, 96).nests[0], AVX2)
    loops = slice(AXES, AXES + LOOPS)
    before = state.observe()["nodes"][loops, 11].sum()
    after = state.take(0).observe()["nodes"][loops, 11].sum()
    assert before < after


def test_steps_left_are_seen() -> None:
    state = Construction(matmul(96, 96, 96).nests[0], AVX2)
    worlds = [each.observe()["world"][MACHINE_FEATURES - 1] for each in (state, state.take(0))]
    assert worlds[0] > worlds[1]


def test_nests_with_too_many_axes_operands_or_edges_are_outside_of_the_domain() -> None:
    assert in_domain(conv2d((1, 8, 9, 9), (8, 8, 3, 3)).nests[0])
    letters = "abcdefghijk"
    axes = einsum(f"{letters},{letters}->{letters}", sizes=dict.fromkeys(letters, 2))
    operands = fuse(matmul(4, 5, 6), ",".join(["residual"] * 4))
    sizes = dict.fromkeys(letters[:AXES], 2)
    narrow = einsum(f"{letters[:AXES]},j->{letters[:9]}", sizes=sizes)
    edges = fuse(narrow, ",".join(["residual"] * 3))
    assert [len(plan.nests[0].axes) for plan in (axes, edges)] == [AXES + 1, AXES]
    assert [len(plan.nests[0].operands) for plan in (operands, edges)] == [OPERANDS + 1, OPERANDS]
    assert in_domain(narrow.nests[0])
    assert not any(in_domain(plan.nests[0]) for plan in (axes, operands, edges))


def test_an_empty_nest_can_only_stop() -> None:
    state = Construction(matmul(0, 4, 5).nests[0], AVX2)
    assert np.flatnonzero(state.mask).tolist() == [STOP]
