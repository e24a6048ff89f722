"""x86-64 code of a legalized Program: `emit(program)`.

System V calls: rdi holds the operand pointers, rsi the scratch memory, rdx and rcx begin and end.
rax is never kept between operations. Code must be placed at a multiple of 64 bytes: loops and
the constants behind the code are aligned for that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from iced_x86 import Register

from looptune.backends.x86_encode import Immediate, Memory, Operand, Target
from looptune.backends.x86_encode import encode_cached as encode
from looptune.backends.x86_vector import (
    ENCODED,
    LANE_MASKS,
    PARTIAL,
    POINTERS,
    Vectors,
    set_mask,
    vectors_for,
)
from looptune.errors import LoweringError
from looptune.program import (
    BEGIN,
    END,
    SCRATCH,
    Advance,
    Base,
    Const,
    Copy,
    EvensOf,
    EvensWith,
    IfZero,
    Keep,
    Load,
    LoadAs,
    LoadMask,
    Loop,
    Min,
    Op,
    PointerOp,
    Power,
    Program,
    Restore,
    Save,
    ScalarOp,
    Scale,
    Set,
    Splat,
    SplatAs,
    Step,
    Store,
    StoreAs,
    Subtract,
    Switch,
    While,
    WithConst,
)

ARGUMENTS = {BEGIN: Register.RDX, END: Register.RCX}
CALLEE_SAVED = frozenset(
    {Register.RBX, Register.RBP, Register.R12, Register.R13, Register.R14, Register.R15}
)
LOOP_ALIGNMENT = 32  # one fetch window
POOL_ALIGNMENT = 64
LOOPS = frozenset({Loop, While})
BRANCHES = frozenset({Switch, IfZero})
INDIFFERENT = (
    frozenset({*ENCODED, Const, WithConst, Power, EvensOf, LoadMask, Base, Step}) - PARTIAL
)
MANTISSA_BITS = {4: 23, 8: 52}
INT32 = range(-(2**31), 2**31)

# No-operations of 1 to 9 bytes, each a single instruction, as Intel's manual recommends.
NOPS = tuple(
    bytes.fromhex(text)
    for text in (
        "90", "6690", "0f1f00", "0f1f4000", "0f1f440000", "660f1f440000", "0f1f8000000000",
        "0f1f840000000000", "660f1f840000000000",
    )
)  # fmt: skip

Home = int | Memory  # where a scalar lives: a register or a stack slot


class Needs(NamedTuple):
    """The scalars that code names, and the lane counts that it may want a mask register for.

    `ignored` are the types of operations that have no needs.
    """

    scalars: set[int]
    lanes: set[int]
    ignored: frozenset[type]


class Label:
    """A place in the code, known once it is reached."""

    def __init__(self) -> None:
        self.position = -1


def emit(program: Program) -> bytes:
    """Machine code of a legalized Program and its constants, for any address that 64 divides.

    Raises `LoweringError` for more pointers than there are registers.
    """
    if program.pointers > len(POINTERS):
        raise LoweringError(
            f"the program holds {program.pointers} pointers; x86 has {len(POINTERS)} registers "
            "for them"
        )
    target = program.target
    ignored = INDIFFERENT if target.masks else INDIFFERENT | PARTIAL
    needs = Needs(set(), set(), ignored)
    survey(program.body, needs)
    wanted = sorted(needs.lanes - {program.lanes}) if target.masks else []
    masks = tuple(wanted[:LANE_MASKS])
    homes = scalar_homes(needs.scalars, program.pointers)
    vectors = vectors_for(target.isa, target.vector_bytes, program.dtype, masks)
    assembler = Assembler(homes, vectors)
    saved = saved_registers(homes, program.pointers)
    slots = sum(isinstance(home, Memory) for home in homes.values())
    assembler.enter(saved, slots)
    assembler.body(program.body)
    assembler.leave(saved, slots)
    return assembler.finish()


def survey(body: tuple[Op, ...], found: Needs) -> None:
    """Add what `body` names to `found`; most operations cost one look at their type."""
    for op in body:
        if type(op) in found.ignored:
            continue
        match op:
            case Load(lanes=lanes) | Store(lanes=lanes):
                if lanes & (lanes - 1):
                    found.lanes.add(lanes)
            case Splat(lanes=lanes) | Keep(lanes=lanes):
                found.lanes.add(lanes)
            case (
                EvensWith(lanes=lanes)
                | LoadAs(lanes=lanes)
                | SplatAs(lanes=lanes)
                | StoreAs(lanes=lanes)
            ):
                found.lanes.add(lanes)
            case Loop(counter, _, inner) | While(counter, _, inner):
                found.scalars.add(counter)
                survey(inner, found)
            case Switch() | IfZero():
                found.scalars.add(op.scalar)
                for arm in arms(op):
                    survey(arm, found)
            case _:
                found.scalars.update(scalars_of(op))


def scalars_of(op: Op) -> tuple[int, ...]:
    """The scalars that an operation names."""
    match op:
        case Copy(dst, src) | Min(dst, src) | Scale(dst, src) | Subtract(dst, src):
            return dst, src
        case Set(scalar) | Save(scalar) | Advance(_, scalar) | Restore(_, scalar):
            return (scalar,)
        case _:
            raise AssertionError(f"{op} is not for the encoder: legalize the program first")


def arms(op: Switch | IfZero) -> tuple[tuple[Op, ...], ...]:
    """The bodies of which one is done."""
    if isinstance(op, Switch):
        return tuple(case.body for case in op.cases)
    return op.then, op.otherwise


def loops_inside(body: tuple[Op, ...]) -> bool:
    """Whether a loop is anywhere in `body`."""
    kinds = {type(op) for op in body}
    if kinds & LOOPS:
        return True
    if not kinds & BRANCHES:
        return False
    branches = (op for op in body if isinstance(op, Switch | IfZero))
    return any(loops_inside(arm) for op in branches for arm in arms(op))


def scalar_homes(used: set[int], pointers: int) -> dict[int, Home]:
    """A register for each scalar, the deepest first, while they last; then stack slots."""
    homes: dict[int, Home] = {s: r for s, r in ARGUMENTS.items() if s in used}
    unused = [register for scalar, register in ARGUMENTS.items() if scalar not in used]
    free = unused + list(POINTERS[pointers:])
    rest = sorted(used - homes.keys())
    homes.update(zip(rest, free, strict=False))
    spilled = rest[len(free) :]
    return homes | {s: Memory(Register.RSP, 8 * slot) for slot, s in enumerate(spilled)}


def saved_registers(homes: dict[int, Home], pointers: int) -> list[int]:
    """The registers in use that belong to the caller."""
    return sorted(CALLEE_SAVED & {*POINTERS[:pointers], *homes.values()})


class Assembler:
    """Code so far, and the four-byte distances in it that still wait for their labels."""

    def __init__(self, homes: dict[int, Home], vectors: Vectors) -> None:
        self.homes = homes
        self.vectors = vectors
        self.code = bytearray()
        self.distances: list[tuple[int, Label]] = []
        self.constants: dict[bytes, Label] = {}

    def put(self, name: str, *operands: Operand) -> None:
        """Append one instruction."""
        self.code += encode(name, *operands)

    def refer(self, code: bytes, label: Label) -> None:
        """Append an instruction whose last four bytes are the distance from its end to `label`."""
        self.code += code
        self.distances.append((len(self.code), label))

    def jump(self, condition: str, label: Label) -> None:
        """Append a jump; "MP" is the condition that always holds."""
        self.refer(encode(f"J{condition}_REL32_64", Target(0)), label)

    def place(self, label: Label) -> None:
        """Say that `label` is here."""
        label.position = len(self.code)

    def constant(self, value: bytes) -> Label:
        """The place of `value` behind the code."""
        return self.constants.setdefault(value, Label())

    def align(self, boundary: int) -> None:
        """Fill up to a multiple of `boundary` with as few no-operations as possible."""
        gap = -len(self.code) % boundary
        while gap:
            size = min(gap, len(NOPS))
            self.code += NOPS[size - 1]
            gap -= size

    def enter(self, saved: list[int], slots: int) -> None:
        """Save registers, make room for scalars, set the lane masks."""
        for register in saved:
            self.put("PUSH_R64", register)
        if slots:
            self.add(Register.RSP, -8 * slots)
        for k, lanes in enumerate(self.vectors.masks, 1):
            self.code += set_mask(k, lanes)

    def leave(self, saved: list[int], slots: int) -> None:
        """Undo `enter` and return, the upper halves of vectors clean for the caller's SSE code."""
        if slots:
            self.add(Register.RSP, 8 * slots)
        for register in reversed(saved):
            self.put("POP_R64", register)
        self.put("VEX_VZEROUPPER")
        self.put("RETNQ")

    def finish(self) -> bytes:
        """Append the constants and fill in all distances."""
        if self.constants:
            self.align(POOL_ALIGNMENT)
        for value, label in sorted(self.constants.items(), key=lambda item: -len(item[0])):
            self.place(label)  # the longest first, so that each is aligned to its size
            self.code += value
        for end, label in self.distances:
            struct.pack_into("<i", self.code, end - 4, label.position - end)
        return bytes(self.code)

    def body(self, body: tuple[Op, ...]) -> None:
        """Append operations one after another; most are vector operations encoded before."""
        codes, missing = self.vectors.codes, self.vectors.missing
        for op in body:
            known = codes.get(type(op))
            if known is None:
                self.special(op)
            else:
                self.code += known.get(op) or missing(op)  # type: ignore[arg-type]

    def special(self, op: Op) -> None:
        """Append whatever depends on its place or on the homes of scalars."""
        match op:
            case Set() | Copy() | Min() | Scale() | Subtract():
                self.scalar(op)
            case Base() | Step() | Advance() | Save() | Restore():
                self.pointer(op)
            case Const() | LoadMask():
                self.lanes_constant(op)
            case WithConst() | Power():
                self.arithmetic(op)
            case EvensOf() | EvensWith():
                self.evens(op)
            case Loop() | While() | Switch() | IfZero():
                self.control(op)
            case _:
                raise AssertionError(f"{op} is not for the encoder: legalize the program first")

    def scalar(self, op: ScalarOp) -> None:
        """Append arithmetic on scalars, all of it through rax."""
        match op:
            case Set(dst, value):
                self.load_constant(self.homes[dst], value)
            case Copy(dst, src):
                self.move(self.homes[dst], self.homes[src])
            case Min(dst, src, limit):
                self.load_constant(Register.RAX, limit)
                self.put("CMP_R64_RM64", Register.RAX, self.homes[src])
                self.put("CMOVG_R64_RM64", Register.RAX, self.homes[src])
                self.move(self.homes[dst], Register.RAX)
            case Scale(dst, src, factor):
                self.multiply(self.homes[src], factor)
                self.move(self.homes[dst], Register.RAX)
            case Subtract(dst, src):
                self.put("MOV_R64_RM64", Register.RAX, self.homes[src])
                self.put("SUB_RM64_R64", self.homes[dst], Register.RAX)

    def pointer(self, op: PointerOp) -> None:
        """Append a change of a pointer, or its copy to a scalar."""
        match op:
            case Base(pointer, operand, offset):
                self.base(POINTERS[pointer], operand, offset)
            case Step(pointer, count):
                self.add(POINTERS[pointer], count)
            case Advance(pointer, scalar, count):
                self.multiply(self.homes[scalar], count)
                self.put("ADD_R64_RM64", POINTERS[pointer], Register.RAX)
            case Save(scalar, pointer):
                self.move(self.homes[scalar], POINTERS[pointer])
            case Restore(pointer, scalar):
                self.move(POINTERS[pointer], self.homes[scalar])

    def lanes_constant(self, op: Const | LoadMask) -> None:
        """Vector constants: zero by itself, others from behind the code."""
        vectors, here = self.vectors, Memory(Register.RIP, 0)
        match op:
            case Const(dst, value):
                packed = vectors.packed(value)
                if any(packed):
                    splat = encode(vectors.names["splat"], *vectors.wide(dst), here)
                    self.refer(splat, self.constant(packed))
                else:
                    self.put(vectors.names["zero"], *[Register.XMM0 + dst] * 3)
            case LoadMask(dst, lanes):
                load = encode(vectors.names[f"load{vectors.bits // 8}"], *vectors.wide(dst), here)
                ones = b"\xff" * (lanes * vectors.item)
                self.refer(load, self.constant(ones.ljust(vectors.bits // 8, b"\0")))

    def arithmetic(self, op: WithConst | Power) -> None:
        """Arithmetic with a constant from behind the code, broadcast where the target can.

        2 ** a is a plus the exponent's bias, rounded to whole by a large constant that leaves it in
        the lowest bits; shifted, these are the exponent.
        """
        vectors = self.vectors
        match op:
            case WithConst(kind, dst, a, value):
                self.with_vector_constant(kind, dst, a, value)
            case Power(dst, a):
                bits = MANTISSA_BITS[vectors.item]
                bias = (1 << (7 if vectors.item == 4 else 10)) - 1
                self.with_vector_constant("add", dst, a, 1.5 * 2**bits + bias)
                code = encode(vectors.names["exponent"], *vectors.wide(dst, dst), Immediate(bits))
                self.code += code

    def evens(self, op: EvensOf | EvensWith) -> None:
        """A permutation by lane numbers, those of a second vector counted from `lanes` on."""
        vectors = self.vectors
        half = vectors.lanes // 2
        order = [2 * i for i in range(half)]
        match op:
            case EvensOf(dst, scratch):
                self.load_lane_numbers(scratch, [*order, *[2 * half - 1] * half])
                self.code += encode(vectors.names["choose"], *vectors.wide(dst, scratch, dst))
            case EvensWith(dst, pointer, offset, lanes, scratch):
                first = 4 * half - 2 * (lanes - half) + 1  # of the second vector's odd lanes
                order += [first + 2 * i for i in range(lanes - half)] + [0] * (2 * half - lanes)
                self.load_lane_numbers(scratch, order)
                second = Memory(POINTERS[pointer], offset)
                before, mask = b"", 0
                if lanes < vectors.lanes:
                    before, mask = vectors.lane_mask(lanes)
                operands = (*vectors.wide(dst, scratch), second)
                name = vectors.names["permute"]
                self.code += before + encode(name, *operands, mask=mask, zero=bool(mask))

    def load_lane_numbers(self, dst: int, order: Sequence[int]) -> None:
        """A vector of whole numbers, as permutations take them."""
        vectors = self.vectors
        numbers = struct.pack(f"<{len(order)}{'i' if vectors.item == 4 else 'q'}", *order)
        here = Memory(Register.RIP, 0)
        name = vectors.names[f"load{vectors.bits // 8}"]
        self.refer(encode(name, *vectors.wide(dst), here), self.constant(numbers))

    def with_vector_constant(self, kind: str, dst: int, a: int, value: float) -> None:
        """One instruction whose last source is `value` in every lane."""
        vectors = self.vectors
        packed = vectors.packed(value)
        if not vectors.evex:
            packed *= vectors.lanes
        here = Memory(Register.RIP, 0, vectors.evex)
        code = encode(vectors.names[kind], *vectors.wide(dst, a), here)
        self.refer(code, self.constant(packed))

    def control(self, op: Loop | While | Switch | IfZero) -> None:
        """Structured control flow; every branch is a 32-bit one."""
        end = Label()
        match op:
            case Loop(counter, step, inner, guarded):
                if guarded:
                    self.compare(self.homes[counter], 0)
                    self.jump("LE", end)
                top = self.top(inner)
                self.body(inner)
                self.add(self.homes[counter], -step)
                self.jump("G", top)
            case While(counter, step, inner):
                self.compare(self.homes[counter], step)
                self.jump("L", end)
                top = self.top(inner)
                self.body(inner)
                self.add(self.homes[counter], -step)
                self.compare(self.homes[counter], step)
                self.jump("GE", top)
            case Switch(scalar, cases):
                for case in cases[:-1]:
                    self.compare(self.homes[scalar], case.value)
                    self.branch("NE", case.body, end)
                self.body(cases[-1].body)
            case IfZero(scalar, then, otherwise):
                self.compare(self.homes[scalar], 0)
                self.branch("NE", then, end if otherwise else None)
                self.body(otherwise)
        self.place(end)

    def top(self, inner: tuple[Op, ...]) -> Label:
        """The first instruction of a loop, on a boundary where nothing loops inside it."""
        if not loops_inside(inner):
            self.align(LOOP_ALIGNMENT)
        label = Label()
        self.place(label)
        return label

    def branch(self, condition: str, body: tuple[Op, ...], end: Label | None) -> None:
        """Do `body` and go to `end` (or on) unless the condition holds."""
        skip = Label()
        self.jump(condition, skip)
        self.body(body)
        if end is not None:
            self.jump("MP", end)
        self.place(skip)

    def base(self, pointer: int, operand: int, offset: int) -> None:
        """Point into an operand or into the scratch memory."""
        if operand == SCRATCH:
            self.move(pointer, Register.RSI)
        else:
            self.put("MOV_R64_RM64", pointer, Memory(Register.RDI, 8 * operand))
        if offset:
            self.add(pointer, offset)

    def move(self, dst: Home, src: Home) -> None:
        """dst = src."""
        if isinstance(dst, int):
            self.put("MOV_R64_RM64", dst, src)
            return
        if isinstance(src, Memory):
            self.put("MOV_R64_RM64", Register.RAX, src)
            src = Register.RAX
        self.put("MOV_RM64_R64", dst, src)

    def load_constant(self, dst: Home, value: int) -> None:
        """dst = value, in the shortest way."""
        if isinstance(dst, int) and 0 <= value < 2**31:
            half = Register.EAX + dst - Register.RAX  # writing it clears the upper half
            zero = encode("XOR_R32_RM32", half, half)
            self.code += encode("MOV_R32_IMM32", half, Immediate(value)) if value else zero
        elif value in INT32:
            self.put("MOV_RM64_IMM32", dst, Immediate(value))
        elif isinstance(dst, int):
            self.put("MOV_R64_IMM64", dst, Immediate(value))
        else:
            self.put("MOV_R64_IMM64", Register.RAX, Immediate(value))
            self.move(dst, Register.RAX)

    def add(self, dst: Home, value: int) -> None:
        """dst += value, with the flags of the sum; 128 is subtracted as -128, one byte."""
        if value == 128:
            self.put("SUB_RM64_IMM8", dst, Immediate(-128))
        else:
            self.with_constant("ADD", dst, value)

    def compare(self, a: Home, value: int) -> None:
        """Flags of a - value."""
        if isinstance(a, int) and value == 0:
            self.put("TEST_RM64_R64", a, a)
        else:
            self.with_constant("CMP", a, value)

    def with_constant(self, verb: str, dst: Home, value: int) -> None:
        """An arithmetic instruction with the shortest form of a constant."""
        if value in INT32:
            size = 8 if -128 <= value < 128 else 32
            self.put(f"{verb}_RM64_IMM{size}", dst, Immediate(value))
        else:
            self.load_constant(Register.RAX, value)
            self.put(f"{verb}_RM64_R64", dst, Register.RAX)

    def multiply(self, src: Home, factor: int) -> None:
        """rax = src * factor."""
        if factor in INT32:
            self.put("IMUL_R64_RM64_IMM32", Register.RAX, src, Immediate(factor))
        else:
            self.load_constant(Register.RAX, factor)
            self.put("IMUL_R64_RM64", Register.RAX, src)
