"""Policies: torch and NumPy agree, checkpoints refuse what is not one, training learns."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from looptune.construct import STOP, TABLE, Construction
from looptune.errors import CheckpointError, ScheduleError
from looptune.graph import AXES, LOOPS, ActionTable, shapes
from looptune.models import checkpoint, gain
from looptune.models.architecture import ILLEGAL, Architecture, architecture_from_json
from looptune.models.gain import GainModel
from looptune.models.inference import Policy
from looptune.target import TARGETS
from looptune.workloads import matmul

LOOPS_ONLY = ActionTable(candidates=0, axis=0, loop=5, operand=0, world=2)
NO_NEST = ActionTable(candidates=64, axis=2, loop=1, operand=2, world=0)
AVX2 = TARGETS["avx2"]


def random_observation(rng: np.random.Generator, table: ActionTable) -> dict[str, np.ndarray]:
    """Random features, masks and edges; edges join nodes that are there, as `observe` has them."""
    found = {}
    for name, (shape, dtype) in shapes(table).items():
        if dtype == "float32":
            found[name] = rng.normal(size=shape).astype(np.float32)
        else:
            found[name] = (rng.random(shape) < rng.choice([0.1, 0.5, 0.9])).astype(dtype)
    found["node_mask"][rng.integers(AXES)] = 1
    there = np.flatnonzero(found["node_mask"])
    found["edges"] = rng.choice(there, found["edges"].shape)
    found["nodes"][found["node_mask"] == 0] = 0
    found["action_mask"][rng.integers(table.size)] = 1
    return found


def random_arrays(rng: np.random.Generator, architecture: Architecture) -> dict[str, np.ndarray]:
    return {
        name: (rng.normal(size=shape) / 8).astype(np.float32)
        for name, shape in architecture.parameters.items()
    }


@pytest.mark.parametrize("table", [TABLE, LOOPS_ONLY, NO_NEST])
@pytest.mark.parametrize("layers", [0, 2])
def test_numpy_and_torch_agree(table: ActionTable, layers: int):
    pytest.importorskip("torch_geometric")
    from looptune.models.network import PolicyNetwork, stacked

    rng = np.random.default_rng(layers)
    architecture = Architecture(table, 16, layers)
    arrays = random_arrays(rng, architecture)
    network = PolicyNetwork(architecture)
    network.load_arrays(arrays)
    policy = Policy(architecture, network.state_arrays())
    for name, array in arrays.items():
        np.testing.assert_array_equal(policy.arrays[name], array)
    observations = [random_observation(rng, table) for _ in range(20)]
    observations[3]["edge_mask"][:] = 0
    logits, value = (found.detach().numpy() for found in network(stacked(observations)))
    legal = np.stack([o["action_mask"] for o in observations]) > 0
    assert (logits[~legal] == np.float32(ILLEGAL)).all()
    for size in (1, 4, 20):
        found = policy.evaluate(observations[:size])
        np.testing.assert_allclose(found[0], logits[:size], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1], value[:size], rtol=1e-5, atol=1e-5)


def test_a_new_policy_is_nearly_even():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from looptune.models.network import PolicyNetwork

    torch.manual_seed(0)
    network = PolicyNetwork(Architecture(TABLE))
    policy = Policy(network.architecture, network.state_arrays())
    state = Construction(matmul(64, 64, 64).nests[0], AVX2)
    found = np.exp(policy.log_probabilities([state])[0])[state.mask > 0]
    np.testing.assert_allclose(found, 1 / state.mask.sum(), rtol=0.2)


def test_probabilities_of_legal_actions_add_up_to_one():
    rng = np.random.default_rng(0)
    architecture = Architecture(TABLE, 8)
    policy = Policy(architecture, random_arrays(rng, architecture))
    states = [Construction(matmul(9, 70, 33).nests[0], AVX2)]
    states += [states[0].take(0), states[0].take(0).take(STOP)]
    logs = policy.log_probabilities(states)
    found = np.exp(logs)
    legal = np.stack([state.mask for state in states]) > 0
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    assert (found[~legal] == 0).all()
    assert logs.shape == (3, TABLE.size)
    assert logs.dtype == np.float32


def test_loops_take_their_logits_to_other_slots():
    rng = np.random.default_rng(1)
    architecture = Architecture(LOOPS_ONLY, 16)
    policy = Policy(architecture, random_arrays(rng, architecture))
    first = random_observation(rng, LOOPS_ONLY)
    first["action_mask"][:] = 1
    order = np.arange(36)
    loops = slice(AXES, AXES + LOOPS)
    order[loops] = rng.permutation(order[loops])
    second = first | {
        "nodes": first["nodes"][order],
        "node_mask": first["node_mask"][order],
        "edges": np.argsort(order)[first["edges"]],
    }
    (one, two), values = policy.evaluate([first, second])
    moved = one[:100].reshape(LOOPS, 5)[order[loops] - AXES].ravel()
    np.testing.assert_allclose(two[:100], moved, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_inference_needs_numpy_alone():
    code = (
        "import sys, looptune.models.inference, looptune.models.checkpoint\n"
        "print({'torch', 'gymnasium', 'ray', 'torch_geometric'} & set(sys.modules) or 'none')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "none\n"


def test_architecture_is_read_back_from_json():
    for table in (TABLE, LOOPS_ONLY, NO_NEST):
        architecture = Architecture(table, 24, 3)
        assert (
            architecture_from_json(json.loads(json.dumps(architecture.to_json()))) == architecture
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "a width of 0"),
        ({"hidden": 2.0}, "hidden is 2.0"),
        ({"layers": True}, "layers is True"),
        ({"layers": -1}, "layers is -1"),
        ({"layers": 1025}, "layers is 1025"),
        ({"table": [1]}, "sizes would do"),
        ({"table": {}}, "sizes would do"),
        ({"more": 1}, "it has not just"),
    ],
)
def test_architectures_that_are_none(change: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        architecture_from_json(Architecture(TABLE).to_json() | change)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (ActionTable(65, 0, 0, 0, 1), "not 64 candidates"),
        (ActionTable(3, 0, 0, 0, 1), "not 64 candidates"),
        (ActionTable(0, 0, 0, 0, 0), "no action"),
        (ActionTable(0, -1, 0, 0, 1), "axis is -1"),
    ],
)
def test_action_tables_that_are_none(table: ActionTable, message: str):
    with pytest.raises(CheckpointError, match=message):
        architecture_from_json(Architecture(table).to_json())


def small_policy() -> Policy:
    rng = np.random.default_rng(0)
    architecture = Architecture(NO_NEST, 4, 1)
    arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in gain.shapes().items()}
    model = GainModel(arrays | {"scale": np.abs(arrays["scale"])})
    header = {"seed": 3, "stages": {"clone": {"agreement": 0.5}}}
    return Policy(architecture, random_arrays(rng, architecture), header, model)


@pytest.mark.parametrize("with_gain", [False, True])
def test_a_checkpoint_is_read_back(tmp_path: Path, with_gain: bool):
    policy, path = small_policy(), tmp_path / "policy.npz"
    policy = policy if with_gain else replace(policy, gain=None)
    checkpoint.save(path, policy)
    found = checkpoint.load(path)
    assert found.architecture == policy.architecture
    assert found.header == policy.header | {
        "schema": 1,
        "observation": checkpoint.OBSERVATION_VERSION,
        "architecture": policy.architecture.to_json(),
        "gain": with_gain,
    }
    pairs = [(found.arrays, policy.arrays)]
    pairs += [(found.gain.arrays, policy.gain.arrays)] if with_gain else []
    for one, other in pairs:
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    assert found.gain is not None or not with_gain
    checkpoint.save(path, found)
    assert list(tmp_path.iterdir()) == [path]


def test_the_shipped_checkpoint_is_one():
    policy = checkpoint.load()
    assert policy.architecture.table == TABLE
    assert policy.gain is not None


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "policy.npz"
    checkpoint.save(path, small_policy())
    before = path.read_bytes()
    monkeypatch.setattr(checkpoint.np, "savez_compressed", lambda file, **arrays: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        checkpoint.save(path, small_policy())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("graph.bias", None, "graph.bias is not there"),
        ("strange", np.zeros(3, np.float32), "strange is no array of its architecture"),
        ("graph.bias", np.zeros(4), r"graph.bias is float64 \(4,\); float32 \(4,\) would do"),
        ("graph.bias", np.zeros(7, np.float32), r"is float32 \(7,\); float32 \(4,\) would do"),
        ("graph.bias", np.full(4, np.nan, np.float32), "graph.bias holds a number that is not fin"),
    ],
)
def test_arrays_that_are_not_saved(tmp_path: Path, name: str, array: object, message: str):
    policy = small_policy()
    arrays = {**policy.arrays, name: array}
    if array is None:
        del arrays[name]
    with pytest.raises(CheckpointError, match=rf"policy.npz: .*{message}"):
        checkpoint.save(tmp_path / "policy.npz", replace(policy, arrays=arrays))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"seed": float("nan")}, "its header is no JSON"),
        ({"seed": {1}}, "its header is no JSON"),
        ({"seed": "x" * (1 << 20)}, r"its header takes \d+ bytes; 1048576 at most"),
    ],
)
def test_headers_that_are_not_saved(tmp_path: Path, header: dict, message: str):
    with pytest.raises(CheckpointError, match=rf"policy.npz: {message}"):
        checkpoint.save(tmp_path / "policy.npz", replace(small_policy(), header=header))


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def text(content: bytes) -> bytes:
    return npy(np.frombuffer(content, np.uint8))


def header_bytes(**changes: object) -> bytes:
    whole = {
        "schema": 1,
        "observation": checkpoint.OBSERVATION_VERSION,
        "architecture": small_policy().architecture.to_json(),
        "gain": False,
    }
    return text(json.dumps(whole | changes).encode())


def written(path: Path, members: list[tuple[str, bytes]], how: int = zipfile.ZIP_DEFLATED) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that occurs twice
        with zipfile.ZipFile(path, "w", how) as archive:
            for name, content in members:
                archive.writestr(name, content)
    return path


ZEROS = npy(np.zeros(1, np.float32))
LYING = npy(np.zeros(40, np.uint8)).replace(b"(40,), }" + b" " * 11, b"(9999999999999,), }")
REFUSED = {
    "nothing": ([], "it lacks header"),
    "twice": ([("a.npy", ZEROS)] * 2, "a member is there twice"),
    "large-header": ([("header.npy", bytes(1 << 21))], "header claims 2097152 bytes, not 1048576"),
    "float-header": ([("header.npy", ZEROS)], "its header is no text"),
    "no-npy": ([("header.npy", b"{}")], "damaged"),
    "objects": ([("header.npy", ZEROS.replace(b"'<f4'", b"'|O' "))], "not of the shape"),
    "lying": ([("header.npy", LYING)], r"header is not of the shape \(9999999999999,\)"),
    "other-npy": ([("header.npy", b"\x93NUMPY\x02\x00" + bytes(20))], r"of version \(2, 0\)"),
    "not-json": ([("header.npy", text(b"{"))], "damaged"),
    "deep": ([("header.npy", text(b"[" * 200000))], "damaged: maximum recursion"),
    "list": ([("header.npy", text(b"[]"))], "its header is list, not an object"),
    "older": ([("header.npy", header_bytes(schema=0))], "schema 0; this looptune reads 1"),
    "newer": ([("header.npy", header_bytes(schema=2))], "a checkpoint trained with it would do"),
    "view": ([("header.npy", header_bytes(observation=99))], "observation 99; this looptune reads"),
    "sizes": ([("header.npy", header_bytes(architecture=None))], "architecture None: .* sizes"),
    "missing": ([("header.npy", header_bytes())], "it lacks encode.axis.weight"),
    "more": (
        [("header.npy", header_bytes()), ("run.sh", b"")],
        r"unknown members \['run.sh'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_no_checkpoint(tmp_path: Path, case: str):
    members, message = REFUSED[case]
    path = written(tmp_path / "odd.npz", members)
    with pytest.raises(CheckpointError, match=rf"odd\.npz: .*{message}"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(1 << 20), "graph.bias claims 1048576 bytes, not 16"),
        (npy(np.zeros(8, np.float16)), r"graph.bias is float16 \(8,\); float32 \(4,\) would do"),
        (npy(np.zeros((2, 2), np.float32)), r"is float32 \(2, 2\); float32 \(4,\) would do"),
        (npy(np.zeros(4, np.float32)) + b"\0", r"is not of the shape \(4,\) that it claims"),
        (npy(np.zeros(4, ">f4")), r"graph.bias is >f4 \(4,\)"),
        (npy(np.full(4, np.inf, np.float32)), "graph.bias holds a number that is not finite"),
    ],
)
def test_arrays_that_are_not_as_promised(tmp_path: Path, content: bytes, message: str):
    checkpoint.save(tmp_path / "policy.npz", small_policy())
    with zipfile.ZipFile(tmp_path / "policy.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    path = written(tmp_path / "odd.npz", list((members | {"graph.bias.npy": content}).items()))
    with pytest.raises(CheckpointError, match=rf"odd\.npz: .*{message}"):
        checkpoint.load(path)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_scale_is_positive(tmp_path: Path, value: float):
    """Features are divided by it."""
    policy = small_policy()
    policy.gain.arrays["scale"][3] = value
    with pytest.raises(CheckpointError, match=rf"gain/scale holds {value}; positive numbers"):
        checkpoint.save(tmp_path / "policy.npz", policy)


def test_other_compressions_are_refused(tmp_path: Path):
    path = written(tmp_path / "odd.npz", [("header.npy", header_bytes())], zipfile.ZIP_LZMA)
    with pytest.raises(CheckpointError, match=r"header\.npy is not compressed by deflate"):
        checkpoint.load(path)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"none\.npz: no checkpoint: .*No such file"):
        checkpoint.load(tmp_path / "none.npz")
    path = tmp_path / "odd.npz"
    path.write_bytes(b"text")
    with pytest.raises(CheckpointError, match=r"odd\.npz: no checkpoint: File is not a zip file"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint: .*Is a directory"):
        checkpoint.load(tmp_path)


def test_damaged_files_are_refused_or_harmless(tmp_path: Path):
    path = tmp_path / "policy.npz"
    checkpoint.save(path, replace(small_policy(), gain=None))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    shapes = checkpoint.load(path).architecture.parameters
    refused = 0
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            broken[rng.integers(len(broken))] ^= 1 << rng.integers(8)
        path.write_bytes(broken[: rng.integers(len(broken))] if rng.random() < 0.2 else broken)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the zip module
                arrays = checkpoint.load(path).arrays
        except CheckpointError:
            refused += 1
            continue
        assert {name: array.shape for name, array in arrays.items()} == shapes
        assert all(np.isfinite(array).all() for array in arrays.values())
    assert refused > 250, "277 when this was written: all but bits that nothing is read from"


def constructions() -> list[Construction]:
    sizes = [(m, n, k) for m in (16, 64, 96) for n in (16, 80, 192) for k in (32, 100)]
    return [Construction(matmul(*size).nests[0], AVX2) for size in sizes]


def decided(state: Construction) -> list[int]:
    """The widest tile by the features of the candidates, then each axis whole, the last first."""
    tiles = state.observe()["candidates"][: len(state.offers)]
    found = [int(np.argmax(tiles[:, 1]))]
    state = state.take(found[0])
    while state.open_axes:
        legal = np.flatnonzero(state.mask[: TABLE.operand_at])
        found.append(int(legal[-1]))
        state = state.take(found[-1])
    return found


def test_cloning_learns_a_rule():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    from looptune.models.clone import CloneConfig, Demonstrations, clone
    from looptune.models.network import PolicyNetwork

    shown = Demonstrations()
    for state in constructions():
        shown.add(state, [(decided(state), 0.2)])
    assert len(shown) >= 4 * len(constructions())
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        network = PolicyNetwork(Architecture(TABLE, 16))
        reports: list[dict[str, float]] = []
        config = CloneConfig(epochs=60, batch=16, rate=1e-2, held_out=0.2)
        results.append(clone(network, shown, config, reports.append))
    assert results[0] == results[1] == reports[-1]
    assert reports[0]["agreement"] < 0.95 < results[0]["agreement"]
    assert results[0]["value_error"] < 0.1
    policy = Policy(network.architecture, network.state_arrays())
    state = constructions()[0]
    first = policy.log_probabilities([state])[0].argmax()
    assert first == decided(state)[0]


def test_better_demonstrations_count_more():
    pytest.importorskip("torch")
    from looptune.models.clone import Demonstrations

    shown = Demonstrations()
    start = constructions()[0]
    shown.add(start, [([0], 0.0), ([1], 0.03)])
    chosen = shown.actions[0].astype(np.float64)
    np.testing.assert_allclose(chosen[1] / chosen[0], np.e, rtol=1e-2)
    assert shown.gains[0] == pytest.approx(0.03 * np.e / (1 + np.e))
    with pytest.raises(ScheduleError, match=rf"after \[\] .* forbids: \[{TABLE.axis_at}\]"):
        shown.add(start, [([TABLE.axis_at], 0.0)])


def test_the_beams_best_is_shown():
    pytest.importorskip("torch")
    from looptune.construct import decisions_of
    from looptune.models.clone import from_beam
    from looptune.propose import ModelValue, expert

    starts = constructions()[:3]
    seen = []
    shown = from_beam(starts, 2, lambda: seen.append(1))
    assert len(seen) == 3
    first = expert(starts[0], ModelValue(starts[0].nest, AVX2), 2)[0]
    path = (*decisions_of(first.state), STOP)
    assert [int(chosen.argmax()) for chosen in shown.actions[: len(path)]] == list(path)
    assert shown.gains[: len(path)] == pytest.approx([first.score] * len(path))
    assert all(chosen.max() == 1 for chosen in shown.actions)


def ppo_environments(count: int):
    pytest.importorskip("gymnasium")
    from looptune.envs.construct import ConstructEnv
    from looptune.envs.problem import Problem, listed

    problem = Problem(matmul(64, 96, 128).nests[0], AVX2)
    return [ConstructEnv(listed([problem])) for _ in range(count)]


def test_ppo_improves_the_gain():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    environments = ppo_environments(8)
    from looptune.models.network import PolicyNetwork
    from looptune.models.ppo import PPOConfig, train

    torch.manual_seed(0)
    network = PolicyNetwork(Architecture(TABLE, 16))
    reports: list[dict[str, float]] = []
    config = PPOConfig(steps=2048, rollout=32, rate=3e-3, minibatch=128, entropy=0.0)
    train(network, environments, config, reports.append)
    assert reports[-1]["steps"] == 2048
    assert reports[-1]["return"] > reports[0]["return"] + 0.3


def test_a_killed_ppo_goes_on(tmp_path: Path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_geometric")
    environments = ppo_environments(2)
    from looptune.models.network import PolicyNetwork
    from looptune.models.ppo import PPOConfig, train

    class Killed(Exception):
        pass

    def killed(figures: dict[str, float]) -> None:
        if figures["steps"] == 48:
            raise Killed

    state = tmp_path / "model.state"
    config = PPOConfig(steps=64, rollout=8, minibatch=16, epochs=1)
    with pytest.raises(Killed, match=r"^$"):
        train(PolicyNetwork(Architecture(TABLE, 8)), environments, config, killed, state)
    kept = torch.load(state, weights_only=True)
    assert kept["steps"] == 32
    assert list(tmp_path.iterdir()) == [state]
    network = PolicyNetwork(Architecture(TABLE, 8))
    reports: list[dict[str, float]] = []
    train(network, environments, config, reports.append, state)
    assert [found["steps"] for found in reports] == [48, 64]
    train(network, environments, config, reports.append, state)
    assert len(reports) == 2
