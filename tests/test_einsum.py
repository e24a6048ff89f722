"""Einsum strings against `numpy.einsum`: values, refusals, layouts, contraction paths."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest

from looptune.errors import SpecError, UnsupportedError
from looptune.ir import Plan
from looptune.reference import reference
from looptune.workloads import einsum

Shapes = list[tuple[int, ...]]


def operands(shapes: Shapes, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, shape) for shape in shapes]


def evaluate(plan: Plan, arrays: list[np.ndarray]) -> np.ndarray:
    return reference(plan, dict(zip((t.name for t in plan.inputs), arrays, strict=True)))


ACCEPTED: list[tuple[str, Shapes]] = [
    ("ba", [(2, 3)]),
    ("Ba", [(2, 3)]),
    ("ii", [(4, 4)]),
    ("ii->i", [(4, 4)]),
    ("iij,jk->ik", [(3, 3, 4), (4, 5)]),
    ("iijj->j", [(2, 2, 3, 3)]),
    ("", [()]),
    ("->", [()]),
    (",", [(), ()]),
    ("i,->i", [(3,), ()]),
    ("...", [(2, 3)]),
    ("...->...", [()]),
    ("...i->i", [(3,)]),
    ("a->...a", [(2,)]),
    ("i...->...", [(4, 2, 3)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 6)]),
    ("...,...", [(2, 3), (3,)]),
    (" i j , j k -> k i ", [(3, 4), (4, 5)]),
    ("ij,k->", [(3, 4), (5,)]),
    ("ij,kl,mn->jm", [(2, 3), (4, 5), (6, 2)]),
    ("ij,jk,kl,lm,mn->in", [(2, 3), (3, 4), (4, 5), (5, 2), (2, 3)]),
    ("ea,fb,abcd,gc,hd->efgh", [(3, 3), (3, 3), (3, 3, 3, 3), (3, 3), (3, 3)]),
    ("a,a,a,a,a,a->a", [(3,)] * 6),
    ("i,i,i->", [(4,), (1,), (4,)]),
    # CASE-28: sizes of 0
    ("mk,kn->mn", [(1, 0), (0, 1)]),
    ("mk,kn->mn", [(5, 0), (0, 7)]),
    ("mk,kn->mn", [(0, 4), (4, 3)]),
    ("i,i", [(0,), (1,)]),
    ("ii", [(0, 0)]),
    ("ij,jk,kl->il", [(2, 0), (0, 3), (3, 4)]),
    # CASE-36: sizes of 1 that broadcast
    ("i,i", [(2,), (1,)]),
    ("ij,ij->j", [(1, 5), (5, 5)]),
    ("ij,ij->j", [(2, 5), (1, 5)]),
    ("t...i,ti->t...", [(10, 2), (1, 2)]),
]


@pytest.mark.parametrize(("spec", "shapes"), ACCEPTED)
def test_means_what_it_means_to_numpy(spec, shapes):
    arrays = operands(shapes)
    wanted = np.einsum(spec, *arrays)
    found = evaluate(einsum(spec, *shapes, dtype="float64"), arrays)
    assert found.shape == np.shape(wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


REFUSED: list[tuple[str, Shapes, str]] = [
    ("ij,jk", [(2, 3), (4, 5)], "label 'j' is 4 in operand 1 and 3 before"),
    ("ij,jk", [(2, 3)], "names 2 operands; 1 were given"),
    ("ij", [(2,)], "operand 0 has 1 dimensions for labels 'ij'"),
    ("ij...", [(2,)], "operand 0 has 1 dimensions, fewer than"),
    ("ij->ii", [(2, 2)], "label 'i' is twice in the output"),
    ("ij->k", [(2, 2)], "output label 'k' is in no operand"),
    ("ii", [(1, 3)], "label 'i' is 1 and 3 in operand 0; a diagonal does not broadcast"),
    ("ii->i", [(3, 1)], "label 'i' is 3 and 1 in operand 0"),
    ("...i->i", [(2, 3)], "'...' of the operands has 1 dimensions; the output needs"),
    ("...,...->", [(2,), (2,)], "the output needs a '...'"),
    ("i. ..", [(2, 3)], "a space splits"),
    ("i- >i", [(2,)], "a space splits"),
    ("i....", [(2, 3)], "operand 0 .* has a broken ellipsis"),
    ("i..", [(2, 3)], "operand 0 .* has a broken ellipsis"),
    ("i->i..", [(2,)], "the output has a broken ellipsis"),
    ("i->i->i", [(2,)], "is not part of the grammar"),
    ("i->i,i", [(2,)], "'i,i' is not part of the grammar"),
    ("i\n", [(2,)], "is not part of the grammar"),
    ("é", [(2,)], "is not part of the grammar"),
    ("1", [(2,)], "is not part of the grammar"),
]


@pytest.mark.parametrize(("spec", "shapes", "message"), REFUSED)
def test_refuses_what_numpy_refuses(spec, shapes, message):
    with pytest.raises(ValueError, match=r"\S"):
        np.einsum(spec, *operands(shapes))
    with pytest.raises(SpecError, match=message):
        einsum(spec, *shapes)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: einsum("ij", sizes={"i": 2, "j": 2, "ij": 4}), SpecError, "no label 'ij'"),
        (lambda: einsum("ij", sizes={"i": 2, "j": 2, 3: 4}), SpecError, "no label 3"),
        (lambda: einsum("i", sizes={"i": 2.5}), SpecError, r"size of 'i' is \[2.5\]"),
        (lambda: einsum("i", sizes={"i": -2}), SpecError, "negative size"),
        (lambda: einsum("i", (2.0,)), SpecError, "whole numbers would do"),
        (lambda: einsum("i", 5), SpecError, "operand 0 is 5; a tuple of whole numbers"),
        (lambda: einsum("i,i", (2,), (2,), strides=[None]), SpecError, "1 strides for 2 operands"),
        (lambda: einsum("i", (2,), strides=[(0.5,)]), SpecError, "strides of operand 0"),
        (lambda: einsum("ij", (2, 2), out_strides=(1,)), SpecError, "the output has 2 dimensions"),
        (lambda: einsum(3, (2,)), SpecError, "the spec is 3"),
        (lambda: einsum(3), SpecError, "the spec is 3"),
        (lambda: einsum("i", (2,), strides=5), SpecError, "strides=5; a sequence, one an operand"),
        (lambda: einsum("i", (2,), dtype=42), UnsupportedError, "dtype '42' is not supported"),
        (lambda: einsum("i", (2,), dtype="int64"), UnsupportedError, "'bfloat16', 'float16', 'f"),
        (
            lambda: einsum("i,i->i", (2,), (2,), dtype="int32"),
            UnsupportedError,
            "of int32: products of two int8",
        ),
        (
            lambda: einsum("i,i,i->i", (2,), (2,), (2,), dtype="int8"),
            UnsupportedError,
            "of int8: products of two int8",
        ),
        (
            lambda: einsum("i", (2,), dtype="float16", out_dtype="float64"),
            UnsupportedError,
            r"a float64 result of float16 is not supported; of \['bfloat16', 'float16', 'float32'",
        ),
        (
            lambda: einsum(",".join(string.ascii_letters) + ",...", *[(1,)] * 53),
            UnsupportedError,
            "1 dimensions in '...' and 52 labels",
        ),
    ],
)
def test_arguments_that_have_no_meaning_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def random_term(rng: random.Random) -> str:
    term = "".join(rng.choice("ijkI") for _ in range(rng.choice([0, 1, 1, 2, 2, 3])))
    for part, chance in (("...", 0.3), (" ", 0.15)):
        if rng.random() < chance:
            at = rng.randint(0, len(term))
            term = term[:at] + part + term[at:]
    return term


def random_problem(rng: random.Random) -> tuple[str, Shapes]:
    terms = [random_term(rng) for _ in range(rng.choice([1, 1, 2, 2, 2, 3, 4]))]
    spec = ",".join(terms)
    if rng.random() < 0.75:
        kept = "".join(rng.sample("ijkI", rng.randint(0, 2))) + rng.choice(["", "..."])
        spec += "->" + rng.choice([kept, random_term(rng)])
    sizes = {label: rng.choice([0, 1, 2, 3, 4]) for label in "ijkI"}
    shapes = []
    for term in terms:
        hidden = [rng.choice([1, size]) for size in (2, 3)[rng.randint(0, 2) :]]
        shape: list[int] = []
        for label in term.replace(" ", "").replace("...", ".").replace("..", "."):
            same = [1] if rng.random() < 0.1 else [sizes.get(label, 0)]
            shape += hidden if label == "." else same
        shapes.append(tuple(shape))
    return spec, shapes


def test_random_strings_are_accepted_and_refused_as_by_numpy():
    accepted = refused = 0
    for seed in range(1500):
        spec, shapes = random_problem(random.Random(seed))
        arrays = operands(shapes, seed)
        try:
            wanted = np.einsum(spec, *arrays)
        except ValueError:
            with pytest.raises(SpecError, match="einsum"):
                einsum(spec, *shapes)
            refused += 1
            continue
        if any(0 in shape and 1 in shape for shape in shapes):
            continue  # numpy 2.4 reads memory it never set for `ii->i` of shape (0, 1)
        found = evaluate(einsum(spec, *shapes, dtype="float64"), arrays)
        assert found.shape == np.shape(wanted), (seed, spec, shapes)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=f"{seed} {spec}")
        accepted += 1
    assert min(accepted, refused) > 300


def test_strides_describe_arrays_and_do_not_change_the_meaning():
    arrays = operands([(8, 1), (1, 6)])
    plans = [
        einsum("mk,kn->mn", (8, 1), (1, 6), strides=[(1, step), None], dtype="float64")
        for step in (1, 8, 999)  # CASE-31
    ]
    assert len({plan.key for plan in plans}) == 1
    for plan in plans:
        np.testing.assert_allclose(evaluate(plan, arrays), arrays[0] @ arrays[1])
    (nest,) = einsum("i,i->i", (4,), (4,), strides=[(0,), (-3,)], out_strides=(2,))
    assert [operand.strides for operand in nest.operands] == [(2,), (0,), (-3,)]


def test_temporaries_are_contiguous_with_a_label_of_the_result_last():
    plan = einsum("ij,jk,kl->il", (30, 4), (4, 50), (50, 6))
    (temporary,) = plan.temporaries
    assert temporary.shape == (4, 6)
    assert temporary.strides == (6, 1)
    assert [nest.output.name for nest in plan.nests] == [temporary.name, "out"]
    assert plan.nests[0].axes[-1].name == "l"


def test_only_the_last_nest_accumulates():
    plan = einsum("ij,jk,kl->il", (2, 3), (3, 4), (4, 5), accumulate=True, dtype="float64")
    assert [nest.accumulate for nest in plan.nests] == [False, True]
    arrays = operands([(2, 3), (3, 4), (4, 5), (2, 5)])
    given = dict(zip((*"abc", "out"), arrays, strict=True))
    wanted = arrays[3] + arrays[0] @ arrays[1] @ arrays[2]
    np.testing.assert_allclose(reference(plan, given), wanted)
