"""The target-neutral vector micro-program between the lowering and the backends.

A `Program` is structured code over three kinds of registers, all numbered from 0:

- *scalars* hold integers: loop counters, ranges, saved pointers. Scalars 0 and 1 (`BEGIN`,
  `END`) arrive as arguments and bound the parallel loop.
- *pointers* hold byte addresses. Memory is addressed as pointer + non-negative constant.
- *vectors* hold `lanes` elements of the Program's dtype; the lowering has already chosen the
  physical register, so a backend allocates nothing but scalars and pointers.

Memory may hold narrower elements than the registers: the operations ending in `As` convert, and
name the *format* in memory. In a Program of int32, products are of the int16 halves of a lane:
`int8_pair` loads an int8 as the pair (value, 0).

Partial operations carry a static number of `lanes`; a partial or splat load zeroes the lanes
beyond. `legalize` rewrites what a target cannot do; the operations marked *machine* only appear
after it. Operations are NamedTuples: three times cheaper to build than frozen dataclasses, and
building them is a third of code generation. `str(program)` prints all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from looptune.dtypes import DType
from looptune.target import Target

Format = Literal["float16", "bfloat16", "int8", "int8_pair"]
FORMAT_BYTES: dict[Format, int] = {"float16": 2, "bfloat16": 2, "int8": 1, "int8_pair": 1}

BEGIN, END = 0, 1  # scalars that arrive as arguments
SCRATCH = -1  # operand number of the scratch memory


class Set(NamedTuple):
    """Scalar dst = value."""

    dst: int
    value: int


class Copy(NamedTuple):
    """Scalar dst = src."""

    dst: int
    src: int


class Min(NamedTuple):
    """Scalar dst = min(src, limit), limit a constant."""

    dst: int
    src: int
    limit: int


class Scale(NamedTuple):
    """Scalar dst = src * factor, factor a constant."""

    dst: int
    src: int
    factor: int


class Subtract(NamedTuple):
    """Scalar dst -= src."""

    dst: int
    src: int


class Base(NamedTuple):
    """Pointer dst = address of operand number `operand` (or SCRATCH) + offset bytes."""

    pointer: int
    operand: int
    offset: int


class Step(NamedTuple):
    """Pointer += bytes, any sign."""

    pointer: int
    bytes: int


class Advance(NamedTuple):
    """Pointer += scalar * bytes."""

    pointer: int
    scalar: int
    bytes: int


class Save(NamedTuple):
    """Scalar = pointer."""

    scalar: int
    pointer: int


class Restore(NamedTuple):
    """Pointer = scalar."""

    pointer: int
    scalar: int


class Const(NamedTuple):
    """Every lane of dst = value (0, 1, inf, -inf, ...)."""

    dst: int
    value: float


class Move(NamedTuple):
    """Vector dst = src."""

    dst: int
    src: int


class Load(NamedTuple):
    """Lanes below `lanes` of dst = consecutive elements at pointer + offset; the rest zero."""

    dst: int
    pointer: int
    offset: int
    lanes: int


class Splat(NamedTuple):
    """Lanes below `lanes` of dst = the element at pointer + offset; the rest zero."""

    dst: int
    pointer: int
    offset: int
    lanes: int


class Gather(NamedTuple):
    """Lane i of dst = the element at pointer + offset + i * stride bytes, i < lanes; rest zero.

    Every address is non-negative relative to the pointer, also for a negative stride.
    `scratch` is a free vector register; `dense` says that the elements between may be read.
    """

    dst: int
    pointer: int
    offset: int
    stride: int
    lanes: int
    scratch: int
    dense: bool = False


class Store(NamedTuple):
    """Consecutive elements at pointer + offset = lanes below `lanes` of src; no other byte.

    `scratch` is a free vector register.
    """

    src: int
    pointer: int
    offset: int
    lanes: int
    scratch: int


class Scatter(NamedTuple):
    """The element at pointer + offset + i * stride bytes = lane i of src, i < lanes."""

    src: int
    pointer: int
    offset: int
    stride: int
    lanes: int
    scratch: int


class LoadAs(NamedTuple):
    """`Load` of elements of a narrow format, converted."""

    dst: int
    pointer: int
    offset: int
    lanes: int
    format: Format


class SplatAs(NamedTuple):
    """`Splat` of an element of a narrow format, converted."""

    dst: int
    pointer: int
    offset: int
    lanes: int
    format: Format


class GatherAs(NamedTuple):
    """`Gather` of elements of a narrow format, converted; `scratch` is a free register."""

    dst: int
    pointer: int
    offset: int
    stride: int
    lanes: int
    scratch: int
    format: Format


class StoreAs(NamedTuple):
    """`Store` rounded to a narrow format, ties to even. Leaves junk in src and both scratch."""

    src: int
    pointer: int
    offset: int
    lanes: int
    scratch: tuple[int, int]
    format: Format


class ScatterAs(NamedTuple):
    """`Scatter` rounded to a narrow format, ties to even. Leaves junk in src and both scratch."""

    src: int
    pointer: int
    offset: int
    stride: int
    lanes: int
    scratch: tuple[int, int]
    format: Format


class Fma(NamedTuple):
    """dst += a * b, rounded once where the target fuses; of whole numbers, see above."""

    dst: int
    a: int
    b: int


class FmaLoad(NamedTuple):
    """dst += a * the full vector at pointer + offset."""

    dst: int
    a: int
    pointer: int
    offset: int


class FmaSplat(NamedTuple):
    """dst += a * the element at pointer + offset, broadcast."""

    dst: int
    a: int
    pointer: int
    offset: int


class Add(NamedTuple):
    """dst = a + b."""

    dst: int
    a: int
    b: int


class Mul(NamedTuple):
    """dst = a * b."""

    dst: int
    a: int
    b: int


class Div(NamedTuple):
    """dst = a / b."""

    dst: int
    a: int
    b: int


class Bound(NamedTuple):
    """dst = the larger ("max") or smaller of limit and a; a where either is a NaN."""

    kind: str
    dst: int
    limit: int
    a: int


class WithConst(NamedTuple):
    """Arithmetic with the same constant in every lane.

    dst = a + value ("add"), a * value ("mul"), dst * a + value ("horner"), dst + a * value
    ("fma"); the last two rounded once where the target fuses.
    """

    kind: str
    dst: int
    a: int
    value: float


class Power(NamedTuple):
    """dst = 2 ** a, for whole a that leave the result a normal number."""

    dst: int
    a: int


class Extremum(NamedTuple):
    """dst = maximum (or minimum) of a and b; a NaN in either gives NaN, as in NumPy.

    `scratch` is a free vector register that is neither dst, a nor b; dst may be a but not b.
    """

    kind: str
    dst: int
    a: int
    b: int
    scratch: int


class Keep(NamedTuple):
    """Lanes below `lanes` of dst = those of a, the others = those of b."""

    dst: int
    a: int
    b: int
    lanes: int


class Reduce(NamedTuple):
    """Lane 0 of dst = the reduction ("add", "max", "min") of all lanes of src; the rest is junk.

    `scratch` holds two free vector registers; dst may be src.
    """

    kind: str
    dst: int
    src: int
    scratch: tuple[int, int]


class Zip(NamedTuple):
    """In every 16-byte part of dst: groups of `unit` lanes, in turn from a and from b.

    They come from the low (or `high`) halves of the same part of a and b.
    """

    dst: int
    a: int
    b: int
    unit: int
    high: bool


class Pick(NamedTuple):
    """The 16-byte parts of dst: first parts `picks` of a, then parts `picks` of b."""

    dst: int
    a: int
    b: int
    picks: tuple[int, ...]


class Evens(NamedTuple):
    """*machine* dst = the even lanes of a, then the odd lanes of b."""

    dst: int
    a: int
    b: int


class EvensOf(NamedTuple):
    """*machine* dst = its even lanes, then its last lane again and again.

    `scratch` is a free vector register.
    """

    dst: int
    scratch: int


class EvensWith(NamedTuple):
    """*machine* dst = its even lanes, then the odd lanes of the vector at pointer + offset, those
    that bring the number of lanes to `lanes`; the rest zero.

    The upper half of dst so continues the lower where the vector ends with the last element that
    is wanted. `scratch` is a free vector register.
    """

    dst: int
    pointer: int
    offset: int
    lanes: int
    scratch: int


class Prefetch(NamedTuple):
    """Hint that the line at pointer + offset is wanted."""

    pointer: int
    offset: int


class MulPairs(NamedTuple):
    """*machine* Lane i of dst = the sum of the products of the two int16 in lane i of a and b."""

    dst: int
    a: int
    b: int


class LoadMask(NamedTuple):
    """*machine* Vector dst = all-ones in the lanes below `lanes`, zero beyond."""

    dst: int
    lanes: int


class MaskedLoad(NamedTuple):
    """*machine* Like `Load`, with the mask of `lanes` lanes held in vector register `mask`."""

    dst: int
    pointer: int
    offset: int
    lanes: int
    mask: int


class LoadLane(NamedTuple):
    """*machine* Lane `lane` of the low 16 bytes of dst = an element; the other lanes of the
    low 16 bytes keep their values, those above are zeroed."""

    dst: int
    pointer: int
    offset: int
    lane: int


class StoreLane(NamedTuple):
    """*machine* The element at pointer + offset = lane `lane` of the low 16 bytes of src."""

    src: int
    pointer: int
    offset: int
    lane: int


class Extract(NamedTuple):
    """*machine* Low 16 bytes of dst = 16-byte part number `part` of src; the rest zero."""

    dst: int
    src: int
    part: int


class Insert(NamedTuple):
    """*machine* dst = a with 16-byte part number `part` replaced by the low 16 bytes of b."""

    dst: int
    a: int
    b: int
    part: int


class Shuffle(NamedTuple):
    """*machine* Lane i of the low 16 bytes of dst = lane `lanes[i]` of the low 16 bytes of src."""

    dst: int
    src: int
    lanes: tuple[int, ...]


class Loop(NamedTuple):
    """Do `body`, then counter -= step, while counter > 0. `guarded`: test before the first."""

    counter: int
    step: int
    body: tuple[Op, ...]
    guarded: bool = False


class While(NamedTuple):
    """While counter >= step: do `body`, then counter -= step."""

    counter: int
    step: int
    body: tuple[Op, ...]


class Case(NamedTuple):
    """One arm of a switch."""

    value: int
    body: tuple[Op, ...]


class Switch(NamedTuple):
    """Do the arm whose value the scalar has. The arms are exhaustive: the last needs no test."""

    scalar: int
    cases: tuple[Case, ...]


class IfZero(NamedTuple):
    """Do `then` if the scalar is 0, else `otherwise`."""

    scalar: int
    then: tuple[Op, ...]
    otherwise: tuple[Op, ...]


ScalarOp = Set | Copy | Min | Scale | Subtract
PointerOp = Base | Step | Advance | Save | Restore
VectorOp = (
    Const | Move | Load | Splat | Gather | Store | Scatter | Fma | FmaLoad | FmaSplat | Add | Mul
    | Extremum | Keep | Reduce | Zip | Pick | Prefetch
    | LoadAs | SplatAs | GatherAs | StoreAs | ScatterAs
    | Div | Bound | WithConst | Power
)  # fmt: skip
MachineOp = (
    LoadMask | MaskedLoad | LoadLane | StoreLane | Extract | Insert | Shuffle | Evens
    | EvensOf | EvensWith | MulPairs
)  # fmt: skip
Control = Loop | While | Switch | IfZero
Op = ScalarOp | PointerOp | VectorOp | MachineOp | Control


@dataclass(frozen=True)
class Program:
    """Code for one kernel, `f(operand pointers, scratch, begin, end)`.

    `operands` are the sizes and roles a caller must provide; `scalars` and `pointers` count the
    registers used (scalars include BEGIN and END, and are numbered so that the deepest-used come
    first); `scratch_bytes` of 64-byte-aligned memory are wanted. `trips` is the number of
    iterations of the parallel loop, 1 where there is none: the whole job is begin=0, end=trips.
    With `private_scratch` every thread needs scratch of its own; what earlier Programs left in
    theirs is then one more operand, the last.
    """

    target: Target
    dtype: DType
    operands: int
    scalars: int
    pointers: int
    scratch_bytes: int
    trips: int
    body: tuple[Op, ...]
    private_scratch: bool = False

    @property
    def lanes(self) -> int:
        """Elements of a full vector."""
        return self.target.lanes(self.dtype)

    def __str__(self) -> str:
        head = f"program {self.target.name} {self.dtype}x{self.lanes} scratch={self.scratch_bytes}"
        return "\n".join([f"{head} trips={self.trips}", *text_lines(self.body, 1)])


def text_lines(body: tuple[Op, ...], depth: int) -> Iterator[str]:
    """One line an operation, indented by nesting."""
    pad = "  " * depth
    for op in body:
        match op:
            case Loop(counter, step, inner, guarded):
                word = "for" if guarded else "do"
                yield f"{pad}{word} s{counter} by {step}:"
                yield from text_lines(inner, depth + 1)
            case While(counter, step, inner):
                yield f"{pad}while s{counter} >= {step}:"
                yield from text_lines(inner, depth + 1)
            case Switch(scalar, cases):
                for case in cases:
                    yield f"{pad}case s{scalar} == {case.value}:"
                    yield from text_lines(case.body, depth + 1)
            case IfZero(scalar, then, otherwise):
                yield f"{pad}if s{scalar} == 0:"
                yield from text_lines(then, depth + 1)
                yield f"{pad}else:"
                yield from text_lines(otherwise, depth + 1)
            case _:
                fields = " ".join(f"{k}={v}" for k, v in zip(op._fields, op, strict=True))
                yield f"{pad}{type(op).__name__.lower()} {fields}"


def walk(body: tuple[Op, ...]) -> Iterator[Op]:
    """Every operation, outer before inner, in program order."""
    for op in body:
        yield op
        match op:
            case Loop(body=inner) | While(body=inner):
                yield from walk(inner)
            case Switch(cases=cases):
                for case in cases:
                    yield from walk(case.body)
            case IfZero(then=then, otherwise=otherwise):
                yield from walk(then)
                yield from walk(otherwise)
            case _:
                pass
