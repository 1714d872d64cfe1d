"""What the benchmarks share: where results go, and how they are printed."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from companion import device as devices

RESULTS = Path(__file__).resolve().parent.parent / "build" / "benchmarks"


def save(name: str, figures: dict[str, Any], device: torch.device, folder: Path = RESULTS) -> Path:
    """Write figures with their conditions to ``folder/name.json``; prints where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "benchmark": name,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "conditions": devices.conditions(device),
        "figures": figures,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path}")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns in plain text, the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


def one_line(conditions: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in conditions.items())
