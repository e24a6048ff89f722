"""A few hundred seeded cases of the big property run, and what the harness itself must catch."""

from __future__ import annotations

import ctypes
from multiprocessing.connection import Connection

import harness
import numpy as np
import property_run
import pytest
from builders import nest_of
from harness import (
    GAP,
    Call,
    compiled,
    interpreted,
    needs_host,
    pages,
    place,
    programs_of,
    run_poisoned,
)
from property_run import campaign, check_case, main
from random_nests import random_case, random_chunks, random_nest

from looptune.ir import Tensor
from looptune.schedule import Schedule, parse_order, replay
from looptune.target import TARGETS, Target

AVX2 = TARGETS["avx2"]
MATMUL = nest_of("mk,kn->mn", m=3, k=4, n=5)


def test_random_schedules_keep_the_result() -> None:
    report = campaign(range(300), sorted(TARGETS), interpret_every=30, jobs=2)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert report.cases == 300
    assert report.refused < 30  # write caches of dimensions that two axes walk
    expected = {"rule revisit", "rule strip-mined", "vector reduction", "parallel", "extent 0"}
    assert expected <= set(report.coverage)


@pytest.mark.slow
def test_random_schedules_keep_the_result_at_length() -> None:
    report = campaign(range(100_000), sorted(TARGETS), interpret_every=50, jobs=2)
    assert not report.failures, "\n".join(map(str, report.failures))


def test_a_case_is_its_seed() -> None:
    assert random_case(7, AVX2) == random_case(7, AVX2)
    assert len({random_nest(np.random.default_rng(seed)).key for seed in range(50)}) == 50


def test_random_schedules_replay() -> None:
    for seed in range(50):
        case = random_case(seed, AVX2)
        again = replay(case.nest, case.schedule.actions)
        assert again == case.schedule
        assert again.identity == case.schedule.identity


def test_chunks_cover_the_trips_once() -> None:
    for seed in range(30):
        seen = [trip for piece in random_chunks(seed, 9) for trip in range(*piece)]
        assert sorted(seen) == list(range(9))
    assert random_chunks(0, 1) == [(0, 1)]


def fill(arrays: list[np.ndarray]) -> None:
    """A right kernel for MATMUL."""
    arrays[0][...] = arrays[1] @ arrays[2]


def test_harness_accepts_a_right_kernel() -> None:
    run_poisoned(MATMUL, fill, np.random.default_rng(0), exact=True)


def wrong(arrays: list[np.ndarray]) -> None:
    fill(arrays)
    arrays[0][1, 2] += 1


def lazy(arrays: list[np.ndarray]) -> None:
    fill(arrays)
    arrays[0][2, 4] = np.nan


def greedy(arrays: list[np.ndarray]) -> None:
    fill(arrays)
    arrays[1][0, 0] = 5


def fickle(arrays: list[np.ndarray]) -> None:
    fill(arrays)
    arrays[0][0, 0] += arrays[0].ctypes.data % 4096 == 0


def stray(arrays: list[np.ndarray]) -> None:
    fill(arrays)
    end = arrays[0].ctypes.data + arrays[0].nbytes
    neighbour = end if end % 4096 else arrays[0].ctypes.data - 1
    ctypes.c_uint8.from_address(neighbour).value = 0


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (wrong, r"element \[1, 2\] is"),
        (lazy, r"element \[2, 4\] is nan"),
        (greedy, "input a was written"),
        (fickle, "two runs differ"),
        (stray, "bytes outside the output were written"),
    ],
)
def test_harness_catches(kernel: Call, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_poisoned(MATMUL, kernel, np.random.default_rng(0), exact=True)


def test_operands_are_flush_with_the_guard_pages() -> None:
    tensor = Tensor("a", "float32", (3, 5), (-8, 1))
    array, room = place(0, tensor, end=True, gap=GAP)
    assert array[0].ctypes.data + 5 * 4 == room.ctypes.data + len(room)
    array, room = place(0, tensor, end=False, gap=GAP)
    assert array[2].ctypes.data == room.ctypes.data
    assert pages(0, 1) is pages(0, 1)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("order", ["m:6 n:16 k m n", "m:6 n:16 k:4 m n k", "n:16 m k n"])
def test_register_tiles_in_the_interpreter(order: str, target: Target) -> None:
    """Random nests seldom fold a broadcast into every term, which is what a matmul does."""
    nest = nest_of("mk,kn->mn", m=31, k=9, n=35)
    call = interpreted(programs_of(parse_order(nest, order, "n"), target))
    run_poisoned(nest, call, np.random.default_rng(1), exact=True)


@needs_host
def test_machine_code_runs_in_the_harness() -> None:
    call = compiled(Schedule(MATMUL), AVX2)
    run_poisoned(MATMUL, call, np.random.default_rng(1), exact=True)


@needs_host
def test_harness_catches_a_register_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil = bytes.fromhex("49 ff c6 c3")  # inc r14; ret
    monkeypatch.setattr(harness, "backend_for", lambda target: lambda program: spoil)
    with pytest.raises(AssertionError, match="belongs to the caller was changed"):
        run_poisoned(MATMUL, compiled(Schedule(MATMUL), AVX2), np.random.default_rng(0))


def crash(seed: int, *_: object) -> property_run.Report:
    """A stand-in for `run_seed` in a worker: seed 1 dies."""
    if seed == 1:
        ctypes.string_at(0)
    return property_run.Report(cases=1)


def crashing_worker(link: Connection, seeds: range, *_: object) -> None:
    for seed in seeds:
        link.send(crash(seed))


def test_a_crash_names_its_seed_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(property_run, "worker", crashing_worker)
    report = campaign(range(4), ["avx2"], interpret_every=1, jobs=1)
    assert report.cases == 4
    assert [(f.seed, f.error) for f in report.failures] == [(1, "the process ended with code -11")]


def test_a_failure_prints_what_repeats_it() -> None:
    text = str(property_run.Failure(5, "xmm", "AssertionError: no", "lowering"))
    assert text.startswith("seed 5 on xmm, lowering: AssertionError: no\n")
    assert len(text.splitlines()) == 5
    exec("\n".join(line.strip() for line in text.splitlines()[1:]), {"print": str})


def test_blame_finds_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, *_: object) -> list[str]:
        raise AssertionError(seed)

    monkeypatch.setattr(property_run, "check_case", broken)
    (failure,) = property_run.run_seed(3, ["avx2"], 1).failures
    assert failure.stage == "encoding"


def test_command_line(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    output = tmp_path / "run.json"
    assert main(["--cases", "3", "--jobs", "0", "--seed", "40", "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith("3 cases, 0 refused, 0 failures")
    assert '"schema": 1' in output.read_text()


def test_interpreter_alone_serves_a_host_without_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(property_run, "runs", lambda target: False)
    tags = check_case(2, TARGETS["avx512"], interpret_too=True)
    assert "interpreter avx512" in tags
    assert "machine code avx512" not in tags
