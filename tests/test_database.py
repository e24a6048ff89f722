"""The database: what it keeps, what it refuses, and what it survives."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from builders import RECORD, TUNED

import looptune
from looptune import database as module
from looptune.database import (
    FILE,
    Database,
    Key,
    cache_directory,
    default_database,
    exported,
    imported,
    key_of,
    schedule_of,
)
from looptune.errors import DatabaseError
from looptune.host import fingerprint
from looptune.oracle import Oracle
from looptune.serial import MOST_ACTIONS
from looptune.target import TARGETS
from looptune.workloads import conv2d, fuse, matmul

AVX2 = TARGETS["avx2"]
SCHEDULE, NEST, KEY = TUNED, TUNED.nest, RECORD.key


@pytest.fixture
def store(tmp_path: Path) -> Database:
    return Database(tmp_path / FILE)


def test_what_is_kept_comes_back(store: Database, tmp_path: Path) -> None:
    assert store.best(KEY) is None
    assert store.add([RECORD]) == 1
    assert store.best(KEY) == RECORD
    again = Database(tmp_path / FILE)
    assert again.records() == [RECORD]
    found = again.best(KEY)
    assert found is not None
    assert schedule_of(NEST, found) == SCHEDULE


def test_samples_of_one_schedule_are_merged(store: Database) -> None:
    store.add([RECORD])
    store.add([replace(RECORD, n=5, mean=0.2, variance=0.0001, created=9.0)])
    found = store.best(KEY)
    assert found is not None
    samples = 15 * [0.1] + 5 * [0.2]
    mean = sum(samples) / 20
    spread = sum((x - mean) ** 2 for x in samples) / 20 + (15 * 0.0004 + 5 * 0.0001) / 20
    assert (found.n, found.created) == (20, 9.0)
    assert found.mean == pytest.approx(mean)
    assert found.variance == pytest.approx(spread)


def test_a_lucky_sample_does_not_lead(store: Database) -> None:
    lucky = replace(RECORD, identity="lucky", n=2, mean=0.15, variance=0.01)
    store.add([lucky, RECORD])
    assert store.best(KEY) == RECORD


@pytest.mark.parametrize(
    "numbers",
    [{"n": 1, "mean": 0.5, "variance": 0.0}, {"mean": -0.1}, {"n": 3, "variance": 0.01}],
    ids=["one sample", "slower", "within noise"],
)
def test_what_is_not_surely_faster_is_never_the_best(
    store: Database, numbers: dict[str, float]
) -> None:
    unsure = replace(RECORD, **numbers)  # type: ignore[arg-type]
    store.add([unsure])
    line = next(exported(store))
    store.take(imported([line]))
    assert store.records(KEY) == [unsure]
    assert store.best(KEY) is None
    kernel = looptune.optimize(
        NEST, strategy="default", target="avx2", database=store, verify=False
    )
    assert kernel.origin == "default"


def test_keys_tell_problems_apart() -> None:
    conv = {"padding": 2}
    base = conv2d((1, 8, 16, 16), (8, 8, 5, 5), **conv)  # type: ignore[arg-type]
    plans = [
        base,
        conv2d((1, 8, 16, 16), (8, 8, 3, 3), padding=2, dilation=2),
        conv2d((1, 8, 16, 16), (8, 2, 5, 5), padding=2, groups=4),
        conv2d((1, 8, 16, 16), (8, 8, 5, 5), padding=2, stride=(1, 2)),
        conv2d((1, 8, 16, 16), (8, 8, 5, 5), padding=2, stride=(2, 1)),
        conv2d((1, 8, 16, 16), (8, 8, 5, 5), padding=[[1, 0], [1, 0]]),
        conv2d((1, 8, 16, 16), (8, 8, 5, 5), padding=[[0, 1], [0, 1]]),
        conv2d((1, 16, 16, 8), (8, 8, 5, 5), padding=2, layout="NHWC"),
        conv2d((1, 8, 16, 16), (8, 8, 5, 5), padding=2, dtype="float64"),
        conv2d((1, 8, 16, 16), (8, 8, 5, 5), padding=2, dtype="bfloat16"),
        fuse(base, "relu"), fuse(base, "bias,relu"), matmul(8, 8, 8), matmul(8, 8, 8, trans_b=True),
    ]  # fmt: skip
    keys = {key_of(plan.nests[0], AVX2, 1) for plan in plans}
    assert len(keys) == len(plans)
    others = {key_of(NEST, AVX2, 2), key_of(NEST, TARGETS["xmm"], 1), KEY}
    assert len(others) == 3


def test_another_machines_and_versions_records_are_misses(store: Database) -> None:
    other = replace(RECORD, key=replace(KEY, machine="elsewhere"))
    older = replace(RECORD, key=replace(KEY, generator=KEY.generator - 1))
    store.add([other, older])
    assert store.best(KEY) is None
    assert store.prune() == 1
    assert store.prune(machine=fingerprint().digest) == 1
    store.add([RECORD])
    assert store.prune(older_than=0.5) == 0
    assert store.prune(older_than=2.0) == 1


def test_export_and_import(store: Database, tmp_path: Path) -> None:
    store.add([RECORD, replace(RECORD, identity="b")])
    lines = list(exported(store))
    assert all(json.loads(line)["schema"] == 1 for line in lines)
    other = Database(tmp_path / "other.sqlite3")
    assert other.take(imported(["", *lines])) == 2
    assert other.records() == store.records()


def test_what_is_taken_over_again_adds_nothing(store: Database) -> None:
    store.add([RECORD])
    store.take(imported(exported(store)))
    store.take([replace(RECORD, n=3, mean=9.0)])
    assert store.records() == [RECORD]
    store.take([replace(RECORD, n=40, mean=0.05)])
    assert [(record.n, record.mean) for record in store.records()] == [(40, 0.05)]


def line(**changes: object) -> str:
    row = {"schema": 1, **asdict(KEY), **asdict(RECORD), "actions": list(SCHEDULE.actions)}
    del row["key"]
    return json.dumps({**row, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "line 1: JSONDecodeError"),
        ("[]", "no record of schema 1"),
        (line(schema=2), "no record of schema 1"),
        (line(n=0), "is negative"),
        (line(n=True), "n is True"),
        (line(threads="two"), "threads is 'two'"),
        (line(mean=float("nan")), "mean is nan"),
        (line(variance=-1.0), "is negative"),
        (line(actions=[["split", [0, 2]]] * (MOST_ACTIONS + 1)), "a list of at most 256"),
        (line(actions=[["split", {"at": 0}]]), r"is no \[name, arguments\]"),
        (line(actions=[["split", [0, 2**40]]]), "too large for an argument"),
        (line(actions=[["split", [0, 1.5]]]), "1.5 is no argument"),
        (line(actions=[["split", [0, [1, [2]]]]]), r"\[2\] is no argument"),
        (line(actions=0).replace("0,", "[" * 30_000 + "]" * 30_000 + ","), "line 1: Recursion"),
        (line(target="avx\ud800"), "target is 'avx.ud800'"),
        (line(mean=800), "mean is 800; at most 64"),
        (line(mean=10**400), "mean is 1000"),
        (line(threads=10**15), "threads is 1000000000000000; at most 65536"),
        (line(nest="x" * 70_000), "characters; at most 65536"),
        (json.dumps({"schema": 1}), "line 1: KeyError"),
    ],
)
def test_bad_lines_are_named_and_nothing_is_taken(text: str, message: str, store: Database) -> None:
    with pytest.raises(DatabaseError, match=message):
        store.add(imported([text, line()]))
    assert store.records() == []


def test_actions_that_lead_elsewhere_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert schedule_of(NEST, replace(RECORD, identity="another")) is None
    hostile = replace(RECORD, actions=(("split", (0, 10**9)),))
    with caplog.at_level(logging.WARNING, "looptune"):
        assert schedule_of(NEST, hostile) is None
    assert "does not apply" in caplog.text


def test_a_corrupt_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FILE
    Database(path).add([RECORD])
    path.write_bytes(b"no database at all" * 100)
    path.with_name(FILE + "-wal").write_bytes(b"?")
    with caplog.at_level(logging.WARNING, "looptune"):
        store = Database(path)
    assert store.records() == []
    store.add([RECORD])
    assert store.best(KEY) == RECORD
    assert "is corrupt" in caplog.text
    aside = [p.name for p in tmp_path.iterdir() if "corrupt" in p.name]
    assert any(name.startswith(FILE + ".corrupt") for name in aside)


def test_a_newer_schema_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE
    handle = sqlite3.connect(path)
    handle.execute("PRAGMA user_version=99")
    handle.close()
    with pytest.raises(DatabaseError, match="has schema 99"):
        Database(path)


def test_files_are_private(tmp_path: Path) -> None:
    path = default_database().path
    assert path == tmp_path / "cache" / FILE
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["text", "another program's", "export"])
def test_a_file_that_is_not_ours_is_left_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    if kind == "another program's":
        handle = sqlite3.connect(path)
        handle.execute("CREATE TABLE letters (text)")
        handle.close()
    else:
        path.write_text("dear reader\n" if kind == "text" else line())
    before, mode = path.read_bytes(), path.stat().st_mode
    for use in (Database, lambda p: looptune.optimize("i->", sizes={"i": 3}, database=p)):
        with pytest.raises(DatabaseError, match="no database of looptune's"):
            use(path)
    assert (path.read_bytes(), path.stat().st_mode) == (before, mode)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_corrupt_one_of_ours_is_moved_aside_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    store = Database(path)
    store.add([RECORD])
    store.close()
    damaged = bytearray(path.read_bytes())
    damaged[100:] = b"x" * (len(damaged) - 100)
    path.write_bytes(damaged)
    assert Database(path).records() == []
    assert any(p.name.startswith("mine.corrupt") for p in tmp_path.iterdir())


def test_a_directory_that_is_absent_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="unable to open"):
        Database(tmp_path / "absent" / "a.sqlite3")
    assert list(tmp_path.iterdir()) == []


def test_where_the_users_database_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOPTUNE_CACHE_DIR", str(tmp_path / "päth with space"))
    assert cache_directory() == tmp_path / "päth with space"
    assert default_database().path == tmp_path / "päth with space" / FILE
    monkeypatch.delenv("LOOPTUNE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "looptune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(DatabaseError, match="set LOOPTUNE_CACHE_DIR"):
        cache_directory()


@pytest.mark.parametrize("kind", ["foreign", "file", "read-only"])
def test_no_place_for_it_costs_one_warning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / kind
    monkeypatch.setenv("LOOPTUNE_CACHE_DIR", str(place))
    if kind == "file":
        place.write_text("in the way")
    else:
        place.mkdir()
    if kind == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if kind == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)
    with caplog.at_level(logging.WARNING, "looptune"):
        first, second = default_database(), default_database()
    assert first is second
    assert first.path is None
    assert sum("kept in memory only" in message for message in caplog.messages) == 1
    first.add([RECORD])
    assert first.best(KEY) == RECORD
    first.prune(older_than=time.time())


def test_a_directory_that_can_never_be_is_told_to_those_who_only_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOOPTUNE_CACHE_DIR", "/proc/nope")
    with caplog.at_level(logging.WARNING, "looptune"):
        for m in (8, 9):
            looptune.optimize("mk,kn->mn", m=m, k=4, n=4, target="avx2", verify=False)
    (message,) = caplog.messages
    assert message.startswith("LOOPTUNE_CACHE_DIR=/proc/nope can hold no database")


def writer(path: Path, number: int, ready: Callable[[], object]) -> None:
    store = Database(path)
    ready()
    for turn in range(40):
        store.add([replace(RECORD, identity=f"{number}-{turn}"), replace(RECORD, n=1)])


def test_eight_processes_write_and_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / FILE
    context = multiprocessing.get_context("fork")
    parent = Database(path)  # carried over the forks, and used by none of them
    parent.records()
    barrier = context.Barrier(9)
    processes = [
        context.Process(target=writer, args=(path, number, barrier.wait)) for number in range(8)
    ]
    for process in processes:
        process.start()
    barrier.wait(60)
    time.sleep(0.05)
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes[1:]] == [0] * 7
    found = {record.identity: record for record in parent.records()}
    for number in range(1, 8):
        assert {f"{number}-{turn}" for turn in range(40)} <= set(found)
    killed = sum(name.startswith("0-") for name in found)
    assert found[SCHEDULE.identity].n == 7 * 40 + killed  # a pair is written whole or not at all


def test_the_library_reads_and_writes_it(tmp_path: Path) -> None:
    path = tmp_path / FILE
    plain = looptune.optimize("mk,kn->mn", m=48, k=32, n=64, target="avx2", database=path)
    assert plain.origin == "default"
    assert Database(path).records() == []  # nothing was measured
    Database(path).add([RECORD])
    known = looptune.optimize("mk,kn->mn", m=48, k=32, n=64, target="avx2", database=path)
    assert known.origin == "database"
    assert known.schedule == SCHEDULE
    without = looptune.optimize("mk,kn->mn", m=48, k=32, n=64, target="avx2", database=None)
    assert without.origin == "default"


def test_computing_makes_no_file(tmp_path: Path) -> None:
    looptune.optimize("mk,kn->mn", m=4, k=5, n=6)
    looptune.optimize("mk,kn->mn", m=4, k=5, n=6, strategy="greedy1")
    assert not (tmp_path / "cache").exists()
    budget = looptune.Budget(measurements=1)
    looptune.optimize("mk,kn->mn", m=4, k=5, n=6, strategy="random", budget=budget)
    assert (tmp_path / "cache" / FILE).is_file()


def test_a_record_that_gives_wrong_results_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Database(tmp_path / FILE)
    store.add([RECORD])
    real, calls = Oracle.run, []

    def wrong_once(oracle: Oracle, kernel: looptune.Kernel) -> np.ndarray:
        calls.append(kernel)
        return real(oracle, kernel) + (len(calls) == 1)

    monkeypatch.setattr(Oracle, "run", wrong_once)
    with caplog.at_level(logging.WARNING, "looptune"):
        kernel = looptune.optimize("mk,kn->mn", m=48, k=32, n=64, target="avx2", database=store)
    assert kernel.origin == "default"
    assert "gives wrong results" in caplog.text


def test_a_database_that_fails_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Database(tmp_path / FILE)

    def locked(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(store, "records", locked)
    with caplog.at_level(logging.WARNING, "looptune"):
        kernel = looptune.optimize("mk,kn->mn", m=4, k=5, n=6, database=store)
    assert kernel.origin == "default"
    assert "could not be read" in caplog.text


BAD = [
    ("actions", "{"), ("actions", None), ("actions", b"\xff"), ("actions", "[" * 3000), ("n", "x"),
    ("n", 0), ("n", b"x"), ("mean", "x"), ("mean", 800.0), ("variance", -5.0),
    ("variance", float("inf")), ("created", "x"), ("identity", b"x"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), BAD)
def test_a_bad_row_costs_a_warning(
    column: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE
    other = replace(RECORD, identity="other")
    store = Database(path)
    store.add([RECORD, other])
    store.close()
    handle = sqlite3.connect(path)
    if value is None:  # which a table that others made may hold
        handle.execute("CREATE TABLE free AS SELECT * FROM schedules")
        handle.execute("DROP TABLE schedules")
        handle.execute("ALTER TABLE free RENAME TO schedules")
    handle.execute(f"UPDATE schedules SET {column}=? WHERE identity<>'other'", (value,))
    handle.commit()
    handle.close()
    with caplog.at_level(logging.WARNING, "looptune"):
        store = Database(path)
        assert store.records() == [other]
        kernel = looptune.optimize("mk,kn->mn", m=48, k=32, n=64, target="avx2", database=path)
    assert kernel.origin == "default"
    assert "a record of the database is no use" in caplog.text
    if column != "identity" and value is not None:
        store.add([RECORD])  # takes the place of the bad one
        assert sorted(store.records(), key=lambda r: r.identity) == sorted(
            [RECORD, other], key=lambda r: r.identity
        )


def test_a_text_that_is_no_unicode_costs_its_record(tmp_path: Path) -> None:
    path = tmp_path / FILE
    Database(path).add([RECORD])
    handle = sqlite3.connect(path)
    handle.execute("UPDATE schedules SET actions=CAST(x'5bff5d' AS TEXT)")
    handle.commit()
    handle.close()
    assert Database(path).records() == []


@pytest.mark.parametrize("rate", [-1.0, 0.0, "x", b"x"])
def test_rates_that_cannot_be(rate: object, tmp_path: Path) -> None:
    store = Database(tmp_path / FILE)
    store.keep_rates("here", "avx2", 1, {"flops float32": rate})  # type: ignore[dict-item]
    assert store.rates("here", "avx2", 1) == {}


USES = [
    Database.records, lambda store: store.add([RECORD]), lambda store: store.rates("a", "b", 1),
    Database.prune,
]  # fmt: skip
REFUSED = [
    OSError(30, "Read-only"),
    sqlite3.OperationalError("attempt to write a readonly database"),
]


@pytest.mark.parametrize("use", USES)
def test_what_sqlite_says_names_the_file(use: Callable[[Database], object], tmp_path: Path) -> None:
    path = tmp_path / "mine.sqlite3"
    store = Database(path)
    handle = sqlite3.connect(path)
    handle.execute("ALTER TABLE schedules RENAME COLUMN generator TO creator")
    handle.execute("ALTER TABLE rates RENAME COLUMN rate TO speed")
    handle.close()
    with pytest.raises(DatabaseError, match=r"mine\.sqlite3: no such column"):
        use(store)


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    store = Database(tmp_path / FILE)
    (pages,) = store.connection().execute("PRAGMA page_count").fetchone()
    store.connection().execute(f"PRAGMA max_page_count={pages}")
    many = [replace(RECORD, identity=str(number)) for number in range(1000)]
    with pytest.raises(DatabaseError, match="database or disk is full"):
        store.add(many)
    assert store.records() == []


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_written_is_read(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a b?.sqlite3"
    store = Database(path)
    store.add([RECORD])
    store.close()

    def refused(name: str) -> sqlite3.Connection:
        raise fault

    monkeypatch.setattr(module, "prepared", refused)
    store = Database(path)
    assert store.records() == [RECORD]
    with pytest.raises(DatabaseError, match="readonly"):
        store.add([RECORD])
    with pytest.raises(DatabaseError, match=r"absent: .*(Read-only|readonly)"):
        Database(tmp_path / "absent")


def test_a_locked_one_is_not_opened_for_reading_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Database(tmp_path / FILE)
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.01)
    with store.transaction(), pytest.raises(DatabaseError, match="locked"):
        Database(tmp_path / FILE)


def test_moving_aside_leaves_others_locks(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text("precious")
    path = tmp_path / "poetry.db"
    Database(path).close()
    path.write_bytes(path.read_bytes()[:100] + b"x" * 1000)
    Database(path)
    assert (tmp_path / "poetry.lock").read_text() == "precious"


def test_keys_are_values() -> None:
    assert Key("a", "b", 1, "c") == Key("a", "b", 1, "c")
    assert module.SCHEMA == 1
