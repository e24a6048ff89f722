"""What a schedule means for registers: decided once, before any code is made.

The rules are those of LoopNest (Wasti et al., arXiv 2205.00618), made total; ARCHITECTURE.md
tells them with examples. A `Form` is the schedule's loops after

1. dropping loops that make one trip,
2. choosing the vector axis, whose innermost loop then steps by the vector length,
3. strip-mining the spatial loops below the innermost reduction if they do not fit the
   registers, and moving the strips outside of it,

cut into three parts: real loops, reduction loops that roll around registers, and what unrolls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from looptune.dtypes import is_narrow
from looptune.errors import LoweringError
from looptune.ir import Activation, Combine, Nest, Operand, Step
from looptune.lower.buffers import (
    Packed,
    Ranges,
    at_root,
    multiplies_pairs,
    packed,
    with_inner,
)
from looptune.program import Format
from looptune.schedule import Loop, Pack, Schedule
from looptune.target import Target

MAX_LOOPS = 64
CONVERTED = 2  # instructions to widen a vector; narrowing takes up to four times as many
# Instructions of one step of an epilogue on one vector.
STEP_SIZE = {"add": 1, "mul": 1, "scale": 1, "relu": 1, "sigmoid": 18, "tanh": 22, "gelu": 40}
HARD_LIMIT = 16  # times the target's instruction limit: beyond it a schedule is refused

Leaf = tuple[int, int]  # offset and lanes of one vector along the vector axis


@dataclass(frozen=True)
class Form:
    """A schedule made ready for code: see the module's docstring.

    `loops[:scope]` are real loops, the others lie inside the accumulator scope, where
    `rolled` and then `unrolled` are its reduction loops and `tile` its spatial axes in order.
    `ranges[p]` holds the range sets at position p. `vector` is None if no axis has two points
    that one pointer reaches: vectors have one lane then.
    """

    packed: Packed
    target: Target
    loops: tuple[Loop, ...]
    vector: int | None
    scope: int
    ranges: tuple[Ranges, ...]
    tile: tuple[int, ...]
    rolled: tuple[Loop, ...]
    unrolled: tuple[Loop, ...]
    parallel: int | None

    def format_of(self, operand: Operand) -> Format | None:
        """The format an operand has in memory, if it is not the registers'."""
        if operand.dtype == "float16" or operand.dtype == "bfloat16":
            return operand.dtype
        if operand.dtype == "int8":
            to_pairs = multiplies_pairs(self.nest) or self.nest.output.dtype == "int16x2"
            return "int8_pair" if to_pairs else "int8"
        return None

    @cached_property
    def nest(self) -> Nest:
        """The nest, reading from packs at the root."""
        return self.packed.nest

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The output and the inputs as the register tile sees them, behind all packs."""
        return self.packed.operands

    @cached_property
    def lanes(self) -> int:
        """Elements of a full vector."""
        return self.target.lanes(self.nest.dtype)

    @cached_property
    def reduces_lanes(self) -> bool:
        """Whether accumulators hold partial sums of one output element in their lanes."""
        return self.vector is not None and self.nest.axes[self.vector].reduction

    def leaves(self, extent: int) -> tuple[Leaf, ...]:
        """The vectors that cover `extent` elements of the vector axis inside the scope."""
        return vector_leaves(extent, self.vector_steps or (self.lanes,), self.lanes, self.overlaps)

    @cached_property
    def vector_steps(self) -> tuple[int, ...]:
        """The steps over the vector axis inside the scope, outermost first."""
        return tuple(loop.step for loop in self.loops[self.scope :] if loop.axis == self.vector)

    @cached_property
    def overlaps(self) -> bool:
        """Whether a last partial vector may be moved back to be a full one."""
        return not self.target.masks and not self.reduces_lanes and len(self.vector_steps) <= 1

    @property
    def leads_with_space(self) -> bool:
        """Whether the outermost loop inside the scope is a spatial one."""
        inside = self.loops[self.scope :]
        return bool(inside) and not self.nest.axes[inside[0].axis].reduction

    @property
    def transposed(self) -> int | None:
        """The tile axis along which the output is contiguous, where the tile is copied from an
        input that is contiguous along the vector axis instead; else None."""
        nest = self.nest
        if self.vector is None or nest.reductions or nest.accumulate or nest.epilogue:
            return None
        output, source = self.operands[:2]
        across = [axis for axis in self.tile if axis != self.vector and output.stride_of(axis) == 1]
        copied = len(self.operands) == 2 and source.stride_of(self.vector) == 1
        return across[0] if across and copied and output.stride_of(self.vector) != 1 else None

    @property
    def trips(self) -> int:
        """Iterations of the parallel loop, 1 where there is none."""
        if self.parallel is None:
            return 1
        loop = self.loops[self.parallel]
        return math.ceil(self.nest.axes[loop.axis].extent / loop.step)

    def tile_ranges(self) -> Ranges:
        """The range sets where the accumulator scope begins."""
        return self.ranges[self.scope]


@lru_cache(maxsize=1 << 12)
def vector_leaves(
    extent: int, steps: tuple[int, ...], lanes: int, overlap: bool = False
) -> tuple[Leaf, ...]:
    """(offset, lanes) of each vector along `extent` elements cut by `steps`, outermost first.

    With `overlap` a last partial vector is moved back to be a full one: it computes some
    elements twice, and every element is loaded before any is stored.
    """
    if len(steps) > 1:
        found: list[Leaf] = []
        for start in range(0, extent, steps[0]):
            inner = vector_leaves(min(steps[0], extent - start), steps[1:], lanes)
            found += [(start + offset, width) for offset, width in inner]
        return tuple(found)
    full = [(start, lanes) for start in range(0, extent - lanes + 1, lanes)]
    rest = extent % lanes
    if rest and full and overlap:
        return (*full, (extent - lanes, lanes))
    return (*full, (extent - rest, rest)) if rest else tuple(full)


@lru_cache(maxsize=1 << 12)
def count_leaves(extent: int, steps: tuple[int, ...]) -> int:
    """How many vectors cover `extent` elements cut by `steps`."""
    if not steps:
        return 1
    step, inner = steps[0], steps[1:]
    if not inner:
        return math.ceil(extent / step)
    whole, rest = divmod(extent, step)
    return whole * count_leaves(step, inner) + (count_leaves(rest, inner) if rest else 0)


@lru_cache(maxsize=1 << 12)
def inner_ranges(values: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Range set below a loop of `step` whose own range is one of `values`, largest first."""
    if len(values) == 1 and values[0] and values[0] % step in (0, values[0]):
        return (min(values[0], step),)
    found = {value % step for value in values} - {0}
    if any(value >= step for value in values):
        found.add(step)
    return tuple(sorted(found, reverse=True))


def range_sets(nest: Nest, loops: tuple[Loop, ...]) -> tuple[Ranges, ...]:
    """Range sets at every position, the last one below all loops."""
    current: dict[int, tuple[int, ...]] = {a: (x.extent,) for a, x in enumerate(nest.axes)}
    found = [current]
    for loop in loops:
        current = {**current, loop.axis: inner_ranges(current[loop.axis], loop.step)}
        found.append(current)
    return tuple(found)


def footprint(nest: Nest, loops: tuple[Loop, ...], ranges: Ranges, vector: int | None) -> int:
    """Accumulators needed to hold the output below `loops`: the most over the range sets."""
    total = 1
    axes = nest.axes
    for axis in {loop.axis for loop in loops}:
        if axes[axis].reduction:
            continue
        if axis == vector:
            steps = tuple([loop.step for loop in loops if loop.axis == axis])
            total *= max([count_leaves(extent, steps) for extent in ranges[axis]])
        else:
            total *= ranges[axis][0]
    return total


def vector_cost(problem: Packed, axis: int, reach: int, lanes: int) -> float:
    """Rough cycles a point if `axis`, in pieces of `reach` elements, is spread over the lanes."""
    used = reach / math.ceil(reach / lanes)
    nest, (output, *inputs) = problem.nest, problem.operands[: 1 + len(problem.nest.inputs)]
    length = max(1, math.prod(nest.axes[a].extent for a in nest.reductions))
    reads = sum({0: 0.25, 1: 0.5}.get(op.stride_of(axis), 1.0 * lanes) for op in inputs)
    if nest.axes[axis].reduction:
        return (1 + reads) / used + 8 / length
    writes = 1 if output.stride_of(axis) == 1 else 2 * lanes
    return (1 + reads) / used + writes / used / length


def within_reach(operands: Iterable[Operand], axis: int, target: Target) -> bool:
    """Whether the lanes of a vector along `axis` are addressed from one pointer."""
    return all(
        abs(op.stride_of(axis)) * (target.vector_bytes - op.item_bytes) <= furthest(target) // 2
        for op in operands
    )


def choose_vector(
    problem: Packed, wanted: int | None, loops: tuple[Loop, ...], target: Target
) -> int | None:
    """The axis that is wanted, or by default the cheapest one, the innermost on a tie.

    None if there is none, or if no vector along any axis is addressed from one pointer.
    """
    nest = problem.nest
    lanes = target.lanes(nest.dtype)
    if not loops:
        return None
    axes = {loop.axis for loop in loops}
    if wanted is not None:
        return wanted if wanted in axes else None
    reach = {a: nest.axes[a].extent for a in axes}
    for outer in loops:
        if outer.step > 1:
            reach[outer.axis] = min(reach[outer.axis], outer.step)
    candidates = dict.fromkeys(loop.axis for loop in reversed(loops))
    near = [axis for axis in candidates if within_reach(problem.operands, axis, target)]
    return min(near, key=lambda a: vector_cost(problem, a, reach[a], lanes), default=None)


def strip_mine(
    nest: Nest, loops: tuple[Loop, ...], ranges: Sequence[Ranges], vector: int | None, budget: int
) -> tuple[Loop, ...]:
    """Split the spatial loops inside the innermost reduction by the register budget.

    k m n    ->    m n:96 k n      (12 accumulators of 8 lanes; n over 96)

    Without it every iteration of that reduction would load and store the whole output.
    """
    at = max(i for i, loop in enumerate(loops) if nest.axes[loop.axis].reduction)
    inner = loops[at + 1 :]
    first = len(inner)
    while first and footprint(nest, inner[first - 1 :], ranges[at + first], vector) <= budget:
        first -= 1
    assert first, "strip_mine is for loops that do not fit"
    cut, kept = inner[first - 1], inner[first:]
    per_step = footprint(nest, kept, ranges[at + 1 + first], vector)
    step = cut.step * max(1, budget // per_step)
    pieces = (Loop(cut.axis, step), loops[at], cut) if step > cut.step else (cut, loops[at])
    return (*loops[:at], *inner[: first - 1], *pieces, *kept)


def first_fit(
    nest: Nest, loops: tuple[Loop, ...], ranges: Sequence[Ranges], vector: int | None, budget: int
) -> int:
    """The first position from the outside whose output footprint fits `budget` registers."""
    for at in range(len(loops)):
        if footprint(nest, loops[at:], ranges[at], vector) <= budget:
            return at
    return len(loops)


def register_budget(nest: Nest, target: Target) -> int:
    """Accumulators available: a maximum needs three more temporaries than a product-sum, an
    activation one where a mask takes a register, too."""
    if nest.reduction != "add":
        return target.accumulators - 3
    heavy = any(isinstance(step, Activation) and step.kind != "relu" for step in nest.epilogue)
    return target.accumulators - (1 if heavy and not target.masks else 0)


def revisited(nest: Nest, loops: Iterable[Loop]) -> bool:
    """Whether one of the loops is a reduction: what lies inside it visits the output again."""
    return any(nest.axes[loop.axis].reduction for loop in loops)


def placed_packs(schedule: Schedule, loops: tuple[Loop, ...]) -> list[tuple[int, Pack]]:
    """The packs inside loops and write caches, and how many loops lie around each.

    Raises `LoweringError` for a cache inside a reduction that would round partial sums to a narrow
    output, or end them, each time.
    """
    nest = schedule.nest
    found = [(schedule.depth(pack), pack) for pack in schedule.packs if not at_root(pack)]
    finished = is_narrow(nest.output.dtype) or bool(nest.epilogue)
    for depth, pack in found:
        if pack.operand == 0 and finished and revisited(nest, loops[:depth]):
            raise LoweringError(
                f"a write cache of {nest.output.name} lies inside a reduction loop, but what it "
                "writes back must be final: put the cache outside"
            )
    return found


def form_of(schedule: Schedule, target: Target) -> Form:
    """Decide vector axis, scopes and unrolling; raises `LoweringError` over the target's limits.

    Partial sums of a narrow output get a write cache around all reductions outside the scope.
    """
    form = formed(schedule, target, ())
    output = schedule.nest.output
    cached = any(pack.operand == 0 for pack in schedule.packs)
    if cached or not is_narrow(output.dtype) or not revisited(form.nest, form.loops[: form.scope]):
        return form
    axes = form.nest.axes
    first = next(at for at, loop in enumerate(form.loops) if axes[loop.axis].reduction)
    return formed(schedule, target, ((first, Pack(0, tuple(range(len(output.dims))))),))


def formed(schedule: Schedule, target: Target, more: tuple[tuple[int, Pack], ...]) -> Form:
    """`form_of` with `more` packs than the schedule's, each inside so many loops."""
    problem = packed(schedule)
    nest = problem.nest
    lanes = target.lanes(nest.dtype)
    loops = schedule.canonical
    if len(loops) > MAX_LOOPS:
        raise LoweringError(f"{len(loops)} loops; at most {MAX_LOOPS} are lowered")
    vector = choose_vector(problem, schedule.vector, loops, target)
    loops = with_vector_step(loops, vector, lanes)
    budget = register_budget(nest, target)
    ranges = range_sets(nest, loops)
    scope = first_fit(nest, loops, ranges, vector, budget)
    reduces = [i for i, loop in enumerate(loops) if nest.axes[loop.axis].reduction]
    if reduces and reduces[-1] < scope:
        loops = strip_mine(nest, loops, ranges, vector, budget)
        ranges = range_sets(nest, loops)
        scope = first_fit(nest, loops, ranges, vector, budget)
    shared = parallel_position(schedule, loops)
    if shared is not None:
        scope = max(scope, shared + 1)
    placed = [*placed_packs(schedule, loops), *more]
    if shared is not None:
        if any(depth <= shared for depth, pack in placed if pack.operand == 0):
            raise LoweringError(
                "a write cache outside the parallel loop would be written back whole by each thread"
            )
    problem = with_inner(problem, placed, ranges)
    scope = max([scope, *[pack.depth for pack in problem.inner]])
    limit = furthest(target) // 2
    while (
        scope < len(loops) and reach(nest, problem.operands, loops[scope:], ranges[scope]) > limit
    ):
        scope += 1
    tile = tile_axes(nest, loops[scope:], vector)
    form = Form(problem, target, loops, vector, scope, ranges, tile, (), (), shared)
    form, size = at_scope(form)
    while size > target.code_instructions and form.leads_with_space:
        tile = tile_axes(nest, loops[form.scope + 1 :], vector)
        form, size = at_scope(replace(form, scope=form.scope + 1, tile=tile))
    if size > HARD_LIMIT * target.code_instructions:
        raise LoweringError(
            f"the schedule would unroll into about {size} instructions; "
            f"the limit is {HARD_LIMIT * target.code_instructions}: split or reorder the outer tile"
        )
    return form


def at_scope(form: Form) -> tuple[Form, int]:
    """The form with the unrolling for its scope, and the predicted instructions.

    Reduction loops roll from the outside inward until body and kernel fit the limits.
    """
    axes, ranges = form.nest.axes, form.tile_ranges()
    inside = tuple([loop for loop in form.loops[form.scope :] if axes[loop.axis].reduction])
    tile = tile_size(form, {axis: ranges[axis][0] for axis in form.tile})
    limit = form.target.unroll
    while True:
        at = 0
        while at < len(inside) and too_large(form, inside[:at], inside[at:], tile, limit):
            at += 1
        size = predicted_size(form, inside[:at], inside[at:])
        if size <= form.target.code_instructions or at == len(inside):
            return replace(form, rolled=inside[:at], unrolled=inside[at:]), size
        limit //= 2


def tile_axes(nest: Nest, loops: tuple[Loop, ...], vector: int | None) -> tuple[int, ...]:
    """Spatial axes inside the scope, outermost first; lanes lie below everything."""
    axes = [loop.axis for loop in loops]
    axes += [] if vector is None else [vector]
    return tuple([a for a in dict.fromkeys(axes) if not nest.axes[a].reduction])


def with_vector_step(loops: tuple[Loop, ...], vector: int | None, lanes: int) -> tuple[Loop, ...]:
    """Let the innermost loop over the vector axis step by whole vectors."""
    if vector is None:
        return loops
    at = max(i for i, loop in enumerate(loops) if loop.axis == vector)
    return (*loops[:at], Loop(vector, lanes), *loops[at + 1 :])


def parallel_position(schedule: Schedule, loops: tuple[Loop, ...]) -> int | None:
    """Where the parallel loop ended up: outermost over its axis; None if it makes one trip."""
    if schedule.parallel is None or schedule.trips(schedule.parallel) <= 1:
        return None
    axis = schedule.loops[schedule.parallel].axis
    return next(i for i, loop in enumerate(loops) if loop.axis == axis)


def too_large(
    form: Form, rolled: tuple[Loop, ...], unrolled: tuple[Loop, ...], tile: int, limit: int
) -> bool:
    """Whether a body with `unrolled` in a tile of so many accumulators is over `limit`
    multiply-adds or out of displacements."""
    ranges = below_rolled(form, rolled, unrolled)
    size = tile
    for axis in {loop.axis for loop in unrolled}:
        size *= contributions(form, axis, ranges[axis][0], unrolled)
    if size > limit:
        return True
    moved = reach(form.nest, form.operands, unrolled, ranges, spatial=False)
    return moved > furthest(form.target) // 2


def furthest(target: Target) -> int:
    """Largest displacement of the first byte of a vector."""
    return target.max_displacement - target.vector_bytes


def reach(
    nest: Nest,
    operands: Iterable[Operand],
    loops: Iterable[Loop],
    ranges: Ranges,
    spatial: bool = True,
) -> int:
    """Most bytes an operand moves within the spatial (or reduction) loops."""
    axes = {p.axis for p in loops if nest.axes[p.axis].reduction != spatial}
    lengths = [(a, ranges[a][0] - 1) for a in axes if ranges[a][0] > 1]
    return max(
        [
            op.item_bytes * sum([abs(op.moves[a]) * length for a, length in lengths if op.dims])
            for op in operands
        ]
    )


def below_rolled(form: Form, rolled: tuple[Loop, ...], unrolled: tuple[Loop, ...]) -> Ranges:
    """Range sets where the straight-line body begins."""
    below = dict(form.tile_ranges())
    for loop in rolled:
        if loop in unrolled:
            break
        below[loop.axis] = inner_ranges(below[loop.axis], loop.step)
    return below


def contributions(form: Form, axis: int, extent: int, unrolled: tuple[Loop, ...]) -> int:
    """Terms each accumulator gets from `extent` points of reduction `axis`, lanes taken off."""
    if axis != form.vector:
        return extent
    return count_leaves(extent, tuple([loop.step for loop in unrolled if loop.axis == axis]))


def tile_size(form: Form, extents: Mapping[int, int]) -> int:
    """Accumulators of the tile whose spatial axes have these extents."""
    return math.prod([len(form.leaves(n)) if a == form.vector else n for a, n in extents.items()])


def predicted_size(form: Form, rolled: tuple[Loop, ...], unrolled: tuple[Loop, ...]) -> int:
    """Instructions of the whole nest, to within a small factor, without emitting any."""
    ranges = form.tile_ranges()
    sizes = []  # along an axis, of all variants of the tile; and how many variants there are
    for axis in form.tile:
        lengths: Sequence[int] = ranges[axis]
        if axis == form.vector:
            lengths = [len(form.leaves(extent)) for extent in lengths]
        sizes.append((axis, sum(lengths), len(lengths)))
    tiles = math.prod([size for _, size, _ in sizes])
    terms = predicted_terms(form, rolled, unrolled, ranges)
    inputs = form.operands[1 : 1 + len(form.nest.inputs)]
    reads = 0
    for op in inputs:
        vectors = [size if op.stride_of(axis) else variants for axis, size, variants in sizes]
        reads += vector_size(form, op) * math.prod(vectors)
    if form.transposed is not None:
        return tiles * (2 + form.lanes.bit_length()) + 20 * len(form.loops)
    stores = tiles * (2 if form.reduces_lanes else 1 + vector_size(form, form.operands[0]))
    stores += tiles * sum([STEP_SIZE[step_kind(step)] for step in form.nest.epilogue])
    stores += tiles * sum([vector_size(form, op) for op in form.nest.extras])
    return stores + terms * (tiles + reads) + 20 * len(form.loops)


def step_kind(step: Step) -> str:
    """What `STEP_SIZE` calls a step of an epilogue."""
    return step.kind if isinstance(step, Activation | Combine) else "scale"


def vector_size(form: Form, operand: Operand) -> int:
    """Instructions to read or write one vector: a strided one goes lane by lane.

    Every second element is read by two loads and shuffles.
    """
    narrow = CONVERTED if is_narrow(operand.dtype) else 0
    if form.vector is None or operand.stride_of(form.vector) in (0, 1):
        return 1 + narrow * (4 if operand is form.operands[0] else 1)
    if narrow:
        return 2 * form.lanes
    if operand.stride_of(form.vector) == 2 and operand is not form.operands[0]:
        return 5
    return form.lanes + form.lanes // 2


def predicted_terms(
    form: Form, rolled: tuple[Loop, ...], unrolled: tuple[Loop, ...], ranges: Ranges
) -> int:
    """Terms per accumulator over all bodies, the bodies of tails included."""
    if not rolled:
        axes = {loop.axis for loop in unrolled}
        return math.prod(
            [
                sum([contributions(form, axis, extent, unrolled) for extent in ranges[axis]])
                for axis in axes
            ]
        )
    loop, *rest = rolled
    pieces = inner_ranges(ranges[loop.axis], loop.step)
    return sum(
        predicted_terms(form, tuple(rest), unrolled, {**ranges, loop.axis: (piece,)})
        for piece in pieces
    )
