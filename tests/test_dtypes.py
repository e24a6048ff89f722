"""Narrow and whole element types: conversions bit by bit, sums, the boundary to NumPy and torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from builders import nest_of
from harness import compiled, guarded, interpreted, native, needs_host, programs_of, run_poisoned

import looptune
from looptune.dtypes import DType, is_narrow, is_whole, numpy_dtype, poison
from looptune.errors import ArgumentTypeError, InterpretError, NestError, UnsupportedError
from looptune.host import host_target, runs
from looptune.interpret import interpret
from looptune.ir import Axis, Dim, Nest, Operand, Tensor
from looptune.legalize import legalize
from looptune.lower import lower
from looptune.measure import random_arrays
from looptune.program import (
    Base,
    Fma,
    FmaLoad,
    Format,
    GatherAs,
    Load,
    LoadAs,
    Op,
    Program,
    ScatterAs,
    SplatAs,
    Store,
    StoreAs,
    walk,
)
from looptune.reference import check
from looptune.schedule import Schedule, pack, parse_order
from looptune.target import TARGETS, Target
from looptune.workloads import batched_matmul, conv2d, einsum, matmul

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS: dict[Format, np.dtype[np.generic]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": BF16,
    "int8": np.dtype(np.int8),
    "int8_pair": np.dtype(np.int8),
}
NARROW: tuple[Format, ...] = ("float16", "bfloat16")
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
every_format = pytest.mark.parametrize("form", FORMATS)


def program(target: Target, form: Format, *ops: Op) -> Program:
    """Operand 0 is written, operand 1 read; pointer i at operand i."""
    dtype: DType = "int32" if form.startswith("int8") else "float32"
    return Program(target, dtype, 2, 2, 2, 0, 1, (Base(0, 0, 0), Base(1, 1, 0), *ops))


def outcomes(made: Program, out: np.ndarray, source: np.ndarray) -> list[np.ndarray]:
    """What the interpreter leaves in `out`, and machine code on guarded operands, where it runs."""
    first = out.copy()
    interpret(made, [first, source])
    if not runs(made.target):
        return [first]
    found = [first]
    for end in (True, False):
        arrays = []
        for slot, array in enumerate((out, source)):
            memory, _ = guarded(slot, array.nbytes, end)
            placed = np.ndarray(array.shape, array.dtype, memory)
            placed[...] = array
            arrays.append(placed)
        native([legalize(made)])(arrays)
        found.append(arrays[0].copy())
    return found


def every_value(form: Format) -> np.ndarray:
    """All values of two bytes, or of one."""
    if FORMATS[form].itemsize == 1:
        return np.arange(-128, 128).astype(np.int8)
    return np.arange(1 << 16, dtype=np.uint16).view(FORMATS[form])


def widened(values: np.ndarray, form: Format) -> np.ndarray:
    if form.startswith("int8"):
        whole = values.astype(np.int32)
        return whole & 0xFFFF if form == "int8_pair" else whole
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit, but for the payload of a NaN."""
    if a.dtype.kind == "i":
        return np.array_equal(a, b)
    with np.errstate(invalid="ignore"):  # signalling NaN
        a, b = a.astype(np.float64), b.astype(np.float64)
    signs = np.signbit(a) == np.signbit(b)
    return np.array_equal(a, b, equal_nan=True) and bool(np.all(signs | np.isnan(a)))


@every_target
@every_format
def test_every_value_is_widened_exactly(form: Format, target: Target) -> None:
    values = every_value(form)
    lanes, size = target.lanes("float32"), values.itemsize
    for start in range(0, len(values), 4096):
        part = values[start : start + 4096]
        ops: list[Op] = []
        for at in range(0, len(part), lanes):
            ops += [LoadAs(2, 1, at * size, lanes, form), Store(2, 0, at * 4, lanes, 3)]
        out = np.zeros(len(part), widened(part, form).dtype)
        for found in outcomes(program(target, form, *ops), out, part):
            assert same(found, widened(part, form))


@every_target
@every_format
def test_parts_splats_and_gathers(form: Format, target: Target) -> None:
    lanes, size = target.lanes("float32"), FORMATS[form].itemsize
    values = np.arange(-20, 3 * lanes - 20).astype(FORMATS[form])
    for n in range(1, lanes + 1):
        rest = [0] * (lanes - n)
        cases: list[tuple[Op, np.ndarray]] = [
            (LoadAs(9, 1, 0, n, form), values[:n]),
            (SplatAs(9, 1, 3 * size, n, form), np.repeat(values[3], n)),
            (GatherAs(9, 1, size, 2 * size, n, 8, form), values[1::2][:n]),
            (GatherAs(9, 1, (n - 1) * size, -size, n, 8, form), values[:n][::-1]),
        ]
        for op, expected in cases:
            source = values[:n] if type(op) is LoadAs or op[-3] < 0 else values
            source = values[:n] if type(op) is LoadAs else source
            wanted = np.concatenate([widened(expected, form), rest]).astype(
                widened(expected, form).dtype
            )
            made = program(target, form, op, Store(9, 0, 0, lanes, 3))
            for found in outcomes(made, np.zeros(lanes, wanted.dtype), source):
                assert same(found, wanted), op


@every_target
@pytest.mark.parametrize("form", NARROW)
def test_stores_round_ties_to_even(form: Format, target: Target) -> None:
    """Every sixteenth value, and what lies half way to the next and just beside that."""
    exact = widened(every_value(form)[::16], form)
    bits = exact.view(np.uint32)
    half = np.uint32(1 << (12 if form == "float16" else 15))
    near = [bits, bits + half, bits + half - np.uint32(1), bits + half + np.uint32(1)]
    values = np.concatenate([bits_.view(np.float32) for bits_ in near])
    special = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 65519, 65520, 1e-9], np.float32)
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    values = np.concatenate([values, special, nans])
    values = np.resize(values, -(-len(values) // 512) * 512)
    lanes = target.lanes("float32")
    for start in range(0, len(values), 512):
        part = values[start : start + 512]
        ops: list[Op] = []
        for at in range(0, 512, lanes):
            ops += [Load(2, 1, 4 * at, lanes), StoreAs(2, 0, 2 * at, lanes, (3, 4), form)]
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = part.astype(FORMATS[form])
        for found in outcomes(program(target, form, *ops), np.zeros(512, FORMATS[form]), part):
            assert same(found, wanted)


@every_target
@pytest.mark.parametrize("form", NARROW)
def test_partial_stores_and_scatters_write_no_other_byte(form: Format, target: Target) -> None:
    lanes = target.lanes("float32")
    source = np.arange(1, lanes + 1, dtype=np.float32)
    for n in range(1, lanes + 1):
        for stride in (1, 2, -1):
            first = (n - 1) * 2 if stride < 0 else 0
            store: Op = ScatterAs(2, 0, first, 2 * stride, n, (8, 9), form)
            if stride == 1:
                store = StoreAs(2, 0, 0, n, (8, 9), form)
            size = n if stride != 2 else 2 * n
            wanted = np.full(size, 99).astype(FORMATS[form])
            wanted[:: abs(stride)] = source[:n][:: 1 if stride > 0 else -1]
            made = program(target, form, Load(2, 1, 0, lanes), store)
            for found in outcomes(made, np.full(size, 99).astype(FORMATS[form]), source):
                assert same(found, wanted), store


PROBLEMS = {
    "matmul": matmul(13, 37, 21, dtype="float16", out_dtype="float32").nests[0],
    "narrow out": matmul(13, 37, 21, dtype="bfloat16").nests[0],
    "added": matmul(13, 37, 21, dtype="float16", accumulate=True).nests[0],
    "transposed": matmul(13, 37, 21, dtype="bfloat16", trans_a=True, trans_b=True).nests[0],
    "batched": batched_matmul(3, 7, 37, 9, dtype="float16").nests[0],
    "convolution": conv2d((1, 3, 9, 9), (5, 3, 3, 3), padding=1, dtype="bfloat16").nests[0],
    "whole": matmul(13, 37, 21, dtype="int8").nests[0],
    "whole convolution": conv2d((1, 3, 9, 9), (5, 3, 3, 3), padding=1, dtype="int8").nests[0],
    "sum": einsum("ij->j", sizes={"i": 19, "j": 21}, dtype="int8").nests[0],
    "wide sum": einsum("ij->i", sizes={"i": 9, "j": 41}, dtype="int32").nests[0],
    "outer": einsum("i,j->ij", sizes={"i": 19, "j": 21}, dtype="int8").nests[0],
}


@every_target
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("nest", PROBLEMS.values(), ids=PROBLEMS)
def test_nests_on_every_target(nest: Nest, dot: bool, target: Target) -> None:
    machine = replace(target, dot=dot)
    names = [axis.name for axis in nest.axes]
    schedules = [Schedule(nest), looptune.default.default_schedule(nest, machine)]
    if "k" in names and "m" in names:
        prefix = "b " * ("b" in names)
        schedules += [
            parse_order(nest, prefix + "k:7 m:4 n:16 k m n"),
            parse_order(nest, prefix + "m:4 n k m n".replace("n k", "n:32 k"), "m"),
            pack(pack(parse_order(nest, prefix + "n:16 m:4 k m n", "n"), 2), 1, None, 0),
            pack(parse_order(nest, prefix + "m:4 n:16 k m n", "m"), 0, None, 0),
        ]
    for schedule in schedules:
        made = [interpreted(programs_of(schedule, machine)), interpreted(lower(schedule, machine))]
        if runs(machine):
            made.append(compiled(schedule, machine))
        for call in made:
            run_poisoned(nest, call, np.random.default_rng(0), exact=True)
        run_poisoned(nest, made[-1], np.random.default_rng(1), nan=True)


def test_partial_sums_of_a_narrow_output_stay_wide() -> None:
    """1 + 4096 / 4096: rounded to bfloat16 after each visit, the sum would stay at 1."""
    nest = matmul(1, 128, 4097, dtype="bfloat16").nests[0]
    a = np.full((1, 4097), 2.0**-12).astype(BF16)
    a[0, 0] = 1
    out = np.zeros((1, 128), BF16)
    programs = programs_of(parse_order(nest, "k:16 m n k", "n"), TARGETS["avx2"])
    assert programs[0].scratch_bytes == 4 * 128
    interpreted(programs)([out, a, np.ones((4097, 128), BF16)])
    assert (out == 2).all()


@every_target
def test_they_stay_wide_where_a_pack_makes_the_register_tile_smaller(target: Target) -> None:
    """A pack deep inside the reductions cuts them off from the accumulators."""
    nest = matmul(3, 7, 300, dtype="bfloat16", accumulate=True).nests[0]
    schedule = pack(pack(parse_order(nest, "k:100 k:10 k m n"), 1, None, 1), 2, (1, 0), 2)
    made = lower(schedule, target)
    run_poisoned(nest, interpreted(made), np.random.default_rng(0), exact=True)


def test_sums_of_int8_wrap_like_int32() -> None:
    k = 140_000  # 140,000 * 128 * 128 is over 2 ** 31
    nest = einsum("k,k->", (k,), (k,), dtype="int8")
    a = np.full(k, -128, np.int8)
    found = looptune.optimize(nest, verify=False)(a, a)
    assert int(np.asarray(found)) == k * 128 * 128 - 2**32
    assert check(nest, {"a": a, "b": a}, np.asarray(found)).ok
    assert not check(nest, {"a": a, "b": a}, np.asarray(found) + 1).ok


@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_products_of_int8_take_one_instruction_where_there_is_one(name: str, dot: bool) -> None:
    target = replace(TARGETS[name], dot=dot)
    schedule = looptune.default.default_schedule(PROBLEMS["whole"], target)
    text = "".join(
        looptune.backends.disassemble(looptune.backends.backend_for(target)(p))
        for p in programs_of(schedule, target)
    )
    assert ("vpdpwssd" in text) == dot
    assert ("vpmaddwd" in text) != dot
    kinds = {type(op) for p in programs_of(schedule, target) for op in walk(p.body)}
    assert bool(kinds & {Fma, FmaLoad}) == dot


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_matmul_keeps_the_type_of_its_operands(dtype: np.dtype[np.generic]) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((9, 40), (40, 17)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for left, right in ((a, b), (a[:, ::2], b[1::2]), (a[::-1], b)):
        found = looptune.matmul(left, right)
        wanted = left.astype(np.float32) @ right.astype(np.float32)
        assert isinstance(found, np.ndarray)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=0.02, atol=0.05)
    out = np.empty((9, 17), dtype)
    assert looptune.matmul(a, b, out=out) is out
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0.02, atol=0.05)


def test_operands_of_two_types_are_promoted() -> None:
    a, b = np.ones((3, 4), np.float16), np.ones((4, 5), np.float32)
    found = looptune.matmul(a, b)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32


def test_int8_gives_int32() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((9, 300), (300, 17)))
    found = looptune.matmul(a, b)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, a.astype(np.int32) @ b.astype(np.int32))
    out = np.empty((9, 17), np.int32)
    assert looptune.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, found)


def test_bfloat16_tensors_of_torch_come_and_go() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(9, 40).bfloat16(), torch.randn(40, 17).bfloat16()
    found = looptune.matmul(a, b)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), a.float() @ b.float(), rtol=0.02, atol=0.1)
    kernel = looptune.optimize("mk,kn->mn", shapes=[a, b])
    assert kernel(a, b).dtype == torch.bfloat16


def test_a_kernel_takes_its_own_type_only() -> None:
    kernel = looptune.optimize("mk,kn->mn", m=4, k=5, n=6, dtype="bfloat16")
    right = np.ones((4, 5), BF16), np.ones((5, 6), BF16)
    assert np.asarray(kernel(*right)).dtype == BF16
    for wrong in (np.uint16, np.float16, bool, np.float32):
        with pytest.raises(ArgumentTypeError, match="the kernel needs bfloat16"):
            kernel(np.ones((4, 5), wrong), right[1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: whole(reduction="max"), NestError, "summed into int32"),
        (lambda: whole(written="int8"), NestError, "summed into int32"),
        (lambda: whole(read="int32"), NestError, r"products are of int8 with int8; \['a', 'b'\]"),
        (lambda: whole(fill=0.5), NestError, "filled with 0.5"),
        (lambda: whole(fill=200.0), NestError, "filled with 200.0"),
        (lambda: whole(read="float32"), NestError, "a is float32 in a int32 nest"),
        (lambda: matmul(2, 2, 2, out_dtype="int8"), UnsupportedError, "a int8 result of float32"),
        (lambda: matmul(2, 2, 2, dtype="int16x2"), UnsupportedError, "'int16x2' is not supported"),
    ],
)
def test_what_has_no_meaning_is_named(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def whole(
    reduction: str = "add", written: DType = "int32", read: DType = "int8", fill: float = 0.0
) -> Nest:
    """out[i] += a[i, k] * b[k] of whole numbers."""
    axes = (Axis("i", 4), Axis("k", 5, True))
    out = Operand("out", written, (Dim(4, 1, (1, 0)),))
    a = Operand("a", read, (Dim(4, 5, (1, 0)), Dim(5, 1, (0, 1))), fill)
    b = Operand("b", read, (Dim(5, 1, (0, 1)),))
    return Nest(axes, out, (a, b), reduction)  # type: ignore[arg-type]


def test_the_interpreter_refuses_elements_of_another_type() -> None:
    made = program(TARGETS["avx2"], "float16", LoadAs(2, 1, 0, 4, "float16"))
    with pytest.raises(InterpretError, match="operand 1 holds float32"):
        interpret(made, [np.zeros(8, np.float32), np.zeros(8, np.float32)])
    made = program(TARGETS["avx2"], "float16", Load(2, 1, 0, 4))
    with pytest.raises(InterpretError, match="operand 1 holds float16"):
        interpret(made, [np.zeros(8, np.float32), np.zeros(8, np.float16)])


def test_types_by_name() -> None:
    assert numpy_dtype("bfloat16") == BF16
    assert is_narrow("int8")
    assert not is_narrow("int16x2")
    assert is_whole("int16x2")
    assert poison("int8") == -128
    assert np.isnan(poison("bfloat16"))
    tensor = Tensor("a", "bfloat16", (3, 5), (5, 1))
    assert tensor.bytes == 30
    assert nest_of("mk,kn->mn", m=2, k=2, n=2).key != matmul(2, 2, 2, dtype="float16").nests[0].key


def test_random_arrays_hold_all_of_int8() -> None:
    arrays = random_arrays(matmul(64, 64, 64, dtype="int8"))
    assert arrays["a"].min() == -128
    assert arrays["a"].max() == 127
    assert ctypes.sizeof(ctypes.c_int32) == arrays["out"].itemsize


@needs_host
def test_the_host_says_whether_it_has_dot_products() -> None:
    target = host_target("avx2")
    assert runs(target)
    assert target.dot == ("avx_vnni" in looptune.host.cpu_text().split())


def test_types_without_a_common_one_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'bfloat16', 'float16'\] have no common type"):
        looptune.matmul(np.ones((2, 3), BF16), np.ones((3, 2), np.float16))
