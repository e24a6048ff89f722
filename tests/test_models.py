"""Policies: torch and NumPy agree, checkpoints refuse what is not one, training learns."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from looptune.construct import TABLE
from looptune.errors import ArgumentError, CheckpointError
from looptune.graph import ActionTable, shapes
from looptune.models import checkpoint
from looptune.models.architecture import ILLEGAL, Architecture
from looptune.models.header import Header
from looptune.models.inference import Policy

LOOPS_ONLY = ActionTable(candidates=0, axis=0, loop=5, operand=0, world=2)
NO_NEST = ActionTable(candidates=3, axis=2, loop=1, operand=2, world=0)


def random_observation(rng: np.random.Generator, table: ActionTable) -> dict[str, np.ndarray]:
    """Masks and edges of any kind, edges at nodes that are not there among them."""
    found = {}
    for name, (shape, dtype) in shapes(table).items():
        if dtype == "float32":
            found[name] = rng.normal(size=shape).astype(np.float32)
        else:
            found[name] = (rng.random(shape) < rng.choice([0.1, 0.5, 0.9])).astype(dtype)
    found["edges"] = rng.integers(0, 36, found["edges"].shape)
    found["action_mask"][rng.integers(table.size)] = 1
    return found


def random_arrays(rng: np.random.Generator, architecture: Architecture) -> dict[str, np.ndarray]:
    return {
        name: (rng.normal(size=shape) / 8).astype(np.float32)
        for name, shape in architecture.shapes.items()
    }


def torch_batch(observations):
    torch = pytest.importorskip("torch")
    names = observations[0]
    return {name: torch.from_numpy(np.stack([o[name] for o in observations])) for name in names}


@pytest.mark.parametrize("table", [TABLE, LOOPS_ONLY, NO_NEST])
@pytest.mark.parametrize("layers", [0, 2])
def test_numpy_and_torch_agree(table: ActionTable, layers: int):
    pytest.importorskip("torch_geometric")
    from looptune.models.network import PolicyNetwork

    rng = np.random.default_rng(layers)
    architecture = Architecture(table, 16, layers)
    arrays = random_arrays(rng, architecture)
    network = PolicyNetwork(architecture)
    network.load_arrays(arrays)
    policy = Policy(architecture, network.state_arrays())
    observations = [random_observation(rng, table) for _ in range(20)]
    observations[3]["node_mask"][:] = 0
    observations[4]["edge_mask"][:] = 0
    logits, value = (
        found.detach().numpy() for found in network.logits_and_value(torch_batch(observations))
    )
    legal = np.stack([o["action_mask"] for o in observations]) > 0
    assert (logits[~legal] == np.float32(ILLEGAL)).all()
    for size in (1, 4, 20):
        found = policy.forward(observations[:size])
        np.testing.assert_allclose(found[0], logits[:size], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1], value[:size], rtol=1e-5, atol=1e-5)


def test_probabilities_of_legal_actions_add_up_to_one():
    rng = np.random.default_rng(0)
    architecture = Architecture(TABLE, 8)
    policy = Policy(architecture, random_arrays(rng, architecture))
    observations = [random_observation(rng, TABLE) for _ in range(5)]
    found = np.exp(policy.log_probabilities(observations))
    legal = np.stack([o["action_mask"] for o in observations]) > 0
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    assert (found[~legal] == 0).all()
    assert found.dtype == policy.values(observations).dtype == np.float32
    assert [len(part) for part in policy.evaluate([])] == [0, 0]


def test_observations_of_another_shape_are_refused():
    architecture = Architecture(TABLE, 8)
    policy = Policy(architecture, random_arrays(np.random.default_rng(0), architecture))
    observation = random_observation(np.random.default_rng(0), NO_NEST)
    with pytest.raises(ArgumentError, match=r"action_mask has shape \(\d+,\); \(171,\) would do"):
        policy.evaluate([observation])


def test_order_of_nodes_does_not_matter():
    """Loops moved to other slots take their logits with them."""
    rng = np.random.default_rng(1)
    architecture = Architecture(LOOPS_ONLY, 16)
    policy = Policy(architecture, random_arrays(rng, architecture))
    first = random_observation(rng, LOOPS_ONLY)
    first["action_mask"][:] = 1
    order = np.arange(36)
    order[10:30] = rng.permutation(order[10:30])
    place = np.argsort(order)
    second = first | {
        "nodes": first["nodes"][order],
        "node_mask": first["node_mask"][order],
        "edges": place[first["edges"]],
    }
    (one, two), values = policy.forward([first, second])
    moved = one[:100].reshape(20, 5)[order[10:30] - 10].ravel()
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
        assert Architecture.from_json(architecture.to_json()) == architecture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden width is 0; a number from 1 to 1024 would do"),
        ({"hidden": 2.0}, "hidden is 2.0; a number"),
        ({"layers": True}, "layers is True; a number"),
        ({"layers": 17}, "number of layers is 17; a number from 0 to 16"),
        ({"table": [1]}, "action table is list; an object of"),
        ({"more": 1}, "architecture is .*'more'.*; an object of"),
    ],
)
def test_architectures_that_are_none(change: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        Architecture.from_json(Architecture(TABLE).to_json() | change)


def test_action_tables_that_are_none():
    with pytest.raises(CheckpointError, match="actions of kind candidates is 65; a number from 0"):
        Architecture(ActionTable(65, 0, 0, 0, 1))
    with pytest.raises(CheckpointError, match="number of actions is 0; a number from 1"):
        Architecture(ActionTable(0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("graph.bias", None, "graph.bias is missing; 42 arrays would do"),
        ("strange", np.zeros(3, np.float32), "strange is not a parameter; 42 arrays would do"),
        ("graph.bias", np.zeros(8), r"graph.bias is float64 \(8,\); float32 \(8,\) would do"),
        ("graph.bias", np.zeros(7, np.float32), r"is float32 \(7,\); float32 \(8,\) would do"),
        ("graph.bias", np.full(8, np.nan, np.float32), "graph.bias has values that are not finite"),
    ],
)
def test_parameters_of_another_architecture(name: str, value: np.ndarray | None, message: str):
    architecture = Architecture(TABLE, 8)
    arrays = random_arrays(np.random.default_rng(0), architecture)
    arrays.pop(name, None)
    with pytest.raises(CheckpointError, match=message):
        Policy(architecture, arrays if value is None else arrays | {name: value})


def small_policy(**changes) -> Policy:
    architecture = Architecture(NO_NEST, 4, 1)
    arrays = random_arrays(np.random.default_rng(0), architecture)
    header = Header(commit="abc", seed=3, command="train", metrics={"gain": 0.5})
    extra = {"gain/weight": np.arange(6, dtype=np.float32).reshape(2, 3), "gain/n": np.int64(4)}
    return Policy(architecture, arrays, header, extra | changes)


def test_a_checkpoint_is_read_back(tmp_path: Path):
    policy, path = small_policy(), tmp_path / "policy.npz"
    checkpoint.save(path, policy)
    found = checkpoint.load(path)
    assert (found.architecture, found.header) == (policy.architecture, policy.header)
    for one, other in ((found.arrays, policy.arrays), (found.extra, policy.extra)):
        assert list(one) == list(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    before = path.read_bytes()
    checkpoint.save(path, found)
    assert path.read_bytes() == before
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == {"header", *policy.arrays, *policy.extra}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "policy.npz"
    checkpoint.save(path, small_policy())
    before = path.read_bytes()
    monkeypatch.setattr(checkpoint, "to_bytes", lambda array: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        checkpoint.save(path, small_policy())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("gain", np.zeros(1), "extra array 'gain'; a name such as 'gain/weight' would do"),
        ("gain/x", np.full(1, np.inf), "array 'gain/x' has values that are not finite"),
        ("gain/x", np.zeros(1, np.complex64), "is of dtype 'complex64'; one of"),
        ("gain/x", np.zeros((1,) * 9), "'gain/x' has no shape of up to 8 axes"),
        ("gain/x", np.zeros((3, 1 << 22), np.int16), "extra arrays have 25165.* bytes; up to 16"),
    ],
)
def test_extra_arrays_that_no_checkpoint_has(tmp_path: Path, name, array, message: str):
    with pytest.raises(CheckpointError, match=rf"policy.npz: .*{message}"):
        checkpoint.save(tmp_path / "policy.npz", small_policy(**{name: array}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation_version": 0}, "observation version is 0, .* train the policy anew would do"),
        ({"observation_version": 99}, "observation version is 99, .* a newer looptune would do"),
        ({"action_version": 99}, "action version is 99, .* a newer looptune would do"),
        ({"generator_version": -1}, "generator version is -1; a number"),
        ({"seed": "1"}, "seed is '1'; a number"),
        ({"commit": 7}, "commit is not a text of up to 4096 characters"),
        ({"metrics": []}, "metrics are not up to 256 numbers by name"),
        ({"metrics": {"a": "b"}}, "metric a is 'b'; a number would do"),
        ({"metrics": {"a": float("inf")}}, "metric a is inf; a finite number would do"),
        ({"surprise": 1}, "header is .*surprise"),
    ],
)
def test_headers_that_are_none(change: dict, message: str):
    with pytest.raises(CheckpointError, match=message):
        Header.from_json(Header().to_json() | change)


def written(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that occurs twice
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members:
                archive.writestr(name, content)
    return path


def header_bytes(**changes) -> bytes:
    whole = {
        "schema": 1,
        "architecture": small_policy().architecture.to_json(),
        "header": Header().to_json(),
        "extra": {},
    }
    return npy(np.frombuffer(json.dumps(whole | changes).encode(), np.uint8))


def npy(array: np.ndarray) -> bytes:
    return checkpoint.to_bytes(array)


def text(content: bytes) -> bytes:
    return npy(np.frombuffer(content, np.uint8))


ZEROS = npy(np.zeros(1, np.float32))
BOMB = {"gain/x": {"shape": [1 << 24], "dtype": "float64"}}
REFUSED = {
    "no-header": ([("a.npy", ZEROS)], "has no header.npy; a file written by save"),
    "not-array": ([("run.sh", b"")], "member 'run.sh' is not an array"),
    "twice": ([("a.npy", ZEROS)] * 2, "member 'a.npy' occurs twice"),
    "large-header": ([("header.npy", bytes(1 << 19))], "has 524288 bytes; up to 262144 would do"),
    "float-header": ([("header.npy", ZEROS)], r"header is float32 \(1,\); bytes would do"),
    "no-npy": ([("header.npy", b"{}")], "array 'header' has no description"),
    "objects": (
        [("header.npy", ZEROS.replace(b"'<f4'", b"'|O' "))],
        "array 'header' has columns first or objects",
    ),
    "other-npy": (
        [("header.npy", b"\x93NUMPY\x02\x00" + bytes(20))],
        r"array 'header' is of format \(2, 0\)",
    ),
    "not-json": ([("header.npy", text(b"{"))], "the header is not JSON"),
    "deep": ([("header.npy", text(b"[" * 200000))], "the header is not JSON"),
    "nan": ([("header.npy", text(b'{"schema": NaN}'))], "the header has NaN"),
    "list": ([("header.npy", text(b"[]"))], "the header is a list; an object"),
    "older": ([("header.npy", header_bytes(schema=0))], "schema is 0, .* train the policy anew"),
    "newer": ([("header.npy", header_bytes(schema=2))], "schema is 2, .* a newer looptune"),
    "no-schema": ([("header.npy", text(b"{}"))], "schema is None; a number"),
    "keys": ([("header.npy", header_bytes(more=1))], "checkpoint is .*more.*; an object of"),
    "extra": ([("header.npy", header_bytes(extra=[]))], "extra is not an object of up to 256"),
    "extra-form": (
        [("header.npy", header_bytes(extra={"gain/x": 1}))],
        "extra array 'gain/x' is int; an object",
    ),
    "extra-axis": (
        [("header.npy", header_bytes(extra={"gain/x": {"shape": [-1], "dtype": "int8"}}))],
        "an axis of extra array 'gain/x' is -1",
    ),
    "bomb": ([("header.npy", header_bytes(extra=BOMB))], "extra arrays have 134217728 bytes"),
    "missing": ([("header.npy", header_bytes())], "array 'axis_first.bias' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_no_checkpoint(tmp_path: Path, case: str):
    members, message = REFUSED[case]
    path = written(tmp_path / "odd.npz", members)
    with pytest.raises(CheckpointError, match=rf"odd\.npz: .*{message}"):
        checkpoint.load(path)


def members_written(tmp_path: Path) -> dict[str, bytes]:
    checkpoint.save(tmp_path / "policy.npz", small_policy())
    with zipfile.ZipFile(tmp_path / "policy.npz") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(1 << 20), "array 'graph.bias' has 1048576 bytes; 16 and a short prefix would do"),
        (npy(np.zeros(8, np.float16)), r"'graph.bias' is float16 \(8,\), 16 bytes; float32 \(4,\)"),
        (npy(np.zeros((2, 2), np.float32)), r"is float32 \(2, 2\), 16 bytes; float32 \(4,\)"),
        (npy(np.zeros(4, np.float32)) + b"\0", r"\(4,\), 17 bytes; float32 \(4,\) would do"),
        (npy(np.zeros(4, ">f4")), r"'graph.bias' is >f4 \(4,\)"),
        (npy(np.full(4, np.nan, np.float32)), "graph.bias has values that are not finite"),
    ],
)
def test_arrays_that_are_not_as_promised(tmp_path: Path, content: bytes, message: str):
    members = members_written(tmp_path) | {"graph.bias.npy": content}
    path = written(tmp_path / "odd.npz", list(members.items()))
    with pytest.raises(CheckpointError, match=rf"odd\.npz: .*{message}"):
        checkpoint.load(path)


def test_an_array_of_no_use(tmp_path: Path):
    members = members_written(tmp_path) | {"more.npy": ZEROS}
    path = written(tmp_path / "odd.npz", list(members.items()))
    with pytest.raises(CheckpointError, match=r"odd\.npz: array 'more' is of no use"):
        checkpoint.load(path)


def test_extra_arrays_must_be_finite(tmp_path: Path):
    members = members_written(tmp_path)
    members["gain/weight.npy"] = npy(np.full((2, 3), np.inf, np.float32))
    path = written(tmp_path / "odd.npz", list(members.items()))
    with pytest.raises(CheckpointError, match="'gain/weight' has values that are not finite"):
        checkpoint.load(path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CheckpointError, match=r"none\.npz: No such file.*; a readable file"):
        checkpoint.load(tmp_path / "none.npz")
    path = tmp_path / "odd.npz"
    path.write_bytes(b"text")
    with pytest.raises(CheckpointError, match=r"odd\.npz: File is not a zip file; a file written"):
        checkpoint.load(path)
    checkpoint.save(path, small_policy())
    damaged = bytearray(path.read_bytes())
    at = damaged.index(b"header.npy") + 60
    damaged[at : at + 40] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"odd\.npz: member 'header.npy' is damaged"):
        checkpoint.load(path)
    monkeypatch.setattr(checkpoint, "LARGEST_FILE", 10)
    with pytest.raises(CheckpointError, match=r"odd\.npz: \d+ bytes; a checkpoint has up to 10"):
        checkpoint.load(path)


def test_other_compressions_are_refused(tmp_path: Path):
    path = tmp_path / "odd.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("header.npy", header_bytes())
    with pytest.raises(CheckpointError, match=r"'header\.npy' is encrypted or not deflated"):
        checkpoint.load(path)


def test_a_header_too_long_to_save(tmp_path: Path):
    policy = small_policy()
    header = Header(metrics={"m" * 4000 + str(i): 1.0 for i in range(100)})
    long = Policy(policy.architecture, policy.arrays, header)
    with pytest.raises(CheckpointError, match=r"bytes of the header is .*; a number from 1 to"):
        checkpoint.save(tmp_path / "policy.npz", long)


def test_every_truncation_and_many_damages_are_refused_or_harmless(tmp_path: Path):
    path = tmp_path / "policy.npz"
    checkpoint.save(path, small_policy())
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(whole)
        broken[rng.integers(len(broken))] ^= 1 << rng.integers(8)
        path.write_bytes(broken[: rng.integers(len(broken))] if rng.random() < 0.3 else broken)
        with contextlib.suppress(CheckpointError):
            checkpoint.load(path)
