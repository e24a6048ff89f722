"""The same network and environments under RLlib's PPO, which shares sampling among processes.

Without remote environment runners neither a cluster nor `ray.init` is needed: one runner and one
learner take turns in this process. The trained arrays are those of `network`, so everything else
does without ray. In containers and with a read-only home set RAY_AUTH_MODE=disabled.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.algorithms.ppo import PPOConfig as Configuration
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune import register_env
from torch import Tensor

from looptune.errors import ArgumentError
from looptune.models.architecture import Architecture, architecture_from_json
from looptune.models.network import PolicyNetwork
from looptune.models.ppo import PPOConfig

CONSTRUCT = "looptune.envs:looptune/Construct-v0"
PREFIX = "network."  # of a parameter's name in the module below
Arrays = Mapping[str, np.ndarray]
Report = Callable[[dict[str, float]], None]
Save = Callable[[dict[str, np.ndarray]], None]


class GraphModule(TorchRLModule, ValueFunctionAPI):
    """`PolicyNetwork` as RLlib asks for it; `model_config` is {"architecture": its JSON}."""

    def setup(self) -> None:
        """Make the network; RLlib calls it."""
        sizes: Any = self.model_config
        self.network = PolicyNetwork(architecture_from_json(sizes["architecture"]))

    def _forward(self, batch: Mapping[str, Any], **_: Any) -> dict[str, Tensor]:
        observation = batch[Columns.OBS]
        h, graph = self.network.encode(observation)
        return {Columns.ACTION_DIST_INPUTS: self.network.logits(observation, h, graph)}

    def _forward_train(self, batch: Mapping[str, Any], **_: Any) -> dict[str, Tensor]:
        observation = batch[Columns.OBS]
        h, graph = self.network.encode(observation)
        logits = self.network.logits(observation, h, graph)
        return {Columns.ACTION_DIST_INPUTS: logits, Columns.EMBEDDINGS: graph}

    def compute_values(self, batch: Mapping[str, Any], embeddings: Any = None) -> Tensor:
        """Values (batch,); graphs that the loss has encoded already come as `embeddings`."""
        if embeddings is None:
            with torch.no_grad():
                _, embeddings = self.network.encode(batch[Columns.OBS])
        return self.network.value(embeddings)


class Algorithm(PPO):
    """RLlib's PPO, which leaves no folder in the home directory."""

    _logdir: Any

    def _setup_logdir(self) -> None:
        self._logdir = tempfile.mkdtemp(prefix="lt")

    def cleanup(self) -> None:
        """Stop the runners and remove the folder; RLlib calls it."""
        super().cleanup()
        shutil.rmtree(self._logdir, ignore_errors=True)


def ppo_config(
    architecture: Architecture,
    settings: PPOConfig,
    environment: str | Callable[..., Any] = CONSTRUCT,
    env_config: Mapping[str, Any] | None = None,
    *,
    runners: int = 0,
    measure: float | None = None,
) -> Configuration:
    """RLlib's configuration of what `looptune.models.ppo` does with the same settings.

    `environment` is a Gymnasium id, with its module where workers have to import it, or what makes
    an environment; `env_config` are its arguments. `settings.environments` is their number in each
    of the runners; with 0 `runners` they are in this process. `measure` is how much of the
    cluster's resource of that name a runner holds, 1 where it times kernels on a node that can run
    one of them undisturbed. Raises `ArgumentError` for `measure` without runners.
    """
    if measure is not None and not runners:
        raise ArgumentError(f"measure={measure} without runners; runners=1 or more would do")
    if not isinstance(environment, str):
        make, environment = environment, f"{environment.__module__}.{environment.__qualname__}"
        register_env(environment, lambda config: make(**config))
    count = settings.rollout * settings.environments * max(1, runners)
    fresh: Any = Configuration
    configured: Configuration = (
        fresh(algo_class=Algorithm)
        .environment(environment, env_config=dict(env_config or {}), disable_env_checking=True)
        .framework("torch")
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=settings.environments,
            custom_resources_per_env_runner={} if measure is None else {"measure": measure},
        )
        .learners(num_learners=0)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=GraphModule, model_config={"architecture": architecture.to_json()}
            )
        )
        .training(
            train_batch_size_per_learner=count,
            minibatch_size=min(settings.minibatch, count),
            num_epochs=settings.epochs,
            lr=[[0, settings.rate], [max(1, int(0.9 * settings.steps)), 0.1 * settings.rate]],
            gamma=settings.discount,
            lambda_=settings.smoothing,
            clip_param=settings.clip,
            # RLlib does not halve the squared error of values.
            vf_loss_coeff=settings.value / 2,
            vf_clip_param=float("inf"),
            entropy_coeff=settings.entropy,
            grad_clip=settings.gradient,
            grad_clip_by="global_norm",
            use_kl_loss=False,
        )
        .debugging(seed=settings.seed)
    )
    return configured


def arrays_of(module_state: Arrays, architecture: Architecture) -> dict[str, np.ndarray]:
    """The network's arrays in a `GraphModule`'s state, as `PolicyNetwork.state_arrays` has them."""
    network = PolicyNetwork(architecture)
    state = {name.removeprefix(PREFIX): array for name, array in module_state.items()}
    network.load_state_dict({name: torch.as_tensor(np.array(a)) for name, a in state.items()})
    return network.state_arrays()


def module_state_of(arrays: Arrays, architecture: Architecture) -> dict[str, np.ndarray]:
    """The state of a `GraphModule` with a network's arrays."""
    network = PolicyNetwork(architecture)
    network.load_arrays(arrays)
    return {PREFIX + name: tensor.numpy() for name, tensor in network.state_dict().items()}


def architecture_of(configuration: Any) -> Architecture:
    """What the module of an RLlib configuration is made of."""
    return architecture_from_json(configuration.rl_module_spec.model_config["architecture"])


def read_arrays(algorithm: PPO) -> dict[str, np.ndarray]:
    """The network's arrays that an algorithm's learner has."""
    learners: Any = algorithm.learner_group
    state = learners.get_weights()[DEFAULT_MODULE_ID]
    return arrays_of(state, architecture_of(algorithm.config))


def write_arrays(algorithm: PPO, arrays: Arrays) -> None:
    """Give arrays to an algorithm's learner and to its runners."""
    state = module_state_of(arrays, architecture_of(algorithm.config))
    learners: Any = algorithm.learner_group
    runners: Any = algorithm.env_runner_group
    learners.set_weights({DEFAULT_MODULE_ID: state})
    runners.sync_weights(from_worker_or_learner_group=learners)


def train(
    configuration: Configuration,
    steps: int,
    report: Report,
    save: Save | None = None,
    start: Arrays | None = None,
) -> dict[str, np.ndarray]:
    """Train for at least so many steps of environments; the network's arrays.

    `start` are the arrays to begin with. After every iteration `report` is told how episodes went,
    and `save` is given the arrays.
    """
    done = 0
    arrays: dict[str, np.ndarray] = {}
    turns = remote_turns if configuration.num_env_runners else local_turns
    for taken, figures, arrays in turns(configuration, start):
        done += taken
        report({"steps": float(done), **figures})
        if save is not None:
            save(arrays)
        if done >= steps:
            break
    return arrays


Turn = tuple[int, dict[str, float], dict[str, np.ndarray]]


def local_turns(configuration: Configuration, start: Arrays | None) -> Iterator[Turn]:
    """Iterations in this process, without a cluster: steps, figures, arrays."""
    runner: Any = SingleAgentEnvRunner(config=configuration)
    try:
        learner: Any = configuration.build_learner(env=runner.env)
        own = learner.module[DEFAULT_MODULE_ID].network
        if start is not None:
            own.load_arrays(start)
        done = 0
        while True:
            runner.module.network.load_state_dict(own.state_dict())
            episodes = runner.sample(num_timesteps=configuration.train_batch_size_per_learner)
            taken = sum(len(episode) for episode in episodes)
            done += taken
            result = learner.update(
                episodes=episodes,
                timesteps={"num_env_steps_sampled_lifetime": done},
                num_epochs=configuration.num_epochs,
                minibatch_size=configuration.minibatch_size,
                shuffle_batch_per_epoch=configuration.shuffle_batch_per_epoch,
            )
            yield taken, summary(runner.get_metrics()) | losses(result), own.state_arrays()
    finally:
        runner.stop()


def remote_turns(configuration: Configuration, start: Arrays | None) -> Iterator[Turn]:
    """Iterations of an algorithm with remote runners."""
    with cluster(configuration):
        algorithm: Any = configuration.build_algo()
        try:
            if start is not None:
                write_arrays(algorithm, start)
            while True:
                result = algorithm.train()
                figures = summary(result["env_runners"]) | losses(result["learners"])
                taken = int(result["env_runners"]["num_env_steps_sampled"])
                yield taken, figures, read_arrays(algorithm)
        finally:
            algorithm.stop()


def summary(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return and length of the episodes that ended lately."""
    names = {"return": "episode_return_mean", "length": "episode_len_mean"}
    return {ours: number(metrics[theirs]) for ours, theirs in names.items() if theirs in metrics}


def losses(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What the learner did: the losses of policy and values, and the entropy."""
    own = metrics[DEFAULT_MODULE_ID]
    names = {"policy_loss": "policy_loss", "value_loss": "vf_loss", "entropy": "entropy"}
    return {ours: number(own[theirs]) for ours, theirs in names.items() if theirs in own}


def number(value: Any) -> float:
    """A metric as a number, whether it is reduced already or not."""
    return float(value.peek() if hasattr(value, "peek") else value)


@contextmanager
def cluster(configuration: Configuration) -> Iterator[None]:
    """The cluster that is there already, or one for the time being, its files in a folder that is
    removed. Its nodes' workers import this looptune."""
    if ray.is_initialized():
        yield
        return
    import looptune

    runners = configuration.num_env_runners
    held = configuration.custom_resources_per_env_runner
    root = str(Path(looptune.__file__).parents[1])
    # Sockets lie in the folder, and their names must be short.
    with tempfile.TemporaryDirectory(prefix="lt", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=runners + 1,
            resources={name: runners * amount for name, amount in held.items()},
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
        )
        try:
            yield
        finally:
            ray.shutdown()
