"""Convolutions against plain NumPy loops that gather, and transposed ones that scatter."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from looptune import workloads
from looptune.errors import SpecError
from looptune.ir import Nest
from looptune.reference import reference
from looptune.workloads.capsule import capsule_conv2d

LAYOUTS = {1: ("NCL", "NLC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def each(value, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def gather(x, w, pads, stride=1, dilation=1, groups=1) -> np.ndarray:
    """A convolution, tap by tap: x is N, C, image; pads are (before, after) a dimension."""
    rank = x.ndim - 2
    steps, spread = each(stride, rank), each(dilation, rank)
    padded = np.pad(x, [(0, 0), (0, 0), *pads])
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(padded.shape[2:], w.shape[2:], steps, spread, strict=True)
    ]
    filters, depth = w.shape[0] // groups, w.shape[1]
    out = np.zeros((len(x), w.shape[0], *sizes))
    for o, tap in itertools.product(range(w.shape[0]), np.ndindex(*w.shape[2:])):
        first = o // filters * depth
        window = tuple(
            slice(r * d, r * d + (n - 1) * s + 1, s)
            for r, d, n, s in zip(tap, spread, sizes, steps, strict=True)
        )
        image = padded[(slice(None), slice(first, first + depth), *window)]
        out[:, o] += np.tensordot(image, w[(o, slice(None), *tap)], ([1], [0]))
    return out


def scatter(x, w, stride=1, padding=0, output_padding=0, dilation=1, groups=1) -> np.ndarray:
    """A transposed convolution: each element of x adds a scaled kernel to the result."""
    rank = x.ndim - 2
    steps, crop, extra, spread = (
        each(v, rank) for v in (stride, padding, output_padding, dilation)
    )
    full = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(x.shape[2:], steps, spread, w.shape[2:], extra, strict=True)
    ]
    depth, filters = x.shape[1] // groups, w.shape[1]
    out = np.zeros((len(x), filters * groups, *full))
    for c, o, j, r in itertools.product(
        range(x.shape[1]), range(filters), np.ndindex(*x.shape[2:]), np.ndindex(*w.shape[2:])
    ):
        at = tuple(a * s + b * d for a, s, b, d in zip(j, steps, r, spread, strict=True))
        out[(slice(None), c // depth * filters + o, *at)] += x[(slice(None), c, *j)] * w[(c, o, *r)]
    inner = (slice(p, n - p) for p, n in zip(crop, full, strict=True))
    return out[(slice(None), slice(None), *inner)]


def tensors(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(-1, 1, shape) for shape in shapes]


def evaluate(name: str, x: np.ndarray, w: np.ndarray, last: bool, **options) -> np.ndarray:
    """The plan's result, channels second, from an x with channels second."""
    layout = LAYOUTS[x.ndim - 2][last]
    image = np.moveaxis(x, 1, -1) if last else x
    build = getattr(workloads, f"{name}{x.ndim - 2}d")
    plan = build(image.shape, w.shape, layout=layout, dtype="float64", **options)
    found = reference(plan, {"x": image, "w": w})
    return np.moveaxis(found, -1, 1) if last else found


CONVOLUTIONS = [
    ((2, 3, 7), (4, 3, 3), [(0, 0)], {}),
    ((2, 3, 7, 6), (4, 3, 3, 2), [(0, 0)] * 2, {}),
    ((1, 4, 7, 6), (6, 2, 3, 3), [(1, 1)] * 2, {"padding": 1, "groups": 2}),
    ((1, 3, 8, 9), (2, 3, 3, 2), [(2, 2), (0, 0)], {"padding": (2, 0), "stride": (2, 3)}),
    ((1, 3, 8, 9), (2, 3, 2, 3), [(1, 0), (0, 2)], {"padding": ((1, 0), (0, 2))}),
    ((1, 3, 9, 9), (2, 3, 3, 2), [(0, 0)] * 2, {"dilation": (2, 3), "padding": "valid"}),
    ((1, 2, 5, 6), (3, 2, 4, 3), [(1, 2), (1, 1)], {"padding": "same"}),
    ((1, 5, 6, 6), (5, 1, 3, 3), [(1, 1)] * 2, {"padding": 1, "groups": 5, "stride": 2}),
    ((1, 3, 6, 6), (6, 1, 3, 3), [(0, 0)] * 2, {"groups": 3}),
    ((1, 2, 1, 1), (2, 2, 3, 3), [(1, 1)] * 2, {"padding": 1}),
    ((1, 2, 2, 2), (2, 2, 1, 1), [(3, 3)] * 2, {"padding": 3, "stride": 4}),
    ((0, 2, 5, 5), (3, 2, 3, 3), [(0, 0)] * 2, {}),
    ((2, 4, 4, 5, 3), (2, 2, 2, 3, 2), [(1, 1)] * 3, {"padding": 1, "stride": 2, "groups": 2}),
]


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize(("x_shape", "w_shape", "pads", "options"), CONVOLUTIONS)
def test_convolutions_gather(x_shape, w_shape, pads, options, last):
    x, w = tensors(x_shape, w_shape)
    kept = {k: v for k, v in options.items() if k != "padding"}
    found = evaluate("conv", x, w, last, **options)
    np.testing.assert_allclose(found, gather(x, w, pads, **kept), rtol=1e-10, atol=1e-10)


TRANSPOSED = [
    ((1, 2, 5), (2, 3, 3), {"stride": 2}),
    ((2, 3, 4, 5), (3, 2, 3, 3), {}),
    ((1, 4, 4, 5), (4, 3, 3, 2), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    ((1, 2, 3, 4), (2, 2, 2, 2), {"stride": 4}),  # phases that no tap reaches
    ((1, 2, 3, 4), (2, 2, 3, 2), {"stride": (2, 4), "dilation": (2, 2)}),
    ((1, 2, 4, 4), (2, 2, 3, 3), {"stride": 3, "dilation": 2, "output_padding": (2, 1)}),
    ((1, 2, 4, 4), (2, 2, 3, 3), {"stride": (6, 4), "dilation": (4, 6), "padding": (3, 1)}),
    ((1, 2, 3, 3), (2, 1, 5, 5), {"padding": 3}),
    ((0, 2, 3, 3), (2, 1, 2, 2), {"stride": 2}),
    ((1, 2, 2, 3, 2), (2, 2, 2, 3, 2), {"stride": (2, 1, 3), "padding": (0, 1, 0)}),
]


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize(("x_shape", "w_shape", "options"), TRANSPOSED)
def test_transposed_convolutions_scatter(x_shape, w_shape, options, last):
    x, w = tensors(x_shape, w_shape)
    found = evaluate("conv_transpose", x, w, last, **options)
    np.testing.assert_allclose(found, scatter(x, w, **options), rtol=1e-10, atol=1e-10)


def written(nest: Nest) -> Counter[tuple[int, ...]]:
    extents = [axis.extent if not axis.reduction else 1 for axis in nest.axes]
    return Counter(
        tuple(
            dim.offset + sum(c * p for c, p in zip(dim.coefficients, point, strict=True))
            for dim in nest.output.dims
        )
        for point in np.ndindex(*extents)
    )


@pytest.mark.parametrize(("x_shape", "w_shape", "options"), TRANSPOSED)
def test_the_phases_cover_the_result_once(x_shape, w_shape, options):
    build = getattr(workloads, f"conv_transpose{len(x_shape) - 2}d")
    plan = build(x_shape, w_shape, **options)
    counts = sum((written(nest) for nest in plan.nests), Counter())
    assert counts == Counter(np.ndindex(*plan.output.shape))


def test_a_phase_without_taps_is_an_empty_sum():
    plan = workloads.conv_transpose1d((1, 2, 3), (2, 2, 2), stride=3)
    assert [nest.points == 0 for nest in plan.nests] == [False, False, True]
    assert not any(nest.accumulate for nest in plan.nests)


def test_padding_is_an_offset_and_a_fill_not_a_larger_tensor():
    (nest,) = workloads.conv2d((1, 3, 8, 8), (4, 3, 3, 3), padding=((1, 0), (0, 2)))
    x = nest.inputs[0]
    assert x.shape == (1, 3, 8, 8)
    assert [dim.offset for dim in x.dims] == [0, 0, -1, 0]
    assert x.overhang(nest.axes)[2:] == ((1, 0), (0, 2))
    assert x.needs_fill(nest.axes)
    assert x.fill == 0
    (nest,) = workloads.conv2d((1, 3, 8, 8), (4, 3, 3, 3))
    assert not nest.inputs[0].needs_fill(nest.axes)


def test_strides_are_those_of_the_stored_tensors():
    steps = [(3 * 80, 80, 10, 1), None]
    plan = workloads.conv2d((1, 3, 8, 8), (4, 3, 3, 3), strides=steps, out_strides=(0, 1, 24, 4))
    assert [tensor.strides for tensor in plan.inputs] == [(240, 80, 10, 1), (27, 9, 3, 1)]
    assert plan.output.strides == (0, 1, 24, 4)


def test_capsules_are_convolutions_of_matrices():
    plan = capsule_conv2d((2, 5, 4, 3), (3, 2, 4), capsule=2, stride=2, padding=1, dtype="float64")
    x, w = (np.random.default_rng(0).uniform(-1, 1, t.shape) for t in plan.inputs)
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0), (0, 0), (0, 0)])
    wanted = np.zeros(plan.output.shape)
    for r, q in np.ndindex(3, 2):
        window = padded[:, r : r + 5 : 2, q : q + 5 : 2][:, :3, :3]
        wanted += np.einsum("nhwikc,kjco->nhwijo", window, w[r, q])
    np.testing.assert_allclose(reference(plan, {"x": x, "w": w}), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "x", "w", "options", "message"),
    [
        ("conv2d", (1, -3, 8, 8), (4, -3, 3, 3), {}, "the shape of x has a negative size"),
        ("conv2d", (1, 3, 8.5, 8), (4, 3, 3, 3), {}, "the shape of x is .*whole numbers"),
        ("conv2d", 3, (4, 3, 3, 3), {}, "the shape of x is 3"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 0, 3), {}, "the kernel reaches over"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 9, 3), {}, "reaches over 9 elements of dimension h"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 3, 3), {"strides": [None]}, "those of x and those of w"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 3, 3), {"strides": 5}, "strides=5: those of x"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 3, 3), {"stride": 1.5}, "stride=1.5: a whole number"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 3, 3), {"padding": (1, (1, 2))}, "2 pairs"),
        ("conv2d", (1, 3, 8, 8), (4, 3, 3, 3), {"dilation": True}, "dilation=True"),
        ("conv_transpose2d", (1, 3, 8, 8), (3, 3, 3, 3), {"groups": "2"}, "groups='2'"),
        ("conv_transpose2d", (1, 3, 8, 8), (3, 3, 3, 3), {"groups": 2}, "does not divide 3 chan"),
        ("conv_transpose2d", (1, 3, 8, 8), (3, 3, 3, 3), {"padding": "same"}, "padding='same'"),
        ("conv_transpose1d", (1, 1, 3), (1, 1, 2), {"padding": 2}, "would have size 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, x, w, options, message):
    with pytest.raises(SpecError, match=message):
        getattr(workloads, name)(x, w, **options)


def test_numpy_integers_are_whole_numbers():
    x, w, options = (1, 4, 8, 8), (4, 2, 3, 3), {"stride": 2, "padding": (1, 0), "groups": 2}
    for build in (workloads.conv2d, workloads.conv_transpose2d):
        wide = [tuple(map(np.int64, shape)) for shape in (x, w)]
        found = build(*wide, stride=np.int64(2), padding=(np.int32(1), 0), groups=np.int64(2))
        assert found.key == build(x, w, **options).key


@pytest.mark.parametrize(
    ("x", "capsule", "message"),
    [
        ((1, 4, 4), 2, "x has 3 dimensions"),
        ((1, 4, 4, 2.5), 2, "the shape of x is"),
        ((1, 4, 4, 3), 0, "capsule=0: a whole number of at least 1"),
    ],
)
def test_capsule_sizes_that_mean_nothing_are_named(x, capsule, message):
    with pytest.raises(SpecError, match=message):
        capsule_conv2d(x, (3, 3, 3), capsule=capsule)


def test_capsule_kernels_larger_than_the_image_are_refused():
    with pytest.raises(SpecError, match="5x5 is larger than the padded image"):
        capsule_conv2d((1, 2, 2, 3), (5, 5, 3), capsule=2)
