"""What the benchmarks train: the guide's MLP, and ``tiny`` on the course's text."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from companion import corpus as corpora
from companion.corpus import Windows
from companion.loop import make_optimizer
from companion.model import Transformer, next_token_loss
from companion.state import RunConfig

FOREVER = 10**9


@dataclass(frozen=True)
class Work:
    """What is trained: the same for every loop."""

    name: str
    run: RunConfig
    model: Callable[[], nn.Module]
    fetch: Callable[[int], tuple[Tensor, Tensor]]
    """The batch of a step."""
    mean_loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    summed_loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    targets: int
    """In a sample."""
    chunk: int
    """Steps timed together."""

    def parts(self, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
        """Model, optimizer and scheduler in their initial state."""
        torch.manual_seed(self.run.seed)
        model = self.model().to(device)
        optimizer = make_optimizer(model, self.run)
        return model, optimizer, LambdaLR(optimizer, self.run.learning_rate_factor)


def mlp() -> Work:
    """The guide's MLP; 64 batches of 32 random samples, again and again."""
    random = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(32, 100, generator=random), torch.randint(10, (32,), generator=random))
        for _ in range(64)
    ]
    run = RunConfig(
        global_batch=32, total_steps=FOREVER, optimizer="sgd", learning_rate=1e-3, weight_decay=0.0
    )
    return Work(
        name="mlp",
        run=run,
        model=lambda: nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)),
        fetch=lambda step: data[step % len(data)],
        mean_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        summed_loss=lambda model, batch: F.cross_entropy(
            model(batch[0]), batch[1], reduction="sum"
        ),
        targets=1,
        chunk=50,
    )


def tiny() -> Work:
    """The course's ``tiny`` on its real text."""
    run = RunConfig.preset("tiny", total_steps=FOREVER)
    windows = Windows(corpora.prepare().train, run.sequence, run.seed)
    return Work(
        name="tiny",
        run=run,
        model=lambda: Transformer(run.model),
        fetch=lambda step: windows(step * run.global_batch, run.global_batch),
        mean_loss=lambda model, batch: next_token_loss(model, batch) / batch[1].numel(),
        summed_loss=next_token_loss,
        targets=run.sequence,
        chunk=1,
    )
