"""Recordings of real loops: what is written, what is said, and that nothing stays open."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from companion import measure, profiling, trace
from companion.launch import torchrun
from companion.loop import build, train
from companion.measure import phase
from companion.profiling import Schedule, Window, capture
from companion.state import Execution, RunConfig

CPU = torch.device("cpu")
LAYER = nn.Linear(8, 8)


def loop(recording, steps):
    for _ in range(steps):
        with phase("forward"):
            LAYER(torch.zeros(2, 8))
        recording.step()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        # PyTorch's own; what capture says is asked for with pytest.warns
        warnings.filterwarnings("ignore", "Profiler")
        yield


# ── schedules ────────────────────────────────────────────────────────────────────────────────


def test_the_guides_schedule():
    guide = Schedule(wait=1, warmup=1, active=3, repeat=2)
    cycle = ["off", "warm-up", "record", "record", "record and save"]
    assert guide.actions(12) == [*cycle, *cycle, "off", "off"]
    assert guide.windows(50) == [Window(1, 2, 4, True), Window(2, 7, 9, True)]


@pytest.mark.parametrize("steps", range(0, 24))
def test_windows_are_what_pytorchs_own_schedule_does(steps):
    for schedule in (
        Schedule(skip_first=2, wait=1, warmup=1, active=2, repeat=3),
        Schedule(wait=0, warmup=2, active=3, repeat=0),
        Schedule(skip_first=1, wait=3, warmup=0, active=1, repeat=2),
    ):
        actions = schedule.actions(steps)
        recorded = [i for i, action in enumerate(actions) if action.startswith("record")]
        windows = schedule.windows(steps)
        assert [s for w in windows for s in range(w.first, w.last + 1)] == recorded
        assert sum(w.complete for w in windows) == actions.count("record and save")
        assert [w.number for w in windows] == list(range(1, len(windows) + 1))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"active": 0}, "active is 0: give a whole number of at least 1"),
        ({"wait": -1}, "wait is -1: give a whole number of at least 0"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"active": 101}, "a window holds at most 100 steps"),
    ],
)
def test_bad_schedules(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Schedule(**change)


# ── recordings ───────────────────────────────────────────────────────────────────────────────


def test_two_windows_of_a_real_run(tmp_path):
    run = RunConfig.preset("tiny", total_steps=12, sequence=16, global_batch=2)
    state = build(run, Execution(device="cpu"))
    with capture(tmp_path, Schedule(repeat=2), steps=12, shapes=True, memory=True) as recording:
        for _ in train(state, 12):
            recording.step()
    folder = tmp_path / "traces"
    assert recording.files == [folder / f"window-{n}" / "rank-0.json.gz" for n in (1, 2)]
    assert recording.notes == [] and recording.steps == 12
    # the directory holds the traces and nothing half-written
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == recording.files
    for file, numbers in zip(recording.files, ([2, 3, 4], [7, 8, 9]), strict=True):
        t = trace.read(file)
        assert [step.number for step in t.steps] == numbers
        for name in ("data", "forward", "backward", "optimizer"):
            ranges = t.is_category("user_annotation") & (t.name == t.names.index(name))
            assert ranges.sum() == 3, name
        assert trace.shapes(t).recorded and trace.memory_peak(t).bytes > 0
        assert trace.breakdown(t).loading > 0
    assert str(recording.files[0]) in str(recording)


def test_shapes_memory_and_stacks_only_on_request(tmp_path):
    with capture(tmp_path / "a", steps=5) as recording:
        loop(recording, 5)
    plain = trace.read(recording.files[0])
    assert not trace.shapes(plain).recorded and trace.memory_peak(plain) is None
    assert "python_function" not in plain.categories
    with capture(tmp_path / "b", steps=5, stacks=True) as recording:
        loop(recording, 5)
    stacked = trace.read(recording.files[0])
    place = next(op.place for op in trace.top(stacked, None) if op.name == "aten::addmm")
    assert "test_profiling.py:" in place and place.endswith(" loop")


def test_t22_a_single_process_cpu_run_is_rank_0_and_has_no_device(tmp_path):
    with capture(tmp_path, steps=5) as recording:
        loop(recording, 5)
    t = trace.read(recording.files[0])
    if not torch.cuda.is_available():
        assert (t.rank, t.device) == (0, "cpu")
        assert any("no work on a device" in note for note in t.notes)


def test_t19_each_rank_has_its_file(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from companion.profiling import Schedule, capture\n"
        "dist.init_process_group('gloo')\n"
        "with capture(sys.argv[1], Schedule(wait=0, active=2), steps=3) as recording:\n"
        "    for _ in range(3):\n"
        "        dist.all_reduce(torch.ones(4))\n"
        "        recording.step()\n"
        "dist.destroy_process_group()\n"
    )
    root = str(Path(profiling.__file__).parents[1])
    torchrun(script, tmp_path / "run", nproc=2, env={"PYTHONPATH": root, "OMP_NUM_THREADS": 1})
    job = trace.read(tmp_path / "run" / "traces")
    assert [(t.rank, t.world, t.path.name) for t in job] == [
        (0, 2, "rank-0.json.gz"),
        (1, 2, "rank-1.json.gz"),
    ]
    assert trace.stragglers(job)[0].collectives == 2


def test_t19_an_earlier_runs_traces_are_not_overwritten(tmp_path):
    with capture(tmp_path, steps=5) as recording:
        loop(recording, 5)
    before = recording.files[0].read_bytes()
    with pytest.raises(FileExistsError, match="is of an earlier run and is not overwritten"):
        with capture(tmp_path, steps=5) as again:
            loop(again, 5)
    assert recording.files[0].read_bytes() == before
    assert profiling.new_directory(tmp_path / "x") != profiling.new_directory(tmp_path / "x")


def test_the_rank_comes_from_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with capture(tmp_path, steps=5) as recording:
        loop(recording, 5)
    assert recording.files[0].name == "rank-3.json.gz"


# ── always stopped, never two ────────────────────────────────────────────────────────────────


def test_t21_one_inside_another_is_refused_and_the_outer_one_is_whole(tmp_path):
    with capture(tmp_path / "a", steps=5) as outer:
        with pytest.raises(RuntimeError, match="a profiler is running already"):
            with capture(tmp_path / "b", steps=5):
                pass
        loop(outer, 5)
    assert len(outer.files) == 1 and len(trace.read(outer.files[0])) > 3


def test_t21_pytorchs_own_profiler_around_it_is_refused(tmp_path):
    with torch.profiler.profile():
        with pytest.raises(RuntimeError, match="a profiler is running already"):
            with capture(tmp_path, steps=5):
                pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_t21_an_error_in_the_body_stops_it_and_is_not_swallowed(tmp_path, error, steps):
    with pytest.raises(error, match="mine"):
        with capture(tmp_path / "a", steps=5) as recording:
            loop(recording, steps)
            raise error("mine")
    assert not torch.autograd._profiler_enabled() and measure._recorder is None
    with pytest.raises(RuntimeError, match="the recording is over"):
        recording.step()
    with capture(tmp_path / "b", steps=5) as again:
        loop(again, 5)
    assert len(again.files) == 1


def test_phases_and_capture_exclude_each_other(tmp_path):
    with measure.phases(CPU):
        with pytest.raises(RuntimeError, match="already open"):
            with capture(tmp_path):
                pass
        assert measure._recorder is not None
    with capture(tmp_path, steps=5) as recording:
        with pytest.raises(RuntimeError):
            with measure.phases(CPU):
                pass
        loop(recording, 5)


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "traces").write_text("a file where a directory must be")
    with pytest.raises(OSError):
        with capture(tmp_path, steps=5) as recording:
            loop(recording, 5)
    assert not torch.autograd._profiler_enabled() and measure._recorder is None


# ── the schedule against the loop ────────────────────────────────────────────────────────────


def test_too_short_a_loop_is_refused_before_it_runs(tmp_path):
    with pytest.raises(ValueError, match="nothing would be recorded: the loop has 2 steps and the"):
        with capture(tmp_path, steps=2):
            pass


def test_fewer_windows_than_asked_for_is_said_before(tmp_path):
    with pytest.warns(UserWarning, match="leaves time for 1 of 3 windows"):
        with capture(tmp_path, Schedule(repeat=3), steps=5) as recording:
            loop(recording, 5)
    assert len(recording.files) == 1 and "1 of 3" in str(recording)


def test_a_window_that_the_loop_cuts_short_is_said_before(tmp_path):
    with pytest.warns(UserWarning, match="ends within window 1, which gets 2 of 3 steps"):
        with capture(tmp_path, steps=4) as recording:
            loop(recording, 4)
    assert len(recording.files) == 1


def test_step_never_called_is_said_after(tmp_path):
    with pytest.warns(UserWarning, match="nothing was recorded: step\\(\\) was never called"):
        with capture(tmp_path) as recording:
            pass
    assert recording.files == [] and str(recording).startswith("nothing was recorded")


def test_too_few_steps_is_said_after(tmp_path):
    with pytest.warns(UserWarning) as said:
        with capture(tmp_path, steps=5) as recording:
            loop(recording, 2)
    texts = [str(w.message) for w in said]
    assert any("was to have 5 steps; step() was called 2 times" in text for text in texts)


def test_no_further_window_once_the_limit_is_reached(tmp_path):
    with pytest.warns(UserWarning, match="1 of 4 windows were recorded: the traces have reached"):
        with capture(tmp_path, Schedule(repeat=4), steps=20, limit=100) as recording:
            loop(recording, 20)
    assert len(recording.files) == 1 and recording.steps == 20


# ── what it costs ────────────────────────────────────────────────────────────────────────────


def test_overhead_is_a_ratio_with_an_interval_per_setting():
    calls = []
    found = profiling.overhead(lambda: calls.append(LAYER(torch.zeros(2, 8))), CPU, rounds=2)
    assert found.keys() == profiling.SETTINGS.keys()
    for ratio, low, high in found.values():
        assert 0 < low <= ratio <= high
    # one call to warm up and three that count: bare and under each setting, in two rounds
    assert len(calls) == 2 * (1 + len(profiling.SETTINGS)) * 4


def test_phase_costs_nothing_when_nothing_records():
    assert phase("forward") is phase("backward")
