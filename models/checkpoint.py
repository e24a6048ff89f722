"""A policy in one file: NumPy arrays and a JSON header, no pickles.

What a file claims is checked before anything is unpacked: its members are those of its
architecture, each of the size and dtype that belong to it.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from looptune.errors import CheckpointError
from looptune.files import replaced
from looptune.graph import OBSERVATION_VERSION
from looptune.models import gain
from looptune.models.architecture import Architecture, architecture_from_json
from looptune.models.gain import GainModel
from looptune.models.inference import Policy

SCHEMA = 1
SHIPPED = "policy.npz"
LONGEST_HEADER = 1 << 20
NPY_OVERHEAD = 256  # bytes at most that .npy puts before the data
PREFIX = "gain/"


def save(path: str | os.PathLike[str], policy: Policy) -> None:
    """Write a policy; the file is complete or not there. Raises `CheckpointError`."""
    header = {
        **policy.header, "schema": SCHEMA, "observation": OBSERVATION_VERSION,
        "architecture": policy.architecture.to_json(), "gain": policy.gain is not None,
    }  # fmt: skip
    arrays = dict(policy.arrays)
    if policy.gain is not None:
        arrays.update({PREFIX + name: array for name, array in policy.gain.arrays.items()})
    shapes = shapes_of(policy.architecture.parameters, header["gain"])
    if unknown := sorted(set(arrays) - set(shapes)):
        raise CheckpointError(f"{path}: {unknown[0]} is no array of its architecture")
    for name, shape in shapes.items():
        check(path, name, arrays.get(name), shape)
    try:
        text = json.dumps(header, allow_nan=False).encode()
    except (TypeError, ValueError) as reason:
        raise CheckpointError(f"{path}: its header is no JSON: {reason}") from reason
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: its header takes {len(text)} bytes; {LONGEST_HEADER} at most"
        )
    members: dict[str, Any] = {"header": np.frombuffer(text, np.uint8), **arrays}
    with replaced(path) as file:
        np.savez_compressed(file, **members)


def shapes_of(
    parameters: Mapping[str, tuple[int, ...]], with_gain: object
) -> dict[str, tuple[int, ...]]:
    """All arrays that a file holds beside its header."""
    extra = {PREFIX + name: shape for name, shape in gain.shapes().items()} if with_gain else {}
    return {**parameters, **extra}


def load(path: str | os.PathLike[str] | None = None) -> Policy:
    """The policy of a file, of the shipped one unless told otherwise.

    Raises `CheckpointError` for a file that is missing, damaged, of another version, or holds
    anything but what its header says.
    """
    place = str(files("looptune.checkpoints") / SHIPPED) if path is None else os.fspath(path)
    try:
        with zipfile.ZipFile(place) as archive:
            names = [entry.filename for entry in archive.infolist()]
            for entry in archive.infolist():
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise CheckpointError(f"{place}: {entry.filename} is not compressed by deflate")
            if len(names) != len(set(names)):
                raise CheckpointError(f"{place}: a member is there twice")
            header = header_of(place, archive)
            architecture = architecture_of(place, header)
            shapes = shapes_of(architecture.parameters, header.get("gain"))
            extra = set(names) - {f"{name}.npy" for name in shapes} - {"header.npy"}
            if extra:
                raise CheckpointError(f"{place}: unknown members {sorted(extra)[:3]}")
            arrays = {name: array_of(place, archive, name, size) for name, size in shapes.items()}
    except (ValueError, EOFError, zlib.error, RecursionError) as reason:
        raise CheckpointError(f"{place}: damaged: {reason}") from reason
    except (OSError, zipfile.BadZipFile, RuntimeError) as reason:
        raise CheckpointError(f"{place}: no checkpoint: {reason}") from reason
    own = {name: array for name, array in arrays.items() if not name.startswith(PREFIX)}
    rest = {name.removeprefix(PREFIX): arrays[name] for name in arrays.keys() - own.keys()}
    return Policy(architecture, own, header, GainModel(rest) if rest else None)


def header_of(place: str, archive: zipfile.ZipFile) -> dict[str, Any]:
    """The header of a file, of the versions that this library reads."""
    raw = member(place, archive, "header", LONGEST_HEADER)
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raise CheckpointError(f"{place}: its header is no text")
    header = json.loads(raw.tobytes())
    if not isinstance(header, dict):
        raise CheckpointError(f"{place}: its header is {type(header).__name__}, not an object")
    wanted = {"schema": SCHEMA, "observation": OBSERVATION_VERSION}
    for name, version in wanted.items():
        if header.get(name) != version:
            raise CheckpointError(
                f"{place}: {name} {header.get(name)!r}; this looptune reads {version}: a "
                "checkpoint trained with it would do"
            )
    return header


def architecture_of(place: str, header: Mapping[str, Any]) -> Architecture:
    """The architecture that a header tells."""
    try:
        return architecture_from_json(header.get("architecture"))
    except CheckpointError as reason:
        raise CheckpointError(f"{place}: {reason}") from reason


def array_of(place: str, archive: zipfile.ZipFile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of just this shape."""
    found = member(place, archive, name, 4 * int(np.prod(shape, dtype=np.int64)))
    check(place, name, found, shape)
    return found


def member(place: str, archive: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    """An array that takes at most so many bytes; nothing larger is unpacked."""
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise CheckpointError(f"{place}: it lacks {name}") from None
    if entry.file_size > most + NPY_OVERHEAD:
        raise CheckpointError(f"{place}: {name} claims {entry.file_size} bytes, not {most}")
    with archive.open(entry) as file:
        data = file.read(most + NPY_OVERHEAD + 1)
    if len(data) != entry.file_size:
        raise CheckpointError(f"{place}: {name} is not of the size that it claims")
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise CheckpointError(f"{place}: {name} is a .npy of version {version}; (1, 0) would do")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    # NumPy would allocate whatever the description claims before it reads.
    if dtype.itemsize * math.prod(shape) != len(data) - stream.tell():
        raise CheckpointError(f"{place}: {name} is not of the shape {shape} that it claims")
    stream.seek(0)
    return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def check(place: object, name: str, array: object, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` unless an array is float32, of a shape, and finite; what is divided
    by must be positive."""
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{place}: {name} is not there")
    if array.dtype != np.float32 or array.shape != shape:
        raise CheckpointError(
            f"{place}: {name} is {array.dtype} {array.shape}; float32 {shape} would do"
        )
    if not np.isfinite(array).all():
        raise CheckpointError(f"{place}: {name} holds a number that is not finite")
    if name == PREFIX + "scale" and array.min() <= 0:
        raise CheckpointError(f"{place}: {name} holds {array.min()}; positive numbers would do")
