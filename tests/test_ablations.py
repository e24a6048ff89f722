"""The flat network, what ablations do to environments, and what is said of their rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

from experiments import ablations, curves  # noqa: E402
from looptune.envs.looptune_v0 import LoopTuneEnv  # noqa: E402
from looptune.envs.problem import Problem, listed  # noqa: E402
from looptune.graph import TARGET_FEATURES, machine_features  # noqa: E402
from looptune.models.architecture import ILLEGAL  # noqa: E402
from looptune.models.flat import paper_network, paper_rows  # noqa: E402
from looptune.models.network import stacked  # noqa: E402
from looptune.models.ppo import PPOConfig, train  # noqa: E402
from looptune.provenance import commit  # noqa: E402
from looptune.target import TARGETS  # noqa: E402
from looptune.workloads import matmul  # noqa: E402

NEST = matmul(64, 96, 128).nests[0]
PROBLEM = Problem(NEST, TARGETS["avx2"])


def test_the_flat_network_learns_the_papers_environment():
    problems = listed([PROBLEM])
    torch.manual_seed(0)
    network, reports = paper_network(64), []
    config = PPOConfig(steps=3840, rollout=40, environments=8, minibatch=80, rate=1e-3)
    environments = [paper_rows(LoopTuneEnv(problems)) for _ in range(8)]
    train(network, environments, config, reports.append)
    assert {report["length"] for report in reports} == {10.0}
    returns = [report["return"] for report in reports]
    assert np.mean(returns[-3:]) > np.mean(returns[:3]) + 0.005


def test_masks_of_the_flat_network():
    observation, _ = paper_rows(LoopTuneEnv(listed([PROBLEM])), masked=True).reset(seed=0)
    mask = observation["action_mask"].astype(bool)
    logits, values = paper_network()(stacked([observation]))
    assert values.shape == (1,)
    assert ((logits[0] == ILLEGAL).numpy() == ~mask).all()
    assert not mask.all()


def test_features_of_the_target_are_those_that_differ():
    one, other = (machine_features(NEST, TARGETS[name], 1) for name in ("avx512", "xmm"))
    assert set(np.flatnonzero(one != other)) <= set(range(*TARGET_FEATURES.indices(100)))
    assert (machine_features(NEST, TARGETS["xmm"], 4) != other).argmax() == TARGET_FEATURES.stop - 1


@pytest.mark.parametrize("name", ["unmasked", "untold", "flat", "paper: LoopNest-v0, untuned"])
def test_cells_change_what_is_seen(name: str):
    cell = ablations.CELLS[name]
    environment = ablations.environment_of(cell, listed([PROBLEM]))
    observation, info = environment.reset(seed=0)
    assert observation["action_mask"].all() == (not cell.masked)
    assert observation["world"][TARGET_FEATURES].any() == cell.told
    assert not info["action_mask"].all()
    logits, _ = ablations.network_of(cell)(stacked([observation]))
    assert logits.shape == (1, environment.action_space.n)
    (score,) = ablations.scores(cell, ablations.network_of(cell), [PROBLEM])
    assert -2 <= score <= 2


def test_interquartile_means():
    assert ablations.interquartile(np.array([[0.0, 1.0], [3.0, 100.0]])) == 2.0
    assert ablations.interval(np.full((2, 8), 0.5)) == (0.5, 0.5, 0.5)
    mean, low, high = ablations.interval(np.random.default_rng(0).normal(size=(5, 40)))
    assert low < mean < high


def test_rows_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    output = tmp_path / "rows.jsonl"
    made: list[tuple[str, int]] = []

    def row(name: str, steps: int, seed: int = 0) -> dict[str, object]:
        made.append((name, seed))
        return {"cell": name, "seed": seed, "steps": steps, "seconds": 1.0,
                "scores": {"any": [0.1, 0.2]}}  # fmt: skip

    monkeypatch.setattr(ablations, "row_of", row)
    monkeypatch.setattr(ablations, "beam_row", lambda steps: row("beam", steps))
    words = ["x", "--output", str(output), "--cells", "graph,flat", "--steps", "8", "--seeds"]
    monkeypatch.setattr("sys.argv", [*words, "1"])
    ablations.main()
    output.write_text(output.read_text() + '{"cell": "torn')
    monkeypatch.setattr("sys.argv", [*words, "2"])
    ablations.main()
    assert made == [("beam", 0), ("graph", 0), ("flat", 0), ("graph", 1), ("flat", 1)]
    assert len(ablations.rows_of(output)) == 5
    assert "| graph | any | 2 | 0.150 |" in capsys.readouterr().out
    assert ablations.rows_of(output)[0]["commit"] == commit()
    monkeypatch.setattr(ablations, "GENERATOR_VERSION", 0)
    ablations.main()
    assert len(made) == 10, "rows of another generator count for nothing"


def test_curves(tmp_path: Path):
    rows = [{"stage": "model", "steps": at, "return": at / 9} for at in (1, 2, 2, 3)]
    rows[2]["return"] = 0.7
    rows.append({"stage": "clone", "epoch": 1.0, "agreement": 0.5})
    (tmp_path / "log.jsonl").write_text("\n".join([*map(json.dumps, rows), '{"stage']))
    found = curves.curves_of(tmp_path)
    assert found["model", "return", "steps"] == [(1, 1 / 9), (2, 0.7), (3, 3 / 9)]
    assert found["clone", "agreement", "epoch"] == [(1.0, 0.5)]
    curves.plot([tmp_path], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(SystemExit, match="nothing to plot"):
        curves.plot([tmp_path], tmp_path / "none.png")
