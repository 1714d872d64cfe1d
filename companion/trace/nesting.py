"""Which span lies in which, on each thread of the host."""

from dataclasses import dataclass

import numpy as np

from companion.trace.model import HOST, Trace


@dataclass(eq=False)
class Nesting:
    """Of the host's spans: what each lies in, and its time without what lies in it."""

    parent: np.ndarray
    """Number of the enclosing span of the same thread, -1 at the top and for other spans."""
    self_time: np.ndarray
    """µs; 0 for spans that are not the host's."""
    level: np.ndarray
    """How many spans of its thread it lies in; 0 for spans that are not the host's."""
    depth: int
    """The deepest nesting, counted from 1."""
    crossing: int
    """Spans that begin inside another and end outside it, which no call stack can do."""
    crossing_operators: int
    """Of these, operators that cross operators."""


def nesting(trace: Trace, tolerance: float = 2.0) -> Nesting:
    """Nest the host's spans by thread.

    Spans that stick out of the one they begin in by up to ``tolerance`` µs count as inside:
    real traces' times are rounded. What crosses more is counted and nested all the same.
    """
    if (known := trace.__dict__.get("_nesting")) is not None:
        return known
    which = np.flatnonzero(trace.is_category(*HOST) | trace.launches)
    # an outer span comes before an inner one that begins with it
    which = which[np.lexsort((-trace.duration[which], trace.start[which], trace.lane[which]))]
    start, duration = trace.start[which].tolist(), trace.duration[which].tolist()
    lane, numbers = trace.lane[which].tolist(), which.tolist()
    parent = np.full(len(trace), -1)
    inside, levels = [0.0] * len(numbers), [0] * len(numbers)
    stack: list[int] = []
    of_lane, depth, crossing, operators = None, 0, 0, 0
    is_operator = trace.is_category("cpu_op", "Operator")[which].tolist()
    for at, begin in enumerate(start):
        if lane[at] != of_lane:
            stack, of_lane = [], lane[at]
        end = begin + duration[at]
        while stack and begin >= start[stack[-1]] + duration[stack[-1]] - 1e-3:
            stack.pop()
        if stack:
            above = stack[-1]
            room = start[above] + duration[above]
            if end > room + tolerance:
                if room - begin <= tolerance:
                    # it only touches: the clock's rounding, not a call
                    stack.pop()
                    while stack and begin >= start[stack[-1]] + duration[stack[-1]] - tolerance:
                        stack.pop()
                    above = stack[-1] if stack else -1
                else:
                    crossing += 1
                    operators += is_operator[at] and is_operator[above]
            if above >= 0:
                parent[numbers[at]] = numbers[above]
                inside[above] += min(end, start[above] + duration[above]) - begin
        levels[at] = len(stack)
        stack.append(at)
        depth = max(depth, len(stack))
    self_time = np.zeros(len(trace))
    self_time[which] = np.maximum(trace.duration[which] - np.array(inside), 0.0)
    level = np.zeros(len(trace), int)
    level[which] = levels
    trace.__dict__["_nesting"] = found = Nesting(
        parent, self_time, level, depth, crossing, operators
    )
    return found


def top_level(trace: Trace, which: np.ndarray) -> np.ndarray:
    """Of these spans those that lie in no other of them (numbers, in the order of time)."""
    parent = nesting(trace).parent
    covered = np.zeros(len(trace), bool)
    # parents begin first, so one pass in the order of time settles every chain; spans that
    # begin together are in the file's order, so ask again until nothing changes
    while True:
        above = np.where(parent >= 0, (which | covered)[parent], False)
        if (above == covered).all():
            return np.flatnonzero(which & ~covered)
        covered = above
