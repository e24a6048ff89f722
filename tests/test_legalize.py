"""Hand-written Programs, legalized, encoded and run against guard pages, on what this host runs."""

from __future__ import annotations

import ctypes
import math
import mmap
from pathlib import Path

import numpy as np
import pytest

from looptune.backends import backend_for
from looptune.dtypes import DType
from looptune.legalize import legalize
from looptune.program import (
    BEGIN,
    END,
    Add,
    Advance,
    Base,
    Case,
    Const,
    Copy,
    Extremum,
    Fma,
    FmaLoad,
    FmaSplat,
    Gather,
    IfZero,
    Keep,
    Load,
    LoadMask,
    Loop,
    MaskedLoad,
    Min,
    Move,
    Mul,
    Op,
    Pick,
    Prefetch,
    Program,
    Reduce,
    Restore,
    Save,
    Scale,
    Scatter,
    Set,
    Splat,
    Step,
    Store,
    Subtract,
    Switch,
    While,
    Zip,
)
from looptune.target import TARGETS

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
FLAGS = Path("/proc/cpuinfo").read_text().split()
NEEDED = {"avx2": ("avx2", "fma"), "avx512": ("avx512f", "avx512vl")}
DTYPES: tuple[DType, ...] = ("float32", "float64")
MACHINES = [
    pytest.param(
        name,
        dtype,
        marks=pytest.mark.skipif(
            not set(NEEDED[target.isa]) <= set(FLAGS), reason=f"the host lacks {target.isa}"
        ),
    )
    for name, target in TARGETS.items()
    for dtype in DTYPES
]
every_machine = pytest.mark.parametrize(("name", "dtype"), MACHINES)


def protect(area: mmap.mmap, start: int, size: int, protection: int) -> int:
    """Change the protection of pages and return their address."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(area)) + start
    assert LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection) == 0
    return address


def guarded(values: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy that ends (or starts) where an unreadable page starts (or ends)."""
    size = -(-max(values.nbytes, 1) // PAGE) * PAGE
    area = mmap.mmap(-1, size + 2 * PAGE)
    start = PAGE + (size - values.nbytes if at_end else 0)
    copy = np.frombuffer(area, values.dtype, values.size, start)
    copy[:] = values
    protect(area, 0, PAGE, 0)
    protect(area, PAGE + size, PAGE, 0)
    return copy


def run(program: Program, operands: list[np.ndarray], begin: int = 0, end: int = 1) -> None:
    """Call the machine code of `program` on the operands."""
    code = backend_for(program.target)(legalize(program))
    area = mmap.mmap(-1, -(-len(code) // PAGE) * PAGE)
    area.write(code)
    address = protect(area, 0, len(area), mmap.PROT_READ | mmap.PROT_EXEC)
    scratch = np.zeros(program.scratch_bytes + 64, np.uint8)
    pointers = (ctypes.c_void_p * len(operands))(*(a.ctypes.data for a in operands))
    word = ctypes.c_int64
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, word, word)(address)
    call(pointers, scratch.ctypes.data, begin, end)


def program(name: str, dtype: DType, operands: int, *ops: Op, scalars: int = 2) -> Program:
    """Pointer i at operand i, then `ops`."""
    bases = tuple(Base(i, i, 0) for i in range(operands))
    return Program(TARGETS[name], dtype, operands, scalars, operands, 64, 1, (*bases, *ops))


def results(name: str, dtype: DType, inputs: list[np.ndarray], size: int, *ops: Op) -> np.ndarray:
    """What `ops` write to the last operand, of `size` elements, NaN before."""
    arrays = [*(np.asarray(a, dtype) for a in inputs), np.full(size, np.nan, dtype)]
    found = []
    for at_end in (True, False):
        placed = [guarded(a, at_end) for a in arrays]
        run(program(name, dtype, len(placed), *ops), placed)
        for before, after in zip(arrays[:-1], placed, strict=False):
            np.testing.assert_array_equal(before, after)
        found.append(placed[-1].copy())
    np.testing.assert_array_equal(found[0], found[1])
    return found[0]


def lanes_of(name: str, dtype: DType) -> int:
    return TARGETS[name].lanes(dtype)


def item(dtype: DType) -> int:
    return np.dtype(dtype).itemsize


def padded(values: np.ndarray, lanes: int) -> np.ndarray:
    return np.concatenate([values, np.zeros(lanes - len(values))])


@every_machine
def test_partial_load_zeroes_the_rest(name: str, dtype: DType) -> None:
    lanes = lanes_of(name, dtype)
    for n in range(1, lanes + 1):
        values = np.arange(1.0, n + 1)
        found = results(name, dtype, [values], lanes, Load(9, 0, 0, n), Store(9, 1, 0, lanes, 3))
        np.testing.assert_array_equal(found, padded(values, lanes))


@every_machine
def test_all_partial_loads_in_one_program(name: str, dtype: DType) -> None:
    lanes = lanes_of(name, dtype)
    values = np.arange(1.0, lanes + 1)
    ops: list[Op] = []
    for n in (*range(1, lanes + 1), *range(lanes, 0, -1)):
        ops += [Load(2, 0, 0, n), Store(2, 1, len(ops) // 2 * lanes * item(dtype), lanes, 3)]
    found = results(name, dtype, [values], len(ops) // 2 * lanes, *ops).reshape(2, lanes, lanes)
    np.testing.assert_array_equal(found[0], np.tril(np.tile(values, (lanes, 1))))
    np.testing.assert_array_equal(found[1], found[0][::-1])


@every_machine
def test_partial_splat_zeroes_the_rest(name: str, dtype: DType) -> None:
    lanes = lanes_of(name, dtype)
    for n in range(1, lanes + 1):
        ops = (Splat(0, 0, item(dtype), n), Store(0, 1, 0, lanes, 3))
        found = results(name, dtype, [np.array([1, np.inf])], lanes, *ops)
        np.testing.assert_array_equal(found, padded(np.full(n, np.inf), lanes))


@every_machine
@pytest.mark.parametrize("before", [0, 2])
def test_partial_store_writes_no_other_byte(name: str, dtype: DType, before: int) -> None:
    lanes = lanes_of(name, dtype)
    values = np.arange(1.0, lanes + 1)
    for n in range(1, lanes + 1):
        ops = (Load(1, 0, 0, lanes), Store(1, 1, before * item(dtype), n, 4))
        found = results(name, dtype, [values], before + n, *ops)
        np.testing.assert_array_equal(found, [*[np.nan] * before, *values[:n]])


@every_machine
@pytest.mark.parametrize("stride", [3, -2])
def test_gather(name: str, dtype: DType, stride: int) -> None:
    lanes, size = lanes_of(name, dtype), item(dtype)
    for n in range(1, lanes + 1):
        values = np.arange(1.0, abs(stride) * (n - 1) + 2)
        start = 0 if stride > 0 else len(values) - 1
        ops = (Gather(1, 0, start * size, stride * size, n, 2), Store(1, 1, 0, lanes, 3))
        found = results(name, dtype, [values], lanes, *ops)
        np.testing.assert_array_equal(found, padded(values[::stride], lanes))


@every_machine
def test_every_second_element_of_what_lies_side_by_side(name: str, dtype: DType) -> None:
    """The elements between are read, too, and nothing behind the last."""
    lanes, size = lanes_of(name, dtype), item(dtype)
    for n in range(1, lanes + 1):
        values = np.arange(1.0, 2 * n)
        gather = Gather(1, 0, 0, 2 * size, n, 2, dense=True)
        found = results(name, dtype, [values], lanes, gather, Store(1, 1, 0, lanes, 3))
        np.testing.assert_array_equal(found, padded(values[::2], lanes))


@every_machine
@pytest.mark.parametrize("stride", [3, -2])
def test_scatter(name: str, dtype: DType, stride: int) -> None:
    lanes, size = lanes_of(name, dtype), item(dtype)
    values = np.arange(1.0, lanes + 1)
    for n in range(1, lanes + 1):
        expected = np.full(abs(stride) * (n - 1) + 1, np.nan)
        expected[::stride] = values[:n]
        start = 0 if stride > 0 else len(expected) - 1
        ops = (Load(1, 0, 0, lanes), Scatter(1, 1, start * size, stride * size, n, 2))
        found = results(name, dtype, [values], len(expected), *ops)
        np.testing.assert_array_equal(found, expected)


@every_machine
@pytest.mark.parametrize("kind", ["add", "max", "min"])
@pytest.mark.parametrize("dst", [0, 5])
def test_reduce(name: str, dtype: DType, kind: str, dst: int) -> None:
    lanes = lanes_of(name, dtype)
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum}[kind].reduce
    ops = (Load(0, 0, 0, lanes), Reduce(kind, dst, 0, (2, 3)), Store(dst, 1, 0, 1, 4))
    samples = [np.roll(np.arange(lanes) - shift, at) for shift in (0, 40) for at in range(lanes)]
    samples += [np.where(np.arange(lanes) == at, np.nan, -1.0) for at in range(lanes)]
    for values in samples:
        found = results(name, dtype, [values], 1, *ops)
        np.testing.assert_array_equal(found, [combine(values)])


@every_machine
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dst", [0, 5])
def test_extremum_keeps_nans(name: str, dtype: DType, kind: str, dst: int) -> None:
    lanes = lanes_of(name, dtype)
    kinds = np.array([1.0, -2.0, np.nan, np.inf, -np.inf])
    pairs = np.array([(a, b) for a in kinds for b in kinds])
    ops = (
        Load(0, 0, 0, lanes),
        Load(1, 1, 0, lanes),
        Extremum(kind, dst, 0, 1, 7),
        Store(dst, 2, 0, lanes, 4),
    )
    for first in range(0, 25, lanes):
        a, b = np.resize(pairs[first:], (lanes, 2)).T
        expected = np.maximum(a, b) if kind == "max" else np.minimum(a, b)
        np.testing.assert_array_equal(results(name, dtype, [a, b], lanes, *ops), expected)


@every_machine
@pytest.mark.parametrize("dst", [0, 1, 5])
def test_keep(name: str, dtype: DType, dst: int) -> None:
    lanes = lanes_of(name, dtype)
    a, b = np.arange(lanes), -np.arange(lanes) - 9
    for n in range(lanes + 1):
        ops = (Load(0, 0, 0, lanes), Load(1, 1, 0, lanes), Keep(dst, 0, 1, n))
        found = results(name, dtype, [a, b], lanes, *ops, Store(dst, 2, 0, lanes, 4))
        np.testing.assert_array_equal(found, [*a[:n], *b[n:]])


@every_machine
def test_arithmetic(name: str, dtype: DType) -> None:
    lanes, size = lanes_of(name, dtype), item(dtype)
    a, b = np.arange(lanes) + 2, np.arange(lanes) * 3 - 5
    head = (Load(0, 0, 0, lanes), Load(1, 1, 0, lanes), Const(2, 1.0), Prefetch(0, 0))
    cases: list[tuple[Op, np.ndarray]] = [
        (Add(2, 0, 1), a + b),
        (Mul(2, 0, 1), a * b),
        (Fma(2, 0, 1), 1 + a * b),
        (FmaLoad(2, 0, 1, 0), 1 + a * b),
        (Move(2, 1), b),
        (Const(2, -math.inf), np.full(lanes, -np.inf)),
        (Const(2, 0.0), np.zeros(lanes)),
    ]
    if TARGETS[name].fold_splat:
        cases.append((FmaSplat(2, 0, 1, size), 1 + a * b[1]))
    for op, expected in cases:
        found = results(name, dtype, [a, b], lanes, *head, op, Store(2, 2, 0, lanes, 4))
        np.testing.assert_array_equal(found, expected)


@every_machine
def test_negative_zero(name: str, dtype: DType) -> None:
    lanes = lanes_of(name, dtype)
    found = results(name, dtype, [], lanes, Const(2, -0.0), Store(2, 0, 0, lanes, 4))
    assert np.signbit(found).all()
    assert not found.any()


def count(dtype: DType, pointer: int) -> tuple[Op, ...]:
    """Add one to the element at a pointer."""
    return (
        Load(0, pointer, 0, 1),
        Const(1, 1.0),
        Add(0, 0, 1),
        Store(0, pointer, 0, 1, 2),
    )


def counted(name: str, dtype: DType, begin: int, end: int, crowd: int, *ops: Op) -> list[float]:
    """What ops count in the four elements of operand 0; the other scalars are `crowd` in use."""
    array = guarded(np.zeros(4, dtype), True)
    used = tuple(Set(2 + i, 1000 + i) for i in range(crowd))
    run(program(name, dtype, 1, *used, *ops, scalars=99), [array], begin, end)
    return [float(value) for value in array]


@every_machine
@pytest.mark.parametrize("crowd", [0, 12])
def test_loops(name: str, dtype: DType, crowd: int) -> None:
    """`crowd` takes all registers, so that the loops keep their scalars on the stack."""
    s, t, size = 50, 51, item(dtype)
    for n in (1, 5, 6, 7):
        ops = (
            Set(s, n), Loop(s, 3, count(dtype, 0)), Step(0, size),
            Set(s, n - 6), Loop(s, 1, count(dtype, 0), True), Step(0, size),
            Set(s, n), While(s, 2, count(dtype, 0)), Step(0, size),
            Switch(s, (Case(0, count(dtype, 0)), Case(1, (*count(dtype, 0), *count(dtype, 0))))),
            Copy(t, s),
        )  # fmt: skip
        expected = [-(-n // 3), max(n - 6, 0), n // 2, 1 + n % 2]
        assert counted(name, dtype, 0, 1, crowd, *ops) == expected


@every_machine
@pytest.mark.parametrize("crowd", [0, 12])
def test_scalar_operations(name: str, dtype: DType, crowd: int) -> None:
    s, t, u, size = 50, 51, 52, item(dtype)
    for begin, end in ((0, 0), (2, 3), (1, 9)):
        ops = (
            Copy(s, END), Subtract(s, BEGIN), Save(u, 0), Advance(0, BEGIN, 0), Step(0, 3 * size),
            Min(t, s, 5), Scale(t, t, 2), Loop(t, 1, count(dtype, 0), True),
            Restore(0, u), Set(t, 1), Advance(0, t, size),
            IfZero(s, count(dtype, 0), ()), Step(0, size),
            IfZero(s, (), count(dtype, 0)), Step(0, -size),
            IfZero(s, count(dtype, 0), (Step(0, -size), *count(dtype, 0))),
        )  # fmt: skip
        n = end - begin
        expected = [int(n > 0), 2 * int(n == 0), int(n > 0), 2 * min(n, 5)]
        assert counted(name, dtype, begin, end, crowd, *ops) == expected


@every_machine
@pytest.mark.parametrize("step", [128, -128, 2**31 - 1, 2**31, 2**40, -(2**31), -(2**45)])
def test_far_steps_return(name: str, dtype: DType, step: int) -> None:
    s = 2
    ops = (
        Step(0, step), Step(0, -step),
        Set(s, 3), Advance(0, s, step), Scale(s, s, -step), Set(3, 1), Advance(0, s, 1),
        *count(dtype, 0),
    )  # fmt: skip
    assert counted(name, dtype, 0, 1, 0, *ops) == [1, 0, 0, 0]


@every_machine
@pytest.mark.parametrize("value", [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**50, -(2**50)])
@pytest.mark.parametrize("crowd", [0, 12])
def test_constants_of_every_size(name: str, dtype: DType, value: int, crowd: int) -> None:
    s = 50
    ops = (Set(s, value), Switch(s, (Case(value, count(dtype, 0)), Case(7, ()))))
    bounded = (Min(s, s, value - 1), Switch(s, (Case(value - 1, count(dtype, 0)), Case(7, ()))))
    assert counted(name, dtype, 0, 1, crowd, *ops, *bounded) == [2, 0, 0, 0]


def test_what_the_target_has_stays_as_it_is() -> None:
    ops = (
        Load(0, 0, 0, 8),
        Splat(1, 0, 0, 8),
        Fma(2, 0, 1),
        Store(2, 1, 0, 8, 3),
        Load(0, 0, 0, 4),
    )
    for name in ("avx2", "avx512"):
        given = program(name, "float32", 2, *ops)
        if name == "avx512":
            given = program(name, "float32", 2, Load(0, 0, 0, 13), Store(0, 1, 0, 13, 3))
        assert legalize(given) == given


def test_a_mask_is_reused_until_control_flow() -> None:
    load = Load(0, 0, 0, 5)
    again = Loop(2, 1, (load,))
    body = legalize(program("avx2", "float32", 1, load, load, Load(1, 0, 0, 6), again)).body
    assert body[1:] == (
        LoadMask(15, 5),
        MaskedLoad(0, 0, 0, 5, 15),
        MaskedLoad(0, 0, 0, 5, 15),
        LoadMask(15, 6),
        MaskedLoad(1, 0, 0, 6, 15),
        Loop(2, 1, (LoadMask(15, 5), MaskedLoad(0, 0, 0, 5, 15))),
    )


def test_control_flow_keeps_its_shape() -> None:
    store, stored = Store(0, 0, 0, 2, 1), Store(0, 0, 0, 2, 1)
    ops = (
        While(2, 3, (Switch(3, (Case(1, (Splat(0, 0, 0, 1),)), Case(2, (store,)))),)),
        IfZero(4, (Splat(0, 0, 0, 1),), (store,)),
    )
    load = Load(0, 0, 0, 1)
    assert legalize(program("avx2", "float64", 1, *ops)).body[1:] == (
        While(2, 3, (Switch(3, (Case(1, (load,)), Case(2, (stored,)))),)),
        IfZero(4, (load,), (stored,)),
    )


def test_a_legal_program_is_not_legalized_again() -> None:
    legal = legalize(program("avx2", "float32", 1, Load(0, 0, 0, 3)))
    with pytest.raises(AssertionError, match="legalized already"):
        legalize(legal)


@pytest.mark.parametrize("shuffle", [Zip(15, 0, 1, 1, False), Pick(15, 0, 1, (0,))])
def test_a_shuffle_may_overwrite_the_mask(shuffle: Op) -> None:
    ops = (Base(0, 1, 0), Load(0, 0, 0, 3), shuffle, Load(1, 0, 0, 3))
    legal = legalize(Program(TARGETS["avx2"], "float32", 2, 2, 1, 0, 1, ops)).body
    assert [type(op).__name__ for op in legal].count("LoadMask") == 2
    kept = legalize(
        Program(
            TARGETS["avx2"], "float32", 2, 2, 1, 0, 1, (*ops[:2], shuffle._replace(dst=9), ops[3])
        )
    ).body
    assert [type(op).__name__ for op in kept].count("LoadMask") == 1
