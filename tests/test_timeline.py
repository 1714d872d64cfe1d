"""The timeline's layout, its bytes, its still twin; what it does in a browser is tested there."""

import base64
import gzip
import json
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from companion import trace
from companion.classroom import plots, plots_trace, schedule, timeline
from companion.classroom.timeline import Timeline
from companion.classroom.timeline_layout import DEEPEST, GROUPS, layout
from companion.profiling import Schedule, capture
from companion.trace.diagnose import Diagnosis

DATA = Path(__file__).resolve().parent / "data"
VIEW = "application/vnd.jupyter.widget-view+json"


def span(name, start, end, cat="cpu_op", pid=1, tid=1, **args):
    return {
        "ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start,
        "pid": pid, "tid": tid, "args": args,
    }  # fmt: skip


def read(tmp_path, *events, name="t.json", **head):
    path = tmp_path / name
    path.write_text(json.dumps({"traceEvents": [*events], **head}))
    return trace.read(path)


def kernel(name, start, end, stream=7, **args):
    return span(name, start, end, "kernel", 0, stream, stream=stream, **args)


@pytest.fixture(params=["cuda.json", "cpu.json", "two_ranks"])
def any_trace(request):
    return trace.read(DATA / request.param)


@pytest.fixture
def small(tmp_path):
    """Two steps; a launch in the first of them, whose kernel runs in the second."""
    return read(
        tmp_path,
        span("ProfilerStep#4", 0, 100, "user_annotation"),
        span("aten::linear", 10, 60, **{"Input Dims": [[2, 3]]}),
        span("aten::mm", 20, 50),
        span("cudaLaunchKernel", 30, 34, "cuda_runtime", correlation=9),
        span("ProfilerStep#5", 100, 220, "user_annotation"),
        span("aten::add", 110, 113),
        kernel("gemm", 105, 150, correlation=9),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "thread 1 (py)"}},
    )


# ── layout ───────────────────────────────────────────────────────────────────────────────────


def test_every_span_stands_somewhere_once(any_trace):
    shown = layout(any_trace)
    traces = list(any_trace) if isinstance(any_trace, trace.Job) else [any_trace]
    there = Counter(
        (t.names[n], round(s + shown.offsets[t.rank], 3), d)
        for t in traces
        for n, s, d in zip(t.name, t.start, t.duration, strict=True)
    )
    drawn = Counter(
        (shown.names[n], round(s, 3), d)
        for n, s, d in zip(shown.name, shown.start, shown.duration, strict=True)
    )
    assert drawn == there


def test_no_two_spans_of_a_row_overlap(any_trace):
    shown = layout(any_trace)
    assert shown.rows[0] == 0 and shown.rows[-1] == len(shown)
    for first, end in zip(shown.rows, shown.rows[1:], strict=False):
        start, duration = shown.start[first:end], shown.duration[first:end]
        assert (start[1:] >= (start + duration)[:-1] - 1e-6).all()


def test_what_lies_in_a_span_stands_one_row_lower(small):
    shown = layout(small)
    row = {
        shown.names[shown.name[i]]: np.searchsorted(shown.rows, i, "right") - 1 for i in range(7)
    }
    assert [row[n] for n in ("ProfilerStep#4", "aten::linear", "aten::mm", "cudaLaunchKernel")] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    assert row["aten::add"] == 1 and row["gemm"] == 4
    assert [(x.name, x.first, x.count, x.nests) for x in shown.lanes] == [
        ("main thread", 0, 4, True),
        ("stream 7", 4, 1, False),
    ]
    assert shown.lanes[0].about == "py, process 1, thread 1"


def test_a_kernel_is_linked_to_the_call_that_launched_it(small):
    shown = layout(small)
    pairs = [[shown.names[shown.name[i]] for i in pair] for pair in shown.links]
    assert pairs == [["cudaLaunchKernel", "gemm"]]


def test_colours_say_what_a_span_is(tmp_path):
    t = read(
        tmp_path,
        span("ProfilerStep#0", 0, 100, "user_annotation"),
        span("data", 0, 5, "user_annotation"),
        span("aten::mm", 5, 10),
        span("nn.py(3): forward", 10, 20, "python_function"),
        span("cudaLaunchKernel", 20, 21, "cuda_runtime"),
        span("c10d::allreduce_", 30, 40),
        kernel("gemm", 22, 30),
        kernel("ncclDevKernel_AllReduce", 40, 60, stream=8),
        span("Memcpy HtoD", 60, 61, "gpu_memcpy", 0, 7),
        span("backend_compile (dynamo_timed)", 61, 62),
        span("who knows", 63, 64, "new_category", tid=5),
    )
    shown = layout(t)
    groups = {shown.names[n]: GROUPS[g].name for n, g in zip(shown.name, shown.group, strict=True)}
    assert groups == {
        "ProfilerStep#0": "range",
        "data": "loading data",
        "aten::mm": "operator",
        "nn.py(3): forward": "Python",
        "cudaLaunchKernel": "launch",
        "c10d::allreduce_": "communication",
        "gemm": "kernel",
        "ncclDevKernel_AllReduce": "communication",
        "Memcpy HtoD": "copy",
        "backend_compile (dynamo_timed)": "compiling",
        "who knows": "other",
    }


def test_text_on_every_colour_can_be_read():
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for group in GROUPS:
        dark, bright = sorted((light(group.colour), light(group.ink)))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, group.name


def test_kernels_that_overlap_get_a_row_each(tmp_path):
    t = read(tmp_path, kernel("a", 0, 50), kernel("b", 20, 70), kernel("c", 50, 90))
    shown = layout(t)
    rows = [
        [shown.names[n] for n in shown.name[a:b]]
        for a, b in zip(shown.rows, shown.rows[1:], strict=False)
    ]
    assert rows == [["a", "c"], ["b"]]


def test_a_description_stands_below_the_kernels_it_describes(tmp_path):
    t = read(
        tmp_path,
        span("forward", 0, 100, "gpu_user_annotation", 0, 7),
        kernel("a", 0, 50),
        kernel("b", 50, 90),
    )
    shown = layout(t)
    assert [shown.names[n] for n in shown.name] == ["a", "b", "forward"]
    assert shown.rows.tolist() == [0, 2, 3]


def test_threads_that_launch_come_before_streams_and_idle_threads_after(tmp_path):
    t = read(
        tmp_path,
        span("ProfilerStep#0", 0, 100, "user_annotation"),
        span("aten::x", 0, 90, tid=2),
        span("cudaLaunchKernel", 1, 2, "cuda_runtime", tid=3, correlation=1),
        kernel("k", 5, 6, stream=20, correlation=1),
        kernel("k", 5, 6, stream=7),
    )
    order = ["main thread", "thread 3", "stream 7", "stream 20", "thread 2"]
    assert [lane.name for lane in layout(t).lanes] == order


def test_very_deep_spans_are_left_out_and_it_is_said(tmp_path):
    t = read(tmp_path, *(span(f"f{i}", i, 1000 - i, "python_function") for i in range(DEEPEST + 9)))
    shown = layout(t)
    assert len(shown) == DEEPEST == shown.lanes[0].count
    assert shown.notes == [f"9 spans deeper than {DEEPEST} levels are left out"]


def test_ranks_stand_below_each_other_on_one_clock(tmp_path):
    for rank in (0, 1):
        read(
            tmp_path,
            span("ProfilerStep#0", 50 * rank, 50 * rank + 100, "user_annotation"),
            name=f"rank-{rank}.json",
            distributedInfo={"rank": rank, "world_size": 2, "backend": "gloo"},
            baseTimeNanoseconds=10**18,
        )
    job = trace.read(tmp_path)
    shown = layout(job)
    assert shown.offsets == {0: 0.0, 1: pytest.approx(50, abs=0.3)}
    assert [lane.name for lane in shown.lanes] == ["rank 0: main thread", "rank 1: main thread"]
    assert shown.start == pytest.approx([0, 50], abs=0.3) and shown.notes == []
    late = Diagnosis("communication", [], "", at=(10, 20), rank=1)
    ((label, low, high),) = Timeline(job, verdict=late).marks
    assert (label, low, high) == (
        late.title,
        pytest.approx(60, abs=0.3),
        pytest.approx(70, abs=0.3),
    )


def test_ranks_without_a_clock_begin_together_and_it_is_said():
    shown = layout(trace.read(DATA / "two_ranks"))
    assert set(shown.offsets.values()) == {0.0}
    assert shown.notes == ["the ranks' files share no clock: each begins at 0"]


# ── bytes ────────────────────────────────────────────────────────────────────────────────────


def unpack(packed: bytes):
    """What timeline.js reads."""
    (length,) = struct.unpack_from("<I", packed)
    head = json.loads(packed[4 : 4 + length])
    assert (4 + length) % 8 == 0
    columns = {}
    for name, kind, offset, count in head["columns"]:
        assert offset % 8 == 0
        columns[name] = np.frombuffer(packed, "<" + kind, count, 4 + length + offset)
    columns["start"] = np.cumsum(columns["start"].astype(np.uint64)) % 2**32
    return head, columns


def packed_in(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(re.findall(r'unpack\("\w+", "([^"]+)"\)', text)[0]))


def test_packed_and_unpacked_it_is_the_same(any_trace):
    line = Timeline(any_trace)
    head, columns = unpack(line._pack(line.layout))
    shown = line.layout
    assert columns["start"] * head["tick"] == pytest.approx(shown.start, abs=1e-3)
    assert columns["duration"] * head["tick"] == pytest.approx(shown.duration, abs=1.1e-3)
    names = [head["names"][i] for i in columns["name"]]
    assert names == [shown.names[i] for i in shown.name]
    assert [head["shapes"][i] for i in columns["shape"]] == [shown.shapes[i] for i in shown.shape]
    assert columns["rows"].tolist() == shown.rows.tolist()
    assert columns["links"].reshape(-1, 2).tolist() == shown.links.tolist()
    assert head["spans"] == len(shown) and len(head["steps"]) == len(shown.steps)


def test_an_hour_fits_and_a_nanosecond_is_kept_in_a_second(tmp_path):
    hour = Timeline(read(tmp_path, span("a", 0, 3.6e9), span("b", 1e9, 1e9 + 50)))
    head, columns = unpack(hour._pack(hour.layout))
    assert columns["duration"] * head["tick"] == pytest.approx([3.6e9, 50], abs=2)
    second = Timeline(read(tmp_path, span("a", 0, 1e6), span("b", 7.125, 7.126)))
    head, columns = unpack(second._pack(second.layout))
    assert (columns["start"] * head["tick"])[1] == pytest.approx(7.125, abs=1e-9)
    assert (columns["duration"] * head["tick"])[1] == pytest.approx(0.001, abs=1e-9)


def test_thinned_it_keeps_the_longest_where_they_are(small):
    shown = layout(small)
    thin = shown.thinned(4)
    names = [thin.names[i] for i in thin.name]
    assert names == ["ProfilerStep#4", "ProfilerStep#5", "aten::linear", "gemm"]
    assert thin.rows.tolist() == [0, 2, 3, 3, 3, 4] and thin.links.tolist() == []
    assert thin.notes == ["the 4 longest of 7 spans"]
    kept = shown.thinned(6)
    pairs = [[kept.names[kept.name[i]] for i in pair] for pair in kept.links]
    assert pairs == [["cudaLaunchKernel", "gemm"]]
    assert shown.thinned(7) is shown


# ── in a notebook ────────────────────────────────────────────────────────────────────────────


def test_a_short_trace_is_carried_by_the_page_itself(small):
    data, metadata = Timeline(small)._repr_mimebundle_()
    assert set(data) == {"image/png", "text/html", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"]
    assert unpack(packed_in(data["text/html"]))[0]["spans"] == 7


def test_a_long_trace_comes_from_the_kernel_and_its_page_stays_small(small, monkeypatch):
    rng = np.random.default_rng(0)
    line = Timeline(small)
    line.layout.duration = line.layout.duration * (1 + 0.01 * rng.random(7))
    monkeypatch.setattr(
        timeline, "INLINE", timeline._size(timeline._zip(line._pack(line.layout))) - 1
    )
    data, _ = line._repr_mimebundle_()
    assert set(data) == {"image/png", "text/html", "text/plain", VIEW}
    head, columns = unpack(packed_in(data["text/html"]))
    assert 0 < head["spans"] < 7 and len(columns["start"]) == head["spans"]
    assert head["notes"] == [f"the {head['spans']} longest of 7 spans"]


def test_nothing_is_fetched_and_names_cannot_break_the_page(tmp_path):
    evil = '</script><img src=x onerror="alert(1)">'
    t = read(tmp_path, span(evil, 0, 10), name='a"<b>.json')
    path = Timeline(t).save_html(tmp_path / "line.html")
    text = path.read_text()
    assert not re.search(r"https?://|\bsrc=|\bimport\b\s*[\w{(]|fetch\(", text)
    assert "<b>" not in text and text.count("</script>") == 1
    assert unpack(packed_in(text))[0]["names"] == [evil]


def test_only_a_long_trace_loads_anywidget():
    program = "import sys, companion.classroom.timeline; print('anywidget' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_same_trace_gives_the_same_picture_and_the_same_bytes(small):
    a, b = Timeline(small), Timeline(small)
    assert plots.png(a.picture()) == plots.png(b.picture())
    assert a._repr_mimebundle_() == b._repr_mimebundle_()
    assert timeline._zip(b"x")[4:8] == bytes(4), "a time of day is in it"


# ── what is shown ────────────────────────────────────────────────────────────────────────────


def test_a_step_a_focus_and_all(small):
    assert Timeline(small).view == pytest.approx((-1.1, 221.1))
    assert Timeline(small, step=5).view == pytest.approx((97.6, 222.4))
    assert Timeline(small, focus=(10, 60)).view == pytest.approx((9, 61))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"step": 7}, "step 7 is not in t.json: it holds steps 4, 5"),
        (
            {"step": 4, "focus": (0, 1)},
            "give focus or step, not both: each says which part to show",
        ),
        (
            {"focus": (300, 400)},
            "focus 300 to 400 µs shows nothing of t.json: give a start and a later end between 0 "
            "and 220",
        ),
        (
            {"focus": (9, 9)},
            "focus 9 to 9 µs shows nothing of t.json: give a start and a later end between 0 and "
            "220",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(small, arguments, sentence):
    with pytest.raises(ValueError) as error:
        Timeline(small, **arguments)
    assert str(error.value) == sentence


def test_no_step_marks_are_said(tmp_path):
    with pytest.raises(ValueError, match="step 1 is not in t.json: it holds no step marks"):
        Timeline(read(tmp_path, span("aten::mm", 0, 1)), step=1)


def test_it_can_be_read_without_seeing_it(small):
    mark = Diagnosis("cpu", [], "", at=(40.0, 50.0))
    assert Timeline(small, step=5, verdict=mark).alt == (
        "Timeline of t.json: 220 µs, steps 4 to 5, in lanes main thread (6 spans), stream 7 "
        "(1 spans). Shown: 97.6 µs to 220 µs. Marked: The CPU cannot keep up, 40 µs to 50 µs."
    )


def drawn(picture):
    """(left, right, top) of each box in the still, in the order they were drawn."""
    boxes = [p.get_extents() for c in picture.axes[0].collections for p in c.get_paths()]
    return sorted((round(b.x0, 6), round(b.x1, 6), b.y0) for b in boxes)


def test_the_still_draws_each_span_where_it_is(small):
    picture = Timeline(small).picture()
    found = {(low, high) for low, high, _ in drawn(picture)}
    gap = 0.6 * (222.2 / plots_trace.COLUMNS)
    for low, high in ((0, 100), (10, 60), (20, 50), (100, 220), (110, 113), (105, 150)):
        assert any(abs(a - low) < 1e-5 and high - gap - 1e-5 < b <= high for a, b in found)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert {"step 4", "step 5", "main thread", "ProfilerStep#4"} <= set(texts)


def test_the_still_shows_the_mark_and_only_its_part(small):
    mark = Diagnosis("cpu", [], "", at=(110.0, 130.0))
    picture = Timeline(small, step=5, verdict=mark).picture()
    assert any("The CPU cannot keep up" in text.get_text() for text in picture.axes[0].texts)
    boxes = drawn(picture)
    assert min(low for low, _, _ in boxes) == pytest.approx(97.6)
    # the end of step 4, step 5, add, gemm
    assert len(boxes) == 4


def test_the_still_of_many_spans_merges_what_is_too_narrow(tmp_path):
    line = Timeline(read(tmp_path, *(span("aten::x", 2 * i, 2 * i + 1) for i in range(20_000))))
    assert len(drawn(line.picture())) <= plots_trace.COLUMNS
    assert len(base64.b64encode(plots.png(line.picture()))) < 60_000


def test_the_still_of_many_lanes_stays_a_picture(tmp_path):
    line = Timeline(read(tmp_path, *(span("aten::x", 0, 9, tid=i) for i in range(80))))
    assert line.picture().get_figheight() < 9


# ── the schedule explorer ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "plan, steps",
    [
        (Schedule(skip_first=2, wait=1, warmup=1, active=3, repeat=2), 30),
        (Schedule(wait=1, warmup=1, active=2, repeat=0), 12),
        (Schedule(), 20),
    ],
)
def test_what_is_written_is_what_was_planned(plan, steps):
    windows = [list(range(w.first, w.last + 1)) for w in plan.windows(steps)]
    assert schedule.outcome(plan, steps) == windows


def test_a_loop_that_ends_too_early_is_shown_as_it_is():
    explorer = schedule.ScheduleExplorer()
    assert "2 traces were written, with steps 2 to 4, steps 7 to 9." in explorer._alt
    explorer.controls["steps"].value = 8
    assert "step 7. The loop ends within the last one, which has 1 of 3." in explorer._alt
    assert "The mark of step 8 (dotted) holds no step" in explorer._alt
    explorer.controls["steps"].value = 1
    assert "Nothing was written: the loop ends before step 2 is recorded." in explorer._alt
    assert explorer._alt in explorer._repr_mimebundle_()[0]["text/plain"]


def test_the_picture_has_a_cell_a_step():
    picture = plots_trace.recording(Schedule(wait=1, warmup=1, active=2), 6, [[2, 3]])
    cells = [(round(p.get_x() + p.get_width() / 2), p.get_y()) for p in picture.axes[0].patches]
    assert cells == [*((step, 0) for step in range(6)), (2, 1.15), (3, 1.15)]


def test_sliders_are_labelled_and_record_when_they_stop():
    for control in schedule.ScheduleExplorer().controls.values():
        assert control.description and not control.continuous_update


def test_a_running_profiler_is_said(tmp_path):
    with (
        capture(tmp_path, Schedule()) as recording,
        pytest.raises(RuntimeError, match="a profiler is running already"),
    ):
        for _ in range(5):
            recording.step()
        schedule.ScheduleExplorer()
