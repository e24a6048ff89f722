"""Compute on arrays: `einsum`, `matmul`, `conv2d`, with kernels cached by problem.

The results, shapes and 0-d behaviour are NumPy's (torch's for `conv2d`). A kernel is made for
each new combination of spec, shapes, strides, dtype and threads, verified once, and kept while
it is among the last `CACHE_SIZE` used.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from looptune.dtypes import ARGUMENTS, numpy_dtype
from looptune.errors import ArgumentError, ArgumentTypeError, SpecError, UnsupportedError
from looptune.host import thread_count
from looptune.ir import Plan
from looptune.runtime.call import as_array, is_tensor, like, meets_itself
from looptune.runtime.kernel import Kernel
from looptune.tune import optimize
from looptune.workloads import conv2d as conv2d_plan
from looptune.workloads import einsum as einsum_plan
from looptune.workloads import fuse
from looptune.workloads.einsum import check_dtype, result_dtype

CACHE_SIZE = 512

_kernels: OrderedDict[Hashable, Kernel] = OrderedDict()
_lock = threading.Lock()
_making: dict[Hashable, threading.Lock] = {}


def cached_kernel(key: Hashable, make: Callable[[], Kernel]) -> Kernel:
    """The kernel for `key`; of many threads that ask for a new one, one makes it."""
    with _lock:
        kernel = _kernels.get(key)
        if kernel is not None:
            _kernels.move_to_end(key)
            return kernel
        turn = _making.setdefault(key, threading.Lock())
    try:
        with turn:
            with _lock:
                kernel = _kernels.get(key)
            if kernel is None:
                kernel = make()
                with _lock:
                    _kernels[key] = kernel
                    while len(_kernels) > CACHE_SIZE:
                        _kernels.popitem(last=False)
    finally:
        with _lock:
            _making.pop(key, None)
    return kernel


def forget_locks() -> None:
    """Fresh locks in a forked child: another thread may have held them at the fork."""
    global _lock
    _lock = threading.Lock()
    _making.clear()


os.register_at_fork(after_in_child=forget_locks)


def clear_cache() -> None:
    """Forget all kernels."""
    with _lock:
        _kernels.clear()


def common_arrays(operands: Sequence[object]) -> list[np.ndarray]:
    """Operands as arrays of one dtype, the wider where they differ, as NumPy promotes."""
    arrays = [np.asarray(as_array(operand, i)) for i, operand in enumerate(operands)]
    names = [array.dtype.name for array in arrays]
    try:
        dtype = np.result_type(*arrays)
    except np.exceptions.DTypePromotionError:
        raise UnsupportedError(
            f"operands of {names} have no common type; convert one of them"
        ) from None
    if dtype.name not in ARGUMENTS:
        raise UnsupportedError(f"operands of {names}: {sorted(ARGUMENTS)} are supported")
    native = dtype.newbyteorder("=")
    return [aligned(array if array.dtype == native else array.astype(native)) for array in arrays]


def aligned(array: np.ndarray) -> np.ndarray:
    """`array`, copied if its data or strides are no multiple of its item size."""
    odd = any(stride % array.itemsize for stride in array.strides)
    return array.copy() if odd or not array.flags.aligned else array


def element_strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


def run_plan(
    key: tuple[Hashable, ...],
    make: Callable[[tuple[int, ...] | None], Plan],
    arrays: Sequence[np.ndarray],
    out: np.ndarray | None,
    threads: int | None,
) -> np.ndarray:
    """Run the kernel of a plan that `make` builds for the output's strides (None: contiguous).

    An output that overlaps an input is computed aside and copied, so that the inputs are read
    whole first, as NumPy does.
    """
    workers = thread_count(threads)
    if out is not None:
        if not isinstance(out, np.ndarray):
            raise ArgumentTypeError(f"out is a {type(out).__name__}; an array would do")
        if meets_itself(out):
            raise ArgumentError(
                f"out of shape {out.shape} and strides {out.strides} bytes holds elements that are "
                "one in memory; a copy would do"
            )
        if any(np.may_share_memory(out, array) for array in arrays) or not usable(out, arrays[0]):
            return into(out, run_plan(key, make, arrays, None, threads))
    strides = None if out is None else element_strides(out)
    layout = tuple((array.shape, array.strides) for array in arrays)
    full = (*key, layout, arrays[0].dtype.char, strides, workers)

    def new_kernel() -> Kernel:
        if out is not None:
            check_shape(out, make(None).output.shape)
        return optimize(make(strides), threads=workers)

    kernel = cached_kernel(full, new_kernel)
    if out is not None:
        check_shape(out, kernel.plan.output.shape)
    result = kernel(*arrays, out=out)
    assert isinstance(result, np.ndarray)
    return result


def result_array(out: object) -> np.ndarray | None:
    """An array on the memory of `out`, if there is one."""
    known = is_tensor(out) or isinstance(out, np.ndarray)
    return as_array(out, -1) if known else out  # type: ignore[return-value]


def check_shape(out: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise `ArgumentError` unless `out` has the result's shape."""
    if out.shape != shape:
        raise ArgumentError(f"out has shape {out.shape}; the result has {shape}")


def usable(out: np.ndarray, like_array: np.ndarray) -> bool:
    """Whether a kernel can write `out` directly."""
    whole = all(stride % out.itemsize == 0 for stride in out.strides)
    wanted = numpy_dtype(result_dtype(check_dtype(like_array.dtype.name), None))
    return bool(out.dtype == wanted and out.flags.aligned and whole)


def into(out: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Copy `result` to `out`; raises `ArgumentError` where NumPy's casting rules refuse."""
    check_shape(out, result.shape)
    if not np.can_cast(result.dtype, out.dtype, "same_kind"):
        raise ArgumentTypeError(f"out is {out.dtype}; the result is {result.dtype}")
    if not out.flags.writeable:
        raise ArgumentError("out is read-only; a writable array would do")
    out[...] = result
    return out


def einsum(spec: str, *operands: object, out: object = None, threads: int | None = None) -> object:
    """`numpy.einsum(spec, *operands)` for string specs, by a generated kernel.

    Operands are NumPy arrays and scalars, buffers or CPU tensors of float32, float64, float16,
    bfloat16 or int8. Operands of different types are copied to the one that `numpy.result_type`
    names before the kernel sees them (float16 with float32 computes in float32, int8 with float32
    in float32, float32 with float64 in float64); of two without one, as bfloat16 and float16, one
    is to be converted by you. The result is of that type, of int8 int32, and the first operand's
    kind of array; or it is `out`, an array or tensor of its shape and of a type that NumPy casts
    the result's to ("same_kind"), which may overlap the operands.

    NumPy's other form, `einsum(a, [0, 1], b, [1, 2])`, is not supported. Raises `SpecError` for it,
    for a bad spec and for operands that do not fit it, `UnsupportedError` for other dtypes and for
    sums of products of int32, `ArgumentTypeError` for what shares no memory, for tensors that
    require a gradient and for an `out` of a wrong kind or type, `ArgumentError` for one of a wrong
    shape or that is read-only, and for `threads` under 1.
    """
    if not isinstance(spec, str) and operands and isinstance(operands[0], list | tuple):
        raise SpecError(
            f"einsum begins with a {type(spec).__name__} and a list: subscripts behind operands "
            "are not supported; a spec such as 'mk,kn->mn' in front would do"
        )
    if not operands:
        raise ArgumentTypeError("einsum needs at least one operand")
    arrays = common_arrays(operands)
    place = result_array(out)

    def make(out_strides: tuple[int, ...] | None) -> Plan:
        return einsum_plan(
            spec,
            *(array.shape for array in arrays),
            dtype=arrays[0].dtype.name,
            strides=[element_strides(array) for array in arrays],
            out_strides=out_strides,
        )

    result = run_plan(("einsum", repr(spec)), make, arrays, place, threads)
    if out is not None:
        return out
    scalar = result.ndim == 0 and isinstance(operands[0], np.ndarray | np.generic)
    return result[()] if scalar else like(operands[0], result)


def matmul(a: object, b: object, *, out: object = None, threads: int | None = None) -> object:
    """`numpy.matmul(a, b)`: matrix products, vectors, and broadcast stacks of matrices.

    Of (..., m, k) and (..., k, n) the result is (..., m, n), leading dimensions broadcast; a vector
    on either side has no m or n. Operands, dtypes (of two the promoted one), `out` and
    errors are those of `einsum`; columns of `a` that are not the rows of `b`, and operands without
    a dimension, are an `ArgumentError`.
    """
    left, right = common_arrays((a, b))
    if left.ndim == 0 or right.ndim == 0:
        raise ArgumentError("matmul needs at least one dimension on each side; use `*`")
    inner = right.shape[0 if right.ndim == 1 else -2]
    if left.shape[-1] != inner:
        raise ArgumentError(
            f"matmul: a has {left.shape[-1]} columns and b {inner} rows "
            f"(shapes {left.shape} and {right.shape})"
        )
    first = "k" if left.ndim == 1 else "...mk"
    second = "k" if right.ndim == 1 else "...kn"
    kept = (
        "..." * (left.ndim > 2 or right.ndim > 2) + "m" * (left.ndim > 1) + "n" * (right.ndim > 1)
    )
    first, second = (s if "..." in kept else s.replace("...", "") for s in (first, second))
    result = einsum(f"{first},{second}->{kept}", left, right, out=out, threads=threads)
    if isinstance(a, np.ndarray | np.generic) or out is not None:
        return result
    return like(a, np.asarray(result))


def conv2d(
    x: object,
    weight: object,
    bias: object = None,
    stride: int | Sequence[int] = 1,
    padding: object = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: str = "NCHW",
    out: object = None,
    threads: int | None = None,
) -> object:
    """`torch.nn.functional.conv2d`: x in `layout`, weight as (out, in / groups, height, width).

    The result is in `layout`, "NCHW" or "NHWC", too: (n, out, height', width') or
    (n, height', width', out). `padding` is a number, one a dimension, a pair (before, after) a
    dimension, "valid" or "same". Operands, dtypes and `out` are those of `einsum`; int8 takes no
    bias.

    Raises `SpecError` for shapes and options that do not fit, `UnsupportedError` for another
    layout or dtype, `ArgumentTypeError` and `ArgumentError` as `einsum` does, and the latter for a
    bias of a wrong shape.
    """
    image, weights, *offsets = common_arrays((x, weight) if bias is None else (x, weight, bias))
    place = result_array(out)
    if offsets:
        if offsets[0].shape != weights.shape[:1]:
            raise ArgumentError(f"bias has shape {offsets[0].shape}; {weights.shape[:1]} would do")
        offsets = [np.ascontiguousarray(offsets[0])]

    def make(out_strides: tuple[int, ...] | None) -> Plan:
        plan = conv2d_plan(
            image.shape,
            weights.shape,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            layout=layout,
            dtype=image.dtype.name,
            strides=[element_strides(image), element_strides(weights)],
            out_strides=out_strides,
        )
        return fuse(plan, "bias") if offsets else plan

    key = ("conv2d", *map(repr, (stride, padding, dilation, groups, layout)))
    result = run_plan(key, make, (image, weights, *offsets), place, threads)
    return out if out is not None else like(x, result)
