"""Blocks transposed in registers: every size, with absent rows and unwanted columns."""

from __future__ import annotations

import numpy as np
import pytest

from looptune.lower.transpose import transpose
from looptune.program import Pick, Zip


def apply(ops, registers, part):
    """The shuffles on rows of a matrix, by their definitions alone."""
    for op in ops:
        a, b = (registers[r].reshape(-1, part) for r in (op.a, op.b))
        match op:
            case Zip(dst, unit=unit, high=high):
                start = part // 2 if high else 0
                lanes = [
                    x[p][start + u * unit : start + (u + 1) * unit]
                    for p in range(len(a))
                    for u in range(part // 2 // unit)
                    for x in (a, b)
                ]
                registers[dst] = np.concatenate(lanes)
            case Pick(dst, picks=picks):
                registers[dst] = np.concatenate([a[p] for p in picks] + [b[p] for p in picks])


@pytest.mark.parametrize(("lanes", "part"), [(4, 4), (8, 4), (16, 4), (2, 2), (4, 2), (8, 2)])
def test_blocks(lanes, part):
    for present in range(1, lanes + 1):
        for wanted in range(1, lanes + 1):
            block = np.arange(lanes * lanes, dtype=float).reshape(lanes, lanes)
            registers = [*block.copy(), *np.full((lanes, lanes), np.nan)]
            for row in range(present, lanes):
                registers[row][:] = np.nan
            rows, spare = range(lanes), range(lanes, 2 * lanes)
            ops, columns = transpose(rows, spare, part, present, wanted)
            apply(ops, registers, part)
            for column in range(wanted):
                found = registers[columns[column]][:present]
                assert found.tolist() == block[:present, column].tolist()
            stages = (lanes - 1).bit_length()
            assert len(ops) <= lanes * stages


def test_absent_rows_cost_nothing():
    full, _ = transpose(range(16), range(16, 32), 4, 16, 16)
    half, _ = transpose(range(16), range(16, 32), 4, 4, 4)
    assert len(full) == 64
    assert len(half) < 20
