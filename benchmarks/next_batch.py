"""How long ``tiny`` waits for its next batch, and what the data path costs in all.

Blocked: the time inside the loop's own ``data`` phase, over the steps after the warm-up. Then
the loop on its real batches against a loop on one batch again and again, in paired rounds.

    python -m benchmarks.next_batch
"""

import argparse

import numpy as np
import torch

from benchmarks.common import one_line, save
from companion import corpus as corpora
from companion import device as devices
from companion.corpus import BatchFn, Windows
from companion.loop import build, train
from companion.measure import compare, phases, same_batch
from companion.state import Execution, RunConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="in which the waiting is timed")
    parser.add_argument("--rounds", type=int, default=100, help="of the comparison")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = devices.choose(arguments.device)
    print(one_line(devices.conditions(device)))
    run = RunConfig.preset("tiny", total_steps=10**9)
    windows = Windows(corpora.prepare().train, run.sequence, run.seed)

    def steps(batches: BatchFn, count: int = 10**9):
        return train(build(run, Execution(device=arguments.device), batches=batches), count)

    with phases(device) as times:
        for _ in steps(windows, arguments.steps):
            pass
    waited = np.array([step["data"] for step in times.steps[times.warmup :]])
    figures = {
        "blocked_median_ms": 1e3 * float(np.median(waited)),
        "blocked_p99_ms": 1e3 * float(np.quantile(waited, 0.99)),
        "blocked_first_ms": 1e3 * times.steps[0]["data"],
        "steps": len(waited),
    }
    print(
        f"blocked in next-batch: median {figures['blocked_median_ms']:.3f} ms, 99th percentile "
        f"{figures['blocked_p99_ms']:.3f} ms, over {len(waited)} steps; the very first (it "
        f"shuffles the epoch): {figures['blocked_first_ms']:.2f} ms"
    )
    real, same = steps(windows), steps(same_batch(windows))
    result = compare(
        lambda: next(real),
        lambda: next(same),
        device,
        rounds=arguments.rounds,
        names=("real batches", "the same batch again and again"),
    )
    print(result)
    save("next_batch", {**figures, "against_same_batch": result.as_dict()}, device)


if __name__ == "__main__":
    torch.set_num_threads(devices.cores())
    main()
