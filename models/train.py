"""Training, from the shipped measurements to a checkpoint: `looptune train`.

Stages, each on the weights of the one before: `regress` the gain model on measured schedules,
`imitate` the cost model's beam over targets of all kinds, `clone` the better of the measured
schedules, `model`, PPO on the cost model over the same targets, and `measured`, PPO on times taken
on this machine, or on the nodes of a cluster. What a stage made is kept in the run's folder, as the
policy of the run so far, too, and the state of PPO after every iteration. A run that was killed
goes on: PPO after its last iteration, another stage from its beginning, measured stages on the same
machine only.
"""

from __future__ import annotations

import json
import math
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
from looptune.models.sets import evenly
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

    `share` is the part of every stage that is done, to try a run out: of its steps or epochs, and
    of the problems that they are about.
    `trainer` is RLlib's PPO, which has `runners` remote environment runners or samples in this
    process, or the `single`-file one. Raises `ArgumentError` for settings that there are not.
    """

    seed: int = 0
    stages: tuple[str, ...] = STAGES
    share: float = 1.0
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
        if not 0 < self.share <= 1:
            raise ArgumentError(f"share={self.share!r}; more than 0 and at most 1 would do")
        if self.trainer not in get_args(Trainer):
            raise ArgumentError(f"trainer={self.trainer!r}; one of {get_args(Trainer)} would do")
        if self.runners < 0 or (self.runners and self.trainer == "single"):
            raise ArgumentError(
                f"runners={self.runners} of trainer={self.trainer!r}; 0, or 'rllib' and at least 0 "
                "would do"
            )


def shared(config: TrainConfig) -> TrainConfig:
    """The settings of the part of a run that its share means: an epoch and an iteration at least.

    A share of the problems makes epochs short; so as not to learn from a share of a share alone,
    there are as many epochs as the root of the share says.
    """
    if config.share == 1:
        return config
    root = math.sqrt(config.share)

    def cloned_less(settings: CloneConfig) -> CloneConfig:
        return replace(settings, epochs=math.ceil(root * settings.epochs))

    def improved_less(settings: PPOConfig) -> PPOConfig:
        steps = math.ceil(config.share * settings.steps)
        most = max(1, steps // settings.environments)
        return replace(settings, steps=steps, rollout=min(settings.rollout, most))

    regress, imitate = config.regress, config.imitate
    return replace(
        config,
        regress=replace(regress, epochs=math.ceil(root * regress.epochs)),
        imitate=replace(
            imitate,
            problems=math.ceil(config.share * imitate.problems),
            clone=cloned_less(imitate.clone),
        ),
        clone=cloned_less(config.clone),
        model=improved_less(config.model),
        measured=improved_less(config.measured),
    )


def length_of(config: TrainConfig, stage: str) -> int:
    """How many epochs or steps a stage has."""
    lengths = {
        "regress": config.regress.epochs, "imitate": config.imitate.clone.epochs,
        "clone": config.clone.epochs, "model": config.model.steps,
        "measured": config.measured.steps,
    }  # fmt: skip
    return lengths[stage]


def config_of(place: Path) -> tuple[TrainConfig, object]:
    """The settings that a run's config.json tells, and its machine; raises `ArgumentError`."""
    try:
        found = json.loads(place.read_text())
        settings = dict(found["config"])
        made = TrainConfig(**{
            **settings, "stages": tuple(settings["stages"]),
            "regress": RegressConfig(**settings["regress"]),
            "imitate": ImitateConfig(**{
                **settings["imitate"], "clone": CloneConfig(**settings["imitate"]["clone"]),
            }),
            "clone": CloneConfig(**settings["clone"]),
            "model": PPOConfig(**settings["model"]),
            "measured": PPOConfig(**settings["measured"]),
        })  # fmt: skip
    except OSError as reason:
        raise ArgumentError(f"{place.parent} holds no run: {reason.strerror}") from reason
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        raise ArgumentError(f"{place} is damaged: {reason!r}") from reason
    return made, found.get("machine")


def resumed(folder: Path, given: Mapping[str, object]) -> TrainConfig:
    """The settings to go on with: those of the run, which the `given` ones must not contradict.

    Raises `ArgumentError` for one that does, and where there is no run.
    """
    config, _ = config_of(folder / "config.json")
    check_equal(folder / "config.json", replace(config, **given), config)  # type: ignore[arg-type]
    return config


def check_equal(place: Path, wanted: TrainConfig, found: TrainConfig) -> None:
    """Raise `ArgumentError` with the first setting that differs."""
    ours, theirs = flat(asdict(wanted)), flat(asdict(found))
    for name, value in ours.items():
        if theirs[name] != value:
            raise ArgumentError(
                f"{place} is of a run with {name}={theirs[name]!r}, not {value!r}: to go on, leave "
                "it out, or begin another run in a new folder"
            )


def flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings by dotted names."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


@dataclass
class Log:
    """Lines of JSON beside a progress bar; TensorBoard's too, where it is installed."""

    folder: Path
    clock: Callable[[], float] = time.monotonic

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

    def of(self, stage: str, length: int) -> Callable[[Mapping[str, float]], None]:
        """What a stage of so many epochs or steps reports to."""
        began = self.clock()
        first: tuple[float, float] | None = None  # how far it was, and when

        def place(values: Mapping[str, float]) -> str:
            """Where the stage is, such as "epoch 7 of 40, 12 s left, "."""
            nonlocal first
            name = next((name for name in ("epoch", "steps") if name in values), None)
            if name is None:
                return ""
            at, now = values[name], self.clock()
            text = f"{name} {at:.0f} of {length}, "
            if first is None or at <= first[0]:
                first = (at, now)
            else:
                left = max(0.0, length - at) * (now - first[1]) / (at - first[0])
                text += f"{left:.0f} s left, "
            return text

        def report(values: Mapping[str, float]) -> None:
            seconds = self.clock() - began
            line = json.dumps({"stage": stage, "seconds": seconds, **values})
            append_text(self.folder / "log.jsonl", line + "\n")
            shown = ", ".join(
                f"{name} {value:.4g}"
                for name, value in values.items()
                if name not in ("epoch", "steps")
            )
            tqdm.write(f"{stage}: {place(values)}{shown}", file=sys.stderr)
            step = int(values.get("steps", values.get("epoch", 0)))
            for name, value in values.items():
                if self.board is not None:
                    self.board.add_scalar(f"{stage}/{name}", value, step)

        return report


def run(
    config: TrainConfig, folder: Path, resume: bool = False, address: str | None = None
) -> Policy:
    """Train into `folder`: config.json, log.jsonl, a checkpoint a stage, and policy.npz, which is
    that of the last stage so far.

    `address` is of a Ray cluster where PPO's runners run; those that measure hold 1 each of its
    resource `measure`. Raises `ArgumentError` for a folder with another run's files, or without
    `resume` for one with any; where a measured stage would go on on another machine; and for an
    address without runners.
    """
    if address is not None and not config.runners:
        raise ArgumentError(f"address={address!r} without runners; runners=1 or more would do")
    prepare(config, folder, resume)
    part = shared(config)
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
        report = log.of(stage, length_of(part, stage))
        network, gain, metrics = STEPS[stage](Job(part, folder, report, address), network, gain)
        earlier = dict(policy.header) if policy is not None else {}
        policy = Policy(
            network.architecture, network.state_arrays(), header(config, stage, metrics, earlier,
            time.monotonic() - began), gain,
        )  # fmt: skip
        checkpoint.save(made, policy)
        checkpoint.save(folder / "policy.npz", policy)
    log.close()
    assert policy is not None
    return policy


def prepare(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Make the run's folder, or check that it is the same run on the same machine."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise ArgumentError(
            f"folder {folder} cannot be made: {reason.strerror}; a new folder would do"
        ) from reason
    place = folder / "config.json"
    if not place.exists():
        if any(folder.iterdir()):
            raise ArgumentError(f"{folder} holds other files; a new folder would do")
        wanted = {"config": asdict(config), "machine": asdict(fingerprint())}
        write_text(place, json.dumps(wanted, indent=1) + "\n")
        return
    if not resume:
        raise ArgumentError(f"{folder} holds a run; resume=True goes on with it")
    found, there = config_of(place)
    check_equal(place, config, found)
    here = json.loads(json.dumps(asdict(fingerprint())))
    if "measured" in config.stages and there != here:
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
    share = f" --share {config.share:g}" if config.share != 1 else ""
    runners = f" --runners {config.runners}" if config.runners else ""
    return (
        f"looptune train RUN --seed {config.seed} --stages {','.join(config.stages)}{share} "
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
    """The measurements, evenly spread ones where only a share counts."""
    found = list(dataset.load(job.config.data))
    found = evenly(found, max(2, round(job.config.share * len(found))))
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
