"""Results on full disks, over files that were there, and over what they came from."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from test_database import RECORD

from looptune.cli import main
from looptune.database import FILE, Database
from looptune.files import append_text, replaced, same, write_text

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    path.chmod(0o640)

    def interrupted() -> None:
        with replaced(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path.read_text(), os.listdir(tmp_path)) == ("before", ["a"])
    write_text(path, "after")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("after", 0o640)


def test_a_link_stays_one(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").is_symlink()
    assert (tmp_path / "b").read_text() == "text"


@needs_full
@pytest.mark.parametrize("write", [write_text, append_text])
def test_a_full_disk_is_named(write):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write(FULL, "text")


@needs_full
def test_a_full_disk_costs_no_result(capsys):
    assert main("show matmul 4 4 4 --what tree --output /dev/full".split()) == 1
    said = capsys.readouterr()
    assert "for n" in said.out
    assert "/dev/full" in said.err


@needs_full
def test_an_export_to_a_full_disk(tmp_path, capsys):
    path = tmp_path / "a.sqlite3"
    Database(path).add([RECORD])
    assert main(["db", "export", "/dev/full", "--database", str(path)]) == 1
    assert "/dev/full cannot be written: No space left" in capsys.readouterr().err


@pytest.mark.parametrize("to_file", [False, True])
def test_the_standard_output_as_a_file(to_file, tmp_path):
    words = [sys.executable, "-m", "looptune", *"show matmul 4 4 4 --what tree".split(),
             "--output", "/dev/stdout"]  # fmt: skip
    if to_file:
        with (tmp_path / "out").open("w") as file:
            subprocess.run(words, check=True, stdout=file)
        found = (tmp_path / "out").read_text()
    else:
        found = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert found.startswith("out[m, n]") or "for n" in found.partition("{")[0]
    assert json.loads(found[found.index("{") :])["schema"] == 1


def test_files_that_are_one(tmp_path):
    path, link = tmp_path / "a", tmp_path / "b"
    assert same(path, tmp_path / "." / "a")  # which is not there
    path.write_text("")
    link.hardlink_to(path)
    assert same(path, link)
    assert not same(path, tmp_path / "c")
    assert not same("/dev/null", "/dev/null")


@pytest.mark.parametrize(
    "words",
    [
        "db export {a} --database {a}",
        "db export {a}-wal --database {a}",
        "db list --output {a} --database {a}",
        "db export {users}",
        "db info --output {users}",
        "optimize matmul 4 4 4 --output {a} --database {a}",
        "optimize matmul 4 4 4 --output {new} --database {new}",
        "peak --output {a} --database {a}",
        "db merge {b} --output {b} --database {a}",
        "bench --suite {b} --output {b}",
        "db export {new} --output {new} --database {a}",
    ],
)
def test_nothing_is_written_over_its_source(words, tmp_path, capsys):
    places = {"a": tmp_path / "a.sqlite3", "b": tmp_path / "b.sqlite3", "new": tmp_path / "new",
              "users": tmp_path / "cache" / FILE}  # fmt: skip
    (tmp_path / "cache").mkdir(mode=0o700)
    for name in ("a", "b", "users"):
        store = Database(places[name])
        store.add([RECORD])
        store.close()
    before = {name: places[name].read_bytes() for name in ("a", "b", "users")}
    assert main(words.format(**places).split()) == 2
    said = capsys.readouterr().err
    assert "another file would do" in said
    assert said.count("\n") == 1
    assert {name: places[name].read_bytes() for name in before} == before
    assert not places["new"].exists()
