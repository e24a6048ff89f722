"""Nests, targets and actions as JSON: how they travel between processes and lie in files.

Whoever reads them trusts nobody: what is malformed, in whatever way, raises `SerialError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args, get_type_hints

from looptune.errors import SerialError
from looptune.ir import Activation, Axis, Combine, Dim, Nest, Operand, Scale, Step
from looptune.schedule import Action
from looptune.target import TARGETS, Target

MOST_ACTIONS = 256
LARGEST_ARGUMENT = 1 << 31  # of an action
LARGEST_NUMBER = 1 << 53  # of what is no element's index: a float holds it exactly
FUSIONS = get_args(get_type_hints(Target)["fma"])


def nest_to_json(nest: Nest) -> dict[str, Any]:
    """A nest as plain values."""
    found = asdict(nest)
    found["epilogue"] = [[type(step).__name__, asdict(step)] for step in nest.epilogue]
    return found


def nest_from_json(value: object) -> Nest:
    """The nest that `nest_to_json` wrote; raises `SerialError` for anything else."""
    match value:
        case {
            "axes": [*axes],
            "output": output,
            "inputs": [*inputs],
            "reduction": str(reduction),
            "accumulate": bool(accumulate),
            "epilogue": [*epilogue],
        }:
            try:
                return Nest(
                    tuple(map(axis_from_json, axes)),
                    operand_from_json(output),
                    tuple(map(operand_from_json, inputs)),
                    reduction,  # type: ignore[arg-type] # a Nest checks it
                    accumulate,
                    tuple(map(step_from_json, epilogue)),
                )
            except SerialError:
                raise
            except (ValueError, OverflowError) as reason:  # a NestError is a ValueError
                raise SerialError(f"a nest: {reason}") from reason
        case other:
            raise wrong("nest", other)


def wrong(what: str, value: object) -> SerialError:
    """The error for a value that is none of what was to be read."""
    return SerialError(f"{shown(value)} is no {what}")


def shown(value: object) -> str:
    """The beginning of a value, which may be of any size."""
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        return f"a {type(value).__name__}"


def axis_from_json(value: object) -> Axis:
    """An axis from its fields."""
    match value:
        case {"name": str(name), "extent": int(extent), "reduction": bool(reduction)}:
            return Axis(name, extent, reduction)
        case other:
            raise wrong("axis", other)


def operand_from_json(value: object) -> Operand:
    """An operand from its fields."""
    match value:
        case {"name": str(name), "dtype": str(dtype), "dims": [*dims], "fill": fill}:
            read = tuple(map(dim_from_json, dims))
            return Operand(name, dtype, read, number(fill))  # type: ignore[arg-type]
        case other:
            raise wrong("operand", other)


def dim_from_json(value: object) -> Dim:
    """A dimension from its fields."""
    match value:
        case {
            "size": int(size), "stride": int(stride), "coefficients": [*coefficients],
            "offset": int(offset),
        }:  # fmt: skip
            return Dim(size, stride, tuple(coefficients), offset)
        case other:
            raise wrong("dimension", other)


def number(value: object) -> float:
    """A number that a float holds."""
    match value:
        case bool():
            raise wrong("number", value)
        case int(whole) if abs(whole) > LARGEST_NUMBER:
            raise SerialError(f"{shown(value)} is too large a number")
        case int() | float():
            return value
        case other:
            raise wrong("number", other)


def step_from_json(value: object) -> Step:
    """A step of an epilogue from its class's name and its fields."""
    match value:
        case ["Activation", {"kind": str(kind)}]:
            return Activation(kind)  # type: ignore[arg-type]
        case ["Scale", {"factor": factor}]:
            return Scale(number(factor))
        case ["Combine", {"kind": str(kind), "operand": operand}]:
            return Combine(kind, operand_from_json(operand))  # type: ignore[arg-type]
        case other:
            raise wrong("step of an epilogue", other)


def target_to_json(target: Target) -> dict[str, Any]:
    """A target as plain values."""
    return asdict(target)


def target_from_json(value: object) -> Target:
    """The target that `target_to_json` wrote; raises `SerialError` for anything else."""
    known = asdict(TARGETS["avx2"])
    if not isinstance(value, Mapping) or set(value) != set(known):
        raise wrong(f"target with the fields {sorted(known)}", value)
    found = {each.name: target_field(each.name, known, value) for each in fields(Target)}
    try:
        return Target(**found)
    except ValueError as reason:  # an ArgumentError is one
        raise SerialError(f"a target: {reason}") from reason


def target_field(name: str, known: Mapping[str, Any], value: Mapping[str, Any]) -> Any:
    """A field of a target, of the kind that `known` has there."""
    found = value[name]
    match known[name], found:
        case str(), str() if name != "fma" or found in FUSIONS:
            return found
        case bool(), bool():
            return found
        case int(), int() if whole(found):
            return found
        case tuple(sizes), [*given] if len(sizes) == len(given) and all(map(whole, given)):
            return tuple(given)
        case _:
            raise wrong(f"{name} of a target", found)


def whole(value: object) -> bool:
    """Whether a value is a whole number of at least 0 and not too large."""
    return type(value) is int and 0 <= value <= LARGEST_NUMBER


def actions_from_json(value: object) -> tuple[Action, ...]:
    """A schedule's actions, lists as tuples; raises `SerialError` for anything else."""
    match value:
        case [*actions] if len(actions) <= MOST_ACTIONS:
            return tuple(map(action_from_json, actions))
        case other:
            raise SerialError(f"actions are {shown(other)}; a list of at most {MOST_ACTIONS}")


def action_from_json(value: object) -> Action:
    """A primitive's name and its arguments."""
    match value:
        case [str(name), [*arguments]]:
            return name, tuple(map(argument_from_json, arguments))
        case other:
            raise SerialError(f"action {shown(other)} is no [name, arguments]")


def argument_from_json(value: object) -> object:
    """An argument of an action: a number, a word, nothing, or a list of numbers."""
    match value:
        case [*numbers]:
            return tuple(map(index_from_json, numbers))
        case None | str():
            return value
        case other:
            return index_from_json(other)


def index_from_json(value: object) -> int:
    """A whole number of an action."""
    if type(value) is not int:
        raise wrong("argument of an action", value)
    if abs(value) > LARGEST_ARGUMENT:
        raise SerialError(f"{shown(value)} is too large for an argument of an action")
    return value
