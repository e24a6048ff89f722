"""The poison harness: runs kernels where every stray access shows.

Operands lie flush against unreadable pages, once at their end and once at their start; outputs
hold NaN, gaps hold a pattern that must survive, inputs must come back unchanged, both runs must
agree to the bit, and so must the registers that belong to the caller. A stray access beyond a
guard page kills the process: big runs go through `property_run`, whose workers name the seed they
are at.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
import pytest
from iced_x86 import Register

from looptune.backends import backend_for
from looptune.backends.x86_encode import Immediate, encode
from looptune.dtypes import is_whole, numpy_dtype, poison
from looptune.host import host_isas
from looptune.interpret import Chunks, interpret, whole
from looptune.ir import Nest, Plan, Tensor, plan_of
from looptune.legalize import legalize
from looptune.lower import lower
from looptune.program import Program
from looptune.reference import check
from looptune.runtime.memory import Code, install
from looptune.schedule import Schedule
from looptune.target import Target

needs_host = pytest.mark.skipif(not host_isas(), reason="this machine runs no supported kernels")
PAGE = mmap.PAGESIZE
GAP = 0xA5
NAN_BYTE = 0xFF  # 0xFF.. is a NaN in float32 and float64

Call = Callable[[list[np.ndarray]], object]
FUNCTION = ctypes.CFUNCTYPE(  # a kernel's arguments and its address; gives the bits it spoiled
    ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
    ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
)  # fmt: skip
KEPT = (Register.RBX, Register.RBP, Register.R12, Register.R13, Register.R14, Register.R15)
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@lru_cache(maxsize=64)
def pages(slot: int, count: int) -> np.ndarray:
    """`count` writable pages between two unreadable ones, kept for reuse under `slot`."""
    whole_map = np.frombuffer(mmap.mmap(-1, (count + 2) * PAGE), np.uint8)
    for guard in (whole_map[:PAGE], whole_map[-PAGE:]):
        if LIBC.mprotect(guard.ctypes.data, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect of a guard page")
    return whole_map[PAGE:-PAGE]


def guarded(slot: int, size: int, end: bool) -> tuple[np.ndarray, np.ndarray]:
    """`size` bytes flush with a guard page at their end or start, and the pages they lie in."""
    room = pages(slot, max(1, -(-size // PAGE)))
    return (room[len(room) - size :] if end else room[:size]), room


def reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """First element and one past the last, relative to element [0, ..., 0]."""
    if 0 in shape:
        return 0, 0
    ends = [stride * (size - 1) for size, stride in zip(shape, strides, strict=True)]
    return sum(min(0, e) for e in ends), sum(max(0, e) for e in ends) + 1


def place(slot: int, tensor: Tensor, end: bool, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """The tensor as a strided array against a guard page, and its pages, filled with `gap`."""
    dtype = numpy_dtype(tensor.dtype)
    low, high = reach(tensor.shape, tensor.strides)
    memory, room = guarded(slot, (high - low) * dtype.itemsize, end)
    room[:] = gap
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    array = np.ndarray(tensor.shape, dtype, memory, -low * dtype.itemsize, strides)
    return array, room


def values(tensor: Tensor, rng: np.random.Generator, exact: bool) -> np.ndarray:
    """Random numbers; with `exact` small integers, whose sums and products are exact.

    Elements that share memory, along a stride of 0, are equal.
    """
    shape = [size if stride else min(size, 1) for size, stride in zip(
        tensor.shape, tensor.strides, strict=True)]  # fmt: skip
    drawn = rng.integers(-3, 4, shape) if exact else rng.standard_normal(shape)
    if is_whole(tensor.dtype):
        drawn = rng.integers(-128, 128, shape)
    return np.broadcast_to(np.asarray(drawn).astype(numpy_dtype(tensor.dtype)), tensor.shape)


def with_nan(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The array with a NaN somewhere: it must reach the elements it belongs to and no other."""
    found = array.copy()
    if found.size and found.dtype.kind != "i":
        found.flat[rng.integers(found.size)] = np.nan
    return found


def run_poisoned(
    problem: Plan | Nest,
    call: Call,
    rng: np.random.Generator,
    exact: bool = False,
    nan: bool = False,
) -> np.ndarray:
    """Call a kernel on poisoned, guarded operands, output first, and check all it did.

    Returns the output. With `exact` the result must equal the reference, else lie in its bound;
    with `nan` the last input holds a NaN (unless elements share memory there).
    """
    plan = plan_of(problem) if isinstance(problem, Nest) else problem
    tensors = (plan.output, *plan.inputs)
    data = [values(tensor, rng, exact) for tensor in tensors]
    if nan and 0 not in data[-1].strides:
        data[-1] = with_nan(data[-1], rng)
    if not plan.accumulates:
        data[0] = np.full(plan.output.shape, poison(plan.dtype), numpy_dtype(plan.dtype))
    ends, starts = (run_once(tensors, data, call, end) for end in (True, False))
    assert ends.tobytes() == starts.tobytes(), "two runs differ"
    names = [tensor.name for tensor in tensors]
    found = check(plan, dict(zip(names, data, strict=True)), ends)
    assert found.ok, (
        f"element {list(found.where)} is {found.found!r}, not {found.expected!r}: "
        f"{found.worst:.3g} times the bound"
    )
    assert not exact or found.worst == 0, f"{found.found!r} at {found.where} is inexact"
    return ends


def run_once(
    tensors: Sequence[Tensor], data: Sequence[np.ndarray], call: Call, end: bool
) -> np.ndarray:
    """One run, flush with the guard pages at the operands' end or start."""
    arrays, rooms = [], []
    for slot, (tensor, content) in enumerate(zip(tensors, data, strict=True)):
        array, room = place(slot, tensor, end, NAN_BYTE if slot else GAP)
        array[...] = content
        arrays.append(array)
        rooms.append(room)
    before = [room.copy() for room in rooms]
    call(arrays)
    for slot, (room, old) in enumerate(zip(rooms[1:], before[1:], strict=True), 1):
        assert np.array_equal(room, old), f"input {tensors[slot].name} was written"
    result = arrays[0].copy()
    arrays[0][...] = data[0]
    assert np.array_equal(rooms[0], before[0]), "bytes outside the output were written"
    return result


def guard_registers() -> bytes:
    """Code that calls the kernel at r8; returns what bits changed in the caller's registers."""
    marks = [(register, Immediate(0x51525300 + register)) for register in KEPT]
    return b"".join((
        *(encode("PUSH_R64", register) for register in KEPT),
        *(encode("MOV_RM64_IMM32", *mark) for mark in marks),
        encode("SUB_RM64_IMM8", Register.RSP, Immediate(8)),  # calls want the stack at 16
        encode("CALL_RM64", Register.R8),
        encode("ADD_RM64_IMM8", Register.RSP, Immediate(8)),
        encode("XOR_R32_RM32", Register.EAX, Register.EAX),
        *(encode("XOR_RM64_IMM32", *mark) for mark in marks),
        *(encode("OR_R64_RM64", Register.RAX, register) for register in KEPT),
        *(encode("POP_R64", register) for register in reversed(KEPT)),
        encode("RETNQ"),
    ))  # fmt: skip


@cache
def guard() -> Code:
    """`guard_registers` in memory."""
    return install(guard_registers())


def native(programs: Sequence[Program], chunks: Chunks = whole) -> Call:
    """Legalized Programs as machine code, called straight through ctypes."""
    codes = [install(backend_for(p.target)(p)) for p in programs]
    checked = FUNCTION(guard().address)
    size = max(p.scratch_bytes for p in programs)

    def call(arrays: list[np.ndarray]) -> None:
        scratch, room = guarded(-1, -(-size // 64) * 64, end=True)
        room[:] = NAN_BYTE
        addresses = [*(a.ctypes.data for a in arrays), scratch.ctypes.data]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        for program, code in zip(programs, codes, strict=True):
            for begin, end in chunks(program.trips):
                place = scratch
                if program.private_scratch:
                    place, room = guarded(-2, -(-size // 64) * 64, end=True)
                    room[:] = NAN_BYTE
                spoiled = checked(pointers, place.ctypes.data, begin, end, code.address)
                assert not spoiled, "a register that belongs to the caller was changed"

    return call


def interpreted(programs: Sequence[Program], chunks: Chunks = whole) -> Call:
    """Programs run by the interpreter."""
    return lambda arrays: interpret(programs, arrays, chunks)


def programs_of(schedule: Schedule, target: Target) -> tuple[Program, ...]:
    """The legalized Programs of a schedule."""
    return tuple(legalize(program) for program in lower(schedule, target))


def compiled(schedule: Schedule, target: Target, chunks: Chunks = whole) -> Call:
    """Machine code of a schedule, without the runtime's Kernel in between."""
    return native(programs_of(schedule, target), chunks)
