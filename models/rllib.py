"""The same network and environments under RLlib's PPO, which shares sampling among processes.

Without remote environment runners neither a cluster nor `ray.init` is needed: one runner and one
learner take turns in this process. The trained arrays are those of `network`, so everything else
does without ray. In containers and with a read-only home set RAY_AUTH_MODE=disabled.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from looptune.models.ppo import PPOConfig, Report, keep, kept, rate_at
from looptune.provenance import ROOT

CONSTRUCT = "looptune.envs:looptune/Construct-v0"


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
    done: int = 0,
) -> Configuration:
    """RLlib's configuration of what `looptune.models.ppo` does with the same settings.

    `environment` is a Gymnasium id, with its module where workers have to import it, or what makes
    an environment; `env_config` are its arguments. `settings.environments` is their number in each
    of the runners; with 0 `runners` they are in this process. `measure` is how much of the
    cluster's resource of that name a runner holds, 1 where it times kernels on a node that can run
    one of them undisturbed. The schedule of rates goes on after `done` steps. Raises
    `ArgumentError` for `measure` without runners.
    """
    if measure is not None and not runners:
        raise ArgumentError(f"measure={measure} without runners; runners=1 or more would do")
    if not isinstance(environment, str):
        make, environment = environment, f"{environment.__module__}.{environment.__qualname__}"
        register_env(environment, lambda config: make(**config))
    count = settings.rollout * settings.environments * max(1, runners)
    last = max(1, int(0.9 * settings.steps) - done)
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
            lr=[[0, rate_at(settings, done)], [last, rate_at(settings, settings.steps)]],
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
        .debugging(seed=settings.seed + done)
    )
    return configured


def train(
    network: PolicyNetwork,
    settings: PPOConfig,
    report: Report,
    state: Path | None = None,
    *,
    environment: str | Callable[..., Any] = CONSTRUCT,
    env_config: Mapping[str, Any] | None = None,
    runners: int = 0,
    measure: float | None = None,
    address: str | None = None,
) -> None:
    """Improve a network as `looptune.models.ppo.train` does; `state` is of the same form.

    `address` is that of a cluster to run in. The other arguments are those of `ppo_config`.
    Raises `ArgumentError` for a cluster that has too little of the resource `measure`.
    """
    begun = kept(state)
    if begun is not None:
        network.load_state_dict(begun.network)
    done = 0 if begun is None else begun.steps
    if done >= settings.steps:
        return
    configuration = ppo_config(
        network.architecture, settings, environment, env_config,
        runners=runners, measure=measure, done=done,
    )  # fmt: skip
    with cluster(configuration, address) if runners else nullcontext():
        start = Start(network, None if begun is None else begun.optimizer)
        turns = remote_turns if runners else local_turns
        with closing(turns(configuration, start)) as iterations:
            for taken, figures, learner in iterations:
                done += taken
                network.load_state_dict(network_of(learner).state_dict())
                report({"steps": float(done), **figures})
                if state is not None:
                    keep(state, done, network, learner.get_optimizer(DEFAULT_MODULE_ID))
                if done >= settings.steps:
                    return


@dataclass(frozen=True)
class Start:
    """What a learner begins with: weights, and the optimizer's state if it was stopped."""

    network: PolicyNetwork
    optimizer: dict[str, Any] | None

    def give(self, learner: Any) -> None:
        """Make a learner begin with it."""
        network_of(learner).load_state_dict(self.network.state_dict())
        if self.optimizer is not None:
            learner.get_optimizer(DEFAULT_MODULE_ID).load_state_dict(self.optimizer)


def network_of(learner: Any) -> PolicyNetwork:
    """The network that a learner of this process improves."""
    found: PolicyNetwork = learner.module[DEFAULT_MODULE_ID].network
    return found


Turn = tuple[int, dict[str, float], Any]


def local_turns(configuration: Configuration, start: Start) -> Generator[Turn]:
    """Iterations in this process, without a cluster: steps, figures, the learner."""
    runner: Any = SingleAgentEnvRunner(config=configuration)
    try:
        learner: Any = configuration.build_learner(env=runner.env)
        start.give(learner)
        done = 0
        while True:
            runner.module.network.load_state_dict(network_of(learner).state_dict())
            episodes = runner.sample(num_timesteps=configuration.train_batch_size_per_learner)
            taken = sum(len(episode) for episode in episodes)
            done += taken
            figures = summary(runner.get_metrics())
            result = learner.update(
                episodes=episodes,
                timesteps={"num_env_steps_sampled_lifetime": done},
                num_epochs=configuration.num_epochs,
                minibatch_size=configuration.minibatch_size,
                shuffle_batch_per_epoch=configuration.shuffle_batch_per_epoch,
            )
            yield taken, figures | losses(result), learner
    finally:
        runner.stop()


def remote_turns(configuration: Configuration, start: Start) -> Generator[Turn]:
    """Iterations of an algorithm with remote runners; its learner is in this process."""
    algorithm: Any = configuration.build_algo()
    try:
        group = algorithm.learner_group
        (found,) = group.foreach_learner(lambda learner: learner)
        learner = found.get()
        start.give(learner)
        algorithm.env_runner_group.sync_weights(from_worker_or_learner_group=group)
        while True:
            result = algorithm.train()
            figures = summary(result["env_runners"]) | losses(result["learners"])
            taken = int(result["env_runners"]["num_env_steps_sampled"])
            yield taken, figures, learner
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
def cluster(configuration: Configuration, address: str | None = None) -> Iterator[None]:
    """The cluster that is there already, the one at an address, or one for the time being, its
    files in a folder that is removed. Raises `ArgumentError` where runners would wait for ever
    for the resources that they hold."""
    runners = configuration.num_env_runners
    held = configuration.custom_resources_per_env_runner
    wanted = {name: runners * amount for name, amount in held.items()}
    if ray.is_initialized():
        check_resources(wanted)
        yield
        return
    # Sockets lie in the folder, and their names must be short.
    with tempfile.TemporaryDirectory(prefix="lt", ignore_cleanup_errors=True) as folder:
        if address is None:
            ray.init(
                num_cpus=runners + 1,
                resources=wanted,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
                # The workers import this looptune.
                runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            )
        else:
            ray.init(address=address, log_to_driver=False)
        try:
            check_resources(wanted)
            yield
        finally:
            ray.shutdown()


def check_resources(wanted: Mapping[str, float]) -> None:
    """Raise `ArgumentError` unless the cluster has that much."""
    there: Any = ray.cluster_resources
    found = there()
    for name, amount in wanted.items():
        if found.get(name, 0) < amount:
            raise ArgumentError(
                f"runners hold {amount:g} of {name!r}, and the cluster has {found.get(name, 0):g}: "
                "fewer runners, or more nodes with it, would do"
            )
