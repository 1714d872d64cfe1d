"""Verdicts on traces made for each situation; the live patients are the notebook's."""

import json

import pytest

from companion import trace
from companion.trace.diagnose import ACTIONS, TITLES


def rows(*spans, pid=1, tid=1, cat="cpu_op"):
    """(name, start, end[, category]) on one thread."""
    return [
        {
            "ph": "X",
            "cat": (*span, cat)[3],
            "name": span[0],
            "ts": span[1],
            "dur": span[2] - span[1],
            "pid": pid,
            "tid": tid,
        }
        for span in spans
    ]


def steps(make, count=4, long=10_000):
    """``count`` steps of ``long`` µs, each with what ``make(its start)`` says."""
    events = []
    for number in range(count):
        start = number * long
        events += rows((f"ProfilerStep#{number}", start, start + long, "user_annotation"))
        events += make(start)
    return events


def read(tmp_path, events, name="t.json", **head):
    path = tmp_path / name
    path.write_text(json.dumps({"traceEvents": events, **head}))
    return trace.read(path)


def work(start, share, long=10_000, name="aten::mm", pieces=10):
    """Operators over the first ``share`` of a step."""
    size = share * long / pieces
    return rows(*((name, start + i * size, start + (i + 1) * size) for i in range(pieces)))


def loading(start, share, long=10_000):
    return rows(("data", start + (1 - share) * long, start + long, "user_annotation"))


@pytest.mark.parametrize("share, verdict", [(0.10, "healthy"), (0.30, "data")])
def test_data_bound(tmp_path, share, verdict):
    t = read(tmp_path, steps(lambda s: work(s, 1 - share) + loading(s, share)))
    found = trace.diagnose(t)
    assert found.verdict == verdict
    if verdict == "data":
        assert "30 % of a step passes waiting for the next batch (limit 15 %)" in found.why[0]
        assert found.at == (7_000, 10_000) and found.action == ACTIONS["data"]
        assert str(found).startswith("The step waits for its data.\n") and "Next: Load" in str(
            found
        )


@pytest.mark.parametrize("share, verdict", [(0.7, "healthy"), (0.4, "cpu")])
def test_python_between_operators(tmp_path, share, verdict):
    t = read(tmp_path, steps(lambda s: work(s, share)))
    assert trace.diagnose(t).verdict == verdict


def test_tiny_operators_count_as_the_calls_that_they_are(tmp_path):
    """Also where the machine stopped the thread in a few of them for most of the step."""

    def make(start):
        spans = [("aten::add", start + 10 * i, start + 10 * i + 8) for i in range(100)]
        return rows(*spans, ("aten::add", start + 1_000, start + 9_900))

    found = trace.diagnose(read(tmp_path, steps(make)))
    assert found.verdict == "cpu"
    assert "operators shorter than 50 µs, about 101 of them a step" in found.why[0]


def test_disturbed_steps_do_not_decide(tmp_path):
    """Two of five wait for their data: 24 % of the whole, and nothing in the median step."""

    def make(start):
        return work(start, 0.4) + loading(start, 0.6) if start < 20_000 else work(start, 0.9)

    t = read(tmp_path, steps(make, count=5))
    assert trace.breakdown(t).share("loading") == pytest.approx(0.24)
    assert trace.diagnose(t).verdict == "healthy"


def compiled(start, share=0.5, long=10_000):
    return rows(("_compile.compile_inner (dynamo_timed)", start, start + share * long))


def test_compiling_in_several_steps_is_shape_churn(tmp_path):
    t = read(tmp_path, steps(lambda s: compiled(s) + work(s + 5_000, 0.5)))
    found = trace.diagnose(t)
    assert found.verdict == "shapes"
    assert "4 compilations while recording, in steps 0, 1, 2, 3: 50 % of the time" in found.why[0]
    assert trace.breakdown(t).compiling == 20_000 and trace.shapes(t).compile_time == 20_000


def test_compiling_in_one_step_is_a_warmup_that_was_too_short(tmp_path):
    def make(start):
        return compiled(start) + work(start + 5_000, 0.5) if start == 0 else work(start, 0.9)

    assert trace.diagnose(read(tmp_path, steps(make))).verdict == "healthy"


def gloo(start, low, high):
    return rows(("gloo:all_reduce", start + low, start + high, "user_annotation"), tid=2)


@pytest.mark.parametrize("high, verdict", [(9_500, "communication"), (7_500, "healthy")])
def test_communication_that_nothing_hides(tmp_path, high, verdict):
    t = read(tmp_path, steps(lambda s: work(s, 0.7) + gloo(s, 3_000, high)))
    assert trace.diagnose(t).verdict == verdict


@pytest.mark.parametrize("share, verdict", [(0.8, "kernels"), (0.45, "healthy")])
def test_unfused_operations(tmp_path, share, verdict):
    def make(start):
        light = work(start, share * 0.9, name="aten::mul")
        return light + work(start + share * 9_000, (1 - share) * 0.9)

    found = trace.diagnose(read(tmp_path, steps(make)))
    assert found.verdict == verdict
    if verdict == "kernels":
        assert "80 % of it moves memory more than it calculates (limit 60 %)" in found.why[1]
        assert found.why[2].startswith("The longest of these is aten::mul: 40 calls, 28.8 ms")


def test_too_little_is_said_not_guessed(tmp_path):
    found = trace.diagnose(read(tmp_path, rows(("aten::mm", 0, 10))))
    assert found.verdict == "unclear" and "t.json holds 1 operators" in found.why[0]


def launched(start, long):
    """Ten kernels of ``long`` µs in a step, each launched 10 µs before it starts."""
    events = []
    for i in range(10):
        at, number = start + 1_000 * i, start + i + 1
        launch = rows(("cudaLaunchKernel", at, at + 5, "cuda_runtime"))[0]
        kernel = rows(("gemm", at + 10, at + 10 + long, "kernel"), pid=0, tid=7)[0]
        launch["args"] = {"correlation": number}
        kernel["args"] = {"correlation": number, "stream": 7}
        events += [launch, kernel]
    return events


@pytest.mark.parametrize("long, verdict", [(100, "cpu"), (980, "healthy")])
def test_a_device_that_waits_for_its_host(tmp_path, long, verdict):
    t = read(tmp_path, steps(lambda s: launched(s, long)))
    found = trace.diagnose(t)
    assert found.verdict == verdict and t.device == "cuda"
    if verdict == "cpu":
        text = "nothing had been launched (limit 20 %); the queue of launched work is 0 long"
        assert text in found.why[0]


# ── several ranks ────────────────────────────────────────────────────────────────────────────


def job(tmp_path, begins, count=10):
    """Per rank the times in each step at which its all-reduce begins; all end at 9,000 µs."""
    for rank, at in enumerate(begins):
        events = steps(
            lambda s, at=at: work(s, 0.3) + gloo(s, at[s // 10_000 % len(at)], 9_000), count
        )
        read(
            tmp_path,
            events,
            f"r{rank}.json",
            distributedInfo={"rank": rank, "world_size": len(begins)},
        )
    return trace.read(tmp_path)


def test_a_late_rank_is_named(tmp_path):
    found = trace.diagnose(job(tmp_path, [[3_000], [8_000], [3_000]]))
    assert (found.verdict, found.rank) == ("communication", 1)
    assert "Rank 1 comes last to 100 % of 10 collectives, typically 5.0 ms after" in found.why[0]
    assert "50 % of the time" in found.why[0] and "2 other ranks wait." in found.why[0]
    assert found.action.startswith("Mend rank 1 first.")


def test_ranks_that_take_turns_at_being_late_are_no_straggler(tmp_path):
    found = trace.diagnose(job(tmp_path, [[3_000, 8_000], [8_000, 3_000]]))
    assert found.verdict == "communication" and "comes last" not in found.why[0]


def test_every_verdict_has_a_title_and_an_action():
    assert TITLES.keys() == ACTIONS.keys()
