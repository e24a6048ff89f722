"""The handed cases: what broke other projects, each covered as a kind, or kept for its step.

A case names the tests of its kind as `file::test`; they must exist. Cases of later steps name
the step that brings the feature they are about.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from builders import nest_of
from harness import needs_host

import looptune
from looptune.errors import ArgumentError, ScheduleError
from looptune.host import host_isas
from looptune.ir import Axis, Dim, Nest, Operand
from looptune.schedule import Schedule, parallel, parse_order, split, vectorize

COVERED = {
    "CASE-01": ["test_cases.py::test_parallel_reductions_are_refused_split_or_not"],
    "CASE-02": ["test_cases.py::test_spatial_loops_between_pieces_of_a_reduction"],
    "CASE-05": ["test_cases.py::test_only_associative_reductions_exist"],
    "CASE-07": ["test_cases.py::test_factors_never_exceed_the_extent"],
    "CASE-14": ["test_workloads.py::test_everything_that_matters_enters_the_key"],
    "CASE-19": ["test_cases.py::test_lanes_past_the_end_never_flow_in"],
    "CASE-20": ["test_cases.py::test_kernels_refuse_other_sizes_than_theirs"],
    "CASE-23": ["test_kernel.py::test_gap_columns_of_strided_views_stay_untouched"],
    "CASE-27": ["test_api.py::test_every_transposed_and_strided_view"],
    "CASE-28": ["test_kernel.py::test_zero_sizes", "test_api.py::test_matmul_is_numpys"],
    "CASE-29": ["test_cases.py::test_overwriting_never_reads_the_old_output"],
    "CASE-30": ["test_api.py::test_nan_and_infinity_stay_in_their_rows"],
    "CASE-31": [
        "test_kernel.py::test_strides_of_size_one_dimensions_do_not_matter",
        "test_workloads.py::test_names_and_meaningless_strides_do_not_enter_the_key",
    ],
    "CASE-33": ["test_property.py::test_random_schedules_keep_the_result"],
    "CASE-35": [
        "test_api.py::test_outputs_that_overlap_inputs_give_numpys_result",
        "test_kernel.py::test_refuses_outputs_that_share_memory_with_inputs",
    ],
    "CASE-36": ["test_api.py::test_einsum_is_numpys"],
    "CASE-39": [
        "test_kernel.py::test_one_kernel_from_many_threads",
        "test_api.py::test_first_compile_of_one_operator_from_many_threads",
    ],
    "CASE-41": ["test_api.py::test_every_transposed_and_strided_view"],
    "CASE-42": ["test_cases.py::test_fewer_threads_than_asked_compute_everything"],
    "CASE-50": ["test_schedule.py::test_identity_is_the_same_in_every_process_case_50"],
    "CASE-58": ["test_tune.py::test_wrong_kernels_are_never_returned"],
}
LATER = {
    "CASE-11": "step 3: measuring workers that crash, hang or flood",
    "CASE-12": "step 3: budgets of searches",
    "CASE-13": "step 3: database keys",
    "CASE-22": "step 3: searches with nothing legal",
    "CASE-45": "step 3: cache directories",
    "CASE-47": "step 3: processes that share the database",
    "CASE-52": "step 4: environments and masks",
    "CASE-56": "step 3: ties within noise",
    "CASE-57": "step 3: never slower than the default",
}


@cache
def names_in(name: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / name).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_thirty_cases_are_covered_or_kept_for_a_step():
    assert len(COVERED) + len(LATER) == 30
    assert not set(COVERED) & set(LATER)


@pytest.mark.parametrize("case", COVERED)
def test_the_named_tests_exist(case):
    for where in COVERED[case]:
        name, _, test = where.partition("::")
        assert test in names_in(name)


def test_parallel_reductions_are_refused_split_or_not():
    nest = nest_of("mk,kn->mn", m=2, k=4, n=2)
    with pytest.raises(ScheduleError, match=r"loop 1 \(k\) is a reduction; loops \[0, 2\]"):
        parallel(Schedule(nest), 1)
    with pytest.raises(ScheduleError, match=r"loop 1 \(k:2\) is a reduction"):
        parallel(split(Schedule(nest), 1, 2), 1)


@needs_host
@pytest.mark.parametrize("order", ["i:4 k:4 j:6 i j k", "j:6 i j:3 k j", "k:5 j:8 i:3 k j:2 i j"])
def test_spatial_loops_between_pieces_of_a_reduction(order):
    nest = nest_of("ijk->ik", i=24, j=24, k=24)
    kernel = looptune.compile(nest, parse_order(nest, order))
    x = np.random.default_rng(0).random((24, 24, 24), np.float32)
    np.testing.assert_allclose(kernel(x), x.sum(1), rtol=1e-5)


def test_only_associative_reductions_exist():
    operand = Operand("x", "float32", (Dim(4, 1, (1,)),))
    scalar = Operand("out", "float32", ())
    with pytest.raises(ValueError, match=r"reduction 'sub' is none of \['add', 'max', 'min'\]"):
        Nest((Axis("i", 4, True),), scalar, (operand,), "sub")  # type: ignore[arg-type]


@pytest.mark.parametrize("extent", [1, 2, 7, 13, 30, 97])
def test_factors_never_exceed_the_extent(extent):
    schedule = Schedule(nest_of("i->i", i=extent))
    for factor in range(2, 65):
        if factor > extent:
            with pytest.raises(ScheduleError, match=f"makes {extent} trips"):
                split(schedule, 0, factor)
            continue
        after = split(schedule, 0, factor)
        covered = [after.trips(0), after.trips(1)]
        assert covered[1] == factor
        assert (covered[0] - 1) * factor < extent <= covered[0] * factor


@needs_host
@pytest.mark.parametrize("target", sorted(host_isas()))
@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 13, 15, 17, 31])
def test_lanes_past_the_end_never_flow_in(n, target):
    nest = nest_of("k->", k=n)
    for reduction, wanted in (("add", np.sum), ("max", np.max), ("min", np.min)):
        reduced = Nest(nest.axes, nest.output, nest.inputs, reduction)
        kernel = looptune.compile(reduced, vectorize(Schedule(reduced), "k"), target=target)
        buffer = np.full(n + 64, np.nan, np.float32)
        for sign in (1, -1):
            buffer[32 : 32 + n] = sign * np.arange(1, n + 1)
            x = buffer[32 : 32 + n]
            assert kernel(x) == wanted(x)
        x[n // 2] = np.nan
        assert np.isnan(kernel(x))


@needs_host
@pytest.mark.parametrize("m", [1, 100, 1023])
def test_kernels_refuse_other_sizes_than_theirs(m):
    kernel = looptune.optimize("mk,kn->mn", m=1024, n=8, k=8)
    with pytest.raises(ArgumentError, match=rf"has shape \({m}, 8\); the kernel needs \(1024, 8\)"):
        kernel(np.ones((m, 8), np.float32), np.ones((8, 8), np.float32))


@needs_host
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("order", ["m:8 n:8 k m n", "k:5 m:8 n:8 k m n", "k:5 m n k", "m n k"])
def test_overwriting_never_reads_the_old_output(garbage, order):
    nest = nest_of("mk,kn->mn", m=9, k=10, n=9)
    kernel = looptune.compile(nest, parse_order(nest, order))
    a, b = (np.random.default_rng(0).random(s, np.float32) for s in ((9, 10), (10, 9)))
    out = np.full((9, 9), garbage, np.float32)
    np.testing.assert_allclose(kernel(a, b, out=out), a @ b, rtol=1e-5)


@needs_host
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_fewer_threads_than_asked_compute_everything(threads):
    nest = nest_of("bmk,bkn->bmn", b=16, m=32, k=33, n=64)
    kernel = looptune.compile(nest, parallel(Schedule(nest), 0))
    a, b = (np.random.default_rng(0).random(s, np.float32) for s in ((16, 32, 33), (16, 33, 64)))
    kernel.entry.threads = threads
    for _ in range(50):
        out = np.full((16, 32, 64), np.nan, np.float32)
        np.testing.assert_allclose(kernel(a, b, out=out), a @ b, rtol=1e-4)
