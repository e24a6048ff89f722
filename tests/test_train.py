"""Training runs: what is kept, what a stopped run goes on with, what it refuses."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from looptune.cli import main
from looptune.errors import ArgumentError

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("gymnasium")

from looptune.models import checkpoint, train  # noqa: E402
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
        stages=("regress", "clone", "model"), data=str(data), hidden=8, layers=1,
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
    assert list(policy.header["stages"]) == ["regress", "clone", "model"]  # type: ignore[call-overload]
    assert policy.header["command"] == "looptune train RUN --seed 0 --stages regress,clone,model"
    stages = [json.loads(line)["stage"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert set(stages) == {"regress", "clone", "model"}
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


def killed(*_: object) -> train.Made:
    raise KeyboardInterrupt


def test_folders_that_are_of_another_run(config: train.TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = replace(config, stages=("regress",))
    train.run(short, run)
    with pytest.raises(ArgumentError, match="holds a run; resume=True"):
        train.run(short, run)
    with pytest.raises(ArgumentError, match="of a run with other settings"):
        train.run(replace(short, seed=1), run, resume=True)
    with pytest.raises(ArgumentError, match="holds other files"):
        train.run(short, tmp_path)
    (run / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="is damaged"):
        train.run(short, run, resume=True)


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


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "run"), "--stages", "sleep"]) == 1
    assert "stages ['sleep']" in capsys.readouterr().err
