"""The lab book: what it keeps, what it refuses, and what a damaged file costs."""

import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from companion import device
from companion.classroom import labbook
from companion.classroom.items import CHECKLISTS, SECTIONS

HERE = device.conditions(torch.device("cpu"))
ELSEWHERE = {**HERE, "device": "NVIDIA H200"}
GOOD = {
    "loss_heldout": 2.05,
    "loss_bigram": 2.41,
    "corpus_sha256": "0123456789abcdef",
    "overfit_loss": 0.04,
    "same_seed_equal": True,
    "tokens_per_second": 12_000.0,
    "tokens_per_second_low": 11_800.0,
    "tokens_per_second_high": 12_300.0,
    "step_seconds": 0.125,
    "utilisation": 0.93,
    "mfu": 0.41,
    "data_share": 0.004,
    "same_batch_ratio": 1.002,
    "same_batch_low": 0.991,
    "same_batch_high": 1.012,
    "preset": "tiny",
    "steps": 300,
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPANION_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sentence(text: str) -> str:
    assert "\n" not in text and len(text) < 400, text
    return text


def quiet(stage: str, conditions=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return labbook.latest(stage, conditions)


def test_it_gives_back_what_it_was_given():
    assert quiet("baseline") is None
    given = labbook.record("baseline", {**GOOD, "parts": {"a": [1, 2.5, None]}}, conditions=HERE)
    assert quiet("baseline") == given
    assert quiet("baseline").figures["parts"] == {"a": [1, 2.5, None]}
    labbook.record("baseline", {"steps": 7}, conditions=HERE)
    assert quiet("baseline").figures == {"steps": 7}
    assert quiet("compile") is None


def test_a_record_is_one_strict_json_line():
    labbook.record("baseline", {"note": "two\nlines, an é"}, conditions=HERE)
    lines = labbook.path().read_bytes().split(b"\n")
    assert len(lines) == 2 and lines[1] == b""
    assert json.loads(lines[0])["figures"] == {"note": "two\nlines, an é"}


def test_home_is_a_dot_directory_by_default(monkeypatch):
    monkeypatch.delenv("COMPANION_HOME")
    assert labbook.path() == Path.home() / ".companion" / "labbook.jsonl"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_numbers_are_kept(value):
    with pytest.raises(ValueError, match=r"figures\['run'\]\[1\] is (nan|-?inf)") as error:
        labbook.record("baseline", {"run": [1.0, value]}, conditions=HERE)
    sentence(str(error.value))
    assert not labbook.path().exists()


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0), np.float32(2.0), np.int64(2), np.bool_(True), {1, 2}, b"x"]
)
def test_t06_only_plain_values_are_kept(value):
    with pytest.raises(TypeError, match="float\\(value\\)") as error:
        labbook.record("baseline", {"loss": value}, conditions=HERE)
    assert "figures['loss']" in sentence(str(error.value))
    assert not labbook.path().exists()


def test_kinds_of_plain_values_become_plain():
    entry = labbook.record("baseline", {"loss": np.float64(2.0), "pair": (1, 2)}, conditions=HERE)
    assert type(entry.figures["loss"]) is float and entry.figures["pair"] == [1, 2]
    assert type(entry.conditions["torch"]) is str
    assert quiet("baseline") == entry


@pytest.mark.parametrize(
    ("stage", "figures", "conditions", "error", "words"),
    [
        ("basline", {}, HERE, ValueError, "no stage 'basline'; there are baseline, compile"),
        ("baseline", [1], HERE, TypeError, "figures is a list"),
        ("baseline", {1: 2}, HERE, TypeError, "the key 1"),
        ("baseline", {}, {}, ValueError, "companion.device.conditions"),
        ("baseline", {}, None, TypeError, "conditions is a NoneType"),
    ],
)
def test_bad_input_is_one_sentence(stage, figures, conditions, error, words):
    with pytest.raises(error) as raised:
        labbook.record(stage, figures, conditions=conditions)
    assert words in sentence(str(raised.value))


# --- damage ------------------------------------------------------------------------------


def test_a_torn_last_line_costs_that_line_only():
    labbook.record("baseline", {"steps": 1}, conditions=HERE)
    labbook.record("baseline", {"steps": 2}, conditions=HERE)
    file = labbook.path()
    file.write_bytes(torn := file.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="damaged, and left out: line 2") as caught:
        assert labbook.latest("baseline").figures == {"steps": 1}
    assert len(caught) == 1
    sentence(str(caught[0].message))
    labbook.record("baseline", {"steps": 3}, conditions=HERE)
    with pytest.warns(UserWarning, match="the other 2 records are used"):
        assert labbook.latest("baseline").figures == {"steps": 3}
    assert file.read_bytes().startswith(torn)


def test_garbage_in_the_middle_costs_nothing_else():
    labbook.record("baseline", {"steps": 1}, conditions=HERE)
    garbage = bytes(range(256)) * 3 + b'\n[1, 2]\n{"format": 1}\n{"format": "x"}\n' + b"[" * 99_999
    nan = json.dumps({"format": 1, "stage": "baseline", "figures": {"a": math.nan}, "time": ""})
    with labbook.path().open("ab") as file:
        file.write(garbage + b"\n" + nan.encode() + b"\n")
    labbook.record("baseline", {"steps": 2}, conditions=HERE)
    before = labbook.path().read_bytes()
    with pytest.warns(UserWarning, match="the other 2 records are used") as caught:
        assert labbook.latest("baseline").figures == {"steps": 2}
    assert len(caught) == 1
    assert "damaged" in labbook.checklist("baseline")._repr_html_()
    assert labbook.path().read_bytes() == before


def test_a_newer_format_is_left_out_and_said():
    labbook.record("baseline", {"steps": 1}, conditions=HERE)
    with labbook.path().open("a") as file:
        file.write(json.dumps({"format": labbook.FORMAT + 1, "everything": "else"}) + "\n")
    with pytest.warns(UserWarning, match="newer Companion, and left out: line 2") as caught:
        assert labbook.latest("baseline").figures == {"steps": 1}
    assert len(caught) == 1
    sentence(str(caught[0].message))


def test_home_is_a_file(home):
    home.write_text("not a directory")
    for call in (
        lambda: labbook.record("baseline", {}, conditions=HERE),
        lambda: labbook.latest("baseline"),
        lambda: labbook.checklist("baseline"),
    ):
        with pytest.raises(OSError, match="is a file.*set COMPANION_HOME") as error:
            call()
        sentence(str(error.value))
    assert home.read_text() == "not a directory"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_no_space_left(home):
    home.mkdir()
    (home / "labbook.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="no space left") as error:
        labbook.record("baseline", {}, conditions=HERE)
    sentence(str(error.value))


@pytest.mark.parametrize(("mode", "verb"), [(0o555, "written"), (0o000, "read")])
def test_a_directory_of_somebody_else(mode, verb, monkeypatch):
    """Root may do anything, so as root another user tries."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, mode)
        probe = f"""
import os, sys
sys.path[:0] = {[str(Path(labbook.__file__).parents[2])]}
from companion.classroom import labbook
if os.getuid() == 0: os.setuid(65534)
try:
    assert labbook.latest("baseline") is None
    labbook.record("baseline", {{"steps": 1}}, conditions={{"device": "x"}})
except PermissionError as error: print(error)
"""
        monkeypatch.setenv("COMPANION_HOME", home)
        run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
        os.chmod(home, 0o700)
        assert os.listdir(home) == []
    assert run.returncode == 0, run.stderr
    assert f"cannot be {verb} (permission denied): set COMPANION_HOME" in sentence(
        run.stdout.strip()
    )


def test_two_processes_append_at_once():
    writer = """
import sys
from companion.classroom import labbook
sys.stdin.readline()
for i in range(200):
    figures = {"who": sys.argv[1], "i": i, "long": "x" * (i * 97 % 9000)}
    labbook.record("baseline", figures, conditions={"device": "x"})
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", writer, who], stdin=subprocess.PIPE) for who in "ab"
    ]
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    rows = [json.loads(line) for line in labbook.path().read_bytes().splitlines()]
    for who in "ab":
        mine = [row["figures"]["i"] for row in rows if row["figures"]["who"] == who]
        assert mine == list(range(200))


# --- other conditions --------------------------------------------------------------------


def test_figures_from_another_device_are_not_compared():
    other = labbook.record("baseline", GOOD, conditions=ELSEWHERE)
    with pytest.warns(UserWarning, match="NVIDIA H200 and .* are not compared") as caught:
        assert labbook.latest("baseline", HERE) is None
    sentence(str(caught[0].message))
    here = labbook.record("compile", {**GOOD, "tokens_per_second": 18_000.0}, conditions=HERE)
    with pytest.raises(ValueError, match="NVIDIA H200.*so they are not compared") as error:
        labbook.ratio("tokens_per_second", here, other)
    sentence(str(error.value))
    mine = labbook.record("baseline", GOOD, conditions=HERE)
    labbook.record("baseline", GOOD, conditions=ELSEWHERE)
    assert quiet("baseline", HERE) == mine
    assert labbook.ratio("tokens_per_second", here, mine) == 1.5
    assert "other conditions" not in str(labbook.checklist("baseline", HERE))


def test_losses_on_two_corpora_are_not_compared():
    before = labbook.record("baseline", GOOD, conditions=HERE)
    after = labbook.record("compile", {**GOOD, "corpus_sha256": "ffff"}, conditions=HERE)
    with pytest.raises(ValueError, match="two corpora") as error:
        labbook.ratio("loss_heldout", after, before)
    sentence(str(error.value))
    assert labbook.ratio("tokens_per_second", after, before) == 1.0


@pytest.mark.parametrize("value", [None, True, "fast", 0])
def test_a_ratio_needs_two_numbers(value):
    before = labbook.record("baseline", {"step_seconds": value}, conditions=HERE)
    after = labbook.record("compile", {"step_seconds": 1.0}, conditions=HERE)
    with pytest.raises(ValueError, match="step_seconds of baseline is"):
        labbook.ratio("step_seconds", after, before)


# --- checklists --------------------------------------------------------------------------


def marks(**changes) -> list[str]:
    labbook.record("baseline", {**GOOD, **changes}, conditions=HERE)
    return [mark for mark, _, _ in labbook.checklist("baseline").rows]


def test_every_stage_has_the_items_of_the_guide():
    counts = {"baseline": 3, "compile": 5, "profile": 6, "scale": 6, "checkpoint": 5}
    assert {stage: len(items) for stage, items in CHECKLISTS.items()} == counts
    for stage, count in counts.items():
        empty = labbook.checklist(stage)
        assert [mark for mark, _, _ in empty.rows] == ["–"] * count
        assert not empty.done


def test_a_sound_baseline_is_ticked_with_its_evidence():
    assert marks() == ["✔", "✔", "✔"]
    shown = labbook.checklist("baseline")
    assert shown.done
    text = str(shown)
    for figure in ("2.050", "2.410", "01234567", "12,000", "125 ms", "93 %", "0.4 %", "0.991"):
        assert figure in text, figure
        assert figure in shown._repr_html_(), figure
    assert HERE["device"] in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_heldout": 2.41}, "✘✔✔"),
        ({"loss_heldout": 2.6}, "✘✔✔"),
        ({"overfit_loss": 1.2}, "✘✔✔"),
        ({"same_seed_equal": False}, "✘✔✔"),
        ({"tokens_per_second_low": 8_000.0}, "✔✘✔"),
        ({"data_share": 0.3}, "✔✔✘"),
        ({"same_batch_ratio": 1.3, "same_batch_low": 1.2, "same_batch_high": 1.4}, "✔✔✘"),
        ({"same_batch_low": 1.01}, "✔✔✔"),
        ({"mfu": None}, "✔✔✔"),
        ({"loss_heldout": "low"}, "✘✔✔"),
    ],
)
def test_each_figure_decides_its_item(changes, expected):
    assert "".join(marks(**changes)) == expected


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "mfu"])
def test_a_missing_figure_says_what_to_run(name):
    assert sorted(marks(**{name: None})) == sorted("–✔✔")
    open_row = next(row for row in labbook.checklist("baseline").rows if row[0] == "–")
    assert name in open_row[2] and SECTIONS[name] in sentence(open_row[2])


def test_the_sections_that_are_named_exist():
    notebook = Path(__file__).parents[1] / "notebooks" / "01_baseline.ipynb"
    text = "\n".join("".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"])
    headings = {line.lstrip("# ") for line in text.splitlines() if line.startswith("#")}
    assert set(SECTIONS.values()) <= headings


def test_the_table_says_its_marks_in_words_and_escapes_figures():
    marks(corpus_sha256="<script>")
    table = labbook.checklist("baseline")._repr_html_()
    assert "<script>" not in table and "&lt;script" in table
    assert table.count('aria-label="shown"') == 3


def test_reading_never_creates_anything(home):
    labbook.checklist("baseline")
    labbook.latest("baseline")
    assert not os.path.exists(home)
