"""A policy in a file: a `.npz` of its parameters and a JSON header, nothing that is executed.

`header.npy` holds the JSON text as bytes; the parameters have the architecture's names; arrays of
other models are named with a slash, such as `gain/weight`, and described in the header. What the
header promises is compared with the sizes in the archive's directory before anything large is
decompressed. `numpy.load(path)` reads such a file, too.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from looptune.errors import CheckpointError

from .architecture import Architecture, check_keys, check_size
from .header import Header, check_version
from .inference import Policy

SCHEMA = 1
HEADER = "header"
LARGEST_FILE = 1 << 26
LARGEST_HEADER = 1 << 18
LARGEST_EXTRA = 1 << 24
MOST_EXTRA = 256
MOST_AXES = 8
PREFIX = 4096  # more than the description in front of an array's bytes takes
EXTRA_NAME = re.compile(r"[a-z0-9_]{1,32}/[A-Za-z0-9_.]{1,64}")
DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8")

Form = tuple[tuple[int, ...], str]


def save(path: str | Path, policy: Policy) -> None:
    """Write a policy's file in one step: it is the old one or the new one, never a part.

    Raises `CheckpointError` for what `load` would refuse.
    """
    path = Path(path)
    try:
        members = members_of(policy)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, array in members.items():
                    # A fixed date: the same policy gives the same bytes.
                    entry = zipfile.ZipInfo(f"{name}.npy")
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, to_bytes(array))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def members_of(policy: Policy) -> dict[str, np.ndarray]:
    """All arrays of a policy's file, the header among them."""
    extra = {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in policy.extra.items()
    }
    for name, array in policy.extra.items():
        check_finite(name, array)
    whole = {
        "schema": SCHEMA,
        "architecture": policy.architecture.to_json(),
        "header": policy.header.to_json(),
        "extra": extra,
    }
    read_extra(extra)
    text = json.dumps(whole, allow_nan=False).encode()
    check_size("bytes of the header", len(text), 1, LARGEST_HEADER)
    return {HEADER: np.frombuffer(text, np.uint8), **policy.arrays, **policy.extra}


def to_bytes(array: np.ndarray) -> bytes:
    """An array as a `.npy` file has it."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array, order="C"), (1, 0), allow_pickle=False)
    return stream.getvalue()


def load(path: str | Path) -> Policy:
    """The policy of a file.

    Raises `CheckpointError`, naming the file, for one that cannot be read, is no checkpoint, or
    is of another version than this looptune's.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            refuse(f"{size} bytes; a checkpoint has up to {LARGEST_FILE}")
        with zipfile.ZipFile(path) as archive:
            return read(archive)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}; a readable file would do"
        ) from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: {error}; a file written by save would do") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read(archive: zipfile.ZipFile) -> Policy:
    """The policy in an opened archive; nothing is decompressed whose size is not as it should."""
    entries = directory(archive)
    if HEADER not in entries:
        refuse(f"has no {HEADER}.npy; a file written by save would do")
    text = content(archive, entries[HEADER], LARGEST_HEADER)
    form, raw = split_array(HEADER, text)
    if form != ((len(raw),), "uint8"):
        refuse(f"{HEADER} is {form[1]} {form[0]}; bytes would do")
    whole = parse(raw)
    check_version("schema", whole.get("schema"), SCHEMA)
    check_keys("checkpoint", whole, {"schema", "architecture", "header", "extra"})
    architecture = Architecture.from_json(whole["architecture"])
    header = Header.from_json(whole["header"])
    extra = read_extra(whole["extra"])
    forms: dict[str, Form] = {
        name: (shape, "float32") for name, shape in architecture.shapes.items()
    }
    forms |= extra
    check_directory(entries, forms)
    arrays = {name: member(archive, entries[name], name, form) for name, form in forms.items()}
    for name in extra:
        check_finite(name, arrays[name])
    parameters = {name: arrays[name] for name in architecture.shapes}
    return Policy(architecture, parameters, header, {name: arrays[name] for name in extra})


def directory(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by the names of their arrays."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename or name in entries:
            what = "occurs twice" if name in entries else "is not an array"
            refuse(f"member {entry.filename!r} {what}; one .npy for each array would do")
        if entry.flag_bits & 1 or entry.compress_type not in (
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        ):
            refuse(
                f"member {entry.filename!r} is encrypted or not deflated; plain deflate would do"
            )
        entries[name] = entry
    return entries


def check_directory(entries: Mapping[str, zipfile.ZipInfo], forms: Mapping[str, Form]) -> None:
    """Raise unless the directory lists the arrays of the header, each as large as it must be."""
    if odd := sorted(set(entries) ^ {HEADER, *forms}):
        what = "missing" if odd[0] in forms else "of no use"
        refuse(f"array {odd[0]!r} is {what}; those of the header's architecture and extra would do")
    for name, form in forms.items():
        size, bare = entries[name].file_size, byte_size(form)
        if not bare < size <= bare + PREFIX:
            refuse(f"array {name!r} has {size} bytes; {bare} and a short prefix would do")


def byte_size(form: Form) -> int:
    """Bytes of an array's elements."""
    return math.prod(form[0]) * np.dtype(form[1]).itemsize


def read_extra(value: object) -> dict[str, Form]:
    """Shapes and dtypes of other models' arrays, by name, from the header's JSON."""
    if not isinstance(value, dict) or len(value) > MOST_EXTRA:
        refuse(f"extra is not an object of up to {MOST_EXTRA} arrays")
    found: dict[str, Form] = {}
    for name, described in value.items():
        if not EXTRA_NAME.fullmatch(name):
            refuse(f"extra array {name[:100]!r}; a name such as 'gain/weight' would do")
        form = check_keys(f"extra array {name!r}", described, {"shape", "dtype"})
        if form["dtype"] not in DTYPES:
            refuse(f"extra array {name!r} is of dtype {form['dtype']!r}; one of {DTYPES} would do")
        if not isinstance(form["shape"], list) or len(form["shape"]) > MOST_AXES:
            refuse(f"extra array {name!r} has no shape of up to {MOST_AXES} axes")
        for size in form["shape"]:
            check_size(f"an axis of extra array {name!r}", size, 0, LARGEST_EXTRA)
        found[name] = tuple(form["shape"]), form["dtype"]
    total = sum(map(byte_size, found.values()))
    if total > LARGEST_EXTRA:
        refuse(f"extra arrays have {total} bytes; up to {LARGEST_EXTRA} would do")
    return found


def parse(raw: bytes) -> dict[str, object]:
    """The header's JSON object; raises for anything else, NaN among it."""
    try:
        found = json.loads(raw, parse_constant=lambda name: refuse(f"the header has {name}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the header is not JSON ({error}); a file of save would do"
        ) from error
    if not isinstance(found, dict):
        refuse(f"the header is a {type(found).__name__}; an object would do")
    return found


def content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    """A member's bytes, no more than the directory says, and that no more than `most`."""
    if entry.file_size > most:
        refuse(f"member {entry.filename!r} has {entry.file_size} bytes; up to {most} would do")
    try:
        with archive.open(entry) as stream:
            return stream.read(entry.file_size)
    except (zlib.error, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"member {entry.filename!r} is damaged ({error})") from error


def member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, form: Form) -> np.ndarray:
    """An array of the form that it must have."""
    found, raw = split_array(name, content(archive, entry, byte_size(form) + PREFIX))
    if found != form or len(raw) != byte_size(form):
        refuse(
            f"array {name!r} is {found[1]} {found[0]}, {len(raw)} bytes; "
            f"{form[1]} {form[0]} would do"
        )
    return np.frombuffer(raw, form[1]).reshape(form[0]).copy()


def split_array(name: str, text: bytes) -> tuple[Form, bytes]:
    """What a `.npy` says of its array, and the bytes after that; nothing is allocated for it."""
    stream = io.BytesIO(text)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            refuse(f"array {name!r} is of format {version}; (1, 0) would do")
        shape, transposed, dtype = np.lib.format.read_array_header_1_0(stream)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise CheckpointError(f"array {name!r} has no description ({error})") from error
    if transposed or dtype.hasobject:
        refuse(f"array {name!r} has columns first or objects; rows of numbers would do")
    return (shape, str(dtype)), text[stream.tell() :]


def check_finite(name: str, array: np.ndarray) -> None:
    """Raise `CheckpointError` for an array with an infinity or a NaN."""
    if not np.isfinite(array).all():
        refuse(f"array {name!r} has values that are not finite")


def refuse(why: str) -> NoReturn:
    """Raise `CheckpointError`."""
    raise CheckpointError(why)
