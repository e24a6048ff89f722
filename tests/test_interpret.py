"""The interpreter: what every operation does, and every access it must refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest

from looptune.errors import InterpretError
from looptune.interpret import cells_of, interpret
from looptune.program import (
    BEGIN,
    END,
    SCRATCH,
    Add,
    Advance,
    Base,
    Bound,
    Case,
    Const,
    Copy,
    Div,
    Evens,
    Extract,
    Extremum,
    Fma,
    FmaLoad,
    FmaSplat,
    Gather,
    GatherAs,
    IfZero,
    Insert,
    Keep,
    Load,
    LoadAs,
    LoadLane,
    LoadMask,
    Loop,
    MaskedLoad,
    Min,
    Move,
    Mul,
    Op,
    Pick,
    Power,
    Prefetch,
    Program,
    Reduce,
    Restore,
    Save,
    Scale,
    Scatter,
    ScatterAs,
    Set,
    Shuffle,
    Splat,
    SplatAs,
    Step,
    Store,
    StoreAs,
    StoreLane,
    Subtract,
    Switch,
    VectorOp,
    While,
    WithConst,
    Zip,
)
from looptune.target import TARGETS

Fusion = Literal["fused", "relaxed", "none"]

A = np.arange(1, 9, dtype=np.float32)
B = np.arange(10, 90, 10, dtype=np.float32)
READ = (Base(0, 0, 0), Base(1, 1, 0), Base(2, 2, 0), Load(0, 1, 0, 8), Load(1, 2, 0, 8))
NAN = np.nan


def program(*ops: Op, fma: Fusion = "fused") -> Program:
    """Three operands, eight scalars, three pointers, 64 bytes of scratch."""
    return Program(replace(TARGETS["avx2"], fma=fma), "float32", 3, 8, 3, 64, 4, ops)


def result(*ops: Op, register: int = 2) -> list[float]:
    """What a vector register holds after reading A and B to registers 0 and 1."""
    out = np.zeros(8, np.float32)
    interpret(program(*READ, *ops, Store(register, 0, 0, 8, 9)), [out, A, B])
    return out.tolist()


def counted(*ops: Op) -> float:
    """How often `Fma(3, 4, 4)` ran, from a register of ones."""
    out = np.zeros(1, np.float32)
    body = (Base(0, 0, 0), Const(3, 0), Const(4, 1), *ops, Store(3, 0, 0, 1, 9))
    interpret(program(*body), [out, A, B], lambda trips: [(1, 3)])
    return float(out[0])


ONCE = Fma(3, 4, 4)
LANES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
VECTORS: list[tuple[Op, list[float]]] = [
    (Const(2, 1.5), [1.5] * 8),
    (Move(2, 0), LANES),
    (Load(2, 1, 4, 3), [2, 3, 4, 0, 0, 0, 0, 0]),
    (Splat(2, 1, 8, 5), [3, 3, 3, 3, 3, 0, 0, 0]),
    (Gather(2, 1, 4, 8, 3, 9), [2, 4, 6, 0, 0, 0, 0, 0]),
    (Gather(2, 1, 28, -8, 4, 9), [8, 6, 4, 2, 0, 0, 0, 0]),
    (Add(2, 0, 1), [11, 22, 33, 44, 55, 66, 77, 88]),
    (Mul(2, 0, 0), [1, 4, 9, 16, 25, 36, 49, 64]),
    (Div(2, 1, 0), [10.0] * 8),
    (Bound("max", 2, 1, 0), [10, 20, 30, 40, 50, 60, 70, 80]),
    (Bound("min", 2, 1, 0), LANES),
    (WithConst("add", 2, 0, 0.5), [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5]),
    (WithConst("mul", 2, 0, 2.0), [2, 4, 6, 8, 10, 12, 14, 16]),
    (Power(2, 0), [2, 4, 8, 16, 32, 64, 128, 256]),
    (Extremum("max", 2, 0, 1, 9), [10, 20, 30, 40, 50, 60, 70, 80]),
    (Extremum("min", 2, 0, 1, 9), LANES),
    (Keep(2, 0, 1, 3), [1, 2, 3, 40, 50, 60, 70, 80]),
    (Reduce("add", 2, 0, (8, 9)), [36, *[NAN] * 7]),
    (Reduce("max", 2, 0, (8, 9)), [8, *[NAN] * 7]),
    (Extract(2, 0, 1), [5, 6, 7, 8, 0, 0, 0, 0]),
    (Insert(2, 0, 1, 1), [1, 2, 3, 4, 10, 20, 30, 40]),
    (Zip(2, 0, 1, 1, False), [1, 10, 2, 20, 5, 50, 6, 60]),
    (Zip(2, 0, 1, 1, True), [3, 30, 4, 40, 7, 70, 8, 80]),
    (Zip(2, 0, 1, 2, True), [3, 4, 30, 40, 7, 8, 70, 80]),
    (Evens(2, 0, 1), [1, 3, 5, 7, 20, 40, 60, 80]),
    (Pick(2, 0, 1, (1,)), [5, 6, 7, 8, 50, 60, 70, 80]),
    (Shuffle(2, 0, (3, 2, 1, 0)), [4, 3, 2, 1, *[NAN] * 4]),
    (Prefetch(1, 1 << 20), [NAN] * 8),
]


@pytest.mark.parametrize(("op", "expected"), VECTORS, ids=lambda x: type(x).__name__)
def test_vector_operation(op: Op, expected: list[float]) -> None:
    np.testing.assert_array_equal(result(op), expected)


@pytest.mark.parametrize("op", [Fma(2, 0, 1), FmaLoad(2, 0, 2, 0)], ids=["Fma", "FmaLoad"])
def test_multiply_add(op: Op) -> None:
    assert result(Const(2, 1), op) == (A * B + 1).tolist()


def test_multiply_add_broadcasts() -> None:
    assert result(Const(2, 1), FmaSplat(2, 0, 2, 8)) == (A * 30 + 1).tolist()


@pytest.mark.parametrize(("fma", "expected"), [("fused", 2.0**-24), ("none", 0.0)])
def test_multiply_add_rounds_as_the_target_does(fma: Fusion, expected: float) -> None:
    a = np.full(8, 1 + 2**-12, np.float32)  # its square is 1 + 2**-11 + 2**-24
    out = np.zeros(8, np.float32)
    ops = (*READ, Const(2, -1 - 2.0**-11), Fma(2, 0, 1), Store(2, 0, 0, 8, 9))
    interpret(program(*ops, fma=fma), [out, a, a])
    assert out[0] == expected


def test_masked_load_needs_its_mask() -> None:
    assert result(LoadMask(5, 3), MaskedLoad(2, 1, 0, 3, 5)) == [1, 2, 3, 0, 0, 0, 0, 0]
    with pytest.raises(InterpretError, match="register 5 holds the mask"):
        result(LoadMask(5, 2), MaskedLoad(2, 1, 0, 3, 5))


def test_lane_operations() -> None:
    assert result(Move(2, 0), LoadLane(2, 2, 0, 3)) == [1, 2, 3, 10, 0, 0, 0, 0]
    out = np.zeros(8, np.float32)
    interpret(program(*READ, StoreLane(1, 0, 4, 2)), [out, A, B])
    assert out.tolist() == [0, 30, 0, 0, 0, 0, 0, 0]


def test_scatter_writes_a_strided_view_only() -> None:
    memory = np.zeros(24, np.float32)
    interpret(program(*READ, Scatter(0, 0, 0, 12, 8, 9)), [memory[::3], A, B])
    assert memory[::3].tolist() == LANES
    assert not memory[1::3].any()


CONTROL: list[tuple[str, tuple[Op, ...], int]] = [
    ("loop", (Set(2, 7), Loop(2, 3, (ONCE,))), 3),
    ("loop runs once at least", (Set(2, 0), Loop(2, 3, (ONCE,))), 1),
    ("guarded loop", (Set(2, 0), Loop(2, 3, (ONCE,), guarded=True)), 0),
    ("while", (Set(2, 7), While(2, 3, (ONCE,))), 2),
    ("switch", (Set(2, 5), Switch(2, (Case(4, ()), Case(5, (ONCE,))))), 1),
    ("zero", (Set(2, 0), IfZero(2, (ONCE,), (ONCE, ONCE))), 1),
    ("not zero", (Set(2, 3), IfZero(2, (ONCE,), (ONCE, ONCE))), 2),
    ("begin and end", (Scale(2, END, 4), Subtract(2, BEGIN), Loop(2, 5, (ONCE,))), 3),
    ("min", (Set(2, 9), Min(3, 2, 4), Copy(2, 3), Loop(2, 1, (ONCE,))), 4),
]


@pytest.mark.parametrize(("ops", "times"), [c[1:] for c in CONTROL], ids=[c[0] for c in CONTROL])
def test_control(ops: tuple[Op, ...], times: int) -> None:
    assert counted(*ops) == times


def test_pointers_move_and_come_back() -> None:
    moves = (Save(2, 1), Step(1, 4), Set(3, 2), Advance(1, 3, 8), Load(2, 1, 0, 1), Restore(1, 2))
    assert result(*moves) == [6, 0, 0, 0, 0, 0, 0, 0]
    assert result(*moves, Load(2, 1, 0, 1))[0] == 1


def test_scratch_starts_as_nan_and_keeps_what_is_written() -> None:
    here = Base(1, SCRATCH, 0)
    assert np.isnan(result(here, Load(2, 1, 0, 8))).all()
    assert result(here, Store(0, 1, 32, 8, 9), Load(2, 1, 32, 8)) == LANES


def test_programs_share_the_scratch() -> None:
    out = np.zeros(8, np.float32)
    first = program(*READ, Base(1, SCRATCH, 0), Store(0, 1, 0, 8, 9))
    second = program(Base(0, 0, 0), Base(1, SCRATCH, 0), Load(2, 1, 0, 8), Store(2, 0, 0, 8, 9))
    interpret([first, second], [out, A, B])
    assert out.tolist() == LANES


def test_a_free_register_is_spoiled() -> None:
    assert np.isnan(result(Move(2, 0), Extremum("max", 3, 0, 1, 2))).all()
    assert np.isnan(result(Move(2, 0), Scatter(0, 0, 0, 4, 2, 2))).all()


REFUSED: list[tuple[str, tuple[Op, ...]]] = [
    ("8 elements at byte 4 of operand 1", (Load(2, 1, 4, 8),)),
    ("1 elements at byte -4 of operand 1", (Step(1, -4), Splat(2, 1, 0, 8))),
    ("at byte 2 of operand 1", (Load(2, 1, 2, 1),)),
    ("offset -4 is negative", (Step(1, 8), Load(2, 1, -4, 1))),
    ("offset -8 is negative", (Step(1, 8), Gather(2, 1, 0, -8, 2, 9))),
    ("at byte 60 of scratch", (Base(1, SCRATCH, 60), Load(2, 1, 0, 2))),
    ("there is no operand 5", (Base(1, 5, 0), Load(2, 1, 0, 2))),
    ("writes to operand 1, an input", (Store(0, 1, 0, 8, 9),)),
    ("writes to operand 2, an input", (StoreLane(0, 2, 0, 0),)),
    ("scalar 5 holds None, not a number", (Scale(2, 5, 4),)),
    ("scalar 5 is not set", (Copy(2, 5),)),
    ("not a number", (Save(2, 1), Min(2, 2, 4))),
    ("scalar 2 holds 3, not a pointer", (Set(2, 3), Restore(1, 2))),
    ("scalar 2 is 3, none of \\[1, 2\\]", (Set(2, 3), Switch(2, (Case(1, ()), Case(2, ()))))),
    ("dst must not be b", (Extremum("max", 2, 0, 2, 9),)),
    ("scratch none of the others", (Extremum("max", 2, 0, 1, 1),)),
    ("a register that the Program does not have", (Move(2, 16),)),
    (r"Move\(dst=2, src=-1\) names a register that", (Move(2, -1),)),
    (r"names a register that the Program", (Reduce("add", 2, 0, (9, -1)),)),
    (r"register 2 holds .*, not whole numbers", (WithConst("add", 2, 0, 0.5), Power(2, 2))),
    ("over 10000000 iterations", (Set(2, 1), Loop(2, 0, ()))),
]


@pytest.mark.parametrize(("message", "ops"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(message: str, ops: tuple[Op, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if "iterations" in message:
        monkeypatch.setattr("looptune.interpret.MAX_TRIPS", 100)
        message = "over 100 iterations"
    with pytest.raises(InterpretError, match=message):
        result(*ops)


def test_unset_pointer_is_refused() -> None:
    with pytest.raises(InterpretError, match="pointer 2 is not set"):
        interpret(program(Step(2, 4)), [np.zeros(8, np.float32), A, B])


def test_gaps_and_neighbours_are_refused() -> None:
    wide = np.zeros((2, 16), np.float32)
    load = Load(2, 1, 0, 8)
    with pytest.raises(InterpretError, match="8 elements at byte 0 of operand 1"):
        interpret(program(Base(1, 1, 0), load), [wide.copy(), wide[:, :5], B])
    interpret(program(Base(1, 1, 64), load), [wide.copy(), wide[:, :8], B])


def test_unaligned_elements_are_refused() -> None:
    records = np.zeros(8, [("number", np.float32), ("tag", np.int16)])
    with pytest.raises(InterpretError, match=r"strides \(6,\), no multiples of 4"):
        interpret(program(), [np.zeros(8, np.float32), records["number"], B])


def test_negative_strides_reach_below_the_pointer() -> None:
    out = np.zeros(1, np.float32)
    last = (Base(0, 0, 0), Base(1, 1, -28), Load(2, 1, 0, 1), Store(2, 0, 0, 1, 9))
    interpret(program(*last), [out, A[::-1], B])
    assert out[0] == A[0]


def test_cells_of_an_empty_array() -> None:
    _, cells = cells_of(np.zeros((3, 0, 2), np.float32))
    assert len(cells.values) == 0


def test_constants_in_sums_of_products() -> None:
    assert result(WithConst("horner", 0, 1, 1.0), register=0)[:3] == [11, 41, 91]
    assert result(WithConst("fma", 0, 1, 0.5), register=0)[:3] == [6, 12, 18]


def test_every_vector_operation_is_tested() -> None:
    converted = {LoadAs, SplatAs, GatherAs, StoreAs, ScatterAs}  # in test_dtypes
    tested = {type(op) for op, _ in VECTORS} | {Fma, FmaLoad, FmaSplat, Store, Scatter} | converted
    assert set(get_args(VectorOp)) <= tested
