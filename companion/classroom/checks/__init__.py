"""What the check of an exercise says: not attempted yet, a hint for one mistake, or a pass.

A check is a plain function of the learner's answer. It returns the sentence of a pass, raises
:class:`Hint` for a mistake that it knows, and is wrapped by :func:`check`, so that nothing
that the learner wrote can make the check cell fail.
"""

import ast
import functools
import html
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

OPEN, HINT, PASSED = "not attempted yet", "hint", "passed"
_MARKS = {OPEN: ("–", "#6e7781"), HINT: ("✘", "#b35900"), PASSED: ("✔", "#1a7f37")}


@dataclass(frozen=True)
class Verdict:
    """The answer of a check; shows itself in a notebook and in a terminal."""

    status: str
    """``not attempted yet``, ``hint`` or ``passed``."""
    text: str

    def __str__(self) -> str:
        return f"{_MARKS[self.status][0]} {self.status}" + (f": {self.text}" if self.text else "")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark, colour = _MARKS[self.status]
        text = f": {html.escape(self.text)}" if self.text else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:2px 0 2px 10px">'
            f'<b style="color:{colour}">{mark} {self.status}</b>{text}</div>'
        )


class Hint(Exception):
    """Raised by a check: the answer has this mistake."""


def check(judge: Callable[..., str]) -> Callable[..., Verdict]:
    """Turn ``judge`` (returns the text of a pass, raises Hint) into a check that never raises.

    A bare ``raise NotImplementedError`` in the answer, as the stubs have it, reads as not
    attempted. The random number generator is left as it was.
    """

    @functools.wraps(judge)
    def checked(*answers: Any, **more: Any) -> Verdict:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            try:
                return Verdict(PASSED, judge(*answers, **more))
            except Hint as hint:
                return Verdict(HINT, str(hint))
            except NotImplementedError as error:
                # torch raises it too, but with a text
                return Verdict(HINT, _failure(error)) if error.args else Verdict(OPEN, "")
            except (Exception, SystemExit) as error:
                return Verdict(HINT, _failure(error))

    return checked


def _failure(error: BaseException) -> str:
    """The learner's own line in the traceback, if one can be told."""
    frame, place = error.__traceback__, ""
    while frame is not None:
        code = frame.tb_frame.f_code
        if code.co_filename.startswith("<") or "ipykernel" in code.co_filename:
            line = linecache.getline(code.co_filename, frame.tb_lineno).strip()
            place = f" in line {frame.tb_lineno}" + (f" ({line})" if line else "")
        frame = frame.tb_next
    words = str(error).strip().splitlines()
    text = f": {words[0]}" if words else ""
    return f"your code stopped{place} with {type(error).__name__}{text}"


def need_function(answer: Any) -> None:
    """
    Raises:
        Hint: the answer is not a function.
    """
    if not callable(answer):
        raise Hint(
            f"the check was given {type(answer).__name__}, not a function; "
            "pass the function itself, without calling it"
        )


def unchanged(answer: Any, original: Callable[..., Any]) -> bool:
    """Whether the answer is still the function that was handed out, comments and layout aside."""
    try:
        # not the byte code: that depends on how the surrounding module imports its names
        return _tree(answer) == _tree(original)
    except (OSError, TypeError, SyntaxError):
        return False


def _tree(function: Any) -> str:
    return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(function))))
