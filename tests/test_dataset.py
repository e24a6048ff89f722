"""The shipped measurements: readable, reproducible, and nothing held out among them."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from looptune.construct import decisions_of
from looptune.errors import MeasurementError
from looptune.models.dataset import load
from looptune.serial import nest_to_json
from looptune.workloads import matmul
from looptune.workloads.held_out import is_held_out
from looptune.workloads.suites import load as suite

NEST = matmul(8, 8, 8).nests[0]
EXAMPLE = {"schema": 1, "caches": [32768, 1048576, 33554432]}


def test_rows_lead_to_the_same_schedule_by_both_roads() -> None:
    for problem in islice(load(), 25):
        for row in problem.rows:
            state = problem.construction(row)
            assert problem.schedule(row).identity == state.schedule.identity
            assert decisions_of(state) == row.decisions
            assert row.n > 1
            assert row.sd >= 0


def test_the_card_counts_right_and_nothing_is_held_out() -> None:
    problems = list(load())
    assert (len(problems), sum(len(problem.rows) for problem in problems)) == (2008, 43477)
    assert not any(is_held_out(problem.nest) for problem in problems)


def written(path: Path, *lines: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], "line 1: .*schema"),
        ([json.dumps({**EXAMPLE, "schema": 2})], "schema 2; 1 would do"),
        (["not json"], "line 1: no measurements"),
        ([json.dumps(EXAMPLE), "{"], "line 2: no measurements"),
        ([json.dumps(EXAMPLE), '{"nest": 1, "target": "avx2"}'], "line 2"),
        ([json.dumps(EXAMPLE), '{"nest": 1, "target": "vax"}'], "line 2: .*vax"),
    ],
)
def test_files_that_are_none(tmp_path: Path, lines: list[str], message: str) -> None:
    path = written(tmp_path / "m.jsonl.gz", *lines)
    with pytest.raises(MeasurementError, match=message):
        list(load(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": "x"}, "threads is 'x'; a whole number of at least 1"),
        ({"threads": 0}, "threads is 0"),
        ({"rows": []}, "no rows; one at least would do"),
        ({"n": 0}, "n is 0; a whole number of at least 1"),
        ({"n": 1.5}, "n is 1.5"),
        ({"n": True}, "n is True"),
        ({"mean": None}, "mean is None; a finite number"),
        ({"mean": float("nan")}, "mean is nan"),
        ({"mean": 10**400}, "mean is 1000"),
        ({"target": []}, r"target \[\]"),
        ({"sd": float("inf")}, "sd is inf"),
        ({"decisions": "x"}, "a decision is 'x'"),
        ({"decisions": [-1]}, "a decision is -1; a whole number of at least 0"),
        ({"caches": "abc"}, "a cache is 'a'"),
        ({"caches": [1, 2]}, r"caches \(1, 2\); sizes of 3 levels"),
        ({"caches": [1, 2, -3]}, "a cache is -3"),
    ],
)
def test_values_that_nobody_measured(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    row = {"decisions": [], "actions": [], "n": 7, "mean": 0.1, "sd": 0.1}
    line = {"nest": nest_to_json(NEST), "target": "avx2", "threads": 1, "rows": [row]}
    parts = [dict(EXAMPLE), line, row]
    path = written(tmp_path / "m.jsonl.gz", *map(json.dumps, parts[:2]))
    assert len(list(load(path))) == 1
    for part in parts:
        part.update({name: changes[name] for name in changes if name in part})
    path = written(tmp_path / "m.jsonl.gz", *map(json.dumps, parts[:2]))
    with pytest.raises(MeasurementError, match=rf"line \d: {message}"):
        list(load(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulate", {}), ("reduction", []), ("reduction", {}), ("output", []), ("inputs", 5),
        ("epilogue", [["Scale", {"factor": []}]]), ("epilogue", [["Activation", 5]]),
        ("epilogue", 5), ("axes", [{"name": [], "extent": 3, "reduction": False}]),
    ],
)  # fmt: skip
def test_nests_that_are_none(tmp_path: Path, name: str, value: object) -> None:
    nest = {**nest_to_json(NEST), name: value}
    check_refused(tmp_path, nest)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fill", "x"), ("fill", [0]), ("fill", 10**400), ("name", []), ("dtype", {}), ("dims", 5)],
)
def test_operands_that_are_none(tmp_path: Path, name: str, value: object) -> None:
    nest = nest_to_json(NEST)
    nest["output"][name] = value
    check_refused(tmp_path, nest)


def check_refused(folder: Path, nest: object) -> None:
    row = {"decisions": [], "actions": [], "n": 7, "mean": 0.1, "sd": 0.1}
    line = {"nest": nest, "target": "avx2", "threads": 1, "rows": [row]}
    path = written(folder / "m.jsonl.gz", json.dumps(EXAMPLE), json.dumps(line))
    with pytest.raises(MeasurementError, match="line 2: "):
        list(load(path))


@pytest.mark.parametrize("before", [[], [json.dumps(EXAMPLE)]])
def test_lines_that_are_too_deep(tmp_path: Path, before: list[str]) -> None:
    path = written(tmp_path / "m.jsonl.gz", *before, "[" * 200_000)
    with pytest.raises(MeasurementError, match="no measurements: maximum recursion"):
        list(load(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no measurements"):
        list(load(tmp_path / "none.jsonl.gz"))
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(MeasurementError, match="no measurements"):
        list(load(plain))
    torn = written(tmp_path / "torn.gz", *[json.dumps(EXAMPLE)] * 50)
    torn.write_bytes(torn.read_bytes()[:-12])
    with pytest.raises(MeasurementError, match="line"):
        list(load(torn))


def test_a_suites_problem_is_held_out() -> None:
    assert is_held_out(suite("looptune-test")[0].plan().nests[0])
