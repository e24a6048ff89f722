"""`optimize` and `compile`: what they take, verify, refuse and report."""

from __future__ import annotations

import numpy as np
import pytest
from builders import nest_of
from harness import needs_host

import looptune
from looptune import oracle, workloads
from looptune.errors import (
    ArgumentTypeError,
    CheckpointError,
    ScheduleError,
    SpecError,
    UnsupportedError,
    UnsupportedHostError,
    VerificationError,
)
from looptune.oracle import Oracle
from looptune.schedule import Schedule, parse_order

pytestmark = needs_host
SPEC = "mk,kn->mn"


def test_every_way_to_say_a_matmul_gives_one_plan():
    a, b = np.ones((6, 7), np.float32), np.ones((7, 9), np.float32)
    keys = {
        kernel.plan.key
        for kernel in (
            looptune.optimize(SPEC, m=6, n=9, k=7),
            looptune.optimize(SPEC, sizes={"m": 6, "n": 9, "k": 7}),
            looptune.optimize(SPEC, shapes=[(6, 7), (7, 9)]),
            looptune.optimize(SPEC, shapes=[a, b]),
            looptune.optimize("ab,bc->ac", a=6, c=9, b=7),
            looptune.optimize(workloads.matmul(6, 9, 7)),
            looptune.optimize(workloads.matmul(6, 9, 7).nests[0]),
        )
    }
    assert len(keys) == 1


def test_example_arrays_bring_strides_and_dtype():
    a, b = np.ones((7, 6)).T, np.ones((7, 18))[:, ::2]
    kernel = looptune.optimize(SPEC, shapes=[a, b])
    np.testing.assert_array_equal(kernel(a, b), a @ b)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"m": 2, "n": 2, "k": 2, "strategi": 3}, TypeError, "'strategi'; did you mean 'strategy'"),
        ({"m": 2, "n": 2, "k": 2, "z": 3}, TypeError, "unexpected keyword argument 'z'"),
        ({"m": 2, "n": 2}, SpecError, "label 'k' has no size"),
        ({}, SpecError, "give the operands' shapes or the labels' sizes"),
        ({"shapes": [(2, 2), (2, 2)], "m": 2}, SpecError, "shapes or sizes"),
        ({"shapes": [(2, 2), np.ones((2, 2))]}, SpecError, "mixes example arrays and tuples"),
        ({"shapes": [2, (2, 2)]}, SpecError, "2 is neither a shape nor an array"),
        ({"m": 2, "n": 2, "k": 2, "strategy": "x"}, UnsupportedError, "'x' is none of"),
        ({"m": 2, "n": 2, "k": 2, "dtype": "int16"}, UnsupportedError, "'int16' is not supported"),
        ({"m": 2, "n": 2, "k": 2, "epilogue": "swish"}, SpecError, "'swish' is none of"),
        (
            {"m": 2, "n": 2, "k": 2, "strategy": "default", "policy": "p"},
            ArgumentTypeError,
            "strategy=.policy.",
        ),
        ({"m": 2, "n": 2, "k": 2, "policy": "p"}, CheckpointError, "p: no checkpoint"),
        ({"m": 2, "n": 2, "k": 2, "budget": -1}, SpecError, "budget: seconds=-1"),
        ({"m": 2, "n": 2, "k": 2, "target": "vax"}, UnsupportedError, "target 'vax' is none of"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        looptune.optimize(SPEC, **arguments)


def test_bad_specs_are_named():
    with pytest.raises(SpecError, match="label 'm' has two sizes, 2 in sizes and 3"):
        looptune.optimize("mk,kn->mn", sizes={"m": 2, "k": 3, "n": 4}, m=3)
    with pytest.raises(SpecError, match="spec is a int"):
        looptune.optimize(3)
    plan = workloads.matmul(2, 2, 2)
    with pytest.raises(SpecError, match="belong to an einsum string"):
        looptune.optimize(plan, sizes={"m": 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        looptune.optimize(plan, m=3)


def test_the_report_tells_where_the_time_went():
    kernel = looptune.optimize(SPEC, m=8, n=8, k=8, strategy="default", budget=1.5)
    assert kernel.origin == "default"
    assert kernel.report.verified
    assert kernel.report.budget.seconds == 1.5
    assert min(kernel.report.codegen_seconds, kernel.report.verify_seconds) > 0


def test_compile_takes_a_schedule_of_ones_own():
    nest = nest_of(SPEC, m=20, k=12, n=40)
    kernel = looptune.compile(nest, parse_order(nest, "m:6 n:16 k m n"))
    a, b = (np.random.default_rng(0).random(s, np.float32) for s in ((20, 12), (12, 40)))
    np.testing.assert_allclose(kernel(a, b), a @ b, rtol=1e-5)
    other = nest_of(SPEC, m=21, k=12, n=40)
    with pytest.raises(ScheduleError, match="the schedule is of out"):
        looptune.compile(other, Schedule(nest))


def test_wrong_kernels_are_never_returned(monkeypatch):
    real = Oracle.run

    def without_the_last_row(oracle, kernel):
        found = real(oracle, kernel)
        found[-1] = 0
        return found

    monkeypatch.setattr(Oracle, "run", without_the_last_row)
    with pytest.raises(VerificationError, match=r"element \[7, "):
        looptune.optimize(SPEC, m=8, n=8, k=8)


def test_kernels_for_other_machines_can_be_made_not_verified(monkeypatch):
    monkeypatch.setattr("looptune.host.host_isas", lambda cpuinfo=None: ("avx2",))
    kernel = looptune.optimize(SPEC, m=8, n=8, k=8, target="avx512", verify=False)
    assert "zmm" in kernel.asm
    with pytest.raises(UnsupportedHostError, match="does not run avx512"):
        looptune.optimize(SPEC, m=8, n=8, k=8, target="avx512")


def test_accumulating_plans_verify():
    plan = workloads.matmul(9, 17, 5, accumulate=True)
    kernel = looptune.optimize(plan)
    out = np.ones((9, 17), np.float32)
    kernel(np.ones((9, 5), np.float32), np.ones((5, 17), np.float32), out=out)
    assert (out == 6).all()


def test_what_is_too_large_to_verify_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate 37.3 GiB")

    monkeypatch.setattr(oracle, "random_arrays", refuse)
    with pytest.raises(MemoryError, match=r"some 149\.1 GiB.*Unable.*verify=False") as refused:
        looptune.optimize(workloads.matmul(100_000, 100_000, 64), strategy="default", database=None)
    assert isinstance(refused.value, looptune.ReferenceMemoryError)
    looptune.optimize(
        workloads.matmul(100_000, 100_000, 64), strategy="default", database=None, verify=False
    )
