"""How often torch.compile compiled, and which guard failed each time.

:func:`recompiles` watches what you run; :func:`count_recompiles` calls one function over a list
of inputs, with a compiler that remembers nothing.
"""

import html
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import LogRecord
from typing import Any

import torch

from companion import advice, tracer

_LOGGERS = ("torch._dynamo.guards.__recompiles", "torch._dynamo.convert_frame")
_LIMIT = re.compile(r"hit config\.(\S+) \((\d+)\)\n\s+function: '(.+)' \((.+):(\d+)\)")


@dataclass(frozen=True)
class Recompile:
    """One time that a function was compiled again."""

    function: str
    file: str
    line: int
    """Where the function begins."""
    guards: tuple[str, ...]
    """For each graph that was there already, the last one first, a condition that failed."""

    @property
    def guard(self) -> str:
        return self.guards[0] if self.guards else "no guard was named"

    @property
    def place(self) -> str:
        return advice.place(self.file, self.line)


@dataclass(repr=False)
class Recompiles:
    """What was compiled while it watched; prints itself, as HTML in a notebook."""

    calls: list[int] = field(default_factory=list)
    """Graphs so far, after each call (of :func:`count_recompiles` only)."""
    _records: list[LogRecord] = field(default_factory=list, repr=False)
    _start: int = 0
    _end: int | None = None

    @property
    def graphs(self) -> int:
        """Graphs compiled so far, the first ones too."""
        return (_graphs() if self._end is None else self._end) - self._start

    @property
    def recompiles(self) -> list[Recompile]:
        texts = [record.getMessage() for record in self._records]
        # at the limit PyTorch announces one more, and then refuses it
        refused = {n - 1 for n, text in enumerate(texts) if _LIMIT.search(text)}
        return [
            found
            for n, text in enumerate(texts)
            if n not in refused and (found := _read(text)) is not None
        ]

    @property
    def limits(self) -> list[str]:
        """Functions that reached the recompile limit: what is new to them runs eagerly from then
        on, what they have compiled stays compiled. PyTorch says so in one log line only."""
        hits = (_LIMIT.search(record.getMessage()) for record in self._records)
        return list(
            dict.fromkeys(
                f"{hit[3]} ({advice.place(hit[4], int(hit[5]))}) reached {hit[1]} = {hit[2]}"
                for hit in hits
                if hit
            )
        )

    @property
    def limit_hit(self) -> bool:
        return bool(self.limits)

    @property
    def summary(self) -> str:
        parts = [
            advice.count(self.graphs, "graph"),
            advice.count(len(self.recompiles), "recompile"),
        ]
        if self.calls:
            parts.append(f"graphs after each call {self.calls}")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [self.summary]
        for number, found in enumerate(self.recompiles, start=1):
            lines.append(f"{number:>2}  {found.function} ({found.place}): {found.guard}")
        return "\n".join([*lines, *(f"{text}: new inputs run eagerly" for text in self.limits)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = advice.html_table(
            ("", "function", "guard that failed"),
            [
                (str(number), f"{found.function} ({found.place})", found.guard)
                for number, found in enumerate(self.recompiles, start=1)
            ],
            code="guard that failed",
        )
        limits = "".join(
            f"<p>✘ {html.escape(text)}: new inputs run eagerly</p>" for text in self.limits
        )
        return f"<p><b>{html.escape(self.summary)}</b></p>{table}{limits}"


@contextmanager
def recompiles(strict: bool = False) -> Iterator[Recompiles]:
    """Watch what is compiled inside: ``with recompiles() as seen: ...; print(seen)``.

    ``seen`` may be read inside, too. A function that had reached its limit before says nothing
    any more and is not listed.

    Raises:
        RuntimeError: with ``strict``, at the first call that reaches the recompile limit.
    """
    with _watching(strict, quiet=False) as seen:
        yield seen


@contextmanager
def _watching(strict: bool, quiet: bool) -> Iterator[Recompiles]:
    import torch._dynamo as dynamo

    seen = Recompiles(_start=_graphs())
    try:
        with (
            tracer.messages(*_LOGGERS, quiet=quiet) as seen._records,
            dynamo.config.patch(fail_on_recompile_limit_hit=strict),
        ):
            yield seen
    except dynamo.exc.FailOnRecompileLimitHit as error:
        where = seen.limits[0] if seen.limits else "a function reached the recompile limit"
        raise RuntimeError(
            f"{where}: new inputs would run eagerly from here on; let sizes be dynamic "
            "(dynamic=None or torch._dynamo.mark_dynamic), or pad to a few sizes"
        ) from error
    finally:
        seen._end = _graphs()


def count_recompiles(
    function: Callable[..., Any],
    inputs: Iterable[Any],
    *,
    dynamic: bool | None = None,
    backend: Any = "eager",
    strict: bool = False,
) -> Recompiles:
    """Compile ``function`` (or a module) anew and call it with each of ``inputs``.

    An input is one argument or a tuple of them. The default backend needs no C++ compiler:
    guards, and so recompiles, are the same with each. What you have compiled stays compiled.

    Raises:
        TypeError: ``function`` cannot be called.
        RuntimeError: with ``strict``, at the call that reaches the recompile limit.
    """
    function = getattr(function, "_orig_mod", function)
    if not callable(function):
        raise TypeError(
            f"count_recompiles() takes a function or a module, not {type(function).__name__}: "
            "give the function itself, and then a list of inputs"
        )
    with tracer.set_aside(), _watching(strict, quiet=True) as seen:
        compiled = torch.compile(tracer.traceable(function), dynamic=dynamic, backend=backend)
        for each in inputs:
            compiled(*each) if isinstance(each, tuple) else compiled(each)
            seen.calls.append(seen.graphs)
    return seen


def _read(text: str) -> Recompile | None:
    head = re.match(r"Recompiling function (.+) in (.+):(\d+)\n", text)
    if not head:
        return None
    guards = re.findall(r"^\s+- \d+/\d+: (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\s+# .*$", "", guard).strip() for guard in guards)
    return Recompile(head[1], head[2], int(head[3]), tuple(dict.fromkeys(plain)))


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
