"""Proximal policy optimization in one file, without ray, over environments in this process.

Schulman et al., 2017, with generalised advantages (2016); details as in Huang et al., "The 37
implementation details of PPO" (2022). The state is saved after every iteration, so a killed run
goes on where its last iteration ended.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from looptune.errors import CheckpointError
from looptune.files import replaced
from looptune.graph import Observation
from looptune.models.network import stacked


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of both trainers; `steps` are environment steps in all."""

    steps: int = 60_000
    rollout: int = 128  # steps of every environment in an iteration
    environments: int = 16
    epochs: int = 4
    minibatch: int = 512
    rate: float = 3e-4
    discount: float = 1.0
    smoothing: float = 0.95
    clip: float = 0.2
    value: float = 0.5
    entropy: float = 0.01
    gradient: float = 0.5
    seed: int = 0


Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Batch:
    """Steps to learn from; `chances` are the logarithms of the actions' probabilities then."""

    observations: dict[str, torch.Tensor]
    actions: torch.Tensor
    chances: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


@dataclass(frozen=True)
class Progress:
    """A trainer after an iteration: environment steps so far, and the states of the network, of
    its optimizer and of torch's generator. Both trainers keep it, and go on from it."""

    steps: int
    network: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    random: torch.Tensor


def keep(
    path: Path, steps: int, network: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write where a trainer is; the file is complete or as it was."""
    found = Progress(steps, network.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    with replaced(path) as file:
        torch.save(vars(found), file)


def kept(path: Path | None) -> Progress | None:
    """Where a trainer was, if it has written that; raises `CheckpointError` for a damaged file."""
    if path is None or not path.exists():
        return None
    try:
        return Progress(**torch.load(path, weights_only=True))
    except (OSError, EOFError, RuntimeError, TypeError, ValueError, pickle.PickleError) as reason:
        raise CheckpointError(
            f"{path} is damaged ({reason}); without it the stage begins anew"
        ) from reason


@dataclass
class Lane:
    """An environment, and its episode so far."""

    environment: gymnasium.Env[Observation, Any]
    observation: Observation
    total: float = 0.0
    length: int = 0

    def step(self, action: int) -> tuple[float, bool]:
        """The reward, and whether the episode is over, finished or cut off."""
        self.observation, reward, done, cut, _ = self.environment.step(np.int64(action))
        self.total += float(reward)
        self.length += 1
        return float(reward), done or cut

    def restart(self) -> tuple[float, int]:
        """Begin another episode; return and length of the last one."""
        ended = self.total, self.length
        self.observation, self.total, self.length = self.environment.reset()[0], 0.0, 0
        return ended


def train(
    network: torch.nn.Module,
    environments: Sequence[gymnasium.Env[Observation, Any]],
    config: PPOConfig,
    report: Report,
    state: Path | None = None,
) -> None:
    """Improve a network by its own episodes. `state` is read if it is there, and kept up.

    The network takes stacked observations and gives logits (batch, actions) and values (batch,).
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=config.rate, eps=1e-5)
    done, begun = 0, kept(state)
    if begun is None:
        torch.manual_seed(config.seed)
    else:
        network.load_state_dict(begun.network)
        optimizer.load_state_dict(begun.optimizer)
        torch.set_rng_state(begun.random)
        done = begun.steps
    seed = 100 * (config.seed + 1000 * done)
    lanes = [Lane(env, env.reset(seed=seed + at)[0]) for at, env in enumerate(environments)]
    while done < config.steps:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(config, done)
        batch, ends = rollout(network, lanes, config)
        losses = update(network, optimizer, batch, config)
        done += len(batch.actions)
        report({"steps": float(done), **summary(ends), **losses})
        if state is not None:
            keep(state, done, network, optimizer)


def rate_at(config: PPOConfig, done: int) -> float:
    """The learning rate after so many steps: it falls to a tenth."""
    return config.rate * max(0.1, 1 - done / config.steps)


def summary(ends: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Episodes of a rollout: their returns and lengths, and how many lost more than 5 %."""
    if not ends:
        return {"episodes": 0.0}
    returns, lengths = (np.array(column) for column in zip(*ends, strict=True))
    return {
        "episodes": float(len(ends)), "return": float(returns.mean()),
        "length": float(lengths.mean()), "losses": float((returns < -0.05).mean()),
    }  # fmt: skip


def rollout(
    network: torch.nn.Module, lanes: Sequence[Lane], config: PPOConfig
) -> tuple[Batch, list[tuple[float, int]]]:
    """Some steps of every environment, with advantages, and return and length of the episodes
    that ended."""
    seen: list[Observation] = []
    actions, chances, values, rewards, finals = (
        np.zeros((config.rollout, len(lanes)), np.float32) for _ in range(5)
    )
    ends = []
    for step in range(config.rollout):
        observations = [lane.observation for lane in lanes]
        seen += observations
        with torch.no_grad():
            logits, value = network(stacked(observations))
            all_chances = torch.log_softmax(logits, 1)
            action = torch.multinomial(all_chances.exp(), 1)[:, 0]
            chances[step] = all_chances.gather(1, action[:, None])[:, 0].numpy()
            values[step] = value.numpy()
        actions[step] = action.numpy()
        for at, lane in enumerate(lanes):
            rewards[step, at], finals[step, at] = lane.step(int(action[at]))
            if finals[step, at]:
                ends.append(lane.restart())
    with torch.no_grad():
        _, value = network(stacked([lane.observation for lane in lanes]))
    advantages = estimated(rewards, values, finals, value.numpy(), config)
    batch = Batch(
        stacked(seen),
        torch.from_numpy(actions.reshape(-1)).long(),
        torch.from_numpy(chances.reshape(-1)),
        torch.from_numpy(advantages.reshape(-1)),
        torch.from_numpy((advantages + values).reshape(-1)),
    )
    return batch, ends


def estimated(
    rewards: np.ndarray, values: np.ndarray, finals: np.ndarray, last: np.ndarray, config: PPOConfig
) -> np.ndarray:
    """Generalised advantages, float32 (steps, environments); `last` values what comes after."""
    found = np.zeros_like(rewards)
    running = np.zeros(rewards.shape[1], np.float32)
    following = last
    for step in reversed(range(len(rewards))):
        goes_on = 1 - finals[step]
        error = rewards[step] + config.discount * following * goes_on - values[step]
        running = error + config.discount * config.smoothing * goes_on * running
        found[step] = running
        following = values[step]
    return found


def update(
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: PPOConfig,
) -> dict[str, float]:
    """Some epochs of clipped updates."""
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    sums = np.zeros(3)
    batches = 0
    for _ in range(config.epochs):
        for rows in torch.split(torch.randperm(len(advantages)), config.minibatch):
            seen = {name: part[rows] for name, part in batch.observations.items()}
            logits, values = network(seen)
            chances = torch.log_softmax(logits, 1)
            mine = chances.gather(1, batch.actions[rows, None])[:, 0]
            ratio = torch.exp(mine - batch.chances[rows])
            gain = advantages[rows]
            clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
            policy = -torch.minimum(gain * ratio, gain * clipped).mean()
            value = ((values - batch.returns[rows]) ** 2).mean() / 2
            entropy = -(chances.exp() * chances).sum(1).mean()
            optimizer.zero_grad()
            torch.autograd.backward(policy + config.value * value - config.entropy * entropy)
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.gradient)
            optimizer.step()
            sums += float(policy.detach()), float(value.detach()), float(entropy.detach())
            batches += 1
    names = ("policy_loss", "value_loss", "entropy")
    return dict(zip(names, (sums / batches).tolist(), strict=True))
