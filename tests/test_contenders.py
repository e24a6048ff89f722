"""Contenders: their adapters, their processes, and rows that say why something is missing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import matmul25, versus
from experiments.contenders import Built, Contender, Problem, build, contender_named, process
from experiments.contenders.arena import Arena, Rules
from looptune.errors import ArgumentError, LooptuneError, VerificationError
from looptune.reference import verify
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
PACKAGES = {"torch": "torch", "tvm": "tvm", "loop_tool": "loop_tool"}


def workload_of(record: dict[str, Any]) -> Workload:
    (found,) = parse_records(json.dumps([record]))
    return found


def needs(name: str) -> None:
    library = contender_named(name).library
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


@pytest.mark.parametrize("name", ["looptune/4x16", "looptune/6x16", "numpy", "loop_tool"])
def test_matmuls_of_those_that_have_no_convolution(name: str) -> None:
    needs(name)
    problem = Problem(workload_of(MATMUL))
    verify(problem.plan, problem.arrays, build(contender_named(name), problem).result())
    with pytest.raises(LooptuneError):
        build(contender_named(name), Problem(workload_of(CONV)))


@pytest.mark.parametrize("name", ["torch/eager", "tvm/autotvm", "looptune/luck"])
def test_a_way_that_a_library_lacks(name: str) -> None:
    needs(name)
    with pytest.raises(LooptuneError, match=r"are|would do|is none of"):
        build(contender_named(name), Problem(workload_of(MATMUL)))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(Rules(rounds=2, seconds=0.01)) as found:
        yield found


def test_a_row_has_figures_or_reasons(arena: Arena) -> None:
    names = ("looptune", "looptune/6x16", "numpy")
    mine = arena.row(workload_of(MATMUL), tuple(map(contender_named, names)))
    assert list(mine) == ["looptune/default", "looptune/6x16", "numpy/default"]
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
    row = arena.timed({"numpy": arena.sampler(contender)}, found := {})
    assert row == {}
    assert "worker lost" in found["numpy"]["error"]


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
    assert {"machine", "versions", "config", "command", "date"} <= set(result)
    joined = [(workload_of(MATMUL), (contender_named("numpy"), contender_named("tvm")))]
    versus.compare(joined, Rules(), path, "command")
    versus.compare(joined, Rules(), path, "command")
    assert len(made) == 3, "what failed for want of a library is tried again"
    with pytest.raises(versus.StaleResultError, match="has another config"):
        versus.compare(jobs, Rules(seconds=3.0), path, "command")


def test_the_25_matmuls_and_the_long_run_on_two() -> None:
    jobs = matmul25.jobs(["numpy", "torch"], None, long=True)
    assert [workload for workload, _ in jobs] == list(load("looptune-test"))
    assert [len(contenders) for _, contenders in jobs[:3]] == [3, 3, 2]
    assert matmul25.summary({})["paper"]["AutoTVM"] == 1.08
