"""Explorers: a few labelled controls and the picture that they change.

Live in a notebook with a kernel; elsewhere the same cell shows the picture it started with.
"""

import html
import math
from typing import Any

import ipywidgets

from companion.classroom import plots
from companion.state import RunConfig


class Explorer:
    """Controls above a picture. Subclass it and give :meth:`picture`.

    Everything is reached by keyboard: Tab goes from control to control, the arrow keys move a
    slider. The picture has a text alternative, and the sentence below it says the same.
    """

    def __init__(self, **controls: ipywidgets.ValueWidget) -> None:
        """``controls`` by the name under which :meth:`picture` takes their values."""
        self.controls = controls
        self._image, self._text = ipywidgets.HTML(), ipywidgets.HTML()
        self._draw()
        for control in controls.values():
            control.style.description_width = "11em"
            control.layout.width = "min(34em, 100%)"
            control.observe(self._changed, "value")
        self.box = ipywidgets.VBox([*controls.values(), self._image, self._text])
        self.box.add_class("companion-explorer")

    def picture(self, **values: Any) -> plots.Picture:
        """The picture for these values, its ``alt`` filled in."""
        raise NotImplementedError

    def _changed(self, change: Any) -> None:
        self._draw()

    def _draw(self) -> None:
        values = {name: control.value for name, control in self.controls.items()}
        picture = self.picture(**values)
        self._png, self._alt = plots.png(picture), picture.alt
        self._image.value = plots.img(self._png, picture.get_figheight(), picture.alt)
        self._text.value = html.escape(picture.alt)

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = plots.bundle(self._png, self._alt)
        return {**self.box._repr_mimebundle_(), **data}, metadata


class ScheduleExplorer(Explorer):
    """The learning rate over a run: warm-up, then half a cosine."""

    def __init__(self, run: RunConfig | None = None) -> None:
        """Starts from ``run``; by default the preset ``tiny``."""
        self.run = run = run or RunConfig.preset("tiny")
        # every slider can stand on the run's own value, or moving another one would change it
        rates = sorted(
            {run.learning_rate, *(m * 10.0**e for e in range(-5, -1) for m in (1, 2, 5))}
        )
        super().__init__(
            learning_rate=ipywidgets.SelectionSlider(
                options=[(f"{rate:.2g}", rate) for rate in rates],
                value=run.learning_rate,
                description="Peak learning rate",
            ),
            warmup_steps=ipywidgets.IntSlider(
                value=run.warmup_steps,
                max=max(200, 2 * run.warmup_steps),
                step=math.gcd(5, run.warmup_steps),
                description="Warm-up steps",
            ),
            total_steps=ipywidgets.IntSlider(
                value=run.total_steps,
                min=math.gcd(10, run.total_steps),
                max=max(2000, 2 * run.total_steps),
                step=math.gcd(10, run.total_steps),
                description="Total steps",
            ),
            final_fraction=ipywidgets.FloatSlider(
                value=run.final_fraction,
                max=max(1.0, run.final_fraction),
                step=0.01,
                readout_format=".2f",
                description="Final fraction",
            ),
        )

    def picture(self, **values: Any) -> plots.Picture:
        return plots.schedule(self.run, **values)
