"""The pictures: the same everywhere, whole, and without a trace in matplotlib's globals."""

import base64
import io
import subprocess
import sys

import matplotlib
import matplotlib.style
import numpy as np
import pytest
import torch
from PIL import Image

from companion.classroom import plots
from companion.corpus import ReferenceLosses
from companion.measure import Comparison, PhaseTimes
from companion.state import RunConfig

HISTORY = [{"step": step, "loss": 2 + 3.5 * 0.97**step} for step in range(1, 200, 2)]
REFERENCES = ReferenceLosses(uniform=5.545, unigram=3.1, bigram=2.41)
STEP = {"data": 0.0002, "forward": 0.013, "backward": 0.026, "optimizer": 0.002, "rest": 0.0004}
TIMES = PhaseTimes(torch.device("cpu"), steps=[STEP] * 20)
COMPARISON = Comparison(("real data", "same batch"), 1.004, 0.991, 1.017, 0.04, 0.04, 28, 2)
RUN = RunConfig.preset("tiny")

PICTURES = {
    "loss": lambda: plots.loss_curve(HISTORY, REFERENCES),
    "half": lambda: plots.loss_curve(HISTORY[:40], REFERENCES, span=(0, 300)),
    "one": lambda: plots.loss_curve(HISTORY[:1]),
    "empty": lambda: plots.loss_curve([], REFERENCES, span=(0, 300)),
    "close": lambda: plots.loss_curve(
        HISTORY, {"a reference with a long name": 3.12, "unigram": 3.10, "bigram": 3.09}
    ),
    "phases": lambda: plots.phase_bars(TIMES),
    "interval": lambda: plots.interval(COMPARISON),
    "long names": lambda: plots.interval(
        Comparison(("with a slow loader", "the same batch again"), 1.6, 1.5, 1.7, 0.06, 0.04, 28, 2)
    ),
    "schedule": lambda: plots.schedule(RUN, total_steps=1000, learning_rate=0.01),
}


@pytest.fixture(params=PICTURES)
def picture(request) -> plots.Picture:
    return PICTURES[request.param]()


def test_every_text_is_inside_the_picture(picture):
    plots.png(picture)
    width, height = picture.canvas.get_width_height()
    (axes,) = picture.axes
    texts = [*picture.texts, *axes.texts, axes.xaxis.label]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        texts += [label for at, label in ticks if axes.axison and low <= at <= high]
    texts = [text for text in texts if text.get_text()]
    assert texts
    for text in texts:
        box = text.get_window_extent()
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, (text.get_text(), box)


@pytest.mark.parametrize("name", ["loss", "half", "close"])
def test_reference_labels_do_not_touch(name):
    picture = PICTURES[name]()
    plots.png(picture)
    labels = [
        text.get_window_extent()
        for text in picture.axes[0].texts
        if text.get_text()[0].isalpha() and text.get_text()[-1].isdigit()
    ]
    assert len(labels) == 3
    labels.sort(key=lambda box: box.y0)
    for below, above in zip(labels, labels[1:], strict=False):
        assert below.y1 <= above.y0


def test_it_is_opaque_on_light_and_dark_pages(picture):
    image = np.asarray(Image.open(io.BytesIO(plots.png(picture))).convert("RGBA"))
    assert (image[..., 3] == 255).all()
    assert (image[0, 0, :3] == 255).all()


def test_the_reader_s_own_style_changes_nothing():
    before = {name: plots.png(make()) for name, make in PICTURES.items()}
    kept = dict(matplotlib.rcParams)
    with matplotlib.style.context("dark_background"):
        matplotlib.rcParams.update(
            {"font.size": 20, "lines.linewidth": 9, "savefig.dpi": 30, "axes.grid": True}
        )
        inside = dict(matplotlib.rcParams)
        assert {name: plots.png(make()) for name, make in PICTURES.items()} == before
        assert dict(matplotlib.rcParams) == inside
    assert dict(matplotlib.rcParams) == kept


def test_pyplot_is_never_loaded():
    code = """
import sys
from companion.classroom import plots
plots.png(plots.loss_curve([{"step": 1, "loss": 2.0}], {"uniform": 5.5}))
assert "matplotlib.pyplot" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_picture_shows_itself_with_its_text_twin(picture):
    data, metadata = picture._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"] == picture.alt
    assert picture.alt.endswith(".") and "\n" not in picture.alt


def test_the_alternatives_hold_the_figures():
    alt = PICTURES["loss"]().alt
    assert "at step 1" in alt and "at step 199" in alt and "bigram 2.41" in alt
    assert "backward 26 ms (63 %)" in PICTURES["phases"]().alt
    assert "no difference shown" in PICTURES["interval"]().alt
    text = PICTURES["schedule"]().alt
    assert "rises to 0.01 in 20 steps" in text
    assert f"{1000 * RUN.global_batch * RUN.sequence:,} tokens" in text
    assert "rises all the time" in plots.schedule(RUN, warmup_steps=300).alt


def test_the_schedule_drawn_is_the_schedule_trained_with():
    axes = plots.schedule(RUN).axes[0]
    steps, rates = axes.lines[-1].get_data()
    expected = [RUN.learning_rate * RUN.learning_rate_factor(int(step) - 1) for step in steps]
    assert list(rates) == expected
    assert steps[-1] == RUN.total_steps and max(rates) == RUN.learning_rate


def test_an_img_escapes_its_text():
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in plots.img(b"", 1.0, 'a "b" <c>')


@pytest.mark.parametrize("rows", [[{"step": 1}], [{"loss": 2.0}], [3.0]])
def test_a_history_without_losses_is_one_sentence(rows):
    with pytest.raises(ValueError, match="collect record.row\\(\\)"):
        plots.loss_curve(rows)


def test_a_loss_that_is_not_finite_leaves_a_gap():
    assert plots.png(plots.loss_curve([*HISTORY, {"step": 201, "loss": float("nan")}]))


def test_phases_without_a_step_say_so():
    with pytest.raises(ValueError, match="run more steps"):
        plots.phase_bars(PhaseTimes(torch.device("cpu")))
