"""The loop is exact: same run, same losses, whatever is done around it or however it is cut."""

import gc
import json
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from companion.loop import (
    NonFiniteLoss,
    Stop,
    build,
    count_targets,
    evaluate,
    micro_batches,
    optimizer_step,
    stop_requested,
    train,
)
from companion.model import ModelConfig
from companion.randomness import step_seed
from companion.state import Execution, RunConfig

MODEL = ModelConfig(context=32, layers=2, width=32, heads=4, kv_heads=2, hidden=48)
RUN = RunConfig(model=MODEL, sequence=32, global_batch=12, total_steps=40, warmup_steps=4)
DROPOUT = replace(RUN, model=replace(MODEL, dropout=0.1))


def losses(run=RUN, how=None, steps=6, body=lambda state, record: None, **kwargs):
    state = build(run, how, **kwargs)
    out = []
    for record in train(state, steps):
        body(state, record)
        out.append(record.loss)
    return out, state


def weights(state):
    return torch.cat([p.detach().flatten() for p in state.model.parameters()])


# --- the same run -------------------------------------------------------------------------


def test_same_seed_same_losses_and_weights():
    """T07: the same call twice gives the same run, in one process."""
    a, state_a = losses(DROPOUT)
    torch.rand(3)
    b, state_b = losses(DROPOUT)
    assert a == b
    assert torch.equal(weights(state_a), weights(state_b))
    c, _ = losses(replace(DROPOUT, seed=1))
    assert a != c


def _disturb(state, record):
    """What a loop body may do: evaluate, log, draw, seed, change modes by evaluating."""
    evaluate(state, samples=4)
    json.dumps(record.row())
    torch.manual_seed(random.randrange(1000))
    torch.rand(7), np.random.rand(3), random.random()


def test_the_loop_body_cannot_change_training():
    quiet, state_a = losses(DROPOUT)
    busy, state_b = losses(DROPOUT, body=_disturb)
    assert quiet == busy
    assert torch.equal(weights(state_a), weights(state_b))


def test_training_does_not_change_the_callers_randomness():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    state = build(DROPOUT)
    for _ in train(state, 2):
        pass
    evaluate(state, samples=4)
    assert torch.equal(torch.rand(4), expected)


def test_dropout_differs_between_steps_and_ranks():
    seeds = {step_seed(s, step, rank) for s in range(5) for step in range(20) for rank in range(4)}
    assert len(seeds) == 5 * 20 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    # swapping step and rank must not give the same stream
    assert step_seed(0, 1, 2) != step_seed(0, 2, 1)


def test_compiled_variant_starts_from_the_same_weights(monkeypatch):
    """T07: a variant is a fresh run, so its first loss is the baseline's."""
    eager, _ = losses(steps=1)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: real(module, backend="eager"))
    compiled, state = losses(how=Execution(compile=True), steps=1)
    assert eager == pytest.approx(compiled, rel=1e-6)
    assert not any(key.startswith("_orig_mod") for key in state.model.state_dict())


def test_train_in_two_calls_is_train_in_one():
    whole, state_a = losses(DROPOUT, steps=6)
    state = build(DROPOUT)
    parts = [r.loss for r in train(state, 2)] + [r.loss for r in train(state, 4)]
    assert parts == whole
    assert torch.equal(weights(state), weights(state_a))


# --- position -----------------------------------------------------------------------------


def test_position_counts_samples_of_completed_steps():
    state = build(RUN)
    seen = [(r.step, r.position) for r in train(state, 3)]
    assert seen == [(1, 12), (2, 24), (3, 36)]
    assert (state.step, state.position) == (3, 36)


def test_each_step_takes_the_next_samples():
    asked = []

    def batches(first, count):
        asked.append((first, count))
        return torch.zeros(count, 32, dtype=torch.int64), torch.zeros(count, 32, dtype=torch.int64)

    for _ in train(build(RUN, batches=batches), 3):
        pass
    assert asked == [(0, 12), (12, 12), (24, 12)]


def test_a_broken_off_loop_leaves_a_whole_step():
    state = build(RUN)
    for record in train(state, 10):
        if record.step == 3:
            break
    assert state.position == 36
    rest = [r.loss for r in train(state, 3)]
    assert rest == losses(steps=6)[0][3:]


# --- the gradient is that of the global mean ----------------------------------------------


def sgd(run=RUN):
    """AdamW hides a wrong scale of the gradient; SGD shows it (traps S2, T30)."""
    return replace(run, optimizer="sgd", dtype="float64", clip=0.0, learning_rate=0.5)


@pytest.mark.parametrize("micro_batch", [1, 5, 6, 7, 12, 100])
def test_accumulation_equals_the_whole_batch(micro_batch):
    whole, a = losses(sgd(), steps=3)
    cut, b = losses(sgd(), Execution(micro_batch=micro_batch), steps=3)
    assert whole == pytest.approx(cut, rel=1e-12)
    torch.testing.assert_close(weights(a), weights(b), rtol=1e-10, atol=1e-12)


def test_accumulation_with_uneven_masks_is_the_mean_over_counted_tokens():
    """Averaging micro-batch means would weigh the short ones too much (S2)."""
    plain = build(sgd()).batches

    def masked(first, count):
        inputs, targets = plain(first, count)
        targets = targets.clone()
        for i in range(count):
            targets[i, : (first + i) % 12 * 2] = -100
        return inputs, targets

    whole, a = losses(sgd(), steps=2, batches=masked)
    cut, b = losses(sgd(), Execution(micro_batch=5), steps=2, batches=masked)
    assert whole == pytest.approx(cut, rel=1e-12)
    torch.testing.assert_close(weights(a), weights(b), rtol=1e-10, atol=1e-12)
    # and it is the true gradient: one step by hand
    fresh = build(sgd(), batches=masked)
    inputs, targets = masked(0, 12)
    F.cross_entropy(fresh.model(inputs).flatten(0, 1), targets.flatten()).backward()
    rate = sgd().learning_rate * sgd().learning_rate_factor(0)
    by_hand = {
        name: (p - rate * (p.grad + (0.1 * p.detach() if p.dim() > 1 else 0))).detach()
        for name, p in fresh.model.named_parameters()
    }
    optimizer_step(fresh, masked(0, 12))
    for name, p in fresh.model.named_parameters():
        torch.testing.assert_close(p.detach(), by_hand[name], rtol=1e-9, atol=1e-12)


def test_clipping_bounds_the_norm():
    run = replace(sgd(), clip=0.01, weight_decay=0.0)
    state = build(run)
    before = weights(state)
    record = next(train(state, 1))
    assert record.grad_norm > 0.01
    moved = (weights(state) - before).norm().item()
    assert moved == pytest.approx(0.01 * record.learning_rate, rel=1e-4)


def test_learning_rates_used():
    run = replace(RUN, total_steps=10, warmup_steps=2, learning_rate=1.0)
    rates = [r.learning_rate for r in train(build(run), 12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10] == rates[11] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[2:], rates[3:], strict=False))


def test_gradients_agree_with_finite_differences():
    state = build(sgd())
    batch = state.batches(0, 4)
    loss = state.loss(state.model, batch)
    loss.backward()
    generator = torch.Generator().manual_seed(1)
    for parameter in state.model.parameters():
        flat, grad = parameter.detach().view(-1), parameter.grad.view(-1)
        i = int(torch.randint(len(flat), (), generator=generator))
        kept, h = flat[i].item(), 1e-6
        flat[i] = kept + h
        up = state.loss(state.model, batch).item()
        flat[i] = kept - h
        down = state.loss(state.model, batch).item()
        flat[i] = kept
        assert (up - down) / (2 * h) == pytest.approx(grad[i].item(), rel=1e-4, abs=1e-6)


def test_bf16_computes_in_bf16_over_float32_parameters():
    seen = set()
    state = build(RUN, Execution(precision="bf16"))
    state.model.blocks[0].feed_forward.down.register_forward_hook(
        lambda module, inputs, output: seen.add(output.dtype)
    )
    record = next(train(state, 1))
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in state.model.parameters()} == {torch.float32}
    assert math.isfinite(record.loss)


def test_dropout_trains_and_evaluation_does_not_drop():
    assert evaluate(build(DROPOUT), samples=6) == evaluate(build(RUN), samples=6)
    kept, _ = losses(RUN, steps=1)
    dropped, _ = losses(DROPOUT, steps=1)
    assert kept != dropped


def test_it_learns():
    out, state = losses(replace(RUN, learning_rate=3e-3), steps=40)
    assert sum(out[-5:]) / 5 < 0.75 * out[0]
    assert evaluate(state, samples=24) < 0.8 * math.log(256)


# --- evaluate -----------------------------------------------------------------------------


def norm_net():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    net[1].eval()
    return net


def _flags(net):
    return net.training, net[0].training, net[1].training, net[2].training


def net_state(held_out=None):
    def batches(first, count):
        return torch.ones(count, 2), torch.zeros(count, dtype=torch.int64)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return build(
        replace(RUN, global_batch=4),
        model=norm_net,
        batches=batches,
        loss=loss,
        held_out=held_out or batches,
    )


def test_evaluate_puts_every_flag_back():
    """T04: a frozen BatchNorm stays frozen, the rest trains again."""
    state = net_state()
    mean = state.model[1].running_mean.clone()
    evaluate(state, samples=8)
    assert _flags(state.model) == (True, True, False, True)
    assert torch.equal(state.model[1].running_mean, mean)


def test_evaluate_puts_every_flag_back_when_it_raises():
    """T04, with a loader that fails on its second batch."""

    def failing(first, count):
        if first > 0:
            raise OSError("disk gone")
        return torch.ones(count, 2), torch.zeros(count, dtype=torch.int64)

    state = net_state(held_out=failing)
    with pytest.raises(OSError, match="disk gone"):
        evaluate(state, samples=8)
    assert _flags(state.model) == (True, True, False, True)
    assert torch.is_grad_enabled()


def test_training_leaves_a_frozen_batch_norm_frozen():
    """T04: the loop's own train() must not wake it; a model left in eval mode does train."""
    state = net_state()
    mean = state.model[1].running_mean.clone()
    list(train(state, 2))
    assert _flags(state.model) == (True, True, False, True)
    assert torch.equal(state.model[1].running_mean, mean)
    state.model.eval()
    list(train(state, 1))
    assert state.model[2].training


def test_evaluate_counts_every_sample_once():
    """The short last batch counts as what it is (T05's kind)."""
    seen = []

    def held_out(first, count):
        seen.extend(range(first, first + count))
        values = torch.arange(first, first + count, dtype=torch.float32)
        return values[:, None].repeat(1, 2), torch.zeros(count, dtype=torch.int64)

    state = net_state(held_out=held_out)
    state.loss = lambda model, batch: batch[0][:, 0].sum()
    assert evaluate(state, samples=10) == pytest.approx(4.5)
    assert seen == list(range(10))


def test_evaluate_needs_held_out_batches_and_samples():
    state = net_state()
    with pytest.raises(ValueError, match="samples is 0"):
        evaluate(state, samples=0)
    state.held_out = None
    with pytest.raises(ValueError, match="no held-out batches"):
        evaluate(state)


# --- the record ---------------------------------------------------------------------------


def _live_tensors():
    gc.collect()
    return sum(torch.is_tensor(o) for o in gc.get_objects())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_history_is_plain_numbers_and_keeps_no_graph():
    """T06: 20 or 120 steps leave as many live tensors."""
    counts = []
    for steps in (20, 120):
        state = net_state()
        history = [record.row() for record in train(state, steps)]
        assert json.loads(json.dumps(history))[-1]["step"] == steps
        assert not any(torch.is_tensor(v) for row in history for v in row.values())
        counts.append(_live_tensors())
        del state
    assert abs(counts[1] - counts[0]) < 10


def test_records_that_are_kept_hold_no_graph():
    """T06: what a record holds is detached, so a list of records is small."""
    state = build(RUN)
    records = list(train(state, 3))
    assert not any(record._loss_sum.requires_grad for record in records)
    assert not any(record._grad_norm.requires_grad for record in records)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves, so that speeds are exact."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def timed_state(clock, seconds):
    plain, waits = build(RUN).batches, iter(seconds)

    def batches(first, count):
        clock[0] += next(waits)
        return plain(first, count)

    return build(RUN, batches=batches)


def test_speed_leaves_out_the_callers_time(clock):
    for record in train(timed_state(clock, [0.25, 0.5, 0.25, 0.5]), 4):
        clock[0] += 1000.0 * record.step
    assert record.step_seconds == pytest.approx(0.375)
    assert record.tokens == 12 * 32
    assert record.tokens_per_second == pytest.approx(12 * 32 / 0.375)


def test_speed_window_is_closed_by_reading(clock):
    steps = train(timed_state(clock, [8.0, 0.25, 0.5, 0.75]), 4)
    first = next(steps)
    assert first.step_seconds == first.step_seconds == pytest.approx(8.0)
    *_, record = steps
    assert record.step_seconds == pytest.approx(0.5)


# --- errors -------------------------------------------------------------------------------


def test_non_finite_loss_names_the_step_and_spares_the_weights():
    state = build(RUN)
    steps = train(state, 10)
    next(steps), next(steps)
    before = weights(state)
    with torch.no_grad():
        state.model.norm.weight[0] = math.nan
    with pytest.raises(NonFiniteLoss, match=r"step 3: the loss is nan"):
        next(steps)
    kept = weights(state)
    assert (kept == before).sum() == len(before) - 1
    assert state.position == 24


@pytest.mark.parametrize("steps", [-1, 2.5, "3"])
def test_wrong_steps_raise_at_the_call(steps):
    with pytest.raises(ValueError, match="steps is"):
        train(build(RUN), steps)


def test_zero_steps_is_no_step():
    assert list(train(build(RUN), 0)) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": norm_net()}, "give a function that makes it"),
        ({"model": lambda: 3}, r"model\(\) returned int"),
        ({"model": nn.ReLU}, "nothing to train"),
    ],
)
def test_wrong_model(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(RUN, **kwargs)


def test_batch_that_cannot_be_counted():
    state = build(RUN, batches=lambda first, count: {"x": torch.zeros(count, 32)})
    with pytest.raises(ValueError, match="count=your_function"):
        next(train(state, 1))


def test_batch_without_any_target():
    def batches(first, count):
        return torch.zeros(count, 8, dtype=torch.int64), torch.full((count, 8), -100)

    with pytest.raises(ValueError, match="step 1: no target"):
        next(train(build(RUN, batches=batches), 1))


def test_a_batch_shorter_than_asked_for_is_not_averaged_over_samples_that_are_not_there():
    """A known count holds for full batches only; a slice past the end of the data is short."""
    x, y = torch.ones(10, 2), torch.zeros(10, dtype=torch.int64)

    def batches(first, count):
        return x[first : first + count], y[first : first + count]

    run = replace(RUN, global_batch=4)
    state = build(run, model=norm_net, batches=batches, loss=net_state().loss, count=1)
    with pytest.raises(ValueError, match=r"batches\(8, 4\) gave 2 samples"):
        list(train(state, 3))
    assert state.step == 2


def test_a_count_that_is_a_tensor_leaves_plain_numbers():
    """T06: ``(targets != -100).sum()`` is what one writes."""
    state = net_state()
    state.count = lambda batch: (batch[1] != -100).sum()
    rows = [record.row() for record in train(state, 2)]
    assert json.loads(json.dumps(rows)) == rows
    assert isinstance(evaluate(state, samples=8), float)
    state.count = lambda batch: 2.5
    with pytest.raises(TypeError, match=r"the count is 2\.5"):
        next(train(state, 1))


def test_named_tuples_are_batches():
    Pair = namedtuple("Pair", "x y")

    def batches(first, count):
        return Pair(torch.ones(count, 2), torch.zeros(count, dtype=torch.int64))

    def loss(model, batch):
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum")

    run = replace(RUN, global_batch=4)
    how = Execution(micro_batch=3)
    state = build(run, how, model=norm_net, batches=batches, loss=loss, held_out=batches)
    assert len(list(train(state, 2))) == 2
    assert math.isfinite(evaluate(state, samples=8))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batches": torch.utils.data.DataLoader([1, 2])}, "batches is a DataLoader: give a func"),
        ({"held_out": [1, 2]}, "held_out is a list"),
        ({"loss": 3}, "loss is a int"),
        ({"count": 1.5}, "count is 1.5"),
    ],
)
def test_arguments_of_build_that_are_no_functions(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(RUN, **kwargs)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: None, "is NoneType"),
        (lambda model, batch: 3.0, "is float"),
        (lambda model, batch: model(batch[0])[:, 0, 0], r"is a tensor of shape \(12,\)"),
        (lambda model, batch: model(batch[0]).sum().detach(), "cut off from the weights"),
    ],
)
def test_wrong_loss(loss, message):
    with pytest.raises(ValueError, match=message):
        next(train(build(RUN, loss=loss), 1))


def test_batches_that_end():
    iterator = iter([])
    with pytest.raises(ValueError, match="not an iterator"):
        next(train(build(RUN, batches=lambda first, count: next(iterator)), 1))


def test_evaluation_of_ruined_weights_is_an_error():
    state = build(RUN)
    with torch.no_grad():
        state.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLoss, match="the loss is nan"):
        evaluate(state, samples=4)


def test_count_as_a_number():
    """Where every sample has as many targets, nobody need look at them."""
    plain, a = losses(sgd(), steps=2)
    known, b = losses(sgd(), steps=2, batches=lambda f, n: build(sgd()).batches(f, n), count=32)
    assert plain == known
    assert torch.equal(weights(a), weights(b))
    with pytest.raises(ValueError, match="count is 0"):
        build(RUN, count=0)


def test_a_step_on_its_own_has_no_speed():
    state = build(RUN)
    record = optimizer_step(state, state.batches(0, 12))
    assert record.loss == losses(steps=1)[0][0]
    with pytest.raises(ValueError, match="no speed"):
        _ = record.step_seconds


def test_micro_batches_of_nested_batches():
    batch = {"x": torch.arange(7), "pair": (torch.arange(7) * 2, [torch.arange(7)]), "name": "a"}
    pieces = micro_batches(batch, Execution(micro_batch=3))
    assert [len(piece["x"]) for piece in pieces] == [2, 2, 3]
    assert torch.equal(torch.cat([p["pair"][0] for p in pieces]), batch["pair"][0])
    assert pieces[0]["name"] == "a"
    with pytest.raises(ValueError, match="a batch holds str"):
        micro_batches("text", Execution(micro_batch=3))


def test_count_targets():
    assert count_targets((torch.zeros(2, 3), torch.tensor([[1, -100, 2], [-100, -100, 0]]))) == 3


# --- foreign models -----------------------------------------------------------------------


def test_foreign_example_trains():
    path = Path(__file__).parent.parent / "examples" / "foreign_model.py"
    assert len(path.read_text().splitlines()) <= 55
    names = runpy.run_path(str(path))
    assert evaluate(names["state"]) < 0.35 < math.log(2)


# --- stopping -----------------------------------------------------------------------------


def test_signals_only_set_a_flag_between_steps():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        state = build(RUN)
        with stop_requested() as stop:
            for record in train(state, 50):
                if record.step == 2:
                    os.kill(os.getpid(), number)
                if stop:
                    break
        assert stop.signal == number
        assert state.step == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_second_signal_gets_out_of_a_step_that_hangs(number, error):
    with pytest.raises(error) as raised, stop_requested() as stop:
        os.kill(os.getpid(), number)
        while not stop:
            pass
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert getattr(raised.value, "code", 143) == 143


def test_stop_outside_the_main_thread():
    got = []

    def work():
        with stop_requested() as stop:
            stop.request()
            got.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert got == [True] and not Stop()


def test_interrupt_never_splits_an_update():
    """An interrupt that arrives inside the update is raised after it."""
    state = build(RUN)
    real = state.optimizer.step

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    state.optimizer.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(train(state, 3))
    state.optimizer.step = real
    assert state.position == 12
    assert [r.loss for r in train(state, 2)] == losses(steps=3)[0][1:]


def test_suspended_generator_owns_nothing():
    threads, handler = threading.active_count(), signal.getsignal(signal.SIGINT)
    generator = train(build(RUN), 5)
    next(generator)
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGINT) is handler
    generator.close()


def test_sigterm_ends_the_command_with_143():
    command = [sys.executable, "-u", "-m", "companion", "train", "--steps", "5000"]
    process = subprocess.Popen([*command, "--log-every", "1"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(60) == 143
    assert "stopped by SIGTERM after step" in rest
