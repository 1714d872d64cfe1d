"""The live panel, as text here and as widgets in a real kernel."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import nbformat
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from companion.classroom import live
from companion.classroom.live import clock, watch
from companion.loop import build, train
from companion.model import ModelConfig
from companion.state import RunConfig

SMALL = ModelConfig(layers=1, width=32, heads=2, kv_heads=1, hidden=64, context=32)


class Plain:
    """A record that counts how often its loss is read: reading waits for the device."""

    read = 0

    def __init__(self, step: int) -> None:
        self.step, self.tokens_per_second = step, 1000.0

    @property
    def loss(self) -> float:
        Plain.read += 1
        return 5.0 / self.step


class Source:
    """Records that know whether they were closed."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.closed = False
        self.records = self._records(count, error)

    def _records(self, count: int, error: BaseException | None) -> Iterator[Plain]:
        try:
            for step in range(1, count + 1):
                yield Plain(step)
            if error:
                raise error
        finally:
            self.closed = True


# --- in a terminal -----------------------------------------------------------------------


def test_the_records_pass_through_and_whole_lines_come_out(capsys):
    records = [Plain(step) for step in range(1, 1001)]
    Plain.read = 0
    assert list(watch(iter(records), 1000, title="Run")) == records
    assert Plain.read <= 12
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert out.endswith("\n") and len(lines) == 12
    assert lines[0].startswith("Run: step 1 of 1000 · loss 5.000")
    assert lines[5].startswith("Run: step 500 of 1000 · loss 0.010 · 1,000 tokens/s · 0:0")
    assert lines[-1].startswith("Run done: step 1000 of 1000 · loss 0.005 · 1,000 tokens/s")


def test_a_line_is_one_write(monkeypatch):
    """T08, and print's two writes: other processes write to the same terminal."""
    writes = []
    monkeypatch.setattr(sys, "stdout", type("Out", (), {"write": writes.append, "flush": id})())
    monkeypatch.setattr(sys.stdout, "flush", lambda: None, raising=False)
    list(watch(Source(3).records, 3))
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in writes)


def test_fewer_records_than_steps(capsys):
    list(watch(Source(3).records, 30))
    assert "done: step 3 of 30" in capsys.readouterr().out.splitlines()[-1]


def test_no_record_at_all(capsys):
    assert list(watch(iter([]), 5)) == []
    assert capsys.readouterr().out == "Training done: step 0 of 5 · 0:00\n"


def test_break_closes_the_records(capsys):
    source = Source(100)
    for record in watch(source.records, 100):
        if record.step == 7:
            break
    assert source.closed
    assert "Training left: step 7 of 100 · loss 0.714" in capsys.readouterr().out


def test_an_error_in_the_body_passes_and_closes(capsys):
    source, error = Source(100), RuntimeError("mine")
    with pytest.raises(RuntimeError) as raised:
        for _ in watch(source.records, 100):
            raise error
    assert raised.value is error and source.closed
    assert "Training left: step 1" in capsys.readouterr().out


@pytest.mark.parametrize("error", [RuntimeError("theirs"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_the_records_passes_unchanged(error, capsys):
    with pytest.raises(type(error)) as raised:
        list(watch(Source(4, error).records, 100))
    assert raised.value is error and error.__cause__ is None and error.__context__ is None
    assert f"ended by {type(error).__name__}: step 4 of 100" in capsys.readouterr().out


def test_a_last_loss_that_cannot_be_read_hides_no_error(capsys):
    class Broken(Plain):
        @property
        def loss(self) -> float:
            if self.step > 1:
                raise RuntimeError("device lost")
            return 1.0

    watched = watch((Broken(step) for step in (1, 2, 3)), 100)
    assert [next(watched).step, next(watched).step] == [1, 2]
    watched.close()
    assert "Training left: step 2 of 100 · loss 1.000" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, -1, 2.5, None])
def test_steps_must_be_a_number_of_records(steps):
    with pytest.raises(ValueError, match="steps is .*: give the number of records, at least 1"):
        watch(iter([]), steps)


def test_t06_what_is_kept_is_plain():
    class Tensors(Plain):
        @property
        def loss(self):
            return torch.ones((), requires_grad=True).exp().detach()

    panel = live._Lines(5, "x")
    for step in range(1, 6):
        panel.show(Tensors(step))
    assert json.loads(json.dumps(panel.history)) == panel.history
    assert {type(value) for row in panel.history for value in row.values()} == {int, float}


def test_watching_does_not_change_training(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "b.txt").write_bytes(bytes(range(256)) * 64)
    run = RunConfig(model=SMALL, corpus=str(tmp_path), sequence=16, global_batch=4, total_steps=20)
    bare = [record.loss for record in train(build(run), 20)]
    watched = [record.loss for record in watch(train(build(run), 20), 20)]
    assert watched == bare


def test_importing_it_loads_no_notebook_library():
    code = """
import sys
import companion.classroom.live
loaded = {"matplotlib", "ipywidgets", "IPython", "torch"} & set(sys.modules)
assert not loaded, loaded
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_clock():
    assert [clock(s) for s in (0, 59.6, 65, 7200)] == ["0:00", "1:00", "1:05", "2:00:00"]


# --- in a kernel -------------------------------------------------------------------------

SETUP = """
import time
from companion.classroom.live import watch
from companion.loop import stop_requested

class Plain:
    def __init__(self, step):
        self.step, self.loss, self.tokens_per_second = step, 5.0 / step, 1000.0

closed = []
def records(count, pause=0.02, error=None):
    try:
        for step in range(1, count + 1):
            end = time.perf_counter() + pause
            while time.perf_counter() < end:
                pass
            yield Plain(step)
        if error:
            raise error
    finally:
        closed.append(count)
"""


class Cell:
    """A running cell, and what a front end would show of it."""

    def __init__(self, client, code: str) -> None:
        self.client, self.id = client, client.execute(code)
        self.displays: dict[str, dict] = {}
        self.first: dict[str, dict] = {}
        self.text, self.error, self.idle = "", None, False
        self.comms: dict[str, dict] = {}
        self.closed: set[str] = set()

    def step(self) -> None:
        message = self.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != self.id:
            return
        kind, content = message["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data"):
            name = content["transient"]["display_id"]
            self.displays[name] = content["data"]
            self.first.setdefault(name, content["data"])
        elif kind == "stream":
            self.text += content["text"]
        elif kind == "execute_result":
            self.text += content["data"]["text/plain"]
        elif kind == "error":
            self.error = content["ename"]
        elif kind == "comm_open":
            self.comms[content["comm_id"]] = content["data"]["state"]
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.comms[content["comm_id"]].update(content["data"]["state"])
        elif kind == "comm_close":
            self.closed.add(content["comm_id"])
        elif kind == "status":
            self.idle = content["execution_state"] == "idle"

    def until(self, what) -> None:
        deadline = time.monotonic() + 120
        while not what():
            assert time.monotonic() < deadline, (self.text, self.error)
            self.step()

    def end(self) -> "Cell":
        self.until(lambda: self.idle)
        return self

    def named(self, model: str) -> str:
        return next(c for c, state in self.comms.items() if state.get("_model_name") == model)


class Kernel:
    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(startup_timeout=120)
        self.subshell = None
        assert self.run(SETUP).error is None

    def run(self, code: str) -> Cell:
        return Cell(self.client, code).end()

    def start(self, code: str) -> Cell:
        """Runs until the panel is there and has been told of a step."""
        cell = Cell(self.client, code)
        cell.until(lambda: cell.displays)
        return cell

    def click(self, cell: Cell) -> None:
        """As JupyterLab 4.4 does: over a subshell made through the control channel."""
        session = self.client.session
        if self.subshell is None:
            self.client.control_channel.send(session.msg("create_subshell_request", {}))
            reply = self.client.get_control_msg(timeout=60)
            self.subshell = reply["content"]["subshell_id"]
        data = {"method": "custom", "content": {"event": "click"}}
        click = session.msg("comm_msg", {"comm_id": cell.named("ButtonModel"), "data": data})
        click["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(click)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def still(cell: Cell) -> str:
    """Checks that one panel was shown and only its picture is left; its text."""
    ((name, data),) = cell.displays.items()
    assert "application/vnd.jupyter.widget-view+json" in cell.first[name]
    assert set(data) == {"image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    # nothing of the panel stays in the kernel
    assert cell.comms.keys() == cell.closed
    assert data["text/plain"] in cell.text
    return data["text/plain"]


def test_a_finished_loop_leaves_its_picture(kernel):
    cell = kernel.run("for record in watch(records(60), 60, references={'uniform': 5.5}): pass")
    assert cell.error is None
    assert still(cell).startswith("Training done: step 60 of 60 · loss 0.083 · 1,000 tokens/s")
    classes = [state.get("_dom_classes") for state in cell.comms.values()]
    assert ["companion-live"] in classes and ["companion-stop"] in classes


def test_stop_ends_the_loop_while_the_cell_runs(kernel):
    cell = kernel.start(
        "closed.clear(); n = 0\n"
        "for record in watch(records(3000), 3000): n += 1\n"
        "print('after', n < 3000, closed)"
    )
    kernel.click(cell)
    cell.end()
    assert cell.error is None
    assert still(cell).startswith("Training stopped: step ")
    assert "after True [3000]" in cell.text


def test_an_interrupt_ends_the_panel_and_passes(kernel):
    cell = kernel.start("for record in watch(records(3000), 3000): pass")
    kernel.manager.interrupt_kernel()
    cell.end()
    assert cell.error == "KeyboardInterrupt"
    assert "ended by KeyboardInterrupt: step" in still(cell)


def test_an_interrupt_as_a_flag_ends_the_panel(kernel):
    cell = kernel.start(
        "with stop_requested() as stop:\n"
        "    for record in watch(records(3000), 3000):\n"
        "        if stop: break\n"
        "print('after', stop.signal)"
    )
    kernel.manager.interrupt_kernel()
    cell.end()
    assert cell.error is None and "after 2" in cell.text
    assert "Training left: step" in still(cell)


def test_an_error_ends_the_panel_and_passes(kernel):
    cell = kernel.run("for r in watch(records(5, error=ZeroDivisionError()), 60): pass")
    assert cell.error == "ZeroDivisionError"
    assert "Training ended by ZeroDivisionError: step 5 of 60" in still(cell)


def test_a_loop_left_in_a_variable_does_not_look_as_if_it_ran(kernel):
    cell = kernel.run("closed.clear(); kept = watch(records(60), 60); next(kept); len(closed)")
    assert "Training left: step 1 of 60" in still(cell)
    # it can be gone on with, without a panel
    cell = kernel.run("[next(kept).step, len(list(kept)), closed]")
    assert "[2, 58, [60]]" in cell.text and not cell.displays


def test_a_stored_notebook_holds_the_picture_and_no_dead_widget(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(SETUP),
            nbformat.v4.new_code_cell("for record in watch(records(30), 30): pass"),
        ]
    )
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    picture, line = notebook.cells[1].outputs
    assert set(picture.data) == {"image/png", "text/plain"}
    assert picture.metadata["image/png"]["alt"] == picture.data["text/plain"]
    assert line.text.startswith("Training done: step 30 of 30")
