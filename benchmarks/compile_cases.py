"""What torch.compile gains and costs: a block bound by memory, the ``tiny`` step, and a loser.

Eager against compiled in interleaved rounds; the compiling call on an empty cache; the step at
which compiling has paid; for ``tiny`` the losses of both, step by step.

    python -m benchmarks.compile_cases
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import one_line, save, table
from companion import device as devices
from companion.compiling import break_even
from companion.loop import build, train
from companion.measure import compare
from companion.state import Execution, RunConfig

FOREVER = 10**9
TOLERANCE = 1e-3
"""Of a loss, relative: sums are taken in another order, and training amplifies that."""


class MemoryBound(nn.Module):
    """Norms and pointwise operations, no matrix product; ``[B, C] -> [B, C]``."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            y = norm(x)
            x = x + F.silu(y) * torch.sigmoid(y) + 0.1 * y
        return x


def small(x: Tensor) -> Tensor:
    """Two operations on 16 numbers: the compiled function's own checks take longer."""
    return x * 2 + 1


@dataclass(frozen=True)
class Case:
    name: str
    eager: Callable[[], object]
    compiled: Callable[[], object]
    """Its first call compiles."""


def cases(device: torch.device) -> list[Case]:
    torch.manual_seed(0)
    block = MemoryBound(2048).to(device)
    fused, x = torch.compile(block), torch.randn(512, 2048, device=device, requires_grad=True)
    few, numbers = torch.compile(small), torch.randn(16, device=device)
    run = RunConfig.preset("tiny", total_steps=FOREVER)
    plain, fast = (
        train(build(run, Execution(device=str(device), compile=compiled)), FOREVER)
        for compiled in (False, True)
    )
    return [
        Case(
            "norms and pointwise, 512 × 2048",
            lambda: block(x).sum().backward(),
            lambda: fused(x).sum().backward(),
        ),
        Case("tiny, a training step", lambda: next(plain), lambda: next(fast)),
        Case("2 operations on 16 numbers", lambda: small(numbers), lambda: few(numbers)),
    ]


def losses(compiled: bool, steps: int, device: str) -> list[float]:
    state = build(
        RunConfig.preset("tiny", total_steps=steps), Execution(device=device, compile=compiled)
    )
    return [record.loss for record in train(state, steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="whose losses are compared")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=devices.cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = devices.choose(arguments.device)
    print(one_line(devices.conditions(device)))
    figures, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="companion_cache_") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for case in cases(device):
            case.eager()
            start = perf_counter()
            case.compiled()
            devices.synchronize(device)
            first = perf_counter() - start
            result = compare(
                case.eager, case.compiled, device, arguments.rounds, ("eager", "compiled")
            )
            cold = max(0.0, first - result.b_seconds)
            pays = break_even(cold, result.a_seconds, result.b_seconds) if result.shown else None
            figures[case.name] = {**result.as_dict(), "cold_seconds": cold, "break_even": pays}
            rows.append(
                [
                    case.name,
                    f"{1e3 * result.a_seconds:.3f}",
                    f"{1e3 * result.b_seconds:.3f}",
                    f"{result.ratio:.2f} [{result.low:.2f}, {result.high:.2f}]",
                    result.rounds,
                    f"{cold:.1f}",
                    pays or "never",
                ]
            )
        head = ["case", "eager ms", "compiled ms", "speed-up", "rounds", "cold s", "pays at step"]
        print(table(head, rows))
        pairs = [losses(compiled, arguments.steps, str(device)) for compiled in (False, True)]
    worst = max(abs(a - b) / a for a, b in zip(*pairs, strict=True))
    print(f"losses of {arguments.steps} steps: largest relative difference {worst:.1e}")
    if worst > TOLERANCE:
        raise SystemExit(f"losses differ by more than {TOLERANCE:g}")
    save("compile_cases", {"cases": figures, "largest_loss_difference": worst}, device)


if __name__ == "__main__":
    main()
