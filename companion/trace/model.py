"""What a trace holds once it has been read: columns of spans, and what kind each is."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from companion.trace.intervals import Intervals, union

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "Kernel", "Memcpy", "Memset")
"""Categories of work on an accelerator (the capitals are those of old traces)."""
HOST = ("cpu_op", "user_annotation", "python_function", "Operator", "overhead")
ASIDE = (
    "gpu_user_annotation",
    "cuda_sync",
    "cuda_profiler_range",
    "external_correlation",
    "collective_comm",
    "mtia_insight",
    "cpu_instant_event",
    "fwdbwd",
    "ac2g",
)
"""Categories that repeat or describe other spans; no figure counts them."""
MARKS = ("user_annotation", "cpu_op", "Operator")
"""Categories that a ``record_function`` range has on the host."""

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_COLLECTIVE = re.compile(
    r"^(void )?(nccl|rccl|msccl|oneccl|nvshmem)|(one|two)_shot_all_reduce|^multimem_|"
    r"cross_device_reduce"
)
_COMMUNICATION_SPAN = re.compile(r"^(gloo|nccl|mpi|ucc|xccl):")
_COMMUNICATION_OPERATOR = re.compile(
    r"^(c10d|_c10d_functional|c10d_functional)::|^record_param_comms|^torch::distributed::"
)
_COPY = re.compile(r"^(Memcpy|Memset|dma)")
_NO_WORK = re.compile(r"^event_(wait|record)$|Sync")
_OPERATOR = re.compile(
    r"::|^(Torch-Compiled Region|CompiledFunction|## Call CompiledFx|triton_|cpp_fused|graph_)"
)
_GRAPH = re.compile(r"^## Call CompiledFxGraph")
_COMPILING = re.compile(r"dynamo_timed|^backend_compile|^_compile\.")
_DATA = re.compile(r"^enumerate\(DataLoader\)|^data$|dataloader.*next|^dataloader", re.IGNORECASE)


@dataclass(frozen=True)
class Lane:
    """One row of the timeline: a thread of the host, or a stream of the device."""

    pid: int | str
    tid: int | str
    name: str = ""


@dataclass(frozen=True)
class Step:
    """One ``ProfilerStep#N`` mark; µs from the start of the trace."""

    number: int
    start: float
    end: float


@dataclass(eq=False)
class Memory:
    """The ``[memory]`` events, in the order of time; empty where memory was not recorded."""

    time: np.ndarray
    size: np.ndarray
    """Bytes: positive where memory is taken, negative where it is given back."""
    total: np.ndarray
    """Bytes that the allocator counts as allocated after the event."""
    address: np.ndarray
    device: np.ndarray
    """Device type as PyTorch numbers it: 0 is the CPU, 1 CUDA."""
    lane: np.ndarray


@dataclass(eq=False)
class Trace:
    """One rank's trace as columns, in the order of time. Times are µs from its first span."""

    path: Path
    rank: int
    world: int | None
    """Number of ranks in the job; None where the file does not say."""
    backend: str | None
    info: dict
    """What else the file's head says: device properties, process groups, base time."""
    notes: list[str]
    """What the reader found odd, one sentence each."""
    origin: float
    """µs; the file's own time of the first span."""
    names: list[str]
    categories: list[str]
    shapes: list[str]
    """Input shapes as the file spells them; number 0 is "none recorded"."""
    lanes: list[Lane]
    name: np.ndarray
    category: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    correlation: np.ndarray
    """Ties a launch on the host to the work on the device; -1 where there is none."""
    stream: np.ndarray
    """-1 where there is none."""
    shape: np.ndarray
    memory: Memory
    steps: list[Step] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> np.ndarray:
        return self.start + self.duration

    @property
    def begins_at(self) -> float | None:
        """Seconds since 1970 of the first span, where the file tells."""
        base = self.info.get("baseTimeNanoseconds")
        if base is None and self.origin < 1e15:
            return None
        return (base or 0) / 1e9 + self.origin / 1e6

    # ── kinds of span ────────────────────────────────────────────────────────────────────────

    def is_category(self, *wanted: str) -> np.ndarray:
        """Which spans have one of these categories."""
        table = np.array([name in wanted for name in self.categories], bool)
        return table[self.category] if len(table) else np.zeros(len(self), bool)

    def is_named(self, pattern: re.Pattern[str]) -> np.ndarray:
        """Which spans' names the pattern is found in."""
        table = np.array([pattern.search(name) is not None for name in self.names], bool)
        return table[self.name] if len(table) else np.zeros(len(self), bool)

    @cached_property
    def on_device(self) -> np.ndarray:
        """Work on the accelerator; waiting for an event there is no work."""
        return self.is_category(*DEVICE) & ~self.is_named(_NO_WORK)

    @cached_property
    def device_communication(self) -> np.ndarray:
        return self.on_device & self.is_named(_COLLECTIVE)

    @cached_property
    def device_copies(self) -> np.ndarray:
        copies = self.is_category("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
        return self.on_device & (copies | self.is_named(_COPY))

    @cached_property
    def device_compute(self) -> np.ndarray:
        return self.on_device & ~self.device_communication & ~self.device_copies

    @cached_property
    def launches(self) -> np.ndarray:
        """Calls of the accelerator's runtime or driver on the host."""
        table = np.array([c.endswith(("_runtime", "_driver")) for c in self.categories], bool)
        old = self.is_category("Runtime")
        return (table[self.category] if len(table) else old) | old

    @cached_property
    def host_operations(self) -> np.ndarray:
        """Operators on the host, and calls of compiled graphs, which PyTorch marks as ranges."""
        return self.is_category("cpu_op", "Operator") | self.is_named(_GRAPH)

    @cached_property
    def operators(self) -> np.ndarray:
        """Operations on the host that compute: not communication, not a range of the user's."""
        return (
            self.host_operations
            & self.is_named(_OPERATOR)
            & ~self.is_named(_COMMUNICATION_OPERATOR)
            & ~self.is_named(_COMPILING)
        )

    @cached_property
    def host_communication(self) -> np.ndarray:
        """Collectives that the host carries out itself (gloo's threads)."""
        return self.is_category(*MARKS) & self.is_named(_COMMUNICATION_SPAN)

    @cached_property
    def loading(self) -> np.ndarray:
        """Ranges in which the step waits for its data."""
        return self.is_category(*MARKS) & self.is_named(_DATA)

    @cached_property
    def compiling(self) -> np.ndarray:
        """Ranges in which ``torch.compile`` compiles."""
        return ~self.is_category("python_function") & self.is_named(_COMPILING)

    # ── where it ran ─────────────────────────────────────────────────────────────────────────

    @property
    def has_device(self) -> bool:
        return bool(self.on_device.any())

    @cached_property
    def device(self) -> str:
        """``cpu`` where the trace holds no work on a device, else ``cuda``, ``rocm``, ...."""
        if not self.has_device:
            return "cpu"
        present = set(self.categories)
        if "mtia_ccp_events" in present:
            return "mtia"
        if any(category.startswith("xpu") for category in present):
            return "xpu"
        if any(name.startswith("hip") for name in self.names):
            return "rocm"
        if present & {"cuda_runtime", "cuda_driver", "Runtime"}:
            return "cuda"
        return "device"

    @cached_property
    def main(self) -> int:
        """The lane of the main thread: where the step marks are, else where most operators are."""
        marked = np.flatnonzero(self.is_category(*MARKS) & self.is_named(_STEP))
        if len(marked) == 0:
            marked = np.flatnonzero(self.is_category(*HOST) & self.is_named(_OPERATOR))
        if len(marked) == 0:
            marked = np.flatnonzero(self.is_category(*HOST))
        return int(np.bincount(self.lane[marked]).argmax()) if len(marked) else -1

    def covered(self, which: np.ndarray) -> Intervals:
        """The time that these spans cover."""
        return union(self.start[which], self.end[which])

    @cached_property
    def launch_index(self) -> np.ndarray:
        """For each span of the device the number of the span that launched it; else -1."""
        found = np.full(len(self), -1)
        calls = np.flatnonzero(self.launches & (self.correlation >= 0))
        work = np.flatnonzero(self.is_category(*DEVICE) & (self.correlation >= 0))
        if len(calls) and len(work):
            calls = calls[np.argsort(self.correlation[calls], kind="stable")]
            keys = self.correlation[calls]
            at = np.minimum(np.searchsorted(keys, self.correlation[work]), len(keys) - 1)
            known = keys[at] == self.correlation[work]
            found[work[known]] = calls[at[known]]
        return found

    @cached_property
    def step_of(self) -> np.ndarray:
        """For each span the index of its step in ``steps``, -1 before the first.

        Work on the device belongs to the step that launched it, however late it ran.
        """
        begins = np.array([step.start for step in self.steps])
        when = self.start.copy()
        launched = self.launch_index >= 0
        when[launched] = self.start[self.launch_index[launched]]
        return np.searchsorted(begins, when, "right") - 1

    def __str__(self) -> str:
        where = "no work on a device" if not self.has_device else f"device {self.device}"
        steps = f"{len(self.steps)} steps" if self.steps else "no step marks"
        return f"{self.path.name}: rank {self.rank}, {len(self):,} spans, {steps}, {where}"


@dataclass(eq=False)
class Job:
    """The traces of several ranks of one job, by rank."""

    path: Path
    traces: dict[int, Trace]

    def __getitem__(self, rank: int) -> Trace:
        return self.traces[rank]

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.traces.values())

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def notes(self) -> list[str]:
        return [note for trace in self for note in trace.notes]

    def __str__(self) -> str:
        return "\n".join([f"{self.path}: {len(self)} ranks", *(f"  {trace}" for trace in self)])
