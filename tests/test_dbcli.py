"""`looptune db` and tuning from the command line."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from builders import RECORD
from harness import needs_host

import looptune
from looptune import cli
from looptune.cli import main
from looptune.database import FILE, Database
from looptune.default import default_schedule
from looptune.host import available_cores, host_target
from looptune.measure import Posterior
from looptune.schedule import parse_order
from looptune.tuner import Interrupted
from looptune.workloads import matmul


def filled(path: Path) -> Path:
    store = Database(path)
    store.add([RECORD])
    store.close()
    return path


def test_info_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path / "a.sqlite3")
    assert main(["db", "info", "--database", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["records"], found["this_machine"]) == (1, 1, 1)
    assert main(["db", "list", "--database", str(path)]) == 0
    assert "+10.5 %" in capsys.readouterr().out
    assert main(["db", "list", "--database", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"][0]["n"] == 15


def test_export_import_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, lines = filled(tmp_path / "a.sqlite3"), tmp_path / "records.jsonl"
    assert main(["db", "export", str(lines), "--database", str(path)]) == 0
    assert main(["db", "export", "-", "--database", str(path)]) == 0
    assert capsys.readouterr().out.endswith(lines.read_text())
    other = tmp_path / "b.sqlite3"
    assert main(["db", "import", str(lines), "--database", str(other)]) == 0
    assert Database(other).records() == [RECORD]
    third = tmp_path / "c.sqlite3"
    assert main(["db", "merge", str(other), "--database", str(third)]) == 0
    assert Database(third).records() == [RECORD]


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path / "a.sqlite3")
    words = ["db", "prune", "--database", str(path), "--json"]
    assert main(words) == 0
    assert main([*words, "--other-machines", "--older-than", "1"]) == 0
    first, second = capsys.readouterr().out.replace("}\n{", "}\n\0{").split("\0")
    assert json.loads(first)["deleted"] == 0
    assert json.loads(second)["deleted"] == 1


def test_the_users_database_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["db", "info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "cache" / FILE)


def test_no_database_is_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "records.jsonl"
    path = filled(tmp_path / "a.sqlite3")
    assert main(["db", "export", str(lines), "--database", str(path)]) == 0
    assert main(["db", "import", str(lines), "--database", "none"]) == 0
    assert capsys.readouterr().out.endswith("1 records imported\n")
    assert main(["db", "info", "--database", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["records"]) == (None, 0)
    assert not Path("none").exists()


@pytest.mark.parametrize("what", ["import", "merge"])
def test_what_is_no_use_is_named(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["db", what, str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
    bad = tmp_path / "bad"
    bad.write_text('{"schema": 1}\n')
    assert main(["db", "import", str(bad)]) == 1
    assert "line 1" in capsys.readouterr().err


@needs_host
def test_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "optimize", "matmul", "24", "32", "16", "--strategy", "random", "--measurements", "3",
        "--database", str(tmp_path / "a.sqlite3"), "--json", "--epilogue", "bias,relu",
    ]  # fmt: skip
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"]
    assert found["tried"] == 3
    assert len(found["gain"]) == 1
    assert main([*words[:-3], "--dtype", "bfloat16", "--retune"]) == 0
    assert "random:" in capsys.readouterr().out


@needs_host
def test_an_interrupt_prints_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (nest,) = matmul(24, 32, 16).nests
    best = parse_order(nest, "m:4 n:16 k m n", "n")

    def interrupted(*_: object, **__: object) -> looptune.Kernel:
        raise Interrupted(best, Posterior(15, 0.1, 1e-4))

    monkeypatch.setattr(cli, "optimize", interrupted)
    words = ["optimize", "matmul", "24", "32", "16", "--strategy", "random", "--budget", "9"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "for m:4" in captured.out


@pytest.mark.parametrize("file", ["missing/records.jsonl", "."])
def test_export_to_where_nothing_can_be_written(file, tmp_path, capsys):
    path = filled(tmp_path / "a.sqlite3")
    assert main(["db", "export", str(tmp_path / file), "--database", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("looptune: ")
    assert "cannot be written" in said
    assert "Traceback" not in said


def test_import_and_merge_name_the_file(tmp_path, capsys):
    path, bad = filled(tmp_path / "a.sqlite3"), tmp_path / "bad.jsonl"
    bad.write_text("no json\n")
    for words, wanted in (
        (["import", str(bad)], "bad.jsonl: line 1"),
        (["import", str(tmp_path / "gone")], "gone: No such file"),
        (["merge", str(tmp_path)], "is a folder"),
        (["merge", str(tmp_path / "gone")], "is no file"),
    ):
        assert main(["db", *words, "--database", str(path)]) == 1
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("days", ["-1", "nan", "inf", "x"])
def test_prune_of_no_number_of_days(days, tmp_path, capsys):
    path = filled(tmp_path / "a.sqlite3")
    with pytest.raises(SystemExit) as stop:
        main(["db", "prune", f"--older-than={days}", "--database", str(path)])
    assert stop.value.code == 2
    assert f"argument --older-than: '{days}' is no number of days" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["no json", "[" * 30_000, '{"schema": 1, "nest": "\\ud800"}', '{"schema": 1}']
)
def test_a_failed_import_leaves_no_database(text, tmp_path, capsys):
    bad, new = tmp_path / "bad.jsonl", tmp_path / "new.sqlite3"
    bad.write_text(text + "\n")
    assert main(["db", "import", str(bad), "--database", str(new)]) == 1
    assert main(["db", "merge", str(bad), "--database", str(new)]) == 1
    said = capsys.readouterr().err
    assert "bad.jsonl: line 1: " in said
    assert said.count("\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_renamed_column_is_one_line(tmp_path, capsys):
    path = filled(tmp_path / "a.sqlite3")
    handle = sqlite3.connect(path)
    handle.execute("ALTER TABLE schedules RENAME COLUMN mean TO average")
    handle.close()
    for words in (["list"], ["export", "-"], ["merge", str(path)]):
        assert main(["db", *words, "--database", str(path)]) == 1
        assert capsys.readouterr().err == f"looptune: {path}: no such column: mean\n"


def test_a_bad_row_is_left_out(tmp_path, capsys):
    path = filled(tmp_path / "a.sqlite3")
    Database(path).add([replace(RECORD, identity="other")])
    handle = sqlite3.connect(path)
    handle.execute("UPDATE schedules SET mean=800 WHERE identity='other'")
    handle.commit()
    handle.close()
    assert main(["db", "list", "--database", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["records"]) == 1
    assert main(["db", "merge", str(path), "--database", str(tmp_path / "b")]) == 0
    assert Database(tmp_path / "b").records() == [RECORD]


@needs_host
@pytest.mark.skipif(available_cores() < 2, reason="this process may use one core")
def test_an_interrupted_search_keeps_its_threads(monkeypatch):
    (nest,) = matmul(64, 64, 64).nests
    best = default_schedule(nest, host_target(), 2)

    def interrupted(*_: object, **__: object) -> looptune.Kernel:
        raise Interrupted(best, Posterior(15, 0.1, 1e-4))

    monkeypatch.setattr(cli, "optimize", interrupted)
    words = "optimize matmul 64 64 64 --threads 2 --budget 9 --strategy random".split()
    args = cli.parser().parse_args(words)
    assert cli.tuned(cli.workload_plan(args), args).threads == 2
