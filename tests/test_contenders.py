"""Contenders: their adapters, their processes, and rows that say why something is missing."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import looptune
from experiments import end_to_end, header, matmul25, matmul2197, tuning_curve, versus
from experiments.contenders import Built, Contender, Problem, build, contender_named, process, tvm
from experiments.contenders.arena import Arena, Lost, Rules
from looptune.errors import (
    ArgumentError,
    LooptuneError,
    MeasurementError,
    UnsupportedError,
    VerificationError,
)
from looptune.ir import Nest
from looptune.reference import verify
from looptune.workloads import fuse
from looptune.workloads.suites import Workload, load, parse_records

CONV = {
    "id": "test/conv", "kind": "conv2d", "dtype": "float32", "layout": "NCHW",
    "flops": 2 * 8 * 3 * 9 * 49,
    "shape": {"N": 1, "C": 3, "H": 14, "W": 13, "K": 8, "R": 3, "S": 3, "stride": [2, 2],
              "padding": [1, 1], "dilation": [1, 1], "groups": 1},
}  # fmt: skip
NHWC = {**CONV, "id": "test/nhwc", "layout": "NHWC"}
MATMUL = {
    "id": "test/mm", "kind": "matmul", "dtype": "float32", "flops": 2 * 33 * 20 * 18,
    "shape": {"M": 33, "K": 20, "N": 18},
}  # fmt: skip
PACKAGES = {"torch": "torch", "tvm": "tvm", "loop_tool": "loop_tool", "llvmlite": "llvmlite"}


def workload_of(record: dict[str, Any]) -> Workload:
    (found,) = parse_records(json.dumps([record]))
    return found


def needs(name: str) -> None:
    library = contender_named(name).library
    if library == "gcc" and shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if library in PACKAGES:
        pytest.importorskip(PACKAGES[library], reason=f"{library} is not installed")


def test_names_are_read_as_they_are_written() -> None:
    assert contender_named("tvm/metaschedule@64") == Contender("tvm", "metaschedule", 64)
    assert contender_named("numpy") == Contender("numpy", "default", None)
    assert str(contender_named("looptune/policy@0.1")) == "looptune/policy@0.1"


@pytest.mark.parametrize(("name", "said"), [("halide", "no library"), ("numpy@x", "budget 'x'")])
def test_a_name_that_is_none(name: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        contender_named(name)


@pytest.mark.parametrize("record", [MATMUL, CONV, NHWC], ids=lambda record: record["id"])
@pytest.mark.parametrize(
    "name", ["looptune", "looptune/untuned", "looptune/policy", "torch", "tvm"]
)
def test_every_library_computes_the_same(name: str, record: dict[str, Any]) -> None:
    needs(name)
    problem = Problem(workload_of(record))
    built = build(contender_named(name), problem)
    verify(problem.plan, problem.arrays, built.result())
    assert built.sample(2) > 0
    assert built.tune_s >= 0


@pytest.mark.parametrize(
    "name", ["looptune/4x2v", "looptune/6x2v", "numpy", "loop_tool", "gcc", "llvmlite"]
)
def test_matmuls_of_those_that_have_no_convolution(name: str) -> None:
    needs(name)
    problem = Problem(workload_of(MATMUL))
    verify(problem.plan, problem.arrays, build(contender_named(name), problem).result())
    with pytest.raises(LooptuneError, match=r"not for test/conv|no call|would do|are compiled"):
        build(contender_named(name), Problem(workload_of(CONV)))


@pytest.mark.parametrize("name", ["torch/eager", "tvm/autotvm", "looptune/luck"])
def test_a_way_that_a_library_lacks(name: str) -> None:
    needs(name)
    with pytest.raises(LooptuneError, match=r"are|would do|is none of"):
        build(contender_named(name), Problem(workload_of(MATMUL)))


@pytest.mark.parametrize("name", ["loop_tool/wasm", "loop_tool/default@3"])
def test_loop_tool_has_one_way_with_or_without_its_package(name: str) -> None:
    with pytest.raises(LooptuneError, match=rf"{name}: loop_tool has one way"):
        build(contender_named(name), Problem(workload_of(MATMUL)))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(Rules(rounds=2, seconds=0.01)) as found:
        yield found


def test_a_row_has_figures_or_reasons(arena: Arena) -> None:
    names = ("looptune", "looptune/6x2v", "numpy")
    mine = arena.row(workload_of(MATMUL), tuple(map(contender_named, names)))
    assert list(mine) == ["looptune/default", "looptune/6x2v", "numpy/default"]
    assert all(cell["gflops"] > 0 for cell in mine.values())
    assert mine["looptune/default"]["ratio"] == 1
    other = arena.row(workload_of(CONV), tuple(map(contender_named, names)))
    assert "UnsupportedError" in other["numpy/default"]["error"]
    assert other["looptune/default"]["tune_s"] > 0
    assert len(arena.seats) == 3


def test_a_process_that_dies_is_a_reason(arena: Arena) -> None:
    contender = contender_named("numpy")
    arena.made(contender, workload_of(MATMUL))
    killed = arena.seats[contender].process
    assert killed is not None
    killed.kill()
    row = arena.timed({str(contender): arena.sampler(contender)}, found := {})
    assert row == {}
    assert "worker lost" in found[str(contender)]["error"]


def test_what_fails_while_it_is_timed_costs_the_others_nothing() -> None:
    """It answers twice, so it is lost in the middle of a round."""
    answers = iter([1e-5, 1e-5])

    def dying(calls: int) -> float:
        for seconds in answers:
            return seconds
        raise Lost("b/default", MeasurementError("worker lost"))

    found: dict[str, dict[str, Any]] = {}
    with Arena(Rules(rounds=3, seconds=0.01)) as arena:
        samples = arena.timed({"a/default": lambda calls: 2e-5, "b/default": dying}, found)
    assert list(samples) == ["a/default"]
    assert found == {"b/default": {"error": "worker lost"}}


def test_a_wrong_result_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Built(lambda calls: 1.0, lambda: np.zeros((33, 18), np.float32), 0.0)
    monkeypatch.setattr(process, "build", lambda *_: wrong)
    state, _ = process.answered({"contender": "numpy"}, None)
    request = process.problem_of(workload_of(MATMUL), 1, None, 0)
    with pytest.raises(VerificationError, match="the reference is"):
        process.answered(request, state)


ROWS = {
    "a": {"x": {"ratio": 1.0, "tune_s": 1.0, "gflops": 8.0}, "y": {"ratio": 2.0, "gflops": 4.0}},
    "b": {"x": {"ratio": 1.0, "tune_s": 4.0, "gflops": 2.0}, "y": {"error": "no"}},
    "c": {"x": {"ratio": 2.0, "tune_s": 2.0, "gflops": 2.0}, "y": {"ratio": 1.0, "gflops": 4.0},
          "z": {"error": "gone"}},
}  # fmt: skip


def test_means_are_over_rows_that_have_both() -> None:
    assert versus.over(ROWS, "x", "y") == [2.0, 0.5]
    assert versus.means(ROWS, "x", ["y"])["y"] == {"geomean": 1.0, "least": 0.5, "n": 2}
    assert versus.tuning(ROWS, "x") == pytest.approx(2.0)
    assert versus.failures(ROWS) == {"z": "gone"}
    table = versus.table({"rows": ROWS, "peak_gflops": 16.0}, ("x", "z"))
    assert "0.20" in table
    assert "gone" in table


def test_rows_are_kept_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def row(self: Arena, workload: Workload, contenders: tuple[Contender, ...]) -> dict[str, Any]:
        made.append(workload.id)
        absent, there = {"error": "ModuleNotFoundError: tvm"}, {"gflops": 1.0, "ratio": 1.0}
        return {str(each): absent if each.library == "tvm" else there for each in contenders}

    monkeypatch.setattr(Arena, "row", row)
    path = tmp_path / "rows.json"
    jobs = [(workload_of(MATMUL), (contender_named("numpy"),))]
    versus.compare(jobs, Rules(), path, "command")
    result = versus.compare(jobs, Rules(), path, "command")
    assert made == ["test/mm"]
    assert result["rows"] == json.loads(path.read_text())["rows"]
    assert {"machine", "versions", "commit", "config", "command", "date"} <= set(result)
    joined = [(workload_of(MATMUL), (contender_named("numpy"), contender_named("tvm")))]
    versus.compare(joined, Rules(), path, "command")
    versus.compare(joined, Rules(), path, "command")
    assert len(made) == 3, "what failed for want of a library is tried again"
    with pytest.raises(versus.StaleResultError, match="has another config"):
        versus.compare(jobs, Rules(seconds=3.0), path, "command")
    monkeypatch.setattr(header, "GENERATOR_VERSION", 0)
    with pytest.raises(versus.StaleResultError, match="has another versions"):
        versus.compare(jobs, Rules(), path, "command")


def test_a_way_that_no_peer_has() -> None:
    with pytest.raises(UnsupportedError, match=r"no peer 'numpy/eager'; \['numpy', 'torch'"):
        build(contender_named("numpy/eager"), Problem(workload_of(MATMUL)))


def nest_of(accumulate: bool = False, **options: Any) -> Nest:
    (nest,) = looptune.workloads.matmul(8, 8, 8, **options).nests
    return replace(nest, accumulate=accumulate)


@pytest.mark.parametrize(
    ("nest", "said"),
    [
        (nest_of(accumulate=True), "TVM gets plain contractions"),
        (fuse(looptune.workloads.matmul(8, 8, 8), "relu").nests[0], "TVM gets plain contractions"),
        (nest_of(dtype="float16"), "TVM gets sums of float32 or float64"),
    ],
    ids=["accumulating", "epilogue", "float16"],
)
def test_nests_that_tvm_does_not_get(
    nest: Nest, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tvm", SimpleNamespace(te=None))
    with pytest.raises(UnsupportedError, match=said):
        tvm.definition(nest)


def test_plans_that_tvm_does_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm", SimpleNamespace())
    record = {"id": "test/chain", "kind": "einsum", "dtype": "float32", "einsum": "ij,jk,kl->il",
              "shape": {"sizes": {"i": 3, "j": 4, "k": 5, "l": 6}}, "flops": 1}  # fmt: skip
    with pytest.raises(UnsupportedError, match="test/chain: 2 nests; TVM gets one"):
        build(contender_named("tvm"), Problem(workload_of(record)))


def test_metaschedule_searches_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    def tuned(module: str, target: str, trials: int, seed: int) -> str:
        searches.append(trials)
        return f"{module} tuned"

    fake = SimpleNamespace(ir=SimpleNamespace(save_json=str, load_json=str), __version__="0")
    for name in ("tvm", "tvm.s_tir", "tvm.s_tir.tensor_intrin"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(tvm, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(tvm, "tuned", tuned)
    first = tvm.kept("module", "target", 64, 0)
    assert first[0] == "module tuned"
    assert tvm.kept("module", "target", 64, 0) == first
    assert searches == [64]
    for other in (
        ("nest", "target", 64, 0),
        ("module", "target", 16, 0),
        ("module", "host", 64, 0),
    ):
        tvm.kept(*other)
    assert searches == [64, 64, 16, 64]


def test_the_25_matmuls_and_the_long_run_on_two() -> None:
    jobs = matmul25.jobs(["numpy", "torch"], None, long=True)
    assert [workload for workload, _ in jobs] == list(load("looptune-test"))
    assert [len(contenders) for _, contenders in jobs[:3]] == [3, 3, 2]


def test_what_the_policy_gains_on_the_25() -> None:
    row = {"looptune/default": {"ratio": 1.0, "tune_s": 0.1},
           "looptune/policy": {"ratio": 0.5, "tune_s": 2.0},
           "tvm/metaschedule@64": {"ratio": 4.0, "tune_s": 200.0}}  # fmt: skip
    found = matmul25.summary({"a": row})
    assert found["policy over default"]["looptune/default"]["geomean"] == pytest.approx(2)
    assert found["looptune/policy"]["tvm/metaschedule@64"]["geomean"] == pytest.approx(8)
    assert found["tuning, MetaSchedule's over the policy's"] == pytest.approx(100)
    assert matmul25.summary({})["tuning, MetaSchedule's over the policy's"] is None


@pytest.mark.parametrize("name", ["gcc", "llvmlite"])
def test_compilers_get_loops_with_tails_and_strides(name: str) -> None:
    needs(name)
    record = {"id": "test/einsum", "kind": "einsum", "dtype": "float32", "einsum": "akb,kc->cab",
              "shape": {"sizes": {"a": 5, "k": 37, "b": 3, "c": 50}}}  # fmt: skip
    problem = Problem(workload_of(record))
    verify(problem.plan, problem.arrays, build(contender_named(name), problem).result())


def test_all_matmuls_as_a_box_of_ratios() -> None:
    cells = {"looptune/policy": {"ratio": 1.0}, "numpy/default": {"ratio": 1.5}}
    rows = {"looptune-all/mm64_80_256": cells}
    box = matmul2197.heat(rows)
    assert box[0, 1, 12] == 1.5
    assert np.isnan(box).sum() == 13**3 - 1


def test_the_worst_are_explained() -> None:
    rows = {
        f"looptune-all/mm64_64_{n}": {
            "looptune/policy": {"ratio": 1.0, "note": "policy; m k n"},
            "numpy/default": {"ratio": ratio},
        }
        for n, ratio in ((64, 1.2), (80, 0.9))
    }
    first, second = matmul2197.worst(rows, None)
    assert (first["id"], first["over NumPy"]) == ("looptune-all/mm64_64_80", 0.9)
    assert second["why"][0].startswith("register tile: ")


def test_a_curve_has_a_point_a_budget() -> None:
    row = {
        "looptune/random@0.1": {"ratio": 2.0, "tune_s": 0.1},
        "looptune/random@1": {"ratio": 0.5, "tune_s": 1.0},
        "tvm/default": {"error": "no"},
    }
    assert tuning_curve.curves({"a": row}) == {
        "looptune/random": [(pytest.approx(0.1), 0.5), (1.0, 2.0)]
    }
    kinds = [workload.kind for workload in tuning_curve.workloads()]
    assert len(kinds) == 10
    assert kinds[:2] == ["matmul", "conv2d"]


def test_networks_count_layers_as_often_as_they_have_them() -> None:
    layers = {workload.id: workload for workload in end_to_end.layers("resnet50/")}
    assert end_to_end.repeats(layers["resnet50/layer1.0.conv2"]) == 3
    assert sum(map(end_to_end.repeats, layers.values())) == 54
    assert len(end_to_end.layers("bert-base/s128.")) == 6
    row = {
        "looptune/default": {"microseconds": 1000.0, "tune_s": 6.0},
        "torch/default": {"microseconds": 4000.0, "tune_s": 0.0},
        "torch/channels-last": {"microseconds": 2000.0, "tune_s": 0.0},
    }
    found = end_to_end.totals({"resnet50/layer1.0.conv2": row}, "resnet50/")
    assert found["torch, the better format"]["milliseconds"] == 6
    assert found["looptune/default"]["break_even_runs"] == pytest.approx(2000)
    assert "tvm/default" not in found


def test_metaschedule_gets_the_costliest_layers() -> None:
    jobs = end_to_end.jobs(["numpy"], None, scheduled=True)
    long = [workload.id for workload, contenders in jobs if len(contenders) == 2]
    assert len(long) == 10 + 6
    assert "resnet50/layer1.0.conv2" in long
    assert "resnet50/fc" not in long


HEAD = {"config": {"threads": 1}, "date": "2026-01-02", "peak_gflops": 9.0}
CELL = {"ratio": 1.0, "gflops": 2.0, "microseconds": 3.0, "tune_s": 1.0}
RESULTS: dict[str, dict[str, Any]] = {
    "matmul25": {"rows": {x: {"looptune/policy": CELL, "numpy/default": CELL} for x in "ab"}},
    "matmul2197": {"rows": {"all/mm64_64_64": {"looptune/policy": CELL, "numpy/default": CELL}}},
    "tuning-curve": {"curves": {"looptune/random": [[0.1, 1.0], [1.0, 1.1]]}},
    "end-to-end": {"totals": {"net": {"looptune/default": {"milliseconds": 3.0}}}},
    "codegen-time": {"milliseconds": {"looptune/default": 3.0, "gcc/default": 90.0}},
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_a_plot(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from experiments import plots

    (tmp_path / f"{name}-avx2.json").write_text(json.dumps(HEAD | RESULTS[name]))
    assert plots.main([str(tmp_path)]) == 0
    assert (tmp_path / f"{name}-avx2.png").stat().st_size > 1000


def test_shares_beyond_the_axis_are_triangles_on_its_edge() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    from experiments import plots

    axis = Figure().subplots()
    plots.draw_row(axis, [0.5, 1.1, 9.7], 3, "black", edge=1.2)
    inside, beyond = axis.lines
    assert (inside.get_marker(), list(inside.get_xdata())) == ("o", [0.5, 1.1])
    assert (beyond.get_marker(), list(beyond.get_xdata())) == (">", [1.2])


def test_an_output_of_other_rules_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise versus.StaleResultError("rows.json has another machine")

    assert versus.exit_code(main) == 2
    assert versus.exit_code(lambda: 0) == 0
    assert "another machine" in capsys.readouterr().err
