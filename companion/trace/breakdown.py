"""Where the time of a step goes: busy, communication, copies, and why it was idle."""

from dataclasses import dataclass

import numpy as np

from companion.trace.intervals import (
    Intervals,
    both,
    clip,
    length,
    lengths,
    outside,
    union,
)
from companion.trace.model import Trace

KINDS = ("compute", "communication", "copies")


@dataclass(frozen=True)
class Breakdown:
    """A stretch of time, cut into parts. All times in µs; the parts add up to ``window``.

    With a device the parts are the device's, all its streams taken together. On a trace
    without one they are those of the host's main thread, and no figure of a device is given.
    """

    where: str
    """``whole``, or the step's mark."""
    device: str
    """``cpu``, ``cuda``, ``rocm``, ``mtia``, ...."""
    start: float
    """From the first span of the trace."""
    window: float
    """Device: first start to last end of its work. Host: the steps, or the whole recording."""
    compute: float
    """At least one compute kernel runs (host: an operator of the main thread, outside loading
    and compiling)."""
    exposed: float
    """A collective runs and no compute kernel: communication that costs time."""
    overlapped: float
    """A collective runs under compute; it is part of ``compute`` too, and not added up."""
    copies: float
    """Copies between host and device, and memory sets, while nothing else runs."""
    idle: float
    """Nothing of the above."""
    loading: float
    """Idle while the main thread fetched the next batch."""
    compiling: float
    """Idle while the main thread was in ``torch.compile``."""
    host: float
    """Idle because the host had not launched the next work (host: Python between operators)."""
    stream: float
    """Idle although the next work was launched: it followed on work of another stream."""
    between: float
    """Idle between two pieces of work of one stream: what the device needs to begin the next."""

    @property
    def busy(self) -> float:
        return self.window - self.idle

    def share(self, part: str) -> float:
        """A part as a fraction of the window, 0 to 1."""
        return float(getattr(self, part)) / self.window if self.window else 0.0

    def __str__(self) -> str:
        if self.device == "cpu":
            labels = {
                "compute": "operators",
                "exposed": "communication waited for",
                "loading": "data",
                "compiling": "compiling",
                "host": "Python and gaps",
            }
        else:
            labels = {
                "compute": "compute",
                "exposed": "exposed communication",
                "copies": "copies",
                "loading": "idle: data",
                "compiling": "idle: compiling",
                "host": "idle: host",
                "stream": "idle: other stream",
                "between": "idle: between kernels",
            }
        shown = [
            f"{label} {100 * self.share(p):.1f} %" for p, label in labels.items() if self.share(p)
        ]
        of = "main thread" if self.device == "cpu" else self.device
        text = f"{self.where}, {self.window / 1e3:,.3f} ms of {of}: {', '.join(shown)}"
        if self.overlapped:
            text += f"; {self.overlapped / 1e3:,.3f} ms of communication under compute"
        return text


def breakdown(trace: Trace) -> Breakdown:
    """The whole recording.

    With a device and several steps the last one is left out, as its work may have been cut off
    by the end of the recording. Without step marks everything counts. On the host all complete
    steps count.
    """
    if trace.has_device:
        which = trace.on_device
        if len(trace.steps) > 1:
            which = which & _before_last(trace)
        if not which.any():
            which = trace.on_device
        return _of_device(trace, which, "whole", None)
    low = trace.steps[0].start if trace.steps else 0.0
    high = trace.steps[-1].end if trace.steps else float(trace.end.max())
    return _of_host(trace, low, high, "whole")


def per_step(trace: Trace) -> list[Breakdown]:
    """One per step mark; empty where there is none.

    With a device a step lasts from the first work it launched to the first work of the next
    step (the last one to its last work), so the windows lie end to end.
    """
    if not trace.steps:
        return []
    if not trace.has_device:
        return [_of_host(trace, s.start, s.end, f"step {s.number}") for s in trace.steps]
    launched_in = np.where(trace.on_device, trace.step_of, -1)
    found, begins = [], {}
    for index in range(len(trace.steps)):
        mine = np.flatnonzero(launched_in == index)
        if len(mine):
            begins[index] = float(trace.start[mine].min())
    order = list(begins)
    for place, index in enumerate(order):
        last = place + 1 == len(order)
        mine = launched_in == index
        high = (
            float(trace.end[mine].max()) if last else max(begins[order[place + 1]], begins[index])
        )
        found.append(
            _of_device(
                trace, trace.on_device, f"step {trace.steps[index].number}", (begins[index], high)
            )
        )
    return found


def _before_last(trace: Trace) -> np.ndarray:
    """Work launched before the last step began."""
    launch = trace.launch_index
    when = np.where(launch >= 0, trace.start[np.maximum(launch, 0)], trace.start)
    return when < trace.steps[-1].start


def _of_device(
    trace: Trace, which: np.ndarray, where: str, window: tuple[float, float] | None
) -> Breakdown:
    parts = [
        trace.covered(which & kind)
        for kind in (trace.device_compute, trace.device_communication, trace.device_copies)
    ]
    busy = trace.covered(which)
    low, high = window or (float(busy[0][0]), float(busy[1][-1]))
    parts = [clip(part, low, high) for part in parts]
    busy = clip(busy, low, high)
    by_kind = lengths(*parts)
    compute = sum(by_kind[cover] for cover in range(8) if cover & 1)
    idle = outside((np.array([low]), np.array([high])), [busy])
    causes = _causes(trace, which, idle)
    return Breakdown(
        where=where,
        device=trace.device,
        start=low,
        window=high - low,
        compute=float(compute),
        exposed=float(by_kind[2] + by_kind[6]),
        overlapped=float(by_kind[3] + by_kind[7]),
        copies=float(by_kind[4]),
        idle=length(idle),
        **{name: length(part) for name, part in causes.items()},
    )


def _causes(trace: Trace, which: np.ndarray, idle: Intervals) -> dict[str, Intervals]:
    """Cut the idle time by what the next work was waiting for."""
    on_main = trace.lane == trace.main
    loading, compiling = (
        both(idle, trace.covered(kind & on_main)) for kind in (trace.loading, trace.compiling)
    )
    compiling = outside(compiling, [loading])
    work = np.flatnonzero(which)
    ends = np.sort(trace.end[work])
    by_end = work[np.argsort(trace.end[work], kind="stable")]
    following = work[np.minimum(np.searchsorted(trace.start[work], idle[1]), len(work) - 1)]
    launch = trace.launch_index[following]
    launched = np.where(launch >= 0, trace.end[np.maximum(launch, 0)], idle[0])
    # until the launching call was done the device had nothing to do; then it was ready to begin
    ready = np.clip(launched, idle[0], idle[1])
    before = by_end[np.maximum(np.searchsorted(ends, idle[0], "right") - 1, 0)]
    other = trace.lane[before] != trace.lane[following]
    claimed = [loading, compiling]

    def left(start: np.ndarray, end: np.ndarray) -> Intervals:
        longer = end > start
        return outside(union(start[longer], end[longer]), claimed)

    return {
        "loading": loading,
        "compiling": compiling,
        "host": left(idle[0], ready),
        "stream": left(ready[other], idle[1][other]),
        "between": left(ready[~other], idle[1][~other]),
    }


def host_parts(trace: Trace) -> dict[str, Intervals]:
    """The main thread's time by what it did; the parts do not overlap.

    ``exposed`` is communication in its own threads (gloo) while the main thread did nothing
    else: it waited.
    """
    on_main = trace.lane == trace.main
    loading = trace.covered(trace.loading & on_main)
    compiling = outside(trace.covered(trace.compiling & on_main), [loading])
    compute = outside(trace.covered(trace.operators & on_main), [loading, compiling])
    communication = trace.covered(trace.host_communication)
    return {
        "loading": loading,
        "compiling": compiling,
        "compute": compute,
        "exposed": outside(communication, [loading, compiling, compute]),
        "overlapped": both(communication, compute),
    }


def _of_host(trace: Trace, low: float, high: float, where: str) -> Breakdown:
    times = {name: length(clip(part, low, high)) for name, part in host_parts(trace).items()}
    host = high - low - sum(times[name] for name in ("loading", "compiling", "compute", "exposed"))
    return Breakdown(
        where=where,
        device="cpu",
        start=low,
        window=high - low,
        compute=times["compute"],
        exposed=times["exposed"],
        overlapped=times["overlapped"],
        copies=0.0,
        idle=times["loading"] + times["compiling"] + host,
        loading=times["loading"],
        compiling=times["compiling"],
        host=host,
        stream=0.0,
        between=0.0,
    )


def kernel_types(trace: Trace) -> dict[str, float]:
    """µs by what ran at once, for example ``compute + communication``; the device's time only.

    The same stretch as :func:`breakdown`. Empty on a trace without a device.
    """
    which = trace.on_device
    if len(trace.steps) > 1 and (which & _before_last(trace)).any():
        which = which & _before_last(trace)
    kinds = (trace.device_compute, trace.device_communication, trace.device_copies)
    by_kind = lengths(*(trace.covered(which & kind) for kind in kinds))
    return {
        " + ".join(name for bit, name in enumerate(KINDS) if cover >> bit & 1): float(time)
        for cover, time in enumerate(by_kind)
        if cover and time
    }


@dataclass(frozen=True)
class Launches:
    """How far ahead of the device the host ran. Times in µs."""

    count: int
    delay: float
    """Median time from a launch on the host to the start of its work."""
    delay_p95: float
    queue: float
    """Median number of launched pieces of work that had not started, counted at each launch."""
    queue_p95: float

    def __str__(self) -> str:
        return (
            f"{self.count:,} launches: delay {self.delay:.1f} µs (95 %: {self.delay_p95:.1f}), "
            f"queue {self.queue:.0f} (95 %: {self.queue_p95:.0f})"
        )


def launches(trace: Trace) -> Launches | None:
    """Launch delay and queue length; None where no launch can be tied to work on a device.

    A queue near 0 says that the device waits for the host; a long one that the host waits.
    """
    work = np.flatnonzero(trace.on_device & (trace.launch_index >= 0))
    if len(work) == 0:
        return None
    launched = trace.start[trace.launch_index[work]]
    started = trace.start[work]
    delay = np.maximum(started - launched, 0.0)
    asked = np.sort(launched)
    queue = np.searchsorted(asked, asked, "right") - np.searchsorted(
        np.sort(started), asked, "right"
    )
    queue = np.maximum(queue - 1, 0)
    return Launches(
        len(work),
        float(np.median(delay)),
        float(np.percentile(delay, 95)),
        float(np.median(queue)),
        float(np.percentile(queue, 95)),
    )
