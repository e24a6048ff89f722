"""A compiled, callable plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from looptune.errors import (
    ArgumentError,
    ArgumentTypeError,
    ScheduleError,
    UnsupportedHostError,
)
from looptune.host import runs
from looptune.ir import Plan
from looptune.program import Program
from looptune.runtime.call import (
    Arguments,
    CtypesEntry,
    Entry,
    InstalledStage,
    as_array,
    checked_pointers,
    empty_output,
    extension,
    layout_of,
    like,
    make_entry,
)
from looptune.runtime.memory import install
from looptune.schedule import Action, Schedule, replay
from looptune.target import Target

if TYPE_CHECKING:
    from looptune.explain import Explanation
    from looptune.measure import Samples
    from looptune.prepack import Variant
    from looptune.tune import Report


@dataclass(frozen=True)
class Stage:
    """Machine code of one Program; `tensors` number the plan's tensors in its pointer order.

    The number behind the last tensor means the scratch itself. `private_bytes` of scratch are
    wanted by each thread for itself, 0 where it is shared.
    """

    code: bytes
    tensors: tuple[int, ...]
    scratch_bytes: int
    trips: int
    private_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A constant operand as `Kernel.prepack` left it, for that kernel only; read-only.

    `operand` is the input it stands for, `key` tells whose it is.
    """

    key: str
    operand: int
    array: np.ndarray


# The extension's Caller goes through its Entry and comes to `checked` for what is unusual.
Base: Any = object if extension is None else extension.Caller


class Kernel(Base):  # type: ignore[misc]
    """`kernel(*inputs, out=None)` computes the plan; safe to share between threads.

    Inputs come in the plan's order, with the dtype, shape and strides it was made for: NumPy
    arrays, buffers, or CPU tensors by DLPack; one that requires a gradient is refused unless torch
    keeps none. The result is of the first input's kind. An `out` must not share memory with an
    input, and is required where the plan accumulates into it.

    Raises `ArgumentTypeError` and `ArgumentError`, which say what was found and needed, and
    `UnsupportedHostError` on a machine without the kernel's instructions.
    """

    def __init__(
        self,
        plan: Plan,
        schedules: tuple[Schedule, ...],
        stages: tuple[Stage, ...],
        target: Target,
        origin: str,
        programs: tuple[Program, ...],
        *,
        threads: int = 1,
        native: bool = True,
    ) -> None:
        self.plan = plan
        self.schedules = schedules
        self.stages = stages
        self.target = target
        self.origin = origin
        self.programs = programs
        self.threads = threads
        self.report: Report | None = None
        self.variants: dict[int, Variant] = {}
        self.entry: Entry | None = None
        if runs(target):
            self.load(native)

    def load(self, native: bool) -> None:
        """Install the code and choose the call path."""
        entry, self.installed = loaded(self.plan, self.stages, native)
        entry.threads = self.threads
        if not isinstance(entry, CtypesEntry):
            self.bind(entry)
        self.entry = entry

    def with_path(self, *, native: bool) -> Kernel:
        """The same kernel, called through the C extension or not."""
        return Kernel(
            self.plan, self.schedules, self.stages, self.target, self.origin, self.programs,
            threads=self.threads, native=native,
        )  # fmt: skip

    def checked(self, *inputs: object, out: object = None) -> object:
        """Compute the plan; arguments the fast path does not take are checked one by one."""
        if out is not None and isinstance(self.entry, CtypesEntry):
            result = self.entry(*inputs, out=out)
            if result is not NotImplemented:
                return result
        if len(inputs) != len(self.plan.inputs):
            names = [tensor.name for tensor in self.plan.inputs]
            raise ArgumentTypeError(
                f"the kernel takes {len(names)} inputs {names}; {len(inputs)} were given"
            )
        if out is None and self.plan.accumulates:
            raise ArgumentError("out is missing: the kernel adds to what it holds")
        if any(isinstance(operand, Snapshot) for operand in inputs):
            from looptune.prepack import run_with_snapshot

            result = run_with_snapshot(self, inputs, out)
        else:
            arrays = [as_array(operand, number) for number, operand in enumerate(inputs)]
            result = empty_output(self.plan.output) if out is None else out_array(out)
            self.entry_or_raise().run_pointers(self.pointers(arrays, result), self.threads)
        if out is not None:
            return out
        return like(inputs[0], result) if inputs else result

    def prepack(self, array: object, operand: int = 1) -> Snapshot:
        """A snapshot of a constant input, to be given in its place: `kernel(x, snapshot)`.

        It holds the operand in the order in which the kernel reads it, and is accepted by this
        kernel only (and its equals: the same plan, target and schedule). Later changes of `array`
        do not reach it. `operand` numbers the inputs: 1 is a matmul's b, a convolution's weights.

        Raises `ArgumentError` for an array that the kernel would not take, `UnsupportedError`
        for an input of an epilogue.
        """
        from looptune.prepack import take_snapshot

        return take_snapshot(self, array, operand)

    def entry_or_raise(self) -> Entry:
        """What runs the code; raises `UnsupportedHostError` where nothing can."""
        if self.entry is None:
            raise UnsupportedHostError(
                f"this machine does not run {self.target.isa} code; looptune.interpret does"
            )
        return self.entry

    def pointers(self, inputs: Sequence[np.ndarray], out: np.ndarray) -> tuple[int, ...]:
        """Checked addresses of output and inputs."""
        return checked_pointers(self.plan, inputs, out)

    if extension is None:
        __call__ = checked

    @property
    def schedule(self) -> Schedule:
        """The schedule of the (last) nest."""
        return self.schedules[-1]

    @property
    def loop_tree(self) -> str:
        """Every nest's loops, outermost first, as text: extents, steps, packs, what is computed."""
        return "\n\n".join(str(schedule) for schedule in self.schedules)

    @property
    def boundaries(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Per nest and axis, the positions where tiles meet: where a check should look."""
        return tuple(schedule.boundaries for schedule in self.schedules)

    @property
    def code_bytes(self) -> bytes:
        """The machine code of all stages."""
        return b"".join(stage.code for stage in self.stages)

    @property
    def asm(self) -> str:
        """Disassembly of the machine code as it runs, copies of operands included, as text."""
        from looptune.backends import disassemble

        return "\n\n".join(disassemble(stage.code) for stage in self.stages)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one call; a multiply-add counts as 2."""
        return self.plan.flops

    def measure(self, *, seconds: float = 0.2) -> Samples:
        """Seconds a call of the kernel alone, on its threads, for some `seconds` in all.

        The operands are random and always the same, so they are hot: in cache, if they fit. For
        cold ones see `looptune.measure.compare`.
        """
        from looptune.measure import measure

        return measure(self, seconds=seconds)

    def explain(self) -> Explanation:
        """Register tile, loops, instruction mix, roofline."""
        from looptune.explain import explain

        return explain(self)

    def __str__(self) -> str:
        return self.loop_tree

    def __repr__(self) -> str:
        nests = self.plan.nests
        what = str(nests[0]).partition("  [")[0] if len(nests) == 1 else f"{len(nests)} nests"
        spec = self.plan.spec or what
        return f"<Kernel {spec} for {self.target.name} from {self.origin}>"

    def __reduce__(self) -> tuple[object, ...]:
        for schedule in self.schedules:
            if replay(schedule.nest, schedule.actions) != schedule:
                raise ScheduleError(
                    f"the schedule {schedule.order!r} was not made by primitives from the untuned "
                    "nest, so it cannot be pickled as actions"
                )
        actions = tuple(schedule.actions for schedule in self.schedules)
        return rebuild, (self.plan, actions, self.target, self.origin, self.threads)


def loaded(
    arguments: Plan | Arguments, stages: Sequence[Stage], native: bool
) -> tuple[Entry, list[InstalledStage]]:
    """What runs the stages over the arguments, and the installed code, to be kept as long."""
    installed = [
        InstalledStage(install(s.code), s.tensors, s.trips, s.private_bytes) for s in stages
    ]
    layout = layout_of(arguments, max((s.scratch_bytes for s in stages), default=0))
    return make_entry(arguments, installed, layout, native), installed


def out_array(out: object) -> np.ndarray:
    """An `out` argument as an array on its memory."""
    array = as_array(out, -1)
    if not isinstance(out, np.ndarray) and array.base is None and array.ndim == 0:
        raise ArgumentTypeError(f"out is a {type(out).__name__}; an array would do")
    return array


def rebuild(
    plan: Plan,
    actions: tuple[tuple[Action, ...], ...],
    target: Target,
    origin: str,
    threads: int = 1,
) -> Kernel:
    """A kernel from its provenance: how kernels pickle."""
    from looptune.build import build

    schedules = [replay(nest, steps) for nest, steps in zip(plan.nests, actions, strict=True)]
    return build(plan, schedules, target, origin=origin, threads=threads)
