"""The C extension alone: what its Entry takes, hands back, shares among threads and lets go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from builders import nest_of
from harness import needs_host

from looptune.build import generate
from looptune.host import host_target
from looptune.ir import Plan, plan_of
from looptune.runtime.call import InstalledStage, layout_of, make_entry
from looptune.runtime.memory import Code, install
from looptune.schedule import Schedule, parallel, parse_order

native: Any = pytest.importorskip(
    "looptune.runtime._native", reason="the C extension was not built", exc_type=ImportError
)
pytestmark = needs_host

# Tiny stages; rdi = operand pointers, rsi = scratch, rdx and rcx = begin and end.
COUNT_TRIPS = bytes.fromhex(
    "48 8b 07"  # mov rax, [rdi]
    "48 39 ca"  # next: cmp rdx, rcx
    "7d 08"  # jge done
    "ff 04 90"  # inc dword [rax + 4 * rdx]
    "48 ff c2"  # inc rdx
    "eb f3"  # jmp next
    "c3"  # done: ret
)
STORE_SCRATCH = bytes.fromhex(
    "48 8b 07"  # mov rax, [rdi]
    "48 89 30"  # mov [rax], rsi
    "c3"  # ret
)
COPY_EIGHT_BYTES = bytes.fromhex(
    "48 8b 07"  # mov rax, [rdi]
    "48 8b 4f 08"  # mov rcx, [rdi + 8]
    "48 8b 09"  # mov rcx, [rcx]
    "48 89 08"  # mov [rax], rcx
    "c3"  # ret
)
# Each trip stores its thread's number and sleeps 5 ms, so that no thread can take all trips.
STORE_THREAD = bytes.fromhex(
    "53 55 41 54"  # push rbx, rbp, r12
    "48 8b 1f 48 89 d5 49 89 cc"  # mov rbx, [rdi]; mov rbp, rdx; mov r12, rcx
    "4c 39 e5 7d 26"  # next: cmp rbp, r12; jge done
    "b8 ba 00 00 00 0f 05"  # gettid
    "89 04 ab"  # mov [rbx + 4 * rbp], eax
    "68 40 4b 4c 00 6a 00"  # push 5000000, 0
    "48 89 e7 31 f6 b8 23 00 00 00 0f 05"  # nanosleep(rsp, 0)
    "48 83 c4 10 48 ff c5 eb d5"  # add rsp, 16; inc rbp; jmp next
    "41 5c 5d 5b c3"  # done: pop r12, rbp, rbx; ret
)


class Held(NamedTuple):
    """An Entry beside the code that it runs but does not keep."""

    entry: Any
    codes: list[Code]


def tiny(code: bytes, size: int, trips: int, *, dtype: str = "f", scratch: int = 0) -> Held:
    """One stage whose only operand is the output, a vector."""
    item = 4 if dtype == "f" else 8
    held = install(code)
    tensors = ((dtype, (size,), (item,), -1),)
    entry = native.Entry(((held.address, (0,), trips, 0),), tensors, scratch, True, "tiny")
    return Held(entry, [held])


def generated(plan: Plan, schedule: Schedule) -> Held:
    """A generated nest behind an Entry, made as the kernel makes it."""
    made = generate(schedule, host_target())
    number = {tensor.name: i for i, tensor in enumerate(plan.tensors)}
    tensors = tuple(number[operand.name] for operand in schedule.nest.operands)
    steps = [
        InstalledStage(install(code), tensors, program.trips)
        for program, code in zip(made.programs, made.codes, strict=True)
    ]
    layout = layout_of(plan, max(program.scratch_bytes for program in made.programs))
    return Held(make_entry(plan, steps, layout, True), [step.code for step in steps])


def matmul(m: int, n: int, k: int, dtype: str = "float32") -> Held:
    nest = nest_of("mk,kn->mn", dtype, m=m, k=k, n=n)
    return generated(plan_of(nest), Schedule(nest))


def randoms(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(-1, 1, shape).astype(dtype) for shape in shapes]


def vector(held: Held, size: int, dtype: str = "float32") -> np.ndarray:
    """The bits that a tiny stage leaves in a zeroed output."""
    out = np.zeros(size, dtype)
    assert held.entry(out=out) is out
    return out.view(np.int32 if dtype == "float32" else np.int64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_computes_into_out(dtype):
    held = matmul(5, 6, 7, dtype)
    a, b = randoms((5, 7), (7, 6), dtype=dtype)
    out = np.full((5, 6), np.nan, dtype)
    assert held.entry(a, b, out=out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)


UNUSUAL: dict[str, Callable[..., object]] = {
    "no out": lambda e, a, b, out: e(a, b),
    "out is None": lambda e, a, b, out: e(a, b, out=None),
    "out by position": lambda e, a, b, out: e(a, b, out),
    "an input less": lambda e, a, b, out: e(a, out=out),
    "an input more": lambda e, a, b, out: e(a, b, b, out=out),
    "a keyword more": lambda e, a, b, out: e(a, b, out=out, order="C"),
    "a list": lambda e, a, b, out: e(a.tolist(), b, out=out),
    "other dtype": lambda e, a, b, out: e(a.astype("f8"), b, out=out),
    "integers of the size": lambda e, a, b, out: e(a.view("i4"), b, out=out),
    "other byte order": lambda e, a, b, out: e(a.astype(">f4"), b, out=out),
    "other shape": lambda e, a, b, out: e(a, b[:4], out=out),
    "other rank": lambda e, a, b, out: e(a, b, out=out.ravel()),
    "other strides": lambda e, a, b, out: e(np.asfortranarray(a), b, out=out),
    "backwards": lambda e, a, b, out: e(a[:, ::-1], b, out=out),
    "misaligned": lambda e, a, b, out: e(misaligned(a), b, out=out),
    "read-only out": lambda e, a, b, out: e(a, b, out=read_only(out)),
}


def misaligned(array: np.ndarray) -> np.ndarray:
    raw: np.ndarray = np.zeros(array.nbytes + 1, np.uint8)[1:]
    return raw.view(array.dtype).reshape(array.shape)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("call", UNUSUAL.values(), ids=UNUSUAL)
def test_hands_back_what_is_unusual_untouched(call):
    held = matmul(3, 8, 5)
    a, b = randoms((3, 5), (5, 8))
    out = np.full((3, 8), 7, np.float32)
    assert call(held.entry, a, b, out) is NotImplemented
    assert (out == 7).all()


def test_hands_back_outputs_that_overlap_an_input():
    held = matmul(4, 4, 4)
    buffer = np.ones(48, np.float32)
    a, b = buffer[16:32].reshape(4, 4), np.ones((4, 4), np.float32)
    for offset in (1, 15, 16, 17, 31):
        out = buffer[offset : offset + 16].reshape(4, 4)
        assert held.entry(a, b, out=out) is NotImplemented
        assert held.entry(b, a, out=out) is NotImplemented
    assert (buffer == 1).all()
    for offset in (0, 32):
        out = buffer[offset : offset + 16].reshape(4, 4)
        assert held.entry(a, b, out=out) is out


def strided(array: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def test_takes_the_strides_it_was_made_for():
    code = install(COPY_EIGHT_BYTES)
    tensors = (("d", (3, 2), (-16, 8), -1), ("d", (3, 2), (64, 8), -1))
    entry = native.Entry(((code.address, (0, 1), 1, 0),), tensors, 0, False, "views")
    source, target = np.arange(24.0).reshape(3, 8), np.zeros((3, 2))
    assert entry(source[:, :2], out=target[::-1]) is not NotImplemented
    assert target[2, 0] == source[0, 0]
    assert entry(source[:, :2], out=target) is NotImplemented
    assert entry(source[:, ::4], out=target[::-1]) is NotImplemented


def test_reads_negative_strides_as_a_range_below_the_first_element():
    code = install(COPY_EIGHT_BYTES)
    tensors = (("d", (4,), (-8,), -1), ("d", (4,), (8,), -1))
    entry = native.Entry(((code.address, (0, 1), 1, 0),), tensors, 0, False, "reversed")
    buffer = np.zeros(8)
    assert entry(buffer[4:], out=buffer[3::-1]) is not NotImplemented
    assert entry(buffer[:4], out=buffer[3::-1]) is NotImplemented
    assert entry(buffer[3:7], out=buffer[3::-1]) is NotImplemented


def test_strides_of_single_elements_do_not_matter():
    held = matmul(4, 3, 1)
    a, b = randoms((4, 1), (1, 3))
    out = np.empty((4, 3), np.float32)
    assert held.entry(strided(a, (4, 4000)), strided(b, (-8, 4)), out=out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-6)


def test_strides_and_places_of_empty_arrays_do_not_matter():
    held = matmul(2, 3, 0)
    out = np.full((2, 3), np.nan, np.float32)
    a, b = strided(out[:, :0], (100, 4)), out[:0]  # within out, yet nothing is shared
    assert held.entry(a, b, out=out) is out
    assert (out == 0).all()


def test_strides_of_empty_tensors_are_not_compared():
    tensors = (("d", (2, 0), (100, 8), -1),)  # no exporter shows these for an empty array
    entry = native.Entry((), tensors, 0, False, "empty")
    out = np.empty((2, 0))
    assert entry(out=out) is out


def test_takes_any_buffer_of_floats():
    held = matmul(1, 1, 2)
    a = np.array([[2, 3]], np.float32).data
    out = memoryview(bytearray(4)).cast("f", (1, 1))
    assert held.entry(a, np.array([[10], [1]], "=f4"), out=out) is out
    assert out[0, 0] == 23


def test_temporaries_live_in_scratch():
    code = install(COPY_EIGHT_BYTES)
    arguments = (("d", (), (), -1), ("d", (), (), -1))
    temporary = ("d", (), (), 64)
    stages = ((code.address, (2, 1), 1, 0), (code.address, (0, 2), 1, 0))
    entry = native.Entry(stages, (*arguments, temporary), 72, False, "twice")
    out = np.zeros(())
    entry(np.array(3.5), out=out)
    assert out == 3.5


@pytest.mark.parametrize(("scratch", "alignment"), [(1, 64), (1000, 64), (3 << 20, 2 << 20)])
def test_scratch_is_aligned_and_leased_again(scratch, alignment):
    held = tiny(STORE_SCRATCH, 1, 1, dtype="d", scratch=scratch)
    bases = {int(vector(held, 1, "float64")[0]) for _ in range(5)}
    assert len(bases) == 1
    assert bases.pop() % alignment == 0


def test_calls_at_once_have_scratch_of_their_own():
    held = matmul(64, 64, 64)
    cases = [randoms((64, 64), (64, 64)) for _ in range(8)]

    def work(case: list[np.ndarray]) -> bool:
        a, b = case
        out = np.empty((64, 64), np.float32)
        return all(np.allclose(held.entry(a, b, out=out), a @ b, atol=1e-4) for _ in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, cases))


# Workers stay, so only few trips may meet the most threads.
@pytest.mark.parametrize(
    ("threads", "trips"),
    [(1, 1000), (2, 0), (2, 1), (2, 2), (3, 1000), (7, 5), (7, 1000), (4096, 5)],
)
def test_every_trip_runs_once(threads, trips):
    held = tiny(COUNT_TRIPS, 1000, trips)
    held.entry.threads = threads
    assert held.entry.threads == threads
    counts = vector(held, 1000)
    assert (counts[:trips] == 1).all()
    assert (counts[trips:] == 0).all()


@pytest.mark.parametrize(("threads", "trips", "most"), [(1, 4, 1), (4, 16, 4), (2, 8, 2)])
def test_trips_are_shared_among_so_many_threads(threads, trips, most):
    held = tiny(STORE_THREAD, trips, trips)
    held.entry.threads = threads
    seen = set(vector(held, trips).tolist())
    assert threading.get_native_id() in seen
    assert min(threads, 2) <= len(seen) <= most


def test_many_callers_share_one_pool():
    held = tiny(COUNT_TRIPS, 500, 500)
    held.entry.threads = 3

    def work(_: int) -> bool:
        return all((vector(held, 500) == 1).all() for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_generated_code_shares_its_parallel_loop():
    nest = nest_of("mk,kn->mn", m=37, k=16, n=24)
    held = generated(plan_of(nest), parallel(parse_order(nest, "m n k"), 0))
    held.entry.threads = 4
    a, b = randoms((37, 16), (16, 24))

    def work(_: int) -> bool:
        out = np.full((37, 24), np.nan, np.float32)
        return all(np.allclose(held.entry(a, b, out=out), a @ b, atol=1e-4) for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("threads", [0, -1, 4097])
def test_refuses_thread_counts(threads):
    with pytest.raises(ValueError, match="threads: 1 to 4096 would do"):
        tiny(COUNT_TRIPS, 1, 1).entry.threads = threads


SCRIPT = """
import os, resource, sys, threading
sys.path.insert(0, {tests!r})
from test_native import COUNT_TRIPS, STORE_THREAD, tiny, vector
held = tiny(COUNT_TRIPS, 400, 400)
held.entry.threads = 3
{body}
"""
CORES = """
def affinities():
    return [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
allowed = os.sched_getaffinity(0)
for wanted in [allowed, *({core} for core in allowed), allowed, {min(allowed)}, allowed]:
    for name in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(name), wanted)  # as taskset does
    for _ in range(500):
        assert (vector(held, 400) == 1).all()
        assert all(cores == wanted for cores in affinities()), (wanted, affinities())
    assert len(affinities()) == 3
"""
FORK = """
assert (vector(held, 400) == 1).all()
child = os.fork()
if child == 0:
    good = all((vector(held, 400) == 1).all() for _ in range(100))
    slow = tiny(STORE_THREAD, 8, 8)
    slow.entry.threads = 2
    os._exit(0 if good and len(set(vector(slow, 8).tolist())) == 2 else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert (vector(held, 400) == 1).all()
"""
FORK_WHILE_BUSY = """
slow, short = tiny(STORE_THREAD, 80, 80), tiny(STORE_THREAD, 8, 8)
slow.entry.threads = short.entry.threads = 2
thread = threading.Thread(target=vector, args=(slow, 80))
thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        good = (vector(held, 400) == 1).all()
        os._exit(0 if good and len(set(vector(short, 8).tolist())) == 2 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
thread.join()
"""
NO_THREADS = """
before = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))  # no stack fits
assert (vector(held, 400) == 1).all()
assert len(os.listdir("/proc/self/task")) == before
"""
SIGNALS = """
vector(held, 400)
masks = []
for task in os.listdir("/proc/self/task"):
    if int(task) != os.getpid():
        status = open(f"/proc/self/task/{task}/status").read()
        masks.append(int(status.split("SigBlk:")[1].split()[0], 16))
workers = [mask for mask in masks if mask >> 1 & 1]  # SIGINT
assert len(workers) == 2, masks
"""
BODIES = {
    "fork": FORK,
    "fork while busy": FORK_WHILE_BUSY,
    "workers keep to the cores that they are given": CORES,
    "no thread to be had": NO_THREADS,
    "workers take no signals": SIGNALS,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_in_a_process_of_its_own(body, request):
    script = SCRIPT.format(tests=str(request.path.parent), body=body)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        cwd=request.path.parents[1], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_runs_on_checked_pointers():
    held = matmul(5, 6, 7)
    a, b = randoms((5, 7), (7, 6))
    out = np.empty((5, 6), np.float32)
    pointers = tuple(array.ctypes.data for array in (out, a, b))
    assert held.entry.run_pointers(pointers, threads=2) is None
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)
    with pytest.raises(TypeError, match="a tuple of 3 addresses is needed"):
        held.entry.run_pointers(pointers[:2])
    with pytest.raises(TypeError):
        held.entry.run_pointers((*pointers[:2], "b"))


def test_times_calls_in_turn_over_sets_of_pointers():
    held = tiny(COUNT_TRIPS, 4, 4)
    outs = [np.zeros(4, np.int32) for _ in range(3)]
    sets = [(out.ctypes.data,) for out in outs]
    assert held.entry.seconds(sets, 8, threads=2) > 0
    assert [out.tolist() for out in outs] == [[3] * 4, [3] * 4, [2] * 4]
    with pytest.raises(ValueError, match="at least one set of addresses"):
        held.entry.seconds([], 8)
    with pytest.raises(TypeError, match="a tuple of 1 addresses"):
        held.entry.seconds([(1, 2)], 8)


def test_calls_an_address():
    code, out = install(COUNT_TRIPS), np.zeros(6, np.int32)
    native.call_address(code.address, (out.ctypes.data,), 0, 2, 5)
    assert out.tolist() == [0, 0, 1, 1, 1, 0]
    place = np.zeros(1, np.int64)
    native.call_address(install(STORE_SCRATCH).address, (place.ctypes.data,), 12345, 0, 1)
    assert place[0] == 12345
    with pytest.raises(TypeError):
        native.call_address(code.address, ("out",), 0, 0, 1)


OUTPUT = ("f", (2,), (4,), -1)


@pytest.mark.parametrize(
    ("stages", "tensors", "scratch", "message"),
    [
        ((), (), 0, "the first tensor is the output; there is none"),
        ((), (("f", (2,), (4,), 0),), 64, "the first tensor is the output; there is none"),
        ((), (OUTPUT, ("f", (2,), (4,), 0), OUTPUT), 64, "an argument comes behind a temporary"),
        ((), (OUTPUT, ("f", (2,), (4,), 60)), 64, "a temporary lies outside the scratch"),
        ((), (OUTPUT,), -1, "-1 bytes of scratch"),
        ((), (("q", (2,), (8,), -1),), 0, "format 'q'; one of 'fdeibZ' would do"),
        ((), (("f", (1,) * 65, (4,) * 65, -1),), 0, "65 dimensions; at most 64"),
        (((1, (1,), 1, 0),), (OUTPUT,), 0, "a stage names tensor 1 of 1"),
        (((1, (0,), 1, -1),), (OUTPUT,), 0, "-1 bytes of private scratch"),
    ],
)
def test_refuses_what_it_cannot_run(stages, tensors, scratch, message):
    with pytest.raises(ValueError, match=message):
        native.Entry(stages, tensors, scratch, True, "bad")


def test_refuses_ragged_tensors():
    with pytest.raises(TypeError, match="a tuple of 1 numbers is needed"):
        native.Entry((), (("f", (2,), (4, 4), -1),), 0, True, "bad")


def test_keeps_no_reference_to_arguments():
    held = matmul(3, 8, 5)
    a, b = randoms((3, 5), (5, 8))
    out, spare = np.empty((3, 8), np.float32), a.astype("f8")
    everything = (a, b, out, spare, held.entry, NotImplemented)
    pointers = tuple(array.ctypes.data for array in (out, a, b))
    before = [sys.getrefcount(item) for item in everything]
    for _ in range(100):
        held.entry(a, b, out=out)
        held.entry(spare, b, out=out)
        held.entry(a, a, out=out)
        held.entry.run_pointers(pointers)
        held.entry.seconds([pointers], 1)
    assert [sys.getrefcount(item) for item in everything] == before


def test_releases_buffers():
    held = tiny(COUNT_TRIPS, 2, 2)
    data = bytearray(8)
    held.entry(out=memoryview(data).cast("f"))
    held.entry(out=memoryview(data).cast("i"))
    gc.collect()
    data.append(0)  # BufferError while someone looks at it


class Kernel(native.Caller):  # type: ignore[misc]
    def checked(self, *inputs: object, **options: object) -> object:
        return inputs, options


def test_callers_try_their_entry_first():
    kernel, held = Kernel(), tiny(COUNT_TRIPS, 2, 2)
    out = np.zeros(2, np.float32)
    assert kernel(out=out) == ((), {"out": out})
    kernel.bind(held.entry)
    assert kernel(out=out) is out
    assert kernel(1, out=2) == ((1,), {"out": 2})
    with pytest.raises(TypeError, match="bind takes an Entry"):
        kernel.bind(kernel)


def test_callers_let_go_of_themselves_and_their_entry():
    entry = tiny(COUNT_TRIPS, 2, 2).entry
    before = sys.getrefcount(entry)
    kernel = Kernel()
    gone = weakref.ref(kernel)
    kernel.bind(entry)
    kernel.bind(entry)
    assert sys.getrefcount(entry) == before + 1
    del kernel
    gc.collect()
    assert gone() is None
    assert sys.getrefcount(entry) == before
