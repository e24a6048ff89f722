"""The peers of a bench: what they have no call for, each in its own words."""

from __future__ import annotations

import pytest

from looptune.bench import PEERS
from looptune.errors import UnsupportedError
from looptune.ir import Plan
from looptune.measure import random_arrays
from looptune.workloads import fuse, matmul
from looptune.workloads.suites import Workload, load

PRODUCT = next(workload for workload in load("core") if workload.kind == "matmul")
MATMUL = matmul(8, 8, 8)


def of_kind(kind: str) -> Workload:
    """A small core workload of a kind."""
    return min((each for each in load("core") if each.kind == kind), key=lambda each: each.flops)


@pytest.mark.parametrize(
    ("peer", "workload", "plan", "said"),
    [
        ("numpy", of_kind("conv2d"), None, "NumPy has no call for what is no matmul"),
        ("numpy", PRODUCT, fuse(MATMUL, "relu"), "NumPy has no one call .* or for an epilogue"),
        ("numpy", PRODUCT, matmul(8, 8, 8, dtype="float16"), "NumPy has no one call for float16"),
        ("torch", of_kind("capsule_conv2d"), None, "torch has no call for capsule_conv2d"),
        ("torch", PRODUCT, fuse(MATMUL, "relu"), "torch has no one call .* or for an epilogue"),
        ("torch", PRODUCT, matmul(8, 8, 8, dtype="float16"), "torch has no one call for float16"),
        ("torch-channels-last", PRODUCT, None, "torch has no channels-last call for matmul"),
        ("torch-channels-last", of_kind("conv1d"), None, "no channels-last call for conv1d"),
        ("torch-channels-last", PRODUCT, fuse(MATMUL, "relu"), "torch has no one call"),
    ],
)
def test_what_a_peer_has_no_call_for(
    peer: str, workload: Workload, plan: Plan | None, said: str
) -> None:
    if peer.startswith("torch"):
        pytest.importorskip("torch", reason="torch is not installed")
    plan = workload.plan() if plan is None else plan
    with pytest.raises(UnsupportedError, match=said):
        PEERS[peer](workload, plan, random_arrays(plan))
