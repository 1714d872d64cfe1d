"""Cold and warm starts of ``tiny``, whole and block by block, in fresh processes.

CPU time counts children (g++) and leaves imports out. A start is one forward and backward.

    python -m benchmarks.compile_cold
"""

import argparse

from benchmarks.common import one_line, save, table
from companion import device as devices
from companion.compiling import cold_and_warm

SETUP = """
import torch
from companion.compiling import compile_blocks
from companion.device import choose
from companion.model import MODELS, Transformer, next_token_loss
torch.manual_seed(0)
device = choose({device!r})
model = Transformer(MODELS["tiny"]).to(device)
batch = tuple(torch.randint(256, (12, 128), device=device) for _ in range(2))
"""
WHOLE = "compute = torch.compile(model)\n"
BLOCKS = "compute = model\ncompile_blocks(model)\n"
PROGRAM = "next_token_loss(compute, batch).backward()\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = devices.choose(arguments.device)
    print(one_line(devices.conditions(device)))
    setup = SETUP.format(device=arguments.device)
    results = {
        name: cold_and_warm(PROGRAM, setup + wrap)
        for name, wrap in (("whole model", WHOLE), ("blocks", BLOCKS))
    }
    rows = [
        [
            name,
            *(f"{start.cpu_seconds:.1f}" for start in (result.cold, result.warm)),
            f"{result.ratio:.1f}",
            *(f"{start.wall_seconds:.1f}" for start in (result.cold, result.warm)),
        ]
        for name, result in results.items()
    ]
    head = ["compiled", "cold CPU-s", "warm CPU-s", "ratio", "cold wall s", "warm wall s"]
    print(table(head, rows))
    whole, blocks = results.values()
    regional = whole.cold.cpu_seconds / blocks.cold.cpu_seconds
    print(f"cold, the whole model takes {regional:.1f} times the CPU time of its blocks")
    figures = {name: result.as_dict() for name, result in results.items()}
    save("compile_cold", {**figures, "whole_over_blocks": regional}, device)


if __name__ == "__main__":
    main()
