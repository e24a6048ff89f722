"""`einsum`, `matmul` and `conv2d` on arrays: NumPy's and torch's results, errors, caching."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import needs_host

import looptune
from looptune import api
from looptune.errors import (
    ArgumentError,
    ArgumentTypeError,
    LooptuneError,
    SpecError,
    UnsupportedError,
    UnsupportedHostError,
)
from looptune.schedule import Schedule

pytestmark = needs_host


def randoms(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(-1, 1, shape).astype(dtype) for shape in shapes]


EINSUMS = [
    ("ij,jk->ik", [(3, 4), (4, 5)]),
    ("ij,jk", [(3, 4), (4, 5)]),
    ("ba,", [(3, 4), ()]),
    ("ii", [(4, 4)]),
    ("ii->i", [(4, 4)]),
    ("iij,jk->ik", [(3, 3, 4), (4, 5)]),
    ("ij->ji", [(3, 5)]),
    ("i->", [(7,)]),
    ("->", [()]),
    (",", [(), ()]),
    ("i,i", [(2,), (1,)]),
    ("ij,ij->j", [(1, 5), (5, 5)]),
    ("t...i,ti->t...", [(10, 2), (1, 2)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 6)]),
    ("...,...", [(2, 3), (3,)]),
    ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 6)]),
    ("a,b,c,d->abcd", [(2,), (3,), (4,), (5,)]),
    ("ij,k->", [(3, 4), (5,)]),
    (" i j , j k -> k i ", [(3, 4), (4, 5)]),
    ("ijk,jr,kr->ir", [(4, 5, 6), (5, 3), (6, 3)]),
    ("ij,ji->", [(3, 4), (4, 3)]),
    ("bhqk,bkhd->bqhd", [(2, 3, 4, 5), (2, 5, 3, 6)]),
    ("obk,ijk->ioj", [(2, 4, 8), (2, 4, 8)]),
    ("i,j->ij", [(0,), (3,)]),
    ("ij,jk->ik", [(3, 0), (0, 5)]),
    ("abc,cd,de,ef->abf", [(2, 3, 4), (4, 5), (5, 6), (6, 7)]),
    ("ea,fb,abcd,gc,hd->efgh", [(3, 3), (3, 3), (3, 3, 3, 3), (3, 3), (3, 3)]),
    ("a,ab,abc,abcd,abcde,e->bcd", [(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 2), (2,)]),
]


@pytest.mark.parametrize(("spec", "shapes"), EINSUMS, ids=[spec for spec, _ in EINSUMS])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_einsum_is_numpys(spec, shapes, dtype):
    operands = randoms(*shapes, dtype=dtype)
    wanted = np.einsum(spec, *operands)
    found = looptune.einsum(spec, *operands)
    assert np.shape(found) == np.shape(wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "shapes", "message"),
    [
        ("ij,jk->iz", [(2, 3), (3, 4)], "output label 'z' is in no operand"),
        ("ij,jk->ii", [(2, 3), (3, 4)], "label 'i' is twice in the output"),
        ("ij,jk->ik", [(2, 3), (5, 4)], "label 'j' is 5 in operand 1 and 3 before"),
        ("ij,i->", [(5, 2), (2,)], "label 'i' is 2 in operand 1 and 5 before"),
        ("ijk,jk", [(2, 3), (3, 4)], "operand 0 has 2 dimensions for labels 'ijk'"),
        ("ij,jk", [(2, 3)], "names 2 operands; 1 were given"),
        ("i..j->ij", [(2, 3)], "operand 0 .* broken ellipsis"),
        ("i$->i", [(2, 3)], "not part of the grammar"),
        ("abc...->a", [(2,)], "fewer than 'abc...' names"),
    ],
)
def test_bad_specs_are_refused_where_numpy_refuses(spec, shapes, message):
    operands = randoms(*shapes)
    with pytest.raises(ValueError, match=r".*"):
        np.einsum(spec, *operands)
    with pytest.raises(SpecError, match=message):
        looptune.einsum(spec, *operands)


MATMULS = [
    ((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)), ((5, 1, 3, 4), (2, 4, 6)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)),
    ((1, 0), (0, 1)), ((5, 0), (0, 7)), ((0, 4), (4, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul_is_numpys(a, b):
    left, right = randoms(a, b)
    wanted = np.matmul(left, right)
    found = looptune.matmul(left, right)
    assert np.shape(found) == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_matmul_refuses_what_does_not_fit():
    with pytest.raises(ArgumentError, match="a has 4 columns and b 1 rows"):
        looptune.matmul(*randoms((3, 4), (1, 5)))
    with pytest.raises(ArgumentError, match="at least one dimension"):
        looptune.matmul(*randoms((3, 4), ()))


def test_every_transposed_and_strided_view():
    base = randoms((1024, 96), (96, 96))
    views = [lambda x: x, lambda x: x[::2], lambda x: x[::-1], lambda x: x[:, ::-1]]
    for view, transpose in itertools.product(views, [False, True]):
        a, b = view(base[0]), view(base[1]).T if transpose else view(base[1])
        a, b = (a[:, : b.shape[0]], b) if b.shape[0] < a.shape[1] else (a, b)
        np.testing.assert_allclose(looptune.matmul(a, b), a @ b, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(looptune.matmul(b.T, a.T), b.T @ a.T, rtol=1e-3, atol=1e-4)
    columns = np.lib.stride_tricks.as_strided(base[0], (96, 196), (4, 4))
    right = base[0][:196]
    np.testing.assert_allclose(
        looptune.matmul(columns, right), columns @ right, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("n", [3, 64])
def test_outputs_that_overlap_inputs_give_numpys_result(n):
    (start,) = randoms((n * n + 1,))
    for make in (
        lambda x: (x[:-1], x[:-1], x[:-1]),
        lambda x: (x[:-1], x[:-1], x[1:]),
        lambda x: (x[1:], x[:-1], x[1:]),
    ):
        ours, theirs = start.copy(), start.copy()
        for buffer, matmul in ((ours, looptune.matmul), (theirs, np.matmul)):
            a, b, out = (part.reshape(n, n) for part in make(buffer))
            matmul(a, b, out=out)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    a = start[:-1].reshape(n, n).copy()
    wanted = a @ a
    np.testing.assert_allclose(looptune.matmul(a, a, out=a.T), wanted, rtol=1e-4, atol=1e-5)


def test_outputs_of_every_layout():
    a, b = randoms((9, 5), (5, 12))
    for out in (
        np.empty((9, 12), np.float32),
        np.empty((12, 9), np.float32).T,
        np.empty((9, 24), np.float32)[:, ::2],
        np.empty((9, 12), np.float64),
        np.empty((18, 12), np.float32)[::-2],
    ):
        out[...] = np.nan
        assert looptune.matmul(a, b, out=out) is out
        np.testing.assert_allclose(out, a @ b, rtol=1e-5)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.empty((2, 3), np.float32), ArgumentError, r"out has shape \(2, 3\)"),
        (np.empty((3, 5), np.int32), ArgumentTypeError, "out is int32; the result is float32"),
        ([1, 2], ArgumentTypeError, "out is a list"),
    ],
)
def test_bad_outputs_are_refused(out, error, message):
    with pytest.raises(error, match=message):
        looptune.matmul(*randoms((3, 4), (4, 5)), out=out)


def test_read_only_outputs_are_refused():
    out = np.empty((3, 5))
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="out is read-only"):
        looptune.matmul(*randoms((3, 4), (4, 5)), out=out)


def test_dtypes_promote_as_in_numpy_or_are_refused():
    a, b = randoms((3, 4), (4, 5))
    mixed = looptune.matmul(a, b.astype(np.float64))
    assert mixed.dtype == np.float64
    np.testing.assert_allclose(looptune.matmul(a.astype(">f4"), b), a @ b, rtol=1e-5)
    with pytest.raises(UnsupportedError, match=r"\['int64', 'int64'\].*float32.*float64"):
        looptune.matmul(np.ones((2, 2), int), np.ones((2, 2), int))
    with pytest.raises(ArgumentTypeError, match="at least one operand"):
        looptune.einsum("i")


CONVS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (0, 1), "dilation": 2},
    {"groups": 2},
    {"stride": 3, "padding": 2, "groups": 4},
    {"padding": "same"},
]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("options", CONVS, ids=str)
def test_conv2d_is_torchs(layout, options):
    torch = pytest.importorskip("torch")
    x, w, bias = randoms((2, 8, 11, 13), (12, 8 // options.get("groups", 1), 3, 3), (12,))
    wanted = torch.nn.functional.conv2d(*map(torch.from_numpy, (x, w, bias)), **options).numpy()
    image = x if layout == "NCHW" else np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    found = looptune.conv2d(image, w, bias, layout=layout, **options)
    found = found if layout == "NCHW" else found.transpose(0, 3, 1, 2)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_conv2d_refuses_a_bias_that_does_not_fit():
    x, w = randoms((1, 3, 5, 5), (4, 3, 3, 3))
    with pytest.raises(ArgumentError, match=r"bias has shape \(3,\); \(4,\) would do"):
        looptune.conv2d(x, w, np.zeros(3, np.float32))


def test_a_bias_may_share_memory_with_out():
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((2, 1, 2, 2), np.float32)
    out = np.full((1, 2, 3, 3), 7, np.float32)
    assert (looptune.conv2d(x, w, out[0, :, 0, 0], out=out) == 11).all()


def test_a_bad_bias_leaves_out_alone_and_a_wide_one_promotes():
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((2, 1, 2, 2), np.float32)
    out = np.full((1, 2, 3, 3), 7, np.float32)
    with pytest.raises(ArgumentError, match="bias has shape"):
        looptune.conv2d(x, w, np.zeros(3, np.float32), out=out)
    assert (out == 7).all()
    assert looptune.conv2d(x, w, np.full(2, 1e300)).dtype == np.float64


def test_options_mean_the_same_cold_and_cached():
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((2, 1, 2, 2), np.float32)
    looptune.conv2d(x, w, stride=1, groups=1)
    for options in ({"stride": "1"}, {"groups": 1.0}, {"groups": True}, {"groups": [1]}):
        with pytest.raises(SpecError, match="would do"):
            looptune.conv2d(x, w, **options)


def test_failed_builds_leave_no_lock_behind():
    with pytest.raises(SpecError, match="'k' is in no operand"):
        looptune.einsum("ij->k", np.ones((2, 2), np.float32))
    assert not api._making


def test_lazily_negated_tensors_keep_their_sign():
    torch = pytest.importorskip("torch")
    negated = torch._neg_view(torch.ones(3, 4))
    torch.testing.assert_close(looptune.matmul(negated, torch.ones(4, 5)), -4 * torch.ones(3, 5))
    kernel = looptune.optimize("mk,kn->mn", m=3, n=5, k=4)
    with pytest.raises(ArgumentTypeError, match="out is a negated view"):
        kernel(torch.ones(3, 4), torch.ones(4, 5), out=torch._neg_view(torch.ones(3, 5)))


def test_locks_held_at_a_fork_do_not_hang_the_child():
    script = """
import os, threading
import numpy as np
import looptune
from looptune import api
from looptune.runtime import memory
a = np.ones((3, 3), np.float32)
looptune.matmul(a, a)
held, go = threading.Event(), threading.Event()
def hold():
    with memory._lock, api._lock:
        held.set()
        go.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    good = (looptune.matmul(a[:2], a) == 3).all()
    os._exit(0 if good else 1)
go.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=False)
    assert done.returncode == 0


def test_kernels_are_cached_and_bounded(monkeypatch):
    looptune.clear_cache()
    monkeypatch.setattr(api, "CACHE_SIZE", 3)
    made = []
    real = api.optimize
    monkeypatch.setattr(api, "optimize", lambda *a, **k: made.append(a) or real(*a, **k))
    a, b = randoms((8, 1), (1, 4))
    for _ in range(3):
        looptune.matmul(a, b)
    assert len(made) == 1
    for n in range(1, 7):
        looptune.matmul(*randoms((2, 3), (3, n)))
    assert len(api._kernels) == 3
    looptune.clear_cache()
    assert not api._kernels


def test_first_compile_of_one_operator_from_many_threads(monkeypatch):
    looptune.clear_cache()
    made = []
    real = api.optimize
    monkeypatch.setattr(api, "optimize", lambda *a, **k: made.append(a) or real(*a, **k))
    a, b = randoms((31, 17), (17, 23))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: looptune.matmul(a, b), range(16)))
    for result in results:
        np.testing.assert_allclose(result, a @ b, rtol=1e-4, atol=1e-5)
    assert len(made) == 1


def test_nan_and_infinity_stay_in_their_rows():
    for k in (31, 32, 33, 63, 65):
        a, b = randoms((32, k), (k, 64))
        a[1:] = np.nan
        assert np.isfinite(looptune.matmul(a, b)[0]).all()
        a[:] = 0
        a[3, 2] = np.inf
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(looptune.matmul(a, b), a @ b)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    a, b = map(torch.from_numpy, randoms((4, 5), (5, 6)))
    assert isinstance(looptune.matmul(a, b), torch.Tensor)
    torch.testing.assert_close(looptune.einsum("ij,jk->ki", a, b), (a @ b).T.contiguous())


def test_bias_without_a_layout_is_over_channels() -> None:
    x, w = (np.random.default_rng(0).random(s, np.float32) for s in ((1, 2, 6, 4), (4, 2, 3, 1)))
    bias = np.arange(4, dtype=np.float32)
    plain = looptune.conv2d(x, weight=w)
    shifted = looptune.conv2d(x, w, bias, layout=None)
    np.testing.assert_allclose(shifted, plain + bias.reshape(-1, 1, 1), rtol=1e-5)


def test_results_into_tensors() -> None:
    torch = pytest.importorskip("torch")
    a, b, out = torch.rand(3, 4), torch.rand(4, 5), torch.empty(3, 5)
    assert looptune.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)
    kernel = looptune.optimize("mk,kn->mn", shapes=[a, b])
    torch.testing.assert_close(kernel(a, b), a @ b)


@pytest.mark.parametrize(
    ("given", "result"),
    [("float32", "float32"), ("float64", "float64"), ("float16", "float16"), ("int8", "int32")],
)
def test_types_of_results(given: str, result: str) -> None:
    image, weights = np.ones((1, 2, 5, 5), given), np.ones((3, 2, 3, 3), given)
    assert looptune.conv2d(image, weights).dtype == result  # type: ignore[attr-defined]
    into = np.empty((1, 2, 5, 5), "float64")
    assert looptune.matmul(image, image).dtype == result  # type: ignore[attr-defined]
    assert looptune.matmul(image, image, out=into) is into
    np.testing.assert_array_equal(into, 5)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ({"nest": 3}, ArgumentTypeError, "nest is a int"),
        ({"schedule": "m n k"}, ArgumentTypeError, "a Schedule, or one a nest"),
        ({"verify": 1}, ArgumentTypeError, "verify=1"),
        ({"target": "vax"}, UnsupportedError, "target 'vax' is none of"),
        ({}, UnsupportedHostError, "avx2"),
    ],
)
def test_what_compile_raises(
    call: dict[str, object],
    error: type[LooptuneError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("looptune.runtime.kernel.runs", lambda target: False)
    (nest,) = looptune.workloads.matmul(4, 8, 4).nests
    settings = {"nest": nest, "schedule": Schedule(nest), "target": "avx2", **call}
    with pytest.raises(error, match=said):
        looptune.compile(**settings)


def test_lists_of_subscripts_are_refused_by_name() -> None:
    a, b = randoms((2, 3), (3, 4))
    with pytest.raises(SpecError, match=r"begins with a ndarray and a list: .* not supported"):
        looptune.einsum(a, [0, 1], b, [1, 2])  # type: ignore[arg-type]
