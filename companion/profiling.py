"""Record a profile of a loop: which steps, into which files, and what it costs.

    with capture("runs/a", steps=100, schedule=Schedule(wait=5, active=3)) as recording:
        for record in train(state, 100):
            recording.step()
    print(recording)                       # the windows that were written, and what is missing

Recording is sampling by schedule, not something that happens beside the training: the step
that ends a window waits until its trace is written.
"""

import contextlib
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import profiler as torch_profiler
from torch.profiler import ProfilerAction

from companion import measure
from companion.device import synchronize
from companion.measure import Interval, median_interval

LONGEST = 100
"""Steps in a window. A longer trace is slow to write and to read, and says no more."""
LIMIT = 256 << 20
"""Bytes of traces on disk after which a rank records no further window."""


@dataclass(frozen=True)
class Window:
    """Steps that are recorded together; numbered from 0, as in the trace's step marks."""

    number: int
    """1 for the first window."""
    first: int
    last: int
    complete: bool
    """False where the loop ends within it: then it holds fewer steps than planned."""

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Schedule:
    """Which steps of a loop are recorded, in numbers of steps.

    ``skip_first`` once, then ``repeat`` times: ``wait`` (off), ``warmup`` (on, and thrown
    away), ``active`` (recorded). ``repeat=0`` goes on to the end of the loop.

    Raises:
        ValueError: a number is out of range.
    """

    skip_first: int = 0
    wait: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 1

    def __post_init__(self) -> None:
        for name in ("skip_first", "wait", "warmup", "active", "repeat"):
            value, least = getattr(self, name), 1 if name == "active" else 0
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
        if self.active > LONGEST:
            raise ValueError(
                f"active is {self.active}: a window holds at most {LONGEST} steps; record fewer, "
                "or several windows with repeat"
            )

    @property
    def cycle(self) -> int:
        return self.wait + self.warmup + self.active

    def actions(self, steps: int) -> list[str]:
        """What the profiler does in each of ``steps`` steps, as PyTorch's schedule has it.

        One of ``off``, ``warm-up``, ``record`` and ``record and save`` per step.
        """
        names = {
            ProfilerAction.NONE: "off",
            ProfilerAction.WARMUP: "warm-up",
            ProfilerAction.RECORD: "record",
            ProfilerAction.RECORD_AND_SAVE: "record and save",
        }
        plan = self.for_torch()
        return [names[plan(step)] for step in range(steps)]

    def for_torch(self) -> Callable[[int], ProfilerAction]:
        """The same as ``torch.profiler.schedule``."""
        with warnings.catch_warnings():
            # it warns of warmup=0, which `actions` shows
            warnings.simplefilter("ignore")
            return torch_profiler.schedule(
                skip_first=self.skip_first,
                wait=self.wait,
                warmup=self.warmup,
                active=self.active,
                repeat=self.repeat,
            )

    def windows(self, steps: int) -> list[Window]:
        """The windows that a loop of ``steps`` steps gets, the last one maybe cut short."""
        found: list[Window] = []
        first = self.skip_first + self.wait + self.warmup
        while first < steps and (self.repeat == 0 or len(found) < self.repeat):
            last = first + self.active - 1
            found.append(Window(len(found) + 1, first, min(last, steps - 1), last < steps))
            first += self.cycle
        return found


@dataclass(frozen=True)
class Written:
    """A window on disk."""

    window: int
    path: Path
    size: int
    """Bytes."""
    seconds: float
    """How long the loop stood still while it was written."""


@dataclass
class Recording:
    """What :func:`capture` yields. Call :meth:`step` at the end of every step."""

    directory: Path
    """The windows' directories are in it: ``window-1/rank-0.json.gz``."""
    schedule: Schedule
    rank: int
    limit: int
    windows: list[Written] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not as planned, one sentence each."""
    steps: int = 0
    """How often :meth:`step` was called."""
    _profiler: Any = None

    @property
    def files(self) -> list[Path]:
        """This rank's traces, in the order of time."""
        return [written.path for written in self.windows]

    @property
    def full(self) -> bool:
        return sum(written.size for written in self.windows) >= self.limit

    def step(self) -> None:
        """Tell the profiler that a step has ended; writes the window that ends here.

        Raises:
            RuntimeError: the recording is over.
            OSError: the trace cannot be written.
        """
        if self._profiler is None:
            raise RuntimeError("the recording is over: call step() inside its with block only")
        self.steps += 1
        self._profiler.step()

    def path_of(self, window: int) -> Path:
        return self.directory / f"window-{window}" / f"rank-{self.rank}.json.gz"

    def _action(self, step: int) -> ProfilerAction:
        return ProfilerAction.NONE if self.full else self._plan(step)

    def _write(self, profiler: Any) -> None:
        start = time.perf_counter()
        number = len(self.windows) + 1
        path = self.path_of(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        # a trace that was stopped half-way must not look like a whole one
        part = path.with_name(f".{path.name.removesuffix('.json.gz')}-part.json.gz")
        profiler.export_chrome_trace(str(part))
        if not part.exists():
            raise OSError(f"{path}: the profiler could not write its trace; is the disk full?")
        os.replace(part, path)
        seconds = time.perf_counter() - start
        self.windows.append(Written(number, path, path.stat().st_size, seconds))

    def __post_init__(self) -> None:
        self._plan = self.schedule.for_torch()

    def __str__(self) -> str:
        lines = [
            f"window {w.window}: {w.path} ({w.size / 1e6:.2f} MB, written in {w.seconds:.2f} s)"
            for w in self.windows
        ] or ["nothing was recorded"]
        return "\n".join([*lines, *self.notes])


class _Ranges:
    """Makes each of the loop's phases a range in the trace."""

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch_profiler.record_function(name)


_open = False


@contextlib.contextmanager
def capture(
    directory: str | Path,
    schedule: Schedule | None = None,
    *,
    steps: int | None = None,
    shapes: bool = False,
    memory: bool = False,
    stacks: bool = False,
    limit: int = LIMIT,
) -> Iterator[Recording]:
    """Record windows of the loop inside, as ``schedule`` says, on the CPU and the device.

    Each window of each rank is one file, ``directory/traces/window-W/rank-R.json.gz``. The
    loop's phases are ranges in it. The profiler is always stopped, whatever the body raises.
    ``shapes``, ``memory`` and ``stacks`` distort times: ask for them when you need them.

    Args:
        steps: length of the loop, to hold the schedule against before it begins.
        limit: bytes; once a rank's traces are as large, it records no further window.

    Raises:
        ValueError: the loop is too short for anything to be recorded.
        FileExistsError: an earlier run's traces are there; they are never overwritten.
        RuntimeError: a profiler, or ``measure.phases()``, is open already.
    """
    global _open
    schedule = schedule or Schedule()
    recording = Recording(Path(directory) / "traces", schedule, _rank(), limit)
    if _open or torch.autograd._profiler_enabled():
        raise RuntimeError(
            "a profiler is running already and would lose its data: leave its with block first "
            "(in a notebook: interrupt that cell, or restart the kernel)"
        )
    if steps is not None:
        _compare_before(recording, steps)
    if recording.path_of(1).exists():
        raise FileExistsError(
            f"{recording.path_of(1)} is of an earlier run and is not overwritten: give another "
            "directory, for example profiling.new_directory()"
        )
    recording._profiler = torch_profiler.profile(
        activities=list(torch_profiler.supported_activities()),
        schedule=recording._action,
        on_trace_ready=recording._write,
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=stacks,
        acc_events=False,
    )
    failed = True
    try:
        with measure.recording(_Ranges()):
            _open = True
            recording._profiler.start()
            yield recording
        failed = False
    finally:
        profiler, recording._profiler, _open = recording._profiler, None, False
        # a second error here would hide the one that ends the loop
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            profiler.stop()
    _compare_after(recording, steps)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def new_directory(under: str | Path = "runs/profile") -> Path:
    """The first of ``under/1``, ``under/2``, ... that is not there yet; it is made.

    For one process. Ranks must be given one directory from outside.
    """
    number = 1
    while True:
        path = Path(under) / str(number)
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


def _compare_before(recording: Recording, steps: int) -> None:
    schedule = recording.schedule
    windows = schedule.windows(steps)
    if not windows:
        first = schedule.skip_first + schedule.wait + schedule.warmup
        raise ValueError(
            f"nothing would be recorded: the loop has {steps} steps and the first {first} are "
            "skipped, waited for or warm-up; lengthen the loop or shorten the schedule"
        )
    if not windows[-1].complete:
        cut = windows[-1]
        _say(
            recording,
            f"the loop of {steps} steps ends within window {cut.number}, which gets {cut.steps} "
            f"of {schedule.active} steps",
        )
    if len(windows) < schedule.repeat:
        _say(
            recording,
            f"the loop of {steps} steps leaves time for {len(windows)} of {schedule.repeat} "
            "windows",
        )


def _compare_after(recording: Recording, steps: int | None) -> None:
    planned = recording.schedule.windows(recording.steps if steps is None else steps)
    if recording.steps == 0:
        _say(
            recording,
            "nothing was recorded: step() was never called; call it at the end of every step",
        )
    elif steps is not None and recording.steps != steps:
        _say(
            recording,
            f"the loop was to have {steps} steps; step() was called {recording.steps} times",
        )
    if recording.full and len(recording.windows) < len(planned):
        _say(
            recording,
            f"{len(recording.windows)} of {len(planned)} windows were recorded: the traces have "
            f"reached {recording.limit / 1e6:.0f} MB",
        )
    elif recording.steps and len(recording.windows) < max(len(planned), 1):
        wanted = recording.schedule.skip_first + recording.schedule.cycle
        _say(
            recording,
            f"{len(recording.windows) or 'nothing'} of {max(len(planned), 1)} windows was "
            f"recorded: the first one ends with step {wanted}, and step() was called "
            f"{recording.steps} times",
        )


def _say(recording: Recording, sentence: str) -> None:
    recording.notes.append(sentence)
    warnings.warn(sentence, stacklevel=4)


# ── what recording costs ─────────────────────────────────────────────────────────────────────


SETTINGS: dict[str, dict[str, Any]] = {
    "times only": {},
    "shapes": {"record_shapes": True},
    "memory": {"profile_memory": True},
    "stacks": {"with_stack": True},
    "all of them": {"record_shapes": True, "profile_memory": True, "with_stack": True},
}


def overhead(
    step: Callable[[], Any], device: torch.device, rounds: int = 8, calls: int = 3
) -> dict[str, Interval]:
    """How many times longer a step takes while it is recorded: ratio, low, high per setting.

    Every round times ``calls`` steps bare and under each setting, in a shuffled order. The
    ratio is the median over the rounds with a 95 % bootstrap interval. Starting the profiler
    and writing a trace are not counted.
    """

    def seconds(settings: dict[str, Any] | None) -> float:
        session: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if settings is not None:
            session = torch_profiler.profile(
                activities=list(torch_profiler.supported_activities()), **settings
            )
        with session:
            step()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                step()
            synchronize(device)
            return time.perf_counter() - start

    order = random.Random(0)
    ratios: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        names: list[str | None] = [None, *SETTINGS]
        order.shuffle(names)
        took = {name: seconds(None if name is None else SETTINGS[name]) for name in names}
        for name in SETTINGS:
            ratios[name].append(took[name] / took[None])
    return {name: median_interval(values) for name, values in ratios.items()}
