"""The loops of a schedule as C for gcc, and as LLVM IR for llvmlite: what compilers make of them.

Both get the loops that looptune's default schedule has, bounds and all, around one multiply-add;
packs, register tiles and vectors are then theirs to find. Plain sums of float32 products only.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.contenders import Built, Contender, Problem
from looptune.default import default_schedule
from looptune.errors import UnsupportedError
from looptune.ir import Nest, Operand
from looptune.measure import python_sampler
from looptune.schedule import Schedule

COMMAND = ("gcc", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", "-x", "c")


def build(contender: Contender, problem: Problem) -> Built:
    """The default schedule's loops, compiled; `tune_s` is the compiler's time, text included."""
    (nest, *others) = problem.plan.nests
    if others or not simple(nest):
        raise UnsupportedError(f"{problem.workload.id}: plain float32 contractions are compiled")
    schedule = default_schedule(nest, problem.target, problem.threads)
    start = time.perf_counter()
    function, kept = (by_gcc if contender.library == "gcc" else by_llvm)(schedule)
    tune_s = time.perf_counter() - start
    arrays = [problem.arrays[operand.name] for operand in nest.operands]
    pointers = [array.ctypes.data for array in arrays]

    def result() -> np.ndarray:
        arrays[0][...] = 0
        function(*pointers)
        return arrays[0]

    note = f"{schedule.order}; {kept}"
    return Built(python_sampler(lambda: function(*pointers)), result, tune_s, note)


def simple(nest: Nest) -> bool:
    """Whether a nest is a plain sum of products of float32, all inside the tensors."""
    return (
        len(nest.inputs) == 2 and nest.reduction == "add" and not nest.epilogue
        and not any(op.dtype != "float32" or op.needs_fill(nest.axes) for op in nest.operands)
    )  # fmt: skip


def enclosing(schedule: Schedule) -> list[int | None]:
    """For each loop, the loop of the same axis around it."""
    found: list[int | None] = []
    latest: dict[int, int] = {}
    for at, loop in enumerate(schedule.loops):
        found.append(latest.get(loop.axis))
        latest[loop.axis] = at
    return found


def innermost(schedule: Schedule) -> dict[int, int]:
    """The innermost loop of each axis, whose counter is the axis's index."""
    return {loop.axis: at for at, loop in enumerate(schedule.loops)}


def c_text(schedule: Schedule) -> str:
    """The loops as a C function `f(output, left, right)` that adds to the output."""
    nest, around = schedule.nest, enclosing(schedule)
    lines = ["void f(float *restrict o, const float *restrict a, const float *restrict b) {"]
    for at, (loop, outer) in enumerate(zip(schedule.loops, around, strict=True)):
        extent = nest.axes[loop.axis].extent
        low, high = "0", str(extent)
        if outer is not None:
            low, end = f"i{outer}", f"i{outer} + {schedule.loops[outer].step}"
            high = f"({end} < {extent} ? {end} : {extent})"
        lines.append(f"for (long i{at} = {low}; i{at} < {high}; i{at} += {loop.step})")
    counters = innermost(schedule)
    o, a, b = (c_address(operand, counters) for operand in nest.operands)
    return "\n".join([*lines, f"o[{o}] += a[{a}] * b[{b}];", "}"])


def c_address(operand: Operand, at: dict[int, int]) -> str:
    """The element that an operand's access names."""
    terms = [f"{operand.stride_of(axis)} * i{loop}" for axis, loop in at.items()]
    return " + ".join([*terms, str(operand.base)])


def by_gcc(schedule: Schedule) -> tuple[Callable[..., Any], str]:
    """Compiled by gcc and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.so"
        subprocess.run(
            [*COMMAND, "-", "-o", str(path)], input=c_text(schedule), text=True, check=True,
            capture_output=True,
        )  # fmt: skip
        function = ctypes.CDLL(str(path)).f
    function.argtypes = [ctypes.c_void_p] * 3
    return function, " ".join(COMMAND[:4])


def llvm_module(schedule: Schedule) -> Any:
    """The same function as an `llvmlite.ir.Module`."""
    from llvmlite import ir

    real, whole = ir.FloatType(), ir.IntType(64)
    module = ir.Module()
    pointer = ir.PointerType()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * 3), "f")
    for argument in function.args:
        argument.add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    counters: list[Any] = []
    tails = []
    for loop, outer in zip(schedule.loops, enclosing(schedule), strict=True):
        extent = whole(schedule.nest.axes[loop.axis].extent)
        low, high = whole(0), extent
        if outer is not None:
            low = counters[outer]
            end = builder.add(low, whole(schedule.loops[outer].step))
            high = builder.select(builder.icmp_signed("<", end, extent), end, extent)
        before, body = builder.block, function.append_basic_block()
        builder.branch(body)  # extents are at least 1, so every loop runs once
        builder.position_at_end(body)
        counter = builder.phi(whole)
        counter.add_incoming(low, before)
        counters.append(counter)
        tails.append((counter, body, high, loop.step))
    multiply_add(builder, schedule, counters, real)
    for counter, body, high, step in reversed(tails):
        following = builder.add(counter, whole(step))
        counter.add_incoming(following, builder.block)
        after = function.append_basic_block()
        builder.cbranch(builder.icmp_signed("<", following, high), body, after)
        builder.position_at_end(after)
    builder.ret_void()
    return module


def multiply_add(builder: Any, schedule: Schedule, counters: list[Any], real: Any) -> None:
    """Add the product of two elements to a third."""
    whole, at = counters[0].type, innermost(schedule)
    places = []
    for operand, argument in zip(schedule.nest.operands, builder.function.args, strict=True):
        place = whole(operand.base)
        for axis, loop in at.items():
            moved = builder.mul(counters[loop], whole(operand.stride_of(axis)))
            place = builder.add(place, moved)
        places.append(builder.gep(argument, [place], source_etype=real))
    old, left, right = (builder.load(place, typ=real) for place in places)
    flags = ("fast",)
    total = builder.fadd(old, builder.fmul(left, right, flags=flags), flags=flags)
    builder.store(total, places[0])


def by_llvm(schedule: Schedule) -> tuple[Callable[..., Any], str]:
    """Optimised and compiled by LLVM through llvmlite."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    module = binding.parse_assembly(str(llvm_module(schedule)))
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(engine.get_function_address("f"))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as it does
    return function, f"LLVM {'.'.join(map(str, binding.llvm_version_info))}, O3"
