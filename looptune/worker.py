"""A process of its own for candidates: `python -m looptune.worker`, JSON lines in and out.

A kernel that crashes, never ends or floods its output costs the worker, not the search. The
worker lives in its own session, dies with its parent, and has limits on memory and core files.
Nothing is pickled: a nest travels as plain JSON, a schedule as its actions.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any, TypeVar

from looptune.errors import LooptuneError, MeasurementError
from looptune.ir import Nest
from looptune.measure import Posterior
from looptune.schedule import Schedule, replay
from looptune.serial import (
    actions_from_json,
    nest_from_json,
    nest_to_json,
    target_from_json,
    target_to_json,
)
from looptune.target import Target
from looptune.tuner import Spending, Tuner

MEMORY_BYTES = 16 << 30
LONGEST_FRAME = 1 << 20
PATIENCE_SECONDS = 20.0  # for one candidate, generated, verified and timed
PR_SET_PDEATHSIG = 1
State = TypeVar("State")


def main() -> int:
    """Answer requests until the input ends: first the problem, then a candidate a line."""
    serve(answered, LooptuneError)
    return 0


def serve(
    answer: Callable[[Mapping[str, Any], State | None], tuple[State | None, dict[str, Any]]],
    expected: type[Exception],
) -> None:
    """Answer a request a line by the state so far; `expected` errors are answers, too.

    What is printed meanwhile goes nowhere; answers leave by a copy of the standard output.
    """
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    state: State | None = None
    for line in sys.stdin:
        try:
            state, found = answer(json.loads(line), state)
        except expected as reason:
            found = {"error": f"{type(reason).__name__}: {reason}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def answered(
    request: Mapping[str, Any], tuner: Tuner | None
) -> tuple[Tuner | None, dict[str, Any]]:
    """The tuner and the answer to a request."""
    if "nest" in request:
        spending = Spending(None, None, time.monotonic, time.monotonic())
        nest, target = nest_from_json(request["nest"]), target_from_json(request["target"])
        return Tuner(nest, target, request["threads"], spending, request["seed"]), {"ready": True}
    assert tuner is not None, "the problem comes before candidates"
    schedule = replay(tuner.nest, actions_from_json(request["actions"]))
    if tuner(schedule) is None:
        return tuner, {"error": tuner.trials[-1].reason}
    return tuner, asdict(tuner.posteriors[schedule.identity])


def limited() -> None:
    """In the child, before it runs: die with the parent, no core files, limited memory."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


class Child:
    """The other end: a process that answers JSON lines, replaced when it dies or hangs.

    A new process gets `problem` first; `environment` is what its own differs by.
    """

    def __init__(
        self, problem: Mapping[str, Any], command: tuple[str, ...], patience: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.problem = problem
        self.command = command
        self.patience = patience
        self.environment = environment
        self.process: subprocess.Popen[str] | None = None
        self.died = 0

    def begin(self) -> None:
        """Start the process if there is none, and wait until it has taken the problem."""
        if self.process is None:
            self.process = self.started()
            self.exchange(self.problem)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, to a new process if there is none; kill one that does not answer."""
        self.begin()
        return self.exchange(request)

    def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One request and its answer."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = read_line(process.stdout, self.patience)
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as reason:
            self.close()
            self.died += 1
            code = process.returncode
            raise MeasurementError(
                f"worker lost: {reason or 'no answer'} (exit status {code})"
            ) from None
        return answer

    def started(self) -> subprocess.Popen[str]:
        """A new process in its own session."""
        return subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True, preexec_fn=limited,
            env={**os.environ, **(self.environment or {})},
        )  # fmt: skip

    def close(self) -> None:
        """End the process, and whatever it started."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Worker(Child):
    """Asks a process for posteriors of one nest's schedules."""

    def __init__(
        self, nest: Nest, target: Target, threads: int, seed: int = 0,
        patience: float = PATIENCE_SECONDS, command: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        problem = {
            "nest": nest_to_json(nest), "target": target_to_json(target),
            "threads": threads, "seed": seed,
        }  # fmt: skip
        command = command or (sys.executable, "-m", "looptune.worker")
        super().__init__(problem, command, patience)

    def posterior(self, schedule: Schedule) -> Posterior:
        """What the process measured; raises `MeasurementError` where it could not."""
        answer = self.ask({"actions": schedule.actions})
        if "error" in answer:
            raise MeasurementError(answer["error"])
        return Posterior(answer["n"], answer["mean"], answer["variance"])


def read_line(stream: IO[str], seconds: float) -> str:
    """One line, within a time and a length; raises `OSError` at the end of the stream, too."""
    deadline = time.monotonic() + seconds
    descriptor = stream.fileno()
    found = b""
    while not found.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise OSError(f"no answer within {seconds:g} s")
        piece = os.read(descriptor, 65536)
        if not piece:
            raise OSError("it died")
        found += piece
        if len(found) > LONGEST_FRAME:
            raise OSError(f"an answer of over {LONGEST_FRAME} bytes")
    return found.decode()


if __name__ == "__main__":
    sys.exit(main())
