"""loop_tool's contractions as nests: the same numbers, the same loops."""

from typing import Any

import numpy as np
import pytest

import looptune
from looptune.errors import SpecError, UnsupportedError
from looptune.interop import contraction, library, nest_of, schedule_of, side_by_side

SPECS = {
    "mk,kn->mn": ((37, 53), (53, 29)),
    "mk,kn->nm": ((7, 5), (5, 9)),
    "km,kn->mn": ((11, 6), (11, 8)),
    "abk,kc->abc": ((3, 4, 5), (5, 6)),
    "i,j->ij": ((17,), (13,)),
    "mk->m": ((19, 23),),
}


@pytest.fixture
def lt() -> Any:
    """loop_tool, where there is a wheel of it: for Python 3.11."""
    return pytest.importorskip(
        "loop_tool", reason="loop_tool is not installed", exc_type=ImportError
    )


def arrays_of(spec: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.random(shape, np.float32) for shape in SPECS[spec]]


@pytest.mark.parametrize("spec", SPECS)
def test_an_imported_nest_computes_what_loop_tool_does(lt: Any, spec: str) -> None:
    arrays = arrays_of(spec)
    tensor = contraction(spec, *arrays)
    kernel = looptune.optimize(nest_of(tensor), database=None)
    result = kernel(*arrays)
    np.testing.assert_allclose(result, np.einsum(spec, *arrays), rtol=1e-5)
    np.testing.assert_allclose(result, tensor.numpy(), rtol=1e-5)


def test_an_ir_and_a_tree_are_the_same_nest_as_their_tensor(lt: Any) -> None:
    tensor = contraction("mk,kn->mn", *arrays_of("mk,kn->mn"))
    assert nest_of(tensor).key == nest_of(tensor.ir).key == nest_of(tensor.loop_tree).key
    assert [axis.extent for axis in nest_of(tensor).axes] == [37, 53, 29]


def test_splits_and_swaps_come_along(lt: Any) -> None:
    tree = contraction("mk,kn->mn", *arrays_of("mk,kn->mn")).loop_tree
    split = tree.split(tree.loops[0], 16)
    assert schedule_of(tree).order == "m k n"
    assert schedule_of(split).order == "m:16 m k n"
    assert schedule_of(split.swap_loops(split.loops[1], split.loops[2])).order == "m:16 k m n"
    assert nest_of(split).key == nest_of(tree).key


def test_trees_stand_beside_each_other(lt: Any) -> None:
    tensor = contraction("mk->m", *arrays_of("mk->m"))
    head, first, second, *_ = side_by_side(tensor, schedule_of(tensor)).splitlines()
    assert head.split() == ["loop_tool", "looptune"]
    assert "in 19 : L0" in first
    assert "C[m] += A[m, k]" in first
    assert "for m  (19 trips)" in second


def test_more_than_a_contraction_is_refused(lt: Any) -> None:
    tensor = contraction("mk->m", *arrays_of("mk->m")).exp()
    with pytest.raises(UnsupportedError, match="add, another operation: no dense contraction"):
        nest_of(tensor)


@pytest.mark.parametrize("spec", ["mk,kn", "mm,mn->n", "mk,kn,no->mo"])
def test_a_spec_it_does_not_take(spec: str) -> None:
    with pytest.raises(SpecError, match="`mk,kn->mn` with two would do"):
        contraction(spec, *[np.zeros((2, 2), np.float32)] * 2)


def test_absence_says_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "loop_tool", None)
    with pytest.raises(UnsupportedError, match=r"pip install -c constraints.txt '.\[loop_tool\]'"):
        library()
