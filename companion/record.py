"""What a step leaves behind, unread until you ask: reading is what waits for the device."""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from companion import device as devices


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite; the message names the step."""


def check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"step {step}: the loss is {loss}; the weights from then on are not to be trusted. "
            "Lower the learning rate, lengthen the warm-up, or look at that step's batch"
        )


@dataclass(slots=True)
class StepResult:
    """What one optimizer step knows, still on the device: nothing here has been waited for."""

    loss_sum: Tensor
    """This rank's sum; the sum over all ranks once ``work`` is done."""
    value: float | None
    """``loss_sum`` as a number, where it is known without waiting."""
    count: int
    """Targets over all ranks."""
    grad_norm: Tensor | None
    """Before clipping; None where the run does not clip."""
    work: Any
    """Of the sum over the ranks; None on one process."""


class Record:
    """One completed step. Reading ``loss`` or a speed is what waits for the device."""

    __slots__ = ("_clock", "_loss", "_rate", "_result", "learning_rate", "position", "step")

    def __init__(
        self, step: int, position: int, learning_rate: float, result: StepResult, clock: "Clock"
    ) -> None:
        self.step = step
        """Number of this step; the first is 1."""
        self.position = position
        """Samples consumed, over all ranks."""
        self.learning_rate = learning_rate
        """That this step used."""
        self._result, self._clock = result, clock
        self._loss: float | None = None
        self._rate: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        """Targets in this step, over all ranks."""
        return self._result.count

    @property
    def loss(self) -> float:
        """Mean loss per target over the global batch.

        Raises:
            NonFiniteLoss: it is NaN or infinite.
        """
        if self._loss is None:
            result = self._result
            if result.value is None:
                self._clock.wait()
                if result.work is not None:
                    result.work.wait()
                result.value = result.loss_sum.item()
                check_finite(result.value, self.step - 1)
            self._loss = result.value / result.count
        return self._loss

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping; None where the run does not clip."""
        return None if self._result.grad_norm is None else self._result.grad_norm.item()

    @property
    def tokens_per_second(self) -> float:
        """Over the steps since a speed was last read; your own loop body is left out."""
        return self._speed()[0]

    @property
    def step_seconds(self) -> float:
        """Mean over the same steps."""
        return self._speed()[1]

    def _speed(self) -> tuple[float, float]:
        if self._rate is None:
            self._rate = self._clock.close()
        return self._rate

    def row(self) -> dict[str, float | int | None]:
        """Plain numbers, ready for JSON."""
        return {
            "step": self.step,
            "position": self.position,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
        }


class Clock:
    """Seconds inside steps and targets seen, over a window that a reader closes.

    CUDA runs behind the host, so there a step's time is taken between two events in the
    stream, of the last 64 steps at most; nothing waits until the window is read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.events: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque(maxlen=64)
        self.seconds, self.tokens, self.steps = 0.0, 0, 0
        self.last = (math.nan, math.nan)

    def start(self) -> None:
        if self.cuda:
            self.started = self.event()
        else:
            self.began = time.perf_counter()

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stop(self, tokens: int) -> None:
        if self.cuda:
            self.events.append((self.started, self.event(), tokens))
        else:
            self.seconds += time.perf_counter() - self.began
            self.tokens += tokens
            self.steps += 1

    def wait(self) -> None:
        """Wait for the device; where steps are timed by the host that wait is step time."""
        if self.device.type == "mps":
            before = time.perf_counter()
            devices.synchronize(self.device)
            self.seconds += time.perf_counter() - before

    def close(self) -> tuple[float, float]:
        self.wait()
        if self.events:
            self.events[-1][1].synchronize()
            self.seconds = sum(a.elapsed_time(b) for a, b, _ in self.events) / 1e3
            self.tokens = sum(tokens for _, _, tokens in self.events)
            self.steps = len(self.events)
            self.events.clear()
        if self.steps:
            self.last = (self.tokens / self.seconds, self.seconds / self.steps)
        self.seconds, self.tokens, self.steps = 0.0, 0, 0
        return self.last
