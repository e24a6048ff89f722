"""Golden files: `golden` compares text with `tests/golden/<test>.txt`; `--update-golden` writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test records stays its own."""
    monkeypatch.setenv("LOOPTUNE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    path = GOLDEN / (re.sub(r"[^\w.-]+", "_", request.node.name).strip("_") + ".txt")

    def compare(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text + "\n")
        assert path.exists(), f"{path.name} is missing: run pytest --update-golden and read it"
        assert text + "\n" == path.read_text()

    return compare
