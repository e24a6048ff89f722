"""What the comparisons share: rows of all contenders, resumed and kept as JSON.

A result holds its header, the configuration and the rows; a row is made once, and made again only
where a contender has joined.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.contenders import Contender, contender_named
from experiments.contenders.arena import Arena, Rules
from experiments.header import header
from looptune.errors import LooptuneError
from looptune.host import host_target
from looptune.measure import geomean, peak_flops
from looptune.workloads.suites import Workload

MANY = 100  # rows, beyond which not every new one is written at once
Rows = dict[str, dict[str, Any]]
Job = tuple[Workload, tuple[Contender, ...]]


class StaleResultError(LooptuneError):
    """The output holds rows of another machine or configuration."""


def exit_code(main: Callable[[], int]) -> int:
    """What a script ends with: 2, and the reason on stderr, for an output of other rules."""
    try:
        return main()
    except StaleResultError as reason:
        print(reason, file=sys.stderr)
        return 2


def head_of(rules: Rules, command: str) -> dict[str, Any]:
    """All that a table needs besides its rows."""
    target = host_target(rules.isa)
    return {
        **header(command, target),
        "config": asdict(rules),
        "peak_gflops": peak_flops(target) * rules.threads / 1e9,
    }


def resumed(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """The result so far: that of the file, if it is of this machine, these versions and rules; the
    commits that made its rows are kept.

    Raises `StaleResultError`: rows of two fingerprints do not belong into one table.
    """
    if not path.exists():
        return {**head, "rows": {}}
    kept: dict[str, Any] = json.loads(path.read_text())
    for part in ("machine", "versions", "config"):
        if kept[part] != json.loads(json.dumps(head[part])):
            raise StaleResultError(
                f"{path} has another {part}: {kept[part]}, not {head[part]}; another --output "
                "would do"
            )
    commits = [*kept.get("earlier_commits", []), kept.get("commit"), head["commit"]]
    earlier = [each for each in dict.fromkeys(commits) if each not in (None, head["commit"])]
    now = {"commit": head["commit"], "date": head["date"]}
    return {**kept, **now, **({"earlier_commits": earlier} if earlier else {})}


def keep(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result whole, or not at all; a row a line."""
    rows = ",\n".join(
        f" {json.dumps(key)}: {json.dumps(row)}" for key, row in result["rows"].items()
    )
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(head[:-2] + ',\n "rows": {\n' + rows + "\n }\n}\n")
    os.replace(part, path)


def lacks(row: Mapping[str, Any] | None, contenders: Iterable[Contender]) -> bool:
    """Whether a row has to be made: one that failed for want of a library is not final."""
    return row is None or any(
        str(c) not in row or "ModuleNotFoundError" in row[str(c)].get("error", "")
        for c in contenders
    )


def compare(jobs: Sequence[Job], rules: Rules, path: Path, command: str) -> dict[str, Any]:
    """Make the rows that are missing, keeping each as soon as it is there."""
    result = resumed(path, head_of(rules, command))
    with Arena(rules) as arena:
        for number, (workload, contenders) in enumerate(tqdm(jobs, file=sys.stderr, disable=None)):
            if lacks(result["rows"].get(workload.id), contenders):
                result["rows"][workload.id] = arena.row(workload, contenders)
                if len(jobs) < MANY or number % MANY == 0:
                    keep(path, result)
    keep(path, result)
    return result


def over(rows: Rows, name: str, other: str) -> list[float]:
    """How many times as fast as `other` a contender is, a number a row that has both; both keep
    their time over the same anchor's."""
    pairs = [(row.get(name, {}), row.get(other, {})) for row in rows.values()]
    return [b["ratio"] / a["ratio"] for a, b in pairs if "ratio" in a and "ratio" in b]


def means(rows: Rows, name: str, others: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Geometric mean, least and count of a contender's speed over each of the others'."""
    found = {}
    for other in others:
        ratios = over(rows, name, other)
        found[other] = {
            "geomean": geomean(ratios), "least": min(ratios, default=None), "n": len(ratios),
        }  # fmt: skip
    return found


def tuning(rows: Rows, name: str) -> float | None:
    """Geometric mean of the seconds of tuning."""
    return geomean(row[name]["tune_s"] for row in rows.values() if "tune_s" in row.get(name, {}))


def failures(rows: Rows) -> dict[str, str]:
    """Contenders that have no figure anywhere, with the reason of the last row."""
    names = {name for row in rows.values() for name in row}
    found = {}
    for name in names:
        cells = [row[name] for row in rows.values() if name in row]
        if all("error" in cell for cell in cells):
            found[name] = cells[-1]["error"]
    return dict(sorted(found.items()))


def table(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """A line a contender: geometric means of GFLOPS, of the share of peak, of tuning seconds."""
    rows: Rows = result["rows"]
    lines = [f"{'contender':28s} {'n':>4s} {'GFLOPS':>8s} {'of peak':>8s} {'tuning':>10s}"]
    for name in names:
        rates = [row[name]["gflops"] for row in rows.values() if "gflops" in row.get(name, {})]
        mean, seconds = geomean(rates), tuning(rows, name)
        if mean is None:
            lines.append(f"{name:28s} {'-':>4s} {failures(rows).get(name, 'not run')[:80]}")
            continue
        took = "-" if seconds is None else f"{seconds:.3g} s"
        share = mean / result["peak_gflops"]
        lines.append(f"{name:28s} {len(rates):4d} {mean:8.1f} {share:8.2f} {took:>10s}")
    return "\n".join(lines)


def parser_of(text: str, output: str) -> ArgumentParser:
    """The options that all comparisons have."""
    parser = ArgumentParser(description=text.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", default=None, help="avx2 or avx512; the widest otherwise")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, a workload")
    parser.add_argument("--contenders", help="names, separated by commas, instead of all")
    parser.add_argument("--limit", type=int, help="only so many workloads: a smoke run")
    parser.add_argument("--output", type=Path, default=Path("experiments/results") / output)
    return parser


def rules_of(args: Namespace) -> Rules:
    """The rules that were asked for."""
    return Rules(threads=args.threads, isa=args.target, rounds=args.rounds, seconds=args.seconds)


def named(args: Namespace, names: Sequence[str]) -> tuple[Contender, ...]:
    """The contenders that were asked for, or all of them."""
    wanted = args.contenders.split(",") if args.contenders else names
    return tuple(contender_named(name) for name in wanted)
