"""`looptune eval`: sets, contenders, figures, both tracks, files that go on. Time is told by the
tests: nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from builders import policy
from harness import needs_host

from looptune import cli
from looptune.construct import Construction
from looptune.default import default_schedule
from looptune.errors import (
    ArgumentError,
    MeasurementError,
    UnsupportedError,
    UnsupportedHostError,
)
from looptune.host import available_cores
from looptune.models import contenders, evaluate
from looptune.models.contenders import (
    Neighbour,
    Task,
    by_chance,
    by_neighbour,
    chosen,
    extents,
    family,
    neighbours_of,
    static_name,
    static_tile,
)
from looptune.models.dataset import MeasuredProblem, MeasuredSchedule
from looptune.models.evaluate import EvalConfig, Timing, counted, exact, expired, read
from looptune.models.figures import Row, bootstrap, capture, of_contender, summary, table
from looptune.models.sets import SETS, NamedNest, evenly, problems
from looptune.schedule import Schedule, parse_order
from looptune.target import Target, target_named
from looptune.workloads import conv2d, matmul
from looptune.workloads.held_out import is_held_out

AVX2, AVX512 = target_named("avx2"), target_named("avx512")
(NEST,) = matmul(96, 80, 112).nests


def task(nest=NEST, target=AVX2, threads: int = 1) -> Task:
    return Task(nest, target, threads, policy(0.1))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of small problems, and no neighbours, which take a second to read."""
    sizes = {"matmul": [(12, 24, 8), (40, 72, 9)], "contraction": [(5, 18, 11)]}
    for name, listed in sizes.items():
        found = [NamedNest(f"{name}/{m}", matmul(m, n, k).nests[0]) for m, n, k in listed]
        monkeypatch.setitem(SETS, name, lambda found=found: found)
    monkeypatch.setattr(contenders, "shipped_neighbours", dict)
    monkeypatch.setattr(evaluate, "shipped_neighbours", dict)


class TestSets:
    @pytest.mark.parametrize("name", SETS)
    def test_all_is_held_out_and_nothing_twice(self, name: str) -> None:
        found = problems(name)
        assert all(is_held_out(each.nest) and each.nest.dtype == "float32" for each in found)
        assert len({each.nest.key for each in found}) == len(found)
        assert len({each.id for each in found}) == len(found) >= 60

    def test_enough_matmuls_with_loop_tunes_25_first(self) -> None:
        assert len(problems("matmul")) + len(problems("unlike-matmul")) >= 220
        assert all("looptune-mm-test" in each.id for each in problems("matmul")[:25])

    def test_a_part_is_spread_evenly(self) -> None:
        assert evenly(range(10), 3) == [0, 3, 6]
        assert evenly(range(3), 5) == evenly(range(3), None) == [0, 1, 2]
        assert len(problems("contraction", 5)) == 5

    def test_an_unknown_set(self) -> None:
        with pytest.raises(ArgumentError, match=r"'pool' is none of .*convolution"):
            problems("pool")


class TestFigures:
    def row(self, best: str = "search", **gains: float) -> Row:
        return Row("matmul", "avx2", str(gains), {"default": 0.0, **gains}, best)

    def test_intervals(self) -> None:
        assert bootstrap([0.25] * 4) == (0.25, 0.25)
        values = list(np.linspace(-1, 1, 41))
        low, high = bootstrap(values)
        assert (low, high) == bootstrap(values)
        error = 1.96 * np.std(values) / math.sqrt(41)
        assert (low, high) == pytest.approx((-error, error), rel=0.1)

    def test_capture_is_a_share_of_sums(self) -> None:
        rows = [self.row(policy=0.1, search=0.1), self.row(policy=0.0, search=0.3)]
        assert capture(rows, "policy") == pytest.approx(0.25)
        assert capture(rows, "default") == 0

    def test_under_three_percent_there_is_no_headroom(self) -> None:
        assert capture([self.row(policy=0.02, search=0.029)], "policy") is None
        assert capture([self.row(policy=0.02, search=0.03)], "policy") == pytest.approx(2 / 3)

    def test_losses_and_share(self) -> None:
        rows = [self.row(policy=p, search=0.2) for p in (-0.3, -0.1, -0.04, 0.2)]
        found = of_contender(rows, "policy")
        assert found["losses"] == 0.5
        assert found["loss"] == pytest.approx(math.exp(-0.2))
        assert found["share"] == pytest.approx(math.exp(-0.06 - 0.2))
        assert found["low"] <= found["ratio"] <= found["high"]
        assert of_contender(rows, "default")["loss"] == 1

    def test_a_contender_that_is_not_in_every_row(self) -> None:
        rows = [self.row(search=0.5), self.row(policy=0.1, search=0.2)]
        found = of_contender(rows, "policy")
        assert (found["n"], found["capture"]) == (1, pytest.approx(0.5))

    def test_sets_and_all_of_them(self) -> None:
        rows = [
            self.row(policy=0.1, search=0.2),
            replace(self.row(policy=0.3, search=0.4), set="x"),
        ]
        rows = [replace(row, milliseconds={"optimize": 10.0}) for row in rows]
        rows.append(Row("x", "avx2", "bad", error="VerificationError: wrong"))
        found = summary(rows)
        assert list(found) == ["avx2 matmul", "avx2 x", "avx2 all"]
        assert [each["n"] for each in found.values()] == [1, 1, 2]
        assert found["avx2 all"]["milliseconds"] == {"optimize": {"median": 10.0, "p99": 10.0}}
        text = table(found)
        assert "avx2 x: 1 shapes, headroom 49.2 %" in text
        assert "failed: bad: VerificationError: wrong" in text
        assert "headroom 35.0 %" in text
        assert "optimize: 10.0 ms in the median" in text

    def test_nothing_but_failures(self) -> None:
        text = table(summary([Row("x", "avx2", "bad", error="no")]))
        assert text == "avx2 x: 0 shapes, headroom unknown\n  failed: bad: no"

    def test_no_headroom_in_words(self) -> None:
        assert "no headroom" in table(summary([self.row(policy=0.0, search=0.0)]))


class TestContenders:
    @pytest.mark.parametrize(
        ("target", "rows", "vectors", "order"),
        [
            (AVX2, 6, 2, "m:6 n:16 k m n"), (AVX512, 6, 2, "m:6 n:32 k m n"),
            (AVX2, 4, 1, "m:4 n:8 k m n"), (AVX512, 4, 1, "m:4 n:16 k m n"),
        ],
    )  # fmt: skip
    def test_a_static_tile_has_rows_of_vectors(
        self, target: Target, rows: int, vectors: int, order: str
    ) -> None:
        found = static_tile(NEST, target, rows, vectors)
        assert found is not None
        assert found.identity == parse_order(NEST, order, "n").identity
        assert static_name(rows, vectors) == f"static {rows}x{vectors}v"

    def test_a_static_tile_of_what_is_smaller(self) -> None:
        (nest,) = matmul(4, 8, 50).nests
        found = static_tile(nest, AVX2)
        assert found is not None
        assert found.identity == parse_order(nest, "k m n", "n").identity

    def test_only_matmuls_have_a_static_tile(self) -> None:
        (nest,) = conv2d((1, 2, 3, 3), (8, 2, 2, 2)).nests
        assert static_tile(nest, AVX2) is None
        assert "static 6x2v" not in chosen(task(nest), lambda: counted(2))

    def test_threads_share_a_static_tile(self) -> None:
        found = static_tile(NEST, AVX2, threads=2)
        assert found is not None
        assert found.parallel is not None

    def test_outside_of_the_domain_all_choose_the_default(self) -> None:
        (nest,) = matmul(24, 16, 20, dtype="float16").nests
        found = chosen(task(nest), lambda: counted(2))
        default = default_schedule(nest, AVX2).identity
        assert {s.identity for who, s in found.items() if who != "static 6x2v"} == {default}

    def test_searches_end_when_it_is_late(self) -> None:
        mine = task()
        assert by_chance(mine, counted(0)).identity == mine.start.schedule.identity
        values = [mine.value(by_chance(mine, counted(questions))) for questions in (1, 8, 32)]
        assert values == sorted(values)
        assert len(mine.value.known) > 20

    def test_limits(self) -> None:
        late = counted(2)
        assert [late() for _ in range(4)] == [False, False, True, True]
        now = count()
        late = expired(lambda: float(next(now)), 2.0)
        assert [late() for _ in range(4)] == [False, False, True, True]

    def test_the_nearest_neighbours_decisions(self) -> None:
        start = Construction(NEST, AVX2)
        legal = int(np.flatnonzero(start.mask)[3])
        near, far = extents(matmul(100, 80, 112).nests[0]), extents(matmul(8, 8, 8).nests[0])
        kind = family(NEST, AVX2)
        found = by_neighbour(task(), {kind: [Neighbour(far, ()), Neighbour(near, (legal,))]})
        assert found.identity == start.take(legal).schedule.identity != start.schedule.identity
        illegal = int(np.flatnonzero(1 - start.mask)[0])
        for known in ({}, {kind: [Neighbour(near, ())]}, {kind: [Neighbour(near, (illegal,))]}):
            assert by_neighbour(task(), known).identity == start.schedule.identity

    def test_neighbours_keep_the_best_that_gained(self) -> None:
        rows = tuple(MeasuredSchedule((n,), (), 7, mean, 0.0) for n, mean in ((3, 0.1), (4, 0.2)))
        lost = tuple(replace(row, mean=-row.mean) for row in rows)
        listed = [MeasuredProblem(NEST, AVX2, 1, each) for each in (rows, lost)]
        (found,) = neighbours_of(listed).values()
        assert [each.decisions for each in found] == [(4,), ()]

    def test_families(self) -> None:
        assert family(NEST, AVX2) == family(matmul(5, 6, 7).nests[0], AVX2)
        others = [(NEST, AVX512), (matmul(5, 6, 7, dtype="float64").nests[0], AVX2)]
        others.append((conv2d((1, 4, 8, 8), (8, 4, 3, 3)).nests[0], AVX2))
        assert len({family(NEST, AVX2), *(family(*each) for each in others)}) == 4


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sets": ("pool",)}, r"sets \['pool'\]; some of \['matmul'"),
            ({"sets": ()}, "some of"),
            ({"budgets": (0.1, -1.0)}, "seconds of at least 0"),
            ({"best": math.inf}, "seconds of at least 0"),
            ({"model": True, "best": 1.0}, "takes no time"),
            ({"threads": 10_000}, f"threads=10000, but this process may use {available_cores()}"),
            ({"threads": 0}, "at least 1"),
        ],
    )
    def test_what_cannot_be_asked_for(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            EvalConfig(**options)

    def test_no_budget_is_none(self) -> None:
        assert EvalConfig(budgets=(0.0, 0.1)) == EvalConfig(budgets=(0.1,)) == EvalConfig()

    def test_targets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [t.name for t in EvalConfig(model=True).targets] == ["avx2", "avx512", "xmm"]
        assert EvalConfig(model=True, target="xmm").targets == (target_named("xmm"),)
        with pytest.raises(UnsupportedError, match="'vax' is none of"):
            _ = EvalConfig(model=True, target="vax").targets
        monkeypatch.setattr("looptune.host.host_isas", lambda cpuinfo=None: ())
        with pytest.raises(UnsupportedHostError, match="no supported instruction set"):
            _ = EvalConfig().targets


MODEL = EvalConfig(sets=("matmul", "contraction"), most=1, target="avx2", model=True)


@pytest.mark.usefixtures("small")
class TestModelTrack:
    def test_bytes_are_equal_whatever_the_host_and_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evaluate.evaluate(MODEL, policy(0.1), tmp_path / "first.jsonl")
        monkeypatch.setattr("looptune.host.host_isas", lambda cpuinfo=None: ())
        hours = count(0, 3600)
        monkeypatch.setattr("looptune.models.advise.time.perf_counter", lambda: next(hours))
        evaluate.evaluate(MODEL, policy(0.1), tmp_path / "again.jsonl")
        first, again = ((tmp_path / f"{n}.jsonl").read_bytes() for n in ("first", "again"))
        assert first == again
        assert first.count(b"\n") == 3

    def test_gains_are_the_cost_models(self) -> None:
        _, (row, _) = evaluate.evaluate(MODEL, policy(0.1))
        mine = task(problems("matmul", 1)[0].nest)
        static = static_tile(mine.nest, mine.target)
        assert static is not None
        assert row.gains["static 6x2v"] == pytest.approx(mine.value(static), abs=1e-6)
        assert row.gains["default"] == 0
        assert row.gains[row.best] == max(row.gains.values())
        assert row.gains["network and cost model"] >= row.gains["network alone"]
        assert row.milliseconds == {}

    def test_a_policy_that_expects_nothing_keeps_the_default(self) -> None:
        _, (row, _) = evaluate.evaluate(MODEL, policy(-0.1))
        assert row.gains["policy"] == 0

    def test_networks_compute_in_float64(self) -> None:
        found = exact(policy(0.1))
        assert found.gain is not None
        assert {a.dtype for a in (*found.arrays.values(), *found.gain.arrays.values())} == {
            np.dtype(np.float64)
        }
        assert exact(policy()).gain is None


def told(times: Callable[[Schedule], float]) -> Timing:
    """Kernels take what a schedule is said to take; the clock moves a millisecond a look."""
    now = count()

    def sampler(kernel: object, sets: Sequence[Mapping[str, np.ndarray]]):
        (schedule,) = kernel.schedules  # type: ignore[attr-defined]
        return lambda calls: calls * times(schedule)

    return Timing(sampler, lambda: next(now) / 1000, 0.0)


def halved(schedule: Schedule) -> float:
    """All but the default, which comes with two seconds, take one."""
    target = evaluate.host_target()
    return 2.0 if schedule.identity == default_schedule(schedule.nest, target).identity else 1.0


MEASURED = EvalConfig(sets=("matmul",), most=2, budgets=(0.0,))


@needs_host
@pytest.mark.usefixtures("small")
class TestMeasuredTrack:
    def test_rows(self) -> None:
        header, rows = evaluate.evaluate(MEASURED, policy(0.1), timing=told(halved))
        assert header["track"] == "measured"
        assert header["machine"]["cpu"]
        assert len(rows) == 2
        for row in rows:
            assert not row.error
            assert row.gains["default"] == 0
            assert row.gains["policy"] == pytest.approx(math.log(2), abs=1e-6)
            assert row.gains[row.best] == row.gains["policy"]
            assert row.milliseconds["optimize"] == pytest.approx(1.0)
            assert row.milliseconds["choice"] > 0
        assert rows[1].gains["static 6x2v"] == rows[1].gains["policy"]

    def test_the_best_known_is_told_by_the_first_half(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        halves = {"default": 0.0, "a": 0.5, "b": 0.1}, {"default": 0.0, "a": 0.2, "b": 0.3}
        monkeypatch.setattr(evaluate, "timed", lambda *_: halves)
        _, (row,) = evaluate.evaluate(replace(MEASURED, most=1), policy(0.1))
        assert (row.best, row.gains["a"]) == ("a", 0.2)

    def test_with_a_budget_and_searches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, float]] = []

        def searched(mine: Task, strategy: str, seconds: float) -> Schedule:
            asked.append((strategy, seconds))
            found = static_tile(mine.nest, mine.target)
            return found if found and strategy == "evolution" else mine.start.schedule

        monkeypatch.setattr(evaluate, "searched", searched)
        config = EvalConfig(sets=("matmul",), most=1, budgets=(0.0, 0.1), best=10.0)
        _, (row,) = evaluate.evaluate(config, policy(-0.1), timing=told(halved))
        assert asked[0] == ("policy", 0.1)
        assert {name for name, _ in asked[1:]} == set(evaluate.SEARCHES)
        assert sum(seconds for _, seconds in asked[1:]) == pytest.approx(10)
        assert row.gains["search: evolution"] == pytest.approx(math.log(2), abs=1e-6)
        assert row.gains["policy, 0.1 s"] == row.gains["search: random"] == 0

    def test_a_search_ends_with_a_schedule_of_the_nest(self) -> None:
        mine = Task(NEST, evaluate.host_target(), 1, policy(0.1))
        assert evaluate.searched(mine, "greedy1", 0.01).nest == NEST

    def test_what_cannot_be_lowered_is_left_at_the_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = "m:64 n:64 k:64 k m n"
        wide = parse_order(matmul(512, 512, 512).nests[0], sizes, "n")
        monkeypatch.setattr(contenders, "static_tile", lambda *_, **__: wide)
        real = evaluate.build

        def build(plan, schedules, *rest, **options):
            if schedules[0] is wide:
                raise evaluate.LoweringError("too much code")
            return real(plan, schedules, *rest, **options)

        monkeypatch.setattr(evaluate, "build", build)
        _, rows = evaluate.evaluate(replace(MEASURED, most=1), policy(0.1), timing=told(halved))
        assert rows[0].gains["static 6x2v"] == 0

    def test_a_shape_that_fails_does_not_end_the_run(self, tmp_path: Path) -> None:
        failures = iter([MeasurementError("a stone fell"), None])

        def sampler(kernel, sets):
            if (failure := next(failures, None)) is not None:
                raise failure
            return lambda calls: float(calls)

        timing = replace(told(halved), sampler=sampler)
        path = tmp_path / "rows.jsonl"
        _, rows = evaluate.evaluate(MEASURED, policy(0.1), path, timing=timing)
        assert [row.error for row in rows] == ["MeasurementError: a stone fell", ""]
        assert read(path)[1] == rows


@pytest.mark.usefixtures("small")
class TestFiles:
    def run(self, path: Path, config: EvalConfig = MODEL, resume: bool = True, gain: float = 0.1):
        return evaluate.evaluate(config, policy(gain), path, resume=resume)[1]

    def test_a_run_that_was_killed_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "rows.jsonl"
        rows = self.run(path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        made: list[str] = []
        real = evaluate.by_model

        def by_model(job: evaluate.Job) -> Row:
            made.append(job.set)
            return real(job)

        monkeypatch.setattr(evaluate, "by_model", by_model)
        assert self.run(path) == rows
        assert made == ["contraction"]
        assert path.read_bytes() == whole
        assert self.run(path) == rows
        assert len(made) == 1

    def test_more_shapes_may_follow(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        self.run(path)
        assert len(self.run(path, replace(MODEL, most=2))) == 3

    def test_a_file_is_not_written_over(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        self.run(path)
        with pytest.raises(ArgumentError, match="exists: --resume goes on with it"):
            self.run(path, resume=False)

    def test_another_policy_or_target_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        self.run(path)
        with pytest.raises(ArgumentError, match="is of another policy"):
            self.run(path, gain=0.2)
        with pytest.raises(ArgumentError, match="is of another targets"):
            self.run(path, replace(MODEL, target="xmm"))

    @needs_host
    def test_another_machine_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "rows.jsonl"
        config = replace(MEASURED, most=1)
        evaluate.evaluate(config, policy(0.1), path, timing=told(halved))
        assert len(evaluate.evaluate(config, policy(0.1), path, resume=True)[1]) == 1
        here = evaluate.fingerprint()
        monkeypatch.setattr(evaluate, "fingerprint", lambda: replace(here, cpu="another"))
        with pytest.raises(ArgumentError, match="is of another machine"):
            evaluate.evaluate(config, policy(0.1), path, resume=True)

    @pytest.mark.parametrize("text", ["", "{", json.dumps({"schema": 1})])
    def test_a_header_that_was_cut_off_is_left_alone(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(text)
        with pytest.raises(ArgumentError, match="is no evaluation"):
            self.run(path)
        assert path.read_text() == text

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"set": ["x"]}, r"set is \['x'\]; a text would do"),
            ({"error": 5}, "error is 5"),
            ({"gains": {"default": "x"}}, "'default' has 'x'; a finite number"),
            ({"gains": {"default": math.nan}}, "'default' has nan"),
            ({"milliseconds": {"choice": None}}, "'choice' has None"),
            ({"best": "nobody"}, "best is 'nobody'; one of"),
            ({"gains": {}}, "best is 'default'; one of"),
            ({"gains": 5}, "no attribute 'items'"),
        ],
    )
    def test_rows_that_nobody_wrote(
        self, tmp_path: Path, changes: dict[str, object], message: str
    ) -> None:
        path = tmp_path / "rows.jsonl"
        self.run(path)
        first, *_ = path.read_text().splitlines()
        row = {"set": "matmul", "target": "avx2", "id": "x", "gains": {"default": 0.0}}
        path.write_text(f"{first}\n{json.dumps(row | changes)}\n")
        with pytest.raises(ArgumentError, match=f"is no evaluation: .*{message}"):
            self.run(path)

    def test_rows_that_are_too_deep(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text("[" * 100_000 + "\n")
        with pytest.raises(ArgumentError, match="is no evaluation: maximum recursion"):
            self.run(path)

    @pytest.mark.parametrize(
        "text", ["", "not json\n", '{"schema": 2}\n', "[]\n", '{"schema": 1}\n{"sett": 1}\n']
    )
    def test_files_that_are_none(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(text)
        with pytest.raises(ArgumentError, match=r"rows\.jsonl is no evaluation"):
            self.run(path)


@pytest.mark.usefixtures("small")
class TestCommand:
    WORDS = ("eval", "--model", "--target", "avx2", "--sets", "matmul", "--most", "1")

    def test_json(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        assert cli.main([*self.WORDS, "--json", "--output", str(path)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found) == {"header", "summary", "rows"}
        assert found["header"]["schema"] == 1
        assert found["header"]["track"] == "model"
        assert found["header"]["command"].startswith("looptune eval --model")
        figures = found["summary"]["avx2 matmul"]
        assert figures["n"] == len(found["rows"]) == 1
        assert set(figures) == {"n", "failed", "headroom", "contenders", "milliseconds"}
        keys = {"n", "mean", "ratio", "low", "high", "losses", "loss", "share", "capture"}
        assert set(figures["contenders"]["policy"]) == keys
        (line,) = path.read_text().splitlines()[1:]
        assert json.loads(line) == found["rows"][0]

    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(self.WORDS) == 0
        assert "avx2 matmul: 1 shapes, headroom" in capsys.readouterr().out

    def test_threads_are_of_the_environment_unless_told(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOOPTUNE_NUM_THREADS", str(available_cores()))
        for words, threads in ((), available_cores()), (("--threads", "1"), 1):
            assert cli.main([*self.WORDS, "--json", *words]) == 0
            assert json.loads(capsys.readouterr().out)["header"]["threads"] == threads

    def test_a_failed_shape_is_exit_1(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(job: object) -> Row:
            raise MeasurementError("a stone fell")

        monkeypatch.setattr(evaluate, "by_model", fail)
        assert cli.main(self.WORDS) == 1
        assert "failed: matmul/12: MeasurementError: a stone fell" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            ("--sets ,", 2, "some of"),
            ("--sets pool", 2, "sets ['pool']; some of"),
            ("--model --best 1", 2, "takes no time"),
            ("--budgets 0,soon", 2, "'soon' is no number of seconds"),
            ("--model --measured", 2, "not allowed with"),
            ("--policy none.npz", 1, "none.npz"),
        ],
    )
    def test_wrong_usage(
        self, capsys: pytest.CaptureFixture[str], words: str, code: int, message: str
    ) -> None:
        try:
            found = cli.main(["eval", *words.split()])
        except SystemExit as stop:
            found = stop.code  # type: ignore[assignment]
        assert found == code
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_plot_of_an_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from experiments.plots import plot_evaluation, sets_of

    path = tmp_path / "eval-avx2.jsonl"
    evaluate.evaluate(MODEL, policy(0.1), path)
    found = sets_of(path)
    assert list(found) == ["avx2 matmul", "avx2 contraction", "avx2 all"]
    assert "default" not in found["avx2 all"]
    assert "policy" in found["avx2 all"]
    assert plot_evaluation(path).read_bytes().startswith(b"\x89PNG")
