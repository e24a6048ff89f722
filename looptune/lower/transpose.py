"""Square blocks of elements transposed in registers, by the merges of 16-byte parts.

Rows are zipped pairwise until each part holds a column of as many rows as it has lanes, then the
parts, seen as elements of a smaller matrix, are exchanged. A block of L x L takes L log2(L)
shuffles; rows that are absent and columns that nobody wants cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from looptune.program import Pick, Zip

Exchange = Zip | Pick
PART_BYTES = 16


def transpose(
    rows: Sequence[int], spare: Sequence[int], part: int, present: int, wanted: int
) -> tuple[list[Exchange], Sequence[int]]:
    """Shuffles that turn the registers `rows` into columns, and the registers that hold them.

    `part` is the number of lanes in 16 bytes. The first `present` rows are loaded; the lanes of
    the others are junk. The first `wanted` columns are needed. `spare` registers are as many as
    the rows; the columns end in one of the two sets, the other is free.
    """
    alive = [register if i < present else None for i, register in enumerate(rows)]
    stages: list[list[Exchange]] = []
    here, there = rows, spare
    for stage in stages_of(len(rows), part):
        made: list[Exchange] = []
        held: list[int | None] = []
        for into, (kind, a, b, how) in zip(there, stage, strict=True):
            first, second = alive[a], alive[b]
            if first is None and second is None:
                held.append(None)
                continue
            left = first if first is not None else second
            right = second if second is not None else first
            assert left is not None
            assert right is not None
            made.append(
                Zip(into, left, right, how[0], bool(how[1])) if kind == "zip"
                else Pick(into, left, right, how)
            )  # fmt: skip
            held.append(into)
        stages.append(made)
        alive = held
        here, there = there, here
    return needed(stages, here[:wanted]), here


Step = tuple[str, int, int, tuple[int, ...]]  # "zip" or "pick", the rows it reads, and how


def stages_of(lanes: int, part: int) -> Iterable[list[Step]]:
    """What each row becomes, stage after stage."""
    group = 1
    while group < part:
        yield zipped(lanes, group)
        group *= 2
    yield from exchanged(lanes, part)


def zipped(lanes: int, group: int) -> list[Step]:
    """Rows hold columns of `group` rows in groups of lanes; afterwards of twice as many.

    Block g of 2 * group rows: row j of its first half and row j of its second half give the rows
    2 * j (their low halves) and 2 * j + 1 (the high ones).
    """
    return [
        ("zip", base + j, base + group + j, (group, high))
        for base in range(0, lanes, 2 * group)
        for j in range(group)
        for high in (0, 1)
    ]


def exchanged(lanes: int, part: int) -> Iterable[list[Step]]:
    """Row part * g + j holds, in its part p, column part * p + j of the rows of group g: put the
    parts of one column side by side."""
    match lanes // part:
        case 1:
            return
        case 2:
            yield [("pick", j, part + j, (p,)) for p in range(2) for j in range(part)]
        case 4:
            # (A0 A2 B0 B2), (A1 A3 B1 B3) of groups A and B, then of C and D ...
            yield [
                ("pick", 2 * half * part + j, (2 * half + 1) * part + j, (odd, odd + 2))
                for half in range(2)
                for odd in range(2)
                for j in range(part)
            ]
            # ... and (A0 B0 C0 D0), (A1 ...), (A2 ...), (A3 ...) from those.
            yield [
                ("pick", (p % 2) * part + j, (2 + p % 2) * part + j, (p // 2, p // 2 + 2))
                for p in range(4)
                for j in range(part)
            ]
        case count:
            raise AssertionError(f"vectors of {count} parts have no exchange")


def needed(stages: Sequence[list[Exchange]], results: Iterable[int]) -> list[Exchange]:
    """The shuffles that the results depend on."""
    wanted = set(results)
    found: list[Exchange] = []
    for stage in reversed(stages):
        kept = [op for op in stage if op.dst in wanted]
        wanted = {register for op in kept for register in (op.a, op.b)}
        found = kept + found
    return found
