"""RLlib trains the same network on the same environments."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from looptune.errors import ArgumentError
from looptune.models.architecture import Architecture
from looptune.target import TARGETS
from looptune.workloads import matmul

pytest.importorskip("torch_geometric")
pytest.importorskip("gymnasium")
if importlib.util.find_spec("ray") is None:
    pytest.skip("RLlib is not installed", allow_module_level=True)

pytestmark = [
    # ray and what it imports warn of one another's deprecations.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture
def rllib():
    from looptune.models import rllib

    return rllib


def settings(**changes: float):
    from looptune.models.ppo import PPOConfig

    return PPOConfig(
        **{"steps": 64, "rollout": 8, "environments": 4, "minibatch": 16, "epochs": 1} | changes
    )


def architecture() -> Architecture:
    from looptune.construct import TABLE

    return Architecture(TABLE, 16)


def one_problem(rng: np.random.Generator):
    from looptune.envs.problem import Problem

    return Problem(matmul(64, 96, 128).nests[0], TARGETS["avx2"])


def small_environment(problems=one_problem):
    from looptune.envs.construct import ConstructEnv

    return ConstructEnv(problems)


def trained(rllib, changes: dict[str, float], state: Path | None = None, **options: object):
    """Arrays before and after training, and the reports."""
    import torch

    from looptune.models.network import PolicyNetwork

    torch.manual_seed(0)
    network = PolicyNetwork(architecture())
    before = network.state_arrays()
    reports: list[dict[str, float]] = []
    given = {"env_config": {"problems": one_problem}} | options
    rllib.train(network, settings(**changes), reports.append, state, **given)
    return before, network.state_arrays(), reports


def test_local_training_improves_without_a_cluster(rllib):
    import ray

    changes = {"steps": 2048, "rollout": 64, "environments": 8, "minibatch": 128, "epochs": 4}
    before, after, reports = trained(rllib, changes | {"rate": 3e-3})
    assert not ray.is_initialized()
    assert reports[-1]["steps"] >= 2048
    assert reports[-1]["return"] > reports[0]["return"] + 0.2
    for name, shape in architecture().parameters.items():
        assert after[name].shape == shape
    assert any((before[name] != after[name]).any() for name in after)


def test_local_training_starts_from_the_network(rllib):
    before, after, reports = trained(
        rllib, {"steps": 1, "rate": 0.0}, environment=small_environment, env_config={}
    )
    assert len(reports) == 1
    assert set(reports[0]) >= {"steps", "policy_loss", "value_loss", "entropy"}
    assert all(np.isfinite(value) for value in reports[0].values())
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


def test_local_training_is_deterministic(rllib):
    first, second = (trained(rllib, {})[1] for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)


def test_returns_are_those_of_whole_episodes(rllib):
    """Shaping sums up to nothing, so a constant gain is every return."""
    options = {"problems": one_problem, "reward": constant}
    *_, reports = trained(rllib, {"steps": 128}, env_config=options)
    assert [each["return"] for each in reports] == pytest.approx([0.1] * len(reports), abs=1e-5)


def constant(problem: object, schedule: object) -> float:
    return 0.1


def test_a_killed_trainer_goes_on(rllib, tmp_path: Path):
    from looptune.models.network import PolicyNetwork
    from looptune.models.ppo import kept

    class Killed(Exception):
        pass

    reports: list[dict[str, float]] = []

    def killed(figures: dict[str, float]) -> None:
        reports.append(figures)
        if len(reports) == 2:
            raise Killed

    state = tmp_path / "model.state"
    options = {"env_config": {"problems": one_problem}}
    with pytest.raises(Killed, match=r"^$"):
        rllib.train(PolicyNetwork(architecture()), settings(steps=96), killed, state, **options)
    found = kept(state)
    assert found.steps == reports[0]["steps"]
    assert found.optimizer["state"][0]["step"] > 0
    assert list(tmp_path.iterdir()) == [state]
    network = PolicyNetwork(architecture())
    again: list[dict[str, float]] = []
    rllib.train(network, settings(steps=96), again.append, state, **options)
    assert found.steps < again[0]["steps"] < found.steps + 48
    assert again[-1]["steps"] >= 96
    rllib.train(network, settings(steps=96), again.append, state, **options)
    assert again[-1]["steps"] == kept(state).steps
    for name, array in kept(state).network.items():
        np.testing.assert_array_equal(network.state_dict()[name], array)


def test_rates_go_on_falling(rllib):
    found = rllib.ppo_config(architecture(), settings(steps=100, rate=1.0), done=50)
    assert found.lr == [[0, 0.5], [40, 0.1]]
    found = rllib.ppo_config(architecture(), settings(steps=100, rate=1.0), done=95)
    assert found.lr == [[0, 0.1], [1, 0.1]]


def test_both_trainers_have_the_same_settings(rllib):
    configuration = rllib.ppo_config(
        architecture(), settings(seed=7, value=0.5), runners=2, measure=1.0
    )
    assert configuration.train_batch_size_per_learner == 8 * 4 * 2
    assert configuration.minibatch_size == 16
    assert configuration.vf_loss_coeff == 0.25
    assert configuration.seed == 7
    assert configuration.num_env_runners == 2
    assert configuration.custom_resources_per_env_runner == {"measure": 1.0}


def test_a_resource_needs_a_runner(rllib):
    with pytest.raises(ArgumentError, match=r"measure=1.0 without runners; runners=1 or more"):
        rllib.ppo_config(architecture(), settings(), measure=1.0)


def test_a_cluster_must_have_what_runners_hold(rllib, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rllib.ray, "cluster_resources", lambda: {"CPU": 8.0, "measure": 1.0})
    rllib.check_resources({"measure": 1.0})
    with pytest.raises(
        ArgumentError, match=r"runners hold 2 of 'measure', .* has 1: fewer runners"
    ):
        rllib.check_resources({"measure": 2.0})
    with pytest.raises(ArgumentError, match=r"runners hold 1 of 'other', .* has 0"):
        rllib.check_resources({"other": 1.0})


@pytest.mark.slow
def test_a_remote_runner_trains(rllib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker imports everything by itself, and nothing is left behind."""
    import ray

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    before, after, reports = trained(rllib, {}, env_config={}, runners=1, measure=1.0)
    assert reports[-1]["steps"] >= 64
    assert any((after[name] != before[name]).any() for name in after)
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert "ray" in sys.modules
