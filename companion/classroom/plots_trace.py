"""Pictures of stage 3: a still of the timeline, a schedule beside what it really recorded."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from companion.classroom.plots import (
    BLUE,
    FAINT,
    FONT,
    GREY,
    INK,
    ORANGE,
    PAPER,
    Picture,
    _axes,
    _title,
)
from companion.classroom.timeline_layout import GROUPS, Layout
from companion.profiling import Schedule

ROW = 0.145
"""Inches that a row is high."""
MOST_ROWS = 26
"""Rows of a still; the timeline scrolls to more."""
COLUMNS = 1200
"""Places across the still in which spans can begin: what is shorter is merged."""


def still(
    layout: Layout, low: float, high: float, marks: Sequence[tuple[str, float, float]] = ()
) -> Picture:
    """The timeline from ``low`` to ``high`` µs, with the time from start to end as its axis.

    What is narrower than the picture can show is merged: pale where little of it is covered.
    Of deep lanes the outer levels are drawn. ``marks`` are (label, start, end) in µs.
    """
    places, lanes = _places(layout)
    groups = np.unique(layout.group)
    lines = math.ceil(len(groups) / 7)
    height = 1.1 + 0.18 * lines + ROW * (max(places.values()) + 1)
    picture = Picture(height)
    bottom, top = (0.44 + 0.18 * lines) / height, 0.55 / height
    axes = _axes(picture, (0.175, bottom, 0.815, 1 - bottom - top), "")
    _title(picture, layout.title)
    unit, size = _unit(high - low)
    axes.set_xlim(low / size, high / size)
    axes.set_ylim(max(places.values()) + 1.1, -0.15)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    small: dict[str, Any] = {"fontsize": 8.5, "fontfamily": FONT, "color": GREY}
    for step in layout.steps:
        if step.end > low and step.start < high:
            axes.axvline(step.start / size, color=FAINT, linewidth=0.8, zorder=0)
            middle = (max(step.start, low) + min(step.end, high)) / 2
            if min(step.end, high) - max(step.start, low) > 0.07 * (high - low):
                axes.annotate(
                    f"step {step.number}",
                    (middle / size, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    annotation_clip=False,
                    **small,
                )
    for label, start, end in marks:
        axes.axvspan(start / size, end / size, color="#FBE6DA", linewidth=0, zorder=0.5)
        at = min(max((start + end) / 2, low), high)
        axes.annotate(
            f"↑ {label}",
            (at / size, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -18),
            textcoords="offset points",
            ha="center"
            if 0.25 < (at - low) / (high - low) < 0.75
            else "left"
            if at < (low + high) / 2
            else "right",
            va="top",
            annotation_clip=False,
            **{**small, "color": ORANGE, "fontweight": "bold"},
        )
    for row, place in places.items():
        _draw_row(axes, layout, row, place, low, high, size)
    for name, first, last in lanes:
        axes.annotate(
            name if len(name) <= 15 else name[:14] + "…",
            (0, first + 0.45),
            xycoords=("axes fraction", "data"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            annotation_clip=False,
            **{**small, "color": INK},
        )
        if last < max(places.values()):
            axes.axhline(last + 1.1, color=FAINT, linewidth=0.6, zorder=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g} {unit}")
    axes.tick_params(labelsize=8.5)
    picture.legend(
        handles=[Patch(facecolor=GROUPS[g].colour, label=GROUPS[g].name) for g in groups],
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncol=7,
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.4,
        columnspacing=1.1,
        prop={"size": 8, "family": FONT},
        labelcolor=GREY,
    )
    return picture


def _places(layout: Layout) -> tuple[dict[int, float], list[tuple[str, float, float]]]:
    """Where each row that is drawn stands, and each lane: name, first and last place."""
    lanes = layout.lanes[:MOST_ROWS]
    depth = max(lane.count for lane in lanes)
    # take levels from the deepest lanes until it fits
    while depth > 1 and sum(min(lane.count, depth) for lane in lanes) > MOST_ROWS:
        depth -= 1
    places, found, at = {}, [], 0.0
    for lane in lanes:
        first = at
        for level in range(min(lane.count, depth)):
            places[lane.first + level] = at
            at += 1
        found.append((lane.name, first, at - 1))
        at += 0.35
    return places, found


def _draw_row(
    axes: Axes, layout: Layout, row: int, place: float, low: float, high: float, size: float
) -> None:
    which = np.arange(layout.rows[row], layout.rows[row + 1])
    start, end = layout.start[which], layout.start[which] + layout.duration[which]
    seen = (end > low) & (start < high)
    which, start, end = which[seen], np.maximum(start[seen], low), np.minimum(end[seen], high)
    column = (high - low) / COLUMNS
    wide = end - start >= column
    for group in np.unique(layout.group[which[wide]]):
        of = wide & (layout.group[which] == group)
        # a hair's breadth between neighbours that touch
        stop = np.where(end[of] - start[of] > 4 * column, end[of] - 0.6 * column, end[of])
        _boxes(axes, start[of] / size, stop / size, place, GROUPS[group].colour)
    for number in np.flatnonzero(end - start > 40 * column):
        group_of = GROUPS[layout.group[which[number]]]
        letters = int((end[number] - start[number]) / column / 11.2)
        name = layout.names[layout.name[which[number]]]
        axes.text(
            start[number] / size + 3 * column / size,
            place + 0.46,
            (name if len(name) <= letters else name[: letters - 1] + "…").replace("$", r"\$"),
            va="center",
            fontsize=6.5,
            fontfamily=FONT,
            color=group_of.ink,
            clip_on=True,
        )
    if (~wide).any():
        # all that is narrow, by the place where it begins: how much is covered, and by what
        at = ((start[~wide] - low) / column).astype(int).clip(0, COLUMNS - 1)
        covered = np.zeros((len(GROUPS), COLUMNS))
        np.add.at(covered, (layout.group[which[~wide]], at), end[~wide] - start[~wide])
        share, most = covered.sum(axis=0) / column, covered.argmax(axis=0)
        begun = np.bincount(at, minlength=COLUMNS) > 0
        strength = np.select([share > 0.75, share > 0.5, share > 0.25], [1.0, 0.8, 0.6], 0.4)
        edge = low + column * np.arange(COLUMNS)
        for group in np.unique(most[begun]):
            for alpha in np.unique(strength[begun & (most == group)]):
                of = begun & (most == group) & (strength == alpha)
                colour = GROUPS[group].colour
                _boxes(axes, edge[of] / size, (edge[of] + column) / size, place, colour, alpha)


def _boxes(
    axes: Axes,
    start: np.ndarray,
    end: np.ndarray,
    place: float,
    colour: str,
    alpha: float = 1.0,
) -> None:
    top, bottom = np.full(len(start), place), np.full(len(start), place + 0.92)
    corners = [(start, top), (end, top), (end, bottom), (start, bottom)]
    vertices = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    axes.add_collection(
        PolyCollection(list(vertices), facecolor=colour, edgecolor="none", alpha=alpha),
        autolim=False,
    )


def _unit(span: float) -> tuple[str, float]:
    return ("s", 1e6) if span >= 3e6 else ("ms", 1e3) if span >= 1e3 else ("µs", 1.0)


# ── a schedule ───────────────────────────────────────────────────────────────────────────────

AMBER = "#E69F00"
_ACTIONS = {
    "off": ("#EDEFF2", "off"),
    "warm-up": (AMBER, "warm-up: on, thrown away"),
    "record": (BLUE, "recorded"),
    "record and save": ("#00466E", "recorded, and the trace written"),
}


def recording(schedule: Schedule, steps: int, written: Sequence[Sequence[int]]) -> Picture:
    """What the schedule asks for in each of ``steps`` steps, above what traces really hold.

    ``written`` is, for each trace, the numbers of its step marks.
    """
    picture = Picture(2.35)
    axes = _axes(picture, (0.11, 0.37, 0.87, 0.42), "")
    _title(picture, f"A loop of {steps} steps")
    last = max([steps - 1, *(number for numbers in written for number in numbers)])
    axes.set_xlim(-0.6, last + 0.6)
    axes.set_ylim(2.3, -0.1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("step", color=GREY, fontsize=9.5, fontfamily=FONT, labelpad=2)
    actions = schedule.actions(steps)
    for step, action in enumerate(actions):
        axes.bar(step, 0.9, 0.86, bottom=0, color=_ACTIONS[action][0], linewidth=0)
    for numbers in written:
        for step in numbers:
            # the mark that the last step() opened: no step of the loop is in it
            empty = step >= steps
            colour = PAPER if empty else "#00466E" if step == numbers[-1] else BLUE
            edge: dict[str, Any] = {"edgecolor": GREY, "linestyle": ":"} if empty else {}
            axes.bar(step, 0.9, 0.86, bottom=1.15, color=colour, **edge)
    for place, label in ((0.45, "asked for"), (1.6, "written")):
        axes.annotate(
            label,
            (0, place),
            xycoords=("axes fraction", "data"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9.5,
            fontfamily=FONT,
            color=INK,
            annotation_clip=False,
        )
    if not written:
        axes.text(
            last / 2,
            1.6,
            "nothing",
            ha="center",
            va="center",
            fontsize=9.5,
            fontfamily=FONT,
            color=ORANGE,
        )
    picture.legend(
        handles=[Patch(facecolor=colour, label=label) for colour, label in _ACTIONS.values()],
        loc="lower left",
        bbox_to_anchor=(0.1, 0.0),
        ncol=4,
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.4,
        columnspacing=1.2,
        prop={"size": 8.5, "family": FONT},
        labelcolor=GREY,
    )
    picture.alt = _recording_alt(schedule, steps, written)
    return picture


def _recording_alt(schedule: Schedule, steps: int, written: Sequence[Sequence[int]]) -> str:
    planned = schedule.windows(steps)
    asked = schedule.repeat or "any number of"
    text = (
        f"A loop of {steps} steps; asked for: {asked} "
        f"{'window' if schedule.repeat == 1 else 'windows'} of {schedule.active} steps. "
    )
    if not written:
        wanted = schedule.skip_first + schedule.wait + schedule.warmup
        return text + f"Nothing was written: the loop ends before step {wanted} is recorded."
    holds = []
    for numbers in written:
        inside = [number for number in numbers if number < steps]
        if len(inside) > 1:
            holds.append(f"steps {inside[0]} to {inside[-1]}")
        else:
            holds.append(f"step {inside[0]}" if inside else "no step at all")
    more = f" and {len(holds) - 4} more" if len(holds) > 4 else ""
    word = "trace was" if len(holds) == 1 else "traces were"
    text += f"{len(holds)} {word} written, with {', '.join(holds[:4])}{more}."
    if planned and not planned[-1].complete:
        cut = planned[-1].steps
        text += f" The loop ends within the last one, which has {cut} of {schedule.active}."
    if any(number >= steps for numbers in written for number in numbers):
        text += (
            f" The mark of step {steps} (dotted) holds no step: the last step() opened it, and the "
            "profiler was still recording."
        )
    return text
