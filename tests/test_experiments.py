"""The scripts that time: their measurements are made up here, what they keep is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import compare_searches, core180, cost_model, header, spine, versus
from looptune.host import host_isas
from looptune.lower import GENERATOR_VERSION
from looptune.provenance import commit
from looptune.target import target_named
from looptune.workloads import conv2d, matmul

pytestmark = pytest.mark.skipif(not host_isas(), reason="this machine runs no supported kernels")
ROW = {
    "id": "looptune-mm-test/mm64_240_64", "kind": "matmul", "correct": True,
    "peers": {"numpy": {"ratio": 2.0, "gflops": 1.0}},
}  # fmt: skip


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was searched, by the strategy; the random one finds the best."""
    asked: list[str] = []

    def searched(nest: Any, target: Any, strategy: str, *_: object) -> dict[str, Any]:
        asked.append(strategy)
        return {"actions": [], "order": "m n k", "tried": 1, "rejected": {}, "seconds": 0.1}

    def rated(
        nest: Any, target: Any, runs: dict[str, Any], seconds: float
    ) -> tuple[dict[str, float], str]:
        found = dict.fromkeys(runs, 0.0) | {"default": 0.0, "untuned": -1.0, "random/ours": 0.5}
        return found, "random/ours"

    monkeypatch.setattr(compare_searches, "searched", searched)
    monkeypatch.setattr(compare_searches, "rated", rated)
    return asked


def test_searches_go_on_where_they_ended(
    searches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "searches.json"
    words = ["--output", str(path), "--seconds", "0.1", "--only"]
    assert compare_searches.main([*words, "ansor"]) == 0
    once = len(searches)
    assert compare_searches.main([*words, "ansor"]) == 0
    assert len(searches) == once > 0
    assert compare_searches.main([*words, "mobilenet_v2/stem"]) == 0
    assert len(searches) == 2 * once
    found = json.loads(path.read_text())
    assert list(found["rows"]) == ["ansor/C1D.1", "mobilenet_v2/stem"]
    assert found["summary"]["random/ours"]["share_of_best_known"] == pytest.approx(1)
    assert capsys.readouterr().out.startswith("random/ours            1.000 of best known   4.48x")


@pytest.mark.parametrize("what", ["generator", "seconds"])
def test_searches_of_other_versions_or_budgets_are_not_mixed(
    what: str,
    searches: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--output", str(tmp_path / "searches.json"), "--only", "ansor"]
    assert compare_searches.main(words) == 0
    if what == "generator":
        monkeypatch.setattr(header, "GENERATOR_VERSION", 0)
    else:
        words += ["--seconds", "9"]
    assert versus.exit_code(lambda: compare_searches.main(words)) == 2
    part = {"generator": "versions", "seconds": "config"}[what]
    assert f"searches.json has another {part}" in capsys.readouterr().err


def test_searches_are_set_beside_tiles_of_so_many_vectors() -> None:
    (nest,) = matmul(64, 64, 64).nests
    for name, columns in (("avx2", 16), ("avx512", 32)):
        found = compare_searches.statics(nest, target_named(name))
        assert list(found) == ["untuned", "static 4x2v", "static 6x2v"]
        assert found["static 6x2v"].order == f"m:6 n:{columns} k m n"
    (other,) = conv2d((1, 2, 5, 5), (3, 2, 3, 3)).nests
    assert list(compare_searches.statics(other, target_named("avx2"))) == ["untuned"]


def made_up(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a script find results without a measurement."""
    parts: dict[str, object] = {
        "untuned": {}, "codegen": {}, "import_time": {}, "call_overhead": {}, "render": "",
        "bench": {"schema": 1, "machine": {}, "rows": [ROW], "generator": GENERATOR_VERSION},
        "measured_row": cost_model.Row("x", 50, 0.9, 0.8, 9, 0.01, 1.0),
    }  # fmt: skip

    def returns(value: object) -> Callable[..., object]:
        return lambda *_: value

    for name in parts.keys() & vars(script).keys():
        monkeypatch.setattr(script, name, returns(parts[name]))


@pytest.mark.parametrize("script", [core180, spine, cost_model], ids=lambda script: script.__name__)
def test_results_say_what_made_them(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(script, monkeypatch)
    words = ["--output", str(tmp_path / "found.json")]
    words += ["--seed", "3", "--workloads", "2"] if script is cost_model else []
    assert script.main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["versions"]["generator"] == str(GENERATOR_VERSION)
    assert found["commit"] == commit()
    assert found["command"] == " ".join(["python -m", script.__name__, *words])
    assert found["date"]


def test_a_result_names_all_commits_that_made_it(tmp_path: Path) -> None:
    path, head = tmp_path / "rows.json", {"machine": 1, "versions": 2, "config": 3, "date": "today"}
    for each in ("a", "b", "b", "c"):
        versus.keep(path, versus.resumed(path, {**head, "commit": each}))
    found = json.loads(path.read_text())
    assert (found["commit"], found["earlier_commits"]) == ("c", ["a", "b"])
