"""One-line faults that the property cases must find: `python tests/mutants.py` tries them all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import looptune

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(looptune.__file__).resolve().parent
SEEDS = 150  # cases tried against each fault
TIMEOUT_SECONDS = 60  # a fault may make a kernel loop for ever: that is found, too
RUN = f"import property_run; property_run.stop_at_failure(range({SEEDS}))"


class Mutant(NamedTuple):
    """A fault: in `module`, the one occurrence of `old` becomes `new`."""

    name: str
    module: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "overlapped last vector one element too far",
        "lower/form.py",
        "return (*full, (extent - lanes, lanes))",
        "return (*full, (extent - lanes + 1, lanes))",
    ),
    Mutant(
        "range sets forget a full step",
        "lower/form.py",
        "if any(value >= step for value in values):",
        "if any(value > step for value in values):",
    ),
    Mutant(
        "zipped rows exchanged",
        "lower/transpose.py",
        "(group, high))",
        "(group, 1 - high))",
    ),
    Mutant(
        "parts of a block exchanged",
        "lower/transpose.py",
        '("pick", j, part + j, (p,))',
        '("pick", j, part + j, (1 - p,))',
    ),
    Mutant(
        "box of a pack starts where the piece does, not where it reads",
        "lower/packs.py",
        "outer += (first + low) * source.stride",
        "outer += low * source.stride",
    ),
    Mutant(
        "transposed block stores a row too few",
        "lower/region.py",
        "                for lane in range(lanes):\n                    offset = write",
        "                for lane in range(lanes - 1):\n                    offset = write",
    ),
    Mutant(
        "write cache starts from the old output",
        "lower/nest.py",
        "after, visit = copies + after, visit._replace(before=int(loaded))",
        "after, visit = copies + after, visit",
    ),
    Mutant(
        "write cache overwrites what it should add to",
        "lower/nest.py",
        'return copy(sizes, "add" if way else "out")',
        'return copy(sizes, "out")',
    ),
    Mutant(
        "copies overlap by a line",
        "lower/buffers.py",
        "offset = made.end",
        "offset = max(offset, made.end - ALIGNMENT)",
    ),
    Mutant(
        "transposed rows read side by side",
        "lower/region.py",
        "read + row * source.strides[across]",
        "read + row * source.strides[along]",
    ),
    Mutant(
        "parallel loop unrolled in the register tile",
        "lower/form.py",
        "scope = max(scope, shared + 1)",
        "scope = max(scope, shared)",
    ),
    Mutant(
        "pointers undone by one trip only",
        "lower/nest.py",
        "a.step_of(loop.axis, loop.step) * trips)",
        "a.strides[loop.axis] * loop.step * (1 if trips > 0 else -1))",
    ),
    Mutant(
        "every visit of the output is the first",
        "lower/nest.py",
        "after = (Set(visited, 1),)",
        "after = ()",
    ),
    Mutant(
        "accumulate starts from zero",
        "lower/nest.py",
        "1 if form.nest.accumulate else 0",
        "0",
    ),
    Mutant(
        "the last share of a parallel loop is short",
        "lower/nest.py",
        "Min(counter, counter, extent)",
        "Min(counter, counter, extent - 1)",
    ),
    Mutant(
        "a rolled reduction comes back one step short",
        "lower/nest.py",
        "    back = pointer_steps(inputs, loop, -trips)",
        "    back = pointer_steps(inputs, loop, 1 - trips)",
    ),
    Mutant(
        "a maximum starts from zero",
        "lower/region.py",
        "value = IDENTITY[tile.form.nest.reduction]",
        'value = IDENTITY["add"]',
    ),
    Mutant(
        "a load is hoisted out of its term",
        "lower/region.py",
        "return Load(op[0], op[1], op[2] + moved[op[1]], op[3])",
        "return Load(op[0], op[1], op[2], op[3])",
    ),
    Mutant(
        "a partial vector is folded as a full one",
        "lower/region.py",
        "read[2] < self.lanes or ",
        "",
    ),
    Mutant(
        "lanes beyond a tail enter a maximum",
        "lower/region.py",
        "if form.reduces_lanes and reads[0][2] < form.lanes:",
        "if form.reduces_lanes and reads[0][2] > form.lanes:",
    ),
    Mutant(
        "a copy of the accumulators is not merged",
        "lower/region.py",
        "for number in range(count, count * tile.copies):",
        "for number in range(count + 1, count * tile.copies):",
    ),
    Mutant(
        "padding is filled on one side",
        "lower/packs.py",
        "for side in ((low, first), (last, high)):",
        "for side in ((low, first),):",
    ),
    Mutant(
        "a copy forgets where its box begins",
        "lower/packs.py",
        "to = sum((first - low) * stride",
        "to = sum(0 * stride",
    ),
    Mutant(
        "a mask is one lane short",
        "legalize.py",
        "yield LoadMask(machine.reserved, op.lanes)",
        "yield LoadMask(machine.reserved, op.lanes - 1)",
    ),
    Mutant(
        "lanes of a partial store stay in place",
        "legalize.py",
        "at + lane * size, lane)",
        "at + size, lane)",
    ),
    Mutant(
        "a reduction adds its lower half twice",
        "legalize.py",
        "half + lane % half for lane in",
        "lane % half for lane in",
    ),
    Mutant(
        "a gather swaps lanes",
        "legalize.py",
        "yield LoadLane(register, op.pointer, offset, lane)",
        "yield LoadLane(register, op.pointer, offset, lane ^ 2 if lane > 1 else lane)",
    ),
    Mutant(
        "a minimum is a maximum",
        "backends/x86.py",
        '"CMOVG_R64_RM64"',
        '"CMOVL_R64_RM64"',
    ),
    Mutant(
        "a loop makes one more trip",
        "backends/x86.py",
        'self.jump("G", top)',
        'self.jump("GE", top)',
    ),
    Mutant(
        "scalars on the stack lie too far apart",
        "backends/x86.py",
        "Memory(Register.RSP, 8 * slot)",
        "Memory(Register.RSP, 9 * slot)",
    ),
    Mutant(
        "far displacements are one element off",
        "backends/x86_vector.py",
        "DISTANCE.pack(offset)",
        "DISTANCE.pack(offset + 4)",
    ),
    Mutant(
        "near displacements are one vector off",
        "backends/x86_vector.py",
        "BYTES[offset // unit] if near",
        "BYTES[offset // unit - 1] if near",
    ),
    Mutant(
        "an element is inserted in the wrong lane",
        "backends/x86_vector.py",
        "Immediate(lane << 4)",
        "Immediate(lane << 5)",
    ),
    Mutant(
        "a maximum mends the wrong NaN",
        "backends/x86_vector.py",
        "unordered + self.put(op.kind, dst, b, a) + mend",
        "unordered + self.put(op.kind, dst, a, b) + mend",
    ),
    Mutant(
        "a blend keeps one lane too few",
        "backends/x86_vector.py",
        "(1 << self.lanes) - (1 << op.lanes)",
        "(1 << self.lanes) - (1 << op.lanes - 1)",
    ),
    Mutant(
        "every visit is finished",
        "lower/nest.py",
        "inner = inner._replace(again=Dynamic(again, (0, 1)))",
        "inner = inner._replace(again=0)",
    ),
    Mutant(
        "write cache adds behind the epilogue",
        "lower/nest.py",
        "and visit.before == 1",
        "and visit.before == 2",
    ),
    Mutant(
        "relu is turned round",
        "lower/epilogue.py",
        'Bound("max", r, zero, r)',
        'Bound("min", r, zero, r)',
    ),
    Mutant(
        "narrow vectors are folded as they are",
        "lower/region.py",
        "if access.form is None and access.kind in kinds",
        "if access.kind in kinds",
    ),
    Mutant(
        "bfloat16 is cut off",
        "backends/x86_convert.py",
        'code += shift("R", ordered, 17, width)',
        'code += shift("R", ordered, 31, width)',
    ),
    Mutant(
        "products of pairs are not added",
        "legalize.py",
        "out.append(Add(dst, dst, machine.reserved))",
        "out.append(Add(dst, machine.reserved, machine.reserved))",
    ),
)


def mutate(mutant: Mutant, folder: Path) -> None:
    """Copy the package to `folder` with the fault in it."""
    shutil.copytree(PACKAGE, folder / "looptune", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "looptune" / mutant.module
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.old!r} occurs {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new))


def run(folder: Path) -> str:
    """How the cases end on the package in `folder`: what failed, or nothing if all passed."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-c", RUN]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no end"
    lines = (done.stderr.strip() or f"code {done.returncode}").splitlines()
    return lines[-1] if done.returncode else ""


def verdict(mutant: Mutant) -> str:
    """What the cases say about a fault; nothing if they miss it."""
    with tempfile.TemporaryDirectory() as folder:
        mutate(mutant, Path(folder))
        return run(Path(folder))


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        for mutant, found in zip(MUTANTS, pool.map(verdict, MUTANTS), strict=True):
            print(f"{mutant.name}: {found or 'SURVIVED'}", flush=True)
