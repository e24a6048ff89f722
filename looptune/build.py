"""From a plan and its schedules to a kernel: the one place where the stages meet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from looptune.backends import backend_for
from looptune.errors import ScheduleError
from looptune.ir import Nest, Plan, plan_of
from looptune.legalize import legalize
from looptune.lower import lower
from looptune.program import Program
from looptune.runtime.kernel import Kernel, Stage
from looptune.schedule import Schedule
from looptune.target import Target


@dataclass(frozen=True)
class Generated:
    """Programs and machine code of one nest, and the seconds they took."""

    programs: tuple[Program, ...]
    codes: tuple[bytes, ...]
    seconds: float


def generate(schedule: Schedule, target: Target, prepacked: int | None = None) -> Generated:
    """Lower, legalize and encode one schedule, an operand of which may be a snapshot."""
    start = time.perf_counter()
    programs = tuple(legalize(program) for program in lower(schedule, target, prepacked))
    emit = backend_for(target)
    codes = tuple(emit(program) for program in programs)
    return Generated(programs, codes, time.perf_counter() - start)


def build(
    plan: Plan | Nest,
    schedules: Sequence[Schedule],
    target: Target,
    *,
    origin: str = "schedule",
    threads: int = 1,
) -> Kernel:
    """A callable kernel for `plan`, one schedule a nest. Runs nothing and verifies nothing."""
    plan = plan_of(plan) if isinstance(plan, Nest) else plan
    if len(schedules) != len(plan.nests):
        raise ScheduleError(f"{len(schedules)} schedules for the {len(plan.nests)} nests of a plan")
    for schedule, nest in zip(schedules, plan.nests, strict=True):
        if schedule.nest.key != nest.key:
            raise ScheduleError(f"the schedule is of {schedule.nest}; the nest is {nest}")
    made = [(nest, generate(s, target)) for nest, s in zip(plan.nests, schedules, strict=True)]
    programs = tuple(program for _, generated in made for program in generated.programs)
    stages = stages_of(plan, made)
    return Kernel(plan, tuple(schedules), stages, target, origin, programs, threads=threads)


def stages_of(plan: Plan, made: Sequence[tuple[Nest, Generated]]) -> tuple[Stage, ...]:
    """The Programs of a plan's nests, in order, with the plan's tensors that each takes."""
    number = {tensor.name: i for i, tensor in enumerate(plan.tensors)}
    stages = []
    for nest, generated in made:
        tensors = tuple(number[operand.name] for operand in nest.operands)
        for program, code in zip(generated.programs, generated.codes, strict=True):
            private = program.scratch_bytes if program.private_scratch else 0
            pointers = (*tensors, len(number)) if private else tensors
            stages.append(Stage(code, pointers, program.scratch_bytes, program.trips, private))
    return tuple(stages)
