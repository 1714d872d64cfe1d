"""Honest time measurement: phases of a step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

STEP_ENDS_WITH = "optimizer"
"""The phase whose end ends a step."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_recorder: Any = None


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a phase of the step: ``with phase("forward"): ...``.

    The loop's names are ``data``, ``forward``, ``backward`` and ``optimizer``. It does nothing,
    in a fraction of a microsecond, unless :func:`phases` is open. A phase inside a phase counts
    as the outer one.
    """
    return _NOTHING if _recorder is None else _recorder.range(name)


@dataclass
class PhaseTimes:
    """Filled while :func:`phases` is open."""

    device: torch.device
    steps: list[dict[str, float]] = field(default_factory=list)
    _open: bool = False

    def range(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING if self._open else self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._open = True
        start = perf_counter()
        try:
            yield
        finally:
            self._open = False
            if not self.steps:
                self.steps.append({})
            self.steps[-1][name] = self.steps[-1].get(name, 0.0) + perf_counter() - start
            if name == STEP_ENDS_WITH:
                self.steps.append({})


@contextmanager
def phases(device: torch.device) -> Iterator[PhaseTimes]:
    """Measure the phases of the steps that run inside. First form; the full one follows."""
    global _recorder
    if _recorder is not None:
        raise RuntimeError("phases() is already open: close it before you open another")
    _recorder = times = PhaseTimes(device)
    try:
        yield times
    finally:
        _recorder = None
