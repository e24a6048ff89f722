"""TVM 0.27: the nest as a compute definition, compiled as it stands or tuned by MetaSchedule.

Since 0.25 `tvm.tir` is `tvm.tirx` and `tvm.s_tir`, where MetaSchedule lives, too. A call is timed
by TVM's own `time_evaluator`, which leaves Python out: in TVM's favour. With
apache-tvm-ffi 0.1.15.post2 pickling a module, as MetaSchedule's builder does, is a segmentation
fault; 0.1.14.post1 works.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.contenders import Built, Contender, Problem
from looptune.bench import plain
from looptune.errors import MeasurementError, UnsupportedError
from looptune.host import available_cores, fingerprint
from looptune.ir import Nest, Operand

TUNED = Path(__file__).parents[1] / ".tuned"  # what MetaSchedule found, on this machine
BUILD_SECONDS = 300.0  # a worker of its builder takes 20 s to start on a busy machine


def build(contender: Contender, problem: Problem) -> Built:
    """The compiled function for the host's processor, on TVM tensors of the problem's operands."""
    import tvm

    plan = problem.plan
    if len(plan.nests) != 1:
        raise UnsupportedError(f"{problem.workload.id}: {len(plan.nests)} nests; TVM gets one")
    target = tvm.target.Target({
        "kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(),
        "num-cores": problem.threads,
    })  # fmt: skip
    module = tvm.IRModule({"main": definition(plan.nests[0])})
    note, searched = "no schedule", 0.0
    if contender.way == "metaschedule":
        trials = int(contender.budget or 64)
        module, searched = kept(module, target, trials, problem.seed)
        note = f"{trials} trials"
    elif contender.way != "default":
        raise UnsupportedError(f"{contender}: tvm/default or tvm/metaschedule@TRIALS would do")
    start = time.perf_counter()
    executable = tvm.compile(module, target=target)
    tune_s = searched + time.perf_counter() - start
    arrays = [problem.arrays[tensor.name] for tensor in (*plan.inputs, plan.output)]
    operands = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]

    def sample(calls: int) -> float:
        timer = executable.mod.time_evaluator("main", tvm.cpu(), number=calls, repeat=1)
        return float(timer(*operands).mean) * calls

    def result() -> np.ndarray:
        executable["main"](*operands)
        return np.asarray(operands[-1].numpy())

    return Built(sample, result, tune_s, f"{note}; {target}")


def definition(nest: Nest) -> Any:
    """A nest as a TVM function of its inputs and its output.

    An operand that is read outside its bounds gets a padding stage of its own, as in TVM's library
    of operators. Raises `UnsupportedError` for what this does not cover.
    """
    from tvm import te

    spatial = [dim.coefficients.index(1) for dim in nest.output.dims] if plain(nest.output) else []
    if sorted(spatial) != list(nest.spatial) or nest.accumulate or nest.epilogue:
        raise UnsupportedError(f"{nest}: TVM gets plain contractions")
    if nest.reduction != "add" or nest.output.dtype not in ("float32", "float64"):
        raise UnsupportedError(f"{nest}: TVM gets sums of float32 or float64")
    inputs = [te.placeholder(op.shape, name=op.name, dtype=op.dtype) for op in nest.inputs]
    sources = [padded(op, x, nest) for op, x in zip(nest.inputs, inputs, strict=True)]
    reductions = {
        number: te.reduce_axis((0, nest.axes[number].extent), name=nest.axes[number].name)
        for number in nest.reductions
    }

    def element(*index: Any) -> Any:
        at = dict(zip(spatial, index, strict=True)) | reductions
        factors = [
            source[tuple(entry(dim.coefficients, dim.offset + low, at) for dim, low in pairs)]
            for source, pairs in sources
        ]
        product = factors[0] if len(factors) == 1 else factors[0] * factors[1]
        return te.sum(product, axis=list(reductions.values())) if reductions else product

    output = te.compute(nest.output.shape, element, name=nest.output.name)
    return te.create_prim_func([*inputs, output])


def entry(coefficients: tuple[int, ...], offset: int, at: dict[int, Any]) -> Any:
    """An affine index expression."""
    terms = [c * at[number] if c != 1 else at[number] for number, c in enumerate(coefficients) if c]
    return sum(terms[1:], terms[0]) + offset if terms else offset


def padded(operand: Operand, tensor: Any, nest: Nest) -> tuple[Any, list[tuple[Any, int]]]:
    """The tensor, in a border of its fill if the nest reads one, and how wide that is below."""
    from tvm import te, tirx

    margins = operand.overhang(nest.axes)
    pairs = [(dim, low) for dim, (low, _) in zip(operand.dims, margins, strict=True)]
    if not operand.needs_fill(nest.axes):
        return tensor, [(dim, 0) for dim in operand.dims]
    sides = [(low, dim.size) for dim, low in pairs]
    shape = [low + n + high for n, (low, high) in zip(operand.shape, margins, strict=True)]

    def element(*index: Any) -> Any:
        inside = [
            tirx.all(i >= low, i < low + size)
            for i, (low, size), margin in zip(index, sides, margins, strict=True)
            if any(margin)
        ]
        moved = tuple(i - low for i, (low, _) in zip(index, sides, strict=True))
        fill = tirx.const(operand.fill, operand.dtype)
        return tirx.if_then_else(tirx.all(*inside), tensor[moved], fill)

    return te.compute(shape, element, name=f"{operand.name}_padded"), pairs


def kept(module: Any, target: Any, trials: int, seed: int) -> tuple[Any, float]:
    """The module that `tuned` finds and the seconds it took, searched once on a machine: a new
    kernel of ours does not call for a new search of theirs. Raises as `tuned` does."""
    import tvm

    text = json.dumps([tvm.ir.save_json(module), str(target), trials, seed, fingerprint().digest])
    digest = hashlib.sha256(f"{tvm.__version__} {text}".encode()).hexdigest()
    path = TUNED / f"{digest[:32]}.json"
    if path.exists():
        record = json.loads(path.read_text())
        return tvm.ir.load_json(record["module"]), record["seconds"]
    import tvm.s_tir.tensor_intrin  # parses GPU intrinsics for 30 s, which is not tuning

    start = time.perf_counter()
    found = tuned(module, target, trials, seed)
    seconds = time.perf_counter() - start
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"seconds": seconds, "module": tvm.ir.save_json(found)}))
    os.replace(part, path)
    return found, seconds


def tuned(module: Any, target: Any, trials: int, seed: int) -> Any:
    """The module under the best schedule of so many trials; raises `MeasurementError` if none
    could be measured."""
    from tvm.s_tir import meta_schedule as ms

    with tempfile.TemporaryDirectory() as folder:
        database = ms.tune_tir(
            module, target, folder, max_trials_global=trials,
            num_trials_per_iter=min(64, trials), seed=seed, cost_model=cost_model(),
            builder=ms.builder.LocalBuilder(timeout_sec=BUILD_SECONDS),
            runner=ms.runner.LocalRunner(timeout_sec=BUILD_SECONDS),
            num_tuning_cores=available_cores(),
        )  # fmt: skip
        schedule = ms.tir_integration.compile_tir(database, module, target)
    if schedule is None:
        raise MeasurementError(f"MetaSchedule measured none of its {trials} candidates")
    return schedule.mod


def cost_model() -> str:
    """MetaSchedule's own choice, which needs xgboost; raises `ImportError` without it."""
    import xgboost

    assert xgboost.__version__
    return "xgb"
