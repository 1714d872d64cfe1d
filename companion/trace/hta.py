"""The figures of HolisticTraceAnalysis 0.5.0, by its rules, to hold ours against.

Its rules differ from :mod:`companion.trace.breakdown` in four points:

- Times are rounded inwards to whole microseconds, so every kernel loses 1 µs on average.
- Whatever has a ``stream`` argument counts as the device's work: also waits (``Stream Sync``,
  MTIA's ``event_wait``), and Triton's launcher on the host.
- What is not named as a collective or a copy is compute, MTIA's waits included.
- The last step is left out where there are several.
"""

import re

import numpy as np

from companion.trace.intervals import lengths, union
from companion.trace.model import Trace

_COMMUNICATION = re.compile(r"^nccl.*Kernel")
_MEMORY = re.compile(r"^Memcpy|^Memset|^dma")
_NO_COMPUTE = re.compile(r"^nccl.*Kernel|.*Memcpy|^Memset|.*Sync")


def temporal(trace: Trace) -> dict[str, float] | None:
    """``idle``, ``compute``, ``non_compute`` and ``kernel`` time in µs; None with no device."""
    chosen = _chosen(trace)
    if len(chosen) == 0:
        return None
    start, end = _times(trace, chosen)
    busy = union(start, end)
    window = busy[1][-1] - busy[0][0]
    idle = window - (busy[1] - busy[0]).sum()
    which = _kind(trace)[chosen] == 0
    work = union(start[which], end[which])
    compute = (work[1] - work[0]).sum()
    return {
        "idle": float(idle),
        "compute": float(compute),
        "non_compute": float(window - compute - idle),
        "kernel": float(window),
    }


def kernel_types(trace: Trace) -> dict[str, float]:
    """µs by what runs at once, for example ``COMPUTATION overlapping COMMUNICATION``."""
    chosen = _chosen(trace)
    start, end = _times(trace, chosen)
    kind = _kind(trace)[chosen]
    by_kind = [union(start[kind == number], end[kind == number]) for number in range(3)]
    # rounding inwards leaves kernels that end before they start; they cover nothing
    by_kind = [(s[e > s], e[e > s]) for s, e in by_kind]
    names = ("COMPUTATION", "COMMUNICATION", "MEMORY")
    return {
        " overlapping ".join(n for bit, n in enumerate(names) if cover >> bit & 1): float(time)
        for cover, time in enumerate(lengths(*by_kind))
        if cover and time
    }


def _times(trace: Trace, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounded inwards, as that tool does where any time has a fraction."""
    start = trace.start[chosen] + trace.origin
    end = start + trace.duration[chosen]
    whole = trace.start + trace.origin
    if np.any(whole != np.round(whole)):
        start, end = np.ceil(start), np.floor(end)
    return start, end


def _kind(trace: Trace) -> np.ndarray:
    """0 compute, 1 communication, 2 memory, 3 other."""

    def kind(name: str) -> int:
        if _COMMUNICATION.match(name):
            return 1
        if _MEMORY.match(name):
            return 2
        return 3 if _NO_COMPUTE.match(name) else 0

    return np.array([kind(name) for name in trace.names])[trace.name]


def _chosen(trace: Trace) -> np.ndarray:
    """Spans with a stream; of the steps before the last where there are several."""
    on_stream = trace.stream != -1
    if len({step.number for step in trace.steps}) < 2:
        return np.flatnonzero(on_stream)
    device = on_stream & (trace.correlation >= 0)
    before = ~device & (trace.start < trace.steps[-1].start)
    launched = np.isin(trace.correlation, trace.correlation[before])
    return np.flatnonzero((device & launched) | (before & on_stream))
