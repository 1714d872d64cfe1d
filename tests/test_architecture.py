"""A module imports only from lower floors; the training path loads torch and numpy only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "companion"
SLOW = ("IPython", "ipywidgets", "jupyter", "ipykernel", "matplotlib", "tensorboard", "anywidget")
TRAINING_PATH = ("model", "corpus", "device", "state", "measure", "parallel", "launch", "loop")


def floors() -> dict[str, int]:
    """Module name to floor, from the table in ARCHITECTURE.md."""
    rows = re.findall(
        r"^\| (\d) \| ([^|]+) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    return {
        name.rstrip("/").removesuffix(".py"): int(floor)
        for floor, names in rows
        for name in re.findall(r"`([^`]+)`", names)
    }


def modules() -> dict[Path, str]:
    """Each file of the package to the module or room that it belongs to."""
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {path: path.relative_to(PACKAGE).with_suffix("").parts[0] for path in files}


def imported(nodes) -> set[str]:
    """Dotted names that these syntax nodes import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def at_import(node: ast.AST):
    """Nodes that run when the module is imported; a type checker's block does not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def rooms(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("companion.")}


def test_the_table_names_every_module_and_no_other():
    assert floors(), "no table found in ARCHITECTURE.md"
    there = set(modules().values())
    assert there - floors().keys() == set(), "not in the table of ARCHITECTURE.md"
    assert floors().keys() - there == set(), "in the table of ARCHITECTURE.md, but not there"


@pytest.mark.parametrize("path", sorted(modules()), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors(path):
    floor, own = floors(), modules()[path]
    for room in rooms(imported(ast.walk(ast.parse(path.read_text())))):
        if room in floor and room != own:
            assert own in floor and floor[room] < floor[own], (
                f"{path.name} imports {room}, which is not below it"
            )


@pytest.mark.parametrize("name", TRAINING_PATH)
def test_the_training_path_needs_torch_and_numpy_only(name):
    path = PACKAGE / f"{name}.py"
    names = {name.split(".")[0] for name in imported(at_import(ast.parse(path.read_text())))}
    assert names - set(sys.stdlib_module_names) <= {"torch", "numpy", "companion"}


def test_importing_companion_loads_no_jupyter_matplotlib_or_tensorboard():
    names = ["companion", *(f"companion.{name}" for name in (*TRAINING_PATH, "classroom.labbook"))]
    program = f"import sys, {', '.join(names)}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "companion.loop" in loaded
    assert [name for name in loaded if name.split(".")[0].startswith(SLOW)] == []
