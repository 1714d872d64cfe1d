"""The memory peak, and which operators hold it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from companion.trace.model import Trace
from companion.trace.nesting import nesting
from companion.trace.operators import place_of


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory was allocated."""

    bytes: int
    """Allocated then, as the allocator counts."""
    time: float
    """µs from the first span."""
    step: int | None
    """The step's number."""
    holders: list[tuple[str, int]]
    """Bytes alive then by the operator that took them (and the range it ran in)."""
    before: int
    """Bytes taken before the recording began: weights, say. Nobody can be named for them."""


def memory_peak(trace: Trace, device: bool | None = None) -> Peak | None:
    """Memory peak and who holds it; None where memory was not recorded.

    Needs ``capture(..., memory=True)``. ``device`` chooses the accelerator's memory (by
    default where it was recorded) or the host's.
    """
    memory = trace.memory
    on_device = memory.device > 0
    chosen = np.flatnonzero(
        on_device if (on_device.any() if device is None else device) else ~on_device
    )
    if len(chosen) == 0:
        return None
    total = memory.total[chosen]
    if (total < 0).all():
        total = np.cumsum(memory.size[chosen])
    at = int(total.argmax())
    alive: dict[int, int] = {}
    for event in chosen[: at + 1].tolist():
        if memory.size[event] > 0:
            alive[int(memory.address[event])] = event
        else:
            alive.pop(int(memory.address[event]), None)
    owners = _innermost(trace, sorted(alive.values()))
    held: dict[str, int] = {}
    for event, owner in owners.items():
        if owner >= 0:
            place = place_of(trace, owner)
            name = trace.names[trace.name[owner]] + (f" in {place}" if place else "")
        else:
            name = "outside any operator"
        held[name] = held.get(name, 0) + int(memory.size[event])
    time = float(memory.time[chosen[at]])
    index = int(np.searchsorted([s.start for s in trace.steps], time, "right")) - 1
    return Peak(
        bytes=int(total[at]),
        time=time,
        step=trace.steps[index].number if index >= 0 else None,
        holders=sorted(held.items(), key=lambda item: -item[1]),
        before=max(int(total[at]) - sum(held.values()), 0),
    )


def _innermost(trace: Trace, events: Iterable[int]) -> dict[int, int]:
    """Memory event to the innermost operator around it on its thread, -1 where there is none."""
    found: dict[int, int] = {}
    operators = trace.is_category("cpu_op", "Operator")
    by_lane: dict[int, np.ndarray] = {}
    parent, end = nesting(trace).parent, trace.end
    for event in events:
        lane, time = int(trace.memory.lane[event]), float(trace.memory.time[event])
        if lane not in by_lane:
            by_lane[lane] = np.flatnonzero(operators & (trace.lane == lane))
        spans = by_lane[lane]
        at = int(np.searchsorted(trace.start[spans], time, "right")) - 1
        span = int(spans[at]) if at >= 0 else -1
        while span >= 0 and end[span] < time:
            span = int(parent[span])
        found[event] = span
    return found
