"""The figures of an evaluation: means with intervals over shapes, losses, headroom and capture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

DRAWS = 2000
LOSS = 0.05  # of the logarithm: a loss that counts
HEADROOM = math.log(1.03)  # under that, a share of it means nothing
POLICY = "policy"
LEGEND = """\
ratio     how many times as fast as the default schedule, geometric mean over the shapes, and its
          95 % interval
losses    part of the shapes on which it is more than 5 % slower than the default
by        its ratio on those
share     its speed over that of the best known schedule, geometric mean; over 1 where the best
          known, chosen by one half of the timings, did worse in the other, which alone counts
capture   how much of what the best known gains over the default, in logarithms, it gains
headroom  what the best known gains over the default; under 3 % there is no capture"""


@dataclass(frozen=True)
class Row:
    """One shape: log(default's time / contender's) by contender, and who is the best known.

    `milliseconds` are those of `optimize`, all included, and of the choice alone; a shape that
    failed has an `error` and nothing else.
    """

    set: str
    target: str
    id: str
    gains: Mapping[str, float] = field(default_factory=dict)
    best: str = "default"
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean, by drawing shapes with replacement from a fixed seed."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (DRAWS, len(values)))
    low, high = np.percentile(drawn.mean(1), [2.5, 97.5])
    return float(low), float(high)


def headroom(rows: Iterable[Row]) -> float:
    """The mean of log(best known / default)."""
    return float(np.mean([row.gains[row.best] for row in rows]))


def capture(rows: Sequence[Row], who: str) -> float | None:
    """How much of what the best known gain a contender gains; None without headroom."""
    if headroom(rows) < HEADROOM:
        return None
    return sum(row.gains[who] for row in rows) / sum(row.gains[row.best] for row in rows)


def of_contender(rows: Sequence[Row], who: str) -> dict[str, float | None]:
    """Its mean log gain, the ratio with its interval, losses, shares of the best known."""
    rows = [row for row in rows if who in row.gains]
    gains = np.array([row.gains[who] for row in rows])
    lost = gains[gains < -LOSS]
    low, high = bootstrap(list(gains))
    return {
        "n": len(rows), "mean": float(gains.mean()), "ratio": math.exp(gains.mean()),
        "low": math.exp(low), "high": math.exp(high), "losses": len(lost) / len(gains),
        "loss": math.exp(lost.mean()) if len(lost) else 1.0,
        "share": math.exp(gains.mean() - headroom(rows)), "capture": capture(rows, who),
    }  # fmt: skip


def of_set(rows: Sequence[Row]) -> dict[str, object]:
    """A set's figures; contenders in the order of their first row."""
    good = [row for row in rows if not row.error]
    failed = [f"{row.id}: {row.error}" for row in rows if row.error]
    if not good:
        return {"n": 0, "failed": failed, "headroom": None, "contenders": {}, "milliseconds": {}}
    names = list(dict.fromkeys(who for row in good for who in row.gains))
    spent: dict[str, list[float]] = {}
    for row in good:
        for what, value in row.milliseconds.items():
            spent.setdefault(what, []).append(value)
    return {
        "n": len(good), "failed": failed, "headroom": headroom(good),
        "contenders": {who: of_contender(good, who) for who in names},
        "milliseconds": {
            what: {"median": float(np.median(values)), "p99": float(np.quantile(values, 0.99))}
            for what, values in spent.items()
        },
    }  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, dict[str, object]]:
    """By target and set, such as "avx2 matmul"; and of all sets of a target, if there are more."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.target} {row.set}", []).append(row)
    for target in dict.fromkeys(row.target for row in rows):
        mine = [row for row in rows if row.target == target]
        if len({row.set for row in mine}) > 1:
            groups[f"{target} all"] = mine
    return {name: of_set(found) for name, found in groups.items()}


def table(found: Mapping[str, Mapping[str, object]]) -> str:
    """The summary as text."""
    return "\n\n".join(section(name, figures) for name, figures in found.items())


def section(name: str, figures: Mapping[str, object]) -> str:
    """One set as text."""
    contenders: Mapping[str, Mapping[str, float | None]] = figures["contenders"]  # type: ignore[assignment]
    spent: Mapping[str, Mapping[str, float]] = figures["milliseconds"]  # type: ignore[assignment]
    lines = [f"{name}: {figures['n']} shapes, headroom {percent(figures['headroom'])}"]
    lines += [f"  failed: {each}" for each in figures["failed"]]  # type: ignore[attr-defined]
    if contenders:
        lines.append(
            f"  {'':24}{'ratio':>7}{'95 % interval':>18}{'losses':>8}{'by':>7}{'share':>7}  capture"
        )
    for who, each in contenders.items():
        interval = f"{each['low']:.3f} to {each['high']:.3f}"
        share = "no headroom" if each["capture"] is None else f"{each['capture']:.2f}"
        lines.append(
            f"  {who:24}{each['ratio']:7.3f}{interval:>18}{each['losses']:8.2f}{each['loss']:7.2f}"
            f"{each['share']:7.3f}  {share}"
        )
    lines += [
        f"  {what}: {each['median']:.1f} ms in the median, {each['p99']:.1f} ms at 99 %"
        for what, each in spent.items()
    ]
    return "\n".join(lines)


def percent(value: object) -> str:
    """A logarithm of a ratio as percent over 1."""
    return f"{100 * math.expm1(value):.1f} %" if isinstance(value, float) else "unknown"
