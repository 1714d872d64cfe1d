"""Times that are right: checked on a clock that the tests turn, not on this machine's."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from companion import flops, measure
from companion.corpus import Windows
from companion.loop import build, train
from companion.model import ModelConfig, Transformer, next_token_loss
from companion.state import Execution, RunConfig

CPU = torch.device("cpu")


class Clock:
    """Stands still until someone works; ``pending`` is work that a device still has queued."""

    def __init__(self) -> None:
        self.now, self.pending = 100.0, 0.0

    def __call__(self) -> float:
        return self.now

    def synchronize(self, device: torch.device) -> None:
        self.now, self.pending = self.now + self.pending, 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "perf_counter", clock)
    monkeypatch.setattr(measure, "synchronize", clock.synchronize)
    return clock


# ── throughput and warm-up ───────────────────────────────────────────────────────────────────


def test_t05_real_samples_after_the_warmup():
    speed = measure.throughput([5.0, 0.1, 0.1, 0.1], [4, 4, 4, 2], warmup=1)
    assert speed.per_second == pytest.approx(10 / 0.3)
    assert (speed.steps, speed.warmup) == (3, 1)
    assert speed.step_seconds == pytest.approx(0.1)
    assert speed.low <= speed.per_second <= speed.high
    assert measure.throughput([5.0, 0.1, 0.1, 0.1], [4, 4, 4, 2]) == speed


@pytest.mark.parametrize("warmup", [1, None])
def test_t05_refuses_when_no_step_is_left(warmup):
    with pytest.raises(ValueError, match="no step is left: 1 timed, 1 of them warm-up"):
        measure.throughput([5.0], [4], warmup=warmup)


def test_t05_median_is_not_moved_by_a_slow_first_step():
    observed = [66.76, 0.0018, 0.0222, 0.0014, 0.0135, 0.0015]
    assert measure.throughput(observed, 4).step_seconds == 0.0018


@pytest.mark.parametrize(
    ("seconds", "samples", "message"),
    [
        ([1.0, 1.0], [1], "2 step times and 1 sample counts"),
        ([1.0, 0.0, 1.0], 1, "not a number above 0"),
        ([1.0, math.nan, 1.0], 1, "not a number above 0"),
        ([], 1, "no step is left"),
    ],
)
def test_throughput_refuses_bad_input(seconds, samples, message):
    with pytest.raises(ValueError, match=message):
        measure.throughput(seconds, samples)


def test_throughput_refuses_a_negative_warmup():
    with pytest.raises(ValueError, match="warmup is -1"):
        measure.throughput([1.0, 1.0], 1, warmup=-1)


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.1, 0.002, size)


@pytest.mark.parametrize("slow", [1, 2, 5, 12])
def test_warmup_ends_where_the_steady_state_begins(slow):
    for seed in range(20):
        seconds = noise(40, seed)
        seconds[:slow] = np.linspace(1.0, 0.2, slow)
        assert slow <= measure.warmup_length(seconds) <= slow + 4


def test_warmup_sees_a_device_queue_that_fills():
    """Unsynchronised first steps look too fast; they are no steady state either."""
    seconds = noise(40)
    seconds[:6] = 0.01
    assert measure.warmup_length(seconds) >= 6


def test_one_fast_moment_does_not_end_the_warmup():
    seconds = noise(40)
    seconds[:10] = 0.5
    seconds[3] = 0.1
    assert measure.warmup_length(seconds) >= 10


def test_warmup_is_at_least_one_and_at_most_half():
    assert measure.warmup_length([0.1] * 9) == 1
    assert measure.warmup_length([0.1]) == 1
    assert measure.warmup_length([]) == 1
    assert measure.warmup_length([2.0**-i for i in range(20)]) == 10


# ── intervals ────────────────────────────────────────────────────────────────────────────────


def test_interval_covers_the_true_median_about_95_times_in_100():
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        middle, low, high = measure.median_interval(random.normal(7.0, 1.0, 30))
        assert low <= middle <= high
        hits += low <= 7.0 <= high
    assert 270 <= hits <= 297


def test_interval_is_the_same_every_time():
    assert measure.median_interval(noise(30)) == measure.median_interval(noise(30))
    with pytest.raises(ValueError, match="nothing to take a median of"):
        measure.median_interval([])


# ── A against B ──────────────────────────────────────────────────────────────────────────────


def worker(clock: Clock, seconds, calls=None, name=""):
    """A function that takes ``seconds()`` on the fake clock."""

    def work() -> None:
        if calls is not None:
            calls.append(name)
        clock.now += seconds()

    return work


def test_compare_pairs_rounds_so_that_a_drift_cancels(clock):
    """The machine slows by a factor of six in the course; a is always a tenth slower."""
    random = np.random.default_rng(0)

    def slowly(factor):
        return lambda: factor * 0.01 * (1 + (clock.now - 100) / 0.3) * random.normal(1, 0.005)

    result = measure.compare(worker(clock, slowly(1.1)), worker(clock, slowly(1.0)), CPU, 40)
    assert result.low <= 1.1 <= result.high
    assert result.high - result.low < 0.08
    assert result.shown


def test_compare_says_which_is_slower(clock):
    fast, slow = worker(clock, lambda: 0.002), worker(clock, lambda: 0.004)
    result = measure.compare(slow, fast, CPU, rounds=10, names=("eager", "compiled"))
    assert (result.ratio, result.rounds, result.warmup) == (pytest.approx(2.0), 9, 1)
    assert (result.a_seconds, result.b_seconds) == pytest.approx((0.004, 0.002))
    assert result.verdict == "eager takes 2.000 [2.000, 2.000] times as long as compiled"
    assert "eager 4 ms, compiled 2 ms a call" in str(result)


def test_compare_shows_no_difference_where_there_is_none(clock):
    shown = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        work = worker(clock, lambda random=random: random.normal(0.01, 0.001))
        result = measure.compare(work, work, CPU, rounds=30, seed=seed)
        shown += result.shown
        assert ("no difference shown between a and b" in result.verdict) != result.shown
    assert shown <= 6


def test_compare_leaves_the_warmup_of_either_out(clock):
    """b compiles at its first call and is slow in its first seven rounds."""
    seconds = iter([60.0, 0.02] + [0.5] * 7 + [0.01] * 100)
    result = measure.compare(
        worker(clock, lambda: 0.01), worker(clock, lambda: next(seconds)), CPU, rounds=30
    )
    assert result.warmup == 7
    assert (result.low, result.high) == pytest.approx((1.0, 1.0))


def test_the_order_is_shuffled_and_the_same_every_time(clock):
    def order():
        calls: list[str] = []
        both = [worker(clock, lambda: 0.01, calls, name) for name in "ab"]
        measure.compare(*both, CPU, rounds=40)
        return "".join(calls[4:])

    first = order()
    pairs = [first[i : i + 2] for i in range(0, len(first), 2)]
    assert set(pairs) == {"ab", "ba"}
    assert 8 <= pairs.count("ab") <= 32
    assert order() == first


def test_short_calls_are_timed_in_chunks_of_a_millisecond(clock):
    calls: list[str] = []
    timing = measure.time_calls(worker(clock, lambda: 1e-5, calls), CPU, rounds=10)
    assert len(calls) == pytest.approx(2 + 10 * 100, abs=11)
    assert timing.seconds == pytest.approx(1e-5)
    assert str(timing) == "10 µs [10 µs, 10 µs] (median of 9 rounds)"


def test_t05_the_clock_is_read_when_the_device_is_done(clock):
    """The call returns at once and leaves 20 ms of work in the device's queue."""

    def launch() -> None:
        clock.now += 0.0001
        clock.pending += 0.02

    launch()
    timing = measure.time_calls(launch, CPU, rounds=5)
    assert timing.seconds == pytest.approx(0.0201)


def test_no_round_is_left():
    with pytest.raises(ValueError, match="rounds is 1: give at least 2"):
        measure.time_calls(lambda: None, CPU, rounds=1)


def test_results_are_plain_json():
    timing = measure.time_calls(lambda: None, CPU, rounds=3)
    comparison = measure.compare(lambda: None, lambda: None, CPU, rounds=3)
    for result in (timing, comparison, measure.throughput([0.1] * 3, 2)):
        assert json.loads(json.dumps(result.as_dict()))
    assert comparison.as_dict()["verdict"] == comparison.verdict


# ── phases ───────────────────────────────────────────────────────────────────────────────────


def one_step(clock: Clock, data: float = 0.1, own: float = 0.0, micro: int = 1) -> None:
    with measure.phase("data"):
        clock.now += data
    for _ in range(micro):
        with measure.phase("forward"):
            clock.now += 0.2
        with measure.phase("backward"):
            clock.now += 0.4
    clock.now += own
    with measure.phase("optimizer"):
        clock.now += 0.1


def test_phases_and_rest_add_up(clock):
    with measure.phases(CPU) as times:
        for _ in range(5):
            one_step(clock, own=0.2, micro=2)
    parts = times.summary()
    assert list(parts) == ["data", "forward", "backward", "optimizer", "rest"]
    assert {name: part.median for name, part in parts.items()} == pytest.approx(
        {"data": 0.1, "forward": 0.4, "backward": 0.8, "optimizer": 0.1, "rest": 0.2}
    )
    assert sum(part.share for part in parts.values()) == pytest.approx(1.0)
    assert parts["rest"].share == pytest.approx(0.2 / 1.6)
    assert parts["data"].total == pytest.approx(4 * 0.1)
    assert "backward 800 ms (50 %)" in str(times)
    assert json.loads(json.dumps(times.as_dict()))["rest"]["median"] == pytest.approx(0.2)


def test_phases_leave_the_warmup_out(clock):
    with measure.phases(CPU) as times:
        one_step(clock, data=50.0)
        for _ in range(6):
            one_step(clock)
    assert times.warmup == 1
    assert times.summary()["data"].share == pytest.approx(0.1 / 0.8)


def test_phases_wait_for_the_device(clock):
    """Each phase gets the work that it launched, not the phase that happens to wait."""
    with measure.phases(CPU) as times:
        for _ in range(3):
            clock.pending += 1.0
            with measure.phase("forward"):
                clock.pending += 3.0
            with measure.phase("optimizer"):
                clock.now += 0.5
    parts = times.summary()
    assert parts["forward"].median == pytest.approx(3.0)
    assert parts["optimizer"].median == pytest.approx(0.5)
    assert parts["rest"].median == pytest.approx(1.0)


def test_phases_do_not_nest():
    with (
        measure.phases(CPU),
        pytest.raises(RuntimeError, match="already open"),
        measure.phases(CPU),
    ):
        pass
    with measure.phases(CPU):
        pass


def test_a_phase_inside_a_phase_counts_as_the_outer_one(clock):
    with measure.phases(CPU) as times:
        for _ in range(3):
            with measure.phase("optimizer"), measure.phase("clip"):
                clock.now += 1.0
    assert times.steps == [{"optimizer": 1.0, "rest": 0.0}] * 3


def test_an_unfinished_step_is_not_counted(clock):
    with pytest.raises(KeyboardInterrupt), measure.phases(CPU) as times:
        one_step(clock)
        with measure.phase("forward"):
            raise KeyboardInterrupt
    assert len(times.steps) == 1
    with pytest.raises(ValueError, match="none is left after the warm-up"):
        times.summary()


def test_a_phase_does_nothing_while_nobody_measures():
    assert measure.phase("forward") is measure.phase("data")


def small_run(**how):
    model = ModelConfig(context=16, layers=1, width=16, heads=2, kv_heads=1, hidden=32)
    run = RunConfig(model=model, sequence=16, global_batch=4, total_steps=8, warmup_steps=2)
    text = np.arange(4000, dtype=np.uint8)
    return build(run, Execution(device="cpu", **how), batches=Windows(text, run.sequence))


def test_the_real_loop_has_four_phases_and_is_not_changed_by_them():
    bare = [record.loss for record in train(small_run(micro_batch=2), steps=6)]
    with measure.phases(CPU) as times:
        seen = [record.loss for record in train(small_run(micro_batch=2), steps=6)]
    assert seen == bare
    assert len(times.steps) == 6
    assert list(times.summary()) == ["data", "forward", "backward", "optimizer", "rest"]


def test_same_batch_is_read_once():
    calls = []

    def batches(first, count):
        calls.append((first, count))
        return torch.full((count, 2), first)

    repeated = measure.same_batch(batches)
    for first in (0, 4, 8):
        assert torch.equal(repeated(first, 4), torch.zeros(4, 2, dtype=torch.int64))
    assert repeated(9, 2).shape == (2, 2)
    assert calls == [(0, 4), (0, 2)]


# ── FLOPs ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        ModelConfig(layers=2, width=64, heads=4, kv_heads=4, hidden=96, vocabulary=300),
        ModelConfig(layers=1, width=64, heads=4, kv_heads=1, hidden=32, tied=False),
    ],
)
def test_model_flops_are_those_that_torch_counts(config):
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    model = Transformer(config)
    # the counter has no formula for the CPU's fused attention; the plain one is two products
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model, (tokens, tokens)).backward()
    assert flops.model_flops(config, 2, 24) == counter.get_total_flops()


def test_matmul_peak_is_the_best_rate(monkeypatch):
    """Each reading of the clock is a second after the last, so the largest product is best."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(flops, "perf_counter", lambda: float(next(ticks)))
    assert flops.matmul_peak(CPU, torch.float32) == 2 * 2048**3


def test_mfu():
    assert flops.mfu(3e9, 0.5, 12e9) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="must both be above 0"):
        flops.mfu(1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.5e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("Tesla T4", torch.bfloat16, None),
        ("A device of tomorrow", torch.float32, None),
    ],
)
def test_data_sheet_peak(name, dtype, peak):
    assert flops.data_sheet_peak(name, dtype) == peak
