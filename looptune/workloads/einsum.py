"""Einsum strings, in NumPy's full grammar, as plans.

Broadcasting, `...`, repeated labels and implicit outputs mean what `numpy.einsum` says they
mean. Axes are written output first, with the reductions just before the last output label:
`mk,kn->mn` is the nest m, k, n.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

import numpy as np

from looptune.dtypes import ACCUMULATOR, ARGUMENTS, DType, is_whole
from looptune.errors import SpecError, UnsupportedError
from looptune.ir import LARGEST, Axis, Dim, Nest, Operand, Plan, Reduction, Tensor, contiguous

OPTIMAL_PATH_OPERANDS = 5  # numpy's exhaustive search is factorial in their number
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Term:
    """An operand of a contraction: its tensor and the label of each dimension."""

    tensor: Tensor
    labels: str


def check_dtype(dtype: str) -> DType:
    """`dtype` if it is supported; raises `UnsupportedError` with those that are."""
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in ARGUMENTS:
        raise UnsupportedError(f"dtype {name!r} is not supported; {sorted(ARGUMENTS)} are")
    return name  # type: ignore[return-value]


def check_flags(**flags: object) -> None:
    """Raise `SpecError` for a flag that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise SpecError(f"{name}={value!r:.80}; True or False would do")


def result_dtype(dtype: DType, wanted: str | None) -> DType:
    """The result's type: as `wanted`, or int32 for whole numbers and else that of the operands.

    Raises `UnsupportedError` for a type that the sums are not kept in or rounded to.
    """
    if wanted is None:
        return "int32" if is_whole(dtype) else dtype
    found = check_dtype(wanted)
    if ACCUMULATOR[found] != ACCUMULATOR[dtype] or found == "int8":
        kept = ACCUMULATOR[dtype]
        near = sorted(name for name in ARGUMENTS if ACCUMULATOR[check_dtype(name)] == kept)
        raise UnsupportedError(f"a {found} result of {dtype} is not supported; of {near} are")
    return found


def whole_numbers(what: str, numbers: Iterable[SupportsIndex], least: int | None = None) -> Shape:
    """`numbers` as a tuple; raises `SpecError` unless all are whole and at least `least`."""
    try:
        values = tuple(numbers)
        if any(isinstance(value, bool) for value in values):
            raise TypeError("a truth value is no size")
        found = tuple(index(value) for value in values)
    except TypeError as reason:
        raise SpecError(f"{what} is {numbers!r}; a tuple of whole numbers would do") from reason
    if least is not None and any(number < least for number in found):
        raise SpecError(f"{what} has a negative size: {found}")
    if any(abs(number) > LARGEST for number in found):
        raise SpecError(f"{what} is {found}: numbers beyond {LARGEST} do not fit in memory")
    return found


def parse(spec: str, ranks: Sequence[int] | None) -> tuple[list[str], str]:
    """Labels of the operands and of the output; an ellipsis becomes upper-rank labels.

    `ranks` are the operands' ranks, needed where there is an ellipsis. Raises `SpecError`.
    """
    if re.search(r"\. +\.|- +>", spec):
        raise SpecError(f"einsum {spec!r}: a space splits a '...' or a '->'")
    text = spec.replace(" ", "")
    left, arrow, right = text.partition("->")
    reads = left.split(",")
    bad = set(text.replace("->", "", 1)) - set(string.ascii_letters) - set(".,")
    if bad or ("," in right):
        raise SpecError(f"einsum {spec!r}: {sorted(bad) or right!r} is not part of the grammar")
    if ranks is not None and len(ranks) != len(reads):
        raise SpecError(f"einsum {spec!r} names {len(reads)} operands; {len(ranks)} were given")
    spare = [c for c in string.ascii_letters if c not in text]
    depth = 0
    expanded = []
    for number, labels in enumerate(reads):
        rank = None if ranks is None else ranks[number]
        hidden = ellipsis_rank(spec, labels, number, rank)
        depth = max(depth, hidden)
        expanded.append((labels, hidden))
    if depth > len(spare):
        raise UnsupportedError(
            f"einsum {spec!r}: {depth} dimensions in '...' and {52 - len(spare)} labels are not "
            "supported; 52 together are"
        )
    names = spare[:depth]
    inputs = [labels.replace("...", "".join(names[depth - n :])) for labels, n in expanded]
    if not arrow:
        counts = Counter("".join(labels.replace("...", "") for labels in reads))
        right = "".join(sorted(label for label, n in counts.items() if n == 1))
        right = "..." * ("..." in left) + right
    if depth and "..." not in right:
        raise SpecError(
            f"einsum {spec!r}: the '...' of the operands has {depth} dimensions; "
            "the output needs a '...', too"
        )
    output = right.replace("...", "".join(names), 1)
    check_output(spec, output, inputs)
    return inputs, output


def ellipsis_rank(spec: str, labels: str, number: int, rank: int | None) -> int:
    """Dimensions that the ellipsis of an operand stands for."""
    dots = labels.count(".")
    if dots and (labels.count("...") != 1 or dots != 3):
        raise SpecError(f"einsum {spec!r}: operand {number} ({labels!r}) has a broken ellipsis")
    named = len(labels) - dots
    if not dots:
        if rank is not None and rank != named:
            raise SpecError(
                f"einsum {spec!r}: operand {number} has {rank} dimensions for labels {labels!r}"
            )
        return 0
    if rank is None:
        raise SpecError(f"einsum {spec!r}: give shapes, not sizes, where there is an ellipsis")
    if rank < named:
        raise SpecError(
            f"einsum {spec!r}: operand {number} has {rank} dimensions, fewer than {labels!r} names"
        )
    return rank - named


def check_output(spec: str, output: str, inputs: Sequence[str]) -> None:
    """Raise `SpecError` for an output label that is repeated or in no operand."""
    for label, count in Counter(output).items():
        if label == ".":
            raise SpecError(f"einsum {spec!r}: the output has a broken ellipsis")
        if count > 1:
            raise SpecError(f"einsum {spec!r}: label {label!r} is twice in the output")
        if label not in "".join(inputs):
            raise SpecError(f"einsum {spec!r}: output label {label!r} is in no operand")


def label_sizes(spec: str, inputs: Sequence[str], shapes: Sequence[Shape]) -> dict[str, int]:
    """Extent of each label: 1 broadcasts against other operands, otherwise they must agree."""
    sizes: dict[str, int] = {}
    for number, (labels, shape) in enumerate(zip(inputs, shapes, strict=True)):
        diagonal: dict[str, int] = {}
        for label, size in zip(labels, shape, strict=True):
            if diagonal.setdefault(label, size) != size:
                raise SpecError(
                    f"einsum {spec!r}: label {label!r} is {diagonal[label]} and {size} in operand "
                    f"{number}; a diagonal does not broadcast"
                )
            known = sizes.get(label, 1)
            if known != 1 and size not in (1, known):
                raise SpecError(
                    f"einsum {spec!r}: label {label!r} is {size} in operand {number} "
                    f"and {known} before"
                )
            sizes[label] = size if known == 1 else known
    return sizes


def term_operand(term: Term, axes: Mapping[str, int], extents: Mapping[str, int]) -> Operand:
    """The access of a term in a nest whose axes are numbered by label."""
    dims = []
    for label, size, stride in zip(
        term.labels, term.tensor.shape, term.tensor.strides, strict=True
    ):
        moves = size != 1 or extents[label] == 1
        coefficients = [0] * len(axes)
        coefficients[axes[label]] = int(moves)
        dims.append(Dim(size, stride, tuple(coefficients)))
    return Operand(term.tensor.name, term.tensor.dtype, tuple(dims))


def contraction(
    inputs: Sequence[Term],
    output: Term,
    extents: Mapping[str, int],
    accumulate: bool = False,
    reduction: Reduction = "add",
) -> Nest:
    """The nest of one or two terms; reductions are written before the last output label."""
    summed = dict.fromkeys(
        label for term in inputs for label in term.labels if label not in output.labels
    )
    order = [*output.labels[:-1], *summed, *output.labels[-1:]]
    axes = tuple(Axis(label, extents[label], label in summed) for label in order)
    number = {label: i for i, label in enumerate(order)}
    reads = tuple(term_operand(term, number, extents) for term in inputs)
    return Nest(axes, term_operand(output, number, extents), reads, reduction, accumulate)


def einsum(
    spec: str,
    *shapes: Shape,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float32",
    strides: Sequence[Shape | None] | None = None,
    out_strides: Shape | None = None,
    out_dtype: str | None = None,
    accumulate: bool = False,
) -> Plan:
    """The plan of an einsum over operands of `shapes`, or with labels of `sizes`.

    `strides` are per operand, in elements; None is row-major. Operands are named a, b, ...; the
    result is "out". Three and more operands are contracted in pairs along `numpy.einsum_path`;
    labels that only one of several operands has and the output has not are summed first.
    `out_dtype` is that of the operands (int32 for int8), or another that shares their
    accumulator: float32 for float16 and bfloat16.
    Raises `SpecError`, naming the label or operand, and `UnsupportedError` for other dtypes.
    """
    if not isinstance(spec, str):
        raise SpecError(f"the spec is {spec!r}; an einsum string such as 'mk,kn->mn' would do")
    check_flags(accumulate=accumulate)
    kind = check_dtype(dtype)
    if bool(shapes) == bool(sizes) and spec.replace(" ", "").strip("->,"):
        raise SpecError(f"einsum {spec!r}: give the operands' shapes or the labels' sizes")
    given = [
        whole_numbers(f"einsum {spec!r}: operand {number}", shape, 0)
        for number, shape in enumerate(shapes)
    ]
    inputs, output = parse(spec, [len(shape) for shape in given] if given else None)
    if not given:
        given = [shape_by_sizes(spec, labels, sizes or {}) for labels in inputs]
        check_sizes(spec, inputs, sizes or {})
    extents = label_sizes(spec, inputs, given)
    layouts = [None] * len(given) if strides is None else strides
    if not isinstance(layouts, Sequence):
        raise SpecError(
            f"einsum {spec!r}: strides={layouts!r}; a sequence, one an operand, would do"
        )
    if len(layouts) != len(given):
        raise SpecError(f"einsum {spec!r}: {len(layouts)} strides for {len(given)} operands")
    names = operand_names(len(given))
    terms = [
        Term(Tensor(name, kind, shape, check_strides(spec, i, shape, layout)), labels)
        for i, (name, shape, layout, labels) in enumerate(
            zip(names, given, layouts, inputs, strict=True)
        )
    ]
    result_shape = tuple(extents[label] for label in output)
    result_strides = check_strides(spec, -1, result_shape, out_strides)
    written = result_dtype(kind, out_dtype)
    if is_whole(kind) and (len(terms) > 2 or (len(terms) == 2 and kind != "int8")):
        raise UnsupportedError(
            f"einsum {spec!r} of {kind}: products of two int8 and sums of one operand are supported"
        )
    result = Term(Tensor("out", written, result_shape, result_strides), output)
    nests, temporaries = contract(terms, result, extents, accumulate)
    plain = ",".join(inputs) + "->" + output
    return Plan(nests, tuple(term.tensor for term in terms), result.tensor, temporaries, spec=plain)


def operand_names(count: int) -> list[str]:
    """a, b, ..., z, then a26, a27, ..."""
    return [string.ascii_lowercase[i] if i < 26 else f"a{i}" for i in range(count)]


def shape_by_sizes(spec: str, labels: str, sizes: Mapping[str, int]) -> Shape:
    """Shape of an operand whose labels have these sizes."""
    for label in labels:
        if label not in sizes:
            raise SpecError(
                f"einsum {spec!r}: label {label!r} has no size; {dict(sizes)} are given"
            )
    return whole_numbers(f"einsum {spec!r}: size of {labels!r}", [sizes[c] for c in labels], 0)


def check_sizes(spec: str, inputs: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Raise `SpecError` for the size of a label that the spec has not."""
    for label in sizes:
        if label not in set("".join(inputs)):
            raise SpecError(f"einsum {spec!r} has no label {label!r}")


def check_strides(spec: str, number: int, shape: Shape, layout: Shape | None) -> Shape:
    """`layout`, or row-major strides; raises `SpecError` if their number is not the rank."""
    if layout is None:
        return contiguous(shape)
    which = "the output" if number < 0 else f"operand {number}"
    found = whole_numbers(f"einsum {spec!r}: strides of {which}", layout)
    if len(found) != len(shape):
        raise SpecError(f"einsum {spec!r}: {which} has {len(shape)} dimensions and strides {found}")
    return found


def contract(
    terms: Sequence[Term], result: Term, extents: Mapping[str, int], accumulate: bool
) -> tuple[tuple[Nest, ...], tuple[Tensor, ...]]:
    """Nests that contract the terms pairwise into the result, and their temporaries."""
    nests: list[Nest] = []
    temporaries: list[Tensor] = []

    def temporary(inputs: Sequence[Term], labels: str) -> Term:
        shape = tuple(extents[label] for label in labels)
        name = f"t{len(temporaries)}"
        kept = ACCUMULATOR[terms[0].tensor.dtype]
        made = Term(Tensor(name, kept, shape, contiguous(shape)), labels)
        temporaries.append(made.tensor)
        nests.append(contraction(inputs, made, extents))
        return made

    pending = list(terms)
    if len(pending) > 1 and not is_whole(result.tensor.dtype):
        pending = [
            reduced(term, kept_labels(term, i, pending, result), temporary)
            for i, term in enumerate(pending)
        ]
    for pair in pair_path(pending, result):
        left, right = (pending[i] for i in pair)
        rest = [term for i, term in enumerate(pending) if i not in pair]
        if not rest:
            break
        wanted = {label for term in (*rest, result) for label in term.labels}
        pending = [*rest, temporary((left, right), intermediate(left, right, wanted, result))]
    nests.append(contraction(pending, result, extents, accumulate))
    return tuple(nests), tuple(temporaries)


def kept_labels(term: Term, number: int, terms: Sequence[Term], result: Term) -> str:
    """The labels of a term that another term or the result has, too, in its order."""
    others = {label for i, other in enumerate(terms) if i != number for label in other.labels}
    wanted = others | set(result.labels)
    return "".join(dict.fromkeys(label for label in term.labels if label in wanted))


def reduced(term: Term, kept: str, temporary: Callable[[Sequence[Term], str], Term]) -> Term:
    """`term` with the labels that nothing else has summed away."""
    if set(kept) == set(term.labels):
        return term
    return temporary((term,), kept)


def intermediate(left: Term, right: Term, wanted: set[str], result: Term) -> str:
    """Labels of a temporary: those still to be summed first, then the result's in its order."""
    both = [label for label in dict.fromkeys(left.labels + right.labels) if label in wanted]
    inner = [label for label in both if label not in result.labels]
    return "".join([*inner, *(label for label in result.labels if label in both)])


def pair_path(terms: Sequence[Term], result: Term) -> list[tuple[int, int]]:
    """Pairs of positions to contract, after `numpy.einsum_path`; each result goes to the end."""
    if len(terms) < 3:
        return []
    spec = ",".join(term.labels for term in terms) + "->" + result.labels
    stand_ins = [np.broadcast_to(np.float32(0), term.tensor.shape) for term in terms]
    method = "optimal" if len(terms) <= OPTIMAL_PATH_OPERANDS else "greedy"
    path = np.einsum_path(spec, *stand_ins, optimize=method)[0][1:]
    pairs: list[tuple[int, int]] = []
    for step in path:
        # What NumPy contracts at once is contracted two by two here; a result is appended last.
        first, *others = sorted(step)
        size = len(terms) - len(pairs)
        positions = [first, *others]
        while len(positions) > 2:
            a, b = positions[0], positions[1]
            pairs.append((a, b))
            positions = [p - sum(q < p for q in (a, b)) for p in positions[2:]]
            size -= 1
            positions.append(size - 1)
        if len(positions) == 2:
            pairs.append((positions[0], positions[1]))
    return pairs
