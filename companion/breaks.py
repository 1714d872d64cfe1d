"""Where torch.compile had to leave the graph, and why: :func:`graph_breaks`.

PyTorch logs every break, also those before the first tensor operation, which
``torch._dynamo.explain`` does not count; the report is made from these messages.
"""

import contextlib
import copy
import html
import inspect
import io
import linecache
import re
import site
import sysconfig
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from companion import advice, tracer

HERE = __file__
LIBRARIES = tuple(
    str(Path(folder).resolve()) + "/"
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        str(Path(torch.__file__).parent),
    }
)
"""Code below these folders is a library's, not the reader's."""


@dataclass(frozen=True)
class Break:
    """One place at which the graph ends."""

    reason: str
    """One sentence for people."""
    file: str
    line: int
    """Of the reader's own code."""
    function: str
    source: str
    """That line."""
    rewrite: str
    """What to write instead."""
    library: str
    """``file:line`` where it happened, if that is in a library which the line calls; else ''."""
    gives_up: str
    """The function that runs eagerly because nothing can be resumed here, else ''. What else in
    it would break shows only when this one is mended."""
    times: int
    """How often the tracer stopped here: again when the function is traced on its own."""
    message: str
    """What PyTorch says, whole."""

    @property
    def place(self) -> str:
        return advice.place(self.file, self.line)


@dataclass(frozen=True, repr=False)
class BreakReport:
    """What one call of a compiled function showed; prints itself as text, or HTML in a notebook."""

    name: str
    graphs: int
    breaks: tuple[Break, ...]
    """In the order of execution."""
    fullgraph: bool
    """Whether fullgraph=True passes. It is another test: it takes some things into the graph
    that break at the default settings."""
    fullgraph_message: str
    """One line; '' where it passes."""
    error: str
    """One sentence if torch.compile fails here though the code itself runs; else ''."""

    @property
    def summary(self) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        if not self.graphs and not self.breaks:
            return f"{self.name}: nothing was captured, no tensor operation was seen"
        breaks = advice.count(len(self.breaks), "break")
        return f"{self.name}: {advice.count(self.graphs, 'graph')}, {breaks}"

    @property
    def fullgraph_summary(self) -> str:
        if self.fullgraph:
            more = ", though there are breaks at the default settings" if self.breaks else ""
            return f"fullgraph=True passes{more}"
        return f"fullgraph=True raises: {self.fullgraph_message}"

    def __str__(self) -> str:
        lines = [self.summary]
        for number, found in enumerate(self.breaks, start=1):
            lines.append(f"{number:>2}  {found.place}  {found.source}")
            lines.append(f"    why      {_why(found)}")
            lines.append(f"    rewrite  {found.rewrite}")
        return "\n".join([*lines, self.fullgraph_summary])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = advice.html_table(
            ("", "where", "line", "why", "write instead"),
            [
                (str(number), found.place, found.source, _why(found), found.rewrite)
                for number, found in enumerate(self.breaks, start=1)
            ],
            code="line",
        )
        first, last = html.escape(self.summary), html.escape(self.fullgraph_summary)
        return f"<p><b>{first}</b></p>{table}<p>{last}</p>"


def graph_breaks(function: Callable[..., Any], *inputs: Any, **named: Any) -> BreakReport:
    """Compile ``function`` (or a module) for these inputs and report every graph break.

    No C++ compiler is needed: graphs are captured, and run eagerly. The function is called three
    times (plain, compiled, with fullgraph=True) on copies of the inputs and of the module; its
    printed output is dropped and the random state put back. What it changes elsewhere, it
    changes three times. Functions that you have compiled stay compiled.

    Two breaks with one reason on one line count as one place, with its ``times``.

    Raises:
        TypeError: ``function`` cannot be called, or not with these inputs.
        RuntimeError: it raises by itself, without torch.compile.
    """
    target, name = _plain(function)
    _check_arity(target, name, inputs, named)

    def call(**options: Any) -> None:
        fresh, (args, kwargs) = _copied(target), _copied((inputs, named))
        if options:
            fresh = torch.compile(tracer.traceable(fresh), **options)
        fresh(*args, **kwargs)

    graphs = 0

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    error = message = ""
    with _undisturbed():
        with tracer.set_aside():  # plain torch.cond compiles, too
            try:
                call()
            except Exception as own:
                raise RuntimeError(
                    f"{name} raises by itself, without torch.compile, so this is no graph break: "
                    f"{_failure(own)}; mend that first"
                ) from own
        with tracer.set_aside(), tracer.messages(*_LOGGERS, quiet=True) as logged:
            try:
                call(backend=backend)
            except Exception as failure:
                error = (
                    f"torch.compile fails on it, though the code itself runs: {_failure(failure)}"
                )
        with tracer.set_aside(), tracer.messages(*_LOGGERS, quiet=True):
            try:
                call(backend="eager", fullgraph=True)
            except Exception as refusal:
                message = _failure(refusal)
    breaks = _breaks([found for record in logged if (found := _read(record)) is not None])
    return BreakReport(name, graphs, tuple(breaks), not message, message, error)


# ── calling it without a trace ───────────────────────────────────────────────────────────────

_LOGGERS = (
    "torch._dynamo.symbolic_convert.__graph_breaks",
    "torch._dynamo.convert_frame.__graph_breaks",
    "torch._dynamo",  # it warns about some breaks, too
)


def _plain(function: Any) -> tuple[Any, str]:
    """The function or module itself, whatever compiled it before, and its name."""
    while True:
        inner = getattr(function, "_orig_mod", None)
        if inner is None:
            inner = getattr(function, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        function = inner
    if not callable(function):
        raise TypeError(
            f"graph_breaks() takes a function or a module, not {_a(function)}: "
            "give the function itself, and its inputs after it"
        )
    name = getattr(function, "__qualname__", type(function).__name__)
    return function, name.rpartition("<locals>.")[2]


def _a(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"{type(value).__name__} ({value!r:.60})"


def _check_arity(function: Any, name: str, inputs: tuple, named: dict) -> None:
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # a builtin without one
    try:
        signature.bind(*inputs, **named)
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} cannot be called with these inputs: {error}; "
            "give graph_breaks() the function and then exactly what you would call it with"
        ) from None


def _copied(value: Any) -> Any:
    """A copy that may be changed. A module's parameters are shared: a forward leaves them be."""
    shared = {id(p): p for p in value.parameters()} if isinstance(value, nn.Module) else {}
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return value
    try:
        value = copy.deepcopy(value, shared)
    except Exception:  # some things refuse, such as tensors inside a graph of gradients
        return value
    if isinstance(value, nn.Module):
        for parent in list(value.modules()):
            for name, child in parent.named_children():
                if isinstance(child, torch._dynamo.OptimizedModule):
                    setattr(parent, name, child._orig_mod)
    return value


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    with (
        torch.random.fork_rng(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


# ── reading what PyTorch says ────────────────────────────────────────────────────────────────


def _read(record: Any) -> Break | None:
    """The break that a log message tells of, at the place that PyTorch names."""
    text = record.getMessage()
    start = re.match(r"Graph break .*?in user code at (.+):(\d+)\n", text)
    if start:
        file, line = start[1], int(start[2])
        why, _, stack = text[start.end() :].partition("\nUser code traceback:\n")
        why = why.removeprefix("Graph Break Reason: ")
    elif text.startswith("Graph break: ") and record.exc_info and _frames(text):
        # the whole function is left to eager at once; the reason is in the exception
        why, stack = str(record.exc_info[1]), text
        file, line, _ = _frames(stack)[-1]
    else:
        return None
    why = re.split(r"\n+(?:Stack variable source attribution|from user code):", why)[0]
    why = re.sub(r"^[^\n]*:\n\n", "", why)  # in what PyTorch was busy
    why = why.partition("*** While handling this graph break")[0].strip()
    own = _own_frame(_frames(stack), file, line)
    source = linecache.getline(own[0], own[1]).strip()
    reason, rewrite = advice.explain(why, source)
    library = "" if (file, line) == own[:2] else f"{'/'.join(Path(file).parts[-2:])}:{line}"
    gives_up = _gives_up(text)
    return Break(reason, own[0], own[1], own[2], source, rewrite, library, gives_up, 1, why)


def _gives_up(text: str) -> str:
    """Which function runs eagerly because of this break, if the message says so."""
    named = re.search(r"(?:frame skipped:|skip tracing the frame) (\S+) \((.+) line (\d+)\)", text)
    if named:
        return f"{named[1]} ({advice.place(named[2], int(named[3]))})"
    skipped = re.search(r"[Ss]kipping the (function|rest)|Graph break: skip:", text)
    return "the function" if skipped else ""


def _breaks(found: list[Break]) -> list[Break]:
    """One for each place and reason, in order: a function that is traced with its caller, and
    then again on its own, breaks twice at one place."""
    places: dict[tuple[str, int, str], Break] = {}
    for each in found:
        key = each.file, each.line, each.reason
        first = places.get(key)
        places[key] = (
            each
            if first is None
            else replace(first, times=first.times + 1, gives_up=first.gives_up or each.gives_up)
        )
    return list(places.values())


def _frames(stack: str) -> list[tuple[str, int, str]]:
    found = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', stack, re.MULTILINE)
    # a function that goes on after a break has a name of its own, which tells the reader nothing
    return [
        (file, int(line), re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", function))
        for file, line, function in found
    ]


def _own_frame(frames: list[tuple[str, int, str]], file: str, line: int) -> tuple[str, int, str]:
    """The reader's frame that is nearest to the break, or else the break's."""
    for index in range(len(frames) - 1, -1, -1):
        if frames[index][0] == HERE:
            frames = frames[index + 1 :]
            break
    for frame in reversed(frames):
        if not _in_library(frame[0]):
            return frame
    return file, line, frames[-1][2] if frames else ""


def _in_library(file: str) -> bool:
    return file.startswith("<frozen") or str(Path(file).resolve()).startswith(LIBRARIES)


def _why(found: Break) -> str:
    more = f" (in {found.library})" if found.library else ""
    if found.gives_up:
        more += f"; it cannot be resumed here, so {found.gives_up} runs eagerly"
    return found.reason + more


def _failure(error: BaseException) -> str:
    """An exception in one line, with the reader's line where the exception knows it."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in stack]
    own = [frame for frame in frames if frame[0] != HERE and not _in_library(frame[0])]
    where = f" at {advice.place(*own[-1][:2])}" if own else ""
    text = str(error).strip()
    if isinstance(error, torch._dynamo.exc.Unsupported | torch._dynamo.exc.UserError):
        text = advice.explain(text, linecache.getline(*own[-1][:2]).strip() if own else "")[0]
    text = textwrap.shorten(text.partition("\n\n")[0], 300)
    return f"{type(error).__name__}{where}{': ' if text else ''}{text}"
