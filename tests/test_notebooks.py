"""The notebooks run, and what is committed is the output of a full run."""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import needs_host

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
FOLDER = Path(__file__).parents[1] / "experiments" / "notebooks"
QUICK = ("01_optimize_a_matmul", "02_the_environment")
SLOW = ("03_train_a_policy", "04_against_tvm_and_metaschedule")
MOST_BYTES = 120_000


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def run(name: str) -> None:
    """Execute beside the results, so that relative paths hold; raises for a cell that fails."""
    place = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(
        read(name), timeout=600, kernel_name="python3", resources=place
    ).execute()


@needs_host
@pytest.mark.filterwarnings("ignore")  # of the notebook's machinery
@pytest.mark.parametrize("name", QUICK)
def test_runs(name: str) -> None:
    if name.startswith("02"):
        pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    run(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW)
def test_runs_from_what_is_committed(name: str) -> None:
    run(name)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_is_committed_with_the_outputs_of_one_run(name: str) -> None:
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_is_small_and_names_no_place(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert len(text) < MOST_BYTES
    assert not re.findall(r"/(?:tmp|home|root|work|Users)/\S*", text)


def test_all_are_listed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted([*QUICK, *SLOW])
