"""Held-out loss of ``tiny`` after 300 steps against what byte counts reach, for three seeds.

The whole held-out text is read once, in windows. The reference (bigram counts of the training
text) is taken on the same text. Losses belong to one corpus: its hash is printed.

    python -m benchmarks.baseline_losses
"""

import argparse

import numpy as np
import torch

from benchmarks.common import one_line, save, table
from companion import corpus as corpora
from companion import device as devices
from companion.loop import build, evaluate, train
from companion.state import Execution, RunConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, help="held-out windows; default: all of them")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = devices.choose(arguments.device)
    print(one_line(devices.conditions(device)))
    text = corpora.prepare()
    known = corpora.reference_losses(text)
    print(f"corpus {text.sha256[:16]}, {text.files} files, {text.bytes:,} bytes")
    rows, losses = [], []
    for seed in range(arguments.seeds):
        run = RunConfig.preset("tiny", total_steps=arguments.steps, seed=seed)
        state = build(run, Execution(device=arguments.device))
        for record in train(state, arguments.steps):
            last = record
        windows = arguments.samples or len(state.held_out)
        loss, quick = evaluate(state, samples=windows), evaluate(state)
        losses.append(loss)
        rows.append(
            (seed, f"{last.loss:.4f}", f"{loss:.4f}", f"{known.bigram - loss:.4f}", f"{quick:.4f}")
        )
        print(f"seed {seed}: held-out {loss:.4f}", flush=True)
    middle = float(np.median(losses))
    header = ("seed", "last train loss", "held-out", "below the bigram", "evaluate() as it comes")
    print(table(header, rows))
    print(
        f"median of {len(losses)} seeds: {middle:.4f}; bigram {known.bigram:.4f}, margin "
        f"{known.bigram - middle:.4f} nats a byte (unigram {known.unigram:.4f}, "
        f"uniform {known.uniform:.4f})"
    )
    figures = {
        "corpus": text.sha256,
        "steps": arguments.steps,
        "held_out": losses,
        "median": middle,
        "margin": known.bigram - middle,
        "references": known.as_dict(),
    }
    save("baseline_losses", figures, device)


if __name__ == "__main__":
    torch.set_num_threads(devices.cores())
    main()
