"""Pictures in one house style: direct labels, nothing but what is measured.

Every function returns a :class:`Picture`, a matplotlib figure that shows itself in a notebook
and carries its own text alternative. pyplot and ``rcParams`` are never touched, so nothing
leaks into your own plots, nor from them.
"""

import base64
import html
import io
import math
import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from companion.measure import Comparison, PhaseTimes
from companion.state import RunConfig

# Okabe and Ito's palette: told apart with every common colour blindness, 4.5:1 on white
BLUE, ORANGE = "#0072B2", "#C14A00"
INK, GREY, FAINT, PAPER = "#222222", "#5F6368", "#D0D4D9", "#FFFFFF"
FONT = "DejaVu Sans"
WIDTH = 7.2
"""Inches; at 100 CSS pixels an inch it is as wide as a notebook cell."""
DPI = 144

_drawing = threading.Lock()


class Picture(Figure):
    """A figure on opaque paper, so that it reads the same on a white and on a dark page."""

    def __init__(self, height: float) -> None:
        """``height`` in inches."""
        super().__init__(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER, edgecolor=PAPER)
        FigureCanvasAgg(self)
        self.alt = ""
        """What the picture shows, in a sentence."""

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        return bundle(png(self), self.alt)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file; the same figure gives the same bytes."""
    # a widget's callback may draw in another thread, and matplotlib shares its text caches
    with _drawing:
        canvas = FigureCanvasAgg(figure)
        buffer = io.BytesIO()
        canvas.print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def bundle(image: bytes, alt: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Data and metadata of a notebook output: the picture, with ``alt`` as its text twin."""
    data = {"image/png": base64.b64encode(image).decode(), "text/plain": alt}
    return data, {"image/png": {"width": int(100 * WIDTH), "alt": alt}}


def img(image: bytes, height: float, alt: str) -> str:
    """The PNG as an ``<img>`` element that keeps its place while it is replaced."""
    return (
        f'<img alt="{html.escape(alt)}" width="{100 * WIDTH:.0f}" height="{100 * height:.0f}" '
        f'decoding="sync" style="max-width: 100%; height: auto" '
        f'src="data:image/png;base64,{base64.b64encode(image).decode()}">'
    )


class References(Protocol):
    def as_dict(self) -> dict[str, float]: ...


def named(references: References | Mapping[str, float] | None) -> dict[str, float]:
    """Reference losses by name, from a mapping or :func:`companion.corpus.reference_losses`."""
    if references is None:
        return {}
    return dict(references if isinstance(references, Mapping) else references.as_dict())


def loss_curve(
    history: Sequence[Mapping[str, Any]],
    references: References | Mapping[str, float] | None = None,
    *,
    span: tuple[int, int] | None = None,
    title: str = "Loss (nats per token)",
) -> Picture:
    """The loss over the steps, with reference losses as labelled lines.

    ``history`` holds rows with ``step`` and ``loss``, such as ``record.row()`` gives; it may
    be empty. ``span`` is the first and the last step of the axis.

    Raises:
        ValueError: a row without ``step`` or ``loss``.
    """
    try:
        steps = [row["step"] for row in history]
        losses = [float(row["loss"]) for row in history]
    except (KeyError, TypeError) as error:
        raise ValueError(
            "history has a row without step and loss; collect record.row() in your loop"
        ) from error
    lines = named(references)
    picture = Picture(LOSS_CURVE_HEIGHT)
    labels = [f"{name} {value:.2f}" for name, value in lines.items()]
    # the labels stand right of the axes, about 0.011 of the picture's width a letter
    room = 0.025 + min(0.4, 0.011 * max(map(len, labels), default=0))
    axes = _axes(picture, (0.065, 0.14, 0.925 - room, 0.72), title)
    low, high = span or ((min(steps), max(steps)) if steps else (0, 1))
    axes.set_xlim(low, max(high, low + 1))
    values = [v for v in [*losses, *lines.values()] if math.isfinite(v)] or [0.0, 1.0]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    axes.set_ylim(min(values) - margin, max(values) + margin)
    axes.set_xlabel("step", color=GREY, fontsize=9.5, fontfamily=FONT, labelpad=3)
    for value in lines.values():
        axes.axhline(value, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    _margin_labels(axes, list(lines.values()), labels)
    dots = "o" if len(steps) == 1 else ""
    axes.plot(steps, losses, color=BLUE, linewidth=1.8, marker=dots, markersize=4, zorder=3)
    if steps and math.isfinite(losses[-1]):
        _end_label(axes, steps[-1], losses[-1], f"{losses[-1]:.2f}")
    picture.alt = _loss_alt(steps, losses, lines)
    return picture


LOSS_CURVE_HEIGHT = 3.2


def _margin_labels(axes: Axes, values: list[float], labels: list[str]) -> None:
    """Labels right of the axes, each beside its value, pushed apart where they would touch."""
    bottom, top = axes.get_ylim()
    gap = 0.066 * (top - bottom)
    at = -math.inf
    for value, label in sorted(zip(values, labels, strict=True)):
        at = max(value, at + gap)
        axes.annotate(
            label,
            (1, at),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=GREY,
            fontsize=9.5,
            fontfamily=FONT,
            annotation_clip=False,
        )


def _end_label(axes: Axes, x: float, y: float, text: str) -> None:
    low, high = axes.get_xlim()
    late = (x - low) / (high - low) > 0.9
    axes.annotate(
        text,
        (x, y),
        xytext=(0 if late else 5, 7),
        textcoords="offset points",
        ha="right" if late else "left",
        color=BLUE,
        fontsize=10.5,
        fontweight="bold",
        fontfamily=FONT,
        path_effects=[withStroke(linewidth=3, foreground=PAPER)],
        zorder=4,
    )


def _loss_alt(steps: list[Any], losses: list[float], lines: dict[str, float]) -> str:
    if not steps:
        return "Loss curve, still empty."
    text = f"Loss curve: {losses[0]:.2f} at step {steps[0]}, {losses[-1]:.2f} at step {steps[-1]}"
    if lines:
        marks = ", ".join(f"{name} {value:.2f}" for name, value in lines.items())
        text += f"; reference lines: {marks}"
    return text + "."


def phase_bars(times: PhaseTimes) -> Picture:
    """Where a step's time goes: one bar a phase, its median time and its share beside it.

    Raises:
        ValueError: no complete step was measured.
    """
    parts = times.summary()
    picture = Picture(0.75 + 0.36 * len(parts))
    axes = _axes(picture, (0.14, 0.02, 0.62, 0.98 - 0.4 / picture.get_figheight()), "")
    axes.set_axis_off()
    longest = max(part.median for part in parts.values())
    step = sum(part.total for part in parts.values()) / max(1, len(times.steps) - times.warmup)
    _title(picture, f"Where a step's time goes ({_ms(step)} a step)")
    texts = []
    for row, (name, part) in enumerate(parts.items()):
        # the data path is what this picture is looked at for
        colour = ORANGE if name == "data" else GREY if name == "rest" else BLUE
        axes.barh(row, part.median, height=0.62, color=colour, edgecolor=colour, linewidth=0)
        beside: dict[str, Any] = {"va": "center", "fontsize": 10, "fontfamily": FONT, "color": INK}
        axes.annotate(
            name,
            (0, row),
            xytext=(-7, 0),
            textcoords="offset points",
            ha="right",
            **beside,
        )
        text = f"{_ms(part.median)}  {_percent(part.share)}"
        axes.annotate(text, (part.median, row), xytext=(7, 0), textcoords="offset points", **beside)
        texts.append(f"{name} {_ms(part.median)} ({_percent(part.share)})")
    axes.set_xlim(0, longest or 1)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    picture.alt = f"Phases of a step of {_ms(step)}: {', '.join(texts)}."
    return picture


def interval(comparison: Comparison) -> Picture:
    """The ratio of two times with its interval, beside the line where they are equal."""
    c, (a, b) = comparison, comparison.names
    title = textwrap.fill(c.verdict, 78)
    height = 1.75 + 0.2 * title.count("\n")
    picture = Picture(height)
    axes = _axes(picture, (0.05, 0.44 / height, 0.9, 0.58 / height), "")
    _title(picture, title)
    reach = 1.25 * max(abs(c.low - 1), abs(c.high - 1), abs(c.ratio - 1), 0.02)
    axes.set_xlim(1 - reach, 1 + reach)
    axes.set_ylim(-1, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    colour = ORANGE if c.shown else GREY
    axes.plot([c.low, c.high], [0, 0], color=colour, linewidth=5, solid_capstyle="round", alpha=0.4)
    axes.plot([c.ratio], [0], marker="o", markersize=9, color=colour, linestyle="")
    for x, text, side in (
        (0.0, f"← {a} is faster", "left"),
        (0.5, "equal", "center"),
        (1.0, f"{b} is faster →", "right"),
    ):
        axes.text(
            x,
            1.12,
            text,
            transform=axes.transAxes,
            ha=side,
            va="bottom",
            color=GREY,
            fontsize=9.5,
            fontfamily=FONT,
        )
    axes.set_xlabel(
        f"time of {a} / time of {b}", color=GREY, fontsize=9.5, fontfamily=FONT, labelpad=3
    )
    picture.alt = f"Ratio of times with its 95 % interval: {c.verdict}."
    return picture


def schedule(run: RunConfig, **changes: Any) -> Picture:
    """The learning rate of ``run`` with ``changes``, beside that of ``run`` as it is.

    Raises:
        ValueError: a change that RunConfig refuses.
    """
    new = replace(run, **changes)
    picture = Picture(3.0)
    title = "Learning rate" + (" (dashed: as it was)" if changes and new != run else "")
    axes = _axes(picture, (0.1, 0.15, 0.86, 0.7), title)
    rates = []
    for config, colour, width, dash in ((run, GREY, 1.2, (0, (4, 3))), (new, BLUE, 2.0, "-")):
        last = config.total_steps - 1
        corner = min(config.warmup_steps, last)
        steps = sorted({*range(0, last, max(1, last // 300)), max(0, corner - 1), corner, last})
        rates = [config.learning_rate * config.learning_rate_factor(step) for step in steps]
        axes.plot([s + 1 for s in steps], rates, color=colour, linewidth=width, linestyle=dash)
    peak = max(rates)
    axes.set_xlim(0, max(run.total_steps, new.total_steps))
    axes.set_ylim(0, 1.18 * max(peak, run.learning_rate))
    axes.set_xlabel("step", color=GREY, fontsize=9.5, fontfamily=FONT, labelpad=3)
    _end_label(axes, steps[rates.index(peak)] + 1, peak, f"{peak:.2g}")
    _end_label(axes, new.total_steps, rates[-1], f"{rates[-1]:.2g}")
    tokens = new.total_steps * new.global_batch * new.sequence
    rise = f"rises to {peak:.2g} in {new.warmup_steps} steps"
    if new.warmup_steps >= new.total_steps:
        rise = f"rises all the time, as the warm-up of {new.warmup_steps} steps fills the run,"
    picture.alt = (
        f"The learning rate {rise} and is {rates[-1]:.2g} in the last of {new.total_steps:,} "
        f"steps. The run sees {tokens:,} tokens, "
        f"{_percent(min(1.0, new.warmup_steps / new.total_steps))} of them in the warm-up."
    )
    return picture


def _axes(picture: Picture, place: tuple[float, float, float, float], title: str) -> Axes:
    """Axes with two thin spines and every property said, whatever ``rcParams`` hold."""
    axes = picture.add_axes(place, facecolor=PAPER)
    axes.grid(False)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=FAINT, linewidth=1)
    axes.tick_params(
        which="both",
        direction="out",
        color=FAINT,
        labelcolor=GREY,
        labelsize=9.5,
        labelfontfamily=FONT,
        length=3,
        width=1,
        pad=3.5,
        top=False,
        right=False,
        bottom=True,
        left=True,
    )
    for axis, parts in ((axes.xaxis, 7), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(parts, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if title:
        _title(picture, title)
    return axes


def _title(picture: Picture, text: str) -> None:
    picture.text(
        0.015,
        1 - 0.1 / picture.get_figheight(),
        text,
        ha="left",
        va="top",
        color=INK,
        fontsize=11,
        fontweight="bold",
        fontfamily=FONT,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"
