"""Contractions of loop_tool (github.com/facebookresearch/loop_tool) as nests and schedules.

A loop_tool IR is a graph of reads, pointwise operations, reductions and a write; a dense
contraction is `read read multiply add write`, or the same with one operand, or with max or min.
Its loop tree holds loops with a size and a tail; ours hold a step. The extra `loop_tool` installs
it; its wheel is for Python 3.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from looptune.errors import SpecError, UnsupportedError
from looptune.ir import Axis, Dim, Nest, Operand, Reduction, contiguous
from looptune.schedule import Loop, Schedule, with_loops

REDUCTIONS: dict[str, Reduction] = {"add": "add", "max": "max", "min": "min"}


def library() -> Any:
    """loop_tool; raises `UnsupportedError` where it is not installed."""
    try:
        import loop_tool
    except ImportError as reason:
        raise UnsupportedError(
            f"loop_tool is not here ({reason}); `pip install -c constraints.txt '.[loop_tool]'` in "
            "the checkout, under Python 3.11, would do"
        ) from reason
    return loop_tool


def contraction(spec: str, *arrays: np.ndarray) -> Any:
    """A loop_tool tensor that computes an einsum of one or two float32 arrays.

    Raises `SpecError` for a spec with more operands, a repeated label or no output.
    """
    if not isinstance(spec, str):
        raise SpecError(f"the spec is {spec!r:.80}; an einsum string such as 'mk,kn->mn' would do")
    terms, arrow, output = spec.replace(" ", "").partition("->")
    labels = terms.split(",")
    plain = all(len(set(term)) == len(term) and term.isalpha() for term in (*labels, output))
    if not arrow or not plain or len(labels) != len(arrays) or len(labels) not in (1, 2):
        raise SpecError(f"{spec!r} with {len(arrays)} arrays; `mk,kn->mn` with two would do")
    lt = library()
    symbols = {label: lt.Symbol(label) for label in dict.fromkeys("".join(labels))}
    tensors = [
        lt.Tensor(*(symbols[label] for label in term)).set(np.ascontiguousarray(array, np.float32))
        for term, array in zip(labels, arrays, strict=True)
    ]
    product = tensors[0] if len(tensors) == 1 else tensors[0] * tensors[1]
    summed = [symbols[label] for label in symbols if label not in output]
    result = product.sum(*summed) if summed else product
    return result.transpose(*(symbols[label] for label in output))


def nest_of(source: Any) -> Nest:
    """The nest that a loop_tool tensor, IR or loop tree computes: its loops, outermost first, are
    the axes; operands are contiguous and called A, B and C.

    Raises `UnsupportedError` for anything but a dense contraction.
    """
    ir = ir_of(source)
    compute, reduction = stages_of(ir)
    last = ir.nodes[-1] if not ir.outputs() else ir.outputs()[0]
    extents = {var: 0 for var in loop_vars(ir, compute)}
    for var in extents:
        extents[var] = extent_of(ir, compute, var)
    summed = set(extents) - set(ir.output_vars(last))
    if summed and reduction is None:
        raise UnsupportedError(f"{ir.serialize()!r} drops an axis without a reduction")
    axes = tuple(Axis(name_of(ir, var), n, var in summed) for var, n in extents.items())
    reads = [node for node in ir.inputs() if operation(ir, node) == "read"]
    inputs = tuple(
        operand_of("AB"[at], ir.output_vars(node), extents) for at, node in enumerate(reads)
    )
    return Nest(axes, operand_of("C", ir.output_vars(last), extents), inputs, reduction or "add")


def schedule_of(source: Any) -> Schedule:
    """`nest_of`, in the order of the loop tree around the multiplication or the reduction.

    Raises `UnsupportedError` as that does, and `ScheduleError` where a tail lies inside another
    loop over its axis, so that the steps are no multiples of one another.
    """
    nest, ir, tree = nest_of(source), ir_of(source), tree_of(source)
    compute, _ = stages_of(ir)
    (leaf,) = [ref for ref in every(tree) if not tree.is_loop(ref) and tree.ir_node(ref) == compute]
    loops, ref = [], tree.parent(leaf)
    while ref != -1:
        loops.append(tree.loop(ref))
        ref = tree.parent(ref)
    number = {var: at for at, var in enumerate(loop_vars(ir, compute))}
    covered = dict.fromkeys(number, 1)
    found = []
    for loop in loops:  # innermost first: what lies inside is the step of what lies around it
        found.append(Loop(number[loop.var], covered[loop.var]))
        covered[loop.var] = loop.size * covered[loop.var] + loop.tail
    return with_loops(Schedule(nest), found[::-1])


def side_by_side(source: Any, schedule: Schedule) -> str:
    """loop_tool's loop tree, and the loops of a schedule beside it."""
    theirs = str(tree_of(source)).splitlines()
    ours = str(schedule).splitlines()
    width = max(map(len, theirs), default=0) + 4
    pairs = zip_longest(["loop_tool", *theirs], ["looptune", *ours], fillvalue="")
    return "\n".join(f"{left:{width}}{right}".rstrip() for left, right in pairs)


def ir_of(source: Any) -> Any:
    """The IR of a tensor or a loop tree, or the IR itself."""
    return source if isinstance(source, library().IR) else part_of(source, "ir")


def tree_of(source: Any) -> Any:
    """The loop tree of a tensor or an IR, or the loop tree itself."""
    lt = library()
    if isinstance(source, lt.LoopTree):
        return source
    return lt.LoopTree(source) if isinstance(source, lt.IR) else part_of(source, "loop_tree")


def part_of(source: Any, name: str) -> Any:
    """What a tensor or a loop tree holds; raises `SpecError` for anything else."""
    try:
        return getattr(source, name)
    except AttributeError:
        raise SpecError(
            f"{type(source).__name__} is no loop_tool tensor, IR or loop tree"
        ) from None


def operation(ir: Any, node: int) -> str:
    """The name of a node's operation."""
    lt, found = library(), ir.op(node)
    names = ("read", "write", "multiply", "add", "max", "min", "view", "copy")
    return next((name for name in names if getattr(lt, name) == found), "another operation")


def stages_of(ir: Any) -> tuple[int, Reduction | None]:
    """The node with all the loops, and how it is reduced; raises `UnsupportedError` for other
    graphs than those of a contraction."""
    inner = [node for node in ir.nodes if operation(ir, node) not in ("read", "write")]
    found = [operation(ir, node) for node in inner]
    reads = len(ir.inputs())
    match found:
        case ["multiply"] if reads == 2:
            return inner[0], None
        case ["multiply", ("add" | "max" | "min") as kind] if reads == 2:
            return inner[0], REDUCTIONS[kind]
        case [("add" | "max" | "min") as kind] if reads == 1:
            return inner[0], REDUCTIONS[kind]
        case []:
            return ir.outputs()[0], None
    raise UnsupportedError(
        f"{reads} operands and then {', '.join(found)}: no dense contraction, which is a product "
        "of at most two operands and a sum, maximum or minimum"
    )


def loop_vars(ir: Any, node: int) -> list[int]:
    """The variables of a node's loops, in the order of their outermost ones."""
    return list(dict.fromkeys(var for var, _ in ir.orders[node]))


def extent_of(ir: Any, node: int, var: int) -> int:
    """The elements along a variable: its loops' sizes and tails, from the inside out."""
    covered = 1
    for at, (size, tail) in reversed(ir.orders[node]):
        if at == var:
            covered = size * covered + tail
    return covered


def name_of(ir: Any, var: int) -> str:
    """`m` for `m_0`: loop_tool numbers its variables."""
    names = [str(ir.dump_var(each)).rpartition("_")[0] for each in ir.vars]
    name = str(ir.dump_var(var)).rpartition("_")[0]
    return name if names.count(name) == 1 else str(ir.dump_var(var))


def operand_of(name: str, variables: Sequence[int], extents: dict[int, int]) -> Operand:
    """A contiguous operand with a dimension for every variable."""
    shape = tuple(extents[var] for var in variables)
    dims = tuple(
        Dim(size, stride, tuple(int(var == other) for other in extents))
        for var, size, stride in zip(variables, shape, contiguous(shape), strict=True)
    )
    return Operand(name, "float32", dims)


def every(tree: Any) -> list[int]:
    """All references of a loop tree."""
    found: list[int] = []
    for root in tree.roots:
        tree.walk(lambda ref, _: found.append(ref), root)
    return found
