"""Pictures of how things work, in the house style of :mod:`companion.classroom.plots`."""

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from companion.classroom.plots import BLUE, FAINT, FONT, GREY, INK, ORANGE, PAPER, WIDTH, Picture


def training_loop() -> Picture:
    """One step of ``companion.loop.train``: what flows where, and what is changed."""
    picture = Picture(3.0)
    axes = _sheet(picture, 3.0)
    axes.add_patch(
        FancyBboxPatch(
            (3.3, 0.2), 3.75, 2.5, boxstyle="round,pad=0,rounding_size=0.1", facecolor="#EEF4F9",
            edgecolor=FAINT, linewidth=1,
        )
    )  # fmt: skip
    flow = [
        (0.15, 1.75, 1.1, "corpus", "bytes", GREY),
        (1.65, 1.75, 1.35, "batch", "[12, 128], targets", ORANGE),
        (3.5, 1.75, 1.4, "zero_grad", "forget the last step", BLUE),
        (5.45, 1.75, 1.4, "forward", "logits, then a loss", BLUE),
        (5.45, 0.45, 1.4, "backward", "adds to every .grad", BLUE),
        (3.5, 0.45, 1.4, "optimizer", "clip, step, schedule", BLUE),
        (0.75, 0.45, 1.95, "your loop body", "record.loss, record.step …", INK),
    ]
    for x, y, width, name, detail, colour in flow:
        _box(axes, x, y, width, name, detail, colour)
    _arrow(axes, (1.25, 2.1), (1.65, 2.1))
    _arrow(axes, (3.0, 2.1), (3.5, 2.1))
    _arrow(axes, (4.9, 2.1), (5.45, 2.1))
    _arrow(axes, (6.15, 1.75), (6.15, 1.15))
    _arrow(axes, (5.45, 0.8), (4.9, 0.8))
    _arrow(axes, (3.5, 0.8), (2.7, 0.8))
    _arrow(axes, (1.9, 1.15), (2.2, 1.75))
    _note(axes, 2.86, 0.98, "yield")
    _note(axes, 1.5, 1.42, "next")
    _note(axes, 4.62, 1.45, "optimizer_step")
    _note(axes, 0.15, 2.62, "one file in ten is held out")
    picture.alt = (
        "One step: the corpus gives a batch; optimizer_step clears the gradients, runs forward and "
        "backward, clips, steps and moves the schedule on. Then the generator yields a record to "
        "your loop body, and goes on when you ask for the next one."
    )
    return picture


def stall(step: float, wait: float, steps: int = 4) -> Picture:
    """A loader that waits ``wait`` seconds a batch, in line with the steps and ahead of them.

    ``step`` is the seconds of computing; all of one scale.
    """
    picture = Picture(2.3)
    axes = _axes_for_lanes(picture)
    lanes = [("loader", 3.0), ("steps", 2.3), ("loader, ahead", 1.0), ("steps", 0.3)]
    for name, y in lanes:
        axes.text(-0.02, y + 0.25, name, ha="right", va="center", fontsize=9.5, fontfamily=FONT,
                  color=INK, transform=axes.get_yaxis_transform())  # fmt: skip
    clock = 0.0
    for _ in range(steps):
        axes.broken_barh([(clock, wait)], (3.0, 0.5), color=ORANGE)
        axes.broken_barh([(clock + wait, step)], (2.3, 0.5), color=BLUE, edgecolor=PAPER)
        clock += wait + step
    in_line = clock
    loaded, done = 0.0, 0.0
    for _ in range(steps):
        axes.broken_barh([(loaded, wait)], (1.0, 0.5), color=ORANGE, edgecolor=PAPER)
        loaded += wait
        start = max(loaded, done)
        axes.broken_barh([(start, step)], (0.3, 0.5), color=BLUE, edgecolor=PAPER)
        done = start + step
    axes.set_xlim(0, in_line)
    axes.set_ylim(0, 3.7)
    axes.axvline(done, ymax=0.45, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(done, 1.75, f" {1 - done / in_line:.0%} sooner", ha="left", va="bottom", fontsize=9.5,
              fontfamily=FONT, color=GREY)  # fmt: skip
    picture.alt = (
        f"In line, each of {steps} steps waits for its batch. With the loader running ahead only "
        f"the first one does, and the work is done {1 - done / in_line:.0%} sooner."
    )
    return picture


def _axes_for_lanes(picture: Picture) -> Axes:
    axes = picture.add_axes((0.16, 0.04, 0.81, 0.92), facecolor=PAPER)
    axes.set_axis_off()
    return axes


def _sheet(picture: Picture, height: float) -> Axes:
    axes = picture.add_axes((0, 0, 1, 1), facecolor=PAPER)
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, height)
    return axes


def _box(axes: Axes, x: float, y: float, width: float, name: str, detail: str, colour: str) -> None:
    shape = FancyBboxPatch((x, y), width, 0.7, boxstyle="round,pad=0,rounding_size=0.08",
                           facecolor=PAPER, edgecolor=colour, linewidth=1.6)  # fmt: skip
    axes.add_patch(shape)
    middle = x + width / 2
    for text, up, size, weight, ink in (
        (name, 0.46, 10.5, "bold", colour),
        (detail, 0.2, 8, "normal", INK),
    ):
        axes.text(middle, y + up, text, ha="center", va="center", fontsize=size, color=ink,
                  fontweight=weight, fontfamily=FONT)  # fmt: skip


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=12,
            color=GREY,
            linewidth=1.3,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=3,
            shrinkB=3,
        )  # fmt: skip
    )


def _note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="left", va="center", fontsize=9, fontfamily=FONT, color=GREY,
              style="italic")  # fmt: skip
