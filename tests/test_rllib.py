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


def test_local_training_improves_without_a_cluster(rllib):
    import ray

    configuration = rllib.ppo_config(
        architecture(),
        settings(steps=2048, rollout=64, environments=8, minibatch=128, epochs=4, rate=3e-3),
        env_config={"problems": one_problem},
    )
    reports: list[dict[str, float]] = []
    saved: list[dict[str, np.ndarray]] = []
    found = rllib.train(configuration, 2048, reports.append, saved.append)
    assert not ray.is_initialized()
    assert reports[-1]["steps"] >= 2048
    assert reports[-1]["return"] > reports[0]["return"] + 0.2
    assert len(saved) == len(reports)
    for name, shape in architecture().parameters.items():
        assert found[name].shape == shape
        np.testing.assert_array_equal(found[name], saved[-1][name])
    assert any((saved[0][name] != found[name]).any() for name in found)


def test_local_training_starts_from_arrays(rllib):
    from looptune.models.network import PolicyNetwork

    start = PolicyNetwork(architecture()).state_arrays()
    configuration = rllib.ppo_config(architecture(), settings(rate=0.0), small_environment)
    reports: list[dict[str, float]] = []
    found = rllib.train(configuration, 1, reports.append, start=start)
    assert len(reports) == 1
    assert set(reports[0]) >= {"steps", "policy_loss", "value_loss", "entropy"}
    assert all(np.isfinite(value) for value in reports[0].values())
    for name, array in start.items():
        np.testing.assert_array_equal(found[name], array)


def test_arrays_survive_the_module_and_back(rllib):
    from looptune.models.network import PolicyNetwork

    arrays = PolicyNetwork(architecture()).state_arrays()
    state = rllib.module_state_of(arrays, architecture())
    assert all(name.startswith("network.") for name in state)
    found = rllib.arrays_of(state, architecture())
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


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
    assert rllib.architecture_of(configuration) == architecture()


def test_a_resource_needs_a_runner(rllib):
    with pytest.raises(ArgumentError, match=r"measure=1.0 without runners; runners=1 or more"):
        rllib.ppo_config(architecture(), settings(), measure=1.0)


@pytest.mark.slow
def test_a_remote_runner_trains(rllib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker imports everything by itself, and nothing is left behind."""
    import ray

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    configuration = rllib.ppo_config(architecture(), settings(), runners=1, measure=1.0)
    start = rllib.PolicyNetwork(architecture()).state_arrays()
    reports: list[dict[str, float]] = []
    found = rllib.train(configuration, 64, reports.append, start=start)
    assert reports[-1]["steps"] >= 64
    assert set(found) == set(start)
    assert any((found[name] != start[name]).any() for name in found)
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert "ray" in sys.modules
