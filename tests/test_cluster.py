"""A measured stage on a cluster of two nodes: every node is timed by one runner."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("gymnasium")
if importlib.util.find_spec("ray") is None:
    pytest.skip("RLlib is not installed", allow_module_level=True)

from looptune.envs.problem import Problem
from looptune.envs.rewards import Measured
from looptune.errors import ArgumentError
from looptune.models import checkpoint, train
from looptune.models.ppo import PPOConfig
from looptune.schedule import Schedule

pytestmark = [
    pytest.mark.slow,
    # ray and what it imports warn of one another's deprecations, and of what it leaves open.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TRACE = "LOOPTUNE_TEST_TRACE"


class Traced(Measured):
    """Writes down where it measures."""

    def __call__(self, problem: Problem, schedule: Schedule) -> float | None:
        import ray

        context = ray.get_runtime_context()
        place = Path(os.environ[TRACE]) / f"{os.getpid()}.json"
        held = context.get_assigned_resources().get("measure", 0)
        place.write_text(json.dumps({"node": context.get_node_id(), "held": held}))
        return super().__call__(problem, schedule)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two nodes on this machine, of which each can time one runner."""
    from ray.cluster_utils import Cluster

    here = Path(__file__).parent
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", f"{here.parent}{os.pathsep}{here}")
    (tmp_path / "trace").mkdir()
    monkeypatch.setenv(TRACE, str(tmp_path / "trace"))
    with tempfile.TemporaryDirectory(prefix="lt", ignore_cleanup_errors=True) as folder:
        node = {"num_cpus": 2, "resources": {"measure": 1}}
        head = {**node, "include_dashboard": False}
        monkeypatch.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**node)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()


def config(runners: int) -> train.TrainConfig:
    return train.TrainConfig(
        stages=("measured",), hidden=8, layers=1, runners=runners,
        measured=PPOConfig(steps=96, rollout=8, environments=2, epochs=1),
    )  # fmt: skip


def test_a_node_is_timed_by_one_runner(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(train, "MEASURED_POOL", 2)
    monkeypatch.setattr(train, "Measured", Traced)
    run = tmp_path / "run"
    train.run(config(2), run, address=address)
    assert not ray.is_initialized()
    traces = [json.loads(place.read_text()) for place in (tmp_path / "trace").iterdir()]
    assert [each["held"] for each in traces] == [1, 1]
    assert len({each["node"] for each in traces}) == 2
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert len(rows) >= 3
    assert rows[-1]["steps"] >= 96
    assert checkpoint.load(run / "policy.npz").header["command"] == (
        "looptune train RUN --seed 0 --stages measured --trainer rllib --runners 2"
    )
    with pytest.raises(ArgumentError, match=r"runners hold 3 of 'measure', .* has 2"):
        train.run(config(3), tmp_path / "more", address=address)
