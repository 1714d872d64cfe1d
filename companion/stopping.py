"""Signals only set a flag that is read between steps."""

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_SIGINT = int(signal.SIGINT)


class Undisturbed:
    """Holds an interrupt back while weights, schedule and position change together.

    It calls ``_signal``: the wrappers in ``signal`` look up enums, 10 µs a step.
    """

    __slots__ = ("arrived", "before")

    def __enter__(self) -> None:
        self.arrived: tuple[int, Any] | None = None
        self.before: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            self.before = _signal.getsignal(_SIGINT)
            if callable(self.before):
                _signal.signal(_SIGINT, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self.arrived = (signum, frame)

    def __exit__(self, *exc: object) -> None:
        if callable(self.before):
            _signal.signal(_SIGINT, self.before)
            if self.arrived:
                self.before(*self.arrived)


class Stop:
    """True once a signal has arrived, or :meth:`request` was called."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal's number, None where there was none."""
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested


@contextlib.contextmanager
def stop_requested() -> Iterator[Stop]:
    """Turn Ctrl-C, a kernel interrupt and SIGTERM into a flag that you read between steps.

    A second Ctrl-C raises KeyboardInterrupt, so a step that hangs can still be left. Outside
    the main thread no signal arrives and only :meth:`Stop.request` sets the flag.
    """
    stop = Stop()

    def note(signum: int, frame: Any) -> None:
        if stop and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = int(signum)
        stop.request()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
