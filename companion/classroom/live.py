"""The live panel: progress, loss curve, speed and a Stop button round any loop of records.

    for record in watch(train(state, steps=300), 300, references=reference_losses(corpus)):
        ...

It is a generator round a generator: your loop body stays yours. In a notebook it shows a panel
while it runs, and leaves a still picture and one line of text. Elsewhere it prints whole lines.

What it costs. A loss is read, which waits for the device, at most ten times a second; the
picture is drawn so seldom that drawing takes a twentieth of the time at most. All of it
happens between two steps, so ``tokens_per_second`` leaves it out.

How Stop arrives. While a cell runs, the kernel's main thread is busy. JupyterLab 4.4 and later
sends what widgets say to a subshell of the kernel (ipykernel 7), another thread, which sets a
flag here. Where a front end cannot do that, interrupt the kernel: that ends the panel as well.
"""

import contextlib
import html
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

READ_EVERY = 0.1
"""Seconds between two readings of a loss."""
STATUS_EVERY = 0.5
"""Seconds between two updates of the panel's text."""
DRAW_SHARE = 0.05
"""Of the time, for drawing."""


class Record(Protocol):
    """What is read of a record; :class:`companion.loop.Record` has it."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def tokens_per_second(self) -> float: ...


R = TypeVar("R", bound=Record)


def watch(
    records: Iterable[R],
    steps: int,
    *,
    references: Any = None,
    title: str = "Training",
) -> Iterator[R]:
    """The same records, with a panel beside them.

    ``steps`` is how many records are expected. ``references`` are losses to beat, by name or
    from :func:`companion.corpus.reference_losses`, drawn as lines. The Stop button ends the
    loop after the step that is running, as if the records had run out. However the loop ends,
    ``records`` is closed and the panel says how it ended; exceptions pass through.

    Raises:
        ValueError: ``steps`` is not a whole number of at least 1.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}: give the number of records, at least 1")
    return _watch(records, steps, references, title)


def _watch(records: Iterable[R], steps: int, references: Any, title: str) -> Iterator[R]:
    source = iter(records)
    panel = _Panel(steps, references, title) if _has_widgets() else _Lines(steps, title)
    try:
        for record in source:
            panel.show(record)
            yield record
            if panel.stop.is_set():
                panel.read_last()
                panel.finish("stopped")
                break
        else:
            panel.read_last()
            panel.finish("done")
    except GeneratorExit:
        # the loop's body has left, perhaps because the device has failed: no error on top
        with contextlib.suppress(Exception):
            panel.read_last()
        raise
    except BaseException as error:
        with contextlib.suppress(Exception):
            panel.finish(f"ended by {type(error).__name__}")
        raise
    finally:
        try:
            if hasattr(source, "close"):
                source.close()
        finally:
            panel.finish("left")


def _has_widgets() -> bool:
    """Whether this runs in a notebook's kernel that can show widgets."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:
        return False
    try:
        import ipywidgets  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


class _Lines:
    """The panel as text: a line for each tenth of the way. Also what both panels keep."""

    def __init__(self, steps: int, title: str) -> None:
        self.steps, self.title = steps, title
        self.stop = threading.Event()
        self.history: list[dict[str, float]] = []
        self.rates: list[float] = []
        self.count = 0
        self.last: Record | None = None
        self.began = time.perf_counter()
        self.marks: deque[tuple[float, int]] = deque(maxlen=20)
        self.open = True

    def show(self, record: Record) -> None:
        if not self.open:
            return
        self.last, self.count = record, self.count + 1
        tenth = 10 * self.count // self.steps
        if self.count == 1 or tenth > 10 * (self.count - 1) // self.steps:
            self.read(record)
            self.say(f"{self.title}: {self.progress()}")

    def read(self, record: Record) -> None:
        """Keep this record's figures, as plain numbers: a tensor would keep its graph."""
        self.history.append({"step": int(record.step), "loss": float(record.loss)})
        self.rates.append(float(record.tokens_per_second))
        self.marks.append((time.perf_counter(), self.count))

    def read_last(self) -> None:
        if not self.open or self.last is None:
            return
        if not self.history or self.history[-1]["step"] != self.last.step:
            self.read(self.last)

    def progress(self) -> str:
        parts = [f"step {self.count} of {self.steps}"]
        if self.history:
            parts.append(f"loss {self.history[-1]['loss']:.3f}")
        if self.rates:
            parts.append(f"{statistics.median(self.rates[-10:]):,.0f} tokens/s")
        (begin, first), (end, last) = self.marks[0], self.marks[-1]
        if last > first:
            left = (end - begin) / (last - first) * max(0, self.steps - self.count)
            parts.append(f"{clock(left)} left")
        return " · ".join(parts)

    def summary(self, how: str) -> str:
        """One line on a loop that has ended."""
        parts = [f"{self.title} {how}: step {self.count} of {self.steps}"]
        if self.history:
            parts.append(f"loss {self.history[-1]['loss']:.3f}")
        # the first window holds the warm-up
        if rates := self.rates[1:] or self.rates:
            parts.append(f"{statistics.median(rates):,.0f} tokens/s")
        return " · ".join([*parts, f"{clock(time.perf_counter() - self.began)}"])

    def finish(self, how: str) -> None:
        """Say how it ended; only the first call counts."""
        if self.open:
            self.open = False
            self.say(self.summary(how))

    def say(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class _Panel(_Lines):
    """The panel as widgets."""

    def __init__(self, steps: int, references: Any, title: str) -> None:
        import ipywidgets
        from IPython import get_ipython
        from IPython.display import display

        from companion.classroom import plots

        super().__init__(steps, title)
        self.plots, self.references = plots, plots.named(references)
        self.first = 0
        self.read_at = self.status_at = self.draw_at = 0.0
        self.status = ipywidgets.HTML()
        self.button = ipywidgets.Button(
            description="Stop",
            icon="stop",
            tooltip="End the loop after the step that is running",
            layout={"width": "auto"},
        )
        self.button.add_class("companion-stop")
        self.button.on_click(self.pressed)
        self.image = ipywidgets.HTML()
        line = ipywidgets.HBox(
            [self.button, self.status], layout={"align_items": "center", "grid_gap": "12px"}
        )
        self.box = ipywidgets.VBox([line, self.image])
        self.box.add_class("companion-live")
        self.status.value = self.bar("starting")
        still = self.draw()
        data, metadata = plots.bundle(still, f"{title}: running")
        self.handle = display(
            {**self.box._repr_mimebundle_(), **data}, metadata=metadata, raw=True, display_id=True
        )
        # ipykernel 7.4 sends what a widget says to the shell that last spoke to it, which is this
        # busy one; with no note of it, the click goes to the subshell that JupyterLab asked for
        vars(self.button.comm).pop("_reply_subshell_id", None)
        # a loop that a cell leaves half-way, kept in a variable, must not look as if it ran
        self.events, self.thread = get_ipython().events, threading.current_thread()
        self.events.register("post_run_cell", self.cell_ended)

    def pressed(self, button: Any) -> None:
        self.stop.set()
        self.button.disabled = True
        self.button.description = "Stopping"

    def cell_ended(self, result: Any = None) -> None:
        # a cell in a subshell console ends in another thread, and is not ours
        if threading.current_thread() is self.thread:
            self.finish("left")

    def show(self, record: Record) -> None:
        if not self.open:
            return
        now = time.perf_counter()
        self.last, self.count = record, self.count + 1
        if self.count == 1:
            self.first = int(record.step) - 1
        if now - self.read_at >= READ_EVERY:
            self.read(record)
            self.read_at = time.perf_counter()
        if now - self.status_at >= STATUS_EVERY:
            self.status.value = self.bar(self.progress())
            self.status_at = time.perf_counter()
        if now >= self.draw_at:
            self.draw()

    def draw(self) -> bytes:
        began = time.perf_counter()
        picture = self.plots.loss_curve(
            self.history,
            self.references,
            span=(self.first, self.first + self.steps),
            title=f"{self.title}: loss",
        )
        image = self.plots.png(picture)
        self.image.value = self.plots.img(image, self.plots.LOSS_CURVE_HEIGHT, picture.alt)
        ended = time.perf_counter()
        # what the first picture of all costs more, loading fonts, comes only once
        cost = ended - began if self.history else 0.0
        self.draw_at = ended + max(STATUS_EVERY, cost * (1 / DRAW_SHARE - 1))
        return image

    def bar(self, text: str) -> str:
        return (
            f'<progress aria-label="{html.escape(self.title)}" value="{self.count}" '
            f'max="{self.steps}"></progress> <span>{html.escape(text)}</span>'
        )

    def finish(self, how: str) -> None:
        if not self.open:
            return
        self.open = False
        self.events.unregister("post_run_cell", self.cell_ended)
        summary = self.summary(how)
        try:
            # a still picture reads the same in a closed notebook, on a web page and in print
            data, metadata = self.plots.bundle(self.draw(), summary)
            self.handle.update(data, metadata=metadata, raw=True)
        finally:
            self.close()
            self.say(summary)

    def close(self) -> None:
        """Widgets live until they are closed, in the kernel and in the front end."""
        for widget in (self.box, *self.box.children, *self.box.children[0].children):
            for part in (widget, widget.layout, getattr(widget, "style", None)):
                if part is not None:
                    part.close()


def clock(seconds: float) -> str:
    """``1:05`` for 65 seconds, ``2:00:00`` for two hours."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
