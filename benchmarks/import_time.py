"""What ``import companion`` adds to ``import torch``, in fresh processes.

Each round starts one process of each kind, in shuffled order; the difference is taken within the
round. The time inside the added import statement itself is the sharper figure of the two.

    python -m benchmarks.import_time
"""

import argparse
import subprocess
import sys
from functools import partial

import numpy as np
import torch

from benchmarks.common import RESULTS, one_line, save, table
from companion import device as devices
from companion.measure import interleaved, median_interval

ADDED = {
    "import companion": "import companion",
    "the training path": "from companion.loop import build, train",
}
UNWANTED = ("IPython", "ipykernel", "ipywidgets", "jupyter", "matplotlib", "tensorboard")
CHILD = """
import sys, torch
from time import perf_counter
start = perf_counter()
{statement}
print(perf_counter() - start)
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    cpu = torch.device("cpu")
    print(one_line(devices.conditions(cpu)))
    inside: dict[str, list[float]] = {"torch": []} | {name: [] for name in ADDED}
    loaded: dict[str, set[str]] = {}

    def start(name: str) -> None:
        code = CHILD.format(statement=ADDED.get(name, "pass"))
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True,
            cwd=RESULTS.parent.parent,
        )  # fmt: skip
        seconds, modules = done.stdout.splitlines()
        inside[name].append(float(seconds))
        loaded[name] = set(modules.split())

    kinds = {name: partial(start, name) for name in inside}
    seconds = interleaved(kinds, cpu, arguments.rounds, calls=1)
    figures, rows = {}, []
    for name in ADDED:
        process = median_interval(1e3 * (seconds[name] - seconds["torch"]))
        # the same rounds as above: the last ones
        statement = median_interval(1e3 * np.array(inside[name][-len(seconds[name]) :]))
        unwanted = sorted(loaded[name].intersection(UNWANTED) - loaded["torch"])
        figures[name] = {"statement_ms": statement, "process_ms": process, "unwanted": unwanted}
        spans = [
            f"{middle:.1f} [{low:.1f}, {high:.1f}]" for middle, low, high in (statement, process)
        ]
        rows.append((name, *spans, ", ".join(unwanted) or "none"))
    torch_ms = median_interval(1e3 * seconds["torch"])
    figures["process with torch alone"] = {"process_ms": torch_ms}
    print(f"a process that imports torch alone: {torch_ms[0]:,.0f} ms")
    print(table(("adds, ms", "statement", "process less process", "Jupyter and plotting"), rows))
    save("import_time", {"rounds": len(seconds["torch"]), **figures}, cpu)


if __name__ == "__main__":
    main()
