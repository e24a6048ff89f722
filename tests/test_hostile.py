"""Arguments of the wrong kind, size or form: each is refused by name, with a typed error."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

import looptune
from looptune import interop
from looptune.choose import Budget
from looptune.errors import (
    ArgumentError,
    LooptuneError,
    NestError,
    ScheduleError,
    SpecError,
    UnsupportedError,
)
from looptune.ir import Axis, Dim, Nest, Operand, Plan, Scale, Tensor
from looptune.measure import interleave
from looptune.schedule import (
    Loop,
    Pack,
    Schedule,
    pack,
    parallel,
    parse_order,
    reorder,
    replay,
    split,
)
from looptune.target import TARGETS, target_named
from looptune.tune import compile, optimize
from looptune.workloads import batched_matmul, conv2d, einsum, fuse, gemv, matmul
from looptune.workloads.suites import load

NEST = matmul(8, 8, 8).nests[0]
UNTUNED = Schedule(NEST)
ONES = np.ones((4, 4), np.float32)
MASKED = np.ma.masked_array(ONES, mask=ONES > 0)
ONE_ROW = np.lib.stride_tricks.as_strided(np.ones(4), (4, 4), (0, 8))  # of another dtype, too
SLIDING = np.lib.stride_tricks.as_strided(np.ones(7, np.float32), (4, 4), (4, 4))
IMAGE = np.ones((1, 1, 4, 4), np.float32)
HUGE = 2**70


def tuned(**options):
    return optimize("ij->i", **{"i": 3, "j": 3, **options})


OPTIMIZE = [
    (lambda: tuned(i=HUGE), SpecError, "do not fit in memory"),
    (lambda: tuned(i=True), SpecError, "whole numbers would do"),
    (lambda: optimize("ij->i", shapes=[(HUGE, 4)]), SpecError, "do not fit in memory"),
    (lambda: optimize("ij->i", i=2**61, j=2**10), NestError, "spans more than"),
    (lambda: optimize("ij->i", shapes=5), ArgumentError, "shapes=5"),
    (lambda: optimize("ij->i", sizes=[3]), ArgumentError, r"sizes=\[3\]"),
    (lambda: optimize("ij->i", sizes={"i": 3.0, "j": 2}), SpecError, "whole numbers would do"),
    (lambda: optimize(5), SpecError, "spec is a int"),
    (lambda: tuned(strategy=[]), UnsupportedError, r"strategy \[\]"),
    (lambda: tuned(budget="x"), SpecError, "seconds='x'"),
    (lambda: tuned(budget=float("nan")), SpecError, "seconds=nan"),
    (lambda: tuned(budget=10**400), SpecError, "seconds=1000"),
    (lambda: tuned(dtype=""), UnsupportedError, "dtype ''"),
    (lambda: tuned(epilogue="relu:"), SpecError, "'relu:' says nothing behind its colon"),
    (lambda: tuned(epilogue="bias:"), SpecError, "'bias:' says nothing behind its colon"),
    (lambda: tuned(epilogue="scale:1e39"), SpecError, "'scale:1e39': '1e39' is too large"),
    (lambda: tuned(epilogue="scale:inf"), SpecError, "'inf' is no finite number"),
    (lambda: Budget(measurements=1.5), SpecError, "measurements=1.5"),
    (lambda: tuned(verify="no"), ArgumentError, "verify='no'"),
    (lambda: tuned(seed=-1), ArgumentError, "seed=-1"),
    (lambda: tuned(target=5), ArgumentError, "target=5"),
    (lambda: tuned(threads="1"), ArgumentError, "threads is '1'"),
    (lambda: compile(5, UNTUNED), ArgumentError, "nest is a int"),
    (lambda: compile(NEST, None), ArgumentError, "schedule is None"),
    (lambda: compile(NEST, [None]), ArgumentError, r"schedule is \[None\]"),
]
ARRAYS = [
    (lambda: looptune.einsum(["ij"], ONES), SpecError, r"the spec is \['ij'\]"),
    (lambda: looptune.matmul(np.array(["2020"], "M8[Y]"), ONES), UnsupportedError, "datetime64"),
    (lambda: looptune.matmul(np.zeros(1, [("a", "f4")]), ONES), UnsupportedError, "void32"),
    (lambda: looptune.conv2d(IMAGE, IMAGE, stride=HUGE), SpecError, "stride="),
    (lambda: looptune.conv2d(IMAGE, IMAGE, dilation=HUGE), SpecError, "dilation="),
    (lambda: conv2d((1, 1, 4, 4), (1, 1, 1, 1), padding=HUGE), SpecError, "padding="),
    (lambda: conv2d((1, 1, 4, 4), (1, 1, 1, 1), padding=10**12), SpecError, "padding=1000"),
    (lambda: einsum("ij->i", (4, 4), accumulate="yes"), SpecError, "accumulate='yes'"),
    (lambda: matmul(4, 4, 4, trans_a="no"), SpecError, "trans_a='no'"),
    (lambda: gemv(4, 4, trans_a=1), SpecError, "trans_a=1"),
    (lambda: matmul(-1, 4, 4), SpecError, "m=-1"),
    (lambda: batched_matmul(2, 4, 4, True), SpecError, "k=True"),
    (lambda: interop.contraction(5), SpecError, "the spec is 5"),
    (lambda: looptune.matmul(MASKED, ONES), ArgumentError, "operand 0 is a masked array"),
    (lambda: looptune.matmul(ONES, ONES, out=MASKED.copy()), ArgumentError, "out is a masked"),
    (lambda: looptune.matmul(ONES, ONES, out=ONE_ROW), ArgumentError, "one in memory"),
    (lambda: looptune.einsum("ij->ij", ONES, out=SLIDING), ArgumentError, "one in memory"),
    (lambda: einsum("ij->i", (4, 4), strides=[(HUGE, 1)]), SpecError, "do not fit in memory"),
    (
        lambda: looptune.einsum("...->...", np.ones((1,) * 53, "f4")),
        UnsupportedError,
        "52 together are",
    ),
]
SCHEDULES = [
    (lambda: replay(NEST, 5), ScheduleError, "5 is no list of actions"),
    (lambda: replay(NEST, [5]), ScheduleError, "action 0 is 5"),
    (lambda: replay(NEST, [("split", None)]), ScheduleError, "action 0 is"),
    (lambda: replay(NEST, [("split", "02")]), ScheduleError, "action 0 is"),
    (lambda: replay(NEST, [("split", (0, 2, 3))]), ScheduleError, "action 0, split.* too many"),
    (lambda: replay(NEST, [("split", ())]), ScheduleError, "action 0, split.* missing"),
    (lambda: reorder(UNTUNED, [False, True, 2]), ScheduleError, "a permutation of 0..2"),
    (lambda: reorder(UNTUNED, [0.0, 1, 2]), ScheduleError, "a permutation of 0..2"),
    (lambda: reorder(UNTUNED, [0, "a", 2]), ScheduleError, "a permutation of 0..2"),
    (lambda: reorder(UNTUNED, None), ScheduleError, "reorder: loops None"),
    (lambda: pack(UNTUNED, 1, [0.0, 1.0]), ScheduleError, "a permutation of 0..1"),
    (lambda: pack(UNTUNED, 1, 5), ScheduleError, "dimensions of a 5"),
    (lambda: split(UNTUNED, np.int64(0), 2), ScheduleError, "no loop"),
    (lambda: split(UNTUNED, 0, True), ScheduleError, "a factor of True"),
    (lambda: parallel(UNTUNED, np.array(0)), ScheduleError, "no loop"),
    (lambda: parse_order(NEST, None), ScheduleError, "order None is no string"),
    (lambda: parse_order(NEST, "m:\u0662 n k m n"), ScheduleError, "is no `axis:step`"),
    (lambda: parse_order(NEST, "m: n k"), ScheduleError, "'m:' is no `axis:step`"),
    (lambda: parse_order(NEST, "m:0 n k m"), ScheduleError, "least"),
    (lambda: Loop(0.0, 1), ScheduleError, "axis 0.0"),
    (lambda: Schedule(None), ScheduleError, "a schedule of None"),
    (lambda: Schedule(NEST, (5,)), ScheduleError, r"loops \(5,\)"),
    (lambda: Schedule(NEST, 5), ScheduleError, "loops 5"),
    (lambda: Schedule(NEST, packs=(5,)), ScheduleError, r"packs \(5,\)"),
    (lambda: Schedule(NEST, parallel="x"), ScheduleError, "parallel='x'"),
    (lambda: Schedule(NEST, parallel=True), ScheduleError, "parallel=True"),
    (lambda: Schedule(NEST, vector=1.0), ScheduleError, "vector=1.0"),
    (lambda: Schedule(NEST, actions=("x",)), ScheduleError, r"actions \('x',\)"),
    (lambda: Schedule(NEST, actions=5), ScheduleError, "actions 5"),
    (lambda: Pack(1, 5), ScheduleError, "in order 5"),
    (lambda: Pack("a", (0, 1)), ScheduleError, "operand 'a'"),
    (lambda: Pack(1, (0, 1), True), ScheduleError, "at True"),
    (lambda: Pack(1, (0, 1), "roof"), ScheduleError, "at 'roof'"),
]
NESTS = [
    (lambda: Axis("m", 3.0), NestError, "the extent of axis m is 3.0"),
    (lambda: Axis("m", None), NestError, "the extent of axis m is None"),
    (lambda: Axis("m", HUGE), NestError, "the extent of axis m"),
    (lambda: Axis(3, 3), NestError, "has name 3"),
    (lambda: Dim(3.0, 1, (1,)), NestError, "the size of a dimension is 3.0"),
    (lambda: Dim(3, 1, (1.5,)), NestError, "the coefficients of a dimension"),
    (lambda: Dim(3, 1, (True,)), NestError, "a coefficient of a dimension is True"),
    (lambda: Dim(3, 1, 5), NestError, "the coefficients of a dimension are 5"),
    (lambda: Dim(3, 1, (1,), None), NestError, "the offset of a dimension is None"),
    (lambda: Operand("o", None, ()), NestError, "has dtype None"),
    (lambda: Operand("o", "float32", (5,)), NestError, "the dimensions of o"),
    (lambda: Nest(5, 5, 5), NestError, "the axes of a nest are 5"),
    (lambda: Nest(NEST.axes, NEST.output, NEST.inputs, []), NestError, r"reduction \[\]"),
    (lambda: Axis("k", 5, [1]), NestError, r"axis k is a reduction is \[1\]"),
    (lambda: Operand([], "float32", ()), NestError, r"the name of an operand is \[\]"),
    (lambda: Operand("o", [], ()), NestError, r"dtype \[\]"),
    (lambda: Operand("o", "float32", (), fill="x"), NestError, "the fill of o is 'x'"),
    (lambda: Operand("o", "float32", (), fill=10**400), NestError, "the fill of o is 1000"),
    (lambda: Operand("o", "float32", (), fill=1e39), NestError, "too large"),
    (lambda: Scale(10**400), NestError, "scale by 1000"),
    (lambda: Scale(float("nan")), NestError, "scale by nan"),
    (lambda: Scale(float("inf")), NestError, "scale by inf"),
    (lambda: Scale(True), NestError, "scale by True"),
    (lambda: replace(NEST, epilogue=(Scale(1e39),)), NestError, r"scale by 1e\+39 in float32"),
    (lambda: replace(NEST, accumulate="no"), NestError, "accumulates is 'no'"),
    (lambda: replace(NEST, axes=3 * (Axis("m", 8),)), NestError, "two axes share a name"),
    (lambda: replace(matmul(4, 4, 4), nests=[]), NestError, r"the nests of a plan are \[\]"),
    (lambda: replace(matmul(4, 4, 4), output=5), NestError, "the output of a plan"),
    (lambda: replace(matmul(4, 4, 4), channel="x"), NestError, "the channel of a plan is 'x'"),
    (lambda: Tensor("t", "float31", (3,), (1,)), NestError, "dtype 'float31'"),
    (lambda: Tensor("t", "float32", (3,), ()), NestError, r"shape \(3,\) and strides \(\)"),
    (lambda: Tensor("t", "float32", (3.0,), (1,)), NestError, "the sizes of t"),
    (lambda: Tensor("t", "float32", (2**61, 4), (4, 1)), NestError, "spans more than"),
]


AVX2 = TARGETS["avx2"]
MACHINES = [
    (lambda: replace(AVX2, vector_registers=0), ArgumentError, "vector_registers=0"),
    (lambda: replace(AVX2, vector_registers=4), ArgumentError, "one at least must be left"),
    (lambda: replace(AVX2, vector_bytes=7), ArgumentError, "vector_bytes=7"),
    (lambda: replace(AVX2, vector_bytes=24), ArgumentError, "a power of two"),
    (lambda: replace(AVX2, cache_bytes=()), ArgumentError, r"cache_bytes=\(\)"),
    (lambda: replace(AVX2, cache_bytes=(1, 2, 0)), ArgumentError, "three sizes"),
    (lambda: replace(AVX2, masks="no"), ArgumentError, "masks='no'"),
    (lambda: replace(AVX2, fma=[]), ArgumentError, r"fma=\[\]"),
    (lambda: replace(AVX2, name=5), ArgumentError, "name=5"),
    (lambda: target_named([]), UnsupportedError, r"target \[\]"),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"), OPTIMIZE + ARRAYS + SCHEDULES + NESTS + MACHINES
)
def test_refused_by_name(call, kind, message):
    assert issubclass(kind, LooptuneError)
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it is empty"),
        ('[{"id": 5, "kind": "matmul", "dtype": "float32"}]', "id is 5, not a string"),
        ('[{"id": "x", "kind": [], "dtype": "float32"}]', r"kind is \[\], not a string"),
        ("[" * 100_000, "RecursionError"),
        ('{"a": 1}', "not a list of workloads"),
    ],
)
def test_suite_files(text, message, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load(path)


def test_suite_file_of_other_bytes(tmp_path):
    path = tmp_path / "suite.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="decode"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("matmul", '{"M": "a", "N": 4, "K": 4}', "a whole number of at least 0 would do"),
        ("matmul", "5", "its record is no matmul"),
        ("matmul", "{}", "a matmul needs 'M'"),
        ("conv2d", '{"N": 1, "C": 4, "H": 4, "W": 4, "K": 4, "R": 1, "S": 1, "groups": 0,'
         ' "stride": 1, "padding": 0}', "its record is no conv2d"),
    ],
)  # fmt: skip
def test_suite_records(kind, shape, message, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(f'[{{"id": "x", "kind": "{kind}", "dtype": "float32", "shape": {shape}}}]')
    (workload,) = load(path)
    with pytest.raises(SpecError, match=message):
        workload.plan()


def test_many_dimensions():
    for rank in (33, 52):
        array = np.ones((1,) * rank, np.float32)
        result = looptune.einsum("...->...", array)
        assert result.shape == array.shape
        assert result.item() == 1


def test_results_without_dimensions_are_scalars_as_in_numpy():
    vector = np.ones(3, np.float32)
    for result in (looptune.einsum("i->", vector), looptune.matmul(vector, vector)):
        assert type(result) is np.float32
        assert result == 3


def test_packs_that_do_not_exist():
    for pack_, message in (
        (Pack(9, (0, 1)), r"there are operands 0\.\.2"),
        (Pack(1, (0, 0)), "a has 2 dimensions"),
        (Pack(1, (0, 1), 7), r"there are loops 0\.\.2"),
    ):
        with pytest.raises(ScheduleError, match=message):
            Schedule(NEST, packs=(pack_,))


def test_a_pack_in_a_loop_does_not_stand_in_for_padding():
    nest = conv2d((1, 2, 5, 5), (3, 2, 3, 3), padding=1).nests[0]
    schedule = Schedule(nest, packs=(Pack(1, (0, 1, 2, 3), 2),))  # inside h, which is padded
    assert Pack(1, (0, 1, 2, 3)) in schedule.packs
    compile(nest, schedule)


def test_example_arrays_of_another_dtype():
    arrays = [np.ones((4, 4)), np.ones((4, 4))]
    assert optimize("mk,kn->mn", shapes=arrays).plan.dtype == "float64"
    with pytest.raises(SpecError, match="one dtype would do"):
        optimize("mk,kn->mn", shapes=arrays, dtype="float32")
    with pytest.raises(SpecError, match="one dtype would do"):
        optimize("mk,kn->mn", shapes=[arrays[0], ONES])
    with pytest.raises(SpecError, match="a Nest or Plan has its own"):
        optimize(matmul(4, 4, 4), dtype="float64")
    fields = np.zeros(4, [("a", "f4"), ("b", "i2")])["a"]
    with pytest.raises(SpecError, match="no multiples of its 4-byte elements"):
        optimize("i->i", shapes=[fields])


def test_loops_made_by_hand_are_not_pickled_as_actions():
    kernel = compile(NEST, Schedule(NEST, (Loop(2), Loop(1), Loop(0))))
    with pytest.raises(ScheduleError, match="was not made by primitives"):
        pickle.dumps(kernel)


def test_nothing_to_time():
    with pytest.raises(ArgumentError, match="0 contenders"):
        interleave({})
    with pytest.raises(ArgumentError, match="rounds=0"):
        interleave({"a": lambda calls: 0.0}, rounds=0)
    with pytest.raises(ArgumentError, match="seconds='x'"):
        optimize("i->", i=3).measure(seconds="x")
    with pytest.raises(ArgumentError, match="seconds=1000"):
        optimize("i->", i=3).measure(seconds=10**400)
    with pytest.raises(ArgumentError, match="seconds=-1"):
        optimize("i->", i=3).measure(seconds=-1)


def test_orders_are_of_nests():
    with pytest.raises(ScheduleError, match="the order of a Plan"):
        parse_order(matmul(8, 8, 8), "m k n")


def test_a_later_nest_adds_only_to_what_is_written():
    part = Operand("out", "float32", (Dim(8, 1, (2,)),))
    rest = Operand("out", "float32", (Dim(8, 1, (2,), 1),))
    source = Operand("a", "float32", (Dim(4, 1, (1,)),))
    axis = (Axis("i", 4),)
    tensors = ((Tensor("a", "float32", (4,), (1,)),), Tensor("out", "float32", (8,), (1,)))
    first = Nest(axis, part, (source,))
    with pytest.raises(NestError, match="of which only a part is written"):
        Plan((first, Nest(axis, rest, (source,), accumulate=True)), *tensors)


def test_a_scale_that_only_a_double_holds():
    (nest,) = fuse(matmul(4, 4, 4, dtype="float64"), "scale:1e39").nests
    assert nest.epilogue == (Scale(1e39),)


def test_a_mask_is_not_lost_on_the_fast_path():
    kernel = optimize(matmul(4, 4, 4))
    out = np.zeros((4, 4), np.float32)
    for path in (kernel, kernel.with_path(native=False)):
        with pytest.raises(ArgumentError, match="operand 1 is a masked array"):
            path(ONES, MASKED, out=out)
        with pytest.raises(ArgumentError, match="out is a masked array"):
            path(ONES, ONES, out=MASKED.copy())
    assert not out.any()
    view = ONES.view(np.recarray)  # a subclass without a mask
    assert (kernel(view, ONES, out=out) == 4).all()


def test_an_expanded_tensor_as_out():
    torch = pytest.importorskip("torch")
    ones = torch.ones(4, 4)
    with pytest.raises(ArgumentError, match="one in memory"):
        looptune.matmul(ones, ones, out=torch.ones(4).expand(4, 4))


@pytest.mark.parametrize("options", [{"stride": 2**62 - 1}, {"dilation": 2**61}])
def test_strides_over_a_single_point(options):
    plan = conv2d((1, 3, 4, 4), (4, 3, 1, 1), **options)
    assert optimize(plan).report.verified


@pytest.mark.parametrize("shape", [(4, 4, 0), (0, 4, 4), (4, 0, 4), (0, 0, 0)])
def test_prepacking_nothing(shape):
    m, n, k = shape
    kernel = optimize(matmul(m, n, k))
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    assert np.array_equal(kernel(a, kernel.prepack(b)), np.full((m, n), k))
