"""The second oracle: runs a Program of any target on any host, every access checked.

A pointer is an operand number and a byte offset, and an access must hit elements of that operand:
not the gaps of a strided view, not its neighbours. What is not yet written reads as NaN (as the
least whole number in Programs of those); an unset
scalar or pointer, a write to an input and a register that its operation calls free but that is
still wanted (it is filled with NaN) all show. If this and machine code disagree, the encoding is
wrong; if both disagree with `looptune.reference`, the lowering is.

Rounding: a float32 FMA is computed in float64 and rounded twice. The product is exact there, but
the sum may be rounded to a tie of float32, so a result can differ from a fused one by one unit in
the last place. A float64 FMA is a multiplication, rounded, and an addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np

from looptune.dtypes import ITEM_BYTES, DType, is_whole, numpy_dtype, poison
from looptune.errors import InterpretError
from looptune.program import (
    BEGIN,
    END,
    SCRATCH,
    Add,
    Advance,
    Base,
    Bound,
    Const,
    Control,
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
    Format,
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
    MulPairs,
    Op,
    Pick,
    PointerOp,
    Power,
    Prefetch,
    Program,
    Reduce,
    Restore,
    Save,
    ScalarOp,
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
    While,
    WithConst,
    Zip,
    walk,
)

PART_BYTES = 16
MAX_TRIPS = 10_000_000  # a wrong loop must end
REGISTERS = frozenset("dst src a b scratch mask pointer scalar counter".split())  # field names
REDUCE = {"add": np.add, "max": np.maximum, "min": np.minimum}
IN_MEMORY: dict[Format, DType] = {
    "float16": "float16", "bfloat16": "bfloat16", "int8": "int8", "int8_pair": "int8",
}  # fmt: skip

Permutation = Zip | Pick | Evens | EvensOf | EvensWith
LaneOp = LoadMask | MaskedLoad | LoadLane | StoreLane | Extract | Insert | Shuffle
Chunks = Callable[[int], Iterable[tuple[int, int]]]


class Pointer(NamedTuple):
    """An address: bytes from element [0, ..., 0] of an operand, or from the scratch's start."""

    operand: int
    offset: int


@dataclass(frozen=True)
class Cells:
    """An operand as a line of elements, the first of them `first` bytes from its pointer.

    From cell i on, `run[i]` cells in a row belong to the operand; the others are gaps.
    """

    values: np.ndarray
    run: np.ndarray
    first: int


@dataclass
class State:
    """Registers and memory in the middle of a Program; None is a register not yet set."""

    program: Program
    memory: dict[int, Cells]
    scalars: list[int | Pointer | None]
    pointers: list[Pointer | None]
    vectors: np.ndarray
    trips: int = 0

    @property
    def junk(self) -> float:
        """What a register holds that nothing wanted has been written to."""
        return poison(self.program.dtype)


def whole(trips: int) -> Iterable[tuple[int, int]]:
    """All iterations of the parallel loop in one call."""
    return ((0, trips),)


def interpret(
    programs: Program | Sequence[Program],
    arrays: Sequence[np.ndarray],
    chunks: Chunks = whole,
) -> None:
    """Run the Programs in order on arrays (the output, which is written in place, then inputs).

    `chunks(trips)` gives the begin and end of each call of a Program, as threads would share it.
    Raises `InterpretError` with the operation that misbehaves.
    """
    programs = (programs,) if isinstance(programs, Program) else programs
    index, output = cells_of(arrays[0])
    memory = {number: cells_of(array)[1] for number, array in enumerate(arrays) if number}
    shared = scratch_of(programs)
    memory |= {0: output, SCRATCH: shared}
    with np.errstate(all="ignore"):
        for program in programs:
            check_registers(program)
            for begin, end in chunks(program.trips):
                if program.private_scratch:
                    memory |= {len(arrays): shared, SCRATCH: scratch_of(programs)}
                run(program, memory, begin, end)
    arrays[0][...] = output.values[index]


def check_registers(program: Program) -> None:
    """Raise `InterpretError` for negative register numbers: Python would count from the end."""
    for op in walk(program.body):
        if min(registers_of(op), default=0) < 0:
            raise InterpretError(f"{op} names a register that the Program does not have")


def registers_of(op: Op) -> Iterator[int]:
    """The numbers of all registers, of any kind, that an operation names."""
    for name in op._fields:
        if name in REGISTERS:
            value: int | tuple[int, ...] = getattr(op, name)
            yield from value if isinstance(value, tuple) else (value,)


def cells_of(array: np.ndarray) -> tuple[np.ndarray, Cells]:
    """The cells of an array, a copy, and for each of its elements the cell it is.

    Raises `InterpretError` where strides lead to elements that are not aligned.
    """
    size = array.itemsize
    if any(stride % size for stride in array.strides):
        raise InterpretError(f"an operand has strides {array.strides}, no multiples of {size}")
    index = np.zeros(array.shape, np.int64)
    for axis, (count, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        steps = np.arange(count) * (stride // size if count > 1 else 0)
        index += steps.reshape([-1 if axis == other else 1 for other in range(array.ndim)])
    first = int(index.min(initial=0))
    index -= first
    junk = np.iinfo(array.dtype).min if array.dtype.kind == "i" else np.nan
    values = np.full(int(index.max(initial=-1)) + 1, junk, array.dtype)
    values[index] = array
    legal = np.zeros(len(values), bool)
    legal[index] = True
    return index, Cells(values, runs_of(legal), first * size)


def runs_of(legal: np.ndarray) -> np.ndarray:
    """How many legal cells follow in a row from each cell on."""
    places = np.arange(len(legal))
    gaps = np.where(legal, len(legal), places)
    next_gap: np.ndarray = np.minimum.accumulate(gaps[::-1])[::-1]
    return next_gap - places


def scratch_of(programs: Sequence[Program]) -> Cells:
    """Scratch for all the Programs, holding NaN."""
    size = max((p.scratch_bytes // ITEM_BYTES[p.dtype] for p in programs), default=0)
    dtype = programs[0].dtype if programs else "float32"
    return Cells(np.full(size, poison(dtype), dtype), runs_of(np.ones(size, bool)), 0)


def run(program: Program, memory: dict[int, Cells], begin: int, end: int) -> None:
    """One call of a Program."""
    scalars: list[int | Pointer | None] = [None] * program.scalars
    scalars[BEGIN], scalars[END] = begin, end
    shape = (program.target.vector_registers, program.lanes)
    vectors = np.full(shape, poison(program.dtype), program.dtype)
    state = State(program, memory, scalars, [None] * program.pointers, vectors)
    run_body(state, program.body)


def run_body(state: State, body: Iterable[Op]) -> None:
    """Do operations one after another."""
    for op in body:
        try:
            run_op(state, op)
        except IndexError:
            raise InterpretError(f"{op} names a register that the Program does not have") from None


def run_op(state: State, op: Op) -> None:
    """Do one operation."""
    match op:
        case Fma() | FmaLoad() | FmaSplat():
            run_fma(state, op)
        case Load() | Splat() | Gather() | Store() | Scatter() | Prefetch():
            run_memory(state, op)
        case LoadAs() | SplatAs() | GatherAs() | StoreAs() | ScatterAs():
            run_converted(state, op)
        case Const() | Move() | Add() | Mul() | Extremum() | Keep() | Reduce():
            run_arithmetic(state, op)
        case Div() | Bound() | WithConst() | Power() | MulPairs():
            run_function(state, op)
        case Zip() | Pick() | Evens() | EvensOf() | EvensWith():
            run_permutation(state, op)
        case Set() | Copy() | Min() | Scale() | Subtract():
            run_scalar(state, op)
        case Base() | Step() | Advance() | Save() | Restore():
            run_pointer(state, op)
        case Loop() | While() | Switch() | IfZero():
            run_control(state, op)
        case _:
            run_machine(state, op)


def scalar(state: State, number: int, op: Op) -> int:
    """The value of a scalar; raises `InterpretError` if it is unset or holds a pointer."""
    value = state.scalars[number]
    if not isinstance(value, int):
        raise InterpretError(f"{op}: scalar {number} holds {value}, not a number")
    return value


def pointer(state: State, number: int, op: Op) -> Pointer:
    """The value of a pointer; raises `InterpretError` if it is unset."""
    value = state.pointers[number]
    if value is None:
        raise InterpretError(f"{op}: pointer {number} is not set")
    return value


def span(
    state: State, op: Op, number: int, offset: int, count: int = 1, form: Format | None = None
) -> np.ndarray:
    """The `count` elements at pointer + offset, to read or to write.

    Raises `InterpretError` unless all of them are elements of the pointer's operand and of this
    format (None: the Program's type), and for a negative offset, which a target need not have.
    """
    base = pointer(state, number, op)
    if offset < 0:
        raise InterpretError(f"{op}: offset {offset} is negative; pointers may move, offsets not")
    cells = state.memory.get(base.operand)
    if cells is None:
        raise InterpretError(f"{op}: there is no operand {base.operand}")
    wanted = numpy_dtype(state.program.dtype if form is None else IN_MEMORY[form])
    if cells.values.dtype != wanted:
        raise InterpretError(f"{op}: operand {base.operand} holds {cells.values.dtype}")
    place, rest = divmod(base.offset + offset - cells.first, cells.values.itemsize)
    if rest or not 0 <= place < len(cells.run) or cells.run[place] < count:
        name = "scratch" if base.operand == SCRATCH else f"operand {base.operand}"
        raise InterpretError(
            f"{op}: {count} elements at byte {base.offset + offset} of {name} are not all its own; "
            f"it has {len(cells.run)} from byte {cells.first} on, gaps included"
        )
    return cells.values[place : place + count]


def target_span(
    state: State, op: Op, number: int, offset: int, count: int = 1, form: Format | None = None
) -> np.ndarray:
    """Like `span`, for writing: only the output and the scratch may be written."""
    operand = pointer(state, number, op).operand
    if operand > 0:
        raise InterpretError(f"{op} writes to operand {operand}, an input")
    return span(state, op, number, offset, count, form)


def run_scalar(state: State, op: ScalarOp) -> None:
    """Do arithmetic on integers; a copy may also move a saved pointer."""
    scalars = state.scalars
    match op:
        case Set(dst, value):
            scalars[dst] = value
        case Copy(dst, src):
            if scalars[src] is None:
                raise InterpretError(f"{op}: scalar {src} is not set")
            scalars[dst] = scalars[src]
        case Min(dst, src, limit):
            scalars[dst] = min(scalar(state, src, op), limit)
        case Scale(dst, src, factor):
            scalars[dst] = scalar(state, src, op) * factor
        case Subtract(dst, src):
            scalars[dst] = scalar(state, dst, op) - scalar(state, src, op)
        case _:
            assert_never(op)


def run_pointer(state: State, op: PointerOp) -> None:
    """Move a pointer; where it points matters only to accesses."""
    match op:
        case Base(number, operand, offset):
            state.pointers[number] = Pointer(operand, offset)
        case Step(number, by):
            base = pointer(state, number, op)
            state.pointers[number] = Pointer(base.operand, base.offset + by)
        case Advance(number, count, by):
            base = pointer(state, number, op)
            offset = base.offset + scalar(state, count, op) * by
            state.pointers[number] = Pointer(base.operand, offset)
        case Save(dst, number):
            state.scalars[dst] = pointer(state, number, op)
        case Restore(number, src):
            saved = state.scalars[src]
            if not isinstance(saved, Pointer):
                raise InterpretError(f"{op}: scalar {src} holds {saved}, not a pointer")
            state.pointers[number] = saved
        case _:
            assert_never(op)


def run_control(state: State, op: Control) -> None:
    """Do the bodies of a loop or a branch."""
    match op:
        case Loop(counter, step, body, guarded):
            again = not guarded or scalar(state, counter, op) > 0
            while again:
                again = iteration(state, op, counter, step, body) > 0
        case While(counter, step, body):
            rest = scalar(state, counter, op)
            while rest >= step:
                rest = iteration(state, op, counter, step, body)
        case Switch(number, cases):
            value = scalar(state, number, op)
            bodies = [case.body for case in cases if case.value == value]
            if not bodies:
                values = [case.value for case in cases]
                raise InterpretError(f"switch: scalar {number} is {value}, none of {values}")
            run_body(state, bodies[0])
        case IfZero(number, then, otherwise):
            run_body(state, otherwise if scalar(state, number, op) else then)
        case _:
            assert_never(op)


def iteration(state: State, op: Loop | While, counter: int, step: int, body: tuple[Op, ...]) -> int:
    """One trip of a loop; what is left in its counter."""
    state.trips += 1
    if state.trips > MAX_TRIPS:
        raise InterpretError(f"loop over scalar {counter} by {step}: over {MAX_TRIPS} iterations")
    run_body(state, body)
    rest = scalar(state, counter, op) - step
    state.scalars[counter] = rest
    return rest


def run_fma(state: State, op: Fma | FmaLoad | FmaSplat) -> None:
    """Multiply and add with the target's rounding, see the module's docstring."""
    v = state.vectors
    match op:
        case Fma(b=b):
            factor = v[b]
        case FmaLoad(pointer=base, offset=offset):
            factor = span(state, op, base, offset, state.program.lanes)
        case FmaSplat(pointer=base, offset=offset):
            factor = span(state, op, base, offset)
        case _:
            assert_never(op)
    if is_whole(state.program.dtype):
        v[op.dst] += products_of_pairs(v[op.a], np.broadcast_to(factor, v[op.a].shape))
    elif state.program.target.fma == "none":
        v[op.dst] += v[op.a] * factor
    else:
        v[op.dst] = v[op.a].astype(np.float64) * factor + v[op.dst]


def products_of_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per lane, the sum of the products of the two int16 that an int32 of a and of b holds."""
    left, right = (np.ascontiguousarray(x).view(np.int16).astype(np.int32) for x in (a, b))
    sums: np.ndarray = (left * right).reshape(-1, 2).sum(axis=1, dtype=np.int32)
    return sums


def run_converted(state: State, op: LoadAs | SplatAs | GatherAs | StoreAs | ScatterAs) -> None:
    """Move elements of a narrow format between memory and a vector register."""
    v = state.vectors
    match op:
        case LoadAs(dst, base, offset, lanes, form):
            found = span(state, op, base, offset, lanes, form)
        case SplatAs(dst, base, offset, lanes, form):
            found = np.repeat(span(state, op, base, offset, 1, form), lanes)
        case GatherAs(dst, base, offset, stride, lanes, scratch, form):
            spoil(state, scratch, dst)
            offsets = range(offset, offset + lanes * stride, stride) if stride else [offset] * lanes
            found = np.concatenate([span(state, op, base, at, 1, form) for at in offsets])
        case StoreAs(src, base, offset, lanes, scratch, form):
            cells = target_span(state, op, base, offset, lanes, form)
            cells[:] = v[src, :lanes].astype(cells.dtype)
        case ScatterAs(src, base, offset, stride, lanes, scratch, form):
            for lane in range(lanes):
                cells = target_span(state, op, base, offset + lane * stride, 1, form)
                cells[:] = v[src, lane].astype(cells.dtype)
        case _:
            assert_never(op)
    if isinstance(op, StoreAs | ScatterAs):
        v[[op.src, *op.scratch]] = state.junk
        return
    v[dst] = 0
    v[dst, : len(found)] = found
    if form == "int8_pair":
        v[dst] &= 0xFFFF


def run_function(state: State, op: Div | Bound | WithConst | Power | MulPairs) -> None:
    """Do what epilogues are made of, and products of whole numbers."""
    v = state.vectors
    match op:
        case MulPairs(dst, a, b):
            v[dst] = products_of_pairs(v[a], v[b])
        case Div(dst, a, b):
            v[dst] = v[a] / v[b]
        case Bound(kind, dst, limit, a):
            larger = REDUCE["max" if kind == "max" else "min"](v[limit], v[a])
            v[dst] = np.where(np.isnan(v[limit]), v[a], larger)
        case WithConst(kind, dst, a, value):
            value = v.dtype.type(value)
            exact = {
                "add": lambda: v[a].astype(np.float64) + value,
                "mul": lambda: v[a].astype(np.float64) * value,
                "horner": lambda: v[dst].astype(np.float64) * v[a] + value,
                "fma": lambda: v[dst] + v[a].astype(np.float64) * value,
            }
            v[dst] = exact[kind]()
        case Power(dst, a):
            if not np.array_equal(v[a], np.rint(v[a]), equal_nan=True):
                raise InterpretError(f"{op}: register {a} holds {v[a]}, not whole numbers")
            v[dst] = np.exp2(v[a])
        case _:
            assert_never(op)


def run_memory(state: State, op: Load | Splat | Gather | Store | Scatter | Prefetch) -> None:
    """Move elements between memory and a vector register."""
    v = state.vectors
    match op:
        case Load(dst, base, offset, lanes):
            v[dst, :lanes] = span(state, op, base, offset, lanes)
            v[dst, lanes:] = 0
        case Splat(dst, base, offset, lanes):
            v[dst, :lanes] = span(state, op, base, offset)
            v[dst, lanes:] = 0
        case Store(src, base, offset, lanes, scratch):
            target_span(state, op, base, offset, lanes)[:] = v[src, :lanes]
            spoil(state, scratch, src)
        case Gather(dst, base, offset, stride, lanes, scratch, _):
            spoil(state, scratch, dst)
            for lane in range(lanes):
                v[dst, lane] = span(state, op, base, offset + lane * stride)[0]
            v[dst, lanes:] = 0
        case Scatter(src, base, offset, stride, lanes, scratch):
            for lane in range(lanes):
                target_span(state, op, base, offset + lane * stride)[0] = v[src, lane]
            spoil(state, scratch, src)
        case Prefetch(base, _):
            pointer(state, base, op)
        case _:
            assert_never(op)


def run_arithmetic(state: State, op: Const | Move | Add | Mul | Extremum | Keep | Reduce) -> None:
    """Do an operation between vector registers."""
    v = state.vectors
    match op:
        case Const(dst, value):
            v[dst] = value
        case Move(dst, src):
            v[dst] = v[src]
        case Add(dst, a, b):
            v[dst] = v[a] + v[b]
        case Mul(dst, a, b):
            v[dst] = v[a] * v[b]
        case Extremum(kind, dst, a, b, scratch):
            if dst == b or scratch in (dst, a, b):
                raise InterpretError(f"{op}: dst must not be b, and scratch none of the others")
            v[dst] = REDUCE[kind](v[a], v[b])
            spoil(state, scratch, dst)
        case Keep(dst, a, b, lanes):
            v[dst] = np.concatenate((v[a, :lanes], v[b, lanes:]))
        case Reduce(kind, dst, src, scratch):
            # Halves are folded, as hardware does: the order decides how a sum is rounded.
            rest = v[src].copy()
            while len(rest) > 1:
                rest = REDUCE[kind](rest[: len(rest) // 2], rest[len(rest) // 2 :])
            v[[*scratch, dst]] = state.junk
            v[dst, 0] = rest[0]
        case _:
            assert_never(op)


def run_permutation(state: State, op: Permutation) -> None:
    """Rearrange the lanes of two registers, or of one and a vector in memory."""
    v = state.vectors
    part, half = PART_BYTES // v.itemsize, v.shape[1] // 2
    match op:
        case Zip(dst, a, b, unit, high):
            low = slice(part // 2, None) if high else slice(0, part // 2)
            groups = (v[x].reshape(-1, part)[:, low].reshape(2 * half // part, -1, unit)
                      for x in (a, b))  # fmt: skip
            v[dst] = np.stack(tuple(groups), axis=2).ravel()
        case Pick(dst, a, b, picks):
            kept = (v[x].reshape(-1, part)[list(picks)] for x in (a, b))
            v[dst] = np.concatenate(tuple(kept)).ravel()
        case Evens(dst, a, b):
            v[dst] = np.concatenate((v[a, ::2], v[b, 1::2]))
        case EvensOf(dst, scratch):
            v[dst] = np.concatenate((v[dst, ::2], np.repeat(v[dst, -1], half)))
            spoil(state, scratch, dst)
        case EvensWith(dst, base, offset, lanes, scratch):
            other = span(state, op, base, offset, v.shape[1])[1::2]
            v[dst, :half] = v[dst, ::2].copy()
            v[dst, half:lanes], v[dst, lanes:] = other[2 * half - lanes :], 0
            spoil(state, scratch, dst)
        case _:
            assert_never(op)


def spoil(state: State, scratch: int, kept: int) -> None:
    """Fill a register that the operation may use with NaN, unless it holds the operand itself."""
    if scratch != kept:
        state.vectors[scratch] = state.junk


def run_machine(state: State, op: LaneOp) -> None:
    """Do an operation that `legalize` made; those on 16-byte parts work on the low one."""
    v = state.vectors
    bits = v.view(f"i{v.itemsize}")
    part = PART_BYTES // v.itemsize
    match op:
        case LoadMask(dst, lanes):
            bits[dst] = 0
            bits[dst, :lanes] = -1
        case MaskedLoad(dst, base, offset, lanes, mask):
            held = [int(bit) < 0 for bit in bits[mask]]
            if held != [lane < lanes for lane in range(len(held))]:
                raise InterpretError(f"{op}: register {mask} holds the mask {held}")
            v[dst] = 0
            v[dst, :lanes] = span(state, op, base, offset, lanes)
        case LoadLane(dst, base, offset, lane):
            v[dst, part:] = 0
            v[dst, lane] = span(state, op, base, offset)[0]
        case StoreLane(src, base, offset, lane):
            target_span(state, op, base, offset)[0] = v[src, lane]
        case Extract(dst, src, number):
            low = v[src, number * part : (number + 1) * part].copy()
            v[dst] = 0
            v[dst, :part] = low
        case Insert(dst, a, b, number):
            low = v[b, :part].copy()
            v[dst] = v[a]
            v[dst, number * part : (number + 1) * part] = low
        case Shuffle(dst, src, lanes):
            low = v[src, list(lanes)]
            v[dst] = state.junk
            v[dst, :part] = low
        case _:
            assert_never(op)
