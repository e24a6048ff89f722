"""Where code comes from: a checkout's commit, changed files marked, else the version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import looptune
from looptune.provenance import commit, git


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "-m", "first")
    found = commit(tmp_path)
    assert found == git(tmp_path, "rev-parse", "HEAD")
    assert len(found) == 40
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == found + "+"


def test_without_a_checkout_or_git_it_is_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(tmp_path) == looptune.__version__
    (tmp_path / ".git").mkdir()
    assert commit(tmp_path) == looptune.__version__
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError))
    assert commit(tmp_path) == looptune.__version__
