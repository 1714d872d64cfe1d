"""Where each span of a trace stands in its picture: lanes, rows, colours.

The timeline in the notebook and its still twin draw the same :class:`Layout`.
"""

import re
from dataclasses import dataclass

import numpy as np

from companion.trace.model import _COMMUNICATION_OPERATOR, HOST, Job, Trace
from companion.trace.nesting import nesting

DEEPEST = 64
"""Rows of a lane. What lies deeper in each other is left out, and the timeline says so."""
TOUCHING = 1.0
"""µs by which spans of a stream may overlap and still stand in one row: old traces are rounded."""
NAME = 300
"""Letters of a name that are kept; a C++ template can have thousands."""


@dataclass(frozen=True)
class Group:
    """Spans of one colour."""

    name: str
    colour: str
    ink: str
    """Colour of the text on it, at least 4.5:1."""


# Okabe and Ito's palette with two greys: told apart with every common colour blindness
GROUPS = (
    Group("other", "#AEB4BC", "#222222"),
    Group("Python", "#E4E7EB", "#222222"),
    Group("range", "#C9CED6", "#222222"),
    Group("operator", "#56B4E9", "#222222"),
    Group("launch", "#CC79A7", "#222222"),
    Group("kernel", "#0072B2", "#FFFFFF"),
    Group("copy", "#E69F00", "#222222"),
    Group("communication", "#C14A00", "#FFFFFF"),
    Group("loading data", "#F0E442", "#222222"),
    Group("compiling", "#009E73", "#222222"),
)


@dataclass(frozen=True)
class LaneRows:
    """A thread or a stream: some rows, the outermost spans in the first of them."""

    name: str
    about: str
    first: int
    count: int
    nests: bool
    """Whether a row's spans lie in those of the row above: in a thread, not in a stream."""


@dataclass(frozen=True)
class StepMark:
    """µs, as in :class:`Layout`."""

    number: int
    start: float
    end: float


@dataclass(eq=False)
class Layout:
    """Spans by row, in the order of time; times are µs from the first span of all ranks."""

    title: str
    start: np.ndarray
    duration: np.ndarray
    name: np.ndarray
    category: np.ndarray
    shape: np.ndarray
    group: np.ndarray
    """Index into :data:`GROUPS`."""
    names: list[str]
    categories: list[str]
    shapes: list[str]
    lanes: list[LaneRows]
    rows: np.ndarray
    """Row r holds spans ``rows[r]`` to ``rows[r + 1] - 1``."""
    links: np.ndarray
    """Pairs of spans ``(n, 2)``: a call on the host, the work on the device that it launched."""
    steps: list[StepMark]
    offsets: dict[int, float]
    """By rank: µs from the first span of all ranks to the first one of this rank."""
    notes: list[str]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> float:
        """µs from the first start to the last end."""
        return float((self.start + self.duration).max())

    def thinned(self, most: int) -> "Layout":
        """Only the ``most`` longest spans, where they are."""
        if most >= len(self):
            return self
        keep = np.zeros(len(self), bool)
        keep[np.argpartition(-self.duration, most)[:most]] = True
        place = np.cumsum(keep) - 1
        links = self.links[keep[self.links].all(axis=1)]
        columns = ("start", "duration", "name", "category", "shape", "group")
        kept = {column: getattr(self, column)[keep] for column in columns}
        note = f"the {most:,} longest of {len(self):,} spans"
        rest = {
            key: value
            for key, value in self.__dict__.items()
            if key not in (*columns, "rows", "links", "notes")
        }
        return Layout(
            **rest,
            **kept,
            rows=np.concatenate(([0], np.cumsum(keep)))[self.rows],
            links=place[links],
            notes=[*self.notes, note],
        )


def layout(trace: Trace | Job) -> Layout:
    """Lay out one rank, or the ranks of a job below each other on one clock."""
    traces = list(trace) if isinstance(trace, Job) else [trace]
    notes: list[str] = []
    offsets = _offsets(traces, notes)
    names: dict[str, int] = {}
    categories: dict[str, int] = {}
    shapes: dict[str, int] = {"": 0}
    parts: dict[str, list[np.ndarray]] = {}
    lanes: list[LaneRows] = []
    links, rows, before, hidden = [], 0, 0, 0
    for one in traces:
        level = _levels(one)
        order, own = _lanes(one, level)
        shown = level < DEEPEST
        hidden += int((~shown).sum())
        row_of = np.zeros(len(one), int)
        for lane in order:
            mine = one.lane == lane
            count = int(level[mine & shown].max()) + 1
            prefix = f"rank {one.rank}: " if len(traces) > 1 else ""
            nests = not bool(one.on_device[mine].any())
            lanes.append(LaneRows(prefix + own[lane][0], own[lane][1], rows, count, nests))
            row_of[mine] = rows + level[mine]
            rows += count
        which = np.flatnonzero(shown)
        which = which[np.lexsort((one.start[which], row_of[which]))]
        place = np.full(len(one), -1)
        place[which] = before + np.arange(len(which))
        work = which[one.launch_index[which] >= 0]
        pairs = np.stack((place[one.launch_index[work]], place[work]), axis=1)
        links.append(pairs[(pairs >= 0).all(axis=1)])
        before += len(which)
        columns = {
            "start": one.start[which] + offsets[one.rank],
            "duration": one.duration[which],
            "name": _renumber(names, [n[:NAME] for n in one.names], one.name[which]),
            "category": _renumber(categories, one.categories, one.category[which]),
            "shape": _renumber(shapes, one.shapes, one.shape[which]),
            "group": _groups(one)[which],
            "row": row_of[which],
        }
        for key, values in columns.items():
            parts.setdefault(key, []).append(values)
    joined = {key: np.concatenate(values) for key, values in parts.items()}
    if hidden:
        notes.append(f"{hidden:,} spans deeper than {DEEPEST} levels are left out")
    return Layout(
        title=trace.path.name,
        names=list(names),
        categories=list(categories),
        shapes=list(shapes),
        lanes=lanes,
        rows=np.searchsorted(joined.pop("row"), np.arange(rows + 1)),
        links=np.concatenate(links),
        steps=[
            StepMark(step.number, step.start + offsets[one.rank], step.end + offsets[one.rank])
            for one in traces[:1]
            for step in one.steps
        ],
        offsets=offsets,
        notes=notes,
        **joined,
    )


def _offsets(traces: list[Trace], notes: list[str]) -> dict[int, float]:
    begins = [one.begins_at for one in traces]
    known = [when for when in begins if when is not None]
    if len(known) < len(traces):
        if len(traces) > 1:
            notes.append("the ranks' files share no clock: each begins at 0")
        return {one.rank: 0.0 for one in traces}
    return {one.rank: (when - min(known)) * 1e6 for one, when in zip(traces, known, strict=True)}


def _renumber(known: dict[str, int], own: list[str], values: np.ndarray) -> np.ndarray:
    if not own:
        return np.zeros(len(values), int)
    return np.array([known.setdefault(text, len(known)) for text in own])[values]


def _groups(trace: Trace) -> np.ndarray:
    group = np.zeros(len(trace), np.uint8)
    masks = (
        trace.is_category("python_function"),
        trace.is_category("user_annotation", "gpu_user_annotation"),
        trace.host_operations,
        trace.launches,
        trace.device_compute,
        trace.device_copies,
        trace.device_communication
        | trace.host_communication
        | (trace.host_operations & trace.is_named(_COMMUNICATION_OPERATOR)),
        trace.loading,
        trace.compiling,
    )
    for number, mask in enumerate(masks, start=1):
        group[mask] = number
    return group


def _levels(trace: Trace) -> np.ndarray:
    """The row of each span within its lane: host spans as they nest, the rest below them."""
    level = nesting(trace).level.copy()
    host = trace.is_category(*HOST) | trace.launches
    work = trace.on_device
    for lane in range(len(trace.lanes)):
        mine = trace.lane == lane
        depth = int(level[mine & host].max()) + 1 if (mine & host).any() else 0
        # work first: a stream's kernels stand in its top row, what describes them below
        for which in (mine & work, mine & ~host & ~work):
            spans = np.flatnonzero(which)
            if len(spans):
                free = _free_rows(trace.start[spans], trace.end[spans])
                level[spans] = depth + free
                depth += int(free.max()) + 1
    return level


def _free_rows(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For spans in the order of time: the first row in which each overlaps no earlier one."""
    row = np.zeros(len(start), int)
    reached = np.maximum.accumulate(end)
    if (start[1:] >= reached[:-1] - TOUCHING).all():
        return row
    ends: list[float] = []
    for at, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for number, last in enumerate(ends):
            if begin >= last - TOUCHING:
                row[at], ends[number] = number, stop
                break
        else:
            row[at] = len(ends)
            ends.append(stop)
    return row


def _lanes(trace: Trace, level: np.ndarray) -> tuple[list[int], dict[int, tuple[str, str]]]:
    """Lanes from top to bottom: the main thread, threads that launch work on the device, the
    device's streams, other threads."""
    launching = set(trace.lane[trace.launch_index[trace.launch_index >= 0]].tolist())
    names: dict[int, tuple[str, str]] = {}
    key: dict[int, tuple[int, float]] = {}
    for number, lane in enumerate(trace.lanes):
        mine = trace.lane == number
        if not mine.any():
            continue
        device = bool(trace.on_device[mine].any())
        kind_of = "stream" if device else "thread"
        name = lane.name.strip() or f"{kind_of} {lane.tid}"
        # the number says nothing to a reader, and stands in `about`
        if threads_own := re.fullmatch(r"thread -?\d+ \((.+)\)", name):
            name = threads_own[1]
        about = f"process {lane.pid}, {kind_of} {lane.tid}"
        if number == trace.main:
            about = about if name == f"thread {lane.tid}" else f"{name}, {about}"
            name = "main thread"
        names[number] = name, about
        outermost = float(trace.duration[mine & (level == 0)].sum())
        kind = 0 if number == trace.main else 2 if device else 1 if number in launching else 3
        # streams by number, threads by how much they do
        order = float(lane.tid) if device and isinstance(lane.tid, int) else -outermost
        key[number] = kind, order
    return sorted(key, key=lambda number: key[number]), names
