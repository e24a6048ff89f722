"""How a checkpoint came to be: versions, commit, machine, seed, command and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from looptune.errors import CheckpointError
from looptune.graph import OBSERVATION_VERSION
from looptune.host import fingerprint
from looptune.lower import GENERATOR_VERSION

from .architecture import check_keys, check_size

ACTION_VERSION = 1  # raise it when an action number comes to mean something else
LONGEST_TEXT = 4096
MOST_METRICS = 256


@dataclass(frozen=True)
class Header:
    """`metrics` are finite numbers by name; `machine` is a digest of `looptune.host`.

    Raises `CheckpointError` for another version of observations or actions than this looptune's,
    and for fields that are not what they should be. The generator's version is only recorded.
    """

    commit: str = ""
    seed: int = 0
    command: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    machine: str = field(default_factory=lambda: fingerprint().digest)
    observation_version: int = OBSERVATION_VERSION
    action_version: int = ACTION_VERSION
    generator_version: int = GENERATOR_VERSION

    def __post_init__(self) -> None:
        check_version("observation version", self.observation_version, OBSERVATION_VERSION)
        check_version("action version", self.action_version, ACTION_VERSION)
        check_size("generator version", self.generator_version, 0, 1 << 31)
        check_size("seed", self.seed, 0, (1 << 64) - 1)
        for name in ("commit", "command", "machine"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > LONGEST_TEXT:
                raise CheckpointError(f"{name} is not a text of up to {LONGEST_TEXT} characters")
        if not isinstance(self.metrics, Mapping) or len(self.metrics) > MOST_METRICS:
            raise CheckpointError(f"metrics are not up to {MOST_METRICS} numbers by name")
        for name, value in self.metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CheckpointError(f"metric {name} is {value!r}; a number would do")
            if not math.isfinite(value):
                raise CheckpointError(f"metric {name} is {value}; a finite number would do")

    def to_json(self) -> dict[str, object]:
        """As JSON has it; `from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(value: object) -> Header:
        """Read what `to_json` wrote; raises `CheckpointError` for anything else."""
        return Header(**check_keys("header", value, set(Header.__dataclass_fields__)))


def check_version(what: str, found: object, ours: int) -> None:
    """Raise `CheckpointError` unless a version is the one this looptune reads."""
    check_size(what, found, 0, 1 << 31)
    if found != ours:
        older = isinstance(found, int) and found < ours
        remedy = "train the policy anew" if older else "a newer looptune"
        raise CheckpointError(f"{what} is {found}, this looptune has {ours}; {remedy} would do")
