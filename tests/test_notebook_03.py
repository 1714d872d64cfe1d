"""Notebook 03 keeps to the form of a notebook, and to what the checklist reads."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from companion.classroom.items import CHECKLISTS, DONE, FAILED, OPEN, PROFILE_SECTIONS

PATH = Path(__file__).resolve().parent.parent / "notebooks" / "03_profile.ipynb"


@pytest.fixture(scope="module")
def cells():
    return nbformat.read(PATH, as_version=4).cells


@pytest.fixture(scope="module")
def headings(cells):
    return {
        line.lstrip("# ")
        for cell in cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("#")
    }


def test_every_section_that_the_checklist_names_is_there(headings):
    assert set(PROFILE_SECTIONS.values()) <= headings


def test_a_section_that_the_text_points_to_is_there(cells, headings):
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    pointed = re.findall(r"(?:see|\() ?\*([A-Z][^*]+)\*", text)
    assert len(pointed) > 2
    assert set(pointed) <= headings


def test_every_figure_that_the_checklist_reads_is_recorded(cells):
    code = "\n".join(c.source for c in cells if c.cell_type == "code" and "%%" not in c.source)
    text = {n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant)}
    assert set(PROFILE_SECTIONS) | {"baseline_step_seconds", "recorded_step_seconds"} <= text


def test_cells_are_short(cells):
    lines = sorted(len(c.source.splitlines()) for c in cells if c.cell_type == "code")
    assert lines[-1] <= 15
    assert lines[len(lines) // 2] <= 7


def test_a_fold_is_one_block(cells):
    """A blank line ends an HTML block in Markdown, and the answer would stand there open."""
    folds = [c.source for c in cells if "<details>" in c.source]
    assert len(folds) > 15
    for source in folds:
        inside = source.split("<details>")[1].split("</details>")[0]
        assert "\n\n" not in inside and "`" not in inside


def test_the_whole_checklist_was_ticked_when_the_outputs_were_stored(cells):
    (outputs,) = [c.outputs for c in cells if c.source.endswith('labbook.checklist("profile")')]
    text = outputs[-1]["data"]["text/plain"]
    assert text.startswith("Checklist profile: 6 of 6")


# ── the judges ───────────────────────────────────────────────────────────────────────────────

GOOD = {
    "warmup_steps": 10,
    "steps": 24,
    "steps_recorded": 6,
    "windows": 2,
    "windows_planned": 2,
    "activities": ["CPU"],
    "host_spans": 9_000,
    "device_spans": 0,
    "shapes_recorded": True,
    "memory_peak_bytes": 9e7,
    "overhead_times": 1.3,
    "overhead_all": 1.9,
    "busy_share": 0.96,
    "verdict": "healthy",
    "top_operator": "aten::mm",
    "top_share": 0.44,
    "optimised": "GELU",
    "optimised_ratio": 2.0,
    "optimised_low": 1.9,
    "optimised_high": 2.1,
}


def marks(**changes):
    return "".join(item.judge(GOOD | changes)[0] for item in CHECKLISTS["profile"])


def test_all_six_items_are_ticked_for_good_figures():
    assert GOOD.keys() == PROFILE_SECTIONS.keys()
    assert marks() == 6 * DONE


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        (0, {"warmup_steps": 0}),
        (1, {"host_spans": 0}),
        (1, {"activities": ["CPU", "CUDA"], "device_spans": 0}),
        (2, {"shapes_recorded": False}),
        (2, {"memory_peak_bytes": 0}),
        (3, {"windows": 1}),
        (3, {"windows": 0, "windows_planned": 0}),
        (3, {"steps_recorded": 24}),
        (4, {"verdict": "unclear"}),
        (5, {"optimised_low": 0.98}),
    ],
)
def test_one_bad_figure_fails_one_item(item, changes):
    assert marks(**changes) == item * DONE + FAILED + (5 - item) * DONE


@pytest.mark.parametrize("name", PROFILE_SECTIONS)
def test_a_figure_that_is_missing_names_its_section(name):
    judged = [item.judge(GOOD | {name: None}) for item in CHECKLISTS["profile"]]
    (text,) = [evidence for mark, evidence in judged if mark == OPEN]
    assert name in text and f"“{PROFILE_SECTIONS[name]}”" in text
