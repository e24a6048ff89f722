"""Candidates in a process of their own: what crashes, hangs or floods costs the worker only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import needs_host

import looptune
from looptune import choose
from looptune.choose import Budget
from looptune.errors import MeasurementError
from looptune.host import host_target
from looptune.measure import Posterior
from looptune.schedule import Schedule, parse_order
from looptune.worker import Worker
from looptune.workloads import matmul

(NEST,) = matmul(24, 32, 16).nests
CRASH = "import os; os.kill(os.getpid(), 11)"
HANG = "import time; time.sleep(600)"
FLOOD = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
LIE = "import sys\nfor line in sys.stdin: print('no json', flush=True)"


@needs_host
def test_a_worker_measures_and_goes_on_after_a_bad_candidate() -> None:
    worker = Worker(NEST, host_target(), 1)
    try:
        found = worker.posterior(parse_order(NEST, "m:4 n:16 k m n", "n"))
        assert found.n >= 5
        with pytest.raises(MeasurementError, match="ScheduleError"):
            worker.posterior(
                Schedule(NEST, actions=(("split", (0, 999)),), loops=Schedule(NEST).loops)
            )
        assert worker.posterior(Schedule(NEST)).mean < 0
        assert worker.died == 0
    finally:
        worker.close()


@pytest.mark.parametrize("script", [CRASH, HANG, FLOOD, LIE], ids=["crash", "hang", "flood", "lie"])
def test_a_worker_that_misbehaves_is_replaced(script: str) -> None:
    worker = Worker(NEST, host_target(), 1, patience=1.0, command=(sys.executable, "-c", script))
    for turn in (1, 2):
        start = time.monotonic()
        with pytest.raises(MeasurementError, match="worker lost"):
            worker.posterior(Schedule(NEST))
        assert time.monotonic() - start < 30
        assert worker.died == turn
        assert worker.process is None


@needs_host
def test_a_killed_worker_costs_one_candidate() -> None:
    worker = Worker(NEST, host_target(), 1)
    try:
        worker.posterior(Schedule(NEST))
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(MeasurementError, match="worker lost"):
            worker.posterior(parse_order(NEST, "n m k"))
        assert worker.posterior(parse_order(NEST, "k m n")).n >= 5
    finally:
        worker.close()


@needs_host
def test_a_search_in_a_process_of_its_own() -> None:
    """From a script without a `__main__` guard, as a notebook is."""
    code = (
        "import looptune\n"
        "from looptune.choose import Budget\n"
        "kernel = looptune.optimize('mk,kn->mn', m=24, k=16, n=32, strategy='random',\n"
        "    budget=Budget(measurements=3), database=None, isolate=True)\n"
        "print(kernel.report.tried, kernel.report.verified)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "3 True\n"


@needs_host
def test_workers_die_with_their_parent() -> None:
    code = (
        "from looptune.worker import Worker\n"
        "from looptune.host import host_target\n"
        "from looptune.schedule import Schedule\n"
        "from looptune.workloads import matmul\n"
        "nest = matmul(24, 32, 16).nests[0]\n"
        "worker = Worker(nest, host_target(), 1)\n"
        "worker.posterior(Schedule(nest))\n"
        "print(worker.process.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"worker {pid} is still alive")


@needs_host
def test_isolated_searches_report_what_failed() -> None:
    kernel = looptune.optimize(
        matmul(24, 32, 16), strategy="random", budget=Budget(measurements=3), database=None,
        isolate=True,
    )  # fmt: skip
    assert kernel.report.tried == 3


@needs_host
def test_the_start_of_the_worker_is_none_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes 5 s to start here, and a candidate 0.1 of the budget's 1 s."""
    now = 0.0

    class Slow:
        def __init__(self, *_: object) -> None: ...

        def begin(self) -> None:
            nonlocal now
            now += 5.0

        def posterior(self, schedule: Schedule) -> Posterior:
            nonlocal now
            now += 0.1
            return Posterior(5, -0.1, 0.0)

        def close(self) -> None: ...

    monkeypatch.setattr(choose, "Worker", Slow)
    options = choose.Options(
        target=host_target(), threads=1, strategy="random", budget=Budget(seconds=1.0),
        isolate=True, clock=lambda: now,
    )  # fmt: skip
    assert choose.choose(NEST, options).tried == 8


@needs_host
def test_a_worker_that_cannot_start_costs_its_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "started", lambda _: subprocess.Popen(
        [sys.executable, "-c", CRASH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ))  # fmt: skip
    kernel = looptune.optimize(
        matmul(24, 32, 16), strategy="random", budget=Budget(measurements=2), database=None,
        isolate=True,
    )  # fmt: skip
    assert kernel.report.rejected == {"MeasurementError": 2}
