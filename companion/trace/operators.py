"""Which operations took the time, with which shapes, called from where; before and after."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from companion.trace.model import HOST, MARKS, Trace

KIND_OF_WORK: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|gloo:|c10d|all_?reduce|all_?gather|reduce_?scatter"),
    ("copy", r"^Memcpy|^Memset|^dma|aten::(copy_|_to_copy|to|clone|contiguous)$"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv|cudnn_\w*scudnn|wgrad|dgrad|fprop|nchwTo|nhwcTo"),
    (
        "matmul",
        r"(?<!fb)gemm|cutlass|cublas|Cijk_|aten::(mm|bmm|addmm|baddbmm|matmul|linear)$|mkldnn_linear",
    ),
    ("fused", r"^triton_|cpp_fused|Torch-Compiled Region|CompiledFunction"),
    ("optimizer", r"multi_tensor|_fused_(adam|sgd)|_foreach_|FusedAdam|FusedSgd"),
    ("normalisation", r"layer_?norm|batch_?norm|rms_?norm|group_?norm|bn_[fb]w"),
    ("softmax and loss", r"softmax|nll_loss|cross_entropy"),
    ("index and embedding", r"index|embedding|gather|scatter|permute_2D"),
    ("reduction", r"reduce|aten::(sum|mean|max|min|amax|norm|var|std|argmax|cumsum)"),
    (
        "elementwise",
        r"elementwise|CatArray|aten::(add|sub|mul|div|pow|exp|log|tanh|sigmoid|relu|gelu|silu|"
        r"neg|sqrt|rsqrt|erf|where|clamp|maximum|minimum|fill|zero|threshold|sin|cos|abs|"
        r"masked_fill|dropout|bernoulli|addc|lerp|cat|stack)",
    ),
)
"""Kinds of work and what their names hold; the first that fits counts."""
_KINDS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KIND_OF_WORK]
_PLACE = re.compile(r"^(.+\.py)\((\d+)\): (.+)$")
_NO_PLACE = re.compile(r"::|ProfilerStep|Backward\d*$|^triton_|^gloo:|^nccl:")
_LIBRARY = re.compile(r"site-packages|dist-packages|[/\\]torch[/\\]|^torch[/\\]|^<|lib[/\\]python")


def kind_of_work(name: str) -> str:
    """``matmul``, ``attention``, ``elementwise``, ... ; ``other`` where the name tells nothing."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


# ── nesting ──────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Nesting:
    """Of the host's spans: what each lies in, and its time without what lies in it."""

    parent: np.ndarray
    """Number of the enclosing span of the same thread, -1 at the top and for other spans."""
    self_time: np.ndarray
    """µs; 0 for spans that are not the host's."""
    depth: int
    """The deepest nesting."""
    crossing: int
    """Spans that begin inside another and end outside it, which no call stack can do."""


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
    inside = [0.0] * len(numbers)
    stack: list[int] = []
    of_lane, depth, crossing = None, 0, 0
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
            if above >= 0:
                parent[numbers[at]] = numbers[above]
                inside[above] += min(end, start[above] + duration[above]) - begin
        stack.append(at)
        depth = max(depth, len(stack))
    self_time = np.zeros(len(trace))
    self_time[which] = np.maximum(trace.duration[which] - np.array(inside), 0.0)
    trace.__dict__["_nesting"] = found = Nesting(parent, self_time, depth, crossing)
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


# ── operators ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Operation:
    """One operation over the whole recording. Times in µs."""

    name: str
    kind: str
    calls: int
    self_time: float
    """Host: its own time without the operations in it. Device: its kernels' time."""
    total_time: float
    """With the operations in it."""
    share: float
    """Of the self time of all operations listed, 0 to 1."""
    shapes: str
    """The input shapes that took most time; empty where shapes were not recorded."""
    shape_count: int
    """How many different input shapes."""
    place: str
    """``file:line function`` of the caller's own code that took most time, else the range it
    ran in; empty where neither was recorded."""


def top(trace: Trace, count: int | None = 10, device: bool | None = None) -> list[Operation]:
    """Operations by self time, the longest first.

    Args:
        count: how many; None for all of them.
        device: the device's kernels (True) or the host's operators (False); by default the
            device's where there is one.

    Raises:
        ValueError: the device's are asked for, and the trace holds no work on one.
    """
    if device is None:
        device = trace.has_device
    if device and not trace.has_device:
        raise ValueError(
            f"{trace.path.name}: there is no work on a device in this trace; ask for device=False"
        )
    if device:
        which = np.flatnonzero(trace.on_device)
        own = trace.duration
    else:
        which = np.flatnonzero(trace.is_category("cpu_op", "Operator") & ~trace.loading)
        own = nesting(trace).self_time
    whole = float(own[which].sum()) or 1.0
    order = which[np.argsort(trace.name[which], kind="stable")]
    names, first = np.unique(trace.name[order], return_index=True)
    groups = np.split(order, first[1:])
    weight = np.array([own[group].sum() for group in groups])
    found = []
    for place in np.argsort(-weight, kind="stable")[:count]:
        group, name = groups[place], trace.names[names[place]]
        shape = _heaviest(trace.shape[group], own[group])
        found.append(
            Operation(
                name=name,
                kind=kind_of_work(name),
                calls=len(group),
                self_time=float(weight[place]),
                total_time=float(trace.duration[group].sum()),
                share=float(weight[place]) / whole,
                shapes=trace.shapes[shape],
                shape_count=len(set(trace.shape[group].tolist()) - {0}),
                place=_place(trace, group[np.argsort(-own[group])[:20]], own),
            )
        )
    return found


def _heaviest(keys: np.ndarray, weight: np.ndarray) -> int:
    return int(np.bincount(keys, weights=weight).argmax())


def _place(trace: Trace, spans: np.ndarray, own: np.ndarray) -> str:
    """Where most of these spans' time was called from."""
    by_place: dict[str, float] = {}
    for span in spans:
        at = int(span)
        launch = int(trace.launch_index[at])
        text = _place_of(trace, launch if launch >= 0 else at)
        if text:
            by_place[text] = by_place.get(text, 0.0) + float(own[at])
    return max(by_place, key=lambda key: by_place[key], default="")


def _place_of(trace: Trace, span: int) -> str:
    """The nearest caller in the learner's own code, else the nearest range."""
    parent = nesting(trace).parent
    python, marks = trace.categories, ""
    at = int(parent[span])
    while at >= 0:
        name, category = trace.names[trace.name[at]], python[trace.category[at]]
        if category == "python_function":
            found = _PLACE.match(name)
            if found and not _LIBRARY.search(found[1]):
                return f"{found[1]}:{found[2]} {found[3]}"
        elif category in MARKS and not marks and not _NO_PLACE.search(name):
            marks = name
        at = int(parent[at])
    return marks


def categories(trace: Trace) -> dict[str, float]:
    """µs of self time by kind of work, the most first: the device's, or the host's operators."""
    found: dict[str, float] = {}
    for operation in top(trace, None):
        found[operation.kind] = found.get(operation.kind, 0.0) + operation.self_time
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# ── before against after ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Change:
    """One operation in two traces, µs of self time in a step."""

    name: str
    before: float
    """0 where it was not there."""
    after: float
    calls_before: float
    calls_after: float

    @property
    def difference(self) -> float:
        """µs per step; negative where it got faster."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two traces of the same work. Times in µs per step."""

    before: float
    """Median step."""
    after: float
    per_step: bool
    """False where a trace has no step marks: then everything is of the whole recording."""
    changes: list[Change]
    """By how much they changed, the most first."""
    note: str

    @property
    def ratio(self) -> float:
        """How many times faster a step has become; below 1 it is slower."""
        return self.before / self.after if self.after else float("inf")

    def __str__(self) -> str:
        unit = "a step" if self.per_step else "the recording"
        lines = [
            f"{unit}: {self.before / 1e3:.3f} → {self.after / 1e3:.3f} ms, "
            f"{self.ratio:.2f} times as fast{'; ' + self.note if self.note else ''}"
        ]
        for change in self.changes[:10]:
            lines.append(
                f"  {change.difference / 1e3:+9.3f} ms  {change.before / 1e3:9.3f} → "
                f"{change.after / 1e3:9.3f}  {change.name[:60]}"
            )
        return "\n".join(lines)


def compare(before: Trace, after: Trace) -> Comparison:
    """What got faster or slower, operation by operation, per step.

    The device's kernels where both traces have a device, else the host's operators. Times of
    two recordings are single samples: a small difference may be noise.

    Raises:
        ValueError: one trace has a device and the other has none.
    """
    if before.has_device != after.has_device:
        with_device, without = (before, after) if before.has_device else (after, before)
        raise ValueError(
            f"{with_device.path} has work on a device and {without.path} has none: compare two "
            "traces of the same kind of run"
        )
    per_step = bool(before.steps and after.steps)
    sides = []
    for trace in (before, after):
        steps = len(trace.steps) if per_step else 1
        sides.append({op.name: (op.self_time / steps, op.calls / steps) for op in top(trace, None)})
    a, b = sides
    none = (0.0, 0.0)
    changes = [
        Change(
            name,
            a.get(name, none)[0],
            b.get(name, none)[0],
            a.get(name, none)[1],
            b.get(name, none)[1],
        )
        for name in a | b
    ]
    changes.sort(key=lambda change: -abs(change.difference))
    return Comparison(
        _median_step(before) if per_step else float(before.end.max()),
        _median_step(after) if per_step else float(after.end.max()),
        per_step,
        changes,
        "" if per_step else "a trace has no step marks, so the whole recordings are compared",
    )


def _median_step(trace: Trace) -> float:
    return float(np.median([step.end - step.start for step in trace.steps]))


# ── shapes and recompiles ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Shapes:
    """How much the shapes change from step to step."""

    new: list[int]
    """Per step: (operator, shapes) pairs that no step before it had."""
    pairs: int
    """Different pairs in all."""
    worst: list[tuple[str, int]]
    """Operators with the most different shapes, the most first."""
    recompiles: int
    """Compilations while recording."""
    compile_time: float
    """µs in them."""
    compiled_in: list[int]
    """Numbers of the steps in which something was compiled."""

    @property
    def recorded(self) -> bool:
        """False where shapes were not recorded: then ``new`` and ``worst`` say nothing."""
        return self.pairs > 0


_COMPILED = re.compile(r"^_compile\.compile_inner|^entire_frame_compile")


def shapes(trace: Trace) -> Shapes:
    """Shape churn and recompiles. Shapes need ``capture(..., shapes=True)``."""
    which = np.flatnonzero(trace.operators & (trace.shape > 0))
    step = trace.step_of[which] if trace.steps else np.zeros(len(which), int)
    key = trace.name[which].astype(np.int64) << 32 | trace.shape[which]
    _, first = np.unique(key, return_index=True)
    pairs = np.unique(key)
    new = np.bincount(step[first][step[first] >= 0], minlength=max(len(trace.steps), 1))
    by_name, counts = np.unique(pairs >> 32, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:10]
    compiled = np.flatnonzero(trace.compiling & trace.is_named(_COMPILED))
    compiled = top_level(trace, np.isin(np.arange(len(trace)), compiled))
    steps = sorted(set(trace.step_of[compiled].tolist()) - {-1}) if trace.steps else []
    time = trace.covered(trace.compiling)
    return Shapes(
        new=new.tolist(),
        pairs=len(pairs),
        worst=[(trace.names[by_name[i]], int(counts[i])) for i in order],
        recompiles=len(compiled),
        compile_time=float((time[1] - time[0]).sum()),
        compiled_in=[trace.steps[index].number for index in steps],
    )


# ── memory ───────────────────────────────────────────────────────────────────────────────────


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
            place = _place_of(trace, owner)
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
