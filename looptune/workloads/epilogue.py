"""What follows a contraction: `fuse(plan, "bias,relu")` appends it to the plan's last nests.

Steps, in order, by name: `relu`, `gelu`, `sigmoid`, `tanh`; `scale:0.125`; `bias`, one value an
output channel (a convolution's filters, else the last dimension), `bias:row` and `bias:column`,
one value a row or a column of the output's last two dimensions; `batchnorm`, a factor and then
a shift a channel; `residual`, a row-major array of the output's shape. What a step reads is one
more input of the plan, behind the others and in the order of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from looptune.dtypes import ACCUMULATOR, DType, fits, is_whole
from looptune.errors import SpecError, UnsupportedError
from looptune.ir import (
    ACTIVATIONS,
    Activation,
    Combine,
    Dim,
    Nest,
    Operand,
    Plan,
    Scale,
    Step,
    Tensor,
    contiguous,
)

WORDS = (*ACTIVATIONS, "scale:FACTOR", "bias", "bias:row", "bias:column", "batchnorm", "residual")
Made = tuple[str, Activation | Scale | Tensor]


def fuse(plan: Plan, epilogue: str | Sequence[str]) -> Plan:
    """`plan` with an epilogue, its steps in a sequence or a string with commas between.

    Raises `SpecError` for an unknown step, `UnsupportedError` where the output has no such
    dimension, holds whole numbers, or is the sum of several nests.
    """
    words = epilogue.split(",") if isinstance(epilogue, str) else epilogue
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise SpecError(f"epilogue {epilogue!r}: a string or a sequence of {list(WORDS)} would do")
    names = [word.strip() for word in words]
    steps: list[Made] = []
    taken = {tensor.name for tensor in plan.tensors}
    for word in names:
        for made in made_steps(plan, word, taken):
            steps.append(made)
            if isinstance(made[1], Tensor):
                taken.add(made[1].name)
    if is_whole(plan.dtype):
        raise UnsupportedError(f"epilogue {epilogue!r} on {plan.dtype}: whole numbers take none")
    writers = [nest for nest in plan.nests if nest.output.name == plan.output.name]
    if any(nest.accumulate for nest in writers[1:]):
        raise UnsupportedError("an epilogue on an output that several nests add to")
    nests = tuple(
        replace(nest, epilogue=(*nest.epilogue, *(applied(nest, *step) for step in steps)))
        if nest.output.name == plan.output.name
        else nest
        for nest in plan.nests
    )
    extras = tuple(value for _, value in steps if isinstance(value, Tensor))
    return replace(plan, nests=nests, inputs=(*plan.inputs, *extras))


def made_steps(plan: Plan, word: str, taken: set[str]) -> Iterator[Made]:
    """The steps of one word: what to do, with the tensor it reads, if any."""
    output = plan.output
    name, colon, argument = word.partition(":")
    if colon and not argument:
        raise SpecError(f"epilogue {word!r} says nothing behind its colon; {list(WORDS)} would do")
    match name:
        case "relu" | "gelu" | "sigmoid" | "tanh" if not argument:
            yield "apply", Activation(name)
        case "scale" if argument:
            yield "apply", Scale(number(word, argument, ACCUMULATOR[output.dtype]))
        case "bias" if argument in ("", "row", "column"):
            dim = {"": plan.channel, "row": -2, "column": -1}[argument]
            yield f"add {dim}", vector(output, dim, word, fresh("bias", taken))
        case "batchnorm" if not argument:
            factor = vector(output, plan.channel, word, fresh("factor", taken))
            yield f"mul {plan.channel}", factor
            yield f"add {plan.channel}", replace(factor, name=fresh("shift", taken))
        case "residual" if not argument:
            shape = output.shape
            yield "add", Tensor(fresh("residual", taken), output.dtype, shape, contiguous(shape))
        case _:
            raise SpecError(f"epilogue {word!r} is none of {list(WORDS)}")


def number(word: str, text: str, dtype: DType) -> float:
    """A finite number in a step, which the type can hold."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SpecError(f"epilogue {word!r}: {text!r} is no finite number")
    if not fits(dtype, value):
        raise SpecError(f"epilogue {word!r}: {text!r} is too large for {dtype}")
    return value


def fresh(name: str, taken: set[str]) -> str:
    """`name`, with a number where the plan has it already."""
    names = (name if not count else f"{name}{count}" for count in range(len(taken) + 1))
    return next(found for found in names if found not in taken)


def vector(output: Tensor, dim: int, word: str, name: str) -> Tensor:
    """A tensor along dimension `dim` of the output."""
    if not -len(output.shape) <= dim < len(output.shape):
        raise UnsupportedError(
            f"epilogue {word!r}: the output has {len(output.shape)} dimensions, none of them {dim}"
        )
    return Tensor(name, output.dtype, (output.shape[dim],), (1,))


def applied(nest: Nest, what: str, value: Activation | Scale | Tensor) -> Step:
    """A step in the nest: its operand walks the output's dimensions."""
    if not isinstance(value, Tensor):
        return value
    kind, _, dim = what.partition(" ")
    dims = nest.output.dims if not dim else (nest.output.dims[int(dim)],)
    walked = tuple(
        Dim(size, stride, out.coefficients, out.offset)
        for out, size, stride in zip(dims, value.shape, value.strides, strict=True)
    )
    return Combine("mul" if kind == "mul" else "add", Operand(value.name, value.dtype, walked))
