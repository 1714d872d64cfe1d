"""An explorer for the profiler's schedule: what you ask for, and what is really written."""

import tempfile
import warnings
from typing import Any

import ipywidgets
import torch

from companion.classroom import plots, plots_trace
from companion.classroom.widgets import Explorer
from companion.profiling import Schedule, capture
from companion.trace.reader import read_file


def outcome(schedule: Schedule, steps: int) -> list[list[int]]:
    """Record a loop of ``steps`` additions; the numbers of the step marks of each trace.

    Raises:
        RuntimeError: a profiler is running already.
    """
    number = torch.zeros(4)
    # what capture warns of is what the picture shows
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with capture(directory, schedule) as recording:
            for _ in range(steps):
                number = number + 1
                recording.step()
        return [[step.number for step in read_file(path).steps] for path in recording.files]


class ScheduleExplorer(Explorer):
    """Sliders for a schedule and the loop's length; every picture is a real recording."""

    def __init__(self, schedule: Schedule | None = None, steps: int = 20) -> None:
        """Starts from the guide's: wait 1, warm up 1, record 3, twice, in a loop of 20 steps.

        Raises:
            RuntimeError: a profiler is running already.
        """
        schedule = schedule or Schedule(wait=1, warmup=1, active=3, repeat=2)
        sliders = {
            "skip_first": ("Skip first", 0, 20, schedule.skip_first),
            "wait": ("Wait", 0, 10, schedule.wait),
            "warmup": ("Warm up", 0, 10, schedule.warmup),
            "active": ("Record (active)", 1, 20, schedule.active),
            "repeat": ("Repeat (0: to the end)", 0, 10, schedule.repeat),
            "steps": ("Steps in the loop", 1, 60, steps),
        }
        super().__init__(
            **{
                name: ipywidgets.IntSlider(
                    value=value,
                    min=low,
                    max=max(high, value),
                    description=label,
                    # a recording per stop of the slider, not per pixel of its way
                    continuous_update=False,
                )
                for name, (label, low, high, value) in sliders.items()
            }
        )

    def picture(self, **values: Any) -> plots.Picture:
        steps = values.pop("steps")
        schedule = Schedule(**values)
        return plots_trace.recording(schedule, steps, outcome(schedule, steps))
