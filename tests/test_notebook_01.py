"""Notebook 01 keeps to the form of a notebook, and to what the checklist reads."""

import ast
from pathlib import Path

import nbformat
import pytest

from companion.classroom.items import SECTIONS

PATH = Path(__file__).resolve().parent.parent / "notebooks" / "01_baseline.ipynb"


@pytest.fixture(scope="module")
def cells():
    return nbformat.read(PATH, as_version=4).cells


def test_every_section_that_the_checklist_names_is_there(cells):
    headings = {
        line.lstrip("# ")
        for cell in cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("#")
    }
    assert set(SECTIONS.values()) <= headings


def test_every_figure_that_the_checklist_reads_is_recorded(cells):
    code = "\n".join(c.source for c in cells if c.cell_type == "code" and "%%" not in c.source)
    text = {n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant)}
    assert set(SECTIONS) | {"preset", "steps"} <= text


def test_cells_are_short(cells):
    lines = sorted(len(c.source.splitlines()) for c in cells if c.cell_type == "code")
    assert lines[-1] <= 15
    assert lines[len(lines) // 2] <= 7


def test_a_fold_is_one_block(cells):
    """A blank line ends an HTML block in Markdown, and the answer would stand there open."""
    folds = [c.source for c in cells if "<details>" in c.source]
    assert len(folds) > 8
    for source in folds:
        inside = source.split("<details>")[1].split("</details>")[0]
        assert "\n\n" not in inside and "`" not in inside
