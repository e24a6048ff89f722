"""The shipped measurements: schedules of generated problems beside their default schedules.

For people who learn cost models or offline policies; `looptune/checkpoints/measured.md` is the
card, `experiments/dataset.py` made it. The file is lines of JSON, compressed: a header, then one
problem a line with its schedules.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from looptune.construct import Construction
from looptune.errors import LooptuneError, MeasurementError
from looptune.ir import Nest
from looptune.schedule import Schedule, replay
from looptune.serial import actions_from_json, nest_from_json
from looptune.target import Target, target_named

SCHEMA = 1
SHIPPED = "measured.jsonl.gz"
LONGEST_LINE = 1 << 22
CACHES = 3  # levels of a target's
LARGEST = 1e9  # more than any logarithm of a ratio of times


@dataclass(frozen=True)
class MeasuredSchedule:
    """One schedule: `mean` and `sd` of log(default's time / its time) over `n` rounds.

    `actions` are primitives (`looptune.schedule.replay`), `decisions` those of the construction
    (`looptune.construct`) that led to it. Raises `MeasurementError` for what was not measured.
    """

    decisions: tuple[int, ...]
    actions: tuple[tuple[str, tuple[object, ...]], ...]
    n: int
    mean: float
    sd: float

    def __post_init__(self) -> None:
        for action in self.decisions:
            check_whole("a decision", action, 0)
        check_whole("n", self.n, 1)
        for name, value in (("mean", self.mean), ("sd", self.sd)):
            if type(value) not in (int, float) or not -LARGEST < value < LARGEST:
                raise MeasurementError(f"{name} is {value!r}; a finite number would do")


@dataclass(frozen=True)
class MeasuredProblem:
    """A nest on a target, with the schedules that were measured on it: one at least."""

    nest: Nest
    target: Target
    threads: int
    rows: tuple[MeasuredSchedule, ...]

    def __post_init__(self) -> None:
        check_whole("threads", self.threads, 1)
        if not self.rows:
            raise MeasurementError("no rows; one at least would do")

    def schedule(self, row: MeasuredSchedule) -> Schedule:
        """The schedule of a row; raises `ScheduleError` if it is of another problem."""
        return replay(self.nest, row.actions)

    def construction(self, row: MeasuredSchedule) -> Construction:
        """The construction that led to a row; raises `ScheduleError` if today's leads elsewhere."""
        state = Construction(self.nest, self.target, self.threads)
        for action in row.decisions:
            state = state.take(action)
        return state


def load(path: str | os.PathLike[str] | None = None) -> Iterator[MeasuredProblem]:
    """The problems of a file, of the shipped one unless told otherwise.

    Raises `MeasurementError` for a file that is none, and says which line is wrong.
    """
    place = files("looptune.checkpoints") / SHIPPED if path is None else os.fspath(path)
    number = 1
    try:
        with gzip.open(str(place), "rt", encoding="utf-8") as file:
            header = json.loads(file.readline(LONGEST_LINE))
            if header["schema"] != SCHEMA:
                raise MeasurementError(f"schema {header['schema']!r}; {SCHEMA} would do")
            while line := file.readline(LONGEST_LINE):
                number += 1
                yield problem_of(json.loads(line), header)
    except LooptuneError as reason:
        raise MeasurementError(f"{place}, line {number}: {reason}") from reason
    except (
        OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError,
        OverflowError, RecursionError,
    ) as reason:  # fmt: skip
        raise MeasurementError(f"{place}, line {number}: no measurements: {reason}") from reason


def problem_of(line: Mapping[str, Any], header: Mapping[str, Any]) -> MeasuredProblem:
    """A problem from its line; the header tells the caches of the machine."""
    caches = tuple(header["caches"])
    for size in caches:
        check_whole("a cache", size, 1)
    if len(caches) != CACHES:
        raise MeasurementError(f"caches {caches}; sizes of {CACHES} levels would do")
    target = replace(target_named(line["target"]), cache_bytes=caches)
    rows = tuple(
        MeasuredSchedule(
            tuple(row["decisions"]),
            actions_from_json(row["actions"]),
            row["n"], row["mean"], row["sd"],
        )
        for row in line["rows"]
    )  # fmt: skip
    return MeasuredProblem(nest_from_json(line["nest"]), target, line["threads"], rows)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise `MeasurementError` unless a value is a whole number of at least so much."""
    if type(value) is not int or value < least:
        raise MeasurementError(f"{name} is {value!r}; a whole number of at least {least} would do")
