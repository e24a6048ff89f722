"""Fits the polynomials of `looptune.lower.epilogue` and measures the activations' errors.

python -m experiments.activations --fit   prints the coefficients
python -m experiments.activations         prints, per activation and dtype, the largest error in
                                          units in the last place over a grid

Both need mpmath.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np

from looptune.lower.epilogue import FUNCTIONS, TAIL_SCALE
from looptune.tune import optimize
from looptune.workloads import einsum, fuse

POINTS = 20_000
DEGREES = {"float32": (5, 9), "float64": (10, 22)}
EXACT: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: max(x, 0),
    "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
    "tanh": mp.tanh,
    "gelu": lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
}


def fit() -> None:
    """Interpolate at Chebyshev's points, within a small factor of the least largest error."""

    def interpolated(function: Callable[[Any], Any], low: Any, high: Any, degree: int) -> None:
        middle, half, count = (low + high) / 2, (high - low) / 2, degree + 1
        nodes = [middle + half * mp.cos(mp.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
        powers = mp.matrix(count, count)
        for i, node in enumerate(nodes):
            for j in range(count):
                powers[i, j] = node**j
        found = mp.lu_solve(powers, mp.matrix([function(node) for node in nodes]))
        print("    (" + ", ".join(mp.nstr(found[j], 17) for j in range(count)) + "),")

    for dtype, (exponential, tail) in DEGREES.items():
        reach = mp.log(2) / 2 * mp.mpf("1.001")
        print(f"{dtype}: (exp(r) - 1) / r, then the normal tail times its scale")
        interpolated(lambda r: mp.expm1(r) / r if r else mp.mpf(1), -reach, reach, exponential)

        def scaled_tail(v: Any) -> Any:
            t = (2 / (1 - v) - 1) / mp.mpf(TAIL_SCALE)
            return mp.exp(t * t / 2) * mp.erfc(t / mp.sqrt(2)) / (1 - v)

        last = 1 - 2 / (1 + mp.mpf(FUNCTIONS[dtype].negligible) * TAIL_SCALE)
        interpolated(scaled_tail, mp.mpf(-1), last, tail)


def worst_error(kind: str, dtype: str) -> float:
    """Largest error over the grid, in units in the last place of the exact result."""
    reach = 12.0 if dtype == "float32" else 36.0
    x = np.linspace(-reach, reach, POINTS).astype(dtype)
    kernel = optimize(fuse(einsum("i->i", x.shape, dtype=dtype), kind), verify=False)
    found = np.asarray(kernel(x))
    results = [EXACT[kind](mp.mpf(value)) for value in x.tolist()]
    exact = np.array([float(result) for result in results])
    unit = np.maximum(np.spacing(np.abs(exact).astype(dtype)), np.finfo(dtype).tiny)
    errors = [abs(mp.mpf(float(f)) - r) / u for f, r, u in zip(found, results, unit, strict=True)]
    return float(max(errors))


def main() -> None:
    """Fit, or measure."""
    mp.mp.dps = 50
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    if parser.parse_args().fit:
        fit()
        return
    for dtype in DEGREES:
        for kind in EXACT:
            print(f"{dtype} {kind}: {worst_error(kind, dtype):.2f} ulp")


if __name__ == "__main__":
    main()
