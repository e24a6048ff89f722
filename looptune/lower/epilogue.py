"""What is done to a finished register tile before it is stored: biases, residuals, activations.

The exponential is 2 ** n * exp(r) with n whole and |r| <= ln(2) / 2 (Cody and Waite's reduction,
the product with ln(2) in two parts), exp(r) - 1 a polynomial. GELU takes the tail of the normal
distribution, Q(t), as exp(-t * t / 2) * u * P(1 - 2 u) with u = 1 / (1 + t / 5). The coefficients
were fitted, and the errors that ARCHITECTURE.md states measured, by `experiments/activations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from looptune.ir import Activation, Combine, Scale
from looptune.lower.region import Read, Tile, read_vector, reads_of
from looptune.program import Add, Bound, Const, Div, Fma, Mul, Op, Power, WithConst


class Function(NamedTuple):
    """Constants of one type: see the module's docstring.

    `least` and `most` bound the argument of an exponential that is a normal number, and so is its
    inverse; beyond `saturated` tanh(x / 2) is 1; at `negligible` the tail is nearly the smallest
    normal number: denormal ones would take a hundred cycles each. `ln2` is ln(2) in two parts,
    the first so short that its whole multiples are exact; adding and subtracting `to_whole`
    rounds to a whole number.
    """

    least: float
    most: float
    saturated: float
    negligible: float
    ln2: tuple[float, float]
    to_whole: float
    exponential: tuple[float, ...]
    tail: tuple[float, ...]


TAIL_SCALE = 0.2
FUNCTIONS = {
    "float32": Function(
        least=-87.3,
        most=87.0,
        saturated=18.5,
        negligible=13.0,
        ln2=(0.693145751953125, 1.4286068203094172e-06),
        to_whole=1.5 * 2.0**23,
        exponential=(
            1.0000000108364156, 0.50000000135387299, 0.16666504613032611, 0.041666464197405692,
            0.0083692202918036074, 0.0013933730715792083,
        ),
        tail=(
            0.15383860867563925, -0.13307648244641799, 0.099061260631977473, -0.06270725990281607,
            0.033001340518782315, -0.013819119098415988, 0.0041789696651868751,
            -0.00060160367154317595, -0.00021039376952822305, 7.425335142040217e-5,
        ),
    ),
    "float64": Function(
        least=-708.0,
        most=708.0,
        saturated=39.0,
        negligible=37.5,
        ln2=(0.6931471805601177, -1.7239444525614835e-13),
        to_whole=1.5 * 2.0**52,
        exponential=(
            1.0, 0.50000000000000057, 0.16666666666666671, 0.041666666666572391,
            0.0083333333333260831, 0.0013888888932751, 0.00019841269875002279,
            2.4801504014426905e-5, 2.7557255170000887e-6, 2.7626495546432196e-7,
            2.5105312729622102e-8,
        ),
        tail=(
            0.15383860995001259, -0.13307650057801134, 0.099061123193995236,
            -0.062706631334260695, 0.03300407323407956, -0.013823727741267672,
            0.0041590133599192856, -0.00059867535404288998, -0.0001595738790537677,
            0.00010897981272889743, -1.1875149685868246e-5, -9.952563281092363e-6,
            3.3362584797824113e-6, 7.9618748801812645e-7, -5.5389012891823715e-7,
            -6.7350259727817418e-8, 8.6677381679809975e-8, 8.5066827320437592e-9,
            -1.3219336746222992e-8, -1.9125837013869135e-9, 1.532862566616437e-9,
            3.7012000183967998e-10, -2.5212873862819757e-11,
        ),
    ),
}  # fmt: skip


def epilogue(tile: Tile) -> Iterator[Op]:
    """The steps of the nest's epilogue, each on all accumulators of the tile."""
    nest = tile.form.nest
    operand = 1 + len(nest.inputs)
    for step in nest.epilogue:
        match step:
            case Scale(factor):
                yield from (WithConst("mul", r, r, factor) for r in range(tile.count))
            case Combine(kind):
                yield from combined(tile, operand, kind)
                operand += 1
            case Activation("relu"):
                zero = tile.temporaries[0]
                yield Const(zero, 0.0)
                yield from (Bound("max", r, zero, r) for r in range(tile.count))
            case Activation(kind):
                emit = ACTIVATE[kind]
                for register in range(tile.count):
                    yield from emit(register, tile.temporaries, FUNCTIONS[nest.dtype])


def combined(tile: Tile, operand: int, kind: str) -> Iterator[Op]:
    """Add or multiply by the vectors of an operand; one that is wanted again is kept a while."""
    access = tile.accesses[operand]
    widths = (1,) if tile.form.reduces_lanes else ()
    (reads,) = reads_of(tile, operand, [0], widths)
    free = list(tile.temporaries[:-1])  # the last serves gathers
    held: dict[Read, int] = {}
    for register, read in enumerate(reads):
        if read not in held:
            into = free.pop() if free else held.pop(next(iter(held)))
            held[read] = into
            yield read_vector(tile, access, into, read)
        yield (
            Add(register, register, held[read])
            if kind == "add"
            else Mul(register, register, held[read])
        )


def exponential(z: int, n: int, p: int, constants: Function) -> Iterator[Op]:
    """p = exp(r) - 1 and n = 2 ** n for z = n * ln(2) + r; z becomes r."""
    yield WithConst("mul", n, z, 1 / math.log(2))
    yield WithConst("add", n, n, constants.to_whole)
    yield WithConst("add", n, n, -constants.to_whole)
    for part in constants.ln2:
        yield WithConst("fma", z, n, -part)
    yield from polynomial(p, z, constants.exponential)
    yield Mul(p, p, z)
    yield Power(n, n)


def polynomial(dst: int, x: int, coefficients: tuple[float, ...]) -> Iterator[Op]:
    """dst = c0 + c1 x + c2 x ** 2 + ... by Horner's rule."""
    *rest, last = coefficients
    yield Const(dst, last)
    for coefficient in reversed(rest):
        yield WithConst("horner", dst, x, coefficient)


def clipped(z: int, low: float, high: float, spare: int) -> Iterator[Op]:
    """z between low and high; a NaN stays one."""
    yield Const(spare, low)
    yield Bound("max", z, spare, z)
    yield Const(spare, high)
    yield Bound("min", z, spare, z)


def sigmoid(x: int, temporaries: tuple[int, ...], constants: Function) -> Iterator[Op]:
    """x = 1 / (1 + exp(-x))."""
    z, n, p = temporaries[:3]
    yield WithConst("mul", z, x, -1.0)
    yield from clipped(z, constants.least, constants.most, n)
    yield from exponential(z, n, p, constants)
    yield Fma(n, n, p)
    yield WithConst("add", n, n, 1.0)
    yield Const(p, 1.0)
    yield Div(x, p, n)


def tanh(x: int, temporaries: tuple[int, ...], constants: Function) -> Iterator[Op]:
    """x = e / (e + 2) with e = exp(2 x) - 1, exact to the last places near 0, too."""
    z, n, p = temporaries[:3]
    yield WithConst("mul", z, x, 2.0)
    yield from clipped(z, -constants.saturated, constants.saturated, n)
    yield from exponential(z, n, p, constants)
    yield WithConst("add", z, n, -1.0)
    yield Fma(z, n, p)
    yield WithConst("add", n, z, 2.0)
    yield Div(x, z, n)


def gelu(x: int, temporaries: tuple[int, ...], constants: Function) -> Iterator[Op]:
    """x = max(x, 0) - t Q(t) with t = |x|: no cancellation on either side.

    What rounding t * t loses, a fused multiplication finds: far out it is many units of Q.
    """
    t, u, v, q = temporaries[:4]
    yield WithConst("mul", t, x, -1.0)
    yield Bound("max", t, t, x)
    yield Const(u, constants.negligible)
    yield Bound("min", t, u, t)
    yield WithConst("mul", u, t, TAIL_SCALE)
    yield WithConst("add", u, u, 1.0)
    yield Const(v, 1.0)
    yield Div(u, v, u)
    yield WithConst("mul", v, u, -2.0)
    yield WithConst("add", v, v, 1.0)
    yield from polynomial(q, v, constants.tail)
    yield Mul(q, q, u)
    yield Mul(q, q, t)
    yield Mul(u, t, t)
    yield WithConst("mul", v, u, -1.0)
    yield Fma(v, t, t)
    yield WithConst("mul", v, v, -0.5)
    yield WithConst("add", v, v, 1.0)
    yield Mul(q, q, v)
    yield WithConst("mul", t, u, -0.5)
    yield from exponential(t, u, v, constants)
    yield Fma(u, u, v)
    yield Const(v, 0.0)
    yield Bound("max", x, v, x)
    yield Mul(q, q, u)
    yield WithConst("fma", x, q, -1.0)


ACTIVATE = {"sigmoid": sigmoid, "tanh": tanh, "gelu": gelu}
