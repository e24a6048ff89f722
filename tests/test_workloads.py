"""Plans of einsums, matmuls and convolutions: keys, axes, errors, and the shipped suites."""

from __future__ import annotations

import json

import numpy as np
import pytest

from looptune import workloads
from looptune.errors import NestError, SpecError, UnsupportedError
from looptune.ir import Axis, Dim, Nest, Operand, Plan, Tensor
from looptune.reference import reference
from looptune.workloads.suites import load, shipped


def test_axes_are_written_output_first_with_reductions_before_the_last_label():
    (nest,) = workloads.matmul(2, 3, 4)
    assert [(axis.name, axis.reduction) for axis in nest.axes] == [
        ("m", False),
        ("k", True),
        ("n", False),
    ]
    (nest,) = workloads.conv2d((1, 4, 8, 8), (6, 2, 3, 3), groups=2)
    assert [axis.name for axis in nest.axes] == list("ngohcrsw")


def test_names_and_meaningless_strides_do_not_enter_the_key():
    key = workloads.matmul(2, 3, 4).key
    assert workloads.einsum("ab,bc->ac", (2, 4), (4, 3)).key == key
    assert workloads.einsum("ab,bc", (2, 4), (4, 3)).key == key
    column = [
        workloads.einsum("mk,kn->mn", (8, 1), (1, 4), strides=[(1, s), None]).key
        for s in (1, 8, 999)
    ]
    assert len(set(column)) == 1


def test_everything_that_matters_enters_the_key():
    x, w = (1, 64, 56, 56), (64, 64, 3, 3)
    plans = [
        workloads.conv2d(x, (64, 64, 5, 5), padding=2),
        workloads.conv2d(x, w, dilation=2, padding=2),
        workloads.conv2d(x, (64, 16, 3, 3), padding=1, groups=4),
        workloads.conv2d(x, w, stride=(1, 2), padding=1),
        workloads.conv2d(x, w, stride=(2, 1), padding=1),
        workloads.conv2d(x, w, padding=((1, 0), (0, 1))),
        workloads.conv2d(x, w, padding=((0, 1), (1, 0))),
        workloads.conv2d((1, 56, 56, 64), w, padding=1, layout="NHWC"),
        workloads.conv2d(x, w, padding=1),
        workloads.conv2d(x, w, padding=1, dtype="float64"),
        workloads.matmul(64, 64, 64),
        workloads.matmul(64, 64, 64, trans_b=True),
        workloads.matmul(64, 64, 64, accumulate=True),
    ]
    assert len({plan.key for plan in plans}) == len(plans)


def test_labels_of_one_operand_are_summed_first():
    plan = workloads.einsum("obk,ijk->ioj", (2, 4, 8), (2, 4, 8))
    assert [len(nest.inputs) for nest in plan.nests] == [1, 2]
    assert [t.shape for t in plan.temporaries] == [(2, 8)]


def test_many_operands_follow_a_path_of_pairs():
    plan = workloads.einsum("ij,jk,kl,lm->im", (10, 50), (50, 5), (5, 60), (60, 2))
    assert [len(nest.inputs) for nest in plan.nests] == [2, 2, 2]
    assert plan.flops < 2 * 10 * 50 * 5 * 60


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: workloads.einsum("ij"), SpecError, "shapes or the labels' sizes"),
        (lambda: workloads.einsum("ij", sizes={"i": 2}), SpecError, "label 'j' has no size"),
        (lambda: workloads.einsum("i", sizes={"i": 2, "q": 1}), SpecError, "has no label 'q'"),
        (lambda: workloads.einsum("...i", sizes={"i": 2}), SpecError, "give shapes, not sizes"),
        (lambda: workloads.einsum("i->..i", (2,)), SpecError, "output has a broken ellipsis"),
        (lambda: workloads.einsum("i", (-1,)), SpecError, "negative size"),
        (lambda: workloads.einsum("i", (2,), strides=[(1, 1)]), SpecError, "strides"),
        (lambda: workloads.matmul(2, 2, 2, dtype="float8"), UnsupportedError, "'float8' is not"),
        (lambda: workloads.conv2d((1, 3, 8), (4, 3, 3, 3)), SpecError, "x has 3 dimensions"),
        (lambda: workloads.conv2d((1, 3, 8, 8), (4, 2, 3, 3)), SpecError, "w has 2 input channels"),
        (lambda: conv(stride=0), SpecError, "stride=0: .* at least 1"),
        (lambda: conv(stride=(1, 2, 3)), SpecError, "a number or 2 of them"),
        (lambda: conv(padding=-1), SpecError, "padding=-1"),
        (lambda: conv(padding="half"), SpecError, "padding='half'"),
        (lambda: conv(padding=((1, 1),)), SpecError, "2 pairs"),
        (lambda: conv(padding="same", stride=2), SpecError, "needs a stride of 1"),
        (lambda: conv(groups=2), SpecError, "groups=2 does not divide 3 and 4"),
        (lambda: conv(groups=0), SpecError, "groups=0"),
        (lambda: conv(layout="CHWN"), UnsupportedError, "'CHWN' is not supported; 'NCHW'"),
        (lambda: conv(dilation=9), SpecError, "reaches over 19 elements of dimension h"),
        (lambda: conv(out_strides=(1, 1)), SpecError, "out has 4 dimensions"),
        (lambda: transposed(output_padding=2), SpecError, "output_padding=2 must be below"),
        (lambda: transposed(padding=9), SpecError, "of the result would have size"),
        (
            lambda: workloads.conv_transpose2d((1, 3, 4, 4), (2, 3, 3, 3)),
            SpecError,
            "w has 2 input channels; x has 3",
        ),
    ],
)
def test_bad_descriptions_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def conv(**options: object) -> Plan:
    return workloads.conv2d((1, 3, 8, 8), (4, 3, 3, 3), **options)


def transposed(**options: object) -> Plan:
    return workloads.conv_transpose2d((1, 3, 4, 4), (3, 4, 3, 3), **options)


TRANSPOSED = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 3, "output_padding": 2, "groups": 2},
    {"stride": 2, "padding": 1, "dilation": 2},
    {"stride": 3, "padding": 1, "dilation": 2},
    {"stride": 4},
    {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (3, 1)},
]


@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_transposed_convolutions_are_torchs(options, layout):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(-1, 1, shape) for shape in ((2, 4, 5, 6), (4, 3, 2, 3)))
    wanted = torch.nn.functional.conv_transpose2d(*map(torch.from_numpy, (x, w)), **options)
    image = x if layout == "NCHW" else x.transpose(0, 2, 3, 1)
    plan = workloads.conv_transpose2d(image.shape, w.shape, layout=layout, **options)
    found = reference(plan, {"x": image, "w": w})
    found = found if layout == "NCHW" else found.transpose(0, 3, 1, 2)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-9, atol=1e-9)


def test_one_and_three_dimensions_are_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for rank in (1, 3):
        x = rng.uniform(-1, 1, (2, 4, *(6, 7, 5)[:rank]))
        w = rng.uniform(-1, 1, (6, 2, *(3, 2, 3)[:rank]))
        options = {"stride": 2, "padding": 1, "groups": 2}
        call = getattr(torch.nn.functional, f"conv{rank}d")
        wanted = call(*map(torch.from_numpy, (x, w)), **options).numpy()
        plan = getattr(workloads, f"conv{rank}d")(x.shape, w.shape, **options)
        np.testing.assert_allclose(reference(plan, {"x": x, "w": w}), wanted, rtol=1e-9, atol=1e-9)


def test_the_core_workloads_construct_or_say_why_not():
    made, refused = [], []
    for workload in load("core"):
        try:
            made.append(workload.plan())
        except UnsupportedError as reason:
            refused.append(str(reason))
    assert (len(made), len(refused)) == (178, 2)
    for kind in ("norm", "softmax"):
        assert sum(f"{kind} is not supported" in reason for reason in refused) == 1


def test_every_shipped_workload_constructs_with_its_flops_or_says_why_not():
    assert len(shipped()) == 994
    for workload in shipped():
        try:
            plan = workload.plan()
        except UnsupportedError:
            continue
        if len(plan.nests) == 1:
            assert plan.flops == workload.flops, workload.id


def test_suites_by_name_and_by_file(tmp_path):
    assert len(load("looptune-test")) == 25
    every = load("looptune-all")
    assert len(every) == 2197
    assert len({workload.id for workload in every}) == 2197
    records = [dict(workload.record) for workload in load("looptune-test")[:3]]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(records))
    assert [w.plan().key for w in load(path)] == [w.plan().key for w in load(str(path))]
    assert [w.plan().key for w in load(str(path))] == [
        w.plan().key for w in load("looptune-test")[:3]
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet51", r"no suite 'resnet51'; near it: \['resnet50'"),
        ("zzz", r"there are \["),
        ("absent.json", "suite 'absent.json': .*No such file"),
    ],
)
def test_unknown_suites_are_named(name, message):
    with pytest.raises(SpecError, match=message):
        load(name)


@pytest.mark.parametrize("text", ["{", "[1]", '[{"id": "x"}]', "3"])
def test_broken_suite_files_are_refused(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="not a list of workloads"):
        load(str(path))


def test_records_that_lack_a_size_are_named(tmp_path):
    path = tmp_path / "lacking.json"
    record = {"id": "mine", "kind": "matmul", "dtype": "float32", "shape": {"N": 2, "K": 2}}
    path.write_text(json.dumps([record]))
    (workload,) = load(path)
    with pytest.raises(SpecError, match="mine: a matmul needs 'M' in its record"):
        workload.plan()
    assert workload in {workload}


ONE = Dim(4, 1, (1,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axis("i", -1), "the extent of axis i is -1"),
        (lambda: Dim(-1, 1, ()), "the size of a dimension is -1"),
        (lambda: nest(()), "reads one or two operands, not 0"),
        (lambda: nest((operand(Dim(4, 1, (1, 0))),)), "2 coefficients for 1 axes"),
        (lambda: nest((operand(ONE, "float64"),)), "is float64 in a float32 nest"),
        (lambda: nest((operand(ONE),), out=Dim(3, 1, (1,))), "leave its shape"),
        (lambda: nest((operand(ONE),), out=Dim(4, 0, (1,))), "write one element"),
        (lambda: nest((operand(ONE),), reduce=True), "reduction axis i appears in out, the output"),
        (lambda: Plan((), (), TENSOR, (TENSOR,)), "share a name"),
        (lambda: Plan((nest((operand(ONE),)),), (), TENSOR), "has no tensor 'out'"),
    ],
)
def test_nests_cannot_be_ill_formed(make, message):
    with pytest.raises(NestError, match=message):
        make()


TENSOR = Tensor("t", "float32", (4,), (1,))


def copy(out: str, read: str, stride: int = 1) -> Nest:
    """`out[i] = read[i]`, the read walking its tensor with a stride."""
    source = Operand(read, "float32", (Dim(4, stride, (1,)),))
    return Nest((Axis("i", 4),), Operand(out, "float32", (ONE,)), (source,))


def vector(name: str, stride: int = 1) -> Tensor:
    return Tensor(name, "float32", (4,), (stride,))


@pytest.mark.parametrize(
    ("nests", "temporaries", "message"),
    [
        ([copy("o", "a", 3)], [], r"a has strides \(1,\) in the plan and \(3,\) in a nest"),
        ([copy("t", "a"), copy("o", "t")], [vector("t", -9)], r"temporary t has strides \(-9,\)"),
        ([], [], "no nest of the plan writes to its output o"),
        ([copy("t", "a")], [vector("t")], "no nest of the plan writes to its output o"),
        ([copy("o", "o")], [], "reads o before it is written"),
        ([copy("o", "t")], [vector("t")], "reads t before it is written"),
        ([copy("a", "b"), copy("o", "a")], [], "writes to the input a"),
    ],
)
def test_plans_write_before_they_read_and_walk_the_memory_there_is(nests, temporaries, message):
    inputs = (vector("a"), vector("b"))
    with pytest.raises(NestError, match=message):
        Plan(tuple(nests), inputs, vector("o"), tuple(temporaries))


def operand(dim: Dim, dtype: str = "float32") -> Operand:
    return Operand("x", dtype, (dim,))  # type: ignore[arg-type]


def nest(inputs: tuple[Operand, ...], out: Dim = ONE, reduce: bool = False) -> Nest:
    return Nest((Axis("i", 4, reduce),), Operand("out", "float32", (out,)), inputs)
