"""Dynamo, torch.compile's tracer, looked at without being changed.

:func:`set_aside` lets a report compile whatever it likes and leaves the caller's compiled
functions, counters and shape memory as they were. :func:`messages` collects what PyTorch logs;
:func:`catch_logs` does so for readers.
"""

import gc
import io
import logging
import os
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn


@contextmanager
def set_aside() -> Iterator[None]:
    """Work with a Dynamo that has seen nothing yet; afterwards it is as it was before.

    Compiled entries hang on code objects, so every function that Dynamo has seen gets a copy of
    its code for the time being. ``torch._dynamo.reset()`` would be shorter, and would make all
    that the caller has compiled compile again.
    """
    import torch._dynamo.pgo as shapes
    from torch._dynamo import convert_frame, reset, utils

    tracker: Any = getattr(convert_frame, "input_codes", None)
    if not hasattr(tracker, "seen") or not hasattr(shapes, "_CODE_STATE"):
        reset()  # a torch that is built differently: correct, at the caller's expense
        yield
        reset()
        return

    seen = [code for ref in tracker.seen if (code := ref()) is not None]
    originals = _give_fresh_code(seen)
    convert_frame.input_codes = own = type(tracker)()
    shape_memory, shapes._CODE_STATE = shapes._CODE_STATE, defaultdict(shapes.CodeState)
    # Dynamo changes these in place, so they are put back in place
    memories: list[tuple[Any, Any]] = [
        (memory, deepcopy(memory))
        for memory in (utils.counters, utils.warn_once_cache, convert_frame.FRAME_COMPILE_COUNTER)
    ]
    breaks = len(utils.graph_break_reasons)
    try:
        yield
    finally:
        for function, code in originals:
            function.__code__ = code
        convert_frame.input_codes = tracker
        for ref in own.seen:
            if (code := ref()) is not None and not any(code is other for other in seen):
                torch._C._dynamo.eval_frame.reset_code(code)
        shapes._CODE_STATE = shape_memory
        for memory, was in memories:
            memory.clear()
            memory.update(was)
        del utils.graph_break_reasons[breaks:]


def _give_fresh_code(
    codes: Iterable[types.CodeType],
) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Give the functions with these code objects a copy; returns them with their own code."""
    # Dynamo knows nn.Module's own methods by the identity of their code
    exempt = {id(getattr(method, "__code__", None)) for method in vars(nn.Module).values()}
    fresh = {id(code): (code, code.replace()) for code in codes if id(code) not in exempt}
    changed = []
    if fresh:
        for function in gc.get_referrers(*(code for code, _ in fresh.values())):
            if isinstance(function, types.FunctionType) and id(function.__code__) in fresh:
                code, copy = fresh[id(function.__code__)]
                changed.append((function, code))
                function.__code__ = copy
    return changed


def traceable(function: Any) -> Any:
    """``function``, or what to compile instead of a module of torch's own.

    Dynamo starts at no frame of torch.nn, so torch.compile calls such a module from one frame
    that all of them share; here it gets a frame of its own.
    """
    own = isinstance(function, nn.Module) and type(function).forward.__code__.co_filename
    if not own or not own.startswith(str(Path(torch.__file__).parent)):
        return function

    def forward(*inputs: Any, **named: Any) -> Any:
        return function(*inputs, **named)

    forward.__code__ = forward.__code__.replace(co_name=type(function).__name__)
    return forward


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        from torch._dynamo import utils

        self.records.append(record)
        # else a second break at one place would be logged without the way there
        utils.reset_graph_break_dup_checker()


@contextmanager
def messages(*names: str, quiet: bool = False) -> Iterator[list[logging.LogRecord]]:
    """Collect what these loggers log; ``quiet`` keeps it from anyone else meanwhile.

    A name such as ``torch._dynamo.guards.__recompiles`` is one of PyTorch's artifacts, which are
    logged at DEBUG and are off unless asked for: it is switched on. Other loggers keep their
    level. All is put back at the end.
    """
    import torch._dynamo  # registers the names

    collector = _Collector()
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    enabled = torch._logging._internal.log_state.artifact_names
    asked = {name.rpartition(".__")[2] for name in names if ".__" in name} - enabled
    try:
        enabled |= asked
        for logger in loggers:
            artifact = logger.name.rpartition(".__")[2] if ".__" in logger.name else None
            if quiet or artifact in asked:
                logger.handlers, logger.propagate = [], False
            logger.addHandler(collector)
            if artifact:
                logger.setLevel(logging.DEBUG)
        yield collector.records
    finally:
        enabled -= asked
        for logger, level, propagate, handlers in before:
            logger.setLevel(level)
            logger.propagate, logger.handlers = propagate, handlers


@contextmanager
def catch_logs(*channels: str) -> Iterator[io.StringIO]:
    """Catch channels of TORCH_LOGS as text: ``with catch_logs("recompiles") as log: ...``.

    ``log.getvalue()`` is the text, during and after. It is for processes in which torch is
    imported already, where setting the variable does nothing. Levels as in TORCH_LOGS: ``+`` for
    debug. Afterwards logging is as TORCH_LOGS sets it.

    Raises:
        ValueError: there is no such channel.
    """
    import torch._dynamo  # registers the channels
    from torch._logging import _internal as logs

    if not channels:
        raise ValueError("catch_logs() needs a channel, for example catch_logs('recompiles')")
    levels = {
        channel.lstrip("+"): logging.DEBUG if channel.startswith("+") else logging.INFO
        for channel in channels
    }
    known = {*logs.log_registry.log_alias_to_log_qnames, *logs.log_registry.artifact_names}
    if unknown := sorted(levels.keys() - known):
        raise ValueError(
            f"torch has no log channel {', '.join(unknown)}: choose for example graph_breaks, "
            "recompiles, perf_hints or output_code (all: TORCH_LOGS=help)"
        )
    # set_logs() does nothing where the variable is set, and changes the state in place
    before, variable = logs.log_state, os.environ.pop(logs.LOG_ENV_VAR, None)
    logs.log_state = deepcopy(before)
    text = io.StringIO()
    taken: dict[logging.Logger, list[logging.Handler]] = {}
    try:
        settings: dict[str, Any] = {
            name: True if name in logs.log_registry.artifact_names else level
            for name, level in levels.items()
        }
        torch._logging.set_logs(**settings)
        for logger in map(logging.getLogger, logs.log_registry.get_log_qnames()):
            taken[logger] = logger.handlers
            logger.handlers = []
            for old in taken[logger]:
                handler = logging.StreamHandler(text)
                handler.setFormatter(old.formatter)
                logger.addHandler(handler)
        yield text
    finally:
        if variable is not None:
            os.environ[logs.LOG_ENV_VAR] = variable
        for logger, handlers in taken.items():
            logger.handlers = handlers
        logs.log_state = before
        logs._init_logs()
