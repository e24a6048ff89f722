"""The call contract, on both call paths: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import array
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import nest_of
from harness import needs_host

import looptune
from looptune.build import build
from looptune.default import default_schedule
from looptune.errors import (
    ArgumentError,
    ArgumentTypeError,
    LoweringError,
    ScheduleError,
    UnsupportedHostError,
)
from looptune.host import host_target
from looptune.ir import Dim, Nest, Operand, Plan, Tensor, plan_of
from looptune.lower import lower
from looptune.reference import reference
from looptune.runtime import call
from looptune.runtime.kernel import Kernel
from looptune.schedule import Schedule, pack, parallel, parse_order
from looptune.target import TARGETS
from looptune.workloads import conv2d, matmul

pytestmark = needs_host
PATHS = ["ctypes"] if call.extension is None else ["ctypes", "native"]


def kernel_of(nest: Nest, path: str = "ctypes") -> Kernel:
    target = host_target()
    kernel = build(nest, [default_schedule(nest, target)], target)
    return kernel.with_path(native=path == "native")


def matmul_kernel(m: int, n: int, k: int, path: str = "ctypes") -> Kernel:
    return kernel_of(nest_of("mk,kn->mn", m=m, k=k, n=n), path)


def randoms(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def test_computes_with_and_without_out(path):
    kernel = matmul_kernel(9, 17, 5, path)
    a, b = randoms((9, 5), (5, 17))
    out = np.full((9, 17), np.nan, np.float32)
    assert kernel(a, b, out=out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)
    np.testing.assert_array_equal(kernel(a, b), out)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda a, b: (a,), ArgumentTypeError, r"takes 2 inputs \['a', 'b'\]; 1 were given"),
        (lambda a, b: (a.astype("f8"), b), ArgumentTypeError, r"input 0 \(a\) is .*float64"),
        (lambda a, b: (a.astype(">f4"), b), ArgumentTypeError, r"needs float32"),
        (lambda a, b: (a, b[:4]), ArgumentError, r"input 1 \(b\) has shape \(4, 8\); .*\(5, 8\)"),
        (lambda a, b: (np.asfortranarray(a), b), ArgumentError, r"strides .* made for \(20, 4\)"),
        (lambda a, b: (a[:, ::-1], b), ArgumentError, r"has strides \(20, -4\)"),
        (lambda a, b: ("no", b), ArgumentTypeError, r"operand 0 is a str"),
        (lambda a, b: (misaligned(a), b), ArgumentError, r"not aligned to its 4-byte elements"),
    ],
)
def test_refuses_arguments_that_do_not_fit(path, bad, error, message):
    kernel = matmul_kernel(3, 8, 5, path)
    arguments = bad(*randoms((3, 5), (5, 8)))
    for out in (None, np.empty((3, 8), np.float32)):
        with pytest.raises(error, match=message):
            kernel(*arguments, out=out)


def misaligned(a: np.ndarray) -> np.ndarray:
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:]
    return raw.view(a.dtype).reshape(a.shape)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda a: np.empty((3, 7), np.float32), ArgumentError, r"out has shape \(3, 7\)"),
        (lambda a: np.empty((3, 8)), ArgumentTypeError, r"out is .*float64"),
        (lambda a: read_only((3, 8)), ArgumentError, r"out is read-only"),
        (lambda a: [[0.0]], ArgumentTypeError, r"is a list"),
    ],
)
def test_refuses_outputs_that_do_not_fit(path, out, error, message):
    a, b = randoms((3, 5), (5, 8))
    with pytest.raises(error, match=message):
        matmul_kernel(3, 8, 5, path)(a, b, out=out(a))


def read_only(shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, np.float32)
    array.flags.writeable = False
    return array


def test_refuses_outputs_that_share_memory_with_inputs(path):
    kernel = matmul_kernel(4, 4, 4, path)
    buffer = np.ones(20, np.float32)
    a, shifted = buffer[:16].reshape(4, 4), buffer[1:17].reshape(4, 4)
    b = np.ones((4, 4), np.float32)
    for out, inputs in ((a, (a, b)), (a, (b, a)), (shifted, (a, b))):
        with pytest.raises(ArgumentError, match=r"out shares memory with input \d"):
            kernel(*inputs, out=out)


def test_interleaved_views_that_share_no_element_are_fine(path):
    rows = Operand("a", "float32", (Dim(8, 2, (1,)),))
    nest = replace(nest_of("m->m", m=8), inputs=(rows,))
    nest = replace(nest, output=Operand("out", "float32", (Dim(8, 2, (1,)),)))
    buffer = np.arange(16, dtype=np.float32)
    kernel_of(nest, path)(buffer[::2], out=buffer[1::2])
    np.testing.assert_array_equal(buffer[1::2], buffer[::2])


def test_strides_of_size_one_dimensions_do_not_matter(path):
    kernel = kernel_of(nest_of("mk,kn->mn", m=8, k=1, n=4), path)
    a, b = randoms((8, 1), (1, 4))
    for stride in (4, 32, 3996):
        odd = np.lib.stride_tricks.as_strided(a, (8, 1), (4, stride))
        out = np.full((8, 4), np.nan, np.float32)
        np.testing.assert_allclose(kernel(odd, b, out=out), a @ b, rtol=1e-6)


def test_gap_columns_of_strided_views_stay_untouched(path):
    nest = nest_of("mk,kn->mn", m=64, k=64, n=239)
    wide = Operand("out", "float32", (Dim(64, 240, (1, 0, 0)), Dim(239, 1, (0, 0, 1))))
    b_wide = Operand("b", "float32", (Dim(64, 240, (0, 1, 0)), Dim(239, 1, (0, 0, 1))))
    kernel = kernel_of(replace(nest, output=wide, inputs=(nest.inputs[0], b_wide)), path)
    a, b = randoms((64, 64), (64, 240))
    out = np.full((64, 240), 7, np.float32)
    kernel(a, b[:, :239], out=out[:, :239])
    np.testing.assert_allclose(out[:, :239], a @ b[:, :239], atol=1e-4)
    assert (out[:, 239] == 7).all()


def test_zero_sizes(path):
    for m, n, k in ((1, 1, 0), (5, 7, 0), (0, 3, 4), (3, 0, 2)):
        out = np.full((m, n), np.nan, np.float32)
        matmul_kernel(m, n, k, path)(*randoms((m, k), (k, n)), out=out)
        assert (out == 0).all()


def test_accumulating_kernels_need_an_output(path):
    nest = replace(nest_of("mk,kn->mn", m=9, k=3, n=20), accumulate=True)
    kernel = kernel_of(nest, path)
    a, b, old = randoms((9, 3), (3, 20), (9, 20))
    out = old.copy()
    np.testing.assert_allclose(kernel(a, b, out=out), old + a @ b, rtol=1e-4, atol=1e-6)
    with pytest.raises(ArgumentError, match="out is missing"):
        kernel(a, b)


def test_plans_run_their_nests_over_temporaries(path):
    first, second = nest_of("ij,jk->ik", i=6, j=7, k=9), nest_of("ij,jk->ik", i=6, j=9, k=11)
    rename = {"out": "t"}
    first = replace(first, output=replace(first.output, name=rename["out"]))
    second = replace(second, inputs=tuple(
        replace(op, name=name) for op, name in zip(second.inputs, ("t", "c"), strict=True)
    ))  # fmt: skip

    def tensor(operand: Operand) -> Tensor:
        return Tensor(operand.name, operand.dtype, operand.shape, operand.strides)

    inputs = (*map(tensor, first.inputs), tensor(second.inputs[1]))
    plan = Plan((first, second), inputs, tensor(second.output), (tensor(first.output),))
    target = host_target()
    kernel = build(plan, [Schedule(first), Schedule(second)], target)
    a, b, c = randoms((6, 7), (7, 9), (9, 11))
    result = kernel.with_path(native=path == "native")(a, b, c)
    np.testing.assert_allclose(result, a @ b @ c, rtol=1e-4, atol=1e-5)
    with pytest.raises(ScheduleError, match="1 schedules for the 2 nests of a plan"):
        build(plan, [Schedule(first)], target)


def test_buffers_and_scalars_are_operands(path):
    kernel = matmul_kernel(1, 1, 3, path)
    a = memoryview(array.array("f", [1, 2, 3])).cast("B").cast("f", (1, 3))
    b = np.array([[1], [10], [100]], np.float32)
    assert kernel(a, b).item() == 321


def test_torch_tensors_in_torch_tensors_out(path):
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(x) for x in randoms((4, 5), (5, 6)))
    result = matmul_kernel(4, 6, 5, path)(a, b)
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result, a @ b)


def test_gradients_are_not_lost_in_silence(path):
    torch = pytest.importorskip("torch")
    kernel = matmul_kernel(4, 6, 5, path)
    a, b = (torch.from_numpy(x) for x in randoms((4, 5), (5, 6)))
    b.requires_grad_()
    with pytest.raises(ArgumentTypeError, match=r"operand 1 requires a gradient.*detach"):
        kernel(a, b)
    with pytest.raises(ArgumentTypeError, match="operand 1 requires a gradient"):
        looptune.matmul(a, b)
    with pytest.raises(ArgumentTypeError, match="operand 1 requires a gradient"):
        kernel.prepack(b)
    wanted = a @ b.detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(kernel(a, b), wanted)
            torch.testing.assert_close(looptune.matmul(a, b), wanted)
    assert looptune.optimize("mk,kn->mn", shapes=[a, b], database=None).plan.nests  # an example


def test_kernels_of_nests_are_named_by_what_they_compute():
    (nest,) = matmul(4, 6, 5).nests
    kernel = looptune.compile(nest, Schedule(nest), target="avx2", verify=False)
    assert repr(kernel) == "<Kernel out[m, n] += a[m, k] * b[k, n] for avx2 from schedule>"


def test_one_kernel_from_many_threads(path):
    kernel = matmul_kernel(64, 48, 32, path)
    a, b = randoms((8, 64, 32), (8, 32, 48))

    def work(number: int) -> bool:
        results = [kernel(a[number], b[number]) for _ in range(50)]
        wanted = a[number] @ b[number]
        return all(np.allclose(result, wanted, atol=1e-4) for result in results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.skipif(call.extension is None, reason="needs the C extension")
def test_long_kernels_release_the_gil():
    kernel = matmul_kernel(768, 768, 768, "native")
    a, b = randoms((768, 768), (768, 768))
    out = np.empty((768, 768), np.float32)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)  # lets go of the interpreter

    previous = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # without a release the other thread would never run
    thread = threading.Thread(target=tick)
    try:
        thread.start()
        before = ticks[0]
        kernel(a, b, out=out)
        during = ticks[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(previous)
        thread.join()
    assert during > 0


def test_kernels_pickle_as_provenance():
    kernel = matmul_kernel(20, 30, 10)
    again = pickle.loads(pickle.dumps(kernel))
    assert again.code_bytes == kernel.code_bytes
    assert again.schedule.actions == kernel.schedule.actions
    assert len(pickle.dumps(kernel)) < 20_000


def test_a_kernel_tells_what_it_is():
    kernel = matmul_kernel(64, 64, 64)
    assert "vfmadd231ps" in kernel.asm
    assert kernel.flops == 2 * 64**3
    assert "for" in kernel.loop_tree
    told = str(kernel.explain())
    assert "register tile" in told
    assert "flop/byte" in told
    assert kernel.explain().code_bytes == len(kernel.code_bytes)
    assert kernel.measure(seconds=0.01).median > 0


def test_foreign_targets_are_made_and_not_run():
    nest = nest_of("mk,kn->mn", m=2, k=2, n=2)
    foreign = replace(TARGETS["avx2"], name="neon", isa="neon")
    kernel = Kernel(plan_of(nest), (Schedule(nest),), (), foreign, "test", ())
    with pytest.raises(UnsupportedHostError, match="does not run neon"):
        kernel(*randoms((2, 2), (2, 2)))


def test_fifty_thousand_kernels_alive_at_once():
    from looptune.runtime.memory import install

    code = matmul_kernel(2, 2, 2).code_bytes
    before = len(Path("/proc/self/maps").read_text().splitlines())
    held = [install(code) for _ in range(50_000)]
    assert len({item.address for item in held}) == 50_000
    assert all(item.address % 64 == 0 for item in held)
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 500


def test_memory_is_never_writable_and_executable():
    matmul_kernel(2, 2, 2)
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if "memfd:looptune" in line]
    assert rights
    assert all(right.startswith("r-x") for right in rights)


SCRIPT = """
import ctypes, os, sys
import numpy as np
{setup}
sys.path.insert(0, {tests!r})
from test_kernel import matmul_kernel
kernel = matmul_kernel(5, 6, 7)
a, b = np.ones((5, 7), np.float32), np.ones((7, 6), np.float32)
{check}
"""
MDWE = """
if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0):
    sys.exit(77)  # PR_SET_MDWE is newer than this kernel
"""
FORK = """
kernel(a, b)
child = os.fork()
if child == 0:
    fresh = matmul_kernel(5, 6, 7)
    good = (kernel(a, b) == 7).all() and (fresh(a, b) == 7).all()
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""


# The handler stands before looptune's own registrations, and so runs after them.
EARLY = "import atexit; atexit.register(lambda: os._exit(0 if (kernel(a, b) == 7).all() else 1))"


@pytest.mark.parametrize(
    ("setup", "check"),
    [(MDWE, "assert (kernel(a, b) == 7).all()"), ("", FORK), (EARLY, "")],
    ids=["mdwe", "fork", "exit"],
)
def test_in_a_process_of_its_own(setup, check, request):
    script = SCRIPT.format(setup=setup, check=check, tests=str(request.path.parent))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=request.path.parents[1]
    )
    if done.returncode == 77:
        pytest.skip("PR_SET_MDWE is newer than this kernel")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_packs_inside_the_parallel_loop_have_scratch_of_their_own(threads):
    """Weights packed and the output cached per thread; the padded image is shared."""
    (nest,) = conv2d((2, 6, 11, 13), (64, 6, 3, 3), padding=1).nests
    schedule = parse_order(nest, "o:16 n h w:7 c r s w o", vector="o")
    schedule = pack(pack(schedule, 2, (1, 2, 3, 0), at=0), 0, (0, 2, 3, 1), at=3)
    schedule = parallel(schedule, 0)
    kernel = build(nest, [schedule], host_target(), threads=threads)
    x, w = randoms((2, 6, 11, 13), (64, 6, 3, 3))
    out = np.empty((2, 64, 11, 13), np.float32)
    wanted = reference(kernel.plan, {"x": x, "w": w})
    for _ in range(50):
        out[...] = np.nan
        kernel(x, w, out=out)
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((1, 40, 40, 64), (64, 1, 3, 3), {"layout": "NHWC", "groups": 64, "padding": 1}),
        ((1, 40, 40, 64), (32, 64, 3, 3), {"layout": "NHWC", "padding": ((2, 0), (0, 3))}),
        ((2, 64, 29, 31), (48, 64, 3, 3), {"padding": 1}),
    ],
)
def test_threads_share_a_large_pack(threads, x, w, options):
    (nest,) = conv2d(x, w, **options).nests
    schedule = pack(Schedule(nest), 1, at="root")
    at = next(i for i, loop in enumerate(schedule.loops) if nest.axes[loop.axis].name == "h")
    kernel = build(nest, [parallel(schedule, at)], host_target(), threads=threads)
    image, weights = randoms(x, w)
    wanted = reference(kernel.plan, {"x": image, "w": weights})
    out = np.empty(kernel.plan.output.shape, np.float32)
    for _ in range(20):
        out[...] = np.nan
        kernel(image, weights, out=out)
        np.testing.assert_allclose(out, wanted, rtol=1e-3, atol=1e-3)


def test_a_write_cache_outside_the_parallel_loop_is_refused():
    nest = nest_of("mk,kn->mn", m=64, k=8, n=64)
    schedule = parse_order(nest, "n:16 m:6 k m n", vector="n")
    with pytest.raises(LoweringError, match="would be written back whole by each thread"):
        lower(parallel(pack(schedule, 0, at=0), 1), host_target())
