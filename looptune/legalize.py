"""Rewrite the operations that a target lacks into ones that it has: `legalize(program)`.

Contract with the lowering: on a target without masks, the last vector register belongs to this
module wherever the Program holds a partial `Load` or `Splat`; it carries the mask (or, for
zeroing, a zero). It does, too, where whole numbers are multiplied in two steps, for the products.
Nothing else is allocated here: rewrites use the operation's own scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from looptune.dtypes import ITEM_BYTES, DType, is_whole
from looptune.program import (
    Add,
    Case,
    Const,
    Evens,
    EvensOf,
    EvensWith,
    Extract,
    Extremum,
    Fma,
    Gather,
    IfZero,
    Insert,
    Keep,
    Load,
    LoadLane,
    LoadMask,
    Loop,
    MaskedLoad,
    MulPairs,
    Op,
    Pick,
    PointerOp,
    Program,
    Reduce,
    ScalarOp,
    Scatter,
    Shuffle,
    Splat,
    Store,
    StoreLane,
    Switch,
    VectorOp,
    While,
    Zip,
)
from looptune.target import Target

PART_BYTES = 16  # what lane operations work on
NO_MASK = -1

SIZED = frozenset({Load, Splat, Store})
SHUFFLES = frozenset({Zip, Pick})  # these may overwrite the register that holds the mask
COMPOSED = frozenset({Gather, Scatter, Reduce})
SIMPLE = frozenset(get_args(ScalarOp) + get_args(PointerOp) + get_args(VectorOp)) - COMPOSED


@dataclass(frozen=True)
class Machine:
    """What one target does natively with one dtype.

    `plain` are the operations to leave alone whatever their lanes, `moves` and `splats` the lane
    counts of loads, stores and splats that need no rewriting. It may be that it `permutes` the
    lanes of two vectors at will.
    """

    lanes: int
    part: int
    reserved: int
    plain: frozenset[type]
    moves: frozenset[int]
    permutes: bool

    def native(self, op: Load | Splat | Store) -> bool:
        """Whether the target has `op` for this number of lanes."""
        return op.lanes == self.lanes or (type(op) is not Splat and op.lanes in self.moves)


@lru_cache(maxsize=64)
def machine_of(target: Target, dtype: DType) -> Machine:
    """The machine that `target` is for elements of `dtype`."""
    part = PART_BYTES // ITEM_BYTES[dtype]
    plain = SIMPLE if target.masks else SIMPLE - SIZED - SHUFFLES
    plain = plain if target.dot or not is_whole(dtype) else plain - {Fma}
    moves = frozenset(lanes for lanes in (1, 2, 4) if lanes <= part)
    reserved = target.vector_registers - 1
    return Machine(target.lanes(dtype), part, reserved, plain, moves, permutes=target.masks)


def legalize(program: Program) -> Program:
    """The same computation in operations that `program.target` has.

    Control flow keeps its shape. Operations that the target has are passed on as they are.
    """
    machine = machine_of(program.target, program.dtype)
    return replace(program, body=legal_body(program.body, machine))


def legal_body(body: tuple[Op, ...], machine: Machine) -> tuple[Op, ...]:
    """Rewrite a body; a mask stays in the reserved register until control flow interferes."""
    plain = machine.plain
    out: list[Op] = []
    held = NO_MASK
    for op in body:
        if type(op) in plain or (type(op) in SIZED and machine.native(op)):  # type: ignore[arg-type]
            out.append(op)
            continue
        match op:
            case Load(lanes=lanes):
                out.extend(masked_load(op, machine, held == lanes))
                held = lanes
            case Splat(dst, pointer, offset, 1):
                out.append(Load(dst, pointer, offset, 1))
            case Splat():
                out.extend(partial_splat(op, machine, held == 0))
                held = 0
            case Fma(dst, a, b):
                out.append(MulPairs(machine.reserved, a, b))
                out.append(Add(dst, dst, machine.reserved))
                held = NO_MASK
            case Zip(dst) | Pick(dst):
                out.append(op)
                held = NO_MASK if dst == machine.reserved else held
            case Store() | Gather() | Scatter() | Reduce():
                out.extend(composed(op, machine))
            case _:
                out.append(legal_control(op, machine))
                held = NO_MASK
    return tuple(out)


def masked_load(op: Load, machine: Machine, held: bool) -> Iterator[Op]:
    """Load through a mask, which may be `held` already."""
    if not held:
        yield LoadMask(machine.reserved, op.lanes)
    yield MaskedLoad(*op, mask=machine.reserved)


def partial_splat(op: Splat, machine: Machine, held: bool) -> Iterator[Op]:
    """Splat to all lanes, then take the others from a zero, which is a mask of no lanes."""
    yield op._replace(lanes=machine.lanes)
    if not held:
        yield Const(machine.reserved, 0.0)
    yield Keep(op.dst, op.dst, machine.reserved, op.lanes)


def composed(op: Store | Gather | Scatter | Reduce, machine: Machine) -> Iterator[Op]:
    """What is done by lanes and 16-byte parts."""
    match op:
        case Store():
            return partial_store(op, machine)
        case Gather():
            return gather(op, machine)
        case Scatter():
            return scatter(op, machine)
        case Reduce():
            return reduction(op, machine)


def legal_control(op: Op, machine: Machine) -> Op:
    """Rewrite the bodies of a control operation."""
    match op:
        case Loop() | While():
            return op._replace(body=legal_body(op.body, machine))
        case Switch(scalar, cases):
            arms = (Case(case.value, legal_body(case.body, machine)) for case in cases)
            return Switch(scalar, tuple(arms))
        case IfZero(scalar, then, otherwise):
            return IfZero(scalar, legal_body(then, machine), legal_body(otherwise, machine))
        case _:
            raise AssertionError(f"{op} is a machine operation: the program is legalized already")


def parts(lanes: int, machine: Machine) -> Iterator[tuple[int, range]]:
    """The 16-byte parts that `lanes` lanes touch, and the vector lanes in each."""
    for first in range(0, lanes, machine.part):
        yield first // machine.part, range(first, min(first + machine.part, lanes))


def partial_store(op: Store, machine: Machine) -> Iterator[Op]:
    """Store lane by lane pair by part: masked stores take ten times as long on some machines."""
    size = PART_BYTES // machine.part
    for part, span in parts(op.lanes, machine):
        source, at = op.src, op.offset + span.start * size
        if part:
            source = op.scratch
            yield Extract(source, op.src, part)
        whole = max(n for n in machine.moves if n <= len(span))
        yield Store(source, op.pointer, at, whole, op.scratch)
        for lane in range(whole, len(span)):
            yield StoreLane(source, op.pointer, at + lane * size, lane)


def gather(op: Gather, machine: Machine) -> Iterator[Op]:
    """Collect elements that lie apart.

    Every second element is in two vectors: those between are read, too, but none behind the last.
    """
    item = PART_BYTES // machine.part
    if op.dense and op.stride == 2 * item and machine.permutes and op.lanes > 1:
        return permuted(op, machine, item)
    if op.dense and op.stride == 2 * item and op.lanes == machine.lanes:
        return exchanged(op, item)
    return inserted(op, machine)


def permuted(op: Gather, machine: Machine, item: int) -> Iterator[Op]:
    """Every second element from one vector, or from two of which the second ends with the last."""
    reach = 2 * op.lanes - 1
    if reach < machine.lanes:
        yield Load(op.dst, op.pointer, op.offset, reach)
        yield EvensOf(op.dst, op.scratch)
        return
    behind = op.offset + (reach - machine.lanes) * item
    yield Load(op.dst, op.pointer, op.offset, machine.lanes)
    yield EvensWith(op.dst, op.pointer, behind, op.lanes, op.scratch)


def exchanged(op: Gather, item: int) -> Iterator[Op]:
    """Every second element of a full vector, by shuffles of two."""
    yield Load(op.dst, op.pointer, op.offset, op.lanes)
    yield Load(op.scratch, op.pointer, op.offset + (op.lanes - 1) * item, op.lanes)
    yield Evens(op.dst, op.dst, op.scratch)


def inserted(op: Gather, machine: Machine) -> Iterator[Op]:
    """Each 16-byte part lane by lane, all but the first in the scratch register."""
    for part, span in parts(op.lanes, machine):
        register = op.scratch if part else op.dst
        offsets = [op.offset + lane * op.stride for lane in span]
        yield Load(register, op.pointer, offsets[0], 1)
        for lane, offset in enumerate(offsets[1:], 1):
            yield LoadLane(register, op.pointer, offset, lane)
        if part:
            yield Insert(op.dst, op.dst, op.scratch, part)


def scatter(op: Scatter, machine: Machine) -> Iterator[Op]:
    """Bring each 16-byte part down and store its lanes one by one."""
    for part, span in parts(op.lanes, machine):
        source = op.scratch if part else op.src
        if part:
            yield Extract(source, op.src, part)
        for lane, number in enumerate(span):
            offset = op.offset + number * op.stride
            if lane:
                yield StoreLane(source, op.pointer, offset, lane)
            else:
                yield Store(source, op.pointer, offset, 1, op.scratch)


def reduction(op: Reduce, machine: Machine) -> Iterator[Op]:
    """Fold the 16-byte parts onto part 0, then its halves onto lane 0."""
    value, spare = op.scratch
    count = machine.lanes // machine.part
    source = op.src
    for part in range(1, count):
        yield Extract(value, source, part)
        # Parts still to come must pass unchanged: + 0 keeps them, a maximum wants them twice.
        if part + 1 < count and op.kind != "add":
            yield Insert(value, source, value, 0)
        yield combined(op.kind, op.dst, source, value, spare)
        source = op.dst
    half = machine.part // 2
    while half:
        lanes = tuple(half + lane % half for lane in range(machine.part))
        yield Shuffle(value, source, lanes)
        yield combined(op.kind, op.dst, source, value, spare)
        source = op.dst
        half //= 2


def combined(kind: str, dst: int, a: int, b: int, scratch: int) -> Op:
    """One step of a reduction."""
    return Add(dst, a, b) if kind == "add" else Extremum(kind, dst, a, b, scratch)
