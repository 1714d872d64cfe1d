"""What a step leaves behind, unread until you ask: reading is what waits for the device."""

import math
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from companion import device as devices


class NonFiniteLoss(ArithmeticError):
    """The loss of a step is NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"step {step}: the loss is {loss}; the weights from then on are not to be trusted. "
            "Lower the learning rate, lengthen the warm-up, or look at that step's batch"
        )


class Record:
    """One completed step. Reading ``loss`` or a speed is what waits for the device."""

    __slots__ = (
        "_clock", "_grad_norm", "_loss_sum", "_rate", "_value", "_work",
        "learning_rate", "position", "step", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        position: int,
        tokens: int,
        learning_rate: float,
        loss_sum: Tensor,
        value: float | None,
        work: Any,
        grad_norm: Tensor | None,
    ) -> None:
        self.step = step
        """Number of this step; the first is 1."""
        self.position = position
        """Samples consumed, over all ranks."""
        self.tokens = tokens
        """Targets in this step, over all ranks."""
        self.learning_rate = learning_rate
        """That this step used."""
        # the sum over all ranks once ``work`` is done; ``value`` where it is known already
        self._loss_sum, self._value, self._work = loss_sum, value, work
        self._grad_norm = grad_norm
        self._clock: Clock | None = None
        self._rate: tuple[float, float] | None = None

    @property
    def loss(self) -> float:
        """Mean loss per target over the global batch.

        Raises:
            NonFiniteLoss: it is NaN or infinite.
        """
        if self._value is None:
            if self._clock is not None:
                self._clock.wait()
            if self._work is not None:
                self._work.wait()
            value = self._loss_sum.item()
            if not math.isfinite(value):
                raise NonFiniteLoss(self.step, value)
            self._value = value
        return self._value / self.tokens

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping; None where the run does not clip."""
        return None if self._grad_norm is None else self._grad_norm.item()

    @property
    def tokens_per_second(self) -> float:
        """Over the steps since a speed was last read; your own loop body is left out."""
        return self._speed()[0]

    @property
    def step_seconds(self) -> float:
        """Mean over the same steps."""
        return self._speed()[1]

    def _speed(self) -> tuple[float, float]:
        if self._clock is None:
            raise ValueError("a step on its own has no speed: read it from the records of train()")
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
