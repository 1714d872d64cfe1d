"""Three things that nbval leaves undone, as a pytest plugin: ``pytest -p tools.nbval_fixes``.

A failed cell shows its own output, a tag ``timeout-30`` gives one cell 30 seconds, and a cell
that ran into its time limit never passes.
"""

from collections.abc import Generator
from typing import Any

import pytest


def is_cell(item: pytest.Item) -> bool:
    return type(item).__name__ == "IPyNbCell"


def time_limit(tags: list[str], default: float) -> float:
    """Seconds that a cell with these tags may take."""
    for tag in tags:
        if tag.startswith("timeout-"):
            return float(tag.removeprefix("timeout-"))
    return default


def own_output(outputs: list[dict[str, Any]] | None, lines: int = 40) -> str:
    """The last lines that a cell printed: the reason why torchrun failed stands only there."""
    text = "".join(o.get("text", "") for o in outputs or [] if o.get("output_type") == "stream")
    return "\n".join(text.splitlines()[-lines:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator:
    report = yield
    if is_cell(item) and report.when == "call" and report.failed:
        report.sections.append(("cell output (last 40 lines)", own_output(item.test_outputs)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator:
    if not is_cell(item):
        return (yield)
    options = item.config.option
    default = options.nbval_cell_timeout
    options.nbval_cell_timeout = time_limit(item.cell.metadata.get("tags", []), default)
    try:
        result = yield
    finally:
        options.nbval_cell_timeout = default
    if item.parent.timed_out:
        raise TimeoutError(f"cell {item.cell_num}: it, or a cell before it, ran out of time")
    return result
