"""The checks of exercise 1 of notebook 01: five loops with a fault.

Where a mistake can be told by its result, the mistake is here as code too: an answer that
gives the same numbers gets that mistake's hint.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from companion.classroom.checks import OPEN, Hint, Verdict, check, faults, need_function, unchanged


def _handed_out(original: Callable[..., Any]) -> Callable[[Callable[..., str]], Any]:
    """A check that reads "not attempted" while the answer is still the loop handed out."""

    def decorate(judge: Callable[..., str]) -> Callable[[Any], Verdict]:
        checked = check(judge)

        def either(answer: Any) -> Verdict:
            return Verdict(OPEN, "") if unchanged(answer, original) else checked(answer)

        either.__name__, either.__doc__ = judge.__name__, judge.__doc__
        return either

    return decorate


def _problem() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(5)]
    return model, optimizer, batches


Loss = Callable[[Tensor, Tensor], Tensor]


def _run(
    loss_of: Loss = F.cross_entropy, when: str = "each", momentum: float = 0.9
) -> tuple[list[float], Tensor]:
    """Losses and weights of the right loop or, by its arguments, of a known mistake."""
    model, optimizer, batches = _problem()
    optimizer.param_groups[0]["momentum"] = momentum
    losses = []
    for inputs, targets in batches:
        if when == "each":
            optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if when != "before the step":
            optimizer.step()
        losses.append(loss.item())
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def _same(a: tuple[Any, Tensor], b: tuple[Any, Tensor]) -> bool:
    losses = torch.allclose(torch.tensor(a[0]), torch.tensor(b[0]), atol=1e-5)
    return losses and torch.allclose(a[1], b[1], atol=1e-5)


def _judge_loop(answer: Any, mistakes: list[tuple[tuple[Any, Tensor], str]]) -> None:
    """
    Raises:
        Hint: the answer's losses or weights are not those of the right loop.
    """
    need_function(answer)
    model, optimizer, batches = _problem()
    losses = answer(model, optimizer, batches)
    if not isinstance(losses, list) or len(losses) != len(batches):
        raise Hint(f"return the list of the {len(batches)} losses, one for each batch")
    if any(isinstance(loss, Tensor) for loss in losses):
        raise Hint(
            "the losses are tensors, and each keeps its autograd graph in memory; "
            "append loss.item()"
        )
    right = _run()
    got = losses, nn.utils.parameters_to_vector(model.parameters()).detach()
    if _same(got, right):
        return
    for outcome, hint in mistakes:
        if _same(got, outcome):
            raise Hint(hint)
    if not any(
        math.isclose(a, b, abs_tol=1e-5) for a, b in zip(losses[:1], right[0], strict=False)
    ):
        raise Hint(
            f"the first loss is {losses[0]:.4f} and should be {right[0][0]:.4f}, before any step: "
            "look at how the loss is computed"
        )
    step = next(
        (i for i, (a, b) in enumerate(zip(*(losses, right[0]), strict=True)) if abs(a - b) > 1e-5),
        len(losses),
    )
    raise Hint(
        f"the first {step} losses are right and what follows is not: look at what an update "
        "leaves behind for the next one"
    )


@_handed_out(faults.train_a)
def loop_a(answer: Any) -> str:
    """Gradients that were never cleared."""
    never = _run(when="never")
    _judge_loop(
        answer,
        [
            (
                never,
                "the gradients of all batches so far still add up: they must be cleared once for "
                "every backward, so inside the loop",
            ),
            (
                _run(when="before the step"),
                "the weights never move: you clear the gradients after backward and before the "
                "step, so the step has nothing to go by",
            ),
            (
                _run(momentum=0.0),
                "the gradients are right, the momentum is lost: do you make a new optimizer for "
                "each batch? Keep the one you are given",
            ),
        ],
    )
    return (
        "backward() adds to .grad; it never overwrites. Adding up is what gradient accumulation "
        "uses on purpose, as in exercise 4"
    )


@_handed_out(faults.train_b)
def loop_b(answer: Any) -> str:
    """Softmax applied twice."""
    _judge_loop(
        answer,
        [
            (
                _run(lambda z, y: F.cross_entropy(z.softmax(-1), y)),
                "cross_entropy still gets probabilities: it takes the log-softmax itself, "
                "so give it what the model returns",
            ),
            (
                _run(lambda z, y: F.nll_loss(z.softmax(-1), y)),
                "nll_loss wants log-probabilities, and these are probabilities: "
                "take log_softmax, or leave it all to cross_entropy",
            ),
            (
                _run(lambda z, y: F.nll_loss(z, y)),
                "nll_loss of raw outputs has no floor, the model only has to shout: "
                "it wants log-probabilities; use cross_entropy",
            ),
            (
                _run(lambda z, y: F.cross_entropy(z.softmax(0), y)),
                "softmax over dim 0 mixes the samples of a batch, and cross_entropy applies "
                "its own: give it what the model returns",
            ),
            (
                _run(lambda z, y: F.cross_entropy(z.sigmoid(), y)),
                "a sigmoid squeezes the outputs into 0 to 1 just as softmax did: "
                "give cross_entropy what the model returns",
            ),
        ],
    )
    return (
        "with softmax twice the loss of 10 classes can't fall below 1.46, and the gradient "
        "fades where the model is most wrong"
    )


class _Accelerator:
    """A device that works behind the host's back, with a clock of its own. Milliseconds.

    Launching a step takes the host 0.1; the device needs 10 for it; the first one 400 more,
    on the host, as compiling does.
    """

    def __init__(self) -> None:
        self.host, self.device_done, self.steps = 0.0, 0.0, 0

    def step(self) -> None:
        self.host += 400.1 if self.steps == 0 else 0.1
        self.device_done = max(self.device_done, self.host) + 10.0
        self.steps += 1

    def synchronize(self) -> None:
        self.host = max(self.host, self.device_done)

    def clock(self) -> float:
        return self.host / 1000


def _timed(warm: int, wait_first: bool, wait_last: bool, steps: int = 20) -> float:
    it = _Accelerator()
    for _ in range(warm):
        it.step()
    if wait_first:
        it.synchronize()
    start = it.clock()
    for _ in range(steps):
        it.step()
    if wait_last:
        it.synchronize()
    return (it.clock() - start) / steps


@_handed_out(faults.seconds_per_step)
def loop_c(answer: Any) -> str:
    """A timer that counts the warm-up in, and stops before the device does."""
    need_function(answer)
    it = _Accelerator()
    got = answer(it.step, it.synchronize, it.clock)
    if not isinstance(got, int | float):
        raise Hint(f"return seconds, a number; this is {type(got).__name__}")
    steps, truth = it.steps, 0.010
    if abs(got / truth - 1) < 0.03:
        return "10 ms: warmed up, waited for, then timed, then waited for again"

    def near(value: float) -> bool:
        return abs(got / value - 1) < 0.02

    if near(truth * 1000):
        raise Hint("that is milliseconds: return seconds")
    if near(truth * 20) or near(truth * (steps - 1)):
        raise Hint("that is the time of all steps together: divide by how many you timed")
    if near(_timed(0, True, True)) or near(_timed(0, False, True)):
        raise Hint(
            "the device is waited for, but the first step is still in the time: on this device "
            "it takes 0.4 s longer than the rest. Run it before you read the clock"
        )
    for warm in range(1, steps):
        if near(_timed(warm, True, False)) or near(_timed(warm, False, False)):
            raise Hint(
                f"{got * 1e3:.1f} ms is the time to *ask for* a step: the clock is read while the "
                "device still works. Call synchronize() before you read it the second time"
            )
    for warm in range(1, steps):
        if near(_timed(warm, False, True)):
            raise Hint(
                "the end is right, but the clock starts while the device is still busy with the "
                "warm-up, which is counted in: call synchronize() before the first reading too"
            )
    raise Hint(
        f"you found {got * 1e3:.2f} ms; this device takes 10 ms a step. Do you divide by the "
        "number of steps between the two readings?"
    )


@_handed_out(faults.train_d)
def loop_d(answer: Any) -> str:
    """Dropout that is on or off at the wrong time."""
    need_function(answer)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    batches = [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(4)]
    held_out = torch.randn(7, 5), torch.randint(3, (7,))
    seen: list[tuple[bool, bool, bool]] = []

    def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen.append((len(args[0]) == 7, module.training, torch.is_grad_enabled()))

    model[2].register_forward_hook(note)
    history = answer(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, held_out)
    trained = [training for is_held, training, _ in seen if not is_held]
    judged = [(training, grad) for is_held, training, grad in seen if is_held]
    if len(trained) != 4 or len(judged) != 4 or len(history or []) != 4:
        raise Hint("train once on each batch, and return one held-out loss after each")
    if any(training for training, _ in judged):
        raise Hint(
            "the held-out loss is taken with dropout on, so it is a loss of half a network: "
            "call model.eval() before it"
        )
    if not trained[0]:
        raise Hint("the very first batch is trained in eval mode: model.eval() came too early")
    if not all(trained[1:]):
        raise Hint(
            "from the second batch on dropout is off: nothing puts the model back after eval(). "
            "model.train() before the loop is not enough"
        )
    if any(grad for _, grad in judged):
        raise Hint("the held-out loss builds a graph that nobody uses: keep torch.no_grad()")
    if not model.training:
        raise Hint(
            "the loop is right, but whoever calls it gets the model back in eval mode: "
            "call model.train() right after the held-out loss"
        )
    return "exercise 3 goes on from here, where train() for everything is wrong too"


@_handed_out(faults.train_e)
def loop_e(answer: Any) -> str:
    """Validation on data that was trained on."""
    need_function(answer)
    torch.manual_seed(0)
    inputs, targets = torch.randn(100, 20), torch.randint(5, (100,))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    trained: set[int] = set()
    judged: set[int] = set()
    number = {tuple(row.tolist()): index for index, row in enumerate(inputs)}

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        rows = {number.get(tuple(row.tolist()), -1) for row in args[0].detach()}
        (trained if torch.is_grad_enabled() else judged).update(rows)

    model.register_forward_pre_hook(note)
    got = answer(model, torch.optim.SGD(model.parameters(), lr=0.3), inputs, targets)
    if not isinstance(got, float):
        raise Hint(f"return the loss as a float, not {type(got).__name__}")
    if not judged:
        raise Hint("no sample was judged under torch.no_grad(): keep the last two lines")
    if both := trained & judged:
        raise Hint(
            f"{len(both)} of the {len(judged)} samples that you judge by were trained on: "
            "leave them out of the training batch"
        )
    if judged != set(range(20)):
        raise Hint(f"hold out the first 20 samples; you judge by {len(judged)}, not the same ones")
    if len(trained) < 80:
        raise Hint(f"you train on {len(trained)} samples; 80 are left when 20 are held out")
    with torch.no_grad():
        if abs(got - F.cross_entropy(model(inputs[:20]), targets[:20]).item()) > 1e-4:
            raise Hint("that is not the loss of the 20 held-out samples after training")
    return (
        f"{got:.2f}, where guessing gives ln 5 = 1.61: these targets are random, so there was "
        "nothing to learn. The leaky loop said 'learnt'"
    )
