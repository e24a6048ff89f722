"""Matrix products as plans: row-major unless strides say otherwise."""

from __future__ import annotations

from looptune.errors import SpecError
from looptune.ir import Plan
from looptune.scalars import whole
from looptune.workloads.einsum import Shape, check_flags, einsum


def check_sizes(**sizes: object) -> None:
    """Raise `SpecError` for a size that is no whole number of at least 0."""
    for name, value in sizes.items():
        found = whole(value)
        if found is None or found < 0:
            raise SpecError(f"{name}={value!r:.80}; a whole number of at least 0 would do")


def matmul(
    m: int,
    n: int,
    k: int,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    dtype: str = "float32",
    out_dtype: str | None = None,
    accumulate: bool = False,
    strides_a: Shape | None = None,
    strides_b: Shape | None = None,
    strides_out: Shape | None = None,
) -> Plan:
    """out[m, n] = sum_k a[m, k] * b[k, n]; a transposed operand is stored as [k, m] or [n, k].

    Strides are of the stored dimensions, in elements; `out_dtype` as in `einsum`.
    """
    check_flags(trans_a=trans_a, trans_b=trans_b)
    check_sizes(m=m, n=n, k=k)
    a, b = "km" if trans_a else "mk", "nk" if trans_b else "kn"
    sizes = {"m": m, "n": n, "k": k}
    return einsum(
        f"{a},{b}->mn",
        tuple(sizes[label] for label in a),
        tuple(sizes[label] for label in b),
        dtype=dtype,
        out_dtype=out_dtype,
        strides=[strides_a, strides_b],
        out_strides=strides_out,
        accumulate=accumulate,
    )


def batched_matmul(
    batch: int,
    m: int,
    n: int,
    k: int,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    dtype: str = "float32",
    out_dtype: str | None = None,
    accumulate: bool = False,
    strides_a: Shape | None = None,
    strides_b: Shape | None = None,
    strides_out: Shape | None = None,
) -> Plan:
    """`batch` matrix products: out[b, m, n] = sum_k a[b, m, k] * b[b, k, n]."""
    check_flags(trans_a=trans_a, trans_b=trans_b)
    check_sizes(batch=batch, m=m, n=n, k=k)
    a, b = "bkm" if trans_a else "bmk", "bnk" if trans_b else "bkn"
    sizes = {"b": batch, "m": m, "n": n, "k": k}
    return einsum(
        f"{a},{b}->bmn",
        tuple(sizes[label] for label in a),
        tuple(sizes[label] for label in b),
        dtype=dtype,
        out_dtype=out_dtype,
        strides=[strides_a, strides_b],
        out_strides=strides_out,
        accumulate=accumulate,
    )


def gemv(m: int, k: int, *, trans_a: bool = False, dtype: str = "float32") -> Plan:
    """out[m] = sum_k a[m, k] * b[k]; transposed, a is stored as [k, m]."""
    check_flags(trans_a=trans_a)
    check_sizes(m=m, k=k)
    shape = (k, m) if trans_a else (m, k)
    return einsum("km,k->m" if trans_a else "mk,k->m", shape, (k,), dtype=dtype)


def outer(m: int, n: int, *, dtype: str = "float32") -> Plan:
    """out[m, n] = a[m] * b[n]."""
    return einsum("m,n->mn", (m,), (n,), dtype=dtype)


def dot(k: int, *, dtype: str = "float32") -> Plan:
    """out = sum_k a[k] * b[k]."""
    return einsum("k,k->", (k,), (k,), dtype=dtype)
