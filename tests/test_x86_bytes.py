"""Exact instructions of every kind, read back by capstone, a disassembler of other descent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import capstone  # type: ignore[import-untyped]
import numpy as np
import pytest

from looptune.backends import BACKENDS, backend_for, disassemble
from looptune.dtypes import DType
from looptune.errors import LoweringError, UnsupportedError
from looptune.legalize import legalize
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
    EvensOf,
    EvensWith,
    Extract,
    Extremum,
    Fma,
    FmaLoad,
    FmaSplat,
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
    MulPairs,
    Op,
    Pick,
    Power,
    Prefetch,
    Program,
    Restore,
    Save,
    Scale,
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
    While,
    WithConst,
    Zip,
)
from looptune.target import TARGETS

CAPSTONE = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
DTYPES: tuple[DType, ...] = ("float32", "float64")
SIZE = {"avx2": "ymm", "avx512": "zmm", "xmm": "xmm"}
Build = Callable[[int], Op]  # from the lanes of a vector


def code_of(*ops: Op, target: str = "avx2", dtype: DType = "float32", pointers: int = 3) -> bytes:
    program = Program(TARGETS[target], dtype, 3, 99, pointers, 0, 1, ops)
    return backend_for(program.target)(program)


def lines(code: bytes) -> list[str]:
    """What capstone reads, up to the return."""
    found = [f"{i.mnemonic} {i.op_str}".strip() for i in CAPSTONE.disasm(code, 0)]
    return found[: found.index("ret")]


def body(*ops: Op, target: str = "avx2", dtype: DType = "float32", pointers: int = 3) -> list[str]:
    """The instructions of some operations, without the vzeroupper behind them."""
    found = lines(code_of(*ops, target=target, dtype=dtype, pointers=pointers))
    assert found[-1] == "vzeroupper"
    return found[:-1]


# {v} stands for ymm, zmm or xmm, {p} for ps or pd, {s} for ss or sd, {e} for dword or qword.
SAME: list[tuple[Build, str]] = [
    (lambda n: Fma(1, 2, 3), "vfmadd231{p} {v}1, {v}2, {v}3"),
    (lambda n: FmaLoad(9, 8, 2, 64), "vfmadd231{p} {v}9, {v}8, {v}word ptr [r10 + 0x40]"),
    (lambda n: Add(1, 2, 15), "vadd{p} {v}1, {v}2, {v}15"),
    (lambda n: Mul(1, 2, 3), "vmul{p} {v}1, {v}2, {v}3"),
    (lambda n: Div(1, 2, 3), "vdiv{p} {v}1, {v}2, {v}3"),
    (lambda n: Bound("max", 1, 2, 3), "vmax{p} {v}1, {v}2, {v}3"),
    (lambda n: Bound("min", 1, 2, 3), "vmin{p} {v}1, {v}2, {v}3"),
    (lambda n: Move(1, 2), "vmovaps {v}1, {v}2"),
    (lambda n: Load(1, 0, 0, n), "vmovu{p} {v}1, {v}word ptr [r8]"),
    (lambda n: Load(1, 0, 0, 1), "vmov{s} xmm1, {e} ptr [r8]"),
    (lambda n: Store(1, 1, 8, n, 2), "vmovu{p} {v}word ptr [r9 + 8], {v}1"),
    (lambda n: Store(1, 1, 8, 1, 2), "vmov{s} {e} ptr [r9 + 8], xmm1"),
    (lambda n: Prefetch(1, 64), "prefetcht0 byte ptr [r9 + 0x40]"),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("build", "text"), SAME)
def test_what_is_alike_everywhere(target: str, dtype: DType, build: Build, text: str) -> None:
    p, s, e = ("ps", "ss", "dword") if dtype == "float32" else ("pd", "sd", "qword")
    expected = text.format(v=SIZE[target], p=p, s=s, e=e)
    op = build(TARGETS[target].lanes(dtype))
    assert body(op, target=target, dtype=dtype) == [expected]


VEX: list[tuple[str, DType, Op, list[str]]] = [
    ("avx2", "float32", Load(1, 0, 0, 4), ["vmovups xmm1, xmmword ptr [r8]"]),
    ("avx2", "float32", Load(1, 0, 0, 2), ["vmovsd xmm1, qword ptr [r8]"]),
    ("avx2", "float64", Load(1, 0, 0, 2), ["vmovupd xmm1, xmmword ptr [r8]"]),
    ("avx2", "float32", Store(1, 0, 0, 2, 2), ["vmovsd qword ptr [r8], xmm1"]),
    ("avx2", "float32", Store(1, 0, 0, 4, 2), ["vmovups xmmword ptr [r8], xmm1"]),
    ("avx2", "float32", Splat(1, 0, 4, 8), ["vbroadcastss ymm1, dword ptr [r8 + 4]"]),
    ("avx2", "float64", Splat(1, 0, 8, 4), ["vbroadcastsd ymm1, qword ptr [r8 + 8]"]),
    ("xmm", "float32", Splat(1, 0, 4, 4), ["vbroadcastss xmm1, dword ptr [r8 + 4]"]),
    ("xmm", "float64", Splat(1, 0, 8, 2), ["vmovddup xmm1, qword ptr [r8 + 8]"]),
    ("avx2", "float32", Keep(1, 2, 3, 5), ["vblendps ymm1, ymm2, ymm3, 0xe0"]),
    ("avx2", "float64", Keep(1, 2, 3, 1), ["vblendpd ymm1, ymm2, ymm3, 0xe"]),
    ("xmm", "float64", Keep(1, 2, 3, 1), ["vblendpd xmm1, xmm2, xmm3, 2"]),
    ("avx2", "float32", Const(9, 0.0), ["vxorps xmm9, xmm9, xmm9"]),
    (
        "avx2",
        "float32",
        MaskedLoad(1, 0, 4, 3, 15),
        ["vmaskmovps ymm1, ymm15, ymmword ptr [r8 + 4]"],
    ),
    (
        "xmm",
        "float32",
        MaskedLoad(1, 0, 4, 3, 15),
        ["vmaskmovps xmm1, xmm15, xmmword ptr [r8 + 4]"],
    ),
    (
        "avx2",
        "float32",
        LoadLane(1, 0, 4, 2),
        ["vinsertps xmm1, xmm1, dword ptr [r8 + 4], 0x20"],
    ),
    ("avx2", "float64", LoadLane(1, 0, 4, 0), ["vmovlpd xmm1, xmm1, qword ptr [r8 + 4]"]),
    ("avx2", "float64", LoadLane(1, 0, 4, 1), ["vmovhpd xmm1, xmm1, qword ptr [r8 + 4]"]),
    ("avx2", "float32", StoreLane(1, 0, 4, 2), ["vextractps dword ptr [r8 + 4], xmm1, 2"]),
    ("avx2", "float64", StoreLane(1, 0, 4, 0), ["vmovlpd qword ptr [r8 + 4], xmm1"]),
    ("avx2", "float64", StoreLane(1, 0, 4, 1), ["vmovhpd qword ptr [r8 + 4], xmm1"]),
    ("avx2", "float64", Extract(1, 2, 1), ["vextractf128 xmm1, ymm2, 1"]),
    ("avx2", "float64", Insert(1, 2, 3, 1), ["vinsertf128 ymm1, ymm2, xmm3, 1"]),
    ("avx2", "float32", Zip(1, 2, 3, 1, False), ["vunpcklps ymm1, ymm2, ymm3"]),
    ("avx2", "float32", Zip(1, 2, 3, 2, True), ["vunpckhpd ymm1, ymm2, ymm3"]),
    ("avx2", "float64", Zip(1, 2, 3, 1, True), ["vunpckhpd ymm1, ymm2, ymm3"]),
    ("avx2", "float32", Pick(1, 2, 3, (0,)), ["vperm2f128 ymm1, ymm2, ymm3, 0x20"]),
    ("avx2", "float64", Pick(1, 2, 3, (1,)), ["vperm2f128 ymm1, ymm2, ymm3, 0x31"]),
    (
        "avx2",
        "float32",
        Evens(1, 2, 3),
        ["vshufps ymm1, ymm2, ymm3, 0xd8", "vpermpd ymm1, ymm1, 0xd8"],
    ),
    (
        "avx2",
        "float64",
        Evens(1, 2, 3),
        ["vshufpd ymm1, ymm2, ymm3, 0xa", "vpermpd ymm1, ymm1, 0xd8"],
    ),
    ("xmm", "float64", Evens(1, 2, 3), ["vshufpd xmm1, xmm2, xmm3, 2"]),
    ("xmm", "float32", Zip(1, 2, 3, 2, False), ["vunpcklpd xmm1, xmm2, xmm3"]),
    ("avx2", "float32", Shuffle(1, 2, (2, 3, 2, 3)), ["vpermilps xmm1, xmm2, 0xee"]),
    ("avx2", "float64", Shuffle(1, 2, (1, 0)), ["vpermilpd xmm1, xmm2, 1"]),
    (
        "avx2",
        "float32",
        Extremum("max", 1, 1, 3, 4),
        [
            "vcmpunordps ymm4, ymm3, ymm3",
            "vmaxps ymm1, ymm3, ymm1",
            "vblendvps ymm1, ymm1, ymm3, ymm4",
        ],
    ),
    (
        "xmm",
        "float64",
        Extremum("min", 0, 1, 3, 4),
        [
            "vcmpunordpd xmm4, xmm3, xmm3",
            "vminpd xmm0, xmm3, xmm1",
            "vblendvpd xmm0, xmm0, xmm3, xmm4",
        ],
    ),
]
MASK_3 = ["mov eax, 7", "kmovw k1, eax"]
EVEX: list[tuple[str, DType, Op, list[str]]] = [
    ("avx512", "float32", Load(31, 0, 0, 8), ["vmovups ymm31, ymmword ptr [r8]"]),
    (
        "avx512",
        "float32",
        Load(31, 0, 0, 3),
        [*MASK_3, "vmovups zmm31 {k1} {z}, zmmword ptr [r8]"],
    ),
    ("avx512", "float64", Store(16, 0, 0, 3, 1), [*MASK_3, "vmovupd zmmword ptr [r8] {k1}, zmm16"]),
    (
        "avx512",
        "float64",
        Splat(1, 0, 8, 3),
        [*MASK_3, "vbroadcastsd zmm1 {k1} {z}, qword ptr [r8 + 8]"],
    ),
    ("avx512", "float32", Splat(1, 0, 8, 16), ["vbroadcastss zmm1, dword ptr [r8 + 8]"]),
    ("avx512", "float32", Keep(1, 2, 3, 3), [*MASK_3, "vblendmps zmm1 {k1}, zmm3, zmm2"]),
    ("avx512", "float64", Keep(1, 2, 3, 3), [*MASK_3, "vblendmpd zmm1 {k1}, zmm3, zmm2"]),
    (
        "avx512",
        "float32",
        FmaSplat(1, 2, 0, 4),
        ["vfmadd231ps zmm1, zmm2, dword ptr [r8 + 4]{1to16}"],
    ),
    (
        "avx512",
        "float64",
        FmaSplat(1, 2, 0, 8),
        ["vfmadd231pd zmm1, zmm2, qword ptr [r8 + 8]{1to8}"],
    ),
    ("avx512", "float64", Const(17, 0.0), ["vpxord xmm17, xmm17, xmm17"]),
    (
        "avx512",
        "float32",
        LoadLane(20, 0, 4, 2),
        ["vinsertps xmm20, xmm20, dword ptr [r8 + 4], 0x20"],
    ),
    ("avx512", "float32", StoreLane(20, 0, 4, 2), ["vextractps dword ptr [r8 + 4], xmm20, 2"]),
    ("avx512", "float64", LoadLane(20, 0, 4, 1), ["vmovhpd xmm20, xmm20, qword ptr [r8 + 4]"]),
    ("avx512", "float64", StoreLane(20, 0, 4, 1), ["vmovhpd qword ptr [r8 + 4], xmm20"]),
    ("avx512", "float64", Extract(17, 18, 3), ["vextractf32x4 xmm17, zmm18, 3"]),
    ("avx512", "float64", Insert(17, 18, 19, 2), ["vinsertf32x4 zmm17, zmm18, xmm19, 2"]),
    ("avx512", "float32", Zip(17, 18, 19, 1, True), ["vunpckhps zmm17, zmm18, zmm19"]),
    ("avx512", "float32", Zip(17, 18, 19, 2, False), ["vunpcklpd zmm17, zmm18, zmm19"]),
    ("avx512", "float64", Zip(17, 18, 19, 1, False), ["vunpcklpd zmm17, zmm18, zmm19"]),
    ("avx512", "float32", Pick(17, 18, 19, (1, 3)), ["vshuff32x4 zmm17, zmm18, zmm19, 0xdd"]),
    ("avx512", "float32", Shuffle(17, 18, (1, 1, 1, 1)), ["vpermilps xmm17, xmm18, 0x55"]),
    (
        "avx512",
        "float64",
        Extremum("min", 1, 1, 30, 4),
        [
            "vcmpunordpd k7, zmm30, zmm30",
            "vminpd zmm1, zmm30, zmm1",
            "vblendmpd zmm1 {k7}, zmm1, zmm30",
        ],
    ),
]


LOW_HALF = ["vpmovzxwd ymm1, xmm1", "vpslld ymm1, ymm1, 0x10"]
NARROW: list[tuple[str, DType, Op, list[str]]] = [
    (
        "avx2",
        "float32",
        LoadAs(1, 0, 4, 8, "bfloat16"),
        ["vmovdqu xmm1, xmmword ptr [r8 + 4]", *LOW_HALF],
    ),
    (
        "avx2",
        "float32",
        SplatAs(1, 0, 4, 8, "bfloat16"),
        ["vpbroadcastw xmm1, word ptr [r8 + 4]", *LOW_HALF],
    ),
    (
        "avx2",
        "float32",
        StoreAs(1, 0, 4, 5, (2, 3), "float16"),
        [
            "vcvtps2ph xmm1, ymm1, 0",
            "vmovq qword ptr [r8 + 4], xmm1",
            "vpextrw word ptr [r8 + 0xc], xmm1, 4",
        ],
    ),
    (
        "avx512",
        "float32",
        LoadAs(17, 0, 2, 16, "float16"),
        ["vmovdqu16 ymm17, ymmword ptr [r8 + 2]", "vcvtph2ps zmm17, ymm17"],
    ),
    (
        "avx512",
        "int32",
        LoadAs(17, 0, 2, 16, "int8_pair"),
        [
            "vmovdqu16 xmm17, xmmword ptr [r8 + 2]",
            "vpmovsxbw ymm17, xmm17",
            "vpmovzxwd zmm17, ymm17",
        ],
    ),
    ("avx2", "int32", Add(1, 2, 3), ["vpaddd ymm1, ymm2, ymm3"]),
    ("avx2", "int32", MulPairs(1, 2, 3), ["vpmaddwd ymm1, ymm2, ymm3"]),
    ("avx512", "int32", FmaSplat(1, 2, 0, 4), ["vpdpwssd zmm1, zmm2, dword ptr [r8 + 4]{1to16}"]),
]


@pytest.mark.parametrize(("target", "dtype", "op", "text"), [*VEX, *EVEX, *NARROW])
def test_what_differs(target: str, dtype: DType, op: Op, text: list[str]) -> None:
    assert body(op, target=target, dtype=dtype) == text


FMA_QUIRKS = [
    # Without a displacement; r8 is 0 in three bits, so the prefix extends it.
    ("avx2", FmaLoad(0, 1, 0, 0), "c4c275b800", "[r8]"),
    ("avx2", FmaLoad(0, 1, 0, 127), "c4c275b8407f", "[r8 + 0x7f]"),
    ("avx2", FmaLoad(0, 1, 0, 128), "c4c275b88080000000", "[r8 + 0x80]"),
    ("avx2", FmaLoad(0, 1, 0, 2**31 - 1), "c4c275b880ffffff7f", "[r8 + 0x7fffffff]"),
    # rbp and r13 mean rip-relative without a displacement, so they get one of 0.
    ("avx2", FmaLoad(0, 1, 5, 0), "c4e275b84500", "[rbp]"),
    ("avx2", FmaLoad(0, 1, 7, 0), "c4c275b84500", "[r13]"),
    # r12 announces a second address byte.
    ("avx2", FmaLoad(0, 1, 6, 0), "c4c275b80424", "[r12]"),
    # disp8*N: multiples of the vector, or of the element that is broadcast, take one byte.
    ("avx512", FmaLoad(0, 1, 0, 64), "62d27548b84001", "[r8 + 0x40]"),
    ("avx512", FmaLoad(0, 1, 0, 127 * 64), "62d27548b8407f", "[r8 + 0x1fc0]"),
    ("avx512", FmaLoad(0, 1, 0, 128 * 64), "62d27548b88000200000", "[r8 + 0x2000]"),
    ("avx512", FmaLoad(0, 1, 0, 4), "62d27548b88004000000", "[r8 + 4]"),
    ("avx512", FmaSplat(0, 1, 0, 4), "62d27558b84001", "[r8 + 4]{1to16}"),
    # Registers 16 to 31 use both extension bits.
    ("avx512", FmaLoad(31, 16, 0, 0), "62427d40b838", "[r8]"),
]


@pytest.mark.parametrize(("target", "op", "code", "address"), FMA_QUIRKS)
def test_addresses(target: str, op: Op, code: str, address: str) -> None:
    for _ in range(2):  # afresh and from the cache
        made = code_of(op, target=target, pointers=8)
        assert bytes.fromhex(code) in made
        (line,) = (line for line in lines(made) if line.startswith("vfmadd231ps"))
        assert line.endswith(address)


def test_far_offsets_share_all_but_the_displacement() -> None:
    for offset in (8191, 8192, 123456, 2**31 - 1):
        for op in (Load(3, 1, offset, 16), Store(3, 1, offset, 16, 0), Splat(3, 1, offset, 16)):
            (line,) = body(op, target="avx512")
            assert f"[r9 + {offset:#x}]" in line
        assert f"[r9 + {offset:#x}]" in body(FmaLoad(3, 4, 1, offset))[0]


def test_operations_with_equal_fields_are_told_apart() -> None:
    assert body(Add(0, 1, 2), Mul(0, 1, 2), Fma(0, 1, 2), Load(0, 1, 2, 8), Splat(0, 1, 2, 8)) == [
        "vaddps ymm0, ymm1, ymm2",
        "vmulps ymm0, ymm1, ymm2",
        "vfmadd231ps ymm0, ymm1, ymm2",
        "vmovups ymm0, ymmword ptr [r9 + 2]",
        "vbroadcastss ymm0, dword ptr [r9 + 2]",
    ]


@pytest.mark.parametrize("target", ["avx2", "xmm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_evex_in_avx2_code(target: str, dtype: DType) -> None:
    lanes = TARGETS[target].lanes(dtype)
    ops: list[Op] = [Const(0, 1.0), Const(1, 0.0), Extremum("max", 1, 1, 2, 3)]
    for n in range(1, lanes + 1):
        ops += [Load(1, 0, 200, n), Splat(2, 0, 4, n), Store(1, 1, 300, n, 5), Keep(1, 1, 2, n)]
    program = Program(TARGETS[target], dtype, 2, 2, 2, 0, 1, tuple(ops))
    code = backend_for(program.target)(legalize(program))
    listed = list(CAPSTONE.disasm(code, 0))
    end = next(i for i, line in enumerate(listed) if line.mnemonic == "ret")
    assert not [i for i in listed[:end] if i.bytes[0] == 0x62]
    assert not [i for i in listed[:end] if "zmm" in i.op_str or "k" in i.op_str]


def test_constants_lie_aligned_behind_the_code() -> None:
    code = code_of(Const(0, 1.0), LoadMask(15, 3), Const(1, 1.0), Const(2, -1.0))
    listed = [i for i in CAPSTONE.disasm(code, 0) if "rip" in i.op_str]
    at = [i.address + i.size + int.from_bytes(i.bytes[-4:], "little") for i in listed]
    assert at == [96, 64, 96, 100]
    assert code[64:76] == b"\xff" * 12
    assert code[76:] == bytes(20) + bytes.fromhex("0000803f 000080bf")


def test_arithmetic_with_constants_reads_them_behind_the_code() -> None:
    ops = (WithConst("horner", 1, 2, 3.0), WithConst("mul", 3, 4, 3.0), Power(5, 6))
    for target, vector in (("avx2", "ymmword ptr [rip"), ("avx512", "dword ptr [rip")):
        code = code_of(*ops, target=target)
        found = lines(code)
        assert [line.split()[0] for line in found[:-1]] == [
            "vfmadd213ps", "vmulps", "vaddps", "vpslld",
        ]  # fmt: skip
        assert all(vector in line for line in found[:3])
        copies = 8 if target == "avx2" else 1
        assert code.count(np.float32(3).tobytes() * copies) == 1
        assert np.float32(1.5 * 2**23 + 127).tobytes() in code


@pytest.mark.parametrize(("dtype", "letter"), [("float32", "s"), ("float64", "d")])
def test_every_second_element_is_chosen_by_lane_numbers(dtype: DType, letter: str) -> None:
    lanes = TARGETS["avx512"].lanes(dtype)
    whole = body(EvensWith(17, 1, 64, lanes, 18), target="avx512", dtype=dtype)
    assert whole[1] == f"vpermt2p{letter} zmm17, zmm18, zmmword ptr [r9 + 0x40]"
    part = body(EvensWith(17, 1, 64, lanes - 1, 18), target="avx512", dtype=dtype)
    assert part[-1] == f"vpermt2p{letter} zmm17 {{k1}} {{z}}, zmm18, zmmword ptr [r9 + 0x40]"
    assert body(EvensOf(17, 18), target="avx512", dtype=dtype)[1] == (
        f"vpermp{letter} zmm17, zmm18, zmm17"
    )


def test_lane_masks_beyond_six_are_set_where_they_are_used() -> None:
    ops = tuple(Load(0, 0, 0, n) for n in (3, 5, 6, 7, 9, 10, 11))
    found = body(*ops, target="avx512")
    assert found[:4] == ["mov eax, 7", "kmovw k1, eax", "mov eax, 0x1f", "kmovw k2, eax"]
    assert len(found) == 2 * 6 + 7 + 2
    assert found[-3:] == [
        "mov eax, 0x7ff",
        "kmovw k7, eax",
        "vmovups zmm0 {k7} {z}, zmmword ptr [r8]",
    ]


SCALARS: list[tuple[Op, list[str]]] = [
    (Set(2, 0), ["xor edx, edx"]),
    (Set(2, 5), ["mov edx, 5"]),
    (Set(2, -1), ["mov rdx, 0xffffffffffffffff"]),
    (Set(2, 2**31), ["movabs rdx, 0x80000000"]),
    (Copy(2, 3), ["mov rdx, rcx"]),
    (Min(2, 3, 6), ["mov eax, 6", "cmp rax, rcx", "cmovg rax, rcx", "mov rdx, rax"]),
    (Scale(2, 3, 48), ["imul rax, rcx, 0x30", "mov rdx, rax"]),
    (Scale(2, 2, 2**31), ["movabs rax, 0x80000000", "imul rax, rdx", "mov rdx, rax"]),
    (Subtract(2, 3), ["mov rax, rcx", "sub rdx, rax"]),
    (Subtract(END, BEGIN), ["mov rax, rdx", "sub rcx, rax"]),
    (Base(0, 0, 0), ["mov r8, qword ptr [rdi]"]),
    (Base(1, 2, 16), ["mov r9, qword ptr [rdi + 0x10]", "add r9, 0x10"]),
    (Base(2, SCRATCH, 256), ["mov r10, rsi", "add r10, 0x100"]),
    (Base(2, SCRATCH, 0), ["mov r10, rsi"]),
    (Step(0, 127), ["add r8, 0x7f"]),
    (Step(0, 128), ["sub r8, -0x80"]),
    (Step(0, -128), ["add r8, -0x80"]),
    (Step(0, 4096), ["add r8, 0x1000"]),
    (Step(0, 2**40), ["movabs rax, 0x10000000000", "add r8, rax"]),
    (Advance(0, 2, 64), ["imul rax, rdx, 0x40", "add r8, rax"]),
    (Save(2, 1), ["mov rdx, r9"]),
    (Restore(1, 2), ["mov r9, rdx"]),
]


@pytest.mark.parametrize(("op", "text"), SCALARS)
def test_scalars(op: Op, text: list[str]) -> None:
    assert body(op) == text


def test_deep_scalars_get_registers_and_the_rest_the_stack() -> None:
    found = body(*(Set(s, s) for s in range(2, 13)))
    assert found[:7] == [
        *(f"push {r}" for r in ("rbx", "rbp", "r12", "r13", "r14", "r15")),
        found[6],
    ]
    assert found[6] == "add rsp, -0x10"
    assert found[7:9] == ["mov edx, 2", "mov ecx, 3"]
    assert found[16:18] == ["mov qword ptr [rsp], 0xb", "mov qword ptr [rsp + 8], 0xc"]
    assert found[18:] == [
        "add rsp, 0x10",
        *(f"pop {r}" for r in ("r15", "r14", "r13", "r12", "rbp", "rbx")),
    ]


def test_a_loop_starts_at_a_fetch_window() -> None:
    code = code_of(Set(2, 9), Loop(2, 3, (Add(0, 1, 2),)))
    assert code[32:36] == bytes.fromhex("c5f458c2")
    assert lines(code)[-4:] == ["vaddps ymm0, ymm1, ymm2", "add rdx, -3", "jg 0x20", "vzeroupper"]


def test_only_loops_without_loops_are_aligned() -> None:
    inner = Loop(2, 1, (Add(0, 1, 2),))
    found = lines(code_of(Loop(3, 1, (IfZero(2, (inner,), ()),))))
    assert found[0] == "test rdx, rdx"
    assert sum("nop" in line for line in found) == 3


CONTROL: list[tuple[Op, list[str]]] = [
    (Loop(2, 1, (), True), ["test rdx, rdx", "jle", "add rdx, -1", "jg"]),
    (While(2, 4, ()), ["cmp rdx, 4", "jl", "add rdx, -4", "cmp rdx, 4", "jge"]),
    (IfZero(2, (Step(0, 4),), ()), ["test rdx, rdx", "jne", "add r8, 4"]),
    (
        IfZero(2, (Step(0, 4),), (Step(0, 8),)),
        ["test rdx, rdx", "jne", "add r8, 4", "jmp", "add r8, 8"],
    ),
    (
        Switch(2, (Case(4, (Step(0, 4),)), Case(8, (Step(0, 8),)))),
        ["cmp rdx, 4", "jne", "add r8, 4", "jmp", "add r8, 8"],
    ),
]


@pytest.mark.parametrize(("op", "text"), CONTROL)
def test_control_flow(op: Op, text: list[str]) -> None:
    found = [line.split(" ")[0] if line[0] == "j" else line for line in body(op)]
    assert [line for line in found if "nop" not in line] == text


def test_the_listing_reads_like_the_other_disassembler() -> None:
    code = code_of(Base(0, 0, 0), Load(0, 0, 64, 8), Const(1, 2.0), Step(0, -8))
    assert disassemble(code).splitlines() == [
        "     0  mov r8, [rdi]",
        "     3  vmovups ymm0, [r8+0x40]",
        "     9  vbroadcastss ymm1, [rip+0x2e]",
        "    12  add r8, -8",
        "    16  vzeroupper",
        "    19  ret",
        "    1a  ; padding and constants: 42 bytes",
    ]


def test_too_many_pointers() -> None:
    with pytest.raises(LoweringError, match="11 pointers; x86 has 10"):
        code_of(pointers=11)


def test_a_target_without_backend() -> None:
    assert set(BACKENDS) == {"x86"}
    target = replace(TARGETS["avx2"], name="neon", isa="neon")
    with pytest.raises(UnsupportedError, match=r"neon has .*'neon'; .*\['avx2', 'avx512'\]"):
        backend_for(target)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Splat(0, 0, 0, 3), "legalize the program first"),
        (Load(0, 0, 0, 16), "does not fit a vector of 8 lanes"),
        (FmaSplat(0, 1, 0, 0), "only AVX-512 folds a broadcast"),
        (Extremum("max", 1, 0, 1, 2), "overwrites b"),
        (Load(0, 0, 2**31, 8), "out of reach"),
    ],
)
def test_our_own_mistakes_are_caught(op: Op, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        code_of(op)
