"""The committed notebooks can be read by anyone, and a notebook that fails cannot pass (T08)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET = {notebooks.WIDGET: {"model_id": "1", "version_major": 2, "version_minor": 0}}


def notebook(*sources: str, tags: list[str] | None = None) -> nbformat.NotebookNode:
    """A notebook whose code cells ran in order and printed one line each."""
    made = new_notebook(metadata=notebooks.KERNEL)
    for number, source in enumerate(sources, start=1):
        cell = new_code_cell(source, execution_count=number, metadata={"tags": tags or []})
        cell.outputs = [new_output("stream", text="line\n")]
        made.cells.append(cell)
    return made


# What is committed


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_a_committed_notebook_was_run_and_normalised(path):
    assert notebooks.problems(nbformat.read(path, as_version=4)) == []


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_links_between_files_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#\s]+)", cell.source):
                if "://" not in target and not target.startswith("attachment:"):
                    assert (path.parent / target).exists(), target


def test_all_five_stages_are_there():
    assert [path.stem[:2] for path in COMMITTED] == ["01", "02", "03", "04", "05"]


def spoil(change) -> list[str]:
    made = notebook("1 + 1", "2 + 2")
    change(made)
    return notebooks.problems(made)


def clear(made):
    for cell in made.cells:
        cell.outputs = []


def error(made):
    made.cells[1].outputs = [new_output("error", ename="ValueError", evalue="no", traceback=["no"])]


def set_count(made):
    made.cells[1].execution_count = None


def add_path(made):
    made.cells[0].outputs[0].text = "saved in /home/ada/run\n"


def add_widget(made):
    made.cells[0].outputs = [new_output("display_data", data=WIDGET | {"text/plain": "x"})]


def add_bang(made):
    made.cells[0].source = "x = 1\n!false"


def add_metadata(made):
    made.cells[0].metadata["execution"] = {"iopub.execute_input": "now"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (clear, "no cell has an output"),
        (error, "code cell 2 ends in ValueError: no"),
        (set_count, "code cell 2 has count None"),
        (add_path, "a path of one machine: /home/ada/run"),
        (add_widget, "code cell 1 shows a widget that has no still twin"),
        (add_bang, "code cell 1 has a `!` command"),
        (add_metadata, "not normalised"),
    ],
)
def test_what_may_not_be_committed_is_named(change, said):
    assert spoil(lambda made: None) == []
    assert any(said in problem for problem in spoil(change)), spoil(change)


def test_an_expected_error_may_be_committed():
    made = notebook("1 + 1", "fail()", tags=["raises-exception"])
    error(made)
    assert notebooks.problems(made) == []


def test_a_cell_that_is_to_be_compared_needs_an_output():
    made = notebook("1 + 1", "2 + 2", tags=["nbval-check-output"])
    made.cells[1].outputs = []
    assert notebooks.problems(made) == ["code cell 2 is to be compared and has no output"]


# Normalising


def test_neighbouring_streams_of_one_name_become_one():
    parts = [("stdout", "a"), ("stdout", "b\n"), ("stderr", "c\n"), ("stdout", "d\n")]
    kept = notebooks.normalise_outputs([new_output("stream", name=n, text=t) for n, t in parts])
    assert [(o.name, o.text) for o in kept] == [
        ("stdout", "ab\n"),
        ("stderr", "c\n"),
        ("stdout", "d\n"),
    ]


def test_nothing_of_this_machine_is_kept():
    said = f"{ROOT}/companion/loop.py {Path.home()}/.companion {os.__file__} {ROOT}"
    assert notebooks.scrub(said) == "companion/loop.py ~/.companion <stdlib>/os.py ."
    assert notebooks.scrub("/tmp/ipykernel_12/345.py:1: UserWarning") == "<cell>:1: UserWarning"


def test_counts_stay_and_session_metadata_goes():
    made = notebook("1 + 1")
    made.metadata["widgets"] = {"state": {}}
    made.cells[0].metadata |= {"collapsed": True, "tags": ["check"]}
    made.cells[0].outputs = [
        new_output("execute_result", data={"text/plain": "2"}, execution_count=7)
    ]
    made.cells.insert(0, new_markdown_cell("text", metadata={"editable": True}))
    notebooks.normalise(made)
    assert made.metadata == notebooks.KERNEL
    assert [cell.metadata for cell in made.cells] == [{}, {"tags": ["check"]}]
    assert made.cells[1].execution_count == made.cells[1].outputs[0].execution_count == 1


def test_a_widget_gives_way_to_its_still_twin():
    twin = WIDGET | {"image/png": "iVBO", "text/plain": "a slider"}
    (kept,) = notebooks.normalise_outputs([new_output("display_data", data=twin)])
    assert set(kept.data) == {"image/png", "text/plain"}


def test_running_and_storing_a_notebook(tmp_path):
    path = tmp_path / "one.ipynb"
    made = notebook("import os\nprint(os.getcwd())", "print('a')\nprint('b')\n1 + 1")
    nbformat.write(made, path)
    notebooks.store(path)
    stored = nbformat.read(path, as_version=4)
    assert notebooks.problems(stored) == []
    assert stored.cells[1].outputs[0].text == "a\nb\n"
    assert stored.cells[1].outputs[1].data["text/plain"] == "2"


# nbval, with the three things that it leaves undone


def nbval(folder: Path, *sources: str, tags: list[str]) -> str:
    nbformat.write(notebook(*sources, tags=tags), folder / "one.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "tools.nbval_fixes", "--nbval-lax"]
    command += ["--nbval-current-env", "--rootdir", folder, "-p", "no:cacheprovider", folder]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout


def test_a_failed_cell_shows_what_it_printed(tmp_path):
    said = nbval(tmp_path, "%%bash\necho the reason >&2\nexit 3", tags=[])
    assert "1 failed" in said
    assert "cell output (last 40 lines)" in said
    assert re.search(r"^the reason$", said, re.MULTILINE)


def test_a_cell_that_ran_out_of_its_own_time_fails(tmp_path):
    """Without the fix the cell passes, since it catches the interrupt (T08's kind)."""
    hide = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass"
    said = nbval(tmp_path, hide, tags=["timeout-1"])
    assert "1 failed" in said and "ran out of time" in said


def test_a_cell_within_its_time_passes(tmp_path):
    assert "1 passed" in nbval(tmp_path, "print('line')", tags=["timeout-60"])
