"""recompiles() and count_recompiles(): graphs, guards, the limit (T10, T11, S6, S9, S10)."""

import html
import logging

import pytest
import torch
from torch import nn

from companion.recompiles import count_recompiles, recompiles


def wave(x):
    return x.sin() + 1


def lengths(*numbers):
    return [torch.ones(n) for n in numbers]


def test_t10_the_limit_is_reached_and_said():
    seen = count_recompiles(wave, lengths(*range(1, 21)), dynamic=False)
    assert seen.graphs == 8
    assert seen.limit_hit
    assert seen.calls == [1, 2, 3, 4, 5, 6, 7] + 13 * [8]
    assert len(seen.recompiles) == 7  # the first graph is none, the ninth was refused
    assert "wave" in seen.limits[0] and "recompile_limit = 8" in seen.limits[0]
    assert "new inputs run eagerly" in str(seen)
    assert "new inputs run eagerly" in seen._repr_html_()


def test_t10_strict_raises():
    with pytest.raises(RuntimeError, match=r"wave .* reached recompile_limit = 8"):
        count_recompiles(wave, lengths(*range(1, 21)), dynamic=False, strict=True)
    seen = count_recompiles(wave, lengths(*range(1, 9)), dynamic=False, strict=True)
    assert (seen.graphs, seen.limit_hit) == (8, False)


@pytest.mark.parametrize("last", [2, 1])
def test_t11_the_short_last_batch_is_one_more_graph(last):
    batches = [torch.ones(n, 3) for n in (4, 4, last, 4, 4, last)]
    assert count_recompiles(nn.Linear(3, 1), batches).calls == [1, 1, 2, 2, 2, 2]
    full = [torch.ones(4, 3) for _ in range(4)]
    assert count_recompiles(nn.Linear(3, 1), full).calls == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("dynamic", "graphs"), [(None, [1, 2, 2, 2]), (True, [1, 1, 1, 1]), (False, [1, 2, 3, 4])]
)
def test_dynamic_settings(dynamic, graphs):
    seen = count_recompiles(wave, lengths(5, 6, 7, 9), dynamic=dynamic)
    assert seen.calls == graphs
    assert not seen.limit_hit


def test_mark_dynamic():
    inputs = lengths(5, 6, 7)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    assert count_recompiles(wave, inputs).calls == [1, 1, 1]


def test_one_count_does_not_change_the_next():
    torch.compile(wave, backend="eager")(torch.ones(8))  # so that there is a memory of sizes
    first = count_recompiles(wave, lengths(5, 6, 7))
    again = count_recompiles(wave, lengths(5, 6, 7))
    assert first.calls == again.calls == [1, 2, 2]
    linear = [count_recompiles(nn.Linear(3, 1), [torch.ones(n, 3)]).calls for n in (2, 3, 4)]
    assert linear == [[1]] * 3


def test_the_guard_that_failed():
    found = count_recompiles(wave, lengths(3, 4)).recompiles[0]
    assert found.function == "wave"
    assert found.place == f"test_compiling_recompiles.py:{wave.__code__.co_firstlineno}"
    assert "size mismatch at index 0. expected 3, actual 4" in found.guard


def test_an_attribute_that_changes_with_each_call():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    seen = count_recompiles(Counts(), [torch.ones(3)] * 4)
    assert seen.calls == [1, 2, 3, 4]
    assert "calls == 2" in seen.recompiles[-1].guard


def test_several_arguments():
    seen = count_recompiles(lambda a, b: a + b, [(torch.ones(3), torch.ones(3))] * 2)
    assert seen.calls == [1, 1]


def test_not_callable():
    with pytest.raises(TypeError, match="takes a function or a module, not Tensor"):
        count_recompiles(torch.ones(1), [])


def test_watching_what_runs_anyway():
    def local(x):
        return x.cos() + 2

    compiled = torch.compile(local, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    with recompiles() as seen:
        compiled(torch.ones(3))
        assert seen.graphs == 0
        compiled(torch.ones(4))
        assert seen.graphs == 1
    compiled(torch.ones(5))  # after it: not counted
    assert seen.graphs == 1
    assert [found.function for found in seen.recompiles] == ["local"]
    assert html.escape(seen.recompiles[0].guard) in seen._repr_html_()
    assert "1 graph, 1 recompile" in str(seen)


def test_strict_watching():
    def local(x):
        return x.cos() + 2

    compiled = torch.compile(local, backend="eager", dynamic=False)
    with pytest.raises(RuntimeError, match="local"), recompiles(strict=True):
        for x in lengths(*range(2, 20)):
            compiled(x)


def test_only_the_limit_s_log_line_gets_out(capfd):
    def local(x):
        return x.cos() + 3

    compiled = torch.compile(local, backend="eager", dynamic=False)
    log = logging.getLogger("torch._dynamo.guards.__recompiles")
    before = log.level, log.propagate, log.handlers[:]
    with recompiles() as seen:
        for x in lengths(*range(2, 12)):
            compiled(x)
    assert seen.limit_hit
    assert "[__recompiles]" not in "".join(capfd.readouterr())
    assert (log.level, log.propagate, log.handlers[:]) == before
    count_recompiles(wave, lengths(*range(1, 12)), dynamic=False)
    assert capfd.readouterr() == ("", "")


def test_s10_switching_train_and_eval_compiles_twice_in_all():
    drop = nn.Dropout(0.5)

    def switched(x):
        return drop(x)

    compiled = torch.compile(switched, backend="eager")
    with recompiles() as seen:
        for _ in range(3):
            drop.train()
            compiled(torch.ones(3))
            drop.eval()
            assert torch.equal(compiled(torch.ones(3)), torch.ones(3))
    assert seen.graphs == 2
    assert "training" in seen.recompiles[0].guard


def test_s6_a_hook_added_after_the_first_call():
    class Own(nn.Module):
        def forward(self, x):
            return x + 1

    def hits(add_before: bool) -> int:
        model, count = Own(), []
        compiled = torch.compile(model, backend="eager")
        if not add_before:
            compiled(torch.ones(3))
        model.register_forward_hook(lambda *_: count.append(1))
        compiled(torch.ones(3))
        return len(count)

    assert hits(add_before=True) == 1
    # the trap: with this torch it is not called, and nothing says so
    assert hits(add_before=False) in (0, 1)


def test_s9_a_learning_rate_in_a_tensor_does_not_recompile():
    def graphs(lr):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=lr)

        @torch.compile(backend="eager")
        def step():
            optimizer.step()

        weight.grad = torch.ones(3)
        with recompiles() as seen:
            for factor in (1.0, 0.5, 0.25, 0.125):
                rate = optimizer.param_groups[0]
                if isinstance(rate["lr"], torch.Tensor):
                    rate["lr"].fill_(0.1 * factor)
                else:
                    rate["lr"] = 0.1 * factor
                step()
        return len(seen.recompiles)

    assert graphs(torch.tensor(0.1)) == 0
    assert graphs(0.1) >= 1
