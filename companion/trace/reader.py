"""Read a Chrome trace as ``torch.profiler`` writes it, in pieces, into columns.

A trace of hundreds of MB is never in memory as a whole: the file is read (and unzipped) a few
MB at a time, each piece is decoded into typed structs and goes into columns at once.
"""

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from companion.trace.model import ASIDE, DEVICE, HOST, MARKS, Lane, Memory, Step, Trace
from companion.trace.nesting import nesting

PIECE = 4 << 20
"""Bytes decoded at a time."""
CLOCK = 2.0
"""µs by which real traces' times are off: spans that should touch overlap by up to this."""

CROSSING = 0.01
"""Of the operators that may overlap another one without lying in it. Real traces have 0.1 %."""
DEEP = 500
"""Spans in each other; Python itself stops at 1,000 calls."""

_HEAD = re.compile(rb'(?<![\\\w])"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_NO_NUMBER = re.compile(rb":\s*-?(?:nan|inf|NaN|Infinity|-nan\(ind\))\s*(?=[,}])")
_SPACE = re.compile(r"\s+")
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")


class _Args(msgspec.Struct, gc=False):
    correlation: Any = None
    stream: Any = None
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    bytes: Any = msgspec.field(name="Bytes", default=None)
    total: Any = msgspec.field(name="Total Allocated", default=None)
    address: Any = msgspec.field(name="Addr", default=None)
    device: Any = msgspec.field(name="Device Type", default=None)
    name: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    ts: float | None = None
    dur: float | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: _Args | None = None


class _Tail(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    distributedInfo: Any = None
    deviceProperties: Any = None
    baseTimeNanoseconds: Any = None


class _Columns:
    """Grows piece by piece."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.shapes: dict[bytes, int] = {b"": 0}
        self.lanes: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.name, self.category, self.lane = array("i"), array("i"), array("i")
        self.start, self.duration = array("d"), array("d")
        self.correlation, self.stream, self.shape = array("q"), array("q"), array("i")
        self.memory: list[tuple[float, int, int, int, int, int]] = []
        self.open: dict[tuple[Any, Any], list[_Event]] = {}
        self.unfinished = 0
        self.count = 0

    def add(self, events: list[_Event]) -> None:
        first = self.count
        self.count += len(events)
        spans = [e for e in events if e.ph == "X"]
        if len(spans) < len(events):
            for number, event in enumerate(events, start=first):
                if event.ph != "X":
                    self._other(event, number, spans)
        complete = [e for e in spans if e.dur is not None and e.ts is not None and e.cat != "Trace"]
        self.unfinished += sum(e.dur is None or e.ts is None for e in spans)
        names, categories = self.names, self.categories
        self.name.extend([names.setdefault(e.name, len(names)) for e in complete])
        self.category.extend(
            [categories.setdefault(e.cat or "", len(categories)) for e in complete]
        )
        lanes = self.lanes
        self.lane.extend([lanes.setdefault((e.pid, e.tid), len(lanes)) for e in complete])
        self.start.extend([e.ts or 0.0 for e in complete])
        durations = [e.dur or 0.0 for e in complete]
        if durations and min(durations) < 0:
            bad = complete[int(np.argmin(durations))]
            raise ValueError(
                f"span {bad.name!r} at {bad.ts} µs lasts {bad.dur} µs, less than "
                "nothing: the clock went backwards, or the file is damaged; record it again"
            )
        self.duration.extend(durations)
        args = [e.args or _NO_ARGS for e in complete]
        self.correlation.extend([_whole(a.correlation) for a in args])
        self.stream.extend([_whole(a.stream) for a in args])
        shapes = self.shapes
        self.shape.extend([shapes.setdefault(bytes(a.shapes), len(shapes)) for a in args])

    def _other(self, event: _Event, number: int, spans: list[_Event]) -> None:
        """A span in two halves, a memory event, a thread's name; anything else is not needed."""
        key = (event.pid, event.tid)
        args = event.args or _NO_ARGS
        if event.ph == "B":
            self.open.setdefault(key, []).append(event)
        elif event.ph == "E" and event.ts is not None:
            if not self.open.get(key):
                raise ValueError(f"event {number} ends a span that never began (thread {key[1]})")
            begun = self.open[key].pop()
            begun.ph, begun.dur = "X", event.ts - (begun.ts or 0.0)
            spans.append(begun)
        elif event.ph == "M" and event.name == "thread_name" and isinstance(args.name, str):
            self.thread_names[key] = args.name
        elif event.name == "[memory]" and event.ts is not None and args.bytes is not None:
            lane = self.lanes.setdefault(key, len(self.lanes))
            size, total = _whole(args.bytes), _whole(args.total)
            address, device = _whole(args.address), _whole(args.device)
            self.memory.append((event.ts, size, total, address, device, lane))


_NO_ARGS = _Args()


def _whole(value: Any) -> int:
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else value % 2**63
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def read_file(path: Path) -> Trace:
    """One rank's trace. See :func:`companion.trace.read`."""
    notes: list[str] = []
    columns = _Columns()
    try:
        with open(path, "rb") as file:
            magic = file.read(2)
            file.seek(0)
            if not magic:
                raise ValueError("the file is empty; record the trace again")
            zipped = magic == b"\x1f\x8b"
            if zipped != (path.suffix == ".gz"):
                inside = "gzip inside" if zipped else "plain JSON inside"
                notes.append(f"{path.name} is {inside}, whatever its name says; read as such")
            source: Any = gzip.GzipFile(fileobj=file) if zipped else file
            head = _decode_all(source, columns)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ValueError(
            f"{path}: the gzip file breaks off or is damaged; copy it again, or record it again"
        ) from None
    return _finish(path, columns, head, notes)


def _decode_all(source: BinaryIO, columns: _Columns) -> dict[str, Any]:
    """Feed every event to ``columns``; returns the document's other keys."""
    buffer = source.read(PIECE)
    if not buffer:
        raise ValueError("the file is empty inside; record the trace again")
    text = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] not in (b"{", b"["):
        raise ValueError(
            "this is no trace: it is not JSON; give a file written by export_chrome_trace"
        )
    buffer, head = text, {}
    if text[:1] == b"{":
        while not (match := _HEAD.search(buffer)):
            more = source.read(PIECE)
            if not more:
                raise ValueError(_not_a_trace(buffer))
            buffer += more
        # the keys before the events, with an empty list in their place
        head = _decode(buffer[: match.end()] + b"]}", dict[str, Any], 0)
        buffer, opening = buffer[match.end() :], b'{"traceEvents":['
    else:
        buffer, opening = buffer[1:], b"["
    offset, piece = 0, PIECE
    while more := source.read(piece):
        buffer += more
        found = _last_boundary(buffer)
        if found is None:
            continue
        try:
            events = _decode(b"[" + buffer[: found + 1] + b"]", list[_Event], offset)
        except ValueError:
            # the boundary lay inside an event, or behind the list of events: take more at once,
            # and let the end of the file decide whether the JSON is broken
            piece *= 2
            continue
        columns.add(events)
        rest = buffer[found + 1 :]
        offset += found + 1
        comma = rest.index(b",")
        buffer, offset, piece = rest[comma + 1 :], offset + comma + 1, PIECE
    if opening == b"[":
        columns.add(_decode(b"[" + buffer, list[_Event], offset))
    else:
        tail = _decode(opening + buffer, _Tail, offset)
        columns.add(tail.events)
        for key in ("distributedInfo", "deviceProperties", "baseTimeNanoseconds"):
            if (value := getattr(tail, key)) is not None:
                head[key] = value
    return head


def _last_boundary(buffer: bytes) -> int | None:
    """Where the last ``}`` stands that another event follows, looking from the end."""
    window = 1 << 16
    while True:
        low = max(0, len(buffer) - window)
        found = None
        for match in _BETWEEN.finditer(buffer, low):
            found = match.start()
        if found is not None or low == 0:
            return found
        window *= 8


def _decode(text: bytes, kind: Any, offset: int) -> Any:
    """Decode JSON; one sentence with the place where it cannot be."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except RecursionError:
        raise ValueError("an event holds lists nested too deeply to be read") from None
    except msgspec.ValidationError as error:
        if kind in (list[_Event], _Tail):
            raise ValueError(
                f"this is no trace: an event is not as it should be: {error}"
            ) from None
        raise ValueError(str(error)) from None
    except msgspec.DecodeError as error:
        # kineto writes bandwidths of nothing in no time as nan or inf, which is not JSON
        mended = _NO_NUMBER.sub(b":null", text)
        if mended != text:
            return _decode(mended, kind, offset)
        message = str(error)
        if "UTF-8" in message:
            raise ValueError(
                f"a name near byte {offset + _not_utf8(text):,} is not UTF-8 text; the file is "
                "damaged, or another program wrote it in another encoding"
            ) from None
        if "truncated" in message:
            raise ValueError(
                "the JSON breaks off before its end; the run was stopped while it wrote, or the "
                "copy is not whole: record or copy it again"
            ) from None
        raise ValueError(
            f"the JSON is damaged near byte {_place(message, offset)}: {message}"
        ) from None


def _not_utf8(text: bytes) -> int:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _place(message: str, offset: int) -> str:
    found = re.search(r"byte (\d+)", message)
    return f"{offset + int(found[1]):,}" if found else "?"


def _not_a_trace(text: bytes) -> str:
    try:
        keys = list(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, RecursionError):
        return "this is no whole trace: the JSON breaks off, or it has no traceEvents"
    return (
        f"this is no trace: it has no traceEvents (its keys are {', '.join(keys[:5]) or 'none'}); "
        "give a file written by export_chrome_trace"
    )


# ── columns to trace ─────────────────────────────────────────────────────────────────────────


def _finish(path: Path, columns: _Columns, head: dict[str, Any], notes: list[str]) -> Trace:
    if columns.count == 0:
        raise ValueError(f"{path}: the trace holds no event; was anything recorded?")
    if not columns.start:
        raise ValueError(
            f"{path}: this is no trace: none of its {columns.count:,} events is a span"
        )
    if columns.unfinished:
        notes.append(f"{path.name}: {columns.unfinished:,} spans never ended; they are left out")
    start = np.array(columns.start)
    order = np.argsort(start, kind="stable")
    start = start[order]
    origin = float(start[0])

    def column(values: array) -> np.ndarray:
        return np.array(values)[order]

    information = head.get("distributedInfo")
    information = information if isinstance(information, dict) else {}
    memory = np.array(columns.memory, dtype=np.float64).reshape(-1, 6)
    memory = memory[np.argsort(memory[:, 0], kind="stable")]
    trace = Trace(
        path=path,
        rank=max(_whole(information.get("rank", 0)), 0),
        world=_whole(information["world_size"]) if "world_size" in information else None,
        backend=information.get("backend"),
        info=head,
        notes=notes,
        origin=origin,
        names=list(columns.names),
        categories=list(columns.categories),
        shapes=[_SPACE.sub("", text.decode()).replace(",", ", ") for text in columns.shapes],
        lanes=[Lane(p, t, columns.thread_names.get((p, t), "")) for p, t in columns.lanes],
        name=column(columns.name),
        category=column(columns.category),
        lane=column(columns.lane),
        start=start - origin,
        duration=column(columns.duration),
        correlation=column(columns.correlation),
        stream=column(columns.stream),
        shape=column(columns.shape),
        memory=Memory(
            memory[:, 0] - origin, *(memory[:, i].astype(np.int64) for i in (1, 2, 3, 4, 5))
        ),
    )
    trace.steps = _steps(trace)
    _look_over(trace)
    return trace


def _steps(trace: Trace) -> list[Step]:
    """The host's step marks in the order of time.

    Raises:
        ValueError: a later step began before an earlier one.
    """
    found = []
    for index in np.flatnonzero(trace.is_category(*MARKS) & trace.is_named(_STEP)):
        match = _STEP.search(trace.names[trace.name[index]])
        assert match
        begin = float(trace.start[index])
        found.append(Step(int(match[1]), begin, begin + float(trace.duration[index])))
    for before, after in zip(found, found[1:], strict=False):
        if after.number < before.number or after.start < before.end - CLOCK:
            raise ValueError(
                f"{trace.path}: the clock goes backwards: step {after.number} begins at "
                f"{after.start:.0f} µs, inside or before step {before.number}, which began at "
                f"{before.start:.0f} µs; record it again"
            )
    return found


def _look_over(trace: Trace) -> None:
    """Say what a reader of the figures must know."""
    name = trace.path.name
    if not trace.steps:
        trace.notes.append(f"{name} has no step marks (prof.step()); it is analysed as a whole")
    if not trace.has_device:
        trace.notes.append(f"{name} has no work on a device; figures are those of the host")
    unknown = ~(trace.is_category(*DEVICE, *HOST, *ASIDE, "Operator") | trace.launches)
    if unknown.any():
        kinds = sorted({trace.categories[c] or "none" for c in np.unique(trace.category[unknown])})
        trace.notes.append(
            f"{name}: {unknown.sum():,} spans are of a category that is not known here "
            f"({', '.join(kinds[:5])}); no figure counts them"
        )
    nested = nesting(trace)
    if nested.crossing_operators > CROSSING * trace.is_category("cpu_op", "Operator").sum():
        raise ValueError(
            f"{trace.path}: {nested.crossing_operators:,} operators overlap another one of their "
            "thread without lying in it, which no call can do; the file is damaged, or its "
            "threads were mixed up: record it again"
        )
    if nested.crossing:
        trace.notes.append(
            f"{name}: {nested.crossing:,} spans overlap another one of their thread without "
            "lying in it; each counts up to the end of the other"
        )
    if nested.depth > DEEP:
        trace.notes.append(
            f"{name}: spans lie up to {nested.depth:,} deep in each other; figures are right, a "
            "picture of it shows the uppermost"
        )
    launched = trace.launch_index
    work = np.flatnonzero(launched >= 0)
    if len(work):
        early = trace.start[launched[work]] - trace.start[work]
        if (early > CLOCK).sum() > 0.01 * len(work):
            trace.notes.append(
                f"{name}: {(early > CLOCK).sum():,} kernels start before they were launched (by "
                f"up to {early.max():.0f} µs): the device's clock and the host's do not agree, "
                "so launch delays are too short"
            )


def files_of(directory: Path) -> Iterator[Path]:
    """The trace files of a directory, by name."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name.endswith((".json", ".json.gz")):
            yield path
