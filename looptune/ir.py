"""What is computed: loop nests over affine accesses, and plans of several nests.

A `Nest` reads as mathematics. For every point of its spatial axes

    output[access] (+)= reduce over the reduction axes of  input_0[access] * input_1[access]

with one or two inputs; the reduction is a sum, a maximum or a minimum. An epilogue may follow:
biases, residuals and activations, applied once to every finished element. Nothing here says in
which order: that is `looptune.schedule`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul
from typing import Literal

from looptune.dtypes import ACCUMULATOR, ITEM_BYTES, DType, fits, is_whole
from looptune.errors import NestError

Reduction = Literal["add", "max", "min"]

IDENTITY: dict[str, float] = {"add": 0.0, "max": -math.inf, "min": math.inf}
LARGEST = (1 << 62) - 1  # bytes: addresses, and twice as much in a sum, fit 64 bits


def check_whole(what: str, *values: object, least: int = -LARGEST) -> None:
    """Raise `NestError` unless every value is an int between `least` and `LARGEST`."""
    for value in values:
        if type(value) is not int or not least <= value <= LARGEST:
            raise NestError(f"{what} is {value!r}; a whole number of at least {least} would do")


def check_kind(what: str, value: object, kind: type) -> None:
    """Raise `NestError` unless `value` is of just this type."""
    if type(value) is not kind:
        raise NestError(f"{what} is {value!r:.80}; a {kind.__name__} would do")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and a float holds it."""
    return type(value) is float or (type(value) is int and fits("float64", value))


def check_dtype(what: str, dtype: object) -> None:
    """Raise `NestError` unless `dtype` is the name of an element type."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise NestError(f"{what} has dtype {dtype!r:.80}; {sorted(ITEM_BYTES)} would do")


def check_instances(what: str, values: object, kind: type) -> None:
    """Raise `NestError` unless `values` is a tuple of `kind`."""
    if type(values) is tuple and {kind}.issuperset(map(type, values)):
        return  # the usual case, at a third of the time
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        raise NestError(f"{what} are {values!r}; a tuple of {kind.__name__} would do")


@dataclass(frozen=True, slots=True)
class Axis:
    """One iteration variable; a reduction axis does not appear in the output."""

    name: str
    extent: int
    reduction: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise NestError(f"an axis has name {self.name!r}; a string would do")
        check_whole(f"the extent of axis {self.name}", self.extent, least=0)
        check_kind(f"whether axis {self.name} is a reduction", self.reduction, bool)


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a tensor and the index a nest gives it.

    `index = offset + sum(coefficients[a] * axis_a)`; `stride` is in elements, and `size` bounds
    the index. The stride of a dimension of size 1 means nothing and is stored as 0.
    """

    size: int
    stride: int
    coefficients: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        check_whole("the size of a dimension", self.size, least=0)
        check_whole("the stride of a dimension", self.stride)
        check_whole("the offset of a dimension", self.offset)
        check_instances("the coefficients of a dimension", self.coefficients, int)
        check_whole("a coefficient of a dimension", *self.coefficients)
        if self.size <= 1 and self.stride:
            object.__setattr__(self, "stride", 0)

    def bounds(self, axes: tuple[Axis, ...]) -> tuple[int, int]:
        """Smallest and largest index over the whole iteration space (extents of at least 1)."""
        reach = [c * (axis.extent - 1) for c, axis in zip(self.coefficients, axes, strict=True)]
        low = self.offset + sum(r for r in reach if r < 0)
        return low, self.offset + sum(r for r in reach if r > 0)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor and the affine access a nest makes to it.

    Reads outside the tensor give `fill`: this is what padding means. Writes may not leave it.
    `moves` are the strides by axis (`stride_of`).
    """

    name: str
    dtype: DType
    dims: tuple[Dim, ...]
    fill: float = 0.0
    moves: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_kind("the name of an operand", self.name, str)
        check_instances(f"the dimensions of {self.name}", self.dims, Dim)
        check_dtype(self.name, self.dtype)
        if not is_number(self.fill):
            raise NestError(f"the fill of {self.name} is {self.fill!r:.80}; a number would do")
        if not fits(ACCUMULATOR[self.dtype], self.fill):
            raise NestError(f"{self.name} of {self.dtype} is filled with {self.fill}: too large")
        # Asked for thousands of times while a schedule is priced or lowered.
        columns = zip(*(dim.coefficients for dim in self.dims), strict=False)
        strides = [dim.stride for dim in self.dims]
        moves = tuple(sum(map(mul, strides, column)) for column in columns)
        object.__setattr__(self, "moves", moves)

    def __hash__(self) -> int:
        # The dimensions' own hashes would take ten times as long, and `moves` tells as much.
        return hash((self.name, self.dtype, self.moves))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor's dimensions."""
        return tuple([dim.size for dim in self.dims])

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor's dimensions, in elements."""
        return tuple([dim.stride for dim in self.dims])

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def base(self) -> int:
        """Address, in elements, of the point where every axis is 0."""
        return sum(dim.stride * dim.offset for dim in self.dims)

    def stride_of(self, axis: int) -> int:
        """Elements by which the address moves when axis number `axis` moves by one."""
        return self.moves[axis] if self.dims else 0

    def overhang(self, axes: tuple[Axis, ...]) -> tuple[tuple[int, int], ...]:
        """Per dimension, how far the access reaches below index 0 and beyond the last one."""
        found = []
        for dim in self.dims:
            low, high = dim.bounds(axes)
            found.append((max(0, -low), max(0, high - dim.size + 1)))
        return tuple(found)

    def padded_dims(self, axes: tuple[Axis, ...]) -> tuple[Dim, ...]:
        """The dimensions that the access reaches beyond."""
        dims = zip(self.dims, self.overhang(axes), strict=True)
        return tuple(dim for dim, margins in dims if any(margins))

    def needs_fill(self, axes: tuple[Axis, ...]) -> bool:
        """Whether some point of the iteration space reads outside the tensor."""
        if any(axis.extent == 0 for axis in axes):
            return False
        return bool(self.padded_dims(axes))


ACTIVATIONS = ("relu", "gelu", "sigmoid", "tanh")


@dataclass(frozen=True, slots=True)
class Activation:
    """x becomes max(x, 0), x * Phi(x), 1 / (1 + exp(-x)) or tanh(x)."""

    kind: Literal["relu", "gelu", "sigmoid", "tanh"]

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATIONS:
            raise NestError(f"activation {self.kind!r} is none of {list(ACTIVATIONS)}")


@dataclass(frozen=True, slots=True)
class Scale:
    """x becomes x * factor."""

    factor: float

    def __post_init__(self) -> None:
        if not is_number(self.factor) or not math.isfinite(self.factor):
            raise NestError(f"scale by {self.factor!r:.80}; a finite number would do")


@dataclass(frozen=True, slots=True)
class Combine:
    """x becomes x + operand or x * operand: a bias, a residual, a folded batch normalisation."""

    kind: Literal["add", "mul"]
    operand: Operand

    def __post_init__(self) -> None:
        if self.kind not in ("add", "mul"):
            raise NestError(f"combining by {self.kind!r}; 'add' or 'mul' would do")
        check_instances("the operand of an epilogue", (self.operand,), Operand)


Step = Activation | Scale | Combine


@dataclass(frozen=True)
class Nest:
    """A perfect loop nest: axes in written order, one output, one or two inputs.

    Two inputs are multiplied; one is taken as it is. `accumulate` adds to (or maximises with)
    what the output held; otherwise the output's old contents are never read. The steps of
    `epilogue` follow in order, on finished elements in the accumulator's type. Raises `NestError`
    for accesses that do not fit the axes, writes outside the output, or two points of the
    spatial axes that write one element.
    """

    axes: tuple[Axis, ...]
    output: Operand
    inputs: tuple[Operand, ...]
    reduction: Reduction = "add"
    accumulate: bool = False
    epilogue: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        check_instances("the axes of a nest", self.axes, Axis)
        check_instances("the inputs of a nest", self.inputs, Operand)
        check_instances("the output of a nest", (self.output,), Operand)
        if len(self.inputs) not in (1, 2):
            raise NestError(f"a nest reads one or two operands, not {len(self.inputs)}")
        if self.reduction not in tuple(IDENTITY):
            raise NestError(f"reduction {self.reduction!r} is none of {sorted(IDENTITY)}")
        check_kind("whether a nest accumulates", self.accumulate, bool)
        if len({axis.name for axis in self.axes}) != len(self.axes):
            raise NestError(f"two axes share a name: {[axis.name for axis in self.axes]}")
        if not isinstance(self.epilogue, tuple) or not all(
            isinstance(step, Step) for step in self.epilogue
        ):
            raise NestError(f"the epilogue is {self.epilogue!r}; a tuple of steps would do")
        for step in self.epilogue:
            if isinstance(step, Scale) and not fits(self.dtype, step.factor):
                raise NestError(f"scale by {step.factor} in {self.dtype}, which cannot hold it")
        for operand in self.operands:
            check_access(operand, self.axes, self.dtype)
        check_output(self.output, self.axes)
        for operand in self.extras:
            check_extra(operand, self.axes)
        if is_whole(self.dtype):
            check_whole_numbers(self)

    @cached_property
    def extras(self) -> tuple[Operand, ...]:
        """The operands of the epilogue."""
        return tuple(step.operand for step in self.epilogue if isinstance(step, Combine))

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The output, the inputs, then the epilogue's: the order of a kernel's pointers."""
        return (self.output, *self.inputs, *self.extras)

    @cached_property
    def dtype(self) -> DType:
        """The type that the nest computes in: the accumulator's."""
        return ACCUMULATOR[self.output.dtype]

    @cached_property
    def spatial(self) -> tuple[int, ...]:
        """Numbers of the axes that appear in the output."""
        return tuple(i for i, axis in enumerate(self.axes) if not axis.reduction)

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Numbers of the axes that are summed (or maximised) away."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.reduction)

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Numbers of the operands that some point reads outside of."""
        operands = enumerate(self.operands)
        return tuple(number for number, op in operands if op.needs_fill(self.axes))

    @cached_property
    def margins(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The `overhang` of every operand."""
        return tuple(op.overhang(self.axes) for op in self.operands)

    @cached_property
    def points(self) -> int:
        """Points of the iteration space."""
        return math.prod(axis.extent for axis in self.axes)

    @cached_property
    def flops(self) -> int:
        """Two operations a point for a product, one for a bare reduction."""
        return self.points * (2 if len(self.inputs) == 2 else 1 if self.reductions else 0)

    @cached_property
    def min_bytes(self) -> int:
        """Least traffic: each element that is touched moves once."""
        return sum(math.prod(op.shape) * op.item_bytes for op in self.operands)

    def __hash__(self) -> int:
        # Equal nests have equal keys, and a key is worked out once; the fields' hashes never are.
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """Digest of the canonical nest: equal for equal problems, whatever the names.

        Axis and tensor names and the strides of size-1 dimensions do not enter; dilation,
        groups, padding, layout, dtype and accumulation do, as coefficients, offsets and strides;
        so does the epilogue.
        """
        axes = [[axis.extent, axis.reduction] for axis in self.axes]
        operands = [
            [op.dtype, op.fill if number in self.padded else 0.0]
            + [[d.size, d.stride, d.coefficients, d.offset] for d in op.dims]
            for number, op in enumerate(self.operands)
        ]
        steps = [step_text(step) for step in self.epilogue]
        text = json.dumps([axes, operands, self.reduction, self.accumulate, *steps])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        names = [axis.name for axis in self.axes]
        extents = ", ".join(f"{axis.name}={axis.extent}" for axis in self.axes)
        reads = " * ".join(access_text(op, names) for op in self.inputs)
        sign = {"add": "+=", "max": "max=", "min": "min="}[self.reduction]
        sign = sign if self.reductions or self.accumulate else "="
        steps = "".join(f" | {step_text(step, names)}" for step in self.epilogue)
        dtypes = "*".join(dict.fromkeys(op.dtype for op in self.inputs))
        dtypes = dtypes if dtypes == self.output.dtype else f"{dtypes} to {self.output.dtype}"
        return f"{access_text(self.output, names)} {sign} {reads}{steps}  [{extents}; {dtypes}]"


def step_text(step: Step, names: list[str] | None = None) -> str:
    """A step of an epilogue: `relu`, `* 0.5`, `+ bias[n]`."""
    match step:
        case Activation(kind):
            return kind
        case Scale(factor):
            return f"* {factor!r}"
        case Combine(kind, operand):
            sign = {"add": "+", "mul": "*"}[kind]
            return sign if names is None else f"{sign} {access_text(operand, names)}"


def access_text(operand: Operand, names: list[str]) -> str:
    """`A[m, 2*h + r - 1]`: one index expression a dimension."""
    indices = []
    for dim in operand.dims:
        terms = [
            name if c == 1 else f"{c}*{name}"
            for c, name in zip(dim.coefficients, names, strict=True)
            if c
        ]
        text = " + ".join(terms)
        if dim.offset or not terms:
            sign = " - " if dim.offset < 0 else " + "
            text = f"{text}{sign}{abs(dim.offset)}" if terms else str(dim.offset)
        indices.append(text)
    return f"{operand.name}[{', '.join(indices)}]"


def check_access(operand: Operand, axes: tuple[Axis, ...], dtype: DType) -> None:
    """Raise `NestError` unless the access names every axis and the dtype accumulates in `dtype`."""
    if ACCUMULATOR[operand.dtype] != dtype:
        raise NestError(f"{operand.name} is {operand.dtype} in a {dtype} nest")
    for number, dim in enumerate(operand.dims):
        if len(dim.coefficients) != len(axes):
            raise NestError(
                f"{operand.name} dimension {number} has {len(dim.coefficients)} coefficients "
                f"for {len(axes)} axes"
            )


def check_extra(operand: Operand, axes: tuple[Axis, ...]) -> None:
    """Raise `NestError` unless an epilogue's operand is read inside its shape, per output point."""
    check_spatial(operand, axes, "an operand of the epilogue")
    if operand.needs_fill(without_reductions(axes)):
        raise NestError(f"the epilogue reads {operand.name} outside its shape {operand.shape}")


def without_reductions(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes, a single point left of each reduction."""
    return tuple(axis if not axis.reduction else replace(axis, extent=1) for axis in axes)


def check_spatial(operand: Operand, axes: tuple[Axis, ...], role: str) -> None:
    """Raise `NestError` if a reduction axis moves the operand."""
    for i, axis in enumerate(axes):
        if axis.reduction and any(dim.coefficients[i] for dim in operand.dims):
            raise NestError(f"reduction axis {axis.name} appears in {operand.name}, {role}")


def check_whole_numbers(nest: Nest) -> None:
    """Raise `NestError` unless a nest of whole numbers is a sum (of products of int8) in int32."""
    copies = len(nest.inputs) == 1 and nest.output.dtype == "int16x2"
    if not (copies or nest.output.dtype == "int32") or nest.reduction != "add" or nest.epilogue:
        raise NestError(
            f"{nest}: whole numbers are summed into int32, without an epilogue; nothing else"
        )
    wide = [op.name for op in nest.inputs if op.dtype == "int32"]
    if len(nest.inputs) == 2 and wide:
        raise NestError(f"{nest}: products are of int8 with int8; {wide} are int32")
    for operand in nest.inputs:
        if not -128 <= operand.fill <= 127 or operand.fill != int(operand.fill):
            raise NestError(f"{operand.name} is filled with {operand.fill}; an int8 would do")


def check_output(output: Operand, axes: tuple[Axis, ...]) -> None:
    """Raise `NestError` unless writes stay inside and are injective in the spatial axes."""
    if any(axis.extent == 0 for axis in axes if not axis.reduction):
        return
    check_spatial(output, axes, "the output")
    if output.needs_fill(without_reductions(axes)):
        raise NestError(f"writes to {output.name} leave its shape {output.shape}")
    strides = sorted(
        (abs(output.stride_of(i)), axis.extent, axis.name)
        for i, axis in enumerate(axes)
        if not axis.reduction and axis.extent > 1
    )
    reach = 0  # mixed radix: each stride must clear everything the smaller ones can reach
    for stride, extent, name in strides:
        if stride <= reach:
            raise NestError(
                f"two points along {name} write one element of {output.name}: "
                f"its stride {stride} does not clear the {reach} elements below it"
            )
        reach += stride * (extent - 1)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array of a plan: an argument, the result or a temporary. Strides in elements."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        check_kind("the name of a tensor", self.name, str)
        check_dtype(self.name, self.dtype)
        check_instances(f"the sizes of {self.name}", self.shape, int)
        check_instances(f"the strides of {self.name}", self.strides, int)
        check_whole(f"a size of {self.name}", *self.shape, least=0)
        check_whole(f"a stride of {self.name}", *self.strides)
        if len(self.shape) != len(self.strides):
            raise NestError(f"{self.name} has shape {self.shape} and strides {self.strides}")
        steps = zip(self.shape, self.strides, strict=True)
        span = sum((size - 1) * abs(stride) for size, stride in steps if size > 1)
        if 0 not in self.shape and max(span, math.prod(self.shape)) > LARGEST // 8:
            raise NestError(
                f"{self.name} of shape {self.shape} and strides {self.strides} spans more than "
                f"{LARGEST} bytes"
            )

    @property
    def bytes(self) -> int:
        """Bytes from the first to the last element; temporaries are contiguous."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Plan:
    """Nests run one after another; operands are matched to tensors by name.

    Most plans hold one nest. `temporaries` live from the first nest that writes them. `channel`
    is the output's dimension that biases belong to.
    """

    nests: tuple[Nest, ...]
    inputs: tuple[Tensor, ...]
    output: Tensor
    temporaries: tuple[Tensor, ...] = ()
    spec: str = ""
    channel: int = -1

    def __post_init__(self) -> None:
        check_instances("the nests of a plan", self.nests, Nest)
        check_instances("the inputs of a plan", self.inputs, Tensor)
        check_instances("the output of a plan", (self.output,), Tensor)
        check_instances("the temporaries of a plan", self.temporaries, Tensor)
        check_kind("the spec of a plan", self.spec, str)
        check_whole("the channel of a plan", self.channel)
        known = {tensor.name: tensor for tensor in self.tensors}
        if len(known) != len(self.tensors):
            raise NestError(
                f"two tensors of the plan share a name: {[t.name for t in self.tensors]}"
            )
        for temporary in self.temporaries:
            if temporary.strides != contiguous(temporary.shape):
                raise NestError(
                    f"temporary {temporary.name} has strides {temporary.strides}; "
                    "row-major ones would do"
                )
        for nest in self.nests:
            for operand in nest.operands:
                tensor = known.get(operand.name)
                if tensor is None:
                    raise NestError(
                        f"the plan has no tensor {operand.name!r}; it has {sorted(known)}"
                    )
                if tensor.shape != operand.shape or tensor.dtype != operand.dtype:
                    raise NestError(
                        f"{operand.name} is {tensor.dtype}{list(tensor.shape)} in the plan and "
                        f"{operand.dtype}{list(operand.shape)} in a nest"
                    )
                check_strides(operand, tensor)
        check_order(self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The output, the inputs, then the temporaries: the order of a kernel's pointers."""
        return (self.output, *self.inputs, *self.temporaries)

    @property
    def dtype(self) -> DType:
        """Element type of the result."""
        return self.output.dtype

    @property
    def flops(self) -> int:
        """Operations of all nests."""
        return sum(nest.flops for nest in self.nests)

    @property
    def min_bytes(self) -> int:
        """Least traffic: inputs and output move once; temporaries may stay in cache."""
        return sum(tensor.bytes for tensor in (self.output, *self.inputs))

    @property
    def accumulates(self) -> bool:
        """Whether the result depends on what the output held before: its first nest adds to it.

        `check_order` sees to it that a later one adds only to what an earlier one has written.
        """
        writers = [nest for nest in self.nests if nest.output.name == self.output.name]
        return writers[0].accumulate

    @cached_property
    def key(self) -> str:
        """Digest of the nests' keys and of which tensor each operand is."""
        number = {tensor.name: i for i, tensor in enumerate(self.tensors)}
        text = json.dumps([[n.key, [number[op.name] for op in n.operands]] for n in self.nests])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __iter__(self) -> Iterator[Nest]:
        return iter(self.nests)


def check_strides(operand: Operand, tensor: Tensor) -> None:
    """Raise `NestError` unless the nest walks the memory that the tensor has."""
    for size, found, wanted in zip(tensor.shape, operand.strides, tensor.strides, strict=True):
        if size > 1 and 0 not in tensor.shape and found != wanted:
            raise NestError(
                f"{operand.name} has strides {tensor.strides} in the plan and {operand.strides} "
                "in a nest"
            )


def check_order(plan: Plan) -> None:
    """Raise `NestError` unless every tensor is written before it is read, and inputs never."""
    inputs = {tensor.name for tensor in plan.inputs}
    written, whole = set(inputs), set[str]()
    for nest in plan.nests:
        for operand in (*nest.inputs, *nest.extras):
            if operand.name not in written or operand.name == nest.output.name:
                raise NestError(f"a nest reads {operand.name} before it is written")
        if nest.output.name in inputs:
            raise NestError(f"a nest writes to the input {nest.output.name}")
        if nest.accumulate and nest.output.name not in whole | {plan.output.name}:
            raise NestError(f"a nest adds to {nest.output.name} before all of it is written")
        if nest.accumulate and nest.output.name in written - whole:
            raise NestError(f"a nest adds to {nest.output.name}, of which only a part is written")
        written.add(nest.output.name)
        if nest.accumulate or covers(nest):
            whole.add(nest.output.name)
    if plan.output.name not in written:
        raise NestError(f"no nest of the plan writes to its output {plan.output.name}")


def covers(nest: Nest) -> bool:
    """Whether the nest writes every element of its output: its writes are distinct."""
    return math.prod(nest.axes[a].extent for a in nest.spatial) == math.prod(nest.output.shape)


def plan_of(nest: Nest, spec: str = "") -> Plan:
    """The plan that holds just `nest`."""
    output, *inputs = (Tensor(op.name, op.dtype, op.shape, op.strides) for op in nest.operands)
    return Plan((nest,), tuple(inputs), output, spec=spec)
