"""From a trace to a decision: one verdict, why, and what to do next.

The thresholds are fixed and stand here, each with its reason. Shares are medians over the
recorded steps, so one step that the machine disturbed does not decide.
"""

from dataclasses import dataclass, field

import numpy as np

from companion.trace.breakdown import Breakdown, breakdown, host_parts, launches, per_step
from companion.trace.intervals import Intervals, clip, length, outside
from companion.trace.model import Job, Trace
from companion.trace.nesting import top_level
from companion.trace.operators import Operation, categories, top
from companion.trace.ranks import stragglers
from companion.trace.shapes import shapes

LOADING = 0.15
"""Of the step spent waiting for data. A good loader costs 1 or 2 %; 15 % is worth a worker."""
COMMUNICATION = 0.15
"""Of the step in communication that nothing hides. Well overlapped it is below 5 %."""
COMPILING = 0.10
"""Of the recorded time in torch.compile, in two or more steps: a warm run has none at all."""
HOST_DEVICE = 0.20
"""Of the step that the device is idle because nothing had been launched."""
HOST_CPU = 0.50
"""Of the step, on a CPU, in Python and in operators too short to be worth their call. An
ordinary small model has 5 to 30 %; a Python loop over tiny operators 80 % and more."""
SHORT = 50.0
"""µs. An operator that takes less mostly pays for its call: dispatch alone is 1 to 5 µs, more
while it is recorded."""
UNFUSED = 0.60
"""Of the computing in operations that move memory more than they calculate. A transformer
that is as it should be has 20 to 45 %."""
BUSY = 0.60
"""Of the step computing: with less, and no cause found, there is not enough evidence."""
LATE = 0.10
"""Of the recorded time that the other ranks wait for one: the median wait, times the number of
collectives."""
LAST = 0.90
"""Of the collectives that a rank must have come last to. Of two equal ranks each has half."""

HEAVY = ("matmul", "convolution", "attention", "communication", "fused", "other")
"""Kinds of work that fusing would not help."""

ACTIONS = {
    "data": "Load ahead: more DataLoader workers, prefetch, pin_memory on a GPU; then make one "
    "sample cheaper (decode once, cache, move work to the device).",
    "cpu": "Give the device more per call: replace Python loops in the step by operations on "
    "whole tensors, raise the batch, or torch.compile the step.",
    "shapes": "Keep the shapes still: sort or bucket by length, pad to a few sizes, or mark the "
    "dimension as dynamic (torch._dynamo.mark_dynamic, dynamic=True).",
    "communication": "Hide or shrink it: larger buckets, fewer synchronisations (no_sync while "
    "accumulating), a larger batch per rank, lower precision; mend a rank that is late first.",
    "kernels": "Fuse: torch.compile, or the function of torch.nn.functional that does it in one "
    "piece (scaled_dot_product_attention, gelu, layer_norm); then lower precision.",
    "healthy": "Nothing stands out. To go faster: lower precision, a larger batch, or a better "
    "algorithm for the top operation; measure each.",
    "unclear": "Record again: at least three steps after a warm-up, with ranges (companion's "
    "capture), the CPU and the device.",
}
TITLES = {
    "data": "The step waits for its data",
    "cpu": "The CPU cannot keep up",
    "shapes": "Changing shapes make torch.compile compile again",
    "communication": "Communication is the limit",
    "kernels": "Unfused operations are the limit",
    "healthy": "Nothing is wrong",
    "unclear": "Not enough evidence",
}


@dataclass(frozen=True)
class Diagnosis:
    """One verdict on a recording."""

    verdict: str
    """``data``, ``cpu``, ``shapes``, ``communication``, ``kernels``, ``healthy`` or ``unclear``."""
    why: list[str]
    """The figures that it rests on, one sentence each."""
    action: str
    """What to do next."""
    at: tuple[float, float] | None = None
    """Where it is seen best in the timeline: start and end, µs from the first span."""
    also: list[str] = field(default_factory=list)
    """Other verdicts whose threshold is passed too, by size."""
    rank: int | None = None
    """The rank that the others wait for, where there is one; else whose trace it is."""

    @property
    def title(self) -> str:
        return TITLES[self.verdict]

    def __str__(self) -> str:
        lines = [f"{self.title}.", *(f"  {sentence}" for sentence in self.why)]
        if self.at:
            lines.append(f"  See {self.at[0] / 1e3:,.3f} to {self.at[1] / 1e3:,.3f} ms.")
        if self.also:
            lines.append(f"  Also: {'; '.join(TITLES[v] for v in self.also)}.")
        return "\n".join([*lines, f"  Next: {self.action}"])


def diagnose(trace: Trace | Job) -> Diagnosis:
    """Which of the guide's situations this is: see :attr:`Diagnosis.verdict`.

    For several ranks: whether the others wait for one of them, else the verdict of the rank
    with the longest step.
    """
    return _of_job(trace) if isinstance(trace, Job) else _of_one(trace)


def _of_one(trace: Trace) -> Diagnosis:
    parts = per_step(trace)
    if trace.has_device and len(parts) > 2:
        # the last step's work may have been cut off
        parts = parts[:-1]
    whole = breakdown(trace)
    parts = parts or [whole]
    if (missing := _too_little(trace, whole)) is not None:
        return Diagnosis("unclear", [missing], ACTIONS["unclear"], rank=trace.rank)

    def share(part: str) -> float:
        return float(np.median([step.share(part) for step in parts]))

    found: dict[str, tuple[float, str, tuple[float, float] | None]] = {}
    churn = shapes(trace)
    compiling = churn.compile_time / max(float(trace.end.max()), 1e-9)
    if compiling >= COMPILING and len(churn.compiled_in) > 1:
        steps = ", ".join(str(number) for number in churn.compiled_in[:6])
        why = (
            f"{churn.recompiles} compilations while recording, in steps {steps}: "
            f"{100 * compiling:.0f} % of the time (limit {100 * COMPILING:.0f} %)."
        )
        found["shapes"] = (compiling, why, _longest(trace.covered(trace.compiling)))
    if (loading := share("loading")) >= LOADING:
        why = (
            f"{100 * loading:.0f} % of a step passes waiting for the next batch "
            f"(limit {100 * LOADING:.0f} %)."
        )
        found["data"] = (loading, why, _longest(trace.covered(trace.loading)))
    if (exposed := share("exposed")) >= COMMUNICATION:
        why = (
            f"{100 * exposed:.0f} % of a step is communication with nothing computed meanwhile "
            f"(limit {100 * COMMUNICATION:.0f} %)."
        )
        kind = trace.device_communication if trace.has_device else trace.host_communication
        found["communication"] = (exposed, why, _longest(trace.covered(kind)))
    if (host := _host(trace, parts, share("host"))) is not None:
        found["cpu"] = host
    if found:
        order = sorted(found, key=lambda verdict: -found[verdict][0])
        if "shapes" in found:
            # while it compiles, everything else waits: mend that first
            order = ["shapes", *(verdict for verdict in order if verdict != "shapes")]
        first = order[0]
        _, why, at = found[first]
        also = [found[verdict][1] for verdict in order[1:]]
        return Diagnosis(first, [why, *also], ACTIONS[first], at, order[1:], trace.rank)
    return _of_computing(trace, share("compute"))


def _too_little(trace: Trace, whole: Breakdown) -> str | None:
    work = trace.on_device if trace.has_device else trace.operators
    count = int(work.sum())
    if count < 20:
        kind = "pieces of work on the device" if trace.has_device else "operators"
        return f"{trace.path.name} holds {count} {kind}; that is too little to judge."
    if len(trace.steps) == 1:
        step = trace.steps[0]
        if step.end - step.start < 0.5 * whole.window and not trace.has_device:
            return f"{trace.path.name} holds one step only, and most of it lies outside."
    return None


def _host(
    trace: Trace, parts: list[Breakdown], share: float
) -> tuple[float, str, tuple[float, float] | None] | None:
    """Is the host the limit? Share, why and where; None where it is not."""
    if trace.has_device:
        if share < HOST_DEVICE:
            return None
        ahead = launches(trace)
        queue = f"; the queue of launched work is {ahead.queue:.0f} long" if ahead else ""
        why = (
            f"The device is idle {100 * share:.0f} % of a step because nothing had been "
            f"launched (limit {100 * HOST_DEVICE:.0f} %){queue}."
        )
        busy = trace.covered(trace.on_device)
        return share, why, _longest((busy[1][:-1], busy[0][1:]))
    on_main = trace.operators & (trace.lane == trace.main)
    calls = top_level(trace, on_main)
    short = calls[_short(trace, calls)]
    time = trace.covered(np.isin(np.arange(len(trace)), short))
    # what is loading or compiling is accounted for there
    others = host_parts(trace)
    time = outside(time, [others["loading"], others["compiling"]])
    small = float(
        np.median([length(clip(time, p.start, p.start + p.window)) / p.window for p in parts])
    )
    if share + small < HOST_CPU:
        return None
    each = len(short) / max(len(trace.steps), 1)
    why = (
        f"{100 * share:.0f} % of a step is Python between operators and {100 * small:.0f} % "
        f"operators shorter than {SHORT:.0f} µs, about {each:,.0f} of them a step (limit "
        f"{100 * HOST_CPU:.0f} % together)."
    )
    step = parts[len(parts) // 2]
    return share + small, why, (step.start, step.start + step.window)


def _short(trace: Trace, calls: np.ndarray) -> np.ndarray:
    """Which of these operators are short, or would be were the thread not put aside in them.

    A busy machine stops a thread in the middle of an operator of 5 µs for 4 ms. So all calls
    of an operator count as short where nine in ten are.
    """
    duration, name = trace.duration[calls], trace.name[calls]
    by_name, index = np.unique(name, return_inverse=True)
    most = [np.percentile(duration[index == i], 90) < SHORT for i in range(len(by_name))]
    return (duration < SHORT) | np.array(most, bool)[index]


def _of_computing(trace: Trace, compute: float) -> Diagnosis:
    """No waiting stands out: is what is computed as it should be?"""
    if compute < BUSY:
        why = (
            f"{100 * compute:.0f} % of a step is computing, and nothing recorded explains the rest."
        )
        return Diagnosis("unclear", [why], ACTIONS["unclear"], rank=trace.rank)
    kinds = categories(trace)
    whole = sum(kinds.values()) or 1.0
    light = sum(time for kind, time in kinds.items() if kind not in HEAVY) / whole
    listed = ", ".join(
        f"{kind} {100 * time / whole:.0f} %" for kind, time in list(kinds.items())[:4]
    )
    busiest = f"{100 * compute:.0f} % of a step is computing: {listed}."
    if light >= UNFUSED:
        operation = next((op for op in top(trace, None) if op.kind not in HEAVY), None)
        reasons = [
            busiest,
            f"{100 * light:.0f} % of it moves memory more than it calculates (limit "
            f"{100 * UNFUSED:.0f} %).",
        ]
        if operation:
            reasons.append(_named(operation))
        return Diagnosis(
            "kernels",
            reasons,
            ACTIONS["kernels"],
            _longest_of(trace, operation.name) if operation else None,
            rank=trace.rank,
        )
    return Diagnosis("healthy", [busiest], ACTIONS["healthy"], rank=trace.rank)


def _named(operation: Operation) -> str:
    place = f", most of it from {operation.place}" if operation.place else ""
    return (
        f"The longest of these is {operation.name[:80]}: {operation.calls:,} calls, "
        f"{operation.self_time / 1e3:,.1f} ms{place}."
    )


def _longest(of: Intervals) -> tuple[float, float] | None:
    if len(of[0]) == 0:
        return None
    index = int((of[1] - of[0]).argmax())
    return float(of[0][index]), float(of[1][index])


def _longest_of(trace: Trace, name: str) -> tuple[float, float]:
    spans = np.flatnonzero(trace.name == trace.names.index(name))
    index = spans[trace.duration[spans].argmax()]
    return float(trace.start[index]), float(trace.end[index])


def _of_job(job: Job) -> Diagnosis:
    alone = {trace.rank: _of_one(trace) for trace in job}
    windows = {trace.rank: breakdown(trace).window for trace in job}
    if len(job) > 1:
        worst = stragglers(job)[0]
        others = len(job) - 1
        window = max(float(np.median(list(windows.values()))), 1e-9)
        late = worst.typical * worst.collectives / window
        if late >= LATE and worst.last >= LAST:
            own = alone[worst.rank]
            why = [
                f"Rank {worst.rank} comes last to {100 * worst.last:.0f} % of {worst.collectives} "
                f"collectives, typically {worst.typical / 1e3:,.1f} ms after the first rank: "
                f"{100 * late:.0f} % of the time (limit {100 * LATE:.0f} %), in which "
                f"{others} other rank{'s wait' if others > 1 else ' waits'}.",
                f"On rank {worst.rank} itself: {own.title}. {own.why[0]}",
            ]
            also = (
                [own.verdict] if own.verdict not in ("communication", "healthy", "unclear") else []
            )
            return Diagnosis(
                "communication",
                why,
                f"Mend rank {worst.rank} first. "
                + (ACTIONS[own.verdict] if also else ACTIONS["communication"]),
                own.at,
                also,
                worst.rank,
            )
    slowest = max(windows, key=lambda rank: windows[rank])
    return alone[slowest]
