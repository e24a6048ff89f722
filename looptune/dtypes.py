"""Element types: their sizes, what sums of them are kept in, and what NumPy calls them.

Narrow types exist in memory only. A nest computes in the accumulator type of its operands:
float32 for bfloat16 and float16, int32 for int8. `int16x2` is what packs of int8 hold, and no
argument can: two int16 to be multiplied with two others, the second of them 0.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

DType = Literal["float32", "float64", "float16", "bfloat16", "int8", "int32", "int16x2"]

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int32": 4,
    "int16x2": 4,
}
FLOAT32_LARGEST = (2 - 2.0**-23) * 2.0**127
ARGUMENTS = ("float32", "float64", "float16", "bfloat16", "int8", "int32")
ACCUMULATOR: dict[DType, DType] = {
    "float32": "float32",
    "float64": "float64",
    "float16": "float32",
    "bfloat16": "float32",
    "int8": "int32",
    "int32": "int32",
    "int16x2": "int32",
}


def is_narrow(dtype: DType) -> bool:
    """Whether values of this type are converted when they are loaded and stored."""
    return ITEM_BYTES[dtype] < ITEM_BYTES[ACCUMULATOR[dtype]]


def is_whole(dtype: DType) -> bool:
    """Whether the type holds whole numbers."""
    return dtype in ("int8", "int32", "int16x2")


def fits(dtype: DType, value: float) -> bool:
    """Whether a number is infinite, none, or within what the floating-point type holds.

    The types of whole numbers hold what their own rules say.
    """
    try:
        largest = abs(float(value))
    except OverflowError:
        return False
    return dtype != "float32" or not FLOAT32_LARGEST < largest < math.inf


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The NumPy type; bfloat16 is that of ml_dtypes, imported when it is first wanted."""
    if dtype == "bfloat16":
        from ml_dtypes import bfloat16

        found: np.dtype[np.generic] = np.dtype(bfloat16)
        return found
    return np.dtype("int32" if dtype == "int16x2" else dtype)


def poison(dtype: DType) -> float:
    """What an unwritten element is given, so that it shows: NaN, or the least whole number."""
    return -(2.0 ** (8 * ITEM_BYTES[dtype] - 1)) if is_whole(dtype) else float("nan")
