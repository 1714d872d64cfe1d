"""The checks of notebook 03, exercises 1 to 4; those of the clinic are in ``patients``."""

import contextlib
import itertools
import math
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from companion import trace
from companion.classroom.checks import Hint, check, need_function
from companion.classroom.checks.patients import (
    patient_a,
    patient_b,
    patient_c,
    patient_d,
    patient_e,
)
from companion.profiling import Schedule
from companion.trace import Trace

__all__ = [
    "exposed",
    "patient_a",
    "patient_b",
    "patient_c",
    "patient_d",
    "patient_e",
    "record_three",
    "recorded_steps",
    "self_times",
]


# ── 1: which steps are recorded ──────────────────────────────────────────────────────────────


def _recorded(
    steps: int,
    skip: int,
    wait: int,
    warmup: int,
    active: int,
    repeat: int,
    *,
    mistake: str = "",
) -> list[int]:
    """The right answer or, by ``mistake``, that of a known misunderstanding."""
    found: list[int] = []
    cycles = range(repeat or 0 if mistake == "never" else repeat or steps)
    for cycle in cycles[:1] if mistake == "once" else cycles:
        first = skip + cycle * (wait + warmup + active) + wait + warmup
        if mistake == "skip each":
            first += cycle * skip
        if mistake == "warm-up kept":
            first -= warmup
        last = first + active + (warmup if mistake == "warm-up kept" else 0)
        found += range(first, last)
    if mistake == "from 1":
        found = [step + 1 for step in found]
    return found if mistake == "past the end" else [step for step in found if step < steps]


_MISUNDERSTOOD = {
    "warm-up kept": "the warm-up runs with the profiler on and is thrown away: it is not recorded",
    "from 1": "the steps count from 0: with nothing skipped and waited for, step 0 is the first",
    "once": "only the first window: after it the cycle of wait, warm-up and active begins again, "
    "`repeat` times",
    "skip each": "skip_first counts once, before the first cycle; you skip in every cycle",
    "never": "repeat=0 means: again and again to the end of the loop, not never",
    "past the end": "the loop is over before your last step: a step that never runs is not "
    "recorded, and a window may be cut short",
}


@check
def recorded_steps(answer: Any) -> str:
    """``recorded_steps(steps, skip_first, wait, warmup, active, repeat)``."""
    need_function(answer)
    cases = [
        (50, 0, 1, 1, 3, 2),
        (30, 5, 2, 1, 2, 2),
        (12, 0, 1, 1, 3, 0),
        (9, 0, 1, 1, 3, 2),
        (4, 2, 2, 2, 1, 1),
    ]
    for case in cases:
        got = answer(*case)
        if not isinstance(got, list):
            raise Hint(f"return a list of step numbers; this is {type(got).__name__}")
        right = _recorded(*case)
        if got == right:
            continue
        named = "steps={}, skip_first={}, wait={}, warmup={}, active={}, repeat={}".format(*case)
        for mistake, hint in _MISUNDERSTOOD.items():
            if got == _recorded(*case, mistake=mistake):
                raise Hint(f"{hint} ({named})")
        raise Hint(f"{named}: steps {right} are recorded, and you say {got}")
    plan = Schedule(wait=1, warmup=1, active=3, repeat=2).windows(50)
    return (
        f"the guide's 50 steps: {sum(window.steps for window in plan)} of them, all in the first 10"
    )


# ── 2: self time ─────────────────────────────────────────────────────────────────────────────

Span = tuple[str, int, int]
SPANS: list[Span] = [
    ("step", 0, 100),
    ("linear", 10, 60),
    ("mm", 20, 50),
    ("relu", 60, 80),
    ("linear", 85, 95),
    ("mm", 86, 94),
]
"""Properly nested spans, in the order of their starts; relu begins where linear ends."""


def _self_times(spans: Sequence[Span], mistake: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for index, (name, start, end) in enumerate(spans):
        touching = mistake == "touching"
        inside = [
            other
            for at, other in enumerate(spans)
            if at > index
            and (start <= other[1] <= end if touching else start <= other[1] and other[2] <= end)
        ]
        if mistake == "all":
            taken = sum(e - s for _, s, e in inside)
        else:
            covered, taken = start, 0
            for _, s, e in inside:
                if s >= covered:
                    covered, taken = e, taken + e - s
        own = end - start - (0 if mistake == "total" else taken)
        if mistake == "leaves" and inside:
            continue
        found[name] = own if mistake == "last" else found.get(name, 0) + own
    return found


_SELF = {
    "total": "that is the total time: `linear` contains `mm`, so those 38 µs are counted at both",
    "all": "step gets less than nothing: `mm` lies in `linear` and that in `step`, and you take "
    "it off from both; take off the direct children only",
    "leaves": "a span with others in it has a time of its own too: what the others leave over",
    "last": "a name occurs more than once: add up, and don't overwrite",
    "touching": "relu begins at 60, where linear ends: it comes after it and is not in it",
}


@check
def self_times(answer: Any) -> str:
    """``self_times(spans)``: a dict of name to self time."""
    need_function(answer)
    got = answer(list(SPANS))
    if not isinstance(got, dict):
        raise Hint(f"return a dict of name to time; this is {type(got).__name__}")
    right = _self_times(SPANS)
    for mistake, hint in _SELF.items():
        if got == _self_times(SPANS, mistake) != right:
            raise Hint(hint)
    if got != right:
        raise Hint(f"the spans of the exercise make {right}, and you say {got}")
    if sum(got.values()) != 100:
        raise Hint("the self times of all spans add up to the time of the outermost one")
    more = [(name, 3 * s + 7, 3 * e + 7) for name, s, e in [*SPANS, ("next", 100, 120)]]
    if answer(list(more)) != _self_times(more):
        raise Hint("right for these spans, and wrong when a second one follows on `step`")
    return "they add up to 100 µs, all of `step`: nothing is counted twice, and nothing is left out"


# ── 3: exposed communication ─────────────────────────────────────────────────────────────────

Pairs = list[tuple[float, float]]
COMMUNICATION: Pairs = [(0, 10), (5, 15), (30, 40)]
COMPUTE: Pairs = [(8, 12), (9, 14), (32, 36)]


def _covered(*lists: Pairs) -> float:
    """Time at which every one of the lists has an interval open."""
    edges = sorted({edge for pairs in lists for pair in pairs for edge in pair})
    return sum(
        b - a
        for a, b in itertools.pairwise(edges)
        if all(any(s <= a and b <= e for s, e in pairs) for pairs in lists)
    )


def _exposed_mistakes() -> list[tuple[float, str]]:
    total, both = _covered(COMMUNICATION), _covered(COMMUNICATION, COMPUTE)
    added = sum(e - s for s, e in COMMUNICATION)
    pairs = sum(max(0.0, min(e, f) - max(s, t)) for s, e in COMMUNICATION for t, f in COMPUTE)
    twice = "two of them run at once from 5 to 10: count that time once"
    return [
        (both, "that is the part which is hidden; what costs time is the other part"),
        (total, "that is all communication: leave out the time under compute"),
        (added, f"all communication, added up. Leave out what is under compute, and {twice}"),
        (added - both, f"the compute is taken off rightly; of the communication, {twice}"),
        (total - pairs, "you take off more than there is: from 9 to 12 two pieces of compute run, "
         "and each is taken off. Unite the compute first"),
        (added - pairs, "pair by pair counts the same moment several times: unite each list first"),
    ]  # fmt: skip


@check
def exposed(answer: Any) -> str:
    """``exposed(communication, compute)``: time of communication with no compute."""
    need_function(answer)
    got = answer(list(COMMUNICATION), list(COMPUTE))
    if not isinstance(got, int | float):
        raise Hint(f"return one number; this is {type(got).__name__}")
    right = _covered(COMMUNICATION) - _covered(COMMUNICATION, COMPUTE)
    if not math.isclose(got, right):
        for value, hint in _exposed_mistakes():
            if math.isclose(got, value):
                raise Hint(hint)
        raise Hint(f"{right} µs of these are exposed, and you say {got}")
    for communication, compute, expected, what in (
        ([(0, 4), (2, 6)], [], 6, "with no compute at all, 0 to 6 is exposed"),
        ([], [(0, 5)], 0, "with no communication nothing is exposed"),
        ([(10, 20)], [(0, 50)], 0, "compute from 0 to 50 hides 10 to 20 altogether"),
        ([(7, 9), (0, 3)], [(2, 8)], 3, "the intervals need not come in order of time"),
    ):
        if not math.isclose(answer(communication, compute), expected, abs_tol=1e-9):
            raise Hint(what)
    return "15 of 25 µs are exposed; the other 10 cost nothing, however long they last"


# ── 4: record it rightly ─────────────────────────────────────────────────────────────────────


class _Step:
    """A training step that tells its calls apart in a trace."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        with torch.profiler.record_function(f"call {self.calls}"):
            for _ in range(8):
                torch.mm(torch.ones(16, 16), torch.ones(16, 16))
        self.calls += 1


def _calls(found: Trace) -> list[int]:
    names = [found.names[index].split() for index in found.name]
    return sorted({int(n[1]) for n in names if len(n) == 2 and n[0] == "call" and n[1].isdigit()})


@check
def record_three(answer: Any) -> str:
    """``record_three(step, directory)``: a trace of three steps, warmed up, with shapes."""
    need_function(answer)
    step = _Step()
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = answer(step, Path(directory))
        if torch.autograd._profiler_enabled():
            with contextlib.suppress(Exception):
                torch.autograd._disable_profiler()
            raise Hint(
                "the profiler still runs after your function has returned, and would slow down "
                "everything that follows: use it in a with block, which stops it"
            )
        if not isinstance(path, str | Path):
            raise Hint(f"return the path of the trace; this is {type(path).__name__}")
        if not Path(path).is_file():
            raise Hint(f"there is no file {Path(path).name}: was a window ever complete?")
        found = trace.read(path)
    assert isinstance(found, Trace)
    if not found.steps:
        raise Hint(
            "the trace has no step marks: they come from a schedule and a call of step() at the "
            "end of every step"
        )
    inside = _calls(found)
    if inside and inside[0] < 2:
        raise Hint(
            f"call {inside[0]} of step is in the trace: the first calls warm up, so leave at "
            "least two of them out (wait and warmup of the schedule)"
        )
    if len(found.steps) != 3 or len(inside) != 3:
        raise Hint(
            f"the trace has {len(found.steps)} step marks and {len(inside)} calls of step, and "
            "both should be 3: one call of step, then one of recording.step()"
        )
    if not trace.shapes(found).recorded:
        raise Hint("the shapes are missing: ask for them (shapes=True, or record_shapes=True)")
    return f"calls {', '.join(map(str, inside))}, with step marks and shapes, and nothing left open"
