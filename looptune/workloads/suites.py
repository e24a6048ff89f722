"""Suites of real operator shapes: `load("core")`, and their plans.

The shapes are those of workloads.json beside this file, each with its public source; a file of
the same form works, too.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from looptune.errors import SpecError, UnsupportedError
from looptune.ir import Plan
from looptune.workloads.capsule import capsule_conv2d
from looptune.workloads.conv import conv1d, conv2d, conv3d
from looptune.workloads.einsum import check_dtype, einsum
from looptune.workloads.epilogue import fuse
from looptune.workloads.matmul import batched_matmul, matmul
from looptune.workloads.transposed import conv_transpose2d

Record = Mapping[str, Any]
LOOPTUNE_SIZES = range(64, 257, 16)


@dataclass(frozen=True)
class Workload:
    """One entry of a suite; `record` is the whole entry of the file. flops count 2 a product."""

    id: str
    suite: str
    kind: str
    dtype: str
    flops: int
    min_bytes: int
    core: bool
    record: Record = field(hash=False)

    def plan(self) -> Plan:
        """The plan; raises `UnsupportedError` for kinds and dtypes that are not contractions,
        `SpecError` for a record that lacks a size.
        """
        if self.kind not in PLANS:
            raise UnsupportedError(f"{self.id}: {self.kind} is not supported; {sorted(PLANS)} are")
        check_dtype(self.dtype)
        try:
            return PLANS[self.kind](self.record)
        except KeyError as missing:
            raise SpecError(f"{self.id}: a {self.kind} needs {missing} in its record") from missing
        except (TypeError, AttributeError, ZeroDivisionError) as reason:
            raise SpecError(f"{self.id}: its record is no {self.kind}: {reason}") from reason


@lru_cache(maxsize=1)
def shipped() -> tuple[Workload, ...]:
    """Every workload of the shipped file."""
    return parse_records((files("looptune.workloads") / "workloads.json").read_text())


def parse_records(text: str) -> tuple[Workload, ...]:
    """Workloads of a JSON list; raises `SpecError` for entries that lack a field."""
    found = []
    try:
        records = json.loads(text)
        if not records:
            raise ValueError("it is empty")
        for record in records:
            for name in ("id", "kind", "dtype"):
                if not isinstance(record[name], str):
                    raise TypeError(f"{name} is {record[name]!r}, not a string")
            found.append(
                Workload(
                    id=record["id"],
                    suite=record.get("suite", ""),
                    kind=record["kind"],
                    dtype=record["dtype"],
                    flops=record.get("flops", 0),
                    min_bytes=record.get("min_bytes", 0),
                    core=record.get("core", False),
                    record=record,
                )
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise SpecError(
            f"not a list of workloads with id, kind, dtype and shape: {type(reason).__name__} "
            f"{reason} at entry {len(found)}"
        ) from reason
    return tuple(found)


def load(name_or_path: str | os.PathLike[str]) -> tuple[Workload, ...]:
    """The workloads of a suite of the shipped file, of "core", "looptune-test" (LoopTune's 25
    test matmuls), "looptune-all" (all its 2,197), or of a JSON file of the same form.

    Raises `SpecError` with near names.
    """
    name = os.fspath(name_or_path)
    if name == "core":
        return tuple(workload for workload in shipped() if workload.core)
    if name == "looptune-all":
        return tuple(looptune_matmul(m, k, n) for m, k, n in product(LOOPTUNE_SIZES, repeat=3))
    suite = "looptune-mm-test" if name == "looptune-test" else name
    found = tuple(workload for workload in shipped() if workload.suite == suite)
    if found:
        return found
    if name.endswith(".json") or Path(name).is_file():
        try:
            return parse_records(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as reason:
            raise SpecError(f"suite {name!r}: {reason}") from reason
    names = sorted({"core", "looptune-test", "looptune-all", *(w.suite for w in shipped())})
    near = difflib.get_close_matches(name, names, 3)
    raise SpecError(f"no suite {name!r}; {f'near it: {near}' if near else f'there are {names}'}")


def looptune_matmul(m: int, k: int, n: int) -> Workload:
    """One matmul of LoopTune's data set; names read M_K_N."""
    name = f"mm{m}_{k}_{n}"
    shape = {"M": m, "N": n, "K": k, "trans_a": False, "trans_b": False, "order": "row"}
    record = {"id": f"looptune-all/{name}", "kind": "matmul", "dtype": "float32", "shape": shape}
    min_bytes = 4 * (m * k + k * n + m * n)
    return Workload(
        f"looptune-all/{name}", "looptune-all", "matmul", "float32", 2 * m * n * k, min_bytes,
        False, record,
    )  # fmt: skip


def matmul_plan(record: Record) -> Plan:
    """A matmul; a column-major one is the row-major product of the transposes, B first."""
    shape = record["shape"]
    m, n, k = shape["M"], shape["N"], shape["K"]
    flags = shape.get("trans_a", False), shape.get("trans_b", False)
    strides = tuple(strides_of(shape, name) for name in ("stride_a", "stride_b", "stride_c"))
    if shape.get("order") == "col":
        m, n = n, m
        flags = flags[1], flags[0]
        strides = strides[1], strides[0], strides[2]
    return matmul(
        m, n, k, trans_a=flags[0], trans_b=flags[1], dtype=record["dtype"],
        strides_a=strides[0], strides_b=strides[1], strides_out=strides[2],
    )  # fmt: skip


def strides_of(shape: Record, name: str) -> tuple[int, ...] | None:
    """Strides of an operand, where the record has them."""
    return tuple(shape[name]) if name in shape else None


def batched_plan(record: Record) -> Plan:
    """A batched matmul."""
    shape = record["shape"]
    return batched_matmul(
        shape["B"], shape["M"], shape["N"], shape["K"],
        trans_a=shape.get("trans_a", False), trans_b=shape.get("trans_b", False),
        dtype=record["dtype"], strides_a=strides_of(shape, "stride_a"),
        strides_b=strides_of(shape, "stride_b"), strides_out=strides_of(shape, "stride_c"),
    )  # fmt: skip


def einsum_plan(record: Record) -> Plan:
    """An einsum with the sizes of its labels."""
    return einsum(record["einsum"], sizes=record["shape"]["sizes"], dtype=record["dtype"])


def outer_plan(record: Record) -> Plan:
    """An outer product of two vectors."""
    rows, columns = record["shape"]["sizes"].values()
    return einsum("m,n->mn", (rows,), (columns,), dtype=record["dtype"])


IMAGES = {1: ("L",), 2: ("H", "W"), 3: ("D", "H", "W")}
KERNELS = {1: ("R",), 2: ("R", "S"), 3: ("T", "R", "S")}


def conv_plan(record: Record, transpose: bool = False) -> Plan:
    """A convolution of one to three dimensions, or a transposed one of two."""
    shape = record["shape"]
    rank = 3 if "D" in shape else 2 if "H" in shape else 1
    image = tuple(shape[name] for name in IMAGES[rank])
    kernel = tuple(shape[name] for name in KERNELS[rank])
    layout = record.get("layout")
    batch, channels, filters = shape["N"], shape["C"], shape["K"]
    groups = shape.get("groups", 1)
    last = layout is not None and layout.endswith("C")
    x = (batch, *image, channels) if last else (batch, channels, *image)
    options = {
        "stride": tupled(shape["stride"]),
        "padding": tupled(shape["padding"]),
        "dilation": tupled(shape.get("dilation", 1)),
        "groups": groups,
        "layout": layout,
        "dtype": record["dtype"],
    }
    if transpose:
        return conv_transpose2d(x, (channels, filters // groups, *kernel), **options)
    build = {1: conv1d, 2: conv2d, 3: conv3d}[rank]
    return build(x, (filters, channels // groups, *kernel), **options)


def tupled(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def capsule_plan(record: Record) -> Plan:
    """Capsule convolution: a convolution whose elements are small matrices, summed over k.

    out[n, h, w, i, j, o] = sum x[n, h * s + r, w * s + q, i, k, c] * w[r, q, k, j, c, o].
    """
    shape = record["shape"]
    return capsule_conv2d(
        (shape["N"], shape["H"], shape["W"], shape["CI"]),
        (shape["R"], shape["S"], shape["CO"]),
        capsule=shape["capsule"],
        stride=tupled(shape["stride"]),
        padding=tupled(shape["padding"]),
        dtype=record["dtype"],
    )


PLANS: dict[str, Callable[[Record], Plan]] = {
    "matmul": matmul_plan,
    "gemv": matmul_plan,
    "batch_matmul": batched_plan,
    "outer_product": outer_plan,
    "einsum": einsum_plan,
    "tensor_contraction": einsum_plan,
    "mttkrp": einsum_plan,
    "conv1d": conv_plan,
    "conv2d": conv_plan,
    "conv3d": conv_plan,
    "conv2d_winograd": conv_plan,
    "grouped_conv1d": conv_plan,
    "grouped_conv2d": conv_plan,
    "dilated_conv2d": conv_plan,
    "depthwise_conv2d": conv_plan,
    "conv_transpose2d": lambda record: conv_plan(record, transpose=True),
    "conv2d_bn_relu": lambda record: fuse(conv_plan(record), "batchnorm,relu"),
    "capsule_conv2d": capsule_plan,
}
