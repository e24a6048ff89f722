"""Numbers that people give, as Python's own: NumPy's scalars are numbers, truth values are not."""

from __future__ import annotations

import math
from operator import index
from typing import Any

import numpy as np


def whole(value: Any) -> int | None:
    """A whole number as an int; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def real(value: Any) -> float | None:
    """A number as an int or a float; None for anything else, and for what no float holds."""
    if isinstance(value, int | np.integer):
        found: float | None = whole(value)
    elif isinstance(value, float | np.floating):
        found = float(value)
    else:
        return None
    try:
        return None if found is None or math.isnan(found) else found
    except OverflowError:
        return None
