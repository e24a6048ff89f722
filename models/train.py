"""Training, from the shipped measurements to a checkpoint: `looptune train`.

Stages, each on the weights of the one before: `regress` the gain model on measured schedules,
`imitate` the cost model's beam over targets of all kinds, `clone` the better of the measured
schedules, `model`, PPO on the cost model over the same targets, and `measured`, PPO on times taken
on this machine, or on the nodes of a cluster. What a stage made is kept in the run's folder, and
the state of PPO after every iteration; a run that was killed goes on where it was, measured stages
on the same machine only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm

from looptune.construct import TABLE, Construction
from looptune.envs.construct import ConstructEnv
from looptune.envs.problem import Problem, listed, on_any_machine, on_this_machine, pooled
from looptune.envs.rewards import Gain, Measured, modelled
from looptune.errors import ArgumentError
from looptune.files import append_text, write_text
from looptune.host import available_cores, fingerprint
from looptune.lower import GENERATOR_VERSION
from looptune.models import checkpoint, dataset, ppo
from looptune.models.architecture import Architecture
from looptune.models.clone import CloneConfig, Demonstrations, clone, from_beam, from_measurements
from looptune.models.gain import GainModel
from looptune.models.inference import Policy
from looptune.models.network import PolicyNetwork
from looptune.models.ppo import PPOConfig
from looptune.models.regress import RegressConfig, regress, table_of
from looptune.provenance import commit

STAGES = ("regress", "imitate", "clone", "model", "measured")
MODEL_POOL, MEASURED_POOL = 1000, 150  # problems that PPO comes back to
Trainer = Literal["rllib", "single"]


@dataclass(frozen=True, kw_only=True)
class ImitateConfig:
    """How many problems the cost model's beam of a width is asked for, and how it is cloned."""

    problems: int = 1000
    width: int = 3
    clone: CloneConfig = field(default_factory=lambda: CloneConfig(epochs=20))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run. `data` is a file of measurements, None for the shipped one.

    `trainer` is RLlib's PPO, which has `runners` remote environment runners or samples in this
    process, or the `single`-file one. Raises `ArgumentError` for settings that there are not.
    """

    seed: int = 0
    stages: tuple[str, ...] = STAGES
    data: str | None = None
    hidden: int = 48
    layers: int = 2
    trainer: Trainer = "rllib"
    runners: int = 0
    regress: RegressConfig = field(default_factory=lambda: RegressConfig(epochs=40, held_out=0.05))
    imitate: ImitateConfig = field(default_factory=ImitateConfig)
    clone: CloneConfig = field(default_factory=lambda: CloneConfig(epochs=10))
    model: PPOConfig = field(default_factory=lambda: PPOConfig(steps=40_000, rate=2e-4))
    measured: PPOConfig = field(default_factory=lambda: PPOConfig(steps=12_000, rate=1e-4))

    def __post_init__(self) -> None:
        unknown = set(self.stages) - set(STAGES)
        if unknown:
            raise ArgumentError(f"stages {sorted(unknown)}; some of {list(STAGES)} would do")
        if not self.stages:
            raise ArgumentError(f"stages=(); some of {list(STAGES)} would do")
        if self.trainer not in get_args(Trainer):
            raise ArgumentError(f"trainer={self.trainer!r}; one of {get_args(Trainer)} would do")
        if self.runners < 0 or (self.runners and self.trainer == "single"):
            raise ArgumentError(
                f"runners={self.runners} of trainer={self.trainer!r}; 0, or 'rllib' and at least 0 "
                "would do"
            )


@dataclass
class Log:
    """Lines of JSON beside a progress bar; TensorBoard's too, where it is installed."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.board = None
        else:
            self.board = SummaryWriter(str(self.folder / "tensorboard"))

    def close(self) -> None:
        """Finish TensorBoard's file."""
        if self.board is not None:
            self.board.close()

    def of(self, stage: str) -> Callable[[Mapping[str, float]], None]:
        """What a stage reports to."""
        began = time.monotonic()

        def report(values: Mapping[str, float]) -> None:
            seconds = time.monotonic() - began
            line = json.dumps({"stage": stage, "seconds": seconds, **values})
            append_text(self.folder / "log.jsonl", line + "\n")
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            tqdm.write(f"{stage}: {shown}", file=sys.stderr)
            step = int(values.get("steps", values.get("epoch", 0)))
            for name, value in values.items():
                if self.board is not None:
                    self.board.add_scalar(f"{stage}/{name}", value, step)

        return report


def run(
    config: TrainConfig, folder: Path, resume: bool = False, address: str | None = None
) -> Policy:
    """Train into `folder`: config.json, log.jsonl, a checkpoint a stage, and policy.npz at the end.

    `address` is of a Ray cluster where PPO's runners run; those that measure hold 1 each of its
    resource `measure`. Raises `ArgumentError` for a folder with another run's files, or without
    `resume` for one with any; where a measured stage would go on on another machine; and for an
    address without runners.
    """
    if address is not None and not config.runners:
        raise ArgumentError(f"address={address!r} without runners; runners=1 or more would do")
    prepare(config, folder, resume)
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    log = Log(folder)
    policy: Policy | None = None
    for stage in config.stages:
        made = folder / f"{stage}.npz"
        if made.exists():
            policy = checkpoint.load(made)
            continue
        began = time.monotonic()
        network = PolicyNetwork(Architecture(TABLE, config.hidden, config.layers))
        if policy is not None:
            network.load_arrays(policy.arrays)
        gain = policy.gain if policy is not None else None
        network, gain, metrics = STEPS[stage](
            Job(config, folder, log.of(stage), address), network, gain
        )
        earlier = dict(policy.header) if policy is not None else {}
        policy = Policy(
            network.architecture, network.state_arrays(), header(config, stage, metrics, earlier,
            time.monotonic() - began), gain,
        )  # fmt: skip
        checkpoint.save(made, policy)
    log.close()
    assert policy is not None
    checkpoint.save(folder / "policy.npz", policy)
    return policy


def prepare(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Make the run's folder, or check that it is the same run on the same machine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise ArgumentError(
            f"folder {folder} cannot be made: {reason.strerror}; a new folder would do"
        ) from reason
    wanted = json.loads(json.dumps({"config": asdict(config), "machine": asdict(fingerprint())}))
    place = folder / "config.json"
    if not place.exists():
        if any(folder.iterdir()):
            raise ArgumentError(f"{folder} holds other files; a new folder would do")
        write_text(place, json.dumps(wanted, indent=1) + "\n")
        return
    if not resume:
        raise ArgumentError(f"{folder} holds a run; resume=True goes on with it")
    try:
        found = json.loads(place.read_text())
    except (ValueError, RecursionError) as reason:
        raise ArgumentError(f"{place} is damaged: {reason}") from reason
    if not isinstance(found, dict):
        raise ArgumentError(f"{place} is damaged: it holds {found!r}, no object")
    if found.get("config") != wanted["config"]:
        raise ArgumentError(f"{place} is of a run with other settings; its own would do")
    if "measured" in config.stages and found.get("machine") != wanted["machine"]:
        there = found.get("machine")
        raise ArgumentError(f"{place}: the run measures on {there}, not on this machine")


def header(
    config: TrainConfig, stage: str, metrics: Mapping[str, float],
    earlier: Mapping[str, object], seconds: float,
) -> dict[str, object]:  # fmt: skip
    """What a checkpoint says of itself."""
    stages = earlier.get("stages")
    done = dict(stages) if isinstance(stages, dict) else {}
    done[stage] = {"seconds": round(seconds, 1), **{k: round(v, 5) for k, v in metrics.items()}}
    return {
        "generator": GENERATOR_VERSION, "commit": commit(), "machine": asdict(fingerprint()),
        "seed": config.seed, "stages": done, "command": command(config),
    }  # fmt: skip


def command(config: TrainConfig) -> str:
    """What to type for such a run."""
    runners = f" --runners {config.runners}" if config.runners else ""
    return (
        f"looptune train RUN --seed {config.seed} --stages {','.join(config.stages)} "
        f"--trainer {config.trainer}{runners}"
    )


@dataclass(frozen=True)
class Job:
    """A stage's settings, where its files go, and whom it tells."""

    config: TrainConfig
    folder: Path
    report: Callable[[Mapping[str, float]], None]
    address: str | None = None


Made = tuple[PolicyNetwork, GainModel | None, Mapping[str, float]]


def problems_of(job: Job) -> list[dataset.MeasuredProblem]:
    """The measurements."""
    found = list(dataset.load(job.config.data))
    job.report({"problems": float(len(found)), "rows": float(sum(len(p.rows) for p in found))})
    return found


def regress_stage(job: Job, network: PolicyNetwork, gain: GainModel | None) -> Made:
    """The gain model from measured schedules."""
    problems = problems_of(job)
    with tqdm(total=len(problems), desc="features", file=sys.stderr, disable=None) as bar:
        table = table_of(problems, bar.update)
    model, metrics = regress(table, replace(job.config.regress, seed=job.config.seed), job.report)
    job.report(metrics)
    return network, model, metrics


def cloned(
    job: Job, settings: CloneConfig, network: PolicyNetwork, count: int,
    shown: Callable[[Callable[[], object]], Demonstrations],
) -> Mapping[str, float]:  # fmt: skip
    """The network from what is shown of so many problems."""
    with tqdm(total=count, desc="demonstrations", file=sys.stderr, disable=None) as bar:
        found = shown(bar.update)
    return clone(network, found, replace(settings, seed=job.config.seed), job.report)


def imitate_stage(job: Job, network: PolicyNetwork, gain: GainModel | None) -> Made:
    """The network from the best that the cost model's beam finds."""
    settings = job.config.imitate
    pool = pooled(on_any_machine, settings.problems, job.config.seed + 3)
    starts = [Construction(each.nest, each.target, each.threads) for each in pool]
    shown = partial(from_beam, starts, settings.width)
    return network, gain, cloned(job, settings.clone, network, len(pool), shown)


def clone_stage(job: Job, network: PolicyNetwork, gain: GainModel | None) -> Made:
    """The network from the better of the measured schedules."""
    problems = problems_of(job)
    shown = partial(from_measurements, problems)
    return network, gain, cloned(job, job.config.clone, network, len(problems), shown)


def improved(
    job: Job, stage: str, network: PolicyNetwork, pool: Sequence[Problem], reward: Gain
) -> Mapping[str, float]:
    """PPO; the last of its reports."""
    settings: PPOConfig = replace(getattr(job.config, stage), seed=job.config.seed)
    state, last = job.folder / f"{stage}.state", dict[str, float]()

    def heard(values: Mapping[str, float]) -> None:
        last.update(values)
        job.report(values)

    told: dict[str, Any] = {"problems": listed(pool), "reward": reward, "least": 0.0}
    if job.config.trainer == "single":
        environments = [ConstructEnv(**told) for _ in range(settings.environments)]
        ppo.train(network, environments, settings, heard, state)
        for environment in environments:
            environment.close()
        return last
    from looptune.models import rllib

    runners = job.config.runners
    if stage == "measured" and job.address is None:
        runners = min(runners, max(1, available_cores() - 1))  # one core a runner, one to learn
    rllib.train(
        network, settings, heard, state,
        env_config=told,
        runners=runners,
        measure=1.0 if stage == "measured" and runners else None,
        address=job.address,
    )  # fmt: skip
    return last


def model_stage(job: Job, network: PolicyNetwork, gain: GainModel | None) -> Made:
    """PPO on the cost model, over targets of all kinds."""
    pool = pooled(on_any_machine, MODEL_POOL, job.config.seed + 1)
    return network, gain, improved(job, "model", network, pool, modelled)


def measured_stage(job: Job, network: PolicyNetwork, gain: GainModel | None) -> Made:
    """PPO on measured times: nothing else may run on the machine."""
    seed = job.config.seed
    pool = pooled(on_this_machine, MEASURED_POOL, seed + 2)
    reward = Measured((job.folder / "posteriors.jsonl").absolute(), seed)
    return network, gain, improved(job, "measured", network, pool, reward)


STEPS: dict[str, Callable[..., Made]] = {
    "regress": regress_stage,
    "imitate": imitate_stage,
    "clone": clone_stage,
    "model": model_stage,
    "measured": measured_stage,
}
