"""What this machine is: instruction sets, caches, threads, a fingerprint for results.

Environment: `LOOPTUNE_ISA` names the target to use, `LOOPTUNE_NUM_THREADS` (before
`OMP_NUM_THREADS`) the threads; both are read at the time of the call.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from looptune.errors import ArgumentError, UnsupportedError, UnsupportedHostError
from looptune.scalars import whole
from looptune.target import Target, target_named

# The flags of /proc/cpuinfo that an instruction set needs; the kernel drops those it disables.
FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"},
}
DOT_FLAGS = {"avx2": "avx_vnni", "avx512": "avx512_vnni"}  # products of pairs, added to a sum
CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Machine:
    """What a measurement depends on; sizes in bytes, `cores` those of the machine."""

    cpu: str
    isas: tuple[str, ...]
    cache_bytes: tuple[int, int, int]
    cores: int

    @property
    def digest(self) -> str:
        """Short name of the machine: results of different digests are not comparable."""
        text = json.dumps([self.cpu, self.isas, self.cache_bytes, self.cores])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def read_cpuinfo() -> str:
    """The text of /proc/cpuinfo; a failure is not remembered."""
    return CPUINFO.read_text()


def cpu_text() -> str:
    """The text of /proc/cpuinfo, empty where there is none."""
    try:
        return read_cpuinfo()
    except OSError:
        return ""


def field_of(cpuinfo: str, name: str) -> str:
    """The first value of a field of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def host_isas(cpuinfo: str | None = None) -> tuple[str, ...]:
    """Instruction sets that run here, narrowest first; none but on Linux on x86-64."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return ()
    flags = set(field_of(cpu_text() if cpuinfo is None else cpuinfo, "flags").split())
    return tuple(isa for isa, needed in FLAGS.items() if needed <= flags)


def has_dot(isa: str, cpuinfo: str | None = None) -> bool:
    """Whether this machine multiplies pairs of int16 and adds them to a sum in one instruction."""
    flags = field_of(cpu_text() if cpuinfo is None else cpuinfo, "flags").split()
    return DOT_FLAGS.get(isa) in flags


def runs(target: Target) -> bool:
    """Whether this machine runs kernels for `target`."""
    return target.isa in host_isas() and (not target.dot or has_dot(target.isa))


def host_target(name: str | None = None) -> Target:
    """The target called `name`, or LOOPTUNE_ISA, or the widest; with this machine's caches and
    what it adds to the instruction set.

    Raises `UnsupportedHostError` if the machine does not run it, `UnsupportedError` if there is
    no such target.
    """
    isas = host_isas()
    chosen = name or os.environ.get("LOOPTUNE_ISA") or (isas[-1] if isas else "avx2")
    try:
        target = target_named(chosen)
    except UnsupportedError as reason:
        if name:
            raise
        raise UnsupportedError(f"LOOPTUNE_ISA: {reason}") from None
    if target.isa not in isas:
        raise UnsupportedHostError(
            f"this machine runs {list(isas) or 'no supported instruction set'}, not "
            f"{target.isa}; kernels for {target.name} can be made (target=...) and read, not run"
        )
    return replace(target, cache_bytes=cache_sizes(), dot=has_dot(target.isa))


@lru_cache(maxsize=1)
def cache_sizes() -> tuple[int, int, int]:
    """Bytes of the data caches of levels 1 to 3; usual sizes where they cannot be read."""
    found = {1: 32 << 10, 2: 1 << 20, 3: 32 << 20}
    for index in sorted(CACHES.glob("index*")):
        try:
            level, kind = int((index / "level").read_text()), (index / "type").read_text().strip()
            size = parse_size((index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and level in found:
            found[level] = size
    return found[1], found[2], found[3]


def parse_size(text: str) -> int:
    """`48K` or `2M` in bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def fingerprint() -> Machine:
    """This machine."""
    cpu = field_of(cpu_text(), "model name") or platform.processor() or platform.machine()
    model = f"{field_of(cpu_text(), 'cpu family')}.{field_of(cpu_text(), 'model')}"
    return Machine(f"{cpu} ({model})", host_isas(), cache_sizes(), os.cpu_count() or 1)


def thread_count(threads: int | None = None) -> int:
    """Threads to use: the argument, LOOPTUNE_NUM_THREADS, OMP_NUM_THREADS or 1.

    Never more than this process may run on: its affinity and its cgroup's quota.
    """
    wanted: object = threads
    source = "threads"
    for variable in ("LOOPTUNE_NUM_THREADS", "OMP_NUM_THREADS"):
        if wanted is None and (text := os.environ.get(variable, "").split(",")[0].strip()):
            source = variable
            wanted = int(text) if text.isdecimal() else text
    if wanted is None:
        return 1
    found = whole(wanted)
    if found is None or found < 1:
        raise ArgumentError(f"{source} is {wanted!r}; a whole number of at least 1 would do")
    return min(found, available_cores())


def available_cores() -> int:
    """Cores this process may use at the same time."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(cores, quota_cores()))


def quota_cores() -> int:
    """Cores that the cgroup's CPU quota pays for, rounded up; a large number without one."""
    try:
        quota, period = QUOTA.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16
