"""A trace as a picture that you can walk through, in the notebook.

    Timeline(t)                                    # everything
    Timeline(t, step=3)                            # one step
    Timeline(t, verdict=trace.diagnose(t))         # where the verdict is seen best is marked

It needs no network, no other program and, once it is shown, no kernel: a page exported to HTML
keeps it. Where there is no browser its still twin is shown. For traces larger than this is made
for, and for questions in SQL, there is Perfetto (ui.perfetto.dev).
"""

import base64
import gzip
import hashlib
import html
import json
import struct
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from companion.classroom import plots, plots_trace
from companion.classroom.timeline_layout import GROUPS, Layout, layout
from companion.trace.diagnose import Diagnosis
from companion.trace.model import Job, Trace

INLINE = 256 << 10
"""Bytes of packed spans that a notebook's output may carry. The spans of a longer trace come
from the kernel, and its exported page shows the longest of them only."""


class Timeline:
    """The spans of one rank, or of a job's ranks below each other, over time.

    Drag or ← → to pan, wheel or + − to zoom, click a span to see what is in it.
    """

    def __init__(
        self,
        trace: Trace | Job,
        focus: tuple[float, float] | None = None,
        step: int | None = None,
        verdict: Diagnosis | None = None,
    ) -> None:
        """Shows everything, or from ``focus[0]`` to ``focus[1]`` µs from the first span, or the
        step with this number. A ``verdict``'s place is marked, with a button that goes there.

        Raises:
            ValueError: ``focus`` and ``step`` both, a step that is not in the trace, or a focus
                that shows nothing of it.
        """
        self.layout: Layout = layout(trace)
        self.marks: list[tuple[str, float, float]] = []
        if verdict is not None and verdict.at is not None:
            rank = verdict.rank if verdict.rank in self.layout.offsets else None
            shift = self.layout.offsets[rank] if rank is not None else 0.0
            low, high = verdict.at
            self.marks.append((verdict.title, low + shift, high + shift))
        self.view = self._view(focus, step)

    def _view(self, focus: tuple[float, float] | None, step: int | None) -> tuple[float, float]:
        total, title = self.layout.total, self.layout.title
        if focus is not None and step is not None:
            raise ValueError("give focus or step, not both: each says which part to show")
        if step is not None:
            found = [s for s in self.layout.steps if s.number == step]
            if not found:
                numbers = ", ".join(str(s.number) for s in self.layout.steps[:20])
                there = f"it holds steps {numbers}" if numbers else "it holds no step marks"
                raise ValueError(f"step {step} is not in {title}: {there}")
            focus = found[0].start, found[0].end
        if focus is None:
            return -0.005 * total, 1.005 * total
        low, high = focus
        if not low < high or high <= 0 or low >= total:
            raise ValueError(
                f"focus {low:g} to {high:g} µs shows nothing of {title}: give a start and a "
                f"later end between 0 and {total:.0f}"
            )
        margin = 0.02 * (high - low)
        return max(low - margin, -0.03 * total), min(high + margin, 1.03 * total)

    @cached_property
    def alt(self) -> str:
        """What the picture shows, in words."""
        shown = self.layout
        spans = np.diff(shown.rows)
        lanes = [
            f"{lane.name} ({spans[lane.first : lane.first + lane.count].sum():,} spans)"
            for lane in shown.lanes
        ]
        more = f" and {len(lanes) - 6} more" if len(lanes) > 6 else ""
        text = f"Timeline of {shown.title}: {_time(shown.total)}"
        if shown.steps:
            text += f", steps {shown.steps[0].number} to {shown.steps[-1].number}"
        text += f", in lanes {', '.join(lanes[:6])}{more}."
        low, high = max(self.view[0], 0.0), min(self.view[1], shown.total)
        if high - low < 0.99 * shown.total:
            text += f" Shown: {_time(low)} to {_time(high)}."
        for label, low, high in self.marks:
            text += f" Marked: {label}, {_time(low)} to {_time(high)}."
        return text

    def picture(self) -> plots.Picture:
        """The still twin: what the timeline shows before you touch it."""
        picture = plots_trace.still(self.layout, *self.view, self.marks)
        picture.alt = self.alt
        return picture

    def save_html(self, path: str | Path) -> Path:
        """Write a page that holds the whole timeline and needs nothing else; returns its path."""
        path = Path(path)
        packed = base64.b64encode(_zip(self._pack(self.layout))).decode()
        path.write_text(
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width">\n'
            f"<title>{html.escape(self.layout.title)}</title>\n"
            '<body style="margin: 12px; background: #FFFFFF">\n'
            f"{_element(packed, self.alt)}\n</body>\n</html>\n",
            encoding="utf-8",
        )
        return path

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = plots.bundle(plots.png(self.picture()), self.alt)
        packed = _zip(self._pack(self.layout))
        # a page can carry a short trace in itself, and needs no widget then: it is live in
        # every viewer that runs scripts, with a kernel or without
        if _size(packed) > INLINE:
            widget = _widget(self._pack(self.layout))._repr_mimebundle_()
            data |= widget[0] if isinstance(widget, tuple) else widget
            packed = self._shortened(packed)
        text = data["text/plain"] = self.alt
        data["text/html"] = _element(base64.b64encode(packed).decode(), text)
        return data, metadata

    def _shortened(self, packed: bytes) -> bytes:
        """As many of the longest spans as a page may carry."""
        most = len(self.layout)
        while _size(packed) > INLINE and most > 1:
            most = int(0.9 * most * min(1.0, INLINE / _size(packed)))
            packed = _zip(self._pack(self.layout.thinned(most)))
        return packed

    def _pack(self, shown: Layout) -> bytes:
        """The layout as bytes: length of the head, head (JSON), columns.

        Times are whole ticks of at least 1 ns, so that they fit in 32 bits; starts are the
        differences of neighbours, modulo 2^32, which zip well.
        """
        tick = max(1e-3, self.layout.total / (2**32 - 2**8))
        start = np.rint(shown.start / tick).astype(np.int64)
        # whole ticks, yet what touches still touches
        duration = np.rint((shown.start + shown.duration) / tick).astype(np.int64) - start
        used, names = np.unique(shown.name, return_inverse=True)
        shaped, shapes = np.unique(shown.shape, return_inverse=True)
        columns = {
            "start": np.diff(start, prepend=0).astype(np.uint32),
            "duration": duration.astype(np.uint32),
            "name": _narrow(names),
            "shape": _narrow(shapes),
            "category": _narrow(shown.category),
            "group": shown.group,
            "rows": shown.rows.astype(np.uint32),
            "links": shown.links.astype(np.uint32).ravel(),
        }
        body, places = bytearray(), []
        for key, values in columns.items():
            body += b"\0" * (-len(body) % 8)
            places.append([key, values.dtype.str[1:], len(body), len(values)])
            body += values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
        head: dict[str, Any] = {
            "title": shown.title,
            "alt": self.alt,
            "spans": len(shown),
            "tick": tick,
            "total": self.layout.total / tick,
            "view": [self.view[0] / tick, self.view[1] / tick],
            "steps": [[s.number, s.start / tick, s.end / tick] for s in shown.steps],
            "marks": [[label, low / tick, high / tick] for label, low, high in self.marks],
            "lanes": [list(vars(lane).values()) for lane in shown.lanes],
            "groups": [vars(group) for group in GROUPS],
            "names": [shown.names[i] for i in used],
            "categories": shown.categories,
            "shapes": [shown.shapes[i] for i in shaped],
            "notes": shown.notes,
            "columns": places,
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        # columns begin at a multiple of 8, as typed arrays ask for; JSON may end in blanks
        text += b" " * (-(4 + len(text)) % 8)
        return struct.pack("<I", len(text)) + text + bytes(body)


def _time(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} µs"


def _narrow(values: np.ndarray) -> np.ndarray:
    most = int(values.max(initial=0))
    return values.astype(np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.uint32)


def _zip(packed: bytes) -> bytes:
    # without a time of day in it: the same trace gives the same output
    return gzip.compress(packed, 6, mtime=0)


def _size(zipped: bytes) -> int:
    return 4 * -(-len(zipped) // 3)


def _script() -> str:
    return files("companion.classroom").joinpath("timeline.js").read_text(encoding="utf-8")


def _element(packed: str, alt: str) -> str:
    """An element that becomes the timeline where scripts run, and says what it is elsewhere."""
    # from what is shown: the same trace gives the same output
    mark = hashlib.sha256(packed.encode()).hexdigest()[:16]
    return (
        f'<div data-timeline="{mark}">{html.escape(alt)} Run the cell, or trust the notebook, '
        f'to see it.</div>\n<script type="module">\n{_script()}\nunpack("{mark}", "{packed}");\n'
        "</script>"
    )


def _widget(packed: bytes) -> Any:
    # imported here: only long traces need it, and with it comes ipywidgets
    import anywidget
    import traitlets

    class Spans(anywidget.AnyWidget):
        _esm = _script()
        data = traitlets.Bytes().tag(sync=True)

    return Spans(data=packed)
