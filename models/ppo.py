"""Proximal policy optimization in one file, without ray, over environments in this process.

Schulman et al., 2017, with generalised advantages (2016); details as in Huang et al., "The 37
implementation details of PPO" (2022). The state is saved after every iteration, so a killed run
goes on where its last iteration ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from looptune.envs.episode import GraphEnv
from looptune.graph import Observation
from looptune.models.network import PolicyNetwork, stacked


@dataclass(frozen=True)
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


def train(
    network: PolicyNetwork,
    environments: Sequence[GraphEnv],
    config: PPOConfig,
    report: Report,
    state: Path | None = None,
) -> None:
    """Improve a network by its own episodes. `state` is read if it is there, and kept up."""
    optimizer = torch.optim.Adam(network.parameters(), lr=config.rate, eps=1e-5)
    done, seed = 0, config.seed
    if state is not None and state.exists():
        kept = torch.load(state, weights_only=True)
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        done, seed = kept["steps"], config.seed + 1000 * kept["steps"]
    else:
        torch.manual_seed(config.seed)
    observations: list[Observation] = []
    for number, environment in enumerate(environments):
        observations.append(environment.reset(seed=seed * 100 + number)[0])
    while done < config.steps:
        for group in optimizer.param_groups:
            group["lr"] = config.rate * max(0.1, 1 - done / config.steps)
        batch, ends = rollout(network, environments, observations, config)
        losses = update(network, optimizer, batch, config)
        done += len(batch.actions)
        report({"steps": float(done), **summary(ends), **losses})
        if state is not None:
            kept = {"network": network.state_dict(), "optimizer": optimizer.state_dict(),
                    "random": torch.get_rng_state(), "steps": done}  # fmt: skip
            torch.save(kept, state.with_suffix(".part"))
            os.replace(state.with_suffix(".part"), state)


def summary(ends: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Episodes of a rollout: their gains and lengths, and how many lost more than 5 %."""
    if not ends:
        return {"episodes": 0.0}
    gains, lengths = (np.array(column) for column in zip(*ends, strict=True))
    return {
        "episodes": float(len(ends)), "gain": float(gains.mean()), "length": float(lengths.mean()),
        "losses": float((gains < -0.05).mean()),
    }  # fmt: skip


def rollout(
    network: PolicyNetwork,
    environments: Sequence[GraphEnv],
    observations: list[Observation],
    config: PPOConfig,
) -> tuple[Batch, list[tuple[float, int]]]:
    """Some steps of every environment, with advantages, and gain and length of the episodes that
    ended. `observations` are where the environments are, before and after."""
    count = len(environments)
    seen: list[Observation] = []
    actions, chances, values, rewards, finals = (
        np.zeros((config.rollout, count), np.float32) for _ in range(5)
    )
    ends = []
    for step in range(config.rollout):
        seen += observations
        with torch.no_grad():
            logits, value = network(stacked(observations))
            all_chances = torch.log_softmax(logits, 1)
            action = torch.multinomial(all_chances.exp(), 1)[:, 0]
            chances[step] = all_chances.gather(1, action[:, None])[:, 0].numpy()
            values[step] = value.numpy()
        actions[step] = action.numpy()
        for at, environment in enumerate(environments):
            found, reward, done, _, info = environment.step(np.int64(action[at]))
            rewards[step, at], finals[step, at] = reward, done
            if done:
                gain = info["gain"]
                steps = len(environment.taken)
                ends.append((-2.0 if gain is None else gain, steps))
                found, _ = environment.reset()
            observations[at] = found
    with torch.no_grad():
        _, value = network(stacked(observations))
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
    network: PolicyNetwork,
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
