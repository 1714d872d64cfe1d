"""The checks of notebook 01. Each runs the learner's code on a small case with a known answer."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from companion import corpus as corpora
from companion.classroom.checks import Hint, check, need_function
from companion.classroom.checks.loops import loop_a, loop_b, loop_c, loop_d, loop_e
from companion.corpus import Windows
from companion.loop import build, optimizer_step
from companion.state import Execution, RunConfig

__all__ = [
    "accumulate",
    "bigram",
    "evaluate",
    "loop_a",
    "loop_b",
    "loop_c",
    "loop_d",
    "loop_e",
    "own_model",
    "throughput",
]


@check
def throughput(answer: Any) -> str:
    """``tokens_per_second(seconds, tokens, warmup)``."""
    need_function(answer)
    seconds, tokens = [5.0, 0.1, 0.2, 0.1], [4, 4, 4, 2]
    got = answer(seconds, tokens, 1)
    if not isinstance(got, int | float):
        raise Hint(f"return one number; this is {type(got).__name__}")
    mistakes = [
        (
            14 / 5.4,
            "the warm-up step is counted in: leave out the first `warmup` steps of both lists",
        ),
        (12 / 0.4, "the short last batch is counted as a full one: add up the tokens really seen"),
        (14 / 0.4, "you left the warm-up out of the seconds and not out of the tokens"),
        (10 / 5.4, "you left the warm-up out of the tokens and not out of the seconds"),
        (
            (40 + 20 + 20) / 3,
            "that is the mean of each step's speed, in which a short step weighs as much as a "
            "long one: divide all tokens by all seconds",
        ),
        (0.4 / 10, "upside down: that is seconds per token"),
    ]
    for value, hint in mistakes:
        if math.isclose(got, value, rel_tol=1e-6):
            raise Hint(hint)
    if not math.isclose(got, 25.0, rel_tol=1e-6):
        raise Hint(f"seconds {seconds}, tokens {tokens}, warm-up 1 make 25 tokens/s, not {got:.4g}")
    if not math.isclose(answer([1.0, 1.0, 2.0], [6, 6, 6], 0), 4.5, rel_tol=1e-6):
        raise Hint("with a warm-up of 0 every step counts: 18 tokens in 4 s are 4.5 tokens/s")
    try:
        nothing = answer([5.0], [4], 1)
    except ValueError:
        return "25 tokens/s, and a run that is all warm-up is refused, not reported"
    except ZeroDivisionError:
        nothing = "a ZeroDivisionError"
    raise Hint(
        f"one step timed, one step of warm-up: nothing is left, and you answer {nothing}. "
        "Raise a ValueError that says so"
    )


class _Stop(Exception):
    pass


@check
def evaluate(answer: Any) -> str:
    """``evaluate(model, batches)``: mean loss per sample, every flag as before."""
    need_function(answer)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model.train()
    model[1].eval()  # frozen, as in fine-tuning
    batches = [(torch.randn(n, 2), torch.randint(2, (n,))) for n in (8, 8, 2)]
    still = copy.deepcopy(model).eval()
    with torch.no_grad():
        sums = [F.cross_entropy(still(x), y, reduction="sum").item() for x, y in batches]
    right, mean_of_means = (
        sum(sums) / 18,
        sum(s / n for s, n in zip(sums, (8, 8, 2), strict=True)) / 3,
    )
    flags = [m.training for m in model.modules()]
    seen: list[tuple[bool, bool]] = []
    hook = model[2].register_forward_hook(
        lambda m, args, out: seen.append((m.training, torch.is_grad_enabled()))
    )
    got = answer(model, batches)
    hook.remove()
    after = [m.training for m in model.modules()]
    if any(training for training, _ in seen):
        raise Hint("dropout was on while you evaluated: set the model to eval mode first")
    if after != flags:
        _flags_hint(after, "")
    if any(grad for _, grad in seen):
        raise Hint("a graph was built for a loss that nobody will differentiate: torch.no_grad()")
    if isinstance(got, Tensor):
        got = got.item()
    if not isinstance(got, float):
        raise Hint(f"return the mean loss as a number, not {type(got).__name__}")
    if math.isclose(got, mean_of_means, rel_tol=1e-5):
        raise Hint(
            "the mean of the batch means: the last batch has 2 samples and weighs as much as one "
            "of 8. Add up sums, and divide by 18 samples at the end"
        )
    if not math.isclose(got, right, rel_tol=1e-5):
        raise Hint(f"the mean loss over the 18 samples is {right:.4f}, you return {got:.4f}")

    def torn() -> Iterator[tuple[Tensor, Tensor]]:
        yield batches[0]
        raise _Stop

    try:
        answer(model, torn())
    except _Stop:
        pass
    else:
        raise Hint("the loader raised an error and you swallowed it: let it go on to the caller")
    after = [m.training for m in model.modules()]
    if after != flags:
        _flags_hint(after, "when the loader raises an error half-way, ")
    return "every flag is as it was, also when the loader breaks half-way"


def _flags_hint(after: list[bool], when: str) -> None:
    if not any(after):
        what = "the model stays in eval mode: put the flags back"
        what += " in a finally block" if when else " before you return"
    else:
        what = (
            "model.train() also wakes the BatchNorm that was frozen on purpose: remember each "
            "module's .training and put exactly that back"
        )
    raise Hint(when + what)


@check
def accumulate(answer: Any) -> str:
    """``accumulate(model, pieces)``: the full batch's gradient from its pieces."""
    need_function(answer)
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    inputs, targets = torch.randn(9, 4), torch.randint(5, (9,))
    targets[[1, 2, 3, 7]] = -100
    pieces = [(inputs[a:b], targets[a:b]) for a, b in ((0, 4), (4, 7), (7, 9))]
    counts = [int((y != -100).sum()) for _, y in pieces]

    def gradient(*scales: float) -> Tensor:
        model.zero_grad()
        for (x, y), scale in zip(pieces, scales, strict=True):
            (F.cross_entropy(model(x), y, reduction="sum") * scale).backward()
        return model.weight.grad.clone()  # type: ignore[union-attr]

    total = sum(counts)
    right = gradient(*[1 / total] * 3)
    mistakes = [
        (
            gradient(*[1 / (3 * n) for n in counts]),
            "every piece weighs a third, though they hold 1, 3 and 1 targets: divide each "
            "piece's *sum* by the targets of the whole batch",
        ),
        (
            gradient(*[1 / n for n in counts]),
            "three means added up: the gradient is about three times too large. Divide each "
            "piece's *sum* by the targets of the whole batch",
        ),
        (
            gradient(1, 1, 1),
            "the sum over the batch is right; its mean also divides by the targets",
        ),
        (
            gradient(*[1 / 9] * 3),
            "you divide by all 9 targets; the 4 that are -100 carry no loss and do not count",
        ),
        (
            gradient(0, 0, 1 / total),
            "only the last piece is left: the gradients are cleared between the pieces",
        ),
        (
            gradient(0, 0, 1 / counts[2]),
            "only the last piece is left, and divided by its own targets",
        ),
    ]
    model.zero_grad()
    answer(model, pieces)
    got = model.weight.grad
    if got is None or not got.any():
        raise Hint("there is no gradient in model.weight.grad: call backward() for each piece")
    if torch.allclose(got, right, atol=1e-6):
        return "one gradient, whatever the cut; companion.loop.optimizer_step does the same"
    for value, hint in mistakes:
        if torch.allclose(got, value, atol=1e-6):
            raise Hint(hint)
    ratio = (got.norm() / right.norm()).item()
    raise Hint(
        f"the gradient's norm is {ratio:.3g} times that of the full batch, or it points elsewhere"
    )


@check
def bigram(answer: Any) -> str:
    """``bigram_loss(train, held_out)``: held-out nats per byte of a table of byte pairs."""
    need_function(answer)
    text = b"the cat sat on the mat; the rat ate that oat. " * 40
    train = np.frombuffer(text[:1500], dtype=np.uint8)
    held = np.frombuffer(text[1500:] + b"at the end a bat", dtype=np.uint8)
    got = answer(train, held)
    if isinstance(got, Tensor | np.generic):
        got = got.item()
    if not isinstance(got, float):
        raise Hint(f"return the loss as a number, not {type(got).__name__}")
    count = np.zeros((256, 256))
    np.add.at(count, (train[:-1], train[1:]), 1)
    counted = np.zeros((256, 256))
    np.add.at(counted, (held[:-1], held[1:]), 1)
    seen = counted.sum()

    def loss(table: np.ndarray) -> float:
        return float(-(counted * np.log(table)).sum() / seen)

    smooth, own = count + 1, counted + 1
    right = loss(smooth / smooth.sum(1, keepdims=True))
    single = np.bincount(train, minlength=256) + 1.0
    if math.isclose(got, right, rel_tol=1e-6):
        return f"{right:.3f} nats on the check's text; try it on text.train and text.held_out too"
    if not math.isfinite(got):
        raise Hint(
            f"the loss is {got}: a pair that the training text never had got probability 0. "
            "Start every count at one"
        )
    mistakes = [
        (right / math.log(2), "that is in bits: use the natural logarithm for nats"),
        (-right, "the sign: a loss is *minus* the mean log-probability"),
        (right * seen, "that is the sum over the held-out bytes: divide by the number of pairs"),
        (loss(smooth / smooth.sum()), "that is the loss of a *pair*: divide each row of counts by "
                                      "its own sum, to get the next byte given this one"),
        (loss(smooth / smooth.sum(0, keepdims=True)), "you divide by the sum of each column: the "
                                      "probability of the byte *before*; divide by the row's sum"),
        (loss(own / own.sum(1, keepdims=True)), "you count the held-out text itself, so the table "
                                      "has seen the answers: count the training text only"),
        (loss(np.broadcast_to(single / single.sum(), (256, 256))), "that is the unigram: it does "
                                      "not look at the byte before"),
    ]  # fmt: skip
    for value, hint in mistakes:
        if math.isclose(got, value, rel_tol=1e-6):
            raise Hint(hint)
    raise Hint(f"on the check's small text the answer is {right:.4f}, yours is {got:.4f}")


@check
def own_model(answer: Any, steps: int = 120) -> str:
    """``make_model()``: a model of the learner's own, trained by the same loop."""
    if isinstance(answer, nn.Module):
        raise Hint(
            "this is a model, not a function that makes one: a second run would start from the "
            "weights that the first one trained. Pass make_model"
        )
    need_function(answer)
    run = RunConfig(sequence=32, global_batch=4, total_steps=steps, warmup_steps=5,
                    learning_rate=1e-2, weight_decay=0.0)  # fmt: skip
    text = corpora.prepare().train[: 2**15]
    windows = Windows(text, run.sequence)
    batch = windows(0, run.global_batch)

    def fresh() -> Any:
        return build(run, Execution(device="cpu"), model=answer, batches=windows)

    state = fresh()
    logits = state.model(batch[0])
    if not isinstance(logits, Tensor) or logits.shape != (4, 32, 256):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Hint(f"bytes [4, 32] must give logits [4, 32, 256], not {shape}")
    again = fresh()
    pairs = zip(state.model.parameters(), again.model.parameters(), strict=True)
    if not all(torch.equal(p, q) for p, q in pairs) or state.model is again.model:
        raise Hint(
            "two calls give the same or different weights where they should give equal new "
            "ones: make the whole model inside make_model, and seed nothing yourself"
        )
    changed = batch[0].clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    state.model.eval()
    with torch.no_grad():
        early, late = state.model(batch[0])[:, :20], state.model(changed)[:, :20]
    if not torch.allclose(early, late, atol=1e-5):
        raise Hint(
            "it looks ahead: bytes from position 20 on change what it says before position 20. "
            "The next byte is what it must predict, so it may not see it"
        )
    losses = _losses(state, batch, steps)
    dead = [name for name, p in state.model.named_parameters() if p.grad is None]
    if dead:
        raise Hint(f"no gradient reaches {dead[0]}: is it unused, or cut off by detach()?")
    if losses[-1] > 1.5:
        raise Hint(
            f"after {steps} steps on one and the same batch the loss is {losses[-1]:.2f}; below "
            "1.5 you may call it learnt. Too small, a softmax at the end, or no context?"
        )
    return (
        f"your model took one batch from {losses[0]:.2f} to {losses[-1]:.3f} nats, in the same loop"
    )


def _losses(state: Any, batch: Any, steps: int) -> Sequence[float]:
    state.compute.train()
    return [optimizer_step(state, batch).loss for _ in range(steps)]
