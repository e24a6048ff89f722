"""The installed package: what it holds, what it loads, and which way its imports point."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import looptune

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "looptune"
OUTSIDE = ("envs", "models")  # packages of looptune that lie beside it in the checkout
HEAVY = ("torch", "torch_geometric", "ray", "tvm", "iced_x86", "gymnasium")


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def stages() -> list[str]:
    """Module names in the order of ARCHITECTURE.md's table."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def modules() -> list[Path]:
    return sorted(path for name in ("looptune", *OUTSIDE) for path in (ROOT / name).rglob("*.py"))


def place_of(path: Path) -> Path:
    """Where a module lies in the installed package."""
    inside = path.relative_to(ROOT)
    return inside if inside.parts[0] == "looptune" else Path("looptune") / inside


def stage_of(path: Path) -> str:
    """`lower` for looptune/lower/form.py, `looptune` for the package's own __init__."""
    first = place_of(path).parts[1].removesuffix(".py")
    return "looptune" if first == "__init__" else first


def eager(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module does; those in functions and for types alone do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from eager(child)


def imported_stages(path: Path) -> set[str]:
    """Stages of looptune that a file imports, its own excepted."""
    names: list[str] = []
    for node in eager(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
            continue
        parents = place_of(path).parent.parts
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        module = ".".join(filter(None, (base, node.module)))
        names += [f"{module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names if name.split(".")[0] == "looptune"]
    known = set(stages())
    found = {p[1] if len(p) > 1 and p[1] in known else "looptune" for p in parts}
    return found - {stage_of(path)}


def test_every_package_on_disk_is_listed() -> None:
    listed = setup_cfg()["options"]["packages"].split()
    on_disk = [".".join(place_of(p).parent.parts) for p in modules() if p.name == "__init__.py"]
    assert sorted(listed) == sorted([*on_disk, "looptune.checkpoints"])


def test_version_stands_in_one_place() -> None:
    assert setup_cfg()["metadata"]["version"] == "attr: looptune.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", looptune.__version__)
    assert looptune.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_are_exact_and_cover_the_test_extra() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    options = setup_cfg()
    wanted = options["options"]["install_requires"] + options["options.extras_require"]["test"]
    names = re.findall(r"^([\w-]+)>=", wanted, re.MULTILINE)
    assert names
    assert not set(names) - set(pins)


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files of a wheel built from a copy, so that the checkout gets no build folder."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("looptune", *OUTSIDE, "checkpoints"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, "dist"], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module_and_the_data(wheel_names: set[str]) -> None:
    assert {str(place_of(path)) for path in modules()} <= wheel_names
    assert {"looptune/py.typed", "looptune/workloads/workloads.json"} <= wheel_names


def test_wheel_holds_nothing_but_looptune(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {"looptune", f"looptune-{looptune.__version__}.dist-info"}


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, looptune; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_table_of_modules_is_complete() -> None:
    assert {stage_of(path) for path in modules()} <= set(stages())


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(place_of(p)))
def test_imports_point_up_the_table(path: Path) -> None:
    order = stages()
    place = order.index(stage_of(path))
    assert {name for name in imported_stages(path) if order.index(name) > place} == set()


def test_a_downward_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    shutil.copy(Path(__file__).parents[1] / "ARCHITECTURE.md", tmp_path)
    file = tmp_path / "looptune" / "lower" / "form.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from ..runtime import kernel\nfrom . import nest\ndef f():\n import looptune.cli\n"
    )
    assert imported_stages(file) == {"runtime"}


def test_ci_runs_the_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [line.split()[3] for line in commands] == [".venv", ".venv-test"]
    assert "grep -m1 '^python3 -m venv \\.venv-test ' README.md" in (ROOT / ".ci/run").read_text()
