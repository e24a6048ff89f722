"""Narrow elements between memory and vectors of 32-bit lanes.

Loading brings the elements side by side into the low part of a register and widens them there;
storing is the reverse. Registers of AVX-512 are named by EVEX encodings only, as in `x86_vector`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from iced_x86 import Register

from looptune.backends.x86_encode import Immediate, Memory, Operand, encode
from looptune.program import FORMAT_BYTES, Format, GatherAs, LoadAs, ScatterAs, SplatAs, StoreAs

PART = 16  # bytes of an xmm register
ORDERED = Immediate(7)
EVEN_QUARTERS = Immediate(0b1000)  # 64-bit parts 0 and 2 of four

LaneMask = Callable[[int], tuple[bytes, int]]  # lanes -> setup code, mask register


class Width(NamedTuple):
    """Vectors of `bits` in one encoding; `mask` sets a mask register where there are some."""

    bits: int
    evex: bool
    mask: LaneMask

    @property
    def lanes(self) -> int:
        """Elements of 32 bits."""
        return self.bits // 32

    @property
    def wide(self) -> str:
        """The vector register in the names of iced-x86."""
        return {128: "XMM", 256: "YMM", 512: "ZMM"}[self.bits]

    def put(self, name: str, *operands: Operand, mask: int = 0, zero: bool = False) -> bytes:
        """One instruction; {k} in its name is where EVEX names the mask."""
        text = ("EVEX_" if self.evex else "VEX_") + name.format(k="_K1Z" if self.evex else "")
        return encode(text, *operands, mask=mask, zero=zero)

    def register(self, number: int) -> int:
        """The whole register."""
        return {128: Register.XMM0, 256: Register.YMM0, 512: Register.ZMM0}[self.bits] + number

    def source(self, bytes_: int) -> str:
        """The name of a register or memory of so many bytes."""
        return f"{'YMMM' if bytes_ == 32 else 'XMMM'}{8 * bytes_}"


def low(number: int, size: int) -> int:
    """The narrowest name of a register that holds `size` bytes."""
    return (Register.YMM0 if size > PART else Register.XMM0) + number


def load_as(op: LoadAs | SplatAs | GatherAs, width: Width, pointer: int) -> bytes:
    """Bytes of a converting load from the address in register `pointer`."""
    item = FORMAT_BYTES[op.format]
    match op:
        case LoadAs(dst, _, offset, lanes):
            code = load_low(dst, Memory(pointer, offset), lanes, item, width)
        case SplatAs(dst, _, offset, lanes):
            code = splat_low(dst, Memory(pointer, offset), lanes, item, width)
        case GatherAs(dst, _, offset, stride, lanes, scratch):
            offsets = [offset + lane * stride for lane in range(lanes)]
            code = gather_low(dst, pointer, offsets, item, width, scratch)
    return code + widen(op.dst, op.format, width)


def load_low(dst: int, where: Memory, lanes: int, item: int, width: Width) -> bytes:
    """`lanes` elements side by side, zeros behind them."""
    size = lanes * item
    whole = width.lanes * item
    if size in (4, 8):
        return width.put(
            "VMOVQ_XMM_XMMM64" if size == 8 else "VMOVD_XMM_RM32", low(dst, size), where
        )
    if size in (16, 32):
        name, block = register_name(size), f"{register_name(size)}M{8 * size}"
        load = f"VMOVDQU16_{name}_K1Z_{block}" if width.evex else f"VMOVDQU_{name}_{block}"
        return width.put(load, low(dst, size), where)
    if width.evex and size > 2:
        before, mask = width.mask(lanes)
        name = register_name(whole)
        move = f"VMOVDQU{8 * item}_{name}_K1Z_{name}M{8 * max(whole, PART)}"
        return before + width.put(move, low(dst, whole), where, mask=mask, zero=True)
    offsets = [where.displacement + lane * item for lane in range(lanes)]
    return gather_low(dst, where.base, offsets, item, width, dst)


def register_name(size: int) -> str:
    """XMM or YMM, whichever holds `size` bytes."""
    return "YMM" if size > PART else "XMM"


def splat_low(dst: int, where: Memory, lanes: int, item: int, width: Width) -> bytes:
    """One element `lanes` times, zeros behind them."""
    if lanes == 1:
        return load_low(dst, where, 1, item, width)
    whole = width.lanes * item
    broadcast = f"VPBROADCAST{'B' if item == 1 else 'W'}_{register_name(whole)}{{k}}_XMMM{8 * item}"
    if lanes == width.lanes:
        return width.put(broadcast, low(dst, whole), where)
    if width.evex:
        before, mask = width.mask(lanes)
        return before + width.put(broadcast, low(dst, whole), where, mask=mask, zero=True)
    return gather_low(dst, where.base, [where.displacement] * lanes, item, width, dst)


def gather_low(
    dst: int, pointer: int, offsets: Sequence[int], item: int, width: Width, scratch: int
) -> bytes:
    """Elements at `offsets`, inserted one by one, zeros behind them."""
    insert = "VPINSRB_XMM_XMM_R32M8_IMM8" if item == 1 else "VPINSRW_XMM_XMM_R32M16_IMM8"
    count = PART // item
    code = b""
    for first in range(0, len(offsets), count):
        register = Register.XMM0 + (scratch if first else dst)
        code += zero(register, width)
        for lane, offset in enumerate(offsets[first : first + count]):
            code += width.put(insert, register, register, Memory(pointer, offset), Immediate(lane))
    if len(offsets) > count:
        both = low(dst, 2 * PART)
        upper = Register.XMM0 + scratch
        code += width.put("VINSERTI32X4_YMM_K1Z_YMM_XMMM128_IMM8", both, both, upper, Immediate(1))
    return code


def zero(register: int, width: Width) -> bytes:
    """An xmm register of zeros, and with it the whole vector."""
    name = "VPXORD_XMM_K1Z_XMM_XMMM128B32" if width.evex else "VPXOR_XMM_XMM_XMMM128"
    return width.put(name, register, register, register)


def shift(direction: str, register: int, count: int, width: Width) -> bytes:
    """Lanes of 32 bits shifted in place: "L" left, "R" right."""
    source = f"{width.wide}M{width.bits}B32" if width.evex else width.wide
    name = f"VPS{direction}LD_{width.wide}{{k}}_{source}_IMM8"
    return width.put(name, register, register, Immediate(count))


def widen(dst: int, form: Format, width: Width) -> bytes:
    """Elements in the low part of dst to the whole of it."""
    to, size = width.register(dst), width.lanes * FORMAT_BYTES[form]
    source, part = width.source(size), low(dst, size)
    match form:
        case "float16":
            exact = "_SAE" if width.bits == 512 else ""
            return width.put(f"VCVTPH2PS_{width.wide}{{k}}_{source}{exact}", to, part)
        case "bfloat16":
            widened = width.put(f"VPMOVZXWD_{width.wide}{{k}}_{source}", to, part)
            return widened + shift("L", to, 16, width)
        case "int8":
            return width.put(f"VPMOVSXBD_{width.wide}{{k}}_{source}", to, part)
        case "int8_pair":
            words = low(dst, 2 * size)
            signed = f"VPMOVSXBW_{register_name(2 * size)}{{k}}_{width.source(max(size, 8))}"
            spread = f"VPMOVZXWD_{width.wide}{{k}}_{width.source(2 * size)}"
            return width.put(signed, words, part) + width.put(spread, to, words)


def store_as(op: StoreAs | ScatterAs, width: Width, pointer: int) -> bytes:
    """Bytes of a converting store to the address in register `pointer`."""
    item = FORMAT_BYTES[op.format]
    code = narrowed(op.src, op.scratch, op.format, width)
    match op:
        case StoreAs(src, _, offset, lanes):
            return code + store_low(src, Memory(pointer, offset), lanes, item, width)
        case ScatterAs(src, _, offset, stride, lanes):
            offsets = [offset + lane * stride for lane in range(lanes)]
            return code + scatter_low(src, pointer, offsets, 0, width)


def narrowed(src: int, scratch: tuple[int, int], form: Format, width: Width) -> bytes:
    """The lanes of src rounded to a format of two bytes, side by side in its low part."""
    source, size = width.register(src), 2 * width.lanes
    match form:
        case "float16":
            exact = "_SAE" if width.bits == 512 else ""
            convert = f"VCVTPS2PH_{width.source(size)}{{k}}_{width.wide}_IMM8{exact}"
            return width.put(convert, low(src, size), source, Immediate(0))
        case "bfloat16":
            return rounded(src, scratch, width) + packed(src, width)
        case _:
            raise AssertionError(f"nothing is stored as {form}")


def rounded(src: int, scratch: tuple[int, int], width: Width) -> bytes:
    """The upper 16 bits of src + 0x7fff + (bit 16 of src), in the low ones; a NaN is cut off.

    Half of the last place, less one where the last place is even, carries as ties to even wants.
    """
    value, term, ordered = (width.register(number) for number in (src, *scratch))
    block = f"{width.wide}_{width.wide}M{width.bits}"
    evex = f"{width.wide}_K1Z_{width.wide}_{width.wide}M{width.bits}B32"
    exact = "_ER" if width.bits == 512 else ""
    subtract = f"VSUBPS_{evex}{exact}" if width.evex else f"VSUBPS_{width.wide}_{block}"
    add = f"VPADDD_{evex}" if width.evex else f"VPADDD_{width.wide}_{block}"
    both = f"VPANDD_{evex}" if width.evex else f"VPAND_{width.wide}_{block}"
    code = zero(Register.XMM0 + scratch[0], width)
    code += width.put(subtract, value, value, term)  # x - 0 makes a NaN quiet, and only that
    code += compared(value, ordered, width)
    code += move(term, value, width) + shift("L", term, 15, width) + shift("R", term, 31, width)
    code += width.put(both, term, term, ordered) + width.put(add, value, value, term)
    code += shift("R", ordered, 17, width)
    return code + width.put(add, value, value, ordered) + shift("R", value, 16, width)


def compared(value: int, ordered: int, width: Width) -> bytes:
    """All ones in the lanes of `ordered` where `value` is no NaN."""
    if not width.evex:
        name = f"VCMPPS_{width.wide}_{width.wide}_{width.wide}M{width.bits}_IMM8"
        return width.put(name, ordered, value, value, ORDERED)
    exact = "_SAE" if width.bits == 512 else ""
    name = f"VCMPPS_KR_K1_{width.wide}_{width.wide}M{width.bits}B32_IMM8{exact}"
    passing = Register.K7
    return width.put(name, passing, value, value, ORDERED) + width.put(
        f"VPMOVM2D_{width.wide}_KR", ordered, passing
    )


def move(dst: int, src: int, width: Width) -> bytes:
    """A whole register copied."""
    return width.put(f"VMOVAPS_{width.wide}{{k}}_{width.wide}M{width.bits}", dst, src)


def packed(src: int, width: Width) -> bytes:
    """The low 16 bits of every lane, the rest of which is zero, side by side."""
    value, size = width.register(src), 2 * width.lanes
    if width.evex:
        return width.put(f"VPMOVDW_{width.source(size)}_K1Z_{width.wide}", low(src, size), value)
    pack = f"VPACKUSDW_{width.wide}_{width.wide}_{width.wide}M{width.bits}"
    code = width.put(pack, value, value, value)
    if width.bits == 256:
        code += width.put("VPERMQ_YMM_YMMM256_IMM8", value, value, EVEN_QUARTERS)
    return code


def store_low(src: int, where: Memory, lanes: int, item: int, width: Width) -> bytes:
    """`lanes` elements that lie side by side."""
    size = lanes * item
    if size in (16, 32):
        name, block = register_name(size), f"{register_name(size)}M{8 * size}"
        store = f"VMOVDQU16_{block}_K1Z_{name}" if width.evex else f"VMOVDQU_{block}_{name}"
        return width.put(store, where, low(src, size))
    if size == 8:
        return width.put("VMOVQ_XMMM64_XMM", where, low(src, size))
    if size == 4:
        return width.put("VMOVD_RM32_XMM", where, low(src, size))
    if width.evex and size > 2:
        before, mask = width.mask(lanes)
        name = register_name(width.lanes * item)
        form = f"VMOVDQU{8 * item}_{name}M{8 * max(width.lanes * item, PART)}_K1Z_{name}"
        return before + width.put(form, where, low(src, width.lanes * item), mask=mask)
    whole = max((n for n in (8, 4) if n <= size), default=0)
    code = store_low(src, where, whole // item, item, width) if whole else b""
    rest = [where.displacement + lane * item for lane in range(whole // item, lanes)]
    return code + scatter_low(src, where.base, rest, whole // item, width)


def scatter_low(src: int, pointer: int, offsets: Sequence[int], first: int, width: Width) -> bytes:
    """Elements of two bytes, from number `first` on, to `offsets` one by one."""
    code = b""
    half = PART // 2
    for lane, offset in enumerate(offsets, first):
        if lane == half:
            code += width.put(
                "VEXTRACTI32X4_XMMM128_K1Z_YMM_IMM8",
                low(src, PART),
                low(src, 2 * PART),
                Immediate(1),
            )
        extract = "VPEXTRW_R32M16_XMM_IMM8"
        code += width.put(extract, Memory(pointer, offset), low(src, PART), Immediate(lane % half))
    return code
