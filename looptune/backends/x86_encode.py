"""One x86 instruction to bytes, and bytes to text: all that looptune asks of iced-x86."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from iced_x86 import (
    Code,
    Decoder,
    Encoder,
    FlowControl,
    Formatter,
    FormatterSyntax,
    Instruction,
    MemoryOperand,
    Register,
)


class Memory(NamedTuple):
    """The memory at register `base` + `displacement`; `broadcast` repeats one element of it."""

    base: int
    displacement: int
    broadcast: bool = False


class Immediate(NamedTuple):
    """A constant inside an instruction."""

    value: int


class Target(NamedTuple):
    """The target of a branch, relative to its first byte."""

    distance: int


Operand = int | Memory | Immediate | Target  # a plain int is one of iced-x86's register numbers


def encode(name: str, *operands: Operand, mask: int = 0, zero: bool = False) -> bytes:
    """The bytes of the instruction that iced-x86 calls `name`.

    `mask` is the number of an AVX-512 mask register; with `zero`, lanes it leaves out become 0.
    """
    kinds, values = "create", list[object]()
    for operand in operands:
        if isinstance(operand, int):  # most are registers
            kinds += "_reg"
            values.append(operand)
        else:
            kind, value = described(operand)
            kinds += kind
            values.append(value)
    instruction = constructor(kinds)(getattr(Code, name), *values)
    if mask:
        instruction.op_mask = Register.K0 + mask
        instruction.zeroing_masking = zero
    # An encoder of its own for each call: they cost little and threads may not share one.
    encoder = Encoder(64)
    encoder.encode(instruction, 0)
    return encoder.take_buffer()


@lru_cache(maxsize=64)
def constructor(name: str) -> Callable[..., Any]:
    """A constructor of iced-x86, of which there is one for each list of operand kinds."""
    found: Callable[..., Any] = getattr(Instruction, name)
    return found


def described(operand: Operand) -> tuple[str, object]:
    """An operand's kind, as the constructors of iced-x86 are named for, and its value there."""
    match operand:
        case int():
            return "_reg", operand
        case Memory(base, displacement, broadcast):
            assert -(2**31) <= displacement < 2**31, f"displacement {displacement} has no encoding"
            # Size 0 leaves the displacement out; size 1 lets iced choose, disp8*N included.
            size = 1 if displacement or base == Register.RIP else 0
            # Positional arguments: by name, the constructor takes twice as long.
            # The stub has an enumeration for what are plain integers at run time.
            register: Any = base
            return "_mem", MemoryOperand(register, Register.NONE, 1, displacement, size, broadcast)
        case Immediate(value):
            return "_i64" if not -(2**31) <= value < 2**31 else "_i32", value
        case Target(distance):
            return "_branch", distance % 2**64


encode_cached = lru_cache(maxsize=1 << 12)(encode)


def instructions(code: bytes) -> Iterator[Instruction]:
    """The instructions of a kernel, up to its return."""
    for instruction in Decoder(64, code):
        yield instruction
        if instruction.flow_control == FlowControl.RETURN:
            return


def listing(code: bytes) -> str:
    """One line an instruction: offset and Intel syntax."""
    formatter = Formatter(FormatterSyntax.INTEL)
    formatter.space_after_operand_separator = True
    formatter.branch_leading_zeros = False
    formatter.uppercase_hex = False
    formatter.hex_prefix, formatter.hex_suffix = "0x", ""
    formatter.small_hex_numbers_in_decimal = True
    formatter.signed_immediate_operands = True
    formatter.rip_relative_addresses = True
    lines, end = [], 0
    for instruction in instructions(code):
        lines.append(f"{instruction.ip:6x}  {formatter.format(instruction)}")
        end = instruction.next_ip
    if len(code) > end:
        lines.append(f"{end:6x}  ; padding and constants: {len(code) - end} bytes")
    return "\n".join(lines)
