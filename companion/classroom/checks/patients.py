"""The checks of notebook 03's clinic: is the diagnosis right, is the loop mended, what is won?

A mended loop gives the same numbers as the patient. The gain is a count where it can be
(operators, compilations, tokens), else an interval that leaves out "as fast as before".
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from companion import trace
from companion.classroom import clinic
from companion.classroom.checks import OPEN, Hint, Verdict, check, need_function, unchanged
from companion.trace import Trace
from companion.trace.diagnose import TITLES

NAMES = ("data", "cpu", "shapes", "kernels", "communication", "healthy")
FEW = 300
"""Operators in a step of patient B's loop, mended; ill it has some thousands."""
RECOMPILED = 3
"""Compilations that patient C may still need for its eight lengths."""
EVEN = 1.15
"""Tokens of patient E's busier rank over the mean of both."""

_NOT_THAT = {
    ("a", "cpu"): "little of a step is Python between operators here; the long stretch without an "
    "operator lies in the range `data`",
    ("a", "kernels"): "its operators are matrix products, as they should be, and half of the step "
    "has no operator at all",
    ("b", "data"): "there is no range `data` in its steps: everything is in memory",
    (
        "b",
        "kernels",
    ): "hardly an operator of it is long: count them. Thousands a step, a few µs each",
    ("c", "cpu"): "the main thread is busy, but look with what: ranges named `_compile` fill the "
    "step",
    ("c", "data"): "its sequences are in memory; what a step waits for is the compiler",
    ("d", "cpu"): "nearly all of a step is inside operators, and they are long ones",
    ("d", "healthy"): "most of its self time is in pow, mul, add and tanh: they move memory and "
    "calculate little. A layer's time should be in its matrix products",
    ("e", "healthy"): "each rank alone looks well. Read them side by side: whose collective is the "
    "shortest, every time?",
    ("e", "kernels"): "the operators are matrix products and a GELU in one piece; look at what "
    "rank 0 does while rank 1 computes",
}


def _patient(which: str) -> Callable[[Callable[..., str]], Callable[[Any, Any], Verdict]]:
    """A check of (diagnosis, loop): open while both are as handed out; the diagnosis first."""
    sick = clinic.PATIENTS[which]

    def decorate(judge: Callable[..., str]) -> Callable[[Any, Any], Verdict]:
        @check
        def both(diagnosis: Any, answer: Any) -> str:
            _judge_diagnosis(which, diagnosis)
            if unchanged(answer, sick):
                raise Hint(
                    f"rightly diagnosed: {TITLES[diagnosis].lower()}. Now mend the function, and "
                    "run this check again"
                )
            need_function(answer)
            return judge(answer)

        def either(diagnosis: Any, answer: Any) -> Verdict:
            if diagnosis in (None, "", ...) and unchanged(answer, sick):
                return Verdict(OPEN, "")
            return both(diagnosis, answer)

        either.__name__, either.__doc__ = judge.__name__, judge.__doc__
        return either

    return decorate


def _judge_diagnosis(which: str, diagnosis: Any) -> None:
    """
    Raises:
        Hint: there is none, or it is wrong.
    """
    if diagnosis in (None, "", ...):
        raise Hint("first say what it is ill with: one of " + ", ".join(NAMES))
    if diagnosis not in NAMES:
        raise Hint(f"{diagnosis!r} is no diagnosis: choose one of {', '.join(NAMES)}")
    if diagnosis == clinic.VERDICTS[which]:
        return
    reason = _NOT_THAT.get((which, diagnosis))
    raise Hint(
        f"not {diagnosis}: {reason}"
        if reason
        else f"not {diagnosis}: read the breakdown again. Which part of a step is largest?"
    )


def _same(which: str, answer: Callable[..., Any], known: list[tuple[list[float], str]]) -> None:
    """
    Raises:
        Hint: the loop's numbers are not the patient's.
    """
    right = clinic.losses(which, clinic.PATIENTS[which], 6)
    got = clinic.losses(which, answer, 6)
    if len(got) != len(right) or not all(isinstance(value, float) for value in got):
        raise Hint(f"yield one float a step: {len(right)} were asked for, {len(got)} came")
    if _close(got, right):
        return
    for values, hint in known:
        if _close(got, values):
            raise Hint(hint)
    step = next(i for i, pair in enumerate(zip(got, right, strict=True)) if not _near(*pair))
    raise Hint(
        f"step {step} yields {got[step]:.6g}, and the patient {right[step]:.6g}: mend the speed "
        "and leave the numbers"
    )


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=2e-5, abs_tol=1e-7)


def _close(got: list[float], right: list[float]) -> bool:
    return len(got) == len(right) and all(map(_near, got, right))


def _timed_gain(which: str, answer: Callable[..., Any], otherwise: str) -> str:
    """
    Raises:
        Hint: the interval of the gain holds 1.
    """
    found = clinic.gain(which, answer)
    interval = f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"
    if found.low <= 1:
        raise Hint(f"the numbers are right, but no gain is shown: {interval} times. {otherwise}")
    after = clinic.examine(which, answer)
    return f"{interval} times as fast. The trace of yours says: {_title(after)}"


def _title(found: Any) -> str:
    return trace.diagnose(found).title.lower()


@_patient("a")
def patient_a(answer: Any) -> str:
    """The slow loader."""
    _same(
        "a",
        answer,
        [
            (
                clinic.losses("a", _second_first, 6),
                "the first batch is missing: you fetch one ahead, and train on the second first",
            ),
            (
                clinic.losses("a", _one_batch, 6),
                "it trains on one batch again and again: that is fast, and learns nothing new",
            ),
        ],
    )
    return _timed_gain(
        "a", answer, "Is each batch still asked for only when the step needs it, and waited for?"
    )


def _second_first(read: Any, model: Any, optimizer: Any, steps: int) -> Any:
    def late(first: int, count: int) -> Any:
        return read(first + count, count)

    return clinic.patient_a(late, model, optimizer, steps)


def _one_batch(read: Any, model: Any, optimizer: Any, steps: int) -> Any:
    batch = read(0, 128)
    return clinic.patient_a(lambda first, count: batch, model, optimizer, steps)


@_patient("b")
def patient_b(answer: Any) -> str:
    """Thousands of tiny operators in a Python loop."""
    head, hidden, targets, weights = clinic.ward("b")
    with torch.no_grad():
        each = F.cross_entropy(head(hidden), targets, reduction="none")
    mean = each.mean().item()
    weighed = (each * weights).mean().item()
    normed = ((each * weights).sum() / weights.sum()).item()
    _same(
        "b",
        answer,
        [
            ([mean] * 6, "the mean without the weights: reduction='none' gives one loss a token"),
            ([each.sum().item()] * 6, "the tokens' weights are lost: multiply before you add up"),
            ([weighed] * 6, "a mean over the tokens; the patient adds them up"),
            ([normed] * 6, "divided by the sum of the weights; the patient only adds up"),
        ],
    )
    list(answer(head, hidden, targets, weights, 1))
    gradient = None if head.weight.grad is None else head.weight.grad.clone()
    list(clinic.patient_b(head, hidden, targets, weights, 1))
    if gradient is None or not torch.allclose(gradient, head.weight.grad, rtol=1e-3, atol=1e-5):
        raise Hint("the loss is right and the gradient is not: keep zero_grad, then backward")
    found = clinic.examine("b", answer)
    assert isinstance(found, Trace)
    count = int(found.host_operations.sum()) / len(found.steps)
    if count > FEW:
        raise Hint(
            f"a step still has {count:,.0f} operators: a comprehension, vmap's fallback or a map "
            "is a loop too. One call for all tokens"
        )
    said = _timed_gain("b", answer, "What still takes its time?")
    return f"{count:.0f} operators a step instead of thousands; {said}"


@_patient("c")
def patient_c(answer: Any) -> str:
    """Shape churn under compile."""
    _same("c", answer, [])
    ill, count = clinic.compilations(clinic.patient_c), clinic.compilations(answer)
    if count == 0:
        raise Hint(
            "nothing is compiled with `backend` any more: keep torch.compile(..., backend=backend)"
        )
    if count > RECOMPILED:
        also = " Was torch.compile moved into the loop?" if count > ill else ""
        raise Hint(
            f"{count} compilations for {len(clinic.LENGTHS)} lengths, and the patient has {ill}."
            f"{also} Let the length be dynamic, or give the model a few lengths only"
        )
    return (
        f"{count} compilation{'s' if count > 1 else ''} instead of {ill}. The trace of yours says: "
        f"{_title(clinic.examine('c', answer))}"
    )


@_patient("d")
def patient_d(answer: Any) -> str:
    """An unfused heavy operation."""
    first, second, inputs = clinic.ward("d")

    def with_(function: Callable[..., Any]) -> list[float]:
        with torch.no_grad():
            return [second(function(first(inputs))).square().mean().item()] * 6

    _same(
        "d",
        answer,
        [
            (
                with_(F.gelu),
                "that is the exact GELU; the paper's formula is gelu(..., approximate='tanh')",
            ),
            (with_(F.relu), "a ReLU is fast and another function"),
            (with_(F.silu), "a SiLU is another function: look for gelu in torch.nn.functional"),
        ],
    )
    list(answer(first, second, inputs, 1))
    if first.weight.grad is None or not first.weight.grad.any():
        raise Hint("the first layer gets no gradient: keep loss.backward(), and no no_grad")
    return _timed_gain(
        "d", answer, "Is the formula still there, term by term? One operator computes all of it"
    )


@_patient("e")
def patient_e(answer: Any) -> str:
    """Two ranks, one of which has most of the work."""
    worst = 1.0
    for step in range(12):
        lengths = clinic.lengths_of(step)
        shares = [answer(list(lengths), rank, 2) for rank in range(2)]
        if not all(isinstance(share, list) for share in shares):
            raise Hint("return a list of sequence numbers, 0 to len(lengths) - 1")
        taken = sorted(index for share in shares for index in share)
        if len(set(taken)) < len(taken):
            raise Hint(
                "both ranks take the same sequence, so it counts twice: is the order the same on "
                "both? Use `rank`, and no unseeded shuffle"
            )
        if taken != list(range(len(lengths))):
            raise Hint(
                f"step {step}: {len(taken)} of {len(lengths)} sequences are taken; each belongs "
                "to one rank"
            )
        tokens = [sum(lengths[i] for i in share) for share in shares]
        if not min(tokens):
            raise Hint("one rank gets no sequence at all, and has nothing to reduce")
        worst = max(worst, max(tokens) / (sum(tokens) / 2))
    if worst > EVEN:
        counts = [len(share) for share in shares]
        equal = " Equal numbers of sequences are not equal work." if counts[0] == counts[1] else ""
        raise Hint(
            f"the busier rank has {worst:.2f} times the mean number of tokens (limit {EVEN})."
            f"{equal} Deal the long ones out in turn"
        )
    found = clinic.gain("e", answer)
    after = trace.diagnose(clinic.examine("e", answer))
    late = f"rank {after.rank} is still late" if "comes last" in after.why[0] else "no rank is late"
    interval = f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}] times as fast"
    if found.low <= 1:
        # where two ranks share one free core, equal work is no faster
        interval += ", which shows no gain: were two cores free?"
    return (
        f"the busier rank has {worst:.2f} times the mean number of tokens, not 1.8; {late}; "
        f"measured {interval}"
    )
