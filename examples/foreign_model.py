"""Train a model that is not Companion's: a factory, a batch function and a loss are enough.

Run it: python examples/foreign_model.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from companion.loop import build, evaluate, train
from companion.state import RunConfig


class Digits(nn.Module):
    """A small convolutional network for 8 × 8 pictures of strokes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 8, 3, padding=1)
        self.head = nn.Linear(8 * 8 * 8, 2)

    def forward(self, picture):
        return self.head(F.relu(self.features(picture)).flatten(1))


def batches(first, count, salt=0):
    """Samples first … first + count - 1: a bar on noise; the label says which way it lies."""
    pictures, labels = [], []
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(2 * index + salt)
        picture = torch.randn(8, 8, generator=generator)
        label, row = (int(n) for n in torch.randint(0, 8, (2,), generator=generator))
        (picture if label % 2 else picture.T)[row] += 1.5
        pictures.append(picture[None])
        labels.append(label % 2)
    return torch.stack(pictures), torch.tensor(labels)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


run = RunConfig(global_batch=32, total_steps=150, learning_rate=1e-2, warmup_steps=10)
state = build(run, model=Digits, batches=batches, loss=loss, held_out=lambda f, n: batches(f, n, 1))
for record in train(state, steps=150):
    if record.step % 50 == 0:
        print(f"step {record.step}  loss {record.loss:.3f}  held-out {evaluate(state):.3f}")
