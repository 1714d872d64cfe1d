"""Words for people: what PyTorch's graph-break messages mean, and how reports are set."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """One kind of break: how PyTorch's message shows it, and what to tell the reader."""

    pattern: str
    reason: str
    rewrite: str


KINDS = (
    Kind(
        r"Data-dependent branching.*\x00while\b",
        "the number of rounds of this `while` depends on the values of a tensor",
        "run a fixed number of rounds, or express the loop with torch.while_loop",
    ),
    Kind(
        r"Data-dependent branching|[Cc]ould not guard on data-dependent expression",
        "which way to go depends on the values of a tensor",
        "compute both results and choose with torch.where(condition, a, b), or use torch.cond",
    ),
    Kind(
        r"Tensor\.item\(\)|Tensor\.tolist\(\)|operator `(bool|int|float)`",
        "a tensor is turned into a Python number here",
        "keep it a tensor (one of no dimensions works in arithmetic); read numbers after the step",
    ),
    Kind(
        r"Dynamic shape operator",
        "the size of this result depends on the values of a tensor",
        "keep the shape: torch.where(mask, x, 0) instead of x[mask], and divide by mask.sum()",
    ),
    Kind(
        r"builtin operator `(print|input)`",
        "`{0}` talks to the outside world",
        "return the value and print it outside the compiled function",
    ),
    Kind(
        r"builtin operator `open`|\b(TextIOWrapper|BufferedReader|BufferedWriter)\b",
        "files are opened or used here",
        "read and write files outside the compiled function",
    ),
    Kind(
        r"`_?warnings\.warn`|module: _?warnings\b",
        "a warning is given here",
        "warn outside the compiled function",
    ),
    Kind(
        r"logging\.Logger|LoggingLogger|^Logger",
        "a message is logged here",
        "log outside the compiled function",
    ),
    Kind(
        r"builtin `time\.|module: time, ",
        "the clock is read here",
        "time the call from outside: inside a graph the clock means nothing",
    ),
    Kind(
        r"torch\.compiler\.disable",
        "a function that is marked with torch.compiler.disable is called here",
        "take the mark off, or call the function before or after the compiled part",
    ),
    Kind(
        r"torch\._dynamo\.graph_break\(\)",
        "the code asks for a break here: torch._dynamo.graph_break()",
        "remove the call",
    ),
    Kind(
        r"(?:copy\.)?deepcopy",
        "a tensor is copied with copy.deepcopy",
        "use x.clone(), or x.detach().clone() to leave the graph of gradients",
    ),
    Kind(
        r"Tensor\.backward\(\)|torch\.autograd\.(?:backward|grad)",
        "gradients are computed inside the compiled function",
        "compile the forward pass and the loss; call backward() outside",
    ),
    Kind(
        r"function `manual_seed`",
        "the random generator is seeded here",
        "seed it outside the compiled function",
    ),
    Kind(
        r"builtin `(?:<unknown module>\.)?([\w.]+?)\.?`|Failed to trace builtin operator.*`(\w+)`",
        "`{0}` is not Python code that can be traced",
        "call it outside the compiled function and hand in the result",
    ),
    Kind(
        r"Observed exception.*raised exception ([^\n]+)",
        "tracing this line ends in an exception that plain Python does not raise: {0}",
        "move this line out of the compiled function",
    ),
)
"""The first one whose pattern is found in the message counts."""


def explain(message: str, source: str) -> tuple[str, str]:
    """The reason in one sentence, and what to write instead of the line ``source``.

    For a kind that is not in the table both are PyTorch's own words.
    """
    facts = re.sub(r"^  Hint: .+\n?", "", message, flags=re.M)
    for kind in KINDS:
        if match := re.search(kind.pattern, f"{facts}\x00{source}", re.DOTALL):
            words = [word for word in match.groups() if word]
            return kind.reason.format(*words), kind.rewrite
    explanation = re.search(r"^  Explanation: (.+?)(?:\n\s*\n|\n  \w|\Z)", message, re.M | re.S)
    reason = explanation[1] if explanation else message.partition("\n")[0]
    hints = re.findall(r"^  Hint: (.+)$", message, re.M)
    useful = [h for h in hints if not re.search(r"report|file an issue|Dynamo bug", h)]
    rewrite = useful[0] if useful else "move this line out of the compiled function"
    return " ".join(reason.split()).rstrip("."), " ".join(rewrite.split()).rstrip(".")


def place(file: str, line: int) -> str:
    """``model.py:12``, or ``cell:12`` for code of a notebook's cell, whose file has no name."""
    cell = re.search(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input", file)
    return f"{'cell' if cell else Path(file).name}:{line}"


def count(number: int, noun: str) -> str:
    """``no breaks``, ``1 break``, ``2 breaks``."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], code: str) -> str:
    """An HTML table of plain texts; the column headed ``code`` is set as code. '' without rows."""

    def cell(text: str, tag: str, is_code: bool = False) -> str:
        text = html.escape(text)
        style = "text-align:left;vertical-align:top"
        return f'<{tag} style="{style}">{f"<code>{text}</code>" if is_code else text}</{tag}>'

    if not rows:
        return ""
    body = "".join(
        "<tr>"
        + "".join(cell(text, "td", head == code) for head, text in zip(heads, row, strict=True))
        + "</tr>"
        for row in rows
    )
    head = "".join(cell(text, "th") for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
