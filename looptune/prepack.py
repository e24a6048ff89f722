"""Constant operands packed once: `kernel.prepack(weights)` and the code that reads the result.

A snapshot holds an operand as a schedule's pack would leave it: all of it, or the boxes of a
pack inside loops one after another. The kernel that takes it is generated apart, without the
copy; where the schedule is the default one it is chosen anew, with the copy for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looptune.backends import backend_for
from looptune.build import Generated, generate, stages_of
from looptune.default import default_schedule
from looptune.dtypes import ITEM_BYTES, numpy_dtype
from looptune.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from looptune.ir import Nest, Plan, Tensor
from looptune.legalize import legalize
from looptune.lower import GENERATOR_VERSION, form_of, lower_snapshot
from looptune.runtime.call import (
    Arguments,
    Entry,
    InstalledStage,
    as_array,
    check_argument,
    checked_pointers,
    empty_output,
)
from looptune.runtime.kernel import Kernel, Snapshot, Stage, loaded, out_array
from looptune.schedule import Schedule, pack


@dataclass(frozen=True)
class Variant:
    """A kernel that takes a snapshot for input number `number` of its plan.

    `packing` is the code that fills one from the operand; `arguments` are the plan's, with the
    snapshot's elements in the operand's place. `key` tells snapshots of other kernels apart.
    """

    number: int
    key: str
    packing: Stage
    arguments: Arguments
    entry: Entry
    installed: Sequence[InstalledStage]
    schedules: tuple[Schedule, ...]

    @property
    def snapshot(self) -> Tensor:
        """The snapshot as an argument."""
        return self.arguments.inputs[self.number]


def variant_of(kernel: Kernel, number: int) -> Variant:
    """The variant of a kernel for input `number`, generated on its first use."""
    found = kernel.variants.get(number)
    if found is None:
        found = kernel.variants[number] = make_variant(kernel, number)
    return found


def make_variant(kernel: Kernel, number: int) -> Variant:
    """Generate the code for a snapshot of input `number`, and that for making one."""
    plan, name = kernel.plan, kernel.plan.inputs[number].name
    place, operand = only_reader(plan, name)
    schedules = list(kernel.schedules)
    nest = plan.nests[place]
    schedules[place] = constant_schedule(kernel, schedules[place], operand)
    program, size = lower_snapshot(schedules[place], kernel.target, operand)
    packing = Stage(backend_for(kernel.target)(legalize(program)), (0, 1), 0, 1)
    made: list[tuple[Nest, Generated]] = [
        (nest, generate(schedule, kernel.target, operand if at == place else None))
        for at, (nest, schedule) in enumerate(zip(plan.nests, schedules, strict=True))
    ]
    dtype = form_of(schedules[place], kernel.target).operands[operand].dtype
    count = size // ITEM_BYTES[dtype]
    inputs = list(plan.inputs)
    inputs[number] = Tensor(name, dtype, (count,), (1,))
    arguments = Arguments(plan.output, tuple(inputs), plan.temporaries, plan.flops, plan.spec)
    entry, installed = loaded(arguments, stages_of(plan, made), True)
    text = json.dumps([
        plan.key, number, GENERATOR_VERSION, repr(kernel.target),
        [schedule.identity for schedule in schedules], nest.key,
    ])  # fmt: skip
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Variant(number, key, packing, arguments, entry, installed, tuple(schedules))


def only_reader(plan: Plan, name: str) -> tuple[int, int]:
    """The nest that reads a tensor, and the operand that it is there.

    Raises `UnsupportedError` unless exactly one nest multiplies or sums it.
    """
    readers = [
        (at, operand)
        for at, nest in enumerate(plan.nests)
        for operand, read in enumerate(nest.operands)
        if read.name == name
    ]
    if len(readers) != 1 or readers[0][1] > len(plan.nests[readers[0][0]].inputs):
        raise UnsupportedError(
            f"prepack: {name} is read {len(readers)} times by the plan, or by an epilogue; a "
            "factor or summand of one nest would do"
        )
    return readers[0]


def constant_schedule(kernel: Kernel, schedule: Schedule, operand: int) -> Schedule:
    """The schedule with exactly one pack of the operand."""
    if kernel.origin == "default":
        return default_schedule(schedule.nest, kernel.target, kernel.threads, operand)
    packs = [made for made in schedule.packs if made.operand == operand]
    return schedule if packs else pack(schedule, operand)


def take_snapshot(kernel: Kernel, array: object, operand: int) -> Snapshot:
    """Pack `array` for input number `operand` of the kernel.

    Raises `ArgumentError` for an operand the kernel has not, and as a call does for an array
    that it would not take.
    """
    inputs = kernel.plan.inputs
    if type(operand) is not int or not 0 <= operand < len(inputs):
        raise ArgumentError(f"prepack: operand={operand!r}; 0..{len(inputs) - 1} would do")
    kernel.entry_or_raise()
    source = as_array(array, operand)
    check_argument(inputs[operand], source, f"input {operand} ({inputs[operand].name})")
    variant = variant_of(kernel, operand)
    tensor = variant.snapshot
    packed = aligned_empty(tensor)
    arguments = Arguments(tensor, (inputs[operand],), (), 0, "")
    entry, _installed = loaded(arguments, [variant.packing], True)
    entry.run_pointers((packed.ctypes.data, source.ctypes.data), 1)
    packed.flags.writeable = False
    return Snapshot(variant.key, operand, packed)


def aligned_empty(tensor: Tensor) -> np.ndarray:
    """An array of one dimension that begins with a cache line."""
    item = ITEM_BYTES[tensor.dtype]
    room = np.zeros(tensor.shape[0] + 64 // item, numpy_dtype(tensor.dtype))
    first = -room.ctypes.data % 64 // item
    return room[first : first + tensor.shape[0]]


def run_with_snapshot(kernel: Kernel, inputs: Sequence[object], out: object) -> np.ndarray:
    """Compute the kernel's plan with one input a snapshot of its own; the result's array.

    Raises `ArgumentTypeError` for a snapshot of another kernel or in another's place.
    """
    (number, snapshot), *more = [
        (i, given) for i, given in enumerate(inputs) if isinstance(given, Snapshot)
    ]
    if more:
        raise ArgumentTypeError("two snapshots in one call; one is supported")
    if snapshot.operand != number or snapshot.key != variant_of(kernel, number).key:
        raise ArgumentTypeError(
            f"input {number} is a snapshot of another kernel, or of its input {snapshot.operand}; "
            "one that this kernel's prepack made would do"
        )
    variant = variant_of(kernel, number)
    arrays = [
        given.array if isinstance(given, Snapshot) else as_array(given, i)
        for i, given in enumerate(inputs)
    ]
    result = empty_output(variant.arguments.output) if out is None else out_array(out)
    pointers = checked_pointers(variant.arguments, arrays, result)
    variant.entry.run_pointers(pointers, kernel.threads)
    return result
