"""What several ranks share, on one process and on two real ones."""

import pytest
import torch

from companion import parallel
from companion.state import Execution

TWO_RANKS = """
import sys, torch
from dataclasses import replace
from companion import parallel
from companion.launch import report
from companion.loop import build, evaluate, train
from companion.model import ModelConfig
from companion.state import Execution, RunConfig

torch.set_num_threads(1)
MODEL = ModelConfig(context=32, layers=2, width=32, heads=4, kv_heads=2, hidden=48)
RUN = RunConfig(model=MODEL, sequence=32, global_batch=5, total_steps=9, optimizer="sgd",
                dtype="float64", clip=0.5, learning_rate=0.5, warmup_steps=0)
how = Execution(device="cpu", strategy=sys.argv[1], micro_batch=2)
with parallel.session(how) as mesh:
    state = build(RUN, how, mesh)
    losses = [record.loss for record in train(state, 3)]
    # rank 1 leaves after one more step; the other must stop there too
    for record in train(state, 5):
        if mesh.rank == mesh.world - 1:
            break
    report(losses=losses, held_out=evaluate(state, samples=7), position=state.position,
           weights=float(sum(p.double().abs().sum() for p in state.model.parameters())))
"""


def test_share_covers_everything_once():
    for count in range(4, 20):
        bounds = [parallel.share(count, rank, 4) for rank in range(4)]
        assert [low for low, _ in bounds[1:]] == [high for _, high in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][1]) == (0, count)
        sizes = {high - low for low, high in bounds}
        assert max(sizes) - min(sizes) <= 1


def test_more_ranks_than_samples_is_refused():
    with pytest.raises(ValueError, match="4 ranks cannot share a batch of 3"):
        parallel.share(3, 0, 4)


def test_one_process_needs_no_group():
    with parallel.session(Execution(device="cpu")) as mesh:
        assert (mesh.rank, mesh.world, mesh.device.type) == (0, 1, "cpu")
        assert not torch.distributed.is_initialized()
        assert parallel.total(7, mesh) == 7
        assert parallel.any_rank(True, mesh) and not parallel.any_rank(False, mesh)


def test_strategy_must_fit_the_ranks(monkeypatch):
    with pytest.raises(ValueError, match="needs several ranks and there is one"):
        with parallel.session(Execution(strategy="ddp", device="cpu")):
            pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="add --strategy ddp"):
        with parallel.session(Execution(device="cpu")):
            pass


def test_two_ranks_equal_one_process_and_a_break_ends_both(tmp_path):
    """Sum for mean, a wrong share or a lost micro-batch would show here (S2, T30)."""
    from companion.launch import torchrun

    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    # uneven shares on purpose: 5 samples are 2 + 3
    two = torchrun(script, "ddp", nproc=2, timeout=120).metrics
    one = torchrun(script, "none", nproc=1, timeout=120).metrics
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["position"] == two[1]["position"] == one[0]["position"] == 20
    for key in ("losses", "held_out", "weights"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-9)
