"""Training runs: what is kept, what a stopped run goes on with, what it refuses."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import looptune
from looptune.cli import main
from looptune.errors import ArgumentError, CheckpointError
from looptune.provenance import commit

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("gymnasium")

from looptune.models import checkpoint, ppo, train  # noqa: E402
from looptune.models.clone import CloneConfig  # noqa: E402
from looptune.models.ppo import PPOConfig  # noqa: E402
from looptune.models.regress import RegressConfig  # noqa: E402

# tensorboard and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> train.TrainConfig:
    """A run of seconds, on the first problems of the shipped measurements."""
    shipped = files("looptune.checkpoints") / "measured.jsonl.gz"
    lines = gzip.decompress(shipped.read_bytes()).splitlines(keepends=True)[:13]
    data = tmp_path / "some.jsonl.gz"
    data.write_bytes(gzip.compress(b"".join(lines)))
    monkeypatch.setattr(train, "MODEL_POOL", 4)
    return train.TrainConfig(
        stages=("regress", "imitate", "clone", "model"), data=str(data), hidden=8, layers=1,
        trainer="single",
        imitate=train.ImitateConfig(problems=4, width=1, clone=CloneConfig(epochs=1)),
        regress=RegressConfig(epochs=2, held_out=0.2), clone=CloneConfig(epochs=1),
        model=PPOConfig(steps=32, rollout=8, environments=2, epochs=1),
    )  # fmt: skip


def test_a_run_leaves_a_checkpoint_and_what_it_came_from(
    config: train.TrainConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train.run(config, run)
    policy = checkpoint.load(run / "policy.npz")
    assert policy.gain is not None
    asked = "looptune train RUN --seed 0 --stages regress,imitate,clone,model --trainer single"
    assert policy.header["command"] == asked
    assert list(policy.header["stages"]) == list(config.stages)  # type: ignore[call-overload]
    assert set(policy.header) == {
        "schema", "observation", "architecture", "gain", "generator", "commit", "machine", "seed",
        "stages", "command",
    }  # fmt: skip
    assert policy.header["commit"] == commit()
    stages = [json.loads(line)["stage"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert set(stages) == set(config.stages)
    assert json.loads((run / "config.json").read_text())["config"]["hidden"] == 8


def test_a_stopped_run_goes_on_with_its_stages(
    config: train.TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setitem(train.STEPS, "model", killed)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, run)
    cloned = (run / "clone.npz").read_bytes()
    monkeypatch.undo()
    monkeypatch.setattr(train, "MODEL_POOL", 4)
    monkeypatch.setitem(train.STEPS, "clone", killed)
    train.run(config, run, resume=True)
    assert (run / "clone.npz").read_bytes() == cloned


def test_a_killed_stage_goes_on_after_its_last_iteration(
    config: train.TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first = tmp_path / "run", replace(config, stages=("model",))
    monkeypatch.setattr(ppo, "update", killed_after(1, ppo.update))
    with pytest.raises(KeyboardInterrupt):
        train.run(first, run)
    assert ppo.kept(run / "model.state").steps == 16
    monkeypatch.undo()
    monkeypatch.setattr(train, "MODEL_POOL", 4)
    train.run(first, run, resume=True)
    steps = [json.loads(line)["steps"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert steps == [16, 32]


def killed_after(count: int, function: Callable[..., object]) -> Callable[..., object]:
    """A function that ends the process at a later call."""
    calls = iter(range(count))

    def called(*arguments: object) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    return called


def test_after_each_stage_there_is_a_policy(
    config: train.TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setitem(train.STEPS, "imitate", killed)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, run)
    assert (run / "policy.npz").read_bytes() == (run / "regress.npz").read_bytes()
    kernel = looptune.optimize(
        "mk,kn->mn", m=37, k=100, n=29, policy=run / "policy.npz", target="avx2", verify=False,
        database=None,
    )  # fmt: skip
    assert kernel.origin in ("policy", "default")


@pytest.mark.parametrize("killed_at", ["regress", "imitate", "clone"])
def test_a_stage_that_was_killed_begins_again(
    config: train.TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    first = replace(config, stages=("regress", "imitate", "clone"))
    whole = train.run(first, tmp_path / "whole")
    name = "regress" if killed_at == "regress" else "clone"
    with monkeypatch.context() as patch:
        count = 1 if killed_at == "clone" else 0
        patch.setattr(train, name, killed_after(count, getattr(train, name)))
        with pytest.raises(KeyboardInterrupt):
            train.run(first, tmp_path / "run")
    again = train.run(first, tmp_path / "run", resume=True)
    for key, array in whole.arrays.items():
        np.testing.assert_array_equal(again.arrays[key], array)


def test_a_share_is_of_every_stage_and_kept(config: train.TrainConfig, tmp_path: Path) -> None:
    part = train.shared(train.TrainConfig(share=0.05))
    assert (part.regress.epochs, part.clone.epochs, part.imitate.clone.epochs) == (9, 3, 5)
    assert (part.imitate.problems, part.model.steps, part.measured.steps) == (50, 2000, 600)
    assert part.measured.rollout * part.measured.environments <= 600
    assert train.shared(config) == config
    run = tmp_path / "run"
    policy = train.run(replace(config, share=0.25, stages=("regress", "model")), run)
    assert "--share 0.25" in str(policy.header["command"])
    assert json.loads((run / "config.json").read_text())["config"]["share"] == 0.25
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert lines[0]["problems"] == 3
    assert max(line.get("steps", 0) for line in lines) == 8
    for share in (0, 1.5, -1):
        with pytest.raises(ArgumentError, match=r"share=.*; more than 0 and at most 1 would do"):
            train.TrainConfig(share=share)


def test_lines_say_how_far_a_stage_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter(range(0, 1000, 10))
    report = train.Log(tmp_path, clock=lambda: float(next(now))).of("clone", 40)
    report({"problems": 3.0})
    for epoch in (1.0, 2.0, 4.0):
        report({"epoch": epoch, "loss": 0.5})
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "clone: problems 3",
        "clone: epoch 1 of 40, loss 0.5",
        "clone: epoch 2 of 40, 760 s left, loss 0.5",
        "clone: epoch 4 of 40, 480 s left, loss 0.5",
    ]


def test_resuming_takes_the_settings_of_the_run(
    config: train.TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    first = replace(config, stages=("imitate",), seed=3)
    monkeypatch.setitem(train.STEPS, "imitate", killed)
    with pytest.raises(KeyboardInterrupt):
        train.run(first, run)
    assert train.resumed(run, {}) == first
    assert train.resumed(run, {"seed": 3, "stages": ("imitate",)}) == first
    assert main(["train", str(run), "--resume"]) == 130
    assert f"looptune train {run} --resume goes on" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(train, "MODEL_POOL", 4)
    assert main(["train", str(run), "--resume", "--seed", "4"]) == 2
    assert "is of a run with seed=3, not 4" in capsys.readouterr().err
    assert main(["train", str(run), "--resume", "--stages", "clone"]) == 2
    assert "with stages=('imitate',), not ('clone',)" in capsys.readouterr().err
    assert main(["train", str(run), "--resume"]) == 0
    assert capsys.readouterr().out == f"{run}/policy.npz\n"


def test_imitation_is_deterministic(config: train.TrainConfig, tmp_path: Path) -> None:
    alone = replace(config, stages=("imitate",))
    first, second = (train.run(alone, tmp_path / name).arrays for name in "ab")
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)


def killed(*_: object) -> train.Made:
    raise KeyboardInterrupt


def test_folders_that_are_of_another_run(config: train.TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = replace(config, stages=("regress",))
    train.run(short, run)
    with pytest.raises(ArgumentError, match="holds a run; resume=True"):
        train.run(short, run)
    with pytest.raises(ArgumentError, match="is of a run with seed=0, not 1: to go on"):
        train.run(replace(short, seed=1), run, resume=True)
    other = replace(short, model=PPOConfig(steps=33))
    with pytest.raises(ArgumentError, match=r"is of a run with model\.steps=32, not 33"):
        train.run(other, run, resume=True)
    with pytest.raises(ArgumentError, match="holds other files"):
        train.run(short, tmp_path)
    for text in ("{", "[]", "null", "[" * 100_000):
        (run / "config.json").write_text(text)
        with pytest.raises(ArgumentError, match="is damaged"):
            train.run(short, run, resume=True)


def test_a_damaged_state_of_ppo_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.state"
    assert ppo.kept(path) is None
    torch.save([1, 2], path)
    whole = path.read_bytes()
    for content in (b"", b"nothing", whole[: len(whole) // 2], whole):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.state is damaged"):
            ppo.kept(path)


def test_measured_stages_stay_on_their_machine(config: train.TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    measured = replace(config, stages=("measured",))
    train.prepare(measured, run, resume=False)
    kept = json.loads((run / "config.json").read_text())
    kept["machine"]["cpu"] = "another"
    (run / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ArgumentError, match="not on this machine"):
        train.prepare(measured, run, resume=True)


def test_stages_that_there_are_not() -> None:
    with pytest.raises(ArgumentError, match=r"stages \['sleep'\]"):
        train.TrainConfig(stages=("sleep",))
    with pytest.raises(ArgumentError, match=r"stages=\(\); some of \['regress'"):
        train.TrainConfig(stages=())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": "other"}, "trainer='other'; one of"),
        ({"runners": -1}, "runners=-1 of trainer='rllib'"),
        ({"trainer": "single", "runners": 2}, "runners=2 of trainer='single'; 0, or 'rllib'"),
    ],
)
def test_trainers_that_there_are_not(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        train.TrainConfig(**settings)


def test_an_address_needs_runners(config: train.TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="address='here:1' without runners; runners=1"):
        train.run(config, tmp_path / "run", address="here:1")
    assert not (tmp_path / "run").exists()


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "run"), "--stages", "sleep"]) == 2
    assert "stages ['sleep']" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(config: train.TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ArgumentError, match=rf"folder {folder} cannot be made: "):
            train.run(config, folder)
