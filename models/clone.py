"""Behaviour cloning: the network learns which decisions led to good schedules, those that were
measured or the best that the cost model's beam finds.

A demonstration is a set of finished constructions of one problem with their gains. The better
ones count more, by exp(gain / TEMPERATURE) as in advantage-weighted regression (Peng et al., 2019);
what they share is one state with several good actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from looptune.construct import STOP, TABLE, Construction, decisions_of
from looptune.errors import ScheduleError
from looptune.graph import Observation, shapes
from looptune.models.dataset import MeasuredProblem
from looptune.models.network import PolicyNetwork
from looptune.propose import ModelValue, expert

TEMPERATURE = 0.03  # of a gain's logarithm: some 3 % are told apart
NEGLIGIBLE = 0.01  # of a problem's weight: a state with less is left out
Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True, kw_only=True)
class CloneConfig:
    """How the network is trained on demonstrations."""

    epochs: int = 8
    batch: int = 256
    rate: float = 1e-3
    value: float = 0.5  # weight of the value's loss
    held_out: float = 0.05
    seed: int = 0


@dataclass
class Demonstrations:
    """States with the probabilities of their actions, their weights and their expected gains."""

    observations: list[Observation] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)

    def add(self, start: Construction, finished: Iterable[tuple[Sequence[int], float]]) -> None:
        """The decisions of constructions from `start` on, each list with its gain.

        Raises `ScheduleError` for decisions that cannot be taken.
        """
        rows = list(finished)
        best = max(gain for _, gain in rows)
        mass = [math.exp((gain - best) / TEMPERATURE) for _, gain in rows]
        visited: dict[tuple[int, ...], tuple[np.ndarray, list[float]]] = {}
        for (decisions, gain), weight in zip(rows, mass, strict=True):
            for at, action in enumerate((*decisions, STOP)):
                zero = np.zeros(TABLE.size), [0.0, 0.0]
                chosen, sums = visited.setdefault(tuple(decisions[:at]), zero)
                chosen[action] += weight
                sums[0] += weight
                sums[1] += weight * gain
        for path, (chosen, (weight, gains)) in visited.items():
            if weight < NEGLIGIBLE * sum(mass):
                continue
            state = start
            for action in path:
                state = state.take(action)
            forbidden = np.flatnonzero((chosen > 0) & (state.mask == 0)).tolist()
            if forbidden:
                raise ScheduleError(
                    f"after {list(path)} a demonstration takes what the mask forbids: {forbidden}"
                )
            compact = {
                name: array.astype(np.float16) if array.dtype == np.float32 else array
                for name, array in state.observe().items()
            }
            compact["edges"] = compact["edges"].astype(np.int16)
            self.observations.append(compact)
            self.actions.append((chosen / weight).astype(np.float16))
            self.weights.append(weight / sum(mass))
            self.gains.append(gains / weight)

    def __len__(self) -> int:
        return len(self.weights)


def from_measurements(
    problems: Iterable[MeasuredProblem], progress: Callable[[], object] = lambda: None
) -> Demonstrations:
    """What was measured, and the default, as demonstrations; what today's constructions do not
    reach is left out."""
    found = Demonstrations()
    for problem in problems:
        start = Construction(problem.nest, problem.target, problem.threads)
        rows: list[tuple[Sequence[int], float]] = [((), 0.0)]
        rows += [(row.decisions, row.mean) for row in problem.rows]
        try:
            found.add(start, rows)
        except ScheduleError:
            continue
        finally:
            progress()
    return found


def from_beam(
    starts: Iterable[Construction], width: int, progress: Callable[[], object] = lambda: None
) -> Demonstrations:
    """The best construction that the cost model's beam of `width` finds from every start, the
    shortest of equals; its gain is the predicted one."""
    found = Demonstrations()
    for start in starts:
        value = ModelValue(start.nest, start.target, start.threads)
        best = expert(start, value, width)[0]
        found.add(start, [(decisions_of(best.state), best.score)])
        progress()
    return found


def clone(
    network: PolicyNetwork, shown: Demonstrations, config: CloneConfig, report: Report
) -> dict[str, float]:
    """Train the network; how well it does on states that it did not see: `agreement` is how often
    its first choice is the demonstrations', `cross_entropy` in nats.

    Deterministic on one thread.
    """
    generator = torch.Generator().manual_seed(config.seed)
    arrays = {name: np.stack([each[name] for each in shown.observations]) for name in shapes(TABLE)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    actions = torch.from_numpy(np.stack(shown.actions))
    weights = torch.tensor(shown.weights)
    gains = torch.tensor(shown.gains).float()
    order = torch.randperm(len(shown), generator=generator)
    unseen = order[: max(1, round(config.held_out * len(shown)))]
    seen = order[len(unseen) :]
    optimizer = torch.optim.Adam(network.parameters(), lr=config.rate)
    steps = config.epochs * math.ceil(len(seen) / config.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.rate, total_steps=steps)

    def losses(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, values = network({name: tensor[rows] for name, tensor in tensors.items()})
        wanted = actions[rows].float()
        each = -(wanted * torch.log_softmax(logits, 1)).sum(1)
        weight = weights[rows] / weights[rows].sum()
        agree = (logits.argmax(1) == wanted.argmax(1)).float()
        apart = (values - gains[rows].clamp(-2, 2)) ** 2
        return (each * weight).sum(), (apart * weight).sum(), (agree * weight).sum()

    for epoch in range(config.epochs):
        shuffled = seen[torch.randperm(len(seen), generator=generator)]
        total = []
        for rows in torch.split(shuffled, config.batch):
            policy, value, _ = losses(rows)
            optimizer.zero_grad()
            torch.autograd.backward(policy + config.value * value)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total.append(float(policy.detach()))
        with torch.no_grad():
            policy, value, agree = losses(unseen)
        result = {
            "epoch": epoch + 1.0, "loss": float(np.mean(total)), "cross_entropy": float(policy),
            "agreement": float(agree), "value_error": float(value) ** 0.5,
        }  # fmt: skip
        report(result)
    return result
