"""What `optimize` is asked for, as a Plan: einsum text with shapes, sizes or example arrays, or a
Nest or Plan as it is."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence

from looptune.errors import ArgumentTypeError, SpecError
from looptune.ir import Nest, Plan, plan_of
from looptune.runtime.call import as_array, detached, is_tensor
from looptune.workloads import einsum
from looptune.workloads.einsum import check_dtype, whole_numbers


def plan_for(
    spec: str | Nest | Plan,
    shapes: Sequence[object] | None,
    sizes: Mapping[str, int] | None,
    dtype: str | None,
    labels: Mapping[str, int],
) -> Plan:
    """The plan that the arguments of `optimize` describe."""
    if isinstance(spec, str):
        if not isinstance(shapes, Sequence | None) or isinstance(shapes, str):
            raise ArgumentTypeError(f"shapes={shapes!r}; a shape or an array an operand would do")
        if not isinstance(sizes, Mapping | None):
            raise ArgumentTypeError(f"sizes={sizes!r}; {{label: extent}} would do")
        return plan_of_text(spec, shapes, sizes, dtype, labels)
    if labels:
        raise unknown_keyword(next(iter(labels)), "a Nest or Plan has no labels to size")
    if shapes is not None or sizes is not None or dtype is not None:
        raise SpecError(
            "shapes, sizes and dtype belong to an einsum string; a Nest or Plan has its own"
        )
    if isinstance(spec, Nest):
        return plan_of(spec)
    if isinstance(spec, Plan):
        return spec
    raise SpecError(f"spec is a {type(spec).__name__}; an einsum string, a Nest or a Plan would do")


def shape_of(shape: object) -> tuple[int, ...]:
    """A shape given as a sequence of numbers; raises `SpecError` for anything else."""
    if isinstance(shape, Iterable) and not isinstance(shape, str):
        return whole_numbers("a shape", shape, 0)
    raise SpecError(f"shapes: {shape!r} is neither a shape nor an array")


def unknown_keyword(name: str, otherwise: str) -> ArgumentTypeError:
    """The error for a keyword that `optimize` has not, with the near name or a hint."""
    from looptune.tune import optimize

    known = [word for word in inspect.signature(optimize).parameters if word != "labels"]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else otherwise
    return ArgumentTypeError(f"optimize() got an unexpected keyword argument {name!r}; {hint}")


def merged(sizes: Mapping[str, int], labels: Mapping[str, int]) -> dict[str, int]:
    """Sizes of labels from both; raises `SpecError` where they differ."""
    for name in sizes.keys() & labels.keys():
        if sizes[name] != labels[name]:
            raise SpecError(
                f"label {name!r} has two sizes, {sizes[name]} in sizes and {labels[name]}"
            )
    return {**sizes, **labels}


def plan_of_text(
    spec: str,
    shapes: Sequence[object] | None,
    sizes: Mapping[str, int] | None,
    dtype: str | None,
    labels: Mapping[str, int],
) -> Plan:
    """The plan of an einsum string with shapes, example arrays or label sizes."""
    for name in labels:
        if len(name) != 1 or name not in spec:
            raise unknown_keyword(name, f"the labels of {spec!r} would do")
    known = "float32" if dtype is None else dtype
    if shapes is None:
        return einsum(spec, sizes=merged(sizes or {}, labels), dtype=known)
    if labels or sizes:
        raise SpecError("give shapes or sizes of the labels, not both")
    arrays = [hasattr(operand, "__array_interface__") or is_tensor(operand) for operand in shapes]
    if not any(arrays):
        return einsum(spec, *map(shape_of, shapes), dtype=known)
    if not all(arrays):
        raise SpecError("shapes mixes example arrays and tuples; give one kind")
    examples = [as_array(detached(array), number) for number, array in enumerate(shapes)]
    found = {example.dtype.name for example in examples}
    if len(found) > 1 or (dtype is not None and check_dtype(dtype) not in found):
        wanted = "" if dtype is None else f" and dtype={dtype!r}"
        raise SpecError(f"shapes of example arrays of {sorted(found)}{wanted}: one dtype would do")
    for number, example in enumerate(examples):
        if any(stride % example.itemsize for stride in example.strides):
            raise SpecError(
                f"example array {number} has strides {example.strides}, no multiples of its "
                f"{example.itemsize}-byte elements; a copy would do"
            )
    return einsum(
        spec,
        *(example.shape for example in examples),
        dtype=found.pop(),
        strides=[tuple(s // e.itemsize for s in e.strides) for e in examples],
    )
