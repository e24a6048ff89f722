"""The command line: text, JSON, files and exit codes; benches on suites of one workload."""

from __future__ import annotations

import configparser
import json
import math
import shlex
from pathlib import Path

import pytest
from harness import needs_host

from looptune import bench, cli, measure, roofline
from looptune.database import Database, Record, key_of
from looptune.errors import UnsupportedError, VerificationError
from looptune.host import host_target
from looptune.lower import GENERATOR_VERSION
from looptune.measure import Samples, interleave, python_sampler, ratio
from looptune.oracle import Oracle
from looptune.provenance import commit
from looptune.roofline import kept
from looptune.runtime.call import call_path
from looptune.schedule import Schedule, parse_order
from looptune.target import TARGETS
from looptune.tune import compile
from looptune.usage import encoded
from looptune.workloads import conv2d, matmul
from looptune.workloads.suites import load

pytestmark = needs_host


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Take two short samples of everything: these tests are about the form, not the figures."""
    real = measure.interleave

    def short(contenders, *, rounds=2, seconds=0.0, rest=None):
        return real(contenders, rounds=2, seconds=0.002)

    for module in (measure, bench, roofline):
        monkeypatch.setattr(module, "interleave", short)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_optimize_prints_what_the_readme_promises(capsys):
    code, out, _ = run(capsys, "optimize", "matmul", "32", "32", "32")
    assert code == 0
    for word in ("for n", "verified: yes", "GFLOPS", "x NumPy", call_path()):
        assert word in out


def test_optimize_json(capsys, tmp_path):
    path = tmp_path / "result.json"
    words = "optimize einsum ij,jk,kl->il i=4 j=5 k=6 l=7 --json --output".split()
    code, out, _ = run(capsys, *words, str(path))
    result = json.loads(out)
    assert code == 0
    assert result["schema"] == 1
    assert result["verified"] is True
    assert len(result["actions"]) == 2
    assert json.loads(path.read_text()) == result


@pytest.mark.parametrize(
    "words",
    [
        "matmul 8 9 10 --trans-a --trans-b --dtype float64",
        "matmul 8 9 10 --batch 3",
        "gemv 8 10",
        "conv2d 1 4 8 8 6 3 3 --stride 2 --padding 1 0 --groups 2",
        "conv2d 1 4 8 8 6 3 3 --layout NHWC --dilation 2",
        "matmul 0 4 4",
    ],
)
def test_every_workload_of_the_command_line(capsys, words):
    code, out, _ = run(capsys, "optimize", *words.split())
    assert code == 0
    assert "verified: yes" in out


@pytest.mark.parametrize("what", cli.SHOWN)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_show_any_target_on_any_machine(capsys, what, target):
    words = ["show", "matmul", "8", "20", "4", "--what", what, "--target", target]
    code, out, _ = run(capsys, *words)
    marks = {
        "tree": "for",
        "program": f"program {target}",
        "asm": "vfmadd",
        "explain": "register tile",
    }
    assert code == 0
    assert marks[what] in out


def test_show_as_json(capsys, tmp_path):
    words = ["show", "matmul", "8", "20", "4", "--what", "tree", "--what", "asm", "--json"]
    code, out, _ = run(capsys, *words, "--output", str(tmp_path / "shown.json"))
    assert code == 0
    found = json.loads(out)
    assert list(found) == ["schema", "target", "threads", "origin", "tree", "asm"]
    assert found["origin"] in ("default", "policy")
    assert (tmp_path / "shown.json").read_text() == out


def test_show_says_whose_schedule_it_is_and_asks_the_database_that_is_named(capsys, tmp_path):
    nest = matmul(8, 20, 4).nests[0]
    path, target = tmp_path / "a.sqlite3", TARGETS["xmm"]
    schedule = parse_order(nest, "k m n", "n")
    store = Database(path)
    store.add([Record(key_of(nest, target, 1), schedule.identity, schedule.actions,
                      15, 0.5, 0.01, 0.0)])  # fmt: skip
    store.close()
    words = ["show", "matmul", "8", "20", "4", "--target", "xmm", "--what", "tree", "--database"]
    _, out, _ = run(capsys, *words, str(path))
    assert out.startswith("schedule: database, for xmm and 1 thread\n\n")
    _, out, _ = run(capsys, *words, "none")
    assert not out.startswith("schedule: database")


def test_show_for_threads(capsys, monkeypatch):
    monkeypatch.setattr("looptune.host.available_cores", lambda: 4)
    words = ["show", "matmul", "256", "256", "256", "--threads", "3", "--json"]
    _, out, _ = run(capsys, *words)
    found = json.loads(out)
    assert found["threads"] == 3
    assert "parallel" in found["tree"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimize einsum ij,jk i=2 j=3", "label 'k' has no size"),
        ("optimize einsum ij i2", "'i2' is no label=size"),
        ("optimize matmul 2 2 2 --strategy magic", "strategy 'magic' is none of"),
        ("bench --suite resnet51", "no suite 'resnet51'; near it"),
        ("bench --against numpy,mkl", "--against 'mkl' is none of"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(capsys, words, message):
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_bad_values_from_the_environment_exit_2(capsys, monkeypatch):
    monkeypatch.setenv("LOOPTUNE_NUM_THREADS", "many")
    code, out, err = run(capsys, "optimize", *"matmul 8 8 8".split())
    assert (code, out) == (2, "")
    assert (
        err == "looptune: LOOPTUNE_NUM_THREADS is 'many'; a whole number of at least 1 would do\n"
    )


def test_other_errors_exit_1(capsys, monkeypatch):
    monkeypatch.setattr("looptune.host.host_isas", lambda cpuinfo=None: ())
    code, _, err = run(capsys, "peak")
    assert code == 1
    assert "no supported instruction set" in err


def test_doctor_names_the_call_path(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["call_path"] == call_path()
    assert result["default_target"] == host_target().name


def test_peak_is_positive(capsys):
    code, out, _ = run(capsys, "peak", "--json", "--database", "none")
    assert code == 0
    assert min(json.loads(out)["gflops"].values()) > 1


def test_peak_of_two_threads_is_kept(capsys, tmp_path):
    path = tmp_path / "kept.sqlite"
    code, out, _ = run(capsys, "peak", "--threads", "2", "--database", str(path), "--json")
    result = json.loads(out)
    again = kept(Database(path), host_target(), result["threads"])
    assert code == 0
    assert {name: rate / 1e9 for name, rate in again.flops.items()} == result["gflops"]
    assert {str(n): r / 1e9 for n, r in again.bandwidth.items()} == result["stream_gbytes"]


@pytest.fixture
def suite(tmp_path):
    ids = {"looptune-mm-test/mm64_240_64", "mttkrp/mode1_3d_n20_r10", "ansor/SFM.0",
           "onednn-tails/tails_conv:24"}  # fmt: skip
    records = [dict(w.record) for w in (*load("core"), *load("looptune-test")) if w.id in ids]
    path = tmp_path / "suite.json"
    path.write_text(json.dumps([record for record in {r["id"]: r for r in records}.values()]))
    return path


def test_bench_writes_the_form_that_others_read(capsys, suite, tmp_path):
    path = tmp_path / "bench.json"
    words = ["bench", "--suite", str(suite), "--json", "--output", str(path)]
    code, out, _ = run(capsys, *words)
    result = json.loads(out)
    assert code == 0
    assert json.loads(path.read_text()) == result
    assert result["schema"] == 1
    assert result["machine"]["call_path"] == call_path()
    assert (result["generator"], result["commit"]) == (GENERATOR_VERSION, commit())
    assert len(result["rows"]) == 3
    assert [item["id"] for item in result["skipped"]] == ["ansor/SFM.0"]
    for row in result["rows"]:
        assert row["correct"]
        for field in ("gflops", "fraction_of_peak", "codegen_s", "tune_s"):
            assert row[field] > 0
    matmul = next(row for row in result["rows"] if row["kind"] == "matmul")
    assert matmul["peers"]["numpy"]["gflops"] > 0
    assert result["geomean"]["vs"]["numpy"] > 0


def test_bench_prints_a_table_and_fails_on_a_wrong_result(capsys, suite, monkeypatch):
    code, out, _ = run(capsys, "bench", "--suite", str(suite))
    assert code == 0
    assert "geometric mean:" in out
    assert "not supported: ansor/SFM.0" in out

    def refuse(*_: object, **__: object) -> None:
        raise VerificationError("element [0] is wrong")

    monkeypatch.setattr(Oracle, "verify", refuse)
    code, out, _ = run(capsys, "bench", "--suite", str(suite))
    assert code == 1
    assert "WRONG: element [0] is wrong" in out


def test_a_peer_without_a_call_is_left_out():
    def never(arrays):
        raise UnsupportedError("no such call")

    def copied(arrays):
        return lambda: arrays["out"].copy()

    kernel = compile(matmul(8, 20, 4), Schedule(matmul(8, 20, 4).nests[0]))
    found = bench.compared(kernel, {"never": never, "copied": copied}, peak=1e9)
    assert list(found.times) == ["looptune", "kernel", "copied"]
    assert found.ratio("never") is None
    assert found.ratio("copied") > 0
    assert found.fraction_of_peak == found.rate / 1e9


def test_bench_against_torch(capsys, suite):
    pytest.importorskip("torch")
    words = ["bench", "--suite", str(suite), "--against", "numpy,torch", "--json"]
    code, out, _ = run(capsys, *words)
    rows = json.loads(out)["rows"]
    assert code == 0
    assert all("torch" in row["peers"] for row in rows)


class Clock:
    """A clock that each call of a contender moves by its cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def costs(self, seconds: float):
        def call() -> None:
            self.now += seconds

        return python_sampler(call, self)


def test_contenders_rest_before_each_sample_and_take_one_that_does_not_count():
    done: list[str] = []

    def sampler(name: str) -> measure.Sampler:
        def sample(calls: int) -> float:
            done.append(f"{name}{calls}")
            return 0.1 * calls

        return sample

    interleave(
        {"a": sampler("a"), "b": sampler("b")},
        rounds=2,
        seconds=4.0,
        rest=lambda: done.append("rest"),
    )
    first = [["rest", *4 * [f"{name}1"]] for name in "ab"]
    a, b = ["rest", "a10", "a10"], ["rest", "b10", "b10"]
    assert done == [*first[0], *first[1], *a, *b, *b, *a]


@pytest.mark.parametrize(("spinning", "waited"), [(0.0, 1), (0.011, 4), (math.inf, 200)])
def test_a_rest_ends_when_the_process_uses_no_time_any_more(spinning, waited):
    now = used = 0.0
    naps = []

    def sleep(seconds: float) -> None:
        nonlocal now, used
        used += max(0.0, min(seconds, spinning - now))
        now += seconds
        naps.append(seconds)

    measure.until_idle(lambda: used, sleep)
    assert len(naps) == waited
    assert sum(naps) <= measure.LONGEST_REST + 1e-9


def test_interleaving_takes_ratios_within_rounds():
    clock = Clock()
    found = interleave(
        {"fast": clock.costs(1e-3), "slow": clock.costs(3e-3)}, rounds=5, seconds=0.5
    )
    assert [len(samples.seconds) for samples in found.values()] == [5, 5]
    assert ratio(found["slow"], found["fast"]) == pytest.approx(3)
    assert found["fast"].spread == pytest.approx(0)


def test_ratios_cancel_drift_that_medians_would_not():
    ours = Samples((1.0, 2.0, 4.0))
    theirs = Samples((2.0, 4.0, 8.0))
    assert ratio(theirs, ours) == 2
    assert ours.spread == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("words", "padding"),
    [(["1"], 1), (["0", "2"], (0, 2)), (["0,1", "1,2"], ((0, 1), (1, 2))), (["same"], "same")],
)
def test_padding_is_written_as_in_python(words, padding):
    numbers = ["1", "3", "8", "9", "4", "3", "2"]
    args = cli.parser().parse_args(["show", "conv2d", *numbers, "--padding", *words])
    assert cli.workload_plan(args).key == conv2d((1, 3, 8, 9), (4, 3, 3, 2), padding=padding).key


@pytest.mark.parametrize("words", ["1,2", "1,2 3", "same same", "1 same", "1 2 3"])
def test_padding_that_may_mean_two_things(capsys, words):
    given = ["show", "conv2d", *"1383333", "--padding", *words.split()]
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "")
    assert f"--padding {words}: " in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optimize matmul -1 4 4", "argument M: '-1' is no whole number"),
        ("show conv2d 1 3 -4 4 4 1 1", "argument H: '-4'"),
        ("show matmul 4 4 4 --batch -1", "argument --batch: '-1'"),
        ("eval --budgets=", "argument --budgets: '' names no number"),
    ],
)
def test_arguments_are_named(capsys, words, said):
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optimize conv2d 1 3 4 4 4 1 1 --padding 1000000000000", "padding=1000000000000"),
        ("optimize matmul 4 4 4 --epilogue scale:1e39", "'1e39' is too large for float32"),
        ("eval --resume", "name it by --output"),
        ("eval --model --budgets 3", "--budgets with --model"),
        ("eval --resume --output {empty}", "{empty} is no evaluation: it has no header"),
    ],
)
def test_usage_that_has_no_meaning(capsys, words, said, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    code, out, err = run(capsys, *words.format(empty=empty).split())
    assert (code, out) == (2, "")
    assert said.format(empty=empty) in err
    assert err.count("\n") == 1


def test_a_bad_isa_names_its_variable(capsys, monkeypatch):
    monkeypatch.setenv("LOOPTUNE_ISA", "foo")
    code, _, err = run(capsys, "peak")
    assert code == 2
    assert err.startswith("looptune: LOOPTUNE_ISA: target 'foo' is none of")


def test_padding_that_is_none(capsys):
    with pytest.raises(SystemExit):
        cli.main(["show", "conv2d", *"1383333", "--padding", "1,2,3"])
    assert "no number, BEFORE,AFTER, same or valid" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["optimize matmul 2 2 2 --seed -1", "optimize matmul 2 2 2 --seed 4294967296",
     "train here --seed -1", "train here --seed one", "train here --runners -2"],
)  # fmt: skip
def test_numbers_that_are_no_seed_or_count_exit_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    assert stop.value.code == 2
    assert "is no whole number from 0 to 4294967295" in capsys.readouterr().err


def test_lists_are_read_alike():
    parse = cli.parser().parse_args
    assert parse(["bench"]).against == ("numpy",)
    assert parse(["bench", "--against", "numpy,,torch"]).against == ("numpy", "torch")
    assert parse(["train", "here", "--stages", "clone,"]).stages == ("clone",)
    assert parse(["eval", "--sets", "matmul"]).sets == ("matmul",)
    assert parse(["eval"]).budgets is None  # which tells `--model` that none were asked for
    assert parse(["eval", "--budgets", "0.1,1"]).budgets == (0.1, 1.0)


@pytest.mark.parametrize("job", ["optimize matmul 1 1 1", "show matmul 1 1 1", "bench", "peak",
                                 "eval"])  # fmt: skip
def test_threads_are_left_to_the_environment_by_every_job(job):
    assert cli.parser().parse_args(job.split()).threads is None
    assert cli.parser().parse_args([*job.split(), "--threads", "2"]).threads == 2


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [(OSError(28, "No space left"), 1, "No space left"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_faults_of_the_system_end_with_one_line(fault, code, said, capsys, monkeypatch):
    def job(_: object) -> int:
        raise fault

    monkeypatch.setitem(cli.JOBS, "doctor", job)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err.splitlines() == [f"looptune: {fault if code == 1 else said}"]


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optimise matmul 1 1 1", "looptune: argument JOB: invalid choice: 'optimise'"),
        ("optimize matmul 8 8", "looptune optimize matmul: the following arguments are required"),
        ("optimize matmul 8 8 8 --up 3", "looptune optimize matmul: no such argument: --up 3"),
        ("bench --rounds 0", "looptune bench: argument --rounds: '0' is no whole number"),
    ],
)  # fmt: skip
def test_misuse_is_one_line_and_where_help_is(capsys, words, said):
    first, second = refused(capsys, *words.split()).splitlines()
    assert first.startswith(said)
    assert second == f"try {first.partition(': ')[0]} --help"


def test_a_mistyped_word_is_answered_with_the_near_one(capsys):
    assert "did you mean 'optimize'?" in refused(capsys, "optimise")
    assert "did you mean 'matmul'?" in refused(capsys, "show", "matmull", "1", "1", "1")
    assert "did you mean" not in refused(capsys, "xyz")


@pytest.mark.parametrize("job", sorted(cli.JOBS))
def test_help_has_examples_that_are_understood(capsys, job):
    with pytest.raises(SystemExit):
        cli.main([job, "--help"])
    examples = [
        line.strip().partition("   ")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(f"  looptune {job} ") or line == f"  looptune {job}"
    ]
    assert len(examples) >= 2
    for line in examples:
        cli.parser().parse_args(shlex.split(line)[1:])


def test_help_tells_defaults_letters_and_steps(capsys):
    with pytest.raises(SystemExit):
        cli.main(["optimize", "conv2d", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for said in ("random (default: policy)", "of channels (default: 1)", "R height of a filter",
                 "batchnorm, residual", "whose start takes half a second more"):  # fmt: skip
        assert said in out


@pytest.mark.parametrize(("spread", "said"), [(0.02, "± 2 % ("), (0.2, "± 20 %, noisy (")])
def test_a_rate_has_its_spread(spread, said):
    kernel = compile(matmul(8, 20, 4), Schedule(matmul(8, 20, 4).nests[0]))
    samples = Samples((1 - spread, 1 - spread, 1.0, 1 + 1e-9, 1 + 1e-9))
    text = cli.rates(bench.Comparison(kernel, {"kernel": samples}, 1e9), 2.5)
    assert said in text
    assert text.endswith("2.50x NumPy")


def test_what_computes_nothing_has_no_rate_and_no_ratio(capsys):
    _, out, _ = run(capsys, "optimize", "matmul", "4", "4", "0", "--database", "none")
    assert "no operations: nothing to compare" in out
    assert "NumPy" not in out
    _, out, _ = run(capsys, "optimize", *"matmul 4 4 0 --database none --json".split())
    assert json.loads(out)["vs_numpy"] is None


def test_doctor_shows_where_things_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LOOPTUNE_CACHE_DIR", str(tmp_path))
    _, out, _ = run(capsys, "doctor", "--json")
    result = json.loads(out)
    assert result["database"] == f"{tmp_path}/looptune.sqlite3 (made by the first record)"
    assert set(result["extras"]) <= set(cli.EXTRAS)
    assert "c_compiler" in result
    _, out, _ = run(capsys, "doctor")
    assert "targets: avx2" in out


def test_every_extra_is_looked_for():
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[1] / "setup.cfg")
    assert set(cli.EXTRAS) == set(config["options.extras_require"])


@pytest.mark.parametrize(
    "value",
    [{"a": [["split", [0, 6]], ["swap", [1]]], "b": list(range(99)), "c": [], "d": {}},
     {"rows": [{"x": 1.5, "y": None}, {"x": "[\n1,\n2]"}], "e": (1, 2), "nested": {"f": [[]]}}],
)  # fmt: skip
def test_readable_json_is_the_same_json(value):
    assert json.loads(encoded(value)) == json.loads(json.dumps(value))


def test_short_lists_are_on_one_line():
    text = encoded({"actions": [["split", [0, 6]], ["swap", [1]]], "rows": [{"x": 1}]})
    assert text.splitlines() == [
        "{", ' "actions": [["split", [0, 6]], ["swap", [1]]],', ' "rows": [', "  {", '   "x": 1',
        "  }", " ]", "}",
    ]  # fmt: skip
