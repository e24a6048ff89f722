"""Training of the gain model on measured schedules (`looptune.models.dataset`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from looptune.errors import ScheduleError
from looptune.models.dataset import MeasuredProblem
from looptune.models.gain import FARTHEST, FEATURES, MEMBERS, GainModel, described, shapes

WORST, MOST = -0.4, 1.5  # of a gain's logarithm: what is worse is bad enough
UNTOLD = 1e6  # the scale of a feature that never varied: what it does elsewhere is not known
NOISE = 0.03  # of a mean on top of its samples' spread


@dataclass(frozen=True, kw_only=True)
class RegressConfig:
    """How the ensemble is trained."""

    epochs: int = 60
    batch: int = 512
    rate: float = 2e-3
    decay: float = 1e-3
    held_out: float = 0.1  # of the problems, to report on
    seed: int = 0


@dataclass(frozen=True)
class Table:
    """Rows to learn from: features, gains, weights, and which problem each is of."""

    features: np.ndarray
    gains: np.ndarray
    weights: np.ndarray
    problem: np.ndarray


def table_of(
    problems: Sequence[MeasuredProblem], progress: Callable[[], object] = lambda: None
) -> Table:
    """All rows of all problems; those that today's constructions no longer reach are left out."""
    features, gains, weights, numbers = [], [], [], []
    for number, problem in enumerate(problems):
        for row in problem.rows:
            try:
                state = problem.construction(row)
            except ScheduleError:
                continue
            features.append(described(state))
            gains.append(max(WORST, min(MOST, row.mean)))
            weights.append(1 / (row.sd**2 / row.n + NOISE**2))
            numbers.append(number)
        progress()
    scale = np.array(weights, np.float32)
    return Table(
        np.array(features, np.float32).reshape(-1, FEATURES), np.array(gains, np.float32),
        scale / max(1e-9, float(scale.mean())) if len(scale) else scale, np.array(numbers),
    )  # fmt: skip


def regress(
    table: Table, config: RegressConfig, report: Callable[[dict[str, float]], None] = lambda _: None
) -> tuple[GainModel, dict[str, float]]:
    """The ensemble, and how it chooses on the problems it did not see (`judged`).

    Each member starts elsewhere and sees the rows in an order of its own. Deterministic on one
    thread.
    """
    generator = torch.Generator().manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    count = int(table.problem.max()) + 1
    unseen = np.isin(table.problem, rng.permutation(count)[: round(config.held_out * count)])
    seen = np.flatnonzero(~unseen)
    shift, scale = standard(table.features[seen])
    x = np.clip((table.features[seen] - shift) / scale, -FARTHEST, FARTHEST).astype(np.float32)
    layers = {
        name: torch.randn(shape, generator=generator) * (2 / shape[1]) ** 0.5
        if name.startswith("w") else torch.zeros(shape)
        for name, shape in shapes().items() if name not in ("shift", "scale")
    }  # fmt: skip
    layers["w3"] = layers["w3"] * 0.1
    fit(layers, (x, table.gains[seen], table.weights[seen]), config, generator, report)
    arrays = {name: layer.detach().numpy() for name, layer in layers.items()}
    model = GainModel({"shift": shift, "scale": scale, **arrays})
    return model, judged(model, table, np.flatnonzero(unseen))


def standard(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale of each feature; what never varied is scaled away."""
    spread = features.std(0)
    scale = np.where(spread > 1e-6, spread + 0.05, UNTOLD).astype(np.float32)
    return features.mean(0), scale


def fit(
    layers: Mapping[str, torch.Tensor],
    rows: tuple[np.ndarray, np.ndarray, np.ndarray],
    config: RegressConfig,
    generator: torch.Generator,
    report: Callable[[dict[str, float]], None],
) -> None:
    """Train the members' layers, as `shapes` names them, on rows of inputs, gains and weights."""
    x, y, weight = map(torch.from_numpy, rows)
    for layer in layers.values():
        layer.requires_grad_()
    optimizer = torch.optim.AdamW(layers.values(), lr=config.rate, weight_decay=config.decay)
    batches = -(-len(x) // config.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.rate, total_steps=config.epochs * batches
    )
    for epoch in range(config.epochs):
        orders = torch.stack([torch.randperm(len(x), generator=generator) for _ in range(MEMBERS)])
        total = 0.0
        for part in torch.split(orders, config.batch, dim=1):
            hidden = torch.relu(x[part] @ layers["w1"] + layers["b1"])
            hidden = torch.relu(hidden @ layers["w2"] + layers["b2"])
            found = (hidden @ layers["w3"] + layers["b3"])[..., 0]
            each = torch.nn.functional.huber_loss(found, y[part], reduction="none", delta=0.1)
            loss = (each * weight[part]).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        report({"epoch": epoch + 1, "loss": total / batches})


def judged(
    model: GainModel, table: Table, rows: np.ndarray, caution: float = 1.0, threshold: float = 0.0
) -> dict[str, float]:
    """What the model's choice among the measured schedules of each problem gains, the default one
    of them: geometric means of it and of the best, and how often it loses more than 5 %."""
    if not len(rows):
        return {}
    found = model.predictions(table.features[rows])
    score = found.mean(0) - caution * found.std(0)
    picks, best = [], []
    for number in np.unique(table.problem[rows]):
        mine = table.problem[rows] == number
        gains = table.gains[rows][mine]
        at = int(np.argmax(score[mine]))
        picks.append(gains[at] if score[mine][at] > threshold else 0.0)
        best.append(max(0.0, gains.max()))
    errors = np.abs(found.mean(0) - table.gains[rows])
    return {
        "chosen": float(np.exp(np.mean(picks))), "best": float(np.exp(np.mean(best))),
        "losses": float(np.mean(np.array(picks) < -0.05)), "error": float(np.median(errors)),
        "problems": float(len(picks)),
    }  # fmt: skip
