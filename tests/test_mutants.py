"""Every committed fault is found by the property cases; without one they pass."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import MUTANTS, PACKAGE, Mutant, run, verdict

from looptune.host import runs
from looptune.target import TARGETS

pytestmark = pytest.mark.skipif(
    not runs(TARGETS["avx2"]), reason="faults in encoding show where machine code runs"
)


@pytest.fixture(scope="module")
def verdicts() -> Iterator[dict[str, Future[str]]]:
    """What becomes of each mutant, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {mutant.name: pool.submit(verdict, mutant) for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_killed(mutant: Mutant, verdicts: dict[str, Future[str]]) -> None:
    found = verdicts[mutant.name].result()
    assert found.startswith(("seed ", "code -", "no end"))


def test_the_package_without_a_fault_survives(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "looptune")
    assert run(tmp_path) == ""
