"""NumPy (OpenBLAS) and torch (MKL, oneDNN), by the calls that `looptune bench` makes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from experiments.contenders import Built, Contender, Problem
from looptune.bench import PEERS
from looptune.errors import UnsupportedError
from looptune.measure import python_sampler

WAYS = {"default": "", "channels-last": "-channels-last"}


def build(contender: Contender, problem: Problem) -> Built:
    """The library's best call, on as many threads as the environment of this process allows."""
    name = contender.library + WAYS.get(contender.way, f"/{contender.way}")
    if name not in PEERS:
        raise UnsupportedError(f"no peer {name!r}; {list(PEERS)} are")
    if contender.library == "torch":
        import torch

        torch.set_num_threads(problem.threads)
    start = time.perf_counter()
    call = PEERS[name](problem.workload, problem.plan, problem.arrays)
    tune_s = time.perf_counter() - start
    return Built(python_sampler(call), lambda: result_of(call, problem), tune_s)


def result_of(call: Any, problem: Problem) -> np.ndarray:
    """What a call writes into the output, or else returns, its channels where the plan has them."""
    out = problem.arrays[problem.plan.output.name]
    out[...] = np.nan
    returned = call()
    if not np.isnan(out).any():
        return out
    found = np.asarray(returned)
    channels_last = str(problem.workload.record.get("layout", "NC")).endswith("C")
    return np.moveaxis(found, 1, -1) if channels_last else found
