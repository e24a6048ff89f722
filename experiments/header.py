"""What every result says of itself: machine, versions, commit, command and date."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import looptune
from looptune.host import fingerprint
from looptune.lower import GENERATOR_VERSION
from looptune.provenance import commit
from looptune.target import Target

LIBRARIES = (
    "numpy", "torch", "apache-tvm", "apache-tvm-ffi", "xgboost-cpu", "loop-tool", "llvmlite",
)  # fmt: skip


def header(command: str, target: Target) -> dict[str, Any]:
    """All that is said of a run before what it asked for and what it found."""
    machine = fingerprint()
    return {
        "schema": 1,
        "machine": {**asdict(machine), "digest": machine.digest, "target": target.name},
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
    }


def versions() -> dict[str, str]:
    """Of Python, of ours with its generator, and of the libraries that are here."""
    found = {
        "python": platform.python_version(), "looptune": looptune.__version__,
        "generator": str(GENERATOR_VERSION),
    }  # fmt: skip
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def command_of(name: str, argv: Sequence[str] | None) -> str:
    """What was typed to run an experiment."""
    return shlex.join(["python", "-m", name, *(sys.argv[1:] if argv is None else argv)])
