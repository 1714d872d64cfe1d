"""What a training loop costs on top of the step itself, in microseconds a step.

Every loop does the same work on the same model and data: zero_grad(set_to_none=True), forward,
backward, clip_grad_norm_, optimizer step, schedule, and it reads the loss of every step. The
schedule is LambdaLR, except in Companion, which sets the rate itself; so a second hand-written
loop that does the same stands beside the first.
It is written as its library's own examples are, with all logging off.

Method: one thread. Each loop runs as a coroutine that is paused where it asks for its next
batch, so all of them stay alive, warm and in the main thread. A round times a chunk of steps of
each, in shuffled order; the difference to the hand-written loop is taken within the round.
Medians over the rounds with 95 % bootstrap intervals. The hand-written loop runs twice: the
second one is the control, whose overhead must include 0.

    python -m benchmarks.loop_overhead              # needs benchmarks/requirements.txt for peers
    python -m benchmarks.loop_overhead --quick      # seconds instead of minutes; wide intervals
"""

import argparse
import contextlib
import importlib.metadata
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from benchmarks.common import one_line, save, table
from benchmarks.work import FOREVER, Work, mlp, tiny
from companion import device as devices
from companion.loop import build, train
from companion.measure import interleaved, median_interval
from companion.state import Execution

CPU = torch.device("cpu")
CHECKED = 20
"""Most steps whose losses are held against the hand-written loop's."""


class Batches:
    """An endless loader that hands control back to the timer after each chunk of batches."""

    def __init__(self, work: Work) -> None:
        self.fetch, self.chunk, self.step = work.fetch, work.chunk, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.step and self.step % self.chunk == 0:
            getcurrent().parent.switch()
        self.step += 1
        return self.fetch(self.step - 1)


# ── The loops ────────────────────────────────────────────────────────────────────────────────


def hand_written(work: Work, batches: Batches, losses: list[float]) -> None:
    model, optimizer, scheduler = work.parts()
    model.train()
    parameters = list(model.parameters())
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = work.mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, work.run.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())


def hand_written_without_scheduler(work: Work, batches: Batches, losses: list[float]) -> None:
    """As Companion does it: the rate is a function of the step, set by hand."""
    model, optimizer, _ = work.parts()
    model.train()
    parameters = list(model.parameters())
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = work.mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, work.run.clip)
        for group in optimizer.param_groups:
            group["lr"] = work.run.learning_rate * work.run.learning_rate_factor(step)
        optimizer.step()
        losses.append(loss.item())


def companion(work: Work, batches: Batches, losses: list[float]) -> None:
    state = build(
        work.run,
        Execution(device="cpu"),
        model=work.model,
        loss=work.summed_loss,
        batches=lambda first, count: next(batches),
        count=work.targets,
    )
    for record in train(state, steps=FOREVER):
        losses.append(record.loss)


def fabric(work: Work, batches: Batches, losses: list[float]) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, scheduler = work.parts()
    model, optimizer = fabric.setup(model, optimizer)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = work.mean_loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.run.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())


def accelerate(work: Work, batches: Batches, losses: list[float]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(*work.parts())
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = work.mean_loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.run.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())


def lightning(work: Work, batches: Batches, losses: list[float]) -> None:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.scheduler = work.parts()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = work.mean_loss(self.model, batch)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            schedule = {"scheduler": self.scheduler, "interval": "step"}
            return {"optimizer": self.optimizer, "lr_scheduler": schedule}

    # barebones: the setting that Lightning itself offers to measure its overhead
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=FOREVER, barebones=True,
        gradient_clip_val=work.run.clip, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), batches)


def transformers(work: Work, batches: Batches, losses: list[float]) -> None:
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return Named()

        def compute_loss(self, model: nn.Module, inputs: Any, **ignored: Any) -> Tensor:
            loss = work.mean_loss(model, (inputs["inputs"], inputs["targets"]))
            losses.append(loss.item())
            return loss

    class Named:
        """It wants batches to be dicts."""

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({"inputs": inputs, "targets": targets} for inputs, targets in batches)

    model, optimizer, scheduler = work.parts()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, max_steps=FOREVER, max_grad_norm=work.run.clip,
        logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none",
        disable_tqdm=True, remove_unused_columns=False, average_tokens_across_devices=False,
        per_device_train_batch_size=work.run.global_batch,
    )  # fmt: skip
    # in a wrapper, since it would write into our model's own config
    Own(model=nn.Sequential(model), args=arguments, optimizers=(optimizer, scheduler)).train()


LOOPS: dict[str, tuple[Callable[[Work, Batches, list[float]], None], str | None]] = {
    "hand-written": (hand_written, None),
    "hand-written again": (hand_written, None),
    "the same, no LambdaLR": (hand_written_without_scheduler, None),
    "companion.train": (companion, None),
    "Lightning Fabric": (fabric, "lightning"),
    "Accelerate": (accelerate, "accelerate"),
    "transformers Trainer": (transformers, "transformers"),
    "Lightning Trainer": (lightning, "lightning"),
}
"""Each loop, and the package that it needs."""


# ── Timing ───────────────────────────────────────────────────────────────────────────────────


class Paused:
    """A loop that runs one chunk of steps each time it is called."""

    def __init__(self, work: Work, loop: Callable[[Work, Batches, list[float]], None]) -> None:
        self.losses: list[float] = []
        self.coroutine = greenlet(lambda: loop(work, Batches(work), self.losses))

    def __call__(self) -> None:
        self.coroutine.switch()
        if self.coroutine.dead:
            raise RuntimeError("a loop ended before its data did")

    def close(self) -> None:
        with contextlib.suppress(BaseException):
            self.coroutine.throw()


def installed(package: str | None) -> bool:
    if package is None:
        return True
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def measure(work: Work, rounds: int) -> dict[str, dict[str, Any]]:
    """Per loop: its step in µs, and overhead and ratio against the hand-written loop."""
    loops = {
        name: Paused(work, loop) for name, (loop, package) in LOOPS.items() if installed(package)
    }
    seconds = interleaved(loops, CPU, rounds, calls=1)
    agree(loops)
    for loop in loops.values():
        loop.close()
    base = seconds["hand-written"]
    return {
        name: {
            "step_us": 1e6 * median_interval(values)[0] / work.chunk,
            "overhead_us": median_interval(1e6 * (values - base) / work.chunk),
            "ratio": median_interval(values / base),
            "rounds": len(values),
        }
        for name, values in seconds.items()
    }


def agree(loops: dict[str, Paused]) -> None:
    """All loops did the same work: their losses are the same but for the order of additions."""
    # one that fetches ahead pauses before its last step
    steps = min(CHECKED, *(len(loop.losses) for loop in loops.values()))
    expected = torch.tensor(loops["hand-written"].losses[:steps])
    for name, loop in loops.items():
        found = torch.tensor(loop.losses[:steps])
        if not torch.allclose(found, expected, rtol=1e-4, atol=0):
            raise SystemExit(
                f"{name} did other work: its first losses are {found.tolist()}, "
                f"the hand-written loop's {expected.tolist()}"
            )


def show(work: Work, figures: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, of in figures.items():
        middle, low, high = of["overhead_us"]
        ratio, ratio_low, ratio_high = of["ratio"]
        overhead = "–" if name == "hand-written" else f"{middle:.1f} [{low:.1f}, {high:.1f}]"
        against = (
            "–" if name == "hand-written" else f"{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]"
        )
        rows.append((name, f"{of['step_us']:,.1f}", overhead, against))
    rounds = figures["hand-written"]["rounds"]
    title = f"{work.name}: {rounds} rounds of {work.chunk} steps"
    return table((title, "µs a step", "overhead, µs", "ratio"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("--only", choices=("mlp", "tiny"), help="one of the two workloads")
    parser.add_argument("--rounds", type=int, help="of each workload")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print(one_line(devices.conditions(CPU)))
    versions = {
        package: importlib.metadata.version(package)
        for _, package in LOOPS.values()
        if package is not None and installed(package)
    }
    print(one_line(versions) or "no peer is installed: pip install -r benchmarks/requirements.txt")
    figures: dict[str, Any] = {"peers": versions}
    for make, many, few in ((mlp, 200, 12), (tiny, 200, 4)):
        if arguments.only in (None, make.__name__):
            work = make()
            rounds = arguments.rounds or (few if arguments.quick else many)
            figures[work.name] = measure(work, rounds)
            print("\n" + show(work, figures[work.name]) + "\n", flush=True)
    save("loop_overhead", figures, CPU)


if __name__ == "__main__":
    main()
