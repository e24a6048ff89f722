"""Why a kernel is as fast as it is: its register tile, loops, instruction mix and roofline."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from looptune.lower import form_of
from looptune.lower.form import tile_size
from looptune.program import Program, walk
from looptune.runtime.kernel import Kernel
from looptune.schedule import Loop, Schedule
from looptune.target import Target


@dataclass(frozen=True)
class NestExplanation:
    """What the lowering made of one schedule."""

    loops: tuple[str, ...]
    vector: str
    tile: dict[str, int]
    accumulators: int
    accumulators_available: int
    rolled: tuple[str, ...]
    unrolled: tuple[str, ...]
    packs: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """`str()` of it is for people. `intensity` is in flop/byte, `compute_cycles` of one core."""

    nests: tuple[NestExplanation, ...]
    instructions: dict[str, int]
    code_bytes: int
    flops: int
    min_bytes: int
    compute_cycles: float

    @property
    def intensity(self) -> float:
        """Operations for each byte that has to move at least once."""
        return self.flops / self.min_bytes if self.min_bytes else 0.0

    def __str__(self) -> str:
        lines = [line for nest in self.nests for line in nest_lines(nest)]
        mix = ", ".join(f"{count} {name}" for name, count in self.instructions.items())
        lines.append(f"operations: {mix} ({self.code_bytes} bytes of code)")
        lines.append(
            f"roofline: {self.flops} flop over at least {self.min_bytes} bytes = "
            f"{self.intensity:.1f} flop/byte; at least {self.compute_cycles:.0f} cycles of FMA"
        )
        return "\n".join(lines)


def nest_lines(nest: NestExplanation) -> list[str]:
    """One fact a line."""
    tile = " x ".join(f"{name}:{size}" for name, size in nest.tile.items()) or "one element"
    lines = [
        f"register tile: {tile}, {nest.accumulators} accumulators "
        f"of {nest.accumulators_available}; lanes along {nest.vector}",
        f"loops around it: {' '.join(nest.loops) or 'none'}",
        f"output stays in registers over: {' '.join((*nest.rolled, *nest.unrolled)) or 'nothing'}"
        f" (rolled: {' '.join(nest.rolled) or 'none'})",
    ]
    return lines + [f"packed: {', '.join(nest.packs)}"] * bool(nest.packs)


def explain_nest(schedule: Schedule, target: Target) -> NestExplanation:
    """The decisions of the lowering for one schedule."""
    nest = schedule.nest
    if nest.points == 0:
        return NestExplanation((), "none", {}, 0, target.accumulators, (), (), ())
    form = form_of(schedule, target)
    names = [axis.name for axis in nest.axes]
    ranges = form.tile_ranges()
    extents = {axis: max(ranges[axis]) for axis in form.tile}

    def words(loops: tuple[Loop, ...]) -> tuple[str, ...]:
        return tuple(f"{names[loop.axis]}:{loop.step}" for loop in loops)

    return NestExplanation(
        loops=words(form.loops[: form.scope]),
        vector="nothing" if form.vector is None else names[form.vector],
        tile={names[axis]: size for axis, size in extents.items()},
        accumulators=tile_size(form, extents),
        accumulators_available=target.accumulators,
        rolled=words(form.rolled),
        unrolled=words(form.unrolled),
        packs=tuple(
            f"{nest.operands[pack.operand].name} at "
            f"{'the root' if isinstance(pack.at, str) else schedule.name(pack.at)}"
            for pack in schedule.packs
        ),
    )


def instruction_mix(programs: tuple[Program, ...]) -> dict[str, int]:
    """Operations by kind, most frequent first."""
    found = Counter(type(op).__name__.lower() for p in programs for op in walk(p.body))
    return dict(found.most_common())


def explain(kernel: Kernel) -> Explanation:
    """Explain a kernel from its schedules and Programs; nothing is run."""
    target = kernel.target
    per_cycle = 2 * target.fma_per_cycle * target.lanes(kernel.plan.nests[-1].dtype)
    return Explanation(
        nests=tuple(explain_nest(schedule, target) for schedule in kernel.schedules),
        instructions=instruction_mix(kernel.programs),
        code_bytes=len(kernel.code_bytes),
        flops=kernel.plan.flops,
        min_bytes=kernel.plan.min_bytes,
        compute_cycles=kernel.plan.flops / per_cycle,
    )
