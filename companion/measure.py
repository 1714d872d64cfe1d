"""Honest time measurement: a steady state, A against B with an interval, phases of a step.

Every interval is a 95 % bootstrap interval with a fixed seed. The device is synchronised
wherever a clock is read. The warm-up is detected, not assumed, and never counted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from companion.device import synchronize

STEP_ENDS_WITH = "optimizer"
"""The phase whose end ends a step."""
SHORTEST_CHUNK = 1e-3
"""Seconds. Below it one call is lost in the clock's noise, so several are timed together."""

Interval = tuple[float, float, float]
"""Estimate, low, high."""


# ── Where a step's time goes ─────────────────────────────────────────────────────────────────


class Recorder(Protocol):
    """What :func:`recording` takes."""

    def range(self, name: str) -> AbstractContextManager[Any]: ...


R = TypeVar("R", bound=Recorder)
_NOTHING: AbstractContextManager[None] = nullcontext()
_recorder: Recorder | None = None


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a phase of the step: ``with phase("forward"): ...``.

    The loop's names are ``data``, ``forward``, ``backward`` and ``optimizer``. It does nothing,
    in a fraction of a microsecond, unless :func:`phases` is open. A phase inside a phase counts
    as the outer one.
    """
    return _NOTHING if _recorder is None else _recorder.range(name)


@dataclass(frozen=True)
class PhaseShare:
    """One phase of a step. ``total`` and ``median`` (of a step) in seconds."""

    total: float
    median: float
    share: float
    """Of the whole time, 0 to 1; the shares of all phases and ``rest`` add up to 1."""


@dataclass
class PhaseTimes:
    """What :func:`phases` yields: the seconds of each phase in each complete step.

    A step lasts from the end of the one before it (the first one from its first phase) to the
    end of its ``optimizer`` phase. ``rest`` is the part of it outside all phases: the loop's
    own Python, and the caller's loop body.
    """

    device: torch.device
    steps: list[dict[str, float]] = field(default_factory=list)
    _current: dict[str, float] = field(default_factory=dict)
    _since: float | None = None
    _inside: bool = False

    def range(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING if self._inside else self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._inside = True
        try:
            # at both ends: work that is still queued belongs to the phase that queued it
            synchronize(self.device)
            start = perf_counter()
            if self._since is None:
                self._since = start
            yield
            synchronize(self.device)
            end = perf_counter()
        finally:
            self._inside = False
        self._current[name] = self._current.get(name, 0.0) + end - start
        if name == STEP_ENDS_WITH:
            rest = end - self._since - sum(self._current.values())
            self.steps.append({**self._current, "rest": rest})
            self._current, self._since = {}, end

    @property
    def warmup(self) -> int:
        """Leading steps that are left out of :meth:`summary`."""
        return warmup_length([sum(step.values()) for step in self.steps])

    def summary(self) -> dict[str, PhaseShare]:
        """Each phase in the order of the step, ``rest`` last, without the warm-up.

        Raises:
            ValueError: no complete step is left after the warm-up.
        """
        kept = self.steps[self.warmup :]
        if not kept:
            raise ValueError(
                f"phases() saw {len(self.steps)} complete steps and none is left after the "
                "warm-up: run more steps inside it"
            )
        names = dict.fromkeys(name for step in kept for name in step if name != "rest")
        whole = sum(sum(step.values()) for step in kept)
        result = {}
        for name in [*names, "rest"]:
            seconds = [step.get(name, 0.0) for step in kept]
            result[name] = PhaseShare(sum(seconds), float(np.median(seconds)), sum(seconds) / whole)
        return result

    def as_dict(self) -> dict[str, Any]:
        return {name: asdict(part) for name, part in self.summary().items()}

    def __str__(self) -> str:
        parts = self.summary().items()
        text = ", ".join(f"{n} {_seconds(p.median)} ({100 * p.share:.0f} %)" for n, p in parts)
        return f"{text}; median of {len(self.steps) - self.warmup} steps"


@contextmanager
def phases(device: torch.device) -> Iterator[PhaseTimes]:
    """Measure the phases of the steps that run inside.

    While it is open the device is synchronised at both ends of every phase, so a GPU's step is
    slower than without: use it to see shares, and :func:`throughput` to see speed.

    Raises:
        RuntimeError: it is open already.
    """
    with recording(PhaseTimes(device)) as times:
        yield times


@contextmanager
def recording(recorder: R) -> Iterator[R]:
    """Let ``recorder.range(name)``, a context manager, stand for :func:`phase` in here.

    Raises:
        RuntimeError: there is a recorder already.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError(
            "phases() or a profiler is already open: leave its with block before another one"
        )
    _recorder = recorder
    try:
        yield recorder
    finally:
        _recorder = None


# ── Speed ────────────────────────────────────────────────────────────────────────────────────


def warmup_length(seconds: Sequence[float] | np.ndarray) -> int:
    """How many leading calls are warm-up: at least 1, at most half (of one call: that one).

    The median of the later half is the steady state. The warm-up ends at the first call which,
    alone and in the median with the four after it, is within the noise of the later half.
    """
    times = np.asarray(seconds, dtype=float)
    later = times[(len(times) + 1) // 2 :]
    if not len(later):
        return 1
    steady = np.median(later)
    # 1.4826 makes the median absolute deviation a standard deviation where noise is normal
    noise = max(3 * 1.4826 * float(np.median(np.abs(later - steady))), 0.01 * float(steady))
    last = max(1, len(times) // 2)
    for index in range(1, last):
        near = times[index], np.median(times[index : index + 5])
        if all(abs(value - steady) <= noise for value in near):
            return index
    return last


def median_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Median of the values with its 95 % bootstrap interval.

    Raises:
        ValueError: there are no values.
    """
    values = np.asarray(values, dtype=float)
    if not len(values):
        raise ValueError("there is nothing to take a median of: give at least one value")
    return _bounds(np.median(values), np.median(values[_resampled(len(values))], axis=1))


@dataclass(frozen=True)
class Result:
    """A measurement; prints itself with units."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in seconds."""
        return asdict(self)


@dataclass(frozen=True)
class Throughput(Result):
    """Samples per second over the steps after the warm-up, with its interval."""

    per_second: float
    step_seconds: float
    """Median."""
    low: float
    high: float
    steps: int
    """Timed, without the warm-up."""
    warmup: int
    unit: str = "samples"
    """What is counted."""

    def __str__(self) -> str:
        return (
            f"{self.per_second:,.1f} {self.unit}/s [{self.low:,.1f}, {self.high:,.1f}], "
            f"{_seconds(self.step_seconds)} a step "
            f"(median of {self.steps} steps after {self.warmup} of warm-up)"
        )


def throughput(
    seconds: Sequence[float],
    samples: int | Sequence[int],
    warmup: int | None = None,
    unit: str = "samples",
) -> Throughput:
    """Samples per second from the seconds of each step and the samples really in it.

    ``samples`` is one number for all steps or one for each, so that a short last batch counts
    as what it is; ``unit`` says what they are. Without ``warmup`` it is detected.

    Raises:
        ValueError: no step is left after the warm-up, the lengths differ, or a time is not
            above 0.
    """
    times = np.asarray(seconds, dtype=float)
    counts = np.full(len(times), samples) if isinstance(samples, int) else np.asarray(samples)
    if len(counts) != len(times):
        raise ValueError(
            f"there are {len(times)} step times and {len(counts)} sample counts: "
            "give one count for each step"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError("a step time is not a number above 0: measure again")
    warmup = warmup_length(times) if warmup is None else warmup
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}: give 0 or more")
    if warmup >= len(times):
        raise ValueError(
            f"no step is left: {len(times)} timed, {warmup} of them warm-up; time more steps"
        )
    times, counts = times[warmup:], counts[warmup:]
    again = _resampled(len(times))
    rate, low, high = _bounds(
        counts.sum() / times.sum(), counts[again].sum(axis=1) / times[again].sum(axis=1)
    )
    return Throughput(rate, float(np.median(times)), low, high, len(times), warmup, unit)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    calls: int | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Seconds per call of each function in each round, the warm-up rounds left out.

    A round times one chunk of ``calls`` calls of every function, in an order shuffled anew each
    round: row ``i`` of all the results was measured under the same conditions. Without
    ``calls``, a chunk is as many calls as last a millisecond.

    Raises:
        ValueError: fewer than 2 rounds, so that none would be left after the warm-up.
    """
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: give at least 2, the first is always warm-up")

    def chunk(function: Callable[[], object], calls: int) -> float:
        # the device is idle here: the chunk before waited for it, and the first is not counted
        start = perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (perf_counter() - start) / calls

    # the second call sizes the chunks: the first may compile, allocate or read from disk
    seconds = [[chunk(function, 1) for _ in range(2)][1] for function in functions.values()]
    if calls is None:
        calls = max(1, math.ceil(SHORTEST_CHUNK / max(min(seconds), 1e-9)))
    order = np.random.default_rng(seed)
    names = list(functions)
    times = {name: np.empty(rounds) for name in names}
    for round_ in range(rounds):
        for index in order.permutation(len(names)):
            times[names[index]][round_] = chunk(functions[names[index]], calls)
    warmup = max(warmup_length(values) for values in times.values())
    return {name: values[warmup:] for name, values in times.items()}


@dataclass(frozen=True)
class Timing(Result):
    """Median seconds of a call, with its interval."""

    seconds: float
    low: float
    high: float
    rounds: int
    """Timed, without the warm-up."""
    warmup: int

    def __str__(self) -> str:
        low, high = _seconds(self.low), _seconds(self.high)
        return f"{_seconds(self.seconds)} [{low}, {high}] (median of {self.rounds} rounds)"


def time_calls(function: Callable[[], object], device: torch.device, rounds: int = 30) -> Timing:
    """Time one function in the steady state; see :func:`interleaved` for what a round is."""
    kept = interleaved({"function": function}, device, rounds)["function"]
    return Timing(*median_interval(kept), len(kept), rounds - len(kept))


@dataclass(frozen=True)
class Comparison(Result):
    """Time of ``a`` divided by time of ``b``: the median over paired rounds, with interval."""

    names: tuple[str, str]
    ratio: float
    low: float
    high: float
    a_seconds: float
    """Median of a call."""
    b_seconds: float
    rounds: int
    """Timed, without the warm-up."""
    warmup: int

    @property
    def shown(self) -> bool:
        """Whether a difference was shown: the interval leaves out 1."""
        return not self.low <= 1 <= self.high

    @property
    def verdict(self) -> str:
        a, b = self.names
        interval = f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"
        if not self.shown:
            return f"no difference shown between {a} and {b}: {interval}"
        return f"{a} takes {interval} times as long as {b}"

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "shown": self.shown, "verdict": self.verdict}

    def __str__(self) -> str:
        a, b = self.names
        return (
            f"{self.verdict}\n{a} {_seconds(self.a_seconds)}, {b} {_seconds(self.b_seconds)} "
            f"a call (medians of {self.rounds} paired rounds after {self.warmup} of warm-up)"
        )


def compare(
    a: Callable[[], object],
    b: Callable[[], object],
    device: torch.device,
    rounds: int = 30,
    names: tuple[str, str] = ("a", "b"),
    seed: int = 0,
) -> Comparison:
    """Time ``a`` against ``b``, paired round by round, so that a slow drift cancels.

    The ratio is a's time over b's: above 1, ``b`` is the faster. See :func:`interleaved` for
    what a round is and what is raised.
    """
    kept = interleaved({"a": a, "b": b}, device, rounds, seed=seed)
    ratio, low, high = median_interval(kept["a"] / kept["b"])
    a_seconds, b_seconds = (float(np.median(kept[name])) for name in "ab")
    left = len(kept["a"])
    return Comparison(names, ratio, low, high, a_seconds, b_seconds, left, rounds - left)


def same_batch(batches: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """Batches that cost nothing: the first one of each size, again and again.

    A loop on it is the bound that no data path can beat; :func:`compare` with the real batches
    shows what the data path costs.
    """
    kept: dict[int, Any] = {}

    def repeated(first: int, count: int) -> Any:
        if count not in kept:
            kept[count] = batches(0, count)
        return kept[count]

    return repeated


def _resampled(size: int, times: int = 2000) -> np.ndarray:
    return np.random.default_rng(0).integers(size, size=(times, size))


def _bounds(estimate: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(estimate), float(low), float(high)


def _seconds(value: float) -> str:
    for limit, unit, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6)):
        if abs(value) >= limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
