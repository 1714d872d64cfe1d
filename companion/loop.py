"""The training loop, as a generator: what you add to it is plain code in your own loop body.

    state = build(RunConfig.preset("tiny"))
    for record in train(state, steps=200):
        if record.step % 50 == 0:
            print(record.step, record.loss)

Read it from the bottom up: ``train`` fetches this rank's share of the next global batch and
calls ``optimizer_step``; the rest makes that exact on any number of ranks and micro-batches.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from companion import corpus as corpora
from companion import device as devices
from companion import parallel
from companion.corpus import BatchFn, Windows
from companion.measure import phase
from companion.model import Transformer, next_token_loss
from companion.randomness import seeded, step_seed
from companion.record import Clock, NonFiniteLoss, Record, StepResult, check_finite
from companion.state import CountFn, Execution, LossFn, Mesh, RunConfig, TrainState
from companion.stopping import Stop, Undisturbed, stop_requested

__all__ = [
    "NonFiniteLoss",
    "Record",
    "StepResult",
    "Stop",
    "build",
    "evaluate",
    "optimizer_step",
    "stop_requested",
    "train",
]

# --- build -------------------------------------------------------------------------------


def build(
    run: RunConfig,
    how: Execution | None = None,
    mesh: Mesh | None = None,
    *,
    model: Callable[[], nn.Module] | None = None,
    loss: LossFn | None = None,
    batches: BatchFn | None = None,
    held_out: BatchFn | None = None,
    count: CountFn | None = None,
) -> TrainState:
    """Model, optimizer, scheduler and data of a run, at position 0.

    The same call twice gives the same run. Bring your own with ``model`` (a function that
    makes the module, never a trained module), ``batches(first, count)`` (samples of a fixed
    order; see :data:`companion.corpus.BatchFn`), ``loss(model, batch)`` (**summed**) and
    ``count(batch)`` (what the sum is over; by default the targets of ``(inputs, targets)``
    other than -100).

    Raises:
        ValueError: an argument that cannot work, in one sentence.
        FileNotFoundError, OSError: from :func:`companion.corpus.prepare`.
    """
    how = how or Execution()
    mesh = mesh or Mesh(device=devices.choose(how.device))
    if isinstance(model, nn.Module) and not isinstance(model, type):
        raise ValueError(
            "model is a module that exists already, so a second run would start from trained "
            "weights; give a function that makes it: model=lambda: MyModel()"
        )
    parallel.share(run.global_batch, mesh.rank, mesh.world)
    with seeded(run.seed, mesh.device):
        module = model() if model else Transformer(run.model)
    if not isinstance(module, nn.Module):
        raise ValueError(f"model() returned {type(module).__name__}; return a torch.nn.Module")
    module.to(mesh.device, getattr(torch, run.dtype))
    known_count = None
    if batches is None:
        text = corpora.prepare(run.corpus)
        batches = Windows(text.train, run.sequence, run.seed)
        held_out = held_out or Windows(text.held_out, run.sequence, seed=0)
    if isinstance(batches, Windows) and count is None:
        known_count = batches.sequence
    # torch.compile on a module gives a module; its signature only promises a callable
    compiled = cast(nn.Module, torch.compile(module)) if how.compile else module
    compute = parallel.wrap(compiled, how, mesh)
    optimizer = make_optimizer(module, run)
    return TrainState(
        run=run,
        how=how,
        mesh=mesh,
        model=module,
        compute=compute,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, run.learning_rate_factor),
        batches=batches,
        held_out=held_out,
        loss=loss or next_token_loss,
        count=count or count_targets,
        known_count=known_count,
    )


def make_optimizer(model: nn.Module, run: RunConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient: nothing to train")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": run.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # DCP cannot bring back an empty group
    groups = [group for group in groups if group["params"]]
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=run.learning_rate)
    fused = trained[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=run.learning_rate, betas=run.betas, fused=fused)


def count_targets(batch: Any) -> int:
    """Targets of ``(inputs, targets)`` other than -100, which cross-entropy ignores."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and torch.is_tensor(batch[1])):
        raise ValueError(
            "a batch is not (inputs, targets), so its targets cannot be counted; "
            "pass build(..., count=your_function)"
        )
    return int(torch.count_nonzero(batch[1] != -100))


# --- one step ----------------------------------------------------------------------------


def optimizer_step(state: TrainState, batch: Any, count: int | None = None) -> StepResult:
    """One optimizer step on this rank's share of a global batch; moves the position on.

    Every micro-batch's loss is a sum, divided by the number of targets of the whole global
    batch, so the gradient is that of the global mean however it is cut up. DDP averages over
    ranks, hence the factor ``world``. ``count`` is that number where the caller knows it.

    Raises:
        NonFiniteLoss: on a CPU at once, before the weights are touched; on an accelerator
            when the loss is read.
    """
    run, mesh, device, compute = state.run, state.mesh, state.mesh.device, state.compute
    step = state.step
    if count is None:
        count = parallel.total(state.count(batch), mesh)
    if count == 0:
        raise ValueError(f"step {step}: no target in the batch carries loss; check its mask")
    pieces = micro_batches(to_device(batch, device), state.how.micro_batch)
    loss_sum: Tensor | None = None
    state.optimizer.zero_grad(set_to_none=True)
    with seeded(step_seed(run.seed, step, mesh.rank), device):
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with _NOTHING if last else parallel.no_sync(compute):
                with phase("forward"), _autocast(state):
                    loss = state.loss(compute, piece)
                with phase("backward"):
                    # as (loss * scale).backward(), without two operators
                    loss.backward(torch.full_like(loss, mesh.world / count))
            loss = loss.detach()
            loss_sum = loss if loss_sum is None else loss_sum + loss
    assert loss_sum is not None
    value, work = None, None
    if device.type == "cpu":
        value = loss_sum.item()
        check_finite(value, step)
    if mesh.world > 1:
        loss_sum, value = loss_sum.clone(), None
        work = parallel.start_sum(loss_sum, mesh)
    with phase("optimizer"):
        grad_norm = None
        if run.clip:
            parameters = [p for g in state.optimizer.param_groups for p in g["params"]]
            grad_norm = nn.utils.clip_grad_norm_(parameters, run.clip)
        with Undisturbed():
            state.optimizer.step()
            state.scheduler.step()
            state.position += run.global_batch
    return StepResult(loss_sum, value, count, grad_norm, work)


def micro_batches(batch: Any, size: int | None) -> list[Any]:
    """``batch`` cut along the first dimension into near-equal pieces of at most ``size``."""
    if size is None or (samples := _length(batch)) <= size:
        return [batch]
    n = math.ceil(samples / size)
    bounds = [samples * i // n for i in range(n + 1)]
    return [_cut(batch, low, high) for low, high in zip(bounds, bounds[1:], strict=False)]


def _cut(batch: Any, low: int, high: int) -> Any:
    return _map(lambda tensor: tensor[low:high], batch)


def _map(fn: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if torch.is_tensor(batch):
        return fn(batch)
    if isinstance(batch, tuple | list):
        return type(batch)(_map(fn, item) for item in batch)
    if isinstance(batch, dict):
        return {key: _map(fn, value) for key, value in batch.items()}
    return batch


def _length(batch: Any) -> int:
    while not torch.is_tensor(batch):
        items = list(batch.values()) if isinstance(batch, dict) else batch
        if not isinstance(items, tuple | list) or not items:
            raise ValueError(
                f"a batch holds {type(batch).__name__}; give tensors, or tuples or dicts of them"
            )
        batch = items[0]
    return len(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``; tensors that are there already are not copied."""
    if device.type == "cpu":
        return batch
    return _map(lambda t: t.to(device, non_blocking=True), batch)


_NOTHING = contextlib.nullcontext()


def _autocast(state: TrainState) -> contextlib.AbstractContextManager[Any]:
    if state.how.precision == "bf16":
        return torch.autocast(state.mesh.device.type, dtype=torch.bfloat16)
    return _NOTHING


# --- the loop ----------------------------------------------------------------------------


class _Feed:
    """This rank's share of the next global batch; on CUDA copied while the step before runs."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        run, mesh = state.run, state.mesh
        self.low, self.high = parallel.share(run.global_batch, mesh.rank, mesh.world)
        self.count = None
        if state.known_count is not None:
            self.count = state.known_count * run.global_batch
        self.ready: tuple[int, Any, int, torch.cuda.Event] | None = None
        self.stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None

    def fetch(self) -> tuple[Any, int]:
        """The batch at the state's position, and its targets over all ranks."""
        state, position = self.state, self.state.position
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] == position:
            torch.cuda.current_stream(state.mesh.device).wait_event(ready[3])
            # the allocator must not hand the memory out while this stream still reads it
            _map(_used_here, ready[1])
            return ready[1], ready[2]
        return self._load(position)

    def _load(self, position: int) -> tuple[Any, int]:
        batch = self.state.batches(position + self.low, self.high - self.low)
        count = self.count
        if count is None:
            count = parallel.total(self.state.count(batch), self.state.mesh)
        return batch, count

    def prepare(self) -> None:
        """Start copying the batch that comes next."""
        if self.stream is None:
            return
        batch, count = self._load(self.state.position)
        with torch.cuda.stream(self.stream):
            batch = _map(lambda t: t.pin_memory() if t.device.type == "cpu" else t, batch)
            batch = to_device(batch, self.state.mesh.device)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.ready = (self.state.position, batch, count, copied)


def _used_here(tensor: Tensor) -> Tensor:
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def train(state: TrainState, steps: int) -> Iterator[Record]:
    """Train ``steps`` more optimizer steps, one at a time, as you ask for them.

    The generator owns no thread, signal handler or file, so it may be left where it is. A
    ``break`` on one rank ends the loop on all of them at the next step.

    Raises:
        ValueError: ``steps`` is negative.
        NonFiniteLoss: see :func:`optimizer_step`.
    """
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is {steps!r}: give a whole number of at least 0")
    return _train(state, steps)


def _train(state: TrainState, steps: int) -> Iterator[Record]:
    clock, feed = Clock(state.mesh.device), _Feed(state)
    unread: deque[Record] = deque(maxlen=64)
    state.compute.train()
    for index in range(steps):
        if parallel.any_rank(False, state.mesh):
            return
        clock.start()
        with phase("data"):
            batch, count = feed.fetch()
        learning_rate = state.optimizer.param_groups[0]["lr"]
        result = optimizer_step(state, batch, count)
        if index + 1 < steps:
            feed.prepare()
        clock.stop(count)
        record = Record(state.step, state.position, learning_rate, result, clock)
        if state.mesh.device.type != "cpu":
            unread.append(record)
            if len(unread) == unread.maxlen:
                _read_all(unread)
        try:
            yield record
        except GeneratorExit:
            # the others are about to ask whether anyone has left
            if index + 1 < steps:
                parallel.any_rank(True, state.mesh)
            raise
    _read_all(unread)


def _read_all(records: deque[Record]) -> None:
    """Name the first step whose loss is not finite; once in 64 steps, as it waits."""
    for record in records:
        _ = record.loss
    records.clear()


@torch.no_grad()
def evaluate(state: TrainState, samples: int = 480, batches: BatchFn | None = None) -> float:
    """Mean held-out loss per target over the first ``samples`` samples, each counted once.

    Leaves everything as it was, also when it raises: the training flag of every submodule
    (a frozen BatchNorm stays frozen) and the random number generators.

    Raises:
        ValueError: there are no held-out batches, or none of them carries loss.
    """
    batches = batches or state.held_out
    if batches is None:
        raise ValueError("there are no held-out batches; pass build(..., held_out=...)")
    if samples < 1:
        raise ValueError(f"samples is {samples}: give at least 1")
    mesh, size = state.mesh, state.how.micro_batch or state.run.global_batch
    # not `compute`: nothing is compiled for a few batches, and DDP's forward meets other ranks
    module = state.model
    low, high = samples * mesh.rank // mesh.world, samples * (mesh.rank + 1) // mesh.world
    flags = [(m, m.training) for m in module.modules()]
    loss_sum, count = torch.zeros((), device=mesh.device, dtype=torch.float64), 0
    if mesh.device.type == "mps":
        loss_sum = loss_sum.float()
    with seeded(0, mesh.device):
        try:
            module.eval()
            for first in range(low, high, size):
                batch = batches(first, min(size, high - first))
                count += state.count(batch)
                with _autocast(state):
                    loss_sum += state.loss(module, to_device(batch, mesh.device))
        finally:
            for submodule, training in flags:
                submodule.training = training
    if work := parallel.start_sum(loss_sum, mesh):
        work.wait()
    count = parallel.total(count, mesh)
    if count == 0:
        raise ValueError(f"none of the {samples} held-out samples carries loss; check the mask")
    return loss_sum.item() / count
