"""Vector operations as x86 instructions: a table of forms and one printer.

AVX2 is encoded with VEX prefixes only, so it runs where AVX-512 does not exist; vectors of AVX-512
with EVEX only, also their 128-bit parts, because registers 16 to 31 have no other encoding.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple, get_args

from iced_x86 import Register

from looptune.backends.x86_convert import Width, load_as, store_as
from looptune.backends.x86_encode import Immediate, Memory, Operand, encode, encode_cached
from looptune.dtypes import ITEM_BYTES, DType, is_whole
from looptune.program import (
    Add,
    Bound,
    Div,
    Evens,
    Extract,
    Extremum,
    Fma,
    FmaLoad,
    FmaSplat,
    GatherAs,
    Insert,
    Keep,
    Load,
    LoadAs,
    LoadLane,
    MachineOp,
    MaskedLoad,
    Move,
    Mul,
    MulPairs,
    Pick,
    Prefetch,
    ScatterAs,
    Shuffle,
    Splat,
    SplatAs,
    Store,
    StoreAs,
    StoreLane,
    VectorOp,
    Zip,
)


class Form(NamedTuple):
    """One micro-operation as each encoding spells it, in the names of iced-x86.

    {v} is the vector register, {n} its bits, {b} the bits of an element, {p} PS or PD, {s} S or D.
    """

    vex: str
    evex: str


FORMS = {
    "fma": Form("VFMADD231{p}_{v}_{v}_{v}M{n}", "VFMADD231{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER"),
    "sub": Form("VSUB{p}_{v}_{v}_{v}M{n}", "VSUB{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER"),
    "div": Form("VDIV{p}_{v}_{v}_{v}M{n}", "VDIV{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER"),
    "horner": Form("VFMADD213{p}_{v}_{v}_{v}M{n}", "VFMADD213{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER"),
    "exponent": Form("VPSLL{i}_{v}_{v}_IMM8", "VPSLL{i}_ZMM_K1Z_ZMMM512B{b}_IMM8"),
    "pairs": Form("VPMADDWD_{v}_{v}_{v}M{n}", "VPMADDWD_ZMM_K1Z_ZMM_ZMMM512"),
    "add": Form("VADD{p}_{v}_{v}_{v}M{n}", "VADD{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER"),
    "mul": Form("VMUL{p}_{v}_{v}_{v}M{n}", "VMUL{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_ER"),
    "max": Form("VMAX{p}_{v}_{v}_{v}M{n}", "VMAX{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_SAE"),
    "min": Form("VMIN{p}_{v}_{v}_{v}M{n}", "VMIN{p}_ZMM_K1Z_ZMM_ZMMM512B{b}_SAE"),
    "compare": Form("VCMP{p}_{v}_{v}_{v}M{n}_IMM8", "VCMP{p}_KR_K1_ZMM_ZMMM512B{b}_IMM8_SAE"),
    "select": Form("VBLENDV{p}_{v}_{v}_{v}M{n}_{v}", "VBLENDM{p}_ZMM_K1Z_ZMM_ZMMM512B{b}"),
    "blend": Form("VBLEND{p}_{v}_{v}_{v}M{n}_IMM8", "VBLENDM{p}_ZMM_K1Z_ZMM_ZMMM512B{b}"),
    "move": Form("VMOVAPS_{v}_{v}M{n}", "VMOVAPS_ZMM_K1Z_ZMMM512"),
    "zero": Form("VXORPS_XMM_XMM_XMMM128", "VPXORD_XMM_K1Z_XMM_XMMM128B32"),
    "splat": Form("VBROADCASTS{s}_{v}_M{b}", "VBROADCASTS{s}_ZMM_K1Z_XMMM{b}"),
    "load": Form("VMASKMOV{p}_{v}_{v}_M{n}", "VMOVU{p}_ZMM_K1Z_ZMMM512"),
    "load4": Form("VMOVSS_XMM_M32", "VMOVSS_XMM_K1Z_M32"),
    "load8": Form("VMOVSD_XMM_M64", "VMOVSD_XMM_K1Z_M64"),
    "load16": Form("VMOVU{p}_XMM_XMMM128", "VMOVU{p}_XMM_K1Z_XMMM128"),
    "load32": Form("VMOVU{p}_YMM_YMMM256", "VMOVU{p}_YMM_K1Z_YMMM256"),
    "load64": Form("", "VMOVU{p}_ZMM_K1Z_ZMMM512"),
    "store": Form("", "VMOVU{p}_ZMMM512_K1Z_ZMM"),
    "store4": Form("VMOVSS_M32_XMM", "VMOVSS_M32_K1_XMM"),
    "store8": Form("VMOVSD_M64_XMM", "VMOVSD_M64_K1_XMM"),
    "store16": Form("VMOVU{p}_XMMM128_XMM", "VMOVU{p}_XMMM128_K1Z_XMM"),
    "store32": Form("VMOVU{p}_YMMM256_YMM", "VMOVU{p}_YMMM256_K1Z_YMM"),
    "store64": Form("", "VMOVU{p}_ZMMM512_K1Z_ZMM"),
    "insert_lane": Form("VINSERTPS_XMM_XMM_XMMM32_IMM8", "VINSERTPS_XMM_XMM_XMMM32_IMM8"),
    "extract_lane": Form("VEXTRACTPS_RM32_XMM_IMM8", "VEXTRACTPS_RM32_XMM_IMM8"),
    "load_low": Form("VMOVLPD_XMM_XMM_M64", "VMOVLPD_XMM_XMM_M64"),
    "load_high": Form("VMOVHPD_XMM_XMM_M64", "VMOVHPD_XMM_XMM_M64"),
    "store_low": Form("VMOVLPD_M64_XMM", "VMOVLPD_M64_XMM"),
    "store_high": Form("VMOVHPD_M64_XMM", "VMOVHPD_M64_XMM"),
    "extract": Form("VEXTRACTF128_XMMM128_YMM_IMM8", "VEXTRACTF32X4_XMMM128_K1Z_ZMM_IMM8"),
    "insert": Form("VINSERTF128_YMM_YMM_XMMM128_IMM8", "VINSERTF32X4_ZMM_K1Z_ZMM_XMMM128_IMM8"),
    "zip_low1": Form("VUNPCKL{p}_{v}_{v}_{v}M{n}", "VUNPCKL{p}_ZMM_K1Z_ZMM_ZMMM512B{b}"),
    "zip_high1": Form("VUNPCKH{p}_{v}_{v}_{v}M{n}", "VUNPCKH{p}_ZMM_K1Z_ZMM_ZMMM512B{b}"),
    "zip_low2": Form("VUNPCKLPD_{v}_{v}_{v}M{n}", "VUNPCKLPD_ZMM_K1Z_ZMM_ZMMM512B64"),
    "zip_high2": Form("VUNPCKHPD_{v}_{v}_{v}M{n}", "VUNPCKHPD_ZMM_K1Z_ZMM_ZMMM512B64"),
    "even": Form("VSHUF{p}_{v}_{v}_{v}M{n}_IMM8", ""),
    "choose": Form("", "VPERM{p}_ZMM_K1Z_ZMM_ZMMM512B{b}"),
    "permute": Form("", "VPERMT2{p}_ZMM_K1Z_ZMM_ZMMM512B{b}"),
    "quarters": Form("VPERMPD_YMM_YMMM256_IMM8", ""),
    "pick": Form("VPERM2F128_YMM_YMM_YMMM256_IMM8", "VSHUFF32X4_ZMM_K1Z_ZMM_ZMMM512B32_IMM8"),
    "shuffle": Form("VPERMIL{p}_XMM_XMMM128_IMM8", "VPERMIL{p}_XMM_K1Z_XMMM128B{b}_IMM8"),
}
WHOLE = {  # what differs for int32: products are of pairs of int16, added to a sum (VNNI)
    "fma": Form("VPDPWSSD_{v}_{v}_{v}M{n}", "VPDPWSSD_ZMM_K1Z_ZMM_ZMMM512B32"),
    "add": Form("VPADDD_{v}_{v}_{v}M{n}", "VPADDD_ZMM_K1Z_ZMM_ZMMM512B32"),
}
PAIR_SPLAT = "VEX_VMOVDDUP_XMM_XMMM64"  # what stands in for a 128-bit vbroadcastsd

POINTERS = (
    Register.R8,
    Register.R9,
    Register.R10,
    Register.R11,
    Register.RBX,
    Register.RBP,
    Register.R12,
    Register.R13,
    Register.R14,
    Register.R15,
)  # fixed, so that an operation has the same bytes in every kernel

LANE_MASKS = 6  # k1 to k6 hold the masks of lane counts; k7 is for passing ones
PASSING_MASK = 7
UNORDERED = Immediate(3)
MANY_CODES = 1 << 15  # cached operations; a hundred kernels have about 10,000 different ones
LONGEST_OFFSET = 2**31 - 1
DISTANCE = struct.Struct("<i")
BYTES = tuple(bytes([value]) for value in range(128))


FOLDED = frozenset({FmaLoad, FmaSplat})
PARTIAL = frozenset({Load, Store, Splat, Keep, LoadAs, SplatAs, StoreAs})  # may take a lane mask
ARITHMETIC: dict[type, str] = {Add: "add", Mul: "mul", Div: "div", MulPairs: "pairs"}
AtOffset = Load | Splat | Store | FmaLoad | FmaSplat  # encodings that end in the displacement


class Vectors:
    """The encoder of vector operations for one instruction set, dtype and set of lane masks.

    Most operations of a kernel occur in others, too, and their bytes do not depend on the place:
    they are kept per operation type, since operations of different types compare equal. Offsets
    vary without end: of operations that have one, the bytes before it are kept, and those of far
    ones alone.
    """

    def __init__(self, isa: str, vector_bytes: int, dtype: DType, masks: tuple[int, ...]) -> None:
        self.evex = isa == "avx512"
        self.item = ITEM_BYTES[dtype]
        self.whole = is_whole(dtype)
        self.lanes = vector_bytes // self.item
        self.bits = vector_bytes * 8
        self.masks = masks
        wide = {16: "XMM", 32: "YMM", 64: "ZMM"}[vector_bytes]
        letter = "S" if self.item == 4 else "D"
        fields = {"v": wide, "n": self.bits, "b": 8 * self.item, "p": "P" + letter, "s": letter}
        fields["i"] = "D" if self.item == 4 else "Q"
        forms = {**FORMS, **WHOLE} if is_whole(dtype) else FORMS
        self.names = {
            key: ("EVEX_" + form.evex if self.evex else "VEX_" + form.vex).format(**fields)
            for key, form in forms.items()
        }
        if wide == "XMM" and letter == "D":
            self.names["splat"] = PAIR_SPLAT
        self.first = getattr(Register, wide + "0")
        self.codes: dict[type, dict[object, bytes]] = {kind: {} for kind in ENCODED}
        # What precedes far offsets, and near ones.
        self.heads: dict[type, tuple[dict[object, bytes], dict[object, bytes]]] = {
            kind: ({}, {}) for kind in get_args(AtOffset)
        }

    @property
    def narrow(self) -> Width:
        """What conversions from and to narrow elements need."""
        return Width(self.bits, self.evex, self.lane_mask)

    def missing(self, op: VectorOp | MachineOp) -> bytes:
        """Bytes of an operation that is not in `codes`."""
        kind = type(op)
        if kind in self.heads and op.offset:  # type: ignore[union-attr]
            code, near = self.at_offset(op)  # type: ignore[arg-type]
            if not near:
                return code
        else:
            code = self.encode(op)
        known = self.codes[kind]
        if len(known) >= MANY_CODES:
            known.clear()
        known[op] = code
        return code

    def unit(self, op: AtOffset) -> int:
        """What a displacement of one byte counts: with EVEX, bytes that are accessed."""
        if not self.evex:
            return 1
        kind = type(op)
        if kind is Splat or kind is FmaSplat:
            return self.item
        if kind is FmaLoad or op.lanes & (op.lanes - 1):  # type: ignore[union-attr]
            return self.lanes * self.item
        return op.lanes * self.item  # type: ignore[union-attr]

    def at_offset(self, op: AtOffset) -> tuple[bytes, bool]:
        """Bytes of an operation that end in a displacement, and whether that is near: one byte."""
        kind, offset = type(op), op.offset
        assert offset <= LONGEST_OFFSET, f"{op} is out of reach: the lowering should have refused"
        unit = self.unit(op)
        near = offset < 128 * unit and offset % unit == 0
        at = 3 if kind in FOLDED else 2
        heads, key = self.heads[kind][near], op[:at] + op[at + 1 :]
        head = heads.get(key)
        if head is None:
            example = op._replace(offset=unit if near else LONGEST_OFFSET)
            head = heads[key] = self.encode(example)[: -1 if near else -4]
        return head + (BYTES[offset // unit] if near else DISTANCE.pack(offset)), near

    def packed(self, value: float) -> bytes:
        """An element in memory."""
        if self.whole:
            return struct.pack("<i", int(value))
        return struct.pack("<f" if self.item == 4 else "<d", value)

    def put(self, key: str, *operands: Operand, mask: int = 0, zero: bool = False) -> bytes:
        """One instruction of the table."""
        return encode(self.names[key], *operands, mask=mask, zero=zero)

    def wide(self, *registers: int) -> tuple[int, ...]:
        """Whole vector registers."""
        return tuple(self.first + register for register in registers)

    def lane_mask(self, lanes: int) -> tuple[bytes, int]:
        """A mask register for the lanes below `lanes`, and what must run before it is used."""
        assert self.evex, f"{lanes} lanes need a mask register: legalize the program first"
        if lanes in self.masks[:LANE_MASKS]:
            return b"", self.masks.index(lanes) + 1
        return set_mask(PASSING_MASK, lanes), PASSING_MASK

    def encode(self, op: VectorOp | MachineOp) -> bytes:
        """Bytes of one operation."""
        match op:
            case Fma() | FmaLoad() | FmaSplat():
                return self.multiply_add(op)
            case Add() | Mul() | Div() | MulPairs() | Bound() | Move():
                return self.arithmetic(op)
            case Extremum():
                return self.extremum(op)
            case Keep():
                return self.keep(op)
            case Zip() | Pick() | Evens():
                return self.exchange(op)
            case Load() | Splat() | Store() | MaskedLoad() | Prefetch():
                return self.transfer(op)
            case LoadAs() | SplatAs() | GatherAs():
                return load_as(op, self.narrow, POINTERS[op.pointer])
            case StoreAs() | ScatterAs():
                return store_as(op, self.narrow, POINTERS[op.pointer])
            case LoadLane() | StoreLane() | Extract() | Insert() | Shuffle():
                return self.lane_move(op)
            case _:
                raise AssertionError(f"{op} is not for the encoder: legalize the program first")

    def multiply_add(self, op: Fma | FmaLoad | FmaSplat) -> bytes:
        """dst += a * b, the form that takes its last source from memory."""
        match op:
            case Fma(dst, a, b):
                return self.put("fma", *self.wide(dst, a, b))
            case FmaLoad(dst, a, pointer, offset):
                return self.put("fma", *self.wide(dst, a), Memory(POINTERS[pointer], offset))
            case FmaSplat(dst, a, pointer, offset):
                assert self.evex, "only AVX-512 folds a broadcast"
                return self.put("fma", *self.wide(dst, a), Memory(POINTERS[pointer], offset, True))

    def arithmetic(self, op: Add | Mul | Div | MulPairs | Bound | Move) -> bytes:
        """One instruction between registers; vmax and vmin give their second source for a NaN."""
        match op:
            case Bound(kind, dst, limit, a):
                return self.put(kind, *self.wide(dst, limit, a))
            case Move(dst, src):
                return self.put("move", *self.wide(dst, src))
            case Add(dst, a, b) | Mul(dst, a, b) | Div(dst, a, b) | MulPairs(dst, a, b):
                return self.put(ARITHMETIC[type(op)], *self.wide(dst, a, b))

    def transfer(self, op: Load | Splat | Store | MaskedLoad | Prefetch) -> bytes:
        """Loads and stores. Vectors of 4, 8, 16, ... bytes have instructions without a mask."""
        where = Memory(POINTERS[op.pointer], op.offset)
        if isinstance(op, Prefetch):
            return encode("PREFETCHT0_M8", where)
        assert op.lanes <= self.lanes, f"{op} does not fit a vector of {self.lanes} lanes"
        match op:
            case MaskedLoad(dst, mask=mask):
                return self.put("load", *self.wide(dst, mask), where)
            case Splat(dst, lanes=lanes) if lanes == self.lanes:
                return self.put("splat", *self.wide(dst), where)
            case Splat(dst, lanes=lanes):
                before, mask = self.lane_mask(lanes)
                return before + self.put("splat", *self.wide(dst), where, mask=mask, zero=True)
            case Load(dst, lanes=lanes) if lanes & (lanes - 1) == 0:
                size = lanes * self.item
                return self.put(f"load{size}", register_of_size(dst, size), where)
            case Load(dst, lanes=lanes):
                before, mask = self.lane_mask(lanes)
                return before + self.put("load", *self.wide(dst), where, mask=mask, zero=True)
            case Store(src, lanes=lanes) if lanes & (lanes - 1) == 0:
                size = lanes * self.item
                return self.put(f"store{size}", where, register_of_size(src, size))
            case Store(src, lanes=lanes):
                before, mask = self.lane_mask(lanes)
                return before + self.put("store", where, *self.wide(src), mask=mask)

    def lane_move(self, op: LoadLane | StoreLane | Extract | Insert | Shuffle) -> bytes:
        """Operations on the lanes and parts of 16 bytes."""
        match op:
            case LoadLane(dst, pointer, offset, lane):
                low, where = Register.XMM0 + dst, Memory(POINTERS[pointer], offset)
                if self.item == 8:
                    return self.put("load_high" if lane else "load_low", low, low, where)
                return self.put("insert_lane", low, low, where, Immediate(lane << 4))
            case StoreLane(src, pointer, offset, lane):
                low, where = Register.XMM0 + src, Memory(POINTERS[pointer], offset)
                if self.item == 8:
                    return self.put("store_high" if lane else "store_low", where, low)
                return self.put("extract_lane", where, low, Immediate(lane))
            case Extract(dst, src, part):
                return self.put("extract", Register.XMM0 + dst, *self.wide(src), Immediate(part))
            case Insert(dst, a, b, part):
                low = Register.XMM0 + b
                return self.put("insert", *self.wide(dst, a), low, Immediate(part))
            case Shuffle(dst, src, lanes):
                width = 2 if self.item == 4 else 1  # bits of a lane number
                order = sum(lane << width * i for i, lane in enumerate(lanes))
                low = Register.XMM0
                return self.put("shuffle", low + dst, low + src, Immediate(order))

    def extremum(self, op: Extremum) -> bytes:
        """vmax and vmin give their second source if either is NaN: put a there, mend NaNs of b."""
        dst, a, b, scratch = self.wide(op.dst, op.a, op.b, op.scratch)
        assert op.dst != op.b, f"{op} overwrites b before its last use"
        if self.evex:
            k = Register.K0 + PASSING_MASK
            unordered = self.put("compare", k, b, b, UNORDERED)
            mend = self.put("select", dst, dst, b, mask=PASSING_MASK)
        else:
            unordered = self.put("compare", scratch, b, b, UNORDERED)
            mend = self.put("select", dst, dst, b, scratch)
        return unordered + self.put(op.kind, dst, b, a) + mend

    def exchange(self, op: Zip | Pick | Evens) -> bytes:
        """Lanes of two registers; the parts of b count from 2 on AVX2, from 0 on AVX-512."""
        registers = self.wide(op.dst, op.a, op.b)
        match op:
            case Zip(unit=unit, high=high):
                return self.put(f"zip_{'high' if high else 'low'}{unit}", *registers)
            case Pick(picks=picks) if self.evex:
                order = sum(part << 2 * i for i, part in enumerate((*picks, *picks)))
                return self.put("pick", *registers, Immediate(order))
            case Evens():
                return self.evens(op)
            case Pick(picks=picks):
                order = picks[0] | (2 + picks[0]) << 4
                return self.put("pick", *registers, Immediate(order))

    def evens(self, op: Evens) -> bytes:
        """A shuffle in every 16-byte part, then their halves, those of a first.

        Parts a0 b0 | a1 b1 of halves become a0 a1 | b0 b1. AVX-512 has `EvensWith` instead.
        """
        dst, a, b = self.wide(op.dst, op.a, op.b)
        lanes = 0b11011000 if self.item == 4 else 0b10101010 & ((1 << self.lanes) - 1)
        code = self.put("even", dst, a, b, Immediate(lanes))
        if self.bits > 128:
            code += self.put("quarters", dst, dst, Immediate(0b11011000))
        return code

    def keep(self, op: Keep) -> bytes:
        """A blend by an immediate, or by a mask register."""
        dst, a, b = self.wide(op.dst, op.a, op.b)
        if self.evex:
            before, mask = self.lane_mask(op.lanes)
            return before + self.put("blend", dst, b, a, mask=mask)
        others = (1 << self.lanes) - (1 << op.lanes)
        return self.put("blend", dst, a, b, Immediate(others))


ENCODED = (
    Fma, FmaLoad, FmaSplat, Load, Splat, Store, Add, Mul, Div, Bound, Move, Extremum, Keep,
    Prefetch, Zip, Pick, Evens, MulPairs, MaskedLoad, LoadLane, StoreLane, Extract, Insert,
    Shuffle, LoadAs, SplatAs, GatherAs, StoreAs, ScatterAs,
)  # fmt: skip


@lru_cache(maxsize=64)
def vectors_for(isa: str, vector_bytes: int, dtype: DType, masks: tuple[int, ...]) -> Vectors:
    """The encoder, with its cache, that all kernels alike in these respects share."""
    vectors = Vectors(isa, vector_bytes, dtype, masks)
    if masks:  # whatever takes no mask has the same bytes without any
        unmasked = vectors_for(isa, vector_bytes, dtype, ())
        vectors.codes |= {k: v for k, v in unmasked.codes.items() if k not in PARTIAL}
        vectors.heads |= {k: v for k, v in unmasked.heads.items() if k not in PARTIAL}
    return vectors


def register_of_size(register: int, size: int) -> int:
    """The narrowest name of a vector register that holds `size` bytes."""
    first = {32: Register.YMM0, 64: Register.ZMM0}.get(size, Register.XMM0)
    return first + register


def set_mask(k: int, lanes: int) -> bytes:
    """Mask register k = ones below `lanes`."""
    ones = encode_cached("MOV_R32_IMM32", Register.EAX, Immediate((1 << lanes) - 1))
    return ones + encode_cached("VEX_KMOVW_KR_R32", Register.K0 + k, Register.EAX)
