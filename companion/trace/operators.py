"""Which operations took the time, with which shapes, called from where; before and after."""

import re
from dataclasses import dataclass

import numpy as np

from companion.trace.model import MARKS, Trace
from companion.trace.nesting import nesting

KIND_OF_WORK: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|gloo:|c10d|all_?reduce|all_?gather|reduce_?scatter"),
    ("copy", r"^Memcpy|^Memset|^dma|aten::(copy_|_to_copy|to|clone|contiguous)$"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv|cudnn_\w*scudnn|wgrad|dgrad|fprop|nchwTo|nhwcTo"),
    (
        "matmul",
        r"(?<!fb)gemm|cutlass|cublas|Cijk_|aten::(mm|bmm|addmm|baddbmm|matmul|linear)$|mkldnn_linear",
    ),
    ("fused", r"^triton_|cpp_fused|Torch-Compiled Region|CompiledF"),
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
_HASH = re.compile(r"(?<=CompiledFxGraph) \w{20,}")
_PLACE = re.compile(r"^(.+\.py)\((\d+)\): (.+)$")
_NO_PLACE = re.compile(
    r"::|ProfilerStep|^## Call CompiledFx|^Compiled|^Torch-Compiled|Backward\d*$|^triton_|"
    r"^gloo:|^nccl:"
)
# the profiler began inside Recording.step, so that call seems to last for the whole trace
_LIBRARY = re.compile(
    r"site-packages|dist-packages|[/\\]torch[/\\]|^torch[/\\]|^<|lib[/\\]python|"
    r"companion[/\\]profiling\.py"
)


def kind_of_work(name: str) -> str:
    """``matmul``, ``attention``, ``elementwise``, ... ; ``other`` where the name tells nothing."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


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
        which = np.flatnonzero(trace.host_operations & ~trace.loading)
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
        text = place_of(trace, launch if launch >= 0 else at)
        if text:
            by_place[text] = by_place.get(text, 0.0) + float(own[at])
    return max(by_place, key=lambda key: by_place[key], default="")


def place_of(trace: Trace, span: int) -> str:
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
        side: dict[str, tuple[float, float]] = {}
        for op in top(trace, None):
            # a graph's name ends in a hash of the machine's own
            name = _HASH.sub("", op.name)
            time, calls = side.get(name, (0.0, 0.0))
            side[name] = (time + op.self_time / steps, calls + op.calls / steps)
        sides.append(side)
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
