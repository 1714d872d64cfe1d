"""Explorers: without a kernel, stored by nbclient, and held to their output by nbval."""

import base64
import os
import re
import subprocess
import sys

import ipywidgets
import nbformat
import pytest
from nbclient import NotebookClient

from companion.classroom import plots
from companion.classroom.widgets import Explorer, ScheduleExplorer
from companion.state import RunConfig

VIEW = "application/vnd.jupyter.widget-view+json"


class Line(Explorer):
    """The smallest explorer there is."""

    def __init__(self) -> None:
        super().__init__(end=ipywidgets.IntSlider(value=3, min=1, max=9, description="End"))

    def picture(self, **values) -> plots.Picture:
        end = values["end"]
        return plots.loss_curve([{"step": 1, "loss": 2.0}, {"step": end, "loss": 1.0}])


def test_a_control_changes_the_picture_and_its_text():
    explorer = Line()
    shown = explorer._image.value
    assert 'alt="Loss curve: 2.00 at step 1, 1.00 at step 3."' in shown
    explorer.controls["end"].value = 7
    assert explorer._image.value != shown
    assert 'alt="Loss curve: 2.00 at step 1, 1.00 at step 7."' in explorer._image.value
    assert explorer._text.value == "Loss curve: 2.00 at step 1, 1.00 at step 7."


def test_it_is_a_widget_and_a_picture_in_one():
    explorer = Line()
    data, metadata = explorer._repr_mimebundle_()
    assert data[VIEW]["model_id"] == explorer.box.model_id
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"]
    assert "companion-explorer" in explorer.box._dom_classes


@pytest.mark.parametrize("make", [Line, ScheduleExplorer])
def test_every_control_is_labelled_and_reached_by_tab(make):
    for control in make().controls.values():
        assert control.description
        assert control.tabbable is not False and not control.disabled


def test_no_output_widget_is_used():
    """nbval cannot follow them, and nbclient has hung on them."""
    children = ScheduleExplorer().box.children
    assert not any(isinstance(child, ipywidgets.Output) for child in children)


def test_the_schedule_explorer_follows_its_sliders():
    explorer = ScheduleExplorer()
    run = RunConfig.preset("tiny")
    tokens = run.total_steps * run.global_batch * run.sequence
    assert f"{tokens:,} tokens" in explorer._text.value
    explorer.controls["total_steps"].value = 2 * run.total_steps
    assert f"{2 * tokens:,} tokens" in explorer._text.value
    explorer.controls["learning_rate"].value = 0.01
    explorer.controls["warmup_steps"].value = 50
    explorer.controls["final_fraction"].value = 0.5
    assert "rises to 0.01 in 50 steps and is 0.005" in explorer._text.value


@pytest.mark.parametrize(
    "run",
    [
        RunConfig.preset("tiny"),
        RunConfig.preset("gpt2"),
        RunConfig.preset("tiny", total_steps=7, warmup_steps=0, learning_rate=0.123),
        RunConfig.preset("tiny", total_steps=333, warmup_steps=33),
    ],
)
def test_it_starts_from_the_run_and_stays_there(run):
    """A front end moves a slider's value onto its steps: it must stand on one."""
    explorer = ScheduleExplorer(run)
    assert {name: control.value for name, control in explorer.controls.items()} == {
        name: getattr(run, name) for name in explorer.controls
    }
    for name in ("warmup_steps", "total_steps"):
        slider = explorer.controls[name]
        assert (slider.value - slider.min) % slider.step == 0


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook with an explorer and a live panel, run and stored as ``make notebooks`` does."""
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        cells=[
            nbformat.v4.new_code_cell(source)
            for source in (
                "from companion.classroom.live import watch\n"
                "from companion.classroom.widgets import ScheduleExplorer\n"
                "from companion.classroom.plots import loss_curve",
                "ScheduleExplorer()",
                "loss_curve([{'step': 1, 'loss': 2.0}, {'step': 2, 'loss': 1.0}])",
                "class Plain:\n"
                "    def __init__(self, step):\n"
                "        self.step, self.loss, self.tokens_per_second = step, 5 / step, 1000\n"
                "for record in watch(map(Plain, range(1, 21)), 20):\n"
                "    pass",
            )
        ],
    )
    NotebookClient(notebook, timeout=120).execute()
    notebook.metadata.pop("widgets", None)
    folder = tmp_path_factory.mktemp("nbval")
    nbformat.write(notebook, folder / "whole.ipynb")
    notebook = nbformat.read(folder / "whole.ipynb", 4)
    notebook.cells.pop()
    nbformat.write(notebook, folder / "still.ipynb")
    return folder


def test_the_stored_notebook_holds_the_picture_and_its_words(executed):
    notebook = nbformat.read(executed / "whole.ipynb", 4)
    data = notebook.cells[1].outputs[0].data
    assert VIEW in data and base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"].startswith("The learning rate rises to 0.003 in 20 steps")
    assert set(notebook.cells[2].outputs[0].data) == {"image/png", "text/plain"}


def nbval(folder, mode: str, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", mode, "--nbval-current-env", "-q"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_t08_strict_nbval_holds_explorers_and_pictures_to_their_words(executed):
    notebook = nbformat.read(executed / "still.ipynb", 4)
    notebook.cells[1].outputs[0].data["text/plain"] = "something else"
    nbformat.write(notebook, executed / "other.ipynb")
    run = nbval(executed, "--nbval", "still.ipynb", "other.ipynb")
    assert run.returncode == 1, run.stdout
    assert re.search(r"FAILED other.ipynb::Cell 1\b", run.stdout), run.stdout
    assert re.search(r"\b1 failed, 5 passed\b", run.stdout), run.stdout


def test_t08_the_live_panel_passes_lax_nbval(executed):
    """Times are in its words, so its cell is run and not compared."""
    run = nbval(executed, "--nbval-lax", "whole.ipynb")
    assert run.returncode == 0, run.stdout
    assert re.search(r"\b4 passed\b", run.stdout), run.stdout
