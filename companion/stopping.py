"""Signals only set a flag that is read between steps."""

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGINT, _MAIN = int(signal.SIGINT), threading.main_thread().ident


def undisturbed(update: Callable[[], None]) -> None:
    """Call ``update``; an interrupt that arrives meanwhile is raised after it.

    It calls ``_signal``: the wrappers in ``signal`` look up enums, 10 µs a step.
    """
    # no interrupt arrives in another thread; and what Python did not set it cannot put back
    handler = _signal.getsignal(_SIGINT) if threading.get_ident() == _MAIN else None
    if handler is None:
        return update()
    arrived: list[tuple[int, Any]] = []
    _signal.signal(_SIGINT, lambda *what: arrived.append(what))
    try:
        update()
    finally:
        _signal.signal(_SIGINT, handler)
        if arrived and callable(handler):
            handler(*arrived[0])


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

    A second one raises (KeyboardInterrupt, or SystemExit with 143), so a step that hangs can
    still be left. Outside the main thread no signal arrives and only :meth:`Stop.request` sets
    the flag.
    """
    stop = Stop()

    def note(signum: int, frame: Any) -> None:
        if stop:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
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
