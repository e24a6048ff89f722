"""looptune: fast, verified CPU kernels for tensor contractions.

`optimize` makes a kernel; `einsum`, `matmul` and `conv2d` compute on arrays; `compile` builds a
kernel from a nest and a schedule of your own. `looptune.workloads` describes problems.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from looptune.api import clear_cache, conv2d, einsum, matmul
    from looptune.choose import Budget
    from looptune.errors import (
        ArgumentError,
        ArgumentTypeError,
        CheckpointError,
        DatabaseError,
        ExecutableMemoryError,
        LooptuneError,
        LoweringError,
        MeasurementError,
        NestError,
        ReferenceMemoryError,
        ScheduleError,
        SpecError,
        UnsupportedError,
        UnsupportedHostError,
        VerificationError,
    )
    from looptune.ir import Axis, Dim, Nest, Operand, Plan, Tensor
    from looptune.runtime.kernel import Kernel
    from looptune.schedule import Schedule, replay
    from looptune.target import Target
    from looptune.tune import compile, optimize

__version__ = "0.1.0"

# A wheel nests `envs` and the like here; a source checkout keeps them beside this package.
if not (Path(__file__).parent / "envs").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

# Name -> the module that has it: loaded on first use, so that importing looptune stays cheap.
_HOMES = {
    name: module
    for module, names in {
        "api": "clear_cache conv2d einsum matmul",
        "choose": "Budget",
        "errors": "ArgumentError ArgumentTypeError CheckpointError DatabaseError "
        "ExecutableMemoryError LooptuneError LoweringError MeasurementError NestError "
        "ReferenceMemoryError ScheduleError SpecError UnsupportedError UnsupportedHostError "
        "VerificationError",
        "ir": "Axis Dim Nest Operand Plan Tensor",
        "runtime.kernel": "Kernel",
        "schedule": "Schedule replay",
        "target": "Target",
        "tune": "compile optimize",
    }.items()
    for name in names.split()
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> object:
    """Load the module that has `name`, or the submodule of that name."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"looptune.{_HOMES[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"looptune.{name}"):
        value = importlib.import_module(f"looptune.{name}")
    else:
        raise AttributeError(f"module 'looptune' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
